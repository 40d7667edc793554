//! `send`, with and without `--wait`.

use std::collections::HashMap;

use pretty_assertions::assert_eq;
use roundhouse_proto::control::v1::TurnStatus;
use roundhouse_proto::engine::v1 as engine;
use roundhouse_proto::engine::v1::event_body::Kind;
use serde_json::json;
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt as _};

use crate::fake::{Fake, Serving, Step, answer, event, terminal, text, turn};
use crate::run::{BOUND, command, finish, run, run_with_input};

fn ending(status: TurnStatus, outcome: engine::Outcome) -> Serving {
    let fake = Fake::default();
    {
        let mut state = fake.state();
        let call = engine::ToolCallEvent {
            name: "Bash".to_owned(),
            input_json: "{\"command\":\"ls\"}".to_owned(),
            ..engine::ToolCallEvent::default()
        };
        state.streams.push_back(vec![
            text(1, "Let me look."),
            event(2, Kind::ToolCall(call)),
            text(3, "It is fine."),
            terminal(4, outcome),
        ]);
        state.turn = turn(status);
        state.answer = Some(answer("It is fine."));
    }
    fake.serve()
}

#[tokio::test]
async fn the_answer_is_the_only_data() {
    let server = ending(TurnStatus::Completed, engine::Outcome::Completed);
    let ended =
        run(&["--server", &server.url(), "send", "--wait", "--agent", "reviewer", "-C", "wsp_1", "hi"]).await;
    assert_eq!((ended.code, ended.stdout.as_str()), (0, "It is fine.\n"), "{ended:?}");
    for told in
        ["conversation cnv_1, turn trn_1", "tool      Bash ls", "completed · 1.5 s · claude-code · started"]
    {
        assert!(ended.stderr.contains(told), "{told}: {}", ended.stderr);
    }
    let state = server.fake.state();
    let request = &state.send_requests[0];
    assert_eq!(
        (request.agent.as_str(), request.workspace.as_str(), request.text.as_str()),
        ("reviewer", "wsp_1", "hi")
    );
    assert_eq!(state.stream_requests[0].turn_id, "trn_1");
}

#[tokio::test]
async fn what_a_turn_waits_for_is_told_while_it_waits() {
    let fake = Fake::default();
    {
        let mut state = fake.state();
        state.streams.push_back(vec![Step::Hang]);
        state.turn = turn(TurnStatus::Dispatching);
        state.waiting = Some(roundhouse_proto::control::v1::Attention {
            turn_id: "trn_1".to_owned(),
            next_action: "wait for turn trn_0 in /w, or cancel one of the two".to_owned(),
            held_by_turn_id: "trn_0".to_owned(),
            ..Default::default()
        });
    }
    let server = fake.serve();
    let mut child =
        command(&["--server", &server.url(), "send", "--wait", "-c", "cnv_1", "hi"]).spawn().expect("starts");
    let mut lines = BufReader::new(child.stderr.take().expect("was asked for")).lines();
    let told = async {
        while let Some(line) = lines.next_line().await.expect("reads") {
            if line.starts_with("waits") {
                return line;
            }
        }
        panic!("it ended");
    };
    let told = tokio::time::timeout(BOUND, told).await.expect("in time");
    assert!(told.contains("wait for turn trn_0"), "{told}");
    child.kill().await.expect("can be killed");
}

#[tokio::test]
async fn json_is_one_value_with_the_answer() {
    let server = ending(TurnStatus::Completed, engine::Outcome::Completed);
    let ended = run(&["--json", "--server", &server.url(), "send", "-w", "-c", "cnv_1", "hi"]).await;
    let told = ended.json();
    assert_eq!(ended.code, 0);
    assert_eq!(ended.stderr, "");
    assert_eq!(told["turn"]["status"], "COMPLETED");
    assert_eq!(
        told["answer"],
        json!({
            "message_id": "msg_2", "conversation_id": "cnv_1", "seq": 2, "position": 2, "role": "AGENT",
            "actor": "reviewer", "text": "It is fine.", "truncated": false, "incomplete": false, "turn_id": "trn_1",
            "create_time": null,
        })
    );
    let keys: Vec<_> = told.as_object().expect("an object").keys().map(String::as_str).collect();
    assert_eq!(keys, ["conversation_id", "message", "turn", "repeated_request", "answer"]);
}

#[tokio::test]
async fn the_exit_code_is_the_outcome() {
    for (status, outcome, code) in [
        (TurnStatus::Failed, engine::Outcome::Failed, 1),
        (TurnStatus::Lost, engine::Outcome::Lost, 1),
        (TurnStatus::Cancelled, engine::Outcome::Cancelled, 130),
    ] {
        let server = ending(status, outcome);
        let ended = run(&["--server", &server.url(), "send", "--wait", "-c", "cnv_1", "hi"]).await;
        assert_eq!(ended.code, code, "{ended:?}");
    }
}

