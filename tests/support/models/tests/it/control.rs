//! The log and the control surface, in the process and over HTTP.

use std::time::Duration;

use roundhouse_models::{Error, ModelServer, Options};
use serde_json::json;

use crate::client::{LIMIT, ask, body, get, post, server};

#[tokio::test]
async fn every_request_is_logged_and_can_be_read_over_http() {
    let server = server().await;
    let messages = json!([
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": [{"type": "text", "text": "context"}, {"type": "text", "text": "three"}]},
    ]);
    post(&server, "/v1/messages", &body(&messages, false).to_string()).await;
    ask(&server, "other").await.whole().await;
    let log = get(&server, "/__requests").await.json();
    assert_eq!(log["total"], 2, "the control surface itself is not logged");
    let first = &log["requests"][0];
    assert_eq!(
        (&first["number"], &first["method"], &first["path"]),
        (&json!(1), &json!("POST"), &json!("/v1/messages"))
    );
    assert_eq!(
        (&first["turn_text"], &first["ending"], &first["kind"]),
        (&json!("three"), &json!("sent"), &json!("main"))
    );
    assert_eq!((&first["has_key"], &first["headers"]["x-api-key"]), (&json!(true), &json!("hidden")));
    assert_eq!(first["body"]["messages"], messages);
    let record = &server.models().requests()[0];
    assert!(record.key_is("dummy") && !record.key_is("other"));
    assert_eq!(record.header("host"), Some("x"));
    let dialogue: Vec<_> = record.conversation().dialogue().into_iter().map(|(_, text)| text).collect();
    assert_eq!(dialogue, ["one", "two", "context", "three"]);
    assert_eq!(
        get(&server, "/__requests?after=1").await.json()["requests"].as_array().map(Vec::len),
        Some(1)
    );
    assert_eq!(get(&server, "/__requests?text=thre").await.json()["requests"][0]["number"], 1);
    assert_eq!(get(&server, "/__count?text=other").await.json(), json!({"count": 1}));
}

#[tokio::test]
async fn gates_and_rules_work_over_http() {
    let server = server().await;
    let rule = json!({"contains": "http", "script": "[[text:a]][[gate:g]][[text:b]]", "times": 1});
    assert_eq!(post(&server, "/__rules", &rule.to_string()).await.status(), 204);
    assert_eq!(post(&server, "/__rules", r#"{"script":"[[nosuch]]"}"#).await.status(), 400);
    assert_eq!(get(&server, "/__gates/g?timeout_ms=1").await.status(), 408);
    let answer = ask(&server, "by http").await;
    let state = get(&server, "/__gates/g").await;
    assert_eq!((state.status(), state.json()), (200, json!({"name": "g", "reached": 1, "open": false})));
    post(&server, "/__gates/g/release", "").await;
    assert_eq!(answer.whole().await.said(), "ab");
    assert_eq!(ask(&server, "by http again").await.whole().await.said(), "ok", "the rule was for one turn");
    assert_eq!(post(&server, "/__gates/g/close", "").await.json()["open"], false);
}

#[tokio::test]
async fn a_reset_forgets_everything_and_frees_who_waits() {
    let server = server().await;
    let waiting = ask(&server, "[[gate:g]][[text:x]]").await;
    server.models().wait_gate("g", LIMIT).await.expect("reached");
    assert_eq!(post(&server, "/__reset", "").await.status(), 204);
    assert_eq!(waiting.whole().await.said(), "x");
    assert_eq!((server.models().total(), server.models().gate("g").reached), (0, 0));
}

#[tokio::test]
async fn waiting_for_requests_ends_with_them_or_says_what_was_there() {
    let server = server().await;
    let models = server.models().clone();
    let waiting = tokio::spawn(async move { models.wait_for_text("wanted", 2, LIMIT).await });
    ask(&server, "wanted 1").await.whole().await;
    ask(&server, "wanted 2").await.whole().await;
    assert_eq!(waiting.await.expect("no panic").expect("in time").len(), 2);
    let missed = server.models().wait_for_text("never", 1, Duration::from_millis(1)).await;
    let Err(Error::TimedOut { seen, .. }) = missed else { panic!("a timeout expected: {missed:?}") };
    assert!(seen.contains("wanted 2"), "{seen}");
    let missed = server.models().wait_gate("g", Duration::from_millis(1)).await.expect_err("never reached");
    assert!(missed.to_string().contains("gate g"), "{missed}");
}

#[tokio::test]
async fn the_log_is_bounded() {
    let options = Options { max_records: 3, max_body_bytes: 500, ..Options::default() };
    let server = ModelServer::start(options).await.expect("a free port");
    for n in 0..5 {
        ask(&server, &format!("{n} {}", "x".repeat(100))).await.whole().await;
    }
    assert_eq!(server.models().requests()[2].turn_text().len(), 102);
    let records = server.models().requests();
    let kept: Vec<_> = records.iter().map(|record| (record.number(), record.body_dropped())).collect();
    assert_eq!(kept, [(3, true), (4, false), (5, false)]);
    assert!(records[0].turn_text().starts_with("2 "));
    ask(&server, &"é".repeat(3000)).await.whole().await;
    assert_eq!(server.models().requests()[2].turn_text().len(), 4096, "cut between two characters");
}

#[tokio::test]
async fn a_taken_port_is_refused_with_its_address() {
    let first = server().await;
    let options = Options { port: first.address().port(), ..Options::default() };
    let problem = ModelServer::start(options).await.expect_err("taken");
    assert_eq!(problem.to_string(), format!("cannot listen on {}", first.address()));
}

#[test]
fn the_binary_tells_its_address_and_ends_on_sigterm() {
    use std::{
        io::{BufRead, BufReader, Read, Write},
        process::{Command, Stdio},
    };
    let mut child = Command::new(env!("CARGO_BIN_EXE_scripted-models"))
        .args(["--default-script", "[[text:from the default]]"])
        .stdout(Stdio::piped())
        .spawn()
        .expect("started");
    let mut ready = String::new();
    BufReader::new(child.stdout.take().expect("piped")).read_line(&mut ready).expect("a line");
    let ready: serde_json::Value = serde_json::from_str(&ready).expect("JSON");
    let address =
        ready["url"].as_str().and_then(|url| url.strip_prefix("http://")).expect("a URL").to_owned();
    let mut socket = std::net::TcpStream::connect(address).expect("connected");
    let body = body(&json!([{"role": "user", "content": "x"}]), false).to_string();
    let head = format!(
        "POST /v1/messages HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    socket.write_all(format!("{head}{body}").as_bytes()).expect("sent");
    let mut answer = String::new();
    socket.read_to_string(&mut answer).expect("read");
    assert!(answer.contains("from the default"), "{answer}");
    let pid = child.id().to_string();
    assert!(Command::new("kill").args(["-TERM", &pid]).status().expect("run").success());
    assert!(child.wait().expect("waited").success());
    let wrong = Command::new(env!("CARGO_BIN_EXE_scripted-models"))
        .args(["--default-script", "x"])
        .output()
        .expect("run");
    assert!(!wrong.status.success());
}
