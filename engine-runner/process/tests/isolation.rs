//! Everything an engine starts is reached, at each level of isolation, and nothing outlives its keeper.
#![allow(clippy::unwrap_used, reason = "what a test does not expect fails it")]
#![allow(clippy::allow_attributes, reason = "an expectation would fail where only test functions unwrap")]

mod support;

use roundhouse_process::{
    Cause, ExitStatus, FrameBody, IsolationLevel, KeeperPlan, KeeperState, SpawnStage, SpoolReader,
    close_dead, descendants, probe, spawn_keeper, state_of, sweep,
};
use std::collections::HashSet;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;
use support::{FIXTURE, LONG, OWNER, Rig, holders, is_alive, plan, wait_for};

fn at(level: IsolationLevel) -> impl FnOnce(&mut KeeperPlan) {
    move |plan| {
        plan.isolation.at_most = level;
        plan.isolation.at_least = level;
    }
}

/// The levels this host can show. The highest is required, so that no test passes by testing nothing.
const LEVELS: [IsolationLevel; 2] = [IsolationLevel::PidNamespace, IsolationLevel::Subreaper];

fn token(test: &str, level: IsolationLevel) -> String {
    format!("token-{test}-{level}-{}", std::process::id())
}

/// Starts a detached child that holds the engine's pipes, and waits until it is there.
fn linger(rig: &mut Rig, command: &str, token: &str) {
    assert_eq!(rig.ask(&format!("{command} {token}")), "lingers true");
    wait_for("detached child", || (!holders(token).is_empty()).then_some(()));
}

#[test]
fn the_probe_tells_what_a_keeper_then_reaches() {
    let report = probe(Some(Path::new(FIXTURE))).unwrap();
    let mut rig = Rig::start(|_| {});
    assert_eq!(rig.status().isolation, report.level);
    assert_eq!(report.level, IsolationLevel::PidNamespace, "{}", report.detail);
    assert_eq!(report.detail, "");
}

#[test]
fn s43_a_detached_child_is_gone_after_kill_all() {
    for level in LEVELS {
        for command in ["linger", "linger-bare"] {
            let token = token(&format!("kill-{command}"), level);
            let mut rig = Rig::start(at(level));
            assert_eq!(rig.ask("ignore-term"), "ignoring");
            linger(&mut rig, command, &token);
            assert_eq!(rig.link.kill_all().unwrap(), 0, "{level} {command}");
            assert_eq!(holders(&token), [] as [i32; 0], "{level} {command}");
            let frames = rig.end();
            assert!(
                frames.iter().any(|frame| frame.body == FrameBody::Exit(ExitStatus::Signal(libc::SIGKILL)))
            );
            assert!(frames.iter().any(|frame| matches!(
                frame.body,
                FrameBody::Killed { cause: Cause::Requested, survivors: 0, .. }
            )));
        }
    }
}

#[test]
fn s43_what_forks_while_it_is_killed_is_gone_too() {
    for level in LEVELS {
        let token = token("spawner", level);
        let mut rig = Rig::start(at(level));
        assert_eq!(rig.ask(&format!("spawner {token}")), "spawns true");
        wait_for("some of them", || (holders(&token).len() > 5).then_some(()));
        assert_eq!(rig.link.kill_all().unwrap(), 0, "{level}");
        assert_eq!(holders(&token), [] as [i32; 0], "{level}");
        rig.end();
        assert_eq!(holders(&token), [] as [i32; 0], "{level}");
    }
}

#[test]
fn s43_pipes_held_by_a_detached_child_do_not_hold_up_the_exit() {
    for level in LEVELS {
        let token = token("exit", level);
        let mut rig = Rig::start(|plan| {
            at(level)(plan);
            // Nobody has to wait for this: the child is killed as the engine ends.
            plan.limits.drain_timeout = Duration::from_secs(25);
        });
        linger(&mut rig, "linger", &token);
        rig.tell("exit 0");
        let frames = rig.end();
        assert_eq!(holders(&token), [] as [i32; 0], "{level}");
        assert!(frames.iter().any(|frame| frame.body == FrameBody::StdoutEof { clean: true }), "{level}");
        assert!(frames.iter().any(|frame| frame.body == FrameBody::Exit(ExitStatus::Code(0))), "{level}");
    }
}

