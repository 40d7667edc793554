//! Text, tools, permissions, and what a silence is about.

use pretty_assertions::assert_eq;
use roundhouse_engines::{
    Event, Frame, Output, TurnOutcome, WaitingFor,
    event::{ChangeKind, Decider, Decision},
};
use serde_json::json;

use crate::support::{
    Owned, begun, claude, closing, end, ends, events, names, notices, play, play_frames, position, recording,
    run, said, transcript, translator,
};

#[test]
fn text_of_a_broken_stream_is_reset_and_replaced() {
    for name in ["err_cut", "err_sseerr", "err_hangmid"] {
        let told = run(name);
        let reset = position(&told, |output| matches!(output, Output::PartialReset { .. }));
        let whole = position(&told, |output| matches!(output, Output::Event { event: Event::Text(_) }));
        assert!(reset < whole, "{name}");
        let Output::Event { event: Event::Text(text) } = &told[whole].2 else { panic!() };
        assert_eq!(text.body.text, "nonstream answer");
        assert!(
            events(&told).iter().all(|event| !matches!(event, Event::Text(text)
            if text.body.text.contains("thrown away"))),
            "{name}"
        );
    }
    // What was finished before the break stays.
    let told = run("err_cut_after_a_block");
    let Output::PartialReset { item } =
        &told[position(&told, |output| matches!(output, Output::PartialReset { .. }))].2
    else {
        panic!()
    };
    assert_eq!(item.as_str(), "msg_0027.1");
}

#[test]
fn partial_text_adds_up_to_the_item_that_replaces_it() {
    let told = run("text");
    let mut so_far = String::new();
    for (_, _, output) in &told {
        match output {
            Output::Partial(partial) if partial.item.as_str() == "msg_0001.0" => {
                assert_eq!(partial.offset, so_far.len() as u64);
                so_far.push_str(&partial.text);
            }
            Output::Event { event: Event::Text(text) } if text.item.as_str() == "msg_0001.0" => {
                assert_eq!(text.body.text, so_far);
            }
            _ => {}
        }
    }
    assert_eq!(so_far, "hello world");
}

#[test]
fn a_snapshot_of_partial_text_starts_at_offset_zero() {
    let run = recording("sig_kill");
    let mut reader = translator(&run.open);
    let mut text = String::new();
    for (number, frame) in (1_u64..).zip(&run.frames) {
        for output in reader.feed(Frame { number, body: frame.body() }) {
            if let Output::Partial(partial) = output {
                text.push_str(&partial.text);
                let snapshot = reader.partials();
                assert_eq!(snapshot.len(), 1);
                assert_eq!((snapshot[0].offset, snapshot[0].text.as_str()), (0, text.as_str()));
            }
        }
    }
    assert!(text.len() > 20);
}

#[test]
fn reasoning_is_its_own_item() {
    let told = run("think");
    let reasoning = position(&told, |output| matches!(output, Output::Event { event: Event::Reasoning(_) }));
    let text = position(&told, |output| matches!(output, Output::Event { event: Event::Text(_) }));
    assert!(reasoning < text);
    assert!(
        told.iter().any(|(_, _, output)| matches!(output, Output::Partial(partial) if partial.reasoning))
    );
    assert_eq!(end(&told).answer.as_ref().unwrap().body.text, "thought");
}

#[test]
fn a_reply_continued_after_the_output_limit_is_answered_whole() {
    let go_on = Owned::line(&json!({"type": "user", "isSynthetic": true, "parent_tool_use_id": null,
        "message": {"role": "user", "content": [{"type": "text", "text": "Output token limit hit. Resume directly"}]}}));
    let mut frames = begun();
    frames.extend([said("m1", "Once upon a "), go_on, said("m2", "time.")]);
    frames.extend(closing("time."));
    let told = play_frames(frames);
    assert_eq!(end(&told).answer.as_ref().unwrap().body.text, "Once upon a time.");
    assert_eq!(notices(&told, "engine_prompt").len(), 1);
}

