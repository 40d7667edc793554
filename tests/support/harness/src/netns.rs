//! Network namespaces, so that services on one machine are on hosts of their own.

use std::{
    fs::File,
    future::Future,
    io::{BufRead as _, BufReader},
    os::fd::AsFd as _,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use anyhow::{Context as _, bail};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

/// A network namespace with nothing but loopback in it, until something else is put there. Gone with its drop, as soon
/// as no process lives in it any more.
#[derive(Debug)]
pub struct Namespace {
    /// Keeps it: a process that waits for the end of its input, which also comes when this process is killed.
    holder: Child,
}

impl Namespace {
    /// Makes one.
    ///
    /// # Errors
    /// If this user may not, or `unshare` or `ip` is missing.
    pub fn create() -> anyhow::Result<Self> {
        let mut holder = Command::new("unshare")
            .args(["--net", "--", "sh", "-c", "ip link set lo up && echo up && exec cat"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot run unshare")?;
        let mut line = String::new();
        let stdout = holder.stdout.take().context("standard output was asked for")?;
        let namespace = Self { holder };
        BufReader::new(stdout).read_line(&mut line).context("cannot read from unshare")?;
        if line.trim_end() != "up" {
            bail!("no network namespace can be made here; see what unshare and ip say above");
        }
        Ok(namespace)
    }

    /// The process that keeps it.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.holder.id()
    }

    /// The file that stands for it.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        PathBuf::from(format!("/proc/{}/ns/net", self.pid()))
    }

    /// What to put in front of a command, so that it runs in there.
    #[must_use]
    pub fn enter(&self) -> Vec<String> {
        vec!["nsenter".to_owned(), format!("--net={}", self.path().display()), "--".to_owned()]
    }

    /// Runs a command in there and answers what it printed.
    ///
    /// # Errors
    /// If it fails, with what it said.
    pub fn run(&self, command: &[&str]) -> anyhow::Result<String> {
        let enter = self.enter();
        let words: Vec<&str> = enter.iter().map(String::as_str).chain(command.iter().copied()).collect();
        run(&words)
    }

    /// Runs an asynchronous function in there, on threads of its own: what it listens on and connects to, and every
    /// process that it starts, is there.
    ///
    /// # Errors
    /// If the threads cannot be made or moved; else what the function answers.
    pub fn block_on<T, F, Fut>(&self, function: F) -> anyhow::Result<T>
    where
        T: Send + 'static,
        F: FnOnce() -> Fut + Send + 'static,
        Fut: Future<Output = anyhow::Result<T>>,
    {
        let path = self.path();
        let thread = std::thread::Builder::new()
            .name("elsewhere".to_owned())
            .spawn(move || Self::block_on_path(&path, function))?;
        match thread.join() {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }

    /// The same on this very thread, which stays there.
    pub(crate) fn block_on_path<T, F, Fut>(path: &Path, function: F) -> anyhow::Result<T>
    where
        F: FnOnce() -> Fut,
        Fut: Future<Output = anyhow::Result<T>>,
    {
        let file = File::open(path).context("the namespace is gone")?;
        move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network))
            .context("this thread cannot be moved into the namespace")?;
        // The threads of the runtime are made by this one, and are where it is.
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
        runtime.block_on(function())
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        // Gone already is as good.
        let _ = self.holder.kill();
        let _ = self.holder.wait();
    }
}

/// Runs a command here and answers what it printed.
pub(crate) fn run(command: &[&str]) -> anyhow::Result<String> {
    let (program, args) = command.split_first().context("an empty command")?;
    let output = Command::new(program)
        .args(args)
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("cannot run {program}"))?;
    if !output.status.success() {
        bail!("{command:?} failed: {}", String::from_utf8_lossy(&output.stderr).trim_end());
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim_end().to_owned())
}
