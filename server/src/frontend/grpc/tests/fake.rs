//! A stand-in for the server, whose models do what their names say.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use dormouse_core::code::ErrorCode;
use dormouse_core::id::ByteSize;
use dormouse_core::time::Timestamp;
use dormouse_proto::inference as pb;
use pb::model_infer_request::InferInputTensor;
use tokio::sync::{Semaphore, watch};

use super::super::backend::Backend;
use crate::error::ServeError;
use crate::extensions::Extensions;
use crate::host::InFlight;
use crate::request::{InferResponse, RawRequest, Tensor};
use crate::service::{IndexEntry, IndexState, LoadOverrides, ModelDescription, ServerInfo};
use crate::stats::VersionStatistics;
use crate::timeline::{ColdRequest, LoadTimeline};

#[derive(Clone, Debug)]
pub(crate) struct Fake(Arc<State>);

#[derive(Debug)]
struct State {
    start: tokio::time::Instant,
    ready: watch::Sender<bool>,
    /// Requests that are being answered.
    active: watch::Sender<usize>,
    cancelled: watch::Sender<usize>,
    most_active: AtomicUsize,
    /// Lets one request to `gate` through per permit.
    gate: Semaphore,
    /// Requests to `turns` whose turn came.
    turns: AtomicUsize,
    extensions: Extensions,
    in_flight: Arc<InFlight>,
}

/// Counts a request while it lives, and as cancelled when it is dropped without an answer.
struct Guard<'a> {
    state: &'a State,
    answered: bool,
}

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        self.state.active.send_modify(|count| *count -= 1);
        if !self.answered {
            self.state.cancelled.send_modify(|count| *count += 1);
        }
    }
}

impl Fake {
    pub(crate) fn new() -> Self {
        Self::with_room(ByteSize::gib(1))
    }

    /// One whose requests may have so many bytes together.
    pub(crate) fn with_room(bytes: ByteSize) -> Self {
        Self(Arc::new(State {
            start: tokio::time::Instant::now(),
            ready: watch::Sender::new(true),
            active: watch::Sender::new(0),
            cancelled: watch::Sender::new(0),
            most_active: AtomicUsize::new(0),
            gate: Semaphore::new(0),
            turns: AtomicUsize::new(0),
            extensions: Extensions::default(),
            in_flight: InFlight::new(bytes),
        }))
    }

    pub(crate) fn set_ready(&self, ready: bool) {
        self.0.ready.send_replace(ready);
    }

    pub(crate) fn open_gate(&self, requests: usize) {
        self.0.gate.add_permits(requests);
    }

    pub(crate) fn turns(&self) -> usize {
        self.0.turns.load(Ordering::SeqCst)
    }

    pub(crate) fn most_active(&self) -> usize {
        self.0.most_active.load(Ordering::SeqCst)
    }

    pub(crate) async fn until_active(&self, count: usize) {
        let mut active = self.0.active.subscribe();
        active.wait_for(|&active| active == count).await.unwrap();
    }

    pub(crate) async fn until_cancelled(&self, count: usize) {
        let mut cancelled = self.0.cancelled.subscribe();
        cancelled
            .wait_for(|&cancelled| cancelled == count)
            .await
            .unwrap();
    }

    async fn act(&self, name: &str, deadline: Option<Timestamp>) -> Result<(), ServeError> {
        match name {
            "echo" | "cold" | "turns" => Ok(()),
            "gate" => {
                self.0.gate.acquire().await.unwrap().forget();
                Ok(())
            }
            // Lets everybody at the gate through.
            "opens" => {
                self.open_gate(Semaphore::MAX_PERMITS);
                Ok(())
            }
            // Keeps its deadline.
            "hang" => {
                let deadline = deadline.expect("a deadline was sent");
                tokio::time::sleep(deadline - self.now()).await;
                Err(ServeError::new(
                    ErrorCode::DeadlineExceeded,
                    "kept by the model",
                ))
            }
            "deaf" => std::future::pending().await,
            "busy" => Err(ServeError::new(ErrorCode::Overloaded, "queue is full")
                .retry_after(Duration::from_millis(250))),
            _ => Err(ServeError::not_found(format!("unknown model '{name}'"))),
        }
    }
}

