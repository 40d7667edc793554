//! Who a runner is: its id, its address, its protocol.

use pretty_assertions::assert_eq;
use roundhouse_proto::PROTOCOL_VERSION;
use roundhouse_proto::control::v1 as control;
use roundhouse_proto::control::v1::TurnStatus;
use tonic::{Code, Status};

use crate::support::runner::Runner;
use crate::support::{World, reason};

fn registration(id: &str, address: &str, host: &str) -> control::RegisterRunnerRequest {
    control::RegisterRunnerRequest {
        runner_id: id.into(),
        address: address.into(),
        protocol_version: PROTOCOL_VERSION,
        hostname: host.into(),
        boot_id: "boot".into(),
        ..Default::default()
    }
}

fn told(status: &Status) -> (Code, String) {
    (status.code(), reason(status))
}

#[tokio::test]
async fn another_protocol_version_is_refused_with_a_sentence_that_says_what_to_do() {
    let world = World::without_runner(|_| {}).await;
    for version in [0, PROTOCOL_VERSION + 1] {
        let request = control::RegisterRunnerRequest {
            protocol_version: version,
            ..registration(&world.runner.id, &world.runner.address.to_string(), "a")
        };
        let status = world.runner.register_as(world.address(), request).await.unwrap_err();
        assert_eq!(told(&status), (Code::FailedPrecondition, "PROTOCOL_VERSION".into()));
        let sentence = status.message();
        assert!(sentence.contains(&format!("version {version}")), "{sentence}");
        assert!(sentence.contains("install the same release of both"), "{sentence}");
    }
}

#[tokio::test]
async fn an_address_at_which_another_runner_answers_is_refused() {
    let mut world = World::new().await;
    let taken = world.runner.address.to_string();
    let status =
        world.runner.register_as(world.address(), registration("run_late", &taken, "b")).await.unwrap_err();
    assert_eq!(told(&status), (Code::FailedPrecondition, "RUNNER_CONFLICT".into()));
    assert!(status.message().contains(&world.runner.id) && status.message().contains(&taken), "{status}");
    let runners =
        world.runners().await.list_runners(control::ListRunnersRequest {}).await.unwrap().into_inner();
    assert_eq!(runners.runners.len(), 1, "nothing was stored of it");
    // The one that has it is as before.
    let conversation = world.conversation().await;
    let turn = world.send(&conversation, "hello").await;
    assert_eq!(world.finish(&turn).await.0.status(), TurnStatus::Completed);
}

#[tokio::test]
async fn a_runner_that_lives_elsewhere_under_the_same_id_is_refused_and_one_that_moved_is_not() {
    let world = World::new().await;
    let (id, first) = (world.runner.id.clone(), world.runner.address.to_string());
    // A copy of the state directory on another host.
    let copy = Runner::start_as(&id).await;
    let there = copy.address.to_string();
    let status =
        world.runner.register_as(world.address(), registration(&id, &there, "host-b")).await.unwrap_err();
    assert_eq!(told(&status), (Code::FailedPrecondition, "RUNNER_CONFLICT".into()));
    assert!(status.message().contains("state directory") && status.message().contains(&first), "{status}");
    let address = async || {
        let all =
            world.runners().await.list_runners(control::ListRunnersRequest {}).await.unwrap().into_inner();
        all.runners[0].address.clone()
    };
    assert_eq!(address().await, first);
    // Once the first one is gone, its successor is welcome wherever it is.
    world.runner.deaf(true);
    world.runner.register_as(world.address(), registration(&id, &there, "host-b")).await.unwrap();
    assert_eq!(address().await, there);
}

#[tokio::test]
async fn what_another_runner_says_at_a_runners_address_is_not_its_word() {
    let mut world = World::new().await;
    let conversation = world.conversation().await;
    world.runner.state().reply = crate::support::runner::Reply::Hold;
    let turn = world.send(&conversation, "hello").await;
    world.runner.sent(&turn.turn_id).await;
    world.until(&turn, TurnStatus::Running).await;
    // Another one answers there now, and knows nothing of the turn. That is silence, not a lost turn.
    {
        let mut state = world.runner.state();
        state.impostor = true;
        let known = state.turns.remove(&turn.turn_id).unwrap();
        state.hidden.push((turn.turn_id.clone(), known));
    }
    world.runner.break_streams();
    world.runner.wait("calls that were refused", |s| (s.misled >= 3).then_some(())).await;
    assert_eq!(world.turn(&turn.turn_id).await.turn.unwrap().status(), TurnStatus::Running);
    {
        let mut state = world.runner.state();
        state.impostor = false;
        let hidden = std::mem::take(&mut state.hidden);
        state.turns.extend(hidden);
    }
    world.runner.complete(&turn.turn_id, "done");
    assert_eq!(world.finish(&turn).await.0.status(), TurnStatus::Completed);
}

#[tokio::test]
async fn a_turn_for_a_runner_at_whose_address_another_one_answers_waits_for_it() {
    let mut world = World::new().await;
    let conversation = world.conversation().await;
    let first = world.send(&conversation, "one").await;
    world.finish(&first).await;
    {
        let mut state = world.runner.state();
        state.impostor = true;
        state.misled = 0;
    }
    let second = world.send_as(&conversation, "two", "", "").await;
    world.runner.wait("calls that were refused", |s| (s.misled >= 3).then_some(())).await;
    assert_eq!(world.turn(&second.turn_id).await.turn.unwrap().status(), TurnStatus::Dispatching);
    assert_eq!(world.runner.opens().len(), 1, "nothing was given to the other one");
    world.runner.state().impostor = false;
    assert_eq!(world.finish(&second).await.0.status(), TurnStatus::Completed);
}
