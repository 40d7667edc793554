//! The start of a runner: what an earlier one left is taken up, in the order turns, idle engines, dead keepers.

use std::{
    collections::HashSet,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use futures::{StreamExt as _, stream};
use roundhouse_engines::{NativeRef, TranslatorOpen};
use roundhouse_process::{KeeperFound, KeeperState, Request, Response, close_dead, scan};

use crate::{
    context::Context,
    error::{Error, chain},
    holds, launch, pool,
    runner::{Runner, names},
    session_record::SessionRecord,
    turn,
};

/// Time that the sweep of one dead keeper may take.
const SWEEP: Duration = Duration::from_secs(5);

/// Turns, and sessions, that are taken up at once.
const AT_ONCE: usize = 32;

/// Pause between two tries to read a turn.
const AGAIN: Duration = Duration::from_secs(5);

/// Takes up what is there. Turns first: what they hold is theirs.
///
/// # Errors
/// [`Error::Storage`] when the state directory cannot be read.
pub(crate) async fn recover(runner: &Arc<Runner>) -> Result<(), Error> {
    let context = &runner.context;
    holds::recover(context)?;
    // A turn that is taken up may start an engine at once: what was not there before is nothing that was left.
    let mut left = HashSet::new();
    for session_id in names(context.state.sessions())? {
        let found = scan(&context.state.spools(&session_id), context.state.runner_id()).unwrap_or_default();
        left.extend(found.into_iter().map(|keeper| keeper.spool_id));
    }
    let temporary = names(context.state.root().join("tmp"))?;
    let mut open = Vec::new();
    for turn_id in names(context.state.turns())? {
        if !context.state.journal(&turn_id).exists() {
            continue;
        }
        match turn::read(context, &turn_id).await {
            Ok(turn::Read::Open(found)) => open.push(found),
            Ok(turn::Read::Ended(handle)) => runner.insert(handle),
            Ok(turn::Read::Nothing) => {}
            Err(error) => {
                tracing::error!(
                    turn = turn_id,
                    error = chain(&error),
                    "a turn cannot be read; it is tried again"
                );
                runner.set_unread(&turn_id);
            }
        }
    }
    // Each may have a keeper that is stopped and has to be waited for: one does not wait for the other.
    let held = Mutex::new(HashSet::new());
    let hold = |spool_id| held.lock().unwrap_or_else(PoisonError::into_inner).extend(spool_id);
    stream::iter(open)
        .for_each_concurrent(AT_ONCE, async |found| {
            let turn_id = found.turn_id().to_owned();
            if let Some(handle) = found.take_up(context).await {
                if !handle.hub.ended() {
                    hold(spool_of(context, &turn_id));
                }
                runner.insert(handle);
            }
        })
        .await;
    let held = held.into_inner().unwrap_or_else(PoisonError::into_inner);
    stream::iter(names(context.state.sessions())?)
        .for_each_concurrent(AT_ONCE, async |session_id| {
            let found = match scan(&context.state.spools(&session_id), context.state.runner_id()) {
                Ok(found) => found,
                Err(error) => {
                    tracing::warn!(session = session_id, error = chain(&error), "keepers cannot be listed");
                    return;
                }
            };
            for keeper in found {
                if left.contains(&keeper.spool_id) && !held.contains(&keeper.spool_id) {
                    settle(runner, &session_id, keeper).await;
                }
            }
        })
        .await;
    clear_temporary(context, temporary)
}

/// Tries again to read the turns that could not be read at the start, until all are read or the runner stops.
pub(crate) async fn read_again(runner: Arc<Runner>) {
    loop {
        if runner.unread_turns().is_empty() {
            return;
        }
        tokio::select! {
            () = runner.context.shutdown.cancelled() => return,
            () = tokio::time::sleep(AGAIN) => {}
        }
        for turn_id in runner.unread_turns() {
            take_up_late(&runner, &turn_id).await;
        }
    }
}

async fn take_up_late(runner: &Arc<Runner>, turn_id: &str) {
    let context = &runner.context;
    // On a thread of its own: what takes a turn up stays on one thread until the turn is a task.
    let (recovering, id) = (Arc::clone(context), turn_id.to_owned());
    let runtime = tokio::runtime::Handle::current();
    let recovered =
        tokio::task::spawn_blocking(move || runtime.block_on(turn::recover(&recovering, &id))).await;
    let recovered = recovered.unwrap_or_else(|error| Err(Error::Internal(format!("recovery task: {error}"))));
    let handle = match recovered {
        Ok(handle) => handle,
        Err(error) => {
            tracing::debug!(turn = turn_id, error = chain(&error), "the turn still cannot be read");
            return;
        }
    };
    let mut held = None;
    if let Some(handle) = handle {
        if !handle.hub.ended() {
            held = spool_of(context, turn_id);
        }
        runner.insert(handle);
    }
    for session_id in runner.set_read(turn_id) {
        for keeper in scan(&context.state.spools(&session_id), context.state.runner_id()).unwrap_or_default()
        {
            if held.as_ref() != Some(&keeper.spool_id) {
                settle(runner, &session_id, keeper).await;
            }
        }
    }
}

/// The spool of a turn's newest process.
fn spool_of(context: &Context, turn_id: &str) -> Option<String> {
    let records = crate::journal::Journal::read(&context.state.journal(turn_id)).ok()?;
    turn::State::fold(&records).process.map(|process| process.spool_id)
}

/// A keeper that no turn holds: an idle engine, or the rest of a dead one.
async fn settle(runner: &Runner, session_id: &str, keeper: KeeperFound) {
    let context = &runner.context;
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
        KeeperState::Live => match adopt_idle(runner, session_id, &keeper.spool_id).await {
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

async fn adopt_idle(runner: &Runner, session_id: &str, spool_id: &str) -> Result<(), String> {
    let context = &runner.context;
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
    // The keeper knows for which turn it is at work. If it does not say, it may be any of those that cannot be read.
    let turns: Vec<String> = match engine.keeper.ask(Request::Status).await {
        Ok(Response::Status(status)) => status.turn_id.into_iter().collect(),
        _ => runner.unread_turns(),
    };
    if !runner.unread_turns().is_empty() {
        let mut busy = false;
        for turn_id in &turns {
            busy |= runner.hold_back(turn_id, session_id);
        }
        if busy {
            return Err("it may be in the middle of a turn that cannot be read".to_owned());
        }
    }
    for turn_id in turns {
        // The runner before died between the turn's end and the keeper's knowing of it.
        if let Err(error) = engine.keeper.ask(Request::EndTurn { turn_id }).await {
            tracing::warn!(session = session_id, spool = spool_id, %error, "a turn's end is not in the spool");
        }
    }
    if current {
        pool::put(context, engine);
    } else {
        pool::close(context, engine).await;
    }
    Ok(())
}

/// Removes those of these temporary directories whose processes are gone.
fn clear_temporary(context: &Context, found: Vec<String>) -> Result<(), Error> {
    let mut live = HashSet::new();
    for session_id in names(context.state.sessions())? {
        for keeper in scan(&context.state.spools(&session_id), context.state.runner_id()).unwrap_or_default()
        {
            if keeper.state == KeeperState::Live {
                live.insert(keeper.spool_id);
            }
        }
    }
    for spool_id in found {
        if !live.contains(&spool_id) {
            let _ = std::fs::remove_dir_all(context.state.temporary(&spool_id));
        }
    }
    Ok(())
}
