//! The lock file: one process per database. The lock goes with the process, however it ends.

use std::fs::{File, OpenOptions, TryLockError};
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

/// The held lock.
pub(super) struct Lock {
    _file: File,
}

impl Lock {
    /// Where the lock file of a database is.
    pub(super) fn path(database: &Path) -> PathBuf {
        let mut name = database.as_os_str().to_owned();
        name.push(".lock");
        PathBuf::from(name)
    }

    /// Takes the lock or says who is in the way. The file itself stays for ever: removing it would let two
    /// processes lock two files of one name.
    pub(super) fn take(database: &Path) -> Result<Self> {
        let lock = Self::path(database);
        let failed = |e: std::io::Error| {
            let message = format!("its lock file {} cannot be used: {e}", lock.display());
            Error::Open { path: database.to_owned(), message }
        };
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false);
        let file = options.open(&lock).map_err(failed)?;
        match file.try_lock() {
            Ok(()) => Ok(Self { _file: file }),
            Err(TryLockError::WouldBlock) => Err(Error::InUse { path: database.to_owned(), lock }),
            Err(TryLockError::Error(e)) => Err(failed(e)),
        }
    }
}
