//! What holds for every source file.

use crate::{assert_none, read, tracked_files};

/// Lines that a Rust file may have at most.
const MAX_LINES: usize = 800;

fn rust_files() -> Vec<(String, String)> {
    tracked_files()
        .into_iter()
        .filter(|name| name.extension().is_some_and(|extension| extension == "rs"))
        .map(|name| (name.display().to_string(), read(&name)))
        .collect()
}

#[test]
fn every_module_says_what_it_is() {
    let complaints: Vec<String> = rust_files()
        .into_iter()
        .filter(|(_, text)| {
            !text.lines().find(|line| !line.trim().is_empty()).is_some_and(|line| line.starts_with("//!"))
        })
        .map(|(name, _)| format!("{name} does not begin with //!"))
        .collect();
    assert_none("modules without a word about them", &complaints);
}

#[test]
fn no_source_file_is_too_long() {
    let complaints: Vec<String> = rust_files()
        .into_iter()
        .map(|(name, text)| (name, text.lines().count()))
        .filter(|(_, lines)| *lines > MAX_LINES)
        .map(|(name, lines)| format!("{name} has {lines} lines, {MAX_LINES} are allowed"))
        .collect();
    assert_none("long files", &complaints);
}

#[test]
fn nothing_tracked_names_a_registry_host_or_a_path_of_one_machine() {
    // Written in two parts, so that this file does not name them either.
    let forbidden: Vec<String> = [
        ("registry.npm", "js.org"),
        ("static.cra", "tes.io"),
        ("index.cra", "tes.io"),
        ("pypi", ".org"),
        ("files.python", "hosted.org"),
        ("deb.deb", "ian.org"),
        ("/wo", "rk/"),
        ("/ro", "ot/"),
        ("/tmp/r", "h/"),
        ("/tmp/tar", "get"),
    ]
    .iter()
    .map(|(one, other)| format!("{one}{other}"))
    .collect();
    let mut complaints = Vec::new();
    for name in tracked_files() {
        let text = read(&name);
        for (number, line) in text.lines().enumerate() {
            for word in &forbidden {
                if mentions(line, word) {
                    complaints.push(format!("{}:{}: {word}", name.display(), number + 1));
                }
            }
        }
    }
    assert_none("hosts and paths that belong to one place", &complaints);
}

/// Whether a line has this word. A path counts only where it begins, not in the middle of a longer one.
fn mentions(line: &str, word: &str) -> bool {
    line.match_indices(word).any(|(at, _)| {
        !word.starts_with('/')
            || !line[..at]
                .chars()
                .next_back()
                .is_some_and(|before| before.is_alphanumeric() || "_-.}".contains(before))
    })
}

#[test]
fn unsafe_code_stays_in_the_process_crate() {
    // The lint denies it everywhere; an exception has to name the lint.
    let lint = format!("(unsafe{}", "_code");
    let complaints: Vec<String> = rust_files()
        .into_iter()
        .filter(|(name, _)| {
            !name.starts_with("engine-runner/process/") && !name.starts_with("tests/support/fake-engine/")
        })
        .filter(|(_, text)| text.lines().any(|line| line.contains(&lint) && !line.contains("forbid(")))
        .map(|(name, _)| format!("{name} lifts the lint against unsafe code"))
        .collect();
    assert_none("unsafe code outside engine-runner/process and the tool that has to misbehave", &complaints);
}

#[test]
fn a_skipped_test_is_listed_with_its_reason() {
    let listed = read("tests/README.md");
    let listed =
        listed.split("## Skipped tests").nth(1).expect("tests/README.md has a section on skipped tests");
    let ignore = format!("#[{}", "ignore");
    let mut complaints = Vec::new();
    for (name, text) in rust_files() {
        let mut skipped = false;
        for line in text.lines() {
            if line.trim_start().starts_with(&ignore) {
                skipped = true;
            } else if let Some(test) =
                line.trim_start().trim_start_matches("async ").strip_prefix("fn ").filter(|_| skipped)
            {
                skipped = false;
                let test = test.split('(').next().unwrap_or_default();
                if !listed.contains(test) {
                    complaints.push(format!("{name}: {test} is skipped and not listed in tests/README.md"));
                }
            }
        }
    }
    assert_none("skipped tests", &complaints);
}

#[test]
fn packages_of_npm_are_pinned_to_exact_versions() {
    for file in ["tests/engines/package.json", "examples/typescript/package.json"] {
        let package: serde_json::Value = serde_json::from_str(&read(file)).expect("JSON");
        let all: Vec<_> = ["dependencies", "devDependencies"]
            .iter()
            .filter_map(|kind| package[*kind].as_object())
            .flatten()
            .collect();
        assert!(!all.is_empty(), "{file}");
        for (name, version) in all {
            let version = version.as_str().unwrap_or_default();
            assert!(
                version
                    .chars()
                    .all(|letter| letter.is_ascii_alphanumeric() || letter == '.' || letter == '-')
                    && version.starts_with(|first: char| first.is_ascii_digit()),
                "{file}: {name} is not pinned: {version}"
            );
        }
    }
}
