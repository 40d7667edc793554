//! The session file: append-only rows at the place where the real engine keeps its own.

use std::{
    collections::HashSet,
    env,
    fs::{self, File, OpenOptions},
    io::{Read, Write},
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

use serde_json::{Value, json};

use super::args::Args;

/// A session.
#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) id: String,
    path: PathBuf,
    file: Option<File>,
    last_row: Option<String>,
    /// The uuids of user messages that were taken before.
    pub(crate) used: HashSet<String>,
    /// Those of them that an earlier process took.
    pub(crate) resumed: HashSet<String>,
    /// Every user text so far.
    pub(crate) texts: Vec<String>,
    /// The models' usage as it was saved last.
    pub(crate) costs: Value,
    /// Whether rows are written.
    pub(crate) saves: bool,
}

/// Why there is no session.
#[derive(Debug)]
pub(crate) enum Refused {
    /// Told on stderr alone.
    Usage(String),
    /// Told on stderr and in a result line.
    Resume {
        /// The id asked for.
        id: String,
        /// The sentence.
        message: String,
    },
}

impl Session {
    /// Opens what the arguments ask for.
    pub(crate) fn open(args: &Args) -> Result<Self, Refused> {
        let saves = !args.has("--no-session-persistence");
        match (args.value("--resume"), args.value("--session-id")) {
            (Some(_), Some(_)) if !args.has("--fork-session") => Err(Refused::Usage(
                "Error: --session-id can only be used with --resume if --fork-session is also specified."
                    .to_owned(),
            )),
            (Some(old), chosen) => {
                let mut session = Self::resume(old)?;
                if args.has("--fork-session") {
                    let id = chosen.map_or_else(new_id, str::to_owned);
                    session.fork(&id);
                }
                session.saves = saves;
                Ok(session)
            }
            (None, Some(id)) => {
                if uuid::Uuid::parse_str(id).is_err() {
                    return Err(Refused::Usage(
                        "Error: Invalid session ID. Must be a valid UUID.".to_owned(),
                    ));
                }
                if find(id).is_some() {
                    return Err(Refused::Usage(format!("Error: Session ID {id} is already in use.")));
                }
                Ok(Self::fresh(id.to_owned(), saves))
            }
            (None, None) => Ok(Self::fresh(new_id(), saves)),
        }
    }

    fn fresh(id: String, saves: bool) -> Self {
        let path = projects().join(slug()).join(format!("{id}.jsonl"));
        Self {
            id,
            path,
            file: None,
            last_row: None,
            used: HashSet::new(),
            resumed: HashSet::new(),
            texts: Vec::new(),
            costs: json!({}),
            saves,
        }
    }

    fn resume(id: &str) -> Result<Self, Refused> {
        let refused = |message: String| Refused::Resume { id: id.to_owned(), message };
        let missing = || refused(format!("No conversation found with session ID: {id}"));
        let path = find(id).ok_or_else(missing)?;
        if path.is_dir() {
            return Err(refused(
                "Failed to resume session: EISDIR: illegal operation on a directory, read".to_owned(),
            ));
        }
        let mut bytes = Vec::new();
        File::open(&path).and_then(|mut file| file.read_to_end(&mut bytes)).map_err(|_| missing())?;
        let mut session = Self { path, ..Self::fresh(id.to_owned(), true) };
        // Rows that cannot be read are left out without a word, as the real engine does.
        for row in
            bytes.split(|byte| *byte == b'\n').filter_map(|line| serde_json::from_slice::<Value>(line).ok())
        {
            session.take_in(&row);
        }
        session.resumed = session.used.clone();
        if session.texts.is_empty() { Err(missing()) } else { Ok(session) }
    }

