//! A scripted runner: it records what it is asked, answers as it was told to, and emits the events that the test
//! chooses. It keeps its state over restarts of its connections, as a real one keeps its directory.

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures::StreamExt as _;
use futures::stream::BoxStream;
use roundhouse_proto::control::v1 as control;
use roundhouse_proto::control::v1::runner_service_client::RunnerServiceClient;
use roundhouse_proto::engine::v1 as engine;
use roundhouse_proto::engine::v1::engine_runner_service_server::{
    EngineRunnerService, EngineRunnerServiceServer,
};
use roundhouse_proto::engine::v1::event_body::Kind;
use roundhouse_proto::engine::v1::stream_events_response::Item;
use roundhouse_proto::{ERROR_DOMAIN, PROTOCOL_VERSION, RUNNER_ID_HEADER};
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::{ReceiverStream, TcpListenerStream};
use tonic::{Code, Request, Response, Status};
use tonic_types::{ErrorDetails, StatusExt as _};

pub use super::said::{accepted, cancelled, completed, failed, lost, native_ref, text};

/// Longest wait for anything in these tests.
pub const LIMIT: Duration = Duration::from_secs(20);

/// A call that came.
#[derive(Clone, Debug, PartialEq)]
#[expect(clippy::large_enum_variant, reason = "a few of them per test")]
pub enum Call {
    Open(engine::StartOrResumeRequest),
    Send(engine::SendRequest),
    Stream { turn: String, after: u64 },
    Cancel(engine::CancelRequest),
    Answer(engine::AnswerPermissionRequest),
    Inspect(String),
    Acknowledge(engine::AcknowledgeRequest),
}

/// How an opening is answered.
#[derive(Clone, Debug)]
pub enum Opening {
    /// STARTED without native reference, RESUMED with one.
    Fit,
    Unusable(&'static str),
    Refuse(&'static str),
    /// Refused as the first says, with what it would be as the turn's failure.
    RefuseAs(&'static str, &'static str),
    /// Not until the turn is cancelled; then it is refused.
    Hang,
    /// Never; the next call for the same turn is answered.
    Forgotten,
    /// The connection breaks.
    Broken,
}

/// What becomes of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reply {
    /// Accepted, answered with `echo: <text>`, completed.
    Echo,
    /// Accepted; the test emits the rest.
    Hold,
    /// Nothing is emitted.
    Silent,
}

#[derive(Debug, Default)]
pub struct Turn {
    pub journal: Vec<engine::EventBody>,
    pub session: String,
    pub epoch: u64,
    pub sent: bool,
    pub accepted: bool,
    pub acknowledged: bool,
    pub conversation: String,
}

impl Turn {
    fn terminal(&self) -> Option<&engine::TerminalEvent> {
        match self.journal.last().and_then(|body| body.kind.as_ref()) {
            Some(Kind::Terminal(terminal)) => Some(terminal),
            _ => None,
        }
    }
}

#[derive(Debug)]
pub struct State {
    pub calls: Vec<Call>,
    pub turns: HashMap<String, Turn>,
    pub openings: VecDeque<Opening>,
    pub reply: Reply,
    /// Agent files by name.
    pub agents: HashMap<String, String>,
    /// Agent files that cannot be read, and why.
    pub unreadable: HashMap<String, String>,
    /// Agent files that never can be read.
    pub unusable: Vec<String>,
    /// Agent files that are listed at most.
    pub listed: usize,
    /// What it says its limit for the start of an engine is.
    pub start_timeout: Option<Duration>,
    /// No call is answered: as if the network were cut.
    pub deaf: bool,
    /// Cancels are answered but change nothing.
    pub stubborn: bool,
    /// Permission answers are taken and not settled.
    pub mute: bool,
    pub cancelled: Vec<String>,
    /// Events after which each stream breaks, once per entry.
    pub break_after: VecDeque<usize>,
    pub partials: HashMap<String, Vec<engine::Partial>>,
    /// Its engines.
    pub engines: Vec<engine::Engine>,
    /// The prompt that each session was opened with last, by its hash.
    pub prompts: HashMap<String, String>,
    pub draining: bool,
    pub closed: Vec<String>,
    /// Another one answers at its address.
    pub impostor: bool,
    /// Turns that the other one does not know.
    pub hidden: Vec<(String, Turn)>,
    /// Calls that were refused for that.
    pub misled: u32,
}

/// An engine that can do everything, but for what the test changes.
pub fn engine(name: &str, change: impl FnOnce(&mut engine::EngineCapabilities)) -> engine::Engine {
    let yes = i32::from(engine::Support::Supported);
    let mut capabilities = engine::EngineCapabilities {
        resumable: yes,
        prompt_change_on_resume: yes,
        model_change_on_resume: yes,
        effort_levels: vec!["low".into(), "high".into()],
        ..Default::default()
    };
    change(&mut capabilities);
    engine::Engine {
        name: name.into(),
        installed: true,
        capabilities: Some(capabilities),
        ..Default::default()
    }
}

#[derive(Clone)]
pub struct Runner {
    pub id: String,
    pub address: SocketAddr,
    state: Arc<Mutex<State>>,
    changed: watch::Sender<u64>,
    breaks: watch::Sender<u64>,
}

impl Runner {
    pub async fn start() -> Self {
        Self::start_as(&format!("run_{}", uuid::Uuid::new_v4().simple())).await
    }

