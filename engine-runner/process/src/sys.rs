//! The system calls that neither the standard library nor nix offers safely. All `unsafe` of the project is here.
#![expect(unsafe_code, reason = "system calls without a safe wrapper; each block says why it is sound")]

use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, UnixAddr, connect, getsockopt, setsockopt, socket, sockopt,
};
use nix::sys::time::TimeVal;
use nix::unistd::Pid;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd, RawFd};
use std::os::unix::fs::OpenOptionsExt as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Name of the socket in a keeper's directory.
pub(crate) const SOCKET: &str = "sock";

/// The effective user id.
pub(crate) fn euid() -> u32 {
    nix::unistd::geteuid().as_raw()
}

/// The effective group id.
pub(crate) fn egid() -> u32 {
    nix::unistd::getegid().as_raw()
}

/// Makes the allocator of a small long-lived process give memory back: one arena, and large buffers always mapped by
/// themselves (the threshold otherwise grows with the first one freed).
pub(crate) fn keep_memory_small() {
    #[cfg(target_env = "gnu")]
    // SAFETY: mallopt only sets parameters of the allocator; the process has one thread yet.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 1);
        libc::mallopt(libc::M_MMAP_THRESHOLD, 64 * 1024);
        libc::mallopt(libc::M_TRIM_THRESHOLD, 64 * 1024);
    }
}

/// Which side of a fork this is.
#[derive(Debug)]
pub(crate) enum Forked {
    Parent(Pid),
    Child,
}

/// Forks with new namespaces. May be called only while this process has a single thread: then the child may do
/// anything that this process may.
pub(crate) fn fork_with(flags: libc::c_int) -> nix::Result<Forked> {
    let flags = libc::c_ulong::try_from(flags | libc::SIGCHLD).map_err(|_| Errno::EINVAL)?;
    // SAFETY: a raw clone without CLONE_VM and without a stack acts as fork does: the child gets a copy of the address
    // space and goes on behind this call. The C library's fork handlers and its thread id cache are skipped; with a
    // single thread no lock can be held by another, and the child soon execs or only makes plain system calls. The
    // last three arguments are not used with these flags.
    let result = unsafe { libc::syscall(libc::SYS_clone, flags, 0_usize, 0_usize, 0_usize, 0_usize) };
    match Errno::result(result)? {
        0 => Ok(Forked::Child),
        pid => Ok(Forked::Parent(Pid::from_raw(i32::try_from(pid).map_err(|_| Errno::EOVERFLOW)?))),
    }
}

/// Forks. May be called only while this process has a single thread.
pub(crate) fn fork() -> nix::Result<Forked> {
    // SAFETY: with a single thread no lock can be held by another, so the child may do anything.
    match unsafe { nix::unistd::fork() }? {
        nix::unistd::ForkResult::Parent { child } => Ok(Forked::Parent(child)),
        nix::unistd::ForkResult::Child => Ok(Forked::Child),
    }
}

/// Ends this process without running exit handlers (for a forked child).
pub(crate) fn exit_now(status: i32) -> ! {
    // SAFETY: _exit does not return and touches no memory.
    unsafe { libc::_exit(status) }
}

/// A descriptor for a process. It is close-on-exec.
pub(crate) fn pidfd_open(pid: i32) -> nix::Result<OwnedFd> {
    // SAFETY: pidfd_open takes two plain integers.
    let fd = Errno::result(unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) })?;
    let fd = RawFd::try_from(fd).map_err(|_| Errno::EOVERFLOW)?;
    // SAFETY: the call just made this descriptor, and nobody else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Sends a signal to the very process that a descriptor was opened for.
pub(crate) fn pidfd_signal(fd: BorrowedFd<'_>, signal: i32) -> nix::Result<()> {
    // SAFETY: the third argument may be null (it means the signal information of kill), the others are integers.
    let result = unsafe {
        libc::syscall(
            libc::SYS_pidfd_send_signal,
            fd.as_raw_fd(),
            signal,
            std::ptr::null::<libc::siginfo_t>(),
            0,
        )
    };
    Errno::result(result).map(drop)
}

/// Sends a signal by number to a process, which may be a real-time signal.
pub(crate) fn kill(pid: i32, signal: i32) -> nix::Result<()> {
    // SAFETY: kill takes two plain integers.
    Errno::result(unsafe { libc::kill(pid, signal) }).map(drop)
}

/// Random bytes as a number. Falls back to the clock where the system has no randomness to give.
pub(crate) fn random_u64() -> u64 {
    let mut bytes = [0_u8; 8];
    // SAFETY: the buffer is valid for the given length.
    let got = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), libc::GRND_NONBLOCK) };
    if got == 8 {
        u64::from_le_bytes(bytes)
    } else {
        crate::clock::boottime_ns().wrapping_mul(0x9E37_79B9_7F4A_7C15)
    }
}

