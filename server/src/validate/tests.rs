mod reference;

use bytes::Bytes;
use dormouse_core::code::ErrorCode;
use dormouse_core::time::Timestamp;

use super::*;
use crate::signature::{self, tensor};

fn model(max_batch_size: u32, inputs: Vec<TensorSpec>, outputs: Vec<TensorSpec>) -> ModelSpec {
    signature::model("simple", max_batch_size, inputs, outputs)
}

/// Triton's example model: two inputs and two outputs of 16 integers, up to 8 rows.
fn simple() -> ModelSpec {
    let pair = |side: &str| {
        (0..2)
            .map(|index| tensor(&format!("{side}{index}"), DataType::Int32, &[16]))
            .collect()
    };
    model(8, pair("INPUT"), pair("OUTPUT"))
}

fn input(name: &str, datatype: DataType, shape: &[i64], bytes: usize) -> RawInput {
    RawInput {
        name: name.into(),
        datatype,
        shape: Shape::from_slice(shape),
        data: vec![0; bytes].into(),
    }
}

fn int32(name: &str, shape: &[i64]) -> RawInput {
    let bytes = element_count(shape).unwrap_or(0) * 4;
    input(name, DataType::Int32, shape, bytes as usize)
}

fn request(inputs: Vec<RawInput>) -> RawRequest {
    RawRequest {
        inputs,
        ..Default::default()
    }
}

#[track_caller]
fn refused(spec: &ModelSpec, raw: RawRequest, expected: &str) {
    let error = validate(spec, raw).unwrap_err();
    assert_eq!(error.message(), expected);
    assert_eq!(error.code(), ErrorCode::InvalidRequest);
}

#[test]
fn a_fitting_request_is_brought_into_the_models_order() {
    let mut raw = request(vec![int32("INPUT1", &[3, 16]), int32("INPUT0", &[3, 16])]);
    raw.inputs[1].data = vec![7; 192].into();
    raw.outputs = vec!["OUTPUT1".into()];
    raw.id = "42".into();
    raw.priority = 2;
    raw.deadline = Some(Timestamp::from_nanos(9));
    raw.received = Timestamp::from_nanos(5);
    let request = validate(&simple(), raw).unwrap();
    assert_eq!(request.rows, 3);
    assert_eq!(request.outputs, [1]);
    assert_eq!(request.inputs[0].as_ref().unwrap().data[0], 7);
    assert_eq!(request.inputs[1].as_ref().unwrap().shape[..], [3, 16]);
    assert_eq!((request.id.as_str(), request.priority), ("42", 2));
    assert_eq!(request.deadline, Some(Timestamp::from_nanos(9)));
    assert_eq!(request.received, Timestamp::from_nanos(5));
}

#[test]
fn no_outputs_asked_for_means_all() {
    let raw = request(vec![int32("INPUT0", &[1, 16]), int32("INPUT1", &[1, 16])]);
    assert_eq!(validate(&simple(), raw).unwrap().outputs, [0, 1]);
}

#[test]
fn tensors_are_not_copied() {
    let mut raw = request(vec![int32("INPUT0", &[1, 16]), int32("INPUT1", &[1, 16])]);
    let data = raw.inputs[0].data.as_ptr();
    let request = validate(&simple(), std::mem::take(&mut raw)).unwrap();
    assert_eq!(request.inputs[0].as_ref().unwrap().data.as_ptr(), data);
}

