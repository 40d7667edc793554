//! From our words to the contract's.

use std::time::Duration;

use roundhouse_engines::{
    self as engines, Failure, Reason, Support,
    event::{self, ChangeKind, Decider, Decision, Event, NoticeKind, PhaseEvent as Phase, QuotaStatus},
    limit::BoundedText,
};
use roundhouse_process::IsolationLevel;
use roundhouse_proto::engine::v1 as proto;
use roundhouse_proto::engine::v1::event_body::Kind;

/// A kind as a body.
#[must_use]
pub fn body(kind: Kind) -> proto::EventBody {
    proto::EventBody { kind: Some(kind) }
}

/// A wall-clock time.
#[must_use]
pub fn timestamp(millis: i64) -> prost_types::Timestamp {
    prost_types::Timestamp {
        seconds: millis.div_euclid(1000),
        nanos: i32::try_from(millis.rem_euclid(1000) * 1_000_000).unwrap_or(0),
    }
}

/// A length of time.
#[must_use]
pub fn duration(duration: Duration) -> prost_types::Duration {
    prost_types::Duration {
        seconds: i64::try_from(duration.as_secs()).unwrap_or(i64::MAX),
        nanos: i32::try_from(duration.subsec_nanos()).unwrap_or(0),
    }
}

/// A native reference.
#[must_use]
pub fn native_ref(id: &str) -> Option<proto::NativeRef> {
    (!id.is_empty()).then(|| proto::NativeRef { id: id.to_owned() })
}

/// A notice.
#[must_use]
pub fn notice(kind: proto::notice_event::Kind, message: impl Into<String>) -> proto::EventBody {
    body(Kind::Notice(proto::NoticeEvent { kind: kind.into(), message: message.into() }))
}

/// A phase.
#[must_use]
pub fn phase(phase: proto::phase_event::Phase, message_id: &str) -> proto::EventBody {
    body(Kind::Phase(proto::PhaseEvent {
        phase: phase.into(),
        message_id: message_id.to_owned(),
        detail: String::new(),
    }))
}

/// What a translator said, in the contract's words. None for what the runner words itself (a translator does not make
/// those) and for a permission request, which needs its deadline: see [`permission_request`].
#[must_use]
pub fn event(event: &Event) -> Option<proto::EventBody> {
    let kind = match event {
        Event::Text(text) => Kind::Text(proto::TextEvent {
            item_id: text.item.0.clone(),
            text: text.body.text.clone(),
            truncated: text.body.truncated,
            incomplete: text.incomplete,
            sub_agent: text.parent_call.clone().unwrap_or_default(),
        }),
        Event::Reasoning(text) => Kind::Reasoning(proto::ReasoningEvent {
            item_id: text.item.0.clone(),
            text: text.body.text.clone(),
            truncated: text.body.truncated,
        }),
        Event::ToolCall(call) => Kind::ToolCall(proto::ToolCallEvent {
            call_id: call.call_id.clone(),
            name: call.name.clone(),
            input_json: call.input.text.clone(),
            truncated: call.input.truncated,
            sub_agent: call.parent_call.clone().unwrap_or_default(),
        }),
        Event::ToolResult(result) => Kind::ToolResult(proto::ToolResultEvent {
            call_id: result.call_id.clone(),
            is_error: result.is_error,
            output: result.output.text.clone(),
            truncated: result.output.truncated,
        }),
        Event::FileChange(change) => Kind::FileChange(proto::FileChangeEvent {
            path: change.path.clone(),
            change: match change.change {
                ChangeKind::Created => proto::file_change_event::Change::Created,
                ChangeKind::Modified => proto::file_change_event::Change::Modified,
                ChangeKind::Deleted => proto::file_change_event::Change::Deleted,
                ChangeKind::Written => proto::file_change_event::Change::Unspecified,
            }
            .into(),
            call_id: change.call_id.clone(),
        }),
        Event::PermissionAnswer(answer) => permission_answer(answer),
        Event::Usage(used) => Kind::Usage(proto::UsageEvent { usage: Some(usage(used)) }),
        Event::Quota(quota) => Kind::Quota(proto::QuotaEvent {
            status: match quota.status {
                QuotaStatus::Allowed => "allowed",
                QuotaStatus::Warning => "warning",
                QuotaStatus::Exceeded => "rejected",
            }
            .to_owned(),
            resets_at: quota
                .resets_at_unix_seconds
                .map(|seconds| prost_types::Timestamp { seconds, nanos: 0 }),
            message: quota.limit_name.clone().unwrap_or_default(),
        }),
        Event::Notice(said) => Kind::Notice(proto::NoticeEvent {
            kind: match said.notice {
                NoticeKind::Retry => proto::notice_event::Kind::Retry,
                NoticeKind::Compaction => proto::notice_event::Kind::Compaction,
                NoticeKind::Warning | NoticeKind::SessionOutput => proto::notice_event::Kind::Warning,
                NoticeKind::ContextLost => proto::notice_event::Kind::ContextLost,
                NoticeKind::EventsLost => proto::notice_event::Kind::EventsLost,
            }
            .into(),
            message: said.message.text.clone(),
        }),
        Event::Phase(Phase::Opening) => return Some(phase(proto::phase_event::Phase::Starting, "")),
        Event::Phase(Phase::Delivered { message_id }) => {
            return Some(phase(proto::phase_event::Phase::Delivered, message_id));
        }
        Event::Phase(Phase::Accepted { message_id }) => {
            return Some(phase(proto::phase_event::Phase::Accepted, message_id));
        }
        Event::Phase(Phase::Cancelling) => return Some(phase(proto::phase_event::Phase::Cancelling, "")),
        Event::Phase(Phase::Settling)
        | Event::Session(_)
        | Event::PermissionRequest(_)
        | Event::Steer(_)
        | Event::Evidence(_)
        | Event::Terminal(_) => return None,
    };
    Some(body(kind))
}

