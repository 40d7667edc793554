//! The steps that tell the runner of a turn: ask, open, send, cancel, replace.

use prost::Message as _;
use roundhouse_domain::event::{EventSource, NewEvent};
use roundhouse_domain::id::SessionId;
use roundhouse_domain::message::Position;
use roundhouse_domain::outcome::{Outcome, TurnError};
use roundhouse_domain::session::{Opening, Origin, PromptUse, Session, SessionState};
use roundhouse_domain::turn::TurnState;
use roundhouse_proto::engine::v1 as engine;
use roundhouse_proto::engine::v1::ErrorReason;
use roundhouse_proto::engine::v1::event_body::Kind;
use roundhouse_store::{RecordOpening, ReplaceSession};
use sha2::{Digest as _, Sha256};
use tokio::time::Instant;

use super::context::{self, Failure};
use super::drive::{Drive, Flow, Interrupt, Pauses, Reached, StepResult, Until};
use super::effects::{self, Opened};
use super::plan::RunnerView;
use super::reasons;
use crate::clock;
use crate::failpoint::kill_point;
use crate::grpc::to_proto;
use crate::runners::{CallError, FOUND_DEAD};

/// Openings without an answer from a runner that lives, after which it counts as one that cannot be reached.
const MAX_SLOW_OPENINGS: u32 = 10;

/// What was composed for an opening, in figures.
#[derive(Clone, Copy, Debug, Default)]
struct Given {
    history: u32,
    omitted: u32,
    through: Option<Position>,
    summary: bool,
}

impl Given {
    fn opening(self, origin: Origin, prompt: PromptUse) -> Opening {
        let Self { history, omitted, through, summary } = self;
        Opening { origin, prompt, summary, history, omitted, through }
    }
}

/// An opening that is not stored yet.
#[derive(Clone, Debug)]
pub(super) struct Unstored {
    session_id: SessionId,
    opening: Opening,
}

impl Drive {
    /// What stores the opening that is not stored yet, with the first events of its session.
    pub(super) fn record_opening(&self, events: Vec<NewEvent>) -> StepResult<Option<RecordOpening>> {
        let Some(unstored) = &self.unstored else { return Ok(None) };
        Ok(Some(RecordOpening {
            owner: self.owner()?,
            session_id: unstored.session_id.clone(),
            opening: unstored.opening.clone(),
            // What is known to be resumable comes as an event. A first answer proves nothing yet.
            native_ref: None,
            events,
            time: clock::now(),
        }))
    }

    /// Takes over what was read again: the opening of its session is known although it is not stored.
    pub(super) fn add_unstored(&mut self) {
        let (Some(unstored), Some(dispatch)) = (&self.unstored, &mut self.dispatch) else { return };
        if dispatch.turn.session_id.as_ref() == Some(&unstored.session_id) {
            dispatch.turn.opening = Some(unstored.opening.clone());
        } else {
            self.unstored = None;
        }
    }

    /// Asks the runner what it knows of the turn.
    pub(super) async fn inspect(&mut self) -> StepResult {
        use engine::inspect_response::State;
        let turn_id = self.turn_id.to_string();
        let reached = self
            .reach(Until::Lost, |link| {
                let target = engine::inspect_request::Target::TurnId(turn_id.clone());
                async move { link.inspect(engine::InspectRequest { target: Some(target) }).await }
            })
            .await?;
        match reached {
            Reached::Answer(facts) => {
                self.view = match facts.state() {
                    State::Unknown => RunnerView::Unknown,
                    State::Opened => RunnerView::Known,
                    State::Sent | State::Running => {
                        self.given = true;
                        RunnerView::HasMessage
                    }
                    State::Ended => RunnerView::Ended,
                    State::Unspecified => {
                        tracing::warn!("the runner told a state that this control plane does not know");
                        let pause = self.pauses.next();
                        self.pause(pause).await;
                        RunnerView::NotAsked
                    }
                };
                Ok(Flow::Again)
            }
            Reached::Changed => Ok(Flow::Again),
            Reached::Away(_) => self.lose().await,
            Reached::Refused(reason, message, _) => {
                tracing::warn!(?reason, message, "the runner refuses to say what it knows of a turn");
                let runner = self.runner()?;
                self.refused(&runner).await
            }
        }
    }