    /// Starts one with this id.
    pub async fn start_as(id: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let mut agents = HashMap::new();
        agents.insert("builder".to_owned(), agent("builder", "fake", "m-1", "Build."));
        agents.insert("reviewer".to_owned(), agent("reviewer", "fake", "m-1", "Review."));
        let runner = Self {
            id: id.to_owned(),
            address,
            state: Arc::new(Mutex::new(State {
                calls: Vec::new(),
                turns: HashMap::new(),
                openings: VecDeque::new(),
                reply: Reply::Echo,
                agents,
                unreadable: HashMap::new(),
                unusable: Vec::new(),
                listed: 200,
                start_timeout: None,
                deaf: false,
                stubborn: false,
                mute: false,
                cancelled: Vec::new(),
                break_after: VecDeque::new(),
                partials: HashMap::new(),
                engines: vec![engine("fake", |_| {}), engine("second", |_| {})],
                prompts: HashMap::new(),
                draining: false,
                closed: Vec::new(),
                impostor: false,
                hidden: Vec::new(),
                misled: 0,
            })),
            changed: watch::Sender::new(0),
            breaks: watch::Sender::new(0),
        };
        let addressee = runner.clone();
        let service = EngineRunnerServiceServer::with_interceptor(runner.clone(), move |request| {
            addressee.is_meant(&request).map(|()| request)
        });
        tokio::spawn(
            tonic::transport::Server::builder()
                .add_service(service)
                .serve_with_incoming(TcpListenerStream::new(listener)),
        );
        runner
    }

    pub fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn touch(&self) {
        self.changed.send_modify(|n| *n += 1);
    }

    fn record(&self, call: Call) {
        self.state().calls.push(call);
        self.touch();
    }

    /// Waits until `find` finds something.
    pub async fn wait<T>(&self, what: &str, find: impl Fn(&State) -> Option<T>) -> T {
        let mut changed = self.changed.subscribe();
        let found = async {
            loop {
                changed.mark_unchanged();
                if let Some(found) = find(&self.state()) {
                    return found;
                }
                changed.changed().await.unwrap();
            }
        };
        match tokio::time::timeout(LIMIT, found).await {
            Ok(found) => found,
            Err(_) => panic!("waited in vain for {what}; calls: {:#?}", self.state().calls),
        }
    }

    pub fn count(&self, matches: impl Fn(&Call) -> bool) -> usize {
        self.state().calls.iter().filter(|call| matches(call)).count()
    }

