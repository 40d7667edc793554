//! Both services, as release binaries, on loopback.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use roundhouse_proto::control::v1::conversation_service_client::ConversationServiceClient;
use roundhouse_proto::control::v1::runner_service_client::RunnerServiceClient;
use roundhouse_proto::control::v1::{
    CreateConversationRequest, GetTurnRequest, ListRunnersRequest, SendMessageRequest, StreamEventsRequest,
    runner, stream_events_response::Item,
};
use roundhouse_proto::engine::v1::{Origin, Outcome, event_body::Kind};
use serde_json::Value;
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, Command};
use tonic::transport::Channel;

/// The model that Claude Code is asked for.
pub(crate) const MODEL: &str = "claude-sonnet-4-6";

/// The longest that anything may take.
const LIMIT: Duration = Duration::from_secs(60);

/// How an engine is to be run. It gets an agent of its name.
#[derive(Debug)]
pub(crate) struct Engine {
    /// The engine's name.
    pub(crate) name: &'static str,
    model: &'static str,
    executable: PathBuf,
    settings: Vec<String>,
    /// Lines of the agent file that only this engine needs.
    options: &'static str,
}

impl Engine {
    pub(crate) fn claude(executable: &Path, model_url: &str) -> Self {
        Self {
            name: "claude-code",
            model: MODEL,
            executable: executable.to_owned(),
            settings: vec![
                format!("engines.claude-code.variables.ANTHROPIC_BASE_URL={model_url}"),
                "engines.claude-code.variables.ANTHROPIC_API_KEY=not-a-key".to_owned(),
            ],
            options: "",
        }
    }

    /// The engine that obeys a script, in the place of Claude Code.
    pub(crate) fn fake(bin_dir: &Path) -> Self {
        Self {
            name: "claude-code",
            model: MODEL,
            executable: bin_dir.join("fake-engine"),
            settings: vec!["engines.claude-code.variables.ANTHROPIC_API_KEY=not-a-key".to_owned()],
            options: "",
        }
    }

    pub(crate) fn codex(executable: &Path, model_url: &str) -> Self {
        Self {
            name: "codex",
            model: crate::bare_codex::MODEL,
            executable: executable.to_owned(),
            settings: vec![
                format!("engines.codex.variables.OPENAI_BASE_URL={model_url}/v1"),
                "engines.codex.variables.OPENAI_API_KEY=not-a-key".to_owned(),
                // As the bare one runs. A host without user namespaces has no sandbox to offer, either.
                "runner.allow_bypass=true".to_owned(),
            ],
            options: "options:\n  permissions: bypass\n",
        }
    }

    /// The agent file's text.
    fn agent(&self) -> String {
        let Self { name, model, options, .. } = self;
        format!(
            "---\nname: {name}\ndescription: Answers for the benchmark.\nengine: {name}\nmodel: {model}\n{options}---\n\
             Answer briefly.\n"
        )
    }
}

/// A turn that ended well.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) turn_id: String,
    /// From the call of SendMessage to the terminal event at the client.
    pub(crate) elapsed: Duration,
}

/// Both services and a client of them.
#[derive(Debug)]
pub(crate) struct Stack {
    directory: TempDir,
    /// The agent of a conversation until another is named: the first engine's.
    agent: &'static str,
    control_plane: Child,
    runner: Child,
    /// How the runner was started: program and arguments.
    runner_command: Vec<OsString>,
    channel: Channel,
    /// Time from the start of the process to its ready line.
    pub(crate) control_plane_ready: Duration,
    /// Time from the start of the process to its ready line.
    pub(crate) runner_ready: Duration,
}

impl Stack {
    pub(crate) async fn start(bin_dir: &Path, engines: &[Engine]) -> Result<Self> {
        Self::start_with(bin_dir, engines, &["runner.max_warm_engines=128"]).await
    }

