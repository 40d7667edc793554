//! Requests that change something, validated and in our words.

use std::time::Duration;

use roundhouse_engines::{Effort, Permissions};

/// Opens a session for a turn.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Open {
    /// The conversation.
    pub conversation_id: String,
    /// Our id of the session.
    pub session_id: String,
    /// The turn.
    pub turn_id: String,
    /// The epoch.
    pub epoch: u64,
    /// The workspace as asked.
    pub workspace: String,
    /// Engine name.
    pub engine: String,
    /// Model.
    pub model: String,
    /// Effort. Unset: the engine's default.
    pub effort: Option<Effort>,
    /// The agent's name, for show.
    pub agent: String,
    /// The agent's prompt.
    pub prompt: String,
    /// Its SHA-256, lower-case hex.
    pub prompt_sha256: String,
    /// Shared history for the engine. Empty: none.
    pub context: String,
    /// The native session to resume.
    pub native_id: Option<String>,
    /// The session that this one replaces. Empty: none.
    pub replaces: String,
    /// What may be done without asking.
    pub permissions: Permissions,
    /// Silence after which the turn ends. Unset: the runner's.
    pub idle_timeout: Option<Duration>,
    /// Longest duration of the turn. Unset: none.
    pub deadline: Option<Duration>,
    /// The last number that the caller holds. 0: none.
    pub held: u64,
}

/// Gives a message to an engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Send {
    /// The session.
    pub session_id: String,
    /// The turn.
    pub turn_id: String,
    /// The epoch.
    pub epoch: u64,
    /// The message.
    pub message_id: String,
    /// Its text.
    pub text: String,
}

/// Answers a permission request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    /// The request.
    pub request_id: String,
    /// The turn.
    pub turn_id: String,
    /// The epoch.
    pub epoch: u64,
    /// Whether the tool may run.
    pub allow: bool,
    /// Told to the engine with a denial.
    pub feedback: String,
}
