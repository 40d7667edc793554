//! From the keeper to a running engine: pipes, namespaces, and the exec of the init.
//!
//! The strongest isolation that is wanted is tried first; each lower one if the system refuses. What was reached is told
//! by doing it, never guessed. The init tells over its status pipe how far it came.

use crate::INIT_ARG;
use crate::KEEPER_ENV;
use crate::clock::after;
use crate::frame::SpawnStage;
use crate::isolation::IsolationLevel;
use crate::plan::{EnvVar, KeeperPlan, list};
use crate::sys::{self, Forked};
use crate::wire::{Put, Take, WireError};
use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::mount::{MsFlags, mount};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::unistd::{Pid, pipe2};
use std::ffi::{CString, OsString};
use std::fs;
use std::os::fd::{AsFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

/// Descriptors that an init finds open. Payload pipes follow behind the last.
pub(crate) const CONTROL_FD: RawFd = 3;
pub(crate) const STATUS_FD: RawFd = 4;
pub(crate) const PLAN_FD: RawFd = 5;
pub(crate) const PAYLOAD_FD: RawFd = 6;

/// Command bytes on the control pipe.
pub(crate) const CONTROL_SIGNAL: u8 = b'S';
pub(crate) const CONTROL_KILL: u8 = b'K';

/// How long an init may take to say that the engine runs. An exec from a slow disk is in it.
const START_TIMEOUT: Duration = Duration::from_secs(30);

/// The lowest process id an engine is given.
const PID_FLOOR: u64 = 400;

/// What an init says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum InitStatus {
    /// A namespace could not be entered: which step, and the system's error.
    NamespaceFailed { step: i32, errno: i32 },
    /// The engine was exec'd.
    Started { pid: i32, level: IsolationLevel },
    /// It was not.
    SpawnFailed { stage: SpawnStage, errno: i32 },
    /// It ended by itself.
    Exited(i32),
    /// It was ended by a signal.
    Signalled(i32),
}

impl InitStatus {
    pub(crate) const BYTES: usize = 9;

    /// One message; shorter than what a pipe takes in one piece.
    pub(crate) fn encode(self) -> Vec<u8> {
        let (kind, a, b) = match self {
            Self::NamespaceFailed { step, errno } => (1, step, errno),
            Self::Started { pid, level } => (2, pid, i32::from(level.code())),
            Self::SpawnFailed { stage, errno } => (3, i32::from(stage.code()), errno),
            Self::Exited(code) => (4, code, 0),
            Self::Signalled(signal) => (5, signal, 0),
        };
        let mut put = Put::default();
        put.u8(kind).i32(a).i32(b);
        put.0
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let mut take = Take::new(bytes);
        let (kind, a, b) = (take.u8("status")?, take.i32("status")?, take.i32("status")?);
        take.end()?;
        let byte = |value: i32| u8::try_from(value).map_err(|_| WireError::Invalid("status"));
        Ok(match kind {
            1 => Self::NamespaceFailed { step: a, errno: b },
            2 => Self::Started {
                pid: a,
                level: IsolationLevel::from_code(byte(b)?).ok_or(WireError::Invalid("status"))?,
            },
            3 => Self::SpawnFailed { stage: SpawnStage::take(&mut Take::new(&[byte(a)?]))?, errno: b },
            4 => Self::Exited(a),
            5 => Self::Signalled(a),
            _ => return Err(WireError::Invalid("status")),
        })
    }
}

/// What an init is told.
#[derive(Debug)]
pub(crate) struct InitPlan {
    pub(crate) spool_id: String,
    pub(crate) level: IsolationLevel,
    pub(crate) program: OsString,
    pub(crate) args: Vec<OsString>,
    pub(crate) env: Vec<EnvVar>,
    pub(crate) cwd: OsString,
    pub(crate) payload_names: Vec<OsString>,
    pub(crate) oom_score_adj: i32,
    pub(crate) umask: u32,
    pub(crate) kill_timeout: Duration,
}