    pub fn opens(&self) -> Vec<engine::StartOrResumeRequest> {
        let opens = |call: &Call| match call {
            Call::Open(request) => Some(request.clone()),
            _ => None,
        };
        self.state().calls.iter().filter_map(opens).collect()
    }

    pub fn sends(&self) -> Vec<engine::SendRequest> {
        let sends = |call: &Call| match call {
            Call::Send(request) => Some(request.clone()),
            _ => None,
        };
        self.state().calls.iter().filter_map(sends).collect()
    }

    /// Waits for the message of a turn.
    pub async fn sent(&self, turn: &str) {
        self.wait("a message", |s| s.turns.get(turn).filter(|t| t.sent).map(|_| ())).await;
    }

    pub async fn acknowledged(&self, turn: &str) {
        self.wait("an acknowledgement", |s| s.turns.get(turn).filter(|t| t.acknowledged).map(|_| ())).await;
    }

    pub fn emit(&self, turn: &str, kind: Kind) {
        {
            let mut state = self.state();
            let turn = state.turns.get_mut(turn).expect("the turn is known");
            assert!(turn.terminal().is_none(), "nothing comes after the end");
            turn.accepted |= matches!(
                &kind, Kind::Phase(phase) if phase.phase() == engine::phase_event::Phase::Accepted
            );
            turn.journal.push(engine::EventBody { kind: Some(kind) });
        }
        self.touch();
    }

    /// As [`Self::emit`]; false, and nothing, when the turn has ended.
    pub fn try_emit(&self, turn: &str, kind: Kind) -> bool {
        {
            let mut state = self.state();
            let turn = state.turns.get_mut(turn).expect("the turn is known");
            if turn.terminal().is_some() {
                return false;
            }
            turn.journal.push(engine::EventBody { kind: Some(kind) });
        }
        self.touch();
        true
    }

    /// Moves whenever anything is asked of it or emitted.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }

    pub fn partial(&self, turn: &str, offset: u64, text: &str) {
        let partial = engine::Partial {
            item_id: "live".into(),
            offset,
            text: text.into(),
            reasoning: false,
            truncated: false,
        };
        self.state().partials.entry(turn.to_owned()).or_default().push(partial);
        self.touch();
    }

    pub fn complete(&self, turn: &str, result: &str) {
        self.emit(turn, completed(result));
    }

    /// Breaks every stream that is open.
    pub fn break_streams(&self) {
        self.breaks.send_modify(|n| *n += 1);
    }

    /// Stops or starts to answer. Streams break, too.
    pub fn deaf(&self, deaf: bool) {
        self.state().deaf = deaf;
        self.break_streams();
        self.touch();
    }

    /// Forgets everything, as if its state directory were gone.
    pub fn forget(&self) {
        let mut state = self.state();
        state.turns.clear();
        state.cancelled.clear();
    }

    pub async fn register(&self, server: SocketAddr) -> Result<control::RegisterRunnerResponse, Status> {
        let request = {
            let state = self.state();
            let turns = state.turns.iter().filter(|(_, turn)| !turn.acknowledged);
            control::RegisterRunnerRequest {
                runner_id: self.id.clone(),
                address: self.address.to_string(),
                protocol_version: PROTOCOL_VERSION,
                hostname: "host-a".into(),
                version: "0".into(),
                roots: vec![engine::Root { path: "/w".into(), trusted: false }],
                boot_id: "boot".into(),
                control_plane_id: String::new(),
                epochs: state.turns.values().map(|t| (t.conversation.clone(), t.epoch)).collect(),
                turns: turns
                    .map(|(id, turn)| control::UnacknowledgedTurn {
                        turn_id: id.clone(),
                        conversation_id: turn.conversation.clone(),
                        epoch: turn.epoch,
                        ended: turn.terminal().is_some(),
                    })
                    .collect(),
            }
        };
        self.register_as(server, request).await
    }

