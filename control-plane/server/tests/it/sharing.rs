//! One conversation across agents, engines and runners: which session a turn gets, and what that is told.

use pretty_assertions::assert_eq;
use roundhouse_proto::control::v1 as control;
use roundhouse_proto::control::v1::session::State;
use roundhouse_proto::control::v1::{PromptChange, TurnStatus};
use roundhouse_proto::engine::v1::event_body::Kind;
use roundhouse_proto::engine::v1::{self as engine, Origin};

use crate::sessions::sessions;
use crate::support::runner::{Opening, Reply, Runner, agent, engine as an_engine, failed, text};
use crate::support::{World, kinds};

/// What the session of the `n`th opening was told beside its message.
fn told(world: &World, n: usize) -> String {
    world.runner.opens()[n].context.clone()
}

fn count(text: &str, part: &str) -> usize {
    text.matches(part).count()
}

/// Two agents on two engines.
async fn two_engines() -> World {
    let world = World::new().await;
    world.runner.state().agents.insert("critic".into(), agent("critic", "second", "m-9", "Criticise."));
    world
}

async fn run(world: &mut World, conversation: &str, text: &str, agent: &str) -> control::Turn {
    let turn = world.send_as(conversation, text, agent, "/w/a").await;
    let (turn, _) = world.finish(&turn).await;
    assert_eq!(turn.status(), TurnStatus::Completed, "{turn:#?}");
    turn
}

#[tokio::test]
async fn s10_switching_back_resumes_the_earlier_session_and_tells_it_what_it_missed() {
    let mut world = two_engines().await;
    let conversation = world.conversation().await;
    let first = run(&mut world, &conversation, "question-1", "builder").await;
    let second = run(&mut world, &conversation, "question-2", "critic").await;
    let third = run(&mut world, &conversation, "question-3", "builder").await;
    let fourth = run(&mut world, &conversation, "question-4", "critic").await;
    assert_eq!(
        [first.origin(), second.origin(), third.origin(), fourth.origin()],
        [Origin::Started, Origin::Started, Origin::Resumed, Origin::Resumed]
    );
    assert_eq!((&third.session_id, &fourth.session_id), (&first.session_id, &second.session_id));
    assert_eq!((first.history_given, second.history_given, third.history_given), (false, true, true));
    // The second engine is told the first turn; the first one, back again, the second turn alone, and so on.
    for (n, knows, others) in
        [(1, [1].as_slice(), [2, 3, 4].as_slice()), (2, &[2], &[1, 3, 4]), (3, &[3], &[1, 2, 4])]
    {
        let told = told(&world, n);
        for part in knows {
            assert_eq!(count(&told, &format!("\nquestion-{part}\n")), 1, "{told}");
            assert_eq!(count(&told, &format!("echo: question-{part}\n")), 1, "{told}");
        }
        for part in others {
            assert!(!told.contains(&format!("question-{part}")), "{told}");
        }
    }
    let messages = world.messages(&conversation).await;
    assert_eq!(messages.len(), 8, "no seed is a message");
    assert!(messages.iter().all(|message| !message.text.contains("Earlier conversation")));
    let all = sessions(&world, &conversation).await;
    assert_eq!(
        all.iter().map(|s| (s.engine.as_str(), s.state())).collect::<Vec<_>>(),
        [("fake", State::Active), ("second", State::Active)]
    );
    assert_eq!(all.iter().map(|s| s.watermark).collect::<Vec<_>>(), [6, 8]);
}

