//! The keeper's loop: polls everything, does what is due, answers requests.

use super::ending::{Ending, PendingKill};
use super::input::Input;
use super::links::Links;
use super::output::Output;
use crate::clock;
use crate::frame::{Cause, ExitStatus, FrameBody};
use crate::isolation::IsolationLevel;
use crate::launch::{InitStatus, Launched};
use crate::mask::Masker;
use crate::plan::{KeeperLimits, KeeperPlan, is_valid_id};
use crate::protocol::{
    EngineState, PROTOCOL_VERSION, RawMessage, Refusal, Request, Response, SpoolEnd, StatusReport,
};
use crate::spool::{Room, SpoolWriter};
use crate::sys;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::Signal;
use nix::sys::signalfd::SignalFd;
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixListener;
use std::time::{Duration, Instant};

/// The longest sleep: times that count suspended time are looked at anew this often.
const SLEEP_MAX: Duration = Duration::from_secs(30);

/// How long after a turn's end the next segment's file is made: the runner writes what it keeps of the turn first.
const PREPARE_PAUSE: Duration = Duration::from_millis(50);

/// What the loop needs of the plan.
#[derive(Debug)]
pub(super) struct Facts {
    pub(super) spool_id: String,
    pub(super) owner: String,
    pub(super) limits: KeeperLimits,
}

impl Facts {
    /// Takes what the loop needs; the rest (environment, payloads, secrets) is dropped here.
    pub(super) fn of(plan: KeeperPlan) -> Self {
        Self { spool_id: plan.spool_id, owner: plan.owner, limits: plan.limits }
    }
}

/// The mark of a turn's beginning or end.
#[derive(Debug)]
struct Mark {
    turn_id: String,
    frame: u64,
    segment: u32,
}

#[derive(Debug)]
pub(super) struct Keeper {
    pub(super) facts: Facts,
    pub(super) spool: SpoolWriter,
    pub(super) input: Input,
    pub(super) output: Output,
    pub(super) links: Links,
    masker: Masker,
    signals: SignalFd,
    pub(super) control: Option<OwnedFd>,
    status: Option<OwnedFd>,
    pub(super) init: Pid,
    /// The init was reaped: its id is no longer its own.
    pub(super) init_gone: bool,
    pub(super) engine_pid: i32,
    pub(super) level: IsolationLevel,
    /// How the engine ended, once it has.
    pub(super) exit: Option<ExitStatus>,
    pub(super) ending: Ending,
    pub(super) cause: Cause,
    pub(super) kill: Option<PendingKill>,
    /// After the engine's end, its pipes are read up to here.
    pub(super) drain_until: Option<Instant>,
    /// When the next segment's file is made.
    prepare_at: Option<Instant>,
    runnerless_since: Option<u64>,
    /// When the engine last printed something, by CLOCK_BOOTTIME.
    heard: u64,
    last_begin: Option<Mark>,
    last_end: Option<Mark>,
}

#[derive(Debug, Clone, Copy)]
enum Token {
    Signals,
    Status,
    Stdin,
    Stdout,
    Stderr,
    Listener,
    Connection(u64),
}

impl Keeper {
    pub(super) fn new(
        facts: Facts,
        launched: Launched,
        masker: Masker,
        mut spool: SpoolWriter,
        listener: UnixListener,
        signals: SignalFd,
    ) -> Result<Self, String> {
        for fd in [&launched.stdin, &launched.stdout, &launched.stderr, &launched.status] {
            sys::set_nonblocking(fd.as_fd()).map_err(|errno| format!("failed to set up pipes: {errno}"))?;
        }
        spool.append(
            FrameBody::Started {
                engine_pid: launched.engine_pid,
                init_pid: launched.init.as_raw(),
                isolation: launched.level,
                detail: launched.detail,
            },
            Room::Mark,
        );
        let mut input = Input::new(facts.limits.stdin_pending_max);
        input.open(launched.stdin);
        let output = Output::new(launched.stdout, launched.stderr, &masker, &facts.limits);
        Ok(Self {
            facts,
            spool,
            input,
            output,
            links: Links::new(listener),
            masker,
            signals,
            control: Some(launched.control),
            status: Some(launched.status),
            init: launched.init,
            init_gone: false,
            engine_pid: launched.engine_pid,
            level: launched.level,
            exit: None,
            ending: Ending::No,
            cause: Cause::EngineExit,
            kill: None,
            drain_until: None,
            prepare_at: None,
            runnerless_since: Some(clock::boottime_ns()),
            heard: clock::boottime_ns(),
            last_begin: None,
            last_end: None,
        })
    }

