//! Which text a turn is about, in requests shaped as the CLI shapes them.

use serde_json::json;

use super::*;

fn text(text: &str) -> Value {
    json!({"type": "text", "text": text})
}

fn conversation(messages: Value) -> Conversation {
    Conversation::new(json!({"model": "m", "stream": true, "messages": messages}))
}

#[test]
fn the_last_block_of_the_first_message_counts_and_context_does_not() {
    let first = conversation(json!([
        {"role": "user", "content": [text("<system-reminder>\n[[text:no]]"), text("context [[text:no]]"), text("ask")]},
        {"role": "system", "content": [text("# Environment [[text:no]]")]},
    ]));
    assert_eq!((first.turn_text(), first.step()), ("ask", 0));
}

#[test]
fn a_reminder_after_the_text_does_not_hide_it() {
    let first = conversation(json!([{"role": "user", "content": [text("ask"), text("<system-reminder>x")]}]));
    assert_eq!(first.turn_text(), "ask");
}

#[test]
fn tool_results_and_steering_go_on_with_the_turn() {
    let call = json!({"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "Bash", "input": {}}]});
    let result = json!({"type": "tool_result", "tool_use_id": "t", "content": [text("[[text:no]]")], "is_error": true});
    let steer = text("The user sent a new message while you were working:\n[[text:no]]");
    let later = conversation(json!([
        {"role": "user", "content": "ask"}, call,
        {"role": "user", "content": [result, steer]}, call,
        {"role": "user", "content": [result]},
        {"role": "system", "content": [steer]},
    ]));
    assert_eq!((later.turn_text(), later.step()), ("ask", 2));
    assert_eq!(later.tool_results()[0], ("t".to_owned(), "[[text:no]]".to_owned(), true));
}

#[test]
fn a_new_message_in_the_same_user_message_as_an_old_one_starts_anew() {
    let merged = conversation(json!([
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "Bash", "input": {}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t", "content": "rejected"},
            text("[Request interrupted by user for tool use]\n"), text("old\n"), text("new"),
        ]},
    ]));
    assert_eq!((merged.turn_text(), merged.step()), ("new", 0));
    let dialogue: Vec<_> = merged.dialogue().into_iter().map(|(_, text)| text).collect();
    assert_eq!(dialogue, ["old", "new"]);
}

#[test]
fn a_continuation_after_the_token_limit_is_the_next_step() {
    let resumed = conversation(json!([
        {"role": "user", "content": "ask"},
        {"role": "assistant", "content": [text("part")]},
        {"role": "user", "content": [text("<system-reminder>\nOutput token limit hit. Resume directly")]},
    ]));
    assert_eq!((resumed.turn_text(), resumed.step()), ("ask", 1));
}

#[test]
fn what_the_cli_wants_for_itself_is_a_side_request() {
    let kind = |body: Value| Conversation::new(body).kind();
    let user = |text: &str| json!([{"role": "user", "content": text}]);
    assert_eq!(kind(json!({"messages": user("quota"), "max_tokens": 1})), RequestKind::Side);
    let schema = json!({"format": {"type": "json_schema"}});
    assert_eq!(kind(json!({"messages": user("x"), "output_config": schema})), RequestKind::Side);
    assert_eq!(kind(json!({"messages": user("CRITICAL: Respond with TEXT ONLY. Do")})), RequestKind::Side);
    assert_eq!(kind(json!({"messages": user("x"), "max_tokens": 100})), RequestKind::Main);
}

#[test]
fn what_is_no_conversation_has_no_text() {
    for body in [json!(null), json!(3), json!({"messages": "x"}), json!({"messages": [7, {"role": "user"}]})]
    {
        let odd = Conversation::new(body);
        assert_eq!((odd.turn_text(), odd.step(), odd.texts().len()), ("", 0, 0));
    }
}

#[test]
fn a_turn_keeps_its_key_over_its_steps_and_no_other_session_has_it() {
    let body = |user: &str, session: &str, more: bool| {
        let mut messages = vec![json!({"role": "user", "content": user})];
        if more {
            messages.push(json!({"role": "assistant", "content": "x"}));
        }
        Conversation::new(json!({"messages": messages, "metadata": {"user_id": session}})).turn_key()
    };
    assert_eq!(body("a", "s", false), body("a", "s", true));
    assert_ne!(body("a", "s", false), body("a", "other", false));
    assert_ne!(body("a", "s", false), body("b", "s", false));
}

