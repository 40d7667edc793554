//! The end of a turn: evidence, what is kept of the session, and exactly one terminal event, always last.

use std::{
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant as Moment},
};

use roundhouse_engines::{Adapter, Carry, Failure, NativeRef, Reason, TurnOutcome};
use roundhouse_process::{Request, close_dead, own_pid};
use roundhouse_proto::engine::v1::{
    self as proto, EvidenceEvent, Outcome, TerminalEvent, event_body::Kind, evidence_event::Point,
};
use tokio::time::Instant;

use super::{
    actor::{Internal, STORAGE_RETRY, Stage, Timers, Turn},
    broken, doubt,
};
use crate::{
    context::Context,
    engine::{Engine, processes},
    error::{Error, chain},
    fingerprint::Hashed,
    git::{Changes, Worktree},
    grpc::to_proto,
    holds::{self, Hold},
    journal::{Journal, Record, Source, StopCause},
    launch, leftovers, pool,
    session_record::{Launched, SessionRecord},
    workspace::Workspace,
};

/// Time that processes of a cancelled turn have to go by themselves after the interrupt.
const SURVIVORS: Duration = Duration::from_secs(1);

/// How long the end of a turn waits for the look at the worktree, once all else is done.
const LOOK_WAIT: Duration = Duration::from_secs(1);

/// Time that a sweep of a dead keeper's processes may take.
const SWEEP: Duration = Duration::from_secs(5);

/// All that the terminal event needs.
#[derive(Debug, Default)]
pub(super) struct Ended {
    /// The engine, idle, if it lives.
    engine: Option<Box<Engine>>,
    after: Option<Worktree>,
    changes: Changes,
    /// The end did not wait for the look at the worktree.
    late: bool,
    /// Processes of the cancelled turn survived the interrupt, so the engine was ended.
    survivors: bool,
    /// What is kept of the session, as the journal keeps it.
    record: Option<String>,
    told: bool,
}

impl Ended {
    /// The end of a turn that was not waited for: nothing was collected.
    pub(super) fn short() -> Self {
        Self { late: true, ..Self::default() }
    }
}

struct Work {
    context: Arc<Context>,
    turn_id: String,
    session_id: Option<String>,
    engine: Option<Box<Engine>>,
    process_gone: bool,
    /// A cancelled turn's message came at this CLOCK_BOOTTIME.
    cancelled_since: Option<u64>,
    workspace: Workspace,
    before: Option<Worktree>,
    before_unknown: bool,
    /// What the engine's sandbox may have left in the workspace.
    absent: Vec<String>,
}

/// The resolution of a process's time of birth: a clock tick, which is 10 ms wherever Linux shows it to programs.
const TICK_NS: u64 = 10_000_000;

