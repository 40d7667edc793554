//! Records and spools on disk: cut at every byte, damaged, growing, pruned.
#![allow(clippy::unwrap_used, reason = "what a test does not expect fails it")]
#![allow(clippy::allow_attributes, reason = "an expectation would fail where only test functions unwrap")]

use proptest::prelude::*;
use roundhouse_process::record::{
    Decoded, MAGIC, RecordError, RecordReader, RecordWriter, decode, encode_into,
};
use roundhouse_process::{
    Cause, Decoder, ExitStatus, Frame, FrameBody, FromKeeper, IsolationLevel, KeeperPlan, Notice, OpState,
    Refusal, Request, Response, SegmentHeader, SignalScope, SpawnStage, SpoolEnd, SpoolError, SpoolReader,
    StorageFault, close_dead, is_alive, prune, scan, state_of,
};
use roundhouse_process::{KeeperDirError, KeeperState};
use std::io::Write as _;
use std::path::{Path, PathBuf};

fn payloads(reader: &mut RecordReader) -> Vec<Vec<u8>> {
    std::iter::from_fn(|| reader.next_record().unwrap().map(|record| record.payload)).collect()
}

fn write_records(path: &Path, records: &[Vec<u8>]) -> Vec<u64> {
    let mut writer = RecordWriter::create(path).unwrap();
    let mut ends = vec![writer.length()];
    for record in records {
        writer.append(record).unwrap();
        ends.push(writer.length());
    }
    writer.sync().unwrap();
    ends
}

#[test]
fn a_file_cut_at_every_byte_keeps_its_whole_records_and_goes_on() {
    let tmp = tempfile::tempdir().unwrap();
    let path = tmp.path().join("records");
    let records: Vec<Vec<u8>> = vec![b"one".to_vec(), vec![0; 40], b"three, the last".to_vec()];
    let ends = write_records(&path, &records);
    let whole = std::fs::read(&path).unwrap();
    for cut in 0..=whole.len() {
        std::fs::write(&path, &whole[..cut]).unwrap();
        let kept = ends.iter().skip(1).filter(|end| **end <= cut as u64).count();
        if cut >= MAGIC.len() {
            assert_eq!(payloads(&mut RecordReader::open(&path).unwrap()), records[..kept], "cut at {cut}");
        }
        let (mut writer, recovered) = RecordWriter::recover(&path).unwrap();
        assert_eq!(recovered.payloads, records[..kept], "cut at {cut}");
        writer.append(b"after").unwrap();
        let mut expected = records[..kept].to_vec();
        expected.push(b"after".to_vec());
        assert_eq!(payloads(&mut RecordReader::open(&path).unwrap()), expected, "cut at {cut}");
    }
}

#[test]
fn every_damaged_byte_is_noticed() {
    let tmp = tempfile::tempdir().unwrap();
    let path = tmp.path().join("records");
    let records = vec![b"one".to_vec(), b"two".to_vec()];
    let ends = write_records(&path, &records);
    let whole = std::fs::read(&path).unwrap();
    for at in MAGIC.len()..whole.len() {
        let mut damaged = whole.clone();
        damaged[at] ^= 0x40;
        std::fs::write(&path, damaged).unwrap();
        let intact = ends.iter().skip(1).filter(|end| **end <= at as u64).count();
        assert_eq!(payloads(&mut RecordReader::open(&path).unwrap()), records[..intact], "byte {at}");
    }
}

#[test]
fn other_files_are_refused_and_left_as_they_are() {
    let tmp = tempfile::tempdir().unwrap();
    let path = tmp.path().join("other");
    for text in [&b"not a record file"[..], b"RHREC\0\0\x02 from the future"] {
        std::fs::write(&path, text).unwrap();
        assert!(matches!(RecordWriter::recover(&path), Err(RecordError::NotRecords | RecordError::Newer(2))));
        assert!(RecordReader::open(&path).is_err());
        assert_eq!(std::fs::read(&path).unwrap(), text);
    }
    assert!(matches!(RecordWriter::create(&path), Err(RecordError::Io { .. })));
    assert!(matches!(encode_into(&mut Vec::new(), b""), Err(RecordError::Length(0))));
}

#[test]
fn a_length_that_lies_takes_no_memory() {
    let tmp = tempfile::tempdir().unwrap();
    let path = tmp.path().join("records");
    let mut bytes = MAGIC.to_vec();
    bytes.extend_from_slice(&(70_u32 << 20).to_le_bytes());
    bytes.extend_from_slice(&[1; 100]);
    std::fs::write(&path, bytes).unwrap();
    let mut reader = RecordReader::open(&path).unwrap();
    assert_eq!(reader.next_record().unwrap(), None);
    assert_eq!(reader.offset(), MAGIC.len() as u64);
}

