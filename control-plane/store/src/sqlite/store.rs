//! The trait, method by method: which connection, which queue, which rule.

use async_trait::async_trait;
use roundhouse_domain::agent_file::AgentSnapshot;
use roundhouse_domain::conversation::{Conversation, ExternalId};
use roundhouse_domain::event::{NewEvent, StoredEvent};
use roundhouse_domain::id::{
    ControlPlaneId, ConversationId, MessageId, RunnerId, SessionId, TurnId, WorkspaceId,
};
use roundhouse_domain::message::{Message, Position};
use roundhouse_domain::permission::Permission;
use roundhouse_domain::runner::Runner;
use roundhouse_domain::session::Session;
use roundhouse_domain::summary::Summary;
use roundhouse_domain::time::Timestamp;
use roundhouse_domain::turn::Turn;
use roundhouse_domain::usage::Usage;
use roundhouse_domain::workspace::{SlotHolder, Workspace};

use crate::command::{
    AcceptMessage, AnswerPermission, AppendEvents, ArrangeTurn, ChooseSession, CloseTurn, CreateConversation,
    Diagnosis, FreeWorkspace, ListConversations, ListPermissions, ListSessions, MarkSessionUnusable, Owner,
    PutSummary, RecordOpening, RegisterRunner, ReplaceSession, RequestCancel, RequestKey, RetryTurn,
    SetArchived, SetDraining,
};
use crate::error::Result;
use crate::hint::Hints;
use crate::store::Store;
use crate::view::{
    Accepted, AnswerOutcome, Appended, ArrangeOutcome, CancelOutcome, Changes, CloseOutcome,
    ConversationView, Created, Dispatch, FreeOutcome, Page, Registered, SlotOutcome, WorkspaceView,
};

use super::writer::{Cost, Lane};
use super::{
    SqliteStore, changes, close, conversations, dispatch, events, ledger, permissions, queue, rows, runners,
    summaries,
};

/// What a batch of events counts for.
fn cost(events: &[NewEvent]) -> Cost {
    Cost { rows: events.len(), bytes: events.iter().map(|e| e.payload.len()).sum() }
}

/// Rows that are read where they are asked for. A follower of a running turn finds one or two.
const FEW: usize = 32;

#[async_trait]
impl Store for SqliteStore {
    async fn control_plane_id(&self, candidate: ControlPlaneId) -> Result<ControlPlaneId> {
        self.write("control_plane_id", move |s| runners::control_plane_id(s, &candidate)).await
    }

    async fn create_conversation(&self, command: CreateConversation) -> Result<Created> {
        self.write("create_conversation", move |s| conversations::create_conversation(s, &command)).await
    }

    async fn set_archived(&self, command: SetArchived) -> Result<Conversation> {
        self.write("set_archived", move |s| conversations::set_archived(s, &command)).await
    }

    async fn get_conversation(&self, id: &ConversationId) -> Result<ConversationView> {
        let id = id.clone();
        self.quick(move |c| conversations::get_conversation(c, &id)).await
    }

    async fn find_conversation(&self, external_id: &ExternalId) -> Result<ConversationView> {
        let external_id = external_id.clone();
        self.quick(move |c| conversations::find_by_external_id(c, &external_id)).await
    }

    async fn list_conversations(&self, query: ListConversations) -> Result<Page<ConversationView>> {
        self.read(move |c| conversations::list_conversations(c, &query)).await
    }

    async fn accept_message(&self, command: AcceptMessage) -> Result<Accepted> {
        let max_waiting = self.inner.max_waiting;
        let cost = Cost { rows: 4, bytes: command.body.len() };
        self.write_events("accept_message", Lane::Interactive, cost, move |s| {
            queue::accept_message(s, &command, max_waiting)
        })
        .await
    }

    async fn accepted_before(&self, request: &RequestKey) -> Result<Option<Accepted>> {
        let request = request.clone();
        self.quick(move |c| queue::accepted_before(c, &request)).await
    }

    async fn get_message(&self, id: &MessageId) -> Result<Message> {
        let id = id.clone();
        self.quick(move |c| Ok(rows::find_message(c, &id)?.record)).await
    }

    async fn list_messages(
        &self,
        id: &ConversationId,
        after_seq: u64,
        limit: usize,
    ) -> Result<Page<Message>> {
        let id = id.clone();
        self.read(move |c| conversations::list_messages(c, &id, after_seq, limit)).await
    }

    async fn history(&self, id: &ConversationId, after: Position, limit: usize) -> Result<Page<Message>> {
        let (few, first) = (limit.min(FEW), id.clone());
        let page = self.quick(move |c| conversations::history(c, &first, after, few)).await?;
        if few == limit || !page.more {
            return Ok(page);
        }
        let id = id.clone();
        self.read(move |c| conversations::history(c, &id, after, limit)).await
    }

    async fn get_turn(&self, id: &TurnId) -> Result<Turn> {
        let id = id.clone();
        self.quick(move |c| Ok(rows::find_turn(c, &id)?.turn)).await
    }

