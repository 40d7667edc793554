//! Permissions: what an engine asked, what people answered, and what became of it.
//!
//! The runner alone arbitrates. An answer is stored as intent and told to the runner until its
//! `permission_answer` event says who won.

use serde::{Deserialize, Serialize};

use crate::id::{ConversationId, TurnId};
use crate::time::Timestamp;

named_enum! {
    /// What somebody decided.
    pub enum Decision {
        /// Go on.
        Allow = "ALLOW",
        /// Do not.
        Deny = "DENY",
    }
}

named_enum! {
    /// Who settled a permission.
    pub enum SettledBy {
        /// An answer through the control plane or the runner.
        Answer = "ANSWER",
        /// Its deadline passed.
        Deadline = "DEADLINE",
        /// The turn was cancelled or ended.
        TurnEnded = "TURN_ENDED",
        /// The engine took it back.
        Withdrawn = "WITHDRAWN",
    }
}

/// What an engine asked, as the runner's event told it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PermissionRequest {
    /// `<spool id>.<frame number>`.
    pub request_id: String,
    /// The tool that wants to act.
    pub tool: String,
    /// What it wants to do, in one line.
    pub title: String,
    /// When the runner will deny it, as wall time for show.
    pub deadline: Option<Timestamp>,
    /// The request in full, encoded by whoever asks; opaque here, at most [`crate::limits::MAX_EVENT`] bytes.
    pub body: Vec<u8>,
}

/// How the runner settled it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PermissionResult {
    /// What the engine was told.
    pub decision: Decision,
    /// Who decided.
    pub settled_by: SettledBy,
}

/// What somebody answered; told to the runner until it says who won.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PermissionIntent {
    /// Allow or deny.
    pub decision: Decision,
    /// Words for the engine; may be empty.
    pub feedback: String,
    /// Who answered.
    pub actor: String,
    /// When.
    pub time: Timestamp,
}

/// One permission, as stored.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Permission {
    /// What was asked.
    pub request: PermissionRequest,
    /// The conversation of its turn.
    pub conversation_id: ConversationId,
    /// The turn that waits for it.
    pub turn_id: TurnId,
    /// When the request was stored.
    pub create_time: Timestamp,
    /// The first answer that was given through us.
    pub intent: Option<PermissionIntent>,
    /// What became of it; unset while open.
    pub result: Option<PermissionResult>,
    /// When `result` was stored.
    pub settle_time: Option<Timestamp>,
}

impl Permission {
    /// Whether somebody can still answer.
    #[must_use]
    pub const fn is_open(&self) -> bool {
        self.result.is_none()
    }
}
