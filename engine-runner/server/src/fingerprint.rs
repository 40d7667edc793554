//! The fingerprint of a session's append-only file, taken at the end of each turn without reading the file anew each
//! time: what was hashed at the end of the turn before is carried on.
//!
//! Before a resume the whole file is hashed and compared. A file that was damaged since shows there, as what was carried
//! on is of the undamaged one. A file that its engine replaced or rewrote is hashed from its start: it is another file,
//! or shorter, or differs in the last bytes that were hashed.

use std::{
    fs::File,
    io,
    os::unix::fs::{FileExt as _, MetadataExt as _},
    path::Path,
};

use roundhouse_engines::Fingerprint;
use sha2::{Digest as _, Sha256};

use crate::workspace::open_regular;

/// Bytes compared to see whether the file is still the one that was hashed.
const TAIL: usize = 4096;

/// Bytes read at a time.
const CHUNK: usize = 64 * 1024;

/// How far a file was hashed.
#[derive(Clone)]
pub struct Hashed {
    file: String,
    /// Device and inode.
    identity: (u64, u64),
    length: u64,
    state: Sha256,
    tail: Vec<u8>,
}

impl std::fmt::Debug for Hashed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Hashed")
            .field("file", &self.file)
            .field("length", &self.length)
            .finish_non_exhaustive()
    }
}

impl Hashed {
    fn continues(&self, name: &str, identity: (u64, u64), file: &File, length: u64) -> bool {
        if self.file != name || self.identity != identity || length < self.length {
            return false;
        }
        let mut tail = vec![0; self.tail.len()];
        file.read_exact_at(&mut tail, self.length - self.tail.len() as u64).is_ok() && tail == self.tail
    }

    /// What is hashed so far.
    #[must_use]
    pub(crate) fn print(&self) -> Fingerprint {
        let sha256 = self.state.clone().finalize().iter().map(|byte| format!("{byte:02x}")).collect();
        Fingerprint { file: self.file.clone(), length: self.length, sha256 }
    }
}

/// Hashes the file `name` in `home` as it is now, going on from an earlier time where that is the same file. Blocking.
///
/// # Errors
/// The system's answer.
pub(crate) fn hash(home: &Path, name: &str, earlier: Option<Hashed>) -> io::Result<Hashed> {
    let file = open_regular(&home.join(name))?;
    let metadata = file.metadata()?;
    let (identity, length) = ((metadata.dev(), metadata.ino()), metadata.len());
    let mut hashed =
        earlier.filter(|earlier| earlier.continues(name, identity, &file, length)).unwrap_or_else(|| {
            Hashed { file: name.to_owned(), identity, length: 0, state: Sha256::new(), tail: Vec::new() }
        });
    let mut buffer = vec![0; CHUNK.min(usize::try_from(length - hashed.length).unwrap_or(CHUNK))];
    while hashed.length < length {
        let wanted = buffer.len().min(usize::try_from(length - hashed.length).unwrap_or(CHUNK));
        let count = match file.read_at(&mut buffer[..wanted], hashed.length) {
            // It became shorter meanwhile.
            Ok(0) => break,
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        hashed.state.update(&buffer[..count]);
        hashed.length += count as u64;
        hashed.tail.extend_from_slice(&buffer[..count]);
        let surplus = hashed.tail.len().saturating_sub(TAIL);
        hashed.tail.drain(..surplus);
    }
    Ok(hashed)
}

#[cfg(test)]
mod tests {
    use std::{fs, io::Write as _};

    use super::*;

    fn whole(path: &Path) -> String {
        Sha256::digest(fs::read(path).unwrap()).iter().map(|byte| format!("{byte:02x}")).collect()
    }

    #[test]
    fn s15_what_is_carried_on_is_the_hash_of_the_whole_file() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("a.jsonl");
        let mut hashed = None;
        let mut file = File::create(&path).unwrap();
        for piece in [0, 1, 100, 3 * CHUNK, TAIL, 7] {
            file.write_all(&vec![b'x'; piece]).unwrap();
            hashed = Some(hash(home.path(), "a.jsonl", hashed).unwrap());
            let print = hashed.as_ref().unwrap().print();
            assert_eq!(print.sha256, whole(&path), "{piece}");
            assert_eq!(print.length, fs::metadata(&path).unwrap().len());
        }
    }

    #[test]
    fn s15_damage_between_two_turns_is_not_taken_for_the_file_as_it_was() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("a.jsonl");
        fs::write(&path, vec![b'a'; 3 * TAIL]).unwrap();
        let first = hash(home.path(), "a.jsonl", None).unwrap();
        // A row in the middle was spoilt while the engine idled.
        let mut bytes = fs::read(&path).unwrap();
        bytes[10] = b'!';
        bytes.extend_from_slice(b"the next turn");
        let file = File::options().write(true).open(&path).unwrap();
        file.write_all_at(&bytes, 0).unwrap();
        let second = hash(home.path(), "a.jsonl", Some(first)).unwrap();
        assert_ne!(second.print().sha256, whole(&path), "the check before the next resume must fail");
    }

    #[test]
    fn a_file_that_its_engine_wrote_anew_is_hashed_from_its_start() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("a.jsonl");
        fs::write(&path, "row one\nrow two\n").unwrap();
        let hashed = || hash(home.path(), "a.jsonl", None).unwrap();
        let (shorter, replaced, rewritten) = (hashed(), hashed(), hashed());
        fs::write(&path, "summary\n").unwrap();
        assert_eq!(hash(home.path(), "a.jsonl", Some(shorter)).unwrap().print().sha256, whole(&path));
        fs::write(&path, "compacted, and longer than before\n").unwrap();
        assert_eq!(hash(home.path(), "a.jsonl", Some(rewritten)).unwrap().print().sha256, whole(&path));
        fs::write(home.path().join("b"), "row one\nrow two\nrow three\n").unwrap();
        fs::rename(home.path().join("b"), &path).unwrap();
        let after = hash(home.path(), "a.jsonl", Some(replaced)).unwrap();
        assert_eq!((after.print().sha256, after.length), (whole(&path), 26));
    }
}
