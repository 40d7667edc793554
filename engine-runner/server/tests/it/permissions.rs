//! Permissions: asked, answered once, denied in time, and nobody's any more when the turn is stopped.

use pretty_assertions::assert_eq;
use roundhouse_proto::engine::v1::{
    AnswerPermissionRequest, FailureReason, Outcome, PermissionDecision,
    answer_permission_response::Result as Answered, event_body::Kind,
};

use crate::rig::{Client, Rig, Turn, With, kind, names, reason, signal, terminal};

const TEXT: &str = "[[bash ask:echo ran >> ran.txt]] [[text:after]]";

/// Opens a turn that asks, and waits for the request.
async fn asked(rig: &Rig, client: &mut Client, number: u64) -> (Turn, String) {
    let mut turn = Turn::new(rig, "cnv_1", "ses_1", &format!("trn_{number}"), number);
    turn.request.options.as_mut().unwrap().permissions = 1;
    turn.open(client).await.unwrap();
    turn.send(client, TEXT).await.unwrap();
    let mut follower = turn.follow(client, 0, false).await.unwrap();
    let events = follower.until(|kind| matches!(kind, Kind::PermissionRequest(_))).await.unwrap();
    match kind(events.last().unwrap()) {
        Some(Kind::PermissionRequest(request)) => {
            assert!(request.deadline.is_some() && request.tool == "Bash");
            (turn, request.request_id.clone())
        }
        other => panic!("{other:?}"),
    }
}

fn answer(turn: &Turn, request_id: &str, decision: PermissionDecision) -> AnswerPermissionRequest {
    AnswerPermissionRequest {
        request_id: request_id.to_owned(),
        epoch: turn.request.epoch,
        decision: decision.into(),
        feedback: "because".to_owned(),
        turn_id: turn.id(),
    }
}

#[tokio::test]
async fn the_first_answer_wins_and_the_tool_runs_once() {
    let rig = Rig::start().await.unwrap();
    let mut client = rig.client().await.unwrap();
    let (turn, id) = asked(&rig, &mut client, 1).await;
    assert!(!rig.work.join("ran.txt").exists());
    let mut results = Vec::new();
    for decision in [PermissionDecision::Allow, PermissionDecision::Deny, PermissionDecision::Allow] {
        let response = client.answer_permission(answer(&turn, &id, decision)).await.unwrap().into_inner();
        assert_eq!(response.decision(), PermissionDecision::Allow);
        results.push(response.result());
    }
    assert_eq!(results, [Answered::Accepted, Answered::AlreadyAnswered, Answered::AlreadyAnswered]);
    let unknown = client.answer_permission(answer(&turn, "spl_x.1", PermissionDecision::Allow)).await;
    assert_eq!(reason(&unknown.unwrap_err()), "PERMISSION_NOT_FOUND");
    let events = turn.follow(&mut client, 0, false).await.unwrap().all().await.unwrap();
    assert_eq!(terminal(&events).unwrap().outcome(), Outcome::Completed);
    let answers: Vec<_> =
        names(&events).into_iter().filter(|name| name.starts_with("permission_answer")).collect();
    assert_eq!(answers, ["permission_answer PERMISSION_DECISION_ALLOW PERMISSION_DECIDER_CLIENT"]);
    assert_eq!(std::fs::read_to_string(rig.work.join("ran.txt")).unwrap(), "ran\n");
    // After the end an answer is told what held.
    let late =
        client.answer_permission(answer(&turn, &id, PermissionDecision::Deny)).await.unwrap().into_inner();
    assert_eq!((late.result(), late.decision()), (Answered::AlreadyAnswered, PermissionDecision::Allow));
}

#[tokio::test]
async fn a_denied_tool_does_not_run_and_the_turn_goes_on() {
    let rig = Rig::start().await.unwrap();
    let mut client = rig.client().await.unwrap();
    let (turn, id) = asked(&rig, &mut client, 1).await;
    client.answer_permission(answer(&turn, &id, PermissionDecision::Deny)).await.unwrap();
    let events = turn.follow(&mut client, 0, false).await.unwrap().all().await.unwrap();
    assert_eq!(terminal(&events).unwrap().outcome(), Outcome::Completed, "{:?}", names(&events));
    assert!(!rig.work.join("ran.txt").exists());
    assert!(names(&events).contains(&"tool_result true".to_owned()), "{:?}", names(&events));
}

