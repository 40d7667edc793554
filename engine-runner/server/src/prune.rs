//! What is acknowledged is kept for a while, for diagnosis, and then removed: old spools first, and tombstones.

use std::{
    collections::HashSet,
    fs,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, SystemTime},
};

use roundhouse_process::{KeeperState, scan};

use crate::{
    epochs,
    error::Error,
    journal::Journal,
    runner::{Runner, Tombstone, names},
    state_dir::read_json,
};

/// Pause between two rounds.
const ROUND: Duration = Duration::from_secs(600);

/// How long a tombstone answers late repeats.
const TOMBSTONE: Duration = Duration::from_secs(30 * 24 * 3600);

/// A spool that may go.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Spool {
    dir: PathBuf,
    bytes: u64,
    age: Duration,
}

/// Which spools go: those that are too old, and then the oldest until the rest fits.
fn choose(mut spools: Vec<Spool>, keep: Duration, keep_bytes: u64) -> Vec<PathBuf> {
    spools.sort_by_key(|spool| std::cmp::Reverse(spool.age));
    let mut total: u64 = spools.iter().map(|spool| spool.bytes).sum();
    let mut gone = Vec::new();
    for spool in spools {
        if spool.age > keep || total > keep_bytes {
            total -= spool.bytes;
            gone.push(spool.dir);
        }
    }
    gone
}

/// Bytes in a directory, and the time since anything in it was written.
pub(crate) fn measure(dir: &Path) -> (u64, Duration) {
    let mut bytes = 0;
    let mut newest = SystemTime::UNIX_EPOCH;
    for entry in fs::read_dir(dir).into_iter().flatten().filter_map(Result::ok) {
        if let Ok(metadata) = entry.metadata() {
            bytes += metadata.len();
            newest = newest.max(metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH));
        }
    }
    (bytes, newest.elapsed().unwrap_or_default())
}

/// The spools that turns without Acknowledge may still need.
fn needed(runner: &Runner) -> Result<HashSet<String>, Error> {
    let mut needed = HashSet::new();
    for handle in runner.turns() {
        let Ok(records) = Journal::read(&runner.context.state.journal(&handle.turn_id)) else { continue };
        needed.extend(records.iter().filter_map(|record| match record {
            crate::journal::Record::Process(process) => Some(process.spool_id.clone()),
            _ => None,
        }));
    }
    Ok(needed)
}

/// One round. Blocking.
///
/// # Errors
/// [`Error::Storage`] when the state directory cannot be listed.
pub(crate) fn round(runner: &Runner) -> Result<(), Error> {
    let context = &runner.context;
    let needed = needed(runner)?;
    let mut spools = Vec::new();
    for session_id in names(context.state.sessions())? {
        for keeper in scan(&context.state.spools(&session_id), context.state.runner_id()).unwrap_or_default()
        {
            if keeper.state == KeeperState::Dead && !needed.contains(&keeper.spool_id) {
                let (bytes, age) = measure(&keeper.dir);
                spools.push(Spool { dir: keeper.dir, bytes, age });
            }
        }
    }
    for dir in choose(spools, context.settings.spool_keep, context.settings.spool_keep_bytes) {
        tracing::info!(spool = %dir.display(), "an old spool is removed");
        if let Err(error) = fs::remove_dir_all(&dir) {
            tracing::warn!(spool = %dir.display(), %error, "an old spool was not removed");
        }
    }
    let now = jiff::Timestamp::now().as_second();
    for turn_id in names(context.state.turns())? {
        if context.state.journal(&turn_id).exists() {
            continue;
        }
        let tombstone: Option<Tombstone> = read_json(&context.state.tombstone(&turn_id)).ok().flatten();
        let age = tombstone.map(|tombstone| now.saturating_sub(tombstone.made_unix_seconds));
        if age.is_some_and(|age| age > i64::try_from(TOMBSTONE.as_secs()).unwrap_or(i64::MAX)) {
            let _ = fs::remove_dir_all(context.state.turn(&turn_id));
        }
    }
    let held = runner.turns().into_iter().map(|handle| handle.conversation_id).collect();
    let forgotten = context.epochs.forget(&held, epochs::KEPT)?;
    if forgotten > 0 {
        tracing::info!(forgotten, "epochs of conversations that are not used any more are forgotten");
    }
    Ok(())
}

/// Prunes now and then until the runner stops.
pub(crate) async fn keep(runner: Arc<Runner>) {
    let stop = runner.context.shutdown.clone();
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(ROUND) => {}
        }
        let pruned = Arc::clone(&runner);
        if let Ok(Err(error)) = tokio::task::spawn_blocking(move || round(&pruned)).await {
            tracing::warn!(error = crate::error::chain(&error), "pruning failed");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_go_first_until_the_rest_fits() {
        let spool =
            |name: &str, bytes, seconds| Spool { dir: name.into(), bytes, age: Duration::from_secs(seconds) };
        let spools =
            vec![spool("new", 10, 1), spool("ancient", 1, 100), spool("old", 10, 50), spool("mid", 10, 20)];
        let gone = choose(spools.clone(), Duration::from_secs(60), 20);
        assert_eq!(gone, [PathBuf::from("ancient"), PathBuf::from("old")]);
        assert!(choose(spools, Duration::from_secs(1000), 31).is_empty());
    }
}
