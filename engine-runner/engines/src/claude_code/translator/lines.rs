//! One line of output at a time.

use serde_json::Value;

use crate::{
    event::{
        Decider, Decision, Event, Notice, NoticeKind, PermissionAnswered, Quota, QuotaStatus, RetryDetail,
        TextEvent,
    },
    limit::{self, BoundedText},
    plan::NativeRef,
    translate::{DeliveryEnd, Opened, Output, PermissionReply},
    wire,
};

use super::{
    super::{
        classify::{ApiError, ResultFacts},
        stdin,
    },
    Asked, ClaudeTranslator, EngineState, MANY, Stage,
    items::BlockKind,
    permission_event,
};

/// The most bytes of a text that a notice quotes.
const QUOTE: usize = 300;

impl ClaudeTranslator {
    /// Takes one line.
    pub(super) fn line(&mut self, frame: u64, bytes: &[u8], out: &mut Vec<Output>) {
        if self.engine == EngineState::Gone {
            // Something that outlived the engine still holds its pipe. It does not speak for it.
            return;
        }
        let Some(line) = wire::parse(bytes) else {
            if !bytes.trim_ascii().is_empty() {
                self.unknown_lines += 1;
            }
            return;
        };
        match wire::text_or(&line, "type", "") {
            "control_response" => self.control_response(&line, out),
            "control_request" => self.control_request(frame, &line, out),
            "control_cancel_request" => self.control_cancel(&line, out),
            "command_lifecycle" => self.lifecycle(&line, out),
            "system" => self.system(&line, out),
            "assistant" => self.assistant(frame, &line, out),
            "user" => self.user(&line, out),
            "stream_event" => self.stream_event(&line, out),
            "result" => self.result(&line, out),
            "rate_limit_event" => self.rate_limit(&line, out),
            "conversation_reset" => self.conversation_reset(&line, out),
            "tombstone" => self.tombstone(out),
            "keep_alive" | "tool_progress" | "tool_use_summary" | "auth_status" | "attachment"
            | "prompt_suggestion" | "session_notice" => {}
            _ => self.unknown_lines += 1,
        }
        self.maybe_end(out);
    }

    fn control_response(&mut self, line: &Value, out: &mut Vec<Output>) {
        let Some(response) = line.get("response") else { return };
        let id = wire::text_or(response, "request_id", "");
        // Our own answer to a permission request comes back: it was taken.
        for asked in self.asked.iter_mut().filter(|asked| asked.native_id == id) {
            asked.answered = true;
        }
        if id != stdin::INITIALIZE || self.stage != Stage::Opening {
            return;
        }
        if wire::text(response, "subtype") != Some("success") {
            let error = wire::text_or(response, "error", "the engine refused the handshake").to_owned();
            self.refused_opening(&[error], out);
            return;
        }
        let answer = response.get("response").unwrap_or(&Value::Null);
        self.stage = if self.open.turn_id.is_some() { Stage::Open } else { Stage::Ended };
        self.carry.engine_version = wire::word(answer, "claude_code_version").map(limit::short);
        if wire::word(answer, "session_state").is_some_and(|state| state != "idle") {
            self.engine = EngineState::Busy;
        }
        let models = wire::list(answer, "models")
            .iter()
            .filter_map(|model| wire::word(model, "value"))
            .take(100)
            .map(limit::short)
            .collect();
        out.push(Output::Opened(Opened {
            native: self.open.native.clone(),
            engine_version: self.carry.engine_version.clone(),
            models,
        }));
    }

    fn control_request(&mut self, frame: u64, line: &Value, out: &mut Vec<Output>) {
        let native_id = wire::text_or(line, "request_id", "");
        let request = line.get("request").unwrap_or(&Value::Null);
        if wire::text(request, "subtype") != Some("can_use_tool") {
            out.push(Output::Reply(stdin::refuse_request(frame, native_id)));
            return;
        }
        if !self.in_turn() || self.asked.len() >= MANY {
            let feedback = "No turn is running, so nobody can allow this.";
            let reply = PermissionReply::Deny { feedback };
            out.push(Output::Reply(stdin::answer_permission(frame, native_id, reply)));
            return;
        }
        let request_id = format!("{}.{frame}", self.open.spool_id);
        let event = Event::PermissionRequest(permission_event(request_id.clone(), request));
        self.asked.push(Asked { request_id, native_id: native_id.to_owned(), frame, answered: false });
        out.push(Output::Event { event });
    }

