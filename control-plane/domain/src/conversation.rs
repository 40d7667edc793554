//! Conversations: engine-neutral ordered messages, and the lock on each.

use serde::{Deserialize, Serialize};

use crate::id::{ConversationId, Epoch, WorkspaceId};
use crate::limits::MAX_NAME;
use crate::message::Position;
use crate::time::Timestamp;

/// The name that somebody else's system has for a conversation. Creating one twice gives the same conversation.
///
/// The three parts are kept apart everywhere, so that no joined spelling of two names collides.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ExternalId {
    /// The project.
    pub project: String,
    /// The system that made the name, for example a chat or an issue tracker.
    pub provider: String,
    /// The name there.
    pub id: String,
}

impl ExternalId {
    /// The first part that is empty or longer than [`MAX_NAME`] bytes, if any.
    #[must_use]
    pub fn invalid_part(&self) -> Option<&'static str> {
        [("project", &self.project), ("provider", &self.provider), ("id", &self.id)]
            .into_iter()
            .find(|(_, part)| part.is_empty() || part.len() > MAX_NAME)
            .map(|(name, _)| name)
    }
}

/// One conversation, as stored.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Conversation {
    /// Its id.
    pub id: ConversationId,
    /// Its name elsewhere, if any.
    pub external_id: Option<ExternalId>,
    /// A title for people; may be empty.
    pub title: String,
    /// A flag only: sending un-archives, running and waiting turns go on.
    pub archived: bool,
    /// `seq` of the newest message; 0 when there is none.
    pub last_seq: u64,
    /// The last position given.
    pub last_position: Position,
    /// The newest cursor value.
    pub last_cursor: u64,
    /// Changes up to this cursor value are pruned; 0 when none.
    pub pruned_through: u64,
    /// The epoch of the lock's newest owner.
    pub epoch: Epoch,
    /// The agent of the newest promoted turn.
    pub last_agent: Option<String>,
    /// The workspace of the newest promoted turn.
    pub last_workspace_id: Option<WorkspaceId>,
    /// When it was created.
    pub create_time: Timestamp,
    /// When it last changed.
    pub update_time: Timestamp,
}
