//! The summary object: the last line of `moonlive demo --json`.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::ask::Plan;
use super::compare::Verdict;
use super::fault::Injected;
use super::run::Outcome;
use crate::cli::DemoArgs;

/// What came out.
#[derive(Debug)]
pub struct Summary {
    pass: bool,
    leaks: Vec<String>,
    lines: Vec<String>,
    json: Value,
}

/// 50th and 99th percentile and the largest, of a list that may be empty.
fn percentiles(mut values: Vec<u64>) -> Value {
    values.sort_unstable();
    let at = |q: f64| {
        let last = values.len().checked_sub(1)?;
        values.get((last as f64 * q).round() as usize).copied()
    };
    json!({ "p50": at(0.5), "p99": at(0.99), "max": values.last() })
}

impl Summary {
    /// Puts it together.
    pub fn new(
        args: &DemoArgs,
        plan: &Plan,
        baseline: &Outcome,
        live: &Outcome,
        verdict: &Verdict,
        fault: Option<&Injected>,
    ) -> Self {
        let leaks: Vec<String> = baseline.leaks.iter().chain(&live.leaks).cloned().collect();
        let migrated = !live.reports.is_empty() && live.reports.iter().all(|r| r.migrated);
        let fired = live.fired.first();
        let pass = verdict.identical
            && verdict.kv_equal
            && verdict.control_equal
            && leaks.is_empty()
            && (fault.is_some() || migrated)
            && (fault.is_none() || fired.is_some());
        let cause = live
            .reports
            .iter()
            .map(|r| r.cause.as_str())
            .find(|c| *c != "none")
            .unwrap_or("none")
            .to_owned();
        let us = |ns: u64| ns / 1000;
        let pauses: Vec<u64> = live
            .reports
            .iter()
            .filter(|r| r.migrated && r.fence_pause_ns > 0)
            .map(|r| us(r.fence_pause_ns))
            .collect();
        let mut phases: BTreeMap<&str, Vec<u64>> = BTreeMap::new();
        for p in live.reports.iter().flat_map(|r| &r.phases) {
            phases.entry(&p.phase).or_default().push(us(p.took_ns));
        }
        let medians: BTreeMap<&str, Value> = phases
            .into_iter()
            .map(|(name, all)| (name, percentiles(all)["p50"].clone()))
            .collect();
        let gaps = client_gaps(live);
        let sum = |f: fn(&moonlivekv::rpc::v1::MigrationReport) -> u64| {
            live.reports.iter().map(f).sum::<u64>()
        };
        let json = json!({
            "pass": pass,
            "identical": verdict.identical,
            "kv_equal": verdict.kv_equal,
            "control_equal": verdict.control_equal,
            "kv_bytes_compared": verdict.kv_bytes,
            "migrated": migrated,
            "cause": cause,
            "fence_pause_us": percentiles(pauses.clone()),
            "client_gap_us": percentiles(gaps),
            "phases_us": medians,
            "pages": sum(|r| r.pages.into()),
            "pages_verified": sum(|r| r.pages_verified.into()),
            "bytes": sum(|r| r.bytes),
            "fence_bytes": sum(|r| r.fence_bytes),
            "leaves_hashed_in_fence": sum(|r| r.leaves_hashed_in_fence.into()),
            "transport": args.transport.name(),
            "verify": args.verify.name(),
            "requests": plan.asks.len(),
            "context": args.context,
            "seed": args.seed,
            "tokens": live.transcripts.iter().map(|t| t.tokens.len()).sum::<usize>(),
            "tokens_per_s": live.tokens_per_s(),
            "tokens_per_s_without": baseline.tokens_per_s(),
            "inject": fault.map(|f| f.plan.fault.name()),
            "fired": fault.map(|_| fired.is_some()),
            "at_step": fault.map(|f| fired.map_or_else(|| f.step().to_owned(), |f| f.at_step.clone())),
            "fired_by": fired.map(|f| f.by.clone()),
            "leaks": leaks,
            "differences": verdict.differences,
        });
        let mut lines = Vec::new();
        if let Some(f) = fault {
            let at = fired.map_or("nowhere", |f| f.at_step.as_str());
            lines.push(format!(
                "injected {}: fired at {at}; cause named: {cause}",
                f.plan.fault.name()
            ));
        }
        Self {
            pass,
            leaks,
            lines,
            json,
        }
    }

    /// Whether everything is as it should be.
    pub fn pass(&self) -> bool {
        self.pass
    }

    /// What is not accounted for.
    pub fn leaks(&self) -> &[String] {
        &self.leaks
    }

    /// Further lines for a human.
    pub fn lines(&self) -> &[String] {
        &self.lines
    }

    /// The first cause that is not `none`.
    pub fn cause(&self) -> &str {
        self.json["cause"].as_str().unwrap_or("none")
    }

    /// The object.
    pub fn json(&self) -> &Value {
        &self.json
    }
}

/// The time each client waited for its first token after the flip, in microseconds.
fn client_gaps(live: &Outcome) -> Vec<u64> {
    let moved = live
        .reports
        .iter()
        .zip(&live.transcripts)
        .filter(|(r, _)| r.migrated && r.seal > 0);
    moved
        .filter_map(|(r, t)| t.gap_before(r.seal + 1))
        .map(|gap| u64::try_from(gap.as_micros()).unwrap_or(u64::MAX))
        .collect()
}
