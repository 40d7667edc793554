//! A turn's journal: the append-only record of its events, each with its number, and of every decision that the
//! events depend on.
//!
//! Numbers are assigned once. After a restart the frames up to the last entry rebuild state only: a newer translator
//! changes what comes, never what came. Unfinished text is never in a journal.
//!
//! Blocks are reserved ahead of the file's end ([`Room`]), so that a turn ends, and says so, also when the disk is full.

use std::{
    fs::File,
    path::{Path, PathBuf},
    sync::Arc,
};

use prost::Message as _;
use roundhouse_engines::{Permissions, TranslatorOpen};
use roundhouse_process::record::{self, RecordReader, RecordWriter};
use roundhouse_proto::engine::v1::EventBody;
use serde::{Deserialize, Serialize};
use tokio::task::JoinHandle;

use crate::{error::Error, spares::Spare};

/// Where a numbered event comes from. Frames come in order, so the last position of a spool says what of it is
/// journalled already.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Source {
    /// What the translator made of a frame.
    Frame {
        /// The spool.
        spool: String,
        /// The frame's number.
        frame: u64,
        /// Which of the frame's outputs.
        ordinal: u32,
    },
    /// A decision of the runner: a timer, an answer, evidence, an end.
    Synthetic,
}

/// A numbered event.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Entry {
    /// Contiguous from 1 within the turn.
    pub number: u64,
    /// Wall clock, milliseconds since 1970, for show.
    pub at_millis: i64,
    /// Where it comes from.
    pub source: Source,
    /// What happened.
    pub body: EventBody,
}

/// The first record: all about the turn that does not depend on its session.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TurnOpen {
    /// The turn.
    pub turn_id: String,
    /// Its conversation.
    pub conversation_id: String,
    /// Its epoch.
    pub epoch: u64,
    /// Canonical path of the workspace.
    pub workspace: PathBuf,
    /// Boot of the host on which it was opened.
    pub boot_id: String,
    /// CLOCK_BOOTTIME at the opening, nanoseconds.
    pub opened_boottime_ns: u64,
    /// Longest duration from the opening, milliseconds. Unset: none.
    pub deadline_millis: Option<u64>,
    /// Silence after which it ends, milliseconds.
    pub idle_millis: u64,
    /// Version of the program that wrote it.
    pub program: String,
}

/// A session that was asked for, with all that opening it again needs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionOpen {
    /// Our id of the session.
    pub session_id: String,
    /// Engine.
    pub engine: String,
    /// Model.
    pub model: String,
    /// Effort. Unset: the engine's default.
    pub effort: Option<String>,
    /// The agent's name, for show.
    pub agent: String,
    /// The agent's prompt.
    pub prompt: String,
    /// SHA-256 of the prompt, lower-case hex.
    pub prompt_sha256: String,
    /// What the engine gets in front of the turn's message.
    pub context: String,
    /// The native session that was asked for.
    pub native_id: Option<String>,
    /// What may be done without asking.
    pub permissions: Permissions,
    /// The session that this one replaces. Empty: none.
    pub replaces: String,
}

/// A process that works for the turn. Written before it is started.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ProcessOpen {
    /// The session.
    pub session_id: String,
    /// The spool; one process has one.
    pub spool_id: String,
    /// Frames after this one are the turn's. 0: the process is new, all of them are.
    pub after: u64,
    /// What the translator starts from.
    pub translator: TranslatorOpen,
    /// Directories that the workspace did not have then, and that the engine may leave behind empty.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub absent: Vec<String>,
}

/// The answer that StartOrResume got, for repeats.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct OpenedMark {
    /// The session.
    pub session_id: String,
    /// How.
    pub how: OpenedHow,
    /// The native id.
    pub native_id: String,
    /// Whether a changed prompt was applied to a resumed session.
    pub prompt_applied: bool,
}

