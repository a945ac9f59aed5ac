//! What the journal does on the side: flushing by the clock, preparing segments, letting old ones
//! go.

use super::error::JournalError;
use super::inner::Inner;
use super::record::{RESTATE, encode_restate};
use crate::id::{ErrorKind, RequestId};
use parking_lot::{Condvar, Mutex};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::Instant;

/// Bytes restated at most in one pass: old segments go in small steps, between appends.
const RESTATE_PASS: u64 = 2 << 20;

/// Segments that may stand beside what live requests need.
const SPARE_SEGMENTS: u64 = 3;

/// The journal's own thread; ends with it.
pub(super) struct Upkeep {
    stop: Arc<(Mutex<bool>, Condvar)>,
    thread: Option<JoinHandle<()>>,
}

impl Upkeep {
    pub(super) fn start(inner: &Arc<Inner>) -> Result<Self, JournalError> {
        let stop = Arc::new((Mutex::new(false), Condvar::new()));
        if inner.options.window.is_zero() {
            return Ok(Self { stop, thread: None });
        }
        let (weak, told) = (Arc::downgrade(inner), Arc::clone(&stop));
        let thread = std::thread::Builder::new()
            .name("journal-flush".to_owned())
            .spawn(move || run(&weak, &told))
            .map_err(|e| JournalError::Unavailable {
                cause: e.to_string(),
            })?;
        Ok(Self {
            stop,
            thread: Some(thread),
        })
    }
}

impl Drop for Upkeep {
    fn drop(&mut self) {
        *self.stop.0.lock() = true;
        self.stop.1.notify_all();
        if let Some(thread) = self.thread.take() {
            // Only a panic there makes this an error, and it was reported then.
            let _ = thread.join();
        }
    }
}

fn run(inner: &Weak<Inner>, stop: &(Mutex<bool>, Condvar)) {
    loop {
        let begun = Instant::now();
        let Some(inner) = inner.upgrade() else { return };
        match inner.maintain() {
            Ok(()) => {}
            // A full disk may heal; appends say so themselves where they must.
            Err(e) if e.kind() == ErrorKind::Retryable => {
                tracing::warn!(error = %e, "journal upkeep is held up");
            }
            Err(e) => {
                tracing::error!(error = %e, "journal upkeep ends");
                return;
            }
        }
        let next = begun + inner.options.window;
        drop(inner);
        let mut stopping = stop.0.lock();
        if !*stopping {
            stop.1.wait_until(&mut stopping, next);
        }
        if *stopping {
            return;
        }
    }
}

impl Inner {
    pub(super) fn maintain(&self) -> Result<(), JournalError> {
        let _pass = self.upkeep.lock();
        let mut core = self.lock()?;
        let written = core.written;
        self.flush(&mut core, written)?;
        drop(core);
        self.prepare_next()?;
        self.restate_oldest()?;
        self.remove_old()
    }

    /// Allocates the next segment's file before it is needed: filling it takes a disk some
    /// milliseconds, which no token shall wait for.
    fn prepare_next(&self) -> Result<(), JournalError> {
        {
            let core = self.lock()?;
            if core.blank.is_some() || core.log.end() * 2 < core.log.capacity() {
                return Ok(());
            }
        }
        let blank = self.series.allocate(self.options.segment_bytes);
        let blank = blank.map_err(|e| JournalError::Unavailable {
            cause: e.to_string(),
        })?;
        // Only upkeep sets it, and one pass runs at a time.
        self.lock()?.blank = Some(blank);
        Ok(())
    }

    /// Segments that live requests justify: twice their bytes, and some.
    fn allowed_segments(&self, live: u64) -> u64 {
        let each = self.options.segment_bytes;
        (2 * live).div_ceil(each) + SPARE_SEGMENTS
    }

    /// Writes requests that the oldest segment is kept for once more, at the log's end.
    fn restate_oldest(&self) -> Result<(), JournalError> {
        let mut left = RESTATE_PASS;
        while left > 0 {
            let (id, bytes) = {
                let core = self.lock()?;
                let allowed = self.allowed_segments(core.bytes);
                let oldest = core.segments.front().copied();
                let Some(oldest) = oldest.filter(|_| core.segments.len() as u64 > allowed) else {
                    return Ok(());
                };
                let mut old = core.requests.iter().filter(|(_, held)| held.home == oldest);
                let Some((&id, held)) = old.next() else {
                    return Ok(());
                };
                (id, held.request.bytes())
            };
            self.restate(id)?;
            left = left.saturating_sub(bytes.max(1));
        }
        Ok(())
    }

    fn restate(&self, id: RequestId) -> Result<(), JournalError> {
        let (mut from, mut home) = (1, None);
        let chunk = self.options.restate_chunk();
        // A chunk may be overshot by one token.
        let room = chunk + self.options.max_append;
        loop {
            let mut guard = self.lock_with_room(room)?;
            let core = &mut *guard;
            // Forgotten meanwhile: then what is restated of it means nothing.
            let Some(held) = core.requests.get_mut(&id) else {
                return Ok(());
            };
            core.scratch.0.clear();
            let next = encode_restate(&mut core.scratch, id, &held.request, from, chunk);
            let home = *home.get_or_insert(core.log.number());
            let record = core.log.push(RESTATE, &[&core.scratch.0]);
            match next {
                Some(next) => from = next,
                None => {
                    let old = std::mem::replace(&mut held.home, home);
                    *core.homes.entry(home).or_insert(0) += 1;
                    core.leave(old, record);
                    core.stats.restated += 1;
                    return self.write(core);
                }
            }
            self.write(core)?;
        }
    }

    /// Removes segments that nobody needs, oldest first and without gaps: a later segment's records
    /// may undo an earlier one's.
    fn remove_old(&self) -> Result<(), JournalError> {
        loop {
            let number = {
                let core = self.lock()?;
                let needed = core.homes.keys().next().copied().unwrap_or(u64::MAX);
                match core.segments.front() {
                    Some(&oldest) if oldest < needed.min(core.log.number()) => oldest,
                    _ => return Ok(()),
                }
            };
            let removed = self
                .series
                .remove(number)
                .and_then(|()| self.series.dir().sync());
            removed.map_err(|e| JournalError::Unavailable {
                cause: e.to_string(),
            })?;
            self.lock()?.segments.pop_front();
        }
    }
}
