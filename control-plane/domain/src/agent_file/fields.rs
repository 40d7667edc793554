//! The fields of an agent file: what each may be.

use std::collections::{BTreeSet, HashMap};

use super::error::{AgentFileError, Problem};
use super::text::{self, SplitError};
use super::yaml::{self, Key, Node, Value};
use super::{
    AgentFileSource, AgentSnapshot, Effort, EngineFacts, MAX_DESCRIPTION_CHARS, MAX_FILE_BYTES,
    MAX_MODEL_CHARS, MAX_NAME_CHARS, MAX_PROMPT_BYTES, Permissions, Trigger,
};

const KEYS: [&str; 7] = ["name", "description", "engine", "model", "options", "enabled", "triggers"];
const OPTION_KEYS: [&str; 2] = ["reasoning_effort", "permissions"];
/// A file of nothing but mistakes must not make a message of megabytes.
const MAX_ERRORS: usize = 100;
/// Longest piece of a file that a message repeats.
const MAX_SHOWN_CHARS: usize = 60;

/// Reads a file; the errors come in no particular order.
pub(super) fn read(
    source: AgentFileSource<'_>,
    engines: &[EngineFacts],
) -> Result<AgentSnapshot, Vec<AgentFileError>> {
    let mut reader = Reader { file: source.file, engines, errors: Vec::new(), more: 0 };
    let snapshot = reader.file(source.bytes);
    let Reader { mut errors, more, .. } = reader;
    if more > 0 {
        let line = errors.iter().map(|e| e.line).max().unwrap_or(1);
        errors.push(AgentFileError {
            file: source.file.to_owned(),
            line,
            field: "file".to_owned(),
            problem: Problem::More { count: more },
        });
    }
    match snapshot {
        Some(snapshot) if errors.is_empty() => Ok(snapshot),
        _ => Err(errors),
    }
}

/// A piece of the file for a message: bounded. Control characters are escaped where it is shown.
pub(super) fn shown(value: &str) -> String {
    match value.char_indices().nth(MAX_SHOWN_CHARS) {
        Some((cut, _)) => format!("{}…", value.get(..cut).unwrap_or("")),
        None => value.to_owned(),
    }
}

struct Reader<'a> {
    file: &'a str,
    engines: &'a [EngineFacts],
    errors: Vec<AgentFileError>,
    more: usize,
}

/// The fields of a mapping that was read, by their keys.
type Fields<'n> = HashMap<&'n str, &'n Node>;

impl<'a> Reader<'a> {
    fn error(&mut self, line: usize, field: &str, problem: Problem) {
        if self.errors.len() >= MAX_ERRORS {
            self.more += 1;
            return;
        }
        // A field name comes from the file where a key is unknown, and must not break the line.
        let field = if field.chars().any(char::is_control) {
            field.escape_debug().collect()
        } else {
            field.to_owned()
        };
        self.errors.push(AgentFileError { file: self.file.to_owned(), line, field, problem });
    }

    fn file(&mut self, bytes: &[u8]) -> Option<AgentSnapshot> {
        let stem = self.stem();
        if bytes.len() > MAX_FILE_BYTES {
            self.error(1, "file", Problem::FileTooLarge { bytes: bytes.len() });
            return None;
        }
        let raw = match std::str::from_utf8(bytes) {
            Ok(raw) => raw,
            Err(error) => {
                let before = String::from_utf8_lossy(bytes.get(..error.valid_up_to()).unwrap_or(&[]));
                self.error(line_count(&text::normalise_line_ends(&before)), "file", Problem::NotUtf8);
                return None;
            }
        };
        let text = text::normalise(raw);
        if let Some(at) = text.find('\0') {
            self.error(line_count(text.get(..at).unwrap_or("")), "file", Problem::Nul);
            return None;
        }
        let parts = match text::split(&text) {
            Ok(parts) => parts,
            Err(SplitError::NoFrontMatter) => {
                self.error(1, "front matter", Problem::NoFrontMatter);
                return None;
            }
            Err(SplitError::NotClosed) => {
                self.error(1, "front matter", Problem::NotClosed);
                return None;
            }
        };
        let bytes = parts.prompt.len();
        if parts.prompt.trim().is_empty() {
            self.error(parts.closing_line, "prompt", Problem::EmptyPrompt);
        } else if bytes > MAX_PROMPT_BYTES {
            self.error(parts.closing_line + 1, "prompt", Problem::PromptTooLong { bytes });
        }

        let tree = yaml::read(parts.front_matter, 2);
        for fault in tree.faults {
            self.error(fault.line, &fault.field, fault.problem);
        }
        let entries = match tree.root.as_ref().map(|root| (root.line, &root.value)) {
            None | Some((_, Value::Refused)) => &[],
            Some((_, Value::Mapping(entries))) => entries.as_slice(),
            Some((line, other)) => {
                let found = describe(other);
                self.error(line, "front matter", Problem::WrongType { expected: "a mapping", found });
                return None;
            }
        };
        let root_refused = matches!(tree.root.as_ref().map(|root| &root.value), Some(Value::Refused));
        let fields = self.known_fields(entries, "", &KEYS);
        if tree.complete && !root_refused {
            for key in ["name", "description", "engine", "model"] {
                if !fields.contains_key(key) {
                    self.error(1, key, Problem::Missing);
                }
            }
        }
        // Each is read even when another has failed, so that all errors are told at once.
        let name = self.name(&fields, stem.as_deref());
        let description = self.description(&fields);
        let engine = self.engine(&fields);
        let model = self.model(&fields);
        let (reasoning_effort, permissions) = self.options(&fields, engine);
        let enabled = self.enabled(&fields);
        let triggers = self.triggers(&fields);

        let sha256 = super::sha256_hex(text.as_bytes());
        Some(AgentSnapshot {
            file: self.file.to_owned(),
            name: name?,
            description: description?,
            engine: engine?.name.clone(),
            model: model?,
            reasoning_effort,
            permissions: permissions?,
            enabled: enabled?,
            triggers: triggers?,
            text,
            sha256,
        })
    }