    /// Runs until the engine is gone and all is told.
    pub(super) fn run(mut self) {
        loop {
            let ready = self.wait();
            for (token, flags) in ready {
                self.serve(token, flags);
            }
            // First: who has gone is no runner any more.
            self.links.settle(self.spool.end());
            self.look_at_clock();
            self.step_ending();
            if self.is_over() {
                return self.finish();
            }
            self.links.settle(self.spool.end());
        }
    }

    fn wait(&self) -> Vec<(Token, PollFlags)> {
        let input = PollFlags::POLLIN;
        let mut tokens = vec![(Token::Signals, self.signals.as_fd(), input)];
        tokens.extend(self.status.as_ref().map(|fd| (Token::Status, fd.as_fd(), input)));
        tokens.extend(self.input.wants().map(|fd| (Token::Stdin, fd.as_fd(), PollFlags::POLLOUT)));
        tokens.extend(self.output.stdout.as_ref().map(|fd| (Token::Stdout, fd.as_fd(), input)));
        tokens.extend(self.output.stderr.as_ref().map(|fd| (Token::Stderr, fd.as_fd(), input)));
        tokens.push((Token::Listener, self.links.listener().as_fd(), input));
        for connection in self.links.connections() {
            let flags = if connection.wants_write() { input | PollFlags::POLLOUT } else { input };
            tokens.push((Token::Connection(connection.id), connection.stream.as_fd(), flags));
        }
        let mut fds: Vec<PollFd<'_>> = tokens.iter().map(|(_, fd, flags)| PollFd::new(*fd, *flags)).collect();
        // Rounded up: a poll that wakes a moment early would only go round once more.
        let sleep = self.next_deadline() + Duration::from_millis(1);
        let timeout = PollTimeout::try_from(sleep).unwrap_or(PollTimeout::MAX);
        if poll(&mut fds, timeout).is_err() {
            return Vec::new();
        }
        tokens
            .iter()
            .zip(&fds)
            .filter_map(|((token, ..), fd)| {
                fd.revents().filter(|flags| !flags.is_empty()).map(|flags| (*token, flags))
            })
            .collect()
    }

    fn next_deadline(&self) -> Duration {
        let now = Instant::now();
        let mut sleep = SLEEP_MAX;
        // After the engine's end no step of a release is due any more.
        let step = self.ending.deadline().filter(|_| self.exit.is_none());
        let times = [step, self.drain_until, self.prepare_at, self.kill.as_ref().map(PendingKill::next)];
        for time in times.into_iter().flatten() {
            sleep = sleep.min(time.saturating_duration_since(now));
        }
        if let Some(late) = self.links.next_deadline() {
            sleep = sleep.min(late);
        }
        if let (Some(since), Ending::No) = (self.runnerless_since, &self.ending) {
            let (due, _) = self.ttl(since);
            sleep = sleep.min(Duration::from_nanos(due.saturating_sub(clock::boottime_ns())));
        }
        sleep
    }

    fn serve(&mut self, token: Token, flags: PollFlags) {
        match token {
            Token::Signals => self.take_signals(),
            Token::Status => self.read_status(),
            Token::Stdin => self.input.write(&mut self.spool),
            Token::Stdout => {
                self.heard = clock::boottime_ns();
                self.output.read_stdout(&mut self.spool);
            }
            Token::Stderr => {
                self.heard = clock::boottime_ns();
                self.output.read_stderr(&mut self.spool);
            }
            Token::Listener => self.links.accept(),
            Token::Connection(id) => {
                if flags.intersects(PollFlags::POLLIN | PollFlags::POLLHUP | PollFlags::POLLERR) {
                    for message in self.links.read(id) {
                        self.handle(id, &message);
                    }
                }
            }
        }
    }

