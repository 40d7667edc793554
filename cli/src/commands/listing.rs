//! `messages`, `sessions`, `runners`, `workspaces`.

use roundhouse_proto::control::v1 as control;
use serde_json::json;

use crate::args::{MessagesArgs, SessionsArgs, WorkspacesCommand};
use crate::client::{self, Client, call, incomplete};
use crate::commands::conversations::{ago, more, pairs};
use crate::exit::Exit;
use crate::json;
use crate::output::{Output, table};
use crate::status::Failure;

pub(crate) async fn messages(client: &Client, args: MessagesArgs, output: Output) -> Result<Exit, Failure> {
    let request = control::ListMessagesRequest {
        conversation_id: client.conversation_id(&args.conversation).await?,
        after: args.after,
        limit: args.limit,
    };
    let answer = client.conversations().list_messages(call(request)).await?.into_inner();
    output.result(
        || {
            json!({
                "messages": answer.messages.iter().map(json::message).collect::<Vec<_>>(),
                "has_more": answer.has_more,
            })
        },
        || {
            if answer.messages.is_empty() {
                return "no messages".to_owned();
            }
            answer.messages.iter().map(message).collect::<Vec<_>>().join("\n\n")
        },
    );
    if let Some(last) = answer.messages.last().filter(|_| answer.has_more && !output.is_json()) {
        output.note(&format!("there are more: --after {}", last.seq));
    }
    Ok(Exit::Done)
}

/// A message with its heading.
pub(crate) fn message(message: &control::Message) -> String {
    let place =
        message.position.map_or_else(|| "waits".to_owned(), |position| format!("position {position}"));
    let mut flags = String::new();
    if message.incomplete {
        flags.push_str(", interrupted");
    }
    if message.truncated {
        flags.push_str(", cut");
    }
    let role = json::role(message.role).to_lowercase();
    let actor = if message.actor == role { String::new() } else { format!(" {}", message.actor) };
    format!("#{} {role}{actor} ({place}{flags})\n{}", message.seq, message.text.trim_end())
}

pub(crate) async fn sessions(client: &Client, args: SessionsArgs, output: Output) -> Result<Exit, Failure> {
    if let Some(id) = args.of.as_ref().filter(|of| of.starts_with("ses_")) {
        let request = control::GetSessionRequest { session_id: id.clone() };
        let answer = client.sessions().get_session(call(request)).await?.into_inner();
        let session = answer.session.ok_or_else(|| incomplete("the session"))?;
        output.result(|| json!({"session": json::session(&session)}), || session_details(&session));
        return Ok(Exit::Done);
    }
    let answer = list_sessions(client, &args).await?;
    output.result(
        || {
            json!({
                "sessions": answer.sessions.iter().map(json::session).collect::<Vec<_>>(),
                "next_page_token": answer.next_page_token,
            })
        },
        || session_rows(&answer),
    );
    more(output, &answer.next_page_token);
    Ok(Exit::Done)
}

async fn list_sessions(
    client: &Client,
    args: &SessionsArgs,
) -> Result<control::ListSessionsResponse, Failure> {
    let conversation_id = match &args.of {
        Some(named) => client.conversation_id(named).await?,
        None => String::new(),
    };
    let request = control::ListSessionsRequest {
        conversation_id,
        page_size: args.page.limit,
        page_token: args.page.page_token.clone().unwrap_or_default(),
    };
    Ok(client.sessions().list_sessions(call(request)).await?.into_inner())
}

/// Sessions for people.
pub(crate) async fn session_table(client: &Client, args: &SessionsArgs) -> Result<String, Failure> {
    Ok(session_rows(&list_sessions(client, args).await?))
}

fn session_rows(answer: &control::ListSessionsResponse) -> String {
    let rows = answer
        .sessions
        .iter()
        .map(|s| {
            vec![
                s.session_id.clone(),
                json::session_state(s.state).to_lowercase(),
                s.agent.clone(),
                s.engine.clone(),
                s.model.clone(),
                s.native_ref.as_ref().map(|native| native.id.clone()).unwrap_or_default(),
                ago(s.update_time.as_ref()),
            ]
        })
        .collect();
    table(&["session", "state", "agent", "engine", "model", "native id", "used"], rows, "no sessions")
}

