//! What every part of the server shares.

use std::sync::Arc;

use roundhouse_domain::id::ControlPlaneId;
use roundhouse_store::Store;

use crate::dispatch::{Dispatcher, Prefetches};
use crate::hub::Hub;
use crate::runners::Runners;
use crate::settings::Settings;
use crate::tasks::Tasks;

/// One control plane.
pub(crate) struct App {
    /// Its id.
    pub(crate) id: ControlPlaneId,
    /// What is durable.
    pub(crate) store: Arc<dyn Store>,
    /// What is live.
    pub(crate) hub: Arc<Hub>,
    /// The runners.
    pub(crate) runners: Runners,
    /// Who works on turns.
    pub(crate) dispatcher: Dispatcher,
    /// Agent files that are read ahead.
    pub(crate) prefetches: Prefetches,
    /// Settings.
    pub(crate) settings: Arc<Settings>,
    /// Clients that follow a conversation.
    pub(crate) followers: Arc<()>,
    /// Background tasks.
    pub(crate) tasks: Tasks,
}

impl std::fmt::Debug for App {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("App").field("id", &self.id).finish_non_exhaustive()
    }
}
