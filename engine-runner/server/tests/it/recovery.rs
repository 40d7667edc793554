//! The runner dies; its turns do not.

use roundhouse_proto::engine::v1::{
    FailureReason, NumberedEvent, Outcome, event_body::Kind, inspect_response::State,
    start_or_resume_response::Result as Opened, stream_events_response::Item,
};
use roundhouse_test_support::wait_until;

use crate::rig::{BOUND, Rig, Turn, With, names, signal, terminal};

/// All events over a restart: what was seen before it, then the rest after the last number.
async fn rest(rig: &Rig, turn: &Turn, mut seen: Vec<NumberedEvent>) -> Vec<NumberedEvent> {
    let mut client = rig.client().await.unwrap();
    let after = seen.last().map_or(0, |event| event.number);
    let more = turn.follow(&mut client, after, false).await.unwrap().all().await.unwrap();
    assert_eq!(more.first().map(|event| event.number), Some(after + 1));
    seen.extend(more);
    // What is replayed from the start is what was told.
    let again = turn.follow(&mut client, 0, false).await.unwrap().all().await.unwrap();
    assert_eq!(again, seen);
    seen
}

#[tokio::test]
async fn kill_in_a_text_and_the_stream_goes_on_without_gap_or_double() {
    let mut rig = Rig::start().await.unwrap();
    let mut client = rig.client().await.unwrap();
    let turn = Turn::new(&rig, "cnv_1", "ses_1", "trn_1", 1);
    turn.open(&mut client).await.unwrap();
    let gate = rig.path("gate");
    turn.send(&mut client, &format!("[[text:one]] [[gate:{}]] [[text:two]]", gate.display())).await.unwrap();
    let mut follower = turn.follow(&mut client, 0, false).await.unwrap();
    let seen = follower.until(|kind| matches!(kind, Kind::Text(_))).await.unwrap();
    rig.service.kill().await.unwrap();
    assert_eq!(rig.engine_log("\"start\"").len(), 1);
    rig.again().await.unwrap();
    std::fs::write(&gate, "").unwrap();
    let events = rest(&rig, &turn, seen).await;
    assert_eq!(terminal(&events).unwrap().outcome(), Outcome::Completed);
    let order = names(&events);
    assert_eq!(
        order.iter().filter(|name| name.starts_with("text ")).collect::<Vec<_>>(),
        ["text one", "text two"]
    );
    assert!(order.contains(&"notice KIND_READOPTED".to_owned()), "{order:?}");
    assert_eq!(rig.engine_log("\"start\"").len(), 1);
    // The engine is warm again for the next turn.
    let mut client = rig.client().await.unwrap();
    turn.acknowledge(&mut client).await.unwrap();
    let next = Turn::new(&rig, "cnv_1", "ses_1", "trn_2", 2);
    assert_eq!(next.open(&mut client).await.unwrap().result(), Opened::AlreadyOpen);
}

#[tokio::test]
async fn a_turn_that_ended_while_the_runner_was_away_is_told_whole() {
    let mut rig = Rig::start().await.unwrap();
    let mut client = rig.client().await.unwrap();
    let turn = Turn::new(&rig, "cnv_1", "ses_1", "trn_1", 1);
    turn.open(&mut client).await.unwrap();
    let (gate, done) = (rig.path("gate"), rig.path("done"));
    let text = format!(
        "[[gate:{}]] [[bash:echo x >> ran.txt]] [[text:done]] [[bash:touch {}]]",
        gate.display(),
        done.display()
    );
    turn.send(&mut client, &text).await.unwrap();
    let mut follower = turn.follow(&mut client, 0, false).await.unwrap();
    let seen =
        follower.until(|kind| matches!(kind, Kind::Phase(phase) if phase.phase() as i32 == 4)).await.unwrap();
    rig.service.kill().await.unwrap();
    std::fs::write(&gate, "").unwrap();
    wait_until("the engine is done", BOUND, || done.exists()).await.unwrap();
    rig.again().await.unwrap();
    let events = rest(&rig, &turn, seen).await;
    assert_eq!(terminal(&events).unwrap().outcome(), Outcome::Completed);
    assert_eq!(std::fs::read_to_string(rig.work.join("ran.txt")).unwrap(), "x\n");
}

