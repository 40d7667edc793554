//! A control plane that will not have this runner.

use std::sync::{Arc, Mutex};

use pretty_assertions::assert_eq;
use roundhouse_proto::control::v1::{
    self as control,
    runner_service_server::{RunnerService, RunnerServiceServer},
};
use roundhouse_proto::engine::v1::DescribeRunnerRequest;
use roundhouse_test_support::wait_until;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Code, Request, Response, Status};
use tonic_types::{ErrorDetails, StatusExt as _};

use crate::rig::{BOUND, Rig, Turn, With, terminal};

/// A control plane of another release: it refuses whoever registers.
#[derive(Debug, Default, Clone)]
struct Other {
    asked: Arc<Mutex<Vec<control::RegisterRunnerRequest>>>,
}

const REFUSAL: &str =
    "the runner speaks protocol version 1, this control plane 9; install the same release of both";

#[tonic::async_trait]
impl RunnerService for Other {
    async fn register_runner(
        &self,
        request: Request<control::RegisterRunnerRequest>,
    ) -> Result<Response<control::RegisterRunnerResponse>, Status> {
        self.asked.lock().unwrap().push(request.into_inner());
        let details = ErrorDetails::with_error_info("PROTOCOL_VERSION", "roundhouse", []);
        Err(Status::with_error_details(Code::FailedPrecondition, REFUSAL, details))
    }

    async fn heartbeat(
        &self,
        _: Request<control::HeartbeatRequest>,
    ) -> Result<Response<control::HeartbeatResponse>, Status> {
        Err(Status::not_found("not registered"))
    }

    async fn list_runners(
        &self,
        _: Request<control::ListRunnersRequest>,
    ) -> Result<Response<control::ListRunnersResponse>, Status> {
        Err(Status::unimplemented("not here"))
    }

    async fn list_workspaces(
        &self,
        _: Request<control::ListWorkspacesRequest>,
    ) -> Result<Response<control::ListWorkspacesResponse>, Status> {
        Err(Status::unimplemented("not here"))
    }

    async fn free_workspace(
        &self,
        _: Request<control::FreeWorkspaceRequest>,
    ) -> Result<Response<control::FreeWorkspaceResponse>, Status> {
        Err(Status::unimplemented("not here"))
    }

    async fn drain_runner(
        &self,
        _: Request<control::DrainRunnerRequest>,
    ) -> Result<Response<control::DrainRunnerResponse>, Status> {
        Err(Status::unimplemented("not here"))
    }
}

#[tokio::test]
async fn a_runner_that_is_refused_for_its_protocol_version_says_what_to_do_and_serves_on() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    let other = Other::default();
    let server = tonic::transport::Server::builder()
        .add_service(RunnerServiceServer::new(other.clone()))
        .serve_with_incoming(TcpListenerStream::new(listener));
    let server = tokio::spawn(server);
    let rig = Rig::with(With::set("control_plane", address)).await.unwrap();
    let log = rig.path("runner.log");
    let told = || {
        let text = std::fs::read_to_string(&log).unwrap_or_default();
        text.lines().filter(|line| line.contains("refuses")).map(str::to_owned).collect::<Vec<_>>()
    };
    wait_until("the refusal is told", BOUND, || !told().is_empty()).await.unwrap();
    // Who calls it is served, and it waits for a control plane that will have it, without asking again and again.
    let mut client = rig.client().await.unwrap();
    let described = client.describe_runner(DescribeRunnerRequest {}).await.unwrap().into_inner();
    let turn = Turn::new(&rig, "cnv_1", "ses_1", "trn_1", 1);
    let events = turn.run(&mut client, "[[text:served]]").await.unwrap();
    assert_eq!(terminal(&events).unwrap().result, "served");
    let asked = other.asked.lock().unwrap().clone();
    let versions: Vec<u32> = asked.iter().map(|request| request.protocol_version).collect();
    assert_eq!(versions, [described.protocol_version]);
    let told = told();
    assert_eq!(told.len(), 1, "{told:?}");
    assert!(told[0].contains("ERROR") && told[0].contains(REFUSAL), "{told:?}");
    server.abort();
}
