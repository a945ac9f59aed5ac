//! The decision of one attempt, as one party pursues it: the same code for the source, the
//! destination and every coordinator.
//!
//! The rules it keeps, and the only place that keeps them:
//! - evidence is a record whose generation is *later* than the intent's and in which the intent is
//!   no longer pending; an unchanged record is none, and neither is a lost reply;
//! - a compare-and-swap without a reply may have taken place, or still take place: read, and try
//!   again on what was read;
//! - a party that wants an abort (or a commit) goes on trying until there is evidence of a decision,
//!   its own or another's.

use std::hash::{Hash, Hasher};

use super::io::{Action, Op, StoreReply, Timer, TimerKind};
use crate::id::{MigrationEpoch, WorkerRef};
use crate::route::mutants::mutant;
use crate::route::{Cause, FenceCertificate, Intent, Party, RouteOp, Verdict, Versioned};

/// Numbers a party's actions within one attempt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ops {
    epoch: MigrationEpoch,
    n: u32,
}

/// As for [`Op`]: how many were numbered says nothing of what comes.
impl Hash for Ops {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.epoch.hash(state);
    }
}

impl Ops {
    /// Numbers from 1 for this attempt.
    pub fn new(epoch: MigrationEpoch) -> Self {
        Self { epoch, n: 0 }
    }

    /// The next idempotency key.
    #[allow(
        clippy::should_implement_trait,
        reason = "an endless supply, not a sequence to walk"
    )]
    pub fn next(&mut self) -> Op {
        self.n += 1;
        Op {
            epoch: self.epoch,
            n: self.n,
        }
    }
}

/// What a party wants of the record.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Want {
    Know,
    Abort(Cause),
    Commit {
        by: WorkerRef,
        certificate: Box<FenceCertificate>,
    },
}

/// One party's pursuit of the decision about one intent.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Pursuit {
    intent: Intent,
    party: Party,
    want: Want,
    /// The newest version seen in which the intent is pending.
    known: Option<Box<Versioned>>,
    waiting: Option<Op>,
    /// Asked to look again while an answer was awaited that may be older than the request.
    again: bool,
}

impl Pursuit {
    /// Begins without wanting more than to know.
    pub fn new(intent: Intent, party: Party) -> Self {
        Self {
            intent,
            party,
            want: Want::Know,
            known: None,
            waiting: None,
            again: false,
        }
    }

    /// Begins with a version in which the intent is known to be pending.
    pub fn from_known(intent: Intent, party: Party, known: Versioned) -> Self {
        Self {
            known: Some(Box::new(known)),
            ..Self::new(intent, party)
        }
    }

    /// The intent this is about.
    pub fn intent(&self) -> &Intent {
        &self.intent
    }

    /// Whether this party moves to abort.
    pub fn wants_abort(&self) -> bool {
        matches!(self.want, Want::Abort(_))
    }

    /// Whether this party moves to commit.
    pub fn wants_commit(&self) -> bool {
        matches!(self.want, Want::Commit { .. })
    }

    /// Why this party moves to abort, if it does.
    pub fn cause(&self) -> Option<Cause> {
        match self.want {
            Want::Abort(cause) => Some(cause),
            _ => None,
        }
    }

    /// Look at the record (again).
    pub fn look<A>(&mut self, ops: &mut Ops, out: &mut Vec<Action<A>>) {
        if self.waiting.is_some() {
            self.again = true;
        } else {
            if self.want == Want::Know {
                self.known = None;
            }
            self.drive(ops, out);
        }
    }

    /// Move to abort, for the first cause given. A party that moves to commit does not turn back.
    /// Says whether this call changed anything.
    pub fn abort<A>(&mut self, cause: Cause, ops: &mut Ops, out: &mut Vec<Action<A>>) -> bool {
        if self.want != Want::Know {
            return false;
        }
        self.want = Want::Abort(cause);
        self.drive(ops, out);
        true
    }

    /// Move to commit. Refused (false) by a party that already moves to abort.
    pub fn commit<A>(
        &mut self,
        by: WorkerRef,
        certificate: FenceCertificate,
        ops: &mut Ops,
        out: &mut Vec<Action<A>>,
    ) -> bool {
        if self.want != Want::Know {
            return false;
        }
        self.want = Want::Commit {
            by,
            certificate: Box::new(certificate),
        };
        self.drive(ops, out);
        true
    }

