//! The protocol between a runner and a keeper, as pure encoding and decoding.
//!
//! A message is `u32` length, `u8` kind, `u64` request id, body. The runner asks, the keeper answers every request once
//! under the request's id; answers may come in another order than the requests. What the keeper says unasked
//! ([`Notice`]) has request id 0. The first request must be [`Request::Hello`]. Output does not come over the link:
//! [`Notice::Progress`] says how far the spool's files have grown, and [`crate::SpoolReader`] reads them.

mod codec;

use crate::frame::{ExitStatus, StorageFault};
use crate::isolation::IsolationLevel;
use crate::plan::DELIVER_MAX_BYTES;
use crate::wire::{Take, WireError};
use std::time::Duration;

/// The newest protocol version this code speaks. It speaks all older ones.
pub const PROTOCOL_VERSION: u16 = 1;

/// The largest message, in bytes after the length.
pub const MESSAGE_MAX_BYTES: usize = DELIVER_MAX_BYTES + 4096;

/// What a runner asks of a keeper.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Request {
    /// Opens the link. Answered by [`Response::Welcome`], or refused and closed. An open link of the same owner is
    /// superseded.
    Hello {
        /// The newest version the runner speaks.
        version: u16,
        /// Whose keepers these are; must be the plan's owner.
        owner: String,
    },
    /// What is true now. Answered by [`Response::Status`].
    Status,
    /// Writes bytes to the engine's standard input, at most once per `op_id` over the keeper's whole life. Answered by
    /// [`Response::Delivered`] once the intent is on disk; the writing itself follows and is told by frames.
    Deliver {
        /// As [`crate::is_valid_op_id`] says.
        op_id: String,
        /// At most [`DELIVER_MAX_BYTES`]; a line brings its own newline.
        bytes: Vec<u8>,
    },
    /// What became of an operation. Answered by [`Response::Op`].
    QueryOp {
        /// The operation's id.
        op_id: String,
    },
    /// Begins a turn: a new segment, with [`crate::FrameBody::TurnBegin`]. The same turn again changes nothing; a turn
    /// still open is ended first. Answered by [`Response::Turn`].
    BeginTurn {
        /// The turn's id: letters, digits, `_`, `-`, no leading dash, at most 64.
        turn_id: String,
    },
    /// Ends the turn: its held-back stderr is written, then [`crate::FrameBody::TurnEnd`], then all is synced.
    /// Answered by [`Response::Turn`]; for a turn that is not open, by its last end (or [`Refusal::UnknownTurn`]).
    EndTurn {
        /// The turn's id.
        turn_id: String,
    },
    /// Closes the engine's standard input once all that was delivered is written. Answered at once by
    /// [`Response::Done`] with the last frame's number; the closing is told by [`crate::FrameBody::StdinClosed`].
    CloseInput,
    /// Puts all frames so far on disk. Answered by [`Response::Done`] with the last frame's number.
    Sync,
    /// Sends a signal to the engine process alone. Answered by [`Response::Done`] with the signal's frame.
    Signal {
        /// Its number, 1 to 64.
        signal: i32,
    },
    /// SIGKILL to everything the engine started, through whatever isolation there is: the ladder's last step. Answered
    /// by [`Response::Killed`] when all are gone or time is up.
    KillAll,
    /// Closes the engine in order: closes its standard input, waits `settle`, SIGTERM, waits `term`, then kills
    /// everything. Answered at once by [`Response::Done`]; the end itself is the keeper's death. A repeat may only
    /// make it sooner.
    Release {
        /// Time after end of input.
        settle: Duration,
        /// Time after SIGTERM.
        term: Duration,
    },
    /// Deletes the segments before this one (never the current). Answered by [`Response::Done`] with the oldest
    /// segment that is left.
    Prune {
        /// The first segment to keep.
        keep_from: u32,
    },
}

