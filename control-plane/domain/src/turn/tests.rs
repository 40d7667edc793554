//! Tests of the turn machine.

use proptest::prelude::*;

use super::*;

const ENDS: [End; 4] = [End::Completed, End::Failed, End::Cancelled, End::Lost];

fn inputs() -> Vec<TurnInput> {
    let mut all = vec![
        TurnInput::Promote,
        TurnInput::Accepted,
        TurnInput::PermissionRequested,
        TurnInput::PermissionSettled { still_open: 0 },
        TurnInput::PermissionSettled { still_open: 2 },
        TurnInput::CancelRequested,
    ];
    all.extend(ENDS.map(TurnInput::End));
    all
}

fn any_input() -> impl Strategy<Value = TurnInput> {
    proptest::sample::select(inputs())
}

fn any_state() -> impl Strategy<Value = TurnState> {
    proptest::sample::select(TurnState::ALL)
}

/// Inputs in the order they came, applied to a fresh turn; illegal ones change nothing.
fn replay(from: TurnState, inputs: &[TurnInput]) -> TurnState {
    inputs.iter().fold(from, |state, input| next(state, *input).unwrap_or(state))
}

#[test]
fn s07_terminal_states_absorb_every_input() {
    for state in TurnState::ALL.iter().filter(|s| s.is_terminal()) {
        for input in inputs() {
            assert_eq!(step(*state, input), Ok(Step::Absorbed), "{state} {input:?}");
        }
    }
}

#[test]
fn the_table_of_moves_is_this_one() {
    use TurnState as S;
    let mut moves = Vec::new();
    let mut illegal = Vec::new();
    for state in TurnState::ALL {
        for input in inputs() {
            match step(*state, input) {
                Ok(Step::Moved(next)) => moves.push((*state, input, next)),
                Ok(Step::Stayed | Step::Absorbed) => {}
                Err(error) => {
                    assert_eq!((error.state, error.input), (*state, input));
                    illegal.push((*state, input));
                }
            }
        }
    }
    let settled = |still_open| TurnInput::PermissionSettled { still_open };
    let mut expected = vec![
        (S::Queued, TurnInput::Promote, S::Dispatching),
        (S::Queued, TurnInput::CancelRequested, S::Cancelled),
        (S::Queued, TurnInput::End(End::Failed), S::Failed),
        (S::Queued, TurnInput::End(End::Cancelled), S::Cancelled),
        (S::Dispatching, TurnInput::Accepted, S::Running),
        (S::WaitingForPermission, settled(0), S::Running),
        (S::Cancelling, TurnInput::End(End::Completed), S::Cancelled),
        (S::Cancelling, TurnInput::End(End::Failed), S::Cancelled),
        (S::Cancelling, TurnInput::End(End::Cancelled), S::Cancelled),
        (S::Cancelling, TurnInput::End(End::Lost), S::Lost),
    ];
    for state in [S::Dispatching, S::Running] {
        expected.push((state, TurnInput::PermissionRequested, S::WaitingForPermission));
    }
    for state in [S::Dispatching, S::Running, S::WaitingForPermission] {
        expected.push((state, TurnInput::CancelRequested, S::Cancelling));
        expected.push((state, TurnInput::End(End::Completed), S::Completed));
        expected.push((state, TurnInput::End(End::Failed), S::Failed));
        expected.push((state, TurnInput::End(End::Cancelled), S::Cancelled));
        expected.push((state, TurnInput::End(End::Lost), S::Lost));
    }
    let key = |m: &(S, TurnInput, S)| format!("{m:?}");
    moves.sort_by_key(key);
    expected.sort_by_key(key);
    assert_eq!(moves, expected);
    assert_eq!(illegal.len(), 14, "{illegal:?}");
}

#[test]
fn s44_a_second_cancel_changes_nothing() {
    assert_eq!(step(TurnState::Cancelling, TurnInput::CancelRequested), Ok(Step::Stayed));
    assert_eq!(step(TurnState::Cancelled, TurnInput::CancelRequested), Ok(Step::Absorbed));
}

#[test]
fn only_the_last_turn_that_did_not_complete_can_be_retried() {
    let facts = |state, position, is_last| RetryFacts { state, position, is_last };
    let place = Some(Position(3));
    for state in [TurnState::Failed, TurnState::Cancelled, TurnState::Lost] {
        assert_eq!(check_retry(facts(state, place, true)), Ok(Position(3)));
        assert_eq!(check_retry(facts(state, place, false)), Err(RetryRefusal::NotLast));
        assert_eq!(check_retry(facts(state, None, true)), Err(RetryRefusal::NotLast));
    }
    assert_eq!(check_retry(facts(TurnState::Completed, place, true)), Err(RetryRefusal::Completed));
    let running = facts(TurnState::Running, place, true);
    assert_eq!(check_retry(running), Err(RetryRefusal::NotEnded(TurnState::Running)));
}

#[test]
fn names_survive_storage() {
    for state in TurnState::ALL {
        assert_eq!(TurnState::parse(state.as_str()), Some(*state));
        assert_eq!(serde_json::to_string(state).unwrap(), format!("\"{state}\""));
    }
    assert_eq!(TurnState::parse("running"), None);
}

proptest! {
    #[test]
    fn any_sequence_of_inputs_ends_nowhere_strange(state in any_state(), inputs in prop::collection::vec(any_input(), 0..40)) {
        let mut now = state;
        for input in inputs {
            let before = now;
            match step(now, input) {
                Ok(Step::Moved(next)) => {
                    prop_assert_ne!(next, before);
                    prop_assert!(!before.is_terminal());
                    prop_assert_ne!(next, TurnState::Queued, "nothing goes back into the queue");
                    if before == TurnState::Cancelling {
                        prop_assert!(matches!(next, TurnState::Cancelled | TurnState::Lost));
                    }
                    now = next;
                }
                Ok(Step::Stayed) => prop_assert!(!before.is_terminal()),
                Ok(Step::Absorbed) => prop_assert!(before.is_terminal()),
                Err(error) => prop_assert_eq!((error.state, error.input), (before, input)),
            }
        }
    }

    #[test]
    fn s07_an_ended_turn_stays_as_it_is_when_all_comes_again(inputs in prop::collection::vec(any_input(), 0..40)) {
        // As after an end whose answer was lost. That a replay of what is stored equals what was seen live is tested
        // where it is stored: the interleavings of roundhouse-store.
        let ended = replay(TurnState::Queued, &inputs);
        prop_assume!(ended.is_terminal());
        prop_assert_eq!(replay(ended, &inputs), ended);
    }
}
