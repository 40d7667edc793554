//! The task of one turn: asks the plan for the next step and takes it, until the turn is settled.

use std::sync::Arc;
use std::time::Duration;

use backon::BackoffBuilder as _;
use roundhouse_domain::conflict::Conflict;
use roundhouse_domain::id::TurnId;
use roundhouse_domain::outcome::{Outcome, TurnError};
use roundhouse_domain::session::{PromptUse, Session, SessionState};
use roundhouse_domain::turn::TurnState;
use roundhouse_domain::workspace::Workspace;
use roundhouse_proto::engine::v1::ErrorReason;
use roundhouse_store::{Dispatch, Error as StoreError, Owner};
use tokio::time::Instant;

use super::effects::{self, Opened};
use super::engage::Unstored;
use super::plan::{self, Facts, RunnerView, SessionView, Step};
use super::{Signals, reasons};
use crate::app::App;
use crate::failpoint::kill_point;
use crate::runners::{CallError, Link, RunnerHandle};

/// A runner that sends heartbeats but cannot be called is given up after so many times the time after which a silent
/// one is.
const UNREACHABLE_FACTOR: u32 = 10;

/// Events per read.
const EVENTS: usize = 1_000;

/// Errors of the store in a row, none of which waiting cures, after which a turn is given up.
const MAX_STORE_ERRORS: u32 = 10;

/// Why a step was not finished.
#[derive(Debug)]
pub(super) enum Interrupt {
    /// Something stored has moved: read it again.
    Reload,
    /// The store cannot be used just now.
    Store(StoreError),
}

impl From<StoreError> for Interrupt {
    fn from(error: StoreError) -> Self {
        match error {
            StoreError::Conflict(_) => Self::Reload,
            other => Self::Store(other),
        }
    }
}

/// Whether there is more to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Flow {
    /// Ask the plan again.
    Again,
    /// The turn is settled, or not ours.
    Done,
}

pub(super) type StepResult<T = Flow> = Result<T, Interrupt>;

/// What became of a call that was repeated until something came of it.
#[derive(Debug)]
pub(super) enum Reached<T> {
    /// The runner answered.
    Answer(T),
    /// The runner refused.
    Refused(Option<ErrorReason>, String, Option<Box<TurnError>>),
    /// The time for it has passed.
    Away(String),
    /// What is stored about the turn has changed: ask the plan again.
    Changed,
}

/// How long a call is repeated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Until {
    /// For the time that a turn waits for its runner, from having the slot.
    AwayTimeout,
    /// Until the runner counts as lost.
    Lost,
}

/// Pauses between tries: from short to long, jittered.
#[derive(Debug)]
pub(super) struct Pauses(backon::ExponentialBackoff, (Duration, Duration));

impl Pauses {
    pub(super) fn new(bounds: (Duration, Duration)) -> Self {
        let builder = backon::ExponentialBuilder::default()
            .with_min_delay(bounds.0)
            .with_max_delay(bounds.1)
            .with_jitter()
            .without_max_times();
        Self(builder.build(), bounds)
    }

    pub(super) fn next(&mut self) -> Duration {
        self.0.next().unwrap_or(self.1.1)
    }

    pub(super) fn reset(&mut self) {
        *self = Self::new(self.1);
    }
}

/// The work on one turn.
pub(super) struct Drive {
    pub(super) app: Arc<App>,
    pub(super) turn_id: TurnId,
    pub(super) signals: Arc<Signals>,
    /// What is stored, as last read; none when it may have moved.
    pub(super) dispatch: Option<Dispatch>,
    pub(super) view: RunnerView,
    /// The runner confirmed the end itself, by the terminal event.
    pub(super) runner_said_end: bool,
    pub(super) opened: Opened,
    /// How the session was opened, until that is stored.
    pub(super) unstored: Option<Unstored>,
    pub(super) slot: bool,
    cancel_unknown: bool,
    /// The message was on its way to the engine, as far as this run knows.
    pub(super) given: bool,
    pub(super) prompt: Option<PromptUse>,
    /// From when the time for a runner that is away counts.
    pub(super) waiting_since: Option<Instant>,
    /// Since when the runner gave no answer to our calls.
    unreachable_since: Option<Instant>,
    /// Since when it refuses what it must not refuse.
    refused_since: Option<Instant>,
    /// Errors of the store in a row that no waiting cures.
    store_errors: u32,
    pub(super) pauses: Pauses,
}

