//! `up`: both services as children, from their ready line to their end.

use std::path::Path;
use std::time::{Duration, Instant};

use pretty_assertions::assert_eq;
use serde_json::Value;
use tokio::io::{AsyncBufReadExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStdout, Command};

use crate::run::{BOUND, command, finish, run};

/// A running `up` with a state directory of its own.
struct Up {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
    ready: Value,
    directory: tempfile::TempDir,
}

impl Up {
    async fn start() -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let state = directory.path().join("state");
        let mut child =
            command(&["--json", "up", "--listen", "127.0.0.1:0", "--runner-listen", "127.0.0.1:0"])
                .arg("--state-dir")
                .arg(&state)
                .current_dir(directory.path())
                .spawn()
                .expect("starts");
        let mut lines = BufReader::new(child.stdout.take().expect("was asked for")).lines();
        let line =
            tokio::time::timeout(BOUND, lines.next_line()).await.expect("is ready in time").expect("reads");
        let ready = match line {
            Some(line) => serde_json::from_str(&line).expect("JSON"),
            None => panic!("up ended: {:?}", finish(child).await),
        };
        Self { child, lines, ready, directory }
    }

    fn text(&self, key: &str) -> String {
        self.ready[key].as_str().expect("a text").to_owned()
    }

    async fn run(&self, args: &[&str]) -> crate::run::Ended {
        let server = format!("http://{}", self.text("control_plane"));
        run(&[&["--json", "--server", &server], args].concat()).await
    }

    fn processes(&self) -> Vec<u32> {
        processes(self.directory.path())
    }

    /// Waits until none of its processes is left.
    async fn gone(&self) {
        let since = Instant::now();
        while !self.processes().is_empty() {
            assert!(since.elapsed() < BOUND, "left: {:?}", self.processes());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

/// Processes whose command line names this directory, but not the test's own.
fn processes(directory: &Path) -> Vec<u32> {
    let needle = directory.to_str().expect("UTF-8").as_bytes().to_vec();
    let entries = std::fs::read_dir("/proc").expect("is there");
    entries
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok())
        .filter(|pid| *pid != std::process::id())
        .filter(|pid| {
            let command = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            command.windows(needle.len()).any(|window| window == needle)
        })
        .collect()
}

/// The process of a service, by its first argument.
fn service(up: &Up, name: &str) -> u32 {
    let found = up.processes().into_iter().find(|pid| {
        let command = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        command.split(|byte| *byte == 0).nth(1) == Some(name.as_bytes())
    });
    found.expect("runs")
}

async fn signal(pid: u32, name: &str) {
    let status =
        Command::new("sh").args(["-c", "kill -s \"$1\" \"$2\"", "sh", name, &pid.to_string()]).status();
    assert!(status.await.expect("sh runs").success(), "{name} {pid}");
}

#[tokio::test]
async fn a_database_is_checked_and_copied_while_it_is_used_and_restored_when_it_is_not() {
    let up = Up::start().await;
    let state = up.directory.path().join("state");
    let copy = up.directory.path().join("copy.db");
    let (state, file) = (state.to_str().expect("UTF-8"), copy.to_str().expect("UTF-8"));
    let db = |what: &'static str, file: Option<&str>| {
        let mut args = vec!["--json", "db", "--state-dir", state, what];
        args.extend(file);
        let args: Vec<String> = args.into_iter().map(str::to_owned).collect();
        async move { run(&args.iter().map(String::as_str).collect::<Vec<_>>()).await }
    };
    assert_eq!(up.run(&["conversations", "create", "--title", "before"]).await.code, 0);
    let checked = db("check", None).await;
    assert_eq!((checked.code, &checked.json()["whole"]), (0, &Value::Bool(true)), "{checked:?}");
    assert_eq!(checked.json()["conversations"], 1);
    let made = db("backup", Some(file)).await;
    assert_eq!((made.code, &made.json()["check"]["conversations"]), (0, &Value::from(1)), "{made:?}");
    assert_eq!(db("backup", Some(file)).await.code, 4, "it is there already");
    assert_eq!(up.run(&["conversations", "create", "--title", "after"]).await.code, 0);
    let held = db("restore", Some(file)).await;
    assert_eq!(held.code, 4, "{held:?}");
    assert!(held.stderr.contains("stop the control plane first"), "{held:?}");
    assert_eq!(db("check", None).await.json()["conversations"], 2, "nothing was changed");
    signal(up.child.id().expect("runs"), "INT").await;
    up.gone().await;
    let none = db("restore", Some("/nonexistent/copy.db")).await;
    assert_eq!(none.code, 4, "{none:?}");
    let bad = up.directory.path().join("bad.db");
    std::fs::write(&bad, "").expect("writes");
    let bad = db("restore", bad.to_str()).await;
    assert_eq!(bad.code, 3, "{bad:?}");
    let restored = db("restore", Some(file)).await;
    assert_eq!(restored.code, 0, "{restored:?}");
    let kept = restored.json()["kept"].as_str().expect("one was there").to_owned();
    assert!(Path::new(&kept).is_file() && kept.contains("control-plane.db.replaced-"), "{kept}");
    assert_eq!(db("check", None).await.json()["conversations"], 1);
}

