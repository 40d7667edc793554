//! What a person types: lines of a terminal with an editor and a history, or lines of whatever standard input is.
//!
//! One thread owns standard input and takes one order at a time. While nothing is at work on a terminal it runs the
//! line editor. Everywhere else, and while an agent speaks, it reads lines as the terminal's own line discipline makes
//! them, and can be told to stop: what was typed by then and not ended stays in the terminal, where the editor finds it.

use std::io::Write as _;
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::mpsc as blocking;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcsetattr};
use rustyline::error::ReadlineError;
use rustyline::history::FileHistory;
use rustyline::{Config, Editor, ExternalPrinter};
use tokio::sync::mpsc;

use crate::exit::Exit;
use crate::status::Failure;

/// Lines that the history keeps.
const HISTORY: usize = 1_000;
/// A message has at most 1 MiB; a line that goes on beyond that is one all the same, and refused as too long.
const LONGEST_LINE: usize = 2 * 1024 * 1024;
/// Only one order is ever open, and so is one answer; one more may be on its way when an order is taken back.
const ANSWERS: usize = 4;

/// Prints lines above the editor's.
pub(super) type Printer = Box<dyn ExternalPrinter + Send>;

/// How the next line is to be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mode {
    /// With the editor, until it is ended there.
    Edit,
    /// As it comes, until [`Input::stop`].
    Plain,
}

/// What came.
#[derive(Debug)]
pub(super) enum Typed {
    /// A line, without its end.
    Line(String),
    /// Ctrl-C in the editor.
    Interrupted,
    /// The order was taken back.
    Stopped,
    /// There is no more.
    End,
    /// It cannot be read.
    Broken(String),
}

/// The thread that reads.
pub(super) struct Input {
    orders: blocking::Sender<Mode>,
    answers: mpsc::Receiver<Typed>,
    wake: UnixStream,
    /// What it was told and has not answered yet.
    open: Option<Mode>,
    can_edit: bool,
    _terminal: Option<Restore>,
}

impl Input {
    /// Starts it. `edit` is whether both ends are a terminal. The printer is there when there is an editor.
    pub(super) fn start(edit: bool, history: Option<PathBuf>) -> Result<(Self, Option<Printer>), Failure> {
        let failed = |error: String| Failure::new(Exit::Failed, format!("standard input: {error}"));
        let terminal = edit.then(Restore::new).flatten();
        let mut editor = if edit { editor(history.as_ref()).ok() } else { None };
        // A terminal that cannot do it (TERM=dumb) gets plain lines.
        let printer = editor.as_mut().and_then(|editor| editor.create_external_printer().ok());
        let editor = printer.is_some().then_some(editor).flatten();
        let can_edit = editor.is_some();
        let (orders, ordered) = blocking::channel();
        let (answer, answers) = mpsc::channel(ANSWERS);
        let (wake, woken) = UnixStream::pair().map_err(|error| failed(error.to_string()))?;
        woken.set_nonblocking(true).map_err(|error| failed(error.to_string()))?;
        let reader = Reader { editor, history, woken, rest: Vec::new(), ended: false };
        std::thread::Builder::new()
            .name("input".to_owned())
            .spawn(move || reader.run(&ordered, &answer))
            .map_err(|error| failed(error.to_string()))?;
        let input = Self { orders, answers, wake, open: None, can_edit, _terminal: terminal };
        let printer = printer.map(|printer| Box::new(printer) as Printer);
        Ok((input, printer))
    }

    /// Whether lines are edited now.
    pub(super) const fn is_editing(&self) -> bool {
        matches!(self.open, Some(Mode::Edit))
    }

    /// Whether a line is awaited.
    pub(super) const fn is_open(&self) -> bool {
        self.open.is_some()
    }

    /// Asks for a line, unless one is awaited already. Plain reading turns into editing when that is asked for; an
    /// editor is never taken away from a person.
    pub(super) fn ask(&mut self, mode: Mode) {
        let mode = if self.can_edit { mode } else { Mode::Plain };
        match self.open {
            None => {
                // The thread only ends with the process, or after it has said that there is no more.
                if self.orders.send(mode).is_ok() {
                    self.open = Some(mode);
                }
            }
            Some(Mode::Plain) if mode == Mode::Edit => self.stop(),
            Some(_) => {}
        }
    }

    /// Takes an order for a plain line back. It is answered all the same.
    pub(super) fn stop(&mut self) {
        if self.open == Some(Mode::Plain) {
            // Nothing is lost if this fails: the line is then read when it comes.
            let _ = self.wake.write_all(b"w");
        }
    }

    /// Waits for what comes. Cancellation safe.
    pub(super) async fn next(&mut self) -> Typed {
        let typed = self.answers.recv().await.unwrap_or(Typed::End);
        self.open = None;
        typed
    }
}