/// Whether something that was born after `since` still lives a while after the interrupt.
async fn has_survivors(init_pid: i32, engine_pid: i32, since: u64) -> bool {
    let deadline = Moment::now() + SURVIVORS;
    loop {
        let look = tokio::task::spawn_blocking(move || {
            // Times of birth are rounded down to a tick, so what was born right after the message may seem older. The
            // engine itself may be as young as that.
            let born_since = |started: u64| started + TICK_NS > since;
            processes(init_pid)
                .into_iter()
                .any(|(pid, started)| born_since(started) && own_pid(pid) != Some(engine_pid))
        });
        if !look.await.unwrap_or_default() {
            return false;
        }
        if Moment::now() >= deadline {
            return true;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

async fn work(mut work: Work) -> Ended {
    crate::kill_point!("runner::ending");
    crate::hold_point!("runner::ending_held");
    let looks = work.before.is_some() || work.before_unknown;
    let looking = looks.then(|| {
        let (path, before) = (work.workspace.path.clone(), work.before.take());
        tokio::task::spawn_blocking(move || {
            crate::kill_point!("runner::look_after");
            match (crate::git::look(&path), before) {
                (Some(after), Some(before)) => {
                    let changes = after.changes_since(&before, &path);
                    (Some(after), changes)
                }
                // Nothing to compare with: the list of changes is cut to nothing.
                (Some(after), None) => (Some(after), Changes { truncated: true, ..Changes::default() }),
                (None, _) => (None, Changes::default()),
            }
        })
    });
    let mut survivors = false;
    let mut kept = None;
    let mut record = None;
    if let Some(mut engine) = work.engine.take() {
        if work.process_gone || engine.gone || engine.keeper.is_dead() {
            engine.frames.close();
            if !engine.keeper.until_dead(Duration::from_secs(30)).await {
                engine.release(Duration::ZERO, pool::TERM).await;
            }
            let (dir, owner) = (engine.dir.clone(), work.context.state.runner_id().to_owned());
            let swept = tokio::task::spawn_blocking(move || close_dead(&dir, &owner, SWEEP)).await;
            if let Ok(Err(error)) = swept {
                tracing::warn!(error = chain(&error), "a dead keeper was not closed");
            }
            let _ = tokio::fs::remove_dir_all(&engine.temporary).await;
            (record, _) = remember(&work.context, work.session_id.clone(), Remembered::of(&engine)).await;
        } else {
            if let Some(since) = work.cancelled_since {
                survivors = has_survivors(engine.init_pid, engine.engine_pid, since).await;
            }
            if survivors || !engine.translator.standing().quiescent {
                if survivors {
                    let _ = engine.keeper.ask(Request::KillAll).await;
                }
                let _home = work.context.homes.lock(&engine.home).await;
                engine.release(pool::SETTLE, pool::TERM).await;
                (record, _) = remember(&work.context, work.session_id.clone(), Remembered::of(&engine)).await;
            } else {
                let mark = Request::EndTurn { turn_id: work.turn_id.clone() };
                // As when the runner dies before the keeper has it.
                let mark = if crate::fault_point!("runner::end_turn") { Request::Status } else { mark };
                let ended = engine.keeper.ask(mark);
                // Nothing of the turn waits for this mark: its end stands in its journal. Whatever the keeper is asked
                // next comes after it.
                let turn_id = work.turn_id.clone();
                work.context.tasks.spawn(async move {
                    if let Err(error) = ended.await {
                        tracing::warn!(turn = turn_id, %error, "a turn's end is not in the spool");
                    }
                });
                (record, engine.hashed) =
                    remember(&work.context, work.session_id.clone(), Remembered::of(&engine)).await;
                kept = Some(engine);
            }
        }
    }
    if !work.absent.is_empty() {
        let (path, absent) = (work.workspace.path.clone(), std::mem::take(&mut work.absent));
        let _ = tokio::task::spawn_blocking(move || leftovers::remove(&path, &absent)).await;
    }
    let (late, (after, changes)) = match looking {
        None => (false, Default::default()),
        Some(looking) => match tokio::time::timeout(LOOK_WAIT, looking).await {
            Ok(looked) => (false, looked.unwrap_or_default()),
            Err(_) => (true, Default::default()),
        },
    };
    Ended { engine: kept, after, changes, late, survivors, record, told: false }
}

/// What an engine process leaves for its session.
struct Remembered {
    adapter: &'static dyn Adapter,
    home: PathBuf,
    native: NativeRef,
    carry: Carry,
    launched: Launched,
    spool_id: String,
    hashed: Option<Hashed>,
}

impl Remembered {
    fn of(engine: &Engine) -> Self {
        Self {
            adapter: engine.adapter,
            home: engine.home.clone(),
            native: engine.native.clone(),
            carry: engine.translator.carry(),
            launched: engine.launched.clone(),
            spool_id: engine.spool_id.clone(),
            hashed: engine.hashed.clone(),
        }
    }
}

/// What the next turn of the session needs, and how far its file is hashed.
async fn remember(
    context: &Arc<Context>,
    session_id: Option<String>,
    left: Remembered,
) -> (Option<String>, Option<Hashed>) {
    let Some(session_id) = session_id else { return (None, left.hashed) };
    let context = Arc::clone(context);
    let Remembered { adapter, home, native, carry, launched, spool_id, mut hashed } = left;
    let made = tokio::task::spawn_blocking(move || -> Result<_, Error> {
        context.records.with(&session_id, || {
            let Some(mut record) = SessionRecord::load(&context.state, &session_id)? else {
                return Ok((None, hashed));
            };
            let recorded = record.native.as_ref().and_then(|known| known.file.clone());
            if carry.committed {
                hashed = launch::fingerprint(adapter, &home, &native, recorded.as_deref(), hashed);
                if let Some(print) = hashed.as_ref().map(Hashed::print) {
                    let file = Some(print.file.clone());
                    record.native = Some(NativeRef { id: native.id.clone(), file });
                    record.fingerprint = Some(print);
                }
            }
            if record.native.is_none() && !native.id.is_empty() {
                record.native = Some(native);
            }
            record.opened = true;
            record.carry = carry;
            record.launched = launched;
            record.spool_id = Some(spool_id);
            Ok((Some(record.hold(&context.state)?), hashed))
        })
    })
    .await;
    match made {
        Ok(Ok(made)) => made,
        Ok(Err(error)) => {
            tracing::error!(error = chain(&error), "a session's record was not made");
            (None, None)
        }
        Err(error) => {
            tracing::error!(%error, "a session's record was not made");
            (None, None)
        }
    }
}

impl Turn {
    /// The engine is idle or gone: collects what the terminal event needs.
    pub(super) fn begin_ending(&mut self) {
        if matches!(self.stage, Stage::Ending | Stage::Ended) {
            return;
        }
        self.stage = Stage::Ending;
        // What came in one batch with the end is of no turn, and the engine may wait for an answer to it.
        if let Some(engine) = &mut self.engine {
            for frame in self.unread.drain(..) {
                pool::read(engine, &frame);
            }
        }
        self.timers = Timers { ending: Some(Instant::now() + broken::ending_limit()), ..Timers::default() };
        self.ending_keeper = self.engine.as_ref().map(|engine| engine.keeper.clone());
        self.home = None;
        let cancelled = self.state.stop.is_some() && self.turn_end.is_some();
        let since = self.state.messages.first().map(|message| message.boottime_ns);
        let task = Work {
            context: Arc::clone(&self.context),
            turn_id: self.id.clone(),
            session_id: self
                .engine
                .as_ref()
                .filter(|_| self.state.opened.is_some())
                .map(|engine| engine.session_id.clone()),
            engine: self.engine.take(),
            process_gone: self.turn_end.as_ref().is_some_and(|end| end.process_gone),
            cancelled_since: since.filter(|_| cancelled),
            workspace: self.workspace.clone(),
            before: self.before.clone(),
            before_unknown: self.before_unknown,
            absent: self.state.process.as_ref().map(|process| process.absent.clone()).unwrap_or_default(),
        };
        self.beside(async move { Internal::Ended(Box::new(work(task).await)) });
    }

    /// Ends a turn that has no engine at work, or none at all.
    pub(super) fn end_without_engine(&mut self) {
        self.begin_ending();
    }

    pub(super) async fn on_ended(&mut self, ended: Box<Ended>) -> Result<(), Error> {
        if self.timers.ending.take().is_none() {
            // Too late: the end was told without it, and its engine was ended.
            return Ok(());
        }
        self.ending_keeper = None;
        self.ended = Some(ended);
        self.write_end().await
    }

    /// Writes what is left to be told, the terminal event last. May be tried again after a failure.
    pub(super) async fn write_end(&mut self) -> Result<(), Error> {
        let Some(mut ended) = self.ended.take() else { return Ok(()) };
        let result = self.tell_end(&mut ended).await;
        if let Err(error) = result {
            self.ended = Some(ended);
            self.timers.storage = Some(Instant::now() + STORAGE_RETRY);
            return Err(error);
        }
        self.stage = Stage::Ended;
        crate::hold_point!("runner::end_told");
        self.flush_session();
        // Callers that still wait for the opening learn why there is none.
        let error = match self.outcome() {
            (Outcome::Failed | Outcome::Lost, Some(failure)) => {
                Error::Refused { failure: Box::new(failure), started: true }
            }
            _ => Error::WrongState(format!("turn {} has ended", self.id)),
        };
        self.answer_openers(&Err(Arc::new(error)));
        for (delivery_id, senders) in self.senders.drain() {
            for sender in senders {
                // Accepted it was: what became of it is told by the terminal event.
                let _ = sender.send(Ok(delivery_id.clone()));
            }
        }
        Ok(())
    }

    /// Writes the session's file, beside everything else: until then the journal has what it lacks.
    fn flush_session(&self) {
        let Some(session_id) = self.state.session.as_ref().map(|session| session.session_id.clone()) else {
            return;
        };
        let context = Arc::clone(&self.context);
        self.context.tasks.spawn_blocking(move || {
            if let Err(error) = SessionRecord::flush(&context.state, &session_id) {
                tracing::error!(error = chain(&error), "a session's record is not in its file yet");
            }
        });
    }

    /// As [`Turn::flush_session`], before the end is told: the journal will not have what the file lacks.
    async fn flush_now(&mut self) {
        let Some(session_id) = self.state.session.as_ref().map(|session| session.session_id.clone()) else {
            return;
        };
        let context = Arc::clone(&self.context);
        let flushed =
            tokio::task::spawn_blocking(move || SessionRecord::flush(&context.state, &session_id)).await;
        if !matches!(flushed, Ok(Ok(()))) {
            tracing::error!(turn = self.id, ?flushed, "a session's record is not in its file yet");
        }
    }

    async fn tell_end(&mut self, ended: &mut Ended) -> Result<(), Error> {
        if self.state.terminal.is_none() {
            if !ended.told {
                self.deny_all().await?;
                self.tell_evidence_before()?;
                // An earlier life of this runner may have told a part already.
                if let Some(after) = &ended.after
                    && !self.state.evidence_after
                {
                    self.emit(Source::Synthetic, evidence_after(after, &ended.changes))?;
                }
                if ended.late {
                    self.warn_once(
                        "The worktree's state after the turn is unknown: it took too long to look at.",
                    )?;
                }
                if ended.survivors {
                    self.warn_once(
                        "Processes of the stopped turn survived the interrupt, so the engine was ended with them. \
                         The next turn resumes the session.",
                    )?;
                }
                let completed =
                    self.turn_end.as_ref().is_some_and(|end| end.outcome == TurnOutcome::Completed);
                if completed && self.state.stop == Some(StopCause::Cancel) {
                    self.warn_once("The engine had finished before the cancel reached it.")?;
                }
                ended.told = true;
            }
            if let Some(engine) = ended.engine.take() {
                if self.context.halt.is_cancelled() || self.context.shutdown.is_cancelled() {
                    pool::close(&self.context, engine).await;
                } else {
                    pool::put(&self.context, engine);
                }
            }
            // On a full disk the reserve is the terminal event's; the session's file is tried all the same.
            if ended.record.is_some() && self.journal.is_short() {
                self.flush_now().await;
            } else if let Some(kept) = &ended.record {
                if crate::fault_point!("runner::kept") {
                    return Err(Error::Internal("as a test wants it".to_owned()));
                }
                self.record(Record::Kept(kept.clone()))?;
                // Only now: what the disk refuses here is kept in the session's file at the next try.
                ended.record = None;
            }
            if self.left_behind {
                self.hold_workspace().await;
            }
            if !self.holds {
                self.context.slots.free(&self.id);
            }
            let mut terminal = self.terminal();
            if self.journal.is_short() && terminal.result.len() > Journal::LAST {
                let end = terminal.result.floor_char_boundary(Journal::LAST);
                terminal.result.truncate(end);
                terminal.truncated = true;
            }
            tracing::info!(turn = self.id, outcome = ?terminal.outcome(), "turn ended");
            self.emit_synced(Source::Synthetic, to_proto::body(Kind::Terminal(terminal))).await?;
        } else {
            // It was journalled, and could not be put on disk at once.
            self.publish_synced().await?;
        }
        Ok(())
    }

    /// An engine may be at work there still: the workspace is nobody else's until its keeper is dead.
    async fn hold_workspace(&mut self) {
        let Some(process) = self.state.process.clone().filter(|_| !self.holds) else { return };
        let hold = Hold {
            turn_id: self.id.clone(),
            workspace: self.workspace.path.clone(),
            session_id: process.session_id,
            spool_id: process.spool_id,
        };
        self.holds = holds::keep(&self.context, hold).await;
    }

    /// A warning that belongs to the end, which may be told in more than one life of the runner.
    fn warn_once(&mut self, message: &str) -> Result<(), Error> {
        if self.state.warned.contains(message) { Ok(()) } else { self.warn(message) }
    }

    /// How the turn ends, and why where there is something to say.
    fn outcome(&self) -> (Outcome, Option<Failure>) {
        let end = self.turn_end.as_deref();
        let base = match end.map(|end| &end.outcome) {
            Some(TurnOutcome::Failed { failure }) => Some(failure.clone()),
            _ => None,
        };
        let completed = end.is_some_and(|end| end.outcome == TurnOutcome::Completed);
        // A reason of ours keeps what is known of the process.
        let ours = |reason: Reason, message: String| Failure {
            exit_code: base.as_ref().and_then(|base| base.exit_code),
            signal: base.as_ref().and_then(|base| base.signal),
            stderr_tail: base.as_ref().map(|base| base.stderr_tail.clone()).unwrap_or_default(),
            unavailable: reason == Reason::Deadline && base.as_ref().is_some_and(|base| base.unavailable),
            ..Failure::new(reason, message)
        };
        match self.state.stop {
            // Not even a cancel is one while an engine may be at work.
            _ if self.in_doubt.is_some() => (Outcome::Lost, self.in_doubt.clone()),
            Some(StopCause::Cancel) => (
                Outcome::Cancelled,
                Some(Failure {
                    retryable: true,
                    ..ours(Reason::Cancelled, "the turn was cancelled".to_owned())
                }),
            ),
            _ if self.broken => (Outcome::Failed, self.must_stop.clone()),
            // Also of an engine that got to its end: what it said after this is not kept.
            Some(StopCause::Storage) => (
                Outcome::Failed,
                Some(ours(Reason::Storage, "the runner could not write what it must keep".to_owned())),
            ),
            Some(_) if completed => (Outcome::Completed, None),
            Some(StopCause::Idle) => {
                let seconds = self.state.open.as_ref().map_or(0, |open| open.idle_millis / 1000);
                let text = format!("the engine was silent for {seconds} s");
                (Outcome::Failed, Some(ours(Reason::IdleTimeout, text)))
            }
            Some(StopCause::Deadline) => {
                (Outcome::Failed, Some(ours(Reason::Deadline, "the turn's deadline passed".to_owned())))
            }
            Some(StopCause::Superseded) => (
                Outcome::Failed,
                Some(ours(Reason::RunnerLost, "a later owner of the conversation took over".to_owned())),
            ),
            Some(StopCause::KeeperStuck) => (
                Outcome::Failed,
                Some(ours(Reason::IdleTimeout, "the keeper of the engine did not answer".to_owned())),
            ),
            None => self.own_outcome(end, base.clone()),
        }
    }

    fn terminal(&self) -> TerminalEvent {
        let end = self.turn_end.as_deref();
        let spool_id = self.spool_id();
        let (outcome, failure) = self.outcome();
        let answer = end.and_then(|end| end.answer.as_ref());
        TerminalEvent {
            outcome: outcome.into(),
            result: answer.map(|answer| answer.body.text.clone()).unwrap_or_default(),
            truncated: answer.is_some_and(|answer| answer.body.truncated),
            failure: failure.map(|failure| to_proto::failure(&failure, &spool_id)),
            usage: end
                .map(|end| to_proto::usage(&end.usage))
                .filter(|usage| *usage != proto::Usage::default()),
            duration: Some(to_proto::duration(self.duration())),
            session_resumable: self.state.opened.is_some() && self.state.unusable.is_none(),
        }
    }

    fn own_outcome(
        &self,
        end: Option<&roundhouse_engines::TurnEnd>,
        base: Option<Failure>,
    ) -> (Outcome, Option<Failure>) {
        if self.state.doubt.is_some() {
            return (Outcome::Lost, Some(doubt::lost("")));
        }
        let Some(end) = end else {
            let failure = self
                .must_stop
                .clone()
                .unwrap_or_else(|| Failure::new(Reason::Process, "the engine ended before the turn did"));
            return (Outcome::Failed, Some(failure));
        };
        if end.process_gone && !end.accepted && !self.exit_seen && self.message_may_be_taken() {
            return (Outcome::Lost, Some(doubt::lost("")));
        }
        match &end.outcome {
            TurnOutcome::Completed => (Outcome::Completed, None),
            // A stop that was asked for is recorded, and told above. This one came from outside: a host that shuts
            // down, a person with a signal.
            TurnOutcome::Cancelled => {
                let failure = Failure {
                    retryable: true,
                    ..Failure::new(Reason::Process, "the engine was stopped from outside, by nobody's cancel")
                };
                (Outcome::Failed, Some(self.must_stop.clone().unwrap_or(failure)))
            }
            TurnOutcome::Failed { .. } => (Outcome::Failed, self.must_stop.clone().or(base)),
        }
    }

    fn duration(&self) -> Duration {
        match &self.state.open {
            Some(open) if open.boot_id == self.context.boot_id => Duration::from_nanos(
                roundhouse_process::boottime_ns().saturating_sub(open.opened_boottime_ns),
            ),
            _ => self.started.elapsed(),
        }
    }
}

fn evidence_after(after: &Worktree, changes: &Changes) -> proto::EventBody {
    to_proto::body(Kind::Evidence(EvidenceEvent {
        point: Point::After.into(),
        head: after.head.clone(),
        branch: after.branch.clone(),
        dirty: Some(!after.dirty.is_empty()),
        commits: changes.commits.clone(),
        changed_files: changes.files.clone(),
        truncated: changes.truncated,
    }))
}
