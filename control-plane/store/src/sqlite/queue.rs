//! Messages in, turns promoted: the queue of a conversation.

use roundhouse_domain::conflict::Conflict;
use roundhouse_domain::conversation::Conversation;
use roundhouse_domain::event::Fact;
use roundhouse_domain::id::{MessageId, TurnId};
use roundhouse_domain::limits::{MAX_NAME, MAX_USER_MESSAGE};
use roundhouse_domain::message::{Position, Role};
use roundhouse_domain::queue::{Admission, Counters, admit, promote};
use roundhouse_domain::time::Timestamp;
use roundhouse_domain::turn::{RetryFacts, Turn, TurnInput, TurnState, check_retry, next};
use roundhouse_domain::usage::Usage;
use rusqlite::{Connection, params};
use serde::{Deserialize, Serialize};

use super::changes::Log;
use super::ledger::{answered, keep};
use super::rows::{Keyed, find_conversation, find_message, find_turn, find_workspace};
use super::sql::{Columns, execute, first, int, to_json};
use super::writer::Scope;
use crate::command::{AcceptMessage, RequestKey, RetryTurn};
use crate::error::{Error, Result};
use crate::hint::Hint;
use crate::view::Accepted;

/// What the ledger keeps of an accepted message: the rows have the rest.
#[derive(Serialize, Deserialize)]
struct AcceptedIds {
    message_id: MessageId,
    turn_id: TurnId,
}

pub(super) fn accept_message(
    scope: &mut Scope<'_>,
    command: &AcceptMessage,
    max_waiting: usize,
) -> Result<Accepted> {
    let c = scope.connection;
    if let Some(before) = accepted_before(c, &command.request)? {
        return Ok(before);
    }
    validate(command)?;
    let mut conversation = find_conversation(c, &command.conversation_id)?;
    if let Some(workspace) = &command.workspace_id {
        find_workspace(c, workspace)?;
    }
    admission(c, conversation.key, max_waiting)?;
    let mut log = Log::of_conversation(&conversation, command.time);
    if conversation.record.archived {
        execute(c, "UPDATE conversation SET archived = 0 WHERE key = ?1", [conversation.key])?;
        log.fact(c, &Fact::Archived { archived: false })?;
    }
    let message_key = insert_message(c, &mut conversation, command)?;
    log.fact(
        c,
        &Fact::MessageStored {
            message_id: command.message_id.clone(),
            role: Role::User,
            seq: conversation.record.last_seq,
            position: None,
            turn_id: Some(command.turn_id.clone()),
        },
    )?;
    let sql = "INSERT INTO turn (id, conversation_key, message_key, state, agent_name, workspace_id, usage, \
               surface, create_time) VALUES (?1, ?2, ?3, 'QUEUED', ?4, ?5, ?6, ?7, ?8)";
    let values = params![
        command.turn_id.as_str(),
        conversation.key,
        message_key,
        command.agent_name,
        command.workspace_id.as_ref().map(AsRef::<str>::as_ref),
        to_json(&Usage::default())?,
        command.surface.as_str(),
        command.time.0
    ];
    execute(c, sql, values)?;
    started_or_queued(
        scope,
        &mut log,
        conversation.key,
        &command.turn_id,
        &command.message_id,
        command.time,
    )?;
    log.finish(scope)?;
    let ids = AcceptedIds { message_id: command.message_id.clone(), turn_id: command.turn_id.clone() };
    keep(c, Some(&command.request), &ids, command.time)?;
    let message = find_message(c, &command.message_id)?.record;
    Ok(Accepted { message, turn: find_turn(c, &command.turn_id)?.turn, repeated: false })
}

/// The message and turn of a request that was accepted before.
pub(super) fn accepted_before(c: &Connection, request: &RequestKey) -> Result<Option<Accepted>> {
    let Some(ids) = answered::<AcceptedIds>(c, Some(request))? else { return Ok(None) };
    let message = find_message(c, &ids.message_id)?.record;
    Ok(Some(Accepted { message, turn: find_turn(c, &ids.turn_id)?.turn, repeated: true }))
}

