//! The runner itself is at fault: a panic in a turn, or an end that does not come, costs that turn and nothing else.

use pretty_assertions::assert_eq;
use roundhouse_proto::engine::v1::{FailureReason, Outcome};
use roundhouse_test_support::wait_until;

use crate::rig::{BOUND, Rig, Turn, With, names, reason, terminal};

/// How a turn with a fault at these points ends.
struct Case {
    points: &'static str,
    text: &'static str,
    /// Whether the session opens before the fault.
    opens: bool,
    outcome: Outcome,
}

async fn ends(case: Case) {
    let Case { points, text, opens, outcome } = case;
    let mut rig = Rig::with(With::failpoint(points)).await.unwrap();
    let mut client = rig.client().await.unwrap();
    let turn = Turn::new(&rig, "cnv_1", "ses_1", "trn_1", 1);
    let opened = tokio::time::timeout(BOUND, turn.open(&mut client)).await.unwrap();
    let followed = if opens {
        opened.unwrap();
        let follower = turn.follow(&mut client, 0, false).await.unwrap();
        turn.send(&mut client, text).await.unwrap();
        // Without a gap, whatever broke between journal and follower.
        follower.all().await.unwrap()
    } else {
        // The engine may have proved its opening before it was killed.
        if let Err(refused) = opened {
            let told = reason(&refused);
            assert!(["ENGINE_START_FAILED", "INTERNAL"].contains(&told.as_str()), "{points}: {refused:?}");
        }
        turn.follow(&mut client, 0, false).await.unwrap().all().await.unwrap()
    };
    let ended = terminal(&followed).unwrap();
    assert_eq!(ended.outcome(), outcome, "{points}: {:?}", names(&followed));
    if let Some(failure) = &ended.failure {
        assert_eq!(failure.reason(), FailureReason::Process, "{points}: {failure:?}");
        assert!(failure.retryable && failure.message.contains("internal error"), "{points}: {failure:?}");
        assert!(failure.next_action.contains("retry"), "{points}: {failure:?}");
    }
    let texts = names(&followed).iter().filter(|name| name.starts_with("text said")).count();
    assert!(texts <= 1, "{points}: {:?}", names(&followed));
    // What was told is what is kept.
    let kept = turn.follow(&mut client, 0, false).await.unwrap().all().await.unwrap();
    assert_eq!(kept, followed, "{points}");
    wait_until("the turn's processes are gone", BOUND, || rig.processes().is_empty()).await.unwrap();
    turn.acknowledge(&mut client).await.unwrap();
    if points.contains("panics") {
        // A fault that stays would meet the next turn, too.
        rig.service.kill().await.unwrap();
        rig.again().await.unwrap();
        client = rig.client().await.unwrap();
    }
    // Neither the conversation nor the workspace is held. The session goes on where its turn had come to its end; an engine
    // that was killed in the first turn of one may have made it or not.
    let session = if outcome == Outcome::Completed { "ses_1" } else { "ses_2" };
    let next = Turn::new(&rig, "cnv_1", session, "trn_2", 2);
    let events = next.run(&mut client, "[[text:goes on]]").await.unwrap();
    let last = terminal(&events).unwrap();
    assert_eq!((last.outcome(), last.result.as_str()), (Outcome::Completed, "goes on"), "{points}");
}

#[tokio::test]
async fn a_panic_in_a_turns_task_ends_the_turn_and_nothing_else() {
    for (points, opens) in [
        // Between the journal and the followers, in the middle of the turn.
        ("runner::journalled=3*panic", true),
        // While the opening is awaited.
        ("runner::frames=1*panic", false),
        // In whatever the engine says, its end included.
        ("runner::frames=1*panics", false),
        // Beside the turn.
        ("runner::starting=1*panic", false),
    ] {
        ends(Case { points, text: "[[text:said]] [[stall]]", opens, outcome: Outcome::Failed }).await;
    }
}

#[tokio::test]
async fn s8_an_end_that_breaks_or_does_not_come_is_told_without_what_it_collects() {
    for points in ["runner::ending=1*panic", "runner::ending_held=2000*pause;runner::ending_soon=1*fail"] {
        ends(Case { points, text: "[[text:said]]", opens: true, outcome: Outcome::Completed }).await;
    }
}
