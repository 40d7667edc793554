//! The engine: reads lines, keeps the queue, answers control requests, runs turns.

use std::{
    collections::{HashMap, VecDeque},
    env,
    ffi::OsString,
    io::Write as _,
    process::ExitCode,
    sync::{
        Arc,
        atomic::Ordering,
        mpsc::{self, Receiver, RecvTimeoutError, SyncSender},
    },
    time::{Duration, Instant},
};

use serde_json::{Value, json};

use crate::{
    args::Args,
    dialect::{self, Usage},
    output::Out,
    script::{Marker, ScriptFile},
    session::{Refused, Session, last_text, new_id},
    shared::{self, INPUTS, Input, Shared},
    tools,
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

/// Why a turn, or the waiting in it, ends early.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Stop {
    /// An interrupt.
    Interrupted,
    /// The script wants no result.
    NoResult,
    /// An API error with this status and sentence.
    Failed(u64, String),
    /// A denied permission that ends the turn.
    Denied,
}

/// The engine.
#[derive(Debug)]
pub(crate) struct Engine {
    pub(crate) args: Args,
    pub(crate) out: Out,
    pub(crate) session: Session,
    pub(crate) shared: Arc<Shared>,
    pub(crate) inputs: SyncSender<Input>,
    received: Receiver<Input>,
    pub(crate) queue: VecDeque<Message>,
    pub(crate) answers: HashMap<String, Value>,
    /// The permission request that waits for its answer.
    pub(crate) pending: Option<String>,
    pub(crate) tool_ended: Option<std::io::Result<std::process::ExitStatus>>,
    pub(crate) file: ScriptFile,
    pub(crate) usage: Usage,
    pub(crate) by_model: Value,
    pub(crate) model: String,
    pub(crate) permission_mode: String,
    pub(crate) results: u64,
    pub(crate) running: bool,
    pub(crate) ignore_interrupt: bool,
    ignore_eof: bool,
    pub(crate) eof: bool,
    /// To be exited with this code when the turn is over.
    leave: Option<i32>,
    pub(crate) failed: bool,
}

/// Runs the engine with these arguments (without the program's name) to its end.
#[must_use]
pub fn run(arguments: Vec<OsString>) -> ExitCode {
    if let Some(code) = tools::inner(&arguments) {
        return code;
    }
    let words: Vec<String> = arguments.into_iter().map(|word| word.to_string_lossy().into_owned()).collect();
    let args = match Args::parse(&words) {
        Ok(args) => args,
        Err(problem) => return complain(&problem, 1),
    };
    if args.version {
        let version = env::var("FAKE_ENGINE_VERSION").unwrap_or_else(|_| dialect::VERSION.to_owned());
        let _ = writeln!(std::io::stdout(), "{version} (Claude Code)");
        return ExitCode::SUCCESS;
    }
    if args.value("--output-format") == Some("stream-json") && !args.has("--verbose") {
        return complain("Error: When using --print, --output-format=stream-json requires --verbose", 1);
    }
    let file = match read_script_file() {
        Ok(file) => file,
        Err(problem) => return complain(&format!("fake-engine: {problem}"), 2),
    };
    let signals = shared::block_signals();
    let shared = Shared::new(env::var_os("FAKE_ENGINE_LOG").as_deref());
    shared.log("start", json!(words));
    let session = match Session::open(&args) {
        Ok(session) => session,
        Err(Refused::Usage(problem)) => return complain(&problem, 1),
        Err(Refused::Resume { id, message }) => {
            let mut out = Out::new();
            out.line(&dialect::no_session(&id, &message));
            out.flush();
            return complain(&message, 1);
        }
    };
    let (inputs, received) = mpsc::sync_channel(INPUTS);
    shared::watch_signals(Arc::clone(&shared), signals, inputs.clone());
    Engine::new(args, session, shared, inputs, received, file).serve()
}

fn complain(sentence: &str, code: u8) -> ExitCode {
    let _ = writeln!(std::io::stderr(), "{sentence}");
    ExitCode::from(code)
}

fn read_script_file() -> Result<ScriptFile, String> {
    let Some(path) = env::var_os("FAKE_ENGINE_SCRIPT") else { return Ok(ScriptFile::default()) };
    let text =
        std::fs::read_to_string(&path).map_err(|problem| format!("{}: {problem}", path.to_string_lossy()))?;
    ScriptFile::parse(&text)
}

