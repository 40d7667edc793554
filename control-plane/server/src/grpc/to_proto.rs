//! From the domain to the wire. Free functions; nothing here decides anything.

use std::time::Duration;

use prost::Message as _;
use roundhouse_domain::agent_file::{AgentSnapshot, BadAgentFile, Permissions, Trigger};
use roundhouse_domain::attention::{AttentionReason, attention as rules};
use roundhouse_domain::conversation::ExternalId;
use roundhouse_domain::limits::cut;
use roundhouse_domain::message::{Message, Role};
use roundhouse_domain::outcome::{Reason, TurnError};
use roundhouse_domain::permission::{Decision, Permission, SettledBy};
use roundhouse_domain::runner::Root;
use roundhouse_domain::session::{NativeRef, Origin, PromptUse, Session, SessionState};
use roundhouse_domain::summary::Summary;
use roundhouse_domain::time::Timestamp;
use roundhouse_domain::turn::{Turn, TurnState};
use roundhouse_domain::usage::Usage;
use roundhouse_proto::control::v1 as control;
use roundhouse_proto::engine::v1 as engine;
use roundhouse_store::{ConversationView, WorkspaceView};

/// Longest body of a message in lists, in bytes.
pub(crate) const LIST_BODY_BYTES: usize = 64_000;

pub(crate) fn timestamp(time: Timestamp) -> prost_types::Timestamp {
    let micros = time.as_micros();
    let nanos = i32::try_from(micros.rem_euclid(1_000_000) * 1_000).unwrap_or(0);
    prost_types::Timestamp { seconds: micros.div_euclid(1_000_000), nanos }
}

pub(crate) fn duration(duration: Duration) -> prost_types::Duration {
    prost_types::Duration {
        seconds: i64::try_from(duration.as_secs()).unwrap_or(i64::MAX),
        nanos: i32::try_from(duration.subsec_nanos()).unwrap_or(0),
    }
}

pub(crate) fn conversation(view: &ConversationView, now: Timestamp) -> control::Conversation {
    let conversation = &view.conversation;
    control::Conversation {
        conversation_id: conversation.id.to_string(),
        external_id: conversation.external_id.as_ref().map(external_id),
        title: conversation.title.clone(),
        archived: conversation.archived,
        create_time: Some(timestamp(conversation.create_time)),
        update_time: Some(timestamp(conversation.update_time)),
        workspace_id: conversation.last_workspace_id.as_ref().map(ToString::to_string).unwrap_or_default(),
        agent: conversation.last_agent.clone().unwrap_or_default(),
        active_turn_id: view.active_turn.as_ref().map(ToString::to_string).unwrap_or_default(),
        waiting: view.waiting,
        attention: attention(view, now),
        last_seq: conversation.last_seq,
    }
}

/// What wants a person, the most urgent first.
pub(crate) fn attention(view: &ConversationView, now: Timestamp) -> Vec<control::Attention> {
    use control::attention::Reason as R;
    let holder = view.facts.held_by.as_ref().map(|h| h.turn_id.to_string()).unwrap_or_default();
    rules(&view.facts, now)
        .into_iter()
        .map(|item| {
            let (reason, held_by) = match item.reason {
                AttentionReason::PermissionPending => (R::Permission, String::new()),
                AttentionReason::WaitingForWorkspace | AttentionReason::WorkspaceHeldByLostTurn => {
                    (R::WaitingForWorkspace, holder.clone())
                }
                AttentionReason::RunnerSilent | AttentionReason::RunnerDraining => {
                    (R::WaitingForRunner, String::new())
                }
                AttentionReason::TurnFailed => (R::Failed, String::new()),
                AttentionReason::TurnLost => (R::Lost, String::new()),
            };
            control::Attention {
                reason: reason.into(),
                turn_id: item.turn_id.to_string(),
                next_action: item.next_action,
                held_by_turn_id: held_by,
            }
        })
        .collect()
}

fn external_id(id: &ExternalId) -> control::ExternalId {
    control::ExternalId { project: id.project.clone(), provider: id.provider.clone(), id: id.id.clone() }
}

