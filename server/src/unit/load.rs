//! Brings a session up and takes it down.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use dormouse_core::datatype::DataType;
use dormouse_core::lifecycle::Stage;
use dormouse_core::shape::{Shape, byte_count, element_count};
use dormouse_core::time::Timestamp;
use dormouse_model_store::spec::{ModelSpec, TensorSpec, WarmupData, WarmupInput, WarmupSpec};

use super::effects::{Effects, Failure, Place};
use super::{SourceModel, Unit};
use crate::engine::{Session, SessionTensor};
use crate::error::ServeError;
use crate::memory;
use crate::metrics::FailureReason;
use crate::request::Tensor;
use crate::timeline::{LoadTimeline, StageSpan};

/// A session with the places of the model's tensors in it.
#[derive(Debug)]
pub(super) struct OpenSession {
    pub(super) session: Arc<dyn Session>,
    /// The session's index of each input of the model's signature.
    pub(super) inputs: Vec<usize>,
    pub(super) outputs: Vec<usize>,
    /// Runs of equal shapes take about equally long.
    pub(super) is_steady: bool,
}

impl Unit {
    pub(super) fn spawn_load(&self) {
        let unit = self
            .this
            .upgrade()
            .expect("a unit is only called through its Arc");
        self.host.runtime.spawn(async move {
            let permit = Arc::clone(&unit.host.loads).acquire_owned().await;
            let loaded = tokio::task::spawn_blocking({
                let unit = Arc::clone(&unit);
                move || {
                    let _permit = permit;
                    unit.load_with_retries()
                }
            })
            .await;
            let loaded =
                loaded.unwrap_or_else(|_| Err(ServeError::internal("the loading thread panicked")));
            unit.load_ended(loaded);
        });
    }

    pub(super) fn spawn_close(&self, session: Arc<OpenSession>) {
        let unit = self
            .this
            .upgrade()
            .expect("a unit is only called through its Arc");
        self.host.runtime.spawn_blocking(move || {
            let before = memory::resident_bytes();
            drop(session);
            memory::release_memory();
            let returned = before.zip(memory::resident_bytes()).map_or(0, |(before, after)| before.saturating_sub(after));
            let server = unit.host.metrics.server();
            server.models_warm.decrement(1.0);
            server.returned_bytes.increment(returned);
            unit.metrics().closes.increment(1);
            tracing::info!(model = %unit.id.name, version = unit.id.version.0, stage = "asleep", returned_bytes = returned, "session closed");
            let now = unit.host.clock.now();
            let mut effects = Effects::default();
            let mut state = unit.state.lock();
            let queued = state.batcher.queued();
            let action = state.lifecycle.closed(now, queued);
            unit.act(&mut state, action, &mut effects, now);
            drop(state);
            unit.perform(effects, Place::Elsewhere);
        });
    }

    fn load_with_retries(&self) -> Result<(Arc<OpenSession>, LoadTimeline), ServeError> {
        let gauge = &self.host.metrics.server().loads_running;
        gauge.increment(1.0);
        let mut attempt = 0;
        let result = loop {
            let result = catch_unwind(AssertUnwindSafe(|| self.load()))
                .unwrap_or_else(|_| Err(ServeError::internal("the engine panicked while loading")));
            match result {
                Err(error) if attempt < self.host.defaults.load_retries => {
                    attempt += 1;
                    tracing::warn!(model = %self.id.name, version = self.id.version.0, %error, attempt, "load failed, trying again");
                }
                result => break result,
            }
        };
        gauge.decrement(1.0);
        result
    }

    fn load(&self) -> Result<(Arc<OpenSession>, LoadTimeline), ServeError> {
        let mut stages = Stages::start(self);
        tracing::info!(model = %self.id.name, version = self.id.version.0, stage = "loading", "load started");
        let SourceModel { bytes, is_steady } = self.source.read()?;
        let size = bytes.graph.len() as u64
            + bytes
                .external
                .iter()
                .map(|(_, data)| data.len() as u64)
                .sum::<u64>();
        stages.end("read", size);
        self.host
            .engine
            .prepare()
            .map_err(|error| self.cannot_load(&error))?;
        stages.end("environment", 0);
        let session = self
            .host
            .engine
            .open(bytes, &self.spec.session)
            .map_err(|error| self.cannot_load(&error))?;
        let open = match_signature(&self.spec, session, is_steady)?;
        stages.end("session", 0);
        for warmup in &self.spec.warmups {
            self.warm_up(&open, warmup)?;
        }
        if !self.spec.warmups.is_empty() {
            stages.end("warmup", 0);
        }
        Ok((Arc::new(open), stages.finish()))
    }

