//! An engine whose sessions live in a process of their own.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Weak};
use std::time::Duration;

use dormouse_model_store::spec::SessionSpec;
use dormouse_model_store::store::{Pack, PreparedModel};
use parking_lot::Mutex;

use super::Isolation;
use super::messages::{Hello, PackedWeight, Reply, Request, SourceForm};
use super::nursery::{OnDeath, Vitals};
use super::segment::{Blob, Pool};
use super::session::RemoteSession;
use super::socket::MOST_FDS;
use super::worker::{Worker, own_bytes};
use crate::engine::{
    Effort, Engine, EngineError, EngineIdentity, GraphBytes, ModelBytes, OptimizeError, Optimized,
    Packing, PreparedBytes, Session,
};

/// An optimised graph larger than this is a mistake: its weights are outside.
const MOST_GRAPH: u64 = 2 << 30;

/// What bounds a worker beside its memory budget.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Bounds {
    /// Bytes of address space.
    pub(super) memory: Option<u64>,
    /// Seconds of CPU time.
    pub(super) cpu: Option<u64>,
    /// How long opening a session may take; none: as long as the server's configuration says.
    pub(super) opening: Option<Duration>,
}

/// Opens sessions in one worker, which is started with the first and ended with the last of them.
pub struct IsolatedEngine {
    isolation: Arc<Isolation>,
    /// The model.
    label: String,
    bounds: Bounds,
    on_death: OnDeath,
    /// Held while a worker starts, which takes long: whoever only looks does not wait for that.
    starting: Mutex<()>,
    /// The one that has sessions.
    present: Mutex<Option<Present>>,
}

/// A worker, without keeping it: whoever lets go of the last reference waits for its end.
struct Present {
    worker: Weak<Worker>,
    vitals: Arc<Vitals>,
    pool: Weak<Pool>,
}

impl Present {
    fn is_there(&self) -> bool {
        self.worker.strong_count() > 0 && !self.vitals.is_dead()
    }
}

impl fmt::Debug for IsolatedEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IsolatedEngine")
            .field("label", &self.label)
            .field("pid", &self.pid())
            .finish_non_exhaustive()
    }
}

impl IsolatedEngine {
    pub(super) fn new(
        isolation: Arc<Isolation>,
        label: String,
        bounds: Bounds,
        on_death: OnDeath,
    ) -> Self {
        Self {
            isolation,
            label,
            bounds,
            on_death,
            starting: Mutex::default(),
            present: Mutex::default(),
        }
    }

    /// The process that has the sessions, while there are any.
    pub fn pid(&self) -> Option<u32> {
        let present = self.present.lock();
        let present = present.as_ref().filter(|present| present.is_there());
        present.map(|present| present.vitals.pid)
    }

    /// What that process holds that nobody else does, tensors on their way included.
    pub fn held_bytes(&self) -> u64 {
        let (pid, pool) = {
            let present = self.present.lock();
            let Some(present) = present.as_ref().filter(|present| present.is_there()) else {
                return 0;
            };
            (present.vitals.pid, present.pool.upgrade())
        };
        own_bytes(pid).saturating_add(pool.map_or(0, |pool| pool.bytes()))
    }

    fn worker(&self) -> Result<Arc<Worker>, EngineError> {
        let _starting = self.starting.lock();
        let present = self.present.lock().as_ref().and_then(|present| {
            let there = present.is_there();
            there.then(|| present.worker.upgrade()).flatten()
        });
        if let Some(worker) = present {
            return Ok(worker);
        }
        let isolation = &self.isolation;
        let hello = Hello {
            label: self.label.clone(),
            engine: isolation.engine_options.clone(),
            most_memory: self.bounds.memory,
            most_cpu: self.bounds.cpu,
        };
        let worker = Arc::new(Worker::start(
            isolation.nursery()?,
            &hello,
            isolation.settings.shared_memory.0,
            Arc::clone(&self.on_death),
        )?);
        tracing::info!(
            model = self.label,
            pid = worker.vitals.pid,
            "worker started"
        );
        *self.present.lock() = Some(Present {
            worker: Arc::downgrade(&worker),
            vitals: Arc::clone(&worker.vitals),
            pool: Arc::downgrade(&worker.pool),
        });
        Ok(worker)
    }

