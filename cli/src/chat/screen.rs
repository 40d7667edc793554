//! What a conversation looks like.

use std::collections::{HashMap, HashSet};

use roundhouse_proto::control::v1 as control;
use roundhouse_proto::control::v1::stream_events_response::Item;
use roundhouse_proto::engine::v1 as engine;
use roundhouse_proto::engine::v1::event_body::Kind;

use crate::chat::input::Printer;
use crate::commands::follow::{self, verdict};
use crate::events::render::{self, Live};
use crate::json;
use crate::output::{Output, first_line, harmless};

/// Prints what happens: what agents say as data, the rest as notes, and all of it above the line that is being edited.
pub(super) struct Screen {
    output: Output,
    live: Option<Live>,
    printer: Option<Printer>,
    /// Whether a line is being edited, so that everything goes through the printer and only whole texts are shown.
    pub(super) editing: bool,
    sessions: HashMap<String, control::Session>,
    turns: HashMap<String, control::Turn>,
    /// What the terminal event of a turn says of the time of its work.
    worked: HashMap<String, i64>,
    /// Messages that were shown.
    told: HashSet<String>,
}

impl Screen {
    pub(super) fn new(output: Output, printer: Option<Printer>) -> Self {
        Self {
            output,
            live: output.is_live().then(Live::default),
            printer,
            editing: false,
            sessions: HashMap::new(),
            turns: HashMap::new(),
            worked: HashMap::new(),
            told: HashSet::new(),
        }
    }

    /// These messages were shown already.
    pub(super) fn told(&mut self, messages: &[control::Message]) {
        self.told.extend(messages.iter().map(|message| message.message_id.clone()));
    }

    /// A line beside what is said.
    pub(super) fn note(&mut self, text: &str) {
        if self.output.is_json() {
            return;
        }
        self.close();
        match self.printer.as_mut().filter(|_| self.editing) {
            // A terminal that is gone ends the command by its signal.
            Some(printer) => drop(printer.print(format!("{}\n", harmless(text).trim_end()))),
            None => self.output.note(text),
        }
    }

    /// Ends a line of unfinished text.
    pub(super) fn close(&mut self) {
        if let Some(live) = self.live.as_mut().filter(|_| !self.editing) {
            self.output.raw(&live.end_line());
        }
    }

    /// Shows an item. `own` is whether its message was typed here.
    pub(super) fn item(&mut self, item: &control::StreamEventsResponse, own: bool) {
        if self.output.is_json() {
            return self.output.item(&json::stream_item(item));
        }
        match &item.item {
            Some(Item::TurnEvent(event)) => {
                if let Some(worked) = follow::worked(item) {
                    self.worked.insert(event.turn_id.clone(), worked);
                }
                if let Some(body) = &event.body {
                    self.event(&event.turn_id, body);
                }
                if let Some(turn) = self.end_of(item) {
                    self.turn(&turn);
                }
            }
            Some(Item::Partial(partial)) => {
                if let (Some(live), Some(partial), false) =
                    (self.live.as_mut(), partial.partial.as_ref(), self.editing)
                {
                    self.output.raw(&live.partial(partial));
                }
            }
            Some(Item::PartialReset(_)) => {
                if let Some(live) = self.live.as_mut().filter(|_| !self.editing) {
                    self.output.raw(&live.reset());
                }
            }
            Some(Item::Message(message)) => self.message(message, own),
            Some(Item::Session(session)) => {
                self.sessions.insert(session.session_id.clone(), session.clone());
            }
            Some(Item::Turn(turn)) => self.turn(turn),
            Some(Item::Summary(_)) => {
                if let Some(line) = render::item(item) {
                    self.note(&line);
                }
            }
            None => {}
        }
    }

    /// The turn as its terminal event leaves it; none for other items. Its end comes as this event alone.
    pub(super) fn end_of(&self, item: &control::StreamEventsResponse) -> Option<control::Turn> {
        let Some(Item::TurnEvent(event)) = &item.item else { return None };
        let Some(Kind::Terminal(terminal)) = event.body.as_ref().and_then(|body| body.kind.as_ref()) else {
            return None;
        };
        let known = self.turns.get(&event.turn_id).cloned().unwrap_or_default();
        let status = match engine::Outcome::try_from(terminal.outcome) {
            Ok(engine::Outcome::Completed) => control::TurnStatus::Completed,
            Ok(engine::Outcome::Cancelled) => control::TurnStatus::Cancelled,
            Ok(engine::Outcome::Lost) => control::TurnStatus::Lost,
            Ok(engine::Outcome::Failed | engine::Outcome::Unspecified) | Err(_) => {
                control::TurnStatus::Failed
            }
        };
        // A wish that was fulfilled is no failure to tell of.
        let failure = terminal.failure.clone().filter(|_| status != control::TurnStatus::Cancelled);
        Some(control::Turn {
            turn_id: event.turn_id.clone(),
            status: status.into(),
            failure,
            usage: terminal.usage.clone().or_else(|| known.usage.clone()),
            end_time: item.at,
            ..known
        })
    }

    fn message(&mut self, message: &control::Message, own: bool) {
        let asked = message.role == control::Role::User as i32;
        // Told once. It comes when it arrives, with its place if nothing was before it, and else again when it gets one.
        if self.told.insert(message.message_id.clone()) && asked && !own {
            self.note(&format!("{}: {}", message.actor, message.text.trim_end()));
        }
    }

