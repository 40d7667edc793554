//! What the runner knows of a session, on disk. The session outlives its processes and its turns.

use std::{
    collections::HashMap,
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
};

use roundhouse_engines::{Carry, Fingerprint, NativeRef, Permissions};
use serde::{Deserialize, Serialize};

use crate::{
    context::Context,
    error::Error,
    state_dir::{StateDir, StateError, make_dir, read_json, write_json},
};

/// What a process was launched with; a turn that wants something else needs another process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Launched {
    /// Model.
    pub model: String,
    /// Effort. Unset: the engine's default.
    pub effort: Option<String>,
    /// What may be done without asking.
    pub permissions: Permissions,
    /// SHA-256 of the agent's prompt.
    pub prompt_sha256: String,
}

/// One lock per session: its record is read, changed and written whole by one writer at a time.
#[derive(Debug, Default)]
pub struct RecordLocks {
    locks: Mutex<HashMap<String, Arc<Mutex<()>>>>,
}

impl RecordLocks {
    /// Does something while nobody else writes the session's record. Blocking; not to be nested.
    pub(crate) fn with<T>(&self, session_id: &str, work: impl FnOnce() -> T) -> T {
        let table = || self.locks.lock().unwrap_or_else(PoisonError::into_inner);
        let lock = Arc::clone(table().entry(session_id.to_owned()).or_default());
        let done = {
            let _one = lock.lock().unwrap_or_else(PoisonError::into_inner);
            work()
        };
        drop(lock);
        let mut table = table();
        // Whoever waits for it has it, too.
        if table.get(session_id).is_some_and(|lock| Arc::strong_count(lock) == 1) {
            table.remove(session_id);
        }
        done
    }
}

/// `session.json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SessionRecord {
    /// Our id of the session.
    pub session_id: String,
    /// Its conversation.
    pub conversation_id: String,
    /// Canonical path of its workspace.
    pub workspace: PathBuf,
    /// Engine.
    pub engine: String,
    /// Name of the credential set.
    pub identity: String,
    /// The engine home that its files lie in.
    pub home: PathBuf,
    /// The native session.
    pub native: Option<NativeRef>,
    /// Whether the engine ever proved an opening.
    pub opened: bool,
    /// What the last process was launched with.
    pub launched: Launched,
    /// The newest process was launched with another prompt than the one before it, in a way that reaches the engine.
    #[serde(default)]
    pub prompt_changed: bool,
    /// What the translator left behind.
    pub carry: Carry,
    /// The session's file at the end of the last turn.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fingerprint: Option<Fingerprint>,
    /// The spool of the newest process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub spool_id: Option<String>,
    /// Why it cannot be used any more. Never taken back.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unusable: Option<String>,
}

impl SessionRecord {
    /// Reads a session's record; none when the session is not known here. Blocking.
    ///
    /// # Errors
    /// [`Error::Storage`]; also for a damaged record, which is never taken for a missing one.
    pub(crate) fn load(state: &StateDir, session_id: &str) -> Result<Option<Self>, Error> {
        read_json(&state.session_record(session_id)).map_err(|error| match error {
            StateError::Io { action, source, .. } => Error::Storage { action, source },
            other => {
                Error::Storage { action: "read a session", source: std::io::Error::other(other.to_string()) }
            }
        })
    }

    /// Takes in the native session that the engine proved to have opened. Answers whether that is news.
    pub(crate) fn note_opened(&mut self, proved: NativeRef) -> bool {
        // Not every engine says where the file lies; what is known of the same session stays.
        let known = self.native.as_ref().filter(|known| known.id == proved.id);
        let file = proved.file.or_else(|| known.and_then(|known| known.file.clone()));
        let native = Some(NativeRef { id: proved.id, file });
        let news = !self.opened || self.native != native;
        self.opened = true;
        self.native = native;
        news
    }

    /// Changes a session's record; `change` answers whether it did. None known: nothing is done. On disk when this
    /// returns. Blocking.
    ///
    /// # Errors
    /// [`Error::Storage`].
    pub(crate) fn update(
        context: &Context,
        session_id: &str,
        change: impl FnOnce(&mut Self) -> bool,
    ) -> Result<(), Error> {
        context.records.with(session_id, || {
            let Some(mut record) = Self::load(&context.state, session_id)? else { return Ok(()) };
            if change(&mut record) { record.store(&context.state) } else { Ok(()) }
        })
    }

    /// Writes it; on disk when this returns. Blocking. Others may write it, too: see [`RecordLocks::with`].
    ///
    /// # Errors
    /// [`Error::Storage`].
    pub(crate) fn store(&self, state: &StateDir) -> Result<(), Error> {
        let path = state.session_record(&self.session_id);
        if let Some(directory) = path.parent() {
            make_dir(directory).map_err(Error::storage("create the session's directory"))?;
        }
        write_json(&path, self).map_err(Error::storage("write the session"))
    }
}