    fn cannot_load(&self, cause: &dyn std::fmt::Display) -> ServeError {
        ServeError::unavailable(format!("model {} could not be loaded: {cause}", self.id))
    }

    fn load_ended(&self, loaded: Result<(Arc<OpenSession>, LoadTimeline), ServeError>) {
        let now = self.host.clock.now();
        let mut effects = Effects::default();
        let mut state = self.state.lock();
        state.load_started = None;
        match loaded {
            Ok((session, timeline)) => {
                self.report_loaded(&timeline);
                state.profile.record_load(timeline.total);
                state.session = Some(session);
                state.timeline = Some(Arc::new(timeline));
                state.load_error = None;
                effects
                    .loaded
                    .extend(state.load_waiters.drain(..).map(|waiter| (waiter, Ok(()))));
                let action = state.lifecycle.loaded(now);
                self.pump(&mut state, &mut effects, now);
                self.act(&mut state, action, &mut effects, now);
                let queued = state.batcher.queued();
                let action = state.lifecycle.poll(now, queued);
                self.act(&mut state, action, &mut effects, now);
            }
            Err(error) => {
                let retry_at = state.lifecycle.load_failed(now);
                self.metrics().load_failures.increment(1);
                tracing::error!(model = %self.id.name, version = self.id.version.0, stage = "failed", %error, retry_in = ?(retry_at - now), "load failed");
                let error = error.retry_after(retry_at - now);
                state.load_error = Some(error.clone());
                effects.loaded.extend(
                    state
                        .load_waiters
                        .drain(..)
                        .map(|waiter| (waiter, Err(error.clone()))),
                );
                for pending in state.batcher.flush() {
                    self.metrics().pending.decrement(1.0);
                    self.fail(
                        &mut state,
                        &mut effects,
                        pending,
                        Failure {
                            error: error.clone(),
                            reason: FailureReason::Backend,
                        },
                    );
                }
                if state.lifecycle.stage() == Stage::Retired {
                    effects.retired.append(&mut state.retire_waiters);
                }
                self.set_alarm(&mut state, &mut effects);
            }
        }
        drop(state);
        self.perform(effects, Place::Elsewhere);
    }

    fn report_loaded(&self, timeline: &LoadTimeline) {
        let metrics = self.metrics();
        metrics.loads.increment(1);
        metrics.load_seconds.set(timeline.total.as_secs_f64());
        self.host.metrics.server().models_warm.increment(1.0);
        for stage in &timeline.stages {
            self.host.metrics.load_stage(stage.name, stage.duration);
        }
        tracing::info!(model = %self.id.name, version = self.id.version.0, stage = "warm", took = ?timeline.total, timeline = %timeline.server_timing(), "loaded");
    }

    fn warm_up(&self, open: &OpenSession, warmup: &WarmupSpec) -> Result<(), ServeError> {
        let failed = |cause: &dyn std::fmt::Display| {
            ServeError::unavailable(format!(
                "warm-up '{}' of model {} failed: {cause}",
                warmup.name, self.id
            ))
        };
        let mut inputs = Vec::new();
        for (spec, &index) in self.spec.inputs.iter().zip(&open.inputs) {
            let Some(input) = warmup.inputs.iter().find(|input| *input.name == *spec.name) else {
                continue;
            };
            inputs.push((index, self.warmup_tensor(spec, input, warmup)?));
        }
        for _ in 0..warmup.count.max(1) {
            let stop = open.session.stop_handle().map_err(|error| failed(&error))?;
            open.session
                .run(&inputs, &open.outputs, &stop)
                .map_err(|error| failed(&error))?;
        }
        Ok(())
    }

