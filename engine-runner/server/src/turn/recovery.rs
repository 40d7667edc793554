//! A turn after a restart of its runner: a pure plan from its journal and its keeper, then the same task as before.

use std::{path::Path, sync::Arc, time::Duration};

use roundhouse_engines::{Failure, Reason};
use roundhouse_process::{KeeperHandle, KeeperState, LinkError, close_dead, state_of};
use roundhouse_proto::engine::v1::notice_event;
use tokio::time::Instant;

use super::{
    Handle, State,
    actor::{Stage, Start, Turn, build},
    ended,
    stopping::{Step, Stopping},
};
use crate::{
    context::Context,
    engine::Engine,
    error::{Error, chain},
    grpc::to_proto,
    ids,
    journal::{Journal, ProcessOpen, Source},
    keeper,
    launch::{self, AdoptError},
    session_record::SessionRecord,
    workspace::Workspace,
};

/// What is done with a turn that was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Plan {
    /// Its terminal event is there: it waits for Acknowledge.
    Ended,
    /// Nobody can know of it, and nothing was given to an engine: as if it had never been opened.
    Discard,
    /// It has no process, and was being stopped: it ends.
    End,
    /// It has no process: StartOrResume may bring one.
    Wait,
    /// Its process is not this runner's to ask, and has no message: it ends, and the process is left alone.
    Leave,
    /// It has a message and its session, and no process has had the message: the session is opened again.
    Reopen,
    /// Its keeper lives: it goes on.
    Attach,
    /// Its keeper is dead: the turn is closed from what the spool says.
    Replay,
    /// It has a message, and nobody here can know what its engine does with it: it ends LOST.
    InDoubt,
}

/// What the directory of a turn's newest process says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Seen {
    /// There is none: nothing was ever started in it.
    Missing,
    /// Its keeper lives.
    Live,
    /// Its keeper is dead.
    Dead,
    /// It belongs to another or a newer program, or cannot be looked at: an engine may be at work there.
    Alien,
}

/// Tries to look at a keeper's directory. What fails for want of descriptors passes.
const LOOKS: u32 = 5;

/// Pause after the first try; it doubles.
const LOOK_PAUSE: Duration = Duration::from_millis(100);

/// Why nobody can ask an alien keeper.
const ALIEN: &str = "the engine's keeper belongs to another or a newer runner, or cannot be looked at";

async fn see(directory: &Path, owner: &str) -> Seen {
    let mut pause = LOOK_PAUSE;
    for _ in 0..LOOKS {
        if let Some(seen) = see_once(directory, owner) {
            return seen;
        }
        tokio::time::sleep(pause).await;
        pause *= 2;
    }
    Seen::Alien
}

fn see_once(directory: &Path, owner: &str) -> Option<Seen> {
    // Only the system's word that there is nothing counts as nothing.
    match std::fs::symlink_metadata(directory) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Some(Seen::Missing),
        _ => {}
    }
    match state_of(directory, owner) {
        Ok(KeeperState::Live) => Some(Seen::Live),
        Ok(KeeperState::Dead) => Some(Seen::Dead),
        Ok(KeeperState::Foreign) => Some(Seen::Alien),
        Err(error) => {
            tracing::warn!(error = chain(&error), dir = %directory.display(), "a keeper cannot be looked at");
            None
        }
    }
}

/// Decides from the journal and from what the keeper's directory says.
fn plan(state: &State, keeper: Seen) -> Plan {
    if state.terminal.is_some() {
        return Plan::Ended;
    }
    let unknown = !state.has_events() && state.messages.is_empty();
    match (&state.process, keeper) {
        (Some(_), Seen::Live) => Plan::Attach,
        (Some(_), Seen::Dead) if state.opened.is_none() && unknown && state.stop.is_none() => Plan::Discard,
        (Some(_), Seen::Dead) => Plan::Replay,
        // An engine may have the message: it is given to no other one.
        (Some(_), Seen::Alien) if state.has_messages() => Plan::InDoubt,
        (Some(_), Seen::Alien) if state.stop.is_some() => Plan::End,
        // Nobody can open its session again while that process may live.
        (Some(_), Seen::Alien) => Plan::Leave,
        // No process was ever started for it, or it has none.
        (Some(_), Seen::Missing) | (None, _) => {
            if state.stop.is_some() {
                Plan::End
            } else if unknown {
                Plan::Discard
            } else if state.has_messages() && state.opened.is_some() && state.unusable.is_none() {
                Plan::Reopen
            } else {
                Plan::Wait
            }
        }
    }
}

