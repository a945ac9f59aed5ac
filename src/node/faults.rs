//! Faults on purpose, for the demonstration's `--inject` and for tests: one named fault, at one
//! step, once. A daemon that was not started with one asks a question that is always answered "no".
//!
//! What fired is written to a file before it takes effect, for the victim may not live to tell.

use std::io::Write;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::process::{Signal, getpid, kill_process};

use crate::migrate::io::Step;

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
}

impl Fault {
    /// All of them, in the order of the documentation.
    pub const ALL: [Self; 13] = [
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
        }
    }
}

/// A step as reports spell it.
pub fn step_name(step: Step) -> &'static str {
    match step {
        Step::Prepare => "PREPARE",
        Step::Reserve => "RESERVE",
        Step::Stream => "STREAM",
        Step::Fence => "FENCE",
        Step::CopyTail => "COPY-TAIL",
        Step::ImportTail => "IMPORT-TAIL",
        Step::Verify => "VERIFY",
        Step::Arm => "ARM",
        Step::Commit => "COMMIT",
        Step::Resume => "RESUME",
        Step::Gc => "GC",
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
    plan: Option<Plan>,
    fired: AtomicBool,
    who: String,
    log: Option<PathBuf>,
}

impl Faults {
    /// Of daemon `who`; `dir` is where it writes what fired.
    pub fn new(plan: Option<Plan>, who: String, dir: &std::path::Path) -> Self {
        let log = plan.is_some().then(|| dir.join(FIRED_FILE));
        Self {
            plan,
            fired: AtomicBool::new(false),
            who,
            log,
        }
    }

    /// Whether this is the moment of `fault`; `Some(seed)` once, and it is written down.
    pub fn due(&self, fault: Fault, step: Step) -> Option<u64> {
        let plan = self.plan.filter(|p| p.fault == fault && p.step == step)?;
        if self.fired.swap(true, Ordering::SeqCst) {
            return None;
        }
        self.write(plan);
        Some(plan.seed)
    }

    /// The seed of `fault`, whatever the step, without firing: for faults that change a setting.
    pub fn planned(&self, fault: Fault) -> Option<u64> {
        self.plan.filter(|p| p.fault == fault).map(|p| p.seed)
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

    /// Whether it has fired.
    pub fn has_fired(&self) -> bool {
        self.fired.load(Ordering::SeqCst)
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
    fn a_fault_fires_once_at_its_step_and_is_written_down_first() {
        let dir = tempfile::tempdir().unwrap();
        let plan = "corrupt-control@IMPORT-TAIL:5".parse().unwrap();
        let faults = Faults::new(Some(plan), "w1".into(), dir.path());
        assert_eq!(faults.due(Fault::CorruptControl, Step::Stream), None);
        assert_eq!(faults.due(Fault::KillSource, Step::ImportTail), None);
        assert_eq!(faults.due(Fault::CorruptControl, Step::ImportTail), Some(5));
        assert_eq!(faults.due(Fault::CorruptControl, Step::ImportTail), None);
        let log = std::fs::read_to_string(dir.path().join(FIRED_FILE)).unwrap();
        let v: serde_json::Value = serde_json::from_str(log.trim()).unwrap();
        assert_eq!(
            (v["by"].as_str(), v["at_step"].as_str()),
            (Some("w1"), Some("IMPORT-TAIL"))
        );
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
