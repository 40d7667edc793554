//! Fuzz targets: functions over bytes that panic when something is wrong, and what to feed them.
//!
//! Each target is run in two ways. `tests/it` gives it all seeds and a fixed number of seeded mutations of them, in every
//! test run. `src/guided.rs` gives it to libFuzzer, which lets itself be led by the coverage (`tests/fuzz/run`, with the
//! stable compiler); inputs worth keeping go to `corpora/`.

mod dialect;
mod disk;
mod framing;
pub mod mutate;
mod seeds;

pub use dialect::{Played, Run, play};
pub use seeds::{recordings, seeds};

/// A target: its name, and the function that panics when something is wrong.
pub type Target = (&'static str, fn(&[u8]));

/// Every target.
pub const TARGETS: &[Target] = &[
    ("lines", framing::lines),
    ("protocol", framing::protocol),
    ("claude-code", dialect::claude_code),
    ("codex", dialect::codex),
    ("spool", disk::spool),
    ("journal", disk::journal),
];

/// The target of this name.
#[must_use]
pub fn target(name: &str) -> Option<fn(&[u8])> {
    TARGETS.iter().find(|(known, _)| *known == name).map(|(_, run)| *run)
}

/// Cuts bytes into pieces whose sizes follow from the bytes themselves, so that a target needs no other input.
pub(crate) fn pieces(bytes: &[u8]) -> Vec<&[u8]> {
    let mut random = mutate::Random::of(bytes);
    let mut pieces = Vec::new();
    let mut rest = bytes;
    while !rest.is_empty() {
        // Mostly small, sometimes large: both the borders and the bulk are met.
        let most = if random.below(4) == 0 { 4096 } else { 24 };
        let (piece, tail) = rest.split_at((1 + random.below(most)).min(rest.len()));
        pieces.push(piece);
        rest = tail;
    }
    pieces
}
