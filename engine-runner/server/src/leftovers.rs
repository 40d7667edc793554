//! Empty directories that an engine's sandbox leaves in a workspace: mount points that nobody made on purpose.

use std::path::Path;

use roundhouse_engines::Adapter;

/// Those that are not in the workspace now, so that a later one is the engine's. Blocking, a few looks.
#[must_use]
pub(crate) fn absent(adapter: &dyn Adapter, workspace: &Path) -> Vec<String> {
    let names = adapter.leftovers().iter();
    names
        .filter(|name| {
            // What cannot be looked at may be there, and is nobody's to remove.
            let looked = workspace.join(name).symlink_metadata();
            looked.is_err_and(|error| error.kind() == std::io::ErrorKind::NotFound)
        })
        .map(|name| (*name).to_owned())
        .collect()
}

/// Removes them if they are empty. Only once the engine is idle or gone. Blocking.
pub(crate) fn remove(workspace: &Path, names: &[String]) {
    for name in names {
        // One that holds anything, or is no directory, is refused by the system itself.
        if std::fs::remove_dir(workspace.join(name)).is_ok() {
            tracing::debug!(workspace = %workspace.display(), name, "an empty mount point is removed");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_was_not_there_and_is_empty_is_removed() {
        let directory = tempfile::tempdir().unwrap();
        let work = directory.path();
        let codex = roundhouse_engines::adapter("codex").unwrap();
        std::fs::create_dir(work.join(".aws")).unwrap();
        let absent = absent(codex, work);
        assert_eq!(absent, [".git", ".codex", ".agents"]);
        std::fs::create_dir(work.join(".codex")).unwrap();
        std::fs::create_dir(work.join(".git")).unwrap();
        std::fs::write(work.join(".git/HEAD"), "x").unwrap();
        std::fs::write(work.join(".agents"), "a file").unwrap();
        remove(work, &absent);
        let left = |name: &str| work.join(name).symlink_metadata().is_ok();
        assert_eq!([".aws", ".git", ".codex", ".agents"].map(left), [true, true, false, true]);
    }

    #[test]
    fn an_engine_without_leftovers_has_none_removed() {
        let claude = roundhouse_engines::adapter("claude-code").unwrap();
        assert!(absent(claude, Path::new("/nonexistent")).is_empty());
    }
}
