//! Who works on turns: one task per turn that is past QUEUED and not settled.
//!
//! The store says what there is to do; signals only say when to look. A task that is started twice, or again after a
//! crash, finds what was done and goes on from there (`plan`). So nothing here is state: it may all be lost.

mod agent;
mod arrange;
mod attach;
mod close;
mod context;
mod drive;
mod effects;
mod engage;
mod plan;
mod prefetch;
mod pump;
mod reasons;
mod settle;
mod silence;

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use roundhouse_domain::id::TurnId;
use roundhouse_store::{Hint, Hints};
use tokio::sync::{Notify, watch};
use tracing::Instrument as _;

pub(crate) use agent::engine_facts;
pub(crate) use effects::own_terminal;
pub(crate) use prefetch::{Prefetches, begin as prefetch};
pub(crate) use reasons::cancelled as cancelled_error;

use crate::app::App;

/// The tasks that work on turns.
#[derive(Debug, Default)]
pub(crate) struct Dispatcher {
    drives: Mutex<HashMap<TurnId, Arc<Signals>>>,
}

/// How a turn's task is told to look.
#[derive(Debug, Default)]
pub(crate) struct Signals {
    poke: Notify,
    /// It waits for its workspace's slot.
    waits_for_slot: AtomicBool,
    /// Becomes true when the task has ended.
    done: watch::Sender<bool>,
}

impl Signals {
    fn poke(&self) {
        self.poke.notify_one();
    }
}

impl Dispatcher {
    fn drives(&self) -> MutexGuard<'_, HashMap<TurnId, Arc<Signals>>> {
        self.drives.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn poke(&self, turn: &TurnId) {
        if let Some(signals) = self.drives().get(turn) {
            signals.poke();
        }
    }

    fn poke_all(&self, only: impl Fn(&Signals) -> bool) {
        for signals in self.drives().values().filter(|signals| only(signals)) {
            signals.poke();
        }
    }

    /// The number of turns that are worked on.
    pub(crate) fn len(&self) -> usize {
        self.drives().len()
    }
}

/// Sees to it that somebody works on a turn.
pub(crate) fn ensure(app: &Arc<App>, turn: &TurnId) {
    drop(start(app, turn));
}

/// As [`ensure`]; the receiver becomes true when the task has ended.
pub(crate) fn start(app: &Arc<App>, turn: &TurnId) -> watch::Receiver<bool> {
    let signals = {
        let mut drives = app.dispatcher.drives();
        if let Some(signals) = drives.get(turn) {
            return signals.done.subscribe();
        }
        let signals = Arc::new(Signals::default());
        drives.insert(turn.clone(), Arc::clone(&signals));
        signals
    };
    let done = signals.done.subscribe();
    let guard = Guard { app: Arc::clone(app), turn: turn.clone(), signals: Arc::clone(&signals) };
    let drive = drive::Drive::new(Arc::clone(app), turn.clone(), signals);
    let span = tracing::info_span!("turn", turn_id = %turn);
    app.tasks.spawn(
        "turn",
        async move {
            // Whatever becomes of the task, a panic too, its place is free for the next one.
            let _guard = guard;
            Box::pin(drive.run()).await;
        }
        .instrument(span),
    );
    done
}

struct Guard {
    app: Arc<App>,
    turn: TurnId,
    signals: Arc<Signals>,
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.app.dispatcher.drives().remove(&self.turn);
        self.app.prefetches.discard(&self.turn);
        self.signals.done.send_replace(true);
    }
}

/// Picks up every turn that is open or not settled. Can be repeated at any time.
pub(crate) async fn pick_up(app: &Arc<App>) -> roundhouse_store::Result<()> {
    for turn in app.store.open_turns().await? {
        ensure(app, &turn.id);
    }
    for runner in app.store.list_runners().await? {
        for turn in app.store.unacknowledged_turns(&runner.info.id).await? {
            ensure(app, &turn.id);
        }
    }
    Ok(())
}

/// Passes the store's hints on, and looks again from time to time in case one was lost.
pub(crate) async fn follow(app: Arc<App>, mut hints: Hints) {
    let mut every = tokio::time::interval(app.settings.poll);
    every.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        let hint = tokio::select! {
            hint = hints.next() => match hint {
                Some(hint) => hint,
                None => return,
            },
            _ = every.tick() => {
                look_again(&app).await;
                continue;
            }
        };
        match hint {
            Hint::Changed { conversation_id, .. } => app.hub.stored(&conversation_id),
            Hint::Promoted { turn_id } => ensure(&app, &turn_id),
            Hint::CancelRequested { turn_id } | Hint::PermissionAnswered { turn_id, .. } => {
                app.dispatcher.poke(&turn_id);
            }
            Hint::SlotFreed { .. } => {
                app.dispatcher.poke_all(|signals| signals.waits_for_slot.load(Ordering::Relaxed));
            }
            Hint::Missed => {
                look_again(&app).await;
                app.dispatcher.poke_all(|_| true);
            }
        }
    }
}

async fn look_again(app: &Arc<App>) {
    if let Err(error) = pick_up(app).await {
        tracing::warn!(%error, "open turns could not be read; they are read again in a while");
    }
}
