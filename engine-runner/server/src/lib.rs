//! The engine runner: turn actor, journal, recovery and gRPC service.
//!
//! ```text
//! grpc ──> runner ──> turn ──> engine ──> keeper (another process)
//!                      │ └──> journal, hub ──> readers
//!                      └────> pool (idle engines)
//! ```
//!
//! The runner hosts engines and never replaces an engine's own agent loop. It survives its own end: keepers hold the
//! engines, spools hold what they said, journals hold what was told of it.

mod args;
mod container;
mod context;
mod end;
mod engine;
mod environment;
mod epochs;
mod error;
mod facts;
mod failpoint;
mod fingerprint;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod git;
pub mod grpc;
mod holds;
mod hub;
mod ids;
mod install;
mod journal;
mod keeper;
mod launch;
mod leftovers;
mod pool;
mod prune;
mod registration;
mod repair;
mod request;
mod runner;
mod session_record;
mod slots;
mod spares;
mod spawn_failure;
mod startup;
mod state_dir;
mod turn;
mod workspace;

mod server;

pub use args::Args;
pub use end::end_engines;
pub use error::Error;
pub use facts::{EngineFacts, IsolationFacts, engine_facts, isolation_facts, pinned_engines};
pub use install::{InstallError, find as find_engine, install_engine, installed_path, pinned_version};
pub use roundhouse_process::reexec;
pub use server::{Prepared, RunError, STOP_LIMIT, main, prepare, reset};
pub use state_dir::StateError;
