//! A keeper as an async runner holds it: requests with a deadline, the spool's frames in order, and its death.
//!
//! Three tasks serve one keeper. The link task speaks the protocol and never waits for the turn; the frame task reads
//! the spool's files as far as the link says they go, and waits for the turn when it must; the death task waits for
//! the keeper's end. Frames come from the files alone, live and after a restart alike.

use std::{
    collections::{HashMap, VecDeque},
    io,
    os::unix::net::UnixStream as StdStream,
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use roundhouse_process::{
    Decoder, Frame, FrameBody, FromKeeper, KeeperHandle, KeeperState, Link, LinkError, Notice, Refusal,
    Request, Response, SpoolError, SpoolReader, StatusReport, state_of,
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{UnixStream, unix::OwnedWriteHalf},
    sync::{mpsc, oneshot, watch},
};

use crate::error::chain;

/// Requests that may wait to be written. A turn has a handful under way.
const REQUESTS: usize = 64;

/// Batches of frames that may wait for the turn: beyond it the files hold what comes.
const BATCHES: usize = 8;

/// Frames per batch at most.
const BATCH_FRAMES: usize = 256;

/// Bytes of frames per batch, about.
const BATCH_BYTES: usize = 1024 * 1024;

/// Pause before the next try to reach a live keeper whose link broke.
const RECONNECT: Duration = Duration::from_millis(200);

/// After this time a thread that awaits a death looks whether anybody still wants to know.
const SLICE: Duration = Duration::from_secs(60);

/// Pause between looks at a keeper whose death cannot be awaited.
const LOOK: Duration = Duration::from_secs(1);

/// Why a request failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum AskError {
    /// No answer in time: the keeper is stopped.
    #[error("the keeper does not answer")]
    Stuck,
    /// The keeper is dead, or the link is broken just now.
    #[error("the keeper cannot be reached")]
    Gone,
    /// The keeper refused.
    #[error("the keeper refused: {0}")]
    Refused(Refusal),
}

/// What the spool tells.
#[derive(Debug)]
pub enum Batch {
    /// Frames, in order.
    Frames(Vec<Frame>),
    /// The keeper is dead and every frame was handed over.
    Gone,
}

struct Ask {
    request: Request,
    answer: oneshot::Sender<Result<Response, AskError>>,
}

/// Sends requests to a keeper. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Keeper {
    asks: mpsc::Sender<Ask>,
    timeout: Duration,
    pid: i32,
    dead: watch::Receiver<bool>,
    kill: Arc<KillSwitch>,
}

impl std::fmt::Debug for Ask {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ask").finish_non_exhaustive()
    }
}

struct KillSwitch(Option<Arc<KeeperHandle>>);

impl std::fmt::Debug for KillSwitch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("KillSwitch").field("held", &self.0.is_some()).finish()
    }
}

/// How to hold a keeper.
#[derive(Debug)]
pub(crate) struct Attach {
    /// The spool's directory.
    pub dir: PathBuf,
    /// The runner's id.
    pub owner: String,
    /// Hand over frames after this one. Unset: after the last there is now.
    pub after: Option<u64>,
    /// How long a request may take.
    pub timeout: Duration,
    /// The handle, when this runner started the keeper.
    pub handle: Option<KeeperHandle>,
}

/// Takes hold of a live keeper. Answers the requests' side, the frames' side, and the state at this moment.
///
/// # Errors
/// The link's error when the keeper cannot be reached.
pub(crate) async fn attach(how: Attach) -> Result<(Keeper, mpsc::Receiver<Batch>, StatusReport), LinkError> {
    let (dir, owner, timeout) = (how.dir.clone(), how.owner.clone(), how.timeout);
    let (link, status) = blocking_connect(dir.clone(), owner.clone(), timeout).await?;
    let pid = link.keeper_pid();
    let handle = match how.handle {
        Some(handle) => Some(handle),
        None => KeeperHandle::adopt(&dir, pid)
            .map_err(|error| tracing::warn!(error = chain(&error), "the keeper's end cannot be awaited"))
            .ok(),
    };
    let handle = handle.map(Arc::new);
    let (dead_tx, dead) = watch::channel(false);
    tokio::spawn(await_death(handle.clone(), dir.clone(), owner.clone(), dead_tx));
    let (asks, ask_rx) = mpsc::channel(REQUESTS);
    let (progress_tx, progress) = watch::channel(0_u64);
    let link_task = LinkTask {
        dir: dir.clone(),
        owner,
        timeout,
        asks: ask_rx,
        progress: progress_tx,
        dead: dead.clone(),
    };
    tokio::spawn(link_task.run(link));
    let (batch_tx, batches) = mpsc::channel(BATCHES);
    tokio::spawn(read_frames(
        dir,
        how.after.unwrap_or(status.position.frame),
        progress,
        dead.clone(),
        batch_tx,
    ));
    Ok((Keeper { asks, timeout, pid, dead, kill: Arc::new(KillSwitch(handle)) }, batches, status))
}

