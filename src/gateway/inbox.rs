//! What arrives at the gateway over its links.

use std::sync::Arc;

use super::core::Core;
use super::image::Checkpoint;
use crate::drive::{Handler, Hello, envelope, kind, name};
use crate::id::{OwnerEpoch, RequestId};
use crate::migrate::io::{self, Peer};

/// The gateway's end of its links.
pub struct Inbox(pub Arc<Core>);

impl Handler for Inbox {
    fn joined(&self, hello: &Hello) {
        let Peer::Worker(worker) = &hello.from else {
            return;
        };
        let Some(rpc) = hello.endpoint("rpc") else {
            return;
        };
        let core = &self.0;
        core.workers.joined(worker.clone(), rpc.clone());
        core.tell(RequestId::default(), "worker-joined", worker.to_string());
        core.runtime
            .spawn(Arc::clone(core).describe(worker.clone()));
    }

    fn frame(&self, from: &Peer, frame: u16, _: u64, payload: &[u8]) {
        let core = &self.0;
        match frame {
            kind::PROTOCOL => match envelope::decode(payload) {
                Ok((msg, _)) => {
                    let Some(slot) = core.slot(msg.request) else {
                        core.metrics.refused("unknown");
                        return;
                    };
                    let payload = io::Payload::NONE;
                    core.post(
                        &slot,
                        io::Event::Recv {
                            from: from.clone(),
                            msg,
                            payload,
                        },
                    );
                }
                Err(error) => {
                    tracing::warn!(from = name(from), %error, "a message cannot be read");
                }
            },
            kind::CHECKPOINT => self.checkpoint(from, payload),
            kind::CLOSED => self.closed(from, payload),
            kind::DRAINING => {
                if let (Peer::Worker(worker), [draining]) = (from, payload) {
                    core.workers.set_draining(worker, *draining != 0);
                }
            }
            _ => {}
        }
    }

    fn left(&self, peer: &Peer) {
        let Peer::Worker(worker) = peer else { return };
        let core = &self.0;
        core.tell(RequestId::default(), "worker-lost", worker.to_string());
        core.workers.left(worker);
        core.metrics.workers.set(core.workers.all().len() as i64);
    }
}

impl Inbox {
    fn checkpoint(&self, from: &Peer, payload: &[u8]) {
        let Some((request, bytes)) = payload.split_first_chunk::<16>() else {
            return;
        };
        let request = RequestId(*request);
        let Some(slot) = self.0.slot(request) else {
            return;
        };
        let checkpoint = match Checkpoint::decode(bytes) {
            Ok(c) => c,
            Err(error) => {
                tracing::warn!(from = name(from), %error, "a checkpoint cannot be read");
                return;
            }
        };
        let mut state = slot.state.lock();
        // Of the present owner only: an earlier one's would not fit what came after it.
        if checkpoint.owner_epoch < state.acceptor.floor() {
            return;
        }
        if let Err(error) = self.0.log.checkpoint(request, bytes) {
            self.0.journal_failed(&error);
            return;
        }
        state.checkpoint = Some(checkpoint);
    }

    /// The engine failed on a request that this worker owns.
    fn closed(&self, from: &Peer, payload: &[u8]) {
        let (Peer::Worker(worker), Some((request, rest))) =
            (from, payload.split_first_chunk::<16>())
        else {
            return;
        };
        let Some((epoch, _)) = rest.split_first_chunk::<8>() else {
            return;
        };
        let (request, epoch) = (RequestId(*request), OwnerEpoch(u64::from_le_bytes(*epoch)));
        let Some(slot) = self.0.slot(request).filter(|s| s.live.ended().is_none()) else {
            return;
        };
        if slot.state.lock().acceptor.floor() != epoch {
            return;
        }
        tracing::warn!(%request, %worker, "the engine failed on a request; it is recovered");
        self.0.engine_failed(request);
    }
}
