//! The lines that go to an app-server's standard input, and the operation ids under which they are written.
//!
//! A request's JSON-RPC id is its operation id: a string, so that a restarted runner never meets the ids of its
//! predecessor, and never the engine's own, which are numbers.

use serde_json::{Value, json};
use uuid::Uuid;

use crate::translate::{Delivery, LineError, PermissionReply, StdinLine};

use super::setup::Setup;

/// The handshake.
pub(super) const INITIALIZE: &str = "initialize";
/// The word that the handshake is done.
const INITIALIZED: &str = "initialized";
/// The question whether the sandbox runs.
pub(super) const SANDBOX: &str = "sandbox";
/// The question which skills there are.
pub(super) const SKILLS: &str = "skills";
/// The start or resume of the thread.
pub(super) const THREAD: &str = "thread";
/// The changed agent prompt.
pub(super) const PROMPT: &str = "prompt";

/// What a fresh process hears first. The engine works on requests as they come, so nothing is waited for.
pub(super) fn opening(setup: &Setup) -> Vec<StdinLine> {
    let mut lines = vec![
        request(
            INITIALIZE,
            "initialize",
            json!({
                "clientInfo": {"name": "roundhouse", "title": "Roundhouse", "version": env!("CARGO_PKG_VERSION")},
                // To list and end the commands that outlive their turn.
                "capabilities": {"experimentalApi": true},
            }),
        ),
        made(INITIALIZED, &json!({"method": "initialized"})),
    ];
    if setup.needs_sandbox() {
        lines.push(request(
            SANDBOX,
            "command/exec",
            json!({
                "command": ["/bin/true"],
                "cwd": setup.workspace,
                "sandboxPolicy":
                    {"type": "workspaceWrite", "writableRoots": [setup.workspace], "networkAccess": false},
            }),
        ));
    }
    lines.push(request(SKILLS, "skills/list", json!({"cwds": [setup.workspace]})));
    lines
}

/// The operation id of the question whether a turn made skills.
pub(super) fn recheck_op(turn_id: &str) -> String {
    format!("skills.{turn_id}")
}

/// Asks which skills there are after a turn, in the process's own directory: the workspace.
pub(super) fn recheck_skills(turn_id: &str) -> StdinLine {
    request(&recheck_op(turn_id), "skills/list", json!({"forceReload": true}))
}

/// Starts the thread, or resumes it.
pub(super) fn thread(setup: &Setup, resume: Option<&str>, skills: &[String]) -> StdinLine {
    match resume {
        None => request(THREAD, "thread/start", setup.start(skills)),
        Some(id) => request(THREAD, "thread/resume", setup.resume(id, skills)),
    }
}

/// Tells a resumed thread the changed prompt: what a resume itself is given never reaches the model.
pub(super) fn inject_prompt(thread: &str, text: &str) -> StdinLine {
    let item =
        json!({"type": "message", "role": "developer", "content": [{"type": "input_text", "text": text}]});
    request(PROMPT, "thread/inject_items", json!({"threadId": thread, "items": [item]}))
}

/// A message: a turn of its own, or for the turn that runs. `turn/start` in a running turn would silently steer it.
pub(super) fn deliver(
    delivery: &Delivery<'_>,
    thread: &str,
    running: Option<&str>,
) -> Result<StdinLine, LineError> {
    let id = delivery.delivery_id;
    match Uuid::try_parse(id) {
        Ok(uuid) if uuid.hyphenated().to_string() == id => {}
        _ => return Err(LineError::BadDeliveryId),
    }
    let context = delivery.context.filter(|context| !context.is_empty());
    let input: Vec<Value> = context
        .into_iter()
        .chain([delivery.text])
        .map(|text| json!({"type": "text", "text": text, "text_elements": []}))
        .collect();
    let mut params = json!({"threadId": thread, "clientUserMessageId": id, "input": input});
    Ok(match running {
        None => request(id, "turn/start", params),
        Some(turn) => {
            params["expectedTurnId"] = json!(turn);
            request(id, "turn/steer", params)
        }
    })
}

