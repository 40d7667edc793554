//! What the client asks for.

use std::{
    path::Path,
    process::{Command, Stdio},
};

use serde_json::{Value, json};

use super::{
    Accepted, Engine, Message, NO_SANDBOX, VERSION, new_id,
    rollout::Refused,
    rpc, sandbox_is_broken,
    thread::{Thread, turn_object},
};
use crate::{
    core::{Dialect as _, Stop},
    shared::exit_code,
};

/// The code of nearly every refusal.
const INVALID: i64 = -32600;

impl Engine {
    /// Obeys a request, and answers it.
    pub(crate) fn request(&mut self, method: &str, id: &Value, params: &Value) -> Result<(), Stop> {
        if self.client.is_none() && method != "initialize" {
            self.refuse(id, INVALID, "Not initialized");
            return Ok(());
        }
        match method {
            "initialize" => self.initialize(id, params),
            "thread/start" | "thread/resume" if self.index_is_broken() => {
                self.refuse(id, -32601, "list_turns is not supported yet");
            }
            "thread/start" => self.start(id, params),
            "thread/resume" => self.resume(id, params),
            "turn/start"
            | "turn/steer"
            | "turn/interrupt"
            | "thread/fork"
            | "thread/inject_items"
            | "thread/turns/list"
            | "thread/unsubscribe"
            | "thread/compact/start"
            | "thread/backgroundTerminals/clean"
            | "thread/backgroundTerminals/list" => {
                let wanted = params["threadId"].as_str().unwrap_or_default();
                let Some(thread) = self.threads.iter().position(|thread| thread.id == wanted) else {
                    self.refuse(id, INVALID, &format!("thread not found: {wanted}"));
                    return Ok(());
                };
                return self.in_thread(method, id, thread, params);
            }
            "thread/loaded/list" => {
                let ids: Vec<&str> = self.threads.iter().map(|thread| thread.id.as_str()).collect();
                let loaded = json!({"data": ids, "nextCursor": null});
                self.answer(id, &loaded);
            }
            "skills/list" => {
                let cwds = params["cwds"].as_array().cloned().unwrap_or_default();
                let data: Vec<Value> = cwds.iter().map(|cwd| self.skills(cwd)).collect();
                self.answer(id, &json!({"data": data}));
            }
            "model/list" => self.answer(id, &json!({"data": [], "nextCursor": null})),
            "command/exec" => match exec(params) {
                Ok(result) => self.answer(id, &result),
                Err(problem) => self.refuse(id, INVALID, &problem),
            },
            unknown => {
                self.refuse(id, INVALID, &format!("Invalid request: unknown variant `{unknown}`"));
            }
        }
        Ok(())
    }

    pub(crate) fn answer(&mut self, id: &Value, result: &Value) {
        self.send(&rpc::answer(id, result));
    }

    fn refuse(&mut self, id: &Value, code: i64, message: &str) {
        self.send(&rpc::refusal(id, code, message));
    }

    fn initialize(&mut self, id: &Value, params: &Value) {
        let markers = std::mem::take(&mut self.core.file.initialize);
        self.outside_of_turns(&markers);
        let client = &params["clientInfo"];
        let name = client["name"].as_str().unwrap_or("unknown").to_owned();
        let version = client["version"].as_str().unwrap_or("0");
        let unwanted = params["capabilities"]["optOutNotificationMethods"].as_array();
        self.opted_out =
            unwanted.into_iter().flatten().filter_map(|name| name.as_str().map(str::to_owned)).collect();
        let agent = format!("{name}/{VERSION} (Linux; x86_64) unknown ({name}; {version})");
        let result = json!({
            "userAgent": agent, "codexHome": self.home, "platformFamily": "unix", "platformOs": "linux",
        });
        self.client = Some(name);
        self.answer(id, &result);
        let disabled = json!({"status": "disabled", "serverName": "fake", "installationId": "fake", "environmentId": null});
        self.notify("remoteControl/status/changed", disabled);
        self.core.out.flush();
    }

    fn client(&self) -> String {
        self.client.clone().unwrap_or_default()
    }

    fn start(&mut self, id: &Value, params: &Value) {
        let thread = Thread::start(&self.home, &self.client(), params);
        self.opened(id, thread, "thread/started");
    }