/// How a session was opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum OpenedHow {
    /// A new native session.
    Started,
    /// An earlier one in a new process.
    Resumed,
    /// An earlier one in its warm process.
    AlreadyOpen,
}

/// A message that was accepted: from here on it is never lost.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct MessageMark {
    /// The session it is for.
    pub session_id: String,
    /// The message.
    pub message_id: String,
    /// The id under which the engine gets it.
    pub delivery_id: String,
    /// Its text.
    pub text: String,
    /// CLOCK_BOOTTIME at which it was accepted, nanoseconds: what was born later may be the turn's.
    pub boottime_ns: u64,
}

/// Why a turn is being stopped. The first cause holds, but a cancel beats a timer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum StopCause {
    /// Somebody cancelled it.
    Cancel,
    /// The engine was silent for too long.
    Idle,
    /// The turn's deadline passed.
    Deadline,
    /// A higher epoch of the conversation came.
    Superseded,
    /// The journal or the spool could not be written.
    Storage,
    /// The keeper does not answer.
    KeeperStuck,
}

/// A permission that somebody must decide.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PermissionMark {
    /// The request.
    pub request_id: String,
    /// Boot on which the deadline counts.
    pub boot_id: String,
    /// CLOCK_BOOTTIME at which it is denied, nanoseconds.
    pub deadline_boottime_ns: u64,
}

/// A decision about a permission.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct AnswerMark {
    /// The request.
    pub request_id: String,
    /// Whether the tool may run.
    pub allow: bool,
    /// What the engine is told with a denial.
    pub feedback: String,
    /// Who decided. Journals of earlier builds do not say: then it passes for a client.
    #[serde(default)]
    pub decider: Decider,
}

/// Who decides about a permission and leaves an [`AnswerMark`].
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Decider {
    /// Somebody who was asked.
    #[default]
    Client,
    /// Nobody answered in time.
    Deadline,
}

/// One record of a journal.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Record {
    /// The turn was opened.
    Open(Box<TurnOpen>),
    /// A session was asked for.
    Session(Box<SessionOpen>),
    /// A process works for the turn from here on.
    Process(Box<ProcessOpen>),
    /// The keeper of the process has marked the turn's begin: the turn's frames come after this one.
    Begun {
        /// The frame of the mark.
        frame: u64,
    },
    /// A session is open.
    Opened(OpenedMark),
    /// A session proved unusable. The turn waits for another one.
    Unusable {
        /// The session.
        session_id: String,
        /// Why.
        reason: String,
    },
    /// A message was accepted.
    Message(MessageMark),
    /// The turn is being stopped.
    Stop(StopCause),
    /// A permission waits.
    Permission(PermissionMark),
    /// A permission was decided.
    Answer(AnswerMark),
    /// The settle time ran out after this frame.
    Settled {
        /// The spool.
        spool: String,
        /// The last frame before it.
        frame: u64,
    },
    /// The keeper died without telling how its engine ended.
    Dead {
        /// The spool.
        spool: String,
    },
    /// The message may have been taken by a process that is gone: it is given to another one only on proof.
    Doubt {
        /// The spool of the process that is gone.
        spool: String,
    },
    /// The engine proved that it has nothing of the message.
    Proved,
    /// The worktree before the turn, for the comparison after it (opaque to everything else).
    Worktree(String),
    /// What is kept of the session for its next turn, as JSON. The session's own file is written after the turn's end was
    /// told; should it be behind, this stands.
    Kept(String),
    /// Numbers up to this one were lost with the host; the next is one more.
    Skip {
        /// The last number that somebody else holds.
        to: u64,
    },
    /// A numbered event.
    Entry(Box<Entry>),
}

/// The parts of an entry that are not its body, as JSON.
#[derive(Serialize, Deserialize)]
struct EntryHead {
    n: u64,
    at: i64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    from: Option<(String, u64, u32)>,
}

const ENTRY: u8 = 1;
const MARK: u8 = 2;

