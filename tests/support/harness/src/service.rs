//! One service as a real process: started, killed, stopped and started again on the same state and port.

use std::{
    collections::BTreeMap,
    path::PathBuf,
    process::{ExitStatus, Stdio},
    time::Duration,
};

use anyhow::{Context as _, bail};
use serde_json::Value;
use tokio::{
    io::{AsyncBufReadExt as _, BufReader},
    process::{Child, Command},
};

use crate::TestLog;

/// How long a service may take until it says that it is ready.
const READY_BOUND: Duration = Duration::from_secs(30);

/// How to start a service.
#[derive(Debug, Clone)]
pub struct Spec {
    /// The name in the log.
    pub name: String,
    /// The executable.
    pub program: PathBuf,
    /// Its arguments, without `--listen`.
    pub args: Vec<String>,
    /// Its whole environment.
    pub env: BTreeMap<String, String>,
}

/// What a service said when it was ready.
#[derive(Debug, Clone)]
pub struct Ready {
    /// Where it serves gRPC.
    pub grpc: String,
    /// The whole line.
    pub line: Value,
}

/// A running service, or one that was stopped and can be started again.
#[derive(Debug)]
pub struct Service {
    spec: Spec,
    log: TestLog,
    child: Option<Child>,
    ready: Ready,
}

impl Service {
    /// Starts it on a free port of loopback and waits until it is ready.
    ///
    /// # Errors
    /// If it ends or says nothing in time; its log says why.
    pub async fn start(spec: Spec, log: TestLog) -> anyhow::Result<Self> {
        Self::start_on(spec, "127.0.0.1:0", log).await
    }

    /// Starts it on this address and waits until it is ready.
    ///
    /// # Errors
    /// As [`start`](Self::start).
    pub async fn start_on(spec: Spec, listen: &str, log: TestLog) -> anyhow::Result<Self> {
        let (child, ready) = launch(&spec, listen, &log).await?;
        Ok(Self { spec, log, child: Some(child), ready })
    }

    /// Where it serves gRPC, as `http://host:port`.
    #[must_use]
    pub fn url(&self) -> String {
        format!("http://{}", self.ready.grpc)
    }

    /// Where it serves gRPC, as `host:port`.
    #[must_use]
    pub fn address(&self) -> &str {
        &self.ready.grpc
    }

    /// What it said when it was ready.
    #[must_use]
    pub const fn ready(&self) -> &Ready {
        &self.ready
    }

    /// Its process id. None while it is stopped.
    #[must_use]
    pub fn pid(&self) -> Option<u32> {
        self.child.as_ref().and_then(Child::id)
    }

    /// A variable for the next start.
    pub fn set_env(&mut self, name: &str, value: &str) {
        self.spec.env.insert(name.to_owned(), value.to_owned());
    }

    /// Takes a variable back.
    pub fn clear_env(&mut self, name: &str) {
        self.spec.env.remove(name);
    }

    /// Arguments for the next start, after those it has.
    pub fn add_args(&mut self, args: &[&str]) {
        self.spec.args.extend(args.iter().map(|arg| (*arg).to_owned()));
    }

    /// Kills it with SIGKILL and waits until it is gone.
    ///
    /// # Errors
    /// If it is not running.
    pub async fn kill(&mut self) -> anyhow::Result<()> {
        let mut child = self.child.take().with_context(|| format!("{} is not running", self.spec.name))?;
        self.log.line("test", &format!("kill -9 {}", self.spec.name));
        child.kill().await.with_context(|| format!("cannot kill {}", self.spec.name))
    }

    /// Asks it to end with a signal and waits until it has.
    ///
    /// # Errors
    /// If it is not running, or has not ended within `bound`.
    pub async fn stop(&mut self, signal_name: &str, bound: Duration) -> anyhow::Result<ExitStatus> {
        let pid = self.pid().with_context(|| format!("{} is not running", self.spec.name))?;
        self.log.line("test", &format!("SIG{signal_name} to {}", self.spec.name));
        signal(pid, signal_name)?;
        self.wait_exit(bound).await
    }

    /// Waits until it has ended by itself, as at a failpoint.
    ///
    /// # Errors
    /// If it is not running, or has not ended within `bound`.
    pub async fn wait_exit(&mut self, bound: Duration) -> anyhow::Result<ExitStatus> {
        let child = self.child.as_mut().with_context(|| format!("{} is not running", self.spec.name))?;
        let Ok(ended) = tokio::time::timeout(bound, child.wait()).await else {
            bail!("{} did not end within {bound:?}", self.spec.name);
        };
        let status = ended.with_context(|| format!("cannot wait for {}", self.spec.name))?;
        self.log.line("test", &format!("{} ended: {status}", self.spec.name));
        self.child = None;
        Ok(status)
    }

    /// Starts it again on the same state and the same port, and waits until it is ready.
    ///
    /// # Errors
    /// As [`start`](Self::start); also if it is running.
    pub async fn start_again(&mut self) -> anyhow::Result<()> {
        if self.child.is_some() {
            bail!("{} is running", self.spec.name);
        }
        self.log.line("test", &format!("start {} again", self.spec.name));
        let (child, ready) = launch(&self.spec, &self.ready.grpc.clone(), &self.log).await?;
        self.child = Some(child);
        self.ready = ready;
        Ok(())
    }
}

async fn launch(spec: &Spec, listen: &str, log: &TestLog) -> anyhow::Result<(Child, Ready)> {
    let mut child = Command::new(&spec.program)
        .args(&spec.args)
        .args(["--listen", listen, "--ready-json"])
        .env_clear()
        .envs(&spec.env)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .with_context(|| format!("cannot start {}", spec.program.display()))?;
    if let Some(stderr) = child.stderr.take() {
        log.forward(&spec.name, stderr);
    }
    let stdout = child.stdout.take().context("standard output was asked for")?;
    let mut lines = BufReader::new(stdout).lines();
    let first = tokio::time::timeout(READY_BOUND, lines.next_line()).await;
    let line = match first {
        Ok(Ok(Some(line))) => line,
        Ok(Ok(None)) => {
            let status = child.wait().await.context("cannot wait for it")?;
            bail!("{} ended before it was ready: {status}; see its lines in the log", spec.name);
        }
        Ok(Err(error)) => return Err(error).with_context(|| format!("cannot read from {}", spec.name)),
        Err(_) => bail!("{} was not ready within {READY_BOUND:?}", spec.name),
    };
    log.line(&spec.name, &line);
    let line: Value = serde_json::from_str(&line)
        .with_context(|| format!("the first line of {} should be JSON but is {line:?}", spec.name))?;
    let grpc =
        line["grpc"].as_str().with_context(|| format!("no address in the ready line {line}"))?.to_owned();
    log.forward(&spec.name, lines.into_inner());
    Ok((child, Ready { grpc, line }))
}

/// Sends a signal, by its name without SIG.
///
/// # Errors
/// If nobody could take it.
pub fn signal(pid: u32, name: &str) -> anyhow::Result<()> {
    let status = std::process::Command::new("sh")
        .args(["-c", "kill -s \"$1\" \"$2\"", "sh", name, &pid.to_string()])
        .status()
        .context("cannot run kill")?;
    if !status.success() {
        bail!("cannot send SIG{name} to {pid}");
    }
    Ok(())
}
