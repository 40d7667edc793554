//! Small changes to an input, from a seed: the same seed gives the same changes.

/// A generator of numbers that are random enough for tests (splitmix64).
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    /// From a seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// From some bytes: equal bytes give equal numbers.
    #[must_use]
    pub fn of(bytes: &[u8]) -> Self {
        // FNV-1a.
        Self(bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
            (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
        }))
    }

    /// The next number.
    pub fn number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below `limit`; 0 for 0.
    pub fn below(&mut self, limit: usize) -> usize {
        let limit = u64::try_from(limit).unwrap_or(u64::MAX).max(1);
        usize::try_from(self.number() % limit).unwrap_or(0)
    }
}

/// What breaks readers: ends of ranges, empty things, other types, deep nesting, noise.
const TOKENS: &[&[u8]] = &[
    b"0",
    b"-1",
    b"18446744073709551615",
    b"1e999",
    b"null",
    b"true",
    b"\"\"",
    b"[]",
    b"{}",
    b"[[[[[[[[",
    b"\"\\ud800\"",
    b"\xff",
    b"\r\n",
    b"\n\n",
    b"\x1b[31m",
    b"\0\0\0\0",
    b"\xff\xff\xff\xff\xff\xff\xff\xff",
];

/// Changes `bytes` in one to four ways; `other` is another input to take parts from.
#[must_use]
pub fn mutate(random: &mut Random, bytes: &[u8], other: &[u8]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    for _ in 0..=random.below(4) {
        change(random, &mut bytes, other);
    }
    bytes
}

fn change(random: &mut Random, bytes: &mut Vec<u8>, other: &[u8]) {
    let at = random.below(bytes.len() + 1);
    match random.below(10) {
        0 => bytes.truncate(at),
        1 => {
            if let Some(byte) = bytes.get_mut(at) {
                *byte ^= 1 << random.below(8);
            }
        }
        2 => {
            let token = TOKENS[random.below(TOKENS.len())];
            bytes.splice(at..at, token.iter().copied());
        }
        3 => {
            let end = (at + random.below(40)).min(bytes.len());
            bytes.drain(at..end);
        }
        // A number for a number: what a field may hold at its ends.
        4 => {
            if let Some(start) = (at..bytes.len()).find(|place| bytes[*place].is_ascii_digit()) {
                let end =
                    (start..bytes.len()).find(|place| !bytes[*place].is_ascii_digit()).unwrap_or(bytes.len());
                bytes.splice(start..end, TOKENS[random.below(9)].iter().copied());
            }
        }
        // Lines are lost, doubled, and come in another order, or from another run.
        5 => {
            let (start, end) = line_at(bytes, at);
            bytes.drain(start..end);
        }
        6 => {
            let (start, end) = line_at(bytes, at);
            let line = bytes[start..end].to_vec();
            let place = line_at(bytes, random.below(bytes.len() + 1)).0;
            bytes.splice(place..place, line);
        }
        7 => {
            let (start, end) = line_at(other, random.below(other.len() + 1));
            let place = line_at(bytes, at).0;
            bytes.splice(place..place, other[start..end].iter().copied());
        }
        8 => {
            let (start, end) = line_at(bytes, at);
            let line: Vec<u8> = bytes.drain(start..end).collect();
            let place = line_at(bytes, random.below(bytes.len() + 1)).0;
            bytes.splice(place..place, line);
        }
        _ => {
            let place = line_at(other, random.below(other.len() + 1)).0;
            bytes.truncate(line_at(bytes, at).0);
            bytes.extend_from_slice(&other[place..]);
        }
    }
}

/// The line around a place, its end included.
fn line_at(bytes: &[u8], place: usize) -> (usize, usize) {
    let start = bytes[..place].iter().rposition(|byte| *byte == b'\n').map_or(0, |found| found + 1);
    let end =
        bytes[place..].iter().position(|byte| *byte == b'\n').map_or(bytes.len(), |found| place + found + 1);
    (start, end)
}
