//! What the source machine asks for: pin, offer, fence, export, and giving back.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::core::Core;
use super::slot::{Open, Outgoing, Role, Slot};
use crate::drive::{Hands, Payloads, RouteStore, cause_word, instant_at};
use crate::engine::adapter::{AdapterError, PageDigests, View};
use crate::id::{MigrationEpoch, RequestId};
use crate::migrate::io::{Event, Op, Payload, Peer, Report, Step, Timer};
use crate::migrate::msg::{Body, Msg};
use crate::migrate::source::{Boundary, Do, Done, Exported, Sealed, Source};
use crate::node::bulk::Grant;
use crate::node::cause::{self, Side};
use crate::node::faults::Fault;
use crate::node::kv::{self, KvError, SetRun};
use crate::node::measure::at;
use crate::node::packed;
use crate::node::parcels::{OfferParcel, PushParcel};
use crate::node::spec::{SourcePool, SourceSpec};
use crate::route::{Cause, ControlSeal};

/// How long revoking a destination's right to read may take before its blocks are quarantined.
const REVOKE: Duration = Duration::from_millis(500);

/// The source's executor, for the length of one event.
pub struct SourceHands<'a> {
    /// The worker.
    pub core: &'a Arc<Core>,
    /// The request.
    pub slot: &'a Arc<Slot>,
    /// Its payloads.
    pub payloads: &'a mut Payloads,
    /// The attempt.
    pub at: &'a mut Outgoing,
}

/// The cause of a failure among KV.
fn kv_cause(error: &KvError) -> Cause {
    match error {
        KvError::Engine(e) => cause::of(e, Side::Source),
        _ => Cause::SourceRefused,
    }
}

impl Hands<Source> for SourceHands<'_> {
    fn perform(&mut self, work: Do) -> Option<Done> {
        match work {
            Do::Pin { op, epoch } => {
                let result = self.pin(epoch);
                Some(Done::Pinned { op, result })
            }
            Do::Seal { op } => Some(Done::Sealed {
                op,
                result: self.seal(),
            }),
            Do::Hash { op, from, to, .. } => {
                self.offer(op, from, to);
                None
            }
            Do::Hold { op, deadline_ns } => Some(Done::Held {
                op,
                result: self.hold(op.epoch, deadline_ns),
            }),
            Do::Export {
                op,
                from,
                kv_len,
                owner_epoch,
                tokens_from,
                ..
            } => {
                if self.at.options.null_handoff {
                    let result = self.null_export(owner_epoch);
                    return Some(Done::Exported { op, result });
                }
                let result = self.export(from, kv_len, owner_epoch, tokens_from);
                let result = result.map_err(|error| {
                    tracing::warn!(%error, request = %self.slot.request, "export failed");
                    kv_cause(&error)
                });
                Some(Done::Exported { op, result })
            }
            Do::ReleaseHold => {
                let request = self.slot.request;
                let released = self.core.adapter.release_hold(request, self.at.epoch);
                self.note("release hold", released.err());
                None
            }
            Do::Revoke { op, epoch } => Some(Done::Revoked {
                op,
                quarantined: self.revoke(epoch),
            }),
            Do::Unpin { epoch, .. } => {
                self.unpin(epoch);
                None
            }
            Do::Retire { .. } => {
                self.retire();
                None
            }
        }
    }

    fn send(&mut self, to: &Peer, msg: &Msg, payload: Payload) {
        let bytes = self.payloads.get(payload);
        let faults = &self.core.faults;
        match &msg.body {
            Body::Prepared => faults.maybe_die(Fault::KillSource, Step::Prepare),
            Body::Push(_) => faults.maybe_die(Fault::KillSource, Step::CopyTail),
            _ => {}
        }
        // The first push leaves out what went ahead of it; one sent again carries it.
        let with_slots = match (&msg.body, &mut self.at.ahead) {
            (Body::Push(_), Some(ahead)) => std::mem::replace(&mut ahead.used, true)
                .then(|| [&bytes[..], &ahead.bytes].concat()),
            _ => None,
        };
        self.core
            .send(to, msg, with_slots.as_deref().unwrap_or(&bytes));
        if self.at.boundary.is_some() && msg.epoch == self.at.epoch {
            self.count("fence-messages");
        }
        match &msg.body {
            Body::Prepared => self.link_ahead(),
            Body::Push(_) => {
                self.core
                    .measures
                    .at(self.slot.request, msg.epoch, at::PUSHED);
                faults.maybe_die(Fault::KillSource, Step::Resume);
            }
            Body::Offer(_) => faults.maybe_die(Fault::KillSource, Step::Stream),
            _ => {}
        }
    }

    fn set_timer(&mut self, timer: Timer, at_ns: u64) {
        self.core
            .set_timer(self.slot.request, Role::Source, timer, at_ns);
    }

    fn clear_timer(&mut self, timer: Timer) {
        self.core
            .clear_timer(self.slot.request, Role::Source, timer);
    }

    fn report(&mut self, report: Report) {
        let request = self.slot.request;
        let epoch = self.at.epoch;
        self.at.phase.follow("source", request, epoch, &report);
        match report {
            Report::GivingUp(cause) => self.at.cause = Some(cause),
            Report::Decided { committed } => {
                self.core.measures.at(request, epoch, at::DECIDED);
                self.decided(committed);
                self.core.faults.maybe_die(Fault::KillSource, Step::Gc);
            }
            Report::Released { quarantined } => {
                self.core.measures.at(request, epoch, at::RELEASED);
                self.core
                    .measures
                    .add(request, epoch, "quarantined", quarantined);
                self.core.metrics.quarantined.inc_by(quarantined);
                self.payloads.drop_through(epoch);
            }
            Report::Stale(reason) => {
                self.core.metrics.stale("source", reason);
                self.core.measures.add(request, epoch, "stale", 1);
            }
            _ => {}
        }
        tracing::debug!(%request, epoch = epoch.0, ?report, "source");
    }

    fn store(&self) -> &dyn RouteStore {
        &*self.core.store
    }

    fn request(&self) -> RequestId {
        self.slot.request
    }
}