#[tokio::test]
async fn unfinished_text_is_shown_again_after_a_restart() {
    let mut rig = Rig::start().await.unwrap();
    let mut client = rig.client().await.unwrap();
    let turn = Turn::new(&rig, "cnv_1", "ses_1", "trn_1", 1);
    turn.open(&mut client).await.unwrap();
    turn.send(&mut client, "[[slow chunks=100000 delay=10:word ]]").await.unwrap();
    let mut follower = turn.follow(&mut client, 0, true).await.unwrap();
    loop {
        if let Some(Item::Partial(partial)) = follower.next().await.unwrap()
            && partial.offset > 20
        {
            break;
        }
    }
    rig.service.kill().await.unwrap();
    rig.again().await.unwrap();
    let mut client = rig.client().await.unwrap();
    let mut follower = turn.follow(&mut client, 0, true).await.unwrap();
    let first = loop {
        if let Some(Item::Partial(partial)) = follower.next().await.unwrap() {
            break partial;
        }
    };
    assert_eq!(first.offset, 0);
    assert!(first.text.len() > 20 && first.text.starts_with("word word"), "{}", first.text);
    turn.cancel(&mut client).await.unwrap();
    turn.follow(&mut client, 0, false).await.unwrap().all().await.unwrap();
}

#[tokio::test]
async fn keeper_and_runner_dead_after_the_engine_took_the_message_is_process() {
    let mut rig = Rig::start().await.unwrap();
    let mut client = rig.client().await.unwrap();
    let turn = Turn::new(&rig, "cnv_1", "ses_1", "trn_1", 1);
    turn.open(&mut client).await.unwrap();
    turn.send(&mut client, "[[text:said]] [[bash:sleep 1000]]").await.unwrap();
    let mut follower = turn.follow(&mut client, 0, false).await.unwrap();
    let seen = follower.until(|kind| matches!(kind, Kind::ToolCall(_))).await.unwrap();
    let keeper = turn.inspect(&mut client).await.unwrap().process.unwrap().keeper_pid;
    rig.service.kill().await.unwrap();
    signal(u32::try_from(keeper).unwrap(), "KILL").unwrap();
    wait_until("nothing outlives its keeper", BOUND, || rig.processes().is_empty()).await.unwrap();
    rig.again().await.unwrap();
    let events = rest(&rig, &turn, seen).await;
    let ended = terminal(&events).unwrap();
    let failure = ended.failure.clone().unwrap();
    assert_eq!(
        (ended.outcome(), failure.reason()),
        (Outcome::Failed, FailureReason::Process),
        "{:?}",
        names(&events)
    );
    assert!(failure.retryable && ended.session_resumable && ended.result.contains("said"), "{ended:?}");
}

#[tokio::test]
async fn s47_keeper_and_runner_dead_in_doubt_is_lost_and_nothing_is_sent_again() {
    let mut rig = Rig::start().await.unwrap();
    let mut client = rig.client().await.unwrap();
    let turn = Turn::new(&rig, "cnv_1", "ses_1", "trn_1", 1);
    turn.open(&mut client).await.unwrap();
    // A stopped engine reads nothing: the message lies in its pipe.
    for (pid, command) in rig.processes() {
        if command.contains("fake-engine") {
            signal(pid, "STOP").unwrap();
        }
    }
    turn.send(&mut client, "[[text:never]]").await.unwrap();
    let keeper = turn.inspect(&mut client).await.unwrap().process.unwrap().keeper_pid;
    rig.service.kill().await.unwrap();
    signal(u32::try_from(keeper).unwrap(), "KILL").unwrap();
    wait_until("nothing outlives its keeper", BOUND, || rig.processes().is_empty()).await.unwrap();
    rig.again().await.unwrap();
    let events = rest(&rig, &turn, Vec::new()).await;
    let ended = terminal(&events).unwrap();
    assert_eq!(ended.outcome(), Outcome::Lost, "{:?}", names(&events));
    assert!(ended.failure.unwrap().retryable);
    assert_eq!(rig.engine_log("\"start\"").len(), 1);
}

#[tokio::test]
async fn s47_a_message_under_a_newer_runners_keeper_is_lost_and_given_to_no_second_engine() {
    let mut rig = Rig::start().await.unwrap();
    let mut client = rig.client().await.unwrap();
    let turn = Turn::new(&rig, "cnv_1", "ses_1", "trn_1", 1);
    turn.open(&mut client).await.unwrap();
    turn.send(&mut client, "[[append path=ran.txt:x]] [[text:said]] [[stall]]").await.unwrap();
    let mut follower = turn.follow(&mut client, 0, false).await.unwrap();
    let seen = follower.until(|kind| matches!(kind, Kind::Text(_))).await.unwrap();
    let process = turn.inspect(&mut client).await.unwrap().process.unwrap();
    rig.service.kill().await.unwrap();
    // As a newer program would have written it.
    let meta = rig.state.join("sessions/ses_1/spools").join(&process.spool_id).join("meta.json");
    let mut newer: serde_json::Value = serde_json::from_slice(&std::fs::read(&meta).unwrap()).unwrap();
    newer["version"] = 60_000.into();
    std::fs::write(&meta, newer.to_string()).unwrap();
    rig.again().await.unwrap();
    let events = rest(&rig, &turn, seen).await;
    let ended = terminal(&events).unwrap();
    assert_eq!(ended.outcome(), Outcome::Lost, "{:?}", names(&events));
    assert_eq!(rig.engine_log("\"start\"").len(), 1);
    assert_eq!(std::fs::read_to_string(rig.work.join("ran.txt")).unwrap(), "x\n");
    let alive = rig.processes().iter().any(|(pid, _)| i32::try_from(*pid) == Ok(process.keeper_pid));
    assert!(alive, "a newer runner's keeper was ended");
}

