//! Engine CLIs: which version is pinned, where an executable is found, and how the pinned one is installed.

use std::{
    collections::BTreeMap,
    io::{BufRead as _, BufReader},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::{Mutex, PoisonError},
    time::{Duration, Instant, SystemTime},
};

use roundhouse_config::EngineSettings;
use roundhouse_engines::{Adapter, InstallPlan};
use serde_json::Value;

use crate::state_dir::make_dir;

/// The pinned versions: one file for tests and installs.
const PACKAGE: &str = include_str!("../../../tests/engines/package.json");

/// Their lock file, so that an install is the one that was tested.
const PACKAGE_LOCK: &str = include_str!("../../../tests/engines/package-lock.json");

/// Why an engine could not be installed.
#[derive(Debug, thiserror::Error)]
pub enum InstallError {
    /// No engine of this name.
    #[error("there is no engine {0}")]
    Unknown(String),
    /// It cannot be installed for the user.
    #[error("{engine} cannot be installed by this program: {what_to_do}")]
    Manual {
        /// The engine.
        engine: String,
        /// What to do instead.
        what_to_do: &'static str,
    },
    /// npm is missing.
    #[error("npm was not found; install Node.js, then try again")]
    NoNpm,
    /// The system refused.
    #[error("failed to {action}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// The system's answer.
        #[source]
        source: std::io::Error,
    },
    /// npm failed.
    #[error("npm ended with {status}: {output}")]
    Npm {
        /// How it ended.
        status: String,
        /// The last lines it printed.
        output: String,
    },
    /// npm did what it was told, and the executable is not there.
    #[error("npm installed no executable at {0}")]
    NoExecutable(PathBuf),
}

/// The version of an npm package that Roundhouse is tested with.
#[must_use]
pub fn pinned_version(package: &str) -> Option<String> {
    let parsed: Value = serde_json::from_str(PACKAGE).ok()?;
    ["dependencies", "devDependencies"]
        .iter()
        .find_map(|section| parsed.get(section)?.get(package)?.as_str().map(str::to_owned))
}

/// Where the pinned CLI of an engine lies or would lie; none for one that is not pinned.
#[must_use]
pub fn installed_path(adapter: &dyn Adapter, engines_dir: &Path) -> Option<PathBuf> {
    match adapter.install() {
        InstallPlan::Npm { package, executable } => {
            let version = pinned_version(package)?;
            Some(prefix(engines_dir, package, &version).join("node_modules/.bin").join(executable))
        }
        InstallPlan::None { .. } => None,
    }
}

fn prefix(engines_dir: &Path, package: &str, version: &str) -> PathBuf {
    engines_dir.join(package.replace('/', "__")).join(version)
}

/// Finds an engine's executable: the configured one, the installed pinned one, or one in `PATH`.
#[must_use]
pub fn find(adapter: &dyn Adapter, settings: &EngineSettings, engines_dir: &Path) -> Option<PathBuf> {
    if !settings.executable.as_os_str().is_empty() {
        return which::which(&settings.executable).ok();
    }
    installed_path(adapter, engines_dir)
        .filter(|path| path.is_file())
        .or_else(|| which::which(adapter.executable()).ok())
}

/// Installs the pinned CLI of an engine under `engines_dir` with npm, and answers its executable. What is installed
/// already is left alone. `progress` gets npm's lines. Blocking, minutes at most.
///
/// # Errors
/// [`InstallError`]; a half-made install is not taken for a whole one.
pub fn install_engine(
    name: &str,
    engines_dir: &Path,
    progress: &mut dyn FnMut(&str),
) -> Result<PathBuf, InstallError> {
    let adapter = roundhouse_engines::adapter(name).ok_or_else(|| InstallError::Unknown(name.to_owned()))?;
    let package = match adapter.install() {
        InstallPlan::Npm { package, .. } => package,
        InstallPlan::None { what_to_do } => {
            return Err(InstallError::Manual { engine: name.to_owned(), what_to_do });
        }
    };
    let version = pinned_version(package).ok_or_else(|| InstallError::Manual {
        engine: name.to_owned(),
        what_to_do: "its version is not pinned",
    })?;
    let executable =
        installed_path(adapter, engines_dir).ok_or_else(|| InstallError::Unknown(name.to_owned()))?;
    if executable.is_file() {
        progress(&format!("{package} {version} is installed"));
        return Ok(executable);
    }
    let npm = which::which("npm").map_err(|_| InstallError::NoNpm)?;
    let io = |action| move |source| InstallError::Io { action, source };
    let target = prefix(engines_dir, package, &version);
    // Made beside the target and renamed at the end: an install that was cut off is never found.
    let half = target.with_file_name(format!("{version}.half"));
    let _ = std::fs::remove_dir_all(&half);
    make_dir(&half).map_err(io("create the directory of the install"))?;
    let (manifest, lock) = only(package).ok_or_else(|| InstallError::Io {
        action: "read the embedded lock file",
        source: std::io::Error::from(std::io::ErrorKind::InvalidData),
    })?;
    std::fs::write(half.join("package.json"), manifest).map_err(io("write package.json"))?;
    std::fs::write(half.join("package-lock.json"), lock).map_err(io("write package-lock.json"))?;
    progress(&format!("installing {package} {version} with npm"));
    let mut child = Command::new(npm)
        .args(["ci", "--no-audit", "--no-fund", "--no-update-notifier", "--loglevel=http"])
        .current_dir(&half)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(io("start npm"))?;
    let mut last = std::collections::VecDeque::new();
    if let Some(stderr) = child.stderr.take() {
        for line in BufReader::new(stderr).lines().map_while(Result::ok) {
            // What npm warns of, such as a version of Node.js that the CLI's own executable does not need, is told only
            // when the install fails.
            if !line.starts_with("npm warn") {
                progress(&line);
            }
            last.push_back(line);
            if last.len() > 20 {
                last.pop_front();
            }
        }
    }
    let status = child.wait().map_err(io("await npm"))?;
    if !status.success() {
        let output = last.into_iter().collect::<Vec<_>>().join("\n");
        return Err(InstallError::Npm { status: status.to_string(), output });
    }
    let _ = std::fs::remove_dir_all(&target);
    std::fs::rename(&half, &target).map_err(io("put the install in its place"))?;
    if executable.is_file() { Ok(executable) } else { Err(InstallError::NoExecutable(executable)) }
}

