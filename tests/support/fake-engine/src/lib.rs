//! An engine that speaks a real engine's dialect and obeys a script: the faults that no real engine shows on demand.
//!
//! The binary `fake-engine` is started in place of `claude` or `codex`, with the same arguments and environment:
//! with `app-server` (or `sandbox`) as its first argument it is Codex, else Claude Code. `fake-codex` is Codex whatever
//! the arguments, `--version` included. It prints what Claude Code 2.1.332 and Codex 0.171.0 were seen to print (same lines,
//! same order, fewer fields), keeps a session file where that one does, and does, in each turn, what the script says.
//!
//! # Where the script comes from
//!
//! * From the last text block of the user's message: markers `[[verb options:payload]]`, obeyed in order.
//!   Everything else in the text is ignored; a text without markers is answered `ok`.
//! * From the file that `FAKE_ENGINE_SCRIPT` names. A line `@start`, `@initialize`, `@accepted`, `@turn` or `@exit` begins a
//!   section; what follows it is markers: obeyed before anything is read, before `initialize` is answered, between a
//!   turn's acceptance and its start (Codex alone), in each turn whose text has no marker, after stdin was closed. Other
//!   lines between markers are comments.
//!
//! `verb` is lower-case letters and `_`. Options are words between blanks, `key=value` or `flag`, without `:`. The payload
//! runs to the first `]]`; with the flag `b64` it is base64 (any bytes). A malformed marker in a turn ends it with
//! an error that names it; in the file it ends the process with code 2.
//!
//! # Verbs
//!
//! | marker | what happens |
//! |---|---|
//! | `[[text:T]]` | says T; a block (Codex: an agentMessage) of its own, with a delta (Claude: if `--include-partial-messages`) |
//! | `[[thinking:T]]` | a thinking block (Codex: a reasoning item) |
//! | `[[slow chunks=N delay=MS:T]]` | one text block of N times T, MS apart (10, 100, `word `) |
//! | `[[huge bytes=N]]` | one text block of N bytes |
//! | `[[events count=N bytes=M]]` | N text blocks of M bytes (64), as fast as it can; `delta`: N deltas of one block; `clock`: each begins with its time, in microseconds since 1970, and is flushed |
//! | `[[recall]]` | says every user text of the session so far, joined by ` \| `, markers included |
//! | `[[usage in=N out=N read=N created=N]]` | token counts of each message from here on (100, 25, 20, 10); Codex tells in, read and created together as its input |
//! | `[[bash:COMMAND]]` | a command that runs (`sh -c`, in a session of its own, as those of the real ones do); Codex: `yield=MS` (10,000) is how long the model waits for it |
//! | `[[append path=FILE:LINE]]` | a Write call (Codex: a fileChange) that appends LINE and a newline to FILE with one write |
//! | `[[tool name=NAME:JSON]]` | a call of any tool (Codex: an mcpToolCall; `mcp__S__T` is the tool T of the server S), with this input, that does nothing and answers `ok` |
//! | … with the flag `ask` | asks for permission first (`can_use_tool`), unless the permission mode allows it; Codex: `requestApproval`, unless the approval policy is `never`; for `tool` a request that waits for any answer, an error included |
//! | `[[error CODE:MESSAGE]]` | ends the turn as an API error of this status; Codex: `info=NAME` is its `codexErrorInfo`, `reset=EPOCH` tells a used-up rate limit first |
//! | `[[retry status=N]]` | says `api_retry` (Codex: `error` with `willRetry`) |
//! | `[[raw:BYTES]]` | these bytes on stdout, as they are; `repeat=N` |
//! | `[[line:TEXT]]` | TEXT and a newline on stdout |
//! | `[[garbage lines=N]]` | N lines that are no JSON, with bytes that are no UTF-8 |
//! | `[[long bytes=N]]` | one line of N bytes, of an unknown type; `open`: no JSON, and without its newline |
//! | `[[split bytes=N delay=MS]]` | from here on stdout is written N bytes at a time, MS (0) apart; 0 ends it |
//! | `[[stderr:T]]`, `[[stderr bytes=N]]` | T and a newline, or N bytes in lines, on stderr |
//! | `[[pause ms=N]]` | waits; an interrupt ends the turn |
//! | `[[gate:FILE]]` | waits until FILE exists; an interrupt ends the turn |
//! | `[[socket:PATH]]` | connects to this unix socket, writes `<pid>\n`, waits for one byte or the end |
//! | `[[stall]]` | waits for ever; an interrupt ends the turn |
//! | `[[hang]]` | waits for ever, reads nothing, answers nothing |
//! | `[[deaf]]` | reads no more of stdin; the script goes on |
//! | `[[fork ms=N]]` | a child that holds stdout and stderr, in the same group, for N ms (600,000) |
//! | `[[fork detached]]` | a child in a session of its own that holds nothing; `hold`: but stdout; `pidfile=FILE` for both |
//! | `[[ignore:WHAT]]` | from here on ignores `term`, `int`, `hup`, `interrupt`, `eof` (several with commas) |
//! | `[[exit code=N]]` | ends the process at once, without a result |
//! | `[[die:SIGNAL]]` | dies by this signal (`KILL`, `SEGV`, `TERM`, …) |
//! | `[[no_result]]` | the turn ends here without a result; the process lives on |
//! | `[[busy]]` | the turn ends with its result, and the process does not say that it is idle (Claude alone) |
//! | `[[no_save]]` | from here on nothing is written to the session file |
//!
//! # As Claude Code
//!
//! `initialize`, `interrupt` (with `still_queued` and `cancel_queued`), `cancel_async_message`, `set_model`,
//! `set_permission_mode`, `apply_flag_settings`, `end_session`; `command_lifecycle`, `system/init` in every turn, the
//! replay echo, `session_state_changed`, `model_usage_since_last_result`, costs restored on resume; messages that
//! come in a turn are queued; a used uuid gives no turn, in the same process or after a resume; `--session-id` of an
//! existing session and `--resume` of a missing or broken one fail in the same words; SIGTERM ends it with 143 and kills the
//! running tool, SIGINT with 0 after an aborted result, SIGHUP with 129; a closed stdout does not end it; after the end
//! of stdin the running turn is finished.
//!
//! Not like the real one: a message that comes while a tool runs is queued, never folded into the turn; slash commands
//! and `@file` are plain text; there are no time stamps.
//!
//! # As Codex
//!
//! Requests: `initialize`, `thread/start`, `resume`, `fork`, `turns/list`, `inject_items`, `compact/start`, `unsubscribe`,
//! `loaded/list`, `backgroundTerminals/list|clean`, `turn/start`, `steer`, `interrupt`, `command/exec`, `skills/list`,
//! `model/list`; anything else is refused as unknown. As the real one does it:
//!
//! * An interrupt before `turn/started` is refused, and the turn runs to its end; after it, what the model was saying is
//!   neither completed nor counted, and a command goes on in the background until it is cleaned.
//! * `turn/start` in a running turn steers it. A steer throws away what the model was saying, which is then said anew (the
//!   marker that waits is obeyed again); in a tool it waits for the tool.
//! * A thread without a turn or an injected item is not on disk. A resume restores settings and counts, and tells the counts.
//!   One writer for each thread; unknown ids, missing and damaged rollouts are refused in the same words; broken rows
//!   are left out without a word.
//! * Under the policy `never` in a sandbox what asks is not run, and nothing is told of it.
//! * The end of stdin and SIGTERM end it at once with 0, tools killed; it dies of SIGINT, and the tools live on. No end is
//!   told of a turn that this cuts off.
//!
//! Not like the real one: turns of several threads run one after the other; there is no sandbox (with
//! `FAKE_ENGINE_SANDBOX=broken` commands that want one fail as where none can be made); no index database is made, but one that
//! is there and is none has threads refused as the real one does;
//! `$skill` is plain text; a command's output is told at its end alone; an injected text is kept and not looked at.
//!
//! # For tests
//!
//! `FAKE_ENGINE_LOG=FILE`: one JSON line for the start (pid, arguments), each line of stdin, its end, each signal, a
//! hang's begin, a turn without a result (Codex), the exit.
//! `FAKE_ENGINE_VERSION`: what `--version` says before ` (Claude Code)`, or after `codex-cli `.

mod claude;
mod codex;
mod core;
mod faults;
mod output;
pub mod script;
mod shared;
mod tools;

use std::{ffi::OsString, process::ExitCode};

pub use claude::args;

/// Runs the engine with these arguments (without the program's name) to its end: as Codex if the first one is
/// `app-server` or `sandbox`, else as Claude Code.
#[must_use]
pub fn run(arguments: Vec<OsString>) -> ExitCode {
    let codex = arguments.first().is_some_and(|first| codex::SUBCOMMANDS.iter().any(|known| first == *known));
    if codex {
        run_codex(arguments)
    } else {
        tools::inner(&arguments).unwrap_or_else(|| claude::run(arguments))
    }
}

/// Runs the engine as Codex in any case.
#[must_use]
pub fn run_codex(arguments: Vec<OsString>) -> ExitCode {
    tools::inner(&arguments).unwrap_or_else(|| codex::run(arguments))
}
