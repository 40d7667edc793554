//! The end of everything that a killed runner left: at once, without asking engines to close.

use std::path::Path;
use std::time::Duration;

use roundhouse_process::{KeeperHandle, KeeperState, close_dead, scan};

use crate::error::chain;
use crate::state_dir::{StateDir, StateError};

/// Time that a killed keeper has to be gone. It only needs the kernel.
const GONE: Duration = Duration::from_secs(2);

/// Time that a sweep of what a keeper's engine left has.
const SWEEP: Duration = Duration::from_secs(5);

/// Kills the keepers of a state directory whose runner is dead, and with them the engines and all that those started.
/// What they said is in their spools: the next runner closes the turns that were cut off as FAILED, retryable. Answers
/// how many there were. Blocks, seconds at most for each.
///
/// # Errors
/// [`StateError::InUse`] while a runner runs there.
pub fn end_engines(state_dir: &Path) -> Result<usize, StateError> {
    if !state_dir.is_dir() {
        return Ok(0);
    }
    let state = StateDir::open(state_dir)?;
    let mut keepers = Vec::new();
    let Ok(sessions) = std::fs::read_dir(state.sessions()) else { return Ok(0) };
    for session in sessions.flatten() {
        let name = session.file_name();
        let Some(session_id) = name.to_str() else { continue };
        match scan(&state.spools(session_id), state.runner_id()) {
            Ok(found) => {
                keepers.extend(found.into_iter().filter(|keeper| keeper.state == KeeperState::Live));
            }
            Err(error) => tracing::warn!(session_id, error = chain(&error), "keepers cannot be listed"),
        }
    }
    // All are killed before any is waited for.
    let killed: Vec<_> = keepers
        .iter()
        .filter_map(|keeper| {
            let handle = KeeperHandle::find(&keeper.dir);
            match handle.and_then(|handle| handle.kill().map(|()| handle)) {
                Ok(handle) => Some((keeper, handle)),
                Err(error) => {
                    tracing::warn!(dir = %keeper.dir.display(), error = chain(&error), "a keeper cannot be killed");
                    None
                }
            }
        })
        .collect();
    for (keeper, handle) in &killed {
        let ended = handle.wait(GONE).and_then(|_| close_dead(&keeper.dir, state.runner_id(), SWEEP));
        if let Err(error) = ended {
            tracing::warn!(dir = %keeper.dir.display(), error = chain(&error), "a killed keeper left something");
        }
    }
    Ok(killed.len())
}
