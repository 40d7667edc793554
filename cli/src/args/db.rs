//! Of `db`: the control plane's database.

use std::path::PathBuf;

use clap::{Args, Subcommand};

/// Of `db`.
#[derive(Debug, Args)]
pub(crate) struct DbArgs {
    /// The directory that `up --state-dir` was given [default: control_plane.state_dir of the configuration]
    #[arg(long, global = true, value_name = "DIR")]
    pub(crate) state_dir: Option<PathBuf>,
    #[command(subcommand)]
    pub(crate) what: DbCommand,
}

/// What to do with it.
#[derive(Debug, Subcommand)]
pub(crate) enum DbCommand {
    /// Look whether it is whole: the file, its references, its version, and what Roundhouse promises of what it holds
    ///
    /// A control plane may run meanwhile; nothing is written. Exit code 1 when something is wrong.
    #[command(
        after_long_help = "JSON: {\"database\", \"whole\": bool, \"schema\", \"known_schema\", \"conversations\", \
        \"turns\", \"changes\", \"problems\": [text]}"
    )]
    Check,
    /// Copy it as it is at one moment; a control plane may run and goes on meanwhile
    ///
    /// The copy is one file, for its owner alone, and is checked. A file that is there is not overwritten (exit code 4).
    #[command(after_long_help = "JSON: {\"backup\": FILE, \"check\": as check}")]
    Backup {
        /// The file to make
        file: PathBuf,
    },
    /// Put a copy in its place; what was there is kept beside it
    ///
    /// Not while a control plane has it open (exit code 4), nor from a copy that is not whole or of a newer version (exit
    /// code 3): then nothing is changed. Cut off at any moment it leaves one of the two, whole.
    #[command(after_long_help = "JSON: {\"restored\": PATH, \"kept\": PATH or null, \"check\": as check}")]
    Restore {
        /// The copy
        file: PathBuf,
    },
}
