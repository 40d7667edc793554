//! The protocol's messages as JSON: the stable shapes that `--json` prints.
//!
//! Names of fields are the protocol's, names of states those of the protocol without their prefix. What is absent is
//! null. Times are RFC 3339 in UTC. A state that this release does not know is `UNKNOWN(<number>)`.

use jiff::Timestamp;
use roundhouse_proto::control::v1 as control;
use roundhouse_proto::engine::v1 as engine;
use serde_json::{Map, Value, json};

use crate::commands::sharing::summary_json;

/// The name of an enum value without its prefix.
macro_rules! name {
    ($ty:ty, $value:expr, $prefix:literal) => {
        match <$ty>::try_from($value) {
            Ok(known) => known.as_str_name().trim_start_matches($prefix).to_owned(),
            Err(_) => format!("UNKNOWN({})", $value),
        }
    };
}

pub(crate) fn turn_status(value: i32) -> String {
    name!(control::TurnStatus, value, "TURN_STATUS_")
}

pub(crate) fn origin(value: i32) -> String {
    name!(engine::Origin, value, "ORIGIN_")
}

pub(crate) fn outcome(value: i32) -> String {
    name!(engine::Outcome, value, "OUTCOME_")
}

pub(crate) fn failure_reason(value: i32) -> String {
    name!(engine::FailureReason, value, "FAILURE_REASON_")
}

pub(crate) fn role(value: i32) -> String {
    name!(control::Role, value, "ROLE_")
}

pub(crate) fn session_state(value: i32) -> String {
    name!(control::session::State, value, "STATE_")
}

pub(crate) fn runner_state(value: i32) -> String {
    name!(control::runner::State, value, "STATE_")
}

pub(crate) fn permission_state(value: i32) -> String {
    name!(control::permission::State, value, "STATE_")
}

pub(crate) fn attention_reason(value: i32) -> String {
    name!(control::attention::Reason, value, "REASON_")
}

pub(crate) fn isolation(value: i32) -> String {
    name!(engine::IsolationLevel, value, "ISOLATION_LEVEL_")
}

pub(crate) fn login(value: i32) -> String {
    name!(engine::LoginKind, value, "LOGIN_KIND_")
}

pub(crate) fn decision(value: i32) -> String {
    name!(engine::PermissionDecision, value, "PERMISSION_DECISION_")
}

pub(crate) fn decider(value: i32) -> String {
    name!(engine::PermissionDecider, value, "PERMISSION_DECIDER_")
}

pub(crate) fn permission_mode(value: i32) -> String {
    name!(engine::PermissionMode, value, "PERMISSION_MODE_")
}

pub(crate) fn trigger(value: i32) -> String {
    name!(control::Trigger, value, "TRIGGER_")
}

pub(crate) fn phase(value: i32) -> String {
    name!(engine::phase_event::Phase, value, "PHASE_")
}

pub(crate) fn notice_kind(value: i32) -> String {
    name!(engine::notice_event::Kind, value, "KIND_")
}

pub(crate) fn change(value: i32) -> String {
    name!(engine::file_change_event::Change, value, "CHANGE_")
}

pub(crate) fn session_event_state(value: i32) -> String {
    name!(engine::session_event::State, value, "STATE_")
}

fn support(value: i32) -> String {
    name!(engine::Support, value, "SUPPORT_")
}

fn prompt_change(value: i32) -> Value {
    let name = name!(control::PromptChange, value, "PROMPT_CHANGE_");
    if name == "UNSPECIFIED" { Value::Null } else { json!(name) }
}

/// A point in time, if it can be one.
pub(crate) fn timestamp(time: Option<&prost_types::Timestamp>) -> Option<Timestamp> {
    let time = time?;
    Timestamp::new(time.seconds, time.nanos).ok()
}

pub(crate) fn time(value: Option<&prost_types::Timestamp>) -> Value {
    timestamp(value).map_or(Value::Null, |time| json!(time.to_string()))
}

/// Whole milliseconds.
pub(crate) fn milliseconds(value: &prost_types::Duration) -> i64 {
    value.seconds.saturating_mul(1_000).saturating_add(i64::from(value.nanos) / 1_000_000)
}

/// A text that means absence when it is empty.
fn text(value: &str) -> Value {
    if value.is_empty() { Value::Null } else { json!(value) }
}

pub(crate) fn external_id(id: &control::ExternalId) -> Value {
    json!({"project": id.project, "provider": id.provider, "id": id.id})
}

pub(crate) fn attention(attention: &control::Attention) -> Value {
    json!({
        "reason": attention_reason(attention.reason),
        "turn_id": text(&attention.turn_id),
        "next_action": text(&attention.next_action),
        "held_by_turn_id": text(&attention.held_by_turn_id),
    })
}

