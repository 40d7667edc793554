//! One engine process that this runner holds: its keeper, its frames, and who reads them.

use std::{
    collections::BTreeSet,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use roundhouse_engines::{Adapter, NativeRef, StdinLine, Translator};
use roundhouse_process::{ExitStatus, Frame, FrameBody, Request, Response, StatusReport, descendants};
use tokio::sync::mpsc;

use crate::{
    fingerprint::Hashed,
    keeper::{AskError, Batch, Keeper},
    session_record::Launched,
};

/// Counts the processes that are held. Dropped with the engine.
#[derive(Debug)]
pub struct Token(Arc<AtomicUsize>);

impl Token {
    /// Counts one more.
    #[must_use]
    pub fn new(counter: &Arc<AtomicUsize>) -> Self {
        counter.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(counter))
    }
}

impl Drop for Token {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// An engine process.
#[derive(Debug)]
pub struct Engine {
    /// The session it serves.
    pub session_id: String,
    /// Its spool.
    pub spool_id: String,
    /// The spool's directory.
    pub dir: PathBuf,
    /// Its engine home.
    pub home: PathBuf,
    /// Its temporary directory.
    pub temporary: PathBuf,
    /// What it was launched with.
    pub launched: Launched,
    /// The native session that was asked for.
    pub native: NativeRef,
    /// Its dialect.
    pub adapter: &'static dyn Adapter,
    /// Who reads its frames.
    pub translator: Box<dyn Translator>,
    /// Its keeper.
    pub keeper: Keeper,
    /// Its frames.
    pub frames: mpsc::Receiver<Batch>,
    /// Process ids of the init, as the keeper sees it, for display and for the look at survivors.
    pub init_pid: i32,
    /// Process id of the engine as it sees itself.
    pub engine_pid: i32,
    /// The last frame that was read.
    pub last_frame: u64,
    /// How far the session's file was hashed at the end of its last turn.
    pub hashed: Option<Hashed>,
    /// Every frame was read and the keeper is dead.
    pub gone: bool,
    /// Counted among the warm ones.
    pub token: Token,
}

/// A process for good: its id and when it started.
pub(crate) type ProcessKey = (i32, u64);

impl Engine {
    /// Puts a line on its way to the engine.
    pub fn deliver(
        &self,
        line: StdinLine,
    ) -> impl Future<Output = Result<Response, AskError>> + Send + 'static {
        self.keeper.ask(Request::Deliver { op_id: line.op, bytes: line.bytes })
    }

    /// Takes in what a status says.
    pub fn note_status(&mut self, status: &StatusReport) {
        self.init_pid = status.init_pid;
        self.engine_pid = status.engine_pid;
    }

    /// Notes what a frame says about the process itself.
    pub fn note_frame(&mut self, frame: &Frame) {
        self.last_frame = frame.number;
        if let FrameBody::Started { engine_pid, init_pid, .. } = &frame.body {
            self.engine_pid = *engine_pid;
            self.init_pid = *init_pid;
        }
    }

    /// The engine and all it started that live now. Blocking, a look at /proc.
    #[must_use]
    pub fn processes(&self) -> BTreeSet<ProcessKey> {
        processes(self.init_pid)
    }

    /// Ends the engine in order and waits until its keeper is dead; one that does not answer is killed.
    pub async fn release(&mut self, settle: Duration, term: Duration) {
        // Somebody has to take the frames, or the spool's reader would wait for the turn for ever.
        self.frames.close();
        let asked = self.keeper.ask(Request::Release { settle, term }).await;
        let limit = settle + term + Duration::from_secs(10);
        match asked {
            Ok(_) if self.keeper.until_dead(limit).await => {}
            Err(AskError::Gone) if self.keeper.until_dead(Duration::from_secs(2)).await => {}
            _ => {
                tracing::warn!(spool = self.spool_id, "the keeper does not end; it is killed");
                self.keeper.kill();
                let _ = self.keeper.until_dead(Duration::from_secs(5)).await;
            }
        }
        self.gone = true;
        let _ = tokio::fs::remove_dir_all(&self.temporary).await;
    }
}

/// All live processes below one.
#[must_use]
pub(crate) fn processes(root: i32) -> BTreeSet<ProcessKey> {
    if root <= 0 {
        return BTreeSet::new();
    }
    descendants(root)
        .into_iter()
        .filter(|process| !process.is_zombie())
        .map(|process| (process.pid, process.started_ns))
        .collect()
}

/// A frame of the spool in the words of the engines, when it means something to them.
#[must_use]
pub(crate) fn engine_frame(frame: &Frame) -> Option<roundhouse_engines::Frame<'_>> {
    use roundhouse_engines::{Exit, FrameBody as Body};
    let body = match &frame.body {
        FrameBody::StdoutLine { bytes, .. } => Body::Stdout(bytes),
        FrameBody::StdoutOverlong { head, limit, .. } => Body::OversizedLine { head, length: *limit },
        FrameBody::Stderr { bytes, .. } => Body::Stderr(bytes),
        FrameBody::StdinIntent { op_id, .. } => Body::StdinIntent { op: op_id },
        FrameBody::StdinWritten { op_id, .. } => Body::StdinWritten { op: op_id },
        FrameBody::Signal { signal, .. } => Body::Signal { signal: *signal },
        FrameBody::Spawn { .. } => Body::Spawn,
        FrameBody::Exit(status) => Body::Exit(match status {
            ExitStatus::Code(code) => Exit { code: Some(*code), signal: None },
            ExitStatus::Signal(signal) => Exit { code: None, signal: Some(*signal) },
            ExitStatus::Unknown => Exit::default(),
        }),
        FrameBody::SpawnFailed { .. } => Body::Exit(Exit::default()),
        FrameBody::StdoutOverlongEnd { .. }
        | FrameBody::StdoutEof { .. }
        | FrameBody::StderrOmitted { .. }
        | FrameBody::StdinFailed { .. }
        | FrameBody::StdinClosed
        | FrameBody::Killed { .. }
        | FrameBody::Started { .. }
        | FrameBody::TurnBegin { .. }
        | FrameBody::TurnEnd { .. }
        | FrameBody::StorageFault(_)
        | FrameBody::Closed { .. }
        | FrameBody::Unknown { .. } => return None,
    };
    Some(roundhouse_engines::Frame { number: frame.number, body })
}
