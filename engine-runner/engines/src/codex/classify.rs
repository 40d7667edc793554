//! What went wrong, from what Codex says about it.
//!
//! A failed turn carries an error whose `codexErrorInfo` is a word, or an object whose only key is one, with the
//! status of the request. The word decides; text is looked at only where the word is `other`.

use serde_json::Value;

use crate::{
    failure::{Failure, Reason},
    frame::Exit,
    limit,
    plan::OpenMode,
    stderr::{self, Tail},
    translate::OpenFailure,
    wire,
};

/// What an error says.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct TurnError {
    /// The word.
    pub(super) code: Option<String>,
    /// The status of the request behind it.
    pub(super) status: Option<u16>,
    /// The text for people.
    pub(super) message: String,
    /// More of it.
    pub(super) details: Option<String>,
}

impl TurnError {
    /// Reads a turn's error; none when there is none.
    pub(super) fn read(error: Option<&Value>) -> Option<Self> {
        let error = error.filter(|error| error.is_object())?;
        let info = error.get("codexErrorInfo");
        let (code, status) = match info {
            Some(Value::String(word)) => (Some(word.clone()), None),
            Some(Value::Object(map)) => match map.iter().next() {
                Some((word, detail)) => (Some(word.clone()), wire::status(detail, "httpStatusCode")),
                None => (None, None),
            },
            _ => (None, None),
        };
        Some(Self {
            code: code.map(|code| limit::short(&code)),
            status,
            message: limit::short(wire::text_or(error, "message", "the engine reported a failure")),
            details: wire::word(error, "additionalDetails").map(limit::short),
        })
    }
}

/// The failure of a turn. `rejected_until` is the reset time of a limit the engine said was reached.
pub(super) fn turn_failure(error: &TurnError, rejected_until: Option<i64>) -> Failure {
    let mut failure = by_code(error);
    failure.native_code = error.code.clone();
    failure.native_status = error.status;
    if failure.reason == Reason::Quota {
        failure.retry_at_unix_seconds = rejected_until;
    }
    failure
}

fn by_code(error: &TurnError) -> Failure {
    let message = &error.message;
    let away = || Failure { unavailable: true, ..Failure::new(Reason::Process, message) };
    match error.code.as_deref().unwrap_or("other") {
        "usageLimitExceeded" | "rateLimitExceeded" => Failure::new(Reason::Quota, message),
        "sessionBudgetExceeded" => Failure { retryable: false, ..Failure::new(Reason::Quota, message) },
        "serverOverloaded" | "internalServerError" | "flexUnavailable" | "policyCapacityUnavailable" => {
            away()
        }
        "contextWindowExceeded" => Failure::new(Reason::ContextTooLong, message),
        "modelNotFound" => model_not_found(message),
        "unauthorized" => Failure::new(Reason::Auth, message),
        "sandboxError" => Failure::new(Reason::Configuration, message),
        "cyberPolicy" | "bioPolicy" | "misalignmentPolicyViolation" | "inferenceHookDenied" => {
            Failure::new(Reason::OutputInvalid, message)
        }
        "tooManyDenials" => Failure::new(Reason::PermissionDenied, message),
        "badRequest" => refused_request(message),
        "httpConnectionFailed"
        | "responseStreamConnectionFailed"
        | "responseStreamDisconnected"
        | "responseTooManyFailedAttempts" => by_status(error.status, message),
        _ => by_text(message),
    }
}

/// What the status of the failed request decides; without one the service was not reached at all.
fn by_status(status: Option<u16>, message: &str) -> Failure {
    match status {
        Some(429) => Failure::new(Reason::Quota, message),
        Some(401 | 403) => Failure::new(Reason::Auth, message),
        Some(404) => model_not_found(message),
        Some(413) => Failure::new(Reason::ContextTooLong, message),
        Some(status) if (400..500).contains(&status) && status != 408 => refused_request(message),
        _ => Failure { unavailable: true, ..Failure::new(Reason::Process, message) },
    }
}

fn model_not_found(message: &str) -> Failure {
    Failure {
        what_to_do: "Correct `model` in the agent file, or ask for access to it, then retry the turn."
            .to_owned(),
        ..Failure::new(Reason::Configuration, message)
    }
}

/// The service did not like the request itself; the same request will not fare better.
fn refused_request(message: &str) -> Failure {
    Failure {
        retryable: false,
        what_to_do:
            "Read the message: the model's service refused the request itself. Change the model, the effort \
                     or the message, then send it again."
                .to_owned(),
        ..Failure::new(Reason::Process, message)
    }
}

