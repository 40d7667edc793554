//! Agent files: what they say reaches the engine, and changes when they do.

use anyhow::Context as _;
use roundhouse_proto::{
    control::v1::{ListAgentsRequest, PromptChange, TurnStatus},
    engine::v1::{CloseSessionRequest, FailureReason, Origin},
};
use roundhouse_test_support::{Agent, BRIEF, NORMAL, Stack};

use crate::turn_of;

const ONE: &str = "PROMPT-AS-IT-WAS";
const TWO: &str = "PROMPT-AS-IT-IS-NOW";

async fn prompt_changes(close_between: bool) -> anyhow::Result<()> {
    let stack = Stack::start().await?;
    let agent = Agent::new("builder");
    stack.workspace.write_agent(&agent.clone().prompt(ONE))?;
    let conversation = stack.conversation().await?;
    let first = stack.control.run_answered(&conversation, "[[text:a]] first", "a", NORMAL).await?;
    let session = turn_of(&first).session_id.clone();
    if close_between {
        stack.runner_client()?.close_session(CloseSessionRequest { session_id: session }).await?;
        stack.wait_nothing_left(BRIEF).await?;
    }
    stack.workspace.write_agent(&agent.prompt(TWO))?;
    let second = stack.control.run_answered(&conversation, "[[text:b]] second", "b", NORMAL).await?;
    let third = stack.control.run_answered(&conversation, "[[text:c]] third", "c", NORMAL).await?;

    let system = |text: &str| -> anyhow::Result<String> {
        Ok(stack.model.requests_for(text).pop().context("a request")?.conversation().system())
    };
    let (before, after, later) = (system("first")?, system("second")?, system("third")?);
    assert!(before.contains(ONE) && !before.contains(TWO), "{before}");
    assert!(after.contains(TWO) && !after.contains(ONE), "{after}");
    assert!(later.contains(TWO) && !later.contains(ONE), "{later}");
    assert_ne!(
        turn_of(&second).prompt_change(),
        PromptChange::Unspecified,
        "the turn says what became of it"
    );
    assert_eq!(turn_of(&third).prompt_change(), PromptChange::Unspecified);
    assert_ne!(turn_of(&first).agent_sha256, turn_of(&second).agent_sha256);
    assert_eq!(turn_of(&second).agent_sha256, turn_of(&third).agent_sha256);
    // Whichever way it went, nothing of the conversation is lost.
    let request = stack.model.requests_for("second").pop().context("a request")?.conversation();
    assert_eq!(request.occurrences("[[text:a]] first"), 1, "{:?}", request.texts());
    Ok(())
}

#[tokio::test]
async fn s11_a_changed_prompt_reaches_a_warm_engine() -> anyhow::Result<()> {
    prompt_changes(false).await
}

#[tokio::test]
async fn s11_a_changed_prompt_reaches_a_resumed_session() -> anyhow::Result<()> {
    prompt_changes(true).await
}

#[tokio::test]
async fn s11_model_and_effort_are_passed_each_time_and_a_new_effort_keeps_the_session() -> anyhow::Result<()>
{
    let stack = Stack::start().await?;
    let mut agent = Agent::new("builder");
    agent.effort = Some("low".to_owned());
    stack.workspace.write_agent(&agent)?;
    let conversation = stack.conversation().await?;
    let first = stack.control.run_answered(&conversation, "[[text:a]] first", "a", NORMAL).await?;
    agent.effort = Some("high".to_owned());
    stack.workspace.write_agent(&agent)?;
    let second = stack.control.run_answered(&conversation, "[[text:b]] second", "b", NORMAL).await?;
    let session = turn_of(&second).session_id.clone();
    assert_eq!(turn_of(&first).session_id, session);
    assert_eq!(turn_of(&second).origin(), Origin::Resumed);
    stack.runner_client()?.close_session(CloseSessionRequest { session_id: session }).await?;
    let third = stack.control.run_answered(&conversation, "[[text:c]] third", "c", NORMAL).await?;
    assert_eq!(turn_of(&third).origin(), Origin::Resumed);

    for (text, effort) in [("first", "low"), ("second", "high"), ("third", "high")] {
        let request = stack.model.requests_for(text).pop().context("a request")?.conversation();
        assert_eq!(request.effort(), Some(effort), "{text}");
        assert!(request.model().contains("sonnet"), "{text}: {}", request.model());
    }
    Ok(())
}

