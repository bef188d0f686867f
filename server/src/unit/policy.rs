//! From a model's configuration to the batcher's rules.

use std::time::Duration;

use dormouse_core::batch::{BatchPolicy, QueuePolicy, TimeoutAction};
use dormouse_model_store::spec::{ModelSpec, QueuePolicySpec};

/// The rules by which a model's requests are batched.
pub(super) fn batch_policy(spec: &ModelSpec, max_queue: usize) -> BatchPolicy {
    let queue_policy = |policy: &QueuePolicySpec| QueuePolicy {
        timeout_action: if policy.delay_on_timeout {
            TimeoutAction::Delay
        } else {
            TimeoutAction::Reject
        },
        default_timeout: policy.default_timeout,
        allow_timeout_override: policy.allow_timeout_override,
        max_queue_size: policy
            .max_queue_size
            .map_or(max_queue, |size| size.min(max_queue)),
    };
    let plain = QueuePolicy {
        timeout_action: TimeoutAction::Reject,
        default_timeout: None,
        allow_timeout_override: false,
        max_queue_size: max_queue,
    };
    match &spec.batching {
        None => BatchPolicy {
            max_rows: spec.max_batch_size.max(1),
            preferred_rows: Vec::new(),
            max_delay: Duration::ZERO,
            levels: vec![plain],
            default_level: 1,
        },
        Some(batching) => BatchPolicy {
            max_rows: spec.max_batch_size.max(1),
            // Waiting for others is of no use to a request that runs alone.
            preferred_rows: match spec.runs_rows_together {
                true => batching.preferred_rows.clone(),
                false => Vec::new(),
            },
            max_delay: match spec.runs_rows_together {
                true => batching.max_delay,
                false => Duration::ZERO,
            },
            levels: (1..=batching.priority_levels.max(1))
                .map(|level| {
                    let policy = batching.priority_queue_policy.get(&level);
                    queue_policy(policy.unwrap_or(&batching.default_queue_policy))
                })
                .collect(),
            default_level: batching.default_priority_level.max(1),
        },
    }
}

#[cfg(test)]
mod tests {
    use dormouse_model_store::config::{ConfigDefaults, ResolveInput, resolve, text};
    use dormouse_model_store::graph::{GraphSummary, GraphTensor, GraphType};

    use super::*;

    #[test]
    fn requests_that_run_alone_keep_their_queue_rules_and_wait_for_nobody() {
        let tensor = |name: &str| GraphTensor {
            name: name.to_owned(),
            kind: GraphType::Tensor(dormouse_core::datatype::DataType::Fp32),
            dims: Some([-1, 1].as_slice().into()),
        };
        let graph = GraphSummary {
            inputs: vec![tensor("x")],
            outputs: vec![tensor("y")],
            batch_coupling: vec!["rows mix".to_owned()],
            ..GraphSummary::default()
        };
        let config = "max_batch_size: 8 dynamic_batching {
            preferred_batch_size: 4 max_queue_delay_microseconds: 500
            priority_levels: 3 default_priority_level: 2
            default_queue_policy { max_queue_size: 5 }
        }";
        let policy = |extra: &str| {
            let spec = resolve(ResolveInput {
                name: "m".into(),
                config: text::parse(&format!("{config} {extra}")).unwrap(),
                graph: &graph,
                defaults: &ConfigDefaults::default(),
            });
            batch_policy(&spec.unwrap(), 1000)
        };
        let alone = policy("");
        assert_eq!(
            (alone.max_delay, alone.preferred_rows),
            (Duration::ZERO, vec![])
        );
        let forced =
            policy("parameters { key: 'dormouse.batching' value { string_value: 'force' } }");
        assert_eq!(forced.max_delay, Duration::from_micros(500));
        assert_eq!(forced.preferred_rows, [4]);
        for levels in [alone.levels, forced.levels] {
            assert_eq!(levels.len(), 3);
            assert!(levels.iter().all(|level| level.max_queue_size == 5));
        }
        assert_eq!((alone.default_level, forced.default_level), (2, 2));
    }
}
