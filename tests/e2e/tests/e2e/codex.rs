//! The real Codex CLI through both services: warm turns, resume, and what differs from other engines.

use anyhow::Context as _;
use roundhouse_proto::engine::v1::{Origin, Outcome};
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
