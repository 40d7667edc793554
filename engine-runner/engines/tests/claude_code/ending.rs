//! What belongs to a turn, and what ends it.

use pretty_assertions::assert_eq;
use roundhouse_engines::{Event, Exit, OpenMode, Output, Reason, TurnOutcome, WaitingFor};
use serde_json::json;

use crate::support::{
    DELIVERY, NATIVE, Owned, SECOND, begun, closing, end, ends, events, failure, feed, initialized,
    lifecycle, notices, open, play, play_frames, result, run, said, state, transcript, translator,
};

#[test]
fn a_turn_ends_whichever_of_result_and_lifecycle_comes_first() {
    for swapped in [false, true] {
        let mut frames = begun();
        let mut last = closing("done");
        if swapped {
            last.swap(0, 1);
        }
        frames.extend(last);
        let told = play_frames(frames);
        assert_eq!(end(&told).outcome, TurnOutcome::Completed);
        assert_eq!(end(&told).answer.as_ref().unwrap().body.text, "done");
        assert!(!end(&told).process_gone);
    }
}

#[test]
fn a_result_is_not_the_end_while_the_session_is_busy() {
    let mut frames = begun();
    frames.extend([result("first"), lifecycle(DELIVERY, "completed")]);
    let told = play_frames(frames.clone());
    assert_eq!(ends(&told).len(), 0);
    // A background task goes on and brings another result.
    frames.extend([said("m2", "second"), result("second"), state("idle")]);
    let told = play_frames(frames);
    assert_eq!(end(&told).answer.as_ref().unwrap().body.text, "first\n\nsecond");
}

#[test]
fn idle_without_a_result_settles_and_then_fails() {
    let mut frames = begun();
    frames.extend([lifecycle(DELIVERY, "completed"), state("idle")]);
    let mut reader = translator(&open(Some(OpenMode::Start), NATIVE));
    let outputs = feed(reader.as_mut(), &frames);
    assert_eq!(outputs.iter().filter(|output| matches!(output, Output::Settling)).count(), 1);
    assert_eq!(reader.standing().waiting_for, WaitingFor::Idle);
    let last = reader.settle();
    let Some(Output::TurnEnded(end)) = last.last() else { panic!("{last:?}") };
    let TurnOutcome::Failed { failure } = &end.outcome else { panic!("{end:?}") };
    assert_eq!(failure.native_code.as_deref(), Some("no_result"));
    assert_eq!(reader.settle(), vec![]);
}

#[test]
fn s41_done_but_never_idle_is_a_success_with_a_notice_after_the_settle_time() {
    let mut frames = begun();
    frames.extend([result("done"), lifecycle(DELIVERY, "completed")]);
    let mut reader = translator(&open(Some(OpenMode::Start), NATIVE));
    feed(reader.as_mut(), &frames);
    let last = reader.settle();
    assert!(
        matches!(&last[0], Output::Event { event: Event::Notice(notice) } if notice.code == "not_settled")
    );
    assert!(matches!(last.last(), Some(Output::TurnEnded(end)) if end.outcome == TurnOutcome::Completed));
    assert!(!reader.standing().quiescent, "it takes no turn before it is idle");
}

#[test]
fn settling_is_told_once_and_ends_by_itself_when_the_engine_becomes_idle() {
    let mut frames = begun();
    frames.extend([result("done"), lifecycle(DELIVERY, "completed"), said("m2", "more"), state("idle")]);
    let mut reader = translator(&open(Some(OpenMode::Start), NATIVE));
    let outputs = feed(reader.as_mut(), &frames);
    assert_eq!(outputs.iter().filter(|output| matches!(output, Output::Settling)).count(), 1);
    assert!(matches!(outputs.last(), Some(Output::TurnEnded(_))));
    assert_eq!(reader.settle(), vec![], "a late timer ends nothing");
}

#[test]
fn s34_exit_zero_without_a_result_is_a_failure() {
    let mut frames = begun();
    frames.push(said("m1", "half"));
    frames.push(Owned::Exit(Exit { code: Some(0), signal: None }));
    let told = play_frames(frames);
    assert_eq!(failure(&told).reason, Reason::Process);
    assert_eq!(failure(&told).exit_code, Some(0));
    let answer = end(&told).answer.as_ref().unwrap();
    assert_eq!((answer.body.text.as_str(), answer.incomplete), ("half", true));
}

