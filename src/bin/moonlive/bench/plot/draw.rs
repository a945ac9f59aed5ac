//! Draws a [`Figure`] into an SVG file.

use std::path::Path;

use anyhow::Context;
use plotters::coord::Shift;
use plotters::coord::ranged1d::{DefaultFormatting, KeyPointHint, Ranged};
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::{Figure, Ink, Panel, Series, Stroke};

const PANEL: (u32, u32) = (700, 420);
const HEAD: u32 = 68;
const ROW: u32 = 22;
const FONT: &str = "Helvetica, Arial, DejaVu Sans, sans-serif";
const BLACK_INK: RGBColor = RGBColor(28, 31, 36);
const GREY_INK: RGBColor = RGBColor(120, 126, 134);
const RULE: RGBColor = RGBColor(226, 229, 233);
/// Okabe and Ito's palette, without its yellow: too pale on white.
const HUES: [RGBColor; 7] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(230, 159, 0),
    RGBColor(86, 180, 233),
    RGBColor(110, 80, 160),
];

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// Writes the figure; fails where the file cannot be written.
pub fn draw(figure: &Figure, file: &Path) -> anyhow::Result<()> {
    let legend = figure.panels.iter().map(legend_rows).max().unwrap_or(0) as u32;
    let size = (
        PANEL.0 * figure.panels.len() as u32,
        HEAD + PANEL.1 + legend * ROW + 22,
    );
    let mut text = String::new();
    {
        let root = SVGBackend::with_string(&mut text, size).into_drawing_area();
        paint(figure, &root).map_err(|e| anyhow::anyhow!("cannot draw: {e}"))?;
    }
    std::fs::write(file, text).with_context(|| format!("cannot write {}", file.display()))
}

/// A straight axis from one place to another, with ticks where a [`Scale`](super::Scale) put them.
struct Line((f64, f64), Vec<f64>);

impl Ranged for Line {
    type FormatOption = DefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, limit: (i32, i32)) -> i32 {
        let ((from, to), (a, b)) = (self.0, limit);
        let share = (value - from) / (to - from).max(f64::MIN_POSITIVE);
        a + (share * f64::from(b - a)).round() as i32
    }

    fn key_points<Hint: KeyPointHint>(&self, _hint: Hint) -> Vec<f64> {
        self.1.clone()
    }

    fn range(&self) -> std::ops::Range<f64> {
        self.0.0..self.0.1
    }
}

type Drawn = Result<(), Box<dyn std::error::Error>>;

fn paint(figure: &Figure, root: &Area<'_>) -> Drawn {
    root.fill(&WHITE)?;
    let at = |size: i32, ink: &RGBColor| {
        (FONT, size)
            .into_font()
            .color(ink)
            .pos(Pos::new(HPos::Left, VPos::Top))
    };
    let (head, body) = root.split_vertically(HEAD);
    head.draw(&Text::new(
        figure.title.as_str(),
        (24, 16),
        at(26, &BLACK_INK),
    ))?;
    head.draw(&Text::new(
        figure.note.as_str(),
        (24, 43),
        at(13, &GREY_INK),
    ))?;
    let areas = body.split_evenly((1, figure.panels.len()));
    for (panel, area) in figure.panels.iter().zip(&areas) {
        let (plot, legend) = area.split_vertically(PANEL.1);
        paint_panel(panel, &plot)?;
        paint_legend(panel, &legend)?;
    }
    root.present()?;
    Ok(())
}

fn paint_panel(panel: &Panel, area: &Area<'_>) -> Drawn {
    let bounds = |pick: fn(&(f64, f64)) -> f64| {
        let all = panel.series.iter().flat_map(|s| s.points.iter().map(pick));
        all.filter(|v| v.is_finite())
            .fold((f64::INFINITY, f64::NEG_INFINITY), |(lo, hi), v| {
                (lo.min(v), hi.max(v))
            })
    };
    let (xs, ys) = (bounds(|p| p.0), bounds(|p| p.1));
    if !(xs.0.is_finite() && ys.0.is_finite()) {
        return Err("there is nothing to draw".into());
    }
    let (x, y) = (panel.x.span(xs.0, xs.1), panel.y.span(ys.0, ys.1));
    let style = |size: i32, ink: &RGBColor| (FONT, size).into_font().color(ink);
    let mut chart = ChartBuilder::on(area)
        .margin_left(10)
        .margin_right(28)
        .margin_top(4)
        .caption(&panel.title, style(18, &BLACK_INK))
        .x_label_area_size(50)
        .y_label_area_size(68)
        .build_cartesian_2d(
            Line(x, panel.x.tick_places(x)),
            Line(y, panel.y.tick_places(y)),
        )?;
    chart
        .configure_mesh()
        .bold_line_style(RULE)
        .light_line_style(TRANSPARENT)
        .axis_style(GREY_INK)
        .label_style(style(15, &BLACK_INK))
        .axis_desc_style(style(16, &BLACK_INK))
        .x_desc(&panel.x.label)
        .y_desc(&panel.y.label)
        .x_label_formatter(&|p| panel.x.tick_label(*p))
        .y_label_formatter(&|p| panel.y.tick_label(*p))
        .draw()?;
    for series in &panel.series {
        let ink = colour(series.ink);
        let points: Vec<(f64, f64)> = series
            .points
            .iter()
            .map(|p| (panel.x.place(p.0), panel.y.place(p.1)))
            .map(|p| (p.0.clamp(x.0, x.1), p.1.clamp(y.0, y.1)))
            .collect();
        match series.stroke {
            Stroke::Solid | Stroke::Dotted => {
                chart.draw_series(LineSeries::new(points.clone(), ink.stroke_width(2)))?;
            }
            Stroke::Dashed | Stroke::DashedDots => {
                chart.draw_series(DashedLineSeries::new(
                    points.clone(),
                    6,
                    5,
                    ink.stroke_width(2),
                ))?;
            }
        }
        match series.stroke {
            Stroke::Dotted => {
                chart.draw_series(points.iter().map(|p| Circle::new(*p, 4, ink.filled())))?;
            }
            Stroke::DashedDots => {
                chart.draw_series(points.iter().map(|p| Circle::new(*p, 4, WHITE.filled())))?;
                chart.draw_series(
                    points
                        .iter()
                        .map(|p| Circle::new(*p, 4, ink.stroke_width(2))),
                )?;
            }
            Stroke::Solid | Stroke::Dashed => {}
        }
    }
    Ok(())
}