impl Engine {
    fn new(
        args: Args,
        session: Session,
        shared: Arc<Shared>,
        inputs: SyncSender<Input>,
        received: Receiver<Input>,
        file: ScriptFile,
    ) -> Self {
        let bypass = args.has("--dangerously-skip-permissions").then_some("bypassPermissions");
        let permission_mode =
            bypass.or_else(|| args.value("--permission-mode")).unwrap_or("default").to_owned();
        Self {
            model: args.value("--model").unwrap_or("claude-fake-1").to_owned(),
            by_model: session.costs.clone(),
            permission_mode,
            args,
            out: Out::new(),
            session,
            shared,
            inputs,
            received,
            queue: VecDeque::new(),
            answers: HashMap::new(),
            pending: None,
            tool_ended: None,
            file,
            usage: Usage::USUAL,
            results: 0,
            running: false,
            ignore_interrupt: false,
            ignore_eof: false,
            eof: false,
            leave: None,
            failed: false,
        }
    }

    fn serve(mut self) -> ExitCode {
        let start = std::mem::take(&mut self.file.start);
        self.outside_of_turns(&start);
        if self.args.warm() {
            shared::read_stdin(Arc::clone(&self.shared), self.inputs.clone());
        } else if let Some(prompt) = self.args.prompt.clone() {
            let line = json!({"type": "user", "message": {"role": "user", "content": prompt}});
            self.queue.push_back(Message { uuid: None, text: prompt, line });
            self.eof = true;
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
            if self.eof && !self.ignore_eof {
                let exit = std::mem::take(&mut self.file.exit);
                self.outside_of_turns(&exit);
                self.finish(i32::from(self.failed));
            }
            match self.received.recv() {
                // Outside of turns an interrupt finds nothing to end.
                Ok(input) => drop(self.take_in(input)),
                Err(_) => self.finish(1),
            }
            if let Some(code) = self.leave {
                self.finish(code);
            }
        }
    }

    /// Obeys markers where there is no turn. What needs one says nothing.
    fn outside_of_turns(&mut self, markers: &[Marker]) {
        for marker in markers {
            if let Err(problem) = self.plain(marker) {
                let _ = writeln!(std::io::stderr(), "fake-engine: {problem:?}");
                self.shared.exit(2);
            }
            self.out.flush();
        }
    }

    /// A graceful end.
    fn finish(&mut self, code: i32) -> ! {
        let by_model = self.by_model.clone();
        self.session.save_costs(&by_model);
        self.out.flush();
        self.shared.exit(code)
    }

    pub(crate) fn send(&mut self, line: &Value) {
        self.out.line(line);
        self.out.flush();
    }

    /// Takes in what has come, without waiting.
    pub(crate) fn poll(&mut self) -> Result<(), Stop> {
        while let Ok(input) = self.received.try_recv() {
            self.take_in(input)?;
        }
        Ok(())
    }

    /// Waits until `done` says so or the time is over; answers whether it was done.
    pub(crate) fn wait_until(
        &mut self,
        limit: Option<Duration>,
        done: impl Fn(&Self) -> bool,
    ) -> Result<bool, Stop> {
        let until = limit.map(|limit| Instant::now() + limit);
        loop {
            if done(self) {
                return Ok(true);
            }
            let left = until
                .map_or(Duration::from_secs(3600), |until| until.saturating_duration_since(Instant::now()));
            match self.received.recv_timeout(left) {
                Ok(input) => self.take_in(input)?,
                Err(RecvTimeoutError::Timeout) if until.is_none() => {}
                Err(_) => return Ok(done(self)),
            }
        }
    }

    fn take_in(&mut self, input: Input) -> Result<(), Stop> {
        match input {
            Input::Line(line) => self.line(&line),
            Input::Eof => {
                self.eof = true;
                Ok(())
            }
            Input::Interrupt => {
                self.leave = Some(0);
                if self.running { Err(Stop::Interrupted) } else { Ok(()) }
            }
            Input::ToolEnded(status) => {
                self.tool_ended = Some(status);
                Ok(())
            }
        }
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

    fn malformed(&self, line: &[u8]) -> ! {
        let start: String = String::from_utf8_lossy(line).chars().take(200).collect();
        let _ = writeln!(std::io::stderr(), "Error parsing streaming input line: {start}");
        self.shared.exit(1)
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
            let queued = dialect::lifecycle(&id, uuid, "queued");
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
            let done = dialect::lifecycle(&self.session.id, uuid, "completed");
            self.send(&done);
        } else if !self.running {
            self.state("idle");
        }
    }

