//! `conversations list | show | create | archive`.

use roundhouse_proto::control::v1 as control;
use serde_json::json;

use crate::args::{ConversationsCommand, Page};
use crate::client::{self, Client, ConversationName, call, incomplete};
use crate::exit::Exit;
use crate::json;
use crate::output::{Output, first_line, table};
use crate::status::Failure;

pub(crate) async fn run(
    client: &Client,
    what: ConversationsCommand,
    output: Output,
) -> Result<Exit, Failure> {
    match what {
        ConversationsCommand::List { archived, attention, page } => {
            list(client, archived, attention, page, output).await
        }
        ConversationsCommand::Show { conversation } => show(client, &conversation, output).await,
        ConversationsCommand::Create { external_id, title, workspace, agent, request_id } => {
            let external_id = external_id.as_deref().map(external).transpose()?;
            let workspace = workspace
                .map(|named| client::workspace(&named, &client::current_directory()?))
                .transpose()?
                .unwrap_or_default();
            let request = control::CreateConversationRequest {
                request_id: client::request_id(request_id),
                external_id,
                title,
                workspace,
                agent: agent.unwrap_or_default(),
            };
            let answer = client.conversations().create_conversation(call(request)).await?.into_inner();
            let conversation = answer.conversation.ok_or_else(|| incomplete("the conversation"))?;
            output.result(
                || json!({"conversation": json::conversation(&conversation), "created": answer.created}),
                || conversation.conversation_id.clone(),
            );
            if !answer.created && !output.is_json() {
                output.note("it was there before");
            }
            Ok(Exit::Done)
        }
        ConversationsCommand::Archive { conversation, undo } => {
            let request = control::ArchiveConversationRequest {
                request_id: client::request_id(None),
                conversation_id: client.conversation_id(&conversation).await?,
                archived: !undo,
            };
            let answer = client.conversations().archive_conversation(call(request)).await?.into_inner();
            let conversation = answer.conversation.ok_or_else(|| incomplete("the conversation"))?;
            output.result(
                || json!({"conversation": json::conversation(&conversation)}),
                || details(&conversation),
            );
            Ok(Exit::Done)
        }
    }
}

fn external(named: &str) -> Result<control::ExternalId, Failure> {
    match ConversationName::parse(named)? {
        ConversationName::External(external) => Ok(external),
        ConversationName::Id(_) => Err(Failure::new(Exit::Usage, format!("{named:?} is no external id"))
            .next("write it as PROJECT:PROVIDER:ID")),
    }
}

async fn list(
    client: &Client,
    archived: bool,
    attention: bool,
    page: Page,
    output: Output,
) -> Result<Exit, Failure> {
    let request = control::ListConversationsRequest {
        page_size: page.limit,
        page_token: page.page_token.unwrap_or_default(),
        include_archived: archived,
        attention_only: attention,
    };
    let answer = client.conversations().list_conversations(call(request)).await?.into_inner();
    output.result(
        || {
            json!({
                "conversations": answer.conversations.iter().map(json::conversation).collect::<Vec<_>>(),
                "next_page_token": answer.next_page_token,
            })
        },
        || {
            let rows = answer.conversations.iter().map(row).collect();
            table(
                &["conversation", "title", "agent", "state", "messages", "used", "wants"],
                rows,
                "no conversations",
            )
        },
    );
    more(output, &answer.next_page_token);
    Ok(Exit::Done)
}

/// Says that there is another page.
pub(crate) fn more(output: Output, token: &str) {
    if !token.is_empty() && !output.is_json() {
        output.note(&format!("there are more: --page-token {token}"));
    }
}

fn row(conversation: &control::Conversation) -> Vec<String> {
    let state = match (conversation.archived, conversation.active_turn_id.is_empty(), conversation.waiting) {
        (true, true, _) => "archived".to_owned(),
        (_, false, 0) => "at work".to_owned(),
        (_, false, waiting) => format!("at work, {waiting} wait"),
        (false, true, 0) => "idle".to_owned(),
        (false, true, waiting) => format!("{waiting} wait"),
    };
    let wants: Vec<String> = conversation
        .attention
        .iter()
        .map(|attention| json::attention_reason(attention.reason).to_lowercase().replace('_', " "))
        .collect();
    vec![
        conversation.conversation_id.clone(),
        first_line(&conversation.title, 40),
        conversation.agent.clone(),
        state,
        conversation.last_seq.to_string(),
        ago(conversation.update_time.as_ref()),
        wants.join(", "),
    ]
}

/// How long ago something was.
pub(crate) fn ago(time: Option<&prost_types::Timestamp>) -> String {
    let Some(time) = json::timestamp(time) else { return String::new() };
    let seconds = jiff::Timestamp::now().as_second().saturating_sub(time.as_second()).max(0);
    match seconds {
        0..60 => format!("{seconds} s ago"),
        60..3_600 => format!("{} min ago", seconds / 60),
        3_600..86_400 => format!("{} h ago", seconds / 3_600),
        _ => format!("{} d ago", seconds / 86_400),
    }
}

async fn show(client: &Client, named: &str, output: Output) -> Result<Exit, Failure> {
    use control::get_conversation_request::Name;
    let name = match ConversationName::parse(named)? {
        ConversationName::Id(id) => Name::ConversationId(id),
        ConversationName::External(external) => Name::ExternalId(external),
    };
    let request = control::GetConversationRequest { name: Some(name) };
    let answer = client.conversations().get_conversation(call(request)).await?.into_inner();
    let conversation = answer.conversation.ok_or_else(|| incomplete("the conversation"))?;
    output.result(|| json!({"conversation": json::conversation(&conversation)}), || details(&conversation));
    Ok(Exit::Done)
}

fn details(conversation: &control::Conversation) -> String {
    let mut lines = vec![("conversation", conversation.conversation_id.clone())];
    if let Some(external) = &conversation.external_id {
        lines.push(("external id", format!("{}:{}:{}", external.project, external.provider, external.id)));
    }
    let mut add = |name: &'static str, value: &str| {
        if !value.is_empty() {
            lines.push((name, value.to_owned()));
        }
    };
    add("title", &conversation.title);
    add("agent", &conversation.agent);
    add("workspace", &conversation.workspace_id);
    add("active turn", &conversation.active_turn_id);
    add("waiting", &conversation.waiting.to_string());
    add("messages", &conversation.last_seq.to_string());
    add("archived", if conversation.archived { "yes" } else { "" });
    add("used", &ago(conversation.update_time.as_ref()));
    let mut text = pairs(&lines);
    for attention in &conversation.attention {
        let reason = json::attention_reason(attention.reason).to_lowercase().replace('_', " ");
        text.push_str(&format!("\nwants a person: {reason}: {}", attention.next_action));
    }
    text
}

/// Names and values under each other.
pub(crate) fn pairs(lines: &[(&str, String)]) -> String {
    let width = lines.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    lines.iter().map(|(name, value)| format!("{name:width$}  {value}")).collect::<Vec<_>>().join("\n")
}
