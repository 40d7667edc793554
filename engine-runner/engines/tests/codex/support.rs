//! Plays recorded runs to the translator, the way a turn actor would: a new translator for every turn, made of what the one
//! before it left behind.

use std::{fmt::Write as _, fs, path::PathBuf};

use roundhouse_engines::{
    Adapter, Carry, Event, Exit, Failure, Frame, FrameBody, NativeRef, OpenFailure, OpenMode, Opened, Output,
    StdinLine, Translator, TranslatorOpen, TurnEnd, TurnOutcome,
    codex::Codex,
    event::{Notice, NoticeKind},
};
use serde_json::{Value, json};

/// A frame that owns its bytes.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Owned {
    Spawn,
    Out(Vec<u8>),
    Err(Vec<u8>),
    Intent(String),
    Written(String),
    Oversized(u64),
    Signal(i32),
    Exit(Exit),
}

impl Owned {
    pub(crate) fn line(value: &Value) -> Self {
        Self::Out(value.to_string().into_bytes())
    }

    pub(crate) fn body(&self) -> FrameBody<'_> {
        match self {
            Self::Spawn => FrameBody::Spawn,
            Self::Out(line) => FrameBody::Stdout(line),
            Self::Err(chunk) => FrameBody::Stderr(chunk),
            Self::Intent(op) => FrameBody::StdinIntent { op },
            Self::Written(op) => FrameBody::StdinWritten { op },
            Self::Oversized(length) => FrameBody::OversizedLine { head: b"{", length: *length },
            Self::Signal(signal) => FrameBody::Signal { signal: *signal },
            Self::Exit(exit) => FrameBody::Exit(*exit),
        }
    }
}

/// A run: its frames, and how its process was opened.
#[derive(Debug, Clone)]
pub(crate) struct Run {
    pub(crate) frames: Vec<Owned>,
    pub(crate) open: TranslatorOpen,
    /// Questions that the adapter asks at a turn's end were not asked in this run: they are answered here.
    pub(crate) answered: bool,
}

pub(crate) fn codex() -> &'static dyn Adapter {
    &Codex
}

fn data(kind: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("testdata/codex/0.171.0").join(kind)
}

/// The names of every recording of a kind.
pub(crate) fn names(kind: &str) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(data(kind))
        .unwrap()
        .map(|entry| entry.unwrap().path().file_stem().unwrap().to_str().unwrap().to_owned())
        .collect();
    names.sort();
    assert!(names.len() > 40, "the recordings are gone");
    names
}

fn read(kind: &str, name: &str) -> Run {
    let text = fs::read_to_string(data(kind).join(format!("{name}.jsonl"))).unwrap();
    let mut open = None;
    let frames = text
        .lines()
        .map(|line| {
            let frame: Value = serde_json::from_str(line).unwrap();
            let op = || frame["op"].as_str().unwrap().to_owned();
            let number = |key: &str| frame[key].as_i64().map(|number| i32::try_from(number).unwrap());
            match frame["frame"].as_str().unwrap() {
                "spawn" => {
                    open = Some(serde_json::from_value(frame["open"].clone()).unwrap());
                    Owned::Spawn
                }
                "stdout" => match frame["text"].as_str() {
                    Some(text) => Owned::Out(text.as_bytes().to_vec()),
                    None => Owned::line(&frame["line"]),
                },
                "stderr" => Owned::Err(frame["text"].as_str().unwrap().as_bytes().to_vec()),
                "stdin_intent" => Owned::Intent(op()),
                "stdin_written" => Owned::Written(op()),
                "signal" => Owned::Signal(number("signal").unwrap()),
                "exit" => Owned::Exit(Exit { code: number("code"), signal: number("signal") }),
                other => panic!("unknown frame {other}"),
            }
        })
        .collect();
    Run { frames, open: open.unwrap(), answered: kind == "lines" }
}

/// A whole recorded run.
pub(crate) fn recording(name: &str) -> Run {
    read("frames", name)
}

/// A run that was driven by other hands: other parameters, other questions.
pub(crate) fn transcript(name: &str) -> Run {
    read("lines", name)
}

pub(crate) fn open(opening: Option<OpenMode>, native: &str) -> TranslatorOpen {
    TranslatorOpen {
        spool_id: "spl_1".into(),
        native: NativeRef { id: native.into(), file: None },
        opening,
        carry: Carry::default(),
        turn_id: Some("trn_1".into()),
    }
}

pub(crate) fn translator(open: &TranslatorOpen) -> Box<dyn Translator> {
    codex().translator(open)
}

/// An output, with the turn and the frame it came from.
pub(crate) type Told = (usize, u64, Output);

/// Plays a run. A delivery after the end of a turn opens the next one.
pub(crate) fn play(run: &Run) -> Vec<Told> {
    play_to(run).0
}

