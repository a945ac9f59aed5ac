//! The report of a migration, put together after its end from what both workers measured.

use std::time::Duration;

use super::core::{Core, Job, Parties};
use crate::drive::{RouteStore, cause_word};
use crate::id::{RequestId, WorkerRef};
use crate::migrate::coordinator::Ended;
use crate::migrate::io::StoreReply;
use crate::node::convert::worker_msg;
use crate::node::measure::at;
use crate::route::{Cause, Refused, RoutePhase};
use crate::rpc::v1::worker_client::WorkerClient;
use crate::rpc::{self, v1};

/// How long asking one worker may take.
const ASK: Duration = Duration::from_secs(2);
/// How often an answer that is not complete yet is asked for again.
const TRIES: u32 = 40;

async fn measured(
    core: &Core,
    worker: &WorkerRef,
    job: &Job,
    p: &Parties,
    last: &str,
) -> v1::MeasuredReply {
    let mut reply = v1::MeasuredReply::default();
    for _ in 0..TRIES {
        match ask(core, worker, job, p).await {
            Ok(r) => reply = r,
            Err(error) => {
                tracing::debug!(%worker, error, "cannot ask what was measured");
                break;
            }
        }
        if reply.instants.iter().any(|i| i.name == last) {
            break;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    reply
}

async fn ask(
    core: &Core,
    worker: &WorkerRef,
    job: &Job,
    p: &Parties,
) -> Result<v1::MeasuredReply, String> {
    let registry = core.registry.clone();
    let id = worker.id.as_str().to_owned();
    let card = tokio::task::spawn_blocking(move || registry.worker(&id));
    let card = card
        .await
        .map_err(|e| e.to_string())?
        .map_err(|e| e.to_string())?;
    let card = card
        .filter(|c| c.incarnation == worker.incarnation.0)
        .ok_or("it is gone")?;
    let endpoint = card.rpc.parse().map_err(|e| format!("{e}"))?;
    let channel = rpc::connect(&endpoint, ASK)
        .await
        .map_err(|e| e.to_string())?;
    let mut request = tonic::Request::new(v1::MeasuredRequest {
        request: job.request.to_string(),
        migration_epoch: p.epoch.0,
    });
    request.set_timeout(ASK);
    let reply = WorkerClient::new(channel).measured(request).await;
    reply
        .map(tonic::Response::into_inner)
        .map_err(|s| s.message().to_owned())
}

/// Instants of both sides by name.
struct Times {
    source: v1::MeasuredReply,
    destination: v1::MeasuredReply,
    start: u64,
}

impl Times {
    fn source(&self, name: &str) -> Option<u64> {
        self.source
            .instants
            .iter()
            .find(|i| i.name == name)
            .map(|i| i.at_ns)
    }

    fn destination(&self, name: &str) -> Option<u64> {
        self.destination
            .instants
            .iter()
            .find(|i| i.name == name)
            .map(|i| i.at_ns)
    }

    fn count(&self, name: &str) -> u64 {
        let all = self.source.counts.iter().chain(&self.destination.counts);
        all.filter(|c| c.name == name).map(|c| c.value).sum()
    }

    /// What both noted, the side before each name.
    fn instants(&self) -> Vec<v1::Instant> {
        let of = |side: &'static str, r: &v1::MeasuredReply| -> Vec<v1::Instant> {
            let named = |i: &v1::Instant| v1::Instant {
                name: format!("{side}.{}", i.name),
                at_ns: i.at_ns,
            };
            r.instants.iter().map(named).collect()
        };
        let mut all = of("source", &self.source);
        all.extend(of("destination", &self.destination));
        all
    }

    /// As [`Times::instants`], of the counts.
    fn counts(&self) -> Vec<v1::Count> {
        let of = |side: &'static str, r: &v1::MeasuredReply| -> Vec<v1::Count> {
            let named = |c: &v1::Count| v1::Count {
                name: format!("{side}.{}", c.name),
                value: c.value,
            };
            r.counts.iter().map(named).collect()
        };
        let mut all = of("source", &self.source);
        all.extend(of("destination", &self.destination));
        all
    }

    /// Phases in order, each from the end of the one before it.
    fn phases(&self) -> Vec<v1::PhaseTime> {
        let ends = [
            ("PREPARE", self.source(at::PREPARE)),
            ("RESERVE", self.destination(at::RESERVED)),
            ("STREAM", self.source(at::GO)),
            ("FENCE", self.source(at::HELD)),
            ("COPY-TAIL", self.destination(at::ARRIVED)),
            ("IMPORT-TAIL", self.destination(at::LANDED)),
            (
                "VERIFY",
                self.destination(at::VERIFIED)
                    .max(self.destination(at::CONTROL)),
            ),
            ("ARM", self.destination(at::ARMED)),
            ("COMMIT", self.destination(at::COMMITTED)),
            ("RESUME", self.destination(at::LAUNCH)),
            ("GC", self.source(at::RELEASED)),
        ];
        let (mut phases, mut from) = (Vec::new(), self.start);
        for (phase, end) in ends {
            let Some(end) = end else { continue };
            phases.push(v1::PhaseTime {
                phase: phase.to_owned(),
                start_ns: from.saturating_sub(self.start),
                took_ns: end.saturating_sub(from),
            });
            from = from.max(end);
        }
        phases
    }
}

