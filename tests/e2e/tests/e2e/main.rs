//! The whole of Roundhouse from outside: real services, the real Claude Code, a scripted model as judge.

#![expect(clippy::expect_used, reason = "a test fails by panicking, in what it calls, too")]

mod agents;
mod cancel;
mod chaos;
mod chat;
mod codex;
mod codex_cancel;
mod codex_damage;
mod codex_doubt;
mod codex_durability;
mod codex_hostile;
mod codex_permission;
mod codex_sessions;
mod command_line;
mod damage;
mod durability;
mod examples;
mod failpoints;
mod flood;
mod grpc;
mod host_clock;
mod hostile;
mod hosts;
mod keeper;
mod ladder;
mod lost;
mod matrix;
mod misbehaviour;
mod permission;
mod permission_restarts;
mod queue;
mod readme;
mod requests;
mod retry;
mod sharing;
mod sharing_commands;
mod smoke;
mod terminal;
mod texts;

use anyhow::{Context as _, ensure};
use roundhouse_proto::{
    control::v1::{GetTurnResponse, Turn, TurnStatus},
    engine::v1::{Outcome, TerminalEvent, event_body::Kind},
};
use roundhouse_test_support::{BRIEF, Control, Follower, NORMAL, Stack};

/// The turn in an answer of GetTurn.
fn turn_of(got: &GetTurnResponse) -> &Turn {
    got.turn.as_ref().expect("GetTurn answers with the turn")
}

/// The text of a turn's answer. Empty if there is none.
fn answer_of(got: &GetTurnResponse) -> &str {
    got.answer.as_ref().map_or("", |message| message.text.as_str())
}

/// The terminal events of a turn, as a follower saw them.
fn terminals(follower: &Follower, turn_id: &str) -> Vec<TerminalEvent> {
    follower
        .kinds(turn_id)
        .into_iter()
        .filter_map(|kind| match kind {
            Kind::Terminal(terminal) => Some(terminal),
            _ => None,
        })
        .collect()
}

/// Waits for a turn's end as its follower sees it; it must be this one, once, and the stream must have kept its promises.
async fn expect_outcome(
    stack: &Stack,
    follower: &Follower,
    turn_id: &str,
    outcome: Outcome,
) -> anyhow::Result<GetTurnResponse> {
    expect_outcome_at(&stack.control, follower, turn_id, outcome).await
}

/// The same at the control plane that these clients speak to.
async fn expect_outcome_at(
    control: &Control,
    follower: &Follower,
    turn_id: &str,
    outcome: Outcome,
) -> anyhow::Result<GetTurnResponse> {
    let terminal = follower.wait_terminal(turn_id, NORMAL).await?;
    ensure!(terminal.outcome() == outcome, "expected {outcome:?}, got {terminal:?}");
    let got = control.wait_end(turn_id, BRIEF).await?;
    let wanted = match outcome {
        Outcome::Completed => TurnStatus::Completed,
        Outcome::Cancelled => TurnStatus::Cancelled,
        Outcome::Failed => TurnStatus::Failed,
        Outcome::Lost | Outcome::Unspecified => TurnStatus::Lost,
    };
    ensure!(
        turn_of(&got).status() == wanted,
        "the terminal event says {outcome:?}, the turn {:?}",
        turn_of(&got)
    );
    ensure!(terminals(follower, turn_id).len() == 1, "more than one end: {:?}", terminals(follower, turn_id));
    follower.check().with_context(|| format!("the stream of {turn_id}"))?;
    Ok(got)
}
