//! Codex without us: `app-server` over its own protocol, and one `exec` per turn. Both with the settings that an
//! adapter needs as well, so that neither reports to anybody nor fetches anything.

use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};

/// The model that Codex is asked for.
pub(crate) const MODEL: &str = "gpt-scripted";

/// The longest that a turn may take.
const LIMIT: Duration = Duration::from_secs(60);

/// An app-server with one thread.
#[derive(Debug)]
pub(crate) struct Warm {
    child: Child,
    stdin: ChildStdin,
    lines: Lines<BufReader<ChildStdout>>,
    thread: String,
    requests: u64,
}

impl Warm {
    pub(crate) async fn start(codex: &Path, url: &str, home: &Path) -> Result<Self> {
        let mut command = command(codex, home)?;
        command.arg("app-server");
        settings(&mut command, url);
        let mut child = command.stdin(Stdio::piped()).spawn()?;
        let stdin = child.stdin.take().context("no stdin")?;
        let lines = BufReader::new(child.stdout.take().context("no stdout")?).lines();
        let mut warm = Self { child, stdin, lines, thread: String::new(), requests: 0 };
        let capabilities = json!({"experimentalApi": true});
        let client = json!({"name": "roundhouse-bench", "title": "Roundhouse's benchmark", "version": "1"});
        warm.request("initialize", json!({"clientInfo": client, "capabilities": capabilities})).await?;
        warm.write(&json!({"method": "initialized"})).await?;
        let thread = json!({
            "cwd": home,
            "model": MODEL,
            "approvalPolicy": "never",
            "sandbox": "danger-full-access",
            "developerInstructions": "Answer briefly.",
        });
        let started = warm.request("thread/start", thread).await?;
        started["thread"]["id"].as_str().context("a thread without an id")?.clone_into(&mut warm.thread);
        Ok(warm)
    }

    /// One turn; the time from the request's first byte to the turn's end.
    pub(crate) async fn turn(&mut self, text: &str) -> Result<Duration> {
        let params = json!({
            "threadId": self.thread,
            "input": [{"type": "text", "text": text, "text_elements": []}],
        });
        let begin = Instant::now();
        let started = self.request("turn/start", params).await?;
        let turn = started["turn"]["id"].clone();
        let end = self
            .next(|line| line["method"] == "turn/completed" && line["params"]["turn"]["id"] == turn)
            .await?;
        let elapsed = begin.elapsed();
        let status = &end["params"]["turn"]["status"];
        ensure!(*status == "completed", "the turn ended otherwise: {end}");
        Ok(elapsed)
    }

    pub(crate) async fn stop(mut self) -> Result<()> {
        drop(self.stdin);
        tokio::time::timeout(LIMIT, self.child.wait()).await.context("the app-server did not end")??;
        Ok(())
    }

    /// Makes a request and waits for its result. What comes before the result is passed over.
    async fn request(&mut self, method: &str, params: Value) -> Result<Value> {
        self.requests += 1;
        let id = self.requests;
        self.write(&json!({"id": id, "method": method, "params": params})).await?;
        let answer = self.next(|line| line["id"] == id && line.get("method").is_none()).await?;
        ensure!(answer.get("error").is_none(), "{method}: {answer}");
        Ok(answer["result"].clone())
    }

    async fn write(&mut self, line: &Value) -> Result<()> {
        self.stdin.write_all(format!("{line}\n").as_bytes()).await?;
        self.stdin.flush().await?;
        Ok(())
    }

    /// The next line that is wanted.
    async fn next(&mut self, wanted: impl Fn(&Value) -> bool) -> Result<Value> {
        let reading = async {
            while let Some(line) = self.lines.next_line().await? {
                let line: Value = serde_json::from_str(&line)?;
                if wanted(&line) {
                    return Ok(line);
                }
            }
            bail!("the app-server ended")
        };
        tokio::time::timeout(LIMIT, reading).await.context("the app-server did not answer in time")?
    }
}

