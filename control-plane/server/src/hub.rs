//! What is told live, from memory: that something was stored, and text that is not finished.
//!
//! Signals are hints only: a follower reads the store and loses nothing when a hint is lost. Unfinished text is kept
//! here per item, whole up to a limit, and a subscriber remembers how much of it was handed over. So there is no queue
//! that could overflow: what a slow subscriber missed is merged into its next piece, and a snapshot is what a
//! subscriber gets that was handed nothing yet.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use roundhouse_domain::id::{ConversationId, TurnId};
use roundhouse_proto::engine::v1::{Partial, PartialReset};
use tokio::sync::watch;

/// Most bytes of unfinished text that are kept of one item.
const MAX_ITEM_BYTES: usize = 1024 * 1024;
/// Most unfinished items that are kept of one turn. An engine writes a few at a time.
const MAX_ITEMS: usize = 64;

/// The hub of all conversations.
#[derive(Debug, Default)]
pub(crate) struct Hub {
    conversations: Mutex<HashMap<ConversationId, Topic>>,
}

/// One conversation that somebody follows or that has unfinished text.
#[derive(Debug)]
struct Topic {
    /// Counts what happened; its value means nothing.
    changes: watch::Sender<u64>,
    items: Vec<Item>,
    /// How many items and resets there were: what a subscriber was given belongs to one of them.
    generations: u32,
}

/// Unfinished text.
#[derive(Clone, Debug)]
struct Item {
    turn_id: TurnId,
    item_id: String,
    reasoning: bool,
    /// Another one when the engine throws the text away, or begins an item again under the id of a finished one.
    generation: u32,
    text: String,
    truncated: bool,
}

/// One piece for a subscriber.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Piece {
    /// Text.
    Partial(TurnId, Partial),
    /// What came for this item is void.
    Reset(TurnId, PartialReset),
}

/// Somebody who follows a conversation.
#[derive(Debug)]
pub(crate) struct Subscription {
    hub: Arc<Hub>,
    conversation: ConversationId,
    changes: watch::Receiver<u64>,
    /// What was handed over: generation and bytes.
    given: HashMap<(TurnId, String), (u32, usize)>,
}

impl Hub {
    fn topics(&self) -> MutexGuard<'_, HashMap<ConversationId, Topic>> {
        // Every section below leaves the map whole, so a panic elsewhere does not spoil it.
        self.conversations.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Follows a conversation from now on.
    pub(crate) fn subscribe(self: &Arc<Self>, conversation: &ConversationId) -> Subscription {
        let mut topics = self.topics();
        let topic = topics.entry(conversation.clone()).or_insert_with(Topic::new);
        Subscription {
            hub: Arc::clone(self),
            conversation: conversation.clone(),
            changes: topic.changes.subscribe(),
            given: HashMap::new(),
        }
    }

    /// Says that something of a conversation was stored.
    pub(crate) fn stored(&self, conversation: &ConversationId) {
        if let Some(topic) = self.topics().get(conversation) {
            topic.touch();
        }
    }

    /// Takes a piece of unfinished text. A piece that is known already, or that leaves a gap, changes nothing: the
    /// stored item brings the whole.
    pub(crate) fn partial(&self, conversation: &ConversationId, turn: &TurnId, partial: &Partial) {
        let mut topics = self.topics();
        let topic = topics.entry(conversation.clone()).or_insert_with(Topic::new);
        let index = match topic.find(turn, &partial.item_id) {
            Some(index) => index,
            None if topic.items.len() < MAX_ITEMS => {
                let generation = topic.generation();
                topic.items.push(Item {
                    turn_id: turn.clone(),
                    item_id: partial.item_id.clone(),
                    reasoning: partial.reasoning,
                    generation,
                    text: String::new(),
                    truncated: false,
                });
                topic.items.len() - 1
            }
            None => return,
        };
        // A snapshot tells what is true now: what it contradicts was thrown away while nobody listened to the runner.
        if topic.items.get(index).is_some_and(|item| item.contradicts(partial)) {
            topic.reset(index);
        }
        if let Some(item) = topic.items.get_mut(index)
            && item.take(partial)
        {
            topic.touch();
        }
    }

    /// The engine threw an item's text away.
    pub(crate) fn reset(&self, conversation: &ConversationId, turn: &TurnId, item_id: &str) {
        let mut topics = self.topics();
        if let Some(topic) = topics.get_mut(conversation)
            && let Some(index) = topic.find(turn, item_id)
        {
            topic.reset(index);
            topic.touch();
        }
    }

    /// Forgets an item that is about to be stored whole.
    pub(crate) fn finish(&self, conversation: &ConversationId, turn: &TurnId, item_id: &str) {
        if let Some(topic) = self.topics().get_mut(conversation) {
            topic.items.retain(|item| !(item.turn_id == *turn && item.item_id == item_id));
        }
    }