#[tokio::test]
async fn unanswered_it_is_denied_at_its_deadline_and_the_idle_timer_waits() {
    let with = With::set("permission_timeout", "1500ms").and("idle_timeout", "700ms");
    let rig = Rig::with(with).await.unwrap();
    let mut client = rig.client().await.unwrap();
    let (turn, _) = asked(&rig, &mut client, 1).await;
    let events = turn.follow(&mut client, 0, false).await.unwrap().all().await.unwrap();
    assert_eq!(terminal(&events).unwrap().outcome(), Outcome::Completed, "{:?}", names(&events));
    let answers: Vec<_> =
        names(&events).into_iter().filter(|name| name.starts_with("permission_answer")).collect();
    assert_eq!(answers, ["permission_answer PERMISSION_DECISION_DENY PERMISSION_DECIDER_DEADLINE"]);
    assert!(!rig.work.join("ran.txt").exists());
}

#[tokio::test]
async fn a_cancel_takes_the_question_back() {
    let rig = Rig::start().await.unwrap();
    let mut client = rig.client().await.unwrap();
    let (turn, id) = asked(&rig, &mut client, 1).await;
    turn.cancel(&mut client).await.unwrap();
    let events = turn.follow(&mut client, 0, false).await.unwrap().all().await.unwrap();
    assert_eq!(terminal(&events).unwrap().outcome(), Outcome::Cancelled);
    let answers: Vec<_> =
        names(&events).into_iter().filter(|name| name.starts_with("permission_answer")).collect();
    assert_eq!(answers, ["permission_answer PERMISSION_DECISION_DENY PERMISSION_DECIDER_CANCEL"]);
    let late =
        client.answer_permission(answer(&turn, &id, PermissionDecision::Allow)).await.unwrap().into_inner();
    assert_eq!(late.result(), Answered::AlreadyAnswered);
    assert!(!rig.work.join("ran.txt").exists());
}

#[tokio::test]
async fn a_question_survives_the_runner_and_its_answer_does_too() {
    let mut rig = Rig::start().await.unwrap();
    let mut client = rig.client().await.unwrap();
    let (turn, id) = asked(&rig, &mut client, 1).await;
    rig.service.kill().await.unwrap();
    rig.again().await.unwrap();
    let mut client = rig.client().await.unwrap();
    let response =
        client.answer_permission(answer(&turn, &id, PermissionDecision::Allow)).await.unwrap().into_inner();
    assert_eq!(response.result(), Answered::Accepted);
    let events = turn.follow(&mut client, 0, false).await.unwrap().all().await.unwrap();
    assert_eq!(terminal(&events).unwrap().outcome(), Outcome::Completed, "{:?}", names(&events));
    assert_eq!(std::fs::read_to_string(rig.work.join("ran.txt")).unwrap(), "ran\n");
}

#[tokio::test]
async fn a_keeper_that_stops_under_a_question_is_told_by_the_idle_timer() {
    let with = With::set("permission_timeout", "700ms")
        .and("idle_timeout", "1s")
        .and("keeper_timeout", "300ms")
        .and("cancel_interrupt_grace", "200ms")
        .and("cancel_term_grace", "200ms");
    let rig = Rig::with(with).await.unwrap();
    let mut client = rig.client().await.unwrap();
    let (turn, _) = asked(&rig, &mut client, 1).await;
    let keeper = turn.inspect(&mut client).await.unwrap().process.unwrap().keeper_pid;
    signal(u32::try_from(keeper).unwrap(), "STOP").unwrap();
    let events = turn.follow(&mut client, 0, false).await.unwrap().all().await.unwrap();
    let ended = terminal(&events).unwrap();
    assert_eq!(ended.failure.unwrap().reason(), FailureReason::IdleTimeout, "{:?}", names(&events));
    assert!(!rig.work.join("ran.txt").exists());
}

