//! One engine process, with bounds on every wait.

use std::{
    io::{BufRead, BufReader, Read, Write},
    path::{Path, PathBuf},
    process::{Child, ChildStdin, Command, ExitStatus, Stdio},
    sync::mpsc::{Receiver, sync_channel},
    thread,
    time::{Duration, Instant},
};

use serde_json::{Value, json};

/// What any single wait may take.
pub(crate) const LIMIT: Duration = Duration::from_secs(20);

/// The usual arguments of a warm engine.
pub(crate) const WARM: [&str; 6] = [
    "-p",
    "--verbose",
    "--output-format=stream-json",
    "--input-format=stream-json",
    "--replay-user-messages",
    "--model=m1",
];

pub(crate) struct Home(tempfile::TempDir);

impl Home {
    pub(crate) fn new() -> Self {
        Self(tempfile::tempdir().expect("a temporary directory"))
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub(crate) fn command(&self, more: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_fake-engine"));
        command
            .args(more)
            .env_clear()
            .env("PATH", "/usr/bin:/bin")
            .env("CLAUDE_CONFIG_DIR", self.path("config"))
            .env("CLAUDE_CODE_EMIT_SESSION_STATE_EVENTS", "1")
            .env("FAKE_ENGINE_LOG", self.path("log"))
            .current_dir(self.0.path());
        command
    }

    pub(crate) fn warm(&self, more: &[&str]) -> Engine {
        Engine::start(self.command(&[&WARM[..], more].concat()))
    }

    pub(crate) fn scripted(&self, script: &str) -> Engine {
        std::fs::write(self.path("script"), script).expect("written");
        let mut command = self.command(&WARM);
        command.env("FAKE_ENGINE_SCRIPT", self.path("script"));
        Engine::start(command)
    }

    /// The log's events of one kind.
    pub(crate) fn log(&self, event: &str) -> Vec<Value> {
        let log = std::fs::read_to_string(self.path("log")).unwrap_or_default();
        log.lines()
            .map(|line| serde_json::from_str::<Value>(line).expect("a JSON line"))
            .filter(|line| line["event"] == event)
            .map(|line| line["detail"].clone())
            .collect()
    }

    pub(crate) fn session_file(&self, id: &str) -> PathBuf {
        let slug = self.0.path().canonicalize().expect("there");
        let slug: String =
            slug.to_string_lossy().chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).collect();
        self.path("config").join("projects").join(slug).join(format!("{id}.jsonl"))
    }
}

pub(crate) struct Engine {
    pub(crate) child: Child,
    pub(crate) stdin: Option<ChildStdin>,
    lines: Receiver<Vec<u8>>,
    errors: Receiver<Vec<u8>>,
}

impl Engine {
    pub(crate) fn start(mut command: Command) -> Self {
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("started");
        let (told, lines) = sync_channel(100_000);
        let mut stdout = BufReader::new(child.stdout.take().expect("piped"));
        thread::spawn(move || {
            loop {
                let mut line = Vec::new();
                if !matches!(stdout.read_until(b'\n', &mut line), Ok(1..)) || told.send(line).is_err() {
                    return;
                }
            }
        });
        let (told, errors) = sync_channel(1);
        let mut stderr = child.stderr.take().expect("piped");
        thread::spawn(move || {
            let mut all = Vec::new();
            let _ = stderr.read_to_end(&mut all);
            let _ = told.send(all);
        });
        let stdin = child.stdin.take();
        Self { child, stdin, lines, errors }
    }

    pub(crate) fn write(&mut self, line: &str) {
        let stdin = self.stdin.as_mut().expect("open");
        stdin.write_all(format!("{line}\n").as_bytes()).expect("written");
    }

    pub(crate) fn say(&mut self, uuid: &str, text: &str) {
        let content =
            json!([{"type": "text", "text": "context [[die:KILL]]"}, {"type": "text", "text": text}]);
        let line = json!({"type": "user", "uuid": uuid, "message": {"role": "user", "content": content}});
        self.write(&line.to_string());
    }

    pub(crate) fn control(&mut self, id: &str, request: Value) {
        self.write(&json!({"type": "control_request", "request_id": id, "request": request}).to_string());
    }

    /// The next line as it came; `None` at the end of stdout.
    pub(crate) fn raw(&self) -> Option<Vec<u8>> {
        match self.lines.recv_timeout(LIMIT) {
            Ok(line) => Some(line),
            Err(std::sync::mpsc::RecvTimeoutError::Disconnected) => None,
            Err(std::sync::mpsc::RecvTimeoutError::Timeout) => panic!("no line within {LIMIT:?}"),
        }
    }

    pub(crate) fn next(&self) -> Value {
        let line = self.raw().expect("a line, not the end");
        serde_json::from_slice(&line)
            .unwrap_or_else(|_| panic!("no JSON: {}", String::from_utf8_lossy(&line)))
    }

    /// The lines up to the first for which this is true, it included.
    pub(crate) fn until(&self, test: impl Fn(&Value) -> bool) -> Vec<Value> {
        let mut lines = Vec::new();
        loop {
            let line = self.next();
            let last = test(&line);
            lines.push(line);
            if last {
                return lines;
            }
        }
    }

    pub(crate) fn until_idle(&self) -> Vec<Value> {
        self.until(|line| line["subtype"] == "session_state_changed" && line["state"] == "idle")
    }

    pub(crate) fn turn(&mut self, uuid: &str, text: &str) -> Vec<Value> {
        self.say(uuid, text);
        self.until_idle()
    }

    pub(crate) fn signal(&self, name: &str) {
        let pid = self.child.id().to_string();
        assert!(Command::new("kill").args([&format!("-{name}"), &pid]).status().expect("run").success());
    }

    pub(crate) fn close(&mut self) {
        self.stdin = None;
    }

    pub(crate) fn wait(&mut self) -> ExitStatus {
        wait_for("the engine's end", || self.child.try_wait().expect("waitable"))
    }

    pub(crate) fn stderr(&self) -> String {
        String::from_utf8_lossy(&self.errors.recv_timeout(LIMIT).expect("the end of stderr")).into_owned()
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Waits until there is something.
pub(crate) fn wait_for<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(start.elapsed() < LIMIT, "{what} did not happen within {LIMIT:?}");
        thread::park_timeout(Duration::from_millis(5));
    }
}

pub(crate) fn kinds(lines: &[Value]) -> Vec<String> {
    lines
        .iter()
        .map(|line| {
            let part = |name: &str| line[name].as_str().map(|text| format!(".{text}")).unwrap_or_default();
            let subtype = if line["type"] == "result" { String::new() } else { part("subtype") };
            format!("{}{subtype}{}", line["type"].as_str().unwrap_or("?"), part("state"))
        })
        .collect()
}

pub(crate) fn of<'a>(lines: &'a [Value], kind: &str) -> Vec<&'a Value> {
    lines.iter().filter(|line| line["type"] == kind).collect()
}

pub(crate) fn result(lines: &[Value]) -> &Value {
    of(lines, "result").first().copied().expect("a result")
}

/// The texts that were said.
pub(crate) fn said(lines: &[Value]) -> Vec<String> {
    of(lines, "assistant")
        .iter()
        .filter_map(|line| line["message"]["content"][0]["text"].as_str())
        .map(str::to_owned)
        .collect()
}

pub(crate) fn is_alive(pid: &str) -> bool {
    let stat = std::fs::read_to_string(Path::new("/proc").join(pid.trim()).join("stat"));
    // A zombie is gone for this purpose.
    stat.is_ok_and(|stat| !stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('Z')))
}
