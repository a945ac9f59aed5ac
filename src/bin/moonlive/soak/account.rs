//! What the daemons hold, at rest: blocks, pins, stages, quarantine, descriptors.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use moonlivekv::rpc::v1::worker_client::WorkerClient;
use moonlivekv::rpc::{self, v1};
use serde_json::{Value, json};

use crate::children::Daemon;
use crate::cluster::{CALL, Cluster};

/// How long everything may take to be given back.
const SETTLE: Duration = Duration::from_secs(30);
/// For so long a count must not change before it is taken as the one at rest. Longer than idle links
/// are kept.
const STILL: Duration = Duration::from_secs(5);
const LOOK: Duration = Duration::from_millis(100);

/// Descriptors of one process, by what they are.
pub type Fds = BTreeMap<String, u32>;

/// Descriptors of every daemon, by its name.
pub type All = BTreeMap<String, Fds>;

fn kind(target: &str) -> String {
    let kinds = [
        ("socket:", "socket"),
        ("pipe:", "pipe"),
        ("anon_inode:", "anon"),
        ("/memfd:", "memfd"),
        ("/dev/", "device"),
        ("/", "file"),
    ];
    let found = kinds.iter().find(|(start, _)| target.starts_with(start));
    found.map_or("other", |(_, kind)| kind).to_owned()
}

fn fds_of(pid: u32) -> Fds {
    let mut fds = Fds::new();
    let Ok(dir) = std::fs::read_dir(format!("/proc/{pid}/fd")) else {
        return fds;
    };
    for entry in dir.flatten() {
        // One that was closed meanwhile is none.
        if let Ok(target) = std::fs::read_link(entry.path()) {
            *fds.entry(kind(&target.to_string_lossy())).or_default() += 1;
        }
    }
    fds
}

fn daemons(cluster: &Cluster) -> impl Iterator<Item = &Daemon> {
    [&cluster.gateway, &cluster.coordinator]
        .into_iter()
        .chain(&cluster.workers)
}

/// Descriptors of every daemon, now.
pub fn fds(cluster: &Cluster) -> All {
    daemons(cluster)
        .map(|d| (d.name.clone(), fds_of(d.pid())))
        .collect()
}

/// Waits until no count has changed for a while, or until they are `wanted`; then what they are.
pub async fn fds_at_rest(cluster: &Cluster, wanted: Option<&All>) -> All {
    let end = Instant::now() + SETTLE;
    let (mut now, mut since) = (fds(cluster), Instant::now());
    while since.elapsed() < STILL && Instant::now() < end && wanted != Some(&now) {
        tokio::time::sleep(LOOK).await;
        let next = fds(cluster);
        if next != now {
            (now, since) = (next, Instant::now());
        }
    }
    now
}

/// What one worker holds when nothing runs.
#[derive(Debug, Clone, Default)]
pub struct Pool {
    /// Whose.
    pub worker: String,
    /// Blocks there are.
    pub total: u64,
    /// Blocks free or only kept by the prefix cache.
    pub unused: u64,
    /// Bytes that are never used again.
    pub quarantined: u64,
    /// Requests, pins and stages.
    pub held: u32,
    /// Why it could not be asked.
    pub error: Option<String>,
}

impl Pool {
    /// Whether everything was given back.
    pub fn is_whole(&self) -> bool {
        self.error.is_none() && self.unused == self.total && self.quarantined == 0 && self.held == 0
    }

    /// For the summary.
    pub fn json(&self) -> Value {
        json!({
            "worker": self.worker, "blocks": self.total, "blocks_unused": self.unused,
            "quarantined_bytes": self.quarantined, "held": self.held, "error": self.error,
        })
    }
}

async fn ask(worker: &str, at: &str) -> anyhow::Result<Pool> {
    // A connection of its own that ends with the question: it would count as a descriptor.
    let channel = rpc::connect(&at.parse()?, CALL).await?;
    let mut request = tonic::Request::new(v1::WorkerStatusRequest {});
    request.set_timeout(CALL);
    let s = WorkerClient::new(channel)
        .status(request)
        .await?
        .into_inner();
    Ok(Pool {
        worker: worker.to_owned(),
        total: s.blocks_total,
        unused: s.blocks_free + s.blocks_cached,
        quarantined: s.quarantined_bytes,
        held: s.running + s.waiting + s.pins + s.stages,
        error: None,
    })
}

/// Waits until every worker has everything back, or the time for that is over.
pub async fn pools_at_rest(cluster: &Cluster) -> Vec<Pool> {
    let end = Instant::now() + SETTLE;
    loop {
        let mut pools = Vec::new();
        for (name, at) in cluster.workers.iter().flat_map(Daemon::rpcs) {
            let pool = ask(&name, &at).await.unwrap_or_else(|e| Pool {
                worker: name.clone(),
                error: Some(format!("{e:#}")),
                ..Pool::default()
            });
            pools.push(pool);
        }
        if pools.iter().all(Pool::is_whole) || Instant::now() >= end {
            return pools;
        }
        tokio::time::sleep(LOOK).await;
    }
}

/// Descriptors at the start and at the end of each daemon.
pub fn compare(start: &All, end: &All) -> (bool, Value) {
    let sum = |f: Option<&Fds>| f.map_or(0, |f| f.values().sum::<u32>());
    let names: Vec<&String> = end.keys().collect();
    let rows: Vec<Value> = names
        .iter()
        .map(|n| {
            json!({
                "daemon": n, "start": sum(start.get(*n)), "end": sum(end.get(*n)),
                "start_by_kind": start.get(*n), "end_by_kind": end.get(*n),
            })
        })
        .collect();
    let back = |n: &&&String| sum(end.get(**n)) <= sum(start.get(**n));
    (
        names.iter().filter(back).count() == names.len(),
        json!(rows),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_descriptor_more_than_at_the_start_is_seen() {
        let of =
            |sockets| All::from([("w0".to_owned(), Fds::from([("socket".to_owned(), sockets)]))]);
        assert!(compare(&of(3), &of(3)).0);
        assert!(!compare(&of(3), &of(4)).0);
    }

    #[test]
    fn this_process_has_descriptors_and_they_are_told_apart() {
        let (before, file) = (
            fds_of(std::process::id()),
            std::fs::File::open("/proc/self/stat"),
        );
        let after = fds_of(std::process::id());
        drop(file);
        assert!(
            after.get("file") >= before.get("file"),
            "{before:?} {after:?}"
        );
        assert_eq!(kind("socket:[1]"), "socket");
        assert_eq!(kind("/memfd:pool (deleted)"), "memfd");
    }
}
