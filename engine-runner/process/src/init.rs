//! The init: PID 1 of an engine's namespace, or a plain subreaper where there is none.
//!
//! It starts the engine, reaps, passes signals on, reports how the engine ended, and never outlives the keeper: by the
//! parent-death signal and by the end of the control pipe, whose only write end is the keeper's. As PID 1 its own end
//! takes everything with it. As a subreaper it stays until the keeper has swept, and sweeps itself when the keeper died.

use crate::KEEPER_ENV;
use crate::frame::SpawnStage;
use crate::isolation::IsolationLevel;
use crate::launch::{
    Attempt, CONTROL_FD, CONTROL_KILL, CONTROL_SIGNAL, InitPlan, InitStatus, PAYLOAD_FD, PLAN_FD, STATUS_FD,
    enter, step_name,
};
use crate::plan::PLAN_MAX_BYTES;
use crate::procfs;
use crate::sweep::sweep_below;
use crate::sys::{self, Forked};
use nix::errno::Errno;
use nix::fcntl::{OFlag, open};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::stat::{Mode, umask};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::{Pid, pipe2};
use std::ffi::{CString, OsString};
use std::fs;
use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};

/// Status of an init that could not do its work.
const BROKEN: i32 = 70;

/// Runs as init, or as the isolation probe. Answers the process's exit status.
pub(crate) fn main(mut args: std::env::ArgsOs) -> i32 {
    match args.next() {
        Some(mode) if mode == "run" => run().unwrap_or(BROKEN),
        Some(mode) if mode == "probe" => probe(),
        _ => BROKEN,
    }
}

/// Tries the ways to isolate, strongest first, and prints the first that works.
fn probe() -> i32 {
    let (uid, gid) = (sys::euid(), sys::egid());
    let mut refused = Vec::new();
    let mut reached = Attempt { level: IsolationLevel::None, user_namespace: false };
    for attempt in Attempt::all() {
        let result = match attempt.level {
            IsolationLevel::PidNamespace => try_namespace(attempt, uid, gid),
            IsolationLevel::Subreaper => become_subreaper().map_err(|errno| errno.to_string()),
            IsolationLevel::None => Ok(()),
        };
        match result {
            Ok(()) => {
                reached = attempt;
                break;
            }
            Err(why) => refused.push(format!("{}: {why}", attempt.describe())),
        }
    }
    let user = if reached.user_namespace { "user" } else { "same" };
    let detail = refused.join("; ").replace(['\t', '\n'], " ");
    let line = format!("{}\t{user}\t{detail}\n", reached.level);
    i32::from(io::stdout().write_all(line.as_bytes()).is_err())
}

fn try_namespace(attempt: Attempt, uid: u32, gid: u32) -> Result<(), String> {
    let (read, write) = pipe2(OFlag::O_CLOEXEC).map_err(|errno| errno.to_string())?;
    let child = match sys::fork_with(attempt.flags()) {
        Ok(Forked::Parent(child)) => child,
        Ok(Forked::Child) => {
            let (step, errno) = match enter(attempt, uid, gid) {
                Ok(()) => (0, 0),
                Err((step, errno)) => (step, errno as i32),
            };
            let _ = nix::unistd::write(&write, &InitStatus::NamespaceFailed { step, errno }.encode());
            sys::exit_now(0)
        }
        Err(errno) => return Err(format!("clone refused: {errno}")),
    };
    drop(write);
    let mut message = Vec::new();
    let result = fs::File::from(read).read_to_end(&mut message);
    let _ = waitpid(child, None);
    match (result, InitStatus::decode(&message)) {
        (Ok(_), Ok(InitStatus::NamespaceFailed { errno: 0, .. })) => Ok(()),
        (Ok(_), Ok(InitStatus::NamespaceFailed { step, errno })) => {
            Err(format!("failed to {}: {}", step_name(step), Errno::from_raw(errno)))
        }
        _ => Err("the probe died".to_owned()),
    }
}

/// Also checks that /proc shows this process: without it a sweep sees nothing.
fn become_subreaper() -> Result<(), Errno> {
    nix::sys::prctl::set_child_subreaper(true)?;
    let me = nix::unistd::getpid().as_raw();
    procfs::process(me).map(drop).ok_or(Errno::ENOENT)
}

