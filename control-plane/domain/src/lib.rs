//! The rules of the control plane, without any input or output.
//!
//! Nothing here reads a clock, makes an id, opens a file or speaks a protocol: times, ids and randomness
//! come in as parameters, decisions go out as values. The store persists what these rules decide and the
//! server carries it out.

#![forbid(unsafe_code)]

#[macro_use]
mod names;

pub mod agent_file;
pub mod attention;
pub mod conflict;
pub mod context;
pub mod conversation;
pub mod cursor;
pub mod event;
pub mod id;
pub mod limits;
pub mod message;
pub mod outcome;
pub mod permission;
pub mod queue;
pub mod runner;
pub mod session;
pub mod summary;
pub mod time;
pub mod turn;
pub mod usage;
pub mod workspace;
