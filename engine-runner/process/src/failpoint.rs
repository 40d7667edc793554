//! Points at which a test holds this process, for as long as it likes: to kill or stop it, or another one, exactly there.
//!
//! `FAILPOINT_DIR` names a directory. A file `<point>=<token>` in it holds one passage of that point: whoever comes by
//! renames it to `held=<token>` and waits until that is gone. With something in the file, only a passage that bears
//! it is held. Without the feature `failpoints` nothing of this exists.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::LazyLock,
    time::Duration,
};

/// The variable that names the directory. A keeper gets it from its runner.
pub const DIRECTORY: &str = "FAILPOINT_DIR";

static HERE: LazyLock<Option<PathBuf>> = LazyLock::new(|| std::env::var_os(DIRECTORY).map(PathBuf::from));

/// Between two looks.
const LOOK: Duration = Duration::from_millis(2);

/// Takes the file that holds this passage, if there is one; answers what is there for as long as it is held.
#[must_use]
pub fn take(point: &str, bears: &[u8]) -> Option<PathBuf> {
    let directory = HERE.as_ref()?;
    for entry in fs::read_dir(directory).ok()?.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let Some((_, token)) = name.split_once('=').filter(|(armed, _)| *armed == point) else { continue };
        let Ok(wanted) = fs::read(entry.path()) else { continue };
        let held = directory.join(format!("held={token}"));
        let meant = wanted.is_empty() || memchr::memmem::find(bears, &wanted).is_some();
        // Of several that pass at once, one can rename it.
        if meant && fs::rename(entry.path(), &held).is_ok() {
            return Some(held);
        }
    }
    None
}

/// Holds this thread at the point if a test wants it.
pub fn pass(point: &str, bears: &[u8]) {
    if let Some(held) = take(point, bears) {
        wait(&held);
    }
}

/// Holds this thread for as long as this is there.
pub fn wait(held: &Path) {
    while held.exists() {
        #[expect(
            clippy::disallowed_methods,
            reason = "the passing thread itself is what a test wants to hold"
        )]
        std::thread::sleep(LOOK);
    }
}
