//! What an engine prints, read by its adapter.
//!
//! An input is what a keeper sees, as text: lines are lines of standard output, but for those that begin with the byte 1,
//! which tell what else happened. After it comes a letter: `O` how the translator was made (JSON), `s` spawned, `i` and
//! `w` an intent and its writing (the operation's id), `e` standard error, `g` a signal, `x` the exit (a code).

use std::collections::{BTreeMap, BTreeSet};

use roundhouse_engines::{
    Adapter, Carry, Event, Exit, Frame, FrameBody, ItemKey, NativeRef, OpenMode, Output, Translator,
    TranslatorOpen, claude_code::ClaudeCode, codex::Codex,
};
use roundhouse_process::{Line, LineSplitter};

/// The longest line here; the product's is 16 MiB.
const LINE_MAX: usize = 256 * 1024;

/// Something that happened, owned.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Happened {
    Line(Vec<u8>),
    Overlong,
    Spawn,
    Intent(String),
    Written(String),
    Err(Vec<u8>),
    Signal(i32),
    Exit(Exit),
}

impl Happened {
    fn body(&self) -> FrameBody<'_> {
        match self {
            Self::Line(line) => FrameBody::Stdout(line),
            Self::Overlong => FrameBody::OversizedLine { head: b"{", length: LINE_MAX as u64 + 1 },
            Self::Spawn => FrameBody::Spawn,
            Self::Intent(op) => FrameBody::StdinIntent { op },
            Self::Written(op) => FrameBody::StdinWritten { op },
            Self::Err(bytes) => FrameBody::Stderr(bytes),
            Self::Signal(signal) => FrameBody::Signal { signal: *signal },
            Self::Exit(exit) => FrameBody::Exit(*exit),
        }
    }
}

/// A run as an input stands for it.
#[derive(Debug, Clone, PartialEq)]
pub struct Run {
    open: TranslatorOpen,
    happened: Vec<Happened>,
}

impl Run {
    /// Reads an input that comes in pieces.
    #[must_use]
    pub fn read(pieces: &[&[u8]]) -> Self {
        let mut run = Self {
            open: TranslatorOpen {
                spool_id: "spl_1".to_owned(),
                native: NativeRef { id: "99999999-2222-4333-8444-555555555555".to_owned(), file: None },
                opening: Some(OpenMode::Start),
                carry: Carry::default(),
                turn_id: Some("trn_1".to_owned()),
            },
            happened: Vec::new(),
        };
        let mut splitter = LineSplitter::new(LINE_MAX);
        let mut take = |line: Line<'_>| match line {
            Line::Whole { bytes, .. } => run.take(bytes),
            Line::Overlong { .. } => run.happened.push(Happened::Overlong),
            Line::OverlongEnd { .. } => {}
        };
        for piece in pieces {
            splitter.feed(piece, &mut take);
        }
        splitter.finish(&mut take);
        run
    }

    /// The run with one line more.
    #[must_use]
    pub fn and_line(&self, line: &[u8]) -> Self {
        let mut run = self.clone();
        run.take(line);
        run
    }

    fn take(&mut self, line: &[u8]) {
        let [1, letter, rest @ ..] = line else {
            self.happened.push(Happened::Line(line.to_vec()));
            return;
        };
        let text = || String::from_utf8_lossy(rest).into_owned();
        let number = || text().trim().parse::<i32>().ok();
        match letter {
            b'O' => {
                if let Ok(open) = serde_json::from_slice::<TranslatorOpen>(rest) {
                    // Without a turn there is none to end; what is read here is one.
                    let turn_id = open.turn_id.clone().or_else(|| self.open.turn_id.clone());
                    self.open = TranslatorOpen { turn_id, ..open };
                }
            }
            b's' => self.happened.push(Happened::Spawn),
            b'i' => self.happened.push(Happened::Intent(text())),
            b'w' => self.happened.push(Happened::Written(text())),
            b'e' => self.happened.push(Happened::Err(rest.to_vec())),
            b'g' => self.happened.push(Happened::Signal(number().unwrap_or(15))),
            b'x' => self.happened.push(Happened::Exit(Exit { code: number(), signal: None })),
            _ => {}
        }
    }
}

/// What became of a run's turns, the last one ended by the end of the process.
#[derive(Debug, PartialEq)]
pub struct Played {
    /// The outputs of each turn.
    pub turns: Vec<Vec<Output>>,
}

