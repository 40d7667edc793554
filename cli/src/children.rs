//! Both services as children of this same executable.
//!
//! ```text
//! roundhouse up ---- pipe to its standard input ----> roundhouse __control-plane
//!              \---- pipe to its standard input ----> roundhouse __runner
//! ```
//!
//! The pipe is how a child learns that its parent is gone, by whatever death: at its end of file the child sends itself
//! SIGTERM, which both services take for an orderly stop. Each child has a process group of its own, so that Ctrl-C
//! reaches the parent alone, and that one stops the runner before the control plane.
//!
//! An install (`__install`) is such a child, too: npm and what it starts are in its group, and it kills that at the end
//! of the pipe.

use std::ffi::OsString;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::{ExitCode, ExitStatus, Output, Stdio};
use std::time::Duration;

use serde_json::Value;
use tokio::io::{AsyncBufReadExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};

use crate::exit::Exit;
use crate::status::Failure;

/// First argument of the control plane's process.
pub(crate) const CONTROL_PLANE: &str = "__control-plane";
/// First argument of the runner's process.
pub(crate) const RUNNER: &str = "__runner";

/// First argument of the process that installs an engine.
const INSTALL: &str = "__install";

/// How long a service may take until it is ready.
const READY_LIMIT: Duration = Duration::from_secs(30);
/// How long a service may take to stop: the runner's own bound and some more. Killed before that, it would leave
/// keepers behind.
const STOP_LIMIT: Duration = roundhouse_engine_runner::STOP_LIMIT.saturating_add(Duration::from_secs(10));

/// Runs a service if that is what this process was started for.
pub(crate) fn run_service() -> Option<ExitCode> {
    let mut args = std::env::args_os();
    let program = args.next().unwrap_or_else(|| OsString::from("roundhouse"));
    let service = args.next()?;
    let args = std::iter::once(program).chain(args);
    match service.to_str()? {
        CONTROL_PLANE => {
            stop_with_the_parent();
            Some(roundhouse_control_plane::main(args))
        }
        RUNNER => {
            stop_with_the_parent();
            Some(roundhouse_engine_runner::main(args))
        }
        INSTALL => {
            at_the_end_of_the_parent(kill_the_group);
            let args: Vec<OsString> = args.skip(1).collect();
            Some(crate::commands::engines::install_here(&args))
        }
        _ => None,
    }
}

/// Has this process stop in good order when its standard input ends.
fn stop_with_the_parent() {
    at_the_end_of_the_parent(|| {
        // Nobody is left to be told if this fails.
        let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::TERM);
    });
}

/// Ends this process and all that it has started, at once.
fn kill_the_group() {
    // Not those of somebody who started it by hand.
    if rustix::process::getpgrp() == rustix::process::getpid() {
        let _ = rustix::process::kill_current_process_group(rustix::process::Signal::KILL);
    }
    std::process::exit(i32::from(Exit::Cancelled.code()));
}

fn at_the_end_of_the_parent(act: fn()) {
    let watch = move || {
        let mut ignored = [0u8; 64];
        // An error is an end, too: either way nobody holds the other side any more.
        while std::io::stdin().lock().read(&mut ignored).is_ok_and(|count| count > 0) {}
        act();
    };
    // Without the thread the process would outlive its parent, so it must not run at all.
    if std::thread::Builder::new().name("parent-watch".to_owned()).spawn(watch).is_err() {
        std::process::exit(i32::from(Exit::Failed.code()));
    }
}

/// Where a child's log goes.
#[derive(Debug, Clone)]
pub(crate) enum Log {
    /// To our own standard error.
    Inherit,
    /// To the end of a file.
    File(PathBuf),
}

/// How to start a service.
#[derive(Debug, Clone)]
pub(crate) struct Spec {
    /// For messages.
    pub(crate) name: &'static str,
    /// [`CONTROL_PLANE`] or [`RUNNER`].
    pub(crate) service: &'static str,
    /// Arguments, but for the address.
    pub(crate) args: Vec<OsString>,
    /// Address to listen on; a restart takes the one that the first start got.
    pub(crate) listen: String,
    /// Where its log goes.
    pub(crate) log: Log,
    /// Whether our own settings in the environment are kept from it.
    pub(crate) own_settings_only: bool,
    /// Where a runner keeps what outlives it; none of another service.
    pub(crate) engines_of: Option<PathBuf>,
}

