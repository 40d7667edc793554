//! Agent files: `.agents/<name>.md`, a YAML front matter and a prompt, read strictly.
//!
//! ```text
//! ---
//! name: reviewer                  # kebab-case, 1 to 64, equals the file's name
//! description: Reads a change     # 1 to 240 characters
//! engine: claude-code             # one of the engines that the caller knows
//! model: opus                     # 1 to 160 characters
//! options:                        # may be left out
//!   reasoning_effort: high        # only a level that the engine has
//!   permissions: ask              # ask (default), accept-edits, bypass
//! enabled: true                   # default true
//! triggers: [manual, mcp, ui]     # default all
//! ---
//! The prompt. It must not be empty.
//! ```
//!
//! The format is deliberately narrower than YAML: what a person can mistype without noticing is refused
//! instead of guessed (unknown and duplicate keys, a number where text belongs, `"yes"` where `true`
//! belongs), and what hides a value from the reader is refused too (anchors, aliases, tags, a second
//! document). Every error names the file, the line and the field, and all errors of a file are told at
//! once. A bad file never hides the good ones: see [`parse_all`].
//!
//! Engines are known only as [`EngineFacts`] that the caller passes in.

mod error;
mod fields;
mod text;
mod yaml;

#[cfg(test)]
mod tests;

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

pub use error::{AgentFileError, Problem};

/// The largest agent file that is read, in bytes.
pub const MAX_FILE_BYTES: usize = 256 * 1024;
/// The longest prompt, in bytes, blank lines around it not counted: engines take it as an argument, and the kernel
/// allows no longer one than 128 KiB.
pub const MAX_PROMPT_BYTES: usize = 100_000;
/// The longest agent name, in characters.
pub const MAX_NAME_CHARS: usize = 64;
/// The longest description, in Unicode scalar values.
pub const MAX_DESCRIPTION_CHARS: usize = 240;
/// The longest model name, in Unicode scalar values.
pub const MAX_MODEL_CHARS: usize = 160;

/// What must be known of an engine to check an agent file that names it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EngineFacts {
    /// The engine's name as agent files write it, for example `claude-code`.
    pub name: String,
    /// The reasoning efforts that the engine has, in the order in which it lists them. Empty when it has
    /// no such setting.
    pub effort_levels: Vec<String>,
}

impl EngineFacts {
    /// Facts from borrowed words.
    pub fn new(name: &str, effort_levels: &[&str]) -> Self {
        Self { name: name.to_owned(), effort_levels: effort_levels.iter().map(|&l| l.to_owned()).collect() }
    }
}

/// How hard the model is asked to think. No engine has all of these levels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Effort {
    /// `none`
    None,
    /// `minimal`
    Minimal,
    /// `low`
    Low,
    /// `medium`
    Medium,
    /// `high`
    High,
    /// `xhigh`
    Xhigh,
    /// `max`
    Max,
    /// `ultra`
    Ultra,
}

impl Effort {
    /// Every level, from the least to the most.
    pub const ALL: [Self; 8] =
        [Self::None, Self::Minimal, Self::Low, Self::Medium, Self::High, Self::Xhigh, Self::Max, Self::Ultra];

    /// The word that agent files use.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Minimal => "minimal",
            Self::Low => "low",
            Self::Medium => "medium",
            Self::High => "high",
            Self::Xhigh => "xhigh",
            Self::Max => "max",
            Self::Ultra => "ultra",
        }
    }
}

/// What an agent may do without asking.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Permissions {
    /// Every action that the engine thinks worth a question is asked.
    #[default]
    Ask,
    /// Edits in the workspace go through, the rest is asked.
    AcceptEdits,
    /// Nothing is asked. The runner must allow it, too.
    Bypass,
}

impl Permissions {
    /// Every value.
    pub const ALL: [Self; 3] = [Self::Ask, Self::AcceptEdits, Self::Bypass];

    /// The word that agent files use.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Ask => "ask",
            Self::AcceptEdits => "accept-edits",
            Self::Bypass => "bypass",
        }
    }
}