/// A turn that an earlier runner left, as its journal tells it; nobody has looked at its process yet.
pub(crate) struct Found {
    turn_id: String,
    journal: Journal,
    state: State,
}

/// What reading a turn's journal came to.
pub(crate) enum Read {
    /// Nothing of it is left to be known.
    Nothing,
    /// It has ended, and waits for its Acknowledge.
    Ended(Handle),
    /// It goes on.
    Open(Box<Found>),
}

/// Reads a turn that an earlier runner left. What it knows of its session is written down: one turn of a session after the
/// other.
///
/// # Errors
/// [`Error::Storage`] when its journal cannot be read.
pub(crate) async fn read(context: &Arc<Context>, turn_id: &str) -> Result<Read, Error> {
    let path = context.state.journal(turn_id);
    let reading = path.clone();
    let (journal, records) = tokio::task::spawn_blocking(move || Journal::recover(&reading))
        .await
        .map_err(|error| Error::Internal(format!("recovery task: {error}")))??;
    let state = State::fold(&records);
    if let Some(kept) = state.kept.clone() {
        // Its file may be behind, as it is written after the turn's end is told.
        let recovering = Arc::clone(context);
        tokio::task::spawn_blocking(move || SessionRecord::recover(&recovering.state, &kept))
            .await
            .map_err(|error| Error::Internal(format!("recovery task: {error}")))??;
    }
    if state.open.is_none() {
        discard(context, turn_id).await;
        return Ok(Read::Nothing);
    }
    if state.terminal.is_some() {
        return Ok(ended(turn_id, &state, path).map_or(Read::Nothing, Read::Ended));
    }
    Ok(Read::Open(Box::new(Found { turn_id: turn_id.to_owned(), journal, state })))
}

/// Takes up a turn that an earlier runner left. None: nothing of it is left to be known.
///
/// # Errors
/// [`Error::Storage`] when its journal cannot be read.
pub(crate) async fn recover(context: &Arc<Context>, turn_id: &str) -> Result<Option<Handle>, Error> {
    Ok(match read(context, turn_id).await? {
        Read::Nothing => None,
        Read::Ended(handle) => Some(handle),
        Read::Open(found) => found.take_up(context).await,
    })
}

impl Found {
    /// Its id.
    pub(crate) fn turn_id(&self) -> &str {
        &self.turn_id
    }

    /// Takes it up, which may take as long as a keeper may be silent. None: nothing of it is left to be known.
    pub(crate) async fn take_up(self, context: &Arc<Context>) -> Option<Handle> {
        let Self { turn_id, journal, state } = self;
        let open = state.open.clone()?;
        let directory = state.process.as_ref().map(|p| context.state.spool(&p.session_id, &p.spool_id));
        let keeper = match &directory {
            Some(directory) => see(directory, context.state.runner_id()).await,
            None => Seen::Missing,
        };
        let plan = plan(&state, keeper);
        tracing::info!(turn = turn_id, ?plan, "turn found");
        if plan == Plan::Discard {
            if let Some(directory) = directory.filter(|directory| directory.is_dir()) {
                let owner = context.state.runner_id().to_owned();
                let _ = tokio::task::spawn_blocking(move || {
                    close_dead(&directory, &owner, Duration::from_secs(5))
                })
                .await;
            }
            discard(context, &turn_id).await;
            return None;
        }
        let workspace = workspace(context, &open.workspace);
        if let Err(error) = context.slots.take(&turn_id, &workspace.path) {
            tracing::error!(turn = turn_id, error = chain(&error), "two turns are found in one workspace");
        }
        let process = state.process.clone();
        let (mut turn, handle) = build(context, Start { turn_id, workspace, journal, state })?;
        turn.take_up(plan, process).await;
        turn.update_facts();
        context.tasks.spawn(turn.run());
        Some(handle)
    }
}

/// What taking hold of a live keeper came to.
enum Adopted {
    /// It is held; its frames up to this one are the past.
    Engine(Box<Engine>, u64),
    /// It died meanwhile.
    Dead,
    /// It does not answer in time: it is stopped.
    Stuck,
    /// It lives, and this runner cannot work with it.
    Failed(String),
}

async fn discard(context: &Context, turn_id: &str) {
    let _ = tokio::fs::remove_dir_all(context.state.turn(turn_id)).await;
}

