//! Cancelling, killing, and what must not outlive a turn.

use pretty_assertions::assert_eq;
use roundhouse_engines::{
    Delivery, DeliveryEnd, Event, LineError, OpenMode, Output, Reason, TurnOutcome, WaitingFor,
};
use serde_json::json;

use crate::support::{
    DELIVERY, Owned, THREAD, TURN, answer, begun, command, completed, end, ends, events, exit, failure, feed,
    given, initialized, notices, open, play_frames, position, recording, replies, reply_ops, run, said,
    taken, translator, turn_started, value_of,
};

#[test]
fn an_interrupt_is_sent_only_after_the_turn_has_started() {
    let mut reader = translator(&open(Some(OpenMode::Start), ""));
    feed(reader.as_mut(), &given());
    // The engine answered the request, but would refuse an interrupt and run the turn to its end.
    let early = reader.interrupt().unwrap();
    assert_eq!(early.op, "hold.trn_1");
    assert_eq!(value_of(&early)["method"], "thread/loaded/list", "nothing that changes anything");
    let outputs = feed(reader.as_mut(), &[Owned::Intent(early.op), Owned::Written("hold.trn_1".into())]);
    assert_eq!(outputs, vec![]);
    let outputs = feed(reader.as_mut(), &[turn_started()]);
    let sent: Vec<_> = replies(&outputs).collect();
    assert_eq!(sent.len(), 1);
    assert_eq!(sent[0].op, "interrupt.trn_1");
    assert_eq!(
        value_of(sent[0]),
        json!({"id": "interrupt.trn_1", "method": "turn/interrupt", "params": {"threadId": THREAD, "turnId": TURN}})
    );
    // A second cancel has the same operation, so that it is written once.
    assert_eq!(reader.interrupt().unwrap().op, "interrupt.trn_1");
}

#[test]
fn an_interrupt_recorded_after_the_start_was_seen_is_sent_at_once() {
    // The line was made before the start, and the start came before it was written.
    let mut reader = translator(&open(Some(OpenMode::Start), ""));
    feed(reader.as_mut(), &begun());
    let outputs = feed(reader.as_mut(), &[Owned::Intent("hold.trn_1".into())]);
    assert_eq!(replies(&outputs).map(|line| line.op.as_str()).collect::<Vec<_>>(), ["interrupt.trn_1"]);
    let outputs = feed(reader.as_mut(), &[Owned::Intent("hold.trn_1".into())]);
    assert_eq!(outputs, vec![], "once");
}

#[test]
fn the_race_recorded_with_the_real_engine_ends_cancelled() {
    let told = run("interrupt_before_start");
    assert_eq!(ends(&told)[0].outcome, TurnOutcome::Cancelled);
    assert_eq!(ends(&told)[1].outcome, TurnOutcome::Completed, "the process lives on");
    assert_eq!(reply_ops(&told)[..3], ["thread", "interrupt.trn_1", "clean.trn_1"]);
}

#[test]
fn background_terminals_are_cleaned_after_an_interrupt() {
    let mut frames = begun();
    frames.extend([command("started", "inProgress"), Owned::Intent("interrupt.trn_1".into())]);
    frames.push(completed("interrupted", json!(null)));
    let mut reader = translator(&open(Some(OpenMode::Start), ""));
    let outputs = feed(reader.as_mut(), &frames);
    // The interrupt left the command running.
    assert!(replies(&outputs).any(|line| line.op == "clean.trn_1"
        && value_of(line)["method"] == "thread/backgroundTerminals/clean"
        && value_of(line)["params"]["threadId"] == THREAD));
    assert!(outputs.contains(&Output::Settling));
    assert!(!reader.standing().ended && !reader.standing().quiescent);
    assert_eq!(reader.standing().waiting_for, WaitingFor::Idle);
    // The answer alone is not the command's end.
    let outputs = feed(
        reader.as_mut(),
        &[answer("clean.trn_1", &json!({})), answer("skills.trn_1", &json!({"data": []}))],
    );
    assert_eq!(outputs, vec![]);
    let outputs = feed(reader.as_mut(), &[command("completed", "failed")]);
    assert!(matches!(outputs.last(), Some(Output::TurnEnded(end)) if end.outcome == TurnOutcome::Cancelled));
    assert!(reader.standing().quiescent);
}

#[test]
fn a_command_that_outlives_its_completed_turn_is_ended_with_it() {
    let told = run("long_command");
    assert!(reply_ops(&told).contains(&"clean.trn_1"));
    assert_eq!(ends(&told)[0].outcome, TurnOutcome::Completed);
    assert_eq!(notices(&told, "commands_ended").len(), 1);
    // Its end comes after the engine's end of the turn and still belongs to it.
    let result = position(&told, |output| matches!(output, Output::Event { event: Event::ToolResult(_) }));
    let ended = position(&told, |output| matches!(output, Output::TurnEnded(_)));
    assert!(result < ended);
}

