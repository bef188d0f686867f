//! A cold start as a waterfall: a row per stage and lane, each bar at its true place.

use std::fmt::Write as _;
use std::time::Duration;

use dormouse_client::{ColdStart, Stage};
use serde_json::{Value, json};

use super::output::{self, Screen};

/// The width of bars where no terminal says otherwise.
const BAR_WIDTH: usize = 40;
/// Bars narrower than this say nothing; wider than this they are no easier to compare.
const BAR_LIMITS: (usize, usize) = (10, 100);

/// What a model was woken from that had only given up its weights' memory.
pub(super) const PARKED: &str = "parked";

/// When the first run of a model that woke had ended, from the start of its load.
pub(super) fn answered(cold: &ColdStart) -> Option<Duration> {
    let runs = cold.stages.iter().filter(|stage| stage.name == "first-run");
    let ends = runs.map(|run| {
        let start = run.start.unwrap_or(cold.total);
        start.saturating_add(run.duration)
    });
    let request = cold.request.as_ref().map(|request| request.total);
    ends.max().or(request)
}

/// The bars of a stage on one lane.
#[derive(Debug)]
struct Row<'a> {
    name: &'a str,
    lane: u32,
    /// Beginnings and ends.
    bars: Vec<(Duration, Duration)>,
    bytes: u64,
    running: bool,
}

impl Row<'_> {
    fn took(&self) -> Duration {
        self.bars
            .iter()
            .map(|(from, to)| to.saturating_sub(*from))
            .sum()
    }
}

/// The text of a row around its bar.
#[derive(Debug)]
struct Cells {
    took: String,
    bytes: String,
    rate: String,
}

impl Screen {
    /// The stages of a cold start as a waterfall.
    pub fn waterfall(&self, cold: &ColdStart) -> String {
        let mut rows = rows(&cold.stages);
        let mut add = |name, from, to| {
            rows.push(Row {
                name,
                lane: 0,
                bars: vec![(from, to)],
                bytes: 0,
                running: false,
            });
        };
        if let Some(request) = &cold.request {
            let ended = request.waited.saturating_add(request.run);
            add("run", request.waited, ended);
        }
        // A parked model has nothing to load.
        if cold.kind != PARKED {
            add("loaded", Duration::ZERO, cold.total);
        }
        if let Some(answered) = answered(cold) {
            add("total", Duration::ZERO, answered);
        }
        let ends = rows.iter().flat_map(|row| &row.bars).map(|(_, to)| *to);
        let whole = ends.max().unwrap_or_default();
        let cells: Vec<Cells> = rows.iter().map(cells).collect();
        let widest = |texts: &mut dyn Iterator<Item = usize>| texts.max().unwrap_or(0);
        let name_width = widest(&mut rows.iter().map(|row| row.name.chars().count()));
        let took_width = widest(&mut cells.iter().map(|cell| cell.took.len())).max(9);
        let bytes_width = widest(&mut cells.iter().map(|cell| cell.bytes.len()));
        let rate_width = widest(&mut cells.iter().map(|cell| cell.rate.len()));
        let left = |beside: usize| {
            let line = self.width.map(usize::from);
            line.map_or(BAR_WIDTH, |line| line.saturating_sub(beside))
        };
        let before = name_width + took_width + 6;
        // Where it is narrow the bars are worth more than the bytes.
        let beside = before + bytes_width + rate_width + 4;
        let shows_bytes = left(beside) >= BAR_LIMITS.0;
        let width = left(if shows_bytes { beside } else { before });
        let width = width.clamp(BAR_LIMITS.0, BAR_LIMITS.1);
        let mut text = String::new();
        for (row, Cells { took, bytes, rate }) in rows.iter().zip(cells) {
            let bar = self.bars(&row.bars, whole, width);
            let bar = self.coloured(row.name, &bar);
            let name = row.name;
            // Writing to a string cannot fail.
            let _ = write!(text, "  {name:<name_width$}  {took:>took_width$}  {bar}");
            if shows_bytes && !bytes.is_empty() {
                let _ = write!(text, "  {bytes:>bytes_width$}  {rate:>rate_width$}");
            }
            text.truncate(text.trim_end().len());
            text.push('\n');
        }
        text
    }

