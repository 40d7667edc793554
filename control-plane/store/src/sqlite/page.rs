//! Pages: so many items, so many bytes, and whether there is more.

use roundhouse_domain::limits::{MAX_PAGE, MAX_PAGE_BYTES};
use rusqlite::{Connection, Params, Row};

use crate::error::Result;
use crate::view::Page;

/// Reads rows until the page is full. The statement's order must come from an index, so that what is not read
/// is not computed.
pub(super) fn paged<T>(
    c: &Connection,
    sql: &str,
    params: impl Params,
    limit: usize,
    mut read: impl FnMut(&Row<'_>) -> Result<T>,
    size: impl Fn(&T) -> usize,
) -> Result<Page<T>> {
    let limit = limit.clamp(1, MAX_PAGE);
    let mut statement = c.prepare_cached(sql)?;
    let mut rows = statement.query(params)?;
    let mut items = Vec::new();
    let mut bytes = 0_usize;
    while let Some(row) = rows.next()? {
        if items.len() == limit {
            return Ok(Page { items, more: true });
        }
        let item = read(row)?;
        bytes = bytes.saturating_add(size(&item));
        if bytes > MAX_PAGE_BYTES && !items.is_empty() {
            return Ok(Page { items, more: true });
        }
        items.push(item);
    }
    Ok(Page { items, more: false })
}