pub(crate) fn conversation(conversation: &control::Conversation) -> Value {
    json!({
        "conversation_id": conversation.conversation_id,
        "external_id": conversation.external_id.as_ref().map(external_id),
        "title": conversation.title,
        "archived": conversation.archived,
        "create_time": time(conversation.create_time.as_ref()),
        "update_time": time(conversation.update_time.as_ref()),
        "workspace_id": text(&conversation.workspace_id),
        "agent": text(&conversation.agent),
        "active_turn_id": text(&conversation.active_turn_id),
        "waiting": conversation.waiting,
        "attention": conversation.attention.iter().map(attention).collect::<Vec<_>>(),
        "last_seq": conversation.last_seq,
    })
}

pub(crate) fn message(message: &control::Message) -> Value {
    json!({
        "message_id": message.message_id,
        "conversation_id": message.conversation_id,
        "seq": message.seq,
        "position": message.position,
        "role": role(message.role),
        "actor": text(&message.actor),
        "text": message.text,
        "truncated": message.truncated,
        "incomplete": message.incomplete,
        "turn_id": text(&message.turn_id),
        "create_time": time(message.create_time.as_ref()),
    })
}

pub(crate) fn failure(failure: &engine::Failure) -> Value {
    json!({
        "reason": failure_reason(failure.reason),
        "message": failure.message,
        "next_action": text(&failure.next_action),
        "retryable": failure.retryable,
        "retry_at": time(failure.retry_at.as_ref()),
        "exit_code": failure.exit_code,
        "signal": failure.signal,
        "stderr_tail": text(&failure.stderr_tail),
        "native_code": text(&failure.native_code),
        "spool_id": text(&failure.spool_id),
        "unavailable": failure.unavailable,
    })
}

pub(crate) fn usage(usage: &engine::Usage) -> Value {
    let models: Vec<Value> = usage
        .models
        .iter()
        .map(|model| {
            json!({
                "model": model.model,
                "input_tokens": model.input_tokens,
                "output_tokens": model.output_tokens,
                "cache_read_tokens": model.cache_read_tokens,
                "cache_write_tokens": model.cache_write_tokens,
                "cost_usd": model.cost_usd,
            })
        })
        .collect();
    json!({"models": models, "complete": usage.complete})
}

pub(crate) fn turn(turn: &control::Turn) -> Value {
    let origin = if turn.origin == 0 { Value::Null } else { json!(origin(turn.origin)) };
    json!({
        "turn_id": turn.turn_id,
        "conversation_id": turn.conversation_id,
        "message_id": turn.message_id,
        "retry_of": text(&turn.retry_of),
        "status": turn_status(turn.status),
        "agent": text(&turn.agent),
        "workspace_id": text(&turn.workspace_id),
        "engine": text(&turn.engine),
        "model": text(&turn.model),
        "effort": turn.effort,
        "session_id": text(&turn.session_id),
        "origin": origin,
        "history_given": turn.history_given,
        "summary_given": turn.summary_given,
        "prompt_change": prompt_change(turn.prompt_change),
        "agent_sha256": text(&turn.agent_sha256),
        "epoch": turn.epoch,
        "create_time": time(turn.create_time.as_ref()),
        "start_time": time(turn.start_time.as_ref()),
        "end_time": time(turn.end_time.as_ref()),
        "failure": turn.failure.as_ref().map(failure),
        "usage": turn.usage.as_ref().map(usage),
        "last_event_seq": turn.last_event_seq,
        "answer_message_id": text(&turn.answer_message_id),
    })
}

fn native_ref(native: Option<&engine::NativeRef>) -> Value {
    native.map_or(Value::Null, |native| json!({"id": native.id}))
}

pub(crate) fn session(session: &control::Session) -> Value {
    json!({
        "session_id": session.session_id,
        "conversation_id": session.conversation_id,
        "workspace_id": session.workspace_id,
        "agent": session.agent,
        "engine": session.engine,
        "model": text(&session.model),
        "state": session_state(session.state),
        "unusable_reason": text(&session.unusable_reason),
        "native_ref": native_ref(session.native_ref.as_ref()),
        "replaces": text(&session.replaces),
        "origin": if session.origin == 0 { Value::Null } else { json!(origin(session.origin)) },
        "watermark": session.watermark,
        "create_time": time(session.create_time.as_ref()),
        "update_time": time(session.update_time.as_ref()),
    })
}

pub(crate) fn root(root: &engine::Root) -> Value {
    json!({"path": root.path, "trusted": root.trusted})
}

