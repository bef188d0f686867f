//! The JSON documents that describe the server and its models, field for field as Triton's.

use std::time::{Duration, SystemTime};

use dormouse_model_store::config;
use dormouse_model_store::spec::TensorSpec;
use dormouse_proto::inference as pb;
use serde::Serialize;

use crate::overview::Overview;
use crate::service::{IndexEntry, ModelDescription, ServerInfo};
use crate::stats::{BatchStatistics, DurationCount, VersionStatistics};
use crate::timeline::{LoadTimeline, StageSpan};

fn to_json(document: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(document).expect("documents have string keys and finite numbers only")
}

pub(super) fn server_metadata(info: &ServerInfo) -> Vec<u8> {
    #[derive(Serialize)]
    struct Document<'a> {
        name: &'a str,
        version: &'a str,
        extensions: &'a [&'static str],
    }
    to_json(&Document {
        name: &info.name,
        version: info.version,
        extensions: &info.extensions,
    })
}

pub(super) fn model_metadata(model: &ModelDescription) -> Vec<u8> {
    #[derive(Serialize)]
    struct Tensor<'a> {
        name: &'a str,
        datatype: &'static str,
        shape: Vec<i64>,
    }
    #[derive(Serialize)]
    struct Document<'a> {
        name: &'a str,
        versions: Vec<String>,
        platform: &'a str,
        inputs: Vec<Tensor<'a>>,
        outputs: Vec<Tensor<'a>>,
    }
    let spec = &model.spec;
    fn tensors(tensors: &[TensorSpec], max_batch_size: u32) -> Vec<Tensor<'_>> {
        let mut described = Vec::with_capacity(tensors.len());
        for tensor in tensors {
            described.push(Tensor {
                name: &tensor.name,
                datatype: tensor.datatype.name(),
                shape: tensor.metadata_shape(max_batch_size),
            });
        }
        described
    }
    to_json(&Document {
        name: &spec.name,
        versions: model.versions.iter().map(u64::to_string).collect(),
        platform: &spec.platform,
        inputs: tensors(&spec.inputs, spec.max_batch_size),
        outputs: tensors(&spec.outputs, spec.max_batch_size),
    })
}

pub(super) fn statistics(versions: &[VersionStatistics]) -> Vec<u8> {
    #[derive(Serialize)]
    struct Duration {
        count: u64,
        ns: u64,
    }
    impl From<DurationCount> for Duration {
        fn from(DurationCount { count, nanos }: DurationCount) -> Self {
            Self { count, ns: nanos }
        }
    }
    #[derive(Serialize)]
    struct Inference {
        success: Duration,
        fail: Duration,
        queue: Duration,
        compute_input: Duration,
        compute_infer: Duration,
        compute_output: Duration,
        cache_hit: Duration,
        cache_miss: Duration,
    }
    #[derive(Serialize)]
    struct Batch {
        batch_size: u64,
        compute_input: Duration,
        compute_infer: Duration,
        compute_output: Duration,
    }
    /// What this server has nothing to say about, in its place.
    #[derive(Serialize)]
    struct Nothing {}
    #[derive(Serialize)]
    struct Version<'a> {
        name: &'a str,
        version: String,
        last_inference: u64,
        inference_count: u64,
        execution_count: u64,
        inference_stats: Inference,
        response_stats: Nothing,
        batch_stats: Vec<Batch>,
        memory_usage: [Nothing; 0],
        /// Dormouse's own: what waking the model took, the latest time last.
        #[serde(skip_serializing_if = "Vec::is_empty")]
        cold_starts: Vec<ColdStart>,
    }
    #[derive(Serialize)]
    struct Document<'a> {
        model_stats: Vec<Version<'a>>,
    }
    impl<'a> From<&'a VersionStatistics> for Version<'a> {
        fn from(version: &'a VersionStatistics) -> Self {
            let counts = &version.inference;
            let batch = |batch: &BatchStatistics| Batch {
                batch_size: batch.batch_size,
                compute_input: batch.compute_input.into(),
                compute_infer: batch.compute_infer.into(),
                compute_output: batch.compute_output.into(),
            };
            Self {
                name: &version.name,
                version: version.version.to_string(),
                last_inference: version.last_inference_ms,
                inference_count: version.inference_count,
                execution_count: version.execution_count,
                inference_stats: Inference {
                    success: counts.success.into(),
                    fail: counts.fail.into(),
                    queue: counts.queue.into(),
                    compute_input: counts.compute_input.into(),
                    compute_infer: counts.compute_infer.into(),
                    compute_output: counts.compute_output.into(),
                    cache_hit: counts.cache_hit.into(),
                    cache_miss: counts.cache_miss.into(),
                },
                response_stats: Nothing {},
                batch_stats: version.batches.iter().map(batch).collect(),
                memory_usage: [],
                cold_starts: version.cold_starts.iter().map(ColdStart::from).collect(),
            }
        }
    }
    to_json(&Document {
        model_stats: versions.iter().map(Version::from).collect(),
    })
}

