//! Runners that go away, come back, or were never right; workspaces and who holds them.

use std::time::Duration;

use pretty_assertions::assert_eq;
use roundhouse_control_plane::Settings;
use roundhouse_proto::PROTOCOL_VERSION;
use roundhouse_proto::control::v1 as control;
use roundhouse_proto::control::v1::TurnStatus;
use roundhouse_proto::control::v1::runner::State;
use roundhouse_proto::engine::v1::FailureReason;
use tonic::Code;

use crate::support::runner::{Call, Opening, Reply, completed, lost, text};
use crate::support::{LIMIT, World, assert_whole, failure, message, reason};

fn impatient(settings: &mut Settings) {
    settings.runner_lost_after = Duration::from_millis(400);
    settings.runner_away_timeout = Duration::from_millis(400);
    settings.heartbeat_interval = Duration::from_millis(50);
}

fn registration(world: &World) -> control::RegisterRunnerRequest {
    control::RegisterRunnerRequest {
        runner_id: world.runner.id.clone(),
        address: world.runner.address.to_string(),
        protocol_version: PROTOCOL_VERSION,
        hostname: "host-a".into(),
        ..Default::default()
    }
}

#[tokio::test]
async fn a_registration_is_checked() {
    let world = World::without_runner(|_| {}).await;
    let other_version =
        control::RegisterRunnerRequest { protocol_version: PROTOCOL_VERSION + 1, ..registration(&world) };
    let status = world.runner.register_as(world.address(), other_version).await.unwrap_err();
    assert_eq!((status.code(), reason(&status).as_str()), (Code::FailedPrecondition, "PROTOCOL_VERSION"));
    let bound =
        control::RegisterRunnerRequest { control_plane_id: "ctl_other".into(), ..registration(&world) };
    let status = world.runner.register_as(world.address(), bound).await.unwrap_err();
    assert_eq!((status.code(), reason(&status).as_str()), (Code::FailedPrecondition, "RUNNER_BOUND"));
    let nowhere = control::RegisterRunnerRequest { address: String::new(), ..registration(&world) };
    let status = world.runner.register_as(world.address(), nowhere).await.unwrap_err();
    assert_eq!(reason(&status), "FIELD_INVALID");
    let good = world.runner.register_as(world.address(), registration(&world)).await.unwrap();
    assert_eq!(good.control_plane_id, world.server.as_ref().unwrap().control_plane_id());
    let again = control::RegisterRunnerRequest {
        control_plane_id: good.control_plane_id.clone(),
        ..registration(&world)
    };
    assert_eq!(world.runner.register_as(world.address(), again).await.unwrap(), good);
}

#[tokio::test]
async fn a_bare_path_is_meant_for_the_only_runner_that_is_there_and_has_it() {
    let mut world = World::without_runner(|_| {}).await;
    let other = |id: &str, root: &str| control::RegisterRunnerRequest {
        runner_id: id.into(),
        hostname: id.into(),
        // Port 1 of loopback is nobody's.
        address: "127.0.0.1:1".into(),
        roots: vec![roundhouse_proto::engine::v1::Root { path: root.into(), trusted: false }],
        ..registration(&world)
    };
    let (gone, elsewhere, rival) =
        (other("run_gone", "/w"), other("run_elsewhere", "/v"), other("run_rival", "/w/a"));
    // What was known before a start and was not heard of since is away.
    world.runner.register_as(world.address(), gone).await.unwrap();
    world.crash().await;
    world.restart().await;
    world.runner.register(world.address()).await.unwrap();
    world.runner.register_as(world.address(), elsewhere).await.unwrap();
    let conversation = world.conversation().await;
    let turn = world.send(&conversation, "x").await;
    assert_eq!(world.finish(&turn).await.0.status(), TurnStatus::Completed);
    assert_eq!(world.workspace().await.runner_id, world.runner.id);
    // Two that are there and have it: somebody has to say which.
    world.runner.register_as(world.address(), rival).await.unwrap();
    let status = world.client.send_message(message(&conversation, "x", "builder", "/w/a")).await.unwrap_err();
    assert_eq!((status.code(), reason(&status).as_str()), (Code::InvalidArgument, "FIELD_INVALID"));
}

