//! The turn's task: its state, its inputs, its journal.

use std::{
    collections::{BTreeSet, HashMap, VecDeque},
    future::pending,
    path::PathBuf,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use jiff::Timestamp;
use roundhouse_engines::{Failure, StdinLine, TurnEnd};
use roundhouse_process::{Response, boottime_ns};
use roundhouse_proto::engine::v1::{
    EventBody, NumberedEvent, ProcessFact, event_body::Kind, inspect_response, notice_event,
};
use tokio::{
    sync::{OwnedMutexGuard, mpsc, oneshot},
    time::Instant,
};
use tokio_util::sync::CancellationToken;

use super::{
    COMMANDS, Command, Facts, Handle, OpenAnswer, State,
    ending::Ended,
    opening::{Prepared, Released},
    stopping::Stopping,
};
use crate::{
    context::Context,
    engine::Engine,
    error::{Error, chain},
    git::Worktree,
    grpc::to_proto,
    hub::Hub,
    journal::{Entry, Journal, Record, Source, StopCause},
    keeper::{AskError, Batch, Keeper},
    workspace::Workspace,
};

/// Results of the turn's own tasks that may wait. It has a handful under way.
const RESULTS: usize = 64;

/// Pause before a terminal event that could not be written is tried again.
pub(super) const STORAGE_RETRY: Duration = Duration::from_secs(1);

/// Where a turn stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    /// No session; StartOrResume may bring one.
    NeedSession,
    /// A process is being planned and started.
    Preparing,
    /// A process runs and has not proved its opening.
    Opening,
    /// The session is open.
    Open,
    /// A process is being ended, for what comes after it.
    Releasing,
    /// The outcome is known; evidence is collected.
    Ending,
    /// The terminal event is journalled, or the turn was discarded.
    Ended,
}

/// What a line to the engine was for.
#[derive(Debug)]
pub(super) enum Purpose {
    /// A message.
    Message { delivery_id: String, message_id: String },
    /// Anything that needs no answer of ours.
    Control(&'static str),
}

/// What became of a line to the engine.
#[derive(Debug)]
pub(super) struct Written {
    pub(super) purpose: Purpose,
    /// The process it was for.
    pub(super) spool: String,
    /// The line, but for a message: that one is made again from the journal.
    pub(super) line: Option<StdinLine>,
    pub(super) result: Result<Response, AskError>,
}

/// A line that the keeper does not have yet.
#[derive(Debug)]
pub(super) struct Owed {
    pub(super) what: &'static str,
    pub(super) spool: String,
    pub(super) line: StdinLine,
}

/// Results of the turn's own tasks.
#[derive(Debug)]
pub(super) enum Internal {
    /// A process was prepared, or not.
    Prepared(Box<Prepared>),
    /// The keeper of a warm process has marked the turn's begin, or not.
    Begun {
        /// The process.
        spool: String,
        result: Result<Response, AskError>,
    },
    /// A process is gone.
    Released(Released),
    /// A line was recorded by the keeper, or not.
    Written(Box<Written>),
    /// The worktree before the turn.
    Worktree(Option<Worktree>),
    /// A step of the ladder was answered.
    Step(Result<Response, AskError>),
    /// All that the terminal event needs.
    Ended(Box<Ended>),
    /// Work beside the turn panicked, and what it held is gone.
    Broke,
}

/// Everything that can happen to a turn.
#[derive(Debug)]
enum Input {
    Command(Command),
    Internal(Internal),
    Batch(Batch),
    /// Something is due; whether the engine's frames were read as far as they go.
    Timer {
        caught_up: bool,
    },
    Halt,
}

/// How long an engine that seems silent is listened to once more.
const DOUBT: Duration = Duration::from_secs(1);

/// What the turn waits for by time. Unset: not waited for.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct Timers {
    pub(super) opening: Option<Instant>,
    pub(super) session: Option<Instant>,
    pub(super) idle: Option<Instant>,
    pub(super) silence: Option<Instant>,
    pub(super) deadline: Option<Instant>,
    pub(super) settle: Option<Instant>,
    pub(super) ladder: Option<Instant>,
    pub(super) permission: Option<Instant>,
    pub(super) resend: Option<Instant>,
    /// A message waits for the look at the worktree.
    pub(super) look: Option<Instant>,
    /// The engine did not take a message from its pipe.
    pub(super) input: Option<Instant>,
    /// What the terminal event needs is being collected.
    pub(super) ending: Option<Instant>,
    pub(super) storage: Option<Instant>,
}

