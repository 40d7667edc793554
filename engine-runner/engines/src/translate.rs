//! The reading side of an adapter: frames in, outputs out, and the lines that go back.
//!
//! # How a turn actor uses a translator
//!
//! A translator belongs to one turn in one engine process (a turn that is stopped and resumed has several,
//! one after the other). Its state comes from [`TranslatorOpen`] and the frames alone: feeding it the same
//! frames again gives the same outputs, so after a restart the runner makes it again from what TURN_OPEN
//! holds and feeds it the frames of the turn's segment, publishing only what the journal lacks.
//!
//! 1. Build the launch plan, open the spool, start the keeper. Make the translator with
//!    [`crate::Adapter::translator`]; store the [`TranslatorOpen`] (it is serialisable) in TURN_OPEN.
//! 2. For a fresh process put the launch plan's `setup` into [`Carry::setup`] before the translator is made, and
//!    write every line of [`Translator::opening`] through the keeper, under its op id. Some engines are opened in
//!    several steps: the later lines come as [`Output::Reply`].
//! 3. Feed each frame of the turn's segment, in order, to [`Translator::feed`], and act on the outputs:
//!    * [`Output::Opened`]: StartOrResume answers now; from here on its `native` is the session's (some engines
//!      choose the id themselves). [`Output::OpenFailed`]: it answers UNUSABLE or a
//!      status, or tries once more as `retry_as` says. No `TurnEnded` follows an `OpenFailed`. The process
//!      may still be there: see it out before another is started on the session.
//!    * [`Output::Event`]: number it (spool, frame, ordinal), journal it, publish it.
//!    * [`Output::Partial`], [`Output::PartialReset`]: pass them on live; never journal them.
//!    * [`Output::Accepted`]: journal `phase{accepted}` with the message id of that delivery.
//!    * [`Output::Reply`]: write it through the keeper under its op id (a repeat is never written twice).
//!    * [`Output::Committed`]: the native session is now known to be resumable: record that.
//!    * [`Output::DeliveryEnded`]: for steering.
//!    * [`Output::MustStop`]: begin the ladder at SIGTERM.
//!    * [`Output::Settling`]: start the settle timer, and start it anew at each frame that counts as activity;
//!      when it runs out call [`Translator::settle`]. Nearly every turn settles for a moment, so it is no event.
//!    * [`Output::TurnEnded`]: exactly once. The engine is idle or gone. The runner writes `terminal`, with
//!      its own outcome in place when it had stored a cancel or hit a timer: the translator sees frames,
//!      not intentions. A `Failed` with `accepted` false and reason SESSION_UNUSABLE is not terminal: the
//!      turn may go on in a replacement.
//!    * [`Output::SessionNotice`]: output of no turn; log it, show it at the session.
//! 4. To send, write [`Translator::deliver`] through the keeper. The op id is the delivery id; the intent
//!    frame is what tells the translator that a delivery exists.
//! 5. To cancel, write [`Translator::interrupt`]; then the ladder. Both ways a `TurnEnded` comes: after the
//!    engine's own end of the turn, or after the exit frame (feed an `Exit` without code and signal when the
//!    keeper died and none was written).
//! 6. After `TurnEnded` keep feeding the same translator until the next turn opens. Then take
//!    [`Translator::carry`] into the next turn's [`TranslatorOpen`] with `opening` unset. Offer a warm process a turn
//!    only while [`Standing::quiescent`] is true.
//!
//! Idle: restart the timer at each frame for which [`crate::Adapter::counts_as_activity`] is true; pause it while
//! [`Standing::pending_permissions`] is not empty. [`Standing::waiting_for`] is what the warning can say.

use std::fmt::Debug;

use serde::{Deserialize, Serialize};

use crate::{
    event::{Answer, Event, ItemKey, Notice, TurnOutcome, Usage},
    failure::Failure,
    frame::Frame,
    plan::{NativeRef, OpenMode},
};

/// All a translator depends on besides the frames.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TranslatorOpen {
    /// The spool's id; permission request ids are made of it.
    pub spool_id: String,
    /// The native session asked for.
    pub native: NativeRef,
    /// How the process was opened, when this turn spawned it; unset for a turn in a warm process.
    pub opening: Option<OpenMode>,
    /// What earlier turns in the same process, and earlier processes of the session, left behind.
    pub carry: Carry,
    /// The turn; unset to read an idle process that has none.
    pub turn_id: Option<String>,
}