    async fn list_turns(
        &self,
        id: &ConversationId,
        after: Option<&TurnId>,
        limit: usize,
    ) -> Result<Page<Turn>> {
        let id = id.clone();
        let after = after.cloned();
        self.read(move |c| conversations::list_turns(c, &id, after.as_ref(), limit)).await
    }

    async fn usage_total(&self, id: &ConversationId) -> Result<Usage> {
        let id = id.clone();
        self.read(move |c| conversations::usage_total(c, &id)).await
    }

    async fn list_events(&self, id: &TurnId, after_seq: u64, limit: usize) -> Result<Page<StoredEvent>> {
        let id = id.clone();
        self.read(move |c| changes::list_events(c, &id, after_seq, limit)).await
    }

    async fn open_turns(&self) -> Result<Vec<Turn>> {
        self.read(dispatch::open_turns).await
    }

    async fn retry_turn(&self, command: RetryTurn) -> Result<Turn> {
        let max_waiting = self.inner.max_waiting;
        self.write("retry_turn", move |s| queue::retry_turn(s, &command, max_waiting)).await
    }

    async fn request_cancel(&self, command: RequestCancel) -> Result<CancelOutcome> {
        self.write("request_cancel", move |s| close::request_cancel(s, command)).await
    }

    async fn begin_dispatch(&self, id: &TurnId) -> Result<Dispatch> {
        let id = id.clone();
        self.quick(move |c| dispatch::begin_dispatch(c, &id)).await
    }

    async fn ensure_workspace(&self, workspace: Workspace, time: Timestamp) -> Result<Workspace> {
        self.write("ensure_workspace", move |s| dispatch::ensure_workspace(s, &workspace, time)).await
    }

    async fn assign_workspace(&self, owner: &Owner, workspace_id: &WorkspaceId) -> Result<Turn> {
        let owner = owner.clone();
        let workspace_id = workspace_id.clone();
        self.write("assign_workspace", move |s| dispatch::assign_workspace(s, &owner, &workspace_id)).await
    }

    async fn take_slot(&self, owner: &Owner, time: Timestamp) -> Result<SlotOutcome> {
        let owner = owner.clone();
        self.write("take_slot", move |s| dispatch::take_slot(s, &owner, time)).await
    }

    async fn set_agent(&self, owner: &Owner, snapshot: AgentSnapshot) -> Result<Turn> {
        let owner = owner.clone();
        self.write("set_agent", move |s| dispatch::set_agent(s, &owner, &snapshot)).await
    }

    async fn arrange_turn(&self, command: ArrangeTurn) -> Result<ArrangeOutcome> {
        self.write("arrange_turn", move |s| dispatch::arrange_turn(s, command)).await
    }

    async fn choose_session(&self, command: ChooseSession) -> Result<Session> {
        self.write("choose_session", move |s| dispatch::choose_session(s, &command)).await
    }

    async fn replace_session(&self, command: ReplaceSession) -> Result<Session> {
        self.write("replace_session", move |s| dispatch::replace_session(s, command)).await
    }

    async fn record_opening(&self, command: RecordOpening) -> Result<Turn> {
        self.write("record_opening", move |s| dispatch::record_opening(s, command)).await
    }

    async fn mark_session_unusable(&self, command: MarkSessionUnusable) -> Result<Session> {
        self.write("mark_session_unusable", move |s| dispatch::mark_session_unusable(s, &command)).await
    }

    async fn get_session(&self, id: &SessionId) -> Result<Session> {
        let id = id.clone();
        self.quick(move |c| Ok(rows::find_session(c, &id)?.record)).await
    }

    async fn list_sessions(&self, query: ListSessions) -> Result<Page<Session>> {
        self.read(move |c| permissions::list_sessions(c, &query)).await
    }

    async fn put_summary(&self, command: PutSummary) -> Result<Summary> {
        let cost = Cost { rows: 2, bytes: command.text.len() };
        self.write_events("put_summary", Lane::Interactive, cost, move |s| {
            summaries::put_summary(s, &command)
        })
        .await
    }

    async fn get_summary(&self, id: &ConversationId, version: Option<u64>) -> Result<Summary> {
        let id = id.clone();
        self.quick(move |c| summaries::get_summary(c, &id, version)).await
    }

    async fn turn_summary(&self, id: &TurnId) -> Result<Option<Summary>> {
        let id = id.clone();
        self.quick(move |c| summaries::turn_summary(c, &id)).await
    }

    async fn append_events(&self, command: AppendEvents) -> Result<Appended> {
        let cost = cost(&command.events);
        self.write_events("append_events", Lane::Bulk, cost, move |s| events::append_events(s, command)).await
    }

    async fn close_turn(&self, command: CloseTurn) -> Result<CloseOutcome> {
        let mut cost = cost(&command.events);
        cost.bytes += command.agent_message.as_ref().map_or(0, |m| m.body.len());
        self.write_events("close_turn", Lane::Interactive, cost, move |s| close::close_turn(s, command)).await
    }

