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

#[cfg(feature = "failpoints")]
#[tokio::test]
async fn s4_what_the_journal_has_no_room_for_is_in_the_sessions_file_before_the_end_is_told() {
    // The 20th event is in the second turn. The write of the session's file that comes after the end is held back.
    let rig =
        Rig::with(With::failpoint("runner::no_room=20*fail;runner::end_told=1500*pause")).await.unwrap();
    let mut client = rig.client().await.unwrap();
    Turn::new(&rig, "cnv_1", "ses_1", "trn_1", 1).run(&mut client, "[[text:one]]").await.unwrap();
    let revision = || {
        let text = std::fs::read_to_string(rig.state.join("sessions/ses_1/session.json")).unwrap();
        serde_json::from_str::<serde_json::Value>(&text).unwrap()["revision"].as_u64().unwrap()
    };
    let before = revision();
    let second = Turn::new(&rig, "cnv_1", "ses_1", "trn_2", 2);
    second.open(&mut client).await.unwrap();
    second.send(&mut client, &"[[text:two]] ".repeat(30)).await.unwrap();
    let events = second.follow(&mut client, 0, false).await.unwrap().all().await.unwrap();
    let after = revision();
    assert_eq!(terminal(&events).unwrap().failure.unwrap().reason(), FailureReason::Storage);
    assert!(after > before, "the end was told before what it keeps was on disk");
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
