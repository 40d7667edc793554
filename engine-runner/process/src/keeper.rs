//! The keeper: owns one engine process, its pipes and its spool, and outlives the runner.
//!
//! One thread, one poll loop ([`run`]), no runtime. The main thread makes the init and never ends before the process
//! does, because the init's parent-death signal hangs on it.

mod ending;
mod input;
mod links;
mod output;
mod run;

use crate::directory::{CLOSED, KEEPER_NAME, LOCK, META, META_VERSION, Meta};
use crate::frame::{Cause, FrameBody};
use crate::launch::launch;
use crate::mask::Masker;
use crate::plan::{KeeperPlan, PLAN_MAX_BYTES};
use crate::record::sync_dir;
use crate::spool::{Room, SpoolWriter, segments};
use crate::{clock, sys};
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg, OFlag, open};
use nix::poll::{PollTimeout, poll};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::stat::{Mode, umask};
use std::ffi::OsString;
use std::fmt::Display;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

/// Status of a keeper that did not come to run an engine.
const FAILED: i32 = 70;

/// A scan looks at the lock for a moment; a keeper that starts just then tries again so often, 10 ms apart.
const LOCK_TRIES: usize = 100;

/// Runs as keeper; answers the process's exit status.
pub(crate) fn main(mut args: std::env::ArgsOs) -> i32 {
    match args.next().map(|dir| keep(&dir)) {
        Some(Ok(())) => 0,
        Some(Err(why)) => {
            // The runner reads the first line of standard output; once it is ready, that is gone and the log is left.
            let _ = writeln!(io::stdout(), "{why}");
            log(&why);
            FAILED
        }
        None => FAILED,
    }
}

/// A line in the keeper's own log (its standard error).
fn log(line: &dyn Display) {
    let _ = writeln!(io::stderr(), "{} {line}", clock::boottime_ns() / 1_000_000);
}

fn keep(dir: &OsString) -> Result<(), String> {
    sys::keep_memory_small();
    let _ = nix::sys::prctl::set_name(KEEPER_NAME);
    // Its own session: no terminal and no group of the runner's reaches it. It fails only for a group's leader.
    let _ = nix::unistd::setsid();
    // The engine gets the runner's umask; what the keeper makes is its own alone.
    let engine_umask = umask(Mode::from_bits_truncate(0o077));
    let plan = read_plan()?;
    let dir = PathBuf::from(dir);
    let dir_fd = sys::open_dir(&dir).map_err(context("open the directory"))?;
    let lock = take_lock(&dir.join(LOCK))?;
    let used =
        dir.join(CLOSED).exists() || !segments(&dir).map_err(context("read the directory"))?.is_empty();
    if used {
        return Err("the directory was used or closed before".to_owned());
    }
    write_meta(&dir, &plan)?;
    let limits = &plan.limits;
    let mut spool = SpoolWriter::create(&dir, &plan.spool_id, limits.segment_max, limits.spool_max)
        .map_err(|error| format!("failed to begin the spool: {error}"))?;
    let listener = bind(&dir_fd)?;
    nix::sys::prctl::set_child_subreaper(true).map_err(context("become a subreaper"))?;
    let signals = block_signals().map_err(context("block signals"))?;
    become_silent()?;

    let masker = Masker::new(&plan.secrets);
    spool.append(FrameBody::Spawn { program: plan.program.as_encoded_bytes().to_vec() }, Room::Ordinary);
    if let Err(fault) = spool.sync() {
        return Err(format!("failed to record the start: {fault:?}"));
    }
    // "No spawn frame" proves that no engine ran only if the frame cannot be lost together with its directory.
    if let Some(Err(error)) = dir.parent().map(sync_dir) {
        return Err(format!("failed to record the start: {error}"));
    }
    match launch(&plan, engine_umask.bits(), lock.as_raw_fd()) {
        Ok(launched) => {
            run::Keeper::new(run::Facts::of(plan), launched, masker, spool, listener, signals)?.run();
        }
        Err(error) => {
            log(&format_args!("{}", error.message));
            let body =
                FrameBody::SpawnFailed { stage: error.stage, errno: error.errno, message: error.message };
            spool.append(body, Room::Mark);
            let (dropped_frames, dropped_bytes) = spool.dropped();
            let cause = Cause::SpawnFailed;
            spool.append(FrameBody::Closed { cause, dropped_frames, dropped_bytes }, Room::Last);
            let _ = spool.sync();
        }
    }
    drop(lock);
    Ok(())
}

