//! What the threads share: inputs, what is ignored, the running tool, the log.

use std::{
    fs::{File, OpenOptions},
    io::{self, BufRead, Write},
    os::unix::process::ExitStatusExt,
    process::{Child, ExitStatus},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
        mpsc::SyncSender,
    },
    thread,
};

use nix::{
    sys::signal::{SigSet, Signal, kill, killpg, raise},
    unistd::Pid,
};
use serde_json::{Value, json};

/// Lines of stdin read ahead: what a pipe holds beyond that waits in the pipe.
pub(crate) const INPUTS: usize = 256;

/// The longest line of stdin that is read; a longer one ends the process as a malformed one does.
const MAX_LINE: usize = 64 << 20;

/// What may happen to the engine.
#[derive(Debug)]
pub(crate) enum Input {
    /// A line of stdin, without its newline.
    Line(Vec<u8>),
    /// The end of stdin.
    Eof,
    /// SIGINT came and is not ignored.
    Interrupt,
    /// The tool with this pid has ended.
    ToolEnded(u32, io::Result<ExitStatus>),
}

/// Switches that the script turns and other threads obey.
#[derive(Debug, Default)]
pub(crate) struct Shared {
    pub(crate) ignore_term: AtomicBool,
    pub(crate) ignore_int: AtomicBool,
    pub(crate) ignore_hup: AtomicBool,
    /// Stdin is read no more.
    pub(crate) deaf: AtomicBool,
    /// A signal is ending the process: that its tools end is of no consequence any more.
    pub(crate) ending: AtomicBool,
    /// The groups of the tools that run.
    tools: Mutex<Vec<i32>>,
    log: Mutex<Option<File>>,
}

impl Shared {
    /// Opens the log, if there shall be one.
    pub(crate) fn new(log: Option<&std::ffi::OsStr>) -> Arc<Self> {
        let log = log.and_then(|path| OpenOptions::new().append(true).create(true).open(path).ok());
        Arc::new(Self { log: Mutex::new(log), ..Self::default() })
    }

    /// Adds a line to the log; one write, so that several processes may share it.
    pub(crate) fn log(&self, event: &str, detail: Value) {
        let mut log = self.log.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(file) = log.as_mut() {
            let line = json!({"pid": std::process::id(), "event": event, "detail": detail});
            let _ = file.write_all(format!("{line}\n").as_bytes());
        }
    }

    fn tools(&self) -> MutexGuard<'_, Vec<i32>> {
        self.tools.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts a tool that makes a group of its own. Whoever kills the tools meanwhile, waits for this one.
    pub(crate) fn start_tool<T>(
        &self,
        start: impl FnOnce() -> io::Result<(Child, T)>,
    ) -> io::Result<(Child, T)> {
        let mut tools = self.tools();
        let (child, more) = start()?;
        tools.extend(i32::try_from(child.id()).ok());
        Ok((child, more))
    }

    /// The tool with this pid has ended: its group is killed no more.
    pub(crate) fn tool_over(&self, pid: u32) {
        self.tools().retain(|group| u32::try_from(*group) != Ok(pid));
    }

    /// Kills all tools that run and all of their groups.
    pub(crate) fn kill_tools(&self) {
        for group in self.tools().drain(..) {
            let _ = killpg(Pid::from_raw(group), Signal::SIGKILL);
            // It may not have made its group yet.
            let _ = kill(Pid::from_raw(group), Signal::SIGKILL);
        }
    }

    /// Kills the tool with this pid and all of its group, if it runs.
    pub(crate) fn kill_tool(&self, pid: u32) {
        let group = self.tools().iter().copied().find(|group| u32::try_from(*group) == Ok(pid));
        if let Some(group) = group {
            let _ = killpg(Pid::from_raw(group), Signal::SIGKILL);
            let _ = kill(Pid::from_raw(group), Signal::SIGKILL);
        }
    }

    /// Dies by this signal, if it is one to die by.
    pub(crate) fn die(&self, signal: Signal) {
        self.log("die", json!(signal.as_str()));
        let mut set = SigSet::empty();
        set.add(signal);
        let _ = set.thread_unblock();
        // The first SIGSEGV or SIGBUS only takes the standard library's own handler away.
        for _ in 0..2 {
            let _ = raise(signal);
        }
    }

    /// Ends the process at once.
    pub(crate) fn exit(&self, code: i32) -> ! {
        self.log("exit", json!(code));
        std::process::exit(code)
    }
}

/// Blocks the signals that the engine treats itself. To be called before any thread is made.
pub(crate) fn block_signals() -> SigSet {
    let mut signals = SigSet::empty();
    for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP] {
        signals.add(signal);
    }
    let _ = signals.thread_block();
    signals
}

/// What a dialect does on a signal that is not ignored.
#[derive(Debug, Clone, Copy)]
pub(crate) struct OnSignal {
    /// The code to exit with on SIGTERM, once the tools are killed.
    pub(crate) term: i32,
    /// The same for SIGHUP; absent: it dies of it, and the tools live on.
    pub(crate) hup: Option<i32>,
    /// Whether SIGINT is an input; else it dies of it, and the tools live on.
    pub(crate) int_is_input: bool,
}

/// Starts the thread that waits for signals.
pub(crate) fn watch_signals(shared: Arc<Shared>, signals: SigSet, inputs: SyncSender<Input>, on: OnSignal) {
    thread::spawn(move || {
        while let Ok(signal) = signals.wait() {
            shared.log("signal", json!(signal.as_str()));
            let (ignored, code) = match signal {
                Signal::SIGTERM => (&shared.ignore_term, Some(on.term)),
                Signal::SIGHUP => (&shared.ignore_hup, on.hup),
                _ => (&shared.ignore_int, None),
            };
            if ignored.load(Ordering::SeqCst) {
                continue;
            }
            if let Some(code) = code {
                shared.ending.store(true, Ordering::SeqCst);
                shared.kill_tools();
                shared.exit(code);
            }
            if signal == Signal::SIGINT && on.int_is_input {
                let _ = inputs.send(Input::Interrupt);
            } else {
                shared.die(signal);
            }
        }
    });
}

/// Starts the thread that reads stdin.
pub(crate) fn read_stdin(shared: Arc<Shared>, inputs: SyncSender<Input>) {
    thread::spawn(move || {
        let mut stdin = io::stdin().lock();
        loop {
            while shared.deaf.load(Ordering::SeqCst) {
                // Nobody wakes it: deaf is for good.
                thread::park();
            }
            let mut line = Vec::new();
            let read = io::Read::take(&mut stdin, MAX_LINE as u64).read_until(b'\n', &mut line);
            if !matches!(read, Ok(1..)) {
                shared.log("eof", Value::Null);
                let _ = inputs.send(Input::Eof);
                return;
            }
            if line.last() == Some(&b'\n') {
                line.pop();
            }
            shared.log("stdin", json!(String::from_utf8_lossy(&line)));
            if inputs.send(Input::Line(line)).is_err() {
                return;
            }
        }
    });
}

/// How a tool ended, as a shell counts it.
pub(crate) fn exit_code(status: ExitStatus) -> i32 {
    status.code().or_else(|| status.signal().map(|signal| 128 + signal)).unwrap_or(1)
}
