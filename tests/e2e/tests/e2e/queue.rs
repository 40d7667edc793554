//! Messages that wait, and who knows what of the conversation.

use anyhow::Context as _;
use roundhouse_models::{Matcher, Script};
use roundhouse_proto::{control::v1::SendMessageRequest, engine::v1::Outcome};
use roundhouse_test_support::{Agent, NORMAL, Stack, StackOptions};

use crate::expect_outcome;

fn question(n: usize) -> String {
    format!("question-{n}-from-a-person")
}

fn answer(n: usize) -> String {
    format!("answer-{n}-from-the-model")
}

/// Sends six messages, the first of which is held at the model until all wait, to these agents in turn. Every request
/// must hold every earlier question and answer once, in order.
async fn each_request_holds_what_came_before(known: &[Agent]) -> anyhow::Result<()> {
    let agents: Vec<&str> = known.iter().map(|agent| agent.name.as_str()).collect();
    let stack = Stack::start_with(StackOptions::default().agents(known)).await?;
    let conversation = stack.conversation_with(agents[0]).await?;
    let follower = stack.control.follow(&conversation);
    for n in 0..6 {
        let script = Script::text(answer(n));
        let script =
            if n == 0 { Script::parse(&format!("[[hold:all]][[text:{}]]", answer(0)))? } else { script };
        stack.model.rule(Matcher::Contains(question(n)), script);
    }
    let mut turns = Vec::new();
    for n in 0..6 {
        let request = SendMessageRequest {
            request_id: format!("req-{n}"),
            conversation_id: conversation.clone(),
            text: question(n),
            agent: agents[n % agents.len()].to_owned(),
            ..SendMessageRequest::default()
        };
        let sent = stack.control.conversations().send_message(request).await?.into_inner();
        turns.push(sent.turn.context("a turn")?.turn_id);
    }
    stack.model.wait_gate("all", NORMAL).await?;
    stack.model.release_gate("all");
    for turn in &turns {
        expect_outcome(&stack, &follower, turn, Outcome::Completed).await?;
    }

    for n in 0..6 {
        let requests = stack.model.requests_for(&question(n));
        assert_eq!(requests.len(), 1, "question {n} was asked once");
        let request = requests[0].conversation();
        let everything: String =
            request.texts().into_iter().map(|(_, text)| text).collect::<Vec<_>>().join("\n");
        let mut at = 0;
        for earlier in 0..n {
            for wanted in [question(earlier), answer(earlier)] {
                assert_eq!(
                    request.occurrences(&wanted),
                    1,
                    "{wanted} in the request of question {n}: {everything}"
                );
                let found = everything.find(&wanted).context("it occurs")?;
                assert!(found >= at, "{wanted} is out of order in the request of question {n}: {everything}");
                at = found;
            }
        }
        assert_eq!(request.occurrences(&question(n)), 1);
        for later in n + 1..6 {
            assert_eq!(
                request.occurrences(&question(later)),
                0,
                "question {later} waits and is nobody's context"
            );
        }
    }

    // The shared history has its own order, which is not the order of arrival.
    let messages = stack.control.messages(&conversation).await?;
    let mut by_position: Vec<_> =
        messages.iter().map(|message| (message.position, message.text.clone())).collect();
    by_position.sort();
    let wanted: Vec<_> = (0..6).flat_map(|n| [question(n), answer(n)]).collect();
    assert_eq!(by_position.iter().map(|(_, text)| text.clone()).collect::<Vec<_>>(), wanted);
    assert!(by_position.iter().all(|(position, _)| position.is_some()));
    assert!(messages.windows(2).all(|pair| pair[0].seq < pair[1].seq));
    Ok(())
}

#[tokio::test]
async fn five_waiting_messages_each_know_all_that_came_before() -> anyhow::Result<()> {
    each_request_holds_what_came_before(&[Agent::new("builder")]).await
}

#[tokio::test]
async fn s12_messages_to_alternating_agents_each_know_all_that_came_before() -> anyhow::Result<()> {
    each_request_holds_what_came_before(&[Agent::new("builder"), Agent::new("critic")]).await
}

#[tokio::test]
async fn s12_messages_to_alternating_engines_each_know_all_that_came_before() -> anyhow::Result<()> {
    each_request_holds_what_came_before(&[Agent::new("builder"), Agent::codex("critic")]).await
}

#[tokio::test]
async fn s12_messages_to_alternating_engines_that_begin_with_codex() -> anyhow::Result<()> {
    each_request_holds_what_came_before(&[Agent::codex("critic"), Agent::new("builder")]).await
}

#[tokio::test]
async fn s10_two_conversations_in_one_workspace_share_no_session_and_take_turns() -> anyhow::Result<()> {
    let stack = Stack::start().await?;
    let (one, two) = (stack.conversation().await?, stack.conversation().await?);
    let first = stack.control.begin(&one, "[[text:a ]][[gate:slot]][[text:done]] secret-of-one").await?;
    stack.model.wait_gate("slot", NORMAL).await?;
    let second = stack.control.begin(&two, "[[text:b]] of the other").await?;
    let waiting = stack
        .control
        .wait_status(&second, roundhouse_proto::control::v1::TurnStatus::Dispatching, NORMAL)
        .await?;
    assert_eq!(stack.model.count_for("of the other"), 0, "one turn at a time in a workspace: {waiting:?}");
    stack.model.release_gate("slot");
    let first = stack.control.wait_end(&first, NORMAL).await?.turn.context("a turn")?;
    let second = stack.control.wait_end(&second, NORMAL).await?.turn.context("a turn")?;
    assert_ne!(first.session_id, second.session_id);
    let request = stack.model.requests_for("of the other").pop().context("a request")?.conversation();
    assert_eq!(request.occurrences("secret-of-one"), 0);
    Ok(())
}
