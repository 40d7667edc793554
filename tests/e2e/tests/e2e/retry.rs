//! Turns that fail, and what becomes of their message.

use anyhow::Context as _;
use roundhouse_models::{Matcher, Script};
use roundhouse_proto::{
    control::v1::{Role, TurnStatus},
    engine::v1::{FailureReason, Outcome},
};
use roundhouse_test_support::{NORMAL, Stack, reason_of};

use crate::{answer_of, expect_outcome, turn_of};

#[tokio::test]
async fn s64_a_failed_turn_is_answered_by_its_retry_and_the_message_stands_once() -> anyhow::Result<()> {
    let stack = Stack::start().await?;
    let conversation = stack.conversation().await?;
    let follower = stack.control.follow(&conversation);
    stack.model.rule(Matcher::Contains("fragile".to_owned()), Script::parse("[[error 500:down]]")?);
    let failed = stack.control.begin(&conversation, "a fragile question").await?;
    let got = expect_outcome(&stack, &follower, &failed, Outcome::Failed).await?;
    let failure = turn_of(&got).failure.clone().context("a failed turn says why")?;
    assert_eq!(failure.reason(), FailureReason::Process, "{failure:?}");
    assert!(failure.retryable && failure.unavailable && !failure.next_action.is_empty(), "{failure:?}");
    assert!(failure.native_code.contains("500"), "{failure:?}");

    stack.model.clear_rules();
    stack.model.rule(Matcher::Contains("fragile".to_owned()), Script::text("it holds"));
    let before = stack.model.count_for("fragile");
    let retry = stack.control.retry(&failed).await?;
    assert_ne!(retry, failed);
    let got = expect_outcome(&stack, &follower, &retry, Outcome::Completed).await?;
    assert_eq!(answer_of(&got), "it holds");
    assert_eq!(turn_of(&got).retry_of, failed);
    assert_eq!(stack.model.count_for("fragile") - before, 1, "answered once");

    let messages = stack.control.messages(&conversation).await?;
    let users: Vec<_> = messages.iter().filter(|message| message.role() == Role::User).collect();
    assert_eq!(users.len(), 1, "one user message in the shared history: {messages:?}");
    assert_eq!(messages.iter().filter(|message| message.text == "it holds").count(), 1);

    // The window is closed now: the turn is no longer the last one's failure.
    let error = stack.control.retry(&failed).await.expect_err("the retry is the last turn now");
    let status = error.downcast_ref::<tonic::Status>().context("a status")?;
    assert_eq!(status.code(), tonic::Code::FailedPrecondition, "{status:?}");
    assert_eq!(reason_of(status), "WRONG_STATE");
    Ok(())
}

#[tokio::test]
async fn s36_a_usage_limit_is_quota_a_bad_key_auth_and_a_long_message_context_too_long() -> anyhow::Result<()>
{
    let stack = Stack::start().await?;
    for (text, reason) in [
        ("[[limit reset=1900000000]] too much", FailureReason::Quota),
        ("[[error 403:no]] not yours", FailureReason::Auth),
        ("[[too_long]] far too long", FailureReason::ContextTooLong),
    ] {
        let conversation = stack.conversation().await?;
        let got = stack.control.run(&conversation, text, NORMAL).await?;
        let turn = turn_of(&got);
        assert_eq!(turn.status(), TurnStatus::Failed, "{text}: {turn:?}");
        let failure = turn.failure.clone().context("a failed turn says why")?;
        assert_eq!(failure.reason(), reason, "{text}: {failure:?}");
        assert!(!failure.message.is_empty() && !failure.next_action.is_empty(), "{failure:?}");
        assert!(!failure.spool_id.is_empty(), "{failure:?}");
        // The same key and the same long message fail again; a limit passes.
        assert_eq!(failure.retryable, reason == FailureReason::Quota, "{failure:?}");
    }
    Ok(())
}

#[tokio::test]
async fn s6_a_failed_turn_promotes_the_message_after_it() -> anyhow::Result<()> {
    let stack = Stack::start().await?;
    let conversation = stack.conversation().await?;
    let follower = stack.control.follow(&conversation);
    let failing = stack.control.begin(&conversation, "[[hold:h]][[error 403:no]] fails").await?;
    let waiting = stack.control.begin(&conversation, "[[text:works]] works").await?;
    stack.model.wait_gate("h", NORMAL).await?;
    stack.model.release_gate("h");
    expect_outcome(&stack, &follower, &failing, Outcome::Failed).await?;
    let got = expect_outcome(&stack, &follower, &waiting, Outcome::Completed).await?;
    assert_eq!(answer_of(&got), "works");
    Ok(())
}

#[tokio::test]
async fn an_agent_that_does_not_exist_fails_its_turn_with_what_to_do() -> anyhow::Result<()> {
    let stack = Stack::start().await?;
    let conversation = stack.conversation_with("nobody").await?;
    let got = stack.control.run(&conversation, "is anybody there?", NORMAL).await?;
    let turn = turn_of(&got);
    assert_eq!(turn.status(), TurnStatus::Failed, "{turn:?}");
    let failure = turn.failure.clone().context("a failed turn says why")?;
    assert_eq!(failure.reason(), FailureReason::Configuration, "{failure:?}");
    assert!(failure.message.contains("nobody") && !failure.next_action.is_empty(), "{failure:?}");
    // S6: and the conversation is free for the next message.
    stack.workspace.write_agent(&roundhouse_test_support::Agent::new("nobody"))?;
    stack.control.run_answered(&conversation, "[[text:yes]] and now?", "yes", NORMAL).await?;
    Ok(())
}
