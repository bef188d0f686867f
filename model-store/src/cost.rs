//! What a graph's operators tell of the time that its sessions take.
//!
//! A loop whose count is an input, or a range whose end is one, may take a microsecond now and a
//! minute next time. Such a graph is never run where a long run would hold others up.

use crate::graph::OperatorFacts;
use crate::onnx::{NameId, Node, Nodes, Value};

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

/// Operators that no run is to meet: optimising a graph makes them a part of the weights or of the operators
/// beside them. What else there is to optimise in a small graph is not worth a single run.
const TO_BE_MERGED: &[&str] = &["BatchNormalization", "DequantizeLinear", "QuantizeLinear"];

pub(crate) fn facts(model: &Nodes) -> OperatorFacts {
    OperatorFacts {
        is_steady: is_steady(model),
        is_to_be_merged: is_to_be_merged(model),
    }
}

/// True when any operator of the model, wherever it is, is one of those.
fn is_to_be_merged(model: &Nodes) -> bool {
    let functions = model.functions.iter().map(|function| &function.nodes);
    let mut left: Vec<&[Node]> = functions.map(Vec::as_slice).collect();
    left.push(&model.main.nodes);
    while let Some(nodes) = left.pop() {
        for node in nodes {
            if TO_BE_MERGED.contains(&model.names.text(node.op)) {
                return true;
            }
            left.extend(
                node.attributes
                    .iter()
                    .filter_map(|attribute| match &attribute.value {
                        Value::Block(block) => Some(block.nodes.as_slice()),
                        _ => None,
                    }),
            );
        }
    }
    false
}

/// True when every operator of the model is known to be steady.
fn is_steady(model: &Nodes) -> bool {
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
    use crate::onnx::writer::*;
    use crate::onnx::{ReadAt, summarize};

    #[test]
    fn steady_operators_are_listed_in_order() {
        assert!(STEADY.is_sorted());
    }

    #[test]
    fn what_is_to_be_merged_is_found_in_branches_too() {
        let is_to_be_merged = |op: &str| {
            let inner = Message::new().message(1, node(&format!("y = {op}(x)"), vec![]));
            let branch = graph_attribute("then_branch", inner.clone());
            [
                inner,
                Message::new().message(1, node("y = If(c)", vec![branch])),
            ]
            .map(|graph| {
                let graph = graph.message(11, value("x", FLOAT, &[-1]));
                let model = model(graph).0;
                let source: &dyn ReadAt = &model.as_slice();
                summarize(source).unwrap().operators.is_to_be_merged
            })
        };
        for op in TO_BE_MERGED {
            assert_eq!(is_to_be_merged(op), [true; 2], "{op}");
        }
        assert_eq!(is_to_be_merged("Relu"), [false; 2]);
    }
}
