//! A client that follows a conversation whatever happens, and holds the stream to its promises.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use anyhow::{Context as _, bail};
use roundhouse_proto::{
    control::v1::{
        StreamEventsRequest, StreamEventsResponse, TurnEvent, stream_events_response::Item as ProtoItem,
    },
    engine::v1::{TerminalEvent, event_body::Kind},
};
use tokio::task::JoinHandle;

use crate::{Control, wait_for};

/// One item of a stream.
pub type Item = StreamEventsResponse;

#[derive(Debug, Default)]
struct Seen {
    items: Vec<Item>,
    cursors: BTreeSet<String>,
    last_cursor: String,
    last_seq: BTreeMap<String, u64>,
    ended: BTreeSet<String>,
    partials: BTreeMap<(String, String), String>,
    broken: Vec<String>,
    connections: u32,
}

/// Follows a conversation in the background, from its oldest item on.
///
/// It resumes from its last cursor whenever the stream breaks, and checks on the way: no cursor comes twice, events of
/// a turn are numbered without gap and double, nothing of a turn follows its terminal event, and unfinished text fits
/// together. [`check`](Self::check) tells what was broken. Ends with its drop.
#[derive(Debug)]
pub struct Follower {
    seen: Arc<Mutex<Seen>>,
    task: JoinHandle<()>,
}

impl Drop for Follower {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Follower {
    pub(crate) fn start(control: Control, conversation_id: &str) -> Self {
        let seen = Arc::new(Mutex::new(Seen::default()));
        let task = tokio::spawn(follow(control, conversation_id.to_owned(), Arc::clone(&seen)));
        Self { seen, task }
    }

