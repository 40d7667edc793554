//! Points at which a test ends this process exactly there: no destructor runs, nothing is flushed, no task goes on.
//!
//! `FAILPOINTS` is a list like `runner::journalled=3*return;runner::synced=return`: the process ends itself at the named
//! point, with a count in front of `*` at the n-th passage. Without the feature `failpoints` nothing of this exists.

/// Ends the process here if the point is armed.
#[macro_export]
macro_rules! kill_point {
    ($name:literal) => {
        #[cfg(feature = "failpoints")]
        $crate::failpoint::pass($name);
    };
}

#[cfg(feature = "failpoints")]
pub(crate) use armed::pass;

#[cfg(feature = "failpoints")]
mod armed {
    use std::{
        collections::HashMap,
        sync::{LazyLock, Mutex, PoisonError},
    };

    static ARMED: LazyLock<Mutex<HashMap<String, u32>>> = LazyLock::new(|| {
        let text = std::env::var("FAILPOINTS").unwrap_or_default();
        Mutex::new(text.split(';').filter_map(parse).collect())
    });

    fn parse(point: &str) -> Option<(String, u32)> {
        let (name, action) = point.trim().split_once('=')?;
        let count = match action.split_once('*') {
            Some((count, "return")) => count.parse().ok()?,
            None if action == "return" => 1,
            _ => return None,
        };
        Some((name.to_owned(), count))
    }

    pub(crate) fn pass(name: &str) {
        let mut armed = ARMED.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(left) = armed.get_mut(name) else { return };
        *left = left.saturating_sub(1);
        if *left == 0 {
            std::process::abort();
        }
    }
}
