//! One turn: its script obeyed, its lines told.

use serde_json::{Value, json};
use std::time::{Duration, Instant};

use super::{
    Engine, Message,
    lines::{self, Usage},
    session::new_id,
};
use crate::{
    core::{Dialect, Stop, bad, filler, stamped},
    script::{self, Marker},
};

/// What a turn has come to so far.
#[derive(Debug)]
pub(crate) struct Turn {
    uuid: Option<String>,
    started: Instant,
    /// The id of the message that is open.
    message: Option<String>,
    block: u64,
    /// The text of the block that is open.
    partial: Option<String>,
    said: String,
    messages: u64,
    usage: Usage,
    pub(crate) denials: Vec<Value>,
    /// Whether a tool is running.
    pub(crate) in_tool: bool,
    /// It is not told that the process is idle afterwards.
    stays_busy: bool,
}

impl Engine {
    /// Runs one turn to its end.
    pub(crate) fn turn(&mut self, message: Message) {
        self.running = true;
        let mut turn = Turn {
            uuid: message.uuid.clone(),
            started: Instant::now(),
            message: None,
            block: 0,
            partial: None,
            said: String::new(),
            messages: 0,
            usage: Usage::NONE,
            denials: Vec::new(),
            in_tool: false,
            stays_busy: false,
        };
        self.open_turn(&message);
        let ended = script::parse(&message.text).map_err(bad).and_then(|markers| {
            let markers = if markers.is_empty() { self.core.file.turn.clone() } else { markers };
            if markers.is_empty() {
                return self.say(&mut turn, "ok");
            }
            markers.iter().try_for_each(|marker| {
                self.obey(&mut turn, marker)?;
                self.poll()
            })
        });
        // An aborted message is closed after the abort is told.
        if !matches!(ended, Err(Stop::Interrupted | Stop::Denied)) {
            self.close_message(&mut turn);
        }
        let no_result = ended == Err(Stop::NoResult);
        if !no_result {
            self.end_turn(&mut turn, ended);
        }
        self.running = false;
        if !no_result && !turn.stays_busy && self.queue.is_empty() {
            self.state("idle");
        }
    }

    fn open_turn(&mut self, message: &Message) {
        let id = self.session.id.clone();
        if let Some(uuid) = &message.uuid {
            let started = lines::lifecycle(&id, uuid, "started");
            self.send(&started);
        } else {
            self.state("running");
        }
        let uuids = json!(message.uuid.iter().collect::<Vec<_>>());
        let init = lines::init(&id, &self.model, &self.permission_mode, &uuids);
        self.send(&init);
        let uuid = message.uuid.clone().unwrap_or_else(new_id);
        self.session.append("user", &uuid, &message.line["message"]);
        self.session.texts.push(message.text.clone());
        self.requesting();
        self.echo(&message.line, &uuid);
    }

    /// Says that a request begins.
    fn requesting(&mut self) {
        if self.partials() {
            let status = lines::system(&self.session.id, "status", &json!({"status": "requesting"}));
            self.core.out.line(&status);
        }
    }

