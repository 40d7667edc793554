//! `runners reset`: what is done to a runner of this host that does not run.

use std::path::PathBuf;

use serde_json::json;

use crate::args::Global;
use crate::commands::configuration;
use crate::exit::Exit;
use crate::output::Output;
use crate::status::Failure;

/// Unbinds the runner of a state directory from its control plane.
pub(crate) fn reset(global: &Global, state_dir: Option<PathBuf>, output: Output) -> Result<Exit, Failure> {
    let mut config = configuration(global)?;
    if let Some(directory) = state_dir {
        config.runner.state_dir = directory;
    }
    let directory = config.runner.state_dir.display().to_string();
    // Opening it would make it.
    if !config.runner.state_dir.is_dir() {
        return Err(Failure::new(Exit::Conflict, format!("there is no directory {directory}"))
            .next("name the runner's state directory with --state-dir"));
    }
    let bound = roundhouse_engine_runner::reset(&config).map_err(|error| {
        let mut told = format!("{directory}: {error}");
        let mut source = std::error::Error::source(&error);
        while let Some(cause) = source {
            told.push_str(&format!(": {cause}"));
            source = cause.source();
        }
        Failure::new(Exit::Conflict, told).next("stop the runner first, if it runs")
    })?;
    output.result(
        || json!({"was_bound_to": bound}),
        || match &bound {
            Some(bound) => format!("the runner in {directory} is no longer bound to {bound}"),
            None => format!("the runner in {directory} was bound to no control plane"),
        },
    );
    Ok(Exit::Done)
}
