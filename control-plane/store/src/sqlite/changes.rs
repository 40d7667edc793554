//! The change log of a conversation: events of its turns, and facts; and who reads it.

use roundhouse_domain::conflict::Conflict;
use roundhouse_domain::conversation::Conversation;
use roundhouse_domain::cursor::{Standing, judge};
use roundhouse_domain::event::{Change, ChangeBody, EventKind, EventSource, Fact, NewEvent, StoredEvent};
use roundhouse_domain::id::{ConversationId, TurnId};
use roundhouse_domain::time::Timestamp;
use rusqlite::{Connection, Row, params};

use super::page::paged;
use super::rows::{Head, Keyed, find_conversation, find_turn};
use super::sql::{Columns, execute, first, from_json, int, to_json};
use super::writer::Scope;
use crate::error::{Error, Result};
use crate::hint::Hint;
use crate::view::{Changes, Page};

/// What a row of the log weighs in a page besides its payload.
const OVERHEAD: usize = 100;

/// The end of one conversation's log while a transaction adds to it. At most one at a time per conversation;
/// [`Log::finish`] stores where it stands.
pub(super) struct Log {
    conversation_key: i64,
    conversation_id: ConversationId,
    cursor: u64,
    start: u64,
    time: Timestamp,
}

impl Log {
    pub(super) fn of_conversation(row: &Keyed<Conversation>, time: Timestamp) -> Self {
        Self {
            conversation_key: row.key,
            conversation_id: row.record.id.clone(),
            cursor: row.record.last_cursor,
            start: row.record.last_cursor,
            time,
        }
    }

    pub(super) fn of_turn(head: &Head, time: Timestamp) -> Self {
        Self {
            conversation_key: head.conversation_key,
            conversation_id: head.conversation_id.clone(),
            cursor: head.last_cursor,
            start: head.last_cursor,
            time,
        }
    }

    /// Adds a fact.
    pub(super) fn fact(&mut self, c: &Connection, fact: &Fact) -> Result<()> {
        self.cursor += 1;
        let sql = "INSERT INTO change (conversation_key, cursor, time, kind, payload) \
                   VALUES (?1, ?2, ?3, 'FACT', ?4)";
        let payload = to_json(fact)?.into_bytes();
        execute(c, sql, params![self.conversation_key, int(self.cursor), self.time.0, payload])?;
        Ok(())
    }

    /// Adds an event; the turn's counters in `head` move with it.
    pub(super) fn event(&mut self, c: &Connection, head: &mut Head, event: NewEvent) -> Result<StoredEvent> {
        self.cursor += 1;
        head.last_seq += 1;
        let (number, own_key) = match event.source {
            EventSource::Runner { number } => (Some(number), None),
            EventSource::Own { key } => (None, Some(key)),
        };
        if let Some(number) = number {
            head.last_number = number;
        }
        let sql = "INSERT INTO change (conversation_key, cursor, time, kind, turn_key, seq, number, own_key, \
                   event_time, payload) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10)";
        let values = params![
            self.conversation_key,
            int(self.cursor),
            self.time.0,
            event.kind.as_str(),
            head.key,
            int(head.last_seq),
            number.map(int),
            own_key,
            event.time.0,
            event.payload
        ];
        execute(c, sql, values)?;
        Ok(StoredEvent {
            turn_id: head.id.clone(),
            seq: head.last_seq,
            cursor: self.cursor,
            number,
            kind: event.kind,
            payload: event.payload,
            time: event.time,
        })
    }

    /// Stores where the log stands, and tells followers after the commit.
    pub(super) fn finish(self, scope: &mut Scope<'_>) -> Result<()> {
        if self.cursor == self.start {
            return Ok(());
        }
        let sql =
            "UPDATE conversation SET last_cursor = ?2, update_time = max(update_time, ?3) WHERE key = ?1";
        execute(scope.connection, sql, params![self.conversation_key, int(self.cursor), self.time.0])?;
        scope.hint(Hint::Changed { conversation_id: self.conversation_id, cursor: self.cursor });
        Ok(())
    }
}

