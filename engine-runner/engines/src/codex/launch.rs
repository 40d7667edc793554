//! How the app-server is started: executable, arguments, environment, credentials.
//!
//! What must hold whatever the home's `config.toml` says is an argument. The key stays in the engine's environment,
//! and the engine is told to keep it from its tools'. What the thread itself needs is in [`Setup`].

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    time::Duration,
};

use serde_json::json;
use uuid::Uuid;

use crate::{
    adapter::refuse_reserved,
    checks::{is_secret, model, path_text},
    limit,
    plan::{
        CredentialPlan, CredentialRequest, CredentialSource, Effort, EngineHome, LaunchPlan, LaunchRequest,
        OpenMode, Permissions, PlanError, SandboxProbe, Secret,
    },
};

use super::setup::Setup;

/// The levels the engine passes on to the model. It checks none of them.
pub(super) const EFFORTS: [Effort; 8] = Effort::ALL;

/// Empty directories that the sandbox makes as mount points and does not always remove.
pub(super) const LEFTOVERS: &[&str] = &[".git", ".codex", ".aws", ".agents"];

/// The longest prompt: it travels as one line.
const PROMPT_LIMIT: usize = 1_048_576;

/// Variables that the runner sets itself.
pub(super) const RESERVED: &[&str] = &["CODEX_HOME", "CODEX_SQLITE_HOME", "HOME", "PATH", "PWD", "TMPDIR"];

/// Keys the model's service may be asked with, the first that is set.
const KEYS: [&str; 2] = ["OPENAI_API_KEY", "CODEX_API_KEY"];

/// The variable that names another address of the model's service.
const BASE_URL: &str = "OPENAI_BASE_URL";

/// The address that is used without it.
const DEFAULT_BASE_URL: &str = "https://api.openai.com/v1";

/// The directory of the native binary in its npm package, beside the launcher's package.
#[cfg(target_arch = "aarch64")]
macro_rules! native {
    ($prefix:literal) => {
        concat!($prefix, "codex-linux-arm64/vendor/aarch64-unknown-linux-musl/bin/codex")
    };
}
#[cfg(not(target_arch = "aarch64"))]
macro_rules! native {
    ($prefix:literal) => {
        concat!($prefix, "codex-linux-x64/vendor/x86_64-unknown-linux-musl/bin/codex")
    };
}

/// The native binary, relative to `node_modules/.bin`. The launcher there starts it as a child, which a SIGKILL of
/// the launcher leaves behind.
pub(super) const NATIVE: &str = native!("../@openai/");

/// The native binaries that a launcher script may stand for.
pub(super) fn executable_behind(found: &Path) -> Vec<PathBuf> {
    let script = found.file_name().is_some_and(|name| name == "codex.js");
    let Some(package) = found.parent().and_then(Path::parent).filter(|_| script) else { return Vec::new() };
    let mut places = vec![package.join(native!("node_modules/@openai/"))];
    places.extend(package.parent().map(|scope| scope.join(native!(""))));
    places
}

pub(super) fn credentials(request: &CredentialRequest<'_>) -> Result<CredentialPlan, PlanError> {
    refuse_reserved(RESERVED, request.variables)?;
    let home = engine_home(request)?;
    let mut variables = request.variables.clone();
    variables.retain(|_, value| !value.expose().is_empty());
    let login = match request.source {
        CredentialSource::None => {
            variables.retain(|name, _| !is_secret(name));
            "none".to_owned()
        }
        CredentialSource::Host => "the person's own login".to_owned(),
        CredentialSource::Variables => match key_of(&variables) {
            Some(name) => name.to_owned(),
            None => {
                return Err(PlanError::Auth {
                    message: "no credential for codex is configured".to_owned(),
                    what_to_do:
                        "Set OPENAI_API_KEY under [engines.codex], or credentials = \"host\" to use your \
                                 own login."
                            .to_owned(),
                });
            }
        },
    };
    let secrets =
        variables.iter().filter(|(name, _)| is_secret(name)).map(|(_, value)| value.clone()).collect();
    Ok(CredentialPlan { variables, pipes: Vec::new(), home, secrets, login })
}

