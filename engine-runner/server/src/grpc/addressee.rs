//! Refuses calls that are meant for another runner: an address may have come to this one only lately.

use roundhouse_proto::RUNNER_ID_HEADER;
use tonic::{Request, Status};

use crate::error::Error;

/// Lets a call through that names the runner `ours`, or none.
///
/// # Errors
/// `OtherRunner`.
pub fn check(ours: &str, request: Request<()>) -> Result<Request<()>, Status> {
    match request.metadata().get(RUNNER_ID_HEADER) {
        Some(meant) if meant.as_bytes() != ours.as_bytes() => {
            let meant = meant.to_str().unwrap_or("(no id)").chars().take(64).collect();
            Err(Error::OtherRunner { meant, ours: ours.to_owned() }.into())
        }
        Some(_) | None => Ok(request),
    }
}

#[cfg(test)]
mod tests {
    use tonic::Code;

    use super::*;

    #[test]
    fn a_call_for_another_runner_is_refused_and_one_for_nobody_is_not() {
        let call = |meant: Option<&str>| {
            let mut request = Request::new(());
            if let Some(meant) = meant {
                request.metadata_mut().insert(RUNNER_ID_HEADER, meant.parse().unwrap());
            }
            check("run_a", request).map(|_| ())
        };
        assert!(call(None).is_ok() && call(Some("run_a")).is_ok());
        let refused = call(Some("run_b")).unwrap_err();
        assert_eq!(refused.code(), Code::FailedPrecondition);
        assert!(refused.message().contains("meant for the runner run_b; here answers run_a"), "{refused}");
    }
}
