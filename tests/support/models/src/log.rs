//! The log of requests, bounded in number and in bytes.

use std::{
    collections::VecDeque,
    sync::{
        Arc,
        atomic::{AtomicU8, Ordering},
    },
    time::{SystemTime, UNIX_EPOCH},
};

use bytes::Bytes;
use serde_json::{Value, json};
use tokio::sync::watch;

use crate::{Api, Conversation, RequestKind};

/// The bytes of a turn's text that a record keeps, its body aside.
pub(crate) const MAX_TURN_TEXT: usize = 4096;

/// How the answer to a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Ending {
    /// It has not ended.
    Open,
    /// Sent to its end as the script says; an HTTP error or a scripted cut is such an end too.
    Sent,
    /// The client went away first, or the server was stopped.
    Abandoned,
}

impl Ending {
    /// The word used in JSON.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Open => "open",
            Self::Sent => "sent",
            Self::Abandoned => "abandoned",
        }
    }
}

/// One request, as it came.
#[derive(Debug)]
pub struct Record {
    pub(crate) number: u64,
    pub(crate) at: SystemTime,
    pub(crate) method: String,
    pub(crate) path: String,
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) keys: Keys,
    pub(crate) kind: RequestKind,
    pub(crate) api: Api,
    pub(crate) turn_text: String,
    pub(crate) step: usize,
    pub(crate) body: Bytes,
    pub(crate) body_dropped: bool,
    pub(crate) ending: Arc<AtomicU8>,
}

/// The secrets of a request. Their `Debug` tells nothing.
#[derive(Clone, Default)]
pub(crate) struct Keys(pub(crate) Vec<String>);

impl std::fmt::Debug for Keys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} hidden", self.0.len())
    }
}

impl Record {
    /// Its running number, from 1, without gaps until a reset.
    #[must_use]
    pub const fn number(&self) -> u64 {
        self.number
    }

    /// When it came.
    #[must_use]
    pub const fn at(&self) -> SystemTime {
        self.at
    }

    /// The method, in capitals.
    #[must_use]
    pub fn method(&self) -> &str {
        &self.method
    }

    /// The path, with its query.
    #[must_use]
    pub fn path(&self) -> &str {
        &self.path
    }

    /// A header by its lower-case name; the first if there are several. Keys read `hidden`.
    #[must_use]
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    /// Whether `x-api-key` or `authorization` came.
    #[must_use]
    pub fn has_key(&self) -> bool {
        !self.keys.0.is_empty()
    }

    /// Whether a key that came is this one (given bare, without `Bearer`).
    #[must_use]
    pub fn key_is(&self, key: &str) -> bool {
        self.keys.0.iter().any(|sent| sent == key)
    }

    /// What it is for.
    #[must_use]
    pub const fn kind(&self) -> RequestKind {
        self.kind
    }

    /// The API that it was made to; [`Api::Messages`] for what belongs to none.
    #[must_use]
    pub const fn api(&self) -> Api {
        self.api
    }

    /// See [`Conversation::turn_text`]; its first 4,096 bytes.
    #[must_use]
    pub fn turn_text(&self) -> &str {
        &self.turn_text
    }

    /// See [`Conversation::step`].
    #[must_use]
    pub const fn step(&self) -> usize {
        self.step
    }

    /// How its answer ended, as of now.
    #[must_use]
    pub fn ending(&self) -> Ending {
        match self.ending.load(Ordering::SeqCst) {
            1 => Ending::Sent,
            2 => Ending::Abandoned,
            _ => Ending::Open,
        }
    }

    /// The body as it came; empty if it was dropped to bound memory.
    #[must_use]
    pub fn body(&self) -> &Bytes {
        &self.body
    }

    /// Whether the body was dropped to bound memory.
    #[must_use]
    pub const fn body_dropped(&self) -> bool {
        self.body_dropped
    }

    /// The body as a conversation; without messages if it is none.
    #[must_use]
    pub fn conversation(&self) -> Conversation {
        Conversation::new(serde_json::from_slice(&self.body).unwrap_or_default())
    }

    /// All of it as JSON.
    #[must_use]
    pub fn to_json(&self) -> Value {
        let body: Value = serde_json::from_slice(&self.body).unwrap_or_default();
        let headers: serde_json::Map<String, Value> =
            self.headers.iter().map(|(name, value)| (name.clone(), json!(value))).collect();
        let at_ms = self.at.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis());
        json!({
            "number": self.number,
            "at_ms": u64::try_from(at_ms).unwrap_or(u64::MAX),
            "method": self.method,
            "path": self.path,
            "headers": headers,
            "has_key": self.has_key(),
            "kind": self.kind.as_str(),
            "api": self.api.as_str(),
            "turn_text": self.turn_text,
            "step": self.step,
            "ending": self.ending().as_str(),
            "body": body,
            "body_dropped": self.body_dropped,
        })
    }
}