/// All records but entries, as JSON.
#[derive(Serialize, Deserialize)]
enum Mark {
    Open(Box<TurnOpen>),
    Session(Box<SessionOpen>),
    Process(Box<ProcessOpen>),
    Begun { frame: u64 },
    Opened(OpenedMark),
    Unusable { session_id: String, reason: String },
    Message(MessageMark),
    Stop(StopCause),
    Permission(PermissionMark),
    Answer(AnswerMark),
    Settled { spool: String, frame: u64 },
    Dead { spool: String },
    Doubt { spool: String },
    Proved,
    Worktree(String),
    Kept(String),
    Skip { to: u64 },
}

impl Record {
    /// The record as bytes.
    ///
    /// # Errors
    /// [`Error::Internal`]; nothing of ours fails to serialise.
    pub(crate) fn encode(&self) -> Result<Vec<u8>, Error> {
        let mark = match self {
            Self::Entry(entry) => return entry.encode(),
            Self::Open(open) => Mark::Open(open.clone()),
            Self::Session(open) => Mark::Session(open.clone()),
            Self::Process(open) => Mark::Process(open.clone()),
            Self::Begun { frame } => Mark::Begun { frame: *frame },
            Self::Opened(mark) => Mark::Opened(mark.clone()),
            Self::Unusable { session_id, reason } => {
                Mark::Unusable { session_id: session_id.clone(), reason: reason.clone() }
            }
            Self::Message(mark) => Mark::Message(mark.clone()),
            Self::Stop(cause) => Mark::Stop(*cause),
            Self::Permission(mark) => Mark::Permission(mark.clone()),
            Self::Answer(mark) => Mark::Answer(mark.clone()),
            Self::Settled { spool, frame } => Mark::Settled { spool: spool.clone(), frame: *frame },
            Self::Dead { spool } => Mark::Dead { spool: spool.clone() },
            Self::Doubt { spool } => Mark::Doubt { spool: spool.clone() },
            Self::Proved => Mark::Proved,
            Self::Worktree(state) => Mark::Worktree(state.clone()),
            Self::Kept(record) => Mark::Kept(record.clone()),
            Self::Skip { to } => Mark::Skip { to: *to },
        };
        let mut bytes = vec![MARK];
        serde_json::to_writer(&mut bytes, &mark)
            .map_err(|error| Error::Internal(format!("journal record: {error}")))?;
        Ok(bytes)
    }

    /// Reads what [`Record::encode`] wrote; none for a record of a kind that this version does not know.
    #[must_use]
    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let (kind, rest) = bytes.split_first()?;
        match *kind {
            ENTRY => Entry::decode(rest).map(|entry| Self::Entry(Box::new(entry))),
            MARK => Some(match serde_json::from_slice::<Mark>(rest).ok()? {
                Mark::Open(open) => Self::Open(open),
                Mark::Session(open) => Self::Session(open),
                Mark::Process(open) => Self::Process(open),
                Mark::Begun { frame } => Self::Begun { frame },
                Mark::Opened(mark) => Self::Opened(mark),
                Mark::Unusable { session_id, reason } => Self::Unusable { session_id, reason },
                Mark::Message(mark) => Self::Message(mark),
                Mark::Stop(cause) => Self::Stop(cause),
                Mark::Permission(mark) => Self::Permission(mark),
                Mark::Answer(mark) => Self::Answer(mark),
                Mark::Settled { spool, frame } => Self::Settled { spool, frame },
                Mark::Dead { spool } => Self::Dead { spool },
                Mark::Doubt { spool } => Self::Doubt { spool },
                Mark::Proved => Self::Proved,
                Mark::Worktree(state) => Self::Worktree(state),
                Mark::Kept(record) => Self::Kept(record),
                Mark::Skip { to } => Self::Skip { to },
            }),
            _ => None,
        }
    }
}

