//! The scripts, obeyed by the real Codex CLI.

use roundhouse_models::{Api, Ending, RequestKind};
use serde_json::{Value, json};

use crate::{
    cli::isolated,
    client::{LIMIT, server},
    codex_cli::Place,
};

#[tokio::test(flavor = "multi_thread")]
async fn a_warm_cli_says_and_does_what_scripts_say() {
    if !isolated("codex::a_warm_cli_says_and_does_what_scripts_say") {
        return;
    }
    let server = server().await;
    let models = server.models();
    let place = Place::new(&server);
    let mut cli = place.started();

    assert_eq!(cli.turn("first").said(), ["ok"], "the context's marker is not obeyed");
    assert_eq!(cli.turn("[[text:hello]]").said(), ["hello"]);
    assert_eq!(cli.turn("again nothing").said(), ["ok"], "nor is the history's");
    let turn = cli.turn("[[thinking:hm]][[text:thought]]");
    assert_eq!(
        (turn.items("reasoning")[0]["summary"].clone(), turn.said()),
        (json!(["hm"]), vec!["thought"])
    );
    assert_eq!(cli.turn("[[slow chunks=3 delay=5:w ]][[break]][[text:x]]").said(), ["w w w ", "x"]);
    assert_eq!(cli.turn("[[huge bytes=300000]]").said()[0].len(), 300_000);

    let (one, two) = (place.file("one"), place.file("two"));
    let script = format!(
        "tools [[text:go]][[bash:echo 1 >> {}; echo done]][[write path={}:lines\nof 'text']][[read:{}]][[text:did it]]",
        one.display(),
        two.display(),
        two.display()
    );
    let turn = cli.turn(&script);
    assert_eq!(turn.said(), ["go", "did it"]);
    assert_eq!(std::fs::read_to_string(one).expect("written"), "1\n");
    assert_eq!(std::fs::read_to_string(two).expect("written"), "lines\nof 'text'");
    let asked = models.requests_for("tools ");
    assert_eq!(asked.iter().map(|record| record.step()).collect::<Vec<_>>(), [0, 1, 2, 3]);
    assert_eq!(asked[3].conversation().tool_outputs(), ["done\n", "", "lines\nof 'text'"]);

    let turn = cli.turn("both [[bash:echo a]][[and]][[bash:echo b; exit 3]]");
    let codes = turn.items("commandExecution").into_iter().map(|item| item["exitCode"].as_u64());
    let mut codes: Vec<_> = codes.collect();
    codes.sort();
    // The CLI runs both at once.
    assert_eq!((turn.said(), codes), (vec!["done"], vec![Some(0), Some(3)]));
    let results = models.requests_for("both ")[1].conversation().tool_results();
    let failed: Vec<_> = results[results.len() - 2..].iter().map(|(_, _, failed)| *failed).collect();
    assert_eq!(failed, [false, true]);

    let patch = "*** Begin Patch\n*** Add File: p.txt\n+patched\n*** End Patch";
    let turn = cli.turn(&format!("patch [[bash:apply_patch <<'X'\n{patch}\nX]]"));
    assert_eq!(turn.items("fileChange").len(), 1);
    assert_eq!(std::fs::read_to_string(place.file("p.txt")).expect("written"), "patched\n");
    cli.turn("odd [[tool name=nosuch:{}]][[and]][[tool name=mcp__m1__echo:{\"x\":1}]][[and]][[tool name=free:\"text\"]]");
    let results = models.requests_for("odd ")[1].conversation().tool_results();
    let odd: Vec<_> =
        results.iter().rev().take(3).map(|(_, text, failed)| (text.as_str(), *failed)).collect();
    assert_eq!(
        odd,
        [
            ("unsupported custom tool call: free", true),
            ("unsupported call: mcp__m1echo", true),
            ("unsupported call: nosuch", true)
        ]
    );

    let turn = cli.turn("[[usage in=11 out=12 read=13 created=14]][[text:u]]");
    let usage = turn.usage()[0];
    let counts = ["inputTokens", "outputTokens", "cachedInputTokens", "cacheWriteInputTokens"];
    assert_eq!(counts.map(|name| usage[name].as_u64()), [38, 12, 13, 14].map(Some));

    let record = models.requests().pop().expect("asked");
    assert!(record.key_is("dummy-key") && record.api() == Api::Responses);
    let conversation = record.conversation();
    assert_eq!((conversation.model(), conversation.session()), ("scripted-1", Some(cli.thread.as_str())));
    assert!(conversation.dialogue().contains(&("user".to_owned(), "first".to_owned())));
    assert!(
        conversation.developer().contains(&"be brief".to_owned())
            && conversation.system().contains("be good")
    );
    assert!(conversation.tools().contains(&"exec_command"), "{:?}", conversation.tools());
    assert!(
        models.requests().iter().all(|record| record.kind() == RequestKind::Main),
        "no request but the turns'"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gated_turn_is_interrupted_and_the_next_one_starts_anew() {
    if !isolated("codex::a_gated_turn_is_interrupted_and_the_next_one_starts_anew") {
        return;
    }
    let server = server().await;
    let models = server.models();
    let place = Place::new(&server);
    let mut cli = place.started();

    cli.say("[[text:before ]][[gate:open]][[text:after]]");
    models.wait_gate("open", LIMIT).await.expect("reached");
    cli.until(|line| line["params"]["delta"] == "before ");
    models.release_gate("open");
    assert_eq!(cli.ended().said(), ["before after"]);

    for script in
        ["text [[text:part]][[gate:never]][[text:no]]", "hold [[hold:never]][[text:no]]", "hang [[hang]]"]
    {
        let turn = cli.say(script);
        models.wait_for_text(script, 1, LIMIT).await.expect("asked");
        if script.contains("part") {
            cli.until(|line| line["params"]["delta"] == "part");
        }
        assert_eq!(cli.interrupt(&turn).status(), "interrupted", "{script}");
        let asked = &models.requests_for(script)[0];
        assert_eq!(models.wait_ending(asked, LIMIT).await.expect("ended"), Ending::Abandoned, "{script}");
        assert_eq!(cli.turn("then [[text:works]]").said(), ["works"], "after {script}");
    }

    let turn = cli.say("tool [[bash:sleep 60]]");
    cli.until(|line| {
        line["method"] == "item/started" && line["params"]["item"]["type"] == "commandExecution"
    });
    assert_eq!(cli.interrupt(&turn).status(), "interrupted");
    cli.ask("thread/backgroundTerminals/clean", &json!({"threadId": cli.thread}));
    assert_eq!(cli.turn("last [[text:still works]]").said(), ["still works"]);
    let last = models.requests_for("last ")[0].conversation();
    assert!(last.tool_results()[0].2, "{:?}", last.tool_results());
    assert_eq!(last.occurrences("<turn_aborted>"), 4);
    assert!(!last.dialogue().iter().any(|(_, text)| text.contains("aborted")), "the CLI wrote that");
}

#[tokio::test(flavor = "multi_thread")]
async fn failures_reach_the_cli_as_its_own() {
    if !isolated("codex::failures_reach_the_cli_as_its_own") {
        return;
    }
    let server = server().await;
    let models = server.models();
    let place = Place::new(&server);
    let mut cli = place.started();
    let http = |kind: &str, status: u16| json!({kind: {"httpStatusCode": status}});
    // Script, what the CLI makes of it, requests made, retries told.
    for (script, error, requests, retries) in [
        ("[[error 400]]", json!("other"), 1, 0),
        ("[[error 401]]", http("httpConnectionFailed", 401), 2, 1),
        ("[[error 403]]", http("httpConnectionFailed", 403), 2, 1),
        ("[[error 404]]", json!("modelNotFound"), 1, 0),
        ("[[error 429]]", http("responseTooManyFailedAttempts", 429), 1, 0),
        ("[[error 429 retry_after=1]]", http("responseTooManyFailedAttempts", 429), 2, 1),
        ("[[error 429 kind=insufficient_quota]]", json!("usageLimitExceeded"), 1, 0),
        ("[[error 429 kind=usage_not_included]]", json!("usageLimitExceeded"), 1, 0),
        ("[[limit reset=4102444800]]", json!("usageLimitExceeded"), 1, 0),
        ("[[credit]]", json!("usageLimitExceeded"), 1, 0),
        ("[[error 500]]", json!("internalServerError"), 4, 1),
        ("[[error 503]]", http("httpConnectionFailed", 503), 4, 1),
        ("[[error 529]]", json!("serverOverloaded"), 2, 0),
        ("[[text:a]][[sse_error]]", json!("serverOverloaded"), 1, 0),
        ("[[text:a]][[sse_error:rate_limit_exceeded]]", json!("rateLimitExceeded"), 2, 1),
        ("[[text:a]][[sse_error:insufficient_quota]]", json!("usageLimitExceeded"), 1, 0),
        ("[[text:a]][[sse_error:server_error]]", json!("other"), 2, 1),
        ("[[max_tokens:part]]", json!("other"), 1, 0),
        ("[[text:part]][[cut]]", json!("other"), 2, 1),
        ("[[text:part]][[end]]", json!("other"), 2, 1),
        ("[[text:part]][[stall]]", json!("other"), 2, 1),
        ("[[unknown:x]]", json!("other"), 1, 0),
        ("[[too_long]]", json!("contextWindowExceeded"), 1, 0),
    ] {
        let turn = cli.turn(script);
        assert_eq!(turn.status(), "failed", "{script}");
        assert_eq!(turn.end()["error"]["codexErrorInfo"], error, "{script}: {}", turn.end());
        assert_eq!((models.count_for(script), turn.retries()), (requests, retries), "{script}");
        if script.contains("limit reset") {
            let limit = json!({"usedPercent": 100, "windowDurationMins": 300, "resetsAt": 4_102_444_800_u64});
            assert_eq!(turn.limit(), Some(&limit));
        }
    }
    // What was too long is made shorter before the next turn.
    assert_eq!(cli.turn("next [[text:fits]]").said(), ["fits"]);
    assert_eq!(models.select(|record| record.kind() == RequestKind::Side).len(), 1);
    // A refusal's words are dropped.
    let turn = cli.turn("[[refusal:no]]");
    assert_eq!((turn.status(), turn.said()), ("completed", Vec::new()));
    assert_eq!(cli.turn("[[text:a]][[garbage]][[text:b]]").said(), ["ab"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_cli_recovers_where_a_script_lets_it() {
    if !isolated("codex::the_cli_recovers_where_a_script_lets_it") {
        return;
    }
    let server = server().await;
    let models = server.models();
    let place = Place::new(&server);
    let mut cli = place.started();
    for script in [
        "[[error 500 times=1]][[text:well]]",
        "[[error 529 times=1]][[text:well]]",
        "[[error 429 retry_after=1 times=1]][[text:well]]",
        "[[text:we]][[cut times=1]][[text:ll]]",
        "[[text:we]][[end times=1]][[text:ll]]",
        "[[text:we]][[stall times=1]][[text:ll]]",
        "[[text:we]][[sse_error times=1:server_error]][[text:ll]]",
    ] {
        let turn = cli.turn(script);
        assert_eq!((turn.status(), turn.said()), ("completed", vec!["well"]), "{script}");
        assert_eq!(models.count_for(script), 2, "{script}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn compaction_is_no_turn_and_steering_does_not_disturb_one() {
    if !isolated("codex::compaction_is_no_turn_and_steering_does_not_disturb_one") {
        return;
    }
    let server = server().await;
    let models = server.models();
    let place = Place::new(&server);
    let mut cli = place.started();
    let steer = json!([{"type": "text", "text": "by the way [[text:not this]]", "text_elements": []}]);

    // In a stream: what was said is thrown away and asked for again.
    let turn = cli.say("mid [[text:a]][[gate:g]][[text:b]]");
    cli.until(|line| line["params"]["delta"] == "a");
    cli.ask("turn/steer", &json!({"threadId": cli.thread, "expectedTurnId": turn, "input": steer}));
    models.wait_gate_times("g", 2, LIMIT).await.expect("asked again");
    models.release_gate("g");
    assert_eq!(cli.ended().said(), ["ab"]);
    let asked = models.requests_for("mid ");
    assert_eq!(
        asked.iter().map(|record| record.ending()).collect::<Vec<_>>(),
        [Ending::Abandoned, Ending::Sent]
    );
    assert_eq!(asked[1].conversation().occurrences("by the way"), 1);

    // In a tool: it is told with the tool's result. A turn begun in a turn is such a steering, too.
    let turn = cli.say("steered [[bash:sleep 1]][[bash:echo second]][[text:end]]");
    cli.until(|line| {
        line["method"] == "item/started" && line["params"]["item"]["type"] == "commandExecution"
    });
    let begun = cli.ask("turn/start", &json!({"threadId": cli.thread, "input": steer}));
    assert_eq!(begun["turn"]["id"], turn.as_str());
    assert_eq!(cli.ended().said(), ["end"]);
    let asked = models.requests_for("steered");
    assert_eq!(asked.iter().map(|record| record.step()).collect::<Vec<_>>(), [0, 1, 2]);
    assert_eq!(asked[2].conversation().occurrences("by the way"), 2, "the model was told");

    cli.ask("thread/compact/start", &json!({"threadId": cli.thread}));
    assert_eq!(cli.ended().items("contextCompaction").len(), 1);
    let sides = models.select(|record| record.kind() == RequestKind::Side);
    assert_eq!(sides.len(), 1, "one request for a summary");
    assert_eq!(cli.turn("after [[text:fine]]").said(), ["fine"]);
    let last = models.requests_for("after").pop().expect("asked").conversation();
    assert_eq!(last.occurrences("scripted summary"), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_thread_is_resumed_with_its_history_and_effort() {
    if !isolated("codex::a_thread_is_resumed_with_its_history_and_effort") {
        return;
    }
    let server = server().await;
    let models = server.models();
    let place = Place::new(&server);
    let mut cli = place.started();
    cli.turn("one [[text:1]]");
    let thread = cli.thread.clone();
    drop(cli);
    let mut cli = place.warm();
    cli.thread.clone_from(&thread);
    cli.ask("thread/resume", &json!({"threadId": thread, "excludeTurns": true}));
    let input = json!([{"type": "text", "text": "two [[bash:echo x]][[text:2]]", "text_elements": []}]);
    cli.ask("turn/start", &json!({"threadId": thread, "input": input, "effort": "high"}));
    assert_eq!(cli.ended().said(), ["2"]);
    let asked = models.requests_for("two");
    assert_eq!(asked.iter().map(|record| record.step()).collect::<Vec<_>>(), [0, 1]);
    let last = asked[1].conversation();
    assert_eq!((last.effort(), last.tool_outputs()), (Some("high"), vec!["x\n".to_owned()]));
    let dialogue: Vec<_> = last.dialogue().into_iter().map(|(_, text)| text).collect();
    let context = "earlier somebody said [[text:from the context]]";
    assert_eq!(dialogue, [context, "one [[text:1]]", "1", "two [[bash:echo x]][[text:2]]"]);
    assert_eq!(models.count_for("one"), 1, "its marker did not fire again");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_escalated_command_asks_and_a_server_s_tool_is_called() {
    if !isolated("codex::an_escalated_command_asks_and_a_server_s_tool_is_called") {
        return;
    }
    let server = server().await;
    let models = server.models();
    let place = Place::new(&server);
    let mut cli = place.warm();
    // A server of one tool that says its argument back.
    let script = r#"
import json, sys
for line in sys.stdin:
    ask = json.loads(line)
    if "id" not in ask:
        continue
    result = {}
    if ask["method"] == "initialize":
        version = ask["params"]["protocolVersion"]
        result = {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": {"name": "m1", "version": "0"}}
    elif ask["method"] == "tools/list":
        schema = {"type": "object", "properties": {"x": {"type": "string"}}}
        result = {"tools": [{"name": "echo", "description": "echo", "inputSchema": schema, "annotations": {"readOnlyHint": True}}]}
    elif ask["method"] == "tools/call":
        result = {"content": [{"type": "text", "text": "echo " + ask["params"]["arguments"]["x"]}]}
    print(json.dumps({"jsonrpc": "2.0", "id": ask["id"], "result": result}), flush=True)
"#;
    let tool_server = json!({"command": "/usr/bin/env", "args": ["python3", "-c", script], "required": true});
    cli.open(&json!({
        "approvalPolicy": "on-request", "sandbox": "workspace-write", "config": {"mcp_servers": {"m1": tool_server}},
    }));
    let file = place.file("escalated");
    let input = json!({
        "command": format!("touch {}", file.display()), "sandbox_permissions": "require_escalated", "justification": "why",
    });
    cli.say(&format!(
        "ask [[tool name=Bash:{input}]][[tool name=mcp__m1__echo:{{\"x\":\"y\"}}]][[text:end]]"
    ));
    let asked = cli.until_method("item/commandExecution/requestApproval").pop().expect("the last");
    assert_eq!(asked["params"]["reason"], "why");
    assert!(!file.exists());
    cli.write(&json!({"id": asked["id"], "result": {"decision": "accept"}}));
    let turn = cli.ended();
    assert!(file.exists());
    assert_eq!((turn.items("mcpToolCall").len(), turn.said()), (1, vec!["end"]));
    let last = models.requests_for("ask ").pop().expect("asked").conversation();
    assert!(last.tools().windows(2).any(|pair| pair == ["mcp__m1", "echo"]), "{:?}", last.tools());
    assert!(last.tool_outputs()[1].contains("echo y"), "{:?}", last.tool_outputs());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_for_each_turn_resumes_with_its_history() {
    if !isolated("codex::a_process_for_each_turn_resumes_with_its_history") {
        return;
    }
    let server = server().await;
    let place = Place::new(&server);
    let lines = |output: &std::process::Output| -> Vec<Value> {
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        said.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
    };
    let first = place.exec(&[], "one [[text:1]]");
    assert!(first.status.success(), "{}", String::from_utf8_lossy(&first.stderr));
    let thread = lines(&first)[0]["thread_id"].as_str().expect("an id").to_owned();
    let second = place.exec(&["resume", &thread], "two [[bash:echo x > made]][[text:2]]");
    let said = lines(&second);
    let message = said.iter().rfind(|line| line["item"]["type"] == "agent_message").expect("a message");
    assert_eq!(message["item"]["text"], "2");
    assert!(place.file("made").exists());
    let last = server.models().requests_for("two").pop().expect("asked").conversation();
    let dialogue: Vec<_> = last.dialogue().into_iter().map(|(_, text)| text).collect();
    assert_eq!(dialogue, ["one [[text:1]]", "1", "two [[bash:echo x > made]][[text:2]]"]);
    let failed = place.exec(&["resume", &thread], "three [[error 400]]");
    assert_eq!(
        (failed.status.code(), &lines(&failed).pop().expect("a line")["type"]),
        (Some(1), &json!("turn.failed"))
    );
}