impl InitPlan {
    fn encode(plan: &KeeperPlan, level: IsolationLevel, umask: u32) -> Vec<u8> {
        let count = |length: usize| u32::try_from(length).unwrap_or(u32::MAX);
        let mut put = Put::default();
        put.str(&plan.spool_id).u8(level.code()).os(&plan.program).u32(count(plan.args.len()));
        for arg in &plan.args {
            put.os(arg);
        }
        put.u32(count(plan.env.len()));
        for var in &plan.env {
            put.os(&var.name).os(&var.value);
        }
        put.os(plan.cwd.as_os_str()).u32(count(plan.pipe_payloads.len()));
        for payload in &plan.pipe_payloads {
            put.os(&payload.env_name);
        }
        put.i32(plan.oom_score_adj).u32(umask).duration(plan.limits.kill_timeout);
        put.0
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let mut take = Take::new(bytes);
        let plan = Self {
            spool_id: take.string("spool id")?,
            level: IsolationLevel::take(&mut take)?,
            program: take.os("program")?,
            args: list(&mut take, |take| take.os("argument"))?,
            env: list(&mut take, |take| Ok(EnvVar { name: take.os("name")?, value: take.os("value")? }))?,
            cwd: take.os("working directory")?,
            payload_names: list(&mut take, |take| take.os("name"))?,
            oom_score_adj: take.i32("oom_score_adj")?,
            umask: take.u32("umask")?,
            kill_timeout: take.duration("kill timeout")?,
        };
        take.end()?;
        Ok(plan)
    }
}

/// A way to start the init.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Attempt {
    pub(crate) level: IsolationLevel,
    pub(crate) user_namespace: bool,
}

impl Attempt {
    /// All ways, strongest first.
    pub(crate) fn all() -> Vec<Self> {
        let mut attempts = Vec::new();
        if sys::euid() == 0 {
            attempts.push(Self { level: IsolationLevel::PidNamespace, user_namespace: false });
        }
        // Also for a root without the capability, as in many containers.
        attempts.push(Self { level: IsolationLevel::PidNamespace, user_namespace: true });
        attempts.push(Self { level: IsolationLevel::Subreaper, user_namespace: false });
        attempts.push(Self { level: IsolationLevel::None, user_namespace: false });
        attempts
    }

    pub(crate) fn flags(self) -> libc::c_int {
        let mut flags = 0;
        if self.level == IsolationLevel::PidNamespace {
            flags |= libc::CLONE_NEWPID | libc::CLONE_NEWNS;
        }
        if self.user_namespace {
            flags |= libc::CLONE_NEWUSER;
        }
        flags
    }

    pub(crate) fn describe(self) -> &'static str {
        match (self.level, self.user_namespace) {
            (IsolationLevel::PidNamespace, true) => "PID namespace in a user namespace",
            (IsolationLevel::PidNamespace, false) => "PID namespace",
            (IsolationLevel::Subreaper, _) => "subreaper",
            (IsolationLevel::None, _) => "no isolation",
        }
    }
}

/// Names of the steps that [`enter`] may fail at, by number.
const STEPS: [&str; 6] = [
    "map the user",
    "make / a slave",
    "mount /proc",
    "see itself as PID 1",
    "prepare descriptors",
    "exec the init",
];

pub(crate) fn step_name(step: i32) -> &'static str {
    usize::try_from(step).ok().and_then(|step| STEPS.get(step)).copied().unwrap_or("start")
}

