//! Inputs and outputs: what the configuration says of them, held against the graph.

use std::collections::HashSet;
use std::sync::Arc;

use dormouse_core::datatype::DataType;
use dormouse_core::shape::{DisplayShape, Shape, element_count};
use dormouse_proto::inference as pb;

use super::error::ConfigError;
use super::made::made;
use super::suggest;
use crate::graph::{GraphSummary, GraphTensor, GraphType};
use crate::spec::TensorSpec;

/// The schema's name for an element type.
pub(super) fn wire_type(datatype: DataType) -> pb::DataType {
    match datatype {
        DataType::Bool => pb::DataType::TypeBool,
        DataType::Uint8 => pb::DataType::TypeUint8,
        DataType::Uint16 => pb::DataType::TypeUint16,
        DataType::Uint32 => pb::DataType::TypeUint32,
        DataType::Uint64 => pb::DataType::TypeUint64,
        DataType::Int8 => pb::DataType::TypeInt8,
        DataType::Int16 => pb::DataType::TypeInt16,
        DataType::Int32 => pb::DataType::TypeInt32,
        DataType::Int64 => pb::DataType::TypeInt64,
        DataType::Fp16 => pb::DataType::TypeFp16,
        DataType::Bf16 => pb::DataType::TypeBf16,
        DataType::Fp32 => pb::DataType::TypeFp32,
        DataType::Fp64 => pb::DataType::TypeFp64,
        DataType::Bytes => pb::DataType::TypeString,
    }
}

/// The element type that a configuration's `data_type` stands for.
pub(super) fn datatype(number: i32) -> Option<DataType> {
    DataType::ALL
        .into_iter()
        .find(|&datatype| wire_type(datatype) as i32 == number)
}

/// A `data_type` as its owner wrote it.
pub(super) fn shown_type(number: i32) -> String {
    match pb::DataType::try_from(number) {
        Ok(datatype) => datatype.as_str_name().to_owned(),
        Err(_) => number.to_string(),
    }
}

/// What the configuration says of one tensor.
struct Declared<'a> {
    /// `input` or `output`.
    side: &'static str,
    name: &'a str,
    data_type: i32,
    dims: &'a [i64],
    reshape: Option<&'a [i64]>,
    optional: bool,
    /// The graph sees the elements of the whole batch in one row.
    flat: bool,
}

/// Checks a completed configuration's tensors against the graph.
pub(super) struct Signature<'a> {
    pub(super) model: &'a Arc<str>,
    pub(super) config: &'a pb::ModelConfig,
    pub(super) graph: &'a GraphSummary,
}

