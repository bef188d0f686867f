//! From a response to the bytes that are sent, by both protocols.

use std::hint::black_box;

use bytes::BytesMut;
use dormouse_server::frontend::{grpc, http};

use super::{Step, Workload};
use crate::requests;

pub const WORKLOADS: &[Workload] = &[
    Workload {
        name: "encode: gRPC, 16 FP32",
        prepare: grpc_message,
    },
    Workload {
        name: "encode: HTTP binary, 16 FP32",
        prepare: || http_response(true),
    },
    Workload {
        name: "encode: HTTP JSON, 16 FP32",
        prepare: || http_response(false),
    },
];

fn grpc_message() -> Step {
    let response = requests::response();
    let mut buffer = BytesMut::with_capacity(4096);
    Box::new(move || {
        buffer.clear();
        grpc::pieces::write(black_box(response.clone()), &mut buffer);
        black_box(&buffer);
    })
}

fn http_response(binary: bool) -> Step {
    let response = requests::response();
    Box::new(move || {
        let written = http::pieces::write(black_box(response.clone()), binary);
        black_box(written.expect("FP32 can be written"));
    })
}
