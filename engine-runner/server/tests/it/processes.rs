//! Processes under pressure: too many of them, none to be had, another program in their place, and a runner that is PID 1.

use pretty_assertions::assert_eq;
use roundhouse_proto::engine::v1::{
    CloseSessionRequest, ListSessionsRequest, Outcome, inspect_response::State,
    start_or_resume_response::Result as Opened,
};
use roundhouse_test_support::{Service, TestLog, wait_until};
use tonic_types::StatusExt as _;

use crate::rig::{BOUND, Rig, Turn, With, names, reason, signal, terminal};

/// Keepers of the test.
fn keepers(rig: &Rig) -> usize {
    rig.processes().iter().filter(|(_, command)| command.contains("__keeper")).count()
}

#[tokio::test]
async fn a_hundred_idle_conversations_keep_no_more_processes_than_configured() {
    const LIMIT: usize = 3;
    let rig = Rig::with(With::set("max_warm_engines", i64::try_from(LIMIT).unwrap())).await.unwrap();
    let client = rig.client().await.unwrap();
    // Ten at a time, each in a directory of its own: more are at work at once than may stay.
    for round in 0..10 {
        let mut turns = tokio::task::JoinSet::new();
        for number in round * 10..round * 10 + 10 {
            let id = |kind: &str| format!("{kind}_{number}");
            let mut turn = Turn::new(&rig, &id("cnv"), &id("ses"), &id("trn"), 1);
            let work = rig.work.join(number.to_string());
            std::fs::create_dir(&work).unwrap();
            turn.request.workspace = work.display().to_string();
            let mut client = client.clone();
            turns.spawn(async move { turn.run(&mut client, "[[text:x]]").await.unwrap() });
        }
        for events in turns.join_all().await {
            assert_eq!(terminal(&events).unwrap().outcome(), Outcome::Completed);
        }
    }
    wait_until("what is above the limit has ended", BOUND, || keepers(&rig) <= LIMIT).await.unwrap();
    assert_eq!(keepers(&rig), LIMIT);
    // Nothing is lost with those that have ended.
    let mut client = client;
    let mut warm = 0;
    let mut page_token = String::new();
    loop {
        let request = ListSessionsRequest { page_size: 0, page_token };
        let page = client.list_sessions(request).await.unwrap().into_inner();
        warm += page.sessions.iter().filter(|session| session.warm).count();
        page_token = page.next_page_token;
        if page_token.is_empty() {
            break;
        }
    }
    assert_eq!(warm, LIMIT);
    let mut again = Turn::new(&rig, "cnv_0", "ses_0", "trn_again", 2);
    again.request.workspace = rig.work.join("0").display().to_string();
    assert_eq!(again.open(&mut client).await.unwrap().result(), Opened::Resumed);
}

/// Processes and threads of a user.
fn tasks(user: u32) -> usize {
    let mut count = 0;
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        let Ok(status) = std::fs::read_to_string(entry.path().join("status")) else { continue };
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name))?;
            line.split_whitespace().next()?.parse::<usize>().ok()
        };
        if field("Uid:") == usize::try_from(user).ok() {
            count += field("Threads:").unwrap_or(0);
        }
    }
    count
}

