//! The charts of this program, from rows and samples.

use super::{Axis, Figure, Ink, Panel, Scale, Series, Shown, Stroke};
use crate::bench::row::Row;
use crate::bench::stats::percentile;

/// Samples of the fence at one context length, ascending, in nanoseconds.
pub struct FenceSamples {
    /// Context in tokens.
    pub context: u32,
    /// The pause.
    pub pause: Vec<u64>,
    /// Null handoffs between them.
    pub null: Vec<u64>,
}

/// Distribution of the fence pause beside the null handoff's, and both against context.
pub fn fence(title: String, note: String, cases: &[FenceSamples]) -> Figure {
    let mut null: Vec<u64> = cases.iter().flat_map(|c| c.null.iter().copied()).collect();
    null.sort_unstable();
    let mut spread = vec![series(
        "null handoff",
        Ink::Grey,
        Stroke::Dashed,
        cdf(&null),
    )];
    for (i, case) in cases.iter().enumerate() {
        let name = format!("fence pause, {} tokens", tokens(case.context));
        spread.push(series(&name, Ink::Hue(i), Stroke::Solid, cdf(&case.pause)));
    }
    let against = |name: &str, ink, stroke, pick: fn(&FenceSamples) -> &Vec<u64>, q: f64| {
        let points = cases
            .iter()
            .map(|c| (f64::from(c.context), percentile(pick(c), q) / 1e3))
            .collect();
        series(name, ink, stroke, points)
    };
    let pause: fn(&FenceSamples) -> &Vec<u64> = |c| &c.pause;
    let null: fn(&FenceSamples) -> &Vec<u64> = |c| &c.null;
    let contexts = cases.iter().map(|c| f64::from(c.context)).collect();
    Figure {
        title,
        note,
        panels: vec![
            Panel {
                title: "How the pause is spread".into(),
                x: Axis::new("pause (us), last source step done to destination may launch")
                    .scale(Scale::Log10),
                y: Axis::new("share of migrations at or below").shown(Shown::Percent),
                series: spread,
            },
            Panel {
                title: "Against context length".into(),
                x: Axis::new("context (tokens)")
                    .scale(Scale::Log2)
                    .shown(Shown::Tokens)
                    .ticks(contexts),
                y: Axis::new("pause (us)"),
                series: vec![
                    against("null p99", Ink::Grey, Stroke::DashedDots, null, 0.99),
                    against("null p50", Ink::Grey, Stroke::Dotted, null, 0.5),
                    against("fence p99", Ink::Hue(0), Stroke::DashedDots, pause, 0.99),
                    against("fence p50", Ink::Hue(0), Stroke::Dotted, pause, 0.5),
                ],
            },
        ],
    }
}

/// GB/s by block size, a panel for each path, ceilings dashed. Rows carry `path`, `op`, `bytes`.
pub fn transfer(title: String, note: String, rows: &[Row]) -> Figure {
    let text = |r: &Row, key: &str| r.more.get(key).and_then(|v| v.as_str()).map(str::to_owned);
    let size = |r: &Row| r.more.get("bytes").and_then(serde_json::Value::as_f64);
    let mut panels = Vec::new();
    for path in distinct(rows.iter().filter_map(|r| text(r, "path"))) {
        let here: Vec<&Row> = rows
            .iter()
            .filter(|r| text(r, "path").as_ref() == Some(&path))
            .collect();
        let mut lines = Vec::new();
        for ceiling in distinct(here.iter().filter_map(|r| r.against.clone())) {
            let of = here.iter().filter(|r| r.against.as_ref() == Some(&ceiling));
            let points = of.filter_map(|r| Some((size(r)?, r.against_value?)));
            lines.push(series(
                &ceiling,
                Ink::Grey,
                Stroke::DashedDots,
                merge(points),
            ));
        }
        for (i, op) in distinct(here.iter().filter_map(|r| text(r, "op"))).enumerate() {
            let of = here.iter().filter(|r| text(r, "op").as_ref() == Some(&op));
            let points = of.filter_map(|r| Some((size(r)?, r.gbps?)));
            lines.push(series(&op, Ink::Hue(i), Stroke::Dotted, merge(points)));
        }
        panels.push(Panel {
            title: path,
            x: Axis::new("block size")
                .scale(Scale::Log2)
                .shown(Shown::Bytes)
                .ticks(sorted(here.iter().filter_map(|r| size(r)))),
            y: Axis::new("throughput (GB/s, 1e9 bytes a second)"),
            series: lines,
        });
    }
    Figure {
        title,
        note,
        panels,
    }
}

