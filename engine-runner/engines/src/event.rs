//! The closed list of things that can happen in a turn, as the journal stores them.
//!
//! Translators make text, reasoning, tool, file, permission, usage, quota and notice events out of what an
//! engine prints. The runner makes session, phase, steer, evidence and terminal events, and the permission
//! answers it decides. A new kind needs a consumer; everything else an engine prints stays in the spool.

use serde::{Deserialize, Serialize};

use crate::{failure::Failure, limit::BoundedText};

/// Names one item of a turn: a text block, a tool call. The same item has the same key in its partials and
/// in its event, live and after a restart.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ItemKey(pub String);

impl ItemKey {
    /// The key as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// One bounded thing that happened in a turn.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Event {
    /// How the turn's session came to be, or that it is unusable.
    Session(SessionEvent),
    /// The turn reached a stage.
    Phase(PhaseEvent),
    /// A finished piece of the agent's text.
    Text(TextEvent),
    /// A finished piece of the agent's reasoning.
    Reasoning(TextEvent),
    /// The agent calls a tool.
    ToolCall(ToolCall),
    /// A tool's result; never before its call, and once.
    ToolResult(ToolResult),
    /// A file was written by one of the engine's own file tools.
    FileChange(FileChange),
    /// The engine asks whether a tool may run.
    PermissionRequest(PermissionRequest),
    /// Who decided about a permission, and how.
    PermissionAnswer(PermissionAnswered),
    /// What the turn used.
    Usage(Usage),
    /// A limit of the account was met or is near.
    Quota(Quota),
    /// Something worth knowing that changes nothing by itself.
    Notice(Notice),
    /// What became of a message given to the running turn.
    Steer(Steer),
    /// The state of the worktree before and after.
    Evidence(Evidence),
    /// The turn ended. The last event of a turn.
    Terminal(Terminal),
}

impl Event {
    /// The kind's name, as in the contract.
    #[must_use]
    pub const fn kind(&self) -> &'static str {
        match self {
            Self::Session(_) => "session",
            Self::Phase(_) => "phase",
            Self::Text(_) => "text",
            Self::Reasoning(_) => "reasoning",
            Self::ToolCall(_) => "tool_call",
            Self::ToolResult(_) => "tool_result",
            Self::FileChange(_) => "file_change",
            Self::PermissionRequest(_) => "permission_request",
            Self::PermissionAnswer(_) => "permission_answer",
            Self::Usage(_) => "usage",
            Self::Quota(_) => "quota",
            Self::Notice(_) => "notice",
            Self::Steer(_) => "steer",
            Self::Evidence(_) => "evidence",
            Self::Terminal(_) => "terminal",
        }
    }
}

/// How a turn's session came to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Origin {
    /// A new native session.
    Started,
    /// An earlier native session, resumed or still open.
    Resumed,
    /// A new native session in place of an unusable one.
    Replaced,
    /// A copy of another session.
    Forked,
    /// A session brought from another runner.
    Moved,
}

/// What the runner says about the turn's session.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "what", rename_all = "snake_case")]
pub enum SessionEvent {
    /// The engine proved that the session is open.
    Opened {
        /// Our id of the session.
        session_id: String,
        /// How it came to be.
        origin: Origin,
        /// The engine's id of it.
        native_id: String,
        /// The engine's version, when it said so.
        engine_version: Option<String>,
        /// The model the session runs on, when known.
        model: Option<String>,
    },
    /// From here on the session can be resumed by its native id.
    Resumable {
        /// Our id of the session.
        session_id: String,
        /// The engine's id of it.
        native_id: String,
    },
    /// The session cannot be resumed. Not the end of the turn.
    Unusable {
        /// Our id of the session.
        session_id: String,
        /// Why.
        reason: String,
    },
}