pub(crate) fn engine_facts(engine: &engine::Engine) -> Value {
    let capabilities = engine.capabilities.as_ref().map(|can| {
        json!({
            "resumable": support(can.resumable),
            "forkable": support(can.forkable),
            "live_input": support(can.live_input),
            "permission_requests": support(can.permission_requests),
            "prompt_change_on_resume": support(can.prompt_change_on_resume),
            "model_change_on_resume": support(can.model_change_on_resume),
            "effort_levels": can.effort_levels,
            "continuable_models": can.continuable_models,
        })
    });
    json!({
        "name": engine.name,
        "installed": engine.installed,
        "version": text(&engine.version),
        "pinned_version": text(&engine.pinned_version),
        "executable": text(&engine.executable),
        "login": login(engine.login),
        "login_detail": text(&engine.login_detail),
        "capabilities": capabilities,
    })
}

pub(crate) fn runner(runner: &control::Runner) -> Value {
    json!({
        "runner_id": runner.runner_id,
        "hostname": runner.hostname,
        "address": runner.address,
        "state": runner_state(runner.state),
        "roots": runner.roots.iter().map(root).collect::<Vec<_>>(),
        "last_seen_time": time(runner.last_seen_time.as_ref()),
        "version": runner.version,
        "running_turns": runner.running_turns,
        "warm_engines": runner.warm_engines,
        "engines": runner.engines.iter().map(engine_facts).collect::<Vec<_>>(),
        "isolation": isolation(runner.isolation),
    })
}

pub(crate) fn workspace(workspace: &control::Workspace) -> Value {
    json!({
        "workspace_id": workspace.workspace_id,
        "runner_id": workspace.runner_id,
        "path": workspace.path,
        "held_by_turn_id": text(&workspace.held_by_turn_id),
        "held_by_lost_turn": workspace.held_by_lost_turn,
        "waiting_turns": workspace.waiting_turns,
    })
}

pub(crate) fn agent(agent: &control::Agent) -> Value {
    json!({
        "name": agent.name,
        "description": agent.description,
        "engine": agent.engine,
        "model": agent.model,
        "reasoning_effort": agent.reasoning_effort,
        "permissions": permission_mode(agent.permissions),
        "enabled": agent.enabled,
        "triggers": agent.triggers.iter().map(|value| trigger(*value)).collect::<Vec<_>>(),
        "sha256": agent.sha256,
        "prompt_characters": agent.prompt_characters,
    })
}

pub(crate) fn agent_problem(problem: &control::AgentProblem) -> Value {
    json!({
        "file_name": problem.file_name,
        "line": problem.line,
        "field": text(&problem.field),
        "message": problem.message,
    })
}

/// JSON in a text, as JSON; what is none stays a text.
fn embedded(source: &str) -> Value {
    serde_json::from_str(source).unwrap_or_else(|_| json!(source))
}

fn permission_request(request: &engine::PermissionRequestEvent) -> Value {
    json!({
        "request_id": request.request_id,
        "tool": request.tool,
        "input": embedded(&request.input_json),
        "truncated": request.truncated,
        "title": text(&request.title),
        "deadline": time(request.deadline.as_ref()),
        "call_id": text(&request.call_id),
    })
}

pub(crate) fn permission(permission: &control::Permission) -> Value {
    let unless_zero = |value: i32, name: fn(i32) -> String| {
        if value == 0 { Value::Null } else { json!(name(value)) }
    };
    json!({
        "request_id": permission.request_id,
        "conversation_id": permission.conversation_id,
        "turn_id": permission.turn_id,
        "state": permission_state(permission.state),
        "request": permission.request.as_ref().map(permission_request),
        "decision": unless_zero(permission.decision, decision),
        "decider": unless_zero(permission.decider, decider),
        "create_time": time(permission.create_time.as_ref()),
    })
}

