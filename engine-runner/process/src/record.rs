//! Append-only files of checked records: the framing under spool and journal.
//!
//! A file is [`MAGIC`] followed by records: `u32` length, `u32` CRC-32 over the length's bytes and the payload, then the
//! payload. Zeros are never a valid record, so preallocated room reads as the end. What was cut off in the middle of a
//! write (a torn tail) fails its checksum or is short: a reader stops before it, and [`RecordWriter::recover`] cuts it
//! off. That is never an error. A reader cannot tell a torn tail from a record that is still being written; it answers
//! "nothing yet" to both, so it can follow a live file.

use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, fallocate};
use std::fs::{File, OpenOptions};
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::Path;

/// The first bytes of every file: a name and the framing's version.
pub const MAGIC: &[u8; 8] = b"RHREC\0\0\x01";

/// The longest payload, in bytes. A longer length is taken for damage.
pub const RECORD_MAX_BYTES: usize = 80 * 1024 * 1024;

const HEADER: usize = 8;

/// Why a file cannot be used as a record file.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// The system refused.
    #[error("failed to {action} a record file")]
    Io {
        /// What was tried.
        action: &'static str,
        /// The system's answer.
        #[source]
        source: io::Error,
    },
    /// The file does not begin with [`MAGIC`].
    #[error("not a record file")]
    NotRecords,
    /// The framing's version is newer than this code.
    #[error("record file of version {0} is newer than this program")]
    Newer(u8),
    /// A payload over [`RECORD_MAX_BYTES`], or an empty one.
    #[error("record of {0} bytes cannot be written")]
    Length(usize),
}

impl RecordError {
    pub(crate) fn io(action: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { action, source }
    }

    /// The system's error number, where one is at the root.
    #[must_use]
    pub fn errno(&self) -> Option<i32> {
        match self {
            Self::Io { source, .. } => source.raw_os_error(),
            Self::NotRecords | Self::Newer(_) | Self::Length(_) => None,
        }
    }
}

/// What the beginning of some bytes is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decoded {
    /// A whole record: its payload lies at 8 up to `end`, the next record begins at `end`.
    Record {
        /// Offset after the record.
        end: usize,
    },
    /// The bytes end inside the record. `needed` bytes tell more (its header, or all of it).
    Incomplete {
        /// How many bytes from the record's start are needed.
        needed: usize,
    },
    /// No record begins here: damage, preallocated room, or a write under way.
    Invalid,
}

/// Appends one record to `out`.
///
/// # Errors
/// [`RecordError::Length`] for an empty payload or one over [`RECORD_MAX_BYTES`].
pub fn encode_into(out: &mut Vec<u8>, payload: &[u8]) -> Result<(), RecordError> {
    if payload.is_empty() || payload.len() > RECORD_MAX_BYTES {
        return Err(RecordError::Length(payload.len()));
    }
    let length = u32::try_from(payload.len()).map_err(|_| RecordError::Length(payload.len()))?.to_le_bytes();
    out.reserve(HEADER + payload.len());
    out.extend_from_slice(&length);
    out.extend_from_slice(&checksum(length, payload).to_le_bytes());
    out.extend_from_slice(payload);
    Ok(())
}

/// Looks at the record that `bytes` begins with.
#[must_use]
pub fn decode(bytes: &[u8]) -> Decoded {
    let Some((length, rest)) = bytes.split_first_chunk::<4>() else {
        return Decoded::Incomplete { needed: HEADER };
    };
    let Some((crc, rest)) = rest.split_first_chunk::<4>() else {
        return Decoded::Incomplete { needed: HEADER };
    };
    let size = usize::try_from(u32::from_le_bytes(*length)).unwrap_or(usize::MAX);
    if size == 0 || size > RECORD_MAX_BYTES {
        return Decoded::Invalid;
    }
    let Some(payload) = rest.get(..size) else { return Decoded::Incomplete { needed: HEADER + size } };
    if checksum(*length, payload) == u32::from_le_bytes(*crc) {
        Decoded::Record { end: HEADER + size }
    } else {
        Decoded::Invalid
    }
}

