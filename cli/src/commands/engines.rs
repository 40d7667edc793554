//! `engines list | install`.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use roundhouse_engine_runner::{InstallError, install_engine};
use roundhouse_proto::control::v1 as control;
use roundhouse_proto::engine::v1 as engine;
use serde_json::json;

use crate::args::{EnginesCommand, Global};
use crate::client::{Client, call};
use crate::commands::{configuration, server};
use crate::exit::Exit;
use crate::json;
use crate::output::{Output, table};
use crate::status::Failure;

/// The engines whose CLI is pinned.
const PINNED: [&str; 1] = ["claude-code"];

pub(crate) async fn run(global: &Global, what: EnginesCommand, output: Output) -> Result<Exit, Failure> {
    match what {
        EnginesCommand::List => list(&Client::new(&server(global)?)?, output).await,
        EnginesCommand::Install { engines } => {
            let directory = configuration(global)?.runner.state_dir.join("engines");
            let names = if engines.is_empty() { PINNED.map(str::to_owned).to_vec() } else { engines };
            let mut installed = Vec::new();
            for name in names {
                let executable = install(&name, directory.clone(), output).await?;
                installed.push((name, executable));
            }
            output.result(
                || {
                    let installed: Vec<_> = installed
                        .iter()
                        .map(|(engine, executable)| json!({"engine": engine, "executable": executable}))
                        .collect();
                    json!({"installed": installed})
                },
                || {
                    let line =
                        |(name, executable): &(String, PathBuf)| format!("{name}  {}", executable.display());
                    installed.iter().map(line).collect::<Vec<_>>().join("\n")
                },
            );
            Ok(Exit::Done)
        }
    }
}

/// Installs the pinned CLI of an engine unless it is there, with npm's lines on standard error as they come.
pub(crate) async fn install(engine: &str, directory: PathBuf, output: Output) -> Result<PathBuf, Failure> {
    let name = engine.to_owned();
    let installing = tokio::task::spawn_blocking(move || {
        let mut progress = |line: &str| {
            if !output.is_json() {
                output.note(line);
            }
        };
        install_engine(&name, &directory, &mut progress)
    });
    match installing.await {
        Ok(Ok(executable)) => Ok(executable),
        Ok(Err(error)) => Err(not_installed(engine, &error)),
        Err(error) => Err(Failure::new(Exit::Failed, format!("the install of {engine} broke off: {error}"))),
    }
}

fn not_installed(engine: &str, error: &InstallError) -> Failure {
    let mut told = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        told.push_str(&format!(": {cause}"));
        source = cause.source();
    }
    let exit = match error {
        InstallError::Unknown(_) => Exit::Conflict,
        InstallError::Manual { .. } => Exit::Policy,
        InstallError::NoNpm
        | InstallError::Io { .. }
        | InstallError::Npm { .. }
        | InstallError::NoExecutable(_) => Exit::Failed,
    };
    Failure::new(exit, told).next(format!(
        "mend that and try again, or name an executable: --set engines.{engine}.executable=/path/to/it"
    ))
}

/// How long a runner that has just registered may take to tell what it has.
const DESCRIBE_LIMIT: Duration = Duration::from_secs(5);

/// The runners, once those that are online have told their engines, or when that took too long.
pub(crate) async fn described(client: &Client) -> Result<Vec<control::Runner>, Failure> {
    let since = Instant::now();
    loop {
        let answer = client.runners().list_runners(call(control::ListRunnersRequest {})).await?.into_inner();
        let online = control::runner::State::Online as i32;
        let silent = answer.runners.iter().any(|runner| runner.state == online && runner.engines.is_empty());
        if !silent || since.elapsed() > DESCRIBE_LIMIT {
            return Ok(answer.runners);
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

async fn list(client: &Client, output: Output) -> Result<Exit, Failure> {
    let runners = described(client).await?;
    output.result(
        || {
            let runners: Vec<_> = runners
                .iter()
                .map(|runner| {
                    let engines: Vec<_> = runner.engines.iter().map(json::engine_facts).collect();
                    json!({"runner_id": runner.runner_id, "engines": engines})
                })
                .collect();
            json!({"runners": runners})
        },
        || {
            let rows = runners
                .iter()
                .flat_map(|runner| runner.engines.iter().map(move |engine| row(&runner.runner_id, engine)))
                .collect();
            table(&["runner", "engine", "version", "login", "efforts"], rows, "no engines")
        },
    );
    Ok(Exit::Done)
}

fn row(runner: &str, engine: &engine::Engine) -> Vec<String> {
    let efforts = engine.capabilities.as_ref().map(|can| can.effort_levels.join(", ")).unwrap_or_default();
    vec![runner.to_owned(), engine.name.clone(), version(engine), login(engine), efforts]
}

/// The version in words, with the pinned one where it differs.
pub(crate) fn version(engine: &engine::Engine) -> String {
    if !engine.installed {
        return "not installed".to_owned();
    }
    let version = if engine.version.is_empty() { "unknown" } else { engine.version.as_str() };
    if engine.pinned_version.is_empty() || engine.pinned_version == engine.version {
        version.to_owned()
    } else {
        format!("{version} (tested with {})", engine.pinned_version)
    }
}

/// The login in words.
pub(crate) fn login(engine: &engine::Engine) -> String {
    if engine.login_detail.is_empty() {
        json::login(engine.login).to_lowercase()
    } else {
        engine.login_detail.clone()
    }
}