/// A permission request, with the wall-clock time of its deadline for show.
#[must_use]
pub fn permission_request(request: &event::PermissionRequest, deadline_millis: i64) -> proto::EventBody {
    let title = match (&request.description, &request.blocked_path) {
        (Some(description), _) => description.clone(),
        (None, Some(path)) => format!("{} wants to use {path}", request.tool),
        (None, None) => format!("{} wants to run", request.tool),
    };
    body(Kind::PermissionRequest(proto::PermissionRequestEvent {
        request_id: request.request_id.clone(),
        tool: request.tool.clone(),
        input_json: request.input.text.clone(),
        truncated: request.input.truncated,
        title,
        deadline: Some(timestamp(deadline_millis)),
        call_id: request.call_id.clone().unwrap_or_default(),
    }))
}

fn permission_answer(answer: &event::PermissionAnswered) -> Kind {
    Kind::PermissionAnswer(proto::PermissionAnswerEvent {
        request_id: answer.request_id.clone(),
        decision: match answer.decision {
            Decision::Allow => proto::PermissionDecision::Allow,
            Decision::Deny | Decision::Withdrawn => proto::PermissionDecision::Deny,
        }
        .into(),
        decider: match answer.decided_by {
            Decider::Client => proto::PermissionDecider::Client,
            Decider::Deadline => proto::PermissionDecider::Deadline,
            Decider::Cancel => proto::PermissionDecider::Cancel,
            Decider::Engine => proto::PermissionDecider::Engine,
        }
        .into(),
        feedback: answer.feedback.as_ref().map(|text: &BoundedText| text.text.clone()).unwrap_or_default(),
    })
}

/// What was used.
#[must_use]
pub fn usage(used: &event::Usage) -> proto::Usage {
    proto::Usage {
        models: used
            .models
            .iter()
            .map(|model| proto::ModelUsage {
                model: model.model.clone(),
                input_tokens: model.input_tokens,
                output_tokens: model.output_tokens,
                cache_read_tokens: model.cache_read_tokens,
                cache_write_tokens: model.cache_write_tokens,
                #[expect(
                    clippy::cast_precision_loss,
                    reason = "an estimate in dollars; the contract has a double"
                )]
                cost_usd: model.cost_nano_usd.map(|nano| nano as f64 / 1e9),
            })
            .collect(),
        complete: used.complete,
    }
}

