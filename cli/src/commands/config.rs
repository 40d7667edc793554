//! `config check`, `config show`.

use serde_json::{Value, json};

use crate::args::{ConfigCommand, Global};
use crate::commands::{configuration, sources};
use crate::exit::Exit;
use crate::output::Output;
use crate::status::Failure;

pub(crate) fn run(global: &Global, what: ConfigCommand, output: Output) -> Result<Exit, Failure> {
    match what {
        ConfigCommand::Check => Ok(check(global, output)),
        ConfigCommand::Show => show(global, output),
    }
}

fn check(global: &Global, output: Output) -> Exit {
    let problems = match roundhouse_config::load(&sources(global)) {
        Ok(_) => Vec::new(),
        Err(problems) => problems.0,
    };
    output.result(
        || {
            let problems: Vec<Value> = problems
                .iter()
                .map(|p| {
                    let key = if p.key.is_empty() { Value::Null } else { json!(p.key) };
                    json!({"layer": p.layer.to_string(), "key": key, "message": p.message})
                })
                .collect();
            json!({"valid": problems.is_empty(), "problems": problems})
        },
        || {
            if problems.is_empty() {
                "the configuration is valid".to_owned()
            } else {
                problems.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
            }
        },
    );
    if problems.is_empty() { Exit::Done } else { Exit::Invalid }
}

fn show(global: &Global, output: Output) -> Result<Exit, Failure> {
    let config = configuration(global)?;
    let shown = roundhouse_config::show(&config)
        .map_err(|error| Failure::new(Exit::Failed, format!("the configuration cannot be shown: {error}")))?;
    let json: Value = if output.is_json() {
        // By way of the masked text, so that a secret has one place where it could slip through.
        let table: toml::Table = shown.parse().map_err(|error| {
            Failure::new(Exit::Failed, format!("the configuration cannot be shown: {error}"))
        })?;
        serde_json::to_value(table).map_err(|error| {
            Failure::new(Exit::Failed, format!("the configuration cannot be shown: {error}"))
        })?
    } else {
        Value::Null
    };
    output.result(|| json, || shown);
    Ok(Exit::Done)
}
