//! Events in words, and unfinished text as it comes.

use jiff::tz::TimeZone;
use roundhouse_proto::control::v1 as control;
use roundhouse_proto::control::v1::stream_events_response::Item;
use roundhouse_proto::engine::v1 as engine;
use roundhouse_proto::engine::v1::event_body::Kind;

use crate::json;
use crate::output::first_line;

/// Longest piece of a text in one line.
const LINE_CHARS: usize = 100;
/// Longest input of a tool that a permission request shows.
const PERMISSION_CHARS: usize = 2_000;

/// An item as one line (texts may have more), with time and turn. None for what is not worth a line.
pub(crate) fn item(item: &control::StreamEventsResponse) -> Option<String> {
    let at = json::timestamp(item.at.as_ref()).map_or_else(
        || "        ".to_owned(),
        |at| at.to_zoned_datetime(TimeZone::system()).strftime("%H:%M:%S").to_string(),
    );
    let (turn, text) = match item.item.as_ref()? {
        Item::TurnEvent(event) => (event.turn_id.as_str(), event.body.as_ref().and_then(body)?),
        Item::Message(message) => (message.turn_id.as_str(), self::message(message)),
        Item::Turn(turn) => {
            (turn.turn_id.as_str(), format!("turn      {}", json::turn_status(turn.status).to_lowercase()))
        }
        // That it was made or used is told by its turn's events.
        Item::Session(session) if session.unusable_reason.is_empty() => return None,
        Item::Session(session) => {
            let state = json::session_state(session.state).to_lowercase();
            ("", format!("session   {} {state}: {}", session.session_id, session.unusable_reason))
        }
        Item::Summary(summary) => {
            let told = format!("summary   version {} up to position {}", summary.version, summary.through);
            ("", told)
        }
        Item::Partial(partial) => {
            let text = partial.partial.as_ref().map_or("", |partial| partial.text.as_str());
            (partial.turn_id.as_str(), format!("partial   {}", first_line(text, LINE_CHARS)))
        }
        Item::PartialReset(reset) => (reset.turn_id.as_str(), "partial   thrown away".to_owned()),
    };
    Some(format!("{at} {turn:36} {text}"))
}

fn message(message: &control::Message) -> String {
    let place =
        message.position.map_or_else(|| "waits".to_owned(), |position| format!("position {position}"));
    let role = json::role(message.role).to_lowercase();
    let actor = if message.actor == role { String::new() } else { format!(" {}", message.actor) };
    format!("message   {role}{actor} ({place}): {}", first_line(&message.text, LINE_CHARS))
}

/// An event in words; texts whole. None for what a person need not see.
pub(crate) fn body(body: &engine::EventBody) -> Option<String> {
    let text = match body.kind.as_ref()? {
        Kind::Session(e) => session(e),
        Kind::Phase(e) => {
            let detail = if e.detail.is_empty() { String::new() } else { format!(": {}", e.detail) };
            format!("phase     {}{detail}", json::phase(e.phase).to_lowercase())
        }
        Kind::Text(e) => {
            let flag = if e.incomplete { " (interrupted)" } else { "" };
            format!("text      {}{flag}", e.text.trim_end())
        }
        Kind::Reasoning(e) => format!("thinking  {}", first_line(&e.text, LINE_CHARS)),
        Kind::ToolCall(e) => format!("tool      {} {}", e.name, tool_input(&e.input_json)),
        Kind::ToolResult(e) => {
            let what = if e.is_error { "error" } else { "ok" };
            format!("result    {what}: {}", first_line(&e.output, LINE_CHARS))
        }
        Kind::FileChange(e) => format!("file      {} {}", json::change(e.change).to_lowercase(), e.path),
        Kind::PermissionRequest(e) => format!("asks      {}\n{}", permission(e), how_to_answer(e)),
        Kind::PermissionAnswer(e) => format!(
            "answered  {} by {}{}",
            json::decision(e.decision).to_lowercase(),
            json::decider(e.decider).to_lowercase(),
            if e.feedback.is_empty() {
                String::new()
            } else {
                format!(": {}", first_line(&e.feedback, LINE_CHARS))
            }
        ),
        Kind::Usage(e) => format!("usage     {}", usage(e.usage.as_ref())),
        Kind::Quota(e) => format!("quota     {} {}", e.status, e.message),
        Kind::Notice(e) => format!("notice    {}: {}", json::notice_kind(e.kind).to_lowercase(), e.message),
        Kind::Evidence(e) => evidence(e)?,
        Kind::Terminal(e) => terminal(e),
    };
    Some(text.trim_end().to_owned())
}

