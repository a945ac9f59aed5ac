//! What really happened, and the checks of `CONTRACT.md` against it. Nothing here is known to the
//! machines.

use std::collections::BTreeMap;

use super::oracle::Oracle;
use moonlivekv::id::{MigrationEpoch, OwnerEpoch, WorkerRef};
use moonlivekv::route::{Intent, Outcome, RoutePhase, RouteRecord};

pub struct Truth {
    pub oracle: Oracle,
    pub record: RouteRecord,
    pub owners: BTreeMap<OwnerEpoch, WorkerRef>,
    pub intents: BTreeMap<MigrationEpoch, Intent>,
    pub decisions: BTreeMap<MigrationEpoch, Outcome>,
    /// Epoch of the newest accepted token.
    pub accepted_epoch: OwnerEpoch,
    pub accepted: u64,
    /// Tokens below this epoch may no longer be accepted: J was given away.
    pub given_away: OwnerEpoch,
    pub commits: u32,
    pub aborts: u32,
    pub recoveries: u32,
    pub violation: Option<(u8, String)>,
}

impl Truth {
    pub fn new(oracle: Oracle, record: RouteRecord) -> Self {
        Self {
            oracle,
            owners: BTreeMap::from([(record.owner_epoch, record.owner.clone())]),
            record,
            intents: BTreeMap::new(),
            decisions: BTreeMap::new(),
            accepted_epoch: OwnerEpoch(0),
            accepted: 0,
            given_away: OwnerEpoch(0),
            commits: 0,
            aborts: 0,
            recoveries: 0,
            violation: None,
        }
    }

    /// Invariant `number` of `CONTRACT.md` does not hold.
    pub fn broken(&mut self, number: u8, what: impl FnOnce() -> String) {
        if self.violation.is_none() {
            self.violation = Some((number, what()));
        }
    }

    pub fn check(&mut self, number: u8, holds: bool, what: impl FnOnce() -> String) {
        if !holds {
            self.broken(number, what);
        }
    }

    /// A compare-and-swap took place, sent by `by` (`None`: not a worker).
    pub fn on_write(&mut self, new: &RouteRecord, by: Option<&WorkerRef>) {
        let old = std::mem::replace(&mut self.record, new.clone());
        self.check(2, new.generation == old.generation.next(), || {
            format!(
                "a write took generation {} to {}",
                old.generation, new.generation
            )
        });
        self.check(
            1,
            new.owner_epoch == old.owner_epoch || new.owner_epoch == old.owner_epoch.next(),
            || {
                format!(
                    "owner epoch went from {} to {}",
                    old.owner_epoch, new.owner_epoch
                )
            },
        );
        self.check(2, old.phase != RoutePhase::Finished, || {
            "a finished record was written".into()
        });
        match (&old.intent, &new.intent) {
            (None, Some(intent)) => {
                let m = intent.migration_epoch;
                self.check(
                    2,
                    m > old.migration_epoch && !self.intents.contains_key(&m),
                    || format!("attempt {m} began twice"),
                );
                self.intents.insert(m, intent.clone());
            }
            (Some(intent), None) => self.on_decision(&old, intent, new, by),
            (Some(a), Some(b)) => {
                self.check(2, a == b, || "an intent was replaced undecided".into());
            }
            (None, None) => {}
        }
        if new.owner_epoch != old.owner_epoch {
            self.owners.insert(new.owner_epoch, new.owner.clone());
            if new.phase == RoutePhase::Recovering {
                self.recoveries += 1;
            }
        }
    }

    fn on_decision(
        &mut self,
        old: &RouteRecord,
        intent: &Intent,
        new: &RouteRecord,
        by: Option<&WorkerRef>,
    ) {
        let m = intent.migration_epoch;
        let decided = new.last.clone().filter(|d| d.migration_epoch == m);
        let Some(decision) = decided else {
            return self.broken(2, || {
                format!("attempt {m} left the record without a decision")
            });
        };
        self.check(2, !self.decisions.contains_key(&m), || {
            format!("attempt {m} decided twice")
        });
        match &decision.outcome {
            Outcome::Committed(cert) => {
                self.commits += 1;
                self.check(4, by == Some(&intent.dst), || {
                    format!("attempt {m} for {} committed by {by:?}", intent.dst)
                });
                self.check(4, new.owner == intent.dst, || {
                    format!(
                        "attempt {m} for {} made {} the owner",
                        intent.dst, new.owner
                    )
                });
                let fits = cert.migration_epoch == m
                    && cert.owner_epoch == old.owner_epoch
                    && cert.src == intent.src
                    && new.owner_epoch == old.owner_epoch.next();
                self.check(4, fits, || format!("attempt {m} committed with {cert:?}"));
                let honest = (1..=self.oracle.outputs()).contains(&cert.seal)
                    && cert.kv_len as usize == self.oracle.kv_len(cert.seal);
                self.check(4, honest, || format!("attempt {m}: seal {}", cert.seal));
            }
            Outcome::Aborted { .. } => {
                self.aborts += 1;
                self.check(
                    2,
                    new.owner == old.owner && new.owner_epoch == old.owner_epoch,
                    || format!("the abort of attempt {m} moved the owner"),
                );
            }
            Outcome::Superseded => {}
        }
        self.decisions.insert(m, decision.outcome);
    }

    /// Whether the record has moved past attempt `m` and its source still owns the request.
    pub fn aborted(&self, m: MigrationEpoch) -> bool {
        matches!(self.decisions.get(&m), Some(Outcome::Aborted { .. }))
    }

    /// Whether the record has moved past attempt `m` and its destination does not own the request.
    pub fn not_owner_by(&self, m: MigrationEpoch) -> bool {
        use moonlivekv::route::Origin;
        self.decisions.contains_key(&m)
            && !(self.record.origin == Origin::Migrated(m)
                && self.record.phase == RoutePhase::Serving)
    }

    /// A token entered the log.
    pub fn on_accept(&mut self, epoch: OwnerEpoch, seq: u64, token: u32) {
        let (last, newest, given_away) = (self.accepted, self.accepted_epoch, self.given_away);
        self.check(5, seq == last + 1, || {
            format!("token {seq} accepted behind {last}")
        });
        self.check(1, epoch >= newest, || {
            format!("a token of epoch {epoch} accepted after one of {newest}")
        });
        self.check(12, epoch >= given_away, || {
            format!("a token of epoch {epoch} accepted after J was given to {given_away}")
        });
        self.check(1, self.owners.contains_key(&epoch), || {
            format!("epoch {epoch} has no owner")
        });
        let expected = self.oracle.token(seq);
        self.check(5, expected == Some(token), || {
            format!("token {seq} is {token}, undisturbed it is {expected:?}")
        });
        self.accepted = seq;
        self.accepted_epoch = epoch;
    }
}
