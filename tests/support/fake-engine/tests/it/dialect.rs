//! The dialect: the same lines in the same order as the real engine's.

use serde_json::json;

use crate::driver::{Home, kinds, of, result, said};

const A: &str = "11111111-1111-4111-8111-111111111111";
const B: &str = "22222222-2222-4222-8222-222222222222";

#[test]
fn version_looks_like_the_real_one() {
    let output = Home::new().command(&["--version"]).output().expect("run");
    assert_eq!(String::from_utf8_lossy(&output.stdout), "2.1.332 (Claude Code)\n");
}

#[test]
fn a_turn_has_the_lines_of_the_real_engine_in_their_order() {
    let home = Home::new();
    let mut engine = home.warm(&[]);
    let lines = engine.turn(A, "please [[text:hello]]");
    let expected = [
        "system.session_state_changed.running",
        "command_lifecycle.queued",
        "command_lifecycle.started",
        "system.init",
        "user",
        "assistant",
        "result",
        "command_lifecycle.completed",
        "system.session_state_changed.idle",
    ];
    assert_eq!(kinds(&lines), expected);
    assert_eq!(lines[4]["isReplay"], true);
    assert_eq!(lines[5]["user_message_uuid"], A);
    let result = result(&lines);
    assert_eq!((&result["result"], &result["is_error"]), (&json!("hello"), &json!(false)));
    assert_eq!(result["model_usage_since_last_result"]["m1"]["outputTokens"], 25);
}

#[test]
fn nothing_is_said_before_the_first_line_and_text_without_markers_is_answered() {
    let home = Home::new();
    let mut engine = home.warm(&[]);
    engine.control("r", json!({"subtype": "initialize"}));
    let first = engine.next();
    assert_eq!(first["response"]["request_id"], "r");
    assert_eq!(first["response"]["response"]["pid"], engine.child.id());
    assert_eq!(said(&engine.turn(A, "no markers")), ["ok"]);
}

#[test]
fn partials_come_as_stream_events_around_the_whole_block() {
    let home = Home::new();
    let mut engine = home.warm(&["--include-partial-messages"]);
    let lines = engine.turn(A, "[[slow chunks=3 delay=1:ab]][[thinking:hm]]");
    let events: Vec<_> =
        of(&lines, "stream_event").iter().map(|line| line["event"]["type"].as_str()).collect();
    let expected = [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ];
    assert_eq!(events, expected.map(Some));
    assert_eq!(said(&lines), ["ababab"]);
    assert_eq!(of(&lines, "assistant")[1]["message"]["content"][0]["thinking"], "hm");
}

#[test]
fn tools_have_real_effects_and_results() {
    let home = Home::new();
    let mut engine = home.warm(&[]);
    let file = home.path("effects");
    let script = format!(
        "[[append path={0}:one]][[bash:echo two >> {0}; echo $CLAUDE_CODE_SESSION_ID; exit 3]][[tool name=X:{{\"a\":1}}]][[text:end]]",
        file.display()
    );
    let lines = engine.turn(A, &script);
    assert_eq!(std::fs::read_to_string(&file).expect("written"), "one\ntwo\n");
    let results: Vec<_> =
        of(&lines, "user").iter().skip(1).map(|line| &line["message"]["content"][0]).cloned().collect();
    assert_eq!(results.len(), 3, "{lines:?}");
    let session = lines[0]["session_id"].as_str().expect("an id");
    assert_eq!(results[1]["content"], format!("Exit code 3\n{session}"));
    assert_eq!((&results[1]["is_error"], &results[2]["content"]), (&json!(true), &json!("ok")));
    let calls: Vec<_> = of(&lines, "assistant").iter().map(|line| line["message"]["id"].clone()).collect();
    assert_ne!(calls[0], calls[1], "each call is a message of its own");
    assert_eq!(result(&lines)["num_turns"], 4);
}

#[test]
fn a_permission_is_asked_and_its_answer_obeyed() {
    let home = Home::new();
    let mut engine = home.warm(&["--permission-prompt-tool=stdio"]);
    let file = home.path("effects");
    for (behavior, expected) in [("allow", "changed\n"), ("deny", "changed\n")] {
        let uuid = if behavior == "allow" { A } else { B };
        engine.say(uuid, &format!("[[append ask path={}:asked]][[text:end]]", file.display()));
        let lines = engine.until(|line| line["type"] == "control_request");
        let request = lines.last().expect("a request");
        assert_eq!(
            (&request["request"]["subtype"], &request["request"]["tool_name"]),
            (&json!("can_use_tool"), &json!("Write"))
        );
        let mut input = request["request"]["input"].clone();
        input["content"] = json!("changed");
        let answer = json!({"behavior": behavior, "updatedInput": input, "message": "not now"});
        let response = json!({"subtype": "success", "request_id": request["request_id"], "response": answer});
        engine.write(&json!({"type": "control_response", "response": response}).to_string());
        let lines = engine.until_idle();
        assert_eq!(of(&lines, "control_response").len(), 1, "the answer is echoed");
        assert_eq!(std::fs::read_to_string(&file).expect("written"), expected);
        let denied = result(&lines)["permission_denials"].as_array().expect("a list").len();
        assert_eq!((said(&lines), denied), (vec!["end".to_owned()], usize::from(behavior == "deny")));
    }
}

