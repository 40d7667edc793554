//! RunnerService.

use std::sync::Arc;

use roundhouse_domain::conflict::Conflict;
use roundhouse_domain::id::{ConversationId, Epoch, RunnerId, TurnId, WorkspaceId};
use roundhouse_domain::runner::{Root, Runner, RunnerClaims, RunnerInfo};
use roundhouse_proto::PROTOCOL_VERSION;
use roundhouse_proto::control::v1 as control;
use roundhouse_proto::control::v1::runner_service_server::RunnerService;
use roundhouse_proto::engine::v1::{self as engine, DrainRequest};
use roundhouse_store::{Error as StoreError, FreeWorkspace, RegisterRunner, SetDraining};
use tonic::{Request, Response, Status};

use super::from_proto::Check;
use super::{Api, from_proto, to_proto};
use crate::error::{Error, Missing, Result};
use crate::runners::link::who_answers;
use crate::runners::{Beat, Claim, Standing, reconcile};
use crate::{clock, targets};

/// Roots of one runner at most.
const MAX_ROOTS: usize = 200;
/// Longest address, path or name, in bytes.
const MAX_TEXT: usize = 4_096;
/// Longest reason for freeing a workspace, in bytes.
const MAX_REASON: usize = 1_000;
/// Time for whoever is at an address to say who it is.
const PROBE: std::time::Duration = std::time::Duration::from_secs(2);
/// Workspaces per read of the store.
const PAGE: usize = 1_000;

type Answer<T> = std::result::Result<Response<T>, Status>;

#[tonic::async_trait]
impl RunnerService for Api {
    async fn register_runner(
        &self,
        request: Request<control::RegisterRunnerRequest>,
    ) -> Answer<control::RegisterRunnerResponse> {
        Ok(Response::new(self.register(request.into_inner()).await?))
    }

    async fn heartbeat(
        &self,
        request: Request<control::HeartbeatRequest>,
    ) -> Answer<control::HeartbeatResponse> {
        self.beat(request.into_inner()).await?;
        Ok(Response::new(control::HeartbeatResponse {}))
    }

    async fn list_runners(
        &self,
        _request: Request<control::ListRunnersRequest>,
    ) -> Answer<control::ListRunnersResponse> {
        let stored = self.app.store.list_runners().await.map_err(Error::from)?;
        let mut runners: Vec<control::Runner> = stored.iter().map(|runner| self.runner(runner)).collect();
        runners.sort_by(|a, b| a.runner_id.cmp(&b.runner_id));
        Ok(Response::new(control::ListRunnersResponse { runners }))
    }

    async fn list_workspaces(
        &self,
        request: Request<control::ListWorkspacesRequest>,
    ) -> Answer<control::ListWorkspacesResponse> {
        Ok(Response::new(self.workspaces(&request.into_inner().runner_id).await?))
    }

    async fn free_workspace(
        &self,
        request: Request<control::FreeWorkspaceRequest>,
    ) -> Answer<control::FreeWorkspaceResponse> {
        Ok(Response::new(self.free(request.into_inner()).await?))
    }

    async fn drain_runner(
        &self,
        request: Request<control::DrainRunnerRequest>,
    ) -> Answer<control::DrainRunnerResponse> {
        Ok(Response::new(self.drain(request.into_inner()).await?))
    }
}

impl Api {
    /// Refuses a registration whose address leads to another runner, or whose id a runner elsewhere bears.
    ///
    /// An address at which nobody answers is taken: what is behind it will say who it is with every call.
    async fn check_identity(&self, id: &RunnerId, request: &control::RegisterRunnerRequest) -> Result<()> {
        let address = &request.address;
        if let Ok(facts) = who_answers(address, PROBE).await
            && !facts.runner_id.is_empty()
            && facts.runner_id != id.as_str()
        {
            return Err(Error::RunnerConflict {
                message: format!(
                    "at {address} answers the runner {}, not {id}; give each runner an address of its own that the \
                     control plane reaches (runner.advertise)",
                    facts.runner_id
                ),
                runner: facts.runner_id,
                address: address.clone(),
            });
        }
        let known = match self.app.store.get_runner(id).await {
            Ok(runner) => runner.info,
            Err(StoreError::NotFound { .. }) => return Ok(()),
            Err(error) => return Err(error.into()),
        };
        if known.address == *address {
            return Ok(());
        }
        // It may have come back at another address, also on another host. Two that live at once are two.
        if let Ok(facts) = who_answers(&known.address, PROBE).await
            && facts.runner_id == id.as_str()
            && (&facts.boot_id, &facts.hostname) != (&request.boot_id, &request.hostname)
        {
            return Err(Error::RunnerConflict {
                message: format!(
                    "a runner {id} lives at {} on host {}; two runners cannot share one state directory or a copy \
                     of it: give this one an empty directory (runner.state_dir)",
                    known.address, facts.hostname
                ),
                runner: facts.runner_id,
                address: known.address,
            });
        }
        Ok(())
    }

