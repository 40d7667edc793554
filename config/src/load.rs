//! Layers, merged key by key, with every problem told.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

use etcetera::BaseStrategy as _;
use serde::Deserialize as _;
use toml::{Table, Value};

use crate::schema::{Config, EngineSettings, Profile};

/// Variables with our prefix that are not settings of this schema.
const OTHER_VARIABLES: [&str; 6] = [
    "ROUNDHOUSE_CONFIG",
    "ROUNDHOUSE_SERVER",
    "ROUNDHOUSE_PROFILE",
    "ROUNDHOUSE_TOKEN",
    "ROUNDHOUSE_LOG",
    "ROUNDHOUSE_KEEPER",
];

/// Prefix of variables that only tests set; never settings.
const TEST_PREFIX: &str = "ROUNDHOUSE_TEST_";

/// Where a value came from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Layer {
    /// A configuration file.
    File(PathBuf),
    /// An environment variable.
    Variable(String),
    /// A setting on the command line.
    CommandLine,
}

impl fmt::Display for Layer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) => write!(f, "{}", path.display()),
            Self::Variable(name) => write!(f, "variable {name}"),
            Self::CommandLine => f.write_str("command line"),
        }
    }
}

/// One thing that is wrong.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// Where it stands.
    pub layer: Layer,
    /// The key, dotted. Empty: no single one.
    pub key: String,
    /// What is wrong and, where that can be told, what would be right.
    pub message: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.key.is_empty() {
            write!(f, "{}: {}", self.layer, self.message)
        } else {
            write!(f, "{}: {}: {}", self.layer, self.key, self.message)
        }
    }
}

/// All that is wrong with a configuration.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub struct Problems(pub Vec<Problem>);

impl fmt::Display for Problems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the configuration is not valid:")?;
        for problem in &self.0 {
            write!(f, "\n  {problem}")?;
        }
        Ok(())
    }
}

/// What to load from.
#[derive(Debug, Clone, Default)]
pub struct Sources {
    /// A file that must exist. None: [`default_file`], if it is there.
    pub file: Option<PathBuf>,
    /// The environment, as name and value.
    pub variables: BTreeMap<String, String>,
    /// Settings from the command line, each `section.key=value`. The value is TOML; text needs no quotes.
    pub settings: Vec<String>,
}

impl Sources {
    /// The process's own environment, with nothing else.
    #[must_use]
    pub fn from_environment() -> Self {
        let variables = std::env::vars_os()
            .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
            .filter(|(name, _)| name.starts_with("ROUNDHOUSE_"))
            .collect();
        Self { variables, ..Self::default() }
    }
}

/// The file that is read when none is named: `$XDG_CONFIG_HOME/roundhouse/roundhouse.toml`.
#[must_use]
pub fn default_file() -> Option<PathBuf> {
    let xdg = etcetera::base_strategy::Xdg::new().ok()?;
    Some(xdg.config_dir().join("roundhouse").join("roundhouse.toml"))
}

/// Loads the configuration.
///
/// # Errors
/// Every problem of every layer. A configuration with a problem is not used at all.
pub fn load(sources: &Sources) -> Result<Config, Problems> {
    let schema = Schema::new();
    let mut merge = Merge { schema: &schema, table: Table::new(), problems: Vec::new() };
    if let Some(path) = sources.file.clone().or_else(|| default_file().filter(|path| path.exists())) {
        merge.file(&path);
    }
    for (name, value) in &sources.variables {
        merge.variable(name, value);
    }
    for setting in &sources.settings {
        merge.setting(setting);
    }
    if !merge.problems.is_empty() {
        return Err(Problems(merge.problems));
    }
    Config::deserialize(merge.table).map_err(|error| {
        Problems(vec![Problem {
            layer: Layer::CommandLine,
            key: String::new(),
            message: one_line(error.message()),
        }])
    })
}

/// A configuration as a TOML file, with the values of `[engines.*.variables]` masked.
///
/// # Errors
/// The serialiser's words, should a value not fit into TOML.
pub fn show(config: &Config) -> Result<String, toml::ser::Error> {
    let mut shown = config.clone();
    for engine in shown.engines.values_mut() {
        for value in engine.variables.values_mut() {
            "****".clone_into(value);
        }
    }
    toml::to_string_pretty(&shown)
}

/// Sections whose entries are named by people, as they stand in the schema.
const NAMED: [&str; 2] = ["engines", "client.profiles"];

