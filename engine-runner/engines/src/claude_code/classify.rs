//! What went wrong, from what Claude Code says about it.

/// Whether a text reports a usage or rate limit.
pub(super) fn is_quota_text(text: &str) -> bool {
    let _ = text;
    false
}

/// Whether a text reports that the service is away.
pub(super) fn is_unavailable_text(text: &str) -> bool {
    let _ = text;
    false
}
