//! Asking an engine in another process.

use super::mirror::{Mirror, Mirrors, Slots};
use super::v1::engine_adapter_client::EngineAdapterClient;
use super::v1::{self as pb};
use super::wire::*;
use super::{MAX_TOKENS, fault};
use crate::control_state::ControlDigest;
use crate::engine::adapter::*;
use crate::id::{ErrorKind, Incarnation, MigrationEpoch, OwnerEpoch, RequestId};
use crate::mem::WriteLease;
use std::collections::HashMap;
use std::future::Future;
use std::ops::Range;
use std::sync::mpsc;
use std::time::{Duration, Instant};
use tonic::transport::Channel;
use tonic::{Response, Status};

type Client = EngineAdapterClient<Channel>;

/// An engine that could not be attached.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// It cannot be reached, or does not answer as an engine.
    #[error(
        "the engine does not describe itself: {0}; is it running, and does it speak this protocol?"
    )]
    Describe(AdapterError),
    /// Its KV cannot be mirrored here.
    #[error("the engine's KV cannot be mirrored in this process: {0}")]
    Mirror(AdapterError),
}

impl ConnectError {
    /// What a caller can do about it.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Describe(e) | Self::Mirror(e) => e.kind(),
        }
    }
}

/// An engine in another process, as an [`EngineAdapter`].
///
/// Calls block the calling thread, so call it from threads that may block, as the contract says; the
/// runtime given must have threads of its own. Each call ends by the time limit given, or by its own
/// deadline and a little more, and an engine that does not answer then is
/// [`AdapterError::EngineLost`]. Nothing is retried here: calls are idempotent, so the caller may.
///
/// KV is mirrored: [`pool`](EngineAdapter::pool) and [`table`](EngineAdapter::table) speak of blocks
/// of this process. Asking for a pin's table fetches the slots; a stage's slots are sent when they
/// are hashed or committed, so the bytes a lease wrote are checked where they will be used.
pub struct RemoteEngine {
    client: Client,
    runtime: tokio::runtime::Handle,
    limit: Duration,
    capabilities: Capabilities,
    mirrors: Mirrors,
}

impl RemoteEngine {
    /// Attaches an engine behind a channel. `limit` bounds each call that has no deadline of its
    /// own; a rebuild may take ten times as long, since it may be a whole prefill.
    pub fn attach(
        channel: Channel,
        runtime: tokio::runtime::Handle,
        limit: Duration,
    ) -> Result<Self, ConnectError> {
        let client = EngineAdapterClient::new(channel)
            .max_decoding_message_size(crate::rpc::MAX_MESSAGE)
            .max_encoding_message_size(crate::rpc::MAX_MESSAGE);
        let mut c = client.clone();
        let call = async move { c.describe(pb::DescribeRequest {}).await };
        let answer = wait(&runtime, limit, call).map_err(|e| match e {
            Failed::Late => ConnectError::Describe(late(limit)),
            Failed::Status(s) => ConnectError::Describe(fault::from_status(&s, Incarnation(0))),
        })?;
        let capabilities = capabilities_of(&answer).map_err(ConnectError::Describe)?;
        let mut groups = HashMap::new();
        for geometry in &capabilities.header.groups {
            let pool = answer
                .pools
                .iter()
                .find(|p| p.group == u32::from(geometry.group));
            let mirror = there(pool)
                .and_then(|pool| Mirror::new(geometry, pool))
                .map_err(ConnectError::Mirror)?;
            groups.insert(geometry.group, mirror);
        }
        let mirrors = Mirrors::new(groups);
        Ok(Self {
            client,
            runtime,
            limit,
            capabilities,
            mirrors,
        })
    }

    fn ask<T, F>(&self, limit: Duration, call: impl FnOnce(Client) -> F) -> Result<T>
    where
        T: Send + 'static,
        F: Future<Output = Result<Response<T>, Status>> + Send + 'static,
    {
        wait(&self.runtime, limit, call(self.client.clone())).map_err(|e| match e {
            Failed::Late => late(limit),
            Failed::Status(s) => fault::from_status(&s, self.capabilities.incarnation),
        })
    }

    #[cfg(test)]
    pub(super) fn another(&self, incarnation: Incarnation) -> Self {
        let mirrors = Mirrors::new(HashMap::new());
        let capabilities = Capabilities {
            incarnation,
            ..self.capabilities.clone()
        };
        let (client, runtime, limit) = (self.client.clone(), self.runtime.clone(), self.limit);
        Self {
            client,
            runtime,
            limit,
            capabilities,
            mirrors,
        }
    }

