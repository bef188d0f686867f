//! What each operator does with the axis that carries the batch.

use super::facts::{Fact, Item};
use super::matrices::{einsum, elementwise, gemm, matmul};
use super::shapes::{fixed, reshape, shape};
use super::step::{Outcome, Place, Step, resolve};

pub(super) fn outcome(step: &Step<'_, '_>) -> Outcome {
    if is_random(step.op) {
        return Outcome::coupled(
            "draws random numbers, which depend on a row's place in the batch",
        );
    }
    let Some(first) = step.first_place() else {
        return fixed(step);
    };
    match step.op {
        "Shape" => shape(step),
        "Size" => Outcome::of(Fact::fixed(Some(0))),
        "DynamicQuantizeLinear" | "DynamicQuantizeMatMul" | "DynamicQuantizeLSTM" => {
            Outcome::coupled("takes one scale from the values of the whole batch")
        }
        "BatchNormalization" => batch_normalization(step, first),
        "Dropout"
            if step
                .known_input(2)
                .is_some_and(|mode| mode.iter().any(|&m| m != 0)) =>
        {
            Outcome::coupled("drops values at random, which depends on a row's place in the batch")
        }
        op if op.starts_with("Reduce") => reduce(step, first),
        "ArgMax" | "ArgMin" => reduce_axes(step, first, &[step.int("axis").unwrap_or(0)]),
        "Softmax" | "LogSoftmax" | "Hardmax" => softmax(step, first),
        "LayerNormalization" | "SimplifiedLayerNormalization" | "RMSNormalization" => {
            let axis = resolve(step.int("axis").unwrap_or(-1), first.rank);
            match axis.is_some_and(|axis| axis <= first.axis.unwrap_or(0)) {
                true => along(step.int("axis").unwrap_or(-1), "normalizes over", first),
                false => first.kept(),
            }
        }
        "MeanVarianceNormalization" => {
            let axes = step.ints("axes").unwrap_or(&[0, 2, 3]);
            match axes.iter().find(|&&axis| first.is_at(axis)) {
                Some(&axis) => along(axis, "normalizes over", first),
                None => first.kept(),
            }
        }
        "LpNormalization" => mixing(step.int("axis").unwrap_or(-1), "normalizes over", first),
        "CumSum" | "CumProd" => match step.known_input(1).as_deref() {
            Some(&[axis]) => mixing(axis, "accumulates over", first),
            _ => first.kept(),
        },
        "TopK" => mixing(step.int("axis").unwrap_or(-1), "ranks entries along", first),
        "Split" | "SplitToSequence" => mixing(step.int("axis").unwrap_or(0), "splits along", first),
        "Concat" => concat(step),
        "ConcatFromSequence" => match step.int("new_axis") {
            Some(1) => Outcome::rows(None, None),
            _ => mixing(step.int("axis").unwrap_or(0), "joins along", first),
        },
        "NonZero" => Outcome::coupled("lists positions found in the whole batch"),
        "Unique" => Outcome::coupled("looks for duplicates in the whole batch"),
        "NonMaxSuppression" => Outcome::coupled("lists boxes found in the whole batch"),
        "Compress" => match step.int("axis") {
            Some(axis) => mixing(axis, "drops entries along", first),
            None => Outcome::coupled("drops entries of the whole batch"),
        },
        "NegativeLogLikelihoodLoss" | "SoftmaxCrossEntropyLoss"
            if step.text("reduction") != Some(b"none") =>
        {
            Outcome::coupled("averages or sums a loss over the batch")
        }
        "ReverseSequence" => mixing(step.int("time_axis").unwrap_or(0), "reverses along", first),
        "LSTM" | "GRU" | "RNN" => recurrent(step, first),
        "Gather" => gather(step),
        "GatherElements" | "ScatterElements" | "Scatter" => match step.place(0) {
            Some(data) => mixing(step.int("axis").unwrap_or(0), "picks entries along", data),
            None => Outcome::rows(first.axis, first.rank),
        },
        "GatherND" => gather_nd(step, first),
        "Slice" => slice(step, first),
        "Transpose" => transpose(step, first),
        "Unsqueeze" => unsqueeze(step, first),
        "Squeeze" => squeeze(step, first),
        "Flatten" => flatten(step, first),
        "Reshape" => reshape(step, first),
        "Expand" => expand(step, first),
        "Tile" => match step.known_input(1).zip(first.axis) {
            Some((repeats, axis)) if repeats.get(axis).is_some_and(|&count| count != 1) => {
                along(axis as i64, "repeats the whole of", first)
            }
            _ => first.kept(),
        },
        "Pad" => pad(step, first),
        "OneHot" => {
            let rank = first.rank.map(|rank| rank + 1);
            match resolve(step.int("axis").unwrap_or(-1), rank) {
                Some(at) if at <= first.axis.unwrap_or(0) => {
                    Outcome::rows(first.axis.map(|axis| axis + 1), rank)
                }
                _ => Outcome::rows(first.axis, rank),
            }
        }
        "MatMul" | "MatMulInteger" | "MatMulIntegerToFloat" | "FusedMatMul" => matmul(step, 0, 1),
        "QLinearMatMul" => matmul(step, 0, 3),
        "Gemm" => gemm(step),
        "Einsum" => einsum(step),
        "Conv" | "ConvTranspose" | "ConvInteger" | "QLinearConv" | "FusedConv" => {
            match first.axis {
                Some(axis) if axis > 0 => along(axis as i64, "convolves over", first),
                _ => first.kept(),
            }
        }
        op if ELEMENTWISE.contains(&op) => elementwise(step),
        op if SHAPE_KEEPING.contains(&op) => first.kept(),
        _ => Outcome::rows(first.axis, None),
    }
}

