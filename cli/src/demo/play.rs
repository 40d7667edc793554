//! The turns of the demo.

use std::path::Path;
use std::time::Duration;

use roundhouse_proto::control::v1 as control;
use roundhouse_proto::control::v1::stream_events_response::Item;
use roundhouse_proto::engine::v1 as engine;
use roundhouse_proto::engine::v1::event_body::Kind;

use crate::client::{self, Client, call, incomplete};
use crate::commands::turns::origin;
use crate::demo::say;
use crate::demo::stage::{AGENT, Stage};
use crate::events::render::{self, Live};
use crate::events::{Follower, Next, Wish};
use crate::exit::Exit;
use crate::json;
use crate::output::Output;
use crate::status::Failure;

/// The file that the first turn writes.
const NOTES: &str = "NOTES.md";
/// The file by which the long command says that it runs.
const RUNNING: &str = "check.running";
/// No turn of the demo takes longer.
const TURN_LIMIT: Duration = Duration::from_secs(180);

/// What the demo does while a turn runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Meanwhile {
    Nothing,
    /// Cancels the turn once its tool runs.
    Cancel,
    /// Kills the runner in the middle of the answer, and starts it again.
    KillRunner,
}

struct Act {
    /// For the table.
    what: &'static str,
    /// What is said to the agent; its first words are what the scripted model listens for.
    says: &'static str,
    meanwhile: Meanwhile,
    expected: control::TurnStatus,
}

const ACTS: [Act; 4] = [
    Act {
        what: "a tool writes a file",
        says: "Write a file NOTES.md with one sentence on what a roundhouse is, then say that it is done.",
        meanwhile: Meanwhile::Nothing,
        expected: control::TurnStatus::Completed,
    },
    Act {
        what: "cancelled in a tool",
        says: "Run exactly this command with Bash and wait for it: \
               echo yes > check.running && node -e 'setTimeout(() => {}, 120000)'",
        meanwhile: Meanwhile::Cancel,
        expected: control::TurnStatus::Cancelled,
    },
    Act {
        what: "kill -9 of the runner",
        says: "Tell me in about sixty words how the turntable of a roundhouse works. Use no tool.",
        meanwhile: Meanwhile::KillRunner,
        expected: control::TurnStatus::Completed,
    },
    Act {
        what: "goes on as before",
        says: "What have we done so far? Answer in one sentence, without a tool.",
        meanwhile: Meanwhile::Nothing,
        expected: control::TurnStatus::Completed,
    },
];

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
    pub(super) milliseconds: Option<i64>,
    pub(super) tokens: (Option<u64>, Option<u64>),
    /// What should be there and is not.
    pub(super) missing: Option<String>,
}

/// What the scripted model says: words to listen for, and a script.
pub(super) fn scripts(workspace: &Path) -> Vec<(&'static str, String)> {
    let notes = workspace.join(NOTES);
    let slowly: String = "The turntable is a bridge on a pivot. It carries one engine at a time, turns until its \
        rails meet those of a stall, and is locked there. The engine rolls off, and the bridge is free for the next. \
        A small motor, or two patient people at a long lever, is all it takes, because the weight is in balance."
        .split_inclusive(' ')
        .map(|word| format!("[[text:{word}]][[pause ms=80]]"))
        .collect();
    vec![
        (
            "Write a file NOTES.md",
            format!(
                "[[text:I will write it down.]][[write path={}:A roundhouse is where engines are kept, turned round \
                 and put back on the track.\n]][[text:NOTES.md is written.]]",
                notes.display()
            ),
        ),
        (
            "Run exactly this command",
            "[[text:I start the command.]][[bash:echo yes > check.running && node -e 'setTimeout(() => {}, 120000)']]\
             [[text:The command has ended.]]"
                .to_owned(),
        ),
        ("Tell me in about sixty words", slowly),
        (
            "What have we done so far?",
            "[[text:We wrote NOTES.md, stopped a long command half way, and talked about the turntable while the \
             runner was killed and came back.]]"
                .to_owned(),
        ),
    ]
}

