//! One attempt to move a request away, at its source.

use std::collections::VecDeque;

use super::{Action, Boundary, Do};
use crate::id::{MigrationEpoch, RequestId};
use crate::migrate::decide::{Ops, Pursuit};
use crate::migrate::io::{Op, Payload, Peer, Report, Step, Timer, TimerKind};
use crate::migrate::limits::Limits;
use crate::migrate::msg::{Body, Msg, Push};
use crate::route::{Cause, Intent, Party, Verdict};

/// Seals in a row without progress after which STREAM does not get any closer.
const STALLED: u8 = 3;

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Attempt {
    pub(super) coordinator: Peer,
    pub(super) destination: Peer,
    pub(super) ops: Ops,
    pub(super) pursuit: Pursuit,
    pub(super) stage: Stage,
    /// The local action under way; one at a time.
    pub(super) busy: Option<Op>,
    /// The import specification, once pinned.
    pub(super) spec: Option<Payload>,
    pub(super) held: bool,
    pub(super) replicas: u16,
    pub(super) align: u64,
    pub(super) sealed: u64,
    pub(super) offered: u64,
    /// The range whose pages are being hashed for the next offer.
    pub(super) hashing: (u64, u64),
    pub(super) verified: u64,
    /// Ends of the offers not verified yet.
    pub(super) window: VecDeque<u64>,
    /// Look again for newly decoded tokens.
    pub(super) reseal: bool,
    /// The least that a seal ever found unverified, and the seals since that found no less.
    pub(super) least_left: u64,
    pub(super) stalled: u8,
    /// The coordinator said GO.
    pub(super) go: bool,
    pub(super) boundary: Option<Boundary>,
    pub(super) push: Option<(Box<Push>, Payload)>,
    pub(super) resends: u16,
    /// Decided, but a local action is still under way.
    pub(super) verdict: Option<Verdict>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Stage {
    /// Is the intent really in the record?
    Validating,
    Pinning,
    /// Until the destination is ready.
    Pinned,
    Streaming,
    Holding,
    Exporting,
    /// Pushed; only the record can say how it goes on.
    Fenced,
    /// Decided; the destination's read access is being ended.
    Freeing,
}

impl Attempt {
    /// Asks for nothing yet.
    pub(super) fn new(intent: Intent, coordinator: Peer) -> Self {
        Self {
            coordinator,
            destination: Peer::Worker(intent.dst.clone()),
            ops: Ops::new(intent.migration_epoch),
            pursuit: Pursuit::new(intent, Party::Source),
            stage: Stage::Validating,
            busy: None,
            spec: None,
            held: false,
            replicas: 0,
            align: 1,
            sealed: 0,
            offered: 0,
            hashing: (0, 0),
            verified: 0,
            window: VecDeque::new(),
            reseal: false,
            least_left: u64::MAX,
            stalled: 0,
            go: false,
            boundary: None,
            push: None,
            resends: 0,
            verdict: None,
        }
    }

    pub(super) fn epoch(&self) -> MigrationEpoch {
        self.pursuit.intent().migration_epoch
    }

    pub(super) fn is_destination(&self, peer: &Peer) -> bool {
        peer.is_worker(&self.pursuit.intent().dst)
    }

    pub(super) fn start(&mut self) -> Op {
        let op = self.ops.next();
        self.busy = Some(op);
        op
    }

    pub(super) fn timer(&self, now: u64, kind: TimerKind, after_ns: u64, out: &mut Vec<Action>) {
        let timer = Timer {
            epoch: self.epoch(),
            kind,
        };
        out.push(Action::SetTimer {
            timer,
            at_ns: now.saturating_add(after_ns),
        });
    }

    pub(super) fn deadline(&self, now: u64, after_ns: u64, out: &mut Vec<Action>) {
        self.timer(now, TimerKind::Deadline, after_ns, out);
    }

    pub(super) fn send(
        &self,
        to: &Peer,
        request: RequestId,
        body: Body,
        payload: Payload,
        out: &mut Vec<Action>,
    ) {
        let msg = Msg {
            request,
            epoch: self.epoch(),
            body,
        };
        out.push(Action::Send {
            to: to.clone(),
            msg,
            payload,
        });
    }

    pub(super) fn send_destination(
        &self,
        request: RequestId,
        body: Body,
        payload: Payload,
        out: &mut Vec<Action>,
    ) {
        self.send(&self.destination, request, body, payload, out);
    }

    pub(super) fn tell_prepared(&self, request: RequestId, out: &mut Vec<Action>) {
        if let (Some(spec), Stage::Pinned) = (self.spec, self.stage) {
            self.send(&self.coordinator, request, Body::Prepared, spec, out);
        }
    }

    /// Tokens below the watermark that the destination has not verified.
    pub(super) fn left(&self) -> u64 {
        self.sealed - self.verified.min(self.sealed)
    }

    /// Right after a seal: whether further rounds would leave no less. Nothing is left, or the last
    /// few seals found no less than one before them did: decoding is as fast as the rounds are.
    pub(super) fn has_converged(&mut self, limits: &Limits) -> bool {
        let left = self.left();
        if left < self.least_left {
            self.least_left = left;
            self.stalled = 0;
        } else {
            self.stalled = self.stalled.saturating_add(1).min(STALLED);
        }
        self.sealed > 0
            && left <= u64::from(limits.go_tokens)
            && (left == 0 || self.stalled == STALLED)
    }

    pub(super) fn tell_progress(&self, converged: bool, request: RequestId, out: &mut Vec<Action>) {
        let body = Body::Progress {
            accepted: self.sealed,
            verified: self.verified,
            converged,
        };
        self.send(&self.coordinator, request, body, Payload::NONE, out);
        let report = Report::Streamed {
            verified: self.verified,
            accepted: self.sealed,
        };
        out.push(Action::Report(report));
    }

    pub(super) fn send_push(
        &self,
        now: u64,
        limits: &Limits,
        request: RequestId,
        out: &mut Vec<Action>,
    ) {
        if let Some((push, payload)) = &self.push {
            self.send_destination(request, Body::Push((**push).clone()), *payload, out);
            self.timer(now, TimerKind::Resend, limits.resend_ns, out);
        }
    }

    /// Moves to abort and says so; what is held stays held until there is evidence.
    pub(super) fn give_up(&mut self, cause: Cause, request: RequestId, out: &mut Vec<Action>) {
        if self.verdict.is_none() && self.pursuit.abort(cause, &mut self.ops, out) {
            out.push(Action::Report(Report::GivingUp(cause)));
            self.send(
                &self.coordinator,
                request,
                Body::Refuse { cause },
                Payload::NONE,
                out,
            );
        }
    }

    /// The next range to offer: whole blocks of the destination, but for the last.
    pub(super) fn next_range(&self, limits: &Limits) -> (u64, u64) {
        let most = self.offered + u64::from(limits.offer_tokens.max(1)).max(self.align);
        if most >= self.sealed {
            (self.offered, self.sealed)
        } else {
            (self.offered, most - most % self.align)
        }
    }

    /// Starts the next action of STREAM or the fence, if nothing is under way.
    pub(super) fn pump(&mut self, now: u64, limits: &Limits, out: &mut Vec<Action>) {
        if self.stage != Stage::Streaming
            || self.busy.is_some()
            || self.verdict.is_some()
            || self.pursuit.wants_abort()
        {
            return;
        }
        if self.go {
            // What is under way is verified first: it would travel again in the fence.
            if !self.window.is_empty() {
                return;
            }
            self.stage = Stage::Holding;
            self.deadline(now, limits.fence_ns, out);
            let op = self.start();
            out.push(Action::Report(Report::Entered(Step::Fence)));
            let deadline_ns = now.saturating_add(limits.fence_ns);
            out.push(Action::Do(Do::Hold { op, deadline_ns }));
        } else if self.offered < self.sealed {
            if self.window.len() < usize::from(limits.window.max(1)) {
                let (from, to) = self.next_range(limits);
                self.hashing = (from, to);
                let op = self.start();
                out.push(Action::Do(Do::Hash {
                    op,
                    from,
                    to,
                    replicas: self.replicas,
                }));
            }
        } else if self.reseal {
            self.reseal = false;
            let op = self.start();
            out.push(Action::Do(Do::Seal { op }));
        }
    }
}
