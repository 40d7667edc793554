//! The writer: batches, order, and what happens when the database fails.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;

use roundhouse_domain::conflict::{Conflict, Kind};

use super::*;
use crate::error::Unavailable;

/// Holds the writer in a batch of its own until the sender is dropped, so that what is sent meanwhile waits.
async fn hold(store: &SqliteStore) -> (mpsc::Sender<()>, tokio::task::JoinHandle<crate::Result<()>>) {
    let (release, released) = mpsc::channel::<()>();
    let (running, runs) = tokio::sync::oneshot::channel();
    let store = store.clone();
    let holder = tokio::spawn(async move {
        let cost = Cost { rows: 1_000, bytes: 0 };
        let command = move |_: &mut Scope<'_>| {
            let _ = running.send(());
            let _ = released.recv();
            Ok(())
        };
        store.inner.writer.run("hold", Lane::Interactive, cost, command).await
    });
    runs.await.unwrap();
    (release, holder)
}

/// A command that adds a row, in a lane.
fn insert(store: &SqliteStore, lane: Lane, name: &'static str) -> tokio::task::JoinHandle<crate::Result<()>> {
    let store = store.clone();
    tokio::spawn(async move {
        let command = move |scope: &mut Scope<'_>| {
            let sql = "INSERT INTO meta (name, value) VALUES (?1, '')";
            sql::execute(scope.connection, sql, [name]).map(|_| ())
        };
        store.inner.writer.run("test", lane, Cost { rows: 1, bytes: 1 }, command).await
    })
}

#[tokio::test]
async fn what_has_leisure_goes_with_the_next_batch_and_alone_after_a_while() {
    let folder = Folder::new();
    let store = folder.store();
    let commits = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&commits);
    let install = move |scope: &mut Scope<'_>| {
        let count = move || {
            counter.fetch_add(1, Ordering::SeqCst);
            false
        };
        scope.connection.commit_hook(Some(count))?;
        Ok(())
    };
    store.write("hook", install).await.unwrap();
    let (release, holder) = hold(&store).await;
    let leisure = insert(&store, Lane::Leisure, "leisure");
    queued(&store, 1).await;
    let before = commits.load(Ordering::SeqCst);
    drop(release);
    holder.await.unwrap().unwrap();
    // The one that held the writer; what has leisure waits for company.
    assert_eq!(commits.load(Ordering::SeqCst), before + 1);
    assert!(!leisure.is_finished());
    insert(&store, Lane::Interactive, "urgent").await.unwrap().unwrap();
    leisure.await.unwrap().unwrap();
    assert_eq!(commits.load(Ordering::SeqCst), before + 2);
    // Nothing follows: it is committed all the same.
    insert(&store, Lane::Leisure, "alone").await.unwrap().unwrap();
    assert_eq!(commits.load(Ordering::SeqCst), before + 3);
}

#[tokio::test]
async fn what_has_leisure_is_committed_before_the_store_closes() {
    let folder = Folder::new();
    let store = folder.store();
    let leisure = insert(&store, Lane::Leisure, "leisure");
    queued(&store, 1).await;
    let closing = store.clone();
    tokio::task::spawn_blocking(move || closing.inner.writer.close()).await.unwrap();
    leisure.await.unwrap().unwrap();
}

/// Waits until so many commands wait.
async fn queued(store: &SqliteStore, count: usize) {
    while store.inner.writer.waiting() < count {
        tokio::task::yield_now().await;
    }
}

/// Sets a pragma on the writer's connection.
async fn pragma(store: &SqliteStore, name: &'static str, value: i64) {
    let set = move |scope: &mut Scope<'_>| {
        let mut statement = scope.connection.prepare(&format!("PRAGMA {name} = {value}"))?;
        let mut rows = statement.query([])?;
        while rows.next()?.is_some() {}
        Ok(())
    };
    store.write("pragma", set).await.unwrap();
}

#[tokio::test]
async fn what_waits_is_one_batch_interactive_commands_first() {
    let folder = Folder::new();
    let store = folder.store();
    let commits = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&commits);
    let install = move |scope: &mut Scope<'_>| {
        let count = move || {
            counter.fetch_add(1, Ordering::SeqCst);
            false
        };
        scope.connection.commit_hook(Some(count))?;
        Ok(())
    };
    store.write("hook", install).await.unwrap();
    let (release, holder) = hold(&store).await;
    let order = Arc::new(Mutex::new(Vec::new()));
    let mut tasks = Vec::new();
    for (n, lane) in [Lane::Bulk, Lane::Bulk, Lane::Interactive, Lane::Interactive].into_iter().enumerate() {
        let (order, sender) = (Arc::clone(&order), store.clone());
        tasks.push(tokio::spawn(async move {
            let command = move |scope: &mut Scope<'_>| {
                order.lock().unwrap().push(n);
                let sql = "INSERT INTO meta (name, value) VALUES (?1, '')";
                sql::execute(scope.connection, sql, [format!("row-{n}")])
            };
            sender.inner.writer.run("test", lane, Cost { rows: 1, bytes: 1 }, command).await
        }));
        queued(&store, n + 1).await;
    }
    let before = commits.load(Ordering::SeqCst);
    drop(release);
    holder.await.unwrap().unwrap();
    for task in tasks {
        task.await.unwrap().unwrap();
    }
    assert_eq!(*order.lock().unwrap(), [2, 3, 0, 1]);
    assert_eq!(commits.load(Ordering::SeqCst) - before, 2, "the holder's batch, and one for all four");
}

