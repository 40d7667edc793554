//! Session files that were damaged behind the engine's back: never a silent loss, never a false alarm.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, bail};
use roundhouse_models::{Matcher, Script};
use roundhouse_proto::{
    control::v1::session::State,
    engine::v1::{CloseSessionRequest, Origin, Outcome, event_body::Kind, session_event},
};
use roundhouse_test_support::{BRIEF, NORMAL, Stack, StackOptions};

use crate::{answer_of, expect_outcome, turn_of};

/// Files below a directory for which this is true.
pub(crate) fn files(root: &Path, wanted: impl Fn(&Path) -> bool) -> Vec<PathBuf> {
    let (mut found, mut open) = (Vec::new(), vec![root.to_owned()]);
    while let Some(directory) = open.pop() {
        let Ok(entries) = fs::read_dir(&directory) else { continue };
        for path in entries.flatten().map(|entry| entry.path()) {
            if path.is_dir() {
                open.push(path);
            } else if wanted(&path) {
                found.push(path);
            }
        }
    }
    found
}

/// Every native session file under the runner's state.
fn session_files(stack: &Stack) -> Vec<PathBuf> {
    files(&stack.runner_state(), |path| {
        path.extension().is_some_and(|extension| extension == "jsonl")
            && path.components().any(|part| part.as_os_str() == "projects")
    })
}

/// What the file looks like after the damage. None: it is gone.
pub(crate) type Damage = fn(&Path, &str) -> anyhow::Result<()>;

pub(crate) async fn close(stack: &Stack, session_id: &str) -> anyhow::Result<()> {
    let request = CloseSessionRequest { session_id: session_id.to_owned() };
    stack.runner_client()?.close_session(request).await.context("CloseSession")?;
    stack.wait_nothing_left(BRIEF).await
}

/// A conversation with two answered questions, whose process is gone. Its id and its session's.
pub(crate) async fn two_facts(stack: &Stack) -> anyhow::Result<(String, String)> {
    let conversation = stack.conversation().await?;
    for (question, answer) in [
        ("what-is-first", "the-first-fact"),
        ("what-is-second", "the-second-fact"),
        ("and-now", "all-is-known"),
    ] {
        stack.model.rule(Matcher::Contains(question.to_owned()), Script::text(answer));
    }
    stack.control.run_answered(&conversation, "what-is-first", "the-first-fact", NORMAL).await?;
    let second =
        stack.control.run_answered(&conversation, "what-is-second", "the-second-fact", NORMAL).await?;
    let session = turn_of(&second).session_id.clone();
    stack.workspace.write("uncommitted.txt", "work in progress\n")?;
    close(stack, &session).await?;
    Ok((conversation, session))
}

/// The model was asked once, and told each fact once.
pub(crate) fn all_was_told(stack: &Stack) {
    let requests = stack.model.requests_for("and-now");
    assert_eq!(requests.len(), 1, "asked once");
    let request = requests[0].conversation();
    for fact in ["what-is-first", "the-first-fact", "what-is-second", "the-second-fact"] {
        assert_eq!(request.occurrences(fact), 1, "told {fact}: {:?}", request.texts());
    }
}

/// The damage to the one file of a session is found before the next turn, which goes on in a replacement that knows all.
pub(crate) async fn a_damaged_file_is_replaced(
    stack: Stack,
    session_files: fn(&Stack) -> Vec<PathBuf>,
    damage: Damage,
) -> anyhow::Result<()> {
    let (conversation, session) = two_facts(&stack).await?;
    let follower = stack.control.follow(&conversation);
    let files = session_files(&stack);
    let [file] = &files[..] else { bail!("one session file, not {files:?}") };
    let text = fs::read_to_string(file).context("the session file")?;
    damage(file, &text)?;
    let damaged = fs::read(file).ok();

    let turn = stack.control.begin(&conversation, "and-now").await?;
    let got = expect_outcome(&stack, &follower, &turn, Outcome::Completed).await?;
    assert_eq!(answer_of(&got), "all-is-known");
    let ended = turn_of(&got);
    assert_eq!(ended.origin(), Origin::Replaced, "in the same turn, and said so: {ended:?}");
    assert!(ended.history_given, "{ended:?}");
    assert_ne!(ended.session_id, session);

    all_was_told(&stack);

    let kinds = follower.kinds(&turn);
    let unusable = kinds.iter().any(|kind| match kind {
        Kind::Session(event) => {
            event.state() == session_event::State::Unusable
                && event.session_id == session
                && !event.reason.is_empty()
        }
        _ => false,
    });
    assert!(unusable, "the loss is loud: {kinds:?}");
    let sessions = stack.control.list_sessions(&conversation).await?;
    let old = sessions.iter().find(|one| one.session_id == session).context("the old session")?;
    assert_eq!(old.state(), State::Unusable);
    assert!(!old.unusable_reason.is_empty());
    let new = sessions.iter().find(|one| one.session_id == ended.session_id).context("the new session")?;
    assert_eq!((new.state(), new.replaces.as_str()), (State::Active, session.as_str()));

    if damaged.is_some() {
        assert_eq!(fs::read(file).ok(), damaged, "the old file is kept as it was");
    }
    assert_eq!(stack.workspace.read("uncommitted.txt").as_deref(), Some("work in progress\n"));

    // And the replacement is a session like any other.
    let next = stack.control.run_answered(&conversation, "[[text:sure]] and on", "sure", NORMAL).await?;
    assert_eq!(
        (turn_of(&next).origin(), turn_of(&next).session_id.as_str()),
        (Origin::Resumed, ended.session_id.as_str())
    );
    Ok(())
}

