//! What the store is asked to do: one struct per intent that has more than two parts.
//!
//! Ids and times are the caller's, so that a call can be repeated word for word.

use roundhouse_domain::agent_file::AgentSnapshot;
use roundhouse_domain::agent_file::Trigger;
use roundhouse_domain::conversation::ExternalId;
use roundhouse_domain::event::NewEvent;
use roundhouse_domain::id::{
    ConversationId, Epoch, MessageId, RequestId, RunnerId, SessionId, TurnId, WorkspaceId,
};
use roundhouse_domain::message::Position;
use roundhouse_domain::outcome::{Outcome, TurnError};
use roundhouse_domain::permission::Decision;
use roundhouse_domain::runner::{RunnerClaims, RunnerInfo};
use roundhouse_domain::session::{NativeRef, Opening};
use roundhouse_domain::time::Timestamp;
use roundhouse_domain::usage::Usage;

/// What makes a client's call repeatable: same id and same body give the first answer, in every state; same id
/// and another body give [`roundhouse_domain::conflict::Conflict::RequestIdReused`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestKey {
    /// The client's id.
    pub id: RequestId,
    /// The rpc; part of the body as far as repeating goes.
    pub rpc: &'static str,
    /// SHA-256 of the call's body.
    pub body_hash: [u8; 32],
}

/// See [`crate::Store::create_conversation`].
#[derive(Clone, Debug)]
pub struct CreateConversation {
    /// Makes the call repeatable.
    pub request: Option<RequestKey>,
    /// The id it gets if it is new.
    pub id: ConversationId,
    /// Its name elsewhere; a conversation of that name is returned instead of a new one.
    pub external_id: Option<ExternalId>,
    /// A title for people; may be empty.
    pub title: String,
    /// The agent of the first message unless that names one.
    pub agent_name: Option<String>,
    /// The workspace of the first message unless that names one; known by [`crate::Store::ensure_workspace`].
    pub workspace_id: Option<WorkspaceId>,
    /// Now.
    pub time: Timestamp,
}

/// See [`crate::Store::set_archived`].
#[derive(Clone, Debug)]
pub struct SetArchived {
    /// Makes the call repeatable.
    pub request: Option<RequestKey>,
    /// The conversation.
    pub conversation_id: ConversationId,
    /// The flag.
    pub archived: bool,
    /// Now.
    pub time: Timestamp,
}

/// Which conversations to list: newest first.
#[derive(Clone, Debug, Default)]
pub struct ListConversations {
    /// Those older than this one; unset from the newest.
    pub after: Option<ConversationId>,
    /// At most this many, 1 to 1,000.
    pub limit: usize,
    /// Only with this archive flag; unset for both.
    pub archived: Option<bool>,
    /// Only with an external id of this project; unset for all.
    pub project: Option<String>,
}

/// See [`crate::Store::accept_message`].
#[derive(Clone, Debug)]
pub struct AcceptMessage {
    /// Makes the call repeatable. Its hash covers text, agent and workspace.
    pub request: RequestKey,
    /// The conversation.
    pub conversation_id: ConversationId,
    /// The id of the new message.
    pub message_id: MessageId,
    /// The id of the new turn.
    pub turn_id: TurnId,
    /// Who sends it.
    pub actor: String,
    /// The text, at most 1 MiB.
    pub body: String,
    /// The agent; unset means the conversation's last one at the time of promotion.
    pub agent_name: Option<String>,
    /// The workspace, known by [`crate::Store::ensure_workspace`]; unset means the conversation's last one.
    pub workspace_id: Option<WorkspaceId>,
    /// The door it came through.
    pub surface: Trigger,
    /// Now.
    pub time: Timestamp,
}

/// See [`crate::Store::retry_turn`].
#[derive(Clone, Debug)]
pub struct RetryTurn {
    /// Makes the call repeatable.
    pub request: Option<RequestKey>,
    /// The turn to try again.
    pub turn_id: TurnId,
    /// The id of the new turn.
    pub new_turn_id: TurnId,
    /// The door it came through.
    pub surface: Trigger,
    /// Now.
    pub time: Timestamp,
}