#[tokio::test]
async fn a_runner_is_described_before_its_first_turn() {
    let world = World::new().await;
    let mut runners = world.runners().await;
    let described = async {
        loop {
            let list = runners.list_runners(control::ListRunnersRequest {}).await.unwrap().into_inner();
            if let Some(engine) = list.runners[0].engines.first() {
                return engine.name.clone();
            }
        }
    };
    assert_eq!(tokio::time::timeout(LIMIT, described).await.unwrap(), "fake");
}

#[tokio::test]
async fn a_heartbeat_asks_for_registration_after_a_restart_and_tells_the_state() {
    let mut world = World::tuned(impatient).await;
    let beat = |draining| control::HeartbeatRequest {
        runner_id: world.runner.id.clone(),
        running_turns: 2,
        warm_engines: 1,
        draining,
    };
    let (quiet, drains) = (beat(false), beat(true));
    let mut runners = world.runners().await;
    runners.heartbeat(quiet.clone()).await.unwrap();
    let state = async |client: &mut control::runner_service_client::RunnerServiceClient<_>| {
        let list = client.list_runners(control::ListRunnersRequest {}).await.unwrap().into_inner();
        list.runners.into_iter().next().unwrap()
    };
    let shown = state(&mut runners).await;
    assert_eq!((shown.state(), shown.running_turns, shown.warm_engines), (State::Online, 2, 1));
    assert_eq!(shown.hostname, "host-a");
    runners.heartbeat(drains).await.unwrap();
    assert_eq!(state(&mut runners).await.state(), State::Draining);
    let mut seen = Vec::new();
    while seen.last() != Some(&State::Lost) {
        let now = state(&mut runners).await.state();
        if seen.last() != Some(&now) {
            seen.push(now);
        }
        tokio::task::yield_now().await;
    }
    assert_eq!(seen, [State::Draining, State::Away, State::Lost]);
    world.crash().await;
    world.restart().await;
    let mut runners = world.runners().await;
    let status = runners.heartbeat(quiet.clone()).await.unwrap_err();
    assert_eq!((status.code(), reason(&status).as_str()), (Code::NotFound, "RUNNER_NOT_FOUND"));
    world.runner.register(world.address()).await.unwrap();
    runners.heartbeat(quiet).await.unwrap();
}

#[tokio::test]
async fn a_runner_that_is_away_fails_the_turn_after_its_time_and_the_next_one_works() {
    let mut world = World::tuned(impatient).await;
    let conversation = world.conversation().await;
    let first = world.send(&conversation, "one").await;
    world.finish(&first).await;
    world.runner.deaf(true);
    let second = world.send_as(&conversation, "two", "", "").await;
    let (second, events) = world.finish(&second).await;
    assert_eq!(failure(&second), (FailureReason::RunnerLost, true));
    assert_whole(&events);
    world.runner.deaf(false);
    let retried = world.retry(&second.turn_id).await.unwrap();
    let (retried, _) = world.finish(&retried).await;
    assert_eq!(retried.status(), TurnStatus::Completed);
    assert_eq!(world.runner.sends().len(), 2, "the failed turn gave nothing to the engine");
}

#[tokio::test]
async fn a_drained_runner_is_waited_for_and_then_told() {
    let mut world = World::tuned(impatient).await;
    let conversation = world.conversation().await;
    world.runner.state().openings.extend(std::iter::repeat_n(Opening::Refuse("DRAINING"), 1_000));
    let turn = world.send(&conversation, "one").await;
    let (turn, _) = world.finish(&turn).await;
    assert_eq!(failure(&turn), (FailureReason::RunnerLost, true));
    assert!(turn.failure.unwrap().message.contains("drained"));
    assert!(world.runner.opens().len() > 1, "it was waited for");
}

