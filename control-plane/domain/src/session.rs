//! Sessions: native sessions of engines, and which one a turn continues with.

use serde::{Deserialize, Serialize};

use crate::agent_file::AgentSnapshot;
use crate::id::{ConversationId, SessionId, TurnId, WorkspaceId};
use crate::message::Position;
use crate::time::Timestamp;

/// What an engine needs to resume a session, encoded by whoever knows the engine. Opaque here.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct NativeRef(pub Vec<u8>);

named_enum! {
    /// How a turn's session came to be.
    pub enum Origin {
        /// A new one.
        Started = "STARTED",
        /// An earlier one, continued. Also when it was still open.
        Resumed = "RESUMED",
        /// A new one in the place of one that was unusable.
        Replaced = "REPLACED",
        /// Split off another one.
        Forked = "FORKED",
        /// Brought from another runner.
        Moved = "MOVED",
    }
}

named_enum! {
    /// How the agent's prompt reached the session.
    pub enum PromptUse {
        /// The session was opened with it.
        Initial = "INITIAL",
        /// It has not changed since.
        Unchanged = "UNCHANGED",
        /// It changed, and was applied when the session was resumed.
        AppliedOnResume = "APPLIED_ON_RESUME",
        /// It changed, the engine cannot apply it, so a new session was made.
        NewSession = "NEW_SESSION",
    }
}

/// What a turn's session is, and what was given to it: never more than what happened.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Opening {
    /// How the session came to be.
    pub origin: Origin,
    /// How the agent's prompt reached it.
    pub prompt: PromptUse,
    /// Whether a summary was given.
    pub summary: bool,
    /// How many messages of the history were given as context.
    pub history: u32,
    /// How many messages were left out for want of room.
    pub omitted: u32,
    /// The last position that was given; unset when no history was given.
    pub through: Option<Position>,
}

/// Whether a session can be continued.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SessionState {
    /// It can.
    Active,
    /// It cannot, for this reason. Never active again; its files are kept.
    Unusable(String),
}

/// One session, as stored.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Session {
    /// Our id.
    pub id: SessionId,
    /// Its conversation.
    pub conversation_id: ConversationId,
    /// Its workspace.
    pub workspace_id: WorkspaceId,
    /// The agent it was made for.
    pub agent_name: String,
    /// Its engine.
    pub engine: String,
    /// The model it was last used with.
    pub model: String,
    /// SHA-256 of the agent prompt it was last given, in hexadecimal.
    pub prompt_sha256: String,
    /// Whether it can be continued.
    pub state: SessionState,
    /// What the engine needs to resume it; unset until it was revealed and known to be resumable.
    pub native_ref: Option<NativeRef>,
    /// The engine has everything up to this position.
    pub watermark: Position,
    /// The session it stands in for.
    pub replaces: Option<SessionId>,
    /// The turn it was made for.
    pub created_by: TurnId,
    /// When its row was made.
    pub create_time: Timestamp,
    /// When a turn last chose it.
    pub use_time: Timestamp,
}

/// What a turn needs of a session.
#[derive(Clone, Copy, Debug)]
pub struct Want<'a> {
    /// The turn's conversation.
    pub conversation_id: &'a ConversationId,
    /// Its workspace.
    pub workspace_id: &'a WorkspaceId,
    /// Its agent, as snapshot.
    pub agent: &'a AgentSnapshot,
    /// Whether the engine applies a changed prompt when it resumes.
    pub prompt_change_on_resume: bool,
}

/// Why a session cannot be continued by a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Incompatible {
    /// Of another conversation: sessions are never shared.
    Conversation,
    /// In another workspace.
    Workspace,
    /// Of another agent.
    Agent,
    /// Of another engine.
    Engine,
    /// The engine cannot continue it with the wanted model.
    Model,
    /// Not active.
    Unusable,
    /// The agent's prompt changed, and the engine cannot apply it.
    Prompt,
}

/// Which session a turn works in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Choice {
    /// This one is continued.
    Resume {
        /// The session.
        session_id: SessionId,
        /// How the prompt reaches it.
        prompt: PromptUse,
    },
    /// A new one is made; earlier ones are kept.
    New {
        /// How the prompt reaches it.
        prompt: PromptUse,
    },
}

