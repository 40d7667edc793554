//! A thread: its settings, its turns, what was said in it.

use std::path::Path;

use serde_json::{Value, json};

use super::{
    VERSION, new_id,
    rollout::{Refused, Rollout},
    rpc::{Tokens, now_ms},
};

/// A thread that this process has open.
#[derive(Debug)]
pub(crate) struct Thread {
    pub(crate) id: String,
    pub(crate) rollout: Rollout,
    pub(crate) model: String,
    pub(crate) effort: Value,
    pub(crate) cwd: String,
    pub(crate) approvals: String,
    pub(crate) sandbox: Value,
    forked_from: Value,
    /// When it was opened, in seconds since 1970.
    created: u64,
    originator: String,
    /// Approved for as long as the process lives.
    pub(crate) approves_all: bool,
    /// Every user text so far: the last of each message.
    pub(crate) texts: Vec<String>,
    /// The turns, as lists tell them in full.
    pub(crate) turns: Vec<Value>,
    pub(crate) total: Tokens,
    pub(crate) last: Tokens,
}

/// The last text of a message's parts.
pub(crate) fn last_text(input: &Value) -> String {
    let parts = input.as_array().map_or(&[][..], Vec::as_slice);
    let last = parts.iter().rev().find_map(|part| part["text"].as_str());
    last.unwrap_or_default().to_owned()
}

impl Thread {
    fn bare(id: String, rollout: Rollout, client: &str) -> Self {
        let cwd = std::env::current_dir().map_or_else(|_| "/".to_owned(), |dir| dir.display().to_string());
        Self {
            id,
            rollout,
            model: "gpt-fake-1".to_owned(),
            effort: Value::Null,
            cwd,
            approvals: "on-request".to_owned(),
            sandbox: sandbox("read-only"),
            forked_from: Value::Null,
            created: now_ms() / 1000,
            originator: client.to_owned(),
            approves_all: false,
            texts: Vec::new(),
            turns: Vec::new(),
            total: Tokens::default(),
            last: Tokens::default(),
        }
    }

    /// A new thread; nothing of it is on disk.
    pub(crate) fn start(home: &Path, client: &str, params: &Value) -> Result<Self, Refused> {
        let id = new_id();
        let mut thread = Self::bare(id.clone(), Rollout::new(home, &id)?, client);
        thread.apply(params);
        Ok(thread)
    }

    /// A thread from disk. What it was set to holds, where the request says nothing else.
    pub(crate) fn resume(home: &Path, client: &str, id: &str, params: &Value) -> Result<Self, Refused> {
        if uuid::Uuid::try_parse(id).is_err() {
            let first = id.chars().next().unwrap_or(' ');
            let expected = "expected an optional prefix of `urn:uuid:` followed by [0-9a-fA-F-]";
            let message = format!("invalid session id: invalid character: {expected}, found `{first}` at 1");
            return Err((-32600, message));
        }
        let (rollout, rows) = Rollout::open(home, id)?;
        let mut thread = Self::bare(id.to_owned(), rollout, client);
        for row in &rows {
            thread.replay(row["type"].as_str().unwrap_or_default(), &row["payload"]);
        }
        thread.apply(params);
        Ok(thread)
    }

    /// A copy of a thread under another id.
    pub(crate) fn fork(&self, home: &Path, params: &Value) -> Result<Self, Refused> {
        let rows = std::fs::read_to_string(&self.rollout.path).unwrap_or_default();
        let mut fork = Self::start(home, &self.originator, params)?;
        fork.forked_from = json!(self.id);
        fork.keep_meta();
        for row in rows.lines().filter_map(|row| serde_json::from_str::<Value>(row).ok()) {
            let kind = row["type"].as_str().unwrap_or_default();
            if kind != "session_meta" {
                fork.rollout.append(kind, &row["payload"]);
            }
            fork.replay(kind, &row["payload"]);
        }
        fork.apply(params);
        Ok(fork)
    }

