//! Faults on purpose, for the demonstration's `--inject` and for tests: one named fault, at one
//! step, once. A daemon that was not started with one asks a question that is always answered "no".
//!
//! What fired is written to a file before it takes effect, for the victim may not live to tell.

use std::io::Write;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use rustix::process::{Signal, getpid, kill_process};

use crate::migrate::io::Step;

pub use crate::drive::step_name;

/// Name of the file in the deployment's directory, one JSON object a line.
pub const FIRED_FILE: &str = "fired.jsonl";

/// What goes wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Fault {
    /// A bit flips on the wire, below the transport's check.
    CorruptWire,
    /// A bit flips in what the source reads, above the wire check.
    CorruptSourceRead,
    /// A bit flips in destination memory before that page's verify.
    CorruptResidentEarly,
    /// A bit flips in destination memory after that page's verify.
    CorruptResidentLate,
    /// A bit flips in the control state on its way into the destination.
    CorruptControl,
    /// A message of an earlier attempt is replayed.
    StaleEpoch,
    /// A put into staging and a get's reply land after their epoch died.
    LateWrite,
    /// The source dies.
    KillSource,
    /// The destination dies.
    KillDestination,
    /// The coordinator dies.
    KillCoordinator,
    /// The coordinator stops and goes on later.
    PauseCoordinator,
    /// The store's answer to the commit is lost.
    DropCommitReply,
    /// The bulk path is slow.
    SlowLink,
    /// The slots that go ahead of the push are lost on the way.
    LoseAhead,
    /// A bit flips in the slots that go ahead of the push.
    CorruptAhead,
    /// Slots of other attempts arrive before those that go ahead of the push.
    StaleAhead,
}

impl Fault {
    /// All of them, in the order of the documentation.
    pub const ALL: [Self; 16] = [
        Self::CorruptWire,
        Self::CorruptSourceRead,
        Self::CorruptResidentEarly,
        Self::CorruptResidentLate,
        Self::CorruptControl,
        Self::StaleEpoch,
        Self::LateWrite,
        Self::KillSource,
        Self::KillDestination,
        Self::KillCoordinator,
        Self::PauseCoordinator,
        Self::DropCommitReply,
        Self::SlowLink,
        Self::LoseAhead,
        Self::CorruptAhead,
        Self::StaleAhead,
    ];

    /// As the command line spells it.
    pub fn name(self) -> &'static str {
        match self {
            Self::CorruptWire => "corrupt-wire",
            Self::CorruptSourceRead => "corrupt-source-read",
            Self::CorruptResidentEarly => "corrupt-resident-early",
            Self::CorruptResidentLate => "corrupt-resident-late",
            Self::CorruptControl => "corrupt-control",
            Self::StaleEpoch => "stale-epoch",
            Self::LateWrite => "late-write",
            Self::KillSource => "kill-source",
            Self::KillDestination => "kill-destination",
            Self::KillCoordinator => "kill-coordinator",
            Self::PauseCoordinator => "pause-coordinator",
            Self::DropCommitReply => "drop-commit-reply",
            Self::SlowLink => "slow-link",
            Self::LoseAhead => "lose-ahead",
            Self::CorruptAhead => "corrupt-ahead",
            Self::StaleAhead => "stale-ahead",
        }
    }

    /// The steps at which it can fire; which one is drawn by the seed.
    pub fn steps(self) -> &'static [Step] {
        use Step::*;
        match self {
            Self::CorruptWire | Self::CorruptSourceRead | Self::CorruptResidentEarly => &[Stream],
            Self::CorruptResidentLate => &[Stream],
            Self::CorruptControl => &[ImportTail],
            Self::StaleEpoch => &[Reserve, Stream, CopyTail],
            Self::LateWrite => &[Stream],
            Self::KillSource => &[Prepare, Stream, Fence, CopyTail, Resume, Gc],
            Self::KillDestination => &[Reserve, Stream, ImportTail, Verify, Arm, Commit, Resume],
            Self::KillCoordinator | Self::PauseCoordinator => &[Prepare, Reserve, Stream, Fence],
            Self::DropCommitReply => &[Commit],
            Self::SlowLink => &[Stream],
            Self::LoseAhead | Self::CorruptAhead | Self::StaleAhead => &[CopyTail],
        }
    }
}

impl Fault {
    /// The step that a seed draws: every step once in each run of as many seeds as there are steps,
    /// in an order drawn anew for each such run, so that few seeds in a row reach all of them.
    pub fn step_of(self, seed: u64) -> Step {
        let steps = self.steps();
        let n = steps.len() as u64;
        let turn = draw((seed / n) ^ 0xfa17) % n;
        steps[((seed % n + turn) % n) as usize]
    }
}