    fn opening(&self) -> Duration {
        let usual = self.isolation.settings.load_timeout;
        self.bounds.opening.unwrap_or(usual)
    }

    fn ask(
        &self,
        worker: &Worker,
        request: &Request,
        fds: &[BorrowedFd<'_>],
    ) -> Result<(Reply, Vec<OwnedFd>), EngineError> {
        worker.call(self.opening())?.ask(request, fds)
    }

    fn session(
        &self,
        worker: Arc<Worker>,
        reply: Reply,
        packs: Vec<Arc<Pack>>,
    ) -> Result<Arc<dyn Session>, EngineError> {
        match reply {
            Reply::Opened {
                session,
                inputs,
                optional_inputs,
                outputs,
            } => Ok(Arc::new(RemoteSession {
                worker,
                id: session,
                inputs,
                optional_inputs,
                outputs,
                _packs: packs,
                watchdog: self.isolation.settings.watchdog,
                output_bytes: AtomicUsize::new(0),
            })),
            Reply::Failed(why) => Err(EngineError::Failed(why)),
            _ => Err(worker.garbled()),
        }
    }
}

impl Engine for IsolatedEngine {
    fn prepare(&self) -> Result<Duration, EngineError> {
        // With the worker, which is started when there is a session for it.
        Ok(Duration::ZERO)
    }

    fn open(
        &self,
        model: ModelBytes,
        options: &SessionSpec,
        effort: Effort,
    ) -> Result<Arc<dyn Session>, EngineError> {
        let worker = self.worker()?;
        let (source, file) = handed_over(model)?;
        let request = Request::Open {
            session: options.clone(),
            effort,
            source,
        };
        let (reply, _) = self.ask(&worker, &request, &[file.as_fd()])?;
        self.session(worker, reply, Vec::new())
    }

    fn optimize(
        &self,
        model: ModelBytes,
        options: &SessionSpec,
        scratch: &Path,
    ) -> Result<Optimized, OptimizeError> {
        let worker = self.worker()?;
        let (source, file) = handed_over(model)?;
        let request = Request::Optimize {
            session: options.clone(),
            source,
            scratch: scratch.to_owned(),
        };
        let (reply, fds) = self.ask(&worker, &request, &[file.as_fd()])?;
        match (reply, fds.into_iter().next()) {
            (
                Reply::Optimized {
                    tensors,
                    by_rows,
                    data_file,
                },
                Some(graph),
            ) => {
                let graph = Blob::from_fd(graph, MOST_GRAPH)
                    .map_err(|error| EngineError::Failed(error.to_string()))?;
                Ok(Optimized {
                    graph: graph.bytes().to_vec(),
                    tensors,
                    by_rows,
                    data_file,
                })
            }
            (Reply::NotPreparable(why), _) => Err(OptimizeError::NotPreparable(why)),
            (Reply::Failed(why), _) => Err(EngineError::Failed(why).into()),
            _ => Err(worker.garbled().into()),
        }
    }

    fn open_prepared(
        &self,
        _: PreparedBytes,
        _: &SessionSpec,
        _: Packing,
    ) -> Result<Arc<dyn Session>, EngineError> {
        Err(EngineError::Failed(
            "weights that are in no file cannot be shared with another process".to_owned(),
        ))
    }

    fn open_stored(
        &self,
        prepared: &Arc<PreparedModel>,
        options: &SessionSpec,
        packing: Packing,
    ) -> Result<Arc<dyn Session>, EngineError> {
        if prepared.packs.len() >= MOST_FDS - 1 {
            return Err(EngineError::Failed(format!(
                "its weights are in {} files, too many to hand over to another process",
                prepared.packs.len()
            )));
        }
        let worker = self.worker()?;
        let graph = blob([&prepared.graph[..]].into_iter())?;
        let weights = prepared.weights.iter().map(|weight| PackedWeight {
            name: weight.name.clone(),
            element_type: weight.element_type,
            dims: weight.dims.clone(),
            pack: weight.pack,
            offset: weight.range().start,
            len: weight.len,
        });
        let largest = prepared.packs.iter().max_by_key(|pack| pack.len());
        let request = Request::OpenPrepared {
            session: options.clone(),
            packing,
            family: largest.map(|pack| *pack.digest().as_bytes()),
            packs: prepared
                .packs
                .iter()
                .map(|pack| pack.digest().to_string())
                .collect(),
            weights: weights.collect(),
            populate: packing == Packing::Off,
        };
        let mut fds = vec![graph.as_fd()];
        fds.extend(prepared.packs.iter().map(|pack| pack.as_fd()));
        let (reply, _) = self.ask(&worker, &request, &fds)?;
        self.session(worker, reply, prepared.packs.clone())
    }

