//! Rows to records.

use roundhouse_domain::agent_file::Trigger;
use roundhouse_domain::conflict::{Conflict, Kind};
use roundhouse_domain::conversation::{Conversation, ExternalId};
use roundhouse_domain::id::{ConversationId, Epoch, MessageId, RunnerId, SessionId, TurnId, WorkspaceId};
use roundhouse_domain::message::{Message, Position, Role};
use roundhouse_domain::permission::{Permission, PermissionRequest};
use roundhouse_domain::runner::{Runner, RunnerInfo};
use roundhouse_domain::session::{NativeRef, Session, SessionState};
use roundhouse_domain::turn::{Turn, TurnState};
use roundhouse_domain::workspace::{SlotHolder, Workspace};
use rusqlite::{Connection, Row};

use super::sql::{Columns, first};
use crate::command::Owner;
use crate::error::{Error, Result};

macro_rules! select_conversation {
    ($rest:literal) => {
        concat!("SELECT * FROM conversation ", $rest)
    };
}
macro_rules! select_message {
    ($rest:literal) => {
        concat!(
            "SELECT m.*, c.id AS conversation_id FROM message m \
             JOIN conversation c ON c.key = m.conversation_key ",
            $rest
        )
    };
}
macro_rules! select_turn {
    ($rest:literal) => {
        concat!(
            "SELECT t.*, c.id AS conversation_id, m.id AS message_id FROM turn t \
             JOIN conversation c ON c.key = t.conversation_key JOIN message m ON m.key = t.message_key ",
            $rest
        )
    };
}
macro_rules! select_session {
    ($rest:literal) => {
        concat!(
            "SELECT s.*, c.id AS conversation_id FROM session s \
             JOIN conversation c ON c.key = s.conversation_key ",
            $rest
        )
    };
}
macro_rules! select_permission {
    ($rest:literal) => {
        concat!(
            "SELECT p.*, t.id AS turn_id, c.id AS conversation_id FROM permission p \
             JOIN turn t ON t.key = p.turn_key JOIN conversation c ON c.key = t.conversation_key ",
            $rest
        )
    };
}
macro_rules! select_slot {
    ($rest:literal) => {
        concat!(
            "SELECT l.time, w.id, w.runner_id, w.path, t.id AS turn_id, t.state, c.id AS conversation_id \
             FROM slot l JOIN workspace w ON w.id = l.workspace_id JOIN turn t ON t.key = l.turn_key \
             JOIN conversation c ON c.key = t.conversation_key ",
            $rest
        )
    };
}
pub(super) use {
    select_conversation, select_message, select_permission, select_session, select_slot, select_turn,
};

/// A record with the keys that only the database knows.
#[derive(Clone, Debug)]
pub(super) struct Keyed<T> {
    pub(super) key: i64,
    pub(super) record: T,
}

pub(super) fn conversation(row: &Row<'_>) -> Result<Keyed<Conversation>> {
    let project: Option<String> = row.get("project")?;
    let external_id = match project {
        Some(project) => {
            Some(ExternalId { project, provider: row.get("provider")?, id: row.get("external_id")? })
        }
        None => None,
    };
    let record = Conversation {
        id: row.parsed("id")?,
        external_id,
        title: row.get("title")?,
        archived: row.get("archived")?,
        last_seq: row.count("last_seq")?,
        last_position: Position(row.count("last_position")?),
        last_cursor: row.count("last_cursor")?,
        pruned_through: row.count("pruned_through")?,
        epoch: Epoch(row.count("epoch")?),
        last_agent: row.get("last_agent")?,
        last_workspace_id: row.parsed_or_null("last_workspace_id")?,
        create_time: row.time("create_time")?,
        update_time: row.time("update_time")?,
    };
    Ok(Keyed { key: row.get("key")?, record })
}

pub(super) fn message(row: &Row<'_>) -> Result<Keyed<Message>> {
    let record = Message {
        id: row.parsed("id")?,
        conversation_id: row.parsed("conversation_id")?,
        seq: row.count("seq")?,
        position: row.count_or_null("position")?.map(Position),
        role: row.named("role", Role::parse)?,
        actor: row.get("actor")?,
        body: row.get("body")?,
        turn_id: row.parsed_or_null("turn_id")?,
        incomplete: row.get("incomplete")?,
        truncated: row.get("truncated")?,
        create_time: row.time("create_time")?,
    };
    Ok(Keyed { key: row.get("key")?, record })
}