/// Opens a turn, stops it in a stall, and kills the runner. Answers what was seen and the keeper with its directory.
async fn stalled(rig: &mut Rig) -> (Turn, Vec<NumberedEvent>, i32, std::path::PathBuf) {
    let mut client = rig.client().await.unwrap();
    let turn = Turn::new(rig, "cnv_1", "ses_1", "trn_1", 1);
    turn.open(&mut client).await.unwrap();
    turn.send(&mut client, "[[text:said]] [[stall]]").await.unwrap();
    let mut follower = turn.follow(&mut client, 0, false).await.unwrap();
    let seen = follower.until(|kind| matches!(kind, Kind::Text(_))).await.unwrap();
    let process = turn.inspect(&mut client).await.unwrap().process.unwrap();
    rig.service.kill().await.unwrap();
    let directory = rig.state.join("sessions/ses_1/spools").join(&process.spool_id);
    (turn, seen, process.keeper_pid, directory)
}

#[tokio::test]
async fn s46_a_stopped_keeper_is_ended_and_nobody_whose_id_was_written_down() {
    let mut rig = Rig::with(With::set("keeper_timeout", "500ms")).await.unwrap();
    let (turn, seen, keeper, directory) = stalled(&mut rig).await;
    signal(u32::try_from(keeper).unwrap(), "STOP").unwrap();
    let mut bystander = std::process::Command::new("sleep").arg("600").spawn().unwrap();
    let meta = directory.join("meta.json");
    let mut stale: serde_json::Value = serde_json::from_slice(&std::fs::read(&meta).unwrap()).unwrap();
    stale["keeper_pid"] = bystander.id().into();
    std::fs::write(&meta, stale.to_string()).unwrap();
    rig.again().await.unwrap();
    let events = rest(&rig, &turn, seen).await;
    let lives = bystander.try_wait().unwrap().is_none();
    bystander.kill().unwrap();
    bystander.wait().unwrap();
    assert!(lives, "a bystander was killed");
    assert_eq!(terminal(&events).unwrap().outcome(), Outcome::Failed, "{:?}", names(&events));
    wait_until("nothing is left", BOUND, || rig.processes().is_empty()).await.unwrap();
}

#[tokio::test]
async fn s47_a_keeper_whose_session_cannot_be_read_is_left_alone() {
    let mut rig = Rig::start().await.unwrap();
    let (turn, seen, keeper, _) = stalled(&mut rig).await;
    std::fs::write(rig.state.join("sessions/ses_1/session.json"), "{").unwrap();
    rig.again().await.unwrap();
    let events = rest(&rig, &turn, seen).await;
    assert_eq!(terminal(&events).unwrap().outcome(), Outcome::Lost, "{:?}", names(&events));
    let alive = rig.processes().iter().any(|(pid, _)| i32::try_from(*pid) == Ok(keeper));
    assert!(alive, "the keeper was ended");
}

#[tokio::test]
async fn a_large_spool_of_a_dead_keeper_is_not_read_into_memory() {
    const LINES: usize = 100;
    let mut rig = Rig::start().await.unwrap();
    let mut client = rig.client().await.unwrap();
    let turn = Turn::new(&rig, "cnv_1", "ses_1", "trn_1", 1);
    turn.open(&mut client).await.unwrap();
    let text = format!("{} [[text:said]] [[stall]]", "[[long bytes=1000000]] ".repeat(LINES));
    turn.send(&mut client, &text).await.unwrap();
    let mut follower = turn.follow(&mut client, 0, false).await.unwrap();
    let seen = follower.until(|kind| matches!(kind, Kind::Text(_))).await.unwrap();
    let keeper = turn.inspect(&mut client).await.unwrap().process.unwrap().keeper_pid;
    rig.service.kill().await.unwrap();
    signal(u32::try_from(keeper).unwrap(), "KILL").unwrap();
    wait_until("nothing outlives its keeper", BOUND, || rig.processes().is_empty()).await.unwrap();
    rig.again().await.unwrap();
    let events = rest(&rig, &turn, seen).await;
    assert_eq!(terminal(&events).unwrap().outcome(), Outcome::Failed, "{:?}", names(&events));
    let status = std::fs::read_to_string(format!("/proc/{}/status", rig.service.pid().unwrap())).unwrap();
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    let peak: usize = peak.trim().trim_end_matches(" kB").parse().unwrap();
    assert!(peak < LINES * 1000 * 7 / 10, "{peak} kB at most for a spool of {LINES} MB");
}