fn workspace(context: &Context, path: &Path) -> Workspace {
    let resolved = path.to_str().and_then(|text| context.roots.resolve(text).ok());
    // Its root may have been taken from the configuration: the turn ends where it began, trusted with nothing.
    resolved.unwrap_or_else(|| Workspace {
        id: ids::workspace_id(context.state.runner_id(), path),
        path: path.to_owned(),
        trusted: false,
    })
}

impl Turn {
    async fn take_up(&mut self, plan: Plan, process: Option<ProcessOpen>) {
        // What the worktree was like before the message is known, or cannot be known any more.
        if self.state.has_messages() {
            self.looked = true;
        } else {
            self.look_before();
        }
        match (plan, process) {
            (Plan::Attach, Some(process)) => match self.adopt(&process).await {
                Adopted::Engine(engine, until) => self.replay(engine, until),
                Adopted::Dead => self.replay_dead(&process).await,
                Adopted::Stuck => {
                    tracing::error!(turn = self.id, "a live keeper does not answer; it is ended");
                    if self.close_stuck(&process).await {
                        self.replay_dead(&process).await;
                    } else {
                        self.left_alone("it does not answer and could not be ended");
                    }
                }
                Adopted::Failed(why) => self.left_alone(&why),
            },
            (Plan::Replay, Some(process)) => self.replay_dead(&process).await,
            (Plan::Reopen, _) => self.prepare(None),
            (Plan::InDoubt, _) => {
                self.end_in_doubt(ALIEN);
            }
            (Plan::Leave, _) => self.left_alone(ALIEN),
            (Plan::End, _) => {
                self.stopping = Some(self.stopping_again());
                self.end_without_engine();
            }
            _ => {
                self.stage = Stage::NeedSession;
                self.timers.session = Some(Instant::now() + self.context.settings.unusable_wait);
            }
        }
    }

    /// Ends the turn as LOST: an engine may have its message and may be at work, and is not this runner's to ask.
    fn end_in_doubt(&mut self, why: &str) {
        self.left_behind = true;
        self.in_doubt = Some(Failure {
            retryable: true,
            what_to_do: "See whether an engine is still at work in the workspace and what it changed there, \
                         then retry the turn."
                .to_owned(),
            ..Failure::new(
                Reason::RunnerLost,
                format!("whether the message was taken cannot be known: {why}"),
            )
        });
        self.end_without_engine();
    }

    /// Goes on with a stop that an earlier life of this runner began.
    fn stop_again(&mut self) {
        if self.stage == Stage::Open && !self.message_was_given() {
            // The engine has nothing of this turn and can stay as it is.
            self.begin_ending();
        } else {
            self.begin_ladder();
        }
    }

    fn stopping_again(&self) -> Stopping {
        Stopping { step: Step::Begin, grace: self.context.settings.cancel_interrupt_grace }
    }

    /// The keeper lives and this runner cannot work with it: that is no reason to end it.
    fn left_alone(&mut self, why: &str) {
        tracing::error!(turn = self.id, why, "a live keeper is left alone");
        if self.state.has_messages() {
            self.end_in_doubt(why);
            return;
        }
        self.must_stop = Some(Failure {
            retryable: true,
            what_to_do: "Wait until that process has ended, or end it, then retry the turn.".to_owned(),
            ..Failure::new(Reason::RunnerLost, format!("the engine cannot be taken up again: {why}"))
        });
        self.end_without_engine();
    }

    async fn adopt(&mut self, process: &ProcessOpen) -> Adopted {
        let directory = self.spool_dir(&process.session_id, &process.spool_id);
        let mut pause = LOOK_PAUSE;
        let mut why = String::new();
        for _ in 0..LOOKS {
            let record = SessionRecord::load(&self.context.state, &process.session_id);
            why = match record {
                Ok(Some(record)) => {
                    let (spool, open) = (&process.spool_id, &process.translator);
                    match launch::adopt(&self.context, &record, spool, open, Some(process.after)).await {
                        Ok((engine, until)) => return Adopted::Engine(engine, until),
                        // Only silence proves that it is stopped.
                        Err(AdoptError::Link(LinkError::Timeout(_))) => return Adopted::Stuck,
                        Err(error) => chain(&error),
                    }
                }
                Ok(None) => "its session has no record".to_owned(),
                Err(error) => chain(&error),
            };
            if see_once(&directory, self.context.state.runner_id()) == Some(Seen::Dead) {
                return Adopted::Dead;
            }
            tokio::time::sleep(pause).await;
            pause *= 2;
        }
        Adopted::Failed(why)
    }

