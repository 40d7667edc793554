//! Sessions: resumed, replaced, retried.

use pretty_assertions::assert_eq;
use roundhouse_control_plane::failpoint::hook;
use roundhouse_proto::control::v1 as control;
use roundhouse_proto::control::v1::session::State;
use roundhouse_proto::control::v1::session_service_client::SessionServiceClient;
use roundhouse_proto::control::v1::{PromptChange, Role, TurnStatus};
use roundhouse_proto::engine::v1 as engine;
use roundhouse_proto::engine::v1::event_body::Kind;
use roundhouse_proto::engine::v1::{FailureReason, Origin};
use tonic::Code;

use crate::support::runner::{Opening, Reply, agent, failed, text};
use crate::support::{LIMIT, World, assert_whole, failure, kinds, reason};

pub async fn sessions(world: &World, conversation: &str) -> Vec<control::Session> {
    let mut client = SessionServiceClient::connect(format!("http://{}", world.address())).await.unwrap();
    let request = control::ListSessionsRequest { conversation_id: conversation.into(), ..Default::default() };
    client.list_sessions(request).await.unwrap().into_inner().sessions
}

#[tokio::test]
async fn s16_an_unusable_session_is_replaced_in_the_same_turn_with_the_whole_history() {
    let mut world = World::new().await;
    let conversation = world.conversation().await;
    let first = world.send(&conversation, "one").await;
    world.finish(&first).await;
    world.runner.state().openings.push_back(Opening::Unusable("its file is gone"));
    let second = world.send(&conversation, "two").await;
    let (second, events) = world.finish(&second).await;
    assert_eq!(second.status(), TurnStatus::Completed);
    assert_eq!((second.origin(), second.history_given), (Origin::Replaced, true));
    assert_whole(&events);
    let told: Vec<_> = kinds(&events)
        .into_iter()
        .filter_map(|kind| if let Kind::Session(session) = kind { Some(session) } else { None })
        .map(|session| (session.state(), session.origin(), session.reason, session.history_given))
        .collect();
    use engine::session_event::State as S;
    assert_eq!(told[0], (S::Unusable, Origin::Unspecified, "its file is gone".to_owned(), false));
    assert_eq!(told[1], (S::Opened, Origin::Replaced, String::new(), true));
    let opens = world.runner.opens();
    assert_eq!(opens.len(), 3);
    assert_eq!((opens[2].replaces.as_str(), &opens[2].native_ref), (opens[0].session_id.as_str(), &None));
    assert!(opens[2].context.contains("one") && opens[2].context.contains("echo: one"));
    assert!(!opens[2].context.contains("two"), "the message itself is not context");
    let sessions = sessions(&world, &conversation).await;
    assert_eq!(sessions.len(), 2, "the old row is kept");
    assert_eq!(
        (sessions[0].state(), sessions[0].unusable_reason.as_str()),
        (State::Unusable, "its file is gone")
    );
    assert_eq!((sessions[1].state(), &sessions[1].replaces), (State::Active, &sessions[0].session_id));
    // The next turn goes on in the replacement.
    let third = world.send(&conversation, "three").await;
    let (third, _) = world.finish(&third).await;
    assert_eq!((third.origin(), third.session_id), (Origin::Resumed, sessions[1].session_id.clone()));
}

#[tokio::test]
async fn a_session_that_is_lost_before_the_message_was_taken_is_replaced_in_the_same_turn() {
    let mut world = World::new().await;
    let conversation = world.conversation().await;
    let first = world.send(&conversation, "one").await;
    world.finish(&first).await;
    world.runner.state().reply = Reply::Silent;
    let second = world.send(&conversation, "two").await;
    world.runner.sent(&second.turn_id).await;
    let old = world.runner.opens()[1].session_id.clone();
    {
        let mut state = world.runner.state();
        state.reply = Reply::Echo;
        // The runner waits for another session and takes the message again under it.
        state.turns.get_mut(&second.turn_id).unwrap().sent = false;
    }
    world.runner.emit(
        &second.turn_id,
        Kind::Session(engine::SessionEvent {
            state: engine::session_event::State::Unusable.into(),
            session_id: old.clone(),
            reason: "rows are missing".into(),
            ..Default::default()
        }),
    );
    let (second, events) = world.finish(&second).await;
    assert_eq!((second.status(), second.origin()), (TurnStatus::Completed, Origin::Replaced));
    assert_whole(&events);
    assert_ne!(second.session_id, old);
    let sends = world.runner.sends();
    assert_eq!(sends.last().unwrap().session_id, second.session_id);
}