/// The known keys. `engines.*` stands for any engine, `engines.*.variables.*` for any variable, `client.profiles.*` for
/// any profile.
struct Schema {
    keys: Vec<String>,
}

impl Schema {
    fn new() -> Self {
        let mut keys = Vec::new();
        if let Ok(table) = Table::try_from(Config::default()) {
            leaves("", &table, &mut keys);
        }
        keys.retain(|key| !NAMED.contains(&key.as_str()));
        if let Ok(table) = Table::try_from(EngineSettings::default()) {
            leaves("engines.*", &table, &mut keys);
        }
        if let Ok(table) = Table::try_from(Profile::default()) {
            leaves("client.profiles.*", &table, &mut keys);
        }
        Self { keys }
    }

    /// Whether a key is known, with the names of people's own choice generalised.
    fn knows(&self, key: &str) -> bool {
        let general = generalise(key);
        self.keys.contains(&general) || general.starts_with("engines.*.variables.")
    }

    /// Whether some known key lies below this one.
    fn has_below(&self, key: &str) -> bool {
        let prefix = format!("{}.", generalise(key));
        NAMED.contains(&key)
            || generalise(key) == "engines.*.variables"
            || self.keys.iter().any(|known| known.starts_with(&prefix))
    }

    fn nearest(&self, key: &str) -> Option<String> {
        let general = generalise(key);
        let sections = ["control_plane", "runner", "engines", "client"].map(str::to_owned);
        self.keys
            .iter()
            .chain(&sections)
            .map(|known| (strsim::jaro_winkler(known, &general), known))
            .filter(|(likeness, _)| *likeness > 0.8)
            .max_by(|left, right| left.0.total_cmp(&right.0))
            .map(|(_, known)| {
                let section = NAMED.iter().find(|section| known.starts_with(&format!("{section}.*")));
                let name = section
                    .and_then(|section| key.strip_prefix(section)?.strip_prefix('.')?.split('.').next());
                match name {
                    Some(name) => known.replacen('*', name, 1),
                    None => known.clone(),
                }
            })
    }

    fn unknown(&self, key: &str) -> String {
        if self.has_below(key) {
            return format!(
                "is a section; its settings are written {key}.NAME=VALUE, and `roundhouse config show` lists them"
            );
        }
        match self.nearest(key) {
            Some(known) => format!("unknown key; did you mean {known}?"),
            None => "unknown key; `roundhouse config show` lists the known ones".to_owned(),
        }
    }
}

fn leaves(prefix: &str, table: &Table, keys: &mut Vec<String>) {
    for (name, value) in table {
        let key = if prefix.is_empty() { name.clone() } else { format!("{prefix}.{name}") };
        match value {
            Value::Table(below) if !below.is_empty() => leaves(&key, below, keys),
            _ => keys.push(key),
        }
    }
}

fn generalise(key: &str) -> String {
    for section in NAMED {
        if let Some(rest) = key.strip_prefix(section).and_then(|rest| rest.strip_prefix('.')) {
            return match rest.split_once('.') {
                Some((_, below)) => format!("{section}.*.{below}"),
                None => format!("{section}.*"),
            };
        }
    }
    key.to_owned()
}

struct Merge<'a> {
    schema: &'a Schema,
    table: Table,
    problems: Vec<Problem>,
}

