//! The figures as tables and as JSON.

use std::io::Write;

use anyhow::Result;

use super::measure::CALLERS;
use super::{ABLATIONS, WakeFigures};
use crate::samples::{Samples, mib, times};
use crate::table;

pub(super) fn json(figures: &[WakeFigures]) -> Result<()> {
    let mut out = std::io::stdout().lock();
    serde_json::to_writer_pretty(&mut out, figures)?;
    writeln!(out)?;
    Ok(())
}

pub(super) fn tables(figures: &[WakeFigures]) -> Result<()> {
    heading("Wake from zero, weights in the page cache; ms, median (min–max)")?;
    let rows = figures.iter().map(|of| {
        vec![
            of.model.clone(),
            format!("{:.1}", mib(of.file_bytes)),
            of.plain.cell(),
            of.floor.cell(),
            of.wake.cell(),
            times(of.plain.over(&of.wake)),
            times(of.wake.over(&of.floor)),
            of.first_ever.cell(),
            times(of.first_ever.over(&of.plain)),
            format!("{:.1e}", of.largest_difference),
        ]
    });
    table::print(
        &[
            "model",
            "MiB",
            "plain",
            "floor",
            "wake",
            "plain/wake",
            "wake/floor",
            "first ever",
            "first/plain",
            "max diff",
        ],
        &rows.collect::<Vec<_>>(),
    )?;
    heading("What plain and floor are made of; ms")?;
    let rows = figures.iter().map(|of| {
        vec![
            of.model.clone(),
            of.plain_open.cell(),
            of.plain_warm.cell(),
            of.touch.cell(),
            of.wake_load.cell(),
        ]
    });
    table::print(
        &["model", "plain open", "warm run", "touch", "load in wake"],
        &rows.collect::<Vec<_>>(),
    )?;
    heading("Parked, and with a cold page cache; ms")?;
    let rows = figures.iter().map(|of| {
        vec![
            of.model.clone(),
            of.parked.cell(),
            of.parked_warm.cell(),
            times(of.parked.over(&of.parked_warm)),
            of.plain_cold.cell(),
            of.wake_cold.cell(),
            times(of.plain_cold.over(&of.wake_cold)),
        ]
    });
    table::print(
        &[
            "model",
            "parked",
            "warm",
            "parked/warm",
            "plain cold",
            "wake cold",
            "plain/wake",
        ],
        &rows.collect::<Vec<_>>(),
    )?;
    heading(&format!(
        "Steady state, one caller and {CALLERS}, each one request at a time; requests/s"
    ))?;
    let rows = figures.iter().map(|of| {
        vec![
            of.model.clone(),
            of.steady_plain.cell(),
            of.steady.cell(),
            times(of.steady.over(&of.steady_plain)),
            of.throughput_plain.cell(),
            of.throughput.cell(),
            times(of.throughput.over(&of.throughput_plain)),
            if of.packed { "yes" } else { "no" }.to_owned(),
        ]
    });
    table::print(
        &[
            "model",
            "plain, one",
            "one",
            "one/plain",
            "plain, several",
            "several",
            "several/plain",
            "packed",
        ],
        &rows.collect::<Vec<_>>(),
    )?;
    if figures.iter().any(|of| !of.without.is_empty()) {
        heading("Wake from zero with one mechanism switched off; ms, and times the full wake")?;
        let rows = figures.iter().map(|of| {
            let mut row = vec![of.model.clone(), of.wake.cell()];
            let none = Samples::default();
            for (name, _) in ABLATIONS {
                let samples = of.without.get(name).unwrap_or(&none);
                row.push(samples.cell());
                row.push(times(samples.over(&of.wake)));
            }
            row
        });
        let mut header = vec!["model", "wake"];
        for (name, _) in ABLATIONS {
            header.extend([name, "×"]);
        }
        table::print(&header, &rows.collect::<Vec<_>>())?;
    }
    let mut out = std::io::stdout().lock();
    for of in figures {
        for note in &of.notes {
            writeln!(out, "{}: {note}", of.model)?;
        }
    }
    Ok(())
}

fn heading(text: &str) -> Result<()> {
    writeln!(std::io::stdout().lock(), "\n{text}")?;
    Ok(())
}