#[tokio::test]
async fn s48_a_dead_connection_is_not_a_lost_runner() {
    let mut world = World::new().await;
    world.runner.state().reply = Reply::Hold;
    let conversation = world.conversation().await;
    let turn = world.send(&conversation, "hello").await;
    world.until(&turn, TurnStatus::Running).await;
    world.runner.deaf(true);
    world.runner.emit(&turn.turn_id, text("t", "meanwhile"));
    world.runner.deaf(false);
    world.runner.complete(&turn.turn_id, "done");
    let (turn, events) = world.finish(&turn).await;
    assert_eq!(turn.status(), TurnStatus::Completed);
    assert_whole(&events);
}

#[tokio::test]
async fn s47_a_lost_turn_keeps_its_workspace_until_its_runner_is_back() {
    let mut world = World::tuned(impatient).await;
    world.runner.state().reply = Reply::Hold;
    let conversation = world.conversation().await;
    let turn = world.send(&conversation, "hello").await;
    world.runner.sent(&turn.turn_id).await;
    world.runner.emit(&turn.turn_id, text("t", "half"));
    let running = world.until(&turn, TurnStatus::Running).await;
    world.runner.deaf(true);
    let (lost, events) = world.finish(&turn).await;
    assert_eq!(lost.status(), TurnStatus::Lost);
    assert_whole(&events);
    assert!(!lost.failure.as_ref().unwrap().next_action.is_empty());
    let held = world.workspace().await;
    assert_eq!((held.held_by_turn_id.as_str(), held.held_by_lost_turn), (turn.turn_id.as_str(), true));
    // The next turn is promoted and told at once.
    let next = world.send_as(&conversation, "next", "", "").await;
    let (next, _) = world.finish(&next).await;
    assert_eq!(failure(&next), (FailureReason::WorkspaceBusy, true));
    assert!(next.epoch > running.epoch + 1, "the epoch moved on");

    // The runner is back, and what it says of the lost turn changes nothing.
    world.runner.complete(&turn.turn_id, "finished after all");
    world.runner.deaf(false);
    world.runner.register(world.address()).await.unwrap();
    world.runner.acknowledged(&turn.turn_id).await;
    let after = world.turn(&turn.turn_id).await;
    assert_eq!(after.turn.unwrap(), lost);
    assert_eq!(after.answer.unwrap().text, "half");
    world.runner.state().reply = Reply::Echo;
    let last = world.send(&conversation, "last").await;
    let (last, _) = world.finish(&last).await;
    assert_eq!(last.status(), TurnStatus::Completed);
    assert_eq!(world.workspace().await.held_by_turn_id, "");
}

#[tokio::test]
async fn what_still_runs_of_a_lost_turn_is_stopped_when_its_runner_is_back() {
    let mut world = World::tuned(impatient).await;
    world.runner.state().reply = Reply::Hold;
    let conversation = world.conversation().await;
    let turn = world.send(&conversation, "hello").await;
    let running = world.until(&turn, TurnStatus::Running).await;
    world.runner.deaf(true);
    let (lost, _) = world.finish(&turn).await;
    assert_eq!(lost.status(), TurnStatus::Lost);
    world.runner.deaf(false);
    world.runner.register(world.address()).await.unwrap();
    world.runner.acknowledged(&turn.turn_id).await;
    let cancels =
        |call: &Call| matches!(call, Call::Cancel(c) if c.turn_id == turn.turn_id && c.epoch > running.epoch);
    assert!(world.runner.count(cancels) >= 1, "under the conversation's newer epoch");
    assert_eq!(world.workspace().await.held_by_turn_id, "");
}

