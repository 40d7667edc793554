//! Summaries: compare-and-set on the version, every version kept.

use roundhouse_domain::conflict::{Conflict, Kind};
use roundhouse_domain::event::Fact;
use roundhouse_domain::id::{ConversationId, TurnId};
use roundhouse_domain::message::Position;
use roundhouse_domain::summary::{Proposal, Summary, SummaryRefusal, admit};
use rusqlite::{Connection, Row, params};

use super::changes::Log;
use super::ledger::{answered, keep};
use super::rows::find_conversation;
use super::sql::{Columns, execute, first, int};
use super::writer::Scope;
use crate::command::PutSummary;
use crate::error::{Error, Result};

fn summary(row: &Row<'_>, conversation_id: &ConversationId) -> Result<Summary> {
    Ok(Summary {
        conversation_id: conversation_id.clone(),
        version: row.count("version")?,
        through: Position(row.count("through")?),
        text: row.get("text")?,
        author: row.get("author")?,
        create_time: row.time("create_time")?,
    })
}

pub(super) fn put_summary(scope: &mut Scope<'_>, command: &PutSummary) -> Result<Summary> {
    let c = scope.connection;
    let id = &command.conversation_id;
    if let Some(version) = answered::<u64>(c, command.request.as_ref())? {
        return get_summary(c, id, Some(version));
    }
    let conversation = find_conversation(c, id)?;
    let current = current_version(c, conversation.key)?;
    let proposal = Proposal {
        expected_version: command.expected_version,
        through: command.through,
        text: &command.text,
        author: &command.author,
    };
    let version = admit(&proposal, current, conversation.record.last_position).map_err(refused)?;
    let sql = "INSERT INTO summary (conversation_key, version, through, text, author, create_time) \
               VALUES (?1, ?2, ?3, ?4, ?5, ?6)";
    let values = params![
        conversation.key,
        int(version),
        int(command.through.0),
        command.text,
        command.author,
        command.time.0
    ];
    execute(c, sql, values)?;
    let mut log = Log::of_conversation(&conversation, command.time);
    log.fact(c, &Fact::SummaryChanged { version })?;
    log.finish(scope)?;
    keep(c, command.request.as_ref(), &version, command.time)?;
    get_summary(c, id, Some(version))
}

fn current_version(c: &Connection, conversation_key: i64) -> Result<u64> {
    let sql = "SELECT coalesce(max(version), 0) AS version FROM summary WHERE conversation_key = ?1";
    Ok(first(c, sql, [conversation_key], |row| row.count("version"))?.unwrap_or(0))
}

fn refused(refusal: SummaryRefusal) -> Error {
    match (refusal, refusal.field()) {
        (SummaryRefusal::Version { expected, current }, _) => {
            Conflict::SummaryVersion { expected, current }.into()
        }
        (_, Some(field)) => {
            let text = refusal.to_string();
            let problem = text.split_once(": ").map_or(text.as_str(), |(_, problem)| problem);
            Error::invalid(field, problem)
        }
        (_, None) => Error::Internal(refusal.to_string()),
    }
}

pub(super) fn get_summary(c: &Connection, id: &ConversationId, version: Option<u64>) -> Result<Summary> {
    let conversation = find_conversation(c, id)?;
    let version = match version {
        Some(version) => version,
        None => current_version(c, conversation.key)?,
    };
    let sql = "SELECT * FROM summary WHERE conversation_key = ?1 AND version = ?2";
    first(c, sql, params![conversation.key, int(version)], |row| summary(row, id))?
        .ok_or_else(|| Error::not_found(Kind::Summary, format!("{id} version {version}")))
}

pub(super) fn turn_summary(c: &Connection, id: &TurnId) -> Result<Option<Summary>> {
    let turn = super::rows::find_turn(c, id)?;
    let sql = "SELECT s.* FROM turn t JOIN summary s \
               ON s.conversation_key = t.conversation_key AND s.version = t.summary_version WHERE t.key = ?1";
    first(c, sql, [turn.key], |row| summary(row, &turn.turn.conversation_id))
}
