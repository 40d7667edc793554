//! The crash matrix: who dies or stops, how, and at which step of a turn. One table makes all cells.
//!
//! A test is one victim and one fault. It brings one conversation to each step, holds it exactly there, lets the fault
//! happen to all at once, and then asks of each conversation the same: what was acknowledged is there once, the turn ends
//! once, the stream had neither gap nor double and reads the same again, the tool acted at most once for each try, what
//! the outcome says to do works, and nothing is alive that no record knows.
//!
//! `ROUNDHOUSE_TEST_CELL=mid-text` runs the cells with these steps alone (several with commas).

mod cell;
mod check;
mod ground;

use std::time::Duration;

use futures::future::join_all;
use roundhouse_proto::engine::v1::Outcome;

use cell::Cell;
use ground::Ground;

/// Who it happens to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Victim {
    ControlPlane,
    Runner,
    Keeper,
    Init,
    Engine,
    /// All that lives on the host of a workspace: the runner, keepers, inits, engines, tools.
    Host,
}

/// What happens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    /// SIGKILL.
    Kill,
    /// SIGSTOP past `runner_lost_after`, then SIGCONT.
    Stop,
}

/// Which engine is run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Engine {
    Fake,
    Claude,
    Codex,
}

/// Where the turn is when it happens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    BeforeSendCommit,
    AfterSendCommit,
    BeforeOpen,
    AfterOpen,
    BetweenIntentAndWrite,
    AfterWrite,
    FirstEvent,
    MidText,
    MidTool,
    BeforeTerminalCommit,
    BeforeAcknowledge,
    Promotion,
    Cancel,
    Permission,
    Replacement,
}

/// The point in a process that holds the turn at its step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Held {
    /// This failpoint.
    At(&'static str),
    /// The engine itself, which waits.
    ByEngine,
}

/// The steps, in the order in which they are prepared: what is held later must not come by what is held before.
const STEPS: [(Step, &str, Held); 15] = [
    (Step::BeforeSendCommit, "before-send-commit", Held::At("control-plane::before-accept")),
    (Step::AfterSendCommit, "after-send-commit", Held::At("control-plane::after-accept")),
    (Step::BeforeOpen, "before-open", Held::At("control-plane::before-open")),
    (Step::AfterOpen, "after-open", Held::At("control-plane::after-open")),
    (Step::FirstEvent, "first-event", Held::At("control-plane::before-append")),
    (Step::BeforeTerminalCommit, "before-terminal-commit", Held::At("control-plane::before-close")),
    (Step::BeforeAcknowledge, "before-acknowledge", Held::At("control-plane::before-acknowledge")),
    (Step::Promotion, "promotion", Held::At("control-plane::promoted")),
    (Step::Replacement, "replacement", Held::At("control-plane::replaced")),
    (Step::MidText, "mid-text", Held::ByEngine),
    (Step::MidTool, "mid-tool", Held::ByEngine),
    (Step::Permission, "permission", Held::ByEngine),
    (Step::Cancel, "cancel", Held::At("runner::stop_journalled")),
    (Step::AfterWrite, "after-write", Held::At("keeper::written")),
    (Step::BetweenIntentAndWrite, "between-intent-and-write", Held::At("keeper::intent")),
];

const VICTIMS: [Victim; 6] =
    [Victim::ControlPlane, Victim::Runner, Victim::Keeper, Victim::Init, Victim::Engine, Victim::Host];

/// Cells that make no sense, and why.
const SENSELESS: [(&[Victim], Step, &str); 1] = [(
    &[Victim::Keeper, Victim::Init, Victim::Engine],
    Step::Replacement,
    "the engine of the damaged session is closed, the replacement's is not started: nobody is there; its death while it \
     is opened is the step after-open",
)];

impl Step {
    fn row(self) -> (&'static str, Held) {
        let found = STEPS.iter().find(|(step, ..)| *step == self);
        found.map(|(_, name, held)| (*name, *held)).expect("every step has a row")
    }

    fn name(self) -> &'static str {
        self.row().0
    }

    fn held(self) -> Held {
        self.row().1
    }

    /// Whether the engine has nothing of the turn's message yet.
    fn is_before_send(self) -> bool {
        use Step::{AfterOpen, AfterSendCommit, BeforeOpen, BeforeSendCommit, Promotion, Replacement};
        matches!(self, BeforeSendCommit | AfterSendCommit | BeforeOpen | AfterOpen | Promotion | Replacement)
    }

    /// Whether the engine is through with the turn.
    fn is_after_end(self) -> bool {
        matches!(self, Self::BeforeTerminalCommit | Self::BeforeAcknowledge)
    }
}

/// Why a cell makes no sense; none: it is run.
fn senseless(victim: Victim, step: Step) -> Option<&'static str> {
    let found = SENSELESS.iter().find(|(victims, at, _)| victims.contains(&victim) && *at == step);
    found.map(|(.., why)| *why)
}

