//! The highest epoch seen per conversation. On disk before any effect of it.
//!
//! A file's time is when its epoch was seen first, and each turn has a new one. An epoch is forgotten when its
//! conversation has not been used for longer than anything that could still act under an older one is remembered: the
//! control plane has them all.

use std::{
    collections::{BTreeMap, HashSet},
    fs, io,
    path::PathBuf,
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, SystemTime},
};

use crate::{error::Error, ids, state_dir::replace};

/// How long the epoch of an unused conversation is kept, and told at registrations: longer than any tombstone, so that
/// nothing is left of what an older epoch could name.
pub(crate) const KEPT: Duration = Duration::from_secs(31 * 24 * 3600);

/// The persisted epochs.
#[derive(Debug)]
pub struct Epochs {
    directory: PathBuf,
    highest: Mutex<BTreeMap<String, Seen>>,
}

/// An epoch, and when it was seen first.
#[derive(Debug, Clone, Copy)]
struct Seen {
    epoch: u64,
    at: SystemTime,
}

impl Seen {
    /// A clock that was set back makes everything new rather than old.
    fn age(&self) -> Duration {
        self.at.elapsed().unwrap_or_default()
    }
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
            let at = entry.metadata().and_then(|metadata| metadata.modified());
            highest.insert(conversation, Seen { epoch, at: at.map_err(Error::storage("read an epoch"))? });
        }
        Ok(Self { directory, highest: Mutex::new(highest) })
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Seen>> {
        self.highest.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The highest epoch of a conversation; 0 when none was seen.
    #[must_use]
    pub fn highest(&self, conversation: &str) -> u64 {
        self.lock().get(conversation).map_or(0, |seen| seen.epoch)
    }

    /// Those of the conversations in `held`, and of those that were used within `time`; the newest ones when there are
    /// more than `limit`.
    #[must_use]
    pub fn recent(&self, held: &HashSet<String>, time: Duration, limit: usize) -> BTreeMap<String, u64> {
        let highest = self.lock();
        let mut recent: Vec<_> = highest
            .iter()
            .map(|(conversation, seen)| (!held.contains(conversation), seen.age(), conversation, seen.epoch))
            .filter(|(free, age, ..)| !free || *age <= time)
            .collect();
        recent.sort_unstable();
        recent
            .into_iter()
            .take(limit)
            .map(|(_, _, conversation, epoch)| (conversation.clone(), epoch))
            .collect()
    }

    /// Forgets those of conversations that are not in `held` and were not used for longer than `time`. Answers how many.
    ///
    /// # Errors
    /// [`Error::Storage`]; what was forgotten before stays so.
    pub fn forget(&self, held: &HashSet<String>, time: Duration) -> Result<usize, Error> {
        let mut highest = self.lock();
        let old: Vec<String> = highest
            .iter()
            .filter(|(conversation, seen)| seen.age() > time && !held.contains(*conversation))
            .map(|(conversation, _)| conversation.clone())
            .collect();
        for conversation in &old {
            match fs::remove_file(self.directory.join(conversation)) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(Error::storage("forget an epoch")(error)),
            }
            highest.remove(conversation);
        }
        Ok(old.len())
    }

    /// Refuses a lower epoch; persists a higher one. Answers whether it was higher.
    ///
    /// # Errors
    /// [`Error::StaleEpoch`]; [`Error::Storage`] when a higher one could not be persisted (it then does not count).
    pub fn admit(&self, conversation: &str, epoch: u64) -> Result<bool, Error> {
        let mut highest = self.lock();
        let known = highest.get(conversation).map_or(0, |seen| seen.epoch);
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
        highest.insert(conversation.to_owned(), Seen { epoch, at: SystemTime::now() });
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

    #[test]
    fn only_epochs_in_use_are_told_and_old_ones_are_forgotten() {
        const DAY: Duration = Duration::from_secs(24 * 3600);
        let directory = tempfile::tempdir().unwrap();
        let epochs = Epochs::open(directory.path().to_owned()).unwrap();
        for (conversation, epoch, days) in [("cnv_new", 3, 0), ("cnv_old", 5, 40), ("cnv_held", 7, 400)] {
            epochs.admit(conversation, epoch).unwrap();
            let file = fs::File::options().write(true).open(directory.path().join(conversation)).unwrap();
            file.set_modified(SystemTime::now() - DAY * days).unwrap();
        }
        let epochs = Epochs::open(directory.path().to_owned()).unwrap();
        let held = HashSet::from(["cnv_held".to_owned()]);
        let told = |limit| Vec::from_iter(epochs.recent(&held, DAY * 30, limit));
        assert_eq!(told(9), [("cnv_held".to_owned(), 7), ("cnv_new".to_owned(), 3)]);
        assert_eq!(told(1), [("cnv_held".to_owned(), 7)], "what is held goes first");
        assert_eq!(epochs.forget(&held, DAY * 50).unwrap(), 0);
        assert_eq!(epochs.forget(&held, DAY * 30).unwrap(), 1);
        assert_eq!((epochs.highest("cnv_old"), epochs.highest("cnv_held")), (0, 7));
        let epochs = Epochs::open(directory.path().to_owned()).unwrap();
        assert_eq!((epochs.highest("cnv_old"), epochs.highest("cnv_new")), (0, 3));
        // A conversation that is used again is new.
        epochs.admit("cnv_old", 6).unwrap();
        assert_eq!(epochs.forget(&HashSet::new(), DAY * 30).unwrap(), 1, "the one that is no longer held");
        assert_eq!(epochs.highest("cnv_old"), 6);
    }
}
