//! The highest epoch seen per conversation. On disk before any effect of it.
//!
//! A file has two places for a record of a fixed size. A new epoch is written over the lower one and synced, which moves
//! nothing else on the disk: neither the file's size nor a name. A write that the host tears spoils the lower record
//! alone, and its epoch was not admitted yet. Files of an older version hold a number as text.
//!
//! A file's time is when its epoch was seen first, and each turn has a new one. An epoch is forgotten when its
//! conversation has not been used for longer than anything that could still act under an older one is remembered: the
//! control plane has them all.

use std::{
    collections::{BTreeMap, HashSet},
    fs, io,
    os::unix::fs::FileExt as _,
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, SystemTime},
};

use crate::{error::Error, ids, state_dir::replace};

/// What a record begins with: a name and the form's version.
const MAGIC: &[u8; 8] = b"RHEPO\0\0\x01";

/// Bytes of a record: the magic, the epoch, and the checksum of both.
const RECORD: usize = 8 + 8 + 4;

/// Bytes from one place to the other: no disk writes larger pieces in one go.
const PLACE: usize = 4096;

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
    /// Where its file has it.
    place: Place,
}

/// Where in its file an epoch stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    /// As text, in the form of an older version.
    Text,
    /// In the first or in the second place.
    Record(usize),
}

fn encode(epoch: u64) -> [u8; RECORD] {
    let mut record = [0; RECORD];
    record[..8].copy_from_slice(MAGIC);
    record[8..16].copy_from_slice(&epoch.to_le_bytes());
    let checksum = crc32fast::hash(&record[..16]);
    record[16..].copy_from_slice(&checksum.to_le_bytes());
    record
}

fn decode(record: &[u8]) -> Option<u64> {
    let (body, checksum) = record.get(..RECORD)?.split_at(16);
    let epoch = body.strip_prefix(MAGIC)?.try_into().map(u64::from_le_bytes).ok()?;
    (crc32fast::hash(body).to_le_bytes() == checksum).then_some(epoch)
}

/// What a file holds; none when that is no epoch.
fn read(bytes: &[u8]) -> Option<(u64, Place)> {
    let records = (0..2).filter_map(|place| {
        let record = bytes.get(place * PLACE..)?;
        decode(record).map(|epoch| (epoch, Place::Record(place)))
    });
    let text = || str::from_utf8(bytes).ok()?.trim().parse().ok().map(|epoch| (epoch, Place::Text));
    records.max_by_key(|(epoch, _)| *epoch).or_else(text)
}

/// Puts a higher epoch on disk; answers where.
fn write(path: &Path, epoch: u64, known: Option<Place>) -> io::Result<Place> {
    let record = encode(epoch);
    let Some(Place::Record(place)) = known else {
        let mut bytes = vec![0; 2 * PLACE];
        bytes[..RECORD].copy_from_slice(&record);
        replace(path, &bytes)?;
        return Ok(Place::Record(0));
    };
    let other = 1 - place;
    let file = fs::File::options().write(true).open(path)?;
    file.write_all_at(&record, (other * PLACE) as u64)?;
    file.sync_data()?;
    Ok(Place::Record(other))
}

impl Seen {
    /// A clock that was set back makes everything new rather than old.
    fn age(&self) -> Duration {
        self.at.elapsed().unwrap_or_default()
    }
}

impl Epochs {
    /// Reads all of them. A file that holds none is refused: to forget an epoch would let a stale owner act.
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
            let bytes = fs::read(entry.path()).map_err(Error::storage("read an epoch"))?;
            let (epoch, place) = read(&bytes).ok_or_else(|| Error::Storage {
                action: "read an epoch",
                source: io::Error::other(format!("{} holds no epoch", entry.path().display())),
            })?;
            let at = entry.metadata().and_then(|metadata| metadata.modified());
            let at = at.map_err(Error::storage("read an epoch"))?;
            highest.insert(conversation, Seen { epoch, at, place });
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
        let seen = highest.get(conversation).copied();
        let known = seen.map_or(0, |seen| seen.epoch);
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
        let path = self.directory.join(conversation);
        let place =
            write(&path, epoch, seen.map(|seen| seen.place)).map_err(Error::storage("persist an epoch"))?;
        highest.insert(conversation.to_owned(), Seen { epoch, at: SystemTime::now(), place });
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
    fn s48_a_torn_write_leaves_the_epoch_before_it() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("cnv_1");
        let epochs = Epochs::open(directory.path().to_owned()).unwrap();
        for epoch in [3, 4, 7] {
            epochs.admit("cnv_1", epoch).unwrap();
        }
        let whole = fs::read(&path).unwrap();
        assert_eq!(read(&whole), Some((7, Place::Record(0))));
        epochs.admit("cnv_1", 9).unwrap();
        let after = fs::read(&path).unwrap();
        assert_eq!(after.len(), whole.len(), "written in place");
        // Any part of the new record may have reached the disk.
        for torn in 0..RECORD {
            let mut bytes = whole.clone();
            bytes[PLACE..PLACE + torn].copy_from_slice(&after[PLACE..PLACE + torn]);
            fs::write(&path, &bytes).unwrap();
            let highest = Epochs::open(directory.path().to_owned()).unwrap().highest("cnv_1");
            assert!(highest == 7 || (highest == 9 && bytes == after), "{highest} with {torn} bytes");
        }
        // The spoilt place is the one that is written next.
        let epochs = Epochs::open(directory.path().to_owned()).unwrap();
        epochs.admit("cnv_1", 12).unwrap();
        drop(epochs);
        assert_eq!(Epochs::open(directory.path().to_owned()).unwrap().highest("cnv_1"), 12);
        // With both spoilt nobody knows: that is refused, as a stale owner could act.
        fs::write(&path, vec![0; 2 * PLACE]).unwrap();
        assert!(matches!(Epochs::open(directory.path().to_owned()), Err(Error::Storage { .. })));
    }

    #[test]
    fn a_file_of_an_older_version_is_read_and_written_anew() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("cnv_1");
        fs::write(&path, "41").unwrap();
        let epochs = Epochs::open(directory.path().to_owned()).unwrap();
        assert!(matches!(epochs.admit("cnv_1", 40), Err(Error::StaleEpoch { highest: 41, .. })));
        assert!(epochs.admit("cnv_1", 42).unwrap());
        assert_eq!(read(&fs::read(&path).unwrap()), Some((42, Place::Record(0))));
        assert_eq!(Epochs::open(directory.path().to_owned()).unwrap().highest("cnv_1"), 42);
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