    /// Bars over a line of so many places; a place shows more than ASCII in halves.
    fn bars(&self, bars: &[(Duration, Duration)], whole: Duration, width: usize) -> String {
        let parts = if self.unicode { 2 } else { 1 };
        let places = width * parts;
        let mut filled = vec![false; places];
        let whole = whole.as_secs_f64().max(f64::MIN_POSITIVE);
        let place = |at: Duration| (at.as_secs_f64() / whole).clamp(0.0, 1.0) * places as f64;
        for &(from, to) in bars {
            let from = (place(from).floor() as usize).min(places - 1);
            let to = (place(to).round() as usize).clamp(from + 1, places);
            filled[from..to].fill(true);
        }
        let mark = |place: &[bool]| match place {
            [true, true] => '█',
            [true, false] => '▌',
            [false, true] => '▐',
            [true] => '#',
            _ => ' ',
        };
        filled.chunks(parts).map(mark).collect()
    }

    /// Waiting, moving bytes, building and running look different.
    fn coloured(&self, stage: &str, bar: &str) -> String {
        if !self.colour {
            return bar.to_owned();
        }
        let colour = match stage {
            "queue" | "failed-attempt" => 33,
            "fetch" | "look-up" | "read" | "populate" | "buffers" => 36,
            "environment" | "session" | "pack" => 34,
            "warmup" | "first-run" => 32,
            _ => 90,
        };
        format!("\x1b[{colour}m{bar}\x1b[0m")
    }
}

/// What stands beside a row's bar.
fn cells(row: &Row<'_>) -> Cells {
    let took = row.took();
    let running = if row.running { "+" } else { "" };
    let mut cells = Cells {
        took: format!("{}{running}", output::duration(took)),
        bytes: String::new(),
        rate: String::new(),
    };
    if row.bytes > 0 {
        cells.bytes = output::size(row.bytes as f64);
        let rate = row.bytes as f64 / took.as_secs_f64();
        if rate.is_finite() {
            cells.rate = format!("{}/s", output::size(rate));
        }
    }
    cells
}

/// A row per stage and lane, in the order they started.
fn rows(stages: &[Stage]) -> Vec<Row<'_>> {
    let mut rows: Vec<Row<'_>> = Vec::new();
    let mut after = Duration::ZERO;
    for stage in stages {
        // Without a start the stages are drawn one after the other.
        let start = stage.start.unwrap_or(after);
        after = start.saturating_add(stage.duration);
        let known = rows
            .iter_mut()
            .find(|row| row.name == stage.name && row.lane == stage.lane);
        match known {
            Some(row) => {
                row.bars.push((start, after));
                row.bytes = row.bytes.saturating_add(stage.bytes);
                row.running |= stage.running;
            }
            None => rows.push(Row {
                name: &stage.name,
                lane: stage.lane,
                bars: vec![(start, after)],
                bytes: stage.bytes,
                running: stage.running,
            }),
        }
    }
    rows
}

/// A cold start for programs; what is not known is left out.
pub(super) fn cold_start_json(cold: &ColdStart) -> Value {
    let stage = |stage: &Stage| {
        let mut value = json!({
            "name": stage.name,
            "lane": stage.lane,
            "start_seconds": stage.start.map(|start| start.as_secs_f64()),
            "seconds": stage.duration.as_secs_f64(),
            "bytes": stage.bytes,
        });
        if stage.running {
            value["running"] = true.into();
        }
        value
    };
    let mut value = json!({
        "seconds": cold.total.as_secs_f64(),
        "overlap_seconds": cold.overlap.as_secs_f64(),
        "bytes": cold.bytes(),
        "ahead": cold.ahead,
        "stages": cold.stages.iter().map(stage).collect::<Value>(),
    });
    if !cold.kind.is_empty() {
        value["kind"] = cold.kind.as_str().into();
    }
    if let Some(started) = cold.started {
        value["started"] = humantime::format_rfc3339_millis(started).to_string().into();
    }
    if let Some(answered) = answered(cold) {
        value["answered_seconds"] = answered.as_secs_f64().into();
    }
    if let Some(request) = &cold.request {
        value["request"] = json!({
            "waited_seconds": request.waited.as_secs_f64(),
            "run_seconds": request.run.as_secs_f64(),
            "seconds": request.total.as_secs_f64(),
        });
    }
    value
}

#[cfg(test)]
mod tests {
    use expect_test::expect;

    use super::super::output::tests::PLAIN;
    use super::*;

    const TERMINAL: Screen = Screen {
        terminal: true,
        unicode: true,
        width: Some(80),
        ..PLAIN
    };

    /// Milliseconds and megabytes: `(name, lane, start, duration, bytes)`.
    fn cold(total: u64, stages: &[(&str, u32, u64, u64, u64)]) -> ColdStart {
        let stage = |&(name, lane, start, duration, bytes): &(&str, u32, u64, u64, u64)| {
            dormouse_client::pb::cold_start::Stage {
                name: name.to_owned(),
                lane,
                start_ns: start * 1_000_000,
                duration_ns: duration * 1_000_000,
                bytes: bytes * 1_000_000,
                running: name == "pack",
            }
        };
        dormouse_client::pb::ColdStart {
            total_ns: total * 1_000_000,
            stages: stages.iter().map(stage).collect(),
            ..Default::default()
        }
        .into()
    }