impl Entry {
    fn encode(&self) -> Result<Vec<u8>, Error> {
        let from = match &self.source {
            Source::Frame { spool, frame, ordinal } => Some((spool.clone(), *frame, *ordinal)),
            Source::Synthetic => None,
        };
        let head = serde_json::to_vec(&EntryHead { n: self.number, at: self.at_millis, from })
            .map_err(|error| Error::Internal(format!("journal entry: {error}")))?;
        let length =
            u32::try_from(head.len()).map_err(|_| Error::Internal("journal entry head".to_owned()))?;
        let mut bytes = Vec::with_capacity(5 + head.len() + self.body.encoded_len());
        bytes.push(ENTRY);
        bytes.extend_from_slice(&length.to_le_bytes());
        bytes.extend_from_slice(&head);
        self.body
            .encode(&mut bytes)
            .map_err(|error| Error::Internal(format!("journal entry body: {error}")))?;
        Ok(bytes)
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let (length, rest) = bytes.split_first_chunk::<4>()?;
        let length = usize::try_from(u32::from_le_bytes(*length)).ok()?;
        let head: EntryHead = serde_json::from_slice(rest.get(..length)?).ok()?;
        let body = EventBody::decode(rest.get(length..)?).ok()?;
        let source = match head.from {
            Some((spool, frame, ordinal)) => Source::Frame { spool, frame, ordinal },
            None => Source::Synthetic,
        };
        Some(Self { number: head.n, at_millis: head.at, source, body })
    }
}

/// Bytes kept free for the end of a turn: what stops it, and the terminal event.
const RESERVE: u64 = 128 * 1024;
/// Bytes reserved at a time beyond that.
const STEP: u64 = 64 * 1024;

/// The room that is kept behind a journal's records.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Room {
    /// Blocks are reserved up to here; none where the file system cannot.
    upto: Option<u64>,
}

impl Default for Room {
    fn default() -> Self {
        Self { upto: Some(0) }
    }
}

impl Room {
    /// Makes sure that a file of `length` bytes has its reserve behind it.
    ///
    /// # Errors
    /// [`Error::Storage`] when the disk has none.
    pub(crate) fn keep(&mut self, writer: &RecordWriter, length: u64) -> Result<(), Error> {
        let Some(upto) = self.upto else { return Ok(()) };
        let needed = length + RESERVE;
        if needed <= upto {
            return Ok(());
        }
        // Close to the end of the disk a smaller piece may still be had.
        for wanted in [needed + STEP, needed] {
            match writer.allocate(upto, wanted) {
                Ok(able) => {
                    self.upto = able.then_some(wanted);
                    return Ok(());
                }
                Err(error) if wanted == needed => return Err(error.into()),
                Err(_) => {}
            }
        }
        Ok(())
    }
}

/// Appends to a journal. One writer per journal: the turn's actor.
#[derive(Debug)]
pub(crate) struct Journal {
    path: PathBuf,
    writer: RecordWriter,
    /// A second descriptor of the same file, so that syncing needs no exclusive access.
    sync: Arc<File>,
    /// The directory entries of a new journal on their way to the disk.
    entries: Option<JoinHandle<Result<(), Error>>>,
    room: Room,
    /// The turn is being ended because the disk is full: what is appended may use the reserve.
    short: bool,
}

