//! Sessions: the file, resuming, refusing.

use std::{fs, io::Write as _};

use serde_json::{Value, json};

use crate::driver::{Home, kinds, of, result, said};

const ID: &str = "aaaaaaaa-aaaa-4aaa-8aaa-aaaaaaaaaaaa";
const A: &str = "11111111-1111-4111-8111-111111111111";
const B: &str = "22222222-2222-4222-8222-222222222222";

/// A session with one turn, ended gracefully.
fn one_turn() -> Home {
    let home = Home::new();
    let mut engine = home.warm(&[&format!("--session-id={ID}")]);
    engine.turn(A, "first [[text:one]]");
    engine.close();
    assert!(engine.wait().success());
    home
}

fn resume() -> String {
    format!("--resume={ID}")
}

#[test]
fn a_session_is_resumed_with_its_texts_and_costs() {
    let home = one_turn();
    let mut engine = home.warm(&[&resume()]);
    let lines = engine.turn(B, "[[recall]]");
    assert_eq!(said(&lines), ["first [[text:one]] | [[recall]]"]);
    let result = result(&lines);
    assert_eq!(result["session_id"], ID);
    assert_eq!(result["modelUsage"]["m1"]["inputTokens"], 200);
    assert_eq!(result["model_usage_since_last_result"]["m1"]["inputTokens"], 100);
}

#[test]
fn the_file_is_append_only_and_private() {
    use std::os::unix::fs::PermissionsExt;
    let home = one_turn();
    let path = home.session_file(ID);
    assert_eq!(fs::metadata(&path).expect("there").permissions().mode() & 0o777, 0o600);
    let before = fs::read(&path).expect("there");
    home.warm(&[&resume()]).turn(B, "more");
    let after = fs::read(&path).expect("there");
    assert!(after.len() > before.len() && after.starts_with(&before));
    let rows: Vec<Value> =
        after.split(|byte| *byte == b'\n').filter_map(|row| serde_json::from_slice(row).ok()).collect();
    assert_eq!(rows[1]["parentUuid"], rows[0]["uuid"]);
}

#[test]
fn s64_a_used_uuid_is_answered_with_silence_here_and_after_a_resume() {
    let home = one_turn();
    let mut engine = home.warm(&[&resume()]);
    engine.say(A, "again");
    assert_eq!(kinds(&[engine.next(), engine.next()]), ["user", "command_lifecycle.completed"]);
    engine.turn(B, "x");
    engine.say(B, "again");
    let idle = "system.session_state_changed.idle";
    assert_eq!(kinds(&[engine.next(), engine.next()]), ["user", idle], "no result, no lifecycle");
    engine.close();
    assert!(engine.wait().success());
    assert_eq!(engine.raw(), None, "no line more");
}

#[test]
fn a_session_that_cannot_be_resumed_is_refused_at_once() {
    let home = one_turn();
    let path = home.session_file(ID);
    let good = fs::read(&path).expect("there");
    let damages = [("zero", Vec::new()), ("garbage", b"x\ny\n".to_vec()), ("cut early", good[..20].to_vec())];
    for (name, damaged) in damages {
        fs::write(&path, damaged).expect("written");
        let mut engine = home.warm(&[&resume()]);
        let line = engine.next();
        assert_eq!(
            (&line["subtype"], &line["num_turns"]),
            (&json!("error_during_execution"), &json!(0)),
            "{name}"
        );
        assert_eq!(line["errors"], json!([format!("No conversation found with session ID: {ID}")]), "{name}");
        assert_eq!(engine.wait().code(), Some(1), "{name}");
        assert!(engine.stderr().contains("No conversation found"), "{name}");
    }
    fs::remove_file(&path).expect("removed");
    assert_eq!(home.warm(&[&resume()]).next()["type"], "result");
}

#[test]
fn a_broken_row_in_the_middle_is_left_out_without_a_word() {
    let home = one_turn();
    let path = home.session_file(ID);
    let mut file = fs::OpenOptions::new().append(true).open(&path).expect("there");
    file.write_all(b"{\"type\":\"user\",\"uuid\":\"cut").expect("written");
    assert_eq!(said(&home.warm(&[&resume()]).turn(B, "[[text:fine]]")), ["fine"]);
    let text = fs::read_to_string(&path).expect("there");
    let broken: Vec<_> = text.lines().filter(|row| serde_json::from_str::<Value>(row).is_err()).collect();
    assert_eq!(broken, ["{\"type\":\"user\",\"uuid\":\"cut"], "it stays on its own line");
}

#[test]
fn an_id_in_use_is_refused() {
    let home = one_turn();
    let output = home
        .command(&[
            "-p",
            "--verbose",
            "--output-format=stream-json",
            "--input-format=stream-json",
            "--session-id",
            ID,
        ])
        .output()
        .expect("run");
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(
        String::from_utf8_lossy(&output.stderr),
        format!("Error: Session ID {ID} is already in use.\n")
    );
}

#[test]
fn s17_a_fork_has_another_id_and_the_parent_s_texts() {
    let home = one_turn();
    let before = fs::read(home.session_file(ID)).expect("there");
    let lines = home.warm(&[&resume(), "--fork-session"]).turn(B, "[[recall]]");
    assert_ne!(result(&lines)["session_id"], ID);
    assert_eq!(said(&lines), ["first [[text:one]] | [[recall]]"]);
    assert_eq!(fs::read(home.session_file(ID)).expect("there"), before);
}

#[test]
fn no_save_loses_what_follows() {
    let home = Home::new();
    home.warm(&[&format!("--session-id={ID}")]).turn(A, "[[no_save]][[text:lost]]");
    let text = fs::read_to_string(home.session_file(ID)).expect("there");
    assert_eq!(text.lines().count(), 1, "the user's row was written before: {text}");
}

#[test]
fn usage_is_as_the_script_says() {
    let home = Home::new();
    let lines = home.warm(&[]).turn(A, "[[usage in=7 out=8 read=9 created=10]][[text:x]]");
    let counts = &result(&lines)["model_usage_since_last_result"]["m1"];
    assert_eq!(
        (&counts["inputTokens"], &counts["outputTokens"], &counts["cacheReadInputTokens"]),
        (&json!(7), &json!(8), &json!(9))
    );
    assert_eq!(of(&lines, "result").len(), 1);
}
