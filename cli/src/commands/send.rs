//! `send`, `retry`, `cancel`, and how a turn is followed to its end.

use std::io::Read as _;
use std::time::{Duration, Instant};

use roundhouse_proto::control::v1 as control;
use roundhouse_proto::control::v1::stream_events_response::Item;
use roundhouse_proto::engine::v1::event_body::Kind;
use serde_json::{Value, json};
use tokio::time::{Interval, MissedTickBehavior};

use crate::args::{CancelArgs, RetryArgs, SendArgs};
use crate::client::{self, Client, ConversationName, call, incomplete};
use crate::commands::turns::origin;
use crate::events::render::{self, Live};
use crate::events::{Follower, Next, Wish};
use crate::exit::Exit;
use crate::interrupts::Interrupts;
use crate::json;
use crate::output::{Output, first_line};
use crate::status::Failure;

/// The longest message that the server takes.
const MAX_TEXT_BYTES: usize = 1024 * 1024;
/// Longest title made of a message.
const TITLE_CHARS: usize = 80;
/// How long the ended turn is asked for while the server is away.
const RESULT_PATIENCE: Duration = Duration::from_secs(60);
/// When a turn that has not begun is asked what it waits for.
const FIRST_LOOK: Duration = Duration::from_secs(1);
const LOOK_EVERY: Duration = Duration::from_secs(5);

pub(crate) async fn send(client: &Client, args: SendArgs, output: Output) -> Result<Exit, Failure> {
    let text = if args.text == "-" { read_text()? } else { args.text };
    if text.trim().is_empty() {
        return Err(Failure::new(Exit::Usage, "the message is empty"));
    }
    if text.len() > MAX_TEXT_BYTES {
        let message = format!("the message has {} bytes, more than the {MAX_TEXT_BYTES} allowed", text.len());
        return Err(
            Failure::new(Exit::Invalid, message).next("put it into a file of the workspace and name that")
        );
    }
    let request_id = client::request_id(args.request_id);
    let sent = async {
        let (conversation_id, new) =
            conversation(client, args.conversation.as_deref(), &request_id, &text).await?;
        let workspace = match args.workspace {
            Some(named) => client::workspace(&named, &client::current_directory()?)?,
            None if new => client::workspace(".", &client::current_directory()?)?,
            None => String::new(),
        };
        let request = control::SendMessageRequest {
            request_id: request_id.clone(),
            conversation_id,
            text,
            agent: args.agent.unwrap_or_default(),
            workspace,
            actor: args.actor.unwrap_or_default(),
        };
        Ok(client.conversations().send_message(call(request)).await?.into_inner())
    };
    let answer: control::SendMessageResponse = sent.await.map_err(|failure: Failure| {
        if failure.exit == Exit::Unreachable && !failure.code.is_empty() {
            let next = failure.next.clone().unwrap_or_default();
            return failure
                .next(format!("{next}\n      whether it was stored is not known: a repeat with --request-id {request_id} is harmless"));
        }
        failure
    })?;
    let message = answer.message.ok_or_else(|| incomplete("the message"))?;
    let turn = answer.turn.ok_or_else(|| incomplete("the turn"))?;
    let repeated = answer.repeated_request;
    let base = json!({
        "conversation_id": turn.conversation_id,
        "message": json::message(&message),
        "turn": json::turn(&turn),
        "repeated_request": repeated,
    });
    if args.wait {
        if !output.is_json() {
            let again = if repeated { " (sent before)" } else { "" };
            output.note(&format!("conversation {}, turn {}{again}", turn.conversation_id, turn.turn_id));
        }
        return follow(client, &turn, base, output).await;
    }
    output.result(
        || base,
        || {
            format!(
                "conversation {}\nturn {} {}",
                turn.conversation_id,
                turn.turn_id,
                json::turn_status(turn.status)
            )
        },
    );
    if !output.is_json() {
        output.note(&how_to_follow(&turn));
    }
    Ok(Exit::Done)
}

fn how_to_follow(turn: &control::Turn) -> String {
    format!("follow it: roundhouse events --follow --turn {} {}", turn.turn_id, turn.conversation_id)
}

/// The conversation's id, and whether it may have been made just now, so that its first message names a workspace.
async fn conversation(
    client: &Client,
    named: Option<&str>,
    request_id: &str,
    text: &str,
) -> Result<(String, bool), Failure> {
    let external_id = match named.map(ConversationName::parse).transpose()? {
        Some(ConversationName::Id(id)) => return Ok((id, false)),
        Some(ConversationName::External(external)) => Some(external),
        None => None,
    };
    // A repeat of this command under the same request id finds the same conversation.
    let request = control::CreateConversationRequest {
        request_id: if external_id.is_some() {
            client::request_id(None)
        } else {
            format!("{request_id}-new")
        },
        external_id,
        title: first_line(text, TITLE_CHARS),
        workspace: String::new(),
        agent: String::new(),
    };
    let answer = client.conversations().create_conversation(call(request)).await?.into_inner();
    let conversation = answer.conversation.ok_or_else(|| incomplete("the conversation"))?;
    // Whether it has a workspace decides, not whether this call made it: an earlier try may have made it and failed.
    let new = conversation.workspace_id.is_empty();
    Ok((conversation.conversation_id, new))
}

