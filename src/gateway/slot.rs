//! One request at the gateway: the acceptor's machine under its lock, and the machine's executor.

use std::io::IoSlice;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::core::Core;
use super::hub::{Accepted, End, Live};
use super::image::{Checkpoint, Image};
use super::metrics::Metrics;
use crate::drive::{Hands, Payloads, RouteStore, envelope, kind, name};
use crate::id::{MigrationEpoch, OwnerEpoch, RequestId, WorkerRef};
use crate::migrate::acceptor::{Acceptor, Do, Done, Event};
use crate::migrate::io::{Payload, Peer, Report, StoreReply, Timer};
use crate::migrate::msg::{Body, Emission, Msg};
use crate::rpc::v1;

/// How long handing a message to a worker's socket may take.
const SEND: Duration = Duration::from_secs(2);

/// Why a stream ended, as the worker numbers it.
pub(super) fn end_of(finish: u8) -> End {
    match finish {
        0 => End::Stop,
        1 => End::Length,
        2 => End::Abort,
        _ => End::Failed,
    }
}

/// A request.
pub struct Slot {
    /// Its name.
    pub request: RequestId,
    /// What its client reads.
    pub live: Arc<Live>,
    /// As the client asked for it, its seed resolved.
    pub submit: v1::SubmitRequest,
    model: Option<String>,
    pub(super) state: Mutex<State>,
}

/// What the lock protects.
pub(super) struct State {
    pub(super) acceptor: Acceptor,
    pub(super) payloads: Payloads,
    /// Accepted tokens, from number 1; those up to J are journaled.
    pub(super) tokens: Vec<Emission>,
    pub(super) checkpoint: Option<Checkpoint>,
    /// Recoveries that did not end with the request running.
    pub(super) failures: u32,
    /// Set by the machine: the record says that the stream is over.
    pub(super) closed: bool,
    /// Set by the machine: how a recovery ended.
    pub(super) recovered: Option<bool>,
}

impl Slot {
    /// A request with its machine.
    pub fn new(
        live: Arc<Live>,
        submit: v1::SubmitRequest,
        acceptor: Acceptor,
        tokens: Vec<Emission>,
        checkpoint: Option<Checkpoint>,
    ) -> Self {
        let state = State {
            acceptor,
            payloads: Payloads::default(),
            tokens,
            checkpoint,
            failures: 0,
            closed: false,
            recovered: None,
        };
        Self {
            model: None,
            request: live.request,
            live,
            submit,
            state: Mutex::new(state),
        }
    }
}

impl Slot {
    /// The model it was placed for.
    pub fn with_model(self, model: Option<String>) -> Self {
        Self { model, ..self }
    }

    /// The model it was placed for; `None` where any does.
    pub fn model(&self) -> Option<&str> {
        self.model.as_deref()
    }
}

/// The acceptor's executor, for the length of one event.
pub(super) struct AcceptorHands<'a> {
    pub(super) core: &'a Arc<Core>,
    pub(super) slot: &'a Slot,
    pub(super) payloads: &'a mut Payloads,
    pub(super) tokens: &'a mut Vec<Emission>,
    pub(super) checkpoint: &'a Option<Checkpoint>,
    pub(super) closed: &'a mut bool,
    pub(super) recovered: &'a mut Option<bool>,
    /// Set where the sender was told that its right has ended.
    pub(super) refused: bool,
}

/// Tokens that came with one event, to count what became of them.
#[derive(Debug, Default)]
pub(super) struct Came {
    tokens: u64,
    /// Of those, how many had numbers that were journaled already.
    again: u64,
    journaled: u64,
}

impl Came {
    pub(super) fn of(event: &Event, journaled: u64) -> Self {
        let Event::Recv { msg, .. } = event else {
            return Self::default();
        };
        let Body::Emit { tokens, .. } = &msg.body else {
            return Self::default();
        };
        Self {
            tokens: tokens.len() as u64,
            again: tokens.iter().filter(|t| t.seq <= journaled).count() as u64,
            journaled,
        }
    }

    /// Counts; `journaled` is what it is afterwards. Tokens that wait for the record are counted when
    /// the worker sends them again.
    pub(super) fn count(self, metrics: &Metrics, refused: bool, journaled: u64) {
        if refused {
            metrics.refused_by("stale-epoch", self.tokens);
            return;
        }
        metrics.duplicates.inc_by(self.again);
        if self.again == 0 && journaled == self.journaled && self.tokens > 0 {
            metrics.refused_by("in-doubt", self.tokens);
        }
    }
}