/// A message with its whole body.
pub(crate) fn message(message: &Message) -> control::Message {
    let role = match message.role {
        Role::User => control::Role::User,
        Role::Agent => control::Role::Agent,
        Role::System => control::Role::System,
    };
    control::Message {
        message_id: message.id.to_string(),
        conversation_id: message.conversation_id.to_string(),
        seq: message.seq,
        position: message.position.map(|p| p.0),
        role: role.into(),
        actor: message.actor.clone(),
        text: message.body.clone(),
        truncated: message.truncated,
        incomplete: message.incomplete,
        turn_id: message.turn_id.as_ref().map(ToString::to_string).unwrap_or_default(),
        create_time: Some(timestamp(message.create_time)),
    }
}

/// A message as lists and streams show it: a long body is cut and flagged.
pub(crate) fn listed_message(stored: &Message) -> control::Message {
    let (text, was_cut) = cut(&stored.body, LIST_BODY_BYTES);
    if !was_cut {
        return message(stored);
    }
    let short = Message { body: text.to_owned(), truncated: true, ..stored.clone() };
    message(&short)
}

pub(crate) fn status(state: TurnState) -> control::TurnStatus {
    match state {
        TurnState::Queued => control::TurnStatus::Queued,
        TurnState::Dispatching => control::TurnStatus::Dispatching,
        TurnState::Running => control::TurnStatus::Running,
        TurnState::WaitingForPermission => control::TurnStatus::WaitingForPermission,
        TurnState::Cancelling => control::TurnStatus::Cancelling,
        TurnState::Completed => control::TurnStatus::Completed,
        TurnState::Failed => control::TurnStatus::Failed,
        TurnState::Cancelled => control::TurnStatus::Cancelled,
        TurnState::Lost => control::TurnStatus::Lost,
    }
}

pub(crate) fn turn(turn: &Turn) -> control::Turn {
    let agent = turn.agent.as_ref();
    let opening = turn.opening.as_ref();
    let prompt_change = match opening.map(|o| o.prompt) {
        Some(PromptUse::AppliedOnResume) => control::PromptChange::Applied,
        Some(PromptUse::NewSession) => control::PromptChange::NewSession,
        Some(PromptUse::Initial | PromptUse::Unchanged) | None => control::PromptChange::Unspecified,
    };
    control::Turn {
        turn_id: turn.id.to_string(),
        conversation_id: turn.conversation_id.to_string(),
        message_id: turn.message_id.to_string(),
        retry_of: turn.retry_of.as_ref().map(ToString::to_string).unwrap_or_default(),
        status: status(turn.state).into(),
        agent: agent.map(|a| a.name.clone()).or_else(|| turn.agent_name.clone()).unwrap_or_default(),
        workspace_id: turn.workspace_id.as_ref().map(ToString::to_string).unwrap_or_default(),
        engine: agent.map(|a| a.engine.clone()).unwrap_or_default(),
        model: agent.map(|a| a.model.clone()).unwrap_or_default(),
        effort: agent.and_then(|a| a.reasoning_effort).map(|e| e.as_str().to_owned()),
        session_id: turn.session_id.as_ref().map(ToString::to_string).unwrap_or_default(),
        origin: opening.map_or(engine::Origin::Unspecified, |o| origin(o.origin)).into(),
        history_given: opening.is_some_and(|o| o.history > 0),
        summary_given: opening.is_some_and(|o| o.summary),
        agent_sha256: agent.map(|a| a.sha256.clone()).unwrap_or_default(),
        epoch: turn.epoch.0,
        create_time: Some(timestamp(turn.create_time)),
        start_time: turn.start_time.map(timestamp),
        end_time: turn.end_time.map(timestamp),
        failure: turn.error.as_ref().map(failure),
        usage: usage(&turn.usage),
        last_event_seq: turn.last_seq,
        answer_message_id: turn.agent_message_id.as_ref().map(ToString::to_string).unwrap_or_default(),
        prompt_change: prompt_change.into(),
    }
}

pub(crate) fn origin(origin: Origin) -> engine::Origin {
    match origin {
        Origin::Started => engine::Origin::Started,
        Origin::Resumed => engine::Origin::Resumed,
        Origin::Replaced => engine::Origin::Replaced,
        Origin::Forked => engine::Origin::Forked,
        Origin::Moved => engine::Origin::Moved,
    }
}

