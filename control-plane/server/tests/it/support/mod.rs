//! A control plane on a free port with a real store, a scripted runner, and a client.

pub mod runner;
pub mod said;

use std::path::PathBuf;
use std::time::Duration;

use roundhouse_control_plane::{Server, Settings};
use roundhouse_proto::control::v1 as control;
use roundhouse_proto::control::v1::TurnStatus;
use roundhouse_proto::control::v1::conversation_service_client::ConversationServiceClient;
use roundhouse_proto::control::v1::runner_service_client::RunnerServiceClient;
use roundhouse_proto::control::v1::stream_events_response::Item;
use roundhouse_proto::engine::v1 as engine;
use roundhouse_proto::engine::v1::event_body::Kind;
use tempfile::TempDir;
use tonic::transport::Channel;
use tonic::{Status, Streaming};
use tonic_types::StatusExt as _;

pub use runner::{LIMIT, Runner};

pub type Client = ConversationServiceClient<Channel>;

/// Everything that a test needs.
pub struct World {
    pub dir: TempDir,
    pub server: Option<Server>,
    pub runner: Runner,
    pub client: Client,
    pub tune: fn(&mut Settings),
}

pub fn settings(state_dir: PathBuf, tune: fn(&mut Settings)) -> Settings {
    let mut settings = Settings::new(&roundhouse_config::ControlPlane::default());
    settings.listen = "127.0.0.1:0".to_owned();
    settings.state_dir = state_dir;
    settings.runner_lost_after = Duration::from_secs(60);
    settings.runner_away_timeout = Duration::from_secs(60);
    settings.call_timeout = Duration::from_secs(5);
    settings.open_room = Duration::from_secs(10);
    settings.backoff = (Duration::from_millis(5), Duration::from_millis(50));
    settings.poll = Duration::from_millis(200);
    settings.shutdown_timeout = Duration::from_secs(2);
    tune(&mut settings);
    settings
}

impl World {
    pub async fn new() -> Self {
        Self::tuned(|_| {}).await
    }

    pub async fn tuned(tune: fn(&mut Settings)) -> Self {
        let world = Self::without_runner(tune).await;
        world.runner.register(world.address()).await.unwrap();
        world
    }

    pub async fn without_runner(tune: fn(&mut Settings)) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let server = Server::start(settings(dir.path().to_owned(), tune)).await.unwrap();
        let client = connect(&server).await;
        Self { dir, client, server: Some(server), runner: Runner::start().await, tune }
    }

    pub fn address(&self) -> std::net::SocketAddr {
        self.server.as_ref().expect("the server runs").address()
    }

    /// Ends the server wherever it is.
    pub async fn crash(&mut self) {
        self.server.take().expect("the server runs").crash().await;
    }

    /// Starts a server on what the last one left. The runner does not register by itself.
    pub async fn restart(&mut self) {
        let server = Server::start(settings(self.dir.path().to_owned(), self.tune)).await.unwrap();
        self.client = connect(&server).await;
        self.server = Some(server);
    }

    pub async fn runners(&self) -> RunnerServiceClient<Channel> {
        RunnerServiceClient::connect(format!("http://{}", self.address())).await.unwrap()
    }

    pub async fn conversation(&mut self) -> String {
        let request = control::CreateConversationRequest::default();
        let made = self.client.create_conversation(request).await.unwrap().into_inner();
        made.conversation.unwrap().conversation_id
    }

    pub async fn send(&mut self, conversation: &str, text: &str) -> control::Turn {
        self.send_as(conversation, text, "builder", "/w/a").await
    }

    pub async fn send_as(
        &mut self,
        conversation: &str,
        text: &str,
        agent: &str,
        workspace: &str,
    ) -> control::Turn {
        let request = message(conversation, text, agent, workspace);
        self.client.send_message(request).await.unwrap().into_inner().turn.unwrap()
    }

    pub async fn turn(&mut self, id: &str) -> control::GetTurnResponse {
        let request = control::GetTurnRequest { turn_id: id.into() };
        self.client.get_turn(request).await.unwrap().into_inner()
    }

    /// Follows a turn to its end and returns it with its events.
    pub async fn finish(&mut self, turn: &control::Turn) -> (control::Turn, Vec<control::TurnEvent>) {
        let stream = self.stream(&turn.conversation_id, "", &turn.turn_id).await;
        let events = events(&collect(stream).await.expect("the stream ends well"));
        let turn = self.turn(&turn.turn_id).await.turn.unwrap();
        (turn, events)
    }

    pub async fn stream(
        &mut self,
        conversation: &str,
        after: &str,
        turn: &str,
    ) -> Streaming<control::StreamEventsResponse> {
        let request = control::StreamEventsRequest {
            conversation_id: conversation.into(),
            after_cursor: after.into(),
            turn_id: turn.into(),
            include_partial: false,
            follow: None,
        };
        self.client.stream_events(request).await.unwrap().into_inner()
    }

    /// Waits until a turn has a state.
    pub async fn until(&mut self, turn: &control::Turn, status: TurnStatus) -> control::Turn {
        let mut stream = self.stream(&turn.conversation_id, "", "").await;
        let wait = async {
            loop {
                let now = self.turn(&turn.turn_id).await.turn.unwrap();
                if now.status() == status {
                    return now;
                }
                assert!(!ended(now.status()), "ended {:?} instead of {status:?}: {now:#?}", now.status());
                stream.message().await.unwrap().unwrap();
            }
        };
        tokio::time::timeout(LIMIT, wait).await.unwrap_or_else(|_| panic!("never {status:?}"))
    }

    pub async fn cancel(&mut self, turn: &str) -> control::CancelTurnResponse {
        let request = control::CancelTurnRequest { request_id: String::new(), turn_id: turn.into() };
        self.client.cancel_turn(request).await.unwrap().into_inner()
    }

    pub async fn retry(&mut self, turn: &str) -> Result<control::Turn, Status> {
        let request = control::RetryTurnRequest { request_id: String::new(), turn_id: turn.into() };
        Ok(self.client.retry_turn(request).await?.into_inner().turn.unwrap())
    }

    pub async fn messages(&mut self, conversation: &str) -> Vec<control::Message> {
        let request =
            control::ListMessagesRequest { conversation_id: conversation.into(), after: 0, limit: 200 };
        self.client.list_messages(request).await.unwrap().into_inner().messages
    }

    pub async fn workspace(&mut self) -> control::Workspace {
        let mut runners = self.runners().await;
        let request = control::ListWorkspacesRequest::default();
        let mut all = runners.list_workspaces(request).await.unwrap().into_inner().workspaces;
        all.remove(0)
    }
}

