//! The control plane: gRPC services, dispatcher and runner links.
