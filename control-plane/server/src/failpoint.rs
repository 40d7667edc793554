//! Exact crashes for tests. Without the feature `failpoints` nothing of this exists in the program.
//!
//! `FAILPOINTS` is a list like `control-plane::after-send=return;control-plane::before-append=2*return`: the process
//! ends itself by SIGKILL at the named point, with a count in front of `*` at the n-th passage. In tests within one
//! process a hook can be set instead, which may make the passing task stop for ever.
//!
//! `FAILPOINT_DIR` names a directory. A file `<point>=<token>` in it holds one passage of that point: the task that comes
//! by renames it to `held=<token>` and waits until that is gone. A file `clock` there shifts the wall clock by the seconds
//! it names.

/// Ends the process here if the point is armed.
macro_rules! kill_point {
    ($name:literal) => {
        #[cfg(feature = "failpoints")]
        $crate::failpoint::pass(concat!("control-plane::", $name)).await;
    };
}
pub(crate) use kill_point;

#[cfg(feature = "failpoints")]
pub use armed::{Hook, hook};

#[cfg(feature = "failpoints")]
pub(crate) use armed::{clock_shift, pass};

#[cfg(feature = "failpoints")]
mod armed {
    use std::cell::RefCell;
    use std::collections::HashMap;
    use std::path::PathBuf;
    use std::sync::{Arc, LazyLock, Mutex, PoisonError};
    use std::time::Duration;

    use tokio::sync::Notify;

    /// Holds the tasks that come to a point, until it is dropped.
    #[derive(Debug)]
    pub struct Hook {
        name: String,
        reached: Arc<Notify>,
    }

    thread_local! {
        // Of this thread: tests with a runtime of one thread do not meet each other's hooks.
        static HOOKS: RefCell<HashMap<String, Arc<Notify>>> = RefCell::default();
    }
    static ARMED: LazyLock<Mutex<HashMap<String, u32>>> = LazyLock::new(|| {
        let text = std::env::var("FAILPOINTS").unwrap_or_default();
        Mutex::new(text.split(';').filter_map(parse).collect())
    });

    static DIRECTORY: LazyLock<Option<PathBuf>> =
        LazyLock::new(|| std::env::var_os("FAILPOINT_DIR").map(PathBuf::from));

    /// Between two looks of a task that is held.
    const LOOK: Duration = Duration::from_millis(2);

    /// Takes the file that holds this passage, if there is one; answers what is there for as long as it is held.
    fn take(name: &str) -> Option<PathBuf> {
        let directory = DIRECTORY.as_ref()?;
        for entry in std::fs::read_dir(directory).ok()?.flatten() {
            let file = entry.file_name().to_string_lossy().into_owned();
            let Some((_, token)) = file.split_once('=').filter(|(point, _)| *point == name) else { continue };
            let held = directory.join(format!("held={token}"));
            // Of several tasks that pass at once, one can rename it.
            if std::fs::rename(entry.path(), &held).is_ok() {
                return Some(held);
            }
        }
        None
    }

    /// By how many seconds the wall clock is wrong.
    pub(crate) fn clock_shift() -> i64 {
        let Some(directory) = DIRECTORY.as_ref() else { return 0 };
        let told = std::fs::read_to_string(directory.join("clock")).unwrap_or_default();
        told.trim().parse().unwrap_or(0)
    }

    fn parse(entry: &str) -> Option<(String, u32)> {
        let (name, action) = entry.trim().split_once('=')?;
        let count = match action.split_once('*') {
            Some((count, "return")) => count.parse().ok()?,
            Some(_) => return None,
            None if action == "return" => 1,
            None => return None,
        };
        Some((name.to_owned(), count))
    }

    /// Holds every task of this thread that comes to `name` (`control-plane::after-send` and so on) for ever, as if
    /// the process had died there.
    #[must_use]
    pub fn hook(name: &str) -> Hook {
        let reached = Arc::new(Notify::new());
        HOOKS.with_borrow_mut(|hooks| hooks.insert(name.to_owned(), Arc::clone(&reached)));
        Hook { name: name.to_owned(), reached }
    }

    impl Hook {
        /// Waits until a task has come to the point.
        pub async fn reached(&self) {
            self.reached.notified().await;
        }
    }

    impl Drop for Hook {
        fn drop(&mut self) {
            HOOKS.with_borrow_mut(|hooks| hooks.remove(&self.name));
        }
    }

    pub(crate) async fn pass(name: &str) {
        let hook = HOOKS.with_borrow(|hooks| hooks.get(name).cloned());
        if let Some(reached) = hook {
            reached.notify_one();
            std::future::pending::<()>().await;
        }
        if let Some(held) = take(name) {
            while held.exists() {
                tokio::time::sleep(LOOK).await;
            }
        }
        let dies = match ARMED.lock().unwrap_or_else(PoisonError::into_inner).get_mut(name) {
            Some(count) => {
                *count = count.saturating_sub(1);
                *count == 0
            }
            None => false,
        };
        if dies {
            die(name);
        }
    }

    fn die(name: &str) -> ! {
        tracing::error!(point = name, "failpoint: ending this process");
        // SIGKILL, so that nothing runs that would not run in a crash.
        let pid = std::process::id().to_string();
        let _ = std::process::Command::new("/bin/kill").args(["-KILL", &pid]).status();
        std::process::abort()
    }
}
