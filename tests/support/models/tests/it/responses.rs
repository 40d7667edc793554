//! The Responses API: what a reply and a fault look like in it, and which reply a request gets.

use roundhouse_models::{Api, Ending, Matcher, ModelServer, RequestKind, Script};
use serde_json::{Value, json};

use crate::client::{Answer, LIMIT, get, post, send, server};

fn body(input: &Value, stream: bool) -> String {
    json!({"model": "m", "stream": stream, "input": input, "prompt_cache_key": "thread"}).to_string()
}

fn user(text: &str) -> Value {
    json!({"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]})
}

async fn ask(server: &ModelServer, text: &str) -> Answer {
    send(server, "POST", "/v1/responses", &body(&json!([user(text)]), true)).await
}

async fn document(server: &ModelServer, input: &Value) -> Value {
    post(server, "/v1/responses", &body(input, false)).await.json()
}

/// The text that a stream said.
fn said(answer: &Answer) -> String {
    let events = answer.events().into_iter();
    events.filter_map(|event| event["delta"].as_str().map(str::to_owned)).collect()
}

#[tokio::test]
async fn a_stream_has_the_events_of_the_api_in_their_order() {
    let server = server().await;
    let answer =
        ask(&server, "[[thinking:hm]][[text:a]][[text:b]][[break]][[text:c]][[bash:ls]]").await.whole().await;
    assert!(answer.is_complete() && answer.text().contains("content-type: text/event-stream"));
    let text = ["output_item.added", "content_part.added", "output_text.delta"];
    let text_end = ["output_text.done", "content_part.done", "output_item.done"];
    let reasoning = [
        "output_item.added",
        "reasoning_summary_part.added",
        "reasoning_summary_text.delta",
        "reasoning_summary_text.done",
        "reasoning_summary_part.done",
        "output_item.done",
    ];
    let call = [
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
    ];
    let expected: Vec<String> = [
        &["created", "in_progress"][..],
        &reasoning,
        &text,
        &["output_text.delta"],
        &text_end,
        &text,
        &text_end,
        &call,
        &["completed"],
    ]
    .concat()
    .into_iter()
    .map(|kind| format!("response.{kind}"))
    .collect();
    assert_eq!(answer.kinds(), expected);
    let events = answer.events();
    let numbers: Vec<_> = events.iter().filter_map(|event| event["sequence_number"].as_u64()).collect();
    assert_eq!(numbers, (0..events.len() as u64).collect::<Vec<_>>());
    let response = &events.last().expect("the end")["response"];
    let kinds: Vec<_> =
        response["output"].as_array().expect("items").iter().map(|item| &item["type"]).collect();
    assert_eq!(kinds, ["reasoning", "message", "message", "function_call"]);
    assert_eq!(response["output"][1]["content"][0]["text"], "ab");
    assert_eq!(response["output"][3]["name"], "exec_command");
    assert_eq!(response["output"][3]["arguments"], r#"{"cmd":"ls"}"#);
    let ids: std::collections::HashSet<_> =
        events.iter().filter_map(|event| event["response"]["id"].as_str()).collect();
    assert_eq!(ids.len(), 1, "one response");
}

#[tokio::test]
async fn a_document_says_the_same_as_a_stream() {
    let server = server().await;
    let script = "[[usage in=1 out=2 read=3 created=4]][[text:a]][[slow chunks=2 delay=1:b]][[bash:ls]]";
    let answer = document(&server, &json!(script)).await;
    assert_eq!(
        (&answer["status"], &answer["output"][0]["content"][0]["text"]),
        (&json!("completed"), &json!("abb"))
    );
    assert_eq!(answer["output"][1]["name"], "exec_command");
    let usage = &answer["usage"];
    assert_eq!(usage["input_tokens_details"], json!({"cached_tokens": 3, "cache_write_tokens": 4}));
    assert_eq!(
        (&usage["input_tokens"], &usage["output_tokens"], &usage["total_tokens"]),
        (&json!(8), &json!(2), &json!(10))
    );
    assert_eq!(said(&ask(&server, "[[huge bytes=1000001 chunk=1000]]").await.whole().await).len(), 1_000_001);
}

#[tokio::test]
async fn an_incomplete_answer_and_a_refusal_are_told() {
    let server = server().await;
    let cut = document(&server, &json!("[[max_tokens:x]]")).await;
    assert_eq!(
        (&cut["status"], &cut["incomplete_details"]["reason"]),
        (&json!("incomplete"), &json!("max_output_tokens"))
    );
    let streamed = ask(&server, "[[max_tokens:x]]").await.whole().await;
    assert_eq!(streamed.kinds().pop().as_deref(), Some("response.incomplete"));
    let refused = document(&server, &json!("[[refusal:no]]")).await;
    assert_eq!(refused["output"][0]["content"][0], json!({"type": "refusal", "refusal": "no"}));
}

#[tokio::test]
async fn each_step_of_a_turn_gets_its_reply_and_a_retry_the_same() {
    let server = server().await;
    let mut input = vec![user("[[thinking:t]][[bash:1]][[and]][[bash:2]][[bash:3]][[text:end]]")];
    let mut steps = Vec::new();
    for _ in 0..4 {
        let first = document(&server, &json!(input)).await;
        let again = document(&server, &json!(input)).await;
        let items = first["output"].as_array().expect("items").clone();
        let kinds = |answer: &Value| -> Vec<Value> {
            answer["output"].as_array().expect("items").iter().map(|item| item["type"].clone()).collect()
        };
        assert_eq!(kinds(&first), kinds(&again));
        let told = items.last().expect("an item");
        steps.push(
            told["arguments"]
                .as_str()
                .or_else(|| told["content"][0]["text"].as_str())
                .expect("text")
                .to_owned(),
        );
        let calls: Vec<_> =
            items.iter().filter_map(|item| item["call_id"].as_str()).map(str::to_owned).collect();
        input.extend(items);
        for id in calls {
            input.push(json!({"type": "function_call_output", "call_id": id, "output": "[[text:no]]"}));
        }
    }
    assert_eq!(steps, [r#"{"cmd":"2"}"#, r#"{"cmd":"3"}"#, "end", "end"]);
    assert_eq!(server.models().count_for("[[bash:1]]"), 8);
}

#[tokio::test]
async fn both_apis_share_port_rules_gates_counters_and_log() {
    let server = server().await;
    let models = server.models();
    models.rule(
        Matcher::when(|asked| asked.api() == Api::Responses && asked.turn_text() == "x"),
        Script::text("ruled"),
    );
    assert_eq!(said(&ask(&server, "x").await.whole().await), "ruled");
    assert_eq!(crate::client::ask(&server, "x").await.whole().await.said(), "ok");
    let held = ask(&server, "[[text:before]][[gate:g]][[text:after]]").await.until("before").await;
    assert_eq!(models.wait_gate("g", LIMIT).await.expect("reached").reached, 1);
    assert_eq!((said(&held).as_str(), models.requests()[2].ending()), ("before", Ending::Open));
    models.release_gate("g");
    assert_eq!(said(&held.whole().await), "beforeafter");
    let status = async |text: &str| ask(&server, text).await.whole().await.status();
    assert_eq!(status("[[error 500 times=1 scope=s]]1").await, 500);
    let other = crate::client::ask(&server, "[[error 500 times=1 scope=s]]2").await.whole().await;
    assert_eq!(other.status(), 200, "counted together");
    let apis: Vec<_> = models.requests().iter().map(|record| record.api().as_str()).collect();
    assert_eq!(apis, ["responses", "messages", "responses", "responses", "messages"]);
    assert_eq!(models.requests()[0].to_json()["api"], "responses");
    assert!(models.requests().iter().all(|record| record.kind() == RequestKind::Main));
}

#[tokio::test]
async fn http_errors_have_status_type_code_and_headers() {
    let server = server().await;
    for (script, status, kind, code, header) in [
        ("[[error 400]]", 400, "invalid_request_error", Value::Null, ""),
        ("[[error 401]]", 401, "invalid_request_error", json!("invalid_api_key"), ""),
        ("[[error 403]]", 403, "invalid_request_error", json!("unsupported_country_region_territory"), ""),
        ("[[error 404]]", 404, "invalid_request_error", json!("model_not_found"), ""),
        (
            "[[error 429 retry_after=7]]",
            429,
            "rate_limit_error",
            json!("rate_limit_exceeded"),
            "retry-after: 7",
        ),
        ("[[error 429 kind=insufficient_quota]]", 429, "insufficient_quota", json!("insufficient_quota"), ""),
        ("[[limit reset=99]]", 429, "usage_limit_reached", Value::Null, "x-codex-primary-reset-at: 99"),
        ("[[error 500]]", 500, "server_error", Value::Null, ""),
        ("[[error 503]]", 503, "server_error", Value::Null, ""),
        ("[[error 529]]", 503, "service_unavailable_error", json!("server_is_overloaded"), ""),
        ("[[txet:x]]", 400, "invalid_request_error", Value::Null, ""),
    ] {
        let answer = ask(&server, script).await.whole().await;
        let error = answer.json()["error"].clone();
        assert_eq!(
            (answer.status(), &error["type"], &error["code"]),
            (status, &json!(kind), &code),
            "{script}"
        );
        assert!(answer.text().contains(header), "{script}");
        assert!(!answer.text().contains("anthropic"), "{script}: {}", answer.text());
    }
    assert_eq!(ask(&server, "[[limit reset=99]]").await.whole().await.json()["error"]["resets_at"], 99);
    assert!(!ask(&server, "[[error 429]]").await.whole().await.text().contains("retry-after"));
}

#[tokio::test]
async fn what_breaks_a_stream_comes_where_the_script_says() {
    let server = server().await;
    for (script, code) in [
        ("[[too_long]]", "context_length_exceeded"),
        ("[[credit]]", "insufficient_quota"),
        ("[[text:a]][[sse_error]][[text:b]]", "server_is_overloaded"),
        ("[[text:a]][[sse_error:rate_limit_exceeded]]", "rate_limit_exceeded"),
    ] {
        let answer = ask(&server, script).await.whole().await;
        let last = answer.events().pop().expect("an event");
        assert_eq!(answer.status(), 200, "{script}");
        assert_eq!(
            (&last["type"], &last["response"]["error"]["code"]),
            (&json!("response.failed"), &json!(code)),
            "{script}"
        );
    }
    let plain = post(&server, "/v1/responses", &body(&json!("[[too_long]]"), false)).await;
    assert_eq!((plain.status(), &plain.json()["error"]["code"]), (400, &json!("context_length_exceeded")));
    let cut = ask(&server, "[[text:part]][[cut]][[text:rest]]").await.whole().await;
    assert_eq!((said(&cut).as_str(), cut.is_complete()), ("part", false));
    let ended = ask(&server, "[[text:part]][[end]][[text:rest]]").await.whole().await;
    assert_eq!((said(&ended).as_str(), ended.is_complete()), ("part", true));
    assert!(!ended.kinds().contains(&"response.completed".to_owned()));
    let garbage = ask(&server, "[[text:a]][[garbage]][[text:b]]").await.whole().await;
    assert!(garbage.text().contains("no json") && said(&garbage) == "ab");
    for script in ["[[hang]]", "[[text:x]][[stall]]"] {
        server.models().reset();
        let mut answer = ask(&server, script).await;
        server.models().wait_for_text("[[", 1, LIMIT).await.expect("asked");
        if !script.contains("hang") {
            answer = answer.until("output_text.delta").await;
        }
        drop(answer);
        let asked = &server.models().requests()[0];
        assert_eq!(
            server.models().wait_ending(asked, LIMIT).await.expect("ended"),
            Ending::Abandoned,
            "{script}"
        );
    }
}

#[tokio::test]
async fn what_belongs_to_no_turn_is_answered_too() {
    let server = server().await;
    let summary = user("You are performing a CONTEXT CHECKPOINT COMPACTION. [[text:no]]");
    let answer = document(&server, &json!([user("[[text:no]]"), summary])).await;
    assert_eq!(answer["output"][0]["content"][0]["text"], "scripted summary");
    assert_eq!(server.models().requests()[0].kind(), RequestKind::Side);
    let wrong = post(&server, "/v1/responses", r#"{"messages":[]}"#).await;
    assert_eq!((wrong.status(), server.models().requests()[1].kind()), (400, RequestKind::Other));
    let nowhere = get(&server, "/v1/responses/resp_1").await;
    assert_eq!((nowhere.status(), &nowhere.json()["error"]["type"]), (404, &json!("invalid_request_error")));
}
