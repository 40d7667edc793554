//! The runner's tie to its control plane: it registers, beats, and registers again when it is not known there. Without
//! a control plane everything else works as well.

use std::{collections::HashSet, sync::Arc, time::Duration};

use backon::{BackoffBuilder as _, ExponentialBuilder};
use roundhouse_proto::{
    PROTOCOL_VERSION,
    control::v1::{
        HeartbeatRequest, RegisterRunnerRequest, UnacknowledgedTurn,
        runner_service_client::RunnerServiceClient,
    },
    engine::v1::Root,
};
use tonic::{Code, transport::Channel, transport::Endpoint};

use crate::{context::Context, epochs, runner::Runner};

/// Time that one call may take.
const CALL: Duration = Duration::from_secs(10);

/// Time until a runner that was refused asks again: somebody has to install another release first. Tests do not wait
/// that long.
const REFUSED: Duration = Duration::from_secs(if cfg!(feature = "failpoints") { 1 } else { 30 });

/// Heartbeats that may fail before the runner registers again.
const MISSED: u32 = 3;

/// Epochs in one registration, the newest: a message has a limit of size.
const EPOCHS: usize = 20_000;

/// The host's name, for show.
#[must_use]
pub(crate) fn hostname() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname")
        .map(|name| name.trim().to_owned())
        .unwrap_or_default()
}

/// The roots, as the contract says them.
#[must_use]
pub(crate) fn roots(context: &Context) -> Vec<Root> {
    context
        .roots
        .list()
        .iter()
        .map(|root| Root { path: root.path.to_string_lossy().into_owned(), trusted: root.trusted })
        .collect()
}

fn request(runner: &Runner, address: &str) -> RegisterRunnerRequest {
    let context = &runner.context;
    let turns = runner.turns();
    let held: HashSet<String> = turns.iter().map(|handle| handle.conversation_id.clone()).collect();
    RegisterRunnerRequest {
        runner_id: context.state.runner_id().to_owned(),
        address: address.to_owned(),
        protocol_version: PROTOCOL_VERSION,
        hostname: hostname(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        roots: roots(context),
        boot_id: context.boot_id.clone(),
        control_plane_id: context.state.control_plane_id().unwrap_or_default(),
        epochs: context.epochs.recent(&held, epochs::KEPT, EPOCHS).into_iter().collect(),
        turns: turns
            .into_iter()
            .map(|handle| UnacknowledgedTurn {
                turn_id: handle.turn_id.clone(),
                conversation_id: handle.conversation_id.clone(),
                epoch: handle.epoch,
                ended: handle.hub.ended(),
            })
            .collect(),
    }
}

/// Keeps the runner registered until it stops.
pub(crate) async fn keep(runner: Arc<Runner>, control_plane: String, address: String) {
    let stop = runner.context.shutdown.clone();
    tokio::select! {
        () = stop.cancelled() => {}
        () = run(&runner, &control_plane, &address) => {}
    }
}

async fn run(runner: &Runner, control_plane: &str, address: &str) {
    let endpoint = match Endpoint::from_shared(control_plane.to_owned()) {
        Ok(endpoint) => endpoint
            .connect_timeout(CALL)
            .timeout(CALL)
            .http2_keep_alive_interval(Duration::from_secs(10))
            .keep_alive_timeout(Duration::from_secs(10))
            .keep_alive_while_idle(true),
        Err(error) => {
            tracing::error!(control_plane, %error, "the control plane's URI is wrong; the runner is not registered");
            return;
        }
    };
    let mut client = RunnerServiceClient::new(endpoint.connect_lazy());
    loop {
        let Some(interval) = register(runner, &mut client, address).await else { return };
        beat(runner, &mut client, interval).await;
    }
}

/// Registers, however long it takes. None: it was refused for good.
async fn register(
    runner: &Runner,
    client: &mut RunnerServiceClient<Channel>,
    address: &str,
) -> Option<Duration> {
    let mut pauses = ExponentialBuilder::default()
        .with_min_delay(Duration::from_millis(100))
        .with_max_delay(Duration::from_secs(5))
        .with_jitter()
        .without_max_times()
        .build();
    loop {
        match client.register_runner(request(runner, address)).await {
            Ok(response) => {
                let response = response.into_inner();
                let bound = runner.context.state.control_plane_id();
                match bound {
                    None => {
                        if let Err(error) = runner.context.state.bind(Some(response.control_plane_id.clone()))
                        {
                            tracing::error!(
                                error = crate::error::chain(&error),
                                "the binding was not written"
                            );
                        }
                    }
                    Some(bound) if bound != response.control_plane_id => {
                        tracing::error!(
                            bound,
                            other = response.control_plane_id,
                            "this runner is bound to another control plane; `engine-runner reset`, or `roundhouse runners reset`, undoes that"
                        );
                        return None;
                    }
                    Some(_) => {}
                }
                tracing::info!(control_plane = response.control_plane_id, "registered");
                let interval = response.heartbeat_interval.and_then(|d| Duration::try_from(d).ok());
                return Some(interval.filter(|d| !d.is_zero()).unwrap_or(Duration::from_secs(5)));
            }
            Err(status) => {
                let refused = matches!(status.code(), Code::FailedPrecondition | Code::InvalidArgument);
                if refused {
                    tracing::error!(message = status.message(), "the control plane refuses this runner");
                } else {
                    tracing::debug!(%status, "not registered yet");
                }
                let pause = pauses.next().unwrap_or(Duration::from_secs(5));
                tokio::time::sleep(if refused { REFUSED } else { pause }).await;
            }
        }
    }
}

/// Beats until the runner has to register again.
async fn beat(runner: &Runner, client: &mut RunnerServiceClient<Channel>, interval: Duration) {
    let mut missed = 0;
    let mut tick = tokio::time::interval(interval);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tick.tick().await;
        let request = HeartbeatRequest {
            runner_id: runner.context.state.runner_id().to_owned(),
            running_turns: u32::try_from(runner.running().len()).unwrap_or(u32::MAX),
            warm_engines: u32::try_from(runner.context.pool.held()).unwrap_or(u32::MAX),
            draining: runner.context.is_draining(),
        };
        match client.heartbeat(request).await {
            Ok(_) => missed = 0,
            Err(status) if status.code() == Code::NotFound => return,
            Err(status) => {
                missed += 1;
                tracing::debug!(%status, missed, "a heartbeat failed");
                // A control plane that was away may have been started anew and know nothing of us.
                if missed >= MISSED {
                    return;
                }
            }
        }
    }
}
