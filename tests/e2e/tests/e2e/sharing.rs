//! One conversation on two real engines: what each is told of what the other did, by the model's own log.

use anyhow::{Context as _, ensure};
use roundhouse_models::{Conversation, Matcher, Script};
use roundhouse_proto::{
    control::v1::{
        GetTurnResponse, MarkSessionUnusableRequest, PromptChange, PutSummaryRequest, Role,
        SendMessageRequest, Session, TurnStatus, session::State,
        summary_service_client::SummaryServiceClient,
    },
    engine::v1::Origin,
};
use roundhouse_test_support::{Agent, NORMAL, Stack, StackOptions, Workspace};

use crate::{answer_of, turn_of};

/// Characters that a new session is told at most, unless configured otherwise.
const BUDGET: usize = 120_000;

/// An agent on Claude Code.
fn builder() -> Agent {
    Agent::new("builder").prompt("PROMPT-OF-BUILDER")
}

/// An agent on Codex.
fn critic() -> Agent {
    Agent::codex("critic").prompt("PROMPT-OF-CRITIC")
}

/// A stack with an agent on each engine.
async fn two_engines() -> anyhow::Result<Stack> {
    Stack::start_with(StackOptions::default().agents(&[builder(), critic()])).await
}

/// Sends a message to an agent, in a workspace other than the conversation's if one is named, and waits for its end.
pub(crate) async fn ask(
    stack: &Stack,
    conversation: &str,
    text: &str,
    agent: &str,
    workspace: &str,
) -> anyhow::Result<GetTurnResponse> {
    let request = SendMessageRequest {
        conversation_id: conversation.to_owned(),
        text: text.to_owned(),
        agent: agent.to_owned(),
        workspace: workspace.to_owned(),
        ..SendMessageRequest::default()
    };
    let sent = stack.control.conversations().send_message(request).await?.into_inner();
    stack.control.wait_end(&sent.turn.context("a turn")?.turn_id, NORMAL).await
}

fn question(n: usize) -> String {
    format!("question-{n:02}-of-a-person")
}

fn answer(n: usize) -> String {
    format!("answer-{n:02}-of-the-model")
}

/// Asks question `n` and wants its answer.
async fn round(stack: &Stack, conversation: &str, n: usize, agent: &str) -> anyhow::Result<GetTurnResponse> {
    stack.model.rule(Matcher::Contains(question(n)), Script::text(answer(n)));
    let got = ask(stack, conversation, &question(n), agent, "").await?;
    ensure!(turn_of(&got).status() == TurnStatus::Completed, "question {n}: {:?}", turn_of(&got));
    assert_eq!(answer_of(&got), answer(n), "question {n}");
    Ok(got)
}

/// The first request that the model got for a question: there must be one only.
fn request_of(stack: &Stack, n: usize) -> anyhow::Result<Conversation> {
    let mut requests = stack.model.requests_for(&question(n));
    ensure!(requests.len() == 1, "question {n} was asked {} times", requests.len());
    Ok(requests.remove(0).conversation())
}

/// How often a request holds question and answer of these rounds: as often as said, each.
fn assert_holds(request: &Conversation, rounds: impl IntoIterator<Item = usize>, times: usize) {
    for n in rounds {
        for wanted in [question(n), answer(n)] {
            assert_eq!(request.occurrences(&wanted), times, "{wanted} in {:#?}", request.texts());
        }
    }
}

/// Whether the engine has this round as its own: a user's message and an answer of the model, and nothing around them.
fn is_native(request: &Conversation, n: usize) -> bool {
    let dialogue = request.dialogue();
    let has = |role: &str, text: String| dialogue.iter().any(|(r, t)| r == role && *t == text);
    has("user", question(n)) && has("assistant", answer(n))
}

/// The record that a request gives as context, if any.
fn record(request: &Conversation) -> Option<String> {
    request
        .texts()
        .into_iter()
        .find(|(_, text)| text.contains("] Earlier conversation: a record, not a request"))
        .map(|(_, text)| text)
}

async fn session_of(stack: &Stack, conversation: &str, got: &GetTurnResponse) -> anyhow::Result<Session> {
    let all = stack.control.list_sessions(conversation).await?;
    let id = &turn_of(got).session_id;
    all.into_iter().find(|session| session.session_id == *id).context("the turn's session is listed")
}