/// Whether the turn has an event of its own under this key.
pub(super) fn has_own(c: &Connection, turn_key: i64, key: &str) -> Result<bool> {
    let sql = "SELECT 1 FROM change WHERE turn_key = ?1 AND own_key = ?2";
    Ok(first(c, sql, params![turn_key, key], |_| Ok(()))?.is_some())
}

fn event(row: &Row<'_>, turn_id: TurnId) -> Result<StoredEvent> {
    Ok(StoredEvent {
        turn_id,
        seq: row.count("seq")?,
        cursor: row.count("cursor")?,
        number: row.count_or_null("number")?,
        kind: row.named("kind", EventKind::parse)?,
        payload: row.get("payload")?,
        time: row.time("event_time")?,
    })
}

pub(super) fn list_events(
    c: &Connection,
    id: &TurnId,
    after_seq: u64,
    limit: usize,
) -> Result<Page<StoredEvent>> {
    let turn = find_turn(c, id)?;
    let sql = "SELECT * FROM change WHERE turn_key = ?1 AND seq > ?2 ORDER BY seq";
    let read = |row: &Row<'_>| event(row, turn.turn.id.clone());
    paged(c, sql, params![turn.key, int(after_seq)], limit, read, |e| e.payload.len() + OVERHEAD)
}

pub(super) fn changes_after(
    c: &Connection,
    id: &ConversationId,
    cursor: u64,
    limit: usize,
) -> Result<Changes> {
    let Keyed { key, record } = find_conversation(c, id)?;
    let newest = record.last_cursor;
    let from = match judge(cursor, record.pruned_through, newest) {
        Standing::From(value) => value,
        Standing::Pruned { pruned_through } => return Err(Conflict::CursorPruned { pruned_through }.into()),
        Standing::Unknown => return Err(Conflict::CursorUnknown.into()),
    };
    if from == newest {
        return Ok(Changes { items: Vec::new(), newest });
    }
    let sql = "SELECT h.*, t.id AS turn_id FROM change h LEFT JOIN turn t ON t.key = h.turn_key \
               WHERE h.conversation_key = ?1 AND h.cursor > ?2 ORDER BY h.cursor";
    let read = |row: &Row<'_>| {
        let turn_id: Option<TurnId> = row.parsed_or_null("turn_id")?;
        let (body, size) = match turn_id {
            Some(turn_id) => {
                let event = event(row, turn_id)?;
                let size = event.payload.len();
                (ChangeBody::Event(event), size)
            }
            None => {
                let payload: Vec<u8> = row.get("payload")?;
                let text = std::str::from_utf8(&payload).map_err(|e| Error::Corrupt(e.to_string()))?;
                (ChangeBody::Fact(from_json(text)?), payload.len())
            }
        };
        let cursor = row.count("cursor")?;
        Ok((Change { conversation_id: id.clone(), cursor, time: row.time("time")?, body }, size))
    };
    let page = paged(c, sql, params![key, int(from)], limit, read, |(_, size)| size + OVERHEAD)?;
    Ok(Changes { items: page.items.into_iter().map(|(change, _)| change).collect(), newest })
}

pub(super) fn prune_changes(scope: &mut Scope<'_>, id: &ConversationId, through: u64) -> Result<u64> {
    let c = scope.connection;
    let Keyed { key, record } = find_conversation(c, id)?;
    if through > record.last_cursor {
        return Err(Conflict::CursorUnknown.into());
    }
    let sql = "SELECT min(h.cursor) AS cursor FROM turn t JOIN change h ON h.turn_key = t.key \
               WHERE t.conversation_key = ?1 AND t.end_time IS NULL";
    let open = first(c, sql, [key], |row| row.count_or_null("cursor"))?.flatten();
    let through = open.map_or(through, |open| through.min(open - 1)).max(record.pruned_through);
    execute(
        c,
        "DELETE FROM change WHERE conversation_key = ?1 AND cursor <= ?2",
        params![key, int(through)],
    )?;
    execute(c, "UPDATE conversation SET pruned_through = ?2 WHERE key = ?1", params![key, int(through)])?;
    Ok(through)
}