    fn control_cancel(&mut self, line: &Value, out: &mut Vec<Output>) {
        let native_id = wire::text_or(line, "request_id", "");
        let Some(place) = self.asked.iter().position(|asked| asked.native_id == native_id) else { return };
        let asked = self.asked.remove(place);
        if !asked.answered {
            let event = Event::PermissionAnswer(PermissionAnswered {
                request_id: asked.request_id,
                decision: Decision::Withdrawn,
                decided_by: Decider::Engine,
                feedback: None,
            });
            out.push(Output::Event { event });
        }
    }

    fn lifecycle(&mut self, line: &Value, out: &mut Vec<Output>) {
        let id = wire::text_or(line, "command_uuid", "").to_owned();
        if self.stage != Stage::Open || self.given(&id).is_none() {
            return;
        }
        match wire::text_or(line, "state", "") {
            "started" => self.accept(&id, out),
            "completed" => self.delivery_ended(&id, DeliveryEnd::Completed, out),
            "cancelled" => self.delivery_ended(&id, DeliveryEnd::Cancelled, out),
            _ => {}
        }
    }

    /// The engine took a delivery.
    fn accept(&mut self, id: &str, out: &mut Vec<Output>) {
        if let Some(given) = self.given(id)
            && !given.started
        {
            given.started = true;
            self.result_since_start = false;
            self.engine = EngineState::Busy;
            out.push(Output::Accepted { delivery_id: id.to_owned() });
        }
    }

    fn delivery_ended(&mut self, id: &str, end: DeliveryEnd, out: &mut Vec<Output>) {
        if let Some(given) = self.given(id)
            && given.end.is_none()
        {
            given.end = Some(end);
            out.push(Output::DeliveryEnded { delivery_id: id.to_owned(), end });
        }
    }

    fn system(&mut self, line: &Value, out: &mut Vec<Output>) {
        match wire::text_or(line, "subtype", "") {
            "session_state_changed" => self.session_state(line, out),
            "init" => self.init(line, out),
            "api_retry" => self.api_retry(line, out),
            "compact_boundary" => {
                self.summary_due = true;
                let detail = line.get("compact_metadata").unwrap_or(&Value::Null);
                let count = |key: &str| detail.get(key).and_then(Value::as_u64).map(|n| n.to_string());
                let message = format!(
                    "the engine compacted its history ({}, {} to {} tokens)",
                    wire::text_or(detail, "trigger", "unknown trigger"),
                    count("pre_tokens").as_deref().unwrap_or("?"),
                    count("post_tokens").as_deref().unwrap_or("?"),
                );
                self.notice(Notice::new(NoticeKind::Compaction, "compacted", &message), out);
            }
            "session_writes_lost" => {
                let code = wire::text_or(line, "error_code", "unknown cause");
                if wire::list(line, "lost").iter().any(|lost| lost.as_str() == Some("transcript")) {
                    let message = format!("the engine could not write all of the session's file ({code})");
                    self.writes_lost(&message, out);
                }
            }
            "informational" => {
                let text = wire::text_or(line, "content", "");
                let quote = limit::prefix(text, QUOTE);
                self.notice(Notice::new(NoticeKind::Warning, "informational", quote), out);
            }
            "model_refusal_no_fallback" => {
                let text = "the model refused, and there is no other model to turn to";
                self.notice(Notice::new(NoticeKind::Warning, "model_refusal", text), out);
            }
            "conversation_reset" => self.conversation_reset(line, out),
            "status"
            | "thinking_tokens"
            | "permission_denied"
            | "task_started"
            | "task_updated"
            | "task_progress"
            | "task_notification"
            | "background_tasks_changed"
            | "hook_started"
            | "hook_progress"
            | "hook_response"
            | "files_persisted"
            | "local_command" => {}
            _ => self.unknown_lines += 1,
        }
    }