/// Makes the new namespaces of this process (which was just cloned into them) usable. Answers the step that failed.
pub(crate) fn enter(attempt: Attempt, uid: u32, gid: u32) -> Result<(), (i32, Errno)> {
    if attempt.user_namespace {
        // The caller is mapped to itself: files look the same inside.
        let write = |path: &str, text: String| {
            fs::write(path, text)
                .map_err(|error| (0, Errno::from_raw(error.raw_os_error().unwrap_or(libc::EIO))))
        };
        match fs::write("/proc/self/setgroups", "deny") {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err((0, Errno::from_raw(error.raw_os_error().unwrap_or(libc::EIO))));
            }
            _ => {}
        }
        write("/proc/self/uid_map", format!("{uid} {uid} 1"))?;
        write("/proc/self/gid_map", format!("{gid} {gid} 1"))?;
    }
    if attempt.level != IsolationLevel::PidNamespace {
        return Ok(());
    }
    // A copy of a shared mount is shared too: without this, the new /proc would be mounted over everybody's.
    let none: Option<&str> = None;
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_SLAVE, none).map_err(|errno| (1, errno))?;
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    mount(Some("proc"), "/proc", Some("proc"), flags, none).map_err(|errno| (2, errno))?;
    let sees_itself = fs::read_link("/proc/self").is_ok_and(|link| link.as_os_str() == "1");
    if nix::unistd::getpid().as_raw() != 1 || !sees_itself {
        return Err((3, Errno::ENOTSUP));
    }
    draw_next_pid();
    Ok(())
}

/// Makes the next process of this PID namespace (the engine) get an id from a random range: engines name files after
/// their ids, and those of one home meet there. Where the kernel does not offer it, the ids are what they are.
fn draw_next_pid() {
    let most = fs::read_to_string("/proc/sys/kernel/pid_max")
        .ok()
        .and_then(|text| text.trim().parse::<u64>().ok())
        .unwrap_or(32_768)
        .min(4_000_000);
    // Tools count on from the engine's id; the room above it keeps them from wrapping at once.
    let ceiling = most.saturating_sub(most / 8).max(PID_FLOOR + 1);
    let last = PID_FLOOR + sys::random_u64() % (ceiling - PID_FLOOR);
    let _ = fs::write("/proc/sys/kernel/ns_last_pid", last.to_string());
}

/// A started engine as the keeper holds it.
#[derive(Debug)]
pub(crate) struct Launched {
    pub(crate) init: Pid,
    pub(crate) engine_pid: i32,
    pub(crate) level: IsolationLevel,
    /// Why not more; empty for the most.
    pub(crate) detail: String,
    pub(crate) control: OwnedFd,
    pub(crate) status: OwnedFd,
    pub(crate) stdin: OwnedFd,
    pub(crate) stdout: OwnedFd,
    pub(crate) stderr: OwnedFd,
}

/// Why no engine was started.
#[derive(Debug)]
pub(crate) struct LaunchError {
    pub(crate) stage: SpawnStage,
    pub(crate) errno: i32,
    pub(crate) message: String,
}

impl LaunchError {
    fn new(stage: SpawnStage, errno: Errno, message: impl Into<String>) -> Self {
        Self { stage, errno: errno as i32, message: message.into() }
    }
}

/// Starts the engine of a plan. `lock` is closed first in every child.
pub(crate) fn launch(plan: &KeeperPlan, umask: u32, lock: RawFd) -> Result<Launched, LaunchError> {
    let mut refused: Vec<String> = Vec::new();
    for attempt in Attempt::all() {
        if attempt.level > plan.isolation.at_most {
            refused.push(format!("{} was not wanted", attempt.describe()));
            continue;
        }
        if attempt.level < plan.isolation.at_least {
            break;
        }
        match try_launch(plan, umask, lock, attempt)? {
            Ok(mut launched) => {
                refused.dedup();
                launched.detail = refused.join("; ");
                return Ok(launched);
            }
            Err(why) => refused.push(format!("{}: {why}", attempt.describe())),
        }
    }
    Err(LaunchError {
        stage: SpawnStage::Isolation,
        errno: 0,
        message: format!("{} was required; {}", plan.isolation.at_least, refused.join("; ")),
    })
}

