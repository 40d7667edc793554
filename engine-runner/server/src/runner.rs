//! The runner as its callers see it: which turns there are, who may open one, and what each call means.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError, atomic::Ordering},
    time::Duration,
};

use roundhouse_process::boottime_ns;
use roundhouse_proto::engine::v1::{InspectResponse, TerminalEvent, inspect_response};
use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;

use crate::{
    context::Context,
    error::{Error, chain},
    ids::delivery_id,
    journal::{Entry, Journal, Record, SessionOpen, Source, StopCause, TurnOpen},
    launch,
    request::{Answer, Open, Send},
    session_record::SessionRecord,
    state_dir::{make_dir, read_json, write_json},
    turn::{self, Command, Handle, OpenAnswer, OpenReply, Start, State},
    workspace::sha256,
};

/// What is left of a turn after Acknowledge, or of one that was cancelled before it was known.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Tombstone {
    /// The turn.
    pub turn_id: String,
    /// Its conversation. Empty: never known.
    pub conversation_id: String,
    /// Its epoch.
    pub epoch: u64,
    /// Its session. Empty: none.
    pub session_id: String,
    /// The delivery ids that were used.
    pub delivery_ids: Vec<String>,
    /// SHA-256 of each delivery's text, lower-case hex, by delivery id. Tombstones of earlier versions have none.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub texts: BTreeMap<String, String>,
    /// How it ended, as the contract's number. 0: it was cancelled before it was opened.
    pub outcome: i32,
    /// The journal's last number.
    pub last_number: u64,
    /// When it was made, seconds since 1970, for retention.
    pub made_unix_seconds: i64,
}

/// What a cancel met.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cancelled {
    /// The turn is being stopped.
    Stopping,
    /// It had ended.
    AlreadyEnded,
    /// It is not known here, and remembered as cancelled.
    Unknown,
}

/// Tries of an opening whose turn is thrown away each time by another caller's refusal.
const ATTEMPTS: u32 = 3;

/// An opening that was admitted.
enum Admitted {
    /// It made the turn; the answer comes here.
    New(oneshot::Receiver<OpenAnswer>),
    /// The turn is known.
    Known(Handle),
}

/// A runner.
#[derive(Debug)]
pub struct Runner {
    /// What its parts share.
    pub context: Arc<Context>,
    turns: Mutex<HashMap<String, Handle>>,
    /// Turns of an earlier runner whose journals cannot be read, each with the sessions whose living engines may be in the
    /// middle of it.
    unread: Mutex<HashMap<String, HashSet<String>>>,
    /// One opening is admitted at a time: looks and writes of an admission are one step.
    admission: tokio::sync::Mutex<()>,
}