/// The name of the key that is used.
fn key_of(variables: &BTreeMap<String, Secret>) -> Option<&'static str> {
    KEYS.into_iter().find(|name| variables.contains_key(*name))
}

/// Where the engine's files lie.
fn engine_home(request: &CredentialRequest<'_>) -> Result<EngineHome, PlanError> {
    if request.source != CredentialSource::Host {
        let directory = request.private_home.clone();
        let text = path_text(&directory)?;
        return Ok(EngineHome {
            directory,
            private: true,
            variables: BTreeMap::from([("CODEX_HOME".to_owned(), text)]),
        });
    }
    let Some(host) = &request.host else {
        return Err(PlanError::Configuration {
            message: "credentials = \"host\" needs a home directory, and the runner has none".to_owned(),
            what_to_do: "Start the runner as a user with a home directory, or configure a key.".to_owned(),
        });
    };
    let directory = host.engine_directory.clone().unwrap_or_else(|| host.home.join(".codex"));
    let variables = BTreeMap::from([
        ("HOME".to_owned(), path_text(&host.home)?),
        ("CODEX_HOME".to_owned(), path_text(&directory)?),
    ]);
    Ok(EngineHome { directory, private: false, variables })
}

pub(super) fn launch(request: &LaunchRequest<'_>) -> Result<LaunchPlan, PlanError> {
    if request.open == OpenMode::Resume {
        thread_id(&request.native.id)?;
    }
    let setup = setup(request)?;
    Ok(LaunchPlan {
        program: request.executable.clone(),
        args: arguments(request)?,
        env: environment(request)?,
        cwd: request.workspace.clone(),
        pipes: request.credentials.pipes.clone(),
        secrets: request.credentials.secrets.clone(),
        setup: Some(setup),
    })
}

fn setup(request: &LaunchRequest<'_>) -> Result<serde_json::Value, PlanError> {
    if request.prompt.len() > PROMPT_LIMIT {
        return Err(PlanError::Configuration {
            message: format!(
                "the agent's prompt has {} bytes; at most {PROMPT_LIMIT} are given to codex",
                request.prompt.len()
            ),
            what_to_do: "Shorten the prompt in the agent file.".to_owned(),
        });
    }
    if request.limits.max_turns.is_some() {
        return Err(PlanError::Unsupported { message: "codex cannot limit the rounds of a turn".to_owned() });
    }
    let setup = Setup {
        workspace: path_text(&request.workspace)?,
        model: model(request.model)?.to_owned(),
        effort: request.effort.map(|effort| effort.name().to_owned()),
        permissions: request.permissions,
        prompt: request.prompt.to_owned(),
    };
    serde_json::to_value(setup).map_err(|error| PlanError::Configuration {
        message: format!("the engine's setup cannot be written as JSON: {error}"),
        what_to_do: "Correct the agent file.".to_owned(),
    })
}

/// A string as TOML, which a value of `-c` is.
fn toml(text: &str) -> String {
    json!(text).to_string().replace('\u{7f}', "\\u007F")
}