/// The operation id of a turn's interrupt.
pub(super) fn interrupt_op(turn_id: &str) -> String {
    format!("interrupt.{turn_id}")
}

/// Stops the running turn.
pub(super) fn interrupt(turn_id: &str, thread: &str, native_turn: &str) -> StdinLine {
    request(&interrupt_op(turn_id), "turn/interrupt", json!({"threadId": thread, "turnId": native_turn}))
}

/// The operation id of the line that stands for an interrupt while there is nothing to interrupt yet.
pub(super) fn hold_op(turn_id: &str) -> String {
    format!("hold.{turn_id}")
}

/// Stands for an interrupt until the engine says that the turn has started: before that an interrupt is refused, and
/// the turn would run to its end. The question itself is harmless.
pub(super) fn hold(turn_id: &str) -> StdinLine {
    request(&hold_op(turn_id), "thread/loaded/list", json!({}))
}

/// The operation id of the line that ends a turn's commands.
pub(super) fn clean_op(turn_id: &str) -> String {
    format!("clean.{turn_id}")
}

/// Ends the commands that outlive their turn: an interrupt leaves them running.
pub(super) fn clean(turn_id: &str, thread: &str) -> StdinLine {
    request(&clean_op(turn_id), "thread/backgroundTerminals/clean", json!({"threadId": thread}))
}

/// The operation id of the answer to the permission request in a frame.
pub(super) fn permission_op(frame: u64) -> String {
    format!("permission.{frame}")
}

/// Answers a permission request. A denial has no place for a text to the agent: it goes along as a message to the
/// running turn, in the same write, so that the agent has both or neither.
pub(super) fn answer_permission(
    frame: u64,
    native_id: &Value,
    turn: Option<(&str, &str)>,
    reply: PermissionReply<'_>,
) -> StdinLine {
    let (decision, feedback) = match reply {
        PermissionReply::Allow => ("accept", ""),
        PermissionReply::Deny { feedback } => ("decline", feedback),
    };
    let mut line = made(&permission_op(frame), &json!({"id": native_id, "result": {"decision": decision}}));
    if let Some((thread, native_turn)) = turn.filter(|_| !feedback.is_empty()) {
        let text = format!("The user did not allow this, and said: {feedback}");
        let input = json!([{"type": "text", "text": text, "text_elements": []}]);
        let params = json!({"threadId": thread, "expectedTurnId": native_turn, "input": input});
        line.bytes.extend(request(&format!("feedback.{frame}"), "turn/steer", params).bytes);
    }
    line
}

/// Refuses a request of the engine, so that it does not wait for ever.
pub(super) fn refuse_request(frame: u64, native_id: &Value) -> StdinLine {
    let error = json!({"code": -32601, "message": "not supported by this host"});
    made(&format!("refuse.{frame}"), &json!({"id": native_id, "error": error}))
}

fn request(op: &str, method: &str, params: Value) -> StdinLine {
    made(op, &json!({"id": op, "method": method, "params": params}))
}

fn made(op: &str, line: &Value) -> StdinLine {
    let mut bytes = line.to_string().into_bytes();
    bytes.push(b'\n');
    StdinLine { op: op.to_owned(), bytes }
}

/// Notifications that show that the engine is at work. Others come by themselves, also while a request hangs.
const WORK: [&[u8]; 6] = [
    br#""method":"item/"#,
    br#""method":"turn/"#,
    br#""method":"error""#,
    br#""method":"thread/tokenUsage/"#,
    br#""method":"thread/compacted""#,
    br#""method":"serverRequest/"#,
];

/// Whether a line of output shows that the engine is at work.
pub(super) fn shows_work(line: &[u8]) -> bool {
    let short = &line[..line.len().min(400)];
    let contains = |needle: &[u8]| short.windows(needle.len()).any(|window| window == needle);
    // An answer to us has no method; it is short or its id comes first.
    let answer = !contains(br#""method":"#) && (contains(br#""id":""#) || contains(br#""result":"#));
    answer || WORK.into_iter().any(contains)
}
