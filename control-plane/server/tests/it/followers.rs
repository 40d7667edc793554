//! Those who follow a conversation: many of them, at any cursor, over restarts, behind proxies, and gone without a word.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use pretty_assertions::assert_eq;
use prost::Message as _;
use roundhouse_control_plane::Settings;
use roundhouse_domain::{cursor, id::ConversationId};
use roundhouse_proto::control::v1 as control;
use roundhouse_proto::control::v1::TurnStatus;
use roundhouse_proto::control::v1::stream_events_response::Item;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tonic::Code;

use crate::support::runner::{Reply, text};
use crate::support::{Client, LIMIT, World, assert_whole, collect, events, reason};

/// What gRPC clients take at most unless they are told otherwise.
const CLIENTS_TAKE: usize = 4 * 1024 * 1024;

fn request(conversation: &str, after: &str) -> control::StreamEventsRequest {
    control::StreamEventsRequest {
        conversation_id: conversation.into(),
        after_cursor: after.into(),
        follow: Some(false),
        ..Default::default()
    }
}

fn follow(turn: &control::Turn, include_partial: bool) -> control::StreamEventsRequest {
    control::StreamEventsRequest {
        conversation_id: turn.conversation_id.clone(),
        turn_id: turn.turn_id.clone(),
        include_partial,
        ..Default::default()
    }
}

fn cursors(items: &[control::StreamEventsResponse]) -> Vec<String> {
    items.iter().map(|item| item.cursor.clone()).collect()
}

#[tokio::test]
async fn any_cursor_goes_on_over_restarts_of_either_side() {
    let mut world = World::new().await;
    world.runner.state().reply = Reply::Hold;
    let conversation = world.conversation().await;
    let turn = world.send(&conversation, "hello").await;
    world.runner.sent(&turn.turn_id).await;
    let mut stream = world.stream(&conversation, "", &turn.turn_id).await;
    let mut seen = Vec::new();
    for round in 0..3 {
        for n in 0..8 {
            world.runner.emit(&turn.turn_id, text(&format!("t{round}-{n}"), "word"));
        }
        while events(&seen).len() < 8 * (round + 1) {
            let item = tokio::time::timeout(LIMIT, stream.message()).await.unwrap().unwrap().unwrap();
            seen.push(item);
        }
        // The runner's side breaks, then ours.
        world.runner.break_streams();
        world.crash().await;
        world.restart().await;
        let held = cursors(&seen);
        for (at, cursor) in held.iter().enumerate().step_by(3) {
            let stream =
                world.client.stream_events(request(&conversation, cursor)).await.unwrap().into_inner();
            let rest = collect(stream).await.unwrap();
            assert_eq!(cursors(&rest)[..held.len() - at - 1], held[at + 1..], "after {cursor}");
        }
        stream = world.stream(&conversation, held.last().unwrap(), &turn.turn_id).await;
    }
    world.runner.complete(&turn.turn_id, "done");
    seen.extend(collect(stream).await.unwrap());
    assert_whole(&events(&seen));
}

#[tokio::test]
async fn a_cursor_of_the_future_is_refused_with_what_to_do() {
    let mut world = World::new().await;
    let conversation = world.conversation().await;
    let turn = world.send(&conversation, "hello").await;
    world.finish(&turn).await;
    let stream = world.client.stream_events(request(&conversation, "")).await.unwrap().into_inner();
    let newest = collect(stream).await.unwrap().last().unwrap().cursor.clone();
    let id = ConversationId::parse(&conversation).unwrap();
    let value = cursor::decode(&id, &newest).unwrap();
    // Well made, and never given out: of a database that was put back to an earlier state, say.
    for ahead in [value + 1_000, i64::MAX as u64, u64::MAX] {
        let asked = request(&conversation, &cursor::encode(&id, ahead));
        let status = world.client.stream_events(asked).await.unwrap_err();
        assert_eq!((status.code(), reason(&status).as_str()), (Code::InvalidArgument, "CURSOR_INVALID"));
        assert!(status.message().contains("leave it empty"), "{}", status.message());
    }
}

