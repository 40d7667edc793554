//! Messages on the wire: server-sent events, or one JSON document.

use bytes::Bytes;
use serde_json::{Value, json};

use crate::{
    script::{Stop, Usage},
    walk::{DocumentWriter, EventWriter, id},
};

/// Bytes of tool input in one delta.
const INPUT_CHUNK: usize = 64 * 1024;

/// One event as it goes over the wire.
pub(crate) fn event(body: &Value) -> Bytes {
    let kind = body["type"].as_str().unwrap_or("error");
    Bytes::from(format!("event: {kind}\ndata: {body}\n\n"))
}

fn usage(usage: Usage, output: u64) -> Value {
    json!({
        "input_tokens": usage.input,
        "cache_creation_input_tokens": usage.cache_creation,
        "cache_read_input_tokens": usage.cache_read,
        "output_tokens": output,
    })
}

/// A message in the making: it turns what the model says into events and keeps no text.
#[derive(Debug)]
pub(crate) struct Events {
    model: String,
    usage: Usage,
    index: usize,
    text_open: bool,
}

impl Events {
    pub(crate) const fn new(model: String, usage: Usage) -> Self {
        Self { model, usage, index: 0, text_open: false }
    }

    fn delta(&self, delta: &Value) -> Bytes {
        event(&json!({"type": "content_block_delta", "index": self.index, "delta": delta}))
    }

    fn block_start(&self, block: &Value) -> Bytes {
        event(&json!({"type": "content_block_start", "index": self.index, "content_block": block}))
    }

    fn block_stop(&mut self) -> Bytes {
        let stop = event(&json!({"type": "content_block_stop", "index": self.index}));
        self.index += 1;
        stop
    }
}

impl EventWriter for Events {
    fn start(&mut self) -> Vec<Bytes> {
        vec![event(&json!({"type": "message_start", "message": {
            "id": id("msg"), "type": "message", "role": "assistant", "model": self.model, "content": [],
            "stop_reason": null, "stop_sequence": null, "usage": usage(self.usage, 1),
        }}))]
    }

    fn end_text(&mut self) -> Vec<Bytes> {
        if std::mem::take(&mut self.text_open) { vec![self.block_stop()] } else { Vec::new() }
    }

    fn text(&mut self, text: &str) -> Vec<Bytes> {
        let mut out = Vec::with_capacity(2);
        if !std::mem::replace(&mut self.text_open, true) {
            out.push(self.block_start(&json!({"type": "text", "text": ""})));
        }
        out.push(self.delta(&json!({"type": "text_delta", "text": text})));
        out
    }

    fn thinking(&mut self, text: &str) -> Vec<Bytes> {
        let mut out = self.end_text();
        out.push(self.block_start(&json!({"type": "thinking", "thinking": "", "signature": ""})));
        out.push(self.delta(&json!({"type": "thinking_delta", "thinking": text})));
        out.push(self.delta(&json!({"type": "signature_delta", "signature": "c2NyaXB0ZWQ="})));
        out.push(self.block_stop());
        out
    }

    fn tool(&mut self, name: &str, input: &Value) -> Vec<Bytes> {
        let mut out = self.end_text();
        out.push(
            self.block_start(&json!({"type": "tool_use", "id": id("toolu"), "name": name, "input": {}})),
        );
        let input = input.to_string();
        let mut rest = input.as_str();
        while !rest.is_empty() {
            let (piece, after) = rest.split_at(rest.floor_char_boundary(INPUT_CHUNK));
            out.push(self.delta(&json!({"type": "input_json_delta", "partial_json": piece})));
            rest = after;
        }
        out.push(self.block_stop());
        out
    }

    fn finish(&mut self, stop: Stop) -> Vec<Bytes> {
        let mut out = self.end_text();
        out.push(event(&json!({
            "type": "message_delta",
            "delta": {"stop_reason": stop.as_str(), "stop_sequence": null},
            "usage": usage(self.usage, self.usage.output),
        })));
        out.push(event(&json!({"type": "message_stop"})));
        out
    }
}

/// A message in the making for a client that wants one document.
#[derive(Debug)]
pub(crate) struct Document {
    model: String,
    usage: Usage,
    content: Vec<Value>,
    text: Option<String>,
}

impl Document {
    pub(crate) const fn new(model: String, usage: Usage) -> Self {
        Self { model, usage, content: Vec::new(), text: None }
    }
}

impl DocumentWriter for Document {
    fn end_text(&mut self) {
        if let Some(text) = self.text.take() {
            self.content.push(json!({"type": "text", "text": text}));
        }
    }

    fn text(&mut self, text: &str) {
        self.text.get_or_insert_default().push_str(text);
    }

    fn thinking(&mut self, text: &str) {
        self.end_text();
        self.content.push(json!({"type": "thinking", "thinking": text, "signature": "c2NyaXB0ZWQ="}));
    }

    fn tool(&mut self, name: &str, input: &Value) {
        self.end_text();
        self.content.push(json!({"type": "tool_use", "id": id("toolu"), "name": name, "input": input}));
    }

    fn finish(mut self: Box<Self>, stop: Stop) -> Value {
        self.end_text();
        json!({
            "id": id("msg"), "type": "message", "role": "assistant", "model": self.model, "content": self.content,
            "stop_reason": stop.as_str(), "stop_sequence": null, "usage": usage(self.usage, self.usage.output),
        })
    }
}