#[test]
fn a_reader_follows_a_file_written_byte_by_byte() {
    let tmp = tempfile::tempdir().unwrap();
    let path = tmp.path().join("records");
    let records = vec![b"one".to_vec(), vec![7; 100_000], b"three".to_vec()];
    write_records(&path, &records);
    let whole = std::fs::read(&path).unwrap();
    let mut file = std::fs::File::create(&path).unwrap();
    file.write_all(MAGIC).unwrap();
    let mut reader = RecordReader::open(&path).unwrap();
    let mut seen = Vec::new();
    // Small steps around the borders, larger ones within.
    let mut at = MAGIC.len();
    while at < whole.len() {
        let step = if at > 60 && at < 100_000 { 9_973 } else { 1 };
        let end = (at + step).min(whole.len());
        file.write_all(&whole[at..end]).unwrap();
        at = end;
        seen.extend(payloads(&mut reader));
    }
    assert_eq!(seen, records);
    // Zeros of reserved room read as the end.
    file.write_all(&[0; 5000]).unwrap();
    assert_eq!(reader.next_record().unwrap(), None);
}

proptest! {
    #[test]
    fn records_survive_any_cut(
        records in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 1..50), 0..8),
        cut in 0usize..400,
    ) {
        let mut bytes = Vec::new();
        let mut ends = Vec::new();
        for record in &records {
            encode_into(&mut bytes, record).unwrap();
            ends.push(bytes.len());
        }
        let mut rest = &bytes[..cut.min(bytes.len())];
        let mut seen = Vec::new();
        while let Decoded::Record { end } = decode(rest) {
            seen.push(rest[8..end].to_vec());
            rest = &rest[end..];
        }
        let kept = ends.iter().filter(|end| **end <= cut).count();
        prop_assert_eq!(seen, &records[..kept]);
    }

    #[test]
    fn nothing_that_is_read_panics(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        let _ = decode(&bytes);
        let _ = Frame::decode(&bytes);
        let _ = SegmentHeader::decode(&bytes);
        let _ = KeeperPlan::decode(&bytes);
        let mut decoder = Decoder::new();
        decoder.feed(&bytes);
        while let Ok(Some(raw)) = decoder.next_raw() {
            let _ = Request::decode(&raw);
            let _ = FromKeeper::decode(&raw);
        }
    }

    #[test]
    fn messages_come_through_any_pieces(size in 1usize..40) {
        let mut bytes = Vec::new();
        for (id, request) in requests().iter().enumerate() {
            bytes.extend(request.encode(id as u64 + 1));
        }
        let mut decoder = Decoder::new();
        let mut seen = Vec::new();
        for piece in bytes.chunks(size) {
            decoder.feed(piece);
            while let Some(raw) = decoder.next_raw().unwrap() {
                prop_assert_eq!(raw.request_id, seen.len() as u64 + 1);
                seen.push(Request::decode(&raw).unwrap().unwrap());
            }
        }
        prop_assert_eq!(seen, requests());
    }
}

fn requests() -> Vec<Request> {
    let second = std::time::Duration::from_secs(1);
    vec![
        Request::Hello { version: 1, owner: "run_1".into() },
        Request::Status,
        Request::Deliver { op_id: "op".into(), bytes: vec![0, 10, 255] },
        Request::QueryOp { op_id: "op".into() },
        Request::BeginTurn { turn_id: "trn".into() },
        Request::EndTurn { turn_id: "trn".into() },
        Request::Sync,
        Request::Signal { signal: 15 },
        Request::KillAll,
        Request::Release { settle: second, term: 2 * second },
        Request::Prune { keep_from: 9 },
        Request::CloseInput,
    ]
}

#[test]
fn every_answer_and_notice_reads_back() {
    let end = SpoolEnd { segment: 1, offset: 2, frame: 3 };
    let answers = [
        Response::Delivered { intent: 5, state: OpState::Pending, duplicate: true },
        Response::Op { known: Some((5, OpState::Failed)) },
        Response::Op { known: None },
        Response::Turn { frame: 8, segment: 2 },
        Response::Done { number: 3 },
        Response::Killed { frame: 3, survivors: 1 },
        Response::Refused(Refusal::Busy),
    ];
    let mut messages: Vec<FromKeeper> =
        answers.into_iter().map(|response| FromKeeper::Response { request_id: 4, response }).collect();
    for notice in [Notice::Progress(end), Notice::Superseded, Notice::Ending(end)] {
        messages.push(FromKeeper::Notice(notice));
    }
    let mut decoder = Decoder::new();
    for message in &messages {
        decoder.feed(&message.encode());
    }
    for message in messages {
        assert_eq!(decoder.next_from_keeper().unwrap(), Some(message));
    }
    assert_eq!(decoder.next_from_keeper().unwrap(), None);
}