impl Timers {
    fn next(&self) -> Option<Instant> {
        [
            self.opening,
            self.session,
            self.idle,
            self.silence,
            self.deadline,
            self.settle,
            self.ladder,
            self.permission,
            self.resend,
            self.look,
            self.input,
            self.ending,
            self.storage,
        ]
        .into_iter()
        .flatten()
        .min()
    }

    /// The next of those that do not wait for what the engine says: it may say something without end.
    fn next_hard(&self) -> Option<Instant> {
        Self { idle: None, silence: None, ..*self }.next()
    }
}

/// Whether a timer has run out; it is unset then.
pub(super) fn due(timer: &mut Option<Instant>, now: Instant) -> bool {
    let due = timer.is_some_and(|at| at <= now);
    if due {
        *timer = None;
    }
    due
}

/// A turn's task.
#[derive(Debug)]
pub(super) struct Turn {
    pub(super) context: Arc<Context>,
    pub(super) id: String,
    pub(super) conversation_id: String,
    pub(super) workspace: Workspace,
    pub(super) journal: Journal,
    pub(super) hub: Arc<Hub>,
    /// Numbered events that no follower has seen: the disk refused to keep the first of them.
    unpublished: Vec<NumberedEvent>,
    facts: Arc<Mutex<Facts>>,
    discarded: Arc<AtomicBool>,
    pub(super) state: State,
    pub(super) stage: Stage,
    commands: mpsc::Receiver<Command>,
    pub(super) results: mpsc::Sender<Internal>,
    results_rx: mpsc::Receiver<Internal>,
    pub(super) engine: Option<Box<Engine>>,
    /// Held from before a process starts until it has proved its opening.
    pub(super) home: Option<OwnedMutexGuard<()>>,
    pub(super) openers: Vec<oneshot::Sender<OpenAnswer>>,
    /// Callers of Send, by delivery.
    pub(super) senders: HashMap<String, Vec<oneshot::Sender<Result<String, Error>>>>,
    pub(super) timers: Timers,
    pub(super) stopping: Option<Stopping>,
    /// The turn is being stopped: an engine that waits to be started is not.
    pub(super) abandon: CancellationToken,
    /// The look at the worktree before the turn is done (it may have found nothing).
    pub(super) looked: bool,
    pub(super) before: Option<Worktree>,
    /// The message did not wait for the look: what the turn changed cannot be told.
    pub(super) before_unknown: bool,
    /// Frames up to this one are replayed: what they say is old.
    pub(super) replay_until: u64,
    pub(super) replaying: bool,
    /// A warm process serves the turn, and its keeper has not marked the turn's begin yet.
    pub(super) beginning: bool,
    /// A message was put on its way to the current process by this runner.
    pub(super) given: bool,
    /// The engine could not be told something at that moment: it is tried again after the next frame.
    pub(super) later: bool,
    /// Lines that are put to the keeper again.
    pub(super) owed: Vec<Owed>,
    /// Operations that the spool of the current process has an intent of.
    pub(super) intents: BTreeSet<String>,
    /// Frames of the batch at hand that were not looked at yet.
    pub(super) unread: VecDeque<roundhouse_process::Frame>,
    /// The engine's end was seen by its keeper.
    pub(super) exit_seen: bool,
    /// Why the keeper of the current process could not start its engine.
    pub(super) spawn_failed: Option<Failure>,
    /// The engine must be stopped for this reason.
    pub(super) must_stop: Option<Failure>,
    /// The idle timer ran out, and what lies unread is waited for once more.
    pub(super) silence_doubted: bool,
    pub(super) turn_end: Option<Box<TurnEnd>>,
    /// Nobody can know what became of the message: the turn ends LOST.
    pub(super) in_doubt: Option<Failure>,
    /// Its engine may be at work, and is not this runner's to ask.
    pub(super) left_behind: bool,
    /// Its workspace stays held after its end.
    pub(super) holds: bool,
    pub(super) ended: Option<Box<Ended>>,
    /// The keeper of the engine that the end has in its hands.
    pub(super) ending_keeper: Option<Keeper>,
    /// The task panicked before the engine's end of the turn was known.
    pub(super) broken: bool,
    /// Panics of this task so far.
    pub(super) panics: u32,
    pub(super) started: Instant,
    /// The opening was refused for this, and the turn is thrown away as if it had never been.
    pub(super) refused: Option<Arc<Error>>,
    /// The process ended while it had nothing to do for the turn; how often it was started again.
    pub(super) reopened: u32,
}