fn validate(command: &AcceptMessage) -> Result<()> {
    if command.body.is_empty() {
        return Err(Error::invalid("text", "must not be empty"));
    }
    if command.body.len() > MAX_USER_MESSAGE {
        let problem = format!("{} bytes; a message has at most {MAX_USER_MESSAGE}", command.body.len());
        return Err(Error::invalid("text", problem));
    }
    if command.actor.len() > MAX_NAME {
        return Err(Error::invalid("actor", format!("at most {MAX_NAME} bytes")));
    }
    Ok(())
}

fn insert_message(
    c: &Connection,
    conversation: &mut Keyed<Conversation>,
    command: &AcceptMessage,
) -> Result<i64> {
    conversation.record.last_seq += 1;
    let seq = int(conversation.record.last_seq);
    execute(c, "UPDATE conversation SET last_seq = ?2 WHERE key = ?1", params![conversation.key, seq])?;
    let sql = "INSERT INTO message (id, conversation_key, seq, role, actor, body, turn_id, create_time) \
               VALUES (?1, ?2, ?3, 'USER', ?4, ?5, ?6, ?7)";
    let values = params![
        command.message_id.as_str(),
        conversation.key,
        seq,
        command.actor,
        command.body,
        command.turn_id.as_str(),
        command.time.0
    ];
    execute(c, sql, values)?;
    Ok(c.last_insert_rowid())
}

/// Whether one more turn may come. The unique index on active turns is what really holds the lock.
fn admission(c: &Connection, conversation_key: i64, limit: usize) -> Result<()> {
    let sql = "SELECT count(*) AS waiting FROM turn WHERE conversation_key = ?1 AND state = 'QUEUED'";
    let waiting = first(c, sql, [conversation_key], |row| row.count("waiting"))?.unwrap_or(0);
    let waiting = usize::try_from(waiting).unwrap_or(usize::MAX);
    match admit(has_active(c, conversation_key)?, waiting, limit) {
        Admission::Promote | Admission::Wait => Ok(()),
        Admission::Full => Err(Conflict::QueueFull { limit }.into()),
    }
}

fn has_active(c: &Connection, conversation_key: i64) -> Result<bool> {
    let sql = "SELECT 1 FROM turn WHERE conversation_key = ?1 \
               AND state IN ('DISPATCHING', 'RUNNING', 'WAITING_FOR_PERMISSION', 'CANCELLING')";
    Ok(first(c, sql, [conversation_key], |_| Ok(()))?.is_some())
}

/// Whether a turn of the conversation runs or waits.
pub(super) fn in_progress(c: &Connection, conversation_key: i64) -> Result<bool> {
    let sql = "SELECT 1 FROM turn WHERE conversation_key = ?1 AND state = 'QUEUED'";
    Ok(has_active(c, conversation_key)? || first(c, sql, [conversation_key], |_| Ok(()))?.is_some())
}

/// A new turn is promoted when nothing is before it, and said to wait otherwise.
fn started_or_queued(
    scope: &mut Scope<'_>,
    log: &mut Log,
    conversation_key: i64,
    turn_id: &TurnId,
    message_id: &MessageId,
    time: Timestamp,
) -> Result<()> {
    let promoted = promote_next(scope, log, conversation_key, time)?;
    if promoted.as_ref() == Some(turn_id) {
        return Ok(());
    }
    let fact = Fact::TurnQueued { turn_id: turn_id.clone(), message_id: message_id.clone() };
    log.fact(scope.connection, &fact)
}

