//! The command line.

use std::path::PathBuf;

use clap::{Parser, Subcommand, ValueEnum};
use roundhouse_config::{Config, Problems, Root, Sources, load};

/// Hosts coding agents where their workspaces lie.
#[derive(Debug, Parser)]
#[command(name = "engine-runner", version, about)]
pub struct Args {
    /// Configuration file. Default: roundhouse.toml in the XDG configuration directory.
    #[arg(long, global = true, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// A setting, such as runner.warm_ttl=5m. Can be repeated.
    #[arg(long = "set", global = true, value_name = "KEY=VALUE")]
    pub settings: Vec<String>,
    /// Directory of sessions, spools, journals and engine homes.
    #[arg(long, global = true, value_name = "DIR")]
    pub state_dir: Option<PathBuf>,
    /// Address and port to listen on. Port 0 takes a free one.
    #[arg(long, value_name = "HOST:PORT")]
    pub listen: Option<String>,
    /// A directory that workspaces may lie in. Can be repeated.
    #[arg(long, value_name = "DIR")]
    pub root: Vec<PathBuf>,
    /// A directory that workspaces may lie in, whose content may configure engines. Can be repeated.
    #[arg(long, value_name = "DIR")]
    pub trust_root: Vec<PathBuf>,
    /// URI of the control plane to register with.
    #[arg(long, value_name = "URI")]
    pub control_plane: Option<String>,
    /// URI at which the control plane reaches this runner.
    #[arg(long, value_name = "URI")]
    pub advertise: Option<String>,
    /// Listen on an address other than loopback, without protection.
    #[arg(long)]
    pub insecure_listen: bool,
    /// Cancel running turns when told to stop, rather than leaving them to their keepers.
    #[arg(long)]
    pub stop_turns: bool,
    /// Print the ready line as JSON.
    #[arg(long)]
    pub ready_json: bool,
    /// Form of the log on stderr.
    #[arg(long, global = true, value_enum, default_value_t = LogFormat::Text)]
    pub log_format: LogFormat,
    /// What is logged, such as info or roundhouse_engine_runner=debug.
    #[arg(long, global = true, value_name = "FILTER", env = "ROUNDHOUSE_LOG", default_value = "info")]
    pub log: String,
    /// What to do instead of running.
    #[command(subcommand)]
    pub command: Option<Act>,
}

/// What to do instead of running.
#[derive(Debug, Clone, Copy, Subcommand)]
pub enum Act {
    /// Unbind this runner from its control plane.
    Reset,
}

/// Form of the log.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum LogFormat {
    /// For people.
    Text,
    /// For programs.
    Json,
}

impl Args {
    /// The configuration with the command line over it.
    ///
    /// # Errors
    /// All that is wrong in any layer.
    pub fn load(&self) -> Result<Config, Problems> {
        let mut sources = Sources::from_environment();
        sources.file.clone_from(&self.config);
        sources.settings.clone_from(&self.settings);
        let mut config = load(&sources)?;
        let runner = &mut config.runner;
        if let Some(listen) = &self.listen {
            runner.listen.clone_from(listen);
        }
        if let Some(state_dir) = &self.state_dir {
            runner.state_dir.clone_from(state_dir);
        }
        if let Some(control_plane) = &self.control_plane {
            runner.control_plane.clone_from(control_plane);
        }
        if let Some(advertise) = &self.advertise {
            runner.advertise.clone_from(advertise);
        }
        for (paths, trust) in [(&self.root, false), (&self.trust_root, true)] {
            runner.roots.extend(paths.iter().map(|path| Root { path: path.clone(), trust }));
        }
        runner.insecure_listen |= self.insecure_listen;
        runner.stop_turns |= self.stop_turns;
        Ok(config)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_log_filter_can_be_set_in_the_environment() {
        use clap::CommandFactory as _;
        let command = Args::command();
        let log = command.get_arguments().find(|arg| arg.get_id() == "log").unwrap();
        assert_eq!(log.get_env(), Some("ROUNDHOUSE_LOG".as_ref()));
    }
}
