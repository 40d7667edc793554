//! A real runner with fake-engine, driven over its own contract.

use std::{
    collections::BTreeMap,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, bail};
use roundhouse_proto::engine::v1::{
    self as proto, EventBody, NumberedEvent, StartOrResumeResponse, StreamEventsResponse, TerminalEvent,
    engine_runner_service_client::EngineRunnerServiceClient, event_body::Kind, stream_events_response::Item,
};
use roundhouse_test_support::{Service, Spec, TestLog, bins};
use tempfile::TempDir;
use tonic::{Status, Streaming, transport::Channel};
use tonic_types::StatusExt as _;

/// Nothing in these tests takes longer on an idle machine than a few seconds.
pub(crate) const BOUND: Duration = Duration::from_secs(40);

pub(crate) type Client = EngineRunnerServiceClient<Channel>;

/// A running runner and a workspace.
#[derive(Debug)]
pub(crate) struct Rig {
    pub(crate) service: Service,
    pub(crate) work: PathBuf,
    pub(crate) state: PathBuf,
    /// How the runner is started.
    pub(crate) spec: Spec,
    engine: &'static str,
    root: TempDir,
}

/// Names and values.
pub(crate) type Variables = Vec<(&'static str, String)>;

/// What differs between tests.
#[derive(Debug, Default, Clone)]
pub(crate) struct With {
    /// Codex in the place of Claude Code.
    pub(crate) codex: bool,
    /// More settings of `[runner]`.
    pub(crate) settings: Vec<(&'static str, toml::Value)>,
    /// Variables of the engine.
    pub(crate) variables: Vec<(&'static str, String)>,
    /// FAILPOINTS of the first start.
    pub(crate) failpoints: Option<&'static str>,
    /// Text of the engine's script file.
    pub(crate) script: Option<&'static str>,
    /// A shell script in the engine's place; `{engine}` in it is the engine.
    pub(crate) wrapper: Option<&'static str>,
    /// Whether the root is trusted.
    pub(crate) trust: bool,
    /// Arguments of the runner.
    pub(crate) args: Vec<&'static str>,
    /// Runs the runner as this user and group, where the test itself is root. Its programs are copied to where that user
    /// may go.
    pub(crate) user: Option<u32>,
    /// Makes files in the test's directory before the start, and answers variables of the runner.
    pub(crate) prepare: Option<fn(&Path) -> Variables>,
    /// The state directory is a disk of its own, of so many bytes, which only the runner and what it starts see.
    pub(crate) disk: Option<u64>,
    /// The runner is PID 1 of a namespace of its own, as a container's main process is.
    pub(crate) pid_one: bool,
}

impl With {
    /// With Codex in the place of Claude Code.
    pub(crate) fn codex() -> Self {
        Self { codex: true, ..Self::default() }
    }

    pub(crate) fn set(key: &'static str, value: impl Into<toml::Value>) -> Self {
        Self::default().and(key, value)
    }

    pub(crate) fn and(mut self, key: &'static str, value: impl Into<toml::Value>) -> Self {
        self.settings.push((key, value.into()));
        self
    }

    pub(crate) fn failpoint(point: &'static str) -> Self {
        Self { failpoints: Some(point), ..Self::default() }
    }
}

impl Rig {
    pub(crate) async fn start() -> anyhow::Result<Self> {
        Self::with(With::default()).await
    }

    pub(crate) async fn with(with: With) -> anyhow::Result<Self> {
        let root = tempfile::Builder::new().prefix("rh-runner-").tempdir()?;
        let path = root.path().canonicalize()?;
        let (work, state) = (path.join("work"), path.join("state"));
        std::fs::create_dir(&work)?;
        let mut variables = toml::Table::new();
        for (name, value) in &with.variables {
            variables.insert((*name).to_owned(), value.clone().into());
        }
        let (name, key, program) = match with.codex {
            true => ("codex", "OPENAI_API_KEY", "fake-codex"),
            false => ("claude-code", "ANTHROPIC_API_KEY", "fake-engine"),
        };
        variables.insert(key.to_owned(), "sk-test-dummy-key-of-a-test".into());
        variables.insert("FAKE_ENGINE_LOG".to_owned(), path.join("engine.log").display().to_string().into());
        if let Some(script) = with.script {
            let file = path.join("script");
            std::fs::write(&file, script)?;
            variables.insert("FAKE_ENGINE_SCRIPT".to_owned(), file.display().to_string().into());
        }
        let mut engine = toml::Table::new();
        let mut runner_program = PathBuf::from(env!("CARGO_BIN_EXE_engine-runner"));
        let mut executable = bins::bin(program)?;
        let is_root = std::fs::metadata("/proc/self")?.uid() == 0;
        let user = with.user.filter(|_| is_root);
        if user.is_some() {
            for (binary, name) in [(&mut runner_program, "engine-runner"), (&mut executable, program)] {
                let copy = path.join(name);
                std::fs::copy(&*binary, &copy)?;
                *binary = copy;
            }
        }
        if let Some(text) = with.wrapper {
            use std::os::unix::fs::PermissionsExt as _;
            let file = path.join("wrapper");
            std::fs::write(&file, text.replace("{engine}", &executable.display().to_string()))?;
            std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o755))?;
            executable = file;
        }
        engine.insert("executable".to_owned(), executable.display().to_string().into());
        engine.insert("variables".to_owned(), variables.into());
        let mut engines = toml::Table::new();
        engines.insert(name.to_owned(), engine.into());
        let mut runner = toml::Table::new();
        for (key, value) in &with.settings {
            runner.insert((*key).to_owned(), value.clone());
        }
        let mut config = toml::Table::new();
        config.insert("engines".to_owned(), engines.into());
        config.insert("runner".to_owned(), runner.into());
        let file = path.join("roundhouse.toml");
        std::fs::write(&file, toml::to_string(&config)?)?;
        let text = |path: &PathBuf| path.display().to_string();
        let mut args = vec![
            "--config".to_owned(),
            text(&file),
            "--state-dir".to_owned(),
            text(&state),
            if with.trust { "--trust-root" } else { "--root" }.to_owned(),
            text(&work),
            "--log".to_owned(),
            "debug,h2=warn,hyper=warn,tower=warn".to_owned(),
        ];
        args.extend(with.args.iter().map(|arg| (*arg).to_owned()));
        let mut env = BTreeMap::from([
            ("PATH".to_owned(), std::env::var("PATH").unwrap_or_default()),
            ("HOME".to_owned(), text(&path)),
        ]);
        if let Some(prepare) = with.prepare {
            env.extend(prepare(&path).into_iter().map(|(name, value)| (name.to_owned(), value)));
        }
        if let Some(points) = with.failpoints {
            env.insert("FAILPOINTS".to_owned(), points.to_owned());
        }
        let log = TestLog::create(&path.join("runner.log"))?;
        if let Some(bytes) = with.disk {
            std::fs::create_dir(&state)?;
            let mount = "mount -t tmpfs -o size=\"$1\",mode=700 tmpfs \"$2\" && shift 2 && exec \"$@\"";
            let before = [
                "-m",
                "--",
                "sh",
                "-c",
                mount,
                "sh",
                &bytes.to_string(),
                &text(&state),
                &text(&runner_program),
            ];
            args.splice(0..0, before.map(str::to_owned));
            runner_program = PathBuf::from("unshare");
        }
        if with.pid_one {
            let mut before = vec!["--pid", "--fork", "--kill-child", "--mount-proc"];
            if !is_root {
                before.extend(["--user", "--map-root-user"]);
            }
            let program = text(&runner_program);
            args.splice(0..0, before.into_iter().chain(["--", &program]).map(str::to_owned));
            runner_program = PathBuf::from("unshare");
        }
        let mut spec = Spec { name: "engine-runner".to_owned(), program: runner_program, args, env };
        if let Some(user) = user {
            let id = user.to_string();
            let mut args =
                vec![format!("--reuid={id}"), format!("--regid={id}"), "--clear-groups".to_owned()];
            args.push(text(&spec.program));
            spec.args.splice(0..0, args);
            spec.program = PathBuf::from("setpriv");
            give(&path, user)?;
        }
        let service = Service::start(spec.clone(), log).await?;
        Ok(Self { service, work, state, spec, engine: name, root })
    }

    pub(crate) async fn client(&self) -> anyhow::Result<Client> {
        Ok(Client::connect(self.service.url()).await?)
    }

    /// Starts it again after its end, without failpoints.
    pub(crate) async fn again(&mut self) -> anyhow::Result<()> {
        self.service.clear_env("FAILPOINTS");
        self.service.start_again().await
    }

    /// Fills the runner's own disk to the last byte.
    pub(crate) fn fill_disk(&self) -> anyhow::Result<()> {
        use std::io::Write as _;
        let pid = self.service.pid().context("the runner has ended")?;
        // As its own processes see the directory.
        let seen = PathBuf::from(format!("/proc/{pid}/root{}", self.state.display()));
        let mut filler = std::fs::File::create(seen.join("filler"))?;
        for size in [64 * 1024, 4096, 1] {
            while filler.write_all(&vec![b'x'; size]).is_ok() {}
        }
        Ok(())
    }

    /// A path in the test's own directory.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.root.path().join(name)
    }

    /// Lines of the engine's own log that hold a word.
    pub(crate) fn engine_log(&self, word: &str) -> Vec<String> {
        let text = std::fs::read_to_string(self.path("engine.log")).unwrap_or_default();
        text.lines().filter(|line| line.contains(word)).map(str::to_owned).collect()
    }

    /// Processes of this test, by their command lines, but for the runner itself.
    pub(crate) fn processes(&self) -> Vec<(u32, String)> {
        let own = self.service.pid();
        roundhouse_test_support::census::take(self.root.path())
            .into_iter()
            .filter(|process| Some(process.pid) != own)
            .map(|process| (process.pid, process.command))
            .collect()
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}", std::fs::read_to_string(self.path("runner.log")).unwrap_or_default());
            eprintln!("engine: {}", std::fs::read_to_string(self.path("engine.log")).unwrap_or_default());
        }
        for (pid, _) in self.processes() {
            let _ = signal(pid, "KILL");
        }
    }
}