    fn take_signals(&mut self) {
        while let Ok(Some(signal)) = self.signals.read_signal() {
            if i32::try_from(signal.ssi_signo) == Ok(Signal::SIGTERM as i32) {
                self.release(Duration::ZERO, super::ending::TTL_TERM, Cause::Terminated);
            }
        }
        // As a subreaper the keeper also gets those that its init left behind.
        loop {
            match waitpid(None, Some(WaitPidFlag::WNOHANG)) {
                Ok(WaitStatus::Exited(pid, _) | WaitStatus::Signaled(pid, ..)) => {
                    self.init_gone |= pid == self.init;
                }
                Ok(WaitStatus::StillAlive) | Err(_) => return,
                Ok(_) => {}
            }
        }
    }

    fn read_status(&mut self) {
        let Some(fd) = &self.status else { return };
        let mut message = [0; InitStatus::BYTES];
        match nix::unistd::read(fd, &mut message) {
            Ok(InitStatus::BYTES) => match InitStatus::decode(&message) {
                Ok(InitStatus::Exited(code)) => self.engine_ended(ExitStatus::Code(code)),
                Ok(InitStatus::Signalled(signal)) => self.engine_ended(ExitStatus::Signal(signal)),
                _ => {}
            },
            Err(Errno::EAGAIN | Errno::EINTR) => {}
            // The init is gone. If it had not told the engine's end, nobody can.
            _ => {
                self.status = None;
                if self.exit.is_none() {
                    self.engine_ended(ExitStatus::Unknown);
                }
            }
        }
    }