    fn turn(&mut self, turn: &control::Turn) {
        let known = self.turns.insert(turn.turn_id.clone(), turn.clone());
        let changed = known.is_none_or(|known| known.status != turn.status);
        if changed && turn.status == control::TurnStatus::Queued as i32 {
            self.note("queued    it waits for the turns before it");
        }
        if changed && follow::ended(turn.status) {
            let worked = self.worked.remove(&turn.turn_id);
            let result =
                control::GetTurnResponse { turn: Some(turn.clone()), ..control::GetTurnResponse::default() };
            self.note(&format!("── {}", verdict(&result, worked, "/retry")));
        }
    }

    fn event(&mut self, turn_id: &str, body: &engine::EventBody) {
        let Some(kind) = &body.kind else { return };
        match kind {
            Kind::Text(text) => self.text(text),
            Kind::Session(session) if session.state == engine::session_event::State::Opened as i32 => {
                let line = self.origin(turn_id, session);
                self.note(&line);
            }
            Kind::PermissionRequest(asked) => self.note(&format!("asks      {}", render::permission(asked))),
            // The turn's own state says it, with the tokens.
            Kind::Terminal(_) | Kind::Usage(_) | Kind::Phase(_) | Kind::Reasoning(_) => {}
            Kind::Session(_)
            | Kind::ToolCall(_)
            | Kind::ToolResult(_)
            | Kind::FileChange(_)
            | Kind::PermissionAnswer(_)
            | Kind::Quota(_)
            | Kind::Notice(_)
            | Kind::Evidence(_) => {
                if let Some(words) = render::body(body).filter(|_| !render::is_bookkeeping(kind)) {
                    self.note(&words);
                }
            }
        }
    }

    fn text(&mut self, text: &engine::TextEvent) {
        let flag = if text.incomplete { " (interrupted)" } else { "" };
        if self.editing {
            let said = harmless(&text.text).trim_end().to_owned();
            if let Some(printer) = self.printer.as_mut() {
                drop(printer.print(format!("{said}{flag}\n")));
            }
            return;
        }
        match self.live.as_mut() {
            Some(live) => {
                let mut print = live.text(&text.item_id, &text.text);
                if !flag.is_empty() {
                    print.push_str(&format!("{}\n", flag.trim_start()));
                }
                self.output.raw(&print);
            }
            None => self.output.data(&text.text),
        }
    }

    /// How the turn's session came to be, and what it was told of what others said.
    fn origin(&self, turn_id: &str, event: &engine::SessionEvent) -> String {
        let session = self.sessions.get(&event.session_id);
        let turn = self.turns.get(turn_id);
        let of = |from_session: fn(&control::Session) -> &String,
                  from_turn: fn(&control::Turn) -> &String| {
            let known = session.map(from_session).filter(|text| !text.is_empty());
            known.or_else(|| turn.map(from_turn)).cloned().unwrap_or_default()
        };
        let agent = of(|session| &session.agent, |turn| &turn.agent);
        let engine = of(|session| &session.engine, |turn| &turn.engine);
        let who: Vec<_> = [agent, engine].into_iter().filter(|part| !part.is_empty()).collect();
        let who = if who.is_empty() { event.session_id.clone() } else { who.join(" on ") };
        format!("── {who}: {}", came_to_be(event))
    }
}

/// An origin with what was given along.
pub(crate) fn came_to_be(event: &engine::SessionEvent) -> String {
    let resumed = event.origin == engine::Origin::Resumed as i32;
    let mut text = json::origin(event.origin);
    if event.summary_given {
        text.push_str(", given the summary");
    }
    if event.history_given {
        text.push_str(if resumed { ", given what it missed" } else { ", seeded with what was said before" });
    }
    if !event.replaces.is_empty() {
        text.push_str(&format!(", in place of {}", event.replaces));
    }
    if !event.reason.is_empty() {
        text.push_str(&format!(": {}", event.reason));
    }
    text
}

/// The end of what was said so far, for somebody who comes in.
pub(super) fn so_far(messages: &[control::Message]) -> String {
    let line = |message: &control::Message| {
        let flag = if message.incomplete { " (interrupted)" } else { "" };
        format!("{}: {}{flag}", message.actor, first_line(&message.text, 200))
    };
    messages.iter().map(line).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use pretty_assertions::assert_eq;

    use super::*;

    #[test]
    fn s61_an_origin_says_what_was_given_and_nothing_else() {
        let event = |origin: engine::Origin, history_given| engine::SessionEvent {
            origin: origin.into(),
            history_given,
            ..engine::SessionEvent::default()
        };
        assert_eq!(came_to_be(&event(engine::Origin::Started, false)), "STARTED");
        assert_eq!(
            came_to_be(&event(engine::Origin::Started, true)),
            "STARTED, seeded with what was said before"
        );
        assert_eq!(came_to_be(&event(engine::Origin::Resumed, true)), "RESUMED, given what it missed");
        let replaced = engine::SessionEvent {
            replaces: "ses_1".to_owned(),
            summary_given: true,
            ..event(engine::Origin::Replaced, true)
        };
        assert_eq!(
            came_to_be(&replaced),
            "REPLACED, given the summary, seeded with what was said before, in place of ses_1"
        );
    }
}
