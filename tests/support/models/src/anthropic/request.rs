//! Reading a Messages request.

use serde_json::Value;

use crate::conversation::flat_text;

/// Sentences that the CLI itself writes as the user. They continue a turn, they never start one.
const WRITTEN_BY_THE_CLI: [&str; 11] = [
    "<system-reminder>",
    "<local-command-",
    "<command-name>",
    "[earlier conversation truncated for compaction",
    "This session is being continued from a previous conversation",
    "[Request interrupted by user",
    "The user sent a new message while you were working",
    "Another message arrived while you were working",
    "Output token limit hit",
    "Your previous response was cut off",
    "Continue from where you left off.",
];

/// How the CLI's request for a summary of the conversation (compaction) begins.
const WANTS_SUMMARY: &str = "CRITICAL: Respond with TEXT ONLY.";

fn messages(body: &Value) -> &[Value] {
    body["messages"].as_array().map_or(&[], Vec::as_slice)
}

fn role(message: &Value) -> &str {
    message["role"].as_str().unwrap_or_default()
}

/// The text blocks of one message; its content may be a bare string.
fn text_blocks(message: &Value) -> Vec<&str> {
    match &message["content"] {
        Value::String(text) => vec![text],
        Value::Array(blocks) => blocks
            .iter()
            .filter(|block| block["type"] == "text")
            .filter_map(|block| block["text"].as_str())
            .collect(),
        _ => Vec::new(),
    }
}

pub(crate) fn written_by_the_cli(text: &str) -> bool {
    let text = text.trim_start();
    WRITTEN_BY_THE_CLI.iter().any(|start| text.starts_with(start))
}

/// Where the turn starts, and its text.
pub(crate) fn find_start(body: &Value) -> Option<(usize, String)> {
    messages(body).iter().enumerate().rev().filter(|(_, message)| role(message) == "user").find_map(
        |(at, message)| {
            let text = text_blocks(message)
                .into_iter()
                .rfind(|text| !text.is_empty() && !written_by_the_cli(text))?;
            Some((at, text.to_owned()))
        },
    )
}

/// How many answers of the model there are from this message on.
pub(crate) fn answers_after(body: &Value, after: usize) -> usize {
    messages(body).iter().skip(after).filter(|message| role(message) == "assistant").count()
}

/// Every text of every message as (role, text).
pub(crate) fn texts(body: &Value) -> Vec<(String, String)> {
    messages(body)
        .iter()
        .flat_map(|message| {
            let role = role(message).to_owned();
            text_blocks(message).into_iter().map(move |text| (role.clone(), text.to_owned()))
        })
        .collect()
}

/// Every tool result as (tool use id, text, whether it is an error).
pub(crate) fn tool_results(body: &Value) -> Vec<(String, String, bool)> {
    messages(body)
        .iter()
        .flat_map(|message| message["content"].as_array().map_or(&[][..], Vec::as_slice))
        .filter(|block| block["type"] == "tool_result")
        .map(|block| {
            let id = block["tool_use_id"].as_str().unwrap_or_default().to_owned();
            (id, flat_text(&block["content"]), block["is_error"].as_bool().unwrap_or(false))
        })
        .collect()
}

/// The names of the tools offered.
pub(crate) fn tools(body: &Value) -> Vec<&str> {
    let tools = body["tools"].as_array().map_or(&[][..], Vec::as_slice);
    tools.iter().filter_map(|tool| tool["name"].as_str()).collect()
}

/// The answer to what the CLI wants for itself; `None` if the request is a turn's.
pub(crate) fn side_text(body: &Value, turn_text: &str) -> Option<&'static str> {
    let schema = body["output_config"]["format"]["type"] == "json_schema";
    if turn_text.starts_with(WANTS_SUMMARY) {
        Some("<summary>scripted summary</summary>")
    } else if schema && tools(body).is_empty() {
        Some(r#"{"title":"Scripted"}"#)
    } else if body["max_tokens"].as_u64() == Some(1) {
        Some("scripted")
    } else {
        None
    }
}
