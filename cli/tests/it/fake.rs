//! A control plane that answers from a script and remembers what it was asked.

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard};

use roundhouse_proto::control::v1 as control;
use roundhouse_proto::control::v1::conversation_service_server::{
    ConversationService, ConversationServiceServer,
};
use roundhouse_proto::control::v1::stream_events_response::Item;
use roundhouse_proto::engine::v1 as engine;
use roundhouse_proto::engine::v1::event_body::Kind;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;

use tokio_stream::wrappers::TcpListenerStream;
use tokio_stream::{Stream, StreamExt as _};
use tonic::{Code, Request, Response, Status};
use tonic_types::{ErrorDetails, StatusExt as _};

/// One step of a scripted stream.
#[derive(Debug, Clone)]
pub(crate) enum Step {
    /// Says this.
    Say(Box<control::StreamEventsResponse>),
    /// Ends with this error.
    Fail(Status),
    /// Stays open and says nothing more.
    Hang,
}

#[derive(Debug, Default)]
pub(crate) struct State {
    /// One script for each StreamEvents call, in order; the last is repeated.
    pub(crate) streams: VecDeque<Vec<Step>>,
    pub(crate) turn: control::Turn,
    pub(crate) answer: Option<control::Message>,
    /// What the turn waits for.
    pub(crate) waiting: Option<control::Attention>,
    pub(crate) refuse_send: Option<Status>,
    /// Empty: there is no conversation of an external id yet.
    pub(crate) workspace_of_conversation: String,
    /// What GetConversation answers, but for id and workspace.
    pub(crate) conversation: control::Conversation,
    /// What ListMessages answers.
    pub(crate) messages: Vec<control::Message>,
    /// What SendMessage makes of a message; the default is one turn that is being dispatched.
    pub(crate) sent: VecDeque<control::Turn>,
    /// SendMessage fails in this way, so often, after it has taken the message.
    pub(crate) lose_send: VecDeque<Status>,
    pub(crate) cancel_requests: Vec<control::CancelTurnRequest>,
    pub(crate) answer_requests: Vec<control::AnswerPermissionRequest>,
    pub(crate) tokens: Vec<Option<String>>,
    pub(crate) stream_requests: Vec<control::StreamEventsRequest>,
    pub(crate) send_requests: Vec<control::SendMessageRequest>,
    pub(crate) create_requests: Vec<control::CreateConversationRequest>,
}

#[derive(Debug, Clone, Default)]
pub(crate) struct Fake {
    state: Arc<Mutex<State>>,
}

/// A fake that listens. It has a runtime of its own, so that dropping it ends every connection as a kill would.
#[derive(Debug)]
pub(crate) struct Serving {
    pub(crate) fake: Fake,
    pub(crate) address: SocketAddr,
    runtime: Option<Runtime>,
}

impl Drop for Serving {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

impl Serving {
    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }
}

impl Fake {
    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("not poisoned")
    }

    pub(crate) fn serve(self) -> Serving {
        self.serve_on(SocketAddr::from(([127, 0, 0, 1], 0)))
    }

    pub(crate) fn serve_on(self, address: SocketAddr) -> Serving {
        let listener = std::net::TcpListener::bind(address).expect("binds");
        listener.set_nonblocking(true).expect("can be asked without waiting");
        let address = listener.local_addr().expect("has an address");
        let service = ConversationServiceServer::new(self.clone());
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .expect("a runtime");
        runtime.spawn(async move {
            let listener = TcpListener::from_std(listener).expect("a listener");
            let incoming = TcpListenerStream::new(listener);
            let _ =
                tonic::transport::Server::builder().add_service(service).serve_with_incoming(incoming).await;
        });
        Serving { fake: self, address, runtime: Some(runtime) }
    }
}

/// An event of the turn, with a cursor made of its seq.
pub(crate) fn event(seq: u64, kind: Kind) -> Step {
    let body = engine::EventBody { kind: Some(kind) };
    let event = control::TurnEvent { turn_id: "trn_1".to_owned(), seq, body: Some(body) };
    Step::Say(Box::new(control::StreamEventsResponse {
        cursor: format!("c{seq}"),
        at: Some(prost_types::Timestamp {
            seconds: 1_700_000_000 + i64::try_from(seq).unwrap_or(0),
            nanos: 0,
        }),
        item: Some(Item::TurnEvent(event)),
    }))
}

