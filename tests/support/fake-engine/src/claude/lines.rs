//! The lines of the dialect, as values.

use serde_json::{Value, json};

use super::session::{cwd, new_id};

/// The version that the fake engine speaks like.
pub(crate) const VERSION: &str = "2.1.332";

/// The list price, in dollars for a million input tokens; output costs five times that.
const PRICE: f64 = 3.0;

/// Token counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Usage {
    pub(crate) input: u64,
    pub(crate) output: u64,
    pub(crate) read: u64,
    pub(crate) created: u64,
}

impl Usage {
    /// What a message counts unless the script says otherwise.
    pub(crate) const USUAL: Self = Self { input: 100, output: 25, read: 20, created: 10 };
    /// Nothing.
    pub(crate) const NONE: Self = Self { input: 0, output: 0, read: 0, created: 0 };

    pub(crate) fn add(&mut self, other: Self) {
        self.input += other.input;
        self.output += other.output;
        self.read += other.read;
        self.created += other.created;
    }

    #[expect(clippy::cast_precision_loss, reason = "an estimate in dollars")]
    fn cost(self) -> f64 {
        let weighted = self.input + self.output * 5 + self.created + self.created / 4 + self.read / 10;
        weighted as f64 * PRICE / 1e6
    }

    /// As the API counts.
    pub(crate) fn api(self) -> Value {
        json!({
            "input_tokens": self.input, "cache_creation_input_tokens": self.created,
            "cache_read_input_tokens": self.read, "output_tokens": self.output,
        })
    }

    /// As the engine counts per model; an object without models if there is nothing.
    pub(crate) fn by_model(self, model: &str) -> Value {
        if self == Self::NONE {
            return json!({});
        }
        json!({model: {
            "inputTokens": self.input, "outputTokens": self.output, "cacheReadInputTokens": self.read,
            "cacheCreationInputTokens": self.created, "webSearchRequests": 0, "costUSD": self.cost(),
            "contextWindow": 200_000, "maxOutputTokens": 32_000,
        }})
    }
}

/// Adds one usage by model to another.
pub(crate) fn add_by_model(total: &mut Value, more: &Value) {
    for (model, counts) in more.as_object().into_iter().flatten() {
        for (name, count) in counts.as_object().into_iter().flatten() {
            let so_far = total[model][name].clone();
            total[model][name] = if matches!(name.as_str(), "contextWindow" | "maxOutputTokens") {
                count.clone()
            } else if let (Some(so_far), Some(count)) = (so_far.as_u64().or(Some(0)), count.as_u64()) {
                json!(so_far + count)
            } else {
                json!(so_far.as_f64().unwrap_or(0.0) + count.as_f64().unwrap_or(0.0))
            };
        }
    }
}

/// The dollars in a usage by model.
pub(crate) fn cost(by_model: &Value) -> f64 {
    let models = by_model.as_object().into_iter().flatten();
    models.map(|(_, counts)| counts["costUSD"].as_f64().unwrap_or(0.0)).sum()
}

/// A `system` line.
pub(crate) fn system(session: &str, subtype: &str, more: &Value) -> Value {
    let mut line = json!({"type": "system", "subtype": subtype});
    merge(&mut line, more);
    merge(&mut line, &json!({"session_id": session, "uuid": new_id()}));
    line
}

/// The `init` line.
pub(crate) fn init(session: &str, model: &str, permission_mode: &str, user: &Value) -> Value {
    let more = json!({
        "cwd": cwd(), "tools": ["Bash", "Edit", "Read", "Write"], "mcp_servers": [], "model": model,
        "permissionMode": permission_mode, "slash_commands": [], "apiKeySource": "ANTHROPIC_API_KEY",
        "claude_code_version": VERSION, "output_style": "default", "agents": [], "skills": [], "plugins": [],
        "capabilities": [], "user_message_uuids": user,
    });
    system(session, "init", &more)
}

/// A `command_lifecycle` line.
pub(crate) fn lifecycle(session: &str, command: &str, state: &str) -> Value {
    json!({
        "type": "command_lifecycle", "command_uuid": command, "state": state, "uuid": new_id(), "session_id": session,
    })
}

/// A `user` line: a tool's result, or what the engine says as the user.
pub(crate) fn user(session: &str, content: &Value) -> Value {
    json!({
        "type": "user", "message": {"role": "user", "content": content}, "parent_tool_use_id": null,
        "session_id": session, "uuid": new_id(),
    })
}

/// A `stream_event` line.
pub(crate) fn stream_event(session: &str, event: &Value) -> Value {
    json!({
        "type": "stream_event", "event": event, "session_id": session, "parent_tool_use_id": null, "uuid": new_id(),
    })
}

/// The answer to a control request.
pub(crate) fn answer(request: &Value, response: &Value) -> Value {
    json!({"type": "control_response", "response": {
        "subtype": "success", "request_id": request["request_id"], "response": response,
    }})
}

/// The refusal of a control request.
pub(crate) fn refusal(request: &Value, subtype: &str) -> Value {
    json!({"type": "control_response", "response": {
        "subtype": "error", "request_id": request["request_id"], "error_code": "unsupported_request",
        "error": format!("Unsupported control request subtype: {subtype}"),
    }})
}

/// What `initialize` is answered.
pub(crate) fn initialize(model: &str, permission_mode: &str, state: &str) -> Value {
    json!({
        "commands": [], "agents": [], "output_style": "default", "available_output_styles": ["default"],
        "models": [{"value": model, "displayName": model, "description": "fake"}],
        "account": {"tokenSource": "none", "apiKeySource": "ANTHROPIC_API_KEY", "apiProvider": "firstParty"},
        "pid": std::process::id(), "claude_code_version": VERSION, "current_permission_mode": permission_mode,
        "session_state": state, "capabilities": [],
    })
}

/// The result line of a session that could not be resumed.
pub(crate) fn no_session(session: &str, message: &str) -> Value {
    json!({
        "type": "result", "subtype": "error_during_execution", "duration_ms": 0, "duration_api_ms": 0, "is_error": true,
        "num_turns": 0, "stop_reason": null, "session_id": session, "total_cost_usd": 0, "usage": Usage::NONE.api(),
        "modelUsage": {}, "permission_denials": [], "uuid": new_id(), "errors": [message], "result_index": 0,
    })
}

/// Adds the members of one object to another.
pub(crate) fn merge(into: &mut Value, from: &Value) {
    if let (Some(into), Some(from)) = (into.as_object_mut(), from.as_object()) {
        into.extend(from.iter().map(|(key, value)| (key.clone(), value.clone())));
    }
}