fn arguments(request: &LaunchRequest<'_>) -> Result<Vec<String>, PlanError> {
    let mut settings: Vec<String> = [
        // Without the first two each end lingers for seconds over reports that reach nobody.
        "analytics.enabled=false",
        r#"otel.metrics_exporter="none""#,
        "check_for_update_on_startup=false",
        // These fetch from the network on their own.
        "features.plugins=false",
        "features.apps=false",
        // Without it a service that is away is asked for ever, whatever the limits below say.
        "features.unbounded_connection_retries=false",
        // A goal starts turns that nobody asked for; other agents would be threads that nobody reads.
        "features.goals=false",
        "features.multi_agent=false",
        // Questions with choices cannot be answered here; the agent asks in its text instead.
        "tools.experimental_request_user_input.enabled=false",
        // What a workspace holds is not instructions, and a user's text is not expanded.
        "project_doc_max_bytes=0",
        "skills.include_instructions=false",
        "skills.bundled.enabled=false",
    ]
    .map(str::to_owned)
    .to_vec();
    let workspace = toml(&path_text(&request.workspace)?);
    settings.push(format!(r#"projects={{{workspace}={{trust_level="untrusted"}}}}"#));
    let credentials = request.credentials;
    let hidden: Vec<String> = credentials
        .variables
        .keys()
        .filter(|name| KEYS.contains(&name.as_str()))
        .map(|name| toml(name))
        .collect();
    settings.push(format!("shell_environment_policy.exclude=[{}]", hidden.join(",")));
    if credentials.home.private {
        settings.push(r#"model_provider="roundhouse""#.to_owned());
        settings.push(format!("model_providers.roundhouse={{{}}}", provider(request)?));
    }
    let mut args = vec!["app-server".to_owned()];
    for setting in settings {
        args.extend(["-c".to_owned(), setting]);
    }
    Ok(args)
}

/// Our own description of the model's service: the built-in one cannot be given another address or other limits.
fn provider(request: &LaunchRequest<'_>) -> Result<String, PlanError> {
    let variables = &request.credentials.variables;
    let base = variables.get(BASE_URL).map_or(DEFAULT_BASE_URL, Secret::expose);
    if base.contains(|c: char| c.is_control() || c == ' ') || !base.starts_with("http") {
        return Err(PlanError::Configuration {
            message: format!("{BASE_URL} is not an address"),
            what_to_do: format!("Correct {BASE_URL} under [engines.codex]."),
        });
    }
    let limits = request.limits;
    let mut parts = vec![
        r#"name="roundhouse""#.to_owned(),
        format!("base_url={}", toml(base.trim_end_matches('/'))),
        r#"wire_api="responses""#.to_owned(),
        format!("request_max_retries={}", limits.max_retries),
        format!("stream_max_retries={}", limits.max_retries),
        format!("stream_idle_timeout_ms={}", limits.stream_idle_timeout.as_millis()),
    ];
    if let Some(key) = key_of(variables) {
        parts.push(format!("env_key={}", toml(key)));
    }
    Ok(parts.join(","))
}

fn environment(request: &LaunchRequest<'_>) -> Result<BTreeMap<String, Secret>, PlanError> {
    refuse_reserved(RESERVED, request.extra_variables)?;
    refuse_reserved(RESERVED, &request.credentials.variables)?;
    let mut env: BTreeMap<String, Secret> = BTreeMap::new();
    let mut set = |name: &str, value: String| {
        env.insert(name.to_owned(), Secret::new(value));
    };
    for (name, value) in request.extra_variables {
        set(name, value.clone());
    }
    set("HOME", path_text(&request.user_home)?);
    for (name, value) in &request.credentials.home.variables {
        set(name, value.clone());
    }
    set("PATH", request.path.clone());
    set("PWD", path_text(&request.workspace)?);
    set("TMPDIR", path_text(&request.temporary)?);
    for (name, value) in &request.credentials.variables {
        // The address is an argument; left in the environment it would only be read a second time.
        if name != BASE_URL {
            env.insert(name.clone(), value.clone());
        }
    }
    Ok(env)
}

/// A thread id is a UUID; that also keeps a name from starting a new thread in silence.
fn thread_id(id: &str) -> Result<(), PlanError> {
    match Uuid::try_parse(id) {
        Ok(uuid) if uuid.hyphenated().to_string() == id => Ok(()),
        _ => Err(PlanError::Configuration {
            message: format!("{:?} is not a thread id of codex", limit::prefix(id, 80)),
            what_to_do: "A codex thread id is a lower-case hyphenated UUID.".to_owned(),
        }),
    }
}

pub(super) fn sandbox_probe() -> SandboxProbe {
    SandboxProbe {
        args: ["sandbox", "-c", r#"sandbox_mode="workspace-write""#, "--", "/bin/true"]
            .map(str::to_owned)
            .to_vec(),
        timeout: Duration::from_secs(20),
        needed_for: &[Permissions::Ask, Permissions::AcceptEdits],
    }
}