impl Journal {
    /// Makes a new journal in a new directory, out of a spare one if there is one, with its first records. They survive the end of this process; the host's
    /// they survive from the next [`Journal::sync`] on, which waits for what is begun here in the background. Before a
    /// message is accepted a turn that the host forgets is a turn that was never opened.
    ///
    /// # Errors
    /// [`Error::Storage`].
    pub(crate) fn create(path: &Path, records: &[Record], spare: Option<Spare>) -> Result<Self, Error> {
        let directory =
            path.parent().ok_or_else(|| Error::Internal("journal without directory".to_owned()))?.to_owned();
        match spare {
            Some(spare) if spare.name(&directory) => {
                return Self::begin(path, &directory, records, spare.writer, spare.room);
            }
            Some(spare) => spare.discard(),
            None => {}
        }
        crate::state_dir::make_dir(&directory).map_err(Error::storage("create the turn's directory"))?;
        let (writer, recovered) = RecordWriter::recover(path)?;
        if !recovered.payloads.is_empty() {
            return Err(Error::Internal(format!("{} exists", path.display())));
        }
        let mut journal = Self::begin(path, &directory, records, writer, Room::default())?;
        let sync_entries = move || -> Result<(), Error> {
            record::sync_dir(&directory)?;
            if let Some(parent) = directory.parent() {
                record::sync_dir(parent)?;
            }
            Ok(())
        };
        match tokio::runtime::Handle::try_current() {
            Ok(runtime) => journal.entries = Some(runtime.spawn_blocking(sync_entries)),
            Err(_) => sync_entries()?,
        }
        Ok(journal)
    }

    /// Writes the first records; when they cannot be kept there is no journal.
    fn begin(
        path: &Path,
        directory: &Path,
        records: &[Record],
        writer: RecordWriter,
        room: Room,
    ) -> Result<Self, Error> {
        let begun = Self::with(path, writer, room).and_then(|mut journal| {
            records.iter().try_for_each(|record| journal.append(record))?;
            Ok(journal)
        });
        if begun.is_err() {
            let _ = std::fs::remove_file(path);
            let _ = std::fs::remove_dir(directory);
        }
        begun
    }

    /// Opens a journal after a restart: cuts off a torn tail and answers what stands.
    ///
    /// # Errors
    /// [`Error::Storage`].
    pub(crate) fn recover(path: &Path) -> Result<(Self, Vec<Record>), Error> {
        let (writer, recovered) = RecordWriter::recover(path)?;
        let mut records = Vec::with_capacity(recovered.payloads.len());
        for payload in &recovered.payloads {
            match Record::decode(payload) {
                Some(record) => records.push(record),
                None => {
                    tracing::warn!(journal = %path.display(), "a journal record of an unknown kind is passed over");
                }
            }
        }
        let mut room = Room::default();
        if let Err(error) = room.keep(&writer, writer.length()) {
            tracing::warn!(
                journal = %path.display(),
                error = crate::error::chain(&error),
                "no room is left for the turn's end"
            );
            room = Room::default();
        }
        Ok((Self::with(path, writer, room)?, records))
    }

    /// Reads what stands in a journal and changes nothing; for those who do not own it. Blocking.
    ///
    /// # Errors
    /// [`Error::Storage`].
    pub(crate) fn read(path: &Path) -> Result<Vec<Record>, Error> {
        let mut reader = RecordReader::open(path)?;
        let mut records = Vec::new();
        while let Some(record) = reader.next_record()? {
            records.extend(Record::decode(&record.payload));
        }
        Ok(records)
    }

    fn with(path: &Path, writer: RecordWriter, room: Room) -> Result<Self, Error> {
        let sync = File::open(path).map_err(Error::storage("open the journal"))?;
        Ok(Self { path: path.to_owned(), writer, sync: Arc::new(sync), entries: None, room, short: false })
    }

    /// Where it lies.
    #[must_use]
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Appends a record. It survives the end of this process; see [`Journal::sync`] for the host's. What stops the turn
    /// may use the reserve, all else leaves it untouched.
    ///
    /// # Errors
    /// [`Error::Storage`]; then nothing was appended.
    pub(crate) fn append(&mut self, record: &Record) -> Result<(), Error> {
        let bytes = record.encode()?;
        if !self.short && !matches!(record, Record::Stop(_)) {
            self.room.keep(&self.writer, self.writer.length() + bytes.len() as u64)?;
        }
        self.writer.append(&bytes)?;
        Ok(())
    }