#[test]
fn nothing_outlives_the_keepers_own_sigkill() {
    for level in LEVELS {
        let token = token("sigkill", level);
        let mut rig = Rig::start(at(level));
        assert_eq!(rig.ask("ignore-term"), "ignoring");
        linger(&mut rig, "linger", &token);
        let init = rig.status().init_pid;
        let below: Vec<i32> = descendants(init).into_iter().map(|process| process.pid).collect();
        assert!(below.len() >= 2, "the engine and its child are below the init: {below:?}");
        rig.handle.kill().unwrap();
        assert!(rig.handle.wait(LONG).unwrap());
        assert_eq!(state_of(&rig.dir, OWNER).unwrap(), KeeperState::Dead, "nobody else holds the lock");
        wait_for("end of all", || {
            (holders(&token).is_empty() && !is_alive(init) && !below.iter().any(|pid| is_alive(*pid)))
                .then_some(())
        });
        // No exit was told, and the spool is still read to its last frame.
        assert!(!rig.frames().iter().any(|frame| matches!(frame.body, FrameBody::Exit(_))));
        let closed = close_dead(&rig.dir, OWNER, LONG).unwrap();
        assert_eq!(closed.sweep.survivors, 0);
    }
}

#[test]
fn a_killed_init_takes_its_engine_along() {
    for level in LEVELS {
        let mut rig = Rig::start(at(level));
        let token = token("init", level);
        linger(&mut rig, "linger", &token);
        let init = rig.status().init_pid;
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(init), nix::sys::signal::Signal::SIGKILL).unwrap();
        let frames = rig.end();
        assert!(frames.iter().any(|frame| frame.body == FrameBody::Exit(ExitStatus::Unknown)), "{level}");
        assert_eq!(holders(&token), [] as [i32; 0], "{level}");
    }
}

#[test]
fn what_a_dead_keeper_left_is_swept_by_its_id_alone() {
    let token = token("sweep", IsolationLevel::None);
    let spool_id = format!("spl_sweep{}", std::process::id());
    let start = |id: &str, token: &str| {
        Command::new("setsid")
            .args(["-f", FIXTURE, "linger", token])
            .env(roundhouse_process::KEEPER_ENV, id)
            .status()
            .unwrap()
    };
    assert!(start(&spool_id, &token).success());
    let other = format!("{token}-other");
    assert!(start(&format!("{spool_id}x"), &other).success());
    wait_for("both", || (!holders(&token).is_empty() && !holders(&other).is_empty()).then_some(()));
    let report = sweep(&spool_id, LONG);
    assert_eq!((report.killed, report.survivors), (1, 0));
    assert!(holders(&token).is_empty());
    assert_eq!(holders(&other).len(), 1, "another keeper's process was touched");
    assert_eq!(sweep(&format!("{spool_id}x"), LONG).killed, 1);
}

#[test]
fn engine_ids_are_drawn_and_a_namespace_has_its_own_proc() {
    let mut seen = HashSet::new();
    for _ in 0..4 {
        let mut rig = Rig::start(at(IsolationLevel::PidNamespace));
        let answer = rig.ask("pid");
        let pid: i32 = answer.split(' ').nth(1).unwrap().parse().unwrap();
        assert_eq!(answer, format!("pid {pid} session {pid}"), "the engine leads its own session");
        assert_eq!(rig.status().engine_pid, pid);
        assert!(pid > 400, "{pid}");
        seen.insert(pid);
        // The kernel cuts names at 15 bytes.
        assert_eq!(rig.ask("cat /proc/1/comm"), "roundhouse-init");
    }
    assert!(seen.len() >= 3, "{seen:?}");
}

#[test]
fn what_is_required_and_cannot_be_is_refused() {
    let tmp = tempfile::tempdir().unwrap();
    let dir = tmp.path().join("keeper");
    let mut plan = plan("spl_refused");
    plan.isolation.at_most = IsolationLevel::Subreaper;
    plan.isolation.at_least = IsolationLevel::PidNamespace;
    let handle = spawn_keeper(&dir, &plan, Some(Path::new(FIXTURE))).unwrap();
    assert!(handle.wait(LONG).unwrap());
    let frames = SpoolReader::new(&dir).read_all().unwrap();
    assert!(frames.iter().any(|frame| matches!(&frame.body,
        FrameBody::SpawnFailed { stage: SpawnStage::Isolation, message, .. } if message.contains("PID_NAMESPACE"))));
}

#[test]
fn without_isolation_the_engine_itself_is_still_reached() {
    let mut rig = Rig::start(at(IsolationLevel::None));
    assert_eq!(rig.ask("ignore-term"), "ignoring");
    assert_eq!(rig.status().isolation, IsolationLevel::None);
    assert_eq!(rig.link.kill_all().unwrap(), 0);
    let frames = rig.end();
    assert!(frames.iter().any(|frame| frame.body == FrameBody::Exit(ExitStatus::Signal(libc::SIGKILL))));
}

