//! Running the binary with an environment built from nothing.

use std::process::{Output, Stdio};
use std::time::Duration;

use serde_json::Value;
use tokio::io::AsyncWriteExt as _;
use tokio::process::{Child, Command};

/// No command of these tests takes longer.
pub(crate) const BOUND: Duration = Duration::from_secs(20);

/// How a command ended.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) code: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Ended {
    /// Standard output as one JSON value.
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// Standard output as JSON lines.
    pub(crate) fn lines(&self) -> Vec<Value> {
        self.stdout.lines().map(|line| serde_json::from_str(line).expect("a line of JSON")).collect()
    }
}

pub(crate) fn command(args: &[&str]) -> Command {
    program(env!("CARGO_BIN_EXE_roundhouse"), args)
}

/// Some program, with the same environment.
pub(crate) fn program(name: &str, args: &[&str]) -> Command {
    let mut command = Command::new(name);
    command
        .args(args)
        .env_clear()
        .env("PATH", std::env::var_os("PATH").unwrap_or_default())
        .env("HOME", "/nonexistent")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true);
    command
}

pub(crate) async fn run(args: &[&str]) -> Ended {
    finish(command(args).spawn().expect("the binary starts")).await
}

pub(crate) async fn run_with_input(args: &[&str], input: &[u8]) -> Ended {
    let mut child = command(args).stdin(Stdio::piped()).spawn().expect("the binary starts");
    let mut stdin = child.stdin.take().expect("was asked for");
    stdin.write_all(input).await.expect("the binary reads");
    drop(stdin);
    finish(child).await
}

pub(crate) async fn finish(child: Child) -> Ended {
    let output = tokio::time::timeout(BOUND, child.wait_with_output()).await.expect("ends in time");
    let Output { status, stdout, stderr } = output.expect("can be waited for");
    Ended {
        code: status.code().unwrap_or(-1),
        stdout: String::from_utf8(stdout).expect("UTF-8"),
        stderr: String::from_utf8(stderr).expect("UTF-8"),
    }
}