/// Plays a run the way a turn actor does: each delivery after the end of a turn makes a new translator. In the end the
/// process ends. Asserts what holds for every turn.
///
/// # Panics
/// When something does not hold.
#[must_use]
pub fn play(adapter: &dyn Adapter, run: &Run) -> Played {
    let mut reader = adapter.translator(&run.open);
    let mut turns = vec![Vec::new()];
    let mut number = 0;
    for happened in &run.happened {
        number += 1;
        let delivery = matches!(happened, Happened::Intent(op) if op.len() == 36);
        if delivery && reader.standing().ended {
            let turn = turns.len() + 1;
            reader = adapter.translator(&TranslatorOpen {
                opening: None,
                carry: reader.carry(),
                turn_id: Some(format!("trn_{turn}")),
                ..run.open.clone()
            });
            turns.push(Vec::new());
        }
        let outputs = reader.feed(Frame { number, body: happened.body() });
        if let Some(turn) = turns.last_mut() {
            turn.extend(outputs);
        }
    }
    let last = end(reader.as_mut(), number);
    if let Some(turn) = turns.last_mut() {
        turn.extend(last);
    }
    for outputs in &turns {
        holds(outputs);
    }
    Played { turns }
}

/// The process ends, and that is told twice: once by the keeper, once by whoever finds the keeper dead.
fn end(reader: &mut dyn Translator, number: u64) -> Vec<Output> {
    let exit = FrameBody::Exit(Exit { code: None, signal: Some(9) });
    let mut outputs = reader.feed(Frame { number: number + 1, body: exit });
    outputs.extend(reader.feed(Frame { number: number + 2, body: exit }));
    assert!(reader.standing().ended, "a turn whose process is gone has ended");
    assert!(!reader.standing().quiescent, "a dead process takes no turn");
    assert!(reader.partials().is_empty(), "nothing stays unfinished");
    outputs
}

/// What holds for the outputs of a turn whose process is gone or whose successor has begun.
fn holds(outputs: &[Output]) {
    let mut ends = 0;
    let mut accepted = BTreeSet::new();
    let (mut calls, mut results) = (BTreeSet::new(), BTreeSet::new());
    let mut whole: Vec<ItemKey> = Vec::new();
    let mut live: BTreeMap<String, u64> = BTreeMap::new();
    for output in outputs {
        if ends > 0 {
            assert!(
                matches!(output, Output::SessionNotice { .. } | Output::Reply(_)),
                "{output:?} after the end of the turn"
            );
        }
        match output {
            Output::TurnEnded(_) | Output::OpenFailed(_) => ends += 1,
            Output::Accepted { delivery_id } => {
                assert!(accepted.insert(delivery_id.clone()), "accepted twice")
            }
            Output::Event { event: Event::ToolCall(call) } => {
                assert!(calls.insert(call.call_id.clone()), "{} called twice", call.call_id);
            }
            Output::Event { event: Event::ToolResult(result) } => {
                assert!(calls.contains(&result.call_id), "a result before its call");
                assert!(results.insert(result.call_id.clone()), "two results of one call");
            }
            Output::Event { event: Event::Text(text) | Event::Reasoning(text) } => {
                assert!(!whole.contains(&text.item), "{:?} told twice", text.item);
                whole.push(text.item.clone());
            }
            Output::Partial(partial) => {
                assert!(!whole.contains(&partial.item), "partial text after the whole");
                let so_far = live.entry(format!("{:?}", partial.item)).or_default();
                assert_eq!(partial.offset, *so_far, "partial text leaves a gap");
                *so_far += partial.text.len() as u64;
            }
            Output::PartialReset { item } => {
                live.remove(&format!("{item:?}"));
            }
            _ => {}
        }
    }
    assert_eq!(ends, 1, "a turn ends once");
    assert_eq!(calls, results, "every call has its result");
}

fn fuzz(adapter: &dyn Adapter, data: &[u8]) {
    let run = Run::read(&[data]);
    assert_eq!(Run::read(&crate::pieces(data)), run, "pieces change nothing");
    let played = play(adapter, &run);
    assert_eq!(play(adapter, &run), played, "a replay gives the same");
}

pub(crate) fn claude_code(data: &[u8]) {
    fuzz(&ClaudeCode, data);
}

pub(crate) fn codex(data: &[u8]) {
    fuzz(&Codex, data);
}