/// Operators on each element of inputs that are broadcast against each other.
const ELEMENTWISE: [&str; 30] = [
    "Add",
    "Sub",
    "Mul",
    "Div",
    "Pow",
    "Mod",
    "Min",
    "Max",
    "Sum",
    "Mean",
    "And",
    "Or",
    "Xor",
    "Equal",
    "Greater",
    "GreaterOrEqual",
    "Less",
    "LessOrEqual",
    "Where",
    "PRelu",
    "BitShift",
    "BitwiseAnd",
    "BitwiseOr",
    "BitwiseXor",
    "Swish",
    "BiasGelu",
    "FastGelu",
    "QLinearAdd",
    "QLinearMul",
    "Clip",
];

/// Operators whose first output has the shape of the first input, row for row.
const SHAPE_KEEPING: [&str; 71] = [
    "Identity",
    "Cast",
    "CastLike",
    "Relu",
    "LeakyRelu",
    "Elu",
    "Selu",
    "Celu",
    "ThresholdedRelu",
    "HardSigmoid",
    "HardSwish",
    "Sigmoid",
    "Tanh",
    "Softplus",
    "Softsign",
    "Mish",
    "Gelu",
    "QuickGelu",
    "Erf",
    "Exp",
    "Log",
    "Sqrt",
    "Reciprocal",
    "Abs",
    "Neg",
    "Sign",
    "Floor",
    "Ceil",
    "Round",
    "Sin",
    "Cos",
    "Tan",
    "Asin",
    "Acos",
    "Atan",
    "Sinh",
    "Cosh",
    "Asinh",
    "Acosh",
    "Atanh",
    "IsNaN",
    "IsInf",
    "Not",
    "BitwiseNot",
    "Dropout",
    "QuantizeLinear",
    "DequantizeLinear",
    "QLinearSigmoid",
    "QLinearLeakyRelu",
    "InstanceNormalization",
    "GroupNormalization",
    "LRN",
    "Trilu",
    "Shrink",
    "AveragePool",
    "MaxPool",
    "LpPool",
    "GlobalAveragePool",
    "GlobalMaxPool",
    "GlobalLpPool",
    "QLinearAveragePool",
    "QLinearGlobalAveragePool",
    "Resize",
    "Upsample",
    "DepthToSpace",
    "SpaceToDepth",
    "ScatterND",
    "SkipLayerNormalization",
    "SkipSimplifiedLayerNormalization",
    "Scaler",
    "Normalizer",
];

/// Exporters write various large numbers for "to the end".
const BEYOND_ANY_BATCH: i64 = 1_000_000;

fn is_random(op: &str) -> bool {
    matches!(
        op,
        "RandomNormal"
            | "RandomNormalLike"
            | "RandomUniform"
            | "RandomUniformLike"
            | "Multinomial"
            | "Bernoulli"
            | "Sampling"
    )
}

/// Couples rows when `axis` carries the batch; else everything stays where it is.
fn mixing(axis: i64, how: &str, place: Place) -> Outcome {
    match place.is_at(axis) {
        true => along(axis, how, place),
        false => place.kept(),
    }
}

fn along(axis: i64, how: &str, place: Place) -> Outcome {
    let axis = resolve(axis, place.rank).map_or(axis, |axis| axis as i64);
    Outcome::coupled(format!("{how} axis {axis}, which carries the batch"))
}

fn batch_normalization(step: &Step<'_, '_>, first: Place) -> Outcome {
    let trains = match step.opset {
        // Until operator set 14, asking for the statistics was asking for training.
        ..14 => step.node.outputs.iter().skip(1).any(|&output| output != 0),
        _ => step.flag("training_mode"),
    };
    match trains {
        true => Outcome::coupled("takes mean and variance from the whole batch (training mode)"),
        false => first.kept(),
    }
}

