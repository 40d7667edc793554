//! The one place where a gRPC status becomes what a person reads: what went wrong, what to do next, which exit
//! code.

use std::time::Duration;

use roundhouse_proto::ERROR_DOMAIN;
use roundhouse_proto::engine::v1::ErrorReason;
use serde_json::{Value, json};
use tonic::{Code, Status};
use tonic_types::StatusExt as _;

use crate::exit::Exit;
use crate::output::Output;

/// Why a command failed. Boxed, so that results stay small.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Failure(Box<Told>);

impl std::ops::Deref for Failure {
    type Target = Told;

    fn deref(&self) -> &Told {
        &self.0
    }
}

impl std::ops::DerefMut for Failure {
    fn deref_mut(&mut self) -> &mut Told {
        &mut self.0
    }
}

/// What is told of a failure.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Told {
    /// The exit code.
    pub(crate) exit: Exit,
    /// The gRPC code's name, or empty when no call was made.
    pub(crate) code: String,
    /// The reason, as in google.rpc.ErrorInfo, or empty.
    pub(crate) reason: String,
    /// What went wrong.
    pub(crate) message: String,
    /// Field and what is wrong with it.
    pub(crate) violations: Vec<(String, String)>,
    /// What to do next.
    pub(crate) next: Option<String>,
    /// When to try again.
    pub(crate) retry_after: Option<Duration>,
    /// The details' metadata, by name.
    pub(crate) metadata: Vec<(String, String)>,
}

impl Failure {
    /// A failure of our own, without a call.
    pub(crate) fn new(exit: Exit, message: impl Into<String>) -> Self {
        Self(Box::new(Told {
            exit,
            code: String::new(),
            reason: String::new(),
            message: message.into(),
            violations: Vec::new(),
            next: None,
            retry_after: None,
            metadata: Vec::new(),
        }))
    }

    /// The same with what to do next.
    pub(crate) fn next(mut self, next: impl Into<String>) -> Self {
        self.next = Some(next.into());
        self
    }

    /// Whether no connection came about.
    pub(crate) fn is_no_connection(&self) -> bool {
        // The transport tells it in words alone.
        let words = ["connect error", "dns error"];
        self.passes_by_itself()
            && self.reason.is_empty()
            && words.iter().any(|word| self.message.contains(word))
    }

    /// It as the person or the program is told.
    pub(crate) fn told(&self, output: Output) -> String {
        if output.is_json() { self.json().to_string() } else { self.human() }
    }

    /// Whether the same call may succeed a little later without anybody doing anything.
    pub(crate) fn passes_by_itself(&self) -> bool {
        self.code == "UNAVAILABLE"
    }

    /// A value of the metadata.
    pub(crate) fn metadata(&self, name: &str) -> Option<&str> {
        self.metadata.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }

    /// For people, on standard error.
    pub(crate) fn human(&self) -> String {
        let mut text = format!("error: {}", self.message);
        for (field, problem) in &self.violations {
            text.push_str(&format!("\n  {field}: {problem}"));
        }
        if let Some(next) = &self.next {
            text.push_str(&format!("\nnext: {next}"));
        }
        text
    }

    /// For programs, on standard error.
    pub(crate) fn json(&self) -> Value {
        let violations: Vec<Value> = self
            .violations
            .iter()
            .map(|(field, problem)| json!({"field": field, "problem": problem}))
            .collect();
        let metadata: serde_json::Map<String, Value> =
            self.metadata.iter().map(|(key, value)| (key.clone(), json!(value))).collect();
        let text = |value: &str| if value.is_empty() { Value::Null } else { json!(value) };
        json!({"error": {
            "exit_code": self.exit.code(),
            "code": text(&self.code),
            "reason": text(&self.reason),
            "message": self.message,
            "violations": violations,
            "next": self.next,
            "retry_after_ms": self.retry_after.map(|delay| u64::try_from(delay.as_millis()).unwrap_or(u64::MAX)),
            "metadata": metadata,
        }})
    }
}