    async fn free_slot(&self, owner: &Owner) -> Result<bool> {
        let owner = owner.clone();
        self.write("free_slot", move |s| dispatch::free_slot(s, &owner)).await
    }

    async fn record_diagnosis(&self, diagnosis: Diagnosis) -> Result<bool> {
        self.write("record_diagnosis", move |s| events::record_diagnosis(s, &diagnosis)).await
    }

    async fn acknowledge_turn(&self, id: &TurnId, time: Timestamp) -> Result<()> {
        let id = id.clone();
        // The runner has acknowledged. If this is lost, it is asked again and says that it knows nothing of the turn.
        let cost = Cost { rows: 1, bytes: 128 };
        let command = move |s: &mut super::writer::Scope<'_>| dispatch::acknowledge_turn(s, &id, time);
        self.write_events("acknowledge_turn", Lane::Leisure, cost, command).await
    }

    async fn unacknowledged_turns(&self, runner: &RunnerId) -> Result<Vec<Turn>> {
        let runner = runner.clone();
        self.read(move |c| dispatch::unacknowledged_turns(c, &runner)).await
    }

    async fn answer_permission(&self, command: AnswerPermission) -> Result<AnswerOutcome> {
        self.write("answer_permission", move |s| permissions::answer_permission(s, &command)).await
    }

    async fn get_permission(&self, permission_id: &str) -> Result<Permission> {
        let permission_id = permission_id.to_owned();
        self.quick(move |c| rows::find_permission(c, &permission_id)).await
    }

    async fn list_permissions(&self, query: ListPermissions) -> Result<Page<Permission>> {
        self.read(move |c| permissions::list_permissions(c, &query)).await
    }

    async fn pending_answers(&self) -> Result<Vec<Permission>> {
        self.read(permissions::pending_answers).await
    }

    async fn register_runner(&self, command: RegisterRunner) -> Result<Registered> {
        self.write("register_runner", move |s| runners::register_runner(s, &command)).await
    }

    async fn heartbeat(&self, runner: &RunnerId, time: Timestamp) -> Result<Runner> {
        let runner = runner.clone();
        self.write("heartbeat", move |s| runners::heartbeat(s, &runner, time)).await
    }

    async fn set_draining(&self, command: SetDraining) -> Result<Runner> {
        self.write("set_draining", move |s| runners::set_draining(s, &command)).await
    }

    async fn answered_before(&self, request: &RequestKey) -> Result<bool> {
        let request = request.clone();
        self.quick(move |c| ledger::known(c, &request)).await
    }

    async fn get_runner(&self, runner: &RunnerId) -> Result<Runner> {
        let runner = runner.clone();
        self.quick(move |c| rows::find_runner(c, &runner)).await
    }

    async fn list_runners(&self) -> Result<Vec<Runner>> {
        self.read(runners::list_runners).await
    }

    async fn get_workspace(&self, id: &WorkspaceId) -> Result<WorkspaceView> {
        let id = id.clone();
        self.quick(move |c| runners::get_workspace(c, &id)).await
    }

    async fn list_workspaces(
        &self,
        runner: Option<&RunnerId>,
        after: Option<&WorkspaceId>,
        limit: usize,
    ) -> Result<Page<WorkspaceView>> {
        let runner = runner.cloned();
        let after = after.cloned();
        self.read(move |c| runners::list_workspaces(c, runner.as_ref(), after.as_ref(), limit)).await
    }

    async fn held_slots(&self, runner: Option<&RunnerId>) -> Result<Vec<SlotHolder>> {
        let runner = runner.cloned();
        self.read(move |c| dispatch::holders(c, runner.as_ref())).await
    }

    async fn free_workspace(&self, command: FreeWorkspace) -> Result<FreeOutcome> {
        self.write("free_workspace", move |s| runners::free_workspace(s, &command)).await
    }

    async fn changes_after(&self, id: &ConversationId, cursor: u64, limit: usize) -> Result<Changes> {
        let (few, first) = (limit.min(FEW), id.clone());
        let changes = self.quick(move |c| changes::changes_after(c, &first, cursor, few)).await?;
        if few == limit || changes.items.len() < few {
            return Ok(changes);
        }
        let id = id.clone();
        self.read(move |c| changes::changes_after(c, &id, cursor, limit)).await
    }

    async fn prune_changes(&self, id: &ConversationId, through: u64) -> Result<u64> {
        let id = id.clone();
        self.write("prune_changes", move |s| changes::prune_changes(s, &id, through)).await
    }

    fn hints(&self) -> Hints {
        Hints::new(self.inner.hints.subscribe())
    }

    async fn close(&self) {
        self.inner.pool.close().await;
        let inner = std::sync::Arc::clone(&self.inner);
        if let Err(error) = tokio::task::spawn_blocking(move || inner.stop()).await {
            tracing::error!(%error, "the store did not close cleanly");
        }
    }
}
