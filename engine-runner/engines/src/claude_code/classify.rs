//! What went wrong, from what Claude Code says about it.
//!
//! An API failure arrives as a result with subtype `success` and `is_error`, after a synthetic assistant line that
//! names the error. The names decide; text is looked at only where there are none. Text about limits or outages
//! counts only when the turn then fails, and notices of retries never do.

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

/// What a synthetic assistant line says about a failed request.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct ApiError {
    /// `error`: authentication_failed, rate_limit, ...
    pub(super) error: String,
    /// `api_error`: the finer name, where there is one.
    pub(super) kind: Option<String>,
    /// The status of the request.
    pub(super) status: Option<u16>,
    /// The API's own name of the error.
    pub(super) api_type: Option<String>,
    /// The text for people.
    pub(super) text: String,
    /// When the limit resets, in seconds since 1970.
    pub(super) resets_at: Option<i64>,
    /// The reply was cut because the context was full.
    pub(super) context_window: bool,
}

impl ApiError {
    /// Reads a synthetic assistant line.
    pub(super) fn read(line: &Value, text: &str) -> Self {
        let params = line.get("api_error_params");
        let limits = params.and_then(|params| params.get("rate_limit_info"));
        Self {
            error: wire::text_or(line, "error", "unknown").to_owned(),
            kind: wire::word(line, "api_error").map(str::to_owned),
            status: wire::status(line, "api_error_status"),
            api_type: wire::word(line, "api_error_type").map(str::to_owned),
            text: text.to_owned(),
            resets_at: limits.and_then(|info| info.get("resetsAt")).and_then(Value::as_i64),
            context_window: params.and_then(|params| wire::word(params, "cut")) == Some("context_window"),
        }
    }
}

/// What a result line says.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct ResultFacts {
    pub(super) is_error: bool,
    pub(super) subtype: String,
    pub(super) terminal_reason: Option<String>,
    pub(super) stop_reason: Option<String>,
    pub(super) status: Option<u16>,
    pub(super) errors: Vec<String>,
    pub(super) text: Option<String>,
    /// The synthetic line before it.
    pub(super) api: Option<ApiError>,
}

impl ResultFacts {
    pub(super) fn read(line: &Value) -> Self {
        let subtype = wire::text_or(line, "subtype", "").to_owned();
        Self {
            // A result that is not "success" and forgot to say so is an error as well.
            is_error: wire::flag(line, "is_error") || subtype.starts_with("error"),
            subtype,
            terminal_reason: wire::word(line, "terminal_reason").map(str::to_owned),
            stop_reason: wire::word(line, "stop_reason").map(str::to_owned),
            status: wire::status(line, "api_error_status"),
            errors: wire::list(line, "errors")
                .iter()
                .filter_map(Value::as_str)
                .take(20)
                .map(limit::short)
                .collect(),
            text: wire::text(line, "result").map(str::to_owned),
            api: None,
        }
    }

    /// The engine stopped because it was told to.
    pub(super) fn aborted(&self) -> bool {
        self.is_error && self.terminal_reason.as_deref().is_some_and(|reason| reason.starts_with("aborted_"))
    }

    fn message(&self) -> String {
        let own = self.api.as_ref().map(|api| api.text.clone()).filter(|text| !text.is_empty());
        own.or_else(|| self.text.clone().filter(|text| !text.is_empty()))
            .or_else(|| (!self.errors.is_empty()).then(|| self.errors.join("; ")))
            .unwrap_or_else(|| format!("the engine reported {:?}", self.subtype))
    }
}

/// The failure that a result reports. `rejected_until` is the reset time of a limit the engine said was exceeded.
pub(super) fn result_failure(result: &ResultFacts, rejected_until: Option<i64>) -> Failure {
    let api = result.api.clone().unwrap_or_default();
    let mut failure = match by_result(result) {
        Some(failure) => failure,
        None => by_error(&api, result),
    };
    failure.native_status = api.status.or(result.status);
    if failure.native_code.is_none() {
        let named = Some(api.error).filter(|error| !error.is_empty() && error != "unknown");
        failure.native_code = api.kind.or(named).or(api.api_type).or_else(|| result.terminal_reason.clone());
    }
    if failure.reason == Reason::Quota {
        failure.retry_at_unix_seconds = api.resets_at.or(rejected_until);
    }
    failure
}