/// The failure of a turn whose message the engine did not take, with its words on that.
pub(super) fn not_taken(error: &str) -> Failure {
    // It counts the message and the context that is given along.
    let long = error.starts_with("Input exceeds the maximum length");
    let reason = if long { Reason::ContextTooLong } else { Reason::Process };
    Failure::new(reason, limit::short(&format!("the engine did not take the message: {error}")))
}

/// The word was `other`: only the text is left.
fn by_text(message: &str) -> Failure {
    if message.starts_with("Missing environment variable") {
        return Failure::new(Reason::Auth, message);
    }
    if message.contains("Incomplete response returned") {
        let failure = Failure::new(Reason::OutputInvalid, message);
        return match message.contains("max_output_tokens") {
            true => Failure {
                what_to_do: "Ask for the work in smaller pieces, then send the message again.".to_owned(),
                ..failure
            },
            false => failure,
        };
    }
    if is_quota_text(message) {
        return Failure::new(Reason::Quota, message);
    }
    // A refused request is told by the raw body of the answer.
    let body = serde_json::from_str::<Value>(message).ok();
    if body.is_some_and(|body| body.get("error").is_some_and(Value::is_object)) {
        return refused_request(message);
    }
    Failure { unavailable: is_unavailable_text(message), ..Failure::new(Reason::Process, message) }
}

/// The failure of a process that ended without the engine's own word on the turn. `error` is the last one it told.
pub(super) fn exit_failure(exit: Exit, tail: &StderrTail, error: Option<&TurnError>) -> Failure {
    let how = match (exit.code, exit.signal) {
        (_, Some(signal)) => format!("the engine was ended by signal {signal}"),
        (Some(code), None) => format!("the engine ended with exit code {code}"),
        (None, None) => "the engine is gone, and nobody saw how it ended".to_owned(),
    };
    let mut failure = if let Some(line) = &tail.quota {
        Failure::new(Reason::Quota, line)
    } else if let Some(error) = error {
        turn_failure(error, None)
    } else if let Some(line) = &tail.configuration {
        Failure::new(Reason::Configuration, line)
    } else if tail.no_space {
        Failure::new(Reason::Storage, format!("{how}: no space was left on the disk"))
    } else {
        let message = format!("{how} before it finished the turn");
        Failure { unavailable: tail.unavailable.is_some(), ..Failure::new(Reason::Process, message) }
    };
    if exit.signal == Some(9) && failure.reason == Reason::Process {
        failure.what_to_do = Failure::KILLED.to_owned();
    }
    failure.exit_code = exit.code;
    failure.signal = exit.signal;
    failure.stderr_tail = tail.text();
    failure
}

/// Why a process that ended had not opened its session.
pub(super) fn open_exit_failure(tail: &StderrTail, exit: Exit) -> OpenFailure {
    let mut failure = exit_failure(exit, tail, None);
    if failure.reason == Reason::Process {
        failure.message = match &tail.last_line {
            Some(text) => limit::short(&format!("the engine did not open its session: {text}")),
            None => "the engine ended before it opened its session".to_owned(),
        };
        if exit.code == Some(127) || exit.code == Some(126) {
            failure = Failure { reason: Reason::EngineMissing, retryable: false, ..failure };
            Reason::EngineMissing.what_to_do().clone_into(&mut failure.what_to_do);
        }
    }
    OpenFailure { failure, retry_as: None, discard: Vec::new() }
}

/// The index of all threads, which holds the absolute path of each one's file.
const THREAD_INDEX: &str = "state_5.sqlite*";

/// Every index; the engine builds them anew from the threads' files.
const INDEXES: &str = "*.sqlite*";

