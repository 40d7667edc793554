//! Conversations: made, found, listed, with what attention is computed from.

use roundhouse_domain::attention::{AttentionFacts, TurnFacts};
use roundhouse_domain::conflict::Kind;
use roundhouse_domain::conversation::{Conversation, ExternalId};
use roundhouse_domain::event::Fact;
use roundhouse_domain::id::{ConversationId, TurnId};
use roundhouse_domain::limits::MAX_NAME;
use roundhouse_domain::message::{Message, Position};
use roundhouse_domain::turn::{Turn, TurnState};
use roundhouse_domain::usage::Usage;
use rusqlite::{Connection, Row, params};
use serde::{Deserialize, Serialize};

use super::changes::Log;
use super::ledger::{answered, keep};
use super::page::paged;
use super::rows::{
    Keyed, conversation, find_conversation, find_runner, find_turn, find_workspace, message, permission,
    select_conversation, select_message, select_permission, select_turn, turn,
};
use super::slots::slot_holder;
use super::sql::{Columns, all, execute, first, int};
use super::writer::Scope;
use crate::command::{CreateConversation, ListConversations, SetArchived};
use crate::error::{Error, Result};
use crate::view::{ConversationView, Created, Page};

/// What a row weighs in a page besides its text.
const OVERHEAD: usize = 300;

#[derive(Serialize, Deserialize)]
struct CreatedAnswer {
    id: ConversationId,
    created: bool,
}

pub(super) fn create_conversation(scope: &mut Scope<'_>, command: &CreateConversation) -> Result<Created> {
    let c = scope.connection;
    let request = command.request.as_ref();
    if let Some(answer) = answered::<CreatedAnswer>(c, request)? {
        let conversation = find_conversation(c, &answer.id)?.record;
        return Ok(Created { conversation, created: answer.created });
    }
    if let Some(part) = command.external_id.as_ref().and_then(|id| id.invalid_part()) {
        let problem = format!("{part} must have 1 to {MAX_NAME} bytes");
        return Err(Error::invalid("external_id", problem));
    }
    if command.title.len() > MAX_NAME {
        return Err(Error::invalid("title", format!("at most {MAX_NAME} bytes")));
    }
    let found = existing(c, command)?;
    let created = found.is_none();
    let conversation = match found {
        Some(found) => found,
        None => {
            let external = command.external_id.as_ref();
            if let Some(workspace) = &command.workspace_id {
                find_workspace(c, workspace)?;
            }
            let sql = "INSERT INTO conversation (id, project, provider, external_id, title, last_agent, \
                       last_workspace_id, create_time, update_time) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?8)";
            let values = params![
                command.id.as_str(),
                external.map(|e| &e.project),
                external.map(|e| &e.provider),
                external.map(|e| &e.id),
                command.title,
                command.agent_name,
                command.workspace_id.as_ref().map(AsRef::<str>::as_ref),
                command.time.0
            ];
            execute(c, sql, values)?;
            find_conversation(c, &command.id)?.record
        }
    };
    let answer = CreatedAnswer { id: conversation.id.clone(), created };
    keep(c, request, &answer, command.time)?;
    Ok(Created { conversation, created })
}

fn named(c: &Connection, name: &ExternalId) -> Result<Option<Keyed<Conversation>>> {
    let sql = select_conversation!("WHERE project = ?1 AND provider = ?2 AND external_id = ?3");
    first(c, sql, params![name.project, name.provider, name.id], conversation)
}

pub(super) fn find_by_external_id(c: &Connection, name: &ExternalId) -> Result<ConversationView> {
    match named(c, name)? {
        Some(row) => view(c, row),
        None => Err(Error::not_found(
            Kind::Conversation,
            format!("{}/{}/{}", name.project, name.provider, name.id),
        )),
    }
}

fn existing(c: &Connection, command: &CreateConversation) -> Result<Option<Conversation>> {
    if let Some(name) = &command.external_id {
        return Ok(named(c, name)?.map(|row| row.record));
    }
    let sql = select_conversation!("WHERE id = ?1");
    Ok(first(c, sql, [command.id.as_str()], conversation)?.map(|row| row.record))
}

pub(super) fn set_archived(scope: &mut Scope<'_>, command: &SetArchived) -> Result<Conversation> {
    let c = scope.connection;
    let request = command.request.as_ref();
    if let Some(id) = answered::<ConversationId>(c, request)? {
        return Ok(find_conversation(c, &id)?.record);
    }
    let row = find_conversation(c, &command.conversation_id)?;
    if row.record.archived != command.archived {
        let mut log = Log::of_conversation(&row, command.time);
        let sql = "UPDATE conversation SET archived = ?2 WHERE key = ?1";
        execute(c, sql, params![row.key, command.archived])?;
        log.fact(c, &Fact::Archived { archived: command.archived })?;
        log.finish(scope)?;
    }
    keep(c, request, &command.conversation_id, command.time)?;
    Ok(find_conversation(c, &command.conversation_id)?.record)
}

pub(super) fn get_conversation(c: &Connection, id: &ConversationId) -> Result<ConversationView> {
    view(c, find_conversation(c, id)?)
}