/// What the result's own fields decide.
fn by_result(result: &ResultFacts) -> Option<Failure> {
    let native = |reason, code: &str, advice: &str, retryable| Failure {
        native_code: Some(code.to_owned()),
        what_to_do: advice.to_owned(),
        retryable,
        ..Failure::new(reason, result.message())
    };
    match result.subtype.as_str() {
        "error_max_turns" => {
            return Some(native(
                Reason::Deadline,
                "max_turns",
                "Raise options.max_turns in the agent file or split the work, then retry the turn.",
                true,
            ));
        }
        "error_max_budget_usd" => {
            return Some(native(
                Reason::Quota,
                "max_budget",
                "Raise the budget or split the work, then send the message again.",
                false,
            ));
        }
        "error_max_structured_output_retries" => {
            return Some(native(
                Reason::OutputInvalid,
                "max_structured_output_retries",
                Reason::OutputInvalid.what_to_do(),
                true,
            ));
        }
        _ => {}
    }
    if result.terminal_reason.as_deref() == Some("prompt_too_long") {
        let failure = Failure::new(Reason::ContextTooLong, result.message());
        return Some(Failure { native_code: Some("prompt_too_long".to_owned()), ..failure });
    }
    if result.stop_reason.as_deref() == Some("refusal") {
        let failure = Failure::new(Reason::OutputInvalid, result.message());
        return Some(Failure { native_code: Some("refusal".to_owned()), ..failure });
    }
    if result.aborted() {
        return Some(Failure {
            native_code: result.terminal_reason.clone(),
            ..Failure::new(Reason::Process, "the engine stopped the turn although nobody asked it to")
        });
    }
    None
}

/// What the error's names and status decide.
fn by_error(api: &ApiError, result: &ResultFacts) -> Failure {
    let message = result.message();
    let status = api.status.or(result.status);
    let process = |unavailable, retryable| Failure {
        unavailable,
        retryable,
        ..Failure::new(Reason::Process, &message)
    };
    match api.kind.as_deref() {
        Some("usage_limit_reached" | "model_requires_usage_credits" | "long_context_credits_required") => {
            return Failure::new(Reason::Quota, &message);
        }
        Some("message_over_context_limit") => return Failure::new(Reason::ContextTooLong, &message),
        Some("empty_completion") => return Failure::new(Reason::OutputInvalid, &message),
        Some(
            "provider_credentials"
            | "gateway_signin_required"
            | "gateway_session_expired"
            | "api_key_auth_disabled"
            | "org_disabled_credential"
            | "invalid_credential_header"
            | "named_profile_unusable",
        ) => return Failure::new(Reason::Auth, &message),
        Some("connection_failed" | "stream_idle_timeout" | "computer_slept") => return process(true, true),
        _ => {}
    }
    match (api.error.as_str(), status) {
        ("rate_limit", _) | (_, Some(429)) => Failure::new(Reason::Quota, &message),
        ("billing_error", _) => Failure {
            retryable: false,
            what_to_do:
                "Add credit to the account the engine's key belongs to, then retry the turn; or send the \
                         message to an agent on another engine."
                    .to_owned(),
            ..Failure::new(Reason::Quota, &message)
        },
        (
            "authentication_failed"
            | "oauth_org_not_allowed"
            | "account_on_hold"
            | "verification_required"
            | "cloud_credential_error",
            _,
        )
        | (_, Some(401 | 403)) => Failure::new(Reason::Auth, &message),
        ("model_not_found", _) | (_, Some(404)) => Failure {
            what_to_do: "Correct `model` in the agent file, or ask for access to it, then retry the turn."
                .to_owned(),
            ..Failure::new(Reason::Configuration, &message)
        },
        ("max_output_tokens", _) if api.context_window => Failure::new(Reason::ContextTooLong, &message),
        ("max_output_tokens", _) => Failure {
            what_to_do:
                "Ask for the work in smaller pieces, or raise CLAUDE_CODE_MAX_OUTPUT_TOKENS in the engine's \
                         variables."
                    .to_owned(),
            ..Failure::new(Reason::OutputInvalid, &message)
        },
        (_, Some(413)) => Failure::new(Reason::ContextTooLong, &message),
        // The engine refuses it itself, without asking the model.
        ("invalid_request", None) if message.starts_with("Prompt is too long") => Failure {
            native_code: Some("prompt_too_long".to_owned()),
            ..Failure::new(Reason::ContextTooLong, &message)
        },
        ("server_error" | "overloaded", _) | (_, Some(408 | 500..)) => process(true, true),
        // The API did not like the request itself; the same request will not fare better.
        (_, Some(400..)) => Failure {
            what_to_do:
                "Read the message: the model's service refused the request itself. Change the model, the \
                         effort or the message, then send it again."
                    .to_owned(),
            ..process(false, false)
        },
        _ if is_quota_text(&message) => Failure::new(Reason::Quota, &message),
        _ => process(is_unavailable_text(&message), true),
    }
}

