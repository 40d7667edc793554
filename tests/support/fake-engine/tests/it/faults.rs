//! The faults, each seen from outside.

use std::{
    fs,
    io::{BufRead, BufReader, Write as _},
    os::unix::{net::UnixListener, process::ExitStatusExt},
    process::Stdio,
    time::{Duration, Instant},
};

use serde_json::json;

use crate::driver::{Engine, Home, WARM, is_alive, of, result, said, wait_for};

const A: &str = "11111111-1111-4111-8111-111111111111";
const B: &str = "22222222-2222-4222-8222-222222222222";

#[test]
fn raw_bytes_come_as_they_are() {
    let home = Home::new();
    let mut engine = home.warm(&[]);
    engine.say(A, "[[raw b64 repeat=2:/wAK]][[line:banner]][[garbage lines=2]][[text:end]]");
    engine.until(|line| line["type"] == "user");
    let lines: Vec<_> = (0..5).map(|_| engine.raw().expect("a line")).collect();
    assert_eq!(lines[..3], [b"\xff\0\n".to_vec(), b"\xff\0\n".to_vec(), b"banner\n".to_vec()]);
    assert!(std::str::from_utf8(&lines[3]).is_err() && lines[4].starts_with(b"\x1b[31mgarbage 1"));
    assert_eq!(said(&engine.until_idle()), ["end"]);
}

#[test]
fn long_lines_have_their_length_and_may_lack_their_end() {
    let home = Home::new();
    let mut engine = home.warm(&[]);
    engine.say(A, "[[long bytes=3000000]][[long bytes=1000 open]][[exit]]");
    engine.until(|line| line["type"] == "user");
    let closed = engine.raw().expect("a line");
    assert_eq!(closed.len(), 3_000_000);
    assert!(serde_json::from_slice::<serde_json::Value>(&closed).is_ok());
    assert_eq!(engine.raw().expect("what came"), vec![b'x'; 1000]);
    assert_eq!(engine.raw(), None);
}

#[test]
fn split_writes_arrive_in_pieces_and_are_whole_in_the_end() {
    let home = Home::new();
    let mut engine = home.warm(&[]);
    let lines = engine.turn(A, "[[split bytes=3 delay=1]][[text:grüße, 世界]][[split bytes=0]]");
    assert_eq!(said(&lines), ["grüße, 世界"]);
    // 3 bytes a millisecond: the line of the block alone has more than 300.
    assert!(result(&lines)["duration_ms"].as_u64() > Some(90), "{}", result(&lines)["duration_ms"]);
}

#[test]
fn many_events_come_whole_and_fast() {
    let home = Home::new();
    let mut engine = home.warm(&["--include-partial-messages"]);
    let lines = engine
        .turn(A, "[[events count=2000 bytes=100]][[events count=500 bytes=10 delta]][[huge bytes=200000]]");
    let said = said(&lines);
    assert_eq!((said.len(), said[0].len(), said[2000].len(), said[2001].len()), (2002, 100, 5000, 200_000));
    let deltas = of(&lines, "stream_event")
        .iter()
        .filter(|line| line["event"]["type"] == "content_block_delta")
        .count();
    assert_eq!(deltas, 2501);
}

#[test]
fn clocked_events_tell_when_they_were_said() {
    let now = || {
        let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("after 1970");
        since.as_micros()
    };
    let home = Home::new();
    let before = now();
    let lines = home.warm(&[]).turn(A, "[[events count=20 bytes=9 clock]]");
    let after = now();
    let times: Vec<u128> = said(&lines)
        .iter()
        .map(|text| text.split_once(' ').expect("a time and the text").0.parse().expect("a number"))
        .collect();
    assert_eq!(times.len(), 20);
    assert!(times.is_sorted() && times[0] >= before && times[19] <= after, "{before} {times:?} {after}");
}

#[test]
fn stderr_takes_text_and_bytes() {
    let home = Home::new();
    let mut engine = home.warm(&[]);
    engine.turn(A, "[[stderr:a word]][[stderr bytes=300000]]");
    engine.close();
    engine.wait();
    let stderr = engine.stderr();
    assert!(stderr.starts_with("a word\nThe quick"));
    assert_eq!(stderr.len(), 300_007);
}

