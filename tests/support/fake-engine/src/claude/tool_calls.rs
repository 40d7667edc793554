//! Tool calls: announced, permitted, done, answered.

use std::io::{Read as _, Seek as _};

use serde_json::{Value, json};

use super::{Engine, lines, session::new_id, turn::Turn};
use crate::{
    core::{Dialect, Stop, bad, system_failure},
    script::Marker,
    shared::exit_code,
    tools,
};

/// The most that a tool's result says of its output, in bytes.
const MAX_RESULT: u64 = 30_000;

impl Engine {
    /// Obeys a marker that calls a tool.
    pub(crate) fn tool(&mut self, turn: &mut Turn, marker: &Marker) -> Result<(), Stop> {
        let (name, mut input) = match marker.verb.as_str() {
            "bash" => ("Bash", json!({"command": marker.needed().map_err(bad)?, "description": "scripted"})),
            "append" => {
                let path = marker.value("path").ok_or_else(|| bad("append needs path=FILE".to_owned()))?;
                ("Write", json!({"file_path": path, "content": marker.text("")}))
            }
            _ => {
                let name = marker.value("name").ok_or_else(|| bad("tool needs name=NAME".to_owned()))?;
                let input =
                    serde_json::from_str(&marker.text("{}")).map_err(|problem| bad(problem.to_string()))?;
                (name, input)
            }
        };
        let id = format!("toolu_{}", &uuid::Uuid::new_v4().simple().to_string()[..20]);
        self.block(turn, &json!({"type": "tool_use", "id": id, "name": name, "input": input}));
        turn.in_tool = true;
        self.close_message(turn);
        if marker.flag("ask")
            && let Some(denial) = self.permission(turn, name, &mut input, &id)?
        {
            self.tool_result(&id, &denial, true);
            turn.in_tool = false;
            return Ok(());
        }
        let (text, is_error) = match marker.verb.as_str() {
            "bash" => self.run_bash(input["command"].as_str().unwrap_or_default(), &id)?,
            "append" => {
                let path = input["file_path"].as_str().unwrap_or_default();
                match tools::append_line(path, input["content"].as_str().unwrap_or_default()) {
                    Ok(()) => (format!("The file {path} has been updated."), false),
                    Err(problem) => (format!("{path}: {problem}"), true),
                }
            }
            _ => ("ok".to_owned(), false),
        };
        self.tool_result(&id, &text, is_error);
        turn.in_tool = false;
        Ok(())
    }

    /// Asks for permission if need be; the sentence of the denial, if it is one.
    fn permission(
        &mut self,
        turn: &mut Turn,
        name: &str,
        input: &mut Value,
        id: &str,
    ) -> Result<Option<String>, Stop> {
        let edits = self.permission_mode == "acceptEdits" && name == "Write";
        if edits || self.permission_mode == "bypassPermissions" {
            return Ok(None);
        }
        let denial = if self.args.value("--permission-prompt-tool") == Some("stdio") {
            let answer = match self.ask(name, input, id) {
                Ok(answer) => answer,
                Err(stop) => {
                    self.rejected(id);
                    return Err(stop);
                }
            };
            match answer {
                None => "stream closed".to_owned(),
                Some(answer) if answer["behavior"] == "allow" => {
                    if answer["updatedInput"].as_object().is_some_and(|updated| !updated.is_empty()) {
                        *input = answer["updatedInput"].clone();
                    }
                    return Ok(None);
                }
                Some(answer) if answer["behavior"] == "deny" && answer["message"].is_string() => {
                    if answer["interrupt"] == true {
                        self.rejected(id);
                        return Err(Stop::Denied);
                    }
                    answer["message"].as_str().unwrap_or_default().to_owned()
                }
                Some(_) => "The canUseTool callback returned an invalid permission result.".to_owned(),
            }
        } else {
            let more = json!({"tool_name": name, "tool_use_id": id});
            let line = lines::system(&self.session.id, "permission_denied", &more);
            self.send(&line);
            format!("Claude requested permissions to use {name}, but you haven't granted it yet.")
        };
        turn.denials.push(json!({"tool_name": name, "tool_use_id": id, "tool_input": input}));
        Ok(Some(denial))
    }

    fn rejected(&mut self, id: &str) {
        self.tool_result(id, "The user doesn't want to proceed with this tool use.", true);
    }

    fn run_bash(&mut self, command: &str, id: &str) -> Result<(String, bool), Stop> {
        let failed = |problem| system_failure("bash", &problem);
        let (pid, mut output) = self.core.start_command(command, &self.environment()).map_err(failed)?;
        let over = |engine: &Self| engine.core.ended.contains_key(&pid);
        if let Err(stop) = self.wait_until(None, over) {
            self.core.shared.kill_tool(pid);
            // A killed tool ends; its end must not be taken for the next one's.
            while !over(self) {
                let _ = self.wait_until(None, over);
            }
            self.rejected(id);
            return Err(stop);
        }
        let code = self.core.ended.remove(&pid).transpose().map_err(failed)?.map_or(1, exit_code);
        let mut bytes = Vec::new();
        output.rewind().and_then(|()| output.take(MAX_RESULT).read_to_end(&mut bytes)).map_err(failed)?;
        let text = String::from_utf8_lossy(&bytes).trim_end().to_owned();
        Ok(match code {
            0 if text.is_empty() => ("(Bash completed with no output)".to_owned(), false),
            0 => (text, false),
            code => (format!("Exit code {code}\n{text}"), true),
        })
    }

    /// What Claude adds to the environment of its tools.
    fn environment(&self) -> [(&'static str, String); 3] {
        [
            ("CLAUDECODE", "1".to_owned()),
            ("CLAUDE_CODE_SESSION_ID", self.session.id.clone()),
            ("CLAUDE_PID", std::process::id().to_string()),
        ]
    }

    fn tool_result(&mut self, id: &str, text: &str, is_error: bool) {
        let content =
            json!([{"tool_use_id": id, "type": "tool_result", "content": text, "is_error": is_error}]);
        let line = lines::user(&self.session.id, &content);
        self.session.append("user", &new_id(), &line["message"]);
        self.send(&line);
    }
}