#[tokio::test]
async fn a_person_frees_the_workspace_of_a_lost_turn_and_of_no_other() {
    let mut world = World::tuned(impatient).await;
    world.runner.state().reply = Reply::Hold;
    let conversation = world.conversation().await;
    let turn = world.send(&conversation, "hello").await;
    world.until(&turn, TurnStatus::Running).await;
    let workspace_id = world.workspace().await.workspace_id;
    let request = |turn: &str, reason: &str| control::FreeWorkspaceRequest {
        request_id: String::new(),
        workspace_id: workspace_id.clone(),
        turn_id: turn.into(),
        reason: reason.into(),
    };
    let mut runners = world.runners().await;
    let status = runners.free_workspace(request(&turn.turn_id, "x")).await.unwrap_err();
    assert_eq!((status.code(), reason(&status).as_str()), (Code::FailedPrecondition, "WRONG_STATE"));
    world.runner.deaf(true);
    world.finish(&turn).await;
    let status = runners.free_workspace(request(&turn.turn_id, " ")).await.unwrap_err();
    assert_eq!(reason(&status), "FIELD_INVALID");
    let status = runners.free_workspace(request("trn_other", "x")).await.unwrap_err();
    assert_eq!(status.code(), Code::NotFound);
    let freed =
        runners.free_workspace(request(&turn.turn_id, "the host burnt down")).await.unwrap().into_inner();
    assert_eq!(freed.workspace.unwrap().held_by_turn_id, "");
}

#[tokio::test]
async fn s47_a_runner_without_any_trace_of_a_running_turn_makes_it_lost() {
    let mut world = World::new().await;
    world.runner.state().reply = Reply::Hold;
    let conversation = world.conversation().await;
    let turn = world.send(&conversation, "hello").await;
    world.until(&turn, TurnStatus::Running).await;
    world.runner.deaf(true);
    world.runner.forget();
    world.runner.deaf(false);
    let (turn, events) = world.finish(&turn).await;
    assert_eq!(turn.status(), TurnStatus::Lost);
    assert_whole(&events);
    assert_eq!(world.runner.sends().len(), 1, "nothing was sent again");
    // The runner is there and knows nothing: nothing can hold the workspace.
    let next = world.send(&conversation, "next").await;
    world.runner.sent(&next.turn_id).await;
}

#[tokio::test]
async fn turns_take_a_workspace_in_the_order_of_promotion() {
    let mut world = World::new().await;
    world.runner.state().reply = Reply::Hold;
    let mut turns = Vec::new();
    for n in 0..4 {
        let conversation = world.conversation().await;
        turns.push(world.send(&conversation, &format!("m{n}")).await);
    }
    for turn in &turns {
        world.runner.sent(&turn.turn_id).await;
        assert_eq!(world.workspace().await.held_by_turn_id, turn.turn_id);
        world.runner.complete(&turn.turn_id, "done");
        world.finish(turn).await;
    }
    let order: Vec<String> = world.runner.opens().into_iter().map(|open| open.turn_id).collect();
    assert_eq!(order, turns.iter().map(|turn| turn.turn_id.clone()).collect::<Vec<_>>());
}

#[tokio::test]
async fn turns_in_other_workspaces_do_not_wait() {
    let mut world = World::new().await;
    world.runner.state().reply = Reply::Hold;
    let (a, b) = (world.conversation().await, world.conversation().await);
    let first = world.send_as(&a, "x", "builder", "/w/a").await;
    let second = world.send_as(&b, "x", "builder", "/w/ab").await;
    world.runner.sent(&first.turn_id).await;
    world.runner.sent(&second.turn_id).await;
}

#[tokio::test]
async fn two_spellings_and_the_runners_name_lead_to_one_workspace() {
    let mut world = World::new().await;
    let conversation = world.conversation().await;
    let mut ids = Vec::new();
    let by_id = format!("{}:/w/a", world.runner.id);
    for spelling in ["/w/a", "/w/a/", "host-a:/w/a", &by_id] {
        let turn = world.send_as(&conversation, "x", "builder", spelling).await;
        ids.push(world.finish(&turn).await.0.workspace_id);
    }
    let by_workspace = ids[0].clone();
    let turn = world.send_as(&conversation, "x", "builder", &by_workspace).await;
    ids.push(world.finish(&turn).await.0.workspace_id);
    assert!(ids.iter().all(|id| *id == ids[0]), "{ids:?}");
}

