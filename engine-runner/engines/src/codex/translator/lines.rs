//! One line of output at a time.

use serde_json::Value;

use crate::{
    codex::classify,
    event::{Event, Notice, NoticeKind, Quota, QuotaStatus, RetryDetail, TextEvent},
    failure::Failure,
    limit::{self, BoundedText},
    translate::{DeliveryEnd, Output},
    wire,
};

use super::{
    super::{classify::TurnError, stdin},
    Asking, CodexTranslator, Stage, opening,
};

/// The most bytes of a text that a notice quotes.
const QUOTE: usize = 300;

/// Notifications that mean nothing to a turn.
const SILENT: [&str; 20] = [
    "account/updated",
    "command/exec/outputDelta",
    "deprecationNotice",
    "item/commandExecution/outputDelta",
    "item/commandExecution/terminalInteraction",
    "item/fileChange/outputDelta",
    "item/fileChange/patchUpdated",
    "item/mcpToolCall/progress",
    "item/reasoning/textDelta",
    "mcpServer/startupStatus/updated",
    "remoteControl/status/changed",
    "thread/closed",
    "thread/goal/cleared",
    "thread/name/updated",
    "thread/readState/changed",
    "thread/settings/updated",
    "thread/started",
    "thread/status/changed",
    "turn/diff/updated",
    "turn/plan/updated",
];

/// Warnings that every run with a model of its own, or with a bundled part, prints.
const HARMLESS: [&str; 3] =
    ["Model metadata for", "could not find bubblewrap on PATH", "This session was recorded with model"];

impl CodexTranslator {
    /// Takes one line.
    pub(super) fn line(&mut self, frame: u64, bytes: &[u8], out: &mut Vec<Output>) {
        if self.gone {
            return;
        }
        let Some(line) = wire::parse(bytes) else {
            self.unknown_lines += 1;
            return;
        };
        let empty = Value::Null;
        let params = line.get("params").unwrap_or(&empty);
        match (line.get("id"), wire::word(&line, "method")) {
            (Some(id), Some(method)) => self.server_request(frame, id, method, params, out),
            (Some(Value::String(id)), None) => self.answer(id, &line, out),
            (None, Some(method)) => self.notification(method, params, out),
            _ => self.unknown_lines += 1,
        }
    }

    /// An answer to a request of ours.
    fn answer(&mut self, id: &str, line: &Value, out: &mut Vec<Output>) {
        let result = line.get("result");
        let error =
            line.get("error").map_or("", |error| wire::text_or(error, "message", "it gave no reason"));
        if self.stage == Stage::Opening {
            self.opening_answer(id, result, error, out);
            return;
        }
        let Some(turn_id) = self.open.turn_id.as_deref() else { return };
        if id == stdin::clean_op(turn_id) {
            if self.cleaning == Asking::Asked {
                self.cleaning = Asking::Answered;
                self.maybe_end(out);
            }
            return;
        }
        if id == stdin::recheck_op(turn_id) {
            if self.checking == Asking::Asked {
                self.checking = Asking::Answered;
                let found = opening::skill_names(result);
                self.skills_changed |= found.iter().any(|name| !self.session.switched_off.contains(name));
                self.maybe_end(out);
            }
            return;
        }
        let Some(place) = self.given.iter().position(|given| given.id == id) else { return };
        if self.given[place].answered || self.stage != Stage::Open {
            return;
        }
        self.given[place].answered = true;
        match result {
            Some(result) => {
                let started = result.get("turn").and_then(|turn| wire::word(turn, "id"));
                let native = started.or_else(|| wire::word(result, "turnId")).map(limit::short);
                if self.turn.id.is_none() {
                    self.turn.id = native;
                }
            }
            None => self.refused(place, error, out),
        }
    }

