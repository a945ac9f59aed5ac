//! A worker's executor: a request begins to decode, moved here or rebuilt from the journal.

use super::data::Data;
use super::engine::{Owner, PAGE};
use super::store::Request;
use super::world::{Ev, Mach, Party, US, World, note, worker_ref};
use moonlivekv::migrate::io::Action;
use moonlivekv::migrate::recovery;
use moonlivekv::route::{Cause, Outcome, RoutePhase};

impl World {
    pub fn activate(&mut self, w: usize, owner_epoch: moonlivekv::id::OwnerEpoch, seal: u64) {
        let me = worker_ref(w, self.life(Party::W(w)));
        let twice = self.workers[w].engine.run.is_some();
        self.truth.check(11, !twice, || "resumed twice".into());
        let Some(stage) = self.workers[w].engine.stage.take() else {
            return self.truth.broken(11, || "resumed twice".into());
        };
        let owns = self.truth.owners.get(&owner_epoch) == Some(&me)
            && matches!(
                self.truth.decisions.get(&stage.epoch),
                Some(Outcome::Committed(_))
            );
        self.truth.check(3, owns, || {
            format!("launched epoch {owner_epoch} without a commit")
        });
        let control = stage.control.unwrap_or_default();
        self.truth.check(5, control.seal == seal, || {
            format!(
                "the first new token would be {} behind {}",
                seal + 1,
                control.seal
            )
        });
        let engine = &mut self.workers[w].engine;
        let kv_len = stage.attached.unwrap_or(0);
        let used = kv_len.div_ceil(PAGE);
        engine.free(&stage.table[used..], 0);
        let table = stage.table[..used].to_vec();
        engine.retag(&table, Owner::Request);
        engine.run = Some(super::engine::Running {
            owner_epoch,
            table,
            tokens: stage
                .tokens
                .iter()
                .take(kv_len + 1)
                .flatten()
                .copied()
                .collect(),
            kv_len,
            control: super::oracle::Control { seal, ..control },
            stepping: false,
            held: None,
            hold_asked: None,
            ended: false,
            grant: None,
            pin: None,
            dirty: false,
            stuck: 0,
            dying: false,
        });
        let tokens: Vec<_> = self.workers[w]
            .emitter
            .iter()
            .flat_map(|e| e.unacked.clone())
            .collect();
        let acked = tokens.first().map_or(seal, |t| t.seq - 1);
        self.run_request(w, owner_epoch, tokens, acked);
    }

    pub fn tell_rebuilder(&mut self, w: usize, event: recovery::Event) {
        let mut actions = Vec::new();
        let now = self.clock(Party::W(w));
        self.workers[w].rebuilder.handle(now, event, &mut actions);
        let party = Party::W(w);
        for action in actions {
            if !self.may_go_on(party) {
                return;
            }
            match action {
                Action::StoreRead { op } => self.ask(party, Mach::Reb, op, Request::Read),
                Action::StoreCas { op, expect, next } => {
                    self.ask(party, Mach::Reb, op, Request::Cas { expect, next });
                }
                Action::Send { to, msg, payload } => self.send(party, &to, msg, payload),
                Action::SetTimer { timer, at_ns } => self.set_timer(party, Mach::Reb, timer, at_ns),
                Action::ClearTimer(timer) => self.clear_timer(party, Mach::Reb, timer),
                Action::Report(report) => self.report(party, report),
                Action::Do(recovery::Do::Rebuild {
                    op,
                    image,
                    owner_epoch,
                    journaled,
                }) => {
                    note!(
                        self,
                        "W({w}) rebuilds epoch {owner_epoch} from {journaled} tokens"
                    );
                    let takes = self.rng.spread(50 * US, 1_500 * US);
                    let what = recovery::Do::Rebuild {
                        op,
                        image,
                        owner_epoch,
                        journaled,
                    };
                    let life = self.life(party);
                    self.at(takes, Ev::RebOp { w, life, what });
                }
                Action::Do(recovery::Do::Activate {
                    owner_epoch,
                    journaled,
                }) => {
                    self.activate_rebuilt(w, owner_epoch, journaled);
                }
                Action::Do(recovery::Do::Discard { .. }) => {
                    if let Some(r) = self.workers[w].engine.rebuilt.take() {
                        self.workers[w].engine.free(&r.table, 0);
                    }
                }
            }
        }
    }

    pub fn end_rebuild(&mut self, w: usize, what: recovery::Do) {
        let recovery::Do::Rebuild {
            op,
            image,
            owner_epoch,
            journaled,
        } = what
        else {
            return;
        };
        let here = &self.workers[w].engine;
        let taken = here.run.is_some() || here.rebuilt.is_some();
        let result = match self.payloads.get(image) {
            Some(Data::Image { tokens }) if !taken => {
                let oracle = &self.truth.oracle;
                let whole = tokens.len() as u64 == journaled;
                let equal = oracle.tokens[oracle.prompt..].starts_with(tokens);
                let kv_len = oracle.kv_len(journaled);
                self.truth
                    .check(12, whole && equal, || "the journal's image is wrong".into());
                self.install(w, Owner::Rebuilt, owner_epoch, kv_len, journaled);
                Ok(())
            }
            _ => Err(Cause::Engine),
        };
        self.tell_rebuilder(
            w,
            recovery::Event::Local(recovery::Done::Rebuilt { op, result }),
        );
    }

    fn activate_rebuilt(
        &mut self,
        w: usize,
        owner_epoch: moonlivekv::id::OwnerEpoch,
        journaled: u64,
    ) {
        let me = worker_ref(w, self.life(Party::W(w)));
        let owns = self.truth.owners.get(&owner_epoch) == Some(&me);
        self.truth.check(3, owns, || {
            format!("recovered epoch {owner_epoch} without the record")
        });
        let begun = self.truth.record.phase != RoutePhase::Recovering
            || self.truth.record.owner_epoch > owner_epoch;
        self.truth
            .check(3, begun, || "recovered before the record says so".into());
        let engine = &mut self.workers[w].engine;
        let Some(run) = engine.rebuilt.take() else {
            return;
        };
        let twice = engine.run.is_some();
        engine.retag(&run.table, Owner::Request);
        engine.run = Some(run);
        self.truth.check(11, !twice, || "recovered twice".into());
        self.run_request(w, owner_epoch, Vec::new(), journaled);
    }
}
