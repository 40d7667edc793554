//! A cancelled turn of the real Codex: cancelled once, whatever it was doing, and nothing of it is left.

use anyhow::{Context as _, ensure};
use roundhouse_proto::engine::v1::{Origin, Outcome, event_body::Kind};
use roundhouse_test_support::{Control, Follower, NORMAL, Stack, census, wait_until};

use crate::{
    codex::{codex, codex_in},
    expect_outcome, terminals, turn_of,
};

/// Cancels, waits for the one end, and looks at what is left of it: no process, and a session that goes on.
async fn cancel_and_go_on(
    stack: &Stack,
    follower: &Follower,
    conversation: &str,
    turn: &str,
    partial: &str,
) -> anyhow::Result<()> {
    ensure!(!stack.control.cancel(turn).await?.already_ended);
    let got = expect_outcome(stack, follower, turn, Outcome::Cancelled).await?;
    let tools = stack.tool_processes();
    ensure!(tools.is_empty(), "left of the cancelled turn: {}", census::describe(&tools));
    if !partial.is_empty() {
        let messages = stack.control.messages(conversation).await?;
        let last = messages.last().context("messages")?;
        assert_eq!((last.text.as_str(), last.incomplete), (partial, true), "what was said is kept");
    }
    let next = "[[text:going on]] after the cancel";
    let next = stack.control.run_answered(conversation, next, "going on", NORMAL).await?;
    assert_eq!(turn_of(&next).origin(), Origin::Resumed, "{:?}", turn_of(&next));
    assert_eq!(turn_of(&next).session_id, turn_of(&got).session_id);
    assert_eq!(terminals(follower, turn).len(), 1);
    Ok(())
}

async fn begun(text: &str) -> anyhow::Result<(Stack, String, Follower, String)> {
    let stack = Stack::start_with(codex()).await?;
    let conversation = stack.conversation().await?;
    let follower = stack.control.follow(&conversation);
    let turn = stack.control.begin(&conversation, text).await?;
    Ok((stack, conversation, follower, turn))
}

#[tokio::test]
async fn s45_during_text() -> anyhow::Result<()> {
    let (stack, conversation, follower, turn) =
        begun("[[text:as far as this]][[gate:never]][[text: never]] talk").await?;
    follower.wait_partial(&turn, "as far as this", NORMAL).await?;
    cancel_and_go_on(&stack, &follower, &conversation, &turn, "as far as this").await
}

#[tokio::test]
async fn s43_during_a_tool_with_a_detached_child() -> anyhow::Result<()> {
    let mark = format!("mark-{}", uuid::Uuid::now_v7().simple());
    let sleeper = format!("python3 -c 'import time; time.sleep(900)' {mark}");
    let tool = format!("setsid nohup {sleeper} >/dev/null 2>&1 & echo started > started; {sleeper}");
    let (stack, conversation, follower, turn) =
        begun(&format!("[[text:I start it]][[bash:{tool}]] run")).await?;
    wait_until("both sleepers run", NORMAL, || {
        stack.workspace.read("started").is_some() && census::with_argument(&mark).len() >= 2
    })
    .await?;
    cancel_and_go_on(&stack, &follower, &conversation, &turn, "").await?;
    assert_eq!(census::with_argument(&mark), Vec::<u32>::new());
    assert!(stack.workspace.read("started").is_some(), "nothing in the worktree is undone");
    Ok(())
}

/// A command over its yield time lives in the background; the turn that began it is over, and it with it.
#[tokio::test]
async fn a_background_command_ends_with_its_turn() -> anyhow::Result<()> {
    let mark = format!("mark-{}", uuid::Uuid::now_v7().simple());
    let tool = format!("python3 -c 'import time; time.sleep(900)' {mark}");
    let (stack, _, follower, turn) =
        begun(&format!("[[bash background:{tool}]][[text:it runs]] leave it running")).await?;
    let got = expect_outcome(&stack, &follower, &turn, Outcome::Completed).await?;
    assert_eq!(crate::answer_of(&got), "it runs");
    assert_eq!(census::with_argument(&mark), Vec::<u32>::new());
    Ok(())
}

#[tokio::test]
async fn s44_before_the_first_byte() -> anyhow::Result<()> {
    let (stack, conversation, follower, turn) = begun("[[hang]] say nothing").await?;
    stack.model.wait_for_text("say nothing", 1, NORMAL).await?;
    cancel_and_go_on(&stack, &follower, &conversation, &turn, "").await
}

