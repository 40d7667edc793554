//! Journals that are made before there is a turn for them.
//!
//! A turn's message waits until its journal is on disk. A file that was just made is there only with its directory's
//! entries, and its first records make it longer: each of these waits for the file system's journal. So a few journals are
//! made while nothing else is to be done: directories `turns/.spare-*`, each with a file that is filled with zeros and
//! synced. To open a turn is then to rename one and to write over its zeros.
//!
//! The new name is not synced. Should the host forget it, the journal itself says whose it is, and
//! [`Spares::take_up`] names it again before a runner looks for turns.

use std::{
    fs,
    io::{self, Read as _},
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use roundhouse_process::record::{RecordWriter, sync_dir};

use crate::{
    error::{Error, chain},
    ids,
    journal::{Journal, Record, Room},
    state_dir::make_dir,
};

/// Spares kept: what a few conversations open between two rests.
const KEPT: usize = 8;

/// Bytes filled with zeros: what a short turn writes.
const FILL: u64 = 32 * 1024;

/// Pause before spares are made: what follows a turn's end, and a short turn after it, come first, for making them keeps
/// the disk from others.
const PAUSE: Duration = Duration::from_millis(250);

/// What a spare's directory is called; no turn's id begins so.
const PREFIX: &str = ".spare-";

/// A journal without a turn.
#[derive(Debug)]
pub(crate) struct Spare {
    directory: PathBuf,
    pub(crate) writer: RecordWriter,
    pub(crate) room: Room,
}

impl Spare {
    fn make(directory: PathBuf) -> Result<Self, Error> {
        make_dir(&directory).map_err(Error::storage("make a spare journal"))?;
        let mut writer = RecordWriter::create(&directory.join("journal"))?;
        let mut room = Room::default();
        room.keep(&writer, FILL)?;
        writer.fill(FILL)?;
        writer.sync()?;
        sync_dir(&directory)?;
        Ok(Self { directory, writer, room })
    }

    /// Gives it its place; false when that is taken.
    pub(crate) fn name(&self, directory: &Path) -> bool {
        fs::rename(&self.directory, directory).is_ok()
    }

    /// It is of no use after all.
    pub(crate) fn discard(self) {
        let _ = fs::remove_dir_all(&self.directory);
    }
}

/// The journals that are ready.
#[derive(Debug)]
pub struct Spares {
    turns: PathBuf,
    ready: Mutex<Vec<Spare>>,
    filling: AtomicBool,
    next: AtomicU64,
}

impl Spares {
    /// None yet.
    #[must_use]
    pub fn new(turns: PathBuf) -> Self {
        Self { turns, ready: Mutex::default(), filling: AtomicBool::new(false), next: AtomicU64::new(0) }
    }

    pub(crate) fn take(&self) -> Option<Spare> {
        self.ready.lock().unwrap_or_else(PoisonError::into_inner).pop()
    }

    fn count(&self) -> usize {
        self.ready.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// Makes what is missing. Blocking. A failure is none of a turn's business: it makes its own journal.
    pub(crate) fn fill(&self) {
        if self.filling.swap(true, Ordering::AcqRel) {
            return;
        }
        let mut made = Vec::new();
        for _ in self.count()..KEPT {
            let number = self.next.fetch_add(1, Ordering::Relaxed);
            let directory = self.turns.join(format!("{PREFIX}{}-{number}", std::process::id()));
            match Spare::make(directory.clone()) {
                Ok(spare) => made.push(spare),
                Err(error) => {
                    tracing::debug!(error = chain(&error), "no spare journal is made");
                    let _ = fs::remove_dir_all(directory);
                    break;
                }
            }
        }
        // Only a spare whose own name is on disk can be found again.
        if !made.is_empty() {
            match sync_dir(&self.turns) {
                Ok(()) => self.ready.lock().unwrap_or_else(PoisonError::into_inner).append(&mut made),
                Err(error) => {
                    tracing::debug!(error = chain(&error), "no spare journal is made");
                    made.into_iter().for_each(Spare::discard);
                }
            }
        }
        self.filling.store(false, Ordering::Release);
    }

    /// As [`Spares::fill`], beside everything else and after a pause, once half of them are taken.
    pub(crate) fn refill(
        self: &Arc<Self>,
        tasks: &tokio_util::task::TaskTracker,
        halt: &tokio_util::sync::CancellationToken,
    ) {
        if self.count() <= KEPT / 2 {
            let (spares, halt) = (Arc::clone(self), halt.clone());
            tasks.spawn(async move {
                if halt.run_until_cancelled(tokio::time::sleep(PAUSE)).await.is_some() {
                    let _ = tokio::task::spawn_blocking(move || spares.fill()).await;
                }
            });
        }
    }

    /// Looks through what an earlier runner left: a spare that holds a turn gets the turn's name, the others go.
    /// Blocking; before anybody looks for turns.
    ///
    /// # Errors
    /// [`Error::Storage`] when a spare cannot be read or named: a turn must not be passed over.
    pub(crate) fn take_up(&self) -> Result<(), Error> {
        let mut named = false;
        for entry in fs::read_dir(&self.turns).map_err(Error::storage("list the turns"))? {
            let entry = entry.map_err(Error::storage("list the turns"))?;
            if !entry.file_name().to_string_lossy().starts_with(PREFIX) {
                continue;
            }
            match turn_of(&entry.path().join("journal"))? {
                Some(turn_id) if !self.turns.join(&turn_id).join("journal").exists() => {
                    tracing::warn!(turn = turn_id, "a turn whose name the host had lost is found again");
                    fs::rename(entry.path(), self.turns.join(&turn_id))
                        .map_err(Error::storage("name a turn again"))?;
                    named = true;
                }
                _ => fs::remove_dir_all(entry.path()).map_err(Error::storage("remove a spare journal"))?,
            }
        }
        if named {
            sync_dir(&self.turns)?;
        }
        Ok(())
    }
}

/// The turn that a journal was opened for; none when it holds no record, or was torn as it was made: a spare is taken
/// only once it is whole on disk.
fn turn_of(journal: &Path) -> Result<Option<String>, Error> {
    let mut start = Vec::new();
    let begun = fs::File::open(journal).and_then(|file| file.take(8).read_to_end(&mut start));
    match begun {
        Ok(count) if count < 8 || start.iter().all(|byte| *byte == 0) => return Ok(None),
        Ok(_) => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(Error::storage("read a spare journal")(error)),
    }
    let records = Journal::read(journal)?;
    let turn_id = records.into_iter().find_map(|record| match record {
        Record::Open(open) => Some(open.turn_id),
        _ => None,
    });
    match turn_id {
        Some(turn_id) if ids::is_valid(&turn_id) => Ok(Some(turn_id)),
        Some(_) => Err(Error::Storage {
            action: "read a spare journal",
            source: io::Error::other("it names a turn that cannot be one"),
        }),
        None => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::journal::{StopCause, TurnOpen};

    fn open(turn_id: &str) -> Record {
        Record::Open(Box::new(TurnOpen {
            turn_id: turn_id.to_owned(),
            conversation_id: "cnv_1".to_owned(),
            epoch: 1,
            workspace: "/w".into(),
            boot_id: String::new(),
            opened_boottime_ns: 0,
            deadline_millis: None,
            idle_millis: 1,
            program: String::new(),
        }))
    }

    #[tokio::test]
    async fn a_turn_gets_a_spare_and_its_records_lie_in_its_room() {
        let root = tempfile::tempdir().unwrap();
        let spares = Spares::new(root.path().to_owned());
        assert!(spares.take().is_none());
        spares.fill();
        spares.fill();
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), KEPT);
        let path = root.path().join("trn_1/journal");
        let records = [open("trn_1"), Record::Stop(StopCause::Cancel)];
        let mut journal = Journal::create(&path, &records, spares.take()).unwrap();
        journal.sync().await.unwrap();
        assert_eq!(fs::metadata(&path).unwrap().len(), FILL);
        assert_eq!(Journal::read(&path).unwrap(), records);
        drop(journal);
        let (journal, found) = Journal::recover(&path).unwrap();
        assert_eq!(found, records);
        drop(journal);
        // A turn of the same name is never overwritten.
        assert!(Journal::create(&path, &records, spares.take()).is_err());
        assert_eq!(Journal::read(&path).unwrap(), records);
    }

    #[test]
    fn a_turn_whose_name_the_host_forgot_is_found_again_and_other_spares_go() {
        let root = tempfile::tempdir().unwrap();
        let spares = Spares::new(root.path().to_owned());
        spares.fill();
        let mut spare = spares.take().unwrap();
        let records = [open("trn_1")];
        spare.writer.append(&records[0].encode().unwrap()).unwrap();
        fs::create_dir(root.path().join(".spare-torn")).unwrap();
        fs::write(root.path().join(".spare-torn/journal"), b"RHR").unwrap();
        fs::create_dir(root.path().join(".spare-zero")).unwrap();
        fs::write(root.path().join(".spare-zero/journal"), vec![0; 4096]).unwrap();
        fs::create_dir(root.path().join(".spare-none")).unwrap();
        drop(spare);
        let later = Spares::new(root.path().to_owned());
        later.take_up().unwrap();
        let left: Vec<_> = fs::read_dir(root.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(left, ["trn_1"]);
        assert_eq!(Journal::read(&root.path().join("trn_1/journal")).unwrap(), records);
        later.take_up().unwrap();
    }

    #[test]
    fn a_spare_that_cannot_be_read_is_not_passed_over() {
        let root = tempfile::tempdir().unwrap();
        let spares = Spares::new(root.path().to_owned());
        spares.fill();
        let spare = spares.take().unwrap();
        fs::write(spare.directory.join("journal"), vec![b'x'; usize::try_from(FILL).unwrap()]).unwrap();
        assert!(spares.take_up().is_err());
    }
}
