//! Finding the executables under test. They belong to other packages, so cargo does not hand them to these tests.

use std::path::PathBuf;

use anyhow::{Context as _, bail};

/// Overrides where the executables are looked for.
pub const BIN_DIR: &str = "ROUNDHOUSE_TEST_BIN_DIR";
/// Overrides the Claude Code executable.
pub const CLAUDE: &str = "ROUNDHOUSE_TEST_CLAUDE";
/// Overrides the Codex executable.
pub const CODEX: &str = "ROUNDHOUSE_TEST_CODEX";
/// Overrides the directory with grpcurl and a Python that has grpcio-tools (a virtual environment's `bin`).
pub const TOOLS: &str = "ROUNDHOUSE_TEST_TOOLS";

/// The executable of this name: in `ROUNDHOUSE_TEST_BIN_DIR`, else where cargo put this test (`target/debug`).
///
/// # Errors
/// Says how to build it when it is not there.
pub fn bin(name: &str) -> anyhow::Result<PathBuf> {
    let directory = match std::env::var_os(BIN_DIR) {
        Some(directory) => PathBuf::from(directory),
        None => {
            // A test lies in target/<profile>/deps, the executables one above, this one perhaps among them.
            let own = std::env::current_exe().context("this test cannot find itself")?;
            let here = own.parent().context("this test lies in no target directory")?;
            let above = here.parent().filter(|_| here.ends_with("deps"));
            above.unwrap_or(here).to_owned()
        }
    };
    let path = directory.join(name);
    if !path.is_file() {
        bail!(
            "{name} is not in {}: build the executables first, with \
             `cargo build --workspace --all-targets --all-features` (tests/run does), or set {BIN_DIR}",
            directory.display()
        );
    }
    Ok(path)
}

/// The root of the source tree.
#[must_use]
pub fn repository() -> PathBuf {
    let own = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    own.ancestors().nth(3).map(PathBuf::from).unwrap_or(own)
}

/// The real Claude Code, as pinned in `tests/engines/package.json`.
///
/// # Errors
/// Says how to install it when it is not there. Tests never go on without it.
pub fn claude() -> anyhow::Result<PathBuf> {
    let path = match std::env::var_os(CLAUDE) {
        Some(path) => PathBuf::from(path),
        None => repository().join("tests/engines/node_modules/.bin/claude"),
    };
    let Ok(real) = path.canonicalize() else {
        bail!(
            "Claude Code is not at {}: run `npm ci` in tests/engines (.ci/run does), or set {CLAUDE}",
            path.display()
        );
    };
    Ok(real)
}

/// The real Codex, as pinned in `tests/engines/package.json`: the native executable, not the script that starts it.
///
/// # Errors
/// Says how to install it when it is not there. Tests never go on without it.
pub fn codex() -> anyhow::Result<PathBuf> {
    let arch = std::env::consts::ARCH;
    let package = if arch == "aarch64" { "codex-linux-arm64" } else { "codex-linux-x64" };
    let path = match std::env::var_os(CODEX) {
        Some(path) => PathBuf::from(path),
        None => repository()
            .join("tests/engines/node_modules/@openai")
            .join(format!("{package}/vendor/{arch}-unknown-linux-musl/bin/codex")),
    };
    let Ok(real) = path.canonicalize() else {
        bail!(
            "Codex is not at {}: run `npm ci` in tests/engines (.ci/run does), or set {CODEX}",
            path.display()
        );
    };
    Ok(real)
}

/// A tool of the test environment that `tests/tools/requirements.txt` describes.
///
/// # Errors
/// Says how to install it when it is not there.
pub fn tool(name: &str) -> anyhow::Result<PathBuf> {
    let directory = match std::env::var_os(TOOLS) {
        Some(directory) => PathBuf::from(directory),
        None => repository().join("target/test-tools/bin"),
    };
    let path = directory.join(name);
    if !path.exists() {
        bail!(
            "{name} is not in {}: run `tests/tools/install` (tests/run does), or set {TOOLS}",
            directory.display()
        );
    }
    Ok(path)
}
