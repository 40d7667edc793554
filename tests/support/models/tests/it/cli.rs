//! The real Claude Code CLI, in a network namespace of its own with nothing but loopback.

use std::{
    env,
    io::{BufRead, BufReader, Write},
    path::{Path, PathBuf},
    process::{Child, ChildStdin, Command, Output, Stdio},
    sync::mpsc::{Receiver, sync_channel},
    thread,
};

use roundhouse_models::ModelServer;
use serde_json::{Value, json};

use crate::client::LIMIT;

/// Set in the process that runs inside of the namespace.
const INSIDE: &str = "ROUNDHOUSE_TEST_INSIDE_NETNS";

/// Whether this process is inside of the namespace. If not, runs this one test again in there and passes on its outcome:
/// the caller then returns.
pub(crate) fn isolated(test: &str) -> bool {
    if env::var_os(INSIDE).is_some() {
        return true;
    }
    let rootless: &[&str] = if is_root() { &[] } else { &["--user", "--map-root-user"] };
    let output = Command::new("unshare")
        .args(rootless)
        .args(["--net", "sh", "-c", r#"ip link set lo up && exec "$@""#, "sh"])
        .arg(env::current_exe().expect("this executable"))
        .args(["--exact", test, "--nocapture", "--test-threads=1"])
        .env(INSIDE, "1")
        .output()
        .expect("unshare (util-linux) and ip (iproute2) are needed to keep the CLI off the network");
    let said =
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "in the network namespace:\n{said}");
    assert!(said.contains("1 passed"), "the test was not found by its name {test}:\n{said}");
    false
}

fn is_root() -> bool {
    std::fs::metadata("/proc/self").is_ok_and(|own| std::os::unix::fs::MetadataExt::uid(&own) == 0)
}

/// The CLI's executable.
fn claude() -> PathBuf {
    let pinned = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../engines/node_modules/.bin/claude");
    let path = env::var_os("ROUNDHOUSE_TEST_CLAUDE").map_or(pinned, PathBuf::from);
    assert!(
        path.exists(),
        "no Claude Code CLI at {}: run `npm ci` in tests/engines, or set ROUNDHOUSE_TEST_CLAUDE",
        path.display()
    );
    path.canonicalize().expect("a path")
}

/// A home, a workspace, and the model that the CLI there asks.
pub(crate) struct Place {
    dir: tempfile::TempDir,
    base_url: String,
}

impl Place {
    pub(crate) fn new(server: &ModelServer) -> Self {
        let dir = tempfile::tempdir().expect("a temporary directory");
        for name in ["home", "config", "tmp", "work"] {
            std::fs::create_dir(dir.path().join(name)).expect("made");
        }
        Self { dir, base_url: server.base_url() }
    }

    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join("work").join(name)
    }

    pub(crate) fn command(&self, more: &[&str]) -> Command {
        let dir = |name: &str| self.dir.path().join(name);
        let mut command = Command::new(claude());
        command
            .args(["-p", "--verbose", "--output-format=stream-json", "--permission-mode=bypassPermissions"])
            .args(["--model=opus", "--strict-mcp-config", "--setting-sources=user"])
            .args(more)
            .current_dir(dir("work"))
            .env_clear()
            .env("PATH", "/usr/bin:/bin")
            .env("HOME", dir("home"))
            .env("CLAUDE_CONFIG_DIR", dir("config"))
            .env("TMPDIR", dir("tmp"))
            .env("CLAUDE_CODE_TMPDIR", dir("tmp"))
            .env("ANTHROPIC_BASE_URL", &self.base_url)
            .env("ANTHROPIC_API_KEY", "dummy-key")
            .env("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "1")
            .env("DISABLE_AUTOUPDATER", "1")
            .env("IS_SANDBOX", "1")
            .env("CLAUDE_CODE_EMIT_SESSION_STATE_EVENTS", "1")
            .env("CLAUDE_CODE_MAX_RETRIES", "1")
            .env("API_TIMEOUT_MS", "3000");
        command
    }

    /// One turn in a process of its own.
    pub(crate) fn one_shot(&self, prompt: &str, more: &[&str]) -> Output {
        self.command(more).args(["--", prompt]).stdin(Stdio::null()).output().expect("run")
    }

    pub(crate) fn warm(&self) -> Cli {
        let mut child = self
            .command(&["--input-format=stream-json", "--include-partial-messages"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("started");
        let (told, lines) = sync_channel(10_000);
        let stdout = BufReader::new(child.stdout.take().expect("piped"));
        thread::spawn(move || {
            for line in stdout.lines() {
                let Ok(line) = line else { return };
                if told.send(serde_json::from_str(&line).expect("JSON")).is_err() {
                    return;
                }
            }
        });
        let stdin = child.stdin.take().expect("piped");
        Cli { child, stdin, lines }
    }
}

/// A warm CLI.
pub(crate) struct Cli {
    child: Child,
    stdin: ChildStdin,
    lines: Receiver<Value>,
}

impl Cli {
    /// Sends a message with a context block, whose marker must never be obeyed, before the text.
    pub(crate) fn say(&mut self, text: &str) {
        let context = "earlier somebody said [[text:from the context]]";
        let content = json!([{"type": "text", "text": context}, {"type": "text", "text": text}]);
        let uuid = uuid::Uuid::new_v4().to_string();
        self.write(&json!({
            "type": "user", "uuid": uuid, "message": {"role": "user", "content": content}, "client_composed": true,
        }));
    }

    pub(crate) fn interrupt(&mut self) {
        self.write(
            &json!({"type": "control_request", "request_id": "i", "request": {"subtype": "interrupt"}}),
        );
    }

    pub(crate) fn write(&mut self, line: &Value) {
        writeln!(self.stdin, "{line}").expect("written");
    }

    /// The lines up to the first for which this is true, it included.
    pub(crate) fn until(&self, test: impl Fn(&Value) -> bool) -> Vec<Value> {
        let mut lines = Vec::new();
        loop {
            let line = self.lines.recv_timeout(LIMIT).expect("a line in time");
            let last = test(&line);
            lines.push(line);
            if last {
                return lines;
            }
        }
    }

    /// The result of the running turn, once the CLI is idle.
    pub(crate) fn result(&self) -> Value {
        let lines = self.until(|line| line["subtype"] == "session_state_changed" && line["state"] == "idle");
        lines.into_iter().rfind(|line| line["type"] == "result").expect("a result")
    }

    pub(crate) fn turn(&mut self, text: &str) -> Value {
        self.say(text);
        self.result()
    }
}

impl Drop for Cli {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
