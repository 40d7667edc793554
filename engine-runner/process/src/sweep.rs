//! Finding and killing everything an engine started where no namespace does it: by ancestry and by the variable that
//! every process of the engine carries.
//!
//! Each round stops what it finds, looks again until nothing new turns up, then kills. Stopped processes cannot fork,
//! so a round misses only what was born between a look and a stop; the next round finds it. Every process is signalled
//! through a descriptor and only if its start time is still the one that was seen: a process id that was given to
//! somebody else is left alone.

use crate::KEEPER_ENV;
use crate::clock::after;
use crate::procfs::{self, ProcessInfo};
use crate::sys;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use std::collections::HashMap;
use std::os::fd::{AsFd as _, OwnedFd};
use std::time::{Duration, Instant};

/// What a sweep did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SweepReport {
    /// Processes that were killed.
    pub killed: u32,
    /// Processes that were found and were still there when time was up.
    pub survivors: u32,
    /// Rounds until nothing was found.
    pub rounds: u32,
}

/// Looks without an end in sight are cut here: a round that finds new processes ten times in a row kills what it has.
const LOOKS_PER_ROUND: usize = 10;

/// Kills all processes that carry `ROUNDHOUSE_KEEPER=<spool_id>`, and all below those, until none is left or
/// `timeout` has passed. For keepers that are dead; a live one sweeps by itself.
#[must_use]
pub fn sweep(spool_id: &str, timeout: Duration) -> SweepReport {
    sweep_below(spool_id, &[], &[], timeout)
}

/// As [`sweep`], and also kills what lies below `roots`. Neither this process nor the roots nor those in `spare` are
/// touched; `spare` does not protect what lies below.
pub(crate) fn sweep_below(spool_id: &str, roots: &[i32], spare: &[i32], timeout: Duration) -> SweepReport {
    let deadline = after(timeout);
    let entry = format!("{KEEPER_ENV}={spool_id}").into_bytes();
    let me = i32::try_from(std::process::id()).unwrap_or(0);
    let mut report = SweepReport::default();
    loop {
        report.rounds += 1;
        let mut targets: HashMap<(i32, u64), OwnedFd> = HashMap::new();
        for _ in 0..LOOKS_PER_ROUND {
            let mut fresh = false;
            for process in find(&entry, roots, spare, me) {
                let key = (process.pid, process.started_ns);
                if targets.contains_key(&key) {
                    continue;
                }
                if let Some(fd) = hold(&process) {
                    let _ = sys::pidfd_signal(fd.as_fd(), libc::SIGSTOP);
                    targets.insert(key, fd);
                    fresh = true;
                }
            }
            if !fresh {
                break;
            }
        }
        if targets.is_empty() {
            return report;
        }
        report.survivors = 0;
        for fd in targets.values() {
            let _ = sys::pidfd_signal(fd.as_fd(), libc::SIGKILL);
        }
        for ((pid, _), fd) in &targets {
            if await_end(fd, deadline) {
                report.killed += 1;
                reap(*pid);
            } else {
                report.survivors += 1;
            }
        }
        if Instant::now() >= deadline {
            return report;
        }
    }
}

/// The live processes that are to go.
fn find(entry: &[u8], roots: &[i32], spare: &[i32], me: i32) -> Vec<ProcessInfo> {
    let processes = procfs::all();
    let mut starts: Vec<i32> = roots.to_vec();
    let mut found: Vec<ProcessInfo> = processes
        .iter()
        .filter(|process| process.pid != me && process.pid != 1 && procfs::has_env(process.pid, entry))
        .cloned()
        .collect();
    starts.extend(found.iter().map(|process| process.pid));
    found.extend(procfs::below(&processes, &starts));
    found.retain(|process| {
        process.pid != me
            && !process.is_zombie()
            && !spare.contains(&process.pid)
            && !roots.contains(&process.pid)
    });
    found
}

/// A descriptor for exactly the process that was seen.
fn hold(process: &ProcessInfo) -> Option<OwnedFd> {
    let fd = sys::pidfd_open(process.pid).ok()?;
    // The id may have changed hands before the descriptor was opened; after it, it names one process.
    let now = procfs::process(process.pid)?;
    (now.started_ns == process.started_ns && !now.is_zombie()).then_some(fd)
}

fn await_end(fd: &OwnedFd, deadline: Instant) -> bool {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let timeout = PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
        match poll(&mut [PollFd::new(fd.as_fd(), PollFlags::POLLIN)], timeout) {
            Ok(0) => return false,
            Ok(_) => return true,
            Err(nix::errno::Errno::EINTR) => {}
            Err(_) => return false,
        }
    }
}

/// Reaps a killed process if it is a child of this one (an adopted orphan); otherwise its parent does.
fn reap(pid: i32) {
    let _ = waitpid(Pid::from_raw(pid), Some(WaitPidFlag::WNOHANG));
}

/// Reaps the ended children of this process that `known` does not claim: orphans that came here because this process is
/// a subreaper (or PID 1 of a container). Answers how many. Children that others wait for must be claimed.
pub fn reap_orphans(known: impl Fn(i32) -> bool) -> u32 {
    let me = i32::try_from(std::process::id()).unwrap_or(0);
    let mut reaped = 0;
    for process in procfs::all() {
        if process.parent == me && process.is_zombie() && !known(process.pid) {
            let status = waitpid(Pid::from_raw(process.pid), Some(WaitPidFlag::WNOHANG));
            if matches!(status, Ok(WaitStatus::Exited(..) | WaitStatus::Signaled(..))) {
                reaped += 1;
            }
        }
    }
    reaped
}
