//! The real Codex CLI, asking the scripted model.

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

/// The native executable: the npm package's own is a script around it.
fn codex() -> PathBuf {
    let arch = env::consts::ARCH;
    let package = if arch == "aarch64" { "codex-linux-arm64" } else { "codex-linux-x64" };
    let pinned = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../engines/node_modules/@openai")
        .join(format!("{package}/vendor/{arch}-unknown-linux-musl/bin/codex"));
    let path = env::var_os("ROUNDHOUSE_TEST_CODEX").map_or(pinned, PathBuf::from);
    assert!(
        path.exists(),
        "no Codex CLI at {}: run `npm ci` in tests/engines, or set ROUNDHOUSE_TEST_CODEX",
        path.display()
    );
    path.canonicalize().expect("a path")
}

/// A home, a workspace, and the model that the CLI there asks.
pub(crate) struct Place {
    dir: tempfile::TempDir,
}

impl Place {
    pub(crate) fn new(server: &ModelServer) -> Self {
        let dir = tempfile::tempdir().expect("a temporary directory");
        for name in ["home", "codex", "tmp", "work"] {
            std::fs::create_dir(dir.path().join(name)).expect("made");
        }
        // One retry of each kind, and a stream that says nothing for a second is broken.
        let config = format!(
            r#"
model_provider = "scripted"
[analytics]
enabled = false
[otel]
metrics_exporter = "none"
[features]
plugins = false
apps = false
unbounded_connection_retries = false
[model_providers.scripted]
name = "scripted"
base_url = "{}/v1"
wire_api = "responses"
env_key = "SCRIPTED_API_KEY"
request_max_retries = 1
stream_max_retries = 1
stream_idle_timeout_ms = 1000
"#,
            server.base_url()
        );
        std::fs::write(dir.path().join("codex/config.toml"), config).expect("written");
        Self { dir }
    }

    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join("work").join(name)
    }

    fn command(&self) -> Command {
        let dir = |name: &str| self.dir.path().join(name);
        let mut command = Command::new(codex());
        command
            .current_dir(dir("work"))
            .env_clear()
            .env("PATH", "/usr/bin:/bin")
            .env("HOME", dir("home"))
            .env("CODEX_HOME", dir("codex"))
            .env("TMPDIR", dir("tmp"))
            .env("SCRIPTED_API_KEY", "dummy-key");
        command
    }

    /// One turn in a process of its own.
    pub(crate) fn exec(&self, more: &[&str], prompt: &str) -> Output {
        let mut command = self.command();
        command.args(["exec", "-s", "danger-full-access", "-m", "scripted-1"]).args(more);
        command.args(["--json", "--skip-git-repo-check", "--", prompt]);
        command.stdin(Stdio::null()).output().expect("run")
    }

    /// A warm process that has been initialized.
    pub(crate) fn warm(&self) -> Cli {
        let mut command = self.command();
        command.arg("app-server").stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn().expect("started");
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
        let mut cli = Cli { child, stdin, lines, asked: 0, thread: String::new() };
        let capabilities = json!({"experimentalApi": true});
        let client = json!({"name": "test", "title": null, "version": "0"});
        cli.ask("initialize", &json!({"clientInfo": client, "capabilities": capabilities}));
        cli.write(&json!({"method": "initialized"}));
        cli
    }

    /// A warm process with a new thread that may do everything.
    pub(crate) fn started(&self) -> Cli {
        let mut cli = self.warm();
        cli.open(&json!({"approvalPolicy": "never", "sandbox": "danger-full-access"}));
        cli
    }
}

/// A warm CLI.
pub(crate) struct Cli {
    child: Child,
    stdin: ChildStdin,
    lines: Receiver<Value>,
    asked: u64,
    pub(crate) thread: String,
}

impl Cli {
    pub(crate) fn write(&mut self, line: &Value) {
        writeln!(self.stdin, "{line}").expect("written");
    }

    /// Sends a request and returns its result; what comes before it is skipped.
    pub(crate) fn ask(&mut self, method: &str, params: &Value) -> Value {
        self.asked += 1;
        let id = self.asked;
        self.write(&json!({"id": id, "method": method, "params": params}));
        let answer = self.until(|line| line["id"] == id && line["method"].is_null()).pop().expect("the last");
        assert!(answer["error"].is_null(), "{method}: {answer}");
        answer["result"].clone()
    }

    /// Starts a thread.
    pub(crate) fn open(&mut self, more: &Value) {
        let mut params = json!({
            "model": "scripted-1", "developerInstructions": "be brief", "baseInstructions": "be good",
        });
        for (name, value) in more.as_object().into_iter().flatten() {
            params[name] = value.clone();
        }
        let begun = self.ask("thread/start", &params);
        self.thread = begun["thread"]["id"].as_str().expect("a thread's id").to_owned();
    }

    /// Begins a turn, with a context part, whose marker must never be obeyed, before the text; answers its id.
    pub(crate) fn say(&mut self, text: &str) -> String {
        let part = |text: &str| json!({"type": "text", "text": text, "text_elements": []});
        let input = [part("earlier somebody said [[text:from the context]]"), part(text)];
        let begun = self.ask("turn/start", &json!({"threadId": self.thread, "input": input}));
        begun["turn"]["id"].as_str().expect("a turn's id").to_owned()
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

    /// The lines up to the first of this method.
    pub(crate) fn until_method(&self, method: &str) -> Vec<Value> {
        self.until(|line| line["method"] == method)
    }

    /// What the running turn came to.
    pub(crate) fn ended(&self) -> Turn {
        Turn(self.until_method("turn/completed"))
    }

    pub(crate) fn turn(&mut self, text: &str) -> Turn {
        self.say(text);
        self.ended()
    }

    /// Interrupts the turn, once it says that it has started.
    pub(crate) fn interrupt(&mut self, turn: &str) -> Turn {
        self.ask("turn/interrupt", &json!({"threadId": self.thread, "turnId": turn}));
        self.ended()
    }
}

impl Drop for Cli {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The lines of a turn, its end included.
pub(crate) struct Turn(Vec<Value>);

impl Turn {
    fn params(&self, method: &str) -> Vec<&Value> {
        self.0.iter().filter(|line| line["method"] == method).map(|line| &line["params"]).collect()
    }

    pub(crate) fn end(&self) -> &Value {
        &self.0.last().expect("a line")["params"]["turn"]
    }

    pub(crate) fn status(&self) -> &str {
        self.end()["status"].as_str().expect("a status")
    }

    /// The items that were completed, of one type.
    pub(crate) fn items(&self, kind: &str) -> Vec<&Value> {
        let items = self.params("item/completed").into_iter().map(|params| &params["item"]);
        items.filter(|item| item["type"] == kind).collect()
    }

    /// What the agent said.
    pub(crate) fn said(&self) -> Vec<&str> {
        self.items("agentMessage").into_iter().filter_map(|item| item["text"].as_str()).collect()
    }

    /// How often the CLI told that it tries again.
    pub(crate) fn retries(&self) -> usize {
        self.params("error").into_iter().filter(|error| error["willRetry"] == true).count()
    }

    /// The token counts of each answer.
    pub(crate) fn usage(&self) -> Vec<&Value> {
        self.params("thread/tokenUsage/updated")
            .into_iter()
            .map(|usage| &usage["tokenUsage"]["last"])
            .collect()
    }

    /// The last rate limit told.
    pub(crate) fn limit(&self) -> Option<&Value> {
        let told = self.params("account/rateLimits/updated").into_iter();
        told.map(|limits| &limits["rateLimits"]["primary"]).rfind(|primary| !primary.is_null())
    }
}
