//! Where a call is meant to go: from what people write to a workspace.
//!
//! A workspace is named by its id, by `<runner>:<path>`, or by a bare path when one runner is known. A path is resolved
//! by its runner, so that two spellings of one directory are one workspace.

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
    let runner = find_runner(app, runner).await?;
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
            "is a workspace id, <runner>:<absolute path>, or an absolute path when one runner is known",
        ));
    }
    Ok((runner, path))
}

async fn find_runner(app: &App, name: Option<&str>) -> Result<RunnerId> {
    let runners = app.store.list_runners().await?;
    let matching: Vec<&Runner> = runners
        .iter()
        .filter(|runner| name.is_none_or(|name| runner.info.id.as_str() == name || runner.info.name == name))
        .collect();
    match (matching.as_slice(), name) {
        ([only], _) => Ok(only.info.id.clone()),
        ([], Some(name)) => Err(Error::missing(Missing::Runner, name)),
        ([], None) => Err(Error::missing(Missing::Runner, "(none has registered)")),
        (_, Some(name)) => {
            Err(Error::field("workspace", format!("several runners are named {name}; use the runner's id")))
        }
        (_, None) => Err(Error::field("workspace", "several runners are known; write <runner>:<path>")),
    }
}

/// What a runner's silence or refusal means to the caller.
pub(crate) fn unreached(runner: &RunnerId, path: &str, error: CallError) -> Error {
    match error {
        CallError::Unreachable(detail) => Error::RunnerUnavailable { runner: runner.to_string(), detail },
        CallError::Refused { reason: Some(ErrorReason::WorkspaceNotFound), message, .. } => {
            tracing::debug!(path, message, "no such workspace");
            Error::missing(Missing::Workspace, path)
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
    let request = roundhouse_proto::engine::v1::ListAgentFilesRequest { workspace: workspace.path.clone() };
    let files = handle.link().map_err(refused)?.list_agent_files(request).await.map_err(refused)?;
    Ok((files, facts))
}
