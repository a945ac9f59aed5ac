//! The initiator's transfers, on any path: what is queued, what is under way, what has ended.

use std::collections::VecDeque;
use std::time::Instant;

use crate::mem::RemoteRegion;
use crate::transport::span::{Cursor, check};
use crate::transport::{
    Completion, Local, Path, Rejected, Span, Transfer, TransferId, TransportError,
};

/// Most transfers in flight on one link.
pub(super) const IN_FLIGHT_MAX: usize = 1024;

/// One transfer under way.
pub(super) struct Op {
    pub(super) id: TransferId,
    pub(super) local: Local,
    pub(super) remote: RemoteRegion,
    pub(super) spans: Vec<Span>,
    pub(super) deadline: Instant,
    pub(super) total: u64,
    /// What has been asked for or handed over, as a place and as a count.
    pub(super) at: Cursor,
    pub(super) issued: u64,
    /// What is done.
    pub(super) done: u64,
}

/// A table of transfers with stable names: an id holds a slot and how often that slot was used, so
/// what arrives late for a finished transfer finds nobody.
pub(super) struct Ops {
    path: Path,
    slots: Vec<(u32, Option<Op>)>,
    free: Vec<u32>,
    /// Those with something left to issue, oldest first. May hold ids that have ended.
    pub(super) queue: VecDeque<TransferId>,
    ended: VecDeque<Completion>,
    live: usize,
    /// Not later than the earliest deadline.
    next_deadline: Option<Instant>,
}

impl Ops {
    pub(super) fn new(path: Path) -> Self {
        Self {
            path,
            slots: Vec::new(),
            free: Vec::new(),
            queue: VecDeque::new(),
            ended: VecDeque::new(),
            live: 0,
            next_deadline: None,
        }
    }

    /// Takes a transfer in, or hands it back.
    pub(super) fn submit(&mut self, transfer: Transfer) -> Result<TransferId, Box<Rejected>> {
        let reject = |error, transfer| Err(Box::new(Rejected { error, transfer }));
        if self.in_flight() >= IN_FLIGHT_MAX {
            return reject(
                TransportError::TooManyInFlight {
                    limit: IN_FLIGHT_MAX,
                },
                transfer,
            );
        }
        let total = match check(&transfer) {
            Ok(total) => total,
            Err(error) => return reject(error, transfer),
        };
        let slot = self.free.pop().unwrap_or_else(|| {
            self.slots.push((0, None));
            self.slots.len() as u32 - 1
        });
        let (uses, place) = &mut self.slots[slot as usize];
        *uses = uses.wrapping_add(1);
        let id = TransferId(u64::from(*uses) << 32 | u64::from(slot));
        let Transfer {
            local,
            remote,
            spans,
            deadline,
        } = transfer;
        self.next_deadline = Some(self.next_deadline.map_or(deadline, |d| d.min(deadline)));
        let at = Cursor::default();
        *place = Some(Op {
            id,
            local,
            remote,
            spans,
            deadline,
            total,
            at,
            issued: 0,
            done: 0,
        });
        self.queue.push_back(id);
        self.live += 1;
        Ok(id)
    }

    pub(super) fn get(&mut self, id: TransferId) -> Option<&mut Op> {
        let (uses, op) = self.slots.get_mut(id.0 as u32 as usize)?;
        if *uses == (id.0 >> 32) as u32 {
            op.as_mut()
        } else {
            None
        }
    }

    /// Ends a transfer: its lease waits in a completion for the caller. False if it has ended before.
    pub(super) fn end(&mut self, id: TransferId, outcome: Result<(), TransportError>) -> bool {
        if self.get(id).is_none() {
            return false;
        }
        let slot = id.0 as u32;
        let Some(op) = self.slots[slot as usize].1.take() else {
            return false;
        };
        self.free.push(slot);
        self.live -= 1;
        self.ended.push_back(Completion {
            id,
            outcome,
            bytes: op.done,
            path: self.path,
            local: Some(op.local),
            spans: op.spans,
        });
        true
    }

    /// Ends all of them alike.
    pub(super) fn end_all(&mut self, error: TransportError) {
        for slot in 0..self.slots.len() {
            let (uses, op) = &self.slots[slot];
            if op.is_some() {
                self.end(TransferId(u64::from(*uses) << 32 | slot as u64), Err(error));
            }
        }
        self.queue.clear();
    }

    /// The next transfer with something left to issue.
    pub(super) fn next(&mut self) -> Option<TransferId> {
        while let Some(&id) = self.queue.front() {
            if self.get(id).is_some_and(|op| op.issued < op.total) {
                return Some(id);
            }
            self.queue.pop_front();
        }
        None
    }

    /// Ends each transfer whose time is up.
    pub(super) fn expire(&mut self, now: Instant) {
        self.expire_after(now, |_| {});
    }

    /// As [`Ops::expire`], with a last look at each before it ends.
    pub(super) fn expire_after(&mut self, now: Instant, mut before: impl FnMut(&mut Op)) {
        if self.next_deadline.is_none_or(|d| now < d) {
            return;
        }
        self.next_deadline = None;
        for slot in 0..self.slots.len() {
            let Some(op) = &mut self.slots[slot].1 else {
                continue;
            };
            if now >= op.deadline {
                before(op);
                let id = op.id;
                self.end(id, Err(TransportError::DeadlineExceeded));
            } else {
                self.next_deadline = Some(
                    self.next_deadline
                        .map_or(op.deadline, |d| d.min(op.deadline)),
                );
            }
        }
    }

    pub(super) fn next_deadline(&self) -> Option<Instant> {
        self.next_deadline
    }

    /// Moves completions out.
    pub(super) fn take(&mut self, out: &mut [Completion]) -> usize {
        let n = out.len().min(self.ended.len());
        for (place, done) in out.iter_mut().zip(self.ended.drain(..n)) {
            *place = done;
        }
        n
    }

    pub(super) fn has_ended(&self) -> bool {
        !self.ended.is_empty()
    }

    /// Under way, without those that wait to be taken.
    pub(super) fn live(&self) -> usize {
        self.live
    }

    pub(super) fn in_flight(&self) -> usize {
        self.live + self.ended.len()
    }
}