    fn session_state(&mut self, line: &Value, out: &mut Vec<Output>) {
        if wire::text(line, "state") != Some("idle") {
            // "running", and "requires_action" while a permission is open.
            self.engine = EngineState::Busy;
            return;
        }
        self.engine = EngineState::Idle;
        self.unrequested = false;
        if self.stage != Stage::Open {
            return;
        }
        // An id the engine has seen before is echoed and never worked on. Only now is it sure that nothing comes.
        let repeated: Vec<String> = self
            .given
            .iter()
            .filter(|given| given.repeated && !given.started && given.end.is_none())
            .map(|given| given.id.clone())
            .collect();
        for id in repeated {
            self.delivery_ended(&id, DeliveryEnd::Completed, out);
        }
    }

    fn init(&mut self, line: &Value, out: &mut Vec<Output>) {
        if let Some(id) = wire::word(line, "session_id")
            && id != self.open.native.id
            && self.carry.changed_native_id.as_deref() != Some(id)
        {
            let message = format!(
                "the engine works in session {} although {} was asked for; the latter is kept",
                limit::prefix(id, 80),
                self.open.native.id
            );
            self.carry.changed_native_id = Some(limit::short(id));
            self.notice(Notice::new(NoticeKind::ContextLost, "native_id_changed", &message), out);
        }
        if !self.in_turn() && self.stage != Stage::Opening {
            self.unrequested();
        }
    }

    /// The engine does something that nobody asked for.
    fn unrequested(&mut self) {
        self.unrequested = true;
        self.engine = EngineState::Busy;
    }

    fn api_retry(&mut self, line: &Value, out: &mut Vec<Output>) {
        if !self.in_turn() {
            return;
        }
        self.retrying = true;
        self.items.abandon(None, 0, out);
        let number = |key: &str| line.get(key).and_then(Value::as_u64);
        let small = |key: &str| number(key).and_then(|n| u32::try_from(n).ok());
        let status = wire::status(line, "error_status");
        let cause = match status {
            Some(status) => format!("{} ({status})", wire::text_or(line, "error", "unknown")),
            None => wire::text_or(line, "error", "unknown").to_owned(),
        };
        let delay = number("retry_delay_ms");
        let message = format!("the request to the model failed: {cause}; the engine tries it again");
        let notice = Notice {
            retry: Some(RetryDetail {
                attempt: small("attempt").unwrap_or(1),
                max_attempts: small("max_retries"),
                delay_millis: delay,
                status,
            }),
            ..Notice::new(NoticeKind::Retry, "api_retry", &message)
        };
        out.push(Output::Event { event: Event::Notice(notice) });
    }

    fn conversation_reset(&mut self, line: &Value, out: &mut Vec<Output>) {
        self.carry.changed_native_id = wire::word(line, "new_conversation_id").map(limit::short);
        let text = "the engine dropped its history and began a new conversation";
        self.notice(Notice::new(NoticeKind::ContextLost, "conversation_reset", text), out);
    }

    fn tombstone(&mut self, out: &mut Vec<Output>) {
        let text = "the engine took back something it had said";
        self.notice(Notice::new(NoticeKind::Warning, "tombstone", text), out);
    }

    /// Whether a line names a message that is not of this turn.
    fn foreign(&self, line: &Value) -> bool {
        let ids = wire::user_uuids(line);
        !ids.is_empty() && !ids.iter().any(|id| self.given.iter().any(|given| given.id == *id))
    }

    fn assistant(&mut self, frame: u64, line: &Value, out: &mut Vec<Output>) {
        if !self.in_turn() || self.foreign(line) {
            return;
        }
        let message = line.get("message").unwrap_or(&Value::Null);
        let parent = wire::word(line, "parent_tool_use_id").map(limit::short);
        let parent = parent.as_deref();
        if wire::flag(line, "is_api_error_message") || wire::text(message, "model") == Some("<synthetic>") {
            // A sub-agent's failed request is its tool result's to tell.
            if parent.is_none() {
                self.synthetic(line, message, out);
            }
            return;
        }
        self.retrying = false;
        let fallback = format!("frame{frame}");
        let id = wire::text_or(message, "id", &fallback);
        let incomplete = wire::flag(line, "aborted");
        for block in wire::list(message, "content") {
            self.block(block, id, parent, incomplete, out);
        }
    }