#[tokio::test]
async fn s12_queued_messages_to_alternating_engines_know_all_that_came_before() {
    let mut world = two_engines().await;
    let conversation = world.conversation().await;
    world.runner.state().reply = Reply::Hold;
    let held = world.send_as(&conversation, "question-0", "builder", "/w/a").await;
    world.runner.sent(&held.turn_id).await;
    let mut turns = Vec::new();
    for (n, agent) in ["critic", "builder", "critic"].into_iter().enumerate() {
        turns.push(world.send_as(&conversation, &format!("question-{}", n + 1), agent, "/w/a").await);
    }
    world.runner.state().reply = Reply::Echo;
    world.runner.emit(&held.turn_id, text("t", "echo: question-0"));
    world.runner.complete(&held.turn_id, "echo: question-0");
    for turn in &turns {
        assert_eq!(world.finish(turn).await.0.status(), TurnStatus::Completed);
    }
    // By the order of arrival the answer to question 0 would come after questions 1 to 3.
    for (n, positions) in [(1, "1 2"), (2, "3 4"), (3, "5 6")] {
        let told = told(&world, n);
        let headings: Vec<&str> = told
            .lines()
            .filter_map(|line| line.split_once("] Message ").and_then(|(_, rest)| rest.split(' ').next()))
            .collect();
        assert_eq!(headings.join(" "), positions, "{told}");
    }
}

#[tokio::test]
async fn s10_nobody_else_sees_a_conversation() {
    let mut world = two_engines().await;
    let conversation = world.conversation().await;
    run(&mut world, &conversation, "a secret", "builder").await;
    let (beside, elsewhere) = (world.conversation().await, world.conversation().await);
    let beside = run(&mut world, &beside, "hello", "builder").await;
    let turn = world.send_as(&elsewhere, "hello", "builder", "/w/b").await;
    let (elsewhere, _) = world.finish(&turn).await;
    assert_eq!((beside.origin(), elsewhere.origin()), (Origin::Started, Origin::Started));
    let opens = world.runner.opens();
    assert!(opens[1].context.is_empty() && opens[2].context.is_empty());
    assert!(opens[1].native_ref.is_none() && opens[2].native_ref.is_none());
    let ids: std::collections::BTreeSet<_> = opens.iter().map(|open| &open.session_id).collect();
    assert_eq!(ids.len(), 3);
}

#[tokio::test]
async fn s10_another_workspace_is_another_session_that_is_told_everything() {
    let mut world = two_engines().await;
    let conversation = world.conversation().await;
    let first = run(&mut world, &conversation, "question-1", "builder").await;
    let turn = world.send_as(&conversation, "question-2", "builder", "/w/b").await;
    let (second, _) = world.finish(&turn).await;
    assert_eq!((second.origin(), second.history_given), (Origin::Started, true));
    assert!(told(&world, 1).contains("question-1"));
    let third = run(&mut world, &conversation, "question-3", "builder").await;
    assert_eq!((third.origin(), &third.session_id), (Origin::Resumed, &first.session_id));
    assert!(told(&world, 2).contains("question-2") && !told(&world, 2).contains("question-1"));
}

#[tokio::test]
async fn s10_a_listed_model_is_continued_with_and_any_other_makes_a_new_session() {
    let mut world = World::new().await;
    world.runner.state().engines =
        vec![an_engine("fake", |can| can.continuable_models = vec!["m-1".into(), "m-2".into()])];
    let with = |world: &World, model: &str, options: &str| {
        let file = agent("builder", "fake", model, "Build.")
            .replace("\n---\nBuild", &format!("{options}\n---\nBuild"));
        world.runner.state().agents.insert("builder".into(), file);
    };
    let conversation = world.conversation().await;
    let first = run(&mut world, &conversation, "one", "builder").await;
    with(&world, "m-2", "");
    let listed = run(&mut world, &conversation, "two", "builder").await;
    assert_eq!((listed.origin(), &listed.session_id), (Origin::Resumed, &first.session_id));
    assert_eq!(world.runner.opens()[1].model, "m-2");
    with(&world, "m-2", "\noptions:\n  reasoning_effort: high");
    let harder = run(&mut world, &conversation, "three", "builder").await;
    assert_eq!((harder.origin(), &harder.session_id), (Origin::Resumed, &first.session_id));
    assert_eq!(world.runner.opens()[2].effort.as_deref(), Some("high"));
    with(&world, "m-3", "");
    let unlisted = run(&mut world, &conversation, "four", "builder").await;
    assert_eq!(unlisted.origin(), Origin::Started);
    assert_ne!(unlisted.session_id, first.session_id);
    assert!(told(&world, 3).contains("one") && told(&world, 3).contains("echo: three"));
    // The old one is listed, and resumed when its model is asked for again.
    assert!(sessions(&world, &conversation).await.iter().all(|s| s.state() == State::Active));
    with(&world, "m-2", "");
    let back = run(&mut world, &conversation, "five", "builder").await;
    assert_eq!((back.origin(), &back.session_id), (Origin::Resumed, &first.session_id));
    assert!(told(&world, 4).contains("echo: four") && !told(&world, 4).contains("echo: three"));
}

