//! Drawings as PNG files, words included: their font comes with the program, because servers often
//! have none.

use anyhow::{Context, Result};
use tiny_skia::{
    Color, FillRule, LineCap, LineJoin, Paint, Path, PathBuilder, Pixmap, Rect, Stroke, Transform,
};
use ttf_parser::{Face, OutlineBuilder};

use super::chart::{Anchor, Drawing, Shape};

/// Latin, Greek, Cyrillic and punctuation of DejaVu Sans; `font/README.md` says how it was made.
const FONT: &[u8] = include_bytes!("font/dejavu-sans-subset.ttf");
/// Pixels per unit of the drawing, enough for small words on fine screens.
const SCALE: f32 = 2.0;

/// The file's bytes.
pub(super) fn bytes(drawing: &Drawing) -> Result<Vec<u8>> {
    let pixels = |length: f64| (length as f32 * SCALE).ceil() as u32;
    let map = Pixmap::new(pixels(drawing.width), pixels(drawing.height));
    let mut canvas = Canvas {
        map: map.context("a picture has a size")?,
        font: Face::parse(FONT, 0).context("cannot read the font for pictures")?,
    };
    canvas.map.fill(Color::WHITE);
    for shape in &drawing.shapes {
        canvas.draw(shape);
    }
    canvas.map.encode_png().context("cannot write a picture")
}

struct Canvas {
    map: Pixmap,
    font: Face<'static>,
}

impl Canvas {
    fn draw(&mut self, shape: &Shape) {
        match shape {
            Shape::Line { from, to, colour } => self.stroke(&[*from, *to], colour, 1.0),
            Shape::Path { points, colour } => self.stroke(points, colour, 1.5),
            Shape::Dot { at, colour } => {
                let circle = PathBuilder::from_circle(at.0 as f32, at.1 as f32, 3.0);
                self.fill(circle, colour, 0.7);
            }
            Shape::Block { at, size, colour } => {
                let (x, y, width, height) = (at.0, at.1, size.0, size.1);
                let block = Rect::from_xywh(x as f32, y as f32, width as f32, height as f32);
                self.fill(block.map(PathBuilder::from_rect), colour, 1.0);
            }
            Shape::Words {
                at,
                anchor,
                size,
                words,
            } => {
                let words = self.outline((at.0 as f32, at.1 as f32), *anchor, *size as f32, words);
                self.fill(words, "#000000", 1.0);
            }
        }
    }

    /// A line through points; nothing where there are too few for one.
    fn stroke(&mut self, points: &[(f64, f64)], colour: &str, width: f32) {
        let mut path = PathBuilder::new();
        for (index, &(x, y)) in points.iter().enumerate() {
            match index {
                0 => path.move_to(x as f32, y as f32),
                _ => path.line_to(x as f32, y as f32),
            }
        }
        let Some(path) = path.finish() else { return };
        let stroke = Stroke {
            width,
            line_cap: LineCap::Butt,
            line_join: LineJoin::Round,
            ..Stroke::default()
        };
        let scale = Transform::from_scale(SCALE, SCALE);
        self.map
            .stroke_path(&path, &paint(colour, 1.0), &stroke, scale, None);
    }

    fn fill(&mut self, path: Option<Path>, colour: &str, opacity: f32) {
        let Some(path) = path else { return };
        let scale = Transform::from_scale(SCALE, SCALE);
        let paint = paint(colour, opacity);
        self.map
            .fill_path(&path, &paint, FillRule::Winding, scale, None);
    }

    /// The outlines of words; none of those that have no ink.
    fn outline(&self, (x, y): (f32, f32), anchor: Anchor, size: f32, words: &str) -> Option<Path> {
        let unit = size / f32::from(self.font.units_per_em());
        let glyphs = words.chars().filter_map(|letter| {
            let found = self.font.glyph_index(letter);
            found.or_else(|| self.font.glyph_index('?'))
        });
        let glyphs: Vec<_> = glyphs
            .map(|glyph| {
                let advance = self.font.glyph_hor_advance(glyph).unwrap_or(0);
                (glyph, f32::from(advance) * unit)
            })
            .collect();
        let width: f32 = glyphs.iter().map(|(_, advance)| advance).sum();
        let mut pen = Pen {
            path: PathBuilder::new(),
            x: match anchor {
                Anchor::Start => x,
                Anchor::Middle => x - width / 2.0,
                Anchor::End => x - width,
            },
            y,
            unit,
        };
        for (glyph, advance) in glyphs {
            self.font.outline_glyph(glyph, &mut pen);
            pen.x += advance;
        }
        pen.path.finish()
    }
}

