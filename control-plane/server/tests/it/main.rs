//! The control plane from outside: a real server and store, a scripted runner.

#![expect(unreachable_pub, reason = "modules of one test program")]

mod support;

mod cancel;
mod conversations;
mod permissions;
mod restart;
mod runners;
mod server;
mod sessions;
mod streams;
mod thin;
