//! Time lines as inline SVG: lanes of bars, and below them the tokens at the client.

use std::fmt::Write;

use super::data::{Lane, Migration, Phase, Request};
use super::html::{escape, micros};

const WIDTH: f64 = 1080.0;
const LEFT: f64 = 112.0;
const RIGHT: f64 = 14.0;
const LANE: f64 = 40.0;
const BAR: f64 = 24.0;

const LANES: [(Lane, &str); 4] = [
    (Lane::Coordinator, "coordinator"),
    (Lane::Gateway, "gateway"),
    (Lane::Source, "source"),
    (Lane::Destination, "destination"),
];

fn class(lane: Lane) -> &'static str {
    match lane {
        Lane::Coordinator => "coordinator",
        Lane::Source => "source",
        Lane::Destination => "destination",
        Lane::Gateway => "gateway",
    }
}

/// The whole migration, with the client's tokens below it on the same scale.
pub fn whole(request: &Request, migration: &Migration) -> String {
    let Some((from, to)) = span(&migration.phases) else {
        return String::new();
    };
    let pad = (to - from).max(1.0) * 0.12;
    let (from, to) = (from - pad, to + pad);
    let mut out = Drawing::new(from, to, 5);
    if let Some((a, b)) = span(&migration.fence) {
        let (x, w) = (out.x(a), (out.x(b) - out.x(a)).max(3.0));
        let h = out.height - 24.0;
        let _ = write!(
            out.body,
            r#"<rect class="fenceband" x="{x:.1}" y="0" width="{w:.1}" height="{h:.1}"/>"#
        );
    }
    for phase in &migration.phases {
        // Up to where the next bar of its lane begins there is room for its name.
        let later = migration.phases.iter().filter(|p| p.lane == phase.lane);
        let next = later
            .map(|p| p.from_us)
            .filter(|from| *from >= phase.to_us)
            .reduce(f64::min);
        out.bar(phase, next);
    }
    let y = 4.5 * LANE;
    out.label(y, "client");
    for token in &request.tokens {
        if (from..=to).contains(&token.at_us) {
            let class = match migration.committed && token.seq > migration.seal {
                true => "destination",
                false => "source",
            };
            let (x, title) = (out.x(token.at_us), escape(&token.text));
            let _ = write!(
                out.body,
                r#"<rect class="{class}" x="{:.2}" y="{:.1}" width="2" height="{BAR}"><title>token {} at {}: {title}</title></rect>"#,
                x - 1.0,
                y - BAR / 2.0,
                token.seq,
                micros(token.at_us - from - pad),
            );
        }
    }
    out.finish(from + pad)
}

/// The fence alone, enlarged: one row a step, so that short ones keep their names.
pub fn fence(migration: &Migration) -> String {
    let Some((from, to)) = span(&migration.fence) else {
        return String::new();
    };
    let rows = migration.fence.len();
    let mut out = Drawing::rows(from, to + (to - from) * 0.02, rows);
    for (i, phase) in migration.fence.iter().enumerate() {
        let y = (i as f64 + 0.5) * LANE * 0.72;
        let (x, w) = (
            out.x(phase.from_us),
            out.x(phase.to_us) - out.x(phase.from_us),
        );
        let _ = write!(
            out.body,
            r#"<rect class="{}" x="{x:.1}" y="{:.1}" width="{:.1}" height="16" rx="3"/>"#,
            class(phase.lane),
            y - 8.0,
            w.max(2.0),
        );
        let text = format!("{} {}", phase.name, micros(phase.to_us - phase.from_us));
        // To the right of the bar where there is room for it, else inside it or to its left.
        let need = text.chars().count() as f64 * 7.2 + 14.0;
        let end = x + w.max(2.0);
        let (at, anchor, ink) = match end + need < WIDTH - RIGHT {
            true => (end + 7.0, "start", ""),
            false if need < w => (x + w / 2.0, "middle", "on"),
            false => (x - 7.0, "end", ""),
        };
        let _ = write!(
            out.body,
            r#"<text class="{ink}" x="{at:.1}" y="{:.1}" text-anchor="{anchor}">{}</text>"#,
            y + 4.5,
            escape(&text)
        );
        out.label(y, class(phase.lane));
    }
    out.finish(from)
}

fn span(phases: &[Phase]) -> Option<(f64, f64)> {
    let from = phases.iter().map(|p| p.from_us).reduce(f64::min)?;
    let to = phases.iter().map(|p| p.to_us).reduce(f64::max)?;
    (to > from).then_some((from, to))
}

