//! What a dispatcher does to a turn before it runs: workspace, slot, agent, session.

use roundhouse_domain::agent_file::AgentSnapshot;
use roundhouse_domain::conflict::Conflict;
use roundhouse_domain::event::Fact;
use roundhouse_domain::id::{Epoch, RunnerId, SessionId, TurnId, WorkspaceId};
use roundhouse_domain::runner::raise_epoch;
use roundhouse_domain::session::{Session, SessionState, stands_in_for};
use roundhouse_domain::time::Timestamp;
use roundhouse_domain::turn::{IllegalTransition, Turn, TurnInput, TurnState};
use roundhouse_domain::workspace::{SlotDecision, SlotHolder, Workspace};
use rusqlite::{Connection, params};

use super::changes::Log;
use super::events::{Stored, mark_unusable, save, store, validate};
use super::ledger::{answered, keep};
use super::queue::in_progress;
use super::rows::{
    Head, fenced, fenced_open, find_conversation, find_message, find_runner, find_session, find_turn,
    find_workspace, select_session, select_slot, select_turn, session, slot, turn,
};
use super::slots::slot_decision;
use super::sql::{Columns, all, execute, first, int, to_json};
use super::writer::Scope;
use crate::command::{
    ArrangeTurn, ChooseSession, MarkSessionUnusable, Owner, RecordOpening, ReplaceSession, SessionPick,
};
use crate::error::{Error, Result};
use crate::hint::Hint;
use crate::view::{ArrangeOutcome, Dispatch, SlotOutcome};

pub(super) fn begin_dispatch(c: &Connection, id: &TurnId) -> Result<Dispatch> {
    let row = find_turn(c, id)?;
    let turn = row.turn;
    if turn.state.is_terminal() {
        return Err(Conflict::TurnEnded(turn.state).into());
    }
    if turn.state == TurnState::Queued {
        return Err(
            Conflict::from(IllegalTransition { state: turn.state, input: TurnInput::Accepted }).into()
        );
    }
    let workspace = turn.workspace_id.as_ref().map(|id| find_workspace(c, id)).transpose()?;
    let runner = match &workspace {
        Some(workspace) => match find_runner(c, &workspace.runner_id) {
            Ok(runner) => Some(runner),
            Err(Error::NotFound { .. }) => None,
            Err(error) => return Err(error),
        },
        None => None,
    };
    let sql = select_session!(
        "WHERE s.conversation_key = ?1 AND s.workspace_id = ?2 ORDER BY s.use_time DESC, s.key DESC"
    );
    let workspace_id = turn.workspace_id.as_ref().map(WorkspaceId::as_str);
    let sessions = all(c, sql, params![row.conversation_key, workspace_id], session)?;
    let slot_free = match &workspace {
        Some(workspace) => slot_decision(c, &turn, workspace)? == SlotDecision::Take,
        None => false,
    };
    Ok(Dispatch {
        slot_free,
        conversation: find_conversation(c, &turn.conversation_id)?.record,
        message: find_message(c, &turn.message_id)?.record,
        workspace,
        runner,
        sessions: sessions.into_iter().map(|s| s.record).collect(),
        turn,
    })
}

pub(super) fn open_turns(c: &Connection) -> Result<Vec<Turn>> {
    // By the index of the lock, which holds nothing but open turns: the table may be long.
    let sql = select_turn!(
        "WHERE t.key IN (SELECT key FROM turn INDEXED BY turn_lock WHERE state IN \
         ('DISPATCHING', 'RUNNING', 'WAITING_FOR_PERMISSION', 'CANCELLING')) ORDER BY t.promotion"
    );
    Ok(all(c, sql, [], turn)?.into_iter().map(|row| row.turn).collect())
}