#[tokio::test]
async fn a_keeper_that_dies_under_a_living_runner_ends_the_turn() {
    let rig = Rig::start().await.unwrap();
    let mut client = rig.client().await.unwrap();
    let turn = Turn::new(&rig, "cnv_1", "ses_1", "trn_1", 1);
    turn.open(&mut client).await.unwrap();
    turn.send(&mut client, "[[text:said]] [[stall]]").await.unwrap();
    let mut follower = turn.follow(&mut client, 0, false).await.unwrap();
    follower.until(|kind| matches!(kind, Kind::Text(_))).await.unwrap();
    let keeper = turn.inspect(&mut client).await.unwrap().process.unwrap().keeper_pid;
    signal(u32::try_from(keeper).unwrap(), "KILL").unwrap();
    let events = turn.follow(&mut client, 0, false).await.unwrap().all().await.unwrap();
    assert_eq!(terminal(&events).unwrap().failure.unwrap().reason(), FailureReason::Process);
    wait_until("nothing outlives its keeper", BOUND, || rig.processes().is_empty()).await.unwrap();
}

#[tokio::test]
async fn a_stopped_keeper_is_killed_by_a_cancel() {
    let with = With::set("keeper_timeout", "500ms")
        .and("cancel_interrupt_grace", "200ms")
        .and("cancel_term_grace", "200ms");
    let rig = Rig::with(with).await.unwrap();
    let mut client = rig.client().await.unwrap();
    let turn = Turn::new(&rig, "cnv_1", "ses_1", "trn_1", 1);
    turn.open(&mut client).await.unwrap();
    turn.send(&mut client, "[[text:said]] [[stall]]").await.unwrap();
    let mut follower = turn.follow(&mut client, 0, false).await.unwrap();
    follower.until(|kind| matches!(kind, Kind::Text(_))).await.unwrap();
    let keeper = u32::try_from(turn.inspect(&mut client).await.unwrap().process.unwrap().keeper_pid).unwrap();
    signal(keeper, "STOP").unwrap();
    turn.cancel(&mut client).await.unwrap();
    let events = turn.follow(&mut client, 0, false).await.unwrap().all().await.unwrap();
    assert_eq!(terminal(&events).unwrap().outcome(), Outcome::Cancelled, "{:?}", names(&events));
    wait_until("nothing is left", BOUND, || rig.processes().is_empty()).await.unwrap();
}

#[tokio::test]
async fn an_idle_engine_is_taken_up_and_an_ended_turn_waits_for_acknowledge() {
    let mut rig = Rig::start().await.unwrap();
    let mut client = rig.client().await.unwrap();
    let turn = Turn::new(&rig, "cnv_1", "ses_1", "trn_1", 1);
    turn.open(&mut client).await.unwrap();
    turn.send(&mut client, "[[text:one]]").await.unwrap();
    let events = turn.follow(&mut client, 0, false).await.unwrap().all().await.unwrap();
    rig.service.kill().await.unwrap();
    rig.again().await.unwrap();
    let mut client = rig.client().await.unwrap();
    assert_eq!(turn.follow(&mut client, 0, false).await.unwrap().all().await.unwrap(), events);
    let seen = turn.inspect(&mut client).await.unwrap();
    assert_eq!((seen.state(), seen.acknowledged), (State::Ended, false));
    turn.acknowledge(&mut client).await.unwrap();
    let next = Turn::new(&rig, "cnv_1", "ses_1", "trn_2", 2);
    assert_eq!(next.open(&mut client).await.unwrap().result(), Opened::AlreadyOpen);
    next.send(&mut client, "[[recall]]").await.unwrap();
    let events = next.follow(&mut client, 0, false).await.unwrap().all().await.unwrap();
    assert!(terminal(&events).unwrap().result.contains("[[text:one]]"));
    assert_eq!(rig.engine_log("\"start\"").len(), 1);
}

#[tokio::test]
async fn an_orderly_stop_closes_idle_engines_and_leaves_running_turns_to_their_keepers() {
    let mut rig = Rig::start().await.unwrap();
    let mut client = rig.client().await.unwrap();
    let idle = Turn::new(&rig, "cnv_1", "ses_1", "trn_1", 1);
    idle.run(&mut client, "[[text:one]]").await.unwrap();
    let turn = Turn::new(&rig, "cnv_2", "ses_2", "trn_2", 1);
    turn.open(&mut client).await.unwrap();
    let gate = rig.path("gate");
    turn.send(&mut client, &format!("[[text:a]] [[gate:{}]] [[text:b]]", gate.display())).await.unwrap();
    let mut follower = turn.follow(&mut client, 0, false).await.unwrap();
    let seen = follower.until(|kind| matches!(kind, Kind::Text(_))).await.unwrap();
    let status = rig.service.stop("TERM", BOUND).await.unwrap();
    assert!(status.success(), "{status}");
    let left = rig.processes();
    assert_eq!(left.iter().filter(|(_, command)| command.contains("fake-engine")).count(), 1, "{left:?}");
    rig.again().await.unwrap();
    std::fs::write(&gate, "").unwrap();
    let events = rest(&rig, &turn, seen).await;
    assert_eq!(terminal(&events).unwrap().outcome(), Outcome::Completed);
}

