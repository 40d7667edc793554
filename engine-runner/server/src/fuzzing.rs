//! The journal as fuzz targets see it: functions that panic when what is read of a file is not what was written.

use std::path::Path;

use crate::{
    error::Error,
    journal::{EntryReader, Journal, Record},
};

/// Reads a file as a journal in each way there is: they agree, and recovering it loses and invents nothing.
///
/// # Panics
/// When something is wrong.
#[expect(clippy::expect_used, reason = "a fuzz target fails by a panic")]
pub fn journal(path: &Path) {
    let Ok(read) = Journal::read(path) else {
        // No record file: it has to be refused when it is opened for appending, too, or be begun anew.
        if let Ok((_, records)) = Journal::recover(path) {
            assert_eq!(records, [], "records out of a file that holds none");
        }
        return;
    };
    let numbers = numbers(path);
    let (mut journal, recovered) = Journal::recover(path).expect("what can be read can be recovered");
    assert_eq!(recovered, read);
    let last = Record::Skip { to: 7 };
    journal.append(&last).expect("a recovered journal goes on");
    drop(journal);
    let again = Journal::read(path).expect("a journal that was appended to can be read");
    assert_eq!(again.split_last(), Some((&last, read.as_slice())), "nothing but what was appended");
    if let Some(numbers) = numbers {
        let entries = read.iter().filter_map(|record| match record {
            Record::Entry(entry) => Some(entry.number),
            _ => None,
        });
        assert_eq!(numbers, entries.collect::<Vec<_>>(), "followers see what recovery sees");
    }
}

/// The numbers that a follower is told; none when it is told that the journal cannot be read.
fn numbers(path: &Path) -> Option<Vec<u64>> {
    let read = || -> Result<Vec<u64>, Error> {
        let mut reader = EntryReader::open(path)?;
        let mut numbers = Vec::new();
        while let Some(entry) = reader.next_entry()? {
            numbers.push(entry.number);
        }
        Ok(numbers)
    };
    read().ok()
}

/// Reads bytes as one record: what was read is written and read again as the same.
///
/// # Panics
/// When something is wrong.
#[expect(clippy::expect_used, reason = "a fuzz target fails by a panic")]
pub fn record(bytes: &[u8]) {
    let Some(record) = Record::decode(bytes) else { return };
    let written = record.encode().expect("what was read can be written");
    assert_eq!(Record::decode(&written), Some(record));
}

/// Records of several kinds as their bytes, for seeds.
#[must_use]
pub fn records() -> Vec<Vec<u8>> {
    use crate::journal::{Entry, MessageMark, Source, StopCause};
    use roundhouse_proto::engine::v1::{EventBody, TextEvent, event_body::Kind};

    let entry = |number: u64, source: Source| {
        let text = TextEvent { item_id: "i".to_owned(), text: "Größe".to_owned(), ..TextEvent::default() };
        let body = EventBody { kind: Some(Kind::Text(text)) };
        Record::Entry(Box::new(Entry { number, at_millis: 5, source, body }))
    };
    let message = MessageMark {
        session_id: "ses_1".to_owned(),
        message_id: "msg_1".to_owned(),
        delivery_id: "11111111-2222-5333-8444-555555555555".to_owned(),
        text: "hello".to_owned(),
        boottime_ns: 5,
    };
    let records = [
        Record::Message(message),
        entry(1, Source::Frame { spool: "spl_1".to_owned(), frame: 2, ordinal: 0 }),
        Record::Settled { spool: "spl_1".to_owned(), frame: 2 },
        Record::Skip { to: 4 },
        entry(5, Source::Synthetic),
        Record::Stop(StopCause::Cancel),
        Record::Kept("{}".to_owned()),
        Record::Proved,
    ];
    records.iter().filter_map(|record| record.encode().ok()).collect()
}