#[tokio::test]
async fn a_turn_that_the_store_never_heard_of_is_ended_before_the_runner_gets_another() {
    let mut world = World::without_runner(|_| {}).await;
    {
        let mut state = world.runner.state();
        let turn = crate::support::runner::Turn {
            session: "ses_old".into(),
            epoch: 41,
            sent: true,
            accepted: true,
            conversation: "cnv_old".into(),
            ..Default::default()
        };
        state.turns.insert("trn_old".into(), turn);
    }
    world.runner.register(world.address()).await.unwrap();
    let conversation = world.conversation().await;
    let turn = world.client.send_message(message(&conversation, "x", "builder", "/w/a")).await.unwrap();
    let turn = turn.into_inner().turn.unwrap();
    world.finish(&turn).await;
    world.runner.acknowledged("trn_old").await;
    let calls = world.runner.state().calls.clone();
    let at = |wanted: &dyn Fn(&Call) -> bool| calls.iter().position(wanted).expect("it was called");
    let ended = at(&|call| matches!(call, Call::Acknowledge(a) if a.turn_id == "trn_old"));
    let opened = at(&|call| matches!(call, Call::Open(_)));
    assert!(ended < opened, "{calls:#?}");
}

#[tokio::test]
async fn s48_epochs_are_raised_above_what_a_runner_has_seen() {
    let mut world = World::new().await;
    let conversation = world.conversation().await;
    let first = world.send(&conversation, "one").await;
    world.finish(&first).await;
    // As after a restored backup: the runner has seen later owners.
    let mut request = registration(&world);
    request.epochs.insert(conversation.clone(), 50);
    world.runner.register_as(world.address(), request).await.unwrap();
    let second = world.send(&conversation, "two").await;
    let (second, _) = world.finish(&second).await;
    assert_eq!(second.status(), TurnStatus::Completed);
    assert!(world.runner.opens()[1].epoch > 50);
}

#[tokio::test]
async fn a_slow_opening_on_a_runner_that_lives_is_asked_for_again_and_is_no_loss() {
    let mut world = World::without_runner(|settings| {
        settings.runner_away_timeout = Duration::from_millis(1);
        settings.open_room = Duration::from_millis(1);
    })
    .await;
    {
        let mut state = world.runner.state();
        state.start_timeout = Some(Duration::from_millis(200));
        state.openings.extend([Opening::Forgotten, Opening::Forgotten]);
    }
    world.runner.register(world.address()).await.unwrap();
    let conversation = world.conversation().await;
    let turn = world.send(&conversation, "hello").await;
    let (turn, events) = world.finish(&turn).await;
    assert_eq!(turn.status(), TurnStatus::Completed, "{turn:#?}");
    assert_whole(&events);
    assert_eq!(world.runner.opens().len(), 3);
}

#[tokio::test]
async fn a_runner_whose_openings_never_come_to_an_end_is_given_up() {
    let mut world = World::without_runner(|settings| {
        settings.runner_away_timeout = Duration::from_millis(1);
        settings.open_room = Duration::from_millis(1);
    })
    .await;
    {
        let mut state = world.runner.state();
        state.start_timeout = Some(Duration::from_millis(5));
        state.openings.extend(std::iter::repeat_n(Opening::Forgotten, 1_000));
    }
    world.runner.register(world.address()).await.unwrap();
    let conversation = world.conversation().await;
    let turn = world.send(&conversation, "hello").await;
    let (turn, _) = world.finish(&turn).await;
    assert_eq!(failure(&turn), (FailureReason::RunnerLost, true));
}

