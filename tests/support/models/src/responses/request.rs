//! Reading a Responses request.

use serde_json::Value;

use crate::conversation::flat_text;

/// How texts begin that the CLI itself writes as the user. They never start a turn.
const WRITTEN_BY_THE_CLI: [&str; 10] = [
    "<environment_context>",
    "# AGENTS.md instructions",
    "<user_instructions>",
    "<turn_aborted>",
    "<skill>",
    "<user_shell_command>",
    "<subagent_notification>",
    "<goal_context>",
    "<INSTRUCTIONS>",
    "Another language model started to solve this problem",
];

/// How the CLI's request for a summary of the conversation (compaction) begins.
const WANTS_SUMMARY: &str = "You are performing a CONTEXT CHECKPOINT COMPACTION";

/// How the CLI says that a call came to nothing.
const NEVER_RAN: [&str; 6] = [
    "exec_command failed",
    "aborted",
    "unsupported call",
    "unsupported custom tool call",
    "failed to parse",
    "apply_patch verification failed",
];

/// The items of the input; a bare string is one user message.
fn items(body: &Value) -> Vec<&Value> {
    match &body["input"] {
        Value::Array(items) => items.iter().collect(),
        text @ Value::String(_) => vec![text],
        _ => Vec::new(),
    }
}

/// The role of a message; empty if the item is none.
fn role(item: &Value) -> &str {
    match item {
        Value::String(_) => "user",
        _ if item["type"] == "message" || item["type"].is_null() => item["role"].as_str().unwrap_or_default(),
        _ => "",
    }
}

/// The texts of a message.
fn parts(item: &Value) -> Vec<&str> {
    match item {
        Value::String(text) => vec![text],
        _ => match &item["content"] {
            Value::String(text) => vec![text],
            Value::Array(parts) => parts
                .iter()
                .filter_map(|part| part["text"].as_str().or_else(|| part["refusal"].as_str()))
                .collect(),
            _ => Vec::new(),
        },
    }
}

pub(crate) fn written_by_the_cli(text: &str) -> bool {
    let text = text.trim_start();
    WRITTEN_BY_THE_CLI.iter().any(|start| text.starts_with(start))
}

/// Where the turn starts, and its text.
///
/// The CLI tells the turn's id, and gives ids to messages; both are UUIDs in the order of time. So what a person wrote first
/// since the turn began started it, and what came later only steers it. Without such ids the last message started it.
pub(crate) fn find_start(body: &Value) -> Option<(usize, String)> {
    let turn = body["client_metadata"]["turn_id"].as_str().and_then(time_of);
    let mut written = items(body)
        .into_iter()
        .enumerate()
        .filter(|(_, item)| role(item) == "user")
        .filter_map(|(at, item)| {
            let text = parts(item).into_iter().rfind(|text| !text.is_empty() && !written_by_the_cli(text))?;
            Some((at, item, text.to_owned()))
        })
        .collect::<Vec<_>>();
    let last = written.pop()?;
    let first = turn.and_then(|turn| {
        let since = |item: &Value| {
            let time = item["id"].as_str().and_then(|id| time_of(id.strip_prefix("msg_")?));
            time.is_some_and(|time| time >= turn)
        };
        written.into_iter().find(|(_, item, _)| since(item))
    });
    let (at, _, text) = first.unwrap_or(last);
    Some((at, text))
}

/// The time in a UUID of version 7, in milliseconds; `None` for any other text.
fn time_of(id: &str) -> Option<u64> {
    let id = uuid::Uuid::try_parse(id).ok().filter(|id| id.get_version_num() == 7)?;
    u64::try_from(id.as_u128() >> 80).ok()
}

/// Whether the model said this item.
fn is_answer(item: &Value) -> bool {
    let kind = item["type"].as_str().unwrap_or_default();
    role(item) == "assistant"
        || kind == "reasoning"
        || (kind.ends_with("_call") && !kind.ends_with("_output"))
}

/// How many answers of the model there are from this item on. An answer is what it said without anything between: its
/// calls' results end it.
pub(crate) fn answers_after(body: &Value, after: usize) -> usize {
    let said: Vec<bool> = items(body).into_iter().skip(after).map(is_answer).collect();
    (0..said.len()).filter(|at| said[*at] && (*at == 0 || !said[*at - 1])).count()
}

/// Every text of every message as (role, text).
pub(crate) fn texts(body: &Value) -> Vec<(String, String)> {
    items(body)
        .into_iter()
        .filter(|item| !role(item).is_empty())
        .flat_map(|item| {
            let role = role(item);
            parts(item).into_iter().map(move |text| (role.to_owned(), text.to_owned()))
        })
        .collect()
}

/// Every tool result as (call id, text, whether it is an error).
pub(crate) fn tool_results(body: &Value) -> Vec<(String, String, bool)> {
    items(body)
        .into_iter()
        .filter(|item| item["type"].as_str().is_some_and(|kind| kind.ends_with("_call_output")))
        .map(|item| {
            let id = item["call_id"].as_str().unwrap_or_default().to_owned();
            let text = flat_text(&item["output"]);
            let failed = failed(&text);
            (id, text, failed)
        })
        .collect()
}

/// Whether a command's result says that it failed or never ran.
fn failed(text: &str) -> bool {
    let code = text.lines().find_map(|line| {
        line.strip_prefix("Process exited with code ").or_else(|| line.strip_prefix("Exit code: "))
    });
    match code {
        Some(code) => code.trim() != "0",
        None => text.lines().take(2).any(|line| NEVER_RAN.iter().any(|start| line.starts_with(start))),
    }
}

/// A command's output, without the lines that the CLI puts before it.
pub(crate) fn output_of(text: &str) -> &str {
    let from_head =
        text.starts_with("Chunk ID: ") || text.starts_with("Exit code: ") || text.starts_with("Wall time: ");
    match text.split_once("\nOutput:\n") {
        Some((_, output)) if from_head => output,
        _ => text,
    }
}

/// The names of the tools offered. A namespace is followed by what is in it.
pub(crate) fn tools(body: &Value) -> Vec<&str> {
    let mut names = Vec::new();
    for tool in body["tools"].as_array().map_or(&[][..], Vec::as_slice) {
        // What is built into the API has a type and no name.
        names.extend(tool["name"].as_str().or_else(|| tool["type"].as_str()));
        let inner = tool["tools"].as_array().map_or(&[][..], Vec::as_slice);
        names.extend(inner.iter().filter_map(|tool| tool["name"].as_str()));
    }
    names
}

/// The answer to what the CLI wants for itself; `None` if the request is a turn's.
pub(crate) fn side_text(body: &Value, turn_text: &str) -> Option<&'static str> {
    // It is the turn's text only if the request tells no turn; otherwise it is the last message.
    let last = items(body).into_iter().rfind(|item| role(item) == "user").map(parts).unwrap_or_default();
    let wanted =
        last.iter().any(|text| text.starts_with(WANTS_SUMMARY)) || turn_text.starts_with(WANTS_SUMMARY);
    wanted.then_some("scripted summary")
}
