//! How well an engine and all it starts can be held together, and what this host really gives.

use crate::clock::after;
use crate::directory::{READY_TIMEOUT, read_line};
use crate::wire::{Take, WireError};
use std::fmt;

/// How everything that an engine starts is found again, from weakest to strongest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum IsolationLevel {
    /// Only the engine's own process is sure to be reached; a sweep by environment does what it can.
    None,
    /// Orphans come back to the init, and a sweep by ancestry and environment finds the rest. What forks faster than
    /// the sweep, or clears its environment *and* leaves its ancestry, can be missed.
    Subreaper,
    /// The engine lives in a PID namespace: nothing in it outlives its init, and the init does not outlive the keeper.
    PidNamespace,
}

impl IsolationLevel {
    pub(crate) fn code(self) -> u8 {
        match self {
            Self::None => 0,
            Self::Subreaper => 1,
            Self::PidNamespace => 2,
        }
    }

    pub(crate) fn from_code(code: u8) -> Option<Self> {
        match code {
            0 => Some(Self::None),
            1 => Some(Self::Subreaper),
            2 => Some(Self::PidNamespace),
            _ => None,
        }
    }

    pub(crate) fn take(take: &mut Take<'_>) -> Result<Self, WireError> {
        Self::from_code(take.u8("isolation")?).ok_or(WireError::Invalid("isolation"))
    }
}

/// The name used in contracts and logs.
impl fmt::Display for IsolationLevel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "NONE",
            Self::Subreaper => "SUBREAPER",
            Self::PidNamespace => "PID_NAMESPACE",
        })
    }
}

/// What a probe found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IsolationReport {
    /// The level that was really reached.
    pub level: IsolationLevel,
    /// A user namespace was needed for it.
    pub user_namespace: bool,
    /// Why it is not more, with the step that failed; empty at the highest level.
    pub detail: String,
}

/// Why a probe could not be run at all. The level is then to be taken as [`IsolationLevel::None`].
#[derive(Debug, thiserror::Error)]
pub enum ProbeError {
    /// The probing process could not be started.
    #[error("failed to start the isolation probe")]
    Start(#[source] std::io::Error),
    /// It did not answer as expected.
    #[error("isolation probe failed: {0}")]
    Answer(String),
}

/// Makes this process the one that orphans below it come back to. Wanted in a runner at [`IsolationLevel::Subreaper`];
/// it then calls [`crate::reap_orphans`] now and then.
///
/// # Errors
/// What the system answers.
pub fn become_subreaper() -> std::io::Result<()> {
    nix::sys::prctl::set_child_subreaper(true).map_err(Into::into)
}

/// Finds out what this host really gives, by doing it: a child makes the namespaces, mounts its own /proc and looks at
/// it. `executable` as in [`crate::spawn_keeper`]. Blocks a few milliseconds, at most 10 s.
///
/// # Errors
/// [`ProbeError`].
pub fn probe(executable: Option<&std::path::Path>) -> Result<IsolationReport, ProbeError> {
    let mut child = crate::directory::init_command(executable)
        .arg("probe")
        .stdin(std::process::Stdio::null())
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::null())
        .spawn()
        .map_err(ProbeError::Start)?;
    let answer = match child.stdout.take() {
        Some(mut pipe) => read_line(&mut pipe, after(READY_TIMEOUT)),
        None => Err(std::io::ErrorKind::BrokenPipe.into()),
    };
    // It has nothing more to say; one that hangs is not waited for.
    let _ = child.kill();
    let _ = child.wait();
    let text = match answer {
        Ok(answer) => String::from_utf8_lossy(&answer).into_owned(),
        Err(error) => return Err(ProbeError::Answer(error.to_string())),
    };
    let mut parts = text.trim_end().splitn(3, '\t');
    let level = match parts.next() {
        Some("PID_NAMESPACE") => IsolationLevel::PidNamespace,
        Some("SUBREAPER") => IsolationLevel::Subreaper,
        Some("NONE") => IsolationLevel::None,
        _ => return Err(ProbeError::Answer(format!("{text:?}"))),
    };
    let user_namespace = parts.next() == Some("user");
    Ok(IsolationReport { level, user_namespace, detail: parts.next().unwrap_or_default().to_owned() })
}
