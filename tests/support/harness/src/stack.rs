//! Everything a test needs, started: model, control plane, runner, workspace.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::Context as _;
use roundhouse_models::{ModelServer, Models, Options};
use roundhouse_proto::{
    control::v1::{ListRunnersRequest, runner::State},
    engine::v1::engine_runner_service_client::EngineRunnerServiceClient,
};
use tempfile::TempDir;
use tonic::transport::{Channel, Endpoint};

use crate::{
    Agent, BRIEF, Control, Service, Spec, TestLog, Workspace, bins, census, network, service::signal,
    wait_for, wait_until,
};

/// The dummy key that engines are given. Nobody outside this machine would take it.
pub const API_KEY: &str = "sk-test-4f1d2c-not-a-real-key";

/// Keeps the directories of a test for a look afterwards.
pub(crate) const KEEP: &str = "ROUNDHOUSE_TEST_KEEP";

/// What differs between tests.
#[derive(Debug, Clone)]
pub struct StackOptions {
    /// The executable of the engine `claude-code`. None: the real one.
    pub engine: Option<PathBuf>,
    /// The executable of the engine `codex`. None: the real one.
    pub codex: Option<PathBuf>,
    /// More variables for Claude Code.
    pub engine_variables: BTreeMap<String, String>,
    /// Settings of both services, as `section.key` and a TOML value.
    pub settings: Vec<(String, toml::Value)>,
    /// Agents of the workspace.
    pub agents: Vec<Agent>,
    /// Value of FAILPOINTS for the control plane's first start.
    pub control_plane_failpoints: Option<String>,
    /// Value of FAILPOINTS for the runner's first start.
    pub runner_failpoints: Option<String>,
    /// Value of `FAILPOINT_DIR` for both services and their keepers.
    pub failpoint_dir: Option<PathBuf>,
}

impl Default for StackOptions {
    /// The real engine, an agent `builder` that may do everything, no failpoints.
    fn default() -> Self {
        Self {
            engine: None,
            codex: None,
            engine_variables: BTreeMap::new(),
            settings: Vec::new(),
            agents: vec![Agent::new("builder")],
            control_plane_failpoints: None,
            runner_failpoints: None,
            failpoint_dir: None,
        }
    }
}

impl StackOptions {
    /// With this setting, such as `runner.warm_ttl` and `2s`.
    #[must_use]
    pub fn set(mut self, key: &str, value: impl Into<toml::Value>) -> Self {
        self.settings.push((key.to_owned(), value.into()));
        self
    }

    /// With these agents instead.
    #[must_use]
    pub fn agents(mut self, agents: &[Agent]) -> Self {
        self.agents = agents.to_vec();
        self
    }

    /// With fake-engine in the place of Claude Code.
    ///
    /// # Errors
    /// If fake-engine was not built.
    pub fn fake_engine(mut self) -> anyhow::Result<Self> {
        self.engine = Some(bins::bin("fake-engine")?);
        Ok(self)
    }

    /// With fake-codex in the place of Codex.
    ///
    /// # Errors
    /// If fake-codex was not built.
    pub fn fake_codex(mut self) -> anyhow::Result<Self> {
        self.codex = Some(bins::bin("fake-codex")?);
        Ok(self)
    }

    /// With this variable in the environment of Claude Code.
    #[must_use]
    pub fn engine_variable(mut self, name: &str, value: &str) -> Self {
        self.engine_variables.insert(name.to_owned(), value.to_owned());
        self
    }
}

/// A running control plane and a runner that is registered with it, a scripted model, and a workspace.
///
/// Dropping it ends every process that it started, and what those started.
#[derive(Debug)]
pub struct Stack {
    /// The model's script and log.
    pub model: Models,
    /// The control plane.
    pub control_plane: Service,
    /// The runner.
    pub runner: Service,
    /// Clients of the control plane.
    pub control: Control,
    /// The workspace.
    pub workspace: Workspace,
    /// The test's log.
    pub log: TestLog,
    server: ModelServer,
    root: Option<TempDir>,
    root_path: PathBuf,
}

impl Stack {
    /// Starts everything as usual.
    ///
    /// # Errors
    /// If anything does not start.
    pub async fn start() -> anyhow::Result<Self> {
        Self::start_with(StackOptions::default()).await
    }

