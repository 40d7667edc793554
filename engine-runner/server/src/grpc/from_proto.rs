//! From the contract's words to ours: every check of a request's form, with the field's name.

use std::time::Duration;

use roundhouse_engines::{Effort, Permissions};
use roundhouse_proto::engine::v1 as proto;

use crate::{
    error::Error,
    ids,
    request::{Answer, Open, Send},
    workspace::sha256,
};

/// The longest message, in bytes.
pub(super) const MESSAGE_BYTES: usize = 1024 * 1024;

/// The longest agent prompt, in bytes: it is an argument of the engine.
const PROMPT_BYTES: usize = 100 * 1024;

/// The longest context, in bytes. The composer's budget lies far below it.
const CONTEXT_BYTES: usize = 2 * 1024 * 1024;

/// The longest feedback, in bytes.
const FEEDBACK_BYTES: usize = 4000;

/// The longest duration that an option may have.
const LONGEST: Duration = Duration::from_secs(30 * 24 * 3600);

/// An id of ours.
///
/// # Errors
/// [`Error::Invalid`].
pub(super) fn id(field: &'static str, value: String) -> Result<String, Error> {
    if ids::is_valid(&value) {
        Ok(value)
    } else {
        Err(Error::invalid(field, "must be 1 to 64 of letters, digits, _ and -, without a leading -"))
    }
}

/// An epoch.
///
/// # Errors
/// [`Error::Invalid`] for 0.
pub(super) fn epoch(value: u64) -> Result<u64, Error> {
    if value == 0 { Err(Error::invalid("epoch", "must be at least 1")) } else { Ok(value) }
}

fn bounded(field: &'static str, value: String, limit: usize) -> Result<String, Error> {
    if value.len() > limit {
        return Err(Error::invalid(field, format!("has {} bytes; at most {limit} are allowed", value.len())));
    }
    Ok(value)
}

/// A length of time, longer than nothing.
///
/// # Errors
/// [`Error::Invalid`].
pub(super) fn duration(field: &'static str, value: prost_types::Duration) -> Result<Duration, Error> {
    let wrong = || Error::invalid(field, "must be longer than 0 and at most 30 days");
    let duration = Duration::try_from(value).map_err(|_| wrong())?;
    if duration.is_zero() || duration > LONGEST { Err(wrong()) } else { Ok(duration) }
}

/// StartOrResume.
///
/// # Errors
/// [`Error::Invalid`] names the first field that is wrong.
pub(super) fn open(request: proto::StartOrResumeRequest) -> Result<Open, Error> {
    let options = request.options.unwrap_or_default();
    let permissions = match options.permissions() {
        proto::PermissionMode::Unspecified | proto::PermissionMode::Ask => Permissions::Ask,
        proto::PermissionMode::AcceptEdits => Permissions::AcceptEdits,
        proto::PermissionMode::Bypass => Permissions::Bypass,
    };
    if proto::PermissionMode::try_from(options.permissions).is_err() {
        return Err(Error::invalid("options.permissions", "is not a known mode"));
    }
    let effort = match request.effort {
        None => None,
        Some(name) => Some(
            Effort::from_name(&name)
                .ok_or_else(|| Error::invalid("effort", format!("{name:?} is not a known level")))?,
        ),
    };
    let native_id = match request.native_ref {
        None => None,
        Some(native) => {
            let good = (1..=128).contains(&native.id.len())
                && !native.id.starts_with('-')
                && native.id.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_' || b == b'-');
            if !good {
                return Err(Error::invalid(
                    "native_ref.id",
                    "must be 1 to 128 of letters, digits, _ and -, without a leading -",
                ));
            }
            Some(native.id)
        }
    };
    if request.model.is_empty() || request.model.len() > 160 {
        return Err(Error::invalid("model", "must have 1 to 160 bytes"));
    }
    let prompt = bounded("agent_prompt", request.agent_prompt, PROMPT_BYTES)?;
    let prompt_sha256 = sha256(prompt.as_bytes());
    if !request.agent_prompt_sha256.is_empty() && request.agent_prompt_sha256 != prompt_sha256 {
        return Err(Error::invalid("agent_prompt_sha256", "is not the hash of agent_prompt"));
    }
    let replaces =
        if request.replaces.is_empty() { String::new() } else { id("replaces", request.replaces)? };
    Ok(Open {
        conversation_id: id("conversation_id", request.conversation_id)?,
        session_id: id("session_id", request.session_id)?,
        turn_id: id("turn_id", request.turn_id)?,
        epoch: epoch(request.epoch)?,
        workspace: bounded("workspace", request.workspace, 4096)?,
        engine: id("engine", request.engine)?,
        model: request.model,
        effort,
        agent: bounded("agent", request.agent, 64)?,
        prompt,
        prompt_sha256,
        context: bounded("context", request.context, CONTEXT_BYTES)?,
        native_id,
        replaces,
        permissions,
        idle_timeout: options.idle_timeout.map(|d| duration("options.idle_timeout", d)).transpose()?,
        deadline: options.deadline.map(|d| duration("options.deadline", d)).transpose()?,
        held: request.last_number,
    })
}

/// Send.
///
/// # Errors
/// [`Error::Invalid`] names the first field that is wrong.
pub(super) fn send(request: proto::SendRequest) -> Result<Send, Error> {
    if request.mode() != proto::SendMode::NewTurn {
        return Err(Error::invalid("mode", "must be SEND_MODE_NEW_TURN"));
    }
    if request.text.is_empty() {
        return Err(Error::invalid("text", "must not be empty"));
    }
    Ok(Send {
        session_id: id("session_id", request.session_id)?,
        turn_id: id("turn_id", request.turn_id)?,
        epoch: epoch(request.epoch)?,
        message_id: id("message_id", request.message_id)?,
        text: bounded("text", request.text, MESSAGE_BYTES)?,
    })
}

/// AnswerPermission.
///
/// # Errors
/// [`Error::Invalid`] names the first field that is wrong.
pub(super) fn answer(request: proto::AnswerPermissionRequest) -> Result<Answer, Error> {
    let allow = match request.decision() {
        proto::PermissionDecision::Allow => true,
        proto::PermissionDecision::Deny => false,
        proto::PermissionDecision::Unspecified => {
            return Err(Error::invalid("decision", "must be ALLOW or DENY"));
        }
    };
    Ok(Answer {
        turn_id: id("turn_id", request.turn_id)?,
        epoch: epoch(request.epoch)?,
        allow,
        feedback: bounded("feedback", request.feedback, FEEDBACK_BYTES)?,
        request_id: bounded("request_id", request.request_id, 128)?,
    })
}