/// Puts a glyph, whose y goes up, at a place of the drawing, whose y goes down.
struct Pen {
    path: PathBuilder,
    x: f32,
    y: f32,
    unit: f32,
}

impl Pen {
    fn place(&self, x: f32, y: f32) -> (f32, f32) {
        (self.x + x * self.unit, self.y - y * self.unit)
    }
}

impl OutlineBuilder for Pen {
    fn move_to(&mut self, x: f32, y: f32) {
        let (x, y) = self.place(x, y);
        self.path.move_to(x, y);
    }

    fn line_to(&mut self, x: f32, y: f32) {
        let (x, y) = self.place(x, y);
        self.path.line_to(x, y);
    }

    fn quad_to(&mut self, x1: f32, y1: f32, x: f32, y: f32) {
        let (from, to) = (self.place(x1, y1), self.place(x, y));
        self.path.quad_to(from.0, from.1, to.0, to.1);
    }

    fn curve_to(&mut self, x1: f32, y1: f32, x2: f32, y2: f32, x: f32, y: f32) {
        let (first, second, to) = (self.place(x1, y1), self.place(x2, y2), self.place(x, y));
        self.path
            .cubic_to(first.0, first.1, second.0, second.1, to.0, to.1);
    }

    fn close(&mut self) {
        self.path.close();
    }
}

/// The paint of a colour such as `#0072b2`; black for other words.
fn paint(colour: &str, opacity: f32) -> Paint<'static> {
    let hex = colour.strip_prefix('#').unwrap_or_default();
    let hex = u32::from_str_radix(hex, 16).unwrap_or(0);
    let [_, red, green, blue] = hex.to_be_bytes();
    let mut paint = Paint::default();
    paint.set_color_rgba8(red, green, blue, (opacity * 255.0).round() as u8);
    paint.anti_alias = true;
    paint
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drawn(shapes: Vec<Shape>) -> Pixmap {
        let drawing = Drawing {
            width: 100.0,
            height: 40.0,
            shapes,
        };
        Pixmap::decode_png(&bytes(&drawing).unwrap()).unwrap()
    }

    fn words(words: &str, anchor: Anchor) -> Vec<Shape> {
        vec![Shape::Words {
            at: (50.0, 25.0),
            anchor,
            size: 12,
            words: words.to_owned(),
        }]
    }

    /// The leftmost and the rightmost column that is not white.
    fn inked(map: &Pixmap) -> Option<(u32, u32)> {
        let pixels = map.pixels().iter().enumerate();
        let inked = pixels.filter(|(_, pixel)| pixel.red() < 128);
        let columns: Vec<u32> = inked.map(|(at, _)| at as u32 % map.width()).collect();
        Some((*columns.iter().min()?, *columns.iter().max()?))
    }

    #[test]
    fn words_are_drawn_on_their_side_of_their_place() {
        let map = drawn(words("p99", Anchor::Start));
        assert_eq!((map.width(), map.height()), (200, 80));
        let (from, _) = inked(&map).unwrap();
        assert!(from >= 100, "{from}");
        let (_, to) = inked(&drawn(words("p99", Anchor::End))).unwrap();
        assert!(to <= 100, "{to}");
        let (from, to) = inked(&drawn(words("p99", Anchor::Middle))).unwrap();
        assert!(from < 100 && to > 100, "{from} {to}");
        assert_eq!(inked(&drawn(words(" ", Anchor::Start))), None);
    }

    #[test]
    fn letters_that_the_font_lacks_are_question_marks() {
        for letter in "µ–×äß€ΩЖ".chars() {
            let face = Face::parse(FONT, 0).unwrap();
            assert!(face.glyph_index(letter).is_some(), "{letter}");
        }
        let (lacking, question) = (words("漢", Anchor::Start), words("?", Anchor::Start));
        assert_eq!(drawn(lacking).data(), drawn(question).data());
    }

    #[test]
    fn colours_are_those_of_the_chart() {
        let map = drawn(vec![Shape::Block {
            at: (10.0, 10.0),
            size: (20.0, 20.0),
            colour: "#0072b2",
        }]);
        let pixel = map.pixel(40, 40).unwrap();
        assert_eq!((pixel.red(), pixel.green(), pixel.blue()), (0, 0x72, 0xb2));
        let none = vec![Shape::Path {
            points: vec![(1.0, 1.0)],
            colour: "#000000",
        }];
        assert_eq!(inked(&drawn(none)), None);
    }
}