/// What a keeper answers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Response {
    /// The link is open.
    Welcome {
        /// The version that is spoken: the lower of the two.
        version: u16,
        /// The keeper's process id as it sees itself.
        keeper_pid: i32,
        /// State at this moment.
        status: StatusReport,
    },
    /// State at this moment.
    Status(StatusReport),
    /// The operation is recorded on disk.
    Delivered {
        /// Number of its intent frame.
        intent: u64,
        /// How far the writing is.
        state: OpState,
        /// It had been recorded before; nothing was written again.
        duplicate: bool,
    },
    /// What became of an operation.
    Op {
        /// Number of its intent frame and how far the writing is; none when it was never recorded.
        known: Option<(u64, OpState)>,
    },
    /// A turn's mark.
    Turn {
        /// Number of the mark's frame.
        frame: u64,
        /// Segment of the mark's frame.
        segment: u32,
    },
    /// Done; the meaning of the number is told at the request.
    Done {
        /// See the request.
        number: u64,
    },
    /// Everything was killed, or time was up.
    Killed {
        /// Number of the frame.
        frame: u64,
        /// Processes still there.
        survivors: u32,
    },
    /// The request was refused and changed nothing.
    Refused(Refusal),
}

/// Why a keeper refuses a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The runner speaks only newer versions, or the request is unknown to this keeper.
    #[error("not supported by this keeper")]
    Unsupported,
    /// The link's owner is not the keeper's.
    #[error("the keeper belongs to another runner")]
    Foreign,
    /// The request came before `Hello`, twice, or is malformed.
    #[error("request breaks the protocol")]
    Protocol,
    /// An id is malformed or a number out of range.
    #[error("an argument is out of range")]
    Argument,
    /// This operation id was used with other bytes.
    #[error("operation id was used with other bytes")]
    OpConflict,
    /// Too much is waiting to be written to the engine.
    #[error("too much input is waiting for the engine")]
    Busy,
    /// The engine is not running (not yet, or no more).
    #[error("the engine is not running")]
    NotRunning,
    /// The engine's standard input is closed.
    #[error("the engine's input is closed")]
    InputClosed,
    /// The spool takes no more.
    #[error("the spool takes no more")]
    Storage,
    /// The turn is not known.
    #[error("the turn is not known here")]
    UnknownTurn,
}

/// How far an operation's bytes are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OpState {
    /// Recorded; not all bytes are in the engine's pipe yet.
    Pending,
    /// All bytes are in the engine's pipe.
    Written,
    /// Not all bytes could be written.
    Failed,
}

/// The engine process as the keeper knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EngineState {
    /// Not started yet.
    Starting,
    /// Running.
    Running,
    /// Ended; the keeper reads what is left in the pipes and then ends too.
    Exited(ExitStatus),
    /// It could not be started.
    Failed,
}

/// What is true in a keeper now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StatusReport {
    /// The spool's id.
    pub spool_id: String,
    /// The engine process.
    pub engine: EngineState,
    /// The engine's process id as it sees itself; 0 before it runs.
    pub engine_pid: i32,
    /// The init's process id as the keeper sees it; 0 before it runs.
    pub init_pid: i32,
    /// Isolation reached.
    pub isolation: IsolationLevel,
    /// The open turn.
    pub turn_id: Option<String>,
    /// Where the spool ends.
    pub position: SpoolEnd,
    /// Oldest segment that is not pruned.
    pub oldest_segment: u32,
    /// Bytes accepted for standard input and not yet written.
    pub stdin_pending: u64,
    /// The engine's standard input is open.
    pub stdin_open: bool,
    /// Operations recorded.
    pub ops: u64,
    /// Secrets too short to be masked.
    pub unmasked_secrets: u32,
    /// Why the spool takes no more, when it does not.
    pub storage_fault: Option<StorageFault>,
    /// An end has begun (release, TTL, or the engine's exit).
    pub ending: bool,
}

impl StatusReport {
    /// A report of a keeper that has not started its engine.
    pub(crate) fn starting(spool_id: &str) -> Self {
        Self {
            spool_id: spool_id.to_owned(),
            engine: EngineState::Starting,
            engine_pid: 0,
            init_pid: 0,
            isolation: IsolationLevel::None,
            turn_id: None,
            position: SpoolEnd::default(),
            oldest_segment: 1,
            stdin_pending: 0,
            stdin_open: false,
            ops: 0,
            unmasked_secrets: 0,
            storage_fault: None,
            ending: false,
        }
    }

