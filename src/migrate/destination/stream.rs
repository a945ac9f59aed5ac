//! STREAM at the destination: pull an offer, hash it where it lies, compare, go on.
//!
//! One offer is hashed while the next one is pulled, but only where the two share no block: nobody
//! writes a page from the moment its hash begins until the decision.

use super::machine::{Attempt, Stage};
use super::{Action, Do, Pulled, Staged};
use crate::migrate::io::{Action as Act, Op, Payload, Report, TimerKind};
use crate::migrate::limits::Limits;
use crate::migrate::msg::{Body, Offer, PageClaim};
use crate::route::Cause;
use crate::route::mutants::mutant;

/// An offer under way.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Offered {
    pub(super) offer: Offer,
    log: Payload,
    /// All its bytes are resident and nobody writes them.
    landed: bool,
    /// Hashes that came back equal so far.
    equal: u16,
    tries: u16,
}

/// A pull under way.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Pulling {
    pub(super) op: Op,
    from: u64,
}

impl Staged {
    /// The claims that an offer of `from..to` must make, without their digests: every replica's
    /// share of every page it touches.
    fn expected(&self, from: u64, to: u64) -> impl Iterator<Item = (u16, u32, u16)> + use<> {
        let page = u64::from(self.page_tokens.max(1));
        let pages = from / page..to.div_ceil(page);
        (0..self.replicas).flat_map(move |replica| {
            pages
                .clone()
                .map(move |p| (replica, p as u32, (to - p * page).min(page) as u16))
        })
    }
}

impl Attempt {
    pub(super) fn on_offer(
        &mut self,
        now: u64,
        mut offer: Offer,
        log: Payload,
        limits: &Limits,
        out: &mut Vec<Action>,
    ) {
        let (Some(staged), Stage::Streaming) = (self.staged, self.stage) else {
            return;
        };
        if self.is_over() {
            return;
        }
        let claimed = offer.claims.iter().map(|c| (c.replica, c.page, c.valid));
        if offer.from >= offer.to || !claimed.eq(staged.expected(offer.from, offer.to)) {
            out.push(Act::Report(Report::Stale("malformed offer")));
            return;
        }
        let queued = self.offers.back().map_or(self.verified, |o| o.offer.to);
        if offer.to <= self.verified {
            // Its answer was lost.
            self.send(
                &self.source,
                Body::Verified {
                    through: self.verified,
                },
                out,
            );
            return;
        }
        if offer.from > queued || offer.to <= queued {
            return; // an offer before it was lost and comes again, or it is under way already
        }
        if offer.from < queued {
            let page = u64::from(staged.page_tokens.max(1));
            offer.claims.retain(|c| u64::from(c.page) >= queued / page);
            offer.from = queued;
        }
        self.offers.push_back(Offered {
            offer,
            log,
            landed: false,
            equal: 0,
            tries: 0,
        });
        self.pump(now, limits, out);
    }

    /// Starts what can be started: one pull, and the hashes of one offer.
    pub(super) fn pump(&mut self, now: u64, limits: &Limits, out: &mut Vec<Action>) {
        let (Some(staged), Stage::Streaming, false) = (self.staged, self.stage, self.is_over())
        else {
            return;
        };
        self.start_hashes(out);
        self.start_pull(now, staged, limits, out);
    }

    fn start_hashes(&mut self, out: &mut Vec<Action>) {
        let replicas = self.replicas();
        if !self.hashes.is_empty() {
            return;
        }
        let Some(front) = self.offers.front_mut() else {
            return;
        };
        let quiet = mutant!("verify-before-write-ends", front.landed, true);
        if !quiet {
            return;
        }
        front.equal = 0;
        let (from, to) = (front.offer.from, front.offer.to);
        for replica in 0..replicas {
            let op = self.ops.next();
            self.hashes.push((op, replica));
            out.push(Act::Do(Do::Hash {
                op,
                replica,
                from,
                to,
            }));
        }
    }

