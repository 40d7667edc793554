//! What can be configured, with defaults, units and limits.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use etcetera::BaseStrategy as _;
use jiff::fmt::serde::unsigned_duration::friendly::compact::required as friendly;
use serde::{Deserialize, Serialize};

/// Everything that can be configured. Durations are written like `10m`, `90s`, `1h 30m`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// The control plane.
    pub control_plane: ControlPlane,
    /// The engine runner.
    pub runner: Runner,
    /// Settings per engine, by its name, such as `claude-code`.
    pub engines: BTreeMap<String, EngineSettings>,
    /// The command line.
    pub client: Client,
}

/// Settings of the control plane.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ControlPlane {
    /// Address and port of the gRPC server. Port 0 takes a free one.
    pub listen: String,
    /// Directory of the database.
    pub state_dir: PathBuf,
    /// Listen on an address other than loopback without TLS and a token. Anybody who reaches it can run agents.
    pub insecure_listen: bool,
    /// Silence after which a runner's open turns end LOST.
    #[serde(with = "friendly")]
    pub runner_lost_after: Duration,
    /// How often a runner tells that it lives.
    #[serde(with = "friendly")]
    pub heartbeat_interval: Duration,
    /// How long a dispatched turn waits for a runner that is away, or for an agent file that cannot be read.
    #[serde(with = "friendly")]
    pub runner_away_timeout: Duration,
    /// Messages that may wait in one conversation.
    pub max_waiting_messages: u32,
    /// Characters (Unicode scalars) of shared history given to a new session.
    pub context_budget: u32,
    /// How long an ended turn's events are kept. Messages, turns and sessions are kept for good.
    #[serde(with = "friendly")]
    pub event_retention: Duration,
    /// Time for open calls to finish when the server stops.
    #[serde(with = "friendly")]
    pub shutdown_timeout: Duration,
}

impl Default for ControlPlane {
    fn default() -> Self {
        Self {
            listen: "127.0.0.1:7450".to_owned(),
            state_dir: default_state_dir().join("control-plane"),
            insecure_listen: false,
            runner_lost_after: Duration::from_secs(120),
            heartbeat_interval: Duration::from_secs(5),
            runner_away_timeout: Duration::from_secs(60),
            max_waiting_messages: 100,
            context_budget: 120_000,
            event_retention: Duration::from_secs(90 * 24 * 3600),
            shutdown_timeout: Duration::from_secs(5),
        }
    }
}

/// Settings of an engine runner.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Runner {
    /// Address and port of the gRPC server. Port 0 takes a free one.
    pub listen: String,
    /// Directory of sessions, spools, journals, engine homes and installed engines.
    pub state_dir: PathBuf,
    /// Listen on an address other than loopback without TLS and a token. Anybody who reaches it can run agents.
    pub insecure_listen: bool,
    /// Directories that workspaces may lie in. None: no turn can run.
    pub roots: Vec<Root>,
    /// URI of the control plane to register with. Empty: none, the runner serves whoever calls it.
    pub control_plane: String,
    /// URI at which the control plane reaches this runner. Empty: made from `listen`.
    pub advertise: String,
    /// Allow agents with `permissions: bypass`.
    pub allow_bypass: bool,
    /// Warm engine processes kept at most; the least recently used idle one is ended first.
    pub max_warm_engines: u32,
    /// Idle time after which a warm engine is ended. Its session is resumed by the next turn.
    #[serde(with = "friendly")]
    pub warm_ttl: Duration,
    /// Silence of an engine after which its turn ends IDLE_TIMEOUT.
    #[serde(with = "friendly")]
    pub idle_timeout: Duration,
    /// Time from a turn's opening after which it ends DEADLINE. Zero: none.
    #[serde(with = "friendly")]
    pub deadline: Duration,
    /// Silence after which a notice is given.
    #[serde(with = "friendly")]
    pub silence_warning: Duration,
    /// Time that an engine has to become quiet after it has finished.
    #[serde(with = "friendly")]
    pub settle_timeout: Duration,
    /// Time that an engine has to prove its opening.
    #[serde(with = "friendly")]
    pub engine_start_timeout: Duration,
    /// Time that a permission request waits before it is denied.
    #[serde(with = "friendly")]
    pub permission_timeout: Duration,
    /// Time that an engine's own interrupt has before SIGTERM.
    #[serde(with = "friendly")]
    pub cancel_interrupt_grace: Duration,
    /// Time that SIGTERM has before SIGKILL of everything the engine started.
    #[serde(with = "friendly")]
    pub cancel_term_grace: Duration,
    /// Time that running turns have when the runner is the main process of a container and stops.
    #[serde(with = "friendly")]
    pub drain_timeout: Duration,
    /// Time that a turn whose session proved unusable waits for a replacement.
    #[serde(with = "friendly")]
    pub unusable_wait: Duration,
    /// Time that a keeper has to answer a request.
    #[serde(with = "friendly")]
    pub keeper_timeout: Duration,
    /// Longest line of engine output that is read, in bytes. A longer one fails the turn.
    pub max_line_bytes: u64,
    /// Unacknowledged spool of one session, in bytes. Above it the turn fails with STORAGE.
    pub spool_limit_bytes: u64,
    /// How long acknowledged spools are kept.
    #[serde(with = "friendly")]
    pub spool_keep: Duration,
    /// Acknowledged spools kept in all, in bytes.
    pub spool_keep_bytes: u64,
    /// Cancel running turns when the runner is told to stop, rather than leaving them to their keepers.
    pub stop_turns: bool,
}