    /// As [`Self::start`], with these settings of the runner.
    pub(crate) async fn start_with(bin_dir: &Path, engines: &[Engine], settings: &[&str]) -> Result<Self> {
        let agent = engines.first().context("a stack without an engine")?.name;
        let directory = tempfile::tempdir()?;
        let workspace = directory.path().join("workspace");
        std::fs::create_dir_all(workspace.join(".agents"))?;
        for engine in engines {
            std::fs::write(workspace.join(format!(".agents/{}.md", engine.name)), engine.agent())?;
        }
        let mut start = Command::new(bin_dir.join("control-plane"));
        start
            .args(["--listen", "127.0.0.1:0", "--ready-json", "--state-dir"])
            .arg(directory.path().join("control-plane"));
        let (control_plane, address, control_plane_ready) = spawn(start).await?;
        let server = format!("http://{address}");

        let mut start: Vec<OsString> = vec![bin_dir.join("engine-runner").into()];
        let arguments =
            ["--listen", "127.0.0.1:0", "--ready-json", "--control-plane", &server, "--state-dir"];
        start.extend(arguments.map(OsString::from));
        start.extend([directory.path().join("runner").into(), "--root".into(), workspace.into()]);
        let mut set = |setting: &str| start.extend(["--set".into(), setting.into()]);
        for setting in settings {
            set(setting);
        }
        for engine in engines {
            let Engine { name, executable, settings, .. } = engine;
            set(&format!("engines.{name}.executable={}", executable.display()));
            for setting in settings {
                set(setting);
            }
        }
        let (runner, _, runner_ready) = spawn(command(&start)).await?;
        let channel = Channel::from_shared(server)?.connect().await?;
        let stack = Self {
            directory,
            agent,
            control_plane,
            runner,
            runner_command: start,
            channel,
            control_plane_ready,
            runner_ready,
        };
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

    /// Kills the runner and starts it again on what it left; the time until it is ready.
    pub(crate) async fn restart_runner(&mut self) -> Result<Duration> {
        self.runner.start_kill()?;
        self.runner.wait().await?;
        let (runner, _, ready) = spawn(command(&self.runner_command)).await?;
        self.runner = runner;
        Ok(ready)
    }

    /// The directory of everything.
    pub(crate) fn directory(&self) -> &Path {
        self.directory.path()
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
        let agent = format!(".agents/{}.md", self.agent);
        std::fs::copy(root.join(&agent), workspace.join(&agent))?;
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
                agent: self.agent.to_owned(),
                ..CreateConversationRequest::default()
            })
            .await?
            .into_inner();
        Ok(answer.conversation.context("no conversation in the answer")?.conversation_id)
    }

    /// One turn with the conversation's agent; the time from the call of SendMessage to the terminal event at the client.
    pub(crate) async fn turn(&self, conversation: &str, text: &str) -> Result<Duration> {
        Ok(self.turn_of(conversation, "", text).await?.elapsed)
    }

    /// One turn with this engine's agent. Empty: the conversation's.
    pub(crate) async fn turn_of(&self, conversation: &str, agent: &str, text: &str) -> Result<Ended> {
        let mut client = self.client();
        let begin = Instant::now();
        let sent = client
            .send_message(SendMessageRequest {
                conversation_id: conversation.to_owned(),
                text: text.to_owned(),
                agent: agent.to_owned(),
                ..SendMessageRequest::default()
            })
            .await?
            .into_inner();
        let turn_id = sent.turn.context("no turn in the answer")?.turn_id;
        let mut stream = client
            .stream_events(StreamEventsRequest {
                conversation_id: conversation.to_owned(),
                turn_id: turn_id.clone(),
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
        Ok(Ended { turn_id, elapsed })
    }

    /// How a turn's session came to be, and whether history was given with the message.
    pub(crate) async fn origin(&self, turn_id: &str) -> Result<(Origin, bool)> {
        let request = GetTurnRequest { turn_id: turn_id.to_owned() };
        let turn =
            self.client().get_turn(request).await?.into_inner().turn.context("no turn in the answer")?;
        Ok((turn.origin(), turn.history_given))
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

/// A command from its program and arguments.
fn command(line: &[OsString]) -> Command {
    let mut words = line.iter();
    let mut command = Command::new(words.next().cloned().unwrap_or_default());
    command.args(words);
    command
}

/// Starts a service and waits for its ready line.
pub(crate) async fn spawn(mut command: Command) -> Result<(Child, String, Duration)> {
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
