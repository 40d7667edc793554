//! Signals that ask a command to end.
//!
//! They are listened to all the time, not only while a command waits for one: a Ctrl-C that comes while something is
//! being printed must not get lost.

use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::exit::Exit;
use crate::status::Failure;

/// What a signal asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Asked {
    /// To let go of what is being done: Ctrl-C.
    Interrupt,
    /// To end: SIGTERM, or the terminal is gone.
    End,
}

/// Ctrl-C, SIGTERM and the end of the terminal, listened to from the moment this is made.
pub(crate) struct Interrupts {
    interrupt: Signal,
    terminate: Signal,
    hangup: Signal,
}

impl Interrupts {
    pub(crate) fn new() -> Result<Self, Failure> {
        let of =
            |kind| signal(kind).map_err(|error| Failure::new(Exit::Failed, format!("no signals: {error}")));
        Ok(Self {
            interrupt: of(SignalKind::interrupt())?,
            terminate: of(SignalKind::terminate())?,
            hangup: of(SignalKind::hangup())?,
        })
    }

    /// Waits for one of them. Cancellation safe.
    pub(crate) async fn next(&mut self) -> Asked {
        tokio::select! {
            _ = self.interrupt.recv() => Asked::Interrupt,
            _ = self.terminate.recv() => Asked::End,
            _ = self.hangup.recv() => Asked::End,
        }
    }
}
