//! What a translator is fed: the frames of a spool, whatever the spool's own format.

/// One numbered record of what happened between a keeper and its engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Frame<'a> {
    /// The frame's number in its spool.
    pub number: u64,
    /// What happened.
    pub body: FrameBody<'a>,
}

/// What happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FrameBody<'a> {
    /// The engine was spawned.
    Spawn,
    /// One line of standard output, without its line end.
    Stdout(&'a [u8]),
    /// The beginning of a line longer than the framing allows. Fails the turn.
    OversizedLine {
        /// Its first bytes.
        head: &'a [u8],
        /// How many bytes it had, as far as they were counted.
        length: u64,
    },
    /// A piece of standard error, cut anywhere.
    Stderr(&'a [u8]),
    /// Bytes are about to be written to standard input.
    StdinIntent {
        /// The id of the operation, see [`crate::StdinLine::op`].
        op: &'a str,
    },
    /// The bytes were written.
    StdinWritten {
        /// The id of the operation.
        op: &'a str,
    },
    /// A signal was sent to the engine.
    Signal {
        /// Its number.
        signal: i32,
    },
    /// The engine ended.
    Exit(Exit),
}

/// How an engine process ended. Both unset when nobody can tell (its keeper died with it).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Exit {
    /// Its exit code, if it exited.
    pub code: Option<i32>,
    /// The signal, if it died of one.
    pub signal: Option<i32>,
}