/// The outcomes that keep the promise.
fn allowed(victim: Victim, fault: Fault, step: Step) -> &'static [Outcome] {
    use Outcome::{Cancelled, Completed, Failed, Lost};
    let engine_dies = fault == Fault::Kill
        && matches!(victim, Victim::Keeper | Victim::Init | Victim::Engine | Victim::Host);
    let silent = fault == Fault::Stop && matches!(victim, Victim::Runner | Victim::Host);
    match step {
        Step::MidText | Step::MidTool | Step::Permission if silent => &[Lost],
        Step::Cancel if silent => &[Lost],
        Step::Cancel => &[Cancelled],
        _ if step.is_after_end() => &[Completed],
        // The turn goes on until it needs its runner, which may be back by then or not.
        _ if silent => &[Completed, Failed, Lost],
        _ if engine_dies && step.is_before_send() => &[Completed],
        _ if engine_dies => &[Completed, Failed, Lost],
        _ => &[Completed],
    }
}

/// The steps that run: all, or those that the environment names.
fn steps(victim: Victim) -> Vec<Step> {
    let only = std::env::var("ROUNDHOUSE_TEST_CELL").ok();
    let wanted = |name: &str| only.as_ref().is_none_or(|only| only.split(',').any(|one| one == name));
    let runs = STEPS.iter().filter(|(step, name, _)| senseless(victim, *step).is_none() && wanted(name));
    runs.map(|(step, ..)| *step).collect()
}

/// Runs all cells of a victim and a fault on one stack.
async fn row(engine: Engine, victim: Victim, fault: Fault) -> anyhow::Result<()> {
    let mut ground = Ground::start(engine).await?;
    let cells = join_all(steps(victim).into_iter().map(|step| Cell::new(&ground, step))).await;
    let mut cells = cells.into_iter().collect::<anyhow::Result<Vec<_>>>()?;
    for cell in &mut cells {
        cell.reach(&ground).await?;
    }
    ground.strike(victim, fault, &cells).await?;
    let checked = join_all(cells.iter_mut().map(|cell| {
        let (ground, step) = (&ground, cell.step);
        async move {
            let checked = cell.check(ground, allowed(victim, fault, step)).await;
            checked.err().map(|error| format!("{engine:?}/{victim:?}/{fault:?}/{}: {error:#}", step.name()))
        }
    }))
    .await;
    let mut broken: Vec<String> = checked.into_iter().flatten().collect();
    for cell in &cells {
        ground.log(&format!("{} ended {:?}", cell.step.name(), cell.outcome));
    }
    if broken.is_empty()
        && let Err(error) = ground.nothing_unknown_lives(&cells).await
    {
        broken.push(format!("{engine:?}/{victim:?}/{fault:?}: {error:#}"));
    }
    anyhow::ensure!(broken.is_empty(), "{} cells broke a promise:\n{}", broken.len(), broken.join("\n"));
    Ok(())
}

/// How long a fault of [`Fault::Stop`] lasts: `runner_lost_after` and a bit.
const STOPPED_FOR: Duration = Duration::from_millis(2_500);

macro_rules! rows {
    ($($name:ident: $engine:ident, $victim:ident, $fault:ident;)+) => {
        $(
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() -> anyhow::Result<()> {
                row(Engine::$engine, Victim::$victim, Fault::$fault).await
            }
        )+

        /// What has a test.
        const ROWS: &[(Engine, Victim, Fault)] = &[$((Engine::$engine, Victim::$victim, Fault::$fault)),+];
    };
}

rows! {
    control_plane_killed: Fake, ControlPlane, Kill;
    control_plane_stopped: Fake, ControlPlane, Stop;
    runner_killed: Fake, Runner, Kill;
    runner_stopped: Fake, Runner, Stop;
    keeper_killed: Fake, Keeper, Kill;
    keeper_stopped: Fake, Keeper, Stop;
    init_killed: Fake, Init, Kill;
    init_stopped: Fake, Init, Stop;
    host_killed: Fake, Host, Kill;
    host_stopped: Fake, Host, Stop;
    claude_killed: Claude, Engine, Kill;
    claude_stopped: Claude, Engine, Stop;
    codex_killed: Codex, Engine, Kill;
    codex_stopped: Codex, Engine, Stop;
}

#[test]
fn the_table_leaves_nobody_out() {
    for victim in VICTIMS {
        for fault in [Fault::Kill, Fault::Stop] {
            let engines: Vec<_> = ROWS.iter().filter(|row| (row.1, row.2) == (victim, fault)).collect();
            let wanted = if victim == Victim::Engine { 2 } else { 1 };
            assert_eq!(engines.len(), wanted, "{victim:?} {fault:?}: {engines:?}");
        }
        for (step, ..) in STEPS {
            let why = senseless(victim, step);
            assert!(
                why.is_none_or(|why| !why.is_empty()),
                "{victim:?} {step:?} is left out without a reason"
            );
        }
    }
}
