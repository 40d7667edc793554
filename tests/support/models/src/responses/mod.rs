//! The OpenAI Responses API, as the Codex CLI uses it: what a request says, how an answer looks on the wire.

pub(crate) mod fault;
pub(crate) mod request;
pub(crate) mod tools;
pub(crate) mod wire;
