//! The rollout: append-only rows at the place where the real engine keeps its own.

use std::{
    fs::{self, File, OpenOptions},
    io::{Read as _, Seek as _, SeekFrom, Write as _},
    os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
};

use serde_json::{Value, json};

/// A thread's file.
#[derive(Debug)]
pub(crate) struct Rollout {
    pub(crate) path: PathBuf,
    file: Option<File>,
    /// The number of the next row.
    ordinal: u64,
    /// Whether rows are written.
    pub(crate) saves: bool,
    /// Held as long as this process may write.
    _lock: Option<File>,
}

/// Why a thread cannot be opened: the code and the sentence.
pub(crate) type Refused = (i64, String);

impl Rollout {
    /// Where the rollout of a new thread will lie. Nothing is written yet.
    pub(crate) fn new(home: &Path, id: &str) -> Result<Self, Refused> {
        let now = jiff::Timestamp::now();
        let dir = home.join("sessions").join(now.strftime("%Y/%m/%d").to_string());
        let name = format!("rollout-{}-{id}.jsonl", now.strftime("%Y-%m-%dT%H-%M-%S"));
        let lock = lock(home, id)?;
        Ok(Self { path: dir.join(name), file: None, ordinal: 0, saves: true, _lock: lock })
    }

    /// Opens the rollout of a thread and reads its rows. Rows that cannot be read are left out without a word.
    pub(crate) fn open(home: &Path, id: &str) -> Result<(Self, Vec<Value>), Refused> {
        let none = || (-32600, format!("no rollout found for thread id {id}"));
        let path = find(&home.join("sessions"), id).ok_or_else(none)?;
        let lock = lock(home, id)?;
        let broken = |why: String| {
            let place = path.display();
            let inner = format!("thread-store internal error: failed to read session metadata {place}");
            (-32603, format!("failed to read thread: {inner}: {inner}: {why}"))
        };
        let bytes = fs::read(&path).map_err(|problem| broken(problem.to_string()))?;
        let text = String::from_utf8_lossy(&bytes);
        let rows: Vec<Value> = text.lines().filter_map(|row| serde_json::from_str(row).ok()).collect();
        let at = path.display();
        match rows.first() {
            None => return Err(broken(format!("rollout at {at} is empty"))),
            Some(first) if first["type"] != "session_meta" => {
                return Err(broken(format!("rollout at {at} does not start with session metadata")));
            }
            Some(_) => {}
        }
        let ordinal = rows.iter().filter_map(|row| row["ordinal"].as_u64()).max().map_or(0, |last| last + 1);
        Ok((Self { path, file: None, ordinal, saves: true, _lock: lock }, rows))
    }

    /// Whether a row was ever written.
    pub(crate) const fn is_empty(&self) -> bool {
        self.ordinal == 0
    }

    /// Writes one row with one write.
    pub(crate) fn append(&mut self, kind: &str, payload: &Value) {
        if !self.saves {
            return;
        }
        let row = json!({
            "timestamp": jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%M:%S%.3fZ").to_string(),
            "ordinal": self.ordinal, "type": kind, "payload": payload,
        });
        if self.file.is_none() {
            self.file = open_file(&self.path);
        }
        if let Some(file) = &mut self.file {
            let _ = file.write_all(format!("{row}\n").as_bytes());
            self.ordinal += 1;
        }
    }
}

/// The lock of the thread's only writer.
fn lock(home: &Path, id: &str) -> Result<Option<File>, Refused> {
    let dir = home.join("thread-writer-locks");
    if make_dir(&dir).is_err() {
        return Ok(None);
    }
    let mut options = OpenOptions::new();
    let Ok(file) = options.create(true).append(true).mode(0o600).open(dir.join(format!("{id}.lock"))) else {
        return Ok(None);
    };
    match file.try_lock() {
        Err(fs::TryLockError::WouldBlock) => {
            Err((-32600, format!("thread {id} already has an active writer")))
        }
        _ => Ok(Some(file)),
    }
}

/// The rollout of a thread, in whatever directory below it lies.
fn find(dir: &Path, id: &str) -> Option<PathBuf> {
    let end = format!("-{id}.jsonl");
    let mut dirs = vec![dir.to_owned()];
    while let Some(dir) = dirs.pop() {
        for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
            let path = entry.path();
            let is_it = entry.file_name().to_string_lossy().ends_with(&end);
            match path.is_dir() {
                true if !is_it => dirs.push(path),
                false if is_it => return Some(path),
                _ => {}
            }
        }
    }
    None
}

fn open_file(path: &Path) -> Option<File> {
    make_dir(path.parent()?).ok()?;
    let mut options = OpenOptions::new();
    let mut file = options.read(true).append(true).create(true).mode(0o600).open(path).ok()?;
    // A row that was cut off stays by itself.
    let mut last = [b'\n'];
    if file.seek(SeekFrom::End(-1)).is_ok() && file.read_exact(&mut last).is_ok() && last != *b"\n" {
        let _ = file.write_all(b"\n");
    }
    Some(file)
}

fn make_dir(dir: &Path) -> std::io::Result<()> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(dir)
}
