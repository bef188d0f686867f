//! A server of the comparison: its repository written, its process started and stopped.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt::Write;
use std::fs;
use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use super::ask::{self, Place};
use super::group::{Group, Line};
use super::install::{Installed, install};
use super::plan::{Batching, Plan, ServerPlan};
use super::recipe::{ConfigForm, Recipe, fill};
use crate::drive::target::{Protocol, Target};
use crate::models::BenchModel;
use crate::plain;
use crate::process::ServerProcess;

/// What preparing a repository may take.
const LAY_OUT_PATIENCE: Duration = Duration::from_secs(300);

/// What work in the background is given before a measurement begins regardless.
const QUIET_PATIENCE: Duration = Duration::from_secs(20);

/// A server that can take part.
#[derive(Clone, Debug)]
pub(crate) struct Contestant {
    pub(crate) plan: ServerPlan,
    pub(crate) kind: Kind,
    threads: usize,
    max_batch: usize,
    batch_delay: Duration,
}

/// Where a server comes from.
#[derive(Clone, Debug)]
pub(crate) enum Kind {
    Started {
        recipe: Box<Recipe>,
        installed: Installed,
    },
    /// Somebody else runs it.
    Running(Target),
}

/// A folder with models, ready for one server.
#[derive(Clone, Debug)]
pub(crate) struct Prepared {
    batching: Batching,
    /// Models, logs and whatever the server keeps.
    scratch: PathBuf,
    is_empty: bool,
}

/// A server under way.
#[derive(Debug)]
pub(crate) struct Running {
    /// None for one that somebody else runs.
    pub(crate) group: Option<Group>,
    pub(crate) target: Target,
    place: Option<Place>,
    started: Option<Started>,
    /// Dropped after the group.
    _shared_memory: Option<SharedMemory>,
}

/// What is known of one that was started here.
#[derive(Clone, Debug)]
struct Started {
    ports: Ports,
    /// Path over HTTP that answers 200 once it can serve.
    ready: String,
}

impl Contestant {
    /// Finds or installs a server; an error says why it cannot take part.
    pub(crate) async fn prepare(server: &ServerPlan, plan: &Plan) -> Result<Self> {
        let kind = match (&server.recipe, &server.address) {
            (_, Some(address)) => {
                let mut target = Target::at(address.clone());
                target.protocol = Some(server.protocol);
                target.check_place().await?;
                Kind::Running(target)
            }
            (Some(recipe), None) => {
                let recipe = Recipe::named(recipe)?;
                let installed = install(&recipe).await?;
                Kind::Started {
                    recipe: Box::new(recipe),
                    installed,
                }
            }
            (None, None) => bail!("either a recipe or an address"),
        };
        Ok(Self {
            plan: server.clone(),
            kind,
            threads: plan.thread_count(),
            max_batch: plan.max_batch,
            batch_delay: plan.batch_delay,
        })
    }

    /// Its recipe, where it is started here.
    pub(crate) fn recipe(&self) -> Option<&Recipe> {
        match &self.kind {
            Kind::Started { recipe, .. } => Some(recipe),
            Kind::Running(_) => None,
        }
    }

    /// Whether it can join requests, or be kept from it.
    pub(crate) fn supports(&self, batching: Batching) -> bool {
        match (batching, self.recipe()) {
            (Batching::Off, _) => true,
            (Batching::On, Some(recipe)) => recipe.batching,
            // Nobody knows how a running server is configured: it is measured once.
            (Batching::On, None) => false,
        }
    }

    /// Writes models under the given names below `scratch` as this server wants them.
    pub(crate) fn lay_out(
        &self,
        scratch: &Path,
        models: &[(String, &BenchModel)],
        batching: Batching,
    ) -> Result<Prepared> {
        let prepared = Prepared {
            batching,
            scratch: scratch.to_owned(),
            is_empty: models.is_empty(),
        };
        let Kind::Started { recipe, .. } = &self.kind else {
            return Ok(prepared);
        };
        let repository = scratch.join("repository");
        fs::create_dir_all(&repository)?;
        for (name, model) in models {
            let folder = repository.join(name);
            fs::create_dir_all(folder.join("1"))?;
            fs::hard_link(model.file(), folder.join("1/model.onnx"))
                .context("models and scratch folder must lie in one file system")?;
            if recipe.lay_out.config == ConfigForm::Triton {
                fs::write(folder.join("config.pbtxt"), self.config(batching)?)?;
            }
        }
        Ok(prepared)
    }

