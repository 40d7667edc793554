//! What the threads share: inputs, what is ignored, the running tool, the log.

use std::{
    fs::{File, OpenOptions},
    io::{self, BufRead, Write},
    os::unix::process::ExitStatusExt,
    process::ExitStatus,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicI32, Ordering},
        mpsc::SyncSender,
    },
    thread,
};

use nix::{
    sys::signal::{SigSet, Signal, kill, killpg},
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
    /// The running tool has ended.
    ToolEnded(io::Result<ExitStatus>),
}

/// Switches that the script turns and other threads obey.
#[derive(Debug, Default)]
pub(crate) struct Shared {
    pub(crate) ignore_term: AtomicBool,
    pub(crate) ignore_int: AtomicBool,
    pub(crate) ignore_hup: AtomicBool,
    /// Stdin is read no more.
    pub(crate) deaf: AtomicBool,
    /// The group of the running tool; 0 is none.
    pub(crate) tool_group: AtomicI32,
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

    /// Kills the running tool and all of its group.
    pub(crate) fn kill_tool(&self) {
        let group = self.tool_group.swap(0, Ordering::SeqCst);
        if group > 0 {
            let _ = killpg(Pid::from_raw(group), Signal::SIGKILL);
            // It may not have made its group yet.
            let _ = kill(Pid::from_raw(group), Signal::SIGKILL);
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

/// Starts the thread that waits for signals.
pub(crate) fn watch_signals(shared: Arc<Shared>, signals: SigSet, inputs: SyncSender<Input>) {
    thread::spawn(move || {
        while let Ok(signal) = signals.wait() {
            shared.log("signal", json!(signal.as_str()));
            match signal {
                Signal::SIGTERM if !shared.ignore_term.load(Ordering::SeqCst) => {
                    shared.kill_tool();
                    shared.exit(143);
                }
                Signal::SIGHUP if !shared.ignore_hup.load(Ordering::SeqCst) => {
                    shared.kill_tool();
                    shared.exit(129);
                }
                Signal::SIGINT if !shared.ignore_int.load(Ordering::SeqCst) => {
                    let _ = inputs.send(Input::Interrupt);
                }
                _ => {}
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
