//! `permissions list | allow | deny`.

use roundhouse_proto::control::v1 as control;
use roundhouse_proto::engine::v1::PermissionDecision;
use serde_json::json;

use crate::args::{Page, PermissionsCommand};
use crate::client::{self, Client, call, incomplete};
use crate::commands::conversations::more;
use crate::events::render;
use crate::exit::Exit;
use crate::json;
use crate::output::Output;
use crate::status::Failure;

pub(crate) async fn run(client: &Client, what: PermissionsCommand, output: Output) -> Result<Exit, Failure> {
    match what {
        PermissionsCommand::List { conversation, all, page } => {
            list(client, conversation.as_deref(), all, page, output).await
        }
        PermissionsCommand::Allow { request } => {
            answer(client, request, PermissionDecision::Allow, String::new(), output).await
        }
        PermissionsCommand::Deny { request, feedback } => {
            answer(client, request, PermissionDecision::Deny, feedback, output).await
        }
    }
}

async fn list(
    client: &Client,
    conversation: Option<&str>,
    all: bool,
    page: Page,
    output: Output,
) -> Result<Exit, Failure> {
    let conversation_id = match conversation {
        Some(named) => client.conversation_id(named).await?,
        None => String::new(),
    };
    let request = control::ListPermissionsRequest {
        conversation_id,
        include_decided: all,
        page_size: page.limit,
        page_token: page.page_token.unwrap_or_default(),
    };
    let answer = client.conversations().list_permissions(call(request)).await?.into_inner();
    output.result(
        || {
            json!({
                "permissions": answer.permissions.iter().map(json::permission).collect::<Vec<_>>(),
                "next_page_token": answer.next_page_token,
            })
        },
        || {
            if answer.permissions.is_empty() {
                return if all { "no permission requests" } else { "no open permission requests" }.to_owned();
            }
            answer.permissions.iter().map(line).collect::<Vec<_>>().join("\n")
        },
    );
    more(output, &answer.next_page_token);
    Ok(Exit::Done)
}

fn line(permission: &control::Permission) -> String {
    let asked = permission.request.as_ref();
    let open = permission.state == control::permission::State::Open as i32;
    let what = match asked {
        Some(asked) if open => format!("{}\n{}", render::permission(asked), render::how_to_answer(asked)),
        Some(asked) => render::permission(asked),
        None => permission.request_id.clone(),
    };
    let state = json::permission_state(permission.state).to_lowercase();
    let decided = if permission.decision == 0 {
        String::new()
    } else {
        format!(" ({})", json::decision(permission.decision).to_lowercase())
    };
    format!("{state}{decided}, turn {}: {what}", permission.turn_id)
}

async fn answer(
    client: &Client,
    permission_request_id: String,
    decision: PermissionDecision,
    feedback: String,
    output: Output,
) -> Result<Exit, Failure> {
    let list = "`roundhouse permissions list` lists them";
    let permission_request_id = client::id("spl_", "permission request", list, permission_request_id)?;
    let request = control::AnswerPermissionRequest {
        request_id: client::request_id(None),
        permission_request_id,
        decision: decision.into(),
        feedback,
    };
    let answer = client.conversations().answer_permission(call(request)).await?.into_inner();
    let permission = answer.permission.ok_or_else(|| incomplete("the permission request"))?;
    output.result(
        || json!({"permission": json::permission(&permission), "accepted": answer.accepted}),
        || {
            let decision = json::decision(permission.decision).to_lowercase();
            if answer.accepted {
                format!("answered: {decision}")
            } else {
                format!("it was answered before: {decision}")
            }
        },
    );
    Ok(if answer.accepted { Exit::Done } else { Exit::Conflict })
}
