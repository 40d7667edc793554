//! The control plane dies at each point and is started again.

use pretty_assertions::assert_eq;
use roundhouse_control_plane::failpoint::hook;
use roundhouse_proto::control::v1::{Role, TurnStatus};
use roundhouse_proto::engine::v1::Origin;
use roundhouse_proto::engine::v1::event_body::Kind;
use roundhouse_proto::engine::v1::phase_event::Phase;
use roundhouse_proto::engine::v1::session_event::State as SessionState;

use crate::support::runner::{Reply, agent, text};
use crate::support::{LIMIT, World, assert_whole, collect, events, kinds, message};

/// A turn whose control plane dies at `point` completes once after the restart, and the next one works.
async fn survives(point: &str) {
    let mut world = World::new().await;
    // With an echo everything comes at once, and nothing is appended before the end.
    let held = point == "before-append";
    world.runner.state().reply = if held { Reply::Hold } else { Reply::Echo };
    let conversation = world.conversation().await;
    let request = message(&conversation, "hello", "builder", "/w/a");
    let hook = hook(&format!("control-plane::{point}"));
    let call = {
        let (mut client, request) = (world.client.clone(), request.clone());
        tokio::spawn(async move { client.send_message(request).await })
    };
    tokio::time::timeout(LIMIT, hook.reached()).await.expect("the point is passed");
    world.crash().await;
    call.abort();
    drop(hook);
    world.restart().await;
    // The client got no answer, perhaps, and asks again.
    let again = world.client.send_message(request).await.unwrap().into_inner();
    assert!(again.repeated_request, "it was on disk before anything started");
    if held {
        let turn = &again.turn.as_ref().unwrap().turn_id;
        world.runner.state().reply = Reply::Echo;
        world.runner.complete(turn, "echo: hello");
    }
    let (turn, events) = world.finish(&again.turn.unwrap()).await;
    assert_eq!(turn.status(), TurnStatus::Completed, "{point}: {turn:#?}");
    assert_whole(&events);
    let accepted = kinds(&events)
        .iter()
        .filter(|kind| matches!(kind, Kind::Phase(phase) if phase.phase() == Phase::Accepted))
        .count();
    assert_eq!(accepted, 1);
    let messages = world.messages(&conversation).await;
    let told: Vec<_> = messages.iter().map(|m| (m.role(), m.text.as_str())).collect();
    assert_eq!(told, [(Role::User, "hello"), (Role::Agent, "echo: hello")]);
    world.runner.acknowledged(&turn.turn_id).await;
    let sessions: std::collections::HashSet<_> =
        world.runner.opens().into_iter().map(|open| open.session_id).collect();
    assert_eq!(sessions.len(), 1, "no second session was made");
    let next = world.send(&conversation, "next").await;
    let (next, _) = world.finish(&next).await;
    assert_eq!(next.status(), TurnStatus::Completed);
    assert_eq!(world.workspace().await.held_by_turn_id, "");
}

#[tokio::test]
async fn s1_after_the_message_is_stored() {
    survives("after-accept").await;
}

#[tokio::test]
async fn when_the_turn_is_promoted() {
    survives("promoted").await;
}

#[tokio::test]
async fn before_the_session_is_opened() {
    survives("before-open").await;
}

#[tokio::test]
async fn s49_after_the_session_was_opened() {
    survives("after-open").await;
}

#[tokio::test]
async fn after_the_message_was_sent() {
    survives("after-send").await;
}

/// How the session was opened is stored with its first events. What dies before that loses nothing: the turn tells its
/// origin, what it was given and how the prompt got there, and the next turn of the session is given none of it again.
#[tokio::test]
async fn s61_an_opening_that_was_not_stored_is_found_again() {
    for ended in [false, true] {
        let mut world = World::new().await;
        let critic = agent("critic", "second", "m-9", "Criticise.");
        world.runner.state().agents.insert("critic".into(), critic);
        let conversation = world.conversation().await;
        let first = world.send(&conversation, "question-1").await;
        world.finish(&first).await;
        let second = world.send_as(&conversation, "question-2", "critic", "/w/a").await;
        world.finish(&second).await;
        world.runner.state().reply = if ended { Reply::Echo } else { Reply::Hold };
        let hook = hook("control-plane::after-send");
        let third = world.send(&conversation, "question-3").await;
        tokio::time::timeout(LIMIT, hook.reached()).await.expect("the point is passed");
        world.crash().await;
        drop(hook);
        world.restart().await;
        if !ended {
            world.runner.complete(&third.turn_id, "echo: question-3");
        }
        let (third, events) = world.finish(&third).await;
        assert_eq!(third.status(), TurnStatus::Completed);
        assert_whole(&events);
        assert_eq!((third.origin(), third.history_given), (Origin::Resumed, true));
        let opened = kinds(&events).into_iter().find_map(|kind| match kind {
            Kind::Session(session) if session.state() == SessionState::Opened => Some(session),
            _ => None,
        });
        let opened = opened.expect("the opening is told");
        assert_eq!((opened.origin(), opened.history_given), (Origin::Resumed, true));
        assert_eq!(world.runner.sends().len(), 3, "it was not sent again");
        world.runner.state().reply = Reply::Echo;
        let fourth = world.send(&conversation, "question-4").await;
        let (fourth, _) = world.finish(&fourth).await;
        assert_eq!((fourth.origin(), fourth.history_given), (Origin::Resumed, false));
    }
}

#[tokio::test]
async fn before_events_are_stored() {
    survives("before-append").await;
}