    /// How old laid out files must be before [`Contestant::finish`].
    pub(crate) fn settle(&self) -> Duration {
        self.recipe().map_or(Duration::ZERO, |recipe| recipe.settle)
    }

    /// Does what else a server wants to be done to its repository ahead of time.
    pub(crate) async fn finish(&self, prepared: &Prepared) -> Result<()> {
        let command = self.recipe().map(|recipe| &*recipe.lay_out.command);
        let command = command.unwrap_or_default();
        if command.is_empty() || prepared.is_empty {
            return Ok(());
        }
        let line = self.line(prepared, command, Ports::default())?;
        let mut command = tokio::process::Command::from(line.command()?);
        let running = command.kill_on_drop(true).output();
        let output = tokio::time::timeout(LAY_OUT_PATIENCE, running)
            .await
            .with_context(|| format!("not prepared within {LAY_OUT_PATIENCE:?}"))??;
        ensure!(
            output.status.success(),
            "{:?} ended with {}: {}",
            line.words,
            output.status,
            String::from_utf8_lossy(&output.stderr).trim()
        );
        Ok(())
    }

    /// `config.pbtxt` for ONNX Runtime.
    fn config(&self, batching: Batching) -> Result<String> {
        let mut config = String::from("backend: \"onnxruntime\"\n");
        match batching {
            Batching::Off => config.push_str("max_batch_size: 0\n"),
            Batching::On => writeln!(
                config,
                "max_batch_size: {}\ndynamic_batching {{ max_queue_delay_microseconds: {} }}",
                self.max_batch,
                self.batch_delay.as_micros()
            )?,
        }
        writeln!(
            config,
            "parameters {{ key: \"intra_op_thread_count\" value {{ string_value: \"{}\" }} }}",
            self.threads
        )?;
        config.push_str(&self.plan.config);
        Ok(config)
    }

    /// Starts it over a repository, with further words of its command line; what it answers is still to be seen.
    pub(crate) fn start(&self, prepared: &Prepared, flags: &[String]) -> Result<Running> {
        let recipe = match &self.kind {
            Kind::Started { recipe, .. } => recipe,
            Kind::Running(target) => {
                return Ok(Running {
                    group: None,
                    target: target.clone(),
                    place: None,
                    started: None,
                    _shared_memory: None,
                });
            }
        };
        let ports = Ports::free()?;
        let mut line = self.line(prepared, &recipe.start.command, ports)?;
        line.words
            .extend(self.plan.flags.iter().chain(flags).cloned());
        for (name, value) in &recipe.start.environment {
            let value = self.fill(prepared, value, ports)?;
            line.environment.insert(name.clone(), value.into());
        }
        let shared_memory = match &recipe.start.shared_memory {
            Some(prefix) => Some(SharedMemory(self.fill(prepared, prefix, ports)?)),
            None => None,
        };
        let group = Group::start(&line, &prepared.scratch.join("log"))?;
        let place = ports.place(self.plan.protocol);
        let mut target = Target::at(place.url());
        target.pid = Some(group.id());
        Ok(Running {
            group: Some(group),
            target,
            place: Some(place),
            started: Some(Started {
                ports,
                ready: recipe.start.ready.clone(),
            }),
            _shared_memory: shared_memory,
        })
    }

    fn line(&self, prepared: &Prepared, words: &[String], ports: Ports) -> Result<Line> {
        let words = words.iter().map(|word| self.fill(prepared, word, ports));
        let mut environment = BTreeMap::from([
            ("PEER_THREADS", self.threads.to_string().into()),
            (
                "PEER_REPOSITORY",
                prepared.scratch.join("repository").into_os_string(),
            ),
            (
                "PEER_BATCH_DELAY_US",
                self.batch_delay.as_micros().to_string().into(),
            ),
            (
                "PEER_MAX_BATCH",
                match prepared.batching {
                    Batching::Off => OsString::from("0"),
                    Batching::On => self.max_batch.to_string().into(),
                },
            ),
        ]);
        if let Kind::Started { installed, .. } = &self.kind
            && let Some(bin) = installed.bin()
        {
            let path = std::env::var_os("PATH").unwrap_or_default();
            let paths = std::iter::once(bin).chain(std::env::split_paths(&path));
            environment.insert("PATH", std::env::join_paths(paths)?);
            environment.insert("PYTHONPATH", installed.recipe.clone().into_os_string());
        }
        let environment = environment.into_iter();
        Ok(Line {
            words: words.collect::<Result<_>>()?,
            environment: environment.map(|(k, v)| (k.to_owned(), v)).collect(),
            folder: prepared.scratch.clone(),
        })
    }

