//! Replay, snapshot and following without a hole: a turn and its reader in every order in which their steps can come.
//!
//! The reader is the real one ([`follow`]), on a real journal and hub; it stops at each [`point`] and wherever it waits.
//! The scheduler below tries, at each step, both sides that can go on: the turn with its next step, the reader if it was
//! woken. A wake-up that is lost is found as a reader that is not at its end when nobody can go on.

use std::future::Future;
use std::path::Path;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use roundhouse_proto::engine::v1::{
    self as proto, EventBody, NoticeEvent, Partial, TerminalEvent, TextEvent, event_body::Kind,
    stream_events_response::Item,
};
use tokio::sync::mpsc;

use super::service::follow;
use crate::hub::Hub;
use crate::journal::{Entry, Journal, Record, Source};

/// Lets the scheduler run the other side.
pub(super) async fn point() {
    let mut passed = false;
    std::future::poll_fn(|context| {
        if std::mem::replace(&mut passed, true) {
            return Poll::Ready(());
        }
        context.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

/// A step of the turn.
#[derive(Debug, Clone)]
enum Step {
    Append(u64, Kind),
    Publish(u64, Kind),
    Partial(u64, &'static str),
    Reset,
}

fn event(number: u64, kind: Kind) -> [Step; 2] {
    [Step::Append(number, kind.clone()), Step::Publish(number, kind)]
}

/// A notice, text that grows and is replaced by its item, the end.
fn turn(thrown_away: bool) -> Vec<Step> {
    let text = TextEvent { item_id: "a".to_owned(), text: "größer".to_owned(), ..TextEvent::default() };
    let mut steps = event(1, Kind::Notice(NoticeEvent { kind: 3, message: "one".to_owned() })).to_vec();
    if thrown_away {
        steps.extend([Step::Partial(0, "no"), Step::Reset, Step::Partial(0, "größ")]);
    } else {
        steps.extend([Step::Partial(0, "gr"), Step::Partial(2, "öß")]);
    }
    steps.extend(event(2, Kind::Text(text)));
    steps.extend(event(3, Kind::Terminal(TerminalEvent::default())));
    steps
}

struct Flag(AtomicBool);

impl Wake for Flag {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// Plays one schedule: at each place where both sides can go on, the next choice decides (true: the turn); beyond the
/// given ones the reader goes first. Answers the choices that were made.
fn play(directory: &Path, steps: &[Step], after: u64, capacity: usize, given: &[bool]) -> Vec<bool> {
    let path = directory.join("journal");
    let _ = std::fs::remove_file(&path);
    let mut journal = Journal::create(&path, &[], None).unwrap();
    let hub = Hub::new(path, 0, false);
    let (items, mut received) = mpsc::channel(capacity);
    let mut reader = pin!(follow(Arc::clone(&hub), after, true, items));
    let flag = Arc::new(Flag(AtomicBool::new(true)));
    let waker = Waker::from(Arc::clone(&flag));
    let mut context = Context::from_waker(&waker);
    let (mut made, mut seen, mut next, mut over) = (Vec::new(), Vec::new(), 0, false);
    loop {
        let reads = !over && flag.0.load(Ordering::SeqCst);
        let acts = next < steps.len();
        let act = match (acts, reads) {
            (true, true) => {
                let choice = given.get(made.len()).copied().unwrap_or(false);
                made.push(choice);
                choice
            }
            (true, false) => true,
            (false, true) => false,
            (false, false) => break,
        };
        if act {
            take(&mut journal, &hub, &steps[next]);
            next += 1;
            continue;
        }
        flag.0.store(false, Ordering::SeqCst);
        if let Poll::Ready(result) = reader.as_mut().poll(&mut context) {
            result.unwrap();
            over = true;
        }
        while let Ok(item) = received.try_recv() {
            seen.push(item.unwrap().item.unwrap());
        }
    }
    assert!(over, "the reader waits for ever after {made:?}; it saw {seen:#?}");
    whole(&seen, after, &made);
    made
}

fn take(journal: &mut Journal, hub: &Arc<Hub>, step: &Step) {
    match step.clone() {
        Step::Append(number, kind) => {
            let body = EventBody { kind: Some(kind) };
            let entry = Entry { number, at_millis: 0, source: Source::Synthetic, body };
            journal.append(&Record::Entry(Box::new(entry))).unwrap();
        }
        Step::Publish(number, kind) => {
            hub.event(&proto::NumberedEvent { number, at: None, body: Some(EventBody { kind: Some(kind) }) });
        }
        Step::Partial(offset, text) => {
            hub.partial(Partial {
                item_id: "a".to_owned(),
                offset,
                text: text.to_owned(),
                ..Partial::default()
            });
        }
        Step::Reset => hub.reset("a".to_owned()),
    }
}

/// Every event once and in order; partial text without gap, none after its item.
fn whole(seen: &[Item], after: u64, made: &[bool]) {
    let mut last = after;
    let mut text = String::new();
    for item in seen {
        match item {
            Item::Event(event) => {
                assert_eq!(event.number, last + 1, "{made:?}: {seen:#?}");
                last = event.number;
            }
            Item::Partial(partial) => {
                // A reader that says it holds the item already may be told of its beginning.
                assert!(last < 2 || after >= 2, "partial text after its item, {made:?}: {seen:#?}");
                assert_eq!(partial.offset, text.len() as u64, "{made:?}: {seen:#?}");
                text.push_str(&partial.text);
                assert!("größer".starts_with(&text) || text == "no", "{made:?}: {seen:#?}");
            }
            Item::PartialReset(_) => text.clear(),
        }
    }
    assert_eq!(last, after.max(3), "{made:?}: {seen:#?}");
}

/// Every schedule, by depth: the last choice that was for the reader is made for the turn next.
fn every_schedule(after: u64, capacity: usize, thrown_away: bool) -> usize {
    let directory = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
    let steps = turn(thrown_away);
    let mut schedules = 0;
    let mut given = Vec::new();
    loop {
        let mut made = play(&directory.path().join("t"), &steps, after, capacity, &given);
        schedules += 1;
        while made.last() == Some(&true) {
            made.pop();
        }
        let Some(last) = made.last_mut() else { return schedules };
        *last = true;
        given = made;
    }
}

#[test]
fn snapshot_and_following_leave_no_hole_in_any_interleaving() {
    for (after, capacity, thrown_away) in [(0, 1, false), (1, 16, true), (3, 1, false)] {
        let schedules = every_schedule(after, capacity, thrown_away);
        assert!(schedules > 300, "{schedules} schedules are not all, after {after}");
    }
}