    /// The engine did not take a message.
    fn refused(&mut self, place: usize, error: &str, out: &mut Vec<Output>) {
        let given = &mut self.given[place];
        if given.end.is_some() {
            return;
        }
        given.end = Some(DeliveryEnd::Cancelled);
        let delivery_id = given.id.clone();
        out.push(Output::DeliveryEnded { delivery_id, end: DeliveryEnd::Cancelled });
        // A message for a turn that had just ended is no failure of that turn.
        if self.turn.id.is_none() && self.given.iter().all(|given| given.end.is_some()) {
            let failure = Failure { native_code: Some("refused".to_owned()), ..classify::not_taken(error) };
            self.refused_turn(failure, out);
        }
    }

    /// Whether a notification is of our thread; what names none is.
    fn of_thread(&self, params: &Value) -> bool {
        match (wire::word(params, "threadId"), self.thread()) {
            (Some(named), Some(ours)) => named == ours,
            _ => true,
        }
    }

    /// Whether a notification is of the turn that the engine works on for us.
    pub(super) fn of_turn(&self, params: &Value) -> bool {
        let named = wire::word(params, "turnId");
        named.is_some() && named == self.turn.id.as_deref()
    }

    fn notification(&mut self, method: &str, params: &Value, out: &mut Vec<Output>) {
        if !self.of_thread(params) {
            return;
        }
        match method {
            "turn/started" => self.turn_started(params, out),
            "turn/completed" => self.turn_completed(params, out),
            "item/started" if self.in_turn(params) => self.item_started(params, out),
            "item/completed" if self.in_turn(params) => self.item_completed(params, out),
            "item/agentMessage/delta" if self.in_turn(params) => self.delta(params, false, out),
            "item/reasoning/summaryTextDelta" if self.in_turn(params) => self.delta(params, true, out),
            "item/started"
            | "item/completed"
            | "item/agentMessage/delta"
            | "item/reasoning/summaryTextDelta"
            | "item/reasoning/summaryPartAdded" => {}
            "thread/tokenUsage/updated" => {
                let own = self.of_turn(params);
                self.usage.report(params.get("tokenUsage"), own);
                self.session.usage_total = self.usage.last();
            }
            "account/rateLimits/updated" => self.rate_limits(params, out),
            "error" if self.in_turn(params) => self.error(params, out),
            "error" => {}
            "serverRequest/resolved" => self.request_resolved(params, out),
            "skills/changed" => self.skills_changed = true,
            "warning" | "configWarning" | "guardianWarning" => self.warning(params, out),
            "model/rerouted" => {
                let notice = Notice::new(
                    NoticeKind::Warning,
                    "model_rerouted",
                    "the engine went on with another model",
                );
                self.notice(notice, out);
            }
            "thread/compacted" => self.compacted(out),
            other if SILENT.contains(&other) => {}
            _ => self.unknown_lines += 1,
        }
    }

    /// Whether a notification is of our turn and the turn has not ended.
    fn in_turn(&self, params: &Value) -> bool {
        self.stage == Stage::Open && self.of_turn(params)
    }

    fn turn_started(&mut self, params: &Value, out: &mut Vec<Output>) {
        let Some(id) = params.get("turn").and_then(|turn| wire::word(turn, "id")).map(limit::short) else {
            return;
        };
        let expected = self.stage == Stage::Open
            && self.turn.status.is_none()
            && self.given.iter().any(|given| given.end.is_none());
        if expected && self.turn.id.is_none() {
            self.turn.id = Some(id.clone());
        }
        if expected && self.turn.id.as_deref() == Some(id.as_str()) {
            self.turn.started = true;
            self.session.last_turn = Some(id);
            self.interrupt_when_started(out);
            return;
        }
        if self.turn.id.as_deref() != Some(id.as_str()) && self.foreign.is_none() {
            let notice = Notice::new(
                NoticeKind::SessionOutput,
                "unrequested_turn",
                "the engine began a turn that nobody asked for",
            );
            out.push(Output::SessionNotice { notice });
            self.foreign = Some(id);
        }
    }

