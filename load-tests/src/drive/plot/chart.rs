//! Charts as lines, dots and words at their places: panels above each other over one horizontal
//! axis. Knows nothing of files.

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

/// What a chart looks like, for whoever writes it to a file.
#[derive(Debug)]
pub(super) struct Drawing {
    pub(super) width: f64,
    pub(super) height: f64,
    /// From back to front, on white.
    pub(super) shapes: Vec<Shape>,
}

/// A place from the upper left corner.
pub(super) type Place = (f64, f64);

#[derive(Debug)]
pub(super) enum Shape {
    Line {
        from: Place,
        to: Place,
        colour: &'static str,
    },
    Path {
        points: Vec<Place>,
        colour: &'static str,
    },
    Dot {
        at: Place,
        colour: &'static str,
    },
    Block {
        at: Place,
        size: (f64, f64),
        colour: &'static str,
    },
    Words {
        at: Place,
        anchor: Anchor,
        size: u32,
        words: String,
    },
}

/// Which part of a text is at its place.
#[derive(Clone, Copy, Debug)]
pub(super) enum Anchor {
    Start,
    Middle,
    End,
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

    /// Where everything is.
    pub(super) fn finish(self) -> Drawing {
        let height = TOP + self.panels.len() as f64 * (PANEL + GAP) - GAP + BOTTOM;
        let mut out = Vec::new();
        text(&mut out, (LEFT, 24.0), (Anchor::Start, 15), &self.title);
        for (index, (y, series)) in self.panels.iter().enumerate() {
            let top = TOP + index as f64 * (PANEL + GAP);
            self.draw(&mut out, top, (y, series));
        }
        let below = height - BOTTOM;
        for (value, name) in self.x.ticks() {
            let at = (self.across(value), below + 18.0);
            text(&mut out, at, (Anchor::Middle, 12), &name);
        }
        let at = ((LEFT + WIDTH - RIGHT) / 2.0, below + 38.0);
        text(&mut out, at, (Anchor::Middle, 12), &self.x.name);
        Drawing {
            width: WIDTH,
            height,
            shapes: out,
        }
    }

    fn across(&self, value: f64) -> f64 {
        LEFT + self.x.place(value) * (WIDTH - LEFT - RIGHT)
    }

    fn draw(&self, out: &mut Vec<Shape>, top: f64, (y, series): (&Axis, &[Series])) {
        let (right, bottom) = (WIDTH - RIGHT, top + PANEL);
        let up = |value: f64| bottom - y.place(value) * PANEL;
        for (value, name) in y.ticks() {
            let at = up(value);
            line(out, (LEFT, at), (right, at), "#dddddd");
            text(out, (LEFT - 6.0, at + 4.0), (Anchor::End, 12), &name);
        }
        for (value, name) in &self.marks {
            let at = self.across(*value);
            line(out, (at, top), (at, bottom), "#aaaaaa");
            text(out, (at + 3.0, top + 12.0), (Anchor::Start, 10), name);
        }
        line(out, (LEFT, top), (LEFT, bottom), "#000000");
        line(out, (LEFT, bottom), (right, bottom), "#000000");
        text(out, (LEFT, top - 6.0), (Anchor::Start, 12), &y.name);
        for (index, one) in series.iter().enumerate() {
            let colour = COLOURS[index % COLOURS.len()];
            let points = one.points.iter().map(|&(x, y)| (self.across(x), up(y)));
            if one.is_line {
                let points = points.collect();
                out.push(Shape::Path { points, colour });
            } else {
                out.extend(points.map(|at| Shape::Dot { at, colour }));
            }
            let at = top + 14.0 + index as f64 * 18.0;
            out.push(Shape::Block {
                at: (right + 12.0, at - 6.0),
                size: (12.0, 4.0),
                colour,
            });
            text(out, (right + 30.0, at), (Anchor::Start, 12), &one.name);
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

fn line(out: &mut Vec<Shape>, from: Place, to: Place, colour: &'static str) {
    out.push(Shape::Line { from, to, colour });
}

fn text(out: &mut Vec<Shape>, at: Place, (anchor, size): (Anchor, u32), words: &str) {
    out.push(Shape::Words {
        at,
        anchor,
        size,
        words: words.to_owned(),
    });
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
}
