//! What the engine prints, on its way into the spool.

use crate::frame::FrameBody;
use crate::lines::{Line, LineSplitter};
use crate::mask::{Masker, StreamMasker};
use crate::plan::KeeperLimits;
use crate::spool::{Room, SpoolWriter};
use nix::errno::Errno;
use std::collections::VecDeque;
use std::os::fd::OwnedFd;

/// Bytes read at a time: what a pipe holds.
const READ: usize = 64 * 1024;
/// Reads of one pipe before others get their turn.
const READS: usize = 4;
/// Longest stderr frame written from the tail.
const STDERR_FRAME: usize = 64 * 1024;

/// Both output pipes and what is half read of them.
#[derive(Debug)]
pub(super) struct Output {
    pub(super) stdout: Option<OwnedFd>,
    pub(super) stderr: Option<OwnedFd>,
    splitter: LineSplitter,
    masker: Masker,
    stderr_stream: StreamMasker,
    window: StderrWindow,
    line_max: u64,
    line_head: usize,
    buffer: Vec<u8>,
}

impl Output {
    pub(super) fn new(stdout: OwnedFd, stderr: OwnedFd, masker: &Masker, limits: &KeeperLimits) -> Self {
        let size = |limit: u64| usize::try_from(limit).unwrap_or(usize::MAX);
        Self {
            stdout: Some(stdout),
            stderr: Some(stderr),
            splitter: LineSplitter::new(size(limits.line_max)),
            masker: masker.clone(),
            stderr_stream: StreamMasker::new(masker.clone()),
            window: StderrWindow::new(size(limits.stderr_head), size(limits.stderr_tail)),
            line_max: limits.line_max,
            line_head: size(limits.line_head),
            buffer: vec![0; READ],
        }
    }

    /// Both pipes ended.
    pub(super) fn is_done(&self) -> bool {
        self.stdout.is_none() && self.stderr.is_none()
    }

    /// Reads what is there of standard output.
    pub(super) fn read_stdout(&mut self, spool: &mut SpoolWriter) {
        for _ in 0..READS {
            let Some(fd) = &self.stdout else { return };
            match nix::unistd::read(fd, &mut self.buffer) {
                Ok(0) => return self.end_stdout(true, spool),
                Ok(count) => {
                    let masker = &self.masker;
                    let (line_max, line_head) = (self.line_max, self.line_head);
                    self.splitter.feed(&self.buffer[..count], |line| {
                        spool.append(line_frame(line, masker, line_max, line_head), Room::Ordinary);
                    });
                    if count < READ {
                        return;
                    }
                }
                Err(Errno::EAGAIN | Errno::EINTR) => return,
                Err(_) => return self.end_stdout(false, spool),
            }
        }
    }

    /// Standard output is over: its last line and the end are told.
    pub(super) fn end_stdout(&mut self, clean: bool, spool: &mut SpoolWriter) {
        if self.stdout.take().is_none() {
            return;
        }
        let masker = &self.masker;
        let (line_max, line_head) = (self.line_max, self.line_head);
        self.splitter.finish(|line| {
            spool.append(line_frame(line, masker, line_max, line_head), Room::Ordinary);
        });
        spool.append(FrameBody::StdoutEof { clean }, Room::Mark);
    }

    /// Reads what is there of standard error.
    pub(super) fn read_stderr(&mut self, spool: &mut SpoolWriter) {
        for _ in 0..READS {
            let Some(fd) = &self.stderr else { return };
            match nix::unistd::read(fd, &mut self.buffer) {
                Ok(0) => return self.end_stderr(spool),
                Ok(count) => {
                    let mut safe = Vec::new();
                    let masked = self.stderr_stream.feed(&self.buffer[..count], &mut safe);
                    self.window.feed(&safe, masked, spool);
                    if count < READ {
                        return;
                    }
                }
                Err(Errno::EAGAIN | Errno::EINTR) => return,
                Err(_) => return self.end_stderr(spool),
            }
        }
    }

    /// Standard error is over.
    pub(super) fn end_stderr(&mut self, spool: &mut SpoolWriter) {
        if self.stderr.take().is_none() {
            return;
        }
        let mut safe = Vec::new();
        let masked = self.stderr_stream.finish(&mut safe);
        self.window.feed(&safe, masked, spool);
        self.window.flush(spool);
    }

    /// A turn began or ended: the last bytes of its standard error are written, and counting begins anew.
    pub(super) fn turn_mark(&mut self, spool: &mut SpoolWriter) {
        self.window.flush(spool);
    }
}

fn line_frame(line: Line<'_>, masker: &Masker, line_max: u64, line_head: usize) -> FrameBody {
    match line {
        Line::Whole { bytes, newline } => {
            let masked = masker.mask(bytes);
            FrameBody::StdoutLine {
                masked: masked.is_some(),
                bytes: masked.unwrap_or_else(|| bytes.to_vec()),
                newline,
            }
        }
        Line::Overlong { bytes } => {
            let (head, masked) = masker.mask_head(bytes, line_head);
            FrameBody::StdoutOverlong { head, masked, limit: line_max }
        }
        Line::OverlongEnd { length, newline } => FrameBody::StdoutOverlongEnd { length, newline },
    }
}

/// Lets the first bytes through, keeps the last ones, counts those between.
#[derive(Debug)]
struct StderrWindow {
    head: usize,
    tail: usize,
    head_left: usize,
    kept: VecDeque<u8>,
    omitted: u64,
    masked: bool,
}

impl StderrWindow {
    fn new(head: usize, tail: usize) -> Self {
        Self { head, tail, head_left: head, kept: VecDeque::new(), omitted: 0, masked: false }
    }

    fn feed(&mut self, bytes: &[u8], masked: bool, spool: &mut SpoolWriter) {
        let (now, later) = bytes.split_at(self.head_left.min(bytes.len()));
        if !now.is_empty() {
            spool.append(FrameBody::Stderr { bytes: now.to_vec(), masked }, Room::Ordinary);
            self.head_left -= now.len();
        }
        if later.is_empty() {
            return;
        }
        self.masked |= masked;
        let keep = &later[later.len() - later.len().min(self.tail)..];
        let room = self.tail - keep.len();
        let surplus = self.kept.len().saturating_sub(room);
        self.kept.drain(..surplus);
        self.kept.extend(keep);
        self.omitted += (surplus + later.len() - keep.len()) as u64;
    }

    fn flush(&mut self, spool: &mut SpoolWriter) {
        if self.omitted > 0 {
            spool.append(FrameBody::StderrOmitted { bytes: self.omitted }, Room::Mark);
        }
        let mut kept = std::mem::take(&mut self.kept);
        for piece in kept.make_contiguous().chunks(STDERR_FRAME) {
            spool.append(FrameBody::Stderr { bytes: piece.to_vec(), masked: self.masked }, Room::Ordinary);
        }
        self.head_left = self.head;
        self.omitted = 0;
        self.masked = false;
    }
}
