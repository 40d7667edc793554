//! The wire contracts of Roundhouse: generated types, clients and servers.
//!
//! The `.proto` files beside this crate are the contract; their comments are the documentation of everything here.
//! Nothing but servers and clients of the wire depends on this crate: the rules and the engines do not know it.

/// What a runner serves, and what happens in a turn.
pub mod engine {
    /// Version 1.
    #[expect(clippy::allow_attributes, reason = "generated code brings its own")]
    #[expect(clippy::large_enum_variant, reason = "generated; the shape of the contract decides")]
    pub mod v1 {
        tonic::include_proto!("roundhouse.engine.v1");
    }
}

/// What the control plane serves.
pub mod control {
    /// Version 1.
    #[expect(clippy::allow_attributes, reason = "generated code brings its own")]
    #[expect(clippy::large_enum_variant, reason = "generated; the shape of the contract decides")]
    pub mod v1 {
        tonic::include_proto!("roundhouse.control.v1");
    }
}

/// The encoded `FileDescriptorSet` of all files, for server reflection.
pub const FILE_DESCRIPTOR_SET: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/roundhouse.bin"));

/// Version of the protocol between control plane and runner. Raised with every change that an older peer would
/// misunderstand; a control plane refuses a runner whose version it does not speak.
pub const PROTOCOL_VERSION: u32 = 1;

/// The largest gRPC message that either service sends or accepts, in bytes.
pub const MAX_MESSAGE_BYTES: usize = 4 * 1024 * 1024;

/// Metadata key under which a call names the runner it is meant for. A runner of another id refuses such a call
/// (RUNNER_CONFLICT), so that an address that somebody else has by now is never taken for the runner's silence or its
/// word. Without it a call is for whoever answers.
pub const RUNNER_ID_HEADER: &str = "roundhouse-runner-id";

/// `domain` of every `google.rpc.ErrorInfo`.
pub const ERROR_DOMAIN: &str = "roundhouse";
