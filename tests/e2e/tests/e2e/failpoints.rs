//! A service dies at each point where something was half done; the turn is answered once all the same.

use roundhouse_proto::engine::v1::evidence_event::Point;
use roundhouse_proto::engine::v1::phase_event::Phase;
use roundhouse_proto::engine::v1::{Outcome, event_body::Kind};
use roundhouse_test_support::{NORMAL, Stack, StackOptions};

use crate::{answer_of, expect_outcome};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Service {
    ControlPlane,
    Runner,
}

/// One turn with a tool, during which the service dies at this point; and one turn after it.
async fn dies_at(service: Service, point: &str) -> anyhow::Result<()> {
    let armed = Some(format!("{point}=return"));
    let options = match service {
        Service::ControlPlane => StackOptions { control_plane_failpoints: armed, ..StackOptions::default() },
        Service::Runner => StackOptions { runner_failpoints: armed, ..StackOptions::default() },
    };
    let mut stack = Stack::start_with(options).await?;
    let conversation = stack.conversation().await?;
    let follower = stack.control.follow(&conversation);
    let text = "[[bash:echo ran >> runs]][[text:through it all]] a turn to die in";
    // The same request again, should the answer have been lost with the server.
    let turn = match stack.control.send_as("req-1", &conversation, text).await {
        Ok(sent) => sent.turn.map(|turn| turn.turn_id),
        Err(_) => None,
    };
    let victim = match service {
        Service::ControlPlane => &mut stack.control_plane,
        Service::Runner => &mut stack.runner,
    };
    let status = victim.wait_exit(NORMAL).await?;
    assert!(!status.success(), "it died at {point}: {status}");
    victim.clear_env("FAILPOINTS");
    victim.start_again().await?;
    let turn = match turn {
        Some(turn) => turn,
        None => stack.control.send_as("req-1", &conversation, text).await?.turn.unwrap_or_default().turn_id,
    };

    let got = expect_outcome(&stack, &follower, &turn, Outcome::Completed).await?;
    assert_eq!(answer_of(&got), "through it all");
    assert_eq!(stack.workspace.lines("runs"), 1, "the tool ran once");
    assert_eq!(stack.model.count_for("a turn to die in"), 2, "one request before the tool, one after it");
    let kinds = follower.kinds(&turn);
    let count = |wanted: fn(&Kind) -> bool| kinds.iter().filter(|kind| wanted(kind)).count();
    assert_eq!(count(|kind| matches!(kind, Kind::ToolCall(_))), 1, "{kinds:?}");
    assert_eq!(count(|kind| matches!(kind, Kind::ToolResult(_))), 1, "{kinds:?}");
    assert_eq!(count(|kind| matches!(kind, Kind::Text(_))), 1, "{kinds:?}");
    let accepted = |kind: &Kind| matches!(kind, Kind::Phase(phase) if phase.phase() == Phase::Accepted);
    assert_eq!(kinds.iter().filter(|kind| accepted(kind)).count(), 1, "accepted once: {kinds:?}");
    for point in [Point::Before, Point::After] {
        let told = |kind: &&Kind| matches!(kind, Kind::Evidence(evidence) if evidence.point() == point);
        assert_eq!(kinds.iter().filter(told).count(), 1, "one look {point:?} the turn: {kinds:?}");
    }
    assert_eq!(stack.control.messages(&conversation).await?.len(), 2);

    stack.control.run_answered(&conversation, "[[text:alive]] another turn", "alive", NORMAL).await?;
    follower.check()
}

macro_rules! dies_at {
    ($($name:ident: $service:ident at $point:literal;)+) => {
        $(
            #[tokio::test]
            async fn $name() -> anyhow::Result<()> {
                dies_at(Service::$service, $point).await
            }
        )+
    };
}

dies_at! {
    control_plane_promoted: ControlPlane at "control-plane::promoted";
    control_plane_before_open: ControlPlane at "control-plane::before-open";
    control_plane_after_open: ControlPlane at "control-plane::after-open";
    control_plane_after_send: ControlPlane at "control-plane::after-send";
    control_plane_before_append: ControlPlane at "control-plane::before-append";
    control_plane_before_close: ControlPlane at "control-plane::before-close";
    control_plane_after_close: ControlPlane at "control-plane::after-close";
    control_plane_before_acknowledge: ControlPlane at "control-plane::before-acknowledge";
    runner_turn_opened: Runner at "runner::turn_opened";
    runner_before_spawn: Runner at "runner::before_spawn";
    runner_after_spawn: Runner at "runner::after_spawn";
    runner_message_journalled: Runner at "runner::message_journalled";
    runner_message_written: Runner at "runner::message_written";
    runner_journalled: Runner at "runner::journalled";
    runner_before_terminal: Runner at "runner::before_terminal";
    runner_synced: Runner at "runner::synced";
    runner_tombstone: Runner at "runner::tombstone";
}