    /// The file's name without `.md`, if it can be an agent's name.
    fn stem(&mut self) -> Option<String> {
        let last = self.file.rsplit('/').next().unwrap_or(self.file);
        match last.strip_suffix(".md").filter(|stem| is_kebab_case(stem) && stem.len() <= MAX_NAME_CHARS) {
            Some(stem) => Some(stem.to_owned()),
            None => {
                self.error(1, "file", Problem::BadFileName);
                None
            }
        }
    }

    /// Sorts entries by key; unknown and duplicate keys are told. Of two equal keys the first counts.
    fn known_fields<'n>(&mut self, entries: &'n [(Key, Node)], parent: &str, known: &[&str]) -> Fields<'n> {
        let mut seen: HashMap<&str, usize> = HashMap::new();
        let mut fields = Fields::new();
        for (key, node) in entries {
            if key.refused {
                continue;
            }
            let path = path(parent, &shown(&key.text));
            if let Some(&first_line) = seen.get(key.text.as_str()) {
                self.error(key.line, &path, Problem::DuplicateKey { first_line });
                continue;
            }
            seen.insert(&key.text, key.line);
            if known.contains(&key.text.as_str()) {
                fields.insert(&key.text, node);
            } else {
                let near = match near(&key.text, known.iter().copied()) {
                    None if parent.is_empty() => {
                        near(&key.text, OPTION_KEYS).map(|option| format!("options.{option}"))
                    }
                    near => near,
                };
                self.error(
                    key.line,
                    &path,
                    Problem::UnknownKey { key: shown(&key.text), near, known: owned(known.iter().copied()) },
                );
            }
        }
        fields
    }

    /// A text value. Refuses what a YAML reader would take for a number, a truth value or nothing.
    fn text<'n>(&mut self, node: &'n Node, field: &str, expected: &'static str) -> Option<&'n str> {
        match &node.value {
            Value::Scalar { text, plain } if !*plain || kind_of_plain(text).is_none() => Some(text),
            Value::Refused => None,
            other => {
                self.error(node.line, field, Problem::WrongType { expected, found: describe(other) });
                None
            }
        }
    }

    /// A text of one line with 1 to `limit` characters.
    fn bounded<'n>(&mut self, node: &'n Node, field: &str, limit: usize) -> Option<&'n str> {
        let text = self.text(node, field, "text")?;
        let chars = text.chars().count();
        if text.trim().is_empty() {
            self.error(node.line, field, Problem::Blank);
        } else if chars > limit {
            self.error(node.line, field, Problem::TooLong { chars, limit });
        } else {
            return Some(text);
        }
        None
    }

    fn name(&mut self, fields: &Fields<'_>, stem: Option<&str>) -> Option<String> {
        let node = fields.get("name")?;
        let name = self.bounded(node, "name", MAX_NAME_CHARS)?;
        if !is_kebab_case(name) {
            self.error(node.line, "name", Problem::NotKebabCase { value: shown(name) });
            return None;
        }
        if let Some(expected) = stem.filter(|&stem| stem != name) {
            let problem = Problem::NameIsNotFile { value: name.to_owned(), expected: expected.to_owned() };
            self.error(node.line, "name", problem);
            return None;
        }
        Some(name.to_owned())
    }

    fn description(&mut self, fields: &Fields<'_>) -> Option<String> {
        let node = fields.get("description")?;
        // A block scalar ends with a line end that nobody meant.
        let whole = self.text(node, "description", "text")?;
        let text = whole.trim();
        let chars = text.chars().count();
        if text.is_empty() {
            self.error(node.line, "description", Problem::Blank);
        } else if chars > MAX_DESCRIPTION_CHARS {
            let problem = Problem::TooLong { chars, limit: MAX_DESCRIPTION_CHARS };
            self.error(node.line, "description", problem);
        } else if text.chars().any(|c| c.is_control() && c != '\n') {
            self.error(node.line, "description", Problem::ControlCharacter);
        } else {
            return Some(text.to_owned());
        }
        None
    }

    fn engine(&mut self, fields: &Fields<'_>) -> Option<&'a EngineFacts> {
        let node = fields.get("engine")?;
        let name = self.text(node, "engine", "text")?;
        let engines = self.engines;
        let found = engines.iter().find(|engine| engine.name == name);
        if found.is_none() {
            let names = || engines.iter().map(|engine| engine.name.as_str());
            let problem = Problem::UnknownEngine {
                value: shown(name),
                near: near(name, names()),
                known: owned(names()),
            };
            self.error(node.line, "engine", problem);
        }
        found
    }

    fn model(&mut self, fields: &Fields<'_>) -> Option<String> {
        let node = fields.get("model")?;
        let model = self.bounded(node, "model", MAX_MODEL_CHARS)?;
        // It becomes an argument of a command line.
        if model.starts_with('-') || model.chars().any(|c| c.is_whitespace() || c.is_control()) {
            self.error(node.line, "model", Problem::BadModel { value: shown(model) });
            return None;
        }
        Some(model.to_owned())
    }

    /// Reasoning effort and permissions; the latter is none when something was wrong.
    fn options(
        &mut self,
        fields: &Fields<'_>,
        engine: Option<&EngineFacts>,
    ) -> (Option<Effort>, Option<Permissions>) {
        let Some(node) = fields.get("options") else {
            return (None, Some(Permissions::default()));
        };
        let entries = match &node.value {
            Value::Mapping(entries) => entries,
            Value::Refused => return (None, None),
            other => {
                let problem = Problem::WrongType { expected: "a mapping", found: describe(other) };
                self.error(node.line, "options", problem);
                return (None, None);
            }
        };
        let options = self.known_fields(entries, "options", &OPTION_KEYS);
        let effort = options.get("reasoning_effort").and_then(|node| self.effort(node, engine));
        let permissions = match options.get("permissions") {
            None => Some(Permissions::default()),
            Some(node) => self.word(node, "options.permissions", &Permissions::ALL, Permissions::as_str),
        };
        (effort, permissions)
    }

    fn effort(&mut self, node: &Node, engine: Option<&EngineFacts>) -> Option<Effort> {
        const FIELD: &str = "options.reasoning_effort";
        let effort = self.word(node, FIELD, &Effort::ALL, Effort::as_str)?;
        let engine = engine?;
        if engine.effort_levels.iter().any(|level| level == effort.as_str()) {
            return Some(effort);
        }
        let problem = if engine.effort_levels.is_empty() {
            Problem::EffortUnsupported { engine: engine.name.clone() }
        } else {
            Problem::EffortNotOffered {
                engine: engine.name.clone(),
                value: effort.as_str().to_owned(),
                offered: engine.effort_levels.clone(),
            }
        };
        self.error(node.line, FIELD, problem);
        None
    }

    fn enabled(&mut self, fields: &Fields<'_>) -> Option<bool> {
        let Some(node) = fields.get("enabled") else {
            return Some(true);
        };
        match &node.value {
            Value::Scalar { text, plain: true } if text == "true" => Some(true),
            Value::Scalar { text, plain: true } if text == "false" => Some(false),
            Value::Refused => None,
            other => {
                let problem =
                    Problem::WrongType { expected: "true or false without quotes", found: describe(other) };
                self.error(node.line, "enabled", problem);
                None
            }
        }
    }

    fn triggers(&mut self, fields: &Fields<'_>) -> Option<BTreeSet<Trigger>> {
        let Some(node) = fields.get("triggers") else {
            return Some(Trigger::ALL.into());
        };
        let items = match &node.value {
            Value::List(items) => items,
            Value::Refused => return None,
            other => {
                let problem = Problem::WrongType { expected: "a list", found: describe(other) };
                self.error(node.line, "triggers", problem);
                return None;
            }
        };
        if items.is_empty() {
            let known = owned(Trigger::ALL.map(Trigger::as_str));
            self.error(node.line, "triggers", Problem::EmptyList { known });
            return None;
        }
        let mut triggers = BTreeSet::new();
        let mut all_known = true;
        for (index, item) in items.iter().enumerate() {
            let field = format!("triggers[{index}]");
            match self.word(item, &field, &Trigger::ALL, Trigger::as_str) {
                None => all_known = false,
                Some(trigger) => {
                    if !triggers.insert(trigger) {
                        let problem = Problem::DuplicateItem { value: trigger.as_str().to_owned() };
                        self.error(item.line, &field, problem);
                        all_known = false;
                    }
                }
            }
        }
        all_known.then_some(triggers)
    }

    /// One word of a closed list.
    fn word<T: Copy>(
        &mut self,
        node: &Node,
        field: &str,
        all: &[T],
        as_str: impl Fn(T) -> &'static str,
    ) -> Option<T> {
        let value = self.text(node, field, "text")?;
        let found = all.iter().copied().find(|&candidate| as_str(candidate) == value);
        if found.is_none() {
            let words = || all.iter().map(|&candidate| as_str(candidate));
            let problem = Problem::UnknownValue {
                value: shown(value),
                near: near(value, words()),
                known: owned(words()),
            };
            self.error(node.line, field, problem);
        }
        found
    }
}