#[test]
fn s35_a_bad_exit_after_the_result_is_a_notice() {
    let mut frames = begun();
    frames.push(result("done"));
    frames.push(Owned::Exit(Exit { code: Some(1), signal: None }));
    let told = play_frames(frames);
    assert_eq!(end(&told).outcome, TurnOutcome::Completed);
    assert!(end(&told).process_gone);
    assert_eq!(notices(&told, "exit_after_result").len(), 1);
}

#[test]
fn s40_an_empty_success_is_the_empty_string() {
    let told = run("empty");
    assert_eq!(end(&told).outcome, TurnOutcome::Completed);
    assert_eq!(end(&told).answer.as_ref().unwrap().body.text, "");
}

#[test]
fn acceptance_is_told_once_on_the_engines_own_proof() {
    let told = run("text");
    let accepted = told.iter().filter(|(_, _, output)| matches!(output, Output::Accepted { .. })).count();
    assert_eq!(accepted, 2, "the third delivery is a repeat and was not taken");

    // The echo alone will do while the engine is at work.
    let mut frames = initialized();
    frames.extend([
        Owned::Intent(DELIVERY.into()),
        state("running"),
        Owned::line(
            &json!({"type": "user", "uuid": DELIVERY, "isReplay": true, "message": {"content": "x"}}),
        ),
        lifecycle(DELIVERY, "started"),
    ]);
    let told = play_frames(frames);
    assert_eq!(told.iter().filter(|(_, _, output)| matches!(output, Output::Accepted { .. })).count(), 1);
}

#[test]
fn s64_a_repeated_delivery_id_does_not_hang_and_is_not_taken() {
    for (told, place) in [(run("text"), 2), (run("resume_dup"), 0), (play(&transcript("dup_uuid_resume")), 0)]
    {
        let end = ends(&told)[place];
        let TurnOutcome::Failed { failure } = &end.outcome else { panic!("{end:?}") };
        assert_eq!(failure.native_code.as_deref(), Some("duplicate_delivery"));
        assert!(!end.accepted);
        assert!(failure.retryable);
    }
}

#[test]
fn output_of_another_message_is_not_the_turns() {
    let mut frames = begun();
    frames.push(Owned::line(
        &json!({"type": "assistant", "parent_tool_use_id": null, "user_message_uuid": SECOND,
        "message": {"id": "other", "model": "m", "content": [{"type": "text", "text": "not yours"}]}}),
    ));
    frames.push(Owned::line(
        &json!({"type": "result", "subtype": "success", "is_error": true, "result": "boom",
        "user_message_uuid": SECOND}),
    ));
    frames.push(said("mine", "yours"));
    frames.extend(closing("yours"));
    let told = play_frames(frames);
    assert_eq!(end(&told).outcome, TurnOutcome::Completed);
    assert_eq!(events(&told).iter().filter(|event| matches!(event, Event::Text(_))).count(), 1);
    assert_eq!(notices(&told, "unrequested_turn").len(), 1);
}

#[test]
fn a_turn_nobody_asked_for_is_a_session_notice_and_keeps_the_process_busy() {
    let mut frames = begun();
    frames.extend(closing("done"));
    let mut reader = translator(&open(Some(OpenMode::Start), NATIVE));
    feed(reader.as_mut(), &frames);
    assert!(reader.standing().quiescent);
    let woken = [
        state("running"),
        Owned::line(&json!({"type": "system", "subtype": "init", "session_id": NATIVE})),
        said("peer", "hello peer"),
        result("hello peer"),
    ];
    let outputs = feed(reader.as_mut(), &woken);
    assert_eq!(outputs.len(), 1, "{outputs:?}");
    assert!(matches!(&outputs[0], Output::SessionNotice { notice } if notice.code == "unrequested_turn"));
    assert!(!reader.standing().quiescent);
    feed(reader.as_mut(), &[state("idle")]);
    assert!(reader.standing().quiescent);
}

#[test]
fn a_process_waiting_for_a_permission_is_not_idle() {
    let mut frames = begun();
    frames.push(state("requires_action"));
    let mut reader = translator(&open(Some(OpenMode::Start), NATIVE));
    feed(reader.as_mut(), &frames);
    assert!(!reader.standing().quiescent);
}
