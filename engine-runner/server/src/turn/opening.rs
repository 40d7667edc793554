//! Opening a session for the turn: warm, resumed, started, or found unusable.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use roundhouse_engines::{Failure, OpenFailure, OpenMode, Opened, Reason, TranslatorOpen};
use roundhouse_process::{Request, Response};
use roundhouse_proto::engine::v1::{Origin, SessionEvent, event_body::Kind, session_event};
use tokio::{
    sync::{OwnedMutexGuard, oneshot},
    time::Instant,
};
use tokio_util::sync::CancellationToken;

use super::{
    OpenAnswer, OpenReply, OpenResult,
    actor::{Internal, Purpose, Stage, Turn},
};
use crate::{
    context::Context,
    engine::Engine,
    error::Error,
    grpc::to_proto,
    holds,
    journal::{OpenedHow, OpenedMark, ProcessOpen, Record, SessionOpen, Source},
    keeper::{AskError, Keeper},
    launch::{self, Plan, Planned, Wanted},
    leftovers, pool, repair,
    session_record::{Launched, SessionRecord},
};

/// Starts of one session within a turn: as wanted, and once the other way.
const STARTS: u32 = 2;

/// Starts because an idle process had ended before the message came.
const REOPENS: u32 = 2;

/// What preparing came to.
#[derive(Debug)]
pub(super) enum Prepared {
    /// The session's warm process serves the turn.
    Warm(Box<Engine>),
    /// A process can be started.
    Planned(Box<Planned>),
    /// It was started; the home's lock goes with it until it has proved its opening.
    Started(Box<Engine>, OwnedMutexGuard<()>),
    /// The native session cannot be used.
    Unusable(String),
    /// It cannot be opened.
    Failed(Error),
}

/// What comes after a process was ended.
#[derive(Debug)]
pub(super) enum Released {
    /// The opening is refused with this error.
    Refuse(Arc<Error>),
    /// The session is opened the other way.
    Again(Option<OpenMode>),
    /// The session is opened this way once these files of the home are gone; failing that, it is refused.
    Repair(OpenMode, Vec<String>, Box<Failure>),
    /// The session is unusable.
    Unusable(String),
}

/// The spool of a process that served many turns is bounded by what earlier turns left in it: their segments go when
/// they take half of the room. Their journals tell of them; a keeper never prunes the segment it writes.
async fn make_spool_room(context: &Context, dir: PathBuf, keeper: Keeper, segment: u32) {
    let size = tokio::task::spawn_blocking(move || crate::prune::measure(&dir).0).await.unwrap_or(0);
    if size > context.settings.spool_limit_bytes / 2 {
        let pruned = keeper.ask(Request::Prune { keep_from: segment }).await;
        tracing::info!(
            keeper = keeper.pid(),
            size,
            ok = pruned.is_ok(),
            "segments of earlier turns are removed"
        );
    }
}

async fn prepare(context: Arc<Context>, wanted: Wanted, launched: Launched) -> Prepared {
    if let Err(error) = launch::check_owner(&context, &wanted) {
        return Prepared::Failed(error);
    }
    if wanted.force.is_none()
        && let Some(engine) = context.pool.take(&wanted.session.session_id).await
    {
        if engine.launched == launched && !engine.keeper.is_dead() {
            return Prepared::Warm(engine);
        }
        // Another model, effort, mode or prompt: the old process is gone before the new one resumes.
        pool::close(&context, engine).await;
    }
    if let Err(error) = holds::no_process(&context, &wanted.session.session_id).await {
        return Prepared::Failed(error);
    }
    let planning = Arc::clone(&context);
    match tokio::task::spawn_blocking(move || launch::plan(&planning, &wanted)).await {
        Ok(Ok(Plan::Start(planned))) => Prepared::Planned(planned),
        Ok(Ok(Plan::Unusable(reason))) => Prepared::Unusable(reason),
        Ok(Err(error)) => Prepared::Failed(error),
        Err(error) => Prepared::Failed(Error::Internal(format!("plan task: {error}"))),
    }
}

