//! A model's lines of the repository index.

use std::sync::Arc;

use dormouse_core::lifecycle::Stage;

use super::Model;
use crate::service::{IndexEntry, IndexState};

impl Model {
    pub(in crate::registry) fn index(&self) -> Vec<IndexEntry> {
        let status = self.status.lock();
        let entry = |version: String, state, reason: &str| IndexEntry {
            name: Arc::clone(&self.name),
            version,
            state,
            reason: reason.to_owned(),
        };
        if let Some(generation) = self.current() {
            return generation
                .units
                .iter()
                .map(|unit| {
                    let version = unit.id().version.to_string();
                    let reload = status
                        .reload_problem
                        .as_ref()
                        .map(|error| format!("reload failed: {error}"));
                    if let Some(lost) = unit.lost().filter(|_| !status.unloading) {
                        return entry(version, IndexState::Unavailable, &lost.to_string());
                    }
                    let worker = unit.worker_pid();
                    let awake = worker.map(|pid| format!("awake in worker {pid}"));
                    let parked = worker.map(|pid| format!("parked in worker {pid}"));
                    match unit.stage() {
                        _ if status.unloading => entry(version, IndexState::Unloading, ""),
                        Stage::Failed { .. } => {
                            let reason = unit
                                .load_error()
                                .map(|error| error.to_string())
                                .unwrap_or_default();
                            entry(version, IndexState::Unavailable, &reason)
                        }
                        Stage::Loading if status.loading => entry(version, IndexState::Loading, ""),
                        Stage::Loading => entry(
                            version,
                            IndexState::Ready,
                            reload.as_deref().unwrap_or("waking"),
                        ),
                        Stage::Retired => entry(version, IndexState::Unloading, ""),
                        Stage::Warm => {
                            let reason = reload.or(awake).unwrap_or_default();
                            entry(version, IndexState::Ready, &reason)
                        }
                        Stage::Parked => entry(
                            version,
                            IndexState::Ready,
                            reload.as_deref().or(parked.as_deref()).unwrap_or("parked"),
                        ),
                        Stage::Cold | Stage::Closing => entry(
                            version,
                            IndexState::Ready,
                            reload.as_deref().unwrap_or("asleep"),
                        ),
                    }
                })
                .collect();
        }
        let state = if status.callable {
            IndexState::Ready
        } else {
            IndexState::Unavailable
        };
        match (&status.problem, status.versions.as_slice()) {
            (Some((error, _)), _) => vec![entry(
                String::new(),
                IndexState::Unavailable,
                error.message(),
            )],
            (None, _) if status.loading => vec![entry(String::new(), IndexState::Loading, "")],
            (None, []) if status.callable => vec![entry(String::new(), state, "asleep")],
            (None, []) => vec![entry(String::new(), state, "")],
            (None, versions) => {
                let reason = if status.callable {
                    "asleep"
                } else {
                    "unloaded"
                };
                versions
                    .iter()
                    .map(|version| entry(version.to_string(), state, reason))
                    .collect()
            }
        }
    }
}