pub(super) fn ensure_workspace(
    scope: &mut Scope<'_>,
    workspace: &Workspace,
    time: Timestamp,
) -> Result<Workspace> {
    if workspace.id != WorkspaceId::derive(&workspace.runner_id, &workspace.path) {
        return Err(Error::invalid("workspace.id", "is not the id of its runner and path"));
    }
    let sql = "INSERT INTO workspace (id, runner_id, path, create_time) VALUES (?1, ?2, ?3, ?4) \
               ON CONFLICT (id) DO NOTHING";
    let values = params![workspace.id.as_str(), workspace.runner_id.as_str(), workspace.path, time.0];
    execute(scope.connection, sql, values)?;
    find_workspace(scope.connection, &workspace.id)
}

pub(super) fn assign_workspace(
    scope: &mut Scope<'_>,
    owner: &Owner,
    workspace_id: &WorkspaceId,
) -> Result<Turn> {
    let c = scope.connection;
    let head = fenced_open(c, owner)?;
    find_workspace(c, workspace_id)?;
    let row = find_turn(c, &head.id)?;
    match &row.turn.workspace_id {
        Some(has) if has == workspace_id => return Ok(row.turn),
        Some(_) => return Err(Conflict::AlreadySet("workspace").into()),
        None => {}
    }
    let id = workspace_id.as_str();
    execute(c, "UPDATE turn SET workspace_id = ?2 WHERE key = ?1", params![head.key, id])?;
    let sql = "UPDATE conversation SET last_workspace_id = ?2 WHERE key = ?1";
    execute(c, sql, params![head.conversation_key, id])?;
    Ok(find_turn(c, &head.id)?.turn)
}

/// The slots that are held on a runner.
pub(super) fn holders(c: &Connection, runner: Option<&RunnerId>) -> Result<Vec<SlotHolder>> {
    match runner {
        Some(runner) => {
            all(c, select_slot!("WHERE w.runner_id = ?1 ORDER BY l.time"), [runner.as_str()], slot)
        }
        None => all(c, select_slot!("ORDER BY l.time"), [], slot),
    }
}

pub(super) fn take_slot(scope: &mut Scope<'_>, owner: &Owner, time: Timestamp) -> Result<SlotOutcome> {
    let c = scope.connection;
    let head = fenced_open(c, owner)?;
    let turn = find_turn(c, &head.id)?.turn;
    let Some(workspace_id) = &turn.workspace_id else {
        return Err(Error::invalid("turn.workspace", "the turn has no workspace"));
    };
    match slot_decision(c, &turn, &find_workspace(c, workspace_id)?)? {
        SlotDecision::Held(holder) => Ok(SlotOutcome::Held(holder)),
        SlotDecision::Behind(turn) => Ok(SlotOutcome::Behind(turn)),
        SlotDecision::Take => {
            let sql = "INSERT INTO slot (workspace_id, turn_key, time) VALUES (?1, ?2, ?3) \
                       ON CONFLICT (turn_key) DO NOTHING";
            execute(c, sql, params![workspace_id.as_str(), head.key, time.0])?;
            Ok(SlotOutcome::Taken)
        }
    }
}

/// Frees the slot of a turn. True when it had one.
pub(super) fn delete_slot(scope: &mut Scope<'_>, turn_key: i64) -> Result<bool> {
    let sql = "DELETE FROM slot WHERE turn_key = ?1 RETURNING workspace_id";
    let freed = first(scope.connection, sql, [turn_key], |row| row.parsed::<WorkspaceId>("workspace_id"))?;
    let Some(workspace_id) = freed else { return Ok(false) };
    scope.hint(Hint::SlotFreed { workspace_id });
    Ok(true)
}

pub(super) fn free_slot(scope: &mut Scope<'_>, owner: &Owner) -> Result<bool> {
    let head = fenced(scope.connection, owner)?;
    delete_slot(scope, head.key)
}

