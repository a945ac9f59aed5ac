//! Keeping the log's device awake while a change that somebody waits for is on its way.
//!
//! A disk, or the host under a virtual one, that has had nothing to do for a few milliseconds takes
//! two to four times as long for the next flush. Whoever knows that a decision is about to fall
//! says so, and until it fell the device is given something to do.

use super::Revision;
use super::embedded::EmbeddedStore;
use super::error::StoreError;
use std::time::{Duration, Instant};

/// Pause between two small flushes: well below the time after which devices were seen to doze.
const PAUSE: Duration = Duration::from_millis(1);
/// Nobody keeps a device awake for longer than this with one call.
const LONGEST: Duration = Duration::from_millis(250);

impl EmbeddedStore {
    /// As [`MetaStore::keep_awake`](super::MetaStore::keep_awake).
    pub(super) fn keep_device_awake(&self, key: &str, until: Instant) -> Result<(), StoreError> {
        let Some(dir) = self.dir() else { return Ok(()) };
        let until = until.min(Instant::now() + LONGEST);
        let revision = |store: &Self| -> Result<(Option<Revision>, bool), StoreError> {
            let core = store.lock()?;
            let entry = core.state.get(key);
            Ok((entry.map(|e| Revision(e.revision)), core.is_committing()))
        };
        let (before, _) = revision(self)?;
        loop {
            let (now, committing) = revision(self)?;
            if now != before || Instant::now() >= until {
                return Ok(());
            }
            // A flush under way keeps the device awake by itself, and another one beside it would
            // only make it longer. One caller at a time suffices.
            if !committing
                && let Some(_turn) = self.waking.try_lock()
                && let Err(error) = dir.wake()
            {
                tracing::debug!(%error, "the log's device is not kept awake");
                return Ok(());
            }
            std::thread::sleep(PAUSE);
        }
    }
}
