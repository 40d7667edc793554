//! A cancelled turn is cancelled once, whatever it was doing, and leaves nothing but what it had said.

use anyhow::{Context as _, ensure};
use roundhouse_proto::{
    control::v1::TurnStatus,
    engine::v1::{Origin, Outcome, PermissionDecider, event_body::Kind},
};
use roundhouse_test_support::{
    Agent, BRIEF, Follower, LONG, NORMAL, Stack, StackOptions, census, wait_until,
};

use crate::{expect_outcome, terminals, turn_of};

/// Cancels, waits for the one end, and looks at what is left of it: no process, and a conversation that goes on.
async fn cancel_and_go_on(
    stack: &Stack,
    follower: &Follower,
    conversation: &str,
    turn: &str,
    partial: &str,
) -> anyhow::Result<()> {
    let response = stack.control.cancel(turn).await?;
    assert!(!response.already_ended);
    let got = expect_outcome(stack, follower, turn, Outcome::Cancelled).await?;
    let tools = stack.tool_processes();
    ensure!(tools.is_empty(), "left of the cancelled turn: {}", census::describe(&tools));
    if !partial.is_empty() {
        let messages = stack.control.messages(conversation).await?;
        let last = messages.last().context("messages")?;
        assert_eq!((last.text.as_str(), last.incomplete), (partial, true), "what was said is kept");
    }
    goes_on(stack, conversation, turn).await?;
    assert_eq!(terminals(follower, turn).len(), 1);
    assert_eq!(stack.control.turn(turn).await?.turn.map(|turn| turn.status()), Some(TurnStatus::Cancelled));
    assert!(turn_of(&got).end_time.is_some());
    Ok(())
}

/// The next turn works, in the session of the cancelled one.
async fn goes_on(stack: &Stack, conversation: &str, cancelled: &str) -> anyhow::Result<()> {
    let next = stack
        .control
        .run_answered(conversation, "[[text:going on]] after the cancel", "going on", NORMAL)
        .await?;
    let before = stack.control.turn(cancelled).await?;
    assert_eq!(turn_of(&next).origin(), Origin::Resumed, "{:?}", turn_of(&next));
    assert_eq!(turn_of(&next).session_id, turn_of(&before).session_id);
    Ok(())
}

#[tokio::test]
async fn s45_during_text() -> anyhow::Result<()> {
    let stack = Stack::start().await?;
    let conversation = stack.conversation().await?;
    let follower = stack.control.follow(&conversation);
    let turn = stack
        .control
        .begin(&conversation, "[[text:as far as this]][[gate:never]][[text: never]] talk")
        .await?;
    follower.wait_partial(&turn, "as far as this", NORMAL).await?;
    cancel_and_go_on(&stack, &follower, &conversation, &turn, "as far as this").await
}

#[tokio::test]
async fn s43_during_a_tool_with_a_detached_child() -> anyhow::Result<()> {
    let stack = Stack::start().await?;
    let conversation = stack.conversation().await?;
    let follower = stack.control.follow(&conversation);
    let mark = format!("mark-{}", uuid::Uuid::now_v7().simple());
    let sleeper = format!("python3 -c 'import time; time.sleep(900)' {mark}");
    let tool = format!("setsid nohup {sleeper} >/dev/null 2>&1 & echo started > started; {sleeper}");
    let turn = stack.control.begin(&conversation, &format!("[[text:I start it]][[bash:{tool}]] run")).await?;
    wait_until("both sleepers run", NORMAL, || {
        stack.workspace.read("started").is_some() && census::with_argument(&mark).len() >= 2
    })
    .await?;
    cancel_and_go_on(&stack, &follower, &conversation, &turn, "I start it").await?;
    assert_eq!(census::with_argument(&mark), Vec::<u32>::new());
    assert!(stack.workspace.read("started").is_some(), "nothing in the worktree is undone");
    Ok(())
}

#[tokio::test]
async fn s44_before_the_first_byte() -> anyhow::Result<()> {
    let stack = Stack::start().await?;
    let conversation = stack.conversation().await?;
    let follower = stack.control.follow(&conversation);
    let turn = stack.control.begin(&conversation, "[[hang]] say nothing").await?;
    stack.model.wait_for_text("say nothing", 1, NORMAL).await?;
    cancel_and_go_on(&stack, &follower, &conversation, &turn, "").await
}

