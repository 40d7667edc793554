//! The process: signals, ends, and bytes that are none of the dialect.

use std::os::unix::process::ExitStatusExt as _;

use serde_json::{Value, json};

use super::server::{end, said};
use crate::driver::{Home, is_alive, wait_for};

/// A server in a turn whose tool runs, and the tool's pid.
fn in_a_tool(home: &Home) -> (super::server::Server, String) {
    let mut server = home.codex().open(&json!({}));
    let pidfile = home.path("pid");
    let _ = std::fs::remove_file(&pidfile);
    server.say(&format!("[[bash:echo $$ > {}; exec sleep 600]]", pidfile.display()));
    let pid =
        wait_for("the command", || std::fs::read_to_string(&pidfile).ok().filter(|pid| pid.ends_with('\n')));
    (server, pid)
}

fn gone(pid: &str) {
    wait_for("the tool's end", || (!is_alive(pid)).then_some(()));
}

#[test]
fn the_end_of_stdin_and_sigterm_end_it_at_once_with_its_tools() {
    let home = Home::new();
    let (mut server, pid) = in_a_tool(&home);
    server.engine.close();
    assert_eq!(server.engine.wait().code(), Some(0));
    gone(&pid);
    let (mut server, pid) = in_a_tool(&home);
    server.engine.signal("TERM");
    assert_eq!(server.engine.wait().code(), Some(0));
    gone(&pid);
    let ends = std::iter::from_fn(|| server.engine.raw())
        .filter(|line| String::from_utf8_lossy(line).contains("turn/completed"));
    assert_eq!(ends.count(), 0, "no end is told");
}

#[test]
fn sigint_and_sigkill_leave_the_tools_behind() {
    let home = Home::new();
    for (name, number) in [("INT", 2), ("KILL", 9)] {
        let (mut server, pid) = in_a_tool(&home);
        server.engine.signal(name);
        assert_eq!(server.engine.wait().signal(), Some(number), "{name}");
        assert!(is_alive(&pid), "{name}");
        let killed = std::process::Command::new("kill").args(["-KILL", pid.trim()]).status().expect("run");
        assert!(killed.success());
    }
}

#[test]
fn what_is_ignored_is_ignored() {
    let home = Home::new();
    let mut server = home.codex().open(&json!({}));
    let gate = home.path("gate");
    let turn =
        server.say(&format!("[[ignore:term,int,hup,interrupt,eof]][[text:a]][[gate:{}]]", gate.display()));
    server.engine.until(|line| line["params"]["item"]["type"] == "agentMessage");
    for name in ["TERM", "INT", "HUP"] {
        server.engine.signal(name);
    }
    server.send("turn/interrupt", json!({"turnId": turn}));
    server.engine.close();
    wait_for("the signals and the end", || {
        (home.log("signal").len() == 3 && home.log("eof").len() == 1).then_some(())
    });
    std::fs::write(&gate, "").expect("written");
    assert_eq!(end(&server.ended())["status"], "completed");
}

#[test]
fn it_dies_exits_hangs_and_leaves_children_as_scripts_say() {
    let home = Home::new();
    let mut server = home.codex().open(&json!({}));
    server.say("[[die:SEGV]]");
    assert_eq!(server.engine.wait().signal(), Some(11));
    let mut server = home.codex().open(&json!({}));
    let pidfile = home.path("child");
    server.say(&format!("[[fork detached hold ms=60000 pidfile={}]][[exit code=7]]", pidfile.display()));
    assert_eq!(server.engine.wait().code(), Some(7));
    let pid = std::fs::read_to_string(&pidfile).expect("written");
    assert!(is_alive(&pid));
    assert!(std::process::Command::new("kill").args(["-KILL", &pid]).status().expect("run").success());
    let mut server = home.codex().open(&json!({}));
    server.say("[[hang]]");
    wait_for("the hang", || (home.log("hang").len() == 1).then_some(()));
    server.send("thread/loaded/list", json!({}));
    server.engine.signal("TERM");
    server.engine.wait();
    let answers = std::iter::from_fn(|| server.engine.raw())
        .filter(|line| String::from_utf8_lossy(line).starts_with("{\"id\":"));
    assert_eq!(answers.count(), 0, "nothing is answered");
}

