//! The clock and the boot that frames are stamped with.

use nix::time::{ClockId, clock_gettime};
use std::time::{Duration, Instant};

/// The moment after a time from now. A time that is longer than anybody waits counts as a day.
pub(crate) fn after(time: Duration) -> Instant {
    Instant::now() + time.min(Duration::from_secs(24 * 60 * 60))
}

/// CLOCK_BOOTTIME in nanoseconds: time since boot, suspended time included. Zero only if the clock cannot be read,
/// which Linux does not do.
#[must_use]
pub fn boottime_ns() -> u64 {
    let Ok(time) = clock_gettime(ClockId::CLOCK_BOOTTIME) else { return 0 };
    let seconds = u64::try_from(time.tv_sec()).unwrap_or(0);
    let nanos = u64::try_from(time.tv_nsec()).unwrap_or(0);
    seconds.saturating_mul(1_000_000_000).saturating_add(nanos)
}

/// The id of this boot (32 hex digits), or an empty string where the system does not tell it.
#[must_use]
pub fn boot_id() -> String {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id")
        .map(|id| id.chars().filter(char::is_ascii_hexdigit).take(32).collect())
        .unwrap_or_default()
}
