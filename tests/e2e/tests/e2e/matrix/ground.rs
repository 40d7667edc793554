//! The stack on which the cells of one test run, and what happens to it.

use std::{fs, path::PathBuf, time::Instant};

use anyhow::Context as _;
use roundhouse_proto::engine::v1::CloseSessionRequest;
use roundhouse_test_support::{
    Agent, BRIEF, NORMAL, Stack, StackOptions, census, signal, wait_for, wait_until,
};

use super::{Engine, Fault, Held, STOPPED_FOR, Victim, cell::Cell};

pub(super) struct Ground {
    pub(super) engine: Engine,
    pub(super) stack: Stack,
    /// The directory through which failpoints are held.
    points: PathBuf,
    _points: tempfile::TempDir,
}

impl Ground {
    pub(super) async fn start(engine: Engine) -> anyhow::Result<Self> {
        let points = tempfile::tempdir()?;
        let path = points.path().canonicalize()?;
        let mut options = StackOptions::default()
            .set("control_plane.runner_lost_after", "2s")
            .set("control_plane.heartbeat_interval", "400ms")
            .set("runner.max_warm_engines", 64)
            .set("runner.cancel_interrupt_grace", "1s")
            .set("runner.cancel_term_grace", "1s");
        if engine == Engine::Fake {
            options = options.fake_engine()?;
        }
        options.failpoint_dir = Some(path.clone());
        let stack = Stack::start_with(options).await?;
        Ok(Self { engine, stack, points: path, _points: points })
    }

    pub(super) fn log(&self, text: &str) {
        self.stack.log.line("test", text);
    }

    /// An agent on the engine.
    pub(super) fn agent(&self) -> Agent {
        match self.engine {
            Engine::Fake | Engine::Claude => Agent::new("builder"),
            Engine::Codex => Agent::codex("builder"),
        }
    }

    /// The next one who comes by this point stays there; only one whose input bears this, where that is not empty.
    pub(super) fn arm(&self, point: &str, token: &str, bears: &str) -> anyhow::Result<()> {
        // Put in place whole: it may be found at once.
        let made = self.points.join(format!("making={token}"));
        fs::write(&made, bears)?;
        fs::rename(&made, self.points.join(format!("{point}={token}"))).context("cannot arm a failpoint")
    }

    /// Waits until somebody is held.
    pub(super) async fn held(&self, point: &str, token: &str) -> anyhow::Result<()> {
        let held = self.points.join(format!("held={token}"));
        wait_until(&format!("{token} is held at {point}"), NORMAL, || held.exists()).await
    }

    /// Lets go of everybody who is held.
    fn release(&self) -> anyhow::Result<()> {
        for entry in fs::read_dir(&self.points)?.flatten() {
            fs::remove_file(entry.path())?;
        }
        Ok(())
    }

    fn let_go(&self, cells: &[Cell]) -> anyhow::Result<()> {
        self.release()?;
        cells.iter().try_for_each(|cell| cell.open_gate(self))
    }

    /// Lets the fault happen, and the world go on.
    pub(super) async fn strike(
        &mut self,
        victim: Victim,
        fault: Fault,
        cells: &[Cell],
    ) -> anyhow::Result<()> {
        self.log(&format!("{victim:?}: {fault:?}"));
        let victims = self.pids(victim);
        match fault {
            Fault::Stop => {
                for pid in &victims {
                    // One that was on its way out may be gone, as a tool.
                    if let Err(error) = signal(*pid, "STOP") {
                        anyhow::ensure!(!census::is_alive(*pid), "{error:#}");
                    }
                }
                self.let_go(cells)?;
                // A time that has to pass: there is nothing to be seen from outside while nobody moves.
                let since = Instant::now();
                wait_until("the stop is over", BRIEF, || since.elapsed() >= STOPPED_FOR).await?;
                if matches!(victim, Victim::Runner | Victim::Host) {
                    // What runs on it is given up by then: long before a connection that says nothing is found dead.
                    for cell in cells.iter().filter(|cell| cell.step.held() == Held::ByEngine) {
                        let turn = cell.turn.clone().unwrap_or_default();
                        cell.follower.wait_terminal(&turn, BRIEF).await?;
                    }
                }
                for pid in victims.iter().rev() {
                    // A tool may have ended with its engine meanwhile.
                    let _ = signal(*pid, "CONT");
                }
            }
            Fault::Kill => {
                match victim {
                    Victim::ControlPlane => self.stack.control_plane.kill().await?,
                    Victim::Runner | Victim::Host => self.stack.runner.kill().await?,
                    Victim::Keeper | Victim::Init | Victim::Engine => {}
                }
                for pid in victims.iter().filter(|pid| census::is_alive(**pid)) {
                    // Who went down with another meanwhile is gone already.
                    let _ = signal(*pid, "KILL");
                }
                wait_until("they are gone", BRIEF, || !victims.iter().any(|pid| census::is_alive(*pid)))
                    .await?;
                self.let_go(cells)?;
                match victim {
                    Victim::ControlPlane => self.stack.control_plane.start_again().await?,
                    Victim::Runner | Victim::Host => self.stack.runner.start_again().await?,
                    Victim::Keeper | Victim::Init | Victim::Engine => {}
                }
            }
        }
        Ok(())
    }

    /// Who is meant, by process id.
    fn pids(&self, victim: Victim) -> Vec<u32> {
        let of = |role: census::Role| -> Vec<u32> {
            self.stack.census().into_iter().filter(|one| one.role == role).map(|one| one.pid).collect()
        };
        match victim {
            Victim::ControlPlane => self.stack.control_plane.pid().into_iter().collect(),
            Victim::Runner => self.stack.runner.pid().into_iter().collect(),
            Victim::Keeper => of(census::Role::Keeper),
            Victim::Init => of(census::Role::Init),
            Victim::Engine => of(census::Role::Engine),
            Victim::Host => {
                let runner = self.stack.runner.pid();
                runner.into_iter().chain(self.stack.census().into_iter().map(|one| one.pid)).collect()
            }
        }
    }

    /// With every session closed that a record knows, nothing may be left alive.
    pub(super) async fn nothing_unknown_lives(&self, cells: &[Cell]) -> anyhow::Result<()> {
        for cell in cells {
            for session in self.stack.control.list_sessions(&cell.conversation).await? {
                let request = CloseSessionRequest { session_id: session.session_id };
                wait_for("the session closes", NORMAL, || async {
                    match self.stack.runner_client()?.close_session(request.clone()).await {
                        Ok(_) => Ok(Some(())),
                        // One that no runner was ever told of, or that it has no trace of any more.
                        Err(status) if status.code() == tonic::Code::NotFound => Ok(Some(())),
                        Err(status) => Err(status.into()),
                    }
                })
                .await?;
            }
        }
        self.stack.wait_nothing_left(BRIEF).await.context("alive, and no record knows it")
    }
}
