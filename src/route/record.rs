//! The route record's types and its transitions.

use super::mutants::mutant;
use crate::id::{MigrationEpoch, OwnerEpoch, RequestId, RouteGeneration, WorkerRef};

/// The digest of the decode-control state, compared field by field.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ControlSeal {
    /// `SHA-256(ControlStateV1)[..16]`.
    pub hash: [u8; 16],
    /// Output tokens numbered at the fence (the seal).
    pub offset: u64,
    /// Epoch of the exporting owner.
    pub owner_epoch: OwnerEpoch,
}

/// What the source promises at the fence; the destination may commit only while holding it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct FenceCertificate {
    /// Which request.
    pub request: RequestId,
    /// Which attempt.
    pub migration_epoch: MigrationEpoch,
    /// The source's right to append, which the flip ends.
    pub owner_epoch: OwnerEpoch,
    /// The fenced source, this life of it.
    pub src: WorkerRef,
    /// Output tokens numbered, counted from 1; the destination's first new token is `seal + 1`.
    pub seal: u64,
    /// Tokens with KV: `prompt + seal - 1`.
    pub kv_len: u64,
    /// The running set digest over all of the request's pages, tail included.
    pub set_digest: [u8; 32],
    /// The digest of the decode-control state at the fence.
    pub control: ControlSeal,
}

/// One undecided attempt to migrate, as it stands in the record.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Intent {
    /// Which attempt.
    pub migration_epoch: MigrationEpoch,
    /// The record's generation that carries this intent; only a later one is evidence about it.
    pub generation: RouteGeneration,
    /// The owner's epoch, which a commit ends.
    pub owner_epoch: OwnerEpoch,
    /// Nonce of the coordinator that wrote it: tells its own intent from a rival's.
    pub driver: u64,
    /// The owner, this life of it.
    pub src: WorkerRef,
    /// Who may commit, this life of it.
    pub dst: WorkerRef,
}

/// How the present owner epoch came about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Origin {
    /// The gateway admitted the request.
    Admitted,
    /// This attempt committed.
    Migrated(MigrationEpoch),
    /// A recovery moved the request.
    Recovered,
}

/// Life of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RoutePhase {
    /// The owner may append tokens.
    Serving,
    /// The named owner is rebuilding from the journal; nobody may append.
    Recovering,
    /// The stream ended; nobody may append again.
    Finished,
}

/// Who moved to abort.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Party {
    /// The intent's source.
    Source,
    /// The intent's destination.
    Destination,
    /// A coordinator, any.
    Coordinator,
}

/// Why an attempt was given up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Cause {
    /// Somebody asked.
    Cancelled,
    /// A step's deadline passed.
    Timeout,
    /// The source would not (pin, seal or hold refused).
    SourceRefused,
    /// The destination would not (capabilities, attach or arm refused).
    DestinationRefused,
    /// The destination has no free pages.
    NoSpace,
    /// A page in destination memory differs from its claim, after all retries.
    PageMismatch,
    /// The final set digest differs.
    SetMismatch,
    /// The control state re-exported by the destination differs.
    ControlMismatch,
    /// A slot below the seal watermark was rewritten.
    SealDirty,
    /// The request ended by itself first.
    RequestEnded,
    /// The bulk transfer failed.
    TransportFailed,
    /// Engine builds or numerics do not fit.
    ProfileMismatch,
    /// The other worker is gone.
    PeerLost,
    /// The worker is being drained and this attempt is in the way.
    Draining,
    /// The engine reported a failure.
    Engine,
}

/// How one attempt ended.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// The destination owns the request since; the certificate it committed with.
    Committed(FenceCertificate),
    /// The source went on.
    Aborted {
        /// Who decided.
        by: Party,
        /// Why.
        cause: Cause,
    },
    /// A recovery or the end of the stream took the record past the intent.
    Superseded,
}

/// The latest decision, kept in the record.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Decision {
    /// Of which attempt.
    pub migration_epoch: MigrationEpoch,
    /// How it ended.
    pub outcome: Outcome,
}

/// The record of one request.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct RouteRecord {
    /// Which request.
    pub request: RequestId,
    /// + 1 at every write.
    pub generation: RouteGeneration,
    /// Who may append tokens (once `phase` is `Serving`).
    pub owner: WorkerRef,
    /// The right to append; tokens carry it.
    pub owner_epoch: OwnerEpoch,
    /// How `owner_epoch` came about.
    pub origin: Origin,
    /// Life of the request.
    pub phase: RoutePhase,
    /// The highest attempt ever begun.
    pub migration_epoch: MigrationEpoch,
    /// The undecided attempt, if any.
    pub intent: Option<Intent>,
    /// The latest decision, if any.
    pub last: Option<Decision>,
}