#[tokio::test]
async fn s44_while_the_engine_tries_the_api_again() -> anyhow::Result<()> {
    let stack = Stack::start().await?;
    let conversation = stack.conversation().await?;
    let follower = stack.control.follow(&conversation);
    let turn = stack.control.begin(&conversation, "[[error 529:busy]] try and try").await?;
    stack.model.wait_for_text("try and try", 2, NORMAL).await?;
    cancel_and_go_on(&stack, &follower, &conversation, &turn, "").await
}

/// The engine tries a number of times and says nothing of it between; the end must come by itself.
#[tokio::test]
async fn a_service_that_is_overloaded_without_end_fails_the_turn_in_bounded_time() -> anyhow::Result<()> {
    let stack = Stack::start().await?;
    let conversation = stack.conversation().await?;
    let got = stack.control.run(&conversation, "[[error 529:busy]] on and on", LONG).await?;
    assert_eq!(turn_of(&got).status(), TurnStatus::Failed);
    let failure = turn_of(&got).failure.clone().context("a failed turn says why")?;
    assert!(failure.unavailable, "{failure:?}");
    let tries = stack.model.count_for("on and on");
    assert!((2..=10).contains(&tries), "tried {tries} times");
    Ok(())
}

/// A model that asks for a background task gets its command in the turn, or none: nothing of it outlives the turn.
#[tokio::test]
async fn a_background_task_is_not_to_be_had() -> anyhow::Result<()> {
    let stack = Stack::start().await?;
    let conversation = stack.conversation().await?;
    let input = r#"{"command":"echo ran > ran; sleep 1; echo ended > ended","run_in_background":true,"description":"x"}"#;
    let text = format!("[[tool name=Bash:{input}]][[text:through]] start it");
    stack.control.run_answered(&conversation, &text, "through", NORMAL).await?;
    let tools = stack.tool_processes();
    ensure!(tools.is_empty(), "left of the turn: {}", census::describe(&tools));
    let ran = stack.workspace.read("ran").is_some();
    let ended = stack.workspace.read("ended").is_some();
    assert_eq!(ran, ended, "what was started had ended when the turn did");
    Ok(())
}

#[tokio::test]
async fn s44_with_a_permission_pending() -> anyhow::Result<()> {
    let options = StackOptions::default().agents(&[Agent::new("builder").permissions("ask")]);
    let stack = Stack::start_with(options).await?;
    let conversation = stack.conversation().await?;
    let follower = stack.control.follow(&conversation);
    let turn = stack.control.begin(&conversation, "[[bash:echo x > made]] may I").await?;
    let request = follower
        .wait_event(&turn, "a permission request", NORMAL, |kind| match kind {
            Kind::PermissionRequest(request) => Some(request.request_id.clone()),
            _ => None,
        })
        .await?;
    cancel_and_go_on(&stack, &follower, &conversation, &turn, "").await?;
    assert_eq!(stack.workspace.read("made"), None, "what was asked for did not happen");
    assert_eq!(
        stack.control.permissions(&conversation, false).await?,
        Vec::new(),
        "nothing is left to answer"
    );
    let answers: Vec<_> = follower
        .kinds(&turn)
        .into_iter()
        .filter_map(|kind| match kind {
            Kind::PermissionAnswer(answer) if answer.request_id == request => Some(answer),
            _ => None,
        })
        .collect();
    assert_eq!(answers.len(), 1, "every request is settled once: {answers:?}");
    assert!(
        matches!(answers[0].decider(), PermissionDecider::Cancel | PermissionDecider::Engine),
        "{answers:?}"
    );
    Ok(())
}

