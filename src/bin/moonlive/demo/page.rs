//! What the run was, as a page: `--report`.

use std::collections::HashMap;
use std::fs::File;
use std::path::Path;

use anyhow::Context;
use moonlivekv::drive::ns_of;
use moonlivekv::rpc::v1::MigrationReport;

use super::ask::Plan;
use super::run::Outcome;
use super::summary::Summary;
use crate::bench;
use crate::cli::DemoArgs;
use crate::client::Transcript;
use crate::report::{Lane, Migration, Phase, Report, Request, Token};

/// Steps inside the fence: name, who works, from, to.
const FENCE: [(&str, Lane, &str, &str); 9] = [
    ("hold", Lane::Source, "source.last-step", "source.held"),
    (
        "export control state and tail",
        Lane::Source,
        "source.held",
        "source.exported",
    ),
    (
        "push",
        Lane::Source,
        "source.exported",
        "destination.arrived",
    ),
    (
        "land the tail",
        Lane::Destination,
        "destination.arrived",
        "destination.landed",
    ),
    (
        "hash what came",
        Lane::Destination,
        "destination.landed",
        "destination.verified",
    ),
    (
        "import and re-export control state",
        Lane::Destination,
        "destination.verified",
        "destination.control",
    ),
    (
        "arm",
        Lane::Destination,
        "destination.control",
        "destination.armed",
    ),
    (
        "commit: compare-and-swap",
        Lane::Gateway,
        "destination.armed",
        "destination.committed",
    ),
    (
        "launch",
        Lane::Destination,
        "destination.committed",
        "destination.launch",
    ),
];

/// Makes sure that the page can be written there, before the minute that the run takes.
pub fn claim(file: &Path) -> anyhow::Result<()> {
    File::create(file)
        .map(drop)
        .with_context(|| format!("--report {}: cannot write there", file.display()))
}

/// Turns times into microseconds since the first token of the run. The clients' clock and the
/// daemons' are one: `CLOCK_MONOTONIC`.
#[derive(Clone, Copy)]
struct Clock {
    zero_ns: u64,
}

impl Clock {
    fn of(live: &Outcome) -> Self {
        let first = live.transcripts.iter().filter_map(|t| t.tokens.first());
        Self {
            zero_ns: first.map(|t| ns_of(t.at)).min().unwrap_or(0),
        }
    }

    fn us(self, ns: u64) -> f64 {
        (ns as f64 - self.zero_ns as f64) / 1e3
    }
}

/// The page of a run.
pub fn of(
    args: &DemoArgs,
    plan: &Plan,
    baseline: &Outcome,
    live: &Outcome,
    summary: &Summary,
) -> Report {
    let clock = Clock::of(live);
    let requests = plan.asks.iter().enumerate().map(|(n, ask)| {
        let (stayed, moved) = (&baseline.transcripts[n], &live.transcripts[n]);
        Request {
            id: ask.request.to_string(),
            prompt_tokens: ask.body["prompt"].as_array().map(|p| p.len() as u64),
            identical: stayed.bytes() == moved.bytes() && !stayed.finish.is_empty(),
            tokens: tokens(moved, clock),
            migration: live.reports.get(n).map(|r| migration(r, clock)),
        }
    });
    let mut command = vec!["moonlive".to_owned()];
    command.extend(std::env::args().skip(1));
    Report {
        pass: summary.pass(),
        cause: match summary.cause() {
            "none" => String::new(),
            cause => cause.to_owned(),
        },
        command: command.join(" "),
        model: match &args.engine.model {
            Some(path) => {
                let name = path.file_name().unwrap_or(path.as_os_str());
                name.to_string_lossy().into_owned()
            }
            None => format!("Reference model, size {}", args.engine.size),
        },
        transport: args.transport.name().to_owned(),
        verify: args.verify.name().to_owned(),
        machine: bench::machine(),
        requests: requests.collect(),
    }
}

fn tokens(transcript: &Transcript, clock: Clock) -> Vec<Token> {
    let token = |t: &crate::client::Seen| Token {
        seq: t.seq,
        token: t.token,
        text: t.text.clone(),
        at_us: clock.us(ns_of(t.at)),
    };
    transcript.tokens.iter().map(token).collect()
}