/// Share of the contiguous BLAKE3 rate by page size, a panel for each thread count. Rows carry
/// `tokens`, `threads`, `layout`.
pub fn digest(title: String, note: String, rows: &[Row]) -> Figure {
    let number = |r: &Row, key: &str| r.more.get(key).and_then(serde_json::Value::as_f64);
    let mut panels = Vec::new();
    for threads in sorted(rows.iter().filter_map(|r| number(r, "threads"))) {
        let here: Vec<&Row> = rows
            .iter()
            .filter(|r| number(r, "threads") == Some(threads))
            .collect();
        let pages = sorted(here.iter().filter_map(|r| number(r, "tokens")));
        let (lo, hi) = (
            pages.first().copied().unwrap_or(1.0),
            pages.last().copied().unwrap_or(1.0),
        );
        let across = |y: f64| vec![(lo, y), (hi, y)];
        let mut lines = vec![
            series(
                "blake3 on contiguous memory",
                Ink::Grey,
                Stroke::Solid,
                across(1.0),
            ),
            series(
                "goal, 16 tokens and more",
                Ink::Grey,
                Stroke::Dashed,
                across(0.9),
            ),
        ];
        let kind = |r: &Row| {
            let text = |k: &str| r.more.get(k).and_then(|v| v.as_str());
            Some(format!("{}, {}", text("scheme")?, text("layout")?))
        };
        for (i, name) in distinct(here.iter().filter_map(|r| kind(r))).enumerate() {
            let of = here.iter().filter(|r| kind(r).as_ref() == Some(&name));
            let points = of.filter_map(|r| Some((number(r, "tokens")?, r.ratio?)));
            lines.push(series(&name, Ink::Hue(i), Stroke::Dotted, merge(points)));
        }
        panels.push(Panel {
            title: match threads {
                1.0 => "1 thread".into(),
                n => format!("{n} threads"),
            },
            x: Axis::new("page (tokens)").scale(Scale::Log2).ticks(pages),
            y: Axis::new("rate over blake3 on contiguous memory"),
            series: lines,
        });
    }
    Figure {
        title,
        note,
        panels,
    }
}

/// Rounds of one path: ours, ceiling, GB/s.
pub struct Rounds {
    /// The path.
    pub name: String,
    /// In the order of their measurement.
    pub pairs: Vec<(f64, f64)>,
}

/// GB/s round by round beside the ceiling of each, a panel for each path.
pub fn stream(title: String, note: String, paths: &[Rounds]) -> Figure {
    let panel = |path: &Rounds| {
        let line = |scale: f64, pick: fn(&(f64, f64)) -> f64| {
            let rounds = path.pairs.iter().enumerate();
            rounds
                .map(|(i, p)| (i as f64 + 1.0, pick(p) * scale))
                .collect::<Vec<_>>()
        };
        let n = path.pairs.len();
        Panel {
            title: path.name.clone(),
            x: Axis::new("round")
                .ticks((1..=n).step_by((n / 8).max(1)).map(|i| i as f64).collect()),
            y: Axis::new("throughput (GB/s, 1e9 bytes a second)"),
            series: vec![
                series("ceiling", Ink::Grey, Stroke::DashedDots, line(1.0, |p| p.1)),
                series(
                    "goal, 0.85 of it",
                    Ink::Grey,
                    Stroke::Dashed,
                    line(0.85, |p| p.1),
                ),
                series("STREAM", Ink::Hue(0), Stroke::Dotted, line(1.0, |p| p.0)),
            ],
        }
    };
    Figure {
        title,
        note,
        panels: paths.iter().map(panel).collect(),
    }
}

/// Distribution of the neighbours' inter-token latency, one curve a window; samples ascending.
pub fn neighbours(title: String, note: String, windows: &[(&str, Ink, Vec<u64>)]) -> Figure {
    latencies(title, note, "inter-token latency (us)", windows)
}

/// Distributions of some latency and of its slowest tenth; samples ascending, nanoseconds.
pub fn latencies(
    title: String,
    note: String,
    what: &str,
    windows: &[(&str, Ink, Vec<u64>)],
) -> Figure {
    let line = |(name, ink, samples): &(&str, Ink, Vec<u64>)| {
        let stroke = match ink {
            Ink::Grey => Stroke::Dashed,
            Ink::Hue(_) => Stroke::Solid,
        };
        series(name, *ink, stroke, cdf(samples))
    };
    let tail = |s: Series| Series {
        points: s.points.into_iter().filter(|p| p.1 >= 0.9).collect(),
        ..s
    };
    let panel = |title: &str, lines: Vec<Series>| Panel {
        title: title.into(),
        x: Axis::new(what).scale(Scale::Log10),
        y: Axis::new("share at or below").shown(Shown::Percent),
        series: lines,
    };
    let mut far = panel(
        "The slowest tenth",
        windows.iter().map(|w| tail(line(w))).collect(),
    );
    far.y = far
        .y
        .range(0.9, 1.0)
        .ticks(vec![0.9, 0.92, 0.94, 0.96, 0.98, 0.99, 1.0]);
    Figure {
        title,
        note,
        panels: vec![
            panel("All of them", windows.iter().map(line).collect()),
            far,
        ],
    }
}

