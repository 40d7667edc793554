//! Crashes at exact points: what was answered is there, what was not is there whole or not at all.

use roundhouse_domain::event::{Effect, EventKind, EventSource, NewEvent};
use roundhouse_domain::outcome::Outcome;
use roundhouse_domain::turn::TurnState;

use super::*;
use crate::command::{AgentMessage, AppendEvents, CloseTurn, Owner};
use crate::error::Unavailable;
use crate::view::CloseOutcome;

const DATABASE: &str = "ROUNDHOUSE_TEST_DATABASE";
const STEP: &str = "ROUNDHOUSE_TEST_STEP";

fn event(source: EventSource, kind: EventKind) -> NewEvent {
    NewEvent { source, kind, payload: b"x".to_vec(), time: Timestamp(1), effect: Effect::None }
}

async fn owner(store: &SqliteStore) -> Owner {
    let turn = store.get_turn(&TurnId::parse("trn_1").unwrap()).await.unwrap();
    Owner { turn_id: turn.id, epoch: turn.epoch }
}

async fn append(store: &SqliteStore) -> crate::Result<crate::view::Appended> {
    let events = (1..=3).map(|number| event(EventSource::Runner { number }, EventKind::Text)).collect();
    store.append_events(AppendEvents { owner: owner(store).await, events, time: Timestamp(1) }).await
}

async fn close(store: &SqliteStore) -> crate::Result<CloseOutcome> {
    let agent_message = AgentMessage {
        id: MessageId::parse("msg_answer").unwrap(),
        actor: "coder".into(),
        body: "answer".into(),
        incomplete: false,
    };
    let command = CloseTurn {
        owner: owner(store).await,
        outcome: Outcome::Completed,
        agent_message: Some(agent_message),
        native_ref: None,
        usage: None,
        events: vec![event(EventSource::Own { key: "terminal".into() }, EventKind::Terminal)],
        free_slot: true,
        time: Timestamp(1),
    };
    store.close_turn(command).await
}

/// The process that dies: does one step on a prepared database, with a failpoint armed by `FAILPOINTS`.
#[tokio::test]
async fn child_that_dies() {
    let Some(path) = std::env::var_os(DATABASE) else { return };
    let store = SqliteStore::open(path).unwrap();
    match std::env::var(STEP).unwrap().as_str() {
        "accept_message" => drop(store.accept_message(message(1, "one")).await),
        "append_events" => drop(append(&store).await),
        "close_turn" => drop(close(&store).await),
        other => panic!("no step {other}"),
    }
    println!("survived");
}

/// Lets a child do a step and die at the point.
fn die(folder: &Folder, step: &str, when: &str) {
    let output = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "sqlite::tests::crashes::child_that_dies", "--nocapture"])
        .env(DATABASE, folder.path())
        .env(STEP, step)
        .env("FAILPOINTS", format!("store::{step}::{when}=return;other::point=return"))
        .output()
        .unwrap();
    assert!(!output.status.success(), "{output:?}");
    assert!(!String::from_utf8_lossy(&output.stdout).contains("survived"), "{output:?}");
}

async fn prepared(messages: u32) -> Folder {
    let folder = Folder::new();
    let store = folder.store();
    create(&store).await.unwrap();
    for n in 1..=messages {
        store.accept_message(message(n, &n.to_string())).await.unwrap();
    }
    store.close().await;
    folder
}

#[tokio::test]
async fn s01_a_crash_before_the_commit_leaves_no_message_and_one_after_it_a_whole_one() {
    for (when, there) in [("before_commit", false), ("after_commit", true)] {
        let folder = prepared(0).await;
        die(&folder, "accept_message", when);
        let store = folder.store();
        assert_eq!(store.open_turns().await.unwrap().len(), usize::from(there), "{when}");
        let repeat = store.accept_message(message(1, "one")).await.unwrap();
        assert_eq!(repeat.repeated, there, "{when}");
        assert_eq!(bodies(&store).await, ["one"]);
        assert_eq!(store.open_turns().await.unwrap().len(), 1);
    }
}

#[tokio::test]
async fn s29_a_crash_around_an_append_neither_loses_nor_doubles_an_event() {
    for (when, there) in [("before_commit", 0), ("after_commit", 3)] {
        let folder = prepared(1).await;
        die(&folder, "append_events", when);
        let store = folder.store();
        let turn = store.get_turn(&TurnId::parse("trn_1").unwrap()).await.unwrap();
        assert_eq!(turn.last_number, there, "{when}");
        append(&store).await.unwrap();
        let events = store.list_events(&turn.id, 0, 100).await.unwrap().items;
        assert_eq!(events.iter().map(|e| e.number).collect::<Vec<_>>(), [Some(1), Some(2), Some(3)]);
    }
}

#[tokio::test]
async fn s04_a_crash_around_the_end_of_a_turn_promotes_the_next_one_once() {
    for (when, ended) in [("before_commit", false), ("after_commit", true)] {
        let folder = prepared(3).await;
        die(&folder, "close_turn", when);
        let store = folder.store();
        let open = store.open_turns().await.unwrap();
        let expected = if ended { "trn_2" } else { "trn_1" };
        assert_eq!(open.iter().map(|t| t.id.as_str()).collect::<Vec<_>>(), [expected], "{when}");
        let repeat = close(&store).await.unwrap();
        assert_eq!(matches!(repeat, CloseOutcome::AlreadyEnded(_)), ended, "{when}");
        let open = store.open_turns().await.unwrap();
        assert_eq!((open.len(), open[0].id.as_str()), (1, "trn_2"));
        let first = store.get_turn(&TurnId::parse("trn_1").unwrap()).await.unwrap();
        assert_eq!(first.state, TurnState::Completed);
        assert_eq!(bodies(&store).await, ["1", "2", "3", "answer"]);
    }
}

#[tokio::test]
async fn a_commit_that_fails_answers_unavailable_and_stores_nothing() {
    let folder = prepared(0).await;
    let store = folder.store();
    let mut hints = store.hints();
    fail::cfg("store::commit", "return").unwrap();
    let answer = store.accept_message(message(1, "one")).await;
    fail::remove("store::commit");
    assert!(matches!(answer, Err(Error::Unavailable { reason: Unavailable::Io, .. })), "{answer:?}");
    assert_eq!(bodies(&store).await, Vec::<String>::new());
    assert!(!store.accept_message(message(1, "one")).await.unwrap().repeated);
    assert!(matches!(hints.next().await, Some(Hint::Promoted { .. })));
    assert!(
        matches!(hints.next().await, Some(Hint::Changed { cursor: 2, .. })),
        "one hint, of what is stored"
    );
}
