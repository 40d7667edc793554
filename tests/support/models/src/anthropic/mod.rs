//! The Anthropic Messages API: what a request says, how an answer looks on the wire.

pub(crate) mod fault;
pub(crate) mod request;
pub(crate) mod wire;
