//! Plans: what the runner is to do on an engine's behalf, as data. Nothing here touches a disk or a process.

use std::{collections::BTreeMap, fmt::Debug, path::PathBuf, time::Duration};

use serde::{Deserialize, Serialize};

/// A value that must never be printed. Its `Debug` shows nothing of it.
#[derive(Clone, PartialEq, Eq, Default)]
pub struct Secret(String);

impl Secret {
    /// Wraps a value.
    #[must_use]
    pub fn new(value: impl Into<String>) -> Self {
        Self(value.into())
    }

    /// The value itself: for the process that needs it and for masking, never for display.
    #[must_use]
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// What an engine needs to find a session again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NativeRef {
    /// The engine's id of the session.
    pub id: String,
    /// Where its main file lies, relative to the engine's home; unset until it was found.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<String>,
}

/// How a process opens its session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OpenMode {
    /// Make the session.
    Start,
    /// Resume it.
    Resume,
}

/// What a turn may do without asking.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Permissions {
    /// Asks for everything that changes something.
    Ask,
    /// Edits files in the workspace without asking; asks for the rest.
    AcceptEdits,
    /// Asks for nothing.
    Bypass,
}

/// How hard a model thinks. Which levels there are is the engine's to say.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[expect(missing_docs, reason = "the names say it all")]
pub enum Effort {
    None,
    Minimal,
    Low,
    Medium,
    High,
    Xhigh,
    Max,
    Ultra,
}

impl Effort {
    /// Every level.
    pub const ALL: [Self; 8] =
        [Self::None, Self::Minimal, Self::Low, Self::Medium, Self::High, Self::Xhigh, Self::Max, Self::Ultra];

    /// The name in agent files and contracts.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Minimal => "minimal",
            Self::Low => "low",
            Self::Medium => "medium",
            Self::High => "high",
            Self::Xhigh => "xhigh",
            Self::Max => "max",
            Self::Ultra => "ultra",
        }
    }

    /// The level of this name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|level| level.name() == name)
    }
}

/// Which pinned CLI to install when the executable is missing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum InstallPlan {
    /// An npm package.
    Npm {
        /// The package's name. Its version is pinned in `tests/engines/package.json`.
        package: &'static str,
        /// The executable, relative to `node_modules/.bin`.
        executable: &'static str,
    },
    /// It cannot be installed for the user.
    None {
        /// What to do instead.
        what_to_do: &'static str,
    },
}

/// How to learn the version of an executable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VersionProbe {
    /// Arguments of a command that prints the version and exits.
    pub args: &'static [&'static str],
    /// How long it may take.
    pub timeout: Duration,
}

/// Whose login an engine uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Default)]
#[serde(rename_all = "lowercase")]
pub enum CredentialSource {
    /// None: whatever the configured base address accepts.
    None,
    /// The variables named in the configuration.
    #[default]
    Variables,
    /// The person's own login: the engine home is the person's own directory.
    Host,
}

/// What is known about credentials when a plan is made.
#[derive(Debug, Clone)]
pub struct CredentialRequest<'a> {
    /// Whose login.
    pub source: CredentialSource,
    /// The resolved variables of the identity: from the configuration, its env file and the workspace's
    /// `.roundhouse/.env`.
    pub variables: &'a BTreeMap<String, Secret>,
    /// The person's own home directory and, if set in the runner's environment, the engine's own directory
    /// variable; needed for `host`.
    pub host: Option<HostDirectories>,
    /// The private engine home; used unless the source is `host`.
    pub private_home: PathBuf,
}

/// Where a person's own engine files lie.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostDirectories {
    /// The person's home directory.
    pub home: PathBuf,
    /// The engine's own directory variable (for Claude Code `CLAUDE_CONFIG_DIR`), if the person sets it.
    pub engine_directory: Option<PathBuf>,
}

/// How an engine gets its credentials.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CredentialPlan {
    /// Variables for the engine's environment. Tools of the engine see them.
    pub variables: BTreeMap<String, Secret>,
    /// Payloads handed over by a pipe, so that no tool's environment shows them.
    pub pipes: Vec<PipePayload>,
    /// The engine's home.
    pub home: EngineHome,
    /// Every value that must be masked in the spool, in logs and events.
    pub secrets: Vec<Secret>,
    /// Which login this is, for `up` and `doctor`: `API key (ANTHROPIC_API_KEY)`.
    pub login: String,
}

/// The directory that holds an engine's configuration and sessions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineHome {
    /// The directory the engine's session files lie under.
    pub directory: PathBuf,
    /// Whether it is the runner's to write: false for a person's own directory.
    pub private: bool,
    /// Variables that point the engine at it.
    pub variables: BTreeMap<String, String>,
}

/// Bytes for the engine through an inherited pipe: the runner makes the pipe, writes the bytes, closes its end,
/// and sets the variable to the number of the engine's end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PipePayload {
    /// The variable that gets the descriptor's number.
    pub variable: String,
    /// The bytes. Less than a pipe's buffer (64 KiB).
    pub bytes: Secret,
}

/// What to put into a fresh engine home before the first start.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ConfigurationPlan {
    /// Directories to make, mode 0700, relative to the home.
    pub directories: Vec<String>,
    /// Files to write unless they exist, mode 0600, relative to the home.
    pub files: Vec<(String, String)>,
}

