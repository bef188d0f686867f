//! Ragged batches: inputs that are joined whatever their shapes, inputs made of the batch, and
//! outputs dealt out by the shapes of an input.

use std::collections::HashSet;

use dormouse_core::datatype::DataType;
use dormouse_core::shape::DisplayShape;
use dormouse_proto::inference as pb;
use pb::batch_input::Kind;

use super::error::ConfigError;
use super::tensors::{Signature, datatype, shown_type, wire_type};
use crate::graph::GraphType;
use crate::spec::{BatchInputKind, BatchInputSpec, RaggedSpec, TensorSpec};

/// What the model's configuration says of ragged batches; none when it says nothing.
pub(super) fn read(
    signature: &Signature<'_>,
    inputs: &[TensorSpec],
    outputs: &[TensorSpec],
) -> Result<Option<RaggedSpec>, ConfigError> {
    let config = signature.config;
    let any_ragged = config.input.iter().any(|input| input.allow_ragged_batch);
    if !any_ragged && config.batch_input.is_empty() && config.batch_output.is_empty() {
        return Ok(None);
    }
    let reader = Reader { signature, inputs };
    Ok(Some(RaggedSpec {
        inputs: config
            .input
            .iter()
            .map(|input| input.allow_ragged_batch)
            .collect(),
        batch_inputs: reader.batch_inputs()?,
        scattered: reader.scattered(outputs)?,
    }))
}

struct Reader<'a> {
    signature: &'a Signature<'a>,
    inputs: &'a [TensorSpec],
}

impl Reader<'_> {
    fn batch_inputs(&self) -> Result<Vec<BatchInputSpec>, ConfigError> {
        let mut names = HashSet::new();
        let mut specs = Vec::new();
        for input in &self.signature.config.batch_input {
            let field = "batch_input";
            let Ok(kind) = Kind::try_from(input.kind) else {
                return Err(self.invalid(field, "a kind of batch input", input.kind.to_string()));
            };
            let kind = match kind {
                Kind::BatchElementCount => BatchInputKind::ElementCount,
                Kind::BatchAccumulatedElementCount => BatchInputKind::AccumulatedElementCount,
                Kind::BatchAccumulatedElementCountWithZero => {
                    BatchInputKind::AccumulatedElementCountWithZero
                }
                Kind::BatchMaxElementCountAsShape => BatchInputKind::MaxElementCountAsShape,
                Kind::BatchItemShape => BatchInputKind::ItemShape,
                Kind::BatchItemShapeFlatten => BatchInputKind::ItemShapeFlatten,
            };
            let source = self.source(field, &input.source_input)?;
            let known = [DataType::Int32, DataType::Fp32];
            let given = datatype(input.data_type).filter(|given| known.contains(given));
            let Some(datatype) = given else {
                let found = shown_type(input.data_type);
                return Err(self.invalid(
                    "batch_input.data_type",
                    "TYPE_INT32 or TYPE_FP32",
                    found,
                ));
            };
            if input.target_name.is_empty() {
                return Err(self.invalid(field, "a target_name", "none".to_owned()));
            }
            for name in &input.target_name {
                if !names.insert(name) || self.inputs.iter().any(|other| *other.name == **name) {
                    let found = format!("'{name}' twice");
                    return Err(self.invalid(field, "every input once", found));
                }
                let spec = BatchInputSpec {
                    name: name.as_str().into(),
                    kind,
                    datatype,
                    source,
                };
                self.check_target(&spec)?;
                specs.push(spec);
            }
        }
        Ok(specs)
    }

    fn check_target(&self, spec: &BatchInputSpec) -> Result<(), ConfigError> {
        let graph = self.signature.graph;
        let mut tensors = graph.inputs.iter().chain(&graph.optional_inputs);
        let Some(tensor) = tensors.find(|tensor| tensor.name == *spec.name) else {
            let expected = "the name of an input of the graph";
            return Err(self.invalid("batch_input", expected, format!("'{}'", spec.name)));
        };
        let field = format!("batch_input '{}'", spec.name);
        if tensor.kind != GraphType::Tensor(spec.datatype) {
            let expected = match tensor.kind {
                GraphType::Tensor(of_graph) => wire_type(of_graph).as_str_name(),
                GraphType::Other(kind) => kind,
            };
            let found = wire_type(spec.datatype).as_str_name().to_owned();
            return Err(self.invalid(&field, expected, found));
        }
        let rank = match spec.kind {
            BatchInputKind::ItemShape => 2,
            _ => 1,
        };
        match &tensor.dims {
            Some(dims) if dims.len() != rank || dims.first() != Some(&-1) => {
                let expected = format!("{rank} dimensions in the graph, the first one open");
                Err(self.invalid(&field, &expected, DisplayShape(dims).to_string()))
            }
            _ => Ok(()),
        }
    }

    fn scattered(&self, outputs: &[TensorSpec]) -> Result<Vec<Option<usize>>, ConfigError> {
        let mut scattered = vec![None; outputs.len()];
        for output in &self.signature.config.batch_output {
            if output.kind != pb::batch_output::Kind::BatchScatterWithInputShape as i32 {
                let expected = "BATCH_SCATTER_WITH_INPUT_SHAPE";
                return Err(self.invalid("batch_output.kind", expected, output.kind.to_string()));
            }
            let source = self.source("batch_output", &output.source_input)?;
            for name in &output.target_name {
                let place = outputs.iter().position(|spec| *spec.name == **name);
                let Some(place) = place else {
                    let expected = "the name of an output";
                    return Err(self.invalid("batch_output", expected, format!("'{name}'")));
                };
                let spec = &outputs[place];
                if spec.datatype.element_size().is_none() {
                    let expected = "an output whose elements have one size";
                    return Err(self.invalid("batch_output", expected, format!("'{name}'")));
                }
                if spec.dims.len() > self.inputs[source].dims.len() {
                    let field = format!("batch_output '{name}'");
                    let expected = "no more dims than its source_input has";
                    let found = DisplayShape(&spec.dims).to_string();
                    return Err(self.invalid(&field, expected, found));
                }
                if scattered[place].replace(source).is_some() {
                    let found = format!("'{name}' twice");
                    return Err(self.invalid("batch_output", "every output once", found));
                }
            }
        }
        Ok(scattered)
    }

    fn source(&self, field: &str, names: &[String]) -> Result<usize, ConfigError> {
        let field = format!("{field}.source_input");
        let [name] = names else {
            return Err(self.invalid(&field, "one input", names.len().to_string()));
        };
        let place = self.inputs.iter().position(|spec| *spec.name == **name);
        place.ok_or_else(|| self.invalid(&field, "the name of an input", format!("'{name}'")))
    }

    fn invalid(&self, field: &str, expected: &str, found: String) -> ConfigError {
        ConfigError::Invalid {
            model: self.signature.model.clone(),
            field: field.to_owned(),
            expected: expected.to_owned(),
            found,
        }
    }
}