impl From<Status> for Failure {
    fn from(status: Status) -> Self {
        let info = status.get_details_error_info().filter(|info| info.domain == ERROR_DOMAIN);
        let reason = info.as_ref().and_then(|info| reason_of(&info.reason));
        let violations = status
            .get_details_bad_request()
            .map(|bad| bad.field_violations)
            .unwrap_or_default()
            .into_iter()
            .map(|violation| (violation.field, violation.description))
            .collect();
        let mut metadata: Vec<(String, String)> =
            info.as_ref().map(|info| info.metadata.clone().into_iter().collect()).unwrap_or_default();
        metadata.sort();
        let alien = info.is_none() && no_grpc(&status);
        let mut failure = Self(Box::new(Told {
            exit: if alien { Exit::Unreachable } else { exit_of(status.code(), reason) },
            code: code_name(status.code()).to_owned(),
            reason: info.map(|info| info.reason).unwrap_or_default(),
            message: message_of(&status),
            violations,
            next: None,
            retry_after: status.get_details_retry_info().and_then(|info| info.retry_delay),
            metadata,
        }));
        failure.next = if alien {
            Some("what listens there speaks no gRPC: is that the control plane's address? --server is written \
                 http://HOST:PORT, with port 7450 unless told otherwise; TLS is not spoken yet".to_owned())
        } else {
            next_of(status.code(), reason, &failure)
        };
        failure
    }
}

/// Whether somebody took the connection who is no gRPC server: one of another protocol breaks it off or says what no
/// HTTP/2 is, another HTTP/2 server answers without what gRPC wants.
fn no_grpc(status: &Status) -> bool {
    if status.message().contains("grpc-status header missing") {
        return true;
    }
    // A connection that did not come about is unavailable, and one that broke later, too.
    status.code() != Code::Unavailable
        && std::error::Error::source(status).is_some_and(|cause| cause.is::<tonic::transport::Error>())
}

fn reason_of(name: &str) -> Option<ErrorReason> {
    ErrorReason::from_str_name(&format!("ERROR_REASON_{name}"))
}

/// Transport failures carry their cause as a source; it says more than "transport error".
fn message_of(status: &Status) -> String {
    let mut message = status.message().to_owned();
    let mut source = std::error::Error::source(status);
    while let Some(cause) = source {
        let text = cause.to_string();
        if !text.is_empty() && !message.contains(&text) {
            message = if message.is_empty() { text } else { format!("{message}: {text}") };
        }
        source = cause.source();
    }
    if message.is_empty() { format!("the call failed with {}", code_name(status.code())) } else { message }
}

fn exit_of(code: Code, reason: Option<ErrorReason>) -> Exit {
    use ErrorReason as R;
    match reason {
        Some(R::FieldInvalid | R::AgentInvalid | R::Configuration | R::CursorInvalid | R::TargetMissing) => {
            Exit::Invalid
        }
        Some(R::Auth | R::Policy | R::Unsupported) => Exit::Policy,
        Some(R::RunnerUnavailable | R::StoreUnavailable | R::Draining | R::Overloaded | R::KeeperStuck) => {
            Exit::Unreachable
        }
        Some(
            R::ConversationNotFound
            | R::TurnNotFound
            | R::SessionNotFound
            | R::WorkspaceNotFound
            | R::RunnerNotFound
            | R::PermissionNotFound
            | R::SummaryNotFound
            | R::VersionMismatch
            | R::RunnerConflict
            | R::RequestIdReused
            | R::StaleEpoch
            | R::TurnInProgress
            | R::WrongState
            | R::QueueFull
            | R::ProtocolVersion
            | R::RunnerBound
            | R::WorkspaceBusy
            | R::EngineMissing
            | R::CursorPruned
            | R::SlowReader,
        ) => Exit::Conflict,
        Some(R::EngineStartFailed | R::Internal | R::Storage) => Exit::Failed,
        Some(R::Unspecified) | None => match code {
            Code::Ok => Exit::Done,
            Code::InvalidArgument => Exit::Invalid,
            Code::NotFound
            | Code::AlreadyExists
            | Code::FailedPrecondition
            | Code::Aborted
            | Code::OutOfRange
            | Code::ResourceExhausted => Exit::Conflict,
            Code::PermissionDenied | Code::Unauthenticated => Exit::Policy,
            Code::Unavailable | Code::DeadlineExceeded => Exit::Unreachable,
            Code::Cancelled => Exit::Cancelled,
            Code::Unknown | Code::Unimplemented | Code::Internal | Code::DataLoss => Exit::Failed,
        },
    }
}

