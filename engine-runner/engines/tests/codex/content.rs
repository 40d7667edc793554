//! Text, reasoning, tools, permissions: what a turn tells.

use pretty_assertions::assert_eq;
use roundhouse_engines::{
    Event, LineError, OpenMode, Output, PermissionReply, TurnOutcome, WaitingFor,
    event::{ChangeKind, Decision},
};
use serde_json::json;

use crate::support::{
    Owned, THREAD, begun, command, completed, end, ends, events, feed, item, note, open, play_frames,
    position, replies, run, said, translator, value_of,
};

fn texts(name: &str) -> Vec<String> {
    events(&run(name))
        .into_iter()
        .filter_map(|event| match event {
            Event::Text(text) => Some(text.body.text.clone()),
            _ => None,
        })
        .collect()
}

#[test]
fn accepted_is_told_by_the_engines_own_user_message() {
    let told = run("context");
    let accepted = position(&told, |output| matches!(output, Output::Accepted { .. }));
    let first = position(&told, |output| matches!(output, Output::Event { .. }));
    assert!(accepted < first);
    // The answer to the request alone proves nothing.
    let mut reader = translator(&open(Some(OpenMode::Start), ""));
    let outputs = feed(reader.as_mut(), &crate::support::given());
    assert!(outputs.iter().all(|output| !matches!(output, Output::Accepted { .. })));
    assert!(!reader.standing().accepted);
}

#[test]
fn s25_deltas_are_partials_and_the_final_text_follows() {
    let told = run("text");
    let streamed: String = told
        .iter()
        .filter_map(|(_, _, output)| match output {
            Output::Partial(partial) => Some(partial.text.as_str()),
            _ => None,
        })
        .collect();
    assert_eq!(streamed, "reply to hello");
    assert_eq!(texts("text"), ["reply to hello"]);
}

#[test]
fn reasoning_summaries_are_one_item_of_several_parts() {
    let told = run("think");
    let reasoning: Vec<&str> = events(&told)
        .into_iter()
        .filter_map(|event| match event {
            Event::Reasoning(text) => Some(text.body.text.as_str()),
            _ => None,
        })
        .collect();
    assert_eq!(reasoning, ["**Looking** at it \n\n**Deciding** now "]);
    let streamed: String = told
        .iter()
        .filter_map(|(_, _, output)| match output {
            Output::Partial(partial) if partial.reasoning => Some(partial.text.as_str()),
            _ => None,
        })
        .collect();
    assert_eq!(streamed, reasoning[0], "what was streamed is what is kept");
}

#[test]
fn s40_the_answer_is_the_engines_last_text_and_an_empty_success_is_empty() {
    assert_eq!(texts("commentary"), ["I look first", "the answer"]);
    assert_eq!(end(&run("commentary")).answer.as_ref().unwrap().body.text, "the answer");
    let empty = run("empty");
    assert_eq!(end(&empty).outcome, TurnOutcome::Completed);
    assert_eq!(end(&empty).answer.as_ref().unwrap().body.text, "");
}

#[test]
fn commands_are_tool_calls_with_results() {
    let told = run("tool_fails");
    let result = events(&told)
        .into_iter()
        .find_map(|event| match event {
            Event::ToolResult(result) => Some(result.clone()),
            _ => None,
        })
        .unwrap();
    assert!(result.is_error);
    assert_eq!(result.output.text, "oops\nexit code 3");
    assert_eq!(end(&told).tools_called, 1);
    assert_eq!(end(&run("parallel_tools")).tools_called, 2);
}

#[test]
fn patches_are_file_changes() {
    let changes: Vec<(String, ChangeKind)> = events(&run("patch"))
        .into_iter()
        .filter_map(|event| match event {
            Event::FileChange(change) => Some((change.path.clone(), change.change)),
            _ => None,
        })
        .collect();
    let path = "/srv/example/ws/w/new.txt".to_owned();
    assert_eq!(
        changes,
        [
            (path.clone(), ChangeKind::Created),
            (path.clone(), ChangeKind::Modified),
            (path, ChangeKind::Deleted)
        ]
    );
}

#[test]
fn a_patch_that_failed_changes_nothing() {
    let patch = |which: &str, status: &str| {
        item(
            which,
            json!({"type": "fileChange", "id": "p", "status": status,
            "changes": [{"path": "/w/a", "kind": {"type": "add"}, "diff": "x"}]}),
        )
    };
    let mut frames = begun();
    frames.extend([patch("started", "inProgress"), patch("completed", "failed"), said("m", "x")]);
    frames.extend([completed("completed", json!(null)), crate::support::answer("skills.trn_1", &json!({}))]);
    let told = play_frames(frames);
    assert!(events(&told).iter().all(|event| !matches!(event, Event::FileChange(_))));
    assert_eq!(ends(&told).len(), 1);
}

