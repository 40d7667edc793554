//! What every dialect is built on: the inputs that come while a script runs, and the waiting for them.

use std::{
    collections::HashMap,
    env,
    fs::File,
    io,
    io::Write as _,
    process::{ExitCode, ExitStatus},
    sync::{
        Arc,
        atomic::Ordering,
        mpsc::{self, Receiver, RecvTimeoutError, SyncSender},
    },
    thread,
    time::{Duration, Instant},
};

use serde_json::json;

use crate::{
    faults,
    output::Out,
    script::{Marker, ScriptFile},
    shared::{self, INPUTS, Input, OnSignal, Shared},
    tools,
};

/// Why a turn, or the waiting in it, ends early.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Stop {
    /// An interrupt.
    Interrupted,
    /// The script wants no result.
    NoResult,
    /// A failure with this HTTP status and sentence.
    Failed(u64, String),
    /// A denied permission that ends the turn.
    Denied,
    /// A message came that the model shall hear at once: what it was saying is thrown away.
    Steered,
}

/// A script that cannot be obeyed.
pub(crate) fn bad(problem: String) -> Stop {
    Stop::Failed(400, format!("fake-engine: {problem}"))
}

/// The system did not do what a script asks for.
pub(crate) fn system_failure(what: &str, problem: &dyn std::fmt::Display) -> Stop {
    Stop::Failed(500, format!("fake-engine: {what}: {problem}"))
}

/// The part of an engine that has no dialect.
#[derive(Debug)]
pub(crate) struct Core {
    pub(crate) out: Out,
    pub(crate) shared: Arc<Shared>,
    pub(crate) file: ScriptFile,
    inputs: SyncSender<Input>,
    received: Receiver<Input>,
    /// Tools that have ended, by their pid, until somebody takes the status.
    pub(crate) ended: HashMap<u32, io::Result<ExitStatus>>,
    /// Stdin is at its end.
    pub(crate) eof: bool,
    pub(crate) ignore_interrupt: bool,
    pub(crate) ignore_eof: bool,
}

impl Core {
    /// Reads the script file, opens the log, and starts to listen to signals. `words` are the arguments.
    ///
    /// # Errors
    /// The exit code, if the script file is no good; the problem has been told then.
    pub(crate) fn new(words: &[String], on: OnSignal) -> Result<Self, ExitCode> {
        let file = read_script_file().map_err(|problem| complain(&format!("fake-engine: {problem}"), 2))?;
        let signals = shared::block_signals();
        let shared = Shared::new(env::var_os("FAKE_ENGINE_LOG").as_deref());
        shared.log("start", json!(words));
        let (inputs, received) = mpsc::sync_channel(INPUTS);
        shared::watch_signals(Arc::clone(&shared), signals, inputs.clone(), on);
        Ok(Self {
            out: Out::new(),
            shared,
            file,
            inputs,
            received,
            ended: HashMap::new(),
            eof: false,
            ignore_interrupt: false,
            ignore_eof: false,
        })
    }

    /// Starts to read stdin.
    pub(crate) fn read_stdin(&self) {
        shared::read_stdin(Arc::clone(&self.shared), self.inputs.clone());
    }

    /// Starts a shell command: its pid, and the file that takes what it says. Its end becomes an input; until then its
    /// group is killed with the engine.
    pub(crate) fn start_command(
        &self,
        command: &str,
        environment: &[(&str, String)],
    ) -> io::Result<(u32, File)> {
        let (mut child, output) = self.shared.start_tool(|| tools::bash(command, environment))?;
        let pid = child.id();
        let tell = self.inputs.clone();
        thread::spawn(move || {
            let status = child.wait();
            let _ = tell.send(Input::ToolEnded(pid, status));
        });
        Ok((pid, output))
    }

    /// The next input, for a dialect that waits outside of turns.
    pub(crate) fn next(&self) -> Option<Input> {
        self.received.recv().ok()
    }
}

/// Says a sentence on stderr; answers the code to exit with.
pub(crate) fn complain(sentence: &str, code: u8) -> ExitCode {
    let _ = writeln!(io::stderr(), "{sentence}");
    ExitCode::from(code)
}

