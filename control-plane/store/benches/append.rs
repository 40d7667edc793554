//! How fast events become durable: one by one, from 100 producers, in batches of 20; and a message with its turn.
//!
//! `cargo bench -p roundhouse-store`, with `TMPDIR` on the disk that matters.

#![expect(clippy::unwrap_used, clippy::print_stdout, reason = "a benchmark prints, and panics when it fails")]

use std::time::{Duration, Instant};

use roundhouse_domain::agent_file::Trigger;
use roundhouse_domain::event::{Effect, EventKind, EventSource, NewEvent};
use roundhouse_domain::id::{ConversationId, MessageId, RequestId, TurnId};
use roundhouse_domain::time::Timestamp;
use roundhouse_store::{
    AcceptMessage, AppendEvents, CreateConversation, Owner, RequestKey, SqliteStore, Store,
};

/// Payload of an event, in bytes.
const PAYLOAD: usize = 300;

async fn turn(store: &SqliteStore, n: usize) -> (Owner, Duration) {
    let conversation_id = ConversationId::parse(format!("cnv_{n}")).unwrap();
    let create = CreateConversation {
        request: None,
        id: conversation_id.clone(),
        external_id: None,
        title: String::new(),
        agent_name: None,
        workspace_id: None,
        time: Timestamp(1),
    };
    store.create_conversation(create).await.unwrap();
    let id = RequestId::parse(format!("request-{n}")).unwrap();
    let accept = AcceptMessage {
        request: RequestKey { id, rpc: "SendMessage", body_hash: [0; 32] },
        conversation_id,
        message_id: MessageId::parse(format!("msg_{n}")).unwrap(),
        turn_id: TurnId::parse(format!("trn_{n}")).unwrap(),
        actor: "bench".into(),
        body: "hello".into(),
        agent_name: None,
        workspace_id: None,
        surface: Trigger::Manual,
        time: Timestamp(1),
    };
    let started = Instant::now();
    let turn = store.accept_message(accept).await.unwrap().turn;
    (Owner { turn_id: turn.id, epoch: turn.epoch }, started.elapsed())
}

/// Appends `batches` of `size` events to one turn; returns how long each took.
async fn produce(store: SqliteStore, owner: Owner, batches: u64, size: u64) -> Vec<Duration> {
    let mut times = Vec::new();
    for batch in 0..batches {
        let events = (1..=size)
            .map(|n| NewEvent {
                source: EventSource::Runner { number: batch * size + n },
                kind: EventKind::Text,
                payload: vec![b'x'; PAYLOAD],
                time: Timestamp(1),
                effect: Effect::None,
            })
            .collect();
        let command = AppendEvents { owner: owner.clone(), events, time: Timestamp(1) };
        let started = Instant::now();
        store.append_events(command).await.unwrap();
        times.push(started.elapsed());
    }
    times
}

fn report(name: &str, events: u64, total: Duration, mut times: Vec<Duration>) {
    times.sort();
    let at = |share: usize| times[(times.len() * share / 100).min(times.len() - 1)].as_secs_f64() * 1_000.0;
    let rate = events as f64 / total.as_secs_f64();
    println!("{name:<34} {rate:>9.0}/s   p50 {:>7.2} ms   p99 {:>7.2} ms", at(50), at(99));
}

async fn run(store: &SqliteStore, name: &str, first: usize, producers: usize, batches: u64, size: u64) {
    let mut owners = Vec::new();
    for n in 0..producers {
        owners.push(turn(store, first + n).await.0);
    }
    let started = Instant::now();
    let tasks: Vec<_> =
        owners.into_iter().map(|owner| tokio::spawn(produce(store.clone(), owner, batches, size))).collect();
    let mut times = Vec::new();
    for task in tasks {
        times.extend(task.await.unwrap());
    }
    report(name, producers as u64 * batches * size, started.elapsed(), times);
}

#[tokio::main]
async fn main() {
    let dir = tempfile::tempdir().unwrap();
    let opened = Instant::now();
    let store = SqliteStore::open(dir.path().join("bench.db")).unwrap();
    println!("open of a new database             {:>9.1} ms", opened.elapsed().as_secs_f64() * 1_000.0);
    run(&store, "events one by one", 0, 1, 2_000, 1).await;
    run(&store, "events one by one, 100 producers", 1_000, 100, 200, 1).await;
    run(&store, "batches of 20, one producer", 2_000, 1, 500, 20).await;
    run(&store, "batches of 20, 100 producers", 3_000, 100, 50, 20).await;
    let mut times = Vec::new();
    for n in 0..500 {
        times.push(turn(&store, 10_000 + n).await.1);
    }
    report("messages one by one", 500, times.iter().sum(), times);
    store.close().await;
}
