//! What the end-to-end tests stand on: real services on port 0, conditions instead of sleeps.
