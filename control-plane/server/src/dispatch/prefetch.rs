//! Agent files that are asked for while the message is still being stored.
//!
//! A turn that can begin at once waits for two things one after the other: its message on disk, and its agent's file from
//! the runner. Neither needs the other, so the file is asked for as soon as the message arrives. What was read so is used
//! only if no other turn can have changed it since: the slot is free when the turn takes it, and none was given back on
//! that runner between. Otherwise the file is read again, as it is for a turn that waited.

use std::collections::HashMap;
use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use roundhouse_domain::id::{RunnerId, TurnId, WorkspaceId};
use roundhouse_domain::workspace::Workspace;
use roundhouse_proto::engine::v1 as engine;
use tokio::sync::oneshot;

use super::agent;
use crate::app::App;

/// Counters of slots given back. Two runners that share one only make each other's files be read again.
const COUNTERS: usize = 64;

/// What is being read for turns that have not begun.
#[derive(Debug)]
pub(crate) struct Prefetches {
    waiting: Mutex<HashMap<TurnId, Prefetch>>,
    given_back: [AtomicU64; COUNTERS],
    hasher: RandomState,
}

/// A file that was asked for.
#[derive(Debug)]
pub(super) struct Prefetch {
    name: String,
    read: oneshot::Receiver<Read>,
}

#[derive(Debug)]
struct Read {
    workspace: Workspace,
    given_back: u64,
    files: engine::ListAgentFilesResponse,
}

impl Default for Prefetches {
    fn default() -> Self {
        Self {
            waiting: Mutex::default(),
            given_back: std::array::from_fn(|_| AtomicU64::new(0)),
            hasher: RandomState::new(),
        }
    }
}

impl Prefetches {
    fn waiting(&self) -> MutexGuard<'_, HashMap<TurnId, Prefetch>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn counter(&self, runner: &RunnerId) -> &AtomicU64 {
        let mut hasher = self.hasher.build_hasher();
        hasher.write(runner.as_str().as_bytes());
        // The remainder is less than the number of counters.
        let index = usize::try_from(hasher.finish() % COUNTERS as u64).unwrap_or_default();
        &self.given_back[index]
    }

    /// A turn on this runner is about to give its slot back; unset: any runner. Before that is stored, so that who sees
    /// the slot free sees this, too.
    pub(crate) fn giving_back(&self, runner: Option<&RunnerId>) {
        match runner {
            Some(runner) => {
                self.counter(runner).fetch_add(1, Ordering::SeqCst);
            }
            None => {
                for counter in &self.given_back {
                    counter.fetch_add(1, Ordering::SeqCst);
                }
            }
        }
    }

    pub(super) fn take(&self, turn: &TurnId) -> Option<Prefetch> {
        self.waiting().remove(turn)
    }

    /// Nobody will ask for it.
    pub(crate) fn discard(&self, turn: &TurnId) {
        drop(self.take(turn));
    }

    #[cfg(test)]
    fn len(&self) -> usize {
        self.waiting().len()
    }
}

/// A turn that is about to be stored. Dropped before it is, what was asked for is forgotten.
#[must_use]
pub(crate) struct Ahead {
    app: Arc<App>,
    turn: Option<TurnId>,
}

impl Ahead {
    /// The turn is stored and begins.
    pub(crate) fn begins(mut self) {
        self.turn = None;
    }
}

impl Drop for Ahead {
    fn drop(&mut self) {
        if let Some(turn) = &self.turn {
            self.app.prefetches.discard(turn);
        }
    }
}

/// Asks for the file of an agent for a turn that is about to be stored.
pub(crate) fn begin(app: &Arc<App>, turn: &TurnId, workspace: WorkspaceId, name: String) -> Ahead {
    let (answer, read) = oneshot::channel();
    let file_name = agent::file_name(&name);
    app.prefetches.waiting().insert(turn.clone(), Prefetch { name, read });
    let shared = Arc::clone(app);
    app.tasks.spawn("agent file", async move {
        // Whatever goes wrong here is met again, and told, when the turn reads the file itself.
        let Ok(view) = shared.store.get_workspace(&workspace).await else { return };
        let workspace = view.workspace;
        let runner = shared.runners.get(&workspace.runner_id);
        let Ok(link) = runner.link() else { return };
        let given_back = shared.prefetches.counter(&workspace.runner_id).load(Ordering::SeqCst);
        let request = engine::ListAgentFilesRequest { workspace: workspace.path.clone(), file_name };
        if let Ok(files) = link.list_agent_files(request).await {
            let _ = answer.send(Read { workspace, given_back, files });
        }
    });
    Ahead { app: Arc::clone(app), turn: Some(turn.clone()) }
}

impl Prefetch {
    /// The answer, if it is for this agent in this workspace and still holds. Cancel safe in that the file is read again.
    pub(super) async fn files(
        self,
        prefetches: &Prefetches,
        workspace: &Workspace,
        name: &str,
    ) -> Option<engine::ListAgentFilesResponse> {
        if self.name != name {
            return None;
        }
        let read = self.read.await.ok()?;
        let now = prefetches.counter(&workspace.runner_id).load(Ordering::SeqCst);
        (read.workspace.id == workspace.id && read.given_back == now).then_some(read.files)
    }
}

#[cfg(test)]
mod tests {
    use roundhouse_domain::id::RunnerId;

    use super::*;

    fn turn(prefetches: &Prefetches, workspace: &Workspace) -> Prefetch {
        let (answer, read) = oneshot::channel();
        let given_back = prefetches.counter(&workspace.runner_id).load(Ordering::SeqCst);
        let files = engine::ListAgentFilesResponse::default();
        answer.send(Read { workspace: workspace.clone(), given_back, files }).unwrap();
        Prefetch { name: "builder".to_owned(), read }
    }

    fn workspace(path: &str) -> Workspace {
        Workspace::new(RunnerId::parse("run_1").unwrap(), path.to_owned())
    }

    #[tokio::test]
    async fn s19_what_was_read_before_a_slot_was_given_back_is_read_again() {
        let (prefetches, here) = (Prefetches::default(), workspace("/w/a"));
        let other = RunnerId::parse("run_2").unwrap();
        assert!(turn(&prefetches, &here).files(&prefetches, &here, "builder").await.is_some());
        assert!(turn(&prefetches, &here).files(&prefetches, &here, "critic").await.is_none());
        assert!(turn(&prefetches, &here).files(&prefetches, &workspace("/w/b"), "builder").await.is_none());
        for runner in [Some(&here.runner_id), None] {
            let before = turn(&prefetches, &here);
            prefetches.giving_back(runner);
            assert!(before.files(&prefetches, &here, "builder").await.is_none());
        }
        if !std::ptr::eq(prefetches.counter(&other), prefetches.counter(&here.runner_id)) {
            let before = turn(&prefetches, &here);
            prefetches.giving_back(Some(&other));
            assert!(before.files(&prefetches, &here, "builder").await.is_some());
        }
    }

    #[test]
    fn what_nobody_asks_for_is_not_kept() {
        let (prefetches, here) = (Prefetches::default(), workspace("/w/a"));
        let id = TurnId::new(crate::clock::uuid());
        let asked = turn(&prefetches, &here);
        prefetches.waiting().insert(id.clone(), asked);
        prefetches.discard(&id);
        assert_eq!(prefetches.len(), 0);
    }
}
