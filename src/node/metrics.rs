//! What workers and coordinators count, in Prometheus' form. Counters are shared handles:
//! incrementing one takes no lock that the fence could wait for.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use crate::node::serving::Load;

/// Upper borders of the histograms of pauses, in seconds: the fence's goal is half a millisecond, a
/// bad one takes the machines' time-outs.
const PAUSES: [f64; 14] = [
    0.000_1, 0.000_25, 0.000_5, 0.001, 0.001_5, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0,
    5.0,
];

fn pauses() -> Histogram {
    Histogram::new(PAUSES)
}

/// Labels of an attempt to migrate that is decided.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct Ended {
    role: &'static str,
    outcome: &'static str,
    cause: String,
}

/// Labels of a message that a machine refused.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct Refused {
    role: &'static str,
    reason: &'static str,
}

/// Labels of a side of the fence.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct Side {
    role: &'static str,
}

fn page(registry: &Registry) -> String {
    let mut out = String::new();
    // Writing to a String cannot fail.
    let _ = encode(&mut out, registry);
    out
}

/// A worker's.
#[derive(Debug)]
pub struct WorkerMetrics {
    registry: Registry,
    ended: Family<Ended, Counter>,
    refused: Family<Refused, Counter>,
    fence: Family<Side, Histogram, fn() -> Histogram>,
    /// Output tokens handed to the gateway's link, those sent again included.
    pub tokens_sent: Counter,
    /// Batches of tokens that the gateway refused: the right to append had ended.
    pub batches_refused: Counter,
    /// Pages that differed from their claim at this destination.
    pub mismatches: Counter,
    /// Bytes of memory that an attempt left in quarantine.
    pub quarantined: Counter,
    blocks: [Gauge; 3],
    quarantine_bytes: Gauge,
    requests: [Gauge; 4],
    pending: Gauge,
}

impl Default for WorkerMetrics {
    fn default() -> Self {
        let mut registry = Registry::with_prefix("moonlive_worker");
        let (ended, refused) = (
            Family::<Ended, Counter>::default(),
            Family::<Refused, Counter>::default(),
        );
        let fence = Family::new_with_constructor(pauses as fn() -> Histogram);
        let (tokens_sent, batches_refused) = (Counter::default(), Counter::default());
        let (mismatches, quarantined) = (Counter::default(), Counter::default());
        let mut put =
            |name: &str, help: &str, m: &Counter| registry.register(name, help, m.clone());
        put("tokens_sent", "Tokens handed to the gateway", &tokens_sent);
        put(
            "token_batches_refused",
            "Batches of tokens that the gateway's fence refused",
            &batches_refused,
        );
        put("page_mismatches", "Pages that differed", &mismatches);
        put(
            "quarantined_bytes",
            "Bytes given up because a peer might still touch them",
            &quarantined,
        );
        registry.register(
            "migrations",
            "Attempts decided, as seen here",
            ended.clone(),
        );
        registry.register("stale_messages", "Messages refused", refused.clone());
        registry.register(
            "fence_seconds",
            "Source: held until decided. Destination: push arrived until launch",
            fence.clone(),
        );
        let mut gauge = |name: &str, help: &str| {
            let gauge: Gauge = Gauge::default();
            registry.register(name, help, gauge.clone());
            gauge
        };
        let blocks = [
            gauge("pool_blocks_free", "Blocks of the KV pool that are free"),
            gauge(
                "pool_blocks_used",
                "Blocks that requests, pins and stages hold",
            ),
            gauge("pool_blocks_cached", "Blocks that the prefix cache holds"),
        ];
        let quarantine_bytes = gauge(
            "pool_quarantined_bytes",
            "Bytes of the pool never used again",
        );
        let requests = [
            gauge("requests_running", "Requests that decode"),
            gauge("requests_waiting", "Requests that wait for memory"),
            gauge("requests_pinned", "Pins for migrations away"),
            gauge("requests_staged", "Requests on their way in"),
        ];
        let pending = gauge("tokens_pending", "Tokens not known to be journaled");
        Self {
            registry,
            ended,
            refused,
            fence,
            tokens_sent,
            batches_refused,
            mismatches,
            quarantined,
            blocks,
            quarantine_bytes,
            requests,
            pending,
        }
    }
}

impl WorkerMetrics {
    /// An attempt is decided, as `role` sees it.
    pub fn ended(&self, role: &'static str, committed: bool, cause: &str) {
        let labels = Ended {
            role,
            outcome: if committed { "committed" } else { "aborted" },
            cause: if committed { "none" } else { cause }.to_owned(),
        };
        self.ended.get_or_create(&labels).inc();
    }

    /// A machine refused a message.
    pub fn stale(&self, role: &'static str, reason: &'static str) {
        self.refused.get_or_create(&Refused { role, reason }).inc();
    }

