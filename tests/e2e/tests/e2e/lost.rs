//! A runner that stays away: its turn is lost with a word on what to do, and whoever comes back changes nothing.

use anyhow::Context as _;
use roundhouse_proto::{
    control::v1::{FreeWorkspaceRequest, ListWorkspacesRequest, TurnStatus, Workspace},
    engine::v1::{FailureReason, Outcome},
};
use roundhouse_test_support::{Follower, NORMAL, Stack, StackOptions, reason_of, wait_for};

use crate::{expect_outcome, terminals, turn_of};

async fn lose(stack: &mut Stack, conversation: &str, follower: &Follower) -> anyhow::Result<String> {
    let turn =
        stack.control.begin(conversation, "[[text:so far]][[gate:lost]][[text: so late]] lose me").await?;
    follower.wait_partial(&turn, "so far", NORMAL).await?;
    stack.runner.kill().await?;
    let got = expect_outcome(stack, follower, &turn, Outcome::Lost).await?;
    let failure = turn_of(&got).failure.clone().context("a lost turn says why")?;
    assert_eq!(failure.reason(), FailureReason::RunnerLost, "{failure:?}");
    assert!(!failure.message.is_empty() && !failure.next_action.is_empty(), "{failure:?}");
    Ok(turn)
}

fn options() -> StackOptions {
    StackOptions::default()
        .set("control_plane.runner_lost_after", "2s")
        .set("control_plane.heartbeat_interval", "500ms")
}

async fn held(stack: &Stack) -> anyhow::Result<Workspace> {
    let request = ListWorkspacesRequest { runner_id: String::new() };
    let listed = stack.control.runners().list_workspaces(request).await?.into_inner().workspaces;
    listed.into_iter().next().context("the workspace is listed")
}

#[tokio::test]
async fn s48_a_returning_runner_changes_nothing_of_a_lost_turn_and_frees_its_workspace() -> anyhow::Result<()>
{
    let mut stack = Stack::start_with(options()).await?;
    let conversation = stack.conversation().await?;
    let follower = stack.control.follow(&conversation);
    let turn = lose(&mut stack, &conversation, &follower).await?;
    let workspace = held(&stack).await?;
    assert_eq!((workspace.held_by_turn_id.as_str(), workspace.held_by_lost_turn), (turn.as_str(), true));

    // What waits for a workspace that a lost turn holds fails at once, and says what to do.
    let got = stack.control.run(&conversation, "[[text:x]] meanwhile", NORMAL).await?;
    let failure = turn_of(&got).failure.clone().context("a failed turn says why")?;
    assert_eq!(failure.reason(), FailureReason::WorkspaceBusy, "{failure:?}");
    assert!(!failure.next_action.is_empty());

    stack.model.release_gate("lost");
    stack.runner.start_again().await?;
    wait_for("the workspace is free", NORMAL, || async {
        Ok(held(&stack).await?.held_by_turn_id.is_empty().then_some(()))
    })
    .await?;
    stack.control.run_answered(&conversation, "[[text:works]] afterwards", "works", NORMAL).await?;
    assert_eq!(stack.control.turn(&turn).await?.turn.map(|turn| turn.status()), Some(TurnStatus::Lost));
    assert_eq!(terminals(&follower, &turn).len(), 1);
    assert_eq!(stack.model.count_for("lose me"), 1, "nothing is sent again by itself");
    follower.check()
}

#[tokio::test]
async fn a_person_frees_the_workspace_of_a_lost_turn_by_naming_it() -> anyhow::Result<()> {
    let mut stack = Stack::start_with(options()).await?;
    let conversation = stack.conversation().await?;
    let follower = stack.control.follow(&conversation);
    let turn = lose(&mut stack, &conversation, &follower).await?;
    let workspace = held(&stack).await?.workspace_id;
    let free = |turn_id: &str| FreeWorkspaceRequest {
        request_id: String::new(),
        workspace_id: workspace.clone(),
        turn_id: turn_id.to_owned(),
        reason: "I looked: nothing works there".to_owned(),
    };
    let other = free("trn_00000000000000000000000000000000");
    let status = stack.control.runners().free_workspace(other).await.expect_err("another turn holds it");
    assert!(["WRONG_STATE", "TURN_NOT_FOUND"].contains(&reason_of(&status).as_str()), "{status:?}");
    stack.control.runners().free_workspace(free(&turn)).await?;
    assert_eq!(held(&stack).await?.held_by_turn_id, "");
    Ok(())
}
