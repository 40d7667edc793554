//! Tests of the queue.

use proptest::prelude::*;

use super::*;
use crate::turn::{End, TurnInput, next};

fn turn(n: u64) -> TurnId {
    TurnId::parse(format!("trn_{n}")).unwrap()
}

fn waiting(n: u64, state: TurnState) -> Waiting {
    Waiting { turn_id: turn(n), state, order: n, position: None }
}

#[test]
fn a_free_conversation_promotes_and_a_busy_one_lets_wait_up_to_the_limit() {
    assert_eq!(admit(false, 0, 3), Admission::Promote);
    assert_eq!(admit(true, 0, 3), Admission::Wait);
    assert_eq!(admit(true, 2, 3), Admission::Wait);
    assert_eq!(admit(true, 3, 3), Admission::Full);
    assert_eq!(admit(false, 1, 3), Admission::Wait, "nobody jumps the queue");
    assert_eq!(admit(false, 0, 0), Admission::Promote, "without a queue one at a time still goes");
}

#[test]
fn promotion_gives_the_next_epoch_and_position_and_a_retry_keeps_its_place() {
    let counters = Counters { epoch: Epoch(4), position: Position(7) };
    let fresh = promote(turn(1), None, counters);
    assert_eq!((fresh.epoch, fresh.position), (Epoch(5), Position(8)));
    assert_eq!(fresh.counters, Counters { epoch: Epoch(5), position: Position(8) });
    let retry = promote(turn(2), Some(Position(6)), counters);
    assert_eq!((retry.epoch, retry.position), (Epoch(5), Position(6)));
    assert_eq!(retry.counters.position, Position(7), "a retry uses no new place");
}

#[test]
fn s06_the_next_turn_is_promoted_whatever_way_the_one_before_ended() {
    for end in [End::Completed, End::Failed, End::Cancelled, End::Lost] {
        let ended = next(TurnState::Running, TurnInput::End(end)).unwrap();
        let turns = [waiting(1, ended), waiting(3, TurnState::Queued), waiting(2, TurnState::Queued)];
        let promotion = promote_next(&turns, Counters::default()).unwrap();
        assert_eq!(promotion.turn_id, turn(2), "after {end:?}");
    }
    let busy = [waiting(1, TurnState::Cancelling), waiting(2, TurnState::Queued)];
    assert_eq!(promote_next(&busy, Counters::default()), None);
    let gone = [waiting(1, TurnState::Cancelled), waiting(2, TurnState::Completed)];
    assert_eq!(promote_next(&gone, Counters::default()), None);
}

proptest! {
    /// Turns come, end and are promoted in any order: never two owners, epochs rise, positions are contiguous,
    /// and nobody is left behind.
    #[test]
    fn s05_one_owner_at_a_time(steps in prop::collection::vec((any::<bool>(), 0_u8..4), 1..60)) {
        let mut turns: Vec<Waiting> = Vec::new();
        let mut counters = Counters::default();
        let mut places = Vec::new();
        for (send, end) in steps {
            if send {
                turns.push(waiting(turns.len() as u64, TurnState::Queued));
            } else if let Some(owner) = turns.iter_mut().find(|t| t.state.is_active()) {
                let end = [End::Completed, End::Failed, End::Cancelled, End::Lost][usize::from(end)];
                owner.state = next(owner.state, TurnInput::End(end)).unwrap();
            }
            if let Some(promotion) = promote_next(&turns, counters) {
                prop_assert!(promotion.epoch > counters.epoch);
                counters = promotion.counters;
                places.push(promotion.position.0);
                let next_turn = turns.iter_mut().find(|t| t.turn_id == promotion.turn_id).unwrap();
                next_turn.state = next(next_turn.state, TurnInput::Promote).unwrap();
            }
            prop_assert!(turns.iter().filter(|t| t.state.is_active()).count() <= 1);
            let waits = turns.iter().any(|t| t.state == TurnState::Queued);
            prop_assert!(!waits || turns.iter().any(|t| t.state.is_active()), "somebody waits for nobody");
        }
        prop_assert_eq!(&places, &(1..=places.len() as u64).collect::<Vec<_>>());
    }
}
