//! Figures for people: tables with titles, on standard output and on the results page.

use std::fmt::Write as _;
use std::io::Write;

/// A table with its title.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Titled {
    pub(crate) title: String,
    pub(crate) header: Vec<String>,
    pub(crate) rows: Vec<Vec<String>>,
}

impl Titled {
    pub(crate) fn new(title: impl Into<String>, header: &[&str], rows: Vec<Vec<String>>) -> Self {
        Self {
            title: title.into(),
            header: header.iter().map(|&cell| cell.to_owned()).collect(),
            rows,
        }
    }

    /// Prints it, columns aligned.
    pub(crate) fn print(&self) -> std::io::Result<()> {
        if !self.title.is_empty() {
            writeln!(std::io::stdout().lock(), "\n{}", self.title)?;
        }
        let header: Vec<&str> = self.header.iter().map(String::as_str).collect();
        print(&header, &self.rows)
    }

    /// The same for a page.
    pub(crate) fn markdown(&self) -> String {
        let mut text = String::new();
        if !self.title.is_empty() {
            text += &format!("\n{}\n", self.title);
        }
        let line = |cells: &[String]| {
            let cells: Vec<String> = cells.iter().map(|cell| escaped(cell)).collect();
            format!("| {} |\n", cells.join(" | "))
        };
        text.push('\n');
        text += &line(&self.header);
        // Writing to a string cannot fail.
        let _ = writeln!(text, "|{}", "---|".repeat(self.header.len()));
        for row in &self.rows {
            text += &line(row);
        }
        text
    }
}

/// Text that does not end its cell.
fn escaped(cell: &str) -> String {
    cell.replace('|', "\\|").replace('\n', " ")
}

/// Prints rows under a header, columns aligned.
pub(crate) fn print(header: &[&str], rows: &[Vec<String>]) -> std::io::Result<()> {
    let widths: Vec<usize> = (0..header.len())
        .map(|column| {
            rows.iter()
                .map(|row| row[column].chars().count())
                .chain([header[column].chars().count()])
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

/// A number with three digits or so.
pub(crate) fn number(value: f64) -> String {
    match value.abs() {
        size if size >= 100.0 => format!("{value:.0}"),
        size if size >= 10.0 => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}

/// A number that may not be known.
pub(crate) fn maybe(value: Option<f64>) -> String {
    value.map_or_else(|| "–".to_owned(), number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_three_digits_or_so() {
        assert_eq!(number(1234.4), "1234");
        assert_eq!(number(12.34), "12.3");
        assert_eq!(number(0.126), "0.13");
        assert_eq!(maybe(None), "–");
    }

    #[test]
    fn cells_stay_in_their_column() {
        let table = Titled::new("a title", &["x"], vec![vec!["a|b\nc".to_owned()]]);
        assert_eq!(table.markdown(), "\na title\n\n| x |\n|---|\n| a\\|b c |\n");
    }
}
