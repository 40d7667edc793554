//! A fault of the runner itself. A panic in a turn's task, or in what works beside it, ends that turn and nothing else: its
//! process is killed, and its terminal event is journalled as any other's.
//!
//! The turn's state outlives the panic, and the step that broke is not tried again. What that step had in its hands may be
//! gone, so every way on from here must do without it.

use std::{
    any::Any,
    panic::AssertUnwindSafe,
    time::{Duration, Instant as Moment},
};

use futures::FutureExt as _;
use roundhouse_engines::{Failure, Reason};
use roundhouse_proto::engine::v1::NumberedEvent;
use tokio::time::Instant;

use super::{
    actor::{Internal, STORAGE_RETRY, Stage, Turn},
    ending::Ended,
    stopping::{Step, Stopping},
};
use crate::{
    error::{Error, chain},
    grpc::to_proto,
    journal::{Journal, Record},
};

/// After so many panics the engine's own end is not listened to any more.
const LISTENS: u32 = 3;

/// After so many nothing more is tried: the journal is the next runner's.
const PANICS: u32 = 8;

/// What a panic said.
fn words(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no words".to_owned())
}

/// How such a turn fails. What broke is the log's, not the caller's.
fn failure(turn_id: &str) -> Failure {
    Failure {
        retryable: true,
        what_to_do: format!(
            "Look at the worktree, then retry the turn; if it comes again, report what the runner's log says of {turn_id}."
        ),
        ..Failure::new(Reason::Process, "an internal error of the runner stopped the turn")
    }
}

impl Turn {
    /// Does a part of the turn's work beside it. The result comes back as an input, a panic as well.
    pub(super) fn beside(&self, work: impl Future<Output = Internal> + Send + 'static) {
        let (results, turn_id) = (self.results.clone(), self.id.clone());
        self.context.tasks.spawn(async move {
            let done = AssertUnwindSafe(work).catch_unwind().await.unwrap_or_else(|panic| {
                tracing::error!(turn = turn_id, panic = words(&*panic), "work beside a turn panicked");
                Internal::Broke
            });
            let _ = results.send(done).await;
        });
    }

    /// One step of the turn's task. False: the turn is let go of.
    pub(super) async fn step(&mut self) -> bool {
        let panic = match AssertUnwindSafe(self.turn_once()).catch_unwind().await {
            Ok(goes_on) => return goes_on,
            Err(panic) => words(&*panic),
        };
        self.panics += 1;
        tracing::error!(turn = self.id, panic, count = self.panics, "a turn's task panicked");
        let ended = AssertUnwindSafe(self.break_off()).catch_unwind().await.is_ok();
        if self.panics >= PANICS || !ended {
            // Its task goes without an end. Whoever asks for the turn is told so.
            tracing::error!(turn = self.id, "a turn is given up; its journal is taken up by the next runner");
            self.stage = Stage::Ended;
        }
        self.update_facts();
        true
    }

    /// Ends the turn after a step of it broke.
    async fn break_off(&mut self) {
        if let Err(error) = self.publish_missed() {
            tracing::error!(
                turn = self.id,
                error = chain(&error),
                "events were journalled and cannot be read"
            );
        }
        if self.turn_end.is_none() && !self.broken {
            // Even if the engine gets to its end: what it said in the step that broke is lost.
            self.broken = true;
            self.must_stop = Some(failure(&self.id));
        }
        let held = self.engine.as_ref().is_some_and(|engine| !engine.gone);
        match self.stage {
            Stage::NeedSession => self.end_without_engine(),
            // What is under way comes back, and is ended then.
            Stage::Preparing | Stage::Releasing => self.kill_next(),
            Stage::Opening | Stage::Open if held && self.panics < LISTENS => {
                self.kill_next();
                self.next_step();
            }
            Stage::Opening | Stage::Open => self.end_by_force().await,
            Stage::Ending if self.timers.ending.is_none() => {
                // All was there to be told, and is lost but for what the journal has.
                self.ended = Some(Box::default());
                self.timers.storage = Some(Instant::now() + STORAGE_RETRY);
            }
            Stage::Ending | Stage::Ended => {}
        }
    }

    /// Makes the killing of everything the ladder's next step.
    fn kill_next(&mut self) {
        let grace = self.context.settings.cancel_interrupt_grace;
        self.stopping = Some(Stopping { step: Step::Term, grace });
        self.abandon.cancel();
    }

    /// Ends the turn's process by what its directory says, and then the turn.
    async fn end_by_force(&mut self) {
        if let Some(engine) = self.engine.take() {
            engine.keeper.kill();
        }
        if let Some(process) = self.state.process.clone()
            && !self.close_stuck(&process).await
        {
            self.left_behind = true;
        }
        self.end_without_engine();
    }

    /// Work beside the turn broke.
    pub(super) async fn on_broke(&mut self) -> Result<(), Error> {
        match self.stage {
            Stage::Ending => self.end_short().await,
            Stage::Preparing | Stage::Releasing => {
                self.must_stop = Some(failure(&self.id));
                self.answer_openers(&Err(std::sync::Arc::new(Error::Internal(
                    "work on the opening panicked".to_owned(),
                ))));
                self.kill_next();
                self.end_by_force().await;
                Ok(())
            }
            Stage::NeedSession | Stage::Opening | Stage::Open | Stage::Ended => Ok(()),
        }
    }

    /// What the end collects did not come. It is told without that, once the process is gone: nobody can say in which state
    /// it is. The outcome stays what it was.
    pub(super) async fn end_short(&mut self) -> Result<(), Error> {
        self.timers.ending = None;
        if self.ended.is_some() || self.state.terminal.is_some() {
            return Ok(());
        }
        tracing::error!(
            turn = self.id,
            "the end of a turn did not come; it is told without what it collects"
        );
        if let Some(keeper) = self.ending_keeper.take() {
            keeper.kill();
        }
        if let Some(process) = self.state.process.clone() {
            let begun = Moment::now();
            let gone = self.close_stuck(&process).await;
            tracing::warn!(turn = self.id, gone, after = ?begun.elapsed(), "its process was ended");
            self.left_behind |= !gone;
        }
        self.ended = Some(Box::new(Ended::short()));
        self.write_end().await
    }

    /// Publishes what the journal has and no follower has seen: the step between the two broke.
    fn publish_missed(&mut self) -> Result<(), Error> {
        let seen = self.hub.last();
        if seen >= self.state.last {
            return Ok(());
        }
        let records = Journal::read(self.journal.path())?;
        let missed = records.into_iter().filter_map(|record| match record {
            Record::Entry(entry) if entry.number > seen => Some(NumberedEvent {
                number: entry.number,
                at: Some(to_proto::timestamp(entry.at_millis)),
                body: Some(entry.body),
            }),
            _ => None,
        });
        self.republish(missed.collect());
        Ok(())
    }
}

/// How long the end of a turn may take to collect what it tells: longer than all that it waits for with a limit.
pub(super) fn ending_limit() -> Duration {
    if crate::fault_point!("runner::ending_soon") {
        Duration::from_millis(500)
    } else {
        Duration::from_secs(120)
    }
}