/// One cold start, field for field as in the gRPC statistics.
#[derive(Serialize)]
struct ColdStart {
    kind: &'static str,
    ahead: bool,
    started_unix_ns: u64,
    total_ns: u64,
    bytes: u64,
    overlap_ns: u64,
    stages: Vec<ColdStage>,
}

#[derive(Serialize)]
struct ColdStage {
    name: &'static str,
    lane: u32,
    start_ns: u64,
    duration_ns: u64,
    bytes: u64,
    running: bool,
}

impl From<&LoadTimeline> for ColdStart {
    fn from(timeline: &LoadTimeline) -> Self {
        let nanos = |took: Duration| u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        let started = timeline.started.duration_since(SystemTime::UNIX_EPOCH);
        let stage = |span: &StageSpan| ColdStage {
            name: span.stage.label(),
            lane: span.lane,
            start_ns: nanos(span.start),
            duration_ns: nanos(span.duration),
            bytes: span.bytes,
            running: span.running,
        };
        Self {
            kind: timeline.kind.label(),
            ahead: timeline.ahead,
            started_unix_ns: nanos(started.unwrap_or_default()),
            total_ns: nanos(timeline.total),
            bytes: timeline.bytes(),
            overlap_ns: nanos(timeline.overlap()),
            stages: timeline.stages.iter().map(stage).collect(),
        }
    }
}

pub(super) fn index(entries: &[IndexEntry]) -> Vec<u8> {
    #[derive(Serialize)]
    struct Entry<'a> {
        name: &'a str,
        #[serde(skip_serializing_if = "str::is_empty")]
        version: &'a str,
        state: &'static str,
        #[serde(skip_serializing_if = "str::is_empty")]
        reason: &'a str,
    }
    let entries: Vec<_> = entries
        .iter()
        .map(|entry| Entry {
            name: &entry.name,
            version: &entry.version,
            state: entry.state.name(),
            reason: &entry.reason,
        })
        .collect();
    to_json(&entries)
}

/// The list of models in the form of OpenAI's API, each model once.
pub(super) fn models(entries: &[IndexEntry]) -> Vec<u8> {
    #[derive(Serialize)]
    struct Model<'a> {
        id: &'a str,
        object: &'static str,
        created: u64,
        owned_by: &'static str,
    }
    #[derive(Serialize)]
    struct Document<'a> {
        object: &'static str,
        data: Vec<Model<'a>>,
    }
    let names: std::collections::BTreeSet<&str> =
        entries.iter().map(|entry| &*entry.name).collect();
    let data = names
        .into_iter()
        .map(|id| Model {
            id,
            object: "model",
            created: 0,
            owned_by: "dormouse",
        })
        .collect();
    to_json(&Document {
        object: "list",
        data,
    })
}

/// What the server is doing.
pub(super) fn overview(overview: &Overview) -> Vec<u8> {
    to_json(overview)
}

/// A model's configuration with every field, under the names of `config.pbtxt`.
pub(super) fn config_json(config: &pb::ModelConfig) -> Vec<u8> {
    config::json::to_json(config).to_string().into_bytes()
}

#[cfg(test)]
mod tests {
    use expect_test::expect;