    /// Kills a keeper that does not answer; false when it may still live.
    pub(super) async fn close_stuck(&mut self, process: &ProcessOpen) -> bool {
        let dir = self.spool_dir(&process.session_id, &process.spool_id);
        let owner = self.context.state.runner_id().to_owned();
        let closed = tokio::task::spawn_blocking(move || {
            // Whose socket it is the system tells; an id that was once written down may be anybody's by now.
            match KeeperHandle::find(&dir) {
                Ok(handle) => {
                    handle.kill()?;
                    handle.wait(Duration::from_secs(5))?;
                }
                Err(error) => tracing::warn!(error = chain(&error), "a stuck keeper is not found"),
            }
            close_dead(&dir, &owner, Duration::from_secs(5)).map(|_| ())
        })
        .await;
        match closed {
            Ok(Ok(())) => true,
            Ok(Err(error)) => {
                tracing::error!(turn = self.id, error = chain(&error), "a stuck keeper could not be ended");
                false
            }
            Err(error) => {
                tracing::error!(turn = self.id, %error, "a stuck keeper could not be ended");
                false
            }
        }
    }

    async fn replay_dead(&mut self, process: &ProcessOpen) {
        let record = SessionRecord::load(&self.context.state, &process.session_id).ok().flatten();
        let Some(adapter) = record.as_ref().and_then(|r| roundhouse_engines::adapter(&r.engine)) else {
            self.end_without_engine();
            return;
        };
        let Some(record) = record else { return };
        let dir = self.spool_dir(&process.session_id, &process.spool_id);
        let settling = dir.clone();
        // First: what the spool lacks counts as never written, and would be given to an engine again.
        let settled = tokio::task::spawn_blocking(move || roundhouse_process::settle_spool(&settling)).await;
        if let Some(error) =
            settled.map_or_else(|error| Some(error.to_string()), |s| s.err().map(|e| chain(&e)))
        {
            self.left_alone(&format!("the engine's spool cannot be read: {error}"));
            return;
        }
        let after = process.after;
        let (keeper, frames) = keeper::dead(dir.clone(), after);
        let engine = Box::new(Engine {
            session_id: process.session_id.clone(),
            spool_id: process.spool_id.clone(),
            dir,
            home: record.home,
            temporary: self.context.state.temporary(&process.spool_id),
            launched: record.launched,
            native: process.translator.native.clone(),
            adapter,
            translator: adapter.translator(&process.translator),
            keeper,
            frames,
            init_pid: 0,
            engine_pid: 0,
            last_frame: after,
            hashed: None,
            gone: false,
            token: self.context.pool.token(),
        });
        // All that there is belongs to the past; its end is told by itself.
        self.replay(engine, u64::MAX);
    }

    fn replay(&mut self, engine: Box<Engine>, until: u64) {
        let after = engine.last_frame;
        self.engine = Some(engine);
        // A process that was started for the turn proves its opening by itself, whatever another one proved before.
        let fresh = self.state.process.as_ref().is_some_and(|process| process.translator.opening.is_some());
        self.stage = if self.state.opened.is_some() && !fresh { Stage::Open } else { Stage::Opening };
        if self.stage == Stage::Opening {
            self.timers.opening = Some(Instant::now() + self.context.settings.engine_start_timeout);
            self.write_opening();
        }
        self.replay_until = until;
        self.replaying = true;
        if until <= after {
            // Nothing to replay: the first input does the rest at once.
            self.replay_until = 0;
            self.timers.resend = Some(Instant::now());
            self.replaying = false;
            if self.state.stop.is_some() {
                self.stopping = Some(self.stopping_again());
                self.stop_again();
            }
            self.restart_idle();
        }
    }

