//! The steps before the runner is told of a turn: workspace, agent, session.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use roundhouse_domain::agent_file::AgentSnapshot;
use roundhouse_domain::conflict::Conflict;
use roundhouse_domain::id::SessionId;
use roundhouse_domain::session::{Choice, PromptUse, Session, Want, choose};
use roundhouse_domain::turn::TurnState;
use roundhouse_proto::engine::v1 as engine;
use roundhouse_proto::engine::v1::ErrorReason;
use roundhouse_store::{
    ArrangeOutcome, ArrangeTurn, ChooseSession, Dispatch, Error as StoreError, SessionPick, SlotOutcome,
};
use tokio::time::Instant;

use super::agent::{self, Found};
use super::drive::{Drive, Flow, Interrupt, Reached, StepResult, Until};
use super::plan::RunnerView;
use super::reasons;
use crate::clock;
use crate::runners::RunnerHandle;

impl Drive {
    /// Takes the slot. When it is free, the agent is read first and stored with the slot and the session, in one commit.
    pub(super) async fn take_slot(&mut self) -> StepResult {
        if let Some(flow) = self.arrange().await? {
            return Ok(flow);
        }
        let owner = self.owner()?;
        self.signals.waits_for_slot.store(true, Ordering::Relaxed);
        let outcome = self.app.store.take_slot(&owner, clock::now()).await?;
        match outcome {
            SlotOutcome::Taken => {
                self.signals.waits_for_slot.store(false, Ordering::Relaxed);
                self.slot = true;
                self.waiting_since = Some(Instant::now());
                Ok(Flow::Again)
            }
            SlotOutcome::Held(holder) if holder.state == TurnState::Lost => {
                self.fail(reasons::held_by_lost(&holder)).await
            }
            SlotOutcome::Held(_) | SlotOutcome::Behind(_) => {
                self.pause(self.app.settings.poll).await;
                self.dispatch = None;
                Ok(Flow::Again)
            }
        }
    }

    /// Slot, agent and session in one step, if nothing is in the way; none when anything is. Then they are taken one by
    /// one, in their order, and what is in the way is waited for or told there. The agent's file is read while the slot
    /// is free, so no turn that may change it runs before this one.
    async fn arrange(&mut self) -> StepResult<Option<Flow>> {
        let dispatch = self.stored()?;
        let turn = &dispatch.turn;
        if !dispatch.slot_free || turn.session_id.is_some() {
            return Ok(None);
        }
        let Ok(runner) = self.runner() else { return Ok(None) };
        let known = tokio::select! {
            known = self.read_now(&runner) => known,
            // A cancel, perhaps.
            () = self.signals.poke.notified() => {
                self.dispatch = None;
                return Ok(Some(Flow::Again));
            }
        };
        let Some((facts, read)) = known else { return Ok(None) };
        let dispatch = self.stored()?;
        let Some(agent) = read.as_ref().or(dispatch.turn.agent.as_ref()) else { return Ok(None) };
        let Some((pick, prompt)) = pick(dispatch, agent, &facts) else { return Ok(None) };
        let command = ArrangeTurn { owner: self.owner()?, agent: read, pick, time: clock::now() };
        match self.app.store.arrange_turn(command).await? {
            ArrangeOutcome::Waits(_) => Ok(None),
            ArrangeOutcome::Arranged(arranged) => {
                let (turn, session) = *arranged;
                self.slot = true;
                self.waiting_since = Some(Instant::now());
                self.stored_mut()?.turn = turn;
                self.bound(session, prompt)?;
                Ok(Some(Flow::Again))
            }
        }
    }

    /// What the runner can do, and the turn's agent if it has none yet; none when that cannot be had at once.
    async fn read_now(
        &self,
        runner: &RunnerHandle,
    ) -> Option<(Arc<engine::DescribeRunnerResponse>, Option<AgentSnapshot>)> {
        let dispatch = self.dispatch.as_ref()?;
        let facts = runner.describe().await.ok()?;
        if dispatch.turn.agent.is_some() {
            return Some((facts, None));
        }
        let name = dispatch.turn.agent_name.as_ref().or(dispatch.conversation.last_agent.as_ref())?;
        let workspace = dispatch.workspace.as_ref()?;
        let ahead = match self.app.prefetches.take(&self.turn_id) {
            Some(prefetch) => prefetch.files(&self.app.prefetches, workspace, name).await,
            None => None,
        };
        let files = if let Some(files) = ahead {
            files
        } else {
            let request = engine::ListAgentFilesRequest {
                workspace: workspace.path.clone(),
                file_name: agent::file_name(name),
            };
            runner.link().ok()?.list_agent_files(request).await.ok()?
        };
        runner.heard();
        match agent::find(name, dispatch.turn.surface, &files, &agent::engine_facts(&facts)) {
            Found::Agent(snapshot) => Some((facts, Some(*snapshot))),
            Found::Refused(_) | Found::Unreadable(_) => None,
        }
    }