/// Turn 1 on the one engine, turn 2 on the other, turns 3 and 4 on the first again.
async fn there_and_back(first: &Agent, second: &Agent) -> anyhow::Result<()> {
    let stack = two_engines().await?;
    let conversation = stack.conversation_with(&first.name).await?;
    let one = round(&stack, &conversation, 1, &first.name).await?;
    let native = session_of(&stack, &conversation, &one).await?.native_ref.context("its native id")?;
    let two = round(&stack, &conversation, 2, &second.name).await?;
    let three = round(&stack, &conversation, 3, &first.name).await?;
    let four = round(&stack, &conversation, 4, &first.name).await?;

    assert_eq!((turn_of(&one).origin(), turn_of(&one).history_given), (Origin::Started, false));
    assert_eq!((turn_of(&two).origin(), turn_of(&two).history_given), (Origin::Started, true));
    assert_eq!((turn_of(&three).origin(), turn_of(&three).history_given), (Origin::Resumed, true));
    assert_eq!((turn_of(&four).origin(), turn_of(&four).history_given), (Origin::Resumed, false));
    for turn in [&one, &two, &three, &four] {
        assert!(!turn_of(turn).summary_given);
    }
    assert_eq!(turn_of(&two).engine, second.engine);

    // The second engine: its prompt, and the first turn as context.
    let request = request_of(&stack, 2)?;
    assert_eq!(request.occurrences(&second.prompt), 1, "{:#?}", request.texts());
    assert_eq!(request.occurrences(&first.prompt), 0, "another agent's prompt is nobody else's business");
    assert_holds(&request, [1], 1);
    assert!(!is_native(&request, 1));
    let told = record(&request).context("a record")?;
    assert!(told.contains(&question(1)) && told.contains(&answer(1)), "{told}");

    // The first engine again: the same native session, turn 1 as its own, turn 2 once and as context.
    let session = session_of(&stack, &conversation, &three).await?;
    assert_eq!(turn_of(&three).session_id, turn_of(&one).session_id);
    assert_eq!(session.native_ref.map(|native| native.id), Some(native.id));
    let request = request_of(&stack, 3)?;
    assert_holds(&request, [1, 2], 1);
    assert!(is_native(&request, 1) && !is_native(&request, 2), "{:#?}", request.dialogue());
    let told = record(&request).context("a record")?;
    assert!(told.contains(&question(2)) && !told.contains(&question(1)), "{told}");

    // What it was told it knows: nothing is told twice.
    let request = request_of(&stack, 4)?;
    assert_holds(&request, [1, 2, 3], 1);
    assert!(is_native(&request, 3));

    // The conversation holds what was said, and no seed.
    let messages = stack.control.messages(&conversation).await?;
    let said: Vec<String> = messages.into_iter().map(|message| message.text).collect();
    let wanted: Vec<String> = (1..=4).flat_map(|n| [question(n), answer(n)]).collect();
    assert_eq!(said, wanted);
    let sessions = stack.control.list_sessions(&conversation).await?;
    assert_eq!(sessions.len(), 2);
    assert!(sessions.iter().all(|session| session.state() == State::Active));
    Ok(())
}

#[tokio::test]
async fn s12_from_claude_code_to_codex_and_back() -> anyhow::Result<()> {
    there_and_back(&builder(), &critic()).await
}

#[tokio::test]
async fn s12_from_codex_to_claude_code_and_back() -> anyhow::Result<()> {
    there_and_back(&critic(), &builder()).await
}