    pub async fn register_as(
        &self,
        server: SocketAddr,
        request: control::RegisterRunnerRequest,
    ) -> Result<control::RegisterRunnerResponse, Status> {
        let mut client = RunnerServiceClient::connect(format!("http://{server}")).await.unwrap();
        client.register_runner(request).await.map(Response::into_inner)
    }

    /// As a real one: a call that names another runner is refused.
    fn is_meant(&self, request: &Request<()>) -> Result<(), Status> {
        let Some(meant) = request.metadata().get(RUNNER_ID_HEADER) else { return Ok(()) };
        if !self.state().impostor && meant.as_bytes() == self.id.as_bytes() {
            return Ok(());
        }
        self.state().misled += 1;
        self.touch();
        Err(refusal(Code::FailedPrecondition, "RUNNER_CONFLICT"))
    }

    fn heard(&self) -> Result<(), Status> {
        if self.state().deaf { Err(Status::unavailable("cut")) } else { Ok(()) }
    }
}

pub fn agent(name: &str, engine: &str, model: &str, prompt: &str) -> String {
    format!("---\nname: {name}\ndescription: d\nengine: {engine}\nmodel: {model}\n---\n{prompt}\n")
}

pub fn refusal(code: Code, reason: &str) -> Status {
    let mut details = ErrorDetails::new();
    details.set_error_info(reason, ERROR_DOMAIN, HashMap::new());
    Status::with_error_details(code, format!("refused: {reason}"), details)
}

type Answer<T> = Result<Response<T>, Status>;

#[tonic::async_trait]
impl EngineRunnerService for Runner {
    type StreamEventsStream = BoxStream<'static, Result<engine::StreamEventsResponse, Status>>;
    type ReadSpoolStream = BoxStream<'static, Result<engine::ReadSpoolResponse, Status>>;

    async fn describe_runner(
        &self,
        _: Request<engine::DescribeRunnerRequest>,
    ) -> Answer<engine::DescribeRunnerResponse> {
        self.heard()?;
        let (start_timeout, engines) = {
            let state = self.state();
            (state.start_timeout, state.engines.clone())
        };
        Ok(Response::new(engine::DescribeRunnerResponse {
            runner_id: self.id.clone(),
            engines,
            limits: Some(engine::RunnerLimits {
                engine_start_timeout: start_timeout.and_then(|time| time.try_into().ok()),
                ..Default::default()
            }),
            ..Default::default()
        }))
    }

    async fn list_agent_files(
        &self,
        request: Request<engine::ListAgentFilesRequest>,
    ) -> Answer<engine::ListAgentFilesResponse> {
        self.heard()?;
        let state = self.state();
        let readable = state.agents.iter().map(|(name, text)| engine::AgentFile {
            file_name: format!("{name}.md"),
            content: text.clone().into_bytes(),
            ..Default::default()
        });
        let unreadable = state.unreadable.iter().map(|(name, error)| engine::AgentFile {
            file_name: format!("{name}.md"),
            error: error.clone(),
            permanent: state.unusable.contains(name),
            ..Default::default()
        });
        let readable =
            readable.filter(|f| !state.unreadable.contains_key(f.file_name.trim_end_matches(".md")));
        let request = request.into_inner();
        let mut files: Vec<_> = readable.chain(unreadable).collect();
        files.sort_by(|a, b| a.file_name.cmp(&b.file_name));
        if !request.file_name.is_empty() {
            files.retain(|file| file.file_name == request.file_name);
        }
        let truncated = files.len() > state.listed;
        files.truncate(state.listed);
        Ok(Response::new(engine::ListAgentFilesResponse { workspace: request.workspace, files, truncated }))
    }

    async fn inspect_workspace(
        &self,
        request: Request<engine::InspectWorkspaceRequest>,
    ) -> Answer<engine::InspectWorkspaceResponse> {
        self.heard()?;
        let path = request.into_inner().workspace;
        if !path.starts_with("/w") {
            return Err(refusal(Code::NotFound, "WORKSPACE_NOT_FOUND"));
        }
        let workspace = path.trim_end_matches('/').to_owned();
        Ok(Response::new(engine::InspectWorkspaceResponse { workspace, ..Default::default() }))
    }

