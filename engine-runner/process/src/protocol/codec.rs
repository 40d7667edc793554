//! How requests, answers and notices look as bytes.

use super::{
    EngineState, FromKeeper, Notice, OpState, ProtocolError, RawMessage, Refusal, Request, Response,
    SpoolEnd, StatusReport,
};
use crate::frame::{ExitStatus, StorageFault};
use crate::isolation::IsolationLevel;
use crate::wire::{Put, Take, WireError, codes};

fn frame(kind: u8, request_id: u64, body: impl FnOnce(&mut Put)) -> Vec<u8> {
    let mut put = Put::default();
    put.u32(0).u8(kind).u64(request_id);
    body(&mut put);
    let length = u32::try_from(put.0.len() - 4).unwrap_or(u32::MAX);
    put.0[..4].copy_from_slice(&length.to_le_bytes());
    put.0
}

impl Request {
    /// The request as bytes.
    #[must_use]
    pub fn encode(&self, request_id: u64) -> Vec<u8> {
        match self {
            Self::Hello { version, owner } => frame(1, request_id, |put| {
                put.u16(*version).str(owner);
            }),
            Self::Status => frame(2, request_id, |_| {}),
            Self::Deliver { op_id, bytes } => frame(3, request_id, |put| {
                put.str(op_id).bytes(bytes);
            }),
            Self::QueryOp { op_id } => frame(4, request_id, |put| {
                put.str(op_id);
            }),
            Self::BeginTurn { turn_id } => frame(5, request_id, |put| {
                put.str(turn_id);
            }),
            Self::EndTurn { turn_id } => frame(6, request_id, |put| {
                put.str(turn_id);
            }),
            Self::Sync => frame(7, request_id, |_| {}),
            Self::Signal { signal } => frame(8, request_id, |put| {
                put.i32(*signal);
            }),
            Self::KillAll => frame(9, request_id, |_| {}),
            Self::Release { settle, term } => frame(10, request_id, |put| {
                put.duration(*settle).duration(*term);
            }),
            Self::Prune { keep_from } => frame(11, request_id, |put| {
                put.u32(*keep_from);
            }),
            Self::CloseInput => frame(12, request_id, |_| {}),
        }
    }

    /// Reads a request; none when its kind is unknown (it is to be refused as unsupported).
    ///
    /// # Errors
    /// [`ProtocolError::Body`] when the body does not fit the kind.
    pub fn decode(raw: &RawMessage) -> Result<Option<Self>, ProtocolError> {
        let mut take = Take::new(&raw.body);
        let request = match raw.kind {
            1 => Self::Hello { version: take.u16("version")?, owner: take.string("owner")? },
            2 => Self::Status,
            3 => Self::Deliver { op_id: take.string("op id")?, bytes: take.bytes("bytes")?.to_vec() },
            4 => Self::QueryOp { op_id: take.string("op id")? },
            5 => Self::BeginTurn { turn_id: take.string("turn id")? },
            6 => Self::EndTurn { turn_id: take.string("turn id")? },
            7 => Self::Sync,
            8 => Self::Signal { signal: take.i32("signal")? },
            9 => Self::KillAll,
            10 => Self::Release { settle: take.duration("settle")?, term: take.duration("term")? },
            11 => Self::Prune { keep_from: take.u32("segment")? },
            12 => Self::CloseInput,
            _ => return Ok(None),
        };
        take.end()?;
        Ok(Some(request))
    }
}

impl FromKeeper {
    /// The message as bytes.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        match self {
            Self::Notice(Notice::Progress(end)) => frame(65, 0, |put| end.put(put)),
            Self::Notice(Notice::Superseded) => frame(66, 0, |_| {}),
            Self::Notice(Notice::Ending(end)) => frame(67, 0, |put| end.put(put)),
            Self::Response { request_id, response } => {
                frame(response.kind(), *request_id, |put| response.put(put))
            }
        }
    }

    /// Reads a message; none when it is a notice of an unknown kind.
    ///
    /// # Errors
    /// [`ProtocolError`] when the body does not fit, or for an answer of an unknown kind.
    pub fn decode(raw: &RawMessage) -> Result<Option<Self>, ProtocolError> {
        let mut take = Take::new(&raw.body);
        let message = match raw.kind {
            65 => Self::Notice(Notice::Progress(SpoolEnd::take(&mut take)?)),
            66 => Self::Notice(Notice::Superseded),
            67 => Self::Notice(Notice::Ending(SpoolEnd::take(&mut take)?)),
            kind if raw.request_id == 0 && kind > 64 => return Ok(None),
            kind => Self::Response { request_id: raw.request_id, response: Response::take(kind, &mut take)? },
        };
        take.end()?;
        Ok(Some(message))
    }
}

impl Response {
    fn kind(&self) -> u8 {
        match self {
            Self::Welcome { .. } => 33,
            Self::Status(_) => 34,
            Self::Delivered { .. } => 35,
            Self::Op { .. } => 36,
            Self::Turn { .. } => 37,
            Self::Done { .. } => 38,
            Self::Killed { .. } => 39,
            Self::Refused(_) => 40,
        }
    }