    fn end_turn(&mut self, turn: &mut Turn, ended: Result<(), Stop>) {
        let id = self.session.id.clone();
        let mut result = json!({"subtype": "success", "is_error": false, "api_error_status": null});
        let mut state = "completed";
        match ended {
            Ok(()) | Err(Stop::NoResult | Stop::Steered) => {
                let more =
                    json!({"result": turn.said, "terminal_reason": "completed", "stop_reason": "end_turn"});
                lines::merge(&mut result, &more);
            }
            Err(Stop::Failed(status, message)) => {
                // As the real engine says: a failed turn's message is cancelled, not completed.
                state = "cancelled";
                let text = format!("API Error: {status} {message}");
                self.synthetic(turn, status, &text);
                let more = json!({
                    "is_error": true, "api_error_status": status, "result": text, "terminal_reason": "api_error",
                    "stop_reason": "stop_sequence",
                });
                lines::merge(&mut result, &more);
            }
            Err(Stop::Interrupted | Stop::Denied) => {
                state = "cancelled";
                let (sentence, reason) = if turn.in_tool {
                    ("[Request interrupted by user for tool use]", "aborted_tools")
                } else {
                    ("[Request interrupted by user]", "aborted_streaming")
                };
                let cut = self.keep_partial(turn);
                let content = json!([{"type": "text", "text": sentence}]);
                let line = lines::user(&id, &content);
                self.session.append("user", &new_id(), &line["message"]);
                self.send(&line);
                if cut {
                    self.end_block(turn);
                }
                self.end_message(turn);
                let more = json!({
                    "subtype": "error_during_execution", "is_error": true, "terminal_reason": reason,
                    "stop_reason": if turn.in_tool { json!("tool_use") } else { Value::Null },
                    "errors": ["[ede_diagnostic] result_type=user last_content_type=n/a"],
                });
                lines::merge(&mut result, &more);
            }
        }
        self.failed = result["is_error"] == true;
        self.result_line(turn, result);
        if let Some(uuid) = &turn.uuid {
            let line = lines::lifecycle(&id, uuid, state);
            self.send(&line);
        }
    }

    fn result_line(&mut self, turn: &Turn, more: Value) {
        let since = turn.usage.by_model(&self.model);
        lines::add_by_model(&mut self.by_model, &since);
        // As in the real engine: what an aborted turn used is told by model only.
        let usage = if more["subtype"] == "success" { turn.usage } else { Usage::NONE };
        let took = u64::try_from(turn.started.elapsed().as_millis()).unwrap_or(u64::MAX);
        let mut line = json!({
            "type": "result", "duration_ms": took, "duration_api_ms": took, "num_turns": turn.messages.max(1),
            "session_id": self.session.id, "total_cost_usd": lines::cost(&self.by_model), "usage": usage.api(),
            "modelUsage": self.by_model, "model_usage_since_last_result": since,
            "permission_denials": turn.denials, "result_index": self.results,
            "queued_turn_count": self.queue.len(), "uuid": new_id(),
        });
        lines::merge(&mut line, &more);
        if let Some(uuid) = &turn.uuid {
            lines::merge(&mut line, &json!({"user_message_uuid": uuid, "user_message_uuids": [uuid]}));
        }
        self.results += 1;
        self.send(&line);
    }

    /// Obeys one marker in a turn.
    fn obey(&mut self, turn: &mut Turn, marker: &Marker) -> Result<(), Stop> {
        match marker.verb.as_str() {
            "text" => self.say(turn, &marker.needed().map_err(bad)?),
            "recall" => {
                let texts = self.session.texts.join(" | ");
                self.say(turn, &texts)
            }
            "thinking" => {
                let text = marker.needed().map_err(bad)?;
                self.block(turn, &json!({"type": "thinking", "thinking": text, "signature": "ZmFrZQ=="}));
                Ok(())
            }
            "slow" => self.slow(turn, marker),
            "huge" => {
                let text = filler(marker.number("bytes", 0).map_err(bad)?);
                self.say(turn, &text)
            }
            "events" => self.events(turn, marker),
            "usage" => {
                let number = |name: &str, usual: u64| marker.number(name, usual).map_err(bad);
                self.usage = Usage {
                    input: number("in", Usage::USUAL.input)?,
                    output: number("out", Usage::USUAL.output)?,
                    read: number("read", Usage::USUAL.read)?,
                    created: number("created", Usage::USUAL.created)?,
                };
                Ok(())
            }
            "bash" | "append" | "tool" => self.tool(turn, marker),
            "error" => {
                Err(Stop::Failed(marker.number("code", 500).map_err(bad)?, marker.text("scripted failure")))
            }
            "retry" => {
                let status = marker.number("status", 529).map_err(bad)?;
                let more = json!({
                    "attempt": 1, "max_retries": 10, "retry_delay_ms": 500, "error_status": status,
                    "error": error_word(status),
                });
                let line = lines::system(&self.session.id, "api_retry", &more);
                self.send(&line);
                Ok(())
            }
            "no_result" => Err(Stop::NoResult),
            "busy" => {
                turn.stays_busy = true;
                Ok(())
            }
            _ => self.plain(marker),
        }
    }