fn run() -> Result<i32, io::Error> {
    let _ = nix::sys::prctl::set_name(c"roundhouse-init");
    let is_pid_one = nix::unistd::getpid().as_raw() == 1;
    if is_pid_one {
        // The keeper made this process from its main thread, which never ends before the keeper does. If it is dead
        // already, the control pipe says so below.
        nix::sys::prctl::set_pdeathsig(Signal::SIGKILL)?;
    }
    // Out of the keeper's process group: what an engine sends to its own group must not meet the keeper.
    let _ = nix::unistd::setsid();
    let mut signals = SigSet::all();
    signals.remove(Signal::SIGSEGV);
    signals.remove(Signal::SIGBUS);
    signals.thread_block()?;
    let mut child_signal = SigSet::empty();
    child_signal.add(Signal::SIGCHLD);
    let child_signals = SignalFd::with_flags(&child_signal, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)?;

    sys::cloexec_from(3);
    let control = sys::take_fd(CONTROL_FD)?;
    let status = sys::take_fd(STATUS_FD)?;
    let mut encoded = Vec::new();
    fs::File::from(sys::take_fd(PLAN_FD)?).take(PLAN_MAX_BYTES as u64 * 2).read_to_end(&mut encoded)?;
    let plan =
        InitPlan::decode(&encoded).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
    drop(encoded);
    let level = match plan.level {
        IsolationLevel::Subreaper if become_subreaper().is_err() => IsolationLevel::None,
        level => level,
    };
    let engine = match start(&plan, is_pid_one) {
        Ok(engine) => engine,
        Err((stage, errno)) => {
            say(&status, InitStatus::SpawnFailed { stage, errno: errno as i32 });
            return Ok(BROKEN);
        }
    };
    let mut init = Init {
        control,
        status,
        engine: Some(engine),
        is_pid_one,
        kill_timeout: plan.kill_timeout,
        spool_id: plan.spool_id.clone(),
    };
    // Environment and arguments are the engine's now; no second copy is kept here.
    drop(plan);
    say(&init.status, InitStatus::Started { pid: engine.as_raw(), level });
    init.serve(&child_signals)
}

fn say(status: &OwnedFd, message: InitStatus) {
    // Shorter than PIPE_BUF and the keeper always reads: it goes in one piece or the keeper is gone.
    let _ = nix::unistd::write(status, &message.encode());
}

struct Init {
    control: OwnedFd,
    status: OwnedFd,
    /// The engine, until it is reaped: as long its id is its own.
    engine: Option<Pid>,
    is_pid_one: bool,
    kill_timeout: std::time::Duration,
    spool_id: String,
}

impl Init {
    fn serve(&mut self, child_signals: &SignalFd) -> Result<i32, io::Error> {
        let mut pending = Vec::new();
        loop {
            let mut fds = [
                PollFd::new(child_signals.as_fd(), PollFlags::POLLIN),
                PollFd::new(self.control.as_fd(), PollFlags::POLLIN),
            ];
            match poll(&mut fds, PollTimeout::NONE) {
                Ok(_) | Err(Errno::EINTR) => {}
                Err(errno) => return Err(errno.into()),
            }
            let control_ready = fds[1].any().unwrap_or(true);
            while let Ok(Some(_)) = child_signals.read_signal() {}
            if self.reap() && self.is_pid_one {
                // The kernel ends everything that is left in the namespace.
                return Ok(0);
            }
            if control_ready && !self.obey(&mut pending) {
                if !self.is_pid_one {
                    let me = nix::unistd::getpid().as_raw();
                    let _ = sweep_below(&self.spool_id, &[me], &[], self.kill_timeout);
                }
                return Ok(0);
            }
        }
    }

    /// Reaps whoever ended; true when the engine is gone.
    fn reap(&mut self) -> bool {
        loop {
            let (pid, message) = match waitpid(None, Some(WaitPidFlag::WNOHANG)) {
                Ok(WaitStatus::Exited(pid, code)) => (pid, InitStatus::Exited(code)),
                Ok(WaitStatus::Signaled(pid, signal, _)) => (pid, InitStatus::Signalled(signal as i32)),
                Ok(WaitStatus::StillAlive) | Err(_) => return self.engine.is_none(),
                Ok(_) => continue,
            };
            if self.engine == Some(pid) {
                self.engine = None;
                say(&self.status, message);
            }
        }
    }

    /// Does what the control pipe says; false when the keeper is gone (or has closed it).
    fn obey(&mut self, pending: &mut Vec<u8>) -> bool {
        let mut buffer = [0; 256];
        match nix::unistd::read(&self.control, &mut buffer) {
            Ok(0) => return false,
            Ok(count) => pending.extend_from_slice(&buffer[..count]),
            Err(Errno::EINTR | Errno::EAGAIN) => {}
            Err(_) => return false,
        }
        loop {
            match pending.first().copied() {
                Some(CONTROL_KILL) => {
                    pending.drain(..1);
                    if self.is_pid_one {
                        // In a PID namespace -1 means everybody in it but its PID 1.
                        let _ = sys::kill(-1, libc::SIGKILL);
                    }
                }
                Some(CONTROL_SIGNAL) => {
                    let Some(signal) = pending.get(1..5).and_then(|bytes| bytes.try_into().ok()) else {
                        return true;
                    };
                    let signal = i32::from_le_bytes(signal);
                    pending.drain(..5);
                    if let Some(engine) = self.engine {
                        let _ = sys::kill(engine.as_raw(), signal);
                    }
                }
                Some(_) => return false,
                None => return true,
            }
        }
    }
}

