//! Cursors as clients see them: opaque, tied to their conversation, checked.

use crate::id::{ConversationId, length_prefixed};
use uuid::Uuid;

/// Why a text is no cursor of this conversation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a cursor of this conversation")]
pub struct BadCursor;

const NAMESPACE: Uuid = Uuid::from_u128(0x1c1e_64c2_9b0b_5d3e_8b6d_66a1_0b4f_57d2);

fn check(conversation: &ConversationId, value: u64) -> u32 {
    let bytes = length_prefixed(&[conversation.as_str().as_bytes(), &value.to_be_bytes()]);
    let hash = Uuid::new_v5(&NAMESPACE, &bytes);
    let [a, b, c, d, ..] = *hash.as_bytes();
    u32::from_be_bytes([a, b, c, d])
}

/// The cursor after the change `value` of `conversation`.
#[must_use]
pub fn encode(conversation: &ConversationId, value: u64) -> String {
    format!("c{value:x}-{:08x}", check(conversation, value))
}

/// The value in a cursor. The empty text is 0: from the oldest kept.
///
/// # Errors
/// [`BadCursor`] when it was not made by [`encode`] for this conversation.
pub fn decode(conversation: &ConversationId, text: &str) -> Result<u64, BadCursor> {
    if text.is_empty() {
        return Ok(0);
    }
    let (value, _) = text.strip_prefix('c').and_then(|t| t.split_once('-')).ok_or(BadCursor)?;
    let value = u64::from_str_radix(value, 16).map_err(|_| BadCursor)?;
    if encode(conversation, value) == text { Ok(value) } else { Err(BadCursor) }
}

/// What a conversation says to a cursor value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// Changes after this value can be read.
    From(u64),
    /// Some of what comes after it is gone.
    Pruned {
        /// The last value that is gone.
        pruned_through: u64,
    },
    /// It was never given out.
    Unknown,
}

/// Judges a cursor value. 0 means from the oldest kept and is never pruned.
#[must_use]
pub const fn judge(value: u64, pruned_through: u64, newest: u64) -> Standing {
    if value == 0 {
        Standing::From(pruned_through)
    } else if value > newest {
        Standing::Unknown
    } else if value < pruned_through {
        Standing::Pruned { pruned_through }
    } else {
        Standing::From(value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cursor_is_tied_to_its_conversation_and_checked() {
        let (a, b) = (ConversationId::parse("cnv_a").unwrap(), ConversationId::parse("cnv_b").unwrap());
        let text = encode(&a, 300);
        assert_eq!(decode(&a, &text), Ok(300));
        assert_eq!(decode(&b, &text), Err(BadCursor));
        assert_eq!(decode(&a, ""), Ok(0));
        for bad in ["c", "c12c", "c12d-00000000", "x12c-0", "300", "C12C-0", "c+12c-00000000", "é"] {
            assert_eq!(decode(&a, bad), Err(BadCursor), "{bad}");
        }
    }

    #[test]
    fn pruned_and_unknown_cursors_are_told_apart() {
        assert_eq!(judge(0, 5, 9), Standing::From(5));
        assert_eq!(judge(4, 5, 9), Standing::Pruned { pruned_through: 5 });
        assert_eq!(judge(5, 5, 9), Standing::From(5));
        assert_eq!(judge(9, 5, 9), Standing::From(9));
        assert_eq!(judge(10, 5, 9), Standing::Unknown);
    }
}
