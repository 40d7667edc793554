//! From a runner's numbered event to what the store keeps, and to what storing it does besides. Pure.

use prost::Message as _;
use roundhouse_domain::event::{Effect, EventKind, EventSource, NewEvent};
use roundhouse_domain::id::{MessageId, SessionId};
use roundhouse_domain::limits::{MAX_EVENT, cut};
use roundhouse_domain::outcome::{Outcome, TurnError};
use roundhouse_domain::permission::{PermissionRequest, PermissionResult};
use roundhouse_domain::time::Timestamp;
use roundhouse_proto::engine::v1 as engine;
use roundhouse_proto::engine::v1::event_body::Kind;

use crate::grpc::{from_proto, to_proto};

/// Most bytes of the answer in a terminal event as clients see it; the message has the rest.
const MAX_SHOWN_RESULT: usize = 64_000;
/// Bytes of a terminal event that are kept free for what goes round its parts.
const ROOM: usize = 512;

/// What only the control plane knows of the session that the turn works in; it is filled in when the runner's event
/// about the opening is stored.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Opened {
    pub(crate) session_id: String,
    pub(crate) replaces: Option<String>,
    pub(crate) origin: engine::Origin,
    pub(crate) history_given: bool,
    pub(crate) summary_given: bool,
}

/// How a turn ended, as its terminal event tells.
#[derive(Clone, Debug)]
pub(crate) struct Ending {
    pub(crate) outcome: Outcome,
    /// The answer, or what there was of it.
    pub(crate) result: String,
    pub(crate) usage: Option<engine::Usage>,
    pub(crate) event: NewEvent,
}

/// A runner's event, sorted.
#[derive(Clone, Debug)]
pub(crate) enum Incoming {
    /// It is stored, and the turn goes on.
    Event(NewEvent),
    /// It is stored, and if the engine has not taken the message yet the session has to be replaced.
    Unusable {
        /// The event.
        event: NewEvent,
        /// The session.
        session_id: String,
        /// Why.
        reason: String,
    },
    /// It ends the turn.
    Terminal(Box<Ending>),
}

/// Sorts one event. `opened` is what is known of the turn's session; `now` stands in where the runner gave no time.
pub(crate) fn sort(event: engine::NumberedEvent, opened: &Opened, now: Timestamp) -> Incoming {
    let source = EventSource::Runner { number: event.number };
    let time = event.at.as_ref().map_or(now, from_proto::timestamp);
    let Some(kind) = event.body.and_then(|body| body.kind) else {
        return Incoming::Event(unknown(source, time));
    };
    let kind = match kind {
        Kind::Session(session) => Kind::Session(complete(session, opened)),
        Kind::Terminal(terminal) => {
            return Incoming::Terminal(Box::new(ending(source, time, terminal)));
        }
        kind @ (Kind::Phase(_)
        | Kind::Text(_)
        | Kind::Reasoning(_)
        | Kind::ToolCall(_)
        | Kind::ToolResult(_)
        | Kind::FileChange(_)
        | Kind::PermissionRequest(_)
        | Kind::PermissionAnswer(_)
        | Kind::Usage(_)
        | Kind::Quota(_)
        | Kind::Notice(_)
        | Kind::Evidence(_)) => kind,
    };
    let unusable = match &kind {
        Kind::Session(s) if s.state() == engine::session_event::State::Unusable => {
            Some((s.session_id.clone(), s.reason.clone()))
        }
        _ => None,
    };
    let event = stored(source, time, kind);
    match unusable {
        Some((session_id, reason)) => Incoming::Unusable { event, session_id, reason },
        None => Incoming::Event(event),
    }
}

/// What a stored event shows of the turn's message: true, it was on its way to the engine; false, the session that it was
/// for is lost and has nothing of it. None: nothing.
pub(crate) fn shows_message(payload: &[u8]) -> Option<bool> {
    use engine::phase_event::Phase;
    match engine::EventBody::decode(payload).ok()?.kind? {
        Kind::Session(session) => {
            (session.state() == engine::session_event::State::Unusable).then_some(false)
        }
        Kind::Phase(phase) => matches!(phase.phase(), Phase::Delivered | Phase::Accepted).then_some(true),
        // These come before the message, too.
        Kind::Notice(_) | Kind::Evidence(_) => None,
        Kind::Text(_)
        | Kind::Reasoning(_)
        | Kind::ToolCall(_)
        | Kind::ToolResult(_)
        | Kind::FileChange(_)
        | Kind::PermissionRequest(_)
        | Kind::PermissionAnswer(_)
        | Kind::Usage(_)
        | Kind::Quota(_)
        | Kind::Terminal(_) => Some(true),
    }
}

