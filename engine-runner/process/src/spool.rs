//! Writing a spool: numbered frames in segments, with room kept for the last ones.
//!
//! Blocks are reserved ahead of the file's end, always at least [`RESERVE`] more than ordinary frames may use. When the
//! disk is full an ordinary frame no longer finds its room, the spool turns to [`StorageFault`] for good, and the
//! frames that tell the end still fit. Where the file system cannot reserve, they are written if they can be.
//!
//! A turn begins with a new segment, and its first message waits for that to be on disk. So the file of the next segment
//! is made while the engine idles ([`SpoolWriter::prepare`]): it lies there under the name [`UNSEEN`], filled with zeros
//! and synced with its directory entry. To begin the segment is then to write its header and to rename it, and syncing it
//! changes no metadata. The new name itself is not synced: should the host forget it, the header says which segment the
//! unseen file is, and [`settle`] names it again before a dead keeper's spool is read.

use crate::clock;
use crate::frame::{Frame, FrameBody, SPOOL_VERSION, StorageFault};
use crate::protocol::SpoolEnd;
use crate::record::{RecordError, RecordReader, RecordWriter, sync_dir};
use crate::wire::{Put, Take, WireError};
use nix::errno::Errno;
use std::collections::VecDeque;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Bytes kept free for the frames that tell an end.
const RESERVE: u64 = 64 * 1024;
/// Of those, bytes kept for the very last frames.
const RESERVE_LAST: u64 = 8 * 1024;
/// Bytes reserved at a time beyond that.
const STEP: u64 = 256 * 1024;
/// Bytes of a prepared segment that are filled with zeros: what a short turn writes.
const FILL: u64 = 64 * 1024;

/// What a segment begins with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SegmentHeader {
    /// Version of the frames in it.
    pub version: u16,
    /// The spool's id.
    pub spool_id: String,
    /// The segment's number, from 1.
    pub segment: u32,
    /// Number of its first frame.
    pub first_frame: u64,
    /// The boot in which its frames' times are (32 hex digits, empty when unknown).
    pub boot_id: String,
    /// The turn in which it was begun.
    pub turn_id: Option<String>,
    /// Wall clock at its beginning, milliseconds since 1970, for show.
    pub wall_ms: u64,
}

impl SegmentHeader {
    /// First byte of a header's payload; no frame has this kind.
    const KIND: u8 = 0;

    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut put = Put::default();
        put.u8(Self::KIND).u16(self.version).str(&self.spool_id).u32(self.segment).u64(self.first_frame);
        put.str(&self.boot_id);
        put.option(self.turn_id.as_deref(), |put, turn_id| {
            put.str(turn_id);
        });
        put.u64(self.wall_ms);
        put.0
    }

    /// Reads a segment's first record.
    ///
    /// # Errors
    /// [`WireError`] when it is no header; `Invalid("spool version")` for one that is newer than this code.
    pub fn decode(payload: &[u8]) -> Result<Self, WireError> {
        let mut take = Take::new(payload);
        if take.u8("header")? != Self::KIND {
            return Err(WireError::Invalid("header"));
        }
        let version = take.u16("spool version")?;
        if version == 0 || version > SPOOL_VERSION {
            return Err(WireError::Invalid("spool version"));
        }
        let header = Self {
            version,
            spool_id: take.string("spool id")?,
            segment: take.u32("segment")?,
            first_frame: take.u64("first frame")?,
            boot_id: take.string("boot id")?,
            turn_id: take.option("turn id", |take| take.string("turn id"))?,
            wall_ms: take.u64("wall clock")?,
        };
        take.end()?;
        Ok(header)
    }
}

/// A segment's file name.
pub(crate) fn segment_name(segment: u32) -> String {
    format!("{segment:06}.spool")
}

/// The segments in a directory, in order.
pub(crate) fn segments(dir: &Path) -> io::Result<Vec<u32>> {
    let mut segments = Vec::new();
    for entry in fs::read_dir(dir)? {
        let name = entry?.file_name();
        let number = name.to_str().and_then(|name| name.strip_suffix(".spool"));
        segments.extend(number.and_then(|number| number.parse::<u32>().ok()));
    }
    segments.sort_unstable();
    Ok(segments)
}

