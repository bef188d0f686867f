//! What commands print: tables for people, JSON for programs.

use std::io::{self, IsTerminal, Write as _};
use std::time::Duration;

use comfy_table::{ContentArrangement, Table, presets};

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

/// How a command's result is shown.
#[derive(Clone, Copy, Debug, Default, clap::Args)]
pub struct FormatArgs {
    /// How to show it [default: table on a terminal, json otherwise]
    #[arg(long, value_enum, global = true)]
    pub format: Option<OutputFormat>,
    /// The same as --format json
    #[arg(long, global = true, conflicts_with = "format")]
    pub json: bool,
}

impl FormatArgs {
    /// What the user chose.
    pub fn chosen(&self) -> Option<OutputFormat> {
        match self.json {
            true => Some(OutputFormat::Json),
            false => self.format,
        }
    }
}

/// What the output goes to, and hence how it is written.
#[derive(Clone, Copy, Debug)]
pub struct Screen {
    pub format: OutputFormat,
    /// Whether somebody watches: lines are kept short.
    pub terminal: bool,
    /// Whether it shows more than ASCII.
    pub unicode: bool,
    pub colour: bool,
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
            unicode: terminal && is_utf8(|name| std::env::var(name).ok()),
            // A variable that is set to nothing is as good as none.
            colour: terminal && std::env::var_os("NO_COLOR").is_none_or(|set| set.is_empty()),
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
        let mark = if self.unicode { '█' } else { '#' };
        let mut bar = " ".repeat(from);
        bar.extend(std::iter::repeat_n(mark, to - from));
        bar
    }

    /// A bar as long as the part of the whole.
    pub fn share(&self, part: u64, whole: u64) -> String {
        self.bar(0.0, part as f64 / whole.max(1) as f64)
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

/// Three significant digits and a unit: `418 MB`.
pub fn size(bytes: f64) -> String {
    let (value, unit) = match bytes {
        b if b < 999.5 => return format!("{b:.0} B"),
        b if b < 999.5e3 => (b / 1e3, "kB"),
        b if b < 999.5e6 => (b / 1e6, "MB"),
        b => (b / 1e9, "GB"),
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

/// Whether the user's locale shows UTF-8. The first of these that is set decides; none set means
/// that nobody chose, and terminals of today show UTF-8.
fn is_utf8(variable: impl Fn(&str) -> Option<String>) -> bool {
    let names = ["LC_ALL", "LC_CTYPE", "LANG"].into_iter();
    let chosen = names.filter_map(variable).find(|value| !value.is_empty());
    chosen.is_none_or(|locale| {
        let locale = locale.to_ascii_lowercase();
        locale.contains("utf-8") || locale.contains("utf8")
    })
}

#[cfg(test)]
pub(crate) mod tests {
    use expect_test::expect;

    use super::*;

    pub(crate) const PLAIN: Screen = Screen {
        format: OutputFormat::Table,
        terminal: false,
        unicode: false,
        colour: false,
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
    fn sizes_have_three_digits() {
        let shown = [0.0, 999.0, 1_000.0, 4_096.0, 418e6, 1.34e9, 2e12].map(size);
        let expected = [
            "0 B", "999 B", "1.00 kB", "4.10 kB", "418 MB", "1.34 GB", "2000 GB",
        ];
        assert_eq!(shown, expected);
    }

    #[test]
    fn the_locale_decides_about_more_than_ascii() {
        let of = |set: &[(&str, &str)]| {
            is_utf8(|name| {
                let found = set.iter().find(|(variable, _)| *variable == name);
                found.map(|(_, value)| (*value).to_owned())
            })
        };
        assert!(of(&[]));
        assert!(of(&[("LANG", "de_DE.UTF-8")]));
        assert!(of(&[("LC_ALL", ""), ("LC_CTYPE", "C.utf8"), ("LANG", "C")]));
        assert!(!of(&[("LC_ALL", "C"), ("LANG", "de_DE.UTF-8")]));
        assert!(!of(&[("LANG", "POSIX")]));
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