#[tokio::test]
async fn ctrl_c_stops_both_and_leaves_no_process() {
    let up = Up::start().await;
    assert_eq!(up.ready["ready"], true);
    let root = up.directory.path().canonicalize().expect("is there");
    assert_eq!(up.ready["roots"][0]["path"].as_str(), root.to_str(), "the current directory is the root");
    let runners = up.run(&["runners"]).await.json();
    assert_eq!(runners["runners"][0]["runner_id"], up.ready["runner_id"]);
    assert_eq!(runners["runners"][0]["state"], "ONLINE");
    for service in ["control_plane", "runner"] {
        let health = up.run(&["health", &up.text(service)]).await;
        assert_eq!((health.code, &health.json()["serving"]), (0, &Value::Bool(true)), "{health:?}");
    }
    assert!(up.processes().len() >= 3, "{:?}", up.processes());
    // To the parent alone, as well as to a whole group: the children have groups of their own.
    signal(up.child.id().expect("runs"), "INT").await;
    let directory = up.directory.path().to_owned();
    let Up { child, lines, directory: kept, .. } = up;
    drop(lines);
    let ended = finish(child).await;
    assert_eq!(ended.code, 0, "{ended:?}");
    assert_eq!(processes(&directory), Vec::<u32>::new(), "all are gone when it has ended");
    drop(kept);
}

#[tokio::test]
async fn a_second_ctrl_c_ends_everything_at_once() {
    let up = Up::start().await;
    let runner = service(&up, "__runner");
    // A service that does not get on with its stop.
    signal(runner, "STOP").await;
    let directory = up.directory.path().to_owned();
    let mut child = up.child;
    let parent = child.id().expect("runs");
    // The first one is answered without a word, so the second comes until it is heard.
    let since = Instant::now();
    let status = loop {
        signal(parent, "INT").await;
        if let Ok(status) = tokio::time::timeout(Duration::from_millis(100), child.wait()).await {
            break status.expect("can be waited for");
        }
        assert!(since.elapsed() < BOUND, "it waits");
    };
    assert_eq!(processes(&directory), Vec::<u32>::new(), "nothing is left when it has ended");
    assert_eq!(status.code(), Some(130));
}

#[tokio::test]
async fn an_address_that_others_reach_is_refused_with_a_flag_that_up_has() {
    for flag in ["--listen", "--runner-listen"] {
        let ended = run(&["up", flag, "0.0.0.0:0"]).await;
        assert_eq!(ended.code, 5, "{ended:?}");
        assert!(
            ended.stderr.contains("0.0.0.0:0 is not a loopback address")
                && ended.stderr.contains("or say --insecure-listen"),
            "{}",
            ended.stderr
        );
    }
}

#[tokio::test]
async fn a_start_that_fails_is_one_json_value_with_the_reason() {
    let directory = tempfile::tempdir().expect("a directory");
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("binds");
    let address = taken.local_addr().expect("has one").to_string();
    let state = directory.path().join("state");
    let state = state.to_str().expect("UTF-8");
    let ended = run(&["--json", "up", "--state-dir", state, "--listen", &address]).await;
    let error: Value = serde_json::from_str(&ended.stderr).expect("one JSON value");
    let message = error["error"]["message"].as_str().expect("a text");
    assert!(message.contains("cannot listen") || message.contains("in use"), "{message}");
    assert_eq!(ended.code, 1, "{ended:?}");
}

#[tokio::test]
async fn a_killed_parent_takes_its_services_along() {
    let mut up = Up::start().await;
    up.child.kill().await.expect("can be killed");
    up.gone().await;
}

