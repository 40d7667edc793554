//! Random sequences of intents: whatever comes in whatever order, the invariants hold.

use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::{Config, TestRunner};
use roundhouse_domain::agent_file::Trigger;
use roundhouse_domain::event::{ChangeBody, Effect, EventKind};
use roundhouse_domain::message::Position;
use roundhouse_domain::outcome::Outcome;
use roundhouse_domain::turn::{Turn, TurnState};

use super::Backend;
use super::fixture::{Fixture, cancel, close, error, event, now, own, owner, turn_id};
use crate::command::{AcceptMessage, AppendEvents, RetryTurn};
use crate::error::Error;
use crate::store::Store;

/// How many sequences are tried.
const SEQUENCES: usize = 12;

#[derive(Clone, Debug)]
enum Intent {
    Send,
    Repeat(usize),
    Append {
        turn: usize,
        skip: i8,
        count: u8,
        accept: bool,
    },
    Note {
        turn: usize,
        key: u8,
    },
    Cancel(usize),
    Close {
        turn: usize,
        end: u8,
        text: bool,
    },
    Retry(usize),
    TakeSlot(usize),
    FreeSlot(usize),
    /// Close the store and open it again.
    Reopen,
}

fn intent() -> impl Strategy<Value = Intent> {
    let turn = || 0_usize..12;
    prop_oneof![
        4 => Just(Intent::Send),
        1 => turn().prop_map(Intent::Repeat),
        4 => (turn(), -2_i8..2, 1_u8..4, any::<bool>())
            .prop_map(|(turn, skip, count, accept)| Intent::Append { turn, skip, count, accept }),
        1 => (turn(), 0_u8..2).prop_map(|(turn, key)| Intent::Note { turn, key }),
        2 => turn().prop_map(Intent::Cancel),
        5 => (turn(), 0_u8..4, any::<bool>()).prop_map(|(turn, end, text)| Intent::Close { turn, end, text }),
        2 => turn().prop_map(Intent::Retry),
        1 => turn().prop_map(Intent::TakeSlot),
        1 => turn().prop_map(Intent::FreeSlot),
        1 => Just(Intent::Reopen),
    ]
}

/// What the caller was told: the measure of what must be there.
#[derive(Default)]
struct Told {
    messages: Vec<AcceptMessage>,
    turns: Vec<Turn>,
    answers: usize,
}

/// Conflicts are answers; everything else is a failure of the test.
fn calm<T>(result: crate::Result<T>) -> Option<T> {
    match result {
        Ok(value) => Some(value),
        Err(Error::Conflict(_) | Error::Invalid { .. }) => None,
        Err(other) => panic!("{other}"),
    }
}

/// Positions unique and contiguous, seq contiguous, one owner, nothing lost, nothing moved back.
pub async fn random_intents_keep_the_invariants<B: Backend>(backend: &B) {
    let mut f = Fixture::new(backend).await;
    let mut runner = TestRunner::new(Config::default());
    let strategy = prop::collection::vec(intent(), 1..50);
    for _ in 0..SEQUENCES {
        let intents = strategy.new_tree(&mut runner).unwrap().current();
        f.conversation = super::fixture::new_conversation(&f.store).await;
        let mut told = Told::default();
        for (step, intent) in intents.iter().enumerate() {
            if matches!(intent, Intent::Reopen) {
                f.store.close().await;
                f.store = backend.open().await;
            }
            run(&f, intent, &mut told).await;
            check(&f, &told).await.unwrap_or_else(|e| panic!("after step {step} of {intents:#?}: {e}"));
        }
        // Whatever was left open is closed, so that workspaces are free for the next sequence.
        while let Some(active) = f.store.get_conversation(&f.conversation).await.unwrap().active_turn {
            let turn = f.store.get_turn(&active).await.unwrap();
            f.try_close(&turn, Outcome::Cancelled(None), None).await;
        }
        check(&f, &told).await.unwrap_or_else(|e| panic!("at the end of {intents:#?}: {e}"));
        for turn in &told.turns {
            let turn = f.turn(turn).await;
            assert!(turn.state.is_terminal(), "every turn ends: {turn:?}");
            f.store.free_slot(&owner(&turn)).await.unwrap();
        }
    }
}

