//! Reads one turn of one app-server.
//!
//! What ends a turn: the engine's `turn/completed` for it, and after that, where commands may outlive it (an
//! interrupt leaves them running, and a command that takes long becomes a background terminal), the answer to our
//! request to end them and their own ends. Nothing else does; an app-server that is stopped by a signal says no
//! word.
//!
//! What belongs to the turn is told by ids: every line names its thread and its turn.

mod ending;
mod items;
mod lines;
mod opening;
mod requests;
mod tools;
mod usage;

use serde_json::Value;
use uuid::Uuid;

use crate::{
    event::{Event, Notice, NoticeKind},
    failure::Failure,
    frame::{Frame, FrameBody},
    plan::{NativeRef, OpenMode},
    translate::{
        Carry, Delivery, DeliveryEnd, LineError, Output, Partial, PermissionReply, SessionCarry, Standing,
        StdinLine, Translator, TranslatorOpen, WaitingFor,
    },
};

use self::{items::Items, opening::Opening, tools::Tools, usage::UsageSum};
use super::{
    classify::{StderrTail, TurnError},
    setup::Setup,
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

/// A message given to the engine.
#[derive(Debug)]
struct Given {
    id: String,
    /// The engine answered the request.
    answered: bool,
    /// The engine took it.
    accepted: bool,
    end: Option<DeliveryEnd>,
}

/// A permission nobody has decided about yet.
#[derive(Debug)]
struct Asked {
    request_id: String,
    /// The engine's id of the request: a number.
    native_id: Value,
    /// The item it is about, as the engine names it.
    item: String,
    frame: u64,
    /// An answer is on its way.
    answered: bool,
}

/// The turn as the engine has it.
#[derive(Debug, Default)]
struct NativeTurn {
    id: Option<String>,
    /// `turn/started` came: from here on it can be interrupted.
    started: bool,
    /// Its status at its end.
    status: Option<String>,
    error: Option<TurnError>,
}

/// How far a question is that is asked when a turn ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Asking {
    NotAsked,
    Asked,
    Answered,
}

/// The most messages, open permissions and skills that are kept in memory for one turn. A turn that exceeds them is
/// not of this engine.
const MANY: usize = 10_000;

/// The state of one turn in one process.
#[derive(Debug)]
pub(super) struct CodexTranslator {
    open: TranslatorOpen,
    carry: Carry,
    /// What the thread leaves for the next turn.
    session: SessionCarry,
    setup: Option<Setup>,
    opening: Opening,
    stage: Stage,
    gone: bool,
    given: Vec<Given>,
    asked: Vec<Asked>,
    turn: NativeTurn,
    /// The commands that outlive the turn are to be ended.
    cleaning: Asking,
    /// Whether the turn's tools made new skills.
    checking: Asking,
    /// A turn that is not ours runs.
    foreign: Option<String>,
    items: Items,
    tools: Tools,
    usage: UsageSum,
    stderr: StderrTail,
    /// When a limit that was reached resets, as the engine said in so many numbers.
    rejected_until: Option<i64>,
    quota_told: Option<(u32, bool)>,
    /// What the engine says the answer is.
    answer: Option<String>,
    /// What the agent said in all, for a turn without an answer.
    said: String,
    said_bytes: u64,
    /// We asked the engine to stop, or sent it a signal.
    interrupted: bool,
    interrupt_sent: bool,
    /// Why the turn cannot go on whatever the engine says.
    doomed: Option<Failure>,
    retrying: bool,
    settling: bool,
    /// Skills appeared or changed since the thread was opened: their names would be expanded.
    skills_changed: bool,
    unknown_lines: u64,
}

