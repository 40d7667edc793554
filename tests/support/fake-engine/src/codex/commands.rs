//! Tool calls: announced, permitted, done, and sometimes outliving their turn.

use std::{
    fs::File,
    io::{Read as _, Seek as _},
    time::Duration,
};

use serde_json::{Value, json};

use super::{Engine, NO_SANDBOX, VERSION, rpc::now_ms, sandbox_is_broken, turn::active};
use crate::{
    core::{Dialect as _, Stop, bad, system_failure},
    script::Marker,
    shared::exit_code,
    tools,
};

/// The most that an item says of a command's output, in bytes.
const MAX_OUTPUT: u64 = 1 << 20;

/// How long a command holds up the model, in milliseconds.
const YIELD: u64 = 10_000;

/// A command that goes on without anybody waiting for it.
#[derive(Debug)]
pub(crate) struct Background {
    pid: u32,
    thread: usize,
    turn: String,
    /// Its item, as it began.
    item: Value,
    since: u64,
    output: File,
}

/// What came of asking.
enum Permission {
    Given,
    /// The item was told to be declined.
    Declined,
    /// Nobody was asked, and nothing is told.
    Refused,
}

impl Engine {
    /// Obeys a marker that calls a tool.
    pub(crate) fn tool(&mut self, marker: &Marker) -> Result<(), Stop> {
        if let Some(running) = &mut self.running {
            running.sampling = false;
        }
        let done = match marker.verb.as_str() {
            "bash" => self.command(marker),
            "append" => self.change(marker),
            _ => self.call(marker),
        };
        // A turn that ends here, ends in its tool.
        done?;
        if let Some(running) = &mut self.running {
            running.sampling = true;
            running.uncounted = true;
        }
        self.count();
        self.core.out.flush();
        Ok(())
    }

    /// The running turn's thread.
    fn place(&self) -> (usize, String) {
        self.running.as_ref().map_or((0, String::new()), |running| (running.thread, running.turn.clone()))
    }

    fn command(&mut self, marker: &Marker) -> Result<(), Stop> {
        let command = marker.needed().map_err(bad)?;
        let (at, turn) = self.place();
        let since = now_ms();
        let mut item = json!({
            "type": "commandExecution", "id": call_id(), "pluginId": null, "scriptPath": null,
            "command": format!("/bin/bash -lc {}", quoted(&command)), "cwd": self.threads[at].cwd,
            "processId": null, "source": "agent", "status": "inProgress",
            "commandActions": [{"type": "unknown", "command": command}], "aggregatedOutput": null,
            "exitCode": null, "durationMs": null,
        });
        if marker.flag("ask") {
            match self.permission(&mut item, since)? {
                Permission::Given => {}
                Permission::Declined | Permission::Refused => return Ok(()),
            }
        }
        item["source"] = json!("unifiedExecStartup");
        item["processId"] = json!((since % 90_000 + 10_000).to_string());
        if !marker.flag("ask") {
            self.item_started(item.clone(), since);
            self.core.out.flush();
        }
        if sandbox_is_broken() && self.threads[at].is_sandboxed() {
            self.command_over(item, since, 1, NO_SANDBOX);
            return Ok(());
        }
        let failed = |problem| system_failure("bash", &problem);
        let thread = &self.threads[at].id;
        let environment = [
            ("CODEX_THREAD_ID", thread.clone()),
            ("CODEX_SESSION_ID", thread.clone()),
            ("CODEX_VERSION", VERSION.to_owned()),
            ("CODEX_TOOL_CALL_ID", item["id"].as_str().unwrap_or_default().to_owned()),
        ];
        let (pid, output) = self.core.start_command(&command, &environment).map_err(failed)?;
        let limit = Duration::from_millis(marker.number("yield", YIELD).map_err(bad)?);
        let waited = self.wait_until(Some(limit), |engine| engine.core.ended.contains_key(&pid));
        if waited != Ok(true) {
            // Neither the end of the waiting nor that of the turn ends the command.
            self.background.push(Background { pid, thread: at, turn, item, since, output });
            return waited.map(drop);
        }
        let status = self.core.ended.remove(&pid).transpose().map_err(failed)?;
        let text = read_output(output).map_err(failed)?;
        self.command_over(item, since, status.map_or(1, exit_code), &text);
        Ok(())
    }

