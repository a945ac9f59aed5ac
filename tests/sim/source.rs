//! A worker's executor: the source side, decoding, and the token channel.

use super::cover::Fault;
use super::data::{Data, Emitter};
use super::engine::{Owner, PAGE, Running};
use super::oracle::{SHARES, Slot};
use super::rng::mix;
use super::store::Request;
use super::world::{Ev, MS, Mach, Party, REQUEST, US, World, note, worker_ref};
use moonlivekv::id::{MigrationEpoch, OwnerEpoch};
use moonlivekv::migrate::io::{Action, Peer, Report, Step};
use moonlivekv::migrate::msg::{Body, Emission, Msg, PageClaim};
use moonlivekv::migrate::source::{Boundary, Do, Done, Event, Exported, Sealed, Source};
use moonlivekv::route::{Cause, RoutePhase};

/// 32 bytes out of one number.
pub fn wide(x: u64) -> [u8; 32] {
    let mut bytes = [0; 32];
    for (i, part) in bytes.chunks_exact_mut(8).enumerate() {
        part.copy_from_slice(&mix(x, i as u64).to_le_bytes());
    }
    bytes
}

/// What a page of one replica hashes to: its first `valid` tokens, and how many they are.
pub fn page_claim(
    replica: usize,
    page: usize,
    to: usize,
    slot: impl Fn(usize) -> u64,
) -> PageClaim {
    let valid = (to - page * PAGE).min(PAGE);
    let digest = (0..valid).fold(valid as u64, |h, i| mix(h, slot(page * PAGE + i)));
    PageClaim {
        replica: replica as u16,
        page: page as u32,
        valid: valid as u16,
        digest: wide(digest),
    }
}

/// The set digest of one replica.
pub fn set_digest(kv_len: usize, slot: impl Fn(usize) -> u64) -> [u8; 32] {
    wide((0..kv_len).fold(kv_len as u64, |h, at| mix(h, slot(at))))
}

/// The set digest over all replicas.
pub fn whole_digest(replicas: &[[u8; 32]]) -> [u8; 32] {
    match replicas {
        [one] => *one,
        many => wide(many.iter().flatten().fold(3, |h, b| mix(h, u64::from(*b)))),
    }
}

impl World {
    pub fn start_worker(&mut self, w: usize) {
        let life = self.life(Party::W(w));
        let soon = self.rng.range(1, 500 * US);
        self.at(soon, Ev::BeatTick { w, life });
        self.at(soon, Ev::ResendTokens { w, life });
    }

    /// The request begins on worker 0, its first token sampled.
    pub fn admit(&mut self) {
        let oracle = self.truth.oracle.clone();
        self.install(0, Owner::Request, OwnerEpoch(1), oracle.prompt, 1);
        let run = self.workers[0].engine.rebuilt.take();
        self.workers[0].engine.run = run;
        let first = self.emission(1, oracle.token(1).expect("a first token"));
        self.run_request(0, OwnerEpoch(1), vec![first], 0);
    }