/// What bytes are, in a number.
fn digest(parts: impl IntoIterator<Item = Vec<u8>>) -> u64 {
    let fold = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    parts.into_iter().flatten().fold(0xcbf2_9ce4_8422_2325, fold)
}

/// Keepers outlive the program that started them: a later one meets those of version 1. What changes here needs a new
/// version, and a reader of this one beside it.
#[test]
fn version_1_is_on_the_wire_and_on_disk_what_it_was() {
    let requests = requests().into_iter().map(|request| request.encode(7));
    let frames = frames().into_iter().map(|frame| {
        let mut payload = Vec::new();
        frame.encode_into(&mut payload);
        payload
    });
    let end = SpoolEnd { segment: 1, offset: 2, frame: 3 };
    let told = [
        FromKeeper::Response { request_id: 4, response: Response::Done { number: 3 } },
        FromKeeper::Response { request_id: 4, response: Response::Refused(Refusal::Busy) },
        FromKeeper::Notice(Notice::Progress(end)),
        FromKeeper::Notice(Notice::Ending(end)),
    ];
    let told = told.into_iter().map(|message| message.encode());
    assert_eq!(digest(requests), 6_562_152_244_359_003_986, "what is asked");
    assert_eq!(digest(told), 9_233_015_627_978_410_011, "what is told");
    assert_eq!(digest(frames), 8_881_558_396_042_147_075, "what lies in a spool");
    // A description as the first release wrote it.
    let tmp = tempfile::tempdir().unwrap();
    let meta = "{\"version\":1,\"spool_id\":\"spl_1\",\"owner\":\"run_1\",\"keeper_pid\":1,\
                \"started_boottime_ns\":1,\"boot_id\":\"0\",\"program\":\"/bin/true\"}";
    let dir = tmp.path().join("keeper");
    std::fs::create_dir(&dir).unwrap();
    std::fs::write(dir.join("meta.json"), meta).unwrap();
    std::fs::write(dir.join("lock"), "").unwrap();
    assert_eq!(state_of(&dir, "run_1").unwrap(), KeeperState::Dead);
    assert_eq!(state_of(&dir, "run_2").unwrap(), KeeperState::Foreign);
    assert_eq!(scan(tmp.path(), "run_1").unwrap()[0].spool_id, "spl_1");
}

fn bodies() -> Vec<FrameBody> {
    vec![
        FrameBody::Spawn { program: b"/bin/x".to_vec() },
        FrameBody::Started {
            engine_pid: 2,
            init_pid: 1,
            isolation: IsolationLevel::Subreaper,
            detail: "why".into(),
        },
        FrameBody::SpawnFailed { stage: SpawnStage::Cwd, errno: 2, message: "no".into() },
        FrameBody::StdoutLine { bytes: b"line".to_vec(), masked: true, newline: false },
        FrameBody::StdoutOverlong { head: b"head".to_vec(), masked: false, limit: 9 },
        FrameBody::StdoutOverlongEnd { length: 99, newline: true },
        FrameBody::StdoutEof { clean: true },
        FrameBody::Stderr { bytes: vec![0xFF], masked: false },
        FrameBody::StderrOmitted { bytes: 4 },
        FrameBody::StdinIntent { op_id: "op".into(), length: 3, crc: 7, shown: b"abc".to_vec() },
        FrameBody::StdinWritten { op_id: "op".into(), intent: 10 },
        FrameBody::StdinFailed { op_id: "op".into(), intent: 10, written: 1, errno: 32 },
        FrameBody::StdinClosed,
        FrameBody::Signal { signal: 9, scope: SignalScope::Everything, cause: Cause::Requested },
        FrameBody::Killed { cause: Cause::EngineExit, killed: 1, survivors: 0 },
        FrameBody::TurnBegin { turn_id: "trn".into() },
        FrameBody::TurnEnd { turn_id: "trn".into() },
        FrameBody::StorageFault(StorageFault::Write(28)),
        FrameBody::StorageFault(StorageFault::Limit),
        FrameBody::Exit(ExitStatus::Signal(9)),
        FrameBody::Closed { cause: Cause::Release, dropped_frames: 1, dropped_bytes: 2 },
    ]
}

