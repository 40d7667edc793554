//! Both services, as release binaries, on loopback.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use roundhouse_proto::control::v1::conversation_service_client::ConversationServiceClient;
use roundhouse_proto::control::v1::runner_service_client::RunnerServiceClient;
use roundhouse_proto::control::v1::{
    CreateConversationRequest, ListRunnersRequest, SendMessageRequest, StreamEventsRequest, runner,
    stream_events_response::Item,
};
use roundhouse_proto::engine::v1::{Outcome, event_body::Kind};
use serde_json::Value;
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, Command};
use tonic::transport::Channel;

/// The model that every engine is asked for.
pub(crate) const MODEL: &str = "claude-sonnet-4-6";

/// The longest that anything may take.
const LIMIT: Duration = Duration::from_secs(60);

/// How the engine `claude-code` is to be run.
#[derive(Debug)]
pub(crate) struct Engine {
    executable: PathBuf,
    settings: Vec<String>,
}

impl Engine {
    pub(crate) fn claude(executable: &Path, model_url: &str) -> Self {
        Self {
            executable: executable.to_owned(),
            settings: vec![
                format!("engines.claude-code.variables.ANTHROPIC_BASE_URL={model_url}"),
                "engines.claude-code.variables.ANTHROPIC_API_KEY=not-a-key".to_owned(),
            ],
        }
    }

    /// The engine that obeys a script, in the place of the real one.
    pub(crate) fn fake(bin_dir: &Path) -> Self {
        Self {
            executable: bin_dir.join("fake-engine"),
            settings: vec!["engines.claude-code.variables.ANTHROPIC_API_KEY=not-a-key".to_owned()],
        }
    }
}

/// Both services and a client of them.
#[derive(Debug)]
pub(crate) struct Stack {
    directory: TempDir,
    control_plane: Child,
    runner: Child,
    channel: Channel,
    /// Time from the start of the process to its ready line.
    pub(crate) control_plane_ready: Duration,
    /// Time from the start of the process to its ready line.
    pub(crate) runner_ready: Duration,
}

impl Stack {
    pub(crate) async fn start(bin_dir: &Path, engine: &Engine) -> Result<Self> {
        let directory = tempfile::tempdir()?;
        let workspace = directory.path().join("workspace");
        std::fs::create_dir_all(workspace.join(".agents"))?;
        std::fs::write(
            workspace.join(".agents/bench.md"),
            format!(
                "---\nname: bench\ndescription: Answers for the benchmark.\nengine: claude-code\nmodel: {MODEL}\n---\nAnswer briefly.\n"
            ),
        )?;
        let mut start = Command::new(bin_dir.join("control-plane"));
        start
            .args(["--listen", "127.0.0.1:0", "--ready-json", "--state-dir"])
            .arg(directory.path().join("control-plane"));
        let (control_plane, address, control_plane_ready) = spawn(start).await?;
        let server = format!("http://{address}");

        let mut start = Command::new(bin_dir.join("engine-runner"));
        start
            .args(["--listen", "127.0.0.1:0", "--ready-json", "--control-plane", &server, "--state-dir"])
            .arg(directory.path().join("runner"))
            .arg("--root")
            .arg(&workspace)
            .args(["--set", "runner.max_warm_engines=128", "--set"])
            .arg(format!("engines.claude-code.executable={}", engine.executable.display()));
        for setting in &engine.settings {
            start.args(["--set", setting]);
        }
        let (runner, _, runner_ready) = spawn(start).await?;
        let channel = Channel::from_shared(server)?.connect().await?;
        let stack = Self { directory, control_plane, runner, channel, control_plane_ready, runner_ready };
        stack.wait_for_runner().await?;
        Ok(stack)
    }

