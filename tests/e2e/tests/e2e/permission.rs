//! What an engine may do only when somebody allows it.

use anyhow::Context as _;
use roundhouse_proto::{
    control::v1::{AnswerPermissionRequest, Permission, TurnStatus},
    engine::v1::{Outcome, PermissionAnswerEvent, PermissionDecider, PermissionDecision, event_body::Kind},
};
use roundhouse_test_support::{Agent, BRIEF, Control, Follower, NORMAL, Stack, StackOptions, wait_for};

use crate::{answer_of, expect_outcome};

pub(crate) const ASKS: &str = "[[bash:echo made > made]][[text:through]] may I make it?";

async fn asking(options: StackOptions) -> anyhow::Result<(Stack, String, Follower, String)> {
    let options = options.agents(&[Agent::new("builder").permissions("ask")]);
    let stack = Stack::start_with(options).await?;
    let conversation = stack.conversation().await?;
    let follower = stack.control.follow(&conversation);
    let turn = stack.control.begin(&conversation, ASKS).await?;
    Ok((stack, conversation, follower, turn))
}

/// Waits until the request is listed, and checks what is told of it.
async fn listed(stack: &Stack, conversation: &str, turn: &str) -> anyhow::Result<Permission> {
    let permission = wait_for("the request is listed", NORMAL, || async {
        Ok(stack.control.permissions(conversation, false).await?.pop())
    })
    .await?;
    assert_eq!(permission.turn_id, turn);
    let request = permission.request.clone().context("what is asked")?;
    assert_eq!(request.tool, "Bash");
    assert!(request.input_json.contains("echo made > made"), "{request:?}");
    assert!(request.deadline.is_some());
    stack.control.wait_status(turn, TurnStatus::WaitingForPermission, BRIEF).await?;
    assert_eq!(stack.workspace.read("made"), None, "nothing happens before the answer");
    Ok(permission)
}

pub(crate) async fn answer(
    control: &Control,
    id: &str,
    decision: PermissionDecision,
) -> anyhow::Result<bool> {
    let request = AnswerPermissionRequest {
        permission_request_id: id.to_owned(),
        decision: decision.into(),
        feedback: "not today".to_owned(),
        ..AnswerPermissionRequest::default()
    };
    Ok(control.conversations().answer_permission(request).await?.into_inner().accepted)
}

pub(crate) fn answers(follower: &Follower, turn: &str) -> Vec<PermissionAnswerEvent> {
    follower
        .kinds(turn)
        .into_iter()
        .filter_map(|kind| match kind {
            Kind::PermissionAnswer(answer) => Some(answer),
            _ => None,
        })
        .collect()
}

#[tokio::test]
async fn a_second_client_allows_it_and_the_first_answer_wins() -> anyhow::Result<()> {
    let (stack, conversation, follower, turn) = asking(StackOptions::default()).await?;
    let permission = listed(&stack, &conversation, &turn).await?;
    let second = Control::new(&stack.control_plane.url())?;
    assert!(answer(&second, &permission.request_id, PermissionDecision::Allow).await?);
    assert!(!answer(&stack.control, &permission.request_id, PermissionDecision::Deny).await?, "too late");
    let got = expect_outcome(&stack, &follower, &turn, Outcome::Completed).await?;
    assert_eq!(answer_of(&got), "through");
    assert_eq!(stack.workspace.read("made").as_deref(), Some("made\n"));
    let answers = answers(&follower, &turn);
    assert_eq!(answers.len(), 1, "{answers:?}");
    assert_eq!(
        (answers[0].decision(), answers[0].decider()),
        (PermissionDecision::Allow, PermissionDecider::Client)
    );
    assert_eq!(stack.control.permissions(&conversation, false).await?, Vec::new());
    assert_eq!(stack.control.permissions(&conversation, true).await?.len(), 1);
    Ok(())
}

#[tokio::test]
async fn of_two_answers_at_once_exactly_one_counts() -> anyhow::Result<()> {
    let (stack, conversation, follower, turn) = asking(StackOptions::default()).await?;
    let permission = listed(&stack, &conversation, &turn).await?;
    let second = Control::new(&stack.control_plane.url())?;
    let id = &permission.request_id;
    let (allowed, denied) = tokio::join!(
        answer(&stack.control, id, PermissionDecision::Allow),
        answer(&second, id, PermissionDecision::Deny)
    );
    let (allowed, denied) = (allowed?, denied?);
    assert!(allowed != denied, "allowed: {allowed}, denied: {denied}");
    expect_outcome(&stack, &follower, &turn, Outcome::Completed).await?;
    assert_eq!(stack.workspace.read("made").is_some(), allowed, "what was decided is what happened");
    assert_eq!(answers(&follower, &turn).len(), 1);
    Ok(())
}

