//! Random deaths under load, checked against a model of what clients were told.
//!
//! Clients hold conversations: they send, wait, cancel, and do what a failed turn tells them. Meanwhile one process after
//! the other is killed or stopped for a moment: control plane, runner, keepers, inits, engines, all of a host. What
//! clients were told is written down; at the end everything acknowledged has to be there once, every turn with the one
//! end that was told, every stream as it was followed, every tool's traces no more often than there were tries, and
//! nothing alive that no record knows.
//!
//! The seed is in the log. The dice fall the same under it; the moments depend on the machine.

mod client;
mod killer;
mod verdict;

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use anyhow::Context as _;
use roundhouse_test_support::{Agent, Stack, StackOptions, Workspace};

use client::Client;

/// Conversations that are held at the same time.
const CONVERSATIONS: usize = 4;

/// When it ends.
#[derive(Debug, Clone, Copy)]
pub enum Until {
    /// After so many deaths.
    Kills(usize),
    /// After this time.
    Time(Duration),
}

/// How it is run.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// What the dice fall by.
    pub seed: u64,
    /// When it ends.
    pub until: Until,
}

/// What happened.
#[derive(Debug, Default)]
pub struct Report {
    /// The seed.
    pub seed: u64,
    /// Deaths and stops, by what they were.
    pub kills: std::collections::BTreeMap<&'static str, usize>,
    /// Turns, by their outcome.
    pub turns: std::collections::BTreeMap<String, usize>,
    /// Messages that were acknowledged.
    pub messages: usize,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { seed, kills, turns, messages } = self;
        let all: usize = kills.values().sum();
        write!(f, "seed {seed}: {all} deaths {kills:?}, {messages} messages, turns {turns:?}")
    }
}

/// A small generator.
#[derive(Debug, Clone)]
struct Dice(u64);

impl Dice {
    fn new(seed: u64) -> Self {
        let mut dice = Self(seed);
        // Neighbouring seeds begin alike.
        for _ in 0..4 {
            dice.roll(1);
        }
        dice
    }

    fn roll(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % sides
    }
}

/// Runs it.
///
/// # Errors
/// Says which promise was broken, under which seed.
pub async fn run(options: Options) -> anyhow::Result<Report> {
    let seed = options.seed;
    let told = run_with(options).await;
    told.with_context(|| format!("under the seed {seed}"))
}

async fn run_with(options: Options) -> anyhow::Result<Report> {
    let settings = StackOptions::default()
        .set("control_plane.runner_lost_after", "4s")
        .set("control_plane.heartbeat_interval", "500ms")
        .set("runner.max_warm_engines", 3)
        .set("runner.keeper_timeout", "2s")
        .set("runner.idle_timeout", "20s")
        .set("runner.cancel_interrupt_grace", "500ms")
        .set("runner.cancel_term_grace", "500ms")
        .fake_engine()?;
    let mut stack = Stack::start_with(settings).await?;
    stack.log.line("test", &format!("the seed is {}", options.seed));
    let mut dice = Dice::new(options.seed);
    let stop = Arc::new(AtomicBool::new(false));
    let mut clients = Vec::new();
    for n in 0..CONVERSATIONS {
        let workspace =
            Workspace::create(&stack.root().join(format!("work/place-{n}")), &[Agent::new("builder")])?;
        let name = workspace.path().display().to_string();
        let conversation = stack.control.create(&name, "builder").await?.conversation_id;
        let dice = Dice::new(dice.roll(u64::from(u32::MAX)));
        clients.push(Client::new(stack.control.clone(), conversation, workspace, dice));
    }
    let seen: Vec<_> = clients.iter().map(|client| stack.control.follow(&client.conversation)).collect();
    let talking: Vec<_> =
        clients.into_iter().map(|client| tokio::spawn(client.talk(Arc::clone(&stop)))).collect();
    let kills = killer::kill(&mut stack, &mut dice, &seen, options.until).await;
    stop.store(true, Ordering::SeqCst);
    let mut clients = Vec::new();
    for one in talking {
        clients.push(one.await.context("a client panicked")??);
    }
    let mut report = Report { seed: options.seed, kills: kills?, ..Report::default() };
    for (client, follower) in clients.iter_mut().zip(&seen) {
        client.check(follower, &mut report).await?;
    }
    verdict::nothing_unknown_lives(&stack, &clients).await?;
    stack.log.line("test", &report.to_string());
    Ok(report)
}