#[test]
fn mcp_tools_are_named_by_server_and_tool() {
    let mcp = |which: &str, extra: serde_json::Value| {
        let mut value = json!({"type": "mcpToolCall", "id": "x", "server": "docs", "tool": "find",
            "arguments": {"q": 1}, "status": "completed"});
        value.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        item(which, value)
    };
    let mut frames = begun();
    frames.push(mcp("started", json!({"status": "inProgress"})));
    frames.push(mcp("completed", json!({"result": {"content": [{"type": "text", "text": "found"}]}})));
    // One whose start was not told, and which failed.
    frames
        .push(mcp("completed", json!({"id": "y", "status": "failed", "error": {"message": "no such page"}})));
    let mut reader = translator(&open(Some(OpenMode::Start), ""));
    let outputs = feed(reader.as_mut(), &frames);
    let told: Vec<(String, bool)> = outputs
        .iter()
        .filter_map(|output| match output {
            Output::Event { event: Event::ToolCall(call) } => Some((call.name.clone(), false)),
            Output::Event { event: Event::ToolResult(result) } => {
                Some((result.output.text.clone(), result.is_error))
            }
            _ => None,
        })
        .collect();
    let name = "mcp__docs__find".to_owned();
    assert_eq!(
        told,
        [(name.clone(), false), ("found".into(), false), (name, false), ("no such page".into(), true)]
    );
}

#[test]
fn s27_a_tool_call_without_an_id_gets_a_name_of_its_own() {
    let nameless = || item("completed", json!({"type": "webSearch", "query": "q"}));
    let mut reader = translator(&open(Some(OpenMode::Start), ""));
    let mut frames = begun();
    frames.extend([nameless(), nameless()]);
    let ids: Vec<String> = feed(reader.as_mut(), &frames)
        .iter()
        .filter_map(|output| match output {
            Output::Event { event: Event::ToolCall(call) } => Some(call.call_id.clone()),
            _ => None,
        })
        .collect();
    assert_eq!(ids, ["web_search.0", "web_search.1"]);
}

#[test]
fn approvals_become_permission_requests_and_the_answers_reach_the_engine() {
    let told = run("perm_allow");
    assert_eq!(end(&told).outcome, TurnOutcome::Completed);
    let request = events(&told)
        .into_iter()
        .find_map(|event| match event {
            Event::PermissionRequest(request) => Some(request.clone()),
            _ => None,
        })
        .unwrap();
    assert_eq!((request.tool.as_str(), request.description.as_deref()), ("exec_command", Some("need it")));
    assert!(request.call_id.is_some() && request.input.text.contains("touch allowed"));
    let denied = run("perm_deny");
    assert!(events(&denied).iter().any(|event| {
        matches!(event, Event::ToolResult(result) if result.is_error && result.output.text == "this was not allowed")
    }));
    assert_eq!(end(&denied).outcome, TurnOutcome::Completed, "a denial does not end the turn");
}

#[test]
fn what_is_said_with_a_denial_reaches_the_agent() {
    // The scripted model answers what it was last told.
    let told = run("perm_deny_why");
    let answer = end(&told).answer.as_ref().unwrap().body.text.clone();
    assert!(answer.ends_with("said: use make instead"), "{answer}");
    // It is no delivery: nothing is accepted for it.
    assert_eq!(told.iter().filter(|(_, _, output)| matches!(output, Output::Accepted { .. })).count(), 1);
}

fn asked() -> Owned {
    let mut line =
        match note("item/commandExecution/requestApproval", json!({"itemId": "c1", "command": "x"})) {
            Owned::Out(line) => serde_json::from_slice::<serde_json::Value>(&line).unwrap(),
            _ => unreachable!(),
        };
    line["id"] = json!(0);
    Owned::line(&line)
}