async fn start(
    context: Arc<Context>,
    planned: Planned,
    open: ProcessOpen,
    turn_id: String,
    abandon: CancellationToken,
) -> Prepared {
    let room = async {
        context.pool.make_room(context.settings.max_warm_engines).await;
        context.homes.lock(&planned.home).await
    };
    // Other openings in the home may take long, and a turn that is stopped meanwhile needs no engine.
    let Some(home) = abandon.run_until_cancelled(room).await.filter(|_| !abandon.is_cancelled()) else {
        return Prepared::Failed(Error::WrongState(format!("turn {turn_id} is being stopped")));
    };
    match launch::start(&context, planned, &open, &turn_id).await {
        Ok(engine) => Prepared::Started(engine, home),
        Err(error) => Prepared::Failed(error),
    }
}

/// Removes what a repair names, so that the opening can be tried again.
async fn mended(context: &Arc<Context>, home: &Path, next: Released) -> Released {
    let Released::Repair(mode, patterns, failure) = next else { return next };
    // Idle processes of the home resume later without a loss; those at work are in the way.
    context.pool.close_home(home).await;
    let _home = context.homes.lock(home).await;
    let (shared, place) = (Arc::clone(context), home.to_owned());
    let discarded = tokio::task::spawn_blocking(move || repair::discard(&shared, &place, &patterns)).await;
    let why = match discarded {
        Ok(Ok(_)) => return Released::Again(Some(mode)),
        Ok(Err(error)) => crate::error::chain(&error),
        Err(error) => error.to_string(),
    };
    let failure = Failure {
        retryable: true,
        ..Failure::new(Reason::Process, format!("{}; its home was not mended: {why}", failure.message))
    };
    Released::Refuse(Arc::new(Error::Refused { failure: Box::new(failure), started: true }))
}

impl Turn {
    /// Looks at the worktree as it is before the turn, beside the opening.
    pub(super) fn look_before(&mut self) {
        if self.looked {
            return;
        }
        if !crate::git::may_be_in_worktree(&self.workspace.path) {
            self.looked = true;
            return;
        }
        let (path, results) = (self.workspace.path.clone(), self.results.clone());
        self.context.tasks.spawn(async move {
            let looking = tokio::task::spawn_blocking(move || {
                crate::kill_point!("runner::look_before");
                crate::git::look(&path)
            });
            let worktree = looking.await.ok().flatten();
            let _ = results.send(Internal::Worktree(worktree)).await;
        });
    }

    /// Prepares a process for the current session.
    pub(super) fn prepare(&mut self, force: Option<OpenMode>) {
        let Some(session) = self.state.session.clone() else { return };
        self.stage = Stage::Preparing;
        self.timers.session = None;
        let launched = Launched {
            model: session.model.clone(),
            effort: session.effort.clone(),
            permissions: session.permissions,
            prompt_sha256: session.prompt_sha256.clone(),
        };
        let wanted = Wanted {
            conversation_id: self.conversation_id.clone(),
            workspace: self.workspace.clone(),
            session,
            force,
        };
        let context = Arc::clone(&self.context);
        self.beside(async move { Internal::Prepared(Box::new(prepare(context, wanted, launched).await)) });
    }

    pub(super) async fn on_open(
        &mut self,
        session: SessionOpen,
        answer: oneshot::Sender<OpenAnswer>,
    ) -> Result<(), Error> {
        let same = self.state.session.as_ref().is_some_and(|known| known.session_id == session.session_id);
        let wrong = |text: String| Err(Arc::new(Error::WrongState(text)));
        if self.stopping.is_some() || self.state.stop.is_some() {
            let _ = answer.send(wrong(format!("turn {} is being stopped", self.id)));
            return Ok(());
        }
        match self.stage {
            Stage::NeedSession => {
                if let (true, Some(reason)) = (same, &self.state.unusable) {
                    let _ = answer.send(Ok(self.reply(OpenResult::Unusable(reason.clone()))));
                    return Ok(());
                }
                self.openers.push(answer);
                self.record_synced(Record::Session(Box::new(session))).await?;
                self.prepare(None);
            }
            Stage::Preparing | Stage::Opening | Stage::Releasing if same => self.openers.push(answer),
            Stage::Open | Stage::Ending if same => {
                let reply = self.opened_reply();
                let _ = answer.send(match reply {
                    Some(reply) => Ok(reply),
                    None => wrong(format!("turn {} is ending", self.id)),
                });
            }
            Stage::Preparing | Stage::Opening | Stage::Releasing | Stage::Open | Stage::Ending => {
                let _ = answer.send(wrong(format!("turn {} works with another session", self.id)));
            }
            Stage::Ended => {
                let _ = answer.send(wrong(format!("turn {} has ended", self.id)));
            }
        }
        Ok(())
    }

