//! Cutting output into lines, however it arrives.
//!
//! A line may come in any pieces, cut inside characters; the last may lack its newline. A line over the limit is told
//! once as its head when it crosses the limit, and once as its length when it ends: memory stays flat on a line
//! without end.

/// Something the splitter found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Line<'a> {
    /// A whole line without its `\n`.
    Whole {
        /// The line.
        bytes: &'a [u8],
        /// False for a last line that came without a newline.
        newline: bool,
    },
    /// A line went over the limit and goes on.
    Overlong {
        /// All that is buffered of it: more than the limit.
        bytes: &'a [u8],
    },
    /// The end of an over-long line.
    OverlongEnd {
        /// Its length without the newline.
        length: u64,
        /// False when output ended before the line did.
        newline: bool,
    },
}

/// Cuts a byte stream into lines.
#[derive(Debug)]
pub struct LineSplitter {
    limit: usize,
    buffer: Vec<u8>,
    /// Length so far of an over-long line whose rest is being passed over.
    skipping: Option<u64>,
}

/// A buffer that grew beyond this for one line is given back after it.
const KEEP_CAPACITY: usize = 64 * 1024;

impl LineSplitter {
    /// A splitter for lines of up to `limit` bytes.
    #[must_use]
    pub fn new(limit: usize) -> Self {
        Self { limit, buffer: Vec::new(), skipping: None }
    }

    /// Takes the next bytes and tells what they complete.
    pub fn feed(&mut self, mut bytes: &[u8], mut found: impl FnMut(Line<'_>)) {
        while !bytes.is_empty() {
            let end = memchr::memchr(b'\n', bytes);
            let piece = &bytes[..end.unwrap_or(bytes.len())];
            if let Some(length) = &mut self.skipping {
                *length = length.saturating_add(piece.len() as u64);
            } else if self.buffer.len() + piece.len() > self.limit {
                self.buffer.extend_from_slice(piece);
                found(Line::Overlong { bytes: &self.buffer });
                self.skipping = Some(self.buffer.len() as u64);
                self.buffer = Vec::new();
            } else if end.is_some() && self.buffer.is_empty() {
                // The common case takes no copy.
                found(Line::Whole { bytes: piece, newline: true });
                bytes = &bytes[piece.len() + 1..];
                continue;
            } else {
                self.buffer.extend_from_slice(piece);
            }
            let Some(end) = end else { return };
            self.end_line(true, &mut found);
            bytes = &bytes[end + 1..];
        }
    }

    /// Output ended: tells the last line if it came without a newline.
    pub fn finish(&mut self, mut found: impl FnMut(Line<'_>)) {
        if self.skipping.is_some() || !self.buffer.is_empty() {
            self.end_line(false, &mut found);
        }
    }

    fn end_line(&mut self, newline: bool, found: &mut impl FnMut(Line<'_>)) {
        if let Some(length) = self.skipping.take() {
            found(Line::OverlongEnd { length, newline });
            return;
        }
        found(Line::Whole { bytes: &self.buffer, newline });
        self.buffer.clear();
        if self.buffer.capacity() > KEEP_CAPACITY {
            self.buffer = Vec::new();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[derive(Debug, Clone, PartialEq, Eq)]
    enum Seen {
        Whole(Vec<u8>, bool),
        Overlong,
        End(u64, bool),
    }

    fn split(limit: usize, pieces: &[&[u8]]) -> Vec<Seen> {
        let mut splitter = LineSplitter::new(limit);
        let mut seen = Vec::new();
        let mut take = |line: Line<'_>| {
            seen.push(match line {
                Line::Whole { bytes, newline } => Seen::Whole(bytes.to_vec(), newline),
                Line::Overlong { .. } => Seen::Overlong,
                Line::OverlongEnd { length, newline } => Seen::End(length, newline),
            });
        };
        for piece in pieces {
            splitter.feed(piece, &mut take);
        }
        splitter.finish(&mut take);
        seen
    }

    #[test]
    fn s30_a_last_line_without_newline_and_blank_lines_are_told() {
        assert_eq!(
            split(10, &[b"a\r\n\n", b"b"]),
            [
                Seen::Whole(b"a\r".to_vec(), true),
                Seen::Whole(vec![], true),
                Seen::Whole(b"b".to_vec(), false)
            ]
        );
        assert_eq!(split(10, &[b""]), []);
    }

    #[test]
    fn a_line_at_the_limit_is_whole_and_one_over_it_is_not() {
        assert_eq!(split(3, &[b"abc\n"]), [Seen::Whole(b"abc".to_vec(), true)]);
        assert_eq!(
            split(3, &[b"ab", b"cd", b"e\nf\n"]),
            [Seen::Overlong, Seen::End(5, true), Seen::Whole(b"f".to_vec(), true)]
        );
        assert_eq!(split(3, &[b"abcdef"]), [Seen::Overlong, Seen::End(6, false)]);
    }

    #[test]
    fn memory_is_flat_on_a_line_without_end() {
        let mut splitter = LineSplitter::new(1024);
        let mut heads = 0;
        for _ in 0..10_000 {
            splitter.feed(&[b'x'; 512], |line| heads += i32::from(matches!(line, Line::Overlong { .. })));
            assert!(splitter.buffer.capacity() <= 4096);
        }
        assert_eq!(heads, 1);
    }

    proptest! {
        /// Wherever the stream is cut, the lines are those of the whole.
        #[test]
        fn s30_cuts_anywhere_change_nothing(
            text in proptest::collection::vec(prop_oneof![Just(b'\n'), Just(0xC3), Just(0xA9), any::<u8>()], 0..200),
            cuts in proptest::collection::vec(0usize..200, 0..20),
            limit in 1usize..20,
        ) {
            let whole = split(limit, &[&text]);
            let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(text.len())).collect();
            cuts.sort_unstable();
            let mut pieces = Vec::new();
            let mut last = 0;
            for cut in cuts {
                pieces.push(&text[last..cut]);
                last = cut;
            }
            pieces.push(&text[last..]);
            prop_assert_eq!(split(limit, &pieces), whole);
        }
    }
}
