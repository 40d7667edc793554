//! Why a turn failed, in the words every engine shares, and what a person should do about it.

use serde::{Deserialize, Serialize};

use crate::limit;

/// Why a turn ended other than completed. The list is closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum Reason {
    /// A usage or rate limit, or an empty balance.
    Quota,
    /// The engine is not logged in, or its credentials were refused.
    Auth,
    /// The engine's executable is not there or cannot run.
    EngineMissing,
    /// The native session cannot be resumed.
    SessionUnusable,
    /// The conversation no longer fits the model's context.
    ContextTooLong,
    /// The engine failed or died. `unavailable` in the failure says that its service was away.
    Process,
    /// The engine's output could not be used: refused, cut at the output limit, or not of the asked shape.
    OutputInvalid,
    /// The engine printed nothing for longer than allowed.
    IdleTimeout,
    /// The turn took longer than allowed.
    Deadline,
    /// The same tool call was repeated without progress.
    Stuck,
    /// The turn could not go on without a permission that was denied.
    PermissionDenied,
    /// Model, flags, variables or settings are wrong.
    Configuration,
    /// The runner was lost or drained.
    RunnerLost,
    /// Another turn holds the workspace.
    WorkspaceBusy,
    /// The engine cannot do what was asked.
    Unsupported,
    /// The disk is full, or a file could not be written.
    Storage,
    /// Somebody cancelled the turn.
    Cancelled,
}

impl Reason {
    /// Every reason, in the order of the list.
    pub const ALL: [Self; 17] = [
        Self::Quota,
        Self::Auth,
        Self::EngineMissing,
        Self::SessionUnusable,
        Self::ContextTooLong,
        Self::Process,
        Self::OutputInvalid,
        Self::IdleTimeout,
        Self::Deadline,
        Self::Stuck,
        Self::PermissionDenied,
        Self::Configuration,
        Self::RunnerLost,
        Self::WorkspaceBusy,
        Self::Unsupported,
        Self::Storage,
        Self::Cancelled,
    ];

    /// The name as it stands in the contracts, for example `SESSION_UNUSABLE`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Quota => "QUOTA",
            Self::Auth => "AUTH",
            Self::EngineMissing => "ENGINE_MISSING",
            Self::SessionUnusable => "SESSION_UNUSABLE",
            Self::ContextTooLong => "CONTEXT_TOO_LONG",
            Self::Process => "PROCESS",
            Self::OutputInvalid => "OUTPUT_INVALID",
            Self::IdleTimeout => "IDLE_TIMEOUT",
            Self::Deadline => "DEADLINE",
            Self::Stuck => "STUCK",
            Self::PermissionDenied => "PERMISSION_DENIED",
            Self::Configuration => "CONFIGURATION",
            Self::RunnerLost => "RUNNER_LOST",
            Self::WorkspaceBusy => "WORKSPACE_BUSY",
            Self::Unsupported => "UNSUPPORTED",
            Self::Storage => "STORAGE",
            Self::Cancelled => "CANCELLED",
        }
    }

    /// What a person should do next, when nothing more exact is known.
    #[must_use]
    pub const fn what_to_do(self) -> &'static str {
        match self {
            Self::Quota => {
                "Wait until the limit resets or raise it with the provider, then retry the turn; \
                 or send the message to an agent on another engine."
            }
            Self::Auth => {
                "Log the engine in or correct its key in the runner's [engines] configuration, then retry the turn."
            }
            Self::EngineMissing => "Run `roundhouse engines install`, then retry the turn.",
            Self::SessionUnusable => {
                "Send the message again: the next turn starts a replacement session from the shared history. \
                 The old session's files are kept for diagnosis."
            }
            Self::ContextTooLong => {
                "Shorten the message, or put what is long into a file and name it. If it is short already: send it to \
                 an agent with a larger context, or start a new session, which is given the shared history within \
                 its budget."
            }
            Self::Process => {
                "Retry the turn. If it fails again, read the standard error in the error's details."
            }
            Self::OutputInvalid => "Rephrase the message or choose another model, then send it again.",
            Self::IdleTimeout => {
                "Retry the turn. If the work is silent for long on purpose, raise idle_timeout in the agent file."
            }
            Self::Deadline => "Raise the deadline or split the work, then retry the turn.",
            Self::Stuck => "Read the last tool calls, then send a message that says how to go on.",
            Self::PermissionDenied => {
                "Allow what was asked, or tell the agent another way, then send the message again."
            }
            Self::Configuration => {
                "Correct what the message names in the agent file or the runner's configuration, then retry the turn."
            }
            Self::RunnerLost => "Bring the runner back, then retry the turn.",
            Self::WorkspaceBusy => {
                "Wait for the turn that holds the workspace, or free it, then retry the turn."
            }
            Self::Unsupported => "Ask for something the engine can do, or choose an agent on another engine.",
            Self::Storage => {
                "Free space on the disk that holds the runner's state and the engine's home, then retry the turn."
            }
            Self::Cancelled => "Nothing to do. Retry the turn to go on.",
        }
    }

    /// Whether the same message may succeed when it is tried again without a change.
    #[must_use]
    pub const fn retryable(self) -> bool {
        match self {
            Self::Quota
            | Self::Process
            | Self::IdleTimeout
            | Self::Deadline
            | Self::RunnerLost
            | Self::WorkspaceBusy
            | Self::Storage
            | Self::SessionUnusable
            | Self::Cancelled => true,
            Self::Auth
            | Self::EngineMissing
            | Self::ContextTooLong
            | Self::OutputInvalid
            | Self::Stuck
            | Self::PermissionDenied
            | Self::Configuration
            | Self::Unsupported => false,
        }
    }
}