    fn start_pull(&mut self, now: u64, staged: Staged, limits: &Limits, out: &mut Vec<Action>) {
        if self.pull.is_some() {
            return;
        }
        let align = u64::from(staged.align_tokens.max(1));
        let Some(i) = self.offers.iter().position(|o| !o.landed) else {
            return;
        };
        let (from, to) = (self.offers[i].offer.from, self.offers[i].offer.to);
        if i > 0 && from % align != 0 {
            return; // shares a block with an offer that is hashed first
        }
        let bytes = (to - from).saturating_mul(staged.bytes_per_token);
        if let Err(at_ns) = self.shaper.take(bytes, now) {
            return self.timer(now, TimerKind::Pace, at_ns.saturating_sub(now), out);
        }
        let op = self.ops.next();
        let log = std::mem::take(&mut self.offers[i].log);
        self.pull = Some(Pulling { op, from });
        let deadline_ns = now.saturating_add(limits.pull_ns);
        out.push(Act::Do(Do::Pull {
            op,
            from,
            to,
            log,
            deadline_ns,
        }));
    }

    pub(super) fn on_pulled(
        &mut self,
        now: u64,
        op: Op,
        outcome: Pulled,
        limits: &Limits,
        out: &mut Vec<Action>,
    ) {
        let Some(pull) = self.pull.take_if(|p| p.op == op) else {
            return;
        };
        if let Pulled::Stuck { quarantined } = outcome {
            self.quarantined = self.quarantined.saturating_add(quarantined);
            self.give_up(Cause::TransportFailed, out);
        }
        if let Some(o) = self.offers.iter_mut().find(|o| o.offer.from == pull.from) {
            match outcome {
                Pulled::Landed => o.landed = true,
                Pulled::Failed if o.tries < limits.pull_retries => o.tries += 1,
                Pulled::Failed | Pulled::Stuck { .. } => self.give_up(Cause::TransportFailed, out),
                Pulled::Lost => self.give_up(Cause::PeerLost, out),
            }
        }
        self.go_on(now, limits, out);
    }

    pub(super) fn on_hashed(
        &mut self,
        now: u64,
        op: Op,
        result: Result<Vec<PageClaim>, Cause>,
        limits: &Limits,
        out: &mut Vec<Action>,
    ) {
        let Some(i) = self.hashes.iter().position(|(o, _)| *o == op) else {
            return;
        };
        let (_, replica) = self.hashes.swap_remove(i);
        if let Some(front) = self.offers.front_mut() {
            let claimed = front.offer.claims.iter().filter(|c| c.replica == replica);
            match result {
                Ok(actual) if claimed.clone().eq(actual.iter()) => front.equal += 1,
                Ok(actual) => {
                    let differs = claimed
                        .zip(&actual)
                        .find(|(c, a)| c != a)
                        .map(|(c, _)| c.page);
                    let page = differs.unwrap_or(u32::MAX);
                    out.push(Act::Report(Report::Mismatch { replica, page }));
                }
                Err(cause) => self.give_up(cause, out),
            }
        }
        if self.hashes.is_empty() {
            self.judge_front(limits, out);
        }
        self.go_on(now, limits, out);
    }

    /// All replicas' hashes of the front offer are back.
    fn judge_front(&mut self, limits: &Limits, out: &mut Vec<Action>) {
        let replicas = self.replicas();
        let Some(front) = self.offers.front_mut() else {
            return;
        };
        if front.equal == replicas {
            self.verified = front.offer.to;
            self.offers.pop_front();
            let verified = Body::Verified {
                through: self.verified,
            };
            self.send(&self.source, verified, out);
        } else if front.tries < limits.pull_retries {
            front.tries += 1;
            front.landed = false;
        } else {
            self.give_up(Cause::PageMismatch, out);
        }
    }

    fn go_on(&mut self, now: u64, limits: &Limits, out: &mut Vec<Action>) {
        self.pump(now, limits, out);
        self.land_when_quiet(out);
    }
}