/// The kind of an event and its body.
pub(crate) fn event(body: &engine::EventBody) -> (&'static str, Value) {
    use engine::event_body::Kind;
    match &body.kind {
        None => ("unknown", Value::Null),
        Some(Kind::Session(e)) => (
            "session",
            json!({
                "state": session_event_state(e.state),
                "session_id": e.session_id,
                "origin": if e.origin == 0 { Value::Null } else { json!(origin(e.origin)) },
                "native_ref": native_ref(e.native_ref.as_ref()),
                "reason": text(&e.reason),
                "replaces": text(&e.replaces),
                "history_given": e.history_given,
                "summary_given": e.summary_given,
            }),
        ),
        Some(Kind::Phase(e)) => (
            "phase",
            json!({"phase": phase(e.phase), "message_id": text(&e.message_id), "detail": text(&e.detail)}),
        ),
        Some(Kind::Text(e)) => (
            "text",
            json!({
                "item_id": e.item_id, "text": e.text, "truncated": e.truncated, "incomplete": e.incomplete,
                "sub_agent": text(&e.sub_agent),
            }),
        ),
        Some(Kind::Reasoning(e)) => {
            ("reasoning", json!({"item_id": e.item_id, "text": e.text, "truncated": e.truncated}))
        }
        Some(Kind::ToolCall(e)) => (
            "tool_call",
            json!({
                "call_id": e.call_id, "name": e.name, "input": embedded(&e.input_json), "truncated": e.truncated,
                "sub_agent": text(&e.sub_agent),
            }),
        ),
        Some(Kind::ToolResult(e)) => (
            "tool_result",
            json!({"call_id": e.call_id, "is_error": e.is_error, "output": e.output, "truncated": e.truncated}),
        ),
        Some(Kind::FileChange(e)) => {
            ("file_change", json!({"path": e.path, "change": change(e.change), "call_id": text(&e.call_id)}))
        }
        Some(Kind::PermissionRequest(e)) => ("permission_request", permission_request(e)),
        Some(Kind::PermissionAnswer(e)) => (
            "permission_answer",
            json!({
                "request_id": e.request_id, "decision": decision(e.decision), "decider": decider(e.decider),
                "feedback": text(&e.feedback),
            }),
        ),
        Some(Kind::Usage(e)) => ("usage", json!({"usage": e.usage.as_ref().map(usage)})),
        Some(Kind::Quota(e)) => (
            "quota",
            json!({"status": e.status, "resets_at": time(e.resets_at.as_ref()), "message": text(&e.message)}),
        ),
        Some(Kind::Notice(e)) => ("notice", json!({"kind": notice_kind(e.kind), "message": e.message})),
        Some(Kind::Evidence(e)) => ("evidence", evidence(e)),
        Some(Kind::Terminal(e)) => (
            "terminal",
            json!({
                "outcome": outcome(e.outcome),
                "result": e.result,
                "truncated": e.truncated,
                "failure": e.failure.as_ref().map(failure),
                "usage": e.usage.as_ref().map(usage),
                "duration_ms": e.duration.as_ref().map(milliseconds),
                "session_resumable": e.session_resumable,
            }),
        ),
    }
}

fn evidence(e: &engine::EvidenceEvent) -> Value {
    json!({
        "point": name!(engine::evidence_event::Point, e.point, "POINT_"),
        "head": text(&e.head),
        "branch": text(&e.branch),
        "dirty": e.dirty,
        "commits": e.commits,
        "changed_files": e.changed_files,
        "truncated": e.truncated,
    })
}

/// One item of a stream.
pub(crate) fn stream_item(item: &control::StreamEventsResponse) -> Value {
    use control::stream_events_response::Item;
    let mut line = Map::new();
    line.insert("cursor".to_owned(), text(&item.cursor));
    line.insert("at".to_owned(), time(item.at.as_ref()));
    let (kind, rest) = match &item.item {
        None => ("unknown", json!({})),
        Some(Item::TurnEvent(event_of)) => {
            let (kind, body) = event_of.body.as_ref().map_or(("unknown", Value::Null), event);
            (
                "turn_event",
                json!({"turn_id": event_of.turn_id, "seq": event_of.seq, "event": kind, "body": body}),
            )
        }
        Some(Item::Message(it)) => ("message", json!({"message": message(it)})),
        Some(Item::Turn(it)) => ("turn", json!({"turn": turn(it)})),
        Some(Item::Summary(it)) => ("summary", json!({"summary": summary_json(it)})),
        Some(Item::Session(it)) => ("session", json!({"session": session(it)})),
        Some(Item::Partial(it)) => {
            let partial = it.partial.as_ref().map(|partial| {
                json!({
                    "item_id": partial.item_id, "offset": partial.offset, "text": partial.text,
                    "reasoning": partial.reasoning, "truncated": partial.truncated,
                })
            });
            ("partial", json!({"turn_id": it.turn_id, "partial": partial}))
        }
        Some(Item::PartialReset(it)) => (
            "partial_reset",
            json!({"turn_id": it.turn_id, "item_id": it.reset.as_ref().map(|reset| &reset.item_id)}),
        ),
    };
    line.insert("kind".to_owned(), json!(kind));
    if let Value::Object(rest) = rest {
        line.extend(rest);
    }
    Value::Object(line)
}

#[cfg(test)]
mod tests;
