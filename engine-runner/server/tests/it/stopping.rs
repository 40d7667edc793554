//! Cancels in every case that is defined, timers, and what is left of a turn afterwards.

use std::time::Duration;

use pretty_assertions::assert_eq;
use roundhouse_proto::engine::v1::{
    CloseSessionRequest, FailureReason, Outcome, cancel_response::Result as Cancelled, event_body::Kind,
    inspect_response::State, start_or_resume_response::Result as Opened, stream_events_response::Item,
};
use roundhouse_test_support::wait_until;
use tokio::time::Instant;

use crate::rig::{BOUND, Rig, Turn, With, names, reason, signal, terminal};

/// Runs one more turn on the session and says how it was opened.
async fn next_turn(rig: &Rig, number: u64) -> Opened {
    let mut client = rig.client().await.unwrap();
    let turn = Turn::new(rig, "cnv_1", "ses_1", &format!("trn_{number}"), number);
    let opened = turn.open(&mut client).await.unwrap();
    turn.send(&mut client, "[[text:next]]").await.unwrap();
    let events = turn.follow(&mut client, 0, false).await.unwrap().all().await.unwrap();
    assert_eq!(terminal(&events).unwrap().result, "next", "{:?}", names(&events));
    turn.acknowledge(&mut client).await.unwrap();
    opened.result()
}

#[tokio::test]
async fn s45_cancel_in_a_text_keeps_it_and_the_process() {
    let rig = Rig::start().await.unwrap();
    let mut client = rig.client().await.unwrap();
    let turn = Turn::new(&rig, "cnv_1", "ses_1", "trn_1", 1);
    turn.open(&mut client).await.unwrap();
    turn.send(&mut client, "[[slow chunks=1000 delay=20:word ]]").await.unwrap();
    let mut follower = turn.follow(&mut client, 0, true).await.unwrap();
    let mut seen = String::new();
    while !seen.contains("word word") {
        if let Some(Item::Partial(partial)) = follower.next().await.unwrap() {
            seen.push_str(&partial.text);
        }
    }
    assert_eq!(turn.cancel(&mut client).await.unwrap(), Cancelled::Stopping);
    // Twice: the second finds the first, or its end.
    let again = turn.cancel(&mut client).await.unwrap();
    assert!(matches!(again, Cancelled::Stopping | Cancelled::AlreadyEnded));
    let events = turn.follow(&mut client, 0, false).await.unwrap().all().await.unwrap();
    let ended = terminal(&events).unwrap();
    assert_eq!(ended.outcome(), Outcome::Cancelled);
    assert_eq!(ended.failure.unwrap().reason(), FailureReason::Cancelled);
    assert!(ended.session_resumable);
    let kept = names(&events).into_iter().find(|name| name.starts_with("text word word"));
    assert!(kept.is_some(), "{:?}", names(&events));
    assert_eq!(turn.cancel(&mut client).await.unwrap(), Cancelled::AlreadyEnded);
    turn.acknowledge(&mut client).await.unwrap();
    assert_eq!(turn.cancel(&mut client).await.unwrap(), Cancelled::AlreadyEnded);
    assert_eq!(next_turn(&rig, 2).await, Opened::AlreadyOpen);
}

