//! Points at which a test ends this process exactly there: no destructor runs, nothing is flushed, no task goes on.
//!
//! `FAILPOINTS` is a list like `runner::journalled=3*return;runner::synced=return`: the process ends itself at the named
//! point, with a count in front of `*` at the n-th passage. `500*pause` holds the passing thread for 500 ms instead;
//! with `fail` the process goes on, and what the point stands for goes wrong (with `fails` each time); with `panic` the
//! passing task panics, with `panics` at every later passage, too. A point can also be held from outside while the process
//! runs, see `roundhouse_process::failpoint`.
//! Without the feature `failpoints` nothing of this exists.

/// Ends the process here if the point is armed.
#[macro_export]
macro_rules! kill_point {
    ($name:literal) => {
        #[cfg(feature = "failpoints")]
        $crate::failpoint::pass($name);
    };
}

/// Whether what this point stands for is to go wrong now.
#[macro_export]
macro_rules! fault_point {
    ($name:literal) => {{
        #[cfg(feature = "failpoints")]
        let fails = $crate::failpoint::fails($name);
        #[cfg(not(feature = "failpoints"))]
        let fails = false;
        fails
    }};
}

/// Holds the passing task, and not its thread, for as long as the point says.
#[macro_export]
macro_rules! hold_point {
    ($name:literal) => {
        #[cfg(feature = "failpoints")]
        $crate::failpoint::hold($name).await;
    };
}

#[cfg(feature = "failpoints")]
pub(crate) use armed::{fails, hold, pass};

#[cfg(feature = "failpoints")]
mod armed {
    use std::{
        collections::HashMap,
        sync::{LazyLock, Mutex, PoisonError},
        time::Duration,
    };

    #[derive(Clone, Copy)]
    enum Action {
        /// Ends the process when it comes to zero.
        End(u32),
        /// Holds the thread for so long.
        Pause(Duration),
        /// Fails when it comes to zero, and only then.
        Fail(u32),
        /// Fails at every passage.
        Fails,
        /// Panics when it comes to zero; whether at each later passage, too.
        Panic(u32, bool),
    }

    static ARMED: LazyLock<Mutex<HashMap<String, Action>>> = LazyLock::new(|| {
        let text = std::env::var("FAILPOINTS").unwrap_or_default();
        Mutex::new(text.split(';').filter_map(parse).collect())
    });

    fn parse(point: &str) -> Option<(String, Action)> {
        let (name, action) = point.trim().split_once('=')?;
        let action = match action.split_once('*') {
            Some((count, "return")) => Action::End(count.parse().ok()?),
            Some((millis, "pause")) => Action::Pause(Duration::from_millis(millis.parse().ok()?)),
            Some((count, "panic")) => Action::Panic(count.parse().ok()?, false),
            Some((count, "panics")) => Action::Panic(count.parse().ok()?, true),
            Some((count, "fail")) => Action::Fail(count.parse().ok()?),
            None if action == "return" => Action::End(1),
            None if action == "fail" => Action::Fail(1),
            None if action == "fails" => Action::Fails,
            _ => return None,
        };
        Some((name.to_owned(), action))
    }

    pub(crate) fn pass(name: &str) {
        held(name);
        let pause = {
            let mut armed = ARMED.lock().unwrap_or_else(PoisonError::into_inner);
            match armed.get_mut(name) {
                Some(Action::End(left)) => {
                    *left = left.saturating_sub(1);
                    if *left == 0 {
                        std::process::abort();
                    }
                    return;
                }
                Some(Action::Panic(left, again)) => {
                    let met = *left == 1 || (*left == 0 && *again);
                    *left = left.saturating_sub(1);
                    drop(armed);
                    assert!(!met, "as a test wants it");
                    return;
                }
                Some(Action::Pause(pause)) => *pause,
                Some(Action::Fail(_) | Action::Fails) | None => return,
            }
        };
        #[expect(
            clippy::disallowed_methods,
            reason = "the passing thread itself is what a test wants to hold"
        )]
        std::thread::sleep(pause);
    }

    /// Holds the passing task for as long as a test likes, and no other: its thread's other tasks go to another one.
    fn held(name: &str) {
        use roundhouse_process::failpoint::{take, wait};
        use tokio::runtime::{Handle, RuntimeFlavor};
        let Some(held) = take(name, b"") else { return };
        match Handle::try_current().map(|handle| handle.runtime_flavor()) {
            Ok(RuntimeFlavor::MultiThread) => tokio::task::block_in_place(|| wait(&held)),
            _ => wait(&held),
        }
    }

    pub(crate) async fn hold(name: &str) {
        let pause = match ARMED.lock().unwrap_or_else(PoisonError::into_inner).get(name) {
            Some(Action::Pause(pause)) => *pause,
            Some(Action::End(_) | Action::Fail(_) | Action::Fails | Action::Panic(..)) | None => return,
        };
        tokio::time::sleep(pause).await;
    }

    pub(crate) fn fails(name: &str) -> bool {
        let mut armed = ARMED.lock().unwrap_or_else(PoisonError::into_inner);
        let left = match armed.get_mut(name) {
            Some(Action::Fail(left)) => left,
            Some(Action::Fails) => return true,
            _ => return false,
        };
        let met = *left == 1;
        *left = left.saturating_sub(1);
        met
    }
}
