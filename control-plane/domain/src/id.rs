//! Identifiers: a prefix that says what they name, and an alphabet that is safe in argv and paths.
//!
//! Ids are made from a UUID that the caller brings. Keys made of several parts are length-prefixed before
//! they are hashed, so that no two different lists of parts collide.

use std::fmt;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// Longest id, in bytes.
pub const MAX_ID: usize = 64;

/// Longest client request id, in bytes.
pub const MAX_REQUEST_ID: usize = 128;

/// Why a text is no id.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IdError {
    /// The id is empty.
    #[error("{kind} is empty")]
    Empty {
        /// What kind of id was expected.
        kind: &'static str,
    },
    /// The id is longer than allowed.
    #[error("{kind} is longer than {max} bytes")]
    TooLong {
        /// What kind of id was expected.
        kind: &'static str,
        /// The limit in bytes.
        max: usize,
    },
    /// The id holds a character outside the alphabet, or starts with a dash.
    #[error("{kind} may hold letters, digits, underscore and dash, and no leading dash")]
    Alphabet {
        /// What kind of id was expected.
        kind: &'static str,
    },
    /// The id does not start with the prefix of its kind.
    #[error("{kind} starts with {prefix}")]
    Prefix {
        /// What kind of id was expected.
        kind: &'static str,
        /// The prefix that was expected.
        prefix: &'static str,
    },
}

/// Whether `text` is safe in argv and as one path component: letters, digits, `_`, `-`, no leading dash.
#[must_use]
pub fn is_safe(text: &str) -> bool {
    !text.is_empty()
        && text.len() <= MAX_ID
        && !text.starts_with('-')
        && text.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_' || b == b'-')
}

fn check(kind: &'static str, prefix: &'static str, text: &str) -> Result<(), IdError> {
    if text.is_empty() {
        Err(IdError::Empty { kind })
    } else if text.len() > MAX_ID {
        Err(IdError::TooLong { kind, max: MAX_ID })
    } else if !is_safe(text) {
        Err(IdError::Alphabet { kind })
    } else if !text.starts_with(prefix) || text.len() == prefix.len() {
        Err(IdError::Prefix { kind, prefix })
    } else {
        Ok(())
    }
}

