//! The runners: how each is reached, when it was last heard of, and whether it may be given new turns.

pub(crate) mod link;
mod reconcile;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use roundhouse_domain::id::RunnerId;
use roundhouse_domain::runner::Runner;
use roundhouse_proto::engine::v1::{DescribeRunnerRequest, DescribeRunnerResponse};
use tokio::sync::watch;
use tokio::time::Instant;

pub(crate) use link::{CallError, FOUND_DEAD, Link};
pub(crate) use reconcile::{Claim, reconcile};

use crate::settings::Settings;

/// How long what a runner said of itself is taken as true.
const DESCRIBED_FOR: Duration = Duration::from_secs(60);
/// Missed heartbeats after which a runner counts as away.
const AWAY_HEARTBEATS: u32 = 3;

/// How a runner stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Standing {
    /// It was heard of lately.
    Online,
    /// Not for a few heartbeats.
    Away,
    /// Not for longer than it may be silent.
    Lost,
    /// It takes no new turns.
    Draining,
}

/// All runners.
#[derive(Debug)]
pub(crate) struct Runners {
    settings: Arc<Settings>,
    known: Mutex<HashMap<RunnerId, Arc<RunnerHandle>>>,
}

/// One runner.
#[derive(Debug)]
pub(crate) struct RunnerHandle {
    id: RunnerId,
    settings: Arc<Settings>,
    inner: Mutex<Inner>,
    /// Counts registrations and heartbeats, so that whoever waits for the runner tries again at once.
    changes: watch::Sender<u64>,
}

#[derive(Debug)]
struct Inner {
    link: Option<Arc<Link>>,
    /// When it was last heard of in this process: a heartbeat or an answer.
    heard: Option<Instant>,
    /// When this process began to listen for it.
    since: Instant,
    facts: Option<(Instant, Arc<DescribeRunnerResponse>)>,
    /// It has registered with this process.
    registered: bool,
    /// What it held when it registered is settled, so that it may be given new turns.
    open: bool,
    /// Counts its registrations.
    generation: u64,
    draining: bool,
    running_turns: u32,
    warm_engines: u32,
}

/// What a heartbeat tells.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Beat {
    pub(crate) running_turns: u32,
    pub(crate) warm_engines: u32,
    pub(crate) draining: bool,
}

impl Runners {
    pub(crate) fn new(settings: Arc<Settings>) -> Self {
        Self { settings, known: Mutex::default() }
    }

    fn known(&self) -> MutexGuard<'_, HashMap<RunnerId, Arc<RunnerHandle>>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The handle of a runner. One that is not known yet is made, without a way to it.
    pub(crate) fn get(&self, id: &RunnerId) -> Arc<RunnerHandle> {
        let mut known = self.known();
        let handle = known
            .entry(id.clone())
            .or_insert_with(|| Arc::new(RunnerHandle::new(id.clone(), Arc::clone(&self.settings))));
        Arc::clone(handle)
    }

    /// The handle of a runner that is known.
    pub(crate) fn find(&self, id: &RunnerId) -> Option<Arc<RunnerHandle>> {
        self.known().get(id).map(Arc::clone)
    }

    /// Takes over what the store knows of a runner from before this process began. It may be given turns: all that
    /// it held then is in the store.
    pub(crate) fn restore(&self, runner: &Runner) {
        let handle = self.get(&runner.info.id);
        let mut inner = handle.inner();
        inner.link = handle.make_link(&runner.info.address);
        inner.draining = runner.draining;
        inner.open = true;
    }

    /// Takes over a registration. New turns wait until [`RunnerHandle::open`] with the number
    /// that is returned.
    pub(crate) fn register(&self, id: &RunnerId, address: &str) -> (Arc<RunnerHandle>, u64) {
        let handle = self.get(id);
        let generation = {
            let mut inner = handle.inner();
            if inner.link.as_ref().is_none_or(|link| link.address() != address) {
                inner.link = handle.make_link(address);
            }
            inner.heard = Some(Instant::now());
            inner.facts = None;
            inner.registered = true;
            inner.open = false;
            inner.draining = false;
            inner.generation += 1;
            inner.generation
        };
        handle.touch();
        (handle, generation)
    }
}

