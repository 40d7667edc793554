//! A turn after a restart of its runner: a pure plan from its journal and its keeper, then the same task as before.

use std::{path::Path, sync::Arc, time::Duration};

use roundhouse_process::{KeeperState, close_dead, state_of};
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
    keeper, launch,
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
    /// It has a message and its session, and no process has had the message: the session is opened again.
    Reopen,
    /// Its keeper lives: it goes on.
    Attach,
    /// Its keeper is dead: the turn is closed from what the spool says.
    Replay,
}

/// Decides from the journal and from what the keeper's directory says (none: there is no such directory).
fn plan(state: &State, keeper: Option<KeeperState>) -> Plan {
    if state.terminal.is_some() {
        return Plan::Ended;
    }
    let unknown = !state.has_events() && state.messages.is_empty();
    match (&state.process, keeper) {
        (Some(_), Some(KeeperState::Live)) => Plan::Attach,
        (Some(_), Some(KeeperState::Dead)) if state.opened.is_none() && unknown && state.stop.is_none() => {
            Plan::Discard
        }
        (Some(_), Some(KeeperState::Dead)) => Plan::Replay,
        // No process was ever started for it, or it has none.
        (Some(_), Some(KeeperState::Foreign) | None) | (None, _) => {
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

/// Takes up a turn that an earlier runner left. None: nothing of it is left to be known.
///
/// # Errors
/// [`Error::Storage`] when its journal cannot be read.
pub(crate) async fn recover(context: &Arc<Context>, turn_id: &str) -> Result<Option<Handle>, Error> {
    let path = context.state.journal(turn_id);
    let reading = path.clone();
    let (journal, records) = tokio::task::spawn_blocking(move || Journal::recover(&reading))
        .await
        .map_err(|error| Error::Internal(format!("recovery task: {error}")))??;
    let state = State::fold(&records);
    let Some(open) = state.open.clone() else {
        discard(context, turn_id).await;
        return Ok(None);
    };
    let directory = state.process.as_ref().map(|p| context.state.spool(&p.session_id, &p.spool_id));
    let keeper = directory
        .as_ref()
        .filter(|directory| directory.is_dir())
        .and_then(|directory| state_of(directory, context.state.runner_id()).ok());
    let plan = plan(&state, keeper);
    tracing::info!(turn = turn_id, ?plan, "turn found");
    if plan == Plan::Ended {
        return Ok(ended(turn_id, &state, path));
    }
    if plan == Plan::Discard {
        if let Some(directory) = directory.filter(|directory| directory.is_dir()) {
            let owner = context.state.runner_id().to_owned();
            let _ =
                tokio::task::spawn_blocking(move || close_dead(&directory, &owner, Duration::from_secs(5)))
                    .await;
        }
        discard(context, turn_id).await;
        return Ok(None);
    }
    let workspace = workspace(context, &open.workspace);
    if let Err(error) = context.slots.take(turn_id, &workspace.path) {
        tracing::error!(turn = turn_id, error = chain(&error), "two turns are found in one workspace");
    }
    let process = state.process.clone();
    let start = Start { turn_id: turn_id.to_owned(), workspace, journal, state };
    let Some((mut turn, handle)) = build(context, start) else { return Ok(None) };
    turn.take_up(plan, process).await;
    context.tasks.spawn(turn.run());
    Ok(Some(handle))
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
                Ok((engine, until)) => self.replay(engine, until),
                Err(error) => {
                    tracing::error!(turn = self.id, error, "a live keeper cannot be taken up");
                    // It does not answer: it is ended, and the turn is closed from its spool.
                    self.close_stuck(&process).await;
                    self.replay_dead(&process).await;
                }
            },
            (Plan::Replay, Some(process)) => self.replay_dead(&process).await,
            (Plan::Reopen, _) => self.prepare(None),
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

    fn stopping_again(&self) -> Stopping {
        Stopping { step: Step::Begin, grace: self.context.settings.cancel_interrupt_grace }
    }

    async fn adopt(&self, process: &ProcessOpen) -> Result<(Box<Engine>, u64), String> {
        let record = SessionRecord::load(&self.context.state, &process.session_id)
            .map_err(|error| chain(&error))?
            .ok_or("its session has no record")?;
        launch::adopt(&self.context, &record, &process.spool_id, &process.translator, Some(process.after))
            .await
    }

    async fn close_stuck(&self, process: &ProcessOpen) {
        let dir = self.spool_dir(&process.session_id, &process.spool_id);
        let owner = self.context.state.runner_id().to_owned();
        let pid = tokio::task::spawn_blocking(move || {
            // Only the lock says that it lives; the handle is taken while it does.
            let meta: serde_json::Value =
                serde_json::from_slice(&std::fs::read(dir.join("meta.json")).ok()?).ok()?;
            let pid = i32::try_from(meta.get("keeper_pid")?.as_i64()?).ok()?;
            let handle = roundhouse_process::KeeperHandle::adopt(&dir, pid).ok()?;
            handle.kill().ok()?;
            let _ = handle.wait(Duration::from_secs(5));
            close_dead(&dir, &owner, Duration::from_secs(5)).ok()
        })
        .await;
        if !matches!(pid, Ok(Some(_))) {
            tracing::error!(turn = self.id, "a keeper that does not answer could not be ended");
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
        let reading = dir.clone();
        let after = process.after;
        let (keeper, frames, last) = keeper::dead(&reading, after);
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
            gone: false,
            token: self.context.pool.token(),
        });
        self.replay(engine, last);
    }

    fn replay(&mut self, engine: Box<Engine>, until: u64) {
        let after = engine.last_frame;
        self.engine = Some(engine);
        self.stage = if self.state.opened.is_some() { Stage::Open } else { Stage::Opening };
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
                self.begin_ladder();
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
                self.begin_ladder();
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
        use KeeperState::{Dead, Foreign, Live};
        let cases = [
            (state(|s| s.terminal = Some(TerminalEvent::default())), Some(Live), Plan::Ended),
            (state(|_| {}), None, Plan::Discard),
            (state(|s| s.process = Some(process())), None, Plan::Discard),
            (state(|s| s.process = Some(process())), Some(Dead), Plan::Discard),
            (state(|s| s.process = Some(process())), Some(Live), Plan::Attach),
            (state(|s| s.last = 1), None, Plan::Wait),
            (state(|s| s.stop = Some(StopCause::Cancel)), None, Plan::End),
            (
                state(|s| {
                    s.process = Some(process());
                    s.opened = Some(opened());
                    s.last = 1;
                }),
                Some(Dead),
                Plan::Replay,
            ),
            (
                state(|s| {
                    s.process = Some(process());
                    s.opened = Some(opened());
                    s.messages.push(message());
                    s.last = 1;
                }),
                Some(Foreign),
                Plan::Reopen,
            ),
            (
                state(|s| {
                    s.opened = Some(opened());
                    s.messages.push(message());
                    s.unusable = Some("gone".into());
                    s.last = 1;
                }),
                None,
                Plan::Wait,
            ),
        ];
        for (index, (state, keeper, expected)) in cases.into_iter().enumerate() {
            assert_eq!(plan(&state, keeper), expected, "case {index}");
        }
    }
}
