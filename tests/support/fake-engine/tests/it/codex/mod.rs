//! The Codex dialect, from outside.

mod faults;
mod server;
mod threads;
mod tools;
mod turns;