/// Manifest and lock file with one of the pinned packages and what it needs: nobody downloads an engine that was not
/// asked for.
fn only(package: &str) -> Option<(String, String)> {
    let mut manifest: Value = serde_json::from_str(PACKAGE).ok()?;
    let mut lock: Value = serde_json::from_str(PACKAGE_LOCK).ok()?;
    keep_dependency(&mut manifest, package)?;
    let packages = lock.get_mut("packages")?.as_object_mut()?;
    keep_dependency(packages.get_mut("")?, package)?;
    let mut needed = vec![package.to_owned()];
    let mut next = 0;
    while let Some(name) = needed.get(next).cloned() {
        next += 1;
        for (key, entry) in packages.iter() {
            if package_of(key) != Some(&name) {
                continue;
            }
            for section in ["dependencies", "optionalDependencies", "peerDependencies"] {
                for dependency in entry.get(section).and_then(Value::as_object).into_iter().flatten() {
                    if !needed.contains(dependency.0) {
                        needed.push(dependency.0.clone());
                    }
                }
            }
        }
    }
    packages.retain(|key, _| package_of(key).is_none_or(|name| needed.iter().any(|known| known == name)));
    Some((serde_json::to_string_pretty(&manifest).ok()?, serde_json::to_string_pretty(&lock).ok()?))
}

fn keep_dependency(manifest: &mut Value, package: &str) -> Option<()> {
    let dependencies = manifest.get_mut("dependencies")?.as_object_mut()?;
    dependencies.retain(|name, _| name == package);
    (!dependencies.is_empty()).then_some(())
}

/// The name of the package that a key of a lock file is about; none for the root.
fn package_of(key: &str) -> Option<&str> {
    Some(key.rsplit_once("node_modules/")?.1)
}

/// Versions of executables, asked once per state of the file.
#[derive(Debug, Default)]
pub struct Versions {
    known: Mutex<BTreeMap<PathBuf, (SystemTime, Option<String>)>>,
}

impl Versions {
    /// The version that an executable reports; none when it does not in time. Blocking.
    #[must_use]
    pub fn of(&self, adapter: &dyn Adapter, executable: &Path) -> Option<String> {
        let changed = std::fs::metadata(executable).and_then(|metadata| metadata.modified()).ok()?;
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((at, version)) = known.get(executable)
            && *at == changed
        {
            return version.clone();
        }
        drop(known);
        let version = ask(adapter, executable);
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        known.insert(executable.to_owned(), (changed, version.clone()));
        version
    }
}

fn ask(adapter: &dyn Adapter, executable: &Path) -> Option<String> {
    let probe = adapter.version_probe();
    let temporary = std::env::temp_dir();
    let mut child = Command::new(executable)
        .args(probe.args)
        .env_clear()
        .env("PATH", crate::environment::path())
        .env("HOME", &temporary)
        .current_dir(&temporary)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .ok()?;
    let stdout = child.stdout.take()?;
    let (sender, receiver) = std::sync::mpsc::sync_channel(1);
    std::thread::Builder::new()
        .name("engine-version".to_owned())
        .spawn(move || {
            let mut text = String::new();
            use std::io::Read as _;
            let read = stdout.take(64 * 1024).read_to_string(&mut text);
            let _ = sender.send(read.map(|_| text));
        })
        .ok()?;
    let deadline = Instant::now() + probe.timeout.min(Duration::from_secs(20));
    let text = receiver.recv_timeout(deadline.saturating_duration_since(Instant::now()));
    let _ = child.kill();
    let _ = child.wait();
    adapter.parse_version(&text.ok()?.ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pinned_version_comes_from_the_one_file() {
        let version = pinned_version("@anthropic-ai/claude-code").unwrap();
        assert!(version.chars().next().unwrap().is_ascii_digit(), "{version}");
        assert!(PACKAGE_LOCK.contains(&version));
        assert_eq!(pinned_version("nothing"), None);
    }

    #[test]
    fn an_install_holds_the_engine_that_was_asked_for_alone() {
        let (manifest, lock) = only("@anthropic-ai/claude-code").unwrap();
        assert!(manifest.contains("claude-code") && !manifest.contains("codex"), "{manifest}");
        assert!(lock.contains("node_modules/@anthropic-ai/claude-code") && !lock.contains("codex"), "{lock}");
        assert!(lock.contains("claude-code-linux-x64"), "{lock}");
        assert!(only("nothing").is_none());
    }

    #[test]
    fn a_configured_executable_that_is_missing_is_not_replaced_by_another() {
        let directory = tempfile::tempdir().unwrap();
        let adapter = roundhouse_engines::adapter("claude-code").unwrap();
        let settings =
            EngineSettings { executable: directory.path().join("nothing"), ..EngineSettings::default() };
        assert_eq!(find(adapter, &settings, directory.path()), None);
        let installed = installed_path(adapter, directory.path()).unwrap();
        std::fs::create_dir_all(installed.parent().unwrap()).unwrap();
        std::fs::write(&installed, "").unwrap();
        assert_eq!(find(adapter, &EngineSettings::default(), directory.path()), Some(installed));
    }
}
