//! Forgets old events. Messages, turns and sessions are kept for good; events of turns that have not ended, too.

use std::sync::Arc;
use std::time::Duration;

use roundhouse_domain::conversation::Conversation;
use roundhouse_domain::time::Timestamp;
use roundhouse_store::{ListConversations, Store};

use crate::app::App;
use crate::clock;

/// Items per read of the store.
const PAGE: usize = 500;

/// Forgets from time to time what is older than configured.
pub(crate) async fn keep_up(app: Arc<App>) {
    let mut every = tokio::time::interval(app.settings.retention_every);
    every.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    // The first tick comes at once, when there is more urgent work.
    every.tick().await;
    loop {
        every.tick().await;
        let before = before(clock::now(), app.settings.event_retention);
        if let Err(error) = forget(app.store.as_ref(), before).await {
            tracing::warn!(%error, "old events were not forgotten; they are looked at again later");
        }
    }
}

fn before(now: Timestamp, retention: Duration) -> Timestamp {
    Timestamp::from_micros(
        now.as_micros().saturating_sub(i64::try_from(retention.as_micros()).unwrap_or(i64::MAX)),
    )
}

async fn forget(store: &dyn Store, before: Timestamp) -> roundhouse_store::Result<()> {
    let mut after = None;
    loop {
        let query = ListConversations { after, limit: PAGE, ..ListConversations::default() };
        let page = store.list_conversations(query).await?;
        for view in &page.items {
            forget_in(store, &view.conversation, before).await?;
        }
        after = page.items.last().map(|view| view.conversation.id.clone());
        if !page.more || after.is_none() {
            return Ok(());
        }
    }
}

async fn forget_in(
    store: &dyn Store,
    conversation: &Conversation,
    before: Timestamp,
) -> roundhouse_store::Result<()> {
    let mut pruned = conversation.pruned_through;
    loop {
        let changes = store.changes_after(&conversation.id, pruned, PAGE).await?.items;
        let old = changes.iter().take_while(|change| change.time < before);
        let Some(last) = old.last() else { return Ok(()) };
        let through = store.prune_changes(&conversation.id, last.cursor).await?;
        // It stops before what an open turn needs.
        if through <= pruned || through < last.cursor {
            return Ok(());
        }
        tracing::debug!(conversation_id = %conversation.id, through, "old events were forgotten");
        pruned = through;
    }
}
