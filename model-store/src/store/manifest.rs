//! What an entry says about its graph and tensors.

use serde::{Deserialize, Serialize};

use super::digest::Digest;

/// An entry's manifest; offsets and sizes are facts once it was read with its digest.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Manifest {
    pub(super) graph: GraphPart,
    pub(super) packs: Vec<PackPart>,
    pub(super) weights: Vec<Weight>,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct GraphPart {
    pub(super) digest: Digest,
    pub(super) bytes: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct PackPart {
    pub(super) digest: Digest,
    pub(super) bytes: u64,
}

/// One tensor of a prepared model and where its bytes are.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Weight {
    /// The initializer's name in the graph.
    pub name: String,
    /// ONNX's number of the element type.
    pub element_type: i32,
    pub dims: Vec<i64>,
    /// Which of the model's packs.
    pub pack: usize,
    /// Where in the pack.
    pub offset: u64,
    pub len: u64,
}

impl Weight {
    /// Where in the pack the bytes are.
    pub fn range(&self) -> std::ops::Range<u64> {
        self.offset..self.offset.saturating_add(self.len)
    }
}

/// The bytes a tensor of this type and shape has; none when that cannot be said, an error when
/// there can be no such tensor.
pub(super) fn tensor_bytes(element_type: i32, dims: &[i64]) -> Result<Option<u64>, String> {
    let mut elements = 1_u64;
    for dim in dims {
        let dim = u64::try_from(*dim).map_err(|_| format!("its shape has a size of {dim}"))?;
        elements = elements
            .checked_mul(dim)
            .ok_or("its shape has too many elements")?;
    }
    let bits = match element_type {
        // float, int32, uint32
        1 | 6 | 12 => 32,
        // uint8, int8, bool, the four float8, float8e8m0
        2 | 3 | 9 | 17..=20 | 24 => 8,
        // uint16, int16, float16, bfloat16
        4 | 5 | 10 | 16 => 16,
        // int64, double, uint64, complex64
        7 | 11 | 13 | 14 => 64,
        // complex128
        15 => 128,
        // uint4, int4, float4e2m1: two to a byte
        21..=23 => 4,
        // uint2, int2: four to a byte
        25 | 26 => 2,
        8 => return Err("strings have no fixed size".to_owned()),
        _ => return Ok(None),
    };
    elements
        .checked_mul(bits)
        .map(|bits| Some(bits.div_ceil(8)))
        .ok_or_else(|| "its shape has too many elements".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_follow_from_type_and_shape() {
        assert_eq!(tensor_bytes(1, &[2, 3]), Ok(Some(24)));
        assert_eq!(tensor_bytes(7, &[]), Ok(Some(8)));
        assert_eq!(tensor_bytes(22, &[3]), Ok(Some(2)));
        assert_eq!(tensor_bytes(10, &[0, 5]), Ok(Some(0)));
        assert_eq!(tensor_bytes(99, &[2]), Ok(None));
        assert!(tensor_bytes(1, &[-1]).is_err());
        assert!(tensor_bytes(1, &[i64::MAX, i64::MAX]).is_err());
        assert!(tensor_bytes(8, &[1]).is_err());
    }
}
