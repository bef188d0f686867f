//! Compiles the `.proto` files in pure Rust, so that nobody needs `protoc`.

use std::path::PathBuf;
use std::{env, fs};

use prost::Message;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed=inference");
    println!("cargo::rerun-if-changed=keda");
    println!("cargo::rerun-if-changed=otlp");
    let descriptors = protox::compile(
        ["inference/grpc_service.proto", "keda/externalscaler.proto"],
        ["."],
    )?;
    let out_dir = PathBuf::from(env::var("OUT_DIR")?);
    fs::write(out_dir.join("inference.bin"), descriptors.encode_to_vec())?;
    tonic_prost_build::configure()
        // Tensors stay views of the received message instead of being copied out of it.
        .bytes(".")
        .compile_fds(descriptors)?;
    // Apart: this is what the server sends, not what it answers, so reflection does not know it.
    let sent = protox::compile(["otlp/trace.proto"], ["."])?;
    tonic_prost_build::configure()
        .build_server(false)
        .compile_fds(sent)?;
    Ok(())
}
