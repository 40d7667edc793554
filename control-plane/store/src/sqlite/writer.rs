//! The one thread that writes, and its group commit.
//!
//! ```text
//! callers --> interactive queue --+
//!         --> bulk queue ---------+
//!         --> leisure queue ------+--> BEGIN IMMEDIATE
//!                                       SAVEPOINT, command, RELEASE   (each command of the batch)
//!                                     COMMIT --> answers and hints
//! ```
//!
//! A batch is what waits, interactive commands first; it is closed by the command that crosses a limit and
//! never waits for more. A command of the leisure queue alone starts no batch for [`LEISURE`]: it goes with the next
//! one, and costs no sync of its own. Nothing is answered, published or changed in memory before COMMIT. When COMMIT fails,
//! or the transaction is gone (a full disk rolls back all of it), every command of the batch is answered that
//! the store is unavailable.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rusqlite::Connection;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, broadcast, oneshot};

use super::checkpoint::Checkpointer;
use super::sql::classify;
use crate::error::{Error, Result, Unavailable};
use crate::hint::Hint;

/// Most commands in a batch.
const MAX_COMMANDS: usize = 256;
/// Most rows in a batch.
const MAX_ROWS: usize = 512;
/// Most payload bytes in a batch.
const MAX_BYTES: usize = 1024 * 1024;
/// Longest time that a batch collects.
const MAX_TIME: Duration = Duration::from_millis(5);
/// Most commands that wait in one queue: two full batches, so that a burst is taken without much memory.
const QUEUE: usize = 2 * MAX_COMMANDS;
/// Longest wait for room in a queue.
const QUEUE_WAIT: Duration = Duration::from_secs(30);

/// Longest time that a command of the leisure queue waits for a batch to go with.
const LEISURE: Duration = Duration::from_millis(200);

/// Which queue a command waits in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lane {
    /// Somebody waits for the answer: taken first.
    Interactive,
    /// Events of runners.
    Bulk,
    /// Bookkeeping that nobody waits for, and that is done again if it is lost.
    Leisure,
}

/// What a command counts for in a batch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cost {
    pub(super) rows: usize,
    pub(super) bytes: usize,
}

/// What a command works with.
pub(super) struct Scope<'c> {
    /// The connection, inside the batch's transaction and the command's savepoint.
    pub(super) connection: &'c Connection,
    hints: Vec<Hint>,
}

impl Scope<'_> {
    /// Publishes a hint once the command is committed.
    pub(super) fn hint(&mut self, hint: Hint) {
        self.hints.push(hint);
    }
}

/// How a command ended before COMMIT.
enum Ran {
    /// It wants to be committed; this answers its caller.
    Keep(Answer),
    /// It was refused; its savepoint is undone, and this answers its caller after COMMIT.
    Undo(Answer),
    /// The database failed: the batch is over.
    Broken(Answer, Unavailable, String),
}

impl Ran {
    fn answer(self) -> Answer {
        match self {
            Self::Keep(answer) | Self::Undo(answer) | Self::Broken(answer, ..) => answer,
        }
    }
}

/// Answers a caller: with the command's own result, or with the batch's failure.
type Answer = Box<dyn FnOnce(std::result::Result<(), (Unavailable, String)>) + Send>;

