//! `demo`: one conversation across two real engine CLIs and two runners, from nothing.
//!
//! All of it lies in one temporary directory, but for the engine CLIs, which are installed where a runner of this host
//! would look for them. The demo is an ordinary client: it sends, follows, answers a permission request, cancels, and
//! kills a runner with SIGKILL in the middle of an answer. What each model was told it reads in the model's own log.

mod acts;
mod play;
mod stage;
mod told;

use std::time::Duration;

use serde_json::json;

use crate::args::{DemoArgs, Global};
use crate::events::render;
use crate::exit::Exit;
use crate::interrupts::Interrupts;
use crate::output::{Output, table};
use crate::status::Failure;
use crate::up::NOT_AWAITED;
use play::Played;
use stage::Stage;

/// How long what is left of a stopped stack may take to go.
const GONE_LIMIT: Duration = Duration::from_secs(10);

pub(crate) async fn run(global: &Global, args: DemoArgs, output: Output) -> Result<Exit, Failure> {
    let mut interrupts = Interrupts::new()?;
    let prepared = tokio::select! {
        stage = Stage::prepare(global, &args, output) => stage?,
        _ = interrupts.next() => return Ok(Exit::Cancelled),
    };
    let mut stage = prepared;
    let played = tokio::select! {
        played = play::all(&mut stage, output) => Some(played),
        _ = interrupts.next() => None,
    };
    say(output, "stopping both services");
    let place = stage.place();
    let orderly = tokio::select! {
        orderly = stage.stop() => Some(orderly),
        _ = interrupts.next() => None,
    };
    let Some(orderly) = orderly else {
        output.note(NOT_AWAITED);
        stage.end_at_once().await?;
        return Ok(Exit::Cancelled);
    };
    stage.clear().await;
    let left = processes_left(&place).await;
    if args.keep {
        output.note(&format!("kept: {}", place.display()));
    }
    let Some(played) = played else { return Ok(Exit::Cancelled) };
    let played = played?;
    show(&played, output);
    verdict(&played, orderly, &left, output)
}

/// A line about what the demo does, for people.
fn say(output: Output, text: &str) {
    tell(output, &format!("\n== {text}"));
}

/// A line of the demo's story, for people. The story is what the demo is for, so that it goes to standard output.
fn tell(output: Output, text: &str) {
    if !output.is_json() {
        output.data(text);
    }
}

fn show(played: &[Played], output: Output) {
    if output.is_json() {
        // One line like all that came before it.
        let turns: Vec<_> = played
            .iter()
            .map(|turn| {
                json!({
                    "turn": turn.what, "turn_id": turn.turn_id, "agent": turn.agent, "engine": turn.engine,
                    "origin": turn.origin, "outcome": turn.outcome, "expected": turn.expected,
                    "told": turn.told.as_ref().map(|told| json!({
                        "natively": told.natively, "as_context": told.as_context, "sentence": told.sentence(),
                    })),
                    "duration_ms": turn.milliseconds,
                    "input_tokens": turn.tokens.0, "output_tokens": turn.tokens.1,
                })
            })
            .collect();
        return output.item(&json!({"turns": turns}));
    }
    let count = |value: Option<u64>| value.map_or_else(|| "?".to_owned(), |value| value.to_string());
    let rows = played
        .iter()
        .map(|turn| {
            vec![
                turn.what.to_owned(),
                turn.agent.clone(),
                turn.engine.clone(),
                turn.origin.to_lowercase(),
                turn.outcome.to_lowercase(),
                turn.milliseconds.map(render::seconds).unwrap_or_default(),
                format!("{} in, {} out", count(turn.tokens.0), count(turn.tokens.1)),
            ]
        })
        .collect();
    let headings = ["turn", "agent", "engine", "origin", "outcome", "time", "tokens"];
    output.data(&format!("\n{}", table(&headings, rows, "no turns")));
}

/// The demo shows what is promised, so it fails when that did not come about.
fn verdict(played: &[Played], orderly: bool, left: &[String], output: Output) -> Result<Exit, Failure> {
    let mut wrong: Vec<String> = played
        .iter()
        .filter(|turn| turn.outcome != turn.expected)
        .map(|turn| format!("{}: {} instead of {}", turn.what, turn.outcome, turn.expected))
        .collect();
    wrong.extend(played.iter().flat_map(|turn| turn.missing.clone()));
    if !orderly {
        wrong.push("a service did not stop in good order".to_owned());
    }
    wrong.extend(left.iter().map(|process| format!("left behind: {process}")));
    if wrong.is_empty() {
        let own = std::env::args().next().unwrap_or_else(|| "roundhouse".to_owned());
        tell(
            output,
            &format!("\nAll went as promised, and no process is left. Now with your own work: {own} up"),
        );
        return Ok(Exit::Done);
    }
    let mut failure = Failure::new(Exit::Failed, "the demo did not go as it should")
        .next("run it again with --keep, and look at the logs it names");
    failure.violations = wrong.into_iter().map(|wrong| ("demo".to_owned(), wrong)).collect();
    Err(failure)
}

/// Processes that still have to do with the demo's directory, once they had time to go.
async fn processes_left(place: &std::path::Path) -> Vec<String> {
    let since = std::time::Instant::now();
    loop {
        let left = stage::processes_of(place);
        if left.is_empty() || since.elapsed() > GONE_LIMIT {
            return left;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}
