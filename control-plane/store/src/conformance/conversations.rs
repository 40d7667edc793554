//! Cases of conversations and of accepting messages.

use std::sync::Arc;

use roundhouse_domain::attention::{AttentionReason, attention};
use roundhouse_domain::conflict::{Conflict, Kind};
use roundhouse_domain::conversation::ExternalId;
use roundhouse_domain::limits::{MAX_USER_MESSAGE, MAX_WAITING};
use roundhouse_domain::message::Position;
use roundhouse_domain::outcome::Outcome;
use roundhouse_domain::time::Timestamp;
use roundhouse_domain::turn::TurnState;

use super::Backend;
use super::fixture::{
    Fixture, assert_conflict, assert_error, conversation_id, error, fresh, key, message_id, now, turn_id,
};
use crate::command::{CreateConversation, ListConversations, SetArchived};
use crate::error::Error;
use crate::store::Store;

/// The request id finds message and turn whatever became of them, and starts nothing.
pub async fn s02_a_repeated_request_returns_the_first_message_in_every_state<B: Backend>(backend: &B) {
    let f = Fixture::new(backend).await;
    let first = f.message("one");
    let again = || {
        let mut again = first.clone();
        (again.message_id, again.turn_id, again.time) = (message_id(), turn_id(), now());
        again
    };
    let accepted = f.store.accept_message(first.clone()).await.unwrap();
    assert!(!accepted.repeated);
    let second = f.send("two").await;
    for expected in [TurnState::Dispatching, TurnState::Running, TurnState::Completed] {
        let repeat = f.store.accept_message(again()).await.unwrap();
        assert!(repeat.repeated);
        assert_eq!((&repeat.message.id, &repeat.turn.id), (&first.message_id, &first.turn_id));
        assert_eq!(repeat.turn.state, expected);
        match expected {
            TurnState::Dispatching => f.accepted(&accepted.turn, 1).await,
            TurnState::Running => drop(f.close(&accepted.turn, Outcome::Completed, Some("ok")).await),
            _ => {}
        }
    }
    let messages = f.store.list_messages(&f.conversation, 0, 100).await.unwrap().items;
    assert_eq!(messages.iter().map(|m| m.body.as_str()).collect::<Vec<_>>(), ["one", "two", "ok"]);
    assert_eq!(f.turn(&second.turn).await.state, TurnState::Dispatching);
}

/// The claim is a unique key, not a look before the write.
pub async fn s02_twenty_callers_with_one_request_id_make_one_turn<B: Backend>(backend: &B) {
    let f = Arc::new(Fixture::new(backend).await);
    let template = f.message("once");
    let mut callers = Vec::new();
    for _ in 0..20 {
        let (f, mut command) = (Arc::clone(&f), template.clone());
        (command.message_id, command.turn_id) = (message_id(), turn_id());
        callers.push(tokio::spawn(async move { f.store.accept_message(command).await.unwrap() }));
    }
    let mut turns = Vec::new();
    let mut new = 0;
    for caller in callers {
        let accepted = caller.await.unwrap();
        new += usize::from(!accepted.repeated);
        turns.push(accepted.turn.id);
    }
    turns.dedup();
    assert_eq!((turns.len(), new), (1, 1));
    assert_eq!(f.store.list_turns(&f.conversation, None, 10).await.unwrap().items.len(), 1);
}

/// Equal text under two ids is two turns; other text under one id is refused.
pub async fn s02_another_body_under_the_same_request_id_is_refused<B: Backend>(backend: &B) {
    let f = Fixture::new(backend).await;
    let first = f.message("one");
    f.store.accept_message(first.clone()).await.unwrap();
    let mut other = f.message("other");
    other.request = key(first.request.id.as_str(), 2);
    assert_conflict!(f.store.accepted_before(&other.request).await, Conflict::RequestIdReused);
    assert_eq!(f.store.accepted_before(&f.message("new").request).await.unwrap(), None);
    let before = f.store.accepted_before(&first.request).await.unwrap().unwrap();
    assert_eq!((before.turn.id, before.repeated), (first.turn_id.clone(), true));
    assert_conflict!(f.store.accept_message(other).await, Conflict::RequestIdReused);
    let mut other_rpc = f.message("one");
    other_rpc.request = first.request.clone();
    other_rpc.request.rpc = "Other";
    assert_conflict!(f.store.accept_message(other_rpc).await, Conflict::RequestIdReused);
    f.send("one").await;
    assert_eq!(f.store.list_messages(&f.conversation, 0, 10).await.unwrap().items.len(), 2);
}