/// One fault at one step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Plan {
    /// Which.
    pub fault: Fault,
    /// When.
    pub step: Step,
    /// Draws the bit, the page, the length.
    pub seed: u64,
}

impl FromStr for Plan {
    type Err = String;
    /// `NAME@STEP:SEED`
    fn from_str(s: &str) -> Result<Self, String> {
        let bad = || format!("{s:?} is not NAME@STEP:SEED");
        let (name, rest) = s.split_once('@').ok_or_else(bad)?;
        let (step, seed) = rest.split_once(':').ok_or_else(bad)?;
        Ok(Self {
            fault: Fault::ALL
                .into_iter()
                .find(|f| f.name() == name)
                .ok_or_else(bad)?,
            step: Step::ALL
                .into_iter()
                .find(|s| step_name(*s) == step)
                .ok_or_else(bad)?,
            seed: seed.parse().map_err(|_| bad())?,
        })
    }
}

impl std::fmt::Display for Plan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{}@{}:{}",
            self.fault.name(),
            step_name(self.step),
            self.seed
        )
    }
}

/// The faults of one daemon.
#[derive(Debug, Default)]
pub struct Faults {
    /// What is to go wrong next, until it does.
    plan: Mutex<Option<Plan>>,
    /// Whether there is a plan: the question that a product's run asks, without the lock.
    armed: AtomicBool,
    /// What went wrong last.
    last: Mutex<Option<Fault>>,
    /// Whether further faults may be asked for while it runs.
    open: bool,
    who: String,
    log: Option<PathBuf>,
}

impl Faults {
    /// Of daemon `who`; `dir` is where it writes what fired. With `open`, [`Faults::arm`] takes
    /// further ones.
    pub fn new(plan: Option<Plan>, open: bool, who: String, dir: &std::path::Path) -> Self {
        let log = (open || plan.is_some()).then(|| dir.join(FIRED_FILE));
        Self {
            plan: Mutex::new(plan),
            armed: AtomicBool::new(plan.is_some()),
            last: Mutex::new(None),
            open,
            who,
            log,
        }
    }

    /// Plans the next fault in place of one that has not fired; `false` where this daemon was not
    /// started to take any.
    pub fn arm(&self, plan: Option<Plan>) -> bool {
        if self.open {
            *self.last.lock() = None;
            *self.plan.lock() = plan;
            self.armed.store(plan.is_some(), Ordering::SeqCst);
        }
        self.open
    }

    /// Whether this is the moment of `fault`; `Some(seed)` once, and it is written down.
    pub fn due(&self, fault: Fault, step: Step) -> Option<u64> {
        if !self.armed.load(Ordering::Relaxed) {
            return None;
        }
        let plan = {
            let mut planned = self.plan.lock();
            let plan = planned.filter(|p| p.fault == fault && p.step == step)?;
            *planned = None;
            self.armed.store(false, Ordering::SeqCst);
            *self.last.lock() = Some(fault);
            plan
        };
        self.write(plan);
        Some(plan.seed)
    }

    /// Whether `fault` may happen here, now or after a later [`Faults::arm`]: what needs preparing is
    /// prepared for it.
    pub fn possible(&self, fault: Fault) -> bool {
        self.open || self.planned(fault)
    }

    /// Whether `fault` is planned and has not fired.
    pub fn planned(&self, fault: Fault) -> bool {
        self.plan.lock().is_some_and(|p| p.fault == fault)
    }

    fn write(&self, plan: Plan) {
        tracing::warn!(
            fault = plan.fault.name(),
            at = step_name(plan.step),
            "injected fault fires"
        );
        self.line(&serde_json::json!({
            "fault": plan.fault.name(), "by": self.who, "at_step": step_name(plan.step),
        }));
    }

    /// Whether `fault` was the last to fire, and nothing was planned since.
    pub fn has_fired(&self, fault: Fault) -> bool {
        *self.last.lock() == Some(fault)
    }

    /// Writes down an effect that must never happen.
    pub fn escaped(&self, what: &str) {
        tracing::error!(what, "an injected fault had an effect");
        self.line(&serde_json::json!({ "by": self.who, "at_step": "", "escaped": what }));
    }

    fn line(&self, line: &serde_json::Value) {
        let Some(log) = &self.log else { return };
        let file = std::fs::File::options().create(true).append(true).open(log);
        if let Err(error) = file.and_then(|mut f| f.write_all(format!("{line}\n").as_bytes())) {
            tracing::error!(%error, "cannot write what fired");
        }
    }

