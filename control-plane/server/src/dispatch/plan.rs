//! What to do next for a turn: a pure function of what is stored and of what the runner said.
//!
//! The same function drives a turn that was just promoted and one that is found after a restart; a repeat of any step
//! finds the work done. What cannot be told yet is asked for (`Inspect`), never guessed.

use roundhouse_domain::turn::TurnState;

/// What the runner says about a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RunnerView {
    /// It was not asked in this run, and an earlier run may have told it of the turn.
    NotAsked,
    /// No run can have told it of the turn: its session was bound in this one.
    Untold,
    /// It was asked and does not know the turn.
    Unknown,
    /// It knows the turn, and the session was perhaps opened by an earlier run.
    Known,
    /// The session was opened for the turn in this run. No message was sent.
    Opened,
    /// It has the message and the turn has not ended: all else is told by its events.
    HasMessage,
    /// The turn has ended there: its events tell how.
    Ended,
}

/// The session that the turn is bound to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SessionView {
    /// None yet. The runner was never told of the turn.
    None,
    /// One that can be used.
    Active,
    /// One that cannot.
    Unusable,
}

/// All that the next step depends on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Facts {
    /// The turn's state as stored.
    pub(crate) state: TurnState,
    /// Whether it has a workspace.
    pub(crate) workspace: bool,
    /// Whether it holds the workspace's slot, as far as this run knows.
    pub(crate) slot: bool,
    /// Whether the agent's snapshot is stored.
    pub(crate) agent: bool,
    /// Its session.
    pub(crate) session: SessionView,
    /// Whether the engine has proved that it took the message.
    pub(crate) accepted: bool,
    /// Whether the message was on its way to the engine, as far as events and this run tell. A runner that has taken a
    /// message has it on disk before it gives it to the engine, so one that does not know the turn never gave it.
    pub(crate) given: bool,
    /// What the runner says.
    pub(crate) runner: RunnerView,
    /// Whether the runner, asked to cancel the turn, answered that it does not know it.
    pub(crate) cancel_unknown: bool,
}

/// The next step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// It has ended: confirm that to the runner.
    Settle,
    /// It waits for the turns before it: not ours.
    Leave,
    /// End it CANCELLED; nothing runs for it.
    CloseCancelled,
    /// End it LOST: the runner has no trace of what it took.
    CloseLost,
    /// End it FAILED: it has no workspace.
    FailTarget,
    /// Get the workspace.
    TakeSlot,
    /// Read, check and store the agent file.
    ReadAgent,
    /// Bind a session.
    ChooseSession,
    /// Ask the runner what it knows of the turn.
    Inspect,
    /// Put another session in the place of the unusable one.
    Replace,
    /// Open the session for the turn.
    Open,
    /// Give the message to the engine.
    Send,
    /// Follow the turn's events to its end.
    Attach,
    /// Tell the runner to cancel the turn, and wait for its answer.
    Cancel,
}

/// The next step. Total: every combination has one.
pub(crate) fn next(facts: &Facts) -> Step {
    match facts.state {
        TurnState::Queued => Step::Leave,
        TurnState::Completed | TurnState::Failed | TurnState::Cancelled | TurnState::Lost => Step::Settle,
        TurnState::Cancelling => cancelling(facts),
        TurnState::Dispatching | TurnState::Running | TurnState::WaitingForPermission => working(facts),
    }
}

fn cancelling(facts: &Facts) -> Step {
    let took_something = facts.accepted || facts.given;
    match (facts.session, facts.runner) {
        (SessionView::None, _) => Step::CloseCancelled,
        (_, RunnerView::Untold) if !took_something => Step::CloseCancelled,
        (_, RunnerView::NotAsked) => Step::Inspect,
        (_, RunnerView::Known | RunnerView::Opened | RunnerView::HasMessage | RunnerView::Ended) => {
            Step::Attach
        }
        // The runner remembers a turn that it was told to cancel and refuses a late opening of it.
        (_, RunnerView::Unknown) if !facts.cancel_unknown => Step::Cancel,
        (_, RunnerView::Untold | RunnerView::Unknown) if took_something => Step::CloseLost,
        (_, RunnerView::Untold | RunnerView::Unknown) => Step::CloseCancelled,
    }
}

fn working(facts: &Facts) -> Step {
    let arranged = || {
        if !facts.workspace {
            Some(Step::FailTarget)
        } else if !facts.slot {
            Some(Step::TakeSlot)
        } else if !facts.agent {
            Some(Step::ReadAgent)
        } else {
            None
        }
    };
    match (facts.session, facts.runner) {
        (SessionView::None, _) => arranged().unwrap_or(Step::ChooseSession),
        (_, RunnerView::NotAsked) => Step::Inspect,
        (_, RunnerView::Ended) => Step::Attach,
        // The engine lost its session before it took the message; the runner waits for another session.
        (SessionView::Unusable, RunnerView::HasMessage) if !facts.accepted => {
            arranged().unwrap_or(Step::Replace)
        }
        (_, RunnerView::HasMessage) => Step::Attach,
        // What the runner took and has no trace of any more may have acted: it is never sent again on a guess.
        (_, RunnerView::Untold | RunnerView::Unknown) if facts.accepted || facts.given => Step::CloseLost,
        // A message that was accepted cannot be without trace; if the runner says so, its events tell more.
        (_, RunnerView::Known | RunnerView::Opened) if facts.accepted => Step::Attach,
        (SessionView::Unusable, _) => arranged().unwrap_or(Step::Replace),
        (SessionView::Active, RunnerView::Opened) => Step::Send,
        (SessionView::Active, RunnerView::Untold | RunnerView::Unknown | RunnerView::Known) => {
            arranged().unwrap_or(Step::Open)
        }
    }
}

#[cfg(test)]
mod tests;
