//! What the cases share: ids, a clock that counts, and the usual steps.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};

use roundhouse_domain::agent_file::{AgentSnapshot, Permissions, Trigger};
use roundhouse_domain::event::{Effect, EventKind, EventSource, NewEvent};
use roundhouse_domain::id::{ConversationId, MessageId, RequestId, RunnerId, SessionId, TurnId};
use roundhouse_domain::outcome::{Outcome, Reason, TurnError};
use roundhouse_domain::runner::RunnerInfo;
use roundhouse_domain::session::Session;
use roundhouse_domain::time::Timestamp;
use roundhouse_domain::turn::Turn;
use roundhouse_domain::workspace::Workspace;

use super::Backend;
use crate::command::{
    AcceptMessage, AgentMessage, AppendEvents, ChooseSession, CloseTurn, CreateConversation,
    MarkSessionUnusable, Owner, RequestCancel, RequestKey, SessionPick,
};
use crate::store::Store;
use crate::view::{Accepted, CloseOutcome, Closed};

static COUNTER: AtomicU64 = AtomicU64::new(1);

/// A number that no other call gets.
pub(super) fn fresh() -> u64 {
    COUNTER.fetch_add(1, Ordering::Relaxed)
}

/// A time later than every one before.
pub(super) fn now() -> Timestamp {
    Timestamp(i64::try_from(fresh()).unwrap())
}

macro_rules! make_id {
    ($name:ident, $kind:ident) => {
        pub(super) fn $name() -> $kind {
            $kind::parse(format!("{}{:016x}", $kind::PREFIX, fresh())).unwrap()
        }
    };
}

make_id!(conversation_id, ConversationId);
make_id!(message_id, MessageId);
make_id!(turn_id, TurnId);
make_id!(session_id, SessionId);
make_id!(runner_id, RunnerId);

/// A request key whose body is `body`.
pub(super) fn key(id: &str, body: u8) -> RequestKey {
    RequestKey { id: RequestId::parse(id).unwrap(), rpc: "SendMessage", body_hash: [body; 32] }
}

/// The owner of a turn as it is now.
pub(super) fn owner(turn: &Turn) -> Owner {
    Owner { turn_id: turn.id.clone(), epoch: turn.epoch }
}

/// An event of the runner.
pub(super) fn event(number: u64, effect: Effect) -> NewEvent {
    NewEvent {
        source: EventSource::Runner { number },
        kind: EventKind::Text,
        payload: format!("event {number}").into_bytes(),
        time: now(),
        effect,
    }
}

/// An event of our own.
pub(super) fn own(name: &str) -> NewEvent {
    let source = EventSource::Own { key: name.to_owned() };
    NewEvent { source, kind: EventKind::Notice, payload: Vec::new(), time: now(), effect: Effect::None }
}

/// A terminal event of our own.
pub(super) fn terminal() -> NewEvent {
    NewEvent { kind: EventKind::Terminal, ..own("terminal") }
}

/// An error.
pub(super) fn error() -> TurnError {
    TurnError::new(Reason::Process, "it broke", "retry").retryable()
}

/// An agent.
pub(super) fn agent(name: &str, prompt: &str) -> AgentSnapshot {
    AgentSnapshot {
        file: format!(".agents/{name}.md"),
        name: name.to_owned(),
        description: "for tests".into(),
        engine: "fake".into(),
        model: "model-1".into(),
        reasoning_effort: None,
        permissions: Permissions::Ask,
        enabled: true,
        triggers: BTreeSet::from([Trigger::Manual]),
        text: format!("---\nname: {name}\n---\n{prompt}\n"),
        sha256: "00".into(),
    }
}

/// What a runner says of itself.
pub(super) fn runner_info(id: &RunnerId) -> RunnerInfo {
    RunnerInfo {
        id: id.clone(),
        name: "desk".into(),
        address: "http://127.0.0.1:7460".into(),
        version: "0.1.0".into(),
        protocol_version: 1,
        roots: Vec::new(),
        boot_id: "boot".into(),
        description: vec![1, 2, 3],
    }
}

/// A store with one conversation in one workspace.
pub(super) struct Fixture<S> {
    pub(super) store: S,
    pub(super) conversation: ConversationId,
    pub(super) workspace: Workspace,
}

impl<S: Store> Fixture<S> {
    pub(super) async fn new<B: Backend<Store = S>>(backend: &B) -> Self {
        Self::on(backend.open().await).await
    }

