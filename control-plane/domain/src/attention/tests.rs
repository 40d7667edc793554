//! Tests of attention.

use super::*;
use crate::id::{ConversationId, RunnerId};
use crate::outcome::Reason;
use crate::permission::{Decision, PermissionIntent, PermissionRequest};
use crate::runner::RunnerInfo;
use crate::time::Timestamp;
use crate::workspace::Workspace;

fn turn(n: u32) -> TurnId {
    TurnId::parse(format!("trn_{n}")).unwrap()
}

fn facts(state: TurnState) -> TurnFacts {
    TurnFacts { turn_id: turn(1), state, error: None, holds_slot: false }
}

fn reasons(facts: &AttentionFacts, now: i64) -> Vec<AttentionReason> {
    attention(facts, Timestamp(now)).into_iter().map(|a| a.reason).collect()
}

fn holder(state: TurnState) -> SlotHolder {
    SlotHolder {
        workspace: Workspace::new(RunnerId::parse("run_1").unwrap(), "/w"),
        turn_id: turn(2),
        conversation_id: ConversationId::parse("cnv_2").unwrap(),
        state,
        time: Timestamp(0),
    }
}

#[test]
fn a_quiet_conversation_needs_nobody() {
    assert_eq!(attention(&AttentionFacts::default(), Timestamp(0)), []);
    let done = AttentionFacts { last_ended: Some(facts(TurnState::Completed)), ..AttentionFacts::default() };
    assert_eq!(attention(&done, Timestamp(0)), []);
}

#[test]
fn a_permission_asks_until_it_is_answered() {
    let mut permission = Permission {
        request: PermissionRequest {
            request_id: "spl_1.7".into(),
            tool: "Bash".into(),
            title: "rm".into(),
            deadline: None,
            body: Vec::new(),
        },
        conversation_id: ConversationId::parse("cnv_1").unwrap(),
        turn_id: turn(1),
        create_time: Timestamp(0),
        intent: None,
        result: None,
        settle_time: None,
    };
    let with = |permission: &Permission| AttentionFacts {
        active: Some(facts(TurnState::WaitingForPermission)),
        permissions: vec![permission.clone()],
        ..AttentionFacts::default()
    };
    let list = attention(&with(&permission), Timestamp(0));
    assert_eq!(list.len(), 1);
    assert_eq!(list[0].next_action, "allow or deny spl_1.7");
    permission.intent = Some(PermissionIntent {
        decision: Decision::Allow,
        feedback: String::new(),
        actor: "ann".into(),
        time: Timestamp(1),
    });
    assert_eq!(reasons(&with(&permission), 0), []);
}

#[test]
fn a_wait_for_a_slot_says_who_holds_it() {
    let with = |state| AttentionFacts {
        active: Some(facts(TurnState::Dispatching)),
        held_by: Some(holder(state)),
        ..AttentionFacts::default()
    };
    assert_eq!(reasons(&with(TurnState::Running), 0), [AttentionReason::WaitingForWorkspace]);
    let lost = attention(&with(TurnState::Lost), Timestamp(0));
    assert_eq!(lost[0].reason, AttentionReason::WorkspaceHeldByLostTurn);
    assert!(lost[0].next_action.contains("trn_2"), "{}", lost[0].next_action);
}

#[test]
fn a_failed_turn_says_its_own_next_step_and_an_active_one_hides_it() {
    let mut failed = facts(TurnState::Failed);
    failed.error = Some(TurnError::new(Reason::Auth, "not logged in", "log in with claude /login"));
    let mut all = AttentionFacts { last_ended: Some(failed), ..AttentionFacts::default() };
    let list = attention(&all, Timestamp(0));
    assert_eq!(list[0].reason, AttentionReason::TurnFailed);
    assert_eq!(list[0].next_action, "log in with claude /login");
    all.active = Some(facts(TurnState::Running));
    assert_eq!(reasons(&all, 0), []);
}

#[test]
fn a_silent_runner_is_told_only_while_a_turn_needs_it() {
    let info = RunnerInfo {
        id: RunnerId::parse("run_1").unwrap(),
        name: "desk".into(),
        address: String::new(),
        version: String::new(),
        protocol_version: 1,
        roots: Vec::new(),
        boot_id: String::new(),
        description: Vec::new(),
    };
    let runner = Runner {
        info,
        draining: false,
        create_time: Timestamp(0),
        register_time: Timestamp(0),
        heartbeat_time: Timestamp(0),
    };
    let mut all = AttentionFacts {
        active: Some(facts(TurnState::Running)),
        runner: Some(runner),
        ..AttentionFacts::default()
    };
    assert_eq!(reasons(&all, 20_000_000), []);
    assert_eq!(reasons(&all, 20_000_001), [AttentionReason::RunnerSilent]);
    all.active = None;
    assert_eq!(reasons(&all, 20_000_001), []);
}
