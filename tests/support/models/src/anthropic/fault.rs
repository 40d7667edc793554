//! Faults in the words of the Messages API.

use bytes::Bytes;
use serde_json::Value;

use super::wire;
use crate::{script::Fault, walk::Failure};

/// A fault from before the headers; `None` if no header ever comes.
pub(crate) fn failure(fault: &Fault) -> Option<Failure> {
    Some(match fault {
        Fault::Status { status, kind, message, headers } => http(*status, kind, message, headers.clone()),
        Fault::Limit { reset, message } => {
            let headers = [
                ("x-should-retry", "false"),
                ("retry-after", "3600"),
                ("anthropic-ratelimit-unified-status", "rejected"),
                ("anthropic-ratelimit-unified-reset", &reset.to_string()),
                ("anthropic-ratelimit-unified-representative-claim", "five_hour"),
            ];
            let headers = headers.map(|(name, value)| (name.to_owned(), value.to_owned())).to_vec();
            let message =
                message.as_deref().unwrap_or("This request would exceed your account's rate limit.");
            http(429, "rate_limit_error", message, headers)
        }
        Fault::TooLong { message } => {
            let message = message.as_deref().unwrap_or("prompt is too long: 250000 tokens > 200000 maximum");
            http(400, "invalid_request_error", message, Vec::new())
        }
        Fault::Credit { message } => {
            let usual = "Your credit balance is too low to access the Anthropic API.";
            http(400, "invalid_request_error", message.as_deref().unwrap_or(usual), Vec::new())
        }
        _ => return None,
    })
}

/// A refusal by this server itself.
pub(crate) fn refuse(status: u16, message: &str) -> Failure {
    let kind = match status {
        413 => "request_too_large",
        404 => "not_found_error",
        _ => "invalid_request_error",
    };
    http(status, kind, message, Vec::new())
}

/// The event that breaks a stream off.
pub(crate) fn broken(kind: &str) -> Vec<Bytes> {
    vec![wire::event(&error(kind, "scripted failure"))]
}

fn http(status: u16, kind: &str, message: &str, headers: Vec<(String, String)>) -> Failure {
    Failure::Http { status, body: error(kind, message), headers }
}

/// The body of an error, in a stream or not.
fn error(kind: &str, message: &str) -> Value {
    serde_json::json!({"type": "error", "error": {"type": kind, "message": message}})
}
