//! The Anthropic Messages API: what a request says, how an answer looks on the wire.

pub(crate) mod answer;
pub(crate) mod request;
pub(crate) mod wire;
