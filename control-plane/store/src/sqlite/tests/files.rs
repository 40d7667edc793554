//! The database and the files beside it.

use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

use super::*;
use crate::error::Unavailable;
use crate::sqlite::checkpoint::LOG_KEPT;

#[test]
fn a_connection_is_set_up_for_durability() {
    let folder = Folder::new();
    drop(folder.store());
    let connection = connect(&folder.path()).unwrap();
    let number =
        |pragma: &str| connection.pragma_query_value(None, pragma, |row| row.get::<_, i64>(0)).unwrap();
    let mode: String = connection.pragma_query_value(None, "journal_mode", |row| row.get(0)).unwrap();
    assert_eq!(mode, "wal");
    assert_eq!(number("synchronous"), 2, "FULL");
    assert_eq!(number("foreign_keys"), 1);
    assert_eq!(number("wal_autocheckpoint"), 0);
    assert_eq!(number("journal_size_limit"), 64 * 1024 * 1024);
    let sql = "SELECT count(*) FROM pragma_table_list WHERE schema = 'main' AND type = 'table' \
               AND strict = 0 AND name NOT LIKE 'sqlite_%'";
    let loose: i64 = connection.query_row(sql, [], |row| row.get(0)).unwrap();
    assert_eq!(loose, 0, "every table is STRICT");
    let mode = std::fs::metadata(folder.path()).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
}

/// The schema after all migrations is the committed one. After a change on purpose run this test with
/// `UPDATE_SCHEMA=1` and commit `schema.sql`.
#[test]
fn the_schema_is_the_committed_dump() {
    let folder = Folder::new();
    drop(folder.store());
    let connection = connect(&folder.path()).unwrap();
    let sql =
        "SELECT sql FROM sqlite_schema WHERE sql IS NOT NULL AND name NOT LIKE 'sqlite_%' ORDER BY name";
    let mut statement = connection.prepare(sql).unwrap();
    let rows = statement.query_map([], |row| row.get::<_, String>(0)).unwrap();
    let dump = rows.map(|row| row.unwrap() + ";\n").collect::<Vec<_>>().join("\n");
    let file = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("schema.sql");
    if std::env::var_os("UPDATE_SCHEMA").is_some() {
        std::fs::write(&file, &dump).unwrap();
    }
    assert_eq!(std::fs::read_to_string(file).unwrap(), dump);
}

#[test]
fn a_second_open_is_refused_and_the_lock_goes_with_its_holder() {
    let folder = Folder::new();
    let store = folder.store();
    let error = SqliteStore::open(folder.path()).unwrap_err();
    assert!(matches!(&error, Error::InUse { path, .. } if *path == folder.path()), "{error:?}");
    assert!(error.to_string().contains("in use by another process"), "{error}");
    drop(store);
    drop(folder.store());
}

/// The other half of the next test: says that it has the store, and keeps it until its stdin ends.
#[test]
fn child_that_holds_the_store() {
    let Some(path) = std::env::var_os("ROUNDHOUSE_TEST_HOLD") else { return };
    let _store = SqliteStore::open(path).unwrap();
    println!("\nholding");
    let _ = std::io::Read::read(&mut std::io::stdin(), &mut [0]);
}

#[test]
fn a_second_process_is_refused_until_the_first_is_gone() {
    use std::io::BufRead;
    let folder = Folder::new();
    let mut child = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "sqlite::tests::files::child_that_holds_the_store", "--nocapture"])
        .env("ROUNDHOUSE_TEST_HOLD", folder.path())
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = std::io::BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap() == "holding"));
    assert!(matches!(SqliteStore::open(folder.path()), Err(Error::InUse { .. })));
    child.kill().unwrap();
    child.wait().unwrap();
    drop(folder.store());
}