impl CodexTranslator {
    pub(super) fn new(open: TranslatorOpen) -> Self {
        let stage = match (open.opening, &open.turn_id) {
            (Some(_), _) => Stage::Opening,
            (None, Some(_)) => Stage::Open,
            (None, None) => Stage::Ended,
        };
        let mut carry = open.carry.clone();
        let setup = carry.setup.take().and_then(|setup| serde_json::from_value(setup).ok());
        let mut session = carry.session.take().unwrap_or_default();
        if session.native.is_none() && !open.native.id.is_empty() {
            session.native = Some(open.native.clone());
        }
        if open.opening == Some(OpenMode::Start) {
            // Whatever was known is of another thread.
            session = SessionCarry::default();
        }
        let opening = Opening::new(&open, setup.as_ref());
        let fresh = open.opening == Some(OpenMode::Start);
        let base = session.usage_total.or_else(|| fresh.then(Default::default));
        session.usage_total = base;
        Self {
            usage: UsageSum::new(base),
            carry,
            session,
            setup,
            opening,
            stage,
            open,
            gone: false,
            given: Vec::new(),
            asked: Vec::new(),
            turn: NativeTurn::default(),
            cleaning: Asking::NotAsked,
            checking: Asking::NotAsked,
            foreign: None,
            items: Items::default(),
            tools: Tools::default(),
            stderr: StderrTail::default(),
            rejected_until: None,
            quota_told: None,
            answer: None,
            said: String::new(),
            said_bytes: 0,
            interrupted: false,
            interrupt_sent: false,
            doomed: None,
            retrying: false,
            settling: false,
            skills_changed: false,
            unknown_lines: 0,
        }
    }

    /// The thread's id, once known.
    fn thread(&self) -> Option<&str> {
        self.session.native.as_ref().map(|native| native.id.as_str())
    }

    /// The native session as it is best known.
    fn native(&self) -> NativeRef {
        self.session.native.clone().unwrap_or_else(|| self.open.native.clone())
    }

    /// Tells something that belongs to the turn if there is one, else to the session.
    fn notice(&self, notice: Notice, out: &mut Vec<Output>) {
        out.push(match self.stage == Stage::Open && self.open.turn_id.is_some() {
            true => Output::Event { event: Event::Notice(notice) },
            false => Output::SessionNotice { notice },
        });
    }

    fn stdin_intent(&mut self, op: &str, out: &mut Vec<Output>) {
        if let Some(frame) = op.strip_prefix("permission.").and_then(|frame| frame.parse::<u64>().ok()) {
            if let Some(asked) = self.asked.iter_mut().find(|asked| asked.frame == frame) {
                asked.answered = true;
            }
            return;
        }
        let Some(turn_id) = self.open.turn_id.clone() else { return };
        if self.stage == Stage::Ended {
            return;
        }
        if op == stdin::interrupt_op(&turn_id) {
            self.interrupted = true;
            self.interrupt_sent = true;
        } else if op == stdin::hold_op(&turn_id) {
            self.interrupted = true;
            self.interrupt_when_started(out);
        } else if op.len() == 36
            && Uuid::try_parse(op).is_ok()
            && self.given.len() < MANY
            && self.given.iter().all(|given| given.id != op)
        {
            self.given.push(Given { id: op.to_owned(), answered: false, accepted: false, end: None });
        }
    }

    /// Sends the interrupt that was asked for before the engine could take one.
    fn interrupt_when_started(&mut self, out: &mut Vec<Output>) {
        if self.interrupted
            && !self.interrupt_sent
            && self.stage == Stage::Open
            && let Some(line) = self.interrupt_line()
        {
            self.interrupt_sent = true;
            out.push(Output::Reply(line));
        }
    }

