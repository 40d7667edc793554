//! Streams: replay and follow, partial text, numbers beyond the journal, slow readers.

use std::time::Duration;

use pretty_assertions::assert_eq;
use roundhouse_proto::engine::v1::{
    NumberedEvent, StreamEventsRequest, event_body::Kind, stream_events_response::Item,
};
use tokio::time::Instant;

use crate::rig::{BOUND, Client, Rig, Turn, kind, names, reason, terminal};

#[tokio::test]
async fn s29_readers_that_come_and_go_see_each_number_once() {
    let rig = Rig::start().await.unwrap();
    let mut client = rig.client().await.unwrap();
    let turn = Turn::new(&rig, "cnv_1", "ses_1", "trn_1", 1);
    turn.open(&mut client).await.unwrap();
    turn.send(&mut client, "[[events count=3000 bytes=100]]").await.unwrap();
    // One reader leaves after every few events and comes back; others join in the middle.
    let broken = {
        let (mut client, turn) = (client.clone(), turn.clone());
        tokio::spawn(async move {
            let mut seen = Vec::new();
            for step in 1_usize.. {
                let after = seen.last().copied().unwrap_or(0);
                let mut follower = turn.follow(&mut client, after, step % 2 == 0).await.unwrap();
                for _ in 0..(step * 37 % 400) + 1 {
                    match follower.next().await.unwrap() {
                        Some(Item::Event(event)) => {
                            seen.push(event.number);
                            if matches!(kind(&event), Some(Kind::Terminal(_))) {
                                return seen;
                            }
                        }
                        Some(_) => {}
                        None => return seen,
                    }
                }
            }
            seen
        })
    };
    let mut others = Vec::new();
    for after in [0, 1, 500, 1500] {
        let (url, turn) = (rig.service.url(), turn.clone());
        others.push(tokio::spawn(async move { (after, to_the_end(&url, &turn, after, true).await) }));
    }
    let seen = broken.await.unwrap();
    assert_eq!(seen, (1..=seen.len() as u64).collect::<Vec<_>>());
    assert!(seen.len() > 3000);
    for other in others {
        let (after, events) = other.await.unwrap();
        terminal(&events).unwrap();
        assert_eq!((events[0].number, events.last().unwrap().number), (after + 1, seen.len() as u64));
    }
}

/// All events after a number, however often the reader has to come back: a busy machine may make it too slow for a
/// moment, or its connection.
async fn to_the_end(url: &str, turn: &Turn, after: u64, partials: bool) -> Vec<NumberedEvent> {
    let deadline = Instant::now() + BOUND;
    let mut events: Vec<NumberedEvent> = Vec::new();
    loop {
        assert!(Instant::now() < deadline, "it never comes to the end");
        let after = events.last().map_or(after, |event| event.number);
        let Ok(mut client) = Client::connect(url.to_owned()).await else { continue };
        let Ok(mut follower) = turn.follow(&mut client, after, partials).await else { continue };
        loop {
            match follower.next().await {
                Ok(Some(Item::Event(event))) => {
                    let last = events.last().map_or(after, |event| event.number);
                    assert_eq!(event.number, last + 1);
                    events.push(event);
                }
                Ok(Some(_)) => {}
                Ok(None) => return events,
                Err(_) => break,
            }
        }
    }
}

#[tokio::test]
async fn partial_text_fits_together_and_is_replaced_by_the_item() {
    let rig = Rig::start().await.unwrap();
    let mut client = rig.client().await.unwrap();
    let turn = Turn::new(&rig, "cnv_1", "ses_1", "trn_1", 1);
    turn.open(&mut client).await.unwrap();
    let gate = rig.path("gate");
    let text = format!("[[gate:{}]] [[slow chunks=30 delay=5:grün ]]", gate.display());
    turn.send(&mut client, &text).await.unwrap();
    let mut follower = turn.follow(&mut client, 0, true).await.unwrap();
    std::fs::write(&gate, "").unwrap();
    let mut built = String::new();
    let mut items = Vec::new();
    let whole = loop {
        match follower.next().await.unwrap().unwrap() {
            Item::Partial(partial) => {
                assert_eq!(partial.offset, built.len() as u64);
                built.push_str(&partial.text);
                items.push(partial.item_id);
            }
            Item::Event(event) => {
                if let Some(Kind::Text(text)) = kind(&event) {
                    items.push(text.item_id.clone());
                    break text.text.clone();
                }
            }
            Item::PartialReset(_) => panic!("nothing was thrown away"),
        }
    };
    assert_eq!(built, whole);
    items.dedup();
    assert_eq!(items.len(), 1);
}

