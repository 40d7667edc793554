//! A keeper and its engine from start to end, over real processes.
#![allow(clippy::unwrap_used, reason = "what a test does not expect fails it")]
#![allow(clippy::allow_attributes, reason = "an expectation would fail where only test functions unwrap")]

mod support;

use roundhouse_process::{
    Cause, EngineState, EnvVar, ExitStatus, FrameBody, KeeperHandle, KeeperState, Link, LinkError, Notice,
    OpState, PipePayload, REQUEST_TIMEOUT, Refusal, Secret, SpawnStage, SpoolReader, close_dead, scan,
    spawn_keeper, state_of,
};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::Path;
use std::time::{Duration, Instant};
use support::{FIXTURE, LONG, OWNER, Rig, is_alive, plan, wait_for};

#[test]
fn an_engine_runs_from_spawn_to_exit_and_its_spool_tells_all() {
    let mut rig = Rig::start(|_| {});
    assert_eq!(rig.ask("echo hello"), "hello");
    rig.tell("exit 7");
    let frames = rig.end();
    let numbers: Vec<u64> = frames.iter().map(|frame| frame.number).collect();
    assert_eq!(numbers, (1..=frames.len() as u64).collect::<Vec<_>>());
    assert!(frames.windows(2).all(|pair| pair[0].boottime_ns <= pair[1].boottime_ns));
    let bodies: Vec<&FrameBody> = frames.iter().map(|frame| &frame.body).collect();
    assert!(matches!(bodies[0], FrameBody::Spawn { .. }));
    assert!(matches!(bodies[1], FrameBody::Started { .. }));
    let last: Vec<&FrameBody> = bodies[bodies.len() - 2..].to_vec();
    assert_eq!(
        last,
        [
            &FrameBody::Exit(ExitStatus::Code(7)),
            &FrameBody::Closed { cause: Cause::EngineExit, dropped_frames: 0, dropped_bytes: 0 }
        ]
    );
    assert_eq!(state_of(&rig.dir, OWNER).unwrap(), KeeperState::Dead);
}

#[test]
fn a_death_by_signal_is_told_as_one() {
    let mut rig = Rig::start(|_| {});
    rig.tell("kill-self 15");
    let frames = rig.end();
    assert!(frames.iter().any(|frame| frame.body == FrameBody::Exit(ExitStatus::Signal(15))));
}

#[test]
fn delivered_twice_is_written_once() {
    let mut rig = Rig::start(|_| {});
    let (intent, _, duplicate) = rig.link.deliver("d1", b"echo once\n").unwrap();
    assert!(!duplicate);
    assert_eq!(rig.line(), "once");
    let again = rig.link.deliver("d1", b"echo once\n").unwrap();
    assert_eq!(again, (intent, OpState::Written, true));
    // Also for another runner.
    rig.reconnect().unwrap();
    assert_eq!(rig.link.deliver("d1", b"echo once\n").unwrap(), (intent, OpState::Written, true));
    assert_eq!(rig.link.query_op("d1").unwrap(), Some((intent, OpState::Written)));
    assert_eq!(rig.link.query_op("d2").unwrap(), None);
    let other = rig.link.deliver("d1", b"echo other\n");
    assert!(matches!(other, Err(LinkError::Refused(Refusal::OpConflict))), "{other:?}");
    for bad in ["", "with space", "umläut", &"x".repeat(129)] {
        let refused = rig.link.deliver(bad, b"echo no\n");
        assert!(matches!(refused, Err(LinkError::Refused(Refusal::Argument))), "{bad:?}: {refused:?}");
    }
    rig.link.deliver("interrupt.trn_1", b"echo end\n").unwrap();
    assert_eq!(rig.line(), "end");
    assert_eq!(rig.lines(), ["once", "end"]);
    let intents =
        rig.frames().into_iter().filter(|frame| matches!(frame.body, FrameBody::StdinIntent { .. })).count();
    assert_eq!(intents, 2);
}

#[test]
fn an_intent_is_in_the_spool_before_its_effect() {
    let mut rig = Rig::start(|_| {});
    let intent = rig.tell("echo effect");
    let effect = rig.next("line", |body| matches!(body, FrameBody::StdoutLine { .. }));
    assert!(intent < effect.number);
    let frames = rig.frames();
    assert!(matches!(
        &frames[usize::try_from(intent).unwrap() - 1].body,
        FrameBody::StdinIntent { op_id, length: 12, .. } if op_id == "op1"
    ));
    assert!(frames.iter().any(|frame| frame.body == FrameBody::StdinWritten { op_id: "op1".into(), intent }));
}

