//! Documents that must not drift from what they describe.

use std::collections::BTreeMap;

use roundhouse_proto::engine::v1::{ErrorReason, FailureReason};

use crate::{assert_none, read, tracked_files};

/// The rows of the table in one section of docs/errors.md, by their reason.
fn rows(section: &str) -> BTreeMap<String, Vec<String>> {
    let page = read("docs/errors.md");
    let body = page
        .split("\n## ")
        .find(|part| part.starts_with(section))
        .unwrap_or_else(|| panic!("docs/errors.md has no section {section}"))
        .to_owned();
    body.lines()
        .filter_map(|line| line.strip_prefix("| `"))
        .map(|line| {
            let mut cells = line.trim_end_matches('|').split(" | ").map(str::trim);
            let reason = cells.next().unwrap_or_default().trim_end_matches('`').to_owned();
            (reason, cells.map(str::to_owned).collect())
        })
        .collect()
}

fn compare(section: &str, reasons: &[String]) -> Vec<String> {
    let rows = rows(section);
    let mut complaints = Vec::new();
    for reason in reasons {
        match rows.get(reason) {
            None => complaints.push(format!("{section}: {reason} is missing")),
            Some(cells) if cells.len() != 2 || cells.iter().any(|cell| cell.len() < 10) => {
                complaints.push(format!("{section}: {reason} needs its meaning and what to do: {cells:?}"));
            }
            Some(_) => {}
        }
    }
    for row in rows.keys() {
        if !reasons.contains(row) {
            complaints.push(format!("{section}: there is no reason {row}"));
        }
    }
    complaints
}

#[test]
fn every_reason_has_its_meaning_and_what_to_do_about_it() {
    let names = |prefix: &str, name_of: &dyn Fn(i32) -> Option<&'static str>| -> Vec<String> {
        let names: Vec<String> =
            (1..200).filter_map(name_of).map(|name| name.trim_start_matches(prefix).to_owned()).collect();
        assert!(names.len() > 10, "next to no reasons: {names:?}");
        names
    };
    let errors =
        names("ERROR_REASON_", &|n| ErrorReason::try_from(n).ok().map(|reason| reason.as_str_name()));
    let failures =
        names("FAILURE_REASON_", &|n| FailureReason::try_from(n).ok().map(|reason| reason.as_str_name()));
    let mut complaints = compare("Why a call failed", &errors);
    complaints.extend(compare("Why a turn failed", &failures));
    assert_none("docs/errors.md", &complaints);
}

#[test]
fn the_readme_names_the_command_that_ci_runs() {
    let ci = read(".ci/run");
    let last = ci.lines().rfind(|line| !line.trim().is_empty()).unwrap_or_default();
    let command = last.strip_prefix("exec ").expect("the last line of .ci/run is the one test command");
    let readme = read("README.md");
    let fenced: Vec<&str> = readme
        .split("```")
        .skip(1)
        .step_by(2)
        .flat_map(str::lines)
        .map(str::trim)
        .filter(|line| *line == command || *line == format!("$ {command}"))
        .collect();
    assert!(!fenced.is_empty(), "README.md does not show `{command}` in a code block");
}

#[test]
fn the_tools_of_the_tests_are_pinned() {
    let requirements = read("tests/tools/requirements.txt");
    let unpinned: Vec<String> = requirements
        .lines()
        .map(str::trim)
        .filter(|line| !line.is_empty() && !line.starts_with('#') && !line.contains("=="))
        .map(str::to_owned)
        .collect();
    assert_none("tools without a version", &unpinned);
}

#[test]
fn the_python_example_is_tested_with_the_versions_that_it_names() {
    let installed = read("tests/tools/requirements.txt");
    let named = read("examples/python/requirements.txt");
    let named: Vec<&str> = named.lines().filter(|line| line.contains("==")).collect();
    assert!(named.len() > 3, "it names next to nothing: {named:?}");
    let others: Vec<String> = named
        .into_iter()
        .filter(|line| !installed.lines().any(|one| one == *line))
        .map(str::to_owned)
        .collect();
    assert_none("not in tests/tools/requirements.txt", &others);
}

/// Links of a Markdown text that lead to files: `[words](path)`, without a scheme and without an anchor.
fn file_links(text: &str) -> Vec<String> {
    text.split("](")
        .skip(1)
        .filter_map(|rest| rest.split_once(')'))
        .map(|(target, _)| target.split('#').next().unwrap_or_default().to_owned())
        .filter(|target| {
            !target.is_empty() && !target.contains("://") && !target.contains(char::is_whitespace)
        })
        .collect()
}

#[test]
fn links_between_documents_lead_to_files() {
    let root = roundhouse_test_support::bins::repository();
    let mut links = 0;
    let mut dead = Vec::new();
    for page in tracked_files().into_iter().filter(|name| name.extension().is_some_and(|end| end == "md")) {
        for target in file_links(&read(&page)) {
            links += 1;
            let directory = page.parent().unwrap_or_else(|| std::path::Path::new(""));
            if !root.join(directory).join(&target).exists() {
                dead.push(format!("{}: {target}", page.display()));
            }
        }
    }
    assert!(links > 3, "the documents link to next to nothing");
    assert_none("links that lead nowhere", &dead);
}

/// The tests that a word of a table of pitfalls names: a module, a test, or all that begin alike.
fn tests_of(word: &str) -> Option<String> {
    let name = word.rsplit("::").next()?;
    let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_' || c == '*';
    (name.len() > 4 && name.chars().all(plain)).then(|| name.to_owned())
}

#[test]
fn every_pitfall_of_an_engine_names_tests_that_are_there() {
    let page = read("tests/README.md");
    let sources: String = tracked_files()
        .iter()
        .filter(|name| name.extension().is_some_and(|extension| extension == "rs"))
        .map(read)
        .collect();
    let mut complaints = Vec::new();
    for engine in ["Claude Code", "Codex"] {
        let heading = format!("Pitfalls of {engine}, ");
        let section = page.split("\n## ").find(|part| part.starts_with(&heading)).expect("the section");
        complaints.extend(without_tests(engine, section, &sources));
    }
    assert_none("pitfalls without their tests", &complaints);
}

/// Rows of a table of pitfalls that name no test, or one that is not there.
fn without_tests(engine: &str, section: &str, sources: &str) -> Vec<String> {
    let mut complaints = Vec::new();
    let rows: Vec<&str> =
        section.lines().filter(|line| line.starts_with("| ") && !line.starts_with("| pitfall")).collect();
    assert!(rows.len() > 20, "the table is read: {rows:?}");
    for row in rows {
        let Some((pitfall, tests)) = row.trim_matches(['|', ' ']).split_once(" | ") else { continue };
        let named: Vec<String> = tests.split('`').skip(1).step_by(2).filter_map(tests_of).collect();
        if named.is_empty() && !tests.starts_with("the same") {
            complaints.push(format!("{engine}: {pitfall}: no test"));
        }
        for name in named {
            let known = match name.strip_suffix('*') {
                Some(beginning) => sources.contains(&format!("fn {beginning}")),
                None => sources.contains(&format!("fn {name}(")) || sources.contains(&format!("mod {name};")),
            };
            if !known && !name.starts_with('_') {
                complaints.push(format!("{engine}: {pitfall}: there is no test {name}"));
            }
        }
    }
    complaints
}
