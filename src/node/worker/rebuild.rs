//! What the rebuilder asks for: a request from its journal, on a worker that never had it.

use std::sync::Arc;

use super::core::Core;
use super::slot::{Rebuilding, Role, Slot};
use crate::drive::{Hands, Payloads, RouteStore};
use crate::engine::adapter::{Activation, Checkpoint, JournalImage, StageId};
use crate::engine::reference::GenerateSpec;
use crate::gateway::image::Image;
use crate::id::{OwnerEpoch, RequestId};
use crate::migrate::io::{Event, Op, Payload, Peer, Report, Timer};
use crate::migrate::msg::Msg;
use crate::migrate::recovery::{Do, Done, Rebuilder};
use crate::node::cause::{self, Side};
use crate::node::convert;
use crate::route::Cause;

/// The rebuilder's executor, for the length of one event.
pub struct RebuildHands<'a> {
    /// The worker.
    pub core: &'a Arc<Core>,
    /// The request.
    pub slot: &'a Arc<Slot>,
    /// Its payloads.
    pub payloads: &'a mut Payloads,
    /// What was rebuilt.
    pub at: &'a mut Rebuilding,
}

/// A request ready to run.
enum Ready {
    /// From a checkpoint: an armed stage.
    Stage(StageId),
    /// From its prompt.
    Submit(Box<GenerateSpec>),
}

impl Hands<Rebuilder> for RebuildHands<'_> {
    fn perform(&mut self, work: Do) -> Option<Done> {
        match work {
            Do::Rebuild {
                op,
                image,
                owner_epoch,
                ..
            } => {
                self.rebuild(op, image, owner_epoch);
                None
            }
            Do::Activate {
                owner_epoch,
                journaled,
            } => {
                self.activate(owner_epoch, journaled);
                None
            }
            Do::Discard { .. } => {
                self.at.submit = None;
                if let Some(Err(error)) = self.at.stage.take().map(|s| self.core.adapter.disarm(s))
                {
                    tracing::warn!(%error, request = %self.slot.request, "cannot free a rebuilt stage");
                }
                None
            }
        }
    }

    fn send(&mut self, to: &Peer, msg: &Msg, payload: Payload) {
        self.core.send(to, msg, &self.payloads.get(payload));
    }

    fn set_timer(&mut self, timer: Timer, at_ns: u64) {
        self.core
            .set_timer(self.slot.request, Role::Rebuilder, timer, at_ns);
    }

    fn clear_timer(&mut self, timer: Timer) {
        self.core
            .clear_timer(self.slot.request, Role::Rebuilder, timer);
    }

    fn report(&mut self, report: Report) {
        tracing::debug!(request = %self.slot.request, ?report, "rebuilder");
    }

    fn store(&self) -> &dyn RouteStore {
        &*self.core.store
    }

    fn request(&self) -> RequestId {
        self.slot.request
    }
}

impl RebuildHands<'_> {
    fn rebuild(&mut self, op: Op, image: Payload, owner_epoch: OwnerEpoch) {
        let image = Image::decode(&self.payloads.get(image));
        let (core, slot) = (Arc::clone(self.core), Arc::clone(self.slot));
        let job = move || {
            let result = match image {
                Ok(image) => ready(&core, slot.request, image, owner_epoch),
                Err(error) => {
                    tracing::warn!(%error, request = %slot.request, "the image cannot be read");
                    Err(Cause::DestinationRefused)
                }
            };
            let mut state = slot.lock();
            let result = result.map(|ready| match ready {
                Ready::Stage(stage) => state.rebuild.stage = Some(stage),
                Ready::Submit(spec) => state.rebuild.submit = Some(spec),
            });
            let event = Event::Local(Done::Rebuilt { op, result });
            core.rebuilder_locked(&slot, &mut state, event);
        };
        self.core.jobs.run(job);
    }

    fn activate(&mut self, owner_epoch: OwnerEpoch, journaled: u64) {
        let (core, request) = (self.core, self.slot.request);
        core.emitter.forget(request);
        let run = match (self.at.stage.take(), self.at.submit.take()) {
            (Some(stage), _) => {
                let activation = Activation {
                    owner_epoch,
                    reemit_from: journaled + 1,
                };
                core.adapter
                    .activate(stage, activation)
                    .map(drop)
                    .map_err(|e| e.to_string())
            }
            (None, Some(spec)) => core
                .engine
                .submit(*spec)
                .map(drop)
                .map_err(|e| e.to_string()),
            (None, None) => Err("nothing was rebuilt".into()),
        };
        match run {
            Ok(()) => self.at.activated = Some(owner_epoch),
            Err(error) => tracing::error!(error, %request, "a recovered request does not run"),
        }
    }
}

fn ready(
    core: &Core,
    request: RequestId,
    image: Image,
    owner_epoch: OwnerEpoch,
) -> Result<Ready, Cause> {
    let mut spec = convert::generate_spec(image.submit).map_err(|error| {
        tracing::warn!(%error, %request, "the image's request cannot be read");
        Cause::DestinationRefused
    })?;
    spec.owner_epoch = owner_epoch;
    let Some(checkpoint) = image.checkpoint else {
        return Ok(Ready::Submit(Box::new(spec)));
    };
    let prompt = core.engine.tokenize(&spec.prompt).map_err(|error| {
        tracing::warn!(%error, %request, "the image's prompt cannot be tokenized");
        Cause::DestinationRefused
    })?;
    let journal = JournalImage {
        request,
        epoch: image.epoch,
        owner_epoch: checkpoint.owner_epoch,
        checkpoint: Checkpoint {
            seal: checkpoint.seal,
            kv_len: checkpoint.kv_len,
            control: checkpoint.control,
            set_digest: checkpoint.set_digest.map(crate::digest::SetDigest),
        },
        prompt,
        output: image.tokens.iter().map(|t| t.token).collect(),
    };
    match core.adapter.rebuild_from_journal(&journal) {
        Ok(rebuilt) => {
            tracing::info!(%request, class = ?rebuilt.class, seal = rebuilt.seal, "rebuilt");
            Ok(Ready::Stage(rebuilt.stage))
        }
        Err(error) => {
            tracing::warn!(%error, %request, "cannot rebuild");
            Err(cause::of(&error, Side::Destination))
        }
    }
}
