//! Workspaces and slots: one turn at a time per directory, its parents and its children.

use serde::{Deserialize, Serialize};

use crate::id::{ConversationId, RunnerId, TurnId, WorkspaceId};
use crate::time::Timestamp;
use crate::turn::TurnState;

/// A directory under one of a runner's roots, as stored.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Workspace {
    /// Its id, derived from the other two.
    pub id: WorkspaceId,
    /// The runner.
    pub runner_id: RunnerId,
    /// Its canonical path there.
    pub path: String,
}

impl Workspace {
    /// The workspace of a path that its runner resolved.
    #[must_use]
    pub fn new(runner_id: RunnerId, canonical_path: impl Into<String>) -> Self {
        let path = canonical_path.into();
        Self { id: WorkspaceId::derive(&runner_id, &path), runner_id, path }
    }
}

/// Whether two canonical paths are the same directory or one lies in the other. Whole components count:
/// `/a/b` and `/a/bc` are strangers.
#[must_use]
pub fn overlaps(a: &str, b: &str) -> bool {
    let (a, b) = (a.trim_end_matches('/'), b.trim_end_matches('/'));
    let inside = |outer: &str, inner: &str| {
        inner.strip_prefix(outer).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    };
    inside(a, b) || inside(b, a)
}

/// Who has a workspace's slot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SlotHolder {
    /// The workspace whose slot it is: the same one, a parent or a child.
    pub workspace: Workspace,
    /// The turn.
    pub turn_id: TurnId,
    /// Its conversation.
    pub conversation_id: ConversationId,
    /// The turn's state. LOST: it holds the slot until its runner is back or a person frees it.
    pub state: TurnState,
    /// Since when.
    pub time: Timestamp,
}

/// A turn that waits for a slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlotWaiter {
    /// The turn.
    pub turn_id: TurnId,
    /// Its workspace's path.
    pub path: String,
    /// Its number in the order of promotion.
    pub promotion: u64,
}

/// What became of a turn's wish for a slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SlotDecision {
    /// It has the slot (perhaps already had it).
    Take,
    /// Somebody else has it, or a parent's or child's.
    Held(SlotHolder),
    /// A turn that was promoted earlier waits for it, or for a parent's or child's.
    Behind(TurnId),
}

/// Decides over a slot: `holders` are the slots taken on the same runner, `waiters` the promoted turns of the
/// same runner that have none. Order is by promotion.
#[must_use]
pub fn decide_slot(want: &SlotWaiter, holders: &[SlotHolder], waiters: &[SlotWaiter]) -> SlotDecision {
    if holders.iter().any(|h| h.turn_id == want.turn_id) {
        return SlotDecision::Take;
    }
    // A lost turn's slot is told first: waiting for it may never end.
    let mut held = holders.iter().filter(|h| overlaps(&h.workspace.path, &want.path)).collect::<Vec<_>>();
    held.sort_by_key(|h| h.state != TurnState::Lost);
    if let Some(holder) = held.first() {
        return SlotDecision::Held((*holder).clone());
    }
    let first = waiters
        .iter()
        .filter(|w| {
            w.turn_id != want.turn_id && w.promotion < want.promotion && overlaps(&w.path, &want.path)
        })
        .min_by_key(|w| w.promotion);
    match first {
        Some(waiter) => SlotDecision::Behind(waiter.turn_id.clone()),
        None => SlotDecision::Take,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn runner() -> RunnerId {
        RunnerId::parse("run_1").unwrap()
    }

    fn turn(n: u64) -> TurnId {
        TurnId::parse(format!("trn_{n}")).unwrap()
    }

    fn holder(path: &str, n: u64, state: TurnState) -> SlotHolder {
        SlotHolder {
            workspace: Workspace::new(runner(), path),
            turn_id: turn(n),
            conversation_id: ConversationId::parse("cnv_1").unwrap(),
            state,
            time: Timestamp(0),
        }
    }

    fn waiter(path: &str, n: u64) -> SlotWaiter {
        SlotWaiter { turn_id: turn(n), path: path.into(), promotion: n }
    }

    #[test]
    fn parents_and_children_overlap_and_neighbours_do_not() {
        for (a, b, want) in [
            ("/a/b", "/a/b", true),
            ("/a", "/a/b", true),
            ("/a/b/c", "/a", true),
            ("/a/b", "/a/bc", false),
            ("/a/b", "/a/c", false),
            ("/", "/a", true),
            ("/a/", "/a/b", true),
        ] {
            assert_eq!(overlaps(a, b), want, "{a} {b}");
            assert_eq!(overlaps(b, a), want, "{b} {a}");
        }
    }

    #[test]
    fn a_held_parent_or_child_holds_a_workspace_too() {
        let held = holder("/w", 1, TurnState::Running);
        let decision = decide_slot(&waiter("/w/sub", 2), std::slice::from_ref(&held), &[]);
        assert_eq!(decision, SlotDecision::Held(held));
        let decision = decide_slot(&waiter("/other", 2), &[holder("/w", 1, TurnState::Running)], &[]);
        assert_eq!(decision, SlotDecision::Take);
    }

    #[test]
    fn the_slot_goes_by_promotion() {
        let waiters = [waiter("/w", 3), waiter("/w", 2), waiter("/elsewhere", 1)];
        assert_eq!(decide_slot(&waiter("/w", 3), &[], &waiters), SlotDecision::Behind(turn(2)));
        assert_eq!(decide_slot(&waiter("/w", 2), &[], &waiters), SlotDecision::Take);
    }

    #[test]
    fn taking_twice_is_taking_once_and_a_lost_holder_is_told_first() {
        let mine = holder("/w", 2, TurnState::Dispatching);
        assert_eq!(decide_slot(&waiter("/w", 2), &[mine], &[]), SlotDecision::Take);
        let (busy, lost) = (holder("/w/a", 1, TurnState::Running), holder("/w/b", 2, TurnState::Lost));
        let decision = decide_slot(&waiter("/w", 9), &[busy, lost.clone()], &[]);
        assert_eq!(decision, SlotDecision::Held(lost));
    }
}
