//! What an engine prints, as the spool keeps it.
#![allow(clippy::unwrap_used, reason = "what a test does not expect fails it")]
#![allow(clippy::allow_attributes, reason = "an expectation would fail where only test functions unwrap")]

mod support;

use roundhouse_process::{FrameBody, LinkError, Refusal, Secret, SpoolReader, StorageFault};
use support::{LONG, Rig, private_bytes, wait_for};

#[test]
fn s30_lines_come_whole_however_they_are_written() {
    let mut rig = Rig::start(|_| {});
    let mut text = Vec::new();
    // Each byte of a character in a write of its own.
    for byte in "é\u{1F600}\n".bytes() {
        rig.tell(&format!("raw {byte:02x}"));
    }
    text.push(rig.line());
    rig.tell("raw 610d0a0a62");
    text.push(rig.line());
    text.push(rig.line());
    rig.tell("exit 0");
    let frames = rig.end();
    assert_eq!(text, ["é\u{1F600}", "a\r", ""]);
    let last = frames.iter().rev().find_map(|frame| match &frame.body {
        FrameBody::StdoutLine { bytes, newline, .. } => Some((bytes.clone(), *newline)),
        _ => None,
    });
    assert_eq!(last, Some((b"b".to_vec(), false)));
}

#[test]
fn s31_bytes_that_are_no_text_are_kept() {
    let mut rig = Rig::start(|_| {});
    rig.tell("raw ff00fe1b5b316d0a");
    let frame = rig.next("line", |body| matches!(body, FrameBody::StdoutLine { .. }));
    assert_eq!(
        frame.body,
        FrameBody::StdoutLine { bytes: b"\xff\0\xfe\x1b[1m".to_vec(), masked: false, newline: true }
    );
}

#[test]
fn a_line_without_end_is_told_once_and_memory_stays_flat() {
    let mut rig = Rig::start(|plan| {
        plan.limits.line_max = 1 << 20;
        plan.limits.line_head = 4096;
    });
    assert_eq!(rig.ask("echo x"), "x");
    let before = private_bytes(rig.handle.pid());
    rig.tell("long 100000000");
    let frame = rig.next("over-long line", |body| matches!(body, FrameBody::StdoutOverlong { .. }));
    assert_eq!(
        frame.body,
        FrameBody::StdoutOverlong { head: vec![b'x'; 4096], masked: false, limit: 1 << 20 }
    );
    rig.tell("raw 0a");
    let frame = rig.next("its end", |body| matches!(body, FrameBody::StdoutOverlongEnd { .. }));
    assert_eq!(frame.body, FrameBody::StdoutOverlongEnd { length: 100_000_000, newline: true });
    let after = private_bytes(rig.handle.pid());
    assert!(after < before + (1 << 19), "{before} before, {after} after");
    assert_eq!(rig.ask("echo on"), "on");
}

#[test]
fn a_line_just_under_the_limit_is_whole_and_its_memory_is_given_back() {
    let mut rig = Rig::start(|plan| plan.limits.segment_max = 64 << 20);
    assert_eq!(rig.ask("echo x"), "x");
    let before = private_bytes(rig.handle.pid());
    rig.tell(&format!("long {}", 16 << 20));
    rig.tell("raw 0a");
    let frame = rig.next("line", |body| matches!(body, FrameBody::StdoutLine { .. }));
    let FrameBody::StdoutLine { bytes, newline: true, .. } = frame.body else { panic!("a whole line") };
    assert_eq!(bytes.len(), 16 << 20);
    rig.status();
    let after = private_bytes(rig.handle.pid());
    assert!(after < before + (1 << 19), "{before} before, {after} after");
}

#[test]
fn a_large_delivery_comes_whole_and_its_memory_is_given_back() {
    let mut rig = Rig::start(|_| {});
    assert_eq!(rig.ask("echo x"), "x");
    let before = private_bytes(rig.handle.pid());
    let text = "z".repeat(8 << 20);
    rig.tell(&format!("length {text}"));
    assert_eq!(rig.line(), (8 << 20).to_string());
    rig.status();
    let after = private_bytes(rig.handle.pid());
    assert!(after < before + (1 << 19), "{before} before, {after} after");
}

