//! Responses on the wire: server-sent events, or one JSON document.

use std::time::{SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use serde_json::{Value, json};

use super::tools::{self, Call};
use crate::{
    script::{Reply, Stop, Usage},
    walk::{DocumentWriter, EventWriter, id},
};

/// Bytes of a call's arguments in one delta.
const ARGUMENTS_CHUNK: usize = 64 * 1024;

/// One event as it goes over the wire. Its `sequence_number` is the caller's.
fn event(body: &Value) -> Bytes {
    let kind = body["type"].as_str().unwrap_or("error");
    Bytes::from(format!("event: {kind}\ndata: {body}\n\n"))
}

/// Token counts as this API has them: what a cache served or took is part of the input.
fn usage(usage: Usage) -> Value {
    let input = usage.input + usage.cache_read + usage.cache_creation;
    json!({
        "input_tokens": input,
        "input_tokens_details": {
            "cached_tokens": usage.cache_read, "cache_write_tokens": usage.cache_creation,
        },
        "output_tokens": usage.output,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": input + usage.output,
    })
}

/// A response object.
fn response(id: &str, model: &str, status: &str, output: &[Value]) -> Value {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    json!({
        "id": id, "object": "response", "created_at": now, "status": status, "model": model, "output": output,
        "error": null, "incomplete_details": null, "usage": null, "parallel_tool_calls": true, "store": false,
    })
}

/// The events of a response that fails at once, or those that end one that has begun.
pub(crate) fn failed(code: &str, message: &str) -> Vec<Bytes> {
    let mut response = response(&id("resp"), "", "failed", &[]);
    response["error"] = json!({"code": code, "message": message});
    vec![event(&json!({"type": "response.failed", "response": response}))]
}

/// The text block that is open.
#[derive(Debug)]
struct OpenText {
    item: String,
    text: String,
}

/// A response in the making. It keeps what the model says: the API repeats it at each end.
#[derive(Debug)]
pub(crate) struct Writer {
    id: String,
    model: String,
    usage: Usage,
    /// Whether texts are refusals.
    refuses: bool,
    output: Vec<Value>,
    open: Option<OpenText>,
    sequence: u64,
}

impl Writer {
    pub(crate) fn new(model: String, reply: &Reply) -> Self {
        Self {
            id: id("resp"),
            model,
            usage: reply.usage,
            refuses: reply.stop == Some(Stop::Refusal),
            output: Vec::new(),
            open: None,
            sequence: 0,
        }
    }

    fn event(&mut self, kind: &str, mut body: Value) -> Bytes {
        body["type"] = json!(kind);
        body["sequence_number"] = json!(self.sequence);
        self.sequence += 1;
        event(&body)
    }

    /// The word for a piece of text: (in a content part, in an event's name).
    const fn words(&self) -> (&'static str, &'static str) {
        if self.refuses { ("refusal", "refusal") } else { ("output_text", "text") }
    }

    fn part(&self, text: &str) -> Value {
        if self.refuses {
            json!({"type": "refusal", "refusal": text})
        } else {
            json!({"type": "output_text", "text": text, "annotations": [], "logprobs": []})
        }
    }

    /// An item that begins: its event.
    fn added(&mut self, item: &Value) -> Bytes {
        let index = self.output.len();
        self.event("response.output_item.added", json!({"output_index": index, "item": item}))
    }

    /// An item that is whole: its event; it is kept.
    fn done(&mut self, item: Value) -> Bytes {
        let index = self.output.len();
        let event = self.event("response.output_item.done", json!({"output_index": index, "item": item}));
        self.output.push(item);
        event
    }

    fn whole(&self, stop: Stop) -> Value {
        let cut_off = stop == Stop::MaxTokens;
        let status = if cut_off { "incomplete" } else { "completed" };
        let mut whole = response(&self.id, &self.model, status, &self.output);
        whole["usage"] = usage(self.usage);
        if cut_off {
            whole["incomplete_details"] = json!({"reason": "max_output_tokens"});
        }
        whole
    }
}

impl EventWriter for Writer {
    fn start(&mut self) -> Vec<Bytes> {
        let begun = response(&self.id, &self.model, "in_progress", &[]);
        vec![
            self.event("response.created", json!({"response": begun})),
            self.event("response.in_progress", json!({"response": begun})),
        ]
    }

    fn text(&mut self, text: &str) -> Vec<Bytes> {
        let mut out = Vec::with_capacity(3);
        let index = self.output.len();
        if self.open.is_none() {
            let item = id("msg");
            let begun = json!({
                "id": item, "type": "message", "role": "assistant", "status": "in_progress", "content": [],
            });
            out.push(self.added(&begun));
            let part = self.part("");
            out.push(self.event(
                "response.content_part.added",
                json!({"item_id": item, "output_index": index, "content_index": 0, "part": part}),
            ));
            self.open = Some(OpenText { item, text: String::new() });
        }
        let item = self.open.as_mut().map(|open| {
            open.text.push_str(text);
            open.item.clone()
        });
        let kind = if self.refuses { "response.refusal.delta" } else { "response.output_text.delta" };
        out.push(
            self.event(
                kind,
                json!({"item_id": item, "output_index": index, "content_index": 0, "delta": text}),
            ),
        );
        out
    }

    fn end_text(&mut self) -> Vec<Bytes> {
        let Some(OpenText { item, text }) = self.open.take() else { return Vec::new() };
        let index = self.output.len();
        let part = self.part(&text);
        let (name, member) = self.words();
        let mut done = json!({"item_id": item, "output_index": index, "content_index": 0});
        done[member] = json!(text);
        let part_done = json!({"item_id": item, "output_index": index, "content_index": 0, "part": part});
        let whole = json!({
            "id": item, "type": "message", "role": "assistant", "status": "completed", "content": [part],
        });
        vec![
            self.event(&format!("response.{name}.done"), done),
            self.event("response.content_part.done", part_done),
            self.done(whole),
        ]
    }

    fn thinking(&mut self, text: &str) -> Vec<Bytes> {
        let mut out = EventWriter::end_text(self);
        let item = id("rs");
        let at = json!({"item_id": item, "output_index": self.output.len(), "summary_index": 0});
        let with = |name: &str, value: Value| {
            let mut body = at.clone();
            body[name] = value;
            body
        };
        let part = json!({"type": "summary_text", "text": text});
        out.push(self.added(&json!({"id": item, "type": "reasoning", "summary": []})));
        let empty = json!({"type": "summary_text", "text": ""});
        out.push(self.event("response.reasoning_summary_part.added", with("part", empty)));
        out.push(self.event("response.reasoning_summary_text.delta", with("delta", json!(text))));
        out.push(self.event("response.reasoning_summary_text.done", with("text", json!(text))));
        out.push(self.event("response.reasoning_summary_part.done", with("part", part.clone())));
        out.push(self.done(json!({
            "id": item, "type": "reasoning", "summary": [part], "encrypted_content": "c2NyaXB0ZWQ=",
        })));
        out
    }

    fn tool(&mut self, name: &str, input: &Value) -> Vec<Bytes> {
        let mut out = EventWriter::end_text(self);
        let index = self.output.len();
        let call_id = id("call");
        let (item, mut whole, member, kind, text) = match tools::call(name, input) {
            Call::Function { name, namespace, arguments } => {
                let item = id("fc");
                let mut whole =
                    json!({"id": item, "type": "function_call", "call_id": call_id, "name": name});
                if let Some(namespace) = namespace {
                    whole["namespace"] = json!(namespace);
                }
                (item, whole, "arguments", "response.function_call_arguments", arguments)
            }
            Call::Custom { name, input } => {
                let item = id("ctc");
                let whole = json!({"id": item, "type": "custom_tool_call", "call_id": call_id, "name": name});
                (item, whole, "input", "response.custom_tool_call_input", input)
            }
        };
        whole["status"] = json!("in_progress");
        whole[member] = json!("");
        out.push(self.added(&whole));
        let mut rest = text.as_str();
        while !rest.is_empty() {
            let (piece, after) = rest.split_at(rest.floor_char_boundary(ARGUMENTS_CHUNK));
            let delta = json!({"item_id": item, "output_index": index, "delta": piece});
            out.push(self.event(&format!("{kind}.delta"), delta));
            rest = after;
        }
        let mut done = json!({"item_id": item, "output_index": index});
        done[member] = json!(text);
        out.push(self.event(&format!("{kind}.done"), done));
        whole["status"] = json!("completed");
        whole[member] = json!(text);
        out.push(self.done(whole));
        out
    }

    fn finish(&mut self, stop: Stop) -> Vec<Bytes> {
        let mut out = EventWriter::end_text(self);
        let whole = self.whole(stop);
        let kind = if stop == Stop::MaxTokens { "response.incomplete" } else { "response.completed" };
        out.push(self.event(kind, json!({"response": whole})));
        out
    }
}

impl DocumentWriter for Writer {
    fn text(&mut self, text: &str) {
        EventWriter::text(self, text);
    }

    fn end_text(&mut self) {
        EventWriter::end_text(self);
    }

    fn thinking(&mut self, text: &str) {
        EventWriter::thinking(self, text);
    }

    fn tool(&mut self, name: &str, input: &Value) {
        EventWriter::tool(self, name, input);
    }

    fn finish(mut self: Box<Self>, stop: Stop) -> Value {
        EventWriter::end_text(&mut *self);
        self.whole(stop)
    }
}
