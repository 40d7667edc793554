//! An open stream on which nothing comes says nothing of the runner at its other end: a stopped process keeps its
//! connections, and so does, for a while, a host whose cable was pulled. So a runner that was silent for a while is asked.

use std::sync::Arc;
use std::time::Duration;

use roundhouse_domain::id::TurnId;
use roundhouse_proto::engine::v1 as engine;

use crate::app::App;
use crate::runners::{CallError, RunnerHandle};

/// Returns when nothing was heard of the runner for `runner_lost_after`: no heartbeat, no event, and no answer to the
/// question that it is asked before that. Never while it is heard of.
pub(super) async fn of(app: &App, runner: &Arc<RunnerHandle>, turn: &TurnId) -> CallError {
    let lost_after = app.settings.runner_lost_after;
    let answer_within = app.settings.call_timeout.min(lost_after / 2);
    let ask_after = lost_after.saturating_sub(answer_within);
    loop {
        let silent = runner.silent_for();
        if let Some(left) = ask_after.checked_sub(silent).filter(|left| !left.is_zero()) {
            tokio::time::sleep(left).await;
            continue;
        }
        let Err(why) = asked(runner, turn, answer_within).await else {
            runner.heard();
            continue;
        };
        if runner.silent_for() >= lost_after {
            return CallError::Unreachable(why);
        }
        // Who refuses a connection does so at once.
        tokio::time::sleep(app.settings.backoff.0).await;
    }
}

/// Asks what the runner knows of the turn. Any word of its own counts as an answer.
async fn asked(runner: &Arc<RunnerHandle>, turn: &TurnId, within: Duration) -> Result<(), String> {
    let link = runner.link().map_err(|error| error.to_string())?;
    let target = engine::inspect_request::Target::TurnId(turn.to_string());
    let call = link.inspect(engine::InspectRequest { target: Some(target) });
    match tokio::time::timeout(within, call).await {
        Ok(Ok(_) | Err(CallError::Refused { .. })) => Ok(()),
        Ok(Err(error @ CallError::Unreachable(_))) => Err(error.to_string()),
        Err(_) => Err("it does not answer".to_owned()),
    }
}