#[tokio::test]
async fn stop_turns_cancels_them_and_leaves_no_process() {
    let mut rig = Rig::with(With { args: vec!["--stop-turns"], ..With::default() }).await.unwrap();
    let mut client = rig.client().await.unwrap();
    let turn = Turn::new(&rig, "cnv_1", "ses_1", "trn_1", 1);
    turn.open(&mut client).await.unwrap();
    turn.send(&mut client, "[[stall]]").await.unwrap();
    rig.service.stop("TERM", BOUND).await.unwrap();
    assert_eq!(rig.processes(), []);
    rig.again().await.unwrap();
    let mut client = rig.client().await.unwrap();
    let events = turn.follow(&mut client, 0, false).await.unwrap().all().await.unwrap();
    assert_eq!(terminal(&events).unwrap().outcome(), Outcome::Cancelled);
}

#[cfg(feature = "failpoints")]
mod points {
    use super::*;

    /// Runs a turn into a failpoint, starts the runner again, and answers the turn's end and what came after it.
    async fn crash(point: &'static str, text: &str) -> (Rig, Turn) {
        let mut rig = Rig::with(With::failpoint(point)).await.unwrap();
        let git = std::process::Command::new("git").args(["init", "-q"]).current_dir(&rig.work).status();
        assert!(git.unwrap().success());
        let mut client = rig.client().await.unwrap();
        let turn = Turn::new(&rig, "cnv_1", "ses_1", "trn_1", 1);
        // Whichever call meets the point fails; what is durable by then is what counts.
        if turn.open(&mut client).await.is_ok() {
            let _ = turn.send(&mut client, text).await;
        }
        rig.service.wait_exit(BOUND).await.unwrap();
        rig.again().await.unwrap();
        (rig, turn)
    }

    #[tokio::test]
    async fn a_turn_that_is_just_taken_up_is_shown_as_far_as_it_was() {
        let mut rig = Rig::start().await.unwrap();
        let (turn, _, keeper, _) = stalled(&mut rig).await;
        // Its task gets to nothing for a while.
        rig.service.set_env("FAILPOINTS", "runner::turn_begins=2000*pause");
        rig.service.start_again().await.unwrap();
        let facts = turn.inspect(&mut rig.client().await.unwrap()).await.unwrap();
        assert_eq!(facts.state(), State::Running);
        assert_eq!(facts.process.unwrap().keeper_pid, keeper);
    }

    /// What a control plane does after a restart: repeat what it does not know to be done.
    async fn go_on(rig: &Rig, turn: &Turn, text: &str) -> Vec<NumberedEvent> {
        let mut client = rig.client().await.unwrap();
        let state = turn.inspect(&mut client).await.unwrap().state();
        if matches!(state, State::Unknown | State::Opened) {
            turn.open(&mut client).await.unwrap();
            turn.send(&mut client, text).await.unwrap();
        }
        turn.follow(&mut client, 0, false).await.unwrap().all().await.unwrap()
    }

    #[tokio::test]
    async fn at_every_point_before_the_end_the_turn_completes_once() {
        for point in [
            "runner::turn_opened=return",
            "runner::before_spawn=return",
            "runner::after_spawn=return",
            "runner::message_journalled=return",
            "runner::message_written=return",
            "runner::journalled=1*return",
            "runner::journalled=2*return",
            "runner::journalled=3*return",
            "runner::journalled=5*return",
            "runner::synced=1*return",
            "runner::before_terminal=return",
            "runner::synced=2*return",
        ] {
            let text = "[[append path=ran.txt:x]] [[text:done]]";
            let (rig, turn) = crash(point, text).await;
            let events = go_on(&rig, &turn, text).await;
            let ended = terminal(&events).unwrap();
            assert_eq!(ended.outcome(), Outcome::Completed, "{point}: {:?}", names(&events));
            let order = names(&events);
            for once in ["phase PHASE_ACCEPTED", "text done", "session STATE_OPENED", "tool_call Write"] {
                assert_eq!(
                    order.iter().filter(|name| *name == once).count(),
                    1,
                    "{point}: {once} in {order:?}"
                );
            }
            // The worktree may have been looked at too late to be told; never is it told twice.
            for most in ["evidence POINT_BEFORE", "evidence POINT_AFTER"] {
                let told = order.iter().filter(|name| *name == most).count();
                assert!(told <= 1, "{point}: {most} in {order:?}");
            }
            assert_eq!(std::fs::read_to_string(rig.work.join("ran.txt")).unwrap(), "x\n", "{point}");
            let mut client = rig.client().await.unwrap();
            turn.acknowledge(&mut client).await.unwrap();
        }
    }

