//! Keeper, engine and runner all die around the moment at which the real Codex takes a message: it is worked on once, or the
//! turn says that nobody knows.

use anyhow::{Context as _, ensure};
use roundhouse_proto::engine::v1::{Origin, Outcome};
use roundhouse_test_support::{BRIEF, NORMAL, Stack, census, signal, wait_until};

use crate::{
    codex::{codex, engines},
    expect_outcome, turn_of,
};

/// Kills the runner, then the keeper and with it the engine, and waits until nothing is left.
async fn all_die(stack: &mut Stack) -> anyhow::Result<()> {
    stack.runner.kill().await?;
    for one in stack.census().into_iter().filter(|one| one.role == census::Role::Keeper) {
        signal(one.pid, "KILL")?;
    }
    stack.wait_nothing_left(BRIEF).await
}

/// The engine is stopped, so the message waits in its pipe and dies with it: its list of turns proves that, and the message is
/// given to the next process.
#[tokio::test]
async fn s47_a_message_that_died_in_the_pipe_is_given_again() -> anyhow::Result<()> {
    let mut stack = Stack::start_with(codex()).await?;
    let conversation = stack.conversation().await?;
    let first = stack.control.run_answered(&conversation, "[[text:a]] question-one", "a", NORMAL).await?;
    let follower = stack.control.follow(&conversation);
    let [engine] = engines(&stack)[..] else { anyhow::bail!("one engine") };
    signal(engine, "STOP")?;
    let text = "[[bash:echo ran >> runs]][[text:b]] question-two";
    let turn = stack.control.begin(&conversation, text).await?;
    follower
        .wait_event(&turn, "the delivery", NORMAL, |kind| match kind {
            roundhouse_proto::engine::v1::event_body::Kind::Phase(phase) => {
                (phase.phase() == roundhouse_proto::engine::v1::phase_event::Phase::Delivered).then_some(())
            }
            _ => None,
        })
        .await?;
    all_die(&mut stack).await?;
    stack.runner.start_again().await?;
    let got = expect_outcome(&stack, &follower, &turn, Outcome::Completed).await?;
    assert_eq!(turn_of(&got).session_id, turn_of(&first).session_id);
    assert_eq!(stack.workspace.lines("runs"), 1, "the tool ran once");
    let seen = stack.model.requests_for("question-two").pop().context("a request")?.conversation();
    assert_eq!((seen.occurrences("question-one"), seen.occurrences("question-two")), (1, 1));
    Ok(())
}

/// At whatever moment it happens: the tool never runs twice without a retry, and the session goes on.
#[tokio::test]
async fn s47_a_death_at_any_moment_never_runs_a_tool_twice() -> anyhow::Result<()> {
    let mut stack = Stack::start_with(codex()).await?;
    for round in 0..6_u64 {
        let conversation = stack.conversation().await?;
        let follower = stack.control.follow(&conversation);
        stack.control.run_answered(&conversation, "[[text:a]] warm up", "a", NORMAL).await?;
        let file = format!("runs-{round}");
        let text = format!("[[bash:echo ran >> {file}]][[text:b]] round {round}");
        let turn = stack.control.begin(&conversation, &text).await?;
        // From right after the beginning to after the tool.
        let moment = match round {
            0 => "at once",
            1 | 2 => "asked",
            _ => "ran",
        };
        let there = || match moment {
            "at once" => true,
            "asked" => stack.model.count_for(&format!("round {round}")) > 0,
            _ => stack.workspace.lines(&file) > 0,
        };
        wait_until(moment, NORMAL, there).await?;
        all_die(&mut stack).await?;
        stack.runner.start_again().await?;
        stack.wait_runner().await?;
        follower.wait_terminal(&turn, NORMAL).await?;
        let got = stack.control.wait_end(&turn, BRIEF).await?;
        ensure!(stack.workspace.lines(&file) <= 1, "round {round}: the tool ran more than once: {got:?}");
        let next = stack.control.run_answered(&conversation, "[[text:on]] go on", "on", NORMAL).await?;
        ensure!(turn_of(&next).origin() == Origin::Resumed, "round {round}: {:?}", turn_of(&next));
    }
    Ok(())
}