    /// What a request may set.
    fn apply(&mut self, params: &Value) {
        let text = |name: &str| params[name].as_str().map(str::to_owned);
        self.model = text("model").unwrap_or_else(|| self.model.clone());
        self.cwd = text("cwd").unwrap_or_else(|| self.cwd.clone());
        self.approvals = text("approvalPolicy").unwrap_or_else(|| self.approvals.clone());
        if let Some(mode) = params["sandbox"].as_str() {
            self.sandbox = sandbox(mode);
        }
        if let Some(effort) = params["config"]["model_reasoning_effort"].as_str() {
            self.effort = json!(effort);
        }
    }

    /// What a turn may set, for itself and all later ones.
    pub(crate) fn apply_turn(&mut self, params: &Value) {
        self.apply(params);
        if let Some(effort) = params["effort"].as_str() {
            self.effort = json!(effort);
        }
        if params["sandboxPolicy"].is_object() {
            self.sandbox = params["sandboxPolicy"].clone();
        }
    }

    /// Takes one row of the rollout in.
    fn replay(&mut self, kind: &str, payload: &Value) {
        let turn = || payload["turn_id"].as_str().unwrap_or_default().to_owned();
        match (kind, payload["type"].as_str().unwrap_or_default()) {
            ("session_meta", _) => {
                self.cwd = payload["cwd"].as_str().unwrap_or(&self.cwd).to_owned();
            }
            ("turn_context", _) => {
                self.model = payload["model"].as_str().unwrap_or(&self.model).to_owned();
                self.approvals = payload["approval_policy"].as_str().unwrap_or(&self.approvals).to_owned();
                self.effort = payload["effort"].clone();
                self.sandbox = payload["sandbox_policy"].clone();
            }
            ("event_msg", "task_started") => {
                // Until its end is found, it was cut off.
                self.turns.push(turn_object(&turn(), "interrupted", &payload["started_at"]));
            }
            ("event_msg", "item_completed") if payload["item"]["type"] == "UserMessage" => {
                let content = &payload["item"]["content"];
                self.texts.push(last_text(content));
                let item = json!({
                    "type": "userMessage", "id": payload["item"]["id"],
                    "clientId": payload["item"]["client_id"], "content": content,
                });
                self.add_item(&turn(), item);
            }
            ("event_msg", "item_completed") => self.add_item(&turn(), payload["item"].clone()),
            ("event_msg", "token_count") => {
                self.total = Tokens::read(&payload["info"]["total_token_usage"]);
                self.last = Tokens::read(&payload["info"]["last_token_usage"]);
            }
            ("event_msg", "task_complete") => {
                let status = if payload["error"].is_null() { "completed" } else { "failed" };
                self.end(&turn(), status, &payload["error"], &payload["duration_ms"]);
            }
            ("event_msg", "turn_aborted") => {
                self.end(&turn(), "interrupted", &Value::Null, &payload["duration_ms"]);
            }
            _ => {}
        }
    }

    /// A turn begins: told by lists, and on disk.
    pub(crate) fn begin_turn(&mut self, turn: &str, now_s: u64) {
        self.turns.push(turn_object(turn, "inProgress", &json!(now_s)));
        self.keep_meta();
        self.event(&json!({
            "type": "task_started", "turn_id": turn, "root_turn_id": turn, "started_at": now_s,
            "model_context_window": WINDOW, "collaboration_mode_kind": "default",
        }));
        let context = json!({
            "turn_id": turn, "root_turn_id": turn, "cwd": self.cwd, "approval_policy": self.approvals,
            "sandbox_policy": self.sandbox, "model": self.model, "effort": self.effort,
        });
        self.rollout.append("turn_context", &context);
    }

    /// The first row, if there is none.
    pub(crate) fn keep_meta(&mut self) {
        if self.rollout.is_empty() {
            let meta = json!({
                "session_id": self.id, "id": self.id, "cwd": self.cwd, "originator": self.originator,
                "cli_version": VERSION, "source": "vscode", "model_provider": "fake",
                "forked_from_id": self.forked_from, "history_mode": "paginated",
            });
            self.rollout.append("session_meta", &meta);
        }
    }

    /// A row that tells an event.
    pub(crate) fn event(&mut self, payload: &Value) {
        self.rollout.append("event_msg", payload);
    }