/// Whether an event only matters to who looks into the machine.
pub(crate) fn is_bookkeeping(kind: &Kind) -> bool {
    match kind {
        Kind::Session(e) => is_native_ref(e),
        Kind::Phase(_) | Kind::Usage(_) => true,
        Kind::Text(_)
        | Kind::Reasoning(_)
        | Kind::ToolCall(_)
        | Kind::ToolResult(_)
        | Kind::FileChange(_)
        | Kind::PermissionRequest(_)
        | Kind::PermissionAnswer(_)
        | Kind::Quota(_)
        | Kind::Notice(_)
        | Kind::Evidence(_)
        | Kind::Terminal(_) => false,
    }
}

fn is_native_ref(e: &engine::SessionEvent) -> bool {
    e.state == engine::session_event::State::NativeRef as i32
}

fn session(e: &engine::SessionEvent) -> String {
    if let Some(native) = e.native_ref.as_ref().filter(|_| is_native_ref(e)) {
        return format!("session   {} is the engine's {}", e.session_id, native.id);
    }
    let state = json::session_event_state(e.state).to_lowercase().replace('_', " ");
    let mut text = format!("session   {} {state}", e.session_id);
    if e.origin != 0 {
        text.push_str(&format!(" ({})", json::origin(e.origin).to_lowercase()));
    }
    if e.history_given {
        text.push_str(", given the history");
    }
    if e.summary_given {
        text.push_str(", given a summary");
    }
    if !e.replaces.is_empty() {
        text.push_str(&format!(", replaces {}", e.replaces));
    }
    if !e.reason.is_empty() {
        text.push_str(&format!(": {}", e.reason));
    }
    text
}

/// What a permission request asks. The title is the engine's or the model's own word for it, so what it stands for
/// is always there, too: the tool and its input, in more than one line where it has more.
pub(crate) fn permission(e: &engine::PermissionRequestEvent) -> String {
    let input = telling(&e.input_json, &["command"]).unwrap_or_else(|| e.input_json.clone());
    let shown: String = input.chars().take(PERMISSION_CHARS).collect();
    let more = if e.truncated || shown.len() < input.len() { "…" } else { "" };
    let mut text = format!("{} {}{more}", e.tool, shown.trim_end().replace('\n', "\n    "));
    if !e.title.is_empty() {
        text.push_str(&format!(" ({})", first_line(&e.title, LINE_CHARS)));
    }
    text
}

/// The two commands that answer a permission request.
pub(crate) fn how_to_answer(e: &engine::PermissionRequestEvent) -> String {
    format!("  roundhouse permissions allow {0}\n  roundhouse permissions deny {0}", e.request_id)
}

fn evidence(e: &engine::EvidenceEvent) -> Option<String> {
    let changed = e.changed_files.len();
    let after = e.point == engine::evidence_event::Point::After as i32;
    if !after || (changed == 0 && e.commits.is_empty()) {
        return None;
    }
    let more = if e.truncated { " or more" } else { "" };
    let (files, commits) = (counted(changed, "file"), counted(e.commits.len(), "commit"));
    Some(format!("worktree  {files} changed{more}, {commits}, on {}", e.branch))
}

