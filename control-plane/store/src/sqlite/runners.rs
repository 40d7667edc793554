//! Runners, their workspaces, and the word of a person over both.

use roundhouse_domain::conflict::{Conflict, Reconciled};
use roundhouse_domain::id::{ControlPlaneId, RunnerId, WorkspaceId};
use roundhouse_domain::limits::MAX_NAME;
use roundhouse_domain::runner::Runner;
use roundhouse_domain::time::Timestamp;
use roundhouse_domain::workspace::Workspace;
use rusqlite::{Connection, Row, params};

use super::dispatch::{delete_slot, raise, slot_of};
use super::events::record_diagnosis;
use super::ledger::{answered, keep};
use super::page::paged;
use super::rows::{find_conversation, find_runner, find_turn, find_workspace, runner, workspace};
use super::sql::{Columns, all, execute, first, to_json};
use super::writer::Scope;
use crate::command::{Diagnosis, FreeWorkspace, RegisterRunner, SetDraining};
use crate::error::{Error, Result};
use crate::hint::Hint;
use crate::view::{FreeOutcome, Page, Registered, WorkspaceView};

/// Longest reason that a person gives, in bytes.
const MAX_REASON: usize = 4_096;

pub(super) fn control_plane_id(scope: &mut Scope<'_>, candidate: &ControlPlaneId) -> Result<ControlPlaneId> {
    let c = scope.connection;
    let sql = "INSERT INTO meta (name, value) VALUES ('control_plane_id', ?1) ON CONFLICT (name) DO NOTHING";
    execute(c, sql, [candidate.as_str()])?;
    let sql = "SELECT value FROM meta WHERE name = 'control_plane_id'";
    first(c, sql, [], |row| row.parsed("value"))?.ok_or_else(|| Error::Internal("no control plane id".into()))
}

pub(super) fn register_runner(scope: &mut Scope<'_>, command: &RegisterRunner) -> Result<Registered> {
    let c = scope.connection;
    let info = &command.info;
    let sql = "INSERT INTO runner (id, name, address, version, protocol_version, roots, boot_id, description, \
               create_time, register_time, heartbeat_time) \
               VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?9, ?9) \
               ON CONFLICT (id) DO UPDATE SET name = ?2, address = ?3, version = ?4, protocol_version = ?5, \
               roots = ?6, boot_id = ?7, description = ?8, draining = 0, register_time = ?9, \
               heartbeat_time = max(heartbeat_time, ?9)";
    let values = params![
        info.id.as_str(),
        info.name,
        info.address,
        info.version,
        info.protocol_version,
        to_json(&info.roots)?,
        info.boot_id,
        info.description,
        command.time.0
    ];
    execute(c, sql, values)?;
    let mut reconciled = Reconciled::default();
    for (conversation_id, epoch) in &command.claims.epochs {
        match find_conversation(c, conversation_id) {
            Ok(row) => {
                if let Some((turn_id, epoch)) = raise(c, row.key, row.record.epoch, *epoch)? {
                    scope.hint(Hint::Promoted { turn_id: turn_id.clone() });
                    reconciled.raised.push((turn_id, epoch));
                }
            }
            Err(Error::NotFound { .. }) => {
                reconciled.unknown.epochs.push((conversation_id.clone(), *epoch));
            }
            Err(error) => return Err(error),
        }
    }
    for turn_id in &command.claims.turns {
        let sql = "SELECT 1 FROM turn WHERE id = ?1";
        if first(c, sql, [turn_id.as_str()], |_| Ok(()))?.is_none() {
            reconciled.unknown.turns.push(turn_id.clone());
        }
    }
    Ok(Registered { runner: find_runner(c, &info.id)?, reconciled })
}

pub(super) fn heartbeat(scope: &mut Scope<'_>, id: &RunnerId, time: Timestamp) -> Result<Runner> {
    let sql = "UPDATE runner SET heartbeat_time = max(heartbeat_time, ?2) WHERE id = ?1";
    execute(scope.connection, sql, params![id.as_str(), time.0])?;
    find_runner(scope.connection, id)
}