    /// How long a request stood still, in nanoseconds, as `role` can tell.
    pub fn stood(&self, role: &'static str, ns: u64) {
        self.fence
            .get_or_create(&Side { role })
            .observe(ns as f64 / 1e9);
    }

    /// The page, with the pool's state of now.
    pub fn page(&self, load: &Load, pending: usize) -> String {
        let signed = |n: u64| i64::try_from(n).unwrap_or(i64::MAX);
        let used = load
            .blocks_total
            .saturating_sub(load.blocks_free + load.blocks_cached);
        for (gauge, n) in self
            .blocks
            .iter()
            .zip([load.blocks_free, used, load.blocks_cached])
        {
            gauge.set(signed(n));
        }
        self.quarantine_bytes.set(signed(load.quarantined_bytes));
        let counts = [load.running, load.waiting, load.pins, load.stages];
        for (gauge, n) in self.requests.iter().zip(counts) {
            gauge.set(n.into());
        }
        self.pending.set(signed(pending as u64));
        page(&self.registry)
    }
}

/// A coordinator's.
#[derive(Debug)]
pub struct CoordinatorMetrics {
    registry: Registry,
    ended: Family<Ended, Counter>,
    /// Last source step done until the destination may launch, where both sides told.
    pub pause: Histogram,
    running: Gauge,
    leads: Gauge,
    term: Gauge,
}

impl Default for CoordinatorMetrics {
    fn default() -> Self {
        let mut registry = Registry::with_prefix("moonlive_coordinator");
        let (ended, pause) = (Family::<Ended, Counter>::default(), pauses());
        registry.register("migrations", "Migrations ended", ended.clone());
        registry.register(
            "fence_pause_seconds",
            "Last source step done until the destination may launch",
            pause.clone(),
        );
        let mut gauge = |name: &str, help: &str| {
            let gauge: Gauge = Gauge::default();
            registry.register(name, help, gauge.clone());
            gauge
        };
        let running = gauge("migrations_running", "Migrations under way");
        let leads = gauge("leads", "1 where this coordinator leads");
        let term = gauge("term", "The term it last led in");
        Self {
            registry,
            ended,
            pause,
            running,
            leads,
            term,
        }
    }
}

impl CoordinatorMetrics {
    /// A migration ended.
    pub fn ended(&self, outcome: &'static str, cause: String) {
        let labels = Ended {
            role: "coordinator",
            outcome,
            cause,
        };
        self.ended.get_or_create(&labels).inc();
    }

    /// The page, with what is true now.
    pub fn page(&self, running: usize, leads: bool, term: u64) -> String {
        self.running.set(i64::try_from(running).unwrap_or(i64::MAX));
        self.leads.set(leads.into());
        self.term.set(i64::try_from(term).unwrap_or(i64::MAX));
        page(&self.registry)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_workers_page_tells_the_pool_and_each_outcome_with_its_cause() {
        let m = WorkerMetrics::default();
        m.ended("source", true, "timeout");
        m.ended("destination", false, "control-mismatch");
        m.stood("source", 400_000);
        let load = Load {
            blocks_total: 10,
            blocks_free: 6,
            blocks_cached: 1,
            quarantined_bytes: 64,
            ..Load::default()
        };
        let page = m.page(&load, 2);
        for line in [
            "moonlive_worker_migrations_total{role=\"source\",outcome=\"committed\",cause=\"none\"} 1",
            "moonlive_worker_migrations_total{role=\"destination\",outcome=\"aborted\",cause=\"control-mismatch\"} 1",
            "moonlive_worker_fence_seconds_bucket{le=\"0.0005\",role=\"source\"} 1",
            "moonlive_worker_fence_seconds_bucket{le=\"0.00025\",role=\"source\"} 0",
            "moonlive_worker_pool_blocks_used 3",
            "moonlive_worker_pool_quarantined_bytes 64",
            "moonlive_worker_tokens_pending 2",
        ] {
            assert!(page.lines().any(|l| l == line), "{line} is not in\n{page}");
        }
    }

    #[test]
    fn a_coordinators_page_tells_ends_and_pauses() {
        let m = CoordinatorMetrics::default();
        m.ended("aborted", "peer-lost".into());
        m.pause.observe(0.002);
        let page = m.page(3, true, 7);
        for line in [
            "moonlive_coordinator_migrations_total{role=\"coordinator\",outcome=\"aborted\",cause=\"peer-lost\"} 1",
            "moonlive_coordinator_fence_pause_seconds_bucket{le=\"0.0025\"} 1",
            "moonlive_coordinator_migrations_running 3",
            "moonlive_coordinator_leads 1",
        ] {
            assert!(page.lines().any(|l| l == line), "{line} is not in\n{page}");
        }
    }
}
