//! Headers of safetensors files.

use dormouse_model_store::safetensors::{MAX_HEADER_BYTES, read_header};

use super::allocations::within;
use super::assert_presentable;

/// Offsets and dimensions of two bytes of text become numbers of eight, more than once.
const TIMES_THE_FILE: usize = 48;
const ASIDE: usize = 16 << 10;

pub(super) fn header(data: &[u8]) -> bool {
    let bound = data.len() * TIMES_THE_FILE + ASIDE;
    let tensors = match within(bound, || read_header(&data)) {
        Ok(tensors) => tensors,
        Err(error) => {
            let message = error.to_string();
            assert_presentable(&message);
            assert!(!message.contains(char::is_control), "{message:?}");
            return false;
        }
    };
    let length = u64::from_le_bytes(
        data[..8]
            .try_into()
            .expect("a file has its header's length"),
    );
    assert!(length <= MAX_HEADER_BYTES);
    let mut end = 8 + length;
    for tensor in &tensors {
        assert_eq!(tensor.offset, end, "a gap or an overlap before {tensor:?}");
        end = tensor
            .offset
            .checked_add(tensor.length)
            .expect("it lies in the file");
        assert!(tensor.dims.iter().all(|&dim| dim >= 0));
        let mut elements = u128::from(!tensor.dims.contains(&0));
        for &dim in &tensor.dims {
            elements = elements.saturating_mul(dim as u128);
        }
        let bits = match tensor.dtype {
            "F4" => 4,
            "F6_E2M3" | "F6_E3M2" => 6,
            "BOOL" | "U8" | "I8" => 8,
            dtype if dtype.starts_with("F8_") => 8,
            "I16" | "U16" | "F16" | "BF16" => 16,
            "I32" | "U32" | "F32" => 32,
            "C64" | "F64" | "I64" | "U64" => 64,
            other => panic!("a type without a name: {other}"),
        };
        assert_eq!(
            u128::from(tensor.length),
            (elements * bits).div_ceil(8),
            "{tensor:?}"
        );
    }
    assert_eq!(end, data.len() as u64, "bytes that belong to no tensor");

    let entries = tensors.iter().map(|tensor| {
        let start = tensor.offset - 8 - length;
        let value = serde_json::json!({
            "dtype": tensor.dtype, "shape": tensor.dims, "data_offsets": [start, start + tensor.length],
        });
        (tensor.name.clone(), value)
    });
    let entries: serde_json::Map<_, _> = entries.collect();
    let written = serde_json::to_vec(&entries).expect("text is written");
    let begin = 8 + written.len() as u64;
    if written.len() as u64 > MAX_HEADER_BYTES {
        return true;
    }
    let mut file = (written.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(&written);
    file.extend_from_slice(&data[8 + length as usize..]);
    let mut again = read_header(&file.as_slice()).expect("what is written is read");
    for tensor in &mut again {
        tensor.offset = tensor.offset - begin + 8 + length;
    }
    // Empty tensors at one place have no order.
    let in_order = |mut tensors: Vec<_>| {
        tensors.sort_by(|a: &dormouse_model_store::safetensors::StoredTensor, b| {
            (a.offset, a.length, &a.name).cmp(&(b.offset, b.length, &b.name))
        });
        tensors
    };
    assert_eq!(in_order(again), in_order(tensors));
    true
}
