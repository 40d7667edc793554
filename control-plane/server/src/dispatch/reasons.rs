//! The errors that the control plane itself ends turns with: each says what happened and what to do next.

use roundhouse_domain::outcome::{Reason, TurnError};
use roundhouse_domain::workspace::SlotHolder;
use roundhouse_proto::engine::v1::ErrorReason;

/// Longest message of an error, in bytes.
const MAX_MESSAGE: usize = 4_000;

fn error(reason: Reason, message: impl Into<String>, next: impl Into<String>) -> TurnError {
    let message: String = message.into();
    TurnError::new(reason, roundhouse_domain::limits::cut(&message, MAX_MESSAGE).0, next)
}

pub(crate) fn cancelled() -> TurnError {
    error(Reason::Cancelled, "the turn was cancelled", "retry the turn or send another message")
}

pub(crate) fn no_workspace() -> TurnError {
    error(
        Reason::Configuration,
        "neither the message nor the conversation names a workspace",
        "send the message again and name a workspace",
    )
}

pub(crate) fn no_agent() -> TurnError {
    error(
        Reason::Configuration,
        "neither the message nor the conversation names an agent",
        "send the message again and name an agent",
    )
}

pub(crate) fn held_by_lost(holder: &SlotHolder) -> TurnError {
    error(
        Reason::WorkspaceBusy,
        format!("{} is still held by turn {}, which was lost", holder.workspace.path, holder.turn_id),
        "bring its runner back, or free the workspace after making sure that nothing works there any more; then retry",
    )
    .retryable()
}

pub(crate) fn busy_on_runner(detail: &str) -> TurnError {
    error(
        Reason::WorkspaceBusy,
        format!("the runner says that the workspace is busy: {detail}"),
        "wait for the other turn or cancel it, then retry",
    )
    .retryable()
}

pub(crate) fn runner_away(runner: &str, detail: &str) -> TurnError {
    error(
        Reason::RunnerLost,
        format!("the runner {runner} could not be reached: {detail}"),
        "start the runner again, then retry; nothing was given to the engine",
    )
    .retryable()
}

pub(crate) fn draining(runner: &str) -> TurnError {
    error(
        Reason::RunnerLost,
        format!("the runner {runner} was drained and takes no new turns"),
        "start the runner again or end its draining, then retry",
    )
    .retryable()
}

pub(crate) fn stale(runner: &str) -> TurnError {
    error(
        Reason::RunnerLost,
        format!("the runner {runner} knows a newer owner of this conversation and has not registered since"),
        "restart the runner so that it registers, then retry",
    )
    .retryable()
}

pub(crate) fn runner_lost(runner: &str, silent_s: u64) -> TurnError {
    error(
        Reason::RunnerLost,
        format!(
            "the runner {runner} was silent for {silent_s} s; nobody knows what the engine did meanwhile"
        ),
        "look at the workspace before retrying; it stays held until the runner is back or somebody frees it",
    )
    .retryable()
}

pub(crate) fn no_trace(runner: &str) -> TurnError {
    error(
        Reason::RunnerLost,
        format!("the runner {runner} is back without any record of this turn; the engine may have acted"),
        "look at the workspace before retrying; free it if nothing works there any more",
    )
    .retryable()
}

pub(crate) fn workspace_gone(path: &str, detail: &str) -> TurnError {
    error(
        Reason::Configuration,
        format!("the workspace {path} cannot be used: {detail}"),
        "restore the directory or name another workspace, and make sure that it lies under a root of the runner",
    )
}

pub(crate) fn agent_missing(name: &str, others: &[String], more: bool) -> TurnError {
    let there = match (others, more) {
        ([], _) => "there are no agent files".to_owned(),
        (others, false) => format!("there are: {}", others.join(", ")),
        (others, true) => format!("there are: {}, and more", others.join(", ")),
    };
    error(
        Reason::Configuration,
        format!("the workspace has no file .agents/{name}.md; {there}"),
        "write the agent file or name another agent, then send the message again or retry",
    )
}