/// What a turn starts from.
#[derive(Debug)]
pub(crate) struct Start {
    /// The turn.
    pub turn_id: String,
    /// The workspace.
    pub workspace: Workspace,
    /// Its journal.
    pub journal: Journal,
    /// What the journal says.
    pub state: State,
}

pub(super) fn build(context: &Arc<Context>, start: Start) -> Option<(Turn, Handle)> {
    let open = start.state.open.clone()?;
    let hub = Hub::new(start.journal.path().to_owned(), start.state.last, start.state.terminal.is_some());
    let (commands_tx, commands) = mpsc::channel(COMMANDS);
    let (results, results_rx) = mpsc::channel(RESULTS);
    let facts = Arc::new(Mutex::new(Facts::default()));
    let discarded = Arc::new(AtomicBool::new(false));
    let mut timers = Timers::default();
    if let Some(millis) = open.deadline_millis {
        // Time passed since the opening counts only on the boot it was measured on.
        let passed = if open.boot_id == context.boot_id {
            Duration::from_nanos(boottime_ns().saturating_sub(open.opened_boottime_ns))
        } else {
            Duration::ZERO
        };
        timers.deadline = Some(Instant::now() + Duration::from_millis(millis).saturating_sub(passed));
    }
    let handle = Handle {
        turn_id: start.turn_id.clone(),
        conversation_id: open.conversation_id.clone(),
        epoch: open.epoch,
        hub: Arc::clone(&hub),
        commands: commands_tx,
        facts: Arc::clone(&facts),
        discarded: Arc::clone(&discarded),
    };
    let before = start.state.worktree.as_deref().and_then(|text| serde_json::from_str(text).ok());
    let turn = Turn {
        context: Arc::clone(context),
        id: start.turn_id,
        conversation_id: open.conversation_id,
        workspace: start.workspace,
        journal: start.journal,
        hub,
        unpublished: Vec::new(),
        facts,
        discarded,
        looked: start.state.worktree.is_some(),
        before,
        before_unknown: false,
        state: start.state,
        stage: Stage::NeedSession,
        commands,
        results,
        results_rx,
        engine: None,
        home: None,
        openers: Vec::new(),
        senders: HashMap::new(),
        timers,
        stopping: None,
        abandon: CancellationToken::new(),
        replay_until: 0,
        replaying: false,
        beginning: false,
        given: false,
        later: false,
        owed: Vec::new(),
        intents: BTreeSet::new(),
        unread: VecDeque::new(),
        exit_seen: false,
        spawn_failed: None,
        must_stop: None,
        silence_doubted: false,
        turn_end: None,
        in_doubt: None,
        left_behind: false,
        holds: false,
        ended: None,
        ending_keeper: None,
        broken: false,
        panics: 0,
        started: Instant::now(),
        refused: None,
        reopened: 0,
    };
    // Who looks before the task has run finds what the journal says.
    turn.update_facts();
    Some((turn, handle))
}

/// Starts a new turn's task. Its journal holds the TURN_OPEN record and the session that is wanted.
///
/// # Errors
/// [`Error::Internal`] when the journal holds no TURN_OPEN record.
pub(crate) fn spawn(
    context: &Arc<Context>,
    start: Start,
    opener: oneshot::Sender<OpenAnswer>,
) -> Result<Handle, Error> {
    let (mut turn, handle) = build(context, start)
        .ok_or_else(|| Error::Internal("a journal without its first record".to_owned()))?;
    // The caller is there before anything can go wrong, so that it is told what did.
    turn.openers.push(opener);
    turn.look_before();
    turn.prepare(None);
    context.tasks.spawn(turn.run());
    Ok(handle)
}

