//! Indexes of an engine home that the engine builds anew from its sessions' own files: removed when they are broken, and
//! only while no process bears that home.

use std::{io, path::Path};

use roundhouse_process::{KeeperState, scan};

use crate::{context::Context, error::chain, runner::names, session_record::SessionRecord};

/// Why nothing was removed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RepairError {
    /// The home is a person's own.
    #[error("the home {0} is a person's own, and is not changed")]
    NotOurs(String),
    /// Another process bears the home.
    #[error("session {0} has a process in the same home; end it, then retry the turn")]
    Busy(String),
    /// Whether another process bears the home is not known.
    #[error("the processes of the home cannot be listed")]
    Unknown,
    /// The system refused.
    #[error("failed to remove an index of the engine's home")]
    Io(#[from] io::Error),
}

/// Removes the files whose names match, in the home itself. The home's lock is to be held. Blocking.
///
/// # Errors
/// [`RepairError`].
pub(crate) fn discard(context: &Context, home: &Path, patterns: &[String]) -> Result<usize, RepairError> {
    if !home.starts_with(context.state.root()) {
        return Err(RepairError::NotOurs(home.display().to_string()));
    }
    if let Some(session_id) = bearer(context, home)? {
        return Err(RepairError::Busy(session_id));
    }
    let removed = remove(home, patterns)?;
    tracing::warn!(home = %home.display(), removed, "indexes of an engine's home are removed to be built anew");
    Ok(removed)
}

/// A session whose process lives in the home.
fn bearer(context: &Context, home: &Path) -> Result<Option<String>, RepairError> {
    let unknown = |error: crate::Error| {
        tracing::warn!(error = chain(&error), "sessions cannot be listed");
        RepairError::Unknown
    };
    for session_id in names(context.state.sessions()).map_err(unknown)? {
        let record = SessionRecord::load(&context.state, &session_id).map_err(unknown)?;
        // A session without a record never had a process.
        if record.is_none_or(|record| record.home != home) {
            continue;
        }
        let spools = context.state.spools(&session_id);
        let Ok(found) = scan(&spools, context.state.runner_id()) else { return Err(RepairError::Unknown) };
        if found.iter().any(|keeper| keeper.state != KeeperState::Dead) {
            return Ok(Some(session_id));
        }
    }
    Ok(None)
}

fn remove(home: &Path, patterns: &[String]) -> io::Result<usize> {
    let mut removed = 0;
    for entry in std::fs::read_dir(home)? {
        let entry = entry?;
        let Ok(name) = entry.file_name().into_string() else { continue };
        if patterns.iter().any(|pattern| matches(pattern, &name)) && !entry.file_type()?.is_dir() {
            std::fs::remove_file(entry.path())?;
            removed += 1;
        }
    }
    Ok(removed)
}

/// Whether a name is this pattern, in which each `*` stands for any text.
fn matches(pattern: &str, name: &str) -> bool {
    match pattern.split_once('*') {
        None => pattern == name,
        Some((before, rest)) => name.strip_prefix(before).is_some_and(|name| {
            name.char_indices().map(|(at, _)| at).chain([name.len()]).any(|at| matches(rest, &name[at..]))
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_match_their_patterns() {
        for (pattern, name, expected) in [
            ("state_5.sqlite*", "state_5.sqlite", true),
            ("state_5.sqlite*", "state_5.sqlite-wal", true),
            ("state_5.sqlite*", "logs_2.sqlite", false),
            ("*.sqlite*", "logs_2.sqlite-shm", true),
            ("*.sqlite*", "config.toml", false),
            ("*.sqlite", "a.sqlite", true),
            ("*.sqlite", "a.sqlite.sqlite", true),
            ("*.sqlite", "a.sqlite-wal", false),
            ("exact", "exact", true),
            ("exact", "exactly", false),
        ] {
            assert_eq!(matches(pattern, name), expected, "{pattern} {name}");
        }
    }

    #[test]
    fn files_go_and_directories_and_other_names_stay() {
        let home = tempfile::tempdir().unwrap();
        for name in ["state_5.sqlite", "state_5.sqlite-wal", "config.toml"] {
            std::fs::write(home.path().join(name), "x").unwrap();
        }
        std::fs::create_dir(home.path().join("state_5.sqlite.d")).unwrap();
        assert_eq!(remove(home.path(), &["state_5.sqlite*".to_owned()]).unwrap(), 2);
        assert!(home.path().join("config.toml").exists() && home.path().join("state_5.sqlite.d").exists());
    }
}
