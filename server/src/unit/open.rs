//! Opens sessions: over what the prepared store has of a model, or from the model's files.

use std::borrow::Cow;
use std::sync::Arc;

use dormouse_model_store::graph::OperatorFacts;
use dormouse_model_store::spec::{GraphLevel, ModelSpec, SessionSpec, TensorSpec};
use dormouse_model_store::store::PreparedModel;

use super::load::{NotLoaded, Stopped};
use super::made::MadePlaces;
use super::{Unit, still_the_same};
use crate::engine::instances::Instances;
use crate::engine::{Effort, EngineError, Packing, Session, SessionTensor};
use crate::error::ServeError;
use crate::timeline::{ColdStart, LoadStage, TimelineRecorder};

/// A session with the places of the model's tensors in it.
#[derive(Debug)]
pub(super) struct OpenSession {
    pub(super) session: Arc<dyn Session>,
    /// The session's index of each input of the model's signature.
    pub(super) inputs: Vec<usize>,
    pub(super) outputs: Vec<usize>,
    /// Runs of equal shapes take about equally long.
    pub(super) is_steady: bool,
    pub(super) weights: Weights,
    /// Tensors that the server makes and keeps, where the model has such.
    pub(super) made: Option<Box<MadePlaces>>,
}

/// Where a session has its weights.
#[derive(Clone, Debug)]
pub(super) enum Weights {
    /// In memory of its own, read from the model's files of so many bytes.
    Private { bytes: u64, effort: Effort },
    /// In the prepared store's files, read where they are mapped.
    Mapped(Arc<PreparedModel>),
    /// There, and packed in memory of its own.
    Packed(Arc<PreparedModel>),
}

/// Why there is no session over what the store has.
#[derive(Debug)]
pub(super) struct NotOpened {
    pub(super) error: ServeError,
    /// Its process was killed, which says nothing of what it was opening.
    pub(super) by_accident: bool,
}

impl Unit {
    /// As [`Unit::open_mapped`], once more if the process that was at it was killed.
    pub(super) fn open_mapped_twice(
        &self,
        prepared: &Arc<PreparedModel>,
        recorder: &TimelineRecorder,
    ) -> Result<OpenSession, NotOpened> {
        match self.open_mapped(prepared, recorder) {
            Err(failed) if failed.by_accident => self.open_mapped(prepared, recorder),
            opened => opened,
        }
    }

    /// Builds a session over the prepared store's map while its pages come in.
    fn open_mapped(
        &self,
        prepared: &Arc<PreparedModel>,
        recorder: &TimelineRecorder,
    ) -> Result<OpenSession, NotOpened> {
        recorder.set_kind(ColdStart::Prepared);
        let wake = &self.host.wake;
        if self.isolated.is_some() {
            // The process that reads them brings them in.
        } else if wake.switches.overlap {
            let (buffers, asked) = {
                let mut state = self.state.lock();
                let asked = std::mem::take(&mut state.load_asked);
                (state.first_buffers.clone(), asked)
            };
            // Of all that can be done beside building the session this is what a run waits for
            // if it is not there; what is not read of the weights yet it waits for as well, but
            // only when it comes to it.
            if let Some(buffers) = buffers {
                wake.start_buffers(&self.host.engine, buffers, recorder);
            }
            // Nobody waits for these: the first run reads what is there by then.
            drop(wake.start_populating(prepared, &asked, recorder));
        } else {
            wake.populate(prepared, recorder);
        }
        let _stage = recorder.stage(LoadStage::Session);
        self.open_prepared(prepared, Packing::Off)
    }

    /// Reads the model's files and builds a session with weights of its own.
    pub(super) fn open_source(
        &self,
        effort: Effort,
        recorder: &TimelineRecorder,
    ) -> Result<OpenSession, Stopped> {
        let opened = self.open_files(Some(recorder), effort);
        opened.map_err(|stopped| {
            // Whatever went wrong, it is of files that the model was not described from.
            match self.source.is_current() {
                true => stopped,
                false => NotLoaded::Outdated.into(),
            }
        })
    }

