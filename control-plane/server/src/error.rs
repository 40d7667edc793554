//! What can go wrong with a call, by what the caller can do about it. No word of transport here: `grpc::status` maps
//! each kind to a status.

use std::time::Duration;

/// A field of a request and what is wrong with it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Violation {
    /// The field's path as in the proto, such as `external_id.project`.
    pub(crate) field: &'static str,
    /// What is wrong and what would be right.
    pub(crate) description: String,
}

/// What does not exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Missing {
    /// A conversation.
    Conversation,
    /// A turn.
    Turn,
    /// A session.
    Session,
    /// A workspace.
    Workspace,
    /// A runner.
    Runner,
    /// A permission request.
    Permission,
    /// A summary, or that version of it.
    Summary,
}

impl Missing {
    /// The word for people.
    #[must_use]
    pub(crate) const fn word(self) -> &'static str {
        match self {
            Self::Conversation => "conversation",
            Self::Turn => "turn",
            Self::Session => "session",
            Self::Workspace => "workspace",
            Self::Runner => "runner",
            Self::Permission => "permission request",
            Self::Summary => "summary",
        }
    }
}

/// Why a call failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Error {
    /// Fields of the request are wrong; all of them are named.
    #[error("{}", sentence(.0))]
    Invalid(Vec<Violation>),
    /// Something does not exist.
    #[error("the {} {id:?} does not exist", kind.word())]
    NotFound {
        /// What kind of thing.
        kind: Missing,
        /// The name it was asked for by.
        id: String,
    },
    /// The runner has no such workspace.
    #[error("{message}")]
    NoWorkspace {
        /// The path as asked.
        path: String,
        /// The runner's words, which name the path, and whether it is missing or lies under no root.
        message: String,
    },
    /// The request id was used before with another body.
    #[error("this request id was used before with another body; a new request needs a new id")]
    RequestIdReused,
    /// The call makes no sense in the state that things are in.
    #[error("{message}")]
    WrongState {
        /// What is in the way, and what to do.
        message: String,
    },
    /// A turn runs or waits and the call needs that none does.
    #[error("{message}")]
    TurnInProgress {
        /// Which turn is in the way.
        message: String,
    },
    /// Too many messages wait in the conversation.
    #[error("{limit} messages wait in this conversation already; wait for turns to end")]
    QueueFull {
        /// The limit.
        limit: usize,
    },
    /// The caller's epoch is not the current one.
    #[error("epoch {given} is not the current one, which is {current}")]
    StaleEpoch {
        /// What the caller holds.
        given: u64,
        /// What holds.
        current: u64,
    },
    /// The server is shutting down.
    #[error("the control plane is shutting down; try again in a moment")]
    Draining,
    /// The store cannot be used just now.
    #[error("the store cannot be used just now; nothing was changed")]
    StoreUnavailable,
    /// The runner cannot be reached.
    #[error("the runner {runner} cannot be reached: {detail}")]
    RunnerUnavailable {
        /// Its id.
        runner: String,
        /// What happened.
        detail: String,
    },
    /// The runner speaks another version of the protocol.
    #[error(
        "the runner speaks protocol version {theirs}, this control plane {ours}; install the same release of both"
    )]
    ProtocolVersion {
        /// The runner's.
        theirs: u32,
        /// Ours.
        ours: u32,
    },
    /// The runner is bound to another control plane.
    #[error(
        "the runner is bound to the control plane {bound_to}, this one is {ours}; `engine-runner reset` undoes the binding"
    )]
    RunnerBound {
        /// The control plane it is bound to.
        bound_to: String,
        /// This one.
        ours: String,
    },
    /// The runner's id or address is another one's.
    #[error("{message}")]
    RunnerConflict {
        /// What is in the way, and what to do.
        message: String,
        /// The runner that has it.
        runner: String,
        /// Where that one is.
        address: String,
    },
    /// What is to be changed was changed by somebody else.
    #[error(
        "the summary has version {current}, not {expected}; read it, and write again with expected_version {current}"
    )]
    VersionMismatch {
        /// What the caller knows.
        expected: u64,
        /// What is there.
        current: u64,
    },
    /// The conversation has no agent or workspace yet and the request names none.
    #[error("the conversation has no {what} yet; name one in the request")]
    TargetMissing {
        /// `agent` or `workspace`.
        what: &'static str,
    },
    /// The cursor never existed or belongs to another conversation.
    #[error(
        "the cursor does not belong to this conversation; leave it empty to begin with the oldest event kept"
    )]
    CursorInvalid,
    /// The cursor is older than what is kept.
    #[error("events before the oldest one kept were pruned; begin again with the cursor in the details")]
    CursorPruned {
        /// The oldest cursor that can be asked for.
        oldest: String,
    },
    /// The reader was too slow.
    #[error("the reader was too slow; go on with the cursor in the details")]
    SlowReader {
        /// The cursor of the last item that was handed over. Empty: none was.
        last_cursor: String,
    },
    /// A runner refused a call that was made on behalf of this one.
    #[error("{message}")]
    Refused {
        /// The runner's reason, an `ErrorReason` without its prefix.
        reason: String,
        /// The runner's words.
        message: String,
    },
    /// A mistake of ours. The context goes to the log, not to the caller.
    #[error("an internal mistake; the log knows more")]
    Internal {
        /// What happened, for the log.
        context: String,
    },
}

impl Error {
    /// A single wrong field.
    #[must_use]
    pub(crate) fn field(field: &'static str, description: impl Into<String>) -> Self {
        Self::Invalid(vec![Violation { field, description: description.into() }])
    }

    /// Something that does not exist.
    #[must_use]
    pub(crate) fn missing(kind: Missing, id: impl Into<String>) -> Self {
        Self::NotFound { kind, id: id.into() }
    }

    /// A mistake of ours.
    #[must_use]
    pub(crate) fn internal(context: impl Into<String>) -> Self {
        Self::Internal { context: context.into() }
    }

    /// When another try makes sense. `None`: not without a change.
    #[must_use]
    pub(crate) const fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::QueueFull { .. } => Some(Duration::from_secs(5)),
            Self::Draining | Self::StoreUnavailable => Some(Duration::from_secs(1)),
            Self::RunnerUnavailable { .. } => Some(Duration::from_secs(2)),
            Self::Invalid(_)
            | Self::NotFound { .. }
            | Self::NoWorkspace { .. }
            | Self::RequestIdReused
            | Self::WrongState { .. }
            | Self::TurnInProgress { .. }
            | Self::StaleEpoch { .. }
            | Self::ProtocolVersion { .. }
            | Self::RunnerBound { .. }
            | Self::RunnerConflict { .. }
            | Self::VersionMismatch { .. }
            | Self::TargetMissing { .. }
            | Self::CursorInvalid
            | Self::CursorPruned { .. }
            | Self::SlowReader { .. }
            | Self::Refused { .. }
            | Self::Internal { .. } => None,
        }
    }
}

fn sentence(violations: &[Violation]) -> String {
    let list: Vec<String> = violations.iter().map(|v| format!("{}: {}", v.field, v.description)).collect();
    list.join("; ")
}

/// What a use case answers.
pub(crate) type Result<T> = std::result::Result<T, Error>;
