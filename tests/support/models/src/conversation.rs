//! The conversation that a request carries, whichever API it came by: which text the turn is about, how far the script
//! has got, what was said before.

use std::hash::{DefaultHasher, Hash, Hasher};

use serde_json::Value;

use crate::{anthropic::request as messages, responses::request as responses};

/// The API that a request speaks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Api {
    /// Anthropic's Messages API: `POST /v1/messages`.
    #[default]
    Messages,
    /// OpenAI's Responses API: `POST /v1/responses`.
    Responses,
}

impl Api {
    /// The word used in JSON.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Messages => "messages",
            Self::Responses => "responses",
        }
    }
}

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

/// The conversation that a request carries.
#[derive(Debug, Clone, Default)]
pub struct Conversation {
    body: Value,
    api: Api,
    start: Option<(usize, String)>,
}

impl Conversation {
    /// Reads a request body; its members tell the API. Any JSON will do: what is not a conversation has no texts.
    #[must_use]
    pub fn new(body: Value) -> Self {
        let api = if body["messages"].is_null() && !body["input"].is_null() {
            Api::Responses
        } else {
            Api::Messages
        };
        let start = match api {
            Api::Messages => messages::find_start(&body),
            Api::Responses => responses::find_start(&body),
        };
        Self { body, api, start }
    }

    /// The whole request body.
    #[must_use]
    pub const fn body(&self) -> &Value {
        &self.body
    }

    /// The API it came by.
    #[must_use]
    pub const fn api(&self) -> Api {
        self.api
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
        self.session().hash(&mut hasher);
        hasher.finish()
    }

    /// The engine's own word for its session, as far as the body tells it: `metadata.user_id` or `prompt_cache_key`.
    #[must_use]
    pub fn session(&self) -> Option<&str> {
        match self.api {
            Api::Messages => self.body["metadata"]["user_id"].as_str(),
            Api::Responses => self.body["prompt_cache_key"].as_str(),
        }
    }

    /// How many answers of the model came after [`turn_text`](Self::turn_text): the step of the script that is due.
    #[must_use]
    pub fn step(&self) -> usize {
        let after = self.start.as_ref().map_or(0, |(at, _)| at + 1);
        match self.api {
            Api::Messages => messages::answers_after(&self.body, after),
            Api::Responses => responses::answers_after(&self.body, after),
        }
    }

    /// Every text of every message, in order, as (role, text). Includes what the CLI wrote; no tool calls or results.
    #[must_use]
    pub fn texts(&self) -> Vec<(String, String)> {
        match self.api {
            Api::Messages => messages::texts(&self.body),
            Api::Responses => responses::texts(&self.body),
        }
    }

    /// What people and the model said to each other, in order, as (role, text): [`texts`](Self::texts) without
    /// `system` and `developer` messages and without what the CLI wrote. Newlines at a text's end, which the CLI adds
    /// where it joins messages of failed or interrupted turns, are cut off.
    #[must_use]
    pub fn dialogue(&self) -> Vec<(String, String)> {
        self.texts()
            .into_iter()
            .filter(|(role, _)| matches!(role.as_str(), "user" | "assistant"))
            .filter(|(role, text)| !(role == "user" && self.written_by_the_cli(text)))
            .map(|(role, text)| (role, text.trim_end_matches('\n').to_owned()))
            .collect()
    }

    fn written_by_the_cli(&self, text: &str) -> bool {
        match self.api {
            Api::Messages => messages::written_by_the_cli(text),
            Api::Responses => responses::written_by_the_cli(text),
        }
    }

    /// Every tool result as (call id, text, whether it is an error), in order. The Responses API has no word for an
    /// error: there a result is one if its command ended with another code than 0 or never ran.
    #[must_use]
    pub fn tool_results(&self) -> Vec<(String, String, bool)> {
        match self.api {
            Api::Messages => messages::tool_results(&self.body),
            Api::Responses => responses::tool_results(&self.body),
        }
    }

