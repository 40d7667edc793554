//! The steps before the runner is told of a turn: workspace, agent, session.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use roundhouse_domain::conflict::Conflict;
use roundhouse_domain::id::SessionId;
use roundhouse_domain::session::{Choice, Session, Want, choose};
use roundhouse_domain::turn::TurnState;
use roundhouse_proto::engine::v1 as engine;
use roundhouse_proto::engine::v1::ErrorReason;
use roundhouse_store::{ChooseSession, Error as StoreError, SessionPick, SlotOutcome};
use tokio::time::Instant;

use super::agent::{self, Found};
use super::drive::{Drive, Flow, Interrupt, Reached, StepResult, Until};
use super::plan::RunnerView;
use super::reasons;
use crate::clock;
use crate::runners::RunnerHandle;

impl Drive {
    pub(super) async fn take_slot(&mut self) -> StepResult {
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
        let Some(workspace) = dispatch.workspace.as_ref() else { return Err(Interrupt::Reload) };
        let Some(capabilities) = agent::capabilities(&facts, &snapshot.engine) else {
            let error = reasons::refused(
                Some(ErrorReason::EngineMissing),
                &format!("the runner has no engine {}", snapshot.engine),
            );
            return self.fail(error).await;
        };
        let want = Want {
            conversation_id: &dispatch.conversation.id,
            workspace_id: &workspace.id,
            agent: snapshot,
            prompt_change_on_resume: agent::supported(capabilities.prompt_change_on_resume),
        };
        let continues = |_: &str, to: &str| agent::continues(capabilities, to);
        let resumable = capabilities.resumable != i32::from(engine::Support::Unsupported);
        let sessions: &[Session] = if resumable { &dispatch.sessions } else { &[] };
        let new = || SessionPick::New(SessionId::new(clock::uuid()));
        let (pick, prompt) = match choose(sessions, &want, continues) {
            Choice::Resume { session_id, prompt } => (SessionPick::Existing(session_id), prompt),
            Choice::New { prompt } => (new(), prompt),
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
        self.prompt = Some(prompt);
        // No earlier run can have told the runner of this turn: the row is as new as its binding.
        self.view = RunnerView::Untold;
        self.bind(session)?;
        Ok(Flow::Again)
    }
}
