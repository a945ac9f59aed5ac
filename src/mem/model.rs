//! The ledger under every interleaving that a bounded search reaches: the same code as in the
//! product, with shuttle's lock in place of parking_lot's.

use std::collections::VecDeque;
use std::sync::Arc as StdArc;
use std::sync::atomic::{AtomicUsize as StdAtomic, Ordering as StdOrdering};
use std::time::{Duration, Instant};

use shuttle::sync::{Arc, Condvar, Mutex};

use super::ledger::{Ledger, Monitor, State};
use super::{MemError, Why};

/// A monitor whose waits give up after a bounded number of wake-ups, since a model has no clock.
struct Modelled<T> {
    value: Mutex<T>,
    changed: Condvar,
}

const PATIENCE: usize = 3;

impl<T> Monitor<T> for Modelled<T> {
    fn new(value: T) -> Self {
        Self {
            value: Mutex::new(value),
            changed: Condvar::new(),
        }
    }

    fn with<R>(&self, f: impl FnOnce(&mut T) -> R) -> R {
        f(&mut self.value.lock().unwrap())
    }

    fn until<R>(&self, _deadline: Instant, mut f: impl FnMut(&mut T, bool) -> Option<R>) -> R {
        let mut guard = self.value.lock().unwrap();
        for turn in 0.. {
            if let Some(r) = f(&mut guard, turn == PATIENCE) {
                return r;
            }
            guard = self.changed.wait(guard).unwrap();
        }
        unreachable!()
    }

    fn wake(&self) {
        self.changed.notify_all();
    }
}

type Modelee = Ledger<Modelled<State>>;

/// What a data race would look like: bytes stand in as counters of who is inside.
#[derive(Default)]
struct Inside {
    readers: StdAtomic,
    writers: StdAtomic,
}

impl Inside {
    fn read(&self) {
        self.readers.fetch_add(1, StdOrdering::SeqCst);
        assert_eq!(
            self.writers.load(StdOrdering::SeqCst),
            0,
            "a reader beside a writer"
        );
        shuttle::thread::yield_now();
        assert_eq!(
            self.writers.load(StdOrdering::SeqCst),
            0,
            "a writer came in beside a reader"
        );
        self.readers.fetch_sub(1, StdOrdering::SeqCst);
    }

    fn write(&self) {
        assert_eq!(
            self.writers.fetch_add(1, StdOrdering::SeqCst),
            0,
            "two writers"
        );
        assert_eq!(
            self.readers.load(StdOrdering::SeqCst),
            0,
            "a writer beside a reader"
        );
        shuttle::thread::yield_now();
        assert_eq!(
            self.readers.load(StdOrdering::SeqCst),
            0,
            "a reader came in beside a writer"
        );
        assert_eq!(self.writers.fetch_sub(1, StdOrdering::SeqCst), 1);
    }
}

fn never() -> Instant {
    Instant::now() + Duration::from_secs(3600)
}

/// Exhaustive where it is small enough, randomised with a fixed seed budget beyond.
fn search(name: &str, f: impl Fn() + Send + Sync + Copy + 'static) {
    let runs = StdArc::new(StdAtomic::new(0));
    let counted = runs.clone();
    let config = || {
        let mut c = shuttle::Config::new();
        c.max_steps = shuttle::MaxSteps::ContinueAfter(10_000);
        c
    };
    let dfs = shuttle::scheduler::DfsScheduler::new(Some(20_000), false);
    shuttle::Runner::new(dfs, config()).run(move || {
        counted.fetch_add(1, StdOrdering::Relaxed);
        f();
    });
    let random = shuttle::scheduler::PctScheduler::new_from_seed(0x6d6f_6f6e, 3, 2_000);
    shuttle::Runner::new(random, config()).run(f);
    println!(
        "{name}: {} interleavings depth-first, 2000 by priority",
        runs.load(StdOrdering::Relaxed)
    );
}