    /// What the tools printed, in order: [`tool_results`](Self::tool_results) without ids and without the lines that
    /// Codex puts before a command's output.
    #[must_use]
    pub fn tool_outputs(&self) -> Vec<String> {
        let results = self.tool_results().into_iter().map(|(_, text, _)| text);
        match self.api {
            Api::Messages => results.collect(),
            Api::Responses => results.map(|text| responses::output_of(&text).to_owned()).collect(),
        }
    }

    /// What the model was told to be: the system prompt, or `instructions` and the developer messages, joined by
    /// newlines.
    #[must_use]
    pub fn system(&self) -> String {
        match self.api {
            Api::Messages => flat_text(&self.body["system"]),
            Api::Responses => {
                let mut texts = vec![self.instructions()];
                texts.extend(self.developer());
                texts.retain(|text| !text.is_empty());
                texts.join("\n")
            }
        }
    }

    /// The instructions apart from all messages: `system`, or `instructions` (Codex sends none for a model it does not
    /// know: its first [`developer`](Self::developer) message has them).
    #[must_use]
    pub fn instructions(&self) -> String {
        match self.api {
            Api::Messages => flat_text(&self.body["system"]),
            Api::Responses => self.body["instructions"].as_str().unwrap_or_default().to_owned(),
        }
    }

    /// The texts of the messages of the roles `system` and `developer`, in order.
    #[must_use]
    pub fn developer(&self) -> Vec<String> {
        let told = self.texts().into_iter();
        told.filter(|(role, _)| matches!(role.as_str(), "system" | "developer"))
            .map(|(_, text)| text)
            .collect()
    }

    /// The names of the tools offered. A namespace (Codex has one for each MCP server) is followed by what is in it.
    #[must_use]
    pub fn tools(&self) -> Vec<&str> {
        match self.api {
            Api::Messages => messages::tools(&self.body),
            Api::Responses => responses::tools(&self.body),
        }
    }

    /// The model asked for. Empty if none.
    #[must_use]
    pub fn model(&self) -> &str {
        self.body["model"].as_str().unwrap_or_default()
    }

    /// The reasoning effort asked for, if any.
    #[must_use]
    pub fn effort(&self) -> Option<&str> {
        match self.api {
            Api::Messages => self.body["output_config"]["effort"].as_str(),
            Api::Responses => self.body["reasoning"]["effort"].as_str(),
        }
    }

    /// Whether the request wants a stream.
    #[must_use]
    pub fn streams(&self) -> bool {
        self.body["stream"].as_bool().unwrap_or(false)
    }

    /// How often `needle` occurs in [`system`](Self::system) and in all other of the [`texts`](Self::texts) together.
    #[must_use]
    pub fn occurrences(&self, needle: &str) -> usize {
        if needle.is_empty() {
            return 0;
        }
        self.instructions().matches(needle).count()
            + self.texts().iter().map(|(_, text)| text.matches(needle).count()).sum::<usize>()
    }

    /// What the request is for.
    pub(crate) fn kind(&self) -> RequestKind {
        let side = match self.api {
            Api::Messages => messages::side_text(&self.body, self.turn_text()),
            Api::Responses => responses::side_text(&self.body, self.turn_text()),
        };
        if side.is_some() { RequestKind::Side } else { RequestKind::Main }
    }

    /// What a side request is answered.
    pub(crate) fn side_text(&self) -> &'static str {
        let side = match self.api {
            Api::Messages => messages::side_text(&self.body, self.turn_text()),
            Api::Responses => responses::side_text(&self.body, self.turn_text()),
        };
        side.unwrap_or("scripted")
    }
}

/// A string, or the texts of an array of blocks joined by newlines.
pub(crate) fn flat_text(content: &Value) -> String {
    match content {
        Value::String(text) => text.clone(),
        Value::Array(blocks) => {
            blocks.iter().filter_map(|block| block["text"].as_str()).collect::<Vec<_>>().join("\n")
        }
        _ => String::new(),
    }
}

#[cfg(test)]
mod tests;
