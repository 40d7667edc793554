//! From the agent files of a workspace to the agent of a turn. Pure.

use roundhouse_domain::agent_file::{AgentFileSource, AgentSnapshot, EngineFacts, Trigger, parse};
use roundhouse_domain::outcome::TurnError;
use roundhouse_proto::engine::v1 as engine;

use super::reasons;

/// Most problems of a file that are told in a turn's error.
const MAX_PROBLEMS: usize = 5;

/// Most names of other agents that are told in a turn's error.
const MAX_OTHERS: usize = 20;

/// What became of the search for an agent.
#[derive(Debug)]
pub(crate) enum Found {
    /// It is there, and may be used.
    Agent(Box<AgentSnapshot>),
    /// It cannot be used; another try makes no sense.
    Refused(TurnError),
    /// Its file could not be read just now.
    Unreadable(TurnError),
}

/// The name of the file of the agent `name`.
pub(crate) fn file_name(name: &str) -> String {
    format!("{name}.md")
}

/// What the engines of a runner are, as far as agent files are checked against it.
pub(crate) fn engine_facts(facts: &engine::DescribeRunnerResponse) -> Vec<EngineFacts> {
    facts
        .engines
        .iter()
        .map(|engine| EngineFacts {
            name: engine.name.clone(),
            effort_levels: engine.capabilities.as_ref().map(|c| c.effort_levels.clone()).unwrap_or_default(),
        })
        .collect()
}

/// Finds, checks and admits the agent `name` for a turn that came through `surface`.
pub(crate) fn find(
    name: &str,
    surface: Trigger,
    files: &engine::ListAgentFilesResponse,
    engines: &[EngineFacts],
) -> Found {
    let file_name = file_name(name);
    let Some(file) = files.files.iter().find(|file| file.file_name == file_name) else {
        let others: Vec<String> = files
            .files
            .iter()
            .filter_map(|file| file.file_name.strip_suffix(".md").map(str::to_owned))
            .take(MAX_OTHERS)
            .collect();
        let more = files.truncated || files.files.len() > others.len();
        return Found::Refused(reasons::agent_missing(name, &others, more));
    };
    if file.permanent {
        return Found::Refused(reasons::agent_unusable(name, &file.error));
    }
    if !file.error.is_empty() {
        return Found::Unreadable(reasons::agent_unreadable(name, &file.error));
    }
    let agent = match parse(AgentFileSource { file: &file.file_name, bytes: &file.content }, engines) {
        Ok(agent) => agent,
        Err(bad) => {
            let problems: Vec<String> =
                bad.errors.iter().take(MAX_PROBLEMS).map(ToString::to_string).collect();
            return Found::Refused(reasons::agent_invalid(name, &problems.join("; ")));
        }
    };
    if !agent.enabled {
        return Found::Refused(reasons::agent_disabled(name));
    }
    if !agent.triggers.contains(&surface) {
        return Found::Refused(reasons::agent_trigger(name, surface.as_str()));
    }
    Found::Agent(Box::new(agent))
}

/// The capabilities of an engine on a runner.
pub(crate) fn capabilities<'a>(
    facts: &'a engine::DescribeRunnerResponse,
    engine: &str,
) -> Option<&'a engine::EngineCapabilities> {
    facts.engines.iter().find(|e| e.name == engine).and_then(|e| e.capabilities.as_ref())
}

/// Whether a capability is there for certain.
pub(crate) fn supported(support: i32) -> bool {
    support == i32::from(engine::Support::Supported)
}

/// Whether a session of the engine can go on with the model `to`, when its last turn used another one.
pub(crate) fn continues(capabilities: &engine::EngineCapabilities, to: &str) -> bool {
    let listed = &capabilities.continuable_models;
    supported(capabilities.model_change_on_resume)
        && (listed.is_empty() || listed.iter().any(|model| model == to))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn s10_only_a_listed_model_is_continued_with() {
        let with = |support: engine::Support, models: &[&str]| engine::EngineCapabilities {
            model_change_on_resume: support.into(),
            continuable_models: models.iter().map(|&model| model.to_owned()).collect(),
            ..Default::default()
        };
        assert!(continues(&with(engine::Support::Supported, &[]), "any"));
        assert!(continues(&with(engine::Support::Supported, &["a", "b"]), "b"));
        assert!(!continues(&with(engine::Support::Supported, &["a", "b"]), "c"));
        assert!(!continues(&with(engine::Support::Unknown, &[]), "a"));
        assert!(!continues(&with(engine::Support::Unsupported, &["a"]), "a"));
    }
}