pub(crate) fn text(seq: u64, text: &str) -> Step {
    let kind = Kind::Text(engine::TextEvent {
        item_id: format!("i{seq}"),
        text: text.to_owned(),
        ..engine::TextEvent::default()
    });
    event(seq, kind)
}

pub(crate) fn terminal(seq: u64, outcome: engine::Outcome) -> Step {
    event(
        seq,
        Kind::Terminal(engine::TerminalEvent { outcome: outcome.into(), ..engine::TerminalEvent::default() }),
    )
}

/// A turn as it stands when it has ended.
pub(crate) fn turn(status: control::TurnStatus) -> control::Turn {
    control::Turn {
        turn_id: "trn_1".to_owned(),
        conversation_id: "cnv_1".to_owned(),
        message_id: "msg_1".to_owned(),
        status: status.into(),
        agent: "reviewer".to_owned(),
        engine: "claude-code".to_owned(),
        origin: engine::Origin::Started.into(),
        ..control::Turn::default()
    }
}

pub(crate) fn answer(text: &str) -> control::Message {
    control::Message {
        message_id: "msg_2".to_owned(),
        conversation_id: "cnv_1".to_owned(),
        seq: 2,
        position: Some(2),
        role: control::Role::Agent.into(),
        actor: "reviewer".to_owned(),
        text: text.to_owned(),
        turn_id: "trn_1".to_owned(),
        ..control::Message::default()
    }
}

type Answer<T> = Result<Response<T>, Status>;

#[tonic::async_trait]
impl ConversationService for Fake {
    async fn create_conversation(
        &self,
        request: Request<control::CreateConversationRequest>,
    ) -> Answer<control::CreateConversationResponse> {
        let mut state = self.state();
        let request = request.into_inner();
        let conversation = control::Conversation {
            conversation_id: "cnv_1".to_owned(),
            external_id: request.external_id.clone(),
            workspace_id: state.workspace_of_conversation.clone(),
            ..control::Conversation::default()
        };
        state.create_requests.push(request);
        Ok(Response::new(control::CreateConversationResponse {
            conversation: Some(conversation),
            created: true,
        }))
    }

    async fn get_conversation(
        &self,
        request: Request<control::GetConversationRequest>,
    ) -> Answer<control::GetConversationResponse> {
        use control::get_conversation_request::Name;
        let mut state = self.state();
        let token = request.metadata().get("authorization").and_then(|value| value.to_str().ok());
        state.tokens.push(token.map(str::to_owned));
        let external_id = match request.into_inner().name {
            Some(Name::ExternalId(external)) => Some(external),
            Some(Name::ConversationId(_)) | None => None,
        };
        if external_id.is_some() && state.workspace_of_conversation.is_empty() {
            let mut details = ErrorDetails::new();
            details.set_error_info("CONVERSATION_NOT_FOUND", "roundhouse", HashMap::new());
            return Err(Status::with_error_details(Code::NotFound, "no such conversation", details));
        }
        let conversation = control::Conversation {
            conversation_id: "cnv_1".to_owned(),
            external_id,
            workspace_id: state.workspace_of_conversation.clone(),
            ..state.conversation.clone()
        };
        Ok(Response::new(control::GetConversationResponse { conversation: Some(conversation) }))
    }

    async fn list_conversations(
        &self,
        _request: Request<control::ListConversationsRequest>,
    ) -> Answer<control::ListConversationsResponse> {
        Ok(Response::new(control::ListConversationsResponse::default()))
    }

    async fn archive_conversation(
        &self,
        _request: Request<control::ArchiveConversationRequest>,
    ) -> Answer<control::ArchiveConversationResponse> {
        Err(Status::unimplemented("not in these tests"))
    }