    /// Time for a call that waits up to a deadline at the engine.
    fn until(&self, deadline: Instant) -> Duration {
        deadline.saturating_duration_since(Instant::now()) + self.limit
    }

    fn key(&self, request: RequestId, epoch: MigrationEpoch) -> pb::RequestKey {
        key(self.capabilities.incarnation, request, epoch)
    }

    fn view(&self, v: View) -> Option<pb::View> {
        Some(view(self.capabilities.incarnation, v))
    }

    fn stage(&self, stage: StageId) -> pb::StageRef {
        pb::StageRef {
            incarnation: self.capabilities.incarnation.0,
            stage: stage.0,
        }
    }

    fn pin_ref(&self, pin: PinId) -> pb::PinRef {
        pb::PinRef {
            incarnation: self.capabilities.incarnation.0,
            pin: pin.0,
        }
    }

    /// Ends a mirrored stage once the engine has let go of it.
    fn ended(&self, stage: StageId, released: Result<pb::Released>) -> Result<Released> {
        let released = released?;
        self.mirrors.close(stage.into());
        Ok(Released {
            blocks: released.blocks,
        })
    }
}

enum Failed {
    Late,
    Status(Status),
}

fn late(limit: Duration) -> AdapterError {
    AdapterError::EngineLost(format!("no answer within {limit:?}"))
}

/// Runs a call on the runtime's threads and waits for it on this one.
fn wait<T, F>(runtime: &tokio::runtime::Handle, limit: Duration, call: F) -> Result<T, Failed>
where
    T: Send + 'static,
    F: Future<Output = Result<Response<T>, Status>> + Send + 'static,
{
    let (done, answer) = mpsc::sync_channel(1);
    let task = runtime.spawn(async move {
        let _ = done.send(call.await);
    });
    match answer.recv_timeout(limit) {
        Ok(Ok(response)) => Ok(response.into_inner()),
        Ok(Err(status)) => Err(Failed::Status(status)),
        Err(_) => {
            task.abort();
            Err(Failed::Late)
        }
    }
}

/// A log of at most `most` tokens in the parts that `ask` gives. An engine that goes on giving is
/// not believed.
pub(super) fn whole_log(
    most: usize,
    from: u64,
    mut ask: impl FnMut(u64) -> Result<Vec<u32>>,
) -> Result<Vec<u32>> {
    let mut all = Vec::new();
    loop {
        let part = ask(from.saturating_add(all.len() as u64))?;
        let more = part.len() >= MAX_TOKENS;
        all.extend(part);
        if all.len() > most {
            return Err(AdapterError::Bug(format!(
                "its token log is longer than its context of {most} tokens"
            )));
        }
        if !more {
            return Ok(all);
        }
    }
}

impl Slots for RemoteEngine {
    fn read(&self, view: View, group: u16, tokens: &Range<u64>, from: u64) -> Result<Vec<u8>> {
        let request = pb::ReadSlotsRequest {
            view: self.view(view),
            group: group.into(),
            from: tokens.start,
            to: tokens.end,
            read_from: from,
        };
        let slots = self.ask(
            self.limit,
            |mut c| async move { c.read_slots(request).await },
        )?;
        Ok(slots.data)
    }

    fn write(
        &self,
        view: View,
        group: u16,
        tokens: &Range<u64>,
        data: Option<Vec<u8>>,
    ) -> Result<()> {
        let View::Stage(stage) = view else {
            return Err(AdapterError::Caller("only a stage can be written"));
        };
        let request = pb::WriteSlotsRequest {
            stage: Some(self.stage(stage)),
            group: group.into(),
            from: tokens.start,
            to: tokens.end,
            data,
        };
        self.ask(
            self.limit,
            |mut c| async move { c.write_slots(request).await },
        )?;
        Ok(())
    }
}

impl EngineAdapter for RemoteEngine {
    fn capabilities(&self) -> Capabilities {
        self.capabilities.clone()
    }

    fn pool(&self, group: u16) -> Result<PoolInfo> {
        Ok(self.mirrors.group(group)?.info.clone())
    }

    fn pin(&self, request: RequestId, epoch: MigrationEpoch) -> Result<Pinned> {
        let key = self.key(request, epoch);
        let pinned = pinned_of(self.ask(self.limit, |mut c| async move { c.pin(key).await })?)?;
        self.mirrors
            .open(pinned.pin.into(), &pinned.first_live, 0)?;
        Ok(pinned)
    }

    fn unpin(&self, pin: PinId) -> Result<Released> {
        let request = self.pin_ref(pin);
        let released = self.ask(self.limit, |mut c| async move { c.unpin(request).await })?;
        self.mirrors.close(pin.into());
        Ok(Released {
            blocks: released.blocks,
        })
    }