impl Drive {
    pub(super) fn new(app: Arc<App>, turn_id: TurnId, signals: Arc<Signals>) -> Self {
        let pauses = Pauses::new(app.settings.backoff);
        Self {
            app,
            turn_id,
            signals,
            dispatch: None,
            view: RunnerView::NotAsked,
            runner_said_end: false,
            opened: Opened::default(),
            unstored: None,
            slot: false,
            cancel_unknown: false,
            given: false,
            prompt: None,
            waiting_since: None,
            unreachable_since: None,
            refused_since: None,
            store_errors: 0,
            pauses,
        }
    }

    /// Works until the turn is settled.
    pub(super) async fn run(mut self) {
        kill_point!("promoted");
        let mut pauses = Pauses::new(self.app.settings.backoff);
        loop {
            match self.step().await {
                Ok(Flow::Done) => return,
                Ok(Flow::Again) => {
                    pauses.reset();
                    self.store_errors = 0;
                }
                Err(Interrupt::Reload) => {
                    self.dispatch = None;
                    self.pause(pauses.next()).await;
                }
                Err(Interrupt::Store(StoreError::NotFound { kind, id })) => {
                    tracing::warn!(%kind, id, "what the turn needs is not in the store");
                    return;
                }
                Err(Interrupt::Store(error)) => {
                    tracing::warn!(%error, "the store gave no answer that helps; trying again");
                    self.store_errors = if error.is_retryable() { 0 } else { self.store_errors + 1 };
                    if self.store_errors >= MAX_STORE_ERRORS && self.give_up(&error).await {
                        self.store_errors = 0;
                    }
                    self.dispatch = None;
                    self.pause(pauses.next()).await;
                }
            }
        }
    }

    /// Ends a turn of which something cannot be stored however often it is tried. True when it ended.
    async fn give_up(&mut self, error: &StoreError) -> bool {
        let failure = reasons::not_stored(&error.to_string());
        if !matches!(self.facts().await, Ok(Some(_))) {
            return false;
        }
        let Ok(stored) = self.stored() else { return false };
        // Without a session no runner was told of it, and nobody would be asked whether the slot is free.
        let never_told = stored.turn.session_id.is_none();
        self.close_own(Outcome::Failed(failure), never_told).await.is_ok()
    }

    async fn step(&mut self) -> StepResult {
        let Some(facts) = self.facts().await? else { return self.settle().await };
        let step = plan::next(&facts);
        tracing::debug!(?step, state = %facts.state, runner = ?facts.runner, "next step");
        match step {
            Step::Leave => Ok(Flow::Done),
            Step::Settle => self.settle().await,
            Step::CloseCancelled => {
                self.close_own(Outcome::Cancelled(Some(reasons::cancelled())), true).await
            }
            Step::CloseLost => {
                let error = reasons::no_trace(&self.runner_name());
                self.close_own(Outcome::Lost(error), false).await
            }
            Step::FailTarget => self.fail(reasons::no_workspace()).await,
            Step::TakeSlot => self.take_slot().await,
            Step::ReadAgent => self.read_agent().await,
            Step::ChooseSession => self.choose_session().await,
            Step::Inspect => self.inspect().await,
            Step::Replace => self.replace_unusable().await,
            Step::Open => self.open().await,
            Step::Send => self.send().await,
            Step::Attach => self.attach().await,
            Step::Cancel => self.cancel().await,
        }
    }

    /// What the next step depends on; none when the turn has ended.
    async fn facts(&mut self) -> StepResult<Option<Facts>> {
        if self.dispatch.is_none() {
            match self.app.store.begin_dispatch(&self.turn_id).await {
                Ok(dispatch) => {
                    self.dispatch = Some(dispatch);
                    self.add_unstored();
                }
                Err(StoreError::Conflict(Conflict::TurnEnded(_))) => return Ok(None),
                Err(StoreError::Conflict(Conflict::IllegalTransition(_))) => {
                    return Ok(Some(self.queued_facts()));
                }
                Err(error) => return Err(error.into()),
            }
        }
        if matches!(self.view, RunnerView::Unknown | RunnerView::Untold) && !self.given {
            let turn = &self.stored()?.turn;
            self.given = !turn.accepted && turn.last_number > 0 && self.events_show_message().await?;
        }
        let Some(dispatch) = &self.dispatch else { return Err(Interrupt::Reload) };
        let turn = &dispatch.turn;
        let session = match session_of(dispatch).map(|session| &session.state) {
            None => SessionView::None,
            Some(SessionState::Active) => SessionView::Active,
            Some(SessionState::Unusable(_)) => SessionView::Unusable,
        };
        Ok(Some(Facts {
            state: turn.state,
            workspace: dispatch.workspace.is_some(),
            slot: self.slot,
            agent: turn.agent.is_some(),
            session,
            accepted: turn.accepted,
            given: self.given,
            runner: self.view,
            cancel_unknown: self.cancel_unknown,
        }))
    }

