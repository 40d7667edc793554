//! Plays recorded runs to the translator, the way a turn actor would: a new translator for every turn, made of what the one
//! before it left behind.

use std::{fmt::Write as _, fs, path::PathBuf};

use roundhouse_engines::{
    Adapter, Carry, Event, Exit, Failure, Frame, FrameBody, NativeRef, OpenMode, Output, Translator,
    TranslatorOpen, TurnEnd, TurnOutcome, adapter,
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
}

fn data(kind: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("testdata/claude-code/2.1.332").join(kind)
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
    adapter("claude-code").unwrap().translator(open)
}

fn opening_of(name: &str) -> OpenMode {
    if name.starts_with("resume") || name.starts_with("perm_resume") {
        OpenMode::Resume
    } else {
        OpenMode::Start
    }
}

/// A whole recorded run.
pub(crate) fn recording(name: &str) -> Run {
    let text = fs::read_to_string(data("frames").join(format!("{name}.jsonl"))).unwrap();
    let mut native = "none".to_owned();
    let frames = text
        .lines()
        .map(|line| {
            let frame: Value = serde_json::from_str(line).unwrap();
            let op = || frame["op"].as_str().unwrap().to_owned();
            match frame["frame"].as_str().unwrap() {
                "spawn" => Owned::Spawn,
                "stdout" => {
                    if let Some(id) = frame["line"]["session_id"].as_str().filter(|_| native == "none") {
                        native = id.to_owned();
                    }
                    Owned::line(&frame["line"])
                }
                "stderr" => Owned::Err(frame["text"].as_str().unwrap().as_bytes().to_vec()),
                "stdin_intent" => Owned::Intent(op()),
                "stdin_written" => Owned::Written(op()),
                "signal" => Owned::Signal(i32::try_from(frame["signal"].as_i64().unwrap()).unwrap()),
                "exit" => Owned::Exit(Exit {
                    code: frame["code"].as_i64().map(|code| i32::try_from(code).unwrap()),
                    signal: frame["signal"].as_i64().map(|signal| i32::try_from(signal).unwrap()),
                }),
                other => panic!("unknown frame {other}"),
            }
        })
        .collect();
    Run { frames, open: open(Some(opening_of(name)), &native) }
}

/// The lines of a run with other flags, completed to frames: the handshake, the deliveries, and the lines that the CLI
/// prints when messages carry ids and session states are asked for.
pub(crate) fn transcript(name: &str) -> Run {
    let text = fs::read_to_string(data("lines").join(format!("{name}.jsonl"))).unwrap();
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let native = lines.iter().find_map(|line| line["session_id"].as_str()).unwrap_or("none").to_owned();
    let never_opened = lines.iter().all(|line| line["subtype"] != "init" && line["num_turns"] == 0);
    let mut wrapped = Wrapping { states: text.contains("session_state_changed"), ..Wrapping::default() };
    wrapped.frames.push(Owned::Spawn);
    wrapped.given("initialize");
    let answered =
        lines.iter().position(|line| line["response"]["response"]["claude_code_version"].is_string());
    if !never_opened && answered.is_none() {
        wrapped.push(&json!({"type": "control_response", "response":
            {"subtype": "success", "request_id": "initialize", "response": {}}}));
    }
    for (place, line) in lines.iter().enumerate() {
        let mut line = line.clone();
        if answered == Some(place) {
            line["response"]["request_id"] = json!("initialize");
        } else if !never_opened {
            wrapped.before(&line, &lines[place..]);
        }
        wrapped.push(&line);
        wrapped.after(&line);
        if name.starts_with("sig_int") && line["subtype"] == "init" {
            wrapped.frames.push(Owned::Signal(2));
        }
    }
    if name.starts_with("sig_term") || name.starts_with("sig_kill") {
        wrapped.frames.push(Owned::Signal(15));
    }
    let failed =
        lines.iter().rev().find(|line| line["type"] == "result").map(|line| line["is_error"] == true);
    wrapped.frames.push(Owned::Exit(match failed {
        _ if name.starts_with("sig_term") => Exit { code: Some(143), signal: None },
        None => Exit { code: None, signal: Some(9) },
        Some(failed) => Exit { code: Some(i32::from(failed)), signal: None },
    }));
    Run { frames: wrapped.frames, open: open(Some(opening_of(name)), &native) }
}

#[derive(Default)]
struct Wrapping {
    frames: Vec<Owned>,
    states: bool,
    known: Vec<String>,
    /// The delivery in work, and whether its lifecycle lines are ours.
    active: Option<(String, bool)>,
    ended: bool,
    result: bool,
    turns: usize,
}

impl Wrapping {
    fn push(&mut self, line: &Value) {
        self.frames.push(Owned::line(line));
    }

    fn given(&mut self, op: &str) {
        self.frames.push(Owned::Intent(op.to_owned()));
        self.frames.push(Owned::Written(op.to_owned()));
    }

    fn lifecycle(&mut self, id: &str, state: &str) {
        self.push(&json!({"type": "command_lifecycle", "command_uuid": id, "state": state}));
    }

    /// The end of a turn that the run did not announce.
    fn close(&mut self) {
        let Some((id, ours)) = self.active.clone() else { return };
        if !(self.result && (self.ended || ours)) {
            return;
        }
        if ours {
            self.lifecycle(&id, "completed");
        }
        if !self.states {
            self.push(&json!({"type": "system", "subtype": "session_state_changed", "state": "idle"}));
        }
        self.active = None;
        self.ended = false;
        self.result = false;
    }