#[tokio::test]
async fn s44_twice_and_after_the_end() -> anyhow::Result<()> {
    let stack = Stack::start().await?;
    let conversation = stack.conversation().await?;
    let follower = stack.control.follow(&conversation);
    let turn = stack.control.begin(&conversation, "[[text:some]][[gate:never]] talk").await?;
    follower.wait_partial(&turn, "some", NORMAL).await?;
    let other = roundhouse_test_support::Control::new(&stack.control_plane.url())?;
    let (one, two) = tokio::join!(stack.control.cancel(&turn), other.cancel(&turn));
    one?;
    two?;
    expect_outcome(&stack, &follower, &turn, Outcome::Cancelled).await?;
    let late = stack.control.cancel(&turn).await?;
    assert!(late.already_ended);
    assert_eq!(late.turn.map(|turn| turn.status()), Some(TurnStatus::Cancelled));
    goes_on(&stack, &conversation, &turn).await?;
    assert_eq!(terminals(&follower, &turn).len(), 1);

    // A late cancel of a completed turn changes nothing, and never touches the turn that runs now.
    let done = stack.control.begin(&conversation, "[[text:done]] finish this").await?;
    expect_outcome(&stack, &follower, &done, Outcome::Completed).await?;
    let running = stack.control.begin(&conversation, "[[text:on ]][[gate:on]][[text:and on]] run").await?;
    follower.wait_partial(&running, "on ", NORMAL).await?;
    let late = stack.control.cancel(&done).await?;
    assert!(late.already_ended);
    stack.model.release_gate("on");
    expect_outcome(&stack, &follower, &running, Outcome::Completed).await?;
    assert_eq!(stack.control.turn(&done).await?.turn.map(|turn| turn.status()), Some(TurnStatus::Completed));
    Ok(())
}

#[tokio::test]
async fn s6_a_waiting_turn_is_cancelled_without_an_engine_and_the_next_is_promoted() -> anyhow::Result<()> {
    let stack = Stack::start().await?;
    let conversation = stack.conversation().await?;
    let follower = stack.control.follow(&conversation);
    let running = stack.control.begin(&conversation, "[[text:a]][[gate:queue]] first").await?;
    let waiting = stack.control.begin(&conversation, "[[text:b]] never asked").await?;
    let third = stack.control.begin(&conversation, "[[text:c]] third").await?;
    follower.wait_partial(&running, "a", NORMAL).await?;
    stack.control.cancel(&waiting).await?;
    expect_outcome(&stack, &follower, &waiting, Outcome::Cancelled).await?;
    stack.model.release_gate("queue");
    expect_outcome(&stack, &follower, &running, Outcome::Completed).await?;
    expect_outcome(&stack, &follower, &third, Outcome::Completed).await?;
    assert_eq!(stack.model.count_for("never asked"), 0);
    Ok(())
}

#[tokio::test]
async fn s44_an_unknown_turn_is_not_found() -> anyhow::Result<()> {
    let stack = Stack::start().await?;
    let error = stack.control.cancel("trn_00000000000000000000000000000000").await.expect_err("not found");
    let status = error.downcast_ref::<tonic::Status>().context("a status")?;
    assert_eq!(status.code(), tonic::Code::NotFound);
    assert_eq!(roundhouse_test_support::reason_of(status), "TURN_NOT_FOUND");
    Ok(())
}

#[tokio::test]
async fn s43_a_cancel_survives_the_death_of_both_services() -> anyhow::Result<()> {
    let mut stack = Stack::start().await?;
    let conversation = stack.conversation().await?;
    let follower = stack.control.follow(&conversation);
    let turn = stack.control.begin(&conversation, "[[text:some]][[gate:never]] talk").await?;
    follower.wait_partial(&turn, "some", NORMAL).await?;
    // The wish is stored while nobody can carry it out, and carried out by those who come.
    stack.runner.kill().await?;
    stack.control.cancel(&turn).await?;
    stack.control_plane.kill().await?;
    stack.start_both().await?;
    expect_outcome(&stack, &follower, &turn, Outcome::Cancelled).await?;
    let tools = stack.tool_processes();
    assert!(tools.is_empty(), "{}", census::describe(&tools));
    wait_until("the model's client is gone", BRIEF, || {
        stack
            .model
            .requests_for("talk")
            .iter()
            .all(|request| request.ending() == roundhouse_models::Ending::Abandoned)
    })
    .await
}
