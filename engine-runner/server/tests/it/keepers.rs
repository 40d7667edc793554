//! Keepers that a runner must leave alone: what they hold is nobody else's while they live.

use std::path::PathBuf;
use std::time::Duration;

use pretty_assertions::assert_eq;
use roundhouse_proto::engine::v1::{FailureReason, Outcome, ProcessFact, event_body::Kind};
use roundhouse_test_support::wait_until;
use tokio::time::Instant;

use crate::rig::{BOUND, Rig, Turn, With, names, reason, signal, terminal};

/// A turn with or without a message, and its process; the runner is dead, and the keeper a newer program's.
async fn left_by_a_newer(rig: &mut Rig, message: Option<&str>) -> (Turn, ProcessFact) {
    let mut client = rig.client().await.unwrap();
    let turn = Turn::new(rig, "cnv_1", "ses_1", "trn_1", 1);
    turn.open(&mut client).await.unwrap();
    if let Some(text) = message {
        turn.send(&mut client, text).await.unwrap();
        let mut follower = turn.follow(&mut client, 0, false).await.unwrap();
        follower.until(|kind| matches!(kind, Kind::Text(_))).await.unwrap();
    }
    let process = turn.inspect(&mut client).await.unwrap().process.unwrap();
    rig.service.kill().await.unwrap();
    // Nothing in it but the version is as this program would write it.
    let text = r#"{ "version": 99, "owner": { "kind": "runner" }, "spool": [1, 2] }"#;
    std::fs::write(meta(rig, &process), text).unwrap();
    rig.again().await.unwrap();
    (turn, process)
}

fn meta(rig: &Rig, process: &ProcessFact) -> PathBuf {
    rig.state.join("sessions/ses_1/spools").join(&process.spool_id).join("meta.json")
}

fn lives(rig: &Rig, process: &ProcessFact) -> bool {
    rig.processes().iter().any(|(pid, _)| i32::try_from(*pid) == Ok(process.keeper_pid))
}

async fn end_keeper(rig: &Rig, process: &ProcessFact) {
    signal(u32::try_from(process.keeper_pid).unwrap(), "KILL").unwrap();
    wait_until("nothing outlives its keeper", BOUND, || rig.processes().is_empty()).await.unwrap();
}

#[tokio::test]
async fn s46_a_newer_keeper_without_a_message_ends_its_turn_and_never_gets_company() {
    let mut rig = Rig::start().await.unwrap();
    let (turn, process) = left_by_a_newer(&mut rig, None).await;
    let mut client = rig.client().await.unwrap();
    // At once: nobody can bring this turn another process on its session.
    let events = turn.follow(&mut client, 0, false).await.unwrap().all().await.unwrap();
    let ended = terminal(&events).unwrap();
    let failure = ended.failure.clone().unwrap();
    assert_eq!((ended.outcome(), failure.reason()), (Outcome::Failed, FailureReason::RunnerLost));
    assert!(failure.retryable, "{failure:?}");
    turn.acknowledge(&mut client).await.unwrap();
    let next = Turn::new(&rig, "cnv_1", "ses_1", "trn_2", 2);
    let refused = next.open(&mut client).await.unwrap_err();
    assert_eq!(reason(&refused), "ENGINE_START_FAILED", "{refused:?}");
    assert!(refused.message().contains(&process.spool_id), "{refused:?}");
    assert_eq!(rig.engine_log("\"start\"").len(), 1, "two processes on one session");
    assert!(lives(&rig, &process), "a newer runner's keeper was ended");
    // Another session in the same workspace is nobody's business of that keeper.
    Turn::new(&rig, "cnv_3", "ses_3", "trn_3", 1).run(&mut client, "[[text:x]]").await.unwrap();
    end_keeper_of(&rig, &process).await;
    next.run(&mut client, "[[text:y]]").await.unwrap();
}

async fn end_keeper_of(rig: &Rig, process: &ProcessFact) {
    signal(u32::try_from(process.keeper_pid).unwrap(), "KILL").unwrap();
    wait_until("the keeper is dead", BOUND, || !lives(rig, process)).await.unwrap();
}