#[cfg(feature = "failpoints")]
#[tokio::test]
async fn s43_a_cancel_gets_through_to_an_engine_that_prints_without_pause() {
    let with = With {
        // Slower than the engine: there is always more to read, and whoever reads it ahead goes on meanwhile.
        failpoints: Some("runner::frames_held=100*pause"),
        ..With::set("cancel_interrupt_grace", "300ms").and("cancel_term_grace", "300ms")
    };
    let rig = Rig::with(with).await.unwrap();
    let mut client = rig.client().await.unwrap();
    let turn = Turn::new(&rig, "cnv_1", "ses_1", "trn_1", 1);
    turn.open(&mut client).await.unwrap();
    let text = "[[ignore:interrupt,term]] [[text:go]] [[events count=100000000 bytes=8]]";
    turn.send(&mut client, text).await.unwrap();
    let mut follower = turn.follow(&mut client, 0, false).await.unwrap();
    follower.until(|kind| matches!(kind, Kind::Text(text) if text.text != "go")).await.unwrap();
    drop(follower);
    let before = std::time::Instant::now();
    turn.cancel(&mut client).await.unwrap();
    wait_until("the engine is gone", BOUND, || {
        !rig.processes().iter().any(|(_, command)| command.contains("fake-engine"))
    })
    .await
    .unwrap();
    // Two graces, and what a busy machine adds; without end it would print for minutes.
    assert!(before.elapsed() < BOUND / 2, "{:?}", before.elapsed());
    wait_until("the turn is over", BOUND * 2, || rig.processes().is_empty()).await.unwrap();
}

#[tokio::test]
async fn s43_cancel_in_a_tool_leaves_no_process_of_the_turn() {
    let rig = Rig::start().await.unwrap();
    let mut client = rig.client().await.unwrap();
    let turn = Turn::new(&rig, "cnv_1", "ses_1", "trn_1", 1);
    turn.open(&mut client).await.unwrap();
    let ready = rig.path("ready");
    let text = format!(
        "[[bash:setsid nohup sh -c 'touch {}; exec sleep 1000' >/dev/null 2>&1 & sleep 1001]]",
        ready.display()
    );
    turn.send(&mut client, &text).await.unwrap();
    wait_until("the tool runs", BOUND, || ready.exists()).await.unwrap();
    turn.cancel(&mut client).await.unwrap();
    let events = turn.follow(&mut client, 0, false).await.unwrap().all().await.unwrap();
    assert_eq!(terminal(&events).unwrap().outcome(), Outcome::Cancelled);
    let left: Vec<_> =
        rig.processes().into_iter().filter(|(_, command)| command.contains("sleep 100")).collect();
    assert_eq!(left, [], "{:?}", names(&events));
    turn.acknowledge(&mut client).await.unwrap();
    // The engine was ended with what its turn had left behind; nothing of the session is lost.
    assert_eq!(next_turn(&rig, 2).await, Opened::Resumed);
}

#[tokio::test]
async fn s44_a_cancel_does_not_wait_for_the_home_of_its_engine_nor_start_one() {
    // A keeper that is stopped holds up the end of its engine, and that holds the home for as long as the test wants.
    let rig = Rig::with(With::set("keeper_timeout", "10m")).await.unwrap();
    let mut client = rig.client().await.unwrap();
    let first = Turn::new(&rig, "cnv_1", "ses_1", "trn_1", 1);
    first.open(&mut client).await.unwrap();
    let keeper = first.inspect(&mut client).await.unwrap().process.unwrap().keeper_pid;
    let keeper = u32::try_from(keeper).unwrap();
    first.send(&mut client, "[[text:one]]").await.unwrap();
    first.follow(&mut client, 0, false).await.unwrap().all().await.unwrap();
    signal(keeper, "STOP").unwrap();
    let mut closing = client.clone();
    let close = tokio::spawn(async move {
        let request = CloseSessionRequest { session_id: "ses_1".to_owned() };
        closing.close_session(request).await.map(|response| response.into_inner().was_open)
    });
    let log = rig.path("runner.log");
    wait_until("the close has begun", BOUND, || {
        std::fs::read_to_string(&log).unwrap_or_default().contains("an engine is closed")
    })
    .await
    .unwrap();
    let second = Turn::new(&rig, "cnv_2", "ses_2", "trn_2", 1);
    let (turn, mut other) = (second.clone(), client.clone());
    let waiting = tokio::spawn(async move { turn.open(&mut other).await });
    // Its process is journalled right before it waits for the home.
    let journal = rig.state.join("turns/trn_2/journal");
    wait_until("the second opening waits for the home", BOUND, || {
        std::fs::read(&journal).is_ok_and(|bytes| String::from_utf8_lossy(&bytes).contains("spl_"))
    })
    .await
    .unwrap();
    assert_eq!(second.cancel(&mut client).await.unwrap(), Cancelled::Stopping);
    let refused = tokio::time::timeout(BOUND, waiting).await.unwrap().unwrap().unwrap_err();
    assert_eq!(reason(&refused), "WRONG_STATE", "{refused:?}");
    let events = second.follow(&mut client, 0, false).await.unwrap().all().await.unwrap();
    assert_eq!(terminal(&events).unwrap().outcome(), Outcome::Cancelled);
    assert!(!close.is_finished(), "the home was free");
    signal(keeper, "CONT").unwrap();
    assert!(close.await.unwrap().unwrap());
    // Once the home is free, too, no engine is started for it.
    assert_eq!(rig.engine_log("\"start\"").len(), 1);
    assert!(!rig.state.join("sessions/ses_2/session.json").exists());
}

