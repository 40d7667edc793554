//! Storing a turn's events and what they do besides.

use roundhouse_domain::conflict::Conflict;
use roundhouse_domain::event::{Effect, EventKind, EventSource, Fact, NewEvent, StoredEvent};
use roundhouse_domain::id::{MessageId, SessionId};
use roundhouse_domain::limits::{MAX_BATCH, MAX_EVENT};
use roundhouse_domain::message::Position;
use roundhouse_domain::permission::{Decision, PermissionRequest, PermissionResult, SettledBy};
use roundhouse_domain::session::{Opening, watermark_at_acceptance};
use roundhouse_domain::time::Timestamp;
use roundhouse_domain::turn::{IllegalTransition, Step, TurnInput, step};
use rusqlite::{Connection, params};

use super::changes::{Log, has_own};
use super::rows::{Head, fenced_open};
use super::sql::{Columns, execute, first, int, to_json};
use super::writer::Scope;
use crate::command::{AppendEvents, Diagnosis};
use crate::error::{Error, Result};
use crate::view::Appended;

/// Most notes of diagnosis that are kept of one turn.
const MAX_DIAGNOSES: u64 = 1_000;

/// Checks what can be checked without looking at what is stored.
pub(super) fn validate(events: &[NewEvent], terminal: bool) -> Result<()> {
    if events.len() > MAX_BATCH || (terminal && events.is_empty()) {
        return Err(Error::invalid("events", format!("1 to {MAX_BATCH} events go into one batch")));
    }
    for (index, event) in events.iter().enumerate() {
        if event.payload.len() > MAX_EVENT {
            let problem = format!("{} bytes; an event has at most {MAX_EVENT}", event.payload.len());
            return Err(Error::invalid("events.payload", problem));
        }
        if let Effect::PermissionRequested(request) = &event.effect
            && request.body.len() > MAX_EVENT
        {
            return Err(Error::invalid("events.effect", format!("a request has at most {MAX_EVENT} bytes")));
        }
        if let EventSource::Own { key } = &event.source
            && (key.is_empty() || key.len() > 200)
        {
            return Err(Error::invalid("events.source.key", "1 to 200 bytes"));
        }
        let last = index + 1 == events.len();
        if (event.kind == EventKind::Terminal) != (terminal && last) {
            let problem = "the terminal event is the last one of the closing batch, and only there";
            return Err(Error::invalid("events.kind", problem));
        }
    }
    Ok(())
}

/// What storing events brought about.
#[derive(Default)]
pub(super) struct Stored {
    pub(super) events: Vec<StoredEvent>,
    pub(super) illegal: Vec<IllegalTransition>,
}

/// Stores those events that are new, with their effects. `head` moves along; [`save`] writes it down.
pub(super) fn store(
    c: &Connection,
    log: &mut Log,
    head: &mut Head,
    events: Vec<NewEvent>,
    time: Timestamp,
    into: &mut Stored,
) -> Result<()> {
    for mut event in events {
        match &event.source {
            EventSource::Runner { number } => {
                let expected = head.last_number + 1;
                if *number < expected {
                    continue;
                }
                if *number > expected {
                    return Err(Conflict::EventGap { expected, given: *number }.into());
                }
            }
            EventSource::Own { key } => {
                if has_own(c, head.key, key)? {
                    continue;
                }
            }
        }
        let effect = std::mem::replace(&mut event.effect, Effect::None);
        let at = event.time;
        into.events.push(log.event(c, head, event)?);
        apply(c, log, head, effect, at, time, &mut into.illegal)?;
    }
    Ok(())
}

/// Writes the turn's counters and state.
pub(super) fn save(c: &Connection, head: &Head) -> Result<()> {
    let sql = "UPDATE turn SET state = ?2, last_seq = ?3, last_number = ?4 WHERE key = ?1";
    execute(c, sql, params![head.key, head.state.as_str(), int(head.last_seq), int(head.last_number)])?;
    Ok(())
}

/// Moves the turn's state; a move is a fact, an illegal input is remembered.
fn advance(
    c: &Connection,
    log: &mut Log,
    head: &mut Head,
    input: TurnInput,
    illegal: &mut Vec<IllegalTransition>,
) -> Result<()> {
    match step(head.state, input) {
        Ok(Step::Moved(state)) => {
            head.state = state;
            log.fact(c, &Fact::TurnState { turn_id: head.id.clone(), state })
        }
        Ok(Step::Stayed | Step::Absorbed) => Ok(()),
        Err(error) => {
            illegal.push(error);
            Ok(())
        }
    }
}

