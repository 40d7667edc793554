//! Cancel, in every place where a turn can be (S44).

use pretty_assertions::assert_eq;
use roundhouse_proto::control::v1::{TurnStatus, attention};
use roundhouse_proto::engine::v1::event_body::Kind;
use tonic::Code;

use crate::support::runner::{Call, Opening, Reply, cancelled, completed, text};
use crate::support::{World, assert_whole, kinds, reason};

#[tokio::test]
async fn s44_a_waiting_turn_ends_at_once_and_its_message_stays_out_of_the_history() {
    let mut world = World::new().await;
    world.runner.state().reply = Reply::Hold;
    let conversation = world.conversation().await;
    let first = world.send(&conversation, "first").await;
    let waiting = world.send(&conversation, "never").await;
    let last = world.send(&conversation, "last").await;
    let answer = world.cancel(&waiting.turn_id).await;
    assert_eq!(answer.turn.unwrap().status(), TurnStatus::Cancelled);
    assert!(!answer.already_ended);
    let (_, events) = world.finish(&waiting).await;
    assert_whole(&events);
    world.runner.sent(&first.turn_id).await;
    world.runner.complete(&first.turn_id, "a");
    world.runner.sent(&last.turn_id).await;
    let messages = world.messages(&conversation).await;
    let never = messages.iter().find(|m| m.text == "never").unwrap();
    assert_eq!(never.position, None);
    assert_eq!(world.runner.opens().len(), 2);
}

#[tokio::test]
async fn s44_a_turn_that_waits_for_its_workspace_is_cancelled_without_its_runner() {
    let mut world = World::new().await;
    world.runner.state().reply = Reply::Hold;
    let (a, b) = (world.conversation().await, world.conversation().await);
    let holder = world.send(&a, "holds").await;
    world.runner.sent(&holder.turn_id).await;
    let waiter = world.send_as(&b, "waits", "builder", "/w/a/inner").await;
    let waiting = loop {
        if let Some(waiting) = world.turn(&waiter.turn_id).await.waiting {
            break waiting;
        }
        tokio::task::yield_now().await;
    };
    assert_eq!(waiting.reason(), attention::Reason::WaitingForWorkspace);
    assert_eq!(waiting.held_by_turn_id, holder.turn_id, "a directory within a held one is held");
    world.cancel(&waiter.turn_id).await;
    let (waiter, events) = world.finish(&waiter).await;
    assert_eq!(waiter.status(), TurnStatus::Cancelled);
    assert_whole(&events);
    assert_eq!(world.runner.count(|call| matches!(call, Call::Cancel(_))), 0);
    world.runner.complete(&holder.turn_id, "done");
    let (holder, _) = world.finish(&holder).await;
    assert_eq!(holder.status(), TurnStatus::Completed);
}

#[tokio::test]
async fn s44_a_cancel_while_the_engine_starts_reaches_the_runner_at_once() {
    let mut world = World::new().await;
    world.runner.state().openings.push_back(Opening::Hang);
    let conversation = world.conversation().await;
    let turn = world.send(&conversation, "hello").await;
    world
        .runner
        .wait("the opening", |s| s.calls.iter().any(|c| matches!(c, Call::Open(_))).then_some(()))
        .await;
    world.cancel(&turn.turn_id).await;
    let (turn, events) = world.finish(&turn).await;
    assert_eq!(turn.status(), TurnStatus::Cancelled);
    assert_whole(&events);
    assert!(world.runner.sends().is_empty());
    let next = world.send(&conversation, "next").await;
    let (next, _) = world.finish(&next).await;
    assert_eq!(next.status(), TurnStatus::Completed);
}

#[tokio::test]
async fn s45_a_running_turn_keeps_its_text_and_its_session() {
    let mut world = World::new().await;
    world.runner.state().reply = Reply::Hold;
    let conversation = world.conversation().await;
    let turn = world.send(&conversation, "hello").await;
    world.runner.sent(&turn.turn_id).await;
    world.runner.emit(&turn.turn_id, text("t1", "half an answer"));
    world.until(&turn, TurnStatus::Running).await;
    world.cancel(&turn.turn_id).await;
    world.cancel(&turn.turn_id).await;
    let (turn, events) = world.finish(&turn).await;
    assert_eq!(turn.status(), TurnStatus::Cancelled);
    assert_whole(&events);
    let answer = world.turn(&turn.turn_id).await.answer.unwrap();
    assert_eq!((answer.text.as_str(), answer.incomplete), ("half an answer", true));
    world.runner.acknowledged(&turn.turn_id).await;
    world.runner.state().reply = Reply::Echo;
    let next = world.send(&conversation, "next").await;
    let (next, _) = world.finish(&next).await;
    assert_eq!(next.status(), TurnStatus::Completed);
    let opens = world.runner.opens();
    assert_eq!(opens[0].session_id, opens[1].session_id);
    assert!(opens[1].context.contains("half an answer") && opens[1].context.contains("interrupted"));
}