#[tokio::test]
async fn a_deaf_engine_is_terminated_and_a_stubborn_one_killed() {
    let with = With::set("cancel_interrupt_grace", "200ms").and("cancel_term_grace", "300ms");
    let rig = Rig::with(with).await.unwrap();
    let mut client = rig.client().await.unwrap();
    for (number, text) in [(1, "[[ignore:interrupt]] [[stall]]"), (2, "[[ignore:interrupt,term]] [[hang]]")] {
        let turn = Turn::new(&rig, "cnv_1", &format!("ses_{number}"), &format!("trn_{number}"), number);
        turn.open(&mut client).await.unwrap();
        turn.send(&mut client, text).await.unwrap();
        let mut follower = turn.follow(&mut client, 0, false).await.unwrap();
        follower.until(|kind| matches!(kind, Kind::Phase(phase) if phase.phase() as i32 == 4)).await.unwrap();
        turn.cancel(&mut client).await.unwrap();
        let events = turn.follow(&mut client, 0, false).await.unwrap().all().await.unwrap();
        assert_eq!(terminal(&events).unwrap().outcome(), Outcome::Cancelled, "{text}: {:?}", names(&events));
        assert_eq!(rig.processes(), []);
        turn.acknowledge(&mut client).await.unwrap();
    }
}

#[tokio::test]
async fn s44_cancel_before_the_message_after_the_end_and_of_an_unknown_turn() {
    let rig = Rig::start().await.unwrap();
    let mut client = rig.client().await.unwrap();
    let turn = Turn::new(&rig, "cnv_1", "ses_1", "trn_1", 1);
    turn.open(&mut client).await.unwrap();
    assert_eq!(turn.cancel(&mut client).await.unwrap(), Cancelled::Stopping);
    let events = turn.follow(&mut client, 0, false).await.unwrap().all().await.unwrap();
    assert_eq!(terminal(&events).unwrap().outcome(), Outcome::Cancelled);
    assert_eq!(reason(&turn.send(&mut client, "x").await.unwrap_err()), "WRONG_STATE");
    turn.acknowledge(&mut client).await.unwrap();
    // The engine had nothing of that turn, so it stayed.
    assert_eq!(next_turn(&rig, 2).await, Opened::AlreadyOpen);
    let unknown = Turn::new(&rig, "cnv_9", "ses_9", "trn_9", 1);
    assert_eq!(unknown.cancel(&mut client).await.unwrap(), Cancelled::UnknownTurn);
    assert_eq!(unknown.cancel(&mut client).await.unwrap(), Cancelled::UnknownTurn);
    let refused = unknown.open(&mut client).await.unwrap_err();
    assert!(refused.message().contains("cancelled before"), "{refused:?}");
}

