//! The destination's executor in miniature.

use super::exec::{Exec, GIVEN_UP};
use super::labels::{Base, Label};
use super::models::PAGE;
use super::source::{claim, control_seal, set_digest};
use super::state::*;
use moonlivekv::migrate::destination::{Do, Done, Event, Pulled, Staged};
use moonlivekv::migrate::io::Action;
use moonlivekv::route::{Cause, Origin, Outcome, RoutePhase, RouteRecord};

impl Exec<'_> {
    pub fn tell_destination(&mut self, w: u8, event: Event) {
        let mut events = vec![event];
        while !events.is_empty() {
            let event = events.remove(0);
            let taken = self.edit_worker(w, |x| x.destination.edit(Option::take));
            let mut machine = taken.expect("not at work");
            let mut out = Vec::new();
            machine.handle(0, event, &mut out);
            self.edit_worker(w, |x| x.destination.edit(|m| *m = Some(machine)));
            for action in out {
                if let Action::StoreCas { next, .. } = &action {
                    self.asks_to_commit(w, next);
                }
                let Some(what) = self.common(Party::W(w), Mach::Dst, action) else {
                    continue;
                };
                let Some(done) = self.do_destination(w, what) else {
                    continue;
                };
                if self.goes_on() {
                    events.push(Event::Local(done));
                } else {
                    let life = self.worker(w).life;
                    self.s.push(Packet::Destination { w, life, done });
                }
            }
        }
    }

    /// At the moment a destination asks for its commit: is everything verified, and right?
    fn asks_to_commit(&mut self, w: u8, next: &RouteRecord) {
        let me = worker_ref(w, self.worker(w).life);
        let Some(Outcome::Committed(cert)) = next.last.as_ref().map(|d| &d.outcome) else {
            return;
        };
        if next.owner != me || next.intent.is_some() {
            return;
        }
        let all = span(0, cert.kv_len);
        let replicas = usize::from(self.model.replicas);
        let stage = self.worker(w).stage.clone();
        let good = stage.as_ref().is_some_and(|s| {
            s.epoch == cert.migration_epoch
                && s.armed
                && s.re_exported
                && s.control == Some((cert.seal as u8, false))
                && (0..replicas).all(|r| {
                    s.hashed[r] & all == all
                        && s.slots[r].written & all == all
                        && s.slots[r].wrong & all == 0
                })
        });
        self.check(4, good, || format!("commit of {cert:?} with {stage:?}"));
        let src = worker_index(&cert.src);
        let source = self.worker(src);
        let fenced = source.life != cert.src.incarnation.0
            || self.s.truth.decision(cert.migration_epoch).is_some()
            || source.run.as_ref().is_some_and(|r| {
                r.held == Some(cert.migration_epoch) && u64::from(r.seal) == cert.seal
            });
        self.check(4, fenced, || "commit while the source is not fenced".into());
    }

    fn stage_mut<R>(&mut self, w: u8, f: impl FnOnce(&mut Stage) -> R) -> Option<R> {
        self.edit(w, |x| x.stage.as_mut().map(f))
    }

    fn do_destination(&mut self, w: u8, what: Do) -> Option<Done> {
        let replicas = self.model.replicas;
        Some(match what {
            Do::Stage { op, epoch, .. } => {
                let x = self.worker(w);
                if x.run.is_some() || x.rebuilt.is_some() {
                    return Some(Done::Staged {
                        op,
                        result: Err(Cause::DestinationRefused),
                    });
                }
                let other = x.stage.as_ref().map(|s| s.epoch);
                self.check(10, other.is_none(), || {
                    format!("stage {other:?} beside {epoch}")
                });
                let stage = Stage {
                    epoch,
                    slots: Default::default(),
                    hashed: [0; 2],
                    hashing: 0,
                    attached: 0,
                    control: None,
                    re_exported: false,
                    armed: false,
                };
                self.edit(w, |x| x.stage = Some(stage));
                let staged = Staged {
                    replicas,
                    page_tokens: PAGE as u16,
                    bytes_per_token: 1,
                    align_tokens: PAGE as u32,
                };
                Done::Staged {
                    op,
                    result: Ok(staged),
                }
            }
            Do::Pull { op, from, to, .. } => {
                let Some(epoch) = self.worker(w).stage.as_ref().map(|s| s.epoch) else {
                    return Some(Done::Pulled {
                        op,
                        outcome: Pulled::Lost,
                    });
                };
                let left = span(from, to);
                self.edit(w, |x| {
                    x.pulls.push(Pull {
                        op,
                        epoch,
                        left,
                        ended: None,
                    })
                });
                if !self.model.slow_pulls {
                    return self.pull_at_once(w, op);
                }
                return None;
            }
            Do::CancelPull { op } => {
                self.edit(w, |x| {
                    for p in &mut x.pulls {
                        if p.op == op && p.ended.is_none() {
                            p.ended = Some(GIVEN_UP);
                        }
                    }
                });
                return None;
            }
            Do::Hash {
                op,
                replica,
                from,
                to,
            } => {
                let wrong = self.read(w, replica, from / PAGE * PAGE, to);
                let pages = from / PAGE..to.div_ceil(PAGE);
                let claims = pages.map(|p| claim(replica, p, to, wrong)).collect();
                Done::Hashed {
                    op,
                    result: Ok(claims),
                }
            }
            Do::Land { op, from, to, .. } => {
                for at in from..to {
                    self.write(w, at as u8, false);
                }
                Done::Landed { op, result: Ok(()) }
            }
            Do::HashSet {
                op,
                replica,
                from,
                kv_len,
            } => {
                let wrong = self.read(w, replica, from / PAGE * PAGE, kv_len);
                Done::SetHashed {
                    op,
                    result: Ok(set_digest(kv_len, wrong)),
                }
            }
            Do::Attach { op, kv_len } => {
                let all = span(0, kv_len);
                let s = self.worker(w).stage.clone();
                let verified =
                    s.is_some_and(|s| (0..usize::from(replicas)).all(|r| s.hashed[r] & all == all));
                self.check(9, verified, || "unverified slots in a block table".into());
                self.stage_mut(w, |s| s.attached = kv_len as u8);
                Done::Attached { op, result: Ok(()) }
            }
            Do::ImportControl { op, payload } => {
                let control = ((payload.0 >> 1) as u8, payload.0 & 1 == 1);
                self.stage_mut(w, |s| s.control = Some(control));
                Done::ControlImported { op, result: Ok(()) }
            }
            Do::ReExport { op, owner_epoch } => {
                let control = self.stage_mut(w, |s| {
                    s.re_exported = true;
                    s.control
                });
                let seal = control
                    .flatten()
                    .map(|(seal, bad)| control_seal(seal, bad, owner_epoch));
                Done::ReExported {
                    op,
                    result: seal.ok_or(Cause::Engine),
                }
            }
            Do::Arm { op } => {
                self.stage_mut(w, |s| s.armed = true);
                Done::Armed { op, result: Ok(()) }
            }
            Do::Emit {
                owner_epoch,
                tokens,
            } => {
                self.edit(w, |x| {
                    x.unacked = tokens;
                    x.emit_epoch = owner_epoch;
                });
                return None;
            }
            Do::Activate { owner_epoch, seal } => {
                self.activate(w, owner_epoch, seal);
                return None;
            }
            Do::Disarm { epoch, quarantined } | Do::AbortImport { epoch, quarantined } => {
                self.free(w, epoch, quarantined);
                return None;
            }
        })
    }

    /// A pull that no fault can touch.
    fn pull_at_once(&mut self, w: u8, op: moonlivekv::migrate::io::Op) -> Option<Done> {
        let i = self.worker(w).pulls.iter().position(|p| p.op == op)?;
        while self.worker(w).pulls[i].ended.is_none() {
            self.land_one(w, i, false);
        }
        let pull = self.edit(w, |x| x.pulls.remove(i));
        Some(Done::Pulled {
            op,
            outcome: pull.ended?,
        })
    }

    /// The next slot of a pull lands, on every replica.
    pub fn land_one(&mut self, w: u8, i: usize, wrong: bool) {
        let pull = self.worker(w).pulls[i].clone();
        let intents = &self.s.truth.intents;
        let intent = intents
            .iter()
            .find(|t| t.migration_epoch == pull.epoch)
            .cloned();
        let Some(intent) = intent else { return };
        self.did.actors.push(Party::W(worker_index(&intent.src))); // its memory is read
        let src = self.worker(worker_index(&intent.src));
        let outcome = if src.life != intent.src.incarnation.0 {
            Some(Pulled::Lost)
        } else if src.run.as_ref().is_none_or(|r| r.grant != Some(pull.epoch)) {
            Some(GIVEN_UP)
        } else {
            None
        };
        if let Some(outcome) = outcome {
            return self.edit(w, |x| x.pulls[i].ended = Some(outcome));
        }
        let at = pull.left.trailing_zeros() as u8;
        self.write(w, at, wrong);
        self.edit(w, |x| {
            let p = &mut x.pulls[i];
            p.left &= p.left - 1;
            if p.left == 0 {
                p.ended = Some(Pulled::Landed);
            }
        });
    }

    /// An abandoned or finished pull is reported to the machine.
    pub fn end_pull(&mut self, w: u8, i: usize, stuck: bool) {
        let pull = self.edit(w, |x| x.pulls.remove(i));
        let mut outcome = pull.ended.unwrap_or(GIVEN_UP);
        if stuck {
            outcome = Pulled::Stuck { quarantined: 1 };
        }
        self.tell_destination(
            w,
            Event::Local(Done::Pulled {
                op: pull.op,
                outcome,
            }),
        );
    }

    fn write(&mut self, w: u8, at: u8, wrong: bool) {
        let bit = 1u16 << at;
        let block = span(
            u64::from(at) / PAGE * PAGE,
            u64::from(at) / PAGE * PAGE + PAGE,
        );
        let replicas = usize::from(self.model.replicas);
        let seen = self.stage_mut(w, |s| {
            for r in 0..replicas {
                s.slots[r].written |= bit;
                s.slots[r].wrong &= !bit;
                s.hashed[r] &= !bit;
            }
            if wrong {
                s.slots[replicas - 1].wrong |= bit;
            }
            (s.hashing & block != 0, s.attached > 0)
        });
        let Some((hashing, attached)) = seen else {
            return;
        };
        self.check(7, !hashing, || {
            format!("slot {at} written while its block is hashed")
        });
        self.check(7, !attached, || {
            format!("slot {at} written after it was attached")
        });
    }

    /// A hash reads slots; returns those that are wrong or missing.
    fn read(&mut self, w: u8, replica: u16, from: u64, to: u64) -> u16 {
        let (r, range) = (usize::from(replica), span(from, to));
        // Writers that are still at work on these blocks make the hash worthless.
        let stage_epoch = self.worker(w).stage.as_ref().map(|s| s.epoch);
        let blocks = span(from / PAGE * PAGE, to.div_ceil(PAGE) * PAGE);
        let written = self
            .worker(w)
            .pulls
            .iter()
            .any(|p| Some(p.epoch) == stage_epoch && p.ended.is_none() && p.left & blocks != 0);
        self.check(7, !written, || {
            format!("slots {from}..{to} hashed while they are written")
        });
        self.stage_mut(w, |s| {
            s.hashed[r] |= range & s.slots[r].written;
            (s.slots[r].wrong | !s.slots[r].written) & span(0, to)
        })
        .unwrap_or(u16::MAX)
    }

    fn activate(&mut self, w: u8, owner_epoch: moonlivekv::id::OwnerEpoch, seal: u64) {
        let me = worker_ref(w, self.worker(w).life);
        let (run, stage) = (self.worker(w).run.is_some(), self.worker(w).stage.clone());
        self.check(11, !run && stage.is_some(), || "resumed twice".into());
        let Some(stage) = stage else { return };
        let committed = matches!(
            self.s.truth.decision(stage.epoch),
            Some(Outcome::Committed(_))
        );
        let owns = self.s.truth.owners.contains(&(owner_epoch, me));
        self.check(3, committed && owns, || "launched without a commit".into());
        let (numbered, wrong) = stage.control.unwrap_or((0, true));
        self.check(5, u64::from(numbered) == seal, || {
            format!(
                "the first new token would be {}, not {}",
                seal + 1,
                numbered + 1
            )
        });
        let slots = stage.slots.iter().take(usize::from(self.model.replicas));
        let wrong =
            wrong || slots.fold(0, |a, s| a | s.wrong) & span(0, stage.attached.into()) != 0;
        let run = Running {
            epoch: owner_epoch,
            kv_len: stage.attached,
            seal: seal as u8,
            wrong,
            held: None,
            pinned: None,
            grant: None,
        };
        self.edit(w, |x| x.stage = None);
        let tokens = self.worker(w).unacked.clone();
        let acked = tokens.first().map_or(seal, |t| t.seq - 1);
        self.run_request(w, run, tokens, acked);
    }

    fn free(&mut self, w: u8, epoch: moonlivekv::id::MigrationEpoch, quarantined: u64) {
        let record = &self.s.store.record;
        let owner_by =
            record.origin == Origin::Migrated(epoch) && record.phase == RoutePhase::Serving;
        let decided = self.s.truth.decision(epoch).is_some();
        self.check(3, decided && !owner_by, || {
            format!("stage of attempt {epoch} freed")
        });
        let writing = self.worker(w).pulls.iter().any(|p| p.epoch == epoch);
        self.check(8, !writing, || "a stage freed while it is written".into());
        self.edit(w, |x| {
            if x.stage.as_ref().is_some_and(|s| s.epoch == epoch) {
                x.stage = None;
                if quarantined > 0 {
                    x.quarantined.push(epoch);
                }
            }
        });
    }

    /// For a trace: what a label means here.
    pub fn describe(s: &State, label: Label) -> String {
        let mut text = match label.base {
            Base::Deliver(i) => format!("deliver {:?}", *s.net[i]),
            other => format!("{other:?}"),
        };
        if let Some(k) = label.stop {
            text += &format!(" STOPPED before its completion {k}");
        }
        if let Some((party, mach, _)) = label.fire {
            text += &format!(" then the DEADLINE of {party:?} {mach:?} fires");
        }
        for mishap in label.mishaps.iter().flatten() {
            text += &format!(" {mishap:?}");
        }
        if let Some(party) = label.crash {
            text += &format!(" then {party:?} CRASHES");
        }
        text
    }
}
