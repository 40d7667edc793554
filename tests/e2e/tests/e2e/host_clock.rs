//! What a host does behind the control plane's back: its wall clock jumps, and a second control plane is started on the
//! same state.

use std::process::Command;

use anyhow::Context as _;
use roundhouse_e2e::{replay, told};
use roundhouse_proto::{
    control::v1::{Role, TurnStatus},
    engine::v1::{Outcome, PermissionDecision},
};
use roundhouse_test_support::{Agent, BRIEF, NORMAL, Stack, StackOptions, bins, wait_for};

use crate::{expect_outcome, permission::answer};

/// An hour back and forth, also over a restart: nobody is lost, nothing expires, and order stays what it was.
#[tokio::test]
async fn a_wall_clock_set_back_and_forth_an_hour_loses_nobody_and_changes_no_order() -> anyhow::Result<()> {
    let points = tempfile::tempdir()?;
    let mut options = StackOptions::default()
        .set("control_plane.runner_lost_after", "5s")
        .set("control_plane.heartbeat_interval", "300ms")
        .agents(&[Agent::new("builder").permissions("ask")])
        .fake_engine()?;
    options.failpoint_dir = Some(points.path().canonicalize()?);
    let mut stack = Stack::start_with(options).await?;
    let set = |seconds: &str| std::fs::write(points.path().join("clock"), seconds);
    let conversation = stack.conversation().await?;
    let follower = stack.control.follow(&conversation);
    let mut said = Vec::new();
    for (n, shift) in ["0", "-3600", "3600", "-3600", "0"].into_iter().enumerate() {
        set(shift)?;
        // A turn that begins under one clock and ends under another.
        let text = format!("[[bash ask:echo acted >> acts]][[text:answer {n}]] question {n}");
        let turn = stack.control.begin(&conversation, &text).await?;
        said.push(text);
        let asked = wait_for("it asks", NORMAL, || async {
            Ok(stack.control.permissions(&conversation, false).await?.pop())
        })
        .await?;
        set(if shift == "3600" { "-3600" } else { "3600" })?;
        if n == 1 {
            stack.control_plane.kill().await?;
            stack.control_plane.start_again().await?;
            stack.wait_runner().await?;
        }
        stack.control.wait_status(&turn, TurnStatus::WaitingForPermission, BRIEF).await?;
        assert!(answer(&stack.control, &asked.request_id, PermissionDecision::Allow).await?);
        expect_outcome(&stack, &follower, &turn, Outcome::Completed).await?;
        assert_eq!(stack.workspace.lines("acts"), n + 1);
    }
    let messages = stack.control.messages(&conversation).await?;
    let users: Vec<_> = messages.iter().filter(|one| one.role() == Role::User).map(|one| &one.text).collect();
    assert_eq!(users, said.iter().collect::<Vec<_>>(), "in the order in which they came");
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH)?.as_secs();
    let wrong = messages.iter().filter(|one| {
        one.create_time.is_some_and(|at| u64::try_from(at.seconds).unwrap_or(0).abs_diff(now) > 3_000)
    });
    assert!(wrong.count() > 2, "the clock was wrong: {messages:?}");
    let ids: Vec<_> = stack.control.turns(&conversation).await?.into_iter().map(|one| one.turn_id).collect();
    let mut streamed: Vec<String> = Vec::new();
    for item in follower.items() {
        if let Some(roundhouse_proto::control::v1::stream_events_response::Item::Turn(turn)) = item.item
            && !streamed.contains(&turn.turn_id)
        {
            streamed.push(turn.turn_id);
        }
    }
    assert_eq!(ids, streamed, "turns are listed in the order in which they came");
    assert_eq!(told(replay(&stack.control, &conversation).await?), told(follower.items()));
    follower.check()
}

#[tokio::test]
async fn a_second_control_plane_on_one_database_is_refused_with_a_sentence() -> anyhow::Result<()> {
    let stack = Stack::start_with(StackOptions::default().fake_engine()?).await?;
    let conversation = stack.conversation().await?;
    let config = stack.root().join("roundhouse.toml");
    let second = Command::new(bins::bin("control-plane")?)
        .args(["--config".as_ref(), config.as_os_str()])
        .args(["--listen", "127.0.0.1:0"])
        .env_clear()
        .env("HOME", stack.root().join("home"))
        .output()
        .context("it does not start")?;
    let words = String::from_utf8_lossy(&second.stderr).into_owned();
    assert!(!second.status.success(), "{words}");
    assert!(words.contains("in use by another process"), "{words}");
    assert!(words.contains(&stack.control_plane_state().display().to_string()), "it says where: {words}");
    // The first goes on as if nothing had been.
    stack.control.run_answered(&conversation, "[[text:here]] still there?", "here", NORMAL).await?;
    Ok(())
}
