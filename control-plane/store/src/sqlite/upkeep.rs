//! What is done to a database from outside a control plane: look whether it is whole, copy it, put a copy in its place.
//!
//! All of it blocks.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rusqlite::backup::Backup;
use rusqlite::{Connection, OpenFlags};

use super::lock::Lock;
use super::migrate::MIGRATIONS;
use super::{BUSY, connect};
use crate::error::{Error, Result};

/// Pages per step of a copy: all of them, for between two steps each commit would make it begin anew. It reads a snapshot
/// and is in no writer's way.
const STEP: std::ffi::c_int = std::ffi::c_int::MAX;
/// How long a copy waits between two steps, and when the database is locked.
const PAUSE: Duration = Duration::from_millis(5);
/// Problems of one kind that are listed.
const LISTED: usize = 20;

/// What a look at a database found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckReport {
    /// Its schema version.
    pub schema: usize,
    /// The newest schema version that this program knows. An older one is brought up to date by the next start.
    pub known_schema: usize,
    /// How many conversations it holds.
    pub conversations: u64,
    /// How many turns.
    pub turns: u64,
    /// How many events and facts.
    pub changes: u64,
    /// What is wrong, in words; of each kind at most 20. Empty: it is whole.
    pub problems: Vec<String>,
}

/// What [`restore`] did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Restored {
    /// Where the database lies now that was replaced; none when there was none.
    pub kept: Option<PathBuf>,
    /// What was found in the copy that took its place.
    pub report: CheckReport,
}

/// A rule of ours that the schema cannot state: the rows that break it.
struct Rule {
    /// What holds for the row that is named.
    broken: &'static str,
    /// One text per row that breaks it.
    sql: &'static str,
}

/// All of them read one snapshot.
const RULES: &[Rule] = &[
    Rule {
        broken: "the order of its messages has a gap",
        sql: "SELECT c.id FROM conversation c LEFT JOIN (SELECT conversation_key, count(*) AS n, min(seq) AS lo, \
              max(seq) AS hi FROM message GROUP BY conversation_key) m ON m.conversation_key = c.key \
              WHERE coalesce(m.n, 0) <> c.last_seq OR (m.n > 0 AND (m.lo <> 1 OR m.hi <> c.last_seq))",
    },
    Rule {
        broken: "the shared history has a gap",
        sql: "SELECT c.id FROM conversation c LEFT JOIN (SELECT conversation_key, count(*) AS n, max(position) AS hi \
              FROM message WHERE position IS NOT NULL GROUP BY conversation_key) m ON m.conversation_key = c.key \
              WHERE coalesce(m.n, 0) <> c.last_position OR coalesce(m.hi, 0) <> c.last_position",
    },
    Rule {
        broken: "the log of its changes has a gap",
        sql: "SELECT c.id FROM conversation c LEFT JOIN (SELECT conversation_key, count(*) AS n, min(cursor) AS lo, \
              max(cursor) AS hi FROM change GROUP BY conversation_key) l ON l.conversation_key = c.key \
              WHERE coalesce(l.n, 0) <> c.last_cursor - c.pruned_through \
              OR (l.n > 0 AND (l.lo <> c.pruned_through + 1 OR l.hi <> c.last_cursor))",
    },
    Rule {
        broken: "its events have a gap",
        sql: "SELECT t.id FROM turn t JOIN conversation c ON c.key = t.conversation_key LEFT JOIN (SELECT turn_key, \
              count(*) AS n, min(seq) AS lo, max(seq) AS hi FROM change WHERE turn_key IS NOT NULL GROUP BY turn_key) e \
              ON e.turn_key = t.key WHERE (e.n IS NULL AND t.last_seq > 0 AND c.pruned_through = 0) \
              OR e.n <> e.hi - e.lo + 1 OR e.hi <> t.last_seq OR (e.lo <> 1 AND c.pruned_through = 0)",
    },
    Rule {
        broken: "the numbers of its runner's events have a gap",
        sql: "SELECT t.id FROM turn t JOIN (SELECT turn_key, count(*) AS n, min(number) AS lo, max(number) AS hi \
              FROM change WHERE number IS NOT NULL GROUP BY turn_key) e ON e.turn_key = t.key \
              WHERE e.n <> e.hi - e.lo + 1 OR e.hi <> t.last_number",
    },
    Rule {
        broken: "it has ended and its events do not end with one end",
        sql: "SELECT t.id FROM turn t JOIN conversation c ON c.key = t.conversation_key \
              WHERE t.end_time IS NOT NULL AND t.last_seq > 0 AND c.pruned_through = 0 AND (SELECT count(*) FROM change e \
              WHERE e.turn_key = t.key AND e.kind = 'TERMINAL') <> 1",
    },
    Rule {
        broken: "it has not ended and its events say that it has",
        sql: "SELECT t.id FROM turn t WHERE t.end_time IS NULL AND EXISTS (SELECT 1 FROM change e \
              WHERE e.turn_key = t.key AND e.kind = 'TERMINAL')",
    },
    Rule {
        broken: "it waits, and no turn is before it",
        sql: "SELECT t.id FROM turn t WHERE t.state = 'QUEUED' AND NOT EXISTS (SELECT 1 FROM turn a \
              WHERE a.conversation_key = t.conversation_key AND a.state IN ('DISPATCHING', 'RUNNING', \
              'WAITING_FOR_PERMISSION', 'CANCELLING'))",
    },
    Rule {
        broken: "it holds a workspace that is not its own, or before its time",
        sql: "SELECT t.id FROM slot s JOIN turn t ON t.key = s.turn_key \
              WHERE t.state = 'QUEUED' OR t.workspace_id IS NOT s.workspace_id",
    },
    Rule {
        broken: "it asks although its turn has ended",
        sql: "SELECT p.id FROM permission p JOIN turn t ON t.key = p.turn_key \
              WHERE p.settle_time IS NULL AND t.end_time IS NOT NULL",
    },
    Rule {
        broken: "it names a turn that is not there",
        sql: "SELECT m.id FROM message m WHERE m.turn_id IS NOT NULL \
              AND NOT EXISTS (SELECT 1 FROM turn t WHERE t.id = m.turn_id)",
    },
];

