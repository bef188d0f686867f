//! A whole server below its sockets, whose engine gives back what it is given: what is left is
//! the server's own work.

use std::any::Any;
use std::sync::Arc;
use std::time::Duration;

use dormouse_core::datatype::DataType;
use dormouse_core::dispatch::RunSlots;
use dormouse_core::id::{ByteSize, ModelId};
use dormouse_model_store::graph::OperatorFacts;
use dormouse_model_store::repository::FileIdentity;
use dormouse_model_store::spec::{KeepAliveSpec, SessionSpec};
use dormouse_model_store::store::DigestCache;
use dormouse_server::activity::Activity;
use dormouse_server::alarm::Alarm;
use dormouse_server::clock::Clock;
use dormouse_server::config::IsolationConfig;
use dormouse_server::engine::onnx::OnnxOptions;
use dormouse_server::engine::{
    Effort, Engine, EngineError, ModelBytes, Session, SessionTensor, Stop, StopHandle,
};
use dormouse_server::error::ServeError;
use dormouse_server::events::Events;
use dormouse_server::host::{Host, InFlight, UnitDefaults};
use dormouse_server::isolation::Isolation;
use dormouse_server::metrics::Metrics;
use dormouse_server::preparation::SourceDigests;
use dormouse_server::priority::Background;
use dormouse_server::registry::Registry;
use dormouse_server::request::Tensor;
use dormouse_server::residency::Residency;
use dormouse_server::service::{Readiness, Service};
use dormouse_server::unit::{Source, SourceModel, Unit, UnitParts};
use dormouse_server::wake::{Switches, Wake};
use parking_lot::Mutex;
use tokio::sync::Semaphore;

use crate::requests::{self, MODEL};

/// Starts a service whose one model is awake. To be called on the runtime that serves.
pub(crate) async fn service() -> anyhow::Result<Service> {
    let clock = Clock::start();
    let engine: Arc<dyn Engine> = Arc::new(Echo);
    let metrics = Metrics::new()?;
    let host = Arc::new(Host {
        clock,
        isolation: Isolation::new(
            IsolationConfig::default(),
            OnnxOptions::new(""),
            Arc::clone(&engine),
            metrics.clone(),
        ),
        engine,
        alarm: Alarm::spawn(clock)?,
        metrics,
        slots: Mutex::new(RunSlots::new(64)),
        loads: Arc::new(Semaphore::new(1)),
        in_flight: InFlight::new(ByteSize::mib(64)),
        activity: Activity::new(clock),
        tracer: None,
        events: Events::default(),
        wake: Wake {
            preparation: None,
            residency: Arc::new(Residency::new(u64::MAX, clock)),
            switches: Switches {
                prepare: false,
                overlap: true,
                sharing: true,
                staging: true,
            },
            moves: Arc::default(),
            loaders: Background::new("load", 1),
            quick_loaders: Background::with_niceness("load", 1, 0),
            populators: Background::new("populate", 1),
            preparers: Background::new("prepare", 1),
        },
        runtime: tokio::runtime::Handle::current(),
        // As the server has them: an idle model's timers are part of what a request costs.
        defaults: UnitDefaults {
            keep_alive: KeepAliveSpec::For(Duration::from_secs(300)),
            park_after: Some(Duration::from_secs(60)),
            max_queue: 10_000,
            retry_backoff: Duration::from_secs(1),
            retry_backoff_max: Duration::from_secs(60),
            load_retries: 0,
        },
    });
    let unit = Unit::new(UnitParts {
        id: ModelId::new(MODEL, 1),
        spec: Arc::new(requests::spec(DataType::Fp32)),
        source: Box::new(NoFiles),
        counters: Arc::default(),
        host: Arc::clone(&host),
    });
    unit.ensure_loaded().await?;
    let registry = Registry::of_unit(unit, Arc::clone(&host));
    let service = Service::new("benches".to_owned(), registry, host);
    service.set_readiness(Readiness::Ready);
    Ok(service)
}

#[derive(Debug)]
struct NoFiles;

impl Source for NoFiles {
    fn read(&self) -> Result<SourceModel, ServeError> {
        Ok(SourceModel {
            bytes: ModelBytes::in_memory(Vec::new(), Vec::new()),
            size: 0,
            operators: OperatorFacts {
                is_steady: true,
                is_to_be_merged: false,
            },
            is_current: true,
            file: None,
            files: Vec::new(),
        })
    }

    fn size(&self) -> u64 {
        0
    }

    fn is_current(&self) -> bool {
        true
    }

    fn known_digests(&self, _: &DigestCache) -> Result<Option<SourceDigests>, ServeError> {
        Ok(None)
    }

    fn digests(
        &self,
        _: &DigestCache,
        _: Option<&[FileIdentity]>,
    ) -> Result<SourceDigests, ServeError> {
        Ok(Vec::new())
    }

    fn initial_state_file(&self, _: &str) -> Result<Vec<u8>, ServeError> {
        Ok(Vec::new())
    }

    fn warmup_file(&self, _: &str) -> Result<Vec<u8>, ServeError> {
        Ok(Vec::new())
    }
}

#[derive(Debug)]
struct Echo;

impl Engine for Echo {
    fn prepare(&self) -> Result<Duration, EngineError> {
        Ok(Duration::ZERO)
    }

    fn open(
        &self,
        _: ModelBytes,
        _: &SessionSpec,
        _: Effort,
    ) -> Result<Arc<dyn Session>, EngineError> {
        let tensor = |name: &str| SessionTensor {
            name: name.to_owned(),
            datatype: Some(DataType::Fp32),
            dims: None,
        };
        Ok(Arc::new(EchoSession {
            inputs: [tensor("INPUT")],
            outputs: [tensor("OUTPUT")],
        }))
    }

    fn describe(&self) -> String {
        "echo".to_owned()
    }
}

#[derive(Debug)]
struct EchoSession {
    inputs: [SessionTensor; 1],
    outputs: [SessionTensor; 1],
}

impl Session for EchoSession {
    fn inputs(&self) -> &[SessionTensor] {
        &self.inputs
    }

    fn outputs(&self) -> &[SessionTensor] {
        &self.outputs
    }

    fn run(
        &self,
        inputs: &[(usize, Tensor)],
        outputs: &[usize],
        _: &StopHandle,
    ) -> Result<Vec<Tensor>, EngineError> {
        let (_, tensor) = &inputs[0];
        Ok(outputs.iter().map(|_| tensor.clone()).collect())
    }

    fn stop_handle(&self) -> Result<StopHandle, EngineError> {
        Ok(Arc::new(NoStop))
    }
}

#[derive(Debug)]
struct NoStop;

impl Stop for NoStop {
    fn stop(&self) {}

    fn as_any(&self) -> &dyn Any {
        self
    }
}
