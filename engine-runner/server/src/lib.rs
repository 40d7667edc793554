//! The engine runner: turn actor, journal, recovery and gRPC service.
