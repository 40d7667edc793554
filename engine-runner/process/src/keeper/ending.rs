//! How an engine and its keeper come to their end: signals, the steps of a release, the kill, and the last frames.

use super::run::Keeper;
use crate::clock::after;
use crate::frame::{Cause, ExitStatus, FrameBody, SignalScope};
use crate::isolation::IsolationLevel;
use crate::launch::{CONTROL_KILL, CONTROL_SIGNAL};
use crate::protocol::{Refusal, Response};
use crate::spool::Room;
use crate::sweep::{SweepReport, sweep_below};
use crate::sys;
use nix::errno::Errno;
use nix::poll::{PollTimeout, poll};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use std::os::fd::AsFd as _;
use std::time::{Duration, Instant};

/// The steps of an end that no runner asked for.
pub(super) const TTL_SETTLE: Duration = Duration::from_secs(5);
pub(super) const TTL_TERM: Duration = Duration::from_secs(5);

/// An init that has not killed everybody after this is killed itself.
const HARD_KILL: Duration = Duration::from_secs(1);

/// The last notice waits no longer than this for a client that does not read.
const FAREWELL: Duration = Duration::from_millis(500);

/// Where a release stands. Each step comes only if the last did not do.
#[derive(Debug)]
pub(super) enum Ending {
    No,
    Settle { until: Instant, term: Duration },
    Term { until: Instant },
    Kill,
}

impl Ending {
    pub(super) fn deadline(&self) -> Option<Instant> {
        match self {
            Self::Settle { until, .. } | Self::Term { until } => Some(*until),
            Self::No | Self::Kill => None,
        }
    }
}

/// A kill of a whole namespace that is under way.
#[derive(Debug)]
pub(super) struct PendingKill {
    cause: Cause,
    /// Then the init itself is killed; none once it was.
    hard_at: Option<Instant>,
    /// Then survivors are reported.
    until: Instant,
    /// Who waits for an answer: connection and request.
    replies: Vec<(u64, u64)>,
    /// Survivors were reported.
    told: bool,
}

impl PendingKill {
    pub(super) fn next(&self) -> Instant {
        match self.hard_at {
            Some(hard_at) => hard_at,
            // Nothing more is due after the report; the end comes by the init's death.
            None if self.told => Instant::now() + Duration::from_secs(60),
            None => self.until,
        }
    }
}

impl Keeper {
    fn command(&self, bytes: &[u8]) {
        if let Some(control) = &self.control {
            // A few bytes into a pipe that the init always reads.
            let _ = nix::unistd::write(control.as_fd(), bytes);
        }
    }

    /// Sends a signal to the engine process, through its parent: only that one knows that the id is still its own.
    pub(super) fn signal_engine(&mut self, signal: i32) -> Result<Response, Refusal> {
        if !(1..=64).contains(&signal) {
            return Err(Refusal::Argument);
        }
        if self.exit.is_some() {
            return Err(Refusal::NotRunning);
        }
        let number = self.send_signal(signal, Cause::Requested);
        number.map(|number| Response::Done { number }).ok_or(Refusal::Storage)
    }

    fn send_signal(&mut self, signal: i32, cause: Cause) -> Option<u64> {
        let number =
            self.spool.append(FrameBody::Signal { signal, scope: SignalScope::Engine, cause }, Room::Mark);
        // A full disk does not keep an engine alive.
        let mut command = vec![CONTROL_SIGNAL];
        command.extend_from_slice(&signal.to_le_bytes());
        self.command(&command);
        number
    }

    /// Begins a release, or makes the one under way sooner.
    pub(super) fn release(&mut self, settle: Duration, term: Duration, cause: Cause) {
        match &mut self.ending {
            Ending::No => {
                self.cause = cause;
                self.input.close(&mut self.spool);
                self.ending = Ending::Settle { until: after(settle), term };
            }
            Ending::Settle { until, term: old } => {
                *until = (*until).min(after(settle));
                *old = (*old).min(term);
            }
            Ending::Term { until } => *until = (*until).min(after(term)),
            Ending::Kill => {}
        }
    }

    /// Takes the next step that is due.
    pub(super) fn step_ending(&mut self) {
        let now = Instant::now();
        if self.exit.is_none() {
            match self.ending {
                Ending::Settle { until, term } if until <= now => {
                    // What waits for a reader that does not read would hold the input open for ever.
                    self.input.shut(0, &mut self.spool);
                    self.send_signal(libc::SIGTERM, self.cause);
                    self.ending = Ending::Term { until: after(term) };
                }
                Ending::Term { until } if until <= now => {
                    self.ending = Ending::Kill;
                    let _ = self.kill_everything(self.cause, None);
                }
                _ => {}
            }
        }
        let Some(kill) = &mut self.kill else { return };
        if kill.hard_at.is_some_and(|hard_at| hard_at <= now) {
            kill.hard_at = None;
            if !self.init_gone {
                // Not reaped yet, so the id is its own.
                let _ = sys::kill(self.init.as_raw(), libc::SIGKILL);
            }
        }
        if kill.until <= now && !kill.told && !self.init_gone {
            kill.told = true;
            self.tell_killed(SweepReport { killed: 0, survivors: 1, rounds: 1 });
        }
    }