fn editor(history: Option<&PathBuf>) -> rustyline::Result<Editor<(), FileHistory>> {
    let config = Config::builder().max_history_size(HISTORY)?.history_ignore_space(true).build();
    let mut editor = Editor::with_config(config)?;
    if let Some(file) = history {
        // There is none at first, and one that cannot be read is no reason not to talk.
        let _ = editor.load_history(file);
    }
    Ok(editor)
}

struct Reader {
    editor: Option<Editor<(), FileHistory>>,
    history: Option<PathBuf>,
    woken: UnixStream,
    /// What was read and is no whole line yet.
    rest: Vec<u8>,
    ended: bool,
}

impl Reader {
    fn run(mut self, orders: &blocking::Receiver<Mode>, answers: &mpsc::Sender<Typed>) {
        while let Ok(mode) = orders.recv() {
            let typed = match mode {
                Mode::Edit => self.edit(),
                Mode::Plain => self.plain(),
            };
            if answers.blocking_send(typed).is_err() {
                return;
            }
        }
    }

    fn edit(&mut self) -> Typed {
        let Some(editor) = self.editor.as_mut() else { return self.plain() };
        match editor.readline("> ") {
            Ok(line) => {
                if !line.trim().is_empty() && editor.add_history_entry(line.as_str()).unwrap_or(false) {
                    self.keep_history();
                }
                Typed::Line(line)
            }
            Err(ReadlineError::Interrupted) => Typed::Interrupted,
            Err(ReadlineError::Eof) => Typed::End,
            Err(error) => Typed::Broken(error.to_string()),
        }
    }

    /// Each line at once: a terminal that is closed gives no time for it.
    fn keep_history(&mut self) {
        if let (Some(editor), Some(file)) = (self.editor.as_mut(), &self.history)
            && let Some(directory) = file.parent()
            && std::fs::create_dir_all(directory).is_ok()
        {
            // It is made for its owner alone. A full disk is no reason to stop talking.
            let _ = editor.append_history(file);
        }
    }

    fn plain(&mut self) -> Typed {
        let stdin = std::io::stdin();
        loop {
            if let Some(line) = self.line() {
                return line;
            }
            if self.ended {
                return Typed::End;
            }
            let mut fds = [
                PollFd::new(&stdin, PollFlags::IN),
                PollFd::from_borrowed_fd(self.woken.as_fd(), PollFlags::IN),
            ];
            match poll(&mut fds, None) {
                Ok(_) => {}
                Err(rustix::io::Errno::INTR) => continue,
                Err(error) => return Typed::Broken(error.to_string()),
            }
            let (typed, woken) = (!fds[0].revents().is_empty(), !fds[1].revents().is_empty());
            if woken {
                let mut ignored = [0u8; 16];
                while rustix::io::read(&self.woken, &mut ignored).is_ok_and(|count| count > 0) {}
                return Typed::Stopped;
            }
            if typed {
                let mut buffer = [0u8; 16 * 1024];
                match rustix::io::read(&stdin, &mut buffer) {
                    Ok(0) => self.ended = true,
                    Ok(count) => self.rest.extend_from_slice(&buffer[..count]),
                    Err(rustix::io::Errno::INTR) => {}
                    Err(error) => return Typed::Broken(error.to_string()),
                }
            }
        }
    }

    /// The next whole line; at the end what is left.
    fn line(&mut self) -> Option<Typed> {
        let end = self.rest.iter().position(|byte| *byte == b'\n');
        let bytes: Vec<u8> = match end {
            Some(end) => self.rest.drain(..=end).collect(),
            None if (self.ended && !self.rest.is_empty()) || self.rest.len() > LONGEST_LINE => {
                std::mem::take(&mut self.rest)
            }
            None => return None,
        };
        Some(match String::from_utf8(bytes) {
            Ok(text) => Typed::Line(text.trim_end_matches(['\n', '\r']).to_owned()),
            Err(_) => Typed::Broken("a line is not UTF-8".to_owned()),
        })
    }
}

/// Gives the terminal back as it was, also when the editor is still reading at the end.
struct Restore(Termios);

impl Restore {
    fn new() -> Option<Self> {
        tcgetattr(std::io::stdin()).ok().map(Self)
    }
}

impl Drop for Restore {
    fn drop(&mut self) {
        // A terminal that is gone needs nothing.
        let raw = tcgetattr(std::io::stdin()).is_ok_and(|now| now.local_modes != self.0.local_modes);
        if raw {
            let _ = tcsetattr(std::io::stdin(), OptionalActions::Now, &self.0);
            // The editor had asked for pasted text to be marked.
            let mut out = std::io::stdout().lock();
            let _ = out.write_all(b"\x1b[?2004l\r\n").and_then(|()| out.flush());
        }
    }
}
