//! Tests of session choice and watermarks.

use std::collections::BTreeSet;

use super::*;
use crate::agent_file::{Effort, Permissions, Trigger};

fn agent(prompt: &str) -> AgentSnapshot {
    AgentSnapshot {
        file: ".agents/coder.md".into(),
        name: "coder".into(),
        description: "writes code".into(),
        engine: "claude-code".into(),
        model: "opus".into(),
        reasoning_effort: None,
        permissions: Permissions::Ask,
        enabled: true,
        triggers: BTreeSet::from([Trigger::Manual]),
        text: format!("---\nname: coder\n---\n{prompt}\n"),
        sha256: String::new(),
    }
}

fn conversation(n: u32) -> ConversationId {
    ConversationId::parse(format!("cnv_{n}")).unwrap()
}

fn workspace(n: u32) -> WorkspaceId {
    WorkspaceId::parse(format!("wsp_{n}")).unwrap()
}

fn session(n: u32, used: i64, agent: &AgentSnapshot) -> Session {
    Session {
        id: SessionId::parse(format!("ses_{n}")).unwrap(),
        conversation_id: conversation(1),
        workspace_id: workspace(1),
        agent_name: agent.name.clone(),
        engine: agent.engine.clone(),
        model: agent.model.clone(),
        prompt_sha256: agent.prompt_sha256(),
        state: SessionState::Active,
        native_ref: None,
        watermark: Position::START,
        replaces: None,
        created_by: TurnId::parse("trn_1").unwrap(),
        create_time: Timestamp(0),
        use_time: Timestamp(used),
    }
}

fn pick(sessions: &[Session], agent: &AgentSnapshot, prompt_change_on_resume: bool) -> Choice {
    let (conversation_id, workspace_id) = (conversation(1), workspace(1));
    let want = Want {
        conversation_id: &conversation_id,
        workspace_id: &workspace_id,
        agent,
        prompt_change_on_resume,
    };
    choose(sessions, &want, |from, to| (from, to) == ("sonnet", "opus"))
}

#[test]
fn s10_each_difference_makes_a_session_incompatible() {
    let agent = agent("Be brief.");
    let good = session(1, 5, &agent);
    let resume = Choice::Resume { session_id: good.id.clone(), prompt: PromptUse::Unchanged };
    assert_eq!(pick(std::slice::from_ref(&good), &agent, true), resume);
    let spoilers: [fn(&mut Session); 6] = [
        |s| s.conversation_id = conversation(2),
        |s| s.workspace_id = workspace(2),
        |s| s.agent_name = "other".into(),
        |s| s.engine = "codex".into(),
        |s| s.model = "haiku".into(),
        |s| s.state = SessionState::Unusable("gone".into()),
    ];
    for (index, spoil) in spoilers.iter().enumerate() {
        let mut bad = good.clone();
        spoil(&mut bad);
        assert_eq!(
            pick(&[bad], &agent, true),
            Choice::New { prompt: PromptUse::Initial },
            "difference {index}"
        );
    }
}

#[test]
fn s10_a_model_that_the_engine_can_continue_with_is_compatible_and_the_last_used_one_is_taken() {
    let agent = agent("Be brief.");
    let (mut older, newer) = (session(1, 5, &agent), session(2, 9, &agent));
    older.model = "sonnet".into();
    let choice = pick(&[newer.clone(), older.clone()], &agent, true);
    assert_eq!(choice, Choice::Resume { session_id: newer.id, prompt: PromptUse::Unchanged });
    let choice = pick(std::slice::from_ref(&older), &agent, true);
    assert_eq!(choice, Choice::Resume { session_id: older.id, prompt: PromptUse::Unchanged });
}

#[test]
fn s11_effort_keeps_the_session_and_a_changed_prompt_says_what_it_did() {
    let old = agent("Be brief.");
    let existing = session(1, 5, &old);
    let mut harder = old;
    harder.reasoning_effort = Some(Effort::High);
    let kept = Choice::Resume { session_id: existing.id.clone(), prompt: PromptUse::Unchanged };
    assert_eq!(pick(std::slice::from_ref(&existing), &harder, false), kept);
    let changed = agent("Be thorough.");
    let applied = Choice::Resume { session_id: existing.id.clone(), prompt: PromptUse::AppliedOnResume };
    assert_eq!(pick(std::slice::from_ref(&existing), &changed, true), applied);
    assert_eq!(pick(&[existing], &changed, false), Choice::New { prompt: PromptUse::NewSession });
}

#[test]
fn s10_switching_back_resumes_the_earlier_row_whatever_came_between() {
    let first = agent("Be brief.");
    let mut second = agent("Review.");
    second.name = "reviewer".into();
    second.engine = "codex".into();
    let rows = [session(1, 5, &first), session(2, 9, &second)];
    for (agent, row) in [(&first, &rows[0]), (&second, &rows[1]), (&first, &rows[0])] {
        let resume = Choice::Resume { session_id: row.id.clone(), prompt: PromptUse::Unchanged };
        assert_eq!(pick(&rows, agent, true), resume);
    }
}

#[test]
fn s10_switching_back_to_a_model_finds_its_session_before_one_that_could_go_on_with_it() {
    let agent = agent("Be brief.");
    let (earlier, mut later) = (session(1, 5, &agent), session(2, 9, &agent));
    later.model = "sonnet".into();
    let choice = pick(&[later, earlier.clone()], &agent, true);
    assert_eq!(choice, Choice::Resume { session_id: earlier.id, prompt: PromptUse::Unchanged });
}

#[test]
fn s61_a_new_session_stands_in_for_the_last_one_if_that_is_lost() {
    let agent = agent("Be brief.");
    let (older, mut newer) = (session(1, 5, &agent), session(2, 9, &agent));
    assert_eq!(stands_in_for(&[], &agent), None);
    assert_eq!(stands_in_for(&[older.clone(), newer.clone()], &agent), None, "both are well");
    newer.state = SessionState::Unusable("gone".into());
    assert_eq!(stands_in_for(&[older.clone(), newer.clone()], &agent), Some(&newer.id));
    let mut other = older.clone();
    other.engine = "codex".into();
    other.use_time = Timestamp(99);
    assert_eq!(
        stands_in_for(&[other, newer.clone()], &agent),
        Some(&newer.id),
        "another engine's is no matter"
    );
    let mut stand_in = session(3, 12, &agent);
    stand_in.replaces = Some(newer.id.clone());
    stand_in.agent_name = "other".into();
    assert_eq!(stands_in_for(&[newer, stand_in], &agent), None, "it has a replacement");
}

#[test]
fn what_was_given_beside_a_message_counts_when_the_message_was_taken() {
    assert_eq!(watermark_at_acceptance(Position(2), Position(5), Some(Position(4))), Position(5));
    assert_eq!(watermark_at_acceptance(Position(2), Position(5), Some(Position(6))), Position(6));
    assert_eq!(watermark_at_acceptance(Position(9), Position(5), None), Position(9));
}

#[test]
fn a_watermark_never_falls_and_moves_to_the_answer_only_when_the_turn_completed() {
    assert_eq!(watermark_at_end(Position(4), true, Some(Position(5))), Position(5));
    assert_eq!(watermark_at_end(Position(4), false, Some(Position(5))), Position(4));
    assert_eq!(watermark_at_end(Position(4), true, None), Position(4));
    assert_eq!(watermark_at_end(Position(9), true, Some(Position(5))), Position(9));
}
