//! Repositories that are elsewhere: opened, listed again, and looked at without fetching models.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use dormouse_model_store::config;
use dormouse_model_store::repository::{RemoteFile, Repository};

use super::model::Model;
use super::source::in_version;
use super::{Registry, RegistryConfig, blocking};
use crate::assets::cache_folder;
use crate::config::ControlMode;
use crate::error::ServeError;
use crate::host::Host;
use crate::remote::{Location, RemoteError, RemoteRepository, Remotes};

/// How long after a failure the repositories are listed again, at first and at most.
const FIRST_PAUSE: Duration = Duration::from_secs(2);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// A repository, and what lists it if it is elsewhere.
#[derive(Clone, Debug)]
pub(super) struct Place {
    pub(super) repository: Repository,
    pub(super) remote: Option<Arc<RemoteRepository>>,
}

/// What can be told of a model without fetching it.
#[derive(Debug)]
pub(super) struct Glance {
    pub(super) versions: Vec<u64>,
    pub(super) eager: bool,
}

/// Opens every repository of a configuration, and lists those that are elsewhere.
pub(super) fn open_places(
    config: &RegistryConfig,
    host: &Arc<Host>,
) -> Result<Vec<Place>, ServeError> {
    let mut remotes = None;
    let mut places = Vec::new();
    for path in &config.repositories {
        let cannot = |error: &dyn std::fmt::Display| {
            ServeError::unavailable(format!(
                "cannot open model repository {}: {error}",
                path.display()
            ))
        };
        let name = path.to_str().filter(|name| Location::is_address(name));
        let Some(name) = name else {
            let repository = Repository::open(path).map_err(|error| cannot(&error))?;
            places.push(Place {
                repository,
                remote: None,
            });
            continue;
        };
        let location = Location::parse(name).map_err(|error| cannot(&error))?;
        let remotes = match &mut remotes {
            Some(remotes) => remotes,
            None => remotes.insert(open_remotes(config, host).map_err(|error| cannot(&error))?),
        };
        let remote = remotes
            .repository(location)
            .map_err(|error| cannot(&error))?;
        let knows_nothing = remote.is_unknown();
        if let Err(error) = remote.refresh()
            && knows_nothing
            && !config.tolerates_unreachable
        {
            return Err(cannot(&error));
        }
        places.push(Place {
            repository: Repository::elsewhere(Arc::clone(&remote) as _),
            remote: Some(remote),
        });
    }
    Ok(places)
}

fn open_remotes(config: &RegistryConfig, host: &Arc<Host>) -> Result<Remotes, RemoteError> {
    let folder = match &config.remote.cache_dir {
        Some(folder) => folder.clone(),
        None => cache_folder()
            .map(|cache| cache.join("repository"))
            .map_err(|error| RemoteError::new(crate::remote::ErrorKind::Disk, error.to_string()))?,
    };
    let folder: &Path = &folder;
    Remotes::open(config.remote.clone(), folder, host.clock, &host.metrics)
}

impl Registry {
    fn remotes(&self) -> impl Iterator<Item = &Arc<RemoteRepository>> {
        self.places.iter().filter_map(|place| place.remote.as_ref())
    }

    pub(super) fn has_remotes(&self) -> bool {
        self.remotes().next().is_some()
    }

    /// The remote repository that a model is in, if it is in one.
    pub(super) fn remote_of(&self, model: &Model) -> Option<&Arc<RemoteRepository>> {
        let place = model.place()?;
        self.places.get(place)?.remote.as_ref()
    }

    /// Lists remote repositories again; tells whether one could be reached that could not before,
    /// or the other way round.
    pub(super) fn refresh_remotes(&self) -> bool {
        let mut differs = false;
        for remote in self.remotes() {
            let was_in_trouble = remote.trouble().is_some();
            // Kept by the repository, and logged when it is news.
            let is_in_trouble = remote.refresh().is_err();
            differs |= was_in_trouble != is_in_trouble;
        }
        differs
    }

    /// Looks again at the remote repository of a model that is about to be loaded by hand. One
    /// that cannot be reached is taken as it is known.
    pub(super) fn look_elsewhere(&self, name: &str) {
        let known = self.models.load().get(name).cloned();
        match known.as_deref().map(|model| self.remote_of(model)) {
            Some(None) => {}
            Some(Some(remote)) => {
                if let Err(error) = remote.refresh_model(name) {
                    tracing::warn!(model = name, repository = %remote.location(), %error, "the model cannot be looked at again; what is known of it is loaded");
                }
            }
            None => drop(self.refresh_remotes()),
        }
    }

