//! From the wire to the domain: every field is checked here, and all that is wrong with a request is told at once.

use prost::Message as _;
use roundhouse_domain::conversation::ExternalId;
use roundhouse_domain::id::{ConversationId, IdError, RequestId, RunnerId, SessionId, TurnId, WorkspaceId};
use roundhouse_domain::limits::MAX_USER_MESSAGE;
use roundhouse_domain::outcome::{Reason, TurnError};
use roundhouse_domain::permission::{Decision, SettledBy};
use roundhouse_domain::session::NativeRef;
use roundhouse_domain::time::Timestamp;
use roundhouse_domain::usage::{ModelUsage, Usage};
use roundhouse_proto::control::v1 as control;
use roundhouse_proto::engine::v1 as engine;
use roundhouse_store::RequestKey;
use sha2::{Digest as _, Sha256};

use crate::clock;
use crate::error::{Error, Result, Violation};

/// Longest part of an external id, in bytes.
const MAX_EXTERNAL: usize = 200;
/// Longest title, in bytes.
const MAX_TITLE: usize = 500;
/// Longest name of a sender, in bytes.
pub(crate) const MAX_ACTOR: usize = 200;
/// Longest agent name, in bytes.
const MAX_AGENT: usize = 64;
/// Longest workspace name, in bytes: a runner's name and a path.
const MAX_WORKSPACE: usize = 4_500;
/// Longest feedback to a permission, in bytes.
const MAX_FEEDBACK: usize = 4_000;
/// Items per page when the request does not say, and at most.
const PAGE: (usize, usize) = (50, 200);

/// Collects what is wrong with a request.
#[derive(Debug, Default)]
pub(crate) struct Check {
    violations: Vec<Violation>,
}

impl Check {
    /// Notes a violation unless `ok`.
    pub(crate) fn ensure(&mut self, ok: bool, field: &'static str, description: impl Into<String>) {
        if !ok {
            self.violations.push(Violation { field, description: description.into() });
        }
    }

    /// A value, or a note of why there is none.
    pub(crate) fn take<T>(
        &mut self,
        field: &'static str,
        value: std::result::Result<T, IdError>,
    ) -> Option<T> {
        value.map_err(|error| self.violations.push(Violation { field, description: error.to_string() })).ok()
    }

    /// A text of at most `max` bytes without control characters that would break a line.
    pub(crate) fn line(&mut self, field: &'static str, text: &str, max: usize) {
        self.ensure(
            text.len() <= max,
            field,
            format!("has {} bytes, more than the {max} allowed", text.len()),
        );
        self.ensure(!text.chars().any(char::is_control), field, "control characters are not accepted");
    }

    /// All that was wrong, if anything.
    pub(crate) fn done(self) -> Result<()> {
        if self.violations.is_empty() { Ok(()) } else { Err(Error::Invalid(self.violations)) }
    }

    /// The values, all of which are there if nothing was wrong.
    pub(crate) fn finish<T>(self, value: Option<T>) -> Result<T> {
        self.done()?;
        value.ok_or_else(|| Error::internal("a value is missing without a violation"))
    }
}

fn id<T>(field: &'static str, parsed: std::result::Result<T, IdError>) -> Result<T> {
    let mut check = Check::default();
    let value = check.take(field, parsed);
    check.finish(value)
}

pub(crate) fn conversation_id(text: &str) -> Result<ConversationId> {
    id("conversation_id", ConversationId::parse(text))
}

pub(crate) fn turn_id(text: &str) -> Result<TurnId> {
    id("turn_id", TurnId::parse(text))
}

pub(crate) fn session_id(text: &str) -> Result<SessionId> {
    id("session_id", SessionId::parse(text))
}

pub(crate) fn workspace_id(text: &str) -> Result<WorkspaceId> {
    id("workspace_id", WorkspaceId::parse(text))
}

pub(crate) fn runner_id(text: &str) -> Result<RunnerId> {
    id("runner_id", RunnerId::parse(text))
}

/// What makes a call repeatable: its request id and a hash over the rest of the request. An empty id is replaced by
/// one of ours, which nobody can repeat.
pub(crate) fn request_key(
    check: &mut Check,
    id: &str,
    rpc: &'static str,
    body: &impl prost::Message,
) -> Option<RequestKey> {
    let id = if id.is_empty() {
        RequestId::parse(format!("server/{}", clock::uuid().simple()))
    } else {
        RequestId::parse(id)
    };
    let id = check.take("request_id", id)?;
    Some(RequestKey { id, rpc, body_hash: Sha256::digest(body.encode_to_vec()).into() })
}

