//! What is killed, and when, changes nothing of what was promised.

use anyhow::Context as _;
use roundhouse_models::Ending;
use roundhouse_proto::engine::v1::{Outcome, event_body::Kind};
use roundhouse_test_support::{BRIEF, NORMAL, Stack, StackOptions, census, wait_for, wait_until};
use tonic::Code;

use crate::{answer_of, expect_outcome, turn_of};

/// Who is killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Victim {
    Runner,
    ControlPlane,
    Both,
}

impl Victim {
    pub(crate) async fn kill(self, stack: &mut Stack) -> anyhow::Result<()> {
        match self {
            Self::Runner => stack.runner.kill().await,
            Self::ControlPlane => stack.control_plane.kill().await,
            Self::Both => stack.kill_both().await,
        }
    }

    pub(crate) async fn start_again(self, stack: &mut Stack) -> anyhow::Result<()> {
        match self {
            Self::Runner => stack.runner.start_again().await,
            Self::ControlPlane => stack.control_plane.start_again().await,
            Self::Both => stack.start_both().await,
        }
    }
}

/// The engines that live now, by process id.
fn engines(stack: &Stack) -> Vec<u32> {
    stack.census().into_iter().filter(|one| one.role == census::Role::Engine).map(|one| one.pid).collect()
}

async fn killed_mid_text(victim: Victim) -> anyhow::Result<()> {
    let mut stack = Stack::start().await?;
    let conversation = stack.conversation().await?;
    let follower = stack.control.follow(&conversation);
    let text = "[[text:the first half]][[gate:half]][[text: and the second]] tell me";
    let turn = stack.control.begin(&conversation, text).await?;
    follower.wait_partial(&turn, "the first half", NORMAL).await?;
    let before = engines(&stack);
    assert_eq!(before.len(), 1, "{}", census::describe(&stack.census()));

    victim.kill(&mut stack).await?;
    assert_eq!(engines(&stack), before, "the engine goes on under its keeper");
    victim.start_again(&mut stack).await?;
    wait_until("the follower is connected again", NORMAL, || {
        victim == Victim::Runner || follower.connections() > 1
    })
    .await?;
    assert_eq!(engines(&stack), before, "it is still the same process");
    stack.model.release_gate("half");

    let got = expect_outcome(&stack, &follower, &turn, Outcome::Completed).await?;
    assert_eq!(answer_of(&got), "the first half and the second");
    assert_eq!(stack.model.count_for("tell me"), 1, "one request at the model");
    assert_eq!(stack.control.messages(&conversation).await?.len(), 2);
    Ok(())
}

async fn killed_mid_tool(victim: Victim) -> anyhow::Result<()> {
    let mut stack = Stack::start().await?;
    let conversation = stack.conversation().await?;
    let follower = stack.control.follow(&conversation);
    let tool = "echo ran >> runs; until test -e go; do sleep 0.1; done; echo out-of-the-tool";
    let text = format!("[[bash:{tool}]][[text:the tool is through]] use it");
    let turn = stack.control.begin(&conversation, &text).await?;
    wait_until("the tool runs", NORMAL, || stack.workspace.lines("runs") == 1).await?;
    follower
        .wait_event(&turn, "a tool call", NORMAL, |kind| matches!(kind, Kind::ToolCall(_)).then_some(()))
        .await?;

    victim.kill(&mut stack).await?;
    victim.start_again(&mut stack).await?;
    stack.workspace.write("go", "")?;

    let got = expect_outcome(&stack, &follower, &turn, Outcome::Completed).await?;
    assert_eq!(answer_of(&got), "the tool is through");
    assert_eq!(stack.workspace.lines("runs"), 1, "the tool ran once");
    let kinds = follower.kinds(&turn);
    let calls = kinds.iter().filter(|kind| matches!(kind, Kind::ToolCall(_))).count();
    let results: Vec<_> = kinds
        .iter()
        .filter_map(|kind| match kind {
            Kind::ToolResult(result) => Some(result.output.trim().to_owned()),
            _ => None,
        })
        .collect();
    assert_eq!((calls, results), (1, vec!["out-of-the-tool".to_owned()]), "{kinds:?}");
    assert_eq!(stack.model.count_for("use it"), 2, "one request before the tool, one after it");
    Ok(())
}