#[tokio::test]
async fn s44_cancel_while_the_engine_starts() {
    let rig = Rig::with(With { script: Some("@initialize\n[[pause ms=60000]]\n"), ..With::default() })
        .await
        .unwrap();
    let mut client = rig.client().await.unwrap();
    let turn = Turn::new(&rig, "cnv_1", "ses_1", "trn_1", 1);
    let opening = {
        let (mut client, turn) = (client.clone(), turn.clone());
        tokio::spawn(async move { turn.open(&mut client).await })
    };
    wait_until("the engine runs", BOUND, || !rig.engine_log("\"start\"").is_empty()).await.unwrap();
    assert_eq!(turn.cancel(&mut client).await.unwrap(), Cancelled::Stopping);
    assert_eq!(reason(&opening.await.unwrap().unwrap_err()), "WRONG_STATE");
    wait_until("no process is left", BOUND, || rig.processes().is_empty()).await.unwrap();
    let events = turn.follow(&mut client, 0, false).await.unwrap().all().await.unwrap();
    assert_eq!(names(&events), ["terminal OUTCOME_CANCELLED"]);
}

#[tokio::test]
async fn an_engine_that_does_not_open_in_time_is_refused_and_gone() {
    let with = With {
        script: Some("@initialize\n[[pause ms=60000]]\n"),
        ..With::set("engine_start_timeout", "500ms")
    };
    let rig = Rig::with(with).await.unwrap();
    let mut client = rig.client().await.unwrap();
    let turn = Turn::new(&rig, "cnv_1", "ses_1", "trn_1", 1);
    let refused = turn.open(&mut client).await.unwrap_err();
    assert_eq!(reason(&refused), "ENGINE_START_FAILED");
    assert_eq!(rig.processes(), []);
}

#[tokio::test]
async fn s41_silence_is_noticed_and_then_ends_the_turn() {
    let rig = Rig::with(With::set("silence_warning", "200ms")).await.unwrap();
    let mut client = rig.client().await.unwrap();
    let mut turn = Turn::new(&rig, "cnv_1", "ses_1", "trn_1", 1);
    let idle = prost_types::Duration { seconds: 0, nanos: 600_000_000 };
    turn.request.options.as_mut().unwrap().idle_timeout = Some(idle);
    turn.open(&mut client).await.unwrap();
    turn.send(&mut client, "[[text:so far]] [[stall]]").await.unwrap();
    let events = turn.follow(&mut client, 0, false).await.unwrap().all().await.unwrap();
    let ended = terminal(&events).unwrap();
    let failure = ended.failure.clone().unwrap();
    assert_eq!((ended.outcome(), failure.reason()), (Outcome::Failed, FailureReason::IdleTimeout));
    assert!(failure.retryable && !failure.next_action.is_empty());
    let order = names(&events);
    assert!(order.contains(&"notice KIND_SILENCE".to_owned()), "{order:?}");
    assert!(order.contains(&"text so far".to_owned()), "{order:?}");
}

#[tokio::test]
async fn a_deadline_ends_a_turn_that_is_busy() {
    // The configured one holds where the turn names none.
    for (configured, named) in [("1h", Some(1)), ("1s", None)] {
        let rig = Rig::with(With::set("deadline", configured)).await.unwrap();
        let mut client = rig.client().await.unwrap();
        let mut turn = Turn::new(&rig, "cnv_1", "ses_1", "trn_1", 1);
        let seconds = |seconds| prost_types::Duration { seconds, nanos: 0 };
        turn.request.options.as_mut().unwrap().deadline = named.map(seconds);
        turn.open(&mut client).await.unwrap();
        turn.send(&mut client, "[[slow chunks=10000 delay=10:x ]]").await.unwrap();
        let events = turn.follow(&mut client, 0, false).await.unwrap().all().await.unwrap();
        let ended = terminal(&events).unwrap();
        assert_eq!(ended.failure.unwrap().reason(), FailureReason::Deadline);
        turn.acknowledge(&mut client).await.unwrap();
        let mut next = Turn::new(&rig, "cnv_1", "ses_1", "trn_2", 2);
        next.request.options.as_mut().unwrap().deadline = Some(seconds(3600));
        assert_eq!(next.open(&mut client).await.unwrap().result(), Opened::AlreadyOpen);
    }
}

