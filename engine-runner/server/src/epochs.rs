//! The highest epoch seen per conversation. On disk before any effect of it.

use std::{
    collections::BTreeMap,
    fs, io,
    path::PathBuf,
    sync::{Mutex, PoisonError},
};

use crate::{error::Error, ids, state_dir::replace};

/// The persisted epochs.
#[derive(Debug)]
pub struct Epochs {
    directory: PathBuf,
    highest: Mutex<BTreeMap<String, u64>>,
}

impl Epochs {
    /// Reads all of them. A file that holds no number is refused: to forget an epoch would let a stale owner act.
    ///
    /// # Errors
    /// [`Error::Storage`].
    pub fn open(directory: PathBuf) -> Result<Self, Error> {
        let mut highest = BTreeMap::new();
        for entry in fs::read_dir(&directory).map_err(Error::storage("read the epochs"))? {
            let entry = entry.map_err(Error::storage("read the epochs"))?;
            let Ok(conversation) = entry.file_name().into_string() else { continue };
            if !ids::is_valid(&conversation) {
                continue;
            }
            let text = fs::read_to_string(entry.path()).map_err(Error::storage("read an epoch"))?;
            let epoch = text.trim().parse::<u64>().map_err(|_| Error::Storage {
                action: "read an epoch",
                source: io::Error::other(format!("{} holds no number", entry.path().display())),
            })?;
            highest.insert(conversation, epoch);
        }
        Ok(Self { directory, highest: Mutex::new(highest) })
    }

    /// The highest epoch of a conversation; 0 when none was seen.
    #[must_use]
    pub fn highest(&self, conversation: &str) -> u64 {
        let highest = self.highest.lock().unwrap_or_else(PoisonError::into_inner);
        highest.get(conversation).copied().unwrap_or(0)
    }

    /// All of them.
    #[must_use]
    pub fn all(&self) -> BTreeMap<String, u64> {
        self.highest.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Refuses a lower epoch; persists a higher one. Answers whether it was higher.
    ///
    /// # Errors
    /// [`Error::StaleEpoch`]; [`Error::Storage`] when a higher one could not be persisted (it then does not count).
    pub fn admit(&self, conversation: &str, epoch: u64) -> Result<bool, Error> {
        let mut highest = self.highest.lock().unwrap_or_else(PoisonError::into_inner);
        let known = highest.get(conversation).copied().unwrap_or(0);
        if epoch < known {
            return Err(Error::StaleEpoch {
                conversation: conversation.to_owned(),
                given: epoch,
                highest: known,
                unacknowledged: Vec::new(),
            });
        }
        if epoch == known {
            return Ok(false);
        }
        replace(&self.directory.join(conversation), epoch.to_string().as_bytes())
            .map_err(Error::storage("persist an epoch"))?;
        highest.insert(conversation.to_owned(), epoch);
        Ok(true)
    }

    /// Refuses a lower epoch and changes nothing.
    ///
    /// # Errors
    /// [`Error::StaleEpoch`].
    pub fn check(&self, conversation: &str, epoch: u64) -> Result<(), Error> {
        let highest = self.highest(conversation);
        if epoch < highest {
            return Err(Error::StaleEpoch {
                conversation: conversation.to_owned(),
                given: epoch,
                highest,
                unacknowledged: Vec::new(),
            });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn s48_lower_is_refused_also_after_a_restart() {
        let directory = tempfile::tempdir().unwrap();
        let epochs = Epochs::open(directory.path().to_owned()).unwrap();
        assert!(epochs.admit("cnv_1", 3).unwrap());
        assert!(!epochs.admit("cnv_1", 3).unwrap());
        assert!(epochs.admit("cnv_2", 1).unwrap());
        drop(epochs);
        let epochs = Epochs::open(directory.path().to_owned()).unwrap();
        assert!(matches!(epochs.admit("cnv_1", 2), Err(Error::StaleEpoch { highest: 3, given: 2, .. })));
        assert!(epochs.check("cnv_1", 3).is_ok());
        assert_eq!(epochs.highest("cnv_2"), 1);
    }
}