#[test]
fn stderr_keeps_the_first_and_last_of_a_turn_and_a_count() {
    let mut rig = Rig::start(|plan| {
        plan.limits.stderr_head = 1000;
        plan.limits.stderr_tail = 500;
    });
    rig.link.begin_turn("trn_1").unwrap();
    assert_eq!(rig.ask("flood-err a 2000"), "flooded");
    assert_eq!(rig.ask("flood-err b 3000"), "flooded");
    let collected = || {
        let (mut text, mut omitted) = (Vec::new(), 0);
        for frame in rig.frames() {
            match frame.body {
                FrameBody::Stderr { bytes, .. } => text.extend(bytes),
                FrameBody::StderrOmitted { bytes } => omitted += bytes,
                _ => {}
            }
        }
        (text, omitted)
    };
    wait_for("first bytes", || (collected().0.len() == 1000).then_some(()));
    // All of it has been read before the turn's end is asked for: the pipe is empty once the keeper answered twice.
    let mut link = roundhouse_process::Link::connect(&rig.dir, support::OWNER, LONG).unwrap().0;
    link.status().unwrap();
    link.status().unwrap();
    link.end_turn("trn_1").unwrap();
    let (text, omitted) = collected();
    assert_eq!(text, [vec![b'a'; 1000], vec![b'b'; 500]].concat());
    assert_eq!(omitted, 3500);
    // The next turn counts anew.
    rig.link = link;
    rig.link.begin_turn("trn_2").unwrap();
    rig.tell("flood-err c 10");
    rig.next("new bytes", |body| matches!(body, FrameBody::Stderr { bytes, .. } if bytes == &vec![b'c'; 10]));
}

#[test]
fn a_secret_never_reaches_the_spool_nor_the_engine_altered() {
    let secret = "sk-very-secret-value-0815";
    let mut rig = Rig::start(|plan| plan.secrets = vec![Secret::new(secret)]);
    // In input, in a line written in pieces, and on standard error across writes. The engine has it unaltered.
    let intent = rig.tell(&format!("echo {secret} {}", secret.len()));
    let line = rig.next("line", |body| matches!(body, FrameBody::StdoutLine { .. }));
    assert_eq!(
        line.body,
        FrameBody::StdoutLine { bytes: b"[masked] 25".to_vec(), masked: true, newline: true }
    );
    let (head, tail) = secret.split_at(9);
    let hex = |text: &str| text.bytes().map(|byte| format!("{byte:02x}")).collect::<String>();
    rig.tell(&format!("raw {}", hex(head)));
    rig.tell(&format!("raw {}", hex(tail)));
    assert_eq!(rig.ask("raw 0a"), "[masked]");
    rig.tell(&format!("err {head}"));
    rig.tell(&format!("err {tail}"));
    rig.tell("err .");
    rig.next("masked stderr", |body| matches!(body, FrameBody::Stderr { masked: true, .. }));
    rig.tell("exit 0");
    let frames = rig.end();
    let stderr: Vec<u8> = frames
        .iter()
        .filter_map(|frame| match &frame.body {
            FrameBody::Stderr { bytes, .. } => Some(bytes.clone()),
            _ => None,
        })
        .flatten()
        .collect();
    assert_eq!(String::from_utf8(stderr).unwrap(), "[masked].");
    let shown = frames.iter().find(|frame| frame.number == intent).unwrap();
    assert!(matches!(&shown.body, FrameBody::StdinIntent { shown, .. } if shown == b"echo [masked] 25\n"));
    for entry in std::fs::read_dir(&rig.dir).unwrap() {
        let path = entry.unwrap().path();
        if let Ok(bytes) = std::fs::read(&path) {
            assert_eq!(memchr::memmem::find(&bytes, secret.as_bytes()), None, "{}", path.display());
            // Nor what it was cut into.
            assert_eq!(memchr::memmem::find(&bytes, hex(secret).as_bytes()), None, "{}", path.display());
        }
    }
}

