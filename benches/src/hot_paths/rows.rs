//! Rows of several requests into one batch, and its outputs back to them.

use std::hint::black_box;

use bytes::Bytes;
use dormouse_core::datatype::DataType;
use dormouse_core::time::Timestamp;
use dormouse_server::request::{InferRequest, Tensor};
use dormouse_server::unit::{gather_inputs, split_outputs};

use super::{Step, Workload};
use crate::requests;

const ROWS: u32 = 64;

pub const WORKLOADS: &[Workload] = &[
    Workload {
        name: "rows: gather 64 requests",
        prepare: gather,
    },
    Workload {
        name: "rows: scatter to 64 requests, FP32",
        prepare: || scatter(DataType::Fp32, &requests::numbers()),
    },
    Workload {
        name: "rows: scatter to 64 requests, strings",
        prepare: || scatter(DataType::Bytes, &requests::words()),
    },
];

fn tensor(datatype: DataType, rows: u32, data: Bytes) -> Tensor {
    Tensor {
        datatype,
        shape: [i64::from(rows), requests::ELEMENTS as i64]
            .into_iter()
            .collect(),
        data,
    }
}

fn batch() -> Vec<InferRequest> {
    let request = || InferRequest {
        id: String::new(),
        inputs: vec![Some(tensor(DataType::Fp32, 1, requests::numbers()))],
        outputs: vec![0],
        rows: 1,
        priority: 0,
        deadline: None,
        received: Timestamp::ZERO,
        sequence: None,
        span: None,
        held: None,
    };
    (0..ROWS).map(|_| request()).collect()
}

fn gather() -> Step {
    let batch = batch();
    Box::new(move || {
        let requests: Vec<&InferRequest> = batch.iter().collect();
        black_box(gather_inputs(&[0], black_box(&requests), ROWS));
    })
}

fn scatter(datatype: DataType, row: &Bytes) -> Step {
    let batch = batch();
    let outputs = requests::spec(datatype).outputs;
    let data = Bytes::from(row.repeat(ROWS as usize));
    let output = [Some(tensor(datatype, ROWS, data))];
    Box::new(move || {
        let requests: Vec<&InferRequest> = batch.iter().collect();
        let split = split_outputs(black_box(&output), &requests, ROWS, &outputs);
        black_box(split.expect("the output has a row for each request"));
    })
}
