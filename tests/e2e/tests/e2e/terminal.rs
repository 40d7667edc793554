//! A command at a terminal of its own, as a person has it.

use std::ffi::OsStr;
use std::io::{Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::process::Stdio;
use std::sync::mpsc;
use std::time::Instant;

use anyhow::{Context as _, bail};
use roundhouse_test_support::NORMAL;
use tokio::process::{Child, Command};

/// A new terminal: the side of the person, and that of the command.
fn open_terminal() -> rustix::io::Result<(OwnedFd, OwnedFd)> {
    use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
    let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY)?;
    grantpt(&master)?;
    unlockpt(&master)?;
    let name = ptsname(&master, Vec::new())?;
    let flags = rustix::fs::OFlags::RDWR | rustix::fs::OFlags::NOCTTY;
    let slave = rustix::fs::open(name, flags, rustix::fs::Mode::empty())?;
    Ok((master, slave))
}

/// A command whose standard streams are a terminal that is its own, so that Ctrl-C is a signal to it.
pub(crate) struct Terminal {
    child: Child,
    keys: std::fs::File,
    shown: mpsc::Receiver<Vec<u8>>,
    all: String,
    /// How much of `all` was looked at.
    seen: usize,
}

impl Terminal {
    /// Starts a program with this environment and nothing else.
    pub(crate) fn start(
        program: &OsStr,
        args: &[&str],
        variables: &[(&str, &OsStr)],
    ) -> anyhow::Result<Self> {
        let (master, slave) = open_terminal()?;
        let end = || anyhow::Ok(Stdio::from(slave.try_clone()?));
        let child = Command::new("setsid")
            .arg("--ctty")
            .arg(program)
            .args(args)
            .env_clear()
            .env("PATH", std::env::var_os("PATH").unwrap_or_default())
            .env("TERM", "xterm")
            .envs(variables.iter().copied())
            .stdin(end()?)
            .stdout(end()?)
            .stderr(end()?)
            .kill_on_drop(true)
            .spawn()
            .context("setsid cannot be started")?;
        let keys = std::fs::File::from(master);
        let mut screen = keys.try_clone()?;
        let (tell, shown) = mpsc::channel();
        std::thread::spawn(move || {
            let mut buffer = [0u8; 4096];
            // An error is its end: nobody holds the other side any more.
            while let Ok(count) = screen.read(&mut buffer) {
                if count == 0 || tell.send(buffer[..count].to_vec()).is_err() {
                    return;
                }
            }
        });
        Ok(Self { child, keys, shown, all: String::new(), seen: 0 })
    }

    /// Waits until this is shown, after what was waited for before. Leaves the runtime to others meanwhile.
    pub(crate) async fn expect(&mut self, text: &str) -> anyhow::Result<()> {
        let since = Instant::now();
        loop {
            while let Ok(bytes) = self.shown.try_recv() {
                self.all.push_str(&String::from_utf8_lossy(&bytes));
            }
            if let Some(at) = self.all[self.seen..].find(text) {
                self.seen += at + text.len();
                return Ok(());
            }
            if since.elapsed() > NORMAL {
                let (before, after) = self.all.split_at(self.seen);
                bail!("{text:?} is not shown after {before:?}, but {after:?}");
            }
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
    }

    /// Presses keys.
    pub(crate) fn keys(&mut self, keys: &str) -> anyhow::Result<()> {
        self.keys.write_all(keys.as_bytes()).context("the terminal takes no keys")
    }

    /// Waits for the end of the command. Answers its exit code and all that was shown.
    pub(crate) async fn ended(mut self) -> anyhow::Result<(Option<i32>, String)> {
        let status = tokio::time::timeout(NORMAL, self.child.wait()).await.context("it does not end")??;
        while let Ok(bytes) = self.shown.recv_timeout(std::time::Duration::from_millis(100)) {
            self.all.push_str(&String::from_utf8_lossy(&bytes));
        }
        Ok((status.code(), self.all))
    }
}