#[test]
fn s41_commands_that_do_not_end_are_left_when_the_settle_time_runs_out() {
    let mut frames = begun();
    frames.extend([command("started", "inProgress"), completed("completed", json!(null))]);
    let mut reader = translator(&open(Some(OpenMode::Start), ""));
    feed(reader.as_mut(), &frames);
    let outputs = reader.settle();
    assert!(matches!(outputs.last(), Some(Output::TurnEnded(end)) if end.outcome == TurnOutcome::Completed));
    assert!(!reader.standing().quiescent, "the engine still owes an answer: it takes no turn");
    assert_eq!(reader.settle(), vec![]);
}

#[test]
fn a_command_that_waited_for_permission_is_not_waited_for() {
    let told = run("interrupt_at_permission");
    assert_eq!(end(&told).outcome, TurnOutcome::Cancelled);
    assert!(!end(&told).process_gone);
    let withdrawn = events(&told).iter().filter(|event| matches!(event, Event::PermissionAnswer(_))).count();
    assert_eq!(withdrawn, 1);
}

#[test]
fn s45_a_cancel_keeps_the_partial_text_and_the_process() {
    let told = run("interrupt_text");
    let first = ends(&told)[0];
    assert_eq!(first.outcome, TurnOutcome::Cancelled);
    let kept = first.answer.as_ref().unwrap();
    assert!(kept.incomplete && kept.body.text.starts_with("a "));
    assert!(events(&told).iter().any(|event| matches!(event, Event::Text(text) if text.incomplete)));
    assert_eq!(ends(&told)[1].outcome, TurnOutcome::Completed);
}

#[test]
fn a_hang_before_the_headers_says_nothing_and_can_be_interrupted() {
    // No limit of the engine covers it: the runner's idle time does, so nothing may look like work meanwhile.
    let told = run("interrupt_hang");
    assert_eq!(ends(&told)[0].outcome, TurnOutcome::Cancelled);
    let frames = recording("interrupt_hang").frames;
    let taken = frames
        .iter()
        .position(|frame| matches!(frame, Owned::Out(line) if String::from_utf8_lossy(line).contains("userMessage")))
        .unwrap();
    let interrupt =
        frames.iter().position(|frame| *frame == Owned::Intent("interrupt.trn_1".into())).unwrap();
    let work = frames[taken + 2..interrupt].iter().filter(|frame| {
        let frame = roundhouse_engines::Frame { number: 1, body: frame.body() };
        crate::support::codex().counts_as_activity(&frame)
    });
    assert_eq!(work.count(), 0);
}

#[test]
fn s26_a_killed_turn_stores_its_text_once_marked_incomplete() {
    let told = run("sig_kill_text");
    assert_eq!(failure(&told).reason, Reason::Process);
    assert_eq!(failure(&told).signal, Some(9));
    assert!(failure(&told).what_to_do.contains("memory"), "nobody here sent it");
    assert!(end(&told).process_gone);
    let texts: Vec<_> = events(&told).into_iter().filter(|event| matches!(event, Event::Text(_))).collect();
    assert_eq!(texts.len(), 1);
    assert!(matches!(texts[0], Event::Text(text) if text.incomplete));
}

#[test]
fn s34_exit_0_without_the_end_of_the_turn_is_a_failure() {
    let told = run("sig_term");
    assert_eq!(failure(&told).reason, Reason::Process);
    assert_eq!(failure(&told).exit_code, Some(0));
}

#[test]
fn s35_an_exit_after_the_end_of_the_turn_is_a_notice() {
    let mut frames = begun();
    frames.extend([command("started", "inProgress"), said("m", "done"), completed("completed", json!(null))]);
    frames.push(exit(None, Some(9)));
    let told = play_frames(frames);
    assert_eq!(end(&told).outcome, TurnOutcome::Completed);
    assert_eq!(notices(&told, "exit_after_result").len(), 1);
}

#[test]
fn an_engine_that_stops_by_itself_has_failed() {
    let mut frames = begun();
    frames.extend([completed("interrupted", json!(null)), answer("clean.trn_1", &json!({}))]);
    let told = play_frames(frames);
    assert_eq!(failure(&told).native_code.as_deref(), Some("interrupted"));
}