    fn seal_through(&self, pin: PinId) -> Result<Sealed> {
        let request = self.pin_ref(pin);
        self.ask(
            self.limit,
            |mut c| async move { c.seal_through(request).await },
        )
        .map(sealed_of)
    }

    fn table(&self, view: View, group: u16, tokens: Range<u64>) -> Result<Vec<u32>> {
        self.mirrors.table(self, view, group, tokens)
    }

    fn token_log(&self, view: View, from: u64) -> Result<Vec<u32>> {
        let most = self.capabilities.max_context as usize;
        whole_log(most, from, |from| {
            let request = pb::TokenLogRequest {
                view: self.view(view),
                from,
            };
            let part = self.ask(
                self.limit,
                |mut c| async move { c.token_log(request).await },
            )?;
            Ok(part.tokens)
        })
    }

    fn hash_pages(
        &self,
        view: View,
        group: u16,
        pages: Range<u32>,
        upto_tokens: u64,
        out: &mut PageDigests,
    ) -> Result<()> {
        let size = u64::from(self.capabilities.header.page_tokens);
        let hashed = u64::from(pages.start) * size..(u64::from(pages.end) * size).min(upto_tokens);
        self.mirrors.send(self, view, hashed.end, &hashed)?;
        // Some thousand pages fill a message; leaves are most of it.
        for first in pages.clone().step_by(256) {
            let request = pb::HashPagesRequest {
                view: self.view(view),
                group: group.into(),
                first_page: first,
                end_page: pages.end.min(first.saturating_add(256)),
                upto_tokens,
            };
            let part = self.ask(
                self.limit,
                |mut c| async move { c.hash_pages(request).await },
            )?;
            pages_into(&part, out)?;
        }
        Ok(())
    }

    fn hash_tail(&self, view: View, upto_tokens: u64, out: &mut PageDigests) -> Result<()> {
        let size = u64::from(self.capabilities.header.page_tokens);
        let hashed = upto_tokens.saturating_sub(1) / size * size..upto_tokens;
        self.mirrors.send(self, view, upto_tokens, &hashed)?;
        let request = pb::HashTailRequest {
            view: self.view(view),
            upto_tokens,
        };
        let pages = self.ask(
            self.limit,
            |mut c| async move { c.hash_tail(request).await },
        )?;
        pages_into(&pages, out)
    }

    fn hold(
        &self,
        request: RequestId,
        epoch: MigrationEpoch,
        deadline: Instant,
    ) -> Result<Boundary> {
        let key = Some(self.key(request, epoch));
        let request = pb::HoldRequest {
            key,
            time_left_ns: left_ns(deadline),
        };
        boundary_of(self.ask(self.until(deadline), |mut c| async move {
            c.hold(request).await
        })?)
    }

    fn release_hold(&self, request: RequestId, epoch: MigrationEpoch) -> Result<()> {
        let key = self.key(request, epoch);
        self.ask(self.limit, |mut c| async move { c.release_hold(key).await })?;
        Ok(())
    }

    fn export_control(&self, view: View, owner_epoch: OwnerEpoch) -> Result<ControlExport> {
        let request = pb::ExportControlRequest {
            view: self.view(view),
            owner_epoch: owner_epoch.0,
        };
        let control = self.ask(self.limit, |mut c| async move {
            c.export_control(request).await
        })?;
        let digest = ControlDigest::of(&control.data, control.offset, owner_epoch);
        Ok(ControlExport {
            bytes: control.data,
            digest,
        })
    }

    fn export_state(&self, view: View, group: u16) -> Result<Vec<u8>> {
        let request = pb::ExportStateRequest {
            view: self.view(view),
            group: group.into(),
        };
        let state = self.ask(
            self.limit,
            |mut c| async move { c.export_state(request).await },
        )?;
        Ok(state.data)
    }

    fn retire(&self, request: RequestId, epoch: MigrationEpoch) -> Result<Released> {
        let key = self.key(request, epoch);
        let released = self.ask(self.limit, |mut c| async move { c.retire(key).await })?;
        Ok(Released {
            blocks: released.blocks,
        })
    }

    fn prepare_import(&self, spec: &ImportSpec) -> Result<StageId> {
        let request = super::wire::spec(self.capabilities.incarnation, spec);
        let stage = self.ask(self.limit, |mut c| async move {
            c.prepare_import(request).await
        })?;
        let stage = StageId(stage.stage);
        let opened = self
            .mirrors
            .open(stage.into(), &spec.first_live, spec.max_tokens);
        if let Err(e) = opened {
            // Without a mirror nothing could be landed; the engine's room is given back.
            self.abort_import(stage)?;
            return Err(e);
        }
        Ok(stage)
    }