#[test]
fn gates_hold_the_turn_until_they_open() {
    let home = Home::new();
    let mut engine = home.warm(&[]);
    let (file, socket) = (home.path("gate"), home.path("socket"));
    let listener = UnixListener::bind(&socket).expect("bound");
    engine.say(
        A,
        &format!("[[text:a]][[socket:{}]][[text:b]][[gate:{}]][[text:c]]", socket.display(), file.display()),
    );
    let (mut peer, _) = listener.accept().expect("the engine at its gate");
    let mut pid = String::new();
    BufReader::new(peer.try_clone().expect("cloned")).read_line(&mut pid).expect("a line");
    assert_eq!(pid.trim(), engine.child.id().to_string());
    assert_eq!(said(&engine.until(|line| line["type"] == "assistant")), ["a"]);
    peer.write_all(b"g").expect("written");
    assert_eq!(said(&engine.until(|line| line["type"] == "assistant")), ["b"]);
    fs::write(&file, "").expect("written");
    assert_eq!(said(&engine.until_idle()), ["c"]);
}

#[test]
fn a_stalled_turn_can_be_interrupted_and_a_pause_ends_by_itself() {
    let home = Home::new();
    let mut engine = home.warm(&[]);
    engine.say(A, "[[pause ms=20]][[text:a]][[stall]]");
    engine.until(|line| line["type"] == "assistant");
    engine.control("r", json!({"subtype": "interrupt"}));
    assert_eq!(result(&engine.until_idle())["terminal_reason"], "aborted_streaming");
}

#[test]
fn an_ignored_interrupt_changes_nothing() {
    let home = Home::new();
    let mut engine = home.warm(&[]);
    let gate = home.path("gate");
    engine.say(A, &format!("[[ignore:interrupt]][[text:a]][[gate:{}]][[text:b]]", gate.display()));
    engine.until(|line| line["type"] == "assistant");
    engine.control("r", json!({"subtype": "interrupt"}));
    fs::write(gate, "").expect("written");
    let lines = engine.until_idle();
    assert!(of(&lines, "control_response").is_empty());
    assert_eq!(result(&lines)["result"], "b");
}

#[test]
fn a_hanging_engine_answers_nothing_and_dies_by_term() {
    let home = Home::new();
    let mut engine = home.warm(&[]);
    engine.say(A, "[[text:a]][[hang]]");
    engine.until(|line| line["type"] == "assistant");
    wait_for("the hang", || home.log("hang").pop());
    engine.control("r", json!({"subtype": "interrupt"}));
    engine.signal("TERM");
    assert_eq!(engine.wait().code(), Some(143));
    assert_eq!(engine.raw(), None, "not even an answer");
}

#[test]
fn term_is_ignored_where_the_script_says_so() {
    let home = Home::new();
    let mut engine = home.warm(&[]);
    let gate = home.path("gate");
    engine.say(A, &format!("[[ignore:term,hup]][[text:a]][[gate:{}]][[text:b]]", gate.display()));
    engine.until(|line| line["type"] == "assistant");
    engine.signal("TERM");
    engine.signal("HUP");
    wait_for("both signals", || (home.log("signal").len() == 2).then_some(()));
    fs::write(gate, "").expect("written");
    assert_eq!(said(&engine.until_idle()), ["b"]);
    engine.signal("KILL");
    assert_eq!(engine.wait().signal(), Some(9));
}

#[test]
fn signals_end_it_as_they_end_the_real_one() {
    for (signal, code) in [("TERM", 143), ("HUP", 129), ("INT", 0)] {
        let home = Home::new();
        let mut engine = home.warm(&[]);
        engine.say(A, "[[text:a]][[stall]]");
        engine.until(|line| line["type"] == "assistant");
        engine.signal(signal);
        assert_eq!(engine.wait().code(), Some(code), "{signal}");
        let mut rest = Vec::new();
        while let Some(line) = engine.raw() {
            rest.push(serde_json::from_slice(&line).expect("JSON"));
        }
        assert_eq!(of(&rest, "result").len(), usize::from(signal == "INT"), "{signal}");
    }
}

