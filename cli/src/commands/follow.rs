//! How a turn is followed to its end.

use std::time::{Duration, Instant};

use roundhouse_proto::control::v1 as control;
use roundhouse_proto::control::v1::stream_events_response::Item;
use roundhouse_proto::engine::v1::event_body::Kind;
use serde_json::Value;
use tokio::time::{Interval, MissedTickBehavior};

use crate::client::{Client, call, incomplete};
use crate::commands::turns::origin;
use crate::events::render::{self, Live};
use crate::events::{Follower, Next, Wish};
use crate::exit::Exit;
use crate::interrupts::Interrupts;
use crate::json;
use crate::output::Output;
use crate::status::Failure;

/// How long the ended turn is asked for while the server is away.
const RESULT_PATIENCE: Duration = Duration::from_secs(60);
/// When a turn that has not begun is asked what it waits for.
const FIRST_LOOK: Duration = Duration::from_secs(1);
const LOOK_EVERY: Duration = Duration::from_secs(5);

/// The command that follows a turn.
pub(crate) fn how_to_follow(turn: &control::Turn) -> String {
    format!("follow it: roundhouse events --follow --turn {} {}", turn.turn_id, turn.conversation_id)
}

/// Waits for the end of a turn without showing anything.
pub(crate) async fn wait_for_end(client: &Client, turn: &control::Turn) -> Result<(), Failure> {
    let mut follower = Follower::new(client.clone(), wish(turn, false)).reached();
    while !matches!(follower.next().await?, Next::End) {}
    Ok(())
}

pub(crate) fn wish(turn: &control::Turn, partials: bool) -> Wish {
    Wish {
        conversation_id: turn.conversation_id.clone(),
        turn_id: Some(turn.turn_id.clone()),
        after: String::new(),
        partials,
        follow: true,
    }
}

/// Whether a status is terminal.
pub(crate) fn ended(status: i32) -> bool {
    use control::TurnStatus as S;
    match S::try_from(status) {
        Ok(S::Completed | S::Failed | S::Cancelled | S::Lost) => true,
        Ok(
            S::Unspecified
            | S::Queued
            | S::Dispatching
            | S::Running
            | S::WaitingForPermission
            | S::Cancelling,
        )
        | Err(_) => false,
    }
}

/// Follows a turn to its end and prints its answer. `base` is the JSON that the answer is added to.
pub(crate) async fn follow(
    client: &Client,
    turn: &control::Turn,
    base: Value,
    output: Output,
) -> Result<Exit, Failure> {
    let mut interrupts = Interrupts::new()?;
    let live = output.is_live();
    let mut show = Show { output, live: live.then(Live::default) };
    let mut follower = Follower::new(client.clone(), wish(turn, live)).reached();
    let mut waits = Waits::new(turn);
    let mut worked_for = None;
    loop {
        let next = tokio::select! {
            next = follower.next() => next?,
            for_what = waits.told(client), if !waits.over && !output.is_json() => {
                output.note(&format!("waits     {for_what}"));
                continue;
            }
            _ = interrupts.next() => {
                show.close();
                output.note(&format!(
                    "the turn goes on without this command\n  {}\n  cancel it: roundhouse cancel {}",
                    how_to_follow(turn),
                    turn.turn_id
                ));
                return Ok(Exit::Cancelled);
            }
        };
        match next {
            Next::Item(item) => {
                worked_for = worked_for.or_else(|| worked(&item));
                waits.over |= matches!(&item.item, Some(Item::TurnEvent(_)));
                show.item(&item);
            }
            Next::Lost(failure) => {
                show.close();
                output.note(&format!("{}; the turn goes on, waiting for the server", failure.message));
            }
            Next::Back => output.note("the server is back"),
            Next::End => break,
        }
    }
    show.close();
    let result = tokio::select! {
        result = result(client, &turn.turn_id) => result?,
        _ = interrupts.next() => return Ok(Exit::Cancelled),
    };
    let turn = result.turn.as_ref().ok_or_else(|| incomplete("the turn"))?;
    if output.is_json() {
        let mut whole = base;
        whole["turn"] = json::turn(turn);
        whole["answer"] = result.answer.as_ref().map(json::message).unwrap_or_default();
        output.result(|| whole, String::new);
    } else {
        if let Some(answer) = result.answer.as_ref().filter(|_| !live) {
            output.data(&answer.text);
        }
        let again = format!("roundhouse retry --wait {}", turn.turn_id);
        output.note(&verdict(&result, worked_for, &again));
    }
    Ok(exit_of(turn.status))
}

