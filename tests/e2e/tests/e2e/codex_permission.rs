//! What the real Codex may do only when somebody allows it, and what its sandbox lets it do by itself.

use anyhow::Context as _;
use roundhouse_proto::{
    control::v1::{Permission, TurnStatus},
    engine::v1::{Outcome, PermissionDecider, PermissionDecision},
};
use roundhouse_test_support::{BRIEF, Control, Follower, NORMAL, Stack, StackOptions, wait_for};

use crate::{
    answer_of,
    codex::codex_in,
    expect_outcome,
    permission::{answer, answers},
};

/// The model asks to be let out of the sandbox.
pub(crate) const ASKS: &str = "[[tool name=Bash:{\"command\":\"echo made > made\",\
    \"sandbox_permissions\":\"require_escalated\",\"justification\":\"to make it\"}]][[text:through]] may I make it?";

async fn asking(options: StackOptions) -> anyhow::Result<(Stack, String, Follower, String)> {
    let stack = Stack::start_with(options).await?;
    let conversation = stack.conversation().await?;
    let follower = stack.control.follow(&conversation);
    let turn = stack.control.begin(&conversation, ASKS).await?;
    Ok((stack, conversation, follower, turn))
}

async fn listed(stack: &Stack, conversation: &str, turn: &str) -> anyhow::Result<Permission> {
    let permission = wait_for("the request is listed", NORMAL, || async {
        Ok(stack.control.permissions(conversation, false).await?.pop())
    })
    .await?;
    let request = permission.request.clone().context("what is asked")?;
    assert_eq!((permission.turn_id.as_str(), request.tool.as_str()), (turn, "exec_command"));
    assert!(request.input_json.contains("echo made > made"), "{request:?}");
    stack.control.wait_status(turn, TurnStatus::WaitingForPermission, BRIEF).await?;
    assert_eq!(stack.workspace.read("made"), None, "nothing happens before the answer");
    Ok(permission)
}

#[tokio::test]
async fn asked_and_allowed_by_a_second_client_the_first_answer_wins() -> anyhow::Result<()> {
    let (stack, conversation, follower, turn) = asking(codex_in("ask")).await?;
    let permission = listed(&stack, &conversation, &turn).await?;
    let second = Control::new(&stack.control_plane.url())?;
    assert!(answer(&second, &permission.request_id, PermissionDecision::Allow).await?);
    assert!(!answer(&stack.control, &permission.request_id, PermissionDecision::Deny).await?, "too late");
    let got = expect_outcome(&stack, &follower, &turn, Outcome::Completed).await?;
    assert_eq!(answer_of(&got), "through");
    assert_eq!(stack.workspace.read("made").as_deref(), Some("made\n"));
    let answers = answers(&follower, &turn);
    assert_eq!(answers.len(), 1, "{answers:?}");
    assert_eq!(answers[0].decision(), PermissionDecision::Allow);
    Ok(())
}

#[tokio::test]
async fn a_denial_reaches_the_model_with_its_reason() -> anyhow::Result<()> {
    let (stack, conversation, follower, turn) = asking(codex_in("ask")).await?;
    let permission = listed(&stack, &conversation, &turn).await?;
    assert!(answer(&stack.control, &permission.request_id, PermissionDecision::Deny).await?);
    expect_outcome(&stack, &follower, &turn, Outcome::Completed).await?;
    assert_eq!(stack.workspace.read("made"), None);
    let last = stack.model.requests().pop().context("a request")?.conversation();
    assert!(last.occurrences("not today") >= 1, "{:?}", last.texts().last());
    Ok(())
}

#[tokio::test]
async fn unanswered_it_is_denied_at_its_deadline() -> anyhow::Result<()> {
    let options = codex_in("ask").set("runner.permission_timeout", "2s");
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
async fn a_request_survives_the_runner_and_is_answered_after_it() -> anyhow::Result<()> {
    let (mut stack, conversation, follower, turn) = asking(codex_in("ask")).await?;
    let permission = listed(&stack, &conversation, &turn).await?;
    stack.runner.kill().await?;
    assert!(answer(&stack.control, &permission.request_id, PermissionDecision::Allow).await?);
    stack.runner.start_again().await?;
    expect_outcome(&stack, &follower, &turn, Outcome::Completed).await?;
    assert_eq!(stack.workspace.read("made").as_deref(), Some("made\n"));
    assert_eq!(answers(&follower, &turn).len(), 1);
    Ok(())
}

/// The sandbox keeps `.git` read-only by default; an agent that may edit may also commit.
#[tokio::test]
async fn accept_edits_writes_commits_and_stays_in_the_workspace() -> anyhow::Result<()> {
    let stack = Stack::start_with(codex_in("accept-edits")).await?;
    let conversation = stack.conversation().await?;
    let outside = stack.root().join("outside");
    let tool = format!(
        "echo hello > written; git add written && git -c user.name=A -c user.email=a@example.invalid commit -qm second; \
         echo leaked > {}",
        outside.display()
    );
    let text = format!("[[bash:{tool}]][[text:committed]] commit it");
    stack.control.run_answered(&conversation, &text, "committed", NORMAL).await?;
    assert_eq!(stack.workspace.git(&["log", "--format=%s"])?, "second\nfirst");
    assert!(!outside.exists(), "the sandbox let it write outside of the workspace");
    assert!(stack.control.permissions(&conversation, true).await?.is_empty(), "nobody was asked");
    Ok(())
}
