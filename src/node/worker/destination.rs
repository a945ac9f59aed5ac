//! What the destination machine asks for: stage, pull, hash, land, attach, control, arm, run.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::core::Core;
use super::corrupt;
use super::pull;
use super::slot::{Incoming, RemoteTable, Role, Slot};
use super::source::leaves;
use crate::control_state::ControlDigest;
use crate::drive::{Hands, Payloads, RouteStore, cause_word, now_ns};
use crate::engine::adapter::{Activation, AdapterError, Manifest, PageDigests, StageId, View};
use crate::id::{MigrationEpoch, OwnerEpoch, RequestId};
use crate::migrate::destination::{Destination, Do, Done, Pulled, Staged};
use crate::migrate::io::{Event, Op, Payload, Peer, Report, Step, StoreReply, Timer};
use crate::migrate::msg::{Body, Emission, Msg, PageClaim};
use crate::node::cause::{self, Side};
use crate::node::faults::{Fault, flip};
use crate::node::kv::{self, KvError, SetRun};
use crate::node::measure::at;
use crate::node::packed;
use crate::node::parcels::{OfferParcel, PushParcel};
use crate::node::spec::SourceSpec;
use crate::route::{Cause, ControlSeal};

/// The destination's executor, for the length of one event.
pub struct DestinationHands<'a> {
    /// The worker.
    pub core: &'a Arc<Core>,
    /// The request.
    pub slot: &'a Arc<Slot>,
    /// Its payloads.
    pub payloads: &'a mut Payloads,
    /// The attempt.
    pub at: &'a mut Incoming,
}

/// The cause of a failure among KV.
pub fn kv_cause(error: &KvError) -> Cause {
    match error {
        KvError::Engine(e) => cause::of(e, Side::Destination),
        _ => Cause::DestinationRefused,
    }
}