pub(super) fn set_agent(scope: &mut Scope<'_>, owner: &Owner, snapshot: &AgentSnapshot) -> Result<Turn> {
    let c = scope.connection;
    let head = fenced_open(c, owner)?;
    let sql = "UPDATE turn SET agent = ?2, agent_name = ?3 WHERE key = ?1 AND agent IS NULL";
    if execute(c, sql, params![head.key, to_json(snapshot)?, snapshot.name])? == 1 {
        let sql = "UPDATE conversation SET last_agent = ?2 WHERE key = ?1";
        execute(c, sql, params![head.conversation_key, snapshot.name])?;
    }
    Ok(find_turn(c, &head.id)?.turn)
}

pub(super) fn arrange_turn(scope: &mut Scope<'_>, command: ArrangeTurn) -> Result<ArrangeOutcome> {
    match take_slot(scope, &command.owner, command.time)? {
        SlotOutcome::Taken => {}
        waits @ (SlotOutcome::Held(_) | SlotOutcome::Behind(_)) => return Ok(ArrangeOutcome::Waits(waits)),
    }
    if let Some(snapshot) = &command.agent {
        set_agent(scope, &command.owner, snapshot)?;
    }
    let choose = ChooseSession { owner: command.owner, pick: command.pick, time: command.time };
    let session = choose_session(scope, &choose)?;
    let turn = find_turn(scope.connection, &choose.owner.turn_id)?.turn;
    Ok(ArrangeOutcome::Arranged(Box::new((turn, session))))
}

pub(super) fn choose_session(scope: &mut Scope<'_>, command: &ChooseSession) -> Result<Session> {
    let c = scope.connection;
    let head = fenced_open(c, &command.owner)?;
    if let Some(bound) = &head.session_id {
        return Ok(find_session(c, bound)?.record);
    }
    let turn = find_turn(c, &head.id)?.turn;
    let mut log = Log::of_turn(&head, command.time);
    let mut replaces = None;
    let session_id = match &command.pick {
        SessionPick::Existing(id) => {
            let session = find_session(c, id)?.record;
            if session.conversation_id != turn.conversation_id {
                return Err(Conflict::SessionUnfit("it belongs to another conversation").into());
            }
            if Some(&session.workspace_id) != turn.workspace_id.as_ref() {
                return Err(Conflict::SessionUnfit("it belongs to another workspace").into());
            }
            if session.state != SessionState::Active {
                return Err(Conflict::SessionUnfit("it is unusable").into());
            }
            let sql = "UPDATE session SET use_time = max(use_time, ?2) WHERE id = ?1";
            execute(c, sql, params![id.as_str(), command.time.0])?;
            id
        }
        SessionPick::New(id) => {
            replaces = lost_session(c, &head, &turn)?;
            insert_session(c, &head, &turn, id, replaces.as_ref(), command.time)?;
            id
        }
    };
    let created = matches!(command.pick, SessionPick::New(_));
    bind(c, &mut log, &head, session_id, created, replaces.as_ref())?;
    log.finish(scope)?;
    Ok(find_session(c, session_id)?.record)
}

/// The session that a new one for the turn stands in for, if that was lost.
fn lost_session(c: &Connection, head: &Head, turn: &Turn) -> Result<Option<SessionId>> {
    let (Some(agent), Some(workspace)) = (&turn.agent, &turn.workspace_id) else { return Ok(None) };
    let sql = select_session!("WHERE s.conversation_key = ?1 AND s.workspace_id = ?2");
    let sessions = all(c, sql, params![head.conversation_key, workspace.as_str()], session)?;
    let sessions: Vec<Session> = sessions.into_iter().map(|row| row.record).collect();
    Ok(stands_in_for(&sessions, agent).cloned())
}