    use super::*;
    use crate::service::IndexState;
    use crate::stats::InferStatistics;
    use crate::timeline::LoadStage;

    #[test]
    fn statistics_have_tritons_fields() {
        let count = |count, nanos| DurationCount { count, nanos };
        let document = statistics(&[VersionStatistics {
            name: "m".into(),
            version: 2,
            last_inference_ms: 9,
            inference_count: 4,
            execution_count: 3,
            inference: InferStatistics {
                success: count(4, 40),
                ..InferStatistics::default()
            },
            batches: vec![BatchStatistics {
                batch_size: 1,
                compute_infer: count(3, 30),
                ..BatchStatistics::default()
            }],
            cold_starts: Vec::new(),
        }]);
        expect![[r#"{"model_stats":[{"name":"m","version":"2","last_inference":9,"inference_count":4,"execution_count":3,"inference_stats":{"success":{"count":4,"ns":40},"fail":{"count":0,"ns":0},"queue":{"count":0,"ns":0},"compute_input":{"count":0,"ns":0},"compute_infer":{"count":0,"ns":0},"compute_output":{"count":0,"ns":0},"cache_hit":{"count":0,"ns":0},"cache_miss":{"count":0,"ns":0}},"response_stats":{},"batch_stats":[{"batch_size":1,"compute_input":{"count":0,"ns":0},"compute_infer":{"count":3,"ns":30},"compute_output":{"count":0,"ns":0}}],"memory_usage":[]}]}"#]]
            .assert_eq(&String::from_utf8(document).unwrap());
    }

    #[test]
    fn statistics_tell_of_cold_starts() {
        let timeline = LoadTimeline {
            total: Duration::from_micros(7),
            stages: vec![StageSpan {
                stage: LoadStage::Populate,
                lane: 1,
                start: Duration::from_micros(2),
                duration: Duration::from_micros(5),
                bytes: 64,
                running: true,
            }],
            ..LoadTimeline::default()
        };
        let document = statistics(&[VersionStatistics {
            cold_starts: vec![timeline],
            ..VersionStatistics::default()
        }]);
        let document: serde_json::Value = serde_json::from_slice(&document).unwrap();
        expect![[r#"[{"ahead":false,"bytes":64,"kind":"source","overlap_ns":0,"stages":[{"bytes":64,"duration_ns":5000,"lane":1,"name":"populate","running":true,"start_ns":2000}],"started_unix_ns":0,"total_ns":7000}]"#]]
            .assert_eq(&document["model_stats"][0]["cold_starts"].to_string());
    }

    #[test]
    fn index_leaves_out_what_it_does_not_know() {
        let entry = |name: &str, version: &str, state, reason: &str| IndexEntry {
            name: name.into(),
            version: version.to_owned(),
            state,
            reason: reason.to_owned(),
        };
        let entries = [
            entry("a", "1", IndexState::Ready, ""),
            entry("a", "2", IndexState::Ready, ""),
            entry("b", "", IndexState::Unavailable, "unloaded"),
        ];
        expect![[r#"[{"name":"a","version":"1","state":"READY"},{"name":"a","version":"2","state":"READY"},{"name":"b","state":"UNAVAILABLE","reason":"unloaded"}]"#]]
            .assert_eq(&String::from_utf8(index(&entries)).unwrap());
        expect![[r#"{"object":"list","data":[{"id":"a","object":"model","created":0,"owned_by":"dormouse"},{"id":"b","object":"model","created":0,"owned_by":"dormouse"}]}"#]]
            .assert_eq(&String::from_utf8(models(&entries)).unwrap());
    }

    #[test]
    fn configs_are_written_with_all_their_fields() {
        let config = pb::ModelConfig {
            name: "m".to_owned(),
            max_batch_size: 8,
            ..pb::ModelConfig::default()
        };
        let json: serde_json::Value = serde_json::from_slice(&config_json(&config)).unwrap();
        assert_eq!(json["name"], "m");
        assert_eq!(json["max_batch_size"], 8);
        assert_eq!(json["input"], serde_json::json!([]));
    }
}
