//! Threads of the real Codex: what they are told, what ends their turns, and how they are found again.

use std::{fs, path::Path};

use anyhow::Context as _;
use roundhouse_proto::{
    control::v1::PromptChange,
    engine::v1::{FailureReason, Origin, Outcome, event_body::Kind, notice_event},
};
use roundhouse_test_support::{Agent, BRIEF, LONG, NORMAL, Stack};
use serde_json::Value;

use crate::{
    answer_of,
    codex::{codex, codex_in},
    codex_damage::rollouts,
    damage::close,
    expect_outcome, turn_of,
};

async fn prompt_changes(close_between: bool) -> anyhow::Result<()> {
    let stack = Stack::start_with(codex()).await?;
    let agent = Agent::codex("builder");
    stack.workspace.write_agent(&agent.clone().prompt("PROMPT-AS-IT-WAS"))?;
    let conversation = stack.conversation().await?;
    let first = stack.control.run_answered(&conversation, "[[text:a]] question-one", "a", NORMAL).await?;
    let session = turn_of(&first).session_id.clone();
    if close_between {
        close(&stack, &session).await?;
    }
    stack.workspace.write_agent(&agent.prompt("PROMPT-AS-IT-IS-NOW"))?;
    let second = stack.control.run_answered(&conversation, "[[text:b]] question-two", "b", NORMAL).await?;
    stack.control.run_answered(&conversation, "[[text:c]] question-three", "c", NORMAL).await?;
    assert_eq!((turn_of(&second).origin(), &turn_of(&second).session_id), (Origin::Resumed, &session));
    assert_ne!(turn_of(&second).prompt_change(), PromptChange::Unspecified);
    for (text, times) in [("question-one", 0), ("question-two", 1), ("question-three", 1)] {
        let seen = stack.model.requests_for(text).pop().context("a request")?.conversation();
        assert_eq!(seen.occurrences("PROMPT-AS-IT-IS-NOW"), times, "{text}: {:?}", seen.developer());
    }
    let seen = stack.model.requests_for("question-two").pop().context("a request")?.conversation();
    assert_eq!(seen.occurrences("[[text:a]] question-one"), 1, "{:?}", seen.texts());
    // It stands behind the prompt that it takes the place of.
    let told = seen.developer();
    let place = |word: &str| told.iter().position(|text| text.contains(word));
    assert!(place("PROMPT-AS-IT-WAS") < place("PROMPT-AS-IT-IS-NOW"), "{told:?}");
    Ok(())
}

#[tokio::test]
async fn s11_a_changed_prompt_is_told_to_a_warm_thread() -> anyhow::Result<()> {
    prompt_changes(false).await
}

#[tokio::test]
async fn s11_a_changed_prompt_is_told_to_a_resumed_thread() -> anyhow::Result<()> {
    prompt_changes(true).await
}

#[tokio::test]
async fn s11_model_and_effort_change_within_the_thread() -> anyhow::Result<()> {
    let stack = Stack::start_with(codex()).await?;
    let mut agent = Agent::codex("builder");
    agent.effort = Some("low".to_owned());
    stack.workspace.write_agent(&agent)?;
    let conversation = stack.conversation().await?;
    let first = stack.control.run_answered(&conversation, "[[text:a]] question-one", "a", NORMAL).await?;
    agent.effort = Some("high".to_owned());
    stack.workspace.write_agent(&agent)?;
    let second = stack.control.run_answered(&conversation, "[[text:b]] question-two", "b", NORMAL).await?;
    assert_eq!(turn_of(&first).session_id, turn_of(&second).session_id);
    for (text, effort) in [("question-one", "low"), ("question-two", "high")] {
        let seen = stack.model.requests_for(text).pop().context("a request")?.conversation();
        assert_eq!((seen.effort(), seen.model()), (Some(effort), "gpt-scripted"), "{text}");
    }
    Ok(())
}

