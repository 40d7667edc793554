//! Openings that fail: whoever waits for one is told the real reason.

use pretty_assertions::assert_eq;
use roundhouse_proto::engine::v1::{FailureReason, Outcome, event_body::Kind, inspect_response::State};
use roundhouse_test_support::wait_until;
use tonic::Status;
use tonic_types::StatusExt as _;

use crate::rig::{BOUND, Rig, Turn, With, names, reason, terminal};

/// What a refusal's details say under this name.
fn detail(status: &Status, name: &str) -> String {
    status.get_details_error_info().and_then(|info| info.metadata.get(name).cloned()).unwrap_or_default()
}

#[tokio::test]
async fn an_executable_that_cannot_be_run_is_refused_with_the_systems_words_and_what_to_do() {
    let cases = [
        ("#!/nonexistent/interpreter\n", "No such file or directory", "interpreter"),
        // /etc/hostname and the like are no programs: an interpreter that may not be executed.
        ("#!/etc/passwd\n", "Permission denied", "executable"),
        ("neither a binary nor a script\n", "Exec format error", "#! line"),
    ];
    for (wrapper, words, advice) in cases {
        let rig = Rig::with(With { wrapper: Some(wrapper), ..With::default() }).await.unwrap();
        let mut client = rig.client().await.unwrap();
        let turn = Turn::new(&rig, "cnv_1", "ses_1", "trn_1", 1);
        let refused = turn.open(&mut client).await.unwrap_err();
        assert_eq!(reason(&refused), "ENGINE_MISSING", "{refused:?}");
        assert_eq!(detail(&refused, "failure_reason"), "ENGINE_MISSING");
        assert!(refused.message().contains(words), "{words}: {}", refused.message());
        assert!(detail(&refused, "next_action").contains(advice), "{words}: {refused:?}");
        assert_eq!(turn.inspect(&mut client).await.unwrap().state(), State::Unknown, "{words}");
        wait_until("no process is left", BOUND, || rig.processes().is_empty()).await.unwrap();
    }
}

#[tokio::test]
async fn a_line_without_end_in_the_opening_is_told_to_whoever_waits_for_it() {
    let with = With {
        script: Some("@initialize\n[[long bytes=300000 open]]\n[[hang]]\n"),
        ..With::set("max_line_bytes", 100_000)
    };
    let rig = Rig::with(with).await.unwrap();
    let mut client = rig.client().await.unwrap();
    let turn = Turn::new(&rig, "cnv_1", "ses_1", "trn_1", 1);
    let refused = turn.open(&mut client).await.unwrap_err();
    assert_eq!(detail(&refused, "failure_reason"), "OUTPUT_INVALID", "{refused:?}");
    assert!(detail(&refused, "next_action").contains("max_line_bytes"), "{refused:?}");
    assert_eq!(turn.inspect(&mut client).await.unwrap().state(), State::Unknown);
    wait_until("no process is left", BOUND, || rig.processes().is_empty()).await.unwrap();
}

#[tokio::test]
async fn a_line_without_end_in_a_turn_is_invalid_output() {
    let rig = Rig::with(With::set("max_line_bytes", 100_000)).await.unwrap();
    let mut client = rig.client().await.unwrap();
    let turn = Turn::new(&rig, "cnv_1", "ses_1", "trn_1", 1);
    turn.open(&mut client).await.unwrap();
    turn.send(&mut client, "[[text:so far]] [[long bytes=300000 open]] [[stall]]").await.unwrap();
    let events = turn.follow(&mut client, 0, false).await.unwrap().all().await.unwrap();
    let ended = terminal(&events).unwrap();
    let failure = ended.failure.clone().unwrap();
    assert_eq!((ended.outcome(), failure.reason()), (Outcome::Failed, FailureReason::OutputInvalid));
    assert!(failure.next_action.contains("max_line_bytes") && failure.retryable, "{failure:?}");
    assert!(names(&events).contains(&"text so far".to_owned()), "{:?}", names(&events));
}

#[tokio::test]
async fn a_turn_that_ends_while_its_session_opens_tells_why_to_whoever_waits() {
    let with = With { script: Some("@initialize\n[[pause ms=60000]]\n"), ..With::default() };
    let rig = Rig::with(with).await.unwrap();
    let mut client = rig.client().await.unwrap();
    let mut turn = Turn::new(&rig, "cnv_1", "ses_1", "trn_1", 1);
    turn.request.options.as_mut().unwrap().deadline = Some(prost_types::Duration { seconds: 1, nanos: 0 });
    let refused = turn.open(&mut client).await.unwrap_err();
    assert_eq!(detail(&refused, "failure_reason"), "DEADLINE", "{refused:?}");
    let mut follower = turn.follow(&mut client, 0, false).await.unwrap();
    let events = follower.until(|kind| matches!(kind, Kind::Terminal(_))).await.unwrap();
    assert_eq!(terminal(&events).unwrap().failure.unwrap().reason(), FailureReason::Deadline);
}