#[test]
fn input_that_is_not_read_blocks_neither_output_nor_answers() {
    let mut rig = Rig::start(|plan| plan.limits.stdin_pending_max = 3 << 20);
    rig.tell("lines 3000");
    assert_eq!(rig.ask("hang").split(' ').next(), Some("line"));
    // The engine reads no more: this fills its pipe.
    let (intent, state, _) = rig.link.deliver("big", &vec![b'z'; 2 << 20]).unwrap();
    assert_eq!(state, OpState::Pending);
    rig.next(
        "end of the lines",
        |body| matches!(body, FrameBody::StdoutLine { bytes, .. } if bytes == b"hanging"),
    );
    assert!(rig.status().stdin_pending > 1 << 20);
    let more = rig.link.deliver("more", &vec![b'z'; 2 << 20]);
    assert!(matches!(more, Err(LinkError::Refused(Refusal::Busy))), "{more:?}");
    assert_eq!(rig.link.kill_all().unwrap(), 0);
    let frames = rig.end();
    assert!(frames.iter().any(|frame| matches!(&frame.body,
        FrameBody::StdinFailed { op_id, intent: of, written, .. } if op_id == "big" && *of == intent && *written < 2 << 20)));
}

#[test]
fn input_into_a_closed_pipe_is_told_as_failed() {
    let mut rig = Rig::start(|_| {});
    assert_eq!(rig.ask("close-stdin"), "closed");
    let (_, state, _) = rig.link.deliver("lost", b"echo x\n").unwrap();
    assert_eq!(state, OpState::Failed);
    rig.next("failure", |body| {
        matches!(body, FrameBody::StdinFailed { op_id, written: 0, errno: libc::EPIPE, .. } if op_id == "lost")
    });
    let after = rig.link.deliver("after", b"echo x\n");
    assert!(matches!(after, Err(LinkError::Refused(Refusal::InputClosed))), "{after:?}");
}

#[test]
fn the_engine_finds_exactly_what_the_plan_names() {
    let mut rig = Rig::start(|plan| {
        plan.env.push(EnvVar::new("VALUE", "of ours"));
        plan.cwd = "/usr".into();
        plan.pipe_payloads =
            vec![PipePayload { env_name: "KEY_FD".into(), bytes: Secret::new("the-payload-itself") }];
        plan.secrets = vec![];
    });
    assert_eq!(rig.ask("env VALUE"), "of ours");
    assert_eq!(rig.ask("cwd"), "/usr");
    let mut names: Vec<String> = rig.ask("environ").split(' ').map(str::to_owned).collect();
    names.sort();
    assert_eq!(names, ["KEY_FD", "PATH", "ROUNDHOUSE_KEEPER", "VALUE"]);
    let spool_id = rig.spool_id();
    assert_eq!(rig.ask("env ROUNDHOUSE_KEEPER"), spool_id);
    let number = rig.ask("env KEY_FD");
    assert_eq!(rig.ask("fds"), {
        let mut fds = ["0=pipe", "1=pipe", "2=pipe", &format!("{number}=pipe")].map(str::to_owned);
        fds.sort();
        fds.join(" ")
    });
    // A pipe: what was read once is gone.
    assert_eq!(rig.ask("payload KEY_FD"), "pipe the-payload-itself");
    let score: i32 = std::fs::read_to_string("/proc/self/oom_score_adj").unwrap().trim().parse().unwrap();
    assert_eq!(rig.ask("cat /proc/self/oom_score_adj"), (score + 500).min(1000).to_string());
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let umask = status.lines().find(|line| line.starts_with("Umask")).unwrap().to_owned();
    rig.tell("cat /proc/self/status");
    rig.next(
        "the umask",
        |body| matches!(body, FrameBody::StdoutLine { bytes, .. } if bytes == umask.as_bytes()),
    );
}

#[test]
fn neither_plan_nor_secret_is_in_the_keepers_argv_or_environment() {
    let secret = "sk-secret-in-env-4711";
    let mut rig = Rig::start(|plan| plan.env.push(EnvVar::new("API_KEY", secret)));
    let status = rig.status();
    for pid in [rig.handle.pid(), status.init_pid] {
        for file in ["cmdline", "environ"] {
            let bytes = std::fs::read(format!("/proc/{pid}/{file}")).unwrap();
            assert_eq!(memchr::memmem::find(&bytes, secret.as_bytes()), None, "{file} of {pid}");
        }
    }
}