#[tokio::test]
async fn s9_a_waiting_turn_gets_the_file_as_it_is_when_dispatched_and_a_running_one_keeps_its_own()
-> anyhow::Result<()> {
    let stack = Stack::start().await?;
    let agent = Agent::new("builder");
    stack.workspace.write_agent(&agent.clone().prompt(ONE))?;
    let conversation = stack.conversation().await?;
    let text = "[[text:a]][[hold:edit]][[bash:true]][[text:b]] running";
    let running = stack.control.begin(&conversation, text).await?;
    let waiting = stack.control.begin(&conversation, "[[text:c]] waiting").await?;
    stack.model.wait_gate("edit", NORMAL).await?;
    stack.workspace.write_agent(&agent.prompt(TWO))?;
    stack.model.release_gate("edit");
    stack.control.wait_end(&running, NORMAL).await?;
    stack.control.wait_end(&waiting, NORMAL).await?;
    for request in stack.model.requests_for("running") {
        assert!(request.conversation().system().contains(ONE));
    }
    let system = stack.model.requests_for("waiting").pop().context("a request")?.conversation().system();
    assert!(system.contains(TWO) && !system.contains(ONE), "{system}");
    Ok(())
}

#[tokio::test]
async fn one_bad_agent_file_is_named_without_hiding_the_good_ones() -> anyhow::Result<()> {
    let stack = Stack::start().await?;
    let bad = "---\nname: broken\ndescription: It is.\nengine: claude-code\nmodel: sonnet\ncolour: red\n---\nWork.\n";
    stack.workspace.write(".agents/broken.md", bad)?;
    let request = ListAgentsRequest { workspace: stack.workspace_name() };
    let listed = stack.control.agents().list_agents(request).await?.into_inner();
    assert_eq!(listed.agents.iter().map(|agent| agent.name.as_str()).collect::<Vec<_>>(), ["builder"]);
    let [problem] = &listed.problems[..] else { anyhow::bail!("one problem: {listed:?}") };
    assert_eq!(
        (problem.file_name.as_str(), problem.line, problem.field.as_str()),
        ("broken.md", 6, "colour")
    );
    // And a turn with it says the same.
    let conversation = stack.conversation_with("broken").await?;
    let got = stack.control.run(&conversation, "work", NORMAL).await?;
    let failure = turn_of(&got).failure.clone().context("a failed turn says why")?;
    assert_eq!(
        (turn_of(&got).status(), failure.reason()),
        (TurnStatus::Failed, FailureReason::Configuration)
    );
    assert!(failure.message.contains("broken.md") && failure.message.contains("colour"), "{failure:?}");
    Ok(())
}

#[tokio::test]
async fn bypass_is_refused_where_the_runner_does_not_allow_it() -> anyhow::Result<()> {
    let options = roundhouse_test_support::StackOptions::default().set("runner.allow_bypass", false);
    let stack = Stack::start_with(options).await?;
    let conversation = stack.conversation().await?;
    let got = stack.control.run(&conversation, "[[bash:touch made]] go", NORMAL).await?;
    let failure = turn_of(&got).failure.clone().context("a failed turn says why")?;
    assert_eq!(failure.reason(), FailureReason::Configuration, "{failure:?}");
    assert!(
        failure.next_action.contains("allow_bypass") || failure.message.contains("allow_bypass"),
        "{failure:?}"
    );
    assert_eq!(stack.model.total(), 0, "no engine was started");
    Ok(())
}
