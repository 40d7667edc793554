//! A database is checked, copied and put back.

use std::os::unix::fs::PermissionsExt as _;

use super::super::upkeep::{backup, check, restore};
use super::*;

/// Some conversations' worth, with a turn at work and others behind it.
async fn filled(folder: &Folder, messages: u32) -> SqliteStore {
    let store = folder.store();
    create(&store).await.unwrap();
    for n in 1..=messages {
        store.accept_message(message(n, &format!("message {n}"))).await.unwrap();
    }
    store
}

#[tokio::test]
async fn a_copy_is_made_beside_writes_and_holds_all_that_was_answered_before() {
    let folder = Folder::new();
    let store = filled(&folder, 5).await;
    let copy = folder.dir.path().join("copy.db");
    // Somebody writes all the time.
    let writer = {
        let store = store.clone();
        tokio::spawn(async move {
            for n in 6..=60 {
                store.accept_message(message(n, "meanwhile")).await.unwrap();
            }
        })
    };
    let (path, to) = (folder.path(), copy.clone());
    let report = tokio::task::spawn_blocking(move || backup(&path, &to)).await.unwrap().unwrap();
    writer.await.unwrap();
    assert_eq!(report.problems, Vec::<String>::new());
    assert!(report.turns >= 5, "{report:?}");
    assert_eq!(std::fs::metadata(&copy).unwrap().permissions().mode() & 0o077, 0);
    assert!(!folder.dir.path().join("copy.db.part").exists());
    // It is not overwritten.
    let again = backup(&folder.path(), &copy).unwrap_err();
    assert!(matches!(again, Error::Invalid { field: "target", .. }), "{again:?}");
    // And it is a database like any other.
    let found = check(&copy).unwrap();
    assert_eq!(found, report);
    let reopened = SqliteStore::open(&copy).unwrap();
    assert_eq!(bodies(&reopened).await.first().map(String::as_str), Some("message 1"));
}

#[tokio::test]
async fn a_restore_is_refused_while_the_database_is_held_and_keeps_what_it_replaces() {
    let folder = Folder::new();
    let store = filled(&folder, 2).await;
    let copy = folder.dir.path().join("copy.db");
    backup(&folder.path(), &copy).unwrap();
    store.accept_message(message(3, "after the copy")).await.unwrap();
    let held = restore(&folder.path(), &copy, ".replaced").unwrap_err();
    assert!(matches!(held, Error::InUse { .. }), "{held:?}");
    assert_eq!(bodies(&store).await.len(), 3);
    // As a control plane that was killed leaves it: what it wrote last is in the log alone.
    let left = tempfile::tempdir().unwrap();
    for name in ["control.db", "control.db-wal"] {
        std::fs::copy(folder.dir.path().join(name), left.path().join(name)).unwrap();
    }
    let path = left.path().join("control.db");
    let restored = restore(&path, &copy, ".replaced").unwrap();
    assert_eq!(restored.report.turns, 2);
    assert_eq!(bodies(&SqliteStore::open(&path).unwrap()).await, ["message 1", "message 2"]);
    let kept = restored.kept.unwrap();
    assert_eq!(
        bodies(&SqliteStore::open(&kept).unwrap()).await.len(),
        3,
        "the log's rows are in what was kept"
    );
}

#[tokio::test]
async fn a_log_without_its_database_does_not_come_over_what_is_restored() {
    let folder = Folder::new();
    let store = filled(&folder, 2).await;
    let copy = folder.dir.path().join("copy.db");
    backup(&folder.path(), &copy).unwrap();
    store.accept_message(message(3, "after the copy")).await.unwrap();
    let left = tempfile::tempdir().unwrap();
    let path = left.path().join("control.db");
    // Killed, and the database itself is gone: the log knows pages that are newer than the copy's.
    std::fs::copy(folder.dir.path().join("control.db-wal"), left.path().join("control.db-wal")).unwrap();
    let restored = restore(&path, &copy, ".replaced").unwrap();
    assert_eq!(restored.kept, None);
    assert_eq!(bodies(&SqliteStore::open(&path).unwrap()).await, ["message 1", "message 2"]);
    assert!(left.path().join("control.db.replaced-wal").exists(), "the log is kept");
}

