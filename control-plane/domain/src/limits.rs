//! Limits that are rules, not settings: what the store refuses whoever asks.

/// Most messages that wait in one conversation, unless configured otherwise.
pub const MAX_WAITING: usize = 100;

/// Largest user message, in bytes.
pub const MAX_USER_MESSAGE: usize = 1024 * 1024;

/// Largest stored agent message, in bytes; longer ones are cut on a character boundary and flagged.
pub const MAX_AGENT_MESSAGE: usize = 1024 * 1024;

/// Largest summary, in bytes.
pub const MAX_SUMMARY: usize = 256 * 1024;

/// Largest encoded event, in bytes: a payload of 64,000 bytes and what goes round it.
pub const MAX_EVENT: usize = 72_000;

/// Most events in one append.
pub const MAX_BATCH: usize = 256;

/// Most items in one page.
pub const MAX_PAGE: usize = 1_000;

/// Most payload bytes in one page; a page holds at least one item whatever its size.
pub const MAX_PAGE_BYTES: usize = 1024 * 1024;

/// Longest name that people choose (titles, external ids, actors), in bytes.
pub const MAX_NAME: usize = 512;

/// Cuts `text` to at most `max` bytes on a character boundary. True when something was cut off.
#[must_use]
pub fn cut(text: &str, max: usize) -> (&str, bool) {
    if text.len() <= max {
        return (text, false);
    }
    let mut end = max;
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    (&text[..end], true)
}

#[cfg(test)]
mod tests {
    use super::cut;

    #[test]
    fn s32_cut_keeps_characters_whole() {
        assert_eq!(cut("häuser", 2), ("h", true));
        assert_eq!(cut("häuser", 3), ("hä", true));
        assert_eq!(cut("ok", 2), ("ok", false));
        assert_eq!(cut("ä", 0), ("", true));
    }
}