fn frames() -> Vec<Frame> {
    let frame = |(number, body)| Frame { number, boottime_ns: number * 10, body };
    (1..).zip(bodies()).map(frame).collect()
}

/// Writes a spool of two segments as a keeper does; answers the paths.
fn write_spool(dir: &Path, frames: &[Frame]) -> Vec<PathBuf> {
    let mut paths = Vec::new();
    for (segment, part) in (1..).zip(frames.chunks(frames.len().div_ceil(2))) {
        let path = dir.join(format!("{segment:06}.spool"));
        let mut writer = RecordWriter::create(&path).unwrap();
        writer.append(&header(segment, part[0].number)).unwrap();
        for frame in part {
            let mut payload = Vec::new();
            frame.encode_into(&mut payload);
            writer.append(&payload).unwrap();
        }
        paths.push(path);
    }
    paths
}

/// A header as the keeper's writer encodes it, taken apart in the open: version 1 of the format is fixed.
fn header(segment: u32, first_frame: u64) -> Vec<u8> {
    let mut bytes = vec![0, 1, 0];
    bytes.extend_from_slice(&5_u32.to_le_bytes());
    bytes.extend_from_slice(b"spl_x");
    bytes.extend_from_slice(&segment.to_le_bytes());
    bytes.extend_from_slice(&first_frame.to_le_bytes());
    bytes.extend_from_slice(&4_u32.to_le_bytes());
    bytes.extend_from_slice(b"b007");
    bytes.push(0);
    bytes.extend_from_slice(&0_u64.to_le_bytes());
    bytes
}

#[test]
fn every_frame_reads_back_and_a_newer_kind_is_passed_on() {
    for frame in frames() {
        let mut payload = Vec::new();
        frame.encode_into(&mut payload);
        assert_eq!(Frame::decode(&payload).unwrap(), frame);
        for cut in 0..17 {
            assert!(Frame::decode(&payload[..cut]).is_err());
        }
    }
    let mut newer = vec![200];
    newer.extend_from_slice(&[1; 30]);
    assert_eq!(Frame::decode(&newer).unwrap().body, FrameBody::Unknown { kind: 200 });
}

#[test]
fn a_spool_cut_at_every_byte_of_its_last_segment_reads_to_its_last_whole_frame() {
    let tmp = tempfile::tempdir().unwrap();
    let frames = frames();
    let paths = write_spool(tmp.path(), &frames);
    let whole = std::fs::read(&paths[1]).unwrap();
    let mut seen = 0;
    for cut in 0..=whole.len() {
        std::fs::write(&paths[1], &whole[..cut]).unwrap();
        let read = SpoolReader::new(tmp.path()).read_all().unwrap();
        assert_eq!(read, frames[..read.len()], "cut at {cut}");
        assert!(read.len() >= seen.max(frames.len().div_ceil(2)));
        seen = read.len();
    }
    assert_eq!(seen, frames.len());
}

#[test]
fn a_reader_sees_the_same_frames_live_and_afterwards() {
    let tmp = tempfile::tempdir().unwrap();
    let made = tempfile::tempdir().unwrap();
    let frames = frames();
    let paths = write_spool(made.path(), &frames);
    let mut live = SpoolReader::new(tmp.path());
    assert_eq!(live.next_frame().unwrap(), None, "no segment yet");
    let mut seen = Vec::new();
    for path in &paths {
        let whole = std::fs::read(path).unwrap();
        let mut file = std::fs::File::create(tmp.path().join(path.file_name().unwrap())).unwrap();
        for byte in whole {
            file.write_all(&[byte]).unwrap();
            seen.extend(live.read_all().unwrap());
        }
    }
    assert_eq!(seen, frames);
    assert_eq!(live.position().frame, frames.len() as u64);
    for after in 0..=frames.len() {
        let rest = SpoolReader::new_after(tmp.path(), after as u64).unwrap().read_all().unwrap();
        assert_eq!(rest, frames[after..], "after {after}");
    }
}

