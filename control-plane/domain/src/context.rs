//! The context composer: what an engine is told of the conversation so far.