#[tokio::test]
async fn s34_an_engine_that_dies_fails_its_turn_with_what_is_known() {
    let rig = Rig::start().await.unwrap();
    let mut client = rig.client().await.unwrap();
    for (number, text) in
        [(1, "[[stderr:last words]] [[exit code=3]]"), (2, "[[die:SEGV]]"), (3, "[[exit code=0]]")]
    {
        let turn = Turn::new(&rig, "cnv_1", "ses_1", &format!("trn_{number}"), number);
        turn.open(&mut client).await.unwrap();
        turn.send(&mut client, text).await.unwrap();
        let events = turn.follow(&mut client, 0, false).await.unwrap().all().await.unwrap();
        let ended = terminal(&events).unwrap();
        let failure = ended.failure.clone().unwrap();
        assert_eq!((ended.outcome(), failure.reason()), (Outcome::Failed, FailureReason::Process), "{text}");
        assert!(failure.spool_id.starts_with("spl_") && failure.retryable);
        match number {
            1 => assert_eq!((failure.exit_code, failure.stderr_tail.trim()), (Some(3), "last words")),
            2 => assert_eq!(failure.signal, Some(11)),
            _ => assert_eq!(failure.exit_code, Some(0)),
        }
        turn.acknowledge(&mut client).await.unwrap();
    }
}

#[tokio::test]
async fn closing_needs_an_idle_session_and_keeps_it_resumable() {
    use roundhouse_proto::engine::v1::{CloseSessionRequest, ListSessionsRequest};
    let rig = Rig::start().await.unwrap();
    let mut client = rig.client().await.unwrap();
    let close = || CloseSessionRequest { session_id: "ses_1".into() };
    assert_eq!(reason(&client.close_session(close()).await.unwrap_err()), "SESSION_NOT_FOUND");
    let turn = Turn::new(&rig, "cnv_1", "ses_1", "trn_1", 1);
    turn.open(&mut client).await.unwrap();
    assert_eq!(reason(&client.close_session(close()).await.unwrap_err()), "TURN_IN_PROGRESS");
    turn.send(&mut client, "[[text:one]]").await.unwrap();
    turn.follow(&mut client, 0, false).await.unwrap().all().await.unwrap();
    let list = client.list_sessions(ListSessionsRequest::default()).await.unwrap().into_inner();
    assert_eq!((list.sessions.len(), list.sessions[0].warm), (1, true));
    assert!(client.close_session(close()).await.unwrap().into_inner().was_open);
    assert_eq!(rig.processes(), []);
    assert!(!client.close_session(close()).await.unwrap().into_inner().was_open);
    assert_eq!(next_turn(&rig, 2).await, Opened::Resumed);
}

