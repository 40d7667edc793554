//! The rules of the control plane, without any input or output.
//!
//! Nothing here reads a clock, makes an id, opens a file or speaks a protocol: times, ids and randomness
//! come in as parameters, decisions go out as values. The store persists what these rules decide and the
//! server carries it out.

#![forbid(unsafe_code)]

pub mod agent_file;
pub mod context;