/// Plays all turns.
pub(super) async fn all(stage: &mut Stage, output: Output) -> Result<Vec<Played>, Failure> {
    let client = Client::new(&stage.stack.control_plane.url())?;
    let request = control::CreateConversationRequest {
        request_id: client::request_id(None),
        title: "The demo".to_owned(),
        workspace: stage.workspace.display().to_string(),
        agent: AGENT.to_owned(),
        external_id: None,
    };
    let made = client.conversations().create_conversation(call(request)).await?.into_inner();
    let conversation = made.conversation.ok_or_else(|| incomplete("the conversation"))?.conversation_id;
    let mut played = Vec::new();
    for (number, act) in (1..).zip(&ACTS) {
        say(output, &format!("turn {number}: {}", act.what));
        let turn = tokio::time::timeout(TURN_LIMIT, self::act(stage, &client, &conversation, act, output))
            .await
            .map_err(|_| {
                Failure::new(
                    Exit::Failed,
                    format!("turn {number} did not end within {} s", TURN_LIMIT.as_secs()),
                )
                .next("run it again with --keep, and look at the logs it names")
            })??;
        played.push(turn);
    }
    Ok(played)
}

async fn act(
    stage: &mut Stage,
    client: &Client,
    conversation: &str,
    act: &Act,
    output: Output,
) -> Result<Played, Failure> {
    if !output.is_json() {
        output.data(&format!("> {}", act.says));
    }
    let request = control::SendMessageRequest {
        request_id: client::request_id(None),
        conversation_id: conversation.to_owned(),
        text: act.says.to_owned(),
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
    let running = stage.workspace.join(RUNNING);
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
    finish(client, stage, act, &turn_id, missed).await
}

async fn finish(
    client: &Client,
    stage: &Stage,
    act: &Act,
    turn_id: &str,
    missed: Option<String>,
) -> Result<Played, Failure> {
    let request = control::GetTurnRequest { turn_id: turn_id.to_owned() };
    let answer = client.conversations().get_turn(call(request)).await?.into_inner();
    let turn = answer.turn.ok_or_else(|| incomplete("the turn"))?;
    let writes = act.says.starts_with("Write a file");
    let unwritten =
        (writes && !stage.workspace.join(NOTES).is_file()).then(|| format!("{NOTES} was not written"));
    let failed = turn.failure.as_ref().filter(|_| act.expected != control::TurnStatus::Cancelled);
    let failed = failed.map(|failure| {
        format!("{}: {}; {}", json::failure_reason(failure.reason), failure.message, failure.next_action)
    });
    Ok(Played {
        what: act.what,
        turn_id: turn.turn_id.clone(),
        agent: turn.agent.clone(),
        engine: turn.engine.clone(),
        origin: origin(&turn),
        outcome: json::turn_status(turn.status),
        expected: json::turn_status(act.expected.into()),
        milliseconds: answer.duration.as_ref().map(json::milliseconds),
        tokens: render::tokens(turn.usage.as_ref()),
        missing: missed.or(unwritten).or(failed),
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
            self.output.note(text);
        }
    }

    fn close(&mut self) {
        let end = self.live.end_line();
        if !self.output.is_json() {
            self.output.raw(&end);
        }
    }
}

#[cfg(test)]
mod tests {
    use roundhouse_models::Script;

    use super::*;

    #[test]
    fn every_act_has_a_script_that_can_be_read_and_none_answers_another() {
        let scripts = scripts(Path::new("/w"));
        for act in &ACTS {
            let heard: Vec<_> = scripts.iter().filter(|(words, _)| act.says.contains(words)).collect();
            assert_eq!(heard.len(), 1, "{}", act.says);
        }
        for (_, script) in &scripts {
            assert!(!Script::parse(script).unwrap().replies().is_empty());
        }
    }
}