/// The number of items of a page.
pub(crate) fn page_size(check: &mut Check, field: &'static str, size: u32) -> usize {
    let size = size as usize;
    check.ensure(size <= PAGE.1, field, format!("is {size}, more than the {} allowed", PAGE.1));
    if size == 0 { PAGE.0 } else { size.min(PAGE.1) }
}

/// An external id whose parts are there.
pub(crate) fn external_id(check: &mut Check, id: &control::ExternalId) -> ExternalId {
    for (field, part) in [
        ("external_id.project", &id.project),
        ("external_id.provider", &id.provider),
        ("external_id.id", &id.id),
    ] {
        check.ensure(!part.is_empty(), field, "must not be empty");
        check.line(field, part, MAX_EXTERNAL);
    }
    ExternalId { project: id.project.clone(), provider: id.provider.clone(), id: id.id.clone() }
}

/// A conversation to be made.
#[derive(Debug)]
pub(crate) struct NewConversation {
    pub(crate) request: RequestKey,
    pub(crate) external_id: Option<ExternalId>,
    pub(crate) title: String,
    pub(crate) workspace: Option<String>,
    pub(crate) agent: Option<String>,
}

pub(crate) fn create_conversation(request: control::CreateConversationRequest) -> Result<NewConversation> {
    let mut check = Check::default();
    let body = control::CreateConversationRequest { request_id: String::new(), ..request.clone() };
    let key = request_key(&mut check, &request.request_id, "CreateConversation", &body);
    let external_id = request.external_id.as_ref().map(|id| external_id(&mut check, id));
    check.line("title", &request.title, MAX_TITLE);
    agent(&mut check, &request.agent);
    check.line("workspace", &request.workspace, MAX_WORKSPACE);
    let request_key = check.finish(key)?;
    Ok(NewConversation {
        request: request_key,
        external_id,
        title: request.title,
        workspace: Some(request.workspace).filter(|w| !w.is_empty()),
        agent: Some(request.agent).filter(|a| !a.is_empty()),
    })
}

fn agent(check: &mut Check, name: &str) {
    let kebab = name
        .split('-')
        .all(|part| !part.is_empty() && part.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit()));
    check.ensure(
        name.is_empty() || (name.len() <= MAX_AGENT && kebab),
        "agent",
        "is a kebab-case name of at most 64 characters: the agent file's name without .md",
    );
}

/// A message to be sent.
#[derive(Debug)]
pub(crate) struct NewMessage {
    pub(crate) request: RequestKey,
    pub(crate) conversation_id: ConversationId,
    pub(crate) text: String,
    pub(crate) agent: Option<String>,
    pub(crate) workspace: Option<String>,
    pub(crate) actor: String,
}

pub(crate) fn send_message(request: control::SendMessageRequest) -> Result<NewMessage> {
    let mut check = Check::default();
    let body = control::SendMessageRequest { request_id: String::new(), ..request.clone() };
    let key = request_key(&mut check, &request.request_id, "SendMessage", &body);
    let conversation = check.take("conversation_id", ConversationId::parse(&request.conversation_id));
    check.ensure(!request.text.is_empty(), "text", "must not be empty");
    check.ensure(
        request.text.len() <= MAX_USER_MESSAGE,
        "text",
        format!("has {} bytes, more than the {MAX_USER_MESSAGE} allowed", request.text.len()),
    );
    check.ensure(!request.text.contains('\0'), "text", "NUL characters are not accepted");
    agent(&mut check, &request.agent);
    check.line("workspace", &request.workspace, MAX_WORKSPACE);
    check.line("actor", &request.actor, MAX_ACTOR);
    let (request_key, conversation_id) = check.finish(key.zip(conversation))?;
    Ok(NewMessage {
        request: request_key,
        conversation_id,
        text: request.text,
        agent: Some(request.agent).filter(|a| !a.is_empty()),
        workspace: Some(request.workspace).filter(|w| !w.is_empty()),
        actor: if request.actor.is_empty() { "user".to_owned() } else { request.actor },
    })
}

/// An answer to a permission request.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) request: RequestKey,
    pub(crate) permission_id: String,
    pub(crate) decision: Decision,
    pub(crate) feedback: String,
}

pub(crate) fn answer_permission(request: control::AnswerPermissionRequest) -> Result<Answer> {
    let mut check = Check::default();
    let body = control::AnswerPermissionRequest { request_id: String::new(), ..request.clone() };
    let key = request_key(&mut check, &request.request_id, "AnswerPermission", &body);
    let id = &request.permission_request_id;
    check.ensure(!id.is_empty(), "permission_request_id", "must not be empty");
    check.line("permission_request_id", id, 128);
    let decided = decision(request.decision);
    check.ensure(decided.is_some(), "decision", "is allow or deny");
    check.ensure(request.feedback.len() <= MAX_FEEDBACK, "feedback", "has more than the 4,000 bytes allowed");
    let (request_key, decision) = check.finish(key.zip(decided))?;
    Ok(Answer {
        request: request_key,
        permission_id: request.permission_request_id,
        decision,
        feedback: request.feedback,
    })
}

