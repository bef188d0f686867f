//! `model_warmup`: requests that run before the model's first real one.

use std::collections::BTreeMap;
use std::path::{Component, Path};
use std::sync::Arc;

use dormouse_core::shape::{DisplayShape, Shape, element_count};
use dormouse_proto::inference as pb;
use pb::model_warmup::input::InputDataType;

use super::error::ConfigError;
use super::tensors::{datatype, shown_type};
use crate::spec::{TensorSpec, WarmupData, WarmupInput, WarmupSpec};

/// More than any warm-up needs; a configuration must not be able to ask for all of memory.
const MAX_INPUT_BYTES: u64 = 1 << 30;
const MAX_COUNT: u32 = 10_000;

/// Checks the warm-ups of a model with these inputs.
pub(super) struct Warmups<'a> {
    pub(super) model: &'a Arc<str>,
    pub(super) max_batch_size: u32,
    pub(super) inputs: &'a [TensorSpec],
}

impl Warmups<'_> {
    /// The warm-ups to run; one without rows is left out with a warning, as Triton skips it.
    pub(super) fn read(
        &self,
        warmups: &[pb::ModelWarmup],
        warnings: &mut Vec<String>,
    ) -> Result<Vec<WarmupSpec>, ConfigError> {
        let mut specs = Vec::new();
        for warmup in warmups {
            if warmup.batch_size == 0 {
                warnings.push(format!(
                    "model_warmup '{}' has no effect: its batch_size is 0",
                    warmup.name
                ));
                continue;
            }
            specs.push(self.warmup(warmup)?);
        }
        Ok(specs)
    }

    fn warmup(&self, warmup: &pb::ModelWarmup) -> Result<WarmupSpec, ConfigError> {
        let most = self.max_batch_size.max(1);
        if warmup.batch_size > most {
            let field = format!("model_warmup '{}' batch_size", warmup.name);
            return Err(self.invalid(
                &field,
                format!("1 to {most}"),
                warmup.batch_size.to_string(),
            ));
        }
        if warmup.count > MAX_COUNT {
            let field = format!("model_warmup '{}' count", warmup.name);
            return Err(self.invalid(
                &field,
                format!("at most {MAX_COUNT}"),
                warmup.count.to_string(),
            ));
        }
        let given: BTreeMap<_, _> = warmup.inputs.iter().collect();
        if let Some(missing) = self
            .inputs
            .iter()
            .find(|input| !input.optional && !warmup.inputs.contains_key(&*input.name))
        {
            let field = format!("model_warmup '{}' inputs", warmup.name);
            let expected = format!("a value for input '{}'", missing.name);
            return Err(self.invalid(&field, expected, "none".to_owned()));
        }
        let inputs = given
            .into_iter()
            .map(|(name, input)| self.input(warmup, name, input))
            .collect::<Result<_, _>>()?;
        Ok(WarmupSpec {
            name: warmup.name.clone(),
            rows: warmup.batch_size,
            count: warmup.count.max(1),
            inputs,
        })
    }

    fn input(
        &self,
        warmup: &pb::ModelWarmup,
        name: &str,
        input: &pb::model_warmup::Input,
    ) -> Result<WarmupInput, ConfigError> {
        let field = |part: &str| format!("model_warmup '{}' input '{name}'{part}", warmup.name);
        let Some(spec) = self.inputs.iter().find(|spec| &*spec.name == name) else {
            let names: Vec<_> = self
                .inputs
                .iter()
                .map(|spec| format!("'{}'", spec.name))
                .collect();
            let expected = format!("an input of the model ({})", names.join(", "));
            return Err(self.invalid(&field(""), expected, format!("'{name}'")));
        };
        if datatype(input.data_type) != Some(spec.datatype) {
            let expected = super::tensors::wire_type(spec.datatype)
                .as_str_name()
                .to_owned();
            let found = shown_type(input.data_type);
            return Err(self.invalid(&field(" data_type"), expected, found));
        }
        let fits = input.dims.len() == spec.dims.len()
            && input
                .dims
                .iter()
                .zip(&spec.dims)
                .all(|(&given, &wanted)| given >= 1 && (wanted == -1 || wanted == given));
        // An element of BYTES is at least its length's four bytes.
        let element_size = spec.datatype.element_size().unwrap_or(4) as u64;
        let bytes = element_count(&input.dims)
            .and_then(|elements| elements.checked_mul(element_size))
            .and_then(|bytes| bytes.checked_mul(warmup.batch_size.into()));
        if !fits || bytes.is_none_or(|bytes| bytes > MAX_INPUT_BYTES) {
            let expected = format!(
                "sizes from 1 that fit {} in at most {MAX_INPUT_BYTES} bytes",
                DisplayShape(&spec.dims)
            );
            let found = DisplayShape(&input.dims).to_string();
            return Err(self.invalid(&field(" dims"), expected, found));
        }
        let data = match &input.input_data_type {
            // Only which of them is there counts, not whether it says true.
            Some(InputDataType::ZeroData(_)) => WarmupData::Zero,
            Some(InputDataType::RandomData(_)) => WarmupData::Random,
            Some(InputDataType::InputDataFile(file)) if stays_inside(file) => {
                WarmupData::File(file.clone())
            }
            Some(InputDataType::InputDataFile(file)) => {
                let expected = "a path inside the model's warmup folder".to_owned();
                return Err(self.invalid(
                    &field(" input_data_file"),
                    expected,
                    format!("'{file}'"),
                ));
            }
            None => {
                let expected = "zero_data, random_data or input_data_file".to_owned();
                return Err(self.invalid(&field(""), expected, "none".to_owned()));
            }
        };
        Ok(WarmupInput {
            name: name.to_owned(),
            datatype: spec.datatype,
            dims: Shape::from_slice(&input.dims),
            data,
        })
    }

    fn invalid(&self, field: &str, expected: String, found: String) -> ConfigError {
        ConfigError::Invalid {
            model: self.model.clone(),
            field: field.to_owned(),
            expected,
            found,
        }
    }
}

/// Whether a path names something below the folder it is relative to.
pub(super) fn stays_inside(path: &str) -> bool {
    !path.is_empty()
        && !path.contains(['\0', '\\'])
        && Path::new(path)
            .components()
            .all(|component| matches!(component, Component::Normal(_)))
}
