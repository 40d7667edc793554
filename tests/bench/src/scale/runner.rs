//! A runner without engines, in the bench's own process: it takes any turn and tells as many events as the message
//! asks for, so that what is measured is the control plane alone.
//!
//! A message is `events=N`, and `hold` when the turn is not to end. A turn's events are made from their number when they
//! are asked for, as often as they are.

use std::collections::{HashMap, HashSet};
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::Result;
use roundhouse_proto::PROTOCOL_VERSION;
use roundhouse_proto::control::v1::runner_service_client::RunnerServiceClient;
use roundhouse_proto::control::v1::{HeartbeatRequest, RegisterRunnerRequest, UnacknowledgedTurn};
use roundhouse_proto::engine::v1 as engine;
use roundhouse_proto::engine::v1::engine_runner_service_server::{
    EngineRunnerService, EngineRunnerServiceServer,
};
use roundhouse_proto::engine::v1::event_body::Kind;
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};
use tokio_stream::Stream;
use tokio_stream::wrappers::{ReceiverStream, TcpListenerStream};
use tonic::transport::Endpoint;
use tonic::{Request, Response, Status};

/// How often it tells that it lives.
const HEARTBEAT: Duration = Duration::from_secs(1);
/// Events before the first text: session opened, message accepted, native reference.
const OPENING: u64 = 3;
/// Bytes of each text.
const TEXT: usize = 64;

/// One turn that it holds.
#[derive(Clone, Debug, Default)]
struct Turn {
    conversation: String,
    session: String,
    epoch: u64,
    message: String,
    /// Texts that it tells.
    texts: u64,
    hold: bool,
    cancelled: bool,
    /// Moves with everything above.
    moved: watch::Sender<u64>,
}

impl Turn {
    /// The number of its terminal event; none while it is held.
    fn end(&self) -> Option<u64> {
        (!self.message.is_empty() && (!self.hold || self.cancelled)).then_some(OPENING + self.texts + 1)
    }

    /// The number of the last event that it tells now.
    fn last(&self) -> u64 {
        match self.end() {
            Some(end) => end,
            None if self.message.is_empty() => 1,
            None => OPENING + self.texts,
        }
    }

    fn event(&self, number: u64) -> engine::EventBody {
        let session = |state: engine::session_event::State| engine::SessionEvent {
            state: state.into(),
            session_id: self.session.clone(),
            origin: engine::Origin::Started.into(),
            native_ref: Some(engine::NativeRef { id: format!("native-{}", self.session) }),
            ..Default::default()
        };
        let kind = match number {
            1 => Kind::Session(session(engine::session_event::State::Opened)),
            2 => Kind::Phase(engine::PhaseEvent {
                phase: engine::phase_event::Phase::Accepted.into(),
                message_id: self.message.clone(),
                detail: String::new(),
            }),
            OPENING => Kind::Session(session(engine::session_event::State::NativeRef)),
            _ if Some(number) == self.end() => Kind::Terminal(self.terminal()),
            _ => Kind::Text(engine::TextEvent {
                item_id: format!("t{number}"),
                text: format!("{number:0TEXT$}"),
                ..Default::default()
            }),
        };
        engine::EventBody { kind: Some(kind) }
    }

    fn terminal(&self) -> engine::TerminalEvent {
        let outcome = if self.cancelled { engine::Outcome::Cancelled } else { engine::Outcome::Completed };
        engine::TerminalEvent {
            outcome: outcome.into(),
            result: "told".to_owned(),
            session_resumable: true,
            ..Default::default()
        }
    }
}

#[derive(Debug, Default)]
struct State {
    turns: HashMap<String, Turn>,
    /// Turns whose events are followed, since [`Scripted::forget_followers`].
    followed: HashSet<String>,
}

/// The runner. Clones are one.
#[derive(Clone, Debug)]
pub(crate) struct Scripted {
    id: String,
    address: SocketAddr,
    state: Arc<Mutex<State>>,
    changed: watch::Sender<u64>,
}