    /// From here on the reserve is used: the turn can only end.
    pub(crate) fn use_reserve(&mut self) {
        self.short = true;
    }

    /// Whether the turn can only end, and should say no more than that.
    #[must_use]
    pub(crate) fn is_short(&self) -> bool {
        self.short
    }

    /// Bytes that the terminal event of a turn that can only end may have, about.
    pub(crate) const LAST: usize = 64 * 1024;

    /// Puts all records on disk. Cancel safe: the sync goes on.
    ///
    /// # Errors
    /// [`Error::Storage`].
    pub(crate) async fn sync(&mut self) -> Result<(), Error> {
        if let Some(entries) = &mut self.entries {
            let synced = entries.await;
            self.entries = None;
            synced.map_err(|error| Error::Internal(format!("sync task: {error}")))??;
        }
        let file = Arc::clone(&self.sync);
        tokio::task::spawn_blocking(move || file.sync_data())
            .await
            .map_err(|error| Error::Internal(format!("sync task: {error}")))?
            .map_err(Error::storage("sync the journal"))
    }
}

/// Reads the entries of a journal from its start, also while it grows.
#[derive(Debug)]
pub(crate) struct EntryReader {
    reader: RecordReader,
}

impl EntryReader {
    /// Opens a journal for reading.
    ///
    /// # Errors
    /// [`Error::Storage`].
    pub(crate) fn open(path: &Path) -> Result<Self, Error> {
        Ok(Self { reader: RecordReader::open(path)? })
    }

    /// The next entry; none when there is none yet.
    ///
    /// # Errors
    /// [`Error::Storage`].
    pub(crate) fn next_entry(&mut self) -> Result<Option<Entry>, Error> {
        while let Some(record) = self.reader.next_record()? {
            if record.payload.first() != Some(&ENTRY) {
                continue;
            }
            match Entry::decode(&record.payload[1..]) {
                Some(entry) => return Ok(Some(entry)),
                None => return Err(Error::Internal("a journal entry cannot be read".to_owned())),
            }
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use roundhouse_proto::engine::v1::{NoticeEvent, event_body::Kind};

    use super::*;

    fn entry(number: u64) -> Record {
        Record::Entry(Box::new(Entry {
            number,
            at_millis: 5,
            source: Source::Frame { spool: "spl_1".into(), frame: number * 2, ordinal: 1 },
            body: EventBody {
                kind: Some(Kind::Notice(NoticeEvent { kind: 3, message: format!("n{number}") })),
            },
        }))
    }

    #[tokio::test]
    async fn records_come_back_and_a_torn_tail_is_cut_off() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("turns/trn_1/journal");
        let stop = Record::Stop(StopCause::Cancel);
        let mut journal = Journal::create(&path, &[stop.clone(), entry(1)], None).unwrap();
        journal.append(&entry(2)).unwrap();
        journal.sync().await.unwrap();
        drop(journal);
        let length = std::fs::metadata(&path).unwrap().len();
        let file = File::options().write(true).open(&path).unwrap();
        file.set_len(length - 3).unwrap();
        let (mut journal, records) = Journal::recover(&path).unwrap();
        assert_eq!(records, [stop, entry(1)]);
        journal.append(&entry(2)).unwrap();
        let mut reader = EntryReader::open(&path).unwrap();
        assert_eq!(reader.next_entry().unwrap().map(|entry| entry.number), Some(1));
        assert_eq!(reader.next_entry().unwrap().map(|entry| entry.number), Some(2));
        assert_eq!(reader.next_entry().unwrap(), None);
        journal.append(&entry(3)).unwrap();
        assert_eq!(reader.next_entry().unwrap().map(|entry| entry.number), Some(3));
    }

    #[test]
    fn a_second_creation_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("t/journal");
        drop(Journal::create(&path, &[entry(1)], None).unwrap());
        assert!(Journal::create(&path, &[], None).is_err());
    }
}