    async fn drain(&self, request: control::DrainRunnerRequest) -> Result<control::DrainRunnerResponse> {
        let mut check = Check::default();
        let body = control::DrainRunnerRequest { request_id: String::new(), ..request.clone() };
        let key = from_proto::request_key(&mut check, &request.request_id, "DrainRunner", &body);
        let id = check.take("runner_id", RunnerId::parse(&request.runner_id));
        let (key, runner_id) = check.finish(key.zip(id))?;
        let mut stored = self.app.store.get_runner(&runner_id).await?;
        if !self.app.store.answered_before(&key).await? {
            // The runner has the word over what it takes, so it is told first. A repeat tells it again.
            let draining = !request.undrain;
            let handle = self.app.runners.get(&runner_id);
            let told = match handle.link() {
                Ok(link) => link.drain(DrainRequest { undrain: request.undrain }).await,
                Err(error) => Err(error),
            };
            let told = told.map_err(|error| targets::unreached(&runner_id, "", error))?;
            handle.heard();
            handle.set_draining(draining, told.running_turns);
            let command = SetDraining { request: Some(key), runner_id, draining, time: clock::now() };
            stored = self.app.store.set_draining(command).await?;
            tracing::info!(runner_id = %stored.info.id, draining, "a person drains a runner, or ends it");
        }
        Ok(control::DrainRunnerResponse { runner: Some(self.runner(&stored)) })
    }

    async fn register(
        &self,
        request: control::RegisterRunnerRequest,
    ) -> Result<control::RegisterRunnerResponse> {
        if request.protocol_version != PROTOCOL_VERSION {
            return Err(Error::ProtocolVersion { theirs: request.protocol_version, ours: PROTOCOL_VERSION });
        }
        let ours = self.app.id.to_string();
        if !request.control_plane_id.is_empty() && request.control_plane_id != ours {
            return Err(Error::RunnerBound { bound_to: request.control_plane_id, ours });
        }
        let id = from_proto::runner_id(&request.runner_id)?;
        let mut check = Check::default();
        check.ensure(!request.address.is_empty(), "address", "must not be empty");
        check.line("address", &request.address, MAX_TEXT);
        check.line("hostname", &request.hostname, 255);
        check.line("version", &request.version, 255);
        check.line("boot_id", &request.boot_id, 255);
        check.ensure(
            request.roots.len() <= MAX_ROOTS,
            "roots",
            format!("has more than the {MAX_ROOTS} allowed"),
        );
        for root in &request.roots {
            check.ensure(root.path.starts_with('/'), "roots.path", "is an absolute path");
            check.line("roots.path", &root.path, MAX_TEXT);
        }
        let epochs = epochs(&mut check, &request);
        let claims = claims(&mut check, &request);
        check.done()?;
        self.check_identity(&id, &request).await?;
        let name = if request.hostname.is_empty() { id.to_string() } else { request.hostname.clone() };
        let command = RegisterRunner {
            info: RunnerInfo {
                id: id.clone(),
                name,
                address: request.address.clone(),
                version: request.version.clone(),
                protocol_version: request.protocol_version,
                roots: request
                    .roots
                    .iter()
                    .map(|root| Root { path: root.path.clone(), trusted: root.trusted })
                    .collect(),
                boot_id: request.boot_id.clone(),
                description: Vec::new(),
            },
            claims: RunnerClaims {
                epochs,
                turns: claims.iter().map(|claim| claim.turn_id.clone()).collect(),
            },
            time: clock::now(),
        };
        let registered = self.app.store.register_runner(command).await?;
        for (turn, epoch) in &registered.reconciled.raised {
            tracing::warn!(turn_id = %turn, epoch = epoch.0, "the runner had seen a newer owner; the turn's epoch was raised");
        }
        let (handle, generation) = self.app.runners.register(&id, &request.address);
        tracing::info!(runner_id = %id, address = request.address, turns = claims.len(), "a runner has registered");
        let app = Arc::clone(&self.app);
        self.app.tasks.spawn("reconcile", async move { reconcile(app, handle, generation, claims).await });
        Ok(control::RegisterRunnerResponse {
            control_plane_id: ours,
            heartbeat_interval: Some(to_proto::duration(self.app.settings.heartbeat_interval)),
        })
    }

    async fn beat(&self, request: control::HeartbeatRequest) -> Result<()> {
        let id = from_proto::runner_id(&request.runner_id)?;
        let beat = Beat {
            running_turns: request.running_turns,
            warm_engines: request.warm_engines,
            draining: request.draining,
        };
        // Anybody may send any id: only a registration makes one known.
        if !self.app.runners.find(&id).is_some_and(|runner| runner.beat(beat)) {
            // What it holds is not known to this process.
            return Err(Error::missing(Missing::Runner, id.as_str()));
        }
        let stored = self.app.store.heartbeat(&id, clock::now()).await?;
        if stored.draining != request.draining {
            let draining = request.draining;
            let command = SetDraining { request: None, runner_id: id, draining, time: clock::now() };
            self.app.store.set_draining(command).await?;
        }
        Ok(())
    }

