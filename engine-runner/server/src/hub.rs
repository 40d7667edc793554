//! Hands a turn's events to those who follow it. The turn never waits for a reader.
//!
//! A subscription is registered in the same step in which the last number and the unfinished text are read: what lies
//! up to that number comes from the journal, what comes after it through the queue, so nothing is missed or doubled.

use std::{
    collections::{BTreeMap, VecDeque},
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use roundhouse_proto::engine::v1::{
    NumberedEvent, Partial, PartialReset, StreamEventsResponse, event_body::Kind,
    stream_events_response::Item,
};
use tokio::sync::Notify;

/// Unfinished text of one item kept for newcomers, in bytes.
pub(crate) const PARTIAL_LIMIT: usize = 1024 * 1024;

/// Items that may wait for one reader.
const QUEUE_ITEMS: usize = 4096;

/// Bytes that may wait for one reader: a few full gRPC windows.
const QUEUE_BYTES: usize = 8 * 1024 * 1024;

/// Unfinished text is merged up to this many bytes per message.
const MERGE_BYTES: usize = 64 * 1024;

/// Unfinished items kept for newcomers at most; a turn has few at a time.
const PARTIAL_ITEMS: usize = 256;

#[derive(Debug)]
struct Unfinished {
    reasoning: bool,
    text: String,
    /// Bytes so far, also those that were not kept.
    length: u64,
}

#[derive(Debug, Default)]
struct State {
    last: u64,
    ended: bool,
    unfinished: BTreeMap<String, Unfinished>,
    readers: Vec<Arc<Queue>>,
}

/// What a reader's queue is in the end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    Open,
    /// The terminal event is in the queue, or was replayed.
    Ended,
    /// It overflowed.
    Slow,
}

#[derive(Debug)]
struct QueueState {
    items: VecDeque<(Item, usize)>,
    bytes: usize,
    fate: Fate,
    partials: bool,
}

#[derive(Debug)]
struct Queue {
    state: Mutex<QueueState>,
    wake: Notify,
}

/// One turn's events.
#[derive(Debug)]
pub struct Hub {
    journal: PathBuf,
    state: Mutex<State>,
    changed: Notify,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn weight(item: &Item) -> usize {
    use prost::Message as _;
    64 + match item {
        Item::Event(event) => event.encoded_len(),
        Item::Partial(partial) => partial.text.len(),
        Item::PartialReset(_) => 0,
    }
}

impl Queue {
    fn push(&self, item: Item) {
        let mut state = lock(&self.state);
        if state.fate == Fate::Slow {
            return;
        }
        if let Item::Partial(partial) = &item
            && let Some((Item::Partial(last), size)) = state.items.back_mut()
        {
            let contiguous = last.offset + last.text.len() as u64 == partial.offset;
            if last.item_id == partial.item_id
                && contiguous
                && last.text.len() + partial.text.len() <= MERGE_BYTES
            {
                last.text.push_str(&partial.text);
                *size += partial.text.len();
                state.bytes += partial.text.len();
                return;
            }
        }
        let size = weight(&item);
        if state.items.len() >= QUEUE_ITEMS || state.bytes + size > QUEUE_BYTES {
            state.fate = Fate::Slow;
            state.items.clear();
            state.bytes = 0;
        } else {
            state.bytes += size;
            state.items.push_back((item, size));
        }
        drop(state);
        self.wake.notify_one();
    }

