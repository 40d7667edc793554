//! The way to one runner: one connection for calls, another for event streams.
//!
//! They are apart because a stream that nobody reads can use up a connection's flow-control window, and then no call
//! on that connection gets through, a cancel included. Connections are made when they are first used and made again
//! after they broke; a dead connection is not a lost runner.

use std::collections::HashMap;
use std::time::Duration;

use roundhouse_domain::id::RunnerId;
use roundhouse_domain::outcome::{Reason, TurnError};
use roundhouse_proto::engine::v1 as engine;
use roundhouse_proto::engine::v1::ErrorReason;
use roundhouse_proto::engine::v1::engine_runner_service_client::EngineRunnerServiceClient;
use roundhouse_proto::{MAX_MESSAGE_BYTES, RUNNER_ID_HEADER};
use tonic::metadata::{Ascii, MetadataValue};
use tonic::service::Interceptor;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request, Response, Status};

use crate::grpc::status::reason_of;

/// How often a silent connection is asked for life, and how long the answer may take.
pub(crate) const KEEPALIVE: Duration = Duration::from_secs(10);
/// HTTP/2 window of one stream.
pub(crate) const STREAM_WINDOW: u32 = 1024 * 1024;
/// HTTP/2 window of a connection.
pub(crate) const CONNECTION_WINDOW: u32 = 16 * 1024 * 1024;
/// Longest time for a TCP connection to come up.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// A call that was open for longer than this had a runner at its other end: the connection to one that is gone is found
/// dead before.
pub(crate) const FOUND_DEAD: Duration = Duration::from_secs(25);

/// Why a call to a runner gave no answer that counts.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum CallError {
    /// Nobody knows whether the call arrived.
    #[error("no answer: {0}")]
    Unreachable(String),
    /// The runner answered and refused.
    #[error("refused: {message}")]
    Refused {
        /// The runner's reason. `None`: it gave none that is known here.
        reason: Option<ErrorReason>,
        /// Its words.
        message: String,
        /// The turn that the refusal is about, where the runner names one.
        turn_id: Option<String>,
        /// What the refusal would be as the turn's failure, where the runner says so.
        failure: Option<Box<TurnError>>,
    },
}

/// What a call answers.
pub(crate) type CallResult<T> = Result<T, CallError>;

type Client = EngineRunnerServiceClient<InterceptedService<Channel, Addressee>>;

/// Says on every call for which runner it is meant: an address may have come to another one.
#[derive(Clone, Debug)]
struct Addressee(MetadataValue<Ascii>);

impl Interceptor for Addressee {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        request.metadata_mut().insert(RUNNER_ID_HEADER, self.0.clone());
        Ok(request)
    }
}

/// The two connections to one runner.
#[derive(Clone, Debug)]
pub(crate) struct Link {
    address: String,
    calls: Client,
    streams: Client,
    call_timeout: Duration,
}