    /// Tells that a command of this turn has ended.
    fn command_over(&mut self, mut item: Value, since: u64, code: i32, output: &str) {
        end_command(&mut item, since, code, output);
        self.item_completed(item, since);
    }

    fn change(&mut self, marker: &Marker) -> Result<(), Stop> {
        let path = marker.value("path").ok_or_else(|| bad("append needs path=FILE".to_owned()))?.to_owned();
        let line = marker.text("");
        let since = now_ms();
        let kind = if std::path::Path::new(&path).exists() { "update" } else { "add" };
        let change = json!({"path": path, "kind": {"type": kind}, "diff": format!("{line}\n")});
        let mut item =
            json!({"type": "fileChange", "id": call_id(), "changes": [change], "status": "inProgress"});
        if marker.flag("ask") {
            match self.permission(&mut item, since)? {
                Permission::Given => {}
                Permission::Declined | Permission::Refused => return Ok(()),
            }
        } else {
            self.item_started(item.clone(), since);
        }
        let done = tools::append_line(&path, &line).is_ok();
        item["status"] = json!(if done { "completed" } else { "failed" });
        self.item_completed(item, since);
        Ok(())
    }

    /// A call of a tool of some server. With `ask` the server asks the person something: whatever is answered will do,
    /// but an answer there must be.
    fn call(&mut self, marker: &Marker) -> Result<(), Stop> {
        let name = marker.value("name").ok_or_else(|| bad("tool needs name=NAME".to_owned()))?.to_owned();
        let arguments: Value =
            serde_json::from_str(&marker.text("{}")).map_err(|problem| bad(problem.to_string()))?;
        let named = name.strip_prefix("mcp__").and_then(|rest| rest.split_once("__"));
        let (server, tool) = named.unwrap_or(("fake", &name));
        let since = now_ms();
        let mut item = json!({
            "type": "mcpToolCall", "id": call_id(), "server": server, "tool": tool, "status": "inProgress",
            "arguments": arguments, "result": null, "error": null, "durationMs": null,
        });
        self.item_started(item.clone(), since);
        let mut refused = false;
        if marker.flag("ask") {
            let (at, turn) = self.place();
            let question = json!({
                "threadId": self.threads[at].id, "turnId": turn, "serverName": server, "mode": "form",
                "message": "may I?", "requestedSchema": {"type": "object", "properties": {}},
            });
            let answer = self.ask_client("mcpServer/elicitation/request", question)?;
            refused = !answer["error"].is_null() || answer["result"]["action"] == "decline";
        }
        item["durationMs"] = json!(now_ms() - since);
        if refused {
            item["status"] = json!("failed");
            item["error"] = json!({"message": "refused"});
        } else {
            item["status"] = json!("completed");
            let content = json!([{"type": "text", "text": "ok"}]);
            item["result"] = json!({"content": content, "structuredContent": null});
        }
        self.item_completed(item, since);
        Ok(())
    }

    /// Asks the client, and waits for its answer: the whole line.
    fn ask_client(&mut self, method: &str, params: Value) -> Result<Value, Stop> {
        let id = self.next_request;
        self.next_request += 1;
        self.send(&json!({"method": method, "id": id, "params": params}));
        self.asking = Some(id);
        self.wait_until(None, |engine| engine.answers.contains_key(&id))?;
        self.asking = None;
        let (at, _) = self.place();
        let resolved = json!({"threadId": self.threads[at].id, "requestId": id});
        self.notify("serverRequest/resolved", resolved);
        Ok(self.answers.remove(&id).unwrap_or_default())
    }