    fn before(&mut self, line: &Value, rest: &[Value]) {
        if let Some(id) = line["command_uuid"].as_str().map(str::to_owned) {
            if !self.known.contains(&id) {
                self.close();
                self.known.push(id.clone());
                self.given(&id);
            }
            if line["state"] == "started" {
                self.active = Some((id, false));
                self.turns += 1;
            }
        } else if line["response"]["response"]["still_queued"].is_array() {
            let turn = self.turns.max(1);
            self.given(&format!("interrupt.trn_{turn}"));
        } else if line["subtype"] == "init" {
            self.close();
            if self.active.is_none() {
                let echo = rest
                    .iter()
                    .take_while(|line| line["type"] != "result")
                    .find(|line| line["isReplay"] == true)
                    .and_then(|line| line["uuid"].as_str());
                let id = echo.map_or_else(
                    || format!("00000000-0000-4000-8000-{:012}", self.known.len()),
                    str::to_owned,
                );
                self.known.push(id.clone());
                self.given(&id);
                self.lifecycle(&id, "started");
                self.active = Some((id, true));
                self.turns += 1;
            }
        } else if line["isReplay"] == true && self.active.is_none() {
            let id = line["uuid"].as_str().unwrap_or_default().to_owned();
            if !id.is_empty() && !self.known.contains(&id) {
                self.known.push(id.clone());
                self.given(&id);
            }
        }
    }

    fn after(&mut self, line: &Value) {
        self.result |= line["type"] == "result";
        let state = line["state"].as_str().unwrap_or_default();
        self.ended |= line["type"] == "command_lifecycle" && (state == "completed" || state == "cancelled");
    }
}

/// An output, with the turn and the frame it came from.
pub(crate) type Told = (usize, u64, Output);

/// Plays a run. A delivery after the end of a turn opens the next one.
pub(crate) fn play(run: &Run) -> Vec<Told> {
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
        let outputs = reader.feed(Frame { number, body: frame.body() });
        told.extend(outputs.into_iter().map(|output| (turn, number, output)));
    }
    told
}

/// Feeds frames to one translator.
pub(crate) fn feed(reader: &mut dyn Translator, frames: &[Owned]) -> Vec<Output> {
    (1_u64..)
        .zip(frames)
        .flat_map(|(number, frame)| reader.feed(Frame { number, body: frame.body() }))
        .collect()
}

/// One line per output; runs of partials are merged.
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
        let value = serde_json::to_value(output).unwrap();
        writeln!(text, "{turn} @{frame} {value}").unwrap();
    }
    flush(&mut text, &mut merged);
    text
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

/// How often a translator came to an end.
pub(crate) fn terminals(outputs: &[Output]) -> usize {
    outputs.iter().filter(|output| matches!(output, Output::TurnEnded(_) | Output::OpenFailed(_))).count()
}

/// A turn made by hand: an open process with one delivery that the engine took.
pub(crate) const DELIVERY: &str = "11111111-2222-5333-8444-555555555555";

/// The native session of turns made by hand.
pub(crate) const NATIVE: &str = "99999999-2222-4333-8444-555555555555";

pub(crate) fn initialized() -> Vec<Owned> {
    vec![
        Owned::Spawn,
        Owned::Intent("initialize".into()),
        Owned::line(&json!({"type": "control_response", "response":
            {"subtype": "success", "request_id": "initialize", "response": {"session_state": "idle"}}})),
    ]
}

pub(crate) fn state(state: &str) -> Owned {
    Owned::line(&json!({"type": "system", "subtype": "session_state_changed", "state": state}))
}

pub(crate) fn lifecycle(id: &str, state: &str) -> Owned {
    Owned::line(&json!({"type": "command_lifecycle", "command_uuid": id, "state": state}))
}

pub(crate) fn result(text: &str) -> Owned {
    Owned::line(&json!({"type": "result", "subtype": "success", "is_error": false, "result": text,
        "model_usage_since_last_result": {"m": {"inputTokens": 1, "outputTokens": 2}}}))
}

pub(crate) fn said(message: &str, text: &str) -> Owned {
    Owned::line(&json!({"type": "assistant", "parent_tool_use_id": null,
        "message": {"id": message, "model": "m", "content": [{"type": "text", "text": text}]}}))
}

/// Frames of an open process in which a turn has begun.
pub(crate) fn begun() -> Vec<Owned> {
    let mut frames = initialized();
    frames.extend([
        Owned::Intent(DELIVERY.into()),
        Owned::Written(DELIVERY.into()),
        state("running"),
        lifecycle(DELIVERY, "queued"),
        lifecycle(DELIVERY, "started"),
    ]);
    frames
}

/// Plays frames made by hand, as a session that is started.
pub(crate) fn play_frames(frames: Vec<Owned>) -> Vec<Told> {
    play(&Run { frames, open: open(Some(OpenMode::Start), NATIVE) })
}

/// Another delivery, or another session.
pub(crate) const SECOND: &str = "22222222-2222-5333-8444-555555555555";

pub(crate) fn claude() -> &'static dyn Adapter {
    adapter("claude-code").unwrap()
}

/// A recorded run, played.
pub(crate) fn run(name: &str) -> Vec<Told> {
    play(&recording(name))
}

pub(crate) fn position(told: &[Told], what: impl Fn(&Output) -> bool) -> usize {
    told.iter().position(|(_, _, output)| what(output)).unwrap_or_else(|| panic!("{}", render(told)))
}

/// How a turn made by hand ends well.
pub(crate) fn closing(text: &str) -> Vec<Owned> {
    vec![result(text), lifecycle(DELIVERY, "completed"), state("idle")]
}