impl Merge<'_> {
    fn problem(&mut self, layer: &Layer, key: &str, message: impl Into<String>) {
        self.problems.push(Problem { layer: layer.clone(), key: key.to_owned(), message: message.into() });
    }

    fn file(&mut self, path: &Path) {
        let layer = Layer::File(path.to_owned());
        let text = match std::fs::read_to_string(path) {
            Ok(text) => text,
            Err(error) => return self.problem(&layer, "", format!("cannot be read: {error}")),
        };
        match text.parse::<Table>() {
            Ok(table) => self.walk(&layer, "", &table),
            Err(error) => {
                let line = error.span().map_or(0, |span| line_of(&text, span.start));
                self.problem(&layer, "", format!("line {line}: {}", one_line(error.message())));
            }
        }
    }

    fn walk(&mut self, layer: &Layer, prefix: &str, table: &Table) {
        for (name, value) in table {
            let key = if prefix.is_empty() { name.clone() } else { format!("{prefix}.{name}") };
            match value {
                Value::Table(below) if self.schema.has_below(&key) => self.walk(layer, &key, below),
                _ if self.schema.knows(&key) => self.set(layer, &key, value.clone()),
                _ if self.schema.has_below(&key) => self.problem(layer, &key, "is a section, not a value"),
                _ => {
                    let message = self.schema.unknown(&key);
                    self.problem(layer, &key, message);
                }
            }
        }
    }

    fn variable(&mut self, name: &str, value: &str) {
        if OTHER_VARIABLES.contains(&name) || name.starts_with(TEST_PREFIX) {
            return;
        }
        let layer = Layer::Variable(name.to_owned());
        let known =
            self.schema.keys.iter().find(|key| !key.contains('*') && variable_name(key) == name).cloned();
        match known {
            Some(key) => self.set_text(&layer, &key, value),
            None => {
                let nearest = self
                    .schema
                    .keys
                    .iter()
                    .filter(|key| !key.contains('*'))
                    .map(|key| variable_name(key))
                    .map(|known| (strsim::jaro_winkler(&known, name), known))
                    .filter(|(likeness, _)| *likeness > 0.9)
                    .max_by(|left, right| left.0.total_cmp(&right.0));
                let message = match nearest {
                    Some((_, known)) => format!("unknown variable; did you mean {known}?"),
                    None => "unknown variable; `roundhouse config show` lists the settings".to_owned(),
                };
                self.problem(&layer, "", message);
            }
        }
    }

    fn setting(&mut self, setting: &str) {
        let layer = Layer::CommandLine;
        let Some((key, value)) = setting.split_once('=') else {
            return self.problem(&layer, setting, "a setting is written section.key=value");
        };
        let key = key.trim();
        if self.schema.knows(key) {
            self.set_text(&layer, key, value);
        } else {
            let message = self.schema.unknown(key);
            self.problem(&layer, key, message);
        }
    }

    /// Text from outside a file: TOML where it fits the key, else the text itself.
    fn set_text(&mut self, layer: &Layer, key: &str, text: &str) {
        let parsed =
            format!("value = {text}").parse::<Table>().ok().and_then(|mut table| table.remove("value"));
        let plain = Value::String(text.to_owned());
        match parsed {
            // What fits neither way is complained about as what it looks like.
            Some(value) if fits(key, &value).is_ok() || fits(key, &plain).is_err() => {
                self.set(layer, key, value)
            }
            _ => self.set(layer, key, plain),
        }
    }

    fn set(&mut self, layer: &Layer, key: &str, value: Value) {
        match fits(key, &value) {
            Ok(()) => put(&mut self.table, key, value),
            Err(message) => self.problem(layer, key, message),
        }
    }
}

/// Durations that mean something at zero: nothing is kept, nothing is waited for. Every other one must be longer.
const MAY_BE_ZERO: [&str; 8] = [
    "control_plane.event_retention",
    "control_plane.shutdown_timeout",
    "runner.warm_ttl",
    "runner.deadline",
    "runner.cancel_interrupt_grace",
    "runner.cancel_term_grace",
    "runner.drain_timeout",
    "runner.spool_keep",
];

/// The least of numbers for which zero, or next to nothing, would stop every turn.
const LEAST: [(&str, i64); 4] = [
    ("control_plane.max_waiting_messages", 1),
    ("control_plane.context_budget", 4_000),
    ("runner.max_line_bytes", 64 * 1024),
    ("runner.spool_limit_bytes", 1024 * 1024),
];

/// Checks one value alone, so that each wrong value is told and not just the first.
fn fits(key: &str, value: &Value) -> Result<(), String> {
    let mut alone = Table::new();
    put(&mut alone, key, value.clone());
    let config = Config::deserialize(alone).map_err(|error| in_our_words(error.message()))?;
    let merged = Table::try_from(config).map_err(|error| one_line(&error.to_string()))?;
    match get(&merged, key) {
        Some(Value::String(text))
            if text == "0s" && !key.starts_with("engines.") && !MAY_BE_ZERO.contains(&key) =>
        {
            Err("must be longer than nothing".to_owned())
        }
        Some(Value::Integer(number)) => match LEAST.iter().find(|(name, _)| *name == key) {
            Some((_, least)) if number < least => Err(format!("must be at least {least}")),
            _ => Ok(()),
        },
        _ => Ok(()),
    }
}

/// What a value should have been, rather than how a parser of somebody else's calls it.
fn in_our_words(message: &str) -> String {
    let message = one_line(message);
    if message.contains("duration") {
        return "is no duration: write it like 90s, 5m or 1h 30m".to_owned();
    }
    if message.contains("expected u32") || message.contains("expected u64") {
        return "must be a whole number, zero or more".to_owned();
    }
    if message.contains("expected a boolean") {
        return "must be true or false".to_owned();
    }
    message
}

