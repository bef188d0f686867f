//! Shapes and the arithmetic on them, checked: their numbers come from the wire.

use std::fmt;

use smallvec::SmallVec;

use crate::datatype::DataType;

/// A tensor's dimensions; `-1` stands for "any" in a signature and never in a tensor.
pub type Shape = SmallVec<[i64; 4]>;

/// The number of elements of a tensor with these dimensions, none when one is negative or the
/// product overflows. A scalar (no dimensions) has one element.
pub fn element_count(dims: &[i64]) -> Option<u64> {
    // A zero anywhere makes the tensor empty, however large its neighbours are.
    if dims.iter().any(|&dim| dim < 0) {
        return None;
    }
    if dims.contains(&0) {
        return Some(0);
    }
    dims.iter()
        .try_fold(1u64, |count, &dim| count.checked_mul(dim as u64))
}

/// The number of bytes of a tensor of fixed-size elements, none when it overflows.
pub fn byte_count(datatype: DataType, dims: &[i64]) -> Option<u64> {
    element_count(dims)?.checked_mul(datatype.element_size()? as u64)
}

/// Shows dimensions as `[1,-1,224]`, the way Triton prints them.
pub struct DisplayShape<'a>(pub &'a [i64]);

impl fmt::Display for DisplayShape<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[")?;
        for (index, dim) in self.0.iter().enumerate() {
            if index > 0 {
                f.write_str(",")?;
            }
            write!(f, "{dim}")?;
        }
        f.write_str("]")
    }
}

impl fmt::Debug for DisplayShape<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_exact_or_absent() {
        assert_eq!(element_count(&[]), Some(1));
        assert_eq!(element_count(&[2, 3]), Some(6));
        assert_eq!(element_count(&[i64::MAX, 0, i64::MAX]), Some(0));
        assert_eq!(element_count(&[-1, 0]), None);
        assert_eq!(element_count(&[i64::MAX, 4]), None);
        assert_eq!(byte_count(DataType::Fp64, &[i64::MAX]), None);
        assert_eq!(byte_count(DataType::Bytes, &[1]), None);
    }
}
