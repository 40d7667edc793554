//! The ladder: the engine's own interrupt, SIGTERM, SIGKILL of everything it started, and at last of its keeper. Each
//! step only if the one before did not work in its time.

use std::time::Duration;

use roundhouse_engines::LineError;
use roundhouse_process::{Request, Response};
use roundhouse_proto::engine::v1::phase_event::Phase;
use tokio::time::Instant;

use super::actor::{Internal, Purpose, Stage, Turn};
use crate::{
    error::Error,
    grpc::to_proto,
    journal::{Record, Source, StopCause},
    keeper::AskError,
};

const SIGTERM: i32 = 15;

/// Time that the killing of everything has before the keeper itself is killed.
const KILL_TIME: Duration = Duration::from_secs(10);

/// How far the ladder is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Step {
    /// Nothing was tried yet.
    Begin,
    /// The engine was asked to stop.
    Interrupt,
    /// SIGTERM was sent.
    Term,
    /// SIGKILL was sent to everything.
    Kill,
    /// SIGKILL was sent to the keeper.
    Keeper,
}

/// A turn that is being stopped.
#[derive(Debug, Clone, Copy)]
pub(super) struct Stopping {
    /// How far the ladder is.
    pub(super) step: Step,
    /// Time for the interrupt.
    pub(super) grace: Duration,
}

impl Turn {
    /// Stops the turn. Durable when this returns.
    pub(super) async fn on_stop(&mut self, cause: StopCause, grace: Option<Duration>) -> Result<(), Error> {
        if self.state.terminal.is_some() {
            return Ok(());
        }
        let news = match self.state.stop {
            None => true,
            Some(known) => cause == StopCause::Cancel && known != StopCause::Cancel,
        };
        if news {
            self.record_synced(Record::Stop(cause)).await?;
            crate::kill_point!("runner::stop_journalled");
            tracing::info!(turn = self.id, ?cause, "turn is being stopped");
            if self.state.has_events() {
                self.emit(Source::Synthetic, to_proto::phase(Phase::Cancelling, ""))?;
            }
        }
        if self.stopping.is_none() {
            let grace = grace.unwrap_or(self.context.settings.cancel_interrupt_grace);
            self.stopping = Some(Stopping { step: Step::Begin, grace });
            self.stop_now().await?;
        }
        Ok(())
    }

    /// Stops the turn for a cause that may not be writable.
    pub(super) fn force_stop(&mut self, cause: StopCause) {
        if self.state.stop.is_none()
            && let Err(error) = self.record(Record::Stop(cause))
        {
            tracing::warn!(turn = self.id, error = crate::error::chain(&error), "a stop is not journalled");
            self.state.apply(&Record::Stop(cause));
        }
        self.terminate();
    }

    /// Begins the ladder at SIGTERM, unless it is there already.
    pub(super) fn terminate(&mut self) {
        match &mut self.stopping {
            Some(stopping) if stopping.step >= Step::Interrupt => {}
            _ => {
                let grace = self.context.settings.cancel_interrupt_grace;
                self.stopping = Some(Stopping { step: Step::Interrupt, grace });
                match self.stage {
                    Stage::Open | Stage::Opening => self.next_step(),
                    Stage::NeedSession => self.end_without_engine(),
                    Stage::Preparing => self.abandon.cancel(),
                    Stage::Releasing | Stage::Ending | Stage::Ended => {}
                }
            }
        }
    }

    async fn stop_now(&mut self) -> Result<(), Error> {
        self.timers.idle = None;
        self.timers.silence = None;
        self.timers.resend = None;
        self.deny_all().await?;
        match self.stage {
            Stage::NeedSession => self.end_without_engine(),
            // What is under way is awaited; it sees that the turn is being stopped. What waits for others does not wait on.
            Stage::Preparing => self.abandon.cancel(),
            Stage::Releasing | Stage::Ending | Stage::Ended => {}
            Stage::Opening => self.begin_ladder(),
            Stage::Open if self.turn_end.is_some() => {}
            // The engine has nothing of this turn: it can stay as it is.
            Stage::Open if !self.message_was_given() => self.begin_ending(),
            Stage::Open => self.begin_ladder(),
        }
        Ok(())
    }