    fn with<T>(&self, look: impl FnOnce(&Seen) -> T) -> T {
        look(&self.seen.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Everything that came, in order, unfinished text excluded.
    #[must_use]
    pub fn items(&self) -> Vec<Item> {
        self.with(|seen| seen.items.clone())
    }

    /// The events of one turn, in order.
    #[must_use]
    pub fn events(&self, turn_id: &str) -> Vec<TurnEvent> {
        self.with(|seen| {
            seen.items
                .iter()
                .filter_map(|item| match &item.item {
                    Some(ProtoItem::TurnEvent(event)) if event.turn_id == turn_id => Some(event.clone()),
                    _ => None,
                })
                .collect()
        })
    }

    /// The bodies of one turn's events, in order.
    #[must_use]
    pub fn kinds(&self, turn_id: &str) -> Vec<Kind> {
        self.events(turn_id).into_iter().filter_map(|event| event.body?.kind).collect()
    }

    /// The last cursor.
    #[must_use]
    pub fn cursor(&self) -> String {
        self.with(|seen| seen.last_cursor.clone())
    }

    /// How often a stream was opened.
    #[must_use]
    pub fn connections(&self) -> u32 {
        self.with(|seen| seen.connections)
    }

    /// The unfinished text of a turn as it stands, all its pieces in a row.
    #[must_use]
    pub fn partial_text(&self, turn_id: &str) -> String {
        self.with(|seen| {
            seen.partials
                .iter()
                .filter(|((turn, _), _)| turn == turn_id)
                .map(|(_, text)| text.as_str())
                .collect()
        })
    }

    /// Waits until an event of this turn satisfies `wanted`, and returns what that found.
    ///
    /// # Errors
    /// Names `what` after `bound`, with what came instead.
    pub async fn wait_event<T>(
        &self,
        turn_id: &str,
        what: &str,
        bound: Duration,
        wanted: impl Fn(&Kind) -> Option<T>,
    ) -> anyhow::Result<T> {
        let waited = wait_for(&format!("turn {turn_id}: {what}"), bound, || async {
            Ok(self.kinds(turn_id).iter().find_map(&wanted))
        })
        .await;
        waited.with_context(|| format!("so far: {:?}; broken: {:?}", self.kinds(turn_id), self.broken()))
    }

    /// Waits for the terminal event of a turn.
    ///
    /// # Errors
    /// If it does not come within `bound`.
    pub async fn wait_terminal(&self, turn_id: &str, bound: Duration) -> anyhow::Result<TerminalEvent> {
        self.wait_event(turn_id, "its terminal event", bound, |kind| match kind {
            Kind::Terminal(terminal) => Some(terminal.clone()),
            _ => None,
        })
        .await
    }

    /// Waits until the unfinished text of a turn contains this.
    ///
    /// # Errors
    /// If it does not within `bound`.
    pub async fn wait_partial(&self, turn_id: &str, text: &str, bound: Duration) -> anyhow::Result<()> {
        let waited = wait_for(&format!("turn {turn_id}: partial text {text:?}"), bound, || async {
            Ok(self.partial_text(turn_id).contains(text).then_some(()))
        })
        .await;
        waited.with_context(|| format!("so far: {:?}; {:?}", self.partial_text(turn_id), self.kinds(turn_id)))
    }

    /// What the stream promised and did not keep.
    #[must_use]
    pub fn broken(&self) -> Vec<String> {
        self.with(|seen| seen.broken.clone())
    }

    /// Fails if the stream broke a promise.
    ///
    /// # Errors
    /// With everything it broke.
    pub fn check(&self) -> anyhow::Result<()> {
        let broken = self.broken();
        if !broken.is_empty() {
            bail!("the stream broke its promises:\n{}", broken.join("\n"));
        }
        Ok(())
    }
}

async fn follow(control: Control, conversation_id: String, seen: Arc<Mutex<Seen>>) {
    loop {
        let after_cursor = {
            let mut seen = seen.lock().unwrap_or_else(PoisonError::into_inner);
            seen.connections += 1;
            // A fresh stream starts unfinished text anew with a snapshot.
            seen.partials.clear();
            seen.last_cursor.clone()
        };
        let request = StreamEventsRequest {
            conversation_id: conversation_id.clone(),
            after_cursor,
            turn_id: String::new(),
            include_partial: true,
            follow: Some(true),
        };
        let outcome = follow_once(&control, request, &seen).await;
        if let Err(status) = outcome {
            use tonic::Code;
            match status.code() {
                // What a restart looks like from outside.
                Code::Unavailable
                | Code::Unknown
                | Code::Cancelled
                | Code::Internal
                | Code::ResourceExhausted => {}
                code => {
                    let mut seen = seen.lock().unwrap_or_else(PoisonError::into_inner);
                    seen.broken.push(format!("StreamEvents answered {code:?}: {}", status.message()));
                    return;
                }
            }
        }
        tokio::time::sleep(Duration::from_millis(30)).await;
    }
}

async fn follow_once(
    control: &Control,
    request: StreamEventsRequest,
    seen: &Mutex<Seen>,
) -> Result<(), tonic::Status> {
    let mut stream = control.conversations().stream_events(request).await?.into_inner();
    while let Some(item) = stream.message().await? {
        seen.lock().unwrap_or_else(PoisonError::into_inner).take(item);
    }
    Ok(())
}

impl Seen {
    fn take(&mut self, item: Item) {
        match &item.item {
            Some(ProtoItem::Partial(partial)) => {
                let Some(piece) = &partial.partial else {
                    self.broken.push("a partial without a body".to_owned());
                    return;
                };
                if !item.cursor.is_empty() {
                    self.broken.push("a partial that moves the cursor".to_owned());
                }
                if self.ended.contains(&partial.turn_id) {
                    self.broken.push(format!("unfinished text of {} after its end", partial.turn_id));
                }
                let offset = usize::try_from(piece.offset).unwrap_or(usize::MAX);
                let text = self.partials.entry((partial.turn_id.clone(), piece.item_id.clone())).or_default();
                if offset > text.len() {
                    self.broken.push(format!(
                        "a gap in the text of {}: {offset} after {}",
                        piece.item_id,
                        text.len()
                    ));
                } else if offset == 0 {
                    text.clone_from(&piece.text);
                } else if let Some(new) = piece.text.get((text.len() - offset).min(piece.text.len())..) {
                    text.push_str(new);
                }
                return;
            }
            Some(ProtoItem::PartialReset(reset)) => {
                let piece = reset.reset.clone().unwrap_or_default().item_id;
                self.partials.remove(&(reset.turn_id.clone(), piece));
                return;
            }
            Some(ProtoItem::TurnEvent(event)) => self.take_event(&event.clone()),
            Some(
                ProtoItem::Message(_) | ProtoItem::Turn(_) | ProtoItem::Session(_) | ProtoItem::Summary(_),
            ) => {}
            None => self.broken.push("an item without content".to_owned()),
        }
        if item.cursor.is_empty() {
            self.broken.push(format!("a stored item without a cursor: {:?}", item.item));
        } else if !self.cursors.insert(item.cursor.clone()) {
            self.broken.push(format!("cursor {} twice: {:?}", item.cursor, item.item));
        }
        self.last_cursor.clone_from(&item.cursor);
        self.items.push(item);
    }

    fn take_event(&mut self, event: &TurnEvent) {
        let last = self.last_seq.entry(event.turn_id.clone()).or_default();
        if event.seq != *last + 1 {
            self.broken.push(format!("event {} of {} came after {last}", event.seq, event.turn_id));
        }
        *last = event.seq;
        if self.ended.contains(&event.turn_id) {
            self.broken.push(format!("event {} of {} after its terminal event", event.seq, event.turn_id));
        }
        match event.body.as_ref().and_then(|body| body.kind.as_ref()) {
            Some(Kind::Terminal(_)) => {
                self.ended.insert(event.turn_id.clone());
            }
            Some(_) => {}
            None => self.broken.push(format!("event {} of {} without a body", event.seq, event.turn_id)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use roundhouse_proto::{
        control::v1::TurnPartial,
        engine::v1::{EventBody, NoticeEvent, Partial},
    };

    fn event(cursor: &str, seq: u64, kind: Kind) -> Item {
        let body = Some(EventBody { kind: Some(kind) });
        let event = TurnEvent { turn_id: "trn_a".to_owned(), seq, body };
        Item { cursor: cursor.to_owned(), at: None, item: Some(ProtoItem::TurnEvent(event)) }
    }

    fn notice() -> Kind {
        Kind::Notice(NoticeEvent::default())
    }

    fn partial(offset: u64, text: &str) -> Item {
        let partial =
            Partial { item_id: "i".to_owned(), offset, text: text.to_owned(), ..Partial::default() };
        let partial = TurnPartial { turn_id: "trn_a".to_owned(), partial: Some(partial) };
        Item { cursor: String::new(), at: None, item: Some(ProtoItem::Partial(partial)) }
    }

    #[test]
    fn a_good_stream_breaks_nothing() {
        let mut seen = Seen::default();
        for item in [event("a", 1, notice()), partial(0, "he"), partial(2, "llo"), partial(1, "ello you")] {
            seen.take(item);
        }
        seen.take(event("b", 2, Kind::Terminal(TerminalEvent::default())));
        assert_eq!(seen.broken, Vec::<String>::new());
        assert_eq!(seen.partials.values().next().unwrap(), "hello you");
        assert_eq!(seen.last_cursor, "b");
    }

    #[test]
    fn a_gap_a_double_a_late_event_and_a_hole_in_the_text_are_each_seen() {
        let mut seen = Seen::default();
        seen.take(event("a", 1, notice()));
        seen.take(event("b", 3, notice()));
        assert_eq!(seen.broken.len(), 1, "a gap: {:?}", seen.broken);
        seen.take(event("b", 4, notice()));
        assert_eq!(seen.broken.len(), 2, "a cursor twice: {:?}", seen.broken);
        seen.take(partial(5, "x"));
        assert_eq!(seen.broken.len(), 3, "a hole: {:?}", seen.broken);
        seen.take(event("c", 5, Kind::Terminal(TerminalEvent::default())));
        seen.take(event("d", 6, notice()));
        assert_eq!(seen.broken.len(), 4, "after the end: {:?}", seen.broken);
    }
}
