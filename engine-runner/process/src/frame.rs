//! The frames of a spool: what an engine process printed, was given, and how it began and ended.
//!
//! A frame is one record ([`crate::record`]) of a segment. Its number is unique in the spool, starts at 1 and has no
//! gaps; its time is CLOCK_BOOTTIME of the boot named in the segment's header. An unknown kind (from a newer keeper)
//! is [`FrameBody::Unknown`], never an error.

use crate::isolation::IsolationLevel;
use crate::wire::{Put, Take, WireError, codes};

/// Version of frames and segment headers that this code writes. It reads this and all older ones.
pub const SPOOL_VERSION: u16 = 1;

/// One numbered entry of a spool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame {
    /// Number in the spool, from 1.
    pub number: u64,
    /// CLOCK_BOOTTIME at which the keeper wrote it, nanoseconds.
    pub boottime_ns: u64,
    /// What it tells.
    pub body: FrameBody,
}

/// What a frame tells.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FrameBody {
    /// One line of standard output, without its `\n` (a `\r` before it is kept).
    StdoutLine {
        /// The line, with known secrets masked. May be empty and need not be UTF-8.
        bytes: Vec<u8>,
        /// At least one secret was masked: never build engine input from this frame.
        masked: bool,
        /// False for a last line that came without a newline.
        newline: bool,
    },
    /// A line went over the limit and goes on. Written at once; its end comes as [`FrameBody::StdoutOverlongEnd`].
    StdoutOverlong {
        /// The beginning of the line.
        head: Vec<u8>,
        /// At least one secret was masked in the head.
        masked: bool,
        /// The limit that was crossed, in bytes.
        limit: u64,
    },
    /// The end of an over-long line.
    StdoutOverlongEnd {
        /// Its whole length in bytes, without its newline.
        length: u64,
        /// False when output ended before the line did.
        newline: bool,
    },
    /// Standard output ended (all writers closed it, or draining was given up).
    StdoutEof {
        /// False when a process still held the pipe as the drain timeout passed.
        clean: bool,
    },
    /// A piece of standard error.
    Stderr {
        /// The piece, with known secrets masked. It may begin and end anywhere, also inside a character.
        bytes: Vec<u8>,
        /// At least one secret was masked.
        masked: bool,
    },
    /// Bytes of standard error left out between the turn's first and last ones.
    StderrOmitted {
        /// How many.
        bytes: u64,
    },
    /// Bytes are about to be written to the engine's standard input. Synced to disk before the first is written.
    StdinIntent {
        /// The operation's id.
        op_id: String,
        /// Length of the original bytes.
        length: u64,
        /// CRC-32 of the original bytes.
        crc: u32,
        /// The bytes with known secrets masked: for people, never to be sent again.
        shown: Vec<u8>,
    },
    /// All bytes of an intent are in the engine's pipe.
    StdinWritten {
        /// The operation's id.
        op_id: String,
        /// Number of its intent.
        intent: u64,
    },
    /// An intent could not be written whole.
    StdinFailed {
        /// The operation's id.
        op_id: String,
        /// Number of its intent.
        intent: u64,
        /// Bytes that did go into the pipe.
        written: u64,
        /// The system's error number; 0 when the engine ended first.
        errno: i32,
    },
    /// The engine's standard input was closed by the keeper.
    StdinClosed,
    /// A signal was sent.
    Signal {
        /// Its number.
        signal: i32,
        /// To whom.
        scope: SignalScope,
        /// Why.
        cause: Cause,
    },
    /// Everything the engine started was killed, as far as the isolation can see.
    Killed {
        /// Why.
        cause: Cause,
        /// Processes that were killed one by one (0 when a namespace was ended as a whole).
        killed: u32,
        /// Processes that were still there when time was up.
        survivors: u32,
    },
    /// The engine is about to be started. Synced before anything is: without this frame no engine ever ran.
    Spawn {
        /// The program, for people.
        program: Vec<u8>,
    },
    /// The engine was exec'd.
    Started {
        /// Its process id as it sees itself (inside its namespace, where there is one).
        engine_pid: i32,
        /// The init's process id as the keeper sees it.
        init_pid: i32,
        /// Isolation reached.
        isolation: IsolationLevel,
        /// Why it is not more; empty when it is the most.
        detail: String,
    },
    /// The engine was not started.
    SpawnFailed {
        /// At which step.
        stage: SpawnStage,
        /// The system's error number, 0 when there is none.
        errno: i32,
        /// What happened, for people.
        message: String,
    },
    /// The engine ended. Synced.
    Exit(ExitStatus),
    /// A turn began; its segment begins with this frame.
    TurnBegin {
        /// The turn's id.
        turn_id: String,
    },
    /// A turn ended. Synced.
    TurnEnd {
        /// The turn's id.
        turn_id: String,
    },
    /// The spool cannot take more. What the engine prints from here on is read and dropped.
    StorageFault(StorageFault),
    /// The last frame: the keeper ends.
    Closed {
        /// Why it ended.
        cause: Cause,
        /// Frames dropped after a [`FrameBody::StorageFault`].
        dropped_frames: u64,
        /// Bytes dropped with them.
        dropped_bytes: u64,
    },
    /// A kind this version does not know.
    Unknown {
        /// The kind's number.
        kind: u8,
    },
}

