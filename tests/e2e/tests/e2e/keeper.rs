//! The keeper itself dies, or stops: its engine ends with it, and nothing is sent again on a guess.

use anyhow::{Context as _, bail};
use roundhouse_proto::engine::v1::{FailureReason, Outcome};
use roundhouse_test_support::{
    BRIEF, Follower, LONG, NORMAL, Stack, StackOptions, census, signal, wait_until,
};

use crate::{answer_of, expect_outcome, turn_of};

/// A turn whose tool runs until it is ended.
async fn in_a_tool(stack: &Stack, conversation: &str, mark: &str) -> anyhow::Result<String> {
    let tool = format!("echo ran >> runs; python3 -c 'import time; time.sleep(900)' {mark}");
    let turn = stack.control.begin(conversation, &format!("[[text:I run it]][[bash:{tool}]] work")).await?;
    wait_until("the tool runs", NORMAL, || {
        stack.workspace.lines("runs") == 1 && !census::with_argument(mark).is_empty()
    })
    .await?;
    Ok(turn)
}

fn keeper(stack: &Stack) -> anyhow::Result<u32> {
    let keepers: Vec<_> = stack.census().into_iter().filter(|one| one.role == census::Role::Keeper).collect();
    match &keepers[..] {
        [one] => Ok(one.pid),
        other => bail!("one keeper, not: {}", census::describe(other)),
    }
}

/// The turn failed, its tool is gone, nothing ran twice, and the conversation goes on.
async fn failed_once(
    stack: &Stack,
    follower: &Follower,
    conversation: &str,
    turn: &str,
    mark: &str,
) -> anyhow::Result<()> {
    let got = expect_outcome(stack, follower, turn, Outcome::Failed).await?;
    let failure = turn_of(&got).failure.clone().context("a failed turn says why")?;
    assert_eq!(failure.reason(), FailureReason::Process, "{failure:?}");
    assert!(failure.retryable && !failure.next_action.is_empty(), "{failure:?}");
    wait_until("the tool is gone", BRIEF, || census::with_argument(mark).is_empty()).await?;
    let next = stack.control.run(conversation, "[[text:on]] and on", NORMAL).await?;
    assert_eq!(answer_of(&next), "on", "{:?}", turn_of(&next));
    assert_eq!(stack.workspace.lines("runs"), 1, "the tool ran once");
    assert_eq!(stack.model.count_for("work"), 1, "the message was sent once");
    Ok(())
}

fn mark() -> String {
    format!("mark-{}", uuid::Uuid::now_v7().simple())
}

#[tokio::test]
async fn s47_a_keeper_killed_mid_tool_fails_its_turn_and_leaves_no_process() -> anyhow::Result<()> {
    let stack = Stack::start().await?;
    let conversation = stack.conversation().await?;
    let follower = stack.control.follow(&conversation);
    let mark = mark();
    let turn = in_a_tool(&stack, &conversation, &mark).await?;
    signal(keeper(&stack)?, "KILL")?;
    failed_once(&stack, &follower, &conversation, &turn, &mark).await
}

#[tokio::test]
async fn s47_runner_and_keeper_killed_mid_tool_are_told_apart_from_a_turn_that_goes_on() -> anyhow::Result<()>
{
    let mut stack = Stack::start().await?;
    let conversation = stack.conversation().await?;
    let follower = stack.control.follow(&conversation);
    let mark = mark();
    let turn = in_a_tool(&stack, &conversation, &mark).await?;
    let keeper = keeper(&stack)?;
    stack.runner.kill().await?;
    signal(keeper, "KILL")?;
    stack.runner.start_again().await?;
    failed_once(&stack, &follower, &conversation, &turn, &mark).await
}

#[tokio::test]
async fn everything_killed_at_once_as_when_a_host_goes_down() -> anyhow::Result<()> {
    let mut stack = Stack::start().await?;
    let conversation = stack.conversation().await?;
    let follower = stack.control.follow(&conversation);
    let mark = mark();
    let turn = in_a_tool(&stack, &conversation, &mark).await?;
    let everybody = stack.census();
    stack.kill_both().await?;
    for one in everybody {
        // Whoever went down with another is gone already.
        let _ = signal(one.pid, "KILL");
    }
    wait_until("everybody is gone", BRIEF, || stack.census().is_empty()).await?;
    stack.start_both().await?;
    failed_once(&stack, &follower, &conversation, &turn, &mark).await
}

#[tokio::test]
async fn a_keeper_that_is_stopped_ends_its_turn_at_the_idle_timeout() -> anyhow::Result<()> {
    let options = StackOptions::default().set("runner.idle_timeout", "3s").set("runner.keeper_timeout", "1s");
    let stack = Stack::start_with(options).await?;
    let conversation = stack.conversation().await?;
    let follower = stack.control.follow(&conversation);
    let turn = stack.control.begin(&conversation, "[[text:some]][[gate:never]] wait").await?;
    follower.wait_partial(&turn, "some", NORMAL).await?;
    signal(keeper(&stack)?, "STOP")?;
    let terminal = follower.wait_terminal(&turn, LONG).await?;
    let failure = terminal.failure.context("a failed turn says why")?;
    assert_eq!(failure.reason(), FailureReason::IdleTimeout, "{failure:?}");
    let next = stack.control.run(&conversation, "[[text:on]] and on", NORMAL).await?;
    assert_eq!(answer_of(&next), "on", "{:?}", turn_of(&next));
    follower.check()
}