    async fn wait_for_runner(&self) -> Result<()> {
        let mut client = RunnerServiceClient::new(self.channel.clone());
        let begin = Instant::now();
        while begin.elapsed() < LIMIT {
            let runners = client.list_runners(ListRunnersRequest {}).await?.into_inner().runners;
            if runners.iter().any(|found| found.state() == runner::State::Online) {
                return Ok(());
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        bail!("the runner did not register")
    }

    pub(crate) fn state_dir(&self) -> PathBuf {
        self.directory.path().join("runner")
    }

    pub(crate) fn client(&self) -> ConversationServiceClient<Channel> {
        ConversationServiceClient::new(self.channel.clone()).max_decoding_message_size(4 << 20)
    }

    /// Process ids of control plane and runner.
    pub(crate) fn pids(&self) -> Result<(u32, u32)> {
        Ok((
            self.control_plane.id().context("the control plane has ended")?,
            self.runner.id().context("the runner has ended")?,
        ))
    }

    /// A new conversation in the stack's workspace.
    pub(crate) async fn conversation(&self) -> Result<String> {
        self.conversation_in(&self.directory.path().join("workspace")).await
    }

    /// A new conversation in a workspace of its own, below the root.
    pub(crate) async fn conversation_with_workspace(&self, name: &str) -> Result<String> {
        let root = self.directory.path().join("workspace");
        let workspace = root.join("many").join(name);
        std::fs::create_dir_all(workspace.join(".agents"))?;
        std::fs::copy(root.join(".agents/bench.md"), workspace.join(".agents/bench.md"))?;
        self.conversation_in(&workspace).await
    }

    /// Makes the workspace a git repository with so many committed files.
    pub(crate) async fn fill_workspace(&self, files: usize) -> Result<()> {
        let workspace = self.directory.path().join("workspace");
        for number in 0..files {
            let directory = workspace.join(format!("src/{:03}", number / 100));
            if number % 100 == 0 {
                std::fs::create_dir_all(&directory)?;
            }
            std::fs::write(directory.join(format!("{number}.txt")), format!("file {number}\n"))?;
        }
        for arguments in [
            &["init", "--quiet"][..],
            &["add", "."],
            &[
                "-c",
                "user.name=bench",
                "-c",
                "user.email=bench@example.invalid",
                "commit",
                "--quiet",
                "-m",
                "Files",
            ],
        ] {
            let status = Command::new("git").current_dir(&workspace).args(arguments).status().await?;
            if !status.success() {
                bail!("git {arguments:?} failed");
            }
        }
        Ok(())
    }

    async fn conversation_in(&self, workspace: &Path) -> Result<String> {
        let answer = self
            .client()
            .create_conversation(CreateConversationRequest {
                workspace: workspace.display().to_string(),
                agent: "bench".to_owned(),
                ..CreateConversationRequest::default()
            })
            .await?
            .into_inner();
        Ok(answer.conversation.context("no conversation in the answer")?.conversation_id)
    }

    /// One turn; the time from the call of SendMessage to the terminal event at the client.
    pub(crate) async fn turn(&self, conversation: &str, text: &str) -> Result<Duration> {
        let mut client = self.client();
        let begin = Instant::now();
        let sent = client
            .send_message(SendMessageRequest {
                conversation_id: conversation.to_owned(),
                text: text.to_owned(),
                ..SendMessageRequest::default()
            })
            .await?
            .into_inner();
        let turn = sent.turn.context("no turn in the answer")?.turn_id;
        let mut stream = client
            .stream_events(StreamEventsRequest {
                conversation_id: conversation.to_owned(),
                turn_id: turn,
                ..StreamEventsRequest::default()
            })
            .await?
            .into_inner();
        let outcome = tokio::time::timeout(LIMIT, async {
            while let Some(item) = stream.message().await? {
                if let Some(Item::TurnEvent(event)) = item.item
                    && let Some(Kind::Terminal(terminal)) = event.body.and_then(|body| body.kind)
                {
                    return anyhow::Ok(terminal);
                }
            }
            bail!("the stream ended without a terminal event")
        })
        .await
        .context("the turn did not end in time")??;
        let elapsed = begin.elapsed();
        if outcome.outcome() != Outcome::Completed {
            bail!("the turn ended otherwise: {outcome:?}");
        }
        Ok(elapsed)
    }

    /// Ends both services and waits for them.
    pub(crate) async fn stop(mut self) -> Result<()> {
        for child in [&mut self.runner, &mut self.control_plane] {
            child.start_kill()?;
            tokio::time::timeout(LIMIT, child.wait()).await.context("a service did not end")??;
        }
        for pid in crate::memory::keepers(&self.state_dir())? {
            // Keepers outlive a killed runner; these are our own, found by our own state directory.
            Command::new("kill").args(["-KILL", &pid.to_string()]).stderr(Stdio::null()).status().await?;
        }
        Ok(())
    }
}

/// Starts a service and waits for its ready line.
async fn spawn(mut command: Command) -> Result<(Child, String, Duration)> {
    let begin = Instant::now();
    let mut child = command
        .env_clear()
        .env("HOME", "/nonexistent")
        .env("PATH", "/usr/local/bin:/usr/bin:/bin")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::inherit())
        .args(["--log", "warn"])
        .kill_on_drop(true)
        .spawn()
        .with_context(|| format!("{:?} cannot be started", command.as_std().get_program()))?;
    let mut lines = BufReader::new(child.stdout.take().context("no stdout")?).lines();
    let line = tokio::time::timeout(LIMIT, lines.next_line())
        .await
        .context("a service was not ready in time")??
        .context("a service ended before it was ready")?;
    let elapsed = begin.elapsed();
    let ready: Value = serde_json::from_str(&line)?;
    let address = ready["grpc"].as_str().context("the ready line names no address")?.to_owned();
    // Keep the pipe open, so that a later line does not kill the service.
    tokio::spawn(async move { while let Ok(Some(_)) = lines.next_line().await {} });
    Ok((child, address, elapsed))
}
