//! What the gateway counts, in Prometheus' form.

use std::sync::atomic::AtomicU64;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

/// Labels of an HTTP answer.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct HttpLabels {
    route: &'static str,
    status: u32,
}

/// Labels of a token that was not accepted.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct RefusalLabels {
    reason: &'static str,
}

/// The gateway's metrics. Counters are shared handles: incrementing takes no lock.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    http: Family<HttpLabels, Counter>,
    refused: Family<RefusalLabels, Counter>,
    /// Tokens accepted into J.
    pub accepted: Counter,
    /// Equal tokens delivered again by a new owner and dropped.
    pub duplicates: Counter,
    /// Unequal tokens under an accepted number: must stay 0.
    pub alarms: Counter,
    /// Owner epochs that rose under a stream: flips and recoveries.
    pub flips: Counter,
    /// Recoveries begun.
    pub recoveries: Counter,
    /// Requests that ended.
    pub finished: Counter,
    /// Requests that have not ended.
    pub active: Gauge,
    /// Workers connected.
    pub workers: Gauge<i64, std::sync::atomic::AtomicI64>,
}

impl Default for Metrics {
    fn default() -> Self {
        let mut registry = Registry::with_prefix("moonlive_gateway");
        let http = Family::default();
        let refused = Family::default();
        let accepted = Counter::<u64, AtomicU64>::default();
        let duplicates = Counter::default();
        let alarms = Counter::default();
        let flips = Counter::default();
        let recoveries = Counter::default();
        let finished = Counter::default();
        let active = Gauge::default();
        let workers = Gauge::default();
        registry.register("http_responses", "HTTP answers", http.clone());
        registry.register(
            "tokens_refused",
            "Tokens refused at the fence",
            refused.clone(),
        );
        registry.register("tokens_accepted", "Tokens accepted", accepted.clone());
        registry.register(
            "tokens_duplicate",
            "Equal tokens dropped",
            duplicates.clone(),
        );
        registry.register(
            "integrity_alarms",
            "Unequal tokens under one number",
            alarms.clone(),
        );
        registry.register("owner_changes", "Flips and recoveries seen", flips.clone());
        registry.register("recoveries", "Recoveries begun", recoveries.clone());
        registry.register("requests_finished", "Requests ended", finished.clone());
        registry.register("requests_active", "Requests under way", active.clone());
        registry.register("workers_connected", "Workers connected", workers.clone());
        Self {
            registry,
            http,
            refused,
            accepted,
            duplicates,
            alarms,
            flips,
            recoveries,
            finished,
            active,
            workers,
        }
    }
}

impl Metrics {
    /// Counts an HTTP answer.
    pub fn http(&self, route: &'static str, status: u16) {
        self.http
            .get_or_create(&HttpLabels {
                route,
                status: status.into(),
            })
            .inc();
    }

    /// Counts a token that was not accepted.
    pub fn refused(&self, reason: &'static str) {
        self.refused.get_or_create(&RefusalLabels { reason }).inc();
    }

    /// Counts tokens that were not accepted.
    pub fn refused_by(&self, reason: &'static str, tokens: u64) {
        if tokens > 0 {
            self.refused
                .get_or_create(&RefusalLabels { reason })
                .inc_by(tokens);
        }
    }

    /// Tokens refused so far.
    pub fn refused_total(&self) -> u64 {
        ["stale-epoch", "gap", "unknown", "ended", "in-doubt"]
            .into_iter()
            .map(|reason| self.refused.get_or_create(&RefusalLabels { reason }).get())
            .sum()
    }

    /// The page.
    pub fn page(&self) -> String {
        let mut out = String::new();
        // Writing to a String cannot fail.
        let _ = encode(&mut out, &self.registry);
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_names_what_was_counted() {
        let m = Metrics::default();
        m.accepted.inc_by(3);
        m.http("/v1/completions", 200);
        m.refused("stale-epoch");
        let page = m.page();
        assert!(
            page.contains("moonlive_gateway_tokens_accepted_total 3"),
            "{page}"
        );
        assert!(
            page.contains("route=\"/v1/completions\",status=\"200\""),
            "{page}"
        );
        assert_eq!(m.refused_total(), 1);
    }
}