#[tokio::test]
async fn numbers_beyond_the_journal_are_waited_for_by_the_owner_alone() {
    let rig = Rig::start().await.unwrap();
    let mut client = rig.client().await.unwrap();
    let turn = Turn::new(&rig, "cnv_1", "ses_1", "trn_1", 1);
    let unknown =
        client.stream_events(StreamEventsRequest { turn_id: "trn_1".into(), ..Default::default() }).await;
    assert_eq!(reason(&unknown.unwrap_err()), "TURN_NOT_FOUND");
    turn.open(&mut client).await.unwrap();
    let reader =
        StreamEventsRequest { turn_id: "trn_1".into(), epoch: None, after: 1000, include_partial: false };
    assert_eq!(reason(&client.stream_events(reader).await.unwrap_err()), "FIELD_INVALID");
    // The owner waits: what comes up to the number it holds is not sent again.
    let waiting = turn.follow(&mut client, 3, false).await.unwrap();
    turn.send(&mut client, "[[text:one]] [[text:two]]").await.unwrap();
    let events = waiting.all().await.unwrap();
    assert_eq!(events[0].number, 4);
    terminal(&events).unwrap();
}

#[tokio::test]
async fn a_reader_that_stops_reading_is_told_and_slows_nobody() {
    let rig = Rig::start().await.unwrap();
    let mut client = rig.client().await.unwrap();
    let turn = Turn::new(&rig, "cnv_1", "ses_1", "trn_1", 1);
    turn.open(&mut client).await.unwrap();
    // A connection of its own: what is not read there holds up nothing else.
    let mut lazy_client = rig.client().await.unwrap();
    let mut lazy = turn.follow(&mut lazy_client, 0, false).await.unwrap();
    turn.send(&mut client, "[[events count=1000 bytes=60000]]").await.unwrap();
    // The diligent reader may be too slow for a moment, too: then it goes on where it was.
    let events = to_the_end(&rig.service.url(), &turn, 0, false).await;
    terminal(&events).unwrap();
    let last = events.last().unwrap().number;
    let mut sent = 0;
    let told = loop {
        match tokio::time::timeout(Duration::from_secs(20), lazy.stream.message()).await.unwrap() {
            Ok(Some(response)) => {
                if let Some(Item::Event(event)) = response.item {
                    sent = event.number;
                }
            }
            Ok(None) => panic!("not slow: all {last} came"),
            Err(status) => break status,
        }
    };
    assert_eq!((told.code(), reason(&told).as_str()), (tonic::Code::ResourceExhausted, "SLOW_READER"));
    assert!(told.message().contains(&format!("resume after {sent}")), "{}", told.message());
    let rest = turn.follow(&mut client, sent, false).await.unwrap().all().await.unwrap();
    assert_eq!((rest[0].number, rest.last().unwrap().number), (sent + 1, last));
}

#[tokio::test]
async fn s33_a_reader_that_leaves_cancels_nothing() {
    let rig = Rig::start().await.unwrap();
    let mut client = rig.client().await.unwrap();
    let turn = Turn::new(&rig, "cnv_1", "ses_1", "trn_1", 1);
    turn.open(&mut client).await.unwrap();
    let gate = rig.path("gate");
    turn.send(&mut client, &format!("[[gate:{}]] [[text:done]]", gate.display())).await.unwrap();
    drop(turn.follow(&mut client, 0, true).await.unwrap());
    drop(client);
    std::fs::write(&gate, "").unwrap();
    let mut client = rig.client().await.unwrap();
    let events = turn.follow(&mut client, 0, false).await.unwrap().all().await.unwrap();
    assert_eq!(terminal(&events).unwrap().result, "done", "{:?}", names(&events));
}
