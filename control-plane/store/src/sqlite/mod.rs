//! The store on SQLite: one file, one process, one writer thread with group commit, a few readers.
//!
//! Write-ahead log, `synchronous = FULL`, foreign keys, STRICT tables. A lock file beside the database keeps a
//! second process out. Checkpoints run on a connection of their own.

mod changes;
mod checkpoint;
mod close;
mod conversations;
mod dispatch;
mod events;
mod ledger;
mod lock;
mod migrate;
mod page;
mod permissions;
mod pool;
mod queue;
mod rows;
mod runners;
mod slots;
mod sql;
mod store;
mod summaries;
pub mod upkeep;
mod writer;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use roundhouse_domain::limits::MAX_WAITING;
use rusqlite::{Connection, OpenFlags};
use tokio::sync::broadcast;

use crate::error::{Error, Result};
use crate::hint::Hint;
use checkpoint::{Checkpointer, LOG_LIMIT};
use lock::Lock;
use pool::Pool;
use writer::{Cost, Lane, Scope, Writer};

/// How many hints a slow subscriber may be behind before it is told that it missed some.
const HINTS: usize = 1_024;
/// How long one connection waits for another one of ours.
const BUSY: Duration = Duration::from_secs(10);
/// Statements that are kept prepared on the writer.
const STATEMENTS: usize = 128;

/// What can be set about the store.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Most messages that wait in one conversation.
    pub max_waiting: usize,
}

impl Default for Settings {
    fn default() -> Self {
        Self { max_waiting: MAX_WAITING }
    }
}

/// The store on SQLite. Cheap to clone; all clones are one store.
#[derive(Clone)]
pub struct SqliteStore {
    inner: Arc<Inner>,
}

struct Inner {
    path: PathBuf,
    kept_copy: Option<PathBuf>,
    max_waiting: usize,
    hints: broadcast::Sender<Hint>,
    pool: Pool,
    writer: Writer,
    checkpointer: Arc<Checkpointer>,
    lock: std::sync::Mutex<Option<Lock>>,
}

impl std::fmt::Debug for SqliteStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SqliteStore").field("path", &self.inner.path).finish_non_exhaustive()
    }
}

impl SqliteStore {
    /// Opens the database at `path`, makes it if it is missing, and brings its schema up to date; a copy named
    /// `<path>.schema-<n>.bak` is kept before an existing one is migrated. The folder must exist.
    ///
    /// Blocks while it opens and migrates.
    ///
    /// # Errors
    /// [`Error::InUse`] when another process has it, [`Error::NewerSchema`], [`Error::Open`], and
    /// [`Error::Unavailable`] when it cannot be written.
    pub fn open(path: impl Into<PathBuf>) -> Result<Self> {
        Self::open_with(path, Settings::default())
    }

    /// As [`SqliteStore::open`], with other settings than the usual ones.
    ///
    /// # Errors
    /// As [`SqliteStore::open`].
    pub fn open_with(path: impl Into<PathBuf>, settings: Settings) -> Result<Self> {
        #[cfg(feature = "failpoints")]
        writer::arm();
        let path = path.into();
        let lock = Lock::take(&path)?;
        create_private(&path)?;
        let mut writer = connect(&path)?;
        let kept_copy = migrate::migrate(&mut writer, &path, migrate::MIGRATIONS)?;
        let failed = |e: std::io::Error| Error::Open { path: path.clone(), message: e.to_string() };
        let pool = Pool::open(&path)?;
        let checkpointer = Arc::new(Checkpointer::start(connect(&path)?).map_err(failed)?);
        let (hints, _) = broadcast::channel(HINTS);
        let writer = Writer::start(writer, hints.clone(), Arc::clone(&checkpointer)).map_err(failed)?;
        let Settings { max_waiting } = settings;
        let lock = std::sync::Mutex::new(Some(lock));
        let inner = Inner { path, kept_copy, max_waiting, hints, pool, writer, checkpointer, lock };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// Where the database is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.inner.path
    }

    /// The copy that was kept because opening migrated the schema; none when nothing was migrated.
    #[must_use]
    pub fn kept_copy(&self) -> Option<&Path> {
        self.inner.kept_copy.as_deref()
    }

    async fn write<T, F>(&self, name: &'static str, command: F) -> Result<T>
    where
        T: Send + 'static,
        F: FnOnce(&mut Scope<'_>) -> Result<T> + Send + 'static,
    {
        // A command touches a handful of rows.
        self.inner.writer.run(name, Lane::Interactive, Cost { rows: 4, bytes: 1_024 }, command).await
    }

    async fn write_events<T, F>(&self, name: &'static str, lane: Lane, cost: Cost, command: F) -> Result<T>
    where
        T: Send + 'static,
        F: FnOnce(&mut Scope<'_>) -> Result<T> + Send + 'static,
    {
        self.inner.writer.run(name, lane, cost, command).await
    }

    async fn read<T, F>(&self, read: F) -> Result<T>
    where
        T: Send + 'static,
        F: FnOnce(&Connection) -> Result<T> + Send + 'static,
    {
        self.inner.pool.run(read).await
    }

    /// For reads of a row or a few.
    async fn quick<T, F>(&self, read: F) -> Result<T>
    where
        T: Send + 'static,
        F: FnOnce(&Connection) -> Result<T> + Send + 'static,
    {
        self.inner.pool.quick(read).await
    }
}

impl Inner {
    /// Ends the threads. Blocks.
    fn stop(&self) {
        self.writer.close();
        self.checkpointer.close();
        self.lock.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take();
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Makes an empty file that only its owner can read, unless there is one.
fn create_private(path: &Path) -> Result<()> {
    use std::os::unix::fs::OpenOptionsExt;
    let made = std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
    match made {
        Ok(_) => Ok(()),
        Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => Ok(()),
        Err(e) => Err(Error::Open { path: path.to_owned(), message: e.to_string() }),
    }
}

/// A connection that may write, set up as design and durability want it.
fn connect(path: &Path) -> Result<Connection> {
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let connection = Connection::open_with_flags(path, flags)?;
    connection.busy_timeout(BUSY)?;
    connection.set_prepared_statement_cache_capacity(STATEMENTS);
    let mode: String = connection.pragma_update_and_check(None, "journal_mode", "WAL", |row| row.get(0))?;
    if !mode.eq_ignore_ascii_case("wal") {
        let message = format!("the write-ahead log cannot be used here, only {mode}");
        return Err(Error::Open { path: path.to_owned(), message });
    }
    connection.pragma_update(None, "synchronous", "FULL")?;
    connection.pragma_update(None, "foreign_keys", true)?;
    connection.pragma_update(None, "trusted_schema", false)?;
    connection.pragma_update_and_check(None, "wal_autocheckpoint", 0, |_| Ok(()))?;
    connection.pragma_update_and_check(None, "journal_size_limit", LOG_LIMIT, |_| Ok(()))?;
    connection.pragma_update(None, "cache_size", -4_096)?;
    // What a statement needs to be undone is small, and is no file's business.
    connection.pragma_update(None, "temp_store", "MEMORY")?;
    Ok(connection)
}

#[cfg(test)]
mod tests;
