//! Faults and gates, each seen by the client.

use std::time::Duration;

use roundhouse_models::{Ending, ModelServer, Options};
use tokio::net::TcpStream;

use crate::client::{LIMIT, ask, ask_plain, server};

#[tokio::test]
async fn a_gate_lets_out_what_came_before_and_then_waits() {
    let server = server().await;
    let models = server.models();
    let answer = ask(&server, "[[text:before]][[gate:g]][[text:after]]").await.until("before").await;
    assert_eq!(models.wait_gate("g", LIMIT).await.expect("reached").reached, 1);
    assert_eq!(models.requests()[0].ending(), Ending::Open);
    assert_eq!(answer.said(), "before");
    models.release_gate("g");
    let answer = answer.whole().await;
    assert_eq!(answer.said(), "beforeafter");
    assert_eq!(answer.kinds().iter().filter(|kind| *kind == "content_block_start").count(), 1);
    assert_eq!(models.requests()[0].ending(), Ending::Sent);
}

#[tokio::test]
async fn a_hold_keeps_back_the_headers_too() {
    let server = server().await;
    let held = ask_plain(&server, "[[hold:h]][[text:x]]").await;
    server.models().wait_gate("h", LIMIT).await.expect("reached");
    assert_eq!(held.text(), "");
    server.models().release_gate("h");
    assert_eq!(held.whole().await.json()["content"][0]["text"], "x");
}

#[tokio::test]
async fn a_client_that_leaves_at_a_gate_or_a_hang_is_noted() {
    let server = server().await;
    let models = server.models();
    for script in ["[[text:x]][[gate:never]]", "[[hang]]", "[[text:x]][[stall]]"] {
        models.reset();
        let mut answer = ask(&server, script).await;
        models.wait_for_text("[[", 1, LIMIT).await.expect("asked");
        if !script.contains("hang") {
            answer = answer.until("text_delta").await;
        }
        assert_eq!(models.requests()[0].ending(), Ending::Open, "{script}");
        drop(answer);
        let asked = &models.requests()[0];
        assert_eq!(models.wait_ending(asked, LIMIT).await.expect("ended"), Ending::Abandoned, "{script}");
    }
}

#[tokio::test]
async fn http_errors_have_status_kind_and_headers() {
    let server = server().await;
    for (script, status, kind, header) in [
        ("[[error 400]]", 400, "invalid_request_error", ""),
        ("[[error 401]]", 401, "authentication_error", ""),
        ("[[error 403]]", 403, "permission_error", ""),
        ("[[error 404]]", 404, "not_found_error", ""),
        ("[[error 429]]", 429, "rate_limit_error", ""),
        ("[[error 429 retry_after=7]]", 429, "rate_limit_error", "retry-after: 7"),
        ("[[limit]]", 429, "rate_limit_error", "x-should-retry: false"),
        ("[[limit reset=99]]", 429, "rate_limit_error", "anthropic-ratelimit-unified-reset: 99"),
        ("[[error 500]]", 500, "api_error", ""),
        ("[[error 529]]", 529, "overloaded_error", ""),
        ("[[error 503 kind=odd]]", 503, "odd", ""),
        ("[[too_long]]", 400, "invalid_request_error", ""),
        ("[[credit]]", 400, "invalid_request_error", ""),
    ] {
        let answer = ask(&server, script).await.whole().await;
        assert_eq!((answer.status(), &answer.json()["error"]["type"]), (status, &kind.into()), "{script}");
        assert!(answer.text().contains(header), "{script}");
    }
    let answer = ask(&server, "[[error 429]]").await.whole().await;
    assert!(!answer.text().contains("retry-after"));
}

#[tokio::test]
async fn a_fault_happens_so_often_and_is_counted_by_text_or_by_scope() {
    let server = server().await;
    let status = async |text: &str| ask(&server, text).await.whole().await.status();
    let script = "a [[error 529 times=2]][[text:x]]";
    assert_eq!([status(script).await, status(script).await, status(script).await], [529, 529, 200]);
    assert_eq!(status("another a [[error 529 times=2]][[text:x]]").await, 529);
    assert_eq!(status("[[error 500 times=1 scope=s]]1").await, 500);
    assert_eq!(status("[[error 500 times=1 scope=s]]2").await, 200);
}

#[tokio::test]
async fn a_cut_stream_ends_without_its_end() {
    let server = server().await;
    let answer = ask(&server, "[[text:part]][[cut]][[text:rest]]").await.whole().await;
    assert_eq!(answer.said(), "part");
    assert!(!answer.is_complete());
    let plain = ask_plain(&server, "[[text:part]][[cut]][[text:rest]]").await.whole().await;
    assert_eq!(plain.json()["content"][0]["text"], "partrest", "a document is spared");
    let plain = ask_plain(&server, "[[text:part]][[cut plain]]").await.whole().await;
    assert!(!plain.is_complete());
}

#[tokio::test]
async fn errors_in_a_stream_and_garbage_come_where_the_script_says() {
    let server = server().await;
    let answer = ask(&server, "[[text:a]][[sse_error:overloaded_error]][[text:b]]").await.whole().await;
    let last = answer.events().pop().expect("an event");
    assert_eq!((&last["type"], &last["error"]["type"]), (&"error".into(), &"overloaded_error".into()));
    assert_eq!((answer.said().as_str(), answer.is_complete()), ("a", true));
    let answer = ask(&server, "[[text:a]][[garbage]][[text:b]]").await.whole().await;
    assert!(answer.text().contains("no json"));
    assert_eq!(answer.said(), "ab");
    assert_eq!(ask_plain(&server, "[[sse_error plain]]").await.whole().await.status(), 529);
    assert!(ask_plain(&server, "[[garbage plain]]").await.whole().await.text().contains("<html>"));
}

#[tokio::test]
async fn slow_chunks_take_their_time() {
    let server = server().await;
    let start = std::time::Instant::now();
    let answer = ask(&server, "[[slow chunks=4 delay=30:w ]][[pause ms=30]]").await.whole().await;
    assert_eq!(answer.said(), "w w w w ");
    assert!(start.elapsed() >= Duration::from_millis(120));
}

#[tokio::test]
async fn a_stopped_server_refuses_and_closes_and_can_come_back_on_its_port() {
    let server = server().await;
    let address = server.address();
    let models = server.models().clone();
    let open = ask(&server, "[[text:x]][[stall]]").await.until("text_delta").await;
    server.stop().await;
    assert!(!open.whole().await.is_complete());
    assert!(TcpStream::connect(address).await.is_err());
    assert_eq!(models.requests().len(), 1, "the log stays");
    let options = Options { port: address.port(), ..Options::default() };
    let again = ModelServer::start(options).await.expect("the port is free again");
    assert_eq!(ask(&again, "[[text:back]]").await.whole().await.said(), "back");
}
