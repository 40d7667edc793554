//! The steps of a cancel on an engine that heeds nothing but SIGKILL: each is tried, each has its time, and the end comes
//! within the sum of them.

use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use roundhouse_proto::engine::v1::{Outcome, event_body::Kind};
use roundhouse_test_support::{Agent, NORMAL, Stack, StackOptions, census, wait_until};
use serde_json::Value;

use crate::{answer_of, expect_outcome};

const INTERRUPT: Duration = Duration::from_millis(700);
const TERM: Duration = Duration::from_millis(900);
/// What a slow machine may add.
const SLACK: Duration = Duration::from_secs(10);

/// Says one thing, has children in its group and outside of it, and then heeds nothing.
const DEAF: &str =
    "[[ignore:term,int,hup,interrupt,eof]][[fork]][[fork detached hold]][[text:never mind]][[hang]] stay";

struct Deaf {
    stack: Stack,
    conversation: String,
    follower: roundhouse_test_support::Follower,
    turn: String,
    log: tempfile::TempDir,
}

impl Deaf {
    async fn start(agent: Agent) -> anyhow::Result<Self> {
        let log = tempfile::tempdir()?;
        let path = log.path().join("engine.log").display().to_string();
        let options = StackOptions::default()
            .fake_engine()?
            .fake_codex()?
            .agents(&[agent])
            .set("engines.codex.variables.FAKE_ENGINE_LOG", path.as_str())
            .engine_variable("FAKE_ENGINE_LOG", &path)
            .set("runner.cancel_interrupt_grace", "700ms")
            .set("runner.cancel_term_grace", "900ms");
        let stack = Stack::start_with(options).await?;
        let conversation = stack.conversation().await?;
        let follower = stack.control.follow(&conversation);
        let turn = stack.control.begin(&conversation, DEAF).await?;
        follower
            .wait_event(&turn, "its text", NORMAL, |kind| matches!(kind, Kind::Text(_)).then_some(()))
            .await?;
        let deaf = Self { stack, conversation, follower, turn, log };
        wait_until("the engine hangs", NORMAL, || deaf.logged().iter().any(|line| line["event"] == "hang"))
            .await
            .with_context(|| format!("{:?}", deaf.logged()))?;
        Ok(deaf)
    }

    /// What the engine noted of itself.
    fn logged(&self) -> Vec<Value> {
        let text = std::fs::read_to_string(self.log.path().join("engine.log")).unwrap_or_default();
        text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
    }

    async fn ends(&self) -> anyhow::Result<()> {
        expect_outcome(&self.stack, &self.follower, &self.turn, Outcome::Cancelled).await?;
        let left = self.stack.engine_processes();
        ensure!(left.is_empty(), "CANCELLED was said too early: {}", census::describe(&left));
        let messages = self.stack.control.messages(&self.conversation).await?;
        let last = messages.last().context("messages")?;
        ensure!(last.text == "never mind" && last.incomplete, "what was said is kept: {last:?}");
        let next = self.stack.control.run(&self.conversation, "[[text:back]] again", NORMAL).await?;
        ensure!(answer_of(&next) == "back", "{next:?}");
        Ok(())
    }
}

async fn within_its_bound(agent: Agent) -> anyhow::Result<()> {
    let deaf = Deaf::start(agent).await?;
    let begin = Instant::now();
    deaf.stack.control.cancel(&deaf.turn).await?;
    deaf.follower.wait_terminal(&deaf.turn, NORMAL).await?;
    let took = begin.elapsed();
    ensure!(took >= INTERRUPT + TERM, "a step was not given its time: {took:?}");
    ensure!(took < INTERRUPT + TERM + SLACK, "{took:?}");
    let signals: Vec<_> = deaf.logged().into_iter().filter(|line| line["event"] == "signal").collect();
    ensure!(signals.iter().any(|line| line["detail"] == "SIGTERM"), "no SIGTERM came first: {signals:?}");
    deaf.ends().await
}

#[tokio::test]
async fn s43_claude_codes_dialect_is_killed_within_the_time_of_the_steps() -> anyhow::Result<()> {
    within_its_bound(Agent::new("builder")).await
}

#[tokio::test]
async fn s43_codex_dialect_is_killed_within_the_time_of_the_steps() -> anyhow::Result<()> {
    within_its_bound(Agent::codex("builder")).await
}

#[tokio::test]
async fn s43_the_steps_are_taken_to_their_end_over_the_death_of_the_runner() -> anyhow::Result<()> {
    let mut deaf = Deaf::start(Agent::new("builder")).await?;
    deaf.stack.control.cancel(&deaf.turn).await?;
    deaf.stack.runner.kill().await?;
    deaf.stack.runner.start_again().await?;
    deaf.ends().await
}