#[test]
fn term_kills_the_running_tool() {
    let home = Home::new();
    let mut engine = home.warm(&[]);
    let pid = home.path("pid");
    engine.say(A, &format!("[[bash:echo $$ > {0}.new; mv {0}.new {0}; exec sleep 600]]", pid.display()));
    let pid = wait_for("the tool's start", || fs::read_to_string(&pid).ok());
    engine.signal("TERM");
    assert_eq!(engine.wait().code(), Some(143));
    wait_for("the tool's end", || (!is_alive(&pid)).then_some(()));
}

#[test]
fn exits_and_deaths_come_without_a_result() {
    for (script, code, signal) in [
        ("[[text:a]][[exit code=7]]", Some(7), None),
        ("[[text:a]][[exit]]", Some(0), None),
        ("[[text:a]][[die:SEGV]]", None, Some(11)),
        ("[[text:a]][[die:TERM]]", None, Some(15)),
        ("[[text:a]][[die:KILL]]", None, Some(9)),
    ] {
        let home = Home::new();
        let mut engine = home.warm(&[]);
        engine.say(A, script);
        let status = engine.wait();
        assert_eq!((status.code(), status.signal()), (code, signal), "{script}");
        let mut lines = Vec::new();
        while let Some(line) = engine.raw() {
            lines.push(serde_json::from_slice(&line).expect("JSON"));
        }
        assert_eq!((said(&lines), of(&lines, "result").len()), (vec!["a".to_owned()], 0), "{script}");
    }
}

#[test]
fn a_turn_without_result_leaves_the_process_usable() {
    let home = Home::new();
    let mut engine = home.warm(&[]);
    engine.say(A, "[[text:a]][[no_result]]");
    engine.until(|line| line["type"] == "assistant");
    let lines = engine.turn(B, "[[text:b]]");
    assert_eq!(of(&lines, "result").len(), 1);
    assert_eq!(result(&lines)["user_message_uuid"], B);
}

#[test]
fn a_forked_child_holds_stdout_after_the_end() {
    let home = Home::new();
    let mut engine = home.warm(&[]);
    let pid = home.path("pid");
    engine.say(A, &format!("[[fork ms=60000 pidfile={}]][[exit]]", pid.display()));
    engine.until(|line| line["type"] == "user");
    assert!(engine.wait().success());
    let pid = fs::read_to_string(pid).expect("written");
    assert!(is_alive(&pid));
    let out = fs::read_link(format!("/proc/{pid}/fd/1")).expect("open");
    assert!(out.to_string_lossy().starts_with("pipe:"), "{out:?}");
    kill(&pid);
    assert_eq!(engine.raw(), None, "now the pipe has ended");
}

#[test]
fn a_detached_child_lives_on_in_a_session_of_its_own() {
    for (flags, holds) in [("detached", false), ("detached hold", true)] {
        let home = Home::new();
        let mut engine = home.warm(&[]);
        let pid = home.path("pid");
        engine.turn(A, &format!("[[fork {flags} ms=60000 pidfile={}]]", pid.display()));
        let pid = fs::read_to_string(pid).expect("written");
        wait_for("its own session", || {
            let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
            let session = stat.rsplit(") ").next()?.split(' ').nth(3)?.to_owned();
            (session == pid.trim()).then_some(())
        });
        let out = fs::read_link(format!("/proc/{pid}/fd/1")).expect("open");
        assert_eq!(out.to_string_lossy().starts_with("pipe:"), holds, "{out:?}");
        engine.signal("KILL");
        engine.wait();
        assert!(is_alive(&pid));
        kill(&pid);
    }
}

