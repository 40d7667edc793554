//! The wire: the only modules that know the contract's types, apart from the events that the journal stores as they are.

pub mod addressee;
mod from_proto;
pub(crate) mod lingering;
pub mod service;
pub mod status;
pub mod to_proto;

#[cfg(test)]
mod interleavings;