/// A turn with its keys.
#[derive(Clone, Debug)]
pub(super) struct TurnRow {
    pub(super) key: i64,
    pub(super) conversation_key: i64,
    pub(super) turn: Turn,
}

pub(super) fn turn(row: &Row<'_>) -> Result<TurnRow> {
    let surface = |text: &str| Trigger::ALL.into_iter().find(|t| t.as_str() == text);
    let turn = Turn {
        id: row.parsed("id")?,
        conversation_id: row.parsed("conversation_id")?,
        message_id: row.parsed("message_id")?,
        state: row.named("state", TurnState::parse)?,
        epoch: Epoch(row.count("epoch")?),
        promotion: row.count_or_null("promotion")?,
        agent_name: row.get("agent_name")?,
        agent: row.json_or_null("agent")?,
        workspace_id: row.parsed_or_null("workspace_id")?,
        session_id: row.parsed_or_null("session_id")?,
        opening: row.json_or_null("opening")?,
        accepted: row.get("accepted")?,
        retry_of: row.parsed_or_null("retry_of")?,
        error: row.json_or_null("error")?,
        agent_message_id: row.parsed_or_null("agent_message_id")?,
        usage: row.json("usage")?,
        last_seq: row.count("last_seq")?,
        last_number: row.count("last_number")?,
        surface: row.named("surface", surface)?,
        create_time: row.time("create_time")?,
        start_time: row.time_or_null("start_time")?,
        cancel_time: row.time_or_null("cancel_time")?,
        end_time: row.time_or_null("end_time")?,
        acknowledge_time: row.time_or_null("acknowledge_time")?,
    };
    Ok(TurnRow { key: row.get("key")?, conversation_key: row.get("conversation_key")?, turn })
}

pub(super) fn session(row: &Row<'_>) -> Result<Keyed<Session>> {
    let unusable: Option<String> = row.get("unusable_reason")?;
    let record = Session {
        id: row.parsed("id")?,
        conversation_id: row.parsed("conversation_id")?,
        workspace_id: row.parsed("workspace_id")?,
        agent_name: row.get("agent_name")?,
        engine: row.get("engine")?,
        model: row.get("model")?,
        prompt_sha256: row.get("prompt_sha256")?,
        state: unusable.map_or(SessionState::Active, SessionState::Unusable),
        native_ref: row.get::<_, Option<Vec<u8>>>("native_ref")?.map(NativeRef),
        watermark: Position(row.count("watermark")?),
        replaces: row.parsed_or_null("replaces")?,
        created_by: row.parsed("created_by")?,
        create_time: row.time("create_time")?,
        use_time: row.time("use_time")?,
    };
    Ok(Keyed { key: row.get("key")?, record })
}

pub(super) fn permission(row: &Row<'_>) -> Result<Permission> {
    Ok(Permission {
        request: PermissionRequest {
            request_id: row.get("id")?,
            tool: row.get("tool")?,
            title: row.get("title")?,
            deadline: row.time_or_null("deadline")?,
            body: row.get("body")?,
        },
        conversation_id: row.parsed("conversation_id")?,
        turn_id: row.parsed("turn_id")?,
        create_time: row.time("create_time")?,
        intent: row.json_or_null("intent")?,
        result: row.json_or_null("result")?,
        settle_time: row.time_or_null("settle_time")?,
    })
}

pub(super) fn runner(row: &Row<'_>) -> Result<Runner> {
    Ok(Runner {
        info: RunnerInfo {
            id: row.parsed("id")?,
            name: row.get("name")?,
            address: row.get("address")?,
            version: row.get("version")?,
            protocol_version: row.get("protocol_version")?,
            roots: row.json("roots")?,
            boot_id: row.get("boot_id")?,
            description: row.get("description")?,
        },
        draining: row.get("draining")?,
        create_time: row.time("create_time")?,
        register_time: row.time("register_time")?,
        heartbeat_time: row.time("heartbeat_time")?,
    })
}

pub(super) fn workspace(row: &Row<'_>) -> Result<Workspace> {
    Ok(Workspace { id: row.parsed("id")?, runner_id: row.parsed("runner_id")?, path: row.get("path")? })
}

