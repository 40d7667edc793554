//! The CLI without us: over its own warm protocol, and with one process per turn.

use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use uuid::Uuid;

use crate::stack::MODEL;

/// The longest that a turn may take.
const LIMIT: Duration = Duration::from_secs(60);

/// A CLI process that serves many turns.
#[derive(Debug)]
pub(crate) struct Warm {
    child: Child,
    stdin: ChildStdin,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Warm {
    pub(crate) async fn start(claude: &Path, url: &str, home: &Path) -> Result<Self> {
        let mut child = command(claude, url, home)
            .arg("--input-format=stream-json")
            .arg("--replay-user-messages")
            .arg(format!("--session-id={}", Uuid::new_v4()))
            .stdin(Stdio::piped())
            .spawn()?;
        let stdin = child.stdin.take().context("no stdin")?;
        let lines = BufReader::new(child.stdout.take().context("no stdout")?).lines();
        Ok(Self { child, stdin, lines })
    }

    /// One turn; the time from the line's first byte to the result.
    pub(crate) async fn turn(&mut self, text: &str) -> Result<Duration> {
        let line = json!({
            "type": "user",
            "uuid": Uuid::new_v4().to_string(),
            "message": {"role": "user", "content": [{"type": "text", "text": text}]},
            "client_composed": true,
        });
        let begin = Instant::now();
        self.stdin.write_all(format!("{line}\n").as_bytes()).await?;
        self.stdin.flush().await?;
        tokio::time::timeout(LIMIT, result(&mut self.lines))
            .await
            .context("the CLI gave no result in time")??;
        Ok(begin.elapsed())
    }

    pub(crate) async fn stop(mut self) -> Result<()> {
        drop(self.stdin);
        tokio::time::timeout(LIMIT, self.child.wait()).await.context("the CLI did not end")??;
        Ok(())
    }
}

/// One turn in a process of its own; the time from the start to the exit.
pub(crate) async fn one_process(claude: &Path, url: &str, home: &Path, text: &str) -> Result<Duration> {
    let begin = Instant::now();
    let mut child = command(claude, url, home).arg("--").arg(text).stdin(Stdio::null()).spawn()?;
    let mut lines = BufReader::new(child.stdout.take().context("no stdout")?).lines();
    tokio::time::timeout(LIMIT, async {
        result(&mut lines).await?;
        while lines.next_line().await?.is_some() {}
        child.wait().await?;
        anyhow::Ok(())
    })
    .await
    .context("the CLI gave no result in time")??;
    Ok(begin.elapsed())
}

async fn result(lines: &mut Lines<BufReader<ChildStdout>>) -> Result<()> {
    while let Some(line) = lines.next_line().await? {
        let value: Value = serde_json::from_str(&line)?;
        if value["type"] == "result" {
            if value["is_error"] == true {
                bail!("the CLI failed: {line}");
            }
            return Ok(());
        }
    }
    bail!("the CLI ended without a result")
}

fn command(claude: &Path, url: &str, home: &Path) -> Command {
    let mut command = Command::new(claude);
    command
        .env_clear()
        .env("HOME", home)
        .env("CLAUDE_CONFIG_DIR", home.join("config"))
        .env("PATH", "/usr/local/bin:/usr/bin:/bin")
        .env("ANTHROPIC_BASE_URL", url)
        .env("ANTHROPIC_API_KEY", "not-a-key")
        .env("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "1")
        .env("DISABLE_TELEMETRY", "1")
        .env("DISABLE_AUTOUPDATER", "1")
        .current_dir(home)
        .args(["-p", "--verbose", "--output-format=stream-json", "--include-partial-messages"])
        .args(["--strict-mcp-config", "--setting-sources=user"])
        .arg(format!("--model={MODEL}"))
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .kill_on_drop(true);
    command
}