/// A request with one input of `data`.
pub(crate) fn request(model: &str, id: &str, data: impl Into<Bytes>) -> pb::ModelInferRequest {
    let data = data.into();
    pb::ModelInferRequest {
        model_name: model.into(),
        id: id.into(),
        inputs: vec![InferInputTensor {
            name: "x".into(),
            datatype: "UINT8".into(),
            shape: vec![data.len() as i64],
            ..Default::default()
        }],
        raw_input_contents: vec![data],
        ..Default::default()
    }
}

impl Backend for Fake {
    fn hold(&self) -> Option<crate::activity::Hold> {
        None
    }

    fn now(&self) -> Timestamp {
        Timestamp::ZERO + self.0.start.elapsed()
    }

    fn in_flight(&self) -> Option<&Arc<InFlight>> {
        Some(&self.0.in_flight)
    }

    fn info(&self) -> ServerInfo {
        ServerInfo {
            name: "dormouse".into(),
            version: "0",
            extensions: vec!["statistics"],
        }
    }

    fn extensions(&self) -> &Extensions {
        &self.0.extensions
    }

    fn check_known(&self, _: &str) -> Result<(), ServeError> {
        Ok(())
    }

    fn is_live(&self) -> bool {
        true
    }

    fn is_ready(&self) -> bool {
        *self.0.ready.borrow()
    }

    async fn readiness_changed(&self, known: bool) -> bool {
        let mut ready = self.0.ready.subscribe();
        *ready.wait_for(|&ready| ready != known).await.unwrap()
    }

    async fn is_model_ready(&self, name: &str, _: &str) -> Result<bool, ServeError> {
        match name {
            "echo" => Ok(true),
            _ => Err(ServeError::not_found(format!("unknown model '{name}'"))),
        }
    }

    async fn describe(&self, name: &str, _: &str) -> Result<ModelDescription, ServeError> {
        Err(ServeError::not_found(format!("unknown model '{name}'")))
    }

    async fn infer(
        &self,
        name: &str,
        _: &str,
        request: RawRequest,
    ) -> Result<InferResponse, ServeError> {
        self.0.active.send_modify(|count| *count += 1);
        let now = *self.0.active.borrow();
        self.0.most_active.fetch_max(now, Ordering::SeqCst);
        let mut guard = Guard {
            state: &self.0,
            answered: false,
        };
        if name == "turns"
            && let Some(turn) = request
                .sequence
                .as_ref()
                .and_then(|step| step.turn.as_ref())
        {
            turn.comes().await;
            self.0.turns.fetch_add(1, Ordering::SeqCst);
        }
        let done = self.act(name, request.deadline).await;
        guard.answered = true;
        done?;
        let load = LoadTimeline {
            total: Duration::from_millis(12),
            ..LoadTimeline::default()
        };
        Ok(InferResponse {
            model_name: name.into(),
            model_version: 3,
            id: request.id,
            outputs: request
                .inputs
                .into_iter()
                .map(|input| {
                    let tensor = Tensor {
                        datatype: input.datatype,
                        shape: input.shape,
                        data: input.data,
                    };
                    (Arc::from(input.name), tensor)
                })
                .collect(),
            cold_start: (name == "cold").then(|| {
                Box::new(ColdRequest {
                    load: Arc::new(load),
                    ..ColdRequest::default()
                })
            }),
            placed: None,
        })
    }

    async fn statistics(&self, _: &str, _: &str) -> Result<Vec<VersionStatistics>, ServeError> {
        Ok(vec![VersionStatistics {
            name: "echo".into(),
            version: 3,
            inference_count: 5,
            ..Default::default()
        }])
    }

    fn index(&self, _: bool) -> Vec<IndexEntry> {
        vec![IndexEntry {
            name: "echo".into(),
            version: "3".into(),
            state: IndexState::Ready,
            reason: String::new(),
        }]
    }

    async fn load(&self, _: &str, overrides: LoadOverrides) -> Result<(), ServeError> {
        match overrides.config {
            None => Ok(()),
            Some(config) => Err(ServeError::invalid(config)),
        }
    }

    async fn unload(&self, _: &str) -> Result<(), ServeError> {
        Ok(())
    }
}