    /// The `Retry` timer fired.
    pub fn retry<A>(&mut self, ops: &mut Ops, out: &mut Vec<Action<A>>) {
        self.drive(ops, out);
    }

    fn write(&self) -> Option<RouteOp> {
        match &self.want {
            Want::Know => None,
            Want::Abort(cause) => Some(RouteOp::Abort {
                migration_epoch: self.intent.migration_epoch,
                by: self.party,
                cause: *cause,
            }),
            Want::Commit { by, certificate } => Some(RouteOp::Commit {
                by: by.clone(),
                certificate: (**certificate).clone(),
            }),
        }
    }

    fn drive<A>(&mut self, ops: &mut Ops, out: &mut Vec<Action<A>>) {
        if self.waiting.is_some() {
            return;
        }
        let op = ops.next();
        self.waiting = Some(op);
        let next = self
            .known
            .as_ref()
            .zip(self.write())
            .map(|(known, write)| (known.revision, known.record.apply(&write)));
        let next = match next {
            Some((expect, Ok(next))) => Some((expect, next)),
            Some((_, Err(_))) if self.wants_commit() => {
                // The certificate does not fit the record, so no such write was ever sent.
                self.want = Want::Abort(Cause::DestinationRefused);
                None
            }
            _ => None,
        };
        out.push(match next {
            Some((expect, next)) => Action::StoreCas {
                op,
                expect,
                next: Box::new(next),
            },
            None => Action::StoreRead { op },
        });
    }

    /// Takes a store reply. `None`: not ours, or no answer. Otherwise what the record said;
    /// `Pending` and `NotYet` are no evidence.
    pub fn on_store<A>(
        &mut self,
        now_ns: u64,
        retry_ns: u64,
        op: Op,
        reply: &StoreReply,
        ops: &mut Ops,
        out: &mut Vec<Action<A>>,
    ) -> Option<Verdict> {
        if self.waiting != Some(op) {
            return None;
        }
        self.waiting = None;
        let again = std::mem::take(&mut self.again);
        let verdict = match reply {
            StoreReply::Applied(_) => self
                .known
                .take()
                .zip(self.write())
                .and_then(|(known, write)| known.record.apply(&write).ok())
                .map_or(Verdict::Pending, |now| now.verdict(&self.intent)),
            StoreReply::Value(found) | StoreReply::Conflict(Some(found)) => self.judge(found),
            // Only a finished request's record is ever removed.
            StoreReply::Absent | StoreReply::Conflict(None) => Verdict::Superseded,
            StoreReply::InDoubt if mutant!("lost-reply-is-failure", false, true) => {
                Verdict::Aborted
            }
            StoreReply::InDoubt => {
                self.known = None;
                self.retry_later(now_ns, retry_ns, out);
                return None;
            }
        };
        match verdict {
            Verdict::NotYet => {
                self.known = None;
                self.retry_later(now_ns, retry_ns, out);
            }
            Verdict::Pending if again || self.want != Want::Know => self.drive(ops, out),
            Verdict::Pending => {}
            Verdict::Committed | Verdict::Aborted | Verdict::Superseded => {
                self.known = None; // nothing is left to write
            }
        }
        Some(verdict)
    }

    fn judge(&mut self, found: &Versioned) -> Verdict {
        let verdict = found.record.verdict(&self.intent);
        if verdict == Verdict::Pending {
            self.known = Some(Box::new(found.clone()));
            return mutant!(
                "unfence-on-unchanged-record",
                verdict,
                match self.want {
                    Want::Abort(_) => Verdict::Aborted,
                    _ => verdict,
                }
            );
        }
        verdict
    }

    fn retry_later<A>(&self, now_ns: u64, retry_ns: u64, out: &mut Vec<Action<A>>) {
        let timer = Timer {
            epoch: self.intent.migration_epoch,
            kind: TimerKind::Retry,
        };
        out.push(Action::SetTimer {
            timer,
            at_ns: now_ns.saturating_add(retry_ns),
        });
    }
}
