//! The roundhouse command line: a client of the control plane's public API.
//!
//! `up` and `demo` start both services as children of this same executable (`__control-plane`, `__runner`), so that
//! each can be killed alone. All other commands speak gRPC and nothing else.

mod args;
mod chat;
mod children;
mod client;
mod commands;
mod demo;
mod events;
mod exit;
mod interrupts;
mod json;
mod output;
mod status;
mod target;
mod up;

use std::process::ExitCode;

use clap::Parser as _;

use crate::args::Cli;
use crate::exit::Exit;
use crate::output::{Format, Output};
use crate::status::Failure;

fn main() -> ExitCode {
    // A keeper or its init is this same program, and must be that before anything else is: no thread, no runtime.
    roundhouse_engine_runner::reexec();
    if let Some(code) = children::run_service() {
        return code;
    }
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            // Help and version are data; everything else goes to standard error. A closed one of these loses it.
            return match (error.use_stderr(), error.print()) {
                (true, _) => Exit::Usage.into(),
                (false, Ok(())) => Exit::Done.into(),
                (false, Err(unwritten)) => Output::new(Format::Human).unwritten(&unwritten).into(),
            };
        }
    };
    let output = Output::new(if cli.global.json { Format::Json } else { Format::Human });
    let runtime = match tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return fail(output, &Failure::new(Exit::Failed, format!("no runtime: {error}"))),
    };
    let result = runtime.block_on(commands::run(cli, output));
    runtime.shutdown_background();
    match result {
        Ok(exit) => exit.into(),
        Err(failure) => fail(output, &failure),
    }
}

fn fail(output: Output, failure: &Failure) -> ExitCode {
    output.note(&failure.told(output));
    failure.exit.into()
}
