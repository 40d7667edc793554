//! The runner's state directory: who it belongs to, and where things lie in it.
//!
//! ```text
//! runner.lock                       held while a runner runs here
//! runner.json                       runner id, bound control plane
//! epochs/<conversation>             highest epoch seen
//! sessions/<session>/session.json   what is known of a session
//! sessions/<session>/spools/<spool> one keeper, one engine process
//! turns/<turn>/journal              what happened in a turn
//! turns/<turn>/tombstone.json       what is left of it after Acknowledge
//! held/<turn>                       a lost turn whose keeper may live, and its workspace
//! homes/<workspace>/<engine>/<identity>
//! engines/<package>/<version>       installed CLIs
//! tmp/<spool>                       temporary files of one process
//! ```

use std::{
    fs::{self, DirBuilder, File, OpenOptions, TryLockError},
    io::{self, Write as _},
    os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::{ids, session_record::Held};

/// Why a state directory cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// Another runner runs here.
    #[error(
        "another engine-runner is using the state directory {0}; stop it, or give this one its own with --state-dir"
    )]
    InUse(PathBuf),
    /// A file of ours does not hold what it should.
    #[error("{path} is damaged: {message}")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        message: String,
    },
    /// The system refused.
    #[error("failed to {action} {path}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// Where.
        path: PathBuf,
        /// The system's answer.
        #[source]
        source: io::Error,
    },
}

/// `runner.json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Identity {
    runner_id: String,
    /// The control plane this runner is bound to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    control_plane_id: Option<String>,
}

/// An opened, locked state directory.
#[derive(Debug)]
pub struct StateDir {
    root: PathBuf,
    identity: std::sync::Mutex<Identity>,
    runner_id: String,
    /// Records of sessions that are newer than their files.
    pub(crate) held: Held,
    /// Held open: the lock goes with it.
    _lock: File,
}

/// Makes a directory and its parents, for the owner only.
///
/// # Errors
/// The system's answer.
pub(crate) fn make_dir(path: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(path)
}

/// Tells temporary files of this process apart.
static NEXT: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);

/// Replaces a file in one step: it holds the old or the new bytes, whatever happens. Both are on disk at the end.
///
/// # Errors
/// The system's answer; then the old bytes stand.
pub(crate) fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let directory = path.parent().ok_or(io::ErrorKind::InvalidInput)?;
    let mut name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?.to_owned();
    // Two writers at once each have a file of their own; the later rename wins whole.
    name.push(format!(".{}.new", NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed)));
    let temporary = directory.join(name);
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&temporary)?;
    file.write_all(bytes)?;
    file.sync_data()?;
    drop(file);
    fs::rename(&temporary, path)?;
    File::open(directory)?.sync_all()
}

/// Reads a JSON file; none when it is not there.
///
/// # Errors
/// [`StateError`].
pub(crate) fn read_json<T: DeserializeOwned>(path: &Path) -> Result<Option<T>, StateError> {
    match fs::read(path) {
        Ok(bytes) => serde_json::from_slice(&bytes)
            .map(Some)
            .map_err(|error| StateError::Damaged { path: path.to_owned(), message: error.to_string() }),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(StateError::Io { action: "read", path: path.to_owned(), source }),
    }
}

/// Replaces a JSON file in one step.
///
/// # Errors
/// The system's answer.
pub(crate) fn write_json<T: Serialize>(path: &Path, value: &T) -> io::Result<()> {
    let bytes = serde_json::to_vec_pretty(value).map_err(io::Error::other)?;
    replace(path, &bytes)
}