/// Deletes a dead keeper's segments before `keep_from`, but never the last one. Answers the oldest that is left, 0 when
/// there is none. A live keeper is asked to do it itself ([`crate::Request::Prune`]).
///
/// # Errors
/// What the system answers.
pub fn prune(dir: &Path, keep_from: u32) -> io::Result<u32> {
    let segments = segments(dir)?;
    let Some(last) = segments.last().copied() else { return Ok(0) };
    let keep_from = keep_from.min(last);
    for segment in segments.iter().filter(|segment| **segment < keep_from) {
        fs::remove_file(dir.join(segment_name(*segment)))?;
    }
    Ok(segments.into_iter().find(|segment| *segment >= keep_from).unwrap_or(last))
}

/// Which part of the reserve a frame may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Room {
    /// None: dropped after a fault.
    Ordinary,
    /// Marks that say what became of something.
    Mark,
    /// All of it: the engine's exit and the spool's end.
    Last,
}

/// Name of a segment that is being begun.
const UNSEEN: &str = "next.new";

/// Names the segment that was begun in a file without its name, if there is one: the host lost the name and kept the
/// file. Only for a dead keeper's directory. Repeatable.
///
/// # Errors
/// [`RecordError::Io`]; then the spool must not be read as if it were whole.
pub fn settle(dir: &Path) -> Result<(), RecordError> {
    let path = dir.join(UNSEEN);
    let first = match RecordReader::open(&path) {
        Ok(mut reader) => reader.next_record()?,
        Err(RecordError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(RecordError::NotRecords | RecordError::Newer(_)) => return Ok(()),
        Err(error) => return Err(error),
    };
    let Some(header) = first.and_then(|record| SegmentHeader::decode(&record.payload).ok()) else {
        // It was prepared and never begun.
        return Ok(());
    };
    let named = dir.join(segment_name(header.segment));
    if named.exists() {
        return Ok(());
    }
    fs::rename(&path, &named).map_err(RecordError::io("name"))?;
    sync_dir(dir)
}

/// The file of a segment that is not begun.
#[derive(Debug)]
struct Prepared {
    writer: RecordWriter,
    /// As [`SpoolWriter::reserved`].
    reserved: Option<u64>,
}

/// Makes the next segment's file, filled and on disk with its name.
fn prepare(dir: &Path) -> Result<Prepared, RecordError> {
    let mut writer = create_unseen(dir)?;
    let room = RESERVE + STEP;
    let reserved = writer.allocate(0, room)?.then_some(room);
    writer.fill(FILL)?;
    writer.sync()?;
    // It also puts the name of the segment before it on disk.
    sync_dir(dir)?;
    Ok(Prepared { writer, reserved })
}

fn create_unseen(dir: &Path) -> Result<RecordWriter, RecordError> {
    let path = dir.join(UNSEEN);
    match fs::remove_file(&path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(RecordError::io("create")(error)),
        _ => RecordWriter::create(&path),
    }
}

/// Appends frames to segments.
#[derive(Debug)]
pub(crate) struct SpoolWriter {
    dir: PathBuf,
    spool_id: String,
    boot_id: String,
    writer: RecordWriter,
    segment: u32,
    oldest: u32,
    /// Sizes of the closed segments from `oldest` on.
    closed: VecDeque<u64>,
    closed_total: u64,
    turn_id: Option<String>,
    last_frame: u64,
    /// The current file's blocks are reserved up to here; none where the file system cannot.
    reserved: Option<u64>,
    segment_max: u64,
    spool_max: u64,
    /// Frames were appended since the last sync.
    dirty: bool,
    /// The current segment's directory entry is not synced yet, under either name.
    dir_dirty: bool,
    /// The file of the next segment.
    next: Option<Prepared>,
    fault: Option<StorageFault>,
    dropped_frames: u64,
    dropped_bytes: u64,
    payload: Vec<u8>,
}

impl SpoolWriter {
    /// Begins a spool in a directory without one.
    pub(crate) fn create(
        dir: &Path,
        spool_id: &str,
        segment_max: u64,
        spool_max: u64,
    ) -> Result<Self, RecordError> {
        let mut spool = Self {
            dir: dir.to_owned(),
            spool_id: spool_id.to_owned(),
            boot_id: clock::boot_id(),
            writer: create_unseen(dir)?,
            segment: 1,
            oldest: 1,
            closed: VecDeque::new(),
            closed_total: 0,
            turn_id: None,
            last_frame: 0,
            reserved: Some(0),
            segment_max,
            spool_max,
            dirty: false,
            dir_dirty: false,
            next: None,
            fault: None,
            dropped_frames: 0,
            dropped_bytes: 0,
            payload: Vec::new(),
        };
        spool.begin(false)?;
        Ok(spool)
    }

    /// Reserves the current segment's room, writes its header, and only then gives it its name: a reader never sees a
    /// segment that is not begun.
    fn begin(&mut self, prepared: bool) -> Result<(), RecordError> {
        self.reserve(0).map_err(|errno| RecordError::io("reserve room in")(errno.into()))?;
        let wall = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        let header = SegmentHeader {
            version: SPOOL_VERSION,
            spool_id: self.spool_id.clone(),
            segment: self.segment,
            first_frame: self.last_frame + 1,
            boot_id: self.boot_id.clone(),
            turn_id: self.turn_id.clone(),
            wall_ms: u64::try_from(wall.as_millis()).unwrap_or(u64::MAX),
        };
        self.writer.append(&header.encode())?;
        fs::rename(self.dir.join(UNSEEN), self.dir.join(segment_name(self.segment)))
            .map_err(RecordError::io("name"))?;
        self.dirty = true;
        self.dir_dirty = !prepared;
        Ok(())
    }

    /// Makes the file of the next segment, if there is none. What fails here is tried again when the segment begins.
    pub(crate) fn prepare(&mut self) {
        if self.fault.is_none() && self.next.is_none() {
            self.next = prepare(&self.dir).ok();
        }
    }

    /// Makes sure that `length` more bytes leave the reserve untouched.
    fn reserve(&mut self, length: u64) -> Result<(), Errno> {
        let Some(reserved) = self.reserved else { return Ok(()) };
        let needed = self.writer.length() + length + RESERVE;
        if needed <= reserved {
            return Ok(());
        }
        // Close to the end of the disk a smaller piece may still be had.
        let mut wanted = needed + STEP;
        loop {
            match self.writer.allocate(reserved, wanted) {
                Ok(able) => {
                    self.reserved = able.then_some(wanted);
                    return Ok(());
                }
                Err(_) if wanted > needed => wanted = needed,
                Err(error) => return Err(Errno::from_raw(error.errno().unwrap_or(libc::EIO))),
            }
        }
    }

    /// Appends a frame. Answers its number; none when it was dropped because of a fault (it is counted then).
    pub(crate) fn append(&mut self, body: FrameBody, room: Room) -> Option<u64> {
        let frame = Frame { number: self.last_frame + 1, boottime_ns: clock::boottime_ns(), body };
        let mut payload = std::mem::take(&mut self.payload);
        payload.clear();
        frame.encode_into(&mut payload);
        let number = self.append_payload(&payload, room);
        if payload.capacity() <= 64 * 1024 {
            self.payload = payload;
        }
        number
    }

    fn append_payload(&mut self, payload: &[u8], room: Room) -> Option<u64> {
        let length = payload.len() as u64 + 8;
        if self.fault.is_none() && self.writer.length() >= self.segment_max {
            self.rotate();
        }
        if room == Room::Ordinary && self.fault.is_none() {
            if self.total() + length > self.spool_max {
                self.set_fault(StorageFault::Limit);
            } else if let Err(errno) = self.reserve(length) {
                self.set_fault(StorageFault::Write(errno as i32));
            }
        }
        let refused = match (room, self.fault, self.reserved) {
            (Room::Ordinary, fault, _) => fault.is_some(),
            (Room::Mark, Some(_), Some(reserved)) => self.writer.length() + length + RESERVE_LAST > reserved,
            _ => false,
        };
        if refused {
            return self.drop_frame(length);
        }
        // A fault's own frame may have taken the number in between.
        let number = self.last_frame + 1;
        let result = if payload.get(1..9) == Some(&number.to_le_bytes()[..]) {
            self.writer.append(payload)
        } else {
            let mut payload = payload.to_vec();
            payload[1..9].copy_from_slice(&number.to_le_bytes());
            self.writer.append(&payload)
        };
        match result {
            Ok(_) => {
                self.last_frame = number;
                self.dirty = true;
                Some(number)
            }
            Err(error) => {
                self.set_fault(StorageFault::Write(error.errno().unwrap_or(libc::EIO)));
                self.drop_frame(length)
            }
        }
    }

    fn drop_frame(&mut self, length: u64) -> Option<u64> {
        self.dropped_frames += 1;
        self.dropped_bytes += length;
        None
    }

    fn set_fault(&mut self, fault: StorageFault) {
        if self.fault.is_some() {
            return;
        }
        self.fault = Some(fault);
        let number = self.last_frame + 1;
        let frame = Frame { number, boottime_ns: clock::boottime_ns(), body: FrameBody::StorageFault(fault) };
        let mut payload = Vec::new();
        frame.encode_into(&mut payload);
        if self.writer.append(&payload).is_ok() {
            self.last_frame = number;
        }
        let _ = self.writer.sync();
    }

    /// Begins the next segment. When that cannot be, the spool goes on in the old one with a fault.
    fn rotate(&mut self) {
        let next = self.segment + 1;
        // The old segment is whole on disk before the next can be seen.
        let result = self.sync_files().and_then(|()| match self.next.take() {
            Some(next) => Ok((next, true)),
            None => Ok((Prepared { writer: create_unseen(&self.dir)?, reserved: Some(0) }, false)),
        });
        let (next_file, prepared) = match result {
            Ok(made) => made,
            Err(error) => return self.set_fault(StorageFault::Write(error.errno().unwrap_or(libc::EIO))),
        };
        let old = std::mem::replace(&mut self.writer, next_file.writer);
        let old_reserved = std::mem::replace(&mut self.reserved, next_file.reserved);
        self.segment = next;
        if let Err(error) = self.begin(prepared) {
            self.writer = old;
            self.segment = next - 1;
            self.reserved = old_reserved;
            self.dirty = true;
            let _ = fs::remove_file(self.dir.join(UNSEEN));
            return self.set_fault(StorageFault::Write(error.errno().unwrap_or(libc::EIO)));
        }
        self.closed.push_back(old.length());
        self.closed_total += old.length();
        // Gives back what was reserved and not used.
        let _ = old.file().set_len(old.length());
    }

    /// Begins a turn in a segment of its own; answers the number of its frame.
    pub(crate) fn begin_turn(&mut self, turn_id: &str) -> Option<u64> {
        self.turn_id = Some(turn_id.to_owned());
        if self.fault.is_none() {
            self.rotate();
        }
        self.append(FrameBody::TurnBegin { turn_id: turn_id.to_owned() }, Room::Mark)
    }

    /// Ends a turn; answers the number of its frame.
    pub(crate) fn end_turn(&mut self, turn_id: &str) -> Option<u64> {
        self.turn_id = None;
        self.append(FrameBody::TurnEnd { turn_id: turn_id.to_owned() }, Room::Mark)
    }

    /// Puts all frames on disk. A failure is a fault: the system does not tell twice.
    pub(crate) fn sync(&mut self) -> Result<(), StorageFault> {
        if let Err(error) = self.sync_files() {
            self.set_fault(StorageFault::Write(error.errno().unwrap_or(libc::EIO)));
        }
        self.fault.map_or(Ok(()), Err)
    }

    /// The file first: on a journaling file system that takes the directory's entry along, and the second sync finds
    /// nothing to do.
    fn sync_files(&mut self) -> Result<(), RecordError> {
        if self.dirty {
            self.writer.sync()?;
            self.dirty = false;
        }
        if self.dir_dirty {
            sync_dir(&self.dir)?;
            self.dir_dirty = false;
        }
        Ok(())
    }

    /// Nothing more is to come: gives back the room that was kept.
    pub(crate) fn close(&mut self) {
        if self.next.take().is_some() {
            let _ = fs::remove_file(self.dir.join(UNSEEN));
        }
        let _ = self.writer.file().set_len(self.writer.length());
    }

    /// Deletes closed segments before `keep_from`; answers the oldest left.
    pub(crate) fn prune(&mut self, keep_from: u32) -> u32 {
        while self.oldest < keep_from.min(self.segment) {
            match fs::remove_file(self.dir.join(segment_name(self.oldest))) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => break,
                _ => {
                    self.closed_total -= self.closed.pop_front().unwrap_or(0);
                    self.oldest += 1;
                }
            }
        }
        self.oldest
    }

    fn total(&self) -> u64 {
        self.closed_total + self.writer.length()
    }

    pub(crate) fn end(&self) -> SpoolEnd {
        SpoolEnd { segment: self.segment, offset: self.writer.length(), frame: self.last_frame }
    }

    pub(crate) fn oldest(&self) -> u32 {
        self.oldest
    }

    pub(crate) fn fault(&self) -> Option<StorageFault> {
        self.fault
    }

    pub(crate) fn turn_id(&self) -> Option<&str> {
        self.turn_id.as_deref()
    }

    /// Frames and bytes dropped so far.
    pub(crate) fn dropped(&self) -> (u64, u64) {
        (self.dropped_frames, self.dropped_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spool_reader::SpoolReader;

    fn frames(dir: &Path) -> Vec<u64> {
        SpoolReader::new(dir).read_all().unwrap().into_iter().map(|frame| frame.number).collect()
    }

    fn spool(dir: &Path) -> SpoolWriter {
        SpoolWriter::create(dir, "spl_1", 16 * 1024 * 1024, 512 * 1024 * 1024).unwrap()
    }

    #[test]
    fn a_prepared_segment_is_unseen_until_it_is_begun_and_reads_to_its_last_frame() {
        let tmp = tempfile::tempdir().unwrap();
        let mut writer = spool(tmp.path());
        writer.append(FrameBody::StdinClosed, Room::Mark).unwrap();
        let mut live = SpoolReader::new(tmp.path());
        assert_eq!(live.read_all().unwrap().len(), 1);
        writer.prepare();
        assert!(tmp.path().join(UNSEEN).exists());
        assert_eq!(segments(tmp.path()).unwrap(), [1]);
        assert_eq!(live.next_frame().unwrap(), None);
        assert_eq!(writer.begin_turn("trn_1"), Some(2));
        writer.sync().unwrap();
        assert!(!writer.dir_dirty, "its directory entry was synced when it was made");
        assert!(!tmp.path().join(UNSEEN).exists());
        assert_eq!(std::fs::metadata(tmp.path().join(segment_name(2))).unwrap().len(), FILL);
        assert_eq!(live.next_frame().unwrap().map(|frame| frame.number), Some(2));
        assert_eq!(live.next_frame().unwrap(), None);
        // Beyond the room, and into a segment that nobody prepared.
        for _ in 0..3 {
            let bytes = vec![b'x'; 40 * 1024];
            writer
                .append(FrameBody::StdoutLine { bytes, newline: true, masked: false }, Room::Ordinary)
                .unwrap();
        }
        writer.begin_turn("trn_2").unwrap();
        writer.prepare();
        writer.close();
        assert_eq!(frames(tmp.path()), [1, 2, 3, 4, 5, 6]);
        assert!(!tmp.path().join(UNSEEN).exists(), "what was prepared and not begun goes with the keeper");
        let last = tmp.path().join(segment_name(3));
        assert_eq!(std::fs::metadata(last).unwrap().len(), writer.writer.length());
    }

    #[test]
    fn a_segment_whose_name_the_host_forgot_is_named_again() {
        let tmp = tempfile::tempdir().unwrap();
        let mut writer = spool(tmp.path());
        writer.prepare();
        // Prepared and not begun: there is nothing to name.
        settle(tmp.path()).unwrap();
        assert_eq!(segments(tmp.path()).unwrap(), [1]);
        writer.begin_turn("trn_1").unwrap();
        writer.sync().unwrap();
        drop(writer);
        fs::rename(tmp.path().join(segment_name(2)), tmp.path().join(UNSEEN)).unwrap();
        assert_eq!(frames(tmp.path()), [] as [u64; 0]);
        settle(tmp.path()).unwrap();
        settle(tmp.path()).unwrap();
        assert_eq!(frames(tmp.path()), [1]);
        // A torn header was never synced, so nothing behind it was acted on.
        let torn = tmp.path().join(UNSEEN);
        let mut bytes = std::fs::read(tmp.path().join(segment_name(2))).unwrap();
        bytes[20] ^= 1;
        std::fs::write(&torn, bytes).unwrap();
        settle(tmp.path()).unwrap();
        assert_eq!(segments(tmp.path()).unwrap(), [1, 2]);
    }

    #[test]
    fn the_room_for_the_end_is_kept_in_a_prepared_segment_too() {
        let tmp = tempfile::tempdir().unwrap();
        let mut writer = spool(tmp.path());
        writer.prepare();
        writer.begin_turn("trn_1").unwrap();
        let reserved = writer.reserved.expect("this file system reserves");
        assert!(reserved >= writer.writer.length() + RESERVE);
    }
}