    fn resume(&mut self, id: &Value, params: &Value) {
        let wanted = params["threadId"].as_str().unwrap_or_default();
        // Of an open thread all parameters are left unread.
        let known = self.threads.iter().position(|thread| thread.id == wanted);
        let at = match known {
            Some(at) => at,
            None => match Thread::resume(&self.home, &self.client(), wanted, params) {
                Ok(thread) => {
                    self.threads.push(thread);
                    self.threads.len() - 1
                }
                Err((code, message)) => {
                    self.refuse(id, code, &message);
                    return;
                }
            },
        };
        self.status(at, &json!({"type": "idle"}));
        let thread = &self.threads[at];
        let mut result = thread.opened();
        if params["initialTurnsPage"].is_object() {
            result["initialTurnsPage"] = thread.page(&params["initialTurnsPage"]);
        }
        let last_turn = thread.turns.last().map_or(Value::Null, |turn| turn["id"].clone());
        self.answer(id, &result);
        if last_turn.is_string() {
            self.tell_usage(at, &last_turn);
        }
        self.notify("thread/goal/cleared", json!({"threadId": wanted}));
        self.core.out.flush();
    }

    /// Whether the index of all threads is there and is no database.
    fn index_is_broken(&self) -> bool {
        let index = std::fs::read(self.home.join("state_5.sqlite"));
        index.is_ok_and(|bytes| !bytes.starts_with(b"SQLite format 3"))
    }

    /// Answers what came of opening a thread.
    fn opened(&mut self, id: &Value, thread: Result<Thread, Refused>, told: &str) {
        match thread {
            Ok(thread) => {
                self.answer(id, &thread.opened());
                self.notify(told, json!({"thread": thread.told("idle")}));
                self.core.out.flush();
                self.threads.push(thread);
            }
            Err((code, message)) => self.refuse(id, code, &message),
        }
    }

    fn in_thread(&mut self, method: &str, id: &Value, thread: usize, params: &Value) -> Result<(), Stop> {
        match method {
            "turn/start" => return self.start_turn(id, thread, params),
            "turn/steer" => return self.steer(id, thread, params),
            "turn/interrupt" => return self.interrupt(id, thread, params),
            "thread/fork" => {
                let fork = self.threads[thread].fork(&self.home, params);
                self.opened(id, fork, "thread/started");
            }
            "thread/inject_items" => {
                let thread = &mut self.threads[thread];
                thread.keep_meta();
                for item in params["items"].as_array().into_iter().flatten() {
                    thread.rollout.append("response_item", item);
                }
                self.answer(id, &json!({}));
            }
            "thread/turns/list" => {
                let page = self.threads[thread].page(params);
                self.answer(id, &page);
            }
            "thread/unsubscribe" => self.answer(id, &json!({"status": "unsubscribed"})),
            "thread/compact/start" => {
                self.answer(id, &json!({}));
                self.compact(thread);
            }
            "thread/backgroundTerminals/list" => {
                let data = self.background_terminals(thread);
                self.answer(id, &json!({"data": data, "nextCursor": null}));
            }
            _ => {
                self.answer(id, &json!({}));
                self.clean(thread);
            }
        }
        Ok(())
    }

    fn start_turn(&mut self, id: &Value, thread: usize, params: &Value) -> Result<(), Stop> {
        let message = Message {
            client_id: params["clientUserMessageId"].as_str().map(str::to_owned),
            input: params["input"].clone(),
        };
        // In a running turn it is no turn of its own, but steers the one that runs.
        let object = |turn: &str| json!({"turn": turn_object(turn, "inProgress", &Value::Null)});
        if let Some(running) = self.running.as_ref().filter(|running| running.thread == thread) {
            let result = object(&running.turn);
            self.answer(id, &result);
            return self.hear_soon(message);
        }
        if let Some(accepted) = self.accepted.iter_mut().find(|accepted| accepted.thread == thread) {
            let result = object(&accepted.turn);
            accepted.more.push(message);
            self.answer(id, &result);
            return Ok(());
        }
        let turn = new_id();
        self.threads[thread].apply_turn(params);
        self.threads[thread].begin_turn(&turn, rpc::now_ms() / 1000);
        let unknown = format!(
            "Model metadata for `{}` not found. Defaulting to fallback metadata; this can degrade performance and \
             cause issues.",
            self.threads[thread].model
        );
        let warning = json!({"threadId": self.threads[thread].id, "message": unknown});
        self.notify("warning", warning);
        self.answer(id, &object(&turn));
        self.accepted.push_back(Accepted { thread, turn, message, more: Vec::new() });
        Ok(())
    }

