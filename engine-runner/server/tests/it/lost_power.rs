//! The host loses power: what was not on disk is gone, and the caller holds more than the runner.

use std::path::Path;

use pretty_assertions::assert_eq;
use roundhouse_process::record::{RecordReader, RecordWriter};
use roundhouse_proto::engine::v1::{
    NumberedEvent, Outcome, event_body::Kind, inspect_response::State,
    start_or_resume_response::Result as Opened,
};
use roundhouse_test_support::wait_until;

use crate::rig::{BOUND, Rig, Turn, names, reason, signal, terminal};

/// Everything of the host that runs goes at once.
async fn cut_power(rig: &mut Rig, keeper: i32) {
    rig.service.kill().await.unwrap();
    signal(u32::try_from(keeper).unwrap(), "KILL").unwrap();
    wait_until("nothing outlives the host", BOUND, || rig.processes().is_empty()).await.unwrap();
}

/// Leaves the journal's first records up to the one that holds `last`, as another boot wrote them.
fn cut_journal(path: &Path, last: &str) {
    let mut reader = RecordReader::open(path).unwrap();
    let mut kept: Vec<Vec<u8>> = Vec::new();
    while let Some(record) = reader.next_record().unwrap() {
        let text = String::from_utf8_lossy(&record.payload).into_owned();
        kept.push(match text.find("\"boot_id\":\"") {
            Some(at) => {
                let begin = at + "\"boot_id\":\"".len();
                let mut bytes = record.payload.clone();
                bytes[begin] = if bytes[begin] == b'0' { b'1' } else { b'0' };
                bytes
            }
            None => record.payload,
        });
        if text.contains(last) {
            break;
        }
    }
    assert!(String::from_utf8_lossy(kept.last().unwrap()).contains(last), "no record holds {last}");
    std::fs::remove_file(path).unwrap();
    let mut writer = RecordWriter::create(path).unwrap();
    for payload in &kept {
        writer.append(payload).unwrap();
    }
    writer.sync().unwrap();
}

/// The first event after `held` is the notice, and numbers go on without a gap.
fn assert_goes_on(events: &[NumberedEvent], held: u64) {
    assert_eq!(events.first().map(|event| event.number), Some(held + 1), "{:?}", names(events));
    assert_eq!(names(events)[0], "notice KIND_EVENTS_LOST");
}

async fn opened(rig: &Rig) -> (Turn, u64, i32) {
    let mut client = rig.client().await.unwrap();
    let turn = Turn::new(rig, "cnv_1", "ses_1", "trn_1", 1);
    turn.open(&mut client).await.unwrap();
    let mut follower = turn.follow(&mut client, 0, false).await.unwrap();
    let seen = follower.until(|kind| matches!(kind, Kind::Session(_))).await.unwrap();
    let keeper = turn.inspect(&mut client).await.unwrap().process.unwrap().keeper_pid;
    (turn, seen.last().unwrap().number, keeper)
}

#[tokio::test]
async fn s47_a_turn_that_is_forgotten_before_its_message_goes_on_after_what_the_caller_holds() {
    let mut rig = Rig::start().await.unwrap();
    let (mut turn, held, keeper) = opened(&rig).await;
    cut_power(&mut rig, keeper).await;
    std::fs::remove_dir_all(rig.state.join("turns/trn_1")).unwrap();
    rig.again().await.unwrap();
    let mut client = rig.client().await.unwrap();
    assert_eq!(turn.inspect(&mut client).await.unwrap().state(), State::Unknown);
    turn.request.last_number = held;
    let answer = turn.open(&mut client).await.unwrap();
    assert_eq!(answer.result(), Opened::Started);
    assert!(answer.last_number > held, "numbered on before it answered: {answer:?}");
    turn.send(&mut client, "[[append path=ran.txt:x]] [[text:once]]").await.unwrap();
    let events = turn.follow(&mut client, held, false).await.unwrap().all().await.unwrap();
    assert_goes_on(&events, held);
    assert_eq!(terminal(&events).unwrap().result, "once");
    assert_eq!(std::fs::read_to_string(rig.work.join("ran.txt")).unwrap(), "x\n");
}

#[tokio::test]
async fn s47_a_turn_whose_journal_lacks_its_end_goes_on_after_what_the_caller_holds() {
    let mut rig = Rig::start().await.unwrap();
    let (mut turn, last, keeper) = opened(&rig).await;
    cut_power(&mut rig, keeper).await;
    rig.again().await.unwrap();
    let mut client = rig.client().await.unwrap();
    turn.request.last_number = last + 20;
    let answer = turn.open(&mut client).await.unwrap();
    assert!(answer.last_number > last + 20, "numbered on before it answered: {answer:?}");
    turn.send(&mut client, "[[text:once]]").await.unwrap();
    let events = turn.follow(&mut client, last + 20, false).await.unwrap().all().await.unwrap();
    assert_goes_on(&events, last + 20);
    assert_eq!(terminal(&events).unwrap().result, "once");
}

