//! Adapters that break one promise each: the proof that every clause can fail.
//!
//! A [`Fault`] wraps a good engine and does one thing wrong, the way a hasty adapter would. It works
//! through the contract and the pool only, so any engine that passes the suite can be spoiled.

use super::Pair;
use super::bad::Spoilt;

macro_rules! faults {
    ($($(#[$doc:meta])* $name:ident => $clause:literal,)*) => {
        /// One way to break the contract.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum Fault {
            $($(#[$doc])* $name,)*
        }

        impl Fault {
            /// All of them, one per clause.
            pub const ALL: &[Self] = &[$(Self::$name),*];

            /// The clause that must see it.
            pub fn clause(self) -> &'static str {
                match self {
                    $(Self::$name => $clause,)*
                }
            }
        }
    };
}
faults! {
    /// Reports a boundary and lets the request run on.
    HoldLetsGo => "hold-is-a-step-boundary",
    /// Gives back the request's blocks while it is held.
    HoldFrees => "hold-frees-nothing",
    /// A released request stays out of every batch.
    ReleaseForgets => "release-resumes-identically",
    /// A pin holds no longer than its request.
    PinEndsWithRequest => "pin-outlives-the-request",
    /// The watermark is what was accepted, not what was written.
    WatermarkAhead => "watermark-is-device-complete",
    /// A sealed slot is written once more.
    SealedRewritten => "sealed-slots-stay",
    /// A rewrite is not reported.
    DirtHidden => "rewrite-raises-dirty",
    /// Pages come in the order of their blocks, not of their positions.
    PagesByBlock => "pages-by-position",
    /// Slots past the end are hashed with the page.
    HashesWholePages => "valid-tokens-only",
    /// Each export counts up.
    ControlDrifts => "control-is-frozen",
    /// Retiring stops whatever runs.
    RetireRunning => "retire-needs-a-hold",
    /// Arming makes the request runnable.
    ArmRuns => "stage-is-unreachable",
    /// A digest is kept from the first time it was asked for.
    DigestsCached => "digests-read-resident-memory",
    /// A frozen slot may be written after all.
    FreezeBypassed => "hashed-slots-are-frozen",
    /// Slots whose digests were taken back count as hashed.
    ReopenedCountsAsHashed => "reopened-slots-are-hashed-anew",
    /// The table is another one after the commit.
    CommitReorders => "table-survives-commit",
    /// A token that contradicts the log is taken for a repeat.
    LogConflictsIgnored => "token-log-is-exact",
    /// The imported generator has drawn once more.
    ControlMangled => "control-is-re-exported",
    /// Hashes by itself whatever the verifier has left out.
    ArmHashesItself => "arm-needs-digests",
    /// Takes the control state's word for what the replay would say.
    ArmTrusts => "arm-checks-the-replay",
    /// Each activation starts the request.
    ActivatesAgain => "activate-once",
    /// Keeps the imported bytes to show, and runs with another seed.
    ControlEchoed => "continues-identically",
    /// Every profile is as good as its own.
    ProfileIgnored => "mismatch-is-refused",
    /// The epoch is looked at by nobody.
    EpochIgnored => "lower-epochs-are-refused",
    /// A repeat with other arguments is the first call again.
    KeyIgnored => "taking-is-keyed",
    /// Aborting an import keeps its blocks.
    AbortLeaks => "giving-back-is-complete",
    /// An import cannot be aborted while a transfer is under way.
    AbortWaitsForLeases => "leases-outlive-their-stage",
    /// Any request can be held.
    HoldsAnything => "no-output-is-refused",
    /// Recomputed KV is called verified.
    RebuildBoasts => "rebuild-is-honest",
    /// What is not here is said to be busy.
    UnknownIsBusy => "unknown-is-typed",
}

impl Fault {
    /// Both engines of a pair, with this fault.
    pub fn spoil(self, pair: Pair) -> Pair {
        Pair {
            source: Box::new(Spoilt::new(pair.source, self)),
            destination: Box::new(Spoilt::new(pair.destination, self)),
        }
    }
}
