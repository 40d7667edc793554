//! Brings the schema up to date: forward only, with a copy kept before anything is changed.

use std::path::{Path, PathBuf};

use rusqlite::Connection;
use rusqlite_migration::{M, Migrations};

use crate::error::{Error, Result};

/// Every migration, oldest first. Never change one that was released; add another.
pub(super) const MIGRATIONS: &[M<'static>] =
    &[M::up(include_str!("migrations/0001_first.sql")), M::up(include_str!("migrations/0002_summary.sql"))];

/// The copy that is kept before a database of schema `version` is migrated.
pub(super) fn copy_path(database: &Path, version: usize) -> PathBuf {
    let mut name = database.as_os_str().to_owned();
    name.push(format!(".schema-{version}.bak"));
    PathBuf::from(name)
}

/// Brings `connection` to the newest schema. Returns the copy that was kept, if there was anything to copy.
pub(super) fn migrate(
    connection: &mut Connection,
    database: &Path,
    migrations: &[M<'_>],
) -> Result<Option<PathBuf>> {
    let open = |message: String| Error::Open { path: database.to_owned(), message };
    let found: usize = connection
        .pragma_query_value(None, "user_version", |row| row.get::<_, i64>(0))
        .map_err(|e| open(e.to_string()))
        .and_then(|v| usize::try_from(v).map_err(|_| open("its schema version is negative".to_owned())))?;
    let known = migrations.len();
    if found > known {
        return Err(Error::NewerSchema { path: database.to_owned(), found, known });
    }
    if found == known {
        return Ok(None);
    }
    let copy = if found == 0 { None } else { Some(keep_copy(connection, database, found).map_err(open)?) };
    Migrations::from_slice(migrations)
        .to_latest(connection)
        .map_err(|e| open(format!("the migration from schema {found} to {known} failed: {e}")))?;
    Ok(copy)
}

/// Writes a copy beside the database. It gets its name only when it is complete and on disk.
fn keep_copy(
    connection: &Connection,
    database: &Path,
    version: usize,
) -> std::result::Result<PathBuf, String> {
    let copy = copy_path(database, version);
    let mut part = copy.as_os_str().to_owned();
    part.push(".part");
    let part = PathBuf::from(part);
    let failed = |e: &dyn std::fmt::Display| format!("the copy {} cannot be kept: {e}", copy.display());
    match std::fs::remove_file(&part) {
        Ok(()) => {}
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {}
        Err(e) => return Err(failed(&e)),
    }
    let name = part.to_str().ok_or_else(|| failed(&"its path is not UTF-8"))?;
    connection.execute("VACUUM INTO ?1", [name]).map_err(|e| failed(&e))?;
    std::fs::File::open(&part).and_then(|f| f.sync_all()).map_err(|e| failed(&e))?;
    std::fs::rename(&part, &copy).map_err(|e| failed(&e))?;
    if let Some(folder) = database.parent().filter(|p| !p.as_os_str().is_empty()) {
        std::fs::File::open(folder).and_then(|f| f.sync_all()).map_err(|e| failed(&e))?;
    }
    Ok(copy)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_migrations_are_valid() {
        Migrations::from_slice(MIGRATIONS).validate().unwrap();
    }

    #[test]
    fn a_copy_of_the_old_state_is_kept_before_a_migration() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.db");
        let steps = [M::up("CREATE TABLE t (x INTEGER) STRICT"), M::up("DROP TABLE t")];
        let mut connection = Connection::open(&path).unwrap();
        assert_eq!(
            migrate(&mut connection, &path, &steps[..1]).unwrap(),
            None,
            "nothing to copy in a new one"
        );
        connection.execute("INSERT INTO t VALUES (7)", []).unwrap();
        let copy = migrate(&mut connection, &path, &steps).unwrap().unwrap();
        assert_eq!(copy, copy_path(&path, 1));
        assert!(connection.prepare("SELECT x FROM t").is_err(), "the migration was applied");
        let old = Connection::open(&copy).unwrap();
        assert_eq!(old.query_row("SELECT x FROM t", [], |r| r.get::<_, i64>(0)).unwrap(), 7);
        assert_eq!(migrate(&mut connection, &path, &steps).unwrap(), None, "and only once");
    }

    /// What the first release stored is there after every later migration, and the copy is as it was.
    #[test]
    fn a_database_of_the_first_schema_is_taken_along() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.db");
        let mut connection = Connection::open(&path).unwrap();
        migrate(&mut connection, &path, &MIGRATIONS[..1]).unwrap();
        connection
            .execute_batch(
                "INSERT INTO conversation (key, id, title, last_position, create_time, update_time)
                     VALUES (1, 'cnv_1', 'a title', 2, 0, 0);
                 INSERT INTO message (key, id, conversation_key, seq, position, role, actor, body, create_time)
                     VALUES (1, 'msg_1', 1, 1, 1, 'USER', 'ann', 'hello', 0);
                 INSERT INTO turn (key, id, conversation_key, message_key, state, usage, surface, create_time)
                     VALUES (1, 'trn_1', 1, 1, 'QUEUED', '{}', 'manual', 0);",
            )
            .unwrap();
        let copy = migrate(&mut connection, &path, MIGRATIONS).unwrap().unwrap();
        let state = |c: &Connection| {
            c.query_row("SELECT state || ' ' || id FROM turn", [], |r| r.get::<_, String>(0)).unwrap()
        };
        assert_eq!(state(&connection), "QUEUED trn_1");
        assert_eq!(
            connection.query_row("SELECT count(*) FROM summary", [], |r| r.get::<_, i64>(0)).unwrap(),
            0
        );
        let old = Connection::open(&copy).unwrap();
        assert_eq!(state(&old), "QUEUED trn_1");
        assert!(old.prepare("SELECT summary_version FROM turn").is_err(), "the copy is of the old schema");
    }

    #[test]
    fn a_failed_migration_changes_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.db");
        let mut connection = Connection::open(&path).unwrap();
        let good = M::up("CREATE TABLE t (x INTEGER) STRICT");
        migrate(&mut connection, &path, std::slice::from_ref(&good)).unwrap();
        let bad = [good, M::up("DROP TABLE t; SELECT nonsense FROM nowhere;")];
        assert!(matches!(migrate(&mut connection, &path, &bad), Err(Error::Open { .. })));
        assert_eq!(connection.query_row("SELECT count(*) FROM t", [], |r| r.get::<_, i64>(0)).unwrap(), 0);
    }

    #[test]
    fn a_newer_schema_is_refused_with_a_sentence() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.db");
        let mut connection = Connection::open(&path).unwrap();
        connection.pragma_update(None, "user_version", 99).unwrap();
        let error = migrate(&mut connection, &path, MIGRATIONS).unwrap_err();
        assert!(matches!(error, Error::NewerSchema { found: 99, .. }));
        assert!(error.to_string().contains("written by a newer version"), "{error}");
    }
}
