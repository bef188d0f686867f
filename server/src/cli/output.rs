//! What commands print: tables for people, JSON for programs.

use std::fmt::Write as _;
use std::io::{self, IsTerminal, Write as _};
use std::time::Duration;

use comfy_table::{ContentArrangement, Table, presets};
use dormouse_client::ColdStart;

/// Below this many columns a table cannot be arranged so that it can be read.
const NARROWEST: u16 = 40;

/// How the result of a command is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum OutputFormat {
    /// For people.
    Table,
    /// For programs.
    Json,
}

/// What the output goes to, and hence how it is written.
#[derive(Clone, Copy, Debug)]
pub struct Screen {
    pub format: OutputFormat,
    /// Whether somebody watches: lines are kept short and may use more than ASCII.
    pub terminal: bool,
    /// How many characters fit a line; none when that does not matter.
    pub width: Option<u16>,
}

impl Screen {
    /// A terminal gets tables and a pipe JSON, unless the user chose.
    pub fn of_stdout(chosen: Option<OutputFormat>) -> Self {
        let terminal = io::stdout().is_terminal();
        let by_default = if terminal {
            OutputFormat::Table
        } else {
            OutputFormat::Json
        };
        Self {
            format: chosen.unwrap_or(by_default),
            terminal,
            // A terminal that does not know its size says 0.
            width: terminal
                .then(|| Table::new().width())
                .flatten()
                .filter(|width| *width >= NARROWEST),
        }
    }

    pub fn is_json(&self) -> bool {
        self.format == OutputFormat::Json
    }

    /// An empty table with these headings, without lines around it.
    pub fn table(&self, headings: &[&str]) -> Table {
        let mut table = Table::new();
        table.load_style(presets::NOTHING);
        table.set_header(headings.iter().map(|heading| heading.to_uppercase()));
        if let Some(width) = self.width {
            table.set_content_arrangement(ContentArrangement::Dynamic);
            table.set_width(width);
        }
        table
    }

    /// A bar from one place to another, both as parts of the whole line; at least one mark long.
    fn bar(&self, from: f64, to: f64) -> String {
        const WIDTH: f64 = 40.0;
        let place = |part: f64| part.clamp(0.0, 1.0) * WIDTH;
        let from = (place(from).floor() as usize).min(WIDTH as usize - 1);
        let to = (place(to).round() as usize).max(from + 1);
        let mark = if self.terminal { '█' } else { '#' };
        let mut bar = " ".repeat(from);
        bar.extend(std::iter::repeat_n(mark, to - from));
        bar
    }

    /// A bar as long as the part of the whole.
    pub fn share(&self, part: u64, whole: u64) -> String {
        self.bar(0.0, part as f64 / whole.max(1) as f64)
    }

    /// The stages of a cold start as a waterfall.
    pub fn waterfall(&self, cold: &ColdStart) -> String {
        let mut text = String::new();
        let names = cold.stages.iter().map(|stage| stage.name.chars().count());
        let width = names.max().unwrap_or(0).max("total".len());
        let mut line = |name: &str, start: Duration, length: Duration| {
            let whole = cold.total.as_secs_f64().max(f64::MIN_POSITIVE);
            let [from, to] = [start, start + length].map(|at| at.as_secs_f64() / whole);
            let bar = self.bar(from, to);
            let length = duration(length);
            // Writing to a string cannot fail.
            let _ = writeln!(text, "  {name:<width$}  {length:>9}  {bar}");
        };
        let mut after = Duration::ZERO;
        for stage in &cold.stages {
            // Without a start the stages are drawn one after the other.
            let start = stage.start.unwrap_or(after);
            line(&stage.name, start, stage.duration);
            after = start + stage.duration;
        }
        line("total", Duration::ZERO, cold.total);
        text
    }
}

/// The lines of a table, without the blanks at their ends and the margin at their beginning.
pub fn lines(table: &Table) -> String {
    let mut text = String::new();
    for line in table.trim_fmt().lines() {
        text.push_str(line.strip_prefix(' ').unwrap_or(line));
        text.push('\n');
    }
    text
}

/// A value as indented JSON.
pub fn json(value: &serde_json::Value) -> String {
    format!("{value:#}\n")
}

/// Three significant digits and a unit: `12.3 ms`.
pub fn duration(duration: Duration) -> String {
    let seconds = duration.as_secs_f64();
    let (value, unit) = match seconds {
        0.0 => return "0".to_owned(),
        s if s < 0.999_5e-6 => (s * 1e9, "ns"),
        s if s < 0.999_5e-3 => (s * 1e6, "us"),
        s if s < 0.999_5 => (s * 1e3, "ms"),
        s => (s, "s"),
    };
    let digits = match value {
        v if v < 9.995 => 2,
        v if v < 99.95 => 1,
        _ => 0,
    };
    format!("{value:.digits$} {unit}")
}

/// Megabytes, as the memory of a process is told: `105.3 MB`.
pub fn megabytes(bytes: u64) -> String {
    format!("{:.1} MB", bytes as f64 / 1e6)
}

/// Writes to standard output. A reader that has gone away (`| head`) is no failure.
pub fn print(text: &str) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    match stdout
        .write_all(text.as_bytes())
        .and_then(|()| stdout.flush())
    {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        result => result,
    }
}

#[cfg(test)]
mod tests {
    use expect_test::expect;

    use super::*;

    pub(crate) const PLAIN: Screen = Screen {
        format: OutputFormat::Table,
        terminal: false,
        width: None,
    };

    #[test]
    fn durations_have_three_digits() {
        let micros = |micros| duration(Duration::from_micros(micros));
        let shown = [0, 1, 999, 1_000, 12_345, 999_600, 1_000_000, 75_000_000].map(micros);
        let expected = [
            "0", "1.00 us", "999 us", "1.00 ms", "12.3 ms", "1.00 s", "1.00 s", "75.0 s",
        ];
        assert_eq!(shown, expected);
        assert_eq!(duration(Duration::from_nanos(5)), "5.00 ns");
    }

    #[test]
    fn stages_without_a_start_follow_each_other() {
        let cold = ColdStart::parse("load;dur=20, read;dur=5, session;dur=15").unwrap();
        let expected = [
            "  read       5.00 ms  ##########",
            "  session    15.0 ms            ##############################",
            "  total      20.0 ms  ########################################",
        ];
        assert_eq!(PLAIN.waterfall(&cold), expected.join("\n") + "\n");
    }

    #[test]
    fn stages_with_a_start_may_overlap() {
        let cold = ColdStart::parse("load;dur=20, read;dur=15;start=0, environment;dur=10;start=0")
            .unwrap();
        let expected = [
            "  read           15.0 ms  ##############################",
            "  environment    10.0 ms  ####################",
            "  total          20.0 ms  ########################################",
        ];
        assert_eq!(PLAIN.waterfall(&cold), expected.join("\n") + "\n");
    }

    #[test]
    fn a_stage_of_no_time_is_still_seen() {
        let cold = ColdStart::parse("load;dur=0, read;dur=0").unwrap();
        assert!(PLAIN.waterfall(&cold).contains("read           0  #\n"));
    }

    #[test]
    fn tables_have_no_frame() {
        let mut table = PLAIN.table(&["model", "state"]);
        table.add_row(["a", "READY"]);
        expect![[r"
            MODEL  STATE
            a      READY
        "]]
        .assert_eq(&lines(&table));
    }
}