/// A dead keeper, in the shape of a live one: its frames after one, then its end. A spool may be large, so it is read as
/// a live one's is, no further ahead than the turn can follow.
#[must_use]
pub(crate) fn dead(dir: PathBuf, after: u64) -> (Keeper, mpsc::Receiver<Batch>) {
    let (asks, _) = mpsc::channel(1);
    let (_, dead) = watch::channel(true);
    // Nothing is added any more: one pass over the files finds all.
    let (_, progress) = watch::channel(0);
    let (batch_tx, batches) = mpsc::channel(BATCHES);
    tokio::spawn(read_frames(dir, after, progress, dead.clone(), batch_tx));
    let keeper = Keeper { asks, timeout: Duration::ZERO, pid: 0, dead, kill: Arc::new(KillSwitch(None)) };
    (keeper, batches)
}

async fn blocking_connect(
    dir: PathBuf,
    owner: String,
    timeout: Duration,
) -> Result<(Link, StatusReport), LinkError> {
    tokio::task::spawn_blocking(move || Link::connect(&dir, &owner, timeout))
        .await
        .unwrap_or(Err(LinkError::Closed))
}

/// Waits for the keeper's death: in a thread of its own, which sleeps in the kernel, where its process is held; by
/// looking at its lock where it is not.
async fn await_death(
    handle: Option<Arc<KeeperHandle>>,
    dir: PathBuf,
    owner: String,
    dead: watch::Sender<bool>,
) {
    let dead = Arc::new(dead);
    if let Some(handle) = handle {
        let told = Arc::clone(&dead);
        let thread = std::thread::Builder::new().name("keeper-death".to_owned()).spawn(move || {
            while !told.is_closed() {
                match handle.wait(SLICE) {
                    Ok(true) => {
                        told.send_replace(true);
                        return;
                    }
                    Ok(false) => {}
                    Err(error) => {
                        tracing::warn!(error = chain(&error), "a keeper's end cannot be awaited");
                        return;
                    }
                }
            }
        });
        if thread.is_ok() {
            return;
        }
    }
    while !dead.is_closed() {
        if !matches!(state_of(&dir, &owner), Ok(KeeperState::Live)) {
            dead.send_replace(true);
            return;
        }
        tokio::time::sleep(LOOK).await;
    }
}

type Waiting = HashMap<u64, oneshot::Sender<Result<Response, AskError>>>;

/// Writes of the first request what the socket takes.
async fn write_first(
    write: &mut OwnedWriteHalf,
    outgoing: &VecDeque<Vec<u8>>,
    written: usize,
) -> io::Result<usize> {
    match outgoing.front() {
        Some(first) => write.write(&first[written..]).await,
        None => std::future::pending().await,
    }
}

struct LinkTask {
    dir: PathBuf,
    owner: String,
    timeout: Duration,
    asks: mpsc::Receiver<Ask>,
    progress: watch::Sender<u64>,
    dead: watch::Receiver<bool>,
}

