//! Named gates at which a reply stops until the test lets it go on.

use std::{
    collections::HashMap,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use serde::Serialize;
use tokio::sync::watch;

/// Where a gate stands.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct GateState {
    /// How many replies have come to it, those that found it open included.
    pub reached: u64,
    /// Whether it lets replies through.
    pub open: bool,
}

/// All gates of one server. A gate exists as soon as anybody names it.
#[derive(Debug, Default)]
pub(crate) struct Gates {
    by_name: Mutex<HashMap<String, watch::Sender<GateState>>>,
}

impl Gates {
    fn with<T>(&self, name: &str, act: impl FnOnce(&watch::Sender<GateState>) -> T) -> T {
        let mut by_name = self.by_name.lock().unwrap_or_else(PoisonError::into_inner);
        act(by_name.entry(name.to_owned()).or_default())
    }

    /// Counts an arrival and waits until the gate is open.
    pub(crate) async fn pass(&self, name: &str) {
        let mut seen = self.with(name, |gate| {
            gate.send_modify(|state| state.reached += 1);
            gate.subscribe()
        });
        // An error means that the gate was forgotten by a reset: then nothing holds the reply any more.
        let _ = seen.wait_for(|state| state.open).await;
    }

    /// Waits until the gate was reached `at_least` so often; `Err` holds the state at the end of `limit`.
    pub(crate) async fn wait(
        &self,
        name: &str,
        at_least: u64,
        limit: Duration,
    ) -> Result<GateState, GateState> {
        let mut seen = self.with(name, watch::Sender::subscribe);
        let reached = tokio::time::timeout(limit, seen.wait_for(|state| state.reached >= at_least)).await;
        match reached {
            Ok(Ok(state)) => Ok(*state),
            Ok(Err(_)) | Err(_) => Err(self.state(name)),
        }
    }

    /// Opens or closes the gate.
    pub(crate) fn set_open(&self, name: &str, open: bool) -> GateState {
        self.with(name, |gate| {
            gate.send_modify(|state| state.open = open);
            *gate.borrow()
        })
    }

    /// Where the gate stands.
    pub(crate) fn state(&self, name: &str) -> GateState {
        self.with(name, |gate| *gate.borrow())
    }

    /// Forgets every gate; replies that wait at one go on.
    pub(crate) fn reset(&self) {
        self.by_name.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }
}
