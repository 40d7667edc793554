//! `engines install`: what becomes of npm when the command does not live to its end.

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

use pretty_assertions::assert_eq;
use tokio::process::{Child, Command};

use crate::run::{BOUND, command, finish, run};

/// A directory with an npm of this text in it, and the command that finds it.
fn install(directory: &Path, npm: &str) -> Command {
    install_named(directory, npm, &["claude-code"])
}

fn install_named(directory: &Path, npm: &str, engines: &[&str]) -> Command {
    let file = directory.join("npm");
    std::fs::write(&file, npm).expect("writes");
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o755)).expect("can be set");
    let setting = format!("runner.state_dir={}", directory.join("state").display());
    let mut command = command(&["--set", &setting, "engines", "install"]);
    command.args(engines);
    let path = std::env::var("PATH").unwrap_or_default();
    command.env("PATH", format!("{}:{path}", directory.display())).env("DIRECTORY", directory);
    command
}

/// Waits until npm and its own child have told who they are.
async fn started(directory: &Path) -> Vec<String> {
    let since = Instant::now();
    loop {
        let told = std::fs::read_to_string(directory.join("pids")).unwrap_or_default();
        if told.lines().count() == 2 && told.ends_with('\n') {
            return told.lines().map(str::to_owned).collect();
        }
        assert!(since.elapsed() < BOUND, "npm was not started");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Whether a process is at work; one that has ended and is not reaped is not.
fn lives(pid: &str) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(')').next().is_some_and(|rest| !rest.is_empty() && !rest.starts_with(" Z"))
}

async fn signal(child: &Child, name: &str) {
    let pid = child.id().expect("runs").to_string();
    let status = Command::new("sh").args(["-c", "kill -s \"$1\" \"$2\"", "sh", name, &pid]).status().await;
    assert!(status.expect("sh runs").success());
}

#[tokio::test]
async fn npm_does_not_outlive_an_install_that_is_interrupted_or_killed() {
    const NPM: &str = "#!/bin/sh\nsleep 300 &\nprintf '%s\\n%s\\n' $$ $! >\"$DIRECTORY/pids\"\nwait\n";
    for name in ["INT", "KILL"] {
        let directory = tempfile::tempdir().expect("a directory");
        let child = install(directory.path(), NPM).spawn().expect("starts");
        let pids = started(directory.path()).await;
        assert!(pids.iter().all(|pid| lives(pid)), "{pids:?}");
        signal(&child, name).await;
        let since = Instant::now();
        while pids.iter().any(|pid| lives(pid)) {
            assert!(since.elapsed() < BOUND, "{name}: {pids:?} are left");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        finish(child).await;
    }
}

#[tokio::test]
async fn an_npm_that_fails_is_told_with_its_words() {
    let directory = tempfile::tempdir().expect("a directory");
    let npm = "#!/bin/sh\necho no such thing >&2\nexit 7\n";
    let ended = finish(install(directory.path(), npm).spawn().expect("starts")).await;
    assert_eq!((ended.code, ended.stdout.as_str()), (1, ""), "{ended:?}");
    for told in ["exit status: 7", "no such thing", "engines.claude-code.executable"] {
        assert!(ended.stderr.contains(told), "{told}: {}", ended.stderr);
    }
}

#[tokio::test]
async fn an_engine_that_is_not_known_is_told_with_those_that_are() {
    let ended = run(&["engines", "install", "foo"]).await;
    assert_eq!(ended.code, 4, "{ended:?}");
    assert!(
        ended.stderr.contains("there is no engine foo")
            && ended.stderr.contains("those that can be installed: claude-code"),
        "{}",
        ended.stderr
    );
}

#[tokio::test]
async fn without_a_name_every_pinned_engine_is_installed_each_by_itself() {
    let directory = tempfile::tempdir().expect("a directory");
    // The native executable of Codex lies beside its launcher.
    let npm = "#!/bin/sh\nset -e\nmkdir -p node_modules/.bin\n\
        grep -c '\"@' package.json >>\"$DIRECTORY/asked\"\n\
        if grep -q claude-code package.json; then touch node_modules/.bin/claude; exit; fi\n\
        case $(uname -m) in aarch64) name=arm64;; *) name=x64;; esac\n\
        bin=node_modules/@openai/codex-linux-$name/vendor/$(uname -m)-unknown-linux-musl/bin\n\
        mkdir -p $bin\ntouch $bin/codex\n";
    let ended = finish(install_named(directory.path(), npm, &[]).spawn().expect("starts")).await;
    assert_eq!(ended.code, 0, "{ended:?}");
    let installed: Vec<_> = ended.stdout.lines().filter_map(|line| line.split_whitespace().next()).collect();
    assert_eq!(installed, ["claude-code", "codex"], "{ended:?}");
    let path = ended.stdout.lines().nth(1).and_then(|line| line.split_whitespace().nth(1)).expect("a path");
    assert!(path.ends_with("/bin/codex") && Path::new(path).is_file(), "the native one: {path}");
    let asked = std::fs::read_to_string(directory.path().join("asked")).expect("npm ran");
    assert_eq!(asked, "1\n1\n", "one package for each");
}