/// Gives a directory and all in it to a user.
fn give(path: &Path, user: u32) -> anyhow::Result<()> {
    std::os::unix::fs::lchown(path, Some(user), Some(user))?;
    if path.is_dir() {
        for entry in std::fs::read_dir(path)? {
            give(&entry?.path(), user)?;
        }
    }
    Ok(())
}

/// Sends a signal to one process.
pub(crate) fn signal(pid: u32, name: &str) -> anyhow::Result<()> {
    let status = std::process::Command::new("sh")
        .args(["-c", "kill -s \"$1\" \"$2\" 2>/dev/null", "sh", name, &pid.to_string()])
        .status()?;
    if status.success() { Ok(()) } else { bail!("{pid} cannot be signalled") }
}

/// One turn of one session.
#[derive(Debug, Clone)]
pub(crate) struct Turn {
    pub(crate) request: proto::StartOrResumeRequest,
}

impl Turn {
    pub(crate) fn new(rig: &Rig, conversation: &str, session: &str, turn: &str, epoch: u64) -> Self {
        Self {
            request: proto::StartOrResumeRequest {
                conversation_id: conversation.to_owned(),
                session_id: session.to_owned(),
                turn_id: turn.to_owned(),
                epoch,
                workspace: rig.work.display().to_string(),
                engine: rig.engine.to_owned(),
                model: "claude-test".to_owned(),
                agent_prompt: "You are a test.".to_owned(),
                agent: "builder".to_owned(),
                options: Some(proto::TurnOptions {
                    permissions: proto::PermissionMode::AcceptEdits.into(),
                    ..proto::TurnOptions::default()
                }),
                ..proto::StartOrResumeRequest::default()
            },
        }
    }

