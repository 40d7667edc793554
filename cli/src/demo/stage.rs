//! Where the demo plays: the engine CLIs, two workspaces, the model, the services.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use roundhouse_config::{Config, Credentials, EngineSettings, Root};
use roundhouse_models::{Matcher, ModelServer, Options, Script};
use tempfile::TempDir;
use tokio::process::Command;

use crate::args::{DemoArgs, Global};
use crate::children::{CONTROL_PLANE, Log, RUNNER, Service, Spec};
use crate::commands::configuration;
use crate::commands::engines::install;
use crate::demo::acts::{self, Act};
use crate::demo::told::{Earlier, Told};
use crate::demo::{say, tell};
use crate::exit::Exit;
use crate::output::Output;
use crate::status::Failure;
use crate::up::{Stack, registered};

/// The engines that the demo shows.
const ENGINES: [&str; 2] = [CLAUDE_CODE, CODEX];
const CLAUDE_CODE: &str = "claude-code";
const CODEX: &str = "codex";
/// The agent on the one engine.
pub(super) const BUILDER: &str = "builder";
const BUILDER_PROMPT: &str = "You build small things, and say in one sentence what you did.";
/// The agent on the other.
pub(super) const REVIEWER: &str = "reviewer";
const REVIEWER_PROMPT: &str = "You review what others built, and say in one sentence what you think of it.";
/// The scripted model takes any name; these are such that the CLIs take them.
const SCRIPTED_MODELS: [&str; 2] = ["sonnet", "gpt-scripted"];
/// Codex's own choice for somebody who is logged in.
const LIVE_CODEX_MODEL: &str = "gpt-5-codex";
/// A key for the scripted model, which asks for none.
const SCRIPTED_KEY: &str = "sk-demo-no-real-key";

/// Where a turn is worked on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    /// The workspace of the first runner.
    First,
    /// That of the second.
    Second,
}

/// All that the demo has started.
pub(super) struct Stage {
    /// Control plane and first runner.
    pub(super) stack: Stack,
    second: Service,
    /// Of each runner, its id and its workspace.
    places: [(String, PathBuf); 2],
    directory: Directory,
    model: Option<ModelServer>,
}

/// The demo's directory: gone with the demo unless it is kept.
enum Directory {
    Temporary(TempDir),
    Kept(PathBuf),
}

impl Directory {
    fn path(&self) -> &Path {
        match self {
            Self::Temporary(directory) => directory.path(),
            Self::Kept(path) => path,
        }
    }
}

impl Stage {
    /// Makes everything. What was started is stopped again when something fails.
    pub(super) async fn prepare(global: &Global, args: &DemoArgs, output: Output) -> Result<Self, Failure> {
        let person = configuration(global)?;
        say(output, "the engine CLIs");
        let engines_dir = person.runner.state_dir.join("engines");
        let mut executables = Vec::new();
        for engine in ENGINES {
            executables.push((engine, install(engine, engines_dir.clone(), output).await?));
        }

        let directory = tempfile::Builder::new()
            .prefix("roundhouse-demo-")
            .tempdir()
            .map_err(|error| io("the temporary directory", &error))?;
        let directory =
            if args.keep { Directory::Kept(directory.keep()) } else { Directory::Temporary(directory) };
        let place = directory.path().canonicalize().map_err(|error| io("the temporary directory", &error))?;
        say(output, &format!("two git workspaces with two agents, in {}", place.display()));
        let workspaces = [place.join("first"), place.join("second")];
        let bypass = !codex_sandbox_runs(&executables, args.live).await?;
        let models = if args.live { [args.model.as_str(), LIVE_CODEX_MODEL] } else { SCRIPTED_MODELS };
        for workspace in &workspaces {
            make_workspace(workspace, models, bypass).await?;
        }

        let model = if args.live { None } else { Some(scripted_model(&workspaces[0]).await?) };
        let mut files = Vec::new();
        for (name, workspace) in [("first", &workspaces[0]), ("second", &workspaces[1])] {
            let mut config = config(&place, name, workspace, &executables, model.as_ref(), &person);
            config.runner.allow_bypass = bypass;
            let file = place.join(format!("{name}.toml"));
            write_private(&file, &config)?;
            files.push(file);
        }

        say(output, "control plane and two engine runners");
        let spec = |name, service, config: &Path, log: &str, more: &[&str]| Spec {
            name,
            service,
            args: [vec!["--config".into(), config.into()], more.iter().map(Into::into).collect()].concat(),
            listen: "127.0.0.1:0".to_owned(),
            log: Log::File(place.join(log)),
            own_settings_only: true,
            engines_of: None,
        };
        let control_plane = spec("control plane", CONTROL_PLANE, &files[0], "control-plane.log", &[]);
        let runner = |name: &str, file: &Path, url: &str| {
            let more = ["--control-plane", url, "--stop-turns"];
            let started = spec("engine runner", RUNNER, file, &format!("runner-{name}.log"), &more);
            Spec { engines_of: Some(place.join(format!("runner-{name}"))), ..started }
        };
        let mut stack = Stack::start(control_plane, |url| runner("first", &files[0], url)).await?;
        let url = stack.control_plane.url();
        let mut second = match Service::start(runner("second", &files[1], &url)).await {
            Ok(second) => second,
            Err(failure) => {
                stack.stop().await;
                return Err(failure);
            }
        };
        let described = async {
            Ok::<_, Failure>([stack.describe().await?, registered(&stack.control_plane, &second).await?])
        };
        let described = match described.await {
            Ok(described) => described,
            Err(failure) => {
                second.stop().await;
                stack.stop().await;
                return Err(failure);
            }
        };
        for engine in &described[0].engines {
            if ENGINES.contains(&engine.name.as_str()) {
                tell(output, &format!("{} {}: {}", engine.name, engine.version, engine.login_detail));
            }
        }
        let [first, other] = described.map(|runner| runner.runner_id);
        tell(
            output,
            &format!(
                "control plane {url}, runners {} ({first}) and {} ({other})",
                stack.runner.url(),
                second.url()
            ),
        );
        tell(output, &format!("grpcurl -plaintext {} list", stack.control_plane.grpc()));
        let [at_first, at_second] = workspaces;
        let places = [(first, at_first), (other, at_second)];
        Ok(Self { stack, second, places, directory, model })
    }