#[test]
fn files_and_descriptors_of_a_keeper_are_its_own() {
    let rig = Rig::start(|_| {});
    let mode = |path: &Path| std::fs::symlink_metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&rig.dir), 0o700);
    for file in ["lock", "sock", "meta.json", "keeper.log", "000001.spool"] {
        assert_eq!(mode(&rig.dir.join(file)), 0o600, "{file}");
    }
    let pid = rig.handle.pid();
    let target = |fd: i32| std::fs::read_link(format!("/proc/{pid}/fd/{fd}")).unwrap();
    assert_eq!(target(0), Path::new("/dev/null"));
    assert_eq!(target(1), Path::new("/dev/null"));
    assert_eq!(target(2), rig.dir.join("keeper.log"));
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let session: i32 = stat.rsplit(") ").next().unwrap().split(' ').nth(3).unwrap().parse().unwrap();
    assert_eq!(session, pid, "a session of its own");
}

#[test]
fn the_newest_link_wins_and_others_are_refused() {
    let mut rig = Rig::start(|_| {});
    let (mut second, status) = Link::connect(&rig.dir, OWNER, REQUEST_TIMEOUT).unwrap();
    assert_eq!(status.engine, EngineState::Running);
    let old = rig.link.status();
    assert!(matches!(old, Err(LinkError::Superseded | LinkError::Closed)), "{old:?}");
    second.deliver("x", b"echo second\n").unwrap();
    assert_eq!(rig.line(), "second");
    let foreign = Link::connect(&rig.dir, "run_other", REQUEST_TIMEOUT);
    assert!(matches!(foreign, Err(LinkError::Refused(Refusal::Foreign))), "{foreign:?}");
    // A refused stranger does not push the owner out.
    assert_eq!(second.status().unwrap().engine, EngineState::Running);
}

#[test]
fn a_link_is_told_how_far_the_spool_goes() {
    let mut rig = Rig::start(|_| {});
    rig.tell("echo x");
    rig.line();
    let frame = rig.reader.position().frame;
    loop {
        if let Notice::Progress(end) = rig.link.next_notice(LONG).unwrap()
            && end.frame >= frame
        {
            assert_eq!(std::fs::metadata(rig.dir.join("000001.spool")).unwrap().len(), end.offset);
            break;
        }
    }
    rig.tell("exit 0");
    let last = loop {
        if let Notice::Ending(end) = rig.link.next_notice(LONG).unwrap() {
            break end.frame;
        }
    };
    assert_eq!(rig.end().last().unwrap().number, last);
}

#[test]
fn a_stopped_keeper_is_a_timeout_and_can_be_killed() {
    let mut rig = Rig::start(|_| {});
    let status = rig.status();
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(rig.handle.pid()), nix::sys::signal::Signal::SIGSTOP)
        .unwrap();
    let short = Duration::from_millis(200);
    let begun = Instant::now();
    let refused = Link::connect(&rig.dir, OWNER, short);
    assert!(matches!(refused, Err(LinkError::Timeout(_))), "{refused:?}");
    assert!(begun.elapsed() < Duration::from_secs(5));
    assert_eq!(state_of(&rig.dir, OWNER).unwrap(), KeeperState::Live, "stopped is not dead");
    assert!(!rig.handle.wait(Duration::ZERO).unwrap());
    // Another runner finds its process without an answer.
    let found = KeeperHandle::find(&rig.dir).unwrap();
    assert_eq!(found.pid(), rig.handle.pid());
    found.kill().unwrap();
    assert!(rig.handle.wait(LONG).unwrap());
    assert!(KeeperHandle::find(&rig.dir).is_err());
    wait_for("end of the init", || (!is_alive(status.init_pid)).then_some(()));
    assert_eq!(state_of(&rig.dir, OWNER).unwrap(), KeeperState::Dead);
}

