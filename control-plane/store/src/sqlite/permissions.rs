//! Answers to permissions, as intent; and sessions and permissions in lists.

use roundhouse_domain::conflict::Kind;
use roundhouse_domain::permission::{Permission, PermissionIntent};
use roundhouse_domain::session::Session;
use rusqlite::types::Value;
use rusqlite::{Connection, Row, params, params_from_iter};

use super::ledger::{answered, keep};
use super::page::paged;
use super::rows::{find_permission, find_session, permission, select_permission, select_session, session};
use super::sql::{all, execute, first, to_json};
use super::writer::Scope;
use crate::command::{AnswerPermission, ListPermissions, ListSessions};
use crate::error::{Error, Result};
use crate::hint::Hint;
use crate::view::{AnswerOutcome, Page};

/// Longest words for the engine, in bytes.
const MAX_FEEDBACK: usize = 64_000;
/// What a row weighs in a page, about.
const WEIGHT: usize = 500;

pub(super) fn answer_permission(scope: &mut Scope<'_>, command: &AnswerPermission) -> Result<AnswerOutcome> {
    let c = scope.connection;
    let request = command.request.as_ref();
    if let Some(outcome) = answered(c, request)? {
        return Ok(outcome);
    }
    if command.feedback.len() > MAX_FEEDBACK {
        return Err(Error::invalid("feedback", format!("at most {MAX_FEEDBACK} bytes")));
    }
    let found = find_permission(c, &command.permission_id)?;
    let outcome = if !found.is_open() {
        AnswerOutcome::Settled(found)
    } else if found.intent.is_some() {
        AnswerOutcome::AnsweredBefore(found)
    } else {
        let intent = PermissionIntent {
            decision: command.decision,
            feedback: command.feedback.clone(),
            actor: command.actor.clone(),
            time: command.time,
        };
        let sql = "UPDATE permission SET intent = ?2 WHERE id = ?1 AND intent IS NULL";
        execute(c, sql, params![command.permission_id, to_json(&intent)?])?;
        let request_id = command.permission_id.clone();
        scope.hint(Hint::PermissionAnswered { turn_id: found.turn_id, request_id });
        AnswerOutcome::Recorded(find_permission(c, &command.permission_id)?)
    };
    keep(c, request, &outcome, command.time)?;
    Ok(outcome)
}

/// Keeps a list to open permissions, by the index that holds nothing else: the table may be long.
const OPEN: &str =
    " AND p.key IN (SELECT key FROM permission INDEXED BY permission_open WHERE settle_time IS NULL)";

pub(super) fn list_permissions(c: &Connection, query: &ListPermissions) -> Result<Page<Permission>> {
    let after = match &query.after {
        Some(id) => first(c, "SELECT key FROM permission WHERE id = ?1", [id], |row| Ok(row.get(0)?))?
            .ok_or_else(|| Error::not_found(Kind::Permission, id))?,
        None => 0_i64,
    };
    // Only the filters that are asked for are in the statement, so that each can use its index.
    let mut sql = select_permission!("WHERE p.key > ?").to_owned();
    let mut values = vec![Value::from(after)];
    if let Some(id) = &query.conversation_id {
        sql.push_str(" AND t.conversation_key = (SELECT key FROM conversation WHERE id = ?)");
        values.push(id.as_str().to_owned().into());
    }
    if let Some(id) = &query.turn_id {
        sql.push_str(" AND p.turn_key = (SELECT key FROM turn WHERE id = ?)");
        values.push(id.as_str().to_owned().into());
    }
    if query.open_only {
        sql.push_str(OPEN);
    }
    sql.push_str(" ORDER BY p.key");
    let size = |p: &Permission| p.request.body.len() + p.request.title.len() + WEIGHT;
    paged(c, &sql, params_from_iter(values), query.limit, permission, size)
}

pub(super) fn pending_answers(c: &Connection) -> Result<Vec<Permission>> {
    let sql = select_permission!("WHERE p.intent IS NOT NULL").to_owned() + OPEN + " ORDER BY p.key";
    all(c, &sql, [], permission)
}

pub(super) fn list_sessions(c: &Connection, query: &ListSessions) -> Result<Page<Session>> {
    let after = match &query.after {
        Some(id) => find_session(c, id)?.key,
        None => 0,
    };
    let mut sql = select_session!("WHERE s.key > ?").to_owned();
    let mut values = vec![Value::from(after)];
    if let Some(id) = &query.conversation_id {
        sql.push_str(" AND s.conversation_key = (SELECT key FROM conversation WHERE id = ?)");
        values.push(id.as_str().to_owned().into());
    }
    if let Some(id) = &query.workspace_id {
        sql.push_str(" AND s.workspace_id = ?");
        values.push(id.as_str().to_owned().into());
    }
    sql.push_str(" ORDER BY s.key");
    let read = |row: &Row<'_>| Ok(session(row)?.record);
    paged(c, &sql, params_from_iter(values), query.limit, read, |_| WEIGHT)
}