/// A running service.
#[derive(Debug)]
pub(crate) struct Service {
    spec: Spec,
    child: Child,
    /// Its end stops the child.
    stdin: Option<ChildStdin>,
    stdout: Lines<BufReader<ChildStdout>>,
    ready: Ready,
}

/// What a service says when it is ready.
#[derive(Debug)]
struct Ready {
    grpc: String,
    /// Of the control plane; empty of another service.
    control_plane_id: String,
}

impl Ready {
    fn parse(line: &str) -> Option<Self> {
        let told: Value = serde_json::from_str(line).ok()?;
        let text = |key: &str| Some(told.get(key)?.as_str()?.to_owned());
        Some(Self { grpc: text("grpc")?, control_plane_id: text("control_plane_id").unwrap_or_default() })
    }

    /// Why it is not ready, of a service that says so in place of its address.
    fn refused(line: &str) -> Option<String> {
        let told: Value = serde_json::from_str(line).ok()?;
        Some(told.get("error")?.as_str()?.to_owned())
    }
}

impl Service {
    /// Starts a service and waits until it is ready.
    pub(crate) async fn start(spec: Spec) -> Result<Self, Failure> {
        let (child, stdin, stdout, ready) = launch(&spec, &spec.listen).await?;
        Ok(Self { spec, child, stdin, stdout, ready })
    }

    /// Host and port that it listens on.
    pub(crate) fn grpc(&self) -> &str {
        &self.ready.grpc
    }

    /// The id of the control plane that it is; empty of another service.
    pub(crate) fn control_plane_id(&self) -> &str {
        &self.ready.control_plane_id
    }

    /// The URL of its server.
    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.ready.grpc)
    }

    /// For messages.
    pub(crate) const fn name(&self) -> &'static str {
        self.spec.name
    }

    /// Waits for its end. Cancellation safe.
    pub(crate) async fn ended(&mut self) -> Result<ExitStatus, Failure> {
        // A service that wrote more than its ready line must not block on a full pipe.
        while let Ok(Some(_)) = self.stdout.next_line().await {}
        self.child.wait().await.map_err(|error| {
            Failure::new(Exit::Failed, format!("{} cannot be waited for: {error}", self.spec.name))
        })
    }

    /// Ends it at once, as `kill -9` does.
    pub(crate) async fn kill(&mut self) -> Result<(), Failure> {
        self.child.kill().await.map_err(|error| {
            Failure::new(Exit::Failed, format!("{} cannot be killed: {error}", self.spec.name))
        })
    }

    /// Ends it at once, and of a runner also the engines, which would outlive it. What was acknowledged is on disk; a
    /// turn that ran is closed as FAILED by the next start.
    pub(crate) async fn end_at_once(mut self) -> Result<(), Failure> {
        if !matches!(self.child.try_wait(), Ok(Some(_))) {
            self.kill().await?;
        }
        self.end_engines().await
    }

    /// Ends the engines of a runner that has ended and cannot do it itself any more.
    async fn end_engines(&mut self) -> Result<(), Failure> {
        let Some(directory) = self.spec.engines_of.clone() else { return Ok(()) };
        let ended =
            tokio::task::spawn_blocking(move || roundhouse_engine_runner::end_engines(&directory)).await;
        match ended {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(error)) => Err(Failure::new(Exit::Failed, format!("engines may be left: {error}"))),
            Err(error) => Err(Failure::new(Exit::Failed, format!("engines may be left: {error}"))),
        }
    }

    /// Starts it again, on the same address, after it has ended.
    pub(crate) async fn restart(&mut self) -> Result<(), Failure> {
        let (child, stdin, stdout, ready) = launch(&self.spec, &self.ready.grpc).await?;
        (self.child, self.stdin, self.stdout, self.ready) = (child, stdin, stdout, ready);
        Ok(())
    }

    /// Stops it in good order; kills it when that takes too long. A runner that did not go in good order, or had died
    /// before, has its engines ended here: there may be no next start that would find them. Whether the order was good.
    /// Cancellation safe: it goes on stopping, and may be ended at once.
    pub(crate) async fn stop(&mut self) -> bool {
        drop(self.stdin.take());
        let orderly = match tokio::time::timeout(STOP_LIMIT, self.ended()).await {
            Ok(Ok(status)) => status.success(),
            Ok(Err(_)) => false,
            Err(_) => {
                let _ = self.child.kill().await;
                false
            }
        };
        if !orderly && let Err(failure) = self.end_engines().await {
            // Nobody but a person can do more about it.
            crate::output::Output::new(crate::output::Format::Human).note(&format!(
                "{}: {}",
                self.spec.name,
                failure.human()
            ));
        }
        orderly
    }
}

