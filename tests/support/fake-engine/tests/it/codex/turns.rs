//! Turns: their lines and the order of these, as the real app-server was seen to send them.

use serde_json::{Value, json};

use super::server::{end, input, items, kinds, said, usage};
use crate::driver::{Home, wait_for};

/// What begins every turn, after the answer.
const BEGIN: [&str; 4] = [
    "thread/status/changed active",
    "turn/started inProgress",
    "item/started userMessage",
    "item/completed userMessage",
];

/// What ends a turn that went well.
const END: [&str; 5] = [
    "thread/tokenUsage/updated",
    "account/rateLimits/updated",
    "thread/readState/changed",
    "thread/status/changed idle",
    "turn/completed completed",
];

fn between(lines: &[Value], end: &[&str]) -> Vec<String> {
    let kinds = kinds(lines);
    assert_eq!(kinds[..4], BEGIN, "{kinds:?}");
    assert_eq!(kinds[kinds.len() - end.len()..], *end, "{kinds:?}");
    kinds[4..kinds.len() - end.len()].to_vec()
}

#[test]
fn a_turn_has_the_lines_of_the_real_one_in_their_order() {
    let home = Home::new();
    let mut server = home.codex().open(&json!({}));
    let lines = server.turn("[[thinking:hm]][[text:hello]]");
    let reasoning = [
        "item/started reasoning",
        "item/reasoning/summaryPartAdded",
        "item/reasoning/summaryTextDelta",
        "item/completed reasoning",
    ];
    let message = ["item/started agentMessage", "item/agentMessage/delta", "item/completed agentMessage"];
    assert_eq!(between(&lines, &END), [&reasoning[..], &message[..]].concat());
    assert_eq!(items(&lines, "userMessage")[0]["clientId"], "client-1");
    assert_eq!(end(&lines)["items"][0]["text"], "hello");
    let ids: std::collections::HashSet<_> =
        lines.iter().filter_map(|line| line["params"]["turnId"].as_str()).collect();
    assert_eq!(ids.len(), 1);
    assert!(lines.iter().all(|line| line["emittedAtMs"].is_u64()));

    let lines = server.turn("[[text:go]][[bash:echo hi; exit 2]][[text:done]]");
    let command = ["item/started commandExecution inProgress", "item/completed commandExecution failed"];
    let counted = ["thread/tokenUsage/updated", "account/rateLimits/updated"];
    assert_eq!(between(&lines, &END), [&message[..], &command, &counted, &message].concat());
    let command = items(&lines, "commandExecution")[0];
    assert_eq!(command["command"], "/bin/bash -lc 'echo hi; exit 2'");
    assert_eq!((&command["aggregatedOutput"], &command["exitCode"]), (&json!("hi\n"), &json!(2)));
}

#[test]
fn texts_without_markers_are_answered_and_a_script_file_stands_in() {
    let home = Home::new();
    assert_eq!(said(&home.codex().open(&json!({})).turn("hello")), ["ok"]);
    let mut server = home.codex_scripted("@turn\n[[text:from the file]]\n").open(&json!({}));
    assert_eq!(said(&server.turn("no marker")), ["from the file"]);
    assert_eq!(said(&server.turn("[[text:own]]")), ["own"]);
    let lines = server.turn("[[nosuch:x]]");
    assert_eq!(
        (end(&lines)["status"].as_str(), kinds(&lines).contains(&"error false".to_owned())),
        (Some("failed"), true)
    );
    assert!(end(&lines)["error"]["message"].as_str().is_some_and(|message| message.contains("nosuch")));
}

#[test]
fn said_in_pieces_and_recalled() {
    let home = Home::new();
    let mut server = home.codex().open(&json!({}));
    let lines = server.turn("[[slow chunks=3 delay=1:w ]][[huge bytes=200000]][[events count=3 bytes=10]]");
    let said_now = said(&lines);
    assert_eq!((said_now.len(), said_now[0].as_str(), said_now[1].len()), (5, "w w w ", 200_000));
    let deltas = kinds(&lines).iter().filter(|kind| *kind == "item/agentMessage/delta").count();
    assert_eq!(deltas, 3 + 1 + 3);
    let many = said(&server.turn("[[events count=500 bytes=10 delta]]"));
    assert_eq!((many.len(), many[0].len()), (1, 5000));
    let recalled = said(&server.turn("[[recall]]"));
    assert!(recalled[0].ends_with("[[events count=500 bytes=10 delta]] | [[recall]]"), "{recalled:?}");
}

