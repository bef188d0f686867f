//! Wire types and stubs, generated from the `.proto` files of this crate; nothing else.

/// The KServe v2 / Triton inference protocol and Triton's model configuration.
pub mod inference {
    #![allow(
        missing_docs,
        clippy::all,
        reason = "generated code; `allow` because what it triggers changes with the generator"
    )]
    tonic::include_proto!("inference");
}

/// KEDA's external scaler.
pub mod externalscaler {
    #![allow(
        missing_docs,
        clippy::all,
        reason = "generated code; `allow` because what it triggers changes with the generator"
    )]
    tonic::include_proto!("externalscaler");
}

/// OpenTelemetry's protocol, as far as it carries spans.
pub mod otlp {
    #![allow(
        missing_docs,
        clippy::all,
        reason = "generated code; `allow` because what it triggers changes with the generator"
    )]
    tonic::include_proto!("opentelemetry.proto.collector.trace.v1");
}

/// The descriptors of every message, for server reflection and for parsing `config.pbtxt`.
pub const FILE_DESCRIPTOR_SET: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/inference.bin"));
