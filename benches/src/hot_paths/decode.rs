//! From the bytes of a request to one that fits its model, by both protocols.

use std::hint::black_box;

use bytes::Bytes;
use dormouse_core::datatype::DataType;
use dormouse_core::time::Timestamp;
use dormouse_server::frontend::{grpc, http};
use dormouse_server::request::RawRequest;
use dormouse_server::validate::validate;

use super::{Step, Workload};
use crate::requests;

pub const WORKLOADS: &[Workload] = &[
    Workload {
        name: "decode: gRPC, 16 FP32",
        prepare: || grpc_message(DataType::Fp32, requests::numbers()),
    },
    Workload {
        name: "decode: gRPC, 16 strings",
        prepare: || grpc_message(DataType::Bytes, requests::words()),
    },
    Workload {
        name: "decode: HTTP binary, 16 FP32",
        prepare: || {
            let (body, header) = requests::http_binary();
            http_body(body, Some(header))
        },
    },
    Workload {
        name: "decode: HTTP JSON, 16 FP32",
        prepare: || http_body(requests::http_json(), None),
    },
];

const RECEIVED: Timestamp = Timestamp::from_nanos(1);

fn grpc_message(datatype: DataType, data: Bytes) -> Step {
    let message = requests::grpc_message(datatype, data);
    let check = checker(datatype);
    Box::new(move || {
        let limit = grpc::GrpcOptions::default().max_message_size;
        let request = grpc::pieces::read(black_box(message.clone()), limit, RECEIVED);
        check(request.expect("the message is one"));
    })
}

fn http_body(body: Bytes, header_length: Option<usize>) -> Step {
    let check = checker(DataType::Fp32);
    Box::new(move || {
        let request = http::pieces::read(black_box(&body), header_length, RECEIVED);
        check(request.expect("the body is a request"));
    })
}

/// Compares a request with its model's signature.
fn checker(datatype: DataType) -> impl Fn(RawRequest) {
    let spec = requests::spec(datatype);
    move |request| {
        black_box(validate(&spec, request).expect("the request fits the model"));
    }
}