async fn run<S: Store>(f: &Fixture<S>, intent: &Intent, told: &mut Told) {
    let known = |n: usize| told.turns.get(n % told.turns.len().max(1)).cloned();
    let fresh = async |n: usize| match known(n) {
        Some(turn) => Some(f.turn(&turn).await),
        None => None,
    };
    match intent {
        Intent::Send => {
            let message = f.message("hello");
            let accepted = f.store.accept_message(message.clone()).await.unwrap();
            told.messages.push(message);
            told.turns.push(accepted.turn);
        }
        Intent::Repeat(n) => {
            if let Some(message) = told.messages.get(n % told.messages.len().max(1)) {
                let repeat = f.store.accept_message(message.clone()).await.unwrap();
                assert!(repeat.repeated);
                assert_eq!(repeat.turn.id, message.turn_id);
            }
        }
        Intent::Append { turn, skip, count, accept } => {
            let Some(turn) = fresh(*turn).await else { return };
            let from = (turn.last_number + 1).saturating_add_signed(i64::from(*skip)).max(1);
            let mut events: Vec<_> =
                (from..from + u64::from(*count)).map(|n| event(n, Effect::None)).collect();
            if *accept {
                events[0].effect = Effect::Accepted { message_id: turn.message_id.clone() };
            }
            calm(f.store.append_events(AppendEvents { owner: owner(&turn), events, time: now() }).await);
        }
        Intent::Note { turn, key } => {
            let Some(turn) = fresh(*turn).await else { return };
            let events = vec![own(&format!("note {key}"))];
            calm(f.store.append_events(AppendEvents { owner: owner(&turn), events, time: now() }).await);
        }
        Intent::Cancel(n) => {
            if let Some(turn) = known(*n) {
                f.store.request_cancel(cancel(&turn.id)).await.unwrap();
            }
        }
        Intent::Close { turn, end, text } => {
            let Some(turn) = fresh(*turn).await else { return };
            let end = match end {
                0 => Outcome::Completed,
                1 => Outcome::Failed(error()),
                2 => Outcome::Cancelled(None),
                _ => Outcome::Lost(error()),
            };
            // A turn that waits has said nothing.
            let text = (*text && turn.state != TurnState::Queued).then_some("answer");
            let closed = calm(f.store.close_turn(close(&turn, end, text)).await);
            if matches!(closed, Some(crate::view::CloseOutcome::Closed(_))) {
                told.answers += usize::from(text.is_some());
            }
        }
        Intent::Retry(n) => {
            let Some(turn) = known(*n) else { return };
            let command = RetryTurn {
                request: None,
                turn_id: turn.id,
                new_turn_id: turn_id(),
                surface: Trigger::Manual,
                time: now(),
            };
            told.turns.extend(calm(f.store.retry_turn(command).await));
        }
        Intent::TakeSlot(n) => {
            if let Some(turn) = fresh(*n).await {
                calm(f.store.take_slot(&owner(&turn), now()).await);
            }
        }
        Intent::Reopen => {}
        Intent::FreeSlot(n) => {
            if let Some(turn) = fresh(*n).await {
                calm(f.store.free_slot(&owner(&turn)).await);
            }
        }
    }
}

/// Says what is broken, if anything.
async fn check<S: Store>(f: &Fixture<S>, told: &Told) -> Result<(), String> {
    let ensure = |holds: bool, what: &str| if holds { Ok(()) } else { Err(what.to_owned()) };
    let messages = f.store.list_messages(&f.conversation, 0, 1_000).await.map_err(|e| e.to_string())?.items;
    let seqs: Vec<_> = messages.iter().map(|m| m.seq).collect();
    ensure(seqs == (1..=seqs.len() as u64).collect::<Vec<_>>(), "message seq has a gap")?;
    let lost = told.messages.iter().any(|sent| !messages.iter().any(|m| m.id == sent.message_id));
    ensure(!lost, "an accepted message is lost")?;
    ensure(
        messages.len() == told.messages.len() + told.answers,
        "a message was doubled or an answer is lost",
    )?;
    let history =
        f.store.history(&f.conversation, Position::START, 1_000).await.map_err(|e| e.to_string())?.items;
    let places: Vec<_> = history.iter().filter_map(|m| m.position).map(|p| p.0).collect();
    ensure(places == (1..=places.len() as u64).collect::<Vec<_>>(), "positions have a gap or a double")?;
    let turns = f.store.list_turns(&f.conversation, None, 1_000).await.map_err(|e| e.to_string())?.items;
    ensure(turns.len() == told.turns.len(), "a turn was lost or doubled")?;
    let active = turns.iter().filter(|t| t.state.is_active()).count();
    let waiting = turns.iter().filter(|t| t.state == TurnState::Queued).count();
    ensure(active <= 1, "two turns own the lock")?;
    ensure(waiting == 0 || active == 1, "turns wait for nobody")?;
    let changes = f.store.changes_after(&f.conversation, 0, 1_000).await.map_err(|e| e.to_string())?;
    let cursors: Vec<_> = changes.items.iter().map(|c| c.cursor).collect();
    let expected: Vec<_> = (1..=changes.newest.min(1_000)).collect();
    ensure(cursors == expected || changes.newest > 1_000, "the change log has a gap")?;
    for turn in &turns {
        let events = f.store.list_events(&turn.id, 0, 1_000).await.map_err(|e| e.to_string())?.items;
        let seqs: Vec<_> = events.iter().map(|e| e.seq).collect();
        ensure(seqs == (1..=turn.last_seq).collect::<Vec<_>>(), "event seq has a gap")?;
        let numbers: Vec<_> = events.iter().filter_map(|e| e.number).collect();
        ensure(
            numbers == (1..=turn.last_number).collect::<Vec<_>>(),
            "event numbers have a gap or a double",
        )?;
        let terminals = events.iter().filter(|e| e.kind == EventKind::Terminal).count();
        ensure(terminals == usize::from(turn.state.is_terminal()), "not exactly one terminal event per end")?;
        let last_is_terminal = events.last().is_some_and(|e| e.kind == EventKind::Terminal);
        ensure(!turn.state.is_terminal() || last_is_terminal, "an event after the end")?;
        for event in &events {
            let listed = changes.items.iter().any(|c| c.body == ChangeBody::Event(event.clone()));
            ensure(listed || changes.newest > 1_000, "an event that followers do not see")?;
        }
    }
    Ok(())
}