/// See [`crate::Store::request_cancel`].
#[derive(Clone, Debug)]
pub struct RequestCancel {
    /// Makes the call repeatable.
    pub request: Option<RequestKey>,
    /// The turn.
    pub turn_id: TurnId,
    /// Why a turn that still waits ended, for its row.
    pub error: Option<TurnError>,
    /// The terminal event of a turn that still waits; unused otherwise.
    pub terminal: NewEvent,
    /// Now.
    pub time: Timestamp,
}

/// Who acts on a turn: every such write is checked against the turn's epoch in its own transaction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Owner {
    /// The turn.
    pub turn_id: TurnId,
    /// The epoch under which the caller acts.
    pub epoch: Epoch,
}

/// Which session a turn is to work in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SessionPick {
    /// An existing one is continued.
    Existing(SessionId),
    /// A new row with this id is made.
    New(SessionId),
}

/// See [`crate::Store::choose_session`]. Workspace, agent, engine, model and prompt come from the turn's own row.
#[derive(Clone, Debug)]
pub struct ChooseSession {
    /// Who acts.
    pub owner: Owner,
    /// Which session.
    pub pick: SessionPick,
    /// Now.
    pub time: Timestamp,
}

/// Takes the slot of a turn's workspace, stores its agent and binds its session, all or nothing.
#[derive(Clone, Debug)]
pub struct ArrangeTurn {
    /// Who acts.
    pub owner: Owner,
    /// The agent file's snapshot. Unset: the turn has one.
    pub agent: Option<AgentSnapshot>,
    /// Which session.
    pub pick: SessionPick,
    /// Now.
    pub time: Timestamp,
}

/// See [`crate::Store::replace_session`].
#[derive(Clone, Debug)]
pub struct ReplaceSession {
    /// Who acts.
    pub owner: Owner,
    /// The session that cannot be continued; the turn's present one.
    pub unusable: SessionId,
    /// Why, in one sentence.
    pub reason: String,
    /// The id of the row that stands in for it.
    pub replacement: SessionId,
    /// What followers are told; own events.
    pub events: Vec<NewEvent>,
    /// Now.
    pub time: Timestamp,
}

/// See [`crate::Store::record_opening`].
#[derive(Clone, Debug)]
pub struct RecordOpening {
    /// Who acts.
    pub owner: Owner,
    /// The session that was opened; the turn's present one.
    pub session_id: SessionId,
    /// How it came to be and what was given to it.
    pub opening: Opening,
    /// What the engine needs to resume, as far as known.
    pub native_ref: Option<NativeRef>,
    /// The first events of the session, the runner's in the order of their numbers, at most 256; or none. No terminal one.
    pub events: Vec<NewEvent>,
    /// Now.
    pub time: Timestamp,
}

/// See [`crate::Store::append_events`].
#[derive(Clone, Debug)]
pub struct AppendEvents {
    /// Who acts.
    pub owner: Owner,
    /// 1 to 256 events, the runner's in the order of their numbers. No terminal one.
    pub events: Vec<NewEvent>,
    /// Now.
    pub time: Timestamp,
}

/// An agent's message in a closing transaction.
#[derive(Clone, Debug)]
pub struct AgentMessage {
    /// Its id.
    pub id: MessageId,
    /// The agent's name.
    pub actor: String,
    /// The text; what is over 1 MiB is cut and flagged.
    pub body: String,
    /// It was cut off by the end of its turn.
    pub incomplete: bool,
}

/// See [`crate::Store::close_turn`].
#[derive(Clone, Debug)]
pub struct CloseTurn {
    /// Who acts.
    pub owner: Owner,
    /// How it ended.
    pub outcome: Outcome,
    /// The answer, or the interrupted text; unset when there is none.
    pub agent_message: Option<AgentMessage>,
    /// What the engine needs to resume, when not told before.
    pub native_ref: Option<NativeRef>,
    /// What the turn used in all; unset leaves what is known.
    pub usage: Option<Usage>,
    /// The last events, 1 to 256; the last one, and only that, is the terminal one.
    pub events: Vec<NewEvent>,
    /// Whether the runner has confirmed that the engine is idle or gone, or never had the turn: then the slot is
    /// freed at once. Ignored for LOST, which keeps it.
    pub free_slot: bool,
    /// Now.
    pub time: Timestamp,
}