    /// Tells the runner to cancel a turn that it does not seem to know, so that it refuses a late opening.
    pub(super) async fn cancel(&mut self) -> StepResult {
        let request = self.cancel_request()?;
        let reached = self
            .reach(Until::Lost, |link| {
                let request = request.clone();
                async move { link.cancel(request).await }
            })
            .await?;
        match reached {
            Reached::Answer(answer) => {
                match answer.result() {
                    engine::cancel_response::Result::UnknownTurn => self.set_cancel_unknown(),
                    engine::cancel_response::Result::Stopping
                    | engine::cancel_response::Result::AlreadyEnded
                    | engine::cancel_response::Result::Unspecified => self.view = RunnerView::HasMessage,
                }
                Ok(Flow::Again)
            }
            Reached::Changed => Ok(Flow::Again),
            Reached::Away(_) => self.lose().await,
            Reached::Refused(reason, message, _) => {
                tracing::warn!(?reason, message, "the runner refuses a cancel");
                let runner = self.runner()?;
                self.refused(&runner).await
            }
        }
    }

    pub(super) fn cancel_request(&self) -> StepResult<engine::CancelRequest> {
        let owner = self.owner()?;
        Ok(engine::CancelRequest { turn_id: owner.turn_id.to_string(), epoch: owner.epoch.0, grace: None })
    }

    /// Opens the session for the turn.
    pub(super) async fn open(&mut self) -> StepResult {
        let session = self.session()?;
        let runner = self.runner()?;
        if !runner.is_open() {
            // What the runner held when it came back is settled first.
            if self.waited_out() {
                return self.fail(reasons::runner_away(&self.runner_name(), "it has unsettled turns")).await;
            }
            self.pause_for_runner(&runner, self.app.settings.poll).await;
            return Ok(Flow::Again);
        }
        let (request, given) = match self.opening_request(&session).await {
            Ok(prepared) => prepared,
            Err(Failure::Store(error)) => return Err(error.into()),
            Err(Failure::Compose(error)) => return self.fail(reasons::context(&error.to_string())).await,
        };
        kill_point!("before-open");
        // From here on the runner may know the turn, whatever becomes of the call.
        self.view = RunnerView::NotAsked;
        let reached = self.call_open(request).await?;
        kill_point!("after-open");
        match reached {
            Reached::Answer(response) => self.opened(&session, response, given).await,
            // A cancel came while the engine started: what became of it is for the runner to say.
            Reached::Changed => Ok(Flow::Again),
            Reached::Away(detail) => self.fail(reasons::runner_away(&self.runner_name(), &detail)).await,
            Reached::Refused(reason, message, failure) => self.open_refused(reason, &message, failure).await,
        }
    }

    async fn opening_request(
        &self,
        session: &Session,
    ) -> Result<(engine::StartOrResumeRequest, Given), Failure> {
        let moved = || Failure::Store(roundhouse_store::Error::Internal("the turn was not read".to_owned()));
        let dispatch = self.dispatch.as_ref().ok_or_else(moved)?;
        let (Some(agent), Some(workspace)) = (&dispatch.turn.agent, &dispatch.workspace) else {
            return Err(moved());
        };
        let budget = self.app.settings.context_budget;
        let composed = context::for_session(self.app.store.as_ref(), dispatch, session, budget).await?;
        let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let given = composed.as_ref().map_or_else(Given::default, |composed| Given {
            history: count(composed.given.len()),
            omitted: count(composed.omitted.map_or(0, |omitted| omitted.count)),
            through: composed.given.last().copied().map(Position),
            summary: composed.summary,
        });
        let prompt = agent.prompt();
        let request = engine::StartOrResumeRequest {
            conversation_id: dispatch.conversation.id.to_string(),
            session_id: session.id.to_string(),
            turn_id: dispatch.turn.id.to_string(),
            epoch: dispatch.turn.epoch.0,
            workspace: workspace.path.clone(),
            engine: agent.engine.clone(),
            model: agent.model.clone(),
            effort: agent.reasoning_effort.map(|effort| effort.as_str().to_owned()),
            agent_prompt: prompt.to_owned(),
            agent_prompt_sha256: hex(&Sha256::digest(prompt.as_bytes())),
            context: composed.map(|composed| composed.text).unwrap_or_default(),
            native_ref: session.native_ref.as_ref().and_then(to_proto::native_ref),
            options: Some(engine::TurnOptions {
                permissions: to_proto::permission_mode(agent.permissions).into(),
                idle_timeout: None,
                deadline: None,
            }),
            agent: agent.name.clone(),
            replaces: session.replaces.as_ref().map(ToString::to_string).unwrap_or_default(),
            last_number: dispatch.turn.last_number,
        };
        Ok((request, given))
    }