fn series(name: &str, ink: Ink, stroke: Stroke, points: Vec<(f64, f64)>) -> Series {
    Series {
        name: name.to_owned(),
        ink,
        stroke,
        points,
    }
}

/// (microseconds, share at or below) of ascending nanoseconds, at most some 400 points.
fn cdf(sorted: &[u64]) -> Vec<(f64, f64)> {
    let n = sorted.len();
    let step = (n / 400).max(1);
    let last = n.saturating_sub(1);
    (0..n)
        .filter(|i| i % step == 0 || *i == last)
        .map(|i| (sorted[i] as f64 / 1e3, (i + 1) as f64 / n as f64))
        .collect()
}

/// Ascending in x; points at one x become their mean.
fn merge(points: impl Iterator<Item = (f64, f64)>) -> Vec<(f64, f64)> {
    let mut points: Vec<(f64, f64)> = points.collect();
    points.sort_by(|a, b| a.0.total_cmp(&b.0));
    points
        .chunk_by(|a, b| a.0 == b.0)
        .map(|c| (c[0].0, c.iter().map(|p| p.1).sum::<f64>() / c.len() as f64))
        .collect()
}

fn sorted(xs: impl Iterator<Item = f64>) -> Vec<f64> {
    let mut xs: Vec<f64> = xs.collect();
    xs.sort_by(f64::total_cmp);
    xs.dedup();
    xs
}

fn distinct(xs: impl Iterator<Item = String>) -> impl Iterator<Item = String> {
    let mut seen = Vec::new();
    for x in xs {
        if !seen.contains(&x) {
            seen.push(x);
        }
    }
    seen.into_iter()
}

fn tokens(n: u32) -> String {
    match n {
        n if n >= 1024 && n % 1024 == 0 => format!("{}K", n / 1024),
        n => n.to_string(),
    }
}

/// A line for a figure's note: machine, goal, conditions.
pub fn note(parts: &[&str]) -> String {
    let mut all: Vec<String> = parts.iter().map(|p| (*p).to_owned()).collect();
    all.push(crate::bench::quiet::machine());
    all.join("   ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::plot::draw;
    use crate::bench::table;

    #[test]
    fn every_chart_draws_from_the_rows_that_its_bench_makes() {
        let dir = std::env::temp_dir().join(format!("ml-charts-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let cases: Vec<FenceSamples> = [1024u32, 65536]
            .into_iter()
            .map(|context| FenceSamples {
                context,
                pause: (0..500u64).map(|i| 300_000 + i * i).collect(),
                null: (0..500u64).map(|i| 250_000 + i * i).collect(),
            })
            .collect();
        let mut rows = Vec::new();
        for bytes in [4096u64, 65536, 1 << 20] {
            let row = Row::rate(
                "transfer",
                format!("tcp/get/{}", table::bytes(bytes)),
                2.0,
                3,
            );
            let row = row
                .with("path", "tcp")
                .with("op", "get")
                .with("bytes", bytes);
            rows.push(row.against("raw acked send loop", 2.5, 0.8));
        }
        let mut hashes = Vec::new();
        for (threads, tokens) in [(1, 1), (1, 16), (2, 16), (2, 64)] {
            let row = Row::rate("digest", "blake3-leaves", 3.0, 3).against("blake3", 3.0, 1.0);
            let row = row.with("threads", threads).with("tokens", tokens);
            hashes.push(row.with("layout", "nhd").with("scheme", "blake3-leaves"));
        }
        let gaps = |k: u64| (0..900u64).map(|i| 900_000 + k * i).collect::<Vec<u64>>();
        let n = note(&["synthetic"]);
        let rounds = [Rounds {
            name: "tcp".into(),
            pairs: vec![(2.8, 3.0), (2.7, 3.1), (2.9, 3.0)],
        }];
        let figures = [
            ("fence", fence("Fence pause".into(), n.clone(), &cases)),
            ("transfer", transfer("Transfer".into(), n.clone(), &rows)),
            ("digest", digest("Digest".into(), n.clone(), &hashes)),
            ("stream", stream("STREAM".into(), n.clone(), &rounds)),
            (
                "p99",
                neighbours(
                    "Neighbours".into(),
                    n,
                    &[
                        ("alone", Ink::Grey, gaps(100)),
                        ("migrating", Ink::Hue(0), gaps(120)),
                    ],
                ),
            ),
        ];
        for (name, figure) in &figures {
            let file = dir.join(format!("{name}.svg"));
            draw(figure, &file).unwrap();
            assert!(std::fs::metadata(&file).unwrap().len() > 1000);
        }
        if std::env::var_os("MOONLIVE_KEEP_CHARTS").is_none() {
            std::fs::remove_dir_all(&dir).unwrap();
        }
    }
}