/// The failure of a process that ended without the engine's own word on the turn.
pub(super) fn exit_failure(exit: Exit, stderr: &StderrTail, api: Option<&ApiError>) -> Failure {
    let how = match (exit.code, exit.signal) {
        (_, Some(signal)) => format!("the engine was ended by signal {signal}"),
        (Some(code), None) => format!("the engine ended with exit code {code}"),
        (None, None) => "the engine is gone, and nobody saw how it ended".to_owned(),
    };
    let mut failure = if let Some(line) = &stderr.facts.quota {
        Failure::new(Reason::Quota, line)
    } else if let Some(api) = api {
        let facts = ResultFacts { api: Some(api.clone()), is_error: true, ..ResultFacts::default() };
        result_failure(&facts, None)
    } else if let Some(line) = &stderr.facts.configuration {
        Failure::new(Reason::Configuration, line)
    } else if stderr.facts.no_space {
        Failure::new(Reason::Storage, format!("{how}: no space was left on the disk"))
    } else {
        let message = format!("{how} before it finished the turn");
        Failure { unavailable: stderr.facts.unavailable.is_some(), ..Failure::new(Reason::Process, message) }
    };
    if exit.signal == Some(9) && failure.reason == Reason::Process {
        failure.what_to_do = Failure::KILLED.to_owned();
    }
    failure.exit_code = exit.code;
    failure.signal = exit.signal;
    failure.stderr_tail = stderr.tail();
    failure
}

/// Why a session could not be opened. `errors` are what a result line said, if there was one.
pub(super) fn open_failure(
    mode: OpenMode,
    committed: bool,
    errors: &[String],
    stderr: &StderrTail,
    exit: Exit,
) -> OpenFailure {
    let about_session = errors.iter().find(|text| is_session_text(text)).or(stderr.facts.session.as_ref());
    if mode == OpenMode::Resume
        && let Some(text) = about_session
    {
        let mut failure = Failure::new(Reason::SessionUnusable, text);
        failure.exit_code = exit.code;
        failure.signal = exit.signal;
        failure.stderr_tail = stderr.tail();
        // Rows are flushed late: a process that is killed in its first turn may leave no file at all. Nothing
        // was lost then, and the same id can be used again.
        let never_written = !committed && text.contains(NOT_FOUND);
        return OpenFailure {
            failure,
            retry_as: never_written.then_some(OpenMode::Start),
            discard: Vec::new(),
        };
    }
    let mut failure = exit_failure(exit, stderr, None);
    if failure.reason == Reason::Process {
        failure.message = match errors.first().or(stderr.facts.last_line.as_ref()) {
            Some(text) => format!("the engine did not open its session: {text}"),
            None => "the engine ended before it opened its session".to_owned(),
        };
        if exit.code == Some(127) || exit.code == Some(126) {
            failure = Failure { reason: Reason::EngineMissing, retryable: false, ..failure };
            failure.what_to_do = Reason::EngineMissing.what_to_do().to_owned();
        }
    }
    let retry_as = (mode == OpenMode::Start && stderr.facts.in_use).then_some(OpenMode::Resume);
    OpenFailure { failure, retry_as, discard: Vec::new() }
}