/// Marks a record's ending: sent if told so, abandoned if dropped before.
#[derive(Debug)]
pub(crate) struct EndMark {
    ending: Arc<AtomicU8>,
    /// Who waits for endings is woken through this.
    wake: watch::Sender<u64>,
}

impl EndMark {
    pub(crate) fn new(record: &Record, wake: watch::Sender<u64>) -> Self {
        Self { ending: Arc::clone(&record.ending), wake }
    }

    /// The answer is on its way, whole.
    pub(crate) fn sent(self) {
        self.ending.store(1, Ordering::SeqCst);
    }
}

impl Drop for EndMark {
    fn drop(&mut self) {
        let _ = self.ending.compare_exchange(0, 2, Ordering::SeqCst, Ordering::SeqCst);
        self.wake.send_modify(|count| *count += 1);
    }
}

/// The records, oldest first.
#[derive(Debug)]
pub(crate) struct Log {
    records: VecDeque<Arc<Record>>,
    total: u64,
    body_bytes: usize,
    max_records: usize,
    max_body_bytes: usize,
}

impl Log {
    pub(crate) const fn new(max_records: usize, max_body_bytes: usize) -> Self {
        Self { records: VecDeque::new(), total: 0, body_bytes: 0, max_records, max_body_bytes }
    }

    /// Numbers the record and keeps it. Old bodies go first, then old records.
    pub(crate) fn push(&mut self, mut record: Record) -> Arc<Record> {
        self.total += 1;
        record.number = self.total;
        self.body_bytes += record.body.len();
        let record = Arc::new(record);
        self.records.push_back(Arc::clone(&record));
        while self.records.len() > self.max_records {
            if let Some(oldest) = self.records.pop_front() {
                self.body_bytes -= oldest.body.len();
            }
        }
        let mut at = 0;
        while self.body_bytes > self.max_body_bytes && at + 1 < self.records.len() {
            let full = &self.records[at];
            if !full.body.is_empty() {
                self.body_bytes -= full.body.len();
                self.records[at] = Arc::new(full.without_body());
            }
            at += 1;
        }
        record
    }

    pub(crate) const fn total(&self) -> u64 {
        self.total
    }

    pub(crate) fn iter(&self) -> impl DoubleEndedIterator<Item = &Arc<Record>> {
        self.records.iter()
    }

    pub(crate) fn reset(&mut self) {
        self.records.clear();
        self.body_bytes = 0;
        self.total = 0;
    }
}

impl Record {
    fn without_body(&self) -> Self {
        Self {
            number: self.number,
            at: self.at,
            method: self.method.clone(),
            path: self.path.clone(),
            headers: self.headers.clone(),
            keys: self.keys.clone(),
            kind: self.kind,
            api: self.api,
            turn_text: self.turn_text.clone(),
            step: self.step,
            body: Bytes::new(),
            body_dropped: true,
            ending: Arc::clone(&self.ending),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(body: &str) -> Record {
        Record {
            number: 0,
            at: UNIX_EPOCH,
            method: "POST".to_owned(),
            path: "/v1/messages".to_owned(),
            headers: vec![("x-api-key".to_owned(), "hidden".to_owned())],
            keys: Keys(vec!["secret-value".to_owned()]),
            kind: RequestKind::Main,
            api: Api::Messages,
            turn_text: body.to_owned(),
            step: 0,
            body: Bytes::copy_from_slice(body.as_bytes()),
            body_dropped: false,
            ending: Arc::default(),
        }
    }

    #[test]
    fn old_records_go_and_numbers_stay() {
        let mut log = Log::new(3, 1000);
        for n in 0..5 {
            log.push(record(&format!("b{n}")));
        }
        let kept: Vec<_> =
            log.iter().map(|record| (record.number(), record.turn_text().to_owned())).collect();
        assert_eq!(kept, [(3, "b2".to_owned()), (4, "b3".to_owned()), (5, "b4".to_owned())]);
        assert_eq!(log.total(), 5);
    }

    #[test]
    fn old_bodies_go_first_and_the_newest_is_always_whole() {
        let mut log = Log::new(10, 10);
        log.push(record("123456"));
        log.push(record("123456"));
        log.push(record("a body above the limit by itself"));
        let dropped: Vec<_> = log.iter().map(|record| record.body_dropped()).collect();
        assert_eq!(dropped, [true, true, false]);
    }

    #[test]
    fn a_key_is_in_neither_form_of_a_record() {
        let record = record("{}");
        assert!(record.key_is("secret-value"));
        assert!(!format!("{record:?}{}", record.to_json()).contains("secret-value"));
    }

    #[test]
    fn an_end_mark_that_was_not_told_says_abandoned() {
        let record = record("");
        let mark = EndMark::new(&record, watch::Sender::new(0));
        assert_eq!(record.ending(), Ending::Open);
        drop(mark);
        assert_eq!(record.ending(), Ending::Abandoned);
    }
}
