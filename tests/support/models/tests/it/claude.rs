//! The scripts, obeyed by the real Claude Code CLI.

use roundhouse_models::{Ending, RequestKind};
use serde_json::{Value, json};

use crate::{
    cli::{Place, isolated},
    client::{LIMIT, server},
};

#[tokio::test(flavor = "multi_thread")]
async fn a_warm_cli_says_and_does_what_scripts_say() {
    if !isolated("claude::a_warm_cli_says_and_does_what_scripts_say") {
        return;
    }
    let server = server().await;
    let models = server.models();
    let place = Place::new(&server);
    let mut cli = place.warm();

    assert_eq!(cli.turn("first")["result"], "ok", "the context's marker is not obeyed");
    assert_eq!(cli.turn("[[text:hello]]")["result"], "hello");
    assert_eq!(cli.turn("again nothing")["result"], "ok", "nor is the history's");
    assert_eq!(cli.turn("[[thinking:hm]][[text:thought]]")["result"], "thought");
    assert_eq!(cli.turn("[[slow chunks=3 delay=5:w ]]")["result"], "w w w ");
    assert_eq!(cli.turn("[[huge bytes=300000]]")["result"].as_str().map(str::len), Some(300_000));

    let (one, two) = (place.file("one"), place.file("two"));
    let script = format!(
        "tools [[text:go]][[bash:echo 1 >> {}]][[write path={}:lines\nof text]][[text:did it]]",
        one.display(),
        two.display()
    );
    let result = cli.turn(&script);
    assert_eq!((&result["result"], &result["num_turns"]), (&json!("did it"), &json!(3)));
    assert_eq!(std::fs::read_to_string(one).expect("written"), "1\n");
    assert_eq!(std::fs::read_to_string(two).expect("written"), "lines\nof text");
    let steps: Vec<_> = models.requests_for("tools ").iter().map(|record| record.step()).collect();
    assert_eq!(steps, [0, 1, 2]);

    assert_eq!(cli.turn("both [[bash:echo a]][[and]][[bash:echo b]]")["result"], "done");
    let last = models.requests_for("both ").pop().expect("asked").conversation();
    let results: Vec<_> = last.tool_results().into_iter().map(|(_, text, _)| text).collect();
    // The CLI runs both at once; their results come as they end.
    let mut joined = results[results.len() - 2..].to_vec();
    joined.sort();
    assert_eq!(joined, ["a", "b"]);

    let usage =
        cli.turn("[[usage in=11 out=12 read=13 created=14]][[text:u]]")["model_usage_since_last_result"]
            .clone();
    let counts = usage.as_object().and_then(|by_model| by_model.values().next()).expect("a model");
    assert_eq!((&counts["inputTokens"], &counts["outputTokens"]), (&json!(11), &json!(12)));

    let record = models.requests().pop().expect("asked");
    assert!(record.key_is("dummy-key"));
    assert!(record.conversation().dialogue().contains(&("user".to_owned(), "first".to_owned())));
    assert!(
        models.requests().iter().all(|record| record.kind() == RequestKind::Main),
        "no request but the turns'"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gated_turn_is_interrupted_and_the_next_one_starts_anew() {
    if !isolated("claude::a_gated_turn_is_interrupted_and_the_next_one_starts_anew") {
        return;
    }
    let server = server().await;
    let models = server.models();
    let place = Place::new(&server);
    let mut cli = place.warm();

    cli.say("[[text:before ]][[gate:open]][[text:after]]");
    models.wait_gate("open", LIMIT).await.expect("reached");
    cli.until(|line| line["event"]["delta"]["text"] == "before ");
    models.release_gate("open");
    assert_eq!(cli.result()["result"], "before after");

    for (script, reason) in [
        ("text [[text:part]][[gate:never]][[text:no]]", "aborted_streaming"),
        ("stall [[text:part]][[stall]]", "aborted_streaming"),
        ("hold [[hold:never]][[text:no]]", "aborted_streaming"),
        ("hang [[hang]]", "aborted_streaming"),
        ("retry [[error 529]]", "aborted_streaming"),
    ] {
        cli.say(script);
        models.wait_for_text(script, 1, LIMIT).await.expect("asked");
        if script.contains("part") {
            cli.until(|line| line["event"]["delta"]["text"] == "part");
        }
        cli.interrupt();
        let result = cli.result();
        assert_eq!(
            (&result["subtype"], &result["terminal_reason"]),
            (&json!("error_during_execution"), &json!(reason))
        );
        if !script.starts_with("retry") {
            let asked = &models.requests_for(script)[0];
            assert_eq!(models.wait_ending(asked, LIMIT).await.expect("ended"), Ending::Abandoned, "{script}");
        }
        assert_eq!(cli.turn("then [[text:works]]")["result"], "works", "after {script}");
    }

    cli.say("tool [[bash:python3 -c 'import time; time.sleep(60)']]");
    cli.until(|line| line["type"] == "assistant");
    cli.interrupt();
    assert_eq!(cli.result()["terminal_reason"], "aborted_tools");
    assert_eq!(cli.turn("last [[text:still works]]")["result"], "still works");
}

#[tokio::test(flavor = "multi_thread")]
async fn failures_reach_the_cli_as_its_own() {
    if !isolated("claude::failures_reach_the_cli_as_its_own") {
        return;
    }
    let server = server().await;
    let models = server.models();
    let place = Place::new(&server);
    let mut cli = place.warm();
    // Script, status told, requests made (one retry is allowed; 400 is tried again without beta features).
    for (script, status, requests) in [
        ("[[error 401]]", 401, Some(2)),
        ("[[error 403]]", 403, Some(1)),
        ("[[error 404]]", 404, None),
        ("[[error 400]]", 400, None),
        ("[[credit]]", 400, Some(1)),
        ("[[error 429 retry_after=1]]", 429, Some(2)),
        ("[[limit]]", 429, Some(1)),
        ("[[error 500]]", 500, Some(2)),
        ("[[error 529]]", 529, Some(2)),
        ("[[max_tokens:part]]", 0, Some(4)),
        ("[[refusal:no]]", 0, Some(2)),
        ("[[hang]]", 0, Some(2)),
        ("[[text:part]][[cut plain]]", 0, None),
        ("[[unknown:x]]", 400, None),
    ] {
        let result = cli.turn(script);
        assert_eq!(result["is_error"], true, "{script}: {result}");
        assert_eq!(result["api_error_status"].as_u64().unwrap_or(0), status, "{script}: {result}");
        if let Some(requests) = requests {
            assert_eq!(models.count_for(script), requests, "{script}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_cli_recovers_where_a_script_lets_it() {
    if !isolated("claude::the_cli_recovers_where_a_script_lets_it") {
        return;
    }
    let server = server().await;
    let models = server.models();
    let place = Place::new(&server);
    let mut cli = place.warm();
    for (script, requests, streams) in [
        ("[[error 529 times=1]][[text:well]]", 2, true),
        ("[[error 429 retry_after=1 times=1]][[text:well]]", 2, true),
        ("[[hang times=1]][[text:well]]", 2, true),
        ("[[text:well]][[cut times=1]]", 2, true),
        ("[[text:we]][[cut]][[text:ll]]", 3, false),
        ("[[text:we]][[sse_error]][[text:ll]]", 2, false),
        ("[[text:we]][[garbage]][[text:ll]]", 2, false),
    ] {
        let result = cli.turn(script);
        assert_eq!(
            (&result["result"], &result["is_error"]),
            (&json!("well"), &json!(false)),
            "{script}: {result}"
        );
        let asked = models.requests_for(script);
        assert_eq!(asked.len(), requests, "{script}");
        let last = asked.last().expect("one").conversation();
        assert_eq!(last.streams(), streams, "{script}: whether the last try was a stream");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn compaction_is_no_turn_and_steering_does_not_disturb_one() {
    if !isolated("claude::compaction_is_no_turn_and_steering_does_not_disturb_one") {
        return;
    }
    let server = server().await;
    let models = server.models();
    let place = Place::new(&server);
    let mut cli = place.warm();
    let wait = "python3 -c 'import time; time.sleep(1)'";
    cli.say(&format!("steered [[bash:{wait}]][[bash:echo second]][[text:end]]"));
    cli.until(|line| line["type"] == "assistant");
    cli.say("by the way [[text:not this]]");
    assert_eq!(cli.result()["result"], "end");
    let steps: Vec<_> = models.requests_for("steered").iter().map(|record| record.step()).collect();
    assert_eq!(steps, [0, 1, 2]);
    let last = models.requests_for("steered").pop().expect("asked").conversation();
    assert_eq!(last.occurrences("by the way"), 1, "the model was told");

    cli.write(&json!({"type": "user", "message": {"role": "user", "content": "/compact"}}));
    cli.result();
    let sides = models.select(|record| record.kind() == RequestKind::Side);
    assert_eq!(sides.len(), 1, "one request for a summary");
    assert_eq!(cli.turn("after [[text:fine]]")["result"], "fine");
    let last = models.requests_for("after").pop().expect("asked").conversation();
    assert_eq!(last.occurrences("scripted summary"), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_for_each_turn_resumes_with_its_history() {
    if !isolated("claude::a_process_for_each_turn_resumes_with_its_history") {
        return;
    }
    let server = server().await;
    let place = Place::new(&server);
    let id = "11111111-1111-4111-8111-111111111111";
    let first = place.one_shot("one [[text:1]]", &[&format!("--session-id={id}")]);
    assert!(first.status.success(), "{}", String::from_utf8_lossy(&first.stderr));
    let second = place.one_shot("two [[bash:echo x > made]][[text:2]]", &[&format!("--resume={id}")]);
    let result: Value = String::from_utf8_lossy(&second.stdout)
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok())
        .find(|line| line["type"] == "result")
        .expect("a result");
    assert_eq!(result["result"], "2");
    assert!(place.file("made").exists());
    let last = server.models().requests_for("two").pop().expect("asked").conversation();
    let dialogue: Vec<_> = last.dialogue().into_iter().map(|(_, text)| text).collect();
    assert_eq!(dialogue, ["one [[text:1]]", "1", "two [[bash:echo x > made]][[text:2]]"]);
    assert_eq!(server.models().count_for("one"), 1, "its marker did not fire again");
    let failed = place.one_shot("three [[error 403]]", &[&format!("--resume={id}")]);
    assert_eq!(failed.status.code(), Some(1));
}