#[tokio::test]
async fn a_command_that_crosses_a_limit_closes_its_batch() {
    let folder = Folder::new();
    let store = folder.store();
    for cost in [Cost { rows: 600, bytes: 0 }, Cost { rows: 0, bytes: 2 * 1024 * 1024 }] {
        let (release, holder) = hold(&store).await;
        // In a batch a command sees what the ones before it did, and readers do not see it yet.
        let seen = Arc::new(Mutex::new(Vec::new()));
        let mut tasks = Vec::new();
        for n in 0..3 {
            let (sender, seen, path) = (store.clone(), Arc::clone(&seen), folder.path());
            tasks.push(tokio::spawn(async move {
                let command = move |scope: &mut Scope<'_>| {
                    let sql = "SELECT count(*) FROM meta";
                    let committed: i64 = connect(&path)?.query_row(sql, [], |row| row.get(0))?;
                    let inside: i64 = scope.connection.query_row(sql, [], |row| row.get(0))?;
                    seen.lock().unwrap().push(inside - committed);
                    let name = format!("{n} {cost:?}");
                    sql::execute(scope.connection, "INSERT INTO meta (name, value) VALUES (?1, '')", [name])
                };
                sender.inner.writer.run("test", Lane::Bulk, cost, command).await
            }));
            queued(&store, n + 1).await;
        }
        drop(release);
        holder.await.unwrap().unwrap();
        for task in tasks {
            task.await.unwrap().unwrap();
        }
        assert_eq!(*seen.lock().unwrap(), [0, 0, 0], "each was a batch of its own with {cost:?}");
    }
}

#[cfg(feature = "failpoints")]
#[tokio::test]
async fn a_writer_that_dies_leaves_nobody_waiting() {
    let folder = Folder::new();
    let store = folder.store();
    create(&store).await.unwrap();
    fail::cfg("store::accept_message::before_commit", "panic").unwrap();
    for n in 1..3 {
        let answer = store.accept_message(message(n, "no")).await;
        let closed = matches!(&answer, Err(Error::Unavailable { reason: Unavailable::Closed, .. }));
        assert!(closed, "{answer:?}");
    }
    fail::remove("store::accept_message::before_commit");
    assert_eq!(bodies(&store).await, Vec::<String>::new());
}

#[tokio::test]
async fn a_refused_command_is_undone_alone() {
    let folder = Folder::new();
    let store = folder.store();
    create(&store).await.unwrap();
    let (release, holder) = hold(&store).await;
    let undone = {
        let store = store.clone();
        tokio::spawn(async move {
            let command = |scope: &mut Scope<'_>| -> crate::Result<()> {
                sql::execute(scope.connection, "INSERT INTO meta (name, value) VALUES ('x', '')", [])?;
                scope.hint(Hint::Missed);
                Err(Conflict::TurnInProgress.into())
            };
            store.write("refused", command).await
        })
    };
    queued(&store, 1).await;
    let mut hints = store.hints();
    let kept = {
        let store = store.clone();
        tokio::spawn(async move { store.accept_message(message(1, "kept")).await })
    };
    queued(&store, 2).await;
    drop(release);
    holder.await.unwrap().unwrap();
    assert!(matches!(undone.await.unwrap(), Err(Error::Conflict(Conflict::TurnInProgress))));
    kept.await.unwrap().unwrap();
    let count =
        |c: &Connection| sql::first(c, "SELECT count(*) FROM meta", [], |row| Ok(row.get::<_, i64>(0)?));
    assert_eq!(store.read(count).await.unwrap(), Some(0));
    assert!(matches!(hints.next().await, Some(Hint::Promoted { .. })), "the refused one's hint is not told");
}

