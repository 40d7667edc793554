//! What needs a person: computed from stored facts, never stored.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::id::TurnId;
use crate::outcome::TurnError;
use crate::permission::Permission;
use crate::runner::Runner;
use crate::turn::TurnState;
use crate::workspace::SlotHolder;

named_enum! {
    /// Why a conversation needs attention.
    pub enum AttentionReason {
        /// An engine waits for an answer.
        PermissionPending = "PERMISSION_PENDING",
        /// A turn waits for its workspace.
        WaitingForWorkspace = "WAITING_FOR_WORKSPACE",
        /// A lost turn holds its workspace.
        WorkspaceHeldByLostTurn = "WORKSPACE_HELD_BY_LOST_TURN",
        /// The runner of an active turn is not heard of.
        RunnerSilent = "RUNNER_SILENT",
        /// The runner of an active turn that was not begun yet takes no new turns.
        RunnerDraining = "RUNNER_DRAINING",
        /// The newest turn failed.
        TurnFailed = "TURN_FAILED",
        /// The newest turn is lost.
        TurnLost = "TURN_LOST",
    }
}

/// One thing that needs attention.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attention {
    /// Why.
    pub reason: AttentionReason,
    /// The turn it is about.
    pub turn_id: TurnId,
    /// What to do next, in one sentence.
    pub next_action: String,
}

/// One turn, as attention sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TurnFacts {
    /// The turn.
    pub turn_id: TurnId,
    /// Its state.
    pub state: TurnState,
    /// What went wrong, if anything.
    pub error: Option<TurnError>,
    /// Whether it has its workspace's slot.
    pub holds_slot: bool,
}

/// What attention is computed from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AttentionFacts {
    /// The turn that owns the conversation's lock.
    pub active: Option<TurnFacts>,
    /// The turn that was promoted last, when it has ended.
    pub last_ended: Option<TurnFacts>,
    /// Open permissions of the active turn.
    pub permissions: Vec<Permission>,
    /// Who has the slot that the active turn waits for.
    pub held_by: Option<SlotHolder>,
    /// The runner of the active turn's workspace.
    pub runner: Option<Runner>,
}

/// How long a runner may be silent before people are told, in heartbeats' worth of time.
const SILENT_AFTER: Duration = Duration::from_secs(20);

/// What needs attention, the most urgent first.
#[must_use]
pub fn attention(facts: &AttentionFacts, now: crate::time::Timestamp) -> Vec<Attention> {
    let mut list = Vec::new();
    if let Some(active) = &facts.active {
        let turn_id = &active.turn_id;
        for permission in facts.permissions.iter().filter(|p| p.is_open() && p.intent.is_none()) {
            list.push(Attention {
                reason: AttentionReason::PermissionPending,
                turn_id: permission.turn_id.clone(),
                next_action: format!("allow or deny {}", permission.request.request_id),
            });
        }
        if let Some(runner) = facts.runner.as_ref().filter(|r| r.is_silent(now, SILENT_AFTER)) {
            list.push(Attention {
                reason: AttentionReason::RunnerSilent,
                turn_id: turn_id.clone(),
                next_action: format!("check runner {} ({})", runner.info.name, runner.info.id),
            });
        }
        let begun = active.state != TurnState::Dispatching;
        if let Some(runner) = facts.runner.as_ref().filter(|r| r.draining && !begun) {
            list.push(Attention {
                reason: AttentionReason::RunnerDraining,
                turn_id: turn_id.clone(),
                next_action: format!(
                    "end the draining of runner {} ({}), or start it again",
                    runner.info.name, runner.info.id
                ),
            });
        }
        if let Some(holder) = facts.held_by.as_ref().filter(|h| !active.holds_slot && h.turn_id != *turn_id) {
            let place = &holder.workspace.path;
            let (reason, next_action) = if holder.state == TurnState::Lost {
                (
                    AttentionReason::WorkspaceHeldByLostTurn,
                    format!("bring the runner back, or free {place} from lost turn {}", holder.turn_id),
                )
            } else {
                (
                    AttentionReason::WaitingForWorkspace,
                    format!("wait for turn {} in {place}, or cancel one of the two", holder.turn_id),
                )
            };
            list.push(Attention { reason, turn_id: turn_id.clone(), next_action });
        }
    } else if let Some(ended) = &facts.last_ended {
        let reason = match ended.state {
            TurnState::Failed => Some(AttentionReason::TurnFailed),
            TurnState::Lost => Some(AttentionReason::TurnLost),
            TurnState::Queued
            | TurnState::Dispatching
            | TurnState::Running
            | TurnState::WaitingForPermission
            | TurnState::Cancelling
            | TurnState::Completed
            | TurnState::Cancelled => None,
        };
        if let Some(reason) = reason {
            let next_action = match &ended.error {
                Some(error) => error.next_step.clone(),
                None => format!("retry turn {}", ended.turn_id),
            };
            list.push(Attention { reason, turn_id: ended.turn_id.clone(), next_action });
        }
    }
    list
}

#[cfg(test)]
mod tests;
