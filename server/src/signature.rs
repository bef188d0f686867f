//! Models made up of a signature alone, for tests and fuzzing.

use std::collections::BTreeMap;

use dormouse_core::datatype::DataType;
use dormouse_core::shape::Shape;
use dormouse_model_store::spec::{LifecycleSpec, ModelSpec, SessionSpec, TensorSpec};
use dormouse_proto::inference as pb;

/// A model of these inputs and outputs, with nothing else said of it.
pub(crate) fn model(
    name: &str,
    max_batch_size: u32,
    inputs: Vec<TensorSpec>,
    outputs: Vec<TensorSpec>,
) -> ModelSpec {
    ModelSpec {
        name: name.into(),
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
        concurrency_is_default: false,
        session: SessionSpec::default(),
        warmups: Vec::new(),
        lifecycle: LifecycleSpec::default(),
        decoupled: false,
        model_filename: "model.onnx".into(),
        labels: BTreeMap::new(),
        warnings: Vec::new(),
    }
}

/// An input or output of a model.
pub(crate) fn tensor(name: &str, datatype: DataType, dims: &[i64]) -> TensorSpec {
    TensorSpec {
        name: name.into(),
        datatype,
        dims: Shape::from_slice(dims),
        reshape: None,
        optional: false,
    }
}
