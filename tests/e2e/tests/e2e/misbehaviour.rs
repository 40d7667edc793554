//! Engines that misbehave: fake-engine does on demand what a real one does once a year.

use anyhow::Context as _;
use roundhouse_proto::engine::v1::{Failure, FailureReason, Outcome, event_body::Kind};
use roundhouse_test_support::{BRIEF, NORMAL, Stack, StackOptions, census, wait_until};

use crate::{answer_of, expect_outcome, turn_of};

async fn stack(options: StackOptions) -> anyhow::Result<(Stack, String)> {
    let stack = Stack::start_with(options.fake_engine()?).await?;
    let conversation = stack.conversation().await?;
    Ok((stack, conversation))
}

/// Runs a turn that has to fail, and the one after it that has to work.
async fn fails(options: StackOptions, text: &str) -> anyhow::Result<Failure> {
    let (stack, conversation) = stack(options).await?;
    let follower = stack.control.follow(&conversation);
    let turn = stack.control.begin(&conversation, text).await?;
    let got = expect_outcome(&stack, &follower, &turn, Outcome::Failed).await?;
    let failure = turn_of(&got).failure.clone().context("a failed turn says why")?;
    assert!(!failure.message.is_empty() && !failure.next_action.is_empty(), "{failure:?}");
    let next = stack.control.run(&conversation, "[[text:back]] again", NORMAL).await?;
    assert_eq!(answer_of(&next), "back", "the conversation goes on: {:?}", turn_of(&next));
    Ok(failure)
}

#[tokio::test]
async fn s34_exit_0_without_the_finished_event_is_a_failure() -> anyhow::Result<()> {
    let failure = fails(StackOptions::default(), "[[text:half]][[exit code=0]] leave").await?;
    assert_eq!((failure.reason(), failure.exit_code), (FailureReason::Process, Some(0)), "{failure:?}");
    Ok(())
}

#[tokio::test]
async fn an_engine_that_dies_by_a_signal_says_which_and_shows_its_last_words() -> anyhow::Result<()> {
    let failure = fails(StackOptions::default(), "[[stderr:last words]][[die:SEGV]] crash").await?;
    assert_eq!((failure.reason(), failure.signal), (FailureReason::Process, Some(11)), "{failure:?}");
    assert!(failure.stderr_tail.contains("last words"), "{failure:?}");
    Ok(())
}

#[tokio::test]
async fn an_engine_that_falls_silent_ends_at_the_idle_timeout() -> anyhow::Result<()> {
    let options = StackOptions::default().set("runner.idle_timeout", "2s");
    let failure = fails(options, "[[text:and then]][[hang]] silence").await?;
    assert_eq!(failure.reason(), FailureReason::IdleTimeout, "{failure:?}");
    Ok(())
}

#[tokio::test]
async fn a_line_without_end_fails_the_turn_and_not_the_runner() -> anyhow::Result<()> {
    let options = StackOptions::default().set("runner.max_line_bytes", 1_048_576);
    let failure = fails(options, "[[long bytes=8000000 open]][[exit code=0]] flood").await?;
    assert!(matches!(failure.reason(), FailureReason::OutputInvalid | FailureReason::Process), "{failure:?}");
    Ok(())
}

#[tokio::test]
async fn s30_s31_noise_split_lines_and_unknown_lines_never_fail_a_turn() -> anyhow::Result<()> {
    let (stack, conversation) = stack(StackOptions::default()).await?;
    let follower = stack.control.follow(&conversation);
    let text = "[[garbage lines=20]][[line:{\"type\":\"unheard_of\",\"n\":1}]][[long bytes=300000]]\
        [[stderr bytes=3000000]][[split bytes=3]][[text:Größe: ✓ 漢字]] noise";
    let turn = stack.control.begin(&conversation, text).await?;
    let got = expect_outcome(&stack, &follower, &turn, Outcome::Completed).await?;
    assert_eq!(answer_of(&got), "Größe: ✓ 漢字");
    Ok(())
}