    /// Why a model that is not known may be one of a repository that cannot be reached.
    pub(super) fn out_of_reach(&self) -> Option<RemoteError> {
        self.remotes().find_map(|remote| remote.trouble())
    }

    /// Looks at a model that is elsewhere as far as its listing and its configuration tell. None
    /// when it can be looked at closely: it is here.
    pub(super) fn glance(&self, model: &Model) -> Result<Option<Glance>, ServeError> {
        let Some(remote) = self.remote_of(model) else {
            return Ok(None);
        };
        let dir = self.dir(model)?;
        let Some(files) = dir.remote_files() else {
            return Ok(None);
        };
        let name = model.name();
        let broken = |cause: &dyn std::fmt::Display| {
            ServeError::unavailable(format!("model '{name}' cannot be served: {cause}"))
        };
        let out_of_reach = |trouble: RemoteError| {
            broken(&format!(
                "it is not in the repository cache, and its repository cannot be reached: {trouble}"
            ))
        };
        let trouble = remote.trouble();
        let paths = self.config_paths();
        let configs = paths.iter().filter_map(|path| files.get(path));
        // Asking once more, for each of its models, would take long.
        if let Some(trouble) = &trouble
            && !remote.has_all(configs)
        {
            return Err(out_of_reach(trouble.clone()));
        }
        let text = dir
            .config_text(self.config_name.as_deref())
            .map_err(|error| broken(&error))?;
        let parsed = match text {
            Some(text) => config::text::parse(&text).map_err(|error| broken(&error))?,
            None => Default::default(),
        };
        let present = dir.versions().map_err(|error| broken(&error))?;
        let versions = config::select_versions(parsed.version_policy.as_ref(), &present);
        let Some(&newest) = versions.last() else {
            return Err(broken(&format!(
                "it has no version to serve: there are {present:?} and its version policy selects none"
            )));
        };
        if remote.has_all(in_version(files, newest).map(|(_, file)| file)) {
            return Ok(None);
        }
        if let Some(trouble) = trouble {
            return Err(out_of_reach(trouble));
        }
        let filename = match parsed.default_model_filename.as_str() {
            "" => "model.onnx",
            filename => filename,
        };
        let graph = format!("{newest}/{filename}");
        if !files.contains_key(&graph) && !files.contains_key(&format!("{graph}/model.onnx")) {
            return Err(broken(&format!("'{name}/{graph}' does not exist")));
        }
        Ok(Some(Glance {
            versions,
            eager: config::is_eager(&parsed),
        }))
    }

    /// Where a model's configuration may be, in its folder.
    fn config_paths(&self) -> Vec<String> {
        let named = self.config_name.iter();
        let named = named.map(|name| format!("configs/{name}.pbtxt"));
        named.chain(["config.pbtxt".to_owned()]).collect()
    }

    /// Fetches the configurations of remote models, many at a time.
    pub(super) fn fetch_configs(&self) {
        let paths = self.config_paths();
        for remote in self.remotes() {
            let listing = dormouse_model_store::repository::RemoteFiles::listing(&**remote);
            let wanted = |file: &&RemoteFile| {
                let below = file.path.split_once('/').map(|(_, below)| below);
                below.is_some_and(|below| paths.iter().any(|path| path == below))
            };
            let files: Vec<RemoteFile> = listing.files().filter(wanted).cloned().collect();
            remote.fetch_small(&files);
        }
    }

    /// Goes on trying to reach repositories that could not be at the start, until all were. What
    /// was missing appears, and is checked.
    pub async fn reach_all(self: &Arc<Self>) {
        let mut pause = FIRST_PAUSE;
        while self.out_of_reach().is_some() {
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
            let registry = Arc::clone(self);
            let refreshed = blocking(move || {
                let differs = registry.refresh_remotes();
                if differs {
                    registry.rescan()?;
                }
                Ok(differs)
            });
            match refreshed.await {
                Ok(true) if self.control != ControlMode::Explicit => self.check_all().await,
                Ok(_) => {}
                Err(error) => tracing::error!(%error, "cannot look at the model repository"),
            }
        }
    }

    /// Checks what serves nothing yet of the remote repositories.
    pub(super) fn check_remote_models(&self) {
        let models = self.models.load_full();
        for model in models.values() {
            if model.current().is_none() && self.remote_of(model).is_some() {
                self.check(model);
            }
        }
    }
}
