//! A keeper's directory as the runner sees it: starting a keeper, finding live and dead ones, awaiting an end.
//!
//! ```text
//! <dir>/            0700, one per engine process
//!   lock            held (flock) by the keeper for as long as it lives: this alone says "alive"
//!   sock            its socket, 0600
//!   meta.json       owner, spool id, pid, start time, boot id: for display, and to know the owner
//!   keeper.log      what the keeper itself has to say
//!   closed          there once the runner has closed a dead keeper's directory: no keeper starts here again
//!   000001.spool    segments
//! ```

use crate::clock::{self, after};
use crate::launch::write_all;
use crate::plan::{KeeperPlan, PlanError};
use crate::sweep::{SweepReport, sweep};
use crate::{INIT_ARG, KEEPER_ARG};
use crate::{procfs, sys};
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::wait::{Id, WaitPidFlag, waitid};
use serde::{Deserialize, Serialize};
use std::ffi::CStr;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read as _};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Name of the lock file.
pub(crate) const LOCK: &str = "lock";
/// Name of the description.
pub(crate) const META: &str = "meta.json";
/// Name of the keeper's own log.
pub(crate) const LOG: &str = "keeper.log";
/// Name of the mark that no keeper starts here again.
pub(crate) const CLOSED: &str = "closed";

/// How long a keeper may take from its start until its socket listens.
pub(crate) const READY_TIMEOUT: Duration = Duration::from_secs(10);

/// Version of `meta.json`, the spool and the protocol together, as this code writes them.
pub(crate) const META_VERSION: u16 = 1;

/// The kernel's short name of a keeper.
pub(crate) const KEEPER_NAME: &CStr = c"roundhouse-keep";

/// What `meta.json` holds. Only `spool_id` and `owner` are ever decided by; the rest is for people, and shows that a
/// directory is a copy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Meta {
    pub(crate) version: u16,
    pub(crate) spool_id: String,
    pub(crate) owner: String,
    pub(crate) keeper_pid: u32,
    pub(crate) started_boottime_ns: u64,
    pub(crate) boot_id: String,
    pub(crate) program: String,
}

/// Why a keeper was not started.
#[derive(Debug, thiserror::Error)]
pub enum SpawnError {
    /// The plan is not valid.
    #[error("launch plan is not valid")]
    Plan(#[source] PlanError),
    /// The directory could not be made, or is there already.
    #[error("failed to make the keeper's directory")]
    Directory(#[source] io::Error),
    /// The keeper's executable could not be started.
    #[error("failed to start the keeper")]
    Start(#[source] io::Error),
    /// The keeper ended (or hung) before it was ready; its log tells more.
    #[error("keeper did not become ready: {0}")]
    NotReady(String),
}

/// Why a keeper's directory could not be used.
#[derive(Debug, thiserror::Error)]
pub enum KeeperDirError {
    /// The system refused.
    #[error("failed to {action} a keeper's directory")]
    Io {
        /// What was tried.
        action: &'static str,
        /// The system's answer.
        #[source]
        source: io::Error,
    },
    /// The keeper is alive.
    #[error("the keeper is alive")]
    Alive,
    /// The directory belongs to another runner or user.
    #[error("the directory belongs to another runner")]
    Foreign,
}

impl KeeperDirError {
    fn io(action: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { action, source }
    }
}

/// What a keeper's directory says about its keeper.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeeperState {
    /// The lock is held: it lives (though it may be stopped).
    Live,
    /// The lock is free: it is dead, whatever any recorded process id is doing.
    Dead,
    /// It is another runner's, another user's, a newer program's, or a copy of a directory whose keeper lives: to be left
    /// alone.
    Foreign,
}

/// A keeper's directory found by [`scan`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeeperFound {
    /// The directory.
    pub dir: PathBuf,
    /// The spool's id: from the description, else the directory's name.
    pub spool_id: String,
    /// What it says.
    pub state: KeeperState,
}

/// A dead keeper whose leftovers were cleared away.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeadKeeper {
    /// The spool's id.
    pub spool_id: String,
    /// What the sweep found.
    pub sweep: SweepReport,
}

