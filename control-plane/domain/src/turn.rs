//! A turn: one user message worked on by one agent, to one outcome; and the machine that moves it.
//!
//! ```text
//! QUEUED -> DISPATCHING -> RUNNING <-> WAITING_FOR_PERMISSION
//!   |           |             |              |
//!   |           +---------> CANCELLING <-----+
//!   v                         v
//! COMPLETED | FAILED | CANCELLED | LOST          (absorbing)
//! ```

use serde::{Deserialize, Serialize};

use crate::agent_file::{AgentSnapshot, Trigger};
use crate::id::{ConversationId, Epoch, MessageId, SessionId, TurnId, WorkspaceId};
use crate::message::Position;
use crate::outcome::TurnError;
use crate::session::Opening;
use crate::time::Timestamp;
use crate::usage::Usage;

named_enum! {
    /// Where a turn is.
    pub enum TurnState {
        /// Waits for the turns before it in its conversation.
        Queued = "QUEUED",
        /// Promoted: owns the conversation's lock; workspace, agent and session are being arranged.
        Dispatching = "DISPATCHING",
        /// The engine took the message.
        Running = "RUNNING",
        /// The engine waits for somebody to allow or deny something.
        WaitingForPermission = "WAITING_FOR_PERMISSION",
        /// A cancel is stored; the engine is being stopped.
        Cancelling = "CANCELLING",
        /// Ended well.
        Completed = "COMPLETED",
        /// Ended with an error.
        Failed = "FAILED",
        /// Ended because somebody asked for it.
        Cancelled = "CANCELLED",
        /// Nobody can say how it ended.
        Lost = "LOST",
    }
}

impl TurnState {
    /// Whether the turn has ended. Ended turns never change their state again.
    #[must_use]
    pub const fn is_terminal(self) -> bool {
        match self {
            Self::Completed | Self::Failed | Self::Cancelled | Self::Lost => true,
            Self::Queued
            | Self::Dispatching
            | Self::Running
            | Self::WaitingForPermission
            | Self::Cancelling => false,
        }
    }

    /// Whether the turn is past QUEUED and has not ended: it owns its conversation's lock.
    #[must_use]
    pub const fn is_active(self) -> bool {
        !self.is_terminal() && !matches!(self, Self::Queued)
    }
}

/// How a turn is said to have ended, before the machine decides what that makes of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum End {
    /// The engine finished.
    Completed,
    /// Something failed.
    Failed,
    /// It was stopped on request.
    Cancelled,
    /// Its worker is gone and nobody knows.
    Lost,
}

/// What happens to a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum TurnInput {
    /// The turns before it have ended; it becomes the owner of the conversation's lock.
    Promote,
    /// The engine proved that it took a message of this turn.
    Accepted,
    /// The engine asked for a permission.
    PermissionRequested,
    /// A permission was settled.
    PermissionSettled {
        /// How many of this turn's permissions are still open after it.
        still_open: u32,
    },
    /// Somebody asked for the turn to be cancelled.
    CancelRequested,
    /// The turn ended.
    End(End),
}

/// What an input made of a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// The turn is in this state now.
    Moved(TurnState),
    /// Legal, and nothing changes.
    Stayed,
    /// The turn had ended already; late inputs change nothing.
    Absorbed,
}

/// An input that makes no sense in the turn's state. The state is unchanged; log it and count it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a turn that is {state} cannot take {input:?}")]
pub struct IllegalTransition {
    /// The state the turn is in, before and after.
    pub state: TurnState,
    /// What was offered.
    pub input: TurnInput,
}

/// The turn machine.
///
/// Once CANCELLING is stored the turn ends CANCELLED or LOST, whatever the engine did meanwhile. A completion
/// straight from DISPATCHING is legal: it proves that the message was taken.
///
/// # Errors
/// [`IllegalTransition`] for a pair that cannot happen; never a panic.
#[deny(clippy::wildcard_enum_match_arm, clippy::match_wildcard_for_single_variants)]
pub fn step(state: TurnState, input: TurnInput) -> Result<Step, IllegalTransition> {
    use End as E;
    use TurnInput as I;
    use TurnState as S;
    let illegal = Err(IllegalTransition { state, input });
    match (state, input) {
        (S::Queued, I::Promote) => Ok(Step::Moved(S::Dispatching)),
        (S::Queued, I::CancelRequested | I::End(E::Cancelled)) => Ok(Step::Moved(S::Cancelled)),
        (S::Queued, I::End(E::Failed)) => Ok(Step::Moved(S::Failed)),
        (
            S::Queued,
            I::Accepted
            | I::PermissionRequested
            | I::PermissionSettled { still_open: _ }
            | I::End(E::Completed | E::Lost),
        ) => illegal,

        (S::Dispatching, I::Accepted) => Ok(Step::Moved(S::Running)),
        (S::Dispatching, I::PermissionRequested) => Ok(Step::Moved(S::WaitingForPermission)),
        (S::Dispatching, I::Promote | I::PermissionSettled { still_open: _ }) => illegal,

        (S::Running, I::Accepted) => Ok(Step::Stayed),
        (S::Running, I::PermissionRequested) => Ok(Step::Moved(S::WaitingForPermission)),
        (S::Running, I::Promote | I::PermissionSettled { still_open: _ }) => illegal,

        (S::WaitingForPermission, I::Accepted | I::PermissionRequested) => Ok(Step::Stayed),
        (S::WaitingForPermission, I::PermissionSettled { still_open: 0 }) => Ok(Step::Moved(S::Running)),
        (S::WaitingForPermission, I::PermissionSettled { still_open: 1.. }) => Ok(Step::Stayed),
        (S::WaitingForPermission, I::Promote) => illegal,

        (S::Dispatching | S::Running | S::WaitingForPermission, I::CancelRequested) => {
            Ok(Step::Moved(S::Cancelling))
        }
        (S::Dispatching | S::Running | S::WaitingForPermission, I::End(E::Completed)) => {
            Ok(Step::Moved(S::Completed))
        }
        (S::Dispatching | S::Running | S::WaitingForPermission, I::End(E::Failed)) => {
            Ok(Step::Moved(S::Failed))
        }
        (S::Dispatching | S::Running | S::WaitingForPermission, I::End(E::Cancelled)) => {
            Ok(Step::Moved(S::Cancelled))
        }
        (S::Dispatching | S::Running | S::WaitingForPermission, I::End(E::Lost)) => Ok(Step::Moved(S::Lost)),

        (
            S::Cancelling,
            I::Accepted
            | I::PermissionRequested
            | I::PermissionSettled { still_open: _ }
            | I::CancelRequested,
        ) => Ok(Step::Stayed),
        (S::Cancelling, I::End(E::Completed | E::Failed | E::Cancelled)) => Ok(Step::Moved(S::Cancelled)),
        (S::Cancelling, I::End(E::Lost)) => Ok(Step::Moved(S::Lost)),
        (S::Cancelling, I::Promote) => illegal,

        (
            S::Completed | S::Failed | S::Cancelled | S::Lost,
            I::Promote
            | I::Accepted
            | I::PermissionRequested
            | I::PermissionSettled { still_open: _ }
            | I::CancelRequested
            | I::End(E::Completed | E::Failed | E::Cancelled | E::Lost),
        ) => Ok(Step::Absorbed),
    }
}