#[tokio::test]
async fn s43_an_engine_deaf_to_everything_is_killed_with_its_children() -> anyhow::Result<()> {
    let options = StackOptions::default()
        .set("runner.cancel_interrupt_grace", "300ms")
        .set("runner.cancel_term_grace", "300ms");
    let (stack, conversation) = stack(options).await?;
    let follower = stack.control.follow(&conversation);
    let text =
        "[[ignore:term,int,hup,interrupt,eof]][[fork]][[fork detached hold]][[text:never mind]][[hang]] stay";
    let turn = stack.control.begin(&conversation, text).await?;
    follower
        .wait_event(&turn, "its text", NORMAL, |kind| matches!(kind, Kind::Text(_)).then_some(()))
        .await?;
    wait_until("engine and two children live", BRIEF, || stack.engine_processes().len() >= 3).await?;
    stack.control.cancel(&turn).await?;
    expect_outcome(&stack, &follower, &turn, Outcome::Cancelled).await?;
    let left = stack.engine_processes();
    assert!(left.is_empty(), "{}", census::describe(&left));
    let next = stack.control.run(&conversation, "[[text:back]] again", NORMAL).await?;
    assert_eq!(answer_of(&next), "back", "{:?}", turn_of(&next));
    Ok(())
}

#[tokio::test]
async fn s26_a_large_answer_arrives_whole_and_its_event_is_cut_and_flagged() -> anyhow::Result<()> {
    let (stack, conversation) = stack(StackOptions::default()).await?;
    let follower = stack.control.follow(&conversation);
    let turn = stack.control.begin(&conversation, "[[huge bytes=300000]] much").await?;
    let got = expect_outcome(&stack, &follower, &turn, Outcome::Completed).await?;
    assert_eq!(answer_of(&got).len(), 300_000);
    let (length, truncated) = follower
        .wait_event(&turn, "its text", BRIEF, |kind| match kind {
            Kind::Text(text) => Some((text.text.len(), text.truncated)),
            _ => None,
        })
        .await?;
    assert!(truncated && length <= 64_000, "{length} bytes, truncated: {truncated}");
    Ok(())
}

#[tokio::test]
async fn a_slow_reader_never_slows_a_turn() -> anyhow::Result<()> {
    let (stack, conversation) = stack(StackOptions::default()).await?;
    let request = roundhouse_proto::control::v1::StreamEventsRequest {
        conversation_id: conversation.clone(),
        include_partial: true,
        follow: Some(true),
        ..Default::default()
    };
    // Opened, and never read.
    let unread = stack.control.conversations().stream_events(request).await?;
    let follower = stack.control.follow(&conversation);
    let turn =
        stack.control.begin(&conversation, "[[events count=3000 bytes=2000]][[text:through]] pour").await?;
    expect_outcome(&stack, &follower, &turn, Outcome::Completed).await?;
    // Whoever reads late gets a prefix without gaps, then its end with the place to go on from, or everything.
    let mut stream = unread.into_inner();
    let mut last = 0;
    let ended = loop {
        match tokio::time::timeout(BRIEF, stream.message()).await.context("the unread stream is stuck")? {
            Ok(Some(item)) => {
                if let Some(roundhouse_proto::control::v1::stream_events_response::Item::TurnEvent(event)) =
                    item.item
                {
                    assert_eq!(event.seq, last + 1, "no gap for the slow reader");
                    last = event.seq;
                    if matches!(event.body.and_then(|body| body.kind), Some(Kind::Terminal(_))) {
                        break None;
                    }
                }
            }
            Ok(None) => anyhow::bail!("the stream ended OK without the terminal event"),
            Err(status) => break Some(status),
        }
    };
    if let Some(status) = ended {
        assert_eq!(status.code(), tonic::Code::ResourceExhausted, "{status:?}");
        assert_eq!(roundhouse_test_support::reason_of(&status), "SLOW_READER");
    }
    Ok(())
}

#[tokio::test]
async fn a_model_that_hangs_in_mid_stream_is_caught_by_our_own_watchdog() -> anyhow::Result<()> {
    // The real engine, which would wait for minutes.
    let stack = Stack::start_with(StackOptions::default().set("runner.idle_timeout", "3s")).await?;
    let conversation = stack.conversation().await?;
    let follower = stack.control.follow(&conversation);
    let turn = stack.control.begin(&conversation, "[[text:so far]][[stall]] hang").await?;
    let got = expect_outcome(&stack, &follower, &turn, Outcome::Failed).await?;
    let failure = turn_of(&got).failure.clone().context("a failed turn says why")?;
    assert_eq!(failure.reason(), FailureReason::IdleTimeout, "{failure:?}");
    assert!(failure.retryable, "{failure:?}");
    let messages = stack.control.messages(&conversation).await?;
    let last = messages.last().context("messages")?;
    assert_eq!((last.text.as_str(), last.incomplete), ("so far", true), "what was said is kept");
    let next = stack.control.run(&conversation, "[[text:back]] again", NORMAL).await?;
    assert_eq!(answer_of(&next), "back", "{:?}", turn_of(&next));
    Ok(())
}
