//! What can go wrong with a scripted model.

use std::time::Duration;

/// Why a call on a scripted model failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The server could not listen.
    #[error("cannot listen on {address}")]
    Listen {
        /// Where it tried to.
        address: String,
        /// What the system said.
        #[source]
        source: std::io::Error,
    },
    /// A script text does not follow the [grammar](crate::grammar).
    #[error("bad script marker {marker:?}: {problem}")]
    Grammar {
        /// The inside of the marker, cut to 80 characters.
        marker: String,
        /// What is wrong with it.
        problem: String,
    },
    /// What was awaited did not happen in time.
    #[error("{what} did not happen within {limit:?}; {seen}")]
    TimedOut {
        /// What was awaited.
        what: String,
        /// How long.
        limit: Duration,
        /// What was there instead, for the person who reads the failed test.
        seen: String,
    },
}
