//! Benchmarks against the bare engine CLIs. Everything is measured side by side in one run, round by round in turn,
//! so that a noisy machine is noisy for all of them; what counts is the ratio.
#![expect(clippy::print_stdout, reason = "the report is what this program is for")]

mod bare;
mod bare_codex;
mod codex;
mod events;
mod memory;
mod scale;
mod stack;
mod stats;
mod switch;

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use clap::{Parser, ValueEnum};
use roundhouse_models::{ModelServer, Options};

use crate::stats::Series;

/// Measures Roundhouse side by side with the bare engine CLIs, on loopback, with a scripted model.
#[derive(Debug, Parser)]
struct Arguments {
    /// What to measure. Nothing named: everything but `scale` and its parts.
    #[arg(value_enum)]
    parts: Vec<PartName>,
    /// Rounds of the turn benchmark.
    #[arg(long, default_value_t = 30)]
    rounds: usize,
    /// Starts of the readiness benchmark.
    #[arg(long, default_value_t = 15)]
    starts: usize,
    /// Events per turn of the event benchmark.
    #[arg(long, default_value_t = 2_000)]
    events: usize,
    /// `scale`: the sizes that are promised (10,000 conversations, 1,000,000 events, 1,500 open turns, 200 turns at once),
    /// not those that run with the tests.
    #[arg(long)]
    full: bool,
    /// `scale`: how long the soak lasts. Unset: 180.
    #[arg(long)]
    soak_seconds: Option<u64>,
    /// Directory of the release binaries. Unset: where this program lies.
    #[arg(long)]
    bin_dir: Option<PathBuf>,
    /// Files of the git repository that the turns work in. 0: a plain, empty directory.
    #[arg(long, default_value_t = 0)]
    files: usize,
    /// Exit with 1 when a bound is missed.
    #[arg(long)]
    check: bool,
    /// The Claude Code executable. Unset: the pinned one under tests/engines.
    #[arg(long, env = "ROUNDHOUSE_TEST_CLAUDE")]
    claude: Option<PathBuf>,
    /// The Codex executable, the native one. Unset: the pinned one under tests/engines.
    #[arg(long, env = "ROUNDHOUSE_TEST_CODEX")]
    codex: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum PartName {
    /// A warm turn of Claude Code through both services, over the CLI's own warm protocol, and with one process per turn.
    Turns,
    /// The same for Codex: its app-server, and one exec per turn.
    Codex,
    /// A turn that goes to the other engine, resumed and given what it missed, against one that stays.
    Switch,
    /// Memory of idle services and of a keeper.
    Memory,
    /// Time until both services are ready.
    Ready,
    /// Durable events from an engine to a client.
    Events,
    /// How it grows: the four parts below.
    Scale,
    /// Many conversations and events: pages, replay, memory, start.
    Volume,
    /// A control plane that dies with many turns open.
    Recovery,
    /// Many turns at once, each with an engine, and a runner that dies under them.
    Crowd,
    /// Turn after turn for minutes: memory and descriptors stay as they are.
    Soak,
}

impl PartName {
    /// Whether it runs only when it is named.
    const fn is_scale(self) -> bool {
        matches!(self, Self::Scale | Self::Volume | Self::Recovery | Self::Crowd | Self::Soak)
    }
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    if !only_loopback()? {
        bail!(
            "this machine has a route besides loopback, and engines must not reach it; run it as\n  \
             unshare -n sh -c 'ip link set lo up && exec \"$@\"' sh {} ...\n(without root: unshare -rn)",
            std::env::current_exe()?.display()
        );
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let mut bounds = Bounds::default();
    runtime.block_on(measure(&arguments, &mut bounds))?;
    for missed in &bounds.missed {
        println!("missed: {missed}");
    }
    if arguments.check && !bounds.missed.is_empty() {
        bail!("{} of the bounds were missed", bounds.missed.len());
    }
    Ok(())
}

/// What was promised and not kept.
#[derive(Debug, Default)]
struct Bounds {
    missed: Vec<String>,
}

impl Bounds {
    /// A figure that may be as large as its bound.
    fn at_most(&mut self, what: &str, figure: f64, bound: f64) {
        if figure > bound {
            self.missed.push(format!("{what}: {figure:.2}, where {bound} is the most"));
        }
    }