    /// A line the engine made itself: an error, or a remark.
    fn synthetic(&mut self, line: &Value, message: &Value, out: &mut Vec<Output>) {
        let text = wire::content_text(message.get("content"));
        if wire::flag(line, "is_api_error_message") {
            self.items.abandon(None, 0, out);
            self.api_error = Some(ApiError::read(line, limit::prefix(&text, limit::FIELD_LIMIT)));
        } else {
            let quote = limit::prefix(&text, QUOTE);
            self.notice(Notice::new(NoticeKind::Warning, "engine_remark", quote), out);
        }
    }

    fn block(
        &mut self,
        block: &Value,
        message: &str,
        parent: Option<&str>,
        incomplete: bool,
        out: &mut Vec<Output>,
    ) {
        let kind = match wire::text_or(block, "type", "") {
            "text" => BlockKind::Text,
            "thinking" => BlockKind::Reasoning,
            _ => BlockKind::Other,
        };
        let item = self.items.finish(parent, message, kind, out);
        let event = match wire::text_or(block, "type", "") {
            "text" => {
                let text = wire::text_or(block, "text", "");
                if parent.is_none() {
                    limit::join(&mut self.said, &mut self.said_bytes, text);
                    let room = limit::ANSWER_LIMIT.saturating_sub(self.run.len());
                    self.run.push_str(limit::prefix(text, room));
                }
                (!text.is_empty()).then(|| {
                    Event::Text(TextEvent {
                        item,
                        body: BoundedText::event(text),
                        incomplete,
                        parent_call: parent.map(str::to_owned),
                    })
                })
            }
            "thinking" => {
                let text = wire::text_or(block, "thinking", "");
                (!text.is_empty()).then(|| {
                    Event::Reasoning(TextEvent {
                        item,
                        body: BoundedText::event(text),
                        incomplete,
                        parent_call: parent.map(str::to_owned),
                    })
                })
            }
            "tool_use" | "server_tool_use" | "mcp_tool_use" => {
                if parent.is_none() {
                    self.run.clear();
                    self.continued = false;
                }
                self.tools.call(block, item.as_str(), parent)
            }
            _ => None,
        };
        out.extend(event.map(|event| Output::Event { event }));
    }

    fn user(&mut self, line: &Value, out: &mut Vec<Output>) {
        if wire::flag(line, "isReplay") {
            let id = wire::text_or(line, "uuid", "").to_owned();
            if self.stage == Stage::Open && self.given(&id).is_some_and(|given| !given.started) {
                if self.engine == EngineState::Busy {
                    self.accept(&id, out);
                } else if let Some(given) = self.given(&id) {
                    given.repeated = true;
                }
            }
            return;
        }
        if !self.in_turn() {
            return;
        }
        let parent = wire::word(line, "parent_tool_use_id").map(limit::short);
        let content = line.get("message").unwrap_or(&Value::Null);
        for block in wire::list(content, "content") {
            if wire::text(block, "type").is_some_and(|kind| kind.ends_with("tool_result")) {
                let events = self.tools.result(block, line, parent.as_deref());
                out.extend(events.into_iter().map(|event| Output::Event { event }));
            }
        }
        if wire::flag(line, "isSynthetic") && parent.is_none() {
            if std::mem::take(&mut self.summary_due) {
                return;
            }
            if wire::flag(line, "refusal_retry") {
                self.run.clear();
            } else {
                self.continued = !self.run.is_empty();
            }
            let text = wire::content_text(content.get("content"));
            let message = format!("the engine went on by itself: {}", limit::prefix(&text, QUOTE));
            self.notice(Notice::new(NoticeKind::Warning, "engine_prompt", &message), out);
        }
    }