const LEGEND_LEFT: i32 = 74;
const SWATCH: i32 = 30;

/// Names laid out left to right in rows of the panel's width: (series, row, x).
fn legend_places(panel: &Panel) -> Vec<(&Series, i32, i32)> {
    let width = PANEL.0 as i32 - 28;
    let (mut row, mut x) = (0, LEGEND_LEFT);
    let mut out = Vec::new();
    for series in panel.series.iter().filter(|s| !s.name.is_empty()) {
        // Sans-serif at this size runs to about 7 px a character.
        let need = SWATCH + 10 + series.name.chars().count() as i32 * 7 + 18;
        if x > LEGEND_LEFT && x + need > width {
            (row, x) = (row + 1, LEGEND_LEFT);
        }
        out.push((series, row, x));
        x += need;
    }
    out
}

fn legend_rows(panel: &Panel) -> usize {
    legend_places(panel)
        .last()
        .map_or(0, |(_, row, _)| *row as usize + 1)
}

fn paint_legend(panel: &Panel, area: &Area<'_>) -> Drawn {
    let text = (FONT, 16)
        .into_font()
        .color(&BLACK_INK)
        .pos(Pos::new(HPos::Left, VPos::Center));
    for (series, row, x) in legend_places(panel) {
        let (ink, y) = (colour(series.ink), row * ROW as i32 + 18);
        match series.stroke {
            Stroke::Solid | Stroke::Dotted => {
                area.draw(&PathElement::new(
                    [(x, y), (x + SWATCH, y)],
                    ink.stroke_width(2),
                ))?;
            }
            Stroke::Dashed | Stroke::DashedDots => {
                for i in 0..3 {
                    let from = x + i * 11;
                    area.draw(&PathElement::new(
                        [(from, y), (from + 7, y)],
                        ink.stroke_width(2),
                    ))?;
                }
            }
        }
        match series.stroke {
            Stroke::Dotted => area.draw(&Circle::new((x + SWATCH / 2, y), 4, ink.filled()))?,
            Stroke::DashedDots => {
                area.draw(&Circle::new((x + SWATCH / 2, y), 4, WHITE.filled()))?;
                area.draw(&Circle::new((x + SWATCH / 2, y), 4, ink.stroke_width(2)))?;
            }
            Stroke::Solid | Stroke::Dashed => {}
        }
        area.draw(&Text::new(
            series.name.as_str(),
            (x + SWATCH + 8, y),
            text.clone(),
        ))?;
    }
    Ok(())
}

fn colour(ink: Ink) -> RGBColor {
    match ink {
        Ink::Hue(n) => HUES[n % HUES.len()],
        Ink::Grey => GREY_INK,
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Axis, Figure, Ink, Panel, Series, Stroke};
    use super::*;

    fn panel(names: &[&str]) -> Panel {
        Panel {
            title: "a panel".into(),
            x: Axis::new("time (us)"),
            y: Axis::new("share"),
            series: names
                .iter()
                .map(|n| Series {
                    name: (*n).to_owned(),
                    ink: Ink::Hue(0),
                    stroke: Stroke::DashedDots,
                    points: vec![(1.0, 0.0), (2.0, 1.0)],
                })
                .collect(),
        }
    }

    #[test]
    fn a_figure_becomes_an_svg_that_carries_its_texts() {
        let dir = std::env::temp_dir().join(format!("ml-plot-{}.svg", std::process::id()));
        let figure = Figure {
            title: "Pause & gap".into(),
            note: "2 cores".into(),
            panels: vec![panel(&["ours", "null"]), panel(&[""])],
        };
        draw(&figure, &dir).unwrap();
        let text = std::fs::read_to_string(&dir).unwrap();
        std::fs::remove_file(&dir).unwrap();
        for word in [
            "Pause &amp; gap",
            "2 cores",
            "time (us)",
            "ours",
            "null",
            "<svg",
        ] {
            assert!(text.contains(word), "no {word:?}");
        }
    }

    #[test]
    fn legend_names_never_share_a_place() {
        let names: Vec<String> = (0..12).map(|i| format!("a rather long name {i}")).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let panel = panel(&names);
        let places = legend_places(&panel);
        for pair in places.windows(2) {
            let (a, b) = (&pair[0], &pair[1]);
            let end = a.2 + SWATCH + 8 + a.0.name.len() as i32 * 7;
            assert!(b.1 > a.1 || b.2 >= end);
            assert!(b.2 + SWATCH < PANEL.0 as i32);
        }
    }

    #[test]
    fn an_empty_figure_is_an_error_not_an_empty_file() {
        let figure = Figure {
            title: String::new(),
            note: String::new(),
            panels: vec![panel(&[])],
        };
        assert!(draw(&figure, Path::new("/nonexistent/x.svg")).is_err());
    }
}