impl RunnerHandle {
    fn new(id: RunnerId, settings: Arc<Settings>) -> Self {
        Self {
            id,
            settings,
            inner: Mutex::new(Inner {
                link: None,
                heard: None,
                since: Instant::now(),
                facts: None,
                registered: false,
                open: false,
                generation: 0,
                draining: false,
                running_turns: 0,
                warm_engines: 0,
            }),
            changes: watch::Sender::new(0),
        }
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn make_link(&self, address: &str) -> Option<Arc<Link>> {
        match Link::new(&self.id, address, self.settings.call_timeout) {
            Ok(link) => Some(Arc::new(link)),
            Err(error) => {
                tracing::warn!(runner_id = %self.id, address, %error, "the runner's address cannot be used");
                None
            }
        }
    }

    pub(crate) fn id(&self) -> &RunnerId {
        &self.id
    }

    /// The way to it.
    ///
    /// # Errors
    /// While none is known.
    pub(crate) fn link(&self) -> Result<Arc<Link>, CallError> {
        let link = self.inner().link.clone();
        link.ok_or_else(|| CallError::Unreachable("the runner has not registered".to_owned()))
    }

    /// Notes a heartbeat. False: it has to register first, because this process does not know what it holds.
    pub(crate) fn beat(&self, beat: Beat) -> bool {
        {
            let mut inner = self.inner();
            if !inner.registered {
                return false;
            }
            inner.heard = Some(Instant::now());
            inner.running_turns = beat.running_turns;
            inner.warm_engines = beat.warm_engines;
            inner.draining = beat.draining;
        }
        self.touch();
        true
    }

    /// Notes whether it takes new turns, and how many run; whoever waits for it looks again.
    pub(crate) fn set_draining(&self, draining: bool, running_turns: u32) {
        {
            let mut inner = self.inner();
            inner.draining = draining;
            inner.running_turns = running_turns;
        }
        self.touch();
    }

    /// Notes that it answered a call.
    pub(crate) fn heard(&self) {
        self.inner().heard = Some(Instant::now());
    }

    /// Lets new turns go to it, unless it has registered again since `generation`.
    pub(crate) fn open(&self, generation: u64) {
        {
            let mut inner = self.inner();
            inner.open |= inner.generation == generation;
        }
        self.touch();
    }

    /// Whether it has not registered again since.
    pub(crate) fn is_generation(&self, generation: u64) -> bool {
        self.inner().generation == generation
    }

    /// Whether new turns may go to it.
    pub(crate) fn is_open(&self) -> bool {
        self.inner().open
    }

    fn touch(&self) {
        self.changes.send_modify(|count| *count = count.wrapping_add(1));
    }

    /// Follows registrations and heartbeats.
    pub(crate) fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// Since when nothing was heard of it.
    pub(crate) fn silent_for(&self) -> Duration {
        let inner = self.inner();
        inner.heard.unwrap_or(inner.since).elapsed()
    }

    /// How it stands.
    pub(crate) fn standing(&self) -> Standing {
        let silent = self.silent_for();
        let inner = self.inner();
        let away_after = self.settings.heartbeat_interval.saturating_mul(AWAY_HEARTBEATS);
        if silent >= self.settings.runner_lost_after {
            Standing::Lost
        } else if inner.heard.is_none() || silent >= away_after {
            Standing::Away
        } else if inner.draining {
            Standing::Draining
        } else {
            Standing::Online
        }
    }

    /// Whether it was heard of lately.
    pub(crate) fn is_alive(&self) -> bool {
        matches!(self.standing(), Standing::Online | Standing::Draining)
    }

    /// Turns that run and warm engines, as last told.
    pub(crate) fn load(&self) -> (u32, u32) {
        let inner = self.inner();
        (inner.running_turns, inner.warm_engines)
    }

    /// What it said of itself last, if it did.
    pub(crate) fn described(&self) -> Option<Arc<DescribeRunnerResponse>> {
        self.inner().facts.as_ref().map(|(_, facts)| Arc::clone(facts))
    }

    /// How long it may take to open a session: it may first wait for another engine's start in the same home, and end
    /// older engines to make room.
    pub(crate) fn open_limit(&self) -> Duration {
        let told = self.described().and_then(|facts| facts.limits?.engine_start_timeout);
        let start = told.and_then(|told| Duration::try_from(told).ok()).filter(|told| !told.is_zero());
        let start = start.unwrap_or(self.settings.engine_start_timeout);
        start.saturating_mul(2).saturating_add(self.settings.open_room)
    }

    /// What it is and can do, asked again after a while.
    pub(crate) async fn describe(&self) -> Result<Arc<DescribeRunnerResponse>, CallError> {
        if let Some((at, facts)) = &self.inner().facts
            && at.elapsed() < DESCRIBED_FOR
        {
            return Ok(Arc::clone(facts));
        }
        let facts = Arc::new(self.link()?.describe_runner(DescribeRunnerRequest {}).await?);
        let mut inner = self.inner();
        inner.heard = Some(Instant::now());
        inner.facts = Some((Instant::now(), Arc::clone(&facts)));
        Ok(facts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn only_a_registration_makes_a_runner_known() {
        let settings = Settings::new(&roundhouse_config::ControlPlane::default());
        let runners = Runners::new(Arc::new(settings));
        let id = RunnerId::parse("run_1").unwrap();
        assert!(runners.find(&id).is_none());
        assert!(runners.known().is_empty());
        let (handle, _) = runners.register(&id, "127.0.0.1:1");
        assert!(Arc::ptr_eq(&runners.find(&id).unwrap(), &handle));
    }

    #[test]
    fn an_opening_may_take_two_starts_and_some_more() {
        let settings = Settings::new(&roundhouse_config::ControlPlane::default());
        let runners = Runners::new(Arc::new(settings));
        let id = RunnerId::parse("run_1").unwrap();
        let handle = runners.get(&id);
        assert_eq!(handle.open_limit(), Duration::from_secs(150));
        let limits = roundhouse_proto::engine::v1::RunnerLimits {
            engine_start_timeout: Duration::from_secs(180).try_into().ok(),
            ..Default::default()
        };
        let facts = DescribeRunnerResponse { limits: Some(limits), ..Default::default() };
        handle.inner().facts = Some((Instant::now(), Arc::new(facts)));
        assert_eq!(handle.open_limit(), Duration::from_secs(390));
    }
}
