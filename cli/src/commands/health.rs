//! `health`: does a service serve? For the health checks of containers and service managers.

use std::time::Duration;

use serde_json::json;
use tonic::transport::Endpoint;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

use crate::exit::Exit;
use crate::output::Output;
use crate::status::Failure;

/// A service that does not answer in this time does not serve.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Asks the service at `url`, a control plane or a runner, over grpc.health.v1.
pub(crate) async fn run(url: &str, output: Output) -> Result<Exit, Failure> {
    let uri = if url.contains("://") { url.to_owned() } else { format!("http://{url}") };
    let endpoint = Endpoint::from_shared(uri)
        .map_err(|error| Failure::new(Exit::Usage, format!("{url:?} is no URL: {error}")))?;
    let check = async {
        let channel =
            endpoint.connect_timeout(TIMEOUT).connect().await.map_err(|error| {
                Failure::new(Exit::Unreachable, format!("nothing answers at {url}: {error}"))
            })?;
        let request = HealthCheckRequest { service: String::new() };
        Ok::<_, Failure>(HealthClient::new(channel).check(request).await?.into_inner().status)
    };
    let status = tokio::time::timeout(TIMEOUT, check).await.map_err(|_| {
        Failure::new(Exit::Unreachable, format!("{url} did not answer within {} s", TIMEOUT.as_secs()))
    })??;
    let serving = status == ServingStatus::Serving as i32;
    output.result(
        || json!({"url": url, "serving": serving}),
        || format!("{url} {}", if serving { "serves" } else { "does not serve" }),
    );
    Ok(if serving { Exit::Done } else { Exit::Failed })
}
