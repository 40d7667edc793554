//! What goes to the engine's standard input.

use pretty_assertions::assert_eq;
use roundhouse_engines::{Delivery, LineError, OpenMode, PermissionReply, StdinLine};
use serde_json::{Value, json};

use crate::support::{DELIVERY, NATIVE, Owned, begun, feed, initialized, open, translator};

fn json_of(line: &StdinLine) -> Value {
    assert_eq!(line.bytes.iter().filter(|byte| **byte == b'\n').count(), 1, "one line, with its end");
    assert!(line.bytes.ends_with(b"\n"));
    serde_json::from_slice(&line.bytes).unwrap()
}

#[test]
fn the_handshake_is_sent_to_a_fresh_process_only() {
    let fresh = translator(&open(Some(OpenMode::Start), NATIVE));
    let lines = fresh.opening();
    assert_eq!(lines.len(), 1);
    assert_eq!(lines[0].op, "initialize");
    assert_eq!(
        json_of(&lines[0]),
        json!({"type": "control_request", "request_id": "initialize", "request": {"subtype": "initialize"}})
    );
    assert_eq!(translator(&open(None, NATIVE)).opening(), vec![]);
}

#[test]
fn s64_a_delivery_goes_under_its_own_id_with_the_context_before_the_text() {
    let reader = translator(&open(None, NATIVE));
    let delivery = Delivery { delivery_id: DELIVERY, context: Some("missed"), text: "/clear\n@etc.txt" };
    let line = reader.deliver(&delivery).unwrap();
    assert_eq!(line.op, DELIVERY);
    assert_eq!(
        json_of(&line),
        json!({
            "type": "user",
            "uuid": DELIVERY,
            "message": {"role": "user", "content": [
                {"type": "text", "text": "missed"},
                {"type": "text", "text": "/clear\n@etc.txt"},
            ]},
            "client_composed": true,
        })
    );
}

#[test]
fn slash_commands_and_file_mentions_are_plain_text_with_and_without_context() {
    let reader = translator(&open(None, NATIVE));
    for text in ["/clear", "/compact", "look @etc.txt", "", "!echo", "\u{2028}"] {
        for context in [None, Some(""), Some("before")] {
            let line = reader.deliver(&Delivery { delivery_id: DELIVERY, context, text }).unwrap();
            let value = json_of(&line);
            assert_eq!(value["client_composed"], true, "{text:?} {context:?}");
            let blocks = value["message"]["content"].as_array().unwrap();
            assert_eq!(blocks.len(), if context == Some("before") { 2 } else { 1 });
            assert_eq!(blocks.last().unwrap()["text"], text);
        }
    }
}

#[test]
fn a_delivery_id_must_be_a_uuid_as_the_engine_writes_it() {
    let reader = translator(&open(None, NATIVE));
    for id in ["", "msg_1", "1111111122225333844455555555555", "{11111111-2222-5333-8444-555555555555}"] {
        let delivery = Delivery { delivery_id: id, context: None, text: "x" };
        assert_eq!(reader.deliver(&delivery), Err(LineError::BadDeliveryId), "{id}");
    }
}

#[test]
fn s44_an_interrupt_names_its_turn_so_that_a_second_one_writes_nothing() {
    let reader = translator(&open(None, NATIVE));
    let line = reader.interrupt().unwrap();
    assert_eq!(line, reader.interrupt().unwrap());
    assert_eq!(line.op, "interrupt.trn_1");
    assert_eq!(json_of(&line)["request"], json!({"subtype": "interrupt", "cancel_queued": true}));
    let mut idle = open(None, NATIVE);
    idle.turn_id = None;
    assert_eq!(translator(&idle).interrupt(), Err(LineError::Unsupported));
}

fn asking() -> Vec<Owned> {
    let mut frames = begun();
    frames.push(Owned::line(&json!({"type": "control_request", "request_id": "native-1", "request":
        {"subtype": "can_use_tool", "tool_name": "Bash", "input": {"command": "secret ***"}, "tool_use_id": "t1"}})));
    frames
}

#[test]
fn an_allowed_tool_runs_with_the_engines_own_input() {
    let mut reader = translator(&open(Some(OpenMode::Start), NATIVE));
    let frames = asking();
    feed(reader.as_mut(), &frames);
    let frame = frames.len();
    let request = format!("spl_1.{frame}");
    assert_eq!(reader.standing().pending_permissions, vec![request.clone()]);

    let allow = reader.answer_permission(&request, PermissionReply::Allow).unwrap();
    assert_eq!(allow.op, format!("permission.{frame}"));
    assert_eq!(
        json_of(&allow),
        json!({"type": "control_response", "response":
            {"subtype": "success", "request_id": "native-1", "response": {"behavior": "allow"}}})
    );
    let deny = reader.answer_permission(&request, PermissionReply::Deny { feedback: "not today" }).unwrap();
    assert_eq!(json_of(&deny)["response"]["response"], json!({"behavior": "deny", "message": "not today"}));
    // The engine takes a denial without a message for an invalid answer.
    let bare = reader.answer_permission(&request, PermissionReply::Deny { feedback: "" }).unwrap();
    assert!(!json_of(&bare)["response"]["response"]["message"].as_str().unwrap().is_empty());
}

#[test]
fn the_first_answer_wins_because_the_intent_is_in_the_frames() {
    let mut reader = translator(&open(Some(OpenMode::Start), NATIVE));
    let mut frames = asking();
    let request = format!("spl_1.{}", frames.len());
    frames.push(Owned::Intent(format!("permission.{}", frames.len())));
    feed(reader.as_mut(), &frames);
    assert_eq!(reader.standing().pending_permissions, Vec::<String>::new());
    assert_eq!(reader.answer_permission(&request, PermissionReply::Allow), Err(LineError::NoSuchRequest));
}

#[test]
fn a_question_without_a_turn_is_answered_no_and_an_unknown_one_is_refused() {
    use roundhouse_engines::Output;

    let mut reader = translator(&open(Some(OpenMode::Start), NATIVE));
    let mut frames = initialized();
    frames.push(Owned::line(&json!({"type": "control_request", "request_id": "n", "request":
        {"subtype": "can_use_tool", "tool_name": "Bash", "input": {}}})));
    frames.push(Owned::line(&json!({"type": "control_request", "request_id": "h", "request":
        {"subtype": "hook_callback"}})));
    let outputs = feed(reader.as_mut(), &frames);
    let replies: Vec<&StdinLine> = outputs
        .iter()
        .filter_map(|output| match output {
            Output::Reply(line) => Some(line),
            _ => None,
        })
        .collect();
    assert_eq!(replies.len(), 2);
    assert_eq!(json_of(replies[0])["response"]["response"]["behavior"], "deny");
    assert_eq!(json_of(replies[1])["response"]["subtype"], "error");
    assert_ne!(replies[0].op, replies[1].op);
}