impl Runner {
    /// A runner without turns.
    #[must_use]
    pub fn new(context: Arc<Context>) -> Arc<Self> {
        Arc::new(Self {
            context,
            turns: Mutex::default(),
            unread: Mutex::default(),
            admission: tokio::sync::Mutex::new(()),
        })
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Handle>> {
        self.turns.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A turn that is known here and was not thrown away.
    ///
    /// # Errors
    /// [`Error::Draining`] for a turn that this runner has let go of because it stops: its keeper goes on, so it is
    /// neither unknown nor ended, and the next runner has the answer. [`Error::Storage`] for one that cannot be read.
    /// [`Error::Internal`] for one whose task broke and could not even end it.
    fn find(&self, turn_id: &str) -> Result<Option<Handle>, Error> {
        let mut turns = self.lock();
        let Some(handle) = turns.get(turn_id) else {
            return if self.unread().contains_key(turn_id) { Err(unread(turn_id)) } else { Ok(None) };
        };
        if handle.is_closed() && !handle.hub.ended() {
            if self.lets_go() {
                return Err(Error::Draining);
            }
            if !handle.is_discarded() {
                // Neither unknown nor ended: nobody may take it for a turn that never was.
                return Err(Error::Internal(format!(
                    "the task of turn {turn_id} is gone; its journal is taken up when the runner starts again"
                )));
            }
            turns.remove(turn_id);
            return Ok(None);
        }
        Ok(Some(handle.clone()))
    }

    fn need(&self, turn_id: &str) -> Result<Handle, Error> {
        self.find(turn_id)?.ok_or_else(|| Error::TurnNotFound(turn_id.to_owned()))
    }

    /// Whether turns are let go of, so that a task that is gone says nothing about its turn.
    fn lets_go(&self) -> bool {
        self.context.halt.is_cancelled()
    }

    /// Why a turn's task gave no answer: it has ended, or this runner stops.
    fn no_answer(&self, turn_id: &str) -> Error {
        if self.lets_go() { Error::Draining } else { Error::WrongState(format!("turn {turn_id} has ended")) }
    }

    /// Adds a turn that was found at the start.
    pub fn insert(&self, handle: Handle) {
        self.lock().insert(handle.turn_id.clone(), handle);
    }

    fn unread(&self) -> MutexGuard<'_, HashMap<String, HashSet<String>>> {
        self.unread.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that a turn of an earlier runner cannot be read: nothing is said about it but that.
    pub(crate) fn set_unread(&self, turn_id: &str) {
        self.unread().entry(turn_id.to_owned()).or_default();
    }

    /// Notes that a living engine of a session may be in the middle of a turn that cannot be read. False: the turn is
    /// none of those.
    pub(crate) fn hold_back(&self, turn_id: &str, session_id: &str) -> bool {
        match self.unread().get_mut(turn_id) {
            Some(sessions) => {
                sessions.insert(session_id.to_owned());
                true
            }
            None => false,
        }
    }

    /// The turns that cannot be read.
    pub(crate) fn unread_turns(&self) -> Vec<String> {
        self.unread().keys().cloned().collect()
    }

    /// A turn was read at last. Answers the sessions that were held back for it.
    pub(crate) fn set_read(&self, turn_id: &str) -> HashSet<String> {
        self.unread().remove(turn_id).unwrap_or_default()
    }

    /// All turns that are held: running, and ended without Acknowledge.
    #[must_use]
    pub fn turns(&self) -> Vec<Handle> {
        let mut turns = self.lock();
        turns.retain(|_, handle| !handle.is_closed() || handle.hub.ended() || !handle.is_discarded());
        turns.values().cloned().collect()
    }

    /// Turns that run.
    #[must_use]
    pub fn running(&self) -> Vec<Handle> {
        self.turns().into_iter().filter(|handle| !handle.hub.ended()).collect()
    }

    fn tombstone(&self, turn_id: &str) -> Result<Option<Tombstone>, Error> {
        read_json(&self.context.state.tombstone(turn_id)).map_err(|error| Error::Storage {
            action: "read a tombstone",
            source: std::io::Error::other(chain(&error)),
        })
    }

    /// Adds to a stale epoch what the caller needs to catch up.
    fn explain(&self, error: Error) -> Error {
        match error {
            Error::StaleEpoch { conversation, given, highest, .. } => {
                let unacknowledged = self
                    .turns()
                    .iter()
                    .map(|handle| format!("{}:{}", handle.turn_id, handle.epoch))
                    .collect();
                Error::StaleEpoch { conversation, given, highest, unacknowledged }
            }
            other => other,
        }
    }

    fn check_epoch(&self, handle: &Handle, epoch: u64) -> Result<(), Error> {
        self.context.epochs.check(&handle.conversation_id, epoch).map_err(|error| self.explain(error))
    }

    /// StartOrResume. Cancel safe: an opening that was admitted goes on.
    ///
    /// # Errors
    /// What the contract names; the error may be shared with other callers of the same opening.
    pub async fn open(&self, request: Open) -> Result<OpenReply, Arc<Error>> {
        let session = SessionOpen {
            session_id: request.session_id.clone(),
            engine: request.engine.clone(),
            model: request.model.clone(),
            effort: request.effort.map(|effort| effort.name().to_owned()),
            agent: request.agent.clone(),
            prompt: request.prompt.clone(),
            prompt_sha256: request.prompt_sha256.clone(),
            context: request.context.clone(),
            native_id: request.native_id.clone(),
            permissions: request.permissions,
            replaces: request.replaces.clone(),
        };
        for _ in 0..ATTEMPTS {
            match self.admit(&request, &session).await.map_err(Arc::new)? {
                Admitted::New(answer) => {
                    if let Ok(answer) = answer.await {
                        return answer;
                    }
                    break;
                }
                Admitted::Known(handle) => {
                    if request.held > handle.hub.last() {
                        // Before the answer: what comes next must have a number that the caller does not hold.
                        let _ = handle.ask(|answer| Command::Skip(request.held, answer)).await;
                    }
                    let session = Box::new(session.clone());
                    if let Some(answer) = handle.ask(|answer| Command::Open(session, answer)).await {
                        return answer;
                    }
                    if handle.hub.ended() {
                        break;
                    }
                    // It was refused and thrown away meanwhile: this caller's turn to try.
                }
            }
        }
        Err(Arc::new(self.no_answer(&request.turn_id)))
    }

    /// Finds the turn of an opening, or makes it. Older turns of the conversation are gone then.
    async fn admit(&self, request: &Open, session: &SessionOpen) -> Result<Admitted, Error> {
        loop {
            let one = self.admission.lock().await;
            if let Some(admitted) = self.admit_now(request, session)? {
                return Ok(admitted);
            }
            // The end of an older turn takes its time, and other openings and cancels are not to wait for it.
            drop(one);
            self.supersede(&request.conversation_id, request.epoch).await;
        }
    }

    /// One look, under the admission's lock. None: older turns have to end first.
    fn admit_now(&self, request: &Open, session: &SessionOpen) -> Result<Option<Admitted>, Error> {
        let context = &self.context;
        if let Some(handle) = self.find(&request.turn_id)? {
            if handle.conversation_id != request.conversation_id {
                return Err(Error::invalid("turn_id", "belongs to another conversation"));
            }
            self.check_epoch(&handle, request.epoch)?;
            if handle.epoch != request.epoch {
                return Err(Error::invalid("epoch", "is not the epoch that the turn was opened with"));
            }
            if handle.hub.ended() {
                return Err(Error::WrongState(format!("turn {} has ended", request.turn_id)));
            }
            return Ok(Some(Admitted::Known(handle)));
        }
        if let Some(tombstone) = self.tombstone(&request.turn_id)? {
            let how = if tombstone.outcome == 0 { "was cancelled before it was opened" } else { "has ended" };
            return Err(Error::WrongState(format!("turn {} {how}", request.turn_id)));
        }
        if context.is_draining() {
            return Err(Error::Draining);
        }
        let workspace = context.roots.resolve(&request.workspace)?;
        launch::check(context, session)?;
        let held_back = self
            .unread()
            .iter()
            .find_map(|(turn_id, sessions)| sessions.contains(&request.session_id).then(|| turn_id.clone()));
        if let Some(turn_id) = held_back {
            return Err(unread(&turn_id));
        }
        context.epochs.admit(&request.conversation_id, request.epoch).map_err(|error| self.explain(error))?;
        let running = self.running();
        if let Some(other) = running.iter().find(|handle| handle.conversation_id == request.conversation_id) {
            if other.epoch < request.epoch {
                return Ok(None);
            }
            return Err(Error::TurnInProgress { turn_id: other.turn_id.clone() });
        }
        if let Some(other) = running.iter().find(|handle| handle.facts().session_id == request.session_id) {
            return Err(Error::TurnInProgress { turn_id: other.turn_id.clone() });
        }
        context.slots.take(&request.turn_id, &workspace.path)?;
        let made = self.make(request, session, workspace);
        if made.is_err() {
            context.slots.free(&request.turn_id);
        }
        made.map(Some)
    }

    fn make(
        &self,
        request: &Open,
        session: &SessionOpen,
        workspace: crate::workspace::Workspace,
    ) -> Result<Admitted, Error> {
        let context = &self.context;
        let millis = |duration: Duration| u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
        let open = TurnOpen {
            turn_id: request.turn_id.clone(),
            conversation_id: request.conversation_id.clone(),
            epoch: request.epoch,
            workspace: workspace.path.clone(),
            boot_id: context.boot_id.clone(),
            opened_boottime_ns: boottime_ns(),
            deadline_millis: request.deadline.or_else(|| context.settings.turn_deadline()).map(millis),
            idle_millis: millis(request.idle_timeout.unwrap_or(context.settings.idle_timeout)),
            program: env!("CARGO_PKG_VERSION").to_owned(),
        };
        let mut records = vec![Record::Open(Box::new(open)), Record::Session(Box::new(session.clone()))];
        if request.held > 0 {
            // The caller knows the turn, and this runner has lost what it knew: nothing that was given to an engine, for
            // that is on disk before it is given.
            records.push(Record::Skip { to: request.held });
            records.push(Record::Entry(Box::new(Entry {
                number: request.held + 1,
                at_millis: jiff::Timestamp::now().as_millisecond(),
                source: Source::Synthetic,
                body: turn::events_lost(),
            })));
        }
        let path = context.state.journal(&request.turn_id);
        let journal = Journal::create(&path, &records, context.spares.take())?;
        crate::kill_point!("runner::turn_opened");
        let state = State::fold(&records);
        let (opener, answer) = oneshot::channel();
        let start = Start { turn_id: request.turn_id.clone(), workspace, journal, state };
        self.insert(turn::spawn(context, start, opener)?);
        tracing::info!(
            turn = request.turn_id,
            conversation = request.conversation_id,
            session = request.session_id,
            epoch = request.epoch,
            "turn opened"
        );
        Ok(Admitted::New(answer))
    }

    /// Ends older turns of a conversation whose epoch moved on, and waits until they are gone.
    async fn supersede(&self, conversation_id: &str, epoch: u64) {
        for handle in self.running() {
            if handle.conversation_id == conversation_id && handle.epoch < epoch {
                tracing::warn!(turn = handle.turn_id, epoch, "a higher epoch ends an older turn");
                handle.ask(|answer| Command::Stop(StopCause::Superseded, None, answer)).await;
                self.until_gone(&handle).await;
            }
        }
    }

    /// Waits until a turn has ended or was thrown away.
    pub async fn until_gone(&self, handle: &Handle) {
        loop {
            tokio::select! {
                () = handle.hub.until_ended() => return,
                () = tokio::time::sleep(Duration::from_millis(100)) => {
                    if handle.is_closed() {
                        return;
                    }
                }
            }
        }
    }

    /// Send. Answers the delivery id. Cancel safe: a message that was accepted is delivered.
    ///
    /// # Errors
    /// What the contract names.
    pub async fn send(&self, request: Send) -> Result<String, Error> {
        let Some(handle) = self.find(&request.turn_id)? else {
            return match self.tombstone(&request.turn_id)? {
                Some(tombstone) => sent_before_tombstone(&tombstone, &request),
                None => Err(Error::TurnNotFound(request.turn_id)),
            };
        };
        self.check_epoch(&handle, request.epoch)?;
        if !handle.hub.ended() {
            let asked = Box::new(request.clone());
            if let Some(answer) = handle.ask(|answer| Command::Send(asked, answer)).await {
                return answer;
            }
            if !handle.hub.ended() {
                return Err(self.no_answer(&request.turn_id));
            }
            // It ended before it came to the question: a repeat is answered as any later one.
        }
        self.sent_before(&request)
    }

    /// The answer to a Send of a turn that has ended: only a repeat has one.
    fn sent_before(&self, request: &Send) -> Result<String, Error> {
        let journal = self.context.state.journal(&request.turn_id);
        match Journal::read(&journal) {
            Ok(records) => State::fold(&records)
                .sent_before(request)
                .unwrap_or_else(|| Err(Error::WrongState(format!("turn {} has ended", request.turn_id)))),
            Err(error) => match self.tombstone(&request.turn_id)? {
                // It was acknowledged meanwhile.
                Some(tombstone) if !journal.exists() => sent_before_tombstone(&tombstone, request),
                _ => Err(error),
            },
        }
    }

    /// Cancel.
    ///
    /// # Errors
    /// [`Error::StaleEpoch`], [`Error::Storage`], [`Error::Draining`].
    pub async fn cancel(
        &self,
        turn_id: &str,
        epoch: u64,
        grace: Option<Duration>,
    ) -> Result<Cancelled, Error> {
        let handle = match self.find(turn_id)? {
            Some(handle) => handle,
            None => {
                // An opening of this turn that is being admitted comes first, or finds the tombstone.
                let _one = self.admission.lock().await;
                match self.find(turn_id)? {
                    Some(handle) => handle,
                    None => return self.cancel_unknown(turn_id, epoch),
                }
            }
        };
        self.check_epoch(&handle, epoch)?;
        if handle.hub.ended() {
            return Ok(Cancelled::AlreadyEnded);
        }
        match handle.ask(|answer| Command::Stop(StopCause::Cancel, grace, answer)).await {
            Some(()) => Ok(Cancelled::Stopping),
            None if handle.hub.ended() => Ok(Cancelled::AlreadyEnded),
            None if self.lets_go() => Err(Error::Draining),
            // It was thrown away: its opening was refused meanwhile.
            None if handle.is_closed() => {
                self.remember_cancelled(turn_id, epoch)?;
                Ok(Cancelled::Unknown)
            }
            None => Err(Error::Storage {
                action: "store the cancel",
                source: std::io::Error::other("the journal cannot be written"),
            }),
        }
    }

    fn cancel_unknown(&self, turn_id: &str, epoch: u64) -> Result<Cancelled, Error> {
        match self.tombstone(turn_id)? {
            Some(tombstone) if tombstone.outcome != 0 => Ok(Cancelled::AlreadyEnded),
            Some(_) => Ok(Cancelled::Unknown),
            None => {
                self.remember_cancelled(turn_id, epoch)?;
                Ok(Cancelled::Unknown)
            }
        }
    }

    fn remember_cancelled(&self, turn_id: &str, epoch: u64) -> Result<(), Error> {
        let tombstone = Tombstone {
            turn_id: turn_id.to_owned(),
            conversation_id: String::new(),
            epoch,
            session_id: String::new(),
            delivery_ids: Vec::new(),
            texts: BTreeMap::new(),
            outcome: 0,
            last_number: 0,
            made_unix_seconds: jiff::Timestamp::now().as_second(),
        };
        self.write_tombstone(&tombstone)
    }

    fn write_tombstone(&self, tombstone: &Tombstone) -> Result<(), Error> {
        let directory = self.context.state.turn(&tombstone.turn_id);
        make_dir(&directory).map_err(Error::storage("create the turn's directory"))?;
        write_json(&self.context.state.tombstone(&tombstone.turn_id), tombstone)
            .map_err(Error::storage("write a tombstone"))
    }

    /// AnswerPermission. Answers whether this answer decides, and what holds.
    ///
    /// # Errors
    /// What the contract names.
    pub async fn answer(&self, request: Answer) -> Result<(bool, bool), Error> {
        let handle = self
            .find(&request.turn_id)?
            .ok_or_else(|| Error::PermissionNotFound(request.request_id.clone()))?;
        self.check_epoch(&handle, request.epoch)?;
        let (turn_id, request_id) = (request.turn_id.clone(), request.request_id.clone());
        if !handle.hub.ended() {
            if let Some(answer) = handle.ask(|answer| Command::Answer(Box::new(request), answer)).await {
                return answer;
            }
            if !handle.hub.ended() {
                return Err(if self.lets_go() {
                    Error::Draining
                } else {
                    Error::PermissionNotFound(request_id)
                });
            }
            // It ended before it came to the question, which is answered as any later one.
        }
        State::fold(&Journal::read(&self.context.state.journal(&turn_id))?).answered_before(&request_id)
    }

    /// A turn's events for StreamEvents, after the rules about numbers that the journal does not have.
    ///
    /// # Errors
    /// [`Error::TurnNotFound`], [`Error::StaleEpoch`], [`Error::Invalid`], [`Error::Draining`].
    pub async fn events(
        &self,
        turn_id: &str,
        epoch: Option<u64>,
        after: u64,
    ) -> Result<Arc<crate::hub::Hub>, Error> {
        let handle = self.need(turn_id)?;
        if let Some(epoch) = epoch {
            self.check_epoch(&handle, epoch)?;
        }
        let last = handle.hub.last();
        if after > last {
            if epoch.is_none() {
                return Err(Error::invalid("after", format!("the turn's last number is {last}")));
            }
            let lost = self.lost_writes(turn_id)?;
            if lost && !handle.hub.ended() {
                let _ = handle.ask(|answer| Command::Skip(after, answer)).await;
            }
            if handle.hub.ended() && after > handle.hub.last() {
                if lost {
                    return self.end_again(turn_id, after).await;
                }
                return Err(Error::invalid("after", format!("the turn ended with number {last}")));
            }
        }
        Ok(handle.hub)
    }

    /// Tells the end of a turn once more, after the last number that somebody holds: writes were lost, and its own number
    /// belongs to something else there.
    async fn end_again(&self, turn_id: &str, after: u64) -> Result<Arc<crate::hub::Hub>, Error> {
        let _one = self.admission.lock().await;
        let handle = self.need(turn_id)?;
        if handle.hub.last() >= after {
            return Ok(handle.hub);
        }
        let path = self.context.state.journal(turn_id);
        let ended = turn::end_again(turn_id, &path, after).await?;
        let hub = Arc::clone(&ended.hub);
        self.insert(ended);
        Ok(hub)
    }

    /// Whether the host was started anew since the turn was opened: then writes may be lost.
    fn lost_writes(&self, turn_id: &str) -> Result<bool, Error> {
        let mut reader =
            roundhouse_process::record::RecordReader::open(&self.context.state.journal(turn_id))?;
        let first = reader.next_record()?.and_then(|record| Record::decode(&record.payload));
        Ok(match first {
            Some(Record::Open(open)) => open.boot_id != self.context.boot_id,
            _ => true,
        })
    }

    /// Inspect of a turn.
    ///
    /// # Errors
    /// [`Error::Storage`]; [`Error::Draining`] when it was let go of.
    pub fn inspect_turn(&self, turn_id: &str) -> Result<InspectResponse, Error> {
        if let Some(handle) = self.find(turn_id)? {
            let facts = handle.facts();
            return Ok(InspectResponse {
                state: facts.state.into(),
                turn_id: turn_id.to_owned(),
                session_id: facts.session_id,
                last_number: handle.hub.last(),
                terminal: facts.terminal,
                process: facts.process,
                acknowledged: false,
                epoch: handle.epoch,
            });
        }
        Ok(match self.tombstone(turn_id)? {
            Some(tombstone) if tombstone.outcome != 0 => InspectResponse {
                state: inspect_response::State::Ended.into(),
                turn_id: turn_id.to_owned(),
                session_id: tombstone.session_id,
                last_number: tombstone.last_number,
                terminal: Some(TerminalEvent { outcome: tombstone.outcome, ..TerminalEvent::default() }),
                process: None,
                acknowledged: true,
                epoch: tombstone.epoch,
            },
            _ => InspectResponse {
                state: inspect_response::State::Unknown.into(),
                turn_id: turn_id.to_owned(),
                ..InspectResponse::default()
            },
        })
    }

    /// Inspect of a session: its current turn, and its process.
    ///
    /// # Errors
    /// [`Error::Storage`].
    pub fn inspect_session(&self, session_id: &str) -> Result<InspectResponse, Error> {
        let current = self.running().into_iter().find(|handle| handle.facts().session_id == session_id);
        if let Some(handle) = current {
            return self.inspect_turn(&handle.turn_id);
        }
        let process =
            self.context.pool.fact(session_id).map(|idle| roundhouse_proto::engine::v1::ProcessFact {
                keeper_pid: idle.keeper_pid,
                engine_pid: idle.engine_pid,
                alive: true,
                spool_id: idle.spool_id,
                isolation: crate::grpc::to_proto::isolation(self.context.isolation.level).into(),
            });
        Ok(InspectResponse {
            state: inspect_response::State::Unknown.into(),
            session_id: session_id.to_owned(),
            process,
            ..InspectResponse::default()
        })
    }

    /// Acknowledge: the journal goes, a tombstone stays. Blocking.
    ///
    /// # Errors
    /// What the contract names.
    pub fn acknowledge(&self, turn_id: &str, epoch: u64) -> Result<(), Error> {
        let Some(handle) = self.find(turn_id)? else {
            return match self.tombstone(turn_id)? {
                Some(_) => Ok(()),
                None => Err(Error::TurnNotFound(turn_id.to_owned())),
            };
        };
        // The owner of a later epoch settles what an earlier one left, so only the turn's own epoch counts here.
        if epoch < handle.epoch {
            return Err(self.explain(Error::StaleEpoch {
                conversation: handle.conversation_id.clone(),
                given: epoch,
                highest: self.context.epochs.highest(&handle.conversation_id),
                unacknowledged: Vec::new(),
            }));
        }
        if !handle.hub.ended() {
            return Err(Error::WrongState(format!("turn {turn_id} has not ended")));
        }
        let journal = self.context.state.journal(turn_id);
        let records = match Journal::read(&journal) {
            Ok(records) => records,
            // Another Acknowledge of the same turn was faster.
            Err(_) if !journal.exists() && self.tombstone(turn_id)?.is_some() => return Ok(()),
            Err(error) => return Err(error),
        };
        let state = State::fold(&records);
        if let Some(session) = &state.session {
            // The journal may be the only place on disk that has it.
            SessionRecord::flush(&self.context.state, &session.session_id)?;
        }
        let tombstone = Tombstone {
            turn_id: turn_id.to_owned(),
            conversation_id: handle.conversation_id.clone(),
            epoch: handle.epoch,
            session_id: state.session.map(|session| session.session_id).unwrap_or_default(),
            texts: state
                .messages
                .iter()
                .map(|message| (message.delivery_id.clone(), sha256(message.text.as_bytes())))
                .collect(),
            delivery_ids: state.messages.into_iter().map(|message| message.delivery_id).collect(),
            outcome: state.terminal.map_or(2, |terminal| terminal.outcome),
            last_number: state.last,
            made_unix_seconds: jiff::Timestamp::now().as_second(),
        };
        self.write_tombstone(&tombstone)?;
        crate::kill_point!("runner::tombstone");
        match std::fs::remove_file(&journal) {
            Ok(()) => {}
            // Another Acknowledge came between.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) => return Err(Error::storage("remove an acknowledged journal")(error)),
        }
        self.lock().remove(turn_id);
        self.context.spares.refill(&self.context.tasks, &self.context.halt);
        Ok(())
    }

    /// CloseSession. Answers whether a process was warm.
    ///
    /// # Errors
    /// [`Error::SessionNotFound`], [`Error::TurnInProgress`].
    pub async fn close_session(&self, session_id: &str) -> Result<bool, Error> {
        {
            let _one = self.admission.lock().await;
            if let Some(turn) =
                self.running().into_iter().find(|handle| handle.facts().session_id == session_id)
            {
                return Err(Error::TurnInProgress { turn_id: turn.turn_id });
            }
            if SessionRecord::load(&self.context.state, session_id)?.is_none() {
                return Err(Error::SessionNotFound(session_id.to_owned()));
            }
        }
        // The end of an engine takes its time, and other openings and cancels are not to wait for it. A turn that comes
        // to this session now either has taken the engine, so that there is nothing to close, or waits for its end.
        Ok(self.context.pool.close(session_id).await)
    }

    /// The ids of all sessions, in order. Blocking.
    ///
    /// # Errors
    /// [`Error::Storage`].
    pub fn session_ids(&self) -> Result<Vec<String>, Error> {
        let mut ids = names(self.context.state.sessions())?;
        ids.sort();
        Ok(ids)
    }

    /// Drain, or its end. Answers how many turns run.
    pub fn drain(&self, undrain: bool) -> usize {
        self.context.draining.store(!undrain, Ordering::Relaxed);
        self.running().len()
    }
}

/// The answer to a Send of a turn of which a tombstone is left. A text whose digest is not known passes for the same.
fn sent_before_tombstone(tombstone: &Tombstone, request: &Send) -> Result<String, Error> {
    let delivery = delivery_id(&request.turn_id, &request.session_id, &request.message_id);
    if !tombstone.delivery_ids.contains(&delivery) {
        return Err(Error::WrongState(format!("turn {} has ended", request.turn_id)));
    }
    match tombstone.texts.get(&delivery) {
        Some(known) if *known != sha256(request.text.as_bytes()) => Err(Error::other_text()),
        _ => Ok(delivery),
    }
}

/// The answer about a turn whose journal cannot be read.
fn unread(turn_id: &str) -> Error {
    Error::Storage {
        action: "read the turn's journal",
        source: std::io::Error::other(format!(
            "the journal of {turn_id} could not be read when this runner started"
        )),
    }
}

/// The directories in one that are named by ids.
pub(crate) fn names(parent: PathBuf) -> Result<Vec<String>, Error> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(parent).map_err(Error::storage("list the state directory"))? {
        let entry = entry.map_err(Error::storage("list the state directory"))?;
        if let Ok(name) = entry.file_name().into_string()
            && crate::ids::is_valid(&name)
        {
            found.push(name);
        }
    }
    Ok(found)
}
