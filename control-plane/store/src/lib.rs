//! Durable state of the control plane: the [`Store`] trait and its SQLite implementation.
//!
//! Every method of the trait is one whole intent in one transaction: when it has answered, what it says is on
//! disk; when it has not, nothing of it is, and it can be repeated. Ids and times are passed in, conflicts come
//! back as values. Nothing in the trait knows of SQL, and nothing relies on there being one writer.
//!
//! Not in here: an opinion about engines, a clock, a network, the meaning of an event's payload.

#![forbid(unsafe_code)]

mod command;
#[cfg(any(test, feature = "conformance"))]
pub mod conformance;
mod error;
mod hint;
mod sqlite;
mod store;
mod view;

pub use command::*;
pub use error::{Error, Result, Unavailable};
pub use hint::{Hint, Hints};
pub use sqlite::upkeep;
pub use sqlite::{Settings, SqliteStore};
pub use store::Store;
pub use view::*;