pub(crate) fn reason(reason: Reason) -> engine::FailureReason {
    use engine::FailureReason as F;
    match reason {
        Reason::Quota => F::Quota,
        Reason::Auth => F::Auth,
        Reason::EngineMissing => F::EngineMissing,
        Reason::SessionUnusable => F::SessionUnusable,
        Reason::ContextTooLong => F::ContextTooLong,
        Reason::Process => F::Process,
        Reason::OutputInvalid => F::OutputInvalid,
        Reason::IdleTimeout => F::IdleTimeout,
        Reason::Deadline => F::Deadline,
        Reason::Stuck => F::Stuck,
        Reason::PermissionDenied => F::PermissionDenied,
        Reason::Configuration => F::Configuration,
        Reason::RunnerLost => F::RunnerLost,
        Reason::WorkspaceBusy => F::WorkspaceBusy,
        Reason::Unsupported => F::Unsupported,
        Reason::Storage => F::Storage,
        Reason::Cancelled => F::Cancelled,
    }
}

pub(crate) fn failure(error: &TurnError) -> engine::Failure {
    engine::Failure {
        reason: reason(error.reason).into(),
        message: error.message.clone(),
        next_action: error.next_step.clone(),
        retryable: error.retryable,
        retry_at: error.retry_at.map(timestamp),
        exit_code: error.exit_code,
        signal: error.signal,
        stderr_tail: error.stderr_tail.clone(),
        native_code: error.native_code.clone().unwrap_or_default(),
        spool_id: error.spool.clone().unwrap_or_default(),
        unavailable: error.unavailable,
    }
}

/// Usage, unless nothing is known.
pub(crate) fn usage(usage: &Usage) -> Option<engine::Usage> {
    if usage.models.is_empty() {
        return None;
    }
    let models = usage.models.iter().map(|model| engine::ModelUsage {
        model: model.model.clone(),
        input_tokens: model.input_tokens,
        output_tokens: model.output_tokens,
        cache_read_tokens: model.cache_read_tokens,
        cache_write_tokens: model.cache_write_tokens,
        cost_usd: model.cost_nanos.map(dollars),
    });
    Some(engine::Usage { models: models.collect(), complete: usage.complete })
}

/// Billionths of a dollar as dollars.
fn dollars(nanos: u64) -> f64 {
    #[expect(
        clippy::cast_precision_loss,
        reason = "an estimate for people; 2^53 billionths are nine million dollars"
    )]
    let nanos = nanos as f64;
    nanos / 1e9
}

/// A native reference as stored: the encoded message of the wire.
pub(crate) fn native_ref(stored: &NativeRef) -> Option<engine::NativeRef> {
    engine::NativeRef::decode(stored.0.as_slice()).ok()
}

/// A session. Its origin at making is not stored apart: what replaces another one was REPLACED.
pub(crate) fn session(session: &Session) -> control::Session {
    use control::session::State;
    let (state, reason) = match &session.state {
        SessionState::Active => (State::Active, String::new()),
        SessionState::Unusable(reason) => (State::Unusable, reason.clone()),
    };
    let origin = if session.replaces.is_some() { engine::Origin::Replaced } else { engine::Origin::Started };
    control::Session {
        session_id: session.id.to_string(),
        conversation_id: session.conversation_id.to_string(),
        workspace_id: session.workspace_id.to_string(),
        agent: session.agent_name.clone(),
        engine: session.engine.clone(),
        model: session.model.clone(),
        state: state.into(),
        unusable_reason: reason,
        native_ref: session.native_ref.as_ref().and_then(native_ref),
        replaces: session.replaces.as_ref().map(ToString::to_string).unwrap_or_default(),
        watermark: session.watermark.0,
        create_time: Some(timestamp(session.create_time)),
        update_time: Some(timestamp(session.use_time)),
        origin: origin.into(),
    }
}

/// A version of a summary, whole.
pub(crate) fn summary(summary: &Summary) -> control::Summary {
    control::Summary {
        conversation_id: summary.conversation_id.to_string(),
        version: summary.version,
        through: summary.through.0,
        text: summary.text.clone(),
        truncated: false,
        author: summary.author.clone(),
        create_time: Some(timestamp(summary.create_time)),
    }
}