/// The door through which a turn of this agent may be asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Trigger {
    /// gRPC and the command line.
    Manual,
    /// The MCP server.
    Mcp,
    /// The web page.
    Ui,
}

impl Trigger {
    /// Every value.
    pub const ALL: [Self; 3] = [Self::Manual, Self::Mcp, Self::Ui];

    /// The word that agent files use.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Manual => "manual",
            Self::Mcp => "mcp",
            Self::Ui => "ui",
        }
    }
}

/// An agent as it was when a turn was dispatched; stored in the turn.
///
/// It holds all that the turn needs, so that editing the file never alters a dispatched turn or a retry
/// of it (S9).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AgentSnapshot {
    /// The file, as the caller named it.
    pub file: String,
    /// The agent's name.
    pub name: String,
    /// What it is for.
    pub description: String,
    /// The engine that runs it.
    pub engine: String,
    /// The model, in the engine's own words.
    pub model: String,
    /// The reasoning effort, or none stated: then the engine's own default holds.
    pub reasoning_effort: Option<Effort>,
    /// What it may do without asking.
    pub permissions: Permissions,
    /// Whether it may be used at all.
    pub enabled: bool,
    /// From where it may be used; never empty.
    pub triggers: BTreeSet<Trigger>,
    /// The whole file, normalised: see [`normalise`].
    pub text: String,
    /// SHA-256 of `text`, in lower-case hexadecimal.
    pub sha256: String,
}

impl AgentSnapshot {
    /// The prompt: the text after the front matter, without the blank lines around it.
    pub fn prompt(&self) -> &str {
        text::split(&self.text).map_or("", |parts| parts.prompt)
    }

    /// SHA-256 of the prompt alone, in lower-case hexadecimal. It tells whether a session was opened with
    /// the prompt that the agent has now.
    pub fn prompt_sha256(&self) -> String {
        sha256_hex(self.prompt().as_bytes())
    }
}

/// One file as it was found.
#[derive(Debug, Clone, Copy)]
pub struct AgentFileSource<'a> {
    /// The path, for messages and for the name check; its last part must be `<name>.md`.
    pub file: &'a str,
    /// The bytes as they lie on disk.
    pub bytes: &'a [u8],
}

/// A file that is no agent, with everything that is wrong with it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BadAgentFile {
    /// The path as it was given.
    pub file: String,
    /// All errors, in the order of their lines; never empty.
    pub errors: Vec<AgentFileError>,
}

/// What became of many files. Both lists are in the order of the file names.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ParsedAgentFiles {
    /// The agents.
    pub good: Vec<AgentSnapshot>,
    /// The files that were refused.
    pub bad: Vec<BadAgentFile>,
}

/// Reads one agent file.
///
/// # Errors
/// Everything that is wrong with the file, in the order of the lines.
pub fn parse(source: AgentFileSource<'_>, engines: &[EngineFacts]) -> Result<AgentSnapshot, BadAgentFile> {
    fields::read(source, engines).map_err(|mut errors| {
        errors.sort_by_key(|e| e.line);
        BadAgentFile { file: source.file.to_owned(), errors }
    })
}

/// Reads many agent files; a bad one is named beside the good ones.
pub fn parse_all<'a>(
    sources: impl IntoIterator<Item = AgentFileSource<'a>>,
    engines: &[EngineFacts],
) -> ParsedAgentFiles {
    let mut out = ParsedAgentFiles::default();
    for source in sources {
        match parse(source, engines) {
            Ok(agent) => out.good.push(agent),
            Err(bad) => out.bad.push(bad),
        }
    }
    out.good.sort_by(|a, b| a.file.cmp(&b.file));
    out.bad.sort_by(|a, b| a.file.cmp(&b.file));
    out
}

/// The text that is hashed and kept: without a byte order mark, every line end a single line feed, and
/// exactly one line feed at the end. Doing it twice changes nothing.
pub fn normalise(text: &str) -> String {
    text::normalise(text)
}

fn sha256_hex(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    Sha256::digest(bytes).iter().fold(String::with_capacity(64), |mut hex, byte| {
        // Writing to a String cannot fail.
        let _ = write!(hex, "{byte:02x}");
        hex
    })
}
