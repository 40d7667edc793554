//! `send`, `retry`, `cancel`.

use std::io::Read as _;

use roundhouse_proto::control::v1 as control;
use serde_json::json;

use crate::args::{CancelArgs, RetryArgs, SendArgs};
use crate::client::{self, Client, ConversationName, call, incomplete};
use crate::commands::follow::{ended, follow, how_to_follow, result, wait_for_end};
use crate::exit::Exit;
use crate::json;
use crate::output::{Output, first_line};
use crate::status::Failure;

/// The longest message that the server takes.
const MAX_TEXT_BYTES: usize = 1024 * 1024;
/// Longest title made of a message.
const TITLE_CHARS: usize = 80;

pub(crate) async fn send(client: &Client, args: SendArgs, output: Output) -> Result<Exit, Failure> {
    let text = if args.text == "-" { read_text()? } else { args.text };
    if text.trim().is_empty() {
        return Err(Failure::new(Exit::Usage, "the message is empty"));
    }
    if let Some(failure) = too_long(&text) {
        return Err(failure);
    }
    let request_id = client::request_id(args.request_id);
    let place = Place { agent: args.agent.unwrap_or_default(), workspace: args.workspace };
    let sent = async {
        let (conversation_id, workspace) =
            conversation(client, args.conversation.as_deref(), &place, &request_id, &text).await?;
        let request = control::SendMessageRequest {
            request_id: request_id.clone(),
            conversation_id,
            text,
            agent: place.agent,
            workspace,
            actor: args.actor.unwrap_or_default(),
        };
        Ok(client.conversations().send_message(call(request)).await?.into_inner())
    };
    let answer: control::SendMessageResponse = sent.await.map_err(|failure: Failure| {
        // Without a connection nothing was sent, so there is no doubt about it.
        if failure.exit == Exit::Unreachable && !failure.code.is_empty() && !failure.is_no_connection() {
            let next = failure.next.clone().unwrap_or_default();
            return failure
                .next(format!("{next}\n      whether it was stored is not known: a repeat with --request-id {request_id} is harmless"));
        }
        failure
    })?;
    let message = answer.message.ok_or_else(|| incomplete("the message"))?;
    let turn = answer.turn.ok_or_else(|| incomplete("the turn"))?;
    let repeated = answer.repeated_request;
    let base = json!({
        "conversation_id": turn.conversation_id,
        "message": json::message(&message),
        "turn": json::turn(&turn),
        "repeated_request": repeated,
    });
    if args.wait {
        if !output.is_json() {
            let again = if repeated { " (sent before)" } else { "" };
            output.note(&format!("conversation {}, turn {}{again}", turn.conversation_id, turn.turn_id));
        }
        return follow(client, &turn, base, output).await;
    }
    output.result(
        || base,
        || {
            format!(
                "conversation {}\nturn {} {}",
                turn.conversation_id,
                turn.turn_id,
                json::turn_status(turn.status).to_lowercase()
            )
        },
    );
    if !output.is_json() {
        output.note(&how_to_follow(&turn));
    }
    Ok(Exit::Done)
}

/// Why a text is longer than a message may be; none when it is not.
pub(crate) fn too_long(text: &str) -> Option<Failure> {
    if text.len() <= MAX_TEXT_BYTES {
        return None;
    }
    let message = format!("the message has {} bytes, more than the {MAX_TEXT_BYTES} allowed", text.len());
    Some(Failure::new(Exit::Invalid, message).next("put it into a file of the workspace and name that"))
}

/// Who is to work on a message, and where, as named on the command line.
pub(crate) struct Place {
    /// Empty: the conversation's.
    pub(crate) agent: String,
    pub(crate) workspace: Option<String>,
}

impl Place {
    /// The workspace for the server: the one named, or this directory for a conversation that has none.
    fn workspace(&self, has_one: bool) -> Result<String, Failure> {
        match &self.workspace {
            Some(named) => client::workspace(named, &client::current_directory()?),
            None if has_one => Ok(String::new()),
            None => client::workspace(".", &client::current_directory()?),
        }
    }
}