#[tokio::test]
async fn s11_an_engine_that_cannot_take_a_changed_prompt_gets_a_new_session_and_the_turn_says_so() {
    let mut world = World::new().await;
    world.runner.state().engines =
        vec![an_engine("fake", |can| can.prompt_change_on_resume = engine::Support::Unsupported.into())];
    let conversation = world.conversation().await;
    let first = run(&mut world, &conversation, "one", "builder").await;
    world.runner.state().agents.insert("builder".into(), agent("builder", "fake", "m-1", "Build better."));
    let second = run(&mut world, &conversation, "two", "builder").await;
    assert_eq!((second.origin(), second.prompt_change()), (Origin::Started, PromptChange::NewSession));
    assert_ne!(second.session_id, first.session_id);
    assert!(told(&world, 1).contains("echo: one") && second.history_given);
    let third = run(&mut world, &conversation, "three", "builder").await;
    assert_eq!((third.origin(), third.prompt_change()), (Origin::Resumed, PromptChange::Unspecified));
    assert_eq!(third.session_id, second.session_id);
}

#[tokio::test]
async fn s61_turn_session_and_event_say_the_same_of_a_seeded_session() {
    let mut world = two_engines().await;
    let conversation = world.conversation().await;
    run(&mut world, &conversation, "one", "builder").await;
    let turn = world.send_as(&conversation, "two", "critic", "/w/a").await;
    let (turn, events) = world.finish(&turn).await;
    let opened = kinds(&events)
        .into_iter()
        .find_map(|kind| match kind {
            Kind::Session(s) if s.state() == engine::session_event::State::Opened => Some(s),
            _ => None,
        })
        .unwrap();
    assert_eq!((opened.origin(), opened.history_given, opened.summary_given), (Origin::Started, true, false));
    assert_eq!((turn.origin(), turn.history_given, turn.summary_given), (Origin::Started, true, false));
    assert_eq!(sessions(&world, &conversation).await[1].origin(), Origin::Started);
}

#[tokio::test]
async fn a_fresh_session_for_a_retry_is_told_all_but_the_retried_message() {
    let mut world = two_engines().await;
    let conversation = world.conversation().await;
    run(&mut world, &conversation, "earlier", "critic").await;
    world.runner.state().reply = Reply::Hold;
    let first = world.send_as(&conversation, "question", "builder", "/w/a").await;
    world.runner.sent(&first.turn_id).await;
    world.runner.emit(&first.turn_id, text("t", "half an answer"));
    world.runner.emit(&first.turn_id, failed("500"));
    world.finish(&first).await;
    {
        let mut state = world.runner.state();
        state.reply = Reply::Echo;
        state.openings.push_back(Opening::Unusable("its file is gone"));
    }
    let second = world.retry(&first.turn_id).await.unwrap();
    let (second, _) = world.finish(&second).await;
    assert_eq!((second.status(), second.origin()), (TurnStatus::Completed, Origin::Replaced));
    let told = world.runner.opens().last().unwrap().context.clone();
    assert!(told.contains("earlier") && told.contains("echo: earlier"), "{told}");
    assert!(told.contains("(interrupted: it ended before it was finished)\nhalf an answer"), "{told}");
    assert!(!told.contains("question"), "the message itself comes after the record: {told}");
    // The other engine is given all of it, the interrupted text marked, in the order of the history.
    run(&mut world, &conversation, "and you?", "critic").await;
    let told = world.runner.opens().last().unwrap().context.clone();
    let at = |part: &str| told.find(part).unwrap_or_else(|| panic!("{part} is missing: {told}"));
    assert!(at("\nquestion\n") < at("(interrupted") && at("half an answer") < at("echo: question"));
    assert!(!told.contains("earlier"));
}