pub(super) fn set_draining(scope: &mut Scope<'_>, command: &SetDraining) -> Result<Runner> {
    let c = scope.connection;
    let (id, request) = (&command.runner_id, command.request.as_ref());
    if answered::<()>(c, request)?.is_none() {
        let sql = "UPDATE runner SET draining = ?2 WHERE id = ?1";
        execute(c, sql, params![id.as_str(), command.draining])?;
        find_runner(c, id)?;
        keep(c, request, &(), command.time)?;
    }
    find_runner(c, id)
}

pub(super) fn list_runners(c: &Connection) -> Result<Vec<Runner>> {
    all(c, "SELECT * FROM runner ORDER BY name, id", [], runner)
}

pub(super) fn get_workspace(c: &Connection, id: &WorkspaceId) -> Result<WorkspaceView> {
    workspace_view(c, find_workspace(c, id)?)
}

fn workspace_view(c: &Connection, workspace: Workspace) -> Result<WorkspaceView> {
    let sql = "SELECT count(*) AS waiting FROM turn t WHERE t.workspace_id = ?1 AND t.state = 'DISPATCHING' \
               AND NOT EXISTS (SELECT 1 FROM slot l WHERE l.turn_key = t.key)";
    let waiting = first(c, sql, [workspace.id.as_str()], |row| row.count("waiting"))?.unwrap_or(0);
    let waiting = u32::try_from(waiting).unwrap_or(u32::MAX);
    Ok(WorkspaceView { holder: slot_of(c, &workspace.id)?, workspace, waiting })
}

pub(super) fn list_workspaces(
    c: &Connection,
    runner: Option<&RunnerId>,
    after: Option<&WorkspaceId>,
    limit: usize,
) -> Result<Page<WorkspaceView>> {
    let sql = "SELECT * FROM workspace WHERE id > ?1 AND (?2 IS NULL OR runner_id = ?2) ORDER BY id";
    let values = params![after.map_or("", WorkspaceId::as_str), runner.map(RunnerId::as_str)];
    let read = |row: &Row<'_>| workspace_view(c, workspace(row)?);
    paged(c, sql, values, limit, read, |view| view.workspace.path.len() + 200)
}

pub(super) fn free_workspace(scope: &mut Scope<'_>, command: &FreeWorkspace) -> Result<FreeOutcome> {
    let c = scope.connection;
    let request = command.request.as_ref();
    if let Some(outcome) = answered(c, request)? {
        return Ok(outcome);
    }
    if command.reason.len() > MAX_REASON || command.actor.len() > MAX_NAME {
        let problem = format!("at most {MAX_REASON} bytes, the actor at most {MAX_NAME}");
        return Err(Error::invalid("reason", problem));
    }
    find_workspace(c, &command.workspace_id)?;
    let turn = find_turn(c, &command.turn_id)?;
    let outcome = match slot_of(c, &command.workspace_id)? {
        None => FreeOutcome::WasFree,
        Some(holder) if holder.turn_id != command.turn_id => return Err(Conflict::OtherHolder.into()),
        Some(holder) if !holder.state.is_terminal() => return Err(Conflict::TurnInProgress.into()),
        Some(_) => {
            delete_slot(scope, turn.key)?;
            let note = serde_json::json!({ "freed_by": command.actor, "reason": command.reason });
            let payload = to_json(&note)?.into_bytes();
            let diagnosis = Diagnosis {
                turn_id: command.turn_id.clone(),
                epoch: turn.turn.epoch,
                runner_id: None,
                payload,
                time: command.time,
            };
            record_diagnosis(scope, &diagnosis)?;
            FreeOutcome::Freed
        }
    };
    keep(c, request, &outcome, command.time)?;
    Ok(outcome)
}
