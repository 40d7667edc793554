//! The trait.

use async_trait::async_trait;
use roundhouse_domain::agent_file::AgentSnapshot;
use roundhouse_domain::conversation::{Conversation, ExternalId};
use roundhouse_domain::event::{NewEvent, StoredEvent};
use roundhouse_domain::id::{
    ControlPlaneId, ConversationId, MessageId, RunnerId, SessionId, TurnId, WorkspaceId,
};
use roundhouse_domain::message::{Message, Position};
use roundhouse_domain::outcome::{Outcome, TurnError};
use roundhouse_domain::permission::Permission;
use roundhouse_domain::runner::Runner;
use roundhouse_domain::session::Session;
use roundhouse_domain::summary::Summary;
use roundhouse_domain::time::Timestamp;
use roundhouse_domain::turn::Turn;
use roundhouse_domain::usage::Usage;
use roundhouse_domain::workspace::{SlotHolder, Workspace};

use crate::command::{
    AcceptMessage, AgentMessage, AnswerPermission, AppendEvents, ArrangeTurn, ChooseSession, CloseTurn,
    CreateConversation, Diagnosis, FreeWorkspace, ListConversations, ListPermissions, ListSessions,
    MarkSessionUnusable, Owner, PutSummary, RecordOpening, RegisterRunner, ReplaceSession, RequestCancel,
    RequestKey, RetryTurn, SetArchived, SetDraining,
};
use crate::error::Result;
use crate::hint::Hints;
use crate::view::{
    Accepted, AnswerOutcome, Appended, ArrangeOutcome, CancelOutcome, Changes, CloseOutcome,
    ConversationView, Created, Dispatch, FreeOutcome, Page, Registered, SlotOutcome, WorkspaceView,
};