#[tokio::test]
async fn a_full_disk_answers_the_whole_batch_and_passes() {
    let folder = Folder::new();
    let store = folder.store();
    create(&store).await.unwrap();
    store.accept_message(message(1, "before")).await.unwrap();
    let pages = |c: &Connection| Ok(c.pragma_query_value(None, "page_count", |row| row.get::<_, i64>(0))?);
    let pages = store.read(pages).await.unwrap();
    pragma(&store, "max_page_count", pages + 4).await;
    let (release, holder) = hold(&store).await;
    let send = |n: u32, body: String| {
        let store = store.clone();
        tokio::spawn(async move { store.accept_message(message(n, &body)).await })
    };
    let small = send(2, "small".into());
    queued(&store, 1).await;
    let big = send(3, "x".repeat(200_000));
    queued(&store, 2).await;
    let mut hints = store.hints();
    drop(release);
    holder.await.unwrap().unwrap();
    for (name, answer) in [("small", small), ("big", big)] {
        let answer = answer.await.unwrap();
        let full = matches!(answer, Err(Error::Unavailable { reason: Unavailable::DiskFull, .. }));
        assert!(full, "{name}: {answer:?}");
    }
    assert_eq!(bodies(&store).await, ["before"], "nothing of the batch is there");
    pragma(&store, "max_page_count", 1_000_000).await;
    store.accept_message(message(2, "small")).await.unwrap();
    assert_eq!(bodies(&store).await, ["before", "small"], "the same call succeeds later");
    assert!(
        matches!(hints.next().await, Some(Hint::Changed { cursor: 4, .. })),
        "no hint of what was not stored"
    );
}

#[tokio::test]
async fn a_database_that_cannot_be_written_says_so_and_still_reads() {
    let folder = Folder::new();
    let store = folder.store();
    create(&store).await.unwrap();
    store.accept_message(message(1, "before")).await.unwrap();
    pragma(&store, "query_only", 1).await;
    let answer = store.accept_message(message(2, "no")).await;
    let read_only = matches!(&answer, Err(Error::Unavailable { reason: Unavailable::ReadOnly, .. }));
    assert!(read_only, "{answer:?}");
    assert!(answer.unwrap_err().is_retryable());
    assert_eq!(bodies(&store).await, ["before"]);
    store.close().await;
    let store = folder.store();
    store.accept_message(message(2, "yes")).await.unwrap();
    assert_eq!(bodies(&store).await, ["before", "yes"]);
}

#[tokio::test]
async fn a_writer_in_the_way_is_waited_for_not_forever() {
    let folder = Folder::new();
    let store = folder.store();
    create(&store).await.unwrap();
    store.write("timeout", |s| Ok(s.connection.busy_timeout(Duration::from_millis(20))?)).await.unwrap();
    let other = connect(&folder.path()).unwrap();
    other.execute_batch("BEGIN IMMEDIATE").unwrap();
    let answer = store.accept_message(message(1, "no")).await;
    assert!(matches!(answer, Err(Error::Unavailable { reason: Unavailable::Busy, .. })), "{answer:?}");
    other.execute_batch("ROLLBACK").unwrap();
    store.accept_message(message(1, "yes")).await.unwrap();
    assert_eq!(bodies(&store).await, ["yes"]);
}

#[tokio::test]
async fn a_panic_in_a_command_or_a_read_is_one_callers_error() {
    let folder = Folder::new();
    let store = folder.store();
    create(&store).await.unwrap();
    let command = |scope: &mut Scope<'_>| -> crate::Result<()> {
        sql::execute(scope.connection, "INSERT INTO meta (name, value) VALUES ('x', '')", [])?;
        panic!("on purpose")
    };
    assert!(matches!(store.write("panics", command).await, Err(Error::Internal(_))));
    let read = |_: &Connection| -> crate::Result<()> { panic!("on purpose") };
    for _ in 0..10 {
        assert!(matches!(store.read(read).await, Err(Error::Internal(_))));
    }
    let count =
        |c: &Connection| sql::first(c, "SELECT count(*) FROM meta", [], |row| Ok(row.get::<_, i64>(0)?));
    assert_eq!(store.read(count).await.unwrap(), Some(0));
    store.accept_message(message(1, "goes on")).await.unwrap();
}

#[tokio::test]
async fn a_caller_that_leaves_undoes_nothing() {
    let folder = Folder::new();
    let store = folder.store();
    create(&store).await.unwrap();
    let (release, holder) = hold(&store).await;
    let caller = {
        let store = store.clone();
        tokio::spawn(async move { store.accept_message(message(1, "left")).await })
    };
    queued(&store, 1).await;
    caller.abort();
    drop(release);
    holder.await.unwrap().unwrap();
    let repeat = store.accept_message(message(1, "left")).await.unwrap();
    assert!(repeat.repeated, "the first call was carried out");
    assert_eq!(bodies(&store).await, ["left"]);
}

#[tokio::test]
async fn the_lock_is_a_unique_index_whatever_the_code_above_thinks() {
    let folder = Folder::new();
    let store = folder.store();
    create(&store).await.unwrap();
    store.accept_message(message(1, "one")).await.unwrap();
    store.accept_message(message(2, "two")).await.unwrap();
    let cheat = |scope: &mut Scope<'_>| {
        sql::execute(scope.connection, "UPDATE turn SET state = 'RUNNING' WHERE id = 'trn_2'", [])
    };
    let answer = store.write("cheat", cheat).await;
    assert!(matches!(&answer, Err(Error::Internal(text)) if text.contains("UNIQUE")), "{answer:?}");
    let missing = store.get_turn(&TurnId::parse("trn_9").unwrap()).await;
    assert!(matches!(missing, Err(Error::NotFound { kind: Kind::Turn, .. })));
}