/// Faults while a turn asks.
#[cfg(feature = "failpoints")]
mod points {
    use pretty_assertions::assert_eq;

    use super::*;

    #[tokio::test]
    async fn a_line_that_a_broken_link_loses_is_put_again() {
        // The opening, the message, the answer.
        for point in ["runner::link_lost=1*fail", "runner::link_lost=2*fail", "runner::link_lost=3*fail"] {
            let rig = Rig::with(With::failpoint(point)).await.unwrap();
            let mut client = rig.client().await.unwrap();
            let (turn, id) = asked(&rig, &mut client, 1).await;
            client.answer_permission(answer(&turn, &id, PermissionDecision::Allow)).await.unwrap();
            let events = turn.follow(&mut client, 0, false).await.unwrap().all().await.unwrap();
            assert_eq!(
                terminal(&events).unwrap().outcome(),
                Outcome::Completed,
                "{point}: {:?}",
                names(&events)
            );
            let told = names(&events).iter().filter(|name| *name == "phase PHASE_DELIVERED").count();
            assert!(told <= 1, "{point}: {:?}", names(&events));
            assert_eq!(std::fs::read_to_string(rig.work.join("ran.txt")).unwrap(), "ran\n", "{point}");
        }
    }

    #[tokio::test]
    async fn an_answer_that_the_disk_refuses_ends_the_turn_and_leaves_no_gap() {
        let rig = Rig::with(With::failpoint("runner::answer_sync=fail")).await.unwrap();
        let mut client = rig.client().await.unwrap();
        let (turn, id) = asked(&rig, &mut client, 1).await;
        // A follower from before the fault, which sees the numbers live.
        let follower = turn.follow(&mut client, 0, false).await.unwrap();
        client.answer_permission(answer(&turn, &id, PermissionDecision::Allow)).await.unwrap_err();
        let events = follower.all().await.unwrap();
        let ended = terminal(&events).unwrap();
        assert_eq!(ended.outcome(), Outcome::Failed);
        assert_eq!(ended.failure.unwrap().reason(), FailureReason::Storage, "{:?}", names(&events));
        assert!(!rig.work.join("ran.txt").exists());
    }

    #[tokio::test]
    async fn a_denial_by_the_deadline_is_told_as_that_after_a_death_between_mark_and_event() {
        let with = With {
            failpoints: Some("runner::permission_decided=return"),
            ..With::set("permission_timeout", "500ms")
        };
        let mut rig = Rig::with(with).await.unwrap();
        let mut client = rig.client().await.unwrap();
        let (turn, _) = asked(&rig, &mut client, 1).await;
        rig.service.wait_exit(crate::rig::BOUND).await.unwrap();
        rig.again().await.unwrap();
        let mut client = rig.client().await.unwrap();
        let events = turn.follow(&mut client, 0, false).await.unwrap().all().await.unwrap();
        let answers: Vec<_> =
            names(&events).into_iter().filter(|name| name.starts_with("permission_answer")).collect();
        assert_eq!(answers, ["permission_answer PERMISSION_DECISION_DENY PERMISSION_DECIDER_DEADLINE"]);
        assert!(!rig.work.join("ran.txt").exists());
    }

    #[tokio::test]
    async fn a_message_that_makes_no_line_ends_the_turn_at_once_with_its_reason() {
        let rig = Rig::with(With::failpoint("runner::no_line=fail")).await.unwrap();
        let mut client = rig.client().await.unwrap();
        let turn = Turn::new(&rig, "cnv_1", "ses_1", "trn_1", 1);
        turn.open(&mut client).await.unwrap();
        turn.send(&mut client, "[[text:never]]").await.unwrap();
        // Long before the idle timer, which has its ten minutes here.
        let events = turn.follow(&mut client, 0, false).await.unwrap().all().await.unwrap();
        let failure = terminal(&events).unwrap().failure.unwrap();
        assert_eq!(failure.reason(), FailureReason::Process, "{:?}", names(&events));
        assert!(failure.message.contains("cannot be put into a line"), "{}", failure.message);
    }
}
