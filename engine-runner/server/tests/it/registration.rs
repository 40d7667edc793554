//! A control plane that will not have this runner, until it is of the same release.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

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

/// A control plane of another release: it refuses whoever registers, until it is upgraded.
#[derive(Debug, Default, Clone)]
struct Other {
    asked: Arc<Mutex<Vec<(Instant, control::RegisterRunnerRequest)>>>,
    upgraded: Arc<AtomicBool>,
    /// Heartbeats of a runner that was taken.
    beats: Arc<AtomicUsize>,
}

impl Other {
    fn asked(&self) -> Vec<(Instant, control::RegisterRunnerRequest)> {
        self.asked.lock().unwrap().clone()
    }
}

/// Less than the runner's pause after a refusal, and more than its pauses after other failures begin with.
const PAUSE: Duration = Duration::from_millis(900);

const REFUSAL: &str =
    "the runner speaks protocol version 1, this control plane 9; install the same release of both";

#[tonic::async_trait]
impl RunnerService for Other {
    async fn register_runner(
        &self,
        request: Request<control::RegisterRunnerRequest>,
    ) -> Result<Response<control::RegisterRunnerResponse>, Status> {
        let upgraded = self.upgraded.load(Ordering::SeqCst);
        self.asked.lock().unwrap().push((Instant::now(), request.into_inner()));
        if upgraded {
            return Ok(Response::new(control::RegisterRunnerResponse {
                control_plane_id: "ctl_1".to_owned(),
                ..control::RegisterRunnerResponse::default()
            }));
        }
        let details = ErrorDetails::with_error_info("PROTOCOL_VERSION", "roundhouse", []);
        Err(Status::with_error_details(Code::FailedPrecondition, REFUSAL, details))
    }

    async fn heartbeat(
        &self,
        _: Request<control::HeartbeatRequest>,
    ) -> Result<Response<control::HeartbeatResponse>, Status> {
        if !self.upgraded.load(Ordering::SeqCst) {
            return Err(Status::not_found("not registered"));
        }
        self.beats.fetch_add(1, Ordering::SeqCst);
        Ok(Response::new(control::HeartbeatResponse::default()))
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
async fn a_runner_that_is_refused_for_its_protocol_version_says_what_to_do_serves_on_and_registers_by_itself()
{
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
    let told = told();
    assert!(told[0].contains("ERROR") && told[0].contains(REFUSAL), "{told:?}");
    assert_eq!(other.beats.load(Ordering::SeqCst), 0);

    // Nobody touches the runner when the control plane's release is the right one: it is registered, and beats.
    other.upgraded.store(true, Ordering::SeqCst);
    wait_until("the runner beats", BOUND, || other.beats.load(Ordering::SeqCst) > 0).await.unwrap();
    let asked = other.asked();
    assert!(asked.len() >= 2, "{asked:?}");
    for (_, request) in &asked {
        assert_eq!(request.protocol_version, described.protocol_version);
        assert_eq!(request.runner_id, asked[0].1.runner_id);
    }
    for pair in asked.windows(2) {
        assert!(pair[1].0 - pair[0].0 >= PAUSE, "it asks again and again: {asked:?}");
    }
    server.abort();
}
