//! `ModelInferRequest`, from the wire to a request that fits its model.

use bytes::Bytes;
use dormouse_proto::inference as pb;
use prost::Message;
use tonic::Code;

use super::allocations::within;
use super::assert_presentable;
use super::requests::{self, MESSAGE_LIMIT, RECEIVED, assert_same};
use crate::frontend::grpc::pieces;

/// Collections grow by doubling, and typed contents are there twice for a moment.
const TIMES_THE_ESTIMATE: usize = 4;
const ASIDE: usize = 16 << 10;

pub(super) fn infer(data: &[u8]) -> bool {
    let message = Bytes::copy_from_slice(data);
    let estimate = pieces::cost(&message);
    let bound = (estimate.unwrap_or(0) + data.len()) * TIMES_THE_ESTIMATE + ASIDE;
    let read = within(bound, || {
        pieces::read(message.clone(), MESSAGE_LIMIT, RECEIVED)
    });
    let request = match read {
        Ok(request) => request,
        Err(status) => {
            assert_presentable(status.message());
            let code = status.code();
            // A message that cannot be decoded is `INTERNAL` by gRPC's own rules.
            let is_known = match pb::ModelInferRequest::decode(&message[..]) {
                Ok(_) if estimate.is_some() => {
                    matches!(code, Code::InvalidArgument | Code::ResourceExhausted)
                }
                _ => code == Code::Internal,
            };
            assert!(is_known, "{status:?}");
            return false;
        }
    };
    assert!(estimate.expect("what was read had been walked") <= MESSAGE_LIMIT);
    let decoded = pb::ModelInferRequest::decode(&message[..]).expect("it was read before");
    assert_eq!(request.inputs.len(), decoded.inputs.len());
    for (read, sent) in request.inputs.iter().zip(&decoded.inputs) {
        assert_eq!(read.name, sent.name);
        assert_eq!(read.datatype.name(), sent.datatype);
        assert_eq!(read.shape.as_slice(), sent.shape);
    }
    if !decoded.raw_input_contents.is_empty() {
        let within = message.as_ptr_range();
        for input in request.inputs.iter().filter(|input| !input.data.is_empty()) {
            assert!(
                within.contains(&input.data.as_ptr()),
                "raw contents are copied"
            );
        }
    }
    let again = Bytes::from(decoded.encode_to_vec());
    let again = pieces::read(again, MESSAGE_LIMIT, RECEIVED).expect("it is the same message");
    assert_same(&again, &request);
    assert_eq!(again.wishes, request.wishes);
    assert_eq!(
        (again.priority, again.deadline),
        (request.priority, request.deadline)
    );

    requests::survives_both_protocols(&request);
    requests::check(&request);
    true
}
