//! The wire contracts of Roundhouse: generated types, clients and servers.