    /// A figure that may be as small as its bound.
    fn at_least(&mut self, what: &str, figure: f64, bound: f64) {
        if figure < bound {
            self.missed.push(format!("{what}: {figure:.2}, where {bound} is the least"));
        }
    }
}

async fn measure(arguments: &Arguments, bounds: &mut Bounds) -> Result<()> {
    let bin_dir = match &arguments.bin_dir {
        Some(dir) => dir.clone(),
        None => std::env::current_exe()?.parent().context("this program lies nowhere")?.to_owned(),
    };
    let named = |part| arguments.parts.contains(&part);
    let wanted = |part: PartName| {
        named(part) || if part.is_scale() { named(PartName::Scale) } else { arguments.parts.is_empty() }
    };
    let cores = std::thread::available_parallelism()?;
    println!("cores: {cores}");
    if wanted(PartName::Ready) {
        ready(&bin_dir, arguments.starts, bounds).await?;
    }
    if wanted(PartName::Memory) {
        memory_report(&bin_dir, bounds).await?;
    }
    if wanted(PartName::Events) {
        for turns in [1, 10, 100] {
            events::measure(&bin_dir, turns, (arguments.events / turns.min(20)).max(50)).await?;
        }
    }
    if wanted(PartName::Turns) {
        let claude = arguments.claude.clone().map_or_else(pinned_claude, Ok)?;
        turns(&bin_dir, &claude, arguments, bounds).await?;
    }
    let codex = || arguments.codex.clone().map_or_else(codex::pinned, Ok);
    if wanted(PartName::Codex) {
        codex::measure(&bin_dir, &codex()?, arguments.rounds, bounds).await?;
    }
    if wanted(PartName::Switch) {
        let claude = arguments.claude.clone().map_or_else(pinned_claude, Ok)?;
        switch::measure(&bin_dir, &claude, &codex()?, arguments.rounds, bounds).await?;
    }
    let mut sizes = if arguments.full { scale::Sizes::FULL } else { scale::Sizes::SMALL };
    if let Some(seconds) = arguments.soak_seconds {
        sizes.soak = Duration::from_secs(seconds);
    }
    for (name, part) in [
        (PartName::Volume, scale::Part::Volume),
        (PartName::Recovery, scale::Part::Recovery),
        (PartName::Crowd, scale::Part::Crowd),
        (PartName::Soak, scale::Part::Soak),
    ] {
        if wanted(name) {
            scale::measure(&bin_dir, part, sizes, bounds).await?;
        }
    }
    Ok(())
}

/// Warm turn through the stack, warm turn over the CLI's own protocol, one process per turn: one of each per round.
async fn turns(bin_dir: &Path, claude: &Path, arguments: &Arguments, bounds: &mut Bounds) -> Result<()> {
    let rounds = arguments.rounds;
    let server = ModelServer::start(Options::default()).await?;
    let url = server.base_url();
    let stack = stack::Stack::start(bin_dir, &[stack::Engine::claude(claude, &url)]).await?;
    if arguments.files > 0 {
        stack.fill_workspace(arguments.files).await?;
    }
    let conversation = stack.conversation().await?;
    let home = tempfile::tempdir()?;
    let mut warm = bare::Warm::start(claude, &url, home.path()).await?;

    // The first turns start processes; they are not what is compared.
    let started = stack.turn(&conversation, "[[text:first]]").await?;
    warm.turn("[[text:first]]").await?;
    println!("first turn through the stack, engine start included: {:.0} ms", millis(started));

    let mut through = Series::default();
    let mut direct = Series::default();
    let mut single = Series::default();
    for round in 0..rounds {
        let text = format!("round {round} [[text:answer {round}]]");
        // Each kind follows each other one equally often: what a turn finds in the caches, and what still winds down
        // beside it, is what the one before it left.
        for step in 0..3 {
            match (round + step * if round % 2 == 0 { 1 } else { 2 }) % 3 {
                0 => through.push(stack.turn(&conversation, &text).await?),
                1 => direct.push(warm.turn(&text).await?),
                _ => single.push(bare::one_process(claude, &url, home.path(), &text).await?),
            }
        }
    }
    warm.stop().await?;
    println!("\n| turn ({rounds} rounds) | median ms | min | max |\n|---|---|---|---|");
    for (name, series) in [
        ("both services, warm", &through),
        ("CLI's warm protocol", &direct),
        ("one CLI process per turn", &single),
    ] {
        series.print(name);
    }
    println!(
        "\nagainst the warm protocol: {:.2} times (bound 1.3)\nagainst one process per turn: {:.1} times faster (bound 4)",
        through.ratio(&direct),
        single.ratio(&through)
    );
    bounds.at_most("a warm turn against the warm protocol", through.ratio(&direct), 1.3);
    bounds.at_least("one process per turn against a warm turn", single.ratio(&through), 4.0);
    stack.stop().await
}

async fn memory_report(bin_dir: &Path, bounds: &mut Bounds) -> Result<()> {
    let stack = stack::Stack::start(bin_dir, &[stack::Engine::fake(bin_dir)]).await?;
    let (control_plane, runner) = stack.pids()?;
    println!("\n| idle | Pss MB | bound |\n|---|---|---|");
    for (name, pid, bound) in [("control plane", control_plane, 25.0), ("runner", runner, 20.0)] {
        let megabytes = memory::pss(pid)?;
        println!("| {name} | {megabytes:.1} | {bound} |");
        bounds.at_most(&format!("MB of the {name}"), megabytes, bound);
    }
    let conversation = stack.conversation().await?;
    stack.turn(&conversation, "hello").await?;
    let keepers = memory::keepers(&stack.state_dir())?;
    if keepers.is_empty() {
        bail!("no keeper is there after a turn");
    }
    let mut sum = 0.0;
    for pid in &keepers {
        sum += memory::pss(*pid)?;
    }
    println!("| keeper with init ({} processes) | {sum:.1} | 6 |", keepers.len());
    bounds.at_most("MB of keeper and init", sum, 6.0);
    stack.stop().await
}

async fn ready(bin_dir: &Path, starts: usize, bounds: &mut Bounds) -> Result<()> {
    let mut control_plane = Series::default();
    let mut runner = Series::default();
    for _ in 0..starts {
        let stack = stack::Stack::start(bin_dir, &[stack::Engine::fake(bin_dir)]).await?;
        control_plane.push(stack.control_plane_ready);
        runner.push(stack.runner_ready);
        stack.stop().await?;
    }
    println!("\n| ready ({starts} starts) | median ms | max | bound |\n|---|---|---|---|");
    for (name, series) in [("control plane", control_plane), ("runner", runner)] {
        println!("| {name} | {:.0} | {:.0} | 100 |", millis(series.median()), millis(series.max()));
        bounds.at_most(&format!("milliseconds until the {name} is ready"), millis(series.median()), 100.0);
    }
    Ok(())
}

fn millis(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1_000.0
}

/// The pinned CLI, where the tests install it.
fn pinned_claude() -> Result<PathBuf> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../engines/node_modules/.bin/claude");
    path.canonicalize()
        .with_context(|| format!("no Claude Code at {}; run `npm ci` in tests/engines", path.display()))
}

/// Whether loopback is the only network device.
fn only_loopback() -> Result<bool> {
    let devices = std::fs::read_to_string("/proc/net/dev")?;
    Ok(devices.lines().skip(2).all(|line| line.trim_start().starts_with("lo:")))
}
