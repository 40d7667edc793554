//! The ledger of client request ids: the first answer to a call, for whoever repeats it.

use roundhouse_domain::conflict::Conflict;
use roundhouse_domain::time::Timestamp;
use rusqlite::{Connection, params};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::sql::{execute, first, from_json, to_json};
use crate::command::RequestKey;
use crate::error::Result;

/// The first answer under this key, if the call was made before.
pub(super) fn answered<T: DeserializeOwned>(
    connection: &Connection,
    key: Option<&RequestKey>,
) -> Result<Option<T>> {
    let Some(key) = key else { return Ok(None) };
    let sql = "SELECT rpc, body_hash, answer FROM request WHERE id = ?1";
    let found = first(connection, sql, [key.id.as_str()], |row| {
        Ok((row.get::<_, String>(0)?, row.get::<_, Vec<u8>>(1)?, row.get::<_, String>(2)?))
    })?;
    match found {
        None => Ok(None),
        Some((rpc, hash, answer)) if rpc == key.rpc && hash == key.body_hash => Ok(Some(from_json(&answer)?)),
        Some(_) => Err(Conflict::RequestIdReused.into()),
    }
}

/// Whether a call was made under this key before.
pub(super) fn known(connection: &Connection, key: &RequestKey) -> Result<bool> {
    Ok(answered::<serde_json::Value>(connection, Some(key))?.is_some())
}

/// Keeps the first answer. The unique id is the claim: of two transactions one fails.
pub(super) fn keep<T: Serialize>(
    connection: &Connection,
    key: Option<&RequestKey>,
    answer: &T,
    time: Timestamp,
) -> Result<()> {
    if let Some(key) = key {
        let sql = "INSERT INTO request (id, rpc, body_hash, answer, time) VALUES (?1, ?2, ?3, ?4, ?5)";
        let values = params![key.id.as_str(), key.rpc, key.body_hash, to_json(answer)?, time.0];
        execute(connection, sql, values)?;
    }
    Ok(())
}
