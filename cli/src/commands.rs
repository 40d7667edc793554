//! What each command does.

mod agents;
mod config;
mod conversations;
mod doctor;
mod engines;
mod listing;
mod permissions;
mod send;
mod stream;
mod turns;

use roundhouse_config::{Config, Sources};

use crate::args::{Cli, Command, Global};
use crate::client::Client;
use crate::exit::Exit;
use crate::output::Output;
use crate::status::Failure;

/// Runs a command to its exit code.
pub(crate) async fn run(cli: Cli, output: Output) -> Result<Exit, Failure> {
    let Cli { global, command } = cli;
    match command {
        Command::Completions { shell } => Ok(completions(shell, output)),
        Command::Config(what) => config::run(&global, what, output),
        Command::Send(args) => send::send(&client(&global)?, args, output).await,
        Command::Retry(args) => send::retry(&client(&global)?, args, output).await,
        Command::Cancel(args) => send::cancel(&client(&global)?, args, output).await,
        Command::Events(args) => stream::run(client(&global)?, args, output).await,
        Command::Conversations(what) => conversations::run(&client(&global)?, what, output).await,
        Command::Messages(args) => listing::messages(&client(&global)?, args, output).await,
        Command::Turns(args) => turns::run(&client(&global)?, args, output).await,
        Command::Sessions(args) => listing::sessions(&client(&global)?, args, output).await,
        Command::Runners => listing::runners(&client(&global)?, output).await,
        Command::Workspaces(what) => listing::workspaces(&client(&global)?, what, output).await,
        Command::Agents(what) => agents::run(&client(&global)?, what, output).await,
        Command::Permissions(what) => permissions::run(&client(&global)?, what, output).await,
        Command::Engines(what) => engines::run(&global, what, output).await,
        Command::Doctor => doctor::run(&global, output).await,
    }
}

/// The sources of the configuration that the command line names.
pub(crate) fn sources(global: &Global) -> Sources {
    Sources { file: global.config.clone(), settings: global.settings.clone(), ..Sources::from_environment() }
}

/// The configuration in force.
pub(crate) fn configuration(global: &Global) -> Result<Config, Failure> {
    roundhouse_config::load(&sources(global)).map_err(|problems| {
        let mut failure = Failure::new(Exit::Invalid, "the configuration is not valid")
            .next("correct it; `roundhouse config check` tells whether all is right");
        failure.violations = problems
            .0
            .iter()
            .map(|problem| {
                let at = if problem.key.is_empty() {
                    problem.layer.to_string()
                } else {
                    format!("{}: {}", problem.layer, problem.key)
                };
                (at, problem.message.clone())
            })
            .collect();
        failure
    })
}

/// The server to speak to: the flag or its variable, else the configuration.
pub(crate) fn server(global: &Global) -> Result<String, Failure> {
    match &global.server {
        Some(server) => Ok(server.clone()),
        None => Ok(configuration(global)?.client.server),
    }
}

fn client(global: &Global) -> Result<Client, Failure> {
    Client::new(&server(global)?)
}

fn completions(shell: clap_complete::Shell, output: Output) -> Exit {
    let mut script = Vec::new();
    let mut command = <Cli as clap::CommandFactory>::command();
    clap_complete::generate(shell, &mut command, "roundhouse", &mut script);
    output.data(&String::from_utf8_lossy(&script));
    Exit::Done
}
