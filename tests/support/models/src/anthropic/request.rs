//! Reading a Messages request: which text the turn is about, how far the script has got, what was said before.

use std::hash::{DefaultHasher, Hash, Hasher};

use serde_json::Value;

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

/// What a request is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum RequestKind {
    /// The next step of a turn.
    Main,
    /// Something the CLI wants for itself (a title, a summary to compact to, a probe of the key): scripts do not apply.
    Side,
    /// Counting tokens.
    CountTokens,
    /// Anything else: a probe (`HEAD /`), the list of models, an unknown path.
    Other,
}

impl RequestKind {
    /// The word used in JSON.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Main => "main",
            Self::Side => "side",
            Self::CountTokens => "count_tokens",
            Self::Other => "other",
        }
    }
}

/// The conversation that a Messages request carries.
#[derive(Debug, Clone, Default)]
pub struct Conversation {
    body: Value,
    start: Option<(usize, String)>,
}

impl Conversation {
    /// Reads a request body. Any JSON will do: what is not a conversation has no texts.
    #[must_use]
    pub fn new(body: Value) -> Self {
        let start = find_start(messages(&body));
        Self { body, start }
    }

    /// The whole request body.
    #[must_use]
    pub const fn body(&self) -> &Value {
        &self.body
    }

    /// The text that started the turn: the last block of the last user message that a person wrote. Empty if none.
    #[must_use]
    pub fn turn_text(&self) -> &str {
        self.start.as_ref().map_or("", |(_, text)| text)
    }

    /// A number for the turn: the same for all requests of one turn, retried ones included.
    pub(crate) fn turn_key(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.start.hash(&mut hasher);
        self.body["metadata"]["user_id"].as_str().hash(&mut hasher);
        hasher.finish()
    }

    /// How many assistant messages came after [`turn_text`](Self::turn_text): the step of the script that is due.
    #[must_use]
    pub fn step(&self) -> usize {
        let after = self.start.as_ref().map_or(0, |(at, _)| at + 1);
        messages(&self.body).iter().skip(after).filter(|message| role(message) == "assistant").count()
    }

    /// Every text of every message, in order, as (role, text). Includes what the CLI wrote; no tool calls or results.
    #[must_use]
    pub fn texts(&self) -> Vec<(String, String)> {
        messages(&self.body)
            .iter()
            .flat_map(|message| {
                let role = role(message).to_owned();
                text_blocks(message).into_iter().map(move |text| (role.clone(), text.to_owned()))
            })
            .collect()
    }

    /// What people and the model said to each other, in order, as (role, text): [`texts`](Self::texts) without
    /// `system` messages and without what the CLI wrote. Newlines at a text's end, which the CLI adds where it joins
    /// messages of failed or interrupted turns, are cut off.
    #[must_use]
    pub fn dialogue(&self) -> Vec<(String, String)> {
        self.texts()
            .into_iter()
            .filter(|(role, text)| role != "system" && !(role == "user" && written_by_the_cli(text)))
            .map(|(role, text)| (role, text.trim_end_matches('\n').to_owned()))
            .collect()
    }

    /// Every tool result as (tool use id, text, whether it is an error), in order.
    #[must_use]
    pub fn tool_results(&self) -> Vec<(String, String, bool)> {
        messages(&self.body)
            .iter()
            .flat_map(|message| message["content"].as_array().map_or(&[][..], Vec::as_slice))
            .filter(|block| block["type"] == "tool_result")
            .map(|block| {
                let id = block["tool_use_id"].as_str().unwrap_or_default().to_owned();
                (id, flat_text(&block["content"]), block["is_error"].as_bool().unwrap_or(false))
            })
            .collect()
    }

    /// The system prompt, its blocks joined by newlines.
    #[must_use]
    pub fn system(&self) -> String {
        flat_text(&self.body["system"])
    }

    /// The names of the tools offered.
    #[must_use]
    pub fn tools(&self) -> Vec<&str> {
        let tools = self.body["tools"].as_array().map_or(&[][..], Vec::as_slice);
        tools.iter().filter_map(|tool| tool["name"].as_str()).collect()
    }

    /// The model asked for. Empty if none.
    #[must_use]
    pub fn model(&self) -> &str {
        self.body["model"].as_str().unwrap_or_default()
    }

    /// The reasoning effort asked for, if any.
    #[must_use]
    pub fn effort(&self) -> Option<&str> {
        self.body["output_config"]["effort"].as_str()
    }

    /// Whether the request wants a stream.
    #[must_use]
    pub fn streams(&self) -> bool {
        self.body["stream"].as_bool().unwrap_or(false)
    }

    /// How often `needle` occurs in all of [`texts`](Self::texts) and the system prompt together.
    #[must_use]
    pub fn occurrences(&self, needle: &str) -> usize {
        if needle.is_empty() {
            return 0;
        }
        self.system().matches(needle).count()
            + self.texts().iter().map(|(_, text)| text.matches(needle).count()).sum::<usize>()
    }

    /// Whether the CLI asks for a summary to compact the conversation to.
    pub(crate) fn wants_summary(&self) -> bool {
        self.turn_text().starts_with(WANTS_SUMMARY)
    }

    /// What the request is for.
    pub(crate) fn kind(&self) -> RequestKind {
        let probe = self.body["max_tokens"].as_u64() == Some(1);
        let title = self.body["output_config"]["format"]["type"] == "json_schema" && self.tools().is_empty();
        if probe || title || self.wants_summary() { RequestKind::Side } else { RequestKind::Main }
    }
}

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

/// A string, or the text blocks of an array joined by newlines.
fn flat_text(content: &Value) -> String {
    match content {
        Value::String(text) => text.clone(),
        Value::Array(blocks) => {
            blocks.iter().filter_map(|block| block["text"].as_str()).collect::<Vec<_>>().join("\n")
        }
        _ => String::new(),
    }
}

fn written_by_the_cli(text: &str) -> bool {
    let text = text.trim_start();
    WRITTEN_BY_THE_CLI.iter().any(|start| text.starts_with(start))
}

fn find_start(messages: &[Value]) -> Option<(usize, String)> {
    messages.iter().enumerate().rev().filter(|(_, message)| role(message) == "user").find_map(
        |(at, message)| {
            let text = text_blocks(message)
                .into_iter()
                .rfind(|text| !text.is_empty() && !written_by_the_cli(text))?;
            Some((at, text.to_owned()))
        },
    )
}

#[cfg(test)]
mod tests;