    fn turn_completed(&mut self, params: &Value, out: &mut Vec<Output>) {
        let turn = params.get("turn").unwrap_or(&Value::Null);
        let id = wire::word(turn, "id");
        if id.is_some() && id == self.foreign.as_deref() {
            self.foreign = None;
            self.session.last_turn = id.map(limit::short);
            return;
        }
        if self.stage != Stage::Open
            || id.is_none()
            || id != self.turn.id.as_deref()
            || self.turn.status.is_some()
        {
            return;
        }
        let status = wire::text_or(turn, "status", "failed").to_owned();
        self.session.last_turn = id.map(limit::short);
        self.turn.started = true;
        self.turn.error = TurnError::read(turn.get("error")).or_else(|| self.turn.error.take());
        self.retrying = false;
        let said = |item: &&Value| wire::text(item, "type") == Some("agentMessage");
        let answer = wire::list(turn, "items").iter().rev().find(said);
        self.answer = answer.and_then(|item| wire::text(item, "text")).map(str::to_owned);
        self.turn_over(status, out);
    }

    fn item_started(&mut self, params: &Value, out: &mut Vec<Output>) {
        let item = params.get("item").unwrap_or(&Value::Null);
        self.retrying = false;
        if let Some(event) = self.tools.started(item) {
            out.push(Output::Event { event });
        }
    }

    fn item_completed(&mut self, params: &Value, out: &mut Vec<Output>) {
        let item = params.get("item").unwrap_or(&Value::Null);
        let id = wire::text_or(item, "id", "");
        match wire::text_or(item, "type", "") {
            "userMessage" => self.message_taken(item, out),
            "agentMessage" => self.said(id, wire::text_or(item, "text", ""), out),
            "plan" => self.said(id, wire::text_or(item, "text", ""), out),
            "reasoning" => {
                let part = |key: &str| -> Vec<&str> {
                    wire::list(item, key).iter().filter_map(Value::as_str).collect()
                };
                let summary = part("summary");
                let parts = if summary.is_empty() { part("content") } else { summary };
                self.reasoned(id, &parts.join("\n\n"), out);
            }
            "contextCompaction" => self.compacted(out),
            _ => {
                let events = self.tools.completed(item).unwrap_or_default();
                out.extend(events.into_iter().map(|event| Output::Event { event }));
                if self.turn.status.is_some() {
                    self.maybe_end(out);
                }
            }
        }
    }

    /// The engine took a message: it is in its history from here on.
    fn message_taken(&mut self, item: &Value, out: &mut Vec<Output>) {
        // What was being said is thrown away for it.
        self.items.abandon(out);
        let Some(client_id) = wire::word(item, "clientId") else { return };
        let Some(given) = self.given.iter_mut().find(|given| given.id == client_id) else { return };
        if given.accepted || given.end.is_some() {
            return;
        }
        given.accepted = true;
        out.push(Output::Accepted { delivery_id: client_id.to_owned() });
        self.commit(out);
    }

    /// The thread is on disk: before its first message is taken a start leaves nothing there.
    pub(super) fn commit(&mut self, out: &mut Vec<Output>) {
        if !self.carry.committed {
            self.carry.committed = true;
            out.push(Output::Committed { native: self.native() });
        }
    }

    fn said(&mut self, id: &str, text: &str, out: &mut Vec<Output>) {
        let item = self.items.finish(id, false);
        if text.is_empty() {
            return;
        }
        limit::join(&mut self.said, &mut self.said_bytes, text);
        let text = TextEvent { item, body: BoundedText::event(text), incomplete: false, parent_call: None };
        out.push(Output::Event { event: Event::Text(text) });
    }

    fn reasoned(&mut self, id: &str, text: &str, out: &mut Vec<Output>) {
        let item = self.items.finish(id, true);
        if text.is_empty() {
            return;
        }
        let text = TextEvent { item, body: BoundedText::event(text), incomplete: false, parent_call: None };
        out.push(Output::Event { event: Event::Reasoning(text) });
    }