#[test]
fn s27_a_call_without_a_result_is_closed_at_the_end() {
    let told = run("sig_kill_tool");
    let result = events(&told).into_iter().find_map(|event| match event {
        Event::ToolResult(result) => Some(result.clone()),
        _ => None,
    });
    let result = result.unwrap();
    assert!(result.is_error && !result.output.text.is_empty());
    assert_eq!(end(&told).tools_called, 1);
}

#[test]
fn s27_a_refused_call_is_an_error_even_if_the_line_forgets_to_say_so() {
    let told = run("interrupt_tool");
    assert!(events(&told).iter().any(|event| matches!(event, Event::ToolResult(result) if result.is_error)));
}

#[test]
fn s27_an_error_without_text_gets_one_and_an_empty_success_stays_one() {
    let answer = |id: &str, is_error: bool| {
        Owned::line(
            &json!({"type": "user", "parent_tool_use_id": null, "message": {"role": "user", "content":
            [{"type": "tool_result", "tool_use_id": id, "content": "", "is_error": is_error}]}}),
        )
    };
    let call = |id: &str| {
        Owned::line(&json!({"type": "assistant", "parent_tool_use_id": null, "message":
            {"id": id, "model": "m", "content": [{"type": "tool_use", "id": id, "name": "Bash", "input": {}}]}}))
    };
    let mut frames = begun();
    frames.extend([call("a"), call("b"), answer("b", false), answer("a", true), answer("a", false)]);
    frames.extend(closing("done"));
    let told = play_frames(frames);
    let results: Vec<(String, bool, bool)> = events(&told)
        .into_iter()
        .filter_map(|event| match event {
            Event::ToolResult(result) => {
                Some((result.call_id.clone(), result.is_error, result.output.text.is_empty()))
            }
            _ => None,
        })
        .collect();
    assert_eq!(results, [("b".into(), false, true), ("a".into(), true, false)]);
}

#[test]
fn file_tools_tell_which_file_and_whether_it_is_new() {
    let changes = |name: &str| -> Vec<(String, ChangeKind)> {
        events(&run(name))
            .into_iter()
            .filter_map(|event| match event {
                Event::FileChange(change) => Some((change.path.clone(), change.change)),
                _ => None,
            })
            .collect()
    };
    let path = "/srv/example/ws/a.txt".to_owned();
    assert_eq!(changes("tool"), [(path.clone(), ChangeKind::Created), (path.clone(), ChangeKind::Modified)]);
    assert_eq!(changes("overwrite"), [(path, ChangeKind::Modified)]);
    assert_eq!(changes("perm_deny"), [], "a refused write changed nothing");
}

#[test]
fn a_sub_agents_lines_name_the_call_they_belong_to_and_are_no_answer() {
    let told = play(&transcript("bg_agent_states"));
    let child = events(&told).into_iter().find_map(|event| match event {
        Event::Text(text) if text.parent_call.is_some() => Some(text.clone()),
        _ => None,
    });
    assert_eq!(child.unwrap().body.text, "default reply");
    assert!(!end(&told).answer.as_ref().unwrap().body.text.contains("default reply"));
    assert!(
        events(&run("sub_agent")).iter().all(|event| !matches!(event, Event::Text(text)
        if text.body.text.contains("do the sub task"))),
        "the sub-agent's prompt is not text of the agent"
    );
}

#[test]
fn a_permission_is_asked_under_its_frame_and_withdrawn_with_the_interrupt() {
    let told = run("perm_interrupt");
    let asked = events(&told).into_iter().find_map(|event| match event {
        Event::PermissionRequest(request) => Some(request.clone()),
        _ => None,
    });
    let asked = asked.unwrap();
    assert_eq!(asked.request_id, "spl_1.24");
    assert_eq!(asked.tool, "Bash");
    assert!(asked.input.text.contains("perm.txt"));
    let answers: Vec<_> = events(&told)
        .into_iter()
        .filter_map(|event| match event {
            Event::PermissionAnswer(answer) => {
                Some((answer.request_id.clone(), answer.decision, answer.decided_by))
            }
            _ => None,
        })
        .collect();
    assert_eq!(answers, [("spl_1.24".to_owned(), Decision::Withdrawn, Decider::Engine)]);
}