    /// Starts everything with these options, and waits until the runner is registered.
    ///
    /// # Errors
    /// If anything does not start.
    pub async fn start_with(options: StackOptions) -> anyhow::Result<Self> {
        network::require_loopback_only()?;
        let engines = Engines::of(&options)?;
        let root =
            tempfile::Builder::new().prefix("roundhouse-e2e-").tempdir().context("no temporary directory")?;
        let root_path = root.path().canonicalize().context("the temporary directory is gone")?;
        for name in ["home", "tmp", "work"] {
            std::fs::create_dir(root_path.join(name)).with_context(|| format!("cannot make {name}"))?;
        }
        let log = TestLog::create(&root_path.join("test.log"))?;
        let workspace = Workspace::create(&root_path.join("work/project"), &options.agents)?;
        let server =
            ModelServer::start(Options::default()).await.context("the scripted model does not start")?;
        let model = server.models().clone();
        let config = root_path.join("roundhouse.toml");
        write_config(&config, &root_path, &engines, &server.base_url(), &options)?;

        let spec = |binary: &str, failpoints: &Option<String>, more: &[String]| -> anyhow::Result<Spec> {
            let mut env = environment(&root_path);
            if let Some(failpoints) = failpoints {
                env.insert("FAILPOINTS".to_owned(), failpoints.clone());
            }
            if let Some(directory) = &options.failpoint_dir {
                env.insert("FAILPOINT_DIR".to_owned(), directory.display().to_string());
            }
            let mut args = vec!["--config".to_owned(), config.display().to_string()];
            args.extend_from_slice(more);
            Ok(Spec { name: binary.to_owned(), program: bins::bin(binary)?, args, env })
        };
        let control_plane =
            Service::start(spec("control-plane", &options.control_plane_failpoints, &[])?, log.clone())
                .await?;
        let more = ["--control-plane".to_owned(), control_plane.url()];
        let runner =
            Service::start(spec("engine-runner", &options.runner_failpoints, &more)?, log.clone()).await?;
        let control = Control::new(&control_plane.url())?;
        let stack = Self {
            model,
            control_plane,
            runner,
            control,
            workspace,
            log,
            server,
            root: Some(root),
            root_path,
        };
        stack.wait_runner().await?;
        Ok(stack)
    }

    /// The directory that holds everything of this test.
    #[must_use]
    pub fn root(&self) -> &Path {
        &self.root_path
    }

    /// The runner's state directory.
    #[must_use]
    pub fn runner_state(&self) -> PathBuf {
        self.root_path.join("runner")
    }

    /// The control plane's state directory.
    #[must_use]
    pub fn control_plane_state(&self) -> PathBuf {
        self.root_path.join("control-plane")
    }

    /// The model's address.
    #[must_use]
    pub fn model_url(&self) -> String {
        self.server.base_url()
    }

    /// The workspace's path as the API takes it.
    #[must_use]
    pub fn workspace_name(&self) -> String {
        self.workspace.path().display().to_string()
    }

    /// A new conversation with the agent `builder` in the workspace; answers its id.
    ///
    /// # Errors
    /// If the call fails.
    pub async fn conversation(&self) -> anyhow::Result<String> {
        self.conversation_with("builder").await
    }

    /// A new conversation with this agent in the workspace; answers its id.
    ///
    /// # Errors
    /// If the call fails.
    pub async fn conversation_with(&self, agent: &str) -> anyhow::Result<String> {
        Ok(self.control.create(&self.workspace_name(), agent).await?.conversation_id)
    }

    /// A client of the runner itself.
    ///
    /// # Errors
    /// If its address is none.
    pub fn runner_client(&self) -> anyhow::Result<EngineRunnerServiceClient<Channel>> {
        let endpoint = Endpoint::from_shared(self.runner.url()).context("the runner's address is no URL")?;
        Ok(EngineRunnerServiceClient::new(endpoint.connect_lazy()))
    }

    /// Waits until the control plane calls the runner online.
    ///
    /// # Errors
    /// If it does not.
    pub async fn wait_runner(&self) -> anyhow::Result<()> {
        wait_for("the runner is online", BRIEF, || async {
            let runners =
                self.control.runners().list_runners(ListRunnersRequest {}).await?.into_inner().runners;
            Ok(runners.iter().any(|runner| runner.state() == State::Online).then_some(()))
        })
        .await
    }

    /// The living processes of this test, without the two services.
    #[must_use]
    pub fn census(&self) -> Vec<census::Process> {
        let services = [self.control_plane.pid(), self.runner.pid()];
        census::take(&self.root_path).into_iter().filter(|one| !services.contains(&Some(one.pid))).collect()
    }

    /// The living processes of engines and what they started; keepers, inits and the services are not among them.
    #[must_use]
    pub fn engine_processes(&self) -> Vec<census::Process> {
        use census::Role;
        self.census().into_iter().filter(|one| !matches!(one.role, Role::Keeper | Role::Init)).collect()
    }

    /// What engines have started and still lives.
    #[must_use]
    pub fn tool_processes(&self) -> Vec<census::Process> {
        self.census().into_iter().filter(|one| one.role == census::Role::Other).collect()
    }

    /// Waits until no tool process of this test lives.
    ///
    /// # Errors
    /// Names those that do.
    pub async fn wait_no_tools(&self, bound: Duration) -> anyhow::Result<()> {
        let waited = wait_until("no tool process is left", bound, || self.tool_processes().is_empty()).await;
        waited.with_context(|| census::describe(&self.tool_processes()))
    }

    /// Waits until nothing of this test lives but the services that run.
    ///
    /// # Errors
    /// Names those that do.
    pub async fn wait_nothing_left(&self, bound: Duration) -> anyhow::Result<()> {
        let waited = wait_until("nothing is left alive", bound, || self.census().is_empty()).await;
        waited.with_context(|| census::describe(&self.census()))
    }

