//! Counters, in Triton's message.

use std::time::{Duration, SystemTime};

use dormouse_proto::inference as pb;
use tonic::Status;

use super::backend::Backend;
use crate::frontend::status::to_status;
use crate::stats::{BatchStatistics, DurationCount, InferStatistics, VersionStatistics};
use crate::timeline::{LoadTimeline, StageSpan};

pub(super) async fn model_statistics<B: Backend>(
    backend: &B,
    request: pb::ModelStatisticsRequest,
) -> Result<pb::ModelStatisticsResponse, Status> {
    let statistics = backend
        .statistics(&request.name, &request.version)
        .await
        .map_err(|error| to_status(&error))?;
    Ok(pb::ModelStatisticsResponse {
        model_stats: statistics.iter().map(model).collect(),
    })
}

fn model(statistics: &VersionStatistics) -> pb::ModelStatistics {
    pb::ModelStatistics {
        name: statistics.name.to_string(),
        version: statistics.version.to_string(),
        last_inference: statistics.last_inference_ms,
        inference_count: statistics.inference_count,
        execution_count: statistics.execution_count,
        inference_stats: Some(inference(&statistics.inference)),
        batch_stats: statistics.batches.iter().map(batch).collect(),
        cold_starts: statistics.cold_starts.iter().map(cold_start).collect(),
        ..Default::default()
    }
}

fn inference(statistics: &InferStatistics) -> pb::InferStatistics {
    pb::InferStatistics {
        success: Some(duration(statistics.success)),
        fail: Some(duration(statistics.fail)),
        queue: Some(duration(statistics.queue)),
        compute_input: Some(duration(statistics.compute_input)),
        compute_infer: Some(duration(statistics.compute_infer)),
        compute_output: Some(duration(statistics.compute_output)),
        cache_hit: Some(duration(statistics.cache_hit)),
        cache_miss: Some(duration(statistics.cache_miss)),
    }
}

fn batch(statistics: &BatchStatistics) -> pb::InferBatchStatistics {
    pb::InferBatchStatistics {
        batch_size: statistics.batch_size,
        compute_input: Some(duration(statistics.compute_input)),
        compute_infer: Some(duration(statistics.compute_infer)),
        compute_output: Some(duration(statistics.compute_output)),
    }
}

fn cold_start(timeline: &LoadTimeline) -> pb::ColdStart {
    let started = timeline.started.duration_since(SystemTime::UNIX_EPOCH);
    let stage = |span: &StageSpan| pb::cold_start::Stage {
        name: span.stage.label().to_owned(),
        lane: span.lane,
        start_ns: nanos(span.start),
        duration_ns: nanos(span.duration),
        bytes: span.bytes,
        running: span.running,
    };
    pb::ColdStart {
        kind: timeline.kind.label().to_owned(),
        ahead: timeline.ahead,
        started_unix_ns: nanos(started.unwrap_or_default()),
        total_ns: nanos(timeline.total),
        bytes: timeline.bytes(),
        overlap_ns: nanos(timeline.overlap()),
        stages: timeline.stages.iter().map(stage).collect(),
    }
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

fn duration(counted: DurationCount) -> pb::StatisticDuration {
    pb::StatisticDuration {
        count: counted.count,
        ns: counted.nanos,
    }
}