fn apply(
    c: &Connection,
    log: &mut Log,
    head: &mut Head,
    effect: Effect,
    at: Timestamp,
    time: Timestamp,
    illegal: &mut Vec<IllegalTransition>,
) -> Result<()> {
    match effect {
        Effect::None => Ok(()),
        Effect::NativeRef { session_id, native_ref } => {
            // Only where active: what an unusable session still says never makes it usable again.
            let sql = "UPDATE session SET native_ref = ?3 \
                       WHERE id = ?1 AND conversation_key = ?2 AND unusable_reason IS NULL";
            execute(c, sql, params![session_id.as_str(), head.conversation_key, native_ref.0]).map(|_| ())
        }
        Effect::Accepted { message_id } => {
            accepted(c, head, &message_id)?;
            advance(c, log, head, TurnInput::Accepted, illegal)
        }
        Effect::PermissionRequested(request) => {
            if requested(c, head, &request, at)? {
                advance(c, log, head, TurnInput::PermissionRequested, illegal)?;
            }
            Ok(())
        }
        Effect::PermissionSettled { request_id, result } => {
            if settled(c, head, &request_id, &result, time)? {
                let still_open = open_permissions(c, head.key)?;
                advance(c, log, head, TurnInput::PermissionSettled { still_open }, illegal)?;
            }
            Ok(())
        }
        Effect::Usage(usage) => {
            let sql = "UPDATE turn SET usage = ?2 WHERE key = ?1";
            execute(c, sql, params![head.key, to_json(&usage)?]).map(|_| ())
        }
        Effect::SessionUnusable { session_id, reason } => {
            mark_unusable(c, log, head.conversation_key, &session_id, &reason)
        }
    }
}

/// The engine has the message: it has a place in the history, and the session's watermark is there.
fn accepted(c: &Connection, head: &Head, message_id: &MessageId) -> Result<()> {
    let sql = "SELECT key, position FROM message WHERE id = ?1 AND conversation_key = ?2";
    let found = first(c, sql, params![message_id.as_str(), head.conversation_key], |row| {
        Ok((row.get::<_, i64>("key")?, row.count_or_null("position")?))
    })?;
    let Some((key, position)) = found else { return Ok(()) };
    let position = match position {
        Some(position) => Position(position),
        None => {
            let position = take_position(c, head.conversation_key)?;
            execute(c, "UPDATE message SET position = ?2 WHERE key = ?1", params![key, int(position.0)])?;
            position
        }
    };
    execute(c, "UPDATE turn SET accepted = 1 WHERE key = ?1 AND message_key = ?2", params![head.key, key])?;
    if let Some(session) = &head.session_id {
        let sql = "SELECT opening FROM turn WHERE key = ?1 AND message_key = ?2";
        let opening: Option<Opening> =
            first(c, sql, params![head.key, key], |row| row.json_or_null("opening"))?.flatten();
        let through = opening.and_then(|opening| opening.through);
        raise_watermark(c, session, watermark_at_acceptance(Position::START, position, through))?;
    }
    Ok(())
}

/// The next position of the conversation.
pub(super) fn take_position(c: &Connection, conversation_key: i64) -> Result<Position> {
    let sql =
        "UPDATE conversation SET last_position = last_position + 1 WHERE key = ?1 RETURNING last_position";
    let position = first(c, sql, [conversation_key], |row| row.count("last_position"))?;
    position.map(Position).ok_or_else(|| Error::Internal("a conversation vanished".into()))
}

/// Watermarks only rise.
pub(super) fn raise_watermark(c: &Connection, session: &SessionId, position: Position) -> Result<()> {
    let sql = "UPDATE session SET watermark = max(watermark, ?2) WHERE id = ?1";
    execute(c, sql, params![session.as_str(), int(position.0)]).map(|_| ())
}

