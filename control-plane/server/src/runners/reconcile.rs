//! A runner that comes back: what it still holds is settled before it gets anything new.

use std::sync::Arc;

use futures::{StreamExt as _, stream};
use roundhouse_domain::conflict::Kind;
use roundhouse_domain::id::{Epoch, TurnId};
use roundhouse_proto::engine::v1 as engine;
use roundhouse_proto::engine::v1::ErrorReason;
use roundhouse_proto::engine::v1::inspect_response::State;
use roundhouse_store::Error as StoreError;

use super::{CallError, RunnerHandle};
use crate::app::App;
use crate::dispatch;

/// Turns that are settled at the same time.
const AT_ONCE: usize = 32;

/// A turn that a runner says it holds.
#[derive(Clone, Debug)]
pub(crate) struct Claim {
    pub(crate) turn_id: TurnId,
    pub(crate) epoch: Epoch,
}

/// Settles what the runner holds, then opens it for new turns; unless it has registered again meanwhile.
pub(crate) async fn reconcile(app: Arc<App>, runner: Arc<RunnerHandle>, generation: u64, claims: Vec<Claim>) {
    // People see what it is before its first turn; if it cannot be asked now, that turn asks.
    if let Err(error) = runner.describe().await {
        tracing::info!(runner_id = %runner.id(), %error, "a runner that registered could not be asked what it is");
    }
    // A turn that takes its time does not hold up the others.
    let (app, runner) = (&app, &runner);
    let settling = stream::iter(claims)
        .for_each_concurrent(AT_ONCE, async |claim| settle_at_last(app, runner, generation, &claim).await);
    settling.await;
    if !runner.is_generation(generation) {
        return;
    }
    runner.open(generation);
    // Turns that were settled while the runner was away may still have to be confirmed.
    if let Err(error) = dispatch::pick_up(app).await {
        tracing::warn!(%error, "open turns could not be read; they are read again in a while");
    }
}

/// Settles a turn however often it takes, unless the runner has registered again meanwhile.
async fn settle_at_last(app: &Arc<App>, runner: &Arc<RunnerHandle>, generation: u64, claim: &Claim) {
    let mut pauses = backon_pauses(app);
    while let Err(error) = settle(app, runner, claim).await {
        if !runner.is_generation(generation) {
            return;
        }
        tracing::info!(runner_id = %runner.id(), turn_id = %claim.turn_id, %error, "not settled yet");
        tokio::time::sleep(pauses.next().unwrap_or(app.settings.backoff.1)).await;
    }
}

fn backon_pauses(app: &App) -> impl Iterator<Item = std::time::Duration> + use<> {
    use backon::BackoffBuilder as _;
    let (min, max) = app.settings.backoff;
    backon::ExponentialBuilder::default()
        .with_min_delay(min)
        .with_max_delay(max)
        .with_jitter()
        .without_max_times()
        .build()
}

async fn settle(app: &Arc<App>, runner: &Arc<RunnerHandle>, claim: &Claim) -> Result<(), String> {
    match app.store.get_turn(&claim.turn_id).await {
        // Its own task asks the runner and goes on with it.
        Ok(turn) if !turn.state.is_terminal() => {
            dispatch::ensure(app, &turn.id);
            Ok(())
        }
        Ok(turn) if turn.acknowledge_time.is_some() => {
            // The runner did not get, or did not keep, the acknowledgement.
            let view = app.store.get_conversation(&turn.conversation_id).await.map_err(|e| e.to_string())?;
            acknowledge(runner, &turn.id, view.conversation.epoch.max(claim.epoch)).await
        }
        Ok(turn) => {
            let mut done = dispatch::start(app, &turn.id);
            done.wait_for(|done| *done).await.map_err(|error| error.to_string())?;
            Ok(())
        }
        Err(StoreError::NotFound { kind: Kind::Turn, .. }) => discard(runner, claim).await,
        Err(error) => Err(error.to_string()),
    }
}

/// Ends a turn that the store has never heard of: it was made after the backup that the store was restored from.
async fn discard(runner: &RunnerHandle, claim: &Claim) -> Result<(), String> {
    let link = runner.link().map_err(|error| error.to_string())?;
    let target = engine::inspect_request::Target::TurnId(claim.turn_id.to_string());
    let facts = link
        .inspect(engine::InspectRequest { target: Some(target) })
        .await
        .map_err(|error| error.to_string())?;
    match facts.state() {
        State::Unknown => Ok(()),
        State::Ended => acknowledge(runner, &claim.turn_id, claim.epoch).await,
        State::Unspecified | State::Opened | State::Sent | State::Running => {
            let turn_id = claim.turn_id.to_string();
            let request = engine::CancelRequest { turn_id, epoch: claim.epoch.0, grace: None };
            link.cancel(request).await.map_err(|error| error.to_string())?;
            Err("it is being stopped".to_owned())
        }
    }
}

async fn acknowledge(runner: &RunnerHandle, turn: &TurnId, epoch: Epoch) -> Result<(), String> {
    let link = runner.link().map_err(|error| error.to_string())?;
    let request = engine::AcknowledgeRequest { turn_id: turn.to_string(), epoch: epoch.0 };
    match link.acknowledge(request).await {
        Ok(_) | Err(CallError::Refused { reason: Some(ErrorReason::TurnNotFound), .. }) => Ok(()),
        Err(error) => Err(error.to_string()),
    }
}
