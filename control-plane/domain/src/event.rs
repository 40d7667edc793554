//! Events: bounded things that happened in a turn, and facts of a conversation without a turn's number.
//!
//! Four counters, never mixed: `number` is the runner's, per turn, contiguous from 1. `seq` of an event is
//! the control plane's, per turn, contiguous from 1. The cursor is per conversation and also covers facts.
//! `seq` of a message is its order of arrival.

use serde::{Deserialize, Serialize};

use crate::id::{ConversationId, Epoch, MessageId, SessionId, TurnId};
use crate::message::{Position, Role};
use crate::permission::{PermissionRequest, PermissionResult};
use crate::session::{NativeRef, Origin};
use crate::time::Timestamp;
use crate::turn::TurnState;
use crate::usage::Usage;

named_enum! {
    /// The closed list of event kinds.
    pub enum EventKind {
        /// A session was opened, replaced or found unusable.
        Session = "SESSION",
        /// The turn came to another stage; `accepted` is one.
        Phase = "PHASE",
        /// Text of the answer.
        Text = "TEXT",
        /// Reasoning that the engine shows.
        Reasoning = "REASONING",
        /// A tool was called.
        ToolCall = "TOOL_CALL",
        /// A tool answered.
        ToolResult = "TOOL_RESULT",
        /// A file was changed.
        FileChange = "FILE_CHANGE",
        /// The engine asks for a permission.
        PermissionRequest = "PERMISSION_REQUEST",
        /// A permission was settled.
        PermissionAnswer = "PERMISSION_ANSWER",
        /// Tokens and cost.
        Usage = "USAGE",
        /// What is left of an account's limit.
        Quota = "QUOTA",
        /// Something people should know.
        Notice = "NOTICE",
        /// What became of a steered message.
        Steer = "STEER",
        /// What the turn did to the worktree.
        Evidence = "EVIDENCE",
        /// The turn ended. The last event of every turn.
        Terminal = "TERMINAL",
    }
}

/// Where an event comes from; also the key that makes storing it repeatable.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum EventSource {
    /// From the runner, with its number in the turn, contiguous from 1.
    Runner {
        /// The runner's number.
        number: u64,
    },
    /// Our own. The key is unique in the turn: an event of the same key is stored once.
    Own {
        /// The key, for example `session-replaced:ses_...`; 1 to 200 bytes.
        key: String,
    },
}

/// What storing an event must do besides, in the same transaction.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Effect {
    /// Nothing.
    None,
    /// The engine revealed what it needs to resume, and the session is known to be resumable.
    NativeRef {
        /// The session.
        session_id: SessionId,
        /// What the engine needs.
        native_ref: NativeRef,
    },
    /// The engine proved that it took this message: the turn runs, and the watermark of its session moves there.
    Accepted {
        /// The message.
        message_id: MessageId,
    },
    /// The engine asks for a permission.
    PermissionRequested(PermissionRequest),
    /// A permission was settled.
    PermissionSettled {
        /// Which one.
        request_id: String,
        /// How.
        result: PermissionResult,
    },
    /// What the turn used so far, in all: it replaces what was known.
    Usage(Usage),
    /// The session cannot be continued. Its files stay where they are.
    SessionUnusable {
        /// The session.
        session_id: SessionId,
        /// Why, in one sentence.
        reason: String,
    },
}

/// An event to be stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewEvent {
    /// Where it comes from.
    pub source: EventSource,
    /// Its kind.
    pub kind: EventKind,
    /// The encoded body, at most [`crate::limits::MAX_EVENT`] bytes. Opaque here.
    pub payload: Vec<u8>,
    /// When it happened, as its source says.
    pub time: Timestamp,
    /// What storing it must do besides.
    pub effect: Effect,
}

/// An event, as stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredEvent {
    /// The turn.
    pub turn_id: TurnId,
    /// Its number in the turn, from 1, contiguous.
    pub seq: u64,
    /// Its cursor value in the conversation.
    pub cursor: u64,
    /// The runner's number; unset for our own events.
    pub number: Option<u64>,
    /// Its kind.
    pub kind: EventKind,
    /// The encoded body.
    pub payload: Vec<u8>,
    /// When it happened.
    pub time: Timestamp,
}

/// Something that happened to a conversation beside the events of its turns.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Fact {
    /// A message was stored.
    MessageStored {
        /// The message.
        message_id: MessageId,
        /// Who speaks.
        role: Role,
        /// Its order of arrival.
        seq: u64,
        /// Its place in the history, if it has one yet.
        position: Option<Position>,
        /// The turn it belongs to.
        turn_id: Option<TurnId>,
    },
    /// A turn waits for the turns before it.
    TurnQueued {
        /// The turn.
        turn_id: TurnId,
        /// Its message.
        message_id: MessageId,
    },
    /// A turn became the owner of the conversation's lock.
    TurnPromoted {
        /// The turn.
        turn_id: TurnId,
        /// Its message.
        message_id: MessageId,
        /// The message's place in the history.
        position: Position,
        /// The lock's epoch.
        epoch: Epoch,
    },
    /// A turn changed its state otherwise; ends have a terminal event, too.
    TurnState {
        /// The turn.
        turn_id: TurnId,
        /// Its state now.
        state: TurnState,
    },
    /// A session was chosen for a turn, or created.
    SessionChosen {
        /// The session.
        session_id: SessionId,
        /// The turn.
        turn_id: TurnId,
        /// Whether its row is new.
        created: bool,
        /// The session it replaces, if any.
        replaces: Option<SessionId>,
    },
    /// A session was opened on its runner.
    SessionOpened {
        /// The session.
        session_id: SessionId,
        /// The turn.
        turn_id: TurnId,
        /// How it came to be.
        origin: Origin,
    },
    /// A session was found unusable.
    SessionUnusable {
        /// The session.
        session_id: SessionId,
        /// Why.
        reason: String,
    },
    /// The summary has a new version.
    SummaryChanged {
        /// The version.
        version: u64,
    },
    /// The archive flag changed.
    Archived {
        /// The flag.
        archived: bool,
    },
}

/// What changed at one cursor value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ChangeBody {
    /// An event of a turn.
    Event(StoredEvent),
    /// A fact.
    Fact(Fact),
}

/// One change of a conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// The conversation.
    pub conversation_id: ConversationId,
    /// Its cursor value, from 1, contiguous in the conversation.
    pub cursor: u64,
    /// When it was stored.
    pub time: Timestamp,
    /// What changed.
    pub body: ChangeBody,
}
