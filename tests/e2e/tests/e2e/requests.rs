//! The same request twice is one request.

use anyhow::Context as _;
use roundhouse_proto::engine::v1::Outcome;
use roundhouse_test_support::{BRIEF, Control, NORMAL, Stack, reason_of};
use tonic::Code;

use crate::{answer_of, expect_outcome};

#[tokio::test]
async fn s2_a_request_id_used_by_twenty_clients_and_after_a_restart_is_one_turn() -> anyhow::Result<()> {
    let mut stack = Stack::start().await?;
    let conversation = stack.conversation().await?;
    let follower = stack.control.follow(&conversation);
    let text = "[[text:once]] ask me once";
    let url = stack.control_plane.url();
    let calls = (0..20).map(|_| {
        let (url, conversation) = (url.clone(), conversation.clone());
        tokio::spawn(async move {
            // A client with a connection of its own.
            let control = Control::new(&url)?;
            anyhow::Ok(control.send_as("the-same-request", &conversation, text).await?)
        })
    });
    let mut turns = Vec::new();
    let mut first = 0;
    for call in futures::future::join_all(calls).await {
        let sent = call??;
        first += usize::from(!sent.repeated_request);
        turns.push((sent.turn.context("a turn")?.turn_id, sent.message.context("a message")?.message_id));
    }
    turns.sort();
    turns.dedup();
    assert_eq!((turns.len(), first), (1, 1), "one turn, one message, one first: {turns:?}");
    let turn = turns[0].0.clone();
    let got = expect_outcome(&stack, &follower, &turn, Outcome::Completed).await?;
    assert_eq!(answer_of(&got), "once");

    stack.kill_both().await?;
    stack.start_both().await?;
    stack.wait_runner().await?;
    let again = stack.control.send_as("the-same-request", &conversation, text).await?;
    assert!(again.repeated_request);
    assert_eq!(again.turn.context("a turn")?.turn_id, turn);
    // A turn after it shows that nothing else was waiting to be started.
    stack.control.run_answered(&conversation, "[[text:next]] another one", "next", NORMAL).await?;
    assert_eq!(stack.model.count_for("ask me once"), 1, "one request at the model");
    assert_eq!(stack.control.turns(&conversation).await?.len(), 2);
    Ok(())
}

#[tokio::test]
async fn s2_another_body_under_a_used_request_id_is_refused() -> anyhow::Result<()> {
    let stack = Stack::start().await?;
    let conversation = stack.conversation().await?;
    stack.control.send_as("taken", &conversation, "[[text:a]] one thing").await?;
    let status =
        stack.control.send_as("taken", &conversation, "[[text:b]] another thing").await.expect_err("refused");
    assert_eq!((status.code(), reason_of(&status).as_str()), (Code::AlreadyExists, "REQUEST_ID_REUSED"));
    let messages = stack.control.messages(&conversation).await?;
    assert_eq!(messages.iter().filter(|message| message.text.contains("another thing")).count(), 0);
    Ok(())
}

#[tokio::test]
async fn s2_equal_text_under_two_request_ids_is_two_turns() -> anyhow::Result<()> {
    let stack = Stack::start().await?;
    let conversation = stack.conversation().await?;
    for id in ["one", "two"] {
        let sent = stack.control.send_as(id, &conversation, "[[text:again]] the same words").await?;
        stack.control.wait_end(&sent.turn.context("a turn")?.turn_id, NORMAL).await?;
    }
    assert_eq!(stack.model.count_for("the same words"), 2);
    Ok(())
}

#[tokio::test]
async fn s33_a_client_that_leaves_cancels_nothing() -> anyhow::Result<()> {
    let stack = Stack::start().await?;
    let conversation = stack.conversation().await?;
    let follower = stack.control.follow(&conversation);
    let turn =
        stack.control.begin(&conversation, "[[text:half]][[gate:gone]][[text: and whole]] say it").await?;
    follower.wait_partial(&turn, "half", NORMAL).await?;
    drop(follower);
    stack.model.release_gate("gone");
    let got = stack.control.wait_end(&turn, NORMAL).await?;
    assert_eq!(answer_of(&got), "half and whole");
    // Who comes late reads the same stream from its beginning.
    let late = stack.control.follow(&conversation);
    expect_outcome(&stack, &late, &turn, Outcome::Completed).await?;
    late.wait_terminal(&turn, BRIEF).await?;
    Ok(())
}

#[tokio::test]
async fn a_message_of_a_mebibyte_reaches_the_model_whole_and_a_larger_one_is_refused() -> anyhow::Result<()> {
    let stack = Stack::start().await?;
    let conversation = stack.conversation().await?;
    let head = "[[text:read]] a long story: ";
    let text = format!("{head}{}", "x".repeat((1 << 20) - head.len()));
    stack.control.run_answered(&conversation, &text, "read", NORMAL).await?;
    let requests = stack.model.requests_for("a long story");
    assert_eq!(requests.len(), 1);
    assert!(
        requests[0].conversation().texts().iter().any(|(_, sent)| *sent == text),
        "it was cut on its way"
    );
    let status =
        stack.control.send_as("too-long", &conversation, &format!("{text}x")).await.expect_err("too long");
    assert_eq!((status.code(), reason_of(&status).as_str()), (Code::InvalidArgument, "FIELD_INVALID"));
    Ok(())
}
