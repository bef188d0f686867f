//! Charts as SVG text: panels above each other over one horizontal axis.

use std::fmt::Write;

const WIDTH: f64 = 960.0;
const LEFT: f64 = 80.0;
const RIGHT: f64 = 200.0;
const TOP: f64 = 56.0;
const PANEL: f64 = 260.0;
const GAP: f64 = 34.0;
const BOTTOM: f64 = 52.0;
/// Told apart by people who see fewer colours, too.
const COLOURS: [&str; 8] = [
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999933",
];

/// A scale with its name.
#[derive(Clone, Debug)]
pub(super) struct Axis {
    name: String,
    from: f64,
    to: f64,
    scale: Scale,
}

#[derive(Clone, Debug)]
enum Scale {
    Linear,
    Logarithmic,
    Named(Vec<String>),
}

/// Points that belong together.
#[derive(Clone, Debug)]
pub(super) struct Series {
    name: String,
    is_line: bool,
    pub(super) points: Vec<(f64, f64)>,
}

/// A drawing.
#[derive(Debug)]
pub(super) struct Chart {
    title: String,
    x: Axis,
    marks: Vec<(f64, String)>,
    panels: Vec<(Axis, Vec<Series>)>,
}

impl Axis {
    pub(super) fn linear(name: &str, values: impl IntoIterator<Item = f64>) -> Self {
        let (from, to) = ends(values).unwrap_or((0.0, 1.0));
        let step = step(from, to);
        Self {
            name: name.to_owned(),
            from: (from / step).floor() * step,
            to: ((to / step).ceil() * step).max(from + step),
            scale: Scale::Linear,
        }
    }

    /// Whole powers of ten around the positive values.
    pub(super) fn logarithmic(name: &str, values: impl IntoIterator<Item = f64>) -> Self {
        let positive = values.into_iter().filter(|&value| value > 0.0);
        let (from, to) = ends(positive).unwrap_or((1.0, 10.0));
        let from = from.log10().floor();
        Self {
            name: name.to_owned(),
            from: 10f64.powf(from),
            to: 10f64.powf(to.log10().ceil().max(from + 1.0)),
            scale: Scale::Logarithmic,
        }
    }

    /// One place per name.
    pub(super) fn named(name: &str, places: &[&str]) -> Self {
        Self {
            name: name.to_owned(),
            from: -0.25,
            to: places.len() as f64 - 0.75,
            scale: Scale::Named(places.iter().map(ToString::to_string).collect()),
        }
    }

    /// From 0 to 1 along the axis.
    fn place(&self, value: f64) -> f64 {
        let share = match self.scale {
            Scale::Logarithmic => {
                (value.max(self.from) / self.from).log10() / (self.to / self.from).log10()
            }
            _ => (value - self.from) / (self.to - self.from),
        };
        share.clamp(0.0, 1.0)
    }

    fn ticks(&self) -> Vec<(f64, String)> {
        match &self.scale {
            Scale::Named(names) => (0..).map(f64::from).zip(names.iter().cloned()).collect(),
            Scale::Linear => {
                let step = step(self.from, self.to);
                let count = ((self.to - self.from) / step).round() as u32;
                (0..=count)
                    .map(|index| self.from + f64::from(index) * step)
                    .map(|value| (value, number(value)))
                    .collect()
            }
            Scale::Logarithmic => {
                let (from, to) = (
                    self.from.log10().round() as i32,
                    self.to.log10().round() as i32,
                );
                (from..=to)
                    .map(|power| 10f64.powi(power))
                    .map(|value| (value, number(value)))
                    .collect()
            }
        }
    }
}

impl Series {
    pub(super) fn line(name: &str, points: Vec<(f64, f64)>) -> Self {
        Self {
            name: name.to_owned(),
            is_line: true,
            points,
        }
    }

    pub(super) fn dots(name: &str, points: Vec<(f64, f64)>) -> Self {
        Self {
            is_line: false,
            ..Self::line(name, points)
        }
    }
}

impl Chart {
    pub(super) fn new(title: &str, x: Axis) -> Self {
        Self {
            title: title.to_owned(),
            x,
            marks: Vec::new(),
            panels: Vec::new(),
        }
    }

    /// Vertical lines with words.
    pub(super) fn marks(&mut self, marks: Vec<(f64, String)>) {
        self.marks = marks;
    }

    pub(super) fn panel(&mut self, y: Axis, series: Vec<Series>) {
        self.panels.push((y, series));
    }

