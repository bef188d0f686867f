//! Drawings as SVG text.

use std::fmt::Write;

use super::chart::{Anchor, Drawing, Shape};

pub(super) fn document(drawing: &Drawing) -> String {
    let Drawing { width, height, .. } = drawing;
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
    );
    for shape in &drawing.shapes {
        let _ = writeln!(out, "{}", element(shape));
    }
    out.push_str("</svg>\n");
    out
}

fn element(shape: &Shape) -> String {
    match shape {
        Shape::Line { from, to, colour } => format!(
            "<line x1=\"{:.1}\" y1=\"{:.1}\" x2=\"{:.1}\" y2=\"{:.1}\" stroke=\"{colour}\"/>",
            from.0, from.1, to.0, to.1
        ),
        Shape::Path { points, colour } => {
            let points = points.iter().map(|(x, y)| format!("{x:.1},{y:.1}"));
            let points: Vec<String> = points.collect();
            format!(
                "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"1.5\"/>",
                points.join(" ")
            )
        }
        Shape::Dot { at: (x, y), colour } => format!(
            "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\" fill=\"{colour}\" fill-opacity=\"0.7\"/>"
        ),
        Shape::Block { at, size, colour } => format!(
            "<rect x=\"{:.1}\" y=\"{:.1}\" width=\"{}\" height=\"{}\" fill=\"{colour}\"/>",
            at.0, at.1, size.0, size.1
        ),
        Shape::Words {
            at: (x, y),
            anchor,
            size,
            words,
        } => {
            let anchor = match anchor {
                Anchor::Start => "start",
                Anchor::Middle => "middle",
                Anchor::End => "end",
            };
            let words = words
                .replace('&', "&amp;")
                .replace('<', "&lt;")
                .replace('>', "&gt;");
            format!(
                "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\" \
                 font-size=\"{size}\">{words}</text>"
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::chart::{Axis, Chart, Series};
    use super::*;

    #[test]
    fn words_cannot_break_the_document() {
        let mut chart = Chart::new("a <b> & c", Axis::linear("x", [0.0, 1.0]));
        let line = Series::line("<s>", vec![(0.0, 1.0), (1.0, 2.0)]);
        chart.panel(Axis::linear("y", [0.0, 2.0]), vec![line]);
        let text = document(&chart.finish());
        assert!(text.contains("a &lt;b&gt; &amp; c") && text.contains("&lt;s&gt;"));
        assert!(text.trim_end().ends_with("</svg>"));
    }
}
