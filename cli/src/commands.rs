//! What each command does.

pub(crate) mod agents;
mod config;
pub(crate) mod conversations;
mod db;
mod doctor;
pub(crate) mod engines;
mod export;
pub(crate) mod follow;
mod health;
pub(crate) mod listing;
mod permissions;
mod runners;
pub(crate) mod send;
pub(crate) mod sharing;
mod stream;
pub(crate) mod turns;

use roundhouse_config::{Config, Sources};

use crate::args::{
    AgentsCommand, Cli, Command, ConversationsCommand, EnginesCommand, Global, Page, PermissionsCommand,
    RunnersCommand, SessionsArgs, WorkspacesCommand,
};
use crate::client::Client;
use crate::exit::Exit;
use crate::output::Output;
use crate::status::Failure;
use crate::target::target;

/// Runs a command to its exit code.
pub(crate) async fn run(cli: Cli, output: Output) -> Result<Exit, Failure> {
    // These start their own, or name what they ask.
    let asks = !matches!(cli.command, Command::Up(_) | Command::Demo(_) | Command::Health { .. });
    let global = cli.global.clone();
    act(cli, output).await.map_err(|mut failure| {
        if asks
            && failure.is_no_connection()
            && let Ok(target) = target(&global)
        {
            let server = &target.server;
            failure.message = format!("no control plane answers at {server}: {}", failure.message);
        }
        failure
    })
}

async fn act(cli: Cli, output: Output) -> Result<Exit, Failure> {
    let Cli { global, command } = cli;
    match command {
        Command::Completions { shell } => Ok(completions(shell, output)),
        Command::Config(what) => config::run(&global, what, output),
        Command::Send(args) => send::send(&client(&global)?, args, output).await,
        Command::Retry(args) => send::retry(&client(&global)?, args, output).await,
        Command::Cancel(args) => send::cancel(&client(&global)?, args, output).await,
        Command::Chat(args) => crate::chat::run(client(&global)?, args, output).await,
        Command::Export(args) => export::run(&client(&global)?, args, output).await,
        Command::Events(args) => stream::run(client(&global)?, args, output).await,
        Command::Conversations { what } => {
            let list =
                ConversationsCommand::List { archived: false, attention: false, page: Page::default() };
            conversations::run(&client(&global)?, what.unwrap_or(list), output).await
        }
        Command::Messages(args) => listing::messages(&client(&global)?, args, output).await,
        Command::Turns(args) => turns::run(&client(&global)?, args, output).await,
        Command::Summary(what) => sharing::summary(&client(&global)?, what, output).await,
        Command::Sessions(SessionsArgs { what: Some(what), .. }) => {
            sharing::session(&client(&global)?, what, output).await
        }
        Command::Sessions(args) => listing::sessions(&client(&global)?, args, output).await,
        Command::Runners { what: None | Some(RunnersCommand::List) } => {
            listing::runners(&client(&global)?, output).await
        }
        Command::Runners { what: Some(RunnersCommand::Drain { runner, request_id }) } => {
            sharing::drain(&client(&global)?, runner, false, request_id, output).await
        }
        Command::Runners { what: Some(RunnersCommand::Undrain { runner, request_id }) } => {
            sharing::drain(&client(&global)?, runner, true, request_id, output).await
        }
        Command::Runners { what: Some(RunnersCommand::Reset { state_dir }) } => {
            runners::reset(&global, state_dir, output)
        }
        Command::Workspaces { what } => {
            let list = WorkspacesCommand::List { runner: None };
            listing::workspaces(&client(&global)?, what.unwrap_or(list), output).await
        }
        Command::Agents { what } => {
            let list = AgentsCommand::List { workspace: None };
            agents::run(&client(&global)?, what.unwrap_or(list), output).await
        }
        Command::Permissions { what } => {
            let list = PermissionsCommand::List { conversation: None, all: false, page: Page::default() };
            permissions::run(&client(&global)?, what.unwrap_or(list), output).await
        }
        Command::Engines { what } => {
            engines::run(&global, what.unwrap_or(EnginesCommand::List), output).await
        }
        Command::Db(args) => db::run(&global, args, output).await,
        Command::Doctor => doctor::run(&global, output).await,
        Command::Health { url } => health::run(&url, output).await,
        Command::Up(args) => crate::up::run(&global, args, output).await,
        Command::Demo(args) => crate::demo::run(&global, args, output).await,
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

fn client(global: &Global) -> Result<Client, Failure> {
    target(global)?.client()
}

fn completions(shell: clap_complete::Shell, output: Output) -> Exit {
    let mut script = Vec::new();
    let mut command = <Cli as clap::CommandFactory>::command();
    clap_complete::generate(shell, &mut command, "roundhouse", &mut script);
    output.data(&String::from_utf8_lossy(&script));
    Exit::Done
}
