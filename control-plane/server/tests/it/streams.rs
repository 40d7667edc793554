//! Streams: from the runner by number, to clients by cursor.

use std::time::Duration;

use pretty_assertions::assert_eq;
use roundhouse_proto::control::v1 as control;
use roundhouse_proto::control::v1::TurnStatus;
use roundhouse_proto::control::v1::stream_events_response::Item;
use roundhouse_proto::engine::v1::event_body::Kind;
use tonic::Code;
use tonic_types::StatusExt as _;

use crate::support::runner::{Call, Reply, text};
use crate::support::{LIMIT, World, assert_whole, collect, events, kinds, reason};

fn texts(events: &[control::TurnEvent]) -> Vec<String> {
    kinds(events)
        .into_iter()
        .filter_map(|kind| if let Kind::Text(text) = kind { Some(text.text) } else { None })
        .collect()
}

#[tokio::test]
async fn s29_a_runners_stream_is_resumed_by_number_after_every_break() {
    let mut world = World::new().await;
    {
        let mut state = world.runner.state();
        state.reply = Reply::Hold;
        state.break_after.extend([0, 1, 2, 3, 5, 8]);
    }
    let conversation = world.conversation().await;
    let turn = world.send(&conversation, "hello").await;
    world.runner.sent(&turn.turn_id).await;
    for n in 0..50 {
        world.runner.emit(&turn.turn_id, text(&format!("t{n}"), &n.to_string()));
    }
    world.runner.complete(&turn.turn_id, "done");
    let (turn, events) = world.finish(&turn).await;
    assert_eq!(turn.status(), TurnStatus::Completed);
    assert_whole(&events);
    assert_eq!(texts(&events), (0..50).map(|n| n.to_string()).collect::<Vec<_>>());
    let streams = world.runner.count(|call| matches!(call, Call::Stream { .. }));
    assert_eq!(streams, 7, "one more than it broke");
}

#[tokio::test]
async fn thousands_of_events_arrive_once_and_in_order() {
    let mut world = World::new().await;
    world.runner.state().reply = Reply::Hold;
    let conversation = world.conversation().await;
    let turn = world.send(&conversation, "hello").await;
    world.runner.sent(&turn.turn_id).await;
    for n in 0..5_000 {
        world.runner.emit(&turn.turn_id, text(&format!("t{n}"), &n.to_string()));
    }
    world.runner.complete(&turn.turn_id, "done");
    let (_, events) = world.finish(&turn).await;
    assert_whole(&events);
    assert_eq!(texts(&events), (0..5_000).map(|n| n.to_string()).collect::<Vec<_>>());
}

#[tokio::test]
async fn every_cursor_gives_exactly_what_comes_after_it() {
    let mut world = World::new().await;
    let conversation = world.conversation().await;
    for n in 0..3 {
        let turn = world.send(&conversation, &format!("m{n}")).await;
        world.finish(&turn).await;
    }
    let request = |after: &str| control::StreamEventsRequest {
        conversation_id: conversation.clone(),
        after_cursor: after.into(),
        follow: Some(false),
        ..Default::default()
    };
    let stream = world.client.stream_events(request("")).await.unwrap().into_inner();
    let all = collect(stream).await.unwrap();
    assert!(all.len() > 15);
    let cursors = |items: &[control::StreamEventsResponse]| -> Vec<String> {
        items.iter().map(|item| item.cursor.clone()).collect()
    };
    for (n, item) in all.iter().enumerate() {
        let stream = world.client.stream_events(request(&item.cursor)).await.unwrap().into_inner();
        let rest = collect(stream).await.unwrap();
        assert_eq!(cursors(&rest), cursors(&all[n + 1..]));
    }
    let messages = all.iter().filter(|item| matches!(item.item, Some(Item::Message(_)))).count();
    assert_eq!(messages, 6);
}

