//! The command line of the program, its log, and its end.

use std::ffi::OsString;
use std::io::{IsTerminal as _, Write as _};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, ValueEnum};
use roundhouse_config::{Sources, load};
use tokio::signal::unix::{SignalKind, signal};

use crate::server::{STOP_LIMIT, Server};
use crate::settings::Settings;

/// Exit code for a wrong command line.
const USAGE: u8 = 2;
/// Exit code for a wrong configuration.
const CONFIGURATION: u8 = 3;

/// The control plane of Roundhouse.
#[derive(Debug, Parser)]
#[command(name = "control-plane", version, about)]
struct Args {
    /// Configuration file. Default: roundhouse.toml in the XDG configuration directory.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// A setting, such as control_plane.runner_lost_after=2m. Can be repeated.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    settings: Vec<String>,
    /// Address and port to listen on. Port 0 takes a free one.
    #[arg(long, value_name = "HOST:PORT")]
    listen: Option<String>,
    /// Directory of the database.
    #[arg(long, value_name = "DIR")]
    state_dir: Option<PathBuf>,
    /// Listen on an address other than loopback, without protection.
    #[arg(long)]
    insecure_listen: bool,
    /// Print the ready line as JSON.
    #[arg(long)]
    ready_json: bool,
    /// Form of the log on stderr.
    #[arg(long, value_enum, default_value_t = LogFormat::Text)]
    log_format: LogFormat,
    /// What is logged, such as info or roundhouse_control_plane=debug.
    #[arg(long, value_name = "FILTER", env = "ROUNDHOUSE_LOG", default_value = "info")]
    log: String,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum LogFormat {
    Text,
    Json,
}

/// Runs the control plane until it is told to stop. `args` begins with the program's name.
///
/// Exit codes: 0 stopped on request, 1 failed, 2 wrong command line, 3 wrong configuration.
pub fn main(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    let args = match Args::try_parse_from(args) {
        Ok(args) => args,
        Err(error) => {
            let code = if error.use_stderr() { ExitCode::from(USAGE) } else { ExitCode::SUCCESS };
            // Nobody can be told if this fails.
            let _ = error.print();
            return code;
        }
    };
    if let Err(error) = init_log(&args) {
        complain(&format!("the log filter is wrong: {error}"));
        return ExitCode::from(USAGE);
    }
    let settings = match settings(&args) {
        Ok(settings) => settings,
        Err(problems) => {
            refuse(&problems.to_string(), args.ready_json);
            return ExitCode::from(CONFIGURATION);
        }
    };
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            complain(&format!("the runtime cannot be started: {error}"));
            return ExitCode::FAILURE;
        }
    };
    let code = match runtime.block_on(serve(settings, args.ready_json)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            refuse(&message, args.ready_json);
            ExitCode::FAILURE
        }
    };
    runtime.shutdown_timeout(STOP_LIMIT);
    code
}

fn settings(args: &Args) -> Result<Settings, roundhouse_config::Problems> {
    let mut sources = Sources::from_environment();
    sources.file = args.config.clone();
    sources.settings = args.settings.clone();
    let mut config = load(&sources)?.control_plane;
    if let Some(listen) = &args.listen {
        config.listen.clone_from(listen);
    }
    if let Some(state_dir) = &args.state_dir {
        config.state_dir.clone_from(state_dir);
    }
    config.insecure_listen |= args.insecure_listen;
    Ok(Settings::new(&config))
}

fn init_log(args: &Args) -> Result<(), String> {
    let filter = tracing_subscriber::EnvFilter::try_new(&args.log).map_err(|error| error.to_string())?;
    // Colours are for people: a file or a pipe gets plain text.
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(std::io::stderr);
    // A second subscriber in one process (tests) is not an error worth stopping for.
    let _ = match args.log_format {
        LogFormat::Text => builder.try_init(),
        LogFormat::Json => builder.json().try_init(),
    };
    Ok(())
}

async fn serve(settings: Settings, ready_json: bool) -> Result<(), String> {
    let mut terminate = signal(SignalKind::terminate()).map_err(|error| error.to_string())?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(|error| error.to_string())?;
    let mut server = Server::start(settings).await.map_err(|error| chain(&error))?;
    ready(&server, ready_json).map_err(|error| format!("the ready line cannot be printed: {error}"))?;
    let failure = tokio::select! {
        _ = terminate.recv() => None,
        _ = interrupt.recv() => None,
        failure = server.failed() => Some(failure),
    };
    if let Some(failure) = failure {
        return Err(format!("the server failed: {failure}"));
    }
    tokio::select! {
        () = server.shutdown() => Ok(()),
        // A second signal does not wait.
        _ = terminate.recv() => Err("stopped without waiting for open calls".to_owned()),
        _ = interrupt.recv() => Err("stopped without waiting for open calls".to_owned()),
    }
}

fn ready(server: &Server, json: bool) -> std::io::Result<()> {
    let address = server.address();
    let mut out = std::io::stdout().lock();
    if json {
        let line = serde_json::json!({
            "ready": true,
            "grpc": address.to_string(),
            "control_plane_id": server.control_plane_id(),
        });
        writeln!(out, "{line}")?;
    } else {
        writeln!(out, "control plane {} is ready on {address}", server.control_plane_id())?;
        writeln!(out, "try: grpcurl -plaintext {address} list")?;
    }
    out.flush()
}

/// An error and what caused it, on one line.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        source = cause.source();
    }
    text
}

/// Why it does not run: to whoever waits for the ready line, in its place, and else to standard error.
fn refuse(message: &str, ready_json: bool) {
    let line = serde_json::json!({ "ready": false, "error": message }).to_string();
    if !ready_json || writeln!(std::io::stdout(), "{line}").is_err() {
        complain(message);
    }
}

fn complain(message: &str) {
    // Nobody can be told if this fails.
    let _ = writeln!(std::io::stderr(), "control-plane: {message}");
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
