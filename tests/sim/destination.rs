//! A worker's executor: the destination side, and pulls.

use super::cover::Fault;
use super::data::{Data, Pull};
use super::engine::{Owner, PAGE, Stage};
use super::oracle::SHARES;
use super::source::{page_claim, set_digest};
use super::store::Request;
use super::world::{Ev, Mach, Party, US, World, note, worker_index, worker_ref};
use moonlivekv::migrate::destination::{Do, Done, Event, Pulled, Staged};
use moonlivekv::migrate::io::{Action, Op, Payload};
use moonlivekv::route::{Cause, Outcome, RouteRecord};

impl World {
    pub fn tell_destination(&mut self, w: usize, event: Event) {
        let mut actions = Vec::new();
        let now = self.clock(Party::W(w));
        self.workers[w].destination.handle(now, event, &mut actions);
        for action in actions {
            if !self.may_go_on(Party::W(w)) {
                return;
            }
            self.do_destination(w, action);
        }
    }

    fn do_destination(&mut self, w: usize, action: Action<Do>) {
        let party = Party::W(w);
        match action {
            Action::StoreRead { op } => self.ask(party, Mach::Dst, op, Request::Read),
            Action::StoreCas { op, expect, next } => {
                self.check_commit(w, &next);
                self.ask(party, Mach::Dst, op, Request::Cas { expect, next });
            }
            Action::Send { to, msg, payload } => self.send(party, &to, msg, payload),
            Action::SetTimer { timer, at_ns } => self.set_timer(party, Mach::Dst, timer, at_ns),
            Action::ClearTimer(timer) => self.clear_timer(party, Mach::Dst, timer),
            Action::Report(report) => self.report(party, report),
            Action::Do(what) => self.begin_destination_op(w, what),
        }
    }

    /// A destination asks for its commit: is what it holds really the source's state?
    fn check_commit(&mut self, w: usize, next: &RouteRecord) {
        let me = worker_ref(w, self.life(Party::W(w)));
        let Some(Outcome::Committed(cert)) = next.last.as_ref().map(|d| &d.outcome) else {
            return;
        };
        if next.owner != me || next.intent.is_some() {
            return;
        }
        let (replicas, kv_len) = (self.replicas, cert.kv_len as usize);
        let engine = &self.workers[w].engine;
        let Some(stage) = &engine.stage else {
            return self.truth.broken(4, || "commit without a stage".into());
        };
        let oracle = &self.truth.oracle;
        let same = kv_len <= oracle.slots.len()
            && (0..kv_len).all(|at| {
                let slot = engine.slot(&stage.table, at);
                (0..replicas).all(|r| slot[r] == oracle.slots[at][r])
            });
        let hashed = stage.fully_hashed(kv_len, replicas);
        let control = stage.control == Some(oracle.control_at(cert.seal));
        let log = (0..=kv_len).all(|at| stage.tokens[at] == oracle.tokens.get(at).copied());
        let ready = stage.armed && stage.re_exported && stage.epoch == cert.migration_epoch;
        let src = worker_index(&cert.src);
        let src_life =
            self.is_up(Party::W(src)) && self.life(Party::W(src)) == cert.src.incarnation.0;
        let run = self.workers[src].engine.run.as_ref();
        let fenced = !src_life
            || self.truth.decisions.contains_key(&cert.migration_epoch)
            || run.is_some_and(|r| r.held.is_some() && r.control.seal == cert.seal);
        self.truth.check(4, same, || {
            "commit of KV that differs from the source's".into()
        });
        self.truth.check(4, hashed, || {
            "commit with a slot or replica not verified".into()
        });
        self.truth
            .check(4, control, || "commit of control state that differs".into());
        self.truth
            .check(4, log, || "commit with a wrong token log".into());
        self.truth
            .check(4, ready, || "commit of a stage that is not armed".into());
        self.truth
            .check(4, fenced, || "commit while the source is not fenced".into());
    }