/// The durable state of the control plane.
///
/// # What every method promises
/// * One transaction. After a crash all of it is there or nothing; what was answered is there.
/// * It can be repeated with the same arguments. Where a method has a `request`, a repeat gets the first answer
///   whatever happened since; elsewhere a repeat finds the work done and changes nothing more.
/// * A write on behalf of a turn checks the turn's epoch in the same transaction:
///   [`Conflict::StaleEpoch`](roundhouse_domain::conflict::Conflict::StaleEpoch). A turn that has ended absorbs:
///   [`Conflict::TurnEnded`](roundhouse_domain::conflict::Conflict::TurnEnded), unless the method says otherwise.
/// * Rows are locked in the order conversation, workspace, turn.
/// * A hint follows the commit, never precedes it.
/// * Dropping the future neither undoes nor stops the work; a repeat tells what became of it.
/// * Any method may fail with [`Error::Unavailable`](crate::Error::Unavailable): nothing was stored.
///
/// Pages: a limit of 1 to 1,000 (0 and more are brought into it), and at most 1 MiB, but at least one item.
#[async_trait]
pub trait Store: Send + Sync + 'static {
    /// The id of this control plane: `candidate` the first time, the same one ever after.
    ///
    /// Crash: repeat; the first committed candidate wins.
    async fn control_plane_id(&self, candidate: ControlPlaneId) -> Result<ControlPlaneId>;

    // --- conversations ---

    /// Creates a conversation, or finds the one with its external id (title and flag of that one are kept).
    ///
    /// Crash: repeat. By request id or external id the same conversation comes back; with neither, by `id`.
    ///
    /// # Errors
    /// `Invalid` for an external id or title that is too long, `Conflict::RequestIdReused`.
    async fn create_conversation(&self, command: CreateConversation) -> Result<Created>;

    /// Sets or clears the archive flag. Running and waiting turns go on.
    ///
    /// Crash: repeat.
    ///
    /// # Errors
    /// `NotFound`, `Conflict::RequestIdReused`.
    async fn set_archived(&self, command: SetArchived) -> Result<Conversation>;

    /// One conversation with what attention is computed from.
    ///
    /// # Errors
    /// `NotFound`.
    async fn get_conversation(&self, id: &ConversationId) -> Result<ConversationView>;

    /// The conversation with this external id, with what attention is computed from.
    ///
    /// # Errors
    /// `NotFound`.
    async fn find_conversation(&self, external_id: &ExternalId) -> Result<ConversationView>;

    /// Conversations, newest first.
    ///
    /// # Errors
    /// `NotFound` when `after` is no conversation.
    async fn list_conversations(&self, query: ListConversations) -> Result<Page<ConversationView>>;

    // --- messages ---

    /// Stores a user message and its turn; when the conversation is free, promotes the turn: the lock with a new
    /// epoch, the message's position, state DISPATCHING. Un-archives the conversation.
    ///
    /// Crash: before the commit nothing is there, after it message and turn are, and [`Store::open_turns`] finds
    /// the promoted turn. Repeat: the request id brings back the first message and its turn, in every state,
    /// and starts nothing.
    ///
    /// # Errors
    /// `NotFound` (conversation, workspace), `Invalid` (empty text or over 1 MiB), `Conflict::QueueFull`,
    /// `Conflict::RequestIdReused`.
    async fn accept_message(&self, command: AcceptMessage) -> Result<Accepted>;

    /// What [`Store::accept_message`] answered to this request before, with message and turn as they are now; none
    /// when it was not asked before. Reads only.
    ///
    /// # Errors
    /// `Conflict::RequestIdReused`.
    async fn accepted_before(&self, request: &RequestKey) -> Result<Option<Accepted>>;

    /// One message.
    ///
    /// # Errors
    /// `NotFound`.
    async fn get_message(&self, id: &MessageId) -> Result<Message>;

    /// Messages by order of arrival, after `after_seq` (0 from the first).
    ///
    /// # Errors
    /// `NotFound`.
    async fn list_messages(&self, id: &ConversationId, after_seq: u64, limit: usize)
    -> Result<Page<Message>>;

    /// The shared history by position, after `after`. Waiting messages are not in it.
    ///
    /// # Errors
    /// `NotFound`.
    async fn history(&self, id: &ConversationId, after: Position, limit: usize) -> Result<Page<Message>>;

    // --- turns ---

    /// One turn.
    ///
    /// # Errors
    /// `NotFound`.
    async fn get_turn(&self, id: &TurnId) -> Result<Turn>;

    /// A conversation's turns, oldest first, those that came after `after`.
    ///
    /// # Errors
    /// `NotFound`.
    async fn list_turns(
        &self,
        id: &ConversationId,
        after: Option<&TurnId>,
        limit: usize,
    ) -> Result<Page<Turn>>;

    /// What all turns of a conversation used.
    ///
    /// # Errors
    /// `NotFound`.
    async fn usage_total(&self, id: &ConversationId) -> Result<Usage>;

    /// A turn's events after `after_seq` (0 from the first).
    ///
    /// # Errors
    /// `NotFound`.
    async fn list_events(&self, id: &TurnId, after_seq: u64, limit: usize) -> Result<Page<StoredEvent>>;

    /// Every turn that is past QUEUED and has not ended, in the order of promotion: what a dispatcher has to
    /// drive, and what is reconciled at boot.
    async fn open_turns(&self) -> Result<Vec<Turn>>;

    /// Tries the conversation's last turn again: a new turn on the same message, same position, same agent
    /// snapshot; queued like any other.
    ///
    /// Crash: repeat, as [`Store::accept_message`]; without request id a turn with `new_turn_id` comes back.
    ///
    /// # Errors
    /// `NotFound`, `Conflict::Retry`, `Conflict::QueueFull`, `Conflict::RequestIdReused`.
    async fn retry_turn(&self, command: RetryTurn) -> Result<Turn>;

    /// Stores that a turn is to be cancelled, before anything is stopped. A turn that still waits ends at once.
    ///
    /// Crash: after the commit the turn is CANCELLING and found by [`Store::open_turns`]. Repeat: no-op.
    ///
    /// # Errors
    /// `NotFound`, `Conflict::RequestIdReused`.
    async fn request_cancel(&self, command: RequestCancel) -> Result<CancelOutcome>;

    // --- dispatch ---

    /// Begins or resumes the dispatch of an active turn: all that is known of it, in one snapshot.
    ///
    /// # Errors
    /// `NotFound`, `Conflict::TurnEnded`, `Conflict::IllegalTransition` for a turn that still waits.
    async fn begin_dispatch(&self, id: &TurnId) -> Result<Dispatch>;

    /// Makes a workspace known, by the canonical path that its runner told. The runner need not be registered.
    ///
    /// Crash: repeat.
    async fn ensure_workspace(&self, workspace: Workspace, time: Timestamp) -> Result<Workspace>;

    /// Gives a workspace to a turn that has none; the conversation remembers it.
    ///
    /// Crash: repeat.
    ///
    /// # Errors
    /// `NotFound`, `Conflict::AlreadySet` when it has another one.
    async fn assign_workspace(&self, owner: &Owner, workspace_id: &WorkspaceId) -> Result<Turn>;

    /// Takes the slot of the turn's workspace, in the order of promotion; parents and children count.
    ///
    /// Crash: repeat; a slot that is held by the same turn is `Taken`. After `Held` or `Behind` ask again when a
    /// [`Hint::SlotFreed`](crate::Hint::SlotFreed) comes or a timer fires.
    ///
    /// # Errors
    /// `NotFound`, `Invalid` when the turn has no workspace.
    async fn take_slot(&self, owner: &Owner, time: Timestamp) -> Result<SlotOutcome>;

    /// Stores the agent file's snapshot in the turn; the conversation remembers the agent.
    ///
    /// Crash: repeat; the first stored snapshot stands. A retry has one from the start.
    ///
    /// # Errors
    /// `NotFound`. Never a conflict over another snapshot: the turn that is returned holds the one that stands.
    async fn set_agent(&self, owner: &Owner, snapshot: AgentSnapshot) -> Result<Turn>;

    /// Binds a session to the turn: an existing active one, or a new row, before the engine starts. A new one replaces
    /// the agent's last one there, if that is unusable and nothing replaced it yet.
    ///
    /// Crash: repeat; a turn that has a session keeps it, and it is returned.
    ///
    /// # Errors
    /// `NotFound`, `Invalid` when agent or workspace are missing, `Conflict::SessionUnfit`.
    async fn choose_session(&self, command: ChooseSession) -> Result<Session>;

    /// Takes the slot, stores the agent's snapshot and binds a session: [`Store::take_slot`], [`Store::set_agent`] and
    /// [`Store::choose_session`] in one step. Without the slot nothing is stored.
    ///
    /// Crash: repeat; what was stored first stands and is returned.
    ///
    /// # Errors
    /// As those three.
    async fn arrange_turn(&self, command: ArrangeTurn) -> Result<ArrangeOutcome>;

    /// Marks the turn's session unusable and binds a new row in its place, in one step.
    ///
    /// Crash: repeat with the same `replacement`; it is returned as it is.
    ///
    /// # Errors
    /// `NotFound`, `Conflict::AlreadySet` when the turn has a third session by now.
    async fn replace_session(&self, command: ReplaceSession) -> Result<Session>;

    /// Records how the session came to be, what was given to it, and its native ref as far as known.
    ///
    /// Crash: repeat; the newest record of the same session stands.
    ///
    /// # Errors
    /// `NotFound`, `Conflict::AlreadySet` when the turn has another session.
    async fn record_opening(&self, command: RecordOpening) -> Result<Turn>;

    /// Marks a session unusable outside a turn. Never undone; files and worktree are not touched.
    ///
    /// Crash: repeat; the first reason stands.
    ///
    /// # Errors
    /// `NotFound`, `Conflict::TurnInProgress` while a turn of its conversation runs or waits,
    /// `Conflict::RequestIdReused`.
    async fn mark_session_unusable(&self, command: MarkSessionUnusable) -> Result<Session>;

    /// One session.
    ///
    /// # Errors
    /// `NotFound`.
    async fn get_session(&self, id: &SessionId) -> Result<Session>;

    /// Sessions, oldest first.
    ///
    /// # Errors
    /// `NotFound` when `after` is no session.
    async fn list_sessions(&self, query: ListSessions) -> Result<Page<Session>>;

    // --- summaries ---

    /// Stores the next version of a conversation's summary, if the writer knows the current one. Earlier versions are
    /// kept. Turns promoted from here on are told of this one.
    ///
    /// Crash: repeat; with a request id the version that it made comes back.
    ///
    /// # Errors
    /// `NotFound`, `Invalid` (text, author, a position that is not there), `Conflict::SummaryVersion`,
    /// `Conflict::RequestIdReused`.
    async fn put_summary(&self, command: PutSummary) -> Result<Summary>;

    /// A version of a conversation's summary; unset means the current one.
    ///
    /// # Errors
    /// `NotFound` (conversation, or a summary that is not there).
    async fn get_summary(&self, id: &ConversationId, version: Option<u64>) -> Result<Summary>;

    /// The summary that was current when the turn was promoted; none when there was none, or while it waits.
    ///
    /// # Errors
    /// `NotFound`.
    async fn turn_summary(&self, id: &TurnId) -> Result<Option<Summary>>;

    // --- events ---

    /// Stores events and what they do besides, in one step. The runner's are stored once per (turn, number), our
    /// own once per (turn, key). `seq` and cursor are given here.
    ///
    /// Crash: after a commit without answer, repeat: what is stored is left out of `stored`, effects are not
    /// applied twice. `Appended::last_number` tells from where to read the runner's stream on.
    ///
    /// Await the answer before the turn is closed: calls that wait together are not carried out in the order in
    /// which they were made.
    ///
    /// # Errors
    /// `NotFound`, `Invalid` (none, more than 256, a payload over its limit, a terminal event),
    /// `Conflict::EventGap`, `Conflict::StaleEpoch`, `Conflict::TurnEnded`.
    async fn append_events(&self, command: AppendEvents) -> Result<Appended>;

    /// Ends a turn: outcome, agent message with its position, native ref, watermark, usage and the last events;
    /// releases the lock; promotes the next turn; all in one step. Open permissions are settled. For LOST the
    /// conversation's epoch moves on, and the slot stays held.
    ///
    /// Crash: before the commit the turn is as it was, after it it has ended and the next one is promoted
    /// ([`Store::open_turns`] finds it). Repeat: `AlreadyEnded`.
    ///
    /// # Errors
    /// `NotFound`, `Invalid` (events without the terminal one at their end), `Conflict::EventGap`,
    /// `Conflict::StaleEpoch`. An ended turn is no error: `CloseOutcome::AlreadyEnded`.
    async fn close_turn(&self, command: CloseTurn) -> Result<CloseOutcome>;

    /// Ends a turn LOST: [`Store::close_turn`] with that outcome.
    ///
    /// # Errors
    /// As [`Store::close_turn`].
    async fn mark_lost(
        &self,
        owner: Owner,
        error: TurnError,
        agent_message: Option<AgentMessage>,
        terminal: NewEvent,
        time: Timestamp,
    ) -> Result<CloseOutcome> {
        self.close_turn(CloseTurn {
            owner,
            outcome: Outcome::Lost(error),
            agent_message,
            native_ref: None,
            usage: None,
            events: vec![terminal],
            free_slot: false,
            time,
        })
        .await
    }

    /// Frees the slot that the turn holds, once its runner confirmed that the engine is idle or gone. The turn
    /// may have ended; a higher epoch of the conversation does not matter. True when there was one.
    ///
    /// Crash: repeat.
    ///
    /// # Errors
    /// `NotFound`, `Conflict::StaleEpoch` when the turn itself has another epoch.
    async fn free_slot(&self, owner: &Owner) -> Result<bool>;

    /// Keeps what was said about a turn after its end, or under a stale epoch: it changes nothing. The first
    /// 1,000 of a turn are kept; false when it was one too many.
    ///
    /// # Errors
    /// `NotFound`, `Invalid` (too long).
    async fn record_diagnosis(&self, diagnosis: Diagnosis) -> Result<bool>;

    /// Stores that the runner was told that the turn's end is stored (its spool may be pruned).
    ///
    /// Crash: repeat.
    ///
    /// # Errors
    /// `NotFound`, `Conflict::TurnInProgress` when the turn has not ended.
    async fn acknowledge_turn(&self, id: &TurnId, time: Timestamp) -> Result<()>;

    /// Ended turns in workspaces of a runner whose end it was not told yet, in the order of promotion.
    async fn unacknowledged_turns(&self, runner: &RunnerId) -> Result<Vec<Turn>>;

    // --- permissions ---

    /// Stores an answer as intent. The first one stands; the runner decides who won.
    ///
    /// Crash: after the commit [`Store::pending_answers`] finds it. Repeat: the first answer.
    ///
    /// # Errors
    /// `NotFound`, `Conflict::RequestIdReused`.
    async fn answer_permission(&self, command: AnswerPermission) -> Result<AnswerOutcome>;

    /// One permission.
    ///
    /// # Errors
    /// `NotFound`.
    async fn get_permission(&self, permission_id: &str) -> Result<Permission>;

    /// Permissions, oldest first.
    ///
    /// # Errors
    /// `NotFound` when `after` is no permission.
    async fn list_permissions(&self, query: ListPermissions) -> Result<Page<Permission>>;

    /// Answers that the runner has not settled yet: to be told to it again.
    async fn pending_answers(&self) -> Result<Vec<Permission>>;

    // --- runners and workspaces ---

    /// Registers a runner, again and again. Ends its draining. Raises epochs above what it claims, so that
    /// nothing is dispatched under an epoch it would refuse.
    ///
    /// Crash: repeat.
    async fn register_runner(&self, command: RegisterRunner) -> Result<Registered>;

    /// Stores that a runner was heard of.
    ///
    /// Crash: repeat; the time never goes back.
    ///
    /// # Errors
    /// `NotFound`: it has to register.
    async fn heartbeat(&self, runner: &RunnerId, time: Timestamp) -> Result<Runner>;

    /// Sets or ends draining.
    ///
    /// Crash: repeat.
    ///
    /// # Errors
    /// `NotFound`, `Conflict::RequestIdReused`.
    async fn set_draining(&self, command: SetDraining) -> Result<Runner>;

    /// Whether a call under this key was answered before. Reads only.
    ///
    /// # Errors
    /// `Conflict::RequestIdReused`.
    async fn answered_before(&self, request: &RequestKey) -> Result<bool>;

    /// One runner.
    ///
    /// # Errors
    /// `NotFound`.
    async fn get_runner(&self, runner: &RunnerId) -> Result<Runner>;

    /// Every runner, by name.
    async fn list_runners(&self) -> Result<Vec<Runner>>;

    /// One workspace and who has its slot.
    ///
    /// # Errors
    /// `NotFound`.
    async fn get_workspace(&self, id: &WorkspaceId) -> Result<WorkspaceView>;

    /// Workspaces by id, of one runner or of all, those after `after`.
    async fn list_workspaces(
        &self,
        runner: Option<&RunnerId>,
        after: Option<&WorkspaceId>,
        limit: usize,
    ) -> Result<Page<WorkspaceView>>;

    /// Every slot that is held, of one runner or of all. Holders that have ended wait for their runner's word.
    async fn held_slots(&self, runner: Option<&RunnerId>) -> Result<Vec<SlotHolder>>;

    /// Frees a workspace by a person's word, whatever its runner says. Who and why are kept as diagnosis.
    ///
    /// Crash: repeat.
    ///
    /// # Errors
    /// `NotFound`, `Conflict::OtherHolder`, `Conflict::TurnInProgress` when the named turn has not ended,
    /// `Conflict::RequestIdReused`.
    async fn free_workspace(&self, command: FreeWorkspace) -> Result<FreeOutcome>;

    // --- followers ---

    /// A conversation's changes after a cursor value (0 from the oldest kept), in order, without gap.
    ///
    /// # Errors
    /// `NotFound`, `Conflict::CursorPruned`, `Conflict::CursorUnknown`.
    async fn changes_after(&self, id: &ConversationId, cursor: u64, limit: usize) -> Result<Changes>;

    /// Forgets changes up to a cursor value, but never those of turns that have not ended, nor a change after
    /// one of theirs. Messages, turns and sessions stay. Returns the last cursor value that is gone.
    ///
    /// Crash: repeat.
    ///
    /// # Errors
    /// `NotFound`, `Conflict::CursorUnknown`.
    async fn prune_changes(&self, id: &ConversationId, through: u64) -> Result<u64>;

    /// Hints of what this process commits. Subscribe first, then read: what was committed in between is seen.
    fn hints(&self) -> Hints;

    /// Finishes what waits, writes everything into the database file and closes it. Later calls fail with
    /// `Unavailable::Closed`.
    async fn close(&self);
}