/// What to do next, by the reason; by the code where there is none.
fn next_of(code: Code, reason: Option<ErrorReason>, failure: &Failure) -> Option<String> {
    use ErrorReason as R;
    let later = match failure.retry_after {
        Some(delay) => format!("try again in {} s", delay.as_secs().max(1)),
        None => "try again in a moment".to_owned(),
    };
    let of = |name: &str| failure.metadata(name).unwrap_or("?").to_owned();
    let text = match reason {
        Some(R::FieldInvalid) => "correct the field and send it again".to_owned(),
        Some(R::ConversationNotFound) => "`roundhouse conversations list` shows what there is".to_owned(),
        Some(R::TurnNotFound) => "`roundhouse turns <conversation>` shows the turns".to_owned(),
        Some(R::SessionNotFound) => "`roundhouse sessions` shows the sessions".to_owned(),
        Some(R::WorkspaceNotFound) => {
            "`roundhouse runners` shows the roots that a directory must lie under, `roundhouse workspaces` what is \
             known by an id"
                .to_owned()
        }
        Some(R::RunnerNotFound) => {
            "`roundhouse runners` shows the runners; name a workspace as <runner>:<path>".to_owned()
        }
        Some(R::PermissionNotFound) => "`roundhouse permissions list` shows the open requests".to_owned(),
        Some(R::SummaryNotFound) => {
            "`roundhouse summary put` stores one; `summary get` without --version shows the current one".to_owned()
        }
        Some(R::VersionMismatch) => format!(
            "`roundhouse summary get` shows what is there now; write again with --expected-version {}",
            of("current_version")
        ),
        Some(R::RunnerConflict) => {
            "give each runner its own state directory and an address that leads to it".to_owned()
        }
        Some(R::RequestIdReused) => {
            "use a new --request-id, or send exactly what was sent under this one".to_owned()
        }
        Some(R::TurnInProgress) => "wait for the turn, or `roundhouse cancel <turn>`".to_owned(),
        Some(R::WrongState) => "`roundhouse turns <conversation>` shows the state".to_owned(),
        Some(R::QueueFull) => format!("wait until some messages are worked off, then {later}"),
        Some(R::Overloaded | R::Draining | R::KeeperStuck) => later,
        Some(R::StoreUnavailable) => {
            format!("look for a full or read-only disk under the control plane's database, then {later}")
        }
        Some(R::RunnerUnavailable) => format!("`roundhouse runners` shows whether it is back; {later}"),
        Some(R::ProtocolVersion) => "run control plane and runner of the same release".to_owned(),
        Some(R::RunnerBound) => {
            format!(
                "the runner belongs to control plane {}; use that one, or another state directory",
                of("control_plane_id")
            )
        }
        Some(R::WorkspaceBusy) => {
            format!("turn {0} holds the workspace: wait for it, or `roundhouse cancel {0}`", of("turn_id"))
        }
        Some(R::EngineMissing) => "`roundhouse engines install` installs it".to_owned(),
        Some(R::Auth) => {
            "log the engine in or configure a key: `roundhouse doctor` says which it would use".to_owned()
        }
        Some(R::Unsupported) => "`roundhouse engines list` shows what the engine can do".to_owned(),
        Some(R::Configuration) => "`roundhouse config check` and `roundhouse doctor` say where".to_owned(),
        Some(R::EngineStartFailed) => "`roundhouse doctor` checks the engine; then send again".to_owned(),
        Some(R::CursorPruned) => format!("go on with --after {}", of("oldest_cursor")),
        Some(R::CursorInvalid) => "leave --after out to begin with the oldest event kept".to_owned(),
        Some(R::SlowReader) => format!("go on with --after {}", of("last_cursor")),
        Some(R::AgentInvalid) => "`roundhouse agents validate` shows all that is wrong".to_owned(),
        Some(R::TargetMissing) => {
            "say --agent NAME once (`roundhouse agents` lists them), and --workspace for another directory than \
             this; the conversation remembers both"
                .to_owned()
        }
        Some(R::Internal) => format!("look for {} in the server's log", of("correlation_id")),
        Some(R::Policy) => {
            "the runner's configuration forbids it: see allow_bypass in `roundhouse config show`".to_owned()
        }
        Some(R::Storage) => "make room on the runner's disk, then try again".to_owned(),
        Some(R::StaleEpoch) => later,
        Some(R::Unspecified) | None => match code {
            Code::Unavailable if failure.message.contains("dns error") => {
                "no host of that name is known here: --server is written http://HOST:PORT".to_owned()
            }
            Code::Unavailable => {
                "is it running? `roundhouse up` starts one; --server or ROUNDHOUSE_SERVER names another"
                    .to_owned()
            }
            Code::DeadlineExceeded => later,
            Code::Unimplemented => {
                "is that the control plane's address? An engine runner (port 7460 unless told otherwise) does not \
                 answer this; else the server is of another release"
                    .to_owned()
            }
            Code::Unauthenticated | Code::PermissionDenied => {
                "the server wants another token: --token, ROUNDHOUSE_TOKEN or a token_file of the configuration"
                    .to_owned()
            }
            Code::ResourceExhausted => later,
            Code::Ok
            | Code::Cancelled
            | Code::Unknown
            | Code::InvalidArgument
            | Code::NotFound
            | Code::AlreadyExists
            | Code::FailedPrecondition
            | Code::Aborted
            | Code::OutOfRange
            | Code::Internal
            | Code::DataLoss => return None,
        },
    };
    Some(text)
}