const NOT_FOUND: &str = "No conversation found";

/// Whether a text is about the session that was to be resumed.
fn is_session_text(text: &str) -> bool {
    text.contains(NOT_FOUND) || text.contains("Failed to resume session")
}

/// Whether a text reports a usage or rate limit.
pub(super) fn is_quota_text(text: &str) -> bool {
    const WORDS: [&str; 9] = [
        "usage limit",
        "rate limit",
        "rate_limit",
        "rejected (429)",
        "too many requests",
        "credit balance is too low",
        "quota exceeded",
        "hit your limit",
        "out of extra usage",
    ];
    let text = text.to_lowercase();
    !is_retry_text(&text) && WORDS.iter().any(|word| text.contains(word))
}

/// Whether a text reports that the service is away.
pub(super) fn is_unavailable_text(text: &str) -> bool {
    const WORDS: [&str; 14] = [
        "overloaded",
        "connection refused",
        "connection lost",
        "connection error",
        "econnrefused",
        "econnreset",
        "enotfound",
        "etimedout",
        "socket hang up",
        "request timed out",
        "internal server error",
        "service unavailable",
        "bad gateway",
        "gateway timeout",
    ];
    let text = text.to_lowercase();
    !is_retry_text(&text) && WORDS.iter().any(|word| text.contains(word))
}

fn is_retry_text(lower: &str) -> bool {
    const WORDS: [&str; 5] = ["retrying", "will retry", "retry attempt", "reconnecting", "trying again"];
    WORDS.iter().any(|word| lower.contains(word))
}

/// The end of standard error, and the first line of each kind that matters.
#[derive(Debug, Clone, Default)]
pub(super) struct StderrTail {
    tail: Tail,
    facts: StderrFacts,
}

/// What the lines of standard error said.
#[derive(Debug, Clone, Default)]
struct StderrFacts {
    quota: Option<String>,
    unavailable: Option<String>,
    session: Option<String>,
    configuration: Option<String>,
    last_line: Option<String>,
    in_use: bool,
    no_space: bool,
    writes_lost: bool,
}

impl StderrFacts {
    fn line(&mut self, text: &str) {
        stderr::keep_first(&mut self.quota, is_quota_text(text), text);
        stderr::keep_first(&mut self.unavailable, is_unavailable_text(text), text);
        stderr::keep_first(&mut self.session, is_session_text(text), text);
        let configuration = text.contains("cannot be used with root/sudo")
            || text.contains("unknown option")
            || text.contains("Invalid session ID")
            || text.contains("Invalid MCP configuration");
        stderr::keep_first(&mut self.configuration, configuration, text);
        self.in_use |= text.contains("is already in use");
        self.no_space |= text.contains("ENOSPC") || text.contains("No space left on device");
        self.last_line = Some(limit::short(text));
        self.writes_lost |= text.contains("could not save all");
    }
}

impl StderrTail {
    /// Takes a chunk, cut anywhere. Says whether the engine reported lost writes in it.
    pub(super) fn take(&mut self, chunk: &[u8]) -> bool {
        let facts = &mut self.facts;
        self.tail.take(chunk, &mut |text| facts.line(text));
        std::mem::take(&mut facts.writes_lost)
    }

    /// Takes what is left without a line end. Says whether the engine reported lost writes in it.
    pub(super) fn end_line(&mut self) -> bool {
        let facts = &mut self.facts;
        self.tail.end_line(&mut |text| facts.line(text));
        std::mem::take(&mut facts.writes_lost)
    }

    fn tail(&self) -> String {
        self.tail.text()
    }
}
