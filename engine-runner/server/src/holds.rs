//! What living keepers hold that no turn of this runner has in its hands: their sessions, and the workspaces of turns
//! that ended LOST while an engine may still be at work there.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use roundhouse_engines::{Failure, Reason};
use roundhouse_process::{KeeperDirError, KeeperFound, KeeperState, Link, is_alive, scan};
use serde::{Deserialize, Serialize};

use crate::{
    context::Context,
    error::{Error, chain},
    pool,
    runner::names,
    state_dir::{read_json, write_json},
};

/// Looks at a session's keepers before one is believed to stay: the end of one may just be on its way.
const LOOKS: u32 = 10;

/// As [`LOOKS`], for one that was asked to end its engine in order: as long as that may take.
const ENDING_LOOKS: u32 = 100;

/// Pause between two looks.
const LOOK_PAUSE: Duration = Duration::from_millis(100);

/// Pause between two looks at the keeper of a turn that was lost.
const WATCH: Duration = Duration::from_secs(1);

/// `held/<turn>`: a turn that ended LOST, and the keeper whose engine may still be at work for it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Hold {
    /// The turn.
    pub turn_id: String,
    /// Canonical path of the workspace.
    pub workspace: PathBuf,
    /// The session.
    pub session_id: String,
    /// The keeper's spool.
    pub spool_id: String,
}

/// Makes sure that no process is alive on a session before another one is started on it. Of the caller's own ones all
/// are gone already.
///
/// # Errors
/// [`Error::Refused`] names the keeper; [`Error::Storage`] when nobody can tell.
pub(crate) async fn no_process(context: &Arc<Context>, session_id: &str) -> Result<(), Error> {
    let mut left = LOOKS;
    let mut asked = false;
    loop {
        let (spools, owner) = (context.state.spools(session_id), context.state.runner_id().to_owned());
        let found = tokio::task::spawn_blocking(move || alive(&spools, &owner))
            .await
            .map_err(|error| Error::Internal(format!("scan task: {error}")))?
            .map_err(|error| Error::Storage {
                action: "look for a session's processes",
                source: std::io::Error::other(chain(&error)),
            })?;
        let Some(keeper) = found else { return Ok(()) };
        left -= 1;
        if left == 0 && !asked && keeper.state == KeeperState::Live && end_idle(context, &keeper).await {
            // It was silent when this runner started, perhaps; it answers now, and ends its engine in order.
            asked = true;
            left = ENDING_LOOKS;
            continue;
        }
        if left == 0 {
            let whose = match keeper.state {
                KeeperState::Foreign => "a keeper of another or a newer runner",
                KeeperState::Live | KeeperState::Dead => "a keeper that this runner could not take up",
            };
            return Err(Error::Refused {
                failure: Box::new(Failure {
                    what_to_do: "Wait until it ends by itself, or end it after making sure that nothing works there any \
                                 more; then retry the turn."
                        .to_owned(),
                    ..Failure::new(
                        Reason::Process,
                        format!(
                            "a process is still alive on session {session_id}, under {whose} (spool {})",
                            keeper.spool_id
                        ),
                    )
                }),
                started: false,
            });
        }
        tokio::time::sleep(LOOK_PAUSE).await;
    }
}

/// Has a keeper of this runner that serves no turn end its engine in order: whoever calls knows nothing of it, and resumes
/// the session. False: it has a turn, or does not answer.
async fn end_idle(context: &Arc<Context>, keeper: &KeeperFound) -> bool {
    let (dir, owner) = (keeper.dir.clone(), context.state.runner_id().to_owned());
    let timeout = context.settings.keeper_timeout;
    let asked = tokio::task::spawn_blocking(move || {
        let Ok((mut link, status)) = Link::connect(&dir, &owner, timeout) else { return false };
        status.turn_id.is_none() && link.release(pool::SETTLE, pool::TERM).is_ok()
    });
    let ends = asked.await.unwrap_or(false);
    tracing::warn!(spool = keeper.spool_id, ends, "an idle engine that was not taken up is in the way");
    ends
}

/// A keeper that is alive in a session's directory. Blocking.
fn alive(spools: &Path, owner: &str) -> Result<Option<KeeperFound>, KeeperDirError> {
    for keeper in scan(spools, owner)? {
        if keeper.state != KeeperState::Dead && is_alive(&keeper.dir)? {
            return Ok(Some(keeper));
        }
    }
    Ok(None)
}

/// Keeps the workspace of a turn that ends LOST until its keeper is dead, also over restarts. The turn has its slot. False:
/// the keeper is dead, and there is nothing to keep.
pub(crate) async fn keep(context: &Arc<Context>, hold: Hold) -> bool {
    let (looking, looked) = (Arc::clone(context), hold.clone());
    if tokio::task::spawn_blocking(move || is_over(&looking, &looked)).await.unwrap_or(false) {
        return false;
    }
    let (path, written) = (file(context, &hold.turn_id), hold.clone());
    let stored = tokio::task::spawn_blocking(move || write_json(&path, &written)).await;
    if !matches!(stored, Ok(Ok(()))) {
        tracing::error!(
            turn = hold.turn_id,
            ?stored,
            "a lost turn's hold is not written: a restart forgets it"
        );
    }
    watch(context, hold);
    true
}

/// Takes up the holds of an earlier runner. What works there no more is free.
///
/// # Errors
/// [`Error::Storage`] when they cannot be listed.
pub(crate) fn recover(context: &Arc<Context>) -> Result<(), Error> {
    for turn_id in names(context.state.held())? {
        let hold: Hold = match read_json(&file(context, &turn_id)) {
            Ok(Some(hold)) => hold,
            Ok(None) => continue,
            Err(error) => {
                tracing::error!(turn = turn_id, error = chain(&error), "a lost turn's hold cannot be read");
                continue;
            }
        };
        if is_over(context, &hold) {
            forget(context, &hold);
            continue;
        }
        if let Err(error) = context.slots.take(&hold.turn_id, &hold.workspace) {
            tracing::error!(turn = turn_id, error = chain(&error), "two turns are found in one workspace");
        }
        watch(context, hold);
    }
    Ok(())
}

fn watch(context: &Arc<Context>, hold: Hold) {
    tracing::warn!(
        turn = hold.turn_id,
        spool = hold.spool_id,
        "a lost turn keeps its workspace while its keeper lives"
    );
    let context = Arc::clone(context);
    // No task that a stop waits for.
    tokio::spawn(async move {
        loop {
            tokio::select! {
                () = context.shutdown.cancelled() => return,
                () = tokio::time::sleep(WATCH) => {}
            }
            let (looking, looked) = (Arc::clone(&context), hold.clone());
            if tokio::task::spawn_blocking(move || is_over(&looking, &looked)).await.unwrap_or(false) {
                forget(&context, &hold);
                context.slots.free(&hold.turn_id);
                tracing::info!(turn = hold.turn_id, "a lost turn's workspace is free");
                return;
            }
        }
    });
}

/// Whether the keeper is known to be dead. Blocking.
fn is_over(context: &Context, hold: &Hold) -> bool {
    let directory = context.state.spool(&hold.session_id, &hold.spool_id);
    match directory.symlink_metadata() {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => true,
        _ => matches!(is_alive(&directory), Ok(false)),
    }
}

fn forget(context: &Context, hold: &Hold) {
    let _ = std::fs::remove_file(file(context, &hold.turn_id));
}

/// One file per turn.
fn file(context: &Context, turn_id: &str) -> PathBuf {
    context.state.held().join(turn_id)
}