/// Whether `session` can be continued by the turn: same conversation, workspace, agent and engine, a model
/// that the engine can continue with, active. Reasoning effort does not matter.
///
/// `continues(from, to)` says whether the engine can continue a session of one model with another; it is
/// not asked for equal models.
///
/// # Errors
/// [`Incompatible`] names the first difference.
pub fn compatible(
    session: &Session,
    want: &Want<'_>,
    continues: impl Fn(&str, &str) -> bool,
) -> Result<PromptUse, Incompatible> {
    if session.conversation_id != *want.conversation_id {
        Err(Incompatible::Conversation)
    } else if session.workspace_id != *want.workspace_id {
        Err(Incompatible::Workspace)
    } else if session.agent_name != want.agent.name {
        Err(Incompatible::Agent)
    } else if session.engine != want.agent.engine {
        Err(Incompatible::Engine)
    } else if session.state != SessionState::Active {
        Err(Incompatible::Unusable)
    } else if session.model != want.agent.model && !continues(&session.model, &want.agent.model) {
        Err(Incompatible::Model)
    } else if session.prompt_sha256 == want.agent.prompt_sha256() {
        Ok(PromptUse::Unchanged)
    } else if want.prompt_change_on_resume {
        Ok(PromptUse::AppliedOnResume)
    } else {
        Err(Incompatible::Prompt)
    }
}

/// Chooses the session: of the compatible ones one that was used with the wanted model last, so that switching back
/// finds the earlier one; of those the one that was used last. Otherwise a new one.
#[must_use]
pub fn choose(sessions: &[Session], want: &Want<'_>, continues: impl Fn(&str, &str) -> bool) -> Choice {
    let mut best: Option<(&Session, PromptUse)> = None;
    let mut prompt_changed = false;
    for session in sessions {
        match compatible(session, want, &continues) {
            Ok(prompt) => {
                let key =
                    |s: &Session| (s.model == want.agent.model, s.use_time, s.create_time, s.id.clone());
                if best.is_none_or(|(b, _)| key(b) < key(session)) {
                    best = Some((session, prompt));
                }
            }
            Err(Incompatible::Prompt) => prompt_changed = true,
            Err(
                Incompatible::Conversation
                | Incompatible::Workspace
                | Incompatible::Agent
                | Incompatible::Engine
                | Incompatible::Model
                | Incompatible::Unusable,
            ) => {}
        }
    }
    match best {
        Some((session, prompt)) => Choice::Resume { session_id: session.id.clone(), prompt },
        None if prompt_changed => Choice::New { prompt: PromptUse::NewSession },
        None => Choice::New { prompt: PromptUse::Initial },
    }
}

/// The session that a new one for this agent stands in for: the one that was used last, if that is unusable and has no
/// replacement yet. A new session beside one that is well (another model, another prompt) replaces nothing.
///
/// `sessions` are those of the turn's conversation in its workspace.
#[must_use]
pub fn stands_in_for<'a>(sessions: &'a [Session], agent: &AgentSnapshot) -> Option<&'a SessionId> {
    let ours = sessions.iter().filter(|s| s.agent_name == agent.name && s.engine == agent.engine);
    let last = ours.max_by_key(|s| (s.use_time, s.create_time, s.id.clone()))?;
    let lost = matches!(last.state, SessionState::Unusable(_));
    let replaced = sessions.iter().any(|s| s.replaces.as_ref() == Some(&last.id));
    (lost && !replaced).then_some(&last.id)
}

/// Where a session's watermark stands when the engine took a message at `position`: it has that message, and with it
/// all that was given as context in the same delivery, of which `through` is the last position. That is a later one
/// than the message's when a turn is tried again: the text of the failed try stands after the message.
#[must_use]
pub fn watermark_at_acceptance(now: Position, position: Position, through: Option<Position>) -> Position {
    now.max(position).max(through.unwrap_or(Position::START))
}

/// Where a session's watermark stands after its turn ended.
///
/// In doubt a message is given again rather than left out: it moves to the agent's message only when the turn
/// completed, for an interrupted text may never have reached the engine's own files.
#[must_use]
pub fn watermark_at_end(now: Position, completed: bool, agent_message: Option<Position>) -> Position {
    match agent_message {
        Some(position) if completed => now.max(position),
        Some(_) | None => now,
    }
}

#[cfg(test)]
mod tests;