    fn reply(&self, result: OpenResult) -> OpenReply {
        OpenReply { result, native_id: String::new(), prompt_applied: false, last_number: self.state.last }
    }

    /// What the first caller was told.
    fn opened_reply(&self) -> Option<OpenReply> {
        let mark = self.state.opened.as_ref()?;
        Some(OpenReply {
            native_id: mark.native_id.clone(),
            prompt_applied: mark.prompt_applied,
            ..self.reply(match mark.how {
                OpenedHow::Started => OpenResult::Started,
                OpenedHow::Resumed => OpenResult::Resumed,
                OpenedHow::AlreadyOpen => OpenResult::AlreadyOpen,
            })
        })
    }

    pub(super) fn answer_openers(&mut self, answer: &OpenAnswer) {
        for opener in self.openers.drain(..) {
            let _ = opener.send(answer.clone());
        }
    }

    pub(super) async fn on_prepared(&mut self, prepared: Prepared) -> Result<(), Error> {
        match prepared {
            Prepared::Warm(engine) => self.on_warm(engine).await,
            Prepared::Planned(_) | Prepared::Unusable(_) | Prepared::Failed(_) if self.stopping.is_some() => {
                self.end_without_engine();
                Ok(())
            }
            Prepared::Planned(planned) => self.on_planned(*planned).await,
            Prepared::Started(engine, home) => {
                self.home = Some(home);
                self.engine = Some(engine);
                self.stage = Stage::Opening;
                self.timers.opening = Some(Instant::now() + self.context.settings.engine_start_timeout);
                self.write_opening();
                if self.stopping.is_some() {
                    self.begin_ladder();
                }
                Ok(())
            }
            Prepared::Unusable(reason) => self.unusable(reason).await,
            Prepared::Failed(error) => self.refuse(Arc::new(error)).await,
        }
    }

    /// Tells a fresh process what it must hear first. A repeat writes nothing again.
    pub(super) fn write_opening(&mut self) {
        let lines = self.engine.as_ref().map(|engine| engine.translator.opening()).unwrap_or_default();
        for line in lines {
            self.write(line, Purpose::Control("opening"));
        }
    }

    async fn on_warm(&mut self, mut engine: Box<Engine>) -> Result<(), Error> {
        let open = TranslatorOpen {
            spool_id: engine.spool_id.clone(),
            native: engine.native.clone(),
            opening: None,
            carry: engine.translator.carry(),
            turn_id: Some(self.id.clone()),
        };
        engine.translator = engine.adapter.translator(&open);
        let native_id = engine.native.id.clone();
        let process = ProcessOpen {
            session_id: engine.session_id.clone(),
            spool_id: engine.spool_id.clone(),
            after: engine.last_frame,
            translator: open,
            absent: leftovers::absent(engine.adapter, &self.workspace.path),
        };
        self.forget_process();
        // The opening is answered meanwhile: the message comes later than the mark, and waits for it.
        let begun = engine.keeper.ask(Request::BeginTurn { turn_id: self.id.clone() });
        let spool = engine.spool_id.clone();
        self.beginning = true;
        self.engine = Some(engine);
        self.stage = Stage::Open;
        self.record(Record::Process(Box::new(process)))?;
        self.beside(async move {
            let mut result = begun.await;
            crate::hold_point!("runner::warm");
            if crate::fault_point!("runner::no_begin") {
                result = Err(AskError::Stuck);
            }
            Internal::Begun { spool, result }
        });
        if self.stopping.is_some() {
            // It has nothing of this turn and can stay as it is.
            self.begin_ending();
            return Ok(());
        }
        self.opened(Source::Synthetic, OpenedHow::AlreadyOpen, native_id, false).await
    }