fn code_name(code: Code) -> &'static str {
    match code {
        Code::Ok => "OK",
        Code::Cancelled => "CANCELLED",
        Code::Unknown => "UNKNOWN",
        Code::InvalidArgument => "INVALID_ARGUMENT",
        Code::DeadlineExceeded => "DEADLINE_EXCEEDED",
        Code::NotFound => "NOT_FOUND",
        Code::AlreadyExists => "ALREADY_EXISTS",
        Code::PermissionDenied => "PERMISSION_DENIED",
        Code::ResourceExhausted => "RESOURCE_EXHAUSTED",
        Code::FailedPrecondition => "FAILED_PRECONDITION",
        Code::Aborted => "ABORTED",
        Code::OutOfRange => "OUT_OF_RANGE",
        Code::Unimplemented => "UNIMPLEMENTED",
        Code::Internal => "INTERNAL",
        Code::Unavailable => "UNAVAILABLE",
        Code::DataLoss => "DATA_LOSS",
        Code::Unauthenticated => "UNAUTHENTICATED",
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use pretty_assertions::assert_eq;
    use tonic_types::ErrorDetails;

    use super::*;

    fn failure(code: Code, reason: &str, metadata: &[(&str, &str)]) -> Failure {
        let metadata: HashMap<String, String> =
            metadata.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        let mut details = ErrorDetails::new();
        details.set_error_info(reason, ERROR_DOMAIN, metadata);
        details.set_retry_info(Some(Duration::from_millis(2_500)));
        details.add_bad_request_violation("text", "must not be empty");
        Status::with_error_details(code, "it went wrong", details).into()
    }

    #[test]
    fn details_become_a_message_and_what_to_do() {
        let told = failure(Code::FailedPrecondition, "WORKSPACE_BUSY", &[("turn_id", "trn_1")]);
        assert_eq!(
            told.human(),
            "error: it went wrong\n  text: must not be empty\n\
             next: turn trn_1 holds the workspace: wait for it, or `roundhouse cancel trn_1`"
        );
        assert_eq!(
            told.json(),
            json!({"error": {
                "exit_code": 4, "code": "FAILED_PRECONDITION", "reason": "WORKSPACE_BUSY",
                "message": "it went wrong",
                "violations": [{"field": "text", "problem": "must not be empty"}],
                "next": "turn trn_1 holds the workspace: wait for it, or `roundhouse cancel trn_1`",
                "retry_after_ms": 2500, "metadata": {"turn_id": "trn_1"},
            }})
        );
    }

    #[test]
    fn every_reason_has_an_exit_code_and_a_next_step() {
        let mut reasons = 0;
        for number in 1..200 {
            let Ok(reason) = ErrorReason::try_from(number) else { continue };
            reasons += 1;
            let name = reason.as_str_name().trim_start_matches("ERROR_REASON_");
            let told = failure(Code::Unknown, name, &[]);
            assert!(told.next.is_some(), "{name}");
            assert_ne!(told.exit, Exit::Done, "{name}");
        }
        assert!(reasons > 20);
    }

    #[test]
    fn a_status_without_details_is_understood_by_its_code() {
        let told = Failure::from(Status::unavailable("connection refused"));
        assert_eq!((told.exit, told.passes_by_itself()), (Exit::Unreachable, true));
        assert!(told.next.as_ref().is_some_and(|next| next.contains("roundhouse up")));
        let nonsense = Failure::from(Status::unavailable("dns error: failed to lookup address"));
        assert!(nonsense.next.as_ref().is_some_and(|next| next.contains("http://HOST:PORT")));
        let runner = Failure::from(Status::unimplemented(""));
        assert!(runner.next.as_ref().is_some_and(|next| next.contains("An engine runner")));
        assert_eq!(Failure::from(Status::not_found("x")).exit, Exit::Conflict);
        assert_eq!(Failure::from(Status::new(Code::Internal, "")).message, "the call failed with INTERNAL");
        // Details of somebody else's domain are not ours to read.
        let mut details = ErrorDetails::new();
        details.set_error_info("TURN_NOT_FOUND", "example.com", HashMap::new());
        let other = Failure::from(Status::with_error_details(Code::Aborted, "x", details));
        assert_eq!((other.reason.as_str(), other.exit), ("", Exit::Conflict));
    }
}