fn context<E: Display>(action: &'static str) -> impl FnOnce(E) -> String {
    move |error| format!("failed to {action}: {error}")
}

fn read_plan() -> Result<KeeperPlan, String> {
    let mut encoded = Vec::new();
    io::stdin()
        .take(PLAN_MAX_BYTES as u64 + 1)
        .read_to_end(&mut encoded)
        .map_err(context("read the plan"))?;
    // A runner that died in the middle of writing leaves a plan that ends early: it is not run.
    KeeperPlan::decode(&encoded).map_err(context("understand the plan"))
}

fn take_lock(path: &Path) -> Result<Flock<File>, String> {
    let mut file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(path)
        .map_err(context("open the lock"))?;
    for _ in 0..LOCK_TRIES {
        match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => return Ok(lock),
            Err((back, Errno::EWOULDBLOCK)) => file = back,
            Err((_, errno)) => return Err(format!("failed to lock: {errno}")),
        }
        let _ = poll(&mut [], PollTimeout::from(10_u8));
    }
    Err("another keeper holds the lock".to_owned())
}

fn write_meta(dir: &Path, plan: &KeeperPlan) -> Result<(), String> {
    let meta = Meta {
        version: META_VERSION,
        spool_id: plan.spool_id.clone(),
        owner: plan.owner.clone(),
        keeper_pid: std::process::id(),
        started_boottime_ns: clock::boottime_ns(),
        boot_id: clock::boot_id(),
        program: plan.program.to_string_lossy().into_owned(),
    };
    let json = serde_json::to_vec(&meta).map_err(context("describe itself"))?;
    let temporary = dir.join("meta.json.new");
    fs::write(&temporary, json).map_err(context("describe itself"))?;
    fs::rename(&temporary, dir.join(META)).map_err(context("describe itself"))
}

fn bind(dir: &File) -> Result<UnixListener, String> {
    let before = umask(Mode::from_bits_truncate(0o177));
    let listener = UnixListener::bind(sys::socket_path(dir));
    umask(before);
    let listener = listener.map_err(context("bind the socket"))?;
    listener.set_nonblocking(true).map_err(context("bind the socket"))?;
    Ok(listener)
}

/// Signals come by descriptor: the end of children, and a request to end. Others do nothing to a keeper.
fn block_signals() -> nix::Result<SignalFd> {
    let mut blocked = SigSet::empty();
    for signal in [Signal::SIGCHLD, Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP, Signal::SIGQUIT] {
        blocked.add(signal);
    }
    blocked.add(Signal::SIGUSR1);
    blocked.add(Signal::SIGUSR2);
    blocked.add(Signal::SIGTSTP);
    blocked.thread_block()?;
    let mut heard = SigSet::empty();
    heard.add(Signal::SIGCHLD);
    heard.add(Signal::SIGTERM);
    SignalFd::with_flags(&heard, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)
}

/// Tells the runner that the socket listens, and lets go of the pipes to it. Standard error is the log already.
fn become_silent() -> Result<(), String> {
    io::stdout()
        .write_all(b"ready\n")
        .and_then(|()| io::stdout().flush())
        .map_err(context("tell the runner"))?;
    let null = open("/dev/null", OFlag::O_RDWR | OFlag::O_CLOEXEC, Mode::empty())
        .map_err(context("open /dev/null"))?;
    for target in 0..2 {
        sys::dup_onto(null.as_fd(), target).map_err(context("let go of the runner"))?;
    }
    Ok(())
}
