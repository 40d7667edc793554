//! The engine as Codex; see the library's documentation for what it obeys.

use std::process::ExitCode;

fn main() -> ExitCode {
    roundhouse_fake_engine::run_codex(std::env::args_os().skip(1).collect())
}
