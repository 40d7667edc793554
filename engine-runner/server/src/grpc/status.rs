//! The one place where an error becomes a gRPC status.

use std::{collections::HashMap, time::Duration};

use roundhouse_engines::Reason;
use roundhouse_proto::{ERROR_DOMAIN, engine::v1::ErrorReason};
use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt as _};

use crate::error::{Error, chain};

/// Details ride in a header: texts in them are cut to this many bytes.
const TEXT: usize = 1000;

/// When a caller may try again.
const RETRY: Duration = Duration::from_secs(2);

fn name(reason: ErrorReason) -> String {
    reason.as_str_name().trim_start_matches("ERROR_REASON_").to_owned()
}

fn cut(text: &str, limit: usize) -> String {
    let mut end = text.len().min(limit);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text[..end].to_owned()
}

/// The status of an error. Causes and what is internal are logged and never leave.
#[must_use]
pub fn from_error(error: &Error) -> Status {
    let mut metadata: HashMap<String, String> = HashMap::new();
    let mut details = ErrorDetails::new();
    let mut message = cut(&error.to_string(), TEXT);
    let (code, reason) = match error {
        Error::Invalid { field, message } => {
            details.add_bad_request_violation(*field, cut(message, TEXT));
            (Code::InvalidArgument, ErrorReason::FieldInvalid)
        }
        Error::TurnNotFound(id) => {
            metadata.insert("turn_id".to_owned(), cut(id, 64));
            (Code::NotFound, ErrorReason::TurnNotFound)
        }
        Error::SessionNotFound(id) => {
            metadata.insert("session_id".to_owned(), cut(id, 64));
            (Code::NotFound, ErrorReason::SessionNotFound)
        }
        Error::WorkspaceNotFound { .. } => (Code::NotFound, ErrorReason::WorkspaceNotFound),
        Error::PermissionNotFound(_) => (Code::NotFound, ErrorReason::PermissionNotFound),
        Error::StaleEpoch { conversation, highest, unacknowledged, .. } => {
            metadata.insert("conversation_id".to_owned(), conversation.clone());
            metadata.insert("current".to_owned(), highest.to_string());
            metadata.insert("unacknowledged".to_owned(), cut(&unacknowledged.join(","), TEXT));
            (Code::Aborted, ErrorReason::StaleEpoch)
        }
        Error::WorkspaceBusy { turn_id } => {
            metadata.insert("turn_id".to_owned(), turn_id.clone());
            (Code::FailedPrecondition, ErrorReason::WorkspaceBusy)
        }
        Error::TurnInProgress { turn_id } => {
            metadata.insert("turn_id".to_owned(), turn_id.clone());
            (Code::FailedPrecondition, ErrorReason::TurnInProgress)
        }
        Error::OtherRunner { ours, .. } => {
            metadata.insert("runner_id".to_owned(), ours.clone());
            (Code::FailedPrecondition, ErrorReason::RunnerConflict)
        }
        Error::WrongState(_) => (Code::FailedPrecondition, ErrorReason::WrongState),
        Error::Draining => {
            details.set_retry_info(Some(RETRY));
            (Code::Unavailable, ErrorReason::Draining)
        }
        Error::SlowReader { last_number } => {
            metadata.insert("last_number".to_owned(), last_number.to_string());
            (Code::ResourceExhausted, ErrorReason::SlowReader)
        }
        Error::Policy(_) => (Code::FailedPrecondition, ErrorReason::Policy),
        Error::Refused { failure, started } => {
            metadata.insert("failure_reason".to_owned(), failure.reason.name().to_owned());
            metadata.insert("next_action".to_owned(), cut(&failure.what_to_do, TEXT));
            metadata.insert("retryable".to_owned(), failure.retryable.to_string());
            metadata.insert("unavailable".to_owned(), failure.unavailable.to_string());
            if !failure.stderr_tail.is_empty() {
                metadata.insert("stderr_tail".to_owned(), cut(&failure.stderr_tail, TEXT));
            }
            (Code::FailedPrecondition, refusal(failure.reason, *started))
        }
        Error::KeeperStuck => {
            details.set_retry_info(Some(RETRY));
            (Code::Unavailable, ErrorReason::KeeperStuck)
        }
        Error::Storage { .. } => {
            tracing::error!(error = chain(error), "storage");
            details.set_retry_info(Some(RETRY));
            (Code::Unavailable, ErrorReason::Storage)
        }
        Error::Internal(_) => {
            let correlation = uuid::Uuid::new_v4().simple().to_string();
            tracing::error!(error = chain(error), correlation, "internal error");
            message = format!("internal error; the runner's log tells more under {correlation}");
            metadata.insert("correlation_id".to_owned(), correlation);
            (Code::Internal, ErrorReason::Internal)
        }
    };
    details.set_error_info(name(reason), ERROR_DOMAIN, metadata);
    Status::with_error_details(code, message, details)
}

/// The reason of a refused opening.
fn refusal(reason: Reason, started: bool) -> ErrorReason {
    match reason {
        Reason::EngineMissing => ErrorReason::EngineMissing,
        Reason::Auth => ErrorReason::Auth,
        Reason::Unsupported => ErrorReason::Unsupported,
        Reason::Configuration => ErrorReason::Configuration,
        Reason::Storage => ErrorReason::Storage,
        Reason::PermissionDenied => ErrorReason::Policy,
        Reason::WorkspaceBusy => ErrorReason::WorkspaceBusy,
        Reason::Cancelled if !started => ErrorReason::WrongState,
        Reason::Quota
        | Reason::SessionUnusable
        | Reason::ContextTooLong
        | Reason::Process
        | Reason::OutputInvalid
        | Reason::IdleTimeout
        | Reason::Deadline
        | Reason::Stuck
        | Reason::RunnerLost
        | Reason::Cancelled => ErrorReason::EngineStartFailed,
    }
}

impl From<Error> for Status {
    fn from(error: Error) -> Self {
        from_error(&error)
    }
}

#[cfg(test)]
mod tests {
    use roundhouse_engines::Failure;

    use super::*;

    #[test]
    fn details_name_the_reason_and_stay_small() {
        let long = "ü".repeat(5000);
        let errors = [
            Error::invalid("turn_id", long.clone()),
            Error::Refused {
                failure: Box::new(Failure {
                    stderr_tail: long.clone(),
                    what_to_do: long.clone(),
                    ..Failure::new(Reason::EngineMissing, &long)
                }),
                started: false,
            },
            Error::StaleEpoch {
                conversation: "cnv_1".into(),
                given: 1,
                highest: 2,
                unacknowledged: vec!["trn_1:1".into(); 500],
            },
        ];
        for (error, reason) in errors.iter().zip(["FIELD_INVALID", "ENGINE_MISSING", "STALE_EPOCH"]) {
            let status = from_error(error);
            let info = status.get_details_error_info().unwrap();
            assert_eq!((info.reason.as_str(), info.domain.as_str()), (reason, "roundhouse"));
            assert!(status.details().len() < 4096, "{reason}: {}", status.details().len());
        }
    }

    #[test]
    fn internal_text_does_not_leave() {
        let status = from_error(&Error::Internal("secret".into()));
        assert!(!status.message().contains("secret"));
        assert!(status.get_details_error_info().unwrap().metadata.contains_key("correlation_id"));
    }
}