#[test]
fn leases_exclude_each_other_in_every_interleaving() {
    search("leases", || {
        let ledger = Arc::new(Modelee::new(2));
        let inside = StdArc::new([Inside::default(), Inside::default()]);
        let mut out = Vec::new();
        ledger.alloc(2, &mut out).unwrap();
        let reader = {
            let (ledger, inside) = (ledger.clone(), inside.clone());
            shuttle::thread::spawn(move || {
                if let Ok(set) = ledger.read(&[0, 1]) {
                    inside.iter().for_each(Inside::read);
                    ledger.end(set, false);
                }
            })
        };
        let downgrader = {
            let (ledger, inside) = (ledger.clone(), inside.clone());
            shuttle::thread::spawn(move || {
                if let Ok(set) = ledger.write(&[1]) {
                    inside[1].write();
                    ledger.downgrade(&set);
                    inside[1].read();
                    ledger.end(set, false);
                }
            })
        };
        if let Ok(set) = ledger.write(&[1, 0]) {
            inside.iter().for_each(Inside::write);
            ledger.end(set, true);
        }
        reader.join().unwrap();
        downgrader.join().unwrap();
        let s = ledger.stats();
        assert_eq!((s.read_leases, s.write_leases), (0, 0));
        ledger.end(ledger.write(&[0, 1]).expect("every lease has ended"), true);
    });
}

#[test]
fn waiting_neither_deadlocks_nor_breaks_exclusion() {
    search("waits", || {
        let ledger = Arc::new(Modelee::new(1));
        let inside = StdArc::new(Inside::default());
        ledger.alloc(1, &mut Vec::new()).unwrap();
        let writer = {
            let (ledger, inside) = (ledger.clone(), inside.clone());
            shuttle::thread::spawn(move || {
                if let Ok(set) = ledger.write_until(&[0], never()) {
                    inside.write();
                    ledger.end(set, true);
                }
            })
        };
        for _ in 0..2 {
            // A reader that stood back for a writer must be let in again once it is gone.
            if let Ok(set) = ledger.read_until(&[0], never()) {
                inside.read();
                ledger.end(set, false);
            }
        }
        writer.join().unwrap();
        ledger.end(ledger.read(&[0]).expect("no writer waits any more"), false);
    });
}

#[test]
fn a_freed_block_is_never_under_a_lease_and_a_quarantined_one_never_comes_back() {
    search("free and quarantine", || {
        let ledger = Arc::new(Modelee::new(2));
        let mut first = Vec::new();
        ledger.alloc(2, &mut first).unwrap();
        let (leased, doomed) = (first[0], first[1]);
        // The transport: leases both, uses them, lets go.
        let transport = {
            let ledger = ledger.clone();
            shuttle::thread::spawn(move || match ledger.write(&[leased, doomed]) {
                Ok(set) => {
                    let before = ledger.generation(leased).unwrap();
                    shuttle::thread::yield_now();
                    assert_eq!(
                        ledger.generation(leased).unwrap(),
                        before,
                        "reused under a lease"
                    );
                    assert_eq!(ledger.refs(leased).unwrap(), 1, "freed under a lease");
                    ledger.end(set, true);
                }
                Err(e) => assert!(
                    matches!(
                        e,
                        MemError::NotAllocated { .. }
                            | MemError::Quarantined { .. }
                            | MemError::Busy { .. }
                    ),
                    "{e}"
                ),
            })
        };
        // The owner: frees when it can and allocates again at once.
        let owner = {
            let ledger = ledger.clone();
            shuttle::thread::spawn(move || {
                let mut again = VecDeque::new();
                if ledger.release(&[leased]).is_ok() {
                    let mut out = Vec::new();
                    if ledger.alloc(1, &mut out).is_ok() {
                        assert_ne!(out[0], doomed, "a block that was never freed");
                        again.extend(out);
                    }
                }
                again
            })
        };
        assert_eq!(
            ledger
                .quarantine(&[doomed], Why::WriterNotDrained, |_| 10)
                .unwrap(),
            10
        );
        ledger.release(&[doomed]).unwrap();
        transport.join().unwrap();
        owner.join().unwrap();
        let mut rest = Vec::new();
        while ledger.alloc(1, &mut rest).is_ok() {}
        assert!(!rest.contains(&doomed));
        assert!(matches!(
            ledger.read(&[doomed]),
            Err(MemError::Quarantined { .. })
        ));
        let s = ledger.stats();
        assert_eq!(s.free + s.used + s.quarantined, s.total);
        assert_eq!((s.quarantined, s.quarantined_bytes), (1, 10));
    });
}
