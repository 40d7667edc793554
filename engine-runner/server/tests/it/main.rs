//! A real runner, real keepers and fake-engine, seen from outside: over the contract, in /proc, in files.

#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stderr,
    reason = "helpers of tests fail the test"
)]

#[cfg(feature = "failpoints")]
mod broken;
mod codex;
mod disk;
mod facts;
mod keepers;
mod lost_power;
mod opening;
mod permissions;
mod processes;
mod recovery;
mod registration;
mod rig;
mod sessions;
mod stopping;
mod streams;
mod thin;