#[test]
fn errors_name_what_was_expected_and_what_came() {
    let second = || int32("INPUT1", &[1, 16]);
    let with = |first| request(vec![first, second()]);
    let table = [
        (
            with(int32("INPUT0", &[1, 15])),
            "unexpected shape for input 'INPUT0' of model 'simple': expected [-1,16], got [1,15]",
        ),
        (
            with(int32("INPUT0", &[16])),
            "unexpected shape for input 'INPUT0' of model 'simple': expected [-1,16], got [16]",
        ),
        (
            with(input("INPUT0", DataType::Int32, &[], 4)),
            "unexpected shape for input 'INPUT0' of model 'simple': expected [-1,16], got []",
        ),
        (
            with(int32("INPUT0", &[9, 16])),
            "unexpected batch size for input 'INPUT0' of model 'simple': expected 1 to 8 rows, got 9",
        ),
        (
            with(int32("INPUT0", &[0, 16])),
            "unexpected batch size for input 'INPUT0' of model 'simple': expected 1 to 8 rows, got 0",
        ),
        (
            with(input("INPUT0", DataType::Int32, &[-1, 16], 64)),
            "unexpected batch size for input 'INPUT0' of model 'simple': expected 1 to 8 rows, got -1",
        ),
        (
            with(int32("INPUT0", &[2, 16])),
            "inputs of model 'simple' have different batch sizes: 'INPUT0' has 2 rows, 'INPUT1' has 1",
        ),
        (
            with(input("INPUT0", DataType::Fp32, &[1, 16], 64)),
            "unexpected datatype for input 'INPUT0' of model 'simple': expected INT32, got FP32",
        ),
        (
            with(input("INPUT0", DataType::Int32, &[1, 16], 63)),
            "unexpected byte size for input 'INPUT0' of model 'simple': expected 64 bytes for INT32 \
             of shape [1,16], got 63",
        ),
        (
            with(int32("INPUT", &[1, 16])),
            "unexpected input 'INPUT' for model 'simple': expected 'INPUT0', 'INPUT1'",
        ),
        (
            with(second()),
            "input 'INPUT1' of model 'simple' is given more than once",
        ),
        (
            request(vec![second()]),
            "missing input 'INPUT0' of model 'simple': expected 2, got 1",
        ),
        (
            request(Vec::new()),
            "missing inputs 'INPUT0', 'INPUT1' of model 'simple': expected 2, got 0",
        ),
    ];
    for (raw, expected) in table {
        refused(&simple(), raw, expected);
    }
}

#[test]
fn outputs_must_be_known_and_asked_for_once() {
    let asking = |names: &[&str]| RawRequest {
        outputs: names.iter().map(|&name| name.into()).collect(),
        ..request(vec![int32("INPUT0", &[1, 16]), int32("INPUT1", &[1, 16])])
    };
    refused(
        &simple(),
        asking(&["OUTPUT0", "OUT"]),
        "unexpected output 'OUT' for model 'simple': expected 'OUTPUT0', 'OUTPUT1'",
    );
    refused(
        &simple(),
        asking(&["OUTPUT1", "OUTPUT1"]),
        "output 'OUTPUT1' of model 'simple' is given more than once",
    );
}

#[test]
fn huge_shapes_are_refused_without_arithmetic_accidents() {
    let spec = model(
        0,
        vec![tensor("x", DataType::Fp64, &[-1, -1])],
        vec![tensor("y", DataType::Fp64, &[-1])],
    );
    for shape in [
        [1, 1 << 40],
        [i64::MAX, i64::MAX],
        [i64::MAX, 1],
        [1 << 32, 1 << 32],
        [1 << 31, 1 << 30],
        [-1, 8],
        [i64::MIN, 1],
        [i64::MIN, i64::MIN],
    ] {
        let error = validate(&spec, request(vec![input("x", DataType::Fp64, &shape, 8)]));
        let error = error.unwrap_err();
        assert_eq!(error.code(), ErrorCode::InvalidRequest);
        assert!(error.message().contains("input 'x'"), "{error}");
    }
    let batched = model(
        u32::MAX,
        vec![tensor("x", DataType::Int8, &[1])],
        Vec::new(),
    );
    for rows in [1 << 32, (1 << 32) + 1, i64::MAX] {
        let raw = request(vec![input("x", DataType::Int8, &[rows, 1], 1)]);
        assert!(validate(&batched, raw).is_err());
    }
}

#[test]
fn open_dimensions_may_be_empty() {
    let spec = model(0, vec![tensor("x", DataType::Fp32, &[-1, 4])], Vec::new());
    let request = validate(&spec, request(vec![input("x", DataType::Fp32, &[0, 4], 0)])).unwrap();
    assert_eq!(request.inputs[0].as_ref().unwrap().shape[..], [0, 4]);
    assert_eq!(request.rows, 1);
}

#[test]
fn optional_inputs_may_be_left_out() {
    let mut spec = simple();
    spec.inputs[0].optional = true;
    let only_second = || request(vec![int32("INPUT1", &[1, 16])]);
    let valid = validate(&spec, only_second()).unwrap();
    assert!(valid.inputs[0].is_none());
    assert!(valid.inputs[1].is_some());
    refused(
        &spec,
        request(vec![int32("INPUT0", &[1, 16])]),
        "missing input 'INPUT1' of model 'simple': expected 1 to 2, got 1",
    );
}

