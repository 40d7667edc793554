//! What the server is run with. Most of it comes from the configuration; the rest are limits that only tests change.

use std::path::PathBuf;
use std::time::Duration;

/// Settings of a control plane.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Address and port to listen on. Port 0 takes a free one.
    pub listen: String,
    /// Directory of the database.
    pub state_dir: PathBuf,
    /// Whether to listen on an address that is not loopback.
    pub insecure_listen: bool,
    /// Silence after which a runner's open turns end LOST.
    pub runner_lost_after: Duration,
    /// How often a runner tells that it lives.
    pub heartbeat_interval: Duration,
    /// How long a dispatched turn waits for a runner that is away.
    pub runner_away_timeout: Duration,
    /// Messages that may wait in one conversation.
    pub max_waiting: usize,
    /// Characters of shared history given to a new session.
    pub context_budget: usize,
    /// How long events are kept after they were stored.
    pub event_retention: Duration,
    /// How often old events are looked for.
    pub retention_every: Duration,
    /// Time for open calls to finish when the server stops.
    pub shutdown_timeout: Duration,
    /// Longest time for a call to a runner, but for the opening of a session.
    pub call_timeout: Duration,
    /// Time that an engine may take to start on a runner that has not said its own limit.
    pub engine_start_timeout: Duration,
    /// Time that the opening of a session may take beyond the starts of engines: older ones are ended before it.
    pub open_room: Duration,
    /// First and longest pause between two tries of a call to a runner.
    pub backoff: (Duration, Duration),
    /// How often what was not heard of is asked for again although no hint came.
    pub poll: Duration,
    /// How long a reader of a stream may take nothing before it is told so.
    pub slow_reader_timeout: Duration,
    /// How often a silent connection of a client is asked for life, and how long the answer may take.
    pub keepalive: Duration,
}

impl Settings {
    /// The settings that a configuration stands for.
    #[must_use]
    pub fn new(config: &roundhouse_config::ControlPlane) -> Self {
        Self {
            listen: config.listen.clone(),
            state_dir: config.state_dir.clone(),
            insecure_listen: config.insecure_listen,
            runner_lost_after: config.runner_lost_after,
            heartbeat_interval: config.heartbeat_interval,
            runner_away_timeout: config.runner_away_timeout,
            max_waiting: config.max_waiting_messages as usize,
            context_budget: config.context_budget as usize,
            event_retention: config.event_retention,
            retention_every: Duration::from_secs(3_600),
            shutdown_timeout: config.shutdown_timeout,
            // A call to a runner that was silent for too long is no longer waited for.
            call_timeout: Duration::from_secs(10).min(config.runner_lost_after),
            engine_start_timeout: Duration::from_secs(60),
            open_room: Duration::from_secs(30),
            backoff: (Duration::from_millis(50), Duration::from_secs(2)),
            poll: Duration::from_secs(5),
            slow_reader_timeout: Duration::from_secs(30),
            keepalive: crate::runners::link::KEEPALIVE,
        }
    }
}
