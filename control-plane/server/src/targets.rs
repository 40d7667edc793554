//! Where a call is meant to go: from what people write to a workspace.
//!
//! A workspace is named by its id, by `<runner>:<path>`, or by a bare path when one runner alone can be meant. A path is
//! resolved by its runner, so that two spellings of one directory are one workspace.

use std::sync::Arc;

use roundhouse_domain::id::{RunnerId, WorkspaceId};
use roundhouse_domain::runner::Runner;
use roundhouse_domain::workspace::Workspace;
use roundhouse_proto::engine::v1::{ErrorReason, InspectWorkspaceRequest};

use crate::app::App;
use crate::clock;
use crate::error::{Error, Missing, Result};
use crate::runners::CallError;

/// Finds the workspace that `text` names, and makes it known.
pub(crate) async fn workspace(app: &App, text: &str) -> Result<Workspace> {
    if text.starts_with(WorkspaceId::PREFIX) && !text.contains(':') && !text.contains('/') {
        let id = crate::grpc::from_proto::workspace_id(text)?;
        return Ok(app.store.get_workspace(&id).await?.workspace);
    }
    let (runner, path) = split(text)?;
    let runner = match runner {
        Some(name) => find_runner(app, name).await?,
        None => guess_runner(app, path).await?,
    };
    let handle = app.runners.get(&runner);
    let request = InspectWorkspaceRequest { workspace: path.to_owned(), paths: Vec::new() };
    let answer = match handle.link() {
        Ok(link) => link.inspect_workspace(request).await,
        Err(error) => Err(error),
    };
    let facts = answer.map_err(|error| unreached(&runner, path, error))?;
    handle.heard();
    let workspace = Workspace::new(runner, facts.workspace);
    Ok(app.store.ensure_workspace(workspace, clock::now()).await?)
}

/// The runner's name, if there is one, and the path.
fn split(text: &str) -> Result<(Option<&str>, &str)> {
    let (runner, path) = match text.split_once(':') {
        Some((runner, path)) if !runner.contains('/') => (Some(runner), path),
        Some(_) | None => (None, text),
    };
    if runner == Some("") {
        return Err(Error::field("workspace", "a runner's id or name stands before the colon"));
    }
    if !path.starts_with('/') {
        return Err(Error::field(
            "workspace",
            "is a workspace id, <runner>:<absolute path>, or an absolute path when one runner alone can be meant",
        ));
    }
    Ok((runner, path))
}

async fn find_runner(app: &App, name: &str) -> Result<RunnerId> {
    let mut runners = app.store.list_runners().await?;
    runners.retain(|runner| runner.info.id.as_str() == name || runner.info.name == name);
    match runners.as_slice() {
        [only] => Ok(only.info.id.clone()),
        [] => Err(Error::missing(Missing::Runner, name)),
        _ => Err(Error::field("workspace", format!("several runners are named {name}; use the runner's id"))),
    }
}

/// The runner that a bare path is meant for: the only one that is there and has the path under a root.
///
/// A runner that is gone, and for good perhaps, must not make every bare path ambiguous. One whose turns still hold a
/// workspace may come back to them, so it counts as if it were there.
async fn guess_runner(app: &App, path: &str) -> Result<RunnerId> {
    let runners = app.store.list_runners().await?;
    match runners.as_slice() {
        [] => return Err(Error::missing(Missing::Runner, "(none has registered)")),
        [only] => return Ok(only.info.id.clone()),
        _ => {}
    }
    let mut there: Vec<&Runner> = Vec::new();
    for runner in &runners {
        let alive = app.runners.find(&runner.info.id).is_some_and(|handle| handle.is_alive());
        if alive || !app.store.held_slots(Some(&runner.info.id)).await?.is_empty() {
            there.push(runner);
        }
    }
    let under_root = |runner: &&Runner| runner.info.roots.iter().any(|root| within(&root.path, path));
    // A path that leads through a symlink may lie under a root without looking so.
    if there.iter().any(under_root) {
        there.retain(under_root);
    }
    match there.as_slice() {
        [only] => Ok(only.info.id.clone()),
        [] => Err(Error::field(
            "workspace",
            "several runners are known and none is there; write <runner>:<path>",
        )),
        _ => Err(Error::field("workspace", "several runners can be meant; write <runner>:<path>")),
    }
}

fn within(root: &str, path: &str) -> bool {
    std::path::Path::new(path).starts_with(root)
}

/// What a runner's silence or refusal means to the caller.
pub(crate) fn unreached(runner: &RunnerId, path: &str, error: CallError) -> Error {
    match error {
        CallError::Unreachable(detail) => Error::RunnerUnavailable { runner: runner.to_string(), detail },
        CallError::Refused { reason: Some(ErrorReason::WorkspaceNotFound), message, .. } => {
            Error::NoWorkspace { path: path.to_owned(), message }
        }
        CallError::Refused { reason, message, .. } => Error::Refused {
            reason: crate::grpc::status::name(reason.unwrap_or(ErrorReason::Internal)),
            message,
        },
    }
}

/// The agent files of a workspace and the engines that they are checked against.
pub(crate) async fn agent_files(
    app: &App,
    workspace: &Workspace,
) -> Result<(
    roundhouse_proto::engine::v1::ListAgentFilesResponse,
    Arc<roundhouse_proto::engine::v1::DescribeRunnerResponse>,
)> {
    let handle = app.runners.get(&workspace.runner_id);
    let refused = |error| unreached(&workspace.runner_id, &workspace.path, error);
    let facts = handle.describe().await.map_err(refused)?;
    let request = roundhouse_proto::engine::v1::ListAgentFilesRequest {
        workspace: workspace.path.clone(),
        file_name: String::new(),
    };
    let files = handle.link().map_err(refused)?.list_agent_files(request).await.map_err(refused)?;
    Ok((files, facts))
}
