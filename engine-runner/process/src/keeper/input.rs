//! What the engine is given on its standard input: each operation once, recorded before it is written.

use crate::frame::FrameBody;
use crate::mask::Masker;
use crate::plan::{DELIVER_MAX_BYTES, is_valid_op_id};
use crate::protocol::{OpState, Refusal};
use crate::spool::{Room, SpoolWriter};
use nix::errno::Errno;
use std::collections::{HashMap, VecDeque};
use std::os::fd::OwnedFd;

#[derive(Debug, Clone, Copy)]
struct Op {
    intent: u64,
    length: usize,
    crc: u32,
    state: OpState,
}

#[derive(Debug)]
struct Waiting {
    op_id: String,
    intent: u64,
    bytes: Vec<u8>,
    written: usize,
}

/// The input pipe, what waits for it, and the record of all operations. The record is this process's copy of what the
/// spool says: a keeper never outlives its spool's beginning.
#[derive(Debug, Default)]
pub(super) struct Input {
    fd: Option<OwnedFd>,
    queue: VecDeque<Waiting>,
    waiting_bytes: u64,
    waiting_max: u64,
    ops: HashMap<String, Op>,
    /// Closed once the queue is empty.
    closing: bool,
    /// The engine had an input once.
    opened: bool,
}

impl Input {
    pub(super) fn new(waiting_max: u64) -> Self {
        Self { waiting_max, ..Self::default() }
    }

    pub(super) fn open(&mut self, fd: OwnedFd) {
        self.fd = Some(fd);
        self.opened = true;
    }

    /// The pipe, while something waits for it.
    pub(super) fn wants(&self) -> Option<&OwnedFd> {
        self.fd.as_ref().filter(|_| !self.queue.is_empty())
    }

    pub(super) fn is_open(&self) -> bool {
        self.fd.is_some() && !self.closing
    }

    pub(super) fn waiting_bytes(&self) -> u64 {
        self.waiting_bytes
    }

    pub(super) fn ops(&self) -> u64 {
        self.ops.len() as u64
    }

    pub(super) fn query(&self, op_id: &str) -> Option<(u64, OpState)> {
        self.ops.get(op_id).map(|op| (op.intent, op.state))
    }

    /// Records an operation and queues its bytes. Answers the intent's frame, the state and whether it was known.
    pub(super) fn deliver(
        &mut self,
        op_id: String,
        bytes: Vec<u8>,
        masker: &Masker,
        spool: &mut SpoolWriter,
    ) -> Result<(u64, OpState, bool), Refusal> {
        if !is_valid_op_id(&op_id) || bytes.is_empty() || bytes.len() > DELIVER_MAX_BYTES {
            return Err(Refusal::Argument);
        }
        let crc = crc32fast::hash(&bytes);
        if let Some(op) = self.ops.get(&op_id) {
            return if op.crc == crc && op.length == bytes.len() {
                Ok((op.intent, op.state, true))
            } else {
                Err(Refusal::OpConflict)
            };
        }
        if !self.is_open() {
            return Err(if self.opened { Refusal::InputClosed } else { Refusal::NotRunning });
        }
        let length = bytes.len();
        if self.waiting_bytes + length as u64 > self.waiting_max {
            return Err(Refusal::Busy);
        }
        let shown = masker.mask(&bytes).unwrap_or_else(|| bytes.clone());
        let body = FrameBody::StdinIntent { op_id: op_id.clone(), length: length as u64, crc, shown };
        let intent = spool.append(body, Room::Ordinary).ok_or(Refusal::Storage)?;
        let op = Op { intent, length, crc, state: OpState::Pending };
        self.ops.insert(op_id.clone(), op);
        if spool.sync().is_err() {
            // The intent may be on disk or not. Nothing was written, and nothing ever will be under this id.
            self.fail(&op_id, intent, 0, Errno::EIO as i32, spool);
            return Err(Refusal::Storage);
        }
        #[cfg(feature = "failpoints")]
        crate::failpoint::pass("keeper::intent", &bytes);
        self.waiting_bytes += length as u64;
        self.queue.push_back(Waiting { op_id: op_id.clone(), intent, bytes, written: 0 });
        self.write(spool);
        let state = self.ops.get(&op_id).map_or(OpState::Pending, |op| op.state);
        Ok((intent, state, false))
    }

    /// Writes as much as the pipe takes now.
    pub(super) fn write(&mut self, spool: &mut SpoolWriter) {
        while let (Some(fd), Some(first)) = (&self.fd, self.queue.front_mut()) {
            match nix::unistd::write(fd, &first.bytes[first.written..]) {
                Ok(count) => {
                    first.written += count;
                    self.waiting_bytes = self.waiting_bytes.saturating_sub(count as u64);
                    if first.written < first.bytes.len() {
                        continue;
                    }
                    if let Some(done) = self.queue.pop_front() {
                        #[cfg(feature = "failpoints")]
                        crate::failpoint::pass("keeper::written", &done.bytes);
                        self.set_state(&done.op_id, OpState::Written);
                        spool.append(
                            FrameBody::StdinWritten { op_id: done.op_id, intent: done.intent },
                            Room::Mark,
                        );
                    }
                }
                Err(Errno::EAGAIN) => return,
                Err(Errno::EINTR) => {}
                // The engine closed its input (or the pipe broke): nothing more can go in.
                Err(errno) => return self.shut(errno as i32, spool),
            }
        }
        if self.closing && self.queue.is_empty() {
            self.shut(0, spool);
        }
    }

    /// Closes the input when all that waits is written.
    pub(super) fn close(&mut self, spool: &mut SpoolWriter) {
        self.closing = true;
        self.write(spool);
    }

    /// Closes the input now; what waits has failed with `errno`.
    pub(super) fn shut(&mut self, errno: i32, spool: &mut SpoolWriter) {
        let was_open = self.fd.take().is_some();
        while let Some(lost) = self.queue.pop_front() {
            self.fail(&lost.op_id, lost.intent, lost.written as u64, errno, spool);
        }
        self.waiting_bytes = 0;
        if was_open {
            spool.append(FrameBody::StdinClosed, Room::Mark);
        }
    }

    fn fail(&mut self, op_id: &str, intent: u64, written: u64, errno: i32, spool: &mut SpoolWriter) {
        self.set_state(op_id, OpState::Failed);
        spool.append(FrameBody::StdinFailed { op_id: op_id.to_owned(), intent, written, errno }, Room::Mark);
    }

    fn set_state(&mut self, op_id: &str, state: OpState) {
        if let Some(op) = self.ops.get_mut(op_id) {
            op.state = state;
        }
    }
}