    fn begin_destination_op(&mut self, w: usize, what: Do) {
        let life = self.life(Party::W(w));
        note!(self, "W({w}) does {what:?}");
        let align = self.align as usize;
        match what {
            Do::Pull {
                op,
                from,
                to,
                log,
                deadline_ns,
            } => {
                self.begin_pull(w, op, from as usize, to as usize, log, deadline_ns);
            }
            Do::CancelPull { op } => self.give_up_pull(w, op),
            Do::Emit {
                owner_epoch,
                tokens,
            } => {
                let unacked = tokens.into();
                self.workers[w].emitter = Some(super::data::Emitter {
                    owner_epoch,
                    unacked,
                });
            }
            Do::Activate { owner_epoch, seal } => self.activate(w, owner_epoch, seal),
            Do::Disarm { epoch, quarantined } | Do::AbortImport { epoch, quarantined } => {
                let past = self.truth.not_owner_by(epoch);
                self.truth.check(3, past, || {
                    format!("stage of attempt {epoch} freed, undecided")
                });
                let engine = &mut self.workers[w].engine;
                let Some(stage) = engine.stage.take_if(|s| s.epoch == epoch) else {
                    return;
                };
                let busy = !stage.windows.is_empty();
                engine.free(&stage.table, quarantined);
                self.truth
                    .check(8, !busy, || "stage freed while it was being hashed".into());
            }
            other => {
                let blocks = match &other {
                    Do::Hash { op, from, to, .. } => Some((*op, *from, *to)),
                    Do::HashSet {
                        op, from, kv_len, ..
                    } => Some((*op, *from, *kv_len)),
                    _ => None,
                };
                if let (Some((op, from, to)), Some(stage)) =
                    (blocks, &mut self.workers[w].engine.stage)
                {
                    let range = from as usize / align..(to as usize).div_ceil(align);
                    stage.windows.push((op, range));
                }
                let takes = self.rng.spread(5 * US, 600 * US);
                self.at(
                    takes,
                    Ev::DstOp {
                        w,
                        life,
                        what: other,
                    },
                );
            }
        }
    }

    fn begin_pull(
        &mut self,
        w: usize,
        op: Op,
        from: usize,
        to: usize,
        log: Payload,
        deadline: u64,
    ) {
        let life = self.life(Party::W(w));
        let Some(stage) = &mut self.workers[w].engine.stage else {
            return;
        };
        if let Some(Data::Log { from, tokens }) = self.payloads.get(log) {
            for (i, token) in tokens.iter().enumerate() {
                stage.tokens[from + i] = Some(*token);
            }
        }
        let epoch = stage.epoch;
        let left: Vec<usize> = (from..to).collect();
        let chunks = (to - 1) / PAGE - from / PAGE + 1;
        self.workers[w].pulls.push(Pull {
            op,
            epoch,
            left,
            ended: None,
        });
        let takes = self.rng.spread(20 * US, 800 * US);
        for n in 0..chunks {
            let after = self.rng.range(1, takes + 1);
            self.at(
                after,
                Ev::Chunk {
                    w,
                    life,
                    op,
                    n: from / PAGE + n,
                    late: None,
                },
            );
        }
        let now = self.clock(Party::W(w));
        let patience = deadline.saturating_sub(now).max(1);
        self.at(patience, Ev::PullEnd { w, life, op });
    }