/// A reason.
#[must_use]
pub fn reason(reason: Reason) -> proto::FailureReason {
    match reason {
        Reason::Quota => proto::FailureReason::Quota,
        Reason::Auth => proto::FailureReason::Auth,
        Reason::EngineMissing => proto::FailureReason::EngineMissing,
        Reason::SessionUnusable => proto::FailureReason::SessionUnusable,
        Reason::ContextTooLong => proto::FailureReason::ContextTooLong,
        Reason::Process => proto::FailureReason::Process,
        Reason::OutputInvalid => proto::FailureReason::OutputInvalid,
        Reason::IdleTimeout => proto::FailureReason::IdleTimeout,
        Reason::Deadline => proto::FailureReason::Deadline,
        Reason::Stuck => proto::FailureReason::Stuck,
        Reason::PermissionDenied => proto::FailureReason::PermissionDenied,
        Reason::Configuration => proto::FailureReason::Configuration,
        Reason::RunnerLost => proto::FailureReason::RunnerLost,
        Reason::WorkspaceBusy => proto::FailureReason::WorkspaceBusy,
        Reason::Unsupported => proto::FailureReason::Unsupported,
        Reason::Storage => proto::FailureReason::Storage,
        Reason::Cancelled => proto::FailureReason::Cancelled,
    }
}

/// A failure of a turn.
#[must_use]
pub fn failure(failure: &Failure, spool_id: &str) -> proto::Failure {
    let native_code = match (&failure.native_code, failure.native_status) {
        (Some(code), Some(status)) => format!("{code} ({status})"),
        (Some(code), None) => code.clone(),
        (None, Some(status)) => status.to_string(),
        (None, None) => String::new(),
    };
    proto::Failure {
        reason: reason(failure.reason).into(),
        message: failure.message.clone(),
        next_action: failure.what_to_do.clone(),
        retryable: failure.retryable,
        retry_at: failure.retry_at_unix_seconds.map(|seconds| prost_types::Timestamp { seconds, nanos: 0 }),
        exit_code: failure.exit_code,
        signal: failure.signal,
        stderr_tail: failure.stderr_tail.clone(),
        native_code,
        spool_id: spool_id.to_owned(),
        unavailable: failure.unavailable,
    }
}

/// Unfinished text.
#[must_use]
pub fn partial(partial: &engines::Partial) -> proto::Partial {
    proto::Partial {
        item_id: partial.item.0.clone(),
        offset: partial.offset,
        text: partial.text.clone(),
        reasoning: partial.reasoning,
        truncated: false,
    }
}

/// An isolation level.
#[must_use]
pub fn isolation(level: IsolationLevel) -> proto::IsolationLevel {
    match level {
        IsolationLevel::PidNamespace => proto::IsolationLevel::PidNamespace,
        IsolationLevel::Subreaper => proto::IsolationLevel::Subreaper,
        IsolationLevel::None => proto::IsolationLevel::None,
    }
}

fn support(support: Support) -> i32 {
    match support {
        Support::Supported => proto::Support::Supported,
        Support::Unsupported => proto::Support::Unsupported,
        Support::Unknown => proto::Support::Unknown,
    }
    .into()
}

/// What an engine can do.
#[must_use]
pub fn capabilities(capabilities: &engines::Capabilities) -> proto::EngineCapabilities {
    proto::EngineCapabilities {
        resumable: support(capabilities.resumable),
        forkable: support(capabilities.forkable),
        live_input: support(capabilities.live_input),
        permission_requests: support(capabilities.permission_requests),
        prompt_change_on_resume: support(capabilities.prompt_change_on_resume),
        model_change_on_resume: support(capabilities.model_change_on_resume),
        continuable_models: capabilities.continuable_models.iter().map(|&name| name.to_owned()).collect(),
        effort_levels: capabilities.efforts.iter().map(|level| level.name().to_owned()).collect(),
    }
}