    fn delta(&mut self, params: &Value, reasoning: bool, out: &mut Vec<Output>) {
        let Some(text) = wire::word(params, "delta") else { return };
        if self.turn.status.is_some() {
            return;
        }
        self.retrying = false;
        let part = params.get("summaryIndex").and_then(Value::as_u64).unwrap_or(0);
        let partial = self.items.append(wire::text_or(params, "itemId", ""), reasoning, part, text);
        out.push(Output::Partial(partial));
    }

    /// An error, or the notice that a request is tried again.
    fn error(&mut self, params: &Value, out: &mut Vec<Output>) {
        let Some(error) = TurnError::read(params.get("error")) else { return };
        if !wire::flag(params, "willRetry") {
            self.turn.error = Some(error);
            return;
        }
        self.retrying = true;
        self.items.abandon(out);
        let text = error.details.as_deref().unwrap_or(&error.message);
        let (attempt, max_attempts) = attempts(&error.message);
        let notice = Notice {
            retry: Some(RetryDetail { attempt, max_attempts, delay_millis: None, status: error.status }),
            ..Notice::new(NoticeKind::Retry, "api_retry", limit::prefix(text, QUOTE))
        };
        self.notice(notice, out);
    }

    fn warning(&mut self, params: &Value, out: &mut Vec<Output>) {
        let text =
            wire::word(params, "message").or_else(|| wire::word(params, "summary")).unwrap_or_default();
        if text.is_empty() || HARMLESS.iter().any(|harmless| text.contains(harmless)) {
            return;
        }
        self.notice(Notice::new(NoticeKind::Warning, "engine_warning", limit::prefix(text, QUOTE)), out);
    }

    fn compacted(&self, out: &mut Vec<Output>) {
        self.notice(
            Notice::new(NoticeKind::Compaction, "compaction", "the engine compacted its history"),
            out,
        );
    }

    /// What the service says about the account's limits. Informs; only a failed turn is QUOTA.
    fn rate_limits(&mut self, params: &Value, out: &mut Vec<Output>) {
        let limits = params.get("rateLimits").unwrap_or(&Value::Null);
        let reached = wire::word(limits, "rateLimitReachedType").is_some();
        let window = |key: &str| {
            let window = limits.get(key).filter(|window| window.is_object())?;
            let used = window.get("usedPercent").and_then(Value::as_u64)?;
            Some((used, window.get("resetsAt").and_then(Value::as_i64)))
        };
        // The fuller of the two windows is the one that counts.
        let fuller =
            [window("primary"), window("secondary")].into_iter().flatten().max_by_key(|(used, _)| *used);
        let (used, resets_at) = fuller.unwrap_or((0, None));
        let exceeded = reached || used >= 100;
        if exceeded {
            self.rejected_until = resets_at;
        }
        let used = u32::try_from(used.min(1_000)).unwrap_or(1_000);
        if (!exceeded && used < 90)
            || self.quota_told == Some((used, exceeded))
            || self.stage != Stage::Open
            || self.given.is_empty()
        {
            return;
        }
        self.quota_told = Some((used, exceeded));
        let event = Event::Quota(Quota {
            status: if exceeded { QuotaStatus::Exceeded } else { QuotaStatus::Warning },
            limit_name: wire::word(limits, "limitName")
                .or_else(|| wire::word(limits, "limitId"))
                .map(limit::short),
            resets_at_unix_seconds: resets_at,
            used_thousandths: fuller.is_some().then_some(used * 10),
        });
        out.push(Output::Event { event });
    }
}

/// Which try of how many, from `Reconnecting... 2/5`; the first of unknown many where it does not say.
fn attempts(message: &str) -> (u32, Option<u32>) {
    let numbers = message.split_whitespace().find_map(|word| {
        let (attempt, max) = word.split_once('/')?;
        Some((attempt.parse().ok()?, max.parse().ok()?))
    });
    match numbers {
        Some((attempt, max)) => (attempt, Some(max)),
        None => (1, None),
    }
}
