//! The queue of a conversation: who is next, and what promotion gives.

use serde::{Deserialize, Serialize};

use crate::id::{Epoch, TurnId};
use crate::message::Position;
use crate::turn::TurnState;

/// The counters of a conversation that turns draw from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counters {
    /// The epoch of the lock's newest owner.
    pub epoch: Epoch,
    /// The last position given.
    pub position: Position,
}

/// One turn, as the queue sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Waiting {
    /// The turn.
    pub turn_id: TurnId,
    /// Its state.
    pub state: TurnState,
    /// Its order of arrival among the turns of its conversation.
    pub order: u64,
    /// The place its message has already: a retry's.
    pub position: Option<Position>,
}

/// What promotion gives to a turn.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Promotion {
    /// The turn.
    pub turn_id: TurnId,
    /// The epoch of its lock.
    pub epoch: Epoch,
    /// Its message's place: a new one, for a retry the one it has.
    pub position: Position,
    /// The conversation's counters after it.
    pub counters: Counters,
}

/// What becomes of a new turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    /// The conversation is free: it is promoted at once.
    Promote,
    /// It waits.
    Wait,
    /// Too many wait already.
    Full,
}

/// Whether a new turn starts, waits or is refused. `active`: a turn owns the lock; `waiting`: how many wait;
/// `limit`: how many may, [`crate::limits::MAX_WAITING`] unless configured.
#[must_use]
pub const fn admit(active: bool, waiting: usize, limit: usize) -> Admission {
    if !active && waiting == 0 {
        Admission::Promote
    } else if waiting >= limit {
        Admission::Full
    } else {
        Admission::Wait
    }
}

/// The epoch and position of a turn that is promoted. A message that has a place keeps it.
#[must_use]
pub const fn promote(turn_id: TurnId, position: Option<Position>, counters: Counters) -> Promotion {
    let epoch = counters.epoch.next();
    let (position, last) = match position {
        Some(own) => (own, counters.position),
        None => (counters.position.next(), counters.position.next()),
    };
    Promotion { turn_id, epoch, position, counters: Counters { epoch, position: last } }
}

/// The next turn to be promoted, if the lock is free: whatever way the one before ended.
#[must_use]
pub fn promote_next(turns: &[Waiting], counters: Counters) -> Option<Promotion> {
    if turns.iter().any(|t| t.state.is_active()) {
        return None;
    }
    let next = turns.iter().filter(|t| t.state == TurnState::Queued).min_by_key(|t| t.order)?;
    Some(promote(next.turn_id.clone(), next.position, counters))
}

#[cfg(test)]
mod tests;