pub(super) fn slot(row: &Row<'_>) -> Result<SlotHolder> {
    Ok(SlotHolder {
        workspace: workspace(row)?,
        turn_id: row.parsed("turn_id")?,
        conversation_id: row.parsed("conversation_id")?,
        state: row.named("state", TurnState::parse)?,
        time: row.time("time")?,
    })
}

pub(super) fn find_conversation(c: &Connection, id: &ConversationId) -> Result<Keyed<Conversation>> {
    first(c, select_conversation!("WHERE id = ?1"), [id.as_str()], conversation)?
        .ok_or_else(|| Error::not_found(Kind::Conversation, id.as_str()))
}

pub(super) fn find_message(c: &Connection, id: &MessageId) -> Result<Keyed<Message>> {
    first(c, select_message!("WHERE m.id = ?1"), [id.as_str()], message)?
        .ok_or_else(|| Error::not_found(Kind::Message, id.as_str()))
}

pub(super) fn find_turn(c: &Connection, id: &TurnId) -> Result<TurnRow> {
    first(c, select_turn!("WHERE t.id = ?1"), [id.as_str()], turn)?
        .ok_or_else(|| Error::not_found(Kind::Turn, id.as_str()))
}

pub(super) fn find_session(c: &Connection, id: &SessionId) -> Result<Keyed<Session>> {
    first(c, select_session!("WHERE s.id = ?1"), [id.as_str()], session)?
        .ok_or_else(|| Error::not_found(Kind::Session, id.as_str()))
}

pub(super) fn find_workspace(c: &Connection, id: &WorkspaceId) -> Result<Workspace> {
    first(c, "SELECT * FROM workspace WHERE id = ?1", [id.as_str()], workspace)?
        .ok_or_else(|| Error::not_found(Kind::Workspace, id.as_str()))
}

pub(super) fn find_runner(c: &Connection, id: &RunnerId) -> Result<Runner> {
    first(c, "SELECT * FROM runner WHERE id = ?1", [id.as_str()], runner)?
        .ok_or_else(|| Error::not_found(Kind::Runner, id.as_str()))
}

pub(super) fn find_permission(c: &Connection, id: &str) -> Result<Permission> {
    first(c, select_permission!("WHERE p.id = ?1"), [id], permission)?
        .ok_or_else(|| Error::not_found(Kind::Permission, id))
}

/// What fencing and events need of a turn: small, for the path that every event takes.
#[derive(Clone, Debug)]
pub(super) struct Head {
    pub(super) key: i64,
    pub(super) conversation_key: i64,
    pub(super) conversation_id: ConversationId,
    pub(super) id: TurnId,
    pub(super) state: TurnState,
    pub(super) epoch: Epoch,
    pub(super) session_id: Option<SessionId>,
    pub(super) last_seq: u64,
    pub(super) last_number: u64,
    pub(super) last_cursor: u64,
}

/// The head of a turn that is acted on: right epoch, whatever its state.
pub(super) fn fenced(c: &Connection, owner: &Owner) -> Result<Head> {
    let sql = "SELECT t.key, t.conversation_key, t.state, t.epoch, t.session_id, t.last_seq, t.last_number, \
               c.last_cursor, c.id AS conversation_id \
               FROM turn t JOIN conversation c ON c.key = t.conversation_key WHERE t.id = ?1";
    let head = first(c, sql, [owner.turn_id.as_str()], |row| {
        Ok(Head {
            key: row.get("key")?,
            conversation_key: row.get("conversation_key")?,
            conversation_id: row.parsed("conversation_id")?,
            id: owner.turn_id.clone(),
            state: row.named("state", TurnState::parse)?,
            epoch: Epoch(row.count("epoch")?),
            session_id: row.parsed_or_null("session_id")?,
            last_seq: row.count("last_seq")?,
            last_number: row.count("last_number")?,
            last_cursor: row.count("last_cursor")?,
        })
    })?
    .ok_or_else(|| Error::not_found(Kind::Turn, owner.turn_id.as_str()))?;
    if head.epoch != owner.epoch {
        return Err(Conflict::StaleEpoch { given: owner.epoch, current: head.epoch }.into());
    }
    Ok(head)
}

/// The head of a turn that is acted on and has not ended.
pub(super) fn fenced_open(c: &Connection, owner: &Owner) -> Result<Head> {
    let head = fenced(c, owner)?;
    if head.state.is_terminal() {
        return Err(Conflict::TurnEnded(head.state).into());
    }
    Ok(head)
}