/// Starts a keeper with a new directory `dir` (its parent must exist), and waits until its socket listens. The engine
/// is started by the keeper from then on: its frames tell what became of it.
///
/// `executable` is what to run as keeper and init; none is this very executable. Blocks, about 10 ms; at most 10 s.
///
/// # Errors
/// [`SpawnError`]. No keeper is left behind; the directory may be, with the keeper's log.
pub fn spawn_keeper(
    dir: &Path,
    plan: &KeeperPlan,
    executable: Option<&Path>,
) -> Result<KeeperHandle, SpawnError> {
    let encoded = plan.encode().map_err(SpawnError::Plan)?;
    if !dir.is_absolute() {
        return Err(SpawnError::Directory(io::Error::from(io::ErrorKind::InvalidInput)));
    }
    DirBuilder::new().mode(0o700).create(dir).map_err(SpawnError::Directory)?;
    let log = OpenOptions::new()
        .append(true)
        .create(true)
        .mode(0o600)
        .open(dir.join(LOG))
        .map_err(SpawnError::Directory)?;
    let mut command = Command::new(executable.unwrap_or_else(|| Path::new("/proc/self/exe")));
    command.arg0("roundhouse-keeper").arg(KEEPER_ARG).arg(dir).env_clear().current_dir("/");
    #[cfg(feature = "failpoints")]
    if let Some(directory) = std::env::var_os(crate::failpoint::DIRECTORY) {
        command.env(crate::failpoint::DIRECTORY, directory);
    }
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(log)
        .spawn()
        .map_err(SpawnError::Start)?;
    let failed = |mut child: std::process::Child, why: String| {
        let _ = child.kill();
        let _ = child.wait();
        SpawnError::NotReady(why)
    };
    // The child is not reaped before this, so its id is its own.
    let pid = i32::try_from(child.id()).unwrap_or(0);
    let pidfd = match sys::pidfd_open(pid) {
        Ok(pidfd) => pidfd,
        Err(errno) => return Err(failed(child, format!("no descriptor for it: {errno}"))),
    };
    let (Some(plan_pipe), Some(mut ready_pipe)) = (child.stdin.take(), child.stdout.take()) else {
        return Err(failed(child, "no pipes to it".to_owned()));
    };
    // A keeper reads the whole plan before anything else; one that dies instead breaks the pipe.
    let deadline = after(READY_TIMEOUT);
    let sent = write_all(&plan_pipe, &encoded, deadline).map_err(io::Error::from);
    drop(plan_pipe);
    let answer = read_line(&mut ready_pipe, deadline);
    match (sent, answer) {
        (Ok(()), Ok(answer)) if answer == b"ready\n" => Ok(KeeperHandle { pid, pidfd }),
        (_, Ok(answer)) if !answer.is_empty() => {
            Err(failed(child, String::from_utf8_lossy(&answer).trim_end().to_owned()))
        }
        (Err(error), _) | (_, Err(error)) => Err(failed(child, error.to_string())),
        _ => Err(failed(child, "it ended".to_owned())),
    }
}

/// Reads a child's one line, at most 4 KiB and no longer than the deadline.
pub(crate) fn read_line(pipe: &mut std::process::ChildStdout, deadline: Instant) -> io::Result<Vec<u8>> {
    let mut answer = Vec::new();
    let mut buffer = [0; 512];
    while answer.len() < 4096 && !answer.ends_with(b"\n") {
        let left = deadline.saturating_duration_since(Instant::now());
        let timeout = PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
        match poll(&mut [PollFd::new(pipe.as_fd(), PollFlags::POLLIN)], timeout) {
            Ok(0) => return Err(io::Error::from(io::ErrorKind::TimedOut)),
            Ok(_) => {}
            Err(Errno::EINTR) => continue,
            Err(errno) => return Err(errno.into()),
        }
        match pipe.read(&mut buffer)? {
            0 => break,
            count => answer.extend_from_slice(&buffer[..count]),
        }
    }
    Ok(answer)
}

/// A keeper process, held by a descriptor: its id may be recycled, the descriptor may not. Dropping it does nothing to
/// the keeper.
#[derive(Debug)]
pub struct KeeperHandle {
    pid: i32,
    pidfd: OwnedFd,
}

impl KeeperHandle {
    /// Takes hold of a live keeper that an earlier runner started. `keeper_pid` is what [`crate::Link::keeper_pid`]
    /// tells: the link must still be open, and `dir` must be its directory.
    ///
    /// # Errors
    /// [`KeeperDirError`] when the keeper is dead or its process cannot be reached from here.
    pub fn adopt(dir: &Path, keeper_pid: i32) -> Result<Self, KeeperDirError> {
        if keeper_pid <= 0 {
            return Err(KeeperDirError::Io {
                action: "find the process of",
                source: io::Error::from(io::ErrorKind::NotFound),
            });
        }
        let pidfd = sys::pidfd_open(keeper_pid)
            .map_err(|errno| KeeperDirError::io("open the process of")(errno.into()))?;
        // The lock is still held after the descriptor was opened, so the id was the keeper's own as it was opened.
        match lock_state(dir)? {
            KeeperState::Live => Ok(Self { pid: keeper_pid, pidfd }),
            KeeperState::Dead | KeeperState::Foreign => Err(KeeperDirError::Io {
                action: "find the process of",
                source: io::Error::from(io::ErrorKind::NotFound),
            }),
        }
    }