/// One turn in a process of its own; the time from the start to the exit.
pub(crate) async fn exec(codex: &Path, url: &str, home: &Path, text: &str) -> Result<Duration> {
    let mut command = command(codex, home)?;
    command.args(["exec", "--json", "--skip-git-repo-check", "--sandbox", "danger-full-access", "-C"]);
    command.arg(home).args(["--model", MODEL]);
    settings(&mut command, url);
    command.arg("--").arg(text).stdin(Stdio::null());
    let begin = Instant::now();
    let mut child = command.spawn()?;
    let mut lines = BufReader::new(child.stdout.take().context("no stdout")?).lines();
    let mut completed = false;
    let status = tokio::time::timeout(LIMIT, async {
        while let Some(line) = lines.next_line().await? {
            let line: Value = serde_json::from_str(&line)?;
            completed |= line["type"] == "turn.completed";
        }
        anyhow::Ok(child.wait().await?)
    })
    .await
    .context("exec did not end in time")??;
    let elapsed = begin.elapsed();
    ensure!(completed && status.success(), "exec failed: {status}");
    Ok(elapsed)
}

/// Codex with nothing of this person's own, in `home` as workspace, too.
fn command(codex: &Path, home: &Path) -> Result<Command> {
    let own = home.join(".codex-home");
    std::fs::create_dir_all(&own)?;
    let mut command = Command::new(codex);
    command
        .env_clear()
        .env("HOME", home)
        .env("CODEX_HOME", own)
        .env("PATH", "/usr/local/bin:/usr/bin:/bin")
        .env("OPENAI_API_KEY", "not-a-key")
        .current_dir(home)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .kill_on_drop(true);
    Ok(command)
}

fn settings(command: &mut Command, url: &str) {
    let provider =
        format!(r#"name="bench",base_url="{url}/v1",wire_api="responses",env_key="OPENAI_API_KEY""#);
    for setting in [
        // Each end would linger for seconds over reports that reach nobody.
        "analytics.enabled=false",
        r#"otel.metrics_exporter="none""#,
        "check_for_update_on_startup=false",
        "features.plugins=false",
        "features.apps=false",
        "features.unbounded_connection_retries=false",
        "features.goals=false",
        "features.multi_agent=false",
        "project_doc_max_bytes=0",
        "skills.include_instructions=false",
        "skills.bundled.enabled=false",
        r#"model_provider="bench""#,
        &format!("model_providers.bench={{{provider}}}"),
    ] {
        command.args(["-c", setting]);
    }
}

#[cfg(test)]
mod tests {
    use roundhouse_models::{ModelServer, Options};

    use super::*;

    #[tokio::test]
    async fn both_ways_hold_turns_and_tell_a_failure() {
        let codex = match std::env::var_os("ROUNDHOUSE_TEST_CODEX") {
            Some(path) => path.into(),
            None => crate::codex::pinned().unwrap(),
        };
        let server = ModelServer::start(Options::default()).await.unwrap();
        let url = server.base_url();
        let home = tempfile::tempdir().unwrap();
        let mut warm = Warm::start(&codex, &url, home.path()).await.unwrap();
        for round in 0..2 {
            warm.turn(&format!("[[text:answer {round}]] warm")).await.unwrap();
        }
        let failed = warm.turn("[[error 400:no]] warm").await.unwrap_err();
        assert!(failed.to_string().contains("ended otherwise"), "{failed:#}");
        warm.stop().await.unwrap();
        let other = tempfile::tempdir().unwrap();
        exec(&codex, &url, other.path(), "[[text:answer]] alone").await.unwrap();
        let failed = exec(&codex, &url, other.path(), "[[error 400:no]] alone").await.unwrap_err();
        assert!(failed.to_string().contains("exec failed"), "{failed:#}");
        assert_eq!(server.models().count_for("[[text:answer 0]] warm"), 1);
        assert_eq!(server.models().count_for("[[text:answer]] alone"), 1);
    }
}