    pub(crate) fn id(&self) -> String {
        self.request.turn_id.clone()
    }

    pub(crate) async fn open(&self, client: &mut Client) -> Result<StartOrResumeResponse, Status> {
        Ok(client.start_or_resume(self.request.clone()).await?.into_inner())
    }

    pub(crate) async fn send(&self, client: &mut Client, text: &str) -> Result<String, Status> {
        let request = proto::SendRequest {
            session_id: self.request.session_id.clone(),
            turn_id: self.id(),
            epoch: self.request.epoch,
            message_id: format!("msg_{}", self.id()),
            text: text.to_owned(),
            mode: proto::SendMode::NewTurn.into(),
        };
        Ok(client.send(request).await?.into_inner().delivery_id)
    }

    pub(crate) async fn cancel(&self, client: &mut Client) -> Result<proto::cancel_response::Result, Status> {
        let request = proto::CancelRequest { turn_id: self.id(), epoch: self.request.epoch, grace: None };
        Ok(client.cancel(request).await?.into_inner().result())
    }

    pub(crate) async fn acknowledge(&self, client: &mut Client) -> Result<(), Status> {
        let request = proto::AcknowledgeRequest { turn_id: self.id(), epoch: self.request.epoch };
        client.acknowledge(request).await.map(|_| ())
    }

    pub(crate) async fn inspect(&self, client: &mut Client) -> Result<proto::InspectResponse, Status> {
        let target = Some(proto::inspect_request::Target::TurnId(self.id()));
        Ok(client.inspect(proto::InspectRequest { target }).await?.into_inner())
    }