/// Plays a run, and gives the last translator too.
pub(crate) fn play_to(run: &Run) -> (Vec<Told>, Box<dyn Translator>) {
    let mut told = Vec::new();
    let mut turn = 1;
    let mut reader = translator(&run.open);
    for (number, frame) in (1_u64..).zip(&run.frames) {
        let delivery = matches!(frame, Owned::Intent(op) if op.len() == 36);
        if delivery && reader.standing().ended {
            turn += 1;
            reader = translator(&TranslatorOpen {
                opening: None,
                carry: reader.carry(),
                turn_id: Some(format!("trn_{turn}")),
                ..run.open.clone()
            });
        }
        let mut outputs = reader.feed(Frame { number, body: frame.body() });
        if run.answered {
            let asked: Vec<String> = replies(&outputs).map(|line| line.op.clone()).collect();
            for op in asked.iter().filter(|op| op.starts_with("clean.") || op.starts_with("skills.")) {
                let answer = Owned::line(&json!({"id": op, "result": {}}));
                outputs.extend(reader.feed(Frame { number, body: answer.body() }));
            }
        }
        told.extend(outputs.into_iter().map(|output| (turn, number, output)));
    }
    (told, reader)
}

pub(crate) fn run(name: &str) -> Vec<Told> {
    play(&recording(name))
}

/// Feeds frames to one translator.
pub(crate) fn feed(reader: &mut dyn Translator, frames: &[Owned]) -> Vec<Output> {
    (1_u64..)
        .zip(frames)
        .flat_map(|(number, frame)| reader.feed(Frame { number, body: frame.body() }))
        .collect()
}

/// One line per output; runs of partials are merged, and lines that go out are shown as text.
pub(crate) fn render(told: &[Told]) -> String {
    let mut text = String::new();
    let mut merged: Option<(usize, u64, roundhouse_engines::Partial)> = None;
    let flush = |text: &mut String, merged: &mut Option<(usize, u64, roundhouse_engines::Partial)>| {
        if let Some((turn, frame, partial)) = merged.take() {
            writeln!(text, "{turn} @{frame} {}", json!({"partial": partial})).unwrap();
        }
    };
    for (turn, frame, output) in told {
        if let Output::Partial(partial) = output {
            if let Some((_, _, last)) = &mut merged
                && last.item == partial.item
                && last.offset + last.text.len() as u64 == partial.offset
            {
                last.text.push_str(&partial.text);
                continue;
            }
            flush(&mut text, &mut merged);
            merged = Some((*turn, *frame, partial.clone()));
            continue;
        }
        flush(&mut text, &mut merged);
        let value = match output {
            Output::Reply(line) => json!({"reply": line.op, "line": value_of(line)}),
            other => serde_json::to_value(other).unwrap(),
        };
        writeln!(text, "{turn} @{frame} {value}").unwrap();
    }
    flush(&mut text, &mut merged);
    text
}

/// A line that goes out, as JSON.
pub(crate) fn value_of(line: &StdinLine) -> Value {
    assert_eq!(line.bytes.iter().filter(|byte| **byte == b'\n').count(), 1, "one line");
    assert!(line.bytes.ends_with(b"\n"));
    serde_json::from_slice(&line.bytes).unwrap()
}

pub(crate) fn replies(outputs: &[Output]) -> impl Iterator<Item = &StdinLine> {
    outputs.iter().filter_map(|output| match output {
        Output::Reply(line) => Some(line),
        _ => None,
    })
}

/// The operation ids of the lines that went out.
pub(crate) fn reply_ops(told: &[Told]) -> Vec<&str> {
    told.iter()
        .filter_map(|(_, _, output)| match output {
            Output::Reply(line) => Some(line.op.as_str()),
            _ => None,
        })
        .collect()
}

pub(crate) fn events(told: &[Told]) -> Vec<&Event> {
    told.iter()
        .filter_map(|(_, _, output)| match output {
            Output::Event { event } => Some(event),
            _ => None,
        })
        .collect()
}

pub(crate) fn notices<'a>(told: &'a [Told], code: &str) -> Vec<&'a Notice> {
    told.iter()
        .filter_map(|(_, _, output)| match output {
            Output::Event { event: Event::Notice(notice) } | Output::SessionNotice { notice } => Some(notice),
            _ => None,
        })
        .filter(|notice| notice.code == code)
        .collect()
}

pub(crate) fn kinds(told: &[Told], kind: NoticeKind) -> usize {
    events(told)
        .iter()
        .filter(|event| matches!(event, Event::Notice(notice) if notice.notice == kind))
        .count()
}

pub(crate) fn ends(told: &[Told]) -> Vec<&TurnEnd> {
    told.iter()
        .filter_map(|(_, _, output)| match output {
            Output::TurnEnded(end) => Some(end.as_ref()),
            _ => None,
        })
        .collect()
}

/// The only end of a run of one turn.
pub(crate) fn end(told: &[Told]) -> &TurnEnd {
    let ends = ends(told);
    assert_eq!(ends.len(), 1, "{}", render(told));
    ends[0]
}

/// The failure of the first turn.
pub(crate) fn failure(told: &[Told]) -> &Failure {
    match &ends(told)[0].outcome {
        TurnOutcome::Failed { failure } => failure,
        other => panic!("not failed: {other:?}"),
    }
}