    /// Repeats a user line, if that is asked for.
    pub(crate) fn echo(&mut self, line: &Value, uuid: &str) {
        if self.args.has("--replay-user-messages") && self.args.warm() {
            let mut echo = json!({"type": "user", "message": line["message"]});
            let more = json!({
                "session_id": self.session.id, "parent_tool_use_id": null, "uuid": uuid, "isReplay": true,
            });
            dialect::merge(&mut echo, &more);
            self.send(&echo);
        }
    }

    /// Tells the session's state, if that is asked for.
    pub(crate) fn state(&mut self, state: &str) {
        if env::var_os("CLAUDE_CODE_EMIT_SESSION_STATE_EVENTS").is_some_and(|value| value == "1") {
            let line = dialect::system(&self.session.id, "session_state_changed", &json!({"state": state}));
            self.send(&line);
        }
    }

    fn control(&mut self, request: &Value) -> Result<(), Stop> {
        let body = &request["request"];
        let subtype = body["subtype"].as_str().unwrap_or_default();
        let response = match subtype {
            "initialize" => {
                let markers = std::mem::take(&mut self.file.initialize);
                self.outside_of_turns(&markers);
                let state = if self.running { "running" } else { "idle" };
                dialect::initialize(&self.model, &self.permission_mode, state)
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
            "get_binary_version" => json!({"version": dialect::VERSION}),
            "end_session" => {
                self.leave = Some(0);
                let answer = dialect::answer(request, &json!({}));
                self.send(&answer);
                return if self.running { Err(Stop::Interrupted) } else { Ok(()) };
            }
            unknown => {
                let refusal = dialect::refusal(request, unknown);
                self.send(&refusal);
                return Ok(());
            }
        };
        let answer = dialect::answer(request, &response);
        self.send(&answer);
        Ok(())
    }

    fn interrupt(&mut self, request: &Value) -> Result<(), Stop> {
        if self.ignore_interrupt {
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
        let answer = dialect::answer(request, &json!({"still_queued": queued}));
        self.send(&answer);
        if self.running { Err(Stop::Interrupted) } else { Ok(()) }
    }

    /// Drops waiting messages; answers whether there were any.
    fn drop_queued(&mut self, which: impl Fn(&Message) -> bool) -> bool {
        let (gone, kept): (VecDeque<_>, VecDeque<_>) = self.queue.drain(..).partition(which);
        self.queue = kept;
        let id = self.session.id.clone();
        for uuid in gone.iter().filter_map(|message| message.uuid.as_deref()) {
            let line = dialect::lifecycle(&id, uuid, "cancelled");
            self.send(&line);
        }
        !gone.is_empty()
    }

    /// Ignores from here on what the payload names.
    pub(crate) fn ignore(&mut self, what: &str) -> Result<(), Stop> {
        for name in what.split(',').map(str::trim) {
            match name {
                "term" => self.shared.ignore_term.store(true, Ordering::SeqCst),
                "int" => self.shared.ignore_int.store(true, Ordering::SeqCst),
                "hup" => self.shared.ignore_hup.store(true, Ordering::SeqCst),
                "interrupt" => self.ignore_interrupt = true,
                "eof" => self.ignore_eof = true,
                odd => return Err(Stop::Failed(400, format!("cannot ignore {odd:?}"))),
            }
        }
        Ok(())
    }

    /// Asks for permission and waits; the answer, or `None` if stdin is at its end.
    pub(crate) fn ask(&mut self, tool: &str, input: &Value, tool_id: &str) -> Result<Option<Value>, Stop> {
        let id = new_id();
        let line = json!({"type": "control_request", "request_id": id, "request": {
            "subtype": "can_use_tool", "tool_name": tool, "display_name": tool, "input": input,
            "permission_suggestions": [], "tool_use_id": tool_id,
        }});
        self.state("requires_action");
        self.send(&line);
        self.pending = Some(id.clone());
        let waited = self.wait_until(None, |engine| engine.answers.contains_key(&id) || engine.eof);
        self.pending = None;
        self.state("running");
        waited?;
        Ok(self.answers.remove(&id))
    }
}
