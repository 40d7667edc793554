//! Who holds a workspace's slot and who waits for it, looked up by paths.

use roundhouse_domain::turn::Turn;
use roundhouse_domain::workspace::{SlotDecision, SlotHolder, SlotWaiter, Workspace, decide_slot};
use rusqlite::{Connection, params};

use super::rows::{select_slot, slot};
use super::sql::{Columns, all, to_json};
use crate::error::{Error, Result};

/// The workspaces on a runner that are this directory, lie in it or hold it: parents one by one, children as a range,
/// both by the index of paths, so that a runner may know many others. `?1` is the runner, `?2` to `?4` are what
/// [`overlap`] gives.
macro_rules! overlapping {
    () => {
        "SELECT id FROM workspace WHERE runner_id = ?1 AND path IN (SELECT value FROM json_each(?2)) \
         UNION SELECT id FROM workspace WHERE runner_id = ?1 AND path > ?3 AND path < ?4"
    };
}

/// A directory with all that hold it, as JSON, and the bounds between which everything in it lies.
fn overlap(path: &str) -> Result<(String, String, String)> {
    let path = path.trim_end_matches('/');
    let parents = path.match_indices('/').map(|(at, _)| if at == 0 { "/" } else { &path[..at] });
    let holding: Vec<&str> = parents.chain([if path.is_empty() { "/" } else { path }]).collect();
    // What follows a slash in the order of bytes.
    Ok((to_json(&holding)?, format!("{path}/"), format!("{path}0")))
}

/// The slots that are held in a workspace, its parents and its children.
fn overlapping_holders(c: &Connection, workspace: &Workspace) -> Result<Vec<SlotHolder>> {
    let sql = select_slot!("WHERE l.workspace_id IN (").to_owned() + overlapping!() + ") ORDER BY l.time";
    let (holding, from, to) = overlap(&workspace.path)?;
    all(c, &sql, params![workspace.runner_id.as_str(), holding, from, to], slot)
}

/// Who keeps a turn from its workspace's slot, if it has it not and cannot have it now.
pub(super) fn slot_holder(c: &Connection, turn: &Turn, workspace: &Workspace) -> Result<Option<SlotHolder>> {
    let want = want(turn, workspace)?;
    match decide_slot(&want, &overlapping_holders(c, workspace)?, &[]) {
        SlotDecision::Held(holder) => Ok(Some(holder)),
        SlotDecision::Take | SlotDecision::Behind(_) => Ok(None),
    }
}

fn want(turn: &Turn, workspace: &Workspace) -> Result<SlotWaiter> {
    let promotion =
        turn.promotion.ok_or_else(|| Error::invalid("turn.workspace", "the turn has no workspace"))?;
    Ok(SlotWaiter { turn_id: turn.id.clone(), path: workspace.path.clone(), promotion })
}

pub(super) fn slot_decision(c: &Connection, turn: &Turn, workspace: &Workspace) -> Result<SlotDecision> {
    let want = want(turn, workspace)?;
    let held = overlapping_holders(c, workspace)?;
    // Turns that are being cancelled want no slot any more.
    let sql = concat!(
        "SELECT t.id, t.promotion, w.path FROM turn t JOIN workspace w ON w.id = t.workspace_id \
         WHERE t.state = 'DISPATCHING' AND t.workspace_id IN (",
        overlapping!(),
        ") AND NOT EXISTS (SELECT 1 FROM slot l WHERE l.turn_key = t.key)"
    );
    let (holding, from, to) = overlap(&workspace.path)?;
    let waiters = all(c, sql, params![workspace.runner_id.as_str(), holding, from, to], |row| {
        let promotion = row.count("promotion")?;
        Ok(SlotWaiter { turn_id: row.parsed("id")?, path: row.get("path")?, promotion })
    })?;
    Ok(decide_slot(&want, &held, &waiters))
}

#[cfg(test)]
mod tests {
    use roundhouse_domain::id::RunnerId;
    use roundhouse_domain::workspace::overlaps;

    use super::*;

    /// The index finds what the rule says, whatever bytes names are made of.
    #[test]
    fn overlapping_workspaces_are_found_by_their_paths() {
        let c = Connection::open_in_memory().unwrap();
        let sql = "CREATE TABLE workspace (id TEXT NOT NULL PRIMARY KEY, runner_id TEXT NOT NULL, \
                   path TEXT NOT NULL, UNIQUE (runner_id, path)) STRICT";
        c.execute_batch(sql).unwrap();
        let names = ["a", "a-b", "a.b", "a0", "a b", "aé", "z", "0", "\u{10ffff}"];
        let mut paths = vec!["/".to_owned()];
        for one in names {
            paths.push(format!("/{one}"));
            for two in names {
                paths.extend([format!("/{one}/{two}"), format!("/{one}/{two}/a")]);
            }
        }
        let runners = ["run_1", "run_2"].map(|id| RunnerId::parse(id).unwrap());
        for runner in &runners {
            for path in &paths {
                let values = params![format!("{runner}{path}"), runner.as_str(), path];
                c.execute("INSERT INTO workspace VALUES (?1, ?2, ?3)", values).unwrap();
            }
        }
        for path in &paths {
            let (holding, from, to) = overlap(path).unwrap();
            let values = params![runners[0].as_str(), holding, from, to];
            let mut found = all(&c, overlapping!(), values, |row| Ok(row.get::<_, String>("id")?)).unwrap();
            let mut expected: Vec<_> =
                paths.iter().filter(|other| overlaps(other, path)).map(|p| format!("run_1{p}")).collect();
            found.sort();
            expected.sort();
            assert_eq!(found, expected, "{path}");
        }
    }
}