impl Hands<Destination> for DestinationHands<'_> {
    fn perform(&mut self, work: Do) -> Option<Done> {
        let mut work = work;
        if let Some(claim) = self.at.null.clone() {
            match self.null_perform(&claim, work) {
                Ok(done) => return done,
                Err(other) => work = other,
            }
        }
        match work {
            Do::Stage { op, epoch, spec } => {
                let result = self.stage(epoch, spec);
                Some(Done::Staged { op, result })
            }
            Do::Pull {
                op,
                from,
                to,
                log,
                deadline_ns,
            } => self.pull(op, from..to, log, deadline_ns),
            Do::CancelPull { op } => {
                for (_, cancelled) in self.at.pulls.iter().filter(|(o, _)| *o == op) {
                    cancelled.store(true, Ordering::Relaxed);
                }
                None
            }
            Do::Hash { op, from, to, .. } => {
                self.hash(op, from..to);
                None
            }
            Do::Land {
                op,
                payload,
                payload_from,
                from,
                to,
            } => {
                let result = self.land(payload, payload_from, from..to);
                Some(Done::Landed {
                    op,
                    result: self.told("land", result),
                })
            }
            Do::HashSet {
                op, from, kv_len, ..
            } => {
                let result = self.hash_set(from, kv_len);
                Some(Done::SetHashed {
                    op,
                    result: self.told("hash the set", result),
                })
            }
            Do::Attach { op, kv_len } => {
                let result = self.attach(kv_len);
                Some(Done::Attached {
                    op,
                    result: self.told("attach", result),
                })
            }
            Do::ImportControl { op, payload } => {
                let result = self.import_control(payload);
                Some(Done::ControlImported {
                    op,
                    result: self.told("import control", result),
                })
            }
            Do::ReExport { op, owner_epoch } => {
                let result = self.re_export(owner_epoch);
                Some(Done::ReExported {
                    op,
                    result: self.told("export control again", result),
                })
            }
            Do::Arm { op } => {
                let result = self.arm();
                Some(Done::Armed {
                    op,
                    result: self.told("arm", result),
                })
            }
            Do::Emit {
                owner_epoch,
                tokens,
            } => {
                self.emit(owner_epoch, tokens);
                None
            }
            Do::Activate { owner_epoch, seal } => {
                self.activate(owner_epoch, seal);
                None
            }
            Do::Disarm { epoch, .. } | Do::AbortImport { epoch, .. } => {
                self.give_back(epoch);
                None
            }
        }
    }

    fn send(&mut self, to: &Peer, msg: &Msg, payload: Payload) {
        let bytes = self.payloads.get(payload);
        let faults = &self.core.faults;
        if matches!(msg.body, Body::Ready { .. }) {
            faults.maybe_die(Fault::KillDestination, Step::Reserve);
        }
        self.core.send(to, msg, &bytes);
        if self.at.fenced {
            self.count("fence-messages");
        }
        if let Body::Verified { through } = msg.body {
            let prompt = self.at.spec.as_ref().map_or(u64::MAX, |s| s.prompt_tokens);
            if through >= prompt {
                let (request, epoch) = (self.slot.request, msg.epoch);
                self.core.measures.at(request, epoch, at::STREAMED);
            }
            faults.maybe_die(Fault::KillDestination, Step::Stream);
        }
    }

    fn set_timer(&mut self, timer: Timer, at_ns: u64) {
        self.core
            .set_timer(self.slot.request, Role::Destination, timer, at_ns);
    }

    fn clear_timer(&mut self, timer: Timer) {
        self.core
            .clear_timer(self.slot.request, Role::Destination, timer);
    }

    fn report(&mut self, report: Report) {
        let (request, epoch) = (self.slot.request, self.at.epoch);
        self.at.phase.follow("destination", request, epoch, &report);
        match report {
            Report::GivingUp(cause) => self.at.cause = Some(cause),
            Report::Decided { committed } => {
                self.core.measures.at(request, epoch, at::DECIDED);
                let cause = self.at.cause.take().map_or("decided-elsewhere", cause_word);
                self.core.metrics.ended("destination", committed, cause);
            }
            Report::Released { quarantined } => {
                self.core.measures.at(request, epoch, at::RELEASED);
                self.core
                    .measures
                    .add(request, epoch, "quarantined", quarantined);
                self.core.metrics.quarantined.inc_by(quarantined);
                self.payloads.drop_through(epoch);
                self.at.tables.clear();
            }
            Report::Mismatch { page, .. } => {
                tracing::warn!(%request, epoch = epoch.0, page, "a page differs from its claim");
                self.core.metrics.mismatches.inc();
                self.core.measures.add(request, epoch, "mismatches", 1);
            }
            Report::Stale(reason) => {
                self.core.metrics.stale("destination", reason);
                self.core.measures.add(request, epoch, "stale", 1);
            }
            _ => {}
        }
        tracing::debug!(%request, epoch = epoch.0, ?report, "destination");
    }

    fn store(&self) -> &dyn RouteStore {
        &*self.core.store
    }

    fn request(&self) -> RequestId {
        self.slot.request
    }

    fn before_store(&mut self, write: bool) {
        if self.at.fenced {
            self.count("fence-store-calls");
        }
        if write {
            self.core
                .faults
                .maybe_die(Fault::KillDestination, Step::Arm);
        }
    }

    fn after_store(&mut self, write: bool, reply: &mut StoreReply) {
        let core = self.core;
        if !write || !matches!(reply, StoreReply::Applied(_)) {
            return;
        }
        core.measures
            .at(self.slot.request, self.at.epoch, at::COMMITTED);
        core.faults.maybe_die(Fault::KillDestination, Step::Commit);
        // The store has applied it, and this side does not get to know.
        if core
            .faults
            .due(Fault::DropCommitReply, Step::Commit)
            .is_some()
        {
            *reply = StoreReply::InDoubt;
        }
    }
}

