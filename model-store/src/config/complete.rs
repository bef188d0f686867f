//! Fills in what a configuration leaves out, by the rules of Triton's ONNX Runtime backend.

use std::sync::Arc;

use dormouse_proto::inference as pb;
use pb::model_config::SchedulingChoice;
use pb::model_instance_group::Kind;
use pb::model_version_policy::{Latest, PolicyChoice};

use super::made::{Made, made};
use super::tensors::wire_type;
use crate::graph::{GraphSummary, GraphTensor, GraphType};

pub(super) const BACKEND: &str = "onnxruntime";
pub(super) const PLATFORM: &str = "onnxruntime_onnx";
const MODEL_FILENAME: &str = "model.onnx";
/// Triton runs an ONNX model twice side by side on a CPU unless told otherwise.
const CPU_INSTANCES: i32 = 2;

/// Whether, and how, a configuration is completed from the graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AutoComplete {
    pub enabled: bool,
    /// Given to a model that can be batched and whose configuration says nothing about it.
    pub default_max_batch_size: u32,
}

impl Default for AutoComplete {
    fn default() -> Self {
        Self {
            enabled: true,
            default_max_batch_size: 4,
        }
    }
}

/// Completes a configuration in place and returns what its owner should know about it.
///
/// Identity, version policy and instance groups are always filled in; tensors, batch size and
/// batching only when `auto.enabled`.
pub fn complete(
    name: &Arc<str>,
    config: &mut pb::ModelConfig,
    graph: &GraphSummary,
    auto: AutoComplete,
) -> Vec<String> {
    let mut warnings = Vec::new();
    if config.name.is_empty() {
        config.name = name.to_string();
    }
    complete_identity(config);
    if auto.enabled {
        let (had_inputs, had_outputs) = (!config.input.is_empty(), !config.output.is_empty());
        // As in Triton, a signature given in full is not second-guessed: its dims may well hold
        // the batch dimension.
        if !(had_inputs && had_outputs) {
            complete_batching(config, graph, auto.default_max_batch_size);
        }
        complete_inputs(config, graph);
        complete_outputs(config, graph, &mut warnings);
    }
    normalize(config);
    warnings
}

fn complete_identity(config: &mut pb::ModelConfig) {
    if config.backend.is_empty() && ["", PLATFORM].contains(&config.platform.as_str()) {
        config.backend = BACKEND.to_owned();
    }
    if config.backend != BACKEND {
        return;
    }
    if config.platform.is_empty() {
        config.platform = PLATFORM.to_owned();
    }
    if config.default_model_filename.is_empty() {
        config.default_model_filename = MODEL_FILENAME.to_owned();
    }
}

fn complete_batching(config: &mut pb::ModelConfig, graph: &GraphSummary, default: u32) {
    if !can_be_batched(graph) {
        return;
    }
    if config.max_batch_size == 0 && !lists_batch_dimension(config, graph) {
        config.max_batch_size = i32::try_from(default).unwrap_or(i32::MAX);
    }
    if config.max_batch_size > 1 && config.scheduling_choice.is_none() {
        config.scheduling_choice = Some(SchedulingChoice::DynamicBatching(Default::default()));
    }
}

/// Whether every tensor that can cross the wire has an open first dimension.
fn can_be_batched(graph: &GraphSummary) -> bool {
    let open = |tensor: &GraphTensor| {
        let first = tensor.dims.as_ref().and_then(|dims| dims.first());
        first == Some(&-1)
    };
    !graph.inputs.is_empty()
        && graph.inputs.iter().all(open)
        && expressible(&graph.outputs).all(open)
}

/// Whether a tensor that the user did describe has as many dims as the graph's, and so already
/// counts the batch dimension among them.
fn lists_batch_dimension(config: &pb::ModelConfig, graph: &GraphSummary) -> bool {
    let inputs = config.input.iter().map(|input| {
        let reshape = input.reshape.as_ref().map(|reshape| &reshape.shape);
        (&input.name, reshape.unwrap_or(&input.dims), &graph.inputs)
    });
    let outputs = config.output.iter().map(|output| {
        let reshape = output.reshape.as_ref().map(|reshape| &reshape.shape);
        (
            &output.name,
            reshape.unwrap_or(&output.dims),
            &graph.outputs,
        )
    });
    inputs.chain(outputs).any(|(name, dims, tensors)| {
        let tensor = tensors.iter().find(|tensor| tensor.name == *name);
        let rank = tensor
            .and_then(|tensor| tensor.dims.as_ref())
            .map(|d| d.len());
        !dims.is_empty() && rank == Some(dims.len())
    })
}

fn expressible(tensors: &[GraphTensor]) -> impl Iterator<Item = &GraphTensor> {
    tensors
        .iter()
        .filter(|tensor| matches!(tensor.kind, GraphType::Tensor(_)))
}

