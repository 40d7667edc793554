//! The command line from outside: the real binary against a scripted control plane.

#![expect(clippy::expect_used, reason = "helpers of tests are tests")]

mod chat;
mod fake;
mod following;
mod installing;
mod plain;
mod run;
mod sending;
mod up;