#[tokio::test]
async fn a_runner_of_another_control_plane_is_told_at_once_with_a_command_that_helps() {
    let directory = tempfile::tempdir().expect("a directory");
    let state = directory.path().join("state");
    let start = || {
        let mut command = command(&["up", "--listen", "127.0.0.1:0", "--runner-listen", "127.0.0.1:0"]);
        command.arg("--state-dir").arg(&state).current_dir(directory.path());
        command
    };
    let ready = async || {
        let mut child = start().spawn().expect("starts");
        let mut lines = BufReader::new(child.stdout.take().expect("was asked for")).lines();
        while let Some(line) = lines.next_line().await.expect("reads") {
            if line.starts_with("ready") {
                signal(child.id().expect("runs"), "INT").await;
            }
        }
        finish(child).await
    };
    let ended = ready().await;
    assert_eq!(ended.code, 0, "{ended:?}");
    std::fs::remove_dir_all(state.join("control-plane")).expect("can be removed");
    let since = Instant::now();
    let ended = finish(start().spawn().expect("starts")).await;
    assert_eq!((ended.code, ended.stdout.as_str()), (4, ""), "{ended:?}");
    assert!(since.elapsed() < Duration::from_secs(12), "it waited: {:?}", since.elapsed());
    let runner = state.join("runner");
    let runner = runner.to_str().expect("UTF-8");
    let advice = format!("`roundhouse runners reset --state-dir {runner}`");
    assert!(ended.stderr.contains(&advice), "{}", ended.stderr);
    let ended = run(&["--json", "runners", "reset", "--state-dir", runner]).await;
    assert!(ended.code == 0 && ended.json()["was_bound_to"].is_string(), "{ended:?}");
    let ended = ready().await;
    assert_eq!(ended.code, 0, "{ended:?}");
    let ended = run(&["runners", "reset", "--state-dir", "/nonexistent/runner"]).await;
    assert_eq!(ended.code, 4, "{ended:?}");
}

#[tokio::test]
async fn a_killed_service_comes_back_where_it_was() {
    let up = Up::start().await;
    for name in ["__runner", "__control-plane"] {
        let before = service(&up, name);
        signal(before, "KILL").await;
        let since = Instant::now();
        loop {
            let ended = up.run(&["runners"]).await;
            let back = ended.code == 0 && ended.json()["runners"][0]["state"] == "ONLINE";
            let another =
                up.processes().iter().any(|pid| *pid != before) && !up.processes().contains(&before);
            if back && another {
                break;
            }
            assert!(since.elapsed() < BOUND, "{name}: {ended:?}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        assert_ne!(service(&up, name), before);
    }
    let runners = up.run(&["runners"]).await.json();
    assert_eq!(runners["runners"].as_array().map(Vec::len), Some(1), "it is the same runner: {runners}");
    assert_eq!(runners["runners"][0]["runner_id"], up.ready["runner_id"]);
    signal(up.child.id().expect("runs"), "TERM").await;
    up.gone().await;
}

#[tokio::test]
async fn an_address_that_is_taken_is_told_and_nothing_is_left() {
    let directory = tempfile::tempdir().expect("a directory");
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("binds");
    let address = taken.local_addr().expect("has one").to_string();
    let state = directory.path().join("state");
    let state = state.to_str().expect("UTF-8");
    for flags in [
        ["--listen", &address, "--runner-listen", "127.0.0.1:0"],
        ["--listen", "127.0.0.1:0", "--runner-listen", &address],
    ] {
        let ended = run(&[&["up", "--state-dir", state], &flags[..]].concat()).await;
        assert_eq!((ended.code, ended.stdout.as_str()), (1, ""), "{ended:?}");
        assert!(ended.stderr.contains("did not start"), "{}", ended.stderr);
        assert_eq!(processes(directory.path()), Vec::<u32>::new());
    }
}

#[tokio::test]
async fn the_ready_words_hold_a_line_to_copy() {
    let directory = tempfile::tempdir().expect("a directory");
    let mut child = command(&["up", "--listen", "127.0.0.1:0", "--runner-listen", "127.0.0.1:0"])
        .args([std::ffi::OsStr::new("--state-dir"), directory.path().join("state").as_os_str()])
        .arg("--trust-root")
        .arg(directory.path())
        .spawn()
        .expect("starts");
    let mut lines = BufReader::new(child.stdout.take().expect("was asked for")).lines();
    let mut told = Vec::new();
    while told.last().is_none_or(|line: &String| !line.starts_with("ready")) {
        let line = tokio::time::timeout(BOUND, lines.next_line()).await.expect("in time").expect("reads");
        told.push(line.expect("more lines"));
    }
    let address = told[0].rsplit("http://").next().expect("an address").to_owned();
    assert!(told.contains(&format!("grpcurl        grpcurl -plaintext {address} list")), "{told:?}");
    assert!(told.iter().any(|line| line.starts_with("root") && line.ends_with("(trusted)")), "{told:?}");
    for engine in ["claude-code", "codex"] {
        let line = format!("engine         {engine} ");
        assert!(told.iter().any(|told| told.starts_with(&line)), "{told:?}");
    }
    signal(child.id().expect("runs"), "INT").await;
    assert_eq!(finish(child).await.code, 0);
}
