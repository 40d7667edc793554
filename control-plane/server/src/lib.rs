//! The control plane: what is shared between people, agents and runners. It never runs an engine.
//!
//! ```text
//! clients ---- grpc ----> store <---- dispatch ----> runners ----> engine-runner
//!                 \                      |
//!                  \------- hub <--------/   (hints and unfinished text, all of it may be lost)
//! ```
//!
//! Not in here: rules (they are in the domain), SQL (it is in the store), anything that starts a process.

#![forbid(unsafe_code)]

mod app;
mod args;
mod clock;
mod convert;
mod dispatch;
mod error;
pub mod failpoint;
mod grpc;
mod hub;
mod retention;
mod runners;
mod server;
mod settings;
mod targets;
mod tasks;

pub use args::main;
pub use server::DATABASE;
pub use server::{Server, StartError};
pub use settings::Settings;

/// What is done to the database from outside a server: see the functions.
pub mod upkeep {
    pub use roundhouse_store::Error;
    pub use roundhouse_store::upkeep::{CheckReport, Restored, backup, check, restore};
}