/// To whom a signal went.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SignalScope {
    /// The engine process alone.
    Engine,
    /// Everything the engine started.
    Everything,
}

/// Why the keeper did something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cause {
    /// A runner asked for it.
    Requested,
    /// A step of a release that a runner asked for.
    Release,
    /// No runner for the idle time.
    IdleTtl,
    /// No runner for the longest time within a turn.
    TurnTtl,
    /// The engine ended, and what it left is cleared away.
    EngineExit,
    /// The keeper itself was asked to end by SIGTERM.
    Terminated,
    /// The engine could not be started.
    SpawnFailed,
}

/// How far a failed spawn came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SpawnStage {
    /// Pipes and descriptors.
    Prepare,
    /// The isolation that was required was not reached.
    Isolation,
    /// The init could not be started or did not answer.
    Init,
    /// The working directory could not be entered.
    Cwd,
    /// The program could not be exec'd.
    Exec,
}

/// How an engine process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExitStatus {
    /// By itself, with this code.
    Code(i32),
    /// By this signal.
    Signal(i32),
    /// The init ended before it could tell.
    Unknown,
}

/// Why a spool takes no more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StorageFault {
    /// The system refused a write, with this error number (28 is a full disk).
    Write(i32),
    /// The limit on unpruned bytes was reached.
    Limit,
}

codes!(SignalScope, "signal scope", { Engine = 1, Everything = 2 });
codes!(Cause, "cause", {
    Requested = 1, Release = 2, IdleTtl = 3, TurnTtl = 4, EngineExit = 5, Terminated = 6, SpawnFailed = 7,
});
codes!(SpawnStage, "spawn stage", { Prepare = 1, Isolation = 2, Init = 3, Cwd = 4, Exec = 5 });

impl ExitStatus {
    pub(crate) fn put(self, put: &mut Put) {
        match self {
            Self::Code(code) => put.u8(1).i32(code),
            Self::Signal(signal) => put.u8(2).i32(signal),
            Self::Unknown => put.u8(3).i32(0),
        };
    }

    pub(crate) fn take(take: &mut Take<'_>) -> Result<Self, WireError> {
        let kind = take.u8("exit kind")?;
        let value = take.i32("exit value")?;
        match kind {
            1 => Ok(Self::Code(value)),
            2 => Ok(Self::Signal(value)),
            3 => Ok(Self::Unknown),
            _ => Err(WireError::Invalid("exit kind")),
        }
    }
}

impl Frame {
    /// Appends the frame's encoding (a record's payload) to `out`.
    pub fn encode_into(&self, out: &mut Vec<u8>) {
        let mut put = Put(std::mem::take(out));
        put.u8(self.body.kind()).u64(self.number).u64(self.boottime_ns);
        self.body.put(&mut put);
        *out = put.0;
    }

    /// Reads a record's payload.
    ///
    /// # Errors
    /// [`WireError`] when the payload of a known kind is not what that kind holds.
    pub fn decode(payload: &[u8]) -> Result<Self, WireError> {
        let mut take = Take::new(payload);
        let kind = take.u8("frame kind")?;
        let number = take.u64("frame number")?;
        let boottime_ns = take.u64("frame time")?;
        let body = FrameBody::take(kind, &mut take)?;
        take.end()?;
        Ok(Self { number, boottime_ns, body })
    }
}

impl FrameBody {
    fn kind(&self) -> u8 {
        match self {
            Self::StdoutLine { .. } => 1,
            Self::StdoutOverlong { .. } => 2,
            Self::StdoutOverlongEnd { .. } => 3,
            Self::StdoutEof { .. } => 4,
            Self::Stderr { .. } => 5,
            Self::StderrOmitted { .. } => 6,
            Self::StdinIntent { .. } => 7,
            Self::StdinWritten { .. } => 8,
            Self::StdinFailed { .. } => 9,
            Self::StdinClosed => 10,
            Self::Signal { .. } => 11,
            Self::Killed { .. } => 12,
            Self::Spawn { .. } => 13,
            Self::Started { .. } => 14,
            Self::SpawnFailed { .. } => 15,
            Self::Exit(_) => 16,
            Self::TurnBegin { .. } => 17,
            Self::TurnEnd { .. } => 18,
            Self::StorageFault(_) => 19,
            Self::Closed { .. } => 20,
            Self::Unknown { kind } => *kind,
        }
    }

