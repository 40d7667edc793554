//! What holds for the source tree as a whole. Needs no service and no engine.

#![expect(clippy::expect_used, reason = "a test fails by panicking, in what it calls, too")]

mod dependencies;
mod documents;
mod protos;
mod sources;

use std::{path::PathBuf, process::Command};

/// The files that git tracks, relative to the root of the tree.
fn tracked_files() -> Vec<PathBuf> {
    let output = Command::new("git")
        .args(["ls-files", "-z"])
        .current_dir(roundhouse_test_support::bins::repository())
        .output()
        .expect("git runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let files: Vec<PathBuf> = output
        .stdout
        .split(|byte| *byte == 0)
        .filter(|name| !name.is_empty())
        .map(|name| PathBuf::from(String::from_utf8_lossy(name).into_owned()))
        // Tracked, but being moved or removed just now.
        .filter(|name| roundhouse_test_support::bins::repository().join(name).is_file())
        .collect();
    assert!(files.len() > 20, "git lists next to nothing: {files:?}");
    files
}

/// A file of the tree. Bytes that are no UTF-8 are replaced.
fn read(name: impl AsRef<std::path::Path>) -> String {
    let path = roundhouse_test_support::bins::repository().join(name.as_ref());
    let bytes =
        std::fs::read(&path).unwrap_or_else(|error| panic!("cannot read {}: {error}", path.display()));
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Fails with all complaints at once.
#[track_caller]
fn assert_none(what: &str, complaints: &[String]) {
    assert!(complaints.is_empty(), "{what}:\n{}", complaints.join("\n"));
}