    fn stream_event(&mut self, line: &Value, out: &mut Vec<Output>) {
        if !self.in_turn() {
            return;
        }
        let event = line.get("event").unwrap_or(&Value::Null);
        let parent = wire::word(line, "parent_tool_use_id").map(limit::short);
        let parent = parent.as_deref();
        let index = event.get("index").and_then(Value::as_u64).unwrap_or(0);
        match wire::text_or(event, "type", "") {
            "message_start" => {
                let message = event.get("message").unwrap_or(&Value::Null);
                self.retrying = false;
                self.usage.message_start(message);
                self.items.turn_to(parent, wire::text_or(message, "id", "message"), out);
            }
            "content_block_start" => {
                let kind = match event.get("content_block").map(|block| wire::text_or(block, "type", "")) {
                    Some("text") => BlockKind::Text,
                    Some("thinking") => BlockKind::Reasoning,
                    _ => BlockKind::Other,
                };
                self.items.start(parent, index, kind);
            }
            "content_block_delta" => {
                let delta = event.get("delta").unwrap_or(&Value::Null);
                let (kind, text) = match wire::text_or(delta, "type", "") {
                    "text_delta" => (BlockKind::Text, wire::text_or(delta, "text", "")),
                    "thinking_delta" => (BlockKind::Reasoning, wire::text_or(delta, "thinking", "")),
                    _ => return,
                };
                if !text.is_empty() {
                    out.extend(self.items.append(parent, index, kind, text).map(Output::Partial));
                }
            }
            "message_delta" => self.usage.message_delta(event.get("usage")),
            "message_stop" => {
                if let Some(abandoned) = line.get("abandoned_blocks") {
                    let from = abandoned.get("from_block_index").and_then(Value::as_u64).unwrap_or(0);
                    self.items.abandon(parent, from, out);
                }
            }
            _ => {}
        }
    }

    fn result(&mut self, line: &Value, out: &mut Vec<Output>) {
        let facts = ResultFacts::read(line);
        match self.stage {
            Stage::Opening => {
                let errors = match (facts.errors.is_empty(), facts.text) {
                    (true, Some(text)) => vec![text],
                    _ => facts.errors,
                };
                self.refused_opening(&errors, out);
                return;
            }
            Stage::Open if self.in_turn() && !self.foreign(line) => {}
            Stage::Open | Stage::Ended => {
                let text = facts.text.as_deref().unwrap_or_default();
                let message = format!(
                    "the engine worked on something nobody asked for: {}",
                    limit::prefix(text, QUOTE)
                );
                let notice = Notice::new(NoticeKind::SessionOutput, "unrequested_turn", &message);
                out.push(Output::SessionNotice { notice });
                return;
            }
        }
        self.retrying = false;
        self.usage.result(line);
        self.result_since_start = true;
        let facts = ResultFacts { api: self.api_error.take().filter(|_| facts.is_error), ..facts };
        if let Some(text) = facts.text.as_deref().filter(|_| !facts.is_error) {
            self.answered = true;
            let whole = if self.continued { &self.run } else { text };
            limit::join(&mut self.answer, &mut self.answer_bytes, whole);
        }
        self.run.clear();
        self.continued = false;
        self.last_result = Some(facts);
        if !self.carry.committed {
            // The engine has written the turn's rows by the time it prints the result.
            self.carry.committed = true;
            let native = NativeRef { id: self.open.native.id.clone(), file: self.open.native.file.clone() };
            out.push(Output::Committed { native });
        }
    }

    fn rate_limit(&mut self, line: &Value, out: &mut Vec<Output>) {
        let info = line.get("rate_limit_info").unwrap_or(&Value::Null);
        let status = match wire::text_or(info, "status", "") {
            "allowed_warning" => QuotaStatus::Warning,
            "rejected" => QuotaStatus::Exceeded,
            _ => return,
        };
        let resets_at = info.get("resetsAt").and_then(Value::as_i64);
        if status == QuotaStatus::Exceeded {
            self.rejected_until = resets_at;
        }
        if !self.in_turn() {
            return;
        }
        let used = info.get("utilization").and_then(Value::as_f64);
        let used = used.filter(|used| used.is_finite() && (0.0..=100.0).contains(used));
        let event = Event::Quota(Quota {
            status,
            limit_name: wire::word(info, "rateLimitType").map(limit::short),
            resets_at_unix_seconds: resets_at,
            used_thousandths: used.and_then(|used| format!("{:.0}", used * 1000.0).parse().ok()),
        });
        out.push(Output::Event { event });
    }
}
