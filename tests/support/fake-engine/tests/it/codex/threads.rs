//! Threads: the rollout, resuming, refusing.

use std::fs;

use serde_json::{Value, json};

use super::server::{Server, items, kinds, said, usage};
use crate::driver::Home;

const UNKNOWN: &str = "01a22df9-ac05-7f31-91b4-3a357cf76023";

/// The rollout's path.
fn rollout(result: &Value) -> String {
    result["thread"]["path"].as_str().expect("a path").to_owned()
}

/// A thread with one turn, in a process that has ended: its id and its rollout's path.
fn one_turn(home: &Home) -> (String, String) {
    let mut server = home.codex();
    let result =
        server.ask("thread/start", json!({"cwd": home.work(), "model": "m1", "sandbox": "workspace-write"}));
    server.thread = result["thread"]["id"].as_str().expect("an id").to_owned();
    server.turn("first [[bash:echo x]][[text:one]]");
    let thread = server.thread.clone();
    end(server);
    (thread, rollout(&result))
}

fn end(mut server: Server) {
    server.engine.close();
    assert_eq!(server.engine.wait().code(), Some(0));
}

#[test]
fn a_thread_is_resumed_with_its_texts_its_counts_and_its_settings() {
    let home = Home::new();
    let (thread, _) = one_turn(&home);
    let mut server = home.codex();
    let id = server.send("thread/resume", json!({"threadId": thread, "excludeTurns": true}));
    let lines = server.engine.until(|line| line["method"] == "thread/goal/cleared");
    let answer = lines.iter().find(|line| line["id"] == id && line["method"].is_null()).expect("an answer");
    let expected =
        ["thread/status/changed idle", "answer", "thread/tokenUsage/updated", "thread/goal/cleared"];
    assert_eq!(kinds(&lines)[lines.len() - 4..], expected);
    assert_eq!(usage(&lines)["total"]["totalTokens"], 310, "told again");
    let result = &answer["result"];
    assert_eq!((&result["model"], &result["sandbox"]["type"]), (&json!("m1"), &json!("workspaceWrite")));
    server.thread = thread;
    let lines = server.turn("[[recall]]");
    assert_eq!(said(&lines), ["first [[bash:echo x]][[text:one]] | [[recall]]"]);
    assert_eq!(usage(&lines)["total"]["totalTokens"], 465);
}

#[test]
fn the_rollout_is_append_only_private_and_in_its_place() {
    use std::os::unix::fs::PermissionsExt;
    let home = Home::new();
    let (thread, path) = one_turn(&home);
    let dir = home.path("codex/sessions").display().to_string();
    assert!(path.starts_with(&dir) && path.ends_with(&format!("-{thread}.jsonl")), "{path}");
    assert_eq!(fs::metadata(&path).expect("there").permissions().mode() & 0o777, 0o600);
    let before = fs::read(&path).expect("there");
    home.codex().resume(&thread).0.turn("more");
    let after = fs::read(&path).expect("there");
    assert!(after.len() > before.len() && after.starts_with(&before));
    let text = String::from_utf8(after).expect("text");
    let rows: Vec<Value> = text.lines().map(|row| serde_json::from_str(row).expect("JSON")).collect();
    assert_eq!((&rows[0]["type"], &rows[0]["payload"]["id"]), (&json!("session_meta"), &json!(thread)));
    let numbers: Vec<_> = rows.iter().filter_map(|row| row["ordinal"].as_u64()).collect();
    assert_eq!(numbers, (0..rows.len() as u64).collect::<Vec<_>>());
    let ends = rows.iter().filter(|row| row["payload"]["type"] == "task_complete").count();
    assert_eq!(ends, 2);
}

