//! First answers and memory of each server.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::ask;
use super::figures::{Comparison, Part};
use super::group::{Group, GroupMemory};
use super::plan::{Batching, ColdPlan, Table};
use super::server::{Contestant, Prepared};
use super::workload::{Asked, Workloads};
use crate::drive;
use crate::drive::progress::Progress;
use crate::drive::scenario::{Mode, ModelLoad, Scenario};
use crate::drive::target::Target;
use crate::samples::mib;

/// How long memory is left to settle after the last answer.
const SETTLE: Duration = Duration::from_millis(1500);

/// Who is measured with what.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Starts<'a> {
    pub(crate) workloads: &'a Workloads,
    pub(crate) contestants: &'a [Contestant],
    pub(crate) scratch: &'a Path,
}

impl Starts<'_> {
    /// Starts every server with every model, and with copies of one, as often as the plan says, in
    /// turns.
    pub(crate) async fn measure(self, plan: &ColdPlan, found: &mut Comparison) -> Result<()> {
        let contestants: Vec<&Contestant> = self
            .contestants
            .iter()
            // One that somebody else runs is not ours to start.
            .filter(|one| one.plan.tables.contains(&Table::Cold) && one.recipe().is_some())
            .collect();
        for model in &plan.models {
            let asked = self.workloads.of_model(model)?;
            let prepared = self
                .entrants(&contestants, (Part::Starts, model, 1), found)
                .await?;
            for repetition in 1..=plan.repetitions {
                for (contestant, prepared) in &prepared {
                    let name = &contestant.plan.name;
                    if found.is_absent(name, Part::Starts) {
                        continue;
                    }
                    eprintln!(
                        "start {repetition} of {}: {name} with {model}",
                        plan.repetitions
                    );
                    let started = start(contestant, prepared, asked, plan.loads).await;
                    match started {
                        Ok((from_start, from_load)) => {
                            let cell = found.start_cell(name, model);
                            cell.from_start.push_millis(from_start);
                            cell.from_load.0.extend(from_load);
                        }
                        Err(error) => found.drop_out(name, Part::Starts, &error),
                    }
                }
            }
        }
        for &copies in std::iter::once(&0).chain(&plan.copies) {
            let model = if copies == 0 { "" } else { &plan.copied };
            let prepared = self
                .entrants(&contestants, (Part::Memory, model, copies), found)
                .await?;
            for repetition in 1..=plan.repetitions {
                for (contestant, prepared) in &prepared {
                    let name = &contestant.plan.name;
                    let can = copies > 0 || contestant.recipe().is_some_and(|one| one.starts_empty);
                    if found.is_absent(name, Part::Memory) || !can {
                        continue;
                    }
                    eprintln!(
                        "memory {repetition} of {}: {name} with {copies} copies",
                        plan.repetitions
                    );
                    match self.hold(contestant, prepared, (model, copies)).await {
                        Ok(memory) => {
                            let cell = found.memory_cell(name, model, copies);
                            cell.processes = memory.processes;
                            cell.resident_mib.push(mib(memory.resident));
                            cell.proportional_mib.push(mib(memory.proportional));
                        }
                        Err(error) => found.drop_out(name, Part::Memory, &error),
                    }
                }
            }
        }
        Ok(())
    }

    /// Repositories with `copies` of a model for every server.
    async fn entrants<'c>(
        self,
        contestants: &[&'c Contestant],
        (part, model, copies): (Part, &str, usize),
        found: &mut Comparison,
    ) -> Result<Vec<(&'c Contestant, Prepared)>> {
        let mut models = Vec::new();
        for index in 0..copies {
            models.push((copy_name(model, index), self.workloads.model(model)?));
        }
        let mut prepared = Vec::new();
        for contestant in contestants {
            let name = &contestant.plan.name;
            if found.is_absent(name, part) {
                continue;
            }
            let folder = format!("{name}-{part:?}-{model}-{copies}");
            let scratch = self.scratch.join(folder);
            let laid_out = contestant.lay_out(&scratch, &models, Batching::Off)?;
            prepared.push((*contestant, laid_out));
        }
        let settle = prepared.iter().map(|(one, _)| one.settle()).max();
        tokio::time::sleep(settle.unwrap_or_default()).await;
        for (contestant, one) in &prepared {
            if let Err(error) = contestant.finish(one).await {
                found.drop_out(&contestant.plan.name, part, &error);
            }
        }
        Ok(prepared)
    }

    /// What a server holds once every copy has answered.
    async fn hold(
        self,
        contestant: &Contestant,
        prepared: &Prepared,
        (model, copies): (&str, usize),
    ) -> Result<GroupMemory> {
        let mut server = contestant.start(prepared, &[])?;
        server.until_ready().await?;
        let place = server.place()?;
        for index in 0..copies {
            let asked = self.workloads.of_model(model)?;
            let name = copy_name(model, index);
            let outputs = place.ask(asked, &name).await;
            outputs
                .and_then(|outputs| asked.check(&outputs))
                .with_context(|| format!("model '{name}'"))?;
        }
        tokio::time::sleep(SETTLE).await;
        let memory = server.group.as_ref().map(Group::memory);
        let memory = memory.context("it was not started here")??;
        server.stop().await?;
        Ok(memory)
    }
}

/// What a copy is called; a single one keeps its name.
fn copy_name(model: &str, index: usize) -> String {
    match index {
        0 => model.to_owned(),
        _ => format!("{model}-{index}"),
    }
}

/// First answers from the start of the process and, in milliseconds, from loads.
async fn start(
    contestant: &Contestant,
    prepared: &Prepared,
    asked: &Asked,
    loads: usize,
) -> Result<(Duration, Vec<f64>)> {
    let mut server = contestant.start(prepared, &[])?;
    let place = server.place()?;
    let group = server.group.as_mut().context("it was not started here")?;
    let from_start = ask::first_answer(group, place, asked).await?;
    let mut from_load = Vec::new();
    if let Some(how) = contestant.recipe().and_then(|one| one.loads.as_ref())
        && loads > 0
    {
        if !how.flags.is_empty() {
            server.stop().await?;
            server = contestant.start(prepared, &how.flags)?;
            server.until_ready().await?;
        }
        let target = server.target_over(how.protocol.unwrap_or(contestant.plan.protocol));
        from_load = from_loads(&target, asked, loads).await?;
    }
    server.stop().await?;
    Ok((from_start, from_load))
}

async fn from_loads(target: &Target, asked: &Asked, loads: usize) -> Result<Vec<f64>> {
    let name = &asked.model.name;
    let mut scenario = Scenario::closed(name, &[1]);
    scenario.mode = Mode::Cold;
    scenario.cold.repetitions = loads;
    scenario.cold.patience = ask::PATIENCE;
    scenario.models = vec![ModelLoad {
        recorded: Some(asked.folder.clone()),
        ..ModelLoad::named(name)
    }];
    let outcome = drive::run(&scenario, target, &Progress::quiet())
        .await
        .context("loads")?;
    let step = outcome.steps.first().context("loads were not measured")?;
    ensure!(
        step.cold.len() == loads,
        "{} of {loads} loads led to an answer: {:?}",
        step.cold.len(),
        step.error_examples
    );
    Ok(step.cold.iter().map(|seen| seen.latency).collect())
}
