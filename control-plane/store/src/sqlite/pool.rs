//! Connections that only read. A snapshot lasts one page: each call is one short transaction.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rusqlite::{Connection, OpenFlags};
use tokio::sync::Semaphore;

use crate::error::{Error, Result, Unavailable};

/// How many reads run at once; more wait.
const READERS: usize = 4;
/// Longest wait for a connection.
const WAIT: Duration = Duration::from_secs(30);

/// A few read-only connections.
pub(super) struct Pool {
    free: Arc<Mutex<Vec<Connection>>>,
    room: Arc<Semaphore>,
}

impl Pool {
    /// Opens the connections to a database that exists and is migrated.
    pub(super) fn open(path: &Path) -> rusqlite::Result<Self> {
        let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        let mut free = Vec::with_capacity(READERS);
        for _ in 0..READERS {
            let connection = Connection::open_with_flags(path, flags)?;
            connection.busy_timeout(Duration::from_secs(5))?;
            connection.set_prepared_statement_cache_capacity(64);
            // A page of the cache is 4 KiB: half a MiB each is enough for pages of a list.
            connection.pragma_update(None, "cache_size", -512)?;
            free.push(connection);
        }
        Ok(Self { free: Arc::new(Mutex::new(free)), room: Arc::new(Semaphore::new(READERS)) })
    }

    /// Runs a read in one snapshot. Cancel safe.
    pub(super) async fn run<T, F>(&self, read: F) -> Result<T>
    where
        T: Send + 'static,
        F: FnOnce(&Connection) -> Result<T> + Send + 'static,
    {
        let unavailable = |reason, message: &str| Error::Unavailable { reason, message: message.to_owned() };
        let room = tokio::time::timeout(WAIT, Arc::clone(&self.room).acquire_owned())
            .await
            .map_err(|_| unavailable(Unavailable::Busy, "no free connection"))?
            .map_err(|_| unavailable(Unavailable::Closed, "the store is closed"))?;
        let free = Arc::clone(&self.free);
        let work = move || {
            let _room = room;
            let taken = free.lock().unwrap_or_else(PoisonError::into_inner).pop();
            let Some(connection) = taken else {
                return Err(unavailable(Unavailable::Closed, "the store is closed"));
            };
            let result = snapshot(&connection, read);
            free.lock().unwrap_or_else(PoisonError::into_inner).push(connection);
            result
        };
        match tokio::task::spawn_blocking(work).await {
            Ok(result) => result,
            Err(e) => Err(Error::Internal(format!("a read did not end: {e}"))),
        }
    }

    /// Runs a short read where it is asked for: a row or a few, which come out of the page cache. Waking a thread for it,
    /// and the caller again, would take longer than the read. Goes to a thread as any other when all connections are
    /// busy. Cancel safe.
    pub(super) async fn quick<T, F>(&self, read: F) -> Result<T>
    where
        T: Send + 'static,
        F: FnOnce(&Connection) -> Result<T> + Send + 'static,
    {
        let Ok(_room) = self.room.try_acquire() else { return self.run(read).await };
        let taken = self.free.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let Some(connection) = taken else { return self.run(read).await };
        let result = snapshot(&connection, read);
        self.free.lock().unwrap_or_else(PoisonError::into_inner).push(connection);
        result
    }

    /// Lets running reads end and closes the connections.
    pub(super) async fn close(&self) {
        if let Ok(all) = self.room.acquire_many(u32::try_from(READERS).unwrap_or(u32::MAX)).await {
            self.room.close();
            drop(all);
        }
        self.free.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }
}

fn snapshot<T>(connection: &Connection, read: impl FnOnce(&Connection) -> Result<T>) -> Result<T> {
    connection.prepare_cached("BEGIN DEFERRED")?.execute([])?;
    // A panicking read must give the connection back without its transaction, or its snapshot would last.
    let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| read(connection)))
        .unwrap_or_else(|_| Err(Error::Internal("a read panicked".into())));
    connection.prepare_cached("COMMIT")?.execute([])?;
    result
}
