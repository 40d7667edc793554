//! The context composer: what a session is told of the conversation before it gets its message.
//!
//! A *new* session is seeded with the shared history (and, for engines that take no system prompt, with
//! the agent's prompt); a *resumed* one catches up on what was said after its watermark. History is taken
//! by position, never by order of arrival.
//!
//! What the composer promises:
//! * the text never exceeds the budget, counted in Unicode scalar values;
//! * everything is there if it fits; otherwise the opening of the conversation (a quarter of the budget)
//!   and the newest whole messages, and one marker between them says how many and which were left out;
//! * only a message that is larger than its room is cut, in its middle, with a marker of its own;
//! * what people and agents said stands there byte for byte, in order, each message at most once;
//! * no message can pass for a frame line: the frame lines bear a code that occurs in no text of the
//!   history, see [`Composed::code`];
//! * the same input gives the same text.
//!
//! The turn's own message is not part of the context and not part of the budget.

mod plan;
mod render;

#[cfg(test)]
mod tests;

use serde::{Deserialize, Serialize};

/// The budget when nothing else is configured, in Unicode scalar values.
pub const DEFAULT_BUDGET_CHARS: usize = 120_000;
/// The smallest budget that can be asked for: less would leave no room for the frame and one useful cut.
pub const MIN_BUDGET_CHARS: usize = 4_000;

/// Who said something.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Speaker {
    /// A person, or what speaks for one.
    User,
    /// An agent.
    Agent,
    /// Roundhouse itself.
    System,
}

/// One message of the shared history.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HistoryMessage<'a> {
    /// Its place in the shared history.
    pub position: u64,
    /// Who said it.
    pub speaker: Speaker,
    /// The name of the person or agent, if known. Shown in the message's heading.
    pub name: Option<&'a str>,
    /// What was said, byte for byte.
    pub text: &'a str,
    /// The text of an agent whose turn ended before it was finished.
    pub incomplete: bool,
}

/// Text that stands for the history up to and including a position.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Summary<'a> {
    /// The summary.
    pub text: &'a str,
    /// The last position that it covers. Every message after it is composed in full.
    pub through: u64,
}

/// What the context is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose<'a> {
    /// A new session: the whole history, or a summary and what came after it.
    Seed {
        /// The agent's prompt, for engines that take no system prompt. `None` where the prompt reaches the
        /// engine by its own way. It is never cut.
        agent_prompt: Option<&'a str>,
        /// The current summary, if there is one.
        summary: Option<Summary<'a>>,
    },
    /// A resumed session: what came after the last position that it knows.
    CatchUp {
        /// The session's watermark: the last position that its engine has taken.
        after: u64,
    },
}

/// What to compose.
#[derive(Debug, Clone, Copy)]
pub struct Request<'a> {
    /// What the context is for.
    pub purpose: Purpose<'a>,
    /// The shared history in any order. Messages that wait have no position and must not be here.
    pub history: &'a [HistoryMessage<'a>],
    /// The position of the turn's own message, which is left out: it is sent by itself.
    pub own_position: Option<u64>,
    /// The text of the turn's own message. It is not composed; the code avoids it, too.
    pub own_text: &'a str,
    /// The budget in Unicode scalar values, at least [`MIN_BUDGET_CHARS`].
    pub budget: usize,
}

/// The composed context, and what is in it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Composed {
    /// The text for the engine.
    pub text: String,
    /// The code that every frame line bears and that occurs in no message.
    pub code: String,
    /// Whether a summary is in it.
    pub summary: bool,
    /// Positions of the messages that are in it, in order.
    pub given: Vec<u64>,
    /// Those of `given` that were cut in their middle.
    pub cut: Vec<u64>,
    /// The messages that were left out, if any: they are neighbours.
    pub omitted: Option<Omitted>,
}

/// The run of messages that was left out for want of room.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Omitted {
    /// How many.
    pub count: usize,
    /// Position of the first one.
    pub first: u64,
    /// Position of the last one.
    pub last: u64,
}

/// Why no context could be composed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ContextError {
    /// The budget is below [`MIN_BUDGET_CHARS`], or what is left of it after the agent's prompt is.
    #[error("the context budget of {budget} characters is too small: at least {needed} are needed")]
    BudgetTooSmall {
        /// What was asked for.
        budget: usize,
        /// The least that would do.
        needed: usize,
    },
    /// Two messages claim one position.
    #[error("two messages have position {position} in the history")]
    DuplicatePosition {
        /// The position.
        position: u64,
    },
}

/// Composes the context of a turn. `None` when there is nothing to tell.
///
/// # Errors
/// See [`ContextError`].
pub fn compose(request: &Request<'_>) -> Result<Option<Composed>, ContextError> {
    plan::compose(request)
}