/// Runs a command; without a scope it is only turned into its answer.
type Run = Box<dyn FnOnce(Option<&mut Scope<'_>>) -> Ran + Send>;

struct Job {
    name: &'static str,
    cost: Cost,
    run: Run,
    /// When it was asked for.
    at: Instant,
    /// Gives back the room in the queue when the job is taken.
    _room: OwnedSemaphorePermit,
}

#[derive(Default)]
struct Queues {
    interactive: VecDeque<Job>,
    bulk: VecDeque<Job>,
    leisure: VecDeque<Job>,
    closed: bool,
}

impl Queues {
    /// When the next batch is to begin: none, when nothing waits.
    fn due(&self) -> Option<Instant> {
        let first = self.leisure.front().map(|job| if self.closed { job.at } else { job.at + LEISURE });
        let urgent = self.interactive.front().or_else(|| self.bulk.front()).map(|job| job.at);
        urgent.or(first)
    }
}

struct Shared {
    queues: Mutex<Queues>,
    ready: Condvar,
    interactive_room: Arc<Semaphore>,
    bulk_room: Arc<Semaphore>,
}

/// The way to the writer thread.
pub(super) struct Writer {
    shared: Arc<Shared>,
    thread: Mutex<Option<std::thread::JoinHandle<()>>>,
}

impl Writer {
    /// Starts the thread.
    pub(super) fn start(
        connection: Connection,
        hints: broadcast::Sender<Hint>,
        checkpointer: Arc<Checkpointer>,
    ) -> std::io::Result<Self> {
        let shared = Arc::new(Shared {
            queues: Mutex::default(),
            ready: Condvar::new(),
            interactive_room: Arc::new(Semaphore::new(QUEUE)),
            bulk_room: Arc::new(Semaphore::new(QUEUE)),
        });
        let state = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("store-writer".into())
            .spawn(move || write_until_closed(&connection, &state, &hints, &checkpointer))?;
        Ok(Self { shared, thread: Mutex::new(Some(thread)) })
    }

    /// Runs a command in a batch and waits for its commit. Cancel safe in that the command runs to its end.
    pub(super) async fn run<T, F>(&self, name: &'static str, lane: Lane, cost: Cost, command: F) -> Result<T>
    where
        T: Send + 'static,
        F: FnOnce(&mut Scope<'_>) -> Result<T> + Send + 'static,
    {
        let room = match lane {
            Lane::Interactive => &self.shared.interactive_room,
            Lane::Bulk | Lane::Leisure => &self.shared.bulk_room,
        };
        let room = match tokio::time::timeout(QUEUE_WAIT, Arc::clone(room).acquire_owned()).await {
            Ok(Ok(room)) => room,
            Ok(Err(_)) => return Err(closed()),
            Err(_) => {
                let message = format!("no room in the queue within {} s", QUEUE_WAIT.as_secs());
                return Err(Error::Unavailable { reason: Unavailable::Busy, message });
            }
        };
        let (sender, receiver) = oneshot::channel();
        let run = Box::new(move |scope: Option<&mut Scope<'_>>| run(scope, command, sender));
        let job = Job { name, cost, run, at: Instant::now(), _room: room };
        {
            let mut queues = self.shared.queues.lock().unwrap_or_else(PoisonError::into_inner);
            if queues.closed {
                return Err(closed());
            }
            match lane {
                Lane::Interactive => queues.interactive.push_back(job),
                Lane::Bulk => queues.bulk.push_back(job),
                Lane::Leisure => queues.leisure.push_back(job),
            }
        }
        self.shared.ready.notify_one();
        receiver.await.unwrap_or_else(|_| Err(closed()))
    }

    /// How many commands wait.
    #[cfg(test)]
    pub(super) fn waiting(&self) -> usize {
        let queues = self.shared.queues.lock().unwrap_or_else(PoisonError::into_inner);
        queues.interactive.len() + queues.bulk.len() + queues.leisure.len()
    }

    /// Takes no more, finishes what waits and waits for the thread. Blocks.
    pub(super) fn close(&self) {
        self.shared.queues.lock().unwrap_or_else(PoisonError::into_inner).closed = true;
        self.shared.interactive_room.close();
        self.shared.bulk_room.close();
        self.shared.ready.notify_all();
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread
            && thread.join().is_err()
        {
            tracing::error!("the store's writer thread panicked");
        }
    }
}

fn closed() -> Error {
    Error::Unavailable { reason: Unavailable::Closed, message: "the store is closed".into() }
}

/// Runs one command and says what is to become of its savepoint.
fn run<T, F>(scope: Option<&mut Scope<'_>>, command: F, sender: oneshot::Sender<Result<T>>) -> Ran
where
    T: Send + 'static,
    F: FnOnce(&mut Scope<'_>) -> Result<T>,
{
    let result = match scope {
        Some(scope) => catch_unwind(AssertUnwindSafe(|| command(scope)))
            .unwrap_or_else(|_| Err(Error::Internal("a command panicked".into()))),
        None => Err(Error::Internal("a command was not run".into())),
    };
    let broken = match &result {
        Err(Error::Unavailable { reason, message }) => Some((*reason, message.clone())),
        Ok(_) | Err(_) => None,
    };
    let keep = result.is_ok();
    let answer: Answer = Box::new(move |batch| {
        let result = match batch {
            Ok(()) => result,
            Err((reason, message)) => Err(Error::Unavailable { reason, message }),
        };
        // A caller that went away finds out by repeating.
        let _ = sender.send(result);
    });
    match broken {
        Some((reason, message)) => Ran::Broken(answer, reason, message),
        None if keep => Ran::Keep(answer),
        None => Ran::Undo(answer),
    }
}

/// Answers whoever waits when the thread ends, however it ends: a dropped job tells its caller that the store is
/// closed.
struct Last<'s>(&'s Shared);

impl Drop for Last<'_> {
    fn drop(&mut self) {
        let left = {
            let mut queues = self.0.queues.lock().unwrap_or_else(PoisonError::into_inner);
            queues.closed = true;
            let Queues { interactive, bulk, leisure, .. } = &mut *queues;
            [interactive, bulk, leisure].map(std::mem::take)
        };
        self.0.interactive_room.close();
        self.0.bulk_room.close();
        drop(left);
    }
}

fn write_until_closed(
    connection: &Connection,
    shared: &Shared,
    hints: &broadcast::Sender<Hint>,
    checkpointer: &Checkpointer,
) {
    let _last = Last(shared);
    loop {
        {
            let mut queues = shared.queues.lock().unwrap_or_else(PoisonError::into_inner);
            loop {
                let Some(due) = queues.due() else {
                    if queues.closed {
                        return;
                    }
                    queues = shared.ready.wait(queues).unwrap_or_else(PoisonError::into_inner);
                    continue;
                };
                let wait = due.saturating_duration_since(Instant::now());
                if wait.is_zero() {
                    break;
                }
                queues = shared.ready.wait_timeout(queues, wait).unwrap_or_else(PoisonError::into_inner).0;
            }
        }
        batch(connection, shared, hints, checkpointer);
    }
}

/// The next job: interactive ones first, those that have leisure last.
fn take(shared: &Shared) -> Option<Job> {
    let mut queues = shared.queues.lock().unwrap_or_else(PoisonError::into_inner);
    let job = queues.interactive.pop_front();
    job.or_else(|| queues.bulk.pop_front()).or_else(|| queues.leisure.pop_front())
}

/// Collects and commits one batch, then answers it.
fn batch(
    connection: &Connection,
    shared: &Shared,
    hints: &broadcast::Sender<Hint>,
    checkpointer: &Checkpointer,
) {
    let mut answers: Vec<Answer> = Vec::new();
    let mut published = Vec::new();
    let mut names = Vec::new();
    let (mut rows, mut bytes) = (0_usize, 0_usize);
    let mut failure = execute(connection, "BEGIN IMMEDIATE").err();
    // The clock starts now: a BEGIN that had to wait must not leave the batch empty, or nobody is ever answered.
    let started = Instant::now();
    let full = |commands: usize, rows: usize, bytes: usize| {
        commands >= MAX_COMMANDS || rows >= MAX_ROWS || bytes >= MAX_BYTES || started.elapsed() >= MAX_TIME
    };
    while answers.is_empty() || !full(answers.len(), rows, bytes) {
        let Some(job) = take(shared) else { break };
        rows += job.cost.rows;
        bytes += job.cost.bytes;
        names.push(job.name);
        if failure.is_some() {
            // BEGIN failed: whoever waits is told, without being run.
            answers.push((job.run)(None).answer());
            continue;
        }
        match one(connection, job) {
            Ok((answer, hints)) => {
                answers.push(answer);
                published.extend(hints);
            }
            Err((answer, why)) => {
                answers.push(answer);
                failure = Some(why);
                break;
            }
        }
    }
    if failure.is_none() {
        point(&names, "before_commit");
        failure = commit(connection).err();
    }
    if let Some((reason, message)) = failure {
        if !connection.is_autocommit()
            && let Err((_, message)) = execute(connection, "ROLLBACK")
        {
            tracing::error!(%message, "the store could not roll back");
        }
        tracing::error!(?reason, %message, commands = answers.len(), "a batch of the store failed");
        for answer in answers {
            answer(Err((reason, message.clone())));
        }
        return;
    }
    point(&names, "after_commit");
    for answer in answers {
        answer(Ok(()));
    }
    for hint in published {
        // No subscriber is no error.
        let _ = hints.send(hint);
    }
    checkpointer.committed(rows, bytes);
}

type Failure = (Unavailable, String);

/// Runs one command in its savepoint.
fn one(connection: &Connection, job: Job) -> std::result::Result<(Answer, Vec<Hint>), (Answer, Failure)> {
    if let Err(failure) = execute(connection, "SAVEPOINT command") {
        return Err(((job.run)(None).answer(), failure));
    }
    let mut scope = Scope { connection, hints: Vec::new() };
    let ran = (job.run)(Some(&mut scope));
    let (answer, undo) = match ran {
        Ran::Keep(answer) => (answer, false),
        Ran::Undo(answer) => (answer, true),
        Ran::Broken(answer, reason, message) => return Err((answer, (reason, message))),
    };
    if connection.is_autocommit() {
        return Err((answer, (Unavailable::Io, "the database rolled the transaction back".into())));
    }
    let end = if undo { "ROLLBACK TO command" } else { "RELEASE command" };
    if let Err(failure) = execute(connection, end) {
        return Err((answer, failure));
    }
    if undo {
        if let Err(failure) = execute(connection, "RELEASE command") {
            return Err((answer, failure));
        }
        scope.hints.clear();
    }
    Ok((answer, scope.hints))
}

fn commit(connection: &Connection) -> std::result::Result<(), Failure> {
    fail::fail_point!("store::commit", |_| Err((Unavailable::Io, "failpoint store::commit".to_owned())));
    execute(connection, "COMMIT")
}

fn execute(connection: &Connection, sql: &str) -> std::result::Result<(), Failure> {
    connection
        .prepare_cached(sql)
        .and_then(|mut statement| statement.execute([]))
        .map(|_| ())
        .map_err(|e| (classify(&e).unwrap_or(Unavailable::Io), e.to_string()))
}

/// The failpoints of a batch: `store::<method>::before_commit` and `store::<method>::after_commit`, once for each
/// command. The action `return` ends the process on the spot, as a crash would; the others do what they say.
#[cfg(feature = "failpoints")]
fn point(names: &[&'static str], when: &str) {
    for name in names {
        if fail::eval(&format!("store::{name}::{when}"), |_| ()).is_some() {
            std::process::abort();
        }
    }
}

#[cfg(not(feature = "failpoints"))]
fn point(_names: &[&'static str], _when: &str) {}

/// Arms the failpoints of this crate that `FAILPOINTS` names; other entries are other crates' matter.
#[cfg(feature = "failpoints")]
pub(super) fn arm() {
    let text = std::env::var("FAILPOINTS").unwrap_or_default();
    for (name, action) in text.split(';').filter_map(|entry| entry.trim().split_once('=')) {
        if name.starts_with("store::")
            && let Err(error) = fail::cfg(name, action)
        {
            tracing::error!(name, action, error, "a failpoint cannot be armed");
        }
    }
}