#[tokio::test]
async fn a_cursor_belongs_to_its_conversation() {
    let mut world = World::new().await;
    let (a, b) = (world.conversation().await, world.conversation().await);
    let turn = world.send(&a, "hello").await;
    let stream = world.stream(&a, "", &turn.turn_id).await;
    let cursor = collect(stream).await.unwrap().last().unwrap().cursor.clone();
    let request = |conversation: &str, cursor: &str, turn: &str| control::StreamEventsRequest {
        conversation_id: conversation.into(),
        after_cursor: cursor.into(),
        turn_id: turn.into(),
        ..Default::default()
    };
    for (conversation, bad) in [(&b, cursor.as_str()), (&a, "nonsense"), (&a, "cff-00000000")] {
        let status = world.client.stream_events(request(conversation, bad, "")).await.unwrap_err();
        assert_eq!((status.code(), reason(&status).as_str()), (Code::InvalidArgument, "CURSOR_INVALID"));
    }
    let status = world.client.stream_events(request(&b, "", &turn.turn_id)).await.unwrap_err();
    assert_eq!((status.code(), reason(&status).as_str()), (Code::NotFound, "TURN_NOT_FOUND"));
    let status = world.client.stream_events(request("cnv_x", "", "")).await.unwrap_err();
    assert_eq!((status.code(), reason(&status).as_str()), (Code::NotFound, "CONVERSATION_NOT_FOUND"));
    // A turn that ended before the cursor has nothing more to say.
    let stream = world.stream(&a, &cursor, &turn.turn_id).await;
    assert!(collect(stream).await.unwrap().is_empty());
}

#[tokio::test]
async fn unfinished_text_is_passed_on_live_and_whole_to_late_comers() {
    let mut world = World::new().await;
    world.runner.state().reply = Reply::Hold;
    let conversation = world.conversation().await;
    let turn = world.send(&conversation, "hello").await;
    world.until(&turn, TurnStatus::Running).await;
    let request = || control::StreamEventsRequest {
        conversation_id: conversation.clone(),
        turn_id: turn.turn_id.clone(),
        include_partial: true,
        ..Default::default()
    };
    let mut early = world.client.stream_events(request()).await.unwrap().into_inner();
    world.runner.partial(&turn.turn_id, 0, "one ");
    let mut got = String::new();
    let next_partial = async |stream: &mut tonic::Streaming<control::StreamEventsResponse>| loop {
        let item = tokio::time::timeout(LIMIT, stream.message()).await.unwrap().unwrap().unwrap();
        if let Some(Item::Partial(partial)) = item.item {
            assert_eq!(item.cursor, "", "it moves no cursor");
            return partial.partial.unwrap();
        }
    };
    let first = next_partial(&mut early).await;
    assert_eq!((first.offset, first.text.as_str()), (0, "one "));
    got.push_str(&first.text);
    world.runner.partial(&turn.turn_id, 4, "two ");
    let second = next_partial(&mut early).await;
    assert_eq!((second.offset, second.text.as_str()), (4, "two "));
    let mut late = world.client.stream_events(request()).await.unwrap().into_inner();
    let snapshot = next_partial(&mut late).await;
    assert_eq!((snapshot.offset, snapshot.text.as_str()), (0, "one two "));
    world.runner.emit(&turn.turn_id, text("live", "one two three"));
    world.runner.complete(&turn.turn_id, "one two three");
    let rest = collect(early).await.unwrap();
    assert!(rest.iter().all(|item| !matches!(item.item, Some(Item::Partial(_)))));
    assert_eq!(texts(&events(&rest)), ["one two three"]);
    // Without asking there is none, and a stored item leaves none behind.
    let replay = world.stream(&conversation, "", &turn.turn_id).await;
    assert!(collect(replay).await.unwrap().iter().all(|i| !matches!(i.item, Some(Item::Partial(_)))));
}

