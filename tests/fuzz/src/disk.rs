//! Spools and journals as they may lie on a disk.
//!
//! The first byte of an input says how it is laid out. Even: the rest is a file as it is, behind its magic. Odd: the rest
//! is records, each with two bytes of length before it, that get a valid checksum, so that what they hold is read.
//! A record of length 0 begins another segment of the spool. With bit 1 one byte of the last file is damaged.

#![expect(clippy::expect_used, reason = "a fuzz target fails by a panic")]

use std::path::Path;

use roundhouse_process::record::{self, MAGIC};
use roundhouse_process::{Frame, SegmentHeader, SpoolError, SpoolReader};

/// The files that an input stands for.
fn files(data: &[u8]) -> Vec<Vec<u8>> {
    let Some((how, mut rest)) = data.split_first() else { return vec![Vec::new()] };
    if how & 1 == 0 {
        return vec![[MAGIC.as_slice(), rest].concat()];
    }
    let mut files = vec![MAGIC.to_vec()];
    while let Some((length, tail)) = rest.split_first_chunk::<2>() {
        let (payload, tail) = tail.split_at(usize::from(u16::from_le_bytes(*length)).min(tail.len()));
        rest = tail;
        let full = files.len() < 4 && payload.is_empty();
        if full {
            files.push(MAGIC.to_vec());
        } else if let Some(file) = files.last_mut() {
            // Only an empty record is refused, and that is no record here.
            let _ = record::encode_into(file, payload);
        }
    }
    if how & 2 != 0
        && let Some(file) = files.last_mut()
        && !file.is_empty()
    {
        let place = crate::mutate::Random::of(data).below(file.len());
        file[place] ^= 0x10;
    }
    files
}

/// Every frame and every complaint, to the end. A reader that does not come to an end is caught here.
fn read_all(reader: &mut SpoolReader, most: usize) -> (Vec<Frame>, bool) {
    let mut frames = Vec::new();
    let mut complained = false;
    for _ in 0..=most {
        match reader.next_frame() {
            Ok(Some(frame)) => frames.push(frame),
            Ok(None) => return (frames, complained),
            Err(SpoolError::Gap { .. } | SpoolError::Malformed { .. }) => complained = true,
            // The rest cannot be read; a caller stops here.
            Err(SpoolError::Io(_) | SpoolError::Segment { .. }) => return (frames, true),
        }
    }
    panic!("a spool of few bytes is read without end");
}

pub(crate) fn spool(data: &[u8]) {
    let files = files(data);
    let most = 4 * (data.len() + 8);
    let directory = directory();
    for (number, file) in (1_u32..).zip(&files) {
        write(&directory.path().join(format!("{number:06}.spool")), file);
    }
    let (frames, complained) = read_all(&mut SpoolReader::new(directory.path()), most);
    if !complained {
        // An undamaged spool has no gap, and from any frame on it reads the same.
        for (frame, next) in frames.iter().zip(frames.iter().skip(1)) {
            assert_eq!(frame.number.checked_add(1), Some(next.number));
        }
        if let Some(middle) = frames.get(frames.len() / 2) {
            let mut reader =
                SpoolReader::new_after(directory.path(), middle.number).expect("it was read before");
            let (rest, _) = read_all(&mut reader, most);
            assert_eq!(rest, frames[frames.len() / 2 + 1..], "after frame {}", middle.number);
        }
    }
    for frame in &frames {
        let mut bytes = Vec::new();
        frame.encode_into(&mut bytes);
        // What a newer keeper wrote is passed on without what it holds.
        assert_eq!(Frame::decode(&bytes).as_ref(), Ok(frame));
    }
    // A reader that sees the last file grow sees the same frames.
    if let Some(last) = files.last() {
        let path = directory.path().join(format!("{:06}.spool", files.len()));
        write(&path, &[]);
        let mut live = SpoolReader::new(directory.path());
        let mut seen = Vec::new();
        let mut told = false;
        let mut grown = 0;
        for piece in crate::pieces(last) {
            grown += piece.len();
            write(&path, &last[..grown]);
            let (more, complained) = read_all(&mut live, most);
            seen.extend(more);
            told |= complained;
        }
        if !complained && !told {
            assert_eq!(seen, frames, "read while it grew");
        }
    }
    // The pieces that a reader is made of, alone.
    let _ = SegmentHeader::decode(data);
    let _ = Frame::decode(data);
}

pub(crate) fn journal(data: &[u8]) {
    let directory = directory();
    let path = directory.path().join("journal");
    for file in files(data) {
        write(&path, &file);
        roundhouse_engine_runner::fuzzing::journal(&path);
    }
    roundhouse_engine_runner::fuzzing::record(data);
}

/// A new directory, in memory where that can be had: a fuzzer makes thousands.
fn directory() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).expect("a directory for the input")
}

fn write(path: &Path, bytes: &[u8]) {
    std::fs::write(path, bytes).expect("a file for the input");
}
