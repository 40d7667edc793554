//! Where the demo plays: the engine CLI, a workspace, the model, both services.

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
use crate::children::{CONTROL_PLANE, Log, RUNNER, Spec};
use crate::commands::configuration;
use crate::commands::engines::install;
use crate::demo::{play, say};
use crate::exit::Exit;
use crate::output::Output;
use crate::status::Failure;
use crate::up::Stack;

/// The engine that the demo shows.
pub(super) const ENGINE: &str = "claude-code";
/// The agent's name.
pub(super) const AGENT: &str = "builder";
const AGENT_PROMPT: &str = "You build small things, and say in one sentence what you did.";
/// The scripted model takes any name; this is one that the CLI knows.
const SCRIPTED_MODEL: &str = "sonnet";
/// A key for the scripted model, which asks for none.
const SCRIPTED_KEY: &str = "sk-demo-no-real-key";

/// All that the demo has started.
pub(super) struct Stage {
    pub(super) stack: Stack,
    pub(super) workspace: PathBuf,
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
        say(output, "the engine CLI");
        let engines_dir = person.runner.state_dir.join("engines");
        let executable = install(ENGINE, engines_dir, output).await?;

        let directory = tempfile::Builder::new()
            .prefix("roundhouse-demo-")
            .tempdir()
            .map_err(|error| io("the temporary directory", &error))?;
        let directory =
            if args.keep { Directory::Kept(directory.keep()) } else { Directory::Temporary(directory) };
        let place = directory.path().canonicalize().map_err(|error| io("the temporary directory", &error))?;
        say(output, &format!("a git workspace with an agent file, in {}", place.display()));
        let workspace = place.join("workspace");
        let model_name = if args.live { args.model.as_str() } else { SCRIPTED_MODEL };
        make_workspace(&workspace, model_name).await?;

        let model = if args.live { None } else { Some(scripted_model(&workspace).await?) };
        let config = config(&place, &workspace, &executable, model.as_ref(), &person);
        let file = place.join("roundhouse.toml");
        write_private(&file, &config)?;

        say(output, "control plane and engine runner");
        let spec = |name, service, log: &str, more: &[&str]| Spec {
            name,
            service,
            args: [vec!["--config".into(), file.clone().into()], more.iter().map(Into::into).collect()]
                .concat(),
            listen: "127.0.0.1:0".to_owned(),
            log: Log::File(place.join(log)),
            own_settings_only: true,
            engines_of: (service == RUNNER).then(|| place.join("runner")),
        };
        let control_plane = spec("control plane", CONTROL_PLANE, "control-plane.log", &[]);
        let runner = |url: &str| {
            spec("engine runner", RUNNER, "runner.log", &["--control-plane", url, "--stop-turns"])
        };
        let mut stack = Stack::start(control_plane, runner).await?;
        match stack.describe().await {
            Ok(described) if !output.is_json() => {
                for engine in described.engines.iter().filter(|engine| engine.name == ENGINE) {
                    output.note(&format!("{} {}: {}", engine.name, engine.version, engine.login_detail));
                }
                output.note(&format!(
                    "control plane {}, runner {}",
                    stack.control_plane.url(),
                    stack.runner.url()
                ));
                output.note(&format!("grpcurl -plaintext {} list", stack.control_plane.grpc()));
            }
            Ok(_) => {}
            Err(failure) => {
                stack.stop().await;
                return Err(failure);
            }
        }
        Ok(Self { stack, workspace, directory, model })
    }

    /// The demo's directory.
    pub(super) fn place(&self) -> PathBuf {
        let path = self.directory.path();
        path.canonicalize().unwrap_or_else(|_| path.to_owned())
    }

    /// Ends all at once.
    pub(super) async fn end_at_once(self) -> Result<(), Failure> {
        let Self { stack, directory, model, .. } = self;
        stack.end_at_once().await?;
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

async fn make_workspace(workspace: &Path, model: &str) -> Result<(), Failure> {
    let agents = workspace.join(".agents");
    std::fs::create_dir_all(&agents).map_err(|error| io("the workspace", &error))?;
    let agent = format!(
        "---\nname: {AGENT}\ndescription: Builds small things for the demo\nengine: {ENGINE}\nmodel: {model}\n\
         options:\n  permissions: accept-edits\n---\n{AGENT_PROMPT}\n"
    );
    std::fs::write(agents.join(format!("{AGENT}.md")), agent)
        .map_err(|error| io("the agent file", &error))?;
    git(workspace, &["init", "--quiet", "--initial-branch=main"]).await?;
    git(workspace, &["add", "."]).await?;
    git(workspace, &["commit", "--quiet", "--message=Add an agent"]).await
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
    for (asked, script) in play::scripts(workspace) {
        server.models().rule(Matcher::Contains(asked.to_owned()), Script::parse(&script).map_err(failed)?);
    }
    Ok(server)
}

fn config(
    place: &Path,
    workspace: &Path,
    executable: &Path,
    model: Option<&ModelServer>,
    person: &Config,
) -> Config {
    let mut config = Config::default();
    config.control_plane.state_dir = place.join("control-plane");
    config.runner.state_dir = place.join("runner");
    config.runner.roots = vec![Root { path: workspace.to_owned(), trust: false }];
    let settings = match model {
        Some(model) => EngineSettings {
            variables: BTreeMap::from([
                ("ANTHROPIC_API_KEY".to_owned(), SCRIPTED_KEY.to_owned()),
                ("ANTHROPIC_BASE_URL".to_owned(), model.base_url()),
            ]),
            ..EngineSettings::default()
        },
        // The person's own settings, and without any the person's own login.
        None => person.engines.get(ENGINE).cloned().unwrap_or_else(|| EngineSettings {
            credentials: Credentials::Host,
            ..EngineSettings::default()
        }),
    };
    let settings = EngineSettings { executable: executable.to_owned(), ..settings };
    config.engines.insert(ENGINE.to_owned(), settings);
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
            &place.path().join("workspace"),
            Path::new("/opt/claude"),
            Some(&model),
            &Config::default(),
        );
        let file = place.path().join("roundhouse.toml");
        write_private(&file, &made).unwrap();
        let sources =
            roundhouse_config::Sources { file: Some(file), ..roundhouse_config::Sources::default() };
        let read = roundhouse_config::load(&sources).unwrap();
        assert_eq!(read, made);
        assert_eq!(read.engines[ENGINE].variables["ANTHROPIC_BASE_URL"], model.base_url());
    }

    #[tokio::test]
    async fn the_workspace_is_a_worktree_with_a_commit() {
        let place = tempfile::tempdir().unwrap();
        let workspace = place.path().join("workspace");
        make_workspace(&workspace, "haiku").await.unwrap();
        git(&workspace, &["rev-parse", "--verify", "--quiet", "HEAD"]).await.unwrap();
        let agent = std::fs::read_to_string(workspace.join(".agents/builder.md")).unwrap();
        assert!(agent.contains("model: haiku\n"), "{agent}");
    }
}