/// The inner result tells why a lower level has to do.
fn try_launch(
    plan: &KeeperPlan,
    umask: u32,
    lock: RawFd,
    attempt: Attempt,
) -> Result<Result<Launched, String>, LaunchError> {
    let prepare = |errno| LaunchError::new(SpawnStage::Prepare, errno, "failed to make pipes");
    let pipe = || pipe2(OFlag::O_CLOEXEC).map_err(prepare);
    let (stdin_read, stdin) = pipe()?;
    let (stdout, stdout_write) = pipe()?;
    let (stderr, stderr_write) = pipe()?;
    let (control_read, control) = pipe()?;
    let (status, status_write) = pipe()?;
    let (plan_read, plan_write) = pipe()?;
    let mut inherited = vec![stdin_read, stdout_write, stderr_write, control_read, status_write, plan_read];
    for payload in &plan.pipe_payloads {
        inherited.push(payload_pipe(payload.bytes.expose()).map_err(prepare)?);
    }
    let (uid, gid) = (sys::euid(), sys::egid());
    let env = CString::new(format!("{KEEPER_ENV}={}", plan.spool_id)).map_err(|_| prepare(Errno::EINVAL))?;
    let init = match sys::fork_with(attempt.flags()) {
        Ok(Forked::Parent(init)) => init,
        Ok(Forked::Child) => child(attempt, uid, gid, lock, &inherited, &env),
        // Want of processes or memory passes: it is no reason to have less isolation.
        Err(errno @ (Errno::EAGAIN | Errno::ENOMEM)) => {
            let message = format!("failed to start the init: {}", errno.desc());
            return Err(LaunchError::new(SpawnStage::Init, errno, message));
        }
        Err(errno) => return Ok(Err(format!("clone refused: {errno}"))),
    };
    drop(inherited);
    let fail = |error: LaunchError| {
        let _ = sys::kill(init.as_raw(), libc::SIGKILL);
        let _ = nix::sys::wait::waitpid(init, None);
        error
    };
    let encoded = InitPlan::encode(plan, attempt.level, umask);
    // An init that never reads is met by the deadline; one that died by the broken pipe, and its status tells why.
    let deadline = after(START_TIMEOUT);
    let sent = write_all(&plan_write, &encoded, deadline);
    drop(plan_write);
    let status_message = match read_status(&status, deadline) {
        Ok(Some(message)) => message,
        Ok(None) => {
            let errno = sent.err().unwrap_or(Errno::EPIPE);
            return Err(fail(LaunchError::new(SpawnStage::Init, errno, "the init ended without a word")));
        }
        Err(errno) => {
            return Err(fail(LaunchError::new(SpawnStage::Init, errno, "the init did not answer")));
        }
    };
    match status_message {
        InitStatus::Started { pid, level } => Ok(Ok(Launched {
            init,
            engine_pid: pid,
            level,
            detail: String::new(),
            control,
            status,
            stdin,
            stdout,
            stderr,
        })),
        InitStatus::NamespaceFailed { step, errno } => {
            let _ = fail(LaunchError::new(SpawnStage::Init, Errno::from_raw(errno), ""));
            Ok(Err(format!("failed to {}: {}", step_name(step), Errno::from_raw(errno))))
        }
        InitStatus::SpawnFailed { stage, errno } => {
            let what = match stage {
                SpawnStage::Cwd => format!("failed to enter {}", plan.cwd.display()),
                SpawnStage::Exec => format!("failed to run {}", plan.program.to_string_lossy()),
                _ => "failed to start the engine".to_owned(),
            };
            let errno = Errno::from_raw(errno);
            Err(fail(LaunchError::new(stage, errno, format!("{what}: {}", errno.desc()))))
        }
        InitStatus::Exited(_) | InitStatus::Signalled(_) => {
            Err(fail(LaunchError::new(SpawnStage::Init, Errno::EPROTO, "the init broke the protocol")))
        }
    }
}