    #[tokio::test]
    async fn at_every_point_the_numbers_that_were_told_stand() {
        for count in 1..=6 {
            let point: &'static str =
                Box::leak(format!("runner::journalled={count}*return").into_boxed_str());
            let mut rig = Rig::with(With::failpoint(point)).await.unwrap();
            let mut client = rig.client().await.unwrap();
            let turn = Turn::new(&rig, "cnv_1", "ses_1", "trn_1", 1);
            let text = "[[text:one]] [[bash:echo x >> ran.txt]] [[text:two]]";
            let mut seen = Vec::new();
            if turn.open(&mut client).await.is_ok() {
                let follower = turn.follow(&mut client, 0, false).await;
                let _ = turn.send(&mut client, text).await;
                if let Ok(mut follower) = follower {
                    while let Ok(Some(item)) = follower.next().await {
                        if let Item::Event(event) = item {
                            seen.push(event);
                        }
                    }
                }
            }
            rig.service.wait_exit(BOUND).await.unwrap();
            rig.again().await.unwrap();
            let all = go_on(&rig, &turn, text).await;
            assert_eq!(all[..seen.len()], seen[..], "{point}");
            assert_eq!(terminal(&all).unwrap().outcome(), Outcome::Completed, "{point}: {:?}", names(&all));
            assert_eq!(std::fs::read_to_string(rig.work.join("ran.txt")).unwrap(), "x\n", "{point}");
        }
    }

    #[tokio::test]
    async fn s29_a_reader_that_makes_more_of_each_frame_changes_what_comes_and_never_what_came() {
        let mut rig = Rig::start().await.unwrap();
        let mut client = rig.client().await.unwrap();
        let turn = Turn::new(&rig, "cnv_1", "ses_1", "trn_1", 1);
        turn.open(&mut client).await.unwrap();
        let gate = rig.path("gate");
        let text = format!("[[text:one]] [[text:two]] [[gate:{}]] [[text:three]]", gate.display());
        turn.send(&mut client, &text).await.unwrap();
        let mut follower = turn.follow(&mut client, 0, false).await.unwrap();
        let is_two = |kind: &Kind| matches!(kind, Kind::Text(text) if text.text == "two");
        let seen = follower.until(is_two).await.unwrap();
        rig.service.kill().await.unwrap();
        rig.service.set_env("FAILPOINTS", "runner::more_events=fails");
        rig.service.start_again().await.unwrap();
        std::fs::write(&gate, "").unwrap();
        let held = seen.len();
        let events = rest(&rig, &turn, seen).await;
        assert_eq!(terminal(&events).unwrap().outcome(), Outcome::Completed);
        let order = names(&events);
        let texts: Vec<_> = order.iter().filter(|name| name.starts_with("text ")).collect();
        assert_eq!(texts, ["text one", "text two", "text three"], "{order:?}");
        let more = |names: &[String]| names.iter().filter(|name| *name == "notice KIND_WARNING").count();
        assert_eq!(more(&order[..held]), 0, "{order:?}");
        assert!(more(&order[held..]) > 0, "what came after it is read as it reads: {order:?}");
    }

    #[tokio::test]
    async fn a_keeper_that_missed_the_end_of_its_turn_is_told_by_the_next_runner() {
        let mut rig = Rig::with(With::failpoint("runner::end_turn=1*fail")).await.unwrap();
        let mut client = rig.client().await.unwrap();
        let turn = Turn::new(&rig, "cnv_1", "ses_1", "trn_1", 1);
        turn.run(&mut client, "[[text:one]]").await.unwrap();
        let spool =
            std::fs::read_dir(rig.state.join("sessions/ses_1/spools")).unwrap().next().unwrap().unwrap();
        let marked = || {
            let frames = roundhouse_process::SpoolReader::new(&spool.path()).read_all().unwrap();
            frames.iter().any(|frame| {
                matches!(&frame.body,
                roundhouse_process::FrameBody::TurnEnd { turn_id } if turn_id == "trn_1")
            })
        };
        rig.service.kill().await.unwrap();
        assert!(!marked(), "the keeper had the mark");
        rig.again().await.unwrap();
        wait_until("the keeper knows the turn's end", BOUND, marked).await.unwrap();
        let mut client = rig.client().await.unwrap();
        let next = Turn::new(&rig, "cnv_1", "ses_1", "trn_2", 2);
        assert_eq!(next.open(&mut client).await.unwrap().result(), Opened::AlreadyOpen);
    }