    fn queued_facts(&self) -> Facts {
        Facts {
            state: TurnState::Queued,
            workspace: false,
            slot: false,
            agent: false,
            session: SessionView::None,
            accepted: false,
            given: false,
            runner: self.view,
            cancel_unknown: false,
        }
    }

    /// Whether the stored events show that the message of the turn's session was on its way to the engine.
    async fn events_show_message(&self) -> StepResult<bool> {
        let (mut shown, mut after) = (false, 0);
        loop {
            let page = self.app.store.list_events(&self.turn_id, after, EVENTS).await?;
            for event in &page.items {
                after = event.seq;
                shown = effects::shows_message(&event.payload).unwrap_or(shown);
            }
            if !page.more || page.items.is_empty() {
                return Ok(shown);
            }
        }
    }

    // --- what is stored ---

    pub(super) fn stored(&self) -> StepResult<&Dispatch> {
        self.dispatch.as_ref().ok_or(Interrupt::Reload)
    }

    pub(super) fn stored_mut(&mut self) -> StepResult<&mut Dispatch> {
        self.dispatch.as_mut().ok_or(Interrupt::Reload)
    }

    pub(super) fn owner(&self) -> StepResult<Owner> {
        let turn = &self.stored()?.turn;
        Ok(Owner { turn_id: turn.id.clone(), epoch: turn.epoch })
    }

    pub(super) fn workspace(&self) -> StepResult<Workspace> {
        self.stored()?.workspace.clone().ok_or(Interrupt::Reload)
    }

    pub(super) fn session(&self) -> StepResult<Session> {
        session_of(self.stored()?).cloned().ok_or(Interrupt::Reload)
    }

    pub(super) fn runner(&self) -> StepResult<Arc<RunnerHandle>> {
        Ok(self.app.runners.get(&self.workspace()?.runner_id))
    }

    pub(super) fn runner_name(&self) -> String {
        match &self.dispatch {
            Some(dispatch) => match (&dispatch.runner, &dispatch.workspace) {
                (Some(runner), _) => runner.info.name.clone(),
                (None, Some(workspace)) => workspace.runner_id.to_string(),
                (None, None) => String::new(),
            },
            None => String::new(),
        }
    }

    // --- waiting ---

    /// Waits for a while, or until something tells to look. What was read before may have moved then.
    pub(super) async fn pause(&mut self, time: Duration) {
        tokio::select! {
            () = tokio::time::sleep(time) => {}
            () = self.signals.poke.notified() => self.dispatch = None,
        }
    }

    /// As [`Self::pause`], and also until the runner registers or sends a heartbeat.
    pub(super) async fn pause_for_runner(&mut self, runner: &RunnerHandle, time: Duration) {
        let mut changes = runner.changes();
        tokio::select! {
            () = tokio::time::sleep(time) => {}
            _ = changes.changed() => {}
            () = self.signals.poke.notified() => self.dispatch = None,
        }
    }

    pub(super) fn answered(&mut self, runner: &RunnerHandle) {
        runner.heard();
        self.unreachable_since = None;
    }

    /// Notes that a call got no answer. True when the time for it has passed.
    pub(super) fn gone(&mut self, runner: &RunnerHandle, until: Until) -> bool {
        let since = *self.unreachable_since.get_or_insert_with(Instant::now);
        match until {
            Until::AwayTimeout => self.waited_out(),
            Until::Lost => {
                let lost_after = self.app.settings.runner_lost_after;
                let unreachable = since.elapsed();
                (unreachable >= lost_after && runner.silent_for() >= lost_after)
                    || unreachable >= lost_after.saturating_mul(UNREACHABLE_FACTOR)
            }
        }
    }

    /// Notes since when nothing was heard of the runner, which was asked.
    pub(super) fn unheard(&mut self, runner: &RunnerHandle) {
        self.unreachable_since = Instant::now().checked_sub(runner.silent_for());
    }