#[tokio::test]
async fn a_promoted_successor_closes_the_window_for_a_retry() {
    let mut world = two_engines().await;
    let conversation = world.conversation().await;
    world.runner.state().reply = Reply::Hold;
    let first = world.send_as(&conversation, "one", "builder", "/w/a").await;
    world.runner.sent(&first.turn_id).await;
    let status = world.retry(&first.turn_id).await.unwrap_err();
    assert_eq!(crate::support::reason(&status), "TURN_IN_PROGRESS");
    let next = world.send_as(&conversation, "two", "builder", "/w/a").await;
    world.runner.emit(&first.turn_id, failed("500"));
    world.finish(&first).await;
    world.runner.sent(&next.turn_id).await;
    let status = world.retry(&first.turn_id).await.unwrap_err();
    assert_eq!(crate::support::reason(&status), "WRONG_STATE");
    assert!(status.message().contains("send"), "it says what to do instead: {}", status.message());
    world.runner.complete(&next.turn_id, "done");
    assert_eq!(world.finish(&next).await.0.status(), TurnStatus::Completed);
}

#[tokio::test]
async fn a_conversation_moves_to_a_workspace_on_another_runner_and_is_seeded_there() {
    let mut world = two_engines().await;
    let other = Runner::start().await;
    other.register(world.address()).await.unwrap();
    let conversation = world.conversation().await;
    let here = format!("{}:/w/a", world.runner.id);
    let there = format!("{}:/w/a", other.id);
    let first = world.send_as(&conversation, "question-1", "builder", &here).await;
    let (first, _) = world.finish(&first).await;
    let second = world.send_as(&conversation, "question-2", "builder", &there).await;
    let (second, _) = world.finish(&second).await;
    assert_eq!((second.status(), second.origin()), (TurnStatus::Completed, Origin::Started));
    assert_ne!(second.workspace_id, first.workspace_id, "the same path on two runners is two workspaces");
    assert!(other.opens()[0].context.contains("echo: question-1"));
    // Without a word on where, the conversation stays there.
    let third = world.send_as(&conversation, "question-3", "", "").await;
    let (third, _) = world.finish(&third).await;
    assert_eq!((third.origin(), &third.session_id), (Origin::Resumed, &second.session_id));
    let back = world.send_as(&conversation, "question-4", "builder", &here).await;
    let (back, _) = world.finish(&back).await;
    assert_eq!((back.origin(), &back.session_id), (Origin::Resumed, &first.session_id));
    let told = told(&world, 1);
    assert!(told.contains("echo: question-2") && told.contains("echo: question-3"), "{told}");
    assert!(!told.contains("question-1"), "{told}");
}

#[tokio::test]
async fn a_parent_or_child_of_a_held_directory_waits_whichever_conversation_it_belongs_to() {
    let mut world = two_engines().await;
    world.runner.state().reply = Reply::Hold;
    let mut conversations = Vec::new();
    for _ in 0..4 {
        conversations.push(world.conversation().await);
    }
    let held = world.send_as(&conversations[0], "one", "builder", "/w/a").await;
    world.runner.sent(&held.turn_id).await;
    let child = world.send_as(&conversations[1], "two", "builder", "/w/a/sub").await;
    let beside = world.send_as(&conversations[2], "three", "builder", "/w/ab").await;
    world.runner.sent(&beside.turn_id).await;
    // The parent of both waits for both; the child comes first, by the order of promotion.
    let parent = world.send_as(&conversations[3], "four", "critic", "/w").await;
    assert_eq!(world.runner.opens().len(), 2);
    world.runner.complete(&held.turn_id, "done");
    world.runner.sent(&child.turn_id).await;
    world.runner.complete(&beside.turn_id, "done");
    world.finish(&beside).await;
    assert_eq!(world.turn(&parent.turn_id).await.turn.unwrap().status(), TurnStatus::Dispatching);
    assert_eq!(world.runner.opens().len(), 3, "the parent still waits for the child");
    world.runner.complete(&child.turn_id, "done");
    world.runner.sent(&parent.turn_id).await;
    world.runner.complete(&parent.turn_id, "done");
    assert_eq!(world.finish(&parent).await.0.status(), TurnStatus::Completed);
}