/// A stage of a turn.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "phase", rename_all = "snake_case")]
pub enum PhaseEvent {
    /// The engine is being started or resumed.
    Opening,
    /// The message was written to the engine.
    Delivered {
        /// The message.
        message_id: String,
    },
    /// The engine proved that it took the message.
    Accepted {
        /// The message.
        message_id: String,
    },
    /// A cancel is under way.
    Cancelling,
    /// The engine said it was done, and is given time to become idle.
    Settling,
}

/// A finished piece of text or reasoning.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TextEvent {
    /// The item; partials of the same item come before and are replaced by this.
    pub item: ItemKey,
    /// The text.
    #[serde(flatten)]
    pub body: BoundedText,
    /// The item was cut short: its final text never came.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub incomplete: bool,
    /// The tool call on whose behalf a sub-agent said it; unset for the agent itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent_call: Option<String>,
}

/// A tool call.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ToolCall {
    /// The call's id: the engine's, or step + name + ordinal when it has none.
    pub call_id: String,
    /// The tool's name, as the engine calls it.
    pub name: String,
    /// The input as JSON text.
    pub input: BoundedText,
    /// The tool call on whose behalf a sub-agent makes it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent_call: Option<String>,
}

/// The result of a tool call.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ToolResult {
    /// The call.
    pub call_id: String,
    /// What the tool gave back, as text.
    pub output: BoundedText,
    /// The tool failed, was refused or never finished. Then `output` is never empty.
    pub is_error: bool,
    /// The tool call on whose behalf a sub-agent made it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent_call: Option<String>,
}

/// How a file changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ChangeKind {
    /// The file is new.
    Created,
    /// The file was changed or overwritten.
    Modified,
    /// The file was removed.
    Deleted,
    /// The engine did not say which.
    Written,
}

/// A file written by one of the engine's own file tools. What a shell command writes is not seen here.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileChange {
    /// The path as the engine said it.
    pub path: String,
    /// What happened to the file.
    pub change: ChangeKind,
    /// The tool call that did it.
    pub call_id: String,
}

/// The engine asks whether a tool may run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PermissionRequest {
    /// `<spool id>.<frame number>`.
    pub request_id: String,
    /// The tool call it is about, when the engine says so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub call_id: Option<String>,
    /// The tool's name.
    pub tool: String,
    /// The input as JSON text.
    pub input: BoundedText,
    /// What the engine says about it, for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub description: Option<String>,
    /// The path whose access was blocked, when that is the cause.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blocked_path: Option<String>,
}

/// What was decided about a permission.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Decision {
    /// The tool may run.
    Allow,
    /// The tool may not run.
    Deny,
    /// Nobody needs to answer any more: the engine took the question back, or died.
    Withdrawn,
}

/// Who decided.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Decider {
    /// Somebody through AnswerPermission.
    Client,
    /// The deadline passed.
    Deadline,
    /// The turn was cancelled.
    Cancel,
    /// The engine itself.
    Engine,
}

/// The decision about a permission request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PermissionAnswered {
    /// The request.
    pub request_id: String,
    /// What was decided.
    pub decision: Decision,
    /// Who decided.
    pub decided_by: Decider,
    /// What the agent was told with it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub feedback: Option<BoundedText>,
}

/// What a turn used so far. Cumulative for the turn in one process: the last one counts, they are not added.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Usage {
    /// Per model, in the order of first use.
    pub models: Vec<ModelUsage>,
    /// Whether everything the turn used is in here. False after a death before the engine's own report.
    pub complete: bool,
}

/// What one model was used for. An absent counter is unknown, not zero.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct ModelUsage {
    /// The model.
    pub model: String,
    /// Input tokens that no cache served.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub input_tokens: Option<u64>,
    /// Output tokens.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub output_tokens: Option<u64>,
    /// Input tokens read from a cache.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache_read_tokens: Option<u64>,
    /// Input tokens written to a cache.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache_write_tokens: Option<u64>,
    /// The engine's own estimate of the cost, in billionths of a US dollar.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cost_nano_usd: Option<u64>,
}