/// One write of the record.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum RouteOp {
    /// Begin an attempt.
    Prepare {
        /// Must continue the record it is applied to (see [`RouteRecord::next_intent`]).
        intent: Intent,
    },
    /// Flip the route. Only by the destination, which alone knows that it verified.
    Commit {
        /// The committing worker.
        by: WorkerRef,
        /// What it verified against.
        certificate: FenceCertificate,
    },
    /// Give up an attempt.
    Abort {
        /// Which.
        migration_epoch: MigrationEpoch,
        /// Who decides.
        by: Party,
        /// Why.
        cause: Cause,
    },
    /// Move a request whose owner is believed dead; nobody may append until it is rebuilt.
    BeginRecovery {
        /// The epoch whose owner is believed dead.
        expect: OwnerEpoch,
        /// Who shall rebuild it.
        target: WorkerRef,
    },
    /// The rebuilt request may run.
    CompleteRecovery {
        /// The rebuilding worker.
        by: WorkerRef,
        /// The epoch given at `BeginRecovery`.
        owner_epoch: OwnerEpoch,
    },
    /// The stream ended.
    Finish {
        /// Epoch of the last accepted token.
        expect: OwnerEpoch,
    },
}

/// Why a write does not apply to this record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
pub enum Refused {
    /// Another attempt is undecided: abort it or wait.
    #[error("another migration attempt is undecided")]
    IntentPending,
    /// The named attempt is not the undecided one: it was decided already.
    #[error("that migration attempt is not the undecided one")]
    NotPending,
    /// The acting worker, or this life of it, is not the one the record names.
    #[error("the acting worker or incarnation is not the one the record names")]
    WrongWorker,
    /// An owner epoch does not match.
    #[error("the owner epoch does not match")]
    WrongOwnerEpoch,
    /// The destination already owns the request.
    #[error("the destination already owns the request")]
    DestinationIsOwner,
    /// The request is recovering or finished.
    #[error("the request is not in the phase this write needs")]
    WrongPhase,
    /// The write was built on another version of the record.
    #[error("the write does not continue this record")]
    NotNext,
}

/// What a record says about one intent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Verdict {
    /// The record is older than the intent: no evidence at all.
    NotYet,
    /// Still undecided: no evidence either.
    Pending,
    /// Committed: the intent's destination owns the request.
    Committed,
    /// Aborted: the intent's source still owns the request.
    Aborted,
    /// Neither may go on: a recovery, the end of the stream or a later flip took over.
    Superseded,
}

/// Equality of two lives of workers: name *and* incarnation.
pub(crate) fn same_worker(a: &WorkerRef, b: &WorkerRef) -> bool {
    a.id == b.id
        && mutant!(
            "compare-omits-incarnation",
            a.incarnation == b.incarnation,
            true
        )
}

impl RouteRecord {
    /// The record of a request just admitted to `owner`; its first owner epoch is 1.
    pub fn admitted(request: RequestId, owner: WorkerRef) -> Self {
        Self {
            request,
            generation: RouteGeneration(1),
            owner,
            owner_epoch: OwnerEpoch(1),
            origin: Origin::Admitted,
            phase: RoutePhase::Serving,
            migration_epoch: MigrationEpoch(0),
            intent: None,
            last: None,
        }
    }

    /// The intent that would move this record's request to `dst`.
    pub fn next_intent(&self, dst: WorkerRef, driver: u64) -> Intent {
        Intent {
            migration_epoch: self.migration_epoch.next(),
            generation: self.generation.next(),
            owner_epoch: self.owner_epoch,
            driver,
            src: self.owner.clone(),
            dst,
        }
    }

    /// Whether `attempt` is the undecided one.
    pub fn is_pending(&self, attempt: MigrationEpoch) -> bool {
        self.intent.as_ref().is_some_and(|i| {
            mutant!(
                "compare-omits-migration-epoch",
                i.migration_epoch == attempt,
                true
            )
        })
    }

    /// Whether tokens of `worker` under `epoch` may be appended.
    pub fn may_append(&self, worker: &WorkerRef, epoch: OwnerEpoch) -> bool {
        self.phase == RoutePhase::Serving
            && self.owner_epoch == epoch
            && same_worker(&self.owner, worker)
    }