/// A failure with all that helps to act on it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// Why.
    pub reason: Reason,
    /// What happened, in one or two sentences; may quote the engine.
    pub message: String,
    /// What a person should do next.
    pub what_to_do: String,
    /// Whether trying the same again may help.
    pub retryable: bool,
    /// When trying again makes sense, in seconds since 1970. Only from a machine-readable field of the
    /// engine; unset means unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retry_at_unix_seconds: Option<i64>,
    /// The engine's service could not be reached or was overloaded. A detail of PROCESS and DEADLINE.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub unavailable: bool,
    /// The process's exit code, when it had one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit_code: Option<i32>,
    /// The signal the process died of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub signal: Option<i32>,
    /// The end of the turn's standard error, at most [`limit::STDERR_TAIL_LIMIT`] bytes.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub stderr_tail: String,
    /// The engine's own name for the failure, for example `rate_limit` or `prompt_too_long`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub native_code: Option<String>,
    /// The status of the engine's own request, for example 429.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub native_status: Option<u16>,
}

impl Failure {
    /// What to do about an engine that SIGKILL ended when the runner had not sent it.
    pub const KILLED: &str = "Nobody here sent that signal. Most often the kernel does, when the host or the container has no memory left: \
         see its log, give it more or run less at once; then retry the turn.";

    /// The engine printed a line that is longer than the framing allows, perhaps without end: `length` bytes at least.
    #[must_use]
    pub fn oversized_line(length: u64) -> Self {
        let message = format!("the engine printed a line of {length} bytes or more, which is over the limit");
        Self {
            native_code: Some("oversized_line".to_owned()),
            what_to_do:
                "Look at the line's beginning in the raw output. If the engine is right to print such lines, \
                         raise max_line_bytes in the runner's configuration; then retry the turn."
                    .to_owned(),
            retryable: true,
            ..Self::new(Reason::OutputInvalid, message)
        }
    }

    /// A failure with the reason's own advice and nothing else known.
    #[must_use]
    pub fn new(reason: Reason, message: impl AsRef<str>) -> Self {
        Self {
            reason,
            message: limit::short(message.as_ref()),
            what_to_do: reason.what_to_do().to_owned(),
            retryable: reason.retryable(),
            retry_at_unix_seconds: None,
            unavailable: false,
            exit_code: None,
            signal: None,
            stderr_tail: String::new(),
            native_code: None,
            native_status: None,
        }
    }
}
