//! Tools, permissions, and commands that outlive their turn.

use serde_json::json;

use super::server::{end, items, kinds, said, usage};
use crate::driver::{Home, is_alive, wait_for};

const ASKS: &str = r#"{"approvalPolicy":"on-request","sandbox":"workspace-write"}"#;

#[test]
fn tools_do_what_they_say() {
    let home = Home::new();
    let mut server = home.codex().open(&json!({}));
    let file = home.path("file");
    let lines = server.turn(&format!(
        "[[append path={0}:one]][[append path={0}:two]][[tool name=mcp__m1__echo:{{\"x\":1}}]]",
        file.display()
    ));
    assert_eq!(std::fs::read_to_string(&file).expect("written"), "one\ntwo\n");
    let changes = items(&lines, "fileChange");
    let told: Vec<_> = changes.iter().map(|item| &item["changes"][0]["kind"]["type"]).collect();
    assert_eq!(told, ["add", "update"]);
    let call = items(&lines, "mcpToolCall")[0];
    assert_eq!(
        (&call["server"], &call["tool"], &call["status"]),
        (&json!("m1"), &json!("echo"), &json!("completed"))
    );
}

#[test]
fn a_permission_is_given_declined_or_ends_the_turn() {
    let home = Home::new();
    let mut server = home.codex().open(&serde_json::from_str(ASKS).expect("JSON"));
    let file = home.path("made");
    let script = format!("[[bash ask:touch {}]][[text:end]]", file.display());

    server.say(&script);
    let request = server.asked();
    assert_eq!(
        (&request["id"], &request["method"]),
        (&json!(0), &json!("item/commandExecution/requestApproval"))
    );
    assert!(!file.exists());
    server.reply(&request, json!({"decision": "decline"}));
    let lines = server.ended();
    let expected = [
        "serverRequest/resolved",
        "item/completed commandExecution declined",
        "thread/status/changed active",
    ];
    assert_eq!(
        (&kinds(&lines)[..3], said(&lines)),
        (&expected.map(str::to_owned)[..], vec!["end".to_owned()])
    );
    assert!(!file.exists());

    server.say(&script);
    let request = server.asked();
    server.reply(&request, json!({"decision": "cancel"}));
    let lines = server.ended();
    assert_eq!((end(&lines)["status"].as_str(), said(&lines)), (Some("interrupted"), Vec::new()));

    server.say(&script);
    let request = server.asked();
    assert_eq!(request["id"], 2, "its own counter");
    server.reply(&request, json!({"decision": "acceptForSession"}));
    assert_eq!(items(&server.ended(), "commandExecution")[0]["status"], "completed");
    assert!(file.exists());
    assert_eq!(said(&server.turn(&script)), ["end"], "no question any more");
}

#[test]
fn a_change_asks_after_it_is_announced_and_an_interrupt_ends_the_waiting() {
    let home = Home::new();
    let mut server = home.codex().open(&serde_json::from_str(ASKS).expect("JSON"));
    let file = home.path("made");
    let turn = server.say(&format!("[[append ask path={}:x]]", file.display()));
    let lines = server.engine.until(|line| line["method"] == "item/fileChange/requestApproval");
    let last = &kinds(&lines)[lines.len() - 3..];
    assert_eq!(
        last[..2],
        ["item/started fileChange inProgress", "thread/status/changed active waitingOnApproval"]
    );
    assert_eq!(end(&server.interrupt(&turn))["status"], "interrupted");
    server.engine.until(|line| line["method"] == "serverRequest/resolved");
    assert!(!file.exists());
    server.say(&format!("[[append ask path={}:x]]", file.display()));
    let request = server.asked();
    server.reply(&request, json!({"decision": "accept"}));
    assert_eq!(items(&server.ended(), "fileChange")[0]["status"], "completed");
    assert_eq!(std::fs::read_to_string(&file).expect("written"), "x\n");
}

#[test]
fn nobody_is_asked_where_the_policy_is_never() {
    let home = Home::new();
    let file = home.path("made");
    let script = format!("[[bash ask:touch {}]][[text:end]]", file.display());
    let mut server = home.codex().open(&json!({"sandbox": "workspace-write"}));
    let lines = server.turn(&script);
    assert_eq!(
        (items(&lines, "commandExecution").len(), said(&lines)),
        (0, vec!["end".to_owned()]),
        "nothing is told"
    );
    assert!(!file.exists());
    let lines = home.codex().open(&json!({})).turn(&script);
    assert_eq!(items(&lines, "commandExecution")[0]["status"], "completed");
    assert!(file.exists());
}

#[test]
fn another_request_waits_for_any_answer() {
    let home = Home::new();
    let mut server = home.codex().open(&json!({}));
    server.say("[[tool ask name=mcp__m1__echo]][[text:end]]");
    let request = server.asked();
    assert_eq!(request["method"], "mcpServer/elicitation/request");
    let error = json!({"code": -32601, "message": "not supported"});
    server.engine.write(&json!({"id": request["id"], "error": error}).to_string());
    let lines = server.ended();
    assert_eq!(
        (items(&lines, "mcpToolCall")[0]["status"].as_str(), said(&lines)),
        (Some("failed"), vec!["end".to_owned()])
    );
}

