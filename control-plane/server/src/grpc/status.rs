//! The one place where an [`Error`] becomes a gRPC status with google.rpc details.

use std::collections::HashMap;

use roundhouse_proto::ERROR_DOMAIN;
use roundhouse_proto::engine::v1::ErrorReason;
use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt as _};

use crate::error::{Error, Missing};

/// Prefix of the enum's names in the proto; details carry the name without it.
const PREFIX: &str = "ERROR_REASON_";
/// Longest text that goes into a status: details ride in a header and stay under 4 KiB.
const MAX_TEXT: usize = 1_000;
/// Most field violations that go into a status.
const MAX_VIOLATIONS: usize = 8;

/// The status for an error.
pub(crate) fn to_status(error: &Error) -> Status {
    use ErrorReason as R;
    let mut metadata = HashMap::new();
    let mut details = ErrorDetails::new();
    let (code, reason) = match error {
        Error::Invalid(violations) => {
            for violation in violations.iter().take(MAX_VIOLATIONS) {
                details.add_bad_request_violation(violation.field, cut(&violation.description, 200));
            }
            (Code::InvalidArgument, name(R::FieldInvalid))
        }
        Error::NotFound { kind, id } => {
            let reason = match kind {
                Missing::Conversation => R::ConversationNotFound,
                Missing::Turn => R::TurnNotFound,
                Missing::Session => R::SessionNotFound,
                Missing::Workspace => R::WorkspaceNotFound,
                Missing::Runner => R::RunnerNotFound,
                Missing::Permission => R::PermissionNotFound,
                Missing::Summary => R::SummaryNotFound,
            };
            details.set_resource_info(kind.word(), cut(id, 200), "", "");
            (Code::NotFound, name(reason))
        }
        Error::NoWorkspace { path, .. } => {
            details.set_resource_info(Missing::Workspace.word(), cut(path, 200), "", "");
            (Code::NotFound, name(R::WorkspaceNotFound))
        }
        Error::RequestIdReused => (Code::AlreadyExists, name(R::RequestIdReused)),
        Error::WrongState { .. } => (Code::FailedPrecondition, name(R::WrongState)),
        Error::TurnInProgress { .. } => (Code::FailedPrecondition, name(R::TurnInProgress)),
        Error::QueueFull { .. } => (Code::ResourceExhausted, name(R::QueueFull)),
        Error::StaleEpoch { given, current } => {
            metadata.insert("given".to_owned(), given.to_string());
            metadata.insert("current".to_owned(), current.to_string());
            (Code::Aborted, name(R::StaleEpoch))
        }
        Error::Draining => (Code::Unavailable, name(R::Draining)),
        Error::StoreUnavailable => (Code::Unavailable, name(R::StoreUnavailable)),
        Error::RunnerUnavailable { runner, .. } => {
            metadata.insert("runner_id".to_owned(), cut(runner, 64));
            (Code::Unavailable, name(R::RunnerUnavailable))
        }
        Error::ProtocolVersion { theirs, ours } => {
            metadata.insert("runner_version".to_owned(), theirs.to_string());
            metadata.insert("control_plane_version".to_owned(), ours.to_string());
            (Code::FailedPrecondition, name(R::ProtocolVersion))
        }
        Error::RunnerBound { bound_to, .. } => {
            metadata.insert("control_plane_id".to_owned(), cut(bound_to, 64));
            (Code::FailedPrecondition, name(R::RunnerBound))
        }
        Error::RunnerConflict { runner, address, .. } => {
            metadata.insert("runner_id".to_owned(), cut(runner, 64));
            metadata.insert("address".to_owned(), cut(address, 200));
            (Code::FailedPrecondition, name(R::RunnerConflict))
        }
        Error::VersionMismatch { expected, current } => {
            metadata.insert("expected_version".to_owned(), expected.to_string());
            metadata.insert("current_version".to_owned(), current.to_string());
            (Code::Aborted, name(R::VersionMismatch))
        }
        Error::TargetMissing { what } => {
            metadata.insert("missing".to_owned(), (*what).to_owned());
            (Code::FailedPrecondition, name(R::TargetMissing))
        }
        Error::CursorInvalid => (Code::InvalidArgument, name(R::CursorInvalid)),
        Error::CursorPruned { oldest } => {
            metadata.insert("oldest_cursor".to_owned(), oldest.clone());
            (Code::OutOfRange, name(R::CursorPruned))
        }
        Error::SlowReader { last_cursor } => {
            metadata.insert("last_cursor".to_owned(), last_cursor.clone());
            (Code::ResourceExhausted, name(R::SlowReader))
        }
        Error::Refused { reason, .. } => (refused(reason), reason.clone()),
        Error::Internal { context } => {
            let correlation = uuid::Uuid::now_v7().simple().to_string();
            tracing::error!(correlation_id = %correlation, context = %context, "a call failed by a mistake of ours");
            metadata.insert("correlation_id".to_owned(), correlation);
            (Code::Internal, name(R::Internal))
        }
    };
    details.set_error_info(reason, ERROR_DOMAIN, metadata);
    if let Some(after) = error.retry_after() {
        details.set_retry_info(Some(after));
    }
    Status::with_error_details(code, cut(&error.to_string(), MAX_TEXT), details)
}