#[tokio::test]
async fn a_replacement_that_is_unusable_too_fails_the_turn() {
    let mut world = World::new().await;
    let conversation = world.conversation().await;
    let first = world.send(&conversation, "one").await;
    world.finish(&first).await;
    world.runner.state().openings.extend([Opening::Unusable("a"), Opening::Unusable("b")]);
    let second = world.send(&conversation, "two").await;
    let (second, _) = world.finish(&second).await;
    assert_eq!(failure(&second), (FailureReason::SessionUnusable, true));
    let retried = world.retry(&second.turn_id).await.unwrap();
    let (retried, _) = world.finish(&retried).await;
    assert_eq!(retried.status(), TurnStatus::Completed);
}

#[tokio::test]
async fn what_an_opening_is_refused_for_is_the_turns_reason() {
    let mut world = World::new().await;
    let conversation = world.conversation().await;
    for (refusal, expected, retryable) in [
        ("ENGINE_MISSING", FailureReason::EngineMissing, true),
        ("AUTH", FailureReason::Auth, true),
        ("CONFIGURATION", FailureReason::Configuration, false),
        ("POLICY", FailureReason::Configuration, false),
        ("UNSUPPORTED", FailureReason::Unsupported, false),
        ("ENGINE_START_FAILED", FailureReason::Process, true),
        ("STORAGE", FailureReason::Storage, true),
    ] {
        world.runner.state().openings.push_back(Opening::Refuse(refusal));
        let turn = world.send(&conversation, "x").await;
        let (turn, events) = world.finish(&turn).await;
        assert_eq!(failure(&turn), (expected, retryable), "{refusal}");
        assert_whole(&events);
    }
    let turn = world.send(&conversation, "x").await;
    let (turn, _) = world.finish(&turn).await;
    assert_eq!(turn.status(), TurnStatus::Completed);
}

#[tokio::test]
async fn a_refused_opening_keeps_what_the_runner_said_of_it() {
    let mut world = World::new().await;
    let conversation = world.conversation().await;
    let refusal = Opening::RefuseAs("ENGINE_START_FAILED", "OUTPUT_INVALID");
    world.runner.state().openings.push_back(refusal);
    let turn = world.send(&conversation, "x").await;
    let (turn, _) = world.finish(&turn).await;
    assert_eq!(failure(&turn), (FailureReason::OutputInvalid, true));
    let told = turn.failure.unwrap();
    assert_eq!(
        (told.message.as_str(), told.next_action.as_str(), told.stderr_tail.as_str()),
        ("what happened", "do this", "last words")
    );
}

#[tokio::test]
async fn s47_a_runner_that_lost_its_power_before_the_message_gets_it_once() {
    let mut world = World::new().await;
    let conversation = world.conversation().await;
    world.runner.state().reply = Reply::Silent;
    let turn = world.send(&conversation, "hello").await;
    world.runner.sent(&turn.turn_id).await;
    let old = world.runner.opens()[0].session_id.clone();
    // The session proves unusable, so the turn has events, and another one is opened for it.
    let hook = hook("control-plane::after-open");
    world.runner.emit(
        &turn.turn_id,
        Kind::Session(engine::SessionEvent {
            state: engine::session_event::State::Unusable.into(),
            session_id: old.clone(),
            reason: "rows are missing".into(),
            ..Default::default()
        }),
    );
    tokio::time::timeout(LIMIT, hook.reached()).await.expect("the point is passed");
    world.crash().await;
    drop(hook);
    // Of all that the runner's host has nothing on disk.
    world.runner.forget();
    world.runner.state().reply = Reply::Echo;
    let before = world.runner.sends().len();
    world.restart().await;
    let (turn, events) = world.finish(&turn).await;
    assert_eq!(turn.status(), TurnStatus::Completed, "{turn:#?}");
    assert_whole(&events);
    let last = world.runner.opens().last().unwrap().clone();
    assert_eq!(last.session_id, turn.session_id);
    assert_eq!(last.last_number, 2, "it says what it holds");
    let sends = world.runner.sends();
    assert_eq!(sends.len(), before + 1, "given once");
    assert_eq!(sends.last().unwrap().session_id, turn.session_id);
}