fn counted(count: usize, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

fn terminal(e: &engine::TerminalEvent) -> String {
    let mut text = format!("end       {}", json::outcome(e.outcome).to_lowercase());
    if let Some(duration) = &e.duration {
        text.push_str(&format!(" after {}", seconds(json::milliseconds(duration))));
    }
    if let Some(failure) = &e.failure {
        text.push_str(&format!("\n{}", self::failure(failure)));
    }
    text
}

/// A failure with what to do next, indented.
pub(crate) fn failure(failure: &engine::Failure) -> String {
    let mut text = format!("  {}: {}", json::failure_reason(failure.reason), failure.message);
    if !failure.next_action.is_empty() {
        text.push_str(&format!("\n  next: {}", failure.next_action));
    }
    text
}

/// The part of a tool's input that says most, in one line.
fn tool_input(input: &str) -> String {
    let keys = ["command", "file_path", "path", "pattern", "query", "url"];
    first_line(telling(input, &keys).as_deref().unwrap_or(input), LINE_CHARS)
}

/// The first of these texts that a tool's input has.
fn telling(input: &str, keys: &[&str]) -> Option<String> {
    let value = serde_json::from_str::<serde_json::Value>(input).ok()?;
    keys.iter().find_map(|key| value.get(key)?.as_str().map(str::to_owned))
}

/// Tokens in and out over all models; `?` for what is not known.
pub(crate) fn usage(usage: Option<&engine::Usage>) -> String {
    match tokens(usage) {
        (None, None) => "tokens unknown".to_owned(),
        (input, output) => {
            let known = |value: Option<u64>| value.map_or_else(|| "?".to_owned(), |value| value.to_string());
            let at_least = if usage.is_some_and(|usage| !usage.complete) { "at least " } else { "" };
            format!("{at_least}{} tokens in, {} out", known(input), known(output))
        }
    }
}

/// Tokens read (cached ones included) and written. None when no model told.
pub(crate) fn tokens(usage: Option<&engine::Usage>) -> (Option<u64>, Option<u64>) {
    let models = usage.map(|usage| usage.models.as_slice()).unwrap_or_default();
    let sum = |counts: Vec<Option<u64>>| {
        let known: Vec<u64> = counts.into_iter().flatten().collect();
        (!known.is_empty()).then(|| known.iter().fold(0u64, |sum, count| sum.saturating_add(*count)))
    };
    let input =
        models.iter().flat_map(|m| [m.input_tokens, m.cache_read_tokens, m.cache_write_tokens]).collect();
    (sum(input), sum(models.iter().map(|m| m.output_tokens).collect()))
}

/// Milliseconds as seconds.
pub(crate) fn seconds(milliseconds: i64) -> String {
    let tenths = milliseconds.saturating_add(50) / 100;
    format!("{}.{} s", tenths / 10, tenths % 10)
}

/// Unfinished text as it comes, so that each byte is shown once.
#[derive(Debug, Default)]
pub(crate) struct Live {
    /// The item that is being shown.
    item: String,
    /// Its text so far.
    shown: String,
    /// Whether the last line that was printed has no end yet.
    open: bool,
}

impl Live {
    /// What to print for a piece of unfinished text.
    pub(crate) fn partial(&mut self, partial: &engine::Partial) -> String {
        if partial.reasoning {
            return String::new();
        }
        let mut print = self.turn_to(&partial.item_id);
        let offset = usize::try_from(partial.offset).unwrap_or(usize::MAX);
        if offset == 0 && !partial.text.starts_with(&self.shown) && !self.shown.starts_with(&partial.text) {
            // A snapshot that is not what was shown: the engine began anew.
            print.push_str(&self.end_line());
            self.shown.clear();
        }
        // A piece beyond what is shown waits for the snapshot or the final text.
        let fresh = self.shown.len().checked_sub(offset).and_then(|known| partial.text.get(known..));
        if let Some(fresh) = fresh {
            print.push_str(fresh);
            self.shown.push_str(fresh);
        }
        self.printed(print)
    }

    /// What to print for the final text of an item.
    pub(crate) fn text(&mut self, item: &str, text: &str) -> String {
        let mut print = self.turn_to(item);
        match text.strip_prefix(self.shown.as_str()) {
            Some(rest) => print.push_str(rest),
            None => {
                print.push_str(&self.end_line());
                print.push_str(text);
            }
        }
        self.item.clear();
        self.shown.clear();
        let print = self.printed(print);
        print + &self.end_line()
    }

    /// What to print before a line of another kind. The text goes on after it.
    pub(crate) fn end_line(&mut self) -> String {
        if std::mem::take(&mut self.open) { "\n".to_owned() } else { String::new() }
    }

    /// What to print when the engine has thrown away what was shown.
    pub(crate) fn reset(&mut self) -> String {
        self.item.clear();
        self.shown.clear();
        self.end_line()
    }

    /// Another item begins with another line.
    fn turn_to(&mut self, item: &str) -> String {
        if self.item == item {
            return String::new();
        }
        item.clone_into(&mut self.item);
        self.shown.clear();
        self.end_line()
    }

    fn printed(&mut self, text: String) -> String {
        if !text.is_empty() {
            self.open = !text.ends_with('\n');
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use pretty_assertions::assert_eq;

    use super::*;

    fn partial(item: &str, offset: u64, text: &str) -> engine::Partial {
        engine::Partial {
            item_id: item.to_owned(),
            offset,
            text: text.to_owned(),
            ..engine::Partial::default()
        }
    }

    #[test]
    fn unfinished_text_is_shown_once_and_the_final_text_ends_it() {
        let mut live = Live::default();
        assert_eq!(live.partial(&partial("a", 0, "Hé")), "Hé");
        assert_eq!(live.partial(&partial("a", 3, "llo")), "llo");
        // A snapshot after a reconnect holds what is shown already.
        assert_eq!(live.partial(&partial("a", 0, "Héllo, w")), ", w");
        // A gap is not guessed.
        assert_eq!(live.partial(&partial("a", 40, "later")), "");
        assert_eq!(live.text("a", "Héllo, world"), "orld\n");
        // Another item; and one whose final text never came as a partial.
        assert_eq!(live.partial(&partial("b", 0, "x")), "x");
        assert_eq!(live.partial(&partial("c", 0, "y")), "\ny");
        assert_eq!(live.text("d", "whole"), "\nwhole\n");
        assert_eq!(live.text("e", ""), "");
        assert_eq!(live.text("f", "ends itself\n"), "ends itself\n");
    }

    #[test]
    fn an_engine_that_begins_anew_begins_a_line() {
        let mut live = Live::default();
        assert_eq!(live.partial(&partial("a", 0, "first")), "first");
        assert_eq!(live.partial(&partial("a", 0, "second")), "\nsecond");
        assert_eq!(live.text("a", "third"), "\nthird\n");
        assert_eq!(live.partial(&partial("b", 0, "x")), "x");
        assert_eq!(live.reset(), "\n");
        assert_eq!(live.partial(&partial("b", 0, "y")), "y");
        let thinking = engine::Partial { reasoning: true, ..partial("r", 0, "hm") };
        assert_eq!(live.partial(&thinking), "");
    }

    #[test]
    fn a_line_between_does_not_interrupt_a_text() {
        let mut live = Live::default();
        assert_eq!(live.partial(&partial("a", 0, "The ")), "The ");
        assert_eq!(live.end_line(), "\n");
        assert_eq!(live.end_line(), "", "it is ended once");
        assert_eq!(live.partial(&partial("a", 4, "table ")), "table ");
        assert_eq!(live.end_line(), "\n");
        assert_eq!(live.text("a", "The table turns."), "turns.\n");
        assert_eq!(live.end_line(), "");
    }

    #[test]
    fn tokens_that_nobody_told_are_unknown_and_not_none() {
        assert_eq!(usage(None), "tokens unknown");
        let model =
            engine::ModelUsage { input_tokens: Some(5), cache_read_tokens: Some(2), ..Default::default() };
        let told = engine::Usage { models: vec![model], complete: false };
        assert_eq!(usage(Some(&told)), "at least 7 tokens in, ? out");
    }

    #[test]
    fn a_permission_shows_what_would_run_and_not_only_its_title() {
        let asked = engine::PermissionRequestEvent {
            request_id: "spl_1.7".to_owned(),
            tool: "Bash".to_owned(),
            input_json: "{\"command\":\"ls\\nrm -rf x\"}".to_owned(),
            title: "Lists files".to_owned(),
            ..Default::default()
        };
        assert_eq!(permission(&asked), "Bash ls\n    rm -rf x (Lists files)");
        let write = "{\"file_path\":\"/w/a\",\"content\":\"all of it\"}";
        let other = engine::PermissionRequestEvent { input_json: write.to_owned(), ..asked.clone() };
        assert_eq!(permission(&other), format!("Bash {write} (Lists files)"));
        let long = engine::PermissionRequestEvent { input_json: "x".repeat(3_000), ..asked };
        assert!(permission(&long).contains("xxx… ("), "{}", permission(&long));
    }

    #[test]
    fn events_are_told_in_words() {
        let told = |kind: Kind| body(&engine::EventBody { kind: Some(kind) }).unwrap_or_default();
        assert_eq!(
            told(Kind::ToolCall(engine::ToolCallEvent {
                name: "Bash".to_owned(),
                input_json: "{\"command\":\"ls\\nrm x\"}".to_owned(),
                ..Default::default()
            })),
            "tool      Bash ls…"
        );
        assert_eq!(
            told(Kind::Terminal(engine::TerminalEvent {
                outcome: engine::Outcome::Failed as i32,
                duration: Some(prost_types::Duration { seconds: 2, nanos: 340_000_000 }),
                failure: Some(engine::Failure {
                    reason: engine::FailureReason::Quota as i32,
                    message: "the limit is reached".to_owned(),
                    next_action: "wait".to_owned(),
                    ..Default::default()
                }),
                ..Default::default()
            })),
            "end       failed after 2.3 s\n  QUOTA: the limit is reached\n  next: wait"
        );
        assert_eq!(
            told(Kind::Session(engine::SessionEvent {
                session_id: "ses_2".to_owned(),
                state: engine::session_event::State::Opened as i32,
                origin: engine::Origin::Replaced as i32,
                history_given: true,
                replaces: "ses_1".to_owned(),
                ..Default::default()
            })),
            "session   ses_2 opened (replaced), given the history, replaces ses_1"
        );
        assert_eq!(
            told(Kind::Session(engine::SessionEvent {
                session_id: "ses_2".to_owned(),
                state: engine::session_event::State::NativeRef as i32,
                native_ref: Some(engine::NativeRef { id: "abc".to_owned() }),
                ..Default::default()
            })),
            "session   ses_2 is the engine's abc"
        );
        assert_eq!(
            told(Kind::Evidence(engine::EvidenceEvent {
                point: engine::evidence_event::Point::After as i32,
                branch: "main".to_owned(),
                changed_files: vec!["a".to_owned()],
                ..Default::default()
            })),
            "worktree  1 file changed, 0 commits, on main"
        );
    }
}