#[test]
fn a_turn_has_its_own_segment_and_marks_are_repeatable() {
    let mut rig = Rig::start(|_| {});
    let begin = rig.link.begin_turn("trn_1").unwrap();
    assert_eq!(begin.0, 2);
    assert_eq!(rig.link.begin_turn("trn_1").unwrap(), begin);
    assert_eq!(rig.ask("echo in"), "in");
    let end = rig.link.end_turn("trn_1").unwrap();
    assert_eq!(rig.link.end_turn("trn_1").unwrap(), end);
    let unknown = rig.link.end_turn("trn_9");
    assert!(matches!(unknown, Err(LinkError::Refused(Refusal::UnknownTurn))), "{unknown:?}");
    assert_eq!(rig.link.begin_turn("trn_2").unwrap().0, 3);
    // A turn left open is ended by the next.
    assert_eq!(rig.link.begin_turn("trn_3").unwrap().0, 4);
    assert_eq!(rig.status().turn_id.as_deref(), Some("trn_3"));
    let marks: Vec<String> = rig
        .frames()
        .into_iter()
        .filter_map(|frame| match frame.body {
            FrameBody::TurnBegin { turn_id } => Some(format!("+{turn_id}")),
            FrameBody::TurnEnd { turn_id } => Some(format!("-{turn_id}")),
            _ => None,
        })
        .collect();
    assert_eq!(marks, ["+trn_1", "-trn_1", "+trn_2", "-trn_2", "+trn_3"]);
    let mut reader = SpoolReader::new_after(&rig.dir, begin.1).unwrap();
    assert_eq!(reader.next_frame().unwrap().unwrap().number, begin.1 + 1);
    assert_eq!(reader.header().unwrap().turn_id.as_deref(), Some("trn_1"));
    assert_eq!(reader.header().unwrap().boot_id, roundhouse_process::boot_id());
}

#[test]
fn segments_are_cut_by_size_and_pruned_while_they_are_read() {
    let mut rig = Rig::start(|plan| plan.limits.segment_max = 64 * 1024);
    rig.tell("lines 3000");
    for number in 0..3000 {
        assert!(rig.line().starts_with(&format!("line {number} ")));
    }
    let end = rig.status().position;
    assert!(end.segment >= 5, "{end:?}");
    assert_eq!(rig.link.prune(4).unwrap(), 4);
    assert_eq!(rig.status().oldest_segment, 4);
    assert!(!rig.dir.join("000003.spool").exists());
    // The current one is never pruned.
    assert_eq!(rig.link.prune(u32::MAX).unwrap(), u64::from(end.segment));
    // Numbers go on for the reader that was there, and a new one begins with what is left.
    assert_eq!(rig.ask("echo on"), "on");
    let left = rig.frames();
    assert!(left[0].number > 1);
    assert!(left.windows(2).all(|pair| pair[0].number + 1 == pair[1].number));
    // A repeat of a pruned operation is still known.
    assert!(rig.link.deliver("op1", b"lines 3000\n").unwrap().2);
}

#[test]
fn a_spool_over_its_limit_fails_and_still_tells_the_end() {
    let mut rig = Rig::start(|plan| plan.limits.spool_max = 200_000);
    rig.tell("lines 10000");
    let fault = rig.next("fault", |body| matches!(body, FrameBody::StorageFault(_)));
    assert_eq!(fault.body, FrameBody::StorageFault(StorageFault::Limit));
    assert_eq!(rig.status().storage_fault, Some(StorageFault::Limit));
    let refused = rig.link.deliver("x", b"exit 0\n");
    assert!(matches!(refused, Err(LinkError::Refused(Refusal::Storage))), "{refused:?}");
    rig.link.release(LONG, LONG).unwrap();
    let frames = rig.end();
    let FrameBody::Closed { dropped_frames, dropped_bytes, .. } = frames.last().unwrap().body else {
        panic!("the end is told")
    };
    assert!(dropped_frames > 0 && dropped_bytes > dropped_frames * 100);
    assert!(frames.iter().any(|frame| matches!(frame.body, FrameBody::Exit(_))));
}

/// A keeper in this small test program; in a large one its relocated data comes on top. The limit of the design is
/// 3 MB for the keeper; an unoptimised build is given the same.
#[test]
fn a_keeper_and_its_init_are_small() {
    let mut rig = Rig::start(|_| {});
    rig.tell("lines 20000");
    rig.next(
        "the last line",
        |body| matches!(body, FrameBody::StdoutLine { bytes, .. } if bytes.starts_with(b"line 19999 ")),
    );
    let keeper = private_bytes(rig.handle.pid());
    let init = private_bytes(rig.status().init_pid);
    assert!(keeper < 3_000_000, "keeper: {keeper}");
    assert!(init < 2_000_000, "init: {init}");
}