fn read_script_file() -> Result<ScriptFile, String> {
    let Some(path) = env::var_os("FAKE_ENGINE_SCRIPT") else { return Ok(ScriptFile::default()) };
    let text =
        std::fs::read_to_string(&path).map_err(|problem| format!("{}: {problem}", path.to_string_lossy()))?;
    ScriptFile::parse(&text)
}

/// An engine of some dialect.
pub(crate) trait Dialect: Sized {
    /// What it is built on.
    fn core(&self) -> &Core;

    /// What it is built on.
    fn core_mut(&mut self) -> &mut Core;

    /// A line of stdin came.
    fn line(&mut self, line: &[u8]) -> Result<(), Stop>;

    /// Stdin is at its end; [`Core::eof`] says so already.
    fn at_eof(&mut self) -> Result<(), Stop>;

    /// SIGINT came and is not ignored.
    fn interrupted(&mut self) -> Result<(), Stop>;

    /// From here on nothing is written to the session's file.
    fn stop_saving(&mut self);

    /// The tool with this pid has ended; its status is in [`Core::ended`].
    fn tool_ended(&mut self, _pid: u32) {}

    /// Takes in one input.
    fn take_in(&mut self, input: Input) -> Result<(), Stop> {
        match input {
            Input::Line(line) => self.line(&line),
            Input::Eof => {
                self.core_mut().eof = true;
                self.at_eof()
            }
            Input::Interrupt => self.interrupted(),
            Input::ToolEnded(pid, status) => {
                while self.core().shared.ending.load(Ordering::SeqCst) {
                    // Killed with the process, which will be gone before anything could be told of it.
                    thread::park();
                }
                self.core().shared.tool_over(pid);
                self.core_mut().ended.insert(pid, status);
                self.tool_ended(pid);
                Ok(())
            }
        }
    }

    /// Takes in what has come, without waiting.
    fn poll(&mut self) -> Result<(), Stop> {
        while let Ok(input) = self.core().received.try_recv() {
            self.take_in(input)?;
        }
        Ok(())
    }

    /// Waits until `done` says so or the time is over; answers whether it was done.
    fn wait_until(&mut self, limit: Option<Duration>, done: impl Fn(&Self) -> bool) -> Result<bool, Stop> {
        let until = limit.map(|limit| Instant::now() + limit);
        loop {
            if done(self) {
                return Ok(true);
            }
            let left = until
                .map_or(Duration::from_secs(3600), |until| until.saturating_duration_since(Instant::now()));
            match self.core().received.recv_timeout(left) {
                Ok(input) => self.take_in(input)?,
                Err(RecvTimeoutError::Timeout) if until.is_none() => {}
                Err(_) => return Ok(done(self)),
            }
        }
    }

    /// Obeys a marker that needs no turn.
    fn plain(&mut self, marker: &Marker) -> Result<(), Stop> {
        faults::plain(self, marker)
    }

    /// Obeys markers where there is no turn. What needs one ends the process with code 2.
    fn outside_of_turns(&mut self, markers: &[Marker]) {
        for marker in markers {
            if let Err(problem) = self.plain(marker) {
                let _ = writeln!(io::stderr(), "fake-engine: {problem:?}");
                self.core().shared.exit(2);
            }
            self.core_mut().out.flush();
        }
    }

    /// Ignores from here on what the payload names.
    fn ignore(&mut self, what: &str) -> Result<(), Stop> {
        let core = self.core_mut();
        for name in what.split(',').map(str::trim) {
            match name {
                "term" => core.shared.ignore_term.store(true, Ordering::SeqCst),
                "int" => core.shared.ignore_int.store(true, Ordering::SeqCst),
                "hup" => core.shared.ignore_hup.store(true, Ordering::SeqCst),
                "interrupt" => core.ignore_interrupt = true,
                "eof" => core.ignore_eof = true,
                odd => return Err(bad(format!("cannot ignore {odd:?}"))),
            }
        }
        Ok(())
    }
}

/// So many bytes of lines of text.
pub(crate) fn filler(bytes: u64) -> String {
    const LINE: &str = "The quick brown fox jumps over the lazy dog and runs on, on, on\n";
    let bytes = usize::try_from(bytes).unwrap_or(0);
    let mut text = LINE.repeat(bytes / LINE.len() + 1);
    text.truncate(bytes);
    text
}

/// The text with the time in front, so that a reader can tell how long it was on its way.
pub(crate) fn stamped(text: &str) -> String {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    format!("{} {text}", since.as_micros())
}
