//! The plan over every combination of facts: what may never happen does not.

use super::*;

const STATES: &[TurnState] = TurnState::ALL;
const RUNNERS: [RunnerView; 7] = [
    RunnerView::NotAsked,
    RunnerView::Untold,
    RunnerView::Unknown,
    RunnerView::Known,
    RunnerView::Opened,
    RunnerView::HasMessage,
    RunnerView::Ended,
];
const SESSIONS: [SessionView; 3] = [SessionView::None, SessionView::Active, SessionView::Unusable];

fn fresh() -> Facts {
    Facts {
        state: TurnState::Dispatching,
        workspace: true,
        slot: false,
        agent: false,
        session: SessionView::None,
        accepted: false,
        given: false,
        runner: RunnerView::NotAsked,
        cancel_unknown: false,
    }
}

fn all() -> Vec<Facts> {
    let mut all = Vec::new();
    for &state in STATES {
        for session in SESSIONS {
            for runner in RUNNERS {
                for bits in 0..64_u32 {
                    all.push(Facts {
                        state,
                        session,
                        runner,
                        workspace: bits & 1 != 0,
                        slot: bits & 2 != 0,
                        agent: bits & 4 != 0,
                        accepted: bits & 8 != 0,
                        given: bits & 16 != 0,
                        cancel_unknown: bits & 32 != 0,
                    });
                }
            }
        }
    }
    all
}

#[test]
fn a_fresh_turn_goes_through_every_step_in_order() {
    let mut facts = fresh();
    assert_eq!(next(&facts), Step::TakeSlot);
    facts.slot = true;
    assert_eq!(next(&facts), Step::ReadAgent);
    facts.agent = true;
    assert_eq!(next(&facts), Step::ChooseSession);
    (facts.session, facts.runner) = (SessionView::Active, RunnerView::Untold);
    assert_eq!(next(&facts), Step::Open);
    facts.runner = RunnerView::Opened;
    assert_eq!(next(&facts), Step::Send);
    facts.runner = RunnerView::HasMessage;
    assert_eq!(next(&facts), Step::Attach);
}

#[test]
fn s47_what_may_have_acted_is_never_opened_or_sent_again() {
    for facts in all().into_iter().filter(|f| f.accepted) {
        let step = next(&facts);
        if facts.session != SessionView::None {
            assert!(!matches!(step, Step::Open | Step::Send | Step::Replace), "{step:?} for {facts:?}");
        }
    }
    for facts in all().into_iter().filter(|f| f.given && f.runner == RunnerView::Unknown) {
        let step = next(&facts);
        assert!(facts.session == SessionView::None || !matches!(step, Step::Open | Step::Send), "{step:?}");
    }
}

#[test]
fn s47_a_turn_that_its_runner_has_lost_before_the_message_is_opened_again() {
    let mut facts = Facts { slot: true, agent: true, session: SessionView::Active, ..fresh() };
    facts.runner = RunnerView::Unknown;
    assert_eq!(next(&facts), Step::Open);
    facts.given = true;
    assert_eq!(next(&facts), Step::CloseLost);
}

#[test]
fn nothing_is_opened_or_sent_before_the_runner_was_asked() {
    for facts in all().into_iter().filter(|f| f.runner == RunnerView::NotAsked) {
        assert!(!matches!(next(&facts), Step::Open | Step::Send | Step::Replace), "{facts:?}");
    }
}

#[test]
fn s44_a_cancelled_turn_is_never_opened_or_sent() {
    for facts in all().into_iter().filter(|f| f.state == TurnState::Cancelling) {
        let step = next(&facts);
        assert!(
            matches!(
                step,
                Step::CloseCancelled | Step::CloseLost | Step::Inspect | Step::Attach | Step::Cancel
            ),
            "{step:?} for {facts:?}"
        );
    }
}

#[test]
fn a_turn_is_cancelled_without_its_runner_only_when_that_runner_never_had_it() {
    for facts in all().into_iter().filter(|f| next(f) == Step::CloseCancelled) {
        assert!(
            facts.session == SessionView::None
                || facts.runner == RunnerView::Untold
                || (facts.runner == RunnerView::Unknown && facts.cancel_unknown),
            "{facts:?}"
        );
    }
}

#[test]
fn s7_an_ended_turn_is_only_settled() {
    for facts in all().into_iter().filter(|f| f.state.is_terminal()) {
        assert_eq!(next(&facts), Step::Settle);
    }
}

#[test]
fn nothing_is_opened_without_slot_and_agent() {
    for facts in all().into_iter().filter(|f| matches!(next(f), Step::Open | Step::Replace)) {
        assert!(facts.slot && facts.agent && facts.workspace, "{facts:?}");
    }
}