/// Why a thread could not be opened, from the engine's answer.
pub(super) fn open_failure(mode: OpenMode, committed: bool, message: &str) -> OpenFailure {
    let lower = message.to_lowercase();
    let failed = |reason, retry_as, discard: &[&str]| OpenFailure {
        failure: Failure::new(reason, message),
        retry_as,
        discard: discard.iter().map(|name| (*name).to_owned()).collect(),
    };
    let index_broken = ["file is not a database", "disk image is malformed", "list_turns is not supported"]
        .iter()
        .any(|text| lower.contains(text));
    if index_broken {
        return failed(Reason::Process, Some(mode), &[INDEXES]);
    }
    if lower.contains("permission denied") || lower.contains("no space left") || lower.contains("os error 28")
    {
        return failed(Reason::Storage, None, &[]);
    }
    if mode == OpenMode::Start {
        return failed(Reason::Process, None, &[]);
    }
    if lower.contains("already has an active writer") {
        let mut failed = failed(Reason::Process, None, &[]);
        failed.failure.native_code = Some("active_writer".to_owned());
        "End the other process that has this session open, then retry the turn."
            .clone_into(&mut failed.failure.what_to_do);
        return failed;
    }
    if lower.contains("no rollout found") {
        // Before its first turn a thread is nowhere: nothing was lost then. After it the file may well be there
        // and only the index point to another place, from which the home was brought here.
        return match committed {
            false => failed(Reason::SessionUnusable, Some(OpenMode::Start), &[]),
            true => failed(Reason::SessionUnusable, Some(OpenMode::Resume), &[THREAD_INDEX]),
        };
    }
    let about_thread = ["failed to read thread", "failed to read session metadata", "invalid session id"];
    if about_thread.iter().any(|text| lower.contains(text)) {
        return failed(Reason::SessionUnusable, None, &[]);
    }
    failed(Reason::Process, None, &[])
}

/// The thread was resumed from a file outside the home: the index still points to where the home was before, and what
/// is said now would be written there.
pub(super) fn elsewhere(path: &str) -> OpenFailure {
    let message = format!("the engine resumed the session from {path}, which is not in its home");
    OpenFailure {
        failure: Failure::new(Reason::SessionUnusable, message),
        retry_as: Some(OpenMode::Resume),
        discard: vec![THREAD_INDEX.to_owned()],
    }
}

/// Whether a text reports a usage or rate limit.
pub(super) fn is_quota_text(text: &str) -> bool {
    const WORDS: [&str; 8] = [
        "usage limit",
        "rate limit",
        "rate_limit",
        "429 too many requests",
        "quota exceeded",
        "insufficient_quota",
        "hit your limit",
        "upgrade to plus",
    ];
    let text = text.to_lowercase();
    !is_retry_text(&text) && WORDS.iter().any(|word| text.contains(word))
}

/// Whether a text reports that the service is away.
pub(super) fn is_unavailable_text(text: &str) -> bool {
    const WORDS: [&str; 13] = [
        "stream disconnected",
        "idle timeout waiting for",
        "error sending request",
        "connection refused",
        "connection reset",
        "connection failed",
        "timed out",
        "at capacity",
        "overloaded",
        "internal server error",
        "service unavailable",
        "bad gateway",
        "gateway timeout",
    ];
    let text = text.to_lowercase();
    !is_retry_text(&text) && WORDS.iter().any(|word| text.contains(word))
}

fn is_retry_text(lower: &str) -> bool {
    const WORDS: [&str; 5] =
        ["retrying", "will retry", "retry attempt", "reconnecting", "waiting for network"];
    WORDS.iter().any(|word| lower.contains(word))
}

/// The end of standard error, and the first line of each kind that matters.
#[derive(Debug, Clone, Default)]
pub(super) struct StderrTail {
    tail: Tail,
    quota: Option<String>,
    unavailable: Option<String>,
    configuration: Option<String>,
    last_line: Option<String>,
    no_space: bool,
}

impl StderrTail {
    /// Takes a chunk, cut anywhere.
    pub(super) fn take(&mut self, chunk: &[u8]) {
        let mut tail = std::mem::take(&mut self.tail);
        tail.take(chunk, &mut |text| self.line(text));
        self.tail = tail;
    }

    /// Takes what is left without a line end.
    pub(super) fn end_line(&mut self) {
        let mut tail = std::mem::take(&mut self.tail);
        tail.end_line(&mut |text| self.line(text));
        self.tail = tail;
    }

    fn line(&mut self, text: &str) {
        // Noise that every start prints.
        if text.starts_with("WARNING: proceeding") || text.contains("could not find bubblewrap on PATH") {
            return;
        }
        stderr::keep_first(&mut self.quota, is_quota_text(text), text);
        stderr::keep_first(&mut self.unavailable, is_unavailable_text(text), text);
        let configuration = text.contains("Error loading config")
            || text.contains("unexpected argument")
            || text.contains("Error parsing -c overrides")
            || text.contains("invalid value");
        stderr::keep_first(&mut self.configuration, configuration, text);
        self.no_space |= text.contains("No space left on device");
        self.last_line = Some(limit::short(text));
    }

    fn text(&self) -> String {
        self.tail.text()
    }
}