impl DestinationHands<'_> {
    /// Counts one of something in the present attempt.
    fn count(&self, what: &'static str) {
        let (request, epoch) = (self.slot.request, self.at.epoch);
        self.core.measures.add(request, epoch, what, 1);
    }

    fn told<T>(&self, what: &str, result: Result<T, KvError>) -> Result<T, Cause> {
        result.map_err(|error| {
            tracing::warn!(%error, request = %self.slot.request, "cannot {what}");
            kv_cause(&error)
        })
    }

    fn staged(&self) -> Result<StageId, KvError> {
        let none = AdapterError::Caller("nothing is staged for this attempt");
        Ok(self.at.stage.ok_or(none)?)
    }

    fn stage(&mut self, epoch: MigrationEpoch, spec: Payload) -> Result<Staged, Cause> {
        let (core, request) = (self.core, self.slot.request);
        let spec = SourceSpec::decode(&self.payloads.get(spec)).map_err(|error| {
            tracing::warn!(%error, %request, "the import specification cannot be read");
            Cause::DestinationRefused
        })?;
        if spec.options.null_handoff && !core.null_handoffs {
            tracing::warn!(%request, "null handoffs are for benches: not at this worker");
            return Err(Cause::DestinationRefused);
        }
        let stage = core
            .adapter
            .prepare_import(&spec.import(request, epoch))
            .map_err(|error| {
                tracing::info!(%error, %request, "cannot stage");
                cause::of(&error, Side::Destination)
            })?;
        let digester = Arc::clone(&core.digester);
        *self.at = Incoming {
            epoch,
            stages: std::mem::take(&mut self.at.stages),
            stage: Some(stage),
            set: SetRun::new(digester).ok(),
            source: self.at.source.take(),
            phase: std::mem::take(&mut self.at.phase),
            ..Incoming::default()
        };
        self.at.stages.push((epoch, stage));
        core.measures
            .transport(request, epoch, spec.options.path.name());
        if let Some(source) = self.at.source.clone()
            && let Err(error) = core.open(&Peer::Worker(source))
        {
            tracing::debug!(%error, %request, "no link to the source yet");
        }
        pull::warm(core, &spec);
        let mut align = 1;
        for group in &core.capabilities.header.groups {
            let pool = core
                .adapter
                .pool(group.group)
                .map_err(|e| cause::of(&e, Side::Destination))?;
            align = align.max(pool.layout.block_tokens());
        }
        self.at.spec = Some(Arc::new(spec));
        core.measures.at(request, epoch, at::RESERVED);
        let header = &core.capabilities.header;
        Ok(Staged {
            replicas: 1,
            align_tokens: align,
            page_tokens: header.page_tokens,
            bytes_per_token: header.token_bytes(),
        })
    }

    fn pull(&mut self, op: Op, tokens: Range<u64>, log: Payload, deadline_ns: u64) -> Option<Done> {
        let (core, slot) = (Arc::clone(self.core), Arc::clone(self.slot));
        core.measures.at(slot.request, op.epoch, at::STREAM);
        let failed = |outcome| Some(Done::Pulled { op, outcome });
        let (Some(stage), Some(spec)) = (self.at.stage, self.at.spec.clone()) else {
            return failed(Pulled::Lost);
        };
        let again = log == Payload::NONE;
        if !again {
            let Ok(parcel) = OfferParcel::decode(&self.payloads.get(log)) else {
                return failed(Pulled::Lost);
            };
            if let Err(error) = core
                .adapter
                .import_tokens(stage, parcel.from, &parcel.tokens)
            {
                tracing::warn!(%error, request = %slot.request, "the token log does not fit");
                return failed(Pulled::Lost);
            }
            let end = parcel.from + parcel.tokens.len() as u64;
            let table = RemoteTable {
                tokens: parcel.from..end,
                tables: parcel.tables,
            };
            self.at.tables.insert(parcel.from, Arc::new(table));
            self.payloads.drop_one(log);
        }
        let remote = self
            .at
            .tables
            .range(..=tokens.start)
            .next_back()
            .map(|(_, t)| Arc::clone(t));
        let Some(remote) = remote.filter(|r| r.tokens.end >= tokens.end) else {
            return failed(Pulled::Lost);
        };
        let cancelled = Arc::new(AtomicBool::new(false));
        self.at.pulls.push((op, Arc::clone(&cancelled)));
        let bytes = (tokens.end - tokens.start) * core.capabilities.header.token_bytes();
        let job = move || {
            let work = pull::Work {
                stage,
                spec,
                remote,
                tokens,
                deadline_ns,
                again,
                cancelled,
            };
            let outcome = pull::pull(&core, slot.request, op.epoch, &work);
            let mut state = slot.lock();
            state.incoming.pulls.retain(|(o, _)| *o != op);
            let event = Event::Local(Done::Pulled { op, outcome });
            core.destination_locked(&slot, &mut state, event);
        };
        if self.core.jobs.stream(bytes, job) {
            None
        } else {
            failed(Pulled::Failed)
        }
    }

    fn hash(&mut self, op: Op, tokens: Range<u64>) {
        let (core, slot) = (Arc::clone(self.core), Arc::clone(self.slot));
        let Some(stage) = self.at.stage else { return };
        let bytes = (tokens.end - tokens.start) * core.capabilities.header.token_bytes();
        let job = move || {
            corrupt::before_verify(&core, stage, &tokens);
            let mut pages = PageDigests::new();
            let header = &core.capabilities.header;
            let hashed = kv::hash_range(
                &*core.adapter,
                header,
                View::Stage(stage),
                tokens.clone(),
                &mut pages,
            );
            corrupt::after_verify(&core, stage, &tokens);
            let mut state = slot.lock();
            let hashed = hashed.and_then(|()| match state.incoming.set.as_mut() {
                Some(set) => set.add(&pages),
                None => Ok(()),
            });
            let result: Result<Vec<PageClaim>, Cause> = match hashed {
                Ok(()) => Ok(kv::claims(header, &pages)),
                Err(error) => {
                    tracing::warn!(%error, request = %slot.request, "cannot hash the stage");
                    Err(kv_cause(&error))
                }
            };
            let count = pages.len() as u64;
            core.measures
                .add(slot.request, op.epoch, "pages-hashed", count);
            core.destination_locked(&slot, &mut state, Event::Local(Done::Hashed { op, result }));
        };
        self.core.jobs.stream(bytes, job);
    }

    fn land(
        &mut self,
        payload: Payload,
        payload_from: u64,
        tokens: Range<u64>,
    ) -> Result<(), KvError> {
        let (core, stage) = (self.core, self.staged()?);
        core.faults
            .maybe_die(Fault::KillDestination, Step::ImportTail);
        let bytes = self.payloads.get(payload);
        let (section, tail) = parcel(&bytes)?;
        core.adapter
            .import_tokens(stage, section.tokens_from, &section.tokens)?;
        let header = &core.capabilities.header;
        if !core.settle_early(&mut self.at.early, stage, &tokens, tail)? {
            packed::land(&*core.adapter, header, stage, tail, payload_from, tokens)?;
        }
        core.measures
            .at(self.slot.request, self.at.epoch, at::LANDED);
        Ok(())
    }

    fn hash_set(&mut self, from: u64, kv_len: u64) -> Result<[u8; 32], KvError> {
        let (core, stage) = (self.core, self.staged()?);
        core.faults.maybe_die(Fault::KillDestination, Step::Verify);
        let (engine, header) = (&*core.adapter, &core.capabilities.header);
        let view = View::Stage(stage);
        let mut pages = PageDigests::new();
        if from == 0 {
            self.at.set = Some(SetRun::new(Arc::clone(&core.digester))?);
            kv::hash_all(engine, header, view, kv_len, &mut pages)?;
        }
        let gone = || AdapterError::Caller("no running set digest");
        let set = self.at.set.as_mut().ok_or_else(gone)?;
        let early = self.at.early.take();
        if let Some(early) = early.filter(|e| from > 0 && e.tokens.end == kv_len) {
            // Hashed in place already, and not to be written since.
            pages = early.pages;
        } else if from > 0 {
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
        let digest = set.finish(&pages, kv_len)?;
        let (request, epoch) = (self.slot.request, self.at.epoch);
        core.measures
            .add(request, epoch, "leaves-hashed-in-fence", leaves(&pages));
        let total = header.pages(kv_len);
        core.measures.add(request, epoch, "pages", total);
        core.measures.at(request, epoch, at::VERIFIED);
        Ok(digest.0)
    }

    fn attach(&mut self, kv_len: u64) -> Result<(), KvError> {
        let spec = self.at.spec.as_ref();
        let first_live = spec.map(|s| s.first_live.clone()).unwrap_or_default();
        Ok(self
            .core
            .adapter
            .commit_import(self.staged()?, &Manifest { kv_len, first_live })?)
    }

    fn import_control(&mut self, payload: Payload) -> Result<(), KvError> {
        let (core, stage) = (self.core, self.staged()?);
        let bytes = self.payloads.get(payload);
        let (mut section, _) = parcel(&bytes)?;
        if let Some(seed) = core.faults.due(Fault::CorruptControl, Step::ImportTail) {
            flip(&mut section.control, seed);
        }
        let imported = core
            .adapter
            .import_control(stage, &section.control, section.owner_epoch);
        imported.map_err(|error| {
            // Bytes that are not the source's may read as anything, as another model or another
            // generator: then that is not why it failed.
            let arrived = ControlDigest::of(&section.control, 0, section.owner_epoch).hash;
            match self.at.control {
                Some(claimed) if claimed != arrived => {
                    tracing::warn!(%error, request = %self.slot.request, "the control state was damaged");
                    AdapterError::ReplayMismatch("the hash of the control state").into()
                }
                _ => error.into(),
            }
        })
    }

    fn re_export(&mut self, owner_epoch: OwnerEpoch) -> Result<ControlSeal, KvError> {
        let export = self
            .core
            .adapter
            .export_control(View::Stage(self.staged()?), owner_epoch)?;
        self.core
            .measures
            .at(self.slot.request, self.at.epoch, at::CONTROL);
        Ok(ControlSeal {
            hash: export.digest.hash,
            offset: export.digest.offset,
            owner_epoch: export.digest.owner_epoch,
        })
    }

    fn arm(&mut self) -> Result<(), KvError> {
        self.core.adapter.arm(self.staged()?)?;
        self.core
            .measures
            .at(self.slot.request, self.at.epoch, at::ARMED);
        Ok(())
    }

    fn emit(&mut self, owner_epoch: OwnerEpoch, tokens: Vec<Emission>) {
        self.core
            .emitter
            .push_unsent(self.slot.request, owner_epoch, tokens, 0);
    }

    fn activate(&mut self, owner_epoch: OwnerEpoch, seal: u64) {
        let (core, request) = (self.core, self.slot.request);
        let Some(stage) = self.at.stage.take() else {
            return;
        };
        self.at.stages.retain(|(_, s)| *s != stage);
        let activation = Activation {
            owner_epoch,
            reemit_from: seal + 1,
        };
        let asked = now_ns();
        let launched = match core.adapter.activate(stage, activation) {
            Ok(activated) => {
                self.at.activated = Some(owner_epoch);
                activated.between(asked, now_ns())
            }
            Err(error) => {
                tracing::error!(%error, %request, "a committed request does not run");
                asked
            }
        };
        core.measures
            .at_ns(request, self.at.epoch, at::LAUNCH, launched);
        let stood = core
            .measures
            .between(request, self.at.epoch, at::ARRIVED, at::LAUNCH);
        if let Some(ns) = stood {
            core.metrics.stood("destination", ns);
        }
        self.at.fenced = false;
        core.faults.maybe_die(Fault::KillDestination, Step::Resume);
        self.at.set = None;
        self.at.tables.clear();
    }

    pub(super) fn give_back(&mut self, epoch: MigrationEpoch) {
        let (gone, kept): (Vec<_>, Vec<_>) = std::mem::take(&mut self.at.stages)
            .into_iter()
            .partition(|(e, _)| *e == epoch);
        self.at.stages = kept;
        for (_, stage) in gone {
            if let Err(error) = self.core.adapter.disarm(stage) {
                tracing::warn!(%error, request = %self.slot.request, "cannot free a stage");
            }
        }
        if self.at.epoch == epoch {
            self.at.stage = None;
            self.at.set = None;
        }
    }
}

fn parcel(bytes: &[u8]) -> Result<(PushParcel, &[u8]), KvError> {
    let unreadable = |_| AdapterError::Caller("the push cannot be read");
    Ok(PushParcel::decode(bytes).map_err(unreadable)?)
}