/// Looks whether a database is whole: SQLite's own check, references, schema version, and what the store promises.
/// A control plane may have it open; nothing is written.
///
/// # Errors
/// [`Error::Open`] when it is not there or cannot be read at all.
pub fn check(path: &Path) -> Result<CheckReport> {
    let connection = reader(path)?;
    report(&connection).map_err(|e| unreadable(path, &e))
}

/// Copies a database as it is at one moment, through SQLite's own backup, to a file that must not be there yet. A
/// control plane may have it open and goes on meanwhile. The copy has its name only when it is whole, checked and on
/// disk, and is for its owner alone.
///
/// # Errors
/// [`Error::Open`] when the database cannot be read, or the copy cannot be written or is not whole;
/// [`Error::Invalid`] when there is something under the copy's name.
pub fn backup(path: &Path, copy: &Path) -> Result<CheckReport> {
    if copy.symlink_metadata().is_ok() {
        return Err(Error::invalid("target", format!("{} is there already", copy.display())));
    }
    let source = reader(path)?;
    let part = beside(copy, ".part");
    let made = copy_to(&source, path, &part).and_then(|report| {
        // A name that came up meanwhile is not overwritten.
        fs::hard_link(&part, copy).and_then(|()| sync_folder(copy)).map_err(|e| broken(copy, &e))?;
        Ok(report)
    });
    remove(&part);
    made
}

/// Puts a copy in the place of a database, and keeps what was there beside it. The copy is checked first, and the
/// exchange is one step: whenever this is cut off, one of the two whole databases is there.
///
/// # Errors
/// [`Error::InUse`] while a control plane has the database open; [`Error::Invalid`] when the copy is not whole;
/// [`Error::NewerSchema`] when it is of a newer version; [`Error::Open`] when one of them cannot be read or written.
/// The database is as it was then.
pub fn restore(path: &Path, copy: &Path, kept_suffix: &str) -> Result<Restored> {
    let _lock = Lock::take(path)?;
    let source = reader(copy)?;
    let found = report(&source).map_err(|e| unreadable(copy, &e))?;
    if found.schema > found.known_schema {
        let (found, known) = (found.schema, found.known_schema);
        return Err(Error::NewerSchema { path: copy.to_owned(), found, known });
    }
    if let Some(problem) = found.problems.first() {
        return Err(Error::invalid("copy", format!("{} is not whole: {problem}", copy.display())));
    }
    let part = beside(path, ".restore.part");
    let made = copy_to(&source, copy, &part).and_then(|report| {
        let kept = keep(path, kept_suffix)?;
        fs::rename(&part, path).and_then(|()| sync_folder(path)).map_err(|e| broken(path, &e))?;
        Ok(Restored { kept, report })
    });
    remove(&part);
    made
}

/// Gives the database that is to be replaced a second name. Its write-ahead log goes into it first: left there it
/// would be taken for the new one's.
fn keep(path: &Path, suffix: &str) -> Result<Option<PathBuf>> {
    let kept = beside(path, suffix);
    let there = path.exists();
    // The last connection to close takes the log into the file and removes it.
    let closed = there
        && connect(path)
            .and_then(|connection| {
                connection.pragma_update_and_check(None, "journal_mode", "DELETE", |_| Ok(()))?;
                Ok(connection.close().map_err(|(_, e)| e)?)
            })
            .is_ok();
    if !closed {
        // Too damaged for that, or gone, which its log may not be: what there is is kept as it is.
        for part in ["-wal", "-journal"] {
            match fs::rename(beside(path, part), beside(&kept, part)) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    return Err(broken(path, &error));
                }
                Ok(()) | Err(_) => {}
            }
        }
    }
    remove(&beside(path, "-shm"));
    if !there {
        sync_folder(path).map_err(|e| broken(path, &e))?;
        return Ok(None);
    }
    fs::hard_link(path, &kept).and_then(|()| sync_folder(path)).map_err(|e| broken(&kept, &e))?;
    Ok(Some(kept))
}