/// Why it ended so, as a stable word. A migration that went through after something was repeated
/// says what.
fn cause_of(ended: &Ended, times: &Times) -> (bool, String) {
    match ended {
        Ended::Committed { .. } => {
            let word = if times.count("mismatches") > 0 {
                "page-pulled-again"
            } else if times.count("pulls-failed") > 0 {
                "transfer-repeated"
            } else {
                "none"
            };
            (true, word.to_owned())
        }
        Ended::Aborted { cause, .. } => (false, cause.map_or("aborted", cause_word).to_owned()),
        Ended::Superseded { .. } => (false, "superseded".to_owned()),
        Ended::Refused(why) => (false, format!("refused: {why}")),
        Ended::NoSuchRequest => (false, "no-such-request".to_owned()),
        Ended::Nothing => (false, "nothing-to-do".to_owned()),
    }
}

/// Why a request that has a record is not one that can move.
async fn not_serving(core: &Core, request: RequestId) -> &'static str {
    let routes = core.routes.clone();
    let read = tokio::task::spawn_blocking(move || routes.read(request)).await;
    match read {
        Ok(StoreReply::Value(found)) if found.record.phase == RoutePhase::Finished => {
            cause_word(Cause::RequestEnded)
        }
        _ => "being-recovered",
    }
}

/// Asks both workers and writes the report.
pub async fn report(core: &Core, job: &Job, ended: &Ended) -> v1::MigrationReport {
    let p = job.parties();
    let last = if matches!(ended, Ended::Committed { .. }) {
        at::LAUNCH
    } else {
        at::RELEASED
    };
    let (mut source, mut destination) = Default::default();
    if let Some(worker) = &p.source {
        source = measured(core, worker, job, &p, at::RELEASED).await;
    }
    if let Some(worker) = &p.destination {
        destination = measured(core, worker, job, &p, last).await;
    }
    let times = Times {
        source,
        destination,
        start: job.started_ns,
    };
    let (migrated, mut cause) = cause_of(ended, &times);
    if matches!(ended, Ended::Refused(Refused::WrongPhase)) {
        cause = not_serving(core, job.request).await.to_owned();
    }
    let pause = match (times.source(at::LAST_STEP), times.destination(at::LAUNCH)) {
        (Some(from), Some(to)) if migrated => to.saturating_sub(from),
        _ => 0,
    };
    if pause > 0 {
        core.metrics.pause.observe(pause as f64 / 1e9);
    }
    let pages = u32::try_from(times.count("pages")).unwrap_or(u32::MAX);
    v1::MigrationReport {
        request: job.request.to_string(),
        migration_epoch: p.epoch.0,
        source: p.source.as_ref().map(worker_msg),
        destination: p.destination.as_ref().map(worker_msg),
        migrated,
        cause,
        detail: String::new(),
        phases: times.phases(),
        fence_pause_ns: pause,
        seal: times.count("seal"),
        kv_len: times.count("kv-len"),
        pages,
        pages_verified: if migrated { pages } else { 0 },
        bytes: times.count("bytes") + times.count("fence-bytes"),
        fence_bytes: times.count("fence-bytes"),
        leaves_hashed_in_fence: u32::try_from(times.count("leaves-hashed-in-fence"))
            .unwrap_or(u32::MAX),
        transport: times.destination.transport.clone(),
        verify: String::new(),
        rounds: u32::try_from(times.count("rounds")).unwrap_or(u32::MAX),
        instants: times.instants(),
        counts: times.counts(),
    }
}
