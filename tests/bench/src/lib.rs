//! Benchmarks against the bare engine CLIs.