fn get<'a>(table: &'a Table, key: &str) -> Option<&'a Value> {
    match key.split_once('.') {
        None => table.get(key),
        Some((section, below)) => get(table.get(section)?.as_table()?, below),
    }
}

fn put(table: &mut Table, key: &str, value: Value) {
    match key.split_once('.') {
        None => {
            table.insert(key.to_owned(), value);
        }
        Some((section, below)) => {
            let entry = table.entry(section.to_owned()).or_insert_with(|| Value::Table(Table::new()));
            if let Value::Table(inner) = entry {
                put(inner, below, value);
            }
        }
    }
}

fn variable_name(key: &str) -> String {
    format!("ROUNDHOUSE_{}", key.replace('.', "_").to_uppercase())
}

fn line_of(text: &str, offset: usize) -> usize {
    text.as_bytes().iter().take(offset).filter(|byte| **byte == b'\n').count() + 1
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use pretty_assertions::assert_eq;

    use super::*;
    use crate::schema::Credentials;

    /// Sources with an empty file, so that the machine's own configuration plays no part.
    fn without_file(variables: &[(&str, &str)], settings: &[&str]) -> Result<Config, Problems> {
        let file = tempfile::NamedTempFile::new().unwrap();
        load(&Sources {
            file: Some(file.path().to_owned()),
            variables: variables
                .iter()
                .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
                .collect(),
            settings: settings.iter().map(|setting| (*setting).to_owned()).collect(),
        })
    }

    fn from_text(text: &str) -> Result<Config, Problems> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("roundhouse.toml");
        std::fs::write(&path, text).unwrap();
        load(&Sources { file: Some(path), ..Sources::default() }).map_err(|problems| {
            Problems(
                problems
                    .0
                    .into_iter()
                    .map(|problem| Problem { layer: Layer::File("f".into()), ..problem })
                    .collect(),
            )
        })
    }

    #[test]
    fn layers_lie_over_each_other() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("roundhouse.toml");
        std::fs::write(
            &path,
            "[runner]\nidle_timeout = \"3m\"\nmax_warm_engines = 2\nwarm_ttl = '1h 30m'\n\
             [[runner.roots]]\npath = '/srv'\ntrust = true\n\
             [engines.claude-code]\ncredentials = 'host'\n[engines.claude-code.variables]\nA = 'b'\n",
        )
        .unwrap();
        let config = load(&Sources {
            file: Some(path),
            variables: [
                ("ROUNDHOUSE_RUNNER_MAX_WARM_ENGINES".to_owned(), "3".to_owned()),
                ("ROUNDHOUSE_RUNNER_LISTEN".to_owned(), "127.0.0.1:0".to_owned()),
                ("ROUNDHOUSE_SERVER".to_owned(), "x".to_owned()),
            ]
            .into(),
            settings: vec!["runner.max_warm_engines=4".to_owned(), "runner.idle_timeout=5s".to_owned()],
        })
        .unwrap();
        assert_eq!(config.runner.max_warm_engines, 4);
        assert_eq!(config.runner.listen, "127.0.0.1:0");
        assert_eq!(config.runner.idle_timeout, Duration::from_secs(5));
        assert_eq!(config.runner.warm_ttl, Duration::from_secs(5400));
        assert!(config.runner.roots[0].trust);
        let engine = &config.engines["claude-code"];
        assert_eq!(engine.credentials, Credentials::Host);
        assert_eq!(engine.variables["A"], "b");
        assert!(!show(&config).unwrap().contains("'b'"));
    }

    #[test]
    fn every_problem_is_told_with_the_near_miss() {
        let problems = from_text(
            "[runner]\nidle_timeot = '3m'\nmax_warm_engines = 'many'\n[engines.claude-code]\nexecutabel = 'x'\n[zebra]\na = 1\n",
        )
        .unwrap_err();
        let told: Vec<_> = problems.0.iter().map(ToString::to_string).collect();
        assert_eq!(
            told,
            [
                "f: engines.claude-code.executabel: unknown key; did you mean engines.claude-code.executable?",
                "f: runner.idle_timeot: unknown key; did you mean runner.idle_timeout?",
                "f: runner.max_warm_engines: must be a whole number, zero or more",
                "f: zebra: unknown key; `roundhouse config show` lists the known ones",
            ]
        );
    }

    #[test]
    fn a_broken_file_names_its_line() {
        let problems = from_text("[runner]\nlisten = \n").unwrap_err();
        assert!(problems.0[0].message.starts_with("line 2: "), "{problems}");
    }

    #[test]
    fn a_missing_named_file_is_a_problem() {
        let sources = Sources { file: Some("/nonexistent/roundhouse.toml".into()), ..Sources::default() };
        let problems = load(&sources).unwrap_err();
        assert!(problems.to_string().contains("cannot be read"), "{problems}");
    }

    #[test]
    fn variables_and_settings_are_checked_too() {
        let problems =
            without_file(&[("ROUNDHOUSE_RUNER_LISTEN", "x")], &["runner.listn=x", "nonsense", "runner=3"])
                .unwrap_err();
        let told: Vec<_> = problems.0.iter().map(|problem| problem.message.clone()).collect();
        assert_eq!(told[0], "unknown variable; did you mean ROUNDHOUSE_RUNNER_LISTEN?");
        assert_eq!(told[1], "unknown key; did you mean runner.listen?");
        assert_eq!(told[2], "a setting is written section.key=value");
        assert!(
            told[3].starts_with("is a section; its settings are written runner.NAME=VALUE"),
            "{}",
            told[3]
        );
        assert_eq!(told.len(), 4);
    }

    #[test]
    fn a_value_of_the_wrong_kind_is_told_in_words_of_ours() {
        let told = |setting: &str| without_file(&[], &[setting]).unwrap_err().0[0].message.clone();
        let number = "must be a whole number, zero or more";
        assert_eq!(told("runner.max_warm_engines=-1"), number);
        assert_eq!(told("runner.spool_keep_bytes=many"), number);
        let duration = "is no duration: write it like 90s, 5m or 1h 30m";
        assert_eq!(told("runner.idle_timeout=5"), duration);
        assert_eq!(told("runner.idle_timeout=soon"), duration);
        assert_eq!(told("runner.stop_turns=maybe"), "must be true or false");
    }

    #[test]
    fn profiles_are_named_by_people_and_checked_all_the_same() {
        let config = from_text(
            "[client.profiles.work]\nserver = 'http://10.0.0.5:7450'\ntoken_file = '/k'\n[client.profiles.home]\n",
        )
        .unwrap();
        assert_eq!(config.client.profiles["work"].server, "http://10.0.0.5:7450");
        assert_eq!(config.client.profiles["work"].token_file, PathBuf::from("/k"));
        let told = from_text("[client.profiles.work]\nsevrer = 'x'\n").unwrap_err().0[0].to_string();
        assert_eq!(
            told,
            "f: client.profiles.work.sevrer: unknown key; did you mean client.profiles.work.server?"
        );
        let set = without_file(&[], &["client.profiles.work.server=http://h:1"]).unwrap();
        assert_eq!(set.client.profiles["work"].server, "http://h:1");
        // These are flags, not settings.
        without_file(&[("ROUNDHOUSE_TOKEN", "x"), ("ROUNDHOUSE_PROFILE", "work")], &[]).unwrap();
    }

    #[test]
    fn what_would_stop_every_turn_is_refused() {
        let told =
            |setting: &str| without_file(&[], &[setting]).map_err(|problems| problems.0[0].message.clone());
        for key in ["idle_timeout", "engine_start_timeout", "keeper_timeout", "permission_timeout"] {
            assert_eq!(
                told(&format!("runner.{key}=0s")).unwrap_err(),
                "must be longer than nothing",
                "{key}"
            );
        }
        assert_eq!(told("control_plane.heartbeat_interval=0ms").unwrap_err(), "must be longer than nothing");
        assert_eq!(told("control_plane.context_budget=3999").unwrap_err(), "must be at least 4000");
        assert_eq!(told("runner.warm_ttl=0s").unwrap().runner.warm_ttl, Duration::ZERO);
        assert_eq!(told("runner.max_warm_engines=0").unwrap().runner.max_warm_engines, 0);
        // A text that only looks like a duration of zero.
        assert_eq!(told("engines.fake.identity=0s").unwrap().engines["fake"].identity, "0s");
    }

    #[test]
    fn defaults_survive_a_round_trip() {
        let text = show(&Config::default()).unwrap();
        assert_eq!(toml::from_str::<Config>(&text).unwrap(), Config::default());
    }

    #[test]
    fn text_that_looks_like_a_number_stays_text_where_text_is_wanted() {
        let config = without_file(&[], &["engines.fake.identity=12", "engines.fake.variables.X=1"]).unwrap();
        assert_eq!(config.engines["fake"].identity, "12");
        assert_eq!(config.engines["fake"].variables["X"], "1");
    }
}