/// A decision; none for what is no decision, or one that is not known here.
pub(crate) fn decision(decision: i32) -> Option<Decision> {
    match engine::PermissionDecision::try_from(decision) {
        Ok(engine::PermissionDecision::Allow) => Some(Decision::Allow),
        Ok(engine::PermissionDecision::Deny) => Some(Decision::Deny),
        Ok(engine::PermissionDecision::Unspecified) | Err(_) => None,
    }
}

/// Who decided.
pub(crate) fn settled_by(decider: i32) -> SettledBy {
    match engine::PermissionDecider::try_from(decider) {
        Ok(engine::PermissionDecider::Client) => SettledBy::Answer,
        Ok(engine::PermissionDecider::Deadline) => SettledBy::Deadline,
        Ok(engine::PermissionDecider::Cancel) => SettledBy::TurnEnded,
        Ok(engine::PermissionDecider::Engine | engine::PermissionDecider::Unspecified) | Err(_) => {
            SettledBy::Withdrawn
        }
    }
}

pub(crate) fn timestamp(time: &prost_types::Timestamp) -> Timestamp {
    let micros = time.seconds.saturating_mul(1_000_000).saturating_add(i64::from(time.nanos) / 1_000);
    Timestamp::from_micros(micros)
}

/// What an engine needs to resume, as it is stored.
pub(crate) fn native_ref(native: &engine::NativeRef) -> NativeRef {
    NativeRef(native.encode_to_vec())
}

pub(crate) fn usage(usage: &engine::Usage) -> Usage {
    let models = usage.models.iter().map(|model| ModelUsage {
        model: model.model.clone(),
        input_tokens: model.input_tokens,
        output_tokens: model.output_tokens,
        cache_read_tokens: model.cache_read_tokens,
        cache_write_tokens: model.cache_write_tokens,
        reasoning_tokens: None,
        cost_nanos: model.cost_usd.and_then(nanos),
    });
    Usage { models: models.collect(), complete: usage.complete }
}

/// Dollars as billionths; none for what is no amount.
fn nanos(dollars: f64) -> Option<u64> {
    let nanos = (dollars * 1e9).round();
    if !(0.0..=1e18).contains(&nanos) {
        return None;
    }
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "the range was checked")]
    let nanos = nanos as u64;
    Some(nanos)
}

/// A failure as the runner told it. A reason that is not known here (a newer runner) is a failed process.
pub(crate) fn failure(failure: &engine::Failure) -> TurnError {
    use engine::FailureReason as F;
    let reason = match F::try_from(failure.reason) {
        Ok(F::Quota) => Reason::Quota,
        Ok(F::Auth) => Reason::Auth,
        Ok(F::EngineMissing) => Reason::EngineMissing,
        Ok(F::SessionUnusable) => Reason::SessionUnusable,
        Ok(F::ContextTooLong) => Reason::ContextTooLong,
        Ok(F::Process | F::Unspecified) | Err(_) => Reason::Process,
        Ok(F::OutputInvalid) => Reason::OutputInvalid,
        Ok(F::IdleTimeout) => Reason::IdleTimeout,
        Ok(F::Deadline) => Reason::Deadline,
        Ok(F::Stuck) => Reason::Stuck,
        Ok(F::PermissionDenied) => Reason::PermissionDenied,
        Ok(F::Configuration) => Reason::Configuration,
        Ok(F::RunnerLost) => Reason::RunnerLost,
        Ok(F::WorkspaceBusy) => Reason::WorkspaceBusy,
        Ok(F::Unsupported) => Reason::Unsupported,
        Ok(F::Storage) => Reason::Storage,
        Ok(F::Cancelled) => Reason::Cancelled,
    };
    TurnError {
        reason,
        message: failure.message.clone(),
        next_step: failure.next_action.clone(),
        retryable: failure.retryable,
        retry_at: failure.retry_at.as_ref().map(timestamp),
        unavailable: failure.unavailable,
        exit_code: failure.exit_code,
        signal: failure.signal,
        stderr_tail: failure.stderr_tail.clone(),
        native_code: Some(failure.native_code.clone()).filter(|c| !c.is_empty()),
        spool: Some(failure.spool_id.clone()).filter(|s| !s.is_empty()),
    }
}