async fn a_damaged_session_is_replaced(damage: Damage) -> anyhow::Result<()> {
    a_damaged_file_is_replaced(Stack::start().await?, session_files, damage).await
}

/// The rows of the file, and the index of the last one in which the model speaks.
fn rows(text: &str) -> anyhow::Result<(Vec<&str>, usize)> {
    let rows: Vec<&str> = text.lines().collect();
    let last =
        rows.iter().rposition(|row| row.contains("\"type\":\"assistant\"")).context("an assistant's row")?;
    Ok((rows, last))
}

#[tokio::test]
async fn s15_a_file_that_was_cut_in_the_middle_of_a_row() -> anyhow::Result<()> {
    a_damaged_session_is_replaced(|file, text| {
        let (rows, last) = rows(text)?;
        let kept: usize = rows[..last].iter().map(|row| row.len() + 1).sum();
        Ok(fs::write(file, &text.as_bytes()[..kept + rows[last].len() / 2])?)
    })
    .await
}

#[tokio::test]
async fn s15_a_garbage_row_in_the_middle() -> anyhow::Result<()> {
    a_damaged_session_is_replaced(|file, text| {
        let (mut rows, last) = rows(text)?;
        rows[last] = "#### this was once an answer ####";
        Ok(fs::write(file, rows.join("\n") + "\n")?)
    })
    .await
}

#[tokio::test]
async fn s15_a_garbage_first_line() -> anyhow::Result<()> {
    a_damaged_session_is_replaced(|file, text| {
        let mut rows: Vec<&str> = text.lines().collect();
        rows[0] = "\u{fffd}\u{fffd} not a row";
        Ok(fs::write(file, rows.join("\n") + "\n")?)
    })
    .await
}

#[tokio::test]
async fn s14_a_file_of_zero_length() -> anyhow::Result<()> {
    a_damaged_session_is_replaced(|file, _| Ok(fs::write(file, "")?)).await
}

#[tokio::test]
async fn s14_a_file_that_cannot_be_read() -> anyhow::Result<()> {
    // Permissions do not stop root, so it is a directory that stands in the file's place.
    a_damaged_session_is_replaced(|file, _| {
        fs::remove_file(file)?;
        Ok(fs::create_dir(file)?)
    })
    .await
}

#[tokio::test]
async fn s14_a_file_that_was_deleted() -> anyhow::Result<()> {
    a_damaged_session_is_replaced(|file, _| Ok(fs::remove_file(file)?)).await
}

#[tokio::test]
async fn s15_ten_turns_with_evictions_between_them_raise_no_alarm() -> anyhow::Result<()> {
    let stack = Stack::start_with(StackOptions::default().set("runner.warm_ttl", "200ms")).await?;
    let conversation = stack.conversation().await?;
    let follower = stack.control.follow(&conversation);
    for n in 0..10 {
        let text = format!("[[text:reply {n}]] question {n}");
        let turn = stack.control.begin(&conversation, &text).await?;
        let got = expect_outcome(&stack, &follower, &turn, Outcome::Completed).await?;
        assert_eq!(answer_of(&got), format!("reply {n}"));
        let wanted = if n == 0 { Origin::Started } else { Origin::Resumed };
        assert_eq!(turn_of(&got).origin(), wanted, "turn {n}: {:?}", turn_of(&got));
        stack.wait_nothing_left(NORMAL).await.with_context(|| format!("the eviction after turn {n}"))?;
    }
    let sessions = stack.control.list_sessions(&conversation).await?;
    assert_eq!(sessions.len(), 1, "{sessions:?}");
    assert_eq!(sessions[0].state(), State::Active);
    let last = stack.model.requests_for("question 9").pop().context("a request")?.conversation();
    for n in 0..9 {
        assert_eq!(last.occurrences(&format!("question {n}")), 1, "{:?}", last.texts());
    }
    Ok(())
}