#[test]
fn an_interrupt_leaves_the_command_running_until_it_is_cleaned() {
    let home = Home::new();
    let mut server = home.codex().open(&json!({}));
    let pidfile = home.path("pid");
    let turn = server.say(&format!("[[bash:echo $$ > {}; sleep 600]]", pidfile.display()));
    let pid =
        wait_for("the command", || std::fs::read_to_string(&pidfile).ok().filter(|pid| pid.ends_with('\n')));
    let lines = server.interrupt(&turn);
    assert_eq!(
        (end(&lines)["status"].as_str(), &usage(&lines)["total"]["totalTokens"]),
        (Some("interrupted"), &json!(155))
    );
    assert_eq!(items(&lines, "commandExecution").len(), 0);
    assert!(is_alive(&pid));
    let listed = server.ask("thread/backgroundTerminals/list", json!({}));
    assert!(listed["data"][0]["command"].as_str().is_some_and(|command| command.contains("sleep 600")));
    server.ask("thread/backgroundTerminals/clean", json!({}));
    let over = server.engine.until(|line| line["method"] == "item/completed").pop().expect("the last");
    assert_eq!(over["params"]["turnId"], turn.as_str());
    assert_eq!(
        (&over["params"]["item"]["status"], &over["params"]["item"]["exitCode"]),
        (&json!("failed"), &json!(-1))
    );
    wait_for("the command's end", || (!is_alive(&pid)).then_some(()));
    assert_eq!(server.ask("thread/backgroundTerminals/list", json!({}))["data"], json!([]));
}

#[test]
fn a_long_command_does_not_hold_up_its_turn() {
    let home = Home::new();
    let mut server = home.codex().open(&json!({}));
    let gate = home.path("gate");
    let script =
        format!("[[bash yield=1:while [ ! -e {} ]; do sleep 0.01; done]][[text:end]]", gate.display());
    let turn = server.say(&script);
    let lines = server.ended();
    assert_eq!((items(&lines, "commandExecution").len(), said(&lines)), (0, vec!["end".to_owned()]));
    std::fs::write(&gate, "").expect("written");
    let over = server.engine.until(|line| line["method"] == "item/completed").pop().expect("the last");
    assert_eq!(
        (&over["params"]["turnId"], &over["params"]["item"]["exitCode"]),
        (&json!(turn), &json!(0)),
        "after its turn"
    );
}

#[test]
fn a_sandbox_that_cannot_be_made_fails_every_command() {
    let home = Home::new();
    let probe = json!({
        "command": ["/bin/echo", "x"], "cwd": home.work(),
        "sandboxPolicy": {"type": "workspaceWrite", "writableRoots": [], "networkAccess": false},
    });
    let fine = home.codex().ask("command/exec", probe.clone());
    assert_eq!(fine, json!({"exitCode": 0, "stdout": "x\n", "stderr": ""}));
    let mut command = home.codex_command();
    command.env("FAKE_ENGINE_SANDBOX", "broken");
    let mut server = super::server::Server::start(command);
    let broken = server.ask("command/exec", probe);
    assert_eq!(broken["exitCode"], 1);
    assert!(broken["stderr"].as_str().is_some_and(|text| text.starts_with("bwrap: No permissions")));
    let mut server = server.open(&json!({"sandbox": "workspace-write"}));
    let file = home.path("made");
    let lines = server.turn(&format!("[[bash:touch {}]]", file.display()));
    let command = items(&lines, "commandExecution")[0];
    assert_eq!((&command["status"], &command["exitCode"]), (&json!("failed"), &json!(1)));
    assert_eq!((end(&lines)["status"].as_str(), file.exists()), (Some("completed"), false));
    for (sandbox, code) in [("", Some(0)), ("broken", Some(1))] {
        let mut command =
            home.command(&["sandbox", "-c", "sandbox_mode=\"workspace-write\"", "--", "/bin/true"]);
        assert_eq!(command.env("FAKE_ENGINE_SANDBOX", sandbox).output().expect("run").status.code(), code);
    }
}

#[test]
fn skills_of_home_and_workspace_are_listed() {
    let home = Home::new();
    for dir in ["codex/skills/one", ".agents/skills/two"] {
        std::fs::create_dir_all(home.path(dir)).expect("made");
        std::fs::write(home.path(dir).join("SKILL.md"), "x").expect("written");
    }
    let listed = home.codex().ask("skills/list", json!({"cwds": [home.work()]}));
    let names: Vec<_> =
        listed["data"][0]["skills"].as_array().expect("a list").iter().map(|skill| &skill["name"]).collect();
    assert_eq!(names, ["one", "two"]);
}
