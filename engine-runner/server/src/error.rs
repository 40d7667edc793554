//! What a call to the runner can fail with, in kinds by what the caller can do.

use std::path::PathBuf;

use roundhouse_engines::Failure;

/// Why a call failed. An engine that fails is no error of a call: that is a terminal event.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A field of the request is wrong.
    #[error("{field}: {message}")]
    Invalid {
        /// The field's path.
        field: &'static str,
        /// What is wrong with it.
        message: String,
    },
    /// The turn is not known here.
    #[error("turn {0} is not known here")]
    TurnNotFound(String),
    /// The session is not known here.
    #[error("session {0} is not known here")]
    SessionNotFound(String),
    /// The directory is missing, or lies under no root.
    #[error("workspace {path}: {message}")]
    WorkspaceNotFound {
        /// The path as asked.
        path: PathBuf,
        /// What is wrong with it.
        message: String,
    },
    /// The permission request is not known here.
    #[error("permission request {0} is not known here")]
    PermissionNotFound(String),
    /// A higher epoch has been seen.
    #[error("epoch {given} of conversation {conversation} is stale: {highest} has been seen")]
    StaleEpoch {
        /// The conversation.
        conversation: String,
        /// The caller's epoch.
        given: u64,
        /// The highest persisted one.
        highest: u64,
        /// Turns that the runner still holds, as `turn:epoch`; cut to what a status can carry.
        unacknowledged: Vec<String>,
    },
    /// Another turn holds the workspace, or one that contains it or lies in it.
    #[error("workspace is held by turn {turn_id}")]
    WorkspaceBusy {
        /// The holder.
        turn_id: String,
    },
    /// A turn runs on the session.
    #[error("turn {turn_id} is in progress")]
    TurnInProgress {
        /// The turn.
        turn_id: String,
    },
    /// The call is meant for another runner, whose address this one has by now.
    #[error("the call is meant for the runner {meant}; here answers {ours}")]
    OtherRunner {
        /// The runner that the caller means.
        meant: String,
        /// This one.
        ours: String,
    },
    /// The call makes no sense in the turn's state.
    #[error("{0}")]
    WrongState(String),
    /// No new turns are taken.
    #[error("the runner takes no new turns")]
    Draining,
    /// The reader did not keep up.
    #[error("the reader was too slow; resume after {last_number}")]
    SlowReader {
        /// The last number that was handed over.
        last_number: u64,
    },
    /// A policy of the runner forbids it.
    #[error("{0}")]
    Policy(String),
    /// The engine was not started, or did not prove its opening. The failure's reason says what kind it is.
    #[error("{}", failure.message)]
    Refused {
        /// What would be the turn's failure.
        failure: Box<Failure>,
        /// Whether the engine was started at all.
        started: bool,
    },
    /// The keeper does not answer.
    #[error("the keeper of the engine does not answer")]
    KeeperStuck,
    /// What must be kept could not be written.
    #[error("failed to {action}")]
    Storage {
        /// What was tried.
        action: &'static str,
        /// The system's answer.
        #[source]
        source: std::io::Error,
    },
    /// A mistake of ours. The text stays in the log.
    #[error("internal error: {0}")]
    Internal(String),
}

impl Error {
    /// For `map_err` on system calls that must not fail.
    pub fn storage(action: &'static str) -> impl FnOnce(std::io::Error) -> Self {
        move |source| Self::Storage { action, source }
    }

    /// A wrong field.
    pub fn invalid(field: &'static str, message: impl Into<String>) -> Self {
        Self::Invalid { field, message: message.into() }
    }

    /// A Send that repeats a message id with another text.
    pub(crate) fn other_text() -> Self {
        Self::invalid("text", "differs from what was sent under this message id")
    }
}

impl From<roundhouse_process::record::RecordError> for Error {
    fn from(error: roundhouse_process::record::RecordError) -> Self {
        match error {
            roundhouse_process::record::RecordError::Io { action, source } => {
                Self::Storage { action, source }
            }
            other => Self::Internal(format!("journal: {other}")),
        }
    }
}

/// An error with its causes, for logs.
#[must_use]
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(source) = cause {
        text.push_str(": ");
        text.push_str(&source.to_string());
        cause = source.source();
    }
    text
}
