//! Servers under the same load, in turns.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::figures::{Comparison, LoadCell, Part};
use super::plan::{Batching, Table};
use super::server::{Contestant, Prepared, Running};
use super::workload::{Asked, Workloads};
use crate::drive;
use crate::drive::outcome::Step;
use crate::drive::progress::Progress;
use crate::drive::scenario::{ModelLoad, Scenario};
use crate::models::BenchModel;
use crate::samples::mib;

/// The longest that one answer is waited for.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Who is measured with what.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rounds<'a> {
    pub(crate) workloads: &'a Workloads,
    pub(crate) contestants: &'a [Contestant],
    pub(crate) scratch: &'a Path,
}

/// A server with the repository of one form of batching.
#[derive(Debug)]
struct Entrant<'a> {
    contestant: &'a Contestant,
    batching: Batching,
    prepared: Prepared,
}

impl<'a> Rounds<'a> {
    /// Measures every server once per repetition and form of batching, one after the other.
    pub(crate) async fn one_after_the_other(self, found: &mut Comparison) -> Result<()> {
        let entrants = self.entrants(found).await?;
        for repetition in 1..=found.plan.repetitions {
            for entrant in &entrants {
                let name = &entrant.contestant.plan.name;
                if found.is_absent(name, Part::Load) {
                    continue;
                }
                eprintln!(
                    "round {repetition} of {}: {name}, batching {:?}",
                    found.plan.repetitions, entrant.batching
                );
                if let Err(error) = self.alone(entrant, found).await {
                    found.drop_out(name, Part::Load, &error);
                }
            }
        }
        Ok(())
    }

    /// Starts all servers of one form of batching at once and measures them in turns.
    pub(crate) async fn side_by_side(self, found: &mut Comparison) -> Result<()> {
        let entrants = self.entrants(found).await?;
        for batching in found.plan.batching.clone() {
            let mut running = Vec::new();
            for entrant in entrants.iter().filter(|one| one.batching == batching) {
                let name = &entrant.contestant.plan.name;
                if found.is_absent(name, Part::Load) {
                    continue;
                }
                match self.begin(entrant, found).await {
                    Ok(server) => running.push((entrant, server)),
                    Err(error) => found.drop_out(name, Part::Load, &error),
                }
            }
            for repetition in 1..=found.plan.repetitions {
                for workload in found.plan.workloads.clone() {
                    eprintln!(
                        "round {repetition} of {}: {}, batching {batching:?}",
                        found.plan.repetitions, workload.name
                    );
                    let asked = self.workloads.named(&workload.name)?;
                    for (entrant, server) in &running {
                        let name = &entrant.contestant.plan.name;
                        if found.is_absent(name, Part::Load) {
                            continue;
                        }
                        if let Err(error) = measure(entrant, (server, asked), found).await {
                            found.drop_out(name, Part::Load, &error);
                        }
                    }
                }
            }
            for (_, server) in running {
                server.stop().await?;
            }
        }
        Ok(())
    }

    /// Repositories for every server and every form of batching that it has.
    async fn entrants(self, found: &mut Comparison) -> Result<Vec<Entrant<'a>>> {
        let mut names: Vec<&str> = found.plan.workloads.iter().map(|w| &*w.model).collect();
        names.sort_unstable();
        names.dedup();
        let mut models: Vec<(String, &BenchModel)> = Vec::new();
        for name in names {
            models.push((name.to_owned(), self.workloads.model(name)?));
        }
        let mut entrants = Vec::new();
        for batching in found.plan.batching.clone() {
            for contestant in self.contestants {
                let plan = &contestant.plan;
                let takes_part = plan.tables.contains(&Table::Load)
                    && contestant.supports(batching)
                    && !found.is_absent(&plan.name, Part::Load);
                if !takes_part {
                    continue;
                }
                let scratch = self.scratch.join(format!("{}-{batching:?}", plan.name));
                let prepared = contestant.lay_out(&scratch, &models, batching)?;
                entrants.push(Entrant {
                    contestant,
                    batching,
                    prepared,
                });
            }
        }
        let settle = entrants.iter().map(|one| one.contestant.settle()).max();
        tokio::time::sleep(settle.unwrap_or_default()).await;
        for entrant in &entrants {
            if let Err(error) = entrant.contestant.finish(&entrant.prepared).await {
                found.drop_out(&entrant.contestant.plan.name, Part::Load, &error);
            }
        }
        Ok(entrants)
    }

    async fn alone(self, entrant: &Entrant<'_>, found: &mut Comparison) -> Result<()> {
        let server = self.begin(entrant, found).await?;
        for workload in found.plan.workloads.clone() {
            let asked = self.workloads.named(&workload.name)?;
            measure(entrant, (&server, asked), found).await?;
        }
        server.stop().await
    }

    /// Starts a server and sees whether it answers every workload rightly.
    async fn begin(self, entrant: &Entrant<'_>, found: &Comparison) -> Result<Running> {
        let mut server = entrant.contestant.start(&entrant.prepared, &[])?;
        server.until_ready().await?;
        if let Ok(place) = server.place() {
            for workload in &found.plan.workloads {
                let asked = self.workloads.named(&workload.name)?;
                let outputs = place.ask(asked, &asked.model.name).await;
                outputs
                    .and_then(|outputs| asked.check(&outputs))
                    .with_context(|| format!("workload '{}'", workload.name))?;
            }
        }
        // What was just loaded may be improved in the background.
        server.until_quiet().await?;
        Ok(server)
    }
}

/// Measures a server with one workload at every concurrency.
async fn measure(
    entrant: &Entrant<'_>,
    (server, asked): (&Running, &Asked),
    found: &mut Comparison,
) -> Result<()> {
    let plan = &found.plan;
    let mut scenario = Scenario::closed(&asked.model.name, &plan.concurrency);
    scenario.name.clone_from(&asked.workload.name);
    scenario.duration = plan.duration;
    scenario.warmup = plan.warmup;
    scenario.window = plan.duration;
    scenario.timeout = TIMEOUT;
    scenario.models = vec![ModelLoad {
        recorded: Some(asked.folder.clone()),
        ..ModelLoad::named(&asked.model.name)
    }];
    let outcome = drive::run(&scenario, &server.target, &Progress::quiet())
        .await
        .with_context(|| format!("workload '{}'", asked.workload.name))?;
    for step in &outcome.steps {
        let key = LoadCell {
            server: entrant.contestant.plan.name.clone(),
            workload: asked.workload.name.clone(),
            batching: entrant.batching,
            concurrency: step.concurrency.unwrap_or_default(),
            ..LoadCell::default()
        };
        take(found.load_cell(&key), step)?;
    }
    Ok(())
}

fn take(cell: &mut LoadCell, step: &Step) -> Result<()> {
    let all = &step.all;
    cell.failed += all.failed();
    if let Some((kind, words)) = step.error_examples.first_key_value() {
        cell.failure = format!("{kind}: {words}");
    }
    ensure!(
        all.latency.count > 0 || all.failed() == 0,
        "no answer at concurrency {}: {}",
        cell.concurrency,
        cell.failure
    );
    cell.throughput.push(all.throughput);
    // Without any, every answer took longer than the measured time and its warm-up.
    if all.latency.count > 0 {
        cell.answers.push(all.latency.count as f64);
        cell.p50.push(all.latency.p50);
        cell.p99.push(all.latency.p99);
    }
    if let Some(process) = &step.process {
        cell.cpu_micros.push(process.micros_per_request);
        cell.resident_mib.push(mib(process.resident_bytes));
    }
    Ok(())
}