impl Turn {
    pub(super) async fn run(mut self) {
        crate::hold_point!("runner::turn_begins");
        while self.stage != Stage::Ended {
            if !self.step().await {
                // Keepers go on; the next runner takes them up from the same files.
                return;
            }
        }
        let discarded = self.refused.is_some();
        if discarded {
            // Before anybody finds the turn gone: the next of this name, or the tombstone of its cancel, has the same
            // directory.
            let directory = self.context.state.turn(&self.id);
            let removed = tokio::task::spawn_blocking(move || {
                crate::kill_point!("runner::discard");
                std::fs::remove_dir_all(directory)
            })
            .await;
            if !matches!(removed, Ok(Ok(()))) {
                tracing::warn!(turn = self.id, ?removed, "a refused turn's directory stays");
            }
        }
        if !self.holds {
            self.context.slots.free(&self.id);
        }
        self.discarded.store(discarded, Ordering::Release);
        self.commands.close();
        // Last: who was refused may open the next turn at once.
        if let Some(refused) = self.refused.take() {
            self.answer_openers(&Err(refused));
        }
        while let Ok(command) = self.commands.try_recv() {
            self.refuse_late(command, discarded);
        }
    }

    /// Takes the next input. False: the runner stops, and the turn is let go of.
    pub(super) async fn turn_once(&mut self) -> bool {
        let input = self.next().await;
        if matches!(input, Input::Halt) {
            return false;
        }
        if let Err(error) = self.take(input).await {
            self.storage_failed(&error);
        }
        self.update_facts();
        true
    }

    /// The next input. Everything in it is cancel safe.
    async fn next(&mut self) -> Input {
        // Frames may come without a pause, and a ladder has to go on beside them. Of the past all is read first: what
        // the engine said then may make a deadline of now meaningless.
        if !self.replaying
            && !self.context.halt.is_cancelled()
            && self.timers.next_hard().is_some_and(|at| at <= Instant::now())
        {
            return Input::Timer { caught_up: false };
        }
        let timer = self.timers.next();
        // What was printed before the turn's begin is of no turn, and where that is is not known yet.
        let (engine, beginning) = (self.engine.as_mut(), self.beginning);
        tokio::select! {
            biased;
            () = self.context.halt.cancelled() => Input::Halt,
            Some(internal) = self.results_rx.recv() => Input::Internal(internal),
            Some(command) = self.commands.recv() => Input::Command(command),
            batch = async {
                match engine {
                    Some(engine) if !engine.gone && !beginning => engine.frames.recv().await.unwrap_or(Batch::Gone),
                    _ => pending().await,
                }
            } => Input::Batch(batch),
            () = async {
                match timer {
                    Some(at) => tokio::time::sleep_until(at).await,
                    None => pending().await,
                }
            } => Input::Timer { caught_up: true },
        }
    }

    async fn take(&mut self, input: Input) -> Result<(), Error> {
        match input {
            Input::Command(command) => self.on_command(command).await,
            Input::Internal(internal) => match internal {
                Internal::Prepared(prepared) => self.on_prepared(*prepared).await,
                Internal::Begun { spool, result } => self.on_begun(&spool, result),
                Internal::Released(released) => self.on_released(released).await,
                Internal::Written(written) => self.on_written(*written).await,
                Internal::Worktree(worktree) => self.on_worktree(worktree).await,
                Internal::Step(result) => {
                    self.on_step(&result);
                    Ok(())
                }
                Internal::Ended(ended) => self.on_ended(ended).await,
                Internal::Broke => self.on_broke().await,
            },
            Input::Batch(Batch::Frames(frames)) => self.on_frames(frames).await,
            Input::Batch(Batch::Gone) => self.on_gone().await,
            Input::Timer { caught_up } => self.on_timer(caught_up).await,
            Input::Halt => Ok(()),
        }
    }

    async fn on_command(&mut self, command: Command) -> Result<(), Error> {
        match command {
            Command::Open(session, answer) => self.on_open(*session, answer).await,
            Command::Send(send, answer) => self.on_send(*send, answer).await,
            Command::Stop(cause, grace, answer) => {
                let result = self.on_stop(cause, grace).await;
                // Without an answer the caller learns that the wish is not durable.
                if result.is_ok() {
                    let _ = answer.send(());
                }
                result
            }
            Command::Answer(request, answer) => {
                let result = self.on_answer(&request).await;
                let storage = match &result {
                    Ok(_) | Err(Error::PermissionNotFound(_)) => Ok(()),
                    // Half of the decision may be durable: nobody can answer again, so the turn must not wait on.
                    Err(error) => {
                        Err(Error::Internal(format!("a permission answer was not kept: {}", chain(error))))
                    }
                };
                let _ = answer.send(result);
                storage
            }
            Command::Skip(to, answer) => {
                if to > self.state.last {
                    self.record(Record::Skip { to })?;
                    self.emit(Source::Synthetic, super::events_lost())?;
                }
                let _ = answer.send(());
                Ok(())
            }
        }
    }