    fn import_tokens(&self, stage: StageId, from: u64, tokens: &[u32]) -> Result<()> {
        let mut at = from;
        let mut rest = tokens;
        loop {
            let (part, more) = rest.split_at(rest.len().min(MAX_TOKENS));
            let request = pb::ImportTokensRequest {
                stage: Some(self.stage(stage)),
                from: at,
                tokens: part.to_vec(),
            };
            self.ask(
                self.limit,
                |mut c| async move { c.import_tokens(request).await },
            )?;
            if more.is_empty() {
                return Ok(());
            }
            (at, rest) = (at + part.len() as u64, more);
        }
    }

    fn stage_write(&self, stage: StageId, group: u16, tokens: Range<u64>) -> Result<WriteLease> {
        self.mirrors.write(self, stage.into(), group, tokens)
    }

    fn reopen(&self, stage: StageId, group: u16, tokens: Range<u64>) -> Result<()> {
        let request = pb::ReopenRequest {
            stage: Some(self.stage(stage)),
            group: group.into(),
            from: tokens.start,
            to: tokens.end,
        };
        self.ask(self.limit, |mut c| async move { c.reopen(request).await })?;
        Ok(())
    }

    fn commit_import(&self, stage: StageId, m: &Manifest) -> Result<()> {
        self.mirrors
            .send(self, stage.into(), m.kv_len, &(0..m.kv_len))?;
        let request = manifest(self.stage(stage), m);
        self.ask(
            self.limit,
            |mut c| async move { c.commit_import(request).await },
        )?;
        Ok(())
    }

    fn import_control(&self, stage: StageId, bytes: &[u8], owner_epoch: OwnerEpoch) -> Result<()> {
        let request = pb::ImportControlRequest {
            stage: Some(self.stage(stage)),
            data: bytes.to_vec(),
            owner_epoch: owner_epoch.0,
        };
        self.ask(self.limit, |mut c| async move {
            c.import_control(request).await
        })?;
        Ok(())
    }

    fn import_state(&self, stage: StageId, group: u16, bytes: &[u8]) -> Result<()> {
        let request = pb::ImportStateRequest {
            stage: Some(self.stage(stage)),
            group: group.into(),
            data: bytes.to_vec(),
        };
        self.ask(
            self.limit,
            |mut c| async move { c.import_state(request).await },
        )?;
        Ok(())
    }

    fn arm(&self, stage: StageId) -> Result<Armed> {
        let request = self.stage(stage);
        armed_of(&self.ask(self.limit, |mut c| async move { c.arm(request).await })?)
    }

    fn disarm(&self, stage: StageId) -> Result<Released> {
        let request = self.stage(stage);
        let released = self.ask(self.limit, |mut c| async move { c.disarm(request).await });
        self.ended(stage, released)
    }

    fn abort_import(&self, stage: StageId) -> Result<Released> {
        let request = self.stage(stage);
        let released = self.ask(
            self.limit,
            |mut c| async move { c.abort_import(request).await },
        );
        self.ended(stage, released)
    }

    fn activate(&self, stage: StageId, activation: Activation) -> Result<Activated> {
        let request = pb::ActivateRequest {
            stage: Some(self.stage(stage)),
            owner_epoch: activation.owner_epoch.0,
            reemit_from: activation.reemit_from,
        };
        let activated = self.ask(self.limit, |mut c| async move { c.activate(request).await })?;
        self.mirrors.close(stage.into());
        Ok(match activated.already {
            true => Activated::Already,
            false => Activated::Now {
                at_ns: activated.at_ns,
            },
        })
    }

    fn journal_checkpoint(&self, request: RequestId, deadline: Instant) -> Result<Checkpoint> {
        let request = pb::CheckpointRequest {
            incarnation: self.capabilities.incarnation.0,
            request: request.0.to_vec(),
            time_left_ns: left_ns(deadline),
        };
        let limit = self.until(deadline);
        checkpoint_of(self.ask(
            limit,
            |mut c| async move { c.journal_checkpoint(request).await },
        )?)
    }

    fn rebuild_from_journal(&self, i: &JournalImage) -> Result<Rebuilt> {
        let request = image(self.capabilities.incarnation, i);
        let limit = self.limit * 10;
        let rebuilt = self.ask(limit, |mut c| async move {
            c.rebuild_from_journal(request).await
        })?;
        Ok(Rebuilt {
            stage: StageId(rebuilt.stage),
            class: class_of(rebuilt.class),
            seal: rebuilt.seal,
        })
    }
}
