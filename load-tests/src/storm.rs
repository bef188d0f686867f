//! Very many requests at once for a model that sleeps.

use std::time::Duration;

use anyhow::{Result, ensure};
use clap::Args;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::bars::Bar;
use crate::models::{self, BenchModel};
use crate::outside::{Outside, prepare_store, store_note};
use crate::record::{Findings, ReportArgs, Started};
use crate::samples::{Samples, times};
use crate::table::Titled;

/// Requests per connection; HTTP/2 servers allow about a hundred at a time.
const PER_CONNECTION: usize = 50;
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
    /// Of the first answer, as the server saw it: its load, and its wait and run from its arrival.
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

async fn single(server: &Outside, model: &BenchModel, figures: &mut StormFigures) -> Result<()> {
    server.quiet().await?;
    let asked = Instant::now();
    server.client.infer(model.request(&model.name)).await?;
    figures.single.push_millis(asked.elapsed());
    server.asleep(&model.name).await
}

async fn storm(server: &Outside, model: &BenchModel, figures: &mut StormFigures) -> Result<()> {
    let (release, released) = watch::channel(None::<Instant>);
    let mut calls = JoinSet::new();
    let mut client = server.connect().await?;
    for index in 0..figures.requests {
        if index % PER_CONNECTION == 0 {
            client = server.connect().await?;
        }
        let client = client.clone();
        let request = model
            .request(&model.name)
            .deadline(Duration::from_secs(280));
        let mut released = released.clone();
        calls.spawn(async move {
            // Fails only when the sender is gone, which outlives the calls.
            let _ = released.wait_for(Option::is_some).await;
            let started = (*released.borrow()).unwrap_or_else(Instant::now);
            let response = client.infer(request).await?;
            anyhow::Ok((started.elapsed(), response.timing().cloned()))
        });
    }
    server.quiet().await?;
    let before = server.metric("dormouse_loads_total", &[]).await?;
    release.send_replace(Some(Instant::now()));
    let mut answered = Vec::new();
    while let Some(call) = calls.join_next().await {
        match call? {
            Ok(answer) => answered.push(answer),
            Err(error) => figures.errors.push(error.to_string()),
        }
    }
    answered.sort_by_key(|(took, _)| *took);
    if let (Some((first, cold)), Some((last, _))) = (answered.first(), answered.last()) {
        figures.first.push_millis(*first);
        figures.last.push_millis(*last);
        if let Some(cold) = cold {
            let request = cold.request.unwrap_or_default();
            figures.first_load.push_millis(cold.total);
            figures.first_waited.push_millis(request.waited);
            figures.first_run.push_millis(request.run);
        }
    }
    let loads = server.metric("dormouse_loads_total", &[]).await? - before;
    figures.loads.push(loads);
    server.asleep(&model.name).await
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
                row("of the first answer: waiting, ms", self.first_waited.cell()),
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