    fn end(&self) {
        let mut state = lock(&self.state);
        if state.fate == Fate::Open {
            state.fate = Fate::Ended;
        }
        drop(state);
        self.wake.notify_one();
    }
}

/// What a reader gets next.
#[derive(Debug)]
pub enum Next {
    /// An item.
    Item(Box<Item>),
    /// The terminal event was handed over.
    Ended,
    /// The reader was too slow and has missed something.
    Slow,
}

/// One reader. Dropping it ends the subscription.
#[derive(Debug)]
pub struct Subscription {
    hub: Arc<Hub>,
    queue: Arc<Queue>,
    /// The last number at the registration: up to it the journal is to be read.
    pub upto: u64,
    /// Unfinished text at the registration, each from offset 0.
    pub snapshot: Vec<Partial>,
    /// Whether the turn had ended already.
    pub ended: bool,
}

impl Subscription {
    /// The next item after [`Subscription::upto`]. Cancel safe.
    pub async fn next(&mut self) -> Next {
        loop {
            {
                let mut state = lock(&self.queue.state);
                if let Some((item, size)) = state.items.pop_front() {
                    state.bytes -= size;
                    return Next::Item(Box::new(item));
                }
                match state.fate {
                    Fate::Open => {}
                    Fate::Ended => return Next::Ended,
                    Fate::Slow => return Next::Slow,
                }
            }
            self.queue.wake.notified().await;
        }
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        lock(&self.hub.state).readers.retain(|queue| !Arc::ptr_eq(queue, &self.queue));
    }
}

impl Hub {
    /// A hub over a journal that holds numbers up to `last`.
    #[must_use]
    pub fn new(journal: PathBuf, last: u64, ended: bool) -> Arc<Self> {
        Arc::new(Self {
            journal,
            state: Mutex::new(State { last, ended, ..State::default() }),
            changed: Notify::new(),
        })
    }

    /// The journal.
    #[must_use]
    pub fn journal(&self) -> &std::path::Path {
        &self.journal
    }

    /// The last number.
    #[must_use]
    pub fn last(&self) -> u64 {
        lock(&self.state).last
    }

    /// Whether the terminal event is in the journal.
    #[must_use]
    pub fn ended(&self) -> bool {
        lock(&self.state).ended
    }

    /// Waits until the turn has ended. Cancel safe.
    pub async fn until_ended(&self) {
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            if self.ended() {
                return;
            }
            changed.await;
        }
    }

    /// Publishes an event that is in the journal.
    pub fn event(&self, event: &NumberedEvent) {
        let mut state = lock(&self.state);
        state.last = state.last.max(event.number);
        let kind = event.body.as_ref().and_then(|body| body.kind.as_ref());
        match kind {
            Some(Kind::Text(text)) => {
                state.unfinished.remove(&text.item_id);
            }
            Some(Kind::Reasoning(text)) => {
                state.unfinished.remove(&text.item_id);
            }
            _ => {}
        }
        let terminal = matches!(kind, Some(Kind::Terminal(_)));
        for queue in &state.readers {
            queue.push(Item::Event(event.clone()));
            if terminal {
                queue.end();
            }
        }
        if terminal {
            state.ended = true;
            state.unfinished.clear();
            state.readers.clear();
            self.changed.notify_waiters();
        }
    }

    /// Passes on unfinished text.
    pub fn partial(&self, partial: Partial) {
        let mut state = lock(&self.state);
        if state.unfinished.len() < PARTIAL_ITEMS || state.unfinished.contains_key(&partial.item_id) {
            let item = state.unfinished.entry(partial.item_id.clone()).or_insert_with(|| Unfinished {
                reasoning: partial.reasoning,
                text: String::new(),
                length: 0,
            });
            let end = partial.offset + partial.text.len() as u64;
            if partial.offset == 0 && item.length > 0 {
                item.text.clear();
                item.length = 0;
            }
            if partial.offset == item.length {
                if item.length == item.text.len() as u64 {
                    let room = PARTIAL_LIMIT - item.text.len().min(PARTIAL_LIMIT);
                    item.text.push_str(cut(&partial.text, room));
                }
                item.length = end;
            }
        }
        for queue in &state.readers {
            if lock(&queue.state).partials {
                queue.push(Item::Partial(partial.clone()));
            }
        }
    }

    /// Says that unfinished text was thrown away.
    pub fn reset(&self, item_id: String) {
        let mut state = lock(&self.state);
        state.unfinished.remove(&item_id);
        for queue in &state.readers {
            if lock(&queue.state).partials {
                queue.push(Item::PartialReset(PartialReset { item_id: item_id.clone() }));
            }
        }
    }

    /// Registers a reader.
    #[must_use]
    pub fn subscribe(self: &Arc<Self>, partials: bool) -> Subscription {
        let mut state = lock(&self.state);
        let queue = Arc::new(Queue {
            state: Mutex::new(QueueState {
                items: VecDeque::new(),
                bytes: 0,
                fate: if state.ended { Fate::Ended } else { Fate::Open },
                partials,
            }),
            wake: Notify::new(),
        });
        let snapshot = if partials {
            state
                .unfinished
                .iter()
                .map(|(item_id, item)| Partial {
                    item_id: item_id.clone(),
                    offset: 0,
                    text: item.text.clone(),
                    reasoning: item.reasoning,
                    truncated: (item.text.len() as u64) < item.length,
                })
                .collect()
        } else {
            Vec::new()
        };
        if !state.ended {
            state.readers.push(Arc::clone(&queue));
        }
        Subscription { hub: Arc::clone(self), queue, upto: state.last, snapshot, ended: state.ended }
    }
}

