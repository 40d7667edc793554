//! Waiting for a condition. The only place in the tests where time passes on purpose.

use std::{future::Future, time::Duration};

use anyhow::bail;
use tokio::time::Instant;

/// For what takes no engine: 10 s.
pub const BRIEF: Duration = Duration::from_secs(10);
/// For what takes an engine and a model that answers at once: 40 s on a loaded machine of two cores.
pub const NORMAL: Duration = Duration::from_secs(40);
/// For what has timeouts of its own inside: 120 s.
pub const LONG: Duration = Duration::from_secs(120);

/// How long a condition rests between two looks.
const BETWEEN_LOOKS: Duration = Duration::from_millis(15);

/// Looks again and again until `look` finds something, at most for `bound`.
///
/// # Errors
/// Names `what` after `bound`. An error of `look` itself is not final: the last one is told with the time-out.
pub async fn wait_for<T, F, Fut>(what: &str, bound: Duration, mut look: F) -> anyhow::Result<T>
where
    F: FnMut() -> Fut,
    Fut: Future<Output = anyhow::Result<Option<T>>>,
{
    let until = Instant::now() + bound;
    let mut last_error: Option<anyhow::Error> = None;
    let told = |last_error: Option<anyhow::Error>| match last_error {
        Some(error) => format!("; the last look failed: {error:#}"),
        None => String::new(),
    };
    loop {
        match tokio::time::timeout_at(until, look()).await {
            Ok(Ok(Some(found))) => return Ok(found),
            Ok(Ok(None)) => last_error = None,
            Ok(Err(error)) => last_error = Some(error),
            Err(_) => {
                let told = told(last_error);
                bail!("{what}: did not happen within {bound:?}, and a look at it did not end{told}");
            }
        }
        if Instant::now() >= until {
            let told = told(last_error);
            bail!("{what}: did not happen within {bound:?}{told}");
        }
        tokio::time::sleep(BETWEEN_LOOKS).await;
    }
}

/// As [`wait_for`], for a plain condition.
///
/// # Errors
/// Names `what` after `bound`.
pub async fn wait_until(what: &str, bound: Duration, mut holds: impl FnMut() -> bool) -> anyhow::Result<()> {
    wait_for(what, bound, || {
        let found = holds().then_some(());
        async move { Ok(found) }
    })
    .await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_condition_that_never_holds_is_named() {
        let error = wait_until("the moon is full", BRIEF, || false).await.unwrap_err();
        assert_eq!(error.to_string(), "the moon is full: did not happen within 10s");
    }

    #[tokio::test(start_paused = true)]
    async fn a_look_that_hangs_is_bounded_and_the_last_error_is_told() {
        let hangs = wait_for::<(), _, _>("an answer", BRIEF, std::future::pending).await.unwrap_err();
        assert!(hangs.to_string().ends_with("a look at it did not end"), "{hangs}");
        let fails =
            wait_for::<(), _, _>("an answer", BRIEF, || async { bail!("nobody there") }).await.unwrap_err();
        assert!(fails.to_string().ends_with("the last look failed: nobody there"), "{fails}");
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_found_is_returned_at_once_even_after_errors() {
        let mut looks = 0;
        let found = wait_for("the third look", BRIEF, || {
            looks += 1;
            let look = looks;
            async move { if look < 3 { bail!("not yet") } else { Ok(Some(look)) } }
        })
        .await
        .unwrap();
        assert_eq!(found, 3);
    }
}