/// The item whose unfinished text the event replaces, if it is one.
pub(crate) fn finished_item(kind: &Kind) -> Option<&str> {
    match kind {
        Kind::Text(text) => Some(&text.item_id),
        Kind::Reasoning(reasoning) => Some(&reasoning.item_id),
        _ => None,
    }
}

fn complete(mut session: engine::SessionEvent, opened: &Opened) -> engine::SessionEvent {
    if session.state() == engine::session_event::State::Opened && session.session_id == opened.session_id {
        if opened.origin != engine::Origin::Unspecified {
            session.set_origin(opened.origin);
        }
        session.replaces = opened.replaces.clone().unwrap_or_default();
        session.history_given = opened.history_given;
        session.summary_given = opened.summary_given;
    }
    session
}

/// An event to be stored, with its effect. One that is larger than an event may be is replaced by a warning: its
/// number must not be missing.
pub(crate) fn stored(source: EventSource, time: Timestamp, kind: Kind) -> NewEvent {
    let kind = fitted(kind);
    let effect = effect(&kind);
    let event_kind = kind_of(&kind);
    let payload = engine::EventBody { kind: Some(kind) }.encode_to_vec();
    if payload.len() <= MAX_EVENT {
        return NewEvent { source, kind: event_kind, payload, time, effect };
    }
    let effect = bounded(effect);
    let text = format!(
        "an event ({event_kind}) of {} bytes is larger than events may be; the spool has it",
        payload.len()
    );
    NewEvent { effect, ..warning(source, time, text) }
}

/// A permission request whose input is cut, if need be, so that it can be stored: it has to be answered.
fn fitted(kind: Kind) -> Kind {
    let Kind::PermissionRequest(mut request) = kind else { return kind };
    let excess = (request.encoded_len() + ROOM).saturating_sub(MAX_EVENT);
    if excess > 0 {
        let room = request.input_json.len().saturating_sub(excess);
        request.input_json = cut(&request.input_json, room).0.to_owned();
        request.truncated = true;
    }
    Kind::PermissionRequest(request)
}

/// An effect that can be stored although its event cannot.
fn bounded(effect: Effect) -> Effect {
    match effect {
        Effect::PermissionRequested(request) => {
            Effect::PermissionRequested(PermissionRequest { body: Vec::new(), ..request })
        }
        effect @ (Effect::None
        | Effect::NativeRef { .. }
        | Effect::Accepted { .. }
        | Effect::PermissionSettled { .. }
        | Effect::Usage(_)
        | Effect::SessionUnusable { .. }) => effect,
    }
}

fn unknown(source: EventSource, time: Timestamp) -> NewEvent {
    warning(source, time, "the runner sent an event that this control plane does not know".to_owned())
}

/// A notice.
pub(crate) fn warning(source: EventSource, time: Timestamp, message: String) -> NewEvent {
    let notice = engine::NoticeEvent { kind: engine::notice_event::Kind::Warning.into(), message };
    let payload = engine::EventBody { kind: Some(Kind::Notice(notice)) }.encode_to_vec();
    NewEvent { source, kind: EventKind::Notice, payload, time, effect: Effect::None }
}

fn kind_of(kind: &Kind) -> EventKind {
    match kind {
        Kind::Session(_) => EventKind::Session,
        Kind::Phase(_) => EventKind::Phase,
        Kind::Text(_) => EventKind::Text,
        Kind::Reasoning(_) => EventKind::Reasoning,
        Kind::ToolCall(_) => EventKind::ToolCall,
        Kind::ToolResult(_) => EventKind::ToolResult,
        Kind::FileChange(_) => EventKind::FileChange,
        Kind::PermissionRequest(_) => EventKind::PermissionRequest,
        Kind::PermissionAnswer(_) => EventKind::PermissionAnswer,
        Kind::Usage(_) => EventKind::Usage,
        Kind::Quota(_) => EventKind::Quota,
        Kind::Notice(_) => EventKind::Notice,
        Kind::Evidence(_) => EventKind::Evidence,
        Kind::Terminal(_) => EventKind::Terminal,
    }
}