    fn runner(&self, stored: &Runner) -> control::Runner {
        use control::runner::State;
        let handle = self.app.runners.get(&stored.info.id);
        let silent = stored.is_silent(clock::now(), self.app.settings.runner_lost_after);
        let state = match handle.standing() {
            Standing::Online => State::Online,
            Standing::Draining => State::Draining,
            Standing::Away if silent => State::Lost,
            Standing::Away => State::Away,
            Standing::Lost => State::Lost,
        };
        let described = handle.described();
        let (running_turns, warm_engines) = handle.load();
        control::Runner {
            runner_id: stored.info.id.to_string(),
            hostname: stored.info.name.clone(),
            address: stored.info.address.clone(),
            state: state.into(),
            roots: stored.info.roots.iter().map(to_proto::root).collect(),
            last_seen_time: Some(to_proto::timestamp(stored.heartbeat_time)),
            version: stored.info.version.clone(),
            running_turns,
            warm_engines,
            engines: described.as_ref().map(|facts| facts.engines.clone()).unwrap_or_default(),
            isolation: described
                .as_ref()
                .map_or(engine::IsolationLevel::Unspecified, |facts| facts.isolation())
                .into(),
        }
    }

    async fn workspaces(&self, runner: &str) -> Result<control::ListWorkspacesResponse> {
        let runner = match runner {
            "" => None,
            text => Some(from_proto::runner_id(text)?),
        };
        if let Some(id) = &runner {
            self.app.store.get_runner(id).await?;
        }
        let mut workspaces = Vec::new();
        let mut after: Option<WorkspaceId> = None;
        loop {
            let page = self.app.store.list_workspaces(runner.as_ref(), after.as_ref(), PAGE).await?;
            after = page.items.last().map(|view| view.workspace.id.clone());
            workspaces.extend(page.items.iter().map(to_proto::workspace));
            if !page.more || after.is_none() {
                break;
            }
        }
        workspaces.sort_by(|a, b| (&a.runner_id, &a.path).cmp(&(&b.runner_id, &b.path)));
        Ok(control::ListWorkspacesResponse { workspaces })
    }

    async fn free(&self, request: control::FreeWorkspaceRequest) -> Result<control::FreeWorkspaceResponse> {
        let mut check = Check::default();
        let body = control::FreeWorkspaceRequest { request_id: String::new(), ..request.clone() };
        let key = from_proto::request_key(&mut check, &request.request_id, "FreeWorkspace", &body);
        let workspace = check.take("workspace_id", WorkspaceId::parse(&request.workspace_id));
        let turn = check.take("turn_id", TurnId::parse(&request.turn_id));
        check.ensure(!request.reason.trim().is_empty(), "reason", "say why nothing works there any more");
        check.ensure(
            request.reason.len() <= MAX_REASON,
            "reason",
            format!("has more than {MAX_REASON} bytes"),
        );
        let ((key, workspace_id), turn_id) = check.finish(key.zip(workspace).zip(turn))?;
        let command = FreeWorkspace {
            request: Some(key),
            workspace_id: workspace_id.clone(),
            turn_id,
            reason: request.reason,
            actor: "user".to_owned(),
            time: clock::now(),
        };
        self.app.prefetches.giving_back(None);
        match self.app.store.free_workspace(command).await {
            Ok(outcome) => {
                tracing::info!(workspace_id = %workspace_id, ?outcome, "a person freed a workspace")
            }
            Err(StoreError::Conflict(Conflict::TurnInProgress)) => {
                return Err(Error::WrongState {
                    message: "the turn that holds the workspace has not ended; cancel it instead".to_owned(),
                });
            }
            Err(error) => return Err(error.into()),
        }
        let view = self.app.store.get_workspace(&workspace_id).await?;
        Ok(control::FreeWorkspaceResponse { workspace: Some(to_proto::workspace(&view)) })
    }
}

fn epochs(check: &mut Check, request: &control::RegisterRunnerRequest) -> Vec<(ConversationId, Epoch)> {
    let mut epochs = Vec::with_capacity(request.epochs.len());
    for (conversation, epoch) in &request.epochs {
        if let Some(id) = check.take("epochs", ConversationId::parse(conversation)) {
            epochs.push((id, Epoch(*epoch)));
        }
    }
    epochs
}

fn claims(check: &mut Check, request: &control::RegisterRunnerRequest) -> Vec<Claim> {
    let mut claims = Vec::with_capacity(request.turns.len());
    for turn in &request.turns {
        if let Some(turn_id) = check.take("turns.turn_id", TurnId::parse(&turn.turn_id)) {
            claims.push(Claim { turn_id, epoch: Epoch(turn.epoch) });
        }
    }
    claims
}
