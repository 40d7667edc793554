//! Durable state of the control plane: the Store trait and its SQLite implementation.