macro_rules! id {
    ($(#[$meta:meta])* $name:ident, $kind:literal, $prefix:literal) => {
        $(#[$meta])*
        #[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(String);

        impl $name {
            /// What ids of this kind start with.
            pub const PREFIX: &'static str = $prefix;

            /// The id made from this UUID (a version 7 one, so that ids sort by age).
            #[must_use]
            pub fn new(uuid: Uuid) -> Self {
                Self(format!(concat!($prefix, "{}"), uuid.simple()))
            }

            /// Checks a text that somebody gave us.
            ///
            /// # Errors
            /// [`IdError`] when it is empty, too long, of another kind or outside the alphabet.
            pub fn parse(text: impl Into<String>) -> Result<Self, IdError> {
                let text = text.into();
                check($kind, $prefix, &text)?;
                Ok(Self(text))
            }

            /// The id as text.
            #[must_use]
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl TryFrom<String> for $name {
            type Error = IdError;
            fn try_from(text: String) -> Result<Self, IdError> {
                Self::parse(text)
            }
        }

        impl From<$name> for String {
            fn from(id: $name) -> Self {
                id.0
            }
        }

        impl std::str::FromStr for $name {
            type Err = IdError;
            fn from_str(text: &str) -> Result<Self, IdError> {
                Self::parse(text)
            }
        }

        impl AsRef<str> for $name {
            fn as_ref(&self) -> &str {
                &self.0
            }
        }
    };
}

id!(/** Names a conversation. */ ConversationId, "conversation id", "cnv_");
id!(/** Names a message. */ MessageId, "message id", "msg_");
id!(/** Names a turn. */ TurnId, "turn id", "trn_");
id!(/** Names a session row of ours; never the engine's own id. */ SessionId, "session id", "ses_");
id!(/** Names a runner; made once, kept in the runner's state directory. */ RunnerId, "runner id", "run_");
id!(/** Names a workspace: a directory on a runner. */ WorkspaceId, "workspace id", "wsp_");
id!(/** Names a control plane: the one a runner is bound to. */ ControlPlaneId, "control plane id", "ctl_");

impl WorkspaceId {
    /// The id of the directory `canonical_path` on `runner`: two spellings of one path have one id, provided
    /// that the runner resolved them.
    #[must_use]
    pub fn derive(runner: &RunnerId, canonical_path: &str) -> Self {
        Self::new(uuid_of(&[runner.as_str().as_bytes(), canonical_path.as_bytes()]))
    }
}

/// The id under which one message is given to one engine session in one turn (hyphenated, as engines expect).
///
/// A retry is another turn and so has another delivery id: an engine answers a repeated one with silence.
#[must_use]
pub fn delivery_id(turn: &TurnId, session: &SessionId, message: &MessageId) -> String {
    let parts = [turn.as_str().as_bytes(), session.as_str().as_bytes(), message.as_str().as_bytes()];
    uuid_of(&parts).hyphenated().to_string()
}

/// Namespace of every UUIDv5 made here.
const NAMESPACE: Uuid = Uuid::from_u128(0x6f0b_7d1e_52c4_5b39_9a57_0c7e_8d41_23aa);

fn uuid_of(parts: &[&[u8]]) -> Uuid {
    Uuid::new_v5(&NAMESPACE, &length_prefixed(parts))
}

/// Joins parts so that no two different lists give the same bytes: each part after its length (u64, big endian).
#[must_use]
pub fn length_prefixed(parts: &[&[u8]]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(parts.iter().map(|p| p.len() + 8).sum());
    for part in parts {
        bytes.extend_from_slice(&(part.len() as u64).to_be_bytes());
        bytes.extend_from_slice(part);
    }
    bytes
}

/// The key under which a client makes a call repeatable. Chosen by the client: 1 to 128 bytes of letters,
/// digits and `_ - . : /`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct RequestId(String);

impl RequestId {
    /// Checks a text that a client gave us.
    ///
    /// # Errors
    /// [`IdError`] when it is empty, too long or outside the alphabet.
    pub fn parse(text: impl Into<String>) -> Result<Self, IdError> {
        let text = text.into();
        let kind = "request id";
        if text.is_empty() {
            Err(IdError::Empty { kind })
        } else if text.len() > MAX_REQUEST_ID {
            Err(IdError::TooLong { kind, max: MAX_REQUEST_ID })
        } else if !text.bytes().all(|b| b.is_ascii_alphanumeric() || b"_-.:/".contains(&b)) {
            Err(IdError::Alphabet { kind })
        } else {
            Ok(Self(text))
        }
    }

    /// The id as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl TryFrom<String> for RequestId {
    type Error = IdError;
    fn try_from(text: String) -> Result<Self, IdError> {
        Self::parse(text)
    }
}

impl From<RequestId> for String {
    fn from(id: RequestId) -> Self {
        id.0
    }
}

/// The fencing token of a conversation's lock. Grows with each owner; 0 means that nobody ever owned it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Epoch(pub u64);

impl Epoch {
    /// The epoch of the next owner.
    #[must_use]
    pub const fn next(self) -> Self {
        Self(self.0.saturating_add(1))
    }
}

impl fmt::Display for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn s20_keys_of_several_parts_do_not_collide() {
        assert_ne!(length_prefixed(&[b"a/b", b"c"]), length_prefixed(&[b"a", b"b/c"]));
        let a = RunnerId::parse("run_a").unwrap();
        let ab = RunnerId::parse("run_ab").unwrap();
        assert_ne!(WorkspaceId::derive(&a, "b/c"), WorkspaceId::derive(&ab, "/c"));
        assert_eq!(WorkspaceId::derive(&a, "/w"), WorkspaceId::derive(&a, "/w"));
    }

    #[test]
    fn s19_ids_are_safe_in_argv_and_paths() {
        for bad in ["", "-x", "trn_", "trn_../x", "trn_a b", "cnv_a", "trn_é"] {
            assert!(TurnId::parse(bad).is_err(), "{bad:?} was taken");
        }
        assert!(TurnId::parse(format!("trn_{}", "a".repeat(61))).is_err());
        assert_eq!(TurnId::parse("trn_a-b_C9").unwrap().as_str(), "trn_a-b_C9");
        assert!(!is_safe("-rf"));
    }

    #[test]
    fn s64_a_delivery_belongs_to_one_turn_session_and_message() {
        let (t1, t2) = (TurnId::parse("trn_1").unwrap(), TurnId::parse("trn_2").unwrap());
        let session = SessionId::parse("ses_1").unwrap();
        let message = MessageId::parse("msg_1").unwrap();
        assert_ne!(delivery_id(&t1, &session, &message), delivery_id(&t2, &session, &message));
        assert_eq!(delivery_id(&t1, &session, &message), delivery_id(&t1, &session, &message));
        assert_eq!(delivery_id(&t1, &session, &message).len(), 36);
    }

    #[test]
    fn ids_survive_serde_and_are_checked_by_it() {
        let id = ConversationId::new(Uuid::from_u128(7));
        let text = serde_json::to_string(&id).unwrap();
        assert_eq!(serde_json::from_str::<ConversationId>(&text).unwrap(), id);
        assert!(serde_json::from_str::<ConversationId>("\"trn_1\"").is_err());
    }
}
