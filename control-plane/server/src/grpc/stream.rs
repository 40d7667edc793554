//! StreamEvents: replay from the store, then follow it. Hints only say when to look.

use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use futures::stream::BoxStream;
use prost::Message as _;
use roundhouse_domain::conflict::Conflict;
use roundhouse_domain::cursor;
use roundhouse_domain::event::{Change, ChangeBody, EventKind, Fact};
use roundhouse_domain::id::{ConversationId, TurnId};
use roundhouse_domain::turn::TurnState;
use roundhouse_proto::control::v1 as control;
use roundhouse_proto::control::v1::stream_events_response::Item;
use roundhouse_proto::engine::v1 as engine;
use roundhouse_store::Error as StoreError;
use tokio::sync::{mpsc, oneshot};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;

use super::{from_proto, to_proto};
use crate::app::App;
use crate::error::{Error, Missing, Result};
use crate::hub::{Piece, Subscription};

/// Items between the reader of the store and the connection. A slow client is noticed when they are full.
const BUFFER: usize = 64;
/// Changes per read of the store.
const PAGE: usize = 500;

/// What a call to StreamEvents answers.
pub(crate) type Events = BoxStream<'static, std::result::Result<control::StreamEventsResponse, Status>>;

/// Begins a stream. What is wrong with the request is told at once, not in the stream.
pub(crate) async fn begin(app: &Arc<App>, request: control::StreamEventsRequest) -> Result<Events> {
    let conversation = from_proto::conversation_id(&request.conversation_id)?;
    let turn = match request.turn_id.as_str() {
        "" => None,
        text => Some(from_proto::turn_id(text)?),
    };
    let position = cursor::decode(&conversation, &request.after_cursor).map_err(|_| Error::CursorInvalid)?;
    if let Some(turn) = &turn {
        let stored = app.store.get_turn(turn).await?;
        if stored.conversation_id != conversation {
            return Err(Error::missing(Missing::Turn, turn.as_str()));
        }
    }
    // Subscribed before anything is read: what is stored in between is seen by the next look.
    let subscription = app.hub.subscribe(&conversation);
    // A bad cursor and an unknown conversation are found by the first look.
    look(app, &conversation, position, 1).await?;
    let (sender, receiver) = mpsc::channel(BUFFER);
    let (end_sender, end) = oneshot::channel();
    let follower = Follower {
        app: Arc::clone(app),
        conversation,
        turn,
        position,
        partials: request.include_partial,
        follow: request.follow.unwrap_or(true),
        subscription,
        _counted: Arc::clone(&app.followers),
        sender,
    };
    app.tasks.spawn("stream", async move {
        let outcome = follower.run().await;
        // Nobody listens any more if this fails.
        let _ = end_sender.send(outcome);
    });
    let last = futures::stream::once(end).filter_map(async |end| match end {
        Ok(Ok(())) => None,
        Ok(Err(error)) => Some(Err(Status::from(error))),
        // The task was stopped with the server.
        Err(_) => Some(Err(Status::from(Error::Draining))),
    });
    Ok(ReceiverStream::new(receiver).map(Ok).chain(last).boxed())
}

async fn look(app: &App, conversation: &ConversationId, after: u64, limit: usize) -> Result<Vec<Change>> {
    match app.store.changes_after(conversation, after, limit).await {
        Ok(changes) => Ok(changes.items),
        Err(StoreError::Conflict(Conflict::CursorPruned { pruned_through })) => {
            Err(Error::CursorPruned { oldest: cursor::encode(conversation, pruned_through) })
        }
        Err(error) => Err(error.into()),
    }
}

/// One client that reads a conversation.
struct Follower {
    app: Arc<App>,
    conversation: ConversationId,
    turn: Option<TurnId>,
    position: u64,
    partials: bool,
    follow: bool,
    subscription: Subscription,
    /// Counts it among the followers.
    _counted: Arc<()>,
    sender: mpsc::Sender<control::StreamEventsResponse>,
}

/// Whether the stream goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    /// There may be more at once.
    More,
    /// All that is stored was handed over.
    CaughtUp,
    /// The turn that was asked for has ended.
    TurnEnded,
    /// The client has gone.
    Gone,
}

impl Follower {
    async fn run(mut self) -> Result<()> {
        loop {
            self.subscription.mark_seen();
            match self.replay().await? {
                Next::More => continue,
                Next::TurnEnded | Next::Gone => return Ok(()),
                Next::CaughtUp if !self.follow => return Ok(()),
                Next::CaughtUp => {}
            }
            if self.turn_is_over().await? {
                // Its terminal event stands before the cursor that was asked for.
                return Ok(());
            }
            if self.partials && self.hand_pieces().await? == Next::Gone {
                return Ok(());
            }
            tokio::select! {
                () = self.subscription.changed() => {}
                () = tokio::time::sleep(self.app.settings.poll) => {}
                () = self.sender.closed() => return Ok(()),
            }
        }
    }

    /// Hands over one page of what is stored.
    async fn replay(&mut self) -> Result<Next> {
        let changes = look(&self.app, &self.conversation, self.position, PAGE).await?;
        if changes.is_empty() {
            return Ok(Next::CaughtUp);
        }
        for change in changes {
            let position = change.cursor;
            let ends = self.ends(&change);
            if let Some(item) = self.item(&change).await? {
                let response = control::StreamEventsResponse {
                    cursor: cursor::encode(&self.conversation, position),
                    at: Some(to_proto::timestamp(change.time)),
                    item: Some(item),
                };
                if self.hand(response).await? == Next::Gone {
                    return Ok(Next::Gone);
                }
            }
            self.position = position;
            if ends {
                return Ok(Next::TurnEnded);
            }
        }
        Ok(Next::More)
    }