fn copy_to(source: &Connection, path: &Path, part: &Path) -> Result<CheckReport> {
    remove(part);
    let made = OpenOptions::new().write(true).create_new(true).mode(0o600).open(part);
    made.map_err(|e| broken(part, &e))?;
    let failed = |e: rusqlite::Error| Error::Open { path: part.to_owned(), message: e.to_string() };
    let mut target = Connection::open(part).map_err(failed)?;
    {
        let backup = Backup::new(source, &mut target).map_err(|e| unreadable(path, &e))?;
        // It waits between its steps, for the writer or a checkpoint that is in its way, too.
        backup.run_to_completion(STEP, PAUSE, None).map_err(failed)?;
    }
    // One file, whatever the source has beside it.
    target.pragma_update_and_check(None, "journal_mode", "DELETE", |_| Ok(())).map_err(failed)?;
    let report = report(&target).map_err(failed)?;
    target.close().map_err(|(_, e)| failed(e))?;
    File::open(part).and_then(|file| file.sync_all()).map_err(|e| broken(part, &e))?;
    Ok(report)
}

fn reader(path: &Path) -> Result<Connection> {
    // SQLite would say of all these that it is unable to open them.
    File::open(path).map_err(|e| broken(path, &e))?;
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let connection = Connection::open_with_flags(path, flags).map_err(|e| unreadable(path, &e))?;
    connection.busy_timeout(BUSY)?;
    Ok(connection)
}

fn report(connection: &Connection) -> rusqlite::Result<CheckReport> {
    // One snapshot for all that is asked.
    let snapshot = connection.unchecked_transaction()?;
    let version: i64 = snapshot.pragma_query_value(None, "user_version", |row| row.get(0))?;
    let mut report = CheckReport {
        schema: usize::try_from(version).unwrap_or(0),
        known_schema: MIGRATIONS.len(),
        conversations: 0,
        turns: 0,
        changes: 0,
        problems: Vec::new(),
    };
    let problems = &mut report.problems;
    let texts = |sql: &str| -> rusqlite::Result<Vec<String>> {
        let mut statement = snapshot.prepare(sql)?;
        let rows = statement.query_map([], |row| row.get::<_, String>(0))?;
        rows.take(LISTED).collect()
    };
    for line in texts(&format!("PRAGMA integrity_check({LISTED})"))? {
        if line != "ok" {
            problems.push(format!("the file is damaged: {line}"));
        }
    }
    if version == 0 {
        problems.push("it is no database of a control plane, or an empty one".to_owned());
    } else if report.schema > report.known_schema {
        problems.push(format!(
            "its schema version {} is newer than this program's {}",
            report.schema, report.known_schema
        ));
    }
    // What a damaged file or another schema would answer to these says nothing.
    if !problems.is_empty() {
        return Ok(report);
    }
    let dangling = "SELECT \"table\" || ' ' || coalesce(rowid, '?') || ' names a row of ' || parent || ' that is not there' \
                    FROM pragma_foreign_key_check";
    problems.extend(texts(dangling)?);
    // The rules are those of the newest schema; an older one lacks no column that they name.
    for rule in RULES {
        problems.extend(texts(rule.sql)?.into_iter().map(|id| format!("{id}: {}", rule.broken)));
    }
    let count = |table: &str| -> rusqlite::Result<u64> {
        let rows: i64 = snapshot.query_row(&format!("SELECT count(*) FROM {table}"), [], |row| row.get(0))?;
        Ok(u64::try_from(rows).unwrap_or(0))
    };
    report.conversations = count("conversation")?;
    report.turns = count("turn")?;
    report.changes = count("change")?;
    Ok(report)
}

fn beside(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    PathBuf::from(name)
}

/// Removes a file of ours that may not be there; one that stays is in nobody's way.
fn remove(path: &Path) {
    let _ = fs::remove_file(path);
}

fn sync_folder(path: &Path) -> io::Result<()> {
    let folder =
        path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or_else(|| Path::new("."));
    File::open(folder)?.sync_all()
}

fn broken(path: &Path, error: &io::Error) -> Error {
    Error::Open { path: path.to_owned(), message: error.to_string() }
}

fn unreadable(path: &Path, error: &rusqlite::Error) -> Error {
    Error::Open { path: path.to_owned(), message: error.to_string() }
}
