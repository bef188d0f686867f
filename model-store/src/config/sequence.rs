//! `sequence_batching`: its strategy, control inputs and states, held against the graph.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use dormouse_core::datatype::DataType;
use dormouse_core::shape::{DisplayShape, Shape, element_count};
use dormouse_proto::inference as pb;
use pb::ModelSequenceBatching;
use pb::model_config::SchedulingChoice;
use pb::model_sequence_batching::control::Kind;
use pb::model_sequence_batching::initial_state::StateData;
use pb::model_sequence_batching::{Control, State, StrategyChoice, StrategyDirect};

use super::error::ConfigError;
use super::tensors::{datatype, shown_type, wire_type};
use super::warmup::stays_inside;
use crate::graph::{GraphSummary, GraphTensor, GraphType};
use crate::spec::{
    ControlKind, ControlSpec, InitialState, Marks, SequenceSpec, SequenceStrategy, StateSpec,
};

/// Triton's `max_sequence_idle_microseconds` where none is given.
const DEFAULT_IDLE_MICROS: u64 = 1_000_000;
/// An initial state larger than this is a slip of the keyboard.
const MAX_STATE_BYTES: u64 = 1 << 30;

/// Fills in what Triton fills in.
pub(super) fn complete(batching: &mut ModelSequenceBatching, max_batch_size: i32) {
    if batching.max_sequence_idle_microseconds == 0 {
        batching.max_sequence_idle_microseconds = DEFAULT_IDLE_MICROS;
    }
    match &mut batching.strategy_choice {
        Some(StrategyChoice::Oldest(oldest)) => {
            if oldest.preferred_batch_size.is_empty() && max_batch_size > 0 {
                oldest.preferred_batch_size.push(max_batch_size);
            }
        }
        Some(StrategyChoice::Direct(_)) => {}
        None => {
            batching.strategy_choice = Some(StrategyChoice::Direct(StrategyDirect::default()));
        }
    }
}

/// The model's `sequence_batching`, checked.
pub(super) fn read(
    model: &Arc<str>,
    config: &pb::ModelConfig,
    graph: &GraphSummary,
) -> Result<Option<SequenceSpec>, ConfigError> {
    let Some(SchedulingChoice::SequenceBatching(batching)) = &config.scheduling_choice else {
        return Ok(None);
    };
    let reader = Reader {
        model,
        config,
        graph,
    };
    Ok(Some(SequenceSpec {
        strategy: reader.strategy(batching)?,
        max_idle: Duration::from_micros(batching.max_sequence_idle_microseconds),
        controls: reader.controls(batching)?,
        states: reader.states(batching)?,
    }))
}

struct Reader<'a> {
    model: &'a Arc<str>,
    config: &'a pb::ModelConfig,
    graph: &'a GraphSummary,
}

