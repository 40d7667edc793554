//! The lines that go to Claude Code's standard input, and the operation ids under which they are written.

use serde_json::{Value, json};
use uuid::Uuid;

use crate::translate::{Delivery, LineError, PermissionReply, StdinLine};

/// The operation id and request id of the opening handshake. One process has one.
pub(super) const INITIALIZE: &str = "initialize";

/// The answer given with a denial that carries no text of its own.
const DENIED: &str = "The user did not allow this. Do not try it another way; say what you would have done.";

/// The handshake. Its answer proves that the session is open.
pub(super) fn initialize() -> StdinLine {
    let line = json!({
        "type": "control_request",
        "request_id": INITIALIZE,
        "request": {"subtype": "initialize"},
    });
    made(INITIALIZE, &line)
}

/// A user line. `client_composed` keeps the text from being read as a slash command, which would silently drop
/// the context block, and from having `@file` references expanded.
pub(super) fn deliver(delivery: &Delivery<'_>) -> Result<StdinLine, LineError> {
    let id = delivery.delivery_id;
    match Uuid::try_parse(id) {
        Ok(uuid) if uuid.hyphenated().to_string() == id => {}
        _ => return Err(LineError::BadDeliveryId),
    }
    let context = delivery.context.filter(|context| !context.is_empty());
    let blocks: Vec<Value> = context
        .into_iter()
        .chain([delivery.text])
        .map(|text| json!({"type": "text", "text": text}))
        .collect();
    let line = json!({
        "type": "user",
        "uuid": id,
        "message": {"role": "user", "content": blocks},
        "client_composed": true,
    });
    Ok(made(id, &line))
}

/// Asks the engine to stop, and to drop what waits in its queue.
pub(super) fn interrupt(turn_id: &str) -> StdinLine {
    let op = interrupt_op(turn_id);
    let line = json!({
        "type": "control_request",
        "request_id": op,
        "request": {"subtype": "interrupt", "cancel_queued": true},
    });
    made(&op, &line)
}

/// The operation id of a turn's interrupt.
pub(super) fn interrupt_op(turn_id: &str) -> String {
    format!("interrupt.{turn_id}")
}

/// The operation id of the answer to the permission request in a frame.
pub(super) fn permission_op(frame: u64) -> String {
    format!("permission.{frame}")
}

/// Answers a permission request. An allowed tool runs with the input the engine has: echoing the input from
/// our side could give it back masked.
pub(super) fn answer_permission(frame: u64, native_id: &str, reply: PermissionReply<'_>) -> StdinLine {
    let decision = match reply {
        PermissionReply::Allow => json!({"behavior": "allow"}),
        PermissionReply::Deny { feedback } => {
            let message = if feedback.is_empty() { DENIED } else { feedback };
            json!({"behavior": "deny", "message": message})
        }
    };
    let line = json!({
        "type": "control_response",
        "response": {"subtype": "success", "request_id": native_id, "response": decision},
    });
    made(&permission_op(frame), &line)
}

/// Refuses a request of the engine that we do not know, so that it does not wait for ever.
pub(super) fn refuse_request(frame: u64, native_id: &str) -> StdinLine {
    let line = json!({
        "type": "control_response",
        "response": {"subtype": "error", "request_id": native_id, "error": "not supported by this host"},
    });
    made(&format!("refuse.{frame}"), &line)
}

fn made(op: &str, line: &Value) -> StdinLine {
    let mut bytes = line.to_string().into_bytes();
    bytes.push(b'\n');
    StdinLine { op: op.to_owned(), bytes }
}

/// Whether a line of output shows that the engine is at work. Keep-alive lines and the pings of a stream do not:
/// a hung request would look alive for ever. The word that a tool still runs, which comes every 30 s, does: how long
/// a shell command may take is the engine's own bound (10 minutes at most), and a long build is no hang.
pub(super) fn shows_work(line: &[u8]) -> bool {
    let text = line.trim_ascii();
    if text.is_empty() {
        return false;
    }
    let short = &text[..text.len().min(400)];
    let keep_alive = contains(short, br#""type":"keep_alive""#);
    let ping = contains(short, br#""type":"stream_event""#) && contains(short, br#""type":"ping""#);
    !keep_alive && !ping
}

fn contains(haystack: &[u8], needle: &[u8]) -> bool {
    haystack.windows(needle.len()).any(|window| window == needle)
}