    pub(super) async fn read_agent(&mut self) -> StepResult {
        let dispatch = self.stored()?;
        let turn = &dispatch.turn;
        let Some(name) = turn.agent_name.clone().or_else(|| dispatch.conversation.last_agent.clone()) else {
            return self.fail(reasons::no_agent()).await;
        };
        let surface = turn.surface;
        let workspace = self.workspace()?;
        let runner = self.runner()?;
        let facts = match self.described(&runner).await? {
            Reached::Answer(facts) => facts,
            other => return self.not_reached(other).await,
        };
        // The file alone, however many there are; and all of them when it is missing, for the names of the others.
        let mut found = self.agent_files(&workspace.path, agent::file_name(&name)).await?;
        if matches!(&found, Reached::Answer(files) if files.files.is_empty()) {
            found = self.agent_files(&workspace.path, String::new()).await?;
        }
        let files = match found {
            Reached::Answer(files) => files,
            Reached::Refused(Some(ErrorReason::WorkspaceNotFound), message, _) => {
                return self.fail(reasons::workspace_gone(&workspace.path, &message)).await;
            }
            other => return self.not_reached(other).await,
        };
        match agent::find(&name, surface, &files, &agent::engine_facts(&facts)) {
            Found::Agent(snapshot) => {
                let turn = self.app.store.set_agent(&self.owner()?, *snapshot).await?;
                self.stored_mut()?.turn = turn;
                Ok(Flow::Again)
            }
            Found::Refused(error) => self.fail(error).await,
            Found::Unreadable(error) => {
                if self.waited_out() {
                    return self.fail(error).await;
                }
                let pause = self.pauses.next();
                self.pause(pause).await;
                Ok(Flow::Again)
            }
        }
    }

    async fn agent_files(
        &mut self,
        workspace: &str,
        file_name: String,
    ) -> StepResult<Reached<engine::ListAgentFilesResponse>> {
        let request = engine::ListAgentFilesRequest { workspace: workspace.to_owned(), file_name };
        self.reach(Until::AwayTimeout, |link| {
            let request = request.clone();
            async move { link.list_agent_files(request).await }
        })
        .await
    }

    pub(super) async fn described(
        &mut self,
        runner: &Arc<RunnerHandle>,
    ) -> StepResult<Reached<Arc<engine::DescribeRunnerResponse>>> {
        self.reach(Until::AwayTimeout, |_| {
            let runner = Arc::clone(runner);
            async move { runner.describe().await }
        })
        .await
    }

    /// The end of a step before the opening that did not reach the runner.
    pub(super) async fn not_reached<T>(&mut self, reached: Reached<T>) -> StepResult {
        match reached {
            Reached::Answer(_) => Ok(Flow::Again),
            Reached::Changed => Ok(Flow::Again),
            Reached::Refused(reason, message, _) => self.fail(reasons::refused(reason, &message)).await,
            Reached::Away(detail) => self.fail(reasons::runner_away(&self.runner_name(), &detail)).await,
        }
    }

    pub(super) async fn choose_session(&mut self) -> StepResult {
        let runner = self.runner()?;
        let facts = match self.described(&runner).await? {
            Reached::Answer(facts) => facts,
            other => return self.not_reached(other).await,
        };
        let dispatch = self.stored()?;
        let Some(snapshot) = dispatch.turn.agent.as_ref() else { return Err(Interrupt::Reload) };
        let Some((pick, prompt)) = pick(dispatch, snapshot, &facts) else {
            let error = reasons::refused(
                Some(ErrorReason::EngineMissing),
                &format!("the runner has no engine {}", snapshot.engine),
            );
            return self.fail(error).await;
        };
        let command = ChooseSession { owner: self.owner()?, pick, time: clock::now() };
        let session = match self.app.store.choose_session(command).await {
            Ok(session) => session,
            Err(StoreError::Conflict(Conflict::SessionUnfit(why))) => {
                // It became unusable since it was read; with the next reading another one is chosen.
                tracing::info!(why, "the chosen session is unfit by now");
                return Err(Interrupt::Reload);
            }
            Err(error) => return Err(error.into()),
        };
        self.bound(session, prompt)?;
        Ok(Flow::Again)
    }

    fn bound(&mut self, session: Session, prompt: PromptUse) -> StepResult<()> {
        self.prompt = Some(prompt);
        // No earlier run can have told the runner of this turn: the row is as new as its binding.
        self.view = RunnerView::Untold;
        self.bind(session)
    }
}

/// The session for a turn with this agent, and how its prompt gets there; none when the runner has no such engine.
fn pick(
    dispatch: &Dispatch,
    agent: &AgentSnapshot,
    facts: &engine::DescribeRunnerResponse,
) -> Option<(SessionPick, PromptUse)> {
    let capabilities = agent::capabilities(facts, &agent.engine)?;
    let want = Want {
        conversation_id: &dispatch.conversation.id,
        workspace_id: &dispatch.workspace.as_ref()?.id,
        agent,
        prompt_change_on_resume: agent::supported(capabilities.prompt_change_on_resume),
    };
    let continues = |_: &str, to: &str| agent::continues(capabilities, to);
    let resumable = capabilities.resumable != i32::from(engine::Support::Unsupported);
    let sessions: &[Session] = if resumable { &dispatch.sessions } else { &[] };
    Some(match choose(sessions, &want, continues) {
        Choice::Resume { session_id, prompt } => (SessionPick::Existing(session_id), prompt),
        Choice::New { prompt } => (SessionPick::New(SessionId::new(clock::uuid())), prompt),
    })
}
