//! The README's table of settings against the schema.

#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test fails by panicking, in what it calls, too"
)]

use std::collections::BTreeMap;

use roundhouse_config::{Config, EngineSettings, Profile};
use toml::{Table, Value};

fn leaves(prefix: &str, table: &Table, found: &mut BTreeMap<String, Value>) {
    for (name, value) in table {
        let key = format!("{prefix}.{name}");
        match value {
            Value::Table(below) if !below.is_empty() => leaves(&key, below, found),
            _ => {
                found.insert(key, value.clone());
            }
        }
    }
}

/// The rows of the table that begins with `| key | default`.
fn rows() -> BTreeMap<String, String> {
    let readme = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../README.md")).unwrap();
    let (_, table) =
        readme.split_once("| key | default | meaning |").expect("the README has the table of settings");
    table
        .lines()
        .skip(2)
        .take_while(|line| line.starts_with('|'))
        .map(|line| {
            let cells: Vec<_> = line.split(" | ").collect();
            (cells[0].trim_matches(['|', ' ', '`']).to_owned(), cells[1].trim_matches('`').to_owned())
        })
        .collect()
}

#[test]
fn the_readme_lists_every_setting_with_its_default() {
    let mut settings = BTreeMap::new();
    for (section, table) in Table::try_from(Config::default()).unwrap() {
        leaves(&section, table.as_table().unwrap(), &mut settings);
    }
    settings.remove("client.profiles");
    leaves("client.profiles.*", &Table::try_from(Profile::default()).unwrap(), &mut settings);
    leaves("engines.*", &Table::try_from(EngineSettings::default()).unwrap(), &mut settings);
    let rows = rows();
    assert_eq!(rows.keys().collect::<Vec<_>>(), settings.keys().collect::<Vec<_>>());
    for (key, value) in settings {
        let shown = match &value {
            Value::String(text) => text.clone(),
            other => other.to_string(),
        };
        // Empty values and directories of the person's own are told in words.
        if !shown.is_empty() && shown != "[]" && shown != "{}" && !key.ends_with("state_dir") {
            assert_eq!(rows[&key], shown, "default of {key}");
        }
    }
}