/// The state after `input`: the same one when it stayed or was absorbed.
///
/// # Errors
/// As [`step`].
pub fn next(state: TurnState, input: TurnInput) -> Result<TurnState, IllegalTransition> {
    Ok(match step(state, input)? {
        Step::Moved(next) => next,
        Step::Stayed | Step::Absorbed => state,
    })
}

/// One turn, as stored.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Turn {
    /// Its id.
    pub id: TurnId,
    /// The conversation it belongs to.
    pub conversation_id: ConversationId,
    /// The user message it works on.
    pub message_id: MessageId,
    /// Where it is.
    pub state: TurnState,
    /// The epoch of the lock it owns or owned; 0 while it was never promoted.
    pub epoch: Epoch,
    /// Its number in the order of promotion over all conversations; unset while never promoted.
    pub promotion: Option<u64>,
    /// The agent that was asked for, or the conversation's last one at the time of promotion. Unset when neither.
    pub agent_name: Option<String>,
    /// The agent file as it was at dispatch. Unset before.
    pub agent: Option<AgentSnapshot>,
    /// The workspace that was asked for, or the conversation's last one. Unset when neither.
    pub workspace_id: Option<WorkspaceId>,
    /// The session it works in. Unset before one was chosen.
    pub session_id: Option<SessionId>,
    /// How that session came to be and what was given to it. Unset before it was opened.
    pub opening: Option<Opening>,
    /// Whether the engine proved that it took the message.
    pub accepted: bool,
    /// The turn this one tries again.
    pub retry_of: Option<TurnId>,
    /// What went wrong; set for FAILED and LOST, and for CANCELLED where there is something to say.
    pub error: Option<TurnError>,
    /// The agent's message with the answer or the interrupted text; unset when there was none.
    pub agent_message_id: Option<MessageId>,
    /// Tokens and cost as far as known.
    pub usage: Usage,
    /// Number of its last stored event; 0 when there is none.
    pub last_seq: u64,
    /// The runner's number of its last stored event; 0 when there is none.
    pub last_number: u64,
    /// The door it came through.
    pub surface: Trigger,
    /// When it was accepted.
    pub create_time: Timestamp,
    /// When it was promoted.
    pub start_time: Option<Timestamp>,
    /// When a cancel was stored.
    pub cancel_time: Option<Timestamp>,
    /// When it ended.
    pub end_time: Option<Timestamp>,
    /// When its runner was told that its end is stored.
    pub acknowledge_time: Option<Timestamp>,
}

/// What decides whether a turn can be tried again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RetryFacts {
    /// The turn's state.
    pub state: TurnState,
    /// Its message's place in the history; none when it was never promoted.
    pub position: Option<Position>,
    /// Whether no other turn of the conversation was promoted after it.
    pub is_last: bool,
}

/// Why a turn cannot be tried again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RetryRefusal {
    /// It has not ended.
    #[error("the turn is {0}; cancel it first")]
    NotEnded(TurnState),
    /// It ended well.
    #[error("the turn completed; send a new message instead")]
    Completed,
    /// A later turn was promoted, or this one never was.
    #[error("a later turn has started since; send the message again")]
    NotLast,
}

/// Whether the turn can be tried again: the last one only, and only when it did not complete.
///
/// # Errors
/// [`RetryRefusal`] says why not.
pub fn check_retry(facts: RetryFacts) -> Result<Position, RetryRefusal> {
    match facts.state {
        TurnState::Completed => Err(RetryRefusal::Completed),
        TurnState::Failed | TurnState::Cancelled | TurnState::Lost => match facts.position {
            Some(position) if facts.is_last => Ok(position),
            Some(_) | None => Err(RetryRefusal::NotLast),
        },
        state @ (TurnState::Queued
        | TurnState::Dispatching
        | TurnState::Running
        | TurnState::WaitingForPermission
        | TurnState::Cancelling) => Err(RetryRefusal::NotEnded(state)),
    }
}

#[cfg(test)]
mod tests;