#[test]
fn usage_is_told_for_each_answer_and_adds_up() {
    let home = Home::new();
    let mut server = home.codex().open(&json!({}));
    let lines = server.turn("[[usage in=7 out=8 read=9 created=10]][[bash:true]][[text:x]]");
    let last = json!({
        "totalTokens": 34, "inputTokens": 26, "cachedInputTokens": 9, "cacheWriteInputTokens": 10, "outputTokens": 8,
        "reasoningOutputTokens": 0,
    });
    assert_eq!(usage(&lines)["last"], last);
    assert_eq!(usage(&lines)["total"]["totalTokens"], 68, "two answers");
    assert_eq!(usage(&server.turn("x"))["total"]["totalTokens"], 68 + 155, "over turns");
}

#[test]
fn an_interrupt_ends_a_turn_that_has_started() {
    let home = Home::new();
    let mut server = home.codex().open(&json!({}));
    for script in ["[[text:a]][[stall]]", "[[slow chunks=1000 delay=20:x]]", "[[pause ms=60000]]"] {
        let turn = server.say(script);
        server.engine.until(|line| line["params"]["item"]["type"] == "userMessage");
        let lines = server.interrupt(&turn);
        let last = &kinds(&lines)[kinds(&lines).len() - 5..];
        let expected = [
            "thread/tokenUsage/updated",
            "account/rateLimits/updated",
            "answer",
            "thread/status/changed idle",
            "turn/completed interrupted",
        ];
        assert_eq!(last, expected, "{script}");
        assert_eq!(end(&lines)["items"], json!([]));
        assert_eq!(usage(&lines)["total"]["totalTokens"], 0, "what was cut off is not counted");
    }
    assert_eq!(said(&server.turn("[[text:next]]")), ["next"]);
    assert_eq!(server.refused("turn/interrupt", json!({"turnId": "x"})), "no active turn to interrupt");
}

#[test]
fn an_interrupt_before_the_start_is_refused_and_the_turn_runs_to_its_end() {
    let home = Home::new();
    let gate = home.path("gate");
    let mut server =
        home.codex_scripted(&format!("@accepted\n[[gate:{}]]\n", gate.display())).open(&json!({}));
    let turn = server.say("[[text:all of it]]");
    assert_eq!(server.refused("turn/interrupt", json!({"turnId": turn})), "no active turn to interrupt");
    std::fs::write(&gate, "").expect("written");
    let lines = server.ended();
    assert_eq!(
        (said(&lines), end(&lines)["status"].as_str()),
        (vec!["all of it".to_owned()], Some("completed"))
    );
}

#[test]
fn a_turn_begun_in_a_turn_and_a_steer_are_heard_in_it() {
    let home = Home::new();
    let gate = home.path("gate");
    let mut server = home.codex().open(&json!({}));
    let turn = server.say(&format!("[[text:a]][[gate:{}]][[text:b]]", gate.display()));
    server
        .engine
        .until(|line| line["method"] == "item/completed" && line["params"]["item"]["type"] == "agentMessage");
    let begun = server.ask("turn/start", json!({"input": input(&["second [[die:KILL]]"])}));
    assert_eq!(begun["turn"]["id"], turn.as_str(), "no turn of its own");
    let steered = server.ask(
        "turn/steer",
        json!({"expectedTurnId": turn, "clientUserMessageId": "s", "input": input(&["third"])}),
    );
    assert_eq!(steered["turnId"], turn.as_str());
    let heard = server.engine.until(|line| line["params"]["item"]["clientId"] == "s");
    assert_eq!(kinds(&heard).last().map(String::as_str), Some("item/started userMessage"));
    let wrong = server.refused("turn/steer", json!({"expectedTurnId": "nope", "input": input(&["x"])}));
    assert_eq!(wrong, format!("expected active turn id `nope` but found `{turn}`"));
    std::fs::write(&gate, "").expect("written");
    let lines = server.ended();
    assert_eq!(said(&lines), ["b"]);
    let idle = server.refused("turn/steer", json!({"expectedTurnId": turn, "input": input(&["x"])}));
    assert_eq!(idle, "no active turn to steer");
    let recalled = said(&server.turn("[[recall]]"));
    assert!(recalled[0].contains("second [[die:KILL]] | third"), "{recalled:?}");
}