/// The id of the conversation that was named, made now if it has to be, and the workspace for its message. What cannot
/// have a first turn is refused before anything is made.
pub(crate) async fn conversation(
    client: &Client,
    named: Option<&str>,
    place: &Place,
    request_id: &str,
    text: &str,
) -> Result<(String, String), Failure> {
    use control::get_conversation_request::Name;
    let external_id = match named.map(ConversationName::parse).transpose()? {
        Some(ConversationName::Id(id)) => {
            // One that was made without a workspace takes this directory, as it does under a name elsewhere.
            let known = match place.workspace {
                Some(_) => true,
                None => {
                    let name = Some(Name::ConversationId(id.clone()));
                    let request = control::GetConversationRequest { name };
                    let answer = client.conversations().get_conversation(call(request)).await?.into_inner();
                    let known = answer.conversation.ok_or_else(|| incomplete("the conversation"))?;
                    !known.workspace_id.is_empty()
                }
            };
            let workspace = place.workspace(known)?;
            return Ok((id, workspace));
        }
        Some(ConversationName::External(external)) => Some(external),
        None => None,
    };
    if let Some(external) = &external_id {
        let request = control::GetConversationRequest { name: Some(Name::ExternalId(external.clone())) };
        match client.conversations().get_conversation(call(request)).await.map_err(Failure::from) {
            Ok(answer) => {
                let known = answer.into_inner().conversation.ok_or_else(|| incomplete("the conversation"))?;
                let workspace = place.workspace(!known.workspace_id.is_empty())?;
                return Ok((known.conversation_id, workspace));
            }
            Err(failure) if failure.reason == "CONVERSATION_NOT_FOUND" => {}
            Err(failure) => return Err(failure),
        }
    }
    if place.agent.is_empty() {
        return Err(Failure::new(Exit::Usage, "a new conversation needs an agent")
            .next("say --agent NAME; `roundhouse agents` lists those of this directory"));
    }
    let workspace = place.workspace(false)?;
    // A repeat of this command under the same request id finds the same conversation.
    let request = control::CreateConversationRequest {
        request_id: if external_id.is_some() {
            client::request_id(None)
        } else {
            format!("{request_id}-new")
        },
        external_id,
        title: first_line(text, TITLE_CHARS),
        workspace: workspace.clone(),
        agent: place.agent.clone(),
    };
    let answer = client.conversations().create_conversation(call(request)).await?.into_inner();
    let conversation = answer.conversation.ok_or_else(|| incomplete("the conversation"))?;
    Ok((conversation.conversation_id, workspace))
}

fn read_text() -> Result<String, Failure> {
    let mut bytes = Vec::new();
    let limit = MAX_TEXT_BYTES as u64 + 1;
    std::io::stdin()
        .lock()
        .take(limit)
        .read_to_end(&mut bytes)
        .map_err(|error| Failure::new(Exit::Failed, format!("standard input: {error}")))?;
    String::from_utf8(bytes).map_err(|_| Failure::new(Exit::Invalid, "standard input is not UTF-8"))
}

pub(crate) async fn retry(client: &Client, args: RetryArgs, output: Output) -> Result<Exit, Failure> {
    let request = control::RetryTurnRequest {
        request_id: client::request_id(args.request_id),
        turn_id: client::turn_id(args.turn)?,
    };
    let answer = client.conversations().retry_turn(call(request)).await?.into_inner();
    let turn = answer.turn.ok_or_else(|| incomplete("the turn"))?;
    let base = json!({"turn": json::turn(&turn)});
    if args.wait {
        if !output.is_json() {
            output.note(&format!("turn {}", turn.turn_id));
        }
        return follow(client, &turn, base, output).await;
    }
    output.result(
        || base,
        || format!("turn {} {}", turn.turn_id, json::turn_status(turn.status).to_lowercase()),
    );
    if !output.is_json() {
        output.note(&how_to_follow(&turn));
    }
    Ok(Exit::Done)
}

pub(crate) async fn cancel(client: &Client, args: CancelArgs, output: Output) -> Result<Exit, Failure> {
    let request = control::CancelTurnRequest {
        request_id: client::request_id(args.request_id),
        turn_id: client::turn_id(args.turn)?,
    };
    let answer = client.conversations().cancel_turn(call(request)).await?.into_inner();
    let mut turn = answer.turn.ok_or_else(|| incomplete("the turn"))?;
    if args.wait && !ended(turn.status) {
        wait_for_end(client, &turn).await?;
        let result = result(client, &turn.turn_id).await?;
        turn = result.turn.ok_or_else(|| incomplete("the turn"))?;
    }
    output.result(
        || json!({"turn": json::turn(&turn), "already_ended": answer.already_ended}),
        || {
            let status = json::turn_status(turn.status).to_lowercase();
            if answer.already_ended { format!("it had ended before: {status}") } else { status }
        },
    );
    Ok(Exit::Done)
}