fn migration(r: &MigrationReport, clock: Clock) -> Migration {
    let at: HashMap<&str, u64> = r
        .instants
        .iter()
        .map(|i| (i.name.as_str(), i.at_ns))
        .collect();
    let span = |name: &str, lane, from: u64, to: u64| Phase {
        name: name.to_owned(),
        lane,
        from_us: clock.us(from),
        to_us: clock.us(to.max(from)),
    };
    let mut phases: Vec<Phase> = Vec::new();
    // Phases come relative to the start of PREPARE; its end is an instant of the source.
    let prepare = r.phases.iter().find(|p| p.phase == "PREPARE");
    if let (Some(p), Some(end)) = (prepare, at.get("source.prepare")) {
        let zero = end.saturating_sub(p.start_ns + p.took_ns);
        for p in &r.phases {
            let from = zero + p.start_ns;
            phases.push(span(&p.phase, lane(&p.phase), from, from + p.took_ns));
            if p.phase == "STREAM" {
                let name = "offer pages";
                phases.push(span(name, Lane::Source, from, from + p.took_ns));
            }
        }
    }
    let step = |(name, lane, from, to): &(&str, Lane, &str, &str)| {
        Some(span(name, *lane, *at.get(from)?, *at.get(to)?))
    };
    let worker = |w: &Option<moonlivekv::rpc::v1::WorkerRef>| {
        w.as_ref().map_or_else(|| "?".to_owned(), |w| w.id.clone())
    };
    Migration {
        from: worker(&r.source),
        to: worker(&r.destination),
        committed: r.migrated,
        cause: match r.migrated {
            true => String::new(),
            false => r.cause.clone(),
        },
        seal: r.seal,
        kv_tokens: r.kv_len,
        fence_pause_us: (r.fence_pause_ns > 0).then(|| r.fence_pause_ns as f64 / 1e3),
        phases,
        fence: FENCE.iter().filter_map(step).collect(),
        pages: r.pages.into(),
        pages_verified: r.pages_verified.into(),
        fence_leaves: r.leaves_hashed_in_fence.into(),
        stream_bytes: r.bytes.saturating_sub(r.fence_bytes),
        fence_bytes: r.fence_bytes,
    }
}

/// Who works in a phase.
fn lane(phase: &str) -> Lane {
    match phase {
        "PREPARE" => Lane::Coordinator,
        "FENCE" | "COPY-TAIL" | "GC" => Lane::Source,
        "COMMIT" => Lane::Gateway,
        _ => Lane::Destination,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use moonlivekv::rpc::v1::{Instant as At, PhaseTime, WorkerRef};

    #[test]
    fn phases_and_steps_stand_on_the_clients_clock() {
        let clock = Clock { zero_ns: 1_000_000 };
        let instant = |name: &str, at_ns| At {
            name: name.into(),
            at_ns,
        };
        let phase = |phase: &str, start_ns, took_ns| PhaseTime {
            phase: phase.into(),
            start_ns,
            took_ns,
        };
        let report = MigrationReport {
            source: Some(WorkerRef {
                id: "w0".into(),
                incarnation: 1,
            }),
            migrated: true,
            fence_pause_ns: 4000,
            phases: vec![phase("PREPARE", 0, 5000), phase("STREAM", 5000, 2000)],
            instants: vec![
                instant("source.prepare", 2_005_000),
                instant("source.last-step", 2_010_000),
                instant("source.held", 2_012_000),
            ],
            ..MigrationReport::default()
        };
        let m = migration(&report, clock);
        assert_eq!((m.from.as_str(), m.to.as_str()), ("w0", "?"));
        let seen: Vec<(Lane, f64, f64)> = m
            .phases
            .iter()
            .map(|p| (p.lane, p.from_us, p.to_us))
            .collect();
        assert_eq!(
            seen,
            [
                (Lane::Coordinator, 1000.0, 1005.0),
                (Lane::Destination, 1005.0, 1007.0),
                (Lane::Source, 1005.0, 1007.0),
            ]
        );
        assert_eq!(m.fence.len(), 1);
        assert_eq!((m.fence[0].from_us, m.fence[0].to_us), (1010.0, 1012.0));
        assert_eq!(m.fence_pause_us, Some(4.0));
        // A report of a coordinator that is gone has no instants: no phases, no panic.
        let bare = migration(&MigrationReport::default(), clock);
        assert!(bare.phases.is_empty() && bare.fence.is_empty());
    }
}
