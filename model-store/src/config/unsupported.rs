//! Fields that are read but cannot apply here: one warning each, or an error where ignoring the
//! field would change answers.

use std::sync::Arc;

use dormouse_proto::inference as pb;
use pb::model_config::SchedulingChoice;
use pb::model_instance_group::Kind;
use pb::model_metrics::metric_control::MetricOptions;

use super::error::ConfigError;

const CPU_ONLY: &str = "the model runs on the CPU";

/// Looks at a configuration as its owner wrote it, before it is completed.
pub(super) fn check(
    model: &Arc<str>,
    config: &pb::ModelConfig,
) -> Result<Vec<String>, ConfigError> {
    refuse_what_changes_answers(model, config)?;
    check_metrics(model, config)?;
    let mut warnings = Vec::new();
    let mut warn = |set: bool, field: &str, why: &str| {
        if set {
            warnings.push(format!("{field} has no effect: {why}"));
        }
    };
    let any_input = |set: fn(&pb::ModelInput) -> bool| config.input.iter().any(set);
    let any_output = |set: fn(&pb::ModelOutput) -> bool| config.output.iter().any(set);
    warn(
        !config.runtime.is_empty(),
        "runtime",
        "there is one runtime",
    );
    warn(
        any_input(|input| input.format != 0),
        "input.format",
        "tensors are passed on as they come",
    );
    warn(
        any_input(|input| input.is_shape_tensor) || any_output(|output| output.is_shape_tensor),
        "is_shape_tensor",
        "it is for TensorRT models",
    );
    warn(
        any_input(|input| input.is_non_linear_format_io)
            || any_output(|output| output.is_non_linear_format_io),
        "is_non_linear_format_io",
        "it is for TensorRT models",
    );
    warn(
        !config.cc_model_filenames.is_empty(),
        "cc_model_filenames",
        CPU_ONLY,
    );
    warn(
        !config.metric_tags.is_empty(),
        "metric_tags",
        "metrics carry model and version only",
    );
    warn(
        config.model_repository_agents.is_some(),
        "model_repository_agents",
        "agents are not supported",
    );
    warn(
        config.model_metrics.is_some(),
        "model_metrics",
        "histogram buckets are fixed",
    );
    instance_group_warnings(&config.instance_group, &mut warn);
    if let Some(optimization) = &config.optimization {
        optimization_warnings(optimization, &mut warn);
    }
    Ok(warnings)
}

fn refuse_what_changes_answers(
    model: &Arc<str>,
    config: &pb::ModelConfig,
) -> Result<(), ConfigError> {
    let refuse = |set: bool, field: &str, reason: &str| match set {
        false => Ok(()),
        true => Err(ConfigError::Unsupported {
            model: model.clone(),
            field: field.to_owned(),
            reason: reason.to_owned(),
        }),
    };
    let choice = config.scheduling_choice.as_ref();
    refuse(
        matches!(
            choice,
            Some(SchedulingChoice::SequenceBatching(batching)) if batching.iterative_sequence
        ),
        "sequence_batching.iterative_sequence",
        "an ONNX graph cannot ask to be run again",
    )?;
    refuse(
        matches!(choice, Some(SchedulingChoice::EnsembleScheduling(_)))
            || config.platform == "ensemble",
        "ensemble_scheduling",
        "its steps would not be run",
    )?;
    refuse(
        config
            .model_operations
            .as_ref()
            .is_some_and(|operations| !operations.op_library_filename.is_empty()),
        "model_operations",
        "libraries of custom operators are not loaded",
    )
}

fn instance_group_warnings(
    groups: &[pb::ModelInstanceGroup],
    warn: &mut impl FnMut(bool, &str, &str),
) {
    let any = |set: fn(&pb::ModelInstanceGroup) -> bool| groups.iter().any(set);
    warn(
        any(|group| group.kind() == Kind::Gpu),
        "instance_group.kind KIND_GPU",
        CPU_ONLY,
    );
    warn(
        any(|group| group.rate_limiter.is_some()),
        "instance_group.rate_limiter",
        "runs are limited by count only",
    );
    warn(
        any(|group| !group.secondary_devices.is_empty()),
        "instance_group.secondary_devices",
        CPU_ONLY,
    );
    warn(
        any(|group| !group.profile.is_empty()),
        "instance_group.profile",
        "it is for TensorRT models",
    );
    warn(
        any(|group| group.passive),
        "instance_group.passive",
        "every instance serves requests",
    );
    warn(
        any(|group| !group.host_policy.is_empty()),
        "instance_group.host_policy",
        "threads are not bound to parts of the host",
    );
}

fn optimization_warnings(
    optimization: &pb::ModelOptimizationPolicy,
    warn: &mut impl FnMut(bool, &str, &str),
) {
    let field = |name: &str| format!("optimization.{name}");
    warn(
        optimization.priority != 0,
        &field("priority"),
        "it is for TensorRT models",
    );
    warn(optimization.cuda.is_some(), &field("cuda"), CPU_ONLY);
    warn(
        optimization
            .execution_accelerators
            .as_ref()
            .is_some_and(|accelerators| {
                !accelerators.gpu_execution_accelerator.is_empty()
                    || !accelerators.cpu_execution_accelerator.is_empty()
            }),
        &field("execution_accelerators"),
        "the engine's own CPU kernels run the model",
    );
    warn(
        optimization.input_pinned_memory.is_some(),
        &field("input_pinned_memory"),
        CPU_ONLY,
    );
    warn(
        optimization.output_pinned_memory.is_some(),
        &field("output_pinned_memory"),
        CPU_ONLY,
    );
    warn(
        optimization.gather_kernel_buffer_threshold != 0,
        &field("gather_kernel_buffer_threshold"),
        CPU_ONLY,
    );
    warn(
        optimization.eager_batching,
        &field("eager_batching"),
        "batches are gathered when they run",
    );
}

fn check_metrics(model: &Arc<str>, config: &pb::ModelConfig) -> Result<(), ConfigError> {
    let controls = config
        .model_metrics
        .iter()
        .flat_map(|metrics| &metrics.metric_control);
    for control in controls {
        let invalid = |field: &str, expected: &str| ConfigError::Invalid {
            model: model.clone(),
            field: format!("model_metrics.metric_control.{field}"),
            expected: expected.to_owned(),
            found: "none".to_owned(),
        };
        let family = control
            .metric_identifier
            .as_ref()
            .map(|id| id.family.as_str());
        if family.unwrap_or_default().is_empty() {
            return Err(invalid("metric_identifier.family", "a metric's name"));
        }
        match &control.metric_options {
            Some(MetricOptions::HistogramOptions(options)) if !options.buckets.is_empty() => {}
            _ => return Err(invalid("histogram_options.buckets", "at least one bound")),
        }
    }
    Ok(())
}
