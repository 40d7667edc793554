//! Compiles the protos without an installed protoc: protox parses, tonic-prost-build writes the code.

use std::error::Error;
use std::path::PathBuf;

use prost::Message as _;

const FILES: [&str; 8] = [
    "roundhouse/engine/v1/error_reason.proto",
    "roundhouse/engine/v1/event.proto",
    "roundhouse/engine/v1/engine_runner.proto",
    "roundhouse/control/v1/conversation.proto",
    "roundhouse/control/v1/session.proto",
    "roundhouse/control/v1/summary.proto",
    "roundhouse/control/v1/agent.proto",
    "roundhouse/control/v1/runner.proto",
];

fn main() -> Result<(), Box<dyn Error>> {
    // A descriptor set carries no paths, so cargo has to be told what the build depends on.
    println!("cargo:rerun-if-changed=build.rs");
    for file in FILES {
        println!("cargo:rerun-if-changed={file}");
    }
    let descriptors = protox::compile(FILES, ["."])?;
    let out = PathBuf::from(std::env::var_os("OUT_DIR").ok_or("OUT_DIR is not set")?);
    std::fs::write(out.join("roundhouse.bin"), descriptors.encode_to_vec())?;
    tonic_prost_build::configure().build_client(true).build_server(true).compile_fds(descriptors)?;
    Ok(())
}