    /// Kills both services at once with SIGKILL.
    ///
    /// # Errors
    /// If one of them is not running.
    pub async fn kill_both(&mut self) -> anyhow::Result<()> {
        let (one, other) = tokio::join!(self.control_plane.kill(), self.runner.kill());
        one.and(other)
    }

    /// Starts both services again.
    ///
    /// # Errors
    /// If one of them does not start.
    pub async fn start_both(&mut self) -> anyhow::Result<()> {
        self.control_plane.start_again().await?;
        self.runner.start_again().await
    }
}

impl Drop for Stack {
    fn drop(&mut self) {
        end_all(&self.root_path);
        if std::env::var_os(KEEP).is_some()
            && let Some(root) = self.root.take()
        {
            let kept = root.keep();
            eprintln!("kept {}; the log is {}", kept.display(), self.log.path().display());
        }
    }
}

/// Ends every process of the test with this directory: those only, each by its id.
pub(crate) fn end_all(root: &Path) {
    // Each round ends what it sees; who was born meanwhile is seen by the next. Bounded, should one be unkillable.
    for _ in 0..200 {
        let living = census::take(root);
        if living.is_empty() {
            return;
        }
        for one in living {
            // Gone already is as good.
            let _ = signal(one.pid, "KILL");
        }
    }
    eprintln!("still alive after the test: {}", census::describe(&census::take(root)));
}

/// The environment of a service: nothing of the person's own but PATH.
pub(crate) fn environment(root: &Path) -> BTreeMap<String, String> {
    let path = std::env::var("PATH").unwrap_or_else(|_| "/usr/local/bin:/usr/bin:/bin".to_owned());
    let mut env = BTreeMap::from([
        ("PATH".to_owned(), path),
        ("HOME".to_owned(), root.join("home").display().to_string()),
        ("TMPDIR".to_owned(), root.join("tmp").display().to_string()),
        ("LANG".to_owned(), "C.UTF-8".to_owned()),
    ]);
    for name in ["RUST_BACKTRACE", "RUST_LOG"] {
        if let Ok(value) = std::env::var(name) {
            env.insert(name.to_owned(), value);
        }
    }
    env
}

/// The executables of the engines.
#[derive(Debug)]
pub(crate) struct Engines {
    claude_code: PathBuf,
    codex: PathBuf,
}

impl Engines {
    /// Those that the options name, or the real ones.
    pub(crate) fn of(options: &StackOptions) -> anyhow::Result<Self> {
        let claude_code = options.engine.clone().map_or_else(bins::claude, Ok)?;
        let codex = options.codex.clone().map_or_else(bins::codex, Ok)?;
        Ok(Self { claude_code, codex })
    }

    /// For a service that runs none.
    pub(crate) fn none() -> Self {
        Self { claude_code: "none".into(), codex: "none".into() }
    }
}

pub(crate) fn write_config(
    path: &Path,
    root: &Path,
    engines: &Engines,
    model_url: &str,
    options: &StackOptions,
) -> anyhow::Result<()> {
    let text = |path: PathBuf| toml::Value::String(path.display().to_string());
    let mut config = toml::Table::new();
    let mut set = |key: &str, value: toml::Value| -> anyhow::Result<()> {
        let mut parts: Vec<&str> = key.split('.').collect();
        let last = parts.pop().context("an empty key")?;
        let mut table = &mut config;
        for part in parts {
            table = table
                .entry(part)
                .or_insert_with(|| toml::Value::Table(toml::Table::new()))
                .as_table_mut()
                .with_context(|| format!("{part} in {key} is no section"))?;
        }
        table.insert(last.to_owned(), value);
        Ok(())
    };
    set("control_plane.state_dir", text(root.join("control-plane")))?;
    set("runner.state_dir", text(root.join("runner")))?;
    let mut work = toml::Table::new();
    work.insert("path".to_owned(), text(root.join("work")));
    set("runner.roots", toml::Value::Array(vec![toml::Value::Table(work)]))?;
    set("runner.allow_bypass", true.into())?;
    set("engines.claude-code.executable", text(engines.claude_code.clone()))?;
    set("engines.claude-code.credentials", "variables".into())?;
    set("engines.claude-code.variables.ANTHROPIC_BASE_URL", model_url.into())?;
    set("engines.claude-code.variables.ANTHROPIC_API_KEY", API_KEY.into())?;
    set("engines.codex.executable", text(engines.codex.clone()))?;
    set("engines.codex.credentials", "variables".into())?;
    set("engines.codex.variables.OPENAI_BASE_URL", format!("{model_url}/v1").into())?;
    set("engines.codex.variables.OPENAI_API_KEY", API_KEY.into())?;
    for (name, value) in &options.engine_variables {
        set(&format!("engines.claude-code.variables.{name}"), value.as_str().into())?;
    }
    for (key, value) in &options.settings {
        set(key, value.clone())?;
    }
    let text = toml::to_string(&config).context("the configuration cannot be written as TOML")?;
    std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}