#[tokio::test]
async fn a_limit_of_processes_refuses_the_opening_with_what_to_do_and_nothing_is_left() {
    use std::os::unix::fs::MetadataExt as _;
    // A user of its own, whose processes are the test's alone. The limit binds no root.
    const USER: u32 = 64_123;
    let is_root = std::fs::metadata("/proc/self").unwrap().uid() == 0;
    let user = if is_root { USER } else { std::fs::metadata("/proc/self").unwrap().uid() };
    let rig = Rig::with(With { user: Some(USER), ..With::default() }).await.unwrap();
    let mut client = rig.client().await.unwrap();
    let runner = rig.service.pid().unwrap();
    let limits = std::fs::read_to_string(format!("/proc/{runner}/limits")).unwrap();
    let hard = limits.lines().find_map(|line| line.strip_prefix("Max processes")).unwrap();
    let hard = hard.split_whitespace().nth(1).unwrap().to_owned();
    let limit = |tasks: &str| {
        // As that user: another one may need more rights than a container's root has.
        let id = user.to_string();
        let mut command = std::process::Command::new("setpriv");
        if is_root {
            command.args([&format!("--reuid={id}"), &format!("--regid={id}"), "--clear-groups"]);
        }
        command.args(["prlimit", "--pid", &runner.to_string(), &format!("--nproc={tasks}:")]);
        assert!(command.status().unwrap().success());
    };
    // The runner's own threads are there before there is none to be had.
    let first = Turn::new(&rig, "cnv_0", "ses_0", "trn_0", 1);
    first.run(&mut client, "[[text:first]]").await.unwrap();
    let request = CloseSessionRequest { session_id: "ses_0".to_owned() };
    client.close_session(request).await.unwrap();
    wait_until("the first engine is gone", BOUND, || rig.processes().is_empty()).await.unwrap();
    let (mut advised, mut opened) = (0, None);
    // From no process at all, up to as many as an opening needs.
    for more in 0..40 {
        limit(&(tasks(user) + more).to_string());
        let id = |kind: &str| format!("{kind}_more{more}");
        let turn = Turn::new(&rig, &id("cnv"), &id("ses"), &id("trn"), 1);
        let Err(refused) = turn.open(&mut client).await else {
            opened = Some(turn);
            break;
        };
        assert_eq!(reason(&refused), "ENGINE_START_FAILED", "{more}: {refused:?}");
        let details = refused.get_details_error_info().unwrap().metadata;
        assert_eq!(details["failure_reason"], "PROCESS", "{more}: {refused:?}");
        advised += usize::from(details["next_action"].contains("ulimit -u"));
        assert!(!refused.message().contains("internal error"), "{more}: {refused:?}");
        assert_eq!(turn.inspect(&mut client).await.unwrap().state(), State::Unknown, "{more}");
        wait_until("nothing of it is left", BOUND, || rig.processes().is_empty()).await.unwrap();
    }
    let opened = opened.expect("no opening succeeds");
    assert!(advised > 0, "no refusal told of the limit");
    limit(&hard);
    opened.cancel(&mut client).await.unwrap();
    opened.follow(&mut client, 0, false).await.unwrap().all().await.unwrap();
    let next = Turn::new(&rig, "cnv_0", "ses_0", "trn_next", 2);
    let events = next.run(&mut client, "[[text:next]]").await.unwrap();
    assert_eq!(terminal(&events).unwrap().result, "next");
}

#[tokio::test]
async fn programs_that_are_replaced_while_they_run_are_met_by_the_next_start_and_lose_nothing() {
    let wrapper = "#!/bin/sh\nexec {engine} \"$@\"\n";
    let rig =
        Rig::with(With { wrapper: Some(wrapper), user: Some(64_124), ..With::default() }).await.unwrap();
    let mut client = rig.client().await.unwrap();
    let turn = |number: u64| Turn::new(&rig, "cnv_1", "ses_1", &format!("trn_{number}"), number);
    turn(1).run(&mut client, "[[text:one]]").await.unwrap();
    let path = rig.path("wrapper");
    let good = std::fs::read(&path).unwrap();
    let replace = |bytes: &[u8]| {
        use std::os::unix::fs::PermissionsExt as _;
        let new = rig.path("wrapper.new");
        std::fs::write(&new, bytes).unwrap();
        std::fs::set_permissions(&new, std::fs::Permissions::from_mode(0o755)).unwrap();
        std::fs::rename(&new, &path).unwrap();
    };
    replace(b"half of a program");
    // Who runs, runs on.
    let second = turn(2);
    assert_eq!(second.open(&mut client).await.unwrap().result(), Opened::AlreadyOpen);
    second.run(&mut client, "[[text:two]]").await.unwrap();
    let request = CloseSessionRequest { session_id: "ses_1".to_owned() };
    assert!(client.close_session(request).await.unwrap().into_inner().was_open);
    let refused = turn(3).open(&mut client).await.unwrap_err();
    assert_eq!(reason(&refused), "ENGINE_MISSING", "{refused:?}");
    std::fs::remove_file(&path).unwrap();
    let refused = turn(4).open(&mut client).await.unwrap_err();
    assert_eq!(reason(&refused), "ENGINE_MISSING", "{refused:?}");
    replace(&good);
    // The runner's own program, where it has a file of its own: its keepers are what it was started as.
    let _ = std::fs::remove_file(rig.path("engine-runner"));
    let last = turn(5);
    assert_eq!(last.open(&mut client).await.unwrap().result(), Opened::Resumed);
    let events = last.run(&mut client, "[[text:five]]").await.unwrap();
    assert_eq!(terminal(&events).unwrap().result, "five");
}

/// The child of a process that is alone.
fn child(pid: u32) -> u32 {
    let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
    children.trim().parse().unwrap()
}

/// What is left of these processes, those that have ended and were not reaped included.
fn left(pids: &[u32]) -> Vec<String> {
    let stats = pids.iter().filter_map(|pid| std::fs::read_to_string(format!("/proc/{pid}/stat")).ok());
    stats.map(|stat| stat.chars().take(40).collect()).collect()
}