    /// A workspace as the control plane takes it.
    pub(super) fn workspace(&self, place: Place) -> String {
        let (runner, path) = &self.places[place as usize];
        format!("{runner}:{}", path.display())
    }

    /// The directory of a workspace.
    pub(super) fn directory_of(&self, place: Place) -> &Path {
        &self.places[place as usize].1
    }

    /// What the model was told in the first request of a turn. None of a real model.
    pub(super) fn told(&self, act: &Act, earlier: &[Earlier]) -> Option<Told> {
        let model = self.model.as_ref()?;
        let prompt = if act.agent == REVIEWER { REVIEWER_PROMPT } else { BUILDER_PROMPT };
        let requests = model.models().requests_for(act.says);
        let first = requests.iter().find(|record| record.turn_text().trim() == act.says)?;
        Some(Told::read(&first.conversation(), earlier, prompt))
    }

    /// Stops both runners, then the control plane. Whether all went in good order. Cancellation safe.
    pub(super) async fn stop(&mut self) -> bool {
        let second = self.second.stop().await;
        self.stack.stop().await && second
    }

    /// The demo's directory.
    pub(super) fn place(&self) -> PathBuf {
        let path = self.directory.path();
        path.canonicalize().unwrap_or_else(|_| path.to_owned())
    }

    /// Ends all at once.
    pub(super) async fn end_at_once(self) -> Result<(), Failure> {
        let Self { stack, second, directory, model, .. } = self;
        let ended = second.end_at_once().await;
        stack.end_at_once().await?;
        ended?;
        clear(directory, model).await;
        Ok(())
    }

    /// Takes away what is left once the services have stopped.
    pub(super) async fn clear(self) {
        clear(self.directory, self.model).await;
    }
}

async fn clear(directory: Directory, model: Option<ModelServer>) {
    if let Some(model) = model {
        model.stop().await;
    }
    if let Directory::Temporary(directory) = directory {
        // What cannot be taken away lies in the system's temporary directory, where nobody minds it.
        let _ = directory.close();
    }
}

fn io(what: &str, error: &std::io::Error) -> Failure {
    Failure::new(Exit::Failed, format!("{what}: {error}"))
}

/// Whether Codex can work in its own sandbox. Where it cannot, the scripted model may do without; a real one may not.
async fn codex_sandbox_runs(executables: &[(&str, PathBuf)], live: bool) -> Result<bool, Failure> {
    let mut asked = Config::default();
    for (engine, executable) in executables {
        let settings = EngineSettings { executable: executable.clone(), ..EngineSettings::default() };
        asked.engines.insert((*engine).to_owned(), settings);
    }
    let found = tokio::task::spawn_blocking(move || roundhouse_engine_runner::engine_facts(&asked)).await;
    let found = found.map_err(|error| Failure::new(Exit::Failed, error.to_string()))?;
    let sandbox = found.into_iter().find(|engine| engine.name == CODEX).and_then(|engine| engine.sandbox);
    match sandbox {
        Some(Err(why)) if live => {
            Err(Failure::new(Exit::Policy, format!("the sandbox of Codex does not run here: {why}"))
                .next("`roundhouse doctor` says how to raise the isolation"))
        }
        sandbox => Ok(!matches!(sandbox, Some(Err(_)))),
    }
}