/// A summary stands for what it covers, on either engine.
async fn a_summary_is_told(first: &str, second: &str) -> anyhow::Result<()> {
    let stack = two_engines().await?;
    let conversation = stack.conversation_with(first).await?;
    round(&stack, &conversation, 1, first).await?;
    round(&stack, &conversation, 2, first).await?;
    let request = PutSummaryRequest {
        conversation_id: conversation.clone(),
        through: 2,
        text: "THE-SUMMARY-OF-THE-FIRST-ROUND".to_owned(),
        ..PutSummaryRequest::default()
    };
    SummaryServiceClient::new(stack.control.channel()).put_summary(request).await?;
    let three = round(&stack, &conversation, 3, second).await?;
    assert!(turn_of(&three).summary_given && turn_of(&three).history_given, "{:?}", turn_of(&three));
    let request = request_of(&stack, 3)?;
    assert_eq!(request.occurrences("THE-SUMMARY-OF-THE-FIRST-ROUND"), 1);
    assert_holds(&request, [1], 0);
    assert_holds(&request, [2], 1);
    // Whoever was there needs none.
    let four = round(&stack, &conversation, 4, first).await?;
    assert!(!turn_of(&four).summary_given);
    let request = request_of(&stack, 4)?;
    assert_eq!(request.occurrences("THE-SUMMARY-OF-THE-FIRST-ROUND"), 0);
    assert_holds(&request, [1, 2, 3], 1);
    Ok(())
}

#[tokio::test]
async fn s63_codex_is_told_the_summary_and_what_came_after_it() -> anyhow::Result<()> {
    a_summary_is_told("builder", "critic").await
}

#[tokio::test]
async fn s63_claude_code_is_told_the_summary_and_what_came_after_it() -> anyhow::Result<()> {
    a_summary_is_told("critic", "builder").await
}

#[tokio::test]
async fn s10_no_other_conversation_sees_any_of_it() -> anyhow::Result<()> {
    let stack = two_engines().await?;
    let elsewhere = Workspace::create(&stack.root().join("work/elsewhere"), &[builder(), critic()])?;
    let elsewhere = elsewhere.path().display().to_string();
    let conversation = stack.conversation_with("builder").await?;
    round(&stack, &conversation, 1, "builder").await?;
    round(&stack, &conversation, 2, "critic").await?;
    let (beside, third) = (stack.conversation().await?, stack.conversation().await?);
    for (n, agent) in [(3, "builder"), (4, "critic")] {
        round(&stack, &beside, n, agent).await?;
    }
    for (n, agent) in [(5, "builder"), (6, "critic")] {
        stack.model.rule(Matcher::Contains(question(n)), Script::text(answer(n)));
        let got = ask(&stack, &third, &question(n), agent, &elsewhere).await?;
        assert_eq!(answer_of(&got), answer(n));
        assert_eq!(turn_of(&got).origin(), Origin::Started);
    }
    for n in 3..=6 {
        assert_holds(&request_of(&stack, n)?, [1, 2], 0);
    }
    // Nor does the first one see any of theirs.
    round(&stack, &conversation, 7, "builder").await?;
    assert_holds(&request_of(&stack, 7)?, 3..=6, 0);
    let mut ids = std::collections::BTreeSet::new();
    for conversation in [&conversation, &beside, &third] {
        for session in stack.control.list_sessions(conversation).await? {
            ids.insert(session.native_ref.context("a native id")?.id);
        }
    }
    assert_eq!(ids.len(), 6, "every conversation has a native session of its own on each engine");
    Ok(())
}