    /// What this record says about `intent`. Only a *later* generation can be evidence.
    pub fn verdict(&self, intent: &Intent) -> Verdict {
        if self.generation < intent.generation {
            return Verdict::NotYet;
        }
        if self.is_pending(intent.migration_epoch) || self.generation == intent.generation {
            return Verdict::Pending;
        }
        let serving = self.phase == RoutePhase::Serving;
        if serving && self.origin == Origin::Migrated(intent.migration_epoch) {
            Verdict::Committed
        } else if serving && self.owner_epoch == intent.owner_epoch {
            Verdict::Aborted
        } else {
            Verdict::Superseded
        }
    }

    /// The record after `op`, or why `op` does not apply. The caller writes the result with a
    /// compare-and-swap on the revision it read `self` at.
    pub fn apply(&self, op: &RouteOp) -> Result<Self, Refused> {
        let mut next = self.clone();
        next.generation = self.generation.next();
        match op {
            RouteOp::Prepare { intent } => {
                self.check_prepare(intent)?;
                next.migration_epoch = intent.migration_epoch;
                next.intent = Some(intent.clone());
            }
            RouteOp::Commit { by, certificate } => {
                let intent = self.check_commit(by, certificate)?;
                next.owner = by.clone();
                next.owner_epoch = self.owner_epoch.next();
                next.origin = Origin::Migrated(intent.migration_epoch);
                next.decide(Outcome::Committed(certificate.clone()));
            }
            RouteOp::Abort {
                migration_epoch,
                by,
                cause,
            } => {
                if !self.is_pending(*migration_epoch) {
                    return Err(Refused::NotPending);
                }
                next.generation = mutant!(
                    "abort-leaves-revision",
                    self.generation.next(),
                    self.generation
                );
                next.decide(Outcome::Aborted {
                    by: *by,
                    cause: *cause,
                });
            }
            RouteOp::BeginRecovery { expect, target } => {
                if self.phase == RoutePhase::Finished {
                    return Err(Refused::WrongPhase);
                }
                if self.owner_epoch != *expect {
                    return Err(Refused::WrongOwnerEpoch);
                }
                next.owner = target.clone();
                next.owner_epoch = self.owner_epoch.next();
                next.origin = Origin::Recovered;
                next.phase = RoutePhase::Recovering;
                next.decide(Outcome::Superseded);
            }
            RouteOp::CompleteRecovery { by, owner_epoch } => {
                if self.phase != RoutePhase::Recovering {
                    return Err(Refused::WrongPhase);
                }
                if self.owner_epoch != *owner_epoch {
                    return Err(Refused::WrongOwnerEpoch);
                }
                if !same_worker(&self.owner, by) {
                    return Err(Refused::WrongWorker);
                }
                next.phase = RoutePhase::Serving;
            }
            RouteOp::Finish { expect } => {
                if self.phase == RoutePhase::Finished {
                    return Err(Refused::WrongPhase);
                }
                if self.owner_epoch != *expect {
                    return Err(Refused::WrongOwnerEpoch);
                }
                next.phase = RoutePhase::Finished;
                next.decide(Outcome::Superseded);
            }
        }
        Ok(next)
    }

    /// Ends the undecided attempt, if there is one.
    fn decide(&mut self, outcome: Outcome) {
        if let Some(intent) = self.intent.take() {
            self.last = Some(Decision {
                migration_epoch: intent.migration_epoch,
                outcome,
            });
        }
    }

    fn check_prepare(&self, intent: &Intent) -> Result<(), Refused> {
        if self.phase != RoutePhase::Serving {
            return Err(Refused::WrongPhase);
        }
        if self.intent.is_some() {
            return Err(Refused::IntentPending);
        }
        if !same_worker(&intent.src, &self.owner) {
            return Err(Refused::WrongWorker);
        }
        if intent.owner_epoch != self.owner_epoch {
            return Err(Refused::WrongOwnerEpoch);
        }
        if intent.dst.id == self.owner.id {
            return Err(Refused::DestinationIsOwner);
        }
        if intent.migration_epoch != self.migration_epoch.next()
            || intent.generation != self.generation.next()
        {
            return Err(Refused::NotNext);
        }
        Ok(())
    }

    fn check_commit(&self, by: &WorkerRef, cert: &FenceCertificate) -> Result<&Intent, Refused> {
        if !self.is_pending(cert.migration_epoch) {
            return Err(Refused::NotPending);
        }
        let intent = self.intent.as_ref().ok_or(Refused::NotPending)?;
        if cert.request != self.request
            || !same_worker(&intent.dst, by)
            || !same_worker(&intent.src, &cert.src)
        {
            return Err(Refused::WrongWorker);
        }
        if cert.owner_epoch != self.owner_epoch || intent.owner_epoch != self.owner_epoch {
            return Err(Refused::WrongOwnerEpoch);
        }
        Ok(intent)
    }
}