macro_rules! unary {
    ($(#[$meta:meta])* $name:ident, $request:ident, $response:ident) => {
        $(#[$meta])*
        pub(crate) async fn $name(&self, request: engine::$request) -> CallResult<engine::$response> {
            let mut client = self.calls.clone();
            bounded(self.call_timeout, client.$name(Request::new(request))).await
        }
    };
}

impl Link {
    /// A link to the runner `id` at `address`, a host and port or a URI. Nothing is connected yet. `call_timeout`
    /// bounds each call but the opening of a session.
    ///
    /// # Errors
    /// When the address is none.
    pub(crate) fn new(id: &RunnerId, address: &str, call_timeout: Duration) -> Result<Self, String> {
        let calls = client(id, address)?;
        let streams = client(id, address)?;
        Ok(Self { address: address.to_owned(), calls, streams, call_timeout })
    }

    /// Where it leads.
    pub(crate) fn address(&self) -> &str {
        &self.address
    }

    unary!(
        /// What the runner is and can do.
        describe_runner, DescribeRunnerRequest, DescribeRunnerResponse
    );
    unary!(
        /// The agent files of a workspace.
        list_agent_files, ListAgentFilesRequest, ListAgentFilesResponse
    );
    unary!(
        /// Facts about a workspace.
        inspect_workspace, InspectWorkspaceRequest, InspectWorkspaceResponse
    );
    unary!(
        /// Gives a message to the engine.
        send, SendRequest, SendResponse
    );
    unary!(
        /// Cancels a turn.
        cancel, CancelRequest, CancelResponse
    );
    unary!(
        /// Answers a permission request.
        answer_permission, AnswerPermissionRequest, AnswerPermissionResponse
    );
    unary!(
        /// What is true now of a turn.
        inspect, InspectRequest, InspectResponse
    );
    unary!(
        /// Stops taking turns, or takes them again.
        drain, DrainRequest, DrainResponse
    );
    unary!(
        /// Ends what is warm of a session.
        close_session, CloseSessionRequest, CloseSessionResponse
    );
    unary!(
        /// Says that a terminal event is stored.
        acknowledge, AcknowledgeRequest, AcknowledgeResponse
    );

    /// Opens a session for a turn, which may take as long as engines take to start: `limit`.
    pub(crate) async fn start_or_resume(
        &self,
        request: engine::StartOrResumeRequest,
        limit: Duration,
    ) -> CallResult<engine::StartOrResumeResponse> {
        let mut client = self.calls.clone();
        bounded(limit, client.start_or_resume(Request::new(request))).await
    }

    /// The stream of a turn's events.
    pub(crate) async fn stream_events(
        &self,
        request: engine::StreamEventsRequest,
    ) -> CallResult<tonic::Streaming<engine::StreamEventsResponse>> {
        let mut client = self.streams.clone();
        bounded(self.call_timeout, client.stream_events(Request::new(request))).await
    }
}

/// Asks whoever answers at `address` what it is.
pub(crate) async fn who_answers(
    address: &str,
    limit: Duration,
) -> CallResult<engine::DescribeRunnerResponse> {
    let channel = channel(address).map_err(CallError::Unreachable)?;
    let mut client = EngineRunnerServiceClient::new(channel).max_decoding_message_size(MAX_MESSAGE_BYTES);
    bounded(limit, client.describe_runner(Request::new(engine::DescribeRunnerRequest {}))).await
}

fn client(id: &RunnerId, address: &str) -> Result<Client, String> {
    let name = MetadataValue::try_from(id.as_str()).map_err(|error| error.to_string())?;
    Ok(EngineRunnerServiceClient::with_interceptor(channel(address)?, Addressee(name))
        .max_decoding_message_size(MAX_MESSAGE_BYTES)
        .max_encoding_message_size(MAX_MESSAGE_BYTES))
}

fn channel(address: &str) -> Result<Channel, String> {
    let uri = if address.contains("://") { address.to_owned() } else { format!("http://{address}") };
    let endpoint = Endpoint::from_shared(uri).map_err(|error| format!("not an address: {error}"))?;
    Ok(endpoint
        .connect_timeout(CONNECT_TIMEOUT)
        .tcp_nodelay(true)
        .http2_keep_alive_interval(KEEPALIVE)
        .keep_alive_timeout(KEEPALIVE)
        .keep_alive_while_idle(true)
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .connect_lazy())
}

async fn bounded<T>(
    limit: Duration,
    call: impl Future<Output = Result<Response<T>, Status>>,
) -> CallResult<T> {
    match tokio::time::timeout(limit, call).await {
        Ok(Ok(response)) => Ok(response.into_inner()),
        Ok(Err(status)) => Err(classify(&status)),
        Err(_) => Err(CallError::Unreachable(format!("no answer within {} s", limit.as_secs_f32()))),
    }
}

/// A status with one of our reasons is the runner's word. Without one it is the transport's, unless its code is one
/// that no transport makes.
pub(crate) fn classify(status: &Status) -> CallError {
    use tonic_types::StatusExt as _;
    let message = status.message().to_owned();
    let reason = reason_of(status);
    let told = status.get_details_error_info().map(|info| info.metadata).unwrap_or_default();
    let turn_id = told.get("turn_id").cloned();
    let failure = told_failure(&message, &told).map(Box::new);
    match (reason, status.code()) {
        // Somebody else answers at its address: that says nothing of the runner that was called.
        (Some(ErrorReason::RunnerConflict), _) => CallError::Unreachable(message),
        (Some(reason), _) => CallError::Refused { reason: Some(reason), message, turn_id, failure },
        (
            None,
            Code::Unavailable | Code::Cancelled | Code::DeadlineExceeded | Code::Unknown | Code::Aborted,
        ) => CallError::Unreachable(message),
        // A connection that breaks in the middle of an answer shows as INTERNAL or with an error of the transport.
        (None, _) if std::error::Error::source(status).is_some() => CallError::Unreachable(message),
        (None, Code::Internal) if message.contains("h2 protocol error") => CallError::Unreachable(message),
        (None, _) => CallError::Refused { reason: None, message, turn_id: None, failure: None },
    }
}

/// The failure that a refused opening tells in its details.
fn told_failure(message: &str, told: &HashMap<String, String>) -> Option<TurnError> {
    let flag = |name: &str| told.get(name).is_some_and(|value| value == "true");
    let reason = Reason::parse(told.get("failure_reason")?)?;
    let mut error = TurnError::new(reason, message, told.get("next_action")?.as_str());
    error.retryable = flag("retryable");
    error.unavailable = flag("unavailable");
    error.stderr_tail = told.get("stderr_tail").cloned().unwrap_or_default();
    Some(error)
}