/// The engine finishes while nobody is there to hear it.
async fn finished_while_away(victim: Victim) -> anyhow::Result<()> {
    let mut stack = Stack::start().await?;
    let conversation = stack.conversation().await?;
    let follower = stack.control.follow(&conversation);
    let turn = stack
        .control
        .begin(&conversation, "[[text:said ]][[gate:away]][[text:in an empty room]] speak")
        .await?;
    follower.wait_partial(&turn, "said ", NORMAL).await?;

    victim.kill(&mut stack).await?;
    stack.model.release_gate("away");
    wait_until("the model has answered in full", BRIEF, || {
        stack.model.requests_for("speak").iter().all(|request| request.ending() == Ending::Sent)
    })
    .await?;
    victim.start_again(&mut stack).await?;

    let got = expect_outcome(&stack, &follower, &turn, Outcome::Completed).await?;
    assert_eq!(answer_of(&got), "said in an empty room");
    assert_eq!(stack.model.count_for("speak"), 1);
    // And the conversation goes on in the same session.
    let next =
        stack.control.run_answered(&conversation, "[[text:here]] still there?", "here", NORMAL).await?;
    assert_eq!(turn_of(&next).session_id, turn_of(&got).session_id);
    Ok(())
}

#[tokio::test]
async fn the_runner_killed_mid_text_finds_its_engine_again() -> anyhow::Result<()> {
    killed_mid_text(Victim::Runner).await
}

#[tokio::test]
async fn the_control_plane_killed_mid_text_takes_the_turn_up_again() -> anyhow::Result<()> {
    killed_mid_text(Victim::ControlPlane).await
}

#[tokio::test]
async fn both_services_killed_mid_text_at_once_take_it_up_again() -> anyhow::Result<()> {
    killed_mid_text(Victim::Both).await
}

#[tokio::test]
async fn s47_the_runner_killed_mid_tool_runs_the_tool_once() -> anyhow::Result<()> {
    killed_mid_tool(Victim::Runner).await
}

#[tokio::test]
async fn s47_the_control_plane_killed_mid_tool_runs_the_tool_once() -> anyhow::Result<()> {
    killed_mid_tool(Victim::ControlPlane).await
}

#[tokio::test]
async fn s47_both_services_killed_mid_tool_run_the_tool_once() -> anyhow::Result<()> {
    killed_mid_tool(Victim::Both).await
}

#[tokio::test]
async fn s50_what_an_engine_finished_while_the_runner_was_away_is_not_lost() -> anyhow::Result<()> {
    finished_while_away(Victim::Runner).await
}

#[tokio::test]
async fn s50_what_an_engine_finished_while_the_control_plane_was_away_is_not_lost() -> anyhow::Result<()> {
    finished_while_away(Victim::ControlPlane).await
}

#[tokio::test]
async fn s50_what_an_engine_finished_while_both_services_were_away_is_not_lost() -> anyhow::Result<()> {
    finished_while_away(Victim::Both).await
}

/// Kills the control plane at a failpoint of SendMessage's way to the engine, then sends the same again.
async fn killed_on_the_way(failpoint: &str) -> anyhow::Result<()> {
    let options = StackOptions {
        control_plane_failpoints: Some(format!("{failpoint}=return")),
        ..StackOptions::default()
    };
    let mut stack = Stack::start_with(options).await?;
    let conversation = stack.conversation().await?;
    // The answer may or may not get out before the end; both are allowed, a lie is not.
    let first = stack.control.send_as("req-once", &conversation, "[[text:kept]] do not lose me").await;
    if let Err(status) = &first {
        assert!(
            matches!(status.code(), Code::Unavailable | Code::Unknown | Code::Internal | Code::Cancelled),
            "{status:?}"
        );
    }
    let status = stack.control_plane.wait_exit(BRIEF).await?;
    assert!(!status.success(), "it was killed at {failpoint}: {status}");
    stack.control_plane.clear_env("FAILPOINTS");
    stack.control_plane.start_again().await?;

    // What was acknowledged is there before anybody says it again.
    let stored = stack.control.messages(&conversation).await?;
    if let Ok(first) = &first {
        let id = &first.message.as_ref().context("a message")?.message_id;
        assert!(
            stored.iter().any(|message| message.message_id == *id),
            "acknowledged, then lost: {stored:?}"
        );
    }
    let again = stack.control.send_as("req-once", &conversation, "[[text:kept]] do not lose me").await?;
    let turn = again.turn.context("a turn")?.turn_id;
    if let Ok(first) = first {
        assert_eq!(first.turn.context("a turn")?.turn_id, turn);
    }
    let follower = stack.control.follow(&conversation);
    let got = expect_outcome(&stack, &follower, &turn, Outcome::Completed).await?;
    assert_eq!(answer_of(&got), "kept");
    assert_eq!(stack.model.count_for("do not lose me"), 1, "nothing was started twice");
    assert_eq!(stack.control.turns(&conversation).await?.len(), 1);
    Ok(())
}

