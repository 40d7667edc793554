//! Lines, and the protocol between runner and keeper: however a stream is cut, the same is read.

use roundhouse_process::{Decoder, FromKeeper, KeeperPlan, Line, LineSplitter, RawMessage, Request};

#[derive(Debug, PartialEq)]
enum Seen {
    Whole(Vec<u8>, bool),
    /// How much of it was buffered depends on the pieces; that it is more than the limit does not.
    Overlong,
    End(u64, bool),
}

fn split(limit: usize, pieces: &[&[u8]]) -> Vec<Seen> {
    let mut splitter = LineSplitter::new(limit);
    let mut seen = Vec::new();
    let mut take = |line: Line<'_>| {
        seen.push(match line {
            Line::Whole { bytes, newline } => {
                assert!(bytes.len() <= limit && !bytes.contains(&b'\n'));
                Seen::Whole(bytes.to_vec(), newline)
            }
            Line::Overlong { bytes } => {
                assert!(bytes.len() > limit && !bytes.contains(&b'\n'));
                Seen::Overlong
            }
            Line::OverlongEnd { length, newline } => Seen::End(length, newline),
        });
    };
    for piece in pieces {
        splitter.feed(piece, &mut take);
    }
    splitter.finish(&mut take);
    seen
}

/// The first byte is the limit, the rest the stream.
pub(crate) fn lines(data: &[u8]) {
    let Some((limit, stream)) = data.split_first() else { return };
    let limit = usize::from(*limit).max(1);
    let whole = split(limit, &[stream]);
    assert_eq!(split(limit, &crate::pieces(stream)), whole);
    // Nothing is lost: what was passed over is counted.
    let mut told = 0;
    for seen in &whole {
        told += match seen {
            Seen::Whole(bytes, newline) => bytes.len() as u64 + u64::from(*newline),
            Seen::Overlong => 0,
            Seen::End(length, newline) => length + u64::from(*newline),
        };
    }
    assert_eq!(told, stream.len() as u64);
}

/// The messages of a stream, and whether it is useless from there on.
fn messages(pieces: &[&[u8]]) -> (Vec<RawMessage>, bool) {
    let mut decoder = Decoder::new();
    let mut messages = Vec::new();
    for piece in pieces {
        decoder.feed(piece);
        loop {
            match decoder.next_raw() {
                Ok(Some(message)) => messages.push(message),
                Ok(None) => break,
                Err(_) => return (messages, true),
            }
        }
    }
    (messages, false)
}

/// A stream of messages in either direction. It is also taken for a launch plan.
pub(crate) fn protocol(data: &[u8]) {
    let whole = messages(&[data]);
    assert_eq!(messages(&crate::pieces(data)), whole);
    for message in &whole.0 {
        if let Ok(Some(request)) = Request::decode(message) {
            let again = messages(&[&request.encode(message.request_id)]).0;
            assert_eq!(again.len(), 1);
            assert_eq!(
                (again[0].request_id, Request::decode(&again[0])),
                (message.request_id, Ok(Some(request)))
            );
        }
        if let Ok(Some(told)) = FromKeeper::decode(message) {
            let again = messages(&[&told.encode()]).0;
            assert_eq!(again.len(), 1);
            assert_eq!(FromKeeper::decode(&again[0]), Ok(Some(told)));
        }
    }
    // A plan holds secrets and cannot be compared; it has to be read or refused.
    let _ = KeeperPlan::decode(data);
}
