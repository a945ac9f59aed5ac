//! Timers of the machines: one thread that sleeps until the next, and a few that run what is due.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::hash::Hash;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use super::clock::now_ns;

/// Runs what is due; called on a thread of the timers' own.
pub type Fire<K> = Arc<dyn Fn(K) + Send + Sync>;

struct State<K> {
    /// `(when, generation, key)`; an entry whose generation is not the key's newest is dead.
    heap: BinaryHeap<Reverse<(u64, u64)>>,
    by_generation: HashMap<u64, K>,
    newest: HashMap<K, u64>,
    generation: u64,
    /// Some thread will look again by then, if none is awake: nothing later need wake one.
    looks_at_ns: u64,
    stopping: bool,
}

struct Inner<K> {
    state: Mutex<State<K>>,
    wake: Condvar,
}

/// Timers keyed by `K`: setting an armed one moves it.
pub struct Timers<K: Eq + Hash + Clone + Send + 'static> {
    inner: Arc<Inner<K>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl<K: Eq + Hash + Clone + Send + 'static> Timers<K> {
    /// Starts `threads` threads that call `fire`.
    pub fn start(threads: usize, fire: Fire<K>) -> std::io::Result<Self> {
        let inner = Arc::new(Inner {
            state: Mutex::new(State {
                heap: BinaryHeap::new(),
                by_generation: HashMap::new(),
                newest: HashMap::new(),
                generation: 0,
                looks_at_ns: u64::MAX,
                stopping: false,
            }),
            wake: Condvar::new(),
        });
        let mut handles = Vec::with_capacity(threads);
        for n in 0..threads.max(1) {
            let (inner, fire) = (Arc::clone(&inner), Arc::clone(&fire));
            let run = move || {
                while let Some(key) = inner.next() {
                    fire(key);
                }
            };
            handles.push(
                std::thread::Builder::new()
                    .name(format!("timer-{n}"))
                    .spawn(run)?,
            );
        }
        Ok(Self {
            inner,
            threads: Mutex::new(handles),
        })
    }

    /// Arms or moves a timer.
    pub fn set(&self, key: K, at_ns: u64) {
        let mut state = self.inner.state.lock();
        state.generation += 1;
        let generation = state.generation;
        if let Some(old) = state.newest.insert(key.clone(), generation) {
            state.by_generation.remove(&old);
        }
        state.by_generation.insert(generation, key);
        state.heap.push(Reverse((at_ns, generation)));
        let sooner = at_ns < state.looks_at_ns;
        drop(state);
        // A thread that is woken for nothing takes a core from whoever armed this.
        if sooner {
            self.inner.wake.notify_one();
        }
    }

    /// Disarms a timer.
    pub fn clear(&self, key: &K) {
        let mut state = self.inner.state.lock();
        if let Some(old) = state.newest.remove(key) {
            state.by_generation.remove(&old);
        }
    }

    /// Timers armed.
    pub fn armed(&self) -> usize {
        self.inner.state.lock().newest.len()
    }

    /// Ends the threads; what is armed never fires.
    pub fn stop(&self) {
        self.inner.state.lock().stopping = true;
        self.inner.wake.notify_all();
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

impl<K: Eq + Hash + Clone> Inner<K> {
    /// Sleeps until a timer is due; `None` once stopped.
    fn next(&self) -> Option<K> {
        let mut state = self.state.lock();
        loop {
            if state.stopping {
                return None;
            }
            match state.heap.peek().copied() {
                None => {
                    state.looks_at_ns = u64::MAX;
                    self.wake.wait(&mut state);
                }
                Some(Reverse((_, generation)))
                    if !state.by_generation.contains_key(&generation) =>
                {
                    state.heap.pop();
                }
                Some(Reverse((at, generation))) => {
                    let now = now_ns();
                    if at > now {
                        state.looks_at_ns = at;
                        self.wake
                            .wait_for(&mut state, Duration::from_nanos(at - now));
                        continue;
                    }
                    state.heap.pop();
                    if let Some(key) = state.by_generation.remove(&generation) {
                        state.newest.remove(&key);
                        // Another thread may take the one after this.
                        self.wake.notify_one();
                        return Some(key);
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_moved_timer_fires_once_and_a_cleared_one_never() {
        let (tx, rx) = crossbeam_channel::unbounded();
        let timers = Timers::start(
            2,
            Arc::new(move |k: &'static str| {
                let _ = tx.send(k);
            }),
        )
        .unwrap();
        let now = now_ns();
        timers.set("late", now + 40_000_000);
        timers.set("moved", now + 1_000_000);
        timers.set("moved", now + 20_000_000);
        timers.set("cleared", now + 1_000_000);
        timers.clear(&"cleared");
        let wait = Duration::from_secs(5);
        assert_eq!(rx.recv_timeout(wait), Ok("moved"));
        assert!(now_ns() >= now + 20_000_000);
        assert_eq!(rx.recv_timeout(wait), Ok("late"));
        assert_eq!(timers.armed(), 0);
        timers.stop();
        assert!(rx.try_recv().is_err());
    }

    #[test]
    fn a_sooner_timer_wakes_who_sleeps_for_a_later_one_and_one_behind_a_cleared_one_still_fires() {
        let (tx, rx) = crossbeam_channel::unbounded();
        let fire = Arc::new(move |k: u32| {
            let _ = tx.send(k);
        });
        let timers = Timers::start(2, fire).unwrap();
        let (now, wait) = (now_ns(), Duration::from_secs(5));
        timers.set(1, now + 60_000_000_000);
        // Both threads sleep by now, at most until the timer a minute away.
        std::thread::sleep(Duration::from_millis(20));
        timers.set(2, now_ns() + 2_000_000);
        assert_eq!(rx.recv_timeout(wait), Ok(2));
        let soon = now_ns() + 30_000_000;
        timers.set(3, soon);
        std::thread::sleep(Duration::from_millis(5));
        timers.clear(&3);
        timers.set(4, soon + 10_000_000);
        assert_eq!(rx.recv_timeout(wait), Ok(4));
        timers.stop();
    }
}
