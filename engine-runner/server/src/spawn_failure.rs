//! Why a keeper could not start its engine, in the words of a turn's failure. The keeper tells it in its spool alone:
//! there is no engine that could, and the keeper's own end comes right after it.

use std::{io, path::Path};

use roundhouse_engines::{Failure, Reason};
use roundhouse_process::{FrameBody, SpawnStage, SpoolReader};

/// The failure stands among a spool's first frames, or nowhere.
const FRAMES: usize = 16;

/// Numbers of Linux, the same on every architecture.
const ENOEXEC: i32 = 8;
const EAGAIN: i32 = 11;
const ENOMEM: i32 = 12;
const ENFILE: i32 = 23;
const EMFILE: i32 = 24;
const ETXTBSY: i32 = 26;

/// Why the engine of this spool was not started; none when the spool tells of no such thing. Blocking.
#[must_use]
pub(crate) fn read(dir: &Path) -> Option<Failure> {
    let mut reader = SpoolReader::new_after(dir, 0).ok()?;
    for _ in 0..FRAMES {
        if let FrameBody::SpawnFailed { stage, errno, message } = reader.next_frame().ok()??.body {
            return Some(of(stage, errno, &message));
        }
    }
    None
}

/// What a keeper's word about a failed start means.
#[must_use]
pub(crate) fn of(stage: SpawnStage, errno: i32, message: &str) -> Failure {
    let (reason, what_to_do) = match stage {
        SpawnStage::Exec => exec(errno),
        SpawnStage::Cwd => (
            Reason::Configuration,
            Some(
                "Make the workspace's directory accessible to the user that the runner runs as, then retry the turn.",
            ),
        ),
        SpawnStage::Isolation => (
            Reason::Configuration,
            Some(
                "Allow the runner the namespaces that it needs, or ask for less isolation, then retry the turn.",
            ),
        ),
        SpawnStage::Prepare | SpawnStage::Init => (Reason::Process, want(errno)),
    };
    let failure = Failure::new(reason, format!("the engine could not be started: {message}"));
    match what_to_do {
        Some(text) => Failure { what_to_do: text.to_owned(), ..failure },
        None => failure,
    }
}

/// What to do about what there is too little of for now.
fn want(errno: i32) -> Option<&'static str> {
    match errno {
        EAGAIN => Some(
            "The user that the runner runs as, or its container, may have no more processes: end some, or raise \
             `ulimit -u` or `pids.max`; then retry the turn.",
        ),
        ENOMEM => Some(
            "There is too little memory: end something, or raise the container's limit; then retry the turn.",
        ),
        ENFILE | EMFILE => Some("Too many files are open: raise `ulimit -n`, then retry the turn."),
        ETXTBSY => Some("The executable is being written: wait until it is installed, then retry the turn."),
        _ => None,
    }
}

/// A process that the system refused to the runner itself, before there was a keeper.
#[must_use]
pub(crate) fn of_keeper(error: &io::Error, message: String) -> Failure {
    let failure = Failure::new(Reason::Process, message);
    match error.raw_os_error().and_then(want) {
        Some(text) => Failure { what_to_do: text.to_owned(), ..failure },
        None => failure,
    }
}

fn exec(errno: i32) -> (Reason, Option<&'static str>) {
    use io::ErrorKind as K;
    match io::Error::from_raw_os_error(errno).kind() {
        K::PermissionDenied => (
            Reason::EngineMissing,
            Some(
                "Make the file and its interpreter executable for the user that the runner runs as, on a file system \
                 that is not mounted noexec; or correct engines.<engine>.executable; then retry the turn.",
            ),
        ),
        K::NotFound | K::NotADirectory => (
            Reason::EngineMissing,
            Some(
                "If the file is there, its interpreter or loader is not: see its first line, and install what it \
                 names; else run `roundhouse engines install` or correct engines.<engine>.executable; then retry the \
                 turn.",
            ),
        ),
        // Too long are the agent's prompt and the environment together, not the program.
        K::ArgumentListTooLong => (
            Reason::Configuration,
            Some("Shorten the agent's prompt or the engine's variables, then retry the turn."),
        ),
        _ if errno == ENOEXEC => (
            Reason::EngineMissing,
            Some(
                "The file is no program of this host: run `roundhouse engines install`, correct \
                 engines.<engine>.executable, or give a script its #! line; then retry the turn.",
            ),
        ),
        // Memory, descriptors, processes: these pass.
        _ => (Reason::Process, want(errno)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_error_of_an_exec_says_what_to_do() {
        let (enoent, eacces, e2big) = (2, 13, 7);
        for (errno, reason) in [
            (enoent, Reason::EngineMissing),
            (eacces, Reason::EngineMissing),
            (ENOEXEC, Reason::EngineMissing),
            (e2big, Reason::Configuration),
            (ENOMEM, Reason::Process),
            (EAGAIN, Reason::Process),
            (ETXTBSY, Reason::Process),
        ] {
            let failure = of(SpawnStage::Exec, errno, "failed to run /x: why");
            assert_eq!(failure.reason, reason, "{errno}");
            assert!(failure.message.contains("failed to run /x: why"), "{failure:?}");
            assert_eq!(failure.retryable, reason.retryable());
        }
        assert_eq!(of(SpawnStage::Cwd, eacces, "").reason, Reason::Configuration);
        assert_eq!(of(SpawnStage::Init, 0, "").reason, Reason::Process);
        for (errno, word) in
            [(EAGAIN, "processes"), (ENOMEM, "memory"), (EMFILE, "ulimit -n"), (ETXTBSY, "installed")]
        {
            for stage in [SpawnStage::Exec, SpawnStage::Prepare, SpawnStage::Init] {
                let failure = of(stage, errno, "");
                assert!(failure.retryable && failure.what_to_do.contains(word), "{failure:?}");
            }
        }
    }
}
