//! Prepares models: has the engine optimise a graph once, puts its weights into the store, and
//! finds out by running both whether packed weights are worth their memory.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use dormouse_core::code::ErrorCode;
use dormouse_model_store::repository::FileIdentity;
use dormouse_model_store::spec::SessionSpec;
use dormouse_model_store::store::{
    Begun, Digest, EntryKey, KeyParts, NewTensor, PackingVerdict, PreparedContent, PreparedFacts,
    PreparedModel, Store, StoreError, TensorData,
};
use tokio::time::Instant;

use crate::engine::{Engine, EngineError, EngineIdentity, OptimizeError, Packing};
use crate::error::ServeError;
use crate::memory;
use crate::sample;
use crate::unit::{Source, SourceModel, still_the_same};

/// Packing pays when it makes runs shorter by at least this share.
const WORTHWHILE: f64 = 0.05;
/// And by at least this much: what is less cannot be told from chance.
const NOTICEABLE: Duration = Duration::from_micros(100);
/// Runs to compare, and how long they may take together.
const COMPARED_RUNS: usize = 7;
const COMPARING_TAKES: Duration = Duration::from_secs(4);

/// A source's files by the names the graph gives them.
pub type SourceDigests = Vec<(String, Digest)>;

/// Why a model was not prepared.
#[derive(Debug, thiserror::Error)]
pub enum PrepareError {
    #[error("{0}")]
    Source(ServeError),
    #[error("the model's files changed while it was being prepared")]
    SourceChanged,
    #[error(transparent)]
    Engine(#[from] EngineError),
    #[error("it can only be loaded as it is: {0}")]
    NotPreparable(String),
    #[error("there is no prepared store: it is switched off or cannot be opened")]
    NoStore,
    #[error("another process is preparing it")]
    Busy,
    #[error("the server is shutting down")]
    Stopped,
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// How a model came to be in the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    Prepared,
    AlreadyThere,
}

/// What is prepared: where its bytes come from, how its session is built, what it is called.
#[derive(Clone, Copy, Debug)]
pub struct Subject<'a> {
    pub source: &'a dyn Source,
    /// What prepares it.
    pub engine: &'a dyn Engine,
    pub session: &'a SessionSpec,
    pub label: &'a str,
}

/// The store together with the engine that fills it.
#[derive(Debug)]
pub struct Preparation {
    store: Arc<Store>,
    engine: Arc<dyn Engine>,
    identity: OnceLock<EngineIdentity>,
    stopped: AtomicBool,
}

impl Preparation {
    pub fn new(store: Arc<Store>, engine: Arc<dyn Engine>) -> Self {
        Self {
            store,
            engine,
            identity: OnceLock::new(),
            stopped: AtomicBool::new(false),
        }
    }

    pub fn store(&self) -> &Arc<Store> {
        &self.store
    }

    /// Begins nothing any more, and gives up what is under way at its next step.
    pub fn stop(&self) {
        self.stopped.store(true, Ordering::Relaxed);
    }

    fn go_on(&self) -> Result<(), PrepareError> {
        match self.stopped.load(Ordering::Relaxed) {
            true => Err(PrepareError::Stopped),
            false => Ok(()),
        }
    }

    /// What the store has of a model; none as well when that would take reading its files, unless it has
    /// a model of that name and size.
    pub fn find(&self, subject: &Subject<'_>) -> Option<Arc<PreparedModel>> {
        let digests = match subject.source.known_digests(self.store.source_digests()) {
            Ok(Some(digests)) => digests,
            Ok(None) => self.digests_of_a_copy(subject)?,
            Err(error) => {
                tracing::debug!(model = subject.label, %error, "the model's files cannot be looked at");
                return None;
            }
        };
        let found = self
            .key(digests, subject.session)
            .map_err(|error| error.to_string())
            .and_then(|key| self.store.find(&key).map_err(|error| error.to_string()));
        found.unwrap_or_else(|error| {
            tracing::warn!(
                model = subject.label,
                error,
                "the prepared store cannot be used"
            );
            None
        })
    }

