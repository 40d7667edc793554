//! The server itself: reflection, health, where it listens, how fast it is there.

use std::time::{Duration, Instant};

use pretty_assertions::assert_eq;
use roundhouse_control_plane::{Server, StartError};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

use crate::support::{World, settings};

const SERVICES: [&str; 4] = [
    "roundhouse.control.v1.AgentService",
    "roundhouse.control.v1.ConversationService",
    "roundhouse.control.v1.RunnerService",
    "roundhouse.control.v1.SessionService",
];

async fn channel(address: std::net::SocketAddr) -> tonic::transport::Channel {
    tonic::transport::Endpoint::from_shared(format!("http://{address}")).unwrap().connect().await.unwrap()
}

macro_rules! reflected {
    ($version:ident, $address:expr) => {{
        use pb::server_reflection_request::MessageRequest;
        use pb::server_reflection_response::MessageResponse;
        use tonic_reflection::pb::$version as pb;
        use tonic_reflection::pb::$version::server_reflection_client::ServerReflectionClient;
        let mut client = ServerReflectionClient::new(channel($address).await);
        let request = pb::ServerReflectionRequest {
            host: String::new(),
            message_request: Some(MessageRequest::ListServices(String::new())),
        };
        let mut answers =
            client.server_reflection_info(tokio_stream::once(request)).await.unwrap().into_inner();
        match answers.message().await.unwrap().unwrap().message_response {
            Some(MessageResponse::ListServicesResponse(list)) => {
                list.service.into_iter().map(|service| service.name).collect::<Vec<String>>()
            }
            other => panic!("{other:?}"),
        }
    }};
}

#[tokio::test]
async fn both_reflection_services_list_every_service() {
    let world = World::without_runner(|_| {}).await;
    for listed in [reflected!(v1, world.address()), reflected!(v1alpha, world.address())] {
        for service in SERVICES.into_iter().chain(["grpc.health.v1.Health"]) {
            assert!(listed.iter().any(|name| name == service), "{service} is not in {listed:?}");
        }
        assert!(!listed.iter().any(|name| name.contains("EngineRunner")), "not served here: {listed:?}");
    }
}

#[tokio::test]
async fn every_service_is_healthy() {
    let world = World::without_runner(|_| {}).await;
    let mut health = HealthClient::new(channel(world.address()).await);
    for service in SERVICES.into_iter().chain([""]) {
        let answer = health.check(HealthCheckRequest { service: service.to_owned() }).await.unwrap();
        assert_eq!(answer.into_inner().status(), ServingStatus::Serving, "{service}");
    }
}

#[tokio::test]
async fn another_address_than_loopback_is_refused_with_the_way_round() {
    let dir = tempfile::tempdir().unwrap();
    let mut open = settings(dir.path().to_owned(), |_| {});
    open.listen = "0.0.0.0:0".to_owned();
    let error = Server::start(open.clone()).await.unwrap_err();
    assert!(matches!(error, StartError::NotLoopback(_)));
    assert!(error.to_string().contains("--insecure-listen"));
    open.insecure_listen = true;
    Server::start(open).await.unwrap().shutdown().await;
}

#[tokio::test]
async fn one_state_directory_has_one_server() {
    let world = World::without_runner(|_| {}).await;
    let second = Server::start(settings(world.dir.path().to_owned(), |_| {})).await;
    assert!(matches!(second.unwrap_err(), StartError::Store(roundhouse_store::Error::InUse { .. })));
}

#[tokio::test]
async fn the_id_outlives_a_restart_and_a_start_is_quick() {
    let mut world = World::without_runner(|_| {}).await;
    let id = world.server.as_ref().unwrap().control_plane_id().to_owned();
    world.server.take().unwrap().shutdown().await;
    let begin = Instant::now();
    world.restart().await;
    // The limit for the whole program is a tenth of it; a loaded machine and an unoptimised build get the rest.
    assert!(begin.elapsed() < Duration::from_secs(1), "{:?}", begin.elapsed());
    assert_eq!(world.server.as_ref().unwrap().control_plane_id(), id);
}