#[test]
fn a_deaf_engine_goes_on_and_reads_no_more() {
    let home = Home::new();
    let mut engine = home.warm(&[]);
    let socket = home.path("socket");
    let listener = UnixListener::bind(&socket).expect("bound");
    engine.say(A, &format!("[[deaf]][[socket:{}]][[text:a]]", socket.display()));
    let (peer, _) = listener.accept().expect("the engine at its gate");
    for _ in 0..50 {
        engine.control("r", json!({"subtype": "get_usage"}));
    }
    drop(peer);
    let lines = engine.until_idle();
    assert_eq!(said(&lines), ["a"]);
    // The reader may have been waiting for one more line when it became deaf.
    assert!(of(&lines, "control_response").len() <= 1);
    assert!(home.log("stdin").len() <= 2);
    engine.signal("TERM");
    assert_eq!(engine.wait().code(), Some(143));
}

#[test]
fn an_ignored_end_of_stdin_keeps_it_alive() {
    let home = Home::new();
    let mut engine = home.warm(&[]);
    engine.turn(A, "[[ignore:eof]]");
    engine.close();
    wait_for("the end of stdin", || home.log("eof").pop());
    assert!(engine.child.try_wait().expect("waitable").is_none());
    engine.signal("TERM");
    assert_eq!(engine.wait().code(), Some(143));
}

#[test]
fn a_script_file_acts_at_start_at_initialize_in_turns_and_at_the_end() {
    let home = Home::new();
    let mut engine = home.scripted(
        "comment\n@start\n[[line:banner]]\n@initialize\n[[line:before]]\n@turn\n[[text:from file]]\n@exit\n[[exit code=5]]\n",
    );
    assert_eq!(engine.raw().expect("a line"), b"banner\n");
    engine.control("r", json!({"subtype": "initialize"}));
    assert_eq!(engine.raw().expect("a line"), b"before\n");
    assert_eq!(engine.next()["type"], "control_response");
    assert_eq!(said(&engine.turn(A, "plain")), ["from file"]);
    assert_eq!(said(&engine.turn(B, "[[text:own]]")), ["own"]);
    engine.close();
    assert_eq!(engine.wait().code(), Some(5));
}

#[test]
fn a_broken_script_file_ends_it_with_2() {
    let home = Home::new();
    let mut engine = home.scripted("@start\n[[nosuch]]\n");
    assert_eq!(engine.wait().code(), Some(2));
    assert!(engine.stderr().contains("nosuch"));
}

#[test]
fn a_closed_stdout_does_not_end_it() {
    let home = Home::new();
    let effect = home.path("effect");
    let mut child =
        home.command(&WARM).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("started");
    drop(child.stdout.take());
    let content = format!("[[text:a]][[append path={}:done]]", effect.display());
    let line = json!({"type": "user", "message": {"role": "user", "content": content}});
    writeln!(child.stdin.as_mut().expect("piped"), "{line}").expect("written");
    wait_for("the effect", || fs::read_to_string(&effect).ok().filter(|text| text == "done\n"));
    drop(child.stdin.take());
    assert!(wait_for("its end", || child.try_wait().expect("waitable")).success());
}

#[test]
fn the_log_holds_the_start_and_every_line() {
    let home = Home::new();
    let mut engine = home.warm(&[]);
    engine.turn(A, "x");
    engine.close();
    engine.wait();
    assert!(home.log("start")[0].as_array().is_some_and(|words| words.contains(&json!("--model=m1"))));
    assert_eq!((home.log("stdin").len(), home.log("exit")), (1, vec![json!(0)]));
}

#[test]
fn it_starts_fast() {
    let home = Home::new();
    let fastest = (0..10)
        .map(|_| {
            let start = Instant::now();
            let mut engine: Engine = home.warm(&[]);
            engine.control("r", json!({"subtype": "initialize"}));
            engine.next();
            start.elapsed()
        })
        .min()
        .expect("ten");
    // 5 ms is the aim; a busy machine and a debug build get some room.
    assert!(fastest < Duration::from_millis(25), "{fastest:?}");
}

fn kill(pid: &str) {
    let status = std::process::Command::new("kill").args(["-KILL", pid.trim()]).status().expect("run");
    assert!(status.success());
}