    /// Answers a command that came as the turn ended.
    fn refuse_late(&self, command: Command, discarded: bool) {
        let late = || Error::WrongState(format!("turn {} has ended", self.id));
        match command {
            // Dropped: the turn is as if it had never been, and the caller may open it.
            Command::Open(..) if discarded => {}
            Command::Open(_, answer) => {
                let _ = answer.send(Err(Arc::new(late())));
            }
            Command::Send(send, answer) => {
                let _ = answer.send(self.state.sent_before(&send).unwrap_or_else(|| Err(late())));
            }
            Command::Answer(asked, answer) => {
                let _ = answer.send(self.state.answered_before(&asked.request_id));
            }
            // Dropped: the caller sees that the turn has ended.
            Command::Stop(..) | Command::Skip(..) => {}
        }
    }

    async fn on_timer(&mut self, caught_up: bool) -> Result<(), Error> {
        let now = Instant::now();
        if due(&mut self.timers.storage, now) {
            self.write_end().await?;
        }
        if due(&mut self.timers.ending, now) {
            self.end_short().await?;
        }
        if due(&mut self.timers.ladder, now) {
            self.next_step();
        }
        if due(&mut self.timers.opening, now) {
            self.opening_timed_out();
        }
        if due(&mut self.timers.session, now) {
            self.session_timed_out().await?;
        }
        if due(&mut self.timers.settle, now) {
            self.settle().await?;
        }
        if due(&mut self.timers.permission, now) {
            self.permissions_timed_out().await?;
        }
        if due(&mut self.timers.resend, now) {
            self.resend();
        }
        if due(&mut self.timers.look, now) {
            self.look_given_up()?;
        }
        if due(&mut self.timers.input, now) {
            self.input_failed();
        }
        // Frames that wait to be read are no silence.
        if caught_up && due(&mut self.timers.silence, now) {
            self.silent()?;
        }
        let late = self.timers.idle.map(|at| now.saturating_duration_since(at));
        if caught_up && due(&mut self.timers.idle, now) {
            // Silence counts only while somebody listens. A runner that was stopped, or its host, finds the timer run
            // out before it has read what the engine said meanwhile.
            if self.silence_doubted && late.is_some_and(|late| late < DOUBT) {
                self.on_stop(StopCause::Idle, None).await?;
            } else {
                self.silence_doubted = true;
                self.timers.idle = Some(now + DOUBT);
            }
        }
        if due(&mut self.timers.deadline, now) {
            self.on_stop(StopCause::Deadline, None).await?;
        }
        Ok(())
    }

    /// Journals a record.
    pub(super) fn record(&mut self, record: Record) -> Result<(), Error> {
        self.journal.append(&record)?;
        self.state.apply(&record);
        Ok(())
    }

    /// Journals a record and puts all so far on disk.
    pub(super) async fn record_synced(&mut self, record: Record) -> Result<(), Error> {
        self.record(record)?;
        self.journal.sync().await
    }

    /// Numbers and journals an event, unless the journal has it; the caller publishes it.
    fn number(&mut self, source: Source, body: EventBody) -> Result<Option<NumberedEvent>, Error> {
        let known = if self.replaying { self.state.had(&source, &body) } else { self.state.has(&source) };
        if known {
            return Ok(None);
        }
        if self.journal.is_short() && !matches!(body.kind, Some(Kind::Terminal(_))) {
            // What is left of the room is the end's, which says that the rest could not be kept. The spool may have it.
            return Ok(None);
        }
        if crate::fault_point!("runner::no_room") {
            return Err(Error::Internal("as a test wants it".to_owned()));
        }
        let at_millis = Timestamp::now().as_millisecond();
        let number = self.state.last + 1;
        let event =
            NumberedEvent { number, at: Some(to_proto::timestamp(at_millis)), body: Some(body.clone()) };
        self.record(Record::Entry(Box::new(Entry { number, at_millis, source, body })))?;
        crate::kill_point!("runner::journalled");
        Ok(Some(event))
    }

