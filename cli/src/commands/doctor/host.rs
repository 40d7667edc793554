//! What this host has: programs, engines, isolation, directories, ports, the workspace. Asks no server.

use std::net::{SocketAddr, TcpListener};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use roundhouse_config::{Config, Credentials};
use roundhouse_engine_runner::{EngineFacts, IsolationFacts, engine_facts, isolation_facts};

use super::Checks;

const PROBE_TIMEOUT: Duration = Duration::from_secs(5);
/// The oldest Node.js whose npm installs the pinned CLIs.
const NODE_MAJOR: u32 = 20;
/// Below this there is soon no room for a turn.
const LITTLE_ROOM: u64 = 1024 * 1024 * 1024;
/// Below this turns fail.
const NO_ROOM: u64 = 100 * 1024 * 1024;
/// Types of file systems that are gone with the next start of the host, by their magic numbers.
const TEMPORARY: [(i64, &str); 2] = [(0x0102_1994, "tmpfs"), (0x8584_58f6, "ramfs")];

/// The programs that a host with workspaces should have.
pub(super) async fn programs(checks: &mut Checks) {
    match first_line_of("git").await {
        Some(version) => checks.ok("git", version),
        None => checks.warn(
            "git",
            "not found: turns tell no branch, commits and changed files",
            "install git (Debian: apt-get install git)",
        ),
    }
    let advice = format!("install Node.js {NODE_MAJOR} or later with npm, for `roundhouse engines install`");
    match first_line_of("node").await {
        Some(version) if major(&version).is_some_and(|major| major >= NODE_MAJOR) => {
            checks.ok("node", version)
        }
        Some(version) => checks.warn("node", format!("{version} is too old"), &advice),
        None => checks.warn("node", "not found", &advice),
    }
    match first_line_of("npm").await {
        Some(version) => checks.ok("npm", version),
        None => checks.warn("npm", "not found", &advice),
    }
}

fn major(version: &str) -> Option<u32> {
    version.trim_start_matches('v').split('.').next()?.parse().ok()
}

async fn first_line_of(program: &str) -> Option<String> {
    let mut command = tokio::process::Command::new(program);
    command.arg("--version").stdin(Stdio::null()).kill_on_drop(true);
    let answer = tokio::time::timeout(PROBE_TIMEOUT, command.output()).await.ok()?.ok()?;
    let text = String::from_utf8_lossy(&answer.stdout);
    text.lines().next().filter(|_| answer.status.success()).map(str::to_owned)
}

/// The engines, their versions and logins, and what holds them together.
pub(super) async fn engines(config: &Config, checks: &mut Checks) {
    let asked = config.clone();
    let found = tokio::task::spawn_blocking(move || (engine_facts(&asked), isolation_facts())).await;
    let Ok((engines, isolation)) = found else {
        return checks.fail("engines", "they could not be looked for", "run it again");
    };
    if engines.iter().all(|engine| engine.executable.is_none()) {
        checks.fail("engines", "none is installed here", "roundhouse engines install");
    }
    for found in &engines {
        engine(found, checks);
    }
    self::isolation(&isolation, checks);
}

fn engine(found: &EngineFacts, checks: &mut Checks) {
    let name = found.name;
    let label = format!("engine {name}");
    let Some(executable) = &found.executable else {
        return checks.warn(label, "not installed here", &format!("roundhouse engines install {name}"));
    };
    let pinned = found.pinned.as_deref().unwrap_or_default();
    match found.version.as_deref() {
        None => checks.fail(
            label,
            format!("{} does not tell its version", executable.display()),
            &format!("roundhouse engines install {name}"),
        ),
        Some(version) if pinned.is_empty() || version == pinned => {
            checks.ok(label, format!("{version}, {}", executable.display()));
        }
        Some(version) => checks.warn(
            label,
            format!("{version}, {}; tested with {pinned}", executable.display()),
            &format!(
                "roundhouse engines install {name}, and take engines.{name}.executable out if it is set"
            ),
        ),
    }
    let label = format!("login {name}");
    if found.has_login {
        checks.ok(label, found.login.clone());
    } else {
        checks.warn(label, found.login.clone(), &login_advice(name, found.credentials));
    }
    match &found.sandbox {
        None => {}
        Some(Ok(())) => checks.ok(format!("sandbox {name}"), "runs"),
        Some(Err(why)) => checks.warn(
            format!("sandbox {name}"),
            format!("does not run, so that agents with `ask` or `accept-edits` are refused: {why}"),
            &raise_isolation("it needs user namespaces"),
        ),
    }
}