#[cfg(feature = "failpoints")]
#[tokio::test]
async fn s47_a_stopping_runner_never_says_that_it_does_not_know_a_turn_that_goes_on() {
    let mut rig = Rig::with(With::failpoint("runner::halted=3000*pause")).await.unwrap();
    let mut client = rig.client().await.unwrap();
    let turn = Turn::new(&rig, "cnv_1", "ses_1", "trn_1", 1);
    turn.open(&mut client).await.unwrap();
    turn.send(&mut client, "[[pause ms=8000]] [[text:done]]").await.unwrap();
    let mut follower = turn.follow(&mut client, 0, false).await.unwrap();
    follower.until(|kind| matches!(kind, Kind::Phase(phase) if phase.phase() as i32 == 4)).await.unwrap();
    signal(rig.service.pid().unwrap(), "TERM").unwrap();
    // Every answer is the truth, or that the runner stops; until it answers no more.
    let mut let_go = false;
    loop {
        match turn.inspect(&mut client).await {
            Ok(facts) => assert_eq!((facts.state(), let_go), (State::Running, false)),
            Err(status) if reason(&status) == "DRAINING" => {
                let_go = true;
                break;
            }
            Err(status) => panic!("the pause is over, or something else is wrong: {status:?}"),
        }
    }
    assert!(let_go);
    let status = turn.cancel(&mut client).await.unwrap_err();
    assert_eq!(reason(&status), "DRAINING", "no cancel of an unknown turn is remembered");
    for status in [
        turn.send(&mut client, "x").await.map(|_| ()).unwrap_err(),
        turn.open(&mut client).await.map(|_| ()).unwrap_err(),
        turn.acknowledge(&mut client).await.unwrap_err(),
        turn.follow(&mut client, 0, false).await.map(|_| ()).unwrap_err(),
    ] {
        assert_eq!(reason(&status), "DRAINING", "{status:?}");
    }
    rig.service.wait_exit(BOUND).await.unwrap();
    rig.again().await.unwrap();
    let mut client = rig.client().await.unwrap();
    let events = turn.follow(&mut client, 0, false).await.unwrap().all().await.unwrap();
    assert_eq!(terminal(&events).unwrap().outcome(), Outcome::Completed, "{:?}", names(&events));
}

#[cfg(feature = "failpoints")]
#[tokio::test]
async fn a_stopping_runner_tells_the_end_of_a_turn_that_it_has_stopped() {
    let with = With { args: vec!["--stop-turns"], ..With::failpoint("runner::halted=3000*pause") };
    let mut rig = Rig::with(with).await.unwrap();
    let mut client = rig.client().await.unwrap();
    let turn = Turn::new(&rig, "cnv_1", "ses_1", "trn_1", 1);
    turn.open(&mut client).await.unwrap();
    // More than fits into a stream that nobody reads yet.
    turn.send(&mut client, "[[events count=1500 bytes=2000]][[stall]]").await.unwrap();
    let follower = turn.follow(&mut client, 0, false).await.unwrap();
    while turn.inspect(&mut client).await.unwrap().last_number < 1500 {
        tokio::task::yield_now().await;
    }
    signal(rig.service.pid().unwrap(), "TERM").unwrap();
    let unknown = Turn::new(&rig, "cnv_2", "ses_2", "trn_2", 1);
    while unknown.inspect(&mut client).await.is_ok() {}
    let events = follower.all().await.unwrap();
    assert_eq!(terminal(&events).unwrap().outcome(), Outcome::Cancelled, "{:?}", names(&events));
    rig.service.wait_exit(BOUND).await.unwrap();
}

#[tokio::test]
async fn the_slow_end_of_a_closed_session_keeps_nobody_waiting() {
    let rig = Rig::start().await.unwrap();
    let mut client = rig.client().await.unwrap();
    let stubborn = Turn::new(&rig, "cnv_1", "ses_1", "trn_1", 1);
    // Closing it takes the end of its input, SIGTERM and SIGKILL: seven seconds.
    stubborn.run(&mut client, "[[ignore:eof,term]] [[text:one]]").await.unwrap();
    let mut closing = client.clone();
    let close = tokio::spawn(async move {
        let request = CloseSessionRequest { session_id: "ses_1".to_owned() };
        closing.close_session(request).await.map(|response| (response.into_inner(), Instant::now()))
    });
    let log = rig.path("runner.log");
    wait_until("the close has begun", BOUND, || {
        std::fs::read_to_string(&log).unwrap_or_default().contains("an engine is closed")
    })
    .await
    .unwrap();
    let other = Turn::new(&rig, "cnv_9", "ses_9", "trn_9", 1);
    assert_eq!(other.cancel(&mut client).await.unwrap(), Cancelled::UnknownTurn);
    assert!(!close.is_finished(), "the cancel was answered while the engine was being closed");
    // A turn of the same session waits for its end: there are never two processes on one session.
    let next = Turn::new(&rig, "cnv_1", "ses_1", "trn_2", 2);
    let opened = next.open(&mut client).await.unwrap();
    let opened_at = Instant::now();
    assert_eq!(opened.result(), Opened::Resumed);
    let (closed, closed_at) = close.await.unwrap().unwrap();
    assert!(closed.was_open);
    assert!(closed_at < opened_at);
}