    /// Puts a correct state of the request into a worker's memory, stopped.
    pub fn install(&mut self, w: usize, owner: Owner, epoch: OwnerEpoch, kv_len: usize, seal: u64) {
        let oracle = self.truth.oracle.clone();
        let engine = &mut self.workers[w].engine;
        let table = engine
            .alloc(kv_len.div_ceil(PAGE).max(1), owner)
            .expect("free pages");
        for at in 0..kv_len {
            engine.set(&table, at, oracle.slots[at]);
        }
        engine.rebuilt = Some(Running {
            owner_epoch: epoch,
            table,
            tokens: oracle.tokens[..kv_len + 1].to_vec(),
            kv_len,
            control: oracle.control_at(seal),
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
    }

    pub fn emission(&self, seq: u64, token: u32) -> Emission {
        let last = seq == self.truth.oracle.outputs();
        Emission {
            seq,
            token,
            text: Vec::new(),
            finish: last.then_some(0),
        }
    }

    /// The engine's `run` is in place: it may decode, its owner's machine begins.
    pub fn run_request(&mut self, w: usize, epoch: OwnerEpoch, tokens: Vec<Emission>, acked: u64) {
        let me = worker_ref(w, self.life(Party::W(w)));
        self.workers[w].source = Some(Source::new(REQUEST, me, epoch, acked, self.limits.clone()));
        self.workers[w].emitter = Some(Emitter {
            owner_epoch: epoch,
            unacked: tokens.iter().cloned().collect(),
        });
        self.emit(w, epoch, tokens);
        self.schedule_step(w);
    }

    fn emit(&mut self, w: usize, owner_epoch: OwnerEpoch, tokens: Vec<Emission>) {
        if !tokens.is_empty() {
            let body = Body::Emit {
                owner_epoch,
                tokens,
            };
            let msg = Msg {
                request: REQUEST,
                epoch: MigrationEpoch(0),
                body,
            };
            self.send(Party::W(w), &Peer::Gateway, msg, Default::default());
        }
    }

    /// The token channel sends again what was not acknowledged.
    pub fn resend_tokens(&mut self, w: usize) {
        if let Some(e) = &self.workers[w].emitter {
            let (epoch, tokens) = (e.owner_epoch, e.unacked.iter().cloned().collect::<Vec<_>>());
            self.emit(w, epoch, tokens);
        }
        let life = self.life(Party::W(w));
        self.at(3 * MS, Ev::ResendTokens { w, life });
    }

    fn schedule_step(&mut self, w: usize) {
        if let Some(run) = &self.workers[w].engine.run {
            let (life, owner_epoch) = (self.life(Party::W(w)), run.owner_epoch.0);
            let soon = self.rng.range(10 * US, 200 * US);
            self.at(
                soon,
                Ev::StepBegin {
                    w,
                    life,
                    owner_epoch,
                },
            );
        }
    }

    pub fn begin_step(&mut self, w: usize, owner_epoch: u64) {
        let Some(run) = &mut self.workers[w].engine.run else {
            return;
        };
        let idle = run.owner_epoch.0 == owner_epoch
            && !(run.stepping || run.ended || run.dying)
            && run.held.is_none()
            && run.hold_asked.is_none();
        if idle {
            run.stepping = true;
            let life = self.life(Party::W(w));
            let takes = self.rng.range(200 * US, 1_500 * US);
            self.at(
                takes,
                Ev::StepEnd {
                    w,
                    life,
                    owner_epoch,
                },
            );
        }
    }

    pub fn end_step(&mut self, w: usize, owner_epoch: u64) {
        let engine = &mut self.workers[w].engine;
        let Some(run) = engine
            .run
            .as_mut()
            .filter(|r| r.owner_epoch.0 == owner_epoch)
        else {
            return;
        };
        if run.dying {
            run.stepping = false;
            return self.free_run(w);
        }
        let held = run.held.is_some();
        self.truth
            .check(6, !held, || "a step ended behind the fence".into());
        let (seq, token) = self.workers[w].engine.finish_step();
        let token = self.emission(seq, token);
        let ended = token.finish.is_some();
        if let Some(e) = &mut self.workers[w].emitter {
            e.unacked.push_back(token.clone());
        }
        self.emit(w, OwnerEpoch(owner_epoch), vec![token]);
        let run = self.workers[w].engine.run.as_mut().expect("just stepped");
        run.ended = ended;
        if run.hold_asked.is_some() {
            self.hold(w);
        } else if !ended {
            self.schedule_step(w);
        }
        if ended {
            self.tell_source(w, Event::Local(Done::Ended));
        }
        self.free_if_over(w);
    }

    /// An ended request that no attempt pins is freed by its engine.
    fn free_if_over(&mut self, w: usize) {
        let worker = &self.workers[w];
        let over = worker
            .engine
            .run
            .as_ref()
            .is_some_and(|r| r.ended && r.pin.is_none());
        if over && worker.source.as_ref().is_none_or(|s| !s.is_migrating()) {
            self.workers[w].source = None;
            self.free_run(w);
        }
    }

    fn free_run(&mut self, w: usize) {
        let Some(run) = self.workers[w].engine.run.take() else {
            return;
        };
        self.truth.check(8, run.grant.is_none(), || {
            "pages freed while readable".into()
        });
        self.workers[w].engine.free(&run.table, run.stuck);
    }

    /// Stops the request at the step boundary it stands at.
    fn hold(&mut self, w: usize) {
        let life = self.life(Party::W(w));
        let refuses = self.rng.chance(1, 60);
        let Some(run) = &mut self.workers[w].engine.run else {
            return;
        };
        let Some(op) = run.hold_asked.take() else {
            return;
        };
        let stepping = run.stepping;
        let result = if refuses {
            Err(Cause::SourceRefused)
        } else {
            run.held = Some(op.epoch);
            Ok(Boundary {
                seal: run.control.seal,
                kv_len: run.kv_len as u64,
                dirty: run.dirty,
                ended: run.ended,
            })
        };
        self.truth
            .check(6, !stepping, || "held inside a step".into());
        let soon = self.rng.range(US, 50 * US);
        self.at(
            soon,
            Ev::SrcTell {
                w,
                life,
                done: Done::Held { op, result },
            },
        );
        if refuses {
            self.schedule_step(w);
        }
    }

    pub fn tell_source(&mut self, w: usize, event: Event) {
        let Some(mut machine) = self.workers[w].source.take() else {
            return;
        };
        let mut actions = Vec::new();
        machine.handle(self.clock(Party::W(w)), event, &mut actions);
        self.workers[w].source = Some(machine);
        for action in actions {
            if !self.may_go_on(Party::W(w)) {
                return;
            }
            self.do_source(w, action);
        }
        if self.workers[w].source.as_ref().is_some_and(Source::is_gone) {
            self.workers[w].source = None;
        }
        self.free_if_over(w);
    }

    /// A process may die between two actions.
    pub fn may_go_on(&mut self, party: Party) -> bool {
        if self.rng.chance(1, 4) {
            self.strike(party);
        }
        self.is_up(party)
    }

    fn do_source(&mut self, w: usize, action: Action<Do>) {
        let party = Party::W(w);
        match action {
            Action::StoreRead { op } => self.ask(party, Mach::Src, op, Request::Read),
            Action::StoreCas { op, expect, next } => {
                self.ask(party, Mach::Src, op, Request::Cas { expect, next });
            }
            Action::Send { to, msg, payload } => self.send(party, &to, msg, payload),
            Action::SetTimer { timer, at_ns } => self.set_timer(party, Mach::Src, timer, at_ns),
            Action::ClearTimer(timer) => self.clear_timer(party, Mach::Src, timer),
            Action::Report(report) => self.report(party, report),
            Action::Do(what) => self.begin_source_op(w, what),
        }
    }

    pub fn report(&mut self, party: Party, report: Report) {
        note!(self, "{party:?} reports {report:?}");
        match report {
            Report::Entered(step) => self.enter(step),
            Report::Released { .. } if self.step == Some(Step::Gc) => {
                let busy = self.workers.iter().any(|w| {
                    w.source.as_ref().is_some_and(Source::is_migrating)
                        || !(w.destination.is_idle() || w.destination.is_launched())
                });
                if !busy {
                    self.step = None;
                }
            }
            _ => {}
        }
    }

    fn begin_source_op(&mut self, w: usize, what: Do) {
        let life = self.life(Party::W(w));
        note!(self, "W({w}) does {what:?}");
        match what {
            Do::Hold { op, .. } => match &mut self.workers[w].engine.run {
                Some(run) if !run.dying => {
                    run.hold_asked = Some(op);
                    if !run.stepping {
                        self.hold(w);
                    }
                }
                _ => {
                    let done = Done::Held {
                        op,
                        result: Err(Cause::Engine),
                    };
                    self.at(US, Ev::SrcTell { w, life, done });
                }
            },
            Do::ReleaseHold => self.release_hold(w),
            Do::Unpin { epoch, quarantined } => {
                let past = self.truth.decisions.contains_key(&epoch);
                self.truth.check(3, past, || {
                    format!("unpinned with attempt {epoch} undecided")
                });
                if let Some(run) = &mut self.workers[w].engine.run {
                    let readable = run.grant.is_some();
                    run.pin = None;
                    run.stuck += quarantined;
                    self.truth
                        .check(8, !readable, || "unpinned while readable".into());
                }
            }
            Do::Retire { quarantined } => {
                let Some(run) = &mut self.workers[w].engine.run else {
                    return;
                };
                run.stuck += quarantined;
                let lost = self.truth.record.owner_epoch > run.owner_epoch
                    || self.truth.record.phase == RoutePhase::Finished;
                let epoch = run.owner_epoch;
                run.held = None;
                let stepping = run.stepping;
                run.dying = true;
                self.truth
                    .check(3, lost, || format!("retired while it owns epoch {epoch}"));
                self.workers[w].emitter = None;
                if !stepping {
                    self.free_run(w);
                }
            }
            other => {
                let takes = self.rng.spread(5 * US, 400 * US);
                self.at(
                    takes,
                    Ev::SrcOp {
                        w,
                        life,
                        what: other,
                    },
                );
            }
        }
    }

    fn release_hold(&mut self, w: usize) {
        let Some(run) = &mut self.workers[w].engine.run else {
            return;
        };
        run.hold_asked = None;
        if let Some(m) = run.held.take() {
            let aborted = self.truth.aborted(m);
            self.truth.check(3, aborted, || {
                format!("unfenced, attempt {m} is not aborted")
            });
            self.schedule_step(w);
        }
    }

    /// A timed action of the source ends, on memory as it is now.
    pub fn end_source_op(&mut self, w: usize, what: Do) {
        let corrupt =
            matches!(what, Do::Export { .. }) && self.fault(Fault::Corrupt, &[Party::W(w)]);
        let replicas_here = self.replicas;
        let stuck = self.rng.chance(1, 40);
        let outputs = self.truth.oracle.tokens.len();
        let engine = &mut self.workers[w].engine;
        let Some(run) = engine.run.as_mut().filter(|r| !r.dying) else {
            return self.fail_source_op(w, what);
        };
        let done = match what {
            Do::Pin { op, epoch } if !run.ended => {
                run.pin = Some(epoch);
                run.grant = Some(epoch);
                let spec = Data::Spec {
                    epoch,
                    tokens: outputs,
                };
                Done::Pinned {
                    op,
                    result: Ok(self.payloads.put(spec)),
                }
            }
            Do::Seal { op } => {
                let stable_len = run.kv_len as u64;
                Done::Sealed {
                    op,
                    result: Ok(Sealed {
                        stable_len,
                        dirty: run.dirty,
                    }),
                }
            }
            Do::Hash {
                op,
                from,
                to,
                replicas,
            } => {
                let (from, to) = (from as usize, to as usize);
                let tokens = run.tokens[from..to].to_vec();
                let mut claims = Vec::new();
                for r in 0..usize::from(replicas) {
                    for page in from / PAGE..to.div_ceil(PAGE) {
                        claims.push(page_claim(r, page, to, |at| {
                            engine.run_slot(at)[r % SHARES]
                        }));
                    }
                }
                let log = self.payloads.put(Data::Log { from, tokens });
                Done::Hashed {
                    op,
                    result: Ok((claims, log)),
                }
            }
            Do::Export {
                op,
                from,
                kv_len,
                owner_epoch,
                tokens_from,
                replicas,
            } => {
                let (from, kv_len) = (from as usize, kv_len as usize);
                let mut control = run.control;
                let tokens = run.tokens[from..=kv_len].to_vec();
                let mut slots: Vec<Slot> = (from..kv_len).map(|at| engine.run_slot(at)).collect();
                let replicas: Vec<[u8; 32]> = (0..usize::from(replicas))
                    .map(|r| set_digest(kv_len, |at| engine.run_slot(at)[r % SHARES]))
                    .collect();
                let seal = control.digest(owner_epoch);
                if corrupt {
                    // A bit flips between source memory and the wire's check.
                    match slots.first_mut() {
                        Some(slot) if op.n % 2 == 0 => slot[op.n as usize / 2 % replicas_here] ^= 4,
                        _ => control.state ^= 4,
                    }
                }
                let handed = self.workers[w].emitter.iter().flat_map(|e| &e.unacked);
                let handed = handed.filter(|t| t.seq >= tokens_from).cloned().collect();
                let tail_bytes = slots.len() as u64;
                let data = Data::Fence {
                    control,
                    slots,
                    tokens,
                };
                let exported = Exported {
                    set_digest: whole_digest(&replicas),
                    replicas,
                    control: seal,
                    control_bytes: 20,
                    tail_bytes,
                    tokens: handed,
                    payload: self.payloads.put(data),
                };
                Done::Exported {
                    op,
                    result: Ok(exported),
                }
            }
            Do::Revoke { op, .. } => {
                run.grant = None;
                Done::Revoked {
                    op,
                    quarantined: if stuck { PAGE as u64 } else { 0 },
                }
            }
            other => return self.fail_source_op(w, other),
        };
        self.tell_source(w, Event::Local(done));
    }

    fn fail_source_op(&mut self, w: usize, what: Do) {
        let cause = Cause::RequestEnded;
        let done = match what {
            Do::Pin { op, .. } => Done::Pinned {
                op,
                result: Err(cause),
            },
            Do::Seal { op } => Done::Sealed {
                op,
                result: Err(cause),
            },
            Do::Hash { op, .. } => Done::Hashed {
                op,
                result: Err(cause),
            },
            Do::Export { op, .. } => Done::Exported {
                op,
                result: Err(cause),
            },
            Do::Revoke { op, .. } => Done::Revoked { op, quarantined: 0 },
            _ => return,
        };
        self.tell_source(w, Event::Local(done));
    }
}
