//! The tool calls of a turn: a result comes once and never before its call, and a call that never got one is
//! closed when the turn ends.

use std::collections::HashSet;

use serde_json::Value;

use crate::{
    event::{ChangeKind, Event, FileChange, ToolCall, ToolResult},
    limit::{self, BoundedText},
    wire,
};

/// Tools of the engine that write one file, and the input that names it.
const FILE_TOOLS: [(&str, &str); 4] = [
    ("Write", "file_path"),
    ("Edit", "file_path"),
    ("MultiEdit", "file_path"),
    ("NotebookEdit", "notebook_path"),
];

#[derive(Debug)]
struct Call {
    id: String,
    name: String,
    parent: Option<String>,
    /// The file it writes.
    path: Option<String>,
}

/// The tool calls of a turn.
#[derive(Debug, Default)]
pub(super) struct Tools {
    running: Vec<Call>,
    seen: HashSet<String>,
    /// How many calls there were.
    pub(super) called: u32,
}

impl Tools {
    /// The name of the tool that the main agent waits for.
    pub(super) fn running(&self) -> Option<&str> {
        self.running.first().map(|call| call.name.as_str())
    }

    /// A call. Nothing if it was told already.
    pub(super) fn call(&mut self, block: &Value, key: &str, parent: Option<&str>) -> Option<Event> {
        let name = limit::short(wire::text_or(block, "name", "unknown"));
        let id = match wire::word(block, "id") {
            Some(id) => limit::short(id),
            None => format!("{key}.{name}.{}", self.called),
        };
        if !self.seen.insert(id.clone()) {
            return None;
        }
        self.called = self.called.saturating_add(1);
        let input = block.get("input").unwrap_or(&Value::Null);
        let path = FILE_TOOLS
            .iter()
            .find(|(tool, _)| *tool == name)
            .and_then(|(_, field)| wire::word(input, field))
            .map(limit::short);
        let parent_call = parent.map(str::to_owned);
        self.running.push(Call { id: id.clone(), name: name.clone(), parent: parent_call.clone(), path });
        Some(Event::ToolCall(ToolCall {
            call_id: id,
            name,
            input: BoundedText::event(&input.to_string()),
            parent_call,
        }))
    }

    /// A result, and the file it changed. A result nobody called for gets a call first; a second one is dropped.
    pub(super) fn result(&mut self, block: &Value, line: &Value, parent: Option<&str>) -> Vec<Event> {
        let Some(id) = wire::word(block, "tool_use_id").map(limit::short) else { return Vec::new() };
        let mut events = Vec::new();
        if !self.seen.contains(&id) {
            let call = serde_json::json!({"id": id, "name": "unknown"});
            events.extend(self.call(&call, &id, parent));
        }
        let Some(place) = self.running.iter().position(|call| call.id == id) else { return events };
        let call = self.running.remove(place);
        let is_error = wire::flag(block, "is_error") || was_refused(line, &id);
        let mut output = wire::content_text(block.get("content"));
        if is_error && output.is_empty() {
            "the tool failed and said nothing about it".clone_into(&mut output);
        }
        let detail = line.get("tool_use_result");
        let change = match detail.and_then(|detail| wire::word(detail, "type")) {
            Some("create") => ChangeKind::Created,
            Some("update") => ChangeKind::Modified,
            _ if call.name == "Edit" || call.name == "MultiEdit" || call.name == "NotebookEdit" => {
                ChangeKind::Modified
            }
            _ => ChangeKind::Written,
        };
        events.push(Event::ToolResult(ToolResult {
            call_id: id.clone(),
            output: BoundedText::event(&output),
            is_error,
            parent_call: call.parent,
        }));
        if let (Some(path), false) = (call.path, is_error) {
            events.push(Event::FileChange(FileChange { path, change, call_id: id }));
        }
        events
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
                    parent_call: call.parent,
                })
            })
            .collect()
    }
}

/// Whether the line says that the call was refused before it ran; such a result does not always say that it is an
/// error.
fn was_refused(line: &Value, id: &str) -> bool {
    wire::list(line, "tool_result_meta")
        .iter()
        .any(|meta| wire::text(meta, "id") == Some(id) && wire::word(meta, "non_execution_kind").is_some())
}