#[test]
fn a_thread_without_a_turn_is_not_on_disk_and_an_injected_item_puts_it_there() {
    let home = Home::new();
    let server = home.codex().open(&json!({}));
    let thread = server.thread.clone();
    end(server);
    let refused = home.codex().refused("thread/resume", json!({"threadId": thread}));
    assert_eq!(refused, format!("no rollout found for thread id {thread}"));
    let mut server = home.codex().open(&json!({}));
    let thread = server.thread.clone();
    let item = json!({"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "be brief"}]});
    server.ask("thread/inject_items", json!({"items": [item]}));
    end(server);
    let (_, result) = home.codex().resume(&thread);
    assert!(fs::read_to_string(rollout(&result)).expect("there").contains("be brief"));
    assert_eq!(result["initialTurnsPage"]["data"], json!([]));
}

#[test]
fn unknown_and_odd_ids_are_refused_in_the_real_one_s_words() {
    let home = Home::new();
    let mut server = home.codex();
    let resume = server.refused("thread/resume", json!({"threadId": UNKNOWN}));
    assert_eq!(resume, format!("no rollout found for thread id {UNKNOWN}"));
    let odd = server.refused("thread/resume", json!({"threadId": "name"}));
    assert!(odd.starts_with("invalid session id: invalid character"), "{odd}");
    let turn = server.refused("turn/start", json!({"threadId": UNKNOWN, "input": []}));
    assert_eq!(turn, format!("thread not found: {UNKNOWN}"));
    assert!(
        server
            .refused("nosuch/method", json!({}))
            .starts_with("Invalid request: unknown variant `nosuch/method`")
    );
    let mut early = Server::bare(home.codex_command());
    assert_eq!(early.refused("thread/start", json!({})), "Not initialized");
    early.engine.write("no JSON");
    early.initialize(&json!({}));
}

#[test]
fn a_damaged_rollout_is_refused_or_read_in_part_as_by_the_real_one() {
    let home = Home::new();
    let (thread, path) = one_turn(&home);
    let good = fs::read(&path).expect("there");
    for (name, bytes, why) in [
        ("zero", Vec::new(), "is empty"),
        ("garbage", b"x\ny\n".to_vec(), "is empty"),
        ("first row", [b"x", &good[1..]].concat(), "does not start with session metadata"),
    ] {
        fs::write(&path, bytes).expect("written");
        let mut server = home.codex();
        let id = server.send("thread/resume", json!({"threadId": thread}));
        let error = server.answer(id)["error"].clone();
        let message = error["message"].as_str().expect("a message");
        assert_eq!(error["code"], -32603, "{name}");
        assert!(
            message.starts_with("failed to read thread: ") && message.ends_with(why),
            "{name}: {message}"
        );
    }
    fs::write(&path, &good[..good.len() - 20]).expect("written");
    let (mut server, _) = home.codex().resume(&thread);
    assert_eq!(said(&server.turn("[[text:fine]]")), ["fine"]);
    let text = fs::read_to_string(&path).expect("there");
    let broken = text.lines().filter(|row| serde_json::from_str::<Value>(row).is_err()).count();
    assert_eq!(broken, 1, "what was cut off stays on its own line");
    drop(server);
    fs::remove_file(&path).expect("removed");
    assert!(
        home.codex().refused("thread/resume", json!({"threadId": thread})).starts_with("no rollout found")
    );
}

#[test]
fn turns_are_listed_with_how_they_ended() {
    let home = Home::new();
    let mut server = home.codex().open(&json!({}));
    server.turn("one [[text:1]]");
    server.turn("two [[error 400]]");
    let turn = server.say("three [[stall]]");
    server.engine.until(|line| line["params"]["item"]["type"] == "userMessage");
    server.interrupt(&turn);
    server.say("four [[stall]]");
    server.engine.until(|line| line["method"] == "item/completed");
    let thread = server.thread.clone();
    server.engine.signal("KILL");
    server.engine.wait();
    let (mut server, result) = home.codex().resume(&thread);
    assert_eq!(result["initialTurnsPage"]["data"].as_array().map(Vec::len), Some(1));
    let listed = server.ask("thread/turns/list", json!({"itemsView": "full", "sortDirection": "asc"}));
    let turns = listed["data"].as_array().expect("a list");
    let ended: Vec<_> = turns.iter().map(|turn| turn["status"].as_str().unwrap_or_default()).collect();
    assert_eq!(ended, ["completed", "failed", "interrupted", "interrupted"]);
    assert_eq!(
        (&turns[0]["items"][0]["clientId"], &turns[1]["error"]["codexErrorInfo"]),
        (&json!("client-1"), &json!("other"))
    );
    assert_eq!(result["initialTurnsPage"]["data"][0]["id"], turns[3]["id"], "the newest first");
}

#[test]
fn a_thread_has_one_writer() {
    let home = Home::new();
    let mut server = home.codex().open(&json!({}));
    server.turn("x");
    let thread = server.thread.clone();
    let refused = home.codex().refused("thread/resume", json!({"threadId": thread}));
    assert_eq!(refused, format!("thread {thread} already has an active writer"));
    server.engine.signal("KILL");
    server.engine.wait();
    home.codex().resume(&thread);
}

#[test]
fn s17_a_fork_has_another_id_and_the_parent_s_texts() {
    let home = Home::new();
    let (thread, path) = one_turn(&home);
    let before = fs::read(&path).expect("there");
    let (mut server, _) = home.codex().resume(&thread);
    let fork = server.ask("thread/fork", json!({"excludeTurns": true}))["thread"].clone();
    assert_eq!(fork["forkedFromId"], thread.as_str());
    server.thread = fork["id"].as_str().expect("an id").to_owned();
    assert_eq!(said(&server.turn("[[recall]]")), ["first [[bash:echo x]][[text:one]] | [[recall]]"]);
    assert_eq!(fs::read(&path).expect("there"), before);
}

#[test]
fn no_save_loses_what_follows() {
    let home = Home::new();
    let mut server = home.codex().open(&json!({}));
    server.turn("[[no_save]][[text:lost]]");
    let thread = server.thread.clone();
    end(server);
    let (mut server, result) = home.codex().resume(&thread);
    let turn = &result["initialTurnsPage"]["data"][0];
    assert_eq!(turn["status"], "interrupted", "its end was not written");
    assert!(!fs::read_to_string(rollout(&result)).expect("there").contains("\"lost\""));
    assert_eq!(items(&server.turn("x"), "userMessage").len(), 1);
}

#[test]
fn several_threads_are_told_apart() {
    let home = Home::new();
    let server = home.codex().open(&json!({}));
    let first = server.thread.clone();
    let mut server = server.open(&json!({}));
    let second = server.thread.clone();
    assert_eq!(server.ask("thread/loaded/list", json!({}))["data"], json!([first, second]));
    server.turn("second [[text:2]]");
    server.thread = first;
    assert_eq!(said(&server.turn("[[recall]]")), ["[[recall]]"]);
}
