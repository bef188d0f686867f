//! Whether memory goes back to the system when a model goes.

use std::io::Write;

use anyhow::{Result, ensure};
use clap::Args;
use serde::Serialize;

use crate::models;
use crate::outside::{Outside, prepare_store, store_note};
use crate::samples::{Samples, mib};
use crate::table;

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
    /// Print JSON with every value instead of a table
    #[arg(long)]
    json: bool,
}

/// Resident memory in MiB.
#[derive(Debug, Default, Serialize)]
struct GiveBackFigures {
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
    report(&figures, args.json)
}

fn report(figures: &GiveBackFigures, json: bool) -> Result<()> {
    let mut out = std::io::stdout().lock();
    if json {
        serde_json::to_writer_pretty(&mut out, figures)?;
        writeln!(out)?;
        return Ok(());
    }
    let asleep = &figures.asleep.0;
    let (first, last) = (asleep.first().copied(), asleep.last().copied());
    writeln!(
        out,
        "{} cycles of {}; resident MiB; {}",
        asleep.len(),
        figures.model,
        figures.store
    )?;
    drop(out);
    let number = |value: Option<f64>| value.map_or_else(|| "–".to_owned(), |v| format!("{v:.1}"));
    table::print(
        &[
            "before any load",
            "after first cycle",
            "after last",
            "largest after a cycle",
            "awake",
            "last - start",
        ],
        &[vec![
            number(Some(figures.start)),
            number(first),
            number(last),
            number(figures.asleep.max()),
            figures.awake.cell(),
            number(last.map(|last| last - figures.start)),
        ]],
    )?;
    Ok(())
}
