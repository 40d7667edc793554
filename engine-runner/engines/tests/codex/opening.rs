//! Sessions that open, and sessions that do not.

use pretty_assertions::assert_eq;
use roundhouse_engines::{
    FileFacts, Fingerprint, NativeRef, OpenMode, Output, Reason, SessionCarry, Verdict, WaitingFor,
};
use serde_json::{Value, json};

use crate::support::{
    DELIVERY, Owned, THREAD, answer, codex, ends, exit, feed, initialized, notices, open, open_failure,
    opened, play, recording, refusal, replies, reply_ops, run, thread_answer, translator, value_of,
};

fn setup(permissions: &str, prompt: &str) -> Value {
    json!({"workspace": "/srv/example/ws", "model": "m", "effort": null, "permissions": permissions, "prompt": prompt})
}

/// The line that opens the thread, as the recording's translator makes it.
fn thread_line(name: &str) -> Value {
    run(name)
        .iter()
        .find_map(|(_, _, output)| match output {
            Output::Reply(line) if line.op == "thread" => Some(value_of(line)),
            _ => None,
        })
        .unwrap()
}

#[test]
fn the_thread_is_opened_when_every_step_was_answered() {
    let mut open = open(Some(OpenMode::Start), "");
    open.carry.setup = Some(setup("ask", "p"));
    let mut reader = translator(&open);
    let ops: Vec<String> = reader.opening().into_iter().map(|line| line.op).collect();
    assert_eq!(ops, ["initialize", "initialized", "sandbox", "skills"]);
    assert_eq!(reader.standing().waiting_for, WaitingFor::Opening);
    let hello = answer(
        "initialize",
        &json!({"userAgent": "roundhouse/0.171.0 (x)", "codexHome": "/srv/example/home"}),
    );
    assert_eq!(feed(reader.as_mut(), &[hello]), vec![]);
    let outputs = feed(reader.as_mut(), &[answer("skills", &json!({"data": []}))]);
    assert_eq!(replies(&outputs).map(|line| line.op.as_str()).collect::<Vec<_>>(), ["thread"]);
    assert_eq!(feed(reader.as_mut(), &[thread_answer()]), vec![], "the sandbox has not answered");
    assert!(!reader.standing().opened);
    let outputs =
        feed(reader.as_mut(), &[answer("sandbox", &json!({"exitCode": 0, "stdout": "", "stderr": ""}))]);
    assert!(matches!(&outputs[..], [Output::Opened(opened)] if opened.native.id == THREAD));
    assert!(reader.standing().quiescent);
}

#[test]
fn s13_the_engine_chooses_the_id_and_tells_the_file() {
    assert_eq!(codex().new_native_ref(uuid::Uuid::nil()), None);
    let told = run("text");
    let opened = opened(&told);
    assert_eq!(opened.engine_version.as_deref(), Some("0.171.0"));
    let file = opened.native.file.as_deref().unwrap();
    assert!(file.starts_with("sessions/2026/") && file.ends_with(&format!("{}.jsonl", opened.native.id)));
    // A warm turn finds the thread in the carry although it was opened without an id.
    assert_eq!(ends(&run("two_turns")).len(), 2);
}

#[test]
fn s13_a_thread_is_resumable_once_its_first_message_was_taken_and_not_before() {
    let told = run("resume_after_kill_first");
    assert!(ends(&told)[0].process_gone);
    let committed = told.iter().filter(|(_, _, output)| matches!(output, Output::Committed { .. })).count();
    assert_eq!(committed, 1, "although the engine was killed in its first turn");
    assert!(ends(&run("resume_after_kill")).len() == 1);
    let mut reader = translator(&open(Some(OpenMode::Start), ""));
    feed(reader.as_mut(), &crate::support::given());
    assert!(!reader.carry().committed, "a start alone persists nothing");
}

