//! What the store answers.

use roundhouse_domain::attention::AttentionFacts;
use roundhouse_domain::conflict::Reconciled;
use roundhouse_domain::conversation::Conversation;
use roundhouse_domain::event::{Change, StoredEvent};
use roundhouse_domain::id::TurnId;
use roundhouse_domain::message::Message;
use roundhouse_domain::permission::Permission;
use roundhouse_domain::runner::Runner;
use roundhouse_domain::session::Session;
use roundhouse_domain::turn::{Turn, TurnState};
use roundhouse_domain::workspace::{SlotHolder, Workspace};
use serde::{Deserialize, Serialize};

/// Some of many, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Page<T> {
    /// The items; fewer than asked for when the page reached 1 MiB.
    pub items: Vec<T>,
    /// Whether there are more after the last item.
    pub more: bool,
}

/// A conversation that was created or found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Created {
    /// The conversation.
    pub conversation: Conversation,
    /// Whether this call (or the first one of its request id) made it.
    pub created: bool,
}

/// A conversation with what people want to see in a list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConversationView {
    /// The conversation.
    pub conversation: Conversation,
    /// The turn that owns the lock, if any.
    pub active_turn: Option<TurnId>,
    /// How many turns wait.
    pub waiting: u32,
    /// What attention is computed from.
    pub facts: AttentionFacts,
}

/// A message that was accepted, now or before.
#[derive(Clone, Debug, PartialEq)]
pub struct Accepted {
    /// The message.
    pub message: Message,
    /// Its turn as it is now.
    pub turn: Turn,
    /// Whether an earlier call with this request id had stored it.
    pub repeated: bool,
}

/// What a request to cancel did.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum CancelOutcome {
    /// The turn is CANCELLING: stop what was started. Also when it was so before.
    Cancelling,
    /// The turn still waited and has ended CANCELLED.
    CancelledWaiting,
    /// The turn had ended; nothing changed.
    AlreadyEnded(TurnState),
}

/// All that a dispatcher needs to know of a turn.
#[derive(Clone, Debug, PartialEq)]
pub struct Dispatch {
    /// The turn.
    pub turn: Turn,
    /// Its conversation.
    pub conversation: Conversation,
    /// Its message, with its position.
    pub message: Message,
    /// Its workspace; unset when neither the call nor the conversation named one.
    pub workspace: Option<Workspace>,
    /// The runner of the workspace.
    pub runner: Option<Runner>,
    /// Every session of the conversation in the workspace, also unusable ones, the last used first.
    pub sessions: Vec<Session>,
    /// Whether the slot of its workspace is the turn's, or could be taken by it now.
    pub slot_free: bool,
}

/// What became of a turn's wish for its workspace's slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SlotOutcome {
    /// The turn has it, now or since before.
    Taken,
    /// Another turn has it, or a parent's or child's.
    Held(SlotHolder),
    /// A turn that was promoted earlier comes first.
    Behind(TurnId),
}

/// What became of an arrangement.
#[derive(Clone, Debug, PartialEq)]
pub enum ArrangeOutcome {
    /// All of it is stored: the turn with its agent, and its session.
    Arranged(Box<(Turn, Session)>),
    /// The slot is not to be had, for the reason told; nothing is stored.
    Waits(SlotOutcome),
}

/// What was appended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Appended {
    /// The events that were new, as stored, in order. Repeated ones are left out.
    pub stored: Vec<StoredEvent>,
    /// The runner's number of the turn's last stored event: ask for what comes after it.
    pub last_number: u64,
    /// The turn's state after it.
    pub state: TurnState,
    /// Inputs that made no sense in the turn's state. The events are stored all the same; log and count these.
    pub illegal: Vec<roundhouse_domain::turn::IllegalTransition>,
}

/// What closing a turn did.
#[derive(Clone, Debug, PartialEq)]
pub enum CloseOutcome {
    /// It is closed.
    Closed(Box<Closed>),
    /// The turn had ended before; nothing changed. The turn as it ended.
    AlreadyEnded(Box<Turn>),
    /// The turn is being cancelled, so it must end in this state, and the terminal event has to say so. Nothing
    /// changed: close it again with that outcome and event.
    Overruled(TurnState),
}

/// A turn that was closed.
#[derive(Clone, Debug, PartialEq)]
pub struct Closed {
    /// The turn as it ended.
    pub turn: Turn,
    /// The events that were new.
    pub stored: Vec<StoredEvent>,
    /// The agent's message.
    pub agent_message: Option<Message>,
    /// The turn that was promoted in its place.
    pub promoted: Option<Turn>,
}

/// What became of an answer to a permission.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum AnswerOutcome {
    /// It is the first one: it is stored and told to the runner.
    Recorded(Permission),
    /// Somebody had answered before; that answer stands.
    AnsweredBefore(Permission),
    /// The permission is settled.
    Settled(Permission),
}

/// A registered runner.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Registered {
    /// The runner.
    pub runner: Runner,
    /// What its claims made of turns.
    pub reconciled: Reconciled,
}

/// A workspace and who has its slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkspaceView {
    /// The workspace.
    pub workspace: Workspace,
    /// Who has its slot, if anybody; parents and children are not looked at.
    pub holder: Option<SlotHolder>,
    /// How many promoted turns of this workspace wait for the slot.
    pub waiting: u32,
}

/// What freeing a workspace did.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FreeOutcome {
    /// It is free now.
    Freed,
    /// Nobody held it.
    WasFree,
}

/// Changes of a conversation after a cursor value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Changes {
    /// The changes, in order; empty when there are none.
    pub items: Vec<Change>,
    /// The conversation's newest cursor value in the same snapshot.
    pub newest: u64,
}