    /// Calls StartOrResume. A cancel that comes meanwhile is told to the runner at once, on the same link.
    async fn call_open(
        &mut self,
        request: engine::StartOrResumeRequest,
    ) -> StepResult<Reached<engine::StartOrResumeResponse>> {
        let runner = self.runner()?;
        let mut pauses = Pauses::new(self.app.settings.backoff);
        let mut slow = 0;
        loop {
            if !runner.is_open() {
                // It has come back meanwhile, and what it held then is settled first.
                return Ok(Reached::Changed);
            }
            let limit = runner.open_limit();
            let begun = Instant::now();
            let outcome = match runner.link() {
                Ok(link) => {
                    let call = link.start_or_resume(request.clone(), limit);
                    let mut call = std::pin::pin!(call);
                    let mut told = false;
                    loop {
                        let signals = std::sync::Arc::clone(&self.signals);
                        tokio::select! {
                            outcome = &mut call => break outcome,
                            () = signals.poke.notified(), if !told => {
                                if self.refresh_cancelled().await? {
                                    told = true;
                                    let cancelled = link.cancel(self.cancel_request()?).await;
                                    tracing::debug!(?cancelled, "cancelled while the engine starts");
                                    if cancelled.is_err() {
                                        // The runner is asked again, and again told, after it was inspected.
                                        return Ok(Reached::Changed);
                                    }
                                }
                            }
                        }
                    }
                }
                Err(error) => Err(error),
            };
            let cancelled = self.stored()?.turn.state == TurnState::Cancelling;
            match outcome {
                Ok(answer) => {
                    self.answered(&runner);
                    return Ok(Reached::Answer(answer));
                }
                Err(CallError::Refused { reason, message, failure, .. }) => {
                    self.answered(&runner);
                    if cancelled {
                        return Ok(Reached::Changed);
                    }
                    return Ok(Reached::Refused(reason, message, failure));
                }
                Err(CallError::Unreachable(detail)) => {
                    if cancelled {
                        return Ok(Reached::Changed);
                    }
                    // A runner that lives and works on the opening is not away; the repeat attaches to it.
                    let at_work = begun.elapsed() >= limit.min(FOUND_DEAD) && runner.is_alive();
                    if at_work && slow < MAX_SLOW_OPENINGS {
                        slow += 1;
                        self.waiting_since = None;
                        tracing::warn!(detail, slow, "the opening takes long; it is asked for again");
                    } else if self.gone(&runner, Until::AwayTimeout) {
                        return Ok(Reached::Away(detail));
                    }
                    tracing::debug!(detail, "no answer to the opening");
                    self.pause_for_runner(&runner, pauses.next()).await;
                    if self.dispatch.is_none() {
                        return Ok(Reached::Changed);
                    }
                }
            }
        }
    }

    async fn open_refused(
        &mut self,
        reason: Option<ErrorReason>,
        message: &str,
        failure: Option<Box<TurnError>>,
    ) -> StepResult {
        let error = match reason {
            Some(ErrorReason::Draining) => reasons::draining(&self.runner_name()),
            Some(ErrorReason::StaleEpoch) => reasons::stale(&self.runner_name()),
            Some(ErrorReason::WorkspaceBusy) => reasons::busy_on_runner(message),
            other => {
                return self.fail(reasons::opening_refused(other, message, failure)).await;
            }
        };
        // These pass by themselves: the runner starts again, registers, or ends the other turn.
        if self.waited_out() {
            return self.fail(error).await;
        }
        let runner = self.runner()?;
        let pause = self.pauses.next();
        self.pause_for_runner(&runner, pause).await;
        self.dispatch = None;
        Ok(Flow::Again)
    }

