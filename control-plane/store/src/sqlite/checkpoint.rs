//! Moves what is in the write-ahead log into the database, on a connection and a thread of its own.
//!
//! PASSIVE while there is work, so that nobody waits; RESTART when the store has been idle, so that the next commits are
//! written over what the log held: a commit that makes a file longer waits for the file system's journal, too. A log that
//! has become long is cut off then. Should readers and writers keep a PASSIVE checkpoint from ever starting the log anew,
//! RESTART does it once the log is over its limit.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use rusqlite::Connection;

/// A checkpoint is due after this many rows.
const EVERY_ROWS: usize = 2_000;
/// A checkpoint is due after this many payload bytes.
const EVERY_BYTES: usize = 2 * 1024 * 1024;
/// Without a commit for this long the store is idle.
const IDLE: Duration = Duration::from_millis(200);
/// An idle store's log may be this long, in bytes: what a burst left is given back.
pub(super) const LOG_KEPT: u64 = 4 * 1024 * 1024;
/// The limit of the log, in bytes, as `journal_size_limit` and as the point where RESTART is used.
pub(super) const LOG_LIMIT: i64 = 64 * 1024 * 1024;
/// Bytes of a page of the database.
const PAGE: i64 = 4096;

#[derive(Default)]
struct State {
    rows: usize,
    bytes: usize,
    /// Something was committed since the last look.
    busy: bool,
    /// Something was committed since the log was started anew.
    dirty: bool,
    closed: bool,
}

/// The way to the checkpoint thread.
pub(super) struct Checkpointer {
    state: Arc<(Mutex<State>, Condvar)>,
    thread: Mutex<Option<std::thread::JoinHandle<()>>>,
}

impl Checkpointer {
    /// Starts the thread.
    pub(super) fn start(connection: Connection) -> std::io::Result<Self> {
        let state = Arc::new((Mutex::new(State { dirty: true, ..State::default() }), Condvar::new()));
        let shared = Arc::clone(&state);
        let thread = std::thread::Builder::new()
            .name("store-checkpoint".into())
            .spawn(move || run(&connection, &shared))?;
        Ok(Self { state, thread: Mutex::new(Some(thread)) })
    }

    /// A batch was committed.
    pub(super) fn committed(&self, rows: usize, bytes: usize) {
        let (state, wake) = &*self.state;
        let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
        state.rows += rows;
        state.bytes += bytes;
        state.busy = true;
        // Wakes the thread out of its long sleep, too.
        let first = !state.dirty;
        state.dirty = true;
        if first || due(&state) {
            wake.notify_one();
        }
    }

    /// A last TRUNCATE, then the end of the thread. Blocks.
    pub(super) fn close(&self) {
        let (state, wake) = &*self.state;
        state.lock().unwrap_or_else(PoisonError::into_inner).closed = true;
        wake.notify_one();
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread
            && thread.join().is_err()
        {
            tracing::error!("the store's checkpoint thread panicked");
        }
    }
}

const fn due(state: &State) -> bool {
    state.rows >= EVERY_ROWS || state.bytes >= EVERY_BYTES
}

#[derive(PartialEq)]
enum Work {
    Passive,
    Idle,
    LastTruncate,
}

fn next(shared: &(Mutex<State>, Condvar)) -> Work {
    let (state, wake) = shared;
    let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
    loop {
        if state.closed {
            return Work::LastTruncate;
        }
        if due(&state) {
            (state.rows, state.bytes) = (0, 0);
            return Work::Passive;
        }
        if state.dirty {
            let (woken, wait) = wake.wait_timeout(state, IDLE).unwrap_or_else(PoisonError::into_inner);
            state = woken;
            if wait.timed_out() && !state.closed && !due(&state) {
                if !state.busy {
                    state.dirty = false;
                    return Work::Idle;
                }
                state.busy = false;
            }
        } else {
            state = wake.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

fn run(connection: &Connection, shared: &(Mutex<State>, Condvar)) {
    loop {
        match next(shared) {
            Work::Passive => {
                if checkpoint(connection, "PRAGMA wal_checkpoint(PASSIVE)") > LOG_LIMIT / PAGE {
                    checkpoint(connection, "PRAGMA wal_checkpoint(RESTART)");
                }
            }
            Work::Idle => {
                let long = log_length(connection) > LOG_KEPT;
                let mode = if long { "TRUNCATE" } else { "RESTART" };
                checkpoint(connection, &format!("PRAGMA wal_checkpoint({mode})"));
            }
            Work::LastTruncate => {
                checkpoint(connection, "PRAGMA wal_checkpoint(TRUNCATE)");
                return;
            }
        }
    }
}

/// The length of the log's file, in bytes.
fn log_length(connection: &Connection) -> u64 {
    let path = connection.path().map(|path| format!("{path}-wal")).unwrap_or_default();
    std::fs::metadata(path).map_or(0, |metadata| metadata.len())
}

/// Runs a checkpoint and returns how many pages are in the log. A failure is no harm: the log stays.
fn checkpoint(connection: &Connection, sql: &str) -> i64 {
    match connection.query_row(sql, [], |row| row.get::<_, i64>(1)) {
        Ok(pages) => pages,
        Err(error) => {
            tracing::warn!(%error, sql, "a checkpoint of the store failed");
            0
        }
    }
}