#[tokio::test]
async fn five_hundred_followers_of_one_conversation_all_get_all_of_it() {
    const FOLLOWERS: usize = 500;
    let mut world = World::new().await;
    world.runner.state().reply = Reply::Hold;
    let conversation = world.conversation().await;
    let turn = world.send(&conversation, "hello").await;
    world.runner.sent(&turn.turn_id).await;
    let before = most_memory();
    let mut followers = tokio::task::JoinSet::new();
    for number in 0..FOLLOWERS {
        let mut stream =
            world.client.stream_events(follow(&turn, number % 2 == 0)).await.unwrap().into_inner();
        followers.spawn(async move {
            let mut seen = Vec::new();
            while let Some(item) = stream.message().await? {
                match item.item {
                    Some(Item::Partial(_) | Item::PartialReset(_)) => {}
                    Some(Item::TurnEvent(event)) => seen.push((item.cursor, event.seq)),
                    _ => seen.push((item.cursor, 0)),
                }
            }
            Ok::<_, tonic::Status>(seen)
        });
    }
    assert_eq!(world.server.as_ref().unwrap().followers(), FOLLOWERS);
    world.runner.partial(&turn.turn_id, 0, "word");
    for n in 0..10 {
        world.runner.emit(&turn.turn_id, text(&format!("t{n}"), &"x".repeat(2_000)));
    }
    world.runner.complete(&turn.turn_id, "done");
    let all = tokio::time::timeout(3 * LIMIT, followers.join_all()).await.expect("every stream ends");
    let first = all[0].as_ref().unwrap();
    let numbers: Vec<u64> = first.iter().map(|(_, seq)| *seq).filter(|seq| *seq > 0).collect();
    assert_eq!(numbers, (1..=numbers.len() as u64).collect::<Vec<_>>());
    assert!(numbers.len() > 10);
    for one in &all {
        assert_eq!(one.as_ref().unwrap(), first);
    }
    let grown = most_memory() - before;
    // Server and clients together: what waits for a reader is a few items, whatever the turn says.
    assert!(grown < 200_000_000, "{grown} bytes for {FOLLOWERS} followers");
}

/// The most memory that this process ever had, in bytes.
fn most_memory() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
}

#[tokio::test]
async fn no_message_is_over_what_clients_take() {
    let mut world = World::new().await;
    let conversation = world.conversation().await;
    let long = "漢".repeat(1024 * 1024 / 3);
    let mut last = String::new();
    for _ in 0..3 {
        let turn = world.send(&conversation, &long).await;
        world.finish(&turn).await;
        last = turn.turn_id;
    }
    let takes = |size: usize| assert!(size < CLIENTS_TAKE, "{size} bytes");
    let whole = world.turn(&last).await;
    assert_eq!(whole.message.as_ref().unwrap().text, long);
    takes(whole.encoded_len());
    let list = control::ListMessagesRequest { conversation_id: conversation.clone(), after: 0, limit: 200 };
    takes(world.client.list_messages(list).await.unwrap().into_inner().encoded_len());
    let stream = world.client.stream_events(request(&conversation, "")).await.unwrap().into_inner();
    for item in collect(stream).await.unwrap() {
        assert!(item.encoded_len() < 80_000, "{} bytes", item.encoded_len());
    }
    // Unfinished text, as a newcomer gets it: at most 1 MiB in one piece, however much there is.
    world.runner.state().reply = Reply::Hold;
    let turn = world.send(&conversation, "more").await;
    world.until(&turn, TurnStatus::Running).await;
    for n in 0..3 {
        world.runner.partial(&turn.turn_id, n << 20, &"x".repeat(1 << 20));
    }
    let mut stream = world.client.stream_events(follow(&turn, true)).await.unwrap().into_inner();
    loop {
        let item = tokio::time::timeout(LIMIT, stream.message()).await.unwrap().unwrap().unwrap();
        takes(item.encoded_len());
        if let Some(Item::Partial(found)) = item.item {
            let partial = found.partial.unwrap();
            if partial.offset + partial.text.len() as u64 == 1 << 20 {
                break;
            }
        }
    }
    world.runner.complete(&turn.turn_id, "done");
}

/// Something between client and server that cuts a connection when nothing came through for a while, and that can stop
/// passing anything on without a word, as a pulled cable does.
struct Proxy {
    address: SocketAddr,
    mute: Arc<AtomicBool>,
    cut: Arc<AtomicBool>,
}