    /// Keeps a message for the running turn; says whether the model must stop for it.
    fn hear_soon(&mut self, message: Message) -> Result<(), Stop> {
        self.steers.push_back(message);
        let at_once = self.running.as_ref().is_some_and(|running| running.started && running.sampling);
        if at_once { Err(Stop::Steered) } else { Ok(()) }
    }

    /// The turn that runs in this thread and has started.
    fn active(&self, thread: usize) -> Option<&str> {
        let running = self.running.as_ref();
        running
            .filter(|running| running.thread == thread && running.started)
            .map(|running| running.turn.as_str())
    }

    fn steer(&mut self, id: &Value, thread: usize, params: &Value) -> Result<(), Stop> {
        let expected = params["expectedTurnId"].as_str().unwrap_or_default();
        let refusal = match self.active(thread) {
            None => "no active turn to steer".to_owned(),
            Some(active) if active != expected => {
                format!("expected active turn id `{expected}` but found `{active}`")
            }
            Some(_) => {
                self.answer(id, &json!({"turnId": expected}));
                let client_id = params["clientUserMessageId"].as_str().map(str::to_owned);
                return self.hear_soon(Message { client_id, input: params["input"].clone() });
            }
        };
        self.refuse(id, INVALID, &refusal);
        Ok(())
    }

    fn interrupt(&mut self, id: &Value, thread: usize, params: &Value) -> Result<(), Stop> {
        if self.core.ignore_interrupt {
            return Ok(());
        }
        let wanted = params["turnId"].as_str().unwrap_or_default();
        let refusal = match self.active(thread) {
            None => "no active turn to interrupt".to_owned(),
            Some(active) if active != wanted => {
                format!("expected active turn id {wanted} but found {active}")
            }
            Some(_) => {
                if let Some(running) = &mut self.running {
                    running.interrupt = Some(id.clone());
                }
                return Err(Stop::Interrupted);
            }
        };
        self.refuse(id, INVALID, &refusal);
        Ok(())
    }

    /// The skills that are found for a directory, and those of the home.
    fn skills(&self, cwd: &Value) -> Value {
        let workspace = Path::new(cwd.as_str().unwrap_or("/"));
        let dirs = [
            (self.home.join("skills"), "user"),
            (workspace.join(".codex/skills"), "repo"),
            (workspace.join(".agents/skills"), "repo"),
        ];
        let mut skills = Vec::new();
        for (dir, scope) in dirs {
            for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
                let path = entry.path().join("SKILL.md");
                if path.is_file() {
                    skills.push(json!({
                        "name": entry.file_name().to_string_lossy(), "description": "", "path": path,
                        "scope": scope, "enabled": true, "pluginId": null,
                    }));
                }
            }
        }
        json!({"cwd": cwd, "skills": skills, "errors": []})
    }
}

/// Runs a command to its end.
fn exec(params: &Value) -> Result<Value, String> {
    let words: Vec<&str> =
        params["command"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    let Some((program, rest)) = words.split_first() else {
        return Err("command must not be empty".to_owned());
    };
    let in_sandbox = matches!(params["sandboxPolicy"]["type"].as_str(), Some("workspaceWrite" | "readOnly"));
    if in_sandbox && sandbox_is_broken() {
        return Ok(json!({"exitCode": 1, "stdout": "", "stderr": format!("{NO_SANDBOX}\n")}));
    }
    let mut command = Command::new(program);
    command.args(rest).stdin(Stdio::null());
    if let Some(cwd) = params["cwd"].as_str() {
        command.current_dir(cwd);
    }
    let output = command.output().map_err(|problem| format!("{program}: {problem}"))?;
    Ok(json!({
        "exitCode": exit_code(output.status), "stdout": String::from_utf8_lossy(&output.stdout),
        "stderr": String::from_utf8_lossy(&output.stderr),
    }))
}
