//! What it costs to go to the other engine: its session is resumed and given what it missed, once each way per round,
//! against a second turn with the same engine right after it.

use std::path::Path;
use std::time::Duration;

use anyhow::{Result, ensure};
use roundhouse_models::{ModelServer, Options};
use roundhouse_proto::engine::v1::Origin;

use crate::stack::{Engine, Stack};
use crate::stats::Series;
use crate::{Bounds, millis};

/// How many times longer than a turn that stays with its engine one that goes to the other may take.
const AGAINST_STAYING: f64 = 1.3;

/// One engine's turns.
#[derive(Debug, Default)]
struct Turns {
    came: Series,
    stayed: Series,
}

/// Two turns with each engine per round.
pub(crate) async fn measure(
    bin_dir: &Path,
    claude: &Path,
    codex: &Path,
    rounds: usize,
    bounds: &mut Bounds,
) -> Result<()> {
    let server = ModelServer::start(Options::default()).await?;
    let url = server.base_url();
    let engines = [Engine::claude(claude, &url), Engine::codex(codex, &url)];
    let names = [engines[0].name, engines[1].name];
    let stack = Stack::start(bin_dir, &engines).await?;
    let conversation = stack.conversation().await?;
    // The first turns start processes and seed a session; they are not what is compared.
    for name in names {
        let seeded = stack.turn_of(&conversation, name, "[[text:first]]").await?;
        println!("\nfirst turn of {name} in the conversation: {:.0} ms", millis(seeded.elapsed));
    }
    let mut turns = [Turns::default(), Turns::default()];
    for round in 0..rounds {
        for (name, turns) in names.iter().zip(&mut turns) {
            turns.came.push(turn(&stack, &conversation, name, round, true).await?);
            turns.stayed.push(turn(&stack, &conversation, name, round, false).await?);
        }
    }
    println!("\n| switch ({rounds} rounds) | median ms | min | max |\n|---|---|---|---|");
    for (name, turns) in names.iter().zip(&turns) {
        turns.came.print(&format!("{name}, after a turn of the other"));
        turns.stayed.print(&format!("{name}, after one of its own"));
    }
    println!();
    for (name, turns) in names.iter().zip(&turns) {
        let ratio = turns.came.ratio(&turns.stayed);
        println!("going to {name} against staying with it: {ratio:.2} times (bound {AGAINST_STAYING})");
        bounds.at_most(&format!("going to {name} against staying with it"), ratio, AGAINST_STAYING);
    }
    stack.stop().await
}

/// One turn, which must have resumed the engine's own session, and been given what it missed when there was something.
async fn turn(
    stack: &Stack,
    conversation: &str,
    engine: &str,
    round: usize,
    missed: bool,
) -> Result<Duration> {
    let text = format!("round {round} [[text:answer {round}]]");
    let turn = stack.turn_of(conversation, engine, &text).await?;
    let (origin, given) = stack.origin(&turn.turn_id).await?;
    ensure!(origin == Origin::Resumed, "{engine} was not resumed: {origin:?}");
    ensure!(given == missed, "{engine}: history given is {given} where {missed} was meant");
    Ok(turn.elapsed)
}
