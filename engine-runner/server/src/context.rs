//! What everything in a runner shares: settings, state directory, and the places where turns meet.

use std::{
    collections::HashMap,
    path::PathBuf,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

use roundhouse_config::{EngineSettings, Runner as Settings};
use roundhouse_process::IsolationReport;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    epochs::Epochs, install::Versions, pool::Pool, session_record::RecordLocks, slots::Slots, spares::Spares,
    state_dir::StateDir, workspace::Roots,
};

/// Shared by all parts of a runner.
#[derive(Debug)]
pub struct Context {
    /// The `[runner]` section.
    pub settings: Settings,
    /// The `[engines.*]` sections.
    pub engines: std::collections::BTreeMap<String, EngineSettings>,
    /// The state directory.
    pub state: StateDir,
    /// Where workspaces may lie.
    pub roots: Roots,
    /// Epochs.
    pub epochs: Epochs,
    /// Journals for turns to come.
    pub spares: Arc<Spares>,
    /// Workspace slots.
    pub slots: Slots,
    /// Idle engines.
    pub pool: Pool,
    /// One lock per engine home.
    pub homes: Homes,
    /// One lock per session's record.
    pub records: RecordLocks,
    /// What the isolation probe reached.
    pub isolation: IsolationReport,
    /// This boot.
    pub boot_id: String,
    /// What to run as keeper; none is this executable.
    pub keeper_executable: Option<PathBuf>,
    /// Versions of engines.
    pub versions: Versions,
    /// No new turns are taken.
    pub draining: AtomicBool,
    /// The runner stops: no new turns.
    pub shutdown: CancellationToken,
    /// Turns let go of their keepers, which go on without them.
    pub halt: CancellationToken,
    /// Turns, idle engines and the like.
    pub tasks: TaskTracker,
}

impl Context {
    /// The settings of an engine.
    #[must_use]
    pub fn engine_settings(&self, name: &str) -> EngineSettings {
        self.engines.get(name).cloned().unwrap_or_default()
    }

    /// Whether new turns are refused.
    #[must_use]
    pub fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Relaxed) || self.shutdown.is_cancelled()
    }
}

/// Locks of engine homes: starting, closing and configuring in one home happen one after the other.
#[derive(Debug, Default)]
pub struct Homes {
    locks: Mutex<HashMap<PathBuf, Arc<tokio::sync::Mutex<()>>>>,
}

impl Homes {
    /// Takes a home's lock. Cancel safe.
    pub async fn lock(&self, home: &std::path::Path) -> tokio::sync::OwnedMutexGuard<()> {
        let lock = {
            let mut locks = self.locks.lock().unwrap_or_else(PoisonError::into_inner);
            Arc::clone(locks.entry(home.to_owned()).or_default())
        };
        lock.lock_owned().await
    }
}
