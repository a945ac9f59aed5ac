//! Axes: a scale maps data to a straight line, and says where its ticks stand and how they read.

use crate::bench::table;

/// How an axis maps data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scale {
    /// As it is.
    Linear,
    /// Decades, with ticks at 1, 2 and 5 where there is room.
    Log10,
    /// Powers of two.
    Log2,
}

/// What a tick's label shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shown {
    /// A plain number.
    Number,
    /// Bytes: `4KiB`.
    Bytes,
    /// Tokens: `64K`.
    Tokens,
    /// A share: 0.5 reads `50 %`.
    Percent,
}

/// One axis.
#[derive(Debug, Clone)]
pub struct Axis {
    /// What it measures, with the unit.
    pub label: String,
    /// How.
    pub scale: Scale,
    /// How its ticks read.
    pub shown: Shown,
    /// Ticks at exactly these values, instead of chosen ones.
    pub ticks: Option<Vec<f64>>,
    /// The range in data, instead of the data's own.
    pub range: Option<(f64, f64)>,
}

impl Axis {
    /// A linear axis of plain numbers over the data's range.
    pub fn new(label: impl Into<String>) -> Self {
        Self {
            label: label.into(),
            scale: Scale::Linear,
            shown: Shown::Number,
            ticks: None,
            range: None,
        }
    }

    /// Sets the scale.
    pub fn scale(mut self, scale: Scale) -> Self {
        self.scale = scale;
        self
    }

    /// Sets how ticks read.
    pub fn shown(mut self, shown: Shown) -> Self {
        self.shown = shown;
        self
    }

    /// Sets the ticks.
    pub fn ticks(mut self, ticks: Vec<f64>) -> Self {
        self.ticks = Some(ticks);
        self
    }

    /// Sets the range.
    pub fn range(mut self, lo: f64, hi: f64) -> Self {
        self.range = Some((lo, hi));
        self
    }

    /// Where a value stands on the straight line.
    pub fn place(&self, x: f64) -> f64 {
        match self.scale {
            Scale::Linear => x,
            Scale::Log10 => x.max(1e-12).log10(),
            Scale::Log2 => x.max(1e-12).log2(),
        }
    }

    /// The value at a place.
    pub fn value(&self, p: f64) -> f64 {
        match self.scale {
            Scale::Linear => p,
            Scale::Log10 => 10f64.powf(p),
            Scale::Log2 => p.exp2(),
        }
    }

    /// First and last place for data in `lo..=hi`, with a margin.
    pub fn span(&self, lo: f64, hi: f64) -> (f64, f64) {
        if let Some((lo, hi)) = self.range {
            return (self.place(lo), self.place(hi));
        }
        let (a, b) = (self.place(lo), self.place(hi));
        let pad = ((b - a) * 0.06).max(match self.scale {
            Scale::Linear => 1e-9,
            Scale::Log10 => 0.03,
            Scale::Log2 => 0.35,
        });
        match self.scale {
            // A linear axis of magnitudes starts at zero: a bar's length must mean something.
            Scale::Linear if a >= 0.0 => (0.0, (b * 1.06).max(1e-9)),
            _ => (a - pad, b + pad),
        }
    }