#[tokio::test]
async fn s44_after_the_end_and_for_an_unknown_turn_a_cancel_changes_nothing() {
    let mut world = World::new().await;
    let conversation = world.conversation().await;
    let turn = world.send(&conversation, "hello").await;
    let (done, _) = world.finish(&turn).await;
    let answer = world.cancel(&turn.turn_id).await;
    assert!(answer.already_ended);
    assert_eq!(answer.turn.unwrap(), done);
    let request = roundhouse_proto::control::v1::CancelTurnRequest {
        request_id: String::new(),
        turn_id: "trn_unknown".into(),
    };
    let status = world.client.cancel_turn(request).await.unwrap_err();
    assert_eq!((status.code(), reason(&status).as_str()), (Code::NotFound, "TURN_NOT_FOUND"));
    assert_eq!(world.runner.count(|call| matches!(call, Call::Cancel(_))), 0);
}

#[tokio::test]
async fn s7_an_engine_that_finishes_during_a_cancel_ends_cancelled_and_keeps_its_text() {
    let mut world = World::new().await;
    {
        let mut state = world.runner.state();
        state.reply = Reply::Hold;
        state.stubborn = true;
    }
    let conversation = world.conversation().await;
    let turn = world.send(&conversation, "hello").await;
    world.until(&turn, TurnStatus::Running).await;
    world.cancel(&turn.turn_id).await;
    let cancelled = |s: &crate::support::runner::State| (!s.cancelled.is_empty()).then_some(());
    world.runner.wait("the cancel", cancelled).await;
    world.runner.emit(&turn.turn_id, completed("finished anyway"));
    let (turn, events) = world.finish(&turn).await;
    assert_eq!(turn.status(), TurnStatus::Cancelled);
    assert_whole(&events);
    assert!(
        kinds(&events).iter().any(|kind| matches!(kind, Kind::Notice(n) if n.message.contains("finished")))
    );
    let answer = world.turn(&turn.turn_id).await.answer.unwrap();
    assert_eq!((answer.text.as_str(), answer.incomplete), ("finished anyway", false));
}

#[tokio::test]
async fn a_cancel_is_delivered_when_the_runner_is_back() {
    let mut world = World::new().await;
    world.runner.state().reply = Reply::Hold;
    let conversation = world.conversation().await;
    let turn = world.send(&conversation, "hello").await;
    world.until(&turn, TurnStatus::Running).await;
    world.runner.deaf(true);
    let answer = world.cancel(&turn.turn_id).await;
    assert_eq!(answer.turn.unwrap().status(), TurnStatus::Cancelling);
    world.runner.deaf(false);
    let (turn, _) = world.finish(&turn).await;
    assert_eq!(turn.status(), TurnStatus::Cancelled);
}

#[tokio::test]
async fn a_late_cancel_never_touches_the_next_turn() {
    let mut world = World::new().await;
    world.runner.state().reply = Reply::Hold;
    let conversation = world.conversation().await;
    let first = world.send(&conversation, "one").await;
    let second = world.send(&conversation, "two").await;
    world.runner.sent(&first.turn_id).await;
    world.runner.emit(&first.turn_id, cancelled());
    world.until(&second, TurnStatus::Running).await;
    assert!(world.cancel(&first.turn_id).await.already_ended);
    world.runner.complete(&second.turn_id, "fine");
    let (second, _) = world.finish(&second).await;
    assert_eq!(second.status(), TurnStatus::Completed);
}

#[tokio::test]
async fn s44_a_turn_that_waits_for_a_runner_that_is_away_is_cancelled_at_once() {
    let mut world = World::new().await;
    let conversation = world.conversation().await;
    let first = world.send(&conversation, "one").await;
    world.finish(&first).await;
    world.runner.acknowledged(&first.turn_id).await;
    world.runner.deaf(true);
    let turn = world.send_as(&conversation, "two", "", "").await;
    world.cancel(&turn.turn_id).await;
    let (turn, events) = world.finish(&turn).await;
    assert_eq!(turn.status(), TurnStatus::Cancelled);
    assert_whole(&events);
    assert_eq!(world.workspace().await.held_by_turn_id, "");
}