#[test]
fn an_answer_goes_to_the_engines_number_under_an_operation_of_the_frame() {
    let mut reader = translator(&open(Some(OpenMode::Start), ""));
    let mut frames = begun();
    frames.extend([command("started", "inProgress"), asked()]);
    let number = frames.len();
    feed(reader.as_mut(), &frames);
    let id = format!("spl_1.{number}");
    assert_eq!(reader.standing().pending_permissions, std::slice::from_ref(&id));
    assert_eq!(reader.standing().waiting_for, WaitingFor::Permission);
    let line = reader.answer_permission(&id, PermissionReply::Allow).unwrap();
    assert_eq!(line.op, format!("permission.{number}"));
    assert_eq!(value_of(&line), json!({"id": 0, "result": {"decision": "accept"}}));
    let line = reader.answer_permission(&id, PermissionReply::Deny { feedback: "" }).unwrap();
    assert_eq!(value_of(&line)["result"]["decision"], "decline", "never cancel, which would end the turn");
    // What was said with a denial goes along as a message to the running turn.
    let line = reader.answer_permission(&id, PermissionReply::Deny { feedback: "use make" }).unwrap();
    let lines: Vec<serde_json::Value> = line
        .bytes
        .split(|byte| *byte == b'\n')
        .filter(|part| !part.is_empty())
        .map(|part| serde_json::from_slice(part).unwrap())
        .collect();
    assert_eq!(lines[0], json!({"id": 0, "result": {"decision": "decline"}}));
    assert_eq!(lines[1]["method"], "turn/steer");
    assert_eq!(lines[1]["params"]["expectedTurnId"], crate::support::TURN);
    assert!(lines[1]["params"]["input"][0]["text"].as_str().unwrap().ends_with("use make"));
    feed(reader.as_mut(), &[Owned::Intent(line.op)]);
    assert_eq!(reader.answer_permission(&id, PermissionReply::Allow), Err(LineError::NoSuchRequest));
    // The engine's word that it is settled is no second answer.
    let resolved = || note("serverRequest/resolved", json!({"requestId": 0}));
    assert_eq!(feed(reader.as_mut(), &[resolved()]), vec![]);
}

#[test]
fn a_request_that_the_engine_takes_back_is_withdrawn() {
    let mut reader = translator(&open(Some(OpenMode::Start), ""));
    let mut frames = begun();
    frames.extend([asked(), note("serverRequest/resolved", json!({"requestId": 0}))]);
    let outputs = feed(reader.as_mut(), &frames);
    assert!(matches!(outputs.last(), Some(Output::Event { event: Event::PermissionAnswer(answer) })
        if answer.decision == Decision::Withdrawn));
    assert!(reader.standing().pending_permissions.is_empty());
}

#[test]
fn every_request_of_the_engine_is_answered() {
    for method in [
        "item/tool/requestUserInput",
        "mcpServer/elicitation/request",
        "item/permissions/requestApproval",
        "item/tool/call",
        "account/chatgptAuthTokens/refresh",
        "attestation/generate",
        "applyPatchApproval",
        "execCommandApproval",
        "from/the/future",
    ] {
        // In a turn, before one, and after it.
        for (label, mut frames) in
            [("opening", vec![Owned::Spawn]), ("idle", crate::support::initialized()), ("turn", begun())]
        {
            frames.push(Owned::line(&json!({"id": 3, "method": method, "params": {"threadId": THREAD}})));
            let mut reader = translator(&open(Some(OpenMode::Start), ""));
            let outputs = feed(reader.as_mut(), &frames);
            let answers: Vec<_> = replies(&outputs).collect();
            assert_eq!(answers.len(), 1, "{method} {label}");
            assert_eq!(value_of(answers[0])["id"], 3);
            assert!(answers[0].op.starts_with("refuse."));
        }
    }
    // An approval that belongs to no turn of ours is declined, not left to wait.
    let mut frames = crate::support::initialized();
    frames.push(asked());
    let mut reader = translator(&open(Some(OpenMode::Start), ""));
    let outputs = feed(reader.as_mut(), &frames);
    let answers: Vec<_> = replies(&outputs).collect();
    assert_eq!(value_of(answers[0])["result"]["decision"], "decline");
}

#[test]
fn lines_of_other_threads_and_turns_are_not_the_turns() {
    let mut frames = begun();
    let mut strange = |turn: &str, thread: &str| {
        frames.push(Owned::line(
            &json!({"method": "item/completed", "params": {"threadId": thread, "turnId": turn,
            "item": {"type": "agentMessage", "id": "z", "text": "not mine"}}}),
        ));
    };
    strange(crate::support::TURN, "another thread");
    strange("another turn", THREAD);
    frames.extend([said("m", "mine"), completed("completed", json!(null))]);
    let told = play_frames(frames);
    assert_eq!(end(&told).answer.as_ref().unwrap().body.text, "mine");
    assert_eq!(events(&told).iter().filter(|event| matches!(event, Event::Text(_))).count(), 1);
}

#[test]
fn s32_a_text_over_the_limit_is_cut_and_the_answer_is_whole() {
    let long = "é".repeat(50_000);
    let mut frames = begun();
    frames.extend([said("m", &long), completed("completed", json!(null))]);
    let told = play_frames(frames);
    let cut = events(&told)
        .into_iter()
        .find_map(|event| match event {
            Event::Text(text) => Some(text.body.clone()),
            _ => None,
        })
        .unwrap();
    assert!(cut.truncated && cut.text.len() == 64_000);
    assert_eq!(end(&told).answer.as_ref().unwrap().body.text, long);
}
