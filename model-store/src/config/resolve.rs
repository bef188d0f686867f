//! From a configuration and a graph to a model's specification.

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::Arc;

use dormouse_proto::inference as pb;

use super::complete::{AutoComplete, BACKEND, PLATFORM, complete};
use super::error::{ConfigError, ConfigSyntaxError};
use super::tensors::Signature;
use super::warmup::{Warmups, stays_inside};
use super::{json, parameters, ragged, scheduling, sequence, text, unsupported};
use crate::graph::GraphSummary;
use crate::spec::ModelSpec;

/// What the server assumes where a configuration is silent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigDefaults {
    pub auto_complete: bool,
    /// Given to a model that can be batched and whose configuration says nothing about it.
    pub default_max_batch_size: u32,
    /// None: the shared thread pool.
    pub intra_op_threads: Option<u32>,
    pub inter_op_threads: Option<u32>,
    /// The server keeps answers of models that ask for it.
    pub response_cache: bool,
}

impl Default for ConfigDefaults {
    fn default() -> Self {
        let auto = AutoComplete::default();
        Self {
            auto_complete: auto.enabled,
            default_max_batch_size: auto.default_max_batch_size,
            intra_op_threads: None,
            inter_op_threads: None,
            response_cache: false,
        }
    }
}

/// A model as it was found.
#[derive(Debug)]
pub struct ResolveInput<'a> {
    /// The name of the model's folder.
    pub name: Arc<str>,
    /// As its owner wrote it; empty when there is no configuration.
    pub config: pb::ModelConfig,
    /// Of the newest version that is served.
    pub graph: &'a GraphSummary,
    pub defaults: &'a ConfigDefaults,
}

/// Reads a model's configuration: the override of a load request if there is one, else the text
/// of `config.pbtxt`, else an empty one.
pub fn read(
    config_text: Option<&str>,
    override_json: Option<&str>,
) -> Result<pb::ModelConfig, ConfigSyntaxError> {
    match (override_json, config_text) {
        (Some(override_json), _) => json::from_json(override_json),
        (None, Some(config_text)) => text::parse(config_text),
        (None, None) => Ok(pb::ModelConfig::default()),
    }
}

/// Completes a configuration, holds it against the graph, and says what the model is.
pub fn resolve(input: ResolveInput<'_>) -> Result<ModelSpec, ConfigError> {
    let ResolveInput {
        name: model,
        mut config,
        graph,
        defaults,
    } = input;
    check_name(&model, &config)?;
    let mut warnings = unsupported::check(&model, &config)?;
    warnings.extend(graph.warnings.iter().cloned());
    if config.response_cache.is_some_and(|cache| cache.enable) && !defaults.response_cache {
        let why = "the server keeps no answers (--cache-config)";
        warnings.push(format!("response_cache has no effect: {why}"));
    }
    check_backend(&model, &config)?;
    let auto = AutoComplete {
        enabled: defaults.auto_complete,
        default_max_batch_size: defaults.default_max_batch_size,
    };
    let says_count = config.instance_group.iter().any(|group| group.count > 0);
    warnings.extend(complete(&model, &mut config, graph, auto));

    let max_batch_size = u32::try_from(config.max_batch_size).map_err(|_| {
        let found = config.max_batch_size.to_string();
        invalid(&model, "max_batch_size", "0 or more", found)
    })?;
    if !stays_inside(&config.default_model_filename) {
        let found = format!("'{}'", config.default_model_filename);
        let expected = "a path inside the version's folder";
        return Err(invalid(&model, "default_model_filename", expected, found));
    }
    check_version_policy(&model, &config)?;
    let signature = Signature {
        model: &model,
        config: &config,
        graph,
    };
    let (inputs, outputs) = (signature.inputs()?, signature.outputs()?);
    let read = parameters::read(&model, &config, defaults)?;
    warnings.extend(read.warnings);
    let batching = scheduling::dynamic_batching(&model, &config)?;
    let sequence = sequence::read(&model, &config, graph)?;
    let ragged = ragged::read(&signature, &inputs, &outputs)?;
    // A graph for ragged batches tells the requests apart by itself.
    let coupling = graph
        .batch_coupling
        .first()
        .filter(|_| !read.force_batching && ragged.is_none());
    let forms_batches = batching.is_some() || sequence.is_some();
    let runs_rows_together = forms_batches && max_batch_size > 1 && coupling.is_none();
    if let (true, Some(reason)) = (forms_batches, coupling) {
        let field = match sequence {
            None => "dynamic_batching",
            Some(_) => "sequence_batching",
        };
        warnings.push(format!(
            "{field} forms no batches: {reason}; each request runs alone (set parameter \
             'dormouse.batching' to 'force' to batch all the same)"
        ));
    }
    let warmups = Warmups {
        model: &model,
        max_batch_size,
        inputs: &inputs,
    }
    .read(&config.model_warmup, &mut warnings)?;

    Ok(ModelSpec {
        platform: config.platform.as_str().into(),
        inputs,
        outputs,
        max_batch_size,
        batching,
        sequence,
        ragged: ragged.map(Arc::new),
        runs_rows_together,
        concurrency: scheduling::concurrency(&model, &config.instance_group)?,
        concurrency_is_default: !says_count,
        session: read.session,
        warmups,
        lifecycle: read.lifecycle,
        decoupled: config
            .model_transaction_policy
            .is_some_and(|policy| policy.decoupled),
        model_filename: config.default_model_filename.clone(),
        labels: BTreeMap::new(),
        warnings,
        name: model,
        config,
    })
}

fn invalid(model: &Arc<str>, field: &str, expected: &str, found: String) -> ConfigError {
    ConfigError::Invalid {
        model: model.clone(),
        field: field.to_owned(),
        expected: expected.to_owned(),
        found,
    }
}

fn check_name(model: &Arc<str>, config: &pb::ModelConfig) -> Result<(), ConfigError> {
    if config.name.is_empty() || config.name == **model {
        return Ok(());
    }
    Err(ConfigError::Name {
        model: model.clone(),
        found: config.name.clone(),
    })
}

fn check_backend(model: &Arc<str>, config: &pb::ModelConfig) -> Result<(), ConfigError> {
    let unsupported = |backend: &str| ConfigError::Backend {
        model: model.clone(),
        backend: backend.to_owned(),
    };
    match (config.backend.as_str(), config.platform.as_str()) {
        ("" | BACKEND, "" | PLATFORM) => Ok(()),
        ("", platform) => Err(unsupported(platform)),
        (BACKEND, platform) => Err(invalid(
            model,
            "platform",
            "'onnxruntime_onnx' with backend 'onnxruntime'",
            format!("'{platform}'"),
        )),
        (backend, _) => Err(unsupported(backend)),
    }
}

fn check_version_policy(model: &Arc<str>, config: &pb::ModelConfig) -> Result<(), ConfigError> {
    use pb::model_version_policy::PolicyChoice;
    let policy = config.version_policy.as_ref();
    let Some(PolicyChoice::Specific(specific)) = policy.and_then(|p| p.policy_choice.as_ref())
    else {
        return Ok(());
    };
    let field = "version_policy.specific.versions";
    match specific.versions.iter().find(|&&version| version < 1) {
        Some(version) => Err(invalid(
            model,
            field,
            "versions from 1",
            version.to_string(),
        )),
        None if specific.versions.is_empty() => Err(invalid(
            model,
            field,
            "at least one version",
            "none".to_owned(),
        )),
        None => Ok(()),
    }
}