/// What a turn waits for before it begins. No event tells it, and it may take hours.
pub(crate) struct Waits {
    turn_id: String,
    told: String,
    look: Interval,
    /// It has begun: its events say the rest.
    pub(crate) over: bool,
}

impl Waits {
    pub(crate) fn new(turn: &control::Turn) -> Self {
        let mut look = tokio::time::interval_at(tokio::time::Instant::now() + FIRST_LOOK, LOOK_EVERY);
        look.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Self { turn_id: turn.turn_id.clone(), told: String::new(), look, over: false }
    }

    /// Waits until there is something new to tell. Cancellation safe.
    pub(crate) async fn told(&mut self, client: &Client) -> String {
        loop {
            self.look.tick().await;
            let request = control::GetTurnRequest { turn_id: self.turn_id.clone() };
            // An error is told by the stream, if it lasts.
            let answer = client.conversations().get_turn(call(request)).await;
            let waiting = answer.ok().and_then(|answer| answer.into_inner().waiting);
            if let Some(waiting) = waiting.filter(|waiting| waiting.next_action != self.told) {
                self.told.clone_from(&waiting.next_action);
                return waiting.next_action;
            }
        }
    }
}

/// The exit code of an ended turn.
pub(crate) fn exit_of(status: i32) -> Exit {
    use control::TurnStatus as S;
    match S::try_from(status) {
        Ok(S::Completed) => Exit::Done,
        Ok(S::Cancelled) => Exit::Cancelled,
        Ok(
            S::Failed
            | S::Lost
            | S::Unspecified
            | S::Queued
            | S::Dispatching
            | S::Running
            | S::WaitingForPermission
            | S::Cancelling,
        )
        | Err(_) => Exit::Failed,
    }
}

/// Where a turn's time went.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Times {
    /// From the message's arrival to the start of the work, in milliseconds.
    pub(crate) waited: i64,
    /// The work, in milliseconds.
    pub(crate) worked: i64,
}

/// Waits that nobody minds.
const SHORT_WAIT_MS: i64 = 1_000;

impl Times {
    /// Of a turn that has ended, with what its terminal event says of the work. None while that is not known.
    pub(crate) fn of(turn: &control::Turn, worked: Option<i64>) -> Option<Self> {
        let at = |time: &Option<prost_types::Timestamp>| {
            json::timestamp(time.as_ref()).map(|time| time.as_millisecond())
        };
        let whole = at(&turn.end_time)?.saturating_sub(at(&turn.create_time)?);
        // A turn that no runner took has waited all the time. Two clocks are never quite equal.
        let worked = worked.unwrap_or(0).clamp(0, whole.max(0));
        Some(Self { waited: whole.saturating_sub(worked).max(0), worked })
    }

    /// In words.
    pub(crate) fn words(self) -> String {
        let Self { waited, worked } = self;
        if waited < SHORT_WAIT_MS {
            return render::seconds(worked.saturating_add(waited));
        }
        format!("worked {}, waited {} before", render::seconds(worked), render::seconds(waited))
    }
}

/// A turn's end in words: outcome, time, engine, origin, tokens; and of a failure why, and what to do next. `again` is
/// how it is tried again.
pub(crate) fn verdict(result: &control::GetTurnResponse, worked: Option<i64>, again: &str) -> String {
    let Some(turn) = &result.turn else { return String::new() };
    let mut parts = vec![json::turn_status(turn.status).to_lowercase()];
    match (Times::of(turn, worked), &result.duration) {
        (Some(times), _) => parts.push(times.words()),
        (None, Some(duration)) => parts.push(render::seconds(json::milliseconds(duration))),
        (None, None) => {}
    }
    for part in [turn.engine.clone(), origin(turn)] {
        if !part.is_empty() {
            parts.push(part);
        }
    }
    if turn.usage.is_some() {
        parts.push(render::usage(turn.usage.as_ref()));
    }
    let mut text = parts.join(" · ");
    if let Some(failure) = &turn.failure {
        text.push_str(&format!("\n{}", render::failure(failure)));
        if failure.retryable {
            text.push_str(&format!("\n  try again: {again}"));
        }
    }
    text
}