    fn prepared() -> ColdStart {
        cold(
            100,
            &[
                ("queue", 0, 0, 10, 0),
                ("look-up", 0, 10, 1, 0),
                ("populate", 0, 11, 39, 200),
                ("populate", 1, 11, 60, 218),
                ("session", 2, 11, 80, 0),
                ("populate", 0, 60, 20, 0),
                ("first-run", 0, 100, 60, 0),
                ("pack", 1, 100, 100, 0),
            ],
        )
    }

    /// With a line that keeps the margin.
    fn drawn(screen: &Screen, cold: &ColdStart) -> String {
        format!("woke\n{}", screen.waterfall(cold))
    }

    #[test]
    fn stages_without_a_start_follow_each_other() {
        let cold = ColdStart::parse("load;dur=20, read;dur=5, session;dur=15").unwrap();
        expect![[r#"
            woke
              read       5.00 ms  ##########
              session    15.0 ms            ##############################
              loaded     20.0 ms  ########################################
        "#]]
        .assert_eq(&drawn(&PLAIN, &cold));
    }

    #[test]
    fn lanes_that_overlap_are_rows_that_overlap() {
        expect![[r#"
            woke
              queue        10.0 ms  ##
              look-up      1.00 ms   #
              populate     59.0 ms    ########  ####                          200 MB  3.39 GB/s
              populate     60.0 ms    ############                            218 MB  3.63 GB/s
              session      80.0 ms    ################
              first-run    60.0 ms                      ############
              pack         100 ms+                      ####################
              loaded        100 ms  ####################
              total         160 ms  ################################
        "#]]
        .assert_eq(&drawn(&PLAIN, &prepared()));
    }

    #[test]
    fn a_terminal_shows_halves_and_is_filled() {
        expect![[r#"
            woke
              queue        10.0 ms  ██
              look-up      1.00 ms   ▐
              populate     59.0 ms    ███████▌ ████                        200 MB  3.39 GB/s
              populate     60.0 ms    ███████████                          218 MB  3.63 GB/s
              session      80.0 ms    ███████████████
              first-run    60.0 ms                    ▐██████████▌
              pack         100 ms+                    ▐██████████████████
              loaded        100 ms  ██████████████████▌
              total         160 ms  █████████████████████████████▌
        "#]]
        .assert_eq(&drawn(&TERMINAL, &prepared()));
    }

    #[test]
    fn no_line_is_wider_than_the_terminal() {
        for width in [40, 50, 80, 120] {
            let screen = Screen {
                width: Some(width),
                ..TERMINAL
            };
            let text = screen.waterfall(&prepared());
            let widest = text.lines().map(|line| line.chars().count()).max();
            assert!(widest.unwrap() <= usize::from(width), "{text}");
        }
    }

    #[test]
    fn colours_change_nothing_else() {
        let coloured = Screen {
            colour: true,
            ..TERMINAL
        };
        let text = coloured.waterfall(&prepared());
        assert!(text.contains("\x1b[36m"), "{text}");
        let mut plain = String::new();
        for part in text.split('\x1b') {
            plain.push_str(
                part.split_once('m')
                    .filter(|_| part.starts_with('['))
                    .map_or(part, |(_, rest)| rest),
            );
        }
        let lines: Vec<_> = plain.lines().map(str::trim_end).collect();
        assert_eq!(lines.join("\n") + "\n", TERMINAL.waterfall(&prepared()));
    }

    #[test]
    fn a_stage_of_no_time_is_still_seen() {
        let cold = ColdStart::parse("load;dur=0, read;dur=0;bytes=5").unwrap();
        let text = PLAIN.waterfall(&cold);
        assert!(text.contains("read            0  #  "), "{text}");
        assert!(text.contains("  5 B\n"), "{text}");
    }

    #[test]
    fn durations_from_a_broken_server_do_no_harm() {
        let cold = dormouse_client::pb::ColdStart {
            stages: vec![dormouse_client::pb::cold_start::Stage {
                name: "read".to_owned(),
                start_ns: u64::MAX,
                duration_ns: u64::MAX,
                bytes: u64::MAX,
                ..Default::default()
            }],
            ..Default::default()
        };
        let text = PLAIN.waterfall(&cold.into());
        assert!(text.starts_with("  read "), "{text}");
    }
}