#[tokio::test]
async fn s47_a_lost_turn_keeps_its_workspace_while_its_keeper_lives() {
    let mut rig = Rig::start().await.unwrap();
    let (turn, process) = left_by_a_newer(&mut rig, Some("[[text:said]] [[stall]]")).await;
    let mut client = rig.client().await.unwrap();
    let events = turn.follow(&mut client, 0, false).await.unwrap().all().await.unwrap();
    assert_eq!(terminal(&events).unwrap().outcome(), Outcome::Lost, "{:?}", names(&events));
    let other = Turn::new(&rig, "cnv_2", "ses_2", "trn_2", 1);
    let busy = async |rig: &Rig, when: &str| {
        let refused = other.open(&mut rig.client().await.unwrap()).await.unwrap_err();
        assert_eq!(reason(&refused), "WORKSPACE_BUSY", "{when}: {refused:?}");
        assert!(refused.message().contains("trn_1"), "{when}: {refused:?}");
    };
    busy(&rig, "lost").await;
    turn.acknowledge(&mut client).await.unwrap();
    busy(&rig, "acknowledged").await;
    rig.service.kill().await.unwrap();
    rig.again().await.unwrap();
    busy(&rig, "after a restart").await;
    assert!(lives(&rig, &process), "a newer runner's keeper was ended");
    end_keeper(&rig, &process).await;
    let mut client = rig.client().await.unwrap();
    let deadline = Instant::now() + BOUND;
    while let Err(refused) = other.open(&mut client).await {
        assert_eq!(reason(&refused), "WORKSPACE_BUSY", "{refused:?}");
        assert!(Instant::now() < deadline, "it is never free");
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
    }
    assert!(std::fs::read_dir(rig.state.join("held")).unwrap().next().is_none());
}

#[tokio::test]
async fn at_the_start_one_stopped_keeper_is_not_waited_for_after_the_other() {
    let silence = Duration::from_secs(2);
    let mut rig = Rig::with(With::set("keeper_timeout", "2s")).await.unwrap();
    let mut client = rig.client().await.unwrap();
    let mut turns = Vec::new();
    for n in 0..6 {
        let mut turn = Turn::new(&rig, &format!("cnv_{n}"), &format!("ses_{n}"), &format!("trn_{n}"), 1);
        let workspace = rig.work.join(format!("w{n}"));
        std::fs::create_dir(&workspace).unwrap();
        turn.request.workspace = workspace.display().to_string();
        turn.open(&mut client).await.unwrap();
        turn.send(&mut client, "[[text:said]] [[stall]]").await.unwrap();
        let mut follower = turn.follow(&mut client, 0, false).await.unwrap();
        follower.until(|kind| matches!(kind, Kind::Text(_))).await.unwrap();
        let keeper = turn.inspect(&mut client).await.unwrap().process.unwrap().keeper_pid;
        signal(u32::try_from(keeper).unwrap(), "STOP").unwrap();
        turns.push(turn);
    }
    rig.service.kill().await.unwrap();
    let begin = Instant::now();
    rig.again().await.unwrap();
    let took = begin.elapsed();
    assert!(
        took < silence * 4,
        "{took:?} for {} stopped keepers that may be silent for {silence:?}",
        turns.len()
    );
    let mut client = rig.client().await.unwrap();
    for turn in &turns {
        let events = turn.follow(&mut client, 0, false).await.unwrap().all().await.unwrap();
        let failure = terminal(&events).unwrap().failure.clone().unwrap();
        assert!(failure.retryable, "{failure:?}");
        let said = names(&events).iter().filter(|name| name.starts_with("text")).count();
        assert_eq!(said, 1, "{:?}", names(&events));
    }
}

/// A keeper that was silent while the runner started answers later. Its engine serves no turn and nobody holds it: it is
/// ended, and the next turn resumes the session.
#[tokio::test]
async fn s46_an_idle_keeper_that_was_silent_at_the_start_does_not_block_its_session() {
    let mut rig = Rig::with(With::set("keeper_timeout", "1s")).await.unwrap();
    let mut client = rig.client().await.unwrap();
    let first = Turn::new(&rig, "cnv_1", "ses_1", "trn_1", 1);
    first.open(&mut client).await.unwrap();
    let keeper = first.inspect(&mut client).await.unwrap().process.unwrap().keeper_pid;
    let keeper = u32::try_from(keeper).unwrap();
    first.send(&mut client, "[[text:one]]").await.unwrap();
    first.follow(&mut client, 0, false).await.unwrap().all().await.unwrap();
    first.acknowledge(&mut client).await.unwrap();
    signal(keeper, "STOP").unwrap();
    rig.service.kill().await.unwrap();
    rig.again().await.unwrap();
    signal(keeper, "CONT").unwrap();
    let mut client = rig.client().await.unwrap();
    let events =
        Turn::new(&rig, "cnv_1", "ses_1", "trn_2", 2).run(&mut client, "[[text:two]]").await.unwrap();
    let last = terminal(&events).unwrap();
    assert_eq!((last.outcome(), last.result.as_str()), (Outcome::Completed, "two"), "{last:?}");
    assert_eq!(rig.engine_log("\"start\"").len(), 2, "the session was resumed by another process");
}
