//! The tool calls of a turn: commands, patches, MCP tools and the engine's own. A result comes once and never before
//! its call, and a call that never got one is closed when the turn ends.

use std::collections::HashSet;

use serde_json::{Value, json};

use crate::{
    event::{ChangeKind, Event, FileChange, ToolCall, ToolResult},
    limit::{self, BoundedText},
    wire,
};

#[derive(Debug)]
struct Call {
    /// The engine's id of it.
    native: String,
    id: String,
    name: String,
    /// It is a command that may outlive its turn.
    command: bool,
}

/// The tool calls of a turn.
#[derive(Debug, Default)]
pub(super) struct Tools {
    running: Vec<Call>,
    seen: HashSet<String>,
    /// How many calls there were.
    pub(super) called: u32,
}

/// What an item calls, as name and input; none for an item that is no call.
fn described(item: &Value) -> Option<(String, Value)> {
    let field = |key: &str| item.get(key).cloned().unwrap_or(Value::Null);
    let (name, input) = match wire::text_or(item, "type", "") {
        "commandExecution" => {
            ("exec_command".to_owned(), json!({"command": field("command"), "cwd": field("cwd")}))
        }
        "fileChange" => ("apply_patch".to_owned(), json!({"changes": field("changes")})),
        "mcpToolCall" => {
            let server = wire::text_or(item, "server", "unknown");
            let tool = wire::text_or(item, "tool", "unknown");
            (format!("mcp__{server}__{tool}"), field("arguments"))
        }
        "dynamicToolCall" => (wire::text_or(item, "tool", "unknown").to_owned(), field("arguments")),
        "collabAgentToolCall" => {
            (wire::text_or(item, "tool", "agent").to_owned(), json!({"prompt": field("prompt")}))
        }
        "webSearch" => ("web_search".to_owned(), json!({"query": field("query"), "action": field("action")})),
        "imageView" => ("view_image".to_owned(), json!({"path": field("path")})),
        "imageGeneration" => ("image_generation".to_owned(), json!({"prompt": field("revisedPrompt")})),
        _ => return None,
    };
    Some((limit::short(&name), input))
}

/// What a finished item gave back, and whether that is an error.
fn outcome(item: &Value) -> (String, bool) {
    let status = wire::text_or(item, "status", "completed");
    let failed = status != "completed";
    let mut output = match wire::text_or(item, "type", "") {
        "commandExecution" => {
            let mut output = wire::text_or(item, "aggregatedOutput", "").to_owned();
            let code = item.get("exitCode").and_then(Value::as_i64).filter(|code| *code != 0);
            if let Some(code) = code {
                if !output.is_empty() && !output.ends_with('\n') {
                    output.push('\n');
                }
                match code {
                    // It was ended with its turn.
                    -1 => output.push_str("the command was ended before it finished"),
                    code => output.push_str(&format!("exit code {code}")),
                }
            }
            output
        }
        "mcpToolCall" => match item.get("error").and_then(|error| wire::word(error, "message")) {
            Some(message) => message.to_owned(),
            None => wire::content_text(item.get("result").and_then(|result| result.get("content"))),
        },
        "dynamicToolCall" => wire::content_text(item.get("contentItems")),
        _ => String::new(),
    };
    if failed && output.is_empty() {
        let text = match status {
            "declined" => "this was not allowed",
            _ => "the tool failed and said nothing about it",
        };
        text.clone_into(&mut output);
    }
    (output, failed)
}

/// The files that a finished patch changed.
fn changes(item: &Value, call_id: &str) -> Vec<Event> {
    if wire::text_or(item, "type", "") != "fileChange" {
        return Vec::new();
    }
    wire::list(item, "changes")
        .iter()
        .filter_map(|change| {
            let path = limit::short(wire::word(change, "path")?);
            let kind = change.get("kind").map_or("", |kind| wire::text_or(kind, "type", ""));
            let change = match kind {
                "add" => ChangeKind::Created,
                "delete" => ChangeKind::Deleted,
                "update" => ChangeKind::Modified,
                _ => ChangeKind::Written,
            };
            Some(Event::FileChange(FileChange { path, change, call_id: call_id.to_owned() }))
        })
        .collect()
}

impl Tools {
    /// The name of the tool that is waited for.
    pub(super) fn running(&self) -> Option<&str> {
        self.running.first().map(|call| call.name.as_str())
    }

    /// Whether a command has not ended.
    pub(super) fn commands_running(&self) -> bool {
        self.running.iter().any(|call| call.command)
    }

    /// A call whose permission nobody gave: nothing of it runs, and the engine does not say its end.
    pub(super) fn never_ran(&mut self, native: &str) {
        for call in self.running.iter_mut().filter(|call| call.native == native) {
            call.command = false;
        }
    }

    /// The id under which a running call was told.
    pub(super) fn told_id(&self, native: &str) -> Option<&str> {
        self.running.iter().find(|call| call.native == native).map(|call| call.id.as_str())
    }

    /// An item began. Says whether it is a call.
    pub(super) fn started(&mut self, item: &Value) -> Option<Event> {
        let (name, input) = described(item)?;
        let native = wire::word(item, "id").map(limit::short).unwrap_or_default();
        if self.running.iter().any(|call| call.native == native && call.name == name) {
            return None;
        }
        let mut id = match native.as_str() {
            "" => format!("{name}.{}", self.called),
            native => native.to_owned(),
        };
        while !self.seen.insert(id.clone()) {
            id = format!("{id}.{}", self.called);
        }
        self.called = self.called.saturating_add(1);
        let command = wire::text_or(item, "type", "") == "commandExecution";
        self.running.push(Call { native, id: id.clone(), name: name.clone(), command });
        let input = BoundedText::event(&input.to_string());
        Some(Event::ToolCall(ToolCall { call_id: id, name, input, parent_call: None }))
    }

    /// An item ended: its call, if that was not told, its result, and the files it changed. None for an item that is
    /// no call.
    pub(super) fn completed(&mut self, item: &Value) -> Option<Vec<Event>> {
        let (name, _) = described(item)?;
        let native = wire::word(item, "id").map(limit::short).unwrap_or_default();
        let known =
            |tools: &Self| tools.running.iter().position(|call| call.native == native && call.name == name);
        let mut events = Vec::new();
        let place = match known(self) {
            Some(place) => place,
            None => {
                // Its end is told once: a second one under the same id is dropped.
                if !native.is_empty() && self.seen.contains(&native) {
                    return Some(events);
                }
                events.extend(self.started(item));
                match known(self) {
                    Some(place) => place,
                    None => return Some(events),
                }
            }
        };
        let call = self.running.remove(place);
        let (output, is_error) = outcome(item);
        events.push(Event::ToolResult(ToolResult {
            call_id: call.id.clone(),
            output: BoundedText::event(&output),
            is_error,
            parent_call: None,
        }));
        if !is_error {
            events.extend(changes(item, &call.id));
        }
        Some(events)
    }

    /// Closes what never got a result.
    pub(super) fn close(&mut self) -> Vec<Event> {
        let left = std::mem::take(&mut self.running);
        left.into_iter()
            .map(|call| {
                Event::ToolResult(ToolResult {
                    call_id: call.id,
                    output: BoundedText::event("the turn ended before the tool gave a result"),
                    is_error: true,
                    parent_call: None,
                })
            })
            .collect()
    }
}
