//! One message, one answer: what everything else stands on.

use roundhouse_proto::{control::v1::TurnStatus, engine::v1::Origin};
use roundhouse_test_support::{NORMAL, Stack};

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