/// How an engine gets a login, in words for the file.
pub(super) fn login_advice(engine: &str, credentials: Credentials) -> String {
    let file = roundhouse_config::default_file()
        .map_or_else(|| "roundhouse.toml".to_owned(), |file| file.display().to_string());
    let key = match engine {
        "codex" => "OPENAI_API_KEY",
        _ => "ANTHROPIC_API_KEY",
    };
    match credentials {
        Credentials::Host => {
            format!("log in with the {engine} CLI as this user, then start `roundhouse up` again")
        }
        Credentials::None | Credentials::Variables => format!(
            "set engines.{engine}.credentials = \"host\" to use the login of this user, or \
             engines.{engine}.variables.{key}, in {file}; then start `roundhouse up` again"
        ),
    }
}

fn isolation(found: &IsolationFacts, checks: &mut Checks) {
    if found.best {
        return checks.ok("isolation", "PID_NAMESPACE: nothing that an engine starts outlives it");
    }
    let detail = format!("{}: what an engine hides may survive a cancel ({})", found.level, found.detail);
    checks.warn("isolation", detail, &raise_isolation("user and PID namespaces are not to be had"));
}

/// The command that lets this host give namespaces, as far as it can be told from here.
pub(super) fn raise_isolation(else_told: &str) -> String {
    let reads =
        |file: &str, value: &str| std::fs::read_to_string(file).is_ok_and(|text| text.trim() == value);
    if Path::new("/.dockerenv").exists() || Path::new("/run/.containerenv").exists() {
        return "start the container with --security-opt seccomp=unconfined --security-opt apparmor=unconfined \
                --security-opt systempaths=unconfined"
            .to_owned();
    }
    for (file, value, command) in [
        ("/proc/sys/user/max_user_namespaces", "0", "sudo sysctl user.max_user_namespaces=15000"),
        ("/proc/sys/kernel/unprivileged_userns_clone", "0", "sudo sysctl kernel.unprivileged_userns_clone=1"),
        (
            "/proc/sys/kernel/apparmor_restrict_unprivileged_userns",
            "1",
            "sudo sysctl kernel.apparmor_restrict_unprivileged_userns=0",
        ),
    ] {
        if reads(file, value) {
            return command.to_owned();
        }
    }
    format!("{else_told}: unshare --user --map-root-user --pid --fork true tells why")
}

/// The directories that must be there tomorrow.
pub(super) fn directories(config: &Config, checks: &mut Checks) {
    directory("state of the control plane", &config.control_plane.state_dir, checks);
    directory("state of the runner", &config.runner.state_dir, checks);
}

fn directory(name: &str, path: &Path, checks: &mut Checks) {
    // It is made by the first start: until then what is above it is looked at.
    let Some(there) = path.ancestors().find(|path| path.is_dir()) else {
        return checks.fail(name, format!("{} cannot be made", path.display()), "name another directory");
    };
    let shown = path.display();
    if rustix::fs::access(there, rustix::fs::Access::WRITE_OK).is_err() {
        let command = format!("sudo chown -R \"$USER\" {}", there.display());
        return checks.fail(name, format!("{shown}: {} cannot be written", there.display()), &command);
    }
    if there == path && std::fs::metadata(path).is_ok_and(|metadata| metadata.mode() & 0o022 != 0) {
        return checks.fail(name, format!("{shown}: others can write it"), &format!("chmod 700 {shown}"));
    }
    let Ok(system) = rustix::fs::statfs(there) else {
        return checks.warn(
            name,
            format!("{shown}: its file system does not tell its size"),
            "look at it with df",
        );
    };
    let kind = system.f_type;
    if let Some((_, kind)) = TEMPORARY.iter().find(|(magic, _)| *magic == kind) {
        let advice = "move it to a disk: control_plane.state_dir and runner.state_dir in roundhouse.toml";
        return checks.warn(
            name,
            format!("{shown} lies on {kind}, which a restart of the host empties"),
            advice,
        );
    }
    let block = u64::try_from(system.f_bsize).unwrap_or_default();
    room(name, path, system.f_bavail.saturating_mul(block), checks);
}

