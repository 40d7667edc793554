//! Permission requests: stored, listed, answered once, told until settled.

use pretty_assertions::assert_eq;
use roundhouse_proto::control::v1 as control;
use roundhouse_proto::control::v1::permission::State;
use roundhouse_proto::control::v1::{TurnStatus, attention};
use roundhouse_proto::engine::v1 as engine;
use roundhouse_proto::engine::v1::event_body::Kind;
use roundhouse_proto::engine::v1::{PermissionDecider, PermissionDecision};
use tonic::Code;

use crate::support::runner::{Call, Reply};
use crate::support::{World, assert_whole, reason};

fn ask(id: &str) -> Kind {
    Kind::PermissionRequest(engine::PermissionRequestEvent {
        request_id: id.into(),
        tool: "Bash".into(),
        input_json: r#"{"command":"ls"}"#.into(),
        title: "run ls".into(),
        ..Default::default()
    })
}

fn answer(id: &str, decision: PermissionDecision) -> control::AnswerPermissionRequest {
    control::AnswerPermissionRequest {
        request_id: String::new(),
        permission_request_id: id.into(),
        decision: decision.into(),
        feedback: "because".into(),
    }
}

async fn list(world: &mut World, include_decided: bool) -> Vec<control::Permission> {
    let request = control::ListPermissionsRequest { include_decided, ..Default::default() };
    world.client.list_permissions(request).await.unwrap().into_inner().permissions
}

async fn asked(world: &mut World) -> control::Turn {
    world.runner.state().reply = Reply::Hold;
    let conversation = world.conversation().await;
    let turn = world.send(&conversation, "hello").await;
    world.runner.sent(&turn.turn_id).await;
    world.runner.emit(&turn.turn_id, ask("spl_1.7"));
    world.until(&turn, TurnStatus::WaitingForPermission).await
}

#[tokio::test]
async fn the_first_answer_wins_and_the_turn_goes_on() {
    let mut world = World::new().await;
    let turn = asked(&mut world).await;
    let open = list(&mut world, false).await;
    assert_eq!(open.len(), 1);
    assert_eq!((open[0].state(), open[0].turn_id.as_str()), (State::Open, turn.turn_id.as_str()));
    assert_eq!(open[0].request.as_ref().unwrap().input_json, r#"{"command":"ls"}"#);
    let waiting = world.turn(&turn.turn_id).await.waiting.unwrap();
    assert_eq!(waiting.reason(), attention::Reason::Permission);
    let mut second_client = world.client.clone();
    let first = world.client.answer_permission(answer("spl_1.7", PermissionDecision::Allow)).await.unwrap();
    let second = second_client.answer_permission(answer("spl_1.7", PermissionDecision::Deny)).await.unwrap();
    assert!(first.into_inner().accepted);
    let second = second.into_inner();
    assert!(!second.accepted);
    assert_eq!(second.permission.unwrap().decision(), PermissionDecision::Allow);
    world.until(&turn, TurnStatus::Running).await;
    world.runner.complete(&turn.turn_id, "done");
    let (turn, events) = world.finish(&turn).await;
    assert_eq!(turn.status(), TurnStatus::Completed);
    assert_whole(&events);
    assert!(list(&mut world, false).await.is_empty());
    let decided = list(&mut world, true).await;
    assert_eq!(
        (decided[0].state(), decided[0].decision(), decided[0].decider()),
        (State::Decided, PermissionDecision::Allow, PermissionDecider::Client)
    );
    let told: Vec<_> = world
        .runner
        .state()
        .calls
        .iter()
        .filter_map(
            |call| if let Call::Answer(a) = call { Some((a.decision(), a.feedback.clone())) } else { None },
        )
        .collect();
    assert_eq!(told, [(PermissionDecision::Allow, "because".to_owned())]);
}

#[tokio::test]
async fn an_answer_is_told_until_it_is_settled_over_breaks_and_restarts() {
    let mut world = World::new().await;
    world.runner.state().mute = true;
    let turn = asked(&mut world).await;
    world.client.answer_permission(answer("spl_1.7", PermissionDecision::Deny)).await.unwrap();
    let told = |n: usize| {
        move |s: &crate::support::runner::State| {
            (s.calls.iter().filter(|call| matches!(call, Call::Answer(_))).count() >= n).then_some(())
        }
    };
    world.runner.wait("the answer", told(1)).await;
    world.runner.wait("the answer again", told(2)).await;
    assert_eq!(list(&mut world, false).await[0].state(), State::Answered);
    world.runner.break_streams();
    world.crash().await;
    let before = world.runner.count(|call| matches!(call, Call::Answer(_)));
    world.restart().await;
    world.runner.wait("the answer after the restart", told(before + 1)).await;
    world.runner.state().mute = false;
    world.until(&turn, TurnStatus::Running).await;
    world.runner.complete(&turn.turn_id, "done");
    let (_, events) = world.finish(&turn).await;
    assert_whole(&events);
}

#[tokio::test]
async fn the_runners_word_beats_a_stored_answer() {
    let mut world = World::new().await;
    world.runner.state().mute = true;
    let turn = asked(&mut world).await;
    world.client.answer_permission(answer("spl_1.7", PermissionDecision::Allow)).await.unwrap();
    world.runner.emit(
        &turn.turn_id,
        Kind::PermissionAnswer(engine::PermissionAnswerEvent {
            request_id: "spl_1.7".into(),
            decision: PermissionDecision::Deny.into(),
            decider: PermissionDecider::Deadline.into(),
            feedback: String::new(),
        }),
    );
    world.until(&turn, TurnStatus::Running).await;
    let decided = list(&mut world, true).await;
    assert_eq!(
        (decided[0].decision(), decided[0].decider()),
        (PermissionDecision::Deny, PermissionDecider::Deadline)
    );
    let late = world.client.answer_permission(answer("spl_1.7", PermissionDecision::Allow)).await.unwrap();
    assert!(!late.into_inner().accepted);
}

#[tokio::test]
async fn a_cancel_with_a_permission_open_closes_it() {
    let mut world = World::new().await;
    let turn = asked(&mut world).await;
    world.cancel(&turn.turn_id).await;
    let (turn, events) = world.finish(&turn).await;
    assert_eq!(turn.status(), TurnStatus::Cancelled);
    assert_whole(&events);
    assert!(list(&mut world, false).await.is_empty());
}

#[tokio::test]
async fn what_is_no_answer_is_refused() {
    let mut world = World::new().await;
    let unknown = answer("spl_9.9", PermissionDecision::Allow);
    let status = world.client.answer_permission(unknown).await.unwrap_err();
    assert_eq!((status.code(), reason(&status).as_str()), (Code::NotFound, "PERMISSION_NOT_FOUND"));
    let undecided = answer("spl_9.9", PermissionDecision::Unspecified);
    let status = world.client.answer_permission(undecided).await.unwrap_err();
    assert_eq!((status.code(), reason(&status).as_str()), (Code::InvalidArgument, "FIELD_INVALID"));
}