    /// Ends a pull early: usually nothing more lands, sometimes that cannot be had.
    fn give_up_pull(&mut self, w: usize, op: Op) {
        let life = self.life(Party::W(w));
        let stuck = self.rng.chance(1, 6);
        let Some(i) = self.workers[w]
            .pulls
            .iter()
            .position(|p| p.op == op && p.ended.is_none())
        else {
            return;
        };
        let left = self.workers[w].pulls[i].left.clone();
        let mut outcome = Pulled::Failed;
        if let (true, Some(stage), Some(at)) = (stuck, &self.workers[w].engine.stage, left.first())
        {
            // A lost writer: it may write any page of the stage, at any time.
            outcome = Pulled::Stuck {
                quarantined: (stage.table.len() * PAGE) as u64,
            };
            let late = Some((stage.table[at / PAGE], stage.generations[at / PAGE]));
            let after = self.rng.range(50 * US, 5_000 * US);
            self.at(
                after,
                Ev::Chunk {
                    w,
                    life,
                    op,
                    n: 0,
                    late,
                },
            );
        }
        self.workers[w].pulls[i].ended = Some(outcome);
        let soon = self.rng.range(US, 60 * US);
        self.at(soon, Ev::PullEnd { w, life, op });
    }

    /// Some slots of a pull land.
    pub fn land_chunk(
        &mut self,
        w: usize,
        life: u64,
        op: Op,
        n: usize,
        late: Option<(usize, u32)>,
    ) {
        if self.life(Party::W(w)) != life || !self.is_up(Party::W(w)) {
            return;
        }
        if let Some((page, generation)) = late {
            let page = &self.workers[w].engine.pages[page];
            let inert = page.owner == Owner::Quarantine || page.generation == generation;
            return self.truth.check(8, inert, || {
                "a late write hit a page in its next use".into()
            });
        }
        let Some(i) = self.workers[w].pulls.iter().position(|p| p.op == op) else {
            return;
        };
        if self.workers[w].pulls[i].ended.is_some() {
            return;
        }
        let epoch = self.workers[w].pulls[i].epoch;
        let intent = self.truth.intents[&epoch].clone();
        let src = worker_index(&intent.src);
        let from = Party::W(src);
        if !self.is_up(from) || self.life(from) != intent.src.incarnation.0 {
            self.workers[w].pulls[i].ended = Some(Pulled::Lost);
            return self.at(US, Ev::PullEnd { w, life, op });
        }
        let paused_until = self.procs[from.index()].paused_until;
        if paused_until > self.now {
            // The source's process serves the read.
            let wait = paused_until - self.now;
            return self.at(
                wait,
                Ev::Chunk {
                    w,
                    life,
                    op,
                    n,
                    late,
                },
            );
        }
        let granted = self.workers[src]
            .engine
            .run
            .as_ref()
            .is_some_and(|r| r.grant == Some(epoch));
        let corrupt_wire = self.rng.chance(1, 400) && !self.healed;
        if !granted || corrupt_wire {
            self.workers[w].pulls[i].ended = Some(Pulled::Failed);
            return self.at(US, Ev::PullEnd { w, life, op });
        }
        let flip =
            self.fault(Fault::Corrupt, &[from]) || self.fault(Fault::Corrupt, &[Party::W(w)]);
        let r = self.rng.below(self.replicas as u64) as usize;
        let pull = &mut self.workers[w].pulls[i];
        let here: Vec<usize> = pull
            .left
            .iter()
            .copied()
            .filter(|at| at / PAGE == n)
            .collect();
        pull.left.retain(|at| at / PAGE != n);
        let finished = pull.left.is_empty();
        if finished {
            pull.ended = Some(Pulled::Landed);
        }
        for (k, at) in here.into_iter().enumerate() {
            let mut slot = self.workers[src].engine.run_slot(at);
            if flip && k == 0 {
                slot[r] ^= 1 << (at % 64);
            }
            self.write_slot(w, at, slot);
        }
        if finished {
            let soon = self.rng.range(US, 30 * US);
            self.at(soon, Ev::PullEnd { w, life, op });
        }
    }

