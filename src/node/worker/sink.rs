//! Where the engine hands its tokens: to the emitter, and word of a stream's start and end to the
//! machines, never on the engine's own thread.

use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use super::core::Core;
use super::dump;
use crate::engine::reference::{CloseReason, TokenEvent, TokenSink};
use crate::gateway::image::Checkpoint;
use crate::id::{OwnerEpoch, RequestId};
use crate::node::emit::Emitter;

/// How long a checkpoint may wait for a step boundary.
const CHECKPOINT: Duration = Duration::from_secs(5);

/// The engine's sink. It is made before the worker, for the engine needs it to start.
pub struct Sink {
    emitter: Emitter,
    core: OnceLock<Weak<Core>>,
    dump_at: Option<dump::At>,
}

impl Sink {
    /// Tokens go to `emitter`.
    pub fn new(emitter: Emitter, dump_at: Option<dump::At>) -> Self {
        Self {
            emitter,
            core: OnceLock::new(),
            dump_at,
        }
    }

    /// Whose machines are told.
    pub fn attach(&self, core: &Arc<Core>) {
        let _ = self.core.set(Arc::downgrade(core));
    }

    fn core(&self) -> Option<Arc<Core>> {
        self.core.get()?.upgrade()
    }
}

impl TokenSink for Sink {
    fn token(&self, event: TokenEvent) {
        let (request, epoch, seq) = (event.request, event.owner_epoch, event.seq);
        let ended = event.finish.is_some();
        self.emitter.token(event);
        if let (Some(at), Some(core)) = (&self.dump_at, self.core())
            && !ended
        {
            at.reached(&core, request, seq);
        }
        // The first token of an ownership: from here on there is a control state to recover from.
        if !ended
            && !self.emitter.seen(request, epoch)
            && let Some(core) = self.core()
        {
            let job = Arc::clone(&core);
            core.jobs.run(move || checkpoint(&job, request, epoch));
        }
        if ended && let Some(core) = self.core() {
            let job = Arc::clone(&core);
            core.jobs.run(move || job.ended(request));
        }
    }

    fn closed(&self, request: RequestId, reason: CloseReason) {
        self.emitter.closed(request, reason);
        if matches!(reason, CloseReason::Aborted)
            && let Some(core) = self.core()
        {
            let job = Arc::clone(&core);
            core.jobs.run(move || job.ended(request));
        }
    }
}

/// Takes a request's control state at its next step boundary and sends it to the gateway.
fn checkpoint(core: &Core, request: RequestId, owner_epoch: OwnerEpoch) {
    let deadline = Instant::now() + CHECKPOINT;
    match core.adapter.journal_checkpoint(request, deadline) {
        Ok(c) => core.send_checkpoint(
            request,
            &Checkpoint {
                owner_epoch,
                seal: c.seal,
                kv_len: c.kv_len,
                control: c.control,
                set_digest: c.set_digest.map(|d| d.0),
            },
        ),
        // Recovery then computes the request again from its prompt.
        Err(error) => tracing::debug!(%request, %error, "no checkpoint"),
    }
}