/// Bounds that an engine itself is to keep. All configurable.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineLimits {
    /// How often the engine may try a failed request again.
    pub max_retries: u32,
    /// How long one request may take to answer.
    pub request_timeout: Duration,
    /// How long a stream may bring no byte before the engine gives it up.
    pub stream_idle_timeout: Duration,
    /// How many rounds with tools one message may take; unset is no limit.
    pub max_turns: Option<u32>,
}

impl Default for EngineLimits {
    /// Four retries (about 8 s of waiting between them), 180 s for an answer, 90 s without a byte.
    fn default() -> Self {
        Self {
            max_retries: 4,
            request_timeout: Duration::from_secs(180),
            stream_idle_timeout: Duration::from_secs(90),
            max_turns: None,
        }
    }
}

/// All that a launch depends on.
#[derive(Debug, Clone)]
pub struct LaunchRequest<'a> {
    /// The engine's executable.
    pub executable: PathBuf,
    /// The workspace: canonical, absolute.
    pub workspace: PathBuf,
    /// A directory of this process alone, for its temporary files.
    pub temporary: PathBuf,
    /// The value of `HOME`. Ignored for a person's own login, where it is the person's.
    pub user_home: PathBuf,
    /// The value of `PATH`.
    pub path: String,
    /// How the session is opened.
    pub open: OpenMode,
    /// The session.
    pub native: &'a NativeRef,
    /// The model.
    pub model: &'a str,
    /// The effort; unset takes the model's default.
    pub effort: Option<Effort>,
    /// What the turn may do without asking.
    pub permissions: Permissions,
    /// The agent's prompt, given in full every time.
    pub prompt: &'a str,
    /// Whether the engine will run as root.
    pub root: bool,
    /// The credentials.
    pub credentials: &'a CredentialPlan,
    /// Other variables for the engine: locale, time zone, terminal, what the configuration adds.
    pub extra_variables: &'a BTreeMap<String, String>,
    /// Bounds.
    pub limits: &'a EngineLimits,
}

/// How to start an engine. The environment is complete: nothing is inherited.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LaunchPlan {
    /// The executable.
    pub program: PathBuf,
    /// Its arguments, without the program's name.
    pub args: Vec<String>,
    /// Its whole environment.
    pub env: BTreeMap<String, Secret>,
    /// Its working directory.
    pub cwd: PathBuf,
    /// Payloads through inherited pipes.
    pub pipes: Vec<PipePayload>,
    /// Values to mask.
    pub secrets: Vec<Secret>,
    /// What the process must be told when it opens its session, for an engine that takes it over its own protocol:
    /// put it into [`Carry::setup`](crate::Carry::setup). Holds no secret.
    pub setup: Option<serde_json::Value>,
}

/// How to learn whether an engine's own sandbox can run here. With the launch plan's environment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SandboxProbe {
    /// Arguments of a command that runs `true` in the sandbox.
    pub args: Vec<String>,
    /// How long it may take.
    pub timeout: Duration,
    /// The modes that need the sandbox; the others work without.
    pub needed_for: &'static [Permissions],
}

impl SandboxProbe {
    /// Reads the probe's end: an error to refuse those modes with, or nothing.
    #[must_use]
    pub fn read(&self, engine: &str, exit: crate::frame::Exit, stderr: &str) -> Option<PlanError> {
        (exit.code != Some(0)).then(|| PlanError::no_sandbox(engine, stderr))
    }
}

/// Why a plan cannot be made.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// A setting is wrong or missing. CONFIGURATION.
    #[error("{message}")]
    Configuration {
        /// What is wrong, for a person.
        message: String,
        /// What to do about it.
        what_to_do: String,
    },
    /// The engine is not logged in. AUTH.
    #[error("{message}")]
    Auth {
        /// What is missing.
        message: String,
        /// What to do about it.
        what_to_do: String,
    },
    /// The engine cannot do it. UNSUPPORTED.
    #[error("{message}")]
    Unsupported {
        /// What it cannot do.
        message: String,
    },
}

impl PlanError {
    /// The engine's sandbox cannot run here.
    pub(crate) fn no_sandbox(engine: &str, said: &str) -> Self {
        let said = said.trim();
        let said = if said.is_empty() { "it said nothing" } else { crate::limit::prefix(said, 500) };
        Self::Configuration {
            message: format!("the sandbox of {engine} cannot run on this host: {said}"),
            what_to_do:
                "Allow unprivileged user namespaces to the runner (in a container: its security options), or \
                         use permissions bypass where the container itself is the boundary."
                    .to_owned(),
        }
    }

    /// The failure to report.
    #[must_use]
    pub fn to_failure(&self) -> crate::failure::Failure {
        use crate::failure::{Failure, Reason};
        match self {
            Self::Configuration { message, what_to_do } => {
                Failure { what_to_do: what_to_do.clone(), ..Failure::new(Reason::Configuration, message) }
            }
            Self::Auth { message, what_to_do } => {
                Failure { what_to_do: what_to_do.clone(), ..Failure::new(Reason::Auth, message) }
            }
            Self::Unsupported { message } => Failure::new(Reason::Unsupported, message),
        }
    }
}