/// What the opening came to, when it failed.
pub(crate) fn open_failure(told: &[Told]) -> &OpenFailure {
    told.iter()
        .find_map(|(_, _, output)| match output {
            Output::OpenFailed(failed) => Some(failed),
            _ => None,
        })
        .unwrap_or_else(|| panic!("it opened:\n{}", render(told)))
}

pub(crate) fn opened(told: &[Told]) -> &Opened {
    told.iter()
        .find_map(|(_, _, output)| match output {
            Output::Opened(opened) => Some(opened),
            _ => None,
        })
        .unwrap_or_else(|| panic!("it did not open:\n{}", render(told)))
}

/// Where the first such output stands.
pub(crate) fn position(told: &[Told], wanted: impl Fn(&Output) -> bool) -> usize {
    told.iter()
        .position(|(_, _, output)| wanted(output))
        .unwrap_or_else(|| panic!("not told:\n{}", render(told)))
}

/// How often a translator came to an end.
pub(crate) fn terminals(outputs: &[Output]) -> usize {
    outputs.iter().filter(|output| matches!(output, Output::TurnEnded(_) | Output::OpenFailed(_))).count()
}

/// The delivery of turns made by hand.
pub(crate) const DELIVERY: &str = "11111111-2222-5333-8444-555555555555";

/// A second one.
pub(crate) const SECOND: &str = "21111111-2222-5333-8444-555555555555";

/// The native session of turns made by hand.
pub(crate) const THREAD: &str = "99999999-2222-7333-8444-555555555555";

/// The native turn of turns made by hand.
pub(crate) const TURN: &str = "88888888-2222-7333-8444-555555555555";

pub(crate) fn answer(op: &str, result: &Value) -> Owned {
    Owned::line(&json!({"id": op, "result": result}))
}

pub(crate) fn refusal(op: &str, message: &str) -> Owned {
    Owned::line(&json!({"id": op, "error": {"code": -32600, "message": message}}))
}

/// A notification of the turn made by hand.
pub(crate) fn note(method: &str, params: Value) -> Owned {
    let mut params = params;
    params["threadId"] = json!(THREAD);
    if params.get("turnId").is_none() {
        params["turnId"] = json!(TURN);
    }
    Owned::line(&json!({"method": method, "params": params}))
}

pub(crate) fn thread_answer() -> Owned {
    answer(
        "thread",
        &json!({"model": "gpt-5-mock", "thread": {"id": THREAD,
        "path": "/srv/example/home/sessions/2026/11/30/rollout-x.jsonl"}}),
    )
}

/// Frames of an open process.
pub(crate) fn initialized() -> Vec<Owned> {
    vec![
        Owned::Spawn,
        Owned::Intent("initialize".into()),
        answer(
            "initialize",
            &json!({"userAgent": "roundhouse/0.171.0 (x)", "codexHome": "/srv/example/home"}),
        ),
        Owned::Intent("thread".into()),
        thread_answer(),
    ]
}

/// A message was written, and the engine answered the request.
pub(crate) fn given() -> Vec<Owned> {
    let mut frames = initialized();
    frames.push(Owned::Intent(DELIVERY.into()));
    frames.push(Owned::Written(DELIVERY.into()));
    frames.push(answer(DELIVERY, &json!({"turn": {"id": TURN, "status": "inProgress"}})));
    frames
}

pub(crate) fn turn_started() -> Owned {
    note("turn/started", json!({"turn": {"id": TURN, "status": "inProgress"}}))
}

pub(crate) fn taken(client_id: &str) -> Owned {
    item("completed", json!({"type": "userMessage", "id": "u", "clientId": client_id, "content": []}))
}

pub(crate) fn item(which: &str, item: Value) -> Owned {
    note(&format!("item/{which}"), json!({"item": item}))
}

pub(crate) fn command(which: &str, status: &str) -> Owned {
    item(
        which,
        json!({"type": "commandExecution", "id": "c1", "command": "sleep 300", "cwd": "/w", "status": status}),
    )
}

/// Frames of an open process in which a turn has begun.
pub(crate) fn begun() -> Vec<Owned> {
    let mut frames = given();
    frames.extend([turn_started(), taken(DELIVERY)]);
    frames
}

pub(crate) fn said(id: &str, text: &str) -> Owned {
    item("completed", json!({"type": "agentMessage", "id": id, "text": text}))
}

pub(crate) fn tokens(total: u64, last: u64, turn: &str) -> Owned {
    let of = |input: u64| json!({"inputTokens": input, "cachedInputTokens": 0, "cacheWriteInputTokens": 0, "outputTokens": 1});
    note(
        "thread/tokenUsage/updated",
        json!({"turnId": turn, "tokenUsage": {"total": of(total), "last": of(last)}}),
    )
}

pub(crate) fn completed(status: &str, error: Value) -> Owned {
    note("turn/completed", json!({"turn": {"id": TURN, "status": status, "error": error, "items": []}}))
}

pub(crate) fn exit(code: Option<i32>, signal: Option<i32>) -> Owned {
    Owned::Exit(Exit { code, signal })
}

/// Plays frames made by hand.
pub(crate) fn play_frames(frames: Vec<Owned>) -> Vec<Told> {
    play(&Run { frames, open: open(Some(OpenMode::Start), ""), answered: false })
}