#[tokio::test]
async fn what_is_not_whole_is_told_and_never_takes_the_place_of_anything() {
    let folder = Folder::new();
    let store = filled(&folder, 3).await;
    assert_eq!(check(&folder.path()).unwrap().problems, Vec::<String>::new());
    drop(store);
    let damage = |sql: &str| {
        let other = Folder::new();
        std::fs::copy(folder.path(), other.path()).unwrap();
        let connection = rusqlite::Connection::open(other.path()).unwrap();
        connection.pragma_update(None, "foreign_keys", false).unwrap();
        connection.execute_batch(sql).unwrap();
        drop(connection);
        let told = check(&other.path()).unwrap().problems.join("\n");
        let refused = restore(&folder.path(), &other.path(), ".replaced").unwrap_err();
        (told, refused)
    };
    for (sql, words) in [
        ("UPDATE message SET seq = 9 WHERE seq = 3", "the order of its messages has a gap"),
        ("UPDATE conversation SET last_position = 7", "the shared history has a gap"),
        ("UPDATE conversation SET last_cursor = last_cursor + 1", "the log of its changes has a gap"),
        ("DELETE FROM turn WHERE id = 'trn_3'", "names a turn that is not there"),
        (
            "UPDATE turn SET state = 'LOST', end_time = 1, last_seq = 1 WHERE state = 'DISPATCHING'",
            "no turn is before it",
        ),
        ("DELETE FROM conversation", "names a row of conversation that is not there"),
        ("PRAGMA user_version = 99", "newer than this program"),
        ("PRAGMA user_version = 0", "no database of a control plane"),
    ] {
        let (told, refused) = damage(sql);
        assert!(told.contains(words), "{sql}: {told}");
        assert!(matches!(refused, Error::Invalid { .. } | Error::NewerSchema { .. }), "{sql}: {refused:?}");
    }
    // A page of garbage.
    let other = folder.dir.path().join("garbage.db");
    let mut bytes = std::fs::read(folder.path()).unwrap();
    bytes[8_192..12_288].fill(0x5a);
    std::fs::write(&other, bytes).unwrap();
    let told = check(&other).map_or_else(|e| e.to_string(), |report| report.problems.join("\n"));
    assert!(told.contains("damaged") || told.contains("malformed"), "{told}");
    assert!(restore(&folder.path(), &other, ".replaced").is_err());
    // What is no database, and what is not there.
    std::fs::write(&other, "no database").unwrap();
    assert!(matches!(check(&other), Err(Error::Open { .. })));
    assert!(matches!(check(&folder.dir.path().join("none")), Err(Error::Open { .. })));
    // Nothing took its place.
    assert_eq!(bodies(&folder.store()).await.len(), 3);
    assert!(!folder.dir.path().join("control.db.replaced").exists());
}

/// A reader from outside that holds its snapshot keeps the log from being written over, and nothing else: writes go on, and
/// once it is gone the log is cut off.
#[tokio::test]
async fn a_long_reader_from_outside_lets_the_log_grow_and_go_again() {
    let folder = Folder::new();
    let store = filled(&folder, 1).await;
    let outside = rusqlite::Connection::open(folder.path()).unwrap();
    outside.execute_batch("BEGIN").unwrap();
    let before: i64 = outside.query_row("SELECT count(*) FROM message", [], |row| row.get(0)).unwrap();
    let body = "x".repeat(1_000_000);
    for n in 2..=40 {
        store.accept_message(message(n, &body)).await.unwrap();
    }
    let log = || std::fs::metadata(folder.dir.path().join("control.db-wal")).map_or(0, |file| file.len());
    assert!(log() > 30_000_000, "nothing could be taken out of it: {}", log());
    let after: i64 = outside.query_row("SELECT count(*) FROM message", [], |row| row.get(0)).unwrap();
    assert_eq!(after, before, "it sees its snapshot");
    outside.execute_batch("COMMIT").unwrap();
    drop(outside);
    // The store closes with all of it in the file.
    drop(store);
    assert_eq!(log(), 0);
    let found = check(&folder.path()).unwrap();
    assert_eq!((found.turns, found.problems), (40, Vec::new()));
}