/// A summary as streams show it: a long text is cut and flagged.
pub(crate) fn told_summary(stored: &Summary) -> control::Summary {
    let (text, truncated) = cut(&stored.text, LIST_BODY_BYTES);
    let text = text.to_owned();
    control::Summary { truncated, ..summary(&Summary { text, ..stored.clone() }) }
}

pub(crate) fn decision(decision: Decision) -> engine::PermissionDecision {
    match decision {
        Decision::Allow => engine::PermissionDecision::Allow,
        Decision::Deny => engine::PermissionDecision::Deny,
    }
}

pub(crate) fn permission(permission: &Permission) -> control::Permission {
    use control::permission::State;
    use engine::PermissionDecider as By;
    let (state, decided, decider) = match (&permission.result, &permission.intent) {
        (Some(result), _) => {
            let by = match result.settled_by {
                SettledBy::Answer => By::Client,
                SettledBy::Deadline => By::Deadline,
                SettledBy::TurnEnded => By::Cancel,
                SettledBy::Withdrawn => By::Engine,
            };
            (State::Decided, Some(result.decision), by)
        }
        (None, Some(intent)) => (State::Answered, Some(intent.decision), By::Unspecified),
        (None, None) => (State::Open, None, By::Unspecified),
    };
    // The event as it was asked has all of it, the tool's input too.
    let request = &permission.request;
    let request = engine::PermissionRequestEvent::decode(request.body.as_slice()).unwrap_or_else(|_| {
        engine::PermissionRequestEvent {
            request_id: request.request_id.clone(),
            tool: request.tool.clone(),
            title: request.title.clone(),
            deadline: request.deadline.map(timestamp),
            ..engine::PermissionRequestEvent::default()
        }
    });
    control::Permission {
        request_id: permission.request.request_id.clone(),
        conversation_id: permission.conversation_id.to_string(),
        turn_id: permission.turn_id.to_string(),
        request: Some(request),
        state: state.into(),
        decision: decided.map_or(engine::PermissionDecision::Unspecified, decision).into(),
        decider: decider.into(),
        create_time: Some(timestamp(permission.create_time)),
    }
}

pub(crate) fn workspace(view: &WorkspaceView) -> control::Workspace {
    let holder = view.holder.as_ref();
    control::Workspace {
        workspace_id: view.workspace.id.to_string(),
        runner_id: view.workspace.runner_id.to_string(),
        path: view.workspace.path.clone(),
        held_by_turn_id: holder.map(|h| h.turn_id.to_string()).unwrap_or_default(),
        held_by_lost_turn: holder.is_some_and(|h| h.state == TurnState::Lost),
        waiting_turns: view.waiting,
    }
}

pub(crate) fn root(root: &Root) -> engine::Root {
    engine::Root { path: root.path.clone(), trusted: root.trusted }
}

pub(crate) fn permission_mode(permissions: Permissions) -> engine::PermissionMode {
    match permissions {
        Permissions::Ask => engine::PermissionMode::Ask,
        Permissions::AcceptEdits => engine::PermissionMode::AcceptEdits,
        Permissions::Bypass => engine::PermissionMode::Bypass,
    }
}

pub(crate) fn agent(agent: &AgentSnapshot) -> control::Agent {
    let trigger = |trigger: &Trigger| match trigger {
        Trigger::Manual => control::Trigger::Manual.into(),
        Trigger::Mcp => control::Trigger::Mcp.into(),
        Trigger::Ui => control::Trigger::Ui.into(),
    };
    control::Agent {
        name: agent.name.clone(),
        description: agent.description.clone(),
        engine: agent.engine.clone(),
        model: agent.model.clone(),
        reasoning_effort: agent.reasoning_effort.map(|e| e.as_str().to_owned()),
        permissions: permission_mode(agent.permissions).into(),
        enabled: agent.enabled,
        triggers: agent.triggers.iter().map(trigger).collect(),
        sha256: agent.sha256.clone(),
        prompt_characters: u32::try_from(agent.prompt().chars().count()).unwrap_or(u32::MAX),
    }
}

pub(crate) fn agent_problems(bad: &BadAgentFile) -> Vec<control::AgentProblem> {
    bad.errors
        .iter()
        .map(|error| control::AgentProblem {
            file_name: bad.file.clone(),
            line: u32::try_from(error.line).unwrap_or(u32::MAX),
            field: error.field.clone(),
            message: error.problem.to_string(),
        })
        .collect()
}
