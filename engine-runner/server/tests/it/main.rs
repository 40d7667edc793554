//! A real runner, real keepers and fake-engine, seen from outside: over the contract, in /proc, in files.

mod facts;
mod permissions;
mod recovery;
mod rig;
mod sessions;
mod stopping;
mod streams;
mod thin;