#[tokio::test]
async fn s46_the_engine_of_a_turn_that_cannot_be_read_is_left_alone_until_it_can() {
    let mut rig = Rig::start().await.unwrap();
    let mut client = rig.client().await.unwrap();
    let turn = Turn::new(&rig, "cnv_1", "ses_1", "trn_1", 1);
    turn.open(&mut client).await.unwrap();
    turn.send(&mut client, "[[pause ms=3000]] [[text:done]]").await.unwrap();
    let mut follower = turn.follow(&mut client, 0, false).await.unwrap();
    follower.until(|kind| matches!(kind, Kind::Phase(phase) if phase.phase() as i32 == 4)).await.unwrap();
    rig.service.kill().await.unwrap();
    let journal = rig.state.join("turns/trn_1/journal");
    std::fs::rename(&journal, rig.path("aside")).unwrap();
    std::fs::create_dir(&journal).unwrap();
    rig.again().await.unwrap();
    let mut client = rig.client().await.unwrap();
    assert_eq!(reason(&turn.inspect(&mut client).await.unwrap_err()), "STORAGE");
    assert_eq!(reason(&turn.cancel(&mut client).await.unwrap_err()), "STORAGE");
    let other = Turn::new(&rig, "cnv_1", "ses_1", "trn_2", 1);
    assert_eq!(
        reason(&other.open(&mut client).await.unwrap_err()),
        "STORAGE",
        "never two turns on one engine"
    );
    std::fs::remove_dir(&journal).unwrap();
    std::fs::rename(rig.path("aside"), &journal).unwrap();
    let deadline = Instant::now() + BOUND;
    while turn.inspect(&mut client).await.is_err() {
        assert!(Instant::now() < deadline, "it is never read");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let events = turn.follow(&mut client, 0, false).await.unwrap().all().await.unwrap();
    let ended = terminal(&events).unwrap();
    assert_eq!(
        (ended.outcome(), ended.result.as_str()),
        (Outcome::Completed, "done"),
        "{:?}",
        names(&events)
    );
    turn.acknowledge(&mut client).await.unwrap();
    assert_eq!(next_turn(&rig, 2).await, Opened::AlreadyOpen);
}

#[tokio::test]
async fn s50_acknowledgements_at_once_are_one() {
    let rig = Rig::start().await.unwrap();
    let mut client = rig.client().await.unwrap();
    for number in 1..4 {
        let turn = Turn::new(&rig, "cnv_1", "ses_1", &format!("trn_{number}"), number);
        turn.open(&mut client).await.unwrap();
        turn.send(&mut client, "[[text:x]]").await.unwrap();
        turn.follow(&mut client, 0, false).await.unwrap().all().await.unwrap();
        let mut all = tokio::task::JoinSet::new();
        for _ in 0..20 {
            let (turn, mut client) = (turn.clone(), client.clone());
            all.spawn(async move { turn.acknowledge(&mut client).await });
        }
        while let Some(answer) = all.join_next().await {
            answer.unwrap().unwrap();
        }
    }
}

/// Gives the engine its first line alone and then closes its input's other end, while the engine lives on.
const DEAF: &str = r#"#!/bin/sh
case "$*" in
    *--print*) ;;
    *) exec {engine} "$@" ;;
esac
exec 3<&0 0</dev/null
{ head -n 1 <&3; exec 3<&-; exec sleep 600; } | {engine} "$@" 3<&- &
exec 3<&-
wait $!
"#;

