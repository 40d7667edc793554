//! The files of the real Codex damaged behind its back: never a silent loss, never a false alarm.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::Context as _;
use roundhouse_proto::{
    control::v1::session::State,
    engine::v1::{Origin, Outcome},
};
use roundhouse_test_support::{NORMAL, Stack};

use crate::{
    answer_of,
    codex::codex,
    damage::{Damage, a_damaged_file_is_replaced, all_was_told, files, two_facts},
    expect_outcome, turn_of,
};

fn name(path: &Path) -> &str {
    path.file_name().and_then(|name| name.to_str()).unwrap_or_default()
}

/// The files in which the engine keeps its threads.
pub(crate) fn rollouts(stack: &Stack) -> Vec<PathBuf> {
    files(&stack.runner_state(), |path| name(path).starts_with("rollout-") && name(path).ends_with(".jsonl"))
}

/// The engine's databases, which it can build anew from its threads' files.
pub(crate) fn indexes(stack: &Stack) -> Vec<PathBuf> {
    files(&stack.runner_state().join("homes"), |path| name(path).contains(".sqlite"))
}

async fn a_damaged_thread_is_replaced(damage: Damage) -> anyhow::Result<()> {
    a_damaged_file_is_replaced(Stack::start_with(codex()).await?, rollouts, damage).await
}

/// The rows of the file, and the index of the last one in which the model speaks.
fn rows(text: &str) -> anyhow::Result<(Vec<&str>, usize)> {
    let rows: Vec<&str> = text.lines().collect();
    let last = rows.iter().rposition(|row| row.contains("the-second-fact")).context("the answer's row")?;
    Ok((rows, last))
}

#[tokio::test]
async fn s15_a_rollout_that_was_cut_in_the_middle_of_a_row() -> anyhow::Result<()> {
    a_damaged_thread_is_replaced(|file, text| {
        let (rows, last) = rows(text)?;
        let kept: usize = rows[..last].iter().map(|row| row.len() + 1).sum();
        Ok(fs::write(file, &text.as_bytes()[..kept + rows[last].len() / 2])?)
    })
    .await
}

/// The newest rows alone are missing: the engine would answer as if they had never been.
#[tokio::test]
async fn s15_a_rollout_whose_last_rows_are_missing() -> anyhow::Result<()> {
    a_damaged_thread_is_replaced(|file, text| {
        let (rows, last) = rows(text)?;
        Ok(fs::write(file, rows[..last].join("\n") + "\n")?)
    })
    .await
}

#[tokio::test]
async fn s15_a_garbage_row_in_the_middle() -> anyhow::Result<()> {
    a_damaged_thread_is_replaced(|file, text| {
        let (mut rows, last) = rows(text)?;
        rows[last] = "#### this was once an answer ####";
        Ok(fs::write(file, rows.join("\n") + "\n")?)
    })
    .await
}

#[tokio::test]
async fn s15_a_garbage_first_line() -> anyhow::Result<()> {
    a_damaged_thread_is_replaced(|file, text| {
        let mut rows: Vec<&str> = text.lines().collect();
        rows[0] = "\u{fffd}\u{fffd} not a row";
        Ok(fs::write(file, rows.join("\n") + "\n")?)
    })
    .await
}

#[tokio::test]
async fn s14_a_rollout_of_zero_length() -> anyhow::Result<()> {
    a_damaged_thread_is_replaced(|file, _| Ok(fs::write(file, "")?)).await
}

#[tokio::test]
async fn s14_a_rollout_that_cannot_be_read() -> anyhow::Result<()> {
    // Permissions do not stop root, so it is a directory that stands in the file's place.
    a_damaged_thread_is_replaced(|file, _| {
        fs::remove_file(file)?;
        Ok(fs::create_dir(file)?)
    })
    .await
}

#[tokio::test]
async fn s14_a_rollout_that_was_deleted() -> anyhow::Result<()> {
    a_damaged_thread_is_replaced(|file, _| Ok(fs::remove_file(file)?)).await
}

/// The indexes are damaged or gone, and the thread's own file is whole: nothing is lost, and the session goes on.
async fn damaged_indexes_lose_nothing(damage: fn(&Path) -> anyhow::Result<()>) -> anyhow::Result<()> {
    let stack = Stack::start_with(codex()).await?;
    let (conversation, session) = two_facts(&stack).await?;
    let follower = stack.control.follow(&conversation);
    let found = indexes(&stack);
    assert!(found.iter().any(|path| name(path) == "state_5.sqlite"), "{found:?}");
    for index in found {
        damage(&index)?;
    }
    let turn = stack.control.begin(&conversation, "and-now").await?;
    let got = expect_outcome(&stack, &follower, &turn, Outcome::Completed).await?;
    assert_eq!(answer_of(&got), "all-is-known");
    assert_eq!(
        (turn_of(&got).origin(), turn_of(&got).session_id.as_str()),
        (Origin::Resumed, session.as_str())
    );
    all_was_told(&stack);
    assert_eq!(rollouts(&stack).len(), 1);
    assert_eq!(stack.workspace.read("uncommitted.txt").as_deref(), Some("work in progress\n"));
    Ok(())
}

#[tokio::test]
async fn s15_garbage_in_the_state_database() -> anyhow::Result<()> {
    damaged_indexes_lose_nothing(|index| Ok(fs::write(index, "this is no database, and never was one\n")?))
        .await
}

#[tokio::test]
async fn s15_a_state_database_of_zero_length() -> anyhow::Result<()> {
    damaged_indexes_lose_nothing(|index| Ok(fs::write(index, "")?)).await
}

#[tokio::test]
async fn s15_a_deleted_state_database() -> anyhow::Result<()> {
    damaged_indexes_lose_nothing(|index| Ok(fs::remove_file(index)?)).await
}

#[tokio::test]
async fn s15_ten_turns_with_evictions_between_them_raise_no_alarm() -> anyhow::Result<()> {
    let stack = Stack::start_with(codex().set("runner.warm_ttl", "200ms")).await?;
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
    assert_eq!((sessions.len(), sessions[0].state()), (1, State::Active), "{sessions:?}");
    let last = stack.model.requests_for("question 9").pop().context("a request")?.conversation();
    for n in 0..9 {
        assert_eq!(last.occurrences(&format!("question {n}")), 1, "{:?}", last.texts());
    }
    Ok(())
}
