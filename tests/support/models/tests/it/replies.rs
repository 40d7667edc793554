//! What a reply looks like, and which one a request gets.

use roundhouse_models::{Matcher, Reply, Script};
use serde_json::{Value, json};

use crate::client::{ask, ask_plain, body, post, send, server};

#[tokio::test]
async fn a_stream_has_the_events_of_the_api_in_their_order() {
    let server = server().await;
    let answer =
        ask(&server, "[[thinking:hm]][[text:a]][[text:b]][[break]][[text:c]][[bash:ls]]").await.whole().await;
    assert!(answer.is_complete() && answer.text().contains("content-type: text/event-stream"));
    let expected = [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ];
    assert_eq!(answer.kinds(), expected);
    let events = answer.events();
    assert_eq!(events[12]["content_block"]["name"], "Bash");
    assert_eq!((&events[14]["index"], &events[15]["delta"]["stop_reason"]), (&json!(3), &json!("tool_use")));
    assert_eq!(events[15]["usage"]["output_tokens"], 25);
}

#[tokio::test]
async fn a_document_says_the_same_as_a_stream() {
    let server = server().await;
    let script = "[[usage in=1 out=2 read=3 created=4]][[text:a]][[slow chunks=2 delay=1:b]][[bash:ls]]";
    let answer = ask_plain(&server, script).await.whole().await.json();
    assert_eq!(answer["content"][0], json!({"type": "text", "text": "abb"}));
    assert_eq!(answer["content"][1]["input"]["command"], "ls");
    assert_eq!((&answer["stop_reason"], &answer["usage"]["output_tokens"]), (&json!("tool_use"), &json!(2)));
    assert_eq!(ask(&server, script).await.whole().await.said(), "abb");
}

#[tokio::test]
async fn huge_text_has_its_size() {
    let server = server().await;
    let answer = ask(&server, "[[huge bytes=1000001 chunk=1000]]").await.whole().await;
    assert_eq!(answer.said().len(), 1_000_001);
    assert_eq!(answer.kinds().len(), 1001 + 5);
}

#[tokio::test]
async fn max_tokens_and_refusal_are_told() {
    let server = server().await;
    for (script, stop) in
        [("[[max_tokens:x]]", "max_tokens"), ("[[refusal]]", "refusal"), ("plain", "end_turn")]
    {
        assert_eq!(ask_plain(&server, script).await.whole().await.json()["stop_reason"], stop, "{script}");
    }
}

#[tokio::test]
async fn each_step_of_a_turn_gets_its_reply_and_a_retry_the_same() {
    let server = server().await;
    let mut messages = vec![json!({"role": "user", "content": "[[bash:1]][[bash:2]][[text:end]]"})];
    let mut said: Vec<Value> = Vec::new();
    for _ in 0..4 {
        let request = body(&json!(messages), false).to_string();
        let first = send(&server, "POST", "/v1/messages", &request).await.whole().await.json();
        let again = send(&server, "POST", "/v1/messages", &request).await.whole().await.json();
        assert_eq!(first["stop_reason"], again["stop_reason"]);
        said.push(
            first["content"][0]["input"]["command"]
                .as_str()
                .map_or_else(|| first["content"][0]["text"].clone(), Into::into),
        );
        messages.push(json!({"role": "assistant", "content": first["content"]}));
        messages.push(json!({"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "[[text:no]]"}]}));
    }
    assert_eq!(said, ["1", "2", "end", "end"]);
    assert_eq!(server.models().count_for("[[bash:1]]"), 8);
}

#[tokio::test]
async fn rules_come_before_markers_and_the_default_last() {
    let server = server().await;
    let models = server.models();
    models.rule(Matcher::Contains("ruled".to_owned()), Script::text("by rule"));
    models.rule(Matcher::when(|conversation| conversation.model() == "other"), Script::text("by model"));
    assert_eq!(ask(&server, "ruled [[text:by marker]]").await.whole().await.said(), "by rule");
    assert_eq!(ask(&server, "[[text:by marker]]").await.whole().await.said(), "by marker");
    assert_eq!(ask(&server, "nothing").await.whole().await.said(), "ok");
    models.clear_rules();
    assert_eq!(ask(&server, "ruled").await.whole().await.said(), "ok");
}

#[tokio::test]
async fn a_queued_script_is_for_one_turn_with_its_steps_and_retries() {
    let server = server().await;
    let models = server.models();
    models.next(Script::new(vec![Reply::default().bash("one"), Reply::default().text("one done")]));
    models.next(Script::text("two"));
    let first = json!({"role": "user", "content": "first"});
    let ask_with = async |messages: Value| {
        let request = body(&messages, false).to_string();
        post(&server, "/v1/messages", &request).await.json()["content"][0].clone()
    };
    assert_eq!(ask_with(json!([first])).await["input"]["command"], "one");
    assert_eq!(ask_with(json!([first])).await["input"]["command"], "one", "a retry");
    let call = json!({"role": "assistant", "content": "x"});
    let result =
        json!({"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": ""}]});
    assert_eq!(ask_with(json!([first, call, result])).await["text"], "one done");
    let second = json!({"role": "user", "content": "first"});
    assert_eq!(ask_with(json!([first, call, second])).await["text"], "two", "the same text, a later turn");
    assert_eq!(ask_with(json!([first, call, second, call, first])).await["text"], "ok");
}

#[tokio::test]
async fn a_malformed_marker_is_a_400_that_names_it() {
    let server = server().await;
    let answer = ask(&server, "[[txet:x]]").await.whole().await;
    assert_eq!(answer.status(), 400);
    assert!(answer.json()["error"]["message"].as_str().is_some_and(|text| text.contains("txet")));
}

#[tokio::test]
async fn what_the_cli_asks_besides_is_answered_and_counts_for_no_turn() {
    let server = server().await;
    let messages = json!([{"role": "user", "content": "[[text:no]]"}]);
    let counted =
        post(&server, "/v1/messages/count_tokens", &body(&messages, false).to_string()).await.json();
    assert!(counted["input_tokens"].as_u64() > Some(0));
    assert!(
        !crate::client::get(&server, "/v1/models").await.json()["data"]
            .as_array()
            .expect("a list")
            .is_empty()
    );
    assert_eq!(send(&server, "HEAD", "/api/hello", "").await.whole().await.status(), 200);
    assert_eq!(crate::client::get(&server, "/nosuch").await.status(), 404);
    let mut title = body(&messages, false);
    title["output_config"] = json!({"format": {"type": "json_schema"}});
    let title = post(&server, "/v1/messages", &title.to_string()).await.json();
    assert_eq!(title["content"][0]["text"], r#"{"title":"Scripted"}"#);
    assert_eq!((server.models().count_for(""), server.models().total()), (0, 5));
}