#[test]
fn without_a_prompt_tool_permission_is_denied_and_bypass_never_asks() {
    let home = Home::new();
    let mut engine = home.warm(&[]);
    let lines = engine.turn(A, "[[bash ask:true]]");
    assert!(kinds(&lines).contains(&"system.permission_denied".to_owned()), "{lines:?}");
    engine.control("r", json!({"subtype": "set_permission_mode", "mode": "bypassPermissions"}));
    let lines = engine.turn(B, "[[bash ask:true]]");
    assert_eq!(result(&lines)["permission_denials"], json!([]));
}

#[test]
fn an_interrupt_while_a_permission_waits_withdraws_it() {
    let home = Home::new();
    let mut engine = home.warm(&["--permission-prompt-tool=stdio"]);
    engine.say(A, "[[bash ask:true]]");
    let asked = engine.until(|line| line["type"] == "control_request");
    engine.control("r", json!({"subtype": "interrupt"}));
    let lines = engine.until_idle();
    let id = &asked.last().expect("a request")["request_id"];
    assert_eq!((&lines[0]["type"], &lines[0]["request_id"]), (&json!("control_cancel_request"), id));
    assert_eq!(lines[1]["response"]["request_id"], "r");
    assert_eq!(lines[2]["state"], "running");
    assert!(kinds(&asked).contains(&"system.session_state_changed.requires_action".to_owned()));
    assert_eq!(result(&lines)["terminal_reason"], "aborted_tools");
}

#[test]
fn an_interrupt_keeps_partial_text_and_waiting_messages() {
    let home = Home::new();
    let mut engine = home.warm(&["--include-partial-messages"]);
    engine.say(A, "[[slow chunks=1000 delay=20:w ]]");
    engine.until(|line| line["event"]["type"] == "content_block_delta");
    engine.say(B, "[[text:second]]");
    engine.until(|line| line["command_uuid"] == B);
    engine.control("r", json!({"subtype": "interrupt"}));
    let lines = engine.until_idle();
    let answer = of(&lines, "control_response")[0];
    assert_eq!(answer["response"]["response"]["still_queued"], json!([B]));
    let aborted = of(&lines, "assistant")[0];
    assert_eq!(aborted["aborted"], true);
    assert!(aborted["message"]["content"][0]["text"].as_str().is_some_and(|text| text.starts_with("w ")));
    let at = |test: &dyn Fn(&serde_json::Value) -> bool| lines.iter().position(test).expect("there");
    let told = at(&|line| line["message"]["content"][0]["text"] == "[Request interrupted by user]");
    let closed = at(&|line| line["event"]["type"] == "message_stop");
    let ended = at(&|line| line["type"] == "result");
    assert!(told < closed && closed < ended, "the message is closed after the abort is told");
    let results = of(&lines, "result");
    assert_eq!(results[0]["subtype"], "error_during_execution");
    assert_eq!((&results[0]["usage"]["input_tokens"], results.len()), (&json!(0), 2));
    assert_eq!(results[0]["model_usage_since_last_result"]["m1"]["inputTokens"], 100);
    assert_eq!(results[1]["result"], "second");
}

#[test]
fn cancel_queued_and_cancel_async_message_drop_what_waits() {
    let home = Home::new();
    let mut engine = home.warm(&[]);
    engine.say(A, "[[stall]]");
    engine.until(|line| line["type"] == "user");
    engine.say(B, "never");
    engine.control("c", json!({"subtype": "cancel_async_message", "message_uuid": B}));
    let lines = engine.until(|line| line["type"] == "control_response");
    assert_eq!(lines.last().expect("one")["response"]["response"], json!({"cancelled": true}));
    engine.say("33333333-3333-4333-8333-333333333333", "never");
    engine.control("i", json!({"subtype": "interrupt", "cancel_queued": true}));
    let lines = engine.until_idle();
    assert_eq!(of(&lines, "result").len(), 1);
    assert!(!kinds(&lines).contains(&"assistant".to_owned()));
}

