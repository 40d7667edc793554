//! The turns of the demo.

use std::path::Path;
use std::time::Duration;

use roundhouse_proto::control::v1 as control;
use roundhouse_proto::control::v1::stream_events_response::Item;
use roundhouse_proto::engine::v1 as engine;
use roundhouse_proto::engine::v1::event_body::Kind;

use crate::chat::came_to_be;
use crate::client::{self, Client, call, incomplete};
use crate::demo::acts::{ACTS, Act, Meanwhile, NOTES, RUNNING};
use crate::demo::stage::Stage;
use crate::demo::told::{Earlier, Told};
use crate::demo::{say, tell};
use crate::events::render::{self, Live};
use crate::events::{Follower, Next, Wish};
use crate::exit::Exit;
use crate::json;
use crate::output::Output;
use crate::status::Failure;

/// No turn of the demo takes longer.
const TURN_LIMIT: Duration = Duration::from_secs(180);

/// How a turn went.
#[derive(Debug)]
pub(super) struct Played {
    pub(super) what: &'static str,
    pub(super) turn_id: String,
    pub(super) agent: String,
    pub(super) engine: String,
    pub(super) origin: String,
    pub(super) outcome: String,
    pub(super) expected: String,
    /// What the model was told, by its own log; none of a real model.
    pub(super) told: Option<Told>,
    pub(super) milliseconds: Option<i64>,
    pub(super) tokens: (Option<u64>, Option<u64>),
    /// What should be there and is not, or should be otherwise.
    pub(super) missing: Vec<String>,
}

/// Plays all turns.
pub(super) async fn all(stage: &mut Stage, output: Output) -> Result<Vec<Played>, Failure> {
    let client = Client::new(&stage.stack.control_plane.url())?;
    let request = control::CreateConversationRequest {
        request_id: client::request_id(None),
        title: "The demo".to_owned(),
        workspace: String::new(),
        agent: String::new(),
        external_id: None,
    };
    let made = client.conversations().create_conversation(call(request)).await?.into_inner();
    let conversation = made.conversation.ok_or_else(|| incomplete("the conversation"))?.conversation_id;
    let mut played = Vec::new();
    let mut earlier: Vec<Earlier> = Vec::new();
    for (number, act) in (1..).zip(&ACTS) {
        say(output, &format!("turn {number}: {}", act.what));
        let played_act = self::act(stage, &client, &conversation, act, &earlier, output);
        let turn = tokio::time::timeout(TURN_LIMIT, played_act).await.map_err(|_| {
            Failure::new(Exit::Failed, format!("turn {number} did not end within {} s", TURN_LIMIT.as_secs()))
                .next("run it again with --keep, and look at the logs it names")
        })??;
        earlier.push(Earlier { number, says: act.says });
        played.push(turn);
    }
    Ok(played)
}

async fn act(
    stage: &mut Stage,
    client: &Client,
    conversation: &str,
    act: &Act,
    earlier: &[Earlier],
    output: Output,
) -> Result<Played, Failure> {
    tell(output, &format!("> @{} {}", act.agent, act.says));
    let request = control::SendMessageRequest {
        request_id: client::request_id(None),
        conversation_id: conversation.to_owned(),
        text: act.says.to_owned(),
        agent: act.agent.to_owned(),
        workspace: stage.workspace(act.place),
        ..control::SendMessageRequest::default()
    };
    let sent = client.conversations().send_message(call(request)).await?.into_inner();
    let turn_id = sent.turn.ok_or_else(|| incomplete("the turn"))?.turn_id;
    let wish = Wish {
        conversation_id: conversation.to_owned(),
        turn_id: Some(turn_id.clone()),
        partials: true,
        follow: true,
        after: String::new(),
    };
    let mut follower = Follower::new(client.clone(), wish).reached();
    let mut scene = Scene { client, output, live: Live::default(), turn_id: &turn_id, tool_called: false };
    let running = stage.directory_of(act.place).join(RUNNING);
    let mut todo = act.meanwhile;
    loop {
        // The tool says by a file that it runs; nothing else tells that from outside.
        let tool_runs = todo == Meanwhile::Cancel && scene.tool_called;
        let next = tokio::select! {
            next = follower.next() => next?,
            () = appears(&running), if tool_runs => {
                todo = Meanwhile::Nothing;
                scene.note("the tool runs; cancelling the turn");
                let request = control::CancelTurnRequest {
                    request_id: client::request_id(None), turn_id: turn_id.clone(),
                };
                client.conversations().cancel_turn(call(request)).await?;
                continue;
            }
        };
        match next {
            Next::End => break,
            Next::Lost(failure) => scene.note(&format!("{}; taking the stream up again", failure.message)),
            Next::Back => scene.note("the stream goes on"),
            Next::Item(item) => {
                let text_began = scene.show(&item).await?;
                if text_began && todo == Meanwhile::KillRunner {
                    todo = Meanwhile::Nothing;
                    scene.note("kill -9 of the runner; the engine goes on under its keeper");
                    stage.stack.runner.kill().await?;
                    stage.stack.runner.restart().await?;
                    scene.note("the runner is started again, and takes the engine over");
                }
            }
        }
    }
    scene.close();
    let missed = match (act.meanwhile, todo) {
        (_, Meanwhile::Nothing) => None,
        _ => Some(format!("{}: the turn ended before its moment came", act.what)),
    };
    let told = stage.told(act, earlier);
    if let Some(told) = &told {
        tell(output, &format!("told      by the model's own log: {}", told.sentence()));
    }
    finish(client, stage, act, &turn_id, told, missed).await
}