#[test]
fn a_keeper_is_readopted_by_lock_and_socket() {
    let mut rig = Rig::start(|_| {});
    assert_eq!(rig.ask("echo before"), "before");
    let found = scan(rig.tmp.path(), OWNER).unwrap();
    assert_eq!(found.len(), 1);
    assert_eq!((found[0].state, found[0].spool_id.clone()), (KeeperState::Live, rig.spool_id()));
    assert_eq!(scan(rig.tmp.path(), "run_other").unwrap()[0].state, KeeperState::Foreign);
    rig.reconnect().unwrap();
    let adopted = KeeperHandle::adopt(&rig.dir, rig.link.keeper_pid()).unwrap();
    assert_eq!(adopted.pid(), rig.handle.pid());
    // The spool is read from its beginning as it was read live.
    let live = rig.reader.position().frame;
    let again: Vec<u64> =
        rig.frames().iter().map(|frame| frame.number).take_while(|number| *number <= live).collect();
    assert_eq!(again, (1..=live).collect::<Vec<_>>());
    assert_eq!(rig.ask("echo after"), "after");
    rig.tell("exit 0");
    assert!(adopted.wait(LONG).unwrap());
}

#[test]
fn s46_a_stale_record_kills_nobody() {
    let tmp = tempfile::tempdir().unwrap();
    let dir = tmp.path().join("stale");
    std::fs::create_dir(&dir).unwrap();
    // A process of somebody else now has the recorded id.
    let mut other = std::process::Command::new(FIXTURE).args(["linger", "s46-other"]).spawn().unwrap();
    let meta = serde_json::json!({
        "version": 1, "spool_id": "spl_stale", "owner": OWNER, "keeper_pid": other.id(),
        "started_boottime_ns": 1, "boot_id": "0", "program": "/bin/true",
    });
    std::fs::write(dir.join("meta.json"), meta.to_string()).unwrap();
    std::fs::write(dir.join("lock"), "").unwrap();
    assert_eq!(state_of(&dir, OWNER).unwrap(), KeeperState::Dead);
    assert!(KeeperHandle::adopt(&dir, i32::try_from(other.id()).unwrap()).is_err());
    let closed = close_dead(&dir, OWNER, LONG).unwrap();
    assert_eq!((closed.spool_id.as_str(), closed.sweep.killed), ("spl_stale", 0));
    assert!(is_alive(i32::try_from(other.id()).unwrap()));
    // Another runner's directory is not touched either.
    assert!(close_dead(&dir, "run_other", LONG).is_err());
    other.kill().unwrap();
    other.wait().unwrap();
    // And no keeper starts in a closed directory.
    let _ = std::fs::remove_file(dir.join("meta.json"));
    assert!(spawn_keeper(&dir, &plan("spl_stale"), Some(Path::new(FIXTURE))).is_err());
}

#[test]
fn a_live_keeper_is_not_closed() {
    let mut rig = Rig::start(|_| {});
    assert!(matches!(close_dead(&rig.dir, OWNER, LONG), Err(roundhouse_process::KeeperDirError::Alive)));
    assert_eq!(rig.ask("echo still"), "still");
}

#[test]
fn a_program_that_is_missing_is_told_in_the_spool() {
    let tmp = tempfile::tempdir().unwrap();
    for (name, change, stage) in
        [("program", "/nowhere/engine", SpawnStage::Exec), ("cwd", FIXTURE, SpawnStage::Cwd)]
    {
        let mut plan = plan("spl_missing");
        plan.program = change.into();
        if name == "cwd" {
            plan.cwd = "/nowhere".into();
        }
        let dir = tmp.path().join(name);
        let handle = spawn_keeper(&dir, &plan, Some(Path::new(FIXTURE))).unwrap();
        assert!(handle.wait(LONG).unwrap());
        let frames = SpoolReader::new(&dir).read_all().unwrap();
        let failed = frames.iter().find_map(|frame| match &frame.body {
            FrameBody::SpawnFailed { stage, errno, .. } => Some((*stage, *errno)),
            _ => None,
        });
        assert_eq!(failed, Some((stage, libc::ENOENT)));
        assert!(!frames.iter().any(|frame| matches!(frame.body, FrameBody::Started { .. })));
    }
}

#[test]
fn a_directory_is_used_once() {
    let mut rig = Rig::start(|_| {});
    rig.tell("exit 0");
    rig.end();
    assert!(spawn_keeper(&rig.dir, &plan("spl_again"), Some(Path::new(FIXTURE))).is_err());
}