fn insert_session(
    c: &Connection,
    head: &Head,
    turn: &Turn,
    id: &SessionId,
    replaces: Option<&SessionId>,
    time: Timestamp,
) -> Result<()> {
    let agent = turn.agent.as_ref().ok_or_else(|| Error::invalid("turn.agent", "the turn has no agent"))?;
    let workspace = turn.workspace_id.as_ref();
    let workspace = workspace.ok_or_else(|| Error::invalid("turn.workspace", "the turn has no workspace"))?;
    let sql = "INSERT INTO session (id, conversation_key, workspace_id, agent_name, engine, model, \
               prompt_sha256, replaces, created_by, create_time, use_time) \
               VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?10)";
    let values = params![
        id.as_str(),
        head.conversation_key,
        workspace.as_str(),
        agent.name,
        agent.engine,
        agent.model,
        agent.prompt_sha256(),
        replaces.map(SessionId::as_str),
        head.id.as_str(),
        time.0
    ];
    execute(c, sql, values)?;
    Ok(())
}

fn bind(
    c: &Connection,
    log: &mut Log,
    head: &Head,
    session_id: &SessionId,
    created: bool,
    replaces: Option<&SessionId>,
) -> Result<()> {
    let sql = "UPDATE turn SET session_id = ?2, opening = NULL WHERE key = ?1";
    execute(c, sql, params![head.key, session_id.as_str()])?;
    log.fact(
        c,
        &Fact::SessionChosen {
            session_id: session_id.clone(),
            turn_id: head.id.clone(),
            created,
            replaces: replaces.cloned(),
        },
    )
}

pub(super) fn replace_session(scope: &mut Scope<'_>, command: ReplaceSession) -> Result<Session> {
    validate(&command.events, false)?;
    let c = scope.connection;
    let mut head = fenced_open(c, &command.owner)?;
    match &head.session_id {
        Some(bound) if *bound == command.replacement => return Ok(find_session(c, bound)?.record),
        Some(bound) if *bound == command.unusable => {}
        Some(_) | None => return Err(Conflict::AlreadySet("session").into()),
    }
    let turn = find_turn(c, &head.id)?.turn;
    let mut log = Log::of_turn(&head, command.time);
    mark_unusable(c, &mut log, head.conversation_key, &command.unusable, &command.reason)?;
    insert_session(c, &head, &turn, &command.replacement, Some(&command.unusable), command.time)?;
    bind(c, &mut log, &head, &command.replacement, true, Some(&command.unusable))?;
    // How the one before was opened says nothing of this one.
    execute(c, "UPDATE turn SET opening = NULL WHERE key = ?1", [head.key])?;
    head.session_id = Some(command.replacement.clone());
    store(c, &mut log, &mut head, command.events, command.time, &mut Stored::default())?;
    save(c, &head)?;
    log.finish(scope)?;
    Ok(find_session(c, &command.replacement)?.record)
}

pub(super) fn record_opening(scope: &mut Scope<'_>, command: RecordOpening) -> Result<Turn> {
    validate(&command.events, false)?;
    let c = scope.connection;
    let mut head = fenced_open(c, &command.owner)?;
    if head.session_id.as_ref() != Some(&command.session_id) {
        return Err(Conflict::AlreadySet("session").into());
    }
    let before = find_turn(c, &head.id)?.turn;
    let mut log = Log::of_turn(&head, command.time);
    let id = command.session_id.as_str();
    if before.opening.as_ref() != Some(&command.opening) {
        let sql = "UPDATE turn SET opening = ?2 WHERE key = ?1";
        execute(c, sql, params![head.key, to_json(&command.opening)?])?;
        log.fact(
            c,
            &Fact::SessionOpened {
                session_id: command.session_id.clone(),
                turn_id: head.id.clone(),
                origin: command.opening.origin,
            },
        )?;
    }
    if let Some(agent) = &before.agent {
        // What the session was given last, so that the next choice compares with it.
        let sql =
            "UPDATE session SET model = ?2, prompt_sha256 = ?3 WHERE id = ?1 AND unusable_reason IS NULL";
        execute(c, sql, params![id, agent.model, agent.prompt_sha256()])?;
    }
    if let Some(native_ref) = &command.native_ref {
        let sql = "UPDATE session SET native_ref = ?2 WHERE id = ?1 AND unusable_reason IS NULL";
        execute(c, sql, params![id, native_ref.0])?;
    }
    store(c, &mut log, &mut head, command.events, command.time, &mut Stored::default())?;
    save(c, &head)?;
    log.finish(scope)?;
    Ok(find_turn(c, &head.id)?.turn)
}

