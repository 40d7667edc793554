//! What an app-server is told when it opens a thread.
//!
//! The workspace is said to be untrusted on every start and every resume: without it the engine trusts an unknown
//! directory by itself as soon as a writable sandbox is asked for, and then runs what the workspace configures.
//! All of it is said again on a resume, because nothing of the configuration is kept with the thread.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use uuid::Uuid;

use crate::plan::Permissions;

/// The setup of one process, as the launch plan carries it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Setup {
    /// The workspace: absolute, canonical.
    pub(super) workspace: String,
    pub(super) model: String,
    pub(super) effort: Option<String>,
    pub(super) permissions: Permissions,
    /// The agent's prompt.
    pub(super) prompt: String,
}

impl Setup {
    /// Whether the mode needs the engine's own sandbox.
    pub(super) fn needs_sandbox(&self) -> bool {
        self.permissions != Permissions::Bypass
    }

    /// Which prompt this is, to be compared with what the thread was told.
    pub(super) fn prompt_digest(&self) -> String {
        Uuid::new_v5(&Uuid::NAMESPACE_OID, self.prompt.as_bytes()).simple().to_string()
    }

    /// Parameters that a start and a resume have in common. `skills` are the names that must not be expanded.
    fn common(&self, skills: &[String]) -> Map<String, Value> {
        let (approvals, sandbox) = match self.permissions {
            Permissions::Ask => ("on-request", "workspace-write"),
            Permissions::AcceptEdits => ("never", "workspace-write"),
            Permissions::Bypass => ("never", "danger-full-access"),
        };
        let mut config = Map::new();
        config.insert("projects".into(), json!({&self.workspace: {"trust_level": "untrusted"}}));
        if let Some(effort) = &self.effort {
            config.insert("model_reasoning_effort".into(), json!(effort));
        }
        if self.needs_sandbox() {
            // By default it may write to `/tmp`, where other workspaces may lie; the process has a directory of its own
            // for what is temporary.
            let mut writable = json!({"exclude_slash_tmp": true});
            if self.permissions == Permissions::AcceptEdits {
                // The sandbox keeps `.git` read-only by default, and no commit could be made.
                writable["writable_roots"] =
                    json!([format!("{}/.git", self.workspace.trim_end_matches('/'))]);
            }
            config.insert("sandbox_workspace_write".into(), writable);
        }
        if !skills.is_empty() {
            let disabled: Vec<Value> =
                skills.iter().map(|name| json!({"name": name, "enabled": false})).collect();
            // The whole table: it takes the place of what the arguments say.
            config.insert(
                "skills".into(),
                json!({"config": disabled, "include_instructions": false, "bundled": {"enabled": false}}),
            );
        }
        let mut params = Map::new();
        params.insert("cwd".into(), json!(self.workspace));
        params.insert("model".into(), json!(self.model));
        params.insert("approvalPolicy".into(), json!(approvals));
        params.insert("approvalsReviewer".into(), json!("user"));
        params.insert("sandbox".into(), json!(sandbox));
        if !self.prompt.is_empty() {
            // On a resume this reaches the model only after a compaction; until then the injected text does.
            params.insert("developerInstructions".into(), json!(self.prompt));
        }
        params.insert("config".into(), Value::Object(config));
        params
    }

    /// Parameters of `thread/start`.
    pub(super) fn start(&self, skills: &[String]) -> Value {
        Value::Object(self.common(skills))
    }

    /// Parameters of `thread/resume`. The newest turn of the thread comes with the answer.
    pub(super) fn resume(&self, thread: &str, skills: &[String]) -> Value {
        let mut params = self.common(skills);
        params.insert("threadId".into(), json!(thread));
        params.insert("excludeTurns".into(), json!(true));
        params.insert(
            "initialTurnsPage".into(),
            json!({"limit": 1, "itemsView": "notLoaded", "sortDirection": "desc"}),
        );
        Value::Object(params)
    }

    /// What a resumed thread is told when its agent's prompt has changed.
    pub(super) fn changed_prompt(&self) -> String {
        if self.prompt.is_empty() {
            return "The instructions you were given for this agent no longer hold.".to_owned();
        }
        format!(
            "Your instructions have changed. From here on these hold instead of the ones you were given before:\n\n{}",
            self.prompt
        )
    }
}