/// Forks and execs the engine; answers its process id once the exec has worked.
fn start(plan: &InitPlan, is_pid_one: bool) -> Result<Pid, (SpawnStage, Errno)> {
    let prepare = |errno| (SpawnStage::Prepare, errno);
    let (failure_read, failure) = pipe2(OFlag::O_CLOEXEC).map_err(prepare)?;
    let mut payloads = Vec::new();
    for (target, _) in (PAYLOAD_FD..).zip(&plan.payload_names) {
        payloads.push(sys::take_fd(target).map_err(|_| prepare(Errno::EBADF))?);
    }
    let me = nix::unistd::getpid();
    let engine = match sys::fork().map_err(prepare)? {
        Forked::Parent(engine) => engine,
        Forked::Child => {
            let (stage, errno) = exec_engine(plan, &payloads, is_pid_one, me);
            let _ = nix::unistd::write(
                &failure,
                &InitStatus::SpawnFailed { stage, errno: errno as i32 }.encode(),
            );
            sys::exit_now(127)
        }
    };
    drop(failure);
    drop(payloads);
    // The pipes' ends are the engine's alone: their closing must be seen.
    let null = open("/dev/null", OFlag::O_RDWR | OFlag::O_CLOEXEC, Mode::empty()).map_err(prepare)?;
    for target in 0..3 {
        sys::dup_onto(null.as_fd(), target).map_err(prepare)?;
    }
    let mut message = Vec::new();
    let read = fs::File::from(failure_read).read_to_end(&mut message);
    match (read, InitStatus::decode(&message)) {
        (Ok(0), _) => Ok(engine),
        (Ok(_), Ok(InitStatus::SpawnFailed { stage, errno })) => Err((stage, Errno::from_raw(errno))),
        _ => Err((SpawnStage::Exec, Errno::EPROTO)),
    }
}

/// The forked child: becomes the engine, or answers why not.
fn exec_engine(plan: &InitPlan, payloads: &[OwnedFd], is_pid_one: bool, init: Pid) -> (SpawnStage, Errno) {
    let prepare = |errno| (SpawnStage::Prepare, errno);
    if !is_pid_one {
        // Without a namespace, this is what ends the engine if its init is killed.
        let _ = nix::sys::prctl::set_pdeathsig(Signal::SIGKILL);
        if nix::unistd::getppid() != init {
            return prepare(Errno::ESRCH);
        }
    }
    if let Err(errno) = nix::unistd::setsid() {
        return prepare(errno);
    }
    raise_oom_score(plan.oom_score_adj);
    umask(Mode::from_bits_truncate(plan.umask));
    let mut env = Vec::new();
    for var in &plan.env {
        if !plan.payload_names.contains(&var.name) && var.name != KEEPER_ENV {
            env.push(entry(&var.name, var.value.as_bytes()));
        }
    }
    env.push(entry(&OsString::from(KEEPER_ENV), plan.spool_id.as_bytes()));
    for (name, payload) in plan.payload_names.iter().zip(payloads) {
        match sys::dup_above(payload.as_fd(), 10) {
            Ok(fd) => env.push(entry(name, fd.to_string().as_bytes())),
            Err(errno) => return prepare(errno),
        }
    }
    let program = CString::new(plan.program.as_bytes());
    let args: Result<Vec<CString>, _> =
        std::iter::once(&plan.program).chain(&plan.args).map(|arg| CString::new(arg.as_bytes())).collect();
    let env: Result<Vec<CString>, _> = env.into_iter().collect();
    let (Ok(program), Ok(args), Ok(env)) = (program, args, env) else { return prepare(Errno::EINVAL) };
    if let Err(errno) = nix::unistd::chdir(plan.cwd.as_os_str()) {
        return (SpawnStage::Cwd, errno);
    }
    sys::reset_signals();
    match nix::unistd::execve(&program, &args, &env) {
        Ok(never) => match never {},
        Err(errno) => (SpawnStage::Exec, errno),
    }
}

fn entry(name: &OsString, value: &[u8]) -> Result<CString, std::ffi::NulError> {
    let mut bytes = name.clone().into_vec();
    bytes.push(b'=');
    bytes.extend_from_slice(value);
    CString::new(bytes)
}

/// Makes the engine the first to go when memory runs out. Raising needs no right; where it fails, nothing is lost.
fn raise_oom_score(by: i32) {
    let now: i32 = fs::read_to_string("/proc/self/oom_score_adj")
        .ok()
        .and_then(|text| text.trim().parse().ok())
        .unwrap_or(0);
    let _ = fs::write("/proc/self/oom_score_adj", (now + by).min(1000).to_string());
}
