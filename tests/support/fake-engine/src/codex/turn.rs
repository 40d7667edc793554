//! One turn: its script obeyed, its lines told.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::{
    Accepted, Engine, Message, new_id, rpc,
    rpc::{Tokens, now_ms},
    thread::{WINDOW, last_text, turn_object},
};
use crate::{
    core::{Dialect as _, Stop, bad, filler, stamped},
    script::{self, Marker},
};

/// What the model hears of an interrupt.
const ABORTED: &str = "<turn_aborted>\nThe user interrupted the previous turn on purpose. Any running unified exec \
     processes may still be running in the background. If any tools/commands were aborted, they may have partially \
     executed.\n</turn_aborted>";

/// The turn that runs.
#[derive(Debug)]
pub(crate) struct Running {
    pub(crate) thread: usize,
    pub(crate) turn: String,
    /// Whether it was told to have started: before that it cannot be interrupted.
    pub(crate) started: bool,
    /// Whether the model is at work, and not a tool.
    pub(crate) sampling: bool,
    /// The interrupt that shall be answered at its end.
    pub(crate) interrupt: Option<Value>,
    began: Instant,
    /// The message that is open: its id, its text, when it was begun.
    open: Option<(String, String, u64)>,
    /// The last message that was said in full.
    said: Option<Value>,
    /// Whether the model has said something that is not counted yet.
    pub(crate) uncounted: bool,
    counts: Tokens,
}

impl Running {
    fn new(thread: usize, turn: String, started: bool) -> Self {
        Self {
            thread,
            turn,
            started,
            sampling: true,
            interrupt: None,
            began: Instant::now(),
            open: None,
            said: None,
            uncounted: false,
            counts: Tokens::USUAL,
        }
    }
}

impl Engine {
    /// Runs one turn to its end.
    pub(crate) fn turn(&mut self, accepted: Accepted) {
        let Accepted { thread, turn, message, more } = accepted;
        self.running = Some(Running::new(thread, turn.clone(), false));
        for marker in self.core.file.accepted.clone() {
            // Nothing can end a turn that has not started.
            let _ = self.plain(&marker);
        }
        if let Some(running) = &mut self.running {
            running.started = true;
        }
        self.status(thread, &active(&[]));
        let begun = turn_object(&turn, "inProgress", &json!(now_ms() / 1000));
        self.notify_in("turn/started", json!({"turn": begun}));
        self.hear(&message);
        for message in &more {
            self.hear(message);
        }
        self.core.out.flush();
        let ended = script::parse(&last_text(&message.input)).map_err(bad).and_then(|markers| {
            let markers = if markers.is_empty() { self.core.file.turn.clone() } else { markers };
            if markers.is_empty() {
                return self.until_heard(|engine| engine.say("ok"));
            }
            markers.iter().try_for_each(|marker| self.until_heard(|engine| engine.obey(marker)))
        });
        self.end_turn(ended);
        self.running = None;
        // What came too late to be heard is lost, as it is with the real one.
        self.steers.clear();
    }

    /// Does something; what is thrown away for a message that came meanwhile is done again.
    fn until_heard(&mut self, act: impl Fn(&mut Self) -> Result<(), Stop>) -> Result<(), Stop> {
        loop {
            let done = act(self);
            let again = done == Err(Stop::Steered);
            if !again {
                done?;
            }
            let polled = self.poll();
            if polled != Err(Stop::Steered) {
                polled?;
            }
            if again && let Some(running) = &mut self.running {
                running.open = None;
            }
            while let Some(message) = self.steers.pop_front() {
                self.hear(&message);
                self.core.out.flush();
            }
            if !again {
                return Ok(());
            }
        }
    }

    /// A notification about the running turn.
    pub(crate) fn notify_in(&mut self, method: &str, mut params: Value) {
        if let Some(running) = &self.running {
            params["threadId"] = json!(self.threads[running.thread].id);
            if params["turn"].is_null() {
                params["turnId"] = json!(running.turn);
            }
        }
        self.notify(method, params);
    }

    /// Tells a thread's status.
    pub(crate) fn status(&mut self, thread: usize, status: &Value) {
        let params = json!({"threadId": self.threads[thread].id, "status": status});
        self.notify("thread/status/changed", params);
    }

    /// Tells an item's begin.
    pub(crate) fn item_started(&mut self, mut item: Value, at: u64) {
        item["startedAtMs"] = json!(at);
        item["completedAtMs"] = Value::Null;
        self.notify_in("item/started", json!({"item": item, "startedAtMs": at}));
    }