fn reduce(step: &Step<'_, '_>, first: Place) -> Outcome {
    let from_input = step.has_input(1) && step.ints("axes").is_none();
    match step.listed("axes", 1) {
        Some(axes) if !axes.is_empty() => reduce_axes(step, first, &axes),
        // Axes that are computed; those of a model with a batch rarely include it.
        None if from_input => Outcome::rows(first.axis, None),
        _ if step.flag("noop_with_empty_axes") => first.kept(),
        _ => Outcome::coupled("reduces over all axes, the batch among them"),
    }
}

fn reduce_axes(step: &Step<'_, '_>, first: Place, axes: &[i64]) -> Outcome {
    if let Some(&axis) = axes.iter().find(|&&axis| first.is_at(axis)) {
        return along(axis, "reduces over", first);
    }
    if step.int("keepdims").unwrap_or(1) != 0 {
        return first.kept();
    }
    let before = |batch: usize| {
        let in_front = |&&axis: &&i64| resolve(axis, first.rank).is_some_and(|axis| axis < batch);
        batch.checked_sub(axes.iter().filter(in_front).count())
    };
    let rank = first.rank.and_then(|rank| rank.checked_sub(axes.len()));
    Outcome::rows(first.axis.and_then(before), rank)
}

fn softmax(step: &Step<'_, '_>, first: Place) -> Outcome {
    // Before operator set 13 everything from the axis on was one dimension.
    let flattens = step.opset < 13;
    let axis = step.int("axis").unwrap_or(if flattens { 1 } else { -1 });
    let batch = first.axis.unwrap_or(0);
    let mixes = match resolve(axis, first.rank) {
        Some(axis) if flattens => axis <= batch,
        Some(axis) => axis == batch,
        None => false,
    };
    match mixes {
        true => along(axis, "normalizes over", first),
        false => first.kept(),
    }
}

fn concat(step: &Step<'_, '_>) -> Outcome {
    let axis = step.int("axis").unwrap_or(0);
    let rank = step.inputs.iter().find_map(Fact::rank);
    let places: Vec<Place> = (0..step.inputs.len())
        .filter_map(|index| step.place(index))
        .map(|place| Place {
            rank: place.rank.or(rank),
            ..place
        })
        .collect();
    // One input alone is joined to nothing.
    let joined = step.inputs.len() > 1;
    if let Some(&place) = places.iter().find(|place| joined && place.is_at(axis)) {
        return along(axis, "joins along", place);
    }
    Outcome::rows(places.iter().find_map(|place| place.axis), rank)
}

fn recurrent(step: &Step<'_, '_>, first: Place) -> Outcome {
    let batch_first = step.flag("layout");
    let expected = usize::from(!batch_first);
    if step.place(0).is_some() && first.axis.is_some_and(|axis| axis != expected) {
        return along(
            first.axis.map_or(0, |axis| axis as i64),
            "steps through",
            first,
        );
    }
    let (all, last) = match batch_first {
        true => (0, 0),
        false => (2, 1),
    };
    Outcome {
        facts: vec![
            Fact::rows(Some(all), Some(4)),
            Fact::rows(Some(last), Some(3)),
        ],
        coupled: None,
    }
}

fn gather(step: &Step<'_, '_>) -> Outcome {
    let along_axis = step.int("axis").unwrap_or(0);
    let rank_of = |index: usize| step.inputs.get(index).and_then(Fact::rank);
    let rank = rank_of(0)
        .zip(rank_of(1))
        .and_then(|(data, index)| (data + index).checked_sub(1));
    match (step.place(0), step.place(1)) {
        (Some(data), None) => {
            if data.is_at(along_axis) {
                return along(along_axis, "picks entries along", data);
            }
            let at = resolve(along_axis, data.rank);
            let axis = match (data.axis, at) {
                (Some(batch), Some(at)) if batch > at => {
                    rank_of(1).and_then(|index| (batch + index).checked_sub(1))
                }
                (batch, _) => batch,
            };
            Outcome::rows(axis, rank)
        }
        // The usual look-up of embeddings.
        (None, Some(index)) => {
            let at = resolve(along_axis, rank_of(0));
            let axis = at.zip(index.axis).map(|(at, batch)| at + batch);
            Outcome::rows(axis, rank)
        }
        _ => Outcome::coupled("picks entries of the batch by numbers that come with it"),
    }
}

fn gather_nd(step: &Step<'_, '_>, first: Place) -> Outcome {
    let batch_dims = step.int("batch_dims").unwrap_or(0);
    let indexed = step.place(0).is_some_and(|data| {
        data.axis.unwrap_or(0) as u64 >= u64::try_from(batch_dims).unwrap_or(0)
    });
    // Numbers that come with the rows most often pair each row with its own position.
    if indexed && step.items(1).is_some() {
        return Outcome::coupled("picks rows of the batch by fixed numbers");
    }
    Outcome::rows(first.axis, None)
}