/// See [`crate::Store::answer_permission`].
#[derive(Clone, Debug)]
pub struct AnswerPermission {
    /// Makes the call repeatable.
    pub request: Option<RequestKey>,
    /// The permission, `<spool id>.<frame number>`.
    pub permission_id: String,
    /// Allow or deny.
    pub decision: Decision,
    /// Words for the engine; may be empty.
    pub feedback: String,
    /// Who answers.
    pub actor: String,
    /// Now.
    pub time: Timestamp,
}

/// Which permissions to list, oldest first.
#[derive(Clone, Debug, Default)]
pub struct ListPermissions {
    /// Only of this conversation; unset for all.
    pub conversation_id: Option<ConversationId>,
    /// Only of this turn; unset for all.
    pub turn_id: Option<TurnId>,
    /// Only those without result.
    pub open_only: bool,
    /// Those after this one; unset from the first.
    pub after: Option<String>,
    /// At most this many, 1 to 1,000.
    pub limit: usize,
}

/// Which sessions to list, oldest first.
#[derive(Clone, Debug, Default)]
pub struct ListSessions {
    /// Only of this conversation; unset for all.
    pub conversation_id: Option<ConversationId>,
    /// Only in this workspace; unset for all.
    pub workspace_id: Option<WorkspaceId>,
    /// Those after this one; unset from the first.
    pub after: Option<SessionId>,
    /// At most this many, 1 to 1,000.
    pub limit: usize,
}

/// See [`crate::Store::mark_session_unusable`].
#[derive(Clone, Debug)]
pub struct MarkSessionUnusable {
    /// Makes the call repeatable.
    pub request: Option<RequestKey>,
    /// The session.
    pub session_id: SessionId,
    /// Why, in one sentence.
    pub reason: String,
    /// Now.
    pub time: Timestamp,
}

/// See [`crate::Store::put_summary`].
#[derive(Clone, Debug)]
pub struct PutSummary {
    /// Makes the call repeatable.
    pub request: Option<RequestKey>,
    /// The conversation.
    pub conversation_id: ConversationId,
    /// The version that the writer knows as the current one; 0: none.
    pub expected_version: u64,
    /// It speaks of the history up to this position, that one included.
    pub through: Position,
    /// The text.
    pub text: String,
    /// Who writes.
    pub author: String,
    /// Now.
    pub time: Timestamp,
}

/// See [`crate::Store::register_runner`].
#[derive(Clone, Debug)]
pub struct RegisterRunner {
    /// What it says of itself.
    pub info: RunnerInfo,
    /// What it still knows of conversations and turns.
    pub claims: RunnerClaims,
    /// Now.
    pub time: Timestamp,
}

/// See [`crate::Store::set_draining`].
#[derive(Clone, Debug)]
pub struct SetDraining {
    /// Makes the call repeatable.
    pub request: Option<RequestKey>,
    /// The runner.
    pub runner_id: RunnerId,
    /// Whether it takes no new turns.
    pub draining: bool,
    /// Now.
    pub time: Timestamp,
}

/// See [`crate::Store::free_workspace`].
#[derive(Clone, Debug)]
pub struct FreeWorkspace {
    /// Makes the call repeatable.
    pub request: Option<RequestKey>,
    /// The workspace.
    pub workspace_id: WorkspaceId,
    /// The turn that the caller believes to hold it.
    pub turn_id: TurnId,
    /// Why, for the record.
    pub reason: String,
    /// Who.
    pub actor: String,
    /// Now.
    pub time: Timestamp,
}

/// See [`crate::Store::record_diagnosis`].
#[derive(Clone, Debug)]
pub struct Diagnosis {
    /// The turn.
    pub turn_id: TurnId,
    /// The epoch under which it was said.
    pub epoch: Epoch,
    /// The runner that said it, if one did.
    pub runner_id: Option<RunnerId>,
    /// What was said, encoded; at most 72,000 bytes.
    pub payload: Vec<u8>,
    /// Now.
    pub time: Timestamp,
}