    async fn start_or_resume(
        &self,
        request: Request<engine::StartOrResumeRequest>,
    ) -> Answer<engine::StartOrResumeResponse> {
        use engine::start_or_resume_response::Result as R;
        self.heard()?;
        let request = request.into_inner();
        self.record(Call::Open(request.clone()));
        let turn = request.turn_id.clone();
        let (opening, known) = {
            let mut state = self.state();
            if state.cancelled.contains(&turn) {
                return Err(refusal(Code::FailedPrecondition, "WRONG_STATE"));
            }
            let known = state.turns.get(&turn).is_some_and(|t| t.session == request.session_id);
            if state.draining && !known {
                return Err(refusal(Code::Unavailable, "DRAINING"));
            }
            let opening =
                if known { Opening::Fit } else { state.openings.pop_front().unwrap_or(Opening::Fit) };
            (opening, known)
        };
        match opening {
            Opening::Fit => {}
            Opening::Unusable(reason) => {
                return Ok(Response::new(engine::StartOrResumeResponse {
                    result: R::Unusable.into(),
                    unusable_reason: reason.into(),
                    ..Default::default()
                }));
            }
            Opening::Refuse(reason) => return Err(refusal(Code::FailedPrecondition, reason)),
            Opening::RefuseAs(reason, failure) => {
                let mut details = ErrorDetails::new();
                let told = [
                    ("failure_reason", failure),
                    ("next_action", "do this"),
                    ("retryable", "true"),
                    ("stderr_tail", "last words"),
                ];
                let told = told.map(|(name, value)| (name.to_owned(), value.to_owned()));
                details.set_error_info(reason, ERROR_DOMAIN, HashMap::from(told));
                return Err(Status::with_error_details(Code::FailedPrecondition, "what happened", details));
            }
            Opening::Forgotten => std::future::pending::<()>().await,
            Opening::Broken => return Err(Status::unavailable("broken on purpose")),
            Opening::Hang => {
                self.wait("a cancel", |s| s.cancelled.contains(&turn).then_some(())).await;
                return Err(refusal(Code::FailedPrecondition, "ENGINE_START_FAILED"));
            }
        }
        let result = match (known, &request.native_ref) {
            (true, _) => R::AlreadyOpen,
            (false, None) => R::Started,
            (false, Some(_)) => R::Resumed,
        };
        {
            let mut state = self.state();
            let entry = state.turns.entry(turn.clone()).or_default();
            let held = usize::try_from(request.last_number).unwrap();
            if entry.journal.len() < held {
                // What was lost is never read again: numbers go on after it.
                entry.journal.resize(held, engine::EventBody::default());
                entry.journal.push(engine::EventBody {
                    kind: Some(Kind::Notice(engine::NoticeEvent {
                        kind: engine::notice_event::Kind::EventsLost.into(),
                        message: "lost".into(),
                    })),
                });
            }
            if !known {
                let origin =
                    if result == R::Started { engine::Origin::Started } else { engine::Origin::Resumed };
                entry.journal.push(engine::EventBody {
                    kind: Some(Kind::Session(engine::SessionEvent {
                        state: engine::session_event::State::Opened.into(),
                        session_id: request.session_id.clone(),
                        origin: origin.into(),
                        ..Default::default()
                    })),
                });
            }
            entry.session.clone_from(&request.session_id);
            entry.epoch = request.epoch;
            entry.conversation.clone_from(&request.conversation_id);
        }
        self.touch();
        let before = self.state().prompts.insert(request.session_id, request.agent_prompt_sha256.clone());
        let prompt_applied =
            result == R::Resumed && before.is_some_and(|before| before != request.agent_prompt_sha256);
        Ok(Response::new(engine::StartOrResumeResponse {
            result: result.into(),
            prompt_applied,
            ..Default::default()
        }))
    }