    #[tokio::test]
    async fn a_message_that_no_process_was_given_goes_to_another_one() {
        let mut rig = Rig::with(With::failpoint("runner::message_journalled=return")).await.unwrap();
        let mut client = rig.client().await.unwrap();
        let turn = Turn::new(&rig, "cnv_1", "ses_1", "trn_1", 1);
        turn.open(&mut client).await.unwrap();
        let keeper = turn.inspect(&mut client).await.unwrap().process.unwrap().keeper_pid;
        let _ = turn.send(&mut client, "[[append path=ran.txt:x]] [[text:done]]").await;
        rig.service.wait_exit(BOUND).await.unwrap();
        signal(u32::try_from(keeper).unwrap(), "KILL").unwrap();
        wait_until("nothing outlives its keeper", BOUND, || rig.processes().is_empty()).await.unwrap();
        rig.again().await.unwrap();
        let events = rest(&rig, &turn, Vec::new()).await;
        assert_eq!(terminal(&events).unwrap().outcome(), Outcome::Completed, "{:?}", names(&events));
        assert_eq!(std::fs::read_to_string(rig.work.join("ran.txt")).unwrap(), "x\n");
        assert_eq!(rig.engine_log("\"start\"").len(), 2);
    }

    #[tokio::test]
    async fn a_tombstone_that_was_written_answers_though_the_journal_stayed() {
        let mut rig = Rig::with(With::failpoint("runner::tombstone=return")).await.unwrap();
        let mut client = rig.client().await.unwrap();
        let turn = Turn::new(&rig, "cnv_1", "ses_1", "trn_1", 1);
        turn.open(&mut client).await.unwrap();
        turn.send(&mut client, "[[text:one]]").await.unwrap();
        turn.follow(&mut client, 0, false).await.unwrap().all().await.unwrap();
        let _ = turn.acknowledge(&mut client).await;
        rig.service.wait_exit(BOUND).await.unwrap();
        rig.again().await.unwrap();
        let mut client = rig.client().await.unwrap();
        turn.acknowledge(&mut client).await.unwrap();
        assert!(turn.inspect(&mut client).await.unwrap().acknowledged);
    }

    #[tokio::test]
    async fn s44_a_cancel_beside_a_refused_opening_is_remembered() {
        let with = With {
            script: Some("@start\n[[exit code=3]]\n"),
            failpoints: Some("runner::discard=1000*pause"),
            ..With::default()
        };
        let rig = Rig::with(with).await.unwrap();
        let mut client = rig.client().await.unwrap();
        let turn = Turn::new(&rig, "cnv_1", "ses_1", "trn_1", 1);
        turn.open(&mut client).await.unwrap_err();
        let starts = rig.engine_log("\"start\"").len();
        turn.cancel(&mut client).await.unwrap();
        let directory = rig.state.join("turns/trn_1");
        // Nothing of the refused turn is left that could still be removed with what came after it.
        assert!(!directory.join("journal").exists());
        assert!(directory.join("tombstone.json").exists());
        turn.open(&mut client).await.unwrap_err();
        assert_eq!(rig.engine_log("\"start\"").len(), starts);
    }

    #[tokio::test]
    async fn a_cancel_in_a_warm_opening_keeps_the_engine_warm() {
        let rig = Rig::with(With::failpoint("runner::warm=15000*pause")).await.unwrap();
        let mut client = rig.client().await.unwrap();
        let first = Turn::new(&rig, "cnv_1", "ses_1", "trn_1", 1);
        first.run(&mut client, "[[text:one]]").await.unwrap();
        let turn = Turn::new(&rig, "cnv_1", "ses_1", "trn_2", 2);
        // The opening does not wait for the mark of the turn's begin; the message does.
        assert_eq!(turn.open(&mut client).await.unwrap().result(), Opened::AlreadyOpen);
        let (sending, mut sender) = (turn.clone(), rig.client().await.unwrap());
        let sending = tokio::spawn(async move { sending.send(&mut sender, "[[text:two]]").await });
        while turn.inspect(&mut client).await.unwrap().state() != State::Sent {
            tokio::task::yield_now().await;
        }
        turn.cancel(&mut client).await.unwrap();
        sending.await.unwrap().unwrap();
        let events = turn.follow(&mut client, 0, false).await.unwrap().all().await.unwrap();
        assert_eq!(terminal(&events).unwrap().outcome(), Outcome::Cancelled, "{:?}", names(&events));
        turn.acknowledge(&mut client).await.unwrap();
        let next = Turn::new(&rig, "cnv_1", "ses_1", "trn_3", 3);
        assert_eq!(next.open(&mut client).await.unwrap().result(), Opened::AlreadyOpen);
        assert_eq!(rig.engine_log("\"start\"").len(), 1);
        assert_eq!(rig.engine_log("[[text:two]]").len(), 0, "the engine has nothing of it");
    }

