//! Following a turn's events to its end, while cancels and permission answers are delivered beside it.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use roundhouse_domain::event::{Effect, EventSource, NewEvent};
use roundhouse_domain::id::ConversationId;
use roundhouse_domain::limits::MAX_BATCH;
use roundhouse_domain::session::SessionState;
use roundhouse_domain::turn::TurnState;
use roundhouse_proto::engine::v1 as engine;
use roundhouse_proto::engine::v1::ErrorReason;
use roundhouse_proto::engine::v1::event_body::Kind;
use roundhouse_proto::engine::v1::stream_events_response::Item as Streamed;
use roundhouse_store::{AppendEvents, ListPermissions};
use tokio::sync::mpsc;

use super::Signals;
use super::drive::{Drive, Flow, Interrupt, Pauses, StepResult, Until};
use super::effects::{self, Ending, Incoming};
use super::engage::opened_of;
use super::plan::RunnerView;
use super::pump::{self, Item};
use super::silence;
use crate::app::App;
use crate::clock;
use crate::failpoint::kill_point;
use crate::grpc::to_proto;
use crate::runners::{CallError, RunnerHandle};

/// Open permissions per read. A turn has a few at a time.
const MAX_PERMISSIONS: usize = 200;

/// How long a few events wait for more before they are stored: an engine tells what belongs together piece by piece,
/// and each commit costs a sync. Unfinished text does not wait.
const GATHER: Duration = Duration::from_millis(3);

/// So many wait for no more.
const GATHERED: usize = 32;

/// A batch of what came.
#[derive(Debug, Default)]
struct Batch {
    events: Vec<NewEvent>,
    ending: Option<Box<Ending>>,
    unusable: Option<String>,
    end: Option<Option<CallError>>,
    /// An event left a gap: the stream is read again from what is stored.
    gap: bool,
}

impl Drive {
    /// Follows the turn's events until it ends, the stream breaks or the session has to be replaced.
    pub(super) async fn attach(&mut self) -> StepResult {
        let runner = self.runner()?;
        let turn = &self.stored()?.turn;
        let request = engine::StreamEventsRequest {
            turn_id: turn.id.to_string(),
            epoch: Some(turn.epoch.0),
            after: turn.last_number,
            include_partial: true,
        };
        let session = self.session()?;
        self.opened = opened_of(&self.stored()?.turn, &session);
        let stream = match runner.link() {
            Ok(link) => link.stream_events(request).await,
            Err(error) => Err(error),
        };
        let stream = match stream {
            Ok(stream) => stream,
            Err(error) => return self.stream_failed(&runner, error).await,
        };
        self.answered(&runner);
        let receiver = pump::start(&self.app.tasks, stream);
        let controls = Controls {
            app: Arc::clone(&self.app),
            signals: Arc::clone(&self.signals),
            runner: Arc::clone(&runner),
            cancel: self.cancel_request()?,
            turn: self.turn_id.clone(),
        };
        let (app, turn_id) = (Arc::clone(&self.app), self.turn_id.clone());
        let silent = tokio::select! {
            flow = self.consume(&runner, receiver) => return flow,
            never = controls.deliver() => match never {},
            silent = silence::of(&app, &runner, &turn_id) => silent,
        };
        self.unheard(&runner);
        self.stream_failed(&runner, silent).await
    }

    async fn stream_failed(&mut self, runner: &Arc<RunnerHandle>, error: CallError) -> StepResult {
        match error {
            CallError::Unreachable(detail) => {
                if self.gone(runner, Until::Lost) {
                    return self.lose().await;
                }
                tracing::debug!(detail, "the event stream is broken; it is resumed by number");
            }
            CallError::Refused { reason: Some(ErrorReason::TurnNotFound), .. } => {
                self.answered(runner);
                self.view = RunnerView::NotAsked;
            }
            CallError::Refused { reason, message, .. } => {
                self.answered(runner);
                tracing::info!(?reason, message, "the runner refuses the event stream; it is asked again");
                return self.refused(runner).await;
            }
        }
        let pause = self.pauses.next();
        self.pause_for_runner(runner, pause).await;
        self.dispatch = None;
        Ok(Flow::Again)
    }