    fn ends(&self, change: &Change) -> bool {
        match (&change.body, &self.turn) {
            (ChangeBody::Event(event), Some(turn)) => {
                event.kind == EventKind::Terminal && event.turn_id == *turn
            }
            (ChangeBody::Event(_) | ChangeBody::Fact(_), _) => false,
        }
    }

    async fn turn_is_over(&self) -> Result<bool> {
        let Some(turn) = &self.turn else { return Ok(false) };
        if !self.app.store.get_turn(turn).await?.state.is_terminal() {
            return Ok(false);
        }
        // It may have ended after the last look: then its terminal event is still to come.
        Ok(look(&self.app, &self.conversation, self.position, 1).await?.is_empty())
    }

    async fn hand_pieces(&mut self) -> Result<Next> {
        for piece in self.subscription.pieces(self.turn.as_ref()) {
            let item = match piece {
                Piece::Partial(turn, partial) => {
                    Item::Partial(control::TurnPartial { turn_id: turn.to_string(), partial: Some(partial) })
                }
                Piece::Reset(turn, reset) => Item::PartialReset(control::TurnPartialReset {
                    turn_id: turn.to_string(),
                    reset: Some(reset),
                }),
            };
            let response =
                control::StreamEventsResponse { cursor: String::new(), at: None, item: Some(item) };
            if self.hand(response).await? == Next::Gone {
                return Ok(Next::Gone);
            }
        }
        Ok(Next::CaughtUp)
    }

    async fn hand(&self, response: control::StreamEventsResponse) -> Result<Next> {
        let limit: Duration = self.app.settings.slow_reader_timeout;
        match self.sender.send_timeout(response, limit).await {
            Ok(()) => Ok(Next::More),
            Err(mpsc::error::SendTimeoutError::Closed(_)) => Ok(Next::Gone),
            Err(mpsc::error::SendTimeoutError::Timeout(_)) => {
                Err(Error::SlowReader { last_cursor: cursor::encode(&self.conversation, self.position) })
            }
        }
    }

    /// The change as clients see it; none for what they do not, or what another turn did.
    async fn item(&self, change: &Change) -> Result<Option<Item>> {
        let store = &self.app.store;
        let wanted = |turn: &TurnId| self.turn.as_ref().is_none_or(|only| only == turn);
        Ok(match &change.body {
            ChangeBody::Event(event) if wanted(&event.turn_id) => Some(Item::TurnEvent(control::TurnEvent {
                turn_id: event.turn_id.to_string(),
                seq: event.seq,
                body: engine::EventBody::decode(event.payload.as_slice()).ok(),
            })),
            ChangeBody::Event(_) => None,
            ChangeBody::Fact(fact) => match fact {
                Fact::MessageStored { message_id, turn_id, .. } => {
                    let ours = turn_id.as_ref().map_or_else(|| self.turn.is_none(), &wanted);
                    if !ours {
                        return Ok(None);
                    }
                    Some(Item::Message(to_proto::listed_message(&store.get_message(message_id).await?)))
                }
                Fact::TurnQueued { turn_id, .. } if wanted(turn_id) => {
                    Some(self.turn_at(turn_id, TurnState::Queued).await?)
                }
                Fact::TurnPromoted { turn_id, .. } if wanted(turn_id) => {
                    Some(self.turn_at(turn_id, TurnState::Dispatching).await?)
                }
                Fact::TurnState { turn_id, state } if wanted(turn_id) => {
                    Some(self.turn_at(turn_id, *state).await?)
                }
                Fact::SessionChosen { session_id, turn_id, .. }
                | Fact::SessionOpened { session_id, turn_id, .. }
                    if wanted(turn_id) =>
                {
                    Some(Item::Session(to_proto::session(&store.get_session(session_id).await?)))
                }
                Fact::SummaryChanged { version } if self.turn.is_none() => {
                    let summary = store.get_summary(&self.conversation, Some(*version)).await?;
                    Some(Item::Summary(to_proto::told_summary(&summary)))
                }
                Fact::SessionUnusable { session_id, .. } if self.turn.is_none() => {
                    Some(Item::Session(to_proto::session(&store.get_session(session_id).await?)))
                }
                Fact::TurnQueued { .. }
                | Fact::TurnPromoted { .. }
                | Fact::TurnState { .. }
                | Fact::SessionChosen { .. }
                | Fact::SessionOpened { .. }
                | Fact::SessionUnusable { .. }
                | Fact::SummaryChanged { .. }
                | Fact::Archived { .. } => None,
            },
        })
    }

    /// A turn as it was at that change, as far as a reader could be misled by what came later.
    async fn turn_at(&self, turn: &TurnId, state: TurnState) -> Result<Item> {
        let mut turn = to_proto::turn(&self.app.store.get_turn(turn).await?);
        turn.set_status(to_proto::status(state));
        if !state.is_terminal() {
            turn.end_time = None;
            turn.failure = None;
            turn.answer_message_id = String::new();
        }
        Ok(Item::Turn(turn))
    }
}