#[test]
fn a_sandbox_that_cannot_run_is_found_before_the_first_turn() {
    let told = run("no_sandbox");
    let failed = open_failure(&told);
    assert_eq!(failed.failure.reason, Reason::Configuration);
    assert!(failed.failure.message.contains("bwrap"), "{}", failed.failure.message);
    assert_eq!(failed.retry_as, None);
    // Without a sandbox there is nothing to find.
    let mut open = open(Some(OpenMode::Start), "");
    open.carry.setup = Some(setup("bypass", "p"));
    let ops: Vec<String> = translator(&open).opening().into_iter().map(|line| line.op).collect();
    assert_eq!(ops, ["initialize", "initialized", "skills"]);
}

#[test]
fn a_sandbox_question_that_is_refused_counts_as_no_sandbox() {
    let mut open = open(Some(OpenMode::Start), "");
    open.carry.setup = Some(setup("accept-edits", "p"));
    let mut reader = translator(&open);
    let outputs = feed(reader.as_mut(), &[refusal("sandbox", "no such method")]);
    assert!(
        matches!(&outputs[..], [Output::OpenFailed(failed)] if failed.failure.reason == Reason::Configuration)
    );
}

#[test]
fn the_workspace_is_untrusted_on_start_and_on_resume() {
    for name in ["text", "resume_same", "hostile", "resume_ask"] {
        let line = thread_line(name);
        let workspace = line["params"]["cwd"].as_str().unwrap().to_owned();
        assert_eq!(line["params"]["config"]["projects"][&workspace]["trust_level"], "untrusted", "{name}");
    }
    assert_eq!(thread_line("resume_same")["method"], "thread/resume");
}

#[test]
fn each_permission_mode_has_its_approvals_and_sandbox_also_on_resume() {
    for (name, approvals, sandbox) in [
        ("text", "never", "danger-full-access"),
        ("perm_allow", "on-request", "workspace-write"),
        ("accept_edits_commit", "never", "workspace-write"),
        ("resume_ask", "on-request", "workspace-write"),
    ] {
        let params = thread_line(name)["params"].clone();
        assert_eq!(params["approvalPolicy"], approvals, "{name}");
        assert_eq!(params["sandbox"], sandbox, "{name}");
        assert_eq!(params["approvalsReviewer"], "user", "{name}");
    }
}

