//! Claude Code's warm stream-json dialect: reads lines, keeps the queue, answers control requests, runs turns.

pub mod args;
mod lines;
mod session;
mod tool_calls;
mod turn;

use std::{
    collections::{HashMap, VecDeque},
    env,
    ffi::OsString,
    io::Write as _,
    process::ExitCode,
};

use serde_json::{Value, json};

use self::{
    args::Args,
    lines::Usage,
    session::{Refused, Session, last_text, new_id},
};
use crate::{
    core::{Core, Dialect, Stop, complain},
    shared::OnSignal,
};

/// A message that waits for its turn.
#[derive(Debug)]
pub(crate) struct Message {
    /// The uuid it came with.
    pub(crate) uuid: Option<String>,
    /// The line as it came.
    pub(crate) line: Value,
    /// Its last text.
    pub(crate) text: String,
}

/// The engine.
#[derive(Debug)]
pub(crate) struct Engine {
    core: Core,
    args: Args,
    session: Session,
    queue: VecDeque<Message>,
    answers: HashMap<String, Value>,
    /// The permission request that waits for its answer.
    pending: Option<String>,
    usage: Usage,
    by_model: Value,
    model: String,
    permission_mode: String,
    results: u64,
    running: bool,
    /// To be exited with this code when the turn is over.
    leave: Option<i32>,
    failed: bool,
}

/// Runs the engine with these arguments (without the program's name) to its end.
pub(crate) fn run(arguments: Vec<OsString>) -> ExitCode {
    let words: Vec<String> = arguments.into_iter().map(|word| word.to_string_lossy().into_owned()).collect();
    let args = match Args::parse(&words) {
        Ok(args) => args,
        Err(problem) => return complain(&problem, 1),
    };
    if args.version {
        let version = env::var("FAKE_ENGINE_VERSION").unwrap_or_else(|_| lines::VERSION.to_owned());
        let _ = writeln!(std::io::stdout(), "{version} (Claude Code)");
        return ExitCode::SUCCESS;
    }
    if args.value("--output-format") == Some("stream-json") && !args.has("--verbose") {
        return complain("Error: When using --print, --output-format=stream-json requires --verbose", 1);
    }
    let core = match Core::new(&words, OnSignal { term: 143, hup: Some(129), int_is_input: true }) {
        Ok(core) => core,
        Err(code) => return code,
    };
    let session = match Session::open(&args) {
        Ok(session) => session,
        Err(Refused::Usage(problem)) => return complain(&problem, 1),
        Err(Refused::Resume { id, message }) => {
            let mut out = core.out;
            out.line(&lines::no_session(&id, &message));
            out.flush();
            return complain(&message, 1);
        }
    };
    Engine::new(core, args, session).serve()
}

impl Dialect for Engine {
    fn core(&self) -> &Core {
        &self.core
    }

    fn core_mut(&mut self) -> &mut Core {
        &mut self.core
    }

    fn at_eof(&mut self) -> Result<(), Stop> {
        Ok(())
    }

    fn interrupted(&mut self) -> Result<(), Stop> {
        self.leave = Some(0);
        if self.running { Err(Stop::Interrupted) } else { Ok(()) }
    }

    fn stop_saving(&mut self) {
        self.session.saves = false;
    }