#[tokio::test]
async fn a_follower_of_a_running_turn_that_holds_more_is_told_of_lost_events() {
    let mut rig = Rig::start().await.unwrap();
    let mut client = rig.client().await.unwrap();
    let turn = Turn::new(&rig, "cnv_1", "ses_1", "trn_1", 1);
    turn.open(&mut client).await.unwrap();
    turn.send(&mut client, "[[text:said]] [[stall]]").await.unwrap();
    let mut follower = turn.follow(&mut client, 0, false).await.unwrap();
    let seen = follower.until(|kind| matches!(kind, Kind::Text(_))).await.unwrap();
    rig.service.kill().await.unwrap();
    cut_journal(&rig.state.join("turns/trn_1/journal"), "\"Message\"");
    rig.again().await.unwrap();
    let mut client = rig.client().await.unwrap();
    let held = seen.last().unwrap().number + 20;
    let mut follower = turn.follow(&mut client, held, false).await.unwrap();
    let first = follower.until(|kind| matches!(kind, Kind::Notice(_))).await.unwrap();
    assert_goes_on(&first, held);
    turn.cancel(&mut client).await.unwrap();
    let events = turn.follow(&mut client, held, false).await.unwrap().all().await.unwrap();
    assert_eq!(terminal(&events).unwrap().outcome(), Outcome::Cancelled, "{:?}", names(&events));
}

#[tokio::test]
async fn the_end_of_a_turn_is_told_after_what_the_caller_holds() {
    let mut rig = Rig::start().await.unwrap();
    let mut client = rig.client().await.unwrap();
    let turn = Turn::new(&rig, "cnv_1", "ses_1", "trn_1", 1);
    turn.open(&mut client).await.unwrap();
    turn.send(&mut client, "[[text:said]] [[stall]]").await.unwrap();
    let mut follower = turn.follow(&mut client, 0, false).await.unwrap();
    follower.until(|kind| matches!(kind, Kind::Text(_))).await.unwrap();
    let keeper = turn.inspect(&mut client).await.unwrap().process.unwrap().keeper_pid;
    cut_power(&mut rig, keeper).await;
    cut_journal(&rig.state.join("turns/trn_1/journal"), "\"Message\"");
    rig.again().await.unwrap();
    let mut client = rig.client().await.unwrap();
    let told = turn.follow(&mut client, 0, false).await.unwrap().all().await.unwrap();
    let (ended, last) = (terminal(&told).unwrap(), told.last().unwrap().number);
    // Whoever holds more has something else under the end's number.
    let held = last + 20;
    let events = turn.follow(&mut client, held, false).await.unwrap().all().await.unwrap();
    assert_eq!(names(&events), ["notice KIND_EVENTS_LOST", "terminal OUTCOME_FAILED"]);
    assert_goes_on(&events, held);
    assert_eq!(terminal(&events).unwrap(), ended);
    // The same again, and after another restart; and for who reads from the start there is one end.
    assert_eq!(turn.follow(&mut client, held, false).await.unwrap().all().await.unwrap(), events);
    rig.service.kill().await.unwrap();
    rig.again().await.unwrap();
    let mut client = rig.client().await.unwrap();
    assert_eq!(turn.follow(&mut client, held, false).await.unwrap().all().await.unwrap(), events);
    assert_eq!(turn.follow(&mut client, 0, false).await.unwrap().all().await.unwrap(), told);
    turn.acknowledge(&mut client).await.unwrap();
}

#[tokio::test]
async fn a_number_that_never_was_is_refused_where_no_power_was_lost() {
    let rig = Rig::start().await.unwrap();
    let mut client = rig.client().await.unwrap();
    let turn = Turn::new(&rig, "cnv_1", "ses_1", "trn_1", 1);
    turn.open(&mut client).await.unwrap();
    turn.send(&mut client, "[[text:said]]").await.unwrap();
    let events = turn.follow(&mut client, 0, false).await.unwrap().all().await.unwrap();
    let last = events.last().unwrap().number;
    let refused = turn.follow(&mut client, last + 1, false).await.unwrap_err();
    assert_eq!(reason(&refused), "FIELD_INVALID");
}