    fn take_in(&mut self, row: &Value) {
        let uuid = row["uuid"].as_str().map(str::to_owned);
        match row["type"].as_str() {
            Some("user") => {
                if let Some(text) = last_text(&row["message"]) {
                    if text.starts_with("[Request interrupted") {
                        self.last_row = uuid;
                        return;
                    }
                    self.texts.push(text);
                    self.used.extend(uuid.clone());
                }
            }
            Some("cost-state") => self.costs = row["modelUsage"].clone(),
            _ => {}
        }
        if uuid.is_some() {
            self.last_row = uuid;
        }
    }

    fn fork(&mut self, id: &str) {
        let target = projects().join(slug()).join(format!("{id}.jsonl"));
        let _ = make_dir(target.parent());
        let _ = fs::copy(&self.path, &target);
        self.path = target;
        id.clone_into(&mut self.id);
    }

    /// Appends a row; failures are silent, as the real engine's are.
    pub(crate) fn append(&mut self, kind: &str, uuid: &str, message: &Value) {
        let row = json!({
            "parentUuid": self.last_row, "isSidechain": false, "type": kind, "message": message, "uuid": uuid,
            "sessionId": self.id, "cwd": cwd(), "version": super::lines::VERSION,
        });
        self.last_row = Some(uuid.to_owned());
        self.write(&row);
    }

    /// Appends the costs, as a graceful exit does.
    pub(crate) fn save_costs(&mut self, usage: &Value) {
        if self.file.is_some() {
            let row = json!({"type": "cost-state", "sessionId": self.id, "modelUsage": usage});
            self.write(&row);
        }
    }

    fn write(&mut self, row: &Value) {
        if !self.saves {
            return;
        }
        if self.file.is_none() {
            self.file = self.open_file();
        }
        if let Some(file) = &mut self.file {
            let _ = file.write_all(format!("{row}\n").as_bytes());
        }
    }

    fn open_file(&self) -> Option<File> {
        make_dir(self.path.parent()).ok()?;
        let mut options = OpenOptions::new();
        let mut file = options.append(true).create(true).mode(0o600).open(&self.path).ok()?;
        // A row that was cut off stays by itself.
        let cut_off = fs::read(&self.path).is_ok_and(|bytes| bytes.last().is_some_and(|last| *last != b'\n'));
        if cut_off {
            let _ = file.write_all(b"\n");
        }
        Some(file)
    }
}

fn make_dir(dir: Option<&Path>) -> std::io::Result<()> {
    dir.map_or(Ok(()), |dir| fs::DirBuilder::new().recursive(true).mode(0o700).create(dir))
}

/// A new random id.
pub(crate) fn new_id() -> String {
    uuid::Uuid::new_v4().to_string()
}

/// The last text of a message; its content may be a bare string.
pub(crate) fn last_text(message: &Value) -> Option<String> {
    match &message["content"] {
        Value::String(text) => Some(text.clone()),
        Value::Array(blocks) => blocks
            .iter()
            .rev()
            .find(|block| block["type"] == "text")
            .and_then(|block| block["text"].as_str())
            .map(str::to_owned),
        _ => None,
    }
}

/// The working directory, symlinks resolved.
pub(crate) fn cwd() -> String {
    env::current_dir().map_or_else(|_| "/".to_owned(), |dir| dir.to_string_lossy().into_owned())
}

fn projects() -> PathBuf {
    let config = env::var_os("CLAUDE_CONFIG_DIR").map(PathBuf::from);
    let home = || PathBuf::from(env::var_os("HOME").unwrap_or_else(|| "/".into())).join(".claude");
    config.unwrap_or_else(home).join("projects")
}

/// The directory's name for a working directory: everything but letters and digits becomes a dash.
fn slug() -> String {
    cwd().chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).collect()
}

/// The file of a session, in whatever directory it lies.
fn find(id: &str) -> Option<PathBuf> {
    let name = format!("{id}.jsonl");
    let own = projects().join(slug()).join(&name);
    if own.exists() {
        return Some(own);
    }
    fs::read_dir(projects()).ok()?.flatten().map(|dir| dir.path().join(&name)).find(|path| path.exists())
}