impl Scripted {
    /// Starts it and keeps it registered with the control plane at `server` for as long as the process lives.
    pub(crate) async fn start(server: &str) -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let runner = Self {
            id: format!("run_{}", uuid::Uuid::new_v4().simple()),
            address: listener.local_addr()?,
            state: Arc::default(),
            changed: watch::Sender::new(0),
        };
        let service = EngineRunnerServiceServer::new(runner.clone());
        tokio::spawn(
            tonic::transport::Server::builder()
                .initial_stream_window_size(1 << 20)
                .initial_connection_window_size(16 << 20)
                .add_service(service)
                .serve_with_incoming(TcpListenerStream::new(listener)),
        );
        let client = RunnerServiceClient::new(Endpoint::from_shared(server.to_owned())?.connect_lazy());
        tokio::spawn(runner.clone().keep_registered(client));
        Ok(runner)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn keep_registered(self, mut client: RunnerServiceClient<tonic::transport::Channel>) {
        loop {
            let request = self.registration();
            if client.register_runner(request).await.is_ok() {
                let beat = HeartbeatRequest { runner_id: self.id.clone(), ..Default::default() };
                loop {
                    tokio::time::sleep(HEARTBEAT).await;
                    match client.heartbeat(beat.clone()).await {
                        Err(status) if status.code() == tonic::Code::NotFound => break,
                        // Away: it comes back on its old port.
                        Ok(_) | Err(_) => {}
                    }
                }
            } else {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    }

    fn registration(&self) -> RegisterRunnerRequest {
        let state = self.state();
        let open = state.turns.iter();
        RegisterRunnerRequest {
            runner_id: self.id.clone(),
            address: self.address.to_string(),
            protocol_version: PROTOCOL_VERSION,
            hostname: "bench".to_owned(),
            version: "0".to_owned(),
            roots: vec![engine::Root { path: "/w".to_owned(), trusted: false }],
            boot_id: "boot".to_owned(),
            control_plane_id: String::new(),
            epochs: open.clone().map(|(_, turn)| (turn.conversation.clone(), turn.epoch)).collect(),
            turns: open
                .map(|(id, turn)| UnacknowledgedTurn {
                    turn_id: id.clone(),
                    conversation_id: turn.conversation.clone(),
                    epoch: turn.epoch,
                    ended: turn.end().is_some(),
                })
                .collect(),
        }
    }

    /// Counts followers anew from here on.
    pub(crate) fn forget_followers(&self) {
        self.state().followed.clear();
    }

    /// Waits until so many turns are followed.
    pub(crate) async fn followed(&self, turns: usize) {
        let mut changed = self.changed.subscribe();
        loop {
            changed.mark_unchanged();
            if self.state().followed.len() >= turns {
                return;
            }
            if changed.changed().await.is_err() {
                return;
            }
        }
    }

    fn turn<T>(&self, id: &str, look: impl FnOnce(&mut Turn) -> T) -> Result<T, Status> {
        let found = self.state().turns.get_mut(id).map(look);
        found.ok_or_else(|| Status::not_found(format!("no turn {id}")))
    }

    fn change(&self, id: &str, change: impl FnOnce(&mut Turn)) -> Result<(), Status> {
        self.turn(id, |turn| {
            change(turn);
            turn.moved.send_modify(|n| *n += 1);
        })
    }
}

type Answer<T> = Result<Response<T>, Status>;
type Streamed<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl EngineRunnerService for Scripted {
    type StreamEventsStream = Streamed<engine::StreamEventsResponse>;
    type ReadSpoolStream = Streamed<engine::ReadSpoolResponse>;

    async fn describe_runner(
        &self,
        _: Request<engine::DescribeRunnerRequest>,
    ) -> Answer<engine::DescribeRunnerResponse> {
        let yes = i32::from(engine::Support::Supported);
        let engine = engine::Engine {
            name: "fake".to_owned(),
            installed: true,
            capabilities: Some(engine::EngineCapabilities {
                resumable: yes,
                prompt_change_on_resume: yes,
                model_change_on_resume: yes,
                ..Default::default()
            }),
            ..Default::default()
        };
        Ok(Response::new(engine::DescribeRunnerResponse {
            runner_id: self.id.clone(),
            engines: vec![engine],
            limits: Some(engine::RunnerLimits::default()),
            ..Default::default()
        }))
    }

    async fn list_agent_files(
        &self,
        request: Request<engine::ListAgentFilesRequest>,
    ) -> Answer<engine::ListAgentFilesResponse> {
        let content = "---\nname: builder\ndescription: d\nengine: fake\nmodel: m\n---\nBuild.\n";
        let file = engine::AgentFile {
            file_name: "builder.md".to_owned(),
            content: content.into(),
            ..Default::default()
        };
        Ok(Response::new(engine::ListAgentFilesResponse {
            workspace: request.into_inner().workspace,
            files: vec![file],
            truncated: false,
        }))
    }

    async fn inspect_workspace(
        &self,
        request: Request<engine::InspectWorkspaceRequest>,
    ) -> Answer<engine::InspectWorkspaceResponse> {
        let workspace = request.into_inner().workspace;
        Ok(Response::new(engine::InspectWorkspaceResponse { workspace, ..Default::default() }))
    }

    async fn start_or_resume(
        &self,
        request: Request<engine::StartOrResumeRequest>,
    ) -> Answer<engine::StartOrResumeResponse> {
        use engine::start_or_resume_response::Result as R;
        let request = request.into_inner();
        let result = if request.native_ref.is_some() { R::Resumed } else { R::Started };
        {
            let mut state = self.state();
            let turn = state.turns.entry(request.turn_id).or_default();
            turn.conversation = request.conversation_id;
            turn.session = request.session_id;
            turn.epoch = request.epoch;
        }
        Ok(Response::new(engine::StartOrResumeResponse { result: result.into(), ..Default::default() }))
    }

    async fn send(&self, request: Request<engine::SendRequest>) -> Answer<engine::SendResponse> {
        let request = request.into_inner();
        let texts = request.text.split_whitespace().find_map(|word| word.strip_prefix("events="));
        let texts = texts.and_then(|number| number.parse().ok()).unwrap_or(0);
        self.change(&request.turn_id, |turn| {
            turn.message = request.message_id;
            turn.texts = texts;
            turn.hold = request.text.contains("hold");
        })?;
        Ok(Response::new(engine::SendResponse {
            result: engine::send_response::Result::Accepted.into(),
            delivery_id: "d".to_owned(),
        }))
    }

    async fn cancel(&self, request: Request<engine::CancelRequest>) -> Answer<engine::CancelResponse> {
        self.change(&request.into_inner().turn_id, |turn| turn.cancelled = true)?;
        let result = engine::cancel_response::Result::Stopping.into();
        Ok(Response::new(engine::CancelResponse { result }))
    }

    async fn stream_events(
        &self,
        request: Request<engine::StreamEventsRequest>,
    ) -> Answer<Self::StreamEventsStream> {
        let request = request.into_inner();
        let mut moved = self.turn(&request.turn_id, |turn| turn.moved.subscribe())?;
        self.state().followed.insert(request.turn_id.clone());
        self.changed.send_modify(|n| *n += 1);
        let (sender, receiver) = mpsc::channel(256);
        let runner = self.clone();
        tokio::spawn(async move {
            let mut number = request.after;
            loop {
                moved.mark_unchanged();
                let Ok(turn) = runner.turn(&request.turn_id, |turn| turn.clone()) else { return };
                while number < turn.last() {
                    number += 1;
                    let body = Some(turn.event(number));
                    let event = engine::NumberedEvent { number, at: None, body };
                    let item = Some(engine::stream_events_response::Item::Event(event));
                    if sender.send(Ok(engine::StreamEventsResponse { item })).await.is_err() {
                        return;
                    }
                }
                if turn.end().is_some() {
                    return;
                }
                drop(turn);
                tokio::select! {
                    moved = moved.changed() => if moved.is_err() { return },
                    () = sender.closed() => return,
                }
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
    }

    async fn answer_permission(
        &self,
        _: Request<engine::AnswerPermissionRequest>,
    ) -> Answer<engine::AnswerPermissionResponse> {
        Err(Status::unimplemented("nobody asks here"))
    }

    async fn inspect(&self, request: Request<engine::InspectRequest>) -> Answer<engine::InspectResponse> {
        use engine::inspect_response::State as S;
        let Some(engine::inspect_request::Target::TurnId(id)) = request.into_inner().target else {
            return Err(Status::unimplemented("sessions"));
        };
        let found = self.state().turns.get(&id).cloned();
        let facts = match found {
            None => engine::InspectResponse { state: S::Unknown.into(), ..Default::default() },
            Some(turn) => {
                let state = match (turn.end(), turn.message.is_empty()) {
                    (Some(_), _) => S::Ended,
                    (None, true) => S::Opened,
                    (None, false) => S::Running,
                };
                engine::InspectResponse {
                    state: state.into(),
                    turn_id: id,
                    session_id: turn.session.clone(),
                    last_number: turn.last(),
                    terminal: turn.end().map(|_| turn.terminal()),
                    process: None,
                    acknowledged: false,
                    epoch: turn.epoch,
                }
            }
        };
        Ok(Response::new(facts))
    }

    async fn acknowledge(
        &self,
        request: Request<engine::AcknowledgeRequest>,
    ) -> Answer<engine::AcknowledgeResponse> {
        // What is acknowledged is forgotten: a million of these are to leave nothing.
        self.state().turns.remove(&request.into_inner().turn_id);
        Ok(Response::new(engine::AcknowledgeResponse {}))
    }

    async fn close_session(
        &self,
        _: Request<engine::CloseSessionRequest>,
    ) -> Answer<engine::CloseSessionResponse> {
        Ok(Response::new(engine::CloseSessionResponse::default()))
    }

    async fn list_sessions(
        &self,
        _: Request<engine::ListSessionsRequest>,
    ) -> Answer<engine::ListSessionsResponse> {
        Err(Status::unimplemented("not asked here"))
    }

    async fn read_spool(&self, _: Request<engine::ReadSpoolRequest>) -> Answer<Self::ReadSpoolStream> {
        Err(Status::unimplemented("not asked here"))
    }

    async fn drain(&self, _: Request<engine::DrainRequest>) -> Answer<engine::DrainResponse> {
        Ok(Response::new(engine::DrainResponse::default()))
    }
}
