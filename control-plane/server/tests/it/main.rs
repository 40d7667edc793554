//! The control plane from outside: a real server and store, a scripted runner.

#![expect(unreachable_pub, reason = "modules of one test program")]
#![expect(clippy::unwrap_used, clippy::expect_used, reason = "helpers of tests fail the test")]

mod support;

mod cancel;
mod conversations;
mod draining;
mod followers;
mod identity;
mod interleavings;
mod permissions;
mod restart;
mod runners;
mod server;
mod sessions;
mod sharing;
mod streams;
mod summaries;
mod thin;