impl StateDir {
    /// Opens the directory, makes what is missing in it, and locks it for this process.
    ///
    /// # Errors
    /// [`StateError::InUse`] when another runner has it.
    pub fn open(root: &Path) -> Result<Self, StateError> {
        let failed = |action| {
            let path = root.to_owned();
            move |source| StateError::Io { action, path, source }
        };
        make_dir(root).map_err(failed("create"))?;
        let root = root.canonicalize().map_err(failed("resolve"))?;
        let lock = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(root.join("runner.lock"))
            .map_err(failed("lock"))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(StateError::InUse(root)),
            Err(TryLockError::Error(source)) => {
                return Err(StateError::Io { action: "lock", path: root, source });
            }
        }
        for directory in ["epochs", "sessions", "turns", "held", "homes", "engines", "tmp"] {
            make_dir(&root.join(directory)).map_err(failed("create"))?;
        }
        let path = root.join("runner.json");
        let identity = match read_json::<Identity>(&path)? {
            Some(identity) if ids::is_valid(&identity.runner_id) => identity,
            Some(_) => {
                return Err(StateError::Damaged { path, message: "the runner id is not an id".to_owned() });
            }
            None => {
                let identity = Identity { runner_id: ids::new_runner_id(), control_plane_id: None };
                write_json(&path, &identity).map_err(failed("write"))?;
                identity
            }
        };
        Ok(Self {
            root,
            runner_id: identity.runner_id.clone(),
            identity: std::sync::Mutex::new(identity),
            held: Held::default(),
            _lock: lock,
        })
    }

    /// The directory itself, canonical.
    #[must_use]
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The runner's id.
    #[must_use]
    pub fn runner_id(&self) -> &str {
        &self.runner_id
    }

    /// The control plane that this runner is bound to.
    #[must_use]
    pub fn control_plane_id(&self) -> Option<String> {
        self.identity.lock().unwrap_or_else(std::sync::PoisonError::into_inner).control_plane_id.clone()
    }

    /// Binds the runner to a control plane, or unbinds it. On disk when this returns.
    ///
    /// # Errors
    /// [`StateError::Io`]; then nothing has changed.
    pub fn bind(&self, control_plane_id: Option<String>) -> Result<(), StateError> {
        let mut identity = self.identity.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let changed = Identity { control_plane_id, ..identity.clone() };
        let path = self.root.join("runner.json");
        write_json(&path, &changed).map_err(|source| StateError::Io { action: "write", path, source })?;
        *identity = changed;
        Ok(())
    }

    /// Directory of the epochs.
    #[must_use]
    pub fn epochs(&self) -> PathBuf {
        self.root.join("epochs")
    }

    /// Directory of all turns.
    #[must_use]
    pub fn turns(&self) -> PathBuf {
        self.root.join("turns")
    }

    /// Directory of a turn.
    #[must_use]
    pub fn turn(&self, turn_id: &str) -> PathBuf {
        self.root.join("turns").join(turn_id)
    }

    /// A turn's journal.
    #[must_use]
    pub fn journal(&self, turn_id: &str) -> PathBuf {
        self.turn(turn_id).join("journal")
    }

    /// A turn's tombstone.
    #[must_use]
    pub fn tombstone(&self, turn_id: &str) -> PathBuf {
        self.turn(turn_id).join("tombstone.json")
    }

    /// Directory of the workspaces that lost turns hold.
    #[must_use]
    pub fn held(&self) -> PathBuf {
        self.root.join("held")
    }

    /// Directory of all sessions.
    #[must_use]
    pub fn sessions(&self) -> PathBuf {
        self.root.join("sessions")
    }

    /// A session's record.
    #[must_use]
    pub fn session_record(&self, session_id: &str) -> PathBuf {
        self.root.join("sessions").join(session_id).join("session.json")
    }

    /// Directory of a session's spools.
    #[must_use]
    pub fn spools(&self, session_id: &str) -> PathBuf {
        self.root.join("sessions").join(session_id).join("spools")
    }

    /// Directory of one spool.
    #[must_use]
    pub fn spool(&self, session_id: &str, spool_id: &str) -> PathBuf {
        self.spools(session_id).join(spool_id)
    }

    /// The private engine home of (workspace, engine, identity).
    #[must_use]
    pub fn home(&self, workspace_id: &str, engine: &str, identity: &str) -> PathBuf {
        self.root.join("homes").join(workspace_id).join(engine).join(identity)
    }

    /// Where engines are installed.
    #[must_use]
    pub fn engines(&self) -> PathBuf {
        self.root.join("engines")
    }

    /// The temporary directory of one process.
    #[must_use]
    pub fn temporary(&self, spool_id: &str) -> PathBuf {
        self.root.join("tmp").join(spool_id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_runner_id_is_made_once_and_two_runners_are_refused() {
        let directory = tempfile::tempdir().unwrap();
        let first = StateDir::open(directory.path()).unwrap();
        let id = first.runner_id().to_owned();
        let refused = StateDir::open(directory.path()).unwrap_err();
        assert!(refused.to_string().starts_with("another engine-runner is using the state directory"));
        first.bind(Some("cp_1".to_owned())).unwrap();
        drop(first);
        let again = StateDir::open(directory.path()).unwrap();
        assert_eq!(again.runner_id(), id);
        assert_eq!(again.control_plane_id().as_deref(), Some("cp_1"));
        again.bind(None).unwrap();
        assert_eq!(again.control_plane_id(), None);
    }

    #[test]
    fn a_damaged_identity_is_refused_rather_than_replaced() {
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join("runner.json"), "{").unwrap();
        assert!(matches!(StateDir::open(directory.path()), Err(StateError::Damaged { .. })));
    }
}