    /// The keeper has marked the turn's begin. One that could not has no process to offer: the session is opened again,
    /// as after the end of a process that had nothing to do for the turn.
    pub(super) fn on_begun(&mut self, spool: &str, result: Result<Response, AskError>) -> Result<(), Error> {
        let Some(engine) = self.engine.as_ref().filter(|engine| self.beginning && engine.spool_id == spool)
        else {
            return Ok(());
        };
        self.beginning = false;
        match result {
            Ok(Response::Turn { frame, segment }) => {
                // Beside the turn: it needs no room at once, and looking at every file takes its time.
                let (context, dir, keeper) =
                    (Arc::clone(&self.context), engine.dir.clone(), engine.keeper.clone());
                self.context
                    .tasks
                    .spawn(async move { make_spool_room(&context, dir, keeper, segment).await });
                self.record(Record::Begun { frame })?;
                self.deliver_waiting();
            }
            other => {
                tracing::warn!(turn = self.id, ?other, "a warm engine cannot take a turn");
                if self.stopping.is_some() {
                    self.begin_ending();
                } else if self.stage == Stage::Open {
                    self.reopen();
                }
            }
        }
        Ok(())
    }

    async fn on_planned(&mut self, planned: Planned) -> Result<(), Error> {
        let open = TranslatorOpen {
            spool_id: planned.spool_id.clone(),
            native: planned.native.clone(),
            opening: Some(planned.mode),
            carry: planned.carry.clone(),
            turn_id: Some(self.id.clone()),
        };
        let process = ProcessOpen {
            session_id: planned.record.session_id.clone(),
            spool_id: planned.spool_id.clone(),
            after: 0,
            translator: open,
            absent: leftovers::absent(planned.adapter, &self.workspace.path),
        };
        self.forget_process();
        // Before the start: whatever dies, the next runner knows which process is the turn's.
        self.record_synced(Record::Process(Box::new(process.clone()))).await?;
        let (context, turn_id, abandon) = (Arc::clone(&self.context), self.id.clone(), self.abandon.clone());
        self.beside(async move {
            crate::kill_point!("runner::starting");
            Internal::Prepared(Box::new(start(context, planned, process, turn_id, abandon).await))
        });
        Ok(())
    }

    /// What was known of an earlier process does not hold for the next one.
    fn forget_process(&mut self) {
        self.intents.clear();
        self.given = false;
        self.later = false;
        self.owed.clear();
        self.timers.input = None;
        self.exit_seen = false;
        self.spawn_failed = None;
        self.turn_end = None;
        self.replay_until = 0;
        self.replaying = false;
        self.beginning = false;
    }

    /// The engine proved its opening.
    pub(super) async fn on_opened(&mut self, source: Source, opened: Opened) -> Result<(), Error> {
        let mode = self.state.process.as_ref().and_then(|process| process.translator.opening);
        let how = if mode == Some(OpenMode::Resume) { OpenedHow::Resumed } else { OpenedHow::Started };
        let prompt_applied = how == OpenedHow::Resumed && self.prompt_changed();
        self.timers.opening = None;
        self.home = None;
        self.stage = Stage::Open;
        if let Some(engine) = &mut self.engine {
            // Some engines name their sessions themselves: from here on this is the one.
            engine.native = opened.native.clone();
        }
        self.remember_opened(&opened);
        if !self.doubt_is_settled()? {
            return Ok(());
        }
        if self.state.opened.is_some() {
            // A process that took the place of one that had ended, or a replay.
            if let Some(reply) = self.opened_reply() {
                self.answer_openers(&Ok(reply));
            }
            self.deliver_waiting();
            return Ok(());
        }
        self.opened(source, how, opened.native.id, prompt_applied).await
    }

    fn prompt_changed(&self) -> bool {
        let Some(session) = &self.state.session else { return false };
        let record = SessionRecord::load(&self.context.state, &session.session_id).ok().flatten();
        // The record holds the hash before this turn in `launched` only until the start wrote it anew; the mark that
        // planning left says it.
        record.is_some_and(|record| record.prompt_changed)
    }

    /// Keeps what is known from here on, also should the turn never end.
    fn remember_opened(&mut self, opened: &Opened) {
        let Some(session) = &self.state.session else { return };
        let (context, session_id, native) =
            (Arc::clone(&self.context), session.session_id.clone(), opened.native.clone());
        self.context.tasks.spawn_blocking(move || {
            let stored = SessionRecord::update(&context, &session_id, |record| {
                crate::kill_point!("runner::remember_opened");
                record.note_opened(native)
            });
            if let Err(error) = stored {
                tracing::warn!(error = crate::error::chain(&error), "a session's record was not written");
            }
        });
    }