    /// The file's text.
    pub(super) fn finish(self) -> String {
        let height = TOP + self.panels.len() as f64 * (PANEL + GAP) - GAP + BOTTOM;
        let mut out = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" \
             font-family=\"sans-serif\" font-size=\"12\">\n\
             <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
        );
        text(&mut out, (LEFT, 24.0), ("start", 15), &self.title);
        for (index, (y, series)) in self.panels.iter().enumerate() {
            let top = TOP + index as f64 * (PANEL + GAP);
            self.draw(&mut out, top, (y, series));
        }
        let below = height - BOTTOM;
        for (value, name) in self.x.ticks() {
            text(
                &mut out,
                (self.across(value), below + 18.0),
                ("middle", 12),
                &name,
            );
        }
        let middle = (LEFT + WIDTH - RIGHT) / 2.0;
        text(
            &mut out,
            (middle, below + 38.0),
            ("middle", 12),
            &self.x.name,
        );
        out.push_str("</svg>\n");
        out
    }

    fn across(&self, value: f64) -> f64 {
        LEFT + self.x.place(value) * (WIDTH - LEFT - RIGHT)
    }

    fn draw(&self, out: &mut String, top: f64, (y, series): (&Axis, &[Series])) {
        let (right, bottom) = (WIDTH - RIGHT, top + PANEL);
        let up = |value: f64| bottom - y.place(value) * PANEL;
        for (value, name) in y.ticks() {
            let at = up(value);
            line(out, (LEFT, at), (right, at), "#dddddd");
            text(out, (LEFT - 6.0, at + 4.0), ("end", 12), &name);
        }
        for (value, name) in &self.marks {
            let at = self.across(*value);
            line(out, (at, top), (at, bottom), "#aaaaaa");
            text(out, (at + 3.0, top + 12.0), ("start", 10), name);
        }
        line(out, (LEFT, top), (LEFT, bottom), "black");
        line(out, (LEFT, bottom), (right, bottom), "black");
        text(out, (LEFT, top - 6.0), ("start", 12), &y.name);
        for (index, one) in series.iter().enumerate() {
            let colour = COLOURS[index % COLOURS.len()];
            let points = one.points.iter().map(|&(x, y)| (self.across(x), up(y)));
            if one.is_line {
                let path: Vec<String> = points.map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
                let _ = writeln!(
                    out,
                    "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"1.5\"/>",
                    path.join(" ")
                );
            } else {
                for (x, y) in points {
                    let _ = writeln!(
                        out,
                        "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\" fill=\"{colour}\" fill-opacity=\"0.7\"/>"
                    );
                }
            }
            let at = top + 14.0 + index as f64 * 18.0;
            let _ = writeln!(
                out,
                "<rect x=\"{:.1}\" y=\"{:.1}\" width=\"12\" height=\"4\" fill=\"{colour}\"/>",
                right + 12.0,
                at - 6.0
            );
            text(out, (right + 30.0, at), ("start", 12), &one.name);
        }
    }
}

fn ends(values: impl IntoIterator<Item = f64>) -> Option<(f64, f64)> {
    let finite = values.into_iter().filter(|value| value.is_finite());
    finite.fold(None, |ends, value| match ends {
        None => Some((value, value)),
        Some((from, to)) => Some((from.min(value), to.max(value))),
    })
}

/// A round distance between ticks, of which there are a handful.
fn step(from: f64, to: f64) -> f64 {
    let rough = ((to - from) / 5.0).max(1e-9);
    let power = 10f64.powf(rough.log10().floor());
    let factor = [1.0, 2.0, 5.0]
        .into_iter()
        .find(|factor| factor * power >= rough);
    factor.unwrap_or(10.0) * power
}

fn number(value: f64) -> String {
    let text = format!("{value:.6}");
    let text = text.trim_end_matches('0').trim_end_matches('.');
    match text {
        "" | "-" | "-0" => "0".to_owned(),
        text => text.to_owned(),
    }
}

fn line(out: &mut String, from: (f64, f64), to: (f64, f64), colour: &str) {
    let _ = writeln!(
        out,
        "<line x1=\"{:.1}\" y1=\"{:.1}\" x2=\"{:.1}\" y2=\"{:.1}\" stroke=\"{colour}\"/>",
        from.0, from.1, to.0, to.1
    );
}

fn text(out: &mut String, (x, y): (f64, f64), (anchor, size): (&str, u32), words: &str) {
    let words = words
        .replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;");
    let _ = writeln!(
        out,
        "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\" font-size=\"{size}\">{words}</text>"
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_enclose_the_values() {
        let axis = Axis::linear("x", [0.0, 93.0]);
        let names: Vec<String> = axis.ticks().into_iter().map(|tick| tick.1).collect();
        assert_eq!(names, ["0", "20", "40", "60", "80", "100"]);
        let axis = Axis::logarithmic("y", [0.3, 0.0, 250.0]);
        let names: Vec<String> = axis.ticks().into_iter().map(|tick| tick.1).collect();
        assert_eq!(names, ["0.1", "1", "10", "100", "1000"]);
        let middle = axis.place(10.0);
        assert!((middle - 0.5).abs() < 1e-9, "{middle}");
    }

    #[test]
    fn axes_without_values_or_with_one_are_drawn() {
        for axis in [
            Axis::linear("x", []),
            Axis::linear("x", [5.0]),
            Axis::logarithmic("x", []),
            Axis::logarithmic("x", [10.0]),
        ] {
            assert!(axis.ticks().len() >= 2, "{axis:?}");
            assert!(axis.place(5.0).is_finite());
        }
    }

    #[test]
    fn words_cannot_break_the_document() {
        let mut chart = Chart::new("a <b> & c", Axis::linear("x", [0.0, 1.0]));
        let line = Series::line("<s>", vec![(0.0, 1.0), (1.0, 2.0)]);
        chart.panel(Axis::linear("y", [0.0, 2.0]), vec![line]);
        let text = chart.finish();
        assert!(text.contains("a &lt;b&gt; &amp; c") && text.contains("&lt;s&gt;"));
        assert!(text.trim_end().ends_with("</svg>"));
    }
}