    /// Takes hold of a live keeper that does not answer: the system tells whose socket it is, and no answer is needed
    /// for that. It makes no link.
    ///
    /// # Errors
    /// [`KeeperDirError`] when the keeper is dead or its socket or process cannot be reached from here.
    pub fn find(dir: &Path) -> Result<Self, KeeperDirError> {
        let stream = sys::connect_in(dir, Duration::from_secs(1))
            .map_err(KeeperDirError::io("reach the socket of"))?;
        let peer = sys::peer(stream.as_fd()).map_err(KeeperDirError::io("reach the socket of"))?;
        Self::adopt(dir, peer.pid)
    }

    /// The keeper's process id, for display.
    #[must_use]
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// Waits until the keeper is dead; false when `timeout` passed first. Reaps it if it is this process's child. For
    /// async use, wait for [`AsFd`] to become readable and then call this with no time.
    ///
    /// # Errors
    /// [`KeeperDirError::Io`].
    pub fn wait(&self, timeout: Duration) -> Result<bool, KeeperDirError> {
        let deadline = after(timeout);
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let limit = PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
            match poll(&mut [PollFd::new(self.pidfd.as_fd(), PollFlags::POLLIN)], limit) {
                Ok(0) => return Ok(false),
                Ok(_) => break,
                Err(Errno::EINTR) => {}
                Err(errno) => return Err(KeeperDirError::io("await the end of")(errno.into())),
            }
        }
        // Somebody else may have reaped it, or it never was a child of this process: both are fine.
        let _ = waitid(Id::PIDFd(self.pidfd.as_fd()), WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG);
        Ok(true)
    }

    /// SIGKILL to the keeper itself, for one that does not answer. Its init and all below die with it where a PID
    /// namespace was reached; otherwise [`close_dead`] clears up.
    ///
    /// # Errors
    /// [`KeeperDirError::Io`]; a keeper that is dead already is no error.
    pub fn kill(&self) -> Result<(), KeeperDirError> {
        match sys::pidfd_signal(self.pidfd.as_fd(), libc::SIGKILL) {
            Ok(()) | Err(Errno::ESRCH) => Ok(()),
            Err(errno) => Err(KeeperDirError::io("kill the process of")(errno.into())),
        }
    }
}

impl AsFd for KeeperHandle {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }
}

/// Whether a keeper is alive in this directory, whoever's it is: that is what its lock says, in every version. Also one
/// that lives in the directory of which this is a copy.
///
/// # Errors
/// [`KeeperDirError::Io`]. A missing directory holds no keeper.
pub fn is_alive(dir: &Path) -> Result<bool, KeeperDirError> {
    // In a copy the lock says nothing of the keeper whose directory was copied.
    Ok(lock_state(dir)? != KeeperState::Dead
        || matches!(read_meta(dir)?, Seen::Known(described) if described.lives()))
}

fn lock_state(dir: &Path) -> Result<KeeperState, KeeperDirError> {
    let file = match File::open(dir.join(LOCK)) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(KeeperState::Dead),
        Err(source) => return Err(KeeperDirError::Io { action: "read", source }),
    };
    match Flock::lock(file, FlockArg::LockSharedNonblock) {
        Ok(_free) => Ok(KeeperState::Dead),
        Err((_, Errno::EWOULDBLOCK)) => Ok(KeeperState::Live),
        Err((_, errno)) => Err(KeeperDirError::io("lock")(errno.into())),
    }
}

/// What a keeper's description says in every version.
#[derive(Debug, Deserialize)]
struct Versioned {
    version: u64,
}

/// What it says in this version and the older ones, as far as anything is decided by it.
#[derive(Debug, Deserialize)]
struct Described {
    spool_id: String,
    owner: String,
    #[serde(default)]
    keeper_pid: i32,
    #[serde(default)]
    started_boottime_ns: u64,
    #[serde(default)]
    boot_id: String,
}

impl Described {
    /// Whether the keeper that wrote this lives. One that lives holds the lock of its own directory, so where the lock is
    /// free this is a copy.
    fn lives(&self) -> bool {
        self.boot_id == clock::boot_id()
            && procfs::is_still(self.keeper_pid, KEEPER_NAME, self.started_boottime_ns)
    }
}

/// A description as this version sees it.
#[derive(Debug)]
enum Seen {
    /// There is none: the keeper died before it wrote one, or the host before it was on disk.
    None,
    /// It is of this version, or an older one.
    Known(Described),
    /// It is of a newer version.
    Newer,
    /// It cannot be understood.
    Odd,
}