    /// Begins an item that needs a permission, and asks for it, unless the thread's policy decides.
    fn permission(&mut self, item: &mut Value, since: u64) -> Result<Permission, Stop> {
        let (at, turn) = self.place();
        let thread = &self.threads[at];
        if thread.approvals == "never" && thread.is_sandboxed() {
            return Ok(Permission::Refused);
        }
        if thread.approvals == "never" || thread.approves_all {
            self.item_started(item.clone(), since);
            return Ok(Permission::Given);
        }
        let mut question = json!({
            "threadId": thread.id, "turnId": turn, "itemId": item["id"], "startedAtMs": since, "reason": "scripted",
        });
        let waiting = active(&["waitingOnApproval"]);
        let method = if item["type"] == "commandExecution" {
            // In the real one's order: a command waits before it begins, a change after.
            self.status(at, &waiting);
            self.item_started(item.clone(), since);
            question["kind"] = json!("command");
            question["environmentId"] = json!("local");
            for name in ["command", "cwd", "commandActions"] {
                question[name] = item[name].clone();
            }
            let command = item["commandActions"][0]["command"].as_str().unwrap_or_default();
            let amendment: Vec<&str> = command.split_whitespace().collect();
            question["proposedExecpolicyAmendment"] = json!(amendment);
            let amended = json!({"acceptWithExecpolicyAmendment": {"execpolicy_amendment": amendment}});
            question["availableDecisions"] = json!(["accept", amended, "cancel"]);
            "item/commandExecution/requestApproval"
        } else {
            self.item_started(item.clone(), since);
            self.status(at, &waiting);
            question["grantRoot"] = Value::Null;
            "item/fileChange/requestApproval"
        };
        let answer = self.ask_client(method, question)?;
        let decision = answer["result"]["decision"].clone();
        if matches!(decision.as_str(), Some("accept" | "acceptForSession")) || decision.is_object() {
            self.threads[at].approves_all |= decision == "acceptForSession";
            self.status(at, &active(&[]));
            return Ok(Permission::Given);
        }
        item["status"] = json!("declined");
        self.item_completed(item.clone(), since);
        self.status(at, &active(&[]));
        if decision == "cancel" { Err(Stop::Denied) } else { Ok(Permission::Declined) }
    }

    /// The commands of a thread that go on, as a list tells them.
    pub(crate) fn background_terminals(&self, thread: usize) -> Vec<Value> {
        let own = self.background.iter().filter(|known| known.thread == thread);
        own.map(|known| {
            let item = &known.item;
            json!({
                "itemId": item["id"], "processId": item["processId"], "cwd": item["cwd"],
                "command": item["commandActions"][0]["command"], "osPid": null, "cpuPercent": null, "rssKb": null,
            })
        })
        .collect()
    }

    /// Kills the commands of a thread that go on. That they ended is told when they have.
    pub(crate) fn clean(&self, thread: usize) {
        for known in self.background.iter().filter(|known| known.thread == thread) {
            self.core.shared.kill_tool(known.pid);
        }
    }

    /// Tells the end of a command that went on, with the turn it came from.
    pub(crate) fn background_ended(&mut self, pid: u32) {
        let Some(at) = self.background.iter().position(|known| known.pid == pid) else { return };
        let Background { thread, turn, mut item, since, output, .. } = self.background.remove(at);
        let status = self.core.ended.remove(&pid).and_then(Result::ok);
        let code = status.and_then(|status| status.code()).unwrap_or(-1);
        end_command(&mut item, since, code, &read_output(output).unwrap_or_default());
        let now = now_ms();
        item["startedAtMs"] = json!(since);
        item["completedAtMs"] = json!(now);
        let params = json!({
            "item": item, "threadId": self.threads[thread].id, "turnId": turn, "contentTokenCount": null,
            "completedAtMs": now,
        });
        self.notify("item/completed", params);
        self.core.out.flush();
    }
}

fn end_command(item: &mut Value, since: u64, code: i32, output: &str) {
    item["status"] = json!(if code == 0 { "completed" } else { "failed" });
    item["exitCode"] = json!(code);
    item["durationMs"] = json!(now_ms().saturating_sub(since));
    item["aggregatedOutput"] = if output.is_empty() { Value::Null } else { json!(output) };
}

fn read_output(mut output: File) -> std::io::Result<String> {
    let mut bytes = Vec::new();
    output.rewind()?;
    output.take(MAX_OUTPUT).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

fn call_id() -> String {
    format!("call_{}", &uuid::Uuid::new_v4().simple().to_string()[..24])
}

/// A shell word that means exactly this text.
fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}
