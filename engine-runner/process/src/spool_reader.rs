//! Reading a spool: the same frames with the same numbers, while it grows and after any restart.

use crate::frame::Frame;
use crate::protocol::SpoolEnd;
use crate::record::{RecordError, RecordReader};
use crate::spool::{SegmentHeader, segment_name, segments};
use crate::wire::WireError;
use std::io;
use std::path::{Path, PathBuf};

/// Why a spool cannot be read on.
#[derive(Debug, thiserror::Error)]
pub enum SpoolError {
    /// The system refused.
    #[error("failed to read a spool")]
    Io(#[source] io::Error),
    /// A segment is no record file.
    #[error("segment {segment} cannot be read")]
    Segment {
        /// Which.
        segment: u32,
        /// Why.
        #[source]
        source: RecordError,
    },
    /// A record is not the header or frame it should be. Reading may go on behind it.
    #[error("segment {segment} holds a malformed frame at {offset}")]
    Malformed {
        /// In which segment.
        segment: u32,
        /// Where in it.
        offset: u64,
        /// What is wrong.
        #[source]
        source: WireError,
    },
    /// Frames are missing between segments (damage, or a segment that was deleted). Reading may go on behind them.
    #[error("frames {expected} to before {found} are missing")]
    Gap {
        /// The number that should have come.
        expected: u64,
        /// The number that came.
        found: u64,
    },
}

#[derive(Debug)]
struct Open {
    segment: u32,
    reader: RecordReader,
    header: Option<SegmentHeader>,
}

/// Reads frames in order, from the oldest segment there is or from a given frame on, and follows a live spool.
#[derive(Debug)]
pub struct SpoolReader {
    dir: PathBuf,
    open: Option<Open>,
    /// The segment to open next; 0 for the oldest there is.
    next_segment: u32,
    /// Number of the last frame that was answered or passed over.
    last: u64,
    /// Frames up to this are passed over.
    after: u64,
    /// The frame behind a gap that was told.
    pending: Option<Frame>,
}

impl SpoolReader {
    /// A reader before the first frame there is. The directory need not hold a segment yet.
    #[must_use]
    pub fn new(dir: &Path) -> Self {
        Self { dir: dir.to_owned(), open: None, next_segment: 0, last: 0, after: 0, pending: None }
    }

    /// A reader behind frame `after`. Earlier segments are not read.
    ///
    /// # Errors
    /// [`SpoolError::Io`].
    pub fn new_after(dir: &Path, after: u64) -> Result<Self, SpoolError> {
        let mut reader = Self::new(dir);
        reader.after = after;
        for segment in segments(dir).map_err(SpoolError::Io)?.into_iter().rev() {
            let first = RecordReader::open(&dir.join(segment_name(segment)))
                .and_then(|mut records| records.next_record())
                .ok()
                .flatten()
                .and_then(|record| SegmentHeader::decode(&record.payload).ok())
                .map(|header| header.first_frame);
            if first.is_some_and(|first| first <= after.saturating_add(1)) {
                reader.next_segment = segment;
                break;
            }
        }
        Ok(reader)
    }

    /// Where the reader stands: behind which frame, and at which offset of which segment.
    #[must_use]
    pub fn position(&self) -> SpoolEnd {
        match &self.open {
            Some(open) => SpoolEnd { segment: open.segment, offset: open.reader.offset(), frame: self.last },
            None => SpoolEnd { segment: self.next_segment, offset: 0, frame: self.last },
        }
    }

    /// The header of the segment that the last frame came from.
    #[must_use]
    pub fn header(&self) -> Option<&SegmentHeader> {
        self.open.as_ref().and_then(|open| open.header.as_ref())
    }

    /// The next frame; none when there is none (yet): of a live spool ask again after the next progress, of a dead one
    /// this is its end, with a torn tail left out.
    ///
    /// # Errors
    /// [`SpoolError`]. After `Malformed` and `Gap` asking again goes on behind the damage.
    pub fn next_frame(&mut self) -> Result<Option<Frame>, SpoolError> {
        if let Some(frame) = self.pending.take().filter(|frame| frame.number > self.after) {
            return Ok(Some(frame));
        }
        loop {
            let Some(open) = &mut self.open else {
                if self.open_next()? {
                    continue;
                }
                return Ok(None);
            };
            let segment = open.segment;
            let fail = |source| SpoolError::Segment { segment, source };
            let mut record = open.reader.next_record().map_err(fail)?;
            if record.is_none() {
                // A segment is whole before the next one can be seen: so look for that first, then read once more.
                if !self.dir.join(segment_name(segment + 1)).exists() {
                    return Ok(None);
                }
                record = open.reader.next_record().map_err(fail)?;
            }
            let Some(record) = record else {
                self.next_segment = segment + 1;
                self.open = None;
                continue;
            };
            let malformed = |source| SpoolError::Malformed { segment, offset: record.offset, source };
            if open.header.is_none() {
                let header = match SegmentHeader::decode(&record.payload) {
                    Ok(header) => header,
                    Err(source) => {
                        // Nothing in it can be relied on without its header.
                        self.next_segment = segment + 1;
                        self.open = None;
                        return Err(malformed(source));
                    }
                };
                let found = header.first_frame;
                open.header = Some(header);
                let expected = self.last + 1;
                self.last = found.saturating_sub(1);
                // The oldest segment begins where pruning left it.
                if expected > 1 && found != expected {
                    return Err(SpoolError::Gap { expected, found });
                }
                continue;
            }
            let frame = Frame::decode(&record.payload).map_err(malformed)?;
            let expected = self.last + 1;
            self.last = frame.number;
            if frame.number != expected {
                let found = frame.number;
                self.pending = Some(frame);
                return Err(SpoolError::Gap { expected, found });
            }
            if frame.number > self.after {
                return Ok(Some(frame));
            }
        }
    }

    /// All frames there are now.
    ///
    /// # Errors
    /// As [`SpoolReader::next_frame`]; the frames before the error are lost to the caller.
    pub fn read_all(&mut self) -> Result<Vec<Frame>, SpoolError> {
        let mut frames = Vec::new();
        while let Some(frame) = self.next_frame()? {
            frames.push(frame);
        }
        Ok(frames)
    }

    fn open_next(&mut self) -> Result<bool, SpoolError> {
        let mut segment = self.next_segment;
        if segment == 0 || !self.dir.join(segment_name(segment)).exists() {
            // Not there: the oldest that is (behind a pruned one), or none yet.
            let there = match segments(&self.dir) {
                Ok(there) => there,
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
                Err(source) => return Err(SpoolError::Io(source)),
            };
            match there.into_iter().find(|number| *number >= segment) {
                Some(found) => segment = found,
                None => return Ok(false),
            }
        }
        match RecordReader::open(&self.dir.join(segment_name(segment))) {
            Ok(reader) => {
                self.open = Some(Open { segment, reader, header: None });
                Ok(true)
            }
            // It was created a moment ago, or its creation was cut off.
            Err(RecordError::NotRecords) => Ok(false),
            Err(RecordError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(source) => Err(SpoolError::Segment { segment, source }),
        }
    }
}
