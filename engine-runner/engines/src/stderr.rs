//! The end of an engine's standard error, and its lines one by one.

use crate::limit;

/// The most bytes of one line that are looked at.
const LINE_LIMIT: usize = 16_384;

/// Standard error so far.
#[derive(Debug, Clone, Default)]
pub(crate) struct Tail {
    kept: Vec<u8>,
    line: Vec<u8>,
}

impl Tail {
    /// Takes a chunk, cut anywhere, and hands on each line it completes.
    pub(crate) fn take(&mut self, chunk: &[u8], line: &mut dyn FnMut(&str)) {
        self.kept.extend_from_slice(&chunk[chunk.len().saturating_sub(limit::STDERR_TAIL_LIMIT)..]);
        let excess = self.kept.len().saturating_sub(limit::STDERR_TAIL_LIMIT);
        self.kept.drain(..excess);
        for part in chunk.split_inclusive(|byte| *byte == b'\n') {
            let room = LINE_LIMIT.saturating_sub(self.line.len());
            self.line.extend_from_slice(&part[..part.len().min(room)]);
            if part.ends_with(b"\n") {
                self.end_line(line);
            }
        }
    }

    /// Hands on what is left without a line end.
    pub(crate) fn end_line(&mut self, line: &mut dyn FnMut(&str)) {
        let bytes = std::mem::take(&mut self.line);
        let text = String::from_utf8_lossy(&bytes);
        let text = text.trim();
        if !text.is_empty() {
            line(text);
        }
    }

    /// The last bytes.
    pub(crate) fn text(&self) -> String {
        limit::suffix(&String::from_utf8_lossy(&self.kept), limit::STDERR_TAIL_LIMIT).to_owned()
    }
}

/// Keeps the first text of a kind.
pub(crate) fn keep_first(slot: &mut Option<String>, matches: bool, text: &str) {
    if matches && slot.is_none() {
        *slot = Some(limit::short(text));
    }
}
