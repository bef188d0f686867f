//! Very many requests at once for a model that sleeps.

use anyhow::{Result, ensure};
use clap::Args;
use serde::{Deserialize, Serialize};

use crate::bars::Bar;
use crate::burst::{Burst, Outcome};
use crate::models::{self, BenchModel};
use crate::outside::{Outside, prepare_store, store_note};
use crate::record::{Findings, ReportArgs, Started};
use crate::samples::{Samples, times};
use crate::table::Titled;

/// How much later than that of a single request the first answer of a storm may come.
const MOST_OF_SINGLE: f64 = 1.1;

/// A thousand concurrent requests on a sleeping model.
///
/// Shows that there is one load, that everyone is answered, and that the first answer comes about
/// as soon as that of a single request; single wakes and storms take turns. Takes about 3 minutes.
#[derive(Args, Debug)]
pub(crate) struct StormArgs {
    /// Model to call
    #[arg(long, default_value = "minilm")]
    model: String,
    /// Requests at once
    #[arg(long, default_value_t = 1000)]
    requests: usize,
    /// Storms, each after a single wake
    #[arg(long, default_value_t = 5)]
    repetitions: usize,
    #[command(flatten)]
    report: ReportArgs,
}

/// Times in milliseconds.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct StormFigures {
    model: String,
    requests: usize,
    single: Samples,
    first: Samples,
    last: Samples,
    /// Of the first answer, as the server saw it: its load, and its run with the time to its start.
    first_load: Samples,
    first_waited: Samples,
    first_run: Samples,
    loads: Vec<f64>,
    errors: Vec<String>,
    store: String,
}

pub(crate) async fn run(args: StormArgs) -> Result<()> {
    ensure!(
        (1..=10_000).contains(&args.requests) && (1..=100).contains(&args.repetitions),
        "1 to 10000 requests and 1 to 100 repetitions"
    );
    let started = Started::now();
    let scratch = models::scratch()?;
    let (repository, store) = (
        scratch.path().join("repository"),
        scratch.path().join("store"),
    );
    let model = models::prepare(&[&args.model])?.remove(0);
    model.lay_out(&repository, &model.name, "")?;
    let entries = prepare_store(&repository, &store).await?;
    let server = Outside::start(
        &repository,
        &store,
        &["--keep-alive=200ms", "--staged-exit=false"],
    )
    .await?;
    let mut figures = StormFigures {
        model: model.name.clone(),
        requests: args.requests,
        store: store_note(entries, 1),
        ..StormFigures::default()
    };
    for _ in 0..args.repetitions {
        single(&server, &model, &mut figures).await?;
        storm(&server, &model, &mut figures).await?;
    }
    started.record(figures).publish(&args.report)
}

/// The time to the answer of one request.
async fn single(server: &Outside, model: &BenchModel, figures: &mut StormFigures) -> Result<()> {
    let answers = released(server, model, 1).await?;
    for took in answers.iter().flatten() {
        figures.single.push_millis(*took);
    }
    figures.note_errors(answers);
    server.asleep(&model.name).await
}

async fn storm(server: &Outside, model: &BenchModel, figures: &mut StormFigures) -> Result<()> {
    let before = server.metric("dormouse_loads_total", &[]).await?;
    let answers = released(server, model, figures.requests).await?;
    let loads = server.metric("dormouse_loads_total", &[]).await? - before;
    figures.loads.push(loads);
    let answered = || answers.iter().flatten();
    if let (Some(first), Some(last)) = (answered().min(), answered().max()) {
        figures.first.push_millis(*first);
        figures.last.push_millis(*last);
    }
    figures.note_errors(answers);
    let woken = server.client.cold_starts(&model.name, "").await?;
    let mut latest = woken
        .iter()
        .filter_map(|version| version.cold_starts.last());
    if let Some(latest) = latest.next_back() {
        figures.first_load.push_millis(latest.total);
        let mut stages = latest.stages.iter();
        if let Some(run) = stages.find(|stage| stage.name == "first-run") {
            figures
                .first_waited
                .push_millis(run.start.unwrap_or_default());
            figures.first_run.push_millis(run.duration);
        }
    }
    server.asleep(&model.name).await
}

/// What becomes of so many requests at once, when the server has nothing else to do.
async fn released(server: &Outside, model: &BenchModel, requests: usize) -> Result<Vec<Outcome>> {
    let burst = Burst::connect(server.address(), model, requests).await?;
    server.quiet().await?;
    burst.release().await
}

impl StormFigures {
    fn note_errors(&mut self, answers: Vec<Outcome>) {
        self.errors
            .extend(answers.into_iter().filter_map(Result::err));
    }
}

impl Findings for StormFigures {
    fn about(&self) -> String {
        format!(
            "{} requests at once on {}, which sleeps, {} times; before each of them a single request \
             wakes it; {}. The ratio is the median over the repetitions.",
            self.requests,
            self.model,
            self.first.0.len(),
            self.store
        )
    }

    fn tables(&self) -> Vec<Titled> {
        let loads = Samples(self.loads.clone());
        let row = |measure: &str, value: String| vec![measure.to_owned(), value];
        let seconds = self.last.0.iter().map(|millis| millis / 1e3);
        vec![Titled::new(
            "",
            &["measure", "value"],
            vec![
                row("answer of a single request, ms", self.single.cell()),
                row("first answer of a storm, ms", self.first.cell()),
                row("first/single", times(self.first.over(&self.single))),
                row("of the first answer: loading, ms", self.first_load.cell()),
                row(
                    "of the first answer: until its run, ms",
                    self.first_waited.cell(),
                ),
                row("of the first answer: running, ms", self.first_run.cell()),
                row(
                    "last answer of a storm, s",
                    Samples(seconds.collect()).cell(),
                ),
                row("loads per storm", loads.cell()),
                row("errors", self.errors.len().to_string()),
            ],
        )]
    }

    fn bars(&self) -> Vec<Bar> {
        let one_each = self.loads.iter().all(|&loads| loads == 1.0);
        let first = self.first.over(&self.single);
        vec![
            Bar::new(
                "loads per storm",
                "1 each",
                Samples(self.loads.clone()).cell(),
                one_each && !self.loads.is_empty(),
            ),
            Bar::no_errors("requests without an answer", &self.errors),
            Bar::most("first answer/single wake", MOST_OF_SINGLE, first, "×").of_speed(),
        ]
    }
}