/// What an agent file's change does to the session of its engine.
async fn changes_of_an_agent(agent: Agent, other_engine: Agent) -> anyhow::Result<()> {
    let stack = Stack::start_with(StackOptions::default().agents(std::slice::from_ref(&agent))).await?;
    let name = agent.name.as_str();
    let conversation = stack.conversation_with(name).await?;
    let one = round(&stack, &conversation, 1, name).await?;
    let session = turn_of(&one).session_id.clone();

    // A model that it can go on with, and another effort.
    let model = if agent.engine == "codex" { "gpt-scripted-too" } else { "haiku" };
    let changed = Agent { model: model.to_owned(), effort: Some("high".to_owned()), ..agent.clone() };
    stack.workspace.write_agent(&changed)?;
    let two = round(&stack, &conversation, 2, name).await?;
    assert_eq!((turn_of(&two).origin(), &turn_of(&two).session_id), (Origin::Resumed, &session));
    assert_eq!(
        (turn_of(&two).model.as_str(), turn_of(&two).prompt_change()),
        (model, PromptChange::Unspecified)
    );
    let request = request_of(&stack, 2)?;
    assert!(request.model().contains(model), "{}", request.model());
    assert!(is_native(&request, 1) && record(&request).is_none());
    assert_ne!(request_of(&stack, 1)?.model(), request.model());

    // An edited prompt.
    stack.workspace.write_agent(&Agent { prompt: "PROMPT-AS-EDITED".to_owned(), ..changed.clone() })?;
    let three = round(&stack, &conversation, 3, name).await?;
    assert_eq!((turn_of(&three).origin(), &turn_of(&three).session_id), (Origin::Resumed, &session));
    assert_eq!(turn_of(&three).prompt_change(), PromptChange::Applied);
    assert_eq!(request_of(&stack, 3)?.occurrences("PROMPT-AS-EDITED"), 1);

    // Another engine under the same name: a new session; the old one stays.
    stack.workspace.write_agent(&Agent { name: name.to_owned(), ..other_engine })?;
    let four = round(&stack, &conversation, 4, name).await?;
    assert_eq!(turn_of(&four).origin(), Origin::Started);
    assert_ne!(turn_of(&four).session_id, session);
    assert_holds(&request_of(&stack, 4)?, [1, 2, 3], 1);
    let all = stack.control.list_sessions(&conversation).await?;
    assert_eq!(all.len(), 2);
    assert!(all.iter().all(|one| one.state() == State::Active), "{all:?}");

    // And is resumed when its engine is back.
    stack.workspace.write_agent(&changed)?;
    let five = round(&stack, &conversation, 5, name).await?;
    assert_eq!((turn_of(&five).origin(), &turn_of(&five).session_id), (Origin::Resumed, &session));
    let request = request_of(&stack, 5)?;
    assert_holds(&request, [1, 2, 3, 4], 1);
    assert!(is_native(&request, 3) && !is_native(&request, 4));
    Ok(())
}

#[tokio::test]
async fn s11_model_effort_prompt_and_engine_of_an_agent_on_claude_code_change() -> anyhow::Result<()> {
    changes_of_an_agent(builder(), Agent::codex("builder")).await
}

#[tokio::test]
async fn s11_model_effort_prompt_and_engine_of_an_agent_on_codex_change() -> anyhow::Result<()> {
    changes_of_an_agent(critic(), Agent::new("critic")).await
}

/// A turn that fails on the one engine after it was told something, its retry, and what the other one makes of it.
async fn a_failed_turn_is_retried(failing: &str, other: &str) -> anyhow::Result<()> {
    let stack = two_engines().await?;
    let conversation = stack.conversation_with(other).await?;
    round(&stack, &conversation, 1, other).await?;
    stack.model.rule(Matcher::Contains(question(2)), Script::parse("[[error 500:down]]")?);
    let failed = ask(&stack, &conversation, &question(2), failing, "").await?;
    assert_eq!(turn_of(&failed).status(), TurnStatus::Failed, "{:?}", turn_of(&failed));
    assert!(turn_of(&failed).failure.as_ref().is_some_and(|failure| failure.retryable));

    stack.model.clear_rules();
    stack.model.rule(Matcher::Contains(question(2)), Script::text(answer(2)));
    let before = stack.model.count_for(&question(2));
    let retry = stack.control.retry(&turn_of(&failed).turn_id).await?;
    let retried = stack.control.wait_end(&retry, NORMAL).await?;
    assert_eq!(
        (turn_of(&retried).status(), answer_of(&retried)),
        (TurnStatus::Completed, answer(2).as_str())
    );
    assert_eq!(turn_of(&retried).retry_of, turn_of(&failed).turn_id);
    let requests = stack.model.requests_for(&question(2));
    assert_eq!(requests.len() - before, 1, "answered once");
    let request = requests.last().context("the retry's request")?.conversation();
    assert_eq!(request.occurrences(&answer(1)), 1, "told once, in whichever try: {:#?}", request.texts());

    // Both go on, and each question and answer is known once.
    round(&stack, &conversation, 3, other).await?;
    let request = request_of(&stack, 3)?;
    assert_holds(&request, [1, 2], 1);
    round(&stack, &conversation, 4, failing).await?;
    assert_eq!(request_of(&stack, 4)?.occurrences(&answer(3)), 1);
    let messages = stack.control.messages(&conversation).await?;
    let users = messages.iter().filter(|message| message.role() == Role::User && message.text == question(2));
    assert_eq!(users.count(), 1, "one user message in the shared history");
    Ok(())
}

