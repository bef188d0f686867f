//! Batching, queues and how many runs of a model go side by side.

use std::sync::Arc;
use std::time::Duration;

use dormouse_proto::inference as pb;
use pb::model_config::SchedulingChoice;
use pb::model_instance_group::Kind;
use pb::model_queue_policy::TimeoutAction;

use super::error::ConfigError;
use crate::spec::{DynamicBatchingSpec, QueuePolicySpec};

/// Every level has a queue of its own.
const MAX_PRIORITY_LEVELS: u64 = 1000;
/// Beyond this, a count is a slip of the keyboard.
const MAX_CONCURRENCY: u32 = 4096;

fn invalid(model: &Arc<str>, field: &str, expected: String, found: String) -> ConfigError {
    ConfigError::Invalid {
        model: model.clone(),
        field: field.to_owned(),
        expected,
        found,
    }
}

/// The model's `dynamic_batching`, checked.
pub(super) fn dynamic_batching(
    model: &Arc<str>,
    config: &pb::ModelConfig,
) -> Result<Option<DynamicBatchingSpec>, ConfigError> {
    let Some(SchedulingChoice::DynamicBatching(batching)) = &config.scheduling_choice else {
        return Ok(None);
    };
    let preferred_rows = preferred_rows(model, config, &batching.preferred_batch_size)?;
    check_levels(model, batching)?;
    check_ordering(model, batching)?;
    let level = |number: u64| u32::try_from(number).expect("levels were checked");
    Ok(Some(DynamicBatchingSpec {
        preferred_rows,
        max_delay: Duration::from_micros(batching.max_queue_delay_microseconds),
        preserve_ordering: batching.preserve_ordering,
        priority_levels: level(batching.priority_levels),
        // Without levels there is none to choose from.
        default_priority_level: if batching.priority_levels == 0 {
            0
        } else {
            level(batching.default_priority_level)
        },
        default_queue_policy: queue_policy(&batching.default_queue_policy.unwrap_or_default()),
        priority_queue_policy: batching
            .priority_queue_policy
            .iter()
            // Without levels no request can be of one.
            .filter(|_| batching.priority_levels > 0)
            .map(|(&number, policy)| (level(number), queue_policy(policy)))
            .collect(),
    }))
}

fn preferred_rows(
    model: &Arc<str>,
    config: &pb::ModelConfig,
    sizes: &[i32],
) -> Result<Vec<u32>, ConfigError> {
    let mut rows = sizes
        .iter()
        .map(|&size| match u32::try_from(size) {
            Ok(rows) if rows >= 1 && size <= config.max_batch_size => Ok(rows),
            _ => Err(invalid(
                model,
                "dynamic_batching.preferred_batch_size",
                format!("sizes from 1 to max_batch_size {}", config.max_batch_size),
                size.to_string(),
            )),
        })
        .collect::<Result<Vec<_>, _>>()?;
    rows.sort_unstable();
    rows.dedup();
    Ok(rows)
}

fn check_levels(model: &Arc<str>, batching: &pb::ModelDynamicBatching) -> Result<(), ConfigError> {
    let levels = batching.priority_levels;
    if levels > MAX_PRIORITY_LEVELS {
        return Err(invalid(
            model,
            "dynamic_batching.priority_levels",
            format!("at most {MAX_PRIORITY_LEVELS}"),
            levels.to_string(),
        ));
    }
    if levels == 0 {
        return Ok(());
    }
    let expected = || format!("a level from 1 to priority_levels {levels}");
    let default = batching.default_priority_level;
    if !(1..=levels).contains(&default) {
        let field = "dynamic_batching.default_priority_level";
        return Err(invalid(model, field, expected(), default.to_string()));
    }
    let mut policies: Vec<_> = batching.priority_queue_policy.keys().copied().collect();
    policies.sort_unstable();
    match policies
        .into_iter()
        .find(|level| !(1..=levels).contains(level))
    {
        None => Ok(()),
        Some(level) => {
            let field = "dynamic_batching.priority_queue_policy";
            Err(invalid(model, field, expected(), level.to_string()))
        }
    }
}

/// What overtakes and what keeps its order exclude each other.
fn check_ordering(
    model: &Arc<str>,
    batching: &pb::ModelDynamicBatching,
) -> Result<(), ConfigError> {
    if !batching.preserve_ordering {
        return Ok(());
    }
    if batching.priority_levels > 1 {
        return Err(invalid(
            model,
            "dynamic_batching.priority_levels",
            "at most 1 with preserve_ordering".to_owned(),
            batching.priority_levels.to_string(),
        ));
    }
    let delays = |policy: &pb::ModelQueuePolicy| {
        policy.default_timeout_microseconds != 0 && policy.timeout_action() == TimeoutAction::Delay
    };
    let default = batching.default_queue_policy.iter();
    if default
        .chain(batching.priority_queue_policy.values())
        .any(delays)
    {
        return Err(invalid(
            model,
            "dynamic_batching queue policy timeout_action",
            "REJECT with preserve_ordering".to_owned(),
            "DELAY".to_owned(),
        ));
    }
    Ok(())
}

fn queue_policy(policy: &pb::ModelQueuePolicy) -> QueuePolicySpec {
    let timeout = policy.default_timeout_microseconds;
    QueuePolicySpec {
        delay_on_timeout: policy.timeout_action() == TimeoutAction::Delay,
        default_timeout: (timeout > 0).then(|| Duration::from_micros(timeout)),
        allow_timeout_override: policy.allow_timeout_override,
        max_queue_size: (policy.max_queue_size > 0).then_some(policy.max_queue_size as usize),
    }
}

/// The sum of the instance groups' counts, checked.
pub(super) fn concurrency(
    model: &Arc<str>,
    groups: &[pb::ModelInstanceGroup],
) -> Result<u32, ConfigError> {
    let mut total = 0u32;
    for group in groups {
        let Ok(kind) = Kind::try_from(group.kind) else {
            let field = format!("instance_group '{}' kind", group.name);
            let expected = "KIND_AUTO, KIND_CPU, KIND_GPU or KIND_MODEL".to_owned();
            return Err(invalid(model, &field, expected, group.kind.to_string()));
        };
        if kind != Kind::Gpu && !group.gpus.is_empty() {
            let field = format!("instance_group '{}' gpus", group.name);
            let expected = format!("none with {}", kind.as_str_name());
            return Err(invalid(
                model,
                &field,
                expected,
                format!("{:?}", group.gpus),
            ));
        }
        total = total.saturating_add(u32::try_from(group.count).unwrap_or(0));
    }
    if (1..=MAX_CONCURRENCY).contains(&total) {
        return Ok(total);
    }
    let expected = format!("counts that sum to 1 to {MAX_CONCURRENCY}");
    Err(invalid(
        model,
        "instance_group.count",
        expected,
        total.to_string(),
    ))
}
