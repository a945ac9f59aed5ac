//! One measurement, as a JSON object a line and as a row of a table.

use std::io::Write;

use serde::Serialize;
use serde_json::{Map, Value};

use super::quiet::Quiet;
use super::stats::Summary;

/// One measurement. Every figure that a ceiling or a control was measured for in the same run
/// names it in `against`, with its value, and gives the `ratio`.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Row {
    /// Which bench: `fence`, `transfer`, `digest`, `store`, `stream`, `p99`.
    pub bench: &'static str,
    /// Which case of it: `tcp/get/1MiB`.
    pub case: String,
    /// The figure.
    pub value: f64,
    /// Its unit: `us`, `GB/s` (1e9 bytes a second).
    pub unit: &'static str,
    /// Median, in microseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub p50_us: Option<f64>,
    /// 99th percentile, in microseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub p99_us: Option<f64>,
    /// Throughput in GB/s (1e9 bytes a second).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gbps: Option<f64>,
    /// What the figure is held against, measured in the same run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub against: Option<String>,
    /// The figure of `against`, in `unit`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub against_value: Option<f64>,
    /// `value` over the figure of `against`: the median of the rounds' ratios, not the ratio of
    /// the medians, where rounds were interleaved.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ratio: Option<f64>,
    /// Samples or rounds behind the figure.
    pub n: u64,
    /// Share of this machine's CPU time that other processes took meanwhile; above 0.05 the row
    /// is worth repeating.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub other_cpu: Option<f64>,
    /// What belongs to this bench alone.
    #[serde(flatten)]
    pub more: Map<String, Value>,
}

impl Row {
    /// A row of a duration: `value` is the median.
    pub fn latency(bench: &'static str, case: impl Into<String>, times: &Summary) -> Self {
        let mut row = Self {
            bench,
            case: case.into(),
            value: round(times.p50 / 1e3),
            unit: "us",
            p50_us: Some(round(times.p50 / 1e3)),
            p99_us: Some(round(times.p99 / 1e3)),
            n: times.n,
            ..Self::default()
        };
        row = row.with("max_us", round(times.max / 1e3));
        row
    }

    /// A row of a throughput in GB/s, over `n` rounds.
    pub fn rate(bench: &'static str, case: impl Into<String>, gbps: f64, n: u64) -> Self {
        Self {
            bench,
            case: case.into(),
            value: round(gbps),
            unit: "GB/s",
            gbps: Some(round(gbps)),
            n,
            ..Self::default()
        }
    }

    /// Names the ceiling or control, its figure in this row's unit, and the ratio to it.
    pub fn against(mut self, what: impl Into<String>, value: f64, ratio: f64) -> Self {
        self.against = Some(what.into());
        self.against_value = Some(round(value));
        self.ratio = Some(round(ratio));
        self
    }

    /// Adds a field of this bench's own.
    pub fn with(mut self, key: &str, value: impl Into<Value>) -> Self {
        self.more.insert(key.to_owned(), value.into());
        self
    }

    /// Adds the share of the CPUs that others used.
    pub fn quiet(mut self, quiet: &Quiet) -> Self {
        self.other_cpu = quiet.other().map(round);
        self
    }
}

/// Four significant digits: no figure here is better than that, and rows stay readable.
pub fn round(x: f64) -> f64 {
    if x == 0.0 || !x.is_finite() {
        return x;
    }
    let scale = 10f64.powi(3 - x.abs().log10().floor() as i32);
    (x * scale).round() / scale
}

/// Where rows go: at once as JSON lines, or collected into a table.
pub struct Rows {
    json: bool,
    rows: Vec<Row>,
}

impl Rows {
    /// Collects rows; with `json` each is also written to standard output as it comes.
    pub fn new(json: bool) -> Self {
        Self {
            json,
            rows: Vec::new(),
        }
    }

    /// Takes one row.
    pub fn push(&mut self, row: Row) -> anyhow::Result<()> {
        if self.json {
            let mut out = std::io::stdout().lock();
            serde_json::to_writer(&mut out, &row)?;
            writeln!(out)?;
            out.flush()?;
        }
        self.rows.push(row);
        Ok(())
    }

    /// All rows so far.
    pub fn all(&self) -> &[Row] {
        &self.rows
    }

    /// Prints the table, unless rows were written as JSON.
    pub fn table(&self) -> anyhow::Result<()> {
        if !self.json {
            let mut out = std::io::stdout().lock();
            out.write_all(super::table::render(&self.rows).as_bytes())?;
            out.flush()?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_is_one_json_object_without_the_fields_that_do_not_apply() {
        let times = Summary::of(vec![1_000, 2_000, 3_000]);
        let row = Row::latency("fence", "tcp/1024", &times)
            .against("null handoff", 1.5, 4.0 / 3.0)
            .with("context", 1024);
        let v = serde_json::to_value(&row).unwrap();
        assert_eq!(v["bench"], "fence");
        assert_eq!(v["p50_us"], 2.0);
        assert_eq!(v["ratio"], 1.333);
        assert_eq!(v["context"], 1024);
        assert!(v.get("gbps").is_none());
        assert!(!serde_json::to_string(&row).unwrap().contains('\n'));
    }

    #[test]
    fn rounding_keeps_four_significant_digits() {
        for (x, y) in [
            (0.0, 0.0),
            (1234.56, 1235.0),
            (0.0123456, 0.01235),
            (-2.00049, -2.0),
        ] {
            assert_eq!(round(x), y);
        }
    }
}