    /// How the engine ended, when it did.
    #[must_use]
    pub fn exit(&self) -> Option<ExitStatus> {
        match self.engine {
            EngineState::Exited(status) => Some(status),
            _ => None,
        }
    }
}

/// How far a spool's files go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SpoolEnd {
    /// Number of the last segment.
    pub segment: u32,
    /// Its length in bytes.
    pub offset: u64,
    /// Number of the last frame, 0 when there is none.
    pub frame: u64,
}

/// What a keeper says unasked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Notice {
    /// The spool grew. Several growths may come as one notice.
    Progress(SpoolEnd),
    /// A newer link took over; this one is closed.
    Superseded,
    /// The last frame is written; the keeper ends.
    Ending(SpoolEnd),
}

/// One message from a keeper.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FromKeeper {
    /// An answer.
    Response {
        /// The request's id.
        request_id: u64,
        /// The answer.
        response: Response,
    },
    /// Something unasked.
    Notice(Notice),
}

/// Why bytes are no message of the protocol.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ProtocolError {
    /// A length over [`MESSAGE_MAX_BYTES`] (or under a header's).
    #[error("message of {0} bytes")]
    Length(usize),
    /// A body that does not fit its kind.
    #[error("malformed message")]
    Body(#[source] WireError),
    /// A kind that this side does not know.
    #[error("unknown message kind {0}")]
    Kind(u8),
}

impl From<WireError> for ProtocolError {
    fn from(source: WireError) -> Self {
        Self::Body(source)
    }
}

/// A message as its frame gives it: kind, request id, body.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RawMessage {
    /// The kind's number.
    pub kind: u8,
    /// The request's id; 0 in a notice.
    pub request_id: u64,
    /// The body.
    pub body: Vec<u8>,
}

/// Splits a byte stream into messages, however it is cut. Memory is bounded by the largest message.
#[derive(Debug, Default)]
pub struct Decoder {
    buffer: Vec<u8>,
    start: usize,
}

impl Decoder {
    /// A decoder at the beginning of a stream.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes the next bytes of the stream.
    pub fn feed(&mut self, bytes: &[u8]) {
        if self.start == self.buffer.len() {
            self.buffer.clear();
            self.start = 0;
        } else if self.start > 64 * 1024 {
            self.buffer.drain(..self.start);
            self.start = 0;
        }
        self.buffer.extend_from_slice(bytes);
    }

    /// The next whole message, none while it is incomplete.
    ///
    /// # Errors
    /// [`ProtocolError::Length`]: the stream is useless from here on.
    pub fn next_raw(&mut self) -> Result<Option<RawMessage>, ProtocolError> {
        let rest = &self.buffer[self.start..];
        let Some((head, rest)) = rest.split_first_chunk::<4>() else { return Ok(None) };
        let length = usize::try_from(u32::from_le_bytes(*head)).unwrap_or(usize::MAX);
        if !(9..=MESSAGE_MAX_BYTES).contains(&length) {
            return Err(ProtocolError::Length(length));
        }
        if rest.len() < length {
            return Ok(None);
        }
        let mut take = Take::new(&rest[..length]);
        let kind = take.u8("kind")?;
        let request_id = take.u64("request id")?;
        let body = take.rest().to_vec();
        self.start += 4 + length;
        if self.start == self.buffer.len() && self.buffer.capacity() > 256 * 1024 {
            // A large message must not keep its memory for the rest of a keeper's life.
            *self = Self::default();
        }
        Ok(Some(RawMessage { kind, request_id, body }))
    }

    /// The next message from a keeper, for the runner's side. Notices of an unknown kind are passed over.
    ///
    /// # Errors
    /// [`ProtocolError`]: the stream is useless from here on.
    pub fn next_from_keeper(&mut self) -> Result<Option<FromKeeper>, ProtocolError> {
        while let Some(raw) = self.next_raw()? {
            if let Some(message) = FromKeeper::decode(&raw)? {
                return Ok(Some(message));
            }
        }
        Ok(None)
    }
}
