//! What a target is fed first: recordings of the real engines, one of everything that we write ourselves, and `corpora/`.

use std::io;
use std::path::{Path, PathBuf};

use roundhouse_process::record;
use roundhouse_process::{
    Cause, ExitStatus, Frame, FrameBody, FromKeeper, IsolationLevel, KeeperPlan, Notice, OpState, Refusal,
    Request, Response, SignalScope, SpawnStage, SpoolEnd, StorageFault,
};
use serde_json::Value;

/// The seeds of a target.
///
/// # Errors
/// When recordings or corpora cannot be read.
pub fn seeds(target: &str) -> io::Result<Vec<Vec<u8>>> {
    let mut seeds = match target {
        "lines" => {
            vec![b"\x08a\r\n\nlonger than the limit\nend".to_vec(), "\u{40}é\u{1F600}\n\u{1b}[31mred".into()]
        }
        "protocol" => protocol(),
        "spool" => vec![[&[1][..], &laid(&spool(1))].concat(), [&[0][..], &raw(&spool(1))].concat()],
        "journal" => {
            let records = roundhouse_engine_runner::fuzzing::records();
            vec![
                [&[1][..], &laid(&records)].concat(),
                [&[0][..], &raw(&records)].concat(),
                records[1].clone(),
            ]
        }
        engine => recordings(engine)?.into_iter().map(|(_, bytes)| bytes).collect(),
    };
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpora").join(target);
    for (_, path) in files(&corpus)? {
        seeds.push(std::fs::read(path)?);
    }
    Ok(seeds)
}

/// The files of a directory by name; none when it is not there.
fn files(directory: &Path) -> io::Result<Vec<(String, PathBuf)>> {
    let entries = match std::fs::read_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut files = Vec::new();
    for entry in entries {
        let path = entry?.path();
        if path.is_file() {
            files.push((path.file_stem().unwrap_or_default().to_string_lossy().into_owned(), path));
        }
    }
    files.sort();
    Ok(files)
}

/// Every recording of the real engine, in the form of an input (see `dialect`), by name.
///
/// # Errors
/// When they cannot be read.
pub fn recordings(engine: &str) -> io::Result<Vec<(String, Vec<u8>)>> {
    let testdata =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../engine-runner/engines/testdata").join(engine);
    let mut recordings = Vec::new();
    for version in std::fs::read_dir(testdata)? {
        let version = version?.path();
        for (name, path) in files(&version.join("frames"))? {
            recordings.push((format!("frames/{name}"), framed(&std::fs::read_to_string(path)?)));
        }
        for (name, path) in files(&version.join("lines"))? {
            let text = std::fs::read_to_string(path)?;
            let first: Value =
                text.lines().next().and_then(|line| serde_json::from_str(line).ok()).unwrap_or_default();
            let bytes = if first["frame"].is_string() { framed(&text) } else { bare(&text) };
            recordings.push((format!("lines/{name}"), bytes));
        }
    }
    Ok(recordings)
}

fn tell(out: &mut Vec<u8>, letter: u8, text: &str) {
    out.extend_from_slice(&[1, letter]);
    out.extend_from_slice(text.replace('\n', " ").as_bytes());
    out.push(b'\n');
}

/// A run that was recorded frame by frame.
fn framed(text: &str) -> Vec<u8> {
    let mut out = Vec::new();
    for line in text.lines() {
        let frame: Value = serde_json::from_str(line).unwrap_or_default();
        let field = |key: &str| frame[key].as_str().unwrap_or_default();
        match field("frame") {
            "spawn" => {
                if frame["open"].is_object() {
                    tell(&mut out, b'O', &frame["open"].to_string());
                }
                tell(&mut out, b's', "");
            }
            "stdout" => {
                match frame["text"].as_str() {
                    Some(text) => out.extend_from_slice(text.as_bytes()),
                    None => out.extend_from_slice(frame["line"].to_string().as_bytes()),
                }
                out.push(b'\n');
            }
            "stderr" => tell(&mut out, b'e', field("text")),
            "stdin_intent" => tell(&mut out, b'i', field("op")),
            "stdin_written" => tell(&mut out, b'w', field("op")),
            "signal" => tell(&mut out, b'g', &frame["signal"].to_string()),
            _ => tell(&mut out, b'x', &frame["code"].to_string()),
        }
    }
    out
}