#[cfg(feature = "failpoints")]
#[tokio::test]
async fn as_pid_1_the_runner_leaves_no_zombies_and_takes_all_along_when_it_stops() {
    let points = Some("runner::no_namespaces=fail");
    let with = With { pid_one: true, failpoints: points, ..With::set("drain_timeout", "200ms") };
    let mut rig = Rig::with(with).await.unwrap();
    let mut client = rig.client().await.unwrap();
    let runner = child(rig.service.pid().unwrap());
    // Without namespaces below it, everything that loses its parent comes to the runner at last.
    let turn = Turn::new(&rig, "cnv_1", "ses_1", "trn_1", 1);
    turn.open(&mut client).await.unwrap();
    let ready = rig.path("ready");
    let text = format!(
        "[[bash:(setsid nohup sh -c 'touch {}; exec sleep 1000' >/dev/null 2>&1 &) ; sleep 1001]]",
        ready.display()
    );
    turn.send(&mut client, &text).await.unwrap();
    wait_until("the tool runs", BOUND, || ready.exists()).await.unwrap();
    let processes = rig.processes();
    let below: Vec<u32> = processes.iter().map(|(pid, _)| *pid).filter(|pid| *pid != runner).collect();
    assert!(below.len() >= 5, "keeper, init, engine and tools: {processes:?}");
    let keeper = processes.iter().find(|(_, command)| command.contains("__keeper")).unwrap();
    signal(keeper.0, "KILL").unwrap();
    let events = turn.follow(&mut client, 0, false).await.unwrap().all().await.unwrap();
    assert_eq!(terminal(&events).unwrap().outcome(), Outcome::Failed, "{:?}", names(&events));
    turn.acknowledge(&mut client).await.unwrap();
    let reaped = wait_until("all that had ended is reaped", BOUND, || left(&below).is_empty()).await;
    assert!(reaped.is_ok(), "{:?}", left(&below));
    // A running turn has its time, and then nothing is left.
    let next = Turn::new(&rig, "cnv_1", "ses_1", "trn_2", 2);
    next.open(&mut client).await.unwrap();
    next.send(&mut client, "[[stall]]").await.unwrap();
    signal(runner, "TERM").unwrap();
    rig.service.wait_exit(BOUND).await.unwrap();
    wait_until("nothing is left", BOUND, || rig.processes().is_empty()).await.unwrap();
}

#[tokio::test]
async fn a_runner_on_a_copied_state_directory_leaves_the_engines_of_the_first_one_alone() {
    let rig = Rig::start().await.unwrap();
    let mut client = rig.client().await.unwrap();
    let turn = Turn::new(&rig, "cnv_1", "ses_1", "trn_1", 1);
    turn.open(&mut client).await.unwrap();
    let gate = rig.path("gate");
    turn.send(&mut client, &format!("[[text:one]] [[gate:{}]] [[text:two]]", gate.display())).await.unwrap();
    let mut follower = turn.follow(&mut client, 0, false).await.unwrap();
    let seen = follower
        .until(|kind| matches!(kind, roundhouse_proto::engine::v1::event_body::Kind::Text(_)))
        .await
        .unwrap();
    let copy = rig.path("copy");
    let copied = std::process::Command::new("cp").arg("-a").arg(&rig.state).arg(&copy).status();
    assert!(copied.unwrap().success());
    let mut spec = rig.spec.clone();
    for arg in &mut spec.args {
        if *arg == rig.state.display().to_string() {
            *arg = copy.display().to_string();
        }
    }
    let log = TestLog::create(&rig.path("copy.log")).unwrap();
    let mut second = Service::start(spec, log).await.unwrap();
    let mut other = crate::rig::Client::connect(second.url()).await.unwrap();
    // It has the turn in its journal and cannot know what becomes of it. Nobody gets its workspace meanwhile.
    let told = turn.follow(&mut other, 0, false).await.unwrap().all().await.unwrap();
    assert_eq!(terminal(&told).unwrap().outcome(), Outcome::Lost, "{:?}", names(&told));
    let next = Turn::new(&rig, "cnv_2", "ses_2", "trn_2", 1);
    assert_eq!(reason(&next.open(&mut other).await.unwrap_err()), "WORKSPACE_BUSY");
    // The first one has lost nothing by that.
    std::fs::write(gate, "").unwrap();
    let rest = follower.all().await.unwrap();
    assert_eq!(rest.first().map(|event| event.number), seen.last().map(|event| event.number + 1));
    let ended = terminal(&rest).unwrap();
    assert_eq!((ended.outcome(), ended.result.as_str()), (Outcome::Completed, "two"), "{:?}", names(&rest));
    second.kill().await.unwrap();
}