    fn partials(&self) -> bool {
        self.args.has("--include-partial-messages")
    }

    fn event(&mut self, event: &Value) {
        if self.partials() {
            let line = lines::stream_event(&self.session.id, event);
            self.core.out.line(&line);
        }
    }

    fn open_message(&mut self, turn: &mut Turn) -> String {
        if let Some(id) = &turn.message {
            return id.clone();
        }
        let id = format!("msg_{}", &uuid::Uuid::new_v4().simple().to_string()[..20]);
        turn.message = Some(id.clone());
        if turn.messages > 0 {
            self.requesting();
        }
        turn.block = 0;
        turn.messages += 1;
        turn.usage.add(self.usage);
        if self.partials() {
            let usage = Usage { output: 1, ..self.usage }.api();
            self.event(&json!({"type": "message_start", "message": {
                "id": id, "type": "message", "role": "assistant", "model": self.model, "content": [],
                "stop_reason": null, "stop_sequence": null, "usage": usage,
            }}));
        }
        id
    }

    pub(crate) fn close_message(&mut self, turn: &mut Turn) {
        self.keep_partial(turn);
        self.end_message(turn);
        self.core.out.flush();
    }

    /// Says the text of a block that is cut off here; answers whether there is one.
    fn keep_partial(&mut self, turn: &mut Turn) -> bool {
        let Some(text) = turn.partial.take().filter(|text| !text.is_empty()) else { return false };
        self.assistant(turn, &json!({"type": "text", "text": text}), &json!({"aborted": true}));
        true
    }

    fn end_message(&mut self, turn: &mut Turn) {
        if turn.message.take().is_some() {
            let stop = if turn.in_tool { "tool_use" } else { "end_turn" };
            let usage = self.usage.api();
            self.event(&json!({"type": "message_delta", "delta": {"stop_reason": stop}, "usage": usage}));
            self.event(&json!({"type": "message_stop"}));
        }
    }

    fn delta(&mut self, turn: &mut Turn, text: &str) {
        let index = turn.block;
        if let Some(partial) = &mut turn.partial {
            partial.push_str(text);
        }
        self.event(&json!({
            "type": "content_block_delta", "index": index, "delta": {"type": "text_delta", "text": text},
        }));
    }

    fn open_text(&mut self, turn: &mut Turn) {
        self.open_message(turn);
        turn.partial = Some(String::new());
        let index = turn.block;
        let block = json!({"type": "text", "text": ""});
        self.event(&json!({"type": "content_block_start", "index": index, "content_block": block}));
    }

    fn close_text(&mut self, turn: &mut Turn) {
        let text = turn.partial.take().unwrap_or_default();
        turn.said.clone_from(&text);
        self.assistant(turn, &json!({"type": "text", "text": text}), &json!({}));
        self.end_block(turn);
    }

    fn end_block(&mut self, turn: &mut Turn) {
        let index = turn.block;
        self.event(&json!({"type": "content_block_stop", "index": index}));
        turn.block += 1;
    }

    fn say(&mut self, turn: &mut Turn, text: &str) -> Result<(), Stop> {
        self.open_text(turn);
        self.delta(turn, text);
        self.close_text(turn);
        self.core.out.flush();
        self.poll()
    }

    fn slow(&mut self, turn: &mut Turn, marker: &Marker) -> Result<(), Stop> {
        let text = marker.text("word ");
        let delay = Duration::from_millis(marker.number("delay", 100).map_err(bad)?);
        self.open_text(turn);
        for n in 0..marker.number("chunks", 10).map_err(bad)? {
            if n > 0 {
                self.wait_until(Some(delay), |_| false)?;
            }
            self.delta(turn, &text);
            self.core.out.flush();
        }
        self.close_text(turn);
        self.core.out.flush();
        Ok(())
    }

