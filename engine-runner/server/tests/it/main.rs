//! A real runner, real keepers and fake-engine, seen from outside: over the contract, in /proc, in files.

mod permissions;
mod rig;
mod stopping;
mod thin;
