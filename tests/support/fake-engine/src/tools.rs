//! Processes that the script starts: tools with their side effects, children that outlive them.

use std::{
    env,
    ffi::OsString,
    fs::{File, OpenOptions},
    io::{self, Write as _},
    os::unix::process::CommandExt,
    path::PathBuf,
    process::{Child, Command, ExitCode, Stdio},
    time::Duration,
};

/// The first argument that makes this executable run another command in a session of its own.
pub(crate) const SETSID: &str = "__setsid";

/// The first argument that makes this executable wait.
pub(crate) const WAIT: &str = "__wait";

/// Runs what the first argument asks for, if it is one of ours.
pub(crate) fn inner(arguments: &[OsString]) -> Option<ExitCode> {
    let (first, rest) = arguments.split_first()?;
    if first == SETSID {
        let _ = nix::unistd::setsid();
        let (program, rest) = rest.split_first()?;
        // Only returns if it failed.
        let _ = Command::new(program).args(rest).exec();
        return Some(ExitCode::from(127));
    }
    if first == WAIT {
        let ms = rest.first().and_then(|ms| ms.to_str()).and_then(|ms| ms.parse().ok()).unwrap_or(0);
        let (_keep, never) = std::sync::mpsc::sync_channel::<()>(1);
        let _ = never.recv_timeout(Duration::from_millis(ms));
        return Some(ExitCode::SUCCESS);
    }
    None
}

fn own_executable() -> io::Result<PathBuf> {
    env::current_exe()
}

/// A shell command in a session of its own, with this added to its environment, and the file that takes what it says. A file and not a pipe: what the command leaves behind may hold a pipe open for ever.
pub(crate) fn bash(command: &str, environment: &[(&str, String)]) -> io::Result<(Child, File)> {
    let path = env::temp_dir().join(format!("fake-engine-{}", uuid::Uuid::new_v4().simple()));
    let output = OpenOptions::new().read(true).append(true).create_new(true).open(&path)?;
    std::fs::remove_file(&path)?;
    let child = Command::new(own_executable()?)
        .args([SETSID, "/bin/sh", "-c", command])
        .envs(environment.iter().map(|(name, value)| (name, value)))
        .stdin(Stdio::null())
        .stdout(output.try_clone()?)
        .stderr(output.try_clone()?)
        .spawn()?;
    Ok((child, output))
}

/// A child that lives for so many milliseconds; answers its pid.
pub(crate) fn child(detached: bool, hold: bool, ms: u64) -> io::Result<u32> {
    let mut command = Command::new(own_executable()?);
    if detached {
        let own = own_executable()?;
        command.arg(SETSID).arg(own);
    }
    command.args([WAIT, &ms.to_string()]).stdin(Stdio::null());
    if detached {
        command.stderr(Stdio::null());
        if !hold {
            command.stdout(Stdio::null());
        }
    }
    // It is not waited for: whoever reaps for this process, reaps it.
    Ok(command.spawn()?.id())
}

/// Appends a text and a newline to a file with one write; makes the file if need be.
pub(crate) fn append_line(path: &str, text: &str) -> io::Result<()> {
    let mut file = OpenOptions::new().append(true).create(true).open(path)?;
    file.write_all(format!("{text}\n").as_bytes())
}