    fn events(&mut self, turn: &mut Turn, marker: &Marker) -> Result<(), Stop> {
        let count = marker.number("count", 1).map_err(bad)?;
        let text = filler(marker.number("bytes", 64).map_err(bad)?);
        let deltas = marker.flag("delta");
        let clock = marker.flag("clock");
        if deltas {
            self.open_text(turn);
        }
        for n in 0..count {
            let text = if clock { stamped(&text) } else { text.clone() };
            if deltas {
                self.delta(turn, &text);
            } else {
                self.open_text(turn);
                self.delta(turn, &text);
                self.close_text(turn);
            }
            if clock {
                self.core.out.flush();
            }
            if n % 256 == 255 {
                self.poll()?;
            }
        }
        if deltas {
            self.close_text(turn);
        }
        self.core.out.flush();
        Ok(())
    }

    /// A block that comes whole.
    pub(crate) fn block(&mut self, turn: &mut Turn, block: &Value) {
        self.open_message(turn);
        let index = turn.block;
        let (empty, deltas) = in_pieces(block);
        self.event(&json!({"type": "content_block_start", "index": index, "content_block": empty}));
        for delta in deltas {
            self.event(&json!({"type": "content_block_delta", "index": index, "delta": delta}));
        }
        self.assistant(turn, block, &json!({}));
        self.end_block(turn);
        self.core.out.flush();
    }

    /// The line of one block, in the file and on stdout.
    fn assistant(&mut self, turn: &Turn, block: &Value, more: &Value) {
        let usage = Usage { output: 1, ..self.usage }.api();
        let message = json!({
            "id": turn.message, "type": "message", "role": "assistant", "model": self.model, "content": [block],
            "stop_reason": null, "stop_sequence": null, "usage": usage,
        });
        let uuid = new_id();
        self.session.append("assistant", &uuid, &message);
        let mut line = json!({
            "type": "assistant", "message": message, "parent_tool_use_id": null, "session_id": self.session.id,
            "uuid": uuid,
        });
        if let Some(uuid) = &turn.uuid {
            lines::merge(&mut line, &json!({"user_message_uuid": uuid, "user_message_uuids": [uuid]}));
        }
        lines::merge(&mut line, more);
        self.core.out.line(&line);
    }

    /// The line that stands for a failed request.
    fn synthetic(&mut self, turn: &Turn, status: u64, text: &str) {
        let line = json!({
            "type": "assistant", "message": {
                "id": new_id(), "type": "message", "role": "assistant", "model": "<synthetic>",
                "content": [{"type": "text", "text": text}], "stop_reason": "stop_sequence", "stop_sequence": "",
                "usage": Usage::NONE.api(),
            },
            "parent_tool_use_id": null, "session_id": self.session.id, "uuid": new_id(),
            "error": error_word(status), "is_api_error_message": true, "api_error_status": status,
            "user_message_uuid": turn.uuid,
        });
        self.send(&line);
    }
}

/// A block as it is when it starts, and the deltas that make it whole.
fn in_pieces(block: &Value) -> (Value, Vec<Value>) {
    let mut empty = block.clone();
    let deltas = if block["type"] == "thinking" {
        empty["thinking"] = json!("");
        empty["signature"] = json!("");
        vec![
            json!({"type": "thinking_delta", "thinking": block["thinking"]}),
            json!({"type": "signature_delta", "signature": block["signature"]}),
        ]
    } else {
        empty["input"] = json!({});
        vec![json!({"type": "input_json_delta", "partial_json": block["input"].to_string()})]
    };
    (empty, deltas)
}

fn error_word(status: u64) -> &'static str {
    match status {
        401 | 403 => "authentication_failed",
        404 => "model_not_found",
        429 => "rate_limit",
        529 => "overloaded",
        500..600 => "server_error",
        _ => "unknown",
    }
}
