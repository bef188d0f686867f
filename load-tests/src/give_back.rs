//! Whether memory goes back to the system when a model goes.

use anyhow::{Result, ensure};
use clap::Args;
use serde::{Deserialize, Serialize};

use crate::bars::Bar;
use crate::models;
use crate::outside::{Outside, prepare_store, store_note};
use crate::record::{Findings, ReportArgs, Started};
use crate::samples::{Samples, megabytes, mib};
use crate::table::{Titled, maybe};

/// Megabytes that a server may hold more after a cycle than before the first.
const MOST_KEPT: f64 = 32.0;

/// Resident memory over 60 cycles of loading and unloading a 400 MB model.
///
/// Each cycle answers one request and waits until the model has gone. Takes 2 to 4 minutes.
#[derive(Args, Debug)]
pub(crate) struct GiveBackArgs {
    /// Model to load
    #[arg(long, default_value = "bert-base")]
    model: String,
    #[arg(long, default_value_t = 60)]
    cycles: usize,
    /// Load and unload through the management API instead of by being called and left alone
    #[arg(long)]
    api: bool,
    #[command(flatten)]
    report: ReportArgs,
}

/// Resident memory in MiB.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct GiveBackFigures {
    model: String,
    store: String,
    /// Before the first load.
    start: f64,
    /// With the model awake, per cycle.
    awake: Samples,
    /// With the model gone, per cycle.
    asleep: Samples,
}

pub(crate) async fn run(args: GiveBackArgs) -> Result<()> {
    ensure!((1..=10_000).contains(&args.cycles), "1 to 10000 cycles");
    let started = Started::now();
    let scratch = models::scratch()?;
    let (repository, store) = (
        scratch.path().join("repository"),
        scratch.path().join("store"),
    );
    let model = models::prepare(&[&args.model])?.remove(0);
    model.lay_out(&repository, &model.name, "")?;
    let entries = prepare_store(&repository, &store).await?;
    let flags: &[&str] = if args.api {
        &["--model-control-mode=explicit", "--keep-alive=forever"]
    } else {
        &["--keep-alive=50ms", "--staged-exit=false"]
    };
    let server = Outside::start(&repository, &store, flags).await?;
    server.quiet().await?;
    let mut figures = GiveBackFigures {
        model: model.name.clone(),
        store: store_note(entries, 1),
        start: mib(server.memory()?.resident),
        ..GiveBackFigures::default()
    };
    for _ in 0..args.cycles {
        if args.api {
            server.client.load(model.name.as_str()).await?;
        }
        server.client.infer(model.request(&model.name)).await?;
        figures.awake.push(mib(server.memory()?.resident));
        if args.api {
            server.client.unload(&model.name).await?;
        }
        server.asleep(&model.name).await?;
        server.quiet().await?;
        figures.asleep.push(mib(server.memory()?.resident));
    }
    started.record(figures).publish(&args.report)
}

impl Findings for GiveBackFigures {
    fn about(&self) -> String {
        format!(
            "{} times {} is loaded, answers and goes; what the server's process holds; {}.",
            self.asleep.0.len(),
            self.model,
            self.store
        )
    }

    fn tables(&self) -> Vec<Titled> {
        let asleep = &self.asleep.0;
        let row = |measure: &str, value: String| vec![measure.to_owned(), value];
        vec![Titled::new(
            "",
            &["resident memory", "MiB"],
            vec![
                row("before the first load", maybe(Some(self.start))),
                row("awake", self.awake.cell()),
                row(
                    "gone again, after the first cycle",
                    maybe(asleep.first().copied()),
                ),
                row("gone again, after the last", maybe(asleep.last().copied())),
                row("gone again, over all cycles", self.asleep.cell()),
            ],
        )]
    }

    fn bars(&self) -> Vec<Bar> {
        let kept = self.asleep.max().map(|most| megabytes(most - self.start));
        let name = "the most that is held after a cycle beyond the start";
        vec![Bar::most(name, MOST_KEPT, kept, " MB")]
    }
}
