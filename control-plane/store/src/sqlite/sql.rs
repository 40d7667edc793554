//! Between SQLite and us: errors, and values in columns.

use std::str::FromStr;

use roundhouse_domain::time::Timestamp;
use rusqlite::{Connection, ErrorCode, Params, Row};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::{Error, Result, Unavailable};

/// Why the database cannot serve, if that is what the error says.
pub(super) fn classify(error: &rusqlite::Error) -> Option<Unavailable> {
    match error.sqlite_error_code()? {
        ErrorCode::DiskFull => Some(Unavailable::DiskFull),
        ErrorCode::ReadOnly | ErrorCode::PermissionDenied => Some(Unavailable::ReadOnly),
        ErrorCode::SystemIoFailure | ErrorCode::CannotOpen | ErrorCode::OutOfMemory => Some(Unavailable::Io),
        ErrorCode::DatabaseBusy
        | ErrorCode::DatabaseLocked
        | ErrorCode::FileLockingProtocolFailed
        | ErrorCode::OperationInterrupted
        | ErrorCode::OperationAborted => Some(Unavailable::Busy),
        _ => None,
    }
}

impl From<rusqlite::Error> for Error {
    fn from(error: rusqlite::Error) -> Self {
        match classify(&error) {
            Some(reason) => Self::Unavailable { reason, message: error.to_string() },
            None => match error.sqlite_error_code() {
                Some(ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase) => {
                    Self::Corrupt(error.to_string())
                }
                Some(_) => Self::Internal(error.to_string()),
                None => Self::Corrupt(error.to_string()),
            },
        }
    }
}

/// Runs one statement and returns how many rows it changed.
pub(super) fn execute(connection: &Connection, sql: &str, params: impl Params) -> Result<usize> {
    Ok(connection.prepare_cached(sql)?.execute(params)?)
}

/// The first row, if there is one.
pub(super) fn first<T>(
    connection: &Connection,
    sql: &str,
    params: impl Params,
    read: impl FnOnce(&Row<'_>) -> Result<T>,
) -> Result<Option<T>> {
    let mut statement = connection.prepare_cached(sql)?;
    let mut rows = statement.query(params)?;
    rows.next()?.map(read).transpose()
}

/// Every row.
pub(super) fn all<T>(
    connection: &Connection,
    sql: &str,
    params: impl Params,
    mut read: impl FnMut(&Row<'_>) -> Result<T>,
) -> Result<Vec<T>> {
    let mut statement = connection.prepare_cached(sql)?;
    let mut rows = statement.query(params)?;
    let mut items = Vec::new();
    while let Some(row) = rows.next()? {
        items.push(read(row)?);
    }
    Ok(items)
}

/// A counter for a column. Counters never come near the end of 63 bits.
pub(super) fn int(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

/// Reads columns by name of the type that is wanted.
pub(super) trait Columns {
    /// A counter.
    fn count(&self, column: &str) -> Result<u64>;
    /// A counter or null.
    fn count_or_null(&self, column: &str) -> Result<Option<u64>>;
    /// A time.
    fn time(&self, column: &str) -> Result<Timestamp>;
    /// A time or null.
    fn time_or_null(&self, column: &str) -> Result<Option<Timestamp>>;
    /// Text that is parsed: an id, an enum.
    fn parsed<T: FromStr>(&self, column: &str) -> Result<T>;
    /// Text that is parsed, or null.
    fn parsed_or_null<T: FromStr>(&self, column: &str) -> Result<Option<T>>;
    /// JSON.
    fn json<T: DeserializeOwned>(&self, column: &str) -> Result<T>;
    /// JSON or null.
    fn json_or_null<T: DeserializeOwned>(&self, column: &str) -> Result<Option<T>>;
    /// The member of a closed list.
    fn named<T>(&self, column: &str, parse: impl FnOnce(&str) -> Option<T>) -> Result<T>;
}

impl Columns for Row<'_> {
    fn count(&self, column: &str) -> Result<u64> {
        u64::try_from(self.get::<_, i64>(column)?).map_err(|_| bad(column))
    }

    fn count_or_null(&self, column: &str) -> Result<Option<u64>> {
        self.get::<_, Option<i64>>(column)?.map(|v| u64::try_from(v).map_err(|_| bad(column))).transpose()
    }

    fn time(&self, column: &str) -> Result<Timestamp> {
        Ok(Timestamp(self.get(column)?))
    }

    fn time_or_null(&self, column: &str) -> Result<Option<Timestamp>> {
        Ok(self.get::<_, Option<i64>>(column)?.map(Timestamp))
    }

    fn parsed<T: FromStr>(&self, column: &str) -> Result<T> {
        let text = self.get_ref(column)?.as_str().map_err(|_| bad(column))?;
        text.parse().map_err(|_| bad(column))
    }

    fn parsed_or_null<T: FromStr>(&self, column: &str) -> Result<Option<T>> {
        let text = self.get_ref(column)?.as_str_or_null().map_err(|_| bad(column))?;
        text.map(|t| t.parse().map_err(|_| bad(column))).transpose()
    }

    fn json<T: DeserializeOwned>(&self, column: &str) -> Result<T> {
        from_json(self.get_ref(column)?.as_str().map_err(|_| bad(column))?)
    }

    fn json_or_null<T: DeserializeOwned>(&self, column: &str) -> Result<Option<T>> {
        self.get_ref(column)?.as_str_or_null().map_err(|_| bad(column))?.map(from_json).transpose()
    }

    fn named<T>(&self, column: &str, parse: impl FnOnce(&str) -> Option<T>) -> Result<T> {
        parse(self.get_ref(column)?.as_str().map_err(|_| bad(column))?).ok_or_else(|| bad(column))
    }
}

fn bad(column: &str) -> Error {
    Error::Corrupt(format!("column {column} holds a value that this program never writes"))
}

/// A value as JSON for a column.
pub(super) fn to_json<T: Serialize>(value: &T) -> Result<String> {
    serde_json::to_string(value).map_err(|e| Error::Internal(format!("cannot encode a value: {e}")))
}

/// A value from JSON in a column.
pub(super) fn from_json<T: DeserializeOwned>(text: &str) -> Result<T> {
    serde_json::from_str(text).map_err(|e| Error::Corrupt(e.to_string()))
}
