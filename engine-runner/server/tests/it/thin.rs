//! The plain way of a turn, its repeats, and its refusals.

use pretty_assertions::assert_eq;
use roundhouse_proto::engine::v1::{
    self as proto, Outcome, event_body::Kind, inspect_response::State,
    start_or_resume_response::Result as Opened,
};

use crate::rig::{Rig, Turn, names, reason, terminal};

#[tokio::test]
async fn a_turn_runs_from_opening_to_acknowledge() {
    let rig = Rig::start().await.unwrap();
    let mut client = rig.client().await.unwrap();
    let turn = Turn::new(&rig, "cnv_1", "ses_1", "trn_1", 1);
    let opened = turn.open(&mut client).await.unwrap();
    assert_eq!(opened.result(), Opened::Started);
    assert!(opened.native_ref.is_some());
    turn.send(&mut client, "[[text:hello]]").await.unwrap();
    let events = turn.follow(&mut client, 0, false).await.unwrap().all().await.unwrap();
    let ended = terminal(&events).unwrap();
    assert_eq!(ended.outcome(), Outcome::Completed, "{:?}", names(&events));
    assert_eq!(ended.result, "hello");
    assert!(ended.usage.unwrap().complete);
    let order = names(&events);
    let at = |name: &str| {
        order.iter().position(|known| known == name).unwrap_or_else(|| panic!("{name}: {order:?}"))
    };
    assert!(at("session STATE_OPENED") < at("phase PHASE_ACCEPTED"));
    assert!(at("phase PHASE_ACCEPTED") < at("text hello"));
    assert!(at("session STATE_NATIVE_REF") < at("terminal OUTCOME_COMPLETED"));
    let seen = turn.inspect(&mut client).await.unwrap();
    assert_eq!((seen.state(), seen.acknowledged), (State::Ended, false));
    turn.acknowledge(&mut client).await.unwrap();
    turn.acknowledge(&mut client).await.unwrap();
    let seen = turn.inspect(&mut client).await.unwrap();
    assert_eq!((seen.state(), seen.acknowledged), (State::Ended, true));
    assert!(!rig.state.join("turns/trn_1/journal").exists());
}

#[tokio::test]
async fn s10_the_next_turn_uses_the_warm_process() {
    let rig = Rig::start().await.unwrap();
    let mut client = rig.client().await.unwrap();
    Turn::new(&rig, "cnv_1", "ses_1", "trn_1", 1).run(&mut client, "[[text:one]]").await.unwrap();
    let second = Turn::new(&rig, "cnv_1", "ses_1", "trn_2", 2);
    assert_eq!(second.open(&mut client).await.unwrap().result(), Opened::AlreadyOpen);
    second.send(&mut client, "[[recall]]").await.unwrap();
    let events = second.follow(&mut client, 0, false).await.unwrap().all().await.unwrap();
    let ended = terminal(&events).unwrap();
    assert_eq!(ended.outcome(), Outcome::Completed);
    assert!(ended.result.contains("[[text:one]]"), "{}", ended.result);
    assert_eq!(rig.engine_log("\"start\"").len(), 1);
}

#[tokio::test]
async fn s49_fifty_callers_at_once_make_one_process() {
    let rig = Rig::start().await.unwrap();
    let client = rig.client().await.unwrap();
    let turn = Turn::new(&rig, "cnv_1", "ses_1", "trn_1", 1);
    let calls = (0..50).map(|_| {
        let (mut client, turn) = (client.clone(), turn.clone());
        tokio::spawn(async move { turn.open(&mut client).await })
    });
    for call in calls.collect::<Vec<_>>() {
        assert_eq!(call.await.unwrap().unwrap().result(), Opened::Started);
    }
    assert_eq!(rig.engine_log("\"start\"").len(), 1);
}

#[tokio::test]
async fn a_repeated_send_delivers_once_and_another_text_is_refused_in_every_state() {
    let mut rig = Rig::start().await.unwrap();
    let mut client = rig.client().await.unwrap();
    let turn = Turn::new(&rig, "cnv_1", "ses_1", "trn_1", 1);
    turn.open(&mut client).await.unwrap();
    let first = turn.send(&mut client, "[[text:once]][[stall]]").await.unwrap();
    let same = async |rig: &Rig, state: &str| {
        let mut client = rig.client().await.unwrap();
        let again = turn.send(&mut client, "[[text:once]][[stall]]").await;
        assert_eq!(again.unwrap(), first, "{state}");
        let other = turn.send(&mut client, "[[text:twice]]").await.unwrap_err();
        assert_eq!(reason(&other), "FIELD_INVALID", "{state}: {other:?}");
    };
    let mut follower = turn.follow(&mut client, 0, false).await.unwrap();
    follower.until(|kind| matches!(kind, Kind::Text(_))).await.unwrap();
    same(&rig, "running").await;
    turn.cancel(&mut client).await.unwrap();
    let events = turn.follow(&mut client, 0, false).await.unwrap().all().await.unwrap();
    assert_eq!(names(&events).iter().filter(|name| name.starts_with("text ")).count(), 1);
    same(&rig, "ended").await;
    rig.service.kill().await.unwrap();
    rig.again().await.unwrap();
    same(&rig, "ended in an earlier life").await;
    let mut client = rig.client().await.unwrap();
    turn.acknowledge(&mut client).await.unwrap();
    same(&rig, "acknowledged").await;
    assert_eq!(reason(&turn.open(&mut client).await.unwrap_err()), "WRONG_STATE");
    // A tombstone of a version that kept no digest still answers a repeat.
    let tombstone = rig.state.join("turns/trn_1/tombstone.json");
    let mut old: serde_json::Value = serde_json::from_slice(&std::fs::read(&tombstone).unwrap()).unwrap();
    assert!(old.as_object_mut().unwrap().remove("texts").is_some());
    std::fs::write(&tombstone, old.to_string()).unwrap();
    assert_eq!(turn.send(&mut client, "[[text:once]][[stall]]").await.unwrap(), first);
}

