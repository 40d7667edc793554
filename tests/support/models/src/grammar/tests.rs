//! The grammar, marker by marker.

use super::*;

fn script(text: &str) -> Script {
    Script::parse(text).expect("a valid script")
}

fn problem(text: &str) -> String {
    parse(text).expect_err("an invalid script").to_string()
}

#[test]
fn text_without_markers_is_no_script() {
    assert_eq!(parse("if [[ -f x ]]; then [[]] [[1]]").expect("no marker"), None);
}

#[test]
fn words_around_markers_are_ignored() {
    let script = script("please [[text:a]] and then [[gate:g-1]][[text:b]] thanks");
    assert_eq!(script.replies(), [Reply::default().text("a").gate("g-1").text("b")]);
}

#[test]
fn every_tool_call_is_a_reply_and_the_last_one_gets_an_end() {
    let script = script("[[text:go]][[bash:echo a]][[bash timeout=5:echo b]]");
    let second = json!({"command": "echo b", "description": "scripted", "timeout": 5});
    assert_eq!(
        script.replies(),
        [
            Reply::default().text("go").bash("echo a"),
            Reply::default().tool("Bash", second),
            Reply::default().text("done")
        ]
    );
}

#[test]
fn and_joins_calls_in_one_reply() {
    let script = script("[[bash:a]][[and]][[read:/f]][[text:end]]");
    let both = Reply::default().bash("a").tool("Read", json!({"file_path": "/f"}));
    assert_eq!(script.replies(), [both, Reply::default().text("end")]);
}

#[test]
fn write_takes_lines_and_a_tool_takes_json() {
    let script =
        script("[[write path=/w/a.txt:one\ntwo:three]][[tool name=Glob:{\"pattern\":\"*\"}]][[text:x]]");
    let write = Reply::default().tool("Write", json!({"file_path": "/w/a.txt", "content": "one\ntwo:three"}));
    let glob = Reply::default().tool("Glob", json!({"pattern": "*"}));
    assert_eq!(script.replies(), [write, glob, Reply::default().text("x")]);
}

#[test]
fn base64_carries_closing_brackets() {
    let script = script(&format!("[[bash b64:{}]][[text:x]]", BASE64_STANDARD.encode("[[ -f x ]] && ls")));
    assert_eq!(script.replies()[0], Reply::default().bash("[[ -f x ]] && ls"));
}

#[test]
fn max_tokens_and_refusal_end_their_reply() {
    let script = script("[[max_tokens:a]][[refusal]]");
    assert_eq!(script.replies()[0].stop, Some(Stop::MaxTokens));
    assert_eq!(script.replies()[1].stop, Some(Stop::Refusal));
    assert_eq!(script.replies().len(), 2);
}

#[test]
fn next_and_usage_shape_replies() {
    let script = script("[[usage in=1 out=2 read=3 created=4]][[text:a]][[next]][[text:b]]");
    let usage = Usage { input: 1, output: 2, cache_read: 3, cache_creation: 4 };
    assert_eq!(script.replies()[0], Reply { usage, ..Reply::default().text("a") });
    assert_eq!(script.replies()[1], Reply::default().text("b"));
}

#[test]
fn pacing_and_size_take_numbers() {
    let script =
        script("[[slow chunks=3 delay=7:x]][[pause ms=9]][[huge bytes=10 chunk=4]][[break]][[hold:h]]");
    let parts = vec![
        Part::Chunks { count: 3, delay: Duration::from_millis(7), text: "x".to_owned() },
        Part::Pause(Duration::from_millis(9)),
        Part::Filler { bytes: 10, chunk: 4 },
        Part::Break,
        Part::Hold("h".to_owned()),
    ];
    assert_eq!(script.replies()[0].parts, parts);
}

#[test]
fn faults_carry_how_often_and_for_whom() {
    let script =
        script("[[error 429 retry_after=2 should_retry=false times=3 scope=s:slow down]][[cut plain]]");
    let [Part::Fault(error), Part::Fault(cut)] = script.replies()[0].parts.as_slice() else {
        panic!("two faults expected: {script:?}");
    };
    assert_eq!((error.times, error.scope.as_deref(), error.plain), (Some(3), Some("s"), false));
    let headers =
        vec![("retry-after".to_owned(), "2".to_owned()), ("x-should-retry".to_owned(), "false".to_owned())];
    let (kind, message) = ("rate_limit_error".to_owned(), "slow down".to_owned());
    assert_eq!(error.fault, Fault::Status { status: 429, kind, message, headers });
    assert_eq!((&cut.fault, cut.times, cut.plain), (&Fault::Cut, None, true));
}

#[test]
fn limits_and_ends_are_faults_that_each_api_words_itself() {
    let faults: Vec<Fault> = script("[[limit reset=1234]][[too_long:full]][[credit]][[end]]").replies()[0]
        .parts
        .iter()
        .filter_map(|part| if let Part::Fault(rule) = part { Some(rule.fault.clone()) } else { None })
        .collect();
    let expected = [
        Fault::Limit { reset: 1234, message: None },
        Fault::TooLong { message: Some("full".to_owned()) },
        Fault::Credit { message: None },
        Fault::End,
    ];
    assert_eq!(faults, expected);
}

#[test]
fn what_is_malformed_is_named() {
    for (text, part) in [
        ("[[text:open", "no closing"),
        ("[[txet:x]]", "unknown verb"),
        ("[[text]]", "needs a payload"),
        ("[[text loud:x]]", "no option \"loud\""),
        ("[[slow chunks=many]]", "no number"),
        ("[[slow chunks]]", "needs a number"),
        ("[[error]]", "needs a status"),
        ("[[error 200]]", "needs a status"),
        ("[[gate:a b]]", "a gate's name"),
        ("[[huge bytes=99999999999]]", "at most"),
        ("[[and]]", "none before it"),
        ("[[bash:a]][[and]][[text:b]]", "none after it"),
        ("[[tool name=X:{]]", "bad input"),
        ("[[write:x]]", "needs path"),
        ("[[bash b64:***]]", "not base64"),
    ] {
        assert!(problem(text).contains(part), "{text}: {}", problem(text));
    }
}