    async fn send(&self, request: Request<engine::SendRequest>) -> Answer<engine::SendResponse> {
        self.heard()?;
        let request = request.into_inner();
        self.record(Call::Send(request.clone()));
        let (reply, first) = {
            let mut state = self.state();
            let reply = state.reply;
            let Some(turn) = state.turns.get_mut(&request.turn_id) else {
                return Err(refusal(Code::NotFound, "TURN_NOT_FOUND"));
            };
            let first = !turn.sent;
            turn.sent = true;
            (reply, first)
        };
        self.touch();
        if first && reply != Reply::Silent {
            self.emit(&request.turn_id, accepted(&request.message_id));
            self.emit(&request.turn_id, native_ref(&request.session_id));
        }
        if first && reply == Reply::Echo {
            let answer = format!("echo: {}", request.text);
            self.emit(&request.turn_id, text("t1", &answer));
            self.complete(&request.turn_id, &answer);
        }
        Ok(Response::new(engine::SendResponse {
            result: engine::send_response::Result::Accepted.into(),
            delivery_id: "d".into(),
        }))
    }

    async fn cancel(&self, request: Request<engine::CancelRequest>) -> Answer<engine::CancelResponse> {
        use engine::cancel_response::Result as R;
        self.heard()?;
        let request = request.into_inner();
        self.record(Call::Cancel(request.clone()));
        let (result, stubborn) = {
            let mut state = self.state();
            let stubborn = state.stubborn;
            state.cancelled.push(request.turn_id.clone());
            let result = match state.turns.get(&request.turn_id) {
                None => R::UnknownTurn,
                Some(turn) if turn.terminal().is_some() => R::AlreadyEnded,
                Some(_) => R::Stopping,
            };
            (result, stubborn)
        };
        if result == R::Stopping && !stubborn {
            self.emit(&request.turn_id, cancelled());
        }
        self.touch();
        Ok(Response::new(engine::CancelResponse { result: result.into() }))
    }

    async fn stream_events(
        &self,
        request: Request<engine::StreamEventsRequest>,
    ) -> Answer<Self::StreamEventsStream> {
        self.heard()?;
        let request = request.into_inner();
        self.record(Call::Stream { turn: request.turn_id.clone(), after: request.after });
        if !self.state().turns.contains_key(&request.turn_id) {
            return Err(refusal(Code::NotFound, "TURN_NOT_FOUND"));
        }
        let mut limit = self.state().break_after.pop_front();
        let (sender, receiver) = mpsc::channel(4);
        let runner = self.clone();
        let mut changed = self.changed.subscribe();
        let mut breaks = self.breaks.subscribe();
        tokio::spawn(async move {
            let mut next = usize::try_from(request.after).unwrap();
            let mut partials = 0;
            loop {
                changed.mark_unchanged();
                let (events, live, ended) = {
                    let state = runner.state();
                    let Some(turn) = state.turns.get(&request.turn_id) else { return };
                    let events: Vec<_> = turn.journal.iter().skip(next).cloned().collect();
                    let live = state.partials.get(&request.turn_id).cloned().unwrap_or_default();
                    (events, live, turn.terminal().is_some())
                };
                for partial in live.into_iter().skip(partials) {
                    partials += 1;
                    let item = Some(Item::Partial(partial));
                    if sender.send(Ok(engine::StreamEventsResponse { item })).await.is_err() {
                        return;
                    }
                }
                for body in events {
                    if limit == Some(0) {
                        let _ = sender.send(Err(Status::unavailable("broken on purpose"))).await;
                        return;
                    }
                    limit = limit.map(|left| left - 1);
                    next += 1;
                    let event = engine::NumberedEvent { number: next as u64, at: None, body: Some(body) };
                    let item = Some(Item::Event(event));
                    if sender.send(Ok(engine::StreamEventsResponse { item })).await.is_err() {
                        return;
                    }
                }
                if ended {
                    return;
                }
                tokio::select! {
                    changed = changed.changed() => if changed.is_err() { return },
                    _ = breaks.changed() => {
                        let _ = sender.send(Err(Status::unavailable("broken"))).await;
                        return;
                    }
                    () = sender.closed() => return,
                }
            }
        });
        Ok(Response::new(ReceiverStream::new(receiver).boxed()))
    }