impl Hands<Acceptor> for AcceptorHands<'_> {
    fn perform(&mut self, work: Do) -> Option<Done> {
        let (core, request) = (self.core, self.slot.request);
        match work {
            Do::Append {
                op,
                owner_epoch,
                tokens,
            } => self
                .append(owner_epoch, tokens)
                .map(|through| Done::Appended { op, through }),
            Do::RaiseFloor { op, floor, owner } => self
                .raise_floor(floor, &owner)
                .then_some(Done::FloorRaised { op }),
            Do::Deliver { through } => {
                self.deliver(through);
                None
            }
            Do::BuildImage { op, through } => {
                let image = self.image(through);
                let payload = self.payloads.keep(MigrationEpoch(0), image.encode());
                Some(Done::ImageBuilt { op, payload })
            }
            Do::Alarm { seq, from } => {
                core.metrics.alarms.inc();
                tracing::error!(%request, seq, %from, "two tokens claim one number: the stream is stopped");
                core.tell(
                    request,
                    "alarm",
                    format!("token {seq} came twice, unequal, from {from}"),
                );
                self.slot.live.end(End::Failed);
                None
            }
            Do::Closed => {
                *self.closed = true;
                None
            }
            Do::Recovered { running, .. } => {
                *self.recovered = Some(running);
                None
            }
        }
    }

    fn send(&mut self, to: &Peer, msg: &Msg, payload: Payload) {
        self.refused |= matches!(msg.body, Body::Fenced { .. });
        let Some(mesh) = self.core.mesh() else { return };
        let bytes = self.payloads.get(payload);
        let head = envelope::encode(msg);
        let parts = [IoSlice::new(&head), IoSlice::new(&bytes)];
        if let Err(error) = mesh.send(to, kind::PROTOCOL, 0, &parts, Instant::now() + SEND) {
            tracing::debug!(to = name(to), %error, request = %msg.request, "a message was not sent");
        }
    }

    fn set_timer(&mut self, timer: Timer, at_ns: u64) {
        self.core.set_timer(self.slot.request, timer, at_ns);
    }

    fn clear_timer(&mut self, timer: Timer) {
        self.core.clear_timer(self.slot.request, timer);
    }

    fn report(&mut self, report: Report) {
        tracing::debug!(request = %self.slot.request, ?report, "acceptor");
    }

    fn store(&self) -> &dyn RouteStore {
        self.core.routes()
    }

    fn request(&self) -> RequestId {
        self.slot.request
    }
}

impl AcceptorHands<'_> {
    /// J, or `None` where the journal failed: then nothing is delivered and the gateway stops.
    fn append(&mut self, epoch: OwnerEpoch, tokens: Vec<Emission>) -> Option<u64> {
        let request = self.slot.request;
        if let Err(error) = self.core.log.append(request, epoch, &tokens) {
            self.core.journal_failed(&error);
            return None;
        }
        self.core.metrics.accepted.inc_by(tokens.len() as u64);
        self.tokens.extend(tokens);
        Some(self.tokens.len() as u64)
    }

    fn raise_floor(&mut self, floor: OwnerEpoch, owner: &WorkerRef) -> bool {
        let (core, request) = (self.core, self.slot.request);
        if let Err(error) = core.log.raise_floor(request, floor, owner) {
            core.journal_failed(&error);
            return false;
        }
        core.workers.own(request, owner);
        core.metrics.flips.inc();
        core.tell(request, "flip", format!("owner epoch {floor}: {owner}"));
        true
    }

    fn deliver(&mut self, through: u64) {
        let live = &self.slot.live;
        for seq in live.accepted() + 1..=through {
            let Some(t) = usize::try_from(seq - 1)
                .ok()
                .and_then(|i| self.tokens.get(i))
            else {
                return;
            };
            let text = String::from_utf8_lossy(&t.text).into_owned();
            if !live.append(
                seq,
                Accepted {
                    token: t.token,
                    text,
                },
            ) {
                return;
            }
            if let Some(finish) = t.finish {
                live.end(end_of(finish));
                self.core.finished(self.slot.request, end_of(finish));
            }
        }
    }

    fn image(&self, through: u64) -> Image {
        // Above every attempt the record has seen; a store that does not answer here only costs the
        // rebuild its checkpoint's floor check, which then refuses, and it is tried again.
        let epoch = match self.core.routes().read(self.slot.request) {
            StoreReply::Value(v) => v.record.migration_epoch.next(),
            _ => MigrationEpoch(1),
        };
        let through = usize::try_from(through)
            .unwrap_or(usize::MAX)
            .min(self.tokens.len());
        let tokens = self.tokens[..through].to_vec();
        let usable = |c: &&Checkpoint| c.seal <= through as u64;
        let checkpoint = self.checkpoint.as_ref().filter(usable).cloned();
        Image {
            submit: self.slot.submit.clone(),
            epoch,
            checkpoint,
            tokens,
        }
    }
}
