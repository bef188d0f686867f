//! Looks at the repositories in the background: once after the start, to find what cannot be
//! served before anybody asks for it, and again and again in control mode `poll`.

use std::sync::Arc;
use std::time::Duration;

use super::model::Model;
use super::overrides::Given;
use super::{Registry, blocking};
use crate::error::ServeError;

impl Registry {
    /// Checks every model and loads those that ask for it. Ends when all were looked at.
    pub async fn check_all(self: &Arc<Self>) {
        let started = self.host.clock.now();
        let models: Vec<Arc<Model>> = self.models.load().values().cloned().collect();
        let count = models.len();
        if self.has_remotes() {
            let registry = Arc::clone(self);
            let fetched = blocking(move || {
                registry.fetch_configs();
                Ok(())
            });
            // Whoever looks at a model learns what is missing of it.
            let _ = fetched.await;
        }
        // In slices, so that one thread is not taken for seconds and a stop is seen in time.
        for slice in models.chunks(64) {
            let registry = Arc::clone(self);
            let slice = slice.to_vec();
            let eager = blocking(move || {
                Ok(slice
                    .into_iter()
                    .filter(|model| registry.check(model))
                    .collect::<Vec<_>>())
            })
            .await;
            for model in eager.unwrap_or_default() {
                let registry = Arc::clone(self);
                tokio::spawn(async move {
                    // Reported by the reload itself, and in the index.
                    let _ = registry.reload(&model, Given::default(), true).await;
                });
            }
        }
        tracing::info!(models = count, took = ?(self.host.clock.now() - started), "repository checked");
    }

    /// Follows the repositories for ever.
    pub async fn follow(self: Arc<Self>, interval: Duration) {
        let mut ticks = tokio::time::interval(interval);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        ticks.tick().await;
        loop {
            ticks.tick().await;
            if let Err(error) = self.follow_once().await {
                tracing::error!(%error, "cannot look at the model repository");
            }
        }
    }

    async fn follow_once(self: &Arc<Self>) -> Result<(), ServeError> {
        let gone = {
            let registry = Arc::clone(self);
            blocking(move || {
                let differs = registry.refresh_remotes();
                let gone = registry.rescan();
                if differs {
                    registry.check_remote_models();
                }
                gone
            })
            .await?
        };
        for model in gone {
            tracing::info!(model = %model.name(), "model is gone from the repository");
            tokio::spawn(async move { model.withdraw().await });
        }
        let changed = {
            let registry = Arc::clone(self);
            blocking(move || Ok(registry.changed_models())).await?
        };
        for (model, wake) in changed {
            tracing::info!(model = %model.name(), "model has changed in the repository");
            let registry = Arc::clone(self);
            tokio::spawn(async move {
                // Reported by the reload itself, and in the index.
                let _ = registry.reload(&model, Given::default(), wake).await;
            });
        }
        Ok(())
    }

    /// Models whose files differ from those that were read, and whether each is to be loaded.
    /// Models nobody asked for are checked, so that the index tells what became of them. Files
    /// that were tried or checked are left alone until they change again.
    pub(super) fn changed_models(&self) -> Vec<(Arc<Model>, bool)> {
        let models = self.models.load_full();
        let is_news = |model: &Model| {
            let files = self.state_of_files(model);
            // What cannot be looked at is tried, to learn why.
            files.is_none_or(|files| model.is_news(files))
        };
        models
            .values()
            .filter_map(|model| match model.current() {
                None => {
                    let is_news = is_news(model);
                    // A problem may have gone without a change of the files.
                    if !is_news && !model.has_problem() {
                        return None;
                    }
                    let is_eager = self.check(model);
                    (is_news && is_eager).then(|| (Arc::clone(model), true))
                }
                // A folder that cannot be opened is gone or half-written: the next look will tell.
                Some(generation) => {
                    let changed = self.has_changed(model, generation.stamp()).unwrap_or(false);
                    (changed && is_news(model)).then(|| (Arc::clone(model), false))
                }
            })
            .collect()
    }
}