    /// All of the past was read: what is owed follows.
    pub(super) async fn on_replayed(&mut self) -> Result<(), Error> {
        self.replaying = false;
        let Some(engine) = &self.engine else { return Ok(()) };
        let alive = !engine.keeper.is_dead();
        for partial in engine.translator.partials() {
            self.hub.partial(to_proto::partial(&partial));
        }
        if self.state.has_events() && alive {
            self.emit(
                Source::Synthetic,
                to_proto::notice(
                    notice_event::Kind::Readopted,
                    "The runner was restarted; the engine went on meanwhile, and so does the turn.",
                ),
            )?;
        }
        if self.state.stop.is_some() {
            self.stopping = Some(self.stopping_again());
            self.deny_all().await?;
        }
        if let Some(end) = self.turn_end.take() {
            return self.conclude(end).await;
        }
        if self.stopping.is_some() {
            if alive {
                self.stop_again();
            }
            return Ok(());
        }
        if alive {
            self.repeat_answers().await?;
            self.deliver_waiting();
            self.restart_idle();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use roundhouse_engines::{Carry, NativeRef, TranslatorOpen};
    use roundhouse_proto::engine::v1::TerminalEvent;

    use super::*;
    use crate::journal::{MessageMark, OpenedHow, OpenedMark, StopCause};

    fn process() -> ProcessOpen {
        ProcessOpen {
            session_id: "ses_1".into(),
            spool_id: "spl_1".into(),
            after: 0,
            translator: TranslatorOpen {
                spool_id: "spl_1".into(),
                native: NativeRef { id: "n".into(), file: None },
                opening: None,
                carry: Carry::default(),
                turn_id: None,
            },
            absent: Vec::new(),
        }
    }

    fn opened() -> OpenedMark {
        OpenedMark {
            session_id: "ses_1".into(),
            how: OpenedHow::Started,
            native_id: "n".into(),
            prompt_applied: false,
        }
    }

    fn message() -> MessageMark {
        MessageMark {
            session_id: "ses_1".into(),
            message_id: "msg_1".into(),
            delivery_id: "d".into(),
            text: "t".into(),
            boottime_ns: 1,
        }
    }

    fn state(with: impl FnOnce(&mut State)) -> State {
        let mut state = State {
            session: Some(crate::journal::SessionOpen {
                session_id: "ses_1".into(),
                engine: "claude-code".into(),
                model: "m".into(),
                effort: None,
                agent: String::new(),
                prompt: String::new(),
                prompt_sha256: String::new(),
                context: String::new(),
                native_id: None,
                permissions: roundhouse_engines::Permissions::Ask,
                replaces: String::new(),
            }),
            ..State::default()
        };
        with(&mut state);
        state
    }

    #[test]
    fn every_case_has_its_plan() {
        use Seen::{Alien, Dead, Live, Missing};
        let with_message = |s: &mut State| {
            s.process = Some(process());
            s.opened = Some(opened());
            s.messages.push(message());
            s.last = 1;
        };
        let cases = [
            (state(|s| s.terminal = Some(TerminalEvent::default())), Live, Plan::Ended),
            (state(|_| {}), Missing, Plan::Discard),
            (state(|s| s.process = Some(process())), Missing, Plan::Discard),
            (state(|s| s.process = Some(process())), Dead, Plan::Discard),
            (state(|s| s.process = Some(process())), Live, Plan::Attach),
            (state(|s| s.process = Some(process())), Alien, Plan::Leave),
            (state(|s| s.last = 1), Missing, Plan::Wait),
            (state(|s| s.stop = Some(StopCause::Cancel)), Missing, Plan::End),
            (
                state(|s| {
                    s.process = Some(process());
                    s.opened = Some(opened());
                    s.last = 1;
                }),
                Dead,
                Plan::Replay,
            ),
            (state(with_message), Missing, Plan::Reopen),
            (state(with_message), Alien, Plan::InDoubt),
            (
                state(|s| {
                    with_message(s);
                    s.stop = Some(StopCause::Cancel);
                }),
                Alien,
                Plan::InDoubt,
            ),
            (
                state(|s| {
                    s.opened = Some(opened());
                    s.messages.push(message());
                    s.unusable = Some("gone".into());
                    s.last = 1;
                }),
                Missing,
                Plan::Wait,
            ),
        ];
        for (index, (state, keeper, expected)) in cases.into_iter().enumerate() {
            assert_eq!(plan(&state, keeper), expected, "case {index}");
        }
    }

    #[test]
    fn a_directory_that_cannot_be_looked_at_is_not_a_missing_one() {
        let root = tempfile::tempdir().unwrap();
        let missing = root.path().join("missing");
        assert_eq!(see_once(&missing, "run_1"), Some(Seen::Missing));
        // ENOTDIR stands for every error that is not "there is nothing".
        let file = root.path().join("file");
        std::fs::write(&file, "").unwrap();
        assert_eq!(see_once(&file.join("below"), "run_1"), None);
        assert_eq!(see_once(&file, "run_1"), Some(Seen::Alien));
    }
}
