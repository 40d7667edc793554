//! Messages and their place in the shared history.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::id::{ConversationId, MessageId, TurnId};
use crate::time::Timestamp;

/// A message's place in the shared history, from 1. Waiting messages have none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Position(pub u64);

impl Position {
    /// Before the first message.
    pub const START: Self = Self(0);

    /// The place after this one.
    #[must_use]
    pub const fn next(self) -> Self {
        Self(self.0.saturating_add(1))
    }
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

named_enum! {
    /// Who speaks.
    pub enum Role {
        /// A person, or a tool on behalf of one.
        User = "USER",
        /// An agent.
        Agent = "AGENT",
        /// Roundhouse itself.
        System = "SYSTEM",
    }
}

/// One message, as stored. Only `position` ever changes, once, from none to its place.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// Its id.
    pub id: MessageId,
    /// The conversation it belongs to.
    pub conversation_id: ConversationId,
    /// Its order of arrival, from 1, contiguous in the conversation.
    pub seq: u64,
    /// Its place in the shared history; unset while it waits, and for ever when its turn was cancelled waiting.
    pub position: Option<Position>,
    /// Who speaks.
    pub role: Role,
    /// Who exactly: a person's or an agent's name.
    pub actor: String,
    /// The text.
    pub body: String,
    /// The turn it belongs to: for a user message the first one that works on it.
    pub turn_id: Option<TurnId>,
    /// An agent's text that was cut off by the end of its turn.
    pub incomplete: bool,
    /// The text was longer than is stored.
    pub truncated: bool,
    /// When it arrived.
    pub create_time: Timestamp,
}
