//! `agents list | validate`.

use std::io::Read as _;
use std::path::{Path, PathBuf};

use roundhouse_proto::control::v1 as control;
use serde_json::json;

use crate::args::AgentsCommand;
use crate::client::{self, Client, call};
use crate::exit::Exit;
use crate::json;
use crate::output::{Output, first_line, table};
use crate::status::Failure;

/// Larger files are no agent files; the server says so as well, but need not be sent them.
const MAX_FILE_BYTES: u64 = 256 * 1024;

pub(crate) async fn run(client: &Client, what: AgentsCommand, output: Output) -> Result<Exit, Failure> {
    match what {
        AgentsCommand::List { workspace } => {
            let request = control::ListAgentsRequest { workspace: named(workspace)? };
            let answer = client.agents().list_agents(call(request)).await?.into_inner();
            output.result(
                || {
                    json!({
                        "workspace_id": answer.workspace_id,
                        "agents": answer.agents.iter().map(json::agent).collect::<Vec<_>>(),
                        "problems": answer.problems.iter().map(json::agent_problem).collect::<Vec<_>>(),
                    })
                },
                || table_of(&answer.agents),
            );
            tell(&answer.problems, &[], output);
            Ok(Exit::Done)
        }
        AgentsCommand::Validate { files, workspace } => {
            use control::validate_agents_request::Source;
            let source = if files.is_empty() {
                Source::Workspace(named(workspace)?)
            } else {
                let texts = files.iter().map(|file| read(file)).collect::<Result<_, _>>()?;
                Source::Texts(control::AgentTexts { files: texts })
            };
            let request = control::ValidateAgentsRequest { source: Some(source) };
            let answer = client.agents().validate_agents(call(request)).await?.into_inner();
            output.result(
                || {
                    json!({
                        "agents": answer.agents.iter().map(json::agent).collect::<Vec<_>>(),
                        "problems": answer.problems.iter().map(json::agent_problem).collect::<Vec<_>>(),
                    })
                },
                || table_of(&answer.agents),
            );
            tell(&answer.problems, &files, output);
            Ok(if answer.problems.is_empty() { Exit::Done } else { Exit::Invalid })
        }
    }
}

fn named(workspace: Option<String>) -> Result<String, Failure> {
    client::workspace(workspace.as_deref().unwrap_or("."), &client::current_directory()?)
}

fn read(file: &Path) -> Result<control::AgentText, Failure> {
    let failed = |problem: String| Failure::new(Exit::Invalid, format!("{}: {problem}", file.display()));
    // What is read is bounded, not only the size that is told: a device or a pipe has none.
    let mut content = Vec::new();
    std::fs::File::open(file)
        .and_then(|file| file.take(MAX_FILE_BYTES + 1).read_to_end(&mut content))
        .map_err(|error| failed(error.to_string()))?;
    if content.len() as u64 > MAX_FILE_BYTES {
        return Err(failed(format!("has more than the {MAX_FILE_BYTES} bytes allowed")));
    }
    let file_name = PathBuf::from(file)
        .file_name()
        .and_then(|name| name.to_str().map(str::to_owned))
        .ok_or_else(|| failed("has no name that is UTF-8".to_owned()))?;
    Ok(control::AgentText { file_name, content })
}

/// Agents for people.
pub(crate) fn table_of(agents: &[control::Agent]) -> String {
    let rows = agents
        .iter()
        .map(|agent| {
            vec![
                agent.name.clone(),
                agent.engine.clone(),
                agent.model.clone(),
                agent.reasoning_effort.clone().unwrap_or_default(),
                json::permission_mode(agent.permissions).to_lowercase().replace('_', "-"),
                if agent.enabled { "" } else { "disabled" }.to_owned(),
                first_line(&agent.description, 60),
            ]
        })
        .collect();
    table(&["agent", "engine", "model", "effort", "permissions", "", "description"], rows, "no agents")
}

/// The problems, on standard error, as an editor can follow them: under the paths that were given.
fn tell(problems: &[control::AgentProblem], files: &[PathBuf], output: Output) {
    if output.is_json() {
        return;
    }
    for problem in problems {
        let given =
            files.iter().find(|file| file.file_name().is_some_and(|name| *name == *problem.file_name));
        let file = given.map_or_else(|| problem.file_name.clone(), |file| file.display().to_string());
        let field = if problem.field.is_empty() { String::new() } else { format!("{}: ", problem.field) };
        output.note(&format!("{file}:{}: {field}{}", problem.line, problem.message));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_without_end_is_not_read_to_its_end() {
        let failure = read(Path::new("/dev/zero")).unwrap_err();
        assert_eq!(failure.exit, Exit::Invalid);
        assert!(failure.message.contains("262144"), "{}", failure.message);
    }
}