#[tokio::test]
async fn s64_a_turn_that_failed_on_codex_is_retried() -> anyhow::Result<()> {
    a_failed_turn_is_retried("critic", "builder").await
}

#[tokio::test]
async fn s64_a_turn_that_failed_on_claude_code_is_retried() -> anyhow::Result<()> {
    a_failed_turn_is_retried("builder", "critic").await
}

/// Ten rounds of 20,000 characters on the one engine; the other one gets the opening and the newest, and is told what
/// was left out.
async fn a_long_history_is_told_within_its_budget(first: &str, second: &str) -> anyhow::Result<()> {
    const ROUNDS: usize = 10;
    let stack = two_engines().await?;
    let conversation = stack.conversation_with(first).await?;
    let body = "ä".repeat(20_000);
    for n in 1..=ROUNDS {
        stack.model.rule(Matcher::Contains(question(n)), Script::text(answer(n)));
        let text = format!("{} {body} {}", question(n), question(n));
        let got = ask(&stack, &conversation, &text, first, "").await?;
        assert_eq!((turn_of(&got).status(), answer_of(&got)), (TurnStatus::Completed, answer(n).as_str()));
    }
    let n = ROUNDS + 1;
    let got = round(&stack, &conversation, n, second).await?;
    assert!(turn_of(&got).history_given);
    let request = request_of(&stack, n)?;
    let told = record(&request).context("a record")?;
    let length = told.chars().count();
    assert!((BUDGET - 25_000..=BUDGET).contains(&length), "{length}");
    assert!(!told.contains(&question(n)), "the turn's own message is beside it");
    assert_eq!(request.occurrences(&question(n)), 1);
    // Whole messages: the first, and the newest four; each with its beginning and its end.
    for round in 1..=ROUNDS {
        let whole = [1, 7, 8, 9, 10].contains(&round);
        assert_eq!(told.matches(&question(round)).count(), if whole { 2 } else { 0 }, "round {round}");
    }
    let marker = told
        .lines()
        .find(|line| line.contains(" left out here for want of room: "))
        .context("a marker says what was left out")?;
    // Positions 1 and 2 are the first round, 13 and later the last four; the answer before them has room as well.
    assert!(marker.ends_with("9 messages left out here for want of room: messages 3 to 11"), "{marker}");
    Ok(())
}

#[tokio::test]
async fn a_history_of_200_000_characters_is_told_to_codex_within_its_budget() -> anyhow::Result<()> {
    a_long_history_is_told_within_its_budget("builder", "critic").await
}

#[tokio::test]
async fn a_history_of_200_000_characters_is_told_to_claude_code_within_its_budget() -> anyhow::Result<()> {
    a_long_history_is_told_within_its_budget("critic", "builder").await
}

#[tokio::test]
async fn s16_a_session_that_a_person_marked_is_not_continued_on_either_engine() -> anyhow::Result<()> {
    let stack = two_engines().await?;
    for (agent, from) in [("builder", 1), ("critic", 3)] {
        let conversation = stack.conversation_with(agent).await?;
        let one = round(&stack, &conversation, from, agent).await?;
        let marked = MarkSessionUnusableRequest {
            session_id: turn_of(&one).session_id.clone(),
            reason: "it dreams".to_owned(),
            ..MarkSessionUnusableRequest::default()
        };
        stack.control.sessions().mark_session_unusable(marked).await?;
        let two = round(&stack, &conversation, from + 1, agent).await?;
        assert_eq!((turn_of(&two).origin(), turn_of(&two).history_given), (Origin::Replaced, true));
        let request = request_of(&stack, from + 1)?;
        assert_holds(&request, [from], 1);
        assert!(!is_native(&request, from));
        let all = stack.control.list_sessions(&conversation).await?;
        let old = all.iter().find(|session| session.session_id == turn_of(&one).session_id);
        assert!(old.is_some_and(|old| old.state() == State::Unusable && old.unusable_reason == "it dreams"));
    }
    Ok(())
}