#[test]
fn a_newer_schema_is_refused_and_left_alone() {
    let folder = Folder::new();
    drop(folder.store());
    connect(&folder.path()).unwrap().pragma_update(None, "user_version", 77).unwrap();
    let error = SqliteStore::open(folder.path()).unwrap_err();
    assert!(matches!(error, Error::NewerSchema { found: 77, known: 2, .. }), "{error:?}");
    let version: i64 =
        connect(&folder.path()).unwrap().pragma_query_value(None, "user_version", |r| r.get(0)).unwrap();
    assert_eq!(version, 77);
}

#[test]
fn what_is_no_database_is_refused_with_its_path() {
    let folder = Folder::new();
    std::fs::write(folder.path(), "this is certainly not a database, but long enough to be read as one")
        .unwrap();
    let error = SqliteStore::open(folder.path()).unwrap_err();
    assert!(matches!(error, Error::Corrupt(_) | Error::Open { .. }), "{error:?}");
    let error = SqliteStore::open(folder.dir.path().join("missing/control.db")).unwrap_err();
    assert!(matches!(&error, Error::Open { path, .. } if path.ends_with("missing/control.db")), "{error:?}");
}

fn wal(folder: &Folder) -> u64 {
    let mut name = folder.path().into_os_string();
    name.push("-wal");
    std::fs::metadata(name).map_or(0, |m| m.len())
}

/// Pages of the log that are not in the database yet, as another connection sees it.
fn waiting_pages(folder: &Folder) -> i64 {
    let other = rusqlite::Connection::open(folder.path()).unwrap();
    let (log, moved): (i64, i64) =
        other.query_row("PRAGMA wal_checkpoint(NOOP)", [], |row| Ok((row.get(1)?, row.get(2)?))).unwrap();
    log - moved
}

#[tokio::test]
async fn an_idle_store_writes_over_its_log_and_cuts_off_a_long_one() {
    let folder = Folder::new();
    let store = folder.store();
    create(&store).await.unwrap();
    let mut tick = tokio::time::interval(Duration::from_millis(50));
    let mut moved = async || {
        while waiting_pages(&folder) > 0 {
            tick.tick().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(30), moved()).await.unwrap();
    let kept = wal(&folder);
    assert!(kept > 0, "its room is kept");
    store.accept_message(message(1, "after it")).await.unwrap();
    assert_eq!(wal(&folder), kept, "written over, from its start");
    let text = "x".repeat(1024 * 1024);
    for n in 2..8 {
        store.accept_message(message(n, &text)).await.unwrap();
    }
    assert!(wal(&folder) > LOG_KEPT);
    let mut tick = tokio::time::interval(Duration::from_millis(50));
    let cut = async {
        while wal(&folder) > LOG_KEPT {
            tick.tick().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(30), cut).await.unwrap();
    assert_eq!(bodies(&store).await[0], "after it");
}

#[tokio::test]
async fn closing_leaves_everything_in_the_database_file() {
    let folder = Folder::new();
    let store = folder.store();
    create(&store).await.unwrap();
    store.accept_message(message(1, "kept")).await.unwrap();
    store.close().await;
    assert_eq!(wal(&folder), 0);
    let closed = store.accept_message(message(2, "late")).await;
    assert!(matches!(closed, Err(Error::Unavailable { reason: Unavailable::Closed, .. })), "{closed:?}");
    let elsewhere = Folder::new();
    std::fs::copy(folder.path(), elsewhere.path()).unwrap();
    assert_eq!(bodies(&elsewhere.store()).await, ["kept"]);
}

#[tokio::test]
async fn the_length_of_a_queue_can_be_set() {
    use roundhouse_domain::conflict::Conflict;
    let folder = Folder::new();
    let store = SqliteStore::open_with(folder.path(), Settings { max_waiting: 1 }).unwrap();
    create(&store).await.unwrap();
    for n in 1..=2 {
        store.accept_message(message(n, "fits")).await.unwrap();
    }
    let full = store.accept_message(message(3, "too much")).await;
    assert!(matches!(full, Err(Error::Conflict(Conflict::QueueFull { limit: 1 }))), "{full:?}");
}
