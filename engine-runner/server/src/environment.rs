//! What an engine's environment is made of, from nothing: the configured variables of its identity, their file, and,
//! in a trusted root only, the workspace's own `.roundhouse/.env`.

use std::{
    collections::BTreeMap,
    io::Read as _,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use roundhouse_config::EngineSettings;
use roundhouse_engines::{HostDirectories, PlanError, Secret};

use crate::workspace::{Workspace, open_regular};

/// The largest file of variables, in bytes.
const FILE_BYTES: u64 = 1024 * 1024;

/// Names that no file of a workspace may set, and beginnings of such names: they decide what is run.
const FORBIDDEN: [&str; 8] = ["PATH", "HOME", "SHELL", "BASH_ENV", "ENV", "IFS", "TMPDIR", "NODE_OPTIONS"];
const FORBIDDEN_PREFIXES: [&str; 4] = ["ROUNDHOUSE_", "LD_", "DYLD_", "GIT_"];

fn configuration(message: String, what_to_do: &str) -> PlanError {
    PlanError::Configuration { message, what_to_do: what_to_do.to_owned() }
}

fn valid_name(name: &str) -> bool {
    !name.is_empty()
        && !name.starts_with(|first: char| first.is_ascii_digit())
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
}

/// Reads `NAME=value` lines; `#` begins a comment line, `export ` is passed over, one pair of quotes is taken off.
/// The values are never part of an error.
fn parse(text: &str, file: &Path) -> Result<BTreeMap<String, Secret>, PlanError> {
    let mut variables = BTreeMap::new();
    for (index, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let line = line.strip_prefix("export ").unwrap_or(line);
        let wrong = || {
            configuration(
                format!("{} line {}: not NAME=value", file.display(), index + 1),
                "Correct the line or remove it.",
            )
        };
        let (name, value) = line.split_once('=').ok_or_else(wrong)?;
        let name = name.trim_end();
        if !valid_name(name) {
            return Err(wrong());
        }
        let value = value.trim();
        let unquoted = ['"', '\''].iter().find_map(|quote| {
            value.strip_prefix(*quote).and_then(|rest| rest.strip_suffix(*quote)).filter(|_| value.len() > 1)
        });
        let value = unquoted.unwrap_or(value);
        if value.contains('\0') {
            return Err(wrong());
        }
        variables.insert(name.to_owned(), Secret::new(value));
    }
    Ok(variables)
}

fn read(path: &Path) -> Result<String, PlanError> {
    let failed = |message: String| {
        configuration(
            format!("{}: {message}", path.display()),
            "Correct the file, or its name in the configuration.",
        )
    };
    let file = open_regular(path).map_err(|error| failed(error.to_string()))?;
    let mut text = String::new();
    file.take(FILE_BYTES + 1).read_to_string(&mut text).map_err(|error| failed(error.to_string()))?;
    if text.len() as u64 > FILE_BYTES {
        return Err(failed(format!("is larger than {FILE_BYTES} bytes")));
    }
    Ok(text)
}

/// The resolved variables of an engine in a workspace. Blocking.
///
/// # Errors
/// [`PlanError::Configuration`] for a file that is missing, readable by others, or malformed.
pub(crate) fn variables(
    settings: &EngineSettings,
    workspace: &Workspace,
) -> Result<BTreeMap<String, Secret>, PlanError> {
    let mut variables = BTreeMap::new();
    let own = workspace.path.join(".roundhouse/.env");
    if workspace.trusted {
        // `.roundhouse` itself may be a link that leads out of the workspace.
        let inside = own.canonicalize().is_ok_and(|path| path.starts_with(&workspace.path));
        if inside {
            for (name, value) in parse(&read(&own)?, &own)? {
                let forbidden = FORBIDDEN.contains(&name.as_str())
                    || FORBIDDEN_PREFIXES.iter().any(|prefix| name.starts_with(prefix));
                if forbidden {
                    return Err(configuration(
                        format!("{}: {name} cannot be set by a workspace", own.display()),
                        "Remove the line.",
                    ));
                }
                variables.insert(name, value);
            }
        }
    } else if own.symlink_metadata().is_ok() {
        tracing::info!(
            workspace = %workspace.path.display(),
            "the workspace's .roundhouse/.env is not read: its root is not trusted"
        );
    }
    if !settings.env_file.as_os_str().is_empty() {
        let mode = std::fs::metadata(&settings.env_file).map(|metadata| metadata.mode()).unwrap_or(0);
        if mode & 0o077 != 0 {
            return Err(configuration(
                format!("{} can be read by others", settings.env_file.display()),
                "Give it the mode 0600.",
            ));
        }
        variables.extend(parse(&read(&settings.env_file)?, &settings.env_file)?);
    }
    for (name, value) in &settings.variables {
        if !valid_name(name) || value.contains('\0') {
            return Err(configuration(
                format!("engines variables: {name:?} cannot be a variable"),
                "Use letters, digits and _, not beginning with a digit.",
            ));
        }
        variables.insert(name.clone(), Secret::new(value.clone()));
    }
    Ok(variables)
}

/// Where the person's own engine files lie, from the runner's own environment.
#[must_use]
pub(crate) fn host_directories(engine: &str) -> Option<HostDirectories> {
    let home = std::env::home_dir()?;
    let variable = match engine {
        "claude-code" => "CLAUDE_CONFIG_DIR",
        "codex" => "CODEX_HOME",
        _ => return Some(HostDirectories { home, engine_directory: None }),
    };
    Some(HostDirectories { home, engine_directory: std::env::var_os(variable).map(PathBuf::from) })
}

/// Harmless variables that every engine gets: language, time zone.
#[must_use]
pub(crate) fn extra_variables() -> BTreeMap<String, String> {
    let mut variables: BTreeMap<String, String> = ["LANG", "LC_ALL", "LC_CTYPE", "TZ"]
        .into_iter()
        .filter_map(|name| Some((name.to_owned(), std::env::var(name).ok()?)))
        .collect();
    if !variables.contains_key("LANG") && !variables.contains_key("LC_ALL") {
        variables.insert("LANG".to_owned(), "C.UTF-8".to_owned());
    }
    variables
}

/// `PATH` for engines: the runner's own.
#[must_use]
pub(crate) fn path() -> String {
    std::env::var("PATH")
        .unwrap_or_else(|_| "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin".to_owned())
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::PermissionsExt as _};

    use super::*;

    fn workspace(path: &Path, trusted: bool) -> Workspace {
        Workspace { id: "wsp_1".into(), path: path.canonicalize().unwrap(), trusted }
    }

    fn shown(variables: &BTreeMap<String, Secret>) -> Vec<(&str, &str)> {
        variables.iter().map(|(name, value)| (name.as_str(), value.expose())).collect()
    }

    #[test]
    fn a_workspace_sets_variables_only_in_a_trusted_root() {
        let directory = tempfile::tempdir().unwrap();
        fs::create_dir(directory.path().join(".roundhouse")).unwrap();
        let file = directory.path().join(".roundhouse/.env");
        fs::write(&file, "# c\nexport A=1\nB=\"x y\"\nC='\n").unwrap();
        let settings = EngineSettings {
            variables: [("A".to_owned(), "configured".to_owned())].into(),
            ..EngineSettings::default()
        };
        let trusted = variables(&settings, &workspace(directory.path(), true)).unwrap();
        assert_eq!(shown(&trusted), [("A", "configured"), ("B", "x y"), ("C", "'")]);
        let hostile = variables(&settings, &workspace(directory.path(), false)).unwrap();
        assert_eq!(shown(&hostile), [("A", "configured")]);
        for bad in ["LD_PRELOAD=x", "PATH=/x", "ROUNDHOUSE_KEEPER=x"] {
            fs::write(&file, bad).unwrap();
            assert!(variables(&settings, &workspace(directory.path(), true)).is_err(), "{bad}");
        }
    }

    #[test]
    fn errors_name_the_line_and_never_the_value() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("env");
        fs::write(&file, "A=1\nthe secret itself\n").unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
        let settings = EngineSettings { env_file: file.clone(), ..EngineSettings::default() };
        let error = variables(&settings, &workspace(directory.path(), false)).unwrap_err().to_string();
        assert!(error.contains("line 2") && !error.contains("secret"), "{error}");
        fs::set_permissions(&file, fs::Permissions::from_mode(0o644)).unwrap();
        let error = variables(&settings, &workspace(directory.path(), false)).unwrap_err().to_string();
        assert!(error.contains("read by others"), "{error}");
    }
}