/// How near a limit is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum QuotaStatus {
    /// Within the limit.
    Allowed,
    /// Near the limit.
    Warning,
    /// Over the limit.
    Exceeded,
}

/// What the engine said about a limit of the account. Informs; only a failed turn is QUOTA.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Quota {
    /// How near.
    pub status: QuotaStatus,
    /// The limit's name, as the engine calls it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit_name: Option<String>,
    /// When it resets, in seconds since 1970; only from a machine-readable field.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resets_at_unix_seconds: Option<i64>,
    /// How much of it is used, in thousandths, when the engine says so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub used_thousandths: Option<u32>,
}

/// What a notice is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NoticeKind {
    /// The engine tries a request again.
    Retry,
    /// The engine compacted its history.
    Compaction,
    /// Something went not quite right.
    Warning,
    /// Something the agent knew is gone.
    ContextLost,
    /// Events were lost.
    EventsLost,
    /// The engine printed output that belongs to no turn.
    SessionOutput,
}

/// Something worth knowing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Notice {
    /// What it is about.
    pub notice: NoticeKind,
    /// A stable word for programs, for example `api_retry` or `session_writes_lost`.
    pub code: String,
    /// For people.
    pub message: BoundedText,
    /// Which try, for retries.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retry: Option<RetryDetail>,
}

impl Notice {
    /// A notice without retry details.
    #[must_use]
    pub fn new(notice: NoticeKind, code: &str, message: &str) -> Self {
        Self { notice, code: code.to_owned(), message: BoundedText::field(message), retry: None }
    }
}

/// Which try of how many, and when.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RetryDetail {
    /// The number of the retry, from 1.
    pub attempt: u32,
    /// How many there will be at most.
    pub max_attempts: Option<u32>,
    /// How long the engine waits before it, in milliseconds.
    pub delay_millis: Option<u64>,
    /// The status that caused it, when there was one.
    pub status: Option<u16>,
}

/// What became of a message given to a running turn.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Steer {
    /// The message.
    pub message_id: String,
    /// What became of it.
    pub result: SteerResult,
}

/// What became of a message given to a running turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SteerResult {
    /// The engine took it within the running turn.
    Injected,
    /// The engine will take it after the current step.
    Queued,
    /// The turn was stopped and resumed with it.
    ResumedWith,
    /// It was not delivered.
    Refused,
}

/// The state of a worktree.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct WorktreeState {
    /// The branch, when on one.
    pub branch: Option<String>,
    /// The commit, when there is one.
    pub head: Option<String>,
    /// Whether anything is uncommitted; unset when it is not known.
    pub dirty: Option<bool>,
}

/// The state of the worktree before and after a turn.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Evidence {
    /// Before the message was delivered.
    pub before: WorktreeState,
    /// After the engine was idle or gone.
    pub after: WorktreeState,
    /// Commits made in between, oldest first.
    pub commits: Vec<String>,
    /// Files that differ, as paths within the workspace.
    pub changed_files: Vec<String>,
    /// Commits or files were left out.
    pub truncated: bool,
}

/// How a turn ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "outcome", rename_all = "snake_case")]
pub enum TurnOutcome {
    /// The engine did what it was asked.
    Completed,
    /// It did not.
    Failed {
        /// Why, and what to do.
        failure: Failure,
    },
    /// It was stopped on request.
    Cancelled,
}

/// What the agent answered.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Answer {
    /// The text, at most [`crate::limit::ANSWER_LIMIT`] bytes. The empty string is an answer.
    #[serde(flatten)]
    pub body: BoundedText,
    /// The agent was cut short.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub incomplete: bool,
}

/// The end of a turn.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Terminal {
    /// How it ended.
    #[serde(flatten)]
    pub outcome: TurnOutcome,
    /// What the agent answered; unset when it said nothing and did not complete.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub answer: Option<Answer>,
}
