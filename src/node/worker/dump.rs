//! KV and control state of a request at given output tokens, written to files: what the
//! demonstration compares at its end. Reads resident memory through the engine's own table.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::RecvTimeoutError;

use super::core::Core;
use crate::engine::adapter::View;
use crate::id::RequestId;
use crate::migrate::io::StoreReply;
use crate::node::packed;

/// Consecutive output tokens that are dumped: one that a hold misses is made up for by the next.
const COUNT: u64 = 3;
/// How long the engine's thread waits for the hold to be asked for, and how often it looks.
const ASKED: Duration = Duration::from_millis(500);
const LOOK: Duration = Duration::from_micros(100);
const HOLD: Duration = Duration::from_secs(20);

/// When to dump, and where to.
#[derive(Debug, Clone)]
pub struct At {
    /// The first output token.
    pub seq: u64,
    /// The directory.
    pub dir: PathBuf,
}

/// The files of one dump.
pub fn files(dir: &Path, request: RequestId, seal: u64) -> [PathBuf; 2] {
    ["kv", "control"].map(|kind| dir.join(format!("{request}-{seal}.{kind}")))
}

impl At {
    /// Called on the engine's thread, between steps: if this is the token, asks for a hold from
    /// another thread and waits until it is, so that the hold takes effect at this very boundary
    /// however busy the machine is.
    pub fn reached(&self, core: &Arc<Core>, request: RequestId, seq: u64) {
        if !(self.seq..self.seq + COUNT).contains(&seq) {
            return;
        }
        let (asking, given_up) = crossbeam_channel::bounded::<()>(0);
        let (engine, core, dir) = (Arc::clone(&core.engine), Arc::clone(core), self.dir.clone());
        let spawned = std::thread::Builder::new()
            .name("dump".into())
            .spawn(move || {
                // Dropped at the end, whatever came of it: nobody waits for a hold that never comes.
                let _asking = asking;
                if let Err(error) = dump(&core, &dir, request) {
                    tracing::warn!(%request, error, "no dump");
                }
            });
        let end = Instant::now() + ASKED;
        while spawned.is_ok() && !engine.boundary_wanted(request) && Instant::now() < end {
            if let Err(RecvTimeoutError::Disconnected) = given_up.recv_timeout(LOOK) {
                return;
            }
        }
    }
}

fn dump(core: &Core, dir: &Path, request: RequestId) -> Result<(), String> {
    let text = |e: &dyn std::fmt::Display| e.to_string();
    // Under the request's lock no fence can begin meanwhile, and one that has begun is seen.
    let slot = core.slot(request).ok_or("not here")?;
    let state = slot.lock();
    let source = state
        .source
        .as_ref()
        .filter(|s| !s.is_gone())
        .ok_or("not owned here")?;
    if source.is_fenced() {
        return Err("it is being moved".into());
    }
    let owner = source.owner_epoch();
    // Not so high that it ends an attempt under way, not so low that it is refused.
    let epoch = match core.store.read(request) {
        StoreReply::Value(v) if v.record.intent.is_some() => v.record.migration_epoch,
        StoreReply::Value(v) => v.record.migration_epoch.next(),
        _ => return Err("no record".into()),
    };
    let held = core
        .adapter
        .hold(request, epoch, Instant::now() + HOLD)
        .map_err(|e| text(&e))?;
    let outcome = (|| {
        let pinned = core.adapter.pin(request, epoch).map_err(|e| text(&e))?;
        let written = (|| {
            let view = View::Pin(pinned.pin);
            let (header, mut bytes) = (&core.capabilities.header, Vec::new());
            packed::gather(&*core.adapter, header, view, 0..held.kv_len, &mut bytes)
                .map_err(|e| text(&e))?;
            let control = core
                .adapter
                .export_control(view, owner)
                .map_err(|e| text(&e))?;
            for (file, bytes) in files(dir, request, held.seal)
                .iter()
                .zip([bytes, control.bytes])
            {
                // Under another name first: a reader finds a whole file or none.
                let part = file.with_extension("part");
                std::fs::write(&part, bytes).map_err(|e| text(&e))?;
                std::fs::rename(&part, file).map_err(|e| text(&e))?;
            }
            Ok(())
        })();
        // The pin of an attempt under way is that attempt's to give back.
        if !state
            .outgoing
            .pins
            .iter()
            .any(|(_, pin)| *pin == pinned.pin)
        {
            core.adapter.unpin(pinned.pin).map_err(|e| text(&e))?;
        }
        written
    })();
    core.adapter
        .release_hold(request, epoch)
        .map_err(|e| text(&e))?;
    outcome
}
