//! Replay equals live: what happened to the turns of a conversation is read from its stored log alone and given to the
//! domain's machine; that has to come to the states that the log tells and the rows hold, with no illegal step.

use std::collections::{BTreeMap, BTreeSet};

use roundhouse_domain::event::{Change, StoredEvent};
use roundhouse_domain::turn::{End, Turn, TurnInput, next};

use super::*;

/// The text of an event that proves that the engine took its message: effects are not stored with their events.
pub(super) const TOOK: &str = "took";

/// A turn as the log tells of it so far.
struct Folded {
    /// What the machine makes of it.
    state: TurnState,
    /// What the log says it is.
    told: TurnState,
    /// Its permissions that are open, by their id.
    open: BTreeSet<String>,
}

impl Folded {
    /// A turn that waits.
    const NEW: Self = Self { state: TurnState::Queued, told: TurnState::Queued, open: BTreeSet::new() };

    fn take(&mut self, id: &str, input: TurnInput) {
        self.state = next(self.state, input).unwrap_or_else(|error| panic!("{id}: {error}"));
    }

    /// An event, told right after what it did is known.
    fn event(&mut self, event: &StoredEvent) {
        let id = event.turn_id.as_str();
        let text = String::from_utf8(event.payload.clone()).unwrap();
        match event.kind {
            EventKind::Text if text == TOOK => self.take(id, TurnInput::Accepted),
            EventKind::PermissionRequest => {
                assert!(self.open.insert(text), "{id} asks twice");
                self.take(id, TurnInput::PermissionRequested);
            }
            EventKind::PermissionAnswer => {
                assert!(self.open.remove(&text), "{id}: {text} is settled twice");
                let still_open = u32::try_from(self.open.len()).unwrap();
                self.take(id, TurnInput::PermissionSettled { still_open });
            }
            EventKind::Terminal => {
                let end = match TurnState::parse(&text).unwrap() {
                    TurnState::Completed => End::Completed,
                    TurnState::Failed => End::Failed,
                    TurnState::Cancelled => End::Cancelled,
                    TurnState::Lost => End::Lost,
                    other => panic!("{id} ends {other}"),
                };
                assert!(!self.state.is_terminal(), "{id} ends twice");
                self.take(id, TurnInput::End(end));
                // The event is what tells the state; an end that the machine overrules must not be stored.
                self.told = TurnState::parse(&text).unwrap();
                assert_eq!(self.told, self.state, "the end of {id}");
            }
            _ => {}
        }
    }

    /// A fact that says the state. A cancel is an intent of a caller: its fact is all that the log has of it.
    fn fact(&mut self, id: &str, state: TurnState) {
        if state == TurnState::Cancelling {
            self.take(id, TurnInput::CancelRequested);
        }
        assert_ne!(self.told, state, "{id}: only a move is told");
        self.told = state;
        assert_eq!(self.told, self.state, "{id}");
    }
}

/// Folds the log and compares it with the rows.
pub(super) fn check(log: &[Change], rows: &[Turn]) {
    let mut turns = BTreeMap::<String, Folded>::new();
    for change in log {
        match &change.body {
            ChangeBody::Fact(Fact::TurnQueued { turn_id, .. }) => {
                assert!(
                    turns.insert(turn_id.to_string(), Folded::NEW).is_none(),
                    "{turn_id} is queued twice"
                );
            }
            ChangeBody::Fact(Fact::TurnPromoted { turn_id, .. }) => {
                // A turn that need not wait is told first here.
                let turn = turns.entry(turn_id.to_string()).or_insert(Folded::NEW);
                turn.take(turn_id.as_str(), TurnInput::Promote);
                turn.told = turn.state;
            }
            ChangeBody::Fact(Fact::TurnState { turn_id, state }) => {
                turns.get_mut(turn_id.as_str()).unwrap().fact(turn_id.as_str(), *state);
            }
            ChangeBody::Event(event) => {
                let turn = turns.get_mut(event.turn_id.as_str()).unwrap();
                assert_eq!(turn.told, turn.state, "a move of {} is not told", event.turn_id);
                turn.event(event);
            }
            ChangeBody::Fact(_) => {}
        }
    }
    let folded: BTreeMap<_, _> = turns
        .iter()
        .map(|(id, turn)| {
            assert_eq!(turn.told, turn.state, "a move of {id} is not told");
            (id.clone(), turn.state)
        })
        .collect();
    let stored: BTreeMap<_, _> = rows.iter().map(|turn| (turn.id.to_string(), turn.state)).collect();
    assert_eq!(folded, stored, "the log and the rows");
}