#[tokio::test]
async fn s9_a_retry_keeps_message_position_and_agent_and_is_answered_once() {
    let mut world = World::new().await;
    world.runner.state().reply = Reply::Hold;
    let conversation = world.conversation().await;
    let first = world.send(&conversation, "question").await;
    world.runner.sent(&first.turn_id).await;
    world.runner.emit(&first.turn_id, text("t", "half"));
    world.runner.emit(&first.turn_id, failed("500"));
    let (first, _) = world.finish(&first).await;
    assert_eq!(failure(&first), (FailureReason::Process, true));
    {
        let mut state = world.runner.state();
        state.reply = Reply::Echo;
        state.agents.insert("builder".into(), agent("builder", "fake", "m-2", "Changed."));
    }
    let second = world.retry(&first.turn_id).await.unwrap();
    assert_eq!((&second.retry_of, &second.message_id), (&first.turn_id, &first.message_id));
    let (second, _) = world.finish(&second).await;
    assert_eq!((second.status(), second.model.as_str()), (TurnStatus::Completed, "m-1"));
    assert_eq!(second.agent_sha256, first.agent_sha256);
    let mut messages = world.messages(&conversation).await;
    messages.sort_by_key(|m| m.position);
    let told: Vec<_> = messages.iter().map(|m| (m.role(), m.text.as_str(), m.incomplete)).collect();
    assert_eq!(
        told,
        [
            (Role::User, "question", false),
            (Role::Agent, "half", true),
            (Role::Agent, "echo: question", false)
        ]
    );
    let sends = world.runner.sends();
    assert_eq!(sends.iter().map(|s| s.message_id.as_str()).collect::<Vec<_>>(), [&*first.message_id; 2]);
    // A completed turn, and one that has a successor, are not tried again.
    for turn in [&second.turn_id, &first.turn_id] {
        let status = world.retry(turn).await.unwrap_err();
        assert_eq!((status.code(), reason(&status).as_str()), (Code::FailedPrecondition, "WRONG_STATE"));
    }
}

#[tokio::test]
async fn s11_a_changed_prompt_reaches_the_resumed_session() {
    let mut world = World::new().await;
    let conversation = world.conversation().await;
    let first = world.send(&conversation, "one").await;
    world.finish(&first).await;
    world.runner.state().agents.insert("builder".into(), agent("builder", "fake", "m-1", "Build better."));
    let second = world.send(&conversation, "two").await;
    let (second, _) = world.finish(&second).await;
    let opens = world.runner.opens();
    assert_eq!(opens[0].session_id, opens[1].session_id);
    assert_eq!(opens[1].agent_prompt, "Build better.");
    assert_ne!(opens[0].agent_prompt_sha256, opens[1].agent_prompt_sha256);
    assert_eq!(second.prompt_change(), PromptChange::Applied);
    let third = world.send(&conversation, "three").await;
    let (third, _) = world.finish(&third).await;
    assert_eq!(third.prompt_change(), PromptChange::Unspecified, "it has not changed since");
}

#[tokio::test]
async fn s10_two_conversations_in_one_workspace_never_share_a_session() {
    let mut world = World::new().await;
    let (a, b) = (world.conversation().await, world.conversation().await);
    let first = world.send(&a, "one").await;
    let second = world.send(&b, "two").await;
    let (first, _) = world.finish(&first).await;
    let (second, _) = world.finish(&second).await;
    assert_ne!(first.session_id, second.session_id);
    assert_eq!((first.origin(), second.origin()), (Origin::Started, Origin::Started));
    assert!(world.runner.opens().iter().all(|open| open.context.is_empty()));
}