#[tokio::test]
async fn a_denial_reaches_the_model_with_its_reason() -> anyhow::Result<()> {
    let (stack, conversation, follower, turn) = asking(StackOptions::default()).await?;
    let permission = listed(&stack, &conversation, &turn).await?;
    assert!(answer(&stack.control, &permission.request_id, PermissionDecision::Deny).await?);
    expect_outcome(&stack, &follower, &turn, Outcome::Completed).await?;
    assert_eq!(stack.workspace.read("made"), None);
    let last = stack.model.requests_for("may I make it?").pop().context("a request")?.conversation();
    let results = last.tool_results();
    assert!(results.iter().any(|(_, text, error)| *error && text.contains("not today")), "{results:?}");
    Ok(())
}

#[tokio::test]
async fn unanswered_it_is_denied_at_its_deadline() -> anyhow::Result<()> {
    let options = StackOptions::default().set("runner.permission_timeout", "2s");
    let (stack, conversation, follower, turn) = asking(options).await?;
    listed(&stack, &conversation, &turn).await?;
    expect_outcome(&stack, &follower, &turn, Outcome::Completed).await?;
    let answers = answers(&follower, &turn);
    assert_eq!(answers.len(), 1, "{answers:?}");
    assert_eq!(
        (answers[0].decision(), answers[0].decider()),
        (PermissionDecision::Deny, PermissionDecider::Deadline)
    );
    assert_eq!(stack.workspace.read("made"), None);
    Ok(())
}

#[tokio::test]
async fn the_runner_times_it_while_the_control_plane_is_away() -> anyhow::Result<()> {
    let options = StackOptions::default().set("runner.permission_timeout", "3s");
    let (mut stack, conversation, follower, turn) = asking(options).await?;
    listed(&stack, &conversation, &turn).await?;
    stack.control_plane.kill().await?;
    stack.model.wait_for_text("may I make it?", 2, NORMAL).await?;
    stack.control_plane.start_again().await?;
    expect_outcome(&stack, &follower, &turn, Outcome::Completed).await?;
    let answers = answers(&follower, &turn);
    assert_eq!(answers.len(), 1, "{answers:?}");
    assert_eq!(answers[0].decider(), PermissionDecider::Deadline);
    Ok(())
}

#[tokio::test]
async fn a_request_survives_the_runner_and_is_answered_after_it() -> anyhow::Result<()> {
    let (mut stack, conversation, follower, turn) = asking(StackOptions::default()).await?;
    let permission = listed(&stack, &conversation, &turn).await?;
    stack.runner.kill().await?;
    // Stored as a wish, and delivered when the runner is back.
    assert!(answer(&stack.control, &permission.request_id, PermissionDecision::Allow).await?);
    stack.runner.start_again().await?;
    expect_outcome(&stack, &follower, &turn, Outcome::Completed).await?;
    assert_eq!(stack.workspace.read("made").as_deref(), Some("made\n"));
    assert_eq!(answers(&follower, &turn).len(), 1);
    Ok(())
}

#[tokio::test]
async fn accept_edits_edits_without_asking_and_asks_for_the_rest() -> anyhow::Result<()> {
    let options = StackOptions::default().agents(&[Agent::new("builder").permissions("accept-edits")]);
    let stack = Stack::start_with(options).await?;
    let conversation = stack.conversation().await?;
    let follower = stack.control.follow(&conversation);
    let file = stack.workspace.path().join("written");
    let text = format!(
        "[[write path={}:hello]][[bash:python3 -c 'open(\"made\", \"w\")']][[text:through]] edit and run",
        file.display()
    );
    let turn = stack.control.begin(&conversation, &text).await?;
    let permission = wait_for("the command is asked for", NORMAL, || async {
        Ok(stack.control.permissions(&conversation, false).await?.pop())
    })
    .await?;
    assert_eq!(permission.request.map(|request| request.tool).as_deref(), Some("Bash"));
    assert_eq!(stack.workspace.read("written").as_deref(), Some("hello"), "the edit was not asked for");
    assert!(answer(&stack.control, &permission.request_id, PermissionDecision::Deny).await?);
    expect_outcome(&stack, &follower, &turn, Outcome::Completed).await?;
    assert_eq!(stack.workspace.read("made"), None);
    Ok(())
}
