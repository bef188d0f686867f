//! Whether a graph's run time follows from the shapes of its inputs alone.
//!
//! A loop whose count is an input, or a range whose end is one, may take a microsecond now and a
//! minute next time. Such a graph is never run where a long run would hold others up.

use crate::onnx::{NameId, Nodes};

/// Operators whose work is given by the shapes of what goes in. Anything else, known or not,
/// counts as unsteady.
const STEADY: &[&str] = &[
    "Abs",
    "Add",
    "And",
    "ArgMax",
    "ArgMin",
    "AveragePool",
    "BatchNormalization",
    "Cast",
    "Ceil",
    "Clip",
    "Concat",
    "Constant",
    "Conv",
    "Cos",
    "DequantizeLinear",
    "Div",
    "Dropout",
    "Elu",
    "Equal",
    "Erf",
    "Exp",
    "Flatten",
    "Floor",
    "Gather",
    "Gelu",
    "Gemm",
    "GlobalAveragePool",
    "GlobalMaxPool",
    "Greater",
    "GreaterOrEqual",
    "HardSigmoid",
    "HardSwish",
    "Identity",
    "InstanceNormalization",
    "LayerNormalization",
    "LeakyRelu",
    "Less",
    "LessOrEqual",
    "Log",
    "LogSoftmax",
    "MatMul",
    "Max",
    "MaxPool",
    "Min",
    "Mul",
    "Neg",
    "Not",
    "Or",
    "PRelu",
    "Pow",
    "QuantizeLinear",
    "Reciprocal",
    "ReduceL2",
    "ReduceMax",
    "ReduceMean",
    "ReduceMin",
    "ReduceSum",
    "Relu",
    "Reshape",
    "Round",
    "Selu",
    "Shape",
    "Sigmoid",
    "Sign",
    "Sin",
    "Slice",
    "Softmax",
    "Softplus",
    "Split",
    "Sqrt",
    "Squeeze",
    "Sub",
    "Sum",
    "Tanh",
    "Transpose",
    "Unsqueeze",
    "Where",
];

/// True when every operator of the model is known to be steady.
pub(crate) fn is_steady(model: &Nodes) -> bool {
    let text = |id: NameId| model.names.text(id);
    model.functions.is_empty()
        && model.main.nodes.iter().all(|node| {
            matches!(text(node.domain), "" | "ai.onnx")
                && STEADY.binary_search(&text(node.op)).is_ok()
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steady_operators_are_listed_in_order() {
        assert!(STEADY.is_sorted());
    }
}
