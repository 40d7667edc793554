//! The public API over gRPC: services, health, reflection, limits.

pub(crate) mod from_proto;
pub(crate) mod status;
pub(crate) mod to_proto;

mod agent;
mod conversation;
mod page;
mod runner;
mod session;
mod stream;
mod summary;

use std::sync::Arc;

use roundhouse_proto::control::v1::agent_service_server::AgentServiceServer;
use roundhouse_proto::control::v1::conversation_service_server::ConversationServiceServer;
use roundhouse_proto::control::v1::runner_service_server::RunnerServiceServer;
use roundhouse_proto::control::v1::session_service_server::SessionServiceServer;
use roundhouse_proto::control::v1::summary_service_server::SummaryServiceServer;
use roundhouse_proto::{FILE_DESCRIPTOR_SET, MAX_MESSAGE_BYTES};
use tonic::server::NamedService as _;
use tonic::transport::server::{Router, Server};
use tonic_health::server::HealthReporter;

use crate::app::App;
use crate::runners::link::{CONNECTION_WINDOW, STREAM_WINDOW};

/// Streams and calls that one connection may have open at once.
const MAX_STREAMS: u32 = 1_000;

/// The services over one app.
#[derive(Clone, Debug)]
pub(crate) struct Api {
    pub(crate) app: Arc<App>,
}

/// The server with all services. The reporter tells the health of each.
///
/// # Errors
/// When the descriptors that were compiled in cannot be read.
pub(crate) async fn router(
    app: Arc<App>,
) -> Result<(Router, HealthReporter), tonic_reflection::server::Error> {
    let keepalive = app.settings.keepalive;
    let api = Api { app };
    let (health, health_service) = tonic_health::server::health_reporter();
    health.set_serving::<ConversationServiceServer<Api>>().await;
    health.set_serving::<SessionServiceServer<Api>>().await;
    health.set_serving::<SummaryServiceServer<Api>>().await;
    health.set_serving::<AgentServiceServer<Api>>().await;
    health.set_serving::<RunnerServiceServer<Api>>().await;
    let reflection = || {
        tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(FILE_DESCRIPTOR_SET)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
            // The details of a status, so that a client without the protos can read them.
            .register_encoded_file_descriptor_set(tonic_types::pb::FILE_DESCRIPTOR_SET)
            // The descriptors hold the runner's service, too; what is listed is what is served here.
            .with_service_name(ConversationServiceServer::<Api>::NAME)
            .with_service_name(SessionServiceServer::<Api>::NAME)
            .with_service_name(SummaryServiceServer::<Api>::NAME)
            .with_service_name(AgentServiceServer::<Api>::NAME)
            .with_service_name(RunnerServiceServer::<Api>::NAME)
            .with_service_name("grpc.health.v1.Health")
            .with_service_name("grpc.reflection.v1.ServerReflection")
            .with_service_name("grpc.reflection.v1alpha.ServerReflection")
    };
    let router = Server::builder()
        .http2_keepalive_interval(Some(keepalive))
        .http2_keepalive_timeout(Some(keepalive))
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_concurrent_streams(MAX_STREAMS)
        .tcp_nodelay(true)
        .add_service(health_service)
        .add_service(reflection().build_v1()?)
        .add_service(reflection().build_v1alpha()?)
        .add_service(
            ConversationServiceServer::new(api.clone())
                .max_decoding_message_size(MAX_MESSAGE_BYTES)
                .max_encoding_message_size(MAX_MESSAGE_BYTES),
        )
        .add_service(
            SessionServiceServer::new(api.clone())
                .max_decoding_message_size(MAX_MESSAGE_BYTES)
                .max_encoding_message_size(MAX_MESSAGE_BYTES),
        )
        .add_service(
            SummaryServiceServer::new(api.clone())
                .max_decoding_message_size(MAX_MESSAGE_BYTES)
                .max_encoding_message_size(MAX_MESSAGE_BYTES),
        )
        .add_service(
            AgentServiceServer::new(api.clone())
                .max_decoding_message_size(MAX_MESSAGE_BYTES)
                .max_encoding_message_size(MAX_MESSAGE_BYTES),
        )
        .add_service(
            RunnerServiceServer::new(api)
                .max_decoding_message_size(MAX_MESSAGE_BYTES)
                .max_encoding_message_size(MAX_MESSAGE_BYTES),
        );
    Ok((router, health))
}

/// Tells everybody that asks for health that the server is going away.
pub(crate) async fn going_away(health: &HealthReporter) {
    health.set_not_serving::<ConversationServiceServer<Api>>().await;
    health.set_not_serving::<SessionServiceServer<Api>>().await;
    health.set_not_serving::<SummaryServiceServer<Api>>().await;
    health.set_not_serving::<AgentServiceServer<Api>>().await;
    health.set_not_serving::<RunnerServiceServer<Api>>().await;
    health.set_service_status("", tonic_health::ServingStatus::NotServing).await;
}