    async fn consume(
        &mut self,
        runner: &Arc<RunnerHandle>,
        mut receiver: mpsc::Receiver<Item>,
    ) -> StepResult {
        let conversation = self.stored()?.conversation.id.clone();
        let mut items = Vec::with_capacity(MAX_BATCH);
        loop {
            // One place is kept free for the notice that a close may add.
            if receiver.recv_many(&mut items, MAX_BATCH - 2).await == 0 {
                // Only a server that stops drops the sender without a word.
                return Err(Interrupt::Reload);
            }
            runner.heard();
            self.heeded();
            gather(&mut receiver, &mut items).await;
            if self.stored()?.turn.opening.is_none()
                && let Some(origin) = items.iter().find_map(|item| self.opening_told(item))
            {
                self.rebuild_opening(origin).await?;
            }
            let batch = self.sort(&conversation, &mut items)?;
            if let Some(ending) = batch.ending {
                return self.close(batch.events, *ending).await;
            }
            self.append(batch.events).await?;
            if let Some(reason) = batch.unusable
                && !self.stored()?.turn.accepted
            {
                let mut session = self.session()?;
                // Stored as such by the event's effect.
                session.state = SessionState::Unusable(reason.clone());
                return self.replace(&session, &reason).await;
            }
            if batch.gap {
                return self
                    .stream_failed(runner, CallError::Unreachable("a number is missing".to_owned()))
                    .await;
            }
            if let Some(end) = batch.end {
                let error = end.unwrap_or_else(|| CallError::Unreachable("it ended early".to_owned()));
                return self.stream_failed(runner, error).await;
            }
            self.pauses.reset();
        }
    }

    /// Sorts what came into a batch. Partials go on at once: they come before the item that replaces them.
    fn sort(&self, conversation: &ConversationId, items: &mut Vec<Item>) -> StepResult<Batch> {
        let now = clock::now();
        let mut batch = Batch::default();
        let mut last = self.stored()?.turn.last_number;
        for item in items.drain(..) {
            let event = match item {
                Item::Message(Streamed::Event(event)) => event,
                Item::Message(Streamed::Partial(partial)) => {
                    self.app.hub.partial(conversation, &self.turn_id, &partial);
                    continue;
                }
                Item::Message(Streamed::PartialReset(reset)) => {
                    self.app.hub.reset(conversation, &self.turn_id, &reset.item_id);
                    continue;
                }
                Item::End(error) => {
                    batch.end = Some(error);
                    break;
                }
            };
            if event.number <= last {
                continue;
            }
            if event.number != last + 1 {
                batch.gap = true;
                break;
            }
            last = event.number;
            if let Some(kind) = event.body.as_ref().and_then(|body| body.kind.as_ref())
                && let Some(item_id) = effects::finished_item(kind)
            {
                self.app.hub.finish(conversation, &self.turn_id, item_id);
            }
            match effects::sort(event, &self.opened, now) {
                Incoming::Event(event) => batch.events.push(event),
                Incoming::Unusable { event, session_id, reason } => {
                    batch.events.push(event);
                    if session_id == self.opened.session_id {
                        batch.unusable = Some(reason);
                        break;
                    }
                }
                Incoming::Terminal(ending) => {
                    batch.ending = Some(ending);
                    break;
                }
            }
        }
        Ok(batch)
    }

    /// How the turn's session came to be, if an item tells that.
    fn opening_told(&self, item: &Item) -> Option<engine::Origin> {
        let Item::Message(Streamed::Event(event)) = item else { return None };
        match event.body.as_ref()?.kind.as_ref()? {
            Kind::Session(session)
                if session.state() == engine::session_event::State::Opened
                    && session.session_id == self.opened.session_id =>
            {
                Some(session.origin())
            }
            _ => None,
        }
    }

    /// Stores how the session was opened, if that is not stored, and events with it.
    pub(super) async fn append_first(&mut self, events: Vec<NewEvent>) -> StepResult<()> {
        if let Some(command) = self.record_opening(events)? {
            kill_point!("before-append");
            let turn = self.app.store.record_opening(command).await?;
            self.unstored = None;
            self.stored_mut()?.turn = turn;
        }
        Ok(())
    }

    pub(super) async fn append(&mut self, events: Vec<NewEvent>) -> StepResult<()> {
        let Some(last) = events.iter().rev().find_map(|event| match event.source {
            EventSource::Runner { number } => Some(number),
            EventSource::Own { .. } => None,
        }) else {
            return Ok(());
        };
        let accepted = events.iter().any(|event| matches!(event.effect, Effect::Accepted { .. }));
        if self.unstored.is_some() {
            return self.append_first(events).await;
        }
        kill_point!("before-append");
        let command = AppendEvents { owner: self.owner()?, events, time: clock::now() };
        let appended = self.app.store.append_events(command).await?;
        for illegal in &appended.illegal {
            tracing::warn!(%illegal, "an event that makes no sense in the turn's state");
        }
        let turn = &mut self.stored_mut()?.turn;
        turn.last_number = appended.last_number.max(last);
        turn.accepted |= accepted;
        turn.state = appended.state;
        Ok(())
    }
}