async fn connect(server: &Server) -> Client {
    ConversationServiceClient::connect(format!("http://{}", server.address())).await.unwrap()
}

pub fn message(conversation: &str, text: &str, agent: &str, workspace: &str) -> control::SendMessageRequest {
    control::SendMessageRequest {
        request_id: uuid::Uuid::new_v4().to_string(),
        conversation_id: conversation.into(),
        text: text.into(),
        agent: agent.into(),
        workspace: workspace.into(),
        actor: String::new(),
    }
}

pub fn ended(status: TurnStatus) -> bool {
    matches!(status, TurnStatus::Completed | TurnStatus::Failed | TurnStatus::Cancelled | TurnStatus::Lost)
}

/// All items of a stream that ends.
pub async fn collect(
    mut stream: Streaming<control::StreamEventsResponse>,
) -> Result<Vec<control::StreamEventsResponse>, Status> {
    let read = async {
        let mut items = Vec::new();
        while let Some(item) = stream.message().await? {
            items.push(item);
        }
        Ok(items)
    };
    tokio::time::timeout(LIMIT, read).await.expect("the stream never ends")
}

pub fn events(items: &[control::StreamEventsResponse]) -> Vec<control::TurnEvent> {
    let event = |item: &control::StreamEventsResponse| match &item.item {
        Some(Item::TurnEvent(event)) => Some(event.clone()),
        _ => None,
    };
    items.iter().filter_map(event).collect()
}

pub fn kinds(events: &[control::TurnEvent]) -> Vec<Kind> {
    events.iter().map(|event| event.body.clone().unwrap().kind.unwrap()).collect()
}

/// Asserts that the events are numbered from 1 without gap or double and end with the terminal one, the only one.
pub fn assert_whole(events: &[control::TurnEvent]) {
    let seqs: Vec<u64> = events.iter().map(|event| event.seq).collect();
    let expected: Vec<u64> = (1..=events.len() as u64).collect();
    assert_eq!(seqs, expected);
    let terminals = kinds(events).iter().filter(|kind| matches!(kind, Kind::Terminal(_))).count();
    assert_eq!(terminals, 1, "{events:#?}");
    assert!(matches!(kinds(events).last(), Some(Kind::Terminal(_))));
}

pub fn failure(turn: &control::Turn) -> (engine::FailureReason, bool) {
    let failure = turn.failure.as_ref().expect("it failed");
    (failure.reason(), failure.retryable)
}

pub fn reason(status: &Status) -> String {
    status.get_details_error_info().map(|info| info.reason).unwrap_or_default()
}
