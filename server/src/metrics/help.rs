//! What each metric means, in the words that a scrape shows.

use metrics::{KeyName, Recorder, Unit};
use metrics_exporter_prometheus::PrometheusRecorder;

pub(super) fn describe(recorder: &PrometheusRecorder) {
    let counter = |name: &'static str, help: &'static str| {
        recorder.describe_counter(KeyName::from_const_str(name), None, help.into());
    };
    let gauge = |name: &'static str, help: &'static str| {
        recorder.describe_gauge(KeyName::from_const_str(name), None, help.into());
    };
    let histogram = |name: &'static str, help: &'static str| {
        recorder.describe_histogram(
            KeyName::from_const_str(name),
            Some(Unit::Count),
            help.into(),
        );
    };
    gauge("dormouse_workers", "Processes that isolated models run in");
    counter(
        "dormouse_request_threads_put_back_total",
        "Times that a thread which takes requests in real time used more than about an eighth of a processor, or interrupted others too often, and was put back in line",
    );
    counter(
        "dormouse_worker_deaths_total",
        "Processes of isolated models that ended though nobody closed them, by cause",
    );
    counter(
        "dormouse_worker_restarts_total",
        "Isolated models that serve again after their process died",
    );
    gauge(
        "dormouse_models_quarantined",
        "Isolated models that are not started any more because they keep killing their process",
    );
    counter("nv_inference_request_success", "Requests answered");
    counter(
        "nv_inference_request_failure",
        "Requests that got an error, by reason",
    );
    counter("nv_inference_count", "Rows inferred; a batch of n counts n");
    counter(
        "nv_inference_exec_count",
        "Runs of the model, each of one batch",
    );
    gauge(
        "nv_inference_pending_request_count",
        "Requests that wait to be run",
    );
    gauge(
        "dormouse_runs_at_once",
        "Runs of the model that may be under way at once: as configured, or as a trial under load \
         found best",
    );
    counter(
        "nv_inference_request_duration_us",
        "Time from receiving requests to answering them, summed",
    );
    counter(
        "nv_inference_queue_duration_us",
        "Time requests waited to be run, summed",
    );
    counter(
        "nv_inference_compute_input_duration_us",
        "Time spent gathering inputs, summed over requests",
    );
    counter(
        "nv_inference_compute_infer_duration_us",
        "Time spent in the engine, summed over requests",
    );
    counter(
        "nv_inference_compute_output_duration_us",
        "Time spent splitting outputs, summed over requests",
    );
    counter(
        "nv_cache_num_hits_per_model",
        "Requests answered by the response cache",
    );
    counter(
        "nv_cache_num_misses_per_model",
        "Requests whose answer the response cache did not have",
    );
    counter(
        "nv_cache_hit_duration_per_model",
        "Microseconds spent finding answers in the response cache, summed",
    );
    counter(
        "nv_cache_miss_duration_per_model",
        "Microseconds spent looking for and keeping answers, summed over misses",
    );
    gauge(
        "nv_model_load_duration_secs",
        "How long the model's last load took",
    );
    gauge(
        "nv_cpu_utilization",
        "CPU use of the host since the last scrape, from 0 to 1",
    );
    gauge("nv_cpu_memory_total_bytes", "Memory of the host");
    gauge(
        "nv_cpu_memory_used_bytes",
        "Memory of the host that is in use",
    );
    histogram(
        "dormouse_load_stage_seconds",
        "Time the stages of loads took",
    );
    histogram(
        "dormouse_load_overlap_seconds",
        "Time that loads saved by doing stages side by side",
    );
    histogram(
        "dormouse_cold_start_seconds",
        "Latency of requests that found their model asleep, by what it was woken from",
    );
    counter(
        "dormouse_loaded_bytes_total",
        "Bytes that loads moved, by stage",
    );
    counter("dormouse_loads_total", "Loads that succeeded");
    counter("dormouse_load_failures_total", "Loads that failed");
    counter("dormouse_sleeps_total", "Times the model went back to zero");
    counter(
        "dormouse_parks_total",
        "Times the model gave up its weights' memory and kept its session",
    );
    counter("dormouse_prewarms_total", "Loads ahead of an expected call");
    counter(
        "dormouse_wasted_prewarms_total",
        "Of these, those that ended before anybody called",
    );
    counter(
        "dormouse_packed_sessions_total",
        "Times a packed session took the place of the one the model woke with",
    );
    counter(
        "dormouse_preparations_total",
        "Models put into the prepared store",
    );
    counter(
        "dormouse_prepared_dropped_total",
        "Prepared models that were damaged or of no use and were dropped",
    );
    counter(
        "dormouse_preparation_failures_total",
        "Models that could not be put into the prepared store",
    );
    counter(
        "dormouse_evictions_total",
        "Idle models that gave up memory because others needed it",
    );
    gauge(
        "dormouse_models_memory_bytes",
        "Memory that models hold of the budget, by what they are doing",
    );
    gauge(
        "dormouse_memory_budget_bytes",
        "Memory that models may hold together",
    );
    gauge(
        "dormouse_response_cache_bytes",
        "Memory that kept answers take",
    );
    counter(
        "dormouse_cold_requests_total",
        "Requests that had to wait for a load",
    );
    gauge("dormouse_models_warm", "Model versions that have a session");
    gauge("dormouse_loads_running", "Loads under way");
    gauge(
        "dormouse_request_bytes_in_flight",
        "Bytes of requests that arrive, wait or run",
    );
    counter(
        "dormouse_memory_returned_bytes_total",
        "Memory given back to the system after closing sessions",
    );
    counter(
        "dormouse_memory_unreturned_bytes_total",
        "Memory that closed sessions had held and the process still had, where nothing else was under way",
    );
    counter(
        "dormouse_webhook_deliveries_total",
        "Messages of webhooks that are done with, by result",
    );
    counter(
        "dormouse_events_lost_total",
        "Lifecycle events that slow subscribers never saw",
    );
    counter("dormouse_spans_sent_total", "Spans that a collector took");
    counter(
        "dormouse_spans_dropped_total",
        "Spans that were recorded and could not be sent",
    );
    gauge(
        "dormouse_process_resident_bytes",
        "Resident memory of the server",
    );
    gauge(
        "dormouse_engine_memory_live_bytes",
        "Memory that sessions, runs and unsent outputs hold in the engine's shared allocator",
    );
    gauge(
        "dormouse_engine_memory_cached_bytes",
        "Free memory that the engine's shared allocator keeps for the next run",
    );
    gauge(
        "dormouse_engine_memory_peak_bytes",
        "The most that was held in the engine's shared allocator",
    );
}
