//! What a runner of this host would have, found without one: for a person who looks for what is missing.

use std::{
    io::Read as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::mpsc,
};

use roundhouse_config::{Config, Credentials};
use roundhouse_engines::{ADAPTERS, Adapter, Exit, InstallPlan};

use crate::{environment, install, launch};

/// What is found of one engine.
#[derive(Debug, Clone)]
pub struct EngineFacts {
    /// Its name.
    pub name: &'static str,
    /// Its executable. None: it is not here.
    pub executable: Option<PathBuf>,
    /// The version that the executable tells. None: it tells none.
    pub version: Option<String>,
    /// The version that Roundhouse is tested with. None: none is pinned.
    pub pinned: Option<String>,
    /// Whether a login is configured.
    pub has_login: bool,
    /// Which one, in words; why not, else. Holds no secret.
    pub login: String,
    /// Where the login is configured to come from.
    pub credentials: Credentials,
    /// Whether the engine's own sandbox runs here. None: it has none, or could not be asked.
    pub sandbox: Option<Result<(), String>>,
}

/// The isolation that a runner reaches here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IsolationFacts {
    /// Its name in the contract, such as PID_NAMESPACE.
    pub level: String,
    /// Whether it is the best there is.
    pub best: bool,
    /// Why it is not more. Empty at the best.
    pub detail: String,
}

/// The engines as a runner with this configuration finds them. Blocking, seconds at most for each.
#[must_use]
pub fn engine_facts(config: &Config) -> Vec<EngineFacts> {
    let engines_dir = config.runner.state_dir.join("engines");
    ADAPTERS.iter().map(|adapter| facts(*adapter, config, &engines_dir)).collect()
}

/// The names of the engines whose CLI is pinned, so that it can be installed.
#[must_use]
pub fn pinned_engines() -> Vec<&'static str> {
    ADAPTERS.iter().filter(|adapter| pinned(**adapter).is_some()).map(|adapter| adapter.name()).collect()
}

/// What this host gives, by doing it. The caller's `main` must have called [`roundhouse_process::reexec`]. Blocking,
/// some milliseconds, at most 10 s.
#[must_use]
pub fn isolation_facts() -> IsolationFacts {
    match roundhouse_process::probe(None) {
        Ok(report) => IsolationFacts {
            best: report.level == roundhouse_process::IsolationLevel::PidNamespace,
            level: report.level.to_string(),
            detail: report.detail,
        },
        Err(error) => IsolationFacts {
            level: roundhouse_process::IsolationLevel::None.to_string(),
            best: false,
            detail: crate::error::chain(&error),
        },
    }
}

fn pinned(adapter: &dyn Adapter) -> Option<String> {
    match adapter.install() {
        InstallPlan::Npm { package, .. } => install::pinned_version(package),
        InstallPlan::None { .. } => None,
    }
}

fn facts(adapter: &dyn Adapter, config: &Config, engines_dir: &Path) -> EngineFacts {
    let settings = config.engines.get(adapter.name()).cloned().unwrap_or_default();
    let executable = install::find(adapter, &settings, engines_dir);
    let login = launch::login_of(adapter, &settings);
    EngineFacts {
        name: adapter.name(),
        version: executable.as_deref().and_then(|path| install::Versions::default().of(adapter, path)),
        pinned: pinned(adapter),
        has_login: login.is_ok() && settings.credentials != Credentials::None,
        login: login.unwrap_or_else(|error| error.to_string()),
        credentials: settings.credentials,
        sandbox: executable.as_deref().and_then(|path| sandbox(adapter, path)),
        executable,
    }
}

/// Runs the engine's own probe of its sandbox, in a directory that is thrown away.
fn sandbox(adapter: &dyn Adapter, executable: &Path) -> Option<Result<(), String>> {
    let probe = adapter.sandbox_probe()?;
    let place = std::env::temp_dir().join(format!("roundhouse-probe-{}", uuid::Uuid::now_v7().simple()));
    std::fs::create_dir(&place).ok()?;
    let started = Command::new(executable)
        .args(&probe.args)
        .env_clear()
        .env("PATH", environment::path())
        .env("HOME", &place)
        .current_dir(&place)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn();
    let answer = started.ok().and_then(|mut child| {
        let mut stderr = child.stderr.take()?;
        let (sender, receiver) = mpsc::sync_channel(1);
        let reader = std::thread::Builder::new().name("engine-sandbox".to_owned()).spawn(move || {
            let mut text = Vec::new();
            let _ = stderr.by_ref().take(64 * 1024).read_to_end(&mut text);
            let _ = sender.send(String::from_utf8_lossy(&text).into_owned());
        });
        let told = reader.ok().and_then(|_| receiver.recv_timeout(probe.timeout).ok());
        let late = told.is_none();
        if late {
            let _ = child.kill();
        }
        let code = child.wait().ok()?.code();
        if late {
            return Some(Err("its probe did not end in time".to_owned()));
        }
        let exit = Exit { code, signal: None };
        Some(match probe.read(adapter.name(), exit, &told.unwrap_or_default()) {
            None => Ok(()),
            Some(error) => Err(error.to_string()),
        })
    });
    let _ = std::fs::remove_dir_all(&place);
    answer
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_told_without_a_runner_and_a_key_is_never_shown() {
        let dir = tempfile::tempdir().unwrap();
        let mut config = Config::default();
        config.runner.state_dir = dir.path().to_owned();
        let mut settings = roundhouse_config::EngineSettings {
            executable: dir.path().join("nothing-here"),
            ..roundhouse_config::EngineSettings::default()
        };
        config.engines.insert("claude-code".to_owned(), settings.clone());
        let claude = |config: &Config| {
            engine_facts(config).into_iter().find(|engine| engine.name == "claude-code").unwrap()
        };
        let found = claude(&config);
        assert_eq!((found.executable, found.version, found.has_login), (None, None, false));
        assert!(found.pinned.is_some());
        settings.variables.insert("ANTHROPIC_API_KEY".to_owned(), "sk-not-to-be-seen".to_owned());
        config.engines.insert("claude-code".to_owned(), settings);
        let found = claude(&config);
        assert!(found.has_login && !format!("{found:?}").contains("not-to-be-seen"), "{found:?}");
    }
}
