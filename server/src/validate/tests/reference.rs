//! Any request is judged as by rules that are written a second time.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;

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