/// The answer to the first message stands before the second in the history, however early that came.
pub async fn s03_seq_is_contiguous_by_arrival_and_position_by_promotion<B: Backend>(backend: &B) {
    let f = Fixture::new(backend).await;
    let first = f.send("one").await;
    assert_eq!((first.message.seq, first.message.position), (1, Some(Position(1))));
    let second = f.send("two").await;
    assert_eq!((second.message.seq, second.message.position), (2, None));
    assert_eq!(second.turn.state, TurnState::Queued);
    assert_eq!(f.store.history(&f.conversation, Position::START, 10).await.unwrap().items.len(), 1);
    let closed = f.close(&first.turn, Outcome::Completed, Some("answer")).await;
    let promoted = closed.promoted.unwrap();
    assert_eq!(promoted.id, second.turn.id);
    assert!(promoted.epoch > first.turn.epoch);
    let history = f.store.history(&f.conversation, Position::START, 10).await.unwrap();
    let by_position: Vec<_> =
        history.items.iter().map(|m| (m.body.as_str(), m.position.unwrap().0)).collect();
    assert_eq!(by_position, [("one", 1), ("answer", 2), ("two", 3)]);
    let by_seq = f.store.list_messages(&f.conversation, 0, 10).await.unwrap();
    let by_seq: Vec<_> = by_seq.items.iter().map(|m| (m.body.as_str(), m.seq)).collect();
    assert_eq!(by_seq, [("one", 1), ("two", 2), ("answer", 3)]);
    let tail = f.store.history(&f.conversation, Position(2), 10).await.unwrap();
    assert_eq!(tail.items.len(), 1);
}

/// 100 wait; the next one is refused and leaves nothing.
pub async fn a_full_queue_refuses_the_next_message<B: Backend>(backend: &B) {
    let f = Fixture::new(backend).await;
    for n in 0..=MAX_WAITING {
        f.send(&format!("{n}")).await;
    }
    let one_more = f.message("too much");
    assert_conflict!(
        f.store.accept_message(one_more.clone()).await,
        Conflict::QueueFull { limit: MAX_WAITING }
    );
    assert_error!(
        f.store.get_message(&one_more.message_id).await,
        Error::NotFound { kind: Kind::Message, .. }
    );
    let view = f.store.get_conversation(&f.conversation).await.unwrap();
    assert_eq!(view.waiting as usize, MAX_WAITING);
    assert_eq!(view.conversation.last_seq as usize, MAX_WAITING + 1);
}

/// Refused messages use no seq.
pub async fn bad_messages_are_refused_and_leave_nothing<B: Backend>(backend: &B) {
    let f = Fixture::new(backend).await;
    assert_error!(f.store.accept_message(f.message("")).await, Error::Invalid { field: "text", .. });
    let long = "x".repeat(MAX_USER_MESSAGE + 1);
    assert_error!(f.store.accept_message(f.message(&long)).await, Error::Invalid { field: "text", .. });
    let mut nowhere = f.message("hello");
    nowhere.conversation_id = conversation_id();
    let result = f.store.accept_message(nowhere).await;
    assert_error!(result, Error::NotFound { kind: Kind::Conversation, .. });
    let mut homeless = f.message("hello");
    homeless.workspace_id = Some(roundhouse_domain::id::WorkspaceId::parse("wsp_none").unwrap());
    assert_error!(f.store.accept_message(homeless).await, Error::NotFound { kind: Kind::Workspace, .. });
    assert_eq!(f.send("hello").await.message.seq, 1);
    let longest = "x".repeat(MAX_USER_MESSAGE);
    assert_eq!(f.send(&longest).await.message.body.len(), MAX_USER_MESSAGE);
}

