//! Counters, in Triton's message.

use dormouse_proto::inference as pb;
use tonic::Status;

use super::backend::Backend;
use crate::frontend::status::to_status;
use crate::stats::{BatchStatistics, DurationCount, InferStatistics, VersionStatistics};

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

fn duration(counted: DurationCount) -> pb::StatisticDuration {
    pb::StatisticDuration {
        count: counted.count,
        ns: counted.nanos,
    }
}
