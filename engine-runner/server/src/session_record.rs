//! What the runner knows of a session, on disk. The session outlives its processes and its turns.
//!
//! What a turn leaves is put on disk with the turn's end, in its journal, and the session's own file is written after the
//! end was told. Until then the newer record is held here, and found by whoever loads it; the journal is not given up
//! before the file is on disk.

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
    /// Grows with every change.
    #[serde(default)]
    pub revision: u64,
    /// Why it cannot be used any more. Never taken back.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unusable: Option<String>,
}

/// Records that are newer than their files, by session. One lock per session: whoever writes a file has it.
#[derive(Debug, Default)]
pub(crate) struct Held(Mutex<HashMap<String, Arc<Mutex<Option<SessionRecord>>>>>);

impl Held {
    /// Works on what is held of a session while nobody else does. Only sessions of which something is held, or which are
    /// worked on, take room.
    fn with<T>(&self, session_id: &str, work: impl FnOnce(&mut Option<SessionRecord>) -> T) -> T {
        let table = || self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let slot = Arc::clone(table().entry(session_id.to_owned()).or_default());
        let done = work(&mut slot.lock().unwrap_or_else(PoisonError::into_inner));
        drop(slot);
        let mut table = table();
        // Nobody else has it, and nobody can come to have it while the table is locked.
        let free = table
            .get_mut(session_id)
            .and_then(Arc::get_mut)
            .is_some_and(|slot| slot.get_mut().unwrap_or_else(PoisonError::into_inner).is_none());
        if free {
            table.remove(session_id);
        }
        done
    }
}

impl SessionRecord {
    /// Reads a session's record; none when the session is not known here. Blocking.
    ///
    /// # Errors
    /// [`Error::Storage`]; also for a damaged record, which is never taken for a missing one.
    pub(crate) fn load(state: &StateDir, session_id: &str) -> Result<Option<Self>, Error> {
        state.held.with(session_id, |held| match held {
            Some(record) => Ok(Some(record.clone())),
            None => Self::read(state, session_id),
        })
    }

    fn read(state: &StateDir, session_id: &str) -> Result<Option<Self>, Error> {
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
        state.held.with(&self.session_id, |held| {
            Self { revision: self.revision + 1, ..self.clone() }.write(state)?;
            *held = None;
            Ok(())
        })
    }

    fn write(&self, state: &StateDir) -> Result<(), Error> {
        let path = state.session_record(&self.session_id);
        if let Some(directory) = path.parent() {
            make_dir(directory).map_err(Error::storage("create the session's directory"))?;
        }
        write_json(&path, self).map_err(Error::storage("write the session"))
    }

    /// Holds it as the newest one until [`SessionRecord::flush`]. Answers it as a journal keeps it, for
    /// [`SessionRecord::recover`].
    ///
    /// # Errors
    /// [`Error::Internal`]; nothing of ours fails to serialise.
    pub(crate) fn hold(self, state: &StateDir) -> Result<String, Error> {
        let record = Self { revision: self.revision + 1, ..self };
        let text = serde_json::to_string(&record)
            .map_err(|error| Error::Internal(format!("session record: {error}")))?;
        let session_id = record.session_id.clone();
        state.held.with(&session_id, |held| *held = Some(record));
        Ok(text)
    }

    /// Puts on disk what is held of a session. Blocking; repeatable.
    ///
    /// # Errors
    /// [`Error::Storage`]; it stays held.
    pub(crate) fn flush(state: &StateDir, session_id: &str) -> Result<(), Error> {
        state.held.with(session_id, |held| {
            if let Some(record) = held {
                record.write(state)?;
                *held = None;
            }
            Ok(())
        })
    }

    /// Takes what a journal kept, unless the session's file is as new. On disk when this returns. Blocking.
    ///
    /// # Errors
    /// [`Error::Storage`].
    pub(crate) fn recover(state: &StateDir, kept: &str) -> Result<(), Error> {
        let record: Self = serde_json::from_str(kept).map_err(|error| Error::Storage {
            action: "read a session in a journal",
            source: std::io::Error::other(error),
        })?;
        // A file that cannot be read says nothing about what is newer, and is left to whoever needs it.
        match Self::load(state, &record.session_id) {
            Ok(Some(known)) if known.revision >= record.revision => Ok(()),
            Ok(_) => record.write(state),
            Err(error) => {
                tracing::warn!(error = crate::error::chain(&error), "a session's record is left as it is");
                Ok(())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(model: &str) -> SessionRecord {
        SessionRecord {
            session_id: "ses_1".to_owned(),
            conversation_id: "cnv_1".to_owned(),
            workspace: "/w".into(),
            engine: "claude-code".to_owned(),
            identity: "default".to_owned(),
            home: "/h".into(),
            native: None,
            opened: true,
            launched: Launched {
                model: model.to_owned(),
                effort: None,
                permissions: Permissions::Ask,
                prompt_sha256: String::new(),
            },
            prompt_changed: false,
            carry: Carry::default(),
            fingerprint: None,
            spool_id: None,
            revision: 0,
            unusable: None,
        }
    }

    fn model(state: &StateDir) -> Option<String> {
        SessionRecord::load(state, "ses_1").unwrap().map(|record| record.launched.model)
    }

    #[test]
    fn s04_what_is_held_is_seen_at_once_and_comes_to_the_disk_by_flush_or_journal() {
        let root = tempfile::tempdir().unwrap();
        let state = StateDir::open(root.path()).unwrap();
        record("first").store(&state).unwrap();
        let mut next = SessionRecord::load(&state, "ses_1").unwrap().unwrap();
        next.launched.model = "second".to_owned();
        let journalled = next.hold(&state).unwrap();
        assert_eq!(model(&state).as_deref(), Some("second"));
        drop(state);
        // The runner died before it wrote the file: the journal has it.
        let state = StateDir::open(root.path()).unwrap();
        assert_eq!(model(&state).as_deref(), Some("first"));
        SessionRecord::recover(&state, &journalled).unwrap();
        assert_eq!(model(&state).as_deref(), Some("second"));
        // A later turn has written the file since: an older journal changes nothing.
        let mut third = SessionRecord::load(&state, "ses_1").unwrap().unwrap();
        third.launched.model = "third".to_owned();
        third.clone().hold(&state).unwrap();
        SessionRecord::flush(&state, "ses_1").unwrap();
        SessionRecord::flush(&state, "ses_1").unwrap();
        SessionRecord::recover(&state, &journalled).unwrap();
        drop(state);
        let state = StateDir::open(root.path()).unwrap();
        assert_eq!(model(&state).as_deref(), Some("third"));
        // What is stored while an older record is held stands.
        third.clone().hold(&state).unwrap();
        record("fourth").store(&state).unwrap();
        SessionRecord::flush(&state, "ses_1").unwrap();
        assert_eq!(model(&state).as_deref(), Some("fourth"));
        // What is on disk takes no room, however many sessions were looked at.
        for number in 0..100 {
            assert!(SessionRecord::load(&state, &format!("ses_other{number}")).unwrap().is_none());
        }
        assert_eq!(state.held.0.lock().unwrap().len(), 0);
    }
}