pub(super) fn mark_session_unusable(scope: &mut Scope<'_>, command: &MarkSessionUnusable) -> Result<Session> {
    let c = scope.connection;
    let (id, request) = (&command.session_id, command.request.as_ref());
    if let Some(marked) = answered::<SessionId>(c, request)? {
        return Ok(find_session(c, &marked)?.record);
    }
    let session = find_session(c, id)?.record;
    let conversation = find_conversation(c, &session.conversation_id)?;
    if in_progress(c, conversation.key)? {
        return Err(Conflict::TurnInProgress.into());
    }
    let mut log = Log::of_conversation(&conversation, command.time);
    mark_unusable(c, &mut log, conversation.key, id, &command.reason)?;
    log.finish(scope)?;
    keep(c, request, id, command.time)?;
    Ok(find_session(c, id)?.record)
}

pub(super) fn acknowledge_turn(scope: &mut Scope<'_>, id: &TurnId, time: Timestamp) -> Result<()> {
    let c = scope.connection;
    let row = find_turn(c, id)?;
    if !row.turn.state.is_terminal() {
        return Err(Conflict::TurnInProgress.into());
    }
    let sql = "UPDATE turn SET acknowledge_time = ?2 WHERE key = ?1 AND acknowledge_time IS NULL";
    execute(c, sql, params![row.key, time.0])?;
    Ok(())
}

pub(super) fn unacknowledged_turns(c: &Connection, runner: &RunnerId) -> Result<Vec<Turn>> {
    // A turn without a session never reached its runner.
    // By the index that holds no other turns: the table, and the workspaces of a runner, may be many.
    let sql = select_turn!(
        "JOIN workspace w ON w.id = t.workspace_id WHERE t.key IN (SELECT key FROM turn \
         INDEXED BY turn_unacknowledged WHERE end_time IS NOT NULL AND acknowledge_time IS NULL) \
         AND t.session_id IS NOT NULL AND w.runner_id = ?1 ORDER BY t.promotion"
    );
    Ok(all(c, sql, [runner.as_str()], turn)?.into_iter().map(|row| row.turn).collect())
}

/// The next epoch report of a runner, applied to one conversation. Returns the active turn's new epoch, if any.
pub(super) fn raise(
    c: &Connection,
    conversation_key: i64,
    counter: Epoch,
    reported: Epoch,
) -> Result<Option<(TurnId, Epoch)>> {
    let sql = "SELECT key, id, epoch FROM turn WHERE conversation_key = ?1 \
               AND state IN ('DISPATCHING', 'RUNNING', 'WAITING_FOR_PERMISSION', 'CANCELLING')";
    let active = first(c, sql, [conversation_key], |row| {
        let id: TurnId = row.parsed("id")?;
        Ok((row.get::<_, i64>("key")?, id, Epoch(row.count("epoch")?)))
    })?;
    let owner = active.as_ref().map(|(_, _, epoch)| *epoch);
    let raise = raise_epoch(counter, owner, reported);
    let sql = "UPDATE conversation SET epoch = ?2 WHERE key = ?1";
    execute(c, sql, params![conversation_key, int(raise.counter.0)])?;
    match (active, raise.owner) {
        (Some((key, id, _)), Some(epoch)) => {
            execute(c, "UPDATE turn SET epoch = ?2 WHERE key = ?1", params![key, int(epoch.0)])?;
            Ok(Some((id, epoch)))
        }
        (Some(_) | None, _) => Ok(None),
    }
}

/// Who has a workspace's own slot.
pub(super) fn slot_of(c: &Connection, id: &WorkspaceId) -> Result<Option<SlotHolder>> {
    first(c, select_slot!("WHERE l.workspace_id = ?1"), [id.as_str()], slot)
}