#[test]
fn an_answered_permission_is_not_withdrawn() {
    for name in ["perm_allow", "perm_deny"] {
        let told = run(name);
        assert!(events(&told).iter().all(|event| !matches!(event, Event::PermissionAnswer(_))), "{name}");
        assert_eq!(end(&told).outcome, TurnOutcome::Completed);
    }
}

#[test]
fn s41_what_counts_as_work_is_data() {
    let counts = |line: &str| {
        claude().counts_as_activity(&Frame { number: 1, body: Owned::Out(line.as_bytes().to_vec()).body() })
    };
    // A stream that only pings is a hang, and so is a process that only says that it lives.
    assert!(!counts(r#"{"type":"stream_event","event":{"type":"ping"},"session_id":"x"}"#));
    assert!(!counts(r#"{"type":"keep_alive"}"#));
    assert!(!counts("   "));
    assert!(counts(r#"{"type":"system","subtype":"api_retry","attempt":1}"#));
    assert!(counts(
        r#"{"type":"stream_event","event":{"type":"content_block_delta","delta":{"text":"ping"}}}"#
    ));
    assert!(!claude().counts_as_activity(&Frame { number: 1, body: Owned::Err(b"x".to_vec()).body() }));
    let progress = recording("long_tool")
        .frames
        .into_iter()
        .filter(|frame| matches!(frame, Owned::Out(line) if line.starts_with(br#"{"type":"tool_progress""#)));
    let progress: Vec<Owned> = progress.collect();
    assert_eq!(progress.len(), 2, "75 s of a silent command");
    for frame in &progress {
        assert!(claude().counts_as_activity(&Frame { number: 1, body: frame.body() }));
    }
    for frame in &recording("pings_then_text").frames {
        if let Owned::Out(line) = frame {
            let ping = String::from_utf8_lossy(line).contains(r#"{"type":"ping"}"#);
            assert_eq!(counts(&String::from_utf8_lossy(line)), !ping);
        }
    }
}

#[test]
fn a_silence_can_be_explained() {
    let waiting = |name: &str, until: fn(&Output) -> bool| {
        let run = recording(name);
        let mut reader = translator(&run.open);
        for (number, frame) in (1_u64..).zip(&run.frames) {
            if reader.feed(Frame { number, body: frame.body() }).iter().any(until) {
                break;
            }
        }
        reader.standing().waiting_for
    };
    let tool = |output: &Output| matches!(output, Output::Event { event: Event::ToolCall(_) });
    let asked = |output: &Output| matches!(output, Output::Event { event: Event::PermissionRequest(_) });
    let retry = |output: &Output| matches!(output, Output::Event { event: Event::Notice(_) });
    let never = |_: &Output| false;
    assert_eq!(waiting("interrupt_tool", tool), WaitingFor::Tool("Bash".into()));
    assert_eq!(waiting("perm_allow", asked), WaitingFor::Permission);
    assert_eq!(waiting("err_429", retry), WaitingFor::ModelRetry);
    assert_eq!(waiting("text", |output| matches!(output, Output::Opened(_))), WaitingFor::Message);
    assert_eq!(waiting("text", |output| matches!(output, Output::Accepted { .. })), WaitingFor::Model);
    assert_eq!(waiting("empty", never), WaitingFor::Message);
}

#[test]
fn s31_unknown_lines_are_counted() {
    let mut frames = begun();
    frames.push(Owned::Out(b"not json".to_vec()));
    frames.push(Owned::line(&json!({"type": "invented"})));
    frames.push(Owned::line(&json!({"type": "system", "subtype": "invented"})));
    frames.extend(closing("done"));
    assert_eq!(end(&play_frames(frames)).unknown_lines, 3);
    for name in names("frames") {
        for end in ends(&run(&name)) {
            assert_eq!(end.unknown_lines, 0, "{name}");
        }
    }
}

#[test]
fn s32_a_large_reply_is_cut_in_the_event_and_whole_in_the_answer() {
    let text = "é".repeat(200_000);
    let mut frames = begun();
    frames.push(said("m1", &text));
    frames.extend(closing(&text));
    let told = play_frames(frames);
    let event = events(&told).into_iter().find_map(|event| match event {
        Event::Text(text) => Some(text.clone()),
        _ => None,
    });
    let event = event.unwrap();
    assert!(event.body.truncated);
    assert_eq!((event.body.text.len(), event.body.full_bytes), (64_000, 400_000));
    let answer = &end(&told).answer.as_ref().unwrap().body;
    assert_eq!((answer.text.len(), answer.truncated), (400_000, false));

    let huge = "x".repeat(3_000_000);
    let mut frames = begun();
    frames.push(said("m1", &huge));
    frames.extend(closing(&huge));
    let told = play_frames(frames);
    let answer = &end(&told).answer.as_ref().unwrap().body;
    assert_eq!((answer.text.len(), answer.truncated, answer.full_bytes), (1_048_576, true, 3_000_000));
}

#[test]
fn every_event_fits_its_limit() {
    let big = "é".repeat(100_000);
    let mut frames = begun();
    frames.push(Owned::line(
        &json!({"type": "assistant", "parent_tool_use_id": big, "message": {"id": big, "model": "m",
        "content": [{"type": "tool_use", "id": big, "name": big, "input": {"file_path": big}}]}}),
    ));
    frames.push(Owned::line(&json!({"type": "user", "message": {"content":
        [{"type": "tool_result", "tool_use_id": big, "content": big}]}})));
    frames.push(Owned::line(&json!({"type": "control_request", "request_id": "r", "request":
        {"subtype": "can_use_tool", "tool_name": big, "input": {"a": big}, "description": big}})));
    frames.push(Owned::line(&json!({"type": "system", "subtype": "informational", "content": big})));
    frames.extend(closing("done"));
    for event in events(&play_frames(frames)) {
        let size = serde_json::to_vec(event).unwrap().len();
        assert!(size < 64_000 + 5 * 4_096, "{} has {size} bytes", event.kind());
    }
}

#[test]
fn permissions_of_one_reply_are_asked_one_after_the_other() {
    let told = run("two_permissions");
    let story: Vec<String> = events(&told)
        .into_iter()
        .filter_map(|event| match event {
            Event::PermissionRequest(request) => Some(format!("asked {}", request.request_id)),
            Event::ToolResult(result) => Some(format!("result error={}", result.is_error)),
            _ => None,
        })
        .collect();
    assert_eq!(story, ["asked spl_1.20", "result error=false", "asked spl_1.32", "result error=true"]);
    assert!(events(&told).iter().all(|event| !matches!(event, Event::PermissionAnswer(_))));
}

#[test]
fn s27_results_of_parallel_calls_come_in_any_order() {
    let story: Vec<String> = events(&run("parallel_tools"))
        .into_iter()
        .filter_map(|event| match event {
            Event::ToolCall(call) => Some(format!("call {}", call.call_id)),
            Event::ToolResult(result) => Some(format!("result {}", result.call_id)),
            _ => None,
        })
        .collect();
    let call = ["call toolu_0005_0", "call toolu_0005_1", "call toolu_0005_2"];
    let result = ["result toolu_0005_2", "result toolu_0005_1", "result toolu_0005_0"];
    assert_eq!(story, [call, result].concat());
}

#[test]
fn an_answer_that_comes_back_was_taken() {
    let mut run = recording("perm_allow");
    run.frames.retain(|frame| !matches!(frame, Owned::Intent(op) if op.starts_with("permission.")));
    assert!(events(&play(&run)).iter().all(|event| !matches!(event, Event::PermissionAnswer(_))));
}