#[tokio::test]
async fn a_service_that_is_away_is_not_asked_for_ever() -> anyhow::Result<()> {
    // Nobody listens on the port of this test's own control plane under its next number; the discard port is closed, too.
    let stack =
        Stack::start_with(codex().set("engines.codex.variables.OPENAI_BASE_URL", "http://127.0.0.1:9/v1"))
            .await?;
    let conversation = stack.conversation().await?;
    let got = stack.control.run(&conversation, "is anybody there?", LONG).await?;
    let failure = turn_of(&got).failure.clone().context("a failed turn says why")?;
    assert_eq!((failure.reason(), failure.unavailable), (FailureReason::Process, true), "{failure:?}");
    Ok(())
}

/// The engine's own timeout for streams does not count before the headers: it would wait for ever.
#[tokio::test]
async fn a_model_that_hangs_before_the_headers_is_caught_by_our_own_watchdog() -> anyhow::Result<()> {
    let stack = Stack::start_with(codex().set("runner.idle_timeout", "3s")).await?;
    let conversation = stack.conversation().await?;
    let follower = stack.control.follow(&conversation);
    let turn = stack.control.begin(&conversation, "[[hang]] say nothing").await?;
    let got = expect_outcome(&stack, &follower, &turn, Outcome::Failed).await?;
    let failure = turn_of(&got).failure.clone().context("a failed turn says why")?;
    assert_eq!(failure.reason(), FailureReason::IdleTimeout, "{failure:?}");
    let next = stack.control.run_answered(&conversation, "[[text:back]] again", "back", NORMAL).await?;
    assert_eq!(turn_of(&next).origin(), Origin::Resumed);
    Ok(())
}

#[tokio::test]
async fn s38_a_retried_request_is_a_notice_and_the_turn_a_success() -> anyhow::Result<()> {
    let stack = Stack::start_with(codex()).await?;
    let conversation = stack.conversation().await?;
    let follower = stack.control.follow(&conversation);
    let turn = stack.control.begin(&conversation, "[[cut times=1]][[text:at last]] try").await?;
    let got = expect_outcome(&stack, &follower, &turn, Outcome::Completed).await?;
    assert_eq!(answer_of(&got), "at last");
    let kinds = follower.kinds(&turn);
    let retries = kinds
        .iter()
        .filter(|kind| matches!(kind, Kind::Notice(notice) if notice.kind() == notice_event::Kind::Retry));
    assert!(retries.count() >= 1, "{kinds:?}");
    Ok(())
}

/// Changes what the runner remembers of a session.
fn edit_record(stack: &Stack, session: &str, edit: impl FnOnce(&mut Value)) -> anyhow::Result<()> {
    let file = stack.runner_state().join("sessions").join(session).join("session.json");
    let mut record: Value = serde_json::from_str(&fs::read_to_string(&file)?)?;
    edit(&mut record);
    Ok(fs::write(file, record.to_string())?)
}

/// The engine knows nothing of this thread, although a file with its name is there.
#[tokio::test]
async fn s14_an_unknown_thread_is_replaced_and_never_taken_for_another() -> anyhow::Result<()> {
    let stack = Stack::start_with(codex()).await?;
    let conversation = stack.conversation().await?;
    let first = stack.control.run_answered(&conversation, "[[text:a]] question-one", "a", NORMAL).await?;
    let session = turn_of(&first).session_id.clone();
    close(&stack, &session).await?;
    let known = rollouts(&stack).pop().context("a rollout")?;
    let unknown = "01a20000-0000-7000-8000-000000000000";
    let day = known.parent().context("a directory")?;
    fs::write(day.join(format!("rollout-2026-01-01T00-00-00-{unknown}.jsonl")), "")?;
    edit_record(&stack, &session, |record| {
        record["native"] = serde_json::json!({"id": unknown});
        record["carry"]["session"]["native"] = serde_json::json!({"id": unknown});
        record["fingerprint"] = Value::Null;
    })?;
    let second = stack.control.run_answered(&conversation, "[[text:b]] question-two", "b", NORMAL).await?;
    assert_eq!(turn_of(&second).origin(), Origin::Replaced, "{:?}", turn_of(&second));
    let seen = stack.model.requests_for("question-two").pop().context("a request")?.conversation();
    assert_eq!(seen.occurrences("question-one"), 1, "{:?}", seen.texts());
    Ok(())
}

