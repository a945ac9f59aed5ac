//! The source's executor in miniature, and the rebuilder's.

use super::exec::Exec;
use super::models::PAGE;
use super::state::*;
use moonlivekv::id::OwnerEpoch;
use moonlivekv::migrate::io::Payload;
use moonlivekv::migrate::msg::{Body, Emission, PageClaim};
use moonlivekv::migrate::recovery;
use moonlivekv::migrate::source::{Boundary, Do, Done, Event, Exported, Sealed, Source};
use moonlivekv::route::{Cause, ControlSeal, Outcome, RoutePhase};

/// A page of one replica, hashed up to token `to`; `wrong` slots change it.
pub fn claim(replica: u16, page: u64, to: u64, wrong: u16) -> PageClaim {
    let valid = (to - page * PAGE).min(PAGE);
    let mut digest = [0; 32];
    let there = span(page * PAGE, page * PAGE + valid);
    digest[0] = replica as u8;
    digest[1..3].copy_from_slice(&(wrong & there).to_le_bytes());
    digest[3..5].copy_from_slice(&there.to_le_bytes());
    PageClaim {
        replica,
        page: page as u32,
        valid: valid as u16,
        digest,
    }
}

pub fn set_digest(kv_len: u64, wrong: u16) -> [u8; 32] {
    let mut digest = [0xee; 32];
    digest[0] = kv_len as u8;
    digest[1..3].copy_from_slice(&(wrong & span(0, kv_len)).to_le_bytes());
    digest
}

pub fn control_seal(seal: u8, wrong: bool, owner_epoch: OwnerEpoch) -> ControlSeal {
    let mut hash = [0; 16];
    hash[0] = seal;
    hash[1] = wrong.into();
    ControlSeal {
        hash,
        offset: u64::from(seal),
        owner_epoch,
    }
}

pub fn token(seq: u8, wrong: bool) -> Emission {
    let id = u32::from(seq) + if wrong { 100 } else { 0 };
    Emission {
        seq: u64::from(seq),
        token: id,
        text: Vec::new(),
        finish: None,
    }
}