    fn fill(&self, prepared: &Prepared, text: &str, ports: Ports) -> Result<String> {
        let Kind::Started { installed, .. } = &self.kind else {
            bail!("it is not started here");
        };
        let path = |path: PathBuf| Some(path.display().to_string());
        fill(text, |name| match name {
            "dormouse" => path(ServerProcess::binary().ok()?),
            "library" => path(plain::library().ok()?),
            "python" => path(installed.bin()?.join("python")),
            "bin" => path(installed.bin()?),
            "site" => path(installed.site()?),
            "recipe" => path(installed.recipe.clone()),
            "repository" => path(prepared.scratch.join("repository")),
            "scratch" => path(prepared.scratch.clone()),
            "http_port" => Some(ports.http.to_string()),
            "grpc_port" => Some(ports.grpc.to_string()),
            "metrics_port" => Some(ports.metrics.to_string()),
            "threads" => Some(self.threads.to_string()),
            _ => None,
        })
    }
}

impl Running {
    /// Where it listens, of one that was started here.
    pub(crate) fn place(&self) -> Result<Place> {
        self.place.context("it was not started here")
    }

    /// Waits until it says that it is ready.
    pub(crate) async fn until_ready(&mut self) -> Result<()> {
        if let (Some(group), Some(started)) = (&mut self.group, &self.started) {
            ask::until_ready(group, started.ports.http, &started.ready).await?;
        }
        Ok(())
    }

    /// Waits until it has nothing to do, or has been given long enough for that.
    pub(crate) async fn until_quiet(&self) -> Result<()> {
        match &self.group {
            Some(group) => group.until_quiet(QUIET_PATIENCE).await,
            None => Ok(()),
        }
    }

    /// The target over another protocol that it speaks.
    pub(crate) fn target_over(&self, protocol: Protocol) -> Target {
        match &self.started {
            Some(started) => Target {
                url: started.ports.place(protocol).url(),
                ..self.target.clone()
            },
            None => self.target.clone(),
        }
    }

    /// Ends it with everything it started.
    pub(crate) async fn stop(self) -> Result<()> {
        match self.group {
            Some(group) => group.stop().await,
            None => Ok(()),
        }
    }
}

/// Shared memory whose names begin so; dropping it removes what a server has left there.
#[derive(Debug)]
struct SharedMemory(String);

impl Drop for SharedMemory {
    fn drop(&mut self) {
        let Ok(entries) = fs::read_dir("/dev/shm") else {
            return;
        };
        for entry in entries.flatten() {
            if entry.file_name().to_string_lossy().starts_with(&self.0) {
                // Somebody else may have removed it.
                let _ = fs::remove_file(entry.path());
            }
        }
    }
}

/// Ports of one server.
#[derive(Clone, Copy, Debug, Default)]
struct Ports {
    http: u16,
    grpc: u16,
    metrics: u16,
}

impl Ports {
    fn place(self, protocol: Protocol) -> Place {
        let port = match protocol {
            Protocol::Grpc => self.grpc,
            Protocol::Http => self.http,
        };
        Place { protocol, port }
    }

    /// Ports that nobody uses now.
    fn free() -> Result<Self> {
        let listen = || TcpListener::bind((Ipv4Addr::LOCALHOST, 0));
        // All are held until all are known, so that they differ.
        let listeners = [listen()?, listen()?, listen()?];
        let port = |index: usize| Ok::<u16, std::io::Error>(listeners[index].local_addr()?.port());
        Ok(Self {
            http: port(0)?,
            grpc: port(1)?,
            metrics: port(2)?,
        })
    }
}