#[test]
fn an_engine_that_finished_before_the_interrupt_is_completed() {
    let mut frames = begun();
    frames.extend([
        said("m", "done"),
        Owned::Intent("interrupt.trn_1".into()),
        completed("completed", json!(null)),
    ]);
    assert_eq!(end(&play_frames(frames)).outcome, TurnOutcome::Completed);
}

#[test]
fn s44_a_late_interrupt_touches_nothing() {
    let mut frames = begun();
    frames.extend([said("m", "done"), completed("completed", json!(null))]);
    let mut reader = translator(&open(Some(OpenMode::Start), ""));
    feed(reader.as_mut(), &frames);
    assert!(reader.standing().ended);
    assert_eq!(reader.interrupt(), Err(LineError::NotNow));
    assert_eq!(feed(reader.as_mut(), &[Owned::Intent("interrupt.trn_1".into())]), vec![]);
}

#[test]
fn a_message_in_a_running_turn_is_a_steer_and_never_a_second_start() {
    let mut reader = translator(&open(Some(OpenMode::Start), ""));
    feed(reader.as_mut(), &given());
    let second = Delivery { delivery_id: crate::support::SECOND, context: None, text: "more" };
    // Between the start and the engine's word on it there is no turn to name.
    assert_eq!(reader.deliver(&second), Err(LineError::NotNow));
    feed(reader.as_mut(), &[turn_started(), taken(DELIVERY)]);
    let line = value_of(&reader.deliver(&second).unwrap());
    assert_eq!(line["method"], "turn/steer");
    assert_eq!(line["params"]["expectedTurnId"], TURN);
    // At the turn's end neither: a start would begin a turn of its own.
    feed(reader.as_mut(), &[command("started", "inProgress"), completed("completed", json!(null))]);
    assert_eq!(reader.deliver(&second), Err(LineError::NotNow));
}

#[test]
fn s51_a_steer_is_taken_within_the_turn_and_throws_away_what_was_being_said() {
    for name in ["steer_text", "steer_tool"] {
        let told = run(name);
        let accepted = told.iter().filter(|(_, _, output)| matches!(output, Output::Accepted { .. })).count();
        assert_eq!(accepted, 2, "{name}");
        assert_eq!(end(&told).outcome, TurnOutcome::Completed);
        assert_eq!(end(&told).answer.as_ref().unwrap().body.text, "reply to and more");
    }
    position(&run("steer_text"), |output| matches!(output, Output::PartialReset { .. }));
}

#[test]
fn s53_a_steer_that_came_too_late_is_refused_and_the_turn_stays_a_success() {
    let mut frames = begun();
    frames.extend([
        Owned::Intent(crate::support::SECOND.into()),
        said("m", "done"),
        crate::support::refusal(crate::support::SECOND, "no active turn to steer"),
        completed("completed", json!(null)),
    ]);
    let told = play_frames(frames);
    assert_eq!(end(&told).outcome, TurnOutcome::Completed);
    let of_second: Vec<_> = told
        .iter()
        .filter_map(|(_, _, output)| match output {
            Output::DeliveryEnded { delivery_id, end } if delivery_id == crate::support::SECOND => Some(*end),
            _ => None,
        })
        .collect();
    assert_eq!(of_second, [DeliveryEnd::Cancelled]);
}

#[test]
fn a_refused_message_is_no_turn() {
    let mut frames = initialized();
    frames.push(Owned::Intent(DELIVERY.into()));
    frames.push(crate::support::refusal(DELIVERY, "thread not found"));
    let told = play_frames(frames);
    assert_eq!(failure(&told).native_code.as_deref(), Some("refused"));
    assert_eq!((failure(&told).reason, failure(&told).retryable), (Reason::Process, true));
    assert!(!end(&told).accepted);
    // Too long it is as often as it is sent.
    let mut frames = initialized();
    frames.push(Owned::Intent(DELIVERY.into()));
    let words = "Input exceeds the maximum length of 1048576 characters.";
    frames.push(crate::support::refusal(DELIVERY, words));
    let told = play_frames(frames);
    assert_eq!((failure(&told).reason, failure(&told).retryable), (Reason::ContextTooLong, false));
    assert!(failure(&told).message.contains(words));
}

#[test]
fn a_line_without_end_fails_the_turn_and_asks_for_the_ladder() {
    let mut frames = begun();
    frames.push(Owned::Oversized(20_000_000));
    frames.push(exit(None, Some(15)));
    let told = play_frames(frames);
    position(&told, |output| matches!(output, Output::MustStop { .. }));
    let told_failure = failure(&told);
    assert_eq!(
        (told_failure.reason, told_failure.native_code.as_deref()),
        (Reason::OutputInvalid, Some("oversized_line"))
    );
    assert_eq!(failure(&told).signal, Some(15));
}