fn read_meta(dir: &Path) -> Result<Seen, KeeperDirError> {
    let bytes = match fs::read(dir.join(META)) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Seen::None),
        // Want of descriptors, say: that is no answer.
        Err(source) => return Err(KeeperDirError::Io { action: "read", source }),
    };
    if bytes.iter().all(|byte| *byte == 0) {
        return Ok(Seen::None);
    }
    let newer =
        serde_json::from_slice::<Versioned>(&bytes).is_ok_and(|meta| meta.version > META_VERSION.into());
    if newer {
        return Ok(Seen::Newer);
    }
    Ok(match serde_json::from_slice(&bytes) {
        Ok(described) => Seen::Known(described),
        Err(_) => Seen::Odd,
    })
}

/// The spool's id: from the description, else the directory's name.
fn spool_id(dir: &Path) -> String {
    match read_meta(dir) {
        Ok(Seen::Known(described)) => described.spool_id,
        _ => dir.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default(),
    }
}

/// What the directory says about its keeper. Nothing is changed and nobody is signalled.
///
/// # Errors
/// [`KeeperDirError::Io`].
pub fn state_of(dir: &Path, owner: &str) -> Result<KeeperState, KeeperDirError> {
    let metadata = fs::symlink_metadata(dir).map_err(KeeperDirError::io("read"))?;
    if !metadata.is_dir() || metadata.uid() != sys::euid() {
        return Ok(KeeperState::Foreign);
    }
    match read_meta(dir)? {
        // A newer program's keeper is its own affair, too, whatever else its description says.
        Seen::Newer => Ok(KeeperState::Foreign),
        Seen::Known(described) if described.owner != owner => Ok(KeeperState::Foreign),
        // Its engine is at work for the directory that was copied, under the same name.
        Seen::Known(described) => Ok(match lock_state(dir)? {
            KeeperState::Dead if described.lives() => KeeperState::Foreign,
            state => state,
        }),
        // It is in our directory, so it was ours.
        Seen::None => lock_state(dir),
        // Nobody knows whose it is: it is left alone while it lives.
        Seen::Odd => Ok(match lock_state(dir)? {
            KeeperState::Dead => KeeperState::Dead,
            KeeperState::Live | KeeperState::Foreign => KeeperState::Foreign,
        }),
    }
}

/// The keepers below `parent` (each directory in it is one's), in the order of their names.
///
/// # Errors
/// [`KeeperDirError::Io`]. A missing parent holds none.
pub fn scan(parent: &Path, owner: &str) -> Result<Vec<KeeperFound>, KeeperDirError> {
    let entries = match fs::read_dir(parent) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(source) => return Err(KeeperDirError::Io { action: "list", source }),
    };
    let mut found = Vec::new();
    for entry in entries {
        let entry = entry.map_err(KeeperDirError::io("list"))?;
        if !entry.file_type().map_err(KeeperDirError::io("list"))?.is_dir() {
            continue;
        }
        let dir = entry.path();
        let state = state_of(&dir, owner)?;
        found.push(KeeperFound { spool_id: spool_id(&dir), dir, state });
    }
    found.sort_by(|a, b| a.dir.cmp(&b.dir));
    Ok(found)
}

/// Closes a dead keeper's directory: marks it so that no keeper starts in it any more (one whose runner died in the
/// middle of starting it may still be on its way), and sweeps what its engine left behind. Recorded process ids are
/// not looked at. Repeatable. Blocks up to `timeout`.
///
/// # Errors
/// [`KeeperDirError::Alive`], [`KeeperDirError::Foreign`] or [`KeeperDirError::Io`].
pub fn close_dead(dir: &Path, owner: &str, timeout: Duration) -> Result<DeadKeeper, KeeperDirError> {
    match state_of(dir, owner)? {
        KeeperState::Dead => {}
        KeeperState::Live => return Err(KeeperDirError::Alive),
        KeeperState::Foreign => return Err(KeeperDirError::Foreign),
    }
    let file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(dir.join(LOCK))
        .map_err(KeeperDirError::io("lock"))?;
    let _lock = Flock::lock(file, FlockArg::LockExclusiveNonblock).map_err(|(_, errno)| match errno {
        Errno::EWOULDBLOCK => KeeperDirError::Alive,
        errno => KeeperDirError::io("lock")(errno.into()),
    })?;
    File::create(dir.join(CLOSED)).map_err(KeeperDirError::io("mark"))?;
    let spool_id = spool_id(dir);
    let sweep = sweep(&spool_id, timeout);
    Ok(DeadKeeper { spool_id, sweep })
}

/// The command that runs `executable` (none: this one) as an init with the given arguments.
pub(crate) fn init_command(executable: Option<&Path>) -> Command {
    let mut command = Command::new(executable.unwrap_or_else(|| Path::new("/proc/self/exe")));
    command.arg0("roundhouse-init").arg(INIT_ARG).env_clear().current_dir("/");
    command
}
