//! Tensors to run a model on when nobody has sent any: for warm-ups, and to measure a session.

use dormouse_core::datatype::DataType;
use dormouse_core::shape::{Shape, byte_count, element_count};

use crate::engine::{Session, StopHandle};
use crate::request::Tensor;

/// Shapes come from configurations and graphs: a tensor larger than this is a mistake in one.
pub const MAX_BYTES: u64 = 1 << 30;

/// What an open dimension is taken to be, the likeliest first: tokens of a sentence, pixels of an
/// image, and what every operator takes.
const OPEN_DIMENSIONS: [i64; 3] = [64, 224, 1];

/// A sample larger than this says nothing about a usual request.
const MAX_SAMPLE_BYTES: u64 = 64 << 20;

/// The bytes of a tensor, none when they are too many.
pub fn size(datatype: DataType, shape: &[i64]) -> Option<usize> {
    let bytes = byte_count(datatype, shape).filter(|&bytes| bytes <= MAX_BYTES)?;
    usize::try_from(bytes).ok()
}

/// Bytes that are small valid values of every type: 0 or 1 for integers, near 1.0 for floats.
pub fn values(datatype: DataType, size: usize) -> Vec<u8> {
    let one: &[u8] = match datatype {
        DataType::Fp16 => &[0x00, 0x3c],
        DataType::Bf16 => &[0x80, 0x3f],
        DataType::Fp32 => &[0x00, 0x00, 0x80, 0x3f],
        DataType::Fp64 => &[0, 0, 0, 0, 0, 0, 0xf0, 0x3f],
        _ => &[1, 0, 0, 0, 0, 0, 0, 0],
    };
    let width = datatype.element_size().unwrap_or(1);
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut data = Vec::with_capacity(size);
    while data.len() < size {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        if state >> 63 == 1 {
            data.extend_from_slice(&one[..width]);
        } else {
            data.resize(data.len() + width, 0);
        }
    }
    data
}

/// Inputs that a session takes, found by trying: none when it fails on every one, or wants types
/// of which nothing can be made up.
pub fn inputs(session: &dyn Session, stop: &StopHandle) -> Option<Vec<(usize, Tensor)>> {
    let outputs: Vec<usize> = (0..session.outputs().len()).collect();
    OPEN_DIMENSIONS.iter().find_map(|&open| {
        let inputs = of_size(session, open)?;
        session.run(&inputs, &outputs, stop).ok()?;
        Some(inputs)
    })
}

fn of_size(session: &dyn Session, open: i64) -> Option<Vec<(usize, Tensor)>> {
    let mut total = 0u64;
    let declared = session.inputs().iter().enumerate();
    declared
        .map(|(index, declared)| {
            let datatype = declared
                .datatype
                .filter(|&datatype| datatype != DataType::Bytes)?;
            let dims = declared.dims.as_ref()?;
            // The first open dimension is nearly always the batch.
            let shape: Shape = dims
                .iter()
                .enumerate()
                .map(|(place, &dim)| match dim {
                    -1 if place == 0 => 1,
                    -1 => open,
                    dim => dim,
                })
                .collect();
            element_count(&shape)?;
            let size = size(datatype, &shape)?;
            total = total.checked_add(size as u64)?;
            let data = values(datatype, size).into();
            (total <= MAX_SAMPLE_BYTES).then_some((
                index,
                Tensor {
                    datatype,
                    shape,
                    data,
                },
            ))
        })
        .collect()
}
