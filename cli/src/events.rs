//! Following a conversation: one stream that survives the loss of its connection.

pub(crate) mod render;

use std::time::{Duration, Instant};

use roundhouse_proto::control::v1 as control;
use tonic::{Code, Status, Streaming};

use crate::client::{CALL_TIMEOUT, Client};
use crate::status::Failure;

/// How long a lost connection is tried again before the command gives up.
const GIVE_UP_AFTER: Duration = Duration::from_secs(120);
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(3);

/// What to follow.
#[derive(Debug, Clone, Default)]
pub(crate) struct Wish {
    pub(crate) conversation_id: String,
    /// Only this turn; the stream then ends after its terminal event.
    pub(crate) turn_id: Option<String>,
    /// Begin after this cursor; empty for the oldest kept.
    pub(crate) after: String,
    pub(crate) partials: bool,
    pub(crate) follow: bool,
}

/// What comes next.
#[derive(Debug)]
pub(crate) enum Next {
    /// An item.
    Item(Box<control::StreamEventsResponse>),
    /// The connection was lost; it is being taken up again after the last cursor.
    Lost(Failure),
    /// It is there again.
    Back,
    /// All that was asked for has come.
    End,
}

/// A stream of events that is taken up again where it was when its connection is lost.
#[derive(Debug)]
pub(crate) struct Follower {
    client: Client,
    wish: Wish,
    stream: Option<Streaming<control::StreamEventsResponse>>,
    /// Whether the server has answered at all; before that a refused connection is told at once.
    reached: bool,
    terminal_seen: bool,
    lost: Option<Lost>,
    patience: Duration,
}

#[derive(Debug, Clone, Copy)]
struct Lost {
    since: Instant,
    pause: Duration,
}

impl Follower {
    pub(crate) const fn new(client: Client, wish: Wish) -> Self {
        Self {
            client,
            wish,
            stream: None,
            reached: false,
            terminal_seen: false,
            lost: None,
            patience: GIVE_UP_AFTER,
        }
    }

    /// For a server that has just answered: when it is away at once, it is waited for like one that went away later.
    pub(crate) const fn reached(mut self) -> Self {
        self.reached = true;
        self
    }

    /// For somebody who stays: a server that is away is tried for as long as it takes.
    pub(crate) const fn patient(mut self) -> Self {
        self.patience = Duration::MAX;
        self
    }

    /// The cursor to go on after.
    pub(crate) fn cursor(&self) -> &str {
        &self.wish.after
    }

    /// Waits for what comes next. Not to be called again after [`Next::End`]. Cancellation safe: a call that is
    /// dropped loses nothing but the time it waited.
    pub(crate) async fn next(&mut self) -> Result<Next, Failure> {
        loop {
            let Some(stream) = self.stream.as_mut() else {
                match self.open().await {
                    Ok(stream) => {
                        self.stream = Some(stream);
                        self.reached = true;
                        if self.lost.is_some_and(|lost| lost.pause > FIRST_PAUSE) {
                            return Ok(Next::Back);
                        }
                        continue;
                    }
                    Err(status) => match self.after(status).await? {
                        Some(next) => return Ok(next),
                        None => continue,
                    },
                }
            };
            match stream.message().await {
                Ok(Some(item)) => {
                    self.lost = None;
                    self.note(&item);
                    return Ok(Next::Item(Box::new(item)));
                }
                Ok(None) => {
                    self.stream = None;
                    let complete = match self.wish.turn_id {
                        Some(_) => self.terminal_seen || !self.wish.follow,
                        None => !self.wish.follow,
                    };
                    if complete {
                        return Ok(Next::End);
                    }
                    // A server that stops may end its streams without an error.
                    let status = Status::unavailable("the server ended the stream");
                    if let Some(next) = self.after(status).await? {
                        return Ok(next);
                    }
                }
                Err(status) => {
                    self.stream = None;
                    if let Some(next) = self.after(status).await? {
                        return Ok(next);
                    }
                }
            }
        }
    }

    fn note(&mut self, item: &control::StreamEventsResponse) {
        use control::stream_events_response::Item;
        if !item.cursor.is_empty() {
            self.wish.after.clone_from(&item.cursor);
        }
        match &item.item {
            Some(Item::TurnEvent(event)) => {
                use roundhouse_proto::engine::v1::event_body::Kind;
                let kind = event.body.as_ref().and_then(|body| body.kind.as_ref());
                let ours = self.wish.turn_id.as_ref().is_none_or(|turn| *turn == event.turn_id);
                self.terminal_seen |= ours && matches!(kind, Some(Kind::Terminal(_)));
            }
            Some(
                Item::Message(_)
                | Item::Turn(_)
                | Item::Session(_)
                | Item::Summary(_)
                | Item::Partial(_)
                | Item::PartialReset(_),
            )
            | None => {}
        }
    }

    async fn open(&self) -> Result<Streaming<control::StreamEventsResponse>, Status> {
        let request = control::StreamEventsRequest {
            conversation_id: self.wish.conversation_id.clone(),
            after_cursor: self.wish.after.clone(),
            turn_id: self.wish.turn_id.clone().unwrap_or_default(),
            include_partial: self.wish.partials,
            follow: Some(self.wish.follow),
        };
        // A stream has no deadline of its own, its opening has.
        let mut service = self.client.conversations();
        match tokio::time::timeout(CALL_TIMEOUT, service.stream_events(request)).await {
            Ok(answer) => answer.map(tonic::Response::into_inner),
            Err(_) => Err(Status::deadline_exceeded("the server did not open the stream in time")),
        }
    }

    /// What a failure of the stream means: an error to tell, a loss to tell, or just another try.
    async fn after(&mut self, status: Status) -> Result<Option<Next>, Failure> {
        let connection_lost = is_connection_loss(&status);
        let failure = Failure::from(status);
        if failure.reason == "SLOW_READER" {
            if let Some(cursor) = failure.metadata("last_cursor").filter(|cursor| !cursor.is_empty()) {
                self.wish.after = cursor.to_owned();
            }
            return Ok(None);
        }
        if !connection_lost || !self.reached {
            return Err(failure);
        }
        let first = self.lost.is_none();
        let lost = self.lost.get_or_insert_with(|| Lost { since: Instant::now(), pause: FIRST_PAUSE });
        if lost.since.elapsed() > self.patience {
            return Err(failure);
        }
        if first {
            // Told before the pause, so that a person knows at once.
            return Ok(Some(Next::Lost(failure)));
        }
        let pause = lost.pause;
        lost.pause = (pause * 2).min(LONGEST_PAUSE);
        tokio::time::sleep(pause).await;
        Ok(None)
    }
}

/// Whether the connection or the server went away, rather than the server refusing. A killed server shows as one of
/// several codes, all of them without details of ours.
pub(crate) fn is_connection_loss(status: &Status) -> bool {
    match status.code() {
        Code::Unavailable => true,
        Code::Unknown | Code::Internal | Code::Cancelled | Code::DeadlineExceeded => {
            status.details().is_empty()
        }
        Code::Ok
        | Code::InvalidArgument
        | Code::NotFound
        | Code::AlreadyExists
        | Code::PermissionDenied
        | Code::ResourceExhausted
        | Code::FailedPrecondition
        | Code::Aborted
        | Code::OutOfRange
        | Code::Unimplemented
        | Code::DataLoss
        | Code::Unauthenticated => false,
    }
}
