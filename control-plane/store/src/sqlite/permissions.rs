//! Answers to permissions, as intent; and sessions and permissions in lists.

use roundhouse_domain::permission::{Permission, PermissionIntent};
use roundhouse_domain::session::Session;
use rusqlite::{Connection, Row, params};

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

pub(super) fn list_permissions(c: &Connection, query: &ListPermissions) -> Result<Page<Permission>> {
    let after = match &query.after {
        Some(id) => first(c, "SELECT key FROM permission WHERE id = ?1", [id], |row| Ok(row.get(0)?))?
            .unwrap_or(i64::MAX),
        None => 0,
    };
    let sql = select_permission!(
        "WHERE p.key > ?1 AND (?2 IS NULL OR c.id = ?2) AND (?3 IS NULL OR t.id = ?3) \
         AND (NOT ?4 OR p.settle_time IS NULL) ORDER BY p.key"
    );
    let conversation = query.conversation_id.as_ref().map(AsRef::<str>::as_ref);
    let turn = query.turn_id.as_ref().map(AsRef::<str>::as_ref);
    let values = params![after, conversation, turn, query.open_only];
    paged(c, sql, values, query.limit, permission, |p| p.request.body.len() + p.request.title.len() + WEIGHT)
}

pub(super) fn pending_answers(c: &Connection) -> Result<Vec<Permission>> {
    let sql = select_permission!("WHERE p.settle_time IS NULL AND p.intent IS NOT NULL ORDER BY p.key");
    all(c, sql, [], permission)
}

pub(super) fn list_sessions(c: &Connection, query: &ListSessions) -> Result<Page<Session>> {
    let after = match &query.after {
        Some(id) => find_session(c, id)?.key,
        None => 0,
    };
    let sql = select_session!(
        "WHERE s.key > ?1 AND (?2 IS NULL OR c.id = ?2) AND (?3 IS NULL OR s.workspace_id = ?3) ORDER BY s.key"
    );
    let conversation = query.conversation_id.as_ref().map(AsRef::<str>::as_ref);
    let workspace = query.workspace_id.as_ref().map(AsRef::<str>::as_ref);
    let read = |row: &Row<'_>| Ok(session(row)?.record);
    paged(c, sql, params![after, conversation, workspace], query.limit, read, |_| WEIGHT)
}
