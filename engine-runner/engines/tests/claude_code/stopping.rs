//! Interrupts, signals and deaths.

use pretty_assertions::assert_eq;
use roundhouse_engines::{Event, Exit, Frame, OpenMode, Output, Reason, TurnOutcome, WaitingFor};
use serde_json::json;

use crate::support::{
    NATIVE, Owned, begun, claude, closing, end, ends, events, failure, feed, open, play, play_frames,
    recording, run, transcript, translator,
};

#[test]
fn s44_an_interrupt_before_the_engine_began_is_a_cancel_without_a_result() {
    let told = run("interrupt_before_first_byte");
    assert_eq!(end(&told).outcome, TurnOutcome::Cancelled);
    assert!(!end(&told).accepted);
    assert!(end(&told).answer.is_none());
    let told = play(&transcript("interrupt_race"));
    assert_eq!(end(&told).outcome, TurnOutcome::Cancelled);
}

#[test]
fn s45_a_cancel_keeps_the_partial_text_and_the_process() {
    for name in ["interrupt_text", "interrupt_tool", "interrupt_retry", "perm_interrupt", "interrupt_twice"] {
        let told = run(name);
        assert_eq!(ends(&told)[0].outcome, TurnOutcome::Cancelled, "{name}");
        assert!(!ends(&told)[0].process_gone, "{name}");
    }
    let told = run("interrupt_text");
    let text = events(&told).into_iter().find_map(|event| match event {
        Event::Text(text) => Some(text.clone()),
        _ => None,
    });
    let text = text.unwrap();
    assert!(text.incomplete);
    assert!(text.body.text.starts_with("word word"));
    assert!(ends(&told)[0].answer.as_ref().unwrap().incomplete);
    assert_eq!(ends(&told)[1].outcome, TurnOutcome::Completed, "the next turn works");
}

#[test]
fn s44_a_late_interrupt_touches_nothing() {
    // The run holds an interrupt of another turn, sent while the process was idle.
    let told = run("interrupt_text");
    assert_eq!(ends(&told).len(), 2);
    let mut frames = begun();
    frames.push(Owned::Intent("interrupt.trn_0".into()));
    frames.extend(closing("done"));
    assert_eq!(end(&play_frames(frames)).outcome, TurnOutcome::Completed);
}

#[test]
fn an_engine_that_finished_before_the_interrupt_is_completed() {
    let mut frames = begun();
    frames.push(Owned::Intent("interrupt.trn_1".into()));
    frames.extend(closing("done"));
    assert_eq!(end(&play_frames(frames)).outcome, TurnOutcome::Completed);
}

#[test]
fn an_abort_nobody_asked_for_is_a_failure() {
    let told = play(&transcript("perm_stdio_deny_True"));
    assert_eq!(failure(&told).native_code.as_deref(), Some("aborted_tools"));
}

#[test]
fn s26_a_killed_turn_stores_its_text_once_marked_incomplete() {
    for name in ["sig_kill", "sig_term"] {
        let told = run(name);
        let texts: Vec<_> = events(&told)
            .into_iter()
            .filter_map(|event| match event {
                Event::Text(text) => Some(text),
                _ => None,
            })
            .collect();
        assert_eq!(texts.len(), 1, "{name}");
        assert!(texts[0].incomplete && texts[0].body.text.starts_with("word "));
        assert!(end(&told).process_gone);
        assert_eq!(end(&told).outcome, TurnOutcome::Cancelled, "we sent the signal");
    }
}

#[test]
fn a_death_nobody_caused_is_a_failure_that_can_be_retried() {
    let mut kill = recording("sig_kill");
    kill.frames.retain(|frame| !matches!(frame, Owned::Signal(_)));
    let told = play(&kill);
    assert_eq!(failure(&told).reason, Reason::Process);
    assert_eq!(failure(&told).signal, Some(9));
    assert!(failure(&told).what_to_do.contains("memory"), "nobody here sent it");
    assert!(failure(&told).retryable);
    assert!(end(&told).accepted);
}

#[test]
fn a_line_without_end_fails_the_turn_and_asks_for_the_ladder() {
    let mut frames = begun();
    frames.push(Owned::Oversized(17_000_000));
    frames.push(Owned::Oversized(17_000_000));
    frames.extend(closing("done"));
    let mut reader = translator(&open(Some(OpenMode::Start), NATIVE));
    let outputs = feed(reader.as_mut(), &frames);
    let stops = outputs.iter().filter(|output| matches!(output, Output::MustStop { .. })).count();
    assert_eq!(stops, 1);
    let Some(Output::TurnEnded(end)) = outputs.last() else { panic!("{outputs:?}") };
    let TurnOutcome::Failed { failure } = &end.outcome else { panic!("{end:?}") };
    assert_eq!(
        (failure.reason, failure.native_code.as_deref()),
        (Reason::OutputInvalid, Some("oversized_line"))
    );
    assert!(!reader.standing().quiescent, "it takes no other turn");
}

#[test]
fn a_hang_in_mid_stream_is_silence_for_our_own_watchdog() {
    let run = recording("err_hangmid");
    let mut reader = translator(&run.open);
    let hang = run.frames.iter().position(
        |frame| matches!(frame, Owned::Out(line) if String::from_utf8_lossy(line).contains("thrown away")),
    );
    feed(reader.as_mut(), &run.frames[..=hang.unwrap()]);
    // The model's server goes on pinging for ever: the timer must run.
    let ping =
        Owned::line(&json!({"type": "stream_event", "event": {"type": "ping"}, "parent_tool_use_id": null}));
    let frame = Frame { number: 100, body: ping.body() };
    assert!(!claude().counts_as_activity(&frame));
    assert_eq!(reader.feed(frame), vec![]);
    assert_eq!(reader.standing().waiting_for, WaitingFor::Model);
    assert!(!reader.standing().ended);
    // What the watchdog then does ends the turn, and the text so far is kept once.
    let outputs = feed(
        reader.as_mut(),
        &[
            Owned::Intent("interrupt.trn_1".into()),
            Owned::Signal(15),
            Owned::Exit(Exit { code: Some(143), signal: None }),
        ],
    );
    let texts: Vec<_> = outputs
        .iter()
        .filter_map(|output| match output {
            Output::Event { event: Event::Text(text) } => Some((text.body.text.as_str(), text.incomplete)),
            _ => None,
        })
        .collect();
    assert_eq!(texts, [("thrown away ", true)]);
    assert!(matches!(outputs.last(), Some(Output::TurnEnded(end)) if end.outcome == TurnOutcome::Cancelled));
}