    pub(super) async fn on(store: S) -> Self {
        let conversation = new_conversation(&store).await;
        let workspace = Workspace::new(runner_id(), "/w");
        store.ensure_workspace(workspace.clone(), now()).await.unwrap();
        Self { store, conversation, workspace }
    }

    /// A message for agent `coder` in the workspace.
    pub(super) fn message(&self, text: &str) -> AcceptMessage {
        AcceptMessage {
            request: key(&format!("req-{}", fresh()), 1),
            conversation_id: self.conversation.clone(),
            message_id: message_id(),
            turn_id: turn_id(),
            actor: "ann".into(),
            body: text.to_owned(),
            agent_name: Some("coder".into()),
            workspace_id: Some(self.workspace.id.clone()),
            surface: Trigger::Manual,
            time: now(),
        }
    }

    pub(super) async fn send(&self, text: &str) -> Accepted {
        self.store.accept_message(self.message(text)).await.unwrap()
    }

    /// Brings an active turn to a bound session.
    pub(super) async fn arrange(&self, turn: &Turn) -> Session {
        let owner = owner(turn);
        self.store.set_agent(&owner, agent("coder", "Be brief.")).await.unwrap();
        let pick = SessionPick::New(session_id());
        self.store.choose_session(ChooseSession { owner, pick, time: now() }).await.unwrap()
    }

    pub(super) async fn append(&self, turn: &Turn, events: Vec<NewEvent>) -> crate::view::Appended {
        let command = AppendEvents { owner: owner(turn), events, time: now() };
        self.store.append_events(command).await.unwrap()
    }

    /// Says that the engine took the turn's message, as event `number`.
    pub(super) async fn accepted(&self, turn: &Turn, number: u64) {
        let effect = Effect::Accepted { message_id: turn.message_id.clone() };
        self.append(turn, vec![event(number, effect)]).await;
    }

    pub(super) async fn turn(&self, turn: &Turn) -> Turn {
        self.store.get_turn(&turn.id).await.unwrap()
    }

    pub(super) async fn try_close(&self, turn: &Turn, outcome: Outcome, text: Option<&str>) -> CloseOutcome {
        self.store.close_turn(close(turn, outcome, text)).await.unwrap()
    }

    pub(super) async fn close(&self, turn: &Turn, outcome: Outcome, text: Option<&str>) -> Closed {
        match self.try_close(turn, outcome, text).await {
            CloseOutcome::Closed(closed) => *closed,
            other => panic!("not closed: {other:?}"),
        }
    }

    pub(super) async fn cancel(&self, turn: &Turn) -> crate::view::CancelOutcome {
        self.store.request_cancel(cancel(&turn.id)).await.unwrap()
    }
}

/// Marks a session unusable outside of a turn.
pub(super) fn mark(session: &SessionId, reason: &str) -> MarkSessionUnusable {
    MarkSessionUnusable { request: None, session_id: session.clone(), reason: reason.to_owned(), time: now() }
}

pub(super) async fn new_conversation<S: Store>(store: &S) -> ConversationId {
    let command = CreateConversation {
        request: None,
        id: conversation_id(),
        external_id: None,
        title: "a title".into(),
        agent_name: None,
        workspace_id: None,
        time: now(),
    };
    store.create_conversation(command).await.unwrap().conversation.id
}

pub(super) fn close(turn: &Turn, outcome: Outcome, text: Option<&str>) -> CloseTurn {
    let agent_message = text.map(|body| AgentMessage {
        id: message_id(),
        actor: "coder".into(),
        body: body.to_owned(),
        incomplete: outcome != Outcome::Completed,
    });
    CloseTurn {
        owner: owner(turn),
        outcome,
        agent_message,
        native_ref: None,
        usage: None,
        events: vec![terminal()],
        free_slot: true,
        time: now(),
    }
}

pub(super) fn cancel(turn_id: &TurnId) -> RequestCancel {
    let (error, terminal) = (None, terminal());
    RequestCancel { request: None, turn_id: turn_id.clone(), error, terminal, time: now() }
}

/// Whether a result is a conflict that matches a pattern.
macro_rules! assert_conflict {
    ($result:expr, $pattern:pat) => {
        match $result {
            Err(crate::Error::Conflict($pattern)) => {}
            other => panic!("expected {}, got {other:?}", stringify!($pattern)),
        }
    };
}

/// Whether a result is an error that matches a pattern.
macro_rules! assert_error {
    ($result:expr, $pattern:pat) => {
        match $result {
            Err($pattern) => {}
            other => panic!("expected {}, got {other:?}", stringify!($pattern)),
        }
    };
}

pub(super) use {assert_conflict, assert_error};