/// A pipe that already holds the bytes and has no writer any more.
fn payload_pipe(bytes: &[u8]) -> Result<OwnedFd, Errno> {
    let (read, write) = pipe2(OFlag::O_CLOEXEC)?;
    if sys::pipe_capacity(&write, bytes.len().max(4096))? < bytes.len() {
        return Err(Errno::ENOSPC);
    }
    write_all(&write, bytes, Instant::now() + Duration::from_secs(1))?;
    Ok(read)
}

pub(crate) fn write_all(fd: impl AsFd, mut bytes: &[u8], deadline: Instant) -> Result<(), Errno> {
    sys::set_nonblocking(fd.as_fd())?;
    while !bytes.is_empty() {
        match nix::unistd::write(fd.as_fd(), bytes) {
            Ok(count) => bytes = &bytes[count..],
            Err(Errno::EINTR) => {}
            Err(Errno::EAGAIN) => await_fd(fd.as_fd(), PollFlags::POLLOUT, deadline)?,
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
}

fn await_fd(fd: impl AsFd, flags: PollFlags, deadline: Instant) -> Result<(), Errno> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let timeout = PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
        match poll(&mut [PollFd::new(fd.as_fd(), flags)], timeout) {
            Ok(0) => return Err(Errno::ETIMEDOUT),
            Ok(_) => return Ok(()),
            Err(Errno::EINTR) => {}
            Err(errno) => return Err(errno),
        }
    }
}

/// The next message of an init; none at its end.
fn read_status(fd: &OwnedFd, deadline: Instant) -> Result<Option<InitStatus>, Errno> {
    let mut message = [0; InitStatus::BYTES];
    let mut have = 0;
    while have < message.len() {
        await_fd(fd, PollFlags::POLLIN, deadline)?;
        match nix::unistd::read(fd, &mut message[have..]) {
            Ok(0) => return Ok(None),
            Ok(count) => have += count,
            Err(Errno::EINTR) => {}
            Err(errno) => return Err(errno),
        }
    }
    InitStatus::decode(&message).map(Some).map_err(|_| Errno::EPROTO)
}

/// The cloned child: enters its namespaces and becomes the init.
fn child(attempt: Attempt, uid: u32, gid: u32, lock: RawFd, inherited: &[OwnedFd], env: &CString) -> ! {
    // Before anything else: a copy of the lock's descriptor would keep the lock after the keeper's death.
    let _ = nix::unistd::close(lock);
    let result = enter(attempt, uid, gid).and_then(|()| exec_init(inherited, env));
    if let Err((step, errno)) = result {
        let message = InitStatus::NamespaceFailed { step, errno: errno as i32 }.encode();
        // Once descriptors were moved, the status pipe is where the init expects it, and only there.
        match (step, inherited.get(4)) {
            (0..4, Some(status)) => drop(nix::unistd::write(status, &message)),
            _ => drop(sys::take_fd(STATUS_FD).map(|status| nix::unistd::write(&status, &message))),
        }
    }
    sys::exit_now(70)
}

fn exec_init(inherited: &[OwnedFd], env: &CString) -> Result<(), (i32, Errno)> {
    let step = |errno| (4, errno);
    // First out of the way of the numbers they go to, then onto them.
    let mut high = Vec::new();
    for fd in inherited {
        high.push(sys::dup_above(fd.as_fd(), 100).map_err(step)?);
    }
    // What the keeper has open ends at the exec, whatever its flags say.
    sys::cloexec_from(0);
    for (target, fd) in (0..).zip(&high) {
        let fd = sys::take_fd(*fd).map_err(|_| step(Errno::EBADF))?;
        sys::dup_onto(fd.as_fd(), target).map_err(step)?;
        // The descriptor under the high number stays open until the exec closes it.
        std::mem::forget(fd);
    }
    let args = ["roundhouse-init", INIT_ARG, "run"];
    let args: Vec<CString> = args.iter().filter_map(|arg| CString::new(*arg).ok()).collect();
    nix::unistd::execve(c"/proc/self/exe", &args, std::slice::from_ref(env))
        .map(drop)
        .map_err(|errno| (5, errno))
}
