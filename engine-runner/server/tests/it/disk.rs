//! The runner's own disk is full: every turn ends all the same, and says what to do.

use pretty_assertions::assert_eq;
use roundhouse_proto::engine::v1::{
    FailureReason, Outcome, cancel_response::Result as Cancelled, event_body::Kind, phase_event::Phase,
};

use crate::rig::{Client, Rig, Turn, With, names, terminal};

/// A runner whose state lies on a small disk of its own.
fn small() -> With {
    With { disk: Some(12 * 1024 * 1024), ..With::default() }
}

/// A turn whose engine has taken its message and waits at the gate, and then the disk is full.
async fn full(rig: &Rig, client: &mut Client, after_the_gate: &str) -> (Turn, std::path::PathBuf) {
    let gate = rig.path("gate");
    let turn = Turn::new(rig, "cnv_1", "ses_1", "trn_1", 1);
    turn.open(client).await.unwrap();
    turn.send(client, &format!("[[gate:{}]] {after_the_gate}", gate.display())).await.unwrap();
    let mut follower = turn.follow(client, 0, false).await.unwrap();
    let taken = |kind: &Kind| matches!(kind, Kind::Phase(phase) if phase.phase() == Phase::Accepted);
    follower.until(taken).await.unwrap();
    rig.fill_disk().unwrap();
    (turn, gate)
}

#[tokio::test]
async fn a_full_disk_ends_the_turn_as_failed_and_says_what_to_do() {
    let rig = Rig::with(small()).await.unwrap();
    let mut client = rig.client().await.unwrap();
    // More than the room that lies ready behind spool and journal.
    let text = format!("[[text:{}]] ", "a".repeat(50_000)).repeat(14);
    let (turn, gate) = full(&rig, &mut client, &text).await;
    std::fs::write(gate, "").unwrap();
    let events = turn.follow(&mut client, 0, false).await.unwrap().all().await.unwrap();
    let ended = terminal(&events).unwrap();
    assert_eq!(ended.outcome(), Outcome::Failed);
    let failure = ended.failure.unwrap();
    assert_eq!(failure.reason(), FailureReason::Storage);
    assert!(failure.next_action.contains("space"), "{}", failure.next_action);
    // The end is in the journal: a runner that starts on the full disk has it.
    assert_eq!(turn.inspect(&mut client).await.unwrap().terminal.unwrap().outcome(), Outcome::Failed);
}

#[tokio::test]
async fn s43_a_cancel_is_kept_and_carried_out_on_a_full_disk() {
    let rig = Rig::with(small()).await.unwrap();
    let mut client = rig.client().await.unwrap();
    let (turn, _) = full(&rig, &mut client, "").await;
    assert_eq!(turn.cancel(&mut client).await.unwrap(), Cancelled::Stopping);
    let events = turn.follow(&mut client, 0, false).await.unwrap().all().await.unwrap();
    assert_eq!(terminal(&events).unwrap().outcome(), Outcome::Cancelled, "{:?}", names(&events));
}

#[tokio::test]
async fn a_turn_that_cannot_be_kept_is_refused() {
    let rig = Rig::with(small()).await.unwrap();
    let mut client = rig.client().await.unwrap();
    rig.fill_disk().unwrap();
    let turn = Turn::new(&rig, "cnv_1", "ses_1", "trn_1", 1);
    let refused = turn.open(&mut client).await.unwrap_err();
    assert_eq!(crate::rig::reason(&refused), "STORAGE", "{refused:?}");
}
