//! Figures for people: aligned columns on standard output.

use std::io::Write;

/// Prints rows under a header, columns aligned.
pub(crate) fn print(header: &[&str], rows: &[Vec<String>]) -> std::io::Result<()> {
    let widths: Vec<usize> = (0..header.len())
        .map(|column| {
            rows.iter()
                .map(|row| row[column].chars().count())
                .chain([header[column].len()])
                .max()
                .unwrap_or(0)
        })
        .collect();
    let mut out = std::io::stdout().lock();
    let header: Vec<String> = header.iter().map(|cell| (*cell).to_owned()).collect();
    for row in std::iter::once(&header).chain(rows) {
        let cells: Vec<String> = row
            .iter()
            .zip(&widths)
            .map(|(cell, width)| format!("{cell:>width$}"))
            .collect();
        writeln!(out, "{}", cells.join("  "))?;
    }
    Ok(())
}

/// The middle value.
pub(crate) fn median(values: &mut [f64]) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    match values.len() {
        0 => f64::NAN,
        n if n % 2 == 1 => values[n / 2],
        n => (values[n / 2 - 1] + values[n / 2]) / 2.0,
    }
}

/// The middle value with the smallest and the largest.
pub(crate) fn spread(values: &[f64]) -> String {
    let mut values = values.to_vec();
    let middle = median(&mut values);
    match (values.first(), values.last()) {
        (Some(first), Some(last)) => format!("{middle:.2} ({first:.2}–{last:.2})"),
        _ => "–".to_owned(),
    }
}