    /// Adds an item to a turn of the list.
    pub(crate) fn add_item(&mut self, turn: &str, item: Value) {
        let known = self.turns.iter_mut().find(|known| known["id"] == turn);
        if let Some(items) = known.and_then(|turn| turn["items"].as_array_mut()) {
            items.push(item);
        }
    }

    /// Ends a turn of the list.
    pub(crate) fn end(&mut self, turn: &str, status: &str, error: &Value, duration_ms: &Value) {
        if let Some(known) = self.turns.iter_mut().find(|known| known["id"] == turn) {
            let started = known["startedAt"].as_u64().unwrap_or(0);
            known["status"] = json!(status);
            known["error"] = error.clone();
            known["completedAt"] = json!(started + duration_ms.as_u64().unwrap_or(0) / 1000);
            known["durationMs"] = duration_ms.clone();
        }
    }

    /// A page of turns: the newest first unless `sortDirection` is `asc`.
    pub(crate) fn page(&self, params: &Value) -> Value {
        let limit = params["limit"].as_u64().and_then(|limit| usize::try_from(limit).ok()).unwrap_or(100);
        let view = params["itemsView"].as_str().unwrap_or("summary");
        let mut turns = self.turns.clone();
        if params["sortDirection"] != "asc" {
            turns.reverse();
        }
        turns.truncate(limit);
        for turn in &mut turns {
            turn["itemsView"] = json!(view);
            if let Some(items) = turn["items"].as_array_mut() {
                match view {
                    "full" => {}
                    "notLoaded" => items.clear(),
                    _ => items.retain(|item| item["type"] == "userMessage"),
                }
            }
        }
        json!({"data": turns, "nextCursor": null, "backwardsCursor": null})
    }

    /// The thread, as answers and notifications tell it.
    pub(crate) fn told(&self, status: &str) -> Value {
        json!({
            "id": self.id, "sessionId": self.id, "forkedFromId": self.forked_from, "parentThreadId": null,
            "environments": [{"environmentId": "local", "cwd": self.cwd, "runtimeWorkspaceRoots": [self.cwd]}],
            "preview": self.texts.first().map_or("", String::as_str), "ephemeral": false,
            "historyMode": "paginated", "modelProvider": "fake", "model": self.model,
            "reasoningEffort": self.effort, "status": {"type": status}, "path": self.rollout.path,
            "cwd": self.cwd, "cliVersion": VERSION, "originator": self.originator, "source": "vscode",
            "createdAt": self.created, "updatedAt": self.created, "recencyAt": self.created,
            "canAcceptDirectInput": true, "gitInfo": null, "name": null, "turns": [],
        })
    }

    /// What a start, a resume and a fork answer.
    pub(crate) fn opened(&self) -> Value {
        json!({
            "thread": self.told("idle"), "model": self.model, "modelProvider": "fake", "serviceTier": null,
            "disabledPluginIds": [], "cwd": self.cwd, "runtimeWorkspaceRoots": [self.cwd],
            "instructionSources": [], "approvalPolicy": self.approvals, "approvalsReviewer": "user",
            "sandbox": self.sandbox, "activePermissionProfile": null, "reasoningEffort": self.effort,
            "multiAgentMode": "explicitRequestOnly",
        })
    }

    /// Whether commands run in a sandbox.
    pub(crate) fn is_sandboxed(&self) -> bool {
        !matches!(self.sandbox["type"].as_str(), Some("dangerFullAccess" | "externalSandbox"))
    }
}

/// Tokens that the model can hold.
pub(crate) const WINDOW: u64 = 258_400;

fn sandbox(mode: &str) -> Value {
    match mode {
        "danger-full-access" => json!({"type": "dangerFullAccess"}),
        "workspace-write" => json!({
            "type": "workspaceWrite", "writableRoots": [], "networkAccess": false, "excludeTmpdirEnvVar": false,
            "excludeSlashTmp": false,
        }),
        _ => json!({"type": "readOnly", "networkAccess": false}),
    }
}

/// A turn without items.
pub(crate) fn turn_object(id: &str, status: &str, started: &Value) -> Value {
    json!({
        "id": id, "rootTurnId": id, "items": [], "itemsView": "notLoaded", "status": status, "error": null,
        "startedAt": started, "completedAt": null, "durationMs": null,
    })
}
