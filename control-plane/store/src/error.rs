//! What can go wrong, by what the caller can do about it.

use std::path::PathBuf;

use roundhouse_domain::conflict::{Conflict, Kind};

/// The result of a store method.
pub type Result<T> = std::result::Result<T, Error>;

/// Why the store cannot serve just now.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Unavailable {
    /// The disk is full.
    DiskFull,
    /// The database cannot be written.
    ReadOnly,
    /// The disk answers with errors.
    Io,
    /// Too much waits, or another process is in the way.
    Busy,
    /// The store was closed.
    Closed,
}

/// An error of the store. Whatever it is, nothing of the intent was stored, except where a method says otherwise.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Something that the call names does not exist.
    #[error("there is no {kind} {id}")]
    NotFound {
        /// What kind of thing.
        kind: Kind,
        /// Its id.
        id: String,
    },
    /// What is stored stands in the way.
    #[error(transparent)]
    Conflict(#[from] Conflict),
    /// The call itself is wrong, whatever is stored.
    #[error("{field}: {problem}")]
    Invalid {
        /// The field.
        field: &'static str,
        /// What is wrong with it.
        problem: String,
    },
    /// STORE_UNAVAILABLE: the same call may succeed later. The batch in which it stood was rolled back.
    #[error("the store is unavailable ({reason:?}): {message}")]
    Unavailable {
        /// Why.
        reason: Unavailable,
        /// What the database said.
        message: String,
    },
    /// Another process has the database open.
    #[error("{} is in use by another process (lock file {})", path.display(), lock.display())]
    InUse {
        /// The database.
        path: PathBuf,
        /// Its lock file.
        lock: PathBuf,
    },
    /// The database was written by a newer version.
    #[error(
        "{} has schema version {found}, this program knows up to {known}: it was written by a newer version; \
         install that version, or restore the copy that was kept beside the database before the migration",
        path.display()
    )]
    NewerSchema {
        /// The database.
        path: PathBuf,
        /// Its schema version.
        found: usize,
        /// The newest schema version this program knows.
        known: usize,
    },
    /// The database cannot be opened or migrated.
    #[error("cannot open {}: {message}", path.display())]
    Open {
        /// The database.
        path: PathBuf,
        /// What went wrong.
        message: String,
    },
    /// What is stored cannot be read back: a bug or a damaged file.
    #[error("stored data cannot be read: {0}")]
    Corrupt(String),
    /// A bug.
    #[error("internal error of the store: {0}")]
    Internal(String),
}

impl Error {
    /// A [`Error::NotFound`].
    pub fn not_found(kind: Kind, id: impl Into<String>) -> Self {
        Self::NotFound { kind, id: id.into() }
    }

    /// An [`Error::Invalid`].
    pub fn invalid(field: &'static str, problem: impl Into<String>) -> Self {
        Self::Invalid { field, problem: problem.into() }
    }

    /// Whether the same call may succeed later without anything else being changed.
    #[must_use]
    pub const fn is_retryable(&self) -> bool {
        matches!(self, Self::Unavailable { .. })
    }
}
