//! Questions of the real engines while everything around them dies: kept, told again, decided once, and never allowed by
//! anybody but a client.

use std::time::{Duration, SystemTime};

use anyhow::{Context as _, ensure};
use roundhouse_proto::{
    control::v1::{Permission, TurnStatus, permission::State},
    engine::v1::{Outcome, PermissionDecider, PermissionDecision, event_body::Kind},
};
use roundhouse_test_support::{
    Agent, BRIEF, Control, Follower, NORMAL, Stack, StackOptions, census, signal, wait_for, wait_until,
};

use crate::{answer_of, codex_permission, expect_outcome, permission};

/// An engine and what makes it ask.
#[derive(Clone, Copy)]
enum Engine {
    ClaudeCode,
    Codex,
}

impl Engine {
    fn agent(self) -> Agent {
        match self {
            Self::ClaudeCode => Agent::new("builder"),
            Self::Codex => Agent::codex("builder"),
        }
        .permissions("ask")
    }

    const fn asks(self) -> &'static str {
        match self {
            Self::ClaudeCode => permission::ASKS,
            Self::Codex => codex_permission::ASKS,
        }
    }
}

/// A turn that asks, and its question as it is listed.
struct Asking {
    stack: Stack,
    conversation: String,
    follower: Follower,
    turn: String,
    question: Permission,
}

impl Asking {
    async fn start(engine: Engine, options: StackOptions) -> anyhow::Result<Self> {
        let stack = Stack::start_with(options.agents(&[engine.agent()])).await?;
        let conversation = stack.conversation().await?;
        let follower = stack.control.follow(&conversation);
        let turn = stack.control.begin(&conversation, engine.asks()).await?;
        let question = wait_for("the question is listed", NORMAL, || async {
            Ok(stack.control.permissions(&conversation, false).await?.pop())
        })
        .await?;
        let asking = Self { stack, conversation, follower, turn, question };
        asking.nothing_happened()?;
        Ok(asking)
    }

    fn id(&self) -> &str {
        &self.question.request_id
    }

    fn nothing_happened(&self) -> anyhow::Result<()> {
        ensure!(self.stack.workspace.read("made").is_none(), "it was allowed by nobody");
        Ok(())
    }

    /// The question was settled once, with a denial, by one of these; nothing happened, and a late answer changes nothing.
    async fn denied_by(&self, deciders: &[PermissionDecider]) -> anyhow::Result<()> {
        let open = self.stack.control.permissions(&self.conversation, false).await?;
        ensure!(open.is_empty(), "still open: {open:?}");
        let decided = self.stack.control.permissions(&self.conversation, true).await?;
        ensure!(decided.len() == 1 && decided[0].state() == State::Decided, "{decided:?}");
        ensure!(decided[0].decision() == PermissionDecision::Deny, "{decided:?}");
        let answers = permission::answers(&self.follower, &self.turn);
        ensure!(answers.iter().all(|answer| answer.decision() == PermissionDecision::Deny), "{answers:?}");
        ensure!(answers.len() == 1, "{answers:?}");
        ensure!(deciders.contains(&decided[0].decider()), "{decided:?}");
        let late = permission::answer(&self.stack.control, self.id(), PermissionDecision::Allow).await?;
        ensure!(!late, "an answer after the end counts for nothing");
        self.nothing_happened()
    }

    /// The conversation goes on.
    async fn goes_on(&self) -> anyhow::Result<()> {
        let next = self.stack.control.run(&self.conversation, "[[text:back]] again", NORMAL).await?;
        ensure!(answer_of(&next) == "back", "{next:?}");
        Ok(())
    }
}

async fn everything_restarts(engine: Engine) -> anyhow::Result<()> {
    let mut asking = Asking::start(engine, StackOptions::default()).await?;
    for _ in 0..2 {
        asking.stack.kill_both().await?;
        asking.stack.start_both().await?;
    }
    asking.stack.wait_runner().await?;
    let stack = &asking.stack;
    // Listed as it was, deadline included.
    let listed = stack.control.permissions(&asking.conversation, false).await?;
    ensure!(listed == [asking.question.clone()], "{listed:?}");
    stack.control.wait_status(&asking.turn, TurnStatus::WaitingForPermission, BRIEF).await?;
    // A client that comes only now is told the question, too.
    let newcomer = stack.control.follow(&asking.conversation);
    let id = asking.id().to_owned();
    newcomer
        .wait_event(&asking.turn, "the question", BRIEF, |kind| match kind {
            Kind::PermissionRequest(request) => (request.request_id == id).then_some(()),
            _ => None,
        })
        .await?;
    asking.nothing_happened()?;
    // Of two that answer now, one decides.
    let second = Control::new(&stack.control_plane.url())?;
    let (allowed, denied) = tokio::join!(
        permission::answer(&stack.control, &id, PermissionDecision::Allow),
        permission::answer(&second, &id, PermissionDecision::Deny)
    );
    let (allowed, denied) = (allowed?, denied?);
    ensure!(allowed != denied, "allowed: {allowed}, denied: {denied}");
    expect_outcome(stack, &asking.follower, &asking.turn, Outcome::Completed).await?;
    ensure!(stack.workspace.read("made").is_some() == allowed, "what was decided is what happened");
    for follower in [&asking.follower, &newcomer] {
        follower.wait_terminal(&asking.turn, BRIEF).await?;
        follower.check()?;
        let answers = permission::answers(follower, &asking.turn);
        ensure!(answers.len() == 1 && answers[0].decider() == PermissionDecider::Client, "{answers:?}");
    }
    asking.goes_on().await
}