fn complete_inputs(config: &mut pb::ModelConfig, graph: &GraphSummary) {
    // As in Triton, initializers that are graph inputs as well are offered only when they are
    // listed: some exporters make graph inputs of all weights, and clients count on the inputs
    // that metadata shows.
    if config.input.is_empty() {
        let Made { inputs, .. } = made(config);
        let given = graph.inputs.iter();
        let given = given.filter(|tensor| !inputs.contains(tensor.name.as_str()));
        config.input = given.map(named_input).collect();
    }
    let batched = config.max_batch_size > 0;
    for input in &mut config.input {
        let tensors = || graph.inputs.iter().chain(&graph.optional_inputs);
        let Some(tensor) = tensors().find(|tensor| tensor.name == input.name) else {
            continue;
        };
        complete_type(&mut input.data_type, tensor);
        if input.dims.is_empty() && input.reshape.is_none() {
            (input.dims, input.reshape) = graph_dims(tensor, batched);
        }
    }
}

fn named_input(tensor: &GraphTensor) -> pb::ModelInput {
    pb::ModelInput {
        name: tensor.name.clone(),
        ..Default::default()
    }
}

fn complete_outputs(
    config: &mut pb::ModelConfig,
    graph: &GraphSummary,
    warnings: &mut Vec<String>,
) {
    if config.output.is_empty() {
        let kept = made(config).outputs;
        let shown = |tensor: &&GraphTensor| !kept.contains(tensor.name.as_str());
        let any_shown = graph.outputs.iter().any(|tensor| shown(&tensor));
        // States are the server's, unless there is nothing else to answer.
        let tensors = graph.outputs.iter();
        let tensors: Vec<_> = tensors
            .filter(|tensor| !any_shown || shown(tensor))
            .collect();
        for tensor in tensors {
            // A classifier's list of maps beside its tensor of labels must not make the labels
            // unreachable.
            if let GraphType::Other(kind) = tensor.kind {
                warnings.push(format!(
                    "output: '{}' is of type {kind}, which the v2 protocol cannot carry; it is \
                     left out",
                    tensor.name
                ));
                continue;
            }
            config.output.push(pb::ModelOutput {
                name: tensor.name.clone(),
                ..Default::default()
            });
        }
    }
    let batched = config.max_batch_size > 0;
    for output in &mut config.output {
        let Some(tensor) = graph
            .outputs
            .iter()
            .find(|tensor| tensor.name == output.name)
        else {
            continue;
        };
        complete_type(&mut output.data_type, tensor);
        if !output.dims.is_empty() || output.reshape.is_some() {
            continue;
        }
        (output.dims, output.reshape) = graph_dims(tensor, batched);
        if tensor.dims.is_none() {
            output.dims = vec![-1];
            warnings.push(format!(
                "output: the graph does not tell the rank of '{}'; its dims are shown as [-1]",
                tensor.name
            ));
        }
    }
}

fn complete_type(data_type: &mut i32, tensor: &GraphTensor) {
    if let (0, GraphType::Tensor(datatype)) = (*data_type, tensor.kind) {
        *data_type = wire_type(datatype).into();
    }
}

/// The `dims` and `reshape` that describe a tensor of the graph; no dims when it tells no rank.
fn graph_dims(tensor: &GraphTensor, batched: bool) -> (Vec<i64>, Option<pb::ModelTensorReshape>) {
    let Some(dims) = &tensor.dims else {
        return (Vec::new(), None);
    };
    let dims = dims.iter().skip(usize::from(batched)).copied();
    // A configuration has no word for a dimension that is always empty: it is shown as open.
    let dims: Vec<i64> = dims.map(|dim| if dim == 0 { -1 } else { dim }).collect();
    if !dims.is_empty() {
        return (dims, None);
    }
    // `dims` cannot be empty in a configuration: a single value is [1], and what the graph is
    // given has no dimension beside the batch's.
    (vec![1], batched.then(Default::default))
}

/// Defaults that do not depend on the graph.
fn normalize(config: &mut pb::ModelConfig) {
    config.version_policy.get_or_insert(pb::ModelVersionPolicy {
        policy_choice: Some(PolicyChoice::Latest(Latest { num_versions: 1 })),
    });
    if let Some(SchedulingChoice::DynamicBatching(batching)) = &mut config.scheduling_choice
        && batching.preferred_batch_size.is_empty()
        && config.max_batch_size > 0
    {
        batching.preferred_batch_size.push(config.max_batch_size);
    }
    if let Some(SchedulingChoice::SequenceBatching(batching)) = &mut config.scheduling_choice {
        super::sequence::complete(batching, config.max_batch_size);
    }
    if matches!(
        config.scheduling_choice,
        Some(SchedulingChoice::EnsembleScheduling(_))
    ) {
        return;
    }
    let pinned = || pb::model_optimization_policy::PinnedMemoryBuffer { enable: true };
    let optimization = config.optimization.get_or_insert_default();
    optimization.input_pinned_memory.get_or_insert_with(pinned);
    optimization.output_pinned_memory.get_or_insert_with(pinned);
    complete_instance_groups(config);
}

fn complete_instance_groups(config: &mut pb::ModelConfig) {
    if config.instance_group.is_empty() {
        config.instance_group.push(pb::ModelInstanceGroup {
            name: config.name.clone(),
            ..Default::default()
        });
    }
    for (index, group) in config.instance_group.iter_mut().enumerate() {
        if group.name.is_empty() {
            group.name = format!("{}_{index}", config.name);
        }
        if group.kind == Kind::Auto as i32 {
            group.set_kind(Kind::Cpu);
        }
        if group.count < 1 {
            group.count = if group.kind() == Kind::Cpu {
                CPU_INSTANCES
            } else {
                1
            };
        }
    }
}
