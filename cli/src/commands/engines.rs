//! `engines list | install`.

use roundhouse_proto::control::v1 as control;
use roundhouse_proto::engine::v1 as engine;
use serde_json::json;

use crate::args::{EnginesCommand, Global};
use crate::client::{Client, call};
use crate::commands::server;
use crate::exit::Exit;
use crate::json;
use crate::output::{Output, table};
use crate::status::Failure;

pub(crate) async fn run(global: &Global, what: EnginesCommand, output: Output) -> Result<Exit, Failure> {
    match what {
        EnginesCommand::List => list(&Client::new(&server(global)?)?, output).await,
    }
}

async fn list(client: &Client, output: Output) -> Result<Exit, Failure> {
    let answer = client.runners().list_runners(call(control::ListRunnersRequest {})).await?.into_inner();
    output.result(
        || {
            let runners: Vec<_> = answer
                .runners
                .iter()
                .map(|runner| {
                    let engines: Vec<_> = runner.engines.iter().map(json::engine_facts).collect();
                    json!({"runner_id": runner.runner_id, "engines": engines})
                })
                .collect();
            json!({"runners": runners})
        },
        || {
            let rows = answer
                .runners
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