    async fn opened(
        &mut self,
        source: Source,
        how: OpenedHow,
        native_id: String,
        prompt_applied: bool,
    ) -> Result<(), Error> {
        let Some(session) = self.state.session.clone() else { return Ok(()) };
        let origin = match how {
            OpenedHow::Started if !session.replaces.is_empty() => Origin::Replaced,
            OpenedHow::Started => Origin::Started,
            OpenedHow::Resumed | OpenedHow::AlreadyOpen => Origin::Resumed,
        };
        self.record(Record::Opened(OpenedMark {
            session_id: session.session_id.clone(),
            how,
            native_id: native_id.clone(),
            prompt_applied,
        }))?;
        let body = to_proto::body(Kind::Session(SessionEvent {
            state: session_event::State::Opened.into(),
            session_id: session.session_id,
            origin: origin.into(),
            native_ref: to_proto::native_ref(&native_id),
            reason: String::new(),
            replaces: session.replaces,
            history_given: !session.context.is_empty(),
            summary_given: false,
        }));
        self.emit(source, body)?;
        if let Some(reply) = self.opened_reply() {
            self.answer_openers(&Ok(reply));
        }
        tracing::info!(turn = self.id, ?how, "session open");
        self.deliver_waiting();
        Ok(())
    }

    /// The engine said that it cannot open the session.
    pub(super) async fn on_open_failed(&mut self, failed: OpenFailure) -> Result<(), Error> {
        if self.stage != Stage::Opening {
            return Ok(());
        }
        self.timers.opening = None;
        if self.stopping.is_some() {
            // The end of the process is what the ladder waits for.
            return Ok(());
        }
        if let Some(failure) = self.spawn_failed.take() {
            // Whatever the reader made of a process that never was.
            self.release_refused(failure, false);
            return Ok(());
        }
        let unusable = failed.failure.reason == Reason::SessionUnusable;
        let mends = !failed.discard.is_empty();
        let next = match failed.retry_as {
            Some(mode) if self.state.starts < STARTS && mends => {
                Released::Repair(mode, failed.discard, Box::new(failed.failure))
            }
            Some(mode) if self.state.starts < STARTS => Released::Again(Some(mode)),
            // What was mended in vain is the home's trouble: it burns no session.
            Some(_) if unusable || !mends => Released::Unusable(failed.failure.message),
            _ if unusable => Released::Unusable(failed.failure.message),
            _ => Released::Refuse(Arc::new(Error::Refused {
                failure: Box::new(failed.failure),
                started: true,
            })),
        };
        self.release(next);
        Ok(())
    }

    /// Ends the process; what comes after it follows as an input.
    pub(super) fn release(&mut self, next: Released) {
        self.stage = Stage::Releasing;
        self.timers.opening = None;
        self.timers.idle = None;
        self.timers.silence = None;
        let (engine, home) = (self.engine.take(), self.home.take());
        let context = Arc::clone(&self.context);
        let absent = self.state.process.as_ref().map(|process| process.absent.clone()).unwrap_or_default();
        let workspace = self.workspace.path.clone();
        self.beside(async move {
            let mut next = next;
            if let Some(mut engine) = engine {
                // A home's lock that is held already covers the end, too.
                let lock = match home {
                    Some(home) => home,
                    None => context.homes.lock(&engine.home).await,
                };
                engine.release(Duration::from_millis(500), pool::TERM).await;
                drop(lock);
                let _ = tokio::task::spawn_blocking(move || leftovers::remove(&workspace, &absent)).await;
                next = mended(&context, &engine.home, next).await;
            }
            Internal::Released(next)
        });
    }

    pub(super) async fn on_released(&mut self, released: Released) -> Result<(), Error> {
        if self.stopping.is_some() {
            self.end_without_engine();
            return Ok(());
        }
        match released {
            Released::Refuse(error) => self.refuse(error).await,
            Released::Again(mode) => {
                self.prepare(mode);
                Ok(())
            }
            Released::Repair(_, _, failure) => {
                // Only without a process, and then there was nothing to mend.
                self.refuse(Arc::new(Error::Refused { failure, started: true })).await
            }
            Released::Unusable(reason) => self.unusable(reason).await,
        }
    }