    fn identity(&self) -> Result<EngineIdentity, EngineError> {
        // The same library on the same machine.
        self.isolation.inner.identity()
    }

    fn describe(&self) -> String {
        self.isolation.inner.describe()
    }
}

/// A model's bytes as a file that can be handed over.
fn handed_over(model: ModelBytes) -> Result<(SourceForm, OwnedFd), EngineError> {
    match model.graph {
        GraphBytes::File(file) => Ok((SourceForm::File, file.into())),
        GraphBytes::Memory(graph) => {
            let external = model.external.iter().map(|(_, bytes)| &bytes[..]);
            let whole = blob(std::iter::once(&graph[..]).chain(external))?;
            let external = model.external.iter();
            let form = SourceForm::Blob {
                graph: graph.len(),
                external: external
                    .map(|(name, bytes)| (name.clone(), bytes.len()))
                    .collect(),
            };
            let file = whole.into_fd();
            Ok((form, file))
        }
    }
}

fn blob<'a>(parts: impl Iterator<Item = &'a [u8]> + Clone) -> Result<Blob, EngineError> {
    let len = parts.clone().map(<[u8]>::len).sum();
    let failed = |error: io::Error| {
        EngineError::Failed(format!("{len} bytes cannot be handed over: {error}"))
    };
    let fill = |mut room: &mut [u8]| {
        for part in parts {
            let (head, rest) = room.split_at_mut(part.len());
            head.copy_from_slice(part);
            room = rest;
        }
    };
    Blob::new(len, fill).map_err(failed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::IsolationConfig;
    use crate::engine::onnx::OnnxOptions;
    use crate::isolation::nursery::Nursery;
    use crate::metrics::Metrics;
    use crate::unit::tests::fake::Bench;

    #[tokio::test(flavor = "multi_thread")]
    async fn who_looks_at_an_engine_does_not_wait_for_a_worker_that_starts() {
        let folder = tempfile::tempdir().unwrap();
        let (program, begun, end) = (
            folder.path().join("worker"),
            folder.path().join("begun"),
            folder.path().join("end"),
        );
        // Written by somebody else: a file that a thread of this process has open for writing,
        // or a child between its fork and its program, cannot be started.
        let script = format!(
            "#!/bin/sh\n: > '{}'\nwhile [ ! -e '{}' ]; do sleep 0.02; done\n",
            begun.display(),
            end.display()
        );
        let written = std::process::Command::new("/bin/sh")
            .args(["-c", r#"printf %s "$1" > "$0" && chmod 700 "$0""#])
            .args([program.as_os_str(), script.as_ref()])
            .status();
        assert!(written.unwrap().success());
        let metrics = Metrics::new().unwrap();
        let runtime = tokio::runtime::Handle::current();
        let nursery = Nursery::new(program, metrics.server().workers.clone(), runtime).unwrap();
        let isolation = Isolation::new(
            IsolationConfig::default(),
            OnnxOptions::new(""),
            Arc::clone(&Bench::new().host.engine),
            metrics,
        );
        assert!(isolation.nursery.set(nursery).is_ok());
        let engine = isolation.engine_aside(&dormouse_core::id::ModelId::new("m", 1));
        let opening = tokio::task::spawn_blocking({
            let engine = Arc::clone(&engine);
            let model = ModelBytes::in_memory(Vec::new(), Vec::new());
            move || {
                engine
                    .open(model, &SessionSpec::default(), Effort::Full)
                    .err()
            }
        });
        while !begun.exists() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        assert_eq!((engine.pid(), engine.held_bytes()), (None, 0));
        assert!(!opening.is_finished(), "somebody waited for the worker");
        std::fs::write(end, "").unwrap();
        let error = opening.await.unwrap().unwrap();
        assert!(matches!(error, EngineError::Lost(_)), "{error}");
    }
}
