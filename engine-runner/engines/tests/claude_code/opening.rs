//! Sessions that open, and sessions that do not.

use pretty_assertions::assert_eq;
use roundhouse_engines::{Event, Exit, OpenMode, Output, Reason, event::NoticeKind};
use serde_json::json;

use crate::support::{
    NATIVE, Owned, SECOND, begun, closing, feed, initialized, kinds, notices, open, play, play_frames,
    position, recording, render, run, transcript, translator,
};

#[test]
fn s15_a_session_that_is_gone_is_unusable_and_never_opened() {
    let told = run("resume_missing");
    assert!(told.iter().all(|(_, _, output)| !matches!(output, Output::Opened(_))));
    let [(_, _, Output::OpenFailed(failed))] = &told[..] else { panic!("{}", render(&told)) };
    assert_eq!(failed.failure.reason, Reason::SessionUnusable);
    assert!(failed.failure.message.contains("No conversation found"));
}

#[test]
fn a_session_that_was_never_written_is_started_again_under_its_id() {
    let mut missing = recording("resume_missing");
    let told = play(&missing);
    let [(_, _, Output::OpenFailed(failed))] = &told[..] else { panic!() };
    assert_eq!(failed.retry_as, Some(OpenMode::Start));
    // Once a result was seen the rows were there, and their loss is a loss.
    missing.open.carry.committed = true;
    let told = play(&missing);
    let [(_, _, Output::OpenFailed(failed))] = &told[..] else { panic!() };
    assert_eq!(failed.retry_as, None);
    // A directory in the file's place is not "never written".
    let told = play(&transcript("resume_isdir"));
    let Some((_, _, Output::OpenFailed(failed))) = told.last() else { panic!() };
    assert_eq!((failed.failure.reason, failed.retry_as), (Reason::SessionUnusable, None));
}

#[test]
fn s15_only_a_resume_can_find_a_session_unusable() {
    let mut missing = recording("resume_missing");
    missing.open.opening = Some(OpenMode::Start);
    let told = play(&missing);
    let Some((_, _, Output::OpenFailed(failed))) = told.last() else { panic!() };
    assert_eq!(failed.failure.reason, Reason::Process);
    // A login failure that mentions a session does not burn it.
    let mut frames = initialized()[..2].to_vec();
    frames.push(Owned::Err(b"Not logged in. Please run /login to continue your session\n".to_vec()));
    frames.push(Owned::Exit(Exit { code: Some(1), signal: None }));
    let mut reader = translator(&open(Some(OpenMode::Resume), NATIVE));
    let outputs = feed(reader.as_mut(), &frames);
    let [Output::OpenFailed(failed)] = &outputs[..] else { panic!("{outputs:?}") };
    assert_ne!(failed.failure.reason, Reason::SessionUnusable);
}

#[test]
fn an_id_that_exists_already_is_resumed_instead() {
    let told = run("session_id_in_use");
    let [(_, _, Output::OpenFailed(failed))] = &told[..] else { panic!("{}", render(&told)) };
    assert_eq!(failed.retry_as, Some(OpenMode::Resume));
    assert!(failed.failure.message.contains("already in use"));
    assert_eq!(failed.failure.exit_code, Some(1));
}

#[test]
fn failures_before_the_opening_have_their_reasons() {
    for (stderr, code, reason) in [
        ("--dangerously-skip-permissions cannot be used with root/sudo privileges", 1, Reason::Configuration),
        ("error: unknown option '--nosuch'", 1, Reason::Configuration),
        ("Error: ENOSPC: no space left on device, write", 1, Reason::Storage),
        ("", 127, Reason::EngineMissing),
        ("segmentation fault", 139, Reason::Process),
    ] {
        let mut frames = initialized()[..2].to_vec();
        frames.push(Owned::Err(stderr.as_bytes().to_vec()));
        frames.push(Owned::Exit(Exit { code: Some(code), signal: None }));
        let mut reader = translator(&open(Some(OpenMode::Start), NATIVE));
        let outputs = feed(reader.as_mut(), &frames);
        let [Output::OpenFailed(failed)] = &outputs[..] else { panic!("{outputs:?}") };
        assert_eq!(failed.failure.reason, reason, "{stderr}");
    }
}

#[test]
fn s13_the_native_id_is_known_at_the_opening_and_resumable_from_the_first_result() {
    let told = run("text");
    let opened = position(&told, |output| matches!(output, Output::Opened(_)));
    let committed = position(&told, |output| matches!(output, Output::Committed { .. }));
    assert!(opened < committed);
    assert_eq!(told.iter().filter(|(_, _, output)| matches!(output, Output::Committed { .. })).count(), 1);
    let Output::Opened(opened) = &told[opened].2 else { panic!() };
    assert_eq!(opened.engine_version.as_deref(), Some("2.1.332"));
    // A first turn that failed can still be resumed.
    position(&run("err_500"), |output| matches!(output, Output::Committed { .. }));
    // A kill before any result proves nothing.
    assert!(run("sig_kill").iter().all(|(_, _, output)| !matches!(output, Output::Committed { .. })));
}

#[test]
fn s14_another_native_id_than_asked_is_said_and_the_proven_one_kept() {
    let mut frames = begun();
    frames.push(Owned::line(&json!({"type": "system", "subtype": "init", "session_id": SECOND})));
    frames.push(Owned::line(&json!({"type": "system", "subtype": "init", "session_id": SECOND})));
    frames.extend(closing("done"));
    let told = play_frames(frames);
    assert_eq!(notices(&told, "native_id_changed").len(), 1);
    let committed = position(&told, |output| matches!(output, Output::Committed { .. }));
    assert!(matches!(&told[committed].2, Output::Committed { native } if native.id == NATIVE));
}

#[test]
fn a_dropped_history_and_lost_writes_are_loud() {
    let mut frames = begun();
    frames.push(Owned::line(&json!({"type": "conversation_reset", "new_conversation_id": SECOND})));
    frames.push(Owned::line(
        &json!({"type": "system", "subtype": "session_writes_lost", "error_code": "ENOSPC",
        "lost": ["transcript"]}),
    ));
    frames.push(Owned::Err(b"Error: Claude Code could not save all of this session\n".to_vec()));
    frames.extend(closing("done"));
    let mut reader = translator(&open(Some(OpenMode::Start), NATIVE));
    let outputs = feed(reader.as_mut(), &frames);
    let lost = outputs
        .iter()
        .filter(|output| {
            matches!(output, Output::Event { event: Event::Notice(notice) }
            if notice.notice == NoticeKind::ContextLost)
        })
        .count();
    assert_eq!(lost, 2, "one for each, and lost writes once");
    assert!(reader.carry().writes_lost);
    assert_eq!(reader.carry().changed_native_id.as_deref(), Some(SECOND));
}

#[test]
fn compaction_is_a_notice() {
    assert_eq!(kinds(&play(&transcript("hooks_compact")), NoticeKind::Compaction), 1);
}
