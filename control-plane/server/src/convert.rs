//! From the store's errors to the errors of calls.

use roundhouse_domain::conflict::{Conflict, Kind};
use roundhouse_domain::turn::RetryRefusal;
use roundhouse_store::Error as StoreError;

use crate::error::{Error, Missing, Violation};

impl From<StoreError> for Error {
    fn from(error: StoreError) -> Self {
        match error {
            StoreError::NotFound { kind, id } => not_found(kind, id),
            StoreError::Conflict(conflict) => conflicting(conflict),
            StoreError::Invalid { field, problem } => {
                Self::Invalid(vec![Violation { field, description: problem }])
            }
            StoreError::Unavailable { reason, message } => {
                tracing::warn!(?reason, message, "the store is unavailable");
                Self::StoreUnavailable
            }
            StoreError::InUse { .. } | StoreError::NewerSchema { .. } | StoreError::Open { .. } => {
                Self::internal(error.to_string())
            }
            StoreError::Corrupt(_) | StoreError::Internal(_) => Self::internal(error.to_string()),
        }
    }
}

fn not_found(kind: Kind, id: String) -> Error {
    let kind = match kind {
        Kind::Conversation => Missing::Conversation,
        Kind::Turn => Missing::Turn,
        Kind::Session => Missing::Session,
        Kind::Workspace => Missing::Workspace,
        Kind::Runner => Missing::Runner,
        Kind::Permission => Missing::Permission,
        Kind::Summary => Missing::Summary,
        // No call names a message; one that is missing is a hole in what is stored.
        Kind::Message => return Error::internal(format!("message {id} is missing")),
    };
    Error::NotFound { kind, id }
}

fn conflicting(conflict: Conflict) -> Error {
    let message = conflict.to_string();
    match conflict {
        Conflict::RequestIdReused => Error::RequestIdReused,
        Conflict::StaleEpoch { given, current } => Error::StaleEpoch { given: given.0, current: current.0 },
        Conflict::TurnInProgress | Conflict::Retry(RetryRefusal::NotEnded(_)) => {
            Error::TurnInProgress { message }
        }
        Conflict::QueueFull { limit } => Error::QueueFull { limit },
        Conflict::TurnEnded(_)
        | Conflict::IllegalTransition(_)
        | Conflict::Retry(RetryRefusal::Completed | RetryRefusal::NotLast)
        | Conflict::OtherHolder => Error::WrongState { message },
        Conflict::SummaryVersion { expected, current } => Error::VersionMismatch { expected, current },
        Conflict::CursorUnknown => Error::CursorInvalid,
        // The caller knows the conversation and makes a cursor of the number.
        Conflict::CursorPruned { pruned_through } => {
            Error::CursorPruned { oldest: pruned_through.to_string() }
        }
        Conflict::EventGap { .. } | Conflict::SessionUnfit(_) | Conflict::AlreadySet(_) => {
            Error::internal(message)
        }
    }
}