/// The interrupt is wanted before the engine has said that the turn has started: it would be refused then, and the
/// turn would run to its end.
#[tokio::test]
async fn s44_right_after_the_message_was_given() -> anyhow::Result<()> {
    let stack = Stack::start_with(codex()).await?;
    let conversation = stack.conversation().await?;
    let follower = stack.control.follow(&conversation);
    stack.control.run_answered(&conversation, "[[text:warm]] warm up", "warm", NORMAL).await?;
    for n in 0..5 {
        let text = format!("[[text:a]][[gate:never]] quick {n}");
        let turn = stack.control.begin(&conversation, &text).await?;
        stack.control.cancel(&turn).await?;
        expect_outcome(&stack, &follower, &turn, Outcome::Cancelled).await?;
    }
    stack.control.run_answered(&conversation, "[[text:well]] and now", "well", NORMAL).await?;
    Ok(())
}

#[tokio::test]
async fn s44_while_the_engine_tries_the_api_again() -> anyhow::Result<()> {
    let (stack, conversation, follower, turn) = begun("[[error 500:busy]] try and try").await?;
    stack.model.wait_for_text("try and try", 2, NORMAL).await?;
    cancel_and_go_on(&stack, &follower, &conversation, &turn, "").await
}

#[tokio::test]
async fn s44_with_a_permission_pending() -> anyhow::Result<()> {
    let stack = Stack::start_with(codex_in("ask")).await?;
    let conversation = stack.conversation().await?;
    let follower = stack.control.follow(&conversation);
    let turn = stack.control.begin(&conversation, crate::codex_permission::ASKS).await?;
    follower
        .wait_event(&turn, "a permission request", NORMAL, |kind| {
            matches!(kind, Kind::PermissionRequest(_)).then_some(())
        })
        .await?;
    cancel_and_go_on(&stack, &follower, &conversation, &turn, "").await?;
    assert_eq!(stack.workspace.read("made"), None, "what was asked for did not happen");
    assert!(stack.control.permissions(&conversation, false).await?.is_empty(), "nothing is left to answer");
    let answers =
        follower.kinds(&turn).into_iter().filter(|kind| matches!(kind, Kind::PermissionAnswer(_))).count();
    assert_eq!(answers, 1, "the request is settled once");
    Ok(())
}

#[tokio::test]
async fn s44_twice_and_after_the_end() -> anyhow::Result<()> {
    let (stack, conversation, follower, turn) = begun("[[text:some]][[gate:never]] talk").await?;
    follower.wait_partial(&turn, "some", NORMAL).await?;
    let other = Control::new(&stack.control_plane.url())?;
    let (one, two) = tokio::join!(stack.control.cancel(&turn), other.cancel(&turn));
    one?;
    two?;
    expect_outcome(&stack, &follower, &turn, Outcome::Cancelled).await?;
    assert!(stack.control.cancel(&turn).await?.already_ended);
    stack.control.run_answered(&conversation, "[[text:on]] go on", "on", NORMAL).await?;
    assert_eq!(terminals(&follower, &turn).len(), 1);
    Ok(())
}

/// An interrupted sandbox leaves its empty mount points behind.
#[tokio::test]
async fn no_empty_mount_point_is_left_in_a_workspace_that_is_no_repository() -> anyhow::Result<()> {
    let stack = Stack::start_with(codex_in("accept-edits")).await?;
    std::fs::remove_dir_all(stack.workspace.path().join(".git"))?;
    let conversation = stack.conversation().await?;
    let follower = stack.control.follow(&conversation);
    let tool = "echo started > started; python3 -c 'import time; time.sleep(900)'";
    let turn = stack.control.begin(&conversation, &format!("[[bash:{tool}]] run")).await?;
    wait_until("the command runs", NORMAL, || stack.workspace.read("started").is_some()).await?;
    stack.control.cancel(&turn).await?;
    expect_outcome(&stack, &follower, &turn, Outcome::Cancelled).await?;
    for name in [".git", ".codex", ".aws"] {
        assert!(stack.workspace.path().join(name).symlink_metadata().is_err(), "{name} is left");
    }
    Ok(())
}