    #[tokio::test]
    async fn a_warm_engine_whose_keeper_marks_no_begin_is_replaced_before_the_message_is_given() {
        let rig = Rig::with(With::failpoint("runner::no_begin=fail")).await.unwrap();
        let mut client = rig.client().await.unwrap();
        Turn::new(&rig, "cnv_1", "ses_1", "trn_1", 1).run(&mut client, "[[text:one]]").await.unwrap();
        let turn = Turn::new(&rig, "cnv_1", "ses_1", "trn_2", 2);
        assert_eq!(turn.open(&mut client).await.unwrap().result(), Opened::AlreadyOpen);
        // While it is being replaced, too, the message is taken, and waits.
        turn.send(&mut client, "[[text:two]]").await.unwrap();
        let events = turn.follow(&mut client, 0, false).await.unwrap().all().await.unwrap();
        assert_eq!(terminal(&events).unwrap().outcome(), Outcome::Completed, "{:?}", names(&events));
        assert_eq!(rig.engine_log("\"start\"").len(), 2, "the session was resumed by another process");
        assert_eq!(rig.engine_log("[[text:two]]").len(), 1, "the message was given once");
    }

    #[tokio::test]
    async fn a_cancel_before_any_message_keeps_the_engine_over_a_restart() {
        let mut rig = Rig::with(With::failpoint("runner::stop_journalled=return")).await.unwrap();
        let mut client = rig.client().await.unwrap();
        let turn = Turn::new(&rig, "cnv_1", "ses_1", "trn_1", 1);
        turn.open(&mut client).await.unwrap();
        let _ = turn.cancel(&mut client).await;
        rig.service.wait_exit(BOUND).await.unwrap();
        rig.again().await.unwrap();
        let events = rest(&rig, &turn, Vec::new()).await;
        assert_eq!(terminal(&events).unwrap().outcome(), Outcome::Cancelled, "{:?}", names(&events));
        let mut client = rig.client().await.unwrap();
        turn.acknowledge(&mut client).await.unwrap();
        let next = Turn::new(&rig, "cnv_1", "ses_1", "trn_2", 2);
        assert_eq!(next.open(&mut client).await.unwrap().result(), Opened::AlreadyOpen);
        assert_eq!(rig.engine_log("\"start\"").len(), 1);
    }
}

#[tokio::test]
async fn s41_a_runner_that_was_stopped_takes_its_own_pause_for_no_silence() {
    let rig = Rig::with(With::set("idle_timeout", "1s")).await.unwrap();
    let mut client = rig.client().await.unwrap();
    let turn = Turn::new(&rig, "cnv_1", "ses_1", "trn_1", 1);
    turn.open(&mut client).await.unwrap();
    // Never silent for as long as the limit, and longer at work than the limit.
    let done = rig.path("done");
    let text = format!("[[slow chunks=30 delay=100:word ]][[bash:touch {}]][[text:through]]", done.display());
    turn.send(&mut client, &text).await.unwrap();
    let mut follower = turn.follow(&mut client, 0, true).await.unwrap();
    while !matches!(follower.next().await.unwrap(), Some(Item::Partial(_))) {}
    let runner = rig.service.pid().unwrap();
    signal(runner, "STOP").unwrap();
    wait_until("the engine has said it all", BOUND, || done.exists()).await.unwrap();
    signal(runner, "CONT").unwrap();
    let events = turn.follow(&mut client, 0, false).await.unwrap().all().await.unwrap();
    let ended = terminal(&events).unwrap();
    assert_eq!(ended.outcome(), Outcome::Completed, "{:?}: {:?}", ended.failure, names(&events));
}

#[tokio::test]
async fn s45_an_engine_that_somebody_ends_from_outside_is_a_failure_and_no_cancel() {
    let rig = Rig::start().await.unwrap();
    let mut client = rig.client().await.unwrap();
    let turn = Turn::new(&rig, "cnv_1", "ses_1", "trn_1", 1);
    turn.open(&mut client).await.unwrap();
    turn.send(&mut client, "[[text:said]][[stall]]").await.unwrap();
    let mut follower = turn.follow(&mut client, 0, false).await.unwrap();
    follower.until(|kind| matches!(kind, Kind::Text(_))).await.unwrap();
    let keeper = turn.inspect(&mut client).await.unwrap().process.unwrap().keeper_pid;
    // As a host does that shuts down.
    signal(u32::try_from(keeper).unwrap(), "TERM").unwrap();
    let events = turn.follow(&mut client, 0, false).await.unwrap().all().await.unwrap();
    let ended = terminal(&events).unwrap();
    let failure = ended.failure.clone().unwrap();
    assert_eq!((ended.outcome(), failure.reason()), (Outcome::Failed, FailureReason::Process), "{events:?}");
    assert!(failure.retryable && ended.session_resumable, "{ended:?}");
}
