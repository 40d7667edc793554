//! `export`: a conversation as a file.

use std::io::Write as _;
use std::path::Path;

use roundhouse_proto::control::v1 as control;
use serde_json::{Value, json};

use crate::args::{ExportArgs, ExportFormat};
use crate::client::{Client, call, incomplete};
use crate::exit::Exit;
use crate::json;
use crate::output::Output;
use crate::status::Failure;

/// Names the shape of the JSON.
const FORMAT: &str = "roundhouse.conversation";
/// Grows when a field changes its meaning or goes.
const VERSION: u32 = 1;
/// Messages that are asked for at once.
const PAGE: u32 = 200;

pub(crate) async fn run(client: &Client, args: ExportArgs, output: Output) -> Result<Exit, Failure> {
    use control::get_conversation_request::Name;
    let id = client.conversation_id(&args.conversation).await?;
    let request = control::GetConversationRequest { name: Some(Name::ConversationId(id.clone())) };
    let answer = client.conversations().get_conversation(call(request)).await?.into_inner();
    let conversation = answer.conversation.ok_or_else(|| incomplete("the conversation"))?;
    let messages = in_order(all(client, &id).await?);
    let as_json = args.format == ExportFormat::Json || (output.is_json() && args.output.is_none());
    let text = if as_json {
        let value = as_json_value(&conversation, &messages);
        serde_json::to_string_pretty(&value).unwrap_or_else(|_| value.to_string()) + "\n"
    } else {
        markdown(&conversation, &messages)
    };
    let Some(file) = args.output else {
        output.data(&text);
        return Ok(Exit::Done);
    };
    write(&file, &text, args.force)?;
    if output.is_json() {
        output.item(&json!({"written": file.display().to_string()}));
    } else {
        output.note(&format!("{} messages written to {}", messages.len(), file.display()));
    }
    Ok(Exit::Done)
}

/// All messages, with whole texts.
async fn all(client: &Client, id: &str) -> Result<Vec<control::Message>, Failure> {
    let mut messages = Vec::new();
    let mut after = 0;
    loop {
        let request = control::ListMessagesRequest { conversation_id: id.to_owned(), after, limit: PAGE };
        let page = client.conversations().list_messages(call(request)).await?.into_inner();
        let Some(last) = page.messages.last() else { break };
        after = last.seq;
        messages.extend(page.messages);
        if !page.has_more {
            break;
        }
    }
    for message in messages.iter_mut().filter(|message| message.truncated) {
        *message = whole(client, message).await?;
    }
    Ok(messages)
}

/// A message that a list had cut, as its turn has it. What was cut when it was stored stays so, and is flagged.
async fn whole(client: &Client, message: &control::Message) -> Result<control::Message, Failure> {
    let request = control::GetTurnRequest { turn_id: message.turn_id.clone() };
    let turn = client.conversations().get_turn(call(request)).await?.into_inner();
    let found = [turn.message, turn.answer].into_iter().flatten();
    Ok(found
        .into_iter()
        .find(|found| found.message_id == message.message_id)
        .unwrap_or_else(|| message.clone()))
}

/// By position; those that wait, which have none, last and by arrival.
fn in_order(mut messages: Vec<control::Message>) -> Vec<control::Message> {
    messages.sort_by_key(|message| (message.position.unwrap_or(u64::MAX), message.seq));
    messages
}

fn as_json_value(conversation: &control::Conversation, messages: &[control::Message]) -> Value {
    json!({
        "format": FORMAT,
        "version": VERSION,
        "conversation": json::conversation(conversation),
        "messages": messages.iter().map(json::message).collect::<Vec<_>>(),
    })
}

