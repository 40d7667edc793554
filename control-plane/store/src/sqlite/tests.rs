//! Tests of the implementation that the conformance suite cannot see.

use std::path::PathBuf;

use super::*;
use crate::conformance::Backend;

/// A database in a folder of its own.
struct Folder {
    dir: tempfile::TempDir,
}

impl Folder {
    fn new() -> Self {
        Self { dir: tempfile::tempdir().unwrap() }
    }

    fn path(&self) -> PathBuf {
        self.dir.path().join("control.db")
    }
}

impl Backend for Folder {
    type Store = SqliteStore;

    async fn open(&self) -> SqliteStore {
        SqliteStore::open(self.path()).unwrap()
    }
}

mod conforms {
    use super::*;

    crate::conformance_tests!(Folder::new());
}