async fn make_workspace(workspace: &Path, models: [&str; 2], bypass: bool) -> Result<(), Failure> {
    let agents = workspace.join(".agents");
    std::fs::create_dir_all(&agents).map_err(|error| io("the workspace", &error))?;
    let reviewer = if bypass { "bypass" } else { "accept-edits" };
    for (name, engine, model, permissions, prompt) in [
        (BUILDER, CLAUDE_CODE, models[0], "accept-edits", BUILDER_PROMPT),
        (REVIEWER, CODEX, models[1], reviewer, REVIEWER_PROMPT),
    ] {
        let agent = format!(
            "---\nname: {name}\ndescription: The {name} of the demo\nengine: {engine}\nmodel: {model}\n\
             options:\n  permissions: {permissions}\n---\n{prompt}\n"
        );
        std::fs::write(agents.join(format!("{name}.md")), agent)
            .map_err(|error| io("the agent file", &error))?;
    }
    git(workspace, &["init", "--quiet", "--initial-branch=main"]).await?;
    git(workspace, &["add", "."]).await?;
    git(workspace, &["commit", "--quiet", "--message=Add two agents"]).await
}

/// git without the person's own configuration.
async fn git(workspace: &Path, args: &[&str]) -> Result<(), Failure> {
    let output = Command::new("git")
        .args(["-c", "user.name=Roundhouse demo", "-c", "user.email=demo@roundhouse.invalid"])
        .args(args)
        .current_dir(workspace)
        .env("GIT_CONFIG_GLOBAL", "/dev/null")
        .env("GIT_CONFIG_NOSYSTEM", "1")
        .stdin(Stdio::null())
        .output()
        .await
        .map_err(|error| io("git cannot be started", &error))?;
    if output.status.success() {
        return Ok(());
    }
    let told = String::from_utf8_lossy(&output.stderr);
    Err(Failure::new(Exit::Failed, format!("git {}: {}", args.join(" "), told.trim())))
}

/// The model that says what the demo's turns need.
async fn scripted_model(workspace: &Path) -> Result<ModelServer, Failure> {
    let failed = |error: roundhouse_models::Error| {
        Failure::new(Exit::Failed, format!("the scripted model does not start: {error}"))
    };
    let server = ModelServer::start(Options::default()).await.map_err(failed)?;
    for (asked, script) in acts::scripts(workspace) {
        server.models().rule(Matcher::Contains(asked.to_owned()), Script::parse(&script).map_err(failed)?);
    }
    Ok(server)
}

/// The configuration of a runner, and of the control plane beside the first.
fn config(
    place: &Path,
    name: &str,
    workspace: &Path,
    executables: &[(&str, PathBuf)],
    model: Option<&ModelServer>,
    person: &Config,
) -> Config {
    let mut config = Config::default();
    config.control_plane.state_dir = place.join("control-plane");
    config.runner.state_dir = place.join(format!("runner-{name}"));
    config.runner.roots = vec![Root { path: workspace.to_owned(), trust: false }];
    for (engine, executable) in executables {
        let settings = match model {
            Some(model) => {
                let names = match *engine {
                    CODEX => [("OPENAI_API_KEY", ""), ("OPENAI_BASE_URL", "/v1")],
                    _ => [("ANTHROPIC_API_KEY", ""), ("ANTHROPIC_BASE_URL", "")],
                };
                let [(key, _), (url, path)] = names;
                EngineSettings {
                    variables: BTreeMap::from([
                        (key.to_owned(), SCRIPTED_KEY.to_owned()),
                        (url.to_owned(), format!("{}{path}", model.base_url())),
                    ]),
                    ..EngineSettings::default()
                }
            }
            // The person's own settings, and without any the person's own login.
            None => person.engines.get(*engine).cloned().unwrap_or_else(|| EngineSettings {
                credentials: Credentials::Host,
                ..EngineSettings::default()
            }),
        };
        let settings = EngineSettings { executable: executable.clone(), ..settings };
        config.engines.insert((*engine).to_owned(), settings);
    }
    config
}

