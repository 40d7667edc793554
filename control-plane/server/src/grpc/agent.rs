//! AgentService.

use roundhouse_domain::agent_file::{
    AgentFileSource, BadAgentFile, EngineFacts, ParsedAgentFiles, parse_all,
};
use roundhouse_proto::control::v1 as control;
use roundhouse_proto::control::v1::agent_service_server::AgentService;
use roundhouse_proto::control::v1::validate_agents_request::Source;
use roundhouse_proto::engine::v1 as engine;
use tonic::{Request, Response, Status};

use super::{Api, to_proto};
use crate::dispatch::engine_facts;
use crate::error::{Error, Result};
use crate::targets;

/// Most texts in one check.
const MAX_TEXTS: usize = 200;

#[tonic::async_trait]
impl AgentService for Api {
    async fn list_agents(
        &self,
        request: Request<control::ListAgentsRequest>,
    ) -> std::result::Result<Response<control::ListAgentsResponse>, Status> {
        let (found, workspace_id) = self.agents_of(&request.into_inner().workspace).await?;
        let (agents, problems) = found;
        Ok(Response::new(control::ListAgentsResponse { agents, problems, workspace_id }))
    }

    async fn validate_agents(
        &self,
        request: Request<control::ValidateAgentsRequest>,
    ) -> std::result::Result<Response<control::ValidateAgentsResponse>, Status> {
        let (agents, problems) = match request.into_inner().source {
            Some(Source::Workspace(workspace)) => self.agents_of(&workspace).await?.0,
            Some(Source::Texts(texts)) => self.check_texts(&texts).await?,
            None => return Err(Error::field("source", "name a workspace or give texts").into()),
        };
        Ok(Response::new(control::ValidateAgentsResponse { agents, problems }))
    }
}

type Checked = (Vec<control::Agent>, Vec<control::AgentProblem>);

impl Api {
    async fn agents_of(&self, workspace: &str) -> Result<(Checked, String)> {
        if workspace.is_empty() {
            return Err(Error::field("workspace", "must not be empty"));
        }
        let workspace = targets::workspace(&self.app, workspace).await?;
        let (files, facts) = targets::agent_files(&self.app, &workspace).await?;
        let sources = files
            .files
            .iter()
            .filter(|file| file.error.is_empty())
            .map(|file| AgentFileSource { file: &file.file_name, bytes: &file.content });
        let (agents, mut problems) = shown(&parse_all(sources, &engine_facts(&facts)));
        for file in files.files.iter().filter(|file| !file.error.is_empty()) {
            problems.push(unreadable(file));
        }
        if files.truncated {
            problems.push(cut(files.files.len()));
        }
        problems.sort_by(|a, b| (&a.file_name, a.line).cmp(&(&b.file_name, b.line)));
        Ok(((agents, problems), workspace.id.to_string()))
    }

    /// Texts without a workspace are checked against the engines of all runners that can be asked, and against
    /// their names alone where none can.
    async fn check_texts(&self, texts: &control::AgentTexts) -> Result<Checked> {
        if texts.files.len() > MAX_TEXTS {
            return Err(Error::field("texts.files", format!("has more than the {MAX_TEXTS} allowed")));
        }
        let mut engines: Vec<EngineFacts> = Vec::new();
        for runner in self.app.store.list_runners().await? {
            let handle = self.app.runners.get(&runner.info.id);
            let Ok(facts) = handle.describe().await else { continue };
            for engine in engine_facts(&facts) {
                if !engines.iter().any(|known| known.name == engine.name) {
                    engines.push(engine);
                }
            }
        }
        if engines.is_empty() {
            return Err(Error::RunnerUnavailable {
                runner: "(any)".to_owned(),
                detail: "a runner tells which engines and effort levels there are, and none can be asked"
                    .to_owned(),
            });
        }
        let sources =
            texts.files.iter().map(|file| AgentFileSource { file: &file.file_name, bytes: &file.content });
        Ok(shown(&parse_all(sources, &engines)))
    }
}

fn shown(parsed: &ParsedAgentFiles) -> Checked {
    let agents = parsed.good.iter().map(to_proto::agent).collect();
    let problems = parsed.bad.iter().flat_map(|bad: &BadAgentFile| to_proto::agent_problems(bad)).collect();
    (agents, problems)
}

/// The runner has more files than it lists.
fn cut(listed: usize) -> control::AgentProblem {
    control::AgentProblem {
        file_name: ".agents".to_owned(),
        line: 0,
        field: String::new(),
        message: format!(
            "holds more than is listed: the first {listed} files were read, the others were not checked; \
             a turn can name them all the same"
        ),
    }
}

fn unreadable(file: &engine::AgentFile) -> control::AgentProblem {
    control::AgentProblem {
        file_name: file.file_name.clone(),
        line: 0,
        field: String::new(),
        message: format!("cannot be read: {}", file.error),
    }
}