    fn put(&self, put: &mut Put) {
        match self {
            Self::StdoutLine { bytes, masked, newline } => {
                put.bool(*masked).bool(*newline).0.extend_from_slice(bytes);
            }
            Self::StdoutOverlong { head, masked, limit } => {
                put.bool(*masked).u64(*limit).0.extend_from_slice(head);
            }
            Self::StdoutOverlongEnd { length, newline } => {
                put.u64(*length).bool(*newline);
            }
            Self::StdoutEof { clean } => {
                put.bool(*clean);
            }
            Self::Stderr { bytes, masked } => {
                put.bool(*masked).0.extend_from_slice(bytes);
            }
            Self::StderrOmitted { bytes } => {
                put.u64(*bytes);
            }
            Self::StdinIntent { op_id, length, crc, shown } => {
                put.str(op_id).u64(*length).u32(*crc).0.extend_from_slice(shown);
            }
            Self::StdinWritten { op_id, intent } => {
                put.str(op_id).u64(*intent);
            }
            Self::StdinFailed { op_id, intent, written, errno } => {
                put.str(op_id).u64(*intent).u64(*written).i32(*errno);
            }
            Self::StdinClosed | Self::Unknown { .. } => {}
            Self::Signal { signal, scope, cause } => {
                put.i32(*signal).u8(scope.code()).u8(cause.code());
            }
            Self::Killed { cause, killed, survivors } => {
                put.u8(cause.code()).u32(*killed).u32(*survivors);
            }
            Self::Spawn { program } => {
                put.bytes(program);
            }
            Self::Started { engine_pid, init_pid, isolation, detail } => {
                put.i32(*engine_pid).i32(*init_pid).u8(isolation.code()).str(detail);
            }
            Self::SpawnFailed { stage, errno, message } => {
                put.u8(stage.code()).i32(*errno).str(message);
            }
            Self::Exit(status) => status.put(put),
            Self::TurnBegin { turn_id } | Self::TurnEnd { turn_id } => {
                put.str(turn_id);
            }
            Self::StorageFault(StorageFault::Write(errno)) => {
                put.u8(1).i32(*errno);
            }
            Self::StorageFault(StorageFault::Limit) => {
                put.u8(2).i32(0);
            }
            Self::Closed { cause, dropped_frames, dropped_bytes } => {
                put.u8(cause.code()).u64(*dropped_frames).u64(*dropped_bytes);
            }
        }
    }

    fn take(kind: u8, take: &mut Take<'_>) -> Result<Self, WireError> {
        Ok(match kind {
            1 => Self::StdoutLine {
                masked: take.bool("masked")?,
                newline: take.bool("newline")?,
                bytes: take.rest().to_vec(),
            },
            2 => Self::StdoutOverlong {
                masked: take.bool("masked")?,
                limit: take.u64("limit")?,
                head: take.rest().to_vec(),
            },
            3 => Self::StdoutOverlongEnd { length: take.u64("length")?, newline: take.bool("newline")? },
            4 => Self::StdoutEof { clean: take.bool("clean")? },
            5 => Self::Stderr { masked: take.bool("masked")?, bytes: take.rest().to_vec() },
            6 => Self::StderrOmitted { bytes: take.u64("bytes")? },
            7 => Self::StdinIntent {
                op_id: take.string("op id")?,
                length: take.u64("length")?,
                crc: take.u32("crc")?,
                shown: take.rest().to_vec(),
            },
            8 => Self::StdinWritten { op_id: take.string("op id")?, intent: take.u64("intent")? },
            9 => Self::StdinFailed {
                op_id: take.string("op id")?,
                intent: take.u64("intent")?,
                written: take.u64("written")?,
                errno: take.i32("errno")?,
            },
            10 => Self::StdinClosed,
            11 => Self::Signal {
                signal: take.i32("signal")?,
                scope: SignalScope::take(take)?,
                cause: Cause::take(take)?,
            },
            12 => Self::Killed {
                cause: Cause::take(take)?,
                killed: take.u32("killed")?,
                survivors: take.u32("survivors")?,
            },
            13 => Self::Spawn { program: take.bytes("program")?.to_vec() },
            14 => Self::Started {
                engine_pid: take.i32("engine pid")?,
                init_pid: take.i32("init pid")?,
                isolation: IsolationLevel::take(take)?,
                detail: take.string("detail")?,
            },
            15 => Self::SpawnFailed {
                stage: SpawnStage::take(take)?,
                errno: take.i32("errno")?,
                message: take.string("message")?,
            },
            16 => Self::Exit(ExitStatus::take(take)?),
            17 => Self::TurnBegin { turn_id: take.string("turn id")? },
            18 => Self::TurnEnd { turn_id: take.string("turn id")? },
            19 => {
                let fault = take.u8("storage fault")?;
                let errno = take.i32("errno")?;
                match fault {
                    1 => Self::StorageFault(StorageFault::Write(errno)),
                    2 => Self::StorageFault(StorageFault::Limit),
                    _ => return Err(WireError::Invalid("storage fault")),
                }
            }
            20 => Self::Closed {
                cause: Cause::take(take)?,
                dropped_frames: take.u64("dropped frames")?,
                dropped_bytes: take.u64("dropped bytes")?,
            },
            kind => {
                take.rest();
                Self::Unknown { kind }
            }
        })
    }
}
