//! Limits on what an event may carry, and the one way to cut text to them.
//!
//! A cut is always on a character boundary and always flagged; the whole text stays in the spool.

use serde::{Deserialize, Serialize};

/// The most bytes the main text of one event carries.
pub const EVENT_TEXT_LIMIT: usize = 64_000;

/// The most bytes a short field (a path, a name, a one-line detail) carries.
pub const FIELD_LIMIT: usize = 4_096;

/// The most bytes of a turn's answer, and of one item's partial text.
pub const ANSWER_LIMIT: usize = 1_048_576;

/// The most bytes of standard error kept for a failure's details.
pub const STDERR_TAIL_LIMIT: usize = 8_192;

/// Text that was cut to a limit, and says so.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct BoundedText {
    /// The text, or its beginning.
    pub text: String,
    /// Whether something was cut off the end.
    pub truncated: bool,
    /// How many bytes the whole text had.
    pub full_bytes: u64,
}

impl BoundedText {
    /// Cuts `text` to [`EVENT_TEXT_LIMIT`].
    #[must_use]
    pub fn event(text: &str) -> Self {
        Self::cut(text, EVENT_TEXT_LIMIT)
    }

    /// Cuts `text` to [`FIELD_LIMIT`].
    #[must_use]
    pub fn field(text: &str) -> Self {
        Self::cut(text, FIELD_LIMIT)
    }

    /// Cuts `text` to [`ANSWER_LIMIT`].
    #[must_use]
    pub fn answer(text: &str) -> Self {
        Self::cut(text, ANSWER_LIMIT)
    }

    /// Cuts `text` to at most `limit` bytes, on a character boundary.
    #[must_use]
    pub fn cut(text: &str, limit: usize) -> Self {
        let kept = prefix(text, limit);
        Self { text: kept.to_owned(), truncated: kept.len() < text.len(), full_bytes: text.len() as u64 }
    }
}

/// The longest prefix of `text` that has at most `limit` bytes and ends on a character boundary.
#[must_use]
pub fn prefix(text: &str, limit: usize) -> &str {
    &text[..text.floor_char_boundary(limit)]
}

/// The longest suffix of `text` that has at most `limit` bytes and starts on a character boundary.
#[must_use]
pub fn suffix(text: &str, limit: usize) -> &str {
    &text[text.ceil_char_boundary(text.len().saturating_sub(limit))..]
}

/// A short field cut to [`FIELD_LIMIT`], where the flag has no place of its own.
#[must_use]
pub(crate) fn short(text: &str) -> String {
    prefix(text, FIELD_LIMIT).to_owned()
}

/// Joins a piece to a text, with an empty line between, keeping at most [`ANSWER_LIMIT`] bytes and counting
/// all of them.
pub(crate) fn join(text: &mut String, bytes: &mut u64, piece: &str) {
    if *bytes > 0 && !piece.is_empty() {
        *bytes += 2;
        text.push_str(prefix("\n\n", ANSWER_LIMIT.saturating_sub(text.len())));
    }
    *bytes += piece.len() as u64;
    text.push_str(prefix(piece, ANSWER_LIMIT.saturating_sub(text.len())));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn s32_cuts_fall_on_character_boundaries_and_are_flagged() {
        let text = "é".repeat(40_000);
        let cut = BoundedText::event(&text);
        assert!(cut.truncated);
        assert_eq!(cut.text.len(), 64_000);
        assert_eq!(cut.full_bytes, 80_000);

        let odd = format!("x{text}");
        assert_eq!(BoundedText::event(&odd).text.len(), 63_999);
        assert_eq!(suffix(&odd, 3), "é");
        assert_eq!(prefix("abc", 10), "abc");
        assert!(!BoundedText::event("abc").truncated);
    }
}