/// By external id, by request id, by id.
pub async fn create_is_get_or_create<B: Backend>(backend: &B) {
    let store = backend.open().await;
    let command = |id: &str, request: Option<&str>, title: &str| CreateConversation {
        request: request.map(|r| key(r, 1)),
        id: conversation_id(),
        external_id: Some(ExternalId { project: "p".into(), provider: "slack".into(), id: id.into() }),
        title: title.into(),
        agent_name: None,
        workspace_id: None,
        time: now(),
    };
    let first = store.create_conversation(command("a", Some("r1"), "first")).await.unwrap();
    assert!(first.created);
    let found = store.create_conversation(command("a", Some("r2"), "second")).await.unwrap();
    assert!(!found.created);
    assert_eq!(found.conversation, first.conversation);
    let repeated = store.create_conversation(command("a", Some("r1"), "first")).await.unwrap();
    assert!(repeated.created, "the first answer is given again");
    let other = store.create_conversation(command("b", None, "")).await.unwrap();
    assert_ne!(other.conversation.id, first.conversation.id);
    let reused = CreateConversation { request: Some(key("r1", 9)), ..command("c", None, "") };
    assert_conflict!(store.create_conversation(reused).await, Conflict::RequestIdReused);
    let name = |id: &str| ExternalId { project: "p".into(), provider: "slack".into(), id: id.into() };
    let view = store.find_conversation(&name("a")).await.unwrap();
    assert_eq!(view.conversation, first.conversation);
    assert_error!(
        store.find_conversation(&name("z")).await,
        Error::NotFound { kind: Kind::Conversation, .. }
    );
    let plain = CreateConversation { external_id: None, ..command("", None, "plain") };
    let made = store.create_conversation(plain.clone()).await.unwrap();
    let again = store.create_conversation(plain).await.unwrap();
    assert_eq!((made.created, again.created), (true, false));
    assert_error!(
        store.create_conversation(command("", None, "")).await,
        Error::Invalid { field: "external_id", .. }
    );
}

/// Agent and workspace of a new conversation are those of its first message, unless that names others.
pub async fn a_conversation_has_a_first_agent_and_workspace<B: Backend>(backend: &B) {
    let f = Fixture::new(backend).await;
    let create = CreateConversation {
        request: None,
        id: conversation_id(),
        external_id: None,
        title: String::new(),
        agent_name: Some("first".into()),
        workspace_id: Some(f.workspace.id.clone()),
        time: now(),
    };
    let conversation = f.store.create_conversation(create).await.unwrap().conversation;
    let mut message = f.message("hello");
    (message.conversation_id, message.agent_name, message.workspace_id) = (conversation.id, None, None);
    let turn = f.store.accept_message(message).await.unwrap().turn;
    assert_eq!(
        (turn.agent_name.as_deref(), turn.workspace_id),
        (Some("first"), Some(f.workspace.id.clone()))
    );
}

/// Archive is a flag.
pub async fn sending_unarchives<B: Backend>(backend: &B) {
    let f = Fixture::new(backend).await;
    let running = f.send("one").await;
    let set = |archived| SetArchived {
        request: None,
        conversation_id: f.conversation.clone(),
        archived,
        time: now(),
    };
    assert!(f.store.set_archived(set(true)).await.unwrap().archived);
    assert_eq!(f.turn(&running.turn).await.state, TurnState::Dispatching);
    f.close(&running.turn, Outcome::Completed, None).await;
    assert!(f.store.get_conversation(&f.conversation).await.unwrap().conversation.archived, "S7");
    f.send("two").await;
    assert!(!f.store.get_conversation(&f.conversation).await.unwrap().conversation.archived);
}

