//! Codex's app-server dialect: JSON-RPC requests in, answers and notifications out.
//!
//! One turn runs at a time: those of several threads run one after the other.

mod commands;
mod requests;
mod rollout;
mod rpc;
mod thread;
mod turn;

use std::{
    collections::{HashMap, VecDeque},
    env,
    ffi::OsString,
    io::Write as _,
    path::PathBuf,
    process::{Command, ExitCode},
};

use serde_json::Value;

use self::{commands::Background, thread::Thread, turn::Running};
use crate::{
    core::{Core, Dialect, Stop, complain},
    shared::{OnSignal, exit_code},
};

/// The version that the fake engine speaks like.
pub(crate) const VERSION: &str = "0.171.0";

/// The first arguments by which it is known that Codex is meant.
pub(crate) const SUBCOMMANDS: [&str; 2] = ["app-server", "sandbox"];

/// What a command says where no sandbox can be made.
const NO_SANDBOX: &str = "bwrap: No permissions to create a new namespace, likely because the kernel does not allow \
     non-privileged user namespaces.";

/// A user's message.
#[derive(Debug, Clone)]
pub(crate) struct Message {
    /// The id that the client gave it.
    client_id: Option<String>,
    /// Its parts, as they came.
    input: Value,
}

/// A turn that was accepted and has not started.
#[derive(Debug)]
pub(crate) struct Accepted {
    thread: usize,
    turn: String,
    message: Message,
    /// What came for it before it started.
    more: Vec<Message>,
}

/// The engine.
#[derive(Debug)]
pub(crate) struct Engine {
    core: Core,
    home: PathBuf,
    /// The client's name, once it has said it.
    client: Option<String>,
    opted_out: Vec<String>,
    threads: Vec<Thread>,
    accepted: VecDeque<Accepted>,
    running: Option<Running>,
    /// Messages for the turn that runs.
    steers: VecDeque<Message>,
    /// The id of the next request to the client.
    next_request: u64,
    answers: HashMap<u64, Value>,
    /// The request to the client that waits for its answer.
    asking: Option<u64>,
    /// Commands that outlive their turn, or their call.
    background: Vec<Background>,
}

/// Runs the engine with these arguments (without the program's name) to its end.
pub(crate) fn run(arguments: Vec<OsString>) -> ExitCode {
    let words: Vec<String> = arguments.into_iter().map(|word| word.to_string_lossy().into_owned()).collect();
    match words.first().map(String::as_str) {
        Some("--version" | "-V") => {
            let version = env::var("FAKE_ENGINE_VERSION").unwrap_or_else(|_| VERSION.to_owned());
            let _ = writeln!(std::io::stdout(), "codex-cli {version}");
            ExitCode::SUCCESS
        }
        Some("sandbox") => sandboxed(&words),
        Some("app-server") => {
            if let Some(odd) = odd_option(&words[1..]) {
                return complain(&format!("error: unexpected argument '{odd}' found"), 2);
            }
            // What it does on SIGHUP was not measured; it is taken to be what it does on SIGINT.
            let core = match Core::new(&words, OnSignal { term: 0, hup: None, int_is_input: false }) {
                Ok(core) => core,
                Err(code) => return code,
            };
            Engine::new(core).serve()
        }
        Some(other) => complain(&format!("error: unrecognized subcommand '{other}'"), 2),
        None => complain("Error: stdin is not a terminal", 1),
    }
}

/// The first option of `app-server` that is not known, or lacks its value.
fn odd_option(words: &[String]) -> Option<&str> {
    let mut words = words.iter();
    while let Some(word) = words.next() {
        match word.as_str() {
            "-c" | "--config" | "--enable" | "--disable" | "--listen" if words.next().is_some() => {}
            "--strict-config" => {}
            odd => return Some(odd),
        }
    }
    None
}

/// Whether no sandbox can be made, as the test wants it.
fn sandbox_is_broken() -> bool {
    env::var_os("FAKE_ENGINE_SANDBOX").is_some_and(|value| value == "broken")
}