    async fn opened(
        &mut self,
        session: &Session,
        response: engine::StartOrResumeResponse,
        given: Given,
    ) -> StepResult {
        use engine::start_or_resume_response::Result as R;
        let result = response.result();
        match result {
            R::Started | R::Resumed | R::AlreadyOpen => {}
            R::Unusable => {
                return self.replace(session, &response.unusable_reason).await;
            }
            R::Unspecified => {
                let error = reasons::refused(None, "the runner's answer to the opening is not known here");
                return self.fail(error).await;
            }
        }
        let made_for_this = session.created_by == self.turn_id;
        let origin = match result {
            R::Started | R::AlreadyOpen if made_for_this && session.replaces.is_some() => Origin::Replaced,
            R::Started => Origin::Started,
            R::AlreadyOpen if made_for_this => Origin::Started,
            R::AlreadyOpen | R::Resumed | R::Unusable | R::Unspecified => Origin::Resumed,
        };
        let prompt = match self.prompt() {
            Some(prompt @ (PromptUse::Initial | PromptUse::NewSession)) => prompt,
            Some(PromptUse::AppliedOnResume) | None if response.prompt_applied => PromptUse::AppliedOnResume,
            None if made_for_this => PromptUse::Initial,
            Some(PromptUse::AppliedOnResume | PromptUse::Unchanged) | None => PromptUse::Unchanged,
        };
        self.note_opening(session, given.opening(origin, prompt))?;
        self.view = RunnerView::Opened;
        Ok(Flow::Again)
    }

    /// Keeps how the session was opened, until it is stored with the first events of it ([`Drive::append`]): the message
    /// does not wait for a commit. If it is lost before, [`Drive::rebuild_opening`] finds it again.
    fn note_opening(&mut self, session: &Session, opening: Opening) -> StepResult<()> {
        let stored = self.stored_mut()?;
        if stored.turn.opening.as_ref() != Some(&opening) {
            stored.turn.opening = Some(opening.clone());
            self.unstored = Some(Unstored { session_id: session.id.clone(), opening });
        }
        self.opened = opened_of(&self.stored()?.turn, session);
        Ok(())
    }

    /// The opening of a session whose message an earlier run sent without having stored how it was opened: the same
    /// context is composed again, for nothing of it can have changed before the first events are stored, and the rest is
    /// in the runner's event, of which this is `origin`.
    pub(super) async fn rebuild_opening(&mut self, origin: engine::Origin) -> StepResult<()> {
        let session = self.session()?;
        let made_for_this = session.created_by == self.turn_id;
        let given = match self.opening_request(&session).await {
            Ok((_, given)) => given,
            Err(Failure::Store(error)) => return Err(error.into()),
            // It could be composed once, so the turn did get it; how much it was is not known any more.
            Err(Failure::Compose(_)) => Given::default(),
        };
        let agent = self.stored()?.turn.agent.as_ref();
        let other_prompt = agent.is_some_and(|agent| agent.prompt_sha256() != session.prompt_sha256);
        let (origin, prompt) = match origin {
            _ if made_for_this && session.replaces.is_some() => (Origin::Replaced, PromptUse::Initial),
            _ if made_for_this => (Origin::Started, PromptUse::Initial),
            engine::Origin::Started => (Origin::Started, PromptUse::Initial),
            _ if other_prompt => (Origin::Resumed, PromptUse::AppliedOnResume),
            _ => (Origin::Resumed, PromptUse::Unchanged),
        };
        tracing::info!(session_id = %session.id, ?origin, "how the session was opened is told by the runner's events");
        self.note_opening(&session, given.opening(origin, prompt))
    }

    /// Gives the message to the engine.
    pub(super) async fn send(&mut self) -> StepResult {
        let session = self.session()?;
        let dispatch = self.stored()?;
        let request = engine::SendRequest {
            session_id: session.id.to_string(),
            turn_id: dispatch.turn.id.to_string(),
            epoch: dispatch.turn.epoch.0,
            message_id: dispatch.message.id.to_string(),
            text: dispatch.message.body.clone(),
            mode: engine::SendMode::NewTurn.into(),
        };
        let reached = self
            .reach(Until::Lost, |link| {
                let request = request.clone();
                async move { link.send(request).await }
            })
            .await?;
        kill_point!("after-send");
        match reached {
            Reached::Answer(_) => {
                self.given = true;
                self.view = RunnerView::HasMessage;
                Ok(Flow::Again)
            }
            Reached::Changed => {
                // It may have arrived.
                self.view = RunnerView::NotAsked;
                Ok(Flow::Again)
            }
            Reached::Away(_) => self.lose().await,
            Reached::Refused(
                Some(ErrorReason::WrongState | ErrorReason::TurnNotFound | ErrorReason::SessionNotFound),
                message,
                _,
            ) => {
                tracing::info!(message, "the runner refuses the message; it is asked what it knows");
                self.view = RunnerView::NotAsked;
                let pause = self.pauses.next();
                self.pause(pause).await;
                Ok(Flow::Again)
            }
            Reached::Refused(Some(ErrorReason::StaleEpoch), ..) => {
                self.open_refused(Some(ErrorReason::StaleEpoch), "", None).await
            }
            Reached::Refused(reason, message, _) => self.fail(reasons::refused(reason, &message)).await,
        }
    }