#[test]
fn a_very_long_path_to_the_socket_works() {
    let tmp = tempfile::tempdir().unwrap();
    let parent = tmp.path().join("p".repeat(120)).join("q".repeat(120));
    std::fs::create_dir_all(&parent).unwrap();
    let dir = parent.join("keeper");
    let handle = spawn_keeper(&dir, &plan("spl_long"), Some(Path::new(FIXTURE))).unwrap();
    let (mut link, _) = Link::connect(&dir, OWNER, REQUEST_TIMEOUT).unwrap();
    assert_eq!(std::fs::metadata(dir.join("sock")).unwrap().uid(), nix::unistd::geteuid().as_raw());
    link.release(LONG, LONG).unwrap();
    assert!(handle.wait(LONG).unwrap());
}

#[test]
fn input_is_closed_behind_what_was_delivered() {
    let mut rig = Rig::start(|_| {});
    rig.tell("echo first");
    rig.link.close_input().unwrap();
    let frames = rig.end();
    assert_eq!(rig.lines(), ["first", "eof"]);
    assert!(frames.iter().any(|frame| frame.body == FrameBody::Exit(ExitStatus::Code(0))));

    // Twice is once, and nothing is taken behind it.
    let mut rig = Rig::start(|_| {});
    assert_eq!(rig.ask("hang"), "hanging");
    rig.link.close_input().unwrap();
    rig.link.close_input().unwrap();
    let late = rig.link.deliver("late", b"echo late\n");
    assert!(matches!(late, Err(LinkError::Refused(Refusal::InputClosed))), "{late:?}");
    assert_eq!(rig.frames().iter().filter(|frame| frame.body == FrameBody::StdinClosed).count(), 1);
}

#[test]
fn a_time_without_end_is_no_overflow() {
    let mut rig = Rig::start(|plan| plan.limits.kill_timeout = Duration::MAX);
    rig.link.release(Duration::MAX, Duration::MAX).unwrap();
    assert!(rig.handle.wait(Duration::MAX).unwrap());
    assert_eq!(rig.lines(), ["eof"]);
}

#[test]
fn a_release_closes_input_and_waits() {
    let mut rig = Rig::start(|_| {});
    rig.link.release(LONG, LONG).unwrap();
    let frames = rig.end();
    assert_eq!(rig.lines(), ["eof"]);
    assert!(frames.iter().any(|frame| frame.body == FrameBody::Exit(ExitStatus::Code(0))));
    assert!(!frames.iter().any(|frame| matches!(frame.body, FrameBody::Signal { .. })));
    assert!(matches!(frames.last().unwrap().body, FrameBody::Closed { cause: Cause::Release, .. }));
}

#[test]
fn a_release_goes_on_to_term_and_kill_only_when_needed() {
    let mut rig = Rig::start(|_| {});
    assert_eq!(rig.ask("hang"), "hanging");
    rig.link.release(Duration::from_millis(20), LONG).unwrap();
    let frames = rig.end();
    assert!(frames.iter().any(|frame| frame.body == FrameBody::Exit(ExitStatus::Signal(libc::SIGTERM))));

    let mut rig = Rig::start(|_| {});
    assert_eq!(rig.ask("ignore-term"), "ignoring");
    assert_eq!(rig.ask("hang"), "hanging");
    rig.link.release(Duration::from_millis(20), Duration::from_millis(20)).unwrap();
    let frames = rig.end();
    assert!(frames.iter().any(|frame| frame.body == FrameBody::Exit(ExitStatus::Signal(libc::SIGKILL))));
}

#[test]
fn s44_signals_and_kills_are_defined_after_the_end_too() {
    let mut rig = Rig::start(|plan| plan.limits.drain_timeout = Duration::from_secs(20));
    assert_eq!(rig.ask("hang"), "hanging");
    assert!(matches!(rig.link.signal(0), Err(LinkError::Refused(Refusal::Argument))));
    rig.link.signal(libc::SIGTERM).unwrap();
    let frames = rig.end();
    assert!(frames.iter().any(|frame| frame.body == FrameBody::Exit(ExitStatus::Signal(libc::SIGTERM))));
    assert!(matches!(rig.link.kill_all(), Err(LinkError::Closed)));
    assert!(matches!(rig.reconnect(), Err(LinkError::Unreachable(_))));
}