#[tokio::test]
async fn before_the_end_is_stored() {
    survives("before-close").await;
}

#[tokio::test]
async fn after_the_end_is_stored() {
    survives("after-close").await;
}

#[tokio::test]
async fn s50_before_the_end_is_acknowledged() {
    survives("before-acknowledge").await;
}

#[tokio::test]
async fn s6_a_successor_that_was_promoted_and_not_started_is_picked_up() {
    let mut world = World::new().await;
    world.runner.state().reply = Reply::Hold;
    let conversation = world.conversation().await;
    let first = world.send(&conversation, "one").await;
    let second = world.send(&conversation, "two").await;
    world.runner.sent(&first.turn_id).await;
    let hook = hook("control-plane::promoted");
    world.runner.complete(&first.turn_id, "done");
    tokio::time::timeout(LIMIT, hook.reached()).await.expect("the point is passed");
    world.crash().await;
    drop(hook);
    world.runner.state().reply = Reply::Echo;
    world.restart().await;
    let (second, _) = world.finish(&second).await;
    assert_eq!(second.status(), TurnStatus::Completed);
    world.runner.acknowledged(&first.turn_id).await;
}

#[tokio::test]
async fn a_follower_goes_on_over_a_restart_without_gap_or_double() {
    let mut world = World::new().await;
    world.runner.state().reply = Reply::Hold;
    let conversation = world.conversation().await;
    let turn = world.send(&conversation, "hello").await;
    world.runner.sent(&turn.turn_id).await;
    let mut stream = world.stream(&conversation, "", &turn.turn_id).await;
    let mut seen = Vec::new();
    let mut cursor = String::new();
    for n in 0..20 {
        world.runner.emit(&turn.turn_id, text(&format!("t{n}"), &format!("{n}")));
    }
    while events(&seen).len() < 10 {
        let item = stream.message().await.unwrap().unwrap();
        cursor.clone_from(&item.cursor);
        seen.push(item);
    }
    world.crash().await;
    for n in 20..40 {
        world.runner.emit(&turn.turn_id, text(&format!("t{n}"), &format!("{n}")));
    }
    world.restart().await;
    world.runner.complete(&turn.turn_id, "done");
    let rest = world.stream(&conversation, &cursor, &turn.turn_id).await;
    seen.extend(collect(rest).await.unwrap());
    let events = events(&seen);
    assert_whole(&events);
    let texts: Vec<String> = kinds(&events)
        .into_iter()
        .filter_map(|kind| if let Kind::Text(text) = kind { Some(text.text) } else { None })
        .collect();
    assert_eq!(texts, (0..40).map(|n| n.to_string()).collect::<Vec<_>>());
}

#[tokio::test]
async fn a_cancel_that_was_stored_is_carried_out_after_a_restart() {
    let mut world = World::new().await;
    {
        let mut state = world.runner.state();
        state.reply = Reply::Hold;
    }
    let conversation = world.conversation().await;
    let turn = world.send(&conversation, "hello").await;
    world.until(&turn, TurnStatus::Running).await;
    world.runner.deaf(true);
    world.cancel(&turn.turn_id).await;
    world.crash().await;
    world.runner.deaf(false);
    world.restart().await;
    let (turn, events) = world.finish(&turn).await;
    assert_eq!(turn.status(), TurnStatus::Cancelled);
    assert_whole(&events);
}

#[tokio::test]
async fn a_graceful_stop_tells_followers_to_come_back_and_leaves_turns_alone() {
    let mut world = World::new().await;
    world.runner.state().reply = Reply::Hold;
    let conversation = world.conversation().await;
    let turn = world.send(&conversation, "hello").await;
    world.until(&turn, TurnStatus::Running).await;
    let stream = world.stream(&conversation, "", "").await;
    world.server.take().unwrap().shutdown().await;
    let status = collect(stream).await.unwrap_err();
    assert_eq!(crate::support::reason(&status), "DRAINING");
    assert!(world.runner.state().cancelled.is_empty());
    world.restart().await;
    world.runner.complete(&turn.turn_id, "done");
    let (turn, _) = world.finish(&turn).await;
    assert_eq!(turn.status(), TurnStatus::Completed);
}

#[tokio::test]
async fn a_turn_that_is_given_up_before_it_has_a_session_leaves_no_slot_behind() {
    let mut world = World::new().await;
    let database = world.dir.path().join("control-plane.db");
    let sql = |text: &str| rusqlite::Connection::open(&database).unwrap().execute_batch(text).unwrap();
    sql(
        "CREATE TRIGGER refuse BEFORE INSERT ON session BEGIN SELECT RAISE(ABORT, 'refused on purpose'); END",
    );
    let hook = hook("control-plane::after-close");
    let conversation = world.conversation().await;
    let turn = world.send(&conversation, "hello").await;
    tokio::time::timeout(LIMIT, hook.reached()).await.expect("the point is passed");
    world.crash().await;
    drop(hook);
    sql("DROP TRIGGER refuse");
    world.restart().await;
    let given_up = world.turn(&turn.turn_id).await.turn.unwrap();
    assert_eq!(given_up.status(), TurnStatus::Failed, "{given_up:#?}");
    assert_eq!(given_up.session_id, "");
    assert_eq!(world.workspace().await.held_by_turn_id, "");
    let next = world.send(&conversation, "next").await;
    let (next, _) = world.finish(&next).await;
    assert_eq!(next.status(), TurnStatus::Completed);
}
