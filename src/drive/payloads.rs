//! Bytes that travel with messages and that no machine looks at.

use std::collections::HashMap;
use std::sync::Arc;

use crate::id::MigrationEpoch;
use crate::migrate::io::Payload;

/// The payloads of one request at one party, each kept until its attempt is over.
#[derive(Debug, Default)]
pub struct Payloads {
    last: u64,
    kept: HashMap<u64, (MigrationEpoch, Arc<Vec<u8>>)>,
}

impl Payloads {
    /// Keeps bytes under a new number; no bytes are [`Payload::NONE`].
    pub fn keep(&mut self, epoch: MigrationEpoch, bytes: impl Into<Vec<u8>>) -> Payload {
        let bytes = bytes.into();
        if bytes.is_empty() {
            return Payload::NONE;
        }
        self.last += 1;
        self.kept.insert(self.last, (epoch, Arc::new(bytes)));
        Payload(self.last)
    }

    /// The bytes under a number; empty for [`Payload::NONE`] and for what was forgotten.
    pub fn get(&self, payload: Payload) -> Arc<Vec<u8>> {
        match self.kept.get(&payload.0) {
            Some((_, bytes)) => Arc::clone(bytes),
            None => Arc::default(),
        }
    }

    /// Forgets one.
    pub fn drop_one(&mut self, payload: Payload) {
        self.kept.remove(&payload.0);
    }

    /// Forgets the payloads of `epoch` and of all attempts before it.
    pub fn drop_through(&mut self, epoch: MigrationEpoch) {
        self.kept.retain(|_, (of, _)| *of > epoch);
    }

    /// Bytes kept.
    pub fn bytes(&self) -> usize {
        self.kept.values().map(|(_, b)| b.len()).sum()
    }
}