    fn warmup_tensor(
        &self,
        spec: &TensorSpec,
        input: &WarmupInput,
        warmup: &WarmupSpec,
    ) -> Result<Tensor, ServeError> {
        let batch = (self.spec.max_batch_size > 0).then_some(i64::from(warmup.rows));
        let dims = spec.reshape.as_ref().unwrap_or(&input.dims);
        let shape: Shape = batch.into_iter().chain(dims.iter().copied()).collect();
        let too_large = || {
            ServeError::unavailable(format!(
                "warm-up '{}' of model {}: input '{}' is too large",
                warmup.name, self.id, input.name
            ))
        };
        let data = match (&input.data, input.datatype) {
            (WarmupData::File(name), _) => {
                let row = self.source.warmup_file(name)?;
                let rows = usize::try_from(batch.unwrap_or(1)).ok();
                let rows = rows.filter(|rows| {
                    let size = row.len().checked_mul(*rows);
                    size.is_some_and(|size| size as u64 <= MAX_WARMUP_BYTES)
                });
                row.repeat(rows.ok_or_else(too_large)?)
            }
            // An empty string is four zero bytes of length.
            (_, DataType::Bytes) => vec![
                0;
                element_count(&shape)
                    .and_then(|count| count.checked_mul(4))
                    .filter(|&bytes| bytes <= MAX_WARMUP_BYTES)
                    .and_then(|bytes| usize::try_from(bytes).ok())
                    .ok_or_else(too_large)?
            ],
            (WarmupData::Zero, datatype) => {
                vec![0; warmup_size(datatype, &shape).ok_or_else(too_large)?]
            }
            (WarmupData::Random, datatype) => pseudo_random(
                datatype,
                warmup_size(datatype, &shape).ok_or_else(too_large)?,
            ),
        };
        Ok(Tensor {
            datatype: input.datatype,
            shape,
            data: data.into(),
        })
    }
}

/// Warm-up tensors are sized by a configuration file: more than this is a mistake in it.
const MAX_WARMUP_BYTES: u64 = 1 << 30;

fn warmup_size(datatype: DataType, shape: &[i64]) -> Option<usize> {
    let bytes = byte_count(datatype, shape).filter(|&bytes| bytes <= MAX_WARMUP_BYTES)?;
    usize::try_from(bytes).ok()
}

/// Bytes that are small valid values of every type: 0 or 1 for integers, near 1.0 for floats.
fn pseudo_random(datatype: DataType, size: usize) -> Vec<u8> {
    let one: &[u8] = match datatype {
        DataType::Fp16 => &[0x00, 0x3c],
        DataType::Bf16 => &[0x80, 0x3f],
        DataType::Fp32 => &[0x00, 0x00, 0x80, 0x3f],
        DataType::Fp64 => &[0, 0, 0, 0, 0, 0, 0xf0, 0x3f],
        _ => &[1, 0, 0, 0, 0, 0, 0, 0],
    };
    let width = datatype.element_size().unwrap_or(1);
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut data = Vec::with_capacity(size);
    while data.len() < size {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        if state >> 63 == 1 {
            data.extend_from_slice(&one[..width]);
        } else {
            data.resize(data.len() + width, 0);
        }
    }
    data
}

/// Finds the model's tensors in the session.
fn match_signature(
    spec: &ModelSpec,
    session: Arc<dyn Session>,
    is_steady: bool,
) -> Result<OpenSession, ServeError> {
    let find = |what: &str, tensor: &TensorSpec, among: &[&SessionTensor]| {
        let place = among
            .iter()
            .position(|candidate| *candidate.name == *tensor.name);
        place.ok_or_else(|| {
            let known: Vec<&str> = among.iter().map(|known| known.name.as_str()).collect();
            ServeError::unavailable(format!(
                "the configuration of model '{}' names {what} '{}', but the graph has only {known:?}",
                spec.name, tensor.name
            ))
        })
    };
    // The session counts inputs that may be left out after those that may not.
    let known: Vec<&SessionTensor> = session
        .inputs()
        .iter()
        .chain(session.optional_inputs())
        .collect();
    let inputs = spec.inputs.iter();
    let inputs = inputs.map(|input| find("input", input, &known));
    let inputs = inputs.collect::<Result<_, _>>()?;
    let known: Vec<&SessionTensor> = session.outputs().iter().collect();
    let outputs = spec.outputs.iter();
    let outputs = outputs.map(|output| find("output", output, &known));
    let outputs = outputs.collect::<Result<_, _>>()?;
    Ok(OpenSession {
        session,
        inputs,
        outputs,
        is_steady,
    })
}

/// Measures stages that follow each other.
struct Stages<'a> {
    unit: &'a Unit,
    started: Timestamp,
    stage_started: Timestamp,
    spans: Vec<StageSpan>,
}

impl<'a> Stages<'a> {
    fn start(unit: &'a Unit) -> Self {
        let now = unit.host.clock.now();
        Self {
            unit,
            started: now,
            stage_started: now,
            spans: Vec::new(),
        }
    }

    fn end(&mut self, name: &'static str, bytes: u64) {
        let now = self.unit.host.clock.now();
        let duration: Duration = now - self.stage_started;
        self.spans.push(StageSpan {
            name,
            start: self.stage_started - self.started,
            duration,
            bytes,
        });
        self.stage_started = now;
    }

    fn finish(self) -> LoadTimeline {
        LoadTimeline {
            total: self.stage_started - self.started,
            stages: self.spans,
        }
    }
}
