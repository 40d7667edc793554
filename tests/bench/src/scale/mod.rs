//! How Roundhouse grows: conversations, events, turns at once, turns that are open at a restart, and time.

mod crowd;
mod recovery;
mod runner;
mod soak;
mod volume;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use roundhouse_proto::control::v1::conversation_service_client::ConversationServiceClient;
use roundhouse_proto::control::v1::runner_service_client::RunnerServiceClient;
use roundhouse_proto::control::v1::{
    CreateConversationRequest, ListRunnersRequest, SendMessageRequest, StreamEventsRequest, runner::State,
    stream_events_response::Item,
};
use roundhouse_proto::engine::v1::Outcome;
use roundhouse_proto::engine::v1::event_body::Kind;
use tempfile::TempDir;
use tokio::process::{Child, Command};
use tonic::transport::{Channel, Endpoint};

use crate::Bounds;
use crate::stack::spawn;

/// The longest that any one step may take.
const LIMIT: Duration = Duration::from_secs(600);

/// How much of everything.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    /// Conversations, each with a workspace of its own.
    pub(crate) conversations: usize,
    /// Events in all.
    pub(crate) events: usize,
    /// Turns that are open when the control plane dies.
    pub(crate) open: usize,
    /// Turns at once, each with an engine.
    pub(crate) crowd: usize,
    /// How long turns follow each other.
    pub(crate) soak: Duration,
}

impl Sizes {
    /// What runs with the tests.
    pub(crate) const SMALL: Self =
        Self { conversations: 1_000, events: 100_000, open: 300, crowd: 24, soak: Duration::from_secs(180) };
    /// What is promised.
    pub(crate) const FULL: Self = Self {
        conversations: 10_000,
        events: 1_000_000,
        open: 1_500,
        crowd: 200,
        soak: Duration::from_secs(180),
    };
}

/// Which of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    Volume,
    Recovery,
    Crowd,
    Soak,
}

pub(crate) async fn measure(bin_dir: &Path, part: Part, sizes: Sizes, bounds: &mut Bounds) -> Result<()> {
    match part {
        Part::Volume => volume::measure(bin_dir, sizes, bounds).await,
        Part::Recovery => recovery::measure(bin_dir, sizes.open, bounds).await,
        Part::Crowd => crowd::measure(bin_dir, sizes.crowd, bounds).await,
        Part::Soak => soak::measure(bin_dir, sizes.soak, bounds).await,
    }
}

/// A control plane alone, on a port that it keeps.
#[derive(Debug)]
struct ControlPlane {
    program: PathBuf,
    directory: TempDir,
    address: String,
    child: Child,
    channel: Channel,
}

impl ControlPlane {
    async fn start(bin_dir: &Path) -> Result<Self> {
        let program = bin_dir.join("control-plane");
        let directory = tempfile::tempdir()?;
        let (child, address, _) = spawn(Self::command(&program, &directory, "127.0.0.1:0")).await?;
        let channel = Endpoint::from_shared(format!("http://{address}"))?.connect_lazy();
        Ok(Self { program, directory, address, child, channel })
    }

    fn command(program: &Path, directory: &TempDir, listen: &str) -> Command {
        let mut command = Command::new(program);
        command.args(["--listen", listen, "--ready-json", "--state-dir"]).arg(directory.path().join("state"));
        // The bench waits for its runner, however busy the machine is.
        command.args(["--set", "control_plane.runner_lost_after=10m"]);
        command
    }

    fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    fn client(&self) -> ConversationServiceClient<Channel> {
        ConversationServiceClient::new(self.channel.clone()).max_decoding_message_size(4 << 20)
    }

    fn runners(&self) -> RunnerServiceClient<Channel> {
        RunnerServiceClient::new(self.channel.clone()).max_decoding_message_size(4 << 20)
    }

    fn pid(&self) -> Result<u32> {
        self.child.id().context("the control plane has ended")
    }

    /// Size of its database with the log, in MB.
    fn database(&self) -> Result<f64> {
        let mut bytes = 0;
        for entry in std::fs::read_dir(self.directory.path().join("state"))? {
            bytes += entry?.metadata()?.len();
        }
        Ok(bytes as f64 / 1e6)
    }

    async fn kill(&mut self) -> Result<()> {
        self.child.start_kill()?;
        self.child.wait().await?;
        Ok(())
    }

    /// Starts it again; the time until it is ready.
    async fn start_again(&mut self) -> Result<Duration> {
        let (child, _, ready) = spawn(Self::command(&self.program, &self.directory, &self.address)).await?;
        self.child = child;
        Ok(ready)
    }

    /// Waits until a runner is there.
    async fn wait_runner(&self) -> Result<()> {
        let begin = Instant::now();
        while begin.elapsed() < LIMIT {
            let answer = self.runners().list_runners(ListRunnersRequest {}).await;
            if answer.is_ok_and(|a| a.into_inner().runners.iter().any(|r| r.state() == State::Online)) {
                return Ok(());
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        bail!("no runner is there")
    }
}

/// A new conversation in this workspace.
async fn create(client: &mut ConversationServiceClient<Channel>, workspace: String) -> Result<String> {
    let request = CreateConversationRequest { workspace, agent: "builder".to_owned(), ..Default::default() };
    let made = client.create_conversation(request).await?.into_inner();
    Ok(made.conversation.context("no conversation in the answer")?.conversation_id)
}

/// Sends a message; the id of its turn.
async fn send(
    client: &mut ConversationServiceClient<Channel>,
    conversation: &str,
    text: String,
) -> Result<String> {
    let request = SendMessageRequest {
        conversation_id: conversation.to_owned(),
        request_id: uuid::Uuid::new_v4().to_string(),
        text,
        ..Default::default()
    };
    let sent = client.send_message(request).await?.into_inner();
    Ok(sent.turn.context("no turn in the answer")?.turn_id)
}

/// Follows a turn to its end; the number of its events. It must have completed.
async fn follow(
    client: &mut ConversationServiceClient<Channel>,
    conversation: &str,
    turn: &str,
) -> Result<usize> {
    let request = StreamEventsRequest {
        conversation_id: conversation.to_owned(),
        turn_id: turn.to_owned(),
        ..Default::default()
    };
    let mut stream = client.stream_events(request).await?.into_inner();
    let mut events = 0;
    while let Some(item) = stream.message().await? {
        let Some(Item::TurnEvent(event)) = item.item else { continue };
        events += 1;
        if let Some(Kind::Terminal(terminal)) = event.body.and_then(|body| body.kind)
            && terminal.outcome() != Outcome::Completed
        {
            bail!("the turn ended otherwise: {terminal:?}");
        }
    }
    Ok(events)
}
