//! Stdout, whole or in pieces. A reader who has gone is not noticed, as the real engine does not.

use std::{
    io::{self, StdoutLock, Write},
    sync::mpsc::{self, RecvTimeoutError},
    time::Duration,
};

use serde_json::Value;

/// Bytes collected before a write, where nobody flushes.
const BUFFER: usize = 64 * 1024;

/// Stdout.
#[derive(Debug)]
pub(crate) struct Out {
    stdout: StdoutLock<'static>,
    buffer: Vec<u8>,
    piece: usize,
    delay: Duration,
}

impl Out {
    pub(crate) fn new() -> Self {
        Self {
            stdout: io::stdout().lock(),
            buffer: Vec::with_capacity(BUFFER),
            piece: 0,
            delay: Duration::ZERO,
        }
    }

    /// From here on writes `piece` bytes at a time; 0 writes all at once.
    pub(crate) fn split(&mut self, piece: usize, delay: Duration) {
        self.flush();
        (self.piece, self.delay) = (piece, delay);
    }

    /// One JSON line, collected until [`flush`](Self::flush).
    pub(crate) fn line(&mut self, value: &Value) {
        // Writing to memory does not fail.
        let _ = serde_json::to_writer(&mut self.buffer, value);
        self.buffer.push(b'\n');
        if self.buffer.len() >= BUFFER {
            self.flush();
        }
    }

    /// Bytes as they are.
    pub(crate) fn bytes(&mut self, bytes: &[u8]) {
        for part in bytes.chunks(BUFFER) {
            self.buffer.extend_from_slice(part);
            if self.buffer.len() >= BUFFER {
                self.flush();
            }
        }
    }

    /// Writes what is collected. Errors are not looked at: the reader may be gone.
    pub(crate) fn flush(&mut self) {
        if self.piece == 0 {
            write_through(&mut self.stdout, &self.buffer);
        } else {
            for part in self.buffer.chunks(self.piece) {
                write_through(&mut self.stdout, part);
                doze(self.delay);
            }
        }
        self.buffer.clear();
    }
}

/// The standard library's stdout keeps back what follows the last newline; a flush after each write lets nothing wait.
fn write_through(stdout: &mut StdoutLock<'static>, bytes: &[u8]) {
    let _ = stdout.write_all(bytes);
    let _ = stdout.flush();
}

/// Waits, deaf to everything.
fn doze(time: Duration) {
    if time.is_zero() {
        return;
    }
    let (keep, never) = mpsc::sync_channel::<()>(1);
    let waited = never.recv_timeout(time);
    debug_assert_eq!(waited, Err(RecvTimeoutError::Timeout));
    drop(keep);
}