impl Reader<'_> {
    fn strategy(&self, batching: &ModelSequenceBatching) -> Result<SequenceStrategy, ConfigError> {
        let max_rows = u32::try_from(self.config.max_batch_size)
            .unwrap_or(0)
            .max(1);
        match &batching.strategy_choice {
            None => Ok(SequenceStrategy::Direct {
                max_delay: Duration::ZERO,
                min_utilization: 0.0,
            }),
            Some(StrategyChoice::Direct(direct)) => {
                let utilization = direct.minimum_slot_utilization;
                if !(0.0..=1.0).contains(&utilization) {
                    let field = "direct.minimum_slot_utilization";
                    return Err(self.invalid(field, "0 to 1", utilization.to_string()));
                }
                Ok(SequenceStrategy::Direct {
                    max_delay: Duration::from_micros(direct.max_queue_delay_microseconds),
                    min_utilization: utilization,
                })
            }
            Some(StrategyChoice::Oldest(oldest)) => {
                let candidates = u32::try_from(oldest.max_candidate_sequences).map_err(|_| {
                    let found = oldest.max_candidate_sequences.to_string();
                    self.invalid("oldest.max_candidate_sequences", "0 or more", found)
                })?;
                let preferred_rows = oldest.preferred_batch_size.iter().map(|&size| {
                    let rows = u32::try_from(size).ok();
                    rows.filter(|rows| (1..=max_rows).contains(rows))
                        .ok_or_else(|| {
                            let expected = format!("sizes from 1 to max_batch_size {max_rows}");
                            let field = "oldest.preferred_batch_size";
                            self.invalid(field, &expected, size.to_string())
                        })
                });
                Ok(SequenceStrategy::Oldest {
                    candidates: match candidates {
                        0 => max_rows,
                        candidates => candidates,
                    },
                    preferred_rows: preferred_rows.collect::<Result<_, _>>()?,
                    max_delay: Duration::from_micros(oldest.max_queue_delay_microseconds),
                    preserve_ordering: oldest.preserve_ordering,
                })
            }
        }
    }

    fn controls(&self, batching: &ModelSequenceBatching) -> Result<Vec<ControlSpec>, ConfigError> {
        let mut names = HashSet::new();
        let mut kinds = HashSet::new();
        let controls = batching.control_input.iter().map(|input| {
            if input.name.is_empty() {
                return Err(self.invalid("control_input.name", "a name", "none".to_owned()));
            }
            if !names.insert(input.name.as_str()) {
                let found = format!("'{}' twice", input.name);
                return Err(self.invalid("control_input", "every name once", found));
            }
            let field = format!("control_input '{}'", input.name);
            let [control] = &input.control[..] else {
                let found = input.control.len().to_string();
                return Err(self.invalid(&field, "one control", found));
            };
            if !kinds.insert(control.kind) {
                let found = format!("{} twice", control.kind().as_str_name());
                return Err(self.invalid("control_input", "every kind of control once", found));
            }
            let (datatype, kind) = self.control(&field, control)?;
            let tensor = self.tensor(&field, &self.graph.inputs, &input.name, datatype)?;
            self.check_dims(&field, tensor, &[1])?;
            Ok(ControlSpec {
                name: input.name.as_str().into(),
                datatype,
                kind,
            })
        });
        controls.collect()
    }

    fn control(
        &self,
        field: &str,
        control: &Control,
    ) -> Result<(DataType, ControlKind), ConfigError> {
        let Ok(kind) = Kind::try_from(control.kind) else {
            return Err(self.invalid(field, "a kind of control", control.kind.to_string()));
        };
        let bytes = |values: [[u8; 4]; 2]| {
            let [no, yes] = values.map(Vec::from);
            Marks { no, yes }
        };
        let marks = match (
            &control.int32_false_true[..],
            &control.fp32_false_true[..],
            &control.bool_false_true[..],
        ) {
            ([], [], []) => None,
            (&[no, yes], [], []) => Some((DataType::Int32, bytes([no, yes].map(i32::to_le_bytes)))),
            ([], &[no, yes], []) => Some((DataType::Fp32, bytes([no, yes].map(f32::to_le_bytes)))),
            ([], [], &[no, yes]) => {
                let marks = Marks {
                    no: vec![no.into()],
                    yes: vec![yes.into()],
                };
                Some((DataType::Bool, marks))
            }
            _ => {
                let expected = "one of int32_false_true, fp32_false_true and bool_false_true, \
                                with two values";
                return Err(self.invalid(field, expected, "others".to_owned()));
            }
        };
        match (kind, marks) {
            (Kind::ControlSequenceCorrid, None) => {
                let known = [
                    DataType::Uint64,
                    DataType::Int64,
                    DataType::Uint32,
                    DataType::Int32,
                    DataType::Bytes,
                ];
                match datatype(control.data_type).filter(|given| known.contains(given)) {
                    Some(datatype) => Ok((datatype, ControlKind::CorrelationId)),
                    None => {
                        let expected = "TYPE_UINT64, TYPE_INT64, TYPE_UINT32, TYPE_INT32 or \
                                        TYPE_STRING";
                        let field = format!("{field} data_type");
                        Err(self.invalid(&field, expected, shown_type(control.data_type)))
                    }
                }
            }
            (Kind::ControlSequenceCorrid, Some(_)) => {
                let expected = "a data_type for CONTROL_SEQUENCE_CORRID";
                Err(self.invalid(field, expected, "false and true values".to_owned()))
            }
            (_, None) => {
                let expected = "int32_false_true, fp32_false_true or bool_false_true";
                Err(self.invalid(field, expected, "none".to_owned()))
            }
            (_, Some(_)) if control.data_type != 0 => {
                let expected = "no data_type, which only CONTROL_SEQUENCE_CORRID has";
                Err(self.invalid(field, expected, shown_type(control.data_type)))
            }
            (Kind::ControlSequenceStart, Some((datatype, marks))) => {
                Ok((datatype, ControlKind::Start(marks)))
            }
            (Kind::ControlSequenceEnd, Some((datatype, marks))) => {
                Ok((datatype, ControlKind::End(marks)))
            }
            (Kind::ControlSequenceReady, Some((datatype, marks))) => {
                Ok((datatype, ControlKind::Ready(marks)))
            }
        }
    }

    fn states(&self, batching: &ModelSequenceBatching) -> Result<Vec<StateSpec>, ConfigError> {
        let mut names = HashSet::new();
        let states = batching.state.iter().map(|state| {
            for name in [&state.input_name, &state.output_name] {
                if name.is_empty() {
                    return Err(self.invalid(
                        "state",
                        "input_name and output_name",
                        "none".to_owned(),
                    ));
                }
            }
            if !names.insert(&state.input_name) {
                let found = format!("'{}' twice", state.input_name);
                return Err(self.invalid("state", "every input_name once", found));
            }
            self.state(state)
        });
        states.collect()
    }

    fn state(&self, state: &State) -> Result<StateSpec, ConfigError> {
        let field = format!("state '{}'", state.input_name);
        let Some(datatype) = datatype(state.data_type) else {
            let found = shown_type(state.data_type);
            return Err(self.invalid(&format!("{field} data_type"), "an element type", found));
        };
        if state.dims.is_empty() || state.dims.iter().any(|&dim| dim < 1 && dim != -1) {
            let found = DisplayShape(&state.dims).to_string();
            let expected = "sizes from 1, or -1 for any";
            return Err(self.invalid(&format!("{field} dims"), expected, found));
        }
        let input = self.tensor(&field, &self.graph.inputs, &state.input_name, datatype)?;
        self.check_dims(&field, input, &state.dims)?;
        let output = self.tensor(&field, &self.graph.outputs, &state.output_name, datatype)?;
        self.check_dims(&field, output, &state.dims)?;
        let initial = self.initial(&field, state, datatype)?;
        let bytes = element_count(&initial.dims).and_then(|count| {
            let size = datatype.element_size().unwrap_or(4);
            count.checked_mul(size as u64)
        });
        if bytes.is_none_or(|bytes| bytes > MAX_STATE_BYTES) {
            let expected = format!("at most {MAX_STATE_BYTES} bytes to begin with");
            let found = DisplayShape(&initial.dims).to_string();
            return Err(self.invalid(&format!("{field} dims"), &expected, found));
        }
        Ok(StateSpec {
            input: state.input_name.as_str().into(),
            output: state.output_name.as_str().into(),
            datatype,
            dims: Shape::from_slice(&state.dims),
            initial,
        })
    }

    fn initial(
        &self,
        field: &str,
        state: &State,
        datatype: DataType,
    ) -> Result<InitialState, ConfigError> {
        let field = format!("{field} initial_state");
        let initial = match &state.initial_state[..] {
            // As in Triton, zeros, and an open dimension is 1.
            [] => {
                return Ok(InitialState {
                    dims: state.dims.iter().map(|&dim| dim.max(1)).collect(),
                    file: None,
                });
            }
            [initial] => initial,
            several => {
                return Err(self.invalid(&field, "one at most", several.len().to_string()));
            }
        };
        if initial.name.is_empty() {
            return Err(self.invalid(&format!("{field}.name"), "a name", "none".to_owned()));
        }
        if super::tensors::datatype(initial.data_type) != Some(datatype) {
            let expected = format!("the state's {}", wire_type(datatype).as_str_name());
            let found = shown_type(initial.data_type);
            return Err(self.invalid(&format!("{field}.data_type"), &expected, found));
        }
        let fits = initial.dims.len() == state.dims.len()
            && initial
                .dims
                .iter()
                .zip(&state.dims)
                .all(|(&given, &of_state)| given >= 0 && (of_state == -1 || given == of_state));
        if !fits {
            let expected = format!("sizes that fit {}", DisplayShape(&state.dims));
            let found = DisplayShape(&initial.dims).to_string();
            return Err(self.invalid(&format!("{field}.dims"), &expected, found));
        }
        let file = match &initial.state_data {
            Some(StateData::ZeroData(_)) => None,
            Some(StateData::DataFile(file)) if stays_inside(file) => Some(file.clone()),
            Some(StateData::DataFile(file)) => {
                let expected = "a path inside the model's initial_state folder";
                let found = format!("'{file}'");
                return Err(self.invalid(&format!("{field}.data_file"), expected, found));
            }
            None => {
                let expected = "zero_data or data_file";
                return Err(self.invalid(&field, expected, "none".to_owned()));
            }
        };
        Ok(InitialState {
            dims: Shape::from_slice(&initial.dims),
            file,
        })
    }

    /// A tensor of the graph, of the type that the configuration gives it.
    fn tensor<'a>(
        &self,
        field: &str,
        tensors: &'a [GraphTensor],
        name: &str,
        datatype: DataType,
    ) -> Result<&'a GraphTensor, ConfigError> {
        let Some(tensor) = tensors.iter().find(|tensor| tensor.name == name) else {
            let names: Vec<_> = tensors.iter().map(|tensor| tensor.name.as_str()).collect();
            let expected = format!("one of the graph's tensors {names:?}");
            return Err(self.invalid(field, &expected, format!("'{name}'")));
        };
        if tensor.kind == GraphType::Tensor(datatype) {
            return Ok(tensor);
        }
        let expected = match tensor.kind {
            GraphType::Tensor(of_graph) => wire_type(of_graph).as_str_name(),
            GraphType::Other(_) => "a tensor in the graph",
        };
        let found = wire_type(datatype).as_str_name().to_owned();
        Err(self.invalid(&format!("{field} type of '{name}'"), expected, found))
    }

    /// Compares with the graph's shape, as far as it tells one.
    fn check_dims(
        &self,
        field: &str,
        tensor: &GraphTensor,
        dims: &[i64],
    ) -> Result<(), ConfigError> {
        let Some(graph_dims) = &tensor.dims else {
            return Ok(());
        };
        let batch = (self.config.max_batch_size > 0).then_some(-1);
        let full: Shape = batch.into_iter().chain(dims.iter().copied()).collect();
        let fits = full.len() == graph_dims.len()
            && full
                .iter()
                .zip(graph_dims)
                .all(|(&given, &of_graph)| given == of_graph || given == -1 || of_graph == -1);
        let rows_open = batch.is_none() || graph_dims.first() == Some(&-1);
        if fits && rows_open {
            return Ok(());
        }
        let field = format!("{field} shape of '{}'", tensor.name);
        let expected = format!("{}, which the graph has", DisplayShape(graph_dims));
        Err(self.invalid(&field, &expected, DisplayShape(&full).to_string()))
    }

    fn invalid(&self, field: &str, expected: &str, found: String) -> ConfigError {
        ConfigError::Invalid {
            model: self.model.clone(),
            field: format!("sequence_batching.{field}"),
            expected: expected.to_owned(),
            found,
        }
    }
}