    async fn answer_permission(
        &self,
        request: Request<engine::AnswerPermissionRequest>,
    ) -> Answer<engine::AnswerPermissionResponse> {
        use engine::answer_permission_response::Result as R;
        self.heard()?;
        let request = request.into_inner();
        self.record(Call::Answer(request.clone()));
        if !self.state().mute {
            let answer = Kind::PermissionAnswer(engine::PermissionAnswerEvent {
                request_id: request.request_id.clone(),
                decision: request.decision,
                decider: engine::PermissionDecider::Client.into(),
                feedback: request.feedback.clone(),
            });
            self.emit(&request.turn_id, answer);
        }
        Ok(Response::new(engine::AnswerPermissionResponse {
            result: R::Accepted.into(),
            decision: request.decision,
        }))
    }

    async fn inspect(&self, request: Request<engine::InspectRequest>) -> Answer<engine::InspectResponse> {
        use engine::inspect_response::State as S;
        self.heard()?;
        let Some(engine::inspect_request::Target::TurnId(id)) = request.into_inner().target else {
            return Err(Status::unimplemented("sessions"));
        };
        self.record(Call::Inspect(id.clone()));
        let state = self.state();
        let Some(turn) = state.turns.get(&id) else {
            return Ok(Response::new(engine::InspectResponse {
                state: S::Unknown.into(),
                ..Default::default()
            }));
        };
        let now = match turn {
            turn if turn.terminal().is_some() => S::Ended,
            turn if turn.accepted => S::Running,
            turn if turn.sent => S::Sent,
            _ => S::Opened,
        };
        Ok(Response::new(engine::InspectResponse {
            state: now.into(),
            turn_id: id,
            session_id: turn.session.clone(),
            last_number: turn.journal.len() as u64,
            terminal: turn.terminal().cloned(),
            process: None,
            acknowledged: turn.acknowledged,
            epoch: turn.epoch,
        }))
    }

    async fn acknowledge(
        &self,
        request: Request<engine::AcknowledgeRequest>,
    ) -> Answer<engine::AcknowledgeResponse> {
        self.heard()?;
        let request = request.into_inner();
        self.record(Call::Acknowledge(request.clone()));
        {
            let mut state = self.state();
            let Some(turn) = state.turns.get_mut(&request.turn_id) else {
                return Err(refusal(Code::NotFound, "TURN_NOT_FOUND"));
            };
            assert!(turn.terminal().is_some(), "only an ended turn is acknowledged");
            turn.acknowledged = true;
        }
        self.touch();
        Ok(Response::new(engine::AcknowledgeResponse {}))
    }

    async fn close_session(
        &self,
        request: Request<engine::CloseSessionRequest>,
    ) -> Answer<engine::CloseSessionResponse> {
        self.heard()?;
        self.state().closed.push(request.into_inner().session_id);
        self.touch();
        Ok(Response::new(engine::CloseSessionResponse::default()))
    }

    async fn list_sessions(
        &self,
        _: Request<engine::ListSessionsRequest>,
    ) -> Answer<engine::ListSessionsResponse> {
        Err(Status::unimplemented("not asked in these tests"))
    }

    async fn read_spool(&self, _: Request<engine::ReadSpoolRequest>) -> Answer<Self::ReadSpoolStream> {
        Err(Status::unimplemented("not asked in these tests"))
    }

    async fn drain(&self, request: Request<engine::DrainRequest>) -> Answer<engine::DrainResponse> {
        self.heard()?;
        let mut state = self.state();
        state.draining = !request.into_inner().undrain;
        let running = state.turns.values().filter(|turn| turn.terminal().is_none()).count();
        Ok(Response::new(engine::DrainResponse { running_turns: u32::try_from(running).unwrap() }))
    }
}
