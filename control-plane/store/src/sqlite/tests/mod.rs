//! Tests of the implementation that the conformance suite cannot see.

mod files;
mod interleavings;
mod upkeep;
mod writer;

#[cfg(feature = "failpoints")]
mod crashes;

use std::path::PathBuf;

use roundhouse_domain::agent_file::Trigger;
use roundhouse_domain::id::{ConversationId, MessageId, RequestId, TurnId};
use roundhouse_domain::time::Timestamp;

use super::*;
use crate::command::{AcceptMessage, CreateConversation, RequestKey};
use crate::conformance::Backend;
use crate::store::Store;

/// A database in a folder of its own.
struct Folder {
    dir: tempfile::TempDir,
}

impl Folder {
    fn new() -> Self {
        Self { dir: tempfile::tempdir().unwrap() }
    }

    fn path(&self) -> PathBuf {
        self.dir.path().join("control.db")
    }

    fn store(&self) -> SqliteStore {
        SqliteStore::open(self.path()).unwrap()
    }
}

impl Backend for Folder {
    type Store = SqliteStore;

    async fn open(&self) -> SqliteStore {
        self.store()
    }
}

mod conforms {
    use super::*;

    crate::conformance_tests!(Folder::new());
}

fn conversation_id() -> ConversationId {
    ConversationId::parse("cnv_1").unwrap()
}

async fn create(store: &SqliteStore) -> crate::Result<crate::view::Created> {
    let command = CreateConversation {
        request: None,
        id: conversation_id(),
        external_id: None,
        title: String::new(),
        agent_name: None,
        workspace_id: None,
        time: Timestamp(1),
    };
    store.create_conversation(command).await
}

/// Message number `n` of the one conversation.
fn message(n: u32, body: &str) -> AcceptMessage {
    AcceptMessage {
        request: RequestKey {
            id: RequestId::parse(format!("request-{n}")).unwrap(),
            rpc: "SendMessage",
            body_hash: [0; 32],
        },
        conversation_id: conversation_id(),
        message_id: MessageId::parse(format!("msg_{n}")).unwrap(),
        turn_id: TurnId::parse(format!("trn_{n}")).unwrap(),
        actor: "ann".into(),
        body: body.to_owned(),
        agent_name: None,
        workspace_id: None,
        surface: Trigger::Manual,
        time: Timestamp(1),
    }
}

async fn bodies(store: &SqliteStore) -> Vec<String> {
    let page = store.list_messages(&conversation_id(), 0, 1_000).await.unwrap();
    page.items.into_iter().map(|m| m.body).collect()
}