#[tokio::test]
async fn a_slow_reader_is_told_where_to_go_on_and_slows_nobody() {
    let mut world = World::tuned(|settings| settings.slow_reader_timeout = Duration::from_millis(200)).await;
    world.runner.state().reply = Reply::Hold;
    let conversation = world.conversation().await;
    let turn = world.send(&conversation, "hello").await;
    world.runner.sent(&turn.turn_id).await;
    // Nobody reads this one for now.
    let mut slow = world.stream(&conversation, "", "").await;
    let word = "x".repeat(60_000);
    for n in 0..300 {
        world.runner.emit(&turn.turn_id, text(&format!("t{n}"), &word));
    }
    world.runner.complete(&turn.turn_id, "done");
    let (turn, whole) = world.finish(&turn).await;
    assert_eq!(turn.status(), TurnStatus::Completed, "the turn did not wait for the slow reader");
    assert_whole(&whole);
    let gone = async {
        while world.server.as_ref().unwrap().followers() > 0 {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(LIMIT, gone).await.expect("the slow reader is given up");
    let mut seen = Vec::new();
    let status = loop {
        match tokio::time::timeout(LIMIT, slow.message()).await.unwrap() {
            Ok(Some(item)) => seen.push(item),
            Ok(None) => panic!("it ended well"),
            Err(status) => break status,
        }
    };
    assert_eq!((status.code(), reason(&status).as_str()), (Code::ResourceExhausted, "SLOW_READER"));
    let last = status.get_details_error_info().unwrap().metadata["last_cursor"].clone();
    assert_eq!(last, seen.last().unwrap().cursor);
    let rest = world.stream(&conversation, &last, &turn.turn_id).await;
    seen.extend(collect(rest).await.unwrap());
    assert_whole(&events(&seen));
}

#[tokio::test]
async fn s33_a_client_that_leaves_cancels_nothing() {
    let mut world = World::new().await;
    world.runner.state().reply = Reply::Hold;
    let conversation = world.conversation().await;
    let turn = world.send(&conversation, "hello").await;
    let stream = world.stream(&conversation, "", &turn.turn_id).await;
    world.until(&turn, TurnStatus::Running).await;
    drop(stream);
    world.runner.complete(&turn.turn_id, "done");
    let (turn, _) = world.finish(&turn).await;
    assert_eq!(turn.status(), TurnStatus::Completed);
    assert!(world.runner.state().cancelled.is_empty());
}

#[tokio::test]
async fn old_events_are_forgotten_and_their_cursors_say_so() {
    let mut world = World::tuned(|settings| {
        settings.event_retention = Duration::ZERO;
        settings.retention_every = Duration::from_millis(50);
    })
    .await;
    world.runner.state().reply = Reply::Hold;
    let conversation = world.conversation().await;
    let turn = world.send(&conversation, "hello").await;
    let mut stream = world.stream(&conversation, "", &turn.turn_id).await;
    let first = stream.message().await.unwrap().unwrap().cursor;
    world.runner.sent(&turn.turn_id).await;
    // What an open turn needs is kept, however old.
    world.until(&turn, TurnStatus::Running).await;
    world.runner.complete(&turn.turn_id, "done");
    assert_whole(&events(&collect(stream).await.unwrap()));
    let mut request = control::StreamEventsRequest {
        conversation_id: conversation.clone(),
        after_cursor: first,
        follow: Some(false),
        ..Default::default()
    };
    let mut client = world.client.clone();
    let pruned = async {
        loop {
            match client.stream_events(request.clone()).await {
                Ok(_) => tokio::task::yield_now().await,
                Err(status) => return status,
            }
        }
    };
    let status = tokio::time::timeout(LIMIT, pruned).await.expect("it is forgotten");
    assert_eq!((status.code(), reason(&status).as_str()), (Code::OutOfRange, "CURSOR_PRUNED"));
    // More may be forgotten meanwhile; each refusal names a cursor that goes further, and the last one is taken.
    let mut status = status;
    let rest = loop {
        let oldest = status.get_details_error_info().unwrap().metadata["oldest_cursor"].clone();
        assert_ne!(oldest, request.after_cursor);
        request.after_cursor = oldest;
        match world.client.stream_events(request.clone()).await {
            Ok(rest) => break rest.into_inner(),
            Err(refused) => status = refused,
        }
    };
    collect(rest).await.unwrap();
    assert_eq!(world.messages(&conversation).await.len(), 2, "messages are kept for good");
}
