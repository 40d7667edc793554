//! `engines list | install`.

use std::ffi::OsString;
use std::io::Write as _;
use std::os::unix::ffi::OsStringExt as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use roundhouse_engine_runner::{InstallError, install_engine, pinned_engines};
use roundhouse_proto::control::v1 as control;
use roundhouse_proto::engine::v1 as engine;
use serde_json::json;

use crate::args::{EnginesCommand, Global};
use crate::children;
use crate::client::{Client, call};
use crate::commands::configuration;
use crate::exit::Exit;
use crate::json;
use crate::output::{Output, table};
use crate::status::Failure;
use crate::target::target;

pub(crate) async fn run(global: &Global, what: EnginesCommand, output: Output) -> Result<Exit, Failure> {
    match what {
        EnginesCommand::List => list(&target(global)?.client()?, output).await,
        EnginesCommand::Install { engines } => {
            let directory = configuration(global)?.runner.state_dir.join("engines");
            let names = if engines.is_empty() {
                pinned_engines().into_iter().map(str::to_owned).collect()
            } else {
                engines
            };
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

/// Installs the pinned CLI of an engine unless it is there, with npm's lines on standard error as they come. Nothing of
/// it goes on when this is dropped, or this process ends.
pub(crate) async fn install(engine: &str, directory: PathBuf, output: Output) -> Result<PathBuf, Failure> {
    let broken =
        |what: String| Failure::new(Exit::Failed, format!("the install of {engine} broke off: {what}"));
    let ended = children::install(engine, &directory, output.is_json())
        .await
        .map_err(|error| broken(error.to_string()))?;
    let exit = match ended.status.code().and_then(|code| u8::try_from(code).ok()) {
        Some(0) => return Ok(PathBuf::from(OsString::from_vec(ended.stdout))),
        Some(code) if code == Exit::Conflict.code() => Exit::Conflict,
        Some(code) if code == Exit::Policy.code() => Exit::Policy,
        Some(code) if code == Exit::Failed.code() => Exit::Failed,
        Some(_) | None => return Err(broken(ended.status.to_string())),
    };
    let next = if exit == Exit::Conflict {
        format!("those that can be installed: {}", pinned_engines().join(", "))
    } else {
        format!(
            "mend that and try again, or name an executable: --set engines.{engine}.executable=/path/to/it"
        )
    };
    Err(Failure::new(exit, String::from_utf8_lossy(&ended.stdout)).next(next))
}

/// The install itself, in a process of its own: engine and directory are its arguments. Tells the executable on
/// standard output, or why there is none, by the exit code.
pub(crate) fn install_here(args: &[OsString]) -> ExitCode {
    let [engine, directory] = args else { return Exit::Usage.into() };
    let mut progress = |line: &str| {
        // Nobody need read it.
        let _ = writeln!(std::io::stderr().lock(), "{line}");
    };
    let (exit, told) = match install_engine(&engine.to_string_lossy(), Path::new(directory), &mut progress) {
        Ok(executable) => (Exit::Done, executable.into_os_string().into_vec()),
        Err(error) => (exit_of(&error), chain(&error).into_bytes()),
    };
    match std::io::stdout().lock().write_all(&told) {
        Ok(()) => exit.into(),
        Err(_) => Exit::Unread.into(),
    }
}

fn chain(error: &InstallError) -> String {
    let mut told = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        told.push_str(&format!(": {cause}"));
        source = cause.source();
    }
    told
}

const fn exit_of(error: &InstallError) -> Exit {
    match error {
        InstallError::Unknown(_) => Exit::Conflict,
        InstallError::Manual { .. } => Exit::Policy,
        InstallError::NoNpm
        | InstallError::Io { .. }
        | InstallError::Npm { .. }
        | InstallError::NoExecutable(_) => Exit::Failed,
    }
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