    /// The interrupt, while there is something to interrupt.
    fn interrupt_line(&self) -> Option<StdinLine> {
        let running = self.turn.started && self.turn.status.is_none();
        let native_turn = self.turn.id.as_deref().filter(|_| running)?;
        Some(stdin::interrupt(self.open.turn_id.as_deref()?, self.thread()?, native_turn))
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

impl Translator for CodexTranslator {
    fn feed(&mut self, frame: Frame<'_>) -> Vec<Output> {
        let mut out = Vec::new();
        match frame.body {
            FrameBody::Spawn | FrameBody::StdinWritten { .. } => {}
            FrameBody::Stdout(line) => self.line(frame.number, line, &mut out),
            FrameBody::OversizedLine { length, .. } => self.oversized(length, &mut out),
            FrameBody::Stderr(chunk) => self.stderr.take(chunk),
            FrameBody::StdinIntent { op } => self.stdin_intent(op, &mut out),
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
        match (&self.setup, self.open.opening) {
            (Some(setup), Some(_)) => stdin::opening(setup),
            _ => Vec::new(),
        }
    }

    fn deliver(&self, delivery: &Delivery<'_>) -> Result<StdinLine, LineError> {
        let ended = self.stage != Stage::Open || self.turn.status.is_some();
        let Some(thread) = self.thread().filter(|_| !ended) else { return Err(LineError::NotNow) };
        let running = self.turn.id.as_deref().filter(|_| self.turn.started);
        // A second `turn/start` would silently become a part of the first. A repeat of the same one is written once.
        let other = |given: &Given| given.end.is_none() && given.id != delivery.delivery_id;
        if running.is_none() && self.given.iter().any(other) {
            return Err(LineError::NotNow);
        }
        stdin::deliver(delivery, thread, running)
    }

    fn interrupt(&self) -> Result<StdinLine, LineError> {
        let turn_id = self.open.turn_id.as_deref().ok_or(LineError::Unsupported)?;
        if self.stage == Stage::Ended {
            return Err(LineError::NotNow);
        }
        Ok(self.interrupt_line().unwrap_or_else(|| stdin::hold(turn_id)))
    }

    fn answer_permission(
        &self,
        request_id: &str,
        reply: PermissionReply<'_>,
    ) -> Result<StdinLine, LineError> {
        let asked = self.pending().find(|asked| asked.request_id == request_id);
        let asked = asked.ok_or(LineError::NoSuchRequest)?;
        let turn = self.thread().zip(self.turn.id.as_deref());
        Ok(stdin::answer_permission(asked.frame, &asked.native_id, turn, reply))
    }

    fn standing(&self) -> Standing {
        let opened = self.stage != Stage::Opening;
        let ended = self.stage == Stage::Ended;
        let waiting_for = match self.stage {
            Stage::Opening => WaitingFor::Opening,
            Stage::Ended => WaitingFor::Message,
            Stage::Open if self.pending().next().is_some() => WaitingFor::Permission,
            Stage::Open if self.given.is_empty() => WaitingFor::Message,
            Stage::Open if self.turn.status.is_some() => WaitingFor::Idle,
            Stage::Open if self.retrying => WaitingFor::ModelRetry,
            Stage::Open => match self.tools.running() {
                Some(name) => WaitingFor::Tool(name.to_owned()),
                None => WaitingFor::Model,
            },
        };
        Standing {
            opened,
            accepted: self.given.iter().any(|given| given.accepted),
            // With changed skills a name in the next message would be expanded: a fresh process knows them.
            quiescent: opened
                && !self.gone
                && self.foreign.is_none()
                && !self.skills_changed
                && self.cleaning != Asking::Asked
                && self.checking != Asking::Asked
                && (ended || self.given.is_empty())
                && self.doomed.is_none()
                && self.thread().is_some(),
            pending_permissions: self.pending().map(|asked| asked.request_id.clone()).collect(),
            waiting_for,
            ended,
        }
    }

    fn partials(&self) -> Vec<Partial> {
        self.items.snapshot()
    }

    fn carry(&self) -> Carry {
        let known = self.session != SessionCarry::default();
        Carry { setup: None, session: known.then(|| self.session.clone()), ..self.carry.clone() }
    }

    fn proves_untaken(&self) -> bool {
        self.opening.proves_untaken()
    }
}