pub(crate) fn agent_unreadable(name: &str, detail: &str) -> TurnError {
    error(
        Reason::Configuration,
        format!("the agent file .agents/{name}.md cannot be read: {detail}"),
        "make the file readable to the runner, then retry",
    )
    .retryable()
}

/// Of a file that can never be read as it is.
pub(crate) fn agent_unusable(name: &str, detail: &str) -> TurnError {
    error(
        Reason::Configuration,
        format!("the agent file .agents/{name}.md cannot be read: {detail}"),
        "put a regular file of at most 256 KiB in its place, then retry",
    )
}

pub(crate) fn agent_invalid(name: &str, problems: &str) -> TurnError {
    error(
        Reason::Configuration,
        format!("the agent file .agents/{name}.md is not valid: {problems}"),
        "correct the agent file, then retry",
    )
}

pub(crate) fn agent_disabled(name: &str) -> TurnError {
    error(
        Reason::Configuration,
        format!("the agent {name} is switched off (enabled: false)"),
        "set enabled: true in its file or name another agent",
    )
}

pub(crate) fn agent_trigger(name: &str, surface: &str) -> TurnError {
    error(
        Reason::Configuration,
        format!("the agent {name} cannot be used through {surface}"),
        format!("add {surface} to its triggers or name another agent"),
    )
}

pub(crate) fn context(detail: &str) -> TurnError {
    error(
        Reason::Configuration,
        format!("the context of the session could not be composed: {detail}"),
        "raise control_plane.context_budget",
    )
}

pub(crate) fn not_stored(detail: &str) -> TurnError {
    error(
        Reason::Storage,
        format!("something of the turn cannot be stored: {detail}"),
        "look at the control plane's log and at the workspace, then retry",
    )
}

pub(crate) fn unusable_twice(reason: &str) -> TurnError {
    error(
        Reason::SessionUnusable,
        format!("a replacement session could not be opened either: {reason}"),
        "look at the engine on the runner, then retry",
    )
    .retryable()
}

/// What a refused opening makes of the turn. The runner's own words tell more than its reason does, except about a login:
/// that is set where people set up the runner.
pub(crate) fn opening_refused(
    reason: Option<ErrorReason>,
    message: &str,
    told: Option<Box<TurnError>>,
) -> TurnError {
    let known = refused(reason, message);
    match told {
        Some(told) if told.reason != Reason::Auth => {
            TurnError { retryable: told.retryable || known.retryable, ..*told }
        }
        _ => known,
    }
}

/// What a runner's refusal to open a session or to take a message makes of the turn: the same reason.
pub(crate) fn refused(reason: Option<ErrorReason>, message: &str) -> TurnError {
    use ErrorReason as E;
    let (reason, next, retryable) = match reason {
        Some(E::EngineMissing) => (
            Reason::EngineMissing,
            "install the engine on the runner (`roundhouse engines install`), then retry",
            true,
        ),
        Some(E::Auth) => (
            Reason::Auth,
            "set a key under engines.<engine>.variables, or engines.<engine>.credentials = \"host\" to use \
                 the login of the runner's user; start the runner again, then retry",
            true,
        ),
        Some(E::Unsupported) => {
            (Reason::Unsupported, "change the agent file to what the engine can do, then retry", false)
        }
        Some(E::Configuration | E::Policy | E::FieldInvalid | E::WorkspaceNotFound | E::AgentInvalid) => {
            (Reason::Configuration, "correct the agent file or the runner's configuration, then retry", false)
        }
        Some(E::Storage | E::StoreUnavailable) => {
            (Reason::Storage, "make room on the runner's disk, then retry", true)
        }
        Some(E::WorkspaceBusy) => {
            (Reason::WorkspaceBusy, "wait for the other turn or cancel it, then retry", true)
        }
        Some(E::KeeperStuck) => {
            (Reason::IdleTimeout, "end the stopped engine on the runner, then retry", true)
        }
        Some(E::Draining | E::RunnerUnavailable | E::StaleEpoch) => {
            (Reason::RunnerLost, "start the runner again, then retry", true)
        }
        Some(_) | None => (Reason::Process, "look at the runner's log, then retry", true),
    };
    let mut error = error(reason, message, next);
    error.retryable = retryable;
    error
}