fn checksum(length: [u8; 4], payload: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&length);
    hasher.update(payload);
    hasher.finalize()
}

/// What [`RecordWriter::recover`] found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Recovered {
    /// The whole records, in order.
    pub payloads: Vec<Vec<u8>>,
    /// Bytes of a torn tail that were cut off.
    pub cut: u64,
}

/// Appends records to a file.
#[derive(Debug)]
pub struct RecordWriter {
    file: File,
    length: u64,
    buffer: Vec<u8>,
}

impl RecordWriter {
    /// Creates a new file, readable and writable by its owner only. Neither it nor its directory entry is synced yet:
    /// see [`RecordWriter::sync`] and [`sync_dir`].
    ///
    /// # Errors
    /// [`RecordError::Io`], also when the file is there already.
    pub fn create(path: &Path) -> Result<Self, RecordError> {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(path)
            .map_err(RecordError::io("create"))?;
        Self::begin(file)
    }

    fn begin(mut file: File) -> Result<Self, RecordError> {
        file.set_len(0).map_err(RecordError::io("begin"))?;
        file.seek(SeekFrom::Start(0)).map_err(RecordError::io("begin"))?;
        file.write_all(MAGIC).map_err(RecordError::io("begin"))?;
        Ok(Self { file, length: MAGIC.len() as u64, buffer: Vec::new() })
    }

    /// Opens a file (creates it when it is missing), reads its records, and cuts off a torn tail so that appending goes
    /// on after the last whole one. A tail of zeros stays: it is room that was kept. Only one writer may have the file open: the caller's lock sees to that.
    ///
    /// # Errors
    /// [`RecordError`] when the system refuses or the file is no record file. Damage is not an error.
    pub fn recover(path: &Path) -> Result<(Self, Recovered), RecordError> {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(path)
            .map_err(RecordError::io("open"))?;
        let total = file.metadata().map_err(RecordError::io("open"))?.len();
        if total < MAGIC.len() as u64 {
            // Torn as it was created: nothing can have been appended.
            return Ok((Self::begin(file)?, Recovered { payloads: Vec::new(), cut: total }));
        }
        let mut reader = RecordReader::new(file)?;
        let mut payloads = Vec::new();
        while let Some(record) = reader.next_record()? {
            payloads.push(record.payload);
        }
        let length = reader.offset();
        let mut file = reader.file;
        let mut cut = 0;
        // Zeros are room that was kept, with its blocks.
        if !is_zero(&file, length, total)? {
            cut = total - length;
            file.set_len(length).map_err(RecordError::io("cut"))?;
            file.sync_data().map_err(RecordError::io("sync"))?;
        }
        file.seek(SeekFrom::Start(length)).map_err(RecordError::io("open"))?;
        Ok((Self { file, length, buffer: Vec::new() }, Recovered { payloads, cut }))
    }

    /// Appends one record; answers the offset at which it begins. It is not on disk before [`RecordWriter::sync`].
    ///
    /// # Errors
    /// [`RecordError`]. After a refused write the file is cut back to its last whole record.
    pub fn append(&mut self, payload: &[u8]) -> Result<u64, RecordError> {
        self.append_all(std::iter::once(payload))
    }