fn requested(c: &Connection, head: &Head, request: &PermissionRequest, at: Timestamp) -> Result<bool> {
    let sql = "INSERT INTO permission (id, turn_key, tool, title, deadline, body, create_time) \
               VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7) ON CONFLICT (id) DO NOTHING";
    let deadline = request.deadline.map(|t| t.0);
    let values =
        params![request.request_id, head.key, request.tool, request.title, deadline, request.body, at.0];
    Ok(execute(c, sql, values)? == 1)
}

fn settled(
    c: &Connection,
    head: &Head,
    request_id: &str,
    result: &PermissionResult,
    time: Timestamp,
) -> Result<bool> {
    let sql = "UPDATE permission SET result = ?3, settle_time = ?4 \
               WHERE id = ?1 AND turn_key = ?2 AND settle_time IS NULL";
    Ok(execute(c, sql, params![request_id, head.key, to_json(result)?, time.0])? == 1)
}

fn open_permissions(c: &Connection, turn_key: i64) -> Result<u32> {
    let sql = "SELECT count(*) AS open FROM permission WHERE turn_key = ?1 AND settle_time IS NULL";
    let open = first(c, sql, [turn_key], |row| row.count("open"))?.unwrap_or(0);
    Ok(u32::try_from(open).unwrap_or(u32::MAX))
}

/// The turn's end settles what is open.
pub(super) fn settle_open(c: &Connection, turn_key: i64, time: Timestamp) -> Result<()> {
    let result = PermissionResult { decision: Decision::Deny, settled_by: SettledBy::TurnEnded };
    let sql =
        "UPDATE permission SET result = ?2, settle_time = ?3 WHERE turn_key = ?1 AND settle_time IS NULL";
    execute(c, sql, params![turn_key, to_json(&result)?, time.0]).map(|_| ())
}

/// Marks a session of the conversation unusable, once; the first reason stands.
pub(super) fn mark_unusable(
    c: &Connection,
    log: &mut Log,
    conversation_key: i64,
    session_id: &SessionId,
    reason: &str,
) -> Result<()> {
    let sql = "UPDATE session SET unusable_reason = ?3 \
               WHERE id = ?1 AND conversation_key = ?2 AND unusable_reason IS NULL";
    if execute(c, sql, params![session_id.as_str(), conversation_key, reason])? == 1 {
        let fact = Fact::SessionUnusable { session_id: session_id.clone(), reason: reason.to_owned() };
        log.fact(c, &fact)?;
    }
    Ok(())
}

pub(super) fn append_events(scope: &mut Scope<'_>, command: AppendEvents) -> Result<Appended> {
    if command.events.is_empty() {
        return Err(Error::invalid("events", format!("1 to {MAX_BATCH} events go into one batch")));
    }
    validate(&command.events, false)?;
    let c = scope.connection;
    let mut head = fenced_open(c, &command.owner)?;
    let mut log = Log::of_turn(&head, command.time);
    let mut stored = Stored::default();
    store(c, &mut log, &mut head, command.events, command.time, &mut stored)?;
    if !stored.events.is_empty() {
        save(c, &head)?;
    }
    log.finish(scope)?;
    Ok(Appended {
        stored: stored.events,
        last_number: head.last_number,
        state: head.state,
        illegal: stored.illegal,
    })
}

pub(super) fn record_diagnosis(scope: &mut Scope<'_>, diagnosis: &Diagnosis) -> Result<bool> {
    if diagnosis.payload.len() > MAX_EVENT {
        return Err(Error::invalid("payload", format!("at most {MAX_EVENT} bytes")));
    }
    let c = scope.connection;
    let turn = super::rows::find_turn(c, &diagnosis.turn_id)?;
    let sql = "SELECT count(*) AS kept FROM diagnosis WHERE turn_key = ?1";
    if first(c, sql, [turn.key], |row| row.count("kept"))?.unwrap_or(0) >= MAX_DIAGNOSES {
        return Ok(false);
    }
    let sql = "INSERT INTO diagnosis (turn_key, epoch, runner_id, payload, time) VALUES (?1, ?2, ?3, ?4, ?5)";
    let runner = diagnosis.runner_id.as_ref().map(roundhouse_domain::id::RunnerId::as_str);
    let values = params![turn.key, int(diagnosis.epoch.0), runner, diagnosis.payload, diagnosis.time.0];
    execute(c, sql, values)?;
    Ok(true)
}