    /// Puts another session in the place of one that is stored as unusable.
    pub(super) async fn replace_unusable(&mut self) -> StepResult {
        let session = self.session()?;
        let reason = match &session.state {
            SessionState::Unusable(reason) => reason.clone(),
            SessionState::Active => return Err(Interrupt::Reload),
        };
        self.replace(&session, &reason).await
    }

    /// Marks the turn's session unusable and binds another one in its place. A replacement that is unusable itself
    /// is not replaced again.
    pub(super) async fn replace(&mut self, session: &Session, reason: &str) -> StepResult {
        if session.replaces.is_some() && session.created_by == self.turn_id {
            return self.fail(reasons::unusable_twice(reason)).await;
        }
        tracing::warn!(session_id = %session.id, reason, "the session is unusable; it is replaced in the same turn");
        let replacement = SessionId::new(clock::uuid());
        let time = clock::now();
        let command = ReplaceSession {
            owner: self.owner()?,
            unusable: session.id.clone(),
            reason: reason.to_owned(),
            replacement,
            events: if matches!(session.state, SessionState::Active) {
                vec![unusable_event(session, reason, time)]
            } else {
                // The runner's own event about it is stored.
                Vec::new()
            },
            time,
        };
        let session = self.app.store.replace_session(command).await?;
        kill_point!("replaced");
        self.unstored = None;
        self.stored_mut()?.turn.opening = None;
        self.set_prompt(PromptUse::Initial);
        self.bind(session)?;
        self.given = false;
        // The runner answered for this turn, or told its loss: there is nothing to ask about before the next opening.
        self.view = RunnerView::Known;
        Ok(Flow::Again)
    }

    /// Ends the turn LOST because its runner was silent for too long.
    pub(super) async fn lose(&mut self) -> StepResult {
        let error = reasons::runner_lost(&self.runner_name(), self.unreachable_seconds());
        self.close_own(Outcome::Lost(error), false).await
    }
}

fn unusable_event(session: &Session, reason: &str, time: roundhouse_domain::time::Timestamp) -> NewEvent {
    let event = engine::SessionEvent {
        state: engine::session_event::State::Unusable.into(),
        session_id: session.id.to_string(),
        reason: reason.to_owned(),
        ..engine::SessionEvent::default()
    };
    let source = EventSource::Own { key: format!("session-unusable:{}", session.id) };
    NewEvent {
        source,
        kind: roundhouse_domain::event::EventKind::Session,
        payload: engine::EventBody { kind: Some(Kind::Session(event)) }.encode_to_vec(),
        time,
        effect: roundhouse_domain::event::Effect::None,
    }
}

/// What the control plane knows of the turn's opening, for the runner's event about it.
pub(super) fn opened_of(turn: &roundhouse_domain::turn::Turn, session: &Session) -> Opened {
    let opening = turn.opening.as_ref();
    effects::Opened {
        session_id: session.id.to_string(),
        replaces: session
            .replaces
            .as_ref()
            .filter(|_| session.created_by == turn.id)
            .map(ToString::to_string),
        origin: opening.map_or(engine::Origin::Unspecified, |opening| to_proto::origin(opening.origin)),
        history_given: opening.is_some_and(|opening| opening.history > 0),
        summary_given: opening.is_some_and(|opening| opening.summary),
    }
}

fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut hex, byte| {
        // Writing to a String cannot fail.
        let _ = write!(hex, "{byte:02x}");
        hex
    })
}