    /// Appends several records with one write; answers the offset of the first. A crash may keep a part of them.
    ///
    /// # Errors
    /// As [`RecordWriter::append`]; then none is appended.
    pub fn append_all<'a>(
        &mut self,
        payloads: impl IntoIterator<Item = &'a [u8]>,
    ) -> Result<u64, RecordError> {
        self.buffer.clear();
        for payload in payloads {
            encode_into(&mut self.buffer, payload)?;
        }
        let start = self.length;
        let result = self.file.write_all(&self.buffer);
        let written = self.buffer.len() as u64;
        if self.buffer.capacity() > 256 * 1024 {
            self.buffer = Vec::new();
        }
        if let Err(source) = result {
            // Both may fail on a broken disk; a tail that stays is cut off by whoever reads it.
            let _ = self.file.set_len(start);
            let _ = self.file.seek(SeekFrom::Start(start));
            return Err(RecordError::Io { action: "append to", source });
        }
        self.length += written;
        Ok(start)
    }

    /// Puts everything appended so far on disk (fdatasync).
    ///
    /// # Errors
    /// [`RecordError::Io`]: the data may be lost, and a later sync does not tell about it again.
    pub fn sync(&mut self) -> Result<(), RecordError> {
        self.file.sync_data().map_err(RecordError::io("sync"))
    }

    /// The file's length in bytes: the offset of the next record.
    #[must_use]
    pub fn length(&self) -> u64 {
        self.length
    }

    /// Fills the file with zeros up to `size` bytes, behind its records. Once they are on disk, records that come to lie
    /// there change no metadata, so that syncing them waits for no journal of the file system. To a reader they are the
    /// end.
    ///
    /// # Errors
    /// [`RecordError::Io`]; the file may be filled in part.
    pub fn fill(&mut self, size: u64) -> Result<(), RecordError> {
        const ZEROS: [u8; 4096] = [0; 4096];
        let mut at = self.length;
        while at < size {
            let piece = usize::try_from(size - at).unwrap_or(usize::MAX).min(ZEROS.len());
            self.file.write_all_at(&ZEROS[..piece], at).map_err(RecordError::io("fill"))?;
            at += piece as u64;
        }
        Ok(())
    }

    /// Reserves the blocks from one offset to another without changing the file's length; false where the file system
    /// cannot.
    ///
    /// # Errors
    /// [`RecordError::Io`], with no space left or over a limit: then nothing is reserved.
    pub fn allocate(&self, from: u64, to: u64) -> Result<bool, RecordError> {
        if to <= from {
            return Ok(true);
        }
        let too_large = || RecordError::io("reserve room in")(Errno::EFBIG.into());
        let length = i64::try_from(to - from).map_err(|_| too_large())?;
        let from = i64::try_from(from).map_err(|_| too_large())?;
        loop {
            match fallocate(&self.file, FallocateFlags::FALLOC_FL_KEEP_SIZE, from, length) {
                Ok(()) => return Ok(true),
                Err(Errno::EINTR) => {}
                Err(Errno::EOPNOTSUPP | Errno::ENOSYS | Errno::EINVAL | Errno::ENODEV) => return Ok(false),
                Err(errno) => return Err(RecordError::io("reserve room in")(errno.into())),
            }
        }
    }

    pub(crate) fn file(&self) -> &File {
        &self.file
    }
}

/// Whether a file holds nothing but zeros between two offsets.
fn is_zero(file: &File, mut from: u64, to: u64) -> Result<bool, RecordError> {
    let mut buffer = [0; 4096];
    while from < to {
        let piece = usize::try_from(to - from).unwrap_or(usize::MAX).min(buffer.len());
        file.read_exact_at(&mut buffer[..piece], from).map_err(RecordError::io("read"))?;
        if buffer[..piece].iter().any(|byte| *byte != 0) {
            return Ok(false);
        }
        from += piece as u64;
    }
    Ok(true)
}

/// Puts a directory's entries on disk.
///
/// # Errors
/// [`RecordError::Io`].
pub fn sync_dir(path: &Path) -> Result<(), RecordError> {
    File::open(path).and_then(|dir| dir.sync_all()).map_err(RecordError::io("sync the directory of"))
}

/// One record read from a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// Where it begins.
    pub offset: u64,
    /// What it holds.
    pub payload: Vec<u8>,
}

