//! What machines never see: payload bytes, token buffers, pulls in flight.

use std::collections::VecDeque;

use super::oracle::{Control, Slot};
use moonlivekv::id::{MigrationEpoch, OwnerEpoch};
use moonlivekv::migrate::io::{Op, Payload};
use moonlivekv::migrate::msg::Emission;

/// The bytes behind a payload number.
#[derive(Clone, Debug)]
pub enum Data {
    /// Import specification: which attempt it belongs to, and the most tokens there will be.
    Spec {
        epoch: MigrationEpoch,
        tokens: usize,
    },
    /// Token ids from a position on.
    Log { from: usize, tokens: Vec<u32> },
    /// The fence's payload.
    Fence {
        control: Control,
        slots: Vec<Slot>,
        tokens: Vec<u32>,
    },
    /// The journal's image of the request: all output tokens.
    Image { tokens: Vec<u32> },
}

#[derive(Default)]
pub struct Payloads(Vec<Data>);

impl Payloads {
    pub fn put(&mut self, data: Data) -> Payload {
        self.0.push(data);
        Payload(self.0.len() as u64)
    }

    pub fn get(&self, payload: Payload) -> Option<&Data> {
        self.0.get((payload.0 as usize).checked_sub(1)?)
    }
}

/// A worker's buffer of emitted tokens that the gateway has not acknowledged.
#[derive(Clone, Debug)]
pub struct Emitter {
    pub owner_epoch: OwnerEpoch,
    pub unacked: VecDeque<Emission>,
}

impl Emitter {
    pub fn acked(&mut self, through: u64) {
        while self.unacked.front().is_some_and(|t| t.seq <= through) {
            self.unacked.pop_front();
        }
    }
}

/// A pull in flight.
#[derive(Clone, Debug)]
pub struct Pull {
    pub op: Op,
    pub epoch: MigrationEpoch,
    /// Slots not landed yet.
    pub left: Vec<usize>,
    pub ended: Option<moonlivekv::migrate::destination::Pulled>,
}