    async fn send_message(
        &self,
        request: Request<control::SendMessageRequest>,
    ) -> Answer<control::SendMessageResponse> {
        let mut state = self.state();
        let request = request.into_inner();
        let message = control::Message {
            message_id: "msg_1".to_owned(),
            conversation_id: request.conversation_id.clone(),
            seq: 1,
            role: control::Role::User.into(),
            actor: "user".to_owned(),
            text: request.text.clone(),
            turn_id: "trn_1".to_owned(),
            ..control::Message::default()
        };
        state.send_requests.push(request);
        if let Some(refusal) = &state.refuse_send {
            return Err(refusal.clone());
        }
        if let Some(lost) = state.lose_send.pop_front() {
            return Err(lost);
        }
        let turn = state.sent.pop_front().unwrap_or_else(|| turn(control::TurnStatus::Dispatching));
        Ok(Response::new(control::SendMessageResponse {
            message: Some(message),
            turn: Some(turn),
            repeated_request: false,
        }))
    }

    async fn list_messages(
        &self,
        _request: Request<control::ListMessagesRequest>,
    ) -> Answer<control::ListMessagesResponse> {
        let state = self.state();
        let more = state.messages.is_empty();
        let messages = if more { state.answer.clone().into_iter().collect() } else { state.messages.clone() };
        Ok(Response::new(control::ListMessagesResponse { messages, has_more: more }))
    }

    type StreamEventsStream =
        Pin<Box<dyn Stream<Item = Result<control::StreamEventsResponse, Status>> + Send + 'static>>;

    async fn stream_events(
        &self,
        request: Request<control::StreamEventsRequest>,
    ) -> Answer<Self::StreamEventsStream> {
        let mut state = self.state();
        state.stream_requests.push(request.into_inner());
        let steps =
            if state.streams.len() > 1 { state.streams.pop_front() } else { state.streams.front().cloned() };
        let steps = steps.unwrap_or_default();
        let hangs = steps.iter().any(|step| matches!(step, Step::Hang));
        let said = tokio_stream::iter(steps).filter_map(|step| match step {
            Step::Say(item) => Some(Ok(*item)),
            Step::Fail(status) => Some(Err(status)),
            Step::Hang => None,
        });
        Ok(Response::new(if hangs { Box::pin(said.chain(tokio_stream::pending())) } else { Box::pin(said) }))
    }

    async fn get_turn(&self, _request: Request<control::GetTurnRequest>) -> Answer<control::GetTurnResponse> {
        let state = self.state();
        Ok(Response::new(control::GetTurnResponse {
            turn: Some(state.turn.clone()),
            answer: state.answer.clone(),
            duration: Some(prost_types::Duration { seconds: 1, nanos: 500_000_000 }),
            waiting: state.waiting.clone(),
            ..control::GetTurnResponse::default()
        }))
    }

    async fn list_turns(
        &self,
        _request: Request<control::ListTurnsRequest>,
    ) -> Answer<control::ListTurnsResponse> {
        let turns = vec![self.state().turn.clone()];
        Ok(Response::new(control::ListTurnsResponse { turns, next_page_token: String::new() }))
    }

    async fn cancel_turn(
        &self,
        request: Request<control::CancelTurnRequest>,
    ) -> Answer<control::CancelTurnResponse> {
        self.state().cancel_requests.push(request.into_inner());
        let turn = Some(turn(control::TurnStatus::Cancelling));
        Ok(Response::new(control::CancelTurnResponse { turn, already_ended: false }))
    }

    async fn retry_turn(
        &self,
        _request: Request<control::RetryTurnRequest>,
    ) -> Answer<control::RetryTurnResponse> {
        Ok(Response::new(control::RetryTurnResponse { turn: Some(turn(control::TurnStatus::Queued)) }))
    }

    async fn answer_permission(
        &self,
        request: Request<control::AnswerPermissionRequest>,
    ) -> Answer<control::AnswerPermissionResponse> {
        let request = request.into_inner();
        self.state().answer_requests.push(request.clone());
        let permission = control::Permission {
            request_id: request.permission_request_id.clone(),
            decision: request.decision,
            state: control::permission::State::Answered.into(),
            ..control::Permission::default()
        };
        let accepted = request.permission_request_id == "spl_1.1";
        Ok(Response::new(control::AnswerPermissionResponse { permission: Some(permission), accepted }))
    }

    async fn list_permissions(
        &self,
        _request: Request<control::ListPermissionsRequest>,
    ) -> Answer<control::ListPermissionsResponse> {
        Ok(Response::new(control::ListPermissionsResponse::default()))
    }
}