/// Reads records from a file, also from one that grows.
#[derive(Debug)]
pub struct RecordReader {
    file: File,
    /// Offset of the next record.
    offset: u64,
    /// Bytes of the file from `offset - start` on.
    buffer: Vec<u8>,
    start: usize,
}

impl RecordReader {
    /// Opens a file for reading.
    ///
    /// # Errors
    /// [`RecordError::Io`]; [`RecordError::NotRecords`] also while the file is shorter than its magic.
    pub fn open(path: &Path) -> Result<Self, RecordError> {
        Self::new(File::open(path).map_err(RecordError::io("open"))?)
    }

    fn new(mut file: File) -> Result<Self, RecordError> {
        let mut magic = [0; MAGIC.len()];
        file.seek(SeekFrom::Start(0)).map_err(RecordError::io("read"))?;
        match file.read_exact(&mut magic) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                return Err(RecordError::NotRecords);
            }
            result => result.map_err(RecordError::io("read"))?,
        }
        let (name, version) = magic.split_at(MAGIC.len() - 1);
        if name != &MAGIC[..MAGIC.len() - 1] || version == [0] {
            return Err(RecordError::NotRecords);
        }
        if version[0] > MAGIC[MAGIC.len() - 1] {
            return Err(RecordError::Newer(version[0]));
        }
        Ok(Self { file, offset: MAGIC.len() as u64, buffer: Vec::new(), start: 0 })
    }

    /// Offset of the next record.
    #[must_use]
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Goes to a record's offset, as told earlier by [`Record::offset`] or [`RecordReader::offset`].
    pub fn seek(&mut self, offset: u64) {
        self.offset = offset.max(MAGIC.len() as u64);
        self.buffer.clear();
        self.start = 0;
    }

    /// The next record; none when no whole valid record follows (yet). Asking again looks at the file again.
    ///
    /// # Errors
    /// [`RecordError::Io`].
    pub fn next_record(&mut self) -> Result<Option<Record>, RecordError> {
        let mut fresh = false;
        loop {
            let needed = match decode(&self.buffer[self.start..]) {
                Decoded::Record { end } => {
                    let payload = self.buffer[self.start + HEADER..self.start + end].to_vec();
                    let offset = self.offset;
                    self.offset += end as u64;
                    self.start += end;
                    return Ok(Some(Record { offset, payload }));
                }
                Decoded::Incomplete { needed } => needed,
                // What was buffered may be older than the file: a write may have been under way.
                Decoded::Invalid => HEADER,
            };
            if fresh {
                return Ok(None);
            }
            if !self.fill(needed)? {
                return Ok(None);
            }
            // A second look is fresh only if it had all that the first asked for; a header asks for its payload next.
            fresh = matches!(decode(&self.buffer[self.start..]), Decoded::Invalid);
        }
    }

    /// Reads anew from the file, at least `needed` bytes from the record's start; false when there are fewer.
    fn fill(&mut self, needed: usize) -> Result<bool, RecordError> {
        const CHUNK: usize = 64 * 1024;
        self.start = 0;
        // The file's length bounds the memory that a length field can ask for.
        let total = self.file.metadata().map_err(RecordError::io("read"))?.len();
        let there = usize::try_from(total.saturating_sub(self.offset)).unwrap_or(usize::MAX);
        if there < needed {
            self.buffer.clear();
            return Ok(false);
        }
        self.buffer.resize(needed.max(CHUNK).min(there), 0);
        let mut have = 0;
        while have < self.buffer.len() {
            match self.file.read_at(&mut self.buffer[have..], self.offset + have as u64) {
                Ok(0) => break,
                Ok(count) => have += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(source) => {
                    self.buffer.clear();
                    return Err(RecordError::Io { action: "read", source });
                }
            }
        }
        self.buffer.truncate(have);
        if self.buffer.capacity() > 4 * CHUNK && have <= CHUNK {
            self.buffer.shrink_to(CHUNK);
        }
        Ok(have >= needed)
    }
}