    /// The runner refuses a call that it must not refuse, such as one under a stale epoch that nobody raises. Pauses;
    /// a runner that goes on so is as good as lost.
    pub(super) async fn refused(&mut self, runner: &RunnerHandle) -> StepResult {
        let since = *self.refused_since.get_or_insert_with(Instant::now);
        if since.elapsed() >= self.app.settings.runner_lost_after {
            return self.lose().await;
        }
        let pause = self.pauses.next();
        self.pause_for_runner(runner, pause).await;
        self.dispatch = None;
        Ok(Flow::Again)
    }

    /// The runner heeds us again.
    pub(super) fn heeded(&mut self) {
        self.refused_since = None;
    }

    /// Whether the time that a turn waits for its runner has passed.
    pub(super) fn waited_out(&mut self) -> bool {
        let since = *self.waiting_since.get_or_insert_with(Instant::now);
        since.elapsed() >= self.app.settings.runner_away_timeout
    }

    pub(super) fn unreachable_seconds(&self) -> u64 {
        self.unreachable_since.map_or(0, |since| since.elapsed().as_secs())
    }

    /// Whether a cancel is stored. Reads the turn again.
    pub(super) async fn refresh_cancelled(&mut self) -> StepResult<bool> {
        let turn = self.app.store.get_turn(&self.turn_id).await?;
        if turn.state.is_terminal() {
            return Err(Interrupt::Reload);
        }
        let cancelling = turn.state == TurnState::Cancelling;
        if let Some(dispatch) = &mut self.dispatch {
            dispatch.turn = turn;
        }
        self.add_unstored();
        Ok(cancelling)
    }

    /// Repeats a call until the runner answers, or the time has passed, or what is stored has moved.
    pub(super) async fn reach<T, F>(
        &mut self,
        until: Until,
        call: impl Fn(Arc<Link>) -> F,
    ) -> StepResult<Reached<T>>
    where
        F: Future<Output = Result<T, CallError>>,
    {
        let runner = self.runner()?;
        let mut pauses = Pauses::new(self.app.settings.backoff);
        loop {
            let outcome = match runner.link() {
                Ok(link) => tokio::select! {
                    outcome = call(link) => outcome,
                    () = self.signals.poke.notified() => {
                        self.dispatch = None;
                        return Ok(Reached::Changed);
                    }
                },
                Err(error) => Err(error),
            };
            match outcome {
                Ok(answer) => {
                    self.answered(&runner);
                    self.heeded();
                    return Ok(Reached::Answer(answer));
                }
                Err(CallError::Refused { reason, message, failure, .. }) => {
                    self.answered(&runner);
                    return Ok(Reached::Refused(reason, message, failure));
                }
                Err(CallError::Unreachable(detail)) => {
                    if self.gone(&runner, until) {
                        return Ok(Reached::Away(detail));
                    }
                    tracing::debug!(detail, "no answer from the runner");
                    self.pause_for_runner(&runner, pauses.next()).await;
                    if self.dispatch.is_none() {
                        return Ok(Reached::Changed);
                    }
                }
            }
        }
    }

    /// Takes a session over into what is read.
    pub(super) fn bind(&mut self, session: Session) -> StepResult<()> {
        let dispatch = self.stored_mut()?;
        dispatch.turn.session_id = Some(session.id.clone());
        dispatch.sessions.retain(|other| other.id != session.id);
        dispatch.sessions.insert(0, session);
        Ok(())
    }

    /// How the agent's prompt reaches the session, as far as this run knows.
    pub(super) fn prompt(&self) -> Option<PromptUse> {
        self.prompt
    }

    pub(super) fn set_prompt(&mut self, prompt: PromptUse) {
        self.prompt = Some(prompt);
    }

    pub(super) fn set_cancel_unknown(&mut self) {
        self.cancel_unknown = true;
    }

    /// Ends the turn FAILED. The runner has nothing of it, so the slot is free at once, unless a session was bound:
    /// then the runner is asked first.
    pub(super) async fn fail(&mut self, error: TurnError) -> StepResult {
        let never_told = self.stored()?.turn.session_id.is_none() || self.view == RunnerView::Untold;
        self.close_own(Outcome::Failed(error), never_told).await
    }
}

/// The session that a turn is bound to.
fn session_of(dispatch: &Dispatch) -> Option<&Session> {
    let id = dispatch.turn.session_id.as_ref()?;
    dispatch.sessions.iter().find(|session| session.id == *id)
}