impl SourceHands<'_> {
    /// Counts one of something in the present attempt.
    fn count(&self, what: &'static str) {
        let (request, epoch) = (self.slot.request, self.at.epoch);
        self.core.measures.add(request, epoch, what, 1);
    }

    /// Counts an attempt that is decided, and how long the request stood still here for it.
    fn decided(&mut self, committed: bool) {
        let (metrics, request) = (&self.core.metrics, self.slot.request);
        let cause = self.at.cause.take().map_or("decided-elsewhere", cause_word);
        metrics.ended("source", committed, cause);
        let measures = &self.core.measures;
        if let Some(ns) = measures.between(request, self.at.epoch, at::HELD, at::DECIDED) {
            metrics.stood("source", ns);
        }
    }

    fn note(&self, what: &str, error: Option<AdapterError>) {
        if let Some(error) = error {
            tracing::warn!(%error, request = %self.slot.request, "{what}");
        }
    }

    fn refused(&self, what: &str, error: AdapterError) -> Cause {
        tracing::info!(%error, request = %self.slot.request, "{what}");
        cause::of(&error, Side::Source)
    }

    fn pin(&mut self, epoch: MigrationEpoch) -> Result<Payload, Cause> {
        let core = self.core;
        let pinned = core
            .adapter
            .pin(self.slot.request, epoch)
            .map_err(|e| self.refused("cannot pin", e))?;
        self.at.epoch = epoch;
        self.at.pins.push((epoch, pinned.pin));
        self.at.told = 0;
        self.at.boundary = None;
        self.at.ahead = None;
        self.at.set = SetRun::new(Arc::clone(&core.digester)).ok();
        let mut pools = Vec::new();
        for group in &core.capabilities.header.groups {
            let info = core
                .adapter
                .pool(group.group)
                .map_err(|e| self.refused("no such pool", e))?;
            let path = self.at.options.path;
            // Opened block by block as they are offered: an unoffered block is nobody's to read.
            let grant = core.bulk.grant(path, &info.pool, &[]).map_err(|error| {
                tracing::warn!(%error, path = path.name(), "cannot open the pool for reading");
                Cause::TransportFailed
            })?;
            let grant_bytes = grant.bytes().to_vec();
            self.at.open.push(Open {
                epoch,
                group: group.group,
                grant,
                blocks: 0,
            });
            pools.push(SourcePool {
                group: group.group,
                layout: info.layout,
                grant: grant_bytes,
            });
        }
        let spec = SourceSpec::new(&core.capabilities, &pinned, pools, self.at.options);
        self.at.pinned = Some(pinned);
        Ok(self.payloads.keep(epoch, spec.encode()))
    }

    /// Dials the destination before the fence needs the link. Its name comes with `Ready`; here only
    /// the store's link is warmed, by a read.
    fn link_ahead(&self) {
        let _ = self.core.store.read(self.slot.request);
    }

    fn seal(&mut self) -> Result<Sealed, Cause> {
        let pinned = self.at.pinned.as_ref().ok_or(Cause::SourceRefused)?;
        let sealed = self
            .core
            .adapter
            .seal_through(pinned.pin)
            .map_err(|e| self.refused("seal", e))?;
        Ok(Sealed {
            stable_len: sealed.stable_len,
            dirty: sealed.dirty || sealed.generation != pinned.generation,
        })
    }

    /// Opens the blocks of `from..to`, hashes their pages and reads their token ids, on a bulk
    /// thread; the answer comes back as an event.
    fn offer(&mut self, op: Op, from: u64, to: u64) {
        let Some(pin) = self.at.pinned.as_ref().map(|p| p.pin) else {
            return;
        };
        self.at.told = self.at.told.max(to);
        let opened = self.open_blocks(pin.into(), to);
        self.core
            .measures
            .add(self.slot.request, op.epoch, "rounds", 1);
        let (core, slot) = (Arc::clone(self.core), Arc::clone(self.slot));
        let job = move || {
            let result = opened.and_then(|()| offer_job(&core, pin.into(), from, to));
            let mut state = slot.lock();
            let result = match result {
                Ok((pages, parcel)) => {
                    let added = state.outgoing.set.as_mut().map(|s| s.add(&pages));
                    match added {
                        Some(Ok(())) => {
                            let payload = state.payloads.keep(op.epoch, parcel.encode());
                            Ok((kv::claims(&core.capabilities.header, &pages), payload))
                        }
                        _ => Err(Cause::SourceRefused),
                    }
                }
                Err(error) => {
                    tracing::info!(%error, request = %slot.request, "cannot offer");
                    Err(kv_cause(&error))
                }
            };
            core.source_locked(&slot, &mut state, Event::Local(Done::Hashed { op, result }));
        };
        let bytes = (to - from) * self.core.capabilities.header.token_bytes();
        self.core.jobs.stream(bytes, job);
    }

    fn open_blocks(&mut self, view: View, to: u64) -> Result<(), KvError> {
        for open in self.at.open.iter_mut().filter(|o| o.epoch == self.at.epoch) {
            let table = self.core.adapter.table(view, open.group, 0..to)?;
            if let Some(new) = table.get(open.blocks..).filter(|n| !n.is_empty()) {
                let extended = self.core.bulk.extend(&open.grant, new);
                extended.map_err(|e| AdapterError::Bug(format!("cannot open blocks: {e}")))?;
                open.blocks = table.len();
            }
        }
        Ok(())
    }

    fn hold(&mut self, epoch: MigrationEpoch, deadline_ns: u64) -> Result<Boundary, Cause> {
        let core = self.core;
        core.faults.maybe_die(Fault::KillSource, Step::Fence);
        let held = self.hold_braced(instant_at(deadline_ns));
        let boundary = match held {
            Ok(b) => b,
            // The stream ended at this very boundary: nothing is left to move.
            Err(AdapterError::Finished) => {
                return Ok(Boundary {
                    seal: 0,
                    kv_len: 0,
                    dirty: false,
                    ended: true,
                });
            }
            Err(e) => return Err(self.refused("cannot hold", e)),
        };
        let request = self.slot.request;
        core.measures.at(request, epoch, at::HELD);
        core.measures
            .at_ns(request, epoch, at::LAST_STEP, boundary.last_step_done_ns);
        let generation = self.at.pinned.as_ref().map(|p| p.generation);
        let dirty = boundary.sealed.dirty || Some(boundary.sealed.generation) != generation;
        core.measures.add(request, epoch, "seal", boundary.seal);
        core.measures.add(request, epoch, "kv-len", boundary.kv_len);
        self.at.boundary = Some(boundary);
        if !dirty {
            self.send_ahead(self.at.told, boundary.kv_len);
        }
        Ok(Boundary {
            seal: boundary.seal,
            kv_len: boundary.kv_len,
            dirty,
            ended: false,
        })
    }

    fn export(
        &mut self,
        from: u64,
        kv_len: u64,
        owner_epoch: crate::id::OwnerEpoch,
        tokens_from: u64,
    ) -> Result<Exported, KvError> {
        let core = self.core;
        let (engine, header) = (&*core.adapter, &core.capabilities.header);
        let request = self.slot.request;
        let gone = || KvError::Engine(AdapterError::NotHeld);
        let pin = self.at.pinned.as_ref().ok_or_else(gone)?.pin;
        let seal = self.at.boundary.as_ref().ok_or_else(gone)?.seal;
        let view = View::Pin(pin);
        let mut pages = PageDigests::new();
        let full = self.at.options.verify_full;
        if full {
            self.at.set = Some(SetRun::new(Arc::clone(&core.digester))?);
            kv::hash_all(engine, header, view, kv_len, &mut pages)?;
        }
        let set = self.at.set.as_mut().ok_or_else(gone)?;
        if !full {
            kv::hash_range(
                engine,
                header,
                view,
                from.max(set.covered()?)..kv_len,
                &mut pages,
            )?;
            if from >= kv_len && !kv_len.is_multiple_of(u64::from(header.page_tokens)) {
                engine.hash_tail(view, kv_len, &mut pages)?;
            }
        }
        let set_digest = set.finish(&pages, kv_len)?;
        core.measures.add(
            request,
            self.at.epoch,
            "leaves-hashed-in-fence-source",
            leaves(&pages),
        );
        let control = engine.export_control(view, owner_epoch)?;
        let section = PushParcel {
            tokens_from: self.at.told,
            tokens: engine.token_log(view, self.at.told)?,
            owner_epoch,
            control: control.bytes,
        };
        let mut payload = section.encode();
        let control_bytes = payload.len() as u32;
        self.at.ahead = self.at.ahead.take().filter(|a| a.tokens == (from..kv_len));
        if self.at.ahead.is_none() {
            packed::gather(engine, header, view, from..kv_len, &mut payload)?;
        }
        let ahead = self.at.ahead.as_ref().map_or(0, |a| a.bytes.len());
        let tail_bytes = (payload.len() - control_bytes as usize + ahead) as u64;
        let tokens = core.emitter.unacked(request, tokens_from, seal);
        core.measures.add(
            request,
            self.at.epoch,
            "fence-bytes",
            u64::from(control_bytes) + tail_bytes,
        );
        core.measures
            .add(request, self.at.epoch, "tail-slots", kv_len - from);
        core.measures.at(request, self.at.epoch, at::EXPORTED);
        Ok(Exported {
            set_digest: set_digest.0,
            replicas: vec![set_digest.0],
            control: ControlSeal {
                hash: control.digest.hash,
                offset: control.digest.offset,
                owner_epoch: control.digest.owner_epoch,
            },
            control_bytes,
            tail_bytes,
            tokens,
            payload: self.payloads.keep(self.at.epoch, payload),
        })
    }

    fn revoke(&mut self, epoch: MigrationEpoch) -> u64 {
        let deadline = Instant::now() + REVOKE;
        let mut quarantined = 0;
        let (gone, kept) = std::mem::take(&mut self.at.open)
            .into_iter()
            .partition(|o: &Open| o.epoch == epoch);
        self.at.open = kept;
        for Open { grant, .. } in gone {
            quarantined += revoke_one(self.core, &grant, deadline);
        }
        quarantined
    }

    fn unpin(&mut self, epoch: MigrationEpoch) {
        let (gone, kept): (Vec<_>, Vec<_>) = std::mem::take(&mut self.at.pins)
            .into_iter()
            .partition(|(e, _)| *e == epoch);
        self.at.pins = kept;
        for (_, pin) in gone {
            self.note("unpin", self.core.adapter.unpin(pin).err());
        }
        if self.at.epoch == epoch {
            self.at.pinned = None;
            self.at.set = None;
        }
    }

    fn retire(&mut self) {
        let (core, request) = (self.core, self.slot.request);
        self.note("retire", core.adapter.retire(request, self.at.epoch).err());
        for (_, pin) in std::mem::take(&mut self.at.pins) {
            self.note("unpin", core.adapter.unpin(pin).err());
        }
        core.emitter.forget(request);
        self.at.pinned = None;
        self.at.set = None;
    }
}

fn revoke_one(core: &Core, grant: &Grant, deadline: Instant) -> u64 {
    match core.bulk.revoke(grant, deadline) {
        Ok(bytes) => bytes,
        Err(error) => {
            tracing::warn!(%error, "revoking a grant failed");
            0
        }
    }
}

fn offer_job(
    core: &Core,
    view: View,
    from: u64,
    to: u64,
) -> Result<(PageDigests, OfferParcel), KvError> {
    let (engine, header) = (&*core.adapter, &core.capabilities.header);
    let mut pages = PageDigests::new();
    kv::hash_range(engine, header, view, from..to, &mut pages)?;
    let mut tokens = engine.token_log(view, from)?;
    tokens.truncate(usize::try_from(to - from).unwrap_or(usize::MAX));
    let mut tables = Vec::with_capacity(header.groups.len());
    for group in &header.groups {
        tables.push((group.group, engine.table(view, group.group, from..to)?));
    }
    Ok((
        pages,
        OfferParcel {
            from,
            tokens,
            tables,
        },
    ))
}

/// Leaves hashed.
pub fn leaves(pages: &PageDigests) -> u64 {
    pages.iter().map(|(_, leaves)| leaves.len() as u64).sum()
}
