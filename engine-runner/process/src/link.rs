//! The runner's end of a keeper's socket: a blocking client with a deadline on every request, and the parts for a
//! client of another kind.

use crate::clock::after;
use crate::protocol::{
    Decoder, FromKeeper, Notice, OpState, PROTOCOL_VERSION, ProtocolError, Refusal, Request, Response,
    StatusReport,
};
use crate::sys;
use std::collections::VecDeque;
use std::io::{self, Read as _, Write as _};
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

/// How long a request to a keeper may take: beyond it the keeper counts as stopped.
pub const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

/// Notices kept while an answer is awaited. Progress is cumulative, so older progress is dropped first.
const NOTICES_MAX: usize = 64;

/// Why a request to a keeper failed.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    /// No answer in time: the keeper is stopped (or the machine is very slow). It may still act on the request.
    #[error("keeper did not answer within {0:?}")]
    Timeout(Duration),
    /// No socket is there, or nobody listens: the keeper is not ready yet or dead.
    #[error("failed to reach the keeper's socket")]
    Unreachable(#[source] io::Error),
    /// The link ended. The keeper is dead or dying, or a newer link took over.
    #[error("link to the keeper is closed")]
    Closed,
    /// A newer link took over.
    #[error("link to the keeper was superseded by a newer one")]
    Superseded,
    /// The keeper refused the request.
    #[error("keeper refused the request")]
    Refused(#[source] Refusal),
    /// The keeper's messages make no sense.
    #[error("keeper broke the protocol")]
    Protocol(#[source] ProtocolError),
    /// An answer of another kind than the request's.
    #[error("keeper answered a request with something else")]
    UnexpectedAnswer,
    /// The socket belongs to another user.
    #[error("keeper's socket belongs to user {0}")]
    OtherUser(u32),
    /// The system refused.
    #[error("failed to use the keeper's socket")]
    Io(#[source] io::Error),
}

/// A blocking link. One request is under way at a time.
#[derive(Debug)]
pub struct Link {
    stream: UnixStream,
    decoder: Decoder,
    next_id: u64,
    timeout: Duration,
    notices: VecDeque<Notice>,
    keeper_pid: i32,
}

impl Link {
    /// Connects to the keeper of a spool's directory and opens the link as `owner`. Answers the link and the state at
    /// that moment. It supersedes an older link of the same owner.
    ///
    /// # Errors
    /// [`LinkError`]; [`LinkError::Timeout`] when the keeper is there but does not answer within `timeout`.
    pub fn connect(dir: &Path, owner: &str, timeout: Duration) -> Result<(Self, StatusReport), LinkError> {
        let stream = sys::connect_in(dir, timeout).map_err(|error| match error.kind() {
            io::ErrorKind::WouldBlock => LinkError::Timeout(timeout),
            _ => LinkError::Unreachable(error),
        })?;
        let peer = sys::peer(stream.as_fd()).map_err(LinkError::Io)?;
        if peer.uid != sys::euid() {
            return Err(LinkError::OtherUser(peer.uid));
        }
        let mut link = Self {
            stream,
            decoder: Decoder::new(),
            next_id: 1,
            timeout,
            notices: VecDeque::new(),
            keeper_pid: peer.pid,
        };
        let hello = Request::Hello { version: PROTOCOL_VERSION, owner: owner.to_owned() };
        match link.call(&hello)? {
            Response::Welcome { status, .. } => Ok((link, status)),
            _ => Err(LinkError::UnexpectedAnswer),
        }
    }

    /// The stream, a decoder that holds what was read and not used, and the next free request id: for an async client.
    /// The stream is in blocking mode with time limits; `set_nonblocking(true)` it before use. Notices that were kept
    /// are dropped: ask for the status once.
    #[must_use]
    pub fn into_parts(self) -> (UnixStream, Decoder, u64) {
        (self.stream, self.decoder, self.next_id)
    }

    /// The keeper's process id, as the system tells it for the socket; 0 when it lies outside this PID namespace.
    #[must_use]
    pub fn keeper_pid(&self) -> i32 {
        self.keeper_pid
    }

    /// Sends a request and waits for its answer. A refusal is an error.
    ///
    /// # Errors
    /// [`LinkError`]. After anything but [`LinkError::Refused`] the link is not to be used again.
    pub fn call(&mut self, request: &Request) -> Result<Response, LinkError> {
        self.call_within(request, self.timeout)
    }

    fn call_within(&mut self, request: &Request, timeout: Duration) -> Result<Response, LinkError> {
        let id = self.next_id;
        self.next_id += 1;
        let deadline = after(timeout);
        let bytes = request.encode(id);
        let mut rest = bytes.as_slice();
        while !rest.is_empty() {
            self.limit(deadline, timeout)?;
            match self.stream.write(rest) {
                Ok(0) => return Err(LinkError::Closed),
                Ok(count) => rest = &rest[count..],
                Err(error) => self.broken(error, timeout)?,
            }
        }
        loop {
            match self.receive(deadline, timeout)? {
                FromKeeper::Response { request_id, response } if request_id == id => {
                    return match response {
                        Response::Refused(refusal) => Err(LinkError::Refused(refusal)),
                        response => Ok(response),
                    };
                }
                // The answer to a request that timed out earlier.
                FromKeeper::Response { .. } => {}
                FromKeeper::Notice(Notice::Superseded) => return Err(LinkError::Superseded),
                FromKeeper::Notice(notice) => self.keep(notice),
            }
        }
    }

    fn keep(&mut self, notice: Notice) {
        if self.notices.len() >= NOTICES_MAX {
            self.notices.pop_front();
        }
        self.notices.push_back(notice);
    }

    /// The next notice, waiting for it at most `timeout`.
    ///
    /// # Errors
    /// [`LinkError::Timeout`] when none came; others as in [`Link::call`].
    pub fn next_notice(&mut self, timeout: Duration) -> Result<Notice, LinkError> {
        if let Some(notice) = self.notices.pop_front() {
            return Ok(notice);
        }
        let deadline = after(timeout);
        loop {
            if let FromKeeper::Notice(notice) = self.receive(deadline, timeout)? {
                return Ok(notice);
            }
        }
    }

    fn receive(&mut self, deadline: Instant, timeout: Duration) -> Result<FromKeeper, LinkError> {
        loop {
            if let Some(message) = self.decoder.next_from_keeper().map_err(LinkError::Protocol)? {
                return Ok(message);
            }
            self.limit(deadline, timeout)?;
            let mut buffer = [0; 16 * 1024];
            match self.stream.read(&mut buffer) {
                Ok(0) => return Err(LinkError::Closed),
                Ok(count) => self.decoder.feed(&buffer[..count]),
                Err(error) => self.broken(error, timeout)?,
            }
        }
    }

    fn limit(&self, deadline: Instant, timeout: Duration) -> Result<(), LinkError> {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(LinkError::Timeout(timeout));
        }
        self.stream.set_read_timeout(Some(left)).map_err(LinkError::Io)?;
        self.stream.set_write_timeout(Some(left)).map_err(LinkError::Io)
    }

    fn broken(&self, error: io::Error, timeout: Duration) -> Result<(), LinkError> {
        match error.kind() {
            io::ErrorKind::Interrupted => Ok(()),
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => Err(LinkError::Timeout(timeout)),
            io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => Err(LinkError::Closed),
            _ => Err(LinkError::Io(error)),
        }
    }

    /// [`Request::Status`].
    ///
    /// # Errors
    /// As [`Link::call`].
    pub fn status(&mut self) -> Result<StatusReport, LinkError> {
        match self.call(&Request::Status)? {
            Response::Status(status) => Ok(status),
            _ => Err(LinkError::UnexpectedAnswer),
        }
    }

    /// [`Request::Deliver`]; answers the intent's frame, how far the writing is, and whether it had been recorded
    /// before.
    ///
    /// # Errors
    /// As [`Link::call`].
    pub fn deliver(&mut self, op_id: &str, bytes: &[u8]) -> Result<(u64, OpState, bool), LinkError> {
        match self.call(&Request::Deliver { op_id: op_id.to_owned(), bytes: bytes.to_vec() })? {
            Response::Delivered { intent, state, duplicate } => Ok((intent, state, duplicate)),
            _ => Err(LinkError::UnexpectedAnswer),
        }
    }

    /// [`Request::QueryOp`].
    ///
    /// # Errors
    /// As [`Link::call`].
    pub fn query_op(&mut self, op_id: &str) -> Result<Option<(u64, OpState)>, LinkError> {
        match self.call(&Request::QueryOp { op_id: op_id.to_owned() })? {
            Response::Op { known } => Ok(known),
            _ => Err(LinkError::UnexpectedAnswer),
        }
    }

    /// [`Request::BeginTurn`]; answers the mark's segment and frame.
    ///
    /// # Errors
    /// As [`Link::call`].
    pub fn begin_turn(&mut self, turn_id: &str) -> Result<(u32, u64), LinkError> {
        match self.call(&Request::BeginTurn { turn_id: turn_id.to_owned() })? {
            Response::Turn { frame, segment } => Ok((segment, frame)),
            _ => Err(LinkError::UnexpectedAnswer),
        }
    }

    /// [`Request::EndTurn`]; answers the mark's segment and frame.
    ///
    /// # Errors
    /// As [`Link::call`].
    pub fn end_turn(&mut self, turn_id: &str) -> Result<(u32, u64), LinkError> {
        match self.call(&Request::EndTurn { turn_id: turn_id.to_owned() })? {
            Response::Turn { frame, segment } => Ok((segment, frame)),
            _ => Err(LinkError::UnexpectedAnswer),
        }
    }

    fn done(&mut self, request: &Request) -> Result<u64, LinkError> {
        match self.call(request)? {
            Response::Done { number } => Ok(number),
            _ => Err(LinkError::UnexpectedAnswer),
        }
    }

    /// [`Request::CloseInput`].
    ///
    /// # Errors
    /// As [`Link::call`].
    pub fn close_input(&mut self) -> Result<(), LinkError> {
        self.done(&Request::CloseInput).map(|_| ())
    }

    /// [`Request::Sync`]; answers the last frame's number.
    ///
    /// # Errors
    /// As [`Link::call`].
    pub fn sync(&mut self) -> Result<u64, LinkError> {
        self.done(&Request::Sync)
    }

    /// [`Request::Signal`]; answers the signal's frame.
    ///
    /// # Errors
    /// As [`Link::call`].
    pub fn signal(&mut self, signal: i32) -> Result<u64, LinkError> {
        self.done(&Request::Signal { signal })
    }

    /// [`Request::KillAll`]; answers how many processes are still there.
    ///
    /// # Errors
    /// As [`Link::call`].
    pub fn kill_all(&mut self) -> Result<u32, LinkError> {
        match self.call(&Request::KillAll)? {
            Response::Killed { survivors, .. } => Ok(survivors),
            _ => Err(LinkError::UnexpectedAnswer),
        }
    }

    /// [`Request::Release`].
    ///
    /// # Errors
    /// As [`Link::call`].
    pub fn release(&mut self, settle: Duration, term: Duration) -> Result<(), LinkError> {
        self.done(&Request::Release { settle, term }).map(|_| ())
    }

    /// [`Request::Prune`]; answers the oldest segment left.
    ///
    /// # Errors
    /// As [`Link::call`].
    pub fn prune(&mut self, keep_from: u32) -> Result<u64, LinkError> {
        self.done(&Request::Prune { keep_from })
    }
}