/// Writes the configuration, which may hold a key, so that nobody else can read it.
fn write_private(file: &Path, config: &Config) -> Result<(), Failure> {
    let text = toml::to_string(config).map_err(|error| {
        Failure::new(Exit::Failed, format!("the configuration cannot be written: {error}"))
    })?;
    let mut options = std::fs::OpenOptions::new();
    let mut opened = options
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(file)
        .map_err(|error| io("the configuration cannot be written", &error))?;
    opened.write_all(text.as_bytes()).map_err(|error| io("the configuration cannot be written", &error))
}

/// Processes whose working directory, command line or environment names this place, as `pid command`.
pub(super) fn processes_of(place: &Path) -> Vec<String> {
    let Some(needle) = place.to_str() else { return Vec::new() };
    let own = std::process::id().to_string();
    let Ok(entries) = std::fs::read_dir("/proc") else { return Vec::new() };
    let mut found = Vec::new();
    for entry in entries.flatten() {
        let name = entry.file_name();
        let Some(pid) = name.to_str().filter(|name| name.bytes().all(|b| b.is_ascii_digit())) else {
            continue;
        };
        if pid == own {
            continue;
        }
        let read = |file: &str| std::fs::read(entry.path().join(file)).unwrap_or_default();
        let names_it = |bytes: &[u8]| {
            !bytes.is_empty() && bytes.windows(needle.len()).any(|window| window == needle.as_bytes())
        };
        let command = read("cmdline");
        let lives_there =
            std::fs::read_link(entry.path().join("cwd")).is_ok_and(|cwd| cwd.starts_with(place));
        if lives_there || names_it(&command) || names_it(&read("environ")) {
            let words = String::from_utf8_lossy(&command).replace('\0', " ");
            found.push(format!("{pid} {}", words.chars().take(80).collect::<String>().trim_end()));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_process_that_is_left_behind_is_found_and_one_that_ended_is_not() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().canonicalize().unwrap();
        assert_eq!(processes_of(&path), Vec::<String>::new());
        let mut by_variable = Command::new("tail")
            .args(["-f", "/dev/null"])
            .env("TMPDIR", path.join("tmp"))
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let mut by_directory = Command::new("tail")
            .args(["-f", "/dev/null"])
            .current_dir(&path)
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let pids = [by_variable.id().unwrap(), by_directory.id().unwrap()];
        // Until a process has executed its program it is still its parent's image, with no command line of its own.
        let both = async {
            loop {
                let found = processes_of(&path);
                if pids.iter().all(|pid| found.iter().any(|line| *line == format!("{pid} tail -f /dev/null")))
                {
                    return found;
                }
                tokio::task::yield_now().await;
            }
        };
        let found = tokio::time::timeout(std::time::Duration::from_secs(20), both).await.unwrap();
        assert_eq!(found.len(), 2, "{found:?}");
        by_variable.kill().await.unwrap();
        by_directory.kill().await.unwrap();
        assert_eq!(processes_of(&path), Vec::<String>::new());
    }

    #[tokio::test]
    async fn the_configuration_of_the_demo_is_one_that_the_services_take() {
        let place = tempfile::tempdir().unwrap();
        let model = scripted_model(place.path()).await.unwrap();
        let made = config(
            place.path(),
            "first",
            &place.path().join("workspace"),
            &[(CLAUDE_CODE, "/opt/claude".into()), (CODEX, "/opt/codex".into())],
            Some(&model),
            &Config::default(),
        );
        let file = place.path().join("roundhouse.toml");
        write_private(&file, &made).unwrap();
        let sources =
            roundhouse_config::Sources { file: Some(file), ..roundhouse_config::Sources::default() };
        let read = roundhouse_config::load(&sources).unwrap();
        assert_eq!(read, made);
        assert_eq!(read.engines[CLAUDE_CODE].variables["ANTHROPIC_BASE_URL"], model.base_url());
        assert_eq!(read.engines[CODEX].variables["OPENAI_BASE_URL"], format!("{}/v1", model.base_url()));
    }

    #[tokio::test]
    async fn the_workspace_is_a_worktree_with_a_commit() {
        let place = tempfile::tempdir().unwrap();
        let workspace = place.path().join("workspace");
        make_workspace(&workspace, ["haiku", "gpt"], false).await.unwrap();
        git(&workspace, &["rev-parse", "--verify", "--quiet", "HEAD"]).await.unwrap();
        let agent = std::fs::read_to_string(workspace.join(".agents/builder.md")).unwrap();
        assert!(agent.contains("model: haiku\n"), "{agent}");
        let reviewer = std::fs::read_to_string(workspace.join(".agents/reviewer.md")).unwrap();
        assert!(reviewer.contains("model: gpt\n") && reviewer.contains("permissions: accept-edits\n"));
    }
}
