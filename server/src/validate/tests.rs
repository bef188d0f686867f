use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use dormouse_core::code::ErrorCode;
use dormouse_core::time::Timestamp;
use dormouse_model_store::spec::{LifecycleSpec, SessionSpec};
use dormouse_proto::inference as pb;
use proptest::prelude::*;

use super::*;

fn tensor(name: &str, datatype: DataType, dims: &[i64]) -> TensorSpec {
    TensorSpec {
        name: name.into(),
        datatype,
        dims: Shape::from_slice(dims),
        reshape: None,
        optional: false,
    }
}

fn model(max_batch_size: u32, inputs: Vec<TensorSpec>, outputs: Vec<TensorSpec>) -> ModelSpec {
    ModelSpec {
        name: "simple".into(),
        config: pb::ModelConfig::default(),
        platform: "onnxruntime_onnx".into(),
        inputs,
        outputs,
        max_batch_size,
        batching: None,
        sequence: None,
        ragged: None,
        runs_rows_together: false,
        concurrency: 1,
        session: SessionSpec::default(),
        warmups: Vec::new(),
        lifecycle: LifecycleSpec::default(),
        decoupled: false,
        model_filename: "model.onnx".into(),
        labels: BTreeMap::new(),
        warnings: Vec::new(),
    }
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

/// Rows, the shapes of inputs, the outputs.
type Accepted = (u32, Vec<Option<Vec<i64>>>, Vec<usize>);

/// The same rules, written to be read: allocates freely, counts with 128 bits.
fn reference(spec: &ModelSpec, raw: &RawRequest) -> Option<Accepted> {
    let names: Vec<&str> = raw.inputs.iter().map(|input| &*input.name).collect();
    if names.iter().collect::<BTreeSet<_>>().len() != names.len() {
        return None;
    }
    let known: Vec<&str> = spec.inputs.iter().map(|tensor| &*tensor.name).collect();
    if !names.iter().all(|name| known.contains(name)) {
        return None;
    }
    let mut rows = BTreeSet::new();
    let mut shapes = Vec::new();
    for tensor in &spec.inputs {
        let Some(input) = raw.inputs.iter().find(|input| input.name == *tensor.name) else {
            if !tensor.optional {
                return None;
            }
            shapes.push(None);
            continue;
        };
        if input.datatype != tensor.datatype {
            return None;
        }
        let mut dims = input.shape.to_vec();
        if spec.max_batch_size > 0 {
            if dims.is_empty() {
                return None;
            }
            let first = dims.remove(0);
            if first < 1 || first > i64::from(spec.max_batch_size) {
                return None;
            }
            rows.insert(first as u32);
        } else {
            rows.insert(1);
        }
        if dims.len() != tensor.dims.len() {
            return None;
        }
        for (got, want) in dims.iter().zip(&tensor.dims) {
            if *got < 0 || (*want != -1 && got != want) {
                return None;
            }
        }
        let count: Option<u128> = if input.shape.contains(&0) {
            Some(0)
        } else {
            input
                .shape
                .iter()
                .try_fold(1u128, |count, &dim| count.checked_mul(dim as u128))
        };
        let data = &input.data;
        match input.datatype.element_size() {
            Some(size) => {
                if count?.checked_mul(size as u128)? != data.len() as u128 {
                    return None;
                }
                if input.datatype == DataType::Bool && data.iter().any(|&byte| byte > 1) {
                    return None;
                }
            }
            None => {
                let mut at = 0;
                let mut seen = 0u128;
                while at < data.len() {
                    let length = data.get(at..at + 4)?;
                    at += 4 + u32::from_le_bytes(length.try_into().unwrap()) as usize;
                    seen += 1;
                }
                if at != data.len() || Some(seen) != count {
                    return None;
                }
            }
        }
        shapes.push(Some(input.shape.to_vec()));
    }
    if rows.len() > 1 {
        return None;
    }
    let mut outputs = Vec::new();
    for name in &raw.outputs {
        let index = spec
            .outputs
            .iter()
            .position(|tensor| *tensor.name == **name)?;
        if outputs.contains(&index) {
            return None;
        }
        outputs.push(index);
    }
    if raw.outputs.is_empty() {
        outputs = (0..spec.outputs.len()).collect();
    }
    Some((rows.into_iter().next().unwrap_or(1), shapes, outputs))
}

fn dims() -> impl Strategy<Value = Vec<i64>> {
    prop::collection::vec(prop_oneof![Just(-1), 1i64..4], 0..4)
}

fn datatypes() -> impl Strategy<Value = DataType> {
    prop::sample::select(vec![
        DataType::Bool,
        DataType::Int8,
        DataType::Fp32,
        DataType::Int64,
        DataType::Bytes,
    ])
}

fn specs() -> impl Strategy<Value = ModelSpec> {
    let tensors = || prop::collection::vec((datatypes(), dims(), prop::bool::weighted(0.2)), 0..4);
    (0u32..4, tensors(), tensors()).prop_map(|(max_batch_size, inputs, outputs)| {
        let named = |side: &str, tensors: Vec<(DataType, Vec<i64>, bool)>| {
            tensors
                .into_iter()
                .enumerate()
                .map(|(index, (datatype, dims, optional))| TensorSpec {
                    optional,
                    ..tensor(&format!("{side}{index}"), datatype, &dims)
                })
                .collect()
        };
        model(max_batch_size, named("in", inputs), named("out", outputs))
    })
}

/// How a request that fits is bent.
#[derive(Clone, Debug)]
enum Damage {
    Dim(usize, usize, i64),
    Rank(usize, bool),
    Data(usize, Vec<u8>),
    Name(usize, String),
    Type(usize, DataType),
    Drop(usize),
    Double(usize),
}

fn damages() -> impl Strategy<Value = Damage> {
    let dim = prop_oneof![
        -2i64..6,
        Just(i64::MAX),
        Just(i64::MIN),
        Just(1 << 40),
        Just(1 << 32),
        any::<i64>()
    ];
    let at = 0usize..4;
    prop_oneof![
        (at.clone(), 0usize..4, dim).prop_map(|(at, axis, dim)| Damage::Dim(at, axis, dim)),
        (at.clone(), any::<bool>()).prop_map(|(at, longer)| Damage::Rank(at, longer)),
        (at.clone(), prop::collection::vec(0u8..3, 0..40))
            .prop_map(|(at, data)| Damage::Data(at, data)),
        (at.clone(), "(in|out)[0-4]").prop_map(|(at, name)| Damage::Name(at, name)),
        (at.clone(), datatypes()).prop_map(|(at, datatype)| Damage::Type(at, datatype)),
        at.clone().prop_map(Damage::Drop),
        at.prop_map(Damage::Double),
    ]
}

fn fitting(spec: &ModelSpec, rows: i64, open: i64) -> RawRequest {
    let inputs = spec.inputs.iter().map(|tensor| {
        let batch = (spec.max_batch_size > 0).then_some(rows);
        let dims = tensor
            .dims
            .iter()
            .map(|&dim| if dim == -1 { open } else { dim });
        let shape: Shape = batch.into_iter().chain(dims).collect();
        let size = tensor.datatype.element_size().unwrap_or(4);
        let bytes = element_count(&shape).unwrap() as usize * size;
        input(&tensor.name, tensor.datatype, &shape, bytes)
    });
    request(inputs.collect())
}

fn damage(raw: &mut RawRequest, damage: Damage) {
    let inputs = &mut raw.inputs;
    if inputs.is_empty() {
        return;
    }
    let count = inputs.len();
    match damage {
        Damage::Dim(at, axis, dim) => {
            if let Some(slot) = inputs[at % count].shape.get_mut(axis) {
                *slot = dim;
            }
        }
        Damage::Rank(at, true) => inputs[at % count].shape.push(1),
        Damage::Rank(at, false) => drop(inputs[at % count].shape.pop()),
        Damage::Data(at, data) => inputs[at % count].data = data.into(),
        Damage::Name(at, name) => inputs[at % count].name = name,
        Damage::Type(at, datatype) => inputs[at % count].datatype = datatype,
        Damage::Drop(at) => drop(inputs.remove(at % count)),
        Damage::Double(at) => {
            let twice = inputs[at % count].clone();
            inputs.push(twice);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn any_request_is_judged_as_by_the_reference(
        spec in specs(),
        (rows, open) in (0i64..5, 0i64..4),
        damages in prop::collection::vec(damages(), 0..3),
        outputs in prop::collection::vec("out[0-3]", 0..3),
        reversed in any::<bool>(),
    ) {
        let mut raw = fitting(&spec, rows, open);
        raw.outputs = outputs;
        for step in damages {
            damage(&mut raw, step);
        }
        if reversed {
            raw.inputs.reverse();
        }
        let expected = reference(&spec, &raw);
        let judged = validate(&spec, raw).ok().map(|request| {
            let shapes = request
                .inputs
                .iter()
                .map(|tensor| tensor.as_ref().map(|tensor| tensor.shape.to_vec()))
                .collect();
            (request.rows, shapes, request.outputs)
        });
        prop_assert_eq!(judged, expected);
    }
}
