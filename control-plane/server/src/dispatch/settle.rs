//! After the end of a turn: the runner confirms that nothing of it is left, the slot is freed, and the runner is told
//! that the end is stored.

use prost::Message as _;
use roundhouse_domain::turn::{Turn, TurnState};
use roundhouse_domain::workspace::Workspace;
use roundhouse_proto::engine::v1 as engine;
use roundhouse_proto::engine::v1::ErrorReason;
use roundhouse_store::{Diagnosis, Owner};

use super::drive::{Drive, Flow, Pauses, StepResult};
use crate::clock;
use crate::failpoint::kill_point;
use crate::runners::CallError;

impl Drive {
    /// Settles the turn with its runner. Waits for the runner as long as it takes: nothing else depends on this task,
    /// and until then the turn's slot says who is in the way.
    pub(super) async fn settle(&mut self) -> StepResult {
        let turn = self.app.store.get_turn(&self.turn_id).await?;
        if !turn.state.is_terminal() {
            // It waits for the turns before it.
            return Ok(Flow::Done);
        }
        let owner = Owner { turn_id: turn.id.clone(), epoch: turn.epoch };
        let (Some(workspace_id), Some(_)) = (&turn.workspace_id, &turn.session_id) else {
            // No runner was ever told of it.
            if turn.epoch.0 > 0 {
                self.free_slot(&owner).await?;
            }
            self.acknowledged(&turn).await?;
            return Ok(Flow::Done);
        };
        if turn.acknowledge_time.is_some() {
            self.free_slot(&owner).await?;
            return Ok(Flow::Done);
        }
        let workspace = self.app.store.get_workspace(workspace_id).await?.workspace;
        // The close of a LOST turn keeps the slot, whoever said the end; nobody looks at it after the acknowledgement.
        if !self.runner_said_end || turn.state == TurnState::Lost {
            self.confirm(&turn, &workspace).await?;
            self.free_slot(&owner).await?;
        }
        kill_point!("before-acknowledge");
        self.acknowledge(&turn, &workspace).await?;
        Ok(Flow::Done)
    }

    async fn free_slot(&self, owner: &Owner) -> StepResult<()> {
        self.app.prefetches.giving_back(None);
        self.app.store.free_slot(owner).await?;
        Ok(())
    }

    async fn acknowledged(&self, turn: &Turn) -> StepResult<()> {
        if turn.acknowledge_time.is_none() {
            self.app.store.acknowledge_turn(&turn.id, clock::now()).await?;
        }
        Ok(())
    }

    /// The epoch under which the runner is spoken to about an ended turn: the conversation's newest, or it would be
    /// refused.
    async fn present_epoch(&self, turn: &Turn) -> StepResult<u64> {
        let view = self.app.store.get_conversation(&turn.conversation_id).await?;
        Ok(view.conversation.epoch.max(turn.epoch).0)
    }

    /// Returns when the runner has said that the turn has ended or that it knows nothing of it.
    async fn confirm(&mut self, turn: &Turn, workspace: &Workspace) -> StepResult<()> {
        use engine::inspect_response::State;
        let runner = self.app.runners.get(&workspace.runner_id);
        let mut pauses = Pauses::new(self.app.settings.backoff);
        loop {
            let answer = match runner.link() {
                Ok(link) => {
                    let target = engine::inspect_request::Target::TurnId(turn.id.to_string());
                    link.inspect(engine::InspectRequest { target: Some(target) }).await
                }
                Err(error) => Err(error),
            };
            match answer {
                Ok(facts) => {
                    runner.heard();
                    match facts.state() {
                        State::Unknown => return Ok(()),
                        State::Ended => {
                            self.keep_late_end(turn, workspace, &facts).await?;
                            return Ok(());
                        }
                        State::Unspecified | State::Opened | State::Sent | State::Running => {
                            self.stop_left_over(turn, workspace).await?;
                        }
                    }
                }
                Err(error) => tracing::debug!(%error, "the runner does not confirm the end yet"),
            }
            self.pause_for_runner(&runner, pauses.next()).await;
            // Somebody else may have settled it: a person who freed the workspace does not, an acknowledgement does.
            let now = self.app.store.get_turn(&turn.id).await?;
            if now.acknowledge_time.is_some() {
                return Ok(());
            }
        }
    }

    async fn stop_left_over(&mut self, turn: &Turn, workspace: &Workspace) -> StepResult<()> {
        let epoch = self.present_epoch(turn).await?;
        let runner = self.app.runners.get(&workspace.runner_id);
        if let Ok(link) = runner.link() {
            let request = engine::CancelRequest { turn_id: turn.id.to_string(), epoch, grace: None };
            let answer = link.cancel(request).await;
            tracing::info!(?answer, "told the runner to end what is left of an ended turn");
        }
        Ok(())
    }

    /// What the runner says of a turn that was given up changes nothing, but is kept; the end that closed the turn is
    /// stored already.
    async fn keep_late_end(
        &self,
        turn: &Turn,
        workspace: &Workspace,
        facts: &engine::InspectResponse,
    ) -> StepResult<()> {
        if turn.state != TurnState::Lost || self.runner_said_end {
            return Ok(());
        }
        let mut terminal = facts.terminal.clone().unwrap_or_default();
        terminal.result = roundhouse_domain::limits::cut(&terminal.result, 32_000).0.to_owned();
        let diagnosis = Diagnosis {
            turn_id: turn.id.clone(),
            epoch: turn.epoch,
            runner_id: Some(workspace.runner_id.clone()),
            payload: terminal.encode_to_vec(),
            time: clock::now(),
        };
        self.app.store.record_diagnosis(diagnosis).await?;
        Ok(())
    }

    async fn acknowledge(&mut self, turn: &Turn, workspace: &Workspace) -> StepResult<()> {
        let runner = self.app.runners.get(&workspace.runner_id);
        let mut pauses = Pauses::new(self.app.settings.backoff);
        let mut epoch = turn.epoch.0;
        loop {
            let answer = match runner.link() {
                Ok(link) => {
                    let request = engine::AcknowledgeRequest { turn_id: turn.id.to_string(), epoch };
                    link.acknowledge(request).await
                }
                Err(error) => Err(error),
            };
            match answer {
                Ok(_) | Err(CallError::Refused { reason: Some(ErrorReason::TurnNotFound), .. }) => {
                    runner.heard();
                    self.acknowledged(turn).await?;
                    return Ok(());
                }
                Err(CallError::Refused { reason: Some(ErrorReason::StaleEpoch), .. }) => {
                    epoch = self.present_epoch(turn).await?;
                }
                Err(error) => tracing::debug!(%error, "the runner did not take the acknowledgement"),
            }
            self.pause_for_runner(&runner, pauses.next()).await;
        }
    }
}
