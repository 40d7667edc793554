//! The end of turns: cancel and close.

use roundhouse_domain::conflict::Conflict;
use roundhouse_domain::event::{EventKind, Fact};
use roundhouse_domain::limits::{MAX_AGENT_MESSAGE, cut};
use roundhouse_domain::message::Role;
use roundhouse_domain::outcome::TurnError;
use roundhouse_domain::session::watermark_at_end;
use roundhouse_domain::time::Timestamp;
use roundhouse_domain::turn::{End, Step, TurnInput, TurnState, next, step};
use rusqlite::{Connection, params};

use super::changes::Log;
use super::dispatch::delete_slot;
use super::events::{Stored, raise_watermark, settle_open, store, take_position, validate};
use super::ledger::{answered, keep};
use super::queue::promote_next;
use super::rows::{Head, fenced, find_message, find_session, find_turn};
use super::sql::{Columns, execute, first, int, to_json};
use super::writer::Scope;
use crate::command::{AgentMessage, CloseTurn, Owner, RequestCancel};
use crate::error::{Error, Result};
use crate::hint::Hint;
use crate::view::{CancelOutcome, CloseOutcome, Closed};

pub(super) fn request_cancel(scope: &mut Scope<'_>, command: RequestCancel) -> Result<CancelOutcome> {
    let c = scope.connection;
    let request = command.request.clone();
    if let Some(outcome) = answered(c, request.as_ref())? {
        return Ok(outcome);
    }
    let time = command.time;
    let turn = find_turn(c, &command.turn_id)?.turn;
    let owner = Owner { turn_id: turn.id, epoch: turn.epoch };
    let outcome = match step(turn.state, TurnInput::CancelRequested).map_err(Conflict::from)? {
        Step::Absorbed => CancelOutcome::AlreadyEnded(turn.state),
        Step::Stayed => CancelOutcome::Cancelling,
        Step::Moved(state) if state.is_terminal() => {
            cancel_waiting(scope, &owner, command)?;
            CancelOutcome::CancelledWaiting
        }
        Step::Moved(state) => {
            let head = fenced(c, &owner)?;
            let mut log = Log::of_turn(&head, time);
            let sql = "UPDATE turn SET state = ?2, cancel_time = ?3 WHERE key = ?1";
            execute(c, sql, params![head.key, state.as_str(), time.0])?;
            log.fact(c, &Fact::TurnState { turn_id: head.id.clone(), state })?;
            log.finish(scope)?;
            scope.hint(Hint::CancelRequested { turn_id: head.id });
            CancelOutcome::Cancelling
        }
    };
    keep(c, request.as_ref(), &outcome, time)?;
    Ok(outcome)
}

/// A turn that waits ends at once; its message never gets a place in the history.
fn cancel_waiting(scope: &mut Scope<'_>, owner: &Owner, command: RequestCancel) -> Result<()> {
    let c = scope.connection;
    let time = command.time;
    let events = vec![command.terminal];
    validate(&events, true)?;
    let mut head = fenced(c, owner)?;
    let mut log = Log::of_turn(&head, time);
    store(c, &mut log, &mut head, events, time, &mut Stored::default())?;
    head.state = TurnState::Cancelled;
    end(c, &head, command.error.as_ref(), time)?;
    execute(c, "UPDATE turn SET cancel_time = ?2 WHERE key = ?1", params![head.key, time.0])?;
    promote_next(scope, &mut log, head.conversation_key, time)?;
    log.finish(scope)
}

/// Writes the turn's end.
fn end(c: &Connection, head: &Head, error: Option<&TurnError>, time: Timestamp) -> Result<()> {
    let sql = "UPDATE turn SET state = ?2, end_time = ?3, error = ?4, last_seq = ?5, last_number = ?6 \
               WHERE key = ?1";
    let error = error.map(to_json).transpose()?;
    let counters = (int(head.last_seq), int(head.last_number));
    execute(c, sql, params![head.key, head.state.as_str(), time.0, error, counters.0, counters.1])?;
    Ok(())
}

const fn nominal(end: End) -> TurnState {
    match end {
        End::Completed => TurnState::Completed,
        End::Failed => TurnState::Failed,
        End::Cancelled => TurnState::Cancelled,
        End::Lost => TurnState::Lost,
    }
}

