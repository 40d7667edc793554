//! Faults in the words of the Responses API.

use bytes::Bytes;
use serde_json::{Value, json};

use super::wire;
use crate::{script::Fault, walk::Failure};

/// The rate-limit window that a usage limit is told for, in minutes.
const WINDOW: &str = "300";

/// A fault from before the headers; `None` if no header ever comes.
pub(crate) fn failure(fault: &Fault, streams: bool) -> Option<Failure> {
    Some(match fault {
        Fault::Status { status, kind, message, headers } => http_error(*status, kind, message, headers),
        Fault::Limit { reset, message } => limit(*reset, message.as_deref()),
        Fault::TooLong { message } => {
            let usual = "Your input exceeds the context window of this model. Please adjust your input and try again.";
            early("context_length_exceeded", message.as_deref().unwrap_or(usual), 400, streams)
        }
        Fault::Credit { message } => {
            let usual = "You exceeded your current quota, please check your plan and billing details.";
            early("insufficient_quota", message.as_deref().unwrap_or(usual), 429, streams)
        }
        _ => return None,
    })
}

/// A refusal by this server itself.
pub(crate) fn refuse(status: u16, message: &str) -> Failure {
    let body = error("invalid_request_error", None, message);
    Failure::Http { status, body, headers: Vec::new() }
}

/// The event that breaks a stream off.
pub(crate) fn broken(kind: &str) -> Vec<Bytes> {
    let code = code_of(kind).unwrap_or(kind);
    wire::failed(code, sentence(code))
}

/// What the API says for a code.
fn sentence(code: &str) -> &'static str {
    match code {
        "rate_limit_exceeded" => "Rate limit reached for this model. Please try again in 1s.",
        "insufficient_quota" => {
            "You exceeded your current quota, please check your plan and billing details."
        }
        "context_length_exceeded" => "Your input exceeds the context window of this model.",
        "server_is_overloaded" => "The server is currently overloaded. Please try again later.",
        "server_error" => "The server had an error while processing your request.",
        _ => "scripted failure",
    }
}

/// This API's code for the other one's kind of error; `None` if it is no such word.
fn code_of(kind: &str) -> Option<&'static str> {
    Some(match kind {
        "overloaded_error" => "server_is_overloaded",
        "rate_limit_error" => "rate_limit_exceeded",
        "api_error" => "server_error",
        "authentication_error" => "invalid_api_key",
        "permission_error" => "unsupported_country_region_territory",
        "not_found_error" => "model_not_found",
        "invalid_request_error" | "request_too_large" => "invalid_request_error",
        _ => return None,
    })
}

fn error(kind: &str, code: Option<&str>, message: &str) -> Value {
    json!({"error": {"message": message, "type": kind, "param": null, "code": code}})
}

/// An HTTP error. `kind` is the other API's word if the script named none: then type and code are what this API says
/// with that status; else it is the code.
fn http_error(status: u16, kind: &str, message: &str, headers: &[(String, String)]) -> Failure {
    // This API has no 529; it says the same with 503 and a code.
    let overloaded = status == 529;
    let status = if overloaded { 503 } else { status };
    let code = code_of(kind).unwrap_or(kind);
    let (kind, code) = match status {
        _ if code_of(kind).is_none() => (kind, Some(code)),
        401 => ("invalid_request_error", Some(code)),
        403 | 404 => ("invalid_request_error", Some(code)),
        429 => ("rate_limit_error", Some(code)),
        503 if overloaded => ("service_unavailable_error", Some(code)),
        500.. => ("server_error", None),
        _ => ("invalid_request_error", None),
    };
    let headers = headers.iter().filter(|(name, _)| name != "x-should-retry").cloned().collect();
    Failure::Http { status, body: error(kind, code, message), headers }
}

/// What the API tells inside of a stream, with a status of 200; without a stream, by status.
fn early(code: &str, message: &str, status: u16, streams: bool) -> Failure {
    if streams {
        return Failure::Stream(wire::failed(code, message));
    }
    let kind = if status == 429 { code } else { "invalid_request_error" };
    Failure::Http { status, body: error(kind, Some(code), message), headers: Vec::new() }
}

/// The limit of a subscription: the time of its end in the body and in headers.
fn limit(reset: u64, message: Option<&str>) -> Failure {
    let body = json!({"error": {
        "type": "usage_limit_reached", "message": message.unwrap_or("The usage limit has been reached"),
        "plan_type": "plus", "resets_at": reset,
    }});
    let headers = [
        ("x-codex-primary-used-percent", "100.0"),
        ("x-codex-primary-window-minutes", WINDOW),
        ("x-codex-primary-reset-at", &reset.to_string()),
    ];
    let headers = headers.map(|(name, value)| (name.to_owned(), value.to_owned())).to_vec();
    Failure::Http { status: 429, body, headers }
}
