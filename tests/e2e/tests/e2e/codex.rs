//! The real Codex CLI through both services: warm turns, resume, and what differs from other engines.

use anyhow::Context as _;
use roundhouse_proto::{
    control::v1::TurnStatus,
    engine::v1::{FailureReason, Origin, Outcome},
};
use roundhouse_test_support::{Agent, NORMAL, Stack, StackOptions, census};

use crate::{answer_of, expect_outcome, turn_of};

/// An agent `builder` on Codex, with everything allowed.
pub(crate) fn codex() -> StackOptions {
    StackOptions::default().agents(&[Agent::codex("builder")])
}

/// The same, in this mode.
pub(crate) fn codex_in(permissions: &str) -> StackOptions {
    StackOptions::default().agents(&[Agent::codex("builder").permissions(permissions)])
}

/// The engines that live now, by process id.
pub(crate) fn engines(stack: &Stack) -> Vec<u32> {
    stack.census().into_iter().filter(|one| one.role == census::Role::Engine).map(|one| one.pid).collect()
}

#[tokio::test]
async fn turns_run_warm_in_one_process_and_one_thread() -> anyhow::Result<()> {
    let stack = Stack::start_with(codex()).await?;
    let conversation = stack.conversation().await?;
    let follower = stack.control.follow(&conversation);
    let turn = stack.control.begin(&conversation, "[[text:the-first]] question-one").await?;
    let first = expect_outcome(&stack, &follower, &turn, Outcome::Completed).await?;
    assert_eq!((answer_of(&first), turn_of(&first).origin()), ("the-first", Origin::Started));
    let before = engines(&stack);
    assert_eq!(before.len(), 1, "{}", census::describe(&stack.census()));
    let turn = stack
        .control
        .begin(&conversation, "[[bash:echo made > made]][[text:the-second]] question-two")
        .await?;
    let second = expect_outcome(&stack, &follower, &turn, Outcome::Completed).await?;
    assert_eq!((answer_of(&second), turn_of(&second).origin()), ("the-second", Origin::Resumed));
    assert_eq!(turn_of(&second).session_id, turn_of(&first).session_id);
    assert_eq!(engines(&stack), before, "the process stays");
    assert_eq!(stack.workspace.read("made").as_deref(), Some("made\n"));
    let last = stack.model.requests_for("question-two").pop().context("a request")?.conversation();
    for (text, times) in [("question-one", 1), ("the-first", 2), ("question-two", 1)] {
        // The first answer stands in its own marker, too.
        assert_eq!(last.occurrences(text), times, "{text}: {:?}", last.texts());
    }
    Ok(())
}

#[tokio::test]
async fn a_turn_after_an_eviction_resumes_without_a_loss() -> anyhow::Result<()> {
    let stack = Stack::start_with(codex().set("runner.warm_ttl", "200ms")).await?;
    let conversation = stack.conversation().await?;
    let first = stack
        .control
        .run_answered(&conversation, "[[text:the-first]] question-one", "the-first", NORMAL)
        .await?;
    stack.wait_nothing_left(NORMAL).await?;
    let second = stack
        .control
        .run_answered(&conversation, "[[text:the-second]] question-two", "the-second", NORMAL)
        .await?;
    assert_eq!(turn_of(&second).origin(), Origin::Resumed);
    assert_eq!(turn_of(&second).session_id, turn_of(&first).session_id);
    let last = stack.model.requests_for("question-two").pop().context("a request")?.conversation();
    assert_eq!(
        (last.occurrences("question-one"), last.occurrences("the-first")),
        (1, 2),
        "{:?}",
        last.texts()
    );
    Ok(())
}

/// Two live processes in one home: neither knows of the other, and the other's words are in no request.
#[tokio::test]
async fn threads_of_one_home_live_side_by_side_and_learn_nothing_of_each_other() -> anyhow::Result<()> {
    let stack = Stack::start_with(codex()).await?;
    let (one, two) = (stack.conversation().await?, stack.conversation().await?);
    for round in 0..3 {
        for (conversation, whose) in [(&one, "first"), (&two, "second")] {
            let text = format!("[[text:a]] of-the-{whose} {round}");
            stack.control.run_answered(conversation, &text, "a", NORMAL).await?;
        }
    }
    assert_eq!(engines(&stack).len(), 2, "{}", census::describe(&stack.census()));
    for (whose, other) in [("first", "second"), ("second", "first")] {
        let last = stack.model.requests_for(&format!("of-the-{whose} 2")).pop().context("a request")?;
        let seen = last.conversation();
        assert_eq!(seen.occurrences(&format!("of-the-{whose}")), 3, "{:?}", seen.texts());
        assert_eq!(seen.occurrences(&format!("of-the-{other}")), 0, "{:?}", seen.texts());
    }
    Ok(())
}

/// What the service says went wrong reaches the client as a reason, and the thread goes on.
#[tokio::test]
async fn failures_of_the_service_have_their_reasons_and_burn_no_session() -> anyhow::Result<()> {
    let stack = Stack::start_with(codex()).await?;
    let conversation = stack.conversation().await?;
    let follower = stack.control.follow(&conversation);
    stack.control.run_answered(&conversation, "[[text:a]] begin", "a", NORMAL).await?;
    for (text, reason) in [
        ("[[limit reset=2000000000]] one", FailureReason::Quota),
        ("[[too_long]] two", FailureReason::ContextTooLong),
        ("[[error 404:gone]] three", FailureReason::Configuration),
        ("[[error 400:odd]] four", FailureReason::Process),
    ] {
        let turn = stack.control.begin(&conversation, text).await?;
        let got = expect_outcome(&stack, &follower, &turn, Outcome::Failed).await?;
        let failure = turn_of(&got).failure.clone().context("a failed turn says why")?;
        assert_eq!(failure.reason(), reason, "{text}: {failure:?}");
        // A limit passes; what the service refuses, it refuses again.
        assert_eq!(failure.retryable, reason == FailureReason::Quota, "{text}: {failure:?}");
        let reset = failure.retry_at.map(|at| at.seconds);
        assert_eq!(reset, (reason == FailureReason::Quota).then_some(2_000_000_000), "{text}");
    }
    let last = stack.control.run_answered(&conversation, "[[text:on]] go on", "on", NORMAL).await?;
    assert_eq!(turn_of(&last).origin(), Origin::Resumed);
    assert_eq!(stack.control.list_sessions(&conversation).await?.len(), 1);
    Ok(())
}

#[tokio::test]
async fn a_failed_turn_is_retried_in_the_same_thread() -> anyhow::Result<()> {
    let stack = Stack::start_with(codex()).await?;
    let conversation = stack.conversation().await?;
    let failed =
        stack.control.run(&conversation, "[[error 400 times=1:odd]][[text:answered]] ask", NORMAL).await?;
    assert_eq!(turn_of(&failed).status(), TurnStatus::Failed);
    let retried = stack.control.retry(&turn_of(&failed).turn_id).await?;
    let got = stack.control.wait_end(&retried, NORMAL).await?;
    assert_eq!(answer_of(&got), "answered", "{:?}", turn_of(&got));
    assert_eq!(turn_of(&got).session_id, turn_of(&failed).session_id);
    let asked = stack.control.messages(&conversation).await?;
    assert_eq!(asked.iter().filter(|message| message.text.contains("ask")).count(), 1, "{asked:?}");
    Ok(())
}