#[test]
fn an_interrupt_kills_the_running_tool_and_the_next_turn_works() {
    let home = Home::new();
    let mut engine = home.warm(&[]);
    let pid = home.path("pid");
    engine.say(A, &format!("[[bash:echo $$ > {0}.new; mv {0}.new {0}; exec sleep 600]]", pid.display()));
    let pid = crate::driver::wait_for("the tool's start", || std::fs::read_to_string(&pid).ok());
    engine.control("r", json!({"subtype": "interrupt"}));
    assert_eq!(result(&engine.until_idle())["terminal_reason"], "aborted_tools");
    assert!(!crate::driver::is_alive(&pid));
    assert_eq!(said(&engine.turn(B, "[[bash:echo x]][[text:fine]]")), ["fine"]);
}

#[test]
fn errors_and_retries_are_told_as_the_api_s() {
    let home = Home::new();
    let mut engine = home.warm(&[]);
    let lines = engine.turn(A, "[[retry status=529]][[error 429:slow down]][[text:never]]");
    assert!(kinds(&lines).contains(&"system.api_retry".to_owned()));
    let synthetic = of(&lines, "assistant")[0];
    assert_eq!(
        (&synthetic["message"]["model"], &synthetic["error"]),
        (&json!("<synthetic>"), &json!("rate_limit"))
    );
    let result = result(&lines);
    assert_eq!((&result["subtype"], &result["is_error"]), (&json!("success"), &json!(true)));
    assert_eq!(result["api_error_status"], 429);
    assert_eq!(of(&lines, "command_lifecycle")[2]["state"], "cancelled");
    engine.close();
    assert_eq!(engine.wait().code(), Some(1), "the last turn failed");
}

#[test]
fn controls_are_answered_and_unknown_ones_refused() {
    let home = Home::new();
    let mut engine = home.warm(&[]);
    engine.control("m", json!({"subtype": "set_model", "model": "m2"}));
    assert_eq!(engine.next()["response"]["response"]["model"], "m2");
    engine.control("u", json!({"subtype": "nosuch"}));
    assert_eq!(engine.next()["response"]["error_code"], "unsupported_request");
    engine.control("i", json!({"subtype": "interrupt"}));
    assert_eq!(engine.next()["response"]["response"]["still_queued"], json!([]));
    let lines = engine.turn(A, "x");
    assert_eq!(lines[3]["model"], "m2");
    engine.control("e", json!({"subtype": "end_session"}));
    assert_eq!(engine.wait().code(), Some(0));
}

#[test]
fn stdin_s_end_lets_the_running_turn_finish() {
    let home = Home::new();
    let mut engine = home.warm(&[]);
    engine.say(A, "[[slow chunks=5 delay=20:a]]");
    engine.close();
    assert_eq!(result(&engine.until(|line| line["type"] == "result"))["result"], "aaaaa");
    assert_eq!(engine.wait().code(), Some(0));
}

#[test]
fn a_malformed_line_ends_the_process_and_an_unknown_type_does_not() {
    let home = Home::new();
    let mut engine = home.warm(&[]);
    engine.write(r#"{"type":"nosuch"}"#);
    engine.write("");
    assert_eq!(said(&engine.turn(A, "x")), ["ok"]);
    engine.write("{no json");
    assert_eq!(engine.wait().code(), Some(1));
    assert!(engine.stderr().contains("Error parsing streaming input line"));
}

#[test]
fn a_prompt_as_argument_is_one_turn() {
    let home = Home::new();
    let output = home
        .command(&["-p", "--verbose", "--output-format", "stream-json", "--", "[[text:once]]"])
        .output()
        .expect("run");
    assert!(output.status.success());
    assert!(String::from_utf8_lossy(&output.stdout).contains(r#""result":"once""#));
}

#[test]
fn a_wrong_command_line_is_refused_in_the_engine_s_words() {
    let home = Home::new();
    for (arguments, words) in [
        (vec!["-p", "--nosuch"], "error: unknown option '--nosuch'"),
        (vec!["-p", "--output-format=stream-json"], "requires --verbose"),
        (vec!["-p", "--verbose"], "Input must be provided"),
        (vec!["-p", "--session-id=x", "--input-format=stream-json"], "Invalid session ID"),
    ] {
        let output = home.command(&arguments).output().expect("run");
        assert_eq!(output.status.code(), Some(1), "{arguments:?}");
        assert!(String::from_utf8_lossy(&output.stderr).contains(words), "{arguments:?}");
        assert!(output.stdout.is_empty());
    }
}

#[test]
fn a_malformed_marker_is_an_error_result_that_names_it() {
    let home = Home::new();
    let mut engine = home.warm(&[]);
    let lines = engine.turn(A, "[[txet:x]]");
    assert!(result(&lines)["result"].as_str().is_some_and(|text| text.contains("txet")));
}