fn said_by(role: &str, id: &str, texts: &[&str]) -> Value {
    let parts: Vec<Value> = texts.iter().map(|text| json!({"type": "input_text", "text": text})).collect();
    json!({"type": "message", "role": role, "id": format!("msg_{id}"), "content": parts})
}

fn responses(turn: Option<&str>, input: Value) -> Conversation {
    Conversation::new(json!({"model": "m", "input": input, "client_metadata": {"turn_id": turn}}))
}

const BEFORE: &str = "01a22e71-0000-7ed2-8b1f-44c55807ad9b";
const TURN: &str = "01a22e72-0000-7ed2-8b1f-44c55807ad9b";
const FIRST: &str = "01a22e72-0001-7ed2-8b1f-44c55807ad9b";
const LATER: &str = "01a22e72-0002-7ed2-8b1f-44c55807ad9b";

#[test]
fn in_a_responses_request_the_first_message_of_the_turn_counts_and_what_came_later_steers() {
    let call = json!({"type": "function_call", "call_id": "c", "name": "exec_command", "arguments": "{}"});
    let output = json!({"type": "function_call_output", "call_id": "c", "output": "[[text:no]]"});
    let input = json!([
        said_by("developer", BEFORE, &["be brief [[text:no]]"]),
        said_by("user", BEFORE, &["<environment_context> [[text:no]]"]),
        said_by("user", BEFORE, &["old [[text:no]]"]),
        said_by("assistant", BEFORE, &["x"]),
        said_by("user", FIRST, &["context [[text:no]]", "ask"]),
        json!({"type": "reasoning", "summary": []}),
        call,
        call,
        output,
        output,
        said_by("user", LATER, &["by the way [[text:no]]"]),
        said_by("user", LATER, &["<turn_aborted> [[text:no]]"]),
        call,
    ]);
    let steered = responses(Some(TURN), input.clone());
    assert_eq!((steered.api(), steered.turn_text(), steered.step()), (Api::Responses, "ask", 2));
    assert_eq!(steered.developer(), ["be brief [[text:no]]"]);
    let users = steered.dialogue().into_iter().filter(|(role, _)| role == "user").count();
    assert_eq!(users, 4, "{:?}", steered.dialogue());
    // Without ids the last one is taken.
    for turn in [None, Some("turn-1")] {
        let unknown = responses(turn, input.clone());
        assert_eq!((unknown.turn_text(), unknown.step()), ("by the way [[text:no]]", 1));
    }
}

#[test]
fn a_command_failed_if_its_result_says_so() {
    for (output, shown, failed) in [
        ("Chunk ID: a\nWall time: 0.0 seconds\nProcess exited with code 0\nOutput:\nhi\n", "hi\n", false),
        ("Chunk ID: a\nWall time: 0.0 seconds\nProcess exited with code 3\nOutput:\n", "", true),
        ("Chunk ID: a\nProcess running with session ID 7\nOutput:\nfirst", "first", false),
        ("Wall time: 0.5 seconds\naborted by user", "Wall time: 0.5 seconds\naborted by user", true),
        ("unsupported call: nosuch", "unsupported call: nosuch", true),
        ("any text\nOutput:\nx", "any text\nOutput:\nx", false),
    ] {
        let input = json!([{"type": "function_call_output", "call_id": "c", "output": output}]);
        let told = responses(None, input);
        assert_eq!(told.tool_results(), [("c".to_owned(), output.to_owned(), failed)]);
        assert_eq!(told.tool_outputs(), [shown]);
    }
}

#[test]
fn a_bare_string_is_a_responses_request_too() {
    let bare = Conversation::new(
        json!({"input": "hello", "instructions": "be good", "reasoning": {"effort": "low"}}),
    );
    assert_eq!((bare.turn_text(), bare.system().as_str(), bare.effort()), ("hello", "be good", Some("low")));
    let odd = Conversation::new(json!({"input": [3, {"type": "message"}, {"role": "user", "content": 7}]}));
    assert_eq!((odd.turn_text(), odd.step(), odd.texts().len()), ("", 0, 0));
}

#[test]
fn a_namespace_of_tools_is_told_with_what_is_in_it() {
    let tools = json!([
        {"type": "function", "name": "exec_command"}, {"type": "web_search"},
        {"type": "namespace", "name": "mcp__m1", "tools": [{"type": "function", "name": "echo"}]},
    ]);
    let asked = Conversation::new(json!({"input": "x", "tools": tools}));
    assert_eq!(asked.tools(), ["exec_command", "web_search", "mcp__m1", "echo"]);
}