#[test]
fn bytes_that_are_no_lines_of_it_come_where_the_script_says() {
    let home = Home::new();
    let mut server = home.codex().open(&json!({}));
    server
        .say("[[raw b64 repeat=2:/wAK]][[line:banner]][[garbage lines=1]][[long bytes=3000000]][[text:end]]");
    let heard =
        |line: &Value| line["method"] == "item/completed" && line["params"]["item"]["type"] == "userMessage";
    server.engine.until(heard);
    let lines: Vec<_> = (0..5).map(|_| server.engine.raw().expect("a line")).collect();
    assert_eq!(lines[..3], [b"\xff\0\n".to_vec(), b"\xff\0\n".to_vec(), b"banner\n".to_vec()]);
    assert!(std::str::from_utf8(&lines[3]).is_err());
    assert_eq!(lines[4].len(), 3_000_000);
    assert_eq!(said(&server.ended()), ["end"]);
    assert_eq!(
        said(&server.turn("[[split bytes=3 delay=0]][[text:grüße, 世界]][[split bytes=0]]")),
        ["grüße, 世界"]
    );
    server.turn("[[stderr:a word]]");
    server.engine.close();
    server.engine.wait();
    assert_eq!(server.engine.stderr(), "a word\n");
}

#[test]
fn deaf_it_hears_nothing_and_goes_on() {
    let home = Home::new();
    let mut server = home.codex().open(&json!({}));
    server.say("[[deaf]][[text:a]]");
    assert_eq!(said(&server.ended()), ["a"]);
}

#[test]
fn sockets_hold_a_turn_until_they_are_answered() {
    use std::{
        io::{BufRead as _, BufReader, Write as _},
        os::unix::net::UnixListener,
    };
    let home = Home::new();
    let socket = home.path("socket");
    let listener = UnixListener::bind(&socket).expect("bound");
    let mut server = home.codex().open(&json!({}));
    server.say(&format!("[[socket:{}]][[text:b]]", socket.display()));
    let (mut peer, _) = listener.accept().expect("the engine at its gate");
    let mut pid = String::new();
    BufReader::new(peer.try_clone().expect("cloned")).read_line(&mut pid).expect("a line");
    assert_eq!(pid.trim(), server.engine.child.id().to_string());
    peer.write_all(b"g").expect("written");
    assert_eq!(said(&server.ended()), ["b"]);
}

#[test]
fn sections_of_the_script_file_are_obeyed_in_their_places() {
    let home = Home::new();
    let script =
        "@start\n[[line:before anything]]\n@initialize\n[[line:before the answer]]\n@exit\n[[exit code=3]]\n";
    std::fs::write(home.path("script"), script).expect("written");
    let mut command = home.codex_command();
    command.env("FAKE_ENGINE_SCRIPT", home.path("script"));
    let mut server = super::server::Server::bare(command);
    assert_eq!(server.engine.raw().expect("a line"), b"before anything\n");
    server.send("initialize", json!({"clientInfo": {"name": "t", "version": "0"}}));
    assert_eq!(server.engine.raw().expect("a line"), b"before the answer\n");
    server.engine.close();
    assert_eq!(server.engine.wait().code(), Some(3));
}

#[test]
fn the_command_line_is_the_real_one_s() {
    let home = Home::new();
    let codex = |words: &[&str]| {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_fake-codex"));
        command.args(words).env_clear().env("CODEX_HOME", home.path("codex")).output().expect("run")
    };
    assert_eq!(String::from_utf8_lossy(&codex(&["--version"]).stdout), "codex-cli 0.171.0\n");
    assert_eq!(codex(&["nosuch"]).status.code(), Some(2));
    assert_eq!(codex(&["app-server", "--nosuch"]).status.code(), Some(2));
    let flags = ["app-server", "-c", "a=1", "--disable", "x", "--listen", "stdio://"];
    assert_eq!(codex(&flags).status.code(), Some(0), "stdin is at its end");
}