fn read_text() -> Result<String, Failure> {
    let mut bytes = Vec::new();
    let limit = MAX_TEXT_BYTES as u64 + 1;
    std::io::stdin()
        .lock()
        .take(limit)
        .read_to_end(&mut bytes)
        .map_err(|error| Failure::new(Exit::Failed, format!("standard input: {error}")))?;
    String::from_utf8(bytes).map_err(|_| Failure::new(Exit::Invalid, "standard input is not UTF-8"))
}

pub(crate) async fn retry(client: &Client, args: RetryArgs, output: Output) -> Result<Exit, Failure> {
    let request =
        control::RetryTurnRequest { request_id: client::request_id(args.request_id), turn_id: args.turn };
    let answer = client.conversations().retry_turn(call(request)).await?.into_inner();
    let turn = answer.turn.ok_or_else(|| incomplete("the turn"))?;
    let base = json!({"turn": json::turn(&turn)});
    if args.wait {
        if !output.is_json() {
            output.note(&format!("turn {}", turn.turn_id));
        }
        return follow(client, &turn, base, output).await;
    }
    output.result(|| base, || format!("turn {} {}", turn.turn_id, json::turn_status(turn.status)));
    if !output.is_json() {
        output.note(&how_to_follow(&turn));
    }
    Ok(Exit::Done)
}

pub(crate) async fn cancel(client: &Client, args: CancelArgs, output: Output) -> Result<Exit, Failure> {
    let request =
        control::CancelTurnRequest { request_id: client::request_id(args.request_id), turn_id: args.turn };
    let answer = client.conversations().cancel_turn(call(request)).await?.into_inner();
    let mut turn = answer.turn.ok_or_else(|| incomplete("the turn"))?;
    if args.wait && !ended(turn.status) {
        wait_for_end(client, &turn).await?;
        let result = result(client, &turn.turn_id).await?;
        turn = result.turn.ok_or_else(|| incomplete("the turn"))?;
    }
    output.result(
        || json!({"turn": json::turn(&turn), "already_ended": answer.already_ended}),
        || {
            let status = json::turn_status(turn.status);
            if answer.already_ended { format!("it had ended before: {status}") } else { status }
        },
    );
    Ok(Exit::Done)
}

/// Waits for the end of a turn without showing anything.
async fn wait_for_end(client: &Client, turn: &control::Turn) -> Result<(), Failure> {
    let mut follower = Follower::new(client.clone(), wish(turn, false)).reached();
    while !matches!(follower.next().await?, Next::End) {}
    Ok(())
}

fn wish(turn: &control::Turn, partials: bool) -> Wish {
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
async fn follow(client: &Client, turn: &control::Turn, base: Value, output: Output) -> Result<Exit, Failure> {
    let mut interrupts = Interrupts::new()?;
    let live = output.is_live();
    let mut show = Show { output, live: live.then(Live::default) };
    let mut follower = Follower::new(client.clone(), wish(turn, live)).reached();
    let mut waits = Waits::new(turn);
    loop {
        let next = tokio::select! {
            next = follower.next() => next?,
            for_what = waits.told(client), if !waits.over && !output.is_json() => {
                output.note(&format!("waits     {for_what}"));
                continue;
            }
            () = interrupts.next() => {
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
        () = interrupts.next() => return Ok(Exit::Cancelled),
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
        output.note(&verdict(turn, &result));
    }
    Ok(exit_of(turn.status))
}

/// What a turn waits for before it begins. No event tells it, and it may take hours.
struct Waits {
    turn_id: String,
    told: String,
    look: Interval,
    /// It has begun: its events say the rest.
    over: bool,
}

impl Waits {
    fn new(turn: &control::Turn) -> Self {
        let mut look = tokio::time::interval_at(tokio::time::Instant::now() + FIRST_LOOK, LOOK_EVERY);
        look.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Self { turn_id: turn.turn_id.clone(), told: String::new(), look, over: false }
    }

    /// Waits until there is something new to tell. Cancellation safe.
    async fn told(&mut self, client: &Client) -> String {
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
fn exit_of(status: i32) -> Exit {
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

fn verdict(turn: &control::Turn, result: &control::GetTurnResponse) -> String {
    let mut parts = vec![json::turn_status(turn.status).to_lowercase()];
    if let Some(duration) = &result.duration {
        parts.push(render::seconds(json::milliseconds(duration)));
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
            text.push_str(&format!("\n  try again: roundhouse retry --wait {}", turn.turn_id));
        }
    }
    text
}

/// The ended turn with its messages. A server that is just coming back is waited for.
async fn result(client: &Client, turn_id: &str) -> Result<control::GetTurnResponse, Failure> {
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