pub(super) fn list_conversations(
    c: &Connection,
    query: &ListConversations,
) -> Result<Page<ConversationView>> {
    let before = match &query.after {
        Some(id) => find_conversation(c, id)?.key,
        None => i64::MAX,
    };
    let sql = select_conversation!(
        "WHERE key < ?1 AND (?2 IS NULL OR archived = ?2) AND (?3 IS NULL OR project = ?3) ORDER BY key DESC"
    );
    let values = params![before, query.archived, query.project];
    let read = |row: &Row<'_>| view(c, conversation(row)?);
    paged(c, sql, values, query.limit, read, |v| v.conversation.title.len() + 4 * OVERHEAD)
}

fn facts(row: &Turn, holds_slot: bool) -> TurnFacts {
    TurnFacts { turn_id: row.id.clone(), state: row.state, error: row.error.clone(), holds_slot }
}

fn view(c: &Connection, row: Keyed<Conversation>) -> Result<ConversationView> {
    let sql = select_turn!(
        "WHERE t.conversation_key = ?1 AND t.state IN \
         ('DISPATCHING', 'RUNNING', 'WAITING_FOR_PERMISSION', 'CANCELLING')"
    );
    let active = first(c, sql, [row.key], turn)?;
    let sql = "SELECT count(*) AS waiting FROM turn WHERE conversation_key = ?1 AND state = 'QUEUED'";
    let waiting = first(c, sql, [row.key], |r| r.count("waiting"))?.unwrap_or(0);
    let mut attention = AttentionFacts::default();
    if let Some(active) = &active {
        let sql = select_permission!("WHERE p.turn_key = ?1 AND p.settle_time IS NULL ORDER BY p.key");
        attention.permissions = all(c, sql, [active.key], permission)?;
        let sql = "SELECT 1 FROM slot WHERE turn_key = ?1";
        let holds_slot = first(c, sql, [active.key], |_| Ok(()))?.is_some();
        if let Some(id) = &active.turn.workspace_id {
            let workspace = find_workspace(c, id)?;
            if active.turn.state == TurnState::Dispatching && !holds_slot {
                attention.held_by = slot_holder(c, &active.turn, &workspace)?;
            }
            attention.runner = match find_runner(c, &workspace.runner_id) {
                Ok(runner) => Some(runner),
                Err(Error::NotFound { .. }) => None,
                Err(error) => return Err(error),
            };
        }
        attention.active = Some(facts(&active.turn, holds_slot));
    } else {
        let sql = select_turn!(
            "WHERE t.conversation_key = ?1 AND t.promotion IS NOT NULL ORDER BY t.key DESC LIMIT 1"
        );
        attention.last_ended = first(c, sql, [row.key], turn)?.map(|last| facts(&last.turn, false));
    }
    Ok(ConversationView {
        conversation: row.record,
        active_turn: active.map(|row| row.turn.id),
        waiting: u32::try_from(waiting).unwrap_or(u32::MAX),
        facts: attention,
    })
}

pub(super) fn list_messages(
    c: &Connection,
    id: &ConversationId,
    after_seq: u64,
    limit: usize,
) -> Result<Page<Message>> {
    let key = find_conversation(c, id)?.key;
    let sql = select_message!("WHERE m.conversation_key = ?1 AND m.seq > ?2 ORDER BY m.seq");
    let read = |row: &Row<'_>| Ok(message(row)?.record);
    paged(c, sql, params![key, int(after_seq)], limit, read, |m| m.body.len() + OVERHEAD)
}

pub(super) fn history(
    c: &Connection,
    id: &ConversationId,
    after: Position,
    limit: usize,
) -> Result<Page<Message>> {
    let key = find_conversation(c, id)?.key;
    let sql = select_message!(
        "WHERE m.conversation_key = ?1 AND m.position IS NOT NULL AND m.position > ?2 ORDER BY m.position"
    );
    let read = |row: &Row<'_>| Ok(message(row)?.record);
    paged(c, sql, params![key, int(after.0)], limit, read, |m| m.body.len() + OVERHEAD)
}

pub(super) fn list_turns(
    c: &Connection,
    id: &ConversationId,
    after: Option<&TurnId>,
    limit: usize,
) -> Result<Page<Turn>> {
    let key = find_conversation(c, id)?.key;
    let after = match after {
        Some(turn) => find_turn(c, turn)?.key,
        None => 0,
    };
    let sql = select_turn!("WHERE t.conversation_key = ?1 AND t.key > ?2 ORDER BY t.key");
    let size = |t: &Turn| {
        OVERHEAD
            + t.agent.as_ref().map_or(0, |a| a.text.len())
            + t.error.as_ref().map_or(0, |e| e.stderr_tail.len() + e.message.len())
    };
    paged(c, sql, params![key, after], limit, |row| Ok(turn(row)?.turn), size)
}

pub(super) fn usage_total(c: &Connection, id: &ConversationId) -> Result<Usage> {
    let key = find_conversation(c, id)?.key;
    let mut total = Usage::zero();
    // A turn that never reached an engine used nothing, which is known.
    let sql = "SELECT usage FROM turn WHERE conversation_key = ?1 AND accepted = 1 ORDER BY key";
    for usage in all(c, sql, [key], |row| row.json::<Usage>("usage"))? {
        total.add(&usage);
    }
    Ok(total)
}