struct Drawing {
    from: f64,
    to: f64,
    height: f64,
    body: String,
    /// Where the last name in each lane ended, so that names do not run into each other.
    ends: [f64; LANES.len()],
}

impl Drawing {
    fn new(from: f64, to: f64, lanes: usize) -> Self {
        let mut out = Self::sized(from, to, lanes as f64 * LANE);
        for (i, (_, name)) in LANES.iter().enumerate() {
            out.label((i as f64 + 0.5) * LANE, name);
        }
        for i in 1..lanes {
            let y = i as f64 * LANE;
            let _ = write!(
                out.body,
                r#"<line class="rule" x1="0" x2="{WIDTH}" y1="{y}" y2="{y}"/>"#
            );
        }
        out
    }

    fn rows(from: f64, to: f64, rows: usize) -> Self {
        Self::sized(from, to, rows as f64 * LANE * 0.72)
    }

    fn sized(from: f64, to: f64, body: f64) -> Self {
        Self {
            from,
            to,
            height: body + 26.0,
            body: String::new(),
            ends: [0.0; LANES.len()],
        }
    }

    fn x(&self, us: f64) -> f64 {
        LEFT + (us - self.from) / (self.to - self.from) * (WIDTH - LEFT - RIGHT)
    }

    fn label(&mut self, y: f64, name: &str) {
        let _ = write!(
            self.body,
            r#"<text class="soft" x="4" y="{:.1}">{}</text>"#,
            y + 4.0,
            escape(name)
        );
    }

    fn bar(&mut self, phase: &Phase, next: Option<f64>) {
        let Some(lane) = LANES.iter().position(|l| l.0 == phase.lane) else {
            return;
        };
        let y = (lane as f64 + 0.5) * LANE;
        let (x, w) = (
            self.x(phase.from_us),
            self.x(phase.to_us) - self.x(phase.from_us),
        );
        let name = escape(&phase.name);
        let _ = write!(
            self.body,
            r#"<rect class="{}" x="{x:.1}" y="{:.1}" width="{:.1}" height="{BAR}" rx="4"><title>{name}: {}</title></rect>"#,
            class(phase.lane),
            y - BAR / 2.0,
            w.max(2.0),
            micros(phase.to_us - phase.from_us),
        );
        let need = phase.name.chars().count() as f64 * 7.4;
        let end = x + w.max(2.0);
        let room = next.map_or(WIDTH - RIGHT, |us| self.x(us));
        if need + 10.0 < w {
            let _ = write!(
                self.body,
                r#"<text class="on" x="{:.1}" y="{:.1}" text-anchor="middle">{name}</text>"#,
                x + w / 2.0,
                y + 4.5
            );
            self.ends[lane] = end;
        } else if end + 5.0 > self.ends[lane] && end + need < room {
            let _ = write!(
                self.body,
                r#"<text class="soft" x="{:.1}" y="{:.1}">{name}</text>"#,
                end + 4.0,
                y + 4.5
            );
            self.ends[lane] = end + need;
        }
    }

    /// Adds the axis; its zero is at `zero`.
    fn finish(mut self, zero: f64) -> String {
        let step = step((self.to - self.from) / 7.0);
        let top = self.height - 22.0;
        let mut grid = String::new();
        let mut i = ((self.from - zero) / step).ceil() as i64;
        while zero + i as f64 * step <= self.to {
            let x = self.x(zero + i as f64 * step);
            let _ = write!(
                grid,
                r#"<line class="rule" x1="{x:.1}" x2="{x:.1}" y1="0" y2="{top:.1}"/>"#
            );
            let us = i as f64 * step;
            let text = match step >= 1000.0 {
                true => format!("{} ms", trim(us / 1e3)),
                false => format!("{} us", trim(us)),
            };
            let _ = write!(
                self.body,
                r#"<text class="soft" x="{x:.1}" y="{:.1}" text-anchor="middle">{text}</text>"#,
                self.height - 6.0
            );
            i += 1;
        }
        format!(
            r#"<svg viewBox="0 0 {WIDTH} {:.0}" role="img">{grid}{}</svg>"#,
            self.height, self.body
        )
    }
}

/// The nearest of 1, 2, 5 times a power of ten at or above `x`.
fn step(x: f64) -> f64 {
    let unit = 10f64.powf(x.max(1e-3).log10().floor());
    [1.0, 2.0, 5.0, 10.0]
        .into_iter()
        .map(|m| m * unit)
        .find(|s| *s >= x)
        .unwrap_or(unit * 10.0)
}

fn trim(x: f64) -> String {
    let text = format!("{x:.1}");
    text.strip_suffix(".0").map(str::to_owned).unwrap_or(text)
}
