//! The keeper's ends of its sockets: at most one open link, and a few that have not said hello yet.

use crate::protocol::{Decoder, FromKeeper, Notice, RawMessage, Response, SpoolEnd};
use crate::sys;
use nix::errno::Errno;
use std::io::{self, Read as _, Write as _};
use std::os::fd::AsFd as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::{Duration, Instant};

/// A connection must say hello in this time.
const HELLO_TIMEOUT: Duration = Duration::from_secs(5);
/// Connections that have not said hello; the oldest goes when there are more.
const STRANGERS_MAX: usize = 4;
/// A client that lets this much wait unread is cut off.
const OUT_MAX: usize = 1024 * 1024;
/// Bytes read of one connection before others get their turn.
const READ: usize = 16 * 1024;

/// One connection.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) id: u64,
    pub(super) stream: UnixStream,
    decoder: Decoder,
    out: Vec<u8>,
    out_from: usize,
    /// It said hello and was welcomed.
    pub(super) open: bool,
    accepted: Instant,
    broken: bool,
    /// Closed once all is sent.
    closing: bool,
    told: SpoolEnd,
}

impl Connection {
    pub(super) fn wants_write(&self) -> bool {
        self.out_from < self.out.len()
    }

    fn send(&mut self, message: &FromKeeper) {
        if self.out.len() - self.out_from > OUT_MAX {
            self.broken = true;
            return;
        }
        self.out.extend_from_slice(&message.encode());
    }

    fn flush(&mut self) {
        while self.wants_write() {
            match self.stream.write(&self.out[self.out_from..]) {
                Ok(0) => self.broken = true,
                Ok(count) => self.out_from += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(_) => self.broken = true,
            }
            if self.broken {
                return;
            }
        }
        self.out.clear();
        self.out_from = 0;
        self.broken |= self.closing;
    }
}

/// All connections.
#[derive(Debug)]
pub(super) struct Links {
    listener: UnixListener,
    connections: Vec<Connection>,
    next_id: u64,
}

impl Links {
    pub(super) fn new(listener: UnixListener) -> Self {
        Self { listener, connections: Vec::new(), next_id: 1 }
    }

    pub(super) fn listener(&self) -> &UnixListener {
        &self.listener
    }

    pub(super) fn connections(&self) -> &[Connection] {
        &self.connections
    }

    /// A runner is linked.
    pub(super) fn has_runner(&self) -> bool {
        self.connections.iter().any(|connection| connection.open)
    }

    pub(super) fn is_open(&self, id: u64) -> bool {
        self.connections.iter().any(|connection| connection.id == id && connection.open)
    }

    /// Takes new connections. Those of other users are dropped without a word.
    pub(super) fn accept(&mut self) {
        loop {
            let stream = match self.listener.accept() {
                Ok((stream, _)) => stream,
                Err(error) if error.raw_os_error() == Some(Errno::EINTR as i32) => continue,
                Err(_) => return,
            };
            let same_user = sys::peer(stream.as_fd()).is_ok_and(|peer| peer.uid == sys::euid());
            if !same_user || stream.set_nonblocking(true).is_err() {
                continue;
            }
            let strangers = self.connections.iter().filter(|connection| !connection.open).count();
            if strangers >= STRANGERS_MAX
                && let Some(oldest) = self.connections.iter().position(|connection| !connection.open)
            {
                self.connections.remove(oldest);
            }
            self.connections.push(Connection {
                id: self.next_id,
                stream,
                decoder: Decoder::new(),
                out: Vec::new(),
                out_from: 0,
                open: false,
                accepted: Instant::now(),
                broken: false,
                closing: false,
                told: SpoolEnd::default(),
            });
            self.next_id += 1;
        }
    }

    /// Reads what a connection has to say. A broken one is marked and goes at the next [`Links::settle`].
    pub(super) fn read(&mut self, id: u64) -> Vec<RawMessage> {
        let mut messages = Vec::new();
        let Some(connection) = self.find(id) else { return messages };
        let mut buffer = [0; READ];
        match connection.stream.read(&mut buffer) {
            Ok(0) => connection.broken = true,
            Ok(count) => connection.decoder.feed(&buffer[..count]),
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
            Err(_) => connection.broken = true,
        }
        loop {
            match connection.decoder.next_raw() {
                Ok(Some(message)) => messages.push(message),
                Ok(None) => return messages,
                Err(_) => {
                    connection.broken = true;
                    return messages;
                }
            }
        }
    }

    /// Opens a link; an older one is told and closed: the newest wins.
    pub(super) fn open(&mut self, id: u64, told: SpoolEnd) {
        for connection in &mut self.connections {
            if connection.id == id {
                connection.open = true;
                connection.told = told;
            } else if connection.open {
                connection.send(&FromKeeper::Notice(Notice::Superseded));
                connection.open = false;
                connection.closing = true;
            }
        }
    }

    pub(super) fn answer(&mut self, id: u64, request_id: u64, response: Response) {
        if let Some(connection) = self.find(id) {
            connection.send(&FromKeeper::Response { request_id, response });
        }
    }

    /// Answers and closes once it is sent.
    pub(super) fn refuse(&mut self, id: u64, request_id: u64, response: Response) {
        self.answer(id, request_id, response);
        if let Some(connection) = self.find(id) {
            connection.closing = true;
        }
    }

    /// Tells open links how far the spool goes (those that are slow to read hear only the newest), sends what waits,
    /// and drops what is broken or late.
    pub(super) fn settle(&mut self, end: SpoolEnd) {
        for connection in &mut self.connections {
            if connection.open && connection.told != end && !connection.wants_write() {
                connection.told = end;
                connection.send(&FromKeeper::Notice(Notice::Progress(end)));
            }
            connection.flush();
        }
        self.connections.retain(|connection| {
            let late = !connection.open && connection.accepted.elapsed() > HELLO_TIMEOUT;
            !connection.broken && !late
        });
    }

    /// Tells the end, and sends what waits for no longer than `timeout`.
    pub(super) fn end(&mut self, end: SpoolEnd, timeout: Duration) {
        for connection in &mut self.connections {
            if connection.open {
                connection.send(&FromKeeper::Notice(Notice::Ending(end)));
                // A client that does not read is not waited for for long.
                if connection.stream.set_nonblocking(false).is_ok()
                    && connection.stream.set_write_timeout(Some(timeout)).is_ok()
                {
                    connection.flush();
                }
            }
        }
        self.connections.clear();
    }

    /// When the next connection is late.
    pub(super) fn next_deadline(&self) -> Option<Duration> {
        self.connections
            .iter()
            .filter(|connection| !connection.open)
            .map(|connection| HELLO_TIMEOUT.saturating_sub(connection.accepted.elapsed()))
            .min()
    }

    fn find(&mut self, id: u64) -> Option<&mut Connection> {
        self.connections.iter_mut().find(|connection| connection.id == id)
    }
}
