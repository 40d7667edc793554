//! Services are killed while the real Codex is at work: the engine goes on, is taken up again, and acts once.

use anyhow::Context as _;
use roundhouse_proto::{
    control::v1::Turn,
    engine::v1::{Outcome, event_body::Kind},
};
use roundhouse_test_support::{NORMAL, Stack, wait_until};

use crate::{
    answer_of,
    codex::{codex, engines},
    durability::Victim,
    expect_outcome, turn_of,
};

async fn killed_mid_text(victim: Victim) -> anyhow::Result<()> {
    let mut stack = Stack::start_with(codex()).await?;
    let conversation = stack.conversation().await?;
    let follower = stack.control.follow(&conversation);
    let text = "[[text:the first half]][[gate:half]][[text: and the second]] tell me";
    let turn = stack.control.begin(&conversation, text).await?;
    follower.wait_partial(&turn, "the first half", NORMAL).await?;
    let before = engines(&stack);
    assert_eq!(before.len(), 1);
    victim.kill(&mut stack).await?;
    assert_eq!(engines(&stack), before, "the engine goes on under its keeper");
    victim.start_again(&mut stack).await?;
    wait_until("the follower is connected again", NORMAL, || {
        victim == Victim::Runner || follower.connections() > 1
    })
    .await?;
    stack.model.release_gate("half");
    let got = expect_outcome(&stack, &follower, &turn, Outcome::Completed).await?;
    assert_eq!(answer_of(&got), "the first half and the second");
    assert_eq!(stack.model.count_for("tell me"), 1, "one request at the model");
    // The process that was taken up serves the next turn, too.
    let next =
        stack.control.run_answered(&conversation, "[[text:here]] still there?", "here", NORMAL).await?;
    assert_eq!(turn_of(&next).session_id, turn_of(&got).session_id);
    assert_eq!(engines(&stack), before);
    follower.check()
}

#[tokio::test]
async fn the_runner_killed_mid_text_finds_its_engine_again() -> anyhow::Result<()> {
    killed_mid_text(Victim::Runner).await
}

#[tokio::test]
async fn the_control_plane_killed_mid_text_takes_the_turn_up_again() -> anyhow::Result<()> {
    killed_mid_text(Victim::ControlPlane).await
}

#[tokio::test]
async fn both_killed_mid_text_take_the_turn_up_again() -> anyhow::Result<()> {
    killed_mid_text(Victim::Both).await
}

#[tokio::test]
async fn s47_the_runner_killed_mid_tool_runs_the_tool_once() -> anyhow::Result<()> {
    let mut stack = Stack::start_with(codex()).await?;
    let conversation = stack.conversation().await?;
    let follower = stack.control.follow(&conversation);
    let tool = "echo ran >> runs; until test -e go; do sleep 0.1; done; echo out-of-the-tool";
    let turn = stack.control.begin(&conversation, &format!("[[bash:{tool}]][[text:through]] use it")).await?;
    wait_until("the tool runs", NORMAL, || stack.workspace.lines("runs") == 1).await?;
    stack.runner.kill().await?;
    stack.runner.start_again().await?;
    stack.workspace.write("go", "")?;
    let got = expect_outcome(&stack, &follower, &turn, Outcome::Completed).await?;
    assert_eq!(answer_of(&got), "through");
    assert_eq!(stack.workspace.lines("runs"), 1, "the tool ran once");
    let kinds = follower.kinds(&turn);
    let calls = kinds.iter().filter(|kind| matches!(kind, Kind::ToolCall(_))).count();
    let results: Vec<_> = kinds
        .iter()
        .filter_map(|kind| match kind {
            Kind::ToolResult(result) => Some(result.output.trim().to_owned()),
            _ => None,
        })
        .collect();
    assert_eq!((calls, results), (1, vec!["out-of-the-tool".to_owned()]), "{kinds:?}");
    Ok(())
}

/// An idle process that the runner left is taken up with all that it knew of its thread.
#[tokio::test]
async fn an_idle_engine_of_a_killed_runner_serves_the_next_turn() -> anyhow::Result<()> {
    let mut stack = Stack::start_with(codex()).await?;
    let conversation = stack.conversation().await?;
    let follower = stack.control.follow(&conversation);
    let first = stack.control.run_answered(&conversation, "[[text:a]] question-one", "a", NORMAL).await?;
    let before = engines(&stack);
    stack.runner.kill().await?;
    stack.runner.start_again().await?;
    let turn = stack.control.begin(&conversation, "[[text:b]] question-two").await?;
    let second = expect_outcome(&stack, &follower, &turn, Outcome::Completed).await?;
    assert_eq!(turn_of(&second).session_id, turn_of(&first).session_id);
    assert_eq!(engines(&stack), before, "no second process for one thread");
    Ok(())
}

fn tokens(turn: &Turn) -> anyhow::Result<(u64, u64, bool)> {
    let usage = turn.usage.as_ref().context("usage")?;
    let counted =
        usage.models.iter().map(|model| (model.input_tokens.unwrap_or(0), model.output_tokens.unwrap_or(0)));
    let (input, output) = counted.fold((0, 0), |all, one| (all.0 + one.0, all.1 + one.1));
    Ok((input, output, usage.complete))
}

/// The engine counts over the whole thread, also over a resume; a turn is told what it used itself.
#[tokio::test]
async fn s42_cumulative_usage_is_told_by_turn_warm_and_resumed() -> anyhow::Result<()> {
    let stack = Stack::start_with(codex().set("runner.warm_ttl", "1s")).await?;
    let conversation = stack.conversation().await?;
    let mut told = Vec::new();
    for n in 0..4 {
        if n == 2 {
            stack.wait_nothing_left(NORMAL).await?;
        }
        let text = format!("[[usage in=1000 out=50 read=0 created=0]][[text:x]] question {n}");
        let got = stack.control.run_answered(&conversation, &text, "x", NORMAL).await?;
        told.push(tokens(turn_of(&got))?);
    }
    assert_eq!(told, vec![(1000, 50, true); 4]);
    Ok(())
}