    /// What cannot be built in haste is built in full.
    pub(super) fn open_files(
        &self,
        recorder: Option<&TimelineRecorder>,
        effort: Effort,
    ) -> Result<OpenSession, Stopped> {
        let instances = match self.host.wake.switches.sharing {
            true => 1,
            false => self.spec.concurrency.max(1) as usize,
        };
        let mut sessions = Vec::new();
        let mut operators = OperatorFacts::default();
        for _ in 0..instances {
            let stage = recorder.map(|recorder| recorder.stage(LoadStage::Read));
            let source = self.source.read()?;
            if !source.is_current {
                return Err(NotLoaded::Outdated.into());
            }
            // A file that the engine reads is only opened here.
            let (read, parsed) = match source.file {
                None => (source.size, 0),
                Some(_) => (0, source.size),
            };
            if let Some(stage) = stage {
                stage.bytes(read);
            }
            operators = source.operators;
            let stage = recorder.map(|recorder| recorder.stage(LoadStage::Session));
            if let Some(stage) = &stage {
                stage.bytes(parsed);
            }
            let spec = self.session_from_files(effort, operators);
            let session = self.engine().open(source.bytes, &spec, effort);
            // First: what the engine says of a file that changed under it says nothing.
            still_the_same(source.file.as_ref())?;
            match session {
                Ok(session) => sessions.push(session),
                // Without optimising, operators are left that nothing is there to run.
                Err(EngineError::Failed(error))
                    if effort == Effort::Least && self.fits_in_full() =>
                {
                    self.never_in_haste(&error);
                    return self.open_files(recorder, Effort::Full);
                }
                Err(error) => {
                    return Err(match &source.file {
                        None => self.cannot_load(&error),
                        // It knows the file by a number.
                        Some(file) => self.cannot_load(&format!("{}: {error}", file.path())),
                    }
                    .into());
                }
            }
        }
        let session = match sessions.pop() {
            Some(only) if sessions.is_empty() => only,
            Some(first) => Arc::new(Instances::new(first, sessions)),
            None => return Err(ServeError::internal("no session was opened").into()),
        };
        let bytes = self.source.size().saturating_mul(instances as u64);
        let weights = Weights::Private { bytes, effort };
        let is_steady = operators.is_steady;
        Ok(OpenSession::new(&self.spec, session, is_steady, weights)?)
    }

    /// How a session is to be built from this model's files.
    pub(super) fn session_from_files(
        &self,
        effort: Effort,
        operators: OperatorFacts,
    ) -> Cow<'_, SessionSpec> {
        // Without room for more it is not replaced.
        let is_small = self.source.size() <= AS_IT_IS && self.fits_in_full();
        let takes_as_it_is = is_small && !operators.is_to_be_merged;
        from_files(&self.spec.session, effort, takes_as_it_is)
    }

    pub(super) fn open_prepared(
        &self,
        prepared: &Arc<PreparedModel>,
        packing: Packing,
    ) -> Result<OpenSession, NotOpened> {
        let session = self
            .engine()
            .open_stored(prepared, &self.spec.session, packing)
            .map_err(|error| NotOpened {
                error: self.cannot_load(&error),
                by_accident: matches!(error, EngineError::Lost(lost) if !lost.by_itself),
            })?;
        let weights = match packing {
            Packing::Off => Weights::Mapped(Arc::clone(prepared)),
            Packing::On => Weights::Packed(Arc::clone(prepared)),
        };
        let is_steady = prepared.facts.is_steady;
        OpenSession::new(&self.spec, session, is_steady, weights).map_err(|error| NotOpened {
            error,
            by_accident: false,
        })
    }
}

/// The largest model whose graph is taken as it is. Beyond it optimising is little beside reading the
/// weights, and what each run computes anew of them is much.
const AS_IT_IS: u64 = 32 << 20;

/// One that is soon replaced takes the graph as it is, unless it has operators that no run should meet:
/// optimising takes a third of what opening a small model takes, and more where the graph has branches,
/// all of which are gone through. In any case it leaves convolutions their layout, which saves a run less
/// than it takes to make: a quarter to a half of what building OCR's models and ResNet-50 takes.
fn from_files(spec: &SessionSpec, effort: Effort, takes_as_it_is: bool) -> Cow<'_, SessionSpec> {
    let graph_level = match spec.graph_level {
        _ if effort == Effort::Full => return Cow::Borrowed(spec),
        _ if takes_as_it_is => GraphLevel::Disabled,
        GraphLevel::All => GraphLevel::Extended,
        lower => lower,
    };
    Cow::Owned(SessionSpec {
        graph_level,
        ..spec.clone()
    })
}

impl OpenSession {
    /// Whether it was built in haste, to be replaced.
    pub(super) fn is_hasty(&self) -> bool {
        matches!(
            self.weights,
            Weights::Private {
                effort: Effort::Least,
                ..
            }
        )
    }

    /// Finds the model's tensors in the session.
    fn new(
        spec: &ModelSpec,
        session: Arc<dyn Session>,
        is_steady: bool,
        weights: Weights,
    ) -> Result<Self, ServeError> {
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
        let made = MadePlaces::find(spec, &*session)?;
        // However short its runs are: one that hangs must not hold up a thread that serves.
        let is_steady = is_steady && !session.is_remote();
        Ok(Self {
            session,
            inputs,
            outputs,
            is_steady,
            weights,
            made,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_soon_replaced_is_optimised_less() {
        let level = |asked, effort, takes_as_it_is| {
            let spec = SessionSpec {
                graph_level: asked,
                ..SessionSpec::default()
            };
            from_files(&spec, effort, takes_as_it_is).graph_level
        };
        for asked in [GraphLevel::Basic, GraphLevel::All] {
            assert_eq!(level(asked, Effort::Full, true), asked);
            assert_eq!(level(asked, Effort::Least, true), GraphLevel::Disabled);
        }
        let least = |asked| level(asked, Effort::Least, false);
        assert_eq!(least(GraphLevel::All), GraphLevel::Extended);
        assert_eq!(least(GraphLevel::Basic), GraphLevel::Basic);
    }
}
