//! The adapter of Codex against what the real CLI printed.

#![expect(clippy::unwrap_used, reason = "a test says what it expects by failing")]

mod content;
mod failing;
mod launch;
mod opening;
mod properties;
mod recorded;
mod stdin;
mod stopping;
mod support;