impl LinkTask {
    async fn run(mut self, link: Link) {
        let mut link = Some(link);
        loop {
            if let Some(link) = link.take() {
                let (stream, decoder, next_id) = link.into_parts();
                match self.serve(stream, decoder, next_id).await {
                    Ok(Served::Dropped) => return,
                    Ok(Served::Broken) => {}
                    Err(error) => tracing::debug!(%error, "link to a keeper"),
                }
            }
            if *self.dead.borrow() {
                break;
            }
            tokio::select! {
                _ = self.dead.wait_for(|dead| *dead) => break,
                () = tokio::time::sleep(RECONNECT) => {}
            }
            if self.asks.is_closed() {
                return;
            }
            match blocking_connect(self.dir.clone(), self.owner.clone(), self.timeout).await {
                Ok((again, status)) => {
                    self.progress.send_replace(status.position.frame);
                    link = Some(again);
                }
                Err(error) => tracing::debug!(error = chain(&error), "a keeper is not reached"),
            }
        }
        // Dead: whoever still asks is told.
        while let Some(ask) = self.asks.recv().await {
            let _ = ask.answer.send(Err(AskError::Gone));
        }
    }

    async fn serve(
        &mut self,
        stream: StdStream,
        mut decoder: Decoder,
        mut next_id: u64,
    ) -> io::Result<Served> {
        stream.set_nonblocking(true)?;
        let (mut read, mut write) = UnixStream::from_std(stream)?.into_split();
        let mut waiting = Waiting::new();
        // A stopped keeper takes no more, which must not keep its answers from being read.
        let mut outgoing = VecDeque::<Vec<u8>>::with_capacity(REQUESTS);
        let mut written = 0;
        let mut buffer = vec![0; 16 * 1024];
        let result = loop {
            tokio::select! {
                count = read.read(&mut buffer) => {
                    let count = match count {
                        Ok(0) => break Ok(Served::Broken),
                        Ok(count) => count,
                        Err(error) => break Err(error),
                    };
                    decoder.feed(&buffer[..count]);
                    if !self.take(&mut decoder, &mut waiting) {
                        break Ok(Served::Broken);
                    }
                }
                ask = self.asks.recv() => {
                    let Some(ask) = ask else { break Ok(Served::Dropped) };
                    if matches!(ask.request, Request::Deliver { .. }) && crate::fault_point!("runner::link_lost") {
                        let _ = ask.answer.send(Err(AskError::Gone));
                        break Ok(Served::Broken);
                    }
                    if outgoing.len() >= REQUESTS {
                        let _ = ask.answer.send(Err(AskError::Stuck));
                        continue;
                    }
                    let id = next_id;
                    next_id += 1;
                    waiting.retain(|_, answer| !answer.is_closed());
                    waiting.insert(id, ask.answer);
                    outgoing.push_back(ask.request.encode(id));
                }
                // Cancel safe: what was written is counted as soon as it is.
                count = write_first(&mut write, &outgoing, written), if !outgoing.is_empty() => {
                    written += match count {
                        Ok(0) => break Ok(Served::Broken),
                        Ok(count) => count,
                        Err(error) => break Err(error),
                    };
                    if outgoing.front().is_some_and(|first| written >= first.len()) {
                        outgoing.pop_front();
                        written = 0;
                    }
                }
            }
        };
        for (_, answer) in waiting.drain() {
            let _ = answer.send(Err(AskError::Gone));
        }
        result
    }

    /// Takes all whole messages; false when the link is of no more use.
    fn take(&self, decoder: &mut Decoder, waiting: &mut Waiting) -> bool {
        loop {
            match decoder.next_from_keeper() {
                Ok(None) => return true,
                Ok(Some(FromKeeper::Response { request_id, response })) => {
                    let answer = waiting.remove(&request_id);
                    if let Some(answer) = answer {
                        let _ = answer.send(match response {
                            Response::Refused(refusal) => Err(AskError::Refused(refusal)),
                            response => Ok(response),
                        });
                    }
                }
                Ok(Some(FromKeeper::Notice(Notice::Progress(end) | Notice::Ending(end)))) => {
                    self.progress.send_replace(end.frame);
                }
                Ok(Some(FromKeeper::Notice(Notice::Superseded))) => return false,
                Err(error) => {
                    tracing::warn!(error = chain(&error), "a keeper breaks the protocol");
                    return false;
                }
            }
        }
    }
}

enum Served {
    /// Nobody asks any more.
    Dropped,
    /// The stream ended.
    Broken,
}

