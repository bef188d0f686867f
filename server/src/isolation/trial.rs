//! The first load of a model nobody has loaded yet, in a process that is thrown away: if that
//! crashes, hangs or takes more than it may, the model is refused and nothing else has happened.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use dormouse_core::id::{ByteSize, ModelId};
use dormouse_model_store::spec::SessionSpec;
use parking_lot::Mutex;

use super::Isolation;
use super::engine::{Bounds, IsolatedEngine};
use crate::engine::{Effort, Engine, EngineError, ModelBytes};

/// Address space that a worker takes before it has a model: libraries, stacks, and what the
/// allocator sets aside for each thread without using it.
const BASE: u64 = 4 << 30;

/// Verdicts kept in memory; whoever has more models has a store to keep them in.
const MOST_KEPT: usize = 4096;

/// Why a model was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("its first load, tried in a process of its own, went wrong: {reason}")]
pub struct TrialError {
    reason: String,
    /// Somebody killed the process, or the system did for want of memory: that says nothing of the
    /// model, and is not remembered.
    by_accident: bool,
}

impl TrialError {
    pub fn is_by_accident(&self) -> bool {
        self.by_accident
    }
}

/// Verdicts on models by what they are made of, in memory and in a folder if there is one.
#[derive(Debug, Default)]
pub struct Trials {
    known: Mutex<HashMap<String, Result<(), TrialError>>>,
}

impl Trials {
    /// The verdict on a model that was tried before.
    pub fn known(&self, folder: Option<&Path>, key: &str) -> Option<Result<(), TrialError>> {
        if let Some(verdict) = self.known.lock().get(key) {
            return Some(verdict.clone());
        }
        let text = std::fs::read_to_string(file_of(folder?, key)?).ok()?;
        let verdict = match text.split_once('\n')? {
            ("passed", _) => Ok(()),
            ("failed", reason) => Err(TrialError {
                reason: reason.to_owned(),
                by_accident: false,
            }),
            _ => return None,
        };
        self.keep(key, &verdict);
        Some(verdict)
    }

    /// Remembers a verdict. What cannot be written down is found out again.
    pub fn note(&self, folder: Option<&Path>, key: &str, verdict: &Result<(), TrialError>) {
        if matches!(verdict, Err(error) if error.by_accident) {
            return;
        }
        self.keep(key, verdict);
        let Some((folder, file)) = folder.and_then(|folder| Some((folder, file_of(folder, key)?)))
        else {
            return;
        };
        let text = match verdict {
            Ok(()) => "passed\n".to_owned(),
            Err(error) => format!("failed\n{}", error.reason),
        };
        let written = std::fs::create_dir_all(folder).and_then(|()| {
            let mut draft = tempfile::NamedTempFile::new_in(folder)?;
            std::io::Write::write_all(&mut draft, text.as_bytes())?;
            draft.persist(&file)?;
            Ok(())
        });
        if let Err(error) = written {
            tracing::debug!(file = %file.display(), %error, "a verdict cannot be kept");
        }
    }

    fn keep(&self, key: &str, verdict: &Result<(), TrialError>) {
        let mut known = self.known.lock();
        if known.len() >= MOST_KEPT {
            known.clear();
        }
        known.insert(key.to_owned(), verdict.clone());
    }
}

/// Where the verdict on a model is: keys are digests, and nothing else becomes a path.
fn file_of(folder: &Path, key: &str) -> Option<PathBuf> {
    let plain = !key.is_empty() && key.bytes().all(|byte| byte.is_ascii_alphanumeric());
    plain.then(|| folder.join(key))
}

impl Isolation {
    /// Whether models are tried out before they are first loaded.
    pub fn tries_models(&self, isolated: bool) -> bool {
        self.settings.trial_load.unwrap_or(isolated)
    }

    /// Loads a model in a process that is thrown away afterwards. `needed` is what a load of it
    /// takes, as far as that is known. An error of the engine's own is no verdict: the load that
    /// follows meets it again.
    pub fn try_out(
        self: &Arc<Self>,
        id: &ModelId,
        model: ModelBytes,
        (session, effort, needed): (&SessionSpec, Effort, u64),
    ) -> Result<(), TrialError> {
        let settings = &self.settings;
        let memory = settings.trial_memory.map_or_else(
            || BASE.saturating_add(needed.saturating_mul(2)),
            |memory| memory.0,
        );
        let limit = settings.trial_time;
        let bounds = Bounds {
            memory: Some(memory),
            cpu: Some(cpu_seconds(limit)),
            opening: Some(limit),
        };
        let label = format!("{}/{}", id.name, id.version);
        let engine = IsolatedEngine::new(Arc::clone(self), label, bounds, Arc::new(|_| {}));
        match engine.open(model, session, effort) {
            Ok(_) | Err(EngineError::Terminated) => Ok(()),
            Err(EngineError::Lost(lost)) => Err(TrialError {
                reason: lost.reason.to_string(),
                by_accident: !lost.by_itself,
            }),
            // A model that is refused is refused in the engine's words; one that asks for too much
            // memory is told what it might have had.
            Err(EngineError::Failed(why)) => match is_out_of_memory(&why) {
                true => Err(TrialError {
                    reason: format!(
                        "{why} (at most {} of address space were allowed: isolation.trial_memory)",
                        ByteSize(memory)
                    ),
                    by_accident: false,
                }),
                false => Ok(()),
            },
        }
    }
}

/// All cores at work for as long as a trial may take.
fn cpu_seconds(limit: Duration) -> u64 {
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    limit
        .as_secs()
        .max(1)
        .saturating_mul(cores.try_into().unwrap_or(1))
}

/// Whether the engine says that memory ran out: it has no code for it.
fn is_out_of_memory(why: &str) -> bool {
    ["bad_alloc", "Failed to allocate", "Cannot allocate memory"]
        .iter()
        .any(|phrase| why.contains(phrase))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_verdict_outlives_the_server() {
        let folder = tempfile::tempdir().unwrap();
        let folder = Some(folder.path());
        let bad = Err(TrialError {
            reason: "it crashed".to_owned(),
            by_accident: false,
        });
        let trials = Trials::default();
        assert_eq!(trials.known(folder, "aa11"), None);
        trials.note(folder, "aa11", &bad);
        trials.note(folder, "bb22", &Ok(()));
        assert_eq!(trials.known(folder, "aa11"), Some(bad.clone()));
        let another = Trials::default();
        assert_eq!(another.known(folder, "aa11"), Some(bad));
        assert_eq!(another.known(folder, "bb22"), Some(Ok(())));
        assert_eq!(another.known(folder, "../bb22"), None);
    }

    #[test]
    fn an_accident_is_no_verdict() {
        let folder = tempfile::tempdir().unwrap();
        let trials = Trials::default();
        let killed = Err(TrialError {
            reason: "its worker process 7 was killed".to_owned(),
            by_accident: true,
        });
        trials.note(Some(folder.path()), "aa11", &killed);
        assert_eq!(trials.known(Some(folder.path()), "aa11"), None);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}