    /// Places of the ticks within a span.
    pub fn tick_places(&self, span: (f64, f64)) -> Vec<f64> {
        let inside = |p: &f64| *p >= span.0 - 1e-9 && *p <= span.1 + 1e-9;
        if let Some(ticks) = &self.ticks {
            return ticks
                .iter()
                .map(|x| self.place(*x))
                .filter(inside)
                .collect();
        }
        match self.scale {
            Scale::Linear => {
                let step = nice((span.1 - span.0) / 5.0);
                let from = (span.0 / step).ceil() as i64;
                let to = (span.1 / step + 1e-9).floor() as i64;
                (from..=to).map(|i| i as f64 * step).collect()
            }
            Scale::Log2 => {
                let step = (((span.1 - span.0) / 8.0).ceil() as i64).max(1);
                (span.0.ceil() as i64..=span.1.floor() as i64)
                    .filter(|p| p % step == 0)
                    .map(|p| p as f64)
                    .collect()
            }
            // Less than a decade: round values read better than the two ticks it would hold.
            Scale::Log10 if span.1 - span.0 < 0.9 => {
                let (lo, hi) = (self.value(span.0), self.value(span.1));
                let step = nice((hi - lo) / 6.0);
                let from = (lo / step).ceil() as i64;
                let to = (hi / step + 1e-9).floor() as i64;
                (from..=to).map(|i| (i as f64 * step).log10()).collect()
            }
            Scale::Log10 => {
                let within: &[f64] = match span.1 - span.0 {
                    w if w < 2.2 => &[1.0, 2.0, 5.0],
                    _ => &[1.0],
                };
                (span.0.floor() as i32..=span.1.ceil() as i32)
                    .flat_map(|d| within.iter().map(move |m| (m * 10f64.powi(d)).log10()))
                    .filter(inside)
                    .collect()
            }
        }
    }

    /// How the tick at a place reads.
    pub fn tick_label(&self, p: f64) -> String {
        let x = self.value(p);
        match self.shown {
            Shown::Number => plain(x),
            Shown::Percent => format!("{} %", plain(x * 100.0)),
            Shown::Bytes => table::bytes(x.round() as u64),
            Shown::Tokens => match x.round() as u64 {
                n if n >= 1024 && n % 1024 == 0 => format!("{}K", n / 1024),
                n => n.to_string(),
            },
        }
    }
}

/// The nearest of 1, 2, 2.5, 5 times a power of ten at or above `x`.
fn nice(x: f64) -> f64 {
    if x <= 0.0 || !x.is_finite() {
        return 1.0;
    }
    let unit = 10f64.powf(x.log10().floor());
    [1.0, 2.0, 2.5, 5.0, 10.0]
        .into_iter()
        .map(|m| m * unit)
        .find(|s| *s >= x * (1.0 - 1e-9))
        .unwrap_or(unit * 10.0)
}

/// Up to three decimals, without trailing zeros.
fn plain(x: f64) -> String {
    let text = format!("{x:.3}");
    let text = text.trim_end_matches('0').trim_end_matches('.');
    match text {
        "-0" | "" => "0".to_owned(),
        t => t.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_stand_where_a_reader_expects_them() {
        let read = |axis: &Axis, span| -> Vec<String> {
            axis.tick_places(span)
                .into_iter()
                .map(|p| axis.tick_label(p))
                .collect()
        };
        let linear = Axis::new("x");
        assert_eq!(
            read(&linear, (0.0, 1.0)),
            ["0", "0.2", "0.4", "0.6", "0.8", "1"]
        );
        let log = Axis::new("x").scale(Scale::Log10);
        assert_eq!(read(&log, (2.0, 3.0)), ["100", "200", "500", "1000"]);
        assert_eq!(read(&log, (2.3, 2.7)), ["200", "300", "400", "500"]);
        let sizes = Axis::new("x").scale(Scale::Log2).shown(Shown::Bytes);
        assert_eq!(read(&sizes, (12.0, 14.0)), ["4KiB", "8KiB", "16KiB"]);
        let tokens = Axis::new("x")
            .shown(Shown::Tokens)
            .ticks(vec![1024.0, 65536.0]);
        assert_eq!(read(&tokens, (0.0, 1e5)), ["1K", "64K"]);
    }

    #[test]
    fn every_scale_returns_what_it_placed() {
        for scale in [Scale::Linear, Scale::Log10, Scale::Log2] {
            let axis = Axis::new("x").scale(scale);
            assert!((axis.value(axis.place(37.5)) - 37.5).abs() < 1e-9);
        }
    }
}
