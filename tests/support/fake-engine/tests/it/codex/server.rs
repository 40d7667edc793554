//! One app-server, with bounds on every wait.

use std::process::Command;

use serde_json::{Value, json};

use crate::driver::{Engine, Home};

impl Home {
    pub(crate) fn codex_command(&self) -> Command {
        let mut command = self.command(&["app-server", "-c", "analytics.enabled=false"]);
        command.env("CODEX_HOME", self.path("codex"));
        command
    }

    /// An app-server that has been initialized.
    pub(crate) fn codex(&self) -> Server {
        Server::start(self.codex_command())
    }

    /// An app-server with a script file.
    pub(crate) fn codex_scripted(&self, script: &str) -> Server {
        std::fs::write(self.path("script"), script).expect("written");
        let mut command = self.codex_command();
        command.env("FAKE_ENGINE_SCRIPT", self.path("script"));
        Server::start(command)
    }

    pub(crate) fn work(&self) -> String {
        self.path("").display().to_string()
    }
}

pub(crate) struct Server {
    pub(crate) engine: Engine,
    pub(crate) thread: String,
    asked: u64,
}

impl Server {
    pub(crate) fn bare(command: Command) -> Self {
        Self { engine: Engine::start(command), thread: String::new(), asked: 0 }
    }

    pub(crate) fn start(command: Command) -> Self {
        let mut server = Self::bare(command);
        server.initialize(&json!({"experimentalApi": true}));
        server
    }

    pub(crate) fn initialize(&mut self, capabilities: &Value) {
        let client = json!({"name": "test", "title": null, "version": "0"});
        let result = self.ask("initialize", json!({"clientInfo": client, "capabilities": capabilities}));
        assert_eq!(result["platformOs"], "linux");
        self.engine.write(&json!({"method": "initialized"}).to_string());
    }

    /// Sends a request; answers its id.
    pub(crate) fn send(&mut self, method: &str, mut params: Value) -> u64 {
        if params["threadId"].is_null() && !self.thread.is_empty() {
            params["threadId"] = json!(self.thread);
        }
        self.asked += 1;
        self.engine.write(&json!({"id": self.asked, "method": method, "params": params}).to_string());
        self.asked
    }

    /// The line that answers this request; what comes before it is skipped.
    pub(crate) fn answer(&self, id: u64) -> Value {
        self.engine.until(|line| line["id"] == id && line["method"].is_null()).pop().expect("the last")
    }

    /// Sends a request and returns its result.
    pub(crate) fn ask(&mut self, method: &str, params: Value) -> Value {
        let id = self.send(method, params);
        let answer = self.answer(id);
        assert!(answer["error"].is_null(), "{method}: {answer}");
        answer["result"].clone()
    }

    /// Sends a request and returns how it was refused.
    pub(crate) fn refused(&mut self, method: &str, params: Value) -> String {
        let id = self.send(method, params);
        let answer = self.answer(id);
        answer["error"]["message"].as_str().unwrap_or_else(|| panic!("not refused: {answer}")).to_owned()
    }

    /// Starts a thread.
    pub(crate) fn open(mut self, more: &Value) -> Self {
        let mut params = json!({"model": "m1", "approvalPolicy": "never", "sandbox": "danger-full-access"});
        for (name, value) in more.as_object().into_iter().flatten() {
            params[name] = value.clone();
        }
        let result = self.ask("thread/start", params);
        self.thread = result["thread"]["id"].as_str().expect("an id").to_owned();
        self.engine.until(|line| line["method"] == "thread/started");
        self
    }

    /// Resumes a thread.
    pub(crate) fn resume(mut self, thread: &str) -> (Self, Value) {
        let page = json!({"limit": 1, "itemsView": "notLoaded", "sortDirection": "desc"});
        let params = json!({"threadId": thread, "excludeTurns": true, "initialTurnsPage": page});
        let result = self.ask("thread/resume", params);
        thread.clone_into(&mut self.thread);
        (self, result)
    }

    /// Begins a turn, with a context part, whose marker must never be obeyed, before the text; answers its id.
    pub(crate) fn say(&mut self, text: &str) -> String {
        let params =
            json!({"input": input(&["context [[die:KILL]]", text]), "clientUserMessageId": "client-1"});
        let result = self.ask("turn/start", params);
        result["turn"]["id"].as_str().expect("an id").to_owned()
    }

    /// The lines up to the turn's end.
    pub(crate) fn ended(&self) -> Vec<Value> {
        self.engine.until(|line| line["method"] == "turn/completed")
    }

    pub(crate) fn turn(&mut self, text: &str) -> Vec<Value> {
        self.say(text);
        self.ended()
    }

    /// Interrupts this turn; the lines up to its end.
    pub(crate) fn interrupt(&mut self, turn: &str) -> Vec<Value> {
        self.send("turn/interrupt", json!({"turnId": turn}));
        self.ended()
    }

    /// The request of the server that comes next.
    pub(crate) fn asked(&self) -> Value {
        self.engine.until(|line| line["method"].is_string() && !line["id"].is_null()).pop().expect("the last")
    }

    /// Answers a request of the server.
    pub(crate) fn reply(&mut self, request: &Value, result: Value) {
        self.engine.write(&json!({"id": request["id"], "result": result}).to_string());
    }
}

pub(crate) fn input(texts: &[&str]) -> Value {
    let part = |text: &&str| json!({"type": "text", "text": text, "text_elements": []});
    json!(texts.iter().map(part).collect::<Vec<_>>())
}

/// What the lines are, in short: `item/started` with the item's type, `turn/completed` with its status.
pub(crate) fn kinds(lines: &[Value]) -> Vec<String> {
    lines
        .iter()
        .map(|line| {
            let method = line["method"].as_str().unwrap_or("answer");
            let params = &line["params"];
            let more = [
                &params["item"]["type"],
                &params["item"]["status"],
                &params["status"]["type"],
                &params["status"]["activeFlags"][0],
                &params["turn"]["status"],
                &params["willRetry"],
            ];
            let words = more.iter().filter_map(|word| match word {
                Value::String(word) => Some(format!(" {word}")),
                Value::Bool(word) => Some(format!(" {word}")),
                _ => None,
            });
            format!("{method}{}", words.collect::<String>())
        })
        .collect()
}

/// The items that were completed, of one type.
pub(crate) fn items<'a>(lines: &'a [Value], kind: &str) -> Vec<&'a Value> {
    let done = lines.iter().filter(|line| line["method"] == "item/completed");
    done.map(|line| &line["params"]["item"]).filter(|item| item["type"] == kind).collect()
}

/// What the agent said.
pub(crate) fn said(lines: &[Value]) -> Vec<String> {
    items(lines, "agentMessage").iter().filter_map(|item| item["text"].as_str()).map(str::to_owned).collect()
}

/// How the turn ended.
pub(crate) fn end(lines: &[Value]) -> &Value {
    let last = lines.last().expect("a line");
    assert_eq!(last["method"], "turn/completed");
    &last["params"]["turn"]
}

/// The token counts told, the last of them.
pub(crate) fn usage(lines: &[Value]) -> &Value {
    let told = lines.iter().rfind(|line| line["method"] == "thread/tokenUsage/updated");
    &told.expect("counts")["params"]["tokenUsage"]
}
