//! How each engine is launched, read and spoken to. Lines in, events and replies out.
