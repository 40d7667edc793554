//! In-process signals that something was committed. Only hints: whoever misses one finds the same in the store.

use roundhouse_domain::id::{ConversationId, TurnId, WorkspaceId};
use tokio::sync::broadcast;

/// Something was committed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Hint {
    /// A conversation has changes up to this cursor value.
    Changed {
        /// The conversation.
        conversation_id: ConversationId,
        /// Its newest cursor value.
        cursor: u64,
    },
    /// A turn is to be dispatched.
    Promoted {
        /// The turn.
        turn_id: TurnId,
    },
    /// A cancel was stored for an active turn.
    CancelRequested {
        /// The turn.
        turn_id: TurnId,
    },
    /// An answer to a permission was stored.
    PermissionAnswered {
        /// The turn.
        turn_id: TurnId,
        /// The permission.
        request_id: String,
    },
    /// A workspace's slot was freed.
    SlotFreed {
        /// The workspace.
        workspace_id: WorkspaceId,
    },
    /// Hints were missed: anything may have changed.
    Missed,
}

/// A subscription to hints.
#[derive(Debug)]
pub struct Hints {
    receiver: broadcast::Receiver<Hint>,
}

impl Hints {
    /// A subscription over a broadcast channel, for implementations of the store.
    #[must_use]
    pub const fn new(receiver: broadcast::Receiver<Hint>) -> Self {
        Self { receiver }
    }

    /// The next hint; [`Hint::Missed`] when this subscriber was too slow, none when the store was closed.
    ///
    /// Cancel safe: no hint is lost when the future is dropped.
    pub async fn next(&mut self) -> Option<Hint> {
        match self.receiver.recv().await {
            Ok(hint) => Some(hint),
            Err(broadcast::error::RecvError::Lagged(_)) => Some(Hint::Missed),
            Err(broadcast::error::RecvError::Closed) => None,
        }
    }
}
