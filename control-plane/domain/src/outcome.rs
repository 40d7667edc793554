//! How turns end, and what an error must tell.

use serde::{Deserialize, Serialize};

use crate::time::Timestamp;
use crate::turn::End;

named_enum! {
    /// Why a turn did not complete. A closed list that clients can switch on.
    pub enum Reason {
        /// The account's limit is used up.
        Quota = "QUOTA",
        /// Not logged in, or the key was refused.
        Auth = "AUTH",
        /// The engine's CLI is not installed.
        EngineMissing = "ENGINE_MISSING",
        /// The native session cannot be continued.
        SessionUnusable = "SESSION_UNUSABLE",
        /// The conversation no longer fits the model.
        ContextTooLong = "CONTEXT_TOO_LONG",
        /// The engine's process failed.
        Process = "PROCESS",
        /// The engine said something the protocol cannot do without understanding.
        OutputInvalid = "OUTPUT_INVALID",
        /// Nothing came from the engine for too long.
        IdleTimeout = "IDLE_TIMEOUT",
        /// The turn's own deadline passed.
        Deadline = "DEADLINE",
        /// The engine lives and goes nowhere.
        Stuck = "STUCK",
        /// A permission was denied and the engine could not go on.
        PermissionDenied = "PERMISSION_DENIED",
        /// The agent file, the workspace or the settings do not allow this turn.
        Configuration = "CONFIGURATION",
        /// The runner is away.
        RunnerLost = "RUNNER_LOST",
        /// The workspace is held by another turn.
        WorkspaceBusy = "WORKSPACE_BUSY",
        /// The engine cannot do what was asked.
        Unsupported = "UNSUPPORTED",
        /// A disk is full or cannot be written.
        Storage = "STORAGE",
        /// Somebody asked for it.
        Cancelled = "CANCELLED",
    }
}

/// What a turn's error tells people and programs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TurnError {
    /// Why.
    pub reason: Reason,
    /// What happened, in one sentence.
    pub message: String,
    /// What to do next, in one sentence.
    pub next_step: String,
    /// Whether trying again may help without changing anything else.
    pub retryable: bool,
    /// Not before this time. Only from machine-readable fields; unset is unknown.
    pub retry_at: Option<Timestamp>,
    /// The service was unreachable (with PROCESS and DEADLINE only).
    pub unavailable: bool,
    /// Exit code of the engine's process, if it exited.
    pub exit_code: Option<i32>,
    /// Signal that ended the engine's process, if one did.
    pub signal: Option<i32>,
    /// The end of what the engine wrote to stderr.
    pub stderr_tail: String,
    /// The engine's own code for the error.
    pub native_code: Option<String>,
    /// Where the spool lies, on the runner's host.
    pub spool: Option<String>,
}

impl TurnError {
    /// An error with a reason, what happened and what to do next; everything else unset.
    #[must_use]
    pub fn new(reason: Reason, message: impl Into<String>, next_step: impl Into<String>) -> Self {
        Self {
            reason,
            message: message.into(),
            next_step: next_step.into(),
            retryable: false,
            retry_at: None,
            unavailable: false,
            exit_code: None,
            signal: None,
            stderr_tail: String::new(),
            native_code: None,
            spool: None,
        }
    }

    /// The same error, marked as worth another try.
    #[must_use]
    pub fn retryable(mut self) -> Self {
        self.retryable = true;
        self
    }
}

/// How a turn ended, as said by whoever saw it. The turn machine has the last word: a turn that is being
/// cancelled ends CANCELLED or LOST.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Outcome {
    /// The engine finished.
    Completed,
    /// Something failed.
    Failed(TurnError),
    /// It was stopped; the error is set where there is something to say.
    Cancelled(Option<TurnError>),
    /// Its worker is gone and nobody knows.
    Lost(TurnError),
}

impl Outcome {
    /// What the turn machine is told.
    #[must_use]
    pub const fn end(&self) -> End {
        match self {
            Self::Completed => End::Completed,
            Self::Failed(_) => End::Failed,
            Self::Cancelled(_) => End::Cancelled,
            Self::Lost(_) => End::Lost,
        }
    }

    /// What went wrong, if anything.
    #[must_use]
    pub const fn error(&self) -> Option<&TurnError> {
        match self {
            Self::Completed => None,
            Self::Failed(error) | Self::Lost(error) => Some(error),
            Self::Cancelled(error) => error.as_ref(),
        }
    }
}