fn size(frame: &Frame) -> usize {
    match &frame.body {
        FrameBody::StdoutLine { bytes, .. } | FrameBody::Stderr { bytes, .. } => bytes.len() + 64,
        _ => 64,
    }
}

async fn read_frames(
    dir: PathBuf,
    after: u64,
    mut progress: watch::Receiver<u64>,
    mut dead: watch::Receiver<bool>,
    batches: mpsc::Sender<Batch>,
) {
    let mut reader = match SpoolReader::new_after(&dir, after) {
        Ok(reader) => reader,
        Err(error) => {
            tracing::error!(error = chain(&error), "a spool cannot be read");
            let _ = batches.send(Batch::Gone).await;
            return;
        }
    };
    loop {
        // Before the look at the files: what is written before a death is seen after it.
        let was_dead = *dead.borrow_and_update();
        progress.borrow_and_update();
        let mut more = true;
        while more {
            let mut frames = Vec::new();
            let mut bytes = 0;
            while frames.len() < BATCH_FRAMES && bytes < BATCH_BYTES {
                match reader.next_frame() {
                    Ok(Some(frame)) => {
                        bytes += size(&frame);
                        frames.push(frame);
                    }
                    Ok(None) => {
                        more = false;
                        break;
                    }
                    Err(error) => {
                        tracing::warn!(error = chain(&error), "a spool is damaged");
                        if matches!(error, SpoolError::Io(_) | SpoolError::Segment { .. }) {
                            more = false;
                            break;
                        }
                    }
                }
            }
            if !frames.is_empty() && batches.send(Batch::Frames(frames)).await.is_err() {
                return;
            }
        }
        if was_dead {
            let _ = batches.send(Batch::Gone).await;
            return;
        }
        // The link's task ends with the keeper's death, or with the last who asks; the latter closes `batches`, too.
        tokio::select! {
            changed = progress.changed() => {
                if changed.is_err() {
                    progress_closed(&mut dead, &batches).await;
                }
            }
            () = until_true(&mut dead) => {}
            () = batches.closed() => return,
        }
    }
}

async fn until_true(dead: &mut watch::Receiver<bool>) {
    // An error means that nobody can tell any more, which is an end, too.
    let _ = dead.wait_for(|dead| *dead).await;
}

/// Nothing tells of progress any more: only the keeper's death can follow, or the end of interest.
async fn progress_closed(dead: &mut watch::Receiver<bool>, batches: &mpsc::Sender<Batch>) {
    tokio::select! {
        () = until_true(dead) => {}
        () = batches.closed() => {}
    }
}

impl Keeper {
    /// Puts a request on its way now, in the order of the calls, and answers what to await.
    pub fn ask(&self, request: Request) -> impl Future<Output = Result<Response, AskError>> + Send + 'static {
        let (answer, response) = oneshot::channel();
        let sent = self.asks.try_send(Ask { request, answer });
        let timeout = self.timeout;
        async move {
            match sent {
                Ok(()) => {}
                Err(mpsc::error::TrySendError::Full(_)) => return Err(AskError::Stuck),
                Err(mpsc::error::TrySendError::Closed(_)) => return Err(AskError::Gone),
            }
            match tokio::time::timeout(timeout, response).await {
                Ok(Ok(answer)) => answer,
                Ok(Err(_)) => Err(AskError::Gone),
                Err(_) => Err(AskError::Stuck),
            }
        }
    }

    /// The keeper's process id, for display.
    #[must_use]
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// Whether it is dead.
    #[must_use]
    pub fn is_dead(&self) -> bool {
        *self.dead.borrow()
    }

    /// Waits for its death, at most this long; false when time was up. Cancel safe.
    pub async fn until_dead(&self, limit: Duration) -> bool {
        let mut dead = self.dead.clone();
        matches!(tokio::time::timeout(limit, dead.wait_for(|dead| *dead)).await, Ok(Ok(_)))
    }

    /// SIGKILL to the keeper itself, for one that does not answer.
    pub fn kill(&self) {
        if let Some(handle) = &self.kill.0
            && let Err(error) = handle.kill()
        {
            tracing::error!(error = chain(&error), "a stopped keeper cannot be killed");
        }
    }
}
