//! The context of a turn: what its session is to be told before the message.

use roundhouse_domain::context::{
    Composed, ContextError, HistoryMessage, Purpose, Request, Speaker, Summary, compose,
};
use roundhouse_domain::message::{Message, Position, Role};
use roundhouse_domain::session::Session;
use roundhouse_store::{Dispatch, Store};

/// Messages per read of the history.
const PAGE: usize = 1_000;

/// Why there is no context.
#[derive(Debug)]
pub(super) enum Failure {
    /// The history could not be read.
    Store(roundhouse_store::Error),
    /// It could not be composed.
    Compose(ContextError),
}

/// Composes what `session` is told in this turn; none when there is nothing to tell.
///
/// A session whose native reference never became known may have to be started anew by the engine, whatever its
/// watermark says: it is seeded with everything. In doubt a message is repeated rather than left out.
pub(super) async fn for_session(
    store: &dyn Store,
    dispatch: &Dispatch,
    session: &Session,
    budget: usize,
) -> Result<Option<Composed>, Failure> {
    let seed = session.native_ref.is_none();
    let summary =
        if seed { store.turn_summary(&dispatch.turn.id).await.map_err(Failure::Store)? } else { None };
    let after = if seed {
        // What a summary covers is not even read.
        summary.as_ref().map_or(Position::START, |summary| summary.through)
    } else {
        session.watermark
    };
    let messages = read(store, dispatch, after).await.map_err(Failure::Store)?;
    let history: Vec<HistoryMessage<'_>> = messages.iter().filter_map(entry).collect();
    let purpose = if seed {
        let summary =
            summary.as_ref().map(|summary| Summary { text: &summary.text, through: summary.through.0 });
        // The agent's prompt reaches the engine by its own way.
        Purpose::Seed { agent_prompt: None, summary }
    } else {
        Purpose::CatchUp { after: after.0 }
    };
    let request = Request {
        purpose,
        history: &history,
        own_position: dispatch.message.position.map(|p| p.0),
        own_text: &dispatch.message.body,
        budget,
    };
    compose(&request).map_err(Failure::Compose)
}

async fn read(
    store: &dyn Store,
    dispatch: &Dispatch,
    after: Position,
) -> roundhouse_store::Result<Vec<Message>> {
    let mut messages: Vec<Message> = Vec::new();
    let mut after = after;
    loop {
        let page = store.history(&dispatch.conversation.id, after, PAGE).await?;
        let last = page.items.last().and_then(|message| message.position);
        messages.extend(page.items);
        match last {
            Some(last) if page.more => after = last,
            Some(_) | None => return Ok(messages),
        }
    }
}

fn entry(message: &Message) -> Option<HistoryMessage<'_>> {
    let speaker = match message.role {
        Role::User => Speaker::User,
        Role::Agent => Speaker::Agent,
        Role::System => Speaker::System,
    };
    Some(HistoryMessage {
        position: message.position?.0,
        speaker,
        name: Some(message.actor.as_str()).filter(|name| !name.is_empty()),
        text: &message.body,
        incomplete: message.incomplete,
    })
}
