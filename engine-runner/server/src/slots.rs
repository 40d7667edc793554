//! The right to run a turn in a workspace. A held directory holds its parents and children, too.

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
};

use crate::error::Error;

/// The slots that are held.
#[derive(Debug, Default)]
pub struct Slots {
    held: Mutex<HashMap<String, PathBuf>>,
}

impl Slots {
    /// Takes the slot of a canonical directory for a turn. A turn that holds it already holds it still.
    ///
    /// # Errors
    /// [`Error::WorkspaceBusy`] names the holder.
    pub fn take(&self, turn_id: &str, directory: &Path) -> Result<(), Error> {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        let conflict = held.iter().find(|(holder, path)| {
            holder.as_str() != turn_id && (path.starts_with(directory) || directory.starts_with(path))
        });
        if let Some((holder, _)) = conflict {
            return Err(Error::WorkspaceBusy { turn_id: holder.clone() });
        }
        held.insert(turn_id.to_owned(), directory.to_owned());
        Ok(())
    }

    /// Frees the slot of a turn.
    pub fn free(&self, turn_id: &str) {
        self.held.lock().unwrap_or_else(PoisonError::into_inner).remove(turn_id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parents_and_children_are_held_and_siblings_are_not() {
        let slots = Slots::default();
        slots.take("trn_1", Path::new("/w/a")).unwrap();
        slots.take("trn_1", Path::new("/w/a")).unwrap();
        for path in ["/w/a", "/w", "/w/a/b"] {
            match slots.take("trn_2", Path::new(path)) {
                Err(Error::WorkspaceBusy { turn_id }) => assert_eq!(turn_id, "trn_1"),
                other => panic!("{path}: {other:?}"),
            }
        }
        slots.take("trn_2", Path::new("/w/ab")).unwrap();
        slots.free("trn_1");
        slots.take("trn_3", Path::new("/w/a/b")).unwrap();
    }
}
