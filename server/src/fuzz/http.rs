//! Bodies of inference requests over HTTP: JSON, and JSON with a binary tail.

use bytes::Bytes;
use dormouse_core::datatype::DataType;
use serde::de::IgnoredAny;

use super::allocations::within;
use super::requests::{self, RECEIVED, assert_refusal};
use crate::frontend::http::pieces;
use crate::request::RawRequest;
use crate::signature;
use crate::validate::validate;

/// An 8-byte number needs two bytes of text, and lists of tensors grow by doubling.
const TIMES_THE_BODY: usize = 16;
const ASIDE: usize = 64 << 10;

/// A body that is all JSON.
pub(super) fn json(data: &[u8]) -> bool {
    let body = Bytes::copy_from_slice(data);
    let Some(request) = read(&body, None) else {
        return false;
    };
    for input in &request.inputs {
        assert!(
            request.wishes.is_some()
                || requests::is_sound(input.datatype, &input.shape, &input.data),
            "elements that do not fill their shape: {input:?}"
        );
    }
    true
}

/// Two bytes that tell where the binary tail begins, then the body.
pub(super) fn binary(data: &[u8]) -> bool {
    let Some((header_length, body)) = data.split_first_chunk() else {
        return false;
    };
    let header_length = usize::from(u16::from_le_bytes(*header_length));
    let body = Bytes::copy_from_slice(body);
    if header_length == 0 {
        return raw(&body);
    }
    let Some(request) = read(&body, Some(header_length)) else {
        return false;
    };
    let tail = body.slice(header_length..);
    let from_tail = request.inputs.iter().filter(|input| {
        !input.data.is_empty() && tail.as_ptr_range().contains(&input.data.as_ptr())
    });
    let dealt: usize = from_tail.map(|input| input.data.len()).sum();
    assert_eq!(
        dealt,
        tail.len(),
        "bytes of the tail are lost or given twice"
    );
    true
}

fn read(body: &Bytes, header_length: Option<usize>) -> Option<RawRequest> {
    let bound = body.len() * TIMES_THE_BODY + ASIDE;
    let read = within(bound, || pieces::read(body, header_length, RECEIVED));
    let request = match read {
        Ok(request) => request,
        Err(error) => {
            assert_refusal(&error);
            return None;
        }
    };
    let json = &body[..header_length.unwrap_or(body.len())];
    // Python's names for what JSON's numbers cannot say are the one thing that is taken beyond it.
    let text = std::str::from_utf8(json).expect("it was read as text");
    if !text.contains("NaN") && !text.contains("Infinity") {
        let strict = serde_json::from_slice::<IgnoredAny>(json);
        assert!(strict.is_ok(), "read, but not JSON: {strict:?}");
    }
    requests::survives_both_protocols(&request);
    requests::check(&request);
    Some(request)
}

/// A body that is the one input of a model.
fn raw(body: &Bytes) -> bool {
    let mut taken = false;
    for (max_batch_size, datatype, dims) in [
        (0, DataType::Fp32, &[-1][..]),
        (4, DataType::Int8, &[3, -1]),
        (8, DataType::Bytes, &[1]),
        (0, DataType::Bytes, &[2]),
        (0, DataType::Bool, &[]),
        (0, DataType::Fp64, &[0, -1]),
        (0, DataType::Int64, &[i64::MAX, -1]),
    ] {
        let spec = signature::model(
            "fuzzed",
            max_batch_size,
            vec![signature::tensor("INPUT", datatype, dims)],
            vec![signature::tensor("OUTPUT", datatype, dims)],
        );
        let read = match pieces::read_raw(body.clone(), &spec, RECEIVED) {
            Ok(read) => read,
            Err(error) => {
                assert_refusal(&error);
                continue;
            }
        };
        match validate(&spec, read) {
            Ok(valid) => {
                taken = true;
                let input = valid.inputs[0].as_ref().expect("it is the only one");
                let prefix = if datatype == DataType::Bytes { 4 } else { 0 };
                assert_eq!(input.data[prefix..], body[..]);
            }
            Err(error) => assert_refusal(&error),
        }
    }
    taken
}