    /// Tells an item's end, and keeps it.
    pub(crate) fn item_completed(&mut self, mut item: Value, since: u64) {
        let now = now_ms();
        item["startedAtMs"] = json!(since);
        item["completedAtMs"] = json!(now);
        if let Some(running) = &self.running {
            let (at, turn) = (running.thread, running.turn.clone());
            self.threads[at].add_item(&turn, item.clone());
        }
        self.notify_in(
            "item/completed",
            json!({"item": item, "contentTokenCount": null, "completedAtMs": now}),
        );
    }

    /// Takes a user's message into the turn.
    fn hear(&mut self, message: &Message) {
        let parts = message.input.as_array().map_or(&[][..], Vec::as_slice);
        if parts.is_empty() {
            return;
        }
        let Some((at, turn)) = self.running.as_ref().map(|running| (running.thread, running.turn.clone()))
        else {
            return;
        };
        let (id, now) = (new_id(), now_ms());
        let item =
            json!({"type": "userMessage", "id": id, "clientId": message.client_id, "content": message.input});
        self.item_started(item.clone(), now);
        let told: Vec<Value> =
            parts.iter().map(|part| json!({"type": "input_text", "text": part["text"]})).collect();
        let thread = &mut self.threads[at];
        thread.texts.push(last_text(&message.input));
        let said = json!({"type": "message", "id": format!("msg_{id}"), "role": "user", "content": told});
        thread.rollout.append("response_item", &said);
        thread.event(&json!({
            "type": "item_completed", "thread_id": thread.id, "turn_id": turn, "started_at_ms": now,
            "completed_at_ms": now, "item": {
                "type": "UserMessage", "id": id, "client_id": message.client_id, "content": message.input,
            },
        }));
        self.item_completed(item, now);
    }

    /// Tells a thread's token counts, as of this turn.
    pub(crate) fn tell_usage(&mut self, thread: usize, turn: &Value) {
        let known = &self.threads[thread];
        let usage =
            json!({"total": known.total.told(), "last": known.last.told(), "modelContextWindow": WINDOW});
        let params = json!({"threadId": known.id, "turnId": turn, "tokenUsage": usage});
        self.notify("thread/tokenUsage/updated", params);
    }

    /// Counts what the model has said since it was counted last, and tells it.
    pub(crate) fn count(&mut self) {
        let Some(running) = &mut self.running else { return };
        let (at, turn, counts) = (running.thread, json!(running.turn), running.counts);
        let thread = &mut self.threads[at];
        if std::mem::take(&mut running.uncounted) {
            thread.total.add(counts);
            thread.last = counts;
        }
        let info = json!({
            "total_token_usage": thread.total.kept(), "last_token_usage": thread.last.kept(),
            "model_context_window": WINDOW,
        });
        thread.event(&json!({"type": "token_count", "info": info}));
        self.tell_usage(at, &turn);
        self.notify("account/rateLimits/updated", rpc::rate_limits(None));
    }

    fn end_turn(&mut self, ended: Result<(), Stop>) {
        let Some(running) = &mut self.running else { return };
        let (at, turn) = (running.thread, running.turn.clone());
        let interrupt = running.interrupt.take();
        let in_tool = !running.sampling;
        let (mut error, mut items) = (Value::Null, Vec::new());
        let status = match ended {
            Err(Stop::NoResult) => {
                self.core.shared.log("no_result", json!(turn));
                return;
            }
            Ok(()) | Err(Stop::Steered) => {
                running.uncounted = true;
                items.extend(running.said.take());
                self.count();
                self.unread(at, &turn);
                "completed"
            }
            Err(Stop::Interrupted | Stop::Denied) => {
                // What the model was saying is not counted; a call that it made is.
                running.uncounted = in_tool;
                self.count();
                "interrupted"
            }
            Err(Stop::Failed(code, message)) => {
                let (info, usual) = rpc::failure(code, Some(message).filter(|message| !message.is_empty()));
                error = rpc::error(&info, &usual, None);
                "failed"
            }
        };
        self.finish(at, &turn, status, &error, interrupt, items);
    }

    /// Tells that there is something to be read.
    fn unread(&mut self, at: usize, turn: &str) {
        let state = json!({"firstUnread": {"type": "turn", "turnId": turn}, "revision": new_id()});
        let params = json!({"threadId": self.threads[at].id, "readState": state});
        self.notify("thread/readState/changed", params);
    }