fn room(name: &str, path: &Path, free: u64, checks: &mut Checks) {
    let detail = format!("{}, {} MiB free", path.display(), free / 1024 / 1024);
    let advice = format!("make room: du -xh --max-depth=2 {} | sort -h | tail", path.display());
    if free < NO_ROOM {
        checks.fail(name, detail, &advice);
    } else if free < LITTLE_ROOM {
        checks.warn(name, detail, &advice);
    } else {
        checks.ok(name, detail);
    }
}

/// Whether the addresses for the services can be had. Of one that is in use the control plane is asked for.
pub(super) fn ports(config: &Config, control_plane_answers: bool, checks: &mut Checks) {
    if control_plane_answers {
        return;
    }
    for (name, listen, flag) in [
        ("port of the control plane", &config.control_plane.listen, "--listen"),
        ("port of the runner", &config.runner.listen, "--runner-listen"),
    ] {
        let Ok(address) = listen.parse::<SocketAddr>() else {
            checks.fail(
                name,
                format!("{listen:?} is no address with a port"),
                "write it like 127.0.0.1:7450",
            );
            continue;
        };
        match TcpListener::bind(address) {
            Ok(_) => checks.ok(name, format!("{listen} is free")),
            Err(error) => checks.fail(
                name,
                format!("{listen}: {error}"),
                &format!("end what holds it (ss -ltnp), or roundhouse up {flag} 127.0.0.1:0"),
            ),
        }
    }
}

/// Whether a file of keys would be committed with the work.
pub(super) async fn workspaces(config: &Config, checks: &mut Checks) {
    let mut places: Vec<PathBuf> = config.runner.roots.iter().map(|root| root.path.clone()).collect();
    if places.is_empty() {
        places.extend(std::env::current_dir());
    }
    for place in places {
        if !place.join(".roundhouse/.env").exists() {
            continue;
        }
        let name = format!("keys of {}", place.display());
        if tracked(&place).await {
            let command = format!(
                "cd {} && git rm --cached .roundhouse/.env && echo .roundhouse/.env >> .gitignore, and change the keys",
                place.display()
            );
            checks.warn(name, "git tracks .roundhouse/.env", &command);
        } else {
            checks.ok(name, ".roundhouse/.env is not tracked by git");
        }
    }
}

async fn tracked(place: &Path) -> bool {
    let mut command = tokio::process::Command::new("git");
    // What a workspace configures does not run: nothing of it is asked for but the index.
    command
        .args(["-c", "core.fsmonitor=false", "ls-files", "--error-unmatch", "--", ".roundhouse/.env"])
        .current_dir(place)
        .env("GIT_CONFIG_NOSYSTEM", "1")
        .env("GIT_OPTIONAL_LOCKS", "0")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .kill_on_drop(true);
    let status = tokio::time::timeout(PROBE_TIMEOUT, command.status()).await;
    status.is_ok_and(|status| status.is_ok_and(|status| status.success()))
}

#[cfg(test)]
mod tests {
    use super::super::Verdict;
    use super::*;

    fn only(checks: &Checks) -> (Verdict, &str, &str) {
        assert_eq!(checks.0.len(), 1, "{checks:?}");
        (checks.0[0].verdict, &checks.0[0].detail, checks.0[0].next.as_deref().unwrap_or(""))
    }