/// Bare lines of Claude Code, behind a handshake and a delivery of which they know nothing.
fn bare(text: &str) -> Vec<u8> {
    const DELIVERY: &str = "11111111-2222-5333-8444-555555555555";
    let mut out = Vec::new();
    tell(&mut out, b's', "");
    tell(&mut out, b'i', "initialize");
    let answer = r#"{"type":"control_response","response":{"subtype":"success","request_id":"initialize","response":{"session_state":"idle"}}}"#;
    out.extend_from_slice(answer.as_bytes());
    out.push(b'\n');
    tell(&mut out, b'i', DELIVERY);
    tell(&mut out, b'w', DELIVERY);
    for state in ["queued", "started"] {
        let line = format!(r#"{{"type":"command_lifecycle","command_uuid":"{DELIVERY}","state":"{state}"}}"#);
        out.extend_from_slice(line.as_bytes());
        out.push(b'\n');
    }
    out.extend_from_slice(text.as_bytes());
    out
}

fn protocol() -> Vec<Vec<u8>> {
    let second = std::time::Duration::from_secs(1);
    let requests = [
        Request::Hello { version: 1, owner: "run_1".to_owned() },
        Request::Status,
        Request::Deliver { op_id: "op".to_owned(), bytes: vec![0, 10, 255] },
        Request::QueryOp { op_id: "op".to_owned() },
        Request::BeginTurn { turn_id: "trn".to_owned() },
        Request::EndTurn { turn_id: "trn".to_owned() },
        Request::Sync,
        Request::Signal { signal: 15 },
        Request::KillAll,
        Request::Release { settle: second, term: 2 * second },
        Request::Prune { keep_from: 9 },
        Request::CloseInput,
    ];
    let end = SpoolEnd { segment: 1, offset: 2, frame: 3 };
    let mut told: Vec<FromKeeper> = [Notice::Progress(end), Notice::Superseded, Notice::Ending(end)]
        .into_iter()
        .map(FromKeeper::Notice)
        .collect();
    let answers = [
        Response::Delivered { intent: 5, state: OpState::Pending, duplicate: true },
        Response::Op { known: Some((5, OpState::Failed)) },
        Response::Op { known: None },
        Response::Turn { frame: 8, segment: 2 },
        Response::Done { number: 3 },
        Response::Killed { frame: 3, survivors: 1 },
        Response::Refused(Refusal::Busy),
    ];
    told.extend(answers.into_iter().map(|response| FromKeeper::Response { request_id: 4, response }));
    let asked = (1..).zip(&requests).flat_map(|(id, request)| request.encode(id)).collect();
    let mut seeds = vec![asked, told.iter().flat_map(FromKeeper::encode).collect()];
    let mut plan = KeeperPlan::new("spl_1", "run_1", "/bin/true");
    plan.args = vec!["one".into()];
    seeds.extend(plan.encode().ok());
    seeds
}

/// A header as version 1 of the format fixes it.
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

/// A segment with a frame of every kind, as payloads of records.
fn spool(first_frame: u64) -> Vec<Vec<u8>> {
    let bodies = [
        FrameBody::Spawn { program: b"/bin/x".to_vec() },
        FrameBody::Started {
            engine_pid: 2,
            init_pid: 1,
            isolation: IsolationLevel::Subreaper,
            detail: "why".to_owned(),
        },
        FrameBody::SpawnFailed { stage: SpawnStage::Cwd, errno: 2, message: "no".to_owned() },
        FrameBody::StdoutLine { bytes: b"line".to_vec(), masked: true, newline: false },
        FrameBody::StdoutOverlong { head: b"head".to_vec(), masked: false, limit: 9 },
        FrameBody::StdoutOverlongEnd { length: 99, newline: true },
        FrameBody::StdoutEof { clean: true },
        FrameBody::Stderr { bytes: vec![0xFF], masked: false },
        FrameBody::StderrOmitted { bytes: 4 },
        FrameBody::StdinIntent { op_id: "op".to_owned(), length: 3, crc: 7, shown: b"abc".to_vec() },
        FrameBody::StdinWritten { op_id: "op".to_owned(), intent: 10 },
        FrameBody::StdinFailed { op_id: "op".to_owned(), intent: 10, written: 1, errno: 32 },
        FrameBody::StdinClosed,
        FrameBody::Signal { signal: 9, scope: SignalScope::Everything, cause: Cause::Requested },
        FrameBody::Killed { cause: Cause::EngineExit, killed: 1, survivors: 0 },
        FrameBody::TurnBegin { turn_id: "trn".to_owned() },
        FrameBody::TurnEnd { turn_id: "trn".to_owned() },
        FrameBody::StorageFault(StorageFault::Write(28)),
        FrameBody::StorageFault(StorageFault::Limit),
        FrameBody::Exit(ExitStatus::Signal(9)),
        FrameBody::Closed { cause: Cause::Release, dropped_frames: 1, dropped_bytes: 2 },
    ];
    let mut payloads = vec![header(1, first_frame)];
    for (number, body) in (first_frame..).zip(bodies) {
        if number == first_frame + 12 {
            // Another segment begins.
            payloads.push(Vec::new());
            payloads.push(header(2, number));
        }
        let mut payload = Vec::new();
        Frame { number, boottime_ns: number * 10, body }.encode_into(&mut payload);
        payloads.push(payload);
    }
    payloads
}

/// Payloads with their lengths before them.
fn laid(payloads: &[Vec<u8>]) -> Vec<u8> {
    payloads
        .iter()
        .flat_map(|payload| {
            let length = u16::try_from(payload.len()).unwrap_or(u16::MAX).to_le_bytes();
            [&length[..], payload].concat()
        })
        .collect()
}

/// Payloads as the bytes of one file.
fn raw(payloads: &[Vec<u8>]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for payload in payloads {
        // The mark of another segment is no record.
        let _ = record::encode_into(&mut bytes, payload);
    }
    bytes
}