#[test]
fn an_init_that_is_stopped_is_killed_with_all_below() {
    let mut rig = Rig::start(at(IsolationLevel::PidNamespace));
    let token = token("stopped", IsolationLevel::PidNamespace);
    linger(&mut rig, "linger", &token);
    let init = nix::unistd::Pid::from_raw(rig.status().init_pid);
    nix::sys::signal::kill(init, nix::sys::signal::Signal::SIGSTOP).unwrap();
    assert_eq!(rig.link.kill_all().unwrap(), 0);
    assert_eq!(holders(&token), [] as [i32; 0]);
    rig.end();
}

#[test]
fn orphans_come_to_a_subreaper_and_are_reaped() {
    let output = Command::new(FIXTURE).arg("reap").output().unwrap();
    assert_eq!(text(&output), "reaped");
}

/// A copy of the fixture that any user may run, and a directory for it.
fn open_to_all() -> (tempfile::TempDir, PathBuf, PathBuf) {
    let tmp = tempfile::tempdir().unwrap();
    let exe = tmp.path().join("fixture");
    std::fs::copy(FIXTURE, &exe).unwrap();
    let dir = tmp.path().join("state");
    std::fs::create_dir(&dir).unwrap();
    for path in [tmp.path(), &exe] {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).unwrap();
    }
    std::fs::set_permissions(&dir, std::fs::Permissions::from_mode(0o777)).unwrap();
    (tmp, exe, dir)
}

fn text(output: &Output) -> String {
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout.clone()).unwrap().trim_end().to_owned()
}

fn is_root() -> bool {
    nix::unistd::geteuid().is_root()
}

#[test]
fn a_user_without_rights_reaches_a_pid_namespace_through_a_user_namespace() {
    let (_tmp, exe, dir) = open_to_all();
    let uid = if is_root() { 65534 } else { nix::unistd::geteuid().as_raw() };
    let run = |args: &[&str]| {
        let mut command = if is_root() {
            let mut command = Command::new("setpriv");
            command.args(["--reuid=65534", "--regid=65534", "--clear-groups"]).arg(&exe);
            command
        } else {
            Command::new(&exe)
        };
        command.args(args).output().unwrap()
    };
    assert_eq!(text(&run(&["probe"])), "PID_NAMESPACE true");
    let seen = text(&run(&["host", dir.to_str().unwrap()]));
    assert!(seen.starts_with(&format!("PID_NAMESPACE map={uid} {uid} 1 pid ")), "{seen}");
    let pid: i32 = seen.split(' ').nth(5).unwrap().parse().unwrap();
    assert!(pid > 400, "ids are drawn there too: {seen}");
}

#[test]
fn without_pid_namespaces_the_next_level_is_reached_and_the_reason_told() {
    let (_tmp, exe, dir) = open_to_all();
    // In a user namespace of its own, this forbids them to itself and all below.
    let run = |args: &str| {
        let script = format!("echo 0 > /proc/sys/user/max_pid_namespaces && exec {} {args}", exe.display());
        Command::new("unshare").args(["--user", "--map-root-user", "sh", "-c", &script]).output().unwrap()
    };
    let output = run("probe");
    assert_eq!(text(&output), "SUBREAPER false");
    let detail = String::from_utf8(output.stderr).unwrap();
    assert!(detail.contains("PID namespace: clone refused"), "{detail}");
    let seen = text(&run(&format!("host {}", dir.display())));
    assert!(seen.starts_with("SUBREAPER "), "{seen}");
}

/// In a mount namespace of its own, made by a user namespace where this is not root.
fn in_mount_namespace(propagation: &str, exe: &Path, args: &[&str]) -> Output {
    let mut command = Command::new("unshare");
    if !is_root() {
        command.args(["--user", "--map-root-user"]);
    }
    command.args(["--mount", "--propagation", propagation]).arg(exe).args(args).output().unwrap()
}

#[test]
fn a_shared_root_is_not_mounted_over() {
    let (_tmp, exe, dir) = open_to_all();
    let output = in_mount_namespace("shared", &exe, &["shared-root", dir.to_str().unwrap()]);
    assert_eq!(text(&output), "roundhouse-init");
}

#[test]
fn a_full_disk_still_gets_its_end() {
    // Full in the middle of a segment, and as the next one is begun.
    for segment_max in ["16777216", "65536"] {
        let (_tmp, exe, dir) = open_to_all();
        let output = in_mount_namespace("private", &exe, &["full-disk", dir.to_str().unwrap(), segment_max]);
        assert_eq!(text(&output), "dropped true", "segments of {segment_max}");
    }
}