    /// Whether a message may be on its way to the current process. What an earlier life of this runner put there is
    /// known when all of the past is read.
    pub(super) fn message_was_given(&self) -> bool {
        self.state.has_messages() && (self.given || self.replaying || self.message_may_be_taken())
    }

    /// Takes the first step that makes sense.
    pub(super) fn begin_ladder(&mut self) {
        let Some(stopping) = self.stopping else { return };
        if stopping.step > Step::Begin && self.timers.ladder.is_some() {
            return;
        }
        let interrupt = match (&self.engine, self.stage) {
            (Some(engine), Stage::Open) if stopping.step == Step::Begin => engine.translator.interrupt(),
            _ => Err(LineError::Unsupported),
        };
        match interrupt {
            Ok(line) => {
                self.stopping = Some(Stopping { step: Step::Interrupt, ..stopping });
                self.timers.ladder = Some(Instant::now() + stopping.grace);
                self.write(line, Purpose::Control("interrupt"));
            }
            Err(LineError::NotNow) => {
                self.stopping = Some(Stopping { step: Step::Interrupt, ..stopping });
                self.timers.ladder = Some(Instant::now() + stopping.grace);
                self.later = true;
            }
            Err(_) => {
                self.stopping = Some(Stopping { step: Step::Interrupt, ..stopping });
                self.next_step();
            }
        }
    }

    /// The interrupt that the engine could not take before.
    pub(super) fn interrupt_again(&mut self) {
        let asked = self.stopping.is_some_and(|stopping| stopping.step == Step::Interrupt);
        let (Some(engine), true) = (&self.engine, asked && self.stage == Stage::Open) else { return };
        match engine.translator.interrupt() {
            // A repeat has the same operation id, and is written once.
            Ok(line) => self.write(line, Purpose::Control("interrupt")),
            Err(LineError::NotNow) => self.later = true,
            Err(_) => {}
        }
    }

    /// The last step did not work in its time.
    pub(super) fn next_step(&mut self) {
        let Some(stopping) = self.stopping else { return };
        let Some(engine) = &self.engine else { return };
        if engine.gone || self.stage == Stage::Ending || self.stage == Stage::Ended {
            return;
        }
        let (step, limit, request) = match stopping.step {
            Step::Begin | Step::Interrupt => {
                (Step::Term, self.context.settings.cancel_term_grace, Request::Signal { signal: SIGTERM })
            }
            Step::Term => (Step::Kill, KILL_TIME, Request::KillAll),
            Step::Kill | Step::Keeper => {
                tracing::warn!(turn = self.id, spool = engine.spool_id, "the keeper is killed");
                engine.keeper.kill();
                self.stopping = Some(Stopping { step: Step::Keeper, ..stopping });
                self.timers.ladder = Some(Instant::now() + KILL_TIME);
                return;
            }
        };
        tracing::info!(turn = self.id, ?step, "next step of the ladder");
        self.stopping = Some(Stopping { step, ..stopping });
        self.timers.ladder = Some(Instant::now() + limit);
        let (asked, results) = (engine.keeper.ask(request), self.results.clone());
        self.context.tasks.spawn(async move {
            let result = asked.await;
            let _ = results.send(Internal::Step(result)).await;
        });
    }

    pub(super) fn on_step(&mut self, result: &Result<Response, AskError>) {
        match result {
            Ok(Response::Killed { survivors, .. }) if *survivors > 0 => {
                tracing::warn!(turn = self.id, survivors, "processes survived SIGKILL");
            }
            Err(AskError::Stuck) => {
                // A stopped keeper cannot take the next step either: it is ended itself.
                if let (Some(stopping), true) = (self.stopping, self.timers.ladder.is_some()) {
                    self.stopping = Some(Stopping { step: Step::Kill, ..stopping });
                    self.next_step();
                }
            }
            Ok(_) | Err(AskError::Gone | AskError::Refused(_)) => {}
        }
    }
}