/// What the terminal event says of the work's time, in milliseconds.
pub(crate) fn worked(item: &control::StreamEventsResponse) -> Option<i64> {
    let Some(Item::TurnEvent(event)) = &item.item else { return None };
    match event.body.as_ref()?.kind.as_ref()? {
        Kind::Terminal(terminal) => terminal.duration.as_ref().map(json::milliseconds),
        Kind::Session(_)
        | Kind::Phase(_)
        | Kind::Text(_)
        | Kind::Reasoning(_)
        | Kind::ToolCall(_)
        | Kind::ToolResult(_)
        | Kind::FileChange(_)
        | Kind::PermissionRequest(_)
        | Kind::PermissionAnswer(_)
        | Kind::Usage(_)
        | Kind::Quota(_)
        | Kind::Notice(_)
        | Kind::Evidence(_) => None,
    }
}

/// The ended turn with its messages. A server that is just coming back is waited for.
pub(crate) async fn result(client: &Client, turn_id: &str) -> Result<control::GetTurnResponse, Failure> {
    let since = Instant::now();
    loop {
        let request = control::GetTurnRequest { turn_id: turn_id.to_owned() };
        match client.conversations().get_turn(call(request)).await {
            Ok(answer) => return Ok(answer.into_inner()),
            Err(status) => {
                let failure = Failure::from(status);
                if !failure.passes_by_itself() || since.elapsed() > RESULT_PATIENCE {
                    return Err(failure);
                }
                tokio::time::sleep(Duration::from_millis(200)).await;
            }
        }
    }
}

/// What a person sees of a turn: unfinished text as it comes on a terminal, everything else on standard error.
struct Show {
    output: Output,
    live: Option<Live>,
}

impl Show {
    fn item(&mut self, item: &control::StreamEventsResponse) {
        if self.output.is_json() {
            return;
        }
        match &item.item {
            Some(Item::TurnEvent(event)) => {
                if let Some(kind) = event.body.as_ref().and_then(|body| body.kind.as_ref()) {
                    self.event(kind, event.body.as_ref().and_then(render::body));
                }
            }
            Some(Item::Partial(partial)) => {
                if let (Some(live), Some(partial)) = (self.live.as_mut(), partial.partial.as_ref()) {
                    self.output.raw(&live.partial(partial));
                }
            }
            Some(Item::PartialReset(_)) => {
                if let Some(live) = self.live.as_mut() {
                    self.output.raw(&live.reset());
                }
            }
            Some(Item::Turn(turn)) if turn.status == control::TurnStatus::Queued as i32 => {
                self.output.note("waits for the turns before it");
            }
            Some(Item::Turn(_) | Item::Message(_) | Item::Session(_) | Item::Summary(_)) | None => {}
        }
    }

    fn event(&mut self, kind: &Kind, words: Option<String>) {
        match kind {
            Kind::Text(text) => {
                if let Some(live) = self.live.as_mut() {
                    self.output.raw(&live.text(&text.item_id, &text.text));
                }
            }
            // The verdict at the end says it with the usage.
            Kind::Terminal(_) | Kind::Usage(_) => {}
            Kind::Phase(_) | Kind::Reasoning(_) | Kind::Evidence(_) => {}
            Kind::Session(_)
            | Kind::ToolCall(_)
            | Kind::ToolResult(_)
            | Kind::FileChange(_)
            | Kind::PermissionRequest(_)
            | Kind::PermissionAnswer(_)
            | Kind::Quota(_)
            | Kind::Notice(_) => {
                if let Some(words) = words.filter(|_| !render::is_bookkeeping(kind)) {
                    self.close();
                    self.output.note(&words);
                }
            }
        }
    }

    fn close(&mut self) {
        if let Some(live) = self.live.as_mut() {
            self.output.raw(&live.end_line());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waiting_is_told_apart_from_work_when_there_was_any() {
        let at = |seconds| Some(prost_types::Timestamp { seconds, nanos: 0 });
        let turn = control::Turn { create_time: at(1_000), end_time: at(1_600), ..control::Turn::default() };
        let times = Times::of(&turn, Some(3_000)).unwrap();
        assert_eq!(times, Times { waited: 597_000, worked: 3_000 });
        assert_eq!(times.words(), "worked 3.0 s, waited 597.0 s before");
        assert_eq!(Times::of(&turn, Some(599_500)).unwrap().words(), "600.0 s");
        assert_eq!(Times::of(&turn, None).unwrap().words(), "worked 0.0 s, waited 600.0 s before");
        assert_eq!(Times::of(&control::Turn::default(), Some(1)), None);
    }
}