    /// Of files that are not those that were prepared, but may well have the same content, as in an image
    /// or on a new node: to read them takes less than to load them.
    fn digests_of_a_copy(&self, subject: &Subject<'_>) -> Option<SourceDigests> {
        let source = subject.source;
        if !self.store.had(subject.label, source.size()) || !source.settles_in().is_zero() {
            return None;
        }
        self.digests(subject, None)
            .inspect_err(|error| {
                tracing::debug!(model = subject.label, %error, "the model's files cannot be read");
            })
            .ok()
    }

    /// Puts a model into the store. Blocks for as long as several plain loads take.
    pub fn prepare(
        &self,
        subject: &Subject<'_>,
    ) -> Result<(Outcome, Arc<PreparedModel>), PrepareError> {
        let started = Instant::now();
        self.go_on()?;
        let digests = self.digests(subject, None)?;
        let key = self.key(digests.clone(), subject.session)?;
        let draft = match self.store.begin(&key)? {
            Begun::Exists(prepared) => {
                self.name(&prepared, subject.label);
                return Ok((Outcome::AlreadyThere, self.judged(prepared, subject)));
            }
            Begun::Busy => return Err(PrepareError::Busy),
            Begun::Draft(draft) => draft,
        };
        self.go_on()?;
        let SourceModel {
            bytes,
            operators,
            file,
            files,
            ..
        } = subject.source.read().map_err(PrepareError::Source)?;
        let optimized = subject
            .engine
            .optimize(bytes, subject.session, draft.scratch())
            .map_err(|error| match error {
                OptimizeError::NotPreparable(why) => PrepareError::NotPreparable(why),
                OptimizeError::Engine(error) => PrepareError::Engine(error),
            })?;
        self.go_on()?;
        still_the_same(file.as_ref()).map_err(PrepareError::Source)?;
        // The files were read twice; what is stored under their digests must be made of them.
        if self.digests(subject, Some(&files))? != digests {
            return Err(PrepareError::SourceChanged);
        }
        let data = optimized.data_file.unwrap_or_default();
        let data = data
            .strip_prefix(draft.scratch())
            .unwrap_or(&data)
            .to_owned();
        let tensors = optimized.tensors.into_iter();
        let tensors = tensors.map(|tensor| NewTensor {
            name: tensor.name,
            element_type: tensor.element_type,
            dims: tensor.dims,
            data: TensorData::Scratch {
                file: data.clone(),
                offset: tensor.offset,
                len: tensor.len,
            },
        });
        let prepared = draft.commit(PreparedContent {
            graph: optimized.graph,
            tensors: tensors.collect(),
            facts: PreparedFacts {
                models: vec![subject.label.to_owned()],
                source_bytes: subject.source.size(),
                is_steady: operators.is_steady,
                by_rows: optimized.by_rows,
                prepare_us: Some(micros(started.elapsed())),
                ..PreparedFacts::default()
            },
        })?;
        memory::release_memory();
        Ok((Outcome::Prepared, self.judged(prepared, subject)))
    }

    /// What a model is stored under. Reads its files if they are not known yet.
    pub fn key_of(&self, subject: &Subject<'_>) -> Result<EntryKey, PrepareError> {
        let digests = self.digests(subject, None)?;
        Ok(self.key(digests, subject.session)?)
    }

    fn digests(
        &self,
        subject: &Subject<'_>,
        read: Option<&[FileIdentity]>,
    ) -> Result<SourceDigests, PrepareError> {
        let digests = subject.source.digests(self.store.source_digests(), read);
        digests.map_err(|error| match error.code() {
            // A model without files stays without.
            ErrorCode::Unsupported => PrepareError::NotPreparable(error.message().to_owned()),
            _ => PrepareError::Source(error),
        })
    }