impl Exec<'_> {
    /// The request runs on `w`: its owner's machine begins.
    pub fn run_request(&mut self, w: u8, run: Running, tokens: Vec<Emission>, acked: u64) {
        let limits = self.model.limits.clone();
        let epoch = run.epoch;
        let me = worker_ref(w, self.worker(w).life);
        let source = Source::new(REQUEST, me, epoch, acked, limits);
        self.edit_worker(w, |x| x.source = Part::new(Some(source)));
        self.edit(w, |x| {
            x.run = Some(run);
            x.unacked = tokens.clone();
            x.emit_epoch = epoch;
        });
        self.emit(w, epoch, tokens);
    }

    /// The engine numbers one more token.
    pub fn step(&mut self, w: u8) {
        let (epoch, token) = self.edit(w, |x| {
            let run = x.run.as_mut().expect("a running request");
            run.kv_len += 1;
            run.seal += 1;
            let token = token(run.seal, run.wrong);
            x.unacked.push(token.clone());
            (run.epoch, token)
        });
        self.emit(w, epoch, vec![token]);
    }

    pub fn tell_source(&mut self, w: u8, event: Event) {
        let mut events = vec![event];
        while let Some(event) = events.pop() {
            if self.worker(w).source.is_none() {
                return;
            }
            let taken = self.edit_worker(w, |x| x.source.edit(Option::take));
            let mut machine = taken.expect("just seen");
            let mut out = Vec::new();
            machine.handle(0, event, &mut out);
            let gone = machine.is_gone();
            self.edit_worker(w, |x| x.source.edit(|s| *s = Some(machine)));
            for action in out {
                let Some(what) = self.common(Party::W(w), Mach::Src, action) else {
                    continue;
                };
                let Some(done) = self.do_source(w, what) else {
                    continue;
                };
                if self.goes_on() {
                    events.push(Event::Local(done));
                } else {
                    let life = self.worker(w).life;
                    self.s.push(Packet::Source { w, life, done });
                }
            }
            if gone {
                self.edit_worker(w, |x| {
                    x.source = Part::new(None);
                    x.timers.retain(|(m, _)| *m != Mach::Src);
                });
            }
        }
    }

    fn do_source(&mut self, w: u8, what: Do) -> Option<Done> {
        let run = self.worker(w).run.clone();
        let lost = Cause::RequestEnded;
        Some(match what {
            Do::Pin { op, epoch } => {
                self.edit(w, |x| {
                    if let Some(r) = &mut x.run {
                        r.pinned = Some(epoch);
                        r.grant = Some(epoch);
                    }
                });
                let spec = Payload(epoch.0);
                Done::Pinned {
                    op,
                    result: run.map(|_| spec).ok_or(lost),
                }
            }
            Do::Seal { op } => {
                let seal = |r: Running| Sealed {
                    stable_len: u64::from(r.kv_len),
                    dirty: false,
                };
                Done::Sealed {
                    op,
                    result: run.map(seal).ok_or(lost),
                }
            }
            Do::Hash {
                op,
                from,
                to,
                replicas,
            } => {
                let pages = from / PAGE..to.div_ceil(PAGE);
                let claims = (0..replicas)
                    .flat_map(|r| pages.clone().map(move |p| claim(r, p, to, 0)))
                    .collect();
                Done::Hashed {
                    op,
                    result: run.map(|_| (claims, Payload::NONE)).ok_or(lost),
                }
            }
            Do::Hold { op, .. } => {
                let hold = |mut r: Running| {
                    r.held = Some(op.epoch);
                    let at = Boundary {
                        seal: u64::from(r.seal),
                        kv_len: u64::from(r.kv_len),
                        dirty: false,
                        ended: false,
                    };
                    self.edit(w, |x| x.run = Some(r));
                    at
                };
                Done::Held {
                    op,
                    result: run.map(hold).ok_or(lost),
                }
            }
            Do::Export {
                op,
                kv_len,
                owner_epoch,
                tokens_from,
                replicas,
                ..
            } => {
                let export = |r: Running| Exported {
                    set_digest: set_digest(kv_len, 0),
                    replicas: vec![set_digest(kv_len, 0); usize::from(replicas)],
                    control: control_seal(r.seal, r.wrong, owner_epoch),
                    control_bytes: 1,
                    tail_bytes: 1,
                    tokens: (tokens_from as u8..=r.seal)
                        .map(|s| token(s, r.wrong))
                        .collect(),
                    payload: Payload(u64::from(r.seal) << 1 | u64::from(r.wrong)),
                };
                Done::Exported {
                    op,
                    result: run.map(export).ok_or(lost),
                }
            }
            Do::ReleaseHold => {
                if let Some(m) = run.and_then(|r| r.held) {
                    let aborted = matches!(self.s.truth.decision(m), Some(Outcome::Aborted { .. }));
                    self.check(3, aborted, || {
                        format!("unfenced, attempt {m} is not aborted")
                    });
                    self.edit(w, |x| x.run.as_mut().expect("held").held = None);
                }
                return None;
            }
            Do::Revoke { op, .. } => {
                self.edit(w, |x| {
                    if let Some(r) = &mut x.run {
                        r.grant = None;
                    }
                });
                Done::Revoked { op, quarantined: 0 }
            }
            Do::Unpin { epoch, .. } => {
                let decided = self.s.truth.decision(epoch).is_some();
                self.check(3, decided, || {
                    format!("unpinned, attempt {epoch} is undecided")
                });
                let readable = run.is_some_and(|r| r.grant.is_some());
                self.check(8, !readable, || "unpinned while readable".into());
                self.edit(w, |x| {
                    if let Some(r) = &mut x.run {
                        r.pinned = None;
                    }
                });
                return None;
            }
            Do::Retire { .. } => {
                if let Some(r) = run {
                    let record = &self.s.store.record;
                    let over = record.owner_epoch > r.epoch || record.phase == RoutePhase::Finished;
                    self.check(3, over, || {
                        format!("retired while it owns epoch {}", r.epoch)
                    });
                    self.check(8, r.grant.is_none(), || "freed while readable".into());
                }
                self.edit(w, |x| {
                    x.run = None;
                    x.unacked.clear();
                });
                return None;
            }
        })
    }

    pub fn tell_rebuilder(&mut self, w: u8, event: recovery::Event) {
        if let recovery::Event::Recv { msg, .. } = &event
            && let Body::Rebuild { owner_epoch, .. } = msg.body
        {
            self.tag = owner_epoch.0 as u8;
        }
        let mut events = vec![event];
        while let Some(event) = events.pop() {
            let taken = self.edit_worker(w, |x| x.rebuilder.edit(Option::take));
            let mut machine = taken.expect("not at work");
            let mut out = Vec::new();
            machine.handle(0, event, &mut out);
            self.edit_worker(w, |x| x.rebuilder.edit(|m| *m = Some(machine)));
            for action in out {
                let Some(what) = self.common(Party::W(w), Mach::Reb, action) else {
                    continue;
                };
                let Some(done) = self.do_rebuild(w, what) else {
                    continue;
                };
                if self.goes_on() {
                    events.push(recovery::Event::Local(done));
                } else {
                    let life = self.worker(w).life;
                    self.s.push(Packet::Rebuild { w, life, done });
                }
            }
        }
    }

    fn do_rebuild(&mut self, w: u8, what: recovery::Do) -> Option<recovery::Done> {
        match what {
            recovery::Do::Rebuild {
                op,
                owner_epoch,
                journaled,
                ..
            } => {
                let x = self.worker(w);
                let taken = x.run.is_some() || x.rebuilt.is_some() || x.stage.is_some();
                let (prompt, seal) = (self.model.prompt, journaled as u8);
                if !taken {
                    let run = Running {
                        epoch: owner_epoch,
                        kv_len: prompt + seal - 1,
                        seal,
                        wrong: false,
                        held: None,
                        pinned: None,
                        grant: None,
                    };
                    self.edit(w, |x| x.rebuilt = Some(run));
                }
                let result = if taken { Err(Cause::Engine) } else { Ok(()) };
                return Some(recovery::Done::Rebuilt { op, result });
            }
            recovery::Do::Discard { .. } => self.edit(w, |x| x.rebuilt = None),
            recovery::Do::Activate {
                owner_epoch,
                journaled,
            } => {
                let me = worker_ref(w, self.worker(w).life);
                let owns = self.s.truth.owners.contains(&(owner_epoch, me));
                let record = &self.s.store.record;
                let begun =
                    record.phase != RoutePhase::Recovering || record.owner_epoch > owner_epoch;
                self.check(3, owns && begun, || "recovered without the record".into());
                let twice = self.worker(w).run.is_some();
                self.check(11, !twice, || "recovered twice".into());
                let run = self.edit(w, |x| x.rebuilt.take());
                self.check(11, run.is_some(), || "recovered twice".into());
                if let Some(run) = run {
                    self.run_request(w, run, Vec::new(), journaled);
                }
            }
        }
        None
    }
}