#[tokio::test]
async fn an_opening_is_not_repeated_on_a_runner_that_came_back_until_what_it_holds_is_settled() {
    let mut world = World::new().await;
    world.runner.state().openings.extend(std::iter::repeat_n(Opening::Broken, 100_000));
    let conversation = world.conversation().await;
    let turn = world.send(&conversation, "hello").await;
    world.runner.wait("repeats", |s| (s.calls.iter().filter(is_open).count() > 2).then_some(())).await;
    {
        let mut state = world.runner.state();
        state.stubborn = true;
        let old = crate::support::runner::Turn {
            session: "ses_old".into(),
            epoch: 41,
            sent: true,
            accepted: true,
            conversation: "cnv_old".into(),
            ..Default::default()
        };
        state.turns.insert("trn_old".into(), old);
    }
    let claim = control::UnacknowledgedTurn {
        turn_id: "trn_old".into(),
        conversation_id: "cnv_old".into(),
        epoch: 41,
        ended: false,
    };
    let request = control::RegisterRunnerRequest { turns: vec![claim], ..registration(&world) };
    world.runner.register_as(world.address(), request).await.unwrap();
    // What was under way when it came back is over after the first of these rounds.
    let mut opens = Vec::new();
    for cancels in [3, 6, 12] {
        let told = |call: &&Call| matches!(call, Call::Cancel(c) if c.turn_id == "trn_old");
        world
            .runner
            .wait("cancels", |s| (s.calls.iter().filter(told).count() >= cancels).then_some(()))
            .await;
        opens.push(world.runner.opens().len());
    }
    assert_eq!(opens[1..], [opens[0], opens[0]]);
    {
        let mut state = world.runner.state();
        state.stubborn = false;
        state.openings.clear();
    }
    let (turn, _) = world.finish(&turn).await;
    assert_eq!(turn.status(), TurnStatus::Completed);
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "the shape that a filter asks for")]
fn is_open(call: &&Call) -> bool {
    matches!(call, Call::Open(_))
}

#[tokio::test]
async fn s47_a_turn_that_its_runner_ends_lost_frees_its_workspace() {
    let mut world = World::new().await;
    world.runner.state().reply = Reply::Silent;
    let conversation = world.conversation().await;
    let turn = world.send(&conversation, "hello").await;
    world.runner.sent(&turn.turn_id).await;
    world.runner.emit(&turn.turn_id, lost("nobody knows whether it was taken"));
    let (turn, events) = world.finish(&turn).await;
    assert_eq!(turn.status(), TurnStatus::Lost);
    assert_whole(&events);
    world.runner.acknowledged(&turn.turn_id).await;
    world.runner.state().reply = Reply::Echo;
    let next = world.send(&conversation, "next").await;
    assert_eq!(world.finish(&next).await.0.status(), TurnStatus::Completed);
    assert_eq!(world.workspace().await.held_by_turn_id, "");
}

#[tokio::test]
async fn a_turn_that_takes_its_time_does_not_hold_up_what_else_a_runner_held() {
    let mut world = World::without_runner(|_| {}).await;
    let held = |sent: bool, journal| crate::support::runner::Turn {
        session: "ses_old".into(),
        epoch: 41,
        sent,
        accepted: sent,
        conversation: "cnv_old".into(),
        journal,
        ..Default::default()
    };
    let ended: Vec<String> = (0..6).map(|n| format!("trn_ended_{n}")).collect();
    {
        let mut state = world.runner.state();
        state.stubborn = true;
        state.turns.insert("trn_endless".into(), held(true, Vec::new()));
        for id in &ended {
            let end = roundhouse_proto::engine::v1::EventBody { kind: Some(completed("long ago")) };
            state.turns.insert(id.clone(), held(true, vec![end]));
        }
    }
    world.runner.register(world.address()).await.unwrap();
    for id in &ended {
        world.runner.acknowledged(id).await;
    }
    let conversation = world.conversation().await;
    let turn = world.client.send_message(message(&conversation, "x", "builder", "/w/a")).await.unwrap();
    let turn = turn.into_inner().turn.unwrap();
    assert!(world.runner.opens().is_empty(), "not before all is settled");
    world.runner.state().stubborn = false;
    world.finish(&turn).await;
    world.runner.acknowledged("trn_endless").await;
}
