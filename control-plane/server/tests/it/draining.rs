//! Runners that are drained.

use std::time::Duration;

use pretty_assertions::assert_eq;
use roundhouse_control_plane::Settings;
use roundhouse_proto::control::v1 as control;
use roundhouse_proto::control::v1::TurnStatus;
use roundhouse_proto::control::v1::attention::Reason;
use roundhouse_proto::control::v1::runner::State;
use roundhouse_proto::engine::v1::FailureReason;
use tonic::{Code, Status};

use crate::support::runner::Reply;
use crate::support::{LIMIT, World, failure, reason};

fn impatient(settings: &mut Settings) {
    settings.runner_away_timeout = Duration::from_millis(400);
}

async fn drain(world: &World, undrain: bool, request_id: &str) -> Result<control::Runner, Status> {
    let request = control::DrainRunnerRequest {
        request_id: request_id.into(),
        runner_id: world.runner.id.clone(),
        undrain,
    };
    Ok(world.runners().await.drain_runner(request).await?.into_inner().runner.unwrap())
}

#[tokio::test]
async fn what_runs_on_a_drained_runner_finishes_and_what_waits_fails_after_its_time() {
    let mut world = World::tuned(impatient).await;
    world.runner.state().reply = Reply::Hold;
    let conversation = world.conversation().await;
    let running = world.send(&conversation, "one").await;
    world.runner.sent(&running.turn_id).await;
    let waiting = world.send(&conversation, "two").await;
    let drained = drain(&world, false, "").await.unwrap();
    assert_eq!((drained.state(), drained.running_turns), (State::Draining, 1));
    world.runner.complete(&running.turn_id, "done");
    let (running, _) = world.finish(&running).await;
    assert_eq!(running.status(), TurnStatus::Completed);
    let (waiting, _) = world.finish(&waiting).await;
    assert_eq!(failure(&waiting), (FailureReason::RunnerLost, true));
    assert!(waiting.failure.as_ref().unwrap().message.contains("drained"), "{waiting:?}");
    // It can be retried once the draining has ended, and nothing is in its way.
    world.runner.state().reply = Reply::Echo;
    assert_eq!(drain(&world, true, "").await.unwrap().state(), State::Online);
    let retried = world.retry(&waiting.turn_id).await.unwrap();
    assert_eq!(world.finish(&retried).await.0.status(), TurnStatus::Completed);
}

#[tokio::test]
async fn a_turn_that_waits_for_a_drained_runner_goes_on_when_the_draining_ends() {
    let mut world = World::new().await;
    let conversation = world.conversation().await;
    drain(&world, false, "").await.unwrap();
    let turn = world.send(&conversation, "one").await;
    let said = async {
        loop {
            let waiting = world.turn(&turn.turn_id).await.waiting;
            if let Some(attention) = waiting.filter(|a| a.reason() == Reason::WaitingForRunner) {
                return attention;
            }
        }
    };
    let said = tokio::time::timeout(LIMIT, said).await.expect("it says what it waits for");
    assert!(said.next_action.contains("draining"), "{said:?}");
    drain(&world, true, "").await.unwrap();
    assert_eq!(world.finish(&turn).await.0.status(), TurnStatus::Completed);

    // Registering again, as after a restart, ends it as well.
    drain(&world, false, "").await.unwrap();
    let turn = world.send(&conversation, "two").await;
    world.until(&turn, TurnStatus::Dispatching).await;
    world.runner.state().draining = false;
    world.runner.register(world.address()).await.unwrap();
    assert_eq!(world.finish(&turn).await.0.status(), TurnStatus::Completed);
}

#[tokio::test]
async fn a_repeated_drain_does_not_undo_what_came_after_it() {
    let world = World::new().await;
    drain(&world, false, "drain-1").await.unwrap();
    drain(&world, true, "undrain-1").await.unwrap();
    assert_eq!(drain(&world, false, "drain-1").await.unwrap().state(), State::Online);
    assert!(!world.runner.state().draining);
    let status = drain(&world, true, "drain-1").await.unwrap_err();
    assert_eq!((status.code(), reason(&status).as_str()), (Code::AlreadyExists, "REQUEST_ID_REUSED"));
}

#[tokio::test]
async fn a_runner_that_is_away_or_unknown_cannot_be_drained() {
    let world = World::new().await;
    world.runner.deaf(true);
    let status = drain(&world, false, "drain-1").await.unwrap_err();
    assert_eq!((status.code(), reason(&status).as_str()), (Code::Unavailable, "RUNNER_UNAVAILABLE"));
    world.runner.deaf(false);
    // Nothing was stored under the request id: it can be repeated.
    assert_eq!(drain(&world, false, "drain-1").await.unwrap().state(), State::Draining);
    let request = control::DrainRunnerRequest { runner_id: "run_nobody".into(), ..Default::default() };
    let status = world.runners().await.drain_runner(request).await.unwrap_err();
    assert_eq!((status.code(), reason(&status).as_str()), (Code::NotFound, "RUNNER_NOT_FOUND"));
}