fn slice(step: &Step<'_, '_>, first: Place) -> Outcome {
    let from_attributes = step.ints("starts").is_some();
    let count = match step.ints("starts") {
        Some(starts) => starts.len(),
        None => step.items(1).map_or(0, |items| items.list.len()),
    };
    let axes = match step.listed("axes", 3) {
        Some(axes) => axes,
        None if step.has_input(3) && !from_attributes => return first.kept(),
        None => (0..count as i64).collect(),
    };
    let Some(index) = axes.iter().position(|&axis| first.is_at(axis)) else {
        return first.kept();
    };
    let item = |attribute: &str, input: usize| match step.ints(attribute) {
        Some(ints) => ints.get(index).copied().map_or(Item::Unknown, Item::Known),
        None => step
            .items(input)
            .map_or(Item::Unknown, |items| items.at(index)),
    };
    let from_start = item("starts", 1) == Item::Known(0);
    let to_end = match item("ends", 2) {
        Item::Known(end) => end >= BEYOND_ANY_BATCH,
        Item::Batch => true,
        Item::Unknown => false,
    };
    let every = from_attributes || !step.has_input(4) || item("steps", 4) == Item::Known(1);
    match from_start && to_end && every {
        true => first.kept(),
        false => along(axes[index], "takes a part of", first),
    }
}

fn transpose(step: &Step<'_, '_>, first: Place) -> Outcome {
    match (step.ints("perm"), first.axis) {
        (Some(order), Some(axis)) => {
            let moved = order.iter().position(|&from| from == axis as i64);
            Outcome::rows(moved, Some(order.len()))
        }
        (Some(order), None) => Outcome::rows(None, Some(order.len())),
        (None, axis) => {
            let reversed = first.rank.zip(axis).map(|(rank, axis)| rank - 1 - axis);
            Outcome::rows(reversed, first.rank)
        }
    }
}

fn unsqueeze(step: &Step<'_, '_>, first: Place) -> Outcome {
    let Some(axes) = step.listed("axes", 1) else {
        return Outcome::rows(first.axis, None);
    };
    let rank = first.rank.map(|rank| rank + axes.len());
    let mut at: Vec<usize> = axes
        .iter()
        .filter_map(|&axis| resolve(axis, rank))
        .collect();
    at.sort_unstable();
    let shift = |batch: usize| {
        at.iter()
            .fold(batch, |batch, &at| batch + usize::from(at <= batch))
    };
    Outcome::rows(first.axis.map(shift), rank)
}

fn squeeze(step: &Step<'_, '_>, first: Place) -> Outcome {
    let Some(axes) = step.listed("axes", 1) else {
        return Outcome::rows(first.axis.filter(|&axis| axis == 0), None);
    };
    if let Some(&axis) = axes
        .iter()
        .find(|&&axis| first.axis.is_some() && first.is_at(axis))
    {
        return along(axis, "removes", first);
    }
    let before = |batch: usize| {
        let in_front = |&&axis: &&i64| resolve(axis, first.rank).is_some_and(|axis| axis < batch);
        batch.checked_sub(axes.iter().filter(in_front).count())
    };
    let rank = first.rank.and_then(|rank| rank.checked_sub(axes.len()));
    Outcome::rows(first.axis.and_then(before), rank)
}

fn flatten(step: &Step<'_, '_>, first: Place) -> Outcome {
    let at = resolve(step.int("axis").unwrap_or(1), first.rank);
    let axis = match (first.axis, at) {
        (Some(0), None) => Some(0),
        // Rows are contiguous only as the first of the dimensions that become one.
        (Some(batch), Some(at)) if batch >= at => (batch == at).then_some(1),
        (Some(0), Some(_)) => Some(0),
        _ => None,
    };
    Outcome::rows(axis, Some(2))
}

fn expand(step: &Step<'_, '_>, first: Place) -> Outcome {
    let target = step
        .items(1)
        .filter(|items| !items.open)
        .map(|items| items.list.len());
    let (Some(target), Some(rank)) = (target, first.rank) else {
        return Outcome::rows(first.axis, None);
    };
    let out = target.max(rank);
    Outcome::rows(first.axis.map(|axis| axis + out - rank), Some(out))
}

fn pad(step: &Step<'_, '_>, first: Place) -> Outcome {
    let named = step.has_input(3);
    let pads = step.listed("pads", 1).filter(|_| !named);
    let (Some(pads), Some(axis)) = (pads, first.axis) else {
        return first.kept();
    };
    let half = pads.len() / 2;
    let padded = [pads.get(axis), pads.get(half + axis)];
    match axis < half && padded.iter().flatten().any(|&&count| count != 0) {
        true => along(axis as i64, "pads", first),
        false => first.kept(),
    }
}