    /// Tells how a turn ended, and keeps it.
    fn finish(
        &mut self,
        at: usize,
        turn: &str,
        status: &str,
        error: &Value,
        interrupt: Option<Value>,
        items: Vec<Value>,
    ) {
        let began = self.running.as_ref().map_or_else(Instant::now, |running| running.began);
        let took = json!(u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX));
        let thread = &mut self.threads[at];
        thread.end(turn, status, error, &took);
        let mut told = turn_object(turn, status, &json!(now_ms() / 1000));
        if let Some(known) = thread.turns.iter().find(|known| known["id"] == turn) {
            told = known.clone();
        }
        let mut end =
            json!({"type": "task_complete", "turn_id": turn, "root_turn_id": turn, "duration_ms": took});
        if status == "interrupted" {
            let part = json!({"type": "input_text", "text": ABORTED});
            let heard = json!({"type": "message", "role": "user", "content": [part]});
            thread.rollout.append("response_item", &heard);
            end["type"] = json!("turn_aborted");
            end["reason"] = json!("interrupted");
        } else {
            end["error"] = error.clone();
        }
        thread.event(&end);
        if let Some(id) = interrupt {
            self.answer(&id, &json!({}));
        }
        if status == "failed" {
            self.status(at, &json!({"type": "systemError"}));
            self.notify_in("error", json!({"error": error, "willRetry": false}));
            self.unread(at, turn);
        } else {
            self.status(at, &json!({"type": "idle"}));
        }
        told["itemsView"] = json!(if items.is_empty() { "notLoaded" } else { "summary" });
        told["items"] = json!(items);
        self.notify_in("turn/completed", json!({"turn": told}));
        if let Some(request) = self.asking.take() {
            // An interrupt took the question back.
            let resolved = json!({"threadId": self.threads[at].id, "requestId": request});
            self.notify("serverRequest/resolved", resolved);
        }
        self.core.out.flush();
    }

    /// A turn that the engine makes of its own, to make the conversation shorter.
    pub(crate) fn compact(&mut self, thread: usize) {
        if self.running.is_some() {
            return;
        }
        let turn = new_id();
        self.threads[thread].begin_turn(&turn, now_ms() / 1000);
        self.running = Some(Running::new(thread, turn.clone(), true));
        self.status(thread, &active(&[]));
        let begun = turn_object(&turn, "inProgress", &json!(now_ms() / 1000));
        self.notify_in("turn/started", json!({"turn": begun}));
        let item = json!({"type": "contextCompaction", "id": new_id()});
        let now = now_ms();
        self.item_started(item.clone(), now);
        // The model was asked for a summary; then the counts of what is left are told.
        if let Some(running) = &mut self.running {
            running.uncounted = true;
        }
        self.count();
        self.count();
        self.item_completed(item, now);
        self.finish(thread, &turn, "completed", &Value::Null, None, Vec::new());
        self.running = None;
    }

    /// Obeys one marker in a turn.
    fn obey(&mut self, marker: &Marker) -> Result<(), Stop> {
        match marker.verb.as_str() {
            "text" => self.say(&marker.needed().map_err(bad)?),
            "recall" => {
                let at = self.running.as_ref().map_or(0, |running| running.thread);
                let texts = self.threads[at].texts.join(" | ");
                self.say(&texts)
            }
            "thinking" => {
                self.think(&marker.needed().map_err(bad)?);
                Ok(())
            }
            "slow" => self.slow(marker),
            "huge" => self.say(&filler(marker.number("bytes", 0).map_err(bad)?)),
            "events" => self.events(marker),
            "usage" => {
                let number = |name: &str, usual: u64| marker.number(name, usual).map_err(bad);
                let (read, created) = (number("read", 20)?, number("created", 10)?);
                let input = number("in", 100)? + read + created;
                if let Some(running) = &mut self.running {
                    running.counts = Tokens { input, output: number("out", 25)?, read, created };
                }
                Ok(())
            }
            "bash" | "append" | "tool" => self.tool(marker),
            "error" => self.fail(marker),
            "retry" => {
                let status = marker.number("status", 529).map_err(bad)?;
                let info = json!({"responseStreamDisconnected": {"httpStatusCode": status}});
                let (_, why) = rpc::failure(status, None);
                let error = rpc::error(&info, "Reconnecting... 1/5", Some(&why));
                self.notify_in("error", json!({"error": error, "willRetry": true}));
                self.core.out.flush();
                Ok(())
            }
            "no_result" => Err(Stop::NoResult),
            _ => self.plain(marker),
        }
    }

    fn fail(&mut self, marker: &Marker) -> Result<(), Stop> {
        let code = marker.number("code", 500).map_err(bad)?;
        if marker.value("reset").is_some() {
            let at = marker.number("reset", 0).map_err(bad)?;
            self.notify("account/rateLimits/updated", rpc::rate_limits(Some(at)));
        }
        let Some(info) = marker.value("info") else { return Err(Stop::Failed(code, marker.text(""))) };
        let (_, usual) = rpc::failure(code, None);
        let error = rpc::error(&json!(info), &marker.text(&usual), None);
        let Some(running) = &self.running else { return Ok(()) };
        let (at, turn) = (running.thread, running.turn.clone());
        self.finish(at, &turn, "failed", &error, None, Vec::new());
        // The end is told.
        Err(Stop::NoResult)
    }

    fn open_text(&mut self) {
        let (id, now) = (format!("msg_{}", uuid::Uuid::new_v4().simple()), now_ms());
        self.item_started(message_item(&id, ""), now);
        if let Some(running) = &mut self.running {
            running.open = Some((id, String::new(), now));
            running.uncounted = true;
        }
    }

    fn delta(&mut self, text: &str) {
        let open = self.running.as_mut().and_then(|running| running.open.as_mut());
        let Some((id, so_far, _)) = open else { return };
        so_far.push_str(text);
        let params = json!({"itemId": id, "delta": text});
        self.notify_in("item/agentMessage/delta", params);
    }

    fn close_text(&mut self) {
        let Some((id, text, since)) = self.running.as_mut().and_then(|running| running.open.take()) else {
            return;
        };
        let item = message_item(&id, &text);
        if let Some(running) = &mut self.running {
            let mut said = item.clone();
            said["startedAtMs"] = json!(since);
            said["completedAtMs"] = json!(now_ms());
            running.said = Some(said);
            let content = json!([{"type": "output_text", "text": text}]);
            let said = json!({"type": "message", "id": id, "role": "assistant", "content": content});
            self.threads[running.thread].rollout.append("response_item", &said);
        }
        self.item_completed(item, since);
        self.core.out.flush();
    }

    fn say(&mut self, text: &str) -> Result<(), Stop> {
        self.open_text();
        self.delta(text);
        self.close_text();
        Ok(())
    }

    fn think(&mut self, text: &str) {
        let (id, now) = (format!("rs_{}", uuid::Uuid::new_v4().simple()), now_ms());
        let item = |summary: Value| json!({"type": "reasoning", "id": id, "summary": summary, "content": []});
        self.item_started(item(json!([])), now);
        self.notify_in("item/reasoning/summaryPartAdded", json!({"itemId": id, "summaryIndex": 0}));
        let delta = json!({"itemId": id, "delta": text, "summaryIndex": 0});
        self.notify_in("item/reasoning/summaryTextDelta", delta);
        self.item_completed(item(json!([text])), now);
        if let Some(running) = &mut self.running {
            running.uncounted = true;
        }
        self.core.out.flush();
    }

    fn slow(&mut self, marker: &Marker) -> Result<(), Stop> {
        let text = marker.text("word ");
        let delay = Duration::from_millis(marker.number("delay", 100).map_err(bad)?);
        self.open_text();
        for n in 0..marker.number("chunks", 10).map_err(bad)? {
            if n > 0 {
                self.wait_until(Some(delay), |_| false)?;
            }
            self.delta(&text);
            self.core.out.flush();
        }
        self.close_text();
        Ok(())
    }

    fn events(&mut self, marker: &Marker) -> Result<(), Stop> {
        let count = marker.number("count", 1).map_err(bad)?;
        let text = filler(marker.number("bytes", 64).map_err(bad)?);
        let (deltas, clock) = (marker.flag("delta"), marker.flag("clock"));
        if deltas {
            self.open_text();
        }
        for n in 0..count {
            let text = if clock { stamped(&text) } else { text.clone() };
            if deltas {
                self.delta(&text);
            } else {
                self.open_text();
                self.delta(&text);
                self.close_text();
            }
            if clock {
                self.core.out.flush();
            }
            if n % 256 == 255 {
                self.poll()?;
            }
        }
        if deltas {
            self.close_text();
        }
        self.core.out.flush();
        Ok(())
    }
}

/// What an active thread's status is.
pub(crate) fn active(flags: &[&str]) -> Value {
    json!({"type": "active", "activeFlags": flags})
}

fn message_item(id: &str, text: &str) -> Value {
    json!({
        "type": "agentMessage", "moderation": null, "id": id, "text": text, "phase": null, "memoryCitation": null,
        "delivery": null, "questions": null,
    })
}
