//! The only place where this crate asks for the time and makes ids: rules and store get them passed in.

use std::time::{SystemTime, UNIX_EPOCH};

use roundhouse_domain::time::Timestamp;
use uuid::Uuid;

/// Now, by the wall clock: for show and for ordering what people see. Waits use the monotonic clock of the runtime.
pub(crate) fn now() -> Timestamp {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let now = i64::try_from(since.as_micros()).unwrap_or(i64::MAX);
    #[cfg(feature = "failpoints")]
    let now = now.saturating_add(crate::failpoint::clock_shift().saturating_mul(1_000_000));
    Timestamp::from_micros(now)
}

/// A new id: version 7, so that ids sort by age.
pub(crate) fn uuid() -> Uuid {
    Uuid::now_v7()
}
