//! What a model shall do: a script is a list of replies, a reply is a list of parts.

use std::time::Duration;

use serde_json::{Value, json};

use crate::{Error, grammar};

/// What the model does in one turn: one [`Reply`] for each request that belongs to it.
///
/// The first request of a turn gets the first reply, the request that brings the tool results gets the second, and so
/// on. Requests after the last reply get the last one again.
#[derive(Debug, Clone, PartialEq)]
pub struct Script {
    replies: Vec<Reply>,
}

impl Script {
    /// A script of these replies. An empty list becomes one empty reply.
    #[must_use]
    pub fn new(replies: Vec<Reply>) -> Self {
        if replies.is_empty() { Self { replies: vec![Reply::default()] } } else { Self { replies } }
    }

    /// One reply of one text.
    #[must_use]
    pub fn text(text: impl Into<String>) -> Self {
        Self::new(vec![Reply::default().text(text)])
    }

    /// The script that the markers in `text` describe, see [`grammar`].
    ///
    /// # Errors
    /// [`Error::Grammar`] if a marker is malformed or `text` has none.
    pub fn parse(text: &str) -> Result<Self, Error> {
        grammar::parse(text)?.ok_or_else(|| Error::Grammar {
            marker: String::new(),
            problem: "the text holds no marker at all".to_owned(),
        })
    }

    /// The replies, at least one.
    #[must_use]
    pub fn replies(&self) -> &[Reply] {
        &self.replies
    }

    /// The reply of the `step`th request of a turn (from 0), with its index; the last one from there on.
    #[must_use]
    pub fn reply(&self, step: usize) -> (usize, &Reply) {
        let index = step.min(self.replies.len().saturating_sub(1));
        (index, &self.replies[index])
    }
}

/// One answer to one request.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Reply {
    /// What happens, in this order. What concerns the time before the headers ([`Part::Hold`], [`Fault::Status`],
    /// [`Fault::Hang`]) happens first, wherever it stands.
    pub parts: Vec<Part>,
    /// How the message ends; absent: `tool_use` if there is a tool call, else `end_turn`.
    pub stop: Option<Stop>,
    /// The token counts told.
    pub usage: Usage,
}

impl Reply {
    /// Adds a piece of text. Pieces that only gates and pauses separate are one content block.
    #[must_use]
    pub fn text(self, text: impl Into<String>) -> Self {
        self.part(Part::Text(text.into()))
    }

    /// Adds a Bash call.
    #[must_use]
    pub fn bash(self, command: impl Into<String>) -> Self {
        self.tool("Bash", json!({"command": command.into(), "description": "scripted"}))
    }

    /// Adds a call of any tool.
    #[must_use]
    pub fn tool(self, name: impl Into<String>, input: Value) -> Self {
        self.part(Part::Tool { name: name.into(), input })
    }

    /// Stops here until the gate is released.
    #[must_use]
    pub fn gate(self, name: impl Into<String>) -> Self {
        self.part(Part::Gate(name.into()))
    }

    /// Adds a fault that happens each time.
    #[must_use]
    pub fn fault(self, fault: Fault) -> Self {
        self.part(Part::Fault(FaultRule { fault, times: None, scope: None, plain: false }))
    }

    /// Adds any part.
    #[must_use]
    pub fn part(mut self, part: Part) -> Self {
        self.parts.push(part);
        self
    }

    /// Whether this reply calls a tool.
    #[must_use]
    pub fn calls_tool(&self) -> bool {
        self.parts.iter().any(|part| matches!(part, Part::Tool { .. }))
    }
}

/// One thing that happens in a reply.
#[derive(Debug, Clone, PartialEq)]
pub enum Part {
    /// Text, in one delta.
    Text(String),
    /// The same text so many times, each its own delta, with a pause before every one but the first.
    Chunks {
        /// How many.
        count: u32,
        /// The pause.
        delay: Duration,
        /// What each says.
        text: String,
    },
    /// So many bytes of ASCII text, in deltas of at most `chunk` bytes. Made while it is sent: it costs no memory.
    Filler {
        /// How many bytes in all.
        bytes: usize,
        /// How many in one delta.
        chunk: usize,
    },
    /// A thinking block.
    Thinking(String),
    /// Ends the text block: the next text is a content block of its own.
    Break,
    /// A pause.
    Pause(Duration),
    /// Stops until this gate is open. What came before has been sent.
    Gate(String),
    /// Stops until this gate is open, before the headers.
    Hold(String),
    /// A tool call.
    Tool {
        /// The tool's name.
        name: String,
        /// Its input.
        input: Value,
    },
    /// Something goes wrong here.
    Fault(FaultRule),
}

/// A fault and how often it happens.
#[derive(Debug, Clone, PartialEq)]
pub struct FaultRule {
    /// What goes wrong.
    pub fault: Fault,
    /// How many times; absent: each time. Afterwards the reply goes on as if the fault were not there.
    pub times: Option<u32>,
    /// What the times are counted for; absent: the turn's text. Equal scopes share one counter.
    pub scope: Option<String>,
    /// Whether a fault of a stream also befalls a request that did not ask for a stream. (One before the headers
    /// always does.) Without it such a request is answered in full, as real outages of streams do.
    pub plain: bool,
}

/// What goes wrong. Each API tells it in its own words.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Fault {
    /// An HTTP error instead of a message.
    Status {
        /// 400 to 599.
        status: u16,
        /// The API's name for it, such as `overloaded_error`.
        kind: String,
        /// The sentence.
        message: String,
        /// Further headers, such as `retry-after`.
        headers: Vec<(String, String)>,
    },
    /// A usage limit: 429, and a time at which it ends.
    Limit {
        /// The time, in seconds since 1970.
        reset: u64,
        /// The sentence; absent: the API's own.
        message: Option<String>,
    },
    /// The conversation is longer than the model's context.
    TooLong {
        /// The sentence; absent: the API's own.
        message: Option<String>,
    },
    /// The account is empty.
    Credit {
        /// The sentence; absent: the API's own.
        message: Option<String>,
    },
    /// No header ever comes.
    Hang,
    /// The stream stops here and stays open.
    Stall,
    /// The connection is cut here.
    Cut,
    /// The stream ends here in good order, without the message's end.
    End,
    /// The stream says here that it failed (`error`, `response.failed`), and ends.
    SseError {
        /// The API's name for it.
        kind: String,
    },
    /// Bytes here that are no server-sent event of this API; then the stream goes on.
    Garbage,
}

impl Fault {
    /// Whether it happens in a stream that has begun, and not before the headers.
    pub(crate) const fn in_stream(&self) -> bool {
        matches!(self, Self::Stall | Self::Cut | Self::End | Self::SseError { .. } | Self::Garbage)
    }
}

/// How a message ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Stop {
    /// The model has said all.
    EndTurn,
    /// The model calls tools.
    ToolUse,
    /// The limit of output tokens was hit.
    MaxTokens,
    /// The model refuses.
    Refusal,
}

impl Stop {
    /// The API's word.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::EndTurn => "end_turn",
            Self::ToolUse => "tool_use",
            Self::MaxTokens => "max_tokens",
            Self::Refusal => "refusal",
        }
    }
}

/// Token counts of one reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Usage {
    /// Input tokens.
    pub input: u64,
    /// Output tokens.
    pub output: u64,
    /// Input tokens read from the cache.
    pub cache_read: u64,
    /// Input tokens written to the cache.
    pub cache_creation: u64,
}

impl Default for Usage {
    /// 100 in, 25 out, 20 read, 10 created.
    fn default() -> Self {
        Self { input: 100, output: 25, cache_read: 20, cache_creation: 10 }
    }
}