    /// Writes a slot of the stage.
    fn write_slot(&mut self, w: usize, at: usize, slot: super::oracle::Slot) {
        let (now, align) = (self.now, self.align as usize);
        let engine = &mut self.workers[w].engine;
        let Some(mut stage) = engine.stage.take() else {
            return;
        };
        let block = at / align;
        let hashing = stage
            .windows
            .iter()
            .any(|(_, blocks)| blocks.contains(&block));
        let attached = stage.attached.is_some();
        engine.set(&stage.table, at, slot);
        stage.written[at] = [now; SHARES];
        engine.stage = Some(stage);
        self.truth.check(7, !hashing, || {
            format!("slot {at} written while its block is hashed")
        });
        self.truth.check(7, !attached, || {
            format!("slot {at} written after it was attached")
        });
    }

    /// A pull is over (or its deadline has come): the machine is told once nobody writes any more.
    pub fn end_pull(&mut self, w: usize, op: Op) {
        let Some(i) = self.workers[w].pulls.iter().position(|p| p.op == op) else {
            return;
        };
        let Some(outcome) = self.workers[w].pulls[i].ended else {
            return self.give_up_pull(w, op);
        };
        self.workers[w].pulls.remove(i);
        self.tell_destination(w, Event::Local(Done::Pulled { op, outcome }));
    }

    /// A timed action of the destination ends, on memory as it is now.
    pub fn end_destination_op(&mut self, w: usize, what: Do) {
        let party = Party::W(w);
        let unlucky = self.rng.chance(1, 150) && !self.healed;
        let tampers = matches!(what, Do::Land { .. } | Do::ImportControl { .. });
        let corrupt = tampers && self.fault(Fault::Corrupt, &[party]);
        let (now, replicas, align) = (self.now, self.replicas, self.align);
        let done = match what {
            Do::Stage { op, epoch, spec } => {
                let result = self.stage(w, epoch, spec, unlucky);
                Done::Staged { op, result }
            }
            Do::Hash {
                op,
                replica,
                from,
                to,
            } => {
                let claims =
                    self.read_pages(w, op, replica.into(), from as usize, to as usize, now);
                Done::Hashed {
                    op,
                    result: claims.ok_or(Cause::Engine),
                }
            }
            Do::Land {
                op,
                payload,
                payload_from,
                from,
                to,
            } => {
                self.land(
                    w,
                    payload,
                    payload_from as usize,
                    from as usize,
                    to as usize,
                    corrupt,
                );
                Done::Landed { op, result: Ok(()) }
            }
            Do::HashSet {
                op,
                replica,
                from,
                kv_len,
            } => {
                let (r, kv_len) = (usize::from(replica), kv_len as usize);
                let start = from as usize / PAGE * PAGE;
                self.read_pages(w, op, r, start, kv_len, now);
                let stage = self.workers[w].engine.stage.as_ref().expect("a stage");
                let digest = set_digest(kv_len, |at| stage.hashed_value[at][r]);
                Done::SetHashed {
                    op,
                    result: Ok(digest),
                }
            }
            Do::Attach { op, kv_len } => {
                let stage = self.workers[w].engine.stage.as_mut().expect("a stage");
                stage.attached = Some(kv_len as usize);
                let verified = stage.fully_hashed(kv_len as usize, replicas);
                self.truth
                    .check(9, verified, || "unverified slots in a block table".into());
                Done::Attached { op, result: Ok(()) }
            }
            Do::ImportControl { op, payload } => {
                let control = match self.payloads.get(payload) {
                    Some(Data::Fence { control, .. }) => Some(*control),
                    _ => None,
                };
                let stage = self.workers[w].engine.stage.as_mut().expect("a stage");
                stage.control = control;
                if let (true, Some(control)) = (corrupt, &mut stage.control) {
                    control.state ^= 1;
                }
                Done::ControlImported {
                    op,
                    result: control.map(|_| ()).ok_or(Cause::Engine),
                }
            }
            Do::ReExport { op, owner_epoch } => {
                let stage = self.workers[w].engine.stage.as_mut().expect("a stage");
                stage.re_exported = true;
                let seal = stage.control.map(|c| c.digest(owner_epoch));
                Done::ReExported {
                    op,
                    result: seal.ok_or(Cause::Engine),
                }
            }
            Do::Arm { op } if unlucky => Done::Armed {
                op,
                result: Err(Cause::DestinationRefused),
            },
            Do::Arm { op } => {
                let stage = self.workers[w].engine.stage.as_mut().expect("a stage");
                stage.armed = true;
                Done::Armed { op, result: Ok(()) }
            }
            _ => return,
        };
        let _ = align;
        self.tell_destination(w, Event::Local(done));
    }