pub(super) fn close_turn(scope: &mut Scope<'_>, command: CloseTurn) -> Result<CloseOutcome> {
    let c = scope.connection;
    let mut events = command.events;
    validate(&events, true)?;
    let mut head = fenced(c, &command.owner)?;
    if head.state.is_terminal() {
        return Ok(CloseOutcome::AlreadyEnded(Box::new(find_turn(c, &head.id)?.turn)));
    }
    let input = TurnInput::End(command.outcome.end());
    let state = next(head.state, input).map_err(Conflict::from)?;
    if state != nominal(command.outcome.end()) {
        return Ok(CloseOutcome::Overruled(state));
    }
    let time = command.time;
    let lost = state == TurnState::Lost;
    let mut log = Log::of_turn(&head, time);
    let mut stored = Stored::default();
    let terminal = events.split_off(events.len() - 1);
    debug_assert!(terminal.iter().all(|e| e.kind == EventKind::Terminal));
    store(c, &mut log, &mut head, events, time, &mut stored)?;
    let message = command.agent_message;
    let agent_message = message.map(|m| add_message(c, &mut log, &head, &m, time)).transpose()?;
    if let Some(usage) = &command.usage {
        execute(c, "UPDATE turn SET usage = ?2 WHERE key = ?1", params![head.key, to_json(usage)?])?;
    }
    if let Some(session_id) = head.session_id.clone() {
        let session = find_session(c, &session_id)?.record;
        let accepted = find_turn(c, &head.id)?.turn.accepted;
        let position = agent_message.as_ref().and_then(|m| m.position);
        let completed = accepted && state == TurnState::Completed;
        raise_watermark(c, &session_id, watermark_at_end(session.watermark, completed, position))?;
        if let Some(native_ref) = &command.native_ref {
            let sql = "UPDATE session SET native_ref = ?2 WHERE id = ?1 AND unusable_reason IS NULL";
            execute(c, sql, params![session_id.as_str(), native_ref.0])?;
        }
    }
    settle_open(c, head.key, time)?;
    store(c, &mut log, &mut head, terminal, time, &mut stored)?;
    head.state = state;
    end(c, &head, command.outcome.error(), time)?;
    if lost {
        // The epoch moves on, so that whatever the lost worker still says is stale at once.
        execute(c, "UPDATE conversation SET epoch = epoch + 1 WHERE key = ?1", [head.conversation_key])?;
    } else if command.free_slot {
        delete_slot(scope, head.key)?;
    }
    let promoted = promote_next(scope, &mut log, head.conversation_key, time)?;
    log.finish(scope)?;
    Ok(CloseOutcome::Closed(Box::new(Closed {
        turn: find_turn(c, &head.id)?.turn,
        stored: stored.events,
        agent_message,
        promoted: promoted.map(|id| find_turn(c, &id).map(|row| row.turn)).transpose()?,
    })))
}

/// The agent's message, with the next place in the history.
fn add_message(
    c: &Connection,
    log: &mut Log,
    head: &Head,
    message: &AgentMessage,
    time: Timestamp,
) -> Result<roundhouse_domain::message::Message> {
    let position = take_position(c, head.conversation_key)?;
    let sql = "UPDATE conversation SET last_seq = last_seq + 1 WHERE key = ?1 RETURNING last_seq";
    let seq = first(c, sql, [head.conversation_key], |row| row.count("last_seq"))?
        .ok_or_else(|| Error::Internal("a conversation vanished".into()))?;
    let (body, truncated) = cut(&message.body, MAX_AGENT_MESSAGE);
    let sql = "INSERT INTO message (id, conversation_key, seq, position, role, actor, body, turn_id, incomplete, \
               truncated, create_time) VALUES (?1, ?2, ?3, ?4, 'AGENT', ?5, ?6, ?7, ?8, ?9, ?10)";
    let values = params![
        message.id.as_str(),
        head.conversation_key,
        int(seq),
        int(position.0),
        message.actor,
        body,
        head.id.as_str(),
        message.incomplete,
        truncated,
        time.0
    ];
    execute(c, sql, values)?;
    execute(
        c,
        "UPDATE turn SET agent_message_id = ?2 WHERE key = ?1",
        params![head.key, message.id.as_str()],
    )?;
    log.fact(
        c,
        &Fact::MessageStored {
            message_id: message.id.clone(),
            role: Role::Agent,
            seq,
            position: Some(position),
            turn_id: Some(head.id.clone()),
        },
    )?;
    Ok(find_message(c, &message.id)?.record)
}