    #[test]
    fn a_full_disk_is_broken_and_a_fuller_one_is_a_warning() {
        for (free, verdict) in
            [(NO_ROOM - 1, Verdict::Failed), (NO_ROOM, Verdict::Warning), (LITTLE_ROOM, Verdict::Ok)]
        {
            let mut checks = Checks::default();
            room("x", Path::new("/s"), free, &mut checks);
            assert_eq!(only(&checks).0, verdict, "{free}");
        }
    }

    #[test]
    fn a_directory_that_does_not_last_or_is_open_to_others_is_told() {
        use std::os::unix::fs::PermissionsExt as _;
        let mut checks = Checks::default();
        directory("x", Path::new("/dev/shm/roundhouse-none/state"), &mut checks);
        let (verdict, detail, next) = only(&checks);
        assert_eq!(verdict, Verdict::Warning);
        assert!(detail.contains("tmpfs") && next.contains("state_dir"), "{detail} {next}");
        let dir = tempfile::tempdir().unwrap();
        std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o777)).unwrap();
        let mut checks = Checks::default();
        directory("x", dir.path(), &mut checks);
        assert_eq!(only(&checks).0, Verdict::Failed);
        assert!(only(&checks).2.starts_with("chmod 700 "));
    }

    #[test]
    fn a_port_that_is_taken_is_told_unless_the_control_plane_answers() {
        let taken = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut config = Config::default();
        config.control_plane.listen = taken.local_addr().unwrap().to_string();
        config.runner.listen = "127.0.0.1:0".to_owned();
        let mut checks = Checks::default();
        ports(&config, false, &mut checks);
        let verdicts: Vec<_> = checks.0.iter().map(|check| check.verdict).collect();
        assert_eq!(verdicts, [Verdict::Failed, Verdict::Ok]);
        let mut checks = Checks::default();
        ports(&config, true, &mut checks);
        assert!(checks.0.is_empty());
    }

    #[test]
    fn an_engine_of_another_version_and_one_without_login_have_a_command_each() {
        let found = EngineFacts {
            name: "codex",
            executable: Some("/opt/codex".into()),
            version: Some("1.0.0".to_owned()),
            pinned: Some("1.0.1".to_owned()),
            has_login: false,
            login: "no key".to_owned(),
            credentials: Credentials::Variables,
            sandbox: Some(Err("bwrap: no".to_owned())),
        };
        let mut checks = Checks::default();
        engine(&found, &mut checks);
        assert!(checks.0.iter().all(|check| check.verdict == Verdict::Warning), "{checks:?}");
        let next: Vec<_> = checks.0.iter().filter_map(|check| check.next.as_deref()).collect();
        assert_eq!(next.len(), 3);
        assert!(next[0].starts_with("roundhouse engines install codex"), "{next:?}");
        assert!(next[1].contains("engines.codex.variables.OPENAI_API_KEY"), "{next:?}");
    }

    #[tokio::test]
    async fn keys_that_git_tracks_are_told_with_the_command_that_mends_it() {
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().canonicalize().unwrap();
        let git = |args: &[&str]| {
            let status = std::process::Command::new("git").args(args).current_dir(&place).status();
            assert!(status.unwrap().success(), "{args:?}");
        };
        git(&["init", "--quiet"]);
        std::fs::create_dir(place.join(".roundhouse")).unwrap();
        std::fs::write(place.join(".roundhouse/.env"), "A=b\n").unwrap();
        let mut config = Config::default();
        config.runner.roots = vec![roundhouse_config::Root { path: place.clone(), trust: false }];
        let mut checks = Checks::default();
        workspaces(&config, &mut checks).await;
        assert_eq!(only(&checks).0, Verdict::Ok);
        git(&["add", ".roundhouse/.env"]);
        let mut checks = Checks::default();
        workspaces(&config, &mut checks).await;
        let (verdict, _, next) = only(&checks);
        assert_eq!(verdict, Verdict::Warning);
        assert!(next.contains("git rm --cached .roundhouse/.env"), "{next}");
    }
}