    /// Kills everything the engine started. No answer yet where the namespace's end has to be awaited.
    pub(super) fn kill_everything(&mut self, cause: Cause, reply: Option<(u64, u64)>) -> Option<Response> {
        if matches!(self.ending, Ending::No) {
            self.cause = cause;
        }
        self.ending = Ending::Kill;
        if self.level == IsolationLevel::PidNamespace && !self.init_gone {
            if let Some(kill) = &mut self.kill {
                kill.replies.extend(reply);
                return None;
            }
            let body = FrameBody::Signal { signal: libc::SIGKILL, scope: SignalScope::Everything, cause };
            self.spool.append(body, Room::Mark);
            self.command(&[CONTROL_KILL]);
            let now = Instant::now();
            self.kill = Some(PendingKill {
                cause,
                hard_at: Some(now + HARD_KILL),
                until: after(self.facts.limits.kill_timeout),
                replies: reply.into_iter().collect(),
                told: false,
            });
            return None;
        }
        let body = FrameBody::Signal { signal: libc::SIGKILL, scope: SignalScope::Everything, cause };
        self.spool.append(body, Room::Mark);
        let report =
            if self.level == IsolationLevel::PidNamespace { SweepReport::default() } else { self.sweep() };
        let frame = self.append_killed(cause, report);
        Some(Response::Killed { frame, survivors: report.survivors })
    }

    /// Kills what can be found below the init and this keeper, but those two.
    fn sweep(&self) -> SweepReport {
        let me = nix::unistd::getpid().as_raw();
        let init = self.init.as_raw();
        let roots = if self.init_gone { vec![me] } else { vec![me, init] };
        let report = sweep_below(&self.facts.spool_id, &roots, &[], self.facts.limits.kill_timeout);
        if self.level == IsolationLevel::None && report.killed == 0 {
            // Where nothing can be seen, at least the engine itself is sent its end.
            let mut command = vec![CONTROL_SIGNAL];
            command.extend_from_slice(&libc::SIGKILL.to_le_bytes());
            self.command(&command);
        }
        report
    }

    fn append_killed(&mut self, cause: Cause, report: SweepReport) -> u64 {
        let body = FrameBody::Killed { cause, killed: report.killed, survivors: report.survivors };
        self.spool.append(body, Room::Mark).unwrap_or_else(|| self.spool.end().frame)
    }

    /// Answers those who wait for a namespace's end.
    fn tell_killed(&mut self, report: SweepReport) {
        let Some(kill) = &mut self.kill else { return };
        let cause = kill.cause;
        let replies = std::mem::take(&mut kill.replies);
        let frame = self.append_killed(cause, report);
        for (connection, request) in replies {
            let response = Response::Killed { frame, survivors: report.survivors };
            self.links.answer(connection, request, response);
        }
    }

    /// The engine is gone: what it left is cleared away, and its pipes are read to their end.
    pub(super) fn engine_ended(&mut self, exit: ExitStatus) {
        self.exit = Some(exit);
        self.drain_until = Some(after(self.facts.limits.drain_timeout));
        self.input.shut(0, &mut self.spool);
        if self.level != IsolationLevel::PidNamespace {
            let report = self.sweep();
            if report.killed > 0 || report.survivors > 0 {
                self.append_killed(Cause::EngineExit, report);
            }
        }
    }

    /// Nothing more is to come.
    pub(super) fn is_over(&self) -> bool {
        let Some(drain_until) = self.drain_until else { return false };
        // The end of a namespace is that of its init: it is reaped only when all in it are gone.
        let all_gone = self.level != IsolationLevel::PidNamespace || self.init_gone;
        let late = drain_until <= Instant::now();
        (self.output.is_done() && all_gone)
            || (late && (all_gone || self.kill.as_ref().is_none_or(|kill| kill.told)))
    }

    /// Writes the last frames, says farewell, and waits a moment for the init.
    pub(super) fn finish(mut self) {
        self.output.read_stdout(&mut self.spool);
        self.output.read_stderr(&mut self.spool);
        self.output.end_stdout(false, &mut self.spool);
        self.output.end_stderr(&mut self.spool);
        if self.kill.as_ref().is_some_and(|kill| !kill.told) {
            self.tell_killed(SweepReport::default());
        }
        self.spool.append(FrameBody::Exit(self.exit.unwrap_or(ExitStatus::Unknown)), Room::Last);
        let (dropped_frames, dropped_bytes) = self.spool.dropped();
        self.spool.append(FrameBody::Closed { cause: self.cause, dropped_frames, dropped_bytes }, Room::Last);
        let _ = self.spool.sync();
        self.spool.close();
        let end = self.spool.end();
        self.links.settle(end);
        self.links.end(end, FAREWELL);
        // The init ends at this; a keeper that ends first takes it along.
        self.control = None;
        let until = Instant::now() + Duration::from_secs(1);
        while !self.init_gone && Instant::now() < until {
            match waitpid(self.init, Some(WaitPidFlag::WNOHANG)) {
                Ok(WaitStatus::StillAlive) => {
                    let _ = poll(&mut [], PollTimeout::from(2_u8));
                }
                Ok(_) | Err(Errno::ECHILD) => self.init_gone = true,
                Err(_) => return,
            }
        }
    }
}