/// What a session carries from one turn to the next.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Carry {
    /// A turn of this session has ended by the engine's own account, or the engine said otherwise that it wrote the
    /// session, so that its files are known to be there. Belongs to the session: keep it beyond the process.
    pub committed: bool,
    /// The engine's version, as it said at the opening.
    #[serde(default)]
    pub engine_version: Option<String>,
    /// The engine said that it could not write all of the session's file. While the process lives nothing is
    /// lost; once it is gone a resume would silently lack rows, so the session is unusable (context_lost).
    #[serde(default)]
    pub writes_lost: bool,
    /// The native id as the engine last said it, when it differs from the one asked for.
    #[serde(default)]
    pub changed_native_id: Option<String>,
    /// What the launch plan says a fresh process must be told over its own protocol
    /// ([`LaunchPlan::setup`](crate::LaunchPlan::setup)). Set it for a turn that spawns the process; a
    /// translator never carries it on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub setup: Option<serde_json::Value>,
    /// What an engine that names its sessions itself said of this one. Belongs to the session: keep it beyond the
    /// process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session: Option<SessionCarry>,
}

/// What an engine that names its sessions and counts over a whole session leaves for the next turn.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct SessionCarry {
    /// The native session, as the opening proved it.
    pub native: Option<NativeRef>,
    /// The model it runs on.
    pub model: Option<String>,
    /// Which agent prompt the session was last told, as a digest; unset when nobody knows.
    pub prompt: Option<String>,
    /// The newest turn in the engine's own list at the end of the last turn; unset before the first.
    pub last_turn: Option<String>,
    /// Names that this process was told not to expand in messages. Told anew to each process.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub switched_off: Vec<String>,
    /// The session's usage at the end of the last turn; unset when nobody knows.
    pub usage_total: Option<TokenTotals>,
}

/// Tokens counted over a session, as an engine counts them: cached input is part of the input.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[expect(missing_docs, reason = "the names say it all")]
pub struct TokenTotals {
    pub input: u64,
    pub cached_input: u64,
    pub cache_write: u64,
    pub output: u64,
}

/// Something an engine's output means.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "output", rename_all = "snake_case")]
pub enum Output {
    /// An event for the journal.
    Event {
        /// The event.
        event: Event,
    },
    /// Live text of an item that is not finished.
    Partial(Partial),
    /// The engine threw an item's text away.
    PartialReset {
        /// The item.
        item: ItemKey,
    },
    /// A line that the engine waits for.
    Reply(StdinLine),
    /// The engine proved that the session is open.
    Opened(Opened),
    /// The session could not be opened. Ends the translator.
    OpenFailed(OpenFailure),
    /// The engine proved that it took a delivery. Once per delivery.
    Accepted {
        /// The delivery.
        delivery_id: String,
    },
    /// The engine is done with a delivery. Once per delivery.
    DeliveryEnded {
        /// The delivery.
        delivery_id: String,
        /// How.
        end: DeliveryEnd,
    },
    /// The engine's own account shows that the session is written: it can be resumed from here on.
    Committed {
        /// The native session.
        native: NativeRef,
    },
    /// The engine said it was done but is not idle yet.
    Settling,
    /// The turn cannot go on and the engine would not stop by itself: start the ladder at SIGTERM. The end of
    /// the turn follows with the exit frame and carries this failure.
    MustStop {
        /// Why.
        failure: Box<Failure>,
    },
    /// The turn is over and the engine is idle or gone. Once.
    TurnEnded(Box<TurnEnd>),
    /// Output that belongs to no turn.
    SessionNotice {
        /// What it was.
        notice: Notice,
    },
}

/// A piece of live text.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Partial {
    /// The item.
    pub item: ItemKey,
    /// Whether it is the agent's reasoning rather than its answer.
    pub reasoning: bool,
    /// Where the text goes, in bytes from the item's beginning.
    pub offset: u64,
    /// The text.
    pub text: String,
    /// The tool call on whose behalf a sub-agent says it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent_call: Option<String>,
}

/// What the engine said when it opened the session.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Opened {
    /// The native session.
    pub native: NativeRef,
    /// The engine's version.
    pub engine_version: Option<String>,
    /// The models it offers.
    pub models: Vec<String>,
}

/// Why a session could not be opened.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpenFailure {
    /// The failure. SESSION_UNUSABLE only when a resume was asked and the text is about the session.
    pub failure: Failure,
    /// The same session may be opened this way instead, at most once per turn: nothing of it was ever written,
    /// or it exists already. When both ways were tried, the session is unusable. Unset when trying the other
    /// way is pointless.
    pub retry_as: Option<OpenMode>,
    /// Files to remove first, as names in the engine home that may end in `*`: indexes that the engine builds anew
    /// from the sessions' own files. Only while no other process bears that home; otherwise do not retry now.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub discard: Vec<String>,
}

/// How a delivery ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DeliveryEnd {
    /// The engine worked on it.
    Completed,
    /// The engine dropped or stopped it.
    Cancelled,
    /// The process ended before it was done.
    Lost,
}

/// The end of a turn, as far as the frames tell.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TurnEnd {
    /// How it ended. `Cancelled` when an interrupt of ours stopped it.
    pub outcome: TurnOutcome,
    /// What the agent answered, or the text so far.
    pub answer: Option<Answer>,
    /// What was used. The same as the last usage event.
    pub usage: Usage,
    /// Whether any delivery was accepted.
    pub accepted: bool,
    /// Whether a tool was called: then a retry may repeat its effects.
    pub tools_called: u32,
    /// Whether the process is gone.
    pub process_gone: bool,
    /// How many lines were not understood. They are in the spool.
    pub unknown_lines: u64,
}

