//! One message, one answer: what everything else stands on.

use roundhouse_proto::{control::v1::TurnStatus, engine::v1::Origin};
use roundhouse_test_support::{BRIEF, NORMAL, Stack};

#[tokio::test]
async fn a_message_is_answered_by_the_real_engine_and_its_session_stays_warm() -> anyhow::Result<()> {
    let stack = Stack::start().await?;
    let conversation = stack.conversation().await?;
    let follower = stack.control.follow(&conversation);

    let first = stack.control.begin(&conversation, "[[text:one]] first question").await?;
    let ended = stack.control.wait_end(&first, NORMAL).await?;
    let turn = ended.turn.unwrap_or_default();
    assert_eq!(turn.status(), TurnStatus::Completed, "{turn:?}");
    assert_eq!(turn.origin(), Origin::Started);
    assert_eq!(ended.answer.map(|message| message.text).as_deref(), Some("one"));
    assert!(turn.usage.is_some(), "usage is known: {turn:?}");

    let ended =
        stack.control.run_answered(&conversation, "[[text:two]] second question", "two", NORMAL).await?;
    let second = ended.turn.unwrap_or_default().turn_id;
    let turns = stack.control.turns(&conversation).await?;
    let ids: Vec<_> = turns.iter().map(|turn| turn.turn_id.as_str()).collect();
    assert_eq!(ids, [first.as_str(), second.as_str()], "oldest first");
    assert_eq!(turns[1].origin(), Origin::Resumed, "the session is the first one's: {:?}", turns[1]);
    assert_eq!(turns[0].session_id, turns[1].session_id);

    follower.wait_terminal(&second, NORMAL).await?;
    follower.check()?;
    assert_eq!(stack.model.count_for("first question"), 1);
    assert_eq!(stack.model.count_for("second question"), 1);
    Ok(())
}

#[tokio::test]
async fn s42_usage_counts_every_request_of_a_turn_and_none_of_another() -> anyhow::Result<()> {
    let stack = Stack::start().await?;
    let conversation = stack.conversation().await?;
    // 100 in, 25 out, 20 read and 10 written for each request, unless a script says otherwise.
    let tool = stack.control.run(&conversation, "[[bash:true]][[text:a]] with a tool", NORMAL).await?;
    let plain = stack.control.run(&conversation, "[[text:b]] without", NORMAL).await?;
    let session = plain.turn.clone().unwrap_or_default().session_id;
    let close = roundhouse_proto::engine::v1::CloseSessionRequest { session_id: session };
    stack.runner_client()?.close_session(close).await?;
    stack.wait_nothing_left(BRIEF).await?;
    let resumed = stack.control.run(&conversation, "[[text:c]] in a new process", NORMAL).await?;
    let failed = stack
        .control
        .run(&conversation, "[[bash:true]][[error 403:no]] fails after a request", NORMAL)
        .await?;
    for (got, requests) in [(tool, 2), (plain, 1), (resumed, 1), (failed, 1)] {
        let turn = got.turn.unwrap_or_default();
        let usage = turn.usage.clone().unwrap_or_default();
        assert!(usage.complete, "{turn:?}");
        let [model] = &usage.models[..] else { panic!("one model: {turn:?}") };
        let counted =
            (model.input_tokens, model.output_tokens, model.cache_read_tokens, model.cache_write_tokens);
        let wanted = (Some(100 * requests), Some(25 * requests), Some(20 * requests), Some(10 * requests));
        assert_eq!(counted, wanted, "{turn:?}");
    }
    Ok(())
}