#[test]
fn git_is_writable_in_accept_edits_and_only_there() {
    let params = thread_line("accept_edits_commit")["params"].clone();
    let workspace = params["cwd"].as_str().unwrap();
    let roots = &params["config"]["sandbox_workspace_write"]["writable_roots"];
    assert_eq!(roots, &json!([format!("{workspace}/.git")]));
    // The real engine then commits, also in a session that is resumed from another mode.
    for (name, said) in [("accept_edits_commit", r"rc 0\n1\n"), ("accept_edits_resume", r"rc 0\n")] {
        let text = crate::support::render(&run(name));
        assert!(text.contains(&format!(r#""output":{{"text":"{said}""#)), "{text}");
    }
    let asking = thread_line("perm_allow")["params"]["config"]["sandbox_workspace_write"].clone();
    assert_eq!(asking, json!({"exclude_slash_tmp": true}), "other workspaces may lie below /tmp");
    assert_eq!(thread_line("text")["params"]["config"].get("sandbox_workspace_write"), None);
    assert_eq!(codex().leftovers(), [".git", ".codex", ".aws", ".agents"]);
}

#[test]
fn a_changed_prompt_is_injected_on_resume_and_an_unchanged_one_is_not() {
    let told = run("resume_prompt_changed");
    let injected: Vec<Value> = told
        .iter()
        .filter_map(|(_, _, output)| match output {
            Output::Reply(line) if line.op == "prompt" => Some(value_of(line)),
            _ => None,
        })
        .collect();
    assert_eq!(injected.len(), 1);
    assert_eq!(injected[0]["method"], "thread/inject_items");
    let item = &injected[0]["params"]["items"][0];
    assert_eq!(item["role"], "developer");
    assert!(item["content"][0]["text"].as_str().unwrap().ends_with("Now be a bold agent."));
    assert!(!reply_ops(&run("resume_same")).contains(&"prompt"));
    assert!(!reply_ops(&run("resume_model_changed")).contains(&"prompt"), "told once");
    // The resume is given it too: after a compaction that one reaches the model.
    assert_eq!(
        thread_line("resume_prompt_changed")["params"]["developerInstructions"],
        "Now be a bold agent."
    );
}

#[test]
fn a_prompt_that_was_taken_away_is_said_to_hold_no_more() {
    let mut run = recording("resume_prompt_changed");
    run.open.carry.setup.as_mut().unwrap()["prompt"] = json!("");
    let told = play(&run);
    let text = crate::support::render(&told);
    assert!(text.contains("no longer hold"), "{text}");
    // Nobody knows what the session was told: better twice than not at all.
    let mut run = recording("resume_same");
    run.open.carry.session = None;
    assert!(reply_ops(&play(&run)).contains(&"prompt"));
}

#[test]
fn the_model_may_change_on_resume_and_usage_names_it() {
    let told = run("resume_model_changed");
    assert_eq!(thread_line("resume_model_changed")["params"]["model"], "gpt-5-other");
    assert_eq!(ends(&told)[0].usage.models[0].model, "gpt-5-other");
    assert_eq!(codex().can_continue_with("a", "b"), roundhouse_engines::Support::Supported);
}

#[test]
fn a_thread_that_never_had_a_turn_is_started_again() {
    let told = run("never_had_a_turn");
    let failed = open_failure(&told);
    assert!(failed.failure.message.contains("no rollout found"));
    assert_eq!((failed.retry_as, failed.discard.len()), (Some(OpenMode::Start), 0));
    // Nothing of the old thread is left in the new one's carry.
    let mut open = recording("never_had_a_turn").open;
    open.opening = Some(OpenMode::Start);
    assert_eq!(translator(&open).carry().session.unwrap().native, None);
}

#[test]
fn s15_a_session_that_is_gone_is_unusable_and_never_opened() {
    let mut missing = recording("resume_missing");
    missing.open.carry.committed = true;
    let told = play(&missing);
    assert!(told.iter().all(|(_, _, output)| !matches!(output, Output::Opened(_))));
    let failed = open_failure(&told);
    assert_eq!(failed.failure.reason, Reason::SessionUnusable);
    // Its file may be there and only the index be wrong.
    assert_eq!(
        (failed.retry_as, &failed.discard[..]),
        (Some(OpenMode::Resume), &["state_5.sqlite*".to_owned()][..])
    );
}

#[test]
fn s15_damaged_files_make_a_session_unusable() {
    for name in ["damage_garbage_head", "damage_empty", "damage_directory"] {
        assert_eq!(open_failure(&run(name)).failure.reason, Reason::SessionUnusable, "{name}");
    }
}

#[test]
fn damaged_indexes_are_removed_and_burn_no_session() {
    let told = run("damage_indexes");
    let failed = open_failure(&told);
    assert_eq!(failed.failure.reason, Reason::Process, "the session is as it was");
    assert_eq!(
        (failed.retry_as, &failed.discard[..]),
        (Some(OpenMode::Resume), &["*.sqlite*".to_owned()][..])
    );
    assert_eq!(ends(&run("damage_indexes_removed")).len(), 1, "with all of it");
    for message in [
        "error returned from database: (code: 11) database disk image is malformed",
        "list_turns is not supported yet",
    ] {
        let mut frames = initialized()[..3].to_vec();
        frames.push(refusal("thread", message));
        let mut reader = translator(&open(Some(OpenMode::Resume), THREAD));
        let outputs = feed(reader.as_mut(), &frames);
        let [Output::OpenFailed(failed)] = &outputs[..] else { panic!("{outputs:?}") };
        assert_eq!(failed.failure.reason, Reason::Process, "the session is as it was");
        assert_eq!(
            (failed.retry_as, &failed.discard[..]),
            (Some(OpenMode::Resume), &["*.sqlite*".to_owned()][..])
        );
    }
}

#[test]
fn a_thread_resumed_from_outside_its_home_is_never_written_to() {
    // The home was copied with its index, which holds the absolute path of the old place.
    let told = run("moved_home");
    let failed = open_failure(&told);
    assert!(failed.failure.message.contains("not in its home"));
    assert_eq!(
        (failed.retry_as, &failed.discard[..]),
        (Some(OpenMode::Resume), &["state_5.sqlite*".to_owned()][..])
    );
    let told = run("moved_home_again");
    assert_eq!(ends(&told).len(), 1);
}

#[test]
fn s14_an_unknown_id_never_becomes_another_thread() {
    let mut frames = initialized()[..3].to_vec();
    frames.push(thread_answer());
    let mut reader = translator(&open(Some(OpenMode::Resume), "77777777-2222-7333-8444-555555555555"));
    let outputs = feed(reader.as_mut(), &frames);
    let [Output::OpenFailed(failed)] = &outputs[..] else { panic!("{outputs:?}") };
    assert_eq!(failed.failure.reason, Reason::SessionUnusable);
}

#[test]
fn s15_wedged_and_storage_trouble_burn_nothing() {
    for (message, reason, code) in [
        ("thread x already has an active writer", Reason::Process, Some("active_writer")),
        ("failed to resume local thread recorder: Permission denied (os error 13)", Reason::Storage, None),
        ("something new", Reason::Process, None),
    ] {
        let mut frames = initialized()[..3].to_vec();
        frames.push(refusal("thread", message));
        let mut reader = translator(&open(Some(OpenMode::Resume), THREAD));
        let outputs = feed(reader.as_mut(), &frames);
        let [Output::OpenFailed(failed)] = &outputs[..] else { panic!("{outputs:?}") };
        assert_eq!(
            (failed.failure.reason, failed.failure.native_code.as_deref()),
            (reason, code),
            "{message}"
        );
        assert_eq!(failed.retry_as, None);
    }
}

#[test]
fn failures_before_the_opening_have_their_reasons() {
    for (stderr, code, reason) in [
        ("Error loading config.toml: x", 1, Reason::Configuration),
        ("error: unexpected argument '--nosuch' found", 2, Reason::Configuration),
        ("write: No space left on device", 1, Reason::Storage),
        ("", 127, Reason::EngineMissing),
        ("segmentation fault", 139, Reason::Process),
    ] {
        let frames = [Owned::Spawn, Owned::Err(stderr.as_bytes().to_vec()), exit(Some(code), None)];
        let mut reader = translator(&open(Some(OpenMode::Start), ""));
        let outputs = feed(reader.as_mut(), &frames);
        let [Output::OpenFailed(failed)] = &outputs[..] else { panic!("{outputs:?}") };
        assert_eq!(failed.failure.reason, reason, "{stderr}");
    }
}

#[test]
fn the_engines_turn_list_proves_that_a_message_was_not_taken() {
    let proof = |name: &str, change: &dyn Fn(&mut SessionCarry)| {
        let mut run = recording(name);
        change(run.open.carry.session.as_mut().unwrap());
        let mut reader = translator(&run.open);
        assert!(!reader.proves_untaken(), "before the opening nothing is proved");
        for (number, frame) in (1_u64..).zip(&run.frames) {
            reader.feed(roundhouse_engines::Frame { number, body: frame.body() });
            if reader.standing().opened {
                break;
            }
        }
        reader.proves_untaken()
    };
    assert!(proof("resume_same", &|_| {}));
    // The list ends with another turn than the one known: something was taken.
    assert!(!proof("resume_same", &|session| session.last_turn = Some("another".into())));
    assert!(!proof("resume_same", &|session| session.last_turn = None));
    // A turn that was cut off is in the list, and known from its start.
    assert!(proof("resume_after_kill", &|_| {}));
    // Of a session that nobody knows anything of nothing is proved.
    let mut run = recording("resume_same");
    run.open.carry.session = None;
    let (_, reader) = crate::support::play_to(&run);
    assert!(!reader.proves_untaken());
}

#[test]
fn skills_are_switched_off_by_name_so_that_a_users_text_is_not_expanded() {
    let params = thread_line("skill_name")["params"].clone();
    // Measured: this table takes the place of the one in the arguments, so it says all of it again.
    assert_eq!(
        params["config"]["skills"],
        json!({"config": [{"name": "evil", "enabled": false}], "include_instructions": false,
            "bundled": {"enabled": false}})
    );
    assert_eq!(thread_line("text")["params"]["config"].get("skills"), None);
}

#[test]
fn skills_that_a_turn_made_end_the_warm_process() {
    let mut run = recording("skill_appears");
    let second =
        run.frames.iter().rposition(|frame| matches!(frame, Owned::Intent(op) if op.len() == 36)).unwrap();
    run.frames.truncate(second);
    let (told, reader) = crate::support::play_to(&run);
    assert_eq!(ends(&told).len(), 1);
    assert!(!reader.standing().quiescent, "the next turn gets a process that knows them");
    // The engine's own word does the same.
    let mut run = recording("text");
    run.frames.pop();
    run.frames.push(Owned::line(&json!({"method": "skills/changed", "params": {}})));
    assert!(!crate::support::play_to(&run).1.standing().quiescent);
    // Skills that were there from the start change nothing.
    let mut run = recording("tool");
    run.frames.pop();
    assert!(crate::support::play_to(&run).1.standing().quiescent);
}

#[test]
fn nothing_in_a_hostile_workspace_is_said_or_run() {
    let told = run("hostile");
    let text = crate::support::render(&told);
    assert!(!text.contains("EVIL"), "{text}");
    assert!(notices(&told, "engine_warning").len() <= 1);
}

#[test]
fn the_rollout_is_fingerprinted_as_an_append_only_file() {
    let native = opened(&run("text")).native.clone();
    let file = native.file.clone().unwrap();
    let files = codex().session_files(&native).unwrap();
    assert!(files.is_main(&file));
    assert_eq!((files.search.as_str(), files.depth), ("sessions/2026/11", 1));
    // Without its path it is found by the id at its end.
    let files = codex().session_files(&NativeRef { file: None, ..native.clone() }).unwrap();
    assert!(files.is_main(&file) && !files.is_main(&file.replace(&native.id, THREAD)));
    assert!(
        !files.is_main("sessions/2026/rollout-x.jsonl") && !files.is_main("archived_sessions/2026/11/30/x")
    );
    assert_eq!(codex().session_files(&NativeRef { id: String::new(), file: None }), None);
    let print = Fingerprint { file, length: 3, sha256: "aa".into() };
    let cut = FileFacts::File { length: 2, prefix_sha256: None };
    assert!(
        matches!(print.check(&cut), Verdict::Lost { code: "context_lost", .. }),
        "the engine skips it in silence"
    );
}

#[test]
fn a_turn_nobody_asked_for_keeps_the_process_from_the_next() {
    let mut frames = initialized();
    let turn = |method: &str| {
        Owned::line(&json!({"method": method, "params": {"threadId": THREAD,
            "turn": {"id": "foreign", "status": "completed"}}}))
    };
    frames.push(turn("turn/started"));
    let mut reader = translator(&open(Some(OpenMode::Start), ""));
    feed(reader.as_mut(), &frames);
    assert!(!reader.standing().quiescent);
    feed(reader.as_mut(), &[turn("turn/completed")]);
    assert!(reader.standing().quiescent);
    assert_eq!(reader.carry().session.unwrap().last_turn.as_deref(), Some("foreign"));
    assert!(reader.standing().pending_permissions.is_empty() && DELIVERY.len() == 36);
}
