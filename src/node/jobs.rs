//! Threads for work that takes long: hashing and copying in bulk, away from the links' threads.

use std::thread::JoinHandle;

use crossbeam_channel::{Receiver, Sender, unbounded};
use parking_lot::Mutex;

type Job = Box<dyn FnOnce() + Send>;

/// A small pool of threads. What is given to it is done in order of arrival.
pub struct Jobs {
    send: Mutex<Option<Sender<Job>>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

fn work(jobs: &Receiver<Job>) {
    while let Ok(job) = jobs.recv() {
        job();
    }
}

impl Jobs {
    /// Starts `n` threads.
    pub fn start(name: &str, n: usize) -> std::io::Result<Self> {
        let (send, recv) = unbounded::<Job>();
        let mut threads = Vec::with_capacity(n);
        for i in 0..n.max(1) {
            let recv = recv.clone();
            let thread = std::thread::Builder::new().name(format!("{name}-{i}"));
            threads.push(thread.spawn(move || work(&recv))?);
        }
        Ok(Self {
            send: Mutex::new(Some(send)),
            threads: Mutex::new(threads),
        })
    }

    /// Queues a job; `false` once stopped, and the job is dropped.
    pub fn run(&self, job: impl FnOnce() + Send + 'static) -> bool {
        match &*self.send.lock() {
            Some(send) => send.send(Box::new(job)).is_ok(),
            None => false,
        }
    }

    /// Lets queued jobs finish and ends the threads.
    pub fn stop(&self) {
        drop(self.send.lock().take());
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
