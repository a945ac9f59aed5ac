//! What must come out: a decoder in miniature whose next token depends on every KV slot and on the
//! whole control state, and the run of it that nobody disturbs.

use super::rng::{Rng, mix};
use moonlivekv::id::OwnerEpoch;
use moonlivekv::route::ControlSeal;

/// Shares of a slot, one a replica.
pub const SHARES: usize = 2;
pub type Slot = [u64; SHARES];

/// The decode-control state in miniature.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Control {
    pub state: u64,
    /// Last sampled token, which has no KV yet.
    pub pending: u32,
    /// Output tokens numbered.
    pub seal: u64,
}

impl Control {
    pub fn digest(&self, owner_epoch: OwnerEpoch) -> ControlSeal {
        let a = mix(mix(self.state, u64::from(self.pending)), self.seal);
        let mut hash = [0; 16];
        hash[..8].copy_from_slice(&a.to_le_bytes());
        hash[8..].copy_from_slice(&mix(a, 1).to_le_bytes());
        ControlSeal {
            hash,
            offset: self.seal,
            owner_epoch,
        }
    }
}

/// One decode step: the KV of the pending token, then the next token.
pub fn step(slots: impl Iterator<Item = Slot>, control: &Control) -> (Slot, Control) {
    let context = slots.flatten().fold(7, mix);
    let slot = std::array::from_fn(|r| mix(mix(context, u64::from(control.pending)), r as u64));
    let seen = slot.into_iter().fold(context, mix);
    let pending = (mix(seen, control.state) % 50_000) as u32;
    let next = Control {
        state: mix(control.state, u64::from(pending)),
        pending,
        seal: control.seal + 1,
    };
    (slot, next)
}

/// The undisturbed run of one request.
#[derive(Clone, Debug)]
pub struct Oracle {
    pub prompt: usize,
    /// Prompt, then all output tokens.
    pub tokens: Vec<u32>,
    /// KV by position.
    pub slots: Vec<Slot>,
    /// Control state once token number `i + 1` is numbered.
    pub control: Vec<Control>,
    /// Control state before output 1.
    pub start: Control,
}

impl Oracle {
    pub fn new(rng: &mut Rng, prompt: usize, outputs: usize) -> Self {
        let mut tokens: Vec<u32> = (0..prompt).map(|_| rng.below(50_000) as u32).collect();
        let mut slots: Vec<Slot> = Vec::new();
        // Prefill: the last prompt token's step samples output 1.
        let seed = rng.next();
        let mut control = Control {
            state: seed,
            pending: tokens[0],
            seal: 0,
        };
        let mut by_seal = Vec::new();
        let start = Control {
            state: seed,
            pending: tokens[prompt - 1],
            seal: 0,
        };
        for at in 0..prompt + outputs - 1 {
            let (slot, next) = step(slots.iter().copied(), &control);
            slots.push(slot);
            if at + 1 < prompt {
                control = Control {
                    pending: tokens[at + 1],
                    ..control
                };
            } else {
                control = next;
                tokens.push(control.pending);
                by_seal.push(control);
            }
        }
        Self {
            prompt,
            tokens,
            slots,
            control: by_seal,
            start,
        }
    }

    pub fn outputs(&self) -> u64 {
        self.control.len() as u64
    }

    /// Output token number `seq`, from 1.
    pub fn token(&self, seq: u64) -> Option<u32> {
        self.tokens.get(self.prompt + seq as usize - 1).copied()
    }

    pub fn control_at(&self, seal: u64) -> Control {
        match seal.checked_sub(1) {
            None => self.start,
            Some(i) => self.control[i as usize],
        }
    }

    pub fn kv_len(&self, seal: u64) -> usize {
        self.prompt + seal as usize - 1
    }
}