    fn stage(
        &mut self,
        w: usize,
        epoch: moonlivekv::id::MigrationEpoch,
        spec: Payload,
        unlucky: bool,
    ) -> Result<Staged, Cause> {
        let Some(Data::Spec {
            tokens,
            epoch: granted,
        }) = self.payloads.get(spec)
        else {
            return Err(Cause::Engine);
        };
        let (tokens, granted) = (*tokens, *granted);
        if unlucky || granted != epoch {
            return Err(Cause::NoSpace);
        }
        let engine = &mut self.workers[w].engine;
        if engine.run.is_some() || engine.rebuilt.is_some() {
            return Err(Cause::DestinationRefused); // an earlier life of the request is still here
        }
        let other = engine.stage.as_ref().map(|s| s.epoch);
        self.truth.check(10, other.is_none(), || {
            format!("stage {other:?} beside {epoch}")
        });
        let engine = &mut self.workers[w].engine;
        let table = engine
            .alloc(tokens.div_ceil(PAGE), Owner::Stage(epoch))
            .ok_or(Cause::NoSpace)?;
        engine.stage = Some(Stage::new(epoch, table, engine));
        Ok(Staged {
            replicas: self.replicas as u16,
            page_tokens: PAGE as u16,
            bytes_per_token: 1,
            align_tokens: self.align,
        })
    }

    /// Reads resident pages for a hash.
    fn read_pages(
        &mut self,
        w: usize,
        op: Op,
        r: usize,
        from: usize,
        to: usize,
        now: u64,
    ) -> Option<Vec<moonlivekv::migrate::msg::PageClaim>> {
        let engine = &mut self.workers[w].engine;
        let mut stage = engine.stage.take()?;
        stage.windows.retain(|(o, _)| *o != op);
        let mut claims = Vec::new();
        for page in from / PAGE..to.div_ceil(PAGE) {
            for at in page * PAGE..to.min((page + 1) * PAGE) {
                stage.hashed[at][r] = now;
                stage.hashed_value[at][r] = engine.slot(&stage.table, at)[r];
            }
            claims.push(page_claim(r, page, to, |at| {
                engine.slot(&stage.table, at)[r]
            }));
        }
        engine.stage = Some(stage);
        Some(claims)
    }

    fn land(
        &mut self,
        w: usize,
        payload: Payload,
        base: usize,
        from: usize,
        to: usize,
        corrupt: bool,
    ) {
        let Some(Data::Fence { slots, tokens, .. }) = self.payloads.get(payload) else {
            return;
        };
        let (slots, tokens) = (slots.clone(), tokens.clone());
        for at in from..to {
            let mut slot = slots[at - base];
            if corrupt && at == from {
                slot[0] ^= 2;
            }
            self.write_slot(w, at, slot);
        }
        let verify_full = self.limits.verify_full;
        let Some(mut stage) = self.workers[w].engine.stage.take() else {
            return;
        };
        for (i, token) in tokens.iter().enumerate() {
            stage.tokens[base + i] = Some(*token);
        }
        if corrupt && from == to && from > 0 && verify_full {
            // A bit flips in resident memory after that page was verified.
            let mut slot = self.workers[w].engine.slot(&stage.table, from - 1);
            slot[0] ^= 2;
            self.workers[w].engine.set(&stage.table, from - 1, slot);
        }
        self.workers[w].engine.stage = Some(stage);
    }
}
