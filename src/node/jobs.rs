//! Threads for work that takes long: hashing and copying in bulk, away from the links' threads.
//!
//! Two lanes: what somebody waits for, and the bulk of a STREAM, whose threads are *nice*: where the
//! CPUs are short, requests that decode on this machine come first, and STREAM takes what they leave
//! and a tenth. Rounds that catch up with the decoding just before a fence are not bulk.

use std::thread::JoinHandle;

use crossbeam_channel::{Receiver, Sender, unbounded};
use parking_lot::Mutex;

type Job = Box<dyn FnOnce() + Send>;

/// How nice the threads of the bulk lane are: a ninth of a decoding thread's share.
const NICE: i32 = 10;

/// A small pool of threads. What is given to a lane is begun in order of arrival.
pub struct Jobs {
    soon: Mutex<Option<Sender<Job>>>,
    bulk: Mutex<Option<Sender<Job>>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

fn work(jobs: &Receiver<Job>) {
    while let Ok(job) = jobs.recv() {
        job();
    }
}

fn lane(
    name: &str,
    n: usize,
    nice: Option<i32>,
    threads: &mut Vec<JoinHandle<()>>,
) -> std::io::Result<Sender<Job>> {
    let (send, recv) = unbounded::<Job>();
    for i in 0..n.max(1) {
        let recv = recv.clone();
        let thread = std::thread::Builder::new().name(format!("{name}-{i}"));
        threads.push(thread.spawn(move || {
            if let Some(nice) = nice {
                // On Linux this is the calling thread's alone. Refused, it works as any other.
                let now = rustix::process::getpriority_process(None).unwrap_or(0);
                let _ = rustix::process::setpriority_process(None, nice.max(now));
            }
            work(&recv);
        })?);
    }
    Ok(send)
}

impl Jobs {
    /// Starts `n` threads for each lane.
    pub fn start(name: &str, n: usize) -> std::io::Result<Self> {
        let mut threads = Vec::with_capacity(2 * n);
        let soon = lane(name, n, None, &mut threads)?;
        let bulk = lane(&format!("{name}-nice"), n, Some(NICE), &mut threads)?;
        Ok(Self {
            soon: Mutex::new(Some(soon)),
            bulk: Mutex::new(Some(bulk)),
            threads: Mutex::new(threads),
        })
    }

    /// Queues a job that somebody waits for; `false` once stopped, and the job is dropped.
    pub fn run(&self, job: impl FnOnce() + Send + 'static) -> bool {
        give(&self.soon, Box::new(job))
    }

    /// Queues a job of a STREAM: bulk where it is about `bytes` of KV that take long.
    pub fn stream(&self, bytes: u64, job: impl FnOnce() + Send + 'static) -> bool {
        let lane = if bytes >= BULK {
            &self.bulk
        } else {
            &self.soon
        };
        give(lane, Box::new(job))
    }

    /// Lets queued jobs finish and ends the threads.
    pub fn stop(&self) {
        drop(self.soon.lock().take());
        drop(self.bulk.lock().take());
        let me = std::thread::current().id();
        for thread in self
            .threads
            .lock()
            .drain(..)
            .filter(|t| t.thread().id() != me)
        {
            let _ = thread.join();
        }
    }
}

/// Less than this is hashed and copied in well under a millisecond.
const BULK: u64 = 1 << 20;

fn give(lane: &Mutex<Option<Sender<Job>>>, job: Job) -> bool {
    match &*lane.lock() {
        Some(send) => send.send(job).is_ok(),
        None => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;
    use std::time::Duration;

    fn niceness() -> i32 {
        rustix::process::getpriority_process(None).unwrap()
    }

    #[test]
    fn bulk_gives_way_and_what_is_waited_for_does_not() {
        let jobs = Jobs::start("test", 1).unwrap();
        let (tell, told) = mpsc::channel();
        let before = niceness();
        for bytes in [BULK, BULK - 1] {
            let tell = tell.clone();
            assert!(jobs.stream(bytes, move || tell.send((bytes, niceness())).unwrap()));
        }
        for _ in 0..2 {
            let (bytes, nice) = told.recv_timeout(Duration::from_secs(10)).unwrap();
            let want = if bytes == BULK {
                before.max(NICE)
            } else {
                before
            };
            assert_eq!(nice, want, "{bytes} bytes");
        }
        assert_eq!(niceness(), before);
        jobs.stop();
        assert!(!jobs.run(|| ()) && !jobs.stream(BULK, || ()));
    }
}
