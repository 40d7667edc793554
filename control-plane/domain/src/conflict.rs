//! What stands in the way of a call, by what the caller can do about it.

use crate::id::Epoch;
use crate::runner::RunnerClaims;
use crate::turn::{IllegalTransition, RetryRefusal, TurnState};

/// A conflict with what is stored. Nothing was changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Conflict {
    /// The request id was used before, for something else.
    #[error("the request id was used before with another body")]
    RequestIdReused,
    /// The epoch is not the turn's: somebody else owns the lock, or the turn was given a new epoch.
    #[error("epoch {given} is stale, the turn has {current}")]
    StaleEpoch {
        /// What the caller has.
        given: Epoch,
        /// What is stored.
        current: Epoch,
    },
    /// The turn has ended.
    #[error("the turn has ended {0}")]
    TurnEnded(TurnState),
    /// The turn is in the wrong state for this.
    #[error(transparent)]
    IllegalTransition(#[from] IllegalTransition),
    /// A turn runs or waits in the conversation.
    #[error("a turn is in progress")]
    TurnInProgress,
    /// Too many messages wait.
    #[error("{limit} messages wait already")]
    QueueFull {
        /// The limit.
        limit: usize,
    },
    /// The turn cannot be tried again.
    #[error(transparent)]
    Retry(#[from] RetryRefusal),
    /// A runner's event has a number after the next one.
    #[error("event number {given} leaves a gap, {expected} is next")]
    EventGap {
        /// The next number.
        expected: u64,
        /// What came.
        given: u64,
    },
    /// The session is unusable, or of another conversation or workspace.
    #[error("the session cannot be used by this turn: {0}")]
    SessionUnfit(&'static str),
    /// The turn has another agent snapshot, workspace or session already.
    #[error("the turn has another {0} already")]
    AlreadySet(&'static str),
    /// The workspace's slot is held by another turn than the caller named.
    #[error("the workspace is held by another turn")]
    OtherHolder,
    /// The writer of a summary does not know the current version.
    #[error("the summary has version {current}, not {expected}; read it and write again")]
    SummaryVersion {
        /// The version that the writer knows.
        expected: u64,
        /// The current one; 0 when there is none.
        current: u64,
    },
    /// The cursor is older than what is kept.
    #[error("changes up to {pruned_through} are pruned")]
    CursorPruned {
        /// The last cursor value that is gone.
        pruned_through: u64,
    },
    /// The cursor was never given out.
    #[error("the cursor is after the newest change")]
    CursorUnknown,
}

/// What kind of thing was not found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// A conversation.
    Conversation,
    /// A message.
    Message,
    /// A turn.
    Turn,
    /// A session.
    Session,
    /// A workspace.
    Workspace,
    /// A runner.
    Runner,
    /// A permission.
    Permission,
    /// A summary.
    Summary,
}

impl Kind {
    /// The kind's name in a sentence.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Conversation => "conversation",
            Self::Message => "message",
            Self::Turn => "turn",
            Self::Session => "session",
            Self::Workspace => "workspace",
            Self::Runner => "runner",
            Self::Permission => "permission",
            Self::Summary => "summary",
        }
    }
}

impl std::fmt::Display for Kind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.as_str())
    }
}

/// What a registering runner's claims made of turns: see [`RunnerClaims`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reconciled {
    /// Active turns that were given a new epoch.
    pub raised: Vec<(crate::id::TurnId, Epoch)>,
    /// What the runner claims and we have never heard of.
    pub unknown: RunnerClaims,
}