#[tokio::test]
async fn s1_a_kill_between_commit_and_dispatch_loses_nothing_and_starts_nothing_twice() -> anyhow::Result<()>
{
    killed_on_the_way("control-plane::after-accept").await
}

#[tokio::test]
async fn s1_a_kill_between_opening_the_session_and_sending_starts_nothing_twice() -> anyhow::Result<()> {
    killed_on_the_way("control-plane::after-open").await
}

#[tokio::test]
async fn s47_a_kill_right_after_sending_to_the_runner_starts_nothing_twice() -> anyhow::Result<()> {
    killed_on_the_way("control-plane::after-send").await
}

#[tokio::test]
async fn a_runner_told_to_stop_leaves_its_running_turn_to_the_keeper() -> anyhow::Result<()> {
    let mut stack = Stack::start().await?;
    let conversation = stack.conversation().await?;
    let follower = stack.control.follow(&conversation);
    let turn =
        stack.control.begin(&conversation, "[[text:before ]][[gate:stop]][[text:after]] go on").await?;
    follower.wait_partial(&turn, "before ", NORMAL).await?;
    let before = engines(&stack);
    let status = stack.runner.stop("TERM", BRIEF).await?;
    assert!(status.success(), "a clean stop: {status}");
    assert_eq!(engines(&stack), before);
    stack.runner.start_again().await?;
    stack.model.release_gate("stop");
    let got = expect_outcome(&stack, &follower, &turn, Outcome::Completed).await?;
    assert_eq!(answer_of(&got), "before after");
    assert_eq!(stack.model.count_for("go on"), 1);
    Ok(())
}

#[tokio::test]
async fn s46_an_engine_that_was_killed_fails_its_turn_and_the_next_one_resumes() -> anyhow::Result<()> {
    let stack = Stack::start().await?;
    let conversation = stack.conversation().await?;
    stack.control.run_answered(&conversation, "[[text:one]] first of all", "one", NORMAL).await?;
    let follower = stack.control.follow(&conversation);
    let turn = stack.control.begin(&conversation, "[[text:so far]][[gate:never]] and then it dies").await?;
    follower.wait_partial(&turn, "so far", NORMAL).await?;
    let [engine] = engines(&stack)[..] else {
        anyhow::bail!("one engine: {}", census::describe(&stack.census()))
    };
    roundhouse_test_support::signal(engine, "KILL")?;
    let got = expect_outcome(&stack, &follower, &turn, Outcome::Failed).await?;
    let failure = turn_of(&got).failure.clone().context("a failed turn says why")?;
    assert_eq!(failure.reason(), roundhouse_proto::engine::v1::FailureReason::Process, "{failure:?}");
    assert_eq!(failure.signal, Some(9), "{failure:?}");
    assert!(failure.retryable && !failure.next_action.is_empty(), "{failure:?}");
    let messages = stack.control.messages(&conversation).await?;
    let partial = messages.last().context("messages")?;
    assert!(partial.incomplete && partial.text == "so far", "what was said is kept: {partial:?}");
    let next = stack.control.run_answered(&conversation, "[[text:alive]] and now?", "alive", NORMAL).await?;
    let request = stack.model.requests_for("and now?").pop().context("a request")?.conversation();
    assert_eq!(request.occurrences("first of all"), 1, "{:?}", request.texts());
    assert_eq!(turn_of(&next).session_id, turn_of(&got).session_id);
    Ok(())
}

#[tokio::test]
async fn s49_a_warm_engine_is_readopted_by_a_restarted_runner() -> anyhow::Result<()> {
    let mut stack = Stack::start().await?;
    let conversation = stack.conversation().await?;
    stack.control.run_answered(&conversation, "[[text:one]] first", "one", NORMAL).await?;
    let before = engines(&stack);
    assert_eq!(before.len(), 1);
    stack.runner.kill().await?;
    stack.runner.start_again().await?;
    stack.wait_runner().await?;
    stack.control.run_answered(&conversation, "[[text:two]] second", "two", NORMAL).await?;
    assert_eq!(engines(&stack), before, "no second process for one session");
    Ok(())
}

#[tokio::test]
async fn the_stack_leaves_nothing_when_its_engines_are_closed() -> anyhow::Result<()> {
    let stack = Stack::start().await?;
    let conversation = stack.conversation().await?;
    let got = stack.control.run(&conversation, "[[text:one]] first", NORMAL).await?;
    let session_id = turn_of(&got).session_id.clone();
    wait_for("the session closes", NORMAL, || async {
        let request = roundhouse_proto::engine::v1::CloseSessionRequest { session_id: session_id.clone() };
        Ok(Some(stack.runner_client()?.close_session(request).await?))
    })
    .await?;
    stack.wait_nothing_left(BRIEF).await
}