/// Bytes for an engine's standard input, with the id under which they are written at most once.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StdinLine {
    /// The operation. Deliveries use their delivery id; control lines use ids the adapter makes. At most
    /// 100 characters of `[A-Za-z0-9_.-]`.
    pub op: String,
    /// The line with its line end; or two that are written together or not at all.
    pub bytes: Vec<u8>,
}

impl Debug for StdinLine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StdinLine")
            .field("op", &self.op)
            .field("bytes", &String::from_utf8_lossy(&self.bytes))
            .finish()
    }
}

/// A message for an engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Delivery<'a> {
    /// The id under which it is given: a hyphenated UUID, new for each turn.
    pub delivery_id: &'a str,
    /// What the session missed, or its seed; unset or empty when there is nothing.
    pub context: Option<&'a str>,
    /// What the user said, untouched.
    pub text: &'a str,
}

/// An answer to a permission request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PermissionReply<'a> {
    /// The tool may run with the input the engine has.
    Allow,
    /// It may not; the text goes to the agent.
    Deny {
        /// What to tell the agent; a default is used when empty.
        feedback: &'a str,
    },
}

/// Why a line could not be made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum LineError {
    /// Nobody asked, or it is answered or withdrawn already.
    #[error("no permission request with this id is pending")]
    NoSuchRequest,
    /// The delivery id is not a hyphenated UUID.
    #[error("the delivery id is not a hyphenated UUID")]
    BadDeliveryId,
    /// The engine cannot do it.
    #[error("the engine cannot do this")]
    Unsupported,
    /// Not at this moment: the session is not open, or a message was just given and the engine has not said which
    /// turn it made of it. Try again after the next frame.
    #[error("the engine cannot be told this at this moment")]
    NotNow,
}

/// What the turn is waiting for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WaitingFor {
    /// The engine to prove its opening.
    Opening,
    /// A message of ours.
    Message,
    /// The model.
    Model,
    /// The model, after a failed request.
    ModelRetry,
    /// A tool, by its name.
    Tool(String),
    /// Somebody's permission.
    Permission,
    /// The engine to become idle.
    Idle,
}

/// Where a turn stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Standing {
    /// The engine proved its opening.
    pub opened: bool,
    /// A delivery was accepted.
    pub accepted: bool,
    /// The engine works on nothing and owes no answer: it can be given a turn.
    pub quiescent: bool,
    /// The permission requests nobody has answered, oldest first.
    pub pending_permissions: Vec<String>,
    /// What a silence is about.
    pub waiting_for: WaitingFor,
    /// The turn has ended or the opening failed.
    pub ended: bool,
}

/// Reads one turn of one engine process. See the module's documentation.
pub trait Translator: Debug + Send {
    /// Takes the next frame. Never panics, whatever it holds.
    fn feed(&mut self, frame: Frame<'_>) -> Vec<Output>;

    /// The settle time after [`Output::Settling`] ran out: ends the turn with what is known and a notice.
    /// Nothing if the turn is not settling.
    fn settle(&mut self) -> Vec<Output>;

    /// What a fresh process must be told first. Nothing for a warm one.
    fn opening(&self) -> Vec<StdinLine>;

    /// The line that gives a message to the engine: a new turn, or a message for the running one.
    ///
    /// # Errors
    /// [`LineError::BadDeliveryId`], [`LineError::NotNow`].
    fn deliver(&self, delivery: &Delivery<'_>) -> Result<StdinLine, LineError>;

    /// The line that asks the engine to stop what it does, dropping queued messages. The same turn gives the
    /// same op id, so that a second cancel writes nothing.
    ///
    /// # Errors
    /// [`LineError::Unsupported`] when the engine has no interrupt, or there is no turn.
    fn interrupt(&self) -> Result<StdinLine, LineError>;

    /// The line that answers a permission request.
    ///
    /// # Errors
    /// [`LineError::NoSuchRequest`].
    fn answer_permission(&self, request_id: &str, reply: PermissionReply<'_>)
    -> Result<StdinLine, LineError>;

    /// Where the turn stands.
    fn standing(&self) -> Standing;

    /// The live text of every unfinished item, each as one partial from offset 0 (cut at
    /// [`crate::limit::ANSWER_LIMIT`]): what a new subscriber is shown.
    fn partials(&self) -> Vec<Partial>;

    /// What the next turn of the session needs.
    fn carry(&self) -> Carry;

    /// After [`Output::Opened`] of a resumed session: whether the engine's own list of turns shows exactly those
    /// known at the end of the last turn. Then a delivery of which nobody knows whether it arrived did not, and may
    /// be given again. False proves nothing.
    fn proves_untaken(&self) -> bool {
        false
    }
}