#[test]
fn without_a_runner_the_engine_ends_after_the_idle_time() {
    let mut rig = Rig::start(|plan| plan.limits.idle_ttl = Duration::from_millis(1500));
    // With one it does not: this takes longer than the idle time by the keeper's own clock.
    let begun = roundhouse_process::boottime_ns();
    wait_for("idle time", || {
        assert_eq!(rig.ask("echo here"), "here");
        (roundhouse_process::boottime_ns() - begun > 2_000_000_000).then_some(())
    });
    let (stream, ..) =
        std::mem::replace(&mut rig.link, Link::connect(&rig.dir, OWNER, REQUEST_TIMEOUT).unwrap().0)
            .into_parts();
    drop(stream);
    let (stream, ..) = Link::connect(&rig.dir, OWNER, REQUEST_TIMEOUT).unwrap().0.into_parts();
    drop(stream);
    let frames = rig.end();
    assert!(matches!(frames.last().unwrap().body, FrameBody::Closed { cause: Cause::IdleTtl, .. }));
    assert_eq!(rig.lines().last().unwrap(), "eof");
}

#[test]
fn in_mid_turn_the_time_of_a_turn_holds() {
    let mut rig = Rig::start(|plan| {
        plan.limits.idle_ttl = LONG;
        plan.limits.turn_ttl = Duration::from_millis(400);
    });
    rig.link.begin_turn("trn_1").unwrap();
    let begun = Instant::now();
    let (stream, ..) = Link::connect(&rig.dir, OWNER, REQUEST_TIMEOUT).unwrap().0.into_parts();
    drop(stream);
    let frames = rig.end();
    assert!(begun.elapsed() >= Duration::from_millis(400));
    assert!(matches!(frames.last().unwrap().body, FrameBody::Closed { cause: Cause::TurnTtl, .. }));
}

#[test]
fn in_mid_turn_an_engine_that_has_long_been_silent_is_taken_for_idle() {
    let quiet = Duration::from_millis(2000);
    let mut rig = Rig::start(|plan| {
        plan.limits.idle_ttl = LONG;
        plan.limits.quiet_ttl = quiet;
    });
    rig.link.begin_turn("trn_1").unwrap();
    // What it prints counts, and nobody listens meanwhile.
    rig.tell("ticks 5 500");
    let (stream, ..) = Link::connect(&rig.dir, OWNER, REQUEST_TIMEOUT).unwrap().0.into_parts();
    drop(stream);
    let frames = rig.end();
    let last = frames.iter().rev().find(|frame| matches!(frame.body, FrameBody::StdoutLine { .. })).unwrap();
    let closed = frames.last().unwrap();
    assert!(matches!(closed.body, FrameBody::Closed { cause: Cause::IdleTtl, .. }), "{closed:?}");
    assert_eq!(rig.lines().iter().filter(|line| line.starts_with("tick ")).count(), 5);
    // "eof" is said to the end of its input, which is how it was ended.
    let tick = frames
        .iter()
        .rev()
        .find(|frame| matches!(&frame.body, FrameBody::StdoutLine { bytes, .. } if bytes == b"tick 5"))
        .unwrap();
    assert!(last.boottime_ns - tick.boottime_ns >= u64::try_from(quiet.as_nanos()).unwrap());
}

#[test]
fn a_keeper_asked_to_terminate_ends_its_engine_first() {
    let mut rig = Rig::start(|_| {});
    assert_eq!(rig.ask("hang"), "hanging");
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(rig.handle.pid()), nix::sys::signal::Signal::SIGTERM)
        .unwrap();
    let frames = rig.end();
    assert!(frames.iter().any(|frame| frame.body == FrameBody::Exit(ExitStatus::Signal(libc::SIGTERM))));
    assert!(matches!(frames.last().unwrap().body, FrameBody::Closed { cause: Cause::Terminated, .. }));
}

#[test]
fn a_plan_that_was_cut_off_starts_nothing() {
    let tmp = tempfile::tempdir().unwrap();
    let dir = tmp.path().join("keeper");
    std::fs::create_dir(&dir).unwrap();
    let plan = plan("spl_cut").encode().unwrap();
    let mut child = std::process::Command::new(FIXTURE)
        .args([roundhouse_process::KEEPER_ARG, dir.to_str().unwrap()])
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::null())
        .spawn()
        .unwrap();
    std::io::Write::write_all(&mut child.stdin.take().unwrap(), &plan[..plan.len() - 1]).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(!output.status.success());
    assert!(String::from_utf8_lossy(&output.stdout).contains("understand the plan"));
    assert_eq!(SpoolReader::new(&dir).read_all().unwrap(), []);
}