impl Proxy {
    async fn start(server: SocketAddr, silence: Duration) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (mute, cut) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let (muted, was_cut) = (Arc::clone(&mute), Arc::clone(&cut));
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let server = TcpStream::connect(server).await.unwrap();
                tokio::spawn(pass([client, server], silence, Arc::clone(&muted), Arc::clone(&was_cut)));
            }
        });
        Self { address, mute, cut }
    }

    async fn client(&self) -> Client {
        Client::connect(format!("http://{}", self.address)).await.unwrap()
    }
}

async fn pass(ends: [TcpStream; 2], silence: Duration, mute: Arc<AtomicBool>, cut: Arc<AtomicBool>) {
    let [mut client, mut server] = ends;
    let (mut up, mut down) = (vec![0; 16 * 1024], vec![0; 16 * 1024]);
    loop {
        let (from_client, read) = tokio::select! {
            read = client.read(&mut up) => (true, read),
            read = server.read(&mut down) => (false, read),
            () = tokio::time::sleep(silence) => return cut.store(true, Ordering::SeqCst),
        };
        let Ok(count @ 1..) = read else { return };
        if mute.load(Ordering::SeqCst) {
            continue;
        }
        let passed = if from_client {
            server.write_all(&up[..count]).await
        } else {
            client.write_all(&down[..count]).await
        };
        if passed.is_err() {
            return;
        }
    }
}

/// An idle stream through a proxy that bears two seconds of silence: what it was cut with, and whether the proxy did that.
async fn idle_behind_a_proxy(tune: fn(&mut Settings)) -> (Option<tonic::Status>, bool) {
    let mut world = World::tuned(tune).await;
    world.runner.state().reply = Reply::Hold;
    let conversation = world.conversation().await;
    let turn = world.send(&conversation, "hello").await;
    world.until(&turn, TurnStatus::Running).await;
    let proxy = Proxy::start(world.address(), Duration::from_secs(2)).await;
    let mut client = proxy.client().await;
    let mut stream = client.stream_events(follow(&turn, false)).await.unwrap().into_inner();
    let mut seen = Vec::new();
    let end = tokio::time::Instant::now() + Duration::from_secs(5);
    let broken = loop {
        match tokio::time::timeout_at(end, stream.message()).await {
            Ok(Ok(item)) => seen.push(item.expect("the turn goes on")),
            Ok(Err(status)) => break Some(status),
            Err(_) => break None,
        }
    };
    if broken.is_none() {
        world.runner.complete(&turn.turn_id, "done");
        seen.extend(collect(stream).await.unwrap());
        assert_whole(&events(&seen));
    }
    (broken, proxy.cut.load(Ordering::SeqCst))
}

/// A minute scaled to two seconds, and the ten seconds between two questions for life to 150 ms.
#[tokio::test]
async fn an_idle_stream_outlives_a_proxy_that_cuts_silence() {
    let defaults = Settings::new(&roundhouse_config::ControlPlane::default());
    assert_eq!(defaults.keepalive, Duration::from_secs(10));
    let often = idle_behind_a_proxy(|settings| settings.keepalive = Duration::from_millis(150));
    let never = idle_behind_a_proxy(|settings| settings.keepalive = Duration::from_secs(60));
    let (kept, lost) = tokio::join!(often, never);
    assert!(kept.0.is_none() && !kept.1, "{kept:?}");
    assert!(lost.0.is_some() && lost.1, "the proxy cuts nothing, so the test shows nothing: {lost:?}");
}

/// With the usual ten seconds for a question and for its answer it takes twenty.
#[tokio::test]
async fn a_follower_that_is_gone_without_a_word_is_found_by_asking() {
    // The time for an answer is long enough for a busy machine, too.
    let mut world = World::tuned(|settings| settings.keepalive = Duration::from_secs(1)).await;
    let conversation = world.conversation().await;
    let proxy = Proxy::start(world.address(), Duration::from_secs(600)).await;
    let mut client = proxy.client().await;
    let asked = control::StreamEventsRequest { conversation_id: conversation.clone(), ..Default::default() };
    let stream = client.stream_events(asked).await.unwrap().into_inner();
    let server = world.server.as_ref().unwrap();
    assert_eq!(server.followers(), 1);
    // Both ends stay open, and nothing comes through any more.
    proxy.mute.store(true, Ordering::SeqCst);
    let gone = async {
        while server.followers() > 0 {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(LIMIT, gone).await.expect("whoever does not answer is let go");
    drop(stream);
}