    pub(crate) async fn follow(
        &self,
        client: &mut Client,
        after: u64,
        partials: bool,
    ) -> Result<Follower, Status> {
        let request = proto::StreamEventsRequest {
            turn_id: self.id(),
            epoch: Some(self.request.epoch),
            after,
            include_partial: partials,
        };
        Ok(Follower { stream: client.stream_events(request).await?.into_inner() })
    }

    /// Opens, sends, follows to the end, acknowledges.
    pub(crate) async fn run(&self, client: &mut Client, text: &str) -> anyhow::Result<Vec<NumberedEvent>> {
        self.open(client).await?;
        self.send(client, text).await?;
        let events = self.follow(client, 0, false).await?.all().await?;
        self.acknowledge(client).await?;
        Ok(events)
    }
}

/// A turn's stream.
#[derive(Debug)]
pub(crate) struct Follower {
    pub(crate) stream: Streaming<StreamEventsResponse>,
}

impl Follower {
    pub(crate) async fn next(&mut self) -> anyhow::Result<Option<Item>> {
        let next =
            tokio::time::timeout(BOUND, self.stream.message()).await.context("nothing came in time")?;
        Ok(next?.and_then(|response| response.item))
    }

    /// All events to the end, each number once and in order.
    pub(crate) async fn all(mut self) -> anyhow::Result<Vec<NumberedEvent>> {
        let mut events: Vec<NumberedEvent> = Vec::new();
        while let Some(item) = self.next().await? {
            if let Item::Event(event) = item {
                if let Some(last) = events.last()
                    && event.number != last.number + 1
                {
                    bail!("number {} follows {}", event.number, last.number);
                }
                events.push(event);
            }
        }
        Ok(events)
    }

    /// Events up to the first that matches, which comes last.
    pub(crate) async fn until(
        &mut self,
        found: impl Fn(&Kind) -> bool,
    ) -> anyhow::Result<Vec<NumberedEvent>> {
        let mut events = Vec::new();
        loop {
            match self.next().await? {
                Some(Item::Event(event)) => {
                    let matches = kind(&event).is_some_and(&found);
                    events.push(event);
                    if matches {
                        return Ok(events);
                    }
                }
                Some(_) => {}
                None => bail!("the stream ended before it came: {events:?}"),
            }
        }
    }
}

pub(crate) fn kind(event: &NumberedEvent) -> Option<&Kind> {
    match &event.body {
        Some(EventBody { kind }) => kind.as_ref(),
        None => None,
    }
}

/// The kinds, by their names and what tells them apart.
pub(crate) fn names(events: &[NumberedEvent]) -> Vec<String> {
    events
        .iter()
        .filter_map(kind)
        .map(|kind| match kind {
            Kind::Session(session) => format!("session {}", session.state().as_str_name()),
            Kind::Phase(phase) => format!("phase {}", phase.phase().as_str_name()),
            Kind::Text(text) => {
                format!("text {}{}", text.text, if text.incomplete { " (incomplete)" } else { "" })
            }
            Kind::Reasoning(_) => "reasoning".to_owned(),
            Kind::ToolCall(call) => format!("tool_call {}", call.name),
            Kind::ToolResult(result) => format!("tool_result {}", result.is_error),
            Kind::FileChange(change) => format!("file_change {}", change.path),
            Kind::PermissionRequest(request) => format!("permission_request {}", request.tool),
            Kind::PermissionAnswer(answer) => {
                format!(
                    "permission_answer {} {}",
                    answer.decision().as_str_name(),
                    answer.decider().as_str_name()
                )
            }
            Kind::Usage(_) => "usage".to_owned(),
            Kind::Quota(_) => "quota".to_owned(),
            Kind::Notice(notice) => format!("notice {}", notice.kind().as_str_name()),
            Kind::Evidence(evidence) => format!("evidence {}", evidence.point().as_str_name()),
            Kind::Terminal(terminal) => format!("terminal {}", terminal.outcome().as_str_name()),
        })
        .collect()
}

/// The terminal event, which must be the last and the only one.
pub(crate) fn terminal(events: &[NumberedEvent]) -> anyhow::Result<TerminalEvent> {
    let all: Vec<_> = events
        .iter()
        .filter_map(|event| match kind(event) {
            Some(Kind::Terminal(terminal)) => Some((event.number, terminal.clone())),
            _ => None,
        })
        .collect();
    match all.as_slice() {
        [(number, terminal)] if events.last().is_some_and(|last| last.number == *number) => {
            Ok(terminal.clone())
        }
        _ => bail!("not exactly one terminal event at the end: {:?}", names(events)),
    }
}

/// The reason in a status.
pub(crate) fn reason(status: &Status) -> String {
    status.get_details_error_info().map(|info| info.reason).unwrap_or_default()
}