/// The longest beginning of `text` within `limit` bytes that ends on a character boundary.
fn cut(text: &str, limit: usize) -> &str {
    let mut end = text.len().min(limit);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

/// An item as a message of the stream.
#[must_use]
pub(crate) fn response(item: Item) -> StreamEventsResponse {
    StreamEventsResponse { item: Some(item) }
}

#[cfg(test)]
mod tests {
    use roundhouse_proto::engine::v1::{EventBody, TerminalEvent, TextEvent};

    use super::*;

    fn event(number: u64, kind: Kind) -> NumberedEvent {
        NumberedEvent { number, at: None, body: Some(EventBody { kind: Some(kind) }) }
    }

    fn text(number: u64, item: &str) -> NumberedEvent {
        event(number, Kind::Text(TextEvent { item_id: item.into(), ..TextEvent::default() }))
    }

    fn partial(item: &str, offset: u64, text: &str) -> Partial {
        Partial { item_id: item.into(), offset, text: text.into(), ..Partial::default() }
    }

    #[tokio::test]
    async fn snapshot_and_registration_are_one_step() {
        let hub = Hub::new(PathBuf::new(), 0, false);
        hub.event(&text(1, "a"));
        hub.partial(partial("b", 0, "gr"));
        hub.partial(partial("b", 2, "ü"));
        let mut reader = hub.subscribe(true);
        assert_eq!(reader.upto, 1);
        assert_eq!(reader.snapshot, [partial("b", 0, "grü")]);
        hub.partial(partial("b", 4, "n"));
        hub.partial(partial("b", 5, "!"));
        hub.event(&text(2, "b"));
        hub.event(&event(3, Kind::Terminal(TerminalEvent::default())));
        let Next::Item(item) = reader.next().await else { panic!() };
        assert_eq!(*item, Item::Partial(partial("b", 4, "n!")));
        let Next::Item(item) = reader.next().await else { panic!() };
        assert!(matches!(*item, Item::Event(e) if e.number == 2));
        let Next::Item(item) = reader.next().await else { panic!() };
        assert!(matches!(*item, Item::Event(e) if e.number == 3));
        assert!(matches!(reader.next().await, Next::Ended));
        let late = hub.subscribe(true);
        assert!(late.ended && late.snapshot.is_empty() && late.upto == 3);
        hub.until_ended().await;
    }

    #[tokio::test]
    async fn a_slow_reader_is_told_and_costs_bounded_memory() {
        let hub = Hub::new(PathBuf::new(), 0, false);
        let mut slow = hub.subscribe(false);
        for number in 1..=(QUEUE_ITEMS as u64 + 10) {
            hub.event(&text(number, "a"));
        }
        assert!(matches!(slow.next().await, Next::Slow));
        assert_eq!(hub.last(), QUEUE_ITEMS as u64 + 10);
    }

    #[test]
    fn a_reset_forgets_the_text_and_a_snapshot_is_cut_with_a_flag() {
        let hub = Hub::new(PathBuf::new(), 0, false);
        hub.partial(partial("a", 0, "x"));
        hub.reset("a".into());
        assert!(hub.subscribe(true).snapshot.is_empty());
        hub.partial(partial("a", 0, &"é".repeat(PARTIAL_LIMIT / 2)));
        hub.partial(partial("a", PARTIAL_LIMIT as u64, "é"));
        let snapshot = hub.subscribe(true).snapshot.clone();
        assert_eq!((snapshot[0].text.len(), snapshot[0].truncated), (PARTIAL_LIMIT, true));
        drop(hub);
    }

    #[test]
    fn a_dropped_reader_is_forgotten() {
        let hub = Hub::new(PathBuf::new(), 0, false);
        drop(hub.subscribe(true));
        assert!(lock(&hub.state).readers.is_empty());
    }
}