    /// Dies here, if that is the plan: no destructor runs, as after a power cut of one process.
    pub fn maybe_die(&self, fault: Fault, step: Step) {
        if self.due(fault, step).is_some() {
            let _ = kill_process(getpid(), Signal::KILL);
            // The signal is on its way; nothing may happen meanwhile.
            loop {
                std::thread::park();
            }
        }
    }

    /// Stops here until somebody sends SIGCONT, if that is the plan.
    pub fn maybe_pause(&self, fault: Fault, step: Step) {
        if self.due(fault, step).is_some() {
            let _ = kill_process(getpid(), Signal::STOP);
        }
    }
}

/// Flips one bit that `seed` draws.
pub fn flip(bytes: &mut [u8], seed: u64) {
    if let Some(bits) = (bytes.len() as u64 * 8).checked_sub(1) {
        let bit = draw(seed) % (bits + 1);
        bytes[(bit / 8) as usize] ^= 1 << (bit % 8);
    }
}

/// A well-spread number from a seed (SplitMix64).
pub fn draw(seed: u64) -> u64 {
    let mut z = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plan_survives_text_and_every_fault_has_a_step() {
        for fault in Fault::ALL {
            for step in fault.steps() {
                let plan = Plan {
                    fault,
                    step: *step,
                    seed: 9,
                };
                assert_eq!(plan.to_string().parse(), Ok(plan));
            }
        }
        assert!("kill-source@NOWHERE:1".parse::<Plan>().is_err());
    }

    #[test]
    fn few_seeds_in_a_row_reach_every_step_wherever_they_begin() {
        for fault in Fault::ALL {
            let steps = fault.steps();
            for first in [0, 1, 17, 1000, 123_456] {
                let row = first..first + 2 * steps.len() as u64 - 1;
                let hit: Vec<Step> = row.map(|seed| fault.step_of(seed)).collect();
                assert!(
                    steps.iter().all(|s| hit.contains(s)),
                    "{fault:?} from {first}"
                );
            }
            // Seeds that nobody chose in a row do as well, within the fifty of a sweep.
            let hit: Vec<Step> = (0..50).map(|n| fault.step_of(draw(n))).collect();
            assert!(steps.iter().all(|s| hit.contains(s)), "{fault:?} at random");
        }
    }

    #[test]
    fn a_fault_fires_once_at_its_step_and_is_written_down_first() {
        let dir = tempfile::tempdir().unwrap();
        let plan = "corrupt-control@IMPORT-TAIL:5".parse().unwrap();
        let faults = Faults::new(Some(plan), false, "w1".into(), dir.path());
        assert_eq!(faults.due(Fault::CorruptControl, Step::Stream), None);
        assert_eq!(faults.due(Fault::KillSource, Step::ImportTail), None);
        assert_eq!(faults.due(Fault::CorruptControl, Step::ImportTail), Some(5));
        assert_eq!(faults.due(Fault::CorruptControl, Step::ImportTail), None);
        assert!(faults.has_fired(Fault::CorruptControl));
        assert!(!faults.arm(Some(plan)), "it was not started to take any");
        let log = std::fs::read_to_string(dir.path().join(FIRED_FILE)).unwrap();
        let v: serde_json::Value = serde_json::from_str(log.trim()).unwrap();
        assert_eq!(
            (v["by"].as_str(), v["at_step"].as_str()),
            (Some("w1"), Some("IMPORT-TAIL"))
        );
    }

    #[test]
    fn a_daemon_started_for_it_takes_one_fault_after_another() {
        let dir = tempfile::tempdir().unwrap();
        let faults = Faults::new(None, true, "w1".into(), dir.path());
        assert!(faults.possible(Fault::SlowLink) && !faults.planned(Fault::SlowLink));
        for seed in 1..=3 {
            let text = format!("slow-link@STREAM:{seed}");
            assert!(faults.arm(text.parse().ok()));
            assert!(!faults.has_fired(Fault::SlowLink));
            assert_eq!(faults.due(Fault::SlowLink, Step::Stream), Some(seed));
            assert!(faults.has_fired(Fault::SlowLink));
        }
        assert!(faults.arm("slow-link@STREAM:4".parse().ok()) && faults.arm(None));
        assert_eq!(faults.due(Fault::SlowLink, Step::Stream), None);
    }

    #[test]
    fn a_flip_changes_exactly_one_bit() {
        for seed in 0..50 {
            let mut bytes = [0u8; 37];
            flip(&mut bytes, seed);
            assert_eq!(bytes.iter().map(|b| b.count_ones()).sum::<u32>(), 1);
        }
        flip(&mut [], 1);
    }
}
