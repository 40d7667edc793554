//! Of `summary`, `sessions` and `runners`: what is shared between engines and hosts.

use clap::Subcommand;

/// Of `summary`.
#[derive(Debug, Subcommand)]
pub(crate) enum SummaryCommand {
    /// Show the current summary, or an earlier version of it
    #[command(after_long_help = "JSON: {\"summary\": {...}}. Exit code 4 when there is none")]
    Get {
        /// The conversation: its id, or PROJECT:PROVIDER:ID
        conversation: String,
        /// The version [default: the current one]
        #[arg(long, value_parser = clap::value_parser!(u64).range(1..), value_name = "VERSION")]
        version: Option<u64>,
    },
    /// Store the next version of the summary
    ///
    /// Of two writers who know the same version one wins; the other is told the current version (exit code 4).
    #[command(after_long_help = "JSON: {\"summary\": {...}}")]
    Put {
        /// The conversation: its id, or PROJECT:PROVIDER:ID
        conversation: String,
        /// The text; - reads it from standard input
        text: String,
        /// It speaks of the messages up to this position (`roundhouse messages` shows positions)
        #[arg(long, value_parser = clap::value_parser!(u64).range(1..), value_name = "POSITION")]
        through: u64,
        /// The version that you know as the current one; 0 when there is none yet
        #[arg(long, value_name = "VERSION")]
        expected_version: u64,
        /// Who writes, for the record [default: user]
        #[arg(long, value_name = "NAME")]
        author: Option<String>,
        /// Makes a repeat harmless [default: a fresh one]
        #[arg(long, value_name = "ID")]
        request_id: Option<String>,
    },
}

/// Of `sessions`.
#[derive(Debug, Subcommand)]
pub(crate) enum SessionsCommand {
    /// Mark a session unusable for ever: the next turn gets a new one, told of what was said
    ///
    /// Its files are kept and the workspace is not touched. Not while a turn of its conversation runs or waits.
    #[command(after_long_help = "JSON: {\"session\": {...}}")]
    Unusable {
        /// The session
        session: String,
        /// Why, for whoever looks at it later
        #[arg(long)]
        reason: String,
        /// Makes a repeat harmless [default: a fresh one]
        #[arg(long, value_name = "ID")]
        request_id: Option<String>,
    },
}
