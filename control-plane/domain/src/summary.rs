//! Summaries: text that stands for the shared history up to a position.

use serde::{Deserialize, Serialize};

use crate::id::ConversationId;
use crate::limits::{MAX_NAME, MAX_SUMMARY};
use crate::message::Position;
use crate::time::Timestamp;

/// One version of a conversation's summary, as stored. Versions are never changed; a change makes the next one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Summary {
    /// Its conversation.
    pub conversation_id: ConversationId,
    /// Its number, from 1, contiguous.
    pub version: u64,
    /// It speaks of the history up to this position, that one included.
    pub through: Position,
    /// The text.
    pub text: String,
    /// Who wrote it.
    pub author: String,
    /// When it was stored.
    pub create_time: Timestamp,
}

/// Why a summary is not stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SummaryRefusal {
    /// The text is empty.
    #[error("text: must not be empty")]
    Empty,
    /// The text is too long.
    #[error("text: {bytes} bytes; a summary has at most {MAX_SUMMARY}")]
    TooLong {
        /// What it has.
        bytes: usize,
    },
    /// The author's name is too long.
    #[error("author: at most {MAX_NAME} bytes")]
    Author,
    /// It is about nothing, or about messages that are not there.
    #[error("through: {through} is no position of the history, which has {last}")]
    Through {
        /// What was said.
        through: Position,
        /// The history's last position.
        last: Position,
    },
    /// The writer does not know the current version.
    #[error("the summary has version {current}, not {expected}")]
    Version {
        /// The version that the writer knows.
        expected: u64,
        /// The current one; 0 when there is none.
        current: u64,
    },
}

impl SummaryRefusal {
    /// The field of a request that it is about; none when it is about what is stored.
    #[must_use]
    pub const fn field(self) -> Option<&'static str> {
        match self {
            Self::Empty | Self::TooLong { .. } => Some("text"),
            Self::Author => Some("author"),
            Self::Through { .. } => Some("through"),
            Self::Version { .. } => None,
        }
    }
}

/// What somebody wants to store.
#[derive(Clone, Copy, Debug)]
pub struct Proposal<'a> {
    /// The version that the writer knows as the current one; 0: none.
    pub expected_version: u64,
    /// What it covers.
    pub through: Position,
    /// The text.
    pub text: &'a str,
    /// Who writes.
    pub author: &'a str,
}

/// The version that a proposal becomes, given the current version (0: none) and the history's last position.
///
/// The version is looked at last: a text that can never be stored is told so, whoever was faster.
///
/// # Errors
/// See [`SummaryRefusal`].
pub fn admit(proposal: &Proposal<'_>, current: u64, last: Position) -> Result<u64, SummaryRefusal> {
    if proposal.text.trim().is_empty() {
        Err(SummaryRefusal::Empty)
    } else if proposal.text.len() > MAX_SUMMARY {
        Err(SummaryRefusal::TooLong { bytes: proposal.text.len() })
    } else if proposal.author.len() > MAX_NAME {
        Err(SummaryRefusal::Author)
    } else if proposal.through == Position::START || proposal.through > last {
        Err(SummaryRefusal::Through { through: proposal.through, last })
    } else if proposal.expected_version != current {
        Err(SummaryRefusal::Version { expected: proposal.expected_version, current })
    } else {
        Ok(current.saturating_add(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: Proposal<'_> =
        Proposal { expected_version: 0, through: Position(2), text: "They counted.", author: "ann" };

    #[test]
    fn s63_the_writer_has_to_know_the_current_version() {
        assert_eq!(admit(&GOOD, 0, Position(2)), Ok(1));
        assert_eq!(admit(&GOOD, 1, Position(2)), Err(SummaryRefusal::Version { expected: 0, current: 1 }));
        assert_eq!(admit(&Proposal { expected_version: 1, ..GOOD }, 1, Position(2)), Ok(2));
        assert_eq!(
            admit(&Proposal { expected_version: 2, ..GOOD }, 1, Position(2)),
            Err(SummaryRefusal::Version { expected: 2, current: 1 })
        );
    }

    #[test]
    fn a_summary_speaks_of_messages_that_are_there() {
        for (through, last) in [(0, 2), (3, 2), (1, 0)] {
            let (through, last) = (Position(through), Position(last));
            let refused = admit(&Proposal { through, ..GOOD }, 0, last);
            assert_eq!(refused, Err(SummaryRefusal::Through { through, last }));
        }
    }

    #[test]
    fn a_text_that_can_never_be_stored_is_refused_as_such() {
        let long = "x".repeat(MAX_SUMMARY + 1);
        for (text, refusal) in [
            ("", SummaryRefusal::Empty),
            (" \n", SummaryRefusal::Empty),
            (&long, SummaryRefusal::TooLong { bytes: MAX_SUMMARY + 1 }),
        ] {
            assert_eq!(admit(&Proposal { text, expected_version: 9, ..GOOD }, 0, Position(2)), Err(refusal));
            assert_eq!(refusal.field(), Some("text"));
        }
        assert_eq!(admit(&Proposal { text: &long[1..], ..GOOD }, 0, Position(2)), Ok(1));
    }
}