#[tokio::test]
async fn a_failed_turn_says_what_to_do_next() {
    let server = ending(TurnStatus::Failed, engine::Outcome::Failed);
    server.fake.state().turn.failure = Some(engine::Failure {
        reason: engine::FailureReason::Auth.into(),
        message: "the key was refused".to_owned(),
        next_action: "set another key".to_owned(),
        retryable: true,
        ..engine::Failure::default()
    });
    let ended = run(&["--server", &server.url(), "send", "--wait", "-c", "cnv_1", "hi"]).await;
    assert!(
        ended.stderr.ends_with(
            "  AUTH: the key was refused\n  next: set another key\n  try again: roundhouse retry --wait trn_1\n"
        ),
        "{}",
        ended.stderr
    );
}

#[tokio::test]
async fn text_comes_by_standard_input_as_it_is() {
    let server = ending(TurnStatus::Completed, engine::Outcome::Completed);
    let text = " /clear\n@file.txt é\n".as_bytes();
    let ended = run_with_input(&["--server", &server.url(), "send", "-c", "cnv_1", "-"], text).await;
    assert_eq!((ended.code, ended.stdout.as_str()), (0, "conversation cnv_1\nturn trn_1 dispatching\n"));
    assert_eq!(server.fake.state().send_requests[0].text.as_bytes(), text);
    let bad = run_with_input(&["--server", &server.url(), "send", "-c", "cnv_1", "-"], b"\xff").await;
    assert_eq!(bad.code, 3, "{bad:?}");
    let empty = run_with_input(&["--server", &server.url(), "send", "-c", "cnv_1", "-"], b" \n").await;
    assert_eq!(empty.code, 2, "{empty:?}");
}

#[tokio::test]
async fn a_new_conversation_goes_to_the_current_directory_and_a_known_one_where_it_was() {
    let server = ending(TurnStatus::Completed, engine::Outcome::Completed);
    let here = std::fs::canonicalize(".").expect("is there");
    let url = server.url();
    run(&["--server", &url, "send", "--request-id", "r-1", "-a", "reviewer", "first line\nmore"]).await;
    run(&["--server", &url, "send", "-a", "reviewer", "-c", "acme/site:github:42", "hi"]).await;
    // One that was made without a workspace has none to go to.
    run(&["--server", &url, "send", "-c", "cnv_1", "hi"]).await;
    server.fake.state().workspace_of_conversation = "wsp_9".to_owned();
    run(&["--server", &server.url(), "send", "-c", "acme/site:github:42", "hi"]).await;
    run(&["--server", &url, "send", "-c", "cnv_1", "hi"]).await;
    let state = server.fake.state();
    let workspaces: Vec<_> = state.send_requests.iter().map(|request| request.workspace.as_str()).collect();
    let here = here.to_str().expect("UTF-8");
    assert_eq!(workspaces, [here, here, here, "", ""]);
    assert_eq!((state.send_requests[0].request_id.as_str()), "r-1");
    assert_eq!(state.create_requests[0].title, "first line…");
    // A repeat of the whole command under the same id finds the same conversation.
    assert_eq!(state.create_requests[0].request_id, "r-1-new");
    // What cannot be, such as a workspace that does not exist, is refused before there is a conversation.
    assert_eq!(
        (state.create_requests[0].workspace.as_str(), state.create_requests[0].agent.as_str()),
        (here, "reviewer")
    );
    assert_eq!(state.create_requests.len(), 2, "the third is known");
    let external = state.create_requests[1].external_id.as_ref().expect("an external id");
    assert_eq!(
        (external.project.as_str(), external.provider.as_str(), external.id.as_str()),
        ("acme/site", "github", "42")
    );
}

#[tokio::test]
async fn without_an_agent_no_conversation_is_made() {
    let server = ending(TurnStatus::Completed, engine::Outcome::Completed);
    for named in [&["send", "hi"][..], &["send", "-c", "acme/site:github:42", "hi"], &["chat"]] {
        let ended = run(&[&["--server", &server.url()], named].concat()).await;
        assert_eq!(ended.code, 2, "{ended:?}");
        assert!(
            ended.stderr.contains("a new conversation needs an agent\nnext: say --agent NAME"),
            "{ended:?}"
        );
    }
    let state = server.fake.state();
    assert_eq!((state.create_requests.len(), state.send_requests.len()), (0, 0));
}

#[tokio::test]
async fn time_in_which_a_turn_waited_is_not_told_as_work() {
    let server = ending(TurnStatus::Completed, engine::Outcome::Completed);
    {
        let at = |seconds| Some(prost_types::Timestamp { seconds, nanos: 0 });
        let mut state = server.fake.state();
        (state.turn.create_time, state.turn.end_time) = (at(1_000), at(1_600));
        state.streams.clear();
        state.streams.push_back(vec![
            text(1, "It is fine."),
            event(
                2,
                Kind::Terminal(engine::TerminalEvent {
                    outcome: engine::Outcome::Completed.into(),
                    duration: Some(prost_types::Duration { seconds: 3, nanos: 0 }),
                    ..engine::TerminalEvent::default()
                }),
            ),
        ]);
    }
    let url = server.url();
    let sent = run(&["--server", &url, "send", "--wait", "-c", "cnv_1", "hi"]).await;
    assert!(sent.stderr.contains("completed · worked 3.0 s, waited 597.0 s before"), "{sent:?}");
    let shown = run(&["--server", &url, "turns", "trn_1"]).await;
    assert!(shown.stdout.contains("worked        3.0 s\nwaited        597.0 s\n"), "{shown:?}");
    let json = run(&["--json", "--server", &url, "turns", "trn_1"]).await.json();
    assert_eq!((&json["worked_ms"], &json["waited_ms"]), (&json!(3_000), &json!(597_000)));
}