/// The code that a runner's reason stands for when its refusal is passed on.
fn refused(reason: &str) -> Code {
    match ErrorReason::from_str_name(&format!("{PREFIX}{reason}")) {
        Some(ErrorReason::WorkspaceNotFound) => Code::NotFound,
        Some(ErrorReason::FieldInvalid) => Code::InvalidArgument,
        Some(_) | None => Code::FailedPrecondition,
    }
}

/// A reason as it stands in the details.
pub(crate) fn name(reason: ErrorReason) -> String {
    let full = reason.as_str_name();
    full.strip_prefix(PREFIX).unwrap_or(full).to_owned()
}

/// The reason in a status' details, if it is one of ours.
pub(crate) fn reason_of(status: &Status) -> Option<ErrorReason> {
    let info = status.get_details_error_info()?;
    if info.domain != ERROR_DOMAIN {
        return None;
    }
    ErrorReason::from_str_name(&format!("{PREFIX}{}", info.reason))
}

fn cut(text: &str, max: usize) -> String {
    roundhouse_domain::limits::cut(text, max).0.to_owned()
}

impl From<Error> for Status {
    fn from(error: Error) -> Self {
        to_status(&error)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn field_violations_are_named_and_bounded() {
        let many = (0..40)
            .map(|_| crate::error::Violation { field: "text", description: "ä".repeat(5_000) })
            .collect::<Vec<_>>();
        let status = to_status(&Error::Invalid(many));
        assert_eq!(status.code(), Code::InvalidArgument);
        assert_eq!(reason_of(&status), Some(ErrorReason::FieldInvalid));
        assert!(status.details().len() < 4_096, "{} bytes of details", status.details().len());
        let violations = status.get_details_bad_request().expect("a bad request").field_violations;
        assert_eq!(violations.len(), MAX_VIOLATIONS);
        assert_eq!(violations[0].field, "text");
    }

    #[test]
    fn what_passes_by_itself_says_when_to_retry() {
        for error in [Error::QueueFull { limit: 100 }, Error::Draining, Error::StoreUnavailable] {
            let status = to_status(&error);
            let retry = status.get_details_retry_info().and_then(|info| info.retry_delay);
            assert!(retry.is_some_and(|delay| delay >= Duration::from_secs(1)), "{error:?}");
        }
        assert!(to_status(&Error::RequestIdReused).get_details_retry_info().is_none());
    }

    #[test]
    fn internal_context_never_leaves() {
        let status = to_status(&Error::internal("row 7 of /var/lib/x"));
        assert_eq!(status.code(), Code::Internal);
        assert!(!status.message().contains("/var/lib"));
        assert!(!String::from_utf8_lossy(status.details()).contains("/var/lib"));
        assert!(status.get_details_error_info().unwrap().metadata.contains_key("correlation_id"));
    }
}
