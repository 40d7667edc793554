//! A turn: one owner task that linearises all that happens to it.
//!
//! ```text
//! commands (rpc) ──┐
//! frames (spool) ──┼──> Input ──> Turn ──> journal ──> hub ──> readers
//! results, timers ─┘                └──> keeper
//! ```
//!
//! Every effect is journalled before it is published or acted on, and every decision that later frames do not repeat
//! is journalled as a mark. After a restart the same code runs over the same frames: what the journal has is passed
//! over by position, what it lacks follows.

mod actor;
mod broken;
mod doubt;
mod ending;
mod opening;
mod permission;
mod reading;
mod recovery;
mod state;
mod stopping;

use std::{
    path::Path,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use roundhouse_proto::engine::v1::{
    EventBody, ProcessFact, TerminalEvent, event_body::Kind, inspect_response, notice_event,
};
use tokio::sync::{mpsc, oneshot};

pub(crate) use self::{
    actor::{Start, spawn},
    recovery::{Read, read, recover},
    state::State,
};
use crate::{
    error::Error,
    grpc::to_proto,
    hub::Hub,
    journal::{Entry, Journal, Record, SessionOpen, Source, StopCause},
    request,
};

/// Commands that may wait for a turn. Callers wait beyond it.
const COMMANDS: usize = 64;

/// How an opening went.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OpenReply {
    /// The result.
    pub result: OpenResult,
    /// The native session, as far as known.
    pub native_id: String,
    /// Whether a changed prompt was applied.
    pub prompt_applied: bool,
    /// The journal's last number.
    pub last_number: u64,
}

/// See [`OpenReply`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OpenResult {
    /// A new native session.
    Started,
    /// An earlier one, in a new process.
    Resumed,
    /// An earlier one, in its warm process.
    AlreadyOpen,
    /// The native session cannot be used.
    Unusable(String),
}

/// The answer to an opening. Several callers may wait for one opening, so an error is shared.
pub(crate) type OpenAnswer = Result<OpenReply, Arc<Error>>;

/// What a turn is asked.
#[derive(Debug)]
pub enum Command {
    /// Open a session for the turn, or attach to the opening.
    Open(Box<SessionOpen>, oneshot::Sender<OpenAnswer>),
    /// Give a message to the engine. Answers the delivery id.
    Send(Box<request::Send>, oneshot::Sender<Result<String, Error>>),
    /// Stop the turn. Answers once the wish is durable.
    Stop(StopCause, Option<Duration>, oneshot::Sender<()>),
    /// Answer a permission. Answers whether this answer decides, and what holds.
    Answer(Box<request::Answer>, oneshot::Sender<Result<(bool, bool), Error>>),
    /// Number on after this number: somebody holds more than the journal.
    Skip(u64, oneshot::Sender<()>),
}

/// What is true of a turn now, for those who only look.
#[derive(Debug, Clone)]
pub struct Facts {
    /// Where it stands.
    pub state: inspect_response::State,
    /// Its current session.
    pub session_id: String,
    /// Its process.
    pub process: Option<ProcessFact>,
    /// How it ended.
    pub terminal: Option<TerminalEvent>,
}

impl Default for Facts {
    fn default() -> Self {
        Self {
            state: inspect_response::State::Opened,
            session_id: String::new(),
            process: None,
            terminal: None,
        }
    }
}

/// A turn as others hold it.
#[derive(Debug, Clone)]
pub struct Handle {
    /// The turn.
    pub turn_id: String,
    /// Its conversation.
    pub conversation_id: String,
    /// Its epoch.
    pub epoch: u64,
    /// Its events.
    pub hub: Arc<Hub>,
    commands: mpsc::Sender<Command>,
    facts: Arc<Mutex<Facts>>,
    discarded: Arc<AtomicBool>,
}

impl Handle {
    /// What is true now.
    #[must_use]
    pub fn facts(&self) -> Facts {
        self.facts.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Asks the turn and waits for the answer; none when it has ended before it answered. Cancel safe: a question that
    /// was put is worked on.
    pub async fn ask<T>(&self, command: impl FnOnce(oneshot::Sender<T>) -> Command) -> Option<T> {
        let (answer, reply) = oneshot::channel();
        self.commands.send(command(answer)).await.ok()?;
        reply.await.ok()
    }

    /// Whether the turn was thrown away: it is as if it had never been.
    #[must_use]
    pub fn is_discarded(&self) -> bool {
        self.discarded.load(Ordering::Acquire)
    }

    /// Whether the turn's task is gone.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.commands.is_closed()
    }
}

/// The notice that goes before numbers which go on after lost ones.
pub(crate) fn events_lost() -> EventBody {
    let text = "The host lost power and with it events that had been numbered; numbering goes on.";
    to_proto::notice(notice_event::Kind::EventsLost, text)
}

/// Numbers the end of an ended turn again, after a number that somebody holds, with the notice before it. Both are on
/// disk when this returns.
///
/// # Errors
/// [`Error::Storage`]; [`Error::WrongState`] for a turn that has not ended.
pub(crate) async fn end_again(turn_id: &str, path: &Path, after: u64) -> Result<Handle, Error> {
    let (mut journal, mut records) = Journal::recover(path)?;
    let terminal = State::fold(&records)
        .terminal
        .ok_or_else(|| Error::WrongState(format!("turn {turn_id} has not ended")))?;
    let entry = |number, body| {
        Record::Entry(Box::new(Entry {
            number,
            at_millis: jiff::Timestamp::now().as_millisecond(),
            source: Source::Synthetic,
            body,
        }))
    };
    let more = [
        Record::Skip { to: after },
        entry(after + 1, events_lost()),
        entry(after + 2, to_proto::body(Kind::Terminal(terminal))),
    ];
    for record in &more {
        journal.append(record)?;
    }
    journal.sync().await?;
    records.extend(more);
    ended(turn_id, &State::fold(&records), path.to_owned())
        .ok_or_else(|| Error::Internal("a journal without its first record".to_owned()))
}

/// A turn that had ended when this runner started.
#[must_use]
pub(crate) fn ended(turn_id: &str, state: &State, journal: std::path::PathBuf) -> Option<Handle> {
    let open = state.open.as_ref()?;
    let (commands, _) = mpsc::channel(1);
    Some(Handle {
        turn_id: turn_id.to_owned(),
        conversation_id: open.conversation_id.clone(),
        epoch: open.epoch,
        hub: Hub::new(journal, state.last, true),
        commands,
        facts: Arc::new(Mutex::new(Facts {
            state: inspect_response::State::Ended,
            session_id: state.session.as_ref().map(|session| session.session_id.clone()).unwrap_or_default(),
            process: None,
            terminal: state.terminal.clone(),
        })),
        discarded: Arc::default(),
    })
}