impl Default for Runner {
    fn default() -> Self {
        Self {
            listen: "127.0.0.1:7460".to_owned(),
            state_dir: default_state_dir().join("runner"),
            insecure_listen: false,
            roots: Vec::new(),
            control_plane: String::new(),
            advertise: String::new(),
            allow_bypass: false,
            max_warm_engines: 8,
            warm_ttl: Duration::from_secs(15 * 60),
            idle_timeout: Duration::from_secs(10 * 60),
            deadline: Duration::ZERO,
            silence_warning: Duration::from_secs(60),
            settle_timeout: Duration::from_secs(60),
            engine_start_timeout: Duration::from_secs(60),
            permission_timeout: Duration::from_secs(10 * 60),
            cancel_interrupt_grace: Duration::from_secs(2),
            cancel_term_grace: Duration::from_secs(5),
            drain_timeout: Duration::from_secs(20),
            unusable_wait: Duration::from_secs(60),
            keeper_timeout: Duration::from_secs(10),
            max_line_bytes: 16 * 1024 * 1024,
            spool_limit_bytes: 512 * 1024 * 1024,
            spool_keep: Duration::from_secs(7 * 24 * 3600),
            spool_keep_bytes: 2 * 1024 * 1024 * 1024,
            stop_turns: false,
        }
    }
}

impl Runner {
    /// The deadline of a turn that names none itself. None: it may take as long as it does.
    #[must_use]
    pub fn turn_deadline(&self) -> Option<Duration> {
        Some(self.deadline).filter(|deadline| !deadline.is_zero())
    }
}

/// A directory that workspaces may lie in.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Root {
    /// Absolute path.
    pub path: PathBuf,
    /// Whether what lies in its workspaces may configure engines. False: workspaces are treated as hostile.
    #[serde(default)]
    pub trust: bool,
}

/// Where an engine's login comes from.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Credentials {
    /// Nothing is given to the engine.
    None,
    /// The configured `variables` and `env_file`.
    #[default]
    Variables,
    /// The person's own engine directory is the engine home, and is never written to by configuration.
    Host,
}

/// Settings of one engine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct EngineSettings {
    /// The executable. Empty: the installed pinned one, else the one found in PATH.
    pub executable: PathBuf,
    /// Where the login comes from.
    pub credentials: Credentials,
    /// Variables for the engine, such as `ANTHROPIC_API_KEY`. Keys that an engine can take by a pipe go that way.
    pub variables: BTreeMap<String, String>,
    /// A file with further variables, `NAME=value` a line, mode 0600. Empty: none.
    pub env_file: PathBuf,
    /// Name of the credential set; each has an engine home of its own.
    pub identity: String,
}

impl Default for EngineSettings {
    fn default() -> Self {
        Self {
            executable: PathBuf::new(),
            credentials: Credentials::default(),
            variables: BTreeMap::new(),
            env_file: PathBuf::new(),
            identity: "default".to_owned(),
        }
    }
}

/// Settings of the command line.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Client {
    /// URI of the control plane.
    pub server: String,
    /// A file that holds the token to send, in its first line, mode 0600. Empty: none is sent.
    pub token_file: PathBuf,
    /// Further control planes, by the name that `--profile` takes.
    pub profiles: BTreeMap<String, Profile>,
}

impl Default for Client {
    fn default() -> Self {
        Self {
            server: "http://127.0.0.1:7450".to_owned(),
            token_file: PathBuf::new(),
            profiles: BTreeMap::new(),
        }
    }
}

/// One more control plane, with what it takes to speak to it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Profile {
    /// URI of the control plane. Empty: that of `client.server`.
    pub server: String,
    /// A file that holds the token to send, in its first line, mode 0600. Empty: none is sent.
    pub token_file: PathBuf,
}

/// `$XDG_STATE_HOME/roundhouse`, or what stands for it. Falls back to a directory under the working one where no home
/// can be determined, so that a service in a bare container still starts.
#[must_use]
pub fn default_state_dir() -> PathBuf {
    etcetera::base_strategy::Xdg::new()
        .ok()
        .and_then(|xdg| xdg.state_dir())
        .unwrap_or_else(|| PathBuf::from(".roundhouse-state"))
        .join("roundhouse")
}
