//! `turns`: those of a conversation, or one.

use roundhouse_proto::control::v1 as control;
use serde_json::{Value, json};

use crate::args::TurnsArgs;
use crate::client::{Client, call, incomplete};
use crate::commands::conversations::{ago, more, pairs};
use crate::commands::follow::{self, Times, ended, wish};
use crate::commands::listing::message;
use crate::events::{Follower, Next, Wish, render};
use crate::exit::Exit;
use crate::json;
use crate::output::{Output, table};
use crate::status::Failure;

pub(crate) async fn run(client: &Client, args: TurnsArgs, output: Output) -> Result<Exit, Failure> {
    if args.of.starts_with("trn_") {
        return show(client, &args.of, output).await;
    }
    let request = control::ListTurnsRequest {
        conversation_id: client.conversation_id(&args.of).await?,
        page_size: args.page.limit,
        page_token: args.page.page_token.unwrap_or_default(),
    };
    let answer = client.conversations().list_turns(call(request)).await?.into_inner();
    output.result(
        || {
            json!({
                "turns": answer.turns.iter().map(json::turn).collect::<Vec<_>>(),
                "next_page_token": answer.next_page_token,
            })
        },
        || {
            let rows = answer.turns.iter().map(row).collect();
            let headings =
                ["turn", "status", "agent", "engine", "origin", "tokens in", "out", "made", "failure"];
            table(&headings, rows, "no turns")
        },
    );
    more(output, &answer.next_page_token);
    Ok(Exit::Done)
}

fn row(turn: &control::Turn) -> Vec<String> {
    let (input, out) = render::tokens(turn.usage.as_ref());
    let count = |value: Option<u64>| value.map(|value| value.to_string()).unwrap_or_default();
    vec![
        turn.turn_id.clone(),
        json::turn_status(turn.status).to_lowercase(),
        turn.agent.clone(),
        turn.engine.clone(),
        origin(turn),
        count(input),
        count(out),
        ago(turn.create_time.as_ref()),
        turn.failure.as_ref().map(|failure| json::failure_reason(failure.reason)).unwrap_or_default(),
    ]
}

/// How the turn's session came to be; empty while that is not known.
pub(crate) fn origin(turn: &control::Turn) -> String {
    if turn.origin == 0 { String::new() } else { json::origin(turn.origin).to_lowercase() }
}

async fn show(client: &Client, turn_id: &str, output: Output) -> Result<Exit, Failure> {
    let request = control::GetTurnRequest { turn_id: turn_id.to_owned() };
    let answer = client.conversations().get_turn(call(request)).await?.into_inner();
    let turn = answer.turn.as_ref().ok_or_else(|| incomplete("the turn"))?;
    let worked = if ended(turn.status) { worked(client, turn).await } else { None };
    let times = Times::of(turn, worked);
    output.result(|| details_json(&answer, times), || details(turn, &answer, times));
    Ok(Exit::Done)
}

/// What the turn's terminal event says of the time of the work. None when it cannot be had: that is no reason to show
/// nothing else.
async fn worked(client: &Client, turn: &control::Turn) -> Option<i64> {
    let mut follower = Follower::new(client.clone(), Wish { follow: false, ..wish(turn, false) });
    let mut found = None;
    loop {
        match follower.next().await.ok()? {
            Next::Item(item) => found = found.or_else(|| follow::worked(&item)),
            Next::Lost(_) | Next::Back => {}
            Next::End => return found,
        }
    }
}

fn details_json(answer: &control::GetTurnResponse, times: Option<Times>) -> Value {
    json!({
        "turn": answer.turn.as_ref().map(json::turn),
        "message": answer.message.as_ref().map(json::message),
        "answer": answer.answer.as_ref().map(json::message),
        "duration_ms": answer.duration.as_ref().map(json::milliseconds),
        "worked_ms": times.map(|times| times.worked),
        "waited_ms": times.map(|times| times.waited),
        "waiting": answer.waiting.as_ref().map(json::attention),
    })
}

fn details(turn: &control::Turn, answer: &control::GetTurnResponse, times: Option<Times>) -> String {
    let mut lines = vec![
        ("turn", turn.turn_id.clone()),
        ("conversation", turn.conversation_id.clone()),
        ("status", json::turn_status(turn.status).to_lowercase()),
    ];
    let mut add = |name: &'static str, value: String| {
        if !value.is_empty() {
            lines.push((name, value));
        }
    };
    add("agent", turn.agent.clone());
    add("engine", turn.engine.clone());
    add("model", turn.model.clone());
    add("effort", turn.effort.clone().unwrap_or_default());
    add("session", turn.session_id.clone());
    add("origin", origin(turn));
    add("workspace", turn.workspace_id.clone());
    add("retry of", turn.retry_of.clone());
    match times {
        Some(times) => {
            add("worked", render::seconds(times.worked));
            add("waited", render::seconds(times.waited));
        }
        None => {
            let so_far = answer.duration.as_ref().map(|d| render::seconds(json::milliseconds(d)));
            add("so far", so_far.unwrap_or_default());
        }
    }
    add("usage", turn.usage.as_ref().map(|usage| render::usage(Some(usage))).unwrap_or_default());
    let mut text = pairs(&lines);
    if let Some(failure) = &turn.failure {
        text.push_str(&format!("\nfailure\n{}", render::failure(failure)));
    }
    if let Some(waiting) = &answer.waiting {
        text.push_str(&format!("\nwaits: {}", waiting.next_action));
    }
    for said in [&answer.message, &answer.answer].into_iter().flatten() {
        text.push_str("\n\n");
        text.push_str(&message(said));
    }
    text
}