/// Pages do not overlap and leave nobody out.
pub async fn conversations_are_listed_newest_first_in_pages<B: Backend>(backend: &B) {
    let store = backend.open().await;
    let project = format!("project-{}", fresh());
    let mut ids = Vec::new();
    for n in 0..5 {
        let external = ExternalId { project: project.clone(), provider: "x".into(), id: n.to_string() };
        let command = CreateConversation {
            request: None,
            id: conversation_id(),
            external_id: Some(external),
            title: String::new(),
            agent_name: None,
            workspace_id: None,
            time: now(),
        };
        ids.push(store.create_conversation(command).await.unwrap().conversation.id);
    }
    let archive = SetArchived { request: None, conversation_id: ids[2].clone(), archived: true, time: now() };
    store.set_archived(archive).await.unwrap();
    let mut seen = Vec::new();
    let mut query =
        ListConversations { after: None, limit: 2, archived: Some(false), project: Some(project.clone()) };
    loop {
        let page = store.list_conversations(query.clone()).await.unwrap();
        seen.extend(page.items.into_iter().map(|v| v.conversation.id));
        if !page.more {
            break;
        }
        query.after = seen.last().cloned();
    }
    assert_eq!(seen, [ids[4].clone(), ids[3].clone(), ids[1].clone(), ids[0].clone()]);
    let archived = ListConversations { archived: Some(true), after: None, ..query };
    assert_eq!(store.list_conversations(archived).await.unwrap().items[0].conversation.id, ids[2]);
}

/// What attention is computed from is there: who holds the workspace, what failed.
pub async fn attention_has_its_facts<B: Backend>(backend: &B) {
    let f = Fixture::new(backend).await;
    let holder = f.send("holds").await.turn;
    f.store.take_slot(&super::fixture::owner(&holder), now()).await.unwrap();
    let other = super::fixture::new_conversation(&f.store).await;
    let mut message = f.message("waits");
    message.conversation_id = other.clone();
    f.store.accept_message(message).await.unwrap();
    let view = f.store.get_conversation(&other).await.unwrap();
    let list = attention(&view.facts, Timestamp(0));
    assert_eq!(list.len(), 1, "{list:?}");
    assert_eq!(list[0].reason, AttentionReason::WaitingForWorkspace);
    assert!(list[0].next_action.contains(holder.id.as_str()));
    f.close(&holder, Outcome::Failed(error()), None).await;
    let view = f.store.get_conversation(&f.conversation).await.unwrap();
    assert_eq!((view.active_turn, view.waiting), (None, 0));
    assert_eq!(attention(&view.facts, Timestamp(0))[0].reason, AttentionReason::TurnFailed);
}

/// What was answered is there after a restart.
pub async fn everything_survives_closing_and_opening<B: Backend>(backend: &B) {
    let f = Fixture::new(backend).await;
    let first = f.send("one").await;
    let queued = f.send("two").await;
    let session = f.arrange(&first.turn).await;
    f.accepted(&first.turn, 1).await;
    let before = (
        f.turn(&first.turn).await,
        f.turn(&queued.turn).await,
        f.store.changes_after(&f.conversation, 0, 1_000).await.unwrap(),
        f.store.get_session(&session.id).await.unwrap(),
    );
    f.store.close().await;
    assert_error!(f.store.open_turns().await, Error::Unavailable { .. });
    let f2 = Fixture { store: backend.open().await, conversation: f.conversation, workspace: f.workspace };
    let after = (
        f2.turn(&first.turn).await,
        f2.turn(&queued.turn).await,
        f2.store.changes_after(&f2.conversation, 0, 1_000).await.unwrap(),
        f2.store.get_session(&session.id).await.unwrap(),
    );
    assert_eq!(before, after);
    assert_eq!(f2.store.open_turns().await.unwrap(), vec![after.0.clone()]);
    let closed = f2.close(&after.0, Outcome::Completed, Some("done")).await;
    assert_eq!(closed.promoted.unwrap().id, queued.turn.id);
}
