//! The lines that go to the engine.

use pretty_assertions::assert_eq;
use roundhouse_engines::{Delivery, Frame, FrameBody, LineError, OpenMode};
use serde_json::json;

use crate::support::{DELIVERY, THREAD, codex, feed, initialized, open, translator, value_of};

fn ready() -> Box<dyn roundhouse_engines::Translator> {
    let mut reader = translator(&open(Some(OpenMode::Start), ""));
    feed(reader.as_mut(), &initialized());
    reader
}

#[test]
fn context_is_the_first_input_item_of_the_same_message() {
    let delivery = Delivery { delivery_id: DELIVERY, context: Some("earlier"), text: "/compact $x @y !z\n" };
    let line = ready().deliver(&delivery).unwrap();
    assert_eq!(line.op, DELIVERY);
    assert_eq!(
        value_of(&line),
        json!({"id": DELIVERY, "method": "turn/start", "params": {
            "threadId": THREAD,
            "clientUserMessageId": DELIVERY,
            "input": [
                {"type": "text", "text": "earlier", "text_elements": []},
                {"type": "text", "text": "/compact $x @y !z\n", "text_elements": []},
            ],
        }})
    );
    let bare = Delivery { context: Some(""), ..delivery };
    assert_eq!(value_of(&ready().deliver(&bare).unwrap())["params"]["input"].as_array().unwrap().len(), 1);
}

#[test]
fn s19_only_a_uuid_is_a_delivery_id() {
    for id in ["", "x", "-rf", "11111111222253338444555555555555", "11111111-2222-5333-8444-55555555555A"] {
        let delivery = Delivery { delivery_id: id, context: None, text: "t" };
        assert_eq!(ready().deliver(&delivery), Err(LineError::BadDeliveryId), "{id:?}");
    }
}

#[test]
fn nothing_is_delivered_before_the_thread_is_open() {
    let delivery = Delivery { delivery_id: DELIVERY, context: None, text: "t" };
    let reader = translator(&open(Some(OpenMode::Start), ""));
    assert_eq!(reader.deliver(&delivery), Err(LineError::NotNow));
}

#[test]
fn our_request_ids_are_strings_and_equal_the_operation() {
    let mut start = open(Some(OpenMode::Start), "");
    start.carry.setup =
        Some(json!({"workspace": "/w", "model": "m", "effort": "high", "permissions": "ask", "prompt": "p"}));
    for line in translator(&start).opening() {
        let value = value_of(&line);
        match value.get("id") {
            Some(id) => assert_eq!(id, &json!(line.op)),
            None => assert_eq!(value, json!({"method": "initialized"})),
        }
    }
    assert!(ready().opening().is_empty(), "a thread without a setup is told nothing");
}

#[test]
fn what_comes_by_itself_is_no_activity() {
    let counts = |line: &str| {
        codex().counts_as_activity(&Frame { number: 1, body: FrameBody::Stdout(line.as_bytes()) })
    };
    for line in [
        r#"{"method":"item/agentMessage/delta","params":{"delta":"x"}}"#,
        r#"{"method":"turn/completed","params":{}}"#,
        r#"{"method":"error","params":{"willRetry":true}}"#,
        r#"{"id":"thread","result":{}}"#,
    ] {
        assert!(counts(line), "{line}");
    }
    for line in [
        "",
        "noise",
        r#"{"method":"remoteControl/status/changed","params":{}}"#,
        r#"{"method":"account/rateLimits/updated","params":{}}"#,
        r#"{"method":"thread/status/changed","params":{}}"#,
        r#"{"method":"skills/changed","params":{}}"#,
    ] {
        assert!(!counts(line), "{line}");
    }
    assert!(!codex().counts_as_activity(&Frame { number: 1, body: FrameBody::Stderr(b"x") }));
}
