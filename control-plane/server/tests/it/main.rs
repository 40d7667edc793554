//! The control plane from outside: a real server and store, a scripted runner.

#![expect(unreachable_pub, reason = "modules of one test program")]

mod support;

mod cancel;
mod conversations;
mod thin;
