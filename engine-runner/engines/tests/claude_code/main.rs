//! The adapter of Claude Code against what the real CLI printed.

#![expect(clippy::unwrap_used, clippy::expect_used, reason = "a test says what it expects by failing")]

mod launch;
mod pitfalls;
mod properties;
mod recorded;
mod stdin;
mod support;