#[tokio::test]
async fn s48_a_stale_epoch_is_refused_and_a_higher_one_ends_the_older_turn() {
    let rig = Rig::start().await.unwrap();
    let mut client = rig.client().await.unwrap();
    let old = Turn::new(&rig, "cnv_1", "ses_1", "trn_1", 5);
    old.open(&mut client).await.unwrap();
    old.send(&mut client, "[[stall]]").await.unwrap();
    let stale = Turn::new(&rig, "cnv_1", "ses_1", "trn_0", 4);
    let refused = stale.open(&mut client).await.unwrap_err();
    assert_eq!((refused.code(), reason(&refused).as_str()), (tonic::Code::Aborted, "STALE_EPOCH"));
    let new = Turn::new(&rig, "cnv_1", "ses_1", "trn_2", 6);
    new.open(&mut client).await.unwrap();
    let events = old.follow(&mut client, 0, false).await;
    assert_eq!(reason(&events.unwrap_err()), "STALE_EPOCH");
    let seen = old.inspect(&mut client).await.unwrap();
    assert_eq!(seen.terminal.unwrap().failure.unwrap().reason(), proto::FailureReason::RunnerLost);
    assert_eq!(reason(&old.send(&mut client, "x").await.unwrap_err()), "STALE_EPOCH");
    old.acknowledge(&mut client).await.unwrap();
    new.send(&mut client, "[[text:mine]]").await.unwrap();
    let events = new.follow(&mut client, 0, false).await.unwrap().all().await.unwrap();
    assert_eq!(terminal(&events).unwrap().result, "mine");
}

#[tokio::test]
async fn a_held_workspace_names_its_holder_and_a_child_directory_is_held_too() {
    let rig = Rig::start().await.unwrap();
    let mut client = rig.client().await.unwrap();
    let child = rig.work.join("child");
    std::fs::create_dir(&child).unwrap();
    let holder = Turn::new(&rig, "cnv_1", "ses_1", "trn_1", 1);
    holder.open(&mut client).await.unwrap();
    let mut other = Turn::new(&rig, "cnv_2", "ses_2", "trn_2", 1);
    other.request.workspace = child.display().to_string();
    let refused = other.open(&mut client).await.unwrap_err();
    assert_eq!(reason(&refused), "WORKSPACE_BUSY");
    assert!(refused.message().contains("trn_1"), "{}", refused.message());
    holder.cancel(&mut client).await.unwrap();
    holder.follow(&mut client, 0, false).await.unwrap().all().await.unwrap();
    other.open(&mut client).await.unwrap();
}

#[tokio::test]
async fn refusals_say_why_and_allocate_nothing() {
    let rig = Rig::start().await.unwrap();
    let mut client = rig.client().await.unwrap();
    let good = Turn::new(&rig, "cnv_1", "ses_1", "trn_1", 1);
    let mut cases = Vec::new();
    let mut case = |want: &'static str, change: &dyn Fn(&mut proto::StartOrResumeRequest)| {
        let mut turn = good.clone();
        change(&mut turn.request);
        cases.push((want, turn));
    };
    case("FIELD_INVALID", &|r| r.turn_id = "a/b".into());
    case("FIELD_INVALID", &|r| r.epoch = 0);
    case("FIELD_INVALID", &|r| r.model = String::new());
    case("FIELD_INVALID", &|r| r.workspace = "relative".into());
    case("FIELD_INVALID", &|r| r.agent_prompt_sha256 = "00".into());
    case("WORKSPACE_NOT_FOUND", &|r| r.workspace = "/etc".into());
    case("UNSUPPORTED", &|r| r.engine = "nothing".into());
    case("CONFIGURATION", &|r| r.effort = Some("minimal".into()));
    case("POLICY", &|r| r.options.as_mut().unwrap().permissions = 3);
    for (want, turn) in cases {
        let refused = turn.open(&mut client).await.unwrap_err();
        assert_eq!(reason(&refused), want, "{refused:?}");
    }
    assert_eq!(good.inspect(&mut client).await.unwrap().state(), State::Unknown);
    assert_eq!(rig.processes(), []);
    // None of them used up the turn, its epoch or the slot.
    good.run(&mut client, "[[text:fine]]").await.unwrap();
}