/// Clears the signal mask and gives every signal its default action, as a program expects to find them. For a child
/// that is about to exec.
pub(crate) fn reset_signals() {
    for signal in 1..=64 {
        // SAFETY: SIG_DFL is a valid disposition, and no handler's code is touched. It fails for SIGKILL, SIGSTOP and
        // the two that the C library keeps for itself, which is right.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
    }
    let empty = nix::sys::signal::SigSet::empty();
    let _ = empty.thread_set_mask();
}

/// Takes over descriptors that a parent left under known numbers.
///
/// Each is checked to be open, and each may be taken once.
pub(crate) fn take_fd(fd: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: F_GETFD only reads the descriptor's flags, and fails for one that is not open.
    Errno::result(unsafe { libc::fcntl(fd, libc::F_GETFD) })?;
    // SAFETY: it is open, was left to this process by its parent at exec, and the caller takes each number once.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Puts `fd` under the number `target`, without close-on-exec.
pub(crate) fn dup_onto(fd: BorrowedFd<'_>, target: RawFd) -> nix::Result<()> {
    if fd.as_raw_fd() == target {
        return set_cloexec(fd, false);
    }
    // SAFETY: dup2 takes two integers; whoever owned `target` before is the caller's concern, who is about to exec.
    Errno::result(unsafe { libc::dup2(fd.as_raw_fd(), target) }).map(drop)
}

/// A copy of `fd` at `least` or above, without close-on-exec.
pub(crate) fn dup_above(fd: BorrowedFd<'_>, least: RawFd) -> nix::Result<RawFd> {
    // SAFETY: F_DUPFD takes plain integers. The copy is owned by the program that is about to be exec'd.
    Errno::result(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_DUPFD, least) })
}

/// Sets or clears close-on-exec.
pub(crate) fn set_cloexec(fd: BorrowedFd<'_>, on: bool) -> nix::Result<()> {
    let flag = if on { libc::FD_CLOEXEC } else { 0 };
    // SAFETY: F_SETFD takes plain integers.
    Errno::result(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETFD, flag) }).map(drop)
}

/// Sets non-blocking mode.
pub(crate) fn set_nonblocking(fd: BorrowedFd<'_>) -> nix::Result<()> {
    use nix::fcntl::{FcntlArg, OFlag, fcntl};
    let flags = OFlag::from_bits_retain(fcntl(fd, FcntlArg::F_GETFL)?);
    fcntl(fd, FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK)).map(drop)
}

/// Marks all descriptors from `first` on as close-on-exec, whoever left them open.
pub(crate) fn cloexec_from(first: u32) {
    // SAFETY: close_range takes plain integers and with this flag closes nothing now. Where the kernel lacks it, the
    // descriptors that this crate opens are close-on-exec anyway.
    unsafe { libc::syscall(libc::SYS_close_range, first, u32::MAX, libc::CLOSE_RANGE_CLOEXEC) };
}

/// The process at the other end of a local socket.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Peer {
    pub(crate) pid: i32,
    pub(crate) uid: u32,
}

/// Asks the system who is at the other end.
pub(crate) fn peer(fd: BorrowedFd<'_>) -> io::Result<Peer> {
    let credentials = getsockopt(&fd, sockopt::PeerCredentials)?;
    Ok(Peer { pid: credentials.pid(), uid: credentials.uid() })
}

/// Opens a directory to reach what lies in it.
pub(crate) fn open_dir(path: &Path) -> io::Result<File> {
    std::fs::OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_DIRECTORY | libc::O_CLOEXEC | libc::O_NOFOLLOW)
        .open(path)
}

/// The socket's path through a directory's descriptor: always shorter than a socket address may be.
pub(crate) fn socket_path(dir: &File) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}/{SOCKET}", dir.as_raw_fd()))
}

/// Connects to the socket in a directory. A listener that is stopped and whose queue is full ends in `WouldBlock`
/// after `timeout`.
pub(crate) fn connect_in(dir: &Path, timeout: Duration) -> io::Result<UnixStream> {
    let dir = open_dir(dir)?;
    let address = UnixAddr::new(&socket_path(&dir))?;
    let fd = socket(AddressFamily::Unix, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
    let micros = i64::try_from(timeout.as_micros()).unwrap_or(i64::MAX).max(1);
    setsockopt(&fd, sockopt::SendTimeout, &TimeVal::new(micros / 1_000_000, micros % 1_000_000))?;
    connect(fd.as_raw_fd(), &address)?;
    Ok(UnixStream::from(fd))
}

/// Bytes that can be read from a pipe now.
pub(crate) fn pipe_capacity(fd: impl AsFd, wanted: usize) -> nix::Result<usize> {
    use nix::fcntl::{FcntlArg, fcntl};
    let wanted = i32::try_from(wanted).map_err(|_| Errno::EINVAL)?;
    let got = match fcntl(fd.as_fd(), FcntlArg::F_SETPIPE_SZ(wanted)) {
        Ok(size) => size,
        Err(_) => fcntl(fd.as_fd(), FcntlArg::F_GETPIPE_SZ)?,
    };
    Ok(usize::try_from(got).unwrap_or(0))
}