/// An id that cannot be read has no effect; the event is stored all the same.
fn effect(kind: &Kind) -> Effect {
    match kind {
        Kind::Session(session) => session_effect(session),
        Kind::Phase(phase) if phase.phase() == engine::phase_event::Phase::Accepted => {
            MessageId::parse(&phase.message_id)
                .map_or(Effect::None, |message_id| Effect::Accepted { message_id })
        }
        Kind::PermissionRequest(request) => Effect::PermissionRequested(PermissionRequest {
            request_id: request.request_id.clone(),
            tool: request.tool.clone(),
            title: request.title.clone(),
            deadline: request.deadline.as_ref().map(from_proto::timestamp),
            body: request.encode_to_vec(),
        }),
        Kind::PermissionAnswer(answer) => {
            from_proto::decision(answer.decision).map_or(Effect::None, |decision| Effect::PermissionSettled {
                request_id: answer.request_id.clone(),
                result: PermissionResult { decision, settled_by: from_proto::settled_by(answer.decider) },
            })
        }
        Kind::Usage(event) => {
            event.usage.as_ref().map_or(Effect::None, |usage| Effect::Usage(from_proto::usage(usage)))
        }
        Kind::Phase(_)
        | Kind::Text(_)
        | Kind::Reasoning(_)
        | Kind::ToolCall(_)
        | Kind::ToolResult(_)
        | Kind::FileChange(_)
        | Kind::Quota(_)
        | Kind::Notice(_)
        | Kind::Evidence(_)
        | Kind::Terminal(_) => Effect::None,
    }
}

fn session_effect(session: &engine::SessionEvent) -> Effect {
    use engine::session_event::State;
    let Ok(session_id) = SessionId::parse(&session.session_id) else { return Effect::None };
    match session.state() {
        State::NativeRef => session.native_ref.as_ref().map_or(Effect::None, |native| Effect::NativeRef {
            session_id,
            native_ref: from_proto::native_ref(native),
        }),
        State::Unusable => Effect::SessionUnusable { session_id, reason: session.reason.clone() },
        State::Unspecified | State::Opened | State::Closed => Effect::None,
    }
}

fn ending(source: EventSource, time: Timestamp, mut terminal: engine::TerminalEvent) -> Ending {
    let failure = terminal.failure.as_ref().map(from_proto::failure);
    let without_words = || {
        TurnError::new(
            roundhouse_domain::outcome::Reason::Process,
            "the runner gave no reason",
            "look at the runner's log, then retry",
        )
        .retryable()
    };
    let outcome = match terminal.outcome() {
        engine::Outcome::Completed => Outcome::Completed,
        engine::Outcome::Failed | engine::Outcome::Unspecified => {
            Outcome::Failed(failure.unwrap_or_else(without_words))
        }
        engine::Outcome::Cancelled => Outcome::Cancelled(failure),
        engine::Outcome::Lost => Outcome::Lost(failure.unwrap_or_else(without_words)),
    };
    let result = std::mem::take(&mut terminal.result);
    let usage = terminal.usage.clone();
    terminal.result = shown(&result, &terminal);
    terminal.truncated |= terminal.result.len() < result.len();
    Ending { outcome, result, usage, event: stored(source, time, Kind::Terminal(terminal)) }
}

/// As much of the answer as fits beside the rest of the event.
fn shown(result: &str, rest: &engine::TerminalEvent) -> String {
    let room = MAX_EVENT.saturating_sub(rest.encoded_len() + ROOM).min(MAX_SHOWN_RESULT);
    cut(result, room).0.to_owned()
}

/// The terminal event of an ending that the control plane itself decides.
pub(crate) fn own_terminal(outcome: &Outcome, time: Timestamp) -> NewEvent {
    let terminal = engine::TerminalEvent {
        outcome: outcome_name(outcome).into(),
        failure: outcome.error().map(to_proto::failure),
        ..engine::TerminalEvent::default()
    };
    let source = EventSource::Own { key: "terminal".to_owned() };
    stored(source, time, Kind::Terminal(terminal))
}

fn outcome_name(outcome: &Outcome) -> engine::Outcome {
    match outcome {
        Outcome::Completed => engine::Outcome::Completed,
        Outcome::Failed(_) => engine::Outcome::Failed,
        Outcome::Cancelled(_) => engine::Outcome::Cancelled,
        Outcome::Lost(_) => engine::Outcome::Lost,
    }
}

/// The same ending as one of a turn that is being cancelled: it ends CANCELLED (or LOST), what the engine said is
/// kept, and a notice tells what it had come to. True when something was changed.
pub(crate) fn cancel_ending(ending: &mut Ending) -> Option<String> {
    let notice = match &ending.outcome {
        Outcome::Cancelled(_) | Outcome::Lost(_) => return None,
        Outcome::Completed => "the engine had finished when the cancel reached it".to_owned(),
        Outcome::Failed(error) => {
            format!("the engine had failed when the cancel reached it: {}", error.message)
        }
    };
    let error = super::reasons::cancelled();
    if let Ok(mut body) = engine::EventBody::decode(ending.event.payload.as_slice())
        && let Some(Kind::Terminal(terminal)) = &mut body.kind
    {
        terminal.set_outcome(engine::Outcome::Cancelled);
        terminal.failure = Some(to_proto::failure(&error));
        ending.event.payload = body.encode_to_vec();
    }
    ending.outcome = Outcome::Cancelled(Some(error));
    Some(notice)
}

#[cfg(test)]
mod tests;
