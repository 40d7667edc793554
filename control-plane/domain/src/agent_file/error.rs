//! What can be wrong with an agent file. Each message says what is accepted.

use super::{MAX_FILE_BYTES, MAX_PROMPT_BYTES};

/// One thing that is wrong with an agent file, and where.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{file}:{line}: {field}: {problem}")]
pub struct AgentFileError {
    /// The path as the caller gave it.
    pub file: String,
    /// The line, from 1. What is missing is told for line 1.
    pub line: usize,
    /// The field, with its parents (`options.permissions`), or `file`, `front matter`, `prompt`.
    pub field: String,
    /// What is wrong.
    pub problem: Problem,
}

/// What is wrong at one place.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Problem {
    /// The file's name is not `<name>.md`.
    #[error("the file's name must be <name>.md, with a kebab-case name of 1 to 64 characters")]
    BadFileName,
    /// The file is larger than [`MAX_FILE_BYTES`].
    #[error("the file has {bytes} bytes, more than the {MAX_FILE_BYTES} allowed")]
    FileTooLarge {
        /// Its size.
        bytes: usize,
    },
    /// The file is no UTF-8.
    #[error("the text is not valid UTF-8")]
    NotUtf8,
    /// A NUL character, which no command line can carry.
    #[error("NUL characters are not accepted")]
    Nul,
    /// The first line is not `---`.
    #[error("the file must begin with a line that is ---")]
    NoFrontMatter,
    /// There is no second `---`.
    #[error("a line that is --- must close the front matter")]
    NotClosed,
    /// The YAML parser gave up here.
    #[error("not valid YAML: {message}")]
    Yaml {
        /// In the parser's words.
        message: String,
    },
    /// The front matter holds more than one document.
    #[error("the front matter must be one YAML document without document markers")]
    SecondDocument,
    /// An anchor.
    #[error("YAML anchors (&) are not accepted")]
    Anchor,
    /// An alias.
    #[error("YAML aliases (*) are not accepted")]
    Alias,
    /// A tag.
    #[error("YAML tags (!) are not accepted")]
    Tag,
    /// Lists in lists in lists.
    #[error("nested too deeply")]
    TooDeep,
    /// A key that is not text.
    #[error("a key must be text")]
    KeyNotText,
    /// A key that is not known.
    #[error("unknown key {key:?}; {}", hint(near.as_deref(), known))]
    UnknownKey {
        /// The key as written.
        key: String,
        /// What was perhaps meant.
        near: Option<String>,
        /// What is accepted here.
        known: Vec<String>,
    },
    /// The key is there twice.
    #[error("given twice, first in line {first_line}")]
    DuplicateKey {
        /// Where it was first.
        first_line: usize,
    },
    /// A required key is not there.
    #[error("is required")]
    Missing,
    /// A value of another type.
    #[error("must be {expected}, not {found}")]
    WrongType {
        /// What is accepted.
        expected: &'static str,
        /// What is there.
        found: String,
    },
    /// Nothing but blanks.
    #[error("must not be empty")]
    Blank,
    /// Too many characters.
    #[error("has {chars} characters, more than the {limit} allowed")]
    TooLong {
        /// How many it has.
        chars: usize,
        /// How many are allowed.
        limit: usize,
    },
    /// Not kebab-case.
    #[error("{value:?} is not kebab-case: lower-case letters and digits, parted by single hyphens")]
    NotKebabCase {
        /// The name as written.
        value: String,
    },
    /// The name is not the file's.
    #[error("is {value:?}, but the file's name says {expected:?}")]
    NameIsNotFile {
        /// The name as written.
        value: String,
        /// The file's name without `.md`.
        expected: String,
    },
    /// Characters that a model name can't have.
    #[error("{value:?} is no model name: no white space, no control characters, no leading hyphen")]
    BadModel {
        /// The model as written.
        value: String,
    },
    /// A control character in a value of one line.
    #[error("control characters are not accepted")]
    ControlCharacter,
    /// An engine that nobody has.
    #[error("unknown engine {value:?}; {}", hint(near.as_deref(), known))]
    UnknownEngine {
        /// The engine as written.
        value: String,
        /// What was perhaps meant.
        near: Option<String>,
        /// The engines that are known.
        known: Vec<String>,
    },
    /// A word that is not in the list.
    #[error("unknown value {value:?}; {}", hint(near.as_deref(), known))]
    UnknownValue {
        /// The value as written.
        value: String,
        /// What was perhaps meant.
        near: Option<String>,
        /// What is accepted.
        known: Vec<String>,
    },
    /// The engine has levels, but not this one.
    #[error("engine {engine} has no reasoning effort {value:?}; it has: {}", offered.join(", "))]
    EffortNotOffered {
        /// The engine.
        engine: String,
        /// The level as written.
        value: String,
        /// The engine's own levels.
        offered: Vec<String>,
    },
    /// The engine has no levels.
    #[error("engine {engine} has no setting for reasoning effort; leave the key out")]
    EffortUnsupported {
        /// The engine.
        engine: String,
    },
    /// An empty list.
    #[error("must name at least one of: {}; to switch an agent off, set enabled: false", known.join(", "))]
    EmptyList {
        /// What is accepted.
        known: Vec<String>,
    },
    /// The same item twice.
    #[error("{value:?} is listed twice")]
    DuplicateItem {
        /// The item.
        value: String,
    },
    /// Nothing after the front matter.
    #[error("must not be empty: write the agent's prompt after the front matter")]
    EmptyPrompt,
    /// A prompt longer than [`MAX_PROMPT_BYTES`].
    #[error("has {bytes} bytes, more than the {MAX_PROMPT_BYTES} allowed")]
    PromptTooLong {
        /// How many it has.
        bytes: usize,
    },
    /// The list of errors was cut.
    #[error("and {count} more errors in this file")]
    More {
        /// How many are not listed.
        count: usize,
    },
}

/// "did you mean" where something is near, else the list of what is accepted.
fn hint(near: Option<&str>, known: &[String]) -> String {
    match near {
        Some(near) => format!("did you mean {near:?}?"),
        None => format!("accepted: {}", known.join(", ")),
    }
}
