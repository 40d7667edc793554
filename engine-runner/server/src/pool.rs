//! Idle engines: each is watched by a task of its own until a turn wants it, its time is up, or room is needed.

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use roundhouse_engines::Output;
use tokio::{
    sync::{mpsc, oneshot},
    time::Instant,
};

use crate::{
    context::Context,
    engine::{Engine, Token, engine_frame},
    keeper::Batch,
};

/// Time that a closed engine has after the end of its input, and after SIGTERM.
pub(crate) const SETTLE: Duration = Duration::from_secs(2);
/// See [`SETTLE`].
pub(crate) const TERM: Duration = Duration::from_secs(5);

enum Ask {
    /// Hand the engine over, if it is alive and quiet.
    Take(oneshot::Sender<Option<Box<Engine>>>),
    /// End it.
    Close(oneshot::Sender<()>),
}

#[derive(Debug)]
struct Idle {
    asks: mpsc::Sender<Ask>,
    since: Instant,
    spool_id: String,
    keeper_pid: i32,
    engine_pid: i32,
    home: PathBuf,
}

impl std::fmt::Debug for Ask {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Take(_) => "Take",
            Self::Close(_) => "Close",
        })
    }
}

/// The idle engines, by session, and the count of all.
#[derive(Debug, Default)]
pub struct Pool {
    idle: Mutex<HashMap<String, Idle>>,
    held: Arc<AtomicUsize>,
}

/// An idle engine, for display.
#[derive(Debug, Clone)]
pub struct IdleFact {
    /// Its spool.
    pub spool_id: String,
    /// Its keeper.
    pub keeper_pid: i32,
    /// The engine as it sees itself.
    pub engine_pid: i32,
}

impl Pool {
    /// Counts an engine.
    #[must_use]
    pub fn token(&self) -> Token {
        Token::new(&self.held)
    }