    fn put(&self, put: &mut Put) {
        match self {
            Self::Welcome { version, keeper_pid, status } => {
                put.u16(*version).i32(*keeper_pid);
                status.put(put);
            }
            Self::Status(status) => status.put(put),
            Self::Delivered { intent, state, duplicate } => {
                put.u64(*intent).u8(state.code()).bool(*duplicate);
            }
            Self::Op { known } => {
                put.option(*known, |put, (intent, state)| {
                    put.u64(intent).u8(state.code());
                });
            }
            Self::Turn { frame, segment } => {
                put.u64(*frame).u32(*segment);
            }
            Self::Done { number } => {
                put.u64(*number);
            }
            Self::Killed { frame, survivors } => {
                put.u64(*frame).u32(*survivors);
            }
            Self::Refused(refusal) => {
                put.u8(refusal.code());
            }
        }
    }

    fn take(kind: u8, take: &mut Take<'_>) -> Result<Self, ProtocolError> {
        Ok(match kind {
            33 => Self::Welcome {
                version: take.u16("version")?,
                keeper_pid: take.i32("pid")?,
                status: StatusReport::take(take)?,
            },
            34 => Self::Status(StatusReport::take(take)?),
            35 => Self::Delivered {
                intent: take.u64("intent")?,
                state: OpState::take(take)?,
                duplicate: take.bool("duplicate")?,
            },
            36 => Self::Op {
                known: take.option("known", |take| Ok((take.u64("intent")?, OpState::take(take)?)))?,
            },
            37 => Self::Turn { frame: take.u64("frame")?, segment: take.u32("segment")? },
            38 => Self::Done { number: take.u64("number")? },
            39 => Self::Killed { frame: take.u64("frame")?, survivors: take.u32("survivors")? },
            40 => Self::Refused(Refusal::take(take)?),
            kind => return Err(ProtocolError::Kind(kind)),
        })
    }
}

codes!(OpState, "op state", { Pending = 1, Written = 2, Failed = 3 });
codes!(Refusal, "refusal", {
    Unsupported = 1, Foreign = 2, Protocol = 3, Argument = 4, OpConflict = 5, Busy = 6, NotRunning = 7,
    InputClosed = 8, Storage = 9, UnknownTurn = 10,
});

impl SpoolEnd {
    fn put(self, put: &mut Put) {
        put.u32(self.segment).u64(self.offset).u64(self.frame);
    }

    fn take(take: &mut Take<'_>) -> Result<Self, WireError> {
        Ok(Self { segment: take.u32("segment")?, offset: take.u64("offset")?, frame: take.u64("frame")? })
    }
}

impl StatusReport {
    fn put(&self, put: &mut Put) {
        put.str(&self.spool_id);
        match self.engine {
            EngineState::Starting => {
                put.u8(1);
            }
            EngineState::Running => {
                put.u8(2);
            }
            EngineState::Exited(status) => {
                put.u8(3);
                status.put(put);
            }
            EngineState::Failed => {
                put.u8(4);
            }
        }
        put.i32(self.engine_pid).i32(self.init_pid).u8(self.isolation.code());
        put.option(self.turn_id.as_deref(), |put, turn_id| {
            put.str(turn_id);
        });
        self.position.put(put);
        put.u32(self.oldest_segment).u64(self.stdin_pending).bool(self.stdin_open).u64(self.ops);
        put.u32(self.unmasked_secrets);
        put.option(self.storage_fault, |put, fault| {
            let errno = match fault {
                StorageFault::Write(errno) => errno,
                StorageFault::Limit => -1,
            };
            put.i32(errno);
        });
        put.bool(self.ending);
    }

    fn take(take: &mut Take<'_>) -> Result<Self, WireError> {
        Ok(Self {
            spool_id: take.string("spool id")?,
            engine: match take.u8("engine state")? {
                1 => EngineState::Starting,
                2 => EngineState::Running,
                3 => EngineState::Exited(ExitStatus::take(take)?),
                4 => EngineState::Failed,
                _ => return Err(WireError::Invalid("engine state")),
            },
            engine_pid: take.i32("engine pid")?,
            init_pid: take.i32("init pid")?,
            isolation: IsolationLevel::take(take)?,
            turn_id: take.option("turn id", |take| take.string("turn id"))?,
            position: SpoolEnd::take(take)?,
            oldest_segment: take.u32("oldest segment")?,
            stdin_pending: take.u64("stdin pending")?,
            stdin_open: take.bool("stdin open")?,
            ops: take.u64("ops")?,
            unmasked_secrets: take.u32("unmasked secrets")?,
            storage_fault: take.option("storage fault", |take| {
                Ok(match take.i32("storage fault")? {
                    -1 => StorageFault::Limit,
                    errno => StorageFault::Write(errno),
                })
            })?,
            ending: take.bool("ending")?,
        })
    }
}