    /// Forgets all of a turn that has ended.
    pub(crate) fn end(&self, conversation: &ConversationId, turn: &TurnId) {
        let mut topics = self.topics();
        if let Some(topic) = topics.get_mut(conversation) {
            topic.items.retain(|item| item.turn_id != *turn);
            topic.touch();
            if topic.idle() {
                topics.remove(conversation);
            }
        }
    }
}

impl Topic {
    fn new() -> Self {
        Self { changes: watch::Sender::new(0), items: Vec::new(), generations: 0 }
    }

    /// A number that no item here had.
    fn generation(&mut self) -> u32 {
        self.generations = self.generations.wrapping_add(1);
        self.generations
    }

    /// Throws an item's text away.
    fn reset(&mut self, index: usize) {
        let generation = self.generation();
        if let Some(item) = self.items.get_mut(index) {
            item.generation = generation;
            item.text.clear();
            item.truncated = false;
        }
    }

    fn touch(&self) {
        self.changes.send_modify(|count| *count = count.wrapping_add(1));
    }

    fn find(&self, turn: &TurnId, item_id: &str) -> Option<usize> {
        self.items.iter().position(|item| item.turn_id == *turn && item.item_id == item_id)
    }

    fn idle(&self) -> bool {
        self.items.is_empty() && self.changes.receiver_count() == 0
    }
}

impl Item {
    /// Whether a text from the item's beginning is another one than what is known.
    fn contradicts(&self, partial: &Partial) -> bool {
        partial.offset == 0 && !self.text.starts_with(&partial.text) && !partial.text.starts_with(&self.text)
    }

    /// Whether the piece brought anything.
    fn take(&mut self, partial: &Partial) -> bool {
        let (Ok(offset), have) = (usize::try_from(partial.offset), self.text.len()) else {
            return false;
        };
        if self.truncated || offset > have {
            return false;
        }
        // What overlaps is known. A snapshot that is shorter than what is known says nothing new either.
        let Some(new) = partial.text.get(have - offset..).filter(|new| !new.is_empty()) else {
            return false;
        };
        let (fits, cut) = roundhouse_domain::limits::cut(new, MAX_ITEM_BYTES.saturating_sub(have));
        self.text.push_str(fits);
        self.truncated = cut || partial.truncated;
        true
    }
}

impl Subscription {
    /// Waits until something may have changed. Safe to drop at any time.
    pub(crate) async fn changed(&mut self) {
        // The hub keeps the sender while there is a subscription, so an error cannot come; if it did, the caller's
        // own timer would go on.
        if self.changes.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    /// Marks everything up to now as seen, so that [`Self::changed`] waits for what comes. To be called before the
    /// store is read.
    pub(crate) fn mark_seen(&mut self) {
        self.changes.mark_unchanged();
        let _ = self.changes.borrow_and_update();
    }

    /// What is new of unfinished text since the last call; for the first call a snapshot.
    pub(crate) fn pieces(&mut self, only: Option<&TurnId>) -> Vec<Piece> {
        let topics = self.hub.topics();
        let Some(topic) = topics.get(&self.conversation) else { return Vec::new() };
        let mut pieces = Vec::new();
        self.given.retain(|(turn, item), _| topic.find(turn, item).is_some());
        for item in topic.items.iter().filter(|item| only.is_none_or(|turn| item.turn_id == *turn)) {
            let key = (item.turn_id.clone(), item.item_id.clone());
            let (generation, mut sent) = self.given.get(&key).copied().unwrap_or((item.generation, 0));
            if generation != item.generation {
                let reset = PartialReset { item_id: item.item_id.clone() };
                pieces.push(Piece::Reset(item.turn_id.clone(), reset));
                sent = 0;
            }
            if let Some(text) = item.text.get(sent..).filter(|text| !text.is_empty()) {
                pieces.push(Piece::Partial(
                    item.turn_id.clone(),
                    Partial {
                        item_id: item.item_id.clone(),
                        offset: sent as u64,
                        text: text.to_owned(),
                        reasoning: item.reasoning,
                        truncated: item.truncated,
                    },
                ));
            }
            self.given.insert(key, (item.generation, item.text.len()));
        }
        pieces
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        let mut topics = self.hub.topics();
        // This subscription's own receiver still counts.
        if topics
            .get(&self.conversation)
            .is_some_and(|topic| topic.items.is_empty() && topic.changes.receiver_count() <= 1)
        {
            topics.remove(&self.conversation);
        }
    }
}

#[cfg(test)]
mod interleavings;
#[cfg(test)]
mod tests;