/// Promotes the first waiting turn when nobody owns the lock: epoch, position, order, agent and workspace.
pub(super) fn promote_next(
    scope: &mut Scope<'_>,
    log: &mut Log,
    conversation_key: i64,
    time: Timestamp,
) -> Result<Option<TurnId>> {
    let c = scope.connection;
    if has_active(c, conversation_key)? {
        return Ok(None);
    }
    let sql = "SELECT t.key, t.id, t.message_key, m.id AS message_id, m.position, c.epoch, c.last_position \
               FROM turn t JOIN message m ON m.key = t.message_key \
               JOIN conversation c ON c.key = t.conversation_key \
               WHERE t.conversation_key = ?1 AND t.state = 'QUEUED' ORDER BY t.key LIMIT 1";
    let found = first(c, sql, [conversation_key], |row| {
        let turn_id: TurnId = row.parsed("id")?;
        let epoch = roundhouse_domain::id::Epoch(row.count("epoch")?);
        let counters = Counters { epoch, position: Position(row.count("last_position")?) };
        let position = row.count_or_null("position")?.map(Position);
        let message_id: MessageId = row.parsed("message_id")?;
        let keys = (row.get::<_, i64>("key")?, row.get::<_, i64>("message_key")?);
        Ok((keys, message_id, promote(turn_id, position, counters)))
    })?;
    let Some(((turn_key, message_key), message_id, promotion)) = found else { return Ok(None) };
    let state = next(TurnState::Queued, TurnInput::Promote).map_err(Conflict::from)?;
    let sql = "UPDATE turn SET state = ?2, epoch = ?3, start_time = ?4, \
               promotion = (SELECT coalesce(max(promotion), 0) + 1 FROM turn), \
               summary_version = (SELECT max(version) FROM summary WHERE conversation_key = ?5), \
               agent_name = coalesce(agent_name, (SELECT last_agent FROM conversation WHERE key = ?5)), \
               workspace_id = \
                   coalesce(workspace_id, (SELECT last_workspace_id FROM conversation WHERE key = ?5)) \
               WHERE key = ?1";
    let epoch = int(promotion.epoch.0);
    execute(c, sql, params![turn_key, state.as_str(), epoch, time.0, conversation_key])?;
    let sql = "UPDATE conversation SET epoch = ?2, last_position = ?3, \
               last_agent = (SELECT agent_name FROM turn WHERE key = ?4), \
               last_workspace_id = (SELECT workspace_id FROM turn WHERE key = ?4) WHERE key = ?1";
    execute(c, sql, params![conversation_key, epoch, int(promotion.counters.position.0), turn_key])?;
    let sql = "UPDATE message SET position = ?2 WHERE key = ?1 AND position IS NULL";
    execute(c, sql, params![message_key, int(promotion.position.0)])?;
    log.fact(
        c,
        &Fact::TurnPromoted {
            turn_id: promotion.turn_id.clone(),
            message_id,
            position: promotion.position,
            epoch: promotion.epoch,
        },
    )?;
    scope.hint(Hint::Promoted { turn_id: promotion.turn_id.clone() });
    Ok(Some(promotion.turn_id))
}

pub(super) fn retry_turn(scope: &mut Scope<'_>, command: &RetryTurn, max_waiting: usize) -> Result<Turn> {
    let c = scope.connection;
    if let Some(turn_id) = answered::<TurnId>(c, command.request.as_ref())? {
        return Ok(find_turn(c, &turn_id)?.turn);
    }
    match find_turn(c, &command.new_turn_id) {
        Ok(row) if row.turn.retry_of.as_ref() == Some(&command.turn_id) => return Ok(row.turn),
        Ok(_) => return Err(Error::invalid("new_turn_id", "is the id of another turn")),
        Err(Error::NotFound { .. }) => {}
        Err(error) => return Err(error),
    }
    let old = find_turn(c, &command.turn_id)?;
    let conversation = find_conversation(c, &old.turn.conversation_id)?;
    let message = find_message(c, &old.turn.message_id)?.record;
    let sql = "SELECT 1 FROM turn WHERE conversation_key = ?1 AND promotion > ?2";
    let later = first(c, sql, params![conversation.key, old.turn.promotion.map(int)], |_| Ok(()))?;
    let is_last = old.turn.promotion.is_some() && later.is_none();
    check_retry(RetryFacts { state: old.turn.state, position: message.position, is_last })
        .map_err(Conflict::from)?;
    admission(c, conversation.key, max_waiting)?;
    let mut log = Log::of_conversation(&conversation, command.time);
    let sql = "INSERT INTO turn (id, conversation_key, message_key, state, agent_name, agent, workspace_id, \
               retry_of, usage, surface, create_time) \
               SELECT ?2, conversation_key, message_key, 'QUEUED', agent_name, agent, workspace_id, \
               id, ?3, ?4, ?5 FROM turn WHERE key = ?1";
    let usage = to_json(&Usage::default())?;
    let values =
        params![old.key, command.new_turn_id.as_str(), usage, command.surface.as_str(), command.time.0];
    execute(c, sql, values)?;
    let (new_turn, message_id) = (&command.new_turn_id, &old.turn.message_id);
    started_or_queued(scope, &mut log, conversation.key, new_turn, message_id, command.time)?;
    log.finish(scope)?;
    keep(c, command.request.as_ref(), new_turn, command.time)?;
    Ok(find_turn(c, new_turn)?.turn)
}
