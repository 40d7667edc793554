//! Runners, as the control plane knows them.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::id::{ConversationId, Epoch, RunnerId, TurnId};
use crate::time::Timestamp;

/// A directory under which a runner has workspaces.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Root {
    /// Its canonical path.
    pub path: String,
    /// Whether its workspaces may configure engines.
    pub trusted: bool,
}

/// What a runner says of itself when it registers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunnerInfo {
    /// Its id.
    pub id: RunnerId,
    /// The name people see, for example its host name.
    pub name: String,
    /// Where its services are reached.
    pub address: String,
    /// Its version.
    pub version: String,
    /// The protocol version it speaks.
    pub protocol_version: u32,
    /// Its roots.
    pub roots: Vec<Root>,
    /// The boot id of its host.
    pub boot_id: String,
    /// What else it says of itself (engines, isolation, limits), encoded; opaque here.
    pub description: Vec<u8>,
}

/// What a returning runner still knows.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunnerClaims {
    /// The highest epoch it has persisted, per conversation.
    pub epochs: Vec<(ConversationId, Epoch)>,
    /// Turns whose end nobody acknowledged, and turns that still run.
    pub turns: Vec<TurnId>,
}

/// One runner, as stored.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Runner {
    /// What it said of itself last.
    pub info: RunnerInfo,
    /// It finishes what it has and gets nothing new.
    pub draining: bool,
    /// When it registered first.
    pub create_time: Timestamp,
    /// When it registered last.
    pub register_time: Timestamp,
    /// When it was last heard of.
    pub heartbeat_time: Timestamp,
}

impl Runner {
    /// Whether nothing was heard of it for longer than `runner_lost_after`.
    #[must_use]
    pub fn is_silent(&self, now: Timestamp, runner_lost_after: Duration) -> bool {
        now.since(self.heartbeat_time) > runner_lost_after
    }
}

/// What a reported epoch means for a conversation: the counter never falls, and an active owner whose epoch is
/// below the report was overtaken by an owner we forgot (a restored backup), so it needs a new one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EpochRaise {
    /// The conversation's counter after it.
    pub counter: Epoch,
    /// The active turn's new epoch, if it needs one.
    pub owner: Option<Epoch>,
}

/// Applies a runner's report to a conversation's counter and its active turn's epoch.
#[must_use]
pub fn raise_epoch(counter: Epoch, owner: Option<Epoch>, reported: Epoch) -> EpochRaise {
    let raised = counter.max(reported);
    match owner {
        Some(epoch) if epoch < reported => EpochRaise { counter: raised.next(), owner: Some(raised.next()) },
        Some(_) | None => EpochRaise { counter: raised, owner: None },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_never_lowers_the_counter() {
        assert_eq!(raise_epoch(Epoch(7), None, Epoch(3)), EpochRaise { counter: Epoch(7), owner: None });
        assert_eq!(raise_epoch(Epoch(3), None, Epoch(7)), EpochRaise { counter: Epoch(7), owner: None });
    }

    #[test]
    fn the_same_owner_keeps_its_epoch_and_an_overtaken_one_gets_a_higher() {
        let same = raise_epoch(Epoch(4), Some(Epoch(4)), Epoch(4));
        assert_eq!(same, EpochRaise { counter: Epoch(4), owner: None });
        let overtaken = raise_epoch(Epoch(4), Some(Epoch(4)), Epoch(9));
        assert_eq!(overtaken, EpochRaise { counter: Epoch(10), owner: Some(Epoch(10)) });
    }

    #[test]
    fn a_clock_that_goes_backwards_makes_nobody_silent() {
        assert_eq!(Timestamp(5).since(Timestamp(9)), Duration::ZERO);
    }
}