impl Signature<'_> {
    /// The inputs a request gives.
    pub(super) fn inputs(&self) -> Result<Vec<TensorSpec>, ConfigError> {
        let graph = self.graph;
        let known: Vec<_> = graph.inputs.iter().chain(&graph.optional_inputs).collect();
        let declared = self.config.input.iter().map(|input| Declared {
            side: "input",
            name: &input.name,
            data_type: input.data_type,
            dims: &input.dims,
            reshape: input
                .reshape
                .as_ref()
                .map(|reshape| reshape.shape.as_slice()),
            optional: input.optional,
            flat: input.allow_ragged_batch,
        });
        let specs = self.tensors(declared, &known)?;
        for (spec, input) in specs.iter().zip(&self.config.input) {
            self.check_input(spec, input)?;
        }
        let made = made(self.config).inputs;
        match graph.inputs.iter().find(|tensor| {
            !specs.iter().any(|spec| *spec.name == tensor.name)
                && !made.contains(tensor.name.as_str())
        }) {
            None => Ok(specs),
            Some(missing) => Err(ConfigError::MissingInput {
                model: self.model.clone(),
                tensor: missing.name.clone(),
            }),
        }
    }

    /// The outputs an answer may hold; the graph may have more.
    pub(super) fn outputs(&self) -> Result<Vec<TensorSpec>, ConfigError> {
        let known: Vec<_> = self.graph.outputs.iter().collect();
        let scattered = |name: &String| {
            let mut outputs = self.config.batch_output.iter();
            outputs.any(|output| output.target_name.contains(name))
        };
        let declared = self.config.output.iter().map(|output| Declared {
            side: "output",
            name: &output.name,
            data_type: output.data_type,
            dims: &output.dims,
            reshape: output
                .reshape
                .as_ref()
                .map(|reshape| reshape.shape.as_slice()),
            optional: false,
            flat: scattered(&output.name),
        });
        let specs = self.tensors(declared, &known)?;
        if specs.is_empty() {
            return Err(self.invalid("output", "at least one output", "none".to_owned()));
        }
        Ok(specs)
    }

    fn tensors<'a>(
        &self,
        declared: impl Iterator<Item = Declared<'a>>,
        known: &[&GraphTensor],
    ) -> Result<Vec<TensorSpec>, ConfigError> {
        let mut names = HashSet::new();
        declared
            .map(|declared| {
                if declared.name.is_empty() {
                    let field = format!("{}.name", declared.side);
                    return Err(self.invalid(&field, "a name", "none".to_owned()));
                }
                if !names.insert(declared.name) {
                    let found = format!("'{}' twice", declared.name);
                    return Err(self.invalid(declared.side, "every name once", found));
                }
                self.tensor(&declared, known)
            })
            .collect()
    }

    fn tensor(
        &self,
        declared: &Declared,
        known: &[&GraphTensor],
    ) -> Result<TensorSpec, ConfigError> {
        let Some(tensor) = known.iter().find(|tensor| tensor.name == declared.name) else {
            return Err(self.unknown(declared, known));
        };
        let graph_type = match tensor.kind {
            GraphType::Tensor(graph_type) => graph_type,
            GraphType::Other(kind) => {
                return Err(ConfigError::TensorType {
                    model: self.model.clone(),
                    field: declared.side,
                    tensor: tensor.name.clone(),
                    kind,
                });
            }
        };
        let Some(datatype) = datatype(declared.data_type) else {
            let found = shown_type(declared.data_type);
            return Err(self.invalid_in(declared, "data_type", "an element type", found));
        };
        if datatype != graph_type {
            return Err(self.mismatch(
                declared,
                shown_type(declared.data_type),
                wire_type(graph_type).as_str_name().to_owned(),
            ));
        }
        self.check_dims(declared)?;
        let scalar = self.compare(declared, tensor)?;
        let reshape = declared.reshape.map(Shape::from_slice);
        Ok(TensorSpec {
            name: declared.name.into(),
            datatype,
            dims: Shape::from_slice(declared.dims),
            // A single value of the graph is [1] on the wire and has no dimension inside.
            reshape: if scalar { Some(Shape::new()) } else { reshape },
            optional: declared.optional,
        })
    }

    fn check_dims(&self, declared: &Declared) -> Result<(), ConfigError> {
        if declared.dims.is_empty() {
            return Err(self.invalid_in(
                declared,
                "dims",
                "dims, which neither the configuration nor the graph tells",
                "none".to_owned(),
            ));
        }
        let positive_or_open = |dims: &[i64]| dims.iter().all(|&dim| dim >= 1 || dim == -1);
        if !positive_or_open(declared.dims) {
            let found = DisplayShape(declared.dims).to_string();
            return Err(self.invalid_in(declared, "dims", "sizes from 1, or -1 for any", found));
        }
        let Some(reshape) = declared.reshape else {
            return Ok(());
        };
        if !positive_or_open(reshape) {
            let found = DisplayShape(reshape).to_string();
            let expected = "sizes from 1, or -1 for any";
            return Err(self.invalid_in(declared, "reshape.shape", expected, found));
        }
        if reshape.is_empty() && self.config.max_batch_size == 0 {
            return Err(self.invalid_in(
                declared,
                "reshape.shape",
                "at least one size in a model without a batch dimension",
                "none".to_owned(),
            ));
        }
        if !same_elements(declared.dims, reshape) {
            return Err(self.invalid_in(
                declared,
                "reshape.shape",
                &format!("as many elements as dims {}", DisplayShape(declared.dims)),
                DisplayShape(reshape).to_string(),
            ));
        }
        Ok(())
    }

    /// Compares the dims the graph will see with the graph's own; true when that is a scalar.
    fn compare(&self, declared: &Declared, tensor: &GraphTensor) -> Result<bool, ConfigError> {
        let batched = self.config.max_batch_size > 0;
        let given = declared.reshape.unwrap_or(declared.dims);
        // Nothing to compare with: the owner's word is all there is.
        let Some(graph_dims) = &tensor.dims else {
            return Ok(false);
        };
        if declared.flat {
            return match graph_dims[..] {
                [-1] => Ok(false),
                _ => Err(self.mismatch(
                    declared,
                    "a ragged batch, for which the shape must be [-1]".to_owned(),
                    DisplayShape(graph_dims).to_string(),
                )),
            };
        }
        if batched && graph_dims.first() != Some(&-1) {
            return Err(self.mismatch(
                declared,
                format!(
                    "max_batch_size {}, for which the first dimension must be open",
                    self.config.max_batch_size
                ),
                DisplayShape(graph_dims).to_string(),
            ));
        }
        if graph_dims.is_empty() {
            if given.iter().all(|&dim| dim == 1) {
                return Ok(true);
            }
            let given = format!("dims {}", DisplayShape(given));
            return Err(self.mismatch(declared, given, "a single value (dims [1])".to_owned()));
        }
        let mut full = Shape::new();
        full.extend(batched.then_some(-1));
        full.extend_from_slice(given);
        // An input may narrow what the graph leaves open; what an output holds only the graph
        // decides.
        let exact = declared.side == "output";
        let fits = full.len() == graph_dims.len()
            && full.iter().zip(graph_dims).all(|(&given, &graph)| {
                given == graph || (!exact && graph == -1) || (given == -1 && graph == 0)
            });
        if fits {
            return Ok(false);
        }
        let note = if batched {
            " with the batch dimension"
        } else {
            ""
        };
        Err(self.mismatch(
            declared,
            format!("{}{note}", DisplayShape(&full)),
            DisplayShape(graph_dims).to_string(),
        ))
    }

    fn check_input(&self, spec: &TensorSpec, input: &pb::ModelInput) -> Result<(), ConfigError> {
        let field = |name: &str| format!("input '{}' {name}", spec.name);
        if input.format != 0 && input.dims.len() != 3 {
            let found = DisplayShape(&input.dims).to_string();
            return Err(self.invalid(&field("dims"), "3 sizes, which its format needs", found));
        }
        if !input.optional {
            return Ok(());
        }
        if self.config.max_batch_size > 0 {
            let expected = "false in a model with a batch dimension";
            return Err(self.invalid(&field("optional"), expected, "true".to_owned()));
        }
        if self
            .graph
            .inputs
            .iter()
            .any(|tensor| tensor.name == *spec.name)
        {
            let expected = "false, since the graph has no value of its own for it";
            return Err(self.invalid(&field("optional"), expected, "true".to_owned()));
        }
        Ok(())
    }

    fn unknown(&self, declared: &Declared, known: &[&GraphTensor]) -> ConfigError {
        let names: Vec<_> = known.iter().map(|tensor| tensor.name.as_str()).collect();
        let quoted: Vec<_> = names.iter().map(|name| format!("'{name}'")).collect();
        ConfigError::UnknownTensor {
            model: self.model.clone(),
            field: declared.side,
            tensor: declared.name.to_owned(),
            present: if quoted.is_empty() {
                "none".to_owned()
            } else {
                quoted.join(", ")
            },
            hint: suggest::hint(declared.name, names.iter().copied()),
        }
    }

    fn mismatch(&self, declared: &Declared, expected: String, found: String) -> ConfigError {
        ConfigError::GraphMismatch {
            model: self.model.clone(),
            field: declared.side,
            tensor: declared.name.to_owned(),
            expected,
            found,
        }
    }

    fn invalid_in(
        &self,
        declared: &Declared,
        part: &str,
        expected: &str,
        found: String,
    ) -> ConfigError {
        let field = format!("{} '{}' {part}", declared.side, declared.name);
        self.invalid(&field, expected, found)
    }

    fn invalid(&self, field: &str, expected: &str, found: String) -> ConfigError {
        ConfigError::Invalid {
            model: self.model.clone(),
            field: field.to_owned(),
            expected: expected.to_owned(),
            found,
        }
    }
}

/// Whether both shapes hold as many elements, between every pair of open dimensions too.
fn same_elements(dims: &[i64], reshape: &[i64]) -> bool {
    let runs = |dims: &[i64]| -> Option<Vec<u64>> {
        dims.split(|&dim| dim == -1).map(element_count).collect()
    };
    runs(dims).is_some() && runs(dims) == runs(reshape)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reshape_keeps_the_elements_between_open_dimensions() {
        assert!(same_elements(&[2, 4, -1, 6], &[8, -1, 1, 6]));
        assert!(same_elements(&[1], &[]));
        assert!(!same_elements(&[2, -1], &[-1, 2]));
        assert!(!same_elements(&[4], &[2, 3]));
        assert!(!same_elements(&[i64::MAX, 4], &[i64::MAX, 4]));
    }

    #[test]
    fn element_types_have_one_name_each_way() {
        for each in DataType::ALL {
            assert_eq!(datatype(wire_type(each).into()), Some(each));
        }
        assert_eq!(datatype(0), None);
        assert_eq!(datatype(99), None);
    }
}