#[test]
fn reshape_changes_what_the_graph_is_given() {
    /// Largest batch, configured dims, reshape, the request's shape, the graph's.
    type Row = (u32, Dims, Dims, Dims, Option<Dims>);
    type Dims = &'static [i64];
    let table: [Row; 8] = [
        (8, &[1], &[], &[3, 1], Some(&[3])),
        (0, &[1], &[], &[1], Some(&[])),
        (8, &[4, 4], &[16], &[2, 4, 4], Some(&[2, 16])),
        (0, &[16], &[1, 4, 4], &[16], Some(&[1, 4, 4])),
        (
            8,
            &[-1, 2, -1],
            &[1, -1, 2, -1],
            &[2, 3, 2, 5],
            Some(&[2, 1, 3, 2, 5]),
        ),
        (8, &[-1], &[1, -1], &[1, 0], Some(&[1, 1, 0])),
        // Mistakes of the configuration, found when they matter.
        (8, &[4], &[5], &[1, 4], None),
        (8, &[4], &[-1], &[1, 4], None),
    ];
    for (max_batch_size, dims, reshape, shape, expected) in table {
        let mut spec = model(
            max_batch_size,
            vec![tensor("x", DataType::Int32, dims)],
            Vec::new(),
        );
        spec.inputs[0].reshape = Some(Shape::from_slice(reshape));
        let valid = validate(&spec, request(vec![int32("x", shape)]));
        match expected {
            Some(expected) => {
                let valid = valid.unwrap();
                assert_eq!(valid.inputs[0].as_ref().unwrap().shape[..], *expected);
            }
            None => assert_eq!(valid.unwrap_err().code(), ErrorCode::Internal),
        }
    }
}

#[test]
fn strings_are_walked_to_the_last_byte() {
    let spec = model(0, vec![tensor("text", DataType::Bytes, &[-1])], Vec::new());
    let with = |elements: i64, data: &'static [u8]| {
        request(vec![RawInput {
            name: "text".into(),
            datatype: DataType::Bytes,
            shape: Shape::from_slice(&[elements]),
            data: Bytes::from_static(data),
        }])
    };
    let two = b"\x01\0\0\0a\0\0\0\0";
    assert!(validate(&spec, with(2, two)).is_ok());
    assert!(validate(&spec, with(0, b"")).is_ok());
    let place = "unexpected contents of BYTES input 'text' of model 'simple'";
    refused(
        &spec,
        with(1, two),
        &format!("{place}: expected 1 elements for shape [1], got 4 more bytes behind them"),
    );
    refused(
        &spec,
        with(3, two),
        &format!("{place}: expected 3 elements for shape [3], got 2 and 0 stray bytes"),
    );
    refused(
        &spec,
        with(1 << 40, two),
        &format!(
            "{place}: expected 1099511627776 elements for shape [1099511627776], got 2 and 0 stray bytes"
        ),
    );
    refused(
        &spec,
        with(2, b"\x01\0\0\0a\x05\0\0\0b"),
        &format!("{place}: element 1 of 2 is 5 bytes long, but only 1 are left"),
    );
    refused(
        &spec,
        with(1, b"\xff\xff\xff\xffa"),
        &format!("{place}: element 0 of 1 is 4294967295 bytes long, but only 1 are left"),
    );
}

#[test]
fn booleans_are_zero_or_one() {
    let spec = model(0, vec![tensor("flag", DataType::Bool, &[3])], Vec::new());
    let mut raw = request(vec![input("flag", DataType::Bool, &[3], 3)]);
    raw.inputs[0].data = Bytes::from_static(&[0, 1, 2]);
    refused(
        &spec,
        raw,
        "input 'flag' of model 'simple' is not BOOL: element 2 is 2, expected 0 or 1",
    );
}

#[test]
fn errors_stay_short_however_long_names_and_shapes_are() {
    let mut spec = simple();
    spec.inputs = (0..1000)
        .map(|index| tensor(&format!("in{index}"), DataType::Int8, &[1]))
        .collect();
    let raw = request(vec![input(
        &"é".repeat(1 << 20),
        DataType::Int8,
        &[1; 64],
        1,
    )]);
    let error = validate(&spec, raw).unwrap_err();
    assert!(error.message().len() < 600, "{error}");
    assert!(error.message().ends_with("'in15' and 984 more"), "{error}");
    let raw = request(vec![input("in0", DataType::Int8, &[i64::MIN; 64], 1)]);
    let error = validate(&spec, raw).unwrap_err();
    assert!(error.message().ends_with("of 64 dimensions"), "{error}");
}
