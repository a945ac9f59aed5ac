//! What a compare-and-swap costs, beside what the disk and the socket cost alone: for the bench.

use super::{
    Cas, CasOutcome, EmbeddedOptions, EmbeddedStore, MetaStore, RemoteOptions, RemoteStore,
    Revision, ServerOptions, StoreError, StoreServer,
};
use crate::wal::{Dir, DiskDir, WalError};
use crate::wire::{
    Endpoint, FramedConn, Limits, ListenOptions, Listener, Wait, WireError, connect,
};
use std::io::IoSlice;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// One measured case: latencies of single calls, one after the other.
#[derive(Debug, Clone)]
pub struct Latency {
    /// Which case, as `cas/disk/unix`.
    pub case: String,
    /// Calls measured.
    pub calls: usize,
    /// Median, in microseconds.
    pub p50_us: f64,
    /// 99th percentile, in microseconds.
    pub p99_us: f64,
}

/// A measurement that could not be made.
#[derive(Debug, thiserror::Error)]
pub enum MeasureError {
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The disk failed.
    #[error(transparent)]
    Wal(#[from] WalError),
    /// The socket failed.
    #[error(transparent)]
    Wire(#[from] WireError),
}

/// Bytes of the record changed: a route record's.
const RECORD: usize = 300;

fn quantiles(case: &str, mut samples: Vec<Duration>) -> Latency {
    samples.sort_unstable();
    let at = |q: f64| {
        let i = ((samples.len() as f64 - 1.0) * q).round() as usize;
        samples.get(i).map_or(0.0, |d| d.as_secs_f64() * 1e6)
    };
    Latency {
        case: case.to_owned(),
        calls: samples.len(),
        p50_us: at(0.5),
        p99_us: at(0.99),
    }
}

/// Runs `call` some times to warm up, then `calls` times measured, `pause` apart: back to back, a
/// disk shows its throughput, not its latency.
fn sample<E>(
    case: &str,
    calls: usize,
    pause: Duration,
    mut call: impl FnMut() -> Result<(), E>,
) -> Result<Latency, E> {
    let mut samples = Vec::with_capacity(calls);
    for i in 0..calls + calls / 10 {
        std::thread::sleep(pause);
        let begun = Instant::now();
        call()?;
        let took = begun.elapsed();
        if i >= calls / 10 {
            samples.push(took);
        }
    }
    Ok(quantiles(case, samples))
}

fn deadline() -> Instant {
    Instant::now() + Duration::from_secs(30)
}

fn cas(
    case: &str,
    store: &dyn MetaStore,
    calls: usize,
    pause: Duration,
) -> Result<Latency, StoreError> {
    let mut revision: Option<Revision> = store.get(case, deadline())?.map(|r| r.revision);
    let value = [7u8; RECORD];
    sample(case, calls, pause, || {
        match store.cas(&Cas::put(case, revision, &value), deadline())? {
            CasOutcome::Applied { revision: now } => revision = Some(now),
            CasOutcome::Conflict { current } => revision = current.map(|r| r.revision),
        }
        Ok(())
    })
}

/// One `pwrite` and one `fdatasync` into a preallocated, zero-filled file: what no store on this
/// disk can beat.
fn raw_flush(
    case: &str,
    dir: &Path,
    bytes: usize,
    calls: usize,
    pause: Duration,
) -> Result<Latency, WalError> {
    let dir = DiskDir::open(dir)?;
    let len = 4 << 20;
    let file = dir.create("raw", len)?;
    let block = vec![7u8; bytes];
    let mut at = 0;
    let latency = sample(case, calls, pause, || {
        file.write_at(at, &block)?;
        at = (at + bytes as u64) % (len - bytes as u64);
        file.sync()
    });
    dir.remove("raw")?;
    Ok(latency?)
}

/// A frame there and one back, between two threads.
fn round_trip(
    case: &str,
    endpoint: &Endpoint,
    bytes: usize,
    calls: usize,
) -> Result<Latency, WireError> {
    let listener = Listener::bind(endpoint, ListenOptions::default())?;
    let at = listener.endpoint().clone();
    let echo = std::thread::spawn(move || -> Result<(), WireError> {
        let mut conn: FramedConn = listener.accept(deadline())?;
        loop {
            let (send, recv) = conn.halves();
            let frame = match recv.recv(Wait::until(deadline())) {
                Err(WireError::Closed { .. }) => return Ok(()),
                other => other?,
            };
            send.send(
                2,
                frame.header.id,
                &[IoSlice::new(frame.payload)],
                Wait::until(deadline()),
            )?;
        }
    });
    let mut conn = connect(&at, Limits::default(), deadline())?;
    let block = vec![7u8; bytes];
    let mut id = 0;
    let latency = sample(case, calls, Duration::ZERO, || {
        id += 1;
        conn.send(1, id, &[IoSlice::new(&block)], Wait::until(deadline()))?;
        conn.recv(Wait::until(deadline()))?;
        Ok::<(), WireError>(())
    });
    drop(conn);
    // A panic there would have been seen as a lost connection here.
    let _ = echo.join();
    latency
}

/// Measures everything in `dir`, which it uses for logs and sockets: `calls` calls a case.
///
/// Cases: `raw/300B` and `raw/4KiB` (write and flush alone), `wire/unix` and `wire/tcp` (a frame
/// there and back), `cas/memory`, `cas/disk`, each alone, over a unix socket and over TCP.
pub fn store_latencies(dir: &Path, calls: usize) -> Result<Vec<Latency>, MeasureError> {
    let pause = Duration::from_micros(300);
    let mut rows = vec![
        raw_flush("raw/300B", &dir.join("raw"), RECORD, calls, pause)?,
        raw_flush("raw/4KiB", &dir.join("raw"), 4096, calls, pause)?,
    ];
    let unix = Endpoint::unix(dir.join("measure.sock")).map_err(WireError::from)?;
    let endpoints = [("unix", unix), ("tcp", Endpoint::loopback(0))];
    for (name, endpoint) in &endpoints {
        rows.push(round_trip(
            &format!("wire/{name}"),
            endpoint,
            RECORD,
            calls,
        )?);
    }
    let stores = [
        (
            "memory",
            Arc::new(EmbeddedStore::in_memory(EmbeddedOptions::default())),
            Duration::ZERO,
        ),
        (
            "disk",
            Arc::new(EmbeddedStore::open(
                dir.join("store"),
                EmbeddedOptions::default(),
            )?),
            pause,
        ),
    ];
    for (kind, store, pause) in stores {
        rows.push(cas(&format!("cas/{kind}"), &*store, calls, pause)?);
        for (name, endpoint) in &endpoints {
            let server =
                StoreServer::start(Arc::clone(&store) as _, endpoint, ServerOptions::default())?;
            let remote = RemoteStore::new(server.endpoint().clone(), RemoteOptions::default());
            rows.push(cas(&format!("cas/{kind}/{name}"), &remote, calls, pause)?);
        }
    }
    Ok(rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_case_is_measured() {
        let dir = tempfile::tempdir().unwrap();
        let rows = store_latencies(dir.path(), 20).unwrap();
        let cases: Vec<&str> = rows.iter().map(|r| r.case.as_str()).collect();
        assert_eq!(
            cases,
            [
                "raw/300B",
                "raw/4KiB",
                "wire/unix",
                "wire/tcp",
                "cas/memory",
                "cas/memory/unix",
                "cas/memory/tcp",
                "cas/disk",
                "cas/disk/unix",
                "cas/disk/tcp",
            ]
        );
        assert!(
            rows.iter()
                .all(|r| r.calls == 20 && r.p50_us > 0.0 && r.p99_us >= r.p50_us)
        );
    }
}