    pub(super) fn opening_timed_out(&mut self) {
        if self.stage != Stage::Opening || self.stopping.is_some() {
            return;
        }
        let limit = self.context.settings.engine_start_timeout;
        let failure =
            Failure::new(Reason::Process, format!("the engine did not prove its opening within {limit:?}"));
        self.release_refused(failure, true);
    }

    /// Ends the process, and refuses the opening with this failure.
    pub(super) fn release_refused(&mut self, failure: Failure, started: bool) {
        self.release(Released::Refuse(Arc::new(Error::Refused { failure: Box::new(failure), started })));
    }

    /// The opening is refused. A turn that nobody can know of is forgotten; another one fails with the same reason.
    async fn refuse(&mut self, error: Arc<Error>) -> Result<(), Error> {
        tracing::info!(turn = self.id, error = crate::error::chain(error.as_ref()), "opening refused");
        if self.state.doubt.is_some() {
            self.doubt_stays(&error.to_string());
            return Ok(());
        }
        if !self.state.has_events() && self.state.messages.is_empty() {
            self.refused = Some(error);
            self.stage = Stage::Ended;
            return Ok(());
        }
        self.answer_openers(&Err(Arc::clone(&error)));
        let failure = match error.as_ref() {
            Error::Refused { failure, .. } => (**failure).clone(),
            Error::Policy(text) => Failure::new(Reason::Configuration, text),
            Error::Storage { .. } => Failure::new(Reason::Storage, error.to_string()),
            other => Failure::new(Reason::Process, other.to_string()),
        };
        self.must_stop = Some(failure);
        self.end_without_engine();
        Ok(())
    }

    /// The native session cannot be used: the turn waits for another one.
    pub(super) async fn unusable(&mut self, reason: String) -> Result<(), Error> {
        let Some(session) = self.state.session.clone() else { return Ok(()) };
        tracing::warn!(turn = self.id, session = session.session_id, reason, "session unusable");
        if self.state.doubt.is_some() {
            // Another session would be given what this one may have worked on.
            self.doubt_stays(&reason);
            return Ok(());
        }
        // A message that waited for this session is on disk; what becomes of it, the session's event tells.
        for (delivery_id, senders) in self.senders.drain() {
            for sender in senders {
                let _ = sender.send(Ok(delivery_id.clone()));
            }
        }
        let (context, session_id, why) =
            (Arc::clone(&self.context), session.session_id.clone(), reason.clone());
        let stored = tokio::task::spawn_blocking(move || {
            SessionRecord::update(&context, &session_id, |record| {
                let news = record.unusable.is_none();
                record.unusable.get_or_insert(why);
                news
            })
        })
        .await;
        if let Ok(Err(error)) = stored {
            tracing::warn!(error = crate::error::chain(&error), "an unusable session was not recorded");
        }
        self.record(Record::Unusable { session_id: session.session_id.clone(), reason: reason.clone() })?;
        let body = to_proto::body(Kind::Session(SessionEvent {
            state: session_event::State::Unusable.into(),
            session_id: session.session_id,
            reason: reason.clone(),
            ..SessionEvent::default()
        }));
        self.emit_synced(Source::Synthetic, body).await?;
        self.stage = Stage::NeedSession;
        self.timers.session = Some(Instant::now() + self.context.settings.unusable_wait);
        let reply = self.reply(OpenResult::Unusable(reason));
        self.answer_openers(&Ok(reply));
        Ok(())
    }

    pub(super) async fn session_timed_out(&mut self) -> Result<(), Error> {
        if self.stage != Stage::NeedSession {
            return Ok(());
        }
        self.must_stop = Some(match &self.state.unusable {
            Some(reason) => {
                Failure::new(Reason::SessionUnusable, format!("the session cannot be used ({reason})"))
            }
            None => {
                Failure::new(Reason::RunnerLost, "the runner restarted, and the turn was not opened again")
            }
        });
        self.end_without_engine();
        Ok(())
    }

    /// The process ended while it had nothing to do for the turn.
    pub(super) fn reopen(&mut self) {
        self.reopened += 1;
        if self.reopened > REOPENS {
            self.must_stop = Some(Failure::new(Reason::Process, "the engine ends by itself again and again"));
            self.end_without_engine();
            return;
        }
        self.release(Released::Again(None));
    }
}
