//! Reads one turn of one Claude Code process.
//!
//! What ends a turn: every delivery's `command_lifecycle` is `completed` or `cancelled`, a `result` came after the
//! last delivery that was started, and the session said that it is idle. The first two come in either order. A
//! result alone is not the end (a background task may go on), and idle alone is not either (a delivery may wait).
//!
//! What belongs to the turn: everything the engine prints once it has started a delivery of the turn, unless the
//! line names another message. Before that, and after the end, output is the session's.

mod ending;
mod items;
mod lines;
mod tools;
mod usage;

use crate::{
    event::{Event, Notice, NoticeKind, PermissionRequest},
    failure::Failure,
    frame::{Exit, Frame, FrameBody},
    limit,
    translate::{
        Carry, Delivery, DeliveryEnd, LineError, Output, Partial, PermissionReply, Standing, StdinLine,
        Translator, TranslatorOpen, WaitingFor,
    },
    wire,
};

use self::{items::Items, tools::Tools, usage::UsageSum};
use super::{
    classify::{ApiError, ResultFacts, StderrTail},
    stdin,
};

/// How far the translator is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// The opening is not proved yet.
    Opening,
    /// The session is open, and the turn (if there is one) has not ended.
    Open,
    /// The turn has ended, or the opening has failed.
    Ended,
}

/// What the engine last said of itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum EngineState {
    Idle,
    Busy,
    Gone,
}

/// A message given to the engine.
#[derive(Debug)]
struct Given {
    id: String,
    /// The engine took it.
    started: bool,
    /// The engine repeated the line while it was idle: it has seen the id before.
    repeated: bool,
    end: Option<DeliveryEnd>,
}

/// A permission nobody has decided about yet.
#[derive(Debug)]
struct Asked {
    request_id: String,
    native_id: String,
    frame: u64,
    /// An answer is on its way.
    answered: bool,
}

/// The most messages, open permissions and answers that are kept in memory for one turn. A turn that exceeds
/// them is not of this engine.
const MANY: usize = 10_000;

/// The state of one turn in one process.
#[derive(Debug)]
pub(super) struct ClaudeTranslator {
    open: TranslatorOpen,
    carry: Carry,
    stage: Stage,
    engine: EngineState,
    given: Vec<Given>,
    asked: Vec<Asked>,
    items: Items,
    tools: Tools,
    usage: UsageSum,
    stderr: StderrTail,
    /// A result has come since the last delivery was started.
    result_since_start: bool,
    last_result: Option<ResultFacts>,
    /// The synthetic line that names an error, until its result comes.
    api_error: Option<ApiError>,
    /// When an exceeded limit resets, as the engine said in so many numbers.
    rejected_until: Option<i64>,
    /// What the results said, joined.
    answer: String,
    answer_bytes: u64,
    answered: bool,
    /// What the agent said since its last tool call or the engine's last result, without gaps.
    run: String,
    /// The engine had the agent go on in the middle of a reply: the result holds only its last piece.
    continued: bool,
    /// The history was just compacted: the summary comes as a line of the engine's own.
    summary_due: bool,
    /// What the agent said in all, for a turn without a good result.
    said: String,
    said_bytes: u64,
    /// We asked the engine to stop, or sent it a signal.
    interrupted: bool,
    /// Why the turn cannot go on whatever the engine says.
    doomed: Option<Failure>,
    retrying: bool,
    settling: bool,
    /// A turn nobody asked for runs.
    unrequested: bool,
    writes_lost_told: bool,
    unknown_lines: u64,
}

impl ClaudeTranslator {
    pub(super) fn new(open: TranslatorOpen) -> Self {
        let stage = match (open.opening, &open.turn_id) {
            (Some(_), _) => Stage::Opening,
            (None, Some(_)) => Stage::Open,
            (None, None) => Stage::Ended,
        };
        Self {
            carry: open.carry.clone(),
            open,
            stage,
            engine: EngineState::Idle,
            given: Vec::new(),
            asked: Vec::new(),
            items: Items::default(),
            tools: Tools::default(),
            usage: UsageSum::default(),
            stderr: StderrTail::default(),
            result_since_start: false,
            last_result: None,
            api_error: None,
            rejected_until: None,
            answer: String::new(),
            answer_bytes: 0,
            answered: false,
            run: String::new(),
            continued: false,
            summary_due: false,
            said: String::new(),
            said_bytes: 0,
            interrupted: false,
            doomed: None,
            retrying: false,
            settling: false,
            unrequested: false,
            writes_lost_told: false,
            unknown_lines: 0,
        }
    }

    /// Whether output belongs to the turn.
    fn in_turn(&self) -> bool {
        self.stage == Stage::Open && self.given.iter().any(|given| given.started)
    }

    fn given(&mut self, id: &str) -> Option<&mut Given> {
        self.given.iter_mut().find(|given| given.id == id)
    }

    /// A notice, to the turn if it is one of its, else to the session.
    fn notice(&self, notice: Notice, out: &mut Vec<Output>) {
        out.push(if self.in_turn() {
            Output::Event { event: Event::Notice(notice) }
        } else {
            Output::SessionNotice { notice }
        });
    }