#[test]
fn a_missing_part_is_told_and_reading_goes_on_behind_it() {
    let tmp = tempfile::tempdir().unwrap();
    let frames = frames();
    let paths = write_spool(tmp.path(), &frames);
    let first = frames.len().div_ceil(2);
    // Damage in the middle of the first segment: what is behind it there is lost, and that is told.
    let mut bytes = std::fs::read(&paths[0]).unwrap();
    let length = bytes.len();
    bytes[length - 1] ^= 1;
    std::fs::write(&paths[0], bytes).unwrap();
    let mut reader = SpoolReader::new(tmp.path());
    for frame in &frames[..first - 1] {
        assert_eq!(reader.next_frame().unwrap().as_ref(), Some(frame));
    }
    let gap = reader.next_frame();
    assert!(
        matches!(gap, Err(SpoolError::Gap { expected, found }) if expected == first as u64 && found == expected + 1),
        "{gap:?}"
    );
    assert_eq!(reader.read_all().unwrap(), frames[first..]);
    // A pruned beginning is no gap.
    assert_eq!(prune(tmp.path(), 2).unwrap(), 2);
    assert!(!paths[0].exists());
    assert_eq!(SpoolReader::new(tmp.path()).read_all().unwrap(), frames[first..]);
    assert_eq!(prune(tmp.path(), 99).unwrap(), 2, "the last one stays");
    assert!(paths[1].exists());
}

#[test]
fn a_description_of_another_version_is_never_taken_for_ours() {
    let tmp = tempfile::tempdir().unwrap();
    let dir = tmp.path().join("spl_1");
    std::fs::create_dir(&dir).unwrap();
    let (meta, lock) = (dir.join("meta.json"), dir.join("lock"));
    let state = |text: &str| {
        std::fs::write(&meta, text).unwrap();
        state_of(&dir, "run_1").unwrap()
    };
    let ours = r#"{ "version": 1, "spool_id": "spl_1", "owner": "run_1", "more": "than we know" }"#;
    let newer = r#"{ "version": 2, "owner": { "id": "run_1" } }"#;
    let odd = r#"{ "version": 1, "owner": 5 }"#;
    // Nobody holds the lock.
    assert_eq!(state_of(&dir, "run_1").unwrap(), KeeperState::Dead);
    assert_eq!(state(ours), KeeperState::Dead);
    assert_eq!(state(&ours.replace("run_1", "run_2")), KeeperState::Foreign);
    assert_eq!(state(newer), KeeperState::Foreign);
    assert!(matches!(close_dead(&dir, "run_1", std::time::Duration::ZERO), Err(KeeperDirError::Foreign)));
    // What a host's end left half written says nothing.
    for nothing in ["", "\0\0\0\0", odd, "{"] {
        assert_eq!(state(nothing), KeeperState::Dead, "{nothing:?}");
    }
    assert!(!is_alive(&dir).unwrap());
    // Somebody does.
    let held = std::fs::File::create(&lock).unwrap();
    held.lock().unwrap();
    assert!(is_alive(&dir).unwrap());
    assert_eq!(state(ours), KeeperState::Live);
    for foreign in [newer, odd, "{"] {
        assert_eq!(state(foreign), KeeperState::Foreign, "{foreign:?}");
    }
    assert_eq!(scan(tmp.path(), "run_1").unwrap()[0].spool_id, "spl_1");
    // No answer is none: want of descriptors passes, say.
    std::fs::remove_file(&meta).unwrap();
    std::fs::create_dir(&meta).unwrap();
    assert!(matches!(state_of(&dir, "run_1"), Err(KeeperDirError::Io { .. })));
}

#[test]
fn zeros_behind_the_records_are_room_that_recovery_keeps() {
    let tmp = tempfile::tempdir().unwrap();
    let path = tmp.path().join("records");
    let mut writer = RecordWriter::create(&path).unwrap();
    writer.fill(4000).unwrap();
    writer.append(b"one").unwrap();
    writer.append(b"two").unwrap();
    assert_eq!(std::fs::metadata(&path).unwrap().len(), 4000);
    drop(writer);
    let (mut writer, recovered) = RecordWriter::recover(&path).unwrap();
    assert_eq!((recovered.payloads, recovered.cut), (vec![b"one".to_vec(), b"two".to_vec()], 0));
    assert_eq!(std::fs::metadata(&path).unwrap().len(), 4000, "the room is kept");
    writer.append(b"three").unwrap();
    let end = writer.length();
    drop(writer);
    // A record that was torn in the middle of the room is cut off, and what is behind it with it.
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[usize::try_from(end).unwrap() + 30] = 7;
    std::fs::write(&path, bytes).unwrap();
    let (_, recovered) = RecordWriter::recover(&path).unwrap();
    assert_eq!(recovered.payloads.len(), 3);
    assert_eq!(recovered.cut, 4000 - end);
    assert_eq!(std::fs::metadata(&path).unwrap().len(), end);
    assert_eq!(payloads(&mut RecordReader::open(&path).unwrap()).len(), 3);
}