#[tokio::test]
async fn a_question_of_claude_code_survives_two_restarts_of_everything() -> anyhow::Result<()> {
    everything_restarts(Engine::ClaudeCode).await
}

#[tokio::test]
async fn a_question_of_codex_survives_two_restarts_of_everything() -> anyhow::Result<()> {
    everything_restarts(Engine::Codex).await
}

/// The time runs on while nobody is there to see it: a restart neither begins it anew nor lets it pass as an answer.
async fn its_time_passes(engine: Engine) -> anyhow::Result<()> {
    let time = Duration::from_secs(4);
    let options = StackOptions::default().set("runner.permission_timeout", "4s");
    let mut asking = Asking::start(engine, options).await?;
    let deadline =
        asking.question.request.as_ref().and_then(|request| request.deadline).context("a deadline")?;
    let deadline = SystemTime::UNIX_EPOCH
        + Duration::new(u64::try_from(deadline.seconds)?, u32::try_from(deadline.nanos)?);
    asking.stack.kill_both().await?;
    wait_until("the deadline is over", BRIEF, || SystemTime::now() > deadline).await?;
    asking.nothing_happened()?;
    asking.stack.start_both().await?;
    let back = SystemTime::now();
    expect_outcome(&asking.stack, &asking.follower, &asking.turn, Outcome::Completed).await?;
    asking.denied_by(&[PermissionDecider::Deadline]).await?;
    // By the clock of the runner, which stores when each event happened.
    let settled = asking.follower.items().into_iter().find_map(|item| {
        use roundhouse_proto::control::v1::stream_events_response::Item;
        match item.item {
            Some(Item::TurnEvent(event)) => {
                let kind = event.body.and_then(|body| body.kind);
                matches!(kind, Some(Kind::PermissionAnswer(_))).then_some(item.at).flatten()
            }
            _ => None,
        }
    });
    let settled = settled.context("the answer has a time")?;
    let settled = SystemTime::UNIX_EPOCH
        + Duration::new(u64::try_from(settled.seconds)?, u32::try_from(settled.nanos)?);
    let waited = settled.duration_since(back).unwrap_or_default();
    ensure!(waited < time, "{waited:?} after the restart: the time of {time:?} began anew");
    asking.goes_on().await
}

#[tokio::test]
async fn the_time_of_a_question_of_claude_code_passes_while_everything_is_down() -> anyhow::Result<()> {
    its_time_passes(Engine::ClaudeCode).await
}

#[tokio::test]
async fn the_time_of_a_question_of_codex_passes_while_everything_is_down() -> anyhow::Result<()> {
    its_time_passes(Engine::Codex).await
}

/// Cancelled while the runner is away: carried out when it is back, and the question goes with the turn.
async fn cancelled_while_the_runner_is_away(engine: Engine) -> anyhow::Result<()> {
    let mut asking = Asking::start(engine, StackOptions::default()).await?;
    asking.stack.runner.kill().await?;
    asking.stack.control.cancel(&asking.turn).await?;
    asking.stack.control_plane.kill().await?;
    asking.stack.start_both().await?;
    expect_outcome(&asking.stack, &asking.follower, &asking.turn, Outcome::Cancelled).await?;
    asking.denied_by(&[PermissionDecider::Cancel, PermissionDecider::Engine]).await?;
    asking.goes_on().await
}

#[tokio::test]
async fn a_cancel_closes_a_question_of_claude_code_over_a_restart() -> anyhow::Result<()> {
    cancelled_while_the_runner_is_away(Engine::ClaudeCode).await
}

#[tokio::test]
async fn a_cancel_closes_a_question_of_codex_over_a_restart() -> anyhow::Result<()> {
    cancelled_while_the_runner_is_away(Engine::Codex).await
}

/// The engine dies while nobody sees it, and its question with it.
async fn the_engine_dies(engine: Engine) -> anyhow::Result<()> {
    let mut asking = Asking::start(engine, StackOptions::default()).await?;
    asking.stack.kill_both().await?;
    let engines: Vec<_> =
        asking.stack.census().into_iter().filter(|one| one.role == census::Role::Engine).collect();
    ensure!(!engines.is_empty(), "{}", census::describe(&asking.stack.census()));
    for one in &engines {
        signal(one.pid, "KILL")?;
    }
    asking.stack.start_both().await?;
    let got = expect_outcome(&asking.stack, &asking.follower, &asking.turn, Outcome::Failed).await?;
    let failure = got.turn.and_then(|turn| turn.failure).context("a failed turn says why")?;
    ensure!(failure.retryable && !failure.next_action.is_empty(), "{failure:?}");
    asking.denied_by(&[PermissionDecider::Engine]).await?;
    asking.goes_on().await
}

#[tokio::test]
async fn the_death_of_claude_code_closes_its_question() -> anyhow::Result<()> {
    the_engine_dies(Engine::ClaudeCode).await
}

#[tokio::test]
async fn the_death_of_codex_closes_its_question() -> anyhow::Result<()> {
    the_engine_dies(Engine::Codex).await
}