    /// Numbers, journals and publishes an event, unless the journal has it.
    pub(super) fn emit(&mut self, source: Source, body: EventBody) -> Result<(), Error> {
        if let Some(event) = self.number(source, body)? {
            self.unpublished.push(event);
            // Behind one that waits for the disk all wait, or followers would see a gap.
            if self.unpublished.len() == 1 {
                self.publish();
            }
        }
        Ok(())
    }

    fn publish(&mut self) {
        for event in self.unpublished.drain(..) {
            self.hub.event(&event);
        }
    }

    /// Publishes events again, in the place of those that wait.
    pub(super) fn republish(&mut self, events: Vec<NumberedEvent>) {
        self.unpublished = events;
        self.publish();
    }

    /// As [`Turn::emit`], with everything on disk before it is published.
    pub(super) async fn emit_synced(&mut self, source: Source, body: EventBody) -> Result<(), Error> {
        if matches!(body.kind, Some(Kind::Terminal(_))) {
            crate::kill_point!("runner::before_terminal");
        }
        let fault = matches!(body.kind, Some(Kind::PermissionAnswer(_)))
            && crate::fault_point!("runner::answer_sync");
        if let Some(event) = self.number(source, body)? {
            self.unpublished.push(event);
            if fault {
                return Err(Error::Internal("as a test wants it".to_owned()));
            }
            self.publish_synced().await?;
        }
        Ok(())
    }

    /// Publishes all that is numbered, once it is on disk.
    pub(super) async fn publish_synced(&mut self) -> Result<(), Error> {
        self.journal.sync().await?;
        crate::kill_point!("runner::synced");
        // Who sees the event finds the facts in step with it.
        self.update_facts();
        self.publish();
        Ok(())
    }

    /// A warning for whoever follows the turn.
    pub(super) fn warn(&mut self, message: impl Into<String>) -> Result<(), Error> {
        self.emit(Source::Synthetic, to_proto::notice(notice_event::Kind::Warning, message))
    }

    /// Puts a line on its way to the engine; the result comes back as an input.
    pub(super) fn write(&mut self, line: StdinLine, purpose: Purpose) {
        let Some(engine) = &self.engine else { return };
        let spool = engine.spool_id.clone();
        let again = matches!(purpose, Purpose::Control(_)).then(|| line.clone());
        let written = engine.deliver(line);
        let results = self.results.clone();
        self.context.tasks.spawn(async move {
            let written = Written { purpose, spool, line: again, result: written.await };
            let _ = results.send(Internal::Written(Box::new(written))).await;
        });
    }

    /// What must be kept cannot be written: the engine is stopped, and the end is tried again until it can be told.
    fn storage_failed(&mut self, error: &Error) {
        tracing::error!(turn = self.id, error = chain(error), "a turn cannot go on");
        self.journal.use_reserve();
        if self.stage == Stage::Ending || self.stage == Stage::Ended {
            self.timers.storage = Some(Instant::now() + STORAGE_RETRY);
            return;
        }
        self.force_stop(StopCause::Storage);
    }

    pub(super) fn update_facts(&self) {
        let mut facts = self.facts.lock().unwrap_or_else(PoisonError::into_inner);
        facts.state = if self.state.terminal.is_some() {
            inspect_response::State::Ended
        } else if !self.state.accepted.is_empty() {
            inspect_response::State::Running
        } else if !self.state.messages.is_empty() {
            inspect_response::State::Sent
        } else {
            inspect_response::State::Opened
        };
        if let Some(session) = &self.state.session {
            facts.session_id.clone_from(&session.session_id);
        }
        facts.terminal.clone_from(&self.state.terminal);
        facts.process = self.engine.as_ref().filter(|engine| !engine.gone).map(|engine| ProcessFact {
            keeper_pid: engine.keeper.pid(),
            engine_pid: engine.engine_pid,
            alive: !engine.keeper.is_dead(),
            spool_id: engine.spool_id.clone(),
            isolation: to_proto::isolation(self.context.isolation.level).into(),
        });
    }

    /// The current spool, for failures.
    pub(super) fn spool_id(&self) -> String {
        self.state.process.as_ref().map(|process| process.spool_id.clone()).unwrap_or_default()
    }

    /// The directory of a session's spool.
    pub(super) fn spool_dir(&self, session_id: &str, spool_id: &str) -> PathBuf {
        self.context.state.spool(session_id, spool_id)
    }
}