fn path(parent: &str, key: &str) -> String {
    match (parent, key) {
        ("", "") => "front matter".to_owned(),
        ("", key) => key.to_owned(),
        (parent, key) => format!("{parent}.{key}"),
    }
}

fn owned<'s>(words: impl IntoIterator<Item = &'s str>) -> Vec<String> {
    words.into_iter().map(str::to_owned).collect()
}

fn line_count(before: &str) -> usize {
    before.matches('\n').count() + 1
}

/// Lower-case letters and digits, parted by single hyphens.
fn is_kebab_case(name: &str) -> bool {
    name.split('-')
        .all(|part| !part.is_empty() && part.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit()))
}

/// The known word that was perhaps meant.
fn near<'s>(word: &str, known: impl IntoIterator<Item = &'s str>) -> Option<String> {
    // Distances of long words cost time and help nobody.
    if word.len() > MAX_NAME_CHARS {
        return None;
    }
    let fold = |w: &str| w.to_lowercase().replace('-', "_");
    let word = fold(word);
    known
        .into_iter()
        .map(|candidate| (strsim::damerau_levenshtein(&word, &fold(candidate)), candidate))
        .filter(|(distance, candidate)| *distance <= (candidate.len() / 3).max(1))
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, candidate)| candidate.to_owned())
}