#[test]
fn a_steer_throws_away_what_the_model_was_saying_but_waits_for_a_tool() {
    let home = Home::new();
    let mut server = home.codex().open(&json!({}));
    let turn = server.say("[[slow chunks=30 delay=20:x]]");
    server.engine.until(|line| line["method"] == "item/agentMessage/delta");
    server.ask("turn/steer", json!({"expectedTurnId": turn, "input": input(&["more"])}));
    let lines = server.ended();
    assert_eq!(said(&lines), ["x".repeat(30)], "said anew, once");
    assert!(kinds(&lines).contains(&"item/started agentMessage".to_owned()));
    let gate = home.path("tool");
    let turn =
        server.say(&format!("[[bash:while [ ! -e {} ]; do sleep 0.01; done]][[text:end]]", gate.display()));
    server.engine.until(|line| line["params"]["item"]["type"] == "commandExecution");
    server.ask("turn/steer", json!({"expectedTurnId": turn, "input": input(&["more"])}));
    std::fs::write(&gate, "").expect("written");
    let kinds = kinds(&server.ended());
    let place = |wanted: &str| kinds.iter().position(|kind| kind == wanted).expect(wanted);
    assert!(place("item/completed commandExecution completed") < place("item/started userMessage"));
}

#[test]
fn errors_have_the_real_one_s_names_and_come_before_the_end() {
    let home = Home::new();
    let mut server = home.codex().open(&json!({}));
    let http = |kind: &str, status: u16| json!({kind: {"httpStatusCode": status}});
    for (script, info, message) in [
        ("[[error 400:odd]]", json!("other"), "odd"),
        (
            "[[error 401]]",
            http("httpConnectionFailed", 401),
            "unexpected status 401 Unauthorized: scripted failure",
        ),
        ("[[error 404]]", json!("modelNotFound"), "The requested model does not exist."),
        (
            "[[error 429]]",
            http("responseTooManyFailedAttempts", 429),
            "exceeded retry limit, last status: 429 Too Many Requests",
        ),
        ("[[error 500:down]]", json!("internalServerError"), "down"),
        (
            "[[error 529]]",
            json!("serverOverloaded"),
            "Selected model is at capacity. Please try a different model.",
        ),
        ("[[error 429 info=usageLimitExceeded reset=99:limit]]", json!("usageLimitExceeded"), "limit"),
    ] {
        let lines = server.turn(&format!("[[retry status=503]]{script}"));
        let kinds = kinds(&lines);
        let expected = [
            "thread/status/changed systemError",
            "error false",
            "thread/readState/changed",
            "turn/completed failed",
        ];
        assert_eq!(kinds[kinds.len() - 4..], expected, "{script}");
        assert!(kinds.contains(&"error true".to_owned()), "the retry");
        let error = &end(&lines)["error"];
        assert_eq!((&error["codexErrorInfo"], error["message"].as_str()), (&info, Some(message)), "{script}");
        if script.contains("reset") {
            let told =
                lines.iter().find(|line| line["method"] == "account/rateLimits/updated").expect("a limit");
            assert_eq!(told["params"]["rateLimits"]["primary"]["resetsAt"], 99);
        }
    }
    assert_eq!(said(&server.turn("[[text:works]]")), ["works"]);
}

#[test]
fn a_turn_may_end_without_a_word_and_unwanted_notifications_are_not_sent() {
    let home = Home::new();
    let mut server = super::server::Server::bare(home.codex_command());
    server.initialize(&json!({"optOutNotificationMethods": ["item/agentMessage/delta", "warning"]}));
    let mut server = server.open(&json!({}));
    server.say("[[text:a]][[no_result]]");
    wait_for("the turn's end", || (home.log("no_result").len() == 1).then_some(()));
    let lines = server.turn("[[text:b]]");
    assert_eq!(said(&lines), ["b"], "the first one has no end");
    assert!(!kinds(&lines).iter().any(|kind| kind.contains("delta") || kind == "warning"));
}

#[test]
fn a_compaction_is_a_turn_of_the_engine() {
    let home = Home::new();
    let mut server = home.codex().open(&json!({}));
    server.turn("x");
    server.ask("thread/compact/start", json!({}));
    assert_eq!(items(&server.ended(), "contextCompaction").len(), 1);
}