    fn stdin_intent(&mut self, op: &str) {
        if self.stage == Stage::Ended {
            return;
        }
        if let Some(frame) = op.strip_prefix("permission.") {
            if let Ok(frame) = frame.parse::<u64>() {
                for asked in self.asked.iter_mut().filter(|asked| asked.frame == frame) {
                    asked.answered = true;
                }
            }
        } else if op.starts_with("interrupt.") {
            let ours = self.open.turn_id.as_deref().is_some_and(|turn| op == stdin::interrupt_op(turn));
            self.interrupted |= ours;
        } else if uuid::Uuid::try_parse(op).is_ok() && self.given(op).is_none() && self.given.len() < MANY {
            self.given.push(Given { id: op.to_owned(), started: false, repeated: false, end: None });
            self.settling = false;
        }
    }

    fn stderr_chunk(&mut self, chunk: &[u8], out: &mut Vec<Output>) {
        if self.stderr.take(chunk) {
            self.writes_lost("the engine could not save all of the session's file", out);
        }
    }

    fn writes_lost(&mut self, message: &str, out: &mut Vec<Output>) {
        self.carry.writes_lost = true;
        if !self.writes_lost_told {
            self.writes_lost_told = true;
            self.notice(Notice::new(NoticeKind::ContextLost, "session_writes_lost", message), out);
        }
    }

    fn oversized(&mut self, length: u64, out: &mut Vec<Output>) {
        self.unknown_lines += 1;
        if self.stage == Stage::Ended || self.doomed.is_some() {
            return;
        }
        let failure = Failure::oversized_line(length);
        self.notice(Notice::new(NoticeKind::Warning, "oversized_line", &failure.message), out);
        self.doomed = Some(failure.clone());
        out.push(Output::MustStop { failure: Box::new(failure) });
    }

    fn pending(&self) -> impl Iterator<Item = &Asked> {
        self.asked.iter().filter(|asked| !asked.answered)
    }
}

impl Translator for ClaudeTranslator {
    fn feed(&mut self, frame: Frame<'_>) -> Vec<Output> {
        let mut out = Vec::new();
        match frame.body {
            FrameBody::Spawn | FrameBody::StdinWritten { .. } => {}
            FrameBody::Stdout(line) => self.line(frame.number, line, &mut out),
            FrameBody::OversizedLine { length, .. } => self.oversized(length, &mut out),
            FrameBody::Stderr(chunk) => self.stderr_chunk(chunk, &mut out),
            FrameBody::StdinIntent { op } => self.stdin_intent(op),
            FrameBody::Signal { .. } => self.interrupted |= self.stage != Stage::Ended,
            FrameBody::Exit(exit) => self.exit(exit, &mut out),
        }
        out
    }

    fn settle(&mut self) -> Vec<Output> {
        let mut out = Vec::new();
        if self.settling && self.stage == Stage::Open {
            self.settled(&mut out);
        }
        out
    }

    fn opening(&self) -> Vec<StdinLine> {
        self.open.opening.map(|_| stdin::initialize()).into_iter().collect()
    }

    fn deliver(&self, delivery: &Delivery<'_>) -> Result<StdinLine, LineError> {
        stdin::deliver(delivery)
    }

    fn interrupt(&self) -> Result<StdinLine, LineError> {
        self.open.turn_id.as_deref().map(stdin::interrupt).ok_or(LineError::Unsupported)
    }

    fn answer_permission(
        &self,
        request_id: &str,
        reply: PermissionReply<'_>,
    ) -> Result<StdinLine, LineError> {
        let asked = self.pending().find(|asked| asked.request_id == request_id);
        let asked = asked.ok_or(LineError::NoSuchRequest)?;
        Ok(stdin::answer_permission(asked.frame, &asked.native_id, reply))
    }

    fn standing(&self) -> Standing {
        let owed = self.given.iter().any(|given| given.end.is_none() && !given.repeated);
        let opened = self.stage != Stage::Opening;
        let tool = self.tools.running();
        let waiting_for = match self.stage {
            Stage::Opening => WaitingFor::Opening,
            Stage::Ended => WaitingFor::Message,
            Stage::Open if self.pending().next().is_some() => WaitingFor::Permission,
            Stage::Open if self.given.is_empty() => WaitingFor::Message,
            Stage::Open if self.settling || !owed => WaitingFor::Idle,
            Stage::Open if self.retrying => WaitingFor::ModelRetry,
            Stage::Open => match tool {
                Some(name) => WaitingFor::Tool(name.to_owned()),
                None => WaitingFor::Model,
            },
        };
        let ended = self.stage == Stage::Ended;
        Standing {
            opened,
            accepted: self.given.iter().any(|given| given.started),
            quiescent: opened
                && self.engine == EngineState::Idle
                && (ended || self.given.is_empty())
                && self.doomed.is_none(),
            pending_permissions: self.pending().map(|asked| asked.request_id.clone()).collect(),
            waiting_for,
            ended,
        }
    }

    fn partials(&self) -> Vec<Partial> {
        self.items.snapshot()
    }

    fn carry(&self) -> Carry {
        self.carry.clone()
    }
}

/// What a permission request says, as an event.
fn permission_event(request_id: String, request: &serde_json::Value) -> PermissionRequest {
    let input = request.get("input").map(ToString::to_string).unwrap_or_default();
    PermissionRequest {
        request_id,
        call_id: wire::word(request, "tool_use_id").map(limit::short),
        tool: limit::short(wire::text_or(request, "tool_name", "unknown")),
        input: limit::BoundedText::event(&input),
        description: wire::word(request, "description").map(limit::short),
        blocked_path: wire::word(request, "blocked_path").map(limit::short),
    }
}

/// An exit of which nothing is known.
const UNSEEN: Exit = Exit { code: None, signal: None };