/// What an unquoted scalar is for a YAML 1.2 reader (core schema), if not text.
fn kind_of_plain(text: &str) -> Option<&'static str> {
    match text {
        "" | "~" | "null" | "Null" | "NULL" => return Some("null"),
        "true" | "True" | "TRUE" | "false" | "False" | "FALSE" => return Some("boolean"),
        ".nan" | ".NaN" | ".NAN" => return Some("number"),
        _ => {}
    }
    let unsigned = text.strip_prefix(['-', '+']).unwrap_or(text);
    if matches!(unsigned, ".inf" | ".Inf" | ".INF") {
        return Some("number");
    }
    let digits = |rest: &str, radix| !rest.is_empty() && rest.chars().all(|c| c.is_digit(radix));
    let octal = text.strip_prefix("0o").is_some_and(|rest| digits(rest, 8));
    let hexadecimal = text.strip_prefix("0x").is_some_and(|rest| digits(rest, 16));
    let decimal =
        unsigned.starts_with(|c: char| c.is_ascii_digit() || c == '.') && unsigned.parse::<f64>().is_ok();
    (octal || hexadecimal || decimal).then_some("number")
}

/// A value in words.
fn describe(value: &Value) -> String {
    match value {
        Value::List(_) => "a list".to_owned(),
        Value::Mapping(_) => "a mapping".to_owned(),
        Value::Refused => "that".to_owned(),
        Value::Scalar { text, plain } => match kind_of_plain(text).filter(|_| *plain) {
            Some("null") => "nothing".to_owned(),
            Some(kind) => format!("the {kind} {}", shown(text)),
            None => format!("the text {:?}", shown(text)),
        },
    }
}