    /// Engines that are held, idle or at work.
    #[must_use]
    pub fn held(&self) -> usize {
        self.held.load(Ordering::Relaxed)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<String, Idle>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The idle engine of a session, for display.
    #[must_use]
    pub fn fact(&self, session_id: &str) -> Option<IdleFact> {
        self.lock().get(session_id).map(|idle| IdleFact {
            spool_id: idle.spool_id.clone(),
            keeper_pid: idle.keeper_pid,
            engine_pid: idle.engine_pid,
        })
    }

    /// Takes the idle engine of a session, if there is one that can serve a turn. An engine that is not quiet is
    /// ended, and the end of one that is being closed is awaited, so that the caller can start another on the session.
    pub async fn take(&self, session_id: &str) -> Option<Box<Engine>> {
        let idle = self.lock().remove(session_id)?;
        let (answer, engine) = oneshot::channel();
        idle.asks.send(Ask::Take(answer)).await.ok()?;
        engine.await.ok().flatten()
    }

    /// Ends the idle engine of a session and waits until it is gone. Answers whether there was one.
    pub async fn close(&self, session_id: &str) -> bool {
        let asks = self.lock().get(session_id).map(|idle| idle.asks.clone());
        match asks {
            Some(asks) => {
                end(asks).await;
                true
            }
            None => false,
        }
    }

    /// Ends the least recently used idle engine and waits until it is gone. Answers whether there was one.
    pub async fn close_oldest(&self) -> bool {
        let oldest = self.lock().values().min_by_key(|idle| idle.since).map(|idle| idle.asks.clone());
        match oldest {
            Some(asks) => {
                end(asks).await;
                true
            }
            None => false,
        }
    }

    /// Makes room for one more engine.
    pub async fn make_room(&self, limit: u32) {
        while self.held() >= usize::try_from(limit.max(1)).unwrap_or(usize::MAX) {
            if !self.close_oldest().await {
                return;
            }
        }
    }

    /// Ends idle engines until no more than `limit` are held, or none is idle.
    async fn trim(&self, limit: u32) {
        while self.held() > usize::try_from(limit.max(1)).unwrap_or(usize::MAX) {
            if !self.close_oldest().await {
                return;
            }
        }
    }

    /// Ends the idle engines of a home and waits until they are gone. The home's lock must not be held.
    pub async fn close_home(&self, home: &Path) {
        let here: Vec<_> =
            self.lock().values().filter(|idle| idle.home == home).map(|idle| idle.asks.clone()).collect();
        futures::future::join_all(here.into_iter().map(end)).await;
    }

    /// Ends all idle engines.
    pub async fn close_all(&self) {
        let all: Vec<_> = self.lock().values().map(|idle| idle.asks.clone()).collect();
        futures::future::join_all(all.into_iter().map(end)).await;
    }

    fn forget(&self, session_id: &str, spool_id: &str) {
        let mut idle = self.lock();
        if idle.get(session_id).is_some_and(|idle| idle.spool_id == spool_id) {
            idle.remove(session_id);
        }
    }
}

/// Has an idle engine ended, and waits until it is gone.
async fn end(asks: mpsc::Sender<Ask>) {
    let (answer, done) = oneshot::channel();
    if asks.send(Ask::Close(answer)).await.is_ok() {
        let _ = done.await;
    }
}

/// Gives an engine that works for no turn to the pool.
pub(crate) fn put(context: &Arc<Context>, engine: Box<Engine>) {
    let (asks, rx) = mpsc::channel(4);
    let idle = Idle {
        asks,
        since: Instant::now(),
        spool_id: engine.spool_id.clone(),
        keeper_pid: engine.keeper.pid(),
        engine_pid: engine.engine_pid,
        home: engine.home.clone(),
    };
    let session_id = engine.session_id.clone();
    context.pool.lock().insert(session_id, idle);
    let watched = Arc::clone(context);
    context.tasks.spawn(watch(watched, engine, rx));
    // Those at work are not ended for the limit, so it may be that only now there is one to end.
    let limit = context.settings.max_warm_engines;
    if context.pool.held() > usize::try_from(limit.max(1)).unwrap_or(usize::MAX) {
        let trimmed = Arc::clone(context);
        context.tasks.spawn(async move { trimmed.pool.trim(limit).await });
    }
}

async fn watch(context: Arc<Context>, mut engine: Box<Engine>, mut asks: mpsc::Receiver<Ask>) {
    let ttl = tokio::time::sleep(context.settings.warm_ttl);
    tokio::pin!(ttl);
    let answer = loop {
        tokio::select! {
            biased;
            batch = engine.frames.recv() => match batch {
                Some(Batch::Frames(frames)) => {
                    for frame in &frames {
                        read(&mut engine, frame);
                    }
                }
                Some(Batch::Gone) | None => {
                    engine.gone = true;
                    break None;
                }
            },
            ask = asks.recv() => match ask {
                Some(Ask::Take(answer)) => {
                    if engine.translator.standing().quiescent && !engine.keeper.is_dead() {
                        // A turn that gave up meanwhile gives it back.
                        match answer.send(Some(engine)) {
                            Ok(()) | Err(None) => return,
                            Err(Some(back)) => {
                                engine = back;
                                break None;
                            }
                        }
                    }
                    break Some(answer);
                }
                Some(Ask::Close(done)) => {
                    let (session_id, spool_id) = (engine.session_id.clone(), engine.spool_id.clone());
                    close(&context, engine).await;
                    context.pool.forget(&session_id, &spool_id);
                    let _ = done.send(());
                    return;
                }
                // Forgotten without a word: nobody can ask any more.
                None => break None,
            },
            () = &mut ttl => break None,
        }
    };
    // It stays findable until it is gone: whoever wants its session meanwhile asks here, and gets its answer, none, when
    // this task ends.
    let (session_id, spool_id) = (engine.session_id.clone(), engine.spool_id.clone());
    close(&context, engine).await;
    context.pool.forget(&session_id, &spool_id);
    if let Some(answer) = answer {
        let _ = answer.send(None);
    }
}

/// Ends an engine under its home's lock.
pub(crate) async fn close(context: &Context, mut engine: Box<Engine>) {
    let _home = context.homes.lock(&engine.home).await;
    tracing::debug!(session = engine.session_id, spool = engine.spool_id, "an engine is closed");
    engine.release(SETTLE, TERM).await;
}

/// Output of an engine that works for no turn.
pub(crate) fn read(engine: &mut Engine, frame: &roundhouse_process::Frame) {
    engine.note_frame(frame);
    let Some(frame) = engine_frame(frame) else { return };
    for output in engine.translator.feed(frame) {
        match output {
            Output::SessionNotice { notice } => tracing::info!(
                session = engine.session_id,
                spool = engine.spool_id,
                code = notice.code,
                "an idle engine printed output of no turn"
            ),
            // Also an idle engine waits for ever for what it asked.
            Output::Reply(line) => drop(engine.deliver(line)),
            _ => {}
        }
    }
}

/// Whether the host is short of memory: little of it is available, or tasks stall on it.
#[must_use]
pub(crate) fn memory_is_short() -> bool {
    let proc = memory_facts();
    let meminfo = std::fs::read_to_string(proc.join("meminfo")).unwrap_or_default();
    let pressure = std::fs::read_to_string(proc.join("pressure/memory")).unwrap_or_default();
    is_short(&meminfo, &pressure)
}

/// Where the host tells of its memory; a test has files of its own.
fn memory_facts() -> PathBuf {
    #[cfg(feature = "failpoints")]
    if let Some(directory) = std::env::var_os(TEST_MEMORY) {
        return directory.into();
    }
    PathBuf::from("/proc")
}

/// How often it is looked at.
fn memory_round() -> Duration {
    #[cfg(feature = "failpoints")]
    if std::env::var_os(TEST_MEMORY).is_some() {
        return Duration::from_millis(100);
    }
    Duration::from_secs(15)
}

/// The variable that names a test's own files.
#[cfg(feature = "failpoints")]
const TEST_MEMORY: &str = "FAILPOINT_MEMORY";

fn is_short(meminfo: &str, pressure: &str) -> bool {
    let field = |name: &str| -> Option<u64> {
        meminfo.lines().find_map(|line| line.strip_prefix(name)?.trim().trim_end_matches(" kB").parse().ok())
    };
    if let (Some(total), Some(available)) = (field("MemTotal:"), field("MemAvailable:"))
        && available.saturating_mul(100) < total.saturating_mul(8)
    {
        return true;
    }
    pressure
        .lines()
        .find_map(|line| line.strip_prefix("some avg10=")?.split(' ').next()?.parse::<f64>().ok())
        .is_some_and(|stalled| stalled > 20.0)
}

/// Ends idle engines one by one while memory is short.
pub(crate) async fn watch_memory(context: Arc<Context>) {
    let mut tick = tokio::time::interval(memory_round());
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            () = context.shutdown.cancelled() => return,
            _ = tick.tick() => {
                if memory_is_short() && context.pool.close_oldest().await {
                    tracing::info!("memory is short: the least recently used idle engine was closed");
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_pressure_is_read_from_both_sources() {
        let plenty = "MemTotal: 1000 kB\nMemAvailable: 500 kB\n";
        let little = "MemTotal: 1000 kB\nMemAvailable: 79 kB\n";
        let calm =
            "some avg10=0.10 avg60=0.00 avg300=0.00 total=1\nfull avg10=99.0 avg60=0 avg300=0 total=0\n";
        let stalled = "some avg10=20.50 avg60=0.00 avg300=0.00 total=1\n";
        assert!(!is_short(plenty, calm));
        assert!(is_short(little, calm));
        assert!(is_short(plenty, stalled));
        assert!(!is_short("", ""));
    }
}