    fn key(&self, sources: SourceDigests, session: &SessionSpec) -> Result<EntryKey, EngineError> {
        let identity = match self.identity.get() {
            Some(identity) => identity.clone(),
            None => {
                let identity = self.engine.identity()?;
                self.identity.get_or_init(|| identity).clone()
            }
        };
        let parts = KeyParts {
            sources,
            engine: identity.engine,
            provider: identity.provider,
            cpu: identity.cpu,
            options: format!("{session:?}"),
        };
        Ok(parts.key())
    }

    /// Notes under which name the model is served as well.
    fn name(&self, prepared: &PreparedModel, label: &str) {
        if prepared.facts.models.iter().any(|name| name == label) {
            return;
        }
        let noted = self.store.update_facts(&prepared.key, |facts| {
            facts.models.push(label.to_owned());
        });
        if let Err(error) = noted {
            tracing::debug!(model = label, %error, "a prepared model's name cannot be kept");
        }
    }

    /// The model with a verdict on packing, measured unless it was before.
    fn judged(&self, prepared: Arc<PreparedModel>, subject: &Subject<'_>) -> Arc<PreparedModel> {
        // What is not measured now is by whoever prepares it next.
        if prepared.facts.packing.is_some() || self.go_on().is_err() {
            return prepared;
        }
        let verdict = match self.compare(&prepared, subject) {
            Ok(Some(verdict)) => verdict,
            // Nothing could be made up that the model takes: packed it is as fast as anywhere.
            Ok(None) => return prepared,
            Err(error) => {
                tracing::warn!(model = subject.label, %error, "a prepared model cannot be run");
                return prepared;
            }
        };
        tracing::info!(
            model = subject.label,
            unpacked_us = verdict.unpacked_run_us,
            packed_us = verdict.packed_run_us,
            pays = verdict.pays,
            "packing measured"
        );
        let noted = self.store.update_facts(&prepared.key, |facts| {
            facts.packing = Some(verdict);
        });
        match noted {
            Ok(_) => {
                let found = self.store.find(&prepared.key).ok().flatten();
                found.unwrap_or(prepared)
            }
            Err(error) => {
                tracing::warn!(model = subject.label, %error, "the verdict on packing cannot be kept");
                prepared
            }
        }
    }

    fn compare(
        &self,
        prepared: &Arc<PreparedModel>,
        subject: &Subject<'_>,
    ) -> Result<Option<PackingVerdict>, EngineError> {
        let open = |packing| {
            let engine = subject.engine;
            engine.open_stored(prepared, subject.session, packing)
        };
        let unpacked = open(Packing::Off)?;
        let stop = unpacked.stop_handle()?;
        let Some(inputs) = sample::inputs(&*unpacked, &stop) else {
            return Ok(None);
        };
        let before = memory::private_bytes();
        let packed = open(Packing::On)?;
        let private = memory::private_bytes().zip(before);
        let outputs: Vec<usize> = (0..unpacked.outputs().len()).collect();
        let mut shortest = [Duration::MAX; 2];
        let started = Instant::now();
        for round in 0..COMPARED_RUNS {
            // In turns, so that a busy moment of the machine meets both.
            for (session, shortest) in [&unpacked, &packed].into_iter().zip(&mut shortest) {
                let began = Instant::now();
                session.run(&inputs, &outputs, &stop)?;
                *shortest = (*shortest).min(began.elapsed());
            }
            let stopped = self.stopped.load(Ordering::Relaxed);
            if stopped || round > 0 && started.elapsed() > COMPARING_TAKES {
                break;
            }
        }
        let [unpacked_run, packed_run] = shortest;
        let gain = 1.0 - packed_run.as_secs_f64() / unpacked_run.as_secs_f64().max(1e-9);
        Ok(Some(PackingVerdict {
            unpacked_run_us: micros(unpacked_run),
            packed_run_us: micros(packed_run),
            packed_private_bytes: private.map_or(0, |(after, before)| after.saturating_sub(before)),
            pays: gain >= WORTHWHILE && unpacked_run.saturating_sub(packed_run) >= NOTICEABLE,
        }))
    }
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}