fn markdown(conversation: &control::Conversation, messages: &[control::Message]) -> String {
    let title = if conversation.title.is_empty() { "Conversation" } else { conversation.title.trim() };
    let mut text = format!("# {}\n\n", title.replace('\n', " "));
    text.push_str(&format!("Conversation {}", conversation.conversation_id));
    if let Some(external) = &conversation.external_id {
        text.push_str(&format!(" ({}:{}:{})", external.project, external.provider, external.id));
    }
    text.push_str(".\n");
    for message in messages {
        let mut flags = Vec::new();
        if message.position.is_none() {
            flags.push("waiting");
        }
        if message.incomplete {
            flags.push("incomplete: the turn was interrupted");
        }
        if message.truncated {
            flags.push("cut");
        }
        let flags = if flags.is_empty() { String::new() } else { format!(" ({})", flags.join("; ")) };
        let place = message.position.map_or_else(String::new, |position| format!("{position}. "));
        let actor = message.actor.replace('\n', " ");
        text.push_str(&format!("\n## {place}{actor}{flags}\n\n{}\n", message.text.trim_end()));
    }
    text
}

fn write(file: &Path, text: &str, force: bool) -> Result<(), Failure> {
    let failed = |error: std::io::Error| {
        let failure = Failure::new(Exit::Failed, format!("{}: {error}", file.display()));
        if error.kind() == std::io::ErrorKind::AlreadyExists {
            let failure = Failure::new(Exit::Conflict, format!("{} is there already", file.display()));
            return failure.next("name another file, or say --force");
        }
        failure
    };
    let mut options = std::fs::OpenOptions::new();
    options.write(true).create(true).truncate(true).create_new(!force);
    options.open(file).and_then(|mut opened| opened.write_all(text.as_bytes())).map_err(failed)
}

#[cfg(test)]
mod tests {
    use pretty_assertions::assert_eq;

    use super::*;

    fn message(seq: u64, position: Option<u64>, actor: &str, text: &str) -> control::Message {
        let role = if actor == "user" { control::Role::User } else { control::Role::Agent };
        control::Message {
            message_id: format!("msg_{seq}"),
            conversation_id: "cnv_1".to_owned(),
            seq,
            position,
            role: role.into(),
            actor: actor.to_owned(),
            text: text.to_owned(),
            ..control::Message::default()
        }
    }

    #[test]
    fn the_shared_history_has_its_own_order_and_what_waits_comes_last() {
        // Two and three were sent while one was worked on; two came up next, three waits.
        let messages = in_order(vec![
            message(1, Some(1), "user", "one"),
            message(2, Some(3), "user", "two"),
            message(3, None, "user", "three"),
            message(4, Some(2), "builder", "to one\n"),
            control::Message { incomplete: true, ..message(5, Some(4), "builder", "half of") },
        ]);
        let conversation = control::Conversation {
            conversation_id: "cnv_1".to_owned(),
            title: "Work".to_owned(),
            ..control::Conversation::default()
        };
        assert_eq!(
            markdown(&conversation, &messages),
            "# Work\n\nConversation cnv_1.\n\n## 1. user\n\none\n\n## 2. builder\n\nto one\n\n## 3. user\n\ntwo\n\n\
             ## 4. builder (incomplete: the turn was interrupted)\n\nhalf of\n\n## user (waiting)\n\nthree\n"
        );
        let value = as_json_value(&conversation, &messages);
        assert_eq!((&value["format"], &value["version"]), (&json!(FORMAT), &json!(1)));
        let seqs: Vec<_> = value["messages"].as_array().unwrap().iter().map(|m| m["seq"].clone()).collect();
        assert_eq!(seqs, [1, 4, 2, 5, 3].map(|seq| json!(seq)));
        assert_eq!(value["messages"][3]["incomplete"], true);
        assert_eq!(value["messages"][4]["position"], Value::Null);
    }

    #[test]
    fn a_file_that_is_there_stays_unless_force_is_said() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("a.md");
        write(&file, "one", false).unwrap();
        assert_eq!(write(&file, "two", false).unwrap_err().exit, Exit::Conflict);
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "one");
        write(&file, "2", true).unwrap();
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "2");
    }
}
