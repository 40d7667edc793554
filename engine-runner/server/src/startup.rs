//! The start of a runner: what an earlier one left is taken up, in the order turns, idle engines, dead keepers.

use std::{collections::HashSet, sync::Arc, time::Duration};

use roundhouse_engines::{NativeRef, TranslatorOpen};
use roundhouse_process::{KeeperFound, KeeperState, close_dead, scan};

use crate::{
    context::Context,
    error::{Error, chain},
    launch, pool,
    runner::{Runner, names},
    session_record::SessionRecord,
    turn,
};

/// Time that the sweep of one dead keeper may take.
const SWEEP: Duration = Duration::from_secs(5);

/// Takes up what is there. Turns first: what they hold is theirs.
///
/// # Errors
/// [`Error::Storage`] when the state directory cannot be read.
pub(crate) async fn recover(runner: &Arc<Runner>) -> Result<(), Error> {
    let context = &runner.context;
    let mut held = HashSet::new();
    for turn_id in names(context.state.turns())? {
        if !context.state.journal(&turn_id).exists() {
            continue;
        }
        match turn::recover(context, &turn_id).await {
            Ok(Some(handle)) => {
                if !handle.hub.ended() {
                    held.extend(spool_of(context, &turn_id));
                }
                runner.insert(handle);
            }
            Ok(None) => {}
            Err(error) => tracing::error!(turn = turn_id, error = chain(&error), "a turn cannot be read"),
        }
    }
    for session_id in names(context.state.sessions())? {
        let found = match scan(&context.state.spools(&session_id), context.state.runner_id()) {
            Ok(found) => found,
            Err(error) => {
                tracing::warn!(session = session_id, error = chain(&error), "keepers cannot be listed");
                continue;
            }
        };
        for keeper in found {
            if !held.contains(&keeper.spool_id) {
                settle(context, &session_id, keeper).await;
            }
        }
    }
    clear_temporary(context)
}

/// The spool of a turn's newest process.
fn spool_of(context: &Context, turn_id: &str) -> Option<String> {
    let records = crate::journal::Journal::read(&context.state.journal(turn_id)).ok()?;
    turn::State::fold(&records).process.map(|process| process.spool_id)
}

/// A keeper that no turn holds: an idle engine, or the rest of a dead one.
async fn settle(context: &Arc<Context>, session_id: &str, keeper: KeeperFound) {
    match keeper.state {
        KeeperState::Foreign => {}
        KeeperState::Dead => {
            if keeper.dir.join("closed").exists() {
                return;
            }
            let (dir, owner) = (keeper.dir.clone(), context.state.runner_id().to_owned());
            let closed = tokio::task::spawn_blocking(move || close_dead(&dir, &owner, SWEEP)).await;
            if let Ok(Err(error)) = closed {
                tracing::warn!(
                    spool = keeper.spool_id,
                    error = chain(&error),
                    "a dead keeper was not closed"
                );
            }
        }
        KeeperState::Live => match adopt_idle(context, session_id, &keeper.spool_id).await {
            Ok(()) => tracing::info!(session = session_id, spool = keeper.spool_id, "idle engine taken up"),
            Err(error) => {
                tracing::warn!(
                    session = session_id,
                    spool = keeper.spool_id,
                    error,
                    "a keeper is left alone"
                );
            }
        },
    }
}

async fn adopt_idle(context: &Arc<Context>, session_id: &str, spool_id: &str) -> Result<(), String> {
    let record = SessionRecord::load(&context.state, session_id).map_err(|error| chain(&error))?;
    let record = record.ok_or("its session has no record")?;
    let current = record.spool_id.as_deref() == Some(spool_id) && record.opened && record.unusable.is_none();
    let open = TranslatorOpen {
        spool_id: spool_id.to_owned(),
        native: record.native.clone().unwrap_or(NativeRef { id: String::new(), file: None }),
        opening: None,
        carry: record.carry.clone(),
        turn_id: None,
    };
    // What it printed before is not read again: the turn that it was for has ended.
    let (engine, _) = launch::adopt(context, &record, spool_id, &open, None).await?;
    if current {
        pool::put(context, engine);
    } else {
        pool::close(context, engine).await;
    }
    Ok(())
}

/// Removes temporary directories of processes that are gone.
fn clear_temporary(context: &Context) -> Result<(), Error> {
    let mut live = HashSet::new();
    for session_id in names(context.state.sessions())? {
        for keeper in scan(&context.state.spools(&session_id), context.state.runner_id()).unwrap_or_default()
        {
            if keeper.state == KeeperState::Live {
                live.insert(keeper.spool_id);
            }
        }
    }
    for spool_id in names(context.state.root().join("tmp"))? {
        if !live.contains(&spool_id) {
            let _ = std::fs::remove_dir_all(context.state.temporary(&spool_id));
        }
    }
    Ok(())
}