#[tokio::test]
async fn a_refusal_names_field_reason_and_next_step() {
    let server = ending(TurnStatus::Completed, engine::Outcome::Completed);
    let mut details = ErrorDetails::new();
    details.set_error_info(
        "TARGET_MISSING",
        "roundhouse",
        HashMap::from([("missing".to_owned(), "agent".to_owned())]),
    );
    let refusal = Status::with_error_details(Code::FailedPrecondition, "no agent is named", details);
    server.fake.state().refuse_send = Some(refusal);
    let human = run(&["--server", &server.url(), "send", "-c", "cnv_1", "hi"]).await;
    assert_eq!(
        (human.code, human.stdout.as_str(), human.stderr.as_str()),
        (
            3,
            "",
            "error: no agent is named\nnext: say --agent NAME once (`roundhouse agents` lists them), and --workspace for \
             another directory than this; the conversation remembers both\n"
        )
    );
    let json = run(&["--json", "--server", &server.url(), "send", "-c", "cnv_1", "hi"]).await;
    let error: serde_json::Value = serde_json::from_str(&json.stderr).expect("JSON");
    assert_eq!(
        (&error["error"]["reason"], &error["error"]["exit_code"], &error["error"]["metadata"]["missing"]),
        (&json!("TARGET_MISSING"), &json!(3), &json!("agent"))
    );
}

#[tokio::test]
async fn an_interrupt_leaves_the_turn_alone_and_says_so() {
    let fake = Fake::default();
    fake.state().streams.push_back(vec![
        text(1, "working"),
        event(
            2,
            Kind::ToolCall(engine::ToolCallEvent {
                name: "Bash".to_owned(),
                input_json: "{}".to_owned(),
                ..engine::ToolCallEvent::default()
            }),
        ),
        Step::Hang,
    ]);
    let server = fake.serve();
    let mut child =
        command(&["--server", &server.url(), "send", "--wait", "-c", "cnv_1", "hi"]).spawn().expect("starts");
    // It follows once the tool is shown.
    let stderr = child.stderr.take().expect("was asked for");
    let mut lines = BufReader::new(stderr).lines();
    let shown = async {
        while let Some(line) = lines.next_line().await.expect("reads") {
            if line.contains("Bash") {
                return;
            }
        }
        panic!("ended without showing the tool");
    };
    tokio::time::timeout(BOUND, shown).await.expect("in time");
    let pid = child.id().expect("runs").to_string();
    let signalled =
        tokio::process::Command::new("sh").args(["-c", "kill -s INT \"$1\"", "sh", &pid]).status().await;
    assert!(signalled.expect("sh runs").success());
    let all = async {
        let mut rest = String::new();
        while let Some(line) = lines.next_line().await.expect("reads") {
            rest.push_str(&line);
            rest.push('\n');
        }
        rest
    };
    let rest = tokio::time::timeout(BOUND, all).await.expect("ends in time");
    let ended = finish(child).await;
    assert_eq!(ended.code, 130, "{rest}");
    assert_eq!(
        rest,
        "the turn goes on without this command\n  \
         follow it: roundhouse events --follow --turn trn_1 cnv_1\n  cancel it: roundhouse cancel trn_1\n"
    );
}

#[tokio::test]
async fn a_server_that_goes_away_right_after_it_took_the_message_is_waited_for() {
    let server = ending(TurnStatus::Completed, engine::Outcome::Completed);
    server.fake.state().streams.push_front(vec![Step::Fail(Status::unavailable("going down"))]);
    let ended = run(&["--server", &server.url(), "send", "--wait", "-c", "cnv_1", "hi"]).await;
    assert_eq!((ended.code, ended.stdout.as_str()), (0, "It is fine.\n"), "{ended:?}");
    assert!(
        ended.stderr.contains("going down; the turn goes on, waiting for the server"),
        "{}",
        ended.stderr
    );
    assert_eq!(server.fake.state().send_requests.len(), 1, "the message is not sent again");
}

#[tokio::test]
async fn cancel_and_retry_can_wait() {
    let server = ending(TurnStatus::Cancelled, engine::Outcome::Cancelled);
    let cancel = run(&["--json", "--server", &server.url(), "cancel", "--wait", "trn_1"]).await;
    assert_eq!((cancel.code, &cancel.json()["turn"]["status"]), (0, &json!("CANCELLED")), "{cancel:?}");
    let retry = run(&["--server", &server.url(), "retry", "--wait", "trn_1"]).await;
    assert_eq!((retry.code, retry.stdout.as_str()), (130, "It is fine.\n"), "{retry:?}");
}