    fn line(&mut self, line: &[u8]) -> Result<(), Stop> {
        if line.iter().all(u8::is_ascii_whitespace) {
            return Ok(());
        }
        let Ok(value) = serde_json::from_slice::<Value>(line) else { self.malformed(line) };
        match value["type"].as_str() {
            Some("user") if value["message"].is_object() => {
                self.user_line(value);
                Ok(())
            }
            Some("user") => self.malformed(line),
            Some("control_request") => self.control(&value),
            Some("control_response") => {
                let response = &value["response"];
                if let Some(id) = response["request_id"].as_str() {
                    self.answers.insert(id.to_owned(), response["response"].clone());
                    if self.args.has("--replay-user-messages") && self.pending.as_deref() == Some(id) {
                        self.send(&value);
                    }
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }
}

impl Engine {
    fn new(core: Core, args: Args, session: Session) -> Self {
        let bypass = args.has("--dangerously-skip-permissions").then_some("bypassPermissions");
        let permission_mode =
            bypass.or_else(|| args.value("--permission-mode")).unwrap_or("default").to_owned();
        Self {
            core,
            model: args.value("--model").unwrap_or("claude-fake-1").to_owned(),
            by_model: session.costs.clone(),
            permission_mode,
            args,
            session,
            queue: VecDeque::new(),
            answers: HashMap::new(),
            pending: None,
            usage: Usage::USUAL,
            results: 0,
            running: false,
            leave: None,
            failed: false,
        }
    }

    fn serve(mut self) -> ExitCode {
        let start = std::mem::take(&mut self.core.file.start);
        self.outside_of_turns(&start);
        if self.args.warm() {
            self.core.read_stdin();
        } else if let Some(prompt) = self.args.prompt.clone() {
            let line = json!({"type": "user", "message": {"role": "user", "content": prompt}});
            self.queue.push_back(Message { uuid: None, text: prompt, line });
            self.core.eof = true;
        } else {
            return complain(
                "Error: Input must be provided either through stdin or as a prompt argument when using --print",
                1,
            );
        }
        loop {
            while let Some(message) = self.queue.pop_front() {
                self.turn(message);
                if let Some(code) = self.leave {
                    self.finish(code);
                }
            }
            if self.core.eof && !self.core.ignore_eof {
                let exit = std::mem::take(&mut self.core.file.exit);
                self.outside_of_turns(&exit);
                self.finish(i32::from(self.failed));
            }
            match self.core.next() {
                // Outside of turns an interrupt finds nothing to end.
                Some(input) => drop(self.take_in(input)),
                None => self.finish(1),
            }
            if let Some(code) = self.leave {
                self.finish(code);
            }
        }
    }

    /// A graceful end.
    fn finish(&mut self, code: i32) -> ! {
        let by_model = self.by_model.clone();
        self.session.save_costs(&by_model);
        self.core.out.flush();
        self.core.shared.exit(code)
    }

    fn send(&mut self, line: &Value) {
        self.core.out.line(line);
        self.core.out.flush();
    }

    fn malformed(&self, line: &[u8]) -> ! {
        let start: String = String::from_utf8_lossy(line).chars().take(200).collect();
        let _ = writeln!(std::io::stderr(), "Error parsing streaming input line: {start}");
        self.core.shared.exit(1)
    }

    fn user_line(&mut self, line: Value) {
        let uuid = line["uuid"].as_str().map(str::to_owned);
        let id = self.session.id.clone();
        if let Some(uuid) = &uuid {
            if !self.session.used.insert(uuid.clone()) {
                self.used_before(&line, uuid);
                return;
            }
            if !self.running && self.queue.is_empty() {
                self.state("running");
            }
            let queued = lines::lifecycle(&id, uuid, "queued");
            self.send(&queued);
        }
        let text = last_text(&line["message"]).unwrap_or_default();
        self.queue.push_back(Message { uuid, line, text });
    }

    /// A used uuid gets no turn and no result, but an echo if echoes are wanted. Without echoes, or if an earlier process
    /// took it, its command is told to be completed; with them, the state is told again.
    fn used_before(&mut self, line: &Value, uuid: &str) {
        self.echo(line, uuid);
        if self.session.resumed.contains(uuid) || !self.args.has("--replay-user-messages") {
            let done = lines::lifecycle(&self.session.id, uuid, "completed");
            self.send(&done);
        } else if !self.running {
            self.state("idle");
        }
    }

    /// Repeats a user line, if that is asked for.
    fn echo(&mut self, line: &Value, uuid: &str) {
        if self.args.has("--replay-user-messages") && self.args.warm() {
            let mut echo = json!({"type": "user", "message": line["message"]});
            let more = json!({
                "session_id": self.session.id, "parent_tool_use_id": null, "uuid": uuid, "isReplay": true,
            });
            lines::merge(&mut echo, &more);
            self.send(&echo);
        }
    }

    /// Tells the session's state, if that is asked for.
    fn state(&mut self, state: &str) {
        if env::var_os("CLAUDE_CODE_EMIT_SESSION_STATE_EVENTS").is_some_and(|value| value == "1") {
            let line = lines::system(&self.session.id, "session_state_changed", &json!({"state": state}));
            self.send(&line);
        }
    }

    fn control(&mut self, request: &Value) -> Result<(), Stop> {
        let body = &request["request"];
        let subtype = body["subtype"].as_str().unwrap_or_default();
        let response = match subtype {
            "initialize" => {
                let markers = std::mem::take(&mut self.core.file.initialize);
                self.outside_of_turns(&markers);
                let state = if self.running { "running" } else { "idle" };
                lines::initialize(&self.model, &self.permission_mode, state)
            }
            "interrupt" => return self.interrupt(request),
            "cancel_async_message" => {
                let uuid = body["message_uuid"].as_str().unwrap_or_default();
                json!({"cancelled": self.drop_queued(|message| message.uuid.as_deref() == Some(uuid))})
            }
            "set_model" => {
                body["model"].as_str().unwrap_or("claude-fake-1").clone_into(&mut self.model);
                json!({"model": self.model})
            }
            "set_permission_mode" => {
                body["mode"].as_str().unwrap_or("default").clone_into(&mut self.permission_mode);
                json!({"mode": self.permission_mode})
            }
            "apply_flag_settings" => {
                if let Some(model) = body["settings"]["model"].as_str() {
                    model.clone_into(&mut self.model);
                }
                json!({})
            }
            "set_max_thinking_tokens" | "get_usage" | "get_session_cost" | "mcp_status" => json!({}),
            "get_binary_version" => json!({"version": lines::VERSION}),
            "end_session" => {
                self.leave = Some(0);
                let answer = lines::answer(request, &json!({}));
                self.send(&answer);
                return if self.running { Err(Stop::Interrupted) } else { Ok(()) };
            }
            unknown => {
                let refusal = lines::refusal(request, unknown);
                self.send(&refusal);
                return Ok(());
            }
        };
        let answer = lines::answer(request, &response);
        self.send(&answer);
        Ok(())
    }

    fn interrupt(&mut self, request: &Value) -> Result<(), Stop> {
        if self.core.ignore_interrupt {
            return Ok(());
        }
        if request["request"]["cancel_queued"] == true {
            self.drop_queued(|_| true);
        }
        if let Some(pending) = self.pending.take() {
            let line = json!({"type": "control_cancel_request", "request_id": pending});
            self.send(&line);
        }
        let queued: Vec<_> = self.queue.iter().filter_map(|message| message.uuid.clone()).collect();
        let answer = lines::answer(request, &json!({"still_queued": queued}));
        self.send(&answer);
        if self.running { Err(Stop::Interrupted) } else { Ok(()) }
    }

    /// Drops waiting messages; answers whether there were any.
    fn drop_queued(&mut self, which: impl Fn(&Message) -> bool) -> bool {
        let (gone, kept): (VecDeque<_>, VecDeque<_>) = self.queue.drain(..).partition(which);
        self.queue = kept;
        let id = self.session.id.clone();
        for uuid in gone.iter().filter_map(|message| message.uuid.as_deref()) {
            let line = lines::lifecycle(&id, uuid, "cancelled");
            self.send(&line);
        }
        !gone.is_empty()
    }

    /// Asks for permission and waits; the answer, or `None` if stdin is at its end.
    fn ask(&mut self, tool: &str, input: &Value, tool_id: &str) -> Result<Option<Value>, Stop> {
        let id = new_id();
        let line = json!({"type": "control_request", "request_id": id, "request": {
            "subtype": "can_use_tool", "tool_name": tool, "display_name": tool, "input": input,
            "permission_suggestions": [], "tool_use_id": tool_id,
        }});
        self.state("requires_action");
        self.send(&line);
        self.pending = Some(id.clone());
        let waited = self.wait_until(None, |engine| engine.answers.contains_key(&id) || engine.core.eof);
        self.pending = None;
        self.state("running");
        waited?;
        Ok(self.answers.remove(&id))
    }
}