/// The state directory as it is after a move (or, `kept`, after a copy): the engine's state database still holds the
/// absolute path of each thread's file, where that is gone or, worse, is not.
async fn moved_home(kept: bool) -> anyhow::Result<()> {
    let mut stack = Stack::start_with(codex()).await?;
    let conversation = stack.conversation().await?;
    let first = stack.control.run_answered(&conversation, "[[text:a]] question-one", "a", NORMAL).await?;
    let session = turn_of(&first).session_id.clone();
    close(&stack, &session).await?;
    stack.runner.stop("TERM", BRIEF).await?;
    let (old, new) = (stack.runner_state(), stack.root().join("runner-elsewhere"));
    if kept {
        let copied = std::process::Command::new("cp").arg("-a").arg(&old).arg(&new).status()?;
        anyhow::ensure!(copied.success(), "cp failed");
    } else {
        fs::rename(&old, &new)?;
    }
    let config = stack.root().join("roundhouse.toml");
    let quoted = |path: &Path| format!("\"{}\"", path.display());
    fs::write(&config, fs::read_to_string(&config)?.replace(&quoted(&old), &quoted(&new)))?;
    let before = rollouts(&stack).pop().map(|file| (fs::read(&file).ok(), file));
    stack.runner.start_again().await?;
    stack.wait_runner().await?;

    let second = stack.control.run_answered(&conversation, "[[text:b]] question-two", "b", NORMAL).await?;
    assert_eq!((turn_of(&second).origin(), &turn_of(&second).session_id), (Origin::Resumed, &session));
    let seen = stack.model.requests_for("question-two").pop().context("a request")?.conversation();
    assert_eq!(seen.occurrences("question-one"), 1, "{:?}", seen.texts());
    if let Some((bytes, file)) = before {
        assert_eq!(fs::read(&file).ok(), bytes, "the home that was left is not written to");
    }
    let third = stack.control.run_answered(&conversation, "[[text:c]] question-three", "c", NORMAL).await?;
    assert_eq!(turn_of(&third).session_id, session);
    Ok(())
}

#[tokio::test]
async fn a_home_that_was_moved_is_found_again_by_its_threads() -> anyhow::Result<()> {
    moved_home(false).await
}

#[tokio::test]
async fn a_home_that_was_copied_is_not_mistaken_for_the_one_it_came_from() -> anyhow::Result<()> {
    moved_home(true).await
}

/// A thread that was started and had no turn is nowhere on disk: it is made again, and that is no loss.
#[tokio::test]
async fn a_thread_that_never_had_a_turn_is_started_anew() -> anyhow::Result<()> {
    let mut stack = Stack::start_with(codex_in("bypass")).await?;
    let conversation = stack.conversation().await?;
    stack.runner.kill().await?;
    stack.runner.set_env("FAILPOINTS", "runner::message_journalled=return");
    stack.runner.start_again().await?;
    let follower = stack.control.follow(&conversation);
    let turn = stack.control.begin(&conversation, "[[text:kept]] do not lose me").await?;
    let status = stack.runner.wait_exit(NORMAL).await?;
    assert!(!status.success(), "it was killed before the engine had the message: {status}");
    for process in stack.census() {
        // What one of them started may be gone with it.
        let _ = roundhouse_test_support::signal(process.pid, "KILL");
    }
    stack.wait_nothing_left(BRIEF).await?;
    stack.runner.clear_env("FAILPOINTS");
    stack.runner.start_again().await?;
    let got = expect_outcome(&stack, &follower, &turn, Outcome::Completed).await?;
    assert_eq!(answer_of(&got), "kept");
    assert_eq!(stack.control.list_sessions(&conversation).await?.len(), 1);
    assert_eq!(stack.model.count_for("do not lose me"), 1);
    Ok(())
}