/// Installs an engine in a process of its own, whose group does not outlive this one: nor what is awaited here, when
/// that is dropped. Answers what the process said on standard output, and how it ended.
pub(crate) async fn install(engine: &str, directory: &Path, quiet: bool) -> std::io::Result<Output> {
    let mut command = Command::new("/proc/self/exe");
    command.arg0("roundhouse").arg(INSTALL).arg(engine).arg(directory);
    command.process_group(0).stdin(Stdio::piped()).stdout(Stdio::piped());
    command.stderr(if quiet { Stdio::null() } else { Stdio::inherit() });
    let mut child = command.spawn()?;
    // Kept open until the end, however that comes.
    let stdin = child.stdin.take();
    let output = child.wait_with_output().await;
    drop(stdin);
    output
}

type Launched = (Child, Option<ChildStdin>, Lines<BufReader<ChildStdout>>, Ready);

async fn launch(spec: &Spec, listen: &str) -> Result<Launched, Failure> {
    let failed = |what: String| Failure::new(Exit::Failed, format!("{}: {what}", spec.name));
    let stderr = match &spec.log {
        Log::Inherit => Stdio::inherit(),
        Log::File(path) => {
            let file =
                std::fs::File::options().create(true).append(true).open(path).map_err(|error| {
                    failed(format!("its log {} cannot be written: {error}", path.display()))
                })?;
            Stdio::from(file)
        }
    };
    // Through /proc, so that the same program is started even when its file was replaced meanwhile.
    let mut command = Command::new("/proc/self/exe");
    command
        .arg0("roundhouse")
        .arg(spec.service)
        .args(&spec.args)
        .args(["--listen", listen, "--ready-json"])
        .process_group(0)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(stderr);
    if spec.own_settings_only {
        for (name, _) in std::env::vars_os() {
            if name.to_str().is_some_and(|name| name.starts_with("ROUNDHOUSE_")) {
                command.env_remove(name);
            }
        }
    }
    // A token is for those that call a control plane.
    command.env_remove("ROUNDHOUSE_TOKEN");
    let mut child = command.spawn().map_err(|error| failed(format!("cannot be started: {error}")))?;
    let stdin = child.stdin.take();
    let stdout = child.stdout.take().ok_or_else(|| failed("has no standard output".to_owned()))?;
    let mut lines = BufReader::new(stdout).lines();
    let line = match tokio::time::timeout(READY_LIMIT, lines.next_line()).await {
        Ok(Ok(Some(line))) => line,
        Ok(Ok(None) | Err(_)) => {
            drop(stdin);
            let status = child.wait().await.map_err(|error| failed(error.to_string()))?;
            return Err(did_not_start(spec, status, None));
        }
        Err(_) => {
            drop(stdin);
            return Err(failed(format!("was not ready within {} s", READY_LIMIT.as_secs())));
        }
    };
    if let Some(reason) = Ready::refused(&line) {
        drop(stdin);
        let status = child.wait().await.map_err(|error| failed(error.to_string()))?;
        return Err(did_not_start(spec, status, Some(&reason)));
    }
    let ready = Ready::parse(&line).ok_or_else(|| failed(format!("said {line:?} instead of its address")))?;
    Ok((child, stdin, lines, ready))
}

fn did_not_start(spec: &Spec, status: ExitStatus, reason: Option<&str>) -> Failure {
    let told = match (reason, &spec.log) {
        (Some(reason), _) => reason.to_owned(),
        (None, Log::Inherit) => format!("{status}; the reason stands above"),
        (None, Log::File(path)) => format!("{status}; the reason stands in {}", path.display()),
    };
    let exit = match status.code() {
        Some(2 | 3) => Exit::Invalid,
        Some(_) | None => Exit::Failed,
    };
    let failure = Failure::new(exit, format!("the {} did not start: {told}", spec.name));
    if exit == Exit::Invalid {
        return failure.next("`roundhouse config check` tells all that is wrong");
    }
    failure.next(
        "is another one running? A second one needs --state-dir DIR, --listen 127.0.0.1:0 and \
         --runner-listen 127.0.0.1:0: its own state, and free ports",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_runner_that_stops_in_good_order_is_never_killed_for_it() {
        assert!(STOP_LIMIT > roundhouse_engine_runner::STOP_LIMIT);
    }
}