/// Waits a moment for more of what can wait.
async fn gather(receiver: &mut mpsc::Receiver<Item>, items: &mut Vec<Item>) {
    let until = tokio::time::Instant::now() + GATHER;
    while items.len() < GATHERED && items.iter().all(can_wait) {
        let more = tokio::time::timeout_at(until, receiver.recv_many(items, GATHERED)).await;
        // A channel that is closed and empty is found so by the next read, too.
        if !matches!(more, Ok(1..)) {
            return;
        }
    }
}

/// Whether an item can be stored with what comes after it. The end cannot, and unfinished text goes on at once, after
/// what came before it.
fn can_wait(item: &Item) -> bool {
    let Item::Message(Streamed::Event(event)) = item else { return false };
    let kind = event.body.as_ref().and_then(|body| body.kind.as_ref());
    !matches!(kind, Some(Kind::Terminal(_) | Kind::PermissionRequest(_)))
}

/// What is delivered to the runner while a turn's events are followed: each until the runner answers.
struct Controls {
    app: Arc<App>,
    signals: Arc<Signals>,
    runner: Arc<RunnerHandle>,
    cancel: engine::CancelRequest,
    turn: roundhouse_domain::id::TurnId,
}

impl Controls {
    /// Delivers for as long as the future is polled.
    async fn deliver(self) -> std::convert::Infallible {
        let mut pauses = Pauses::new(self.app.settings.backoff);
        let mut cancel_told = false;
        let mut answers_told: HashMap<String, engine::PermissionDecision> = HashMap::new();
        let mut seen_permission = false;
        loop {
            let mut outstanding = false;
            match self.app.store.get_turn(&self.turn).await {
                Ok(turn) if turn.state.is_terminal() => {
                    // The reader of the stream may be in the middle of that very commit; it is not to be dropped
                    // for it.
                    return std::future::pending().await;
                }
                Ok(turn) if turn.state == TurnState::Cancelling => {
                    if !cancel_told {
                        cancel_told = self.tell_cancel().await;
                        outstanding |= !cancel_told;
                    }
                }
                Ok(turn) => seen_permission |= turn.state == TurnState::WaitingForPermission,
                Err(error) => {
                    tracing::debug!(%error, "the turn could not be read");
                    outstanding = true;
                }
            }
            if seen_permission {
                outstanding |= !self.tell_answers(&mut answers_told).await;
            }
            let pause = if outstanding {
                pauses.next()
            } else {
                pauses.reset();
                self.app.settings.poll
            };
            tokio::select! {
                () = tokio::time::sleep(pause) => {
                    // An answer that the runner took and lost is told again.
                    answers_told.clear();
                }
                () = self.signals.poke.notified() => seen_permission = true,
            }
        }
    }

    async fn tell_cancel(&self) -> bool {
        let Ok(link) = self.runner.link() else { return false };
        match link.cancel(self.cancel.clone()).await {
            Ok(answer) => {
                tracing::info!(result = ?answer.result(), "the runner was told to cancel the turn");
                true
            }
            Err(CallError::Refused { reason, message, .. }) => {
                tracing::warn!(?reason, message, "the runner refuses a cancel");
                false
            }
            Err(CallError::Unreachable(_)) => false,
        }
    }

    /// Tells the runner the answers that it has not settled. True when all were told.
    async fn tell_answers(&self, told: &mut HashMap<String, engine::PermissionDecision>) -> bool {
        let query = ListPermissions {
            turn_id: Some(self.turn.clone()),
            open_only: true,
            limit: MAX_PERMISSIONS,
            ..ListPermissions::default()
        };
        let Ok(open) = self.app.store.list_permissions(query).await else { return false };
        let Ok(link) = self.runner.link() else { return false };
        let mut all = true;
        for permission in open.items {
            let Some(intent) = &permission.intent else { continue };
            let request_id = &permission.request.request_id;
            if told.contains_key(request_id) {
                continue;
            }
            let decision = to_proto::decision(intent.decision);
            let request = engine::AnswerPermissionRequest {
                request_id: request_id.clone(),
                epoch: self.cancel.epoch,
                decision: decision.into(),
                feedback: intent.feedback.clone(),
                turn_id: self.turn.to_string(),
            };
            match link.answer_permission(request).await {
                Ok(_) => {
                    told.insert(request_id.clone(), decision);
                }
                Err(error) => {
                    tracing::info!(%error, request_id, "a permission answer did not reach the runner");
                    all = false;
                }
            }
        }
        all
    }
}