fn session_details(session: &control::Session) -> String {
    let mut lines = vec![
        ("session", session.session_id.clone()),
        ("conversation", session.conversation_id.clone()),
        ("state", json::session_state(session.state).to_lowercase()),
        ("agent", session.agent.clone()),
        ("engine", session.engine.clone()),
        ("model", session.model.clone()),
        ("workspace", session.workspace_id.clone()),
        ("knows up to", session.watermark.to_string()),
    ];
    if let Some(native) = &session.native_ref {
        lines.push(("native id", native.id.clone()));
    }
    if !session.unusable_reason.is_empty() {
        lines.push(("unusable", session.unusable_reason.clone()));
    }
    if !session.replaces.is_empty() {
        lines.push(("replaces", session.replaces.clone()));
    }
    pairs(&lines)
}

pub(crate) async fn runners(client: &Client, output: Output) -> Result<Exit, Failure> {
    let answer = client.runners().list_runners(call(control::ListRunnersRequest {})).await?.into_inner();
    output.result(
        || json!({"runners": answer.runners.iter().map(json::runner).collect::<Vec<_>>()}),
        || {
            let rows = answer
                .runners
                .iter()
                .map(|r| {
                    vec![
                        r.runner_id.clone(),
                        r.hostname.clone(),
                        json::runner_state(r.state).to_lowercase(),
                        ago(r.last_seen_time.as_ref()),
                        r.running_turns.to_string(),
                        r.warm_engines.to_string(),
                        r.roots.iter().map(|root| root.path.clone()).collect::<Vec<_>>().join(", "),
                    ]
                })
                .collect();
            table(&["runner", "host", "state", "seen", "turns", "warm", "roots"], rows, "no runners")
        },
    );
    if answer.runners.is_empty() && !output.is_json() {
        output.note("start one with `roundhouse up`, or `engine-runner --control-plane URL --root DIR`");
    }
    Ok(Exit::Done)
}

pub(crate) async fn workspaces(
    client: &Client,
    what: WorkspacesCommand,
    output: Output,
) -> Result<Exit, Failure> {
    let known = "`roundhouse workspaces` lists them";
    match what {
        WorkspacesCommand::List { runner } => {
            let request = control::ListWorkspacesRequest { runner_id: runner.unwrap_or_default() };
            let answer = client.runners().list_workspaces(call(request)).await?.into_inner();
            output.result(
                || json!({"workspaces": answer.workspaces.iter().map(json::workspace).collect::<Vec<_>>()}),
                || {
                    let rows = answer.workspaces.iter().map(workspace_row).collect();
                    table(&["workspace", "runner", "path", "held by", "waiting"], rows, "no workspaces")
                },
            );
        }
        WorkspacesCommand::Free { workspace, turn, reason } => {
            let request = control::FreeWorkspaceRequest {
                request_id: client::request_id(None),
                workspace_id: client::id("wsp_", "workspace", known, workspace)?,
                turn_id: client::turn_id(turn)?,
                reason,
            };
            let answer = client.runners().free_workspace(call(request)).await?.into_inner();
            let workspace = answer.workspace.ok_or_else(|| incomplete("the workspace"))?;
            output.result(
                || json!({"workspace": json::workspace(&workspace)}),
                || format!("{} is free", workspace.path),
            );
        }
    }
    Ok(Exit::Done)
}

fn workspace_row(workspace: &control::Workspace) -> Vec<String> {
    let lost = if workspace.held_by_lost_turn { " (lost)" } else { "" };
    vec![
        workspace.workspace_id.clone(),
        workspace.runner_id.clone(),
        workspace.path.clone(),
        format!("{}{lost}", workspace.held_by_turn_id),
        workspace.waiting_turns.to_string(),
    ]
}
