//! `events`: replay, follow, and what happens when the connection is lost.

use std::collections::HashMap;

use pretty_assertions::assert_eq;
use roundhouse_proto::engine::v1 as engine;
use serde_json::json;
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt as _};

use crate::fake::{Fake, Step, terminal, text};
use crate::run::{BOUND, command, finish, run};

fn with_reason(code: Code, reason: &str, metadata: &[(&str, &str)]) -> Status {
    let metadata: HashMap<String, String> =
        metadata.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
    let mut details = ErrorDetails::new();
    details.set_error_info(reason, "roundhouse", metadata);
    Status::with_error_details(code, "refused", details)
}

#[tokio::test]
async fn a_lost_stream_is_taken_up_after_the_last_cursor() {
    let fake = Fake::default();
    fake.state().streams.extend([
        vec![text(1, "one"), text(2, "two"), Step::Fail(Status::unavailable("going down"))],
        vec![Step::Fail(Status::unavailable("still down"))],
        // A server that stops may end its streams without an error.
        vec![text(3, "three")],
        vec![text(4, "four"), terminal(5, engine::Outcome::Completed)],
    ]);
    let server = fake.serve();
    let ended =
        run(&["--json", "--server", &server.url(), "events", "--follow", "--turn", "trn_1", "cnv_1"]).await;
    assert_eq!(ended.code, 0, "{ended:?}");
    let seqs: Vec<_> = ended.lines().iter().map(|line| line["seq"].as_u64()).collect();
    assert_eq!(seqs, [Some(1), Some(2), Some(3), Some(4), Some(5)]);
    let asked: Vec<_> =
        server.fake.state().stream_requests.iter().map(|request| request.after_cursor.clone()).collect();
    assert_eq!(asked, ["", "c2", "c2", "c3"]);
}

#[tokio::test]
async fn a_killed_server_that_comes_back_is_found_again() {
    let fake = Fake::default();
    fake.state().streams.push_back(vec![text(1, "one"), Step::Hang]);
    let server = fake.clone().serve();
    let address = server.address;
    let mut child =
        command(&["--json", "--server", &server.url(), "events", "--follow", "--turn", "trn_1", "cnv_1"])
            .spawn()
            .expect("starts");
    let mut lines = BufReader::new(child.stdout.take().expect("was asked for")).lines();
    let first = tokio::time::timeout(BOUND, lines.next_line()).await.expect("in time").expect("reads");
    assert!(first.is_some_and(|line| line.contains("one")));
    // Its connections go with it.
    drop(server);
    {
        let mut state = fake.state();
        state.streams.clear();
        state.streams.push_back(vec![text(2, "two"), terminal(3, engine::Outcome::Completed)]);
    }
    let server = restart(fake, address).await;
    let mut rest = Vec::new();
    while let Some(line) =
        tokio::time::timeout(BOUND, lines.next_line()).await.expect("in time").expect("reads")
    {
        rest.push(serde_json::from_str::<serde_json::Value>(&line).expect("JSON")["seq"].as_u64());
    }
    let ended = finish(child).await;
    assert_eq!((ended.code, rest), (0, vec![Some(2), Some(3)]), "{ended:?}");
    let asked = server.fake.state().stream_requests.last().map(|request| request.after_cursor.clone());
    assert_eq!(asked.as_deref(), Some("c1"));
}

/// Serves on the same port, as soon as the system gives it back.
async fn restart(fake: Fake, address: std::net::SocketAddr) -> crate::fake::Serving {
    let free = async {
        while tokio::net::TcpListener::bind(address).await.is_err() {
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(BOUND, free).await.expect("the port comes free");
    fake.serve_on(address)
}

#[tokio::test]
async fn a_reader_that_was_too_slow_goes_on_where_it_was() {
    let fake = Fake::default();
    fake.state().streams.extend([
        vec![
            text(1, "one"),
            Step::Fail(with_reason(Code::ResourceExhausted, "SLOW_READER", &[("last_cursor", "c7")])),
        ],
        vec![terminal(8, engine::Outcome::Completed)],
    ]);
    let server = fake.serve();
    let ended = run(&["--server", &server.url(), "events", "-f", "--turn", "trn_1", "cnv_1"]).await;
    assert_eq!(ended.code, 0, "{ended:?}");
    assert_eq!(server.fake.state().stream_requests[1].after_cursor, "c7");
}

#[tokio::test]
async fn a_pruned_cursor_is_an_error_that_names_the_oldest() {
    let fake = Fake::default();
    let refusal = with_reason(Code::OutOfRange, "CURSOR_PRUNED", &[("oldest_cursor", "c90")]);
    fake.state().streams.push_back(vec![Step::Fail(refusal)]);
    let server = fake.serve();
    let ended = run(&["--server", &server.url(), "events", "--after", "c1", "cnv_1"]).await;
    assert_eq!(
        (ended.code, ended.stderr.as_str()),
        (4, "error: refused\nnext: go on with --after c90\n"),
        "{ended:?}"
    );
}

#[tokio::test]
async fn without_follow_it_ends_and_says_how_to_go_on() {
    let fake = Fake::default();
    fake.state().streams.push_back(vec![text(1, "one\nmore"), text(2, "two")]);
    let server = fake.serve();
    let ended = run(&["--server", &server.url(), "events", "--partials", "cnv_1"]).await;
    assert_eq!((ended.code, ended.stderr.as_str()), (0, "what comes next: --after c2\n"), "{ended:?}");
    assert!(ended.stdout.contains("text      one\nmore\n"), "{}", ended.stdout);
    let state = server.fake.state();
    let request = &state.stream_requests[0];
    assert_eq!((request.follow, request.include_partial, request.turn_id.as_str()), (Some(false), true, ""));
}

#[tokio::test]
async fn each_item_is_a_line_of_json() {
    let fake = Fake::default();
    fake.state().streams.push_back(vec![text(1, "one")]);
    let server = fake.serve();
    let ended = run(&["--json", "--server", &server.url(), "events", "cnv_1"]).await;
    assert_eq!(
        ended.lines(),
        [json!({
            "cursor": "c1", "at": "2023-11-14T22:13:21Z", "kind": "turn_event", "turn_id": "trn_1", "seq": 1,
            "event": "text",
            "body": {
                "item_id": "i1", "text": "one", "truncated": false, "incomplete": false, "sub_agent": null,
            },
        })]
    );
}

#[tokio::test]
async fn a_reader_that_goes_away_ends_it_quietly() {
    let fake = Fake::default();
    let many = (1..=5_000).map(|seq| text(seq, &"x".repeat(1_000))).collect();
    fake.state().streams.push_back(many);
    let server = fake.serve();
    let script =
        format!("{} --server {} events cnv_1 | head -n 1", env!("CARGO_BIN_EXE_roundhouse"), server.url());
    let output = tokio::process::Command::new("sh").args(["-c", &script]).output();
    let output = tokio::time::timeout(BOUND, output).await.expect("in time").expect("sh runs");
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
    assert_eq!(String::from_utf8_lossy(&output.stdout).lines().count(), 1);
}
