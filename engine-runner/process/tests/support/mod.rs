//! A keeper with a scripted engine, and ways to wait for what it does.
#![allow(clippy::unwrap_used, reason = "what a test does not expect fails it")]
#![allow(dead_code, reason = "each test program uses a part of it")]
#![allow(clippy::allow_attributes, reason = "an expectation would fail in the programs that use all of it")]

use roundhouse_process::{
    Frame, FrameBody, KeeperHandle, KeeperPlan, Link, LinkError, REQUEST_TIMEOUT, SpoolReader, StatusReport,
    spawn_keeper,
};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

pub(crate) const FIXTURE: &str = env!("CARGO_BIN_EXE_roundhouse-process-fixture");
pub(crate) const OWNER: &str = "run_test";
pub(crate) const LONG: Duration = Duration::from_secs(30);

/// Waits until `look` finds something.
pub(crate) fn wait_for<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + LONG;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < deadline, "no {what} in time");
        std::thread::park_timeout(Duration::from_millis(2));
    }
}

/// The live processes that have `token` as an argument.
pub(crate) fn holders(token: &str) -> Vec<i32> {
    std::fs::read_dir("/proc")
        .unwrap()
        .filter_map(|entry| {
            let entry = entry.unwrap();
            let pid = entry.file_name().to_str()?.parse().ok()?;
            let cmdline = std::fs::read(entry.path().join("cmdline")).ok()?;
            cmdline.split(|byte| *byte == 0).any(|arg| arg == token.as_bytes()).then_some(pid)
        })
        .collect()
}

/// Whether a process is there and not a zombie.
pub(crate) fn is_alive(pid: i32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| {
        !matches!(stat.rsplit(") ").next().and_then(|rest| rest.chars().next()), Some('Z' | 'X'))
    })
}

pub(crate) fn plan(spool_id: &str) -> KeeperPlan {
    let mut plan = KeeperPlan::new(spool_id, OWNER, FIXTURE);
    plan.args = vec!["engine".into()];
    plan.env = vec![roundhouse_process::EnvVar::new("PATH", std::env::var_os("PATH").unwrap())];
    plan
}

/// One keeper and a link to it. Dropping it leaves nothing behind.
pub(crate) struct Rig {
    pub(crate) tmp: tempfile::TempDir,
    pub(crate) dir: PathBuf,
    pub(crate) handle: KeeperHandle,
    pub(crate) link: Link,
    pub(crate) reader: SpoolReader,
    next_op: u32,
}

impl Rig {
    pub(crate) fn start(change: impl FnOnce(&mut KeeperPlan)) -> Self {
        let tmp = tempfile::tempdir().unwrap();
        // Every rig has an id of its own: a sweep goes by it.
        let name = tmp.path().file_name().unwrap().to_string_lossy().replace('.', "");
        let mut plan = plan(&format!("spl_{name}"));
        change(&mut plan);
        let dir = tmp.path().join("keeper");
        let handle = spawn_keeper(&dir, &plan, Some(Path::new(FIXTURE))).unwrap();
        let (link, _) = Link::connect(&dir, OWNER, REQUEST_TIMEOUT).unwrap();
        let reader = SpoolReader::new(&dir);
        Self { tmp, dir, handle, link, reader, next_op: 0 }
    }

    pub(crate) fn spool_id(&self) -> String {
        let meta: serde_json::Value =
            serde_json::from_slice(&std::fs::read(self.dir.join("meta.json")).unwrap()).unwrap();
        meta["spool_id"].as_str().unwrap().to_owned()
    }

    /// Delivers a command under a new operation id.
    pub(crate) fn tell(&mut self, command: &str) -> u64 {
        self.next_op += 1;
        self.link.deliver(&format!("op{}", self.next_op), format!("{command}\n").as_bytes()).unwrap().0
    }

    /// The next frame of a kind.
    pub(crate) fn next(&mut self, what: &str, wanted: impl Fn(&FrameBody) -> bool) -> Frame {
        wait_for(what, || {
            while let Some(frame) = self.reader.next_frame().unwrap() {
                if wanted(&frame.body) {
                    return Some(frame);
                }
            }
            None
        })
    }

    /// The next line of standard output.
    pub(crate) fn line(&mut self) -> String {
        let frame = self.next("line", |body| matches!(body, FrameBody::StdoutLine { .. }));
        match frame.body {
            FrameBody::StdoutLine { bytes, .. } => String::from_utf8(bytes).unwrap(),
            _ => unreachable!("waited for a line"),
        }
    }

    /// Delivers a command and answers the next line.
    pub(crate) fn ask(&mut self, command: &str) -> String {
        self.tell(command);
        self.line()
    }

    pub(crate) fn status(&mut self) -> StatusReport {
        self.link.status().unwrap()
    }

    pub(crate) fn reconnect(&mut self) -> Result<StatusReport, LinkError> {
        let (link, status) = Link::connect(&self.dir, OWNER, REQUEST_TIMEOUT)?;
        self.link = link;
        Ok(status)
    }

    /// Waits for the keeper's own end and answers all frames.
    pub(crate) fn end(&mut self) -> Vec<Frame> {
        assert!(self.handle.wait(LONG).unwrap(), "the keeper did not end");
        self.frames()
    }

    pub(crate) fn frames(&self) -> Vec<Frame> {
        SpoolReader::new(&self.dir).read_all().unwrap()
    }

    /// All lines of standard output so far, as text.
    pub(crate) fn lines(&self) -> Vec<String> {
        self.frames()
            .into_iter()
            .filter_map(|frame| match frame.body {
                FrameBody::StdoutLine { bytes, .. } => Some(String::from_utf8_lossy(&bytes).into_owned()),
                _ => None,
            })
            .collect()
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        let _ = self.handle.kill();
        let _ = self.handle.wait(LONG);
        let _ = roundhouse_process::close_dead(&self.dir, OWNER, LONG);
    }
}

/// A private field of /proc/<pid>/smaps_rollup, in bytes.
pub(crate) fn private_bytes(pid: i32) -> u64 {
    let rollup = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap();
    rollup
        .lines()
        .filter(|line| line.starts_with("Private_"))
        .map(|line| line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024)
        .sum()
}
