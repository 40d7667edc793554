//! Ids: which are accepted, and those that are computed.

use std::path::Path;

use uuid::Uuid;

/// Under this namespace all computed ids of Roundhouse lie.
const NAMESPACE: Uuid = Uuid::from_u128(0x9d0c_52f3_6a1e_5b47_8f6e_2c71_d0a4_be19);

/// Whether an id may be used in paths and arguments: letters, digits, `_`, `-`, no leading dash, 1 to 64 bytes.
#[must_use]
pub(crate) fn is_valid(id: &str) -> bool {
    roundhouse_process::is_valid_id(id)
}

/// The parts, each with its length before it, so that no two lists of parts read the same.
fn length_prefixed(parts: &[&[u8]]) -> Vec<u8> {
    let mut key = Vec::new();
    for part in parts {
        key.extend_from_slice(&(part.len() as u64).to_be_bytes());
        key.extend_from_slice(part);
    }
    key
}

/// The id under which a message is given to an engine. It belongs to one delivery of one turn: a retry is another
/// turn and has another one, because an engine answers an id that it has seen with silence.
#[must_use]
pub(crate) fn delivery_id(turn_id: &str, session_id: &str, message_id: &str) -> String {
    let key = length_prefixed(&[turn_id.as_bytes(), session_id.as_bytes(), message_id.as_bytes()]);
    Uuid::new_v5(&NAMESPACE, &key).hyphenated().to_string()
}

/// The id of a workspace.
#[must_use]
pub(crate) fn workspace_id(runner_id: &str, canonical: &Path) -> String {
    let key = length_prefixed(&[runner_id.as_bytes(), canonical.as_os_str().as_encoded_bytes()]);
    format!("wsp_{}", Uuid::new_v5(&NAMESPACE, &key).simple())
}

/// A fresh runner id.
#[must_use]
pub(crate) fn new_runner_id() -> String {
    format!("run_{}", Uuid::now_v7().simple())
}

/// A fresh spool id.
#[must_use]
pub(crate) fn new_spool_id() -> String {
    format!("spl_{}", Uuid::now_v7().simple())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn s20_parts_are_length_prefixed() {
        assert_ne!(delivery_id("a_b", "c", "m"), delivery_id("a", "b_c", "m"));
        assert_ne!(delivery_id("ab", "c", "m"), delivery_id("a", "bc", "m"));
        assert_eq!(delivery_id("t", "s", "m"), delivery_id("t", "s", "m"));
    }

    #[test]
    fn s64_a_retry_is_another_delivery() {
        assert_ne!(delivery_id("trn_1", "ses_1", "msg_1"), delivery_id("trn_2", "ses_1", "msg_1"));
    }

    #[test]
    fn s19_ids_have_a_limited_alphabet() {
        for good in ["a", "trn_0-1", &"x".repeat(64)] {
            assert!(is_valid(good), "{good}");
        }
        for bad in ["", "-a", "a/b", "..", "a.b", "ü", &"x".repeat(65)] {
            assert!(!is_valid(bad), "{bad}");
        }
    }
}