/// `sandbox [options] -- COMMAND`: runs it and passes its code on.
fn sandboxed(words: &[String]) -> ExitCode {
    if sandbox_is_broken() {
        return complain(NO_SANDBOX, 1);
    }
    let at = words.iter().position(|word| word == "--").map_or(1, |at| at + 1);
    let Some((program, rest)) = words.get(at..).and_then(<[String]>::split_first) else {
        return complain("error: no command", 2);
    };
    match Command::new(program).args(rest).status() {
        Ok(status) => ExitCode::from(u8::try_from(exit_code(status)).unwrap_or(1)),
        Err(problem) => complain(&format!("{program}: {problem}"), 127),
    }
}

/// A new id, in the order of time.
fn new_id() -> String {
    uuid::Uuid::now_v7().to_string()
}

impl Dialect for Engine {
    fn core(&self) -> &Core {
        &self.core
    }

    fn core_mut(&mut self) -> &mut Core {
        &mut self.core
    }

    fn line(&mut self, line: &[u8]) -> Result<(), Stop> {
        let Ok(message) = serde_json::from_slice::<Value>(line) else {
            // The real one tells its log and goes on.
            let start: String = String::from_utf8_lossy(line).chars().take(200).collect();
            let _ = writeln!(std::io::stderr(), "failed to deserialize JSON-RPC message: {start}");
            return Ok(());
        };
        match (message["method"].as_str(), &message["id"]) {
            (Some(_), Value::Null) => Ok(()),
            (Some(method), id) => self.request(method, id, &message["params"]),
            (None, id) => {
                if let Some(id) = id.as_u64() {
                    self.answers.insert(id, message.clone());
                }
                Ok(())
            }
        }
    }

    fn at_eof(&mut self) -> Result<(), Stop> {
        if self.core.ignore_eof {
            return Ok(());
        }
        let exit = std::mem::take(&mut self.core.file.exit);
        self.outside_of_turns(&exit);
        self.core.shared.kill_tools();
        self.core.out.flush();
        self.core.shared.exit(0)
    }

    /// It dies of SIGINT before this is asked.
    fn interrupted(&mut self) -> Result<(), Stop> {
        Ok(())
    }

    fn stop_saving(&mut self) {
        for thread in &mut self.threads {
            thread.rollout.saves = false;
        }
    }

    fn tool_ended(&mut self, pid: u32) {
        self.background_ended(pid);
    }
}

impl Engine {
    fn new(core: Core) -> Self {
        let home = env::var_os("CODEX_HOME").map(PathBuf::from);
        let user = || PathBuf::from(env::var_os("HOME").unwrap_or_else(|| "/".into())).join(".codex");
        Self {
            core,
            home: home.unwrap_or_else(user),
            client: None,
            opted_out: Vec::new(),
            threads: Vec::new(),
            accepted: VecDeque::new(),
            running: None,
            steers: VecDeque::new(),
            next_request: 0,
            answers: HashMap::new(),
            asking: None,
            background: Vec::new(),
        }
    }

    fn serve(mut self) -> ExitCode {
        let start = std::mem::take(&mut self.core.file.start);
        self.outside_of_turns(&start);
        self.core.read_stdin();
        loop {
            while let Some(accepted) = self.accepted.pop_front() {
                self.turn(accepted);
            }
            match self.core.next() {
                Some(input) => drop(self.take_in(input)),
                None => return ExitCode::FAILURE,
            }
        }
    }

    /// A line that is sent at once.
    fn send(&mut self, line: &Value) {
        self.core.out.line(line);
        self.core.out.flush();
    }

    /// A notification, unless the client does not want it.
    fn notify(&mut self, method: &str, params: Value) {
        if !self.opted_out.iter().any(|unwanted| unwanted == method) {
            let line = rpc::notification(method, params);
            self.core.out.line(&line);
        }
    }
}