async fn finish(
    client: &Client,
    stage: &Stage,
    act: &Act,
    turn_id: &str,
    told: Option<Told>,
    missed: Option<String>,
) -> Result<Played, Failure> {
    let request = control::GetTurnRequest { turn_id: turn_id.to_owned() };
    let answer = client.conversations().get_turn(call(request)).await?.into_inner();
    let turn = answer.turn.ok_or_else(|| incomplete("the turn"))?;
    let writes = act.says.starts_with("Write a file");
    let unwritten = (writes && !stage.directory_of(act.place).join(NOTES).is_file())
        .then(|| format!("{NOTES} was not written"));
    let failed = turn.failure.as_ref().filter(|_| act.outcome != control::TurnStatus::Cancelled);
    let failed = failed.map(|failure| {
        format!("{}: {}; {}", json::failure_reason(failure.reason), failure.message, failure.next_action)
    });
    let other = (turn.origin != i32::from(act.origin)).then(|| {
        format!(
            "{}: its session is {} instead of {}",
            act.what,
            json::origin(turn.origin),
            json::origin(act.origin.into())
        )
    });
    let untold = told.as_ref().and_then(|told| told.complaint(act.natively, act.as_context));
    let untold = untold.map(|complaint| format!("{}: {complaint}", act.what));
    Ok(Played {
        what: act.what,
        turn_id: turn.turn_id.clone(),
        agent: turn.agent.clone(),
        engine: turn.engine.clone(),
        origin: json::origin(turn.origin),
        outcome: json::turn_status(turn.status),
        expected: json::turn_status(act.outcome.into()),
        told,
        milliseconds: answer.duration.as_ref().map(json::milliseconds),
        tokens: render::tokens(turn.usage.as_ref()),
        missing: [missed, unwritten, failed, other, untold].into_iter().flatten().collect(),
    })
}

/// Waits until a file is there. Cancellation safe.
async fn appears(file: &Path) {
    while !file.exists() {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// What is shown of one turn.
struct Scene<'a> {
    client: &'a Client,
    output: Output,
    live: Live,
    turn_id: &'a str,
    tool_called: bool,
}

impl Scene<'_> {
    /// Shows an item. Whether it was text of the answer.
    async fn show(&mut self, item: &control::StreamEventsResponse) -> Result<bool, Failure> {
        if self.output.is_json() {
            self.output.item(&json::stream_item(item));
        }
        match &item.item {
            Some(Item::Partial(partial)) => {
                let Some(partial) = partial.partial.as_ref().filter(|partial| !partial.reasoning) else {
                    return Ok(false);
                };
                let text = self.live.partial(partial);
                if !self.output.is_json() {
                    self.output.raw(&text);
                }
                Ok(!partial.text.is_empty())
            }
            Some(Item::PartialReset(_)) => {
                let end = self.live.reset();
                if !self.output.is_json() {
                    self.output.raw(&end);
                }
                Ok(false)
            }
            Some(Item::TurnEvent(event)) if event.turn_id == self.turn_id => {
                let Some(body) = &event.body else { return Ok(false) };
                self.event(body).await?;
                Ok(false)
            }
            Some(
                Item::TurnEvent(_) | Item::Message(_) | Item::Turn(_) | Item::Session(_) | Item::Summary(_),
            )
            | None => Ok(false),
        }
    }

    async fn event(&mut self, body: &engine::EventBody) -> Result<(), Failure> {
        match &body.kind {
            Some(Kind::Text(text)) => {
                let text = self.live.text(&text.item_id, &text.text);
                if !self.output.is_json() {
                    self.output.raw(&text);
                }
            }
            Some(Kind::PermissionRequest(asked)) => {
                self.note(&format!(
                    "asks      {}",
                    render::permission(asked).lines().next().unwrap_or_default()
                ));
                let request = control::AnswerPermissionRequest {
                    request_id: client::request_id(None),
                    permission_request_id: asked.request_id.clone(),
                    decision: engine::PermissionDecision::Allow.into(),
                    feedback: String::new(),
                };
                self.client.conversations().answer_permission(call(request)).await?;
            }
            Some(Kind::Usage(_) | Kind::Reasoning(_) | Kind::Phase(_)) | None => {}
            Some(
                kind @ (Kind::Session(_)
                | Kind::ToolCall(_)
                | Kind::ToolResult(_)
                | Kind::FileChange(_)
                | Kind::PermissionAnswer(_)
                | Kind::Quota(_)
                | Kind::Notice(_)
                | Kind::Evidence(_)
                | Kind::Terminal(_)),
            ) => {
                self.tool_called |= matches!(kind, Kind::ToolCall(_));
                if let Kind::Session(session) = kind
                    && session.state == engine::session_event::State::Opened as i32
                {
                    self.note(&format!("session   {}", came_to_be(session)));
                    return Ok(());
                }
                if let Some(words) = render::body(body).filter(|_| !render::is_bookkeeping(kind)) {
                    self.note(&words);
                }
            }
        }
        Ok(())
    }

    fn note(&mut self, text: &str) {
        if !self.output.is_json() {
            self.close();
            tell(self.output, text);
        }
    }

    fn close(&mut self) {
        let end = self.live.end_line();
        if !self.output.is_json() {
            self.output.raw(&end);
        }
    }
}
