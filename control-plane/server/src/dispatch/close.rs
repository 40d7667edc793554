//! The end of a turn, in one transaction.

use prost::Message as _;
use roundhouse_domain::event::{EventKind, EventSource, NewEvent};
use roundhouse_domain::id::MessageId;
use roundhouse_domain::outcome::Outcome;
use roundhouse_domain::turn::TurnState;
use roundhouse_proto::engine::v1 as engine;
use roundhouse_proto::engine::v1::event_body::Kind;
use roundhouse_store::{AgentMessage, CloseOutcome, CloseTurn};

use super::drive::{Drive, Flow, StepResult};
use super::effects::{self, Ending};
use super::reasons;
use crate::clock;
use crate::failpoint::kill_point;
use crate::grpc::from_proto;

/// Events per read of a turn's events.
const PAGE: usize = 1_000;
/// Bytes of interrupted text after which no more is gathered.
const MAX_TEXT: usize = roundhouse_domain::limits::MAX_AGENT_MESSAGE;

impl Drive {
    /// Ends the turn as its runner's terminal event says. `before` are events that came with it and are not stored
    /// yet, fewer than a batch holds.
    pub(super) async fn close(&mut self, mut before: Vec<NewEvent>, mut ending: Ending) -> StepResult {
        if self.unstored.is_some() {
            self.append_first(std::mem::take(&mut before)).await?;
        }
        let finished = matches!(ending.outcome, Outcome::Completed);
        if self.stored()?.turn.state == TurnState::Cancelling {
            soften(&mut before, &mut ending);
        }
        let text = if finished || !ending.result.is_empty() {
            std::mem::take(&mut ending.result)
        } else {
            let mut text = self.text_so_far().await?;
            add_texts(&mut text, &before);
            text
        };
        let agent_message =
            (finished || !text.is_empty()).then(|| self.agent_message(text, !finished)).transpose()?;
        let usage = ending.usage.as_ref().map(from_proto::usage);
        loop {
            let mut events = before.clone();
            events.push(ending.event.clone());
            let command = CloseTurn {
                owner: self.owner()?,
                outcome: ending.outcome.clone(),
                agent_message: agent_message.clone(),
                native_ref: None,
                usage: usage.clone(),
                events,
                free_slot: true,
                time: clock::now(),
            };
            if self.commit(command).await? {
                self.runner_said_end = true;
                return Ok(Flow::Again);
            }
            soften(&mut before, &mut ending);
        }
    }

    /// Ends the turn by the control plane's own word.
    pub(super) async fn close_own(&mut self, mut outcome: Outcome, free_slot: bool) -> StepResult {
        self.append_first(Vec::new()).await?;
        let text =
            if self.stored()?.turn.last_number > 0 { self.text_so_far().await? } else { String::new() };
        let agent_message = (!text.is_empty()).then(|| self.agent_message(text, true)).transpose()?;
        loop {
            let time = clock::now();
            let command = CloseTurn {
                owner: self.owner()?,
                events: vec![effects::own_terminal(&outcome, time)],
                outcome: outcome.clone(),
                agent_message: agent_message.clone(),
                native_ref: None,
                usage: None,
                free_slot,
                time,
            };
            if self.commit(command).await? {
                return Ok(Flow::Again);
            }
            outcome = Outcome::Cancelled(Some(reasons::cancelled()));
        }
    }

    /// False when the turn is being cancelled and has to end so.
    async fn commit(&mut self, command: CloseTurn) -> StepResult<bool> {
        kill_point!("before-close");
        let runner = self.dispatch.as_ref().and_then(|dispatch| dispatch.workspace.as_ref());
        self.app.prefetches.giving_back(runner.map(|workspace| &workspace.runner_id));
        let outcome = self.app.store.close_turn(command).await?;
        let closed = match outcome {
            CloseOutcome::Closed(closed) => closed,
            CloseOutcome::AlreadyEnded(_) => {
                self.dispatch = None;
                return Ok(true);
            }
            CloseOutcome::Overruled(state) => {
                tracing::info!(%state, "the turn is being cancelled and ends so");
                return Ok(false);
            }
        };
        kill_point!("after-close");
        let turn = &closed.turn;
        let error = turn.error.as_ref();
        tracing::info!(
            state = %turn.state,
            reason = error.map(|error| error.reason.as_str()),
            "the turn has ended"
        );
        if let Some(error) = error {
            tracing::debug!(message = error.message, "why the turn ended so");
        }
        self.app.hub.end(&turn.conversation_id, &turn.id);
        if let Some(promoted) = &closed.promoted {
            super::ensure(&self.app, &promoted.id);
        }
        self.dispatch = None;
        Ok(true)
    }

    fn agent_message(&self, body: String, incomplete: bool) -> StepResult<AgentMessage> {
        let turn = &self.stored()?.turn;
        let actor = turn.agent.as_ref().map(|agent| agent.name.clone()).or_else(|| turn.agent_name.clone());
        Ok(AgentMessage {
            id: MessageId::new(clock::uuid()),
            actor: actor.unwrap_or_default(),
            body,
            incomplete,
        })
    }

    /// The texts of the answer that are stored, joined.
    async fn text_so_far(&self) -> StepResult<String> {
        let mut text = String::new();
        let mut after = 0;
        loop {
            let page = self.app.store.list_events(&self.turn_id, after, PAGE).await?;
            for event in &page.items {
                after = event.seq;
                add_text(&mut text, event.kind, &event.payload);
            }
            if !page.more || page.items.is_empty() || text.len() > MAX_TEXT {
                return Ok(text);
            }
        }
    }
}

/// A turn that is being cancelled ends CANCELLED; what the engine came to is told in a notice.
fn soften(before: &mut Vec<NewEvent>, ending: &mut Ending) {
    if let Some(notice) = effects::cancel_ending(ending) {
        let source = EventSource::Own { key: "ended-before-cancel".to_owned() };
        before.push(effects::warning(source, ending.event.time, notice));
    }
}

fn add_texts(text: &mut String, events: &[NewEvent]) {
    for event in events {
        add_text(text, event.kind, &event.payload);
    }
}

/// Adds the text of an event, if it is one of the answer: not a sub-agent's.
fn add_text(text: &mut String, kind: EventKind, payload: &[u8]) {
    if kind != EventKind::Text {
        return;
    }
    if let Ok(body) = engine::EventBody::decode(payload)
        && let Some(Kind::Text(piece)) = body.kind
        && piece.sub_agent.is_empty()
        && !piece.text.is_empty()
    {
        if !text.is_empty() {
            text.push_str("\n\n");
        }
        text.push_str(&piece.text);
    }
}
