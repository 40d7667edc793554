//! The configuration of all parts of Roundhouse: one schema, one loader.
//!
//! One file, `roundhouse.toml`, serves both services and the command line. Values come from, each over the one before:
//! the defaults, the file, `ROUNDHOUSE_<SECTION>_<KEY>` variables, and `section.key=value` settings from the command
//! line. Unknown keys are refused with the nearest known one, and all problems are told at once, each with the layer
//! that it comes from, so that a person mends a file in one go.

mod load;
mod schema;

pub use load::{Layer, Problem, Problems, Sources, default_file, load, show};
pub use schema::{
    Client, Config, ControlPlane, Credentials, EngineSettings, Profile, Root, Runner, default_state_dir,
};