    /// When an engine without a runner is ended, by CLOCK_BOOTTIME, and why.
    fn ttl(&self, since: u64) -> (u64, Cause) {
        let limits = &self.facts.limits;
        let after = |start: u64, limit: Duration| {
            start.saturating_add(u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX))
        };
        if self.spool.turn_id().is_none() {
            return (after(since, limits.idle_ttl), Cause::IdleTtl);
        }
        // The runner may have died between the engine's last word and the mark of the turn's end.
        let quiet = after(since.max(self.heard), limits.quiet_ttl);
        let turn = after(since, limits.turn_ttl);
        if quiet < turn { (quiet, Cause::IdleTtl) } else { (turn, Cause::TurnTtl) }
    }

    fn look_at_clock(&mut self) {
        if self.prepare_at.is_some_and(|at| at <= Instant::now()) {
            self.prepare_at = None;
            self.spool.prepare();
        }
        if self.links.has_runner() {
            self.runnerless_since = None;
            return;
        }
        let now = clock::boottime_ns();
        let since = *self.runnerless_since.get_or_insert(now);
        let (due, cause) = self.ttl(since);
        if matches!(self.ending, Ending::No) && now >= due {
            self.release(super::ending::TTL_SETTLE, super::ending::TTL_TERM, cause);
        }
    }

    fn handle(&mut self, id: u64, raw: &RawMessage) {
        let request_id = raw.request_id;
        let request = match Request::decode(raw) {
            Ok(Some(request)) => request,
            Ok(None) => return self.links.answer(id, request_id, Response::Refused(Refusal::Unsupported)),
            Err(_) => return self.links.refuse(id, request_id, Response::Refused(Refusal::Protocol)),
        };
        let open = self.links.is_open(id);
        if let Request::Hello { version, owner } = request {
            let refusal = if open {
                Some(Refusal::Protocol)
            } else if owner != self.facts.owner {
                Some(Refusal::Foreign)
            } else if version == 0 {
                Some(Refusal::Unsupported)
            } else {
                None
            };
            if let Some(refusal) = refusal {
                return self.links.refuse(id, request_id, Response::Refused(refusal));
            }
            let status = self.status_report();
            self.links.open(id, status.position);
            let welcome = Response::Welcome {
                version: version.min(PROTOCOL_VERSION),
                keeper_pid: i32::try_from(std::process::id()).unwrap_or(0),
                status,
            };
            return self.links.answer(id, request_id, welcome);
        }
        if !open {
            return self.links.refuse(id, request_id, Response::Refused(Refusal::Protocol));
        }
        if let Some(response) = self.obey(id, request_id, request) {
            self.links.answer(id, request_id, response);
        }
    }

    /// Does what is asked; no answer when it comes later.
    fn obey(&mut self, id: u64, request_id: u64, request: Request) -> Option<Response> {
        let result = match request {
            Request::Hello { .. } => Err(Refusal::Protocol),
            Request::Status => Ok(Response::Status(self.status_report())),
            Request::Deliver { op_id, bytes } => self
                .input
                .deliver(op_id, bytes, &self.masker, &mut self.spool)
                .map(|(intent, state, duplicate)| Response::Delivered { intent, state, duplicate }),
            Request::QueryOp { op_id } => Ok(Response::Op { known: self.input.query(&op_id) }),
            Request::BeginTurn { turn_id } => self.begin_turn(turn_id),
            Request::EndTurn { turn_id } => self.end_turn(&turn_id),
            Request::CloseInput => {
                self.input.close(&mut self.spool);
                Ok(Response::Done { number: self.spool.end().frame })
            }
            Request::Sync => match self.spool.sync() {
                Ok(()) => Ok(Response::Done { number: self.spool.end().frame }),
                Err(_) => Err(Refusal::Storage),
            },
            Request::Signal { signal } => self.signal_engine(signal),
            Request::KillAll => return self.kill_everything(Cause::Requested, Some((id, request_id))),
            Request::Release { settle, term } => {
                self.release(settle, term, Cause::Release);
                Ok(Response::Done { number: self.spool.end().frame })
            }
            Request::Prune { keep_from } => {
                Ok(Response::Done { number: u64::from(self.spool.prune(keep_from)) })
            }
        };
        Some(result.unwrap_or_else(Response::Refused))
    }

    fn begin_turn(&mut self, turn_id: String) -> Result<Response, Refusal> {
        if !is_valid_id(&turn_id) {
            return Err(Refusal::Argument);
        }
        if let Some(mark) = self.last_begin.as_ref().filter(|mark| mark.turn_id == turn_id) {
            return Ok(Response::Turn { frame: mark.frame, segment: mark.segment });
        }
        if let Some(open) = self.spool.turn_id().map(str::to_owned) {
            self.end_turn(&open)?;
        }
        self.prepare_at = None;
        self.output.turn_mark(&mut self.spool);
        let frame = self.spool.begin_turn(&turn_id).ok_or(Refusal::Storage)?;
        let segment = self.spool.end().segment;
        self.last_begin = Some(Mark { turn_id, frame, segment });
        Ok(Response::Turn { frame, segment })
    }

    fn end_turn(&mut self, turn_id: &str) -> Result<Response, Refusal> {
        if let Some(mark) = self.last_end.as_ref().filter(|mark| mark.turn_id == turn_id) {
            return Ok(Response::Turn { frame: mark.frame, segment: mark.segment });
        }
        if self.spool.turn_id() != Some(turn_id) {
            return Err(Refusal::UnknownTurn);
        }
        self.output.turn_mark(&mut self.spool);
        let frame = self.spool.end_turn(turn_id).ok_or(Refusal::Storage)?;
        let SpoolEnd { segment, .. } = self.spool.end();
        self.last_end = Some(Mark { turn_id: turn_id.to_owned(), frame, segment });
        self.prepare_at = Some(Instant::now() + PREPARE_PAUSE);
        self.spool.sync().map_err(|_| Refusal::Storage)?;
        Ok(Response::Turn { frame, segment })
    }

    fn status_report(&self) -> StatusReport {
        StatusReport {
            engine: self.exit.map_or(EngineState::Running, EngineState::Exited),
            engine_pid: self.engine_pid,
            init_pid: self.init.as_raw(),
            isolation: self.level,
            turn_id: self.spool.turn_id().map(str::to_owned),
            position: self.spool.end(),
            oldest_segment: self.spool.oldest(),
            stdin_pending: self.input.waiting_bytes(),
            stdin_open: self.input.is_open(),
            ops: self.input.ops(),
            unmasked_secrets: self.masker.unmasked(),
            storage_fault: self.spool.fault(),
            ending: self.exit.is_some() || !matches!(self.ending, Ending::No),
            ..StatusReport::starting(&self.facts.spool_id)
        }
    }
}