#[tokio::test]
async fn a_message_that_no_engine_reads_fails_and_does_not_wait_for_silence() {
    let rig = Rig::with(With { wrapper: Some(DEAF), ..With::default() }).await.unwrap();
    let mut client = rig.client().await.unwrap();
    let turn = Turn::new(&rig, "cnv_1", "ses_1", "trn_1", 1);
    turn.open(&mut client).await.unwrap();
    turn.send(&mut client, "[[text:never]]").await.unwrap();
    // Nothing of it went in, so it is given to another process, and at last to none.
    let events = turn.follow(&mut client, 0, false).await.unwrap().all().await.unwrap();
    let ended = terminal(&events).unwrap();
    assert_eq!(ended.outcome(), Outcome::Failed, "{:?}", names(&events));
    assert_eq!(ended.failure.unwrap().reason(), FailureReason::Process, "{:?}", names(&events));
    assert!(rig.engine_log("\"start\"").len() > 1);
}

#[tokio::test]
async fn s41_an_engine_that_stays_busy_after_its_result_is_settled_and_stopped() {
    let rig = Rig::with(With::set("settle_timeout", "300ms")).await.unwrap();
    let mut client = rig.client().await.unwrap();
    let turn = Turn::new(&rig, "cnv_1", "ses_1", "trn_1", 1);
    turn.open(&mut client).await.unwrap();
    turn.send(&mut client, "[[busy]] [[text:done]]").await.unwrap();
    let events = turn.follow(&mut client, 0, false).await.unwrap().all().await.unwrap();
    let ended = terminal(&events).unwrap();
    let order = names(&events);
    assert_eq!((ended.outcome(), ended.result.as_str()), (Outcome::Completed, "done"), "{order:?}");
    assert_eq!(order.iter().filter(|name| *name == "notice KIND_WARNING").count(), 1, "{order:?}");
    wait_until("the engine is stopped", BOUND, || rig.processes().is_empty()).await.unwrap();
    turn.acknowledge(&mut client).await.unwrap();
    assert_eq!(next_turn(&rig, 2).await, Opened::Resumed);
}

#[cfg(feature = "failpoints")]
#[tokio::test]
async fn s43_without_namespaces_a_cancel_finds_what_left_its_session() {
    use roundhouse_proto::engine::v1::IsolationLevel;
    let rig = Rig::with(With::failpoint("runner::no_namespaces=fail")).await.unwrap();
    let mut client = rig.client().await.unwrap();
    let turn = Turn::new(&rig, "cnv_1", "ses_1", "trn_1", 1);
    turn.open(&mut client).await.unwrap();
    let ready = rig.path("ready");
    // Its parents are gone before the cancel: only ancestry that was taken over, and the keeper's mark, lead to it.
    let text = format!(
        "[[bash:(setsid nohup sh -c 'touch {}; exec sleep 1000' >/dev/null 2>&1 &) ; sleep 1001]]",
        ready.display()
    );
    turn.send(&mut client, &text).await.unwrap();
    wait_until("the tool runs", BOUND, || ready.exists()).await.unwrap();
    let process = turn.inspect(&mut client).await.unwrap().process.unwrap();
    assert_eq!(process.isolation(), IsolationLevel::Subreaper);
    assert!(rig.processes().iter().any(|(_, command)| command.contains("sleep 1000")));
    turn.cancel(&mut client).await.unwrap();
    let events = turn.follow(&mut client, 0, false).await.unwrap().all().await.unwrap();
    assert_eq!(terminal(&events).unwrap().outcome(), Outcome::Cancelled);
    let left: Vec<_> =
        rig.processes().into_iter().filter(|(_, command)| command.contains("sleep 100")).collect();
    assert_eq!(left, [], "{:?}", names(&events));
    turn.acknowledge(&mut client).await.unwrap();
    assert_eq!(next_turn(&rig, 2).await, Opened::Resumed);
}
